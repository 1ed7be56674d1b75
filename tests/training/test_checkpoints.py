"""Checkpoints: what is written comes back, all or nothing, and training goes on from it as if nothing had happened."""

import json
import resource
import shutil
import signal
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import loading
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO
from numpyro.infer.svi import SVIState

import npgp
from npgp.training.checkpoints import Checkpoints, Saved
from npgp.training.data import Data
from npgp.training.row_tables import RowState

KEY = random.key(0)
ABOUT = {"seed": [0, 1], "batch_size": 16}


class Moments(NamedTuple):
    count: jax.Array
    mu: dict


def some_state(key=KEY, number=1.0):
    """A state with everything that states have."""
    values = {"a": jnp.arange(3.0) * number, "flag": jnp.asarray(True), "none": jnp.zeros((0, 2))}
    tables = {"t": jnp.full((4, 2), number)}
    optim = RowState(
        (jnp.asarray(7), (values, Moments(jnp.asarray(7, jnp.int32), values))),
        tables,
        (tables, tables),
        {"t": jnp.asarray(False)},
    )
    return SVIState(optim, None, key)


def saved(number=1.0, steps=0):
    return Saved(some_state(number=number), np.arange(float(steps)), {})


def bits(x):
    x = np.asarray(random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    return str(x.dtype), x.shape, x.tobytes()


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert bits(x) == bits(y)


def folder_of(tmp_path, *steps, keep=5):
    """A folder with these checkpoints; numbers in the state are those of the steps."""
    checkpoints = Checkpoints(tmp_path / "run", keep=keep)
    assert checkpoints.open(some_state(), ABOUT) is None
    for step in steps:
        checkpoints.save(step, saved(float(step), step))
    checkpoints.close()
    return checkpoints


def steps_in(folder):
    """Of the checkpoints in a folder, which has nothing else."""
    return sorted(int(path.name.removeprefix("npgp_")) for path in folder.iterdir())


def restored(checkpoints, like=None, about=ABOUT):
    found = checkpoints.open(some_state() if like is None else like, about)
    checkpoints.close()
    return found


# ---------------------------------------------------------------------------------------------------------------
# Writing and reading


def test_all_bits_come_back(tmp_path, float64):
    rng = np.random.default_rng(0)
    kinds = ["bool", "int8", "uint8", "int32", "uint32", "int64", "float16", "float32", "float64", "complex64"]
    arrays = {kind: jnp.asarray(rng.integers(0, 2, (3, 2)).astype(kind)) for kind in [*kinds, "bfloat16"]}
    for kind in ("float32", "float64"):
        tiny = np.nextafter(np.zeros((), kind), np.ones((), kind))
        arrays[f"odd {kind}"] = jnp.asarray(np.array([np.nan, -np.nan, np.inf, -0.0, tiny, 1 / 3], kind))
    arrays |= {"scalar": jnp.asarray(0.1), "empty": jnp.zeros((0, 3)), "large": jnp.asarray(rng.normal(size=(500, 40)))}
    state = some_state()._replace(mutable_state=arrays)
    monitor = {"best.0": np.float64(np.pi) * np.ones(()), "f.u/loc $": np.arange(3), "none": np.zeros(0, np.int64)}
    losses = rng.normal(size=1000).astype(np.float32)
    checkpoints = Checkpoints(tmp_path / "a" / "b")  # makes folders
    assert checkpoints.open(state, ABOUT) is None
    checkpoints.save(1000, Saved(state, losses, monitor))
    found = restored(checkpoints, jax.tree.map(jnp.zeros_like, state._replace(rng_key=None))._replace(rng_key=KEY))
    assert_same_bits(found.state, state)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(found.state))
    assert bits(found.losses) == bits(losses)
    assert found.snapshots.keys() == monitor.keys()
    for name, value in monitor.items():
        assert bits(found.snapshots[name]) == bits(value)


@pytest.mark.parametrize("key", [random.PRNGKey(3), random.key(3, impl="rbg")], ids=["raw", "rbg"])
def test_random_keys_go_on(tmp_path, key):
    checkpoints = Checkpoints(tmp_path)
    state = some_state(key)
    assert checkpoints.open(state, ABOUT) is None
    checkpoints.save(1, Saved(state, np.zeros(1), {}))
    found = restored(
        checkpoints, some_state(jax.tree.map(jnp.zeros_like, key) if key.ndim else random.key(0, impl="rbg"))
    )
    assert found.state.rng_key.dtype == key.dtype
    np.testing.assert_array_equal(random.normal(found.state.rng_key, 3), random.normal(key, 3))


def test_arrays_are_copied_before_save_returns(tmp_path):
    """The next steps write over them."""
    checkpoints = Checkpoints(tmp_path)
    table = np.ones((2000, 50), np.float32)
    assert checkpoints.open({"t": table}, ABOUT) is None
    checkpoints.save(1, Saved({"t": table}, table[0], {"best.0": table[0]}))
    table[:] = 2.0
    found = restored(checkpoints, {"t": table})
    for x in (found.state["t"], found.losses, found.snapshots["best.0"]):
        np.testing.assert_array_equal(x, 1.0)
    # Device memory that is donated afterwards.
    checkpoints = Checkpoints(tmp_path / "device")
    state = {"t": jnp.ones((2000, 50))}
    assert checkpoints.open(state, ABOUT) is None
    checkpoints.save(1, Saved(state, np.zeros(1), {}))
    jax.block_until_ready(jax.jit(lambda x: x + 1.0, donate_argnums=0)(state.pop("t")))
    np.testing.assert_array_equal(restored(checkpoints, {"t": jnp.zeros((2000, 50))}).state["t"], 1.0)


def test_the_newest_are_kept(tmp_path):
    for keep in (1, 3):
        checkpoints = folder_of(tmp_path / str(keep), 9, 10, 100, 1000, keep=keep)
        assert steps_in(checkpoints.directory) == [9, 10, 100, 1000][-keep:]
        found = restored(checkpoints)
        assert len(found.losses) == 1000
        assert_same_bits(found.state, some_state(number=1000.0))


def test_when_a_checkpoint_is_due(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("npgp.training.checkpoints.time.monotonic", lambda: now[0])
    by_time = Checkpoints(tmp_path / "time", every=60.0)
    assert by_time.open(some_state(), ABOUT) is None
    assert by_time.until(5) is None
    now[0] += 59.0
    assert not by_time.due(5)
    now[0] += 1.0
    assert by_time.due(5)
    by_time.save(5, saved())
    assert not by_time.due(6)
    now[0] += 60.0
    assert by_time.due(6) and not by_time.due(5)  # which is there
    by_time.close()

    by_steps = Checkpoints(tmp_path / "steps", steps=10)
    assert by_steps.open(some_state(), ABOUT) is None
    assert [by_steps.until(step) for step in (0, 1, 9, 10, 25)] == [10, 9, 1, 10, 5]
    assert [by_steps.due(step) for step in (1, 10, 15, 20)] == [False, True, False, True]
    by_steps.save(10, saved())
    assert not by_steps.due(10)
    by_steps.save(10, saved(2.0))  # once is enough
    by_steps.close()
    assert_same_bits(restored(by_steps).state, some_state())
    with pytest.raises(RuntimeError, match="open first"):
        by_steps.save(11, saved())


@pytest.mark.parametrize(
    "about, message",
    [
        ({**ABOUT, "batch_size": 32}, "run with batch_size = 16, and this one has 32. Choose another folder"),
        ({**ABOUT, "seed": (0, 2)}, r"run with seed = \[0, 1\], and this one has \[0, 2\]"),
        ({**ABOUT, "rows": 5}, "run with rows = 'missing', and this one has 5"),
    ],
)
def test_settings_of_another_run(tmp_path, about, message):
    checkpoints = folder_of(tmp_path, 10)
    with pytest.raises(ValueError, match=message):
        checkpoints.open(some_state(), about)
    assert len(restored(checkpoints).losses) == 10  # it is still there


def test_states_of_another_model(tmp_path, float64):
    state = {"a": jnp.zeros((3, 2), jnp.float32), "b": jnp.zeros(2)}
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.open(state, ABOUT) is None
    checkpoints.save(1, Saved(state, np.zeros(1), {}))
    for like, message in [
        (
            {**state, "a": jnp.zeros((3, 3), jnp.float32)},
            r"state\['a'\] = 'float32\[3,2\]', and this one has 'float32\[3,3\]'",
        ),
        ({**state, "a": jnp.zeros((3, 2))}, r"state\['a'\] = 'float32\[3,2\]', and this one has 'float64\[3,2\]'"),
        ({"a": state["a"]}, r"state\['b'\] = 'float64\[2\]', and this one has 'missing'"),
        ({**state, "c": jnp.zeros(())}, r"state\['c'\] = 'missing', and this one has 'float64\[\]'"),
    ]:
        with pytest.raises(ValueError, match=message):
            checkpoints.open(like, ABOUT)


def largest(folder):
    """The file of a checkpoint that has the arrays."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flipped(folder):
    """The content of the largest file is not compressed where it is random: no code of Orbax's would notice."""
    path = largest(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncated(folder):
    path = largest(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_a_file(folder):
    largest(folder).unlink()


def of_another(folder):
    """The header of one checkpoint and the arrays of another one of the same sizes."""
    shutil.rmtree(folder / "arrays")
    shutil.copytree(folder.with_name("npgp_10") / "arrays", folder / "arrays")


def of_another_header(folder):
    path = folder / "header" / "metadata"
    path.write_text(path.read_text().replace('"batch_size": 16', '"batch_size": 17'))


@pytest.mark.parametrize("damage", [flipped, truncated, without_a_file, of_another, of_another_header])
def test_a_damaged_checkpoint_is_not_returned(tmp_path, damage):
    def random(number):
        return some_state()._replace(mutable_state=jnp.asarray(np.random.default_rng(number).normal(size=(50, 50))))

    checkpoints = Checkpoints(tmp_path / "run", keep=5)
    assert checkpoints.open(random(0), ABOUT) is None
    for step in (10, 20):
        checkpoints.save(step, Saved(random(step), np.arange(float(step)), {}))
    checkpoints.close()
    last = checkpoints.directory / "npgp_20"
    damage(last)
    with pytest.warns(UserWarning, match=r"step 20 in .* is damaged and is now called 'npgp_20.damaged'; .* step 10"):
        assert checkpoints.open(random(0), ABOUT).losses.shape == (10,)
    assert last.with_name("npgp_20.damaged").is_dir()
    # Its number is free again, and the next one that is damaged gets a name of its own.
    checkpoints.save(20, Saved(random(3), np.arange(20.0), {}))
    assert_same_bits(restored(checkpoints, random(0)).state, random(3))
    damage(last)
    with pytest.warns(UserWarning, match="now called 'npgp_20.damaged1'"):
        restored(checkpoints, random(0))
    truncated(checkpoints.directory / "npgp_10")
    with pytest.raises(ValueError, match="None of the checkpoints in .* can be read: they are damaged"):
        checkpoints.open(random(0), ABOUT)
    assert (checkpoints.directory / "npgp_10").exists()


def test_what_cannot_be_read_now_is_not_damaged(tmp_path, monkeypatch):
    checkpoints = folder_of(tmp_path, 10, 20)

    def fails(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_read", fails)
        with pytest.raises(MemoryError):
            checkpoints.open(some_state(), ABOUT)
    assert len(restored(checkpoints).losses) == 20 and steps_in(checkpoints.directory) == [10, 20]


def test_nothing_else_in_the_folder_is_touched(tmp_path):
    """What a killed process left unfinished is."""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="'.*file', is a file"):
        Checkpoints(tmp_path / "file").open(some_state(), ABOUT)
    others = ["2024/thesis.tex", "7/header/metadata", "9.orbax-checkpoint-tmp/x", "npgp_5x/x", "1.txt"]
    unfinished = "npgp_30.orbax-checkpoint-tmp/arrays/x"
    for name in (*others, unfinished):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("mine")
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    for step in (8, 2024, 2025):
        checkpoints.open(some_state(), ABOUT)
        checkpoints.save(step, saved(float(step), step))
        checkpoints.close()
    assert all((tmp_path / "run" / name).read_text() == "mine" for name in others)
    folders = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
    assert folders == {"2024", "7", "9.orbax-checkpoint-tmp", "npgp_5x", "npgp_2025"}


def test_another_version(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("npgp.training.checkpoints.VERSION", 99)
        checkpoints = folder_of(tmp_path, 10)
    with pytest.raises(ValueError, match="have version 99 of their format; this npgp reads 1"):
        checkpoints.open(some_state(), ABOUT)


@pytest.mark.parametrize("options", [dict(every=0.0), dict(steps=0), dict(keep=0), dict(every=np.nan)])
def test_bad_arguments(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
        Checkpoints("run", **options)


def test_without_orbax(monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"npgp.training.Checkpoints needs orbax: pip install npgp\[checkpoints\]"):
        Checkpoints("run")


# ---------------------------------------------------------------------------------------------------------------
# Training that is interrupted

N, STEPS = 60, 60
X = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
Y = X @ np.array([1.0, -2.0], np.float32)


def weights_model(X, y, rows):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", N, subsample_size=len(X)):
        shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(X @ w + shift, 0.3), obs=y)


def weights_guide(X, y, rows):
    loc = numpyro.param("loc", jnp.zeros(2))
    numpyro.sample("w", dist.Normal(loc, 0.1).to_event(1))
    table = npgp.model.row_param("table", np.zeros((N, 1), np.float32), rows)
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("shift", dist.Normal(table[:, 0], 0.1))


def train(num_steps=STEPS, at=None, happens=None, kind="rows", every=8, **options):
    """Train afresh, as another process would; something happens in the evaluation after ``at`` steps."""

    def metric(params):
        if len(monitor.history) + 1 == (at or 0) / every:
            happens()
        return np.sum(np.square(params["loc"] - 0.5)) + np.sum(params["table"])

    monitor = npgp.training.Monitor(metric, every=every)
    svi = SVI(weights_model, weights_guide, npgp.adam(0.05, STEPS), Trace_ELBO())
    options = {"batch_size": 16, "indices": "rows", "progress": False, "monitor": monitor, **options}
    if kind == "rows":
        options["row_optim"] = npgp.training.row_adam(0.05, STEPS)
    return npgp.fit(svi, KEY, num_steps, X, y=Y, **options), monitor


def assert_same_training(a, b):
    assert_same_bits(tuple(a[0]), tuple(b[0]))
    assert a[1].history == b[1].history
    assert a[1].best[:2] == b[1].best[:2]
    assert_same_bits(a[1].best.params, b[1].best.params)


@pytest.fixture(scope="module", params=["rows", "dense"])
def whole(request):
    """A training that nothing happens to."""
    return train(kind=request.param), request.param


class Crash(Exception):
    pass


def crash():
    raise Crash


@pytest.fixture
def python_handles_interrupts():
    """As where the shell that started the tests has not told them to ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("whole", ["rows"], indirect=True)
def test_after_a_crash_training_goes_on(tmp_path, whole):
    """From the checkpoint before it; with the same bits in the end, however steps are cut into calls."""
    whole, kind = whole
    options = dict(kind=kind, checkpoints=Checkpoints(tmp_path, steps=5), steps_per_call=7)
    for at, newest in ((24, 20), (40, 35)):  # where both are due, evaluation comes first
        with pytest.raises(Crash):
            train(at=at, happens=crash, **options)
        assert max(steps_in(tmp_path)) == newest
    assert_same_training(train(**options), whole)
    # At the end there is nothing to do, or more.
    assert_same_training(train(at=8, happens=crash, **options), whole)
    more, monitor = train(STEPS + 4, **options)
    assert len(more.losses) == STEPS + 4 and monitor.history[-1][0] == STEPS + 4
    np.testing.assert_array_equal(more.losses[:STEPS], whole[0].losses)


@pytest.mark.parametrize("whole, number", [("rows", signal.SIGINT), ("dense", signal.SIGTERM)], indirect=["whole"])
def test_signals_save_and_stop(tmp_path, whole, number, python_handles_interrupts):
    """Whatever the process is at: an evaluation that is broken off takes place when training goes on."""
    whole, kind = whole
    options = dict(kind=kind, checkpoints=Checkpoints(tmp_path, every=1e6), steps_per_call=4)

    def stop():
        signal.raise_signal(number)

    if number == signal.SIGINT:
        with pytest.warns(UserWarning, match="32 of 60 steps were taken. They are saved: the same call goes on"):
            part, _ = train(at=32, happens=stop, **options)
        np.testing.assert_array_equal(part.losses, whole[0].losses[:32])
    else:
        with pytest.raises(SystemExit) as caught:
            train(at=32, happens=stop, **options)
        assert caught.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    assert steps_in(tmp_path) == [32]
    assert_same_training(train(**options), whole)


def test_an_interrupt_while_it_saves(tmp_path, python_handles_interrupts, monkeypatch):
    """Saving waits for the checkpoint before."""
    real, options = Checkpoints.finish, dict(kind="dense", checkpoints=Checkpoints(tmp_path, steps=10))

    def interrupted(at):
        def finish(self):
            if self._pending is not None and self._pending[0] == at:
                signal.raise_signal(signal.SIGINT)
            return real(self)

        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "finish", finish)
            return train(30, **options)

    with pytest.warns(UserWarning, match="20 of 30 steps were taken. They are saved"):
        interrupted(at=10)
    # At the very end, while the last one is written: nothing is lost.
    with pytest.warns(UserWarning, match="30 of 30 steps were taken. They are saved"):
        result, _ = interrupted(at=30)
    again, monitor = train(30, **options)
    assert_same_bits(tuple(again), tuple(result))
    assert [step for step, _ in monitor.history] == [8, 16, 24]


def test_a_full_disk_does_not_stop_training(tmp_path, whole, monkeypatch):
    whole, kind = whole
    options = dict(kind=kind, checkpoints=Checkpoints(tmp_path, steps=20), steps_per_call=7)
    real, limit = Checkpoints._write, resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def write(self, step, *args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 if step > 20 else limit[1], limit[1]))
        try:
            real(self, step, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_write", write)
        with pytest.warns(UserWarning, match=r"checkpoint of step (40|60) .*failed; training goes on") as said:
            assert_same_training(train(**options), whole)
    signal.signal(signal.SIGXFSZ, before)
    assert len(said) == 2
    assert_same_training(train(**options), whole)
    assert steps_in(tmp_path) == [40, 60]


def test_early_stopping_is_remembered(tmp_path):
    """A training that stopped, and was run again, stays where it is."""
    checkpoints = Checkpoints(tmp_path)
    svi = SVI(lambda: numpyro.factor("f", numpyro.param("a", 0.0)), lambda: None, optax.sgd(1.0), Trace_ELBO())
    for _ in range(2):
        monitor = npgp.training.Monitor(lambda params: abs(float(params["a"]) - 6.0), every=3, patience=2)
        result = npgp.fit(svi, KEY, 50, monitor=monitor, checkpoints=checkpoints, progress=False)
        assert len(result.losses) == result.params["a"] == 12
        assert monitor.best == (6, 0.0, {"a": 6.0}) and monitor.stopped


@pytest.mark.parametrize("steps", [3, 5])
def test_nan_leaves_a_good_checkpoint(tmp_path, steps, monkeypatch):
    """The newest one is finite, is from before the bad step, and training can go on from it."""

    def svi(bad):
        def model():
            a = numpyro.param("a", 0.0)
            numpyro.factor("f", jnp.where(bad & (a > 10.5), jnp.nan, a))

        return SVI(model, lambda: None, optax.sgd(1.0), Trace_ELBO())

    options = dict(checkpoints=Checkpoints(tmp_path, steps=steps), progress=False)
    with pytest.raises(npgp.training.NonFiniteLossError) as caught:
        npgp.fit(svi(True), KEY, 50, **options)
    assert caught.value.step == 11 and float(caught.value.result.params["a"]) == 10
    assert max(steps_in(tmp_path)) == 11 // steps * steps
    monkeypatch.setattr(jax, "__version__", "another")  # or it would be refused, as another model
    with pytest.warns(UserWarning, match="steps computed something else"):
        result = npgp.fit(svi(False), KEY, 20, **options)
    assert float(result.params["a"]) == 20
    np.testing.assert_array_equal(result.losses, -np.arange(20.0))


def other_rows(x, rows):
    x = x.copy()
    x[rows] += 1.0
    return x


def words(*args, **kwargs):
    return Data(args, kwargs, KEY, 16, None).described()


def test_words_of_other_data():
    same = words(X, y=Y, name="a", f=np.sin)
    assert same.keys() == {"args[0]", "argument 'y'", "argument 'name'", "argument 'f'"}
    assert words(jnp.asarray(X), y=Y, name="a", f=np.cos) == same  # of functions the kind alone
    for options, name in (
        (dict(X=other_rows(X, 33)), "args[0]"),
        (dict(y=other_rows(Y, [59])), "argument 'y'"),
        (dict(y=Y.astype(np.float16)), "argument 'y'"),
        (dict(X=np.repeat(X, 2, axis=1)), "args[0]"),
        (dict(name="b"), "argument 'name'"),
    ):
        options = dict(X=X, y=Y, name="a", f=np.sin) | options
        other = words(options.pop("X"), **options)
        assert [key for key in other if other[key] != same[key]] == [name]


def test_large_data_are_known_by_some_rows(tmp_path, monkeypatch):
    """A map of a file, an array on the device and one on the host alike; the first and the last row are looked at."""
    monkeypatch.setattr("npgp.training.data.MAX_BYTES_CHECKED", 2**20)
    x = np.random.default_rng(0).normal(size=(2**16, 8)).astype(np.float32)
    np.save(tmp_path / "x", x)
    kinds = [x, jnp.asarray(x), np.load(tmp_path / "x.npy", mmap_mode="r"), x.astype(">f4"), x.astype(np.float64)]
    found = [words(kind) for kind in kinds]
    assert found == found[:1] * 5 and found[0]["args[0]"].startswith("float32[65536,8] ")
    for row in (0, -1):
        assert words(other_rows(x, row)) != found[0]


def test_another_run_is_refused(tmp_path):
    """In a sentence; another model, rate or ELBO is said; and the same goes on."""
    checkpoints = Checkpoints(tmp_path)

    def run(num_steps=1, rate=0.01, elbo=Trace_ELBO, x=1.0, prior=dist.Normal, name="a"):
        def model(x):
            numpyro.sample("y", prior(numpyro.param(name, 0.0), 1.0), obs=x)

        svi = SVI(model, lambda x: None, npgp.adam(rate), elbo())
        return npgp.fit(svi, KEY, num_steps, np.array(x), progress=False, checkpoints=checkpoints).losses

    first = run()
    for options, words in (
        (dict(x=2.0), r"a run with args\[0\] = 'float32\[\] \w{8}', and this one has 'float32\[\] \w{8}'"),
        (dict(prior=dist.Cauchy), "a run whose model, guide or ELBO computed something else; they must be the same"),
        (dict(elbo=RenyiELBO), "a run whose model, guide or ELBO"),
        (
            dict(name="b"),
            r"a run with state.*\['a'\] = 'float32\[\]', and this one has 'missing'",
        ),
    ):
        with pytest.raises(ValueError, match=f"are of {words}.* Choose another folder to start afresh"):
            run(**options)
    for options in (dict(rate=0.02), dict(elbo=lambda: Trace_ELBO(num_particles=2))):
        with pytest.warns(
            UserWarning, match="a run whose steps computed something else: its optimizer.* Training goes on"
        ):
            run(**options)
    second = run(2)
    assert second[0] == first[0] and len(second) == 2
    with pytest.warns(UserWarning, match="num_steps is 1, and the checkpoints have 2 steps: none is taken"):
        np.testing.assert_array_equal(run(1), second)


def test_sources_of_other_data_are_refused(tmp_path):
    def stream(value):
        return npgp.training.Stream([(np.full(4, value, np.float32),)] * 3)

    svi = SVI(lambda y: numpyro.factor("f", numpyro.param("a", 0.0)), lambda y: None, optax.sgd(1.0), Trace_ELBO())
    options = dict(checkpoints=Checkpoints(tmp_path), progress=False)
    for value in (1.0, 1.0):
        assert len(npgp.fit(svi, KEY, 3, stream(value), **options).losses) == 3
    with pytest.raises(ValueError, match=r"are of a run with args\[0\]: batch 0"):
        npgp.fit(svi, KEY, 3, stream(1000.0), **options)


@pytest.mark.slow
def test_kills(tmp_path):
    """At random moments; the script says in detail what happened, and kills 20 times if not told otherwise."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, loading.path("kill_test"), "--kills", "2", "--json", report], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report.read_text())
    assert report["kills"] == 2 and report["lost_or_torn"] == 0 and report["different"] == []
    assert report["last_taken_up"] > 0 and report["arrays"] > 15
