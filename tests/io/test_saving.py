"""Files of posteriors and the rest: everything comes back, bit by bit, and nothing else does."""

import dataclasses
import errno
import functools
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tracemalloc
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npgp import kernels, likelihoods
from npgp.collapsed import CollapsedGP
from npgp.features import Activations, LeakyReLU, Points, Probit, ReLU, Softplus, SphericalHarmonics
from npgp.io.saving import load, save
from npgp.pytrees import pytree
from npgp.sparse.groups import median_split
from npgp.sparse.projection import Projector
from npgp.variational import DenseNormal, DiagonalNormal, MeanOnlyNormal, WhitenedPrior
from npgp.variational.posterior import Decomposition, Paths, Posterior


def assert_same(a, b):
    """Same types, values and bits throughout, whatever it is made of."""
    assert type(a) is type(b)
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        assert a.dtype == b.dtype
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    if isinstance(a, (jax.Array, np.ndarray, np.generic)):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif dataclasses.is_dataclass(a) or isinstance(a, dist.Distribution):
        leaves = [jax.tree.flatten(x, is_leaf=lambda leaf: leaf is None) for x in (a, b)]
        assert leaves[0][1] == leaves[1][1]  # static fields
        assert_same(leaves[0][0], leaves[1][0])
    elif isinstance(a, float):
        assert a.hex() == b.hex()
    else:
        assert a == b


def round_trip(obj, folder, classes=()):
    path = folder / "object.npz"
    save(path, obj)
    loaded = load(path, classes)
    assert_same(obj, loaded)
    return loaded


# ---------------------------------------------------------------- what comes back

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
ARRAYS = st.builds(
    lambda dtype, shape, seed: np.frombuffer(
        np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype
    ).reshape(shape),
    st.sampled_from(["f2", "f4", "f8", ">f8", "c8", "c16", "i1", "i8", "u4"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 100),
)


@given(
    st.recursive(
        SCALARS | ARRAYS | ARRAYS.filter(lambda a: a.ndim == 0).map(lambda a: a[()]),
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
        max_leaves=6,
    )
)
def test_plain_objects_come_back(tmp_path_factory, obj):
    round_trip(obj, tmp_path_factory.getbasetemp())


def test_jax_arrays_come_back(x64, tmp_path):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(2, 3)), dtype) for dtype in (jnp.float16, jnp.float32, x64)]
    keys = [jax.random.key(3), jax.random.split(jax.random.key(4, impl="rbg")), jax.random.PRNGKey(5)]
    weak = [jnp.asarray(0.1), jnp.asarray(3), jnp.asarray(True)]
    assert weak[0].weak_type
    round_trip((arrays, keys, weak, np.float64(0.1), jnp.zeros((0, 2)), np.asfortranarray(np.eye(3)[:2])), tmp_path)


KERNEL = (
    2.0
    * (kernels.RBF(0.7, variance=np.float32(1.3), active_dims=(0,)) + kernels.Constant(variance=np.ones(())))
    * kernels.Linear()
)


def objects(dtype):
    """One of everything that is meant to be saved."""
    array = jnp.asarray([[0.1, 0.2], [0.3, 0.4]], dtype)
    blocks = (
        DenseNormal(array, jnp.broadcast_to(jnp.eye(2, dtype=dtype), (2, 2, 2))),
        DiagonalNormal(array, array),
        MeanOnlyNormal(array[0]),
    )
    projector = Projector(KERNEL, (Points(array),), (array,), ((),), (jnp.zeros((), dtype),))
    spherical = (
        SphericalHarmonics((0, 2), 3),
        *(Activations(array, s, (1, 4)) for s in (ReLU(), LeakyReLU(0.1), Softplus(jnp.asarray(2.0, dtype)), Probit())),
    )
    return {
        "kernel": KERNEL,
        "points": Points(array, name="Z"),
        "blocks": blocks,
        "spherical": (spherical, 2.0 * kernels.ZonalMatern32(array[0, 0]), kernels.ZonalArcCosine(0, degree=0)),
        "batch": jax.vmap(lambda a: MeanOnlyNormal(a))(array),  # batched by JAX, unknown to the object
        "prior": WhitenedPrior(3),
        "likelihoods": [
            likelihoods.Gaussian(variance=0.1),
            likelihoods.StudentT(df=4.0, scale=array),
            likelihoods.Bernoulli("probit"),
        ],
        "collapsed": CollapsedGP(KERNEL, array, [array], noise_variance=0.1, conditional="prior"),
        "posterior": Posterior(projector, blocks[:1]),
        "paths": Paths(projector, (array, 0.5), array, (array,), 3),
        "parts": Decomposition(("principal", "residual"), array, array),
        "groups": median_split(np.arange(7.0)[:, None], 3),
        # A gradient has the structure of a kernel, not its constraints.
        "gradient": jax.grad(lambda k: -k.variance * 1.0)(kernels.RBF(1.0, variance=2.0)),
    }


def test_objects_of_the_library_come_back(x64, tmp_path):
    round_trip(objects(x64), tmp_path)


@pytree
@dataclass(frozen=True)
class Doubled(kernels.Kernel):
    inner: kernels.Kernel
    note: str = field(default="twice", metadata={"static": True})
    factor: float = field(default=2.0, init=False)  # of the class, and not in the file

    def __call__(self, X, X2=None):
        return 2.0 * self.inner(X, X2)


def test_classes_of_ones_own_come_back_if_named(tmp_path):
    obj = Doubled(kernels.RBF(0.5))
    loaded = round_trip(obj, tmp_path, classes=[Doubled])
    assert loaded.factor == 2.0 and "factor" not in vars(loaded)
    with pytest.raises(ValueError, match=r"class test_saving.Doubled, which npgp does not have.*classes=\[Doubled\]"):
        load(tmp_path / "object.npz")


@pytree
@dataclass(frozen=True)
class Wave:
    frequency: float = 3.0

    def __call__(self, t):
        return jnp.sin(self.frequency * t)


def test_shapes_of_ones_own_come_back_if_named(float64, tmp_path):
    block = round_trip(Activations(np.eye(3), Wave(2.0), range(3)), tmp_path, classes=[Wave])
    unchanged = Activations(np.eye(3), lambda t: np.sin(2.0 * t), range(3))
    grams = [b.gram(kernels.ZonalArcCosine()) for b in (block, unchanged)]
    np.testing.assert_allclose(*grams, atol=1e-12)
    with pytest.raises(ValueError, match=r"class test_saving.Wave, which npgp does not have.*classes=\[Wave\]"):
        load(tmp_path / "object.npz")


def posterior_and_inputs(dtype):
    """Two blocks and three outputs, with whatever numbers; the hyperparameters weakly typed, as from ``jit``."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(6, 2)).astype(dtype)
    L, cross, means = (jnp.asarray(rng.uniform(size=shape), dtype) for shape in ((4, 4), (4, 2), (3, 4)))
    projector = Projector(
        kernels.Matern32(jnp.asarray(0.4), variance=1.2),
        (Points(X[:4]), Points(X[4:])),
        (jnp.tril(L) + jnp.eye(4, dtype=dtype), jnp.eye(2, dtype=dtype)),
        ((), (cross,)),
        (jnp.zeros((), dtype), 0.0),
    )
    return Posterior(projector, (DenseNormal(means, jnp.tril(L)), MeanOnlyNormal(means[:, :2]))), X


#: One entry for each time that JAX has traced :func:`predictions`.
TRACED = []


@jax.jit
def predictions(posterior, X):
    TRACED.append(posterior)
    return posterior.mean_and_variance(X), posterior.covariance(X), posterior.kl()


def test_predictions_are_the_same_bits(float64, tmp_path):
    posterior, X = posterior_and_inputs(float64)
    loaded = round_trip(posterior, tmp_path)
    TRACED.clear()
    assert_same(predictions(posterior, X), predictions(loaded, X))
    # Not traced again: to JAX it is the same object. (Its cache of fast calls may be full, and know of neither.)
    assert len(TRACED) == 1
    TRACED.clear()


SCRIPT = """
import sys
import jax
from npgp.io.saving import load, save
posterior, paths, X = load(sys.argv[1])
save(sys.argv[2], jax.jit(lambda p, paths, X: (p.mean_and_variance(X), paths(X)))(posterior, paths, X))
"""


def test_predictions_and_paths_are_the_same_bits_in_another_process(tmp_path):
    posterior, X = posterior_and_inputs(np.float32)
    paths = jax.jit(lambda p: p.draw_functions(jax.random.key(0), 2, num_features=3))(posterior)
    files = [tmp_path / "posterior.npz", tmp_path / "predictions.npz"]
    save(files[0], (posterior, paths, X))
    subprocess.run([sys.executable, "-c", SCRIPT, *files], check=True, timeout=300)
    predict = jax.jit(lambda p, paths, X: (p.mean_and_variance(X), paths(X)))
    assert_same(load(files[1]), predict(posterior, paths, X))


# ---------------------------------------------------------------- what cannot be saved


FACTORIZED = likelihoods.Factorized(dist.Poisson)


@pytest.mark.parametrize(
    "obj, message",
    [
        ({"fit": [1, functools.partial(abs, 3)]}, r"dict\['fit'\]\[1\] is a partial, which cannot be saved"),
        (FACTORIZED, r"factorized.fn is the class Poisson, which cannot be saved"),
        (dataclasses.replace(FACTORIZED, fn=lambda f: f), r"factorized.fn is the function <lambda>"),
        (Activations(np.eye(3), np.cos), r"activations.shape is a Partial, .* a dataclass with __call__ can take its"),
        (Activations(np.eye(3), lambda t: t**2), r"shape is the function <lambda>, .* a dataclass with __call__ can"),
        (Doubled(kernels.Sum((np.array([None]),))), r"doubled.inner.kernels\[0\] is an array of object"),
        ((np.array(["a"]),), r"tuple\[0\] is an array of <U1"),
        ([np.zeros(2, jnp.bfloat16)], r"list\[0\] is an array of bfloat16"),
        ({"a": {1: 2}}, r"dict\['a'\] has the key 1"),
        ({1, 2}, "set is a set"),
        (np.ma.array([1.0]), "maskedarray is a MaskedArray"),
    ],
    ids=["partial", "class", "function", "ufunc", "shape", "objects", "strings", "bfloat16", "keys", "set", "masked"],
)
def test_what_cannot_be_saved_is_named_and_leaves_no_file(tmp_path, obj, message):
    with pytest.raises(TypeError, match=message):
        save(tmp_path / "object.npz", obj)
    assert not list(tmp_path.iterdir())


def test_traced_arrays_are_refused(tmp_path):
    def f(x):
        save(tmp_path / "object.npz", {"kernel": kernels.RBF(x)})
        return x

    with pytest.raises(TypeError, match=r"dict\['kernel'\].lengthscale is traced by JAX"):
        jax.jit(f)(1.0)


def test_what_contains_itself_is_refused(tmp_path):
    itself = []
    itself.append({"a": itself})
    with pytest.raises(TypeError, match="list contains itself, or is nested too deeply"):
        save(tmp_path / "object.npz", itself)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, 3, 3.5, b"file"])
def test_paths_are_names(path):
    for call in (lambda: save(path, 1), lambda: load(path)):
        with pytest.raises(TypeError, match=r"path is .*; it must be the name of a file"):
            call()


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, happened = tmp_path / "saved", []
    sync, replace = os.fsync, os.replace

    def fsync(file):
        sync(file)
        happened.append(("written", os.fstat(file).st_size, path.exists()))

    def rename(source, target):
        replace(source, target)
        happened.append(("named", os.path.getsize(target), True))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    save(path, {"a": np.arange(10_000)})
    size = path.stat().st_size
    assert happened == [("written", size, False), ("named", size, True)] and size > 10_000


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "posterior"  # the name is used as it is
    save(path, 1)
    save(path, 2)
    assert load(path) == 2 and list(tmp_path.iterdir()) == [path]

    def full(*args, **kwargs):
        args[0].write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space left"):
        save(path, 3)
    assert load(path) == 2 and list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------- what cannot be loaded


def write(path, description, **arrays):
    text = json.dumps(description).encode()
    with open(path, "wb") as file:
        np.savez(file, npgp=np.frombuffer(text, np.uint8), **arrays)


@pytest.mark.parametrize("kind", ["empty", "text", "npy", "pickle", "npz", "zip of ours", "cut", "flipped"])
def test_other_files_are_refused(tmp_path, kind):
    path, other = tmp_path / "object.npz", tmp_path / "other"
    save(path, np.arange(1000.0))
    content = bytearray(path.read_bytes())
    if kind == "npy":
        with open(other, "wb") as file:
            np.save(file, np.ones(3))
    elif kind == "pickle":
        with open(other, "wb") as file:
            np.savez(file, npgp=np.array([{"format": "npgp"}], dtype=object))
    elif kind == "npz":
        with open(other, "wb") as file:
            np.savez(file, X=np.ones(3))
    elif kind == "zip of ours":
        write(other, {"format": "other", "version": 1, "content": None})
    else:
        content[len(content) // 2] ^= 1
        other.write_bytes({"empty": b"", "text": b"mean, 3.1\n", "cut": content[:500], "flipped": content}[kind])
    with pytest.raises(ValueError, match=r"other' is damaged, or no file that npgp.save wrote"):
        load(other)


def test_a_missing_file_is_called_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.npz"):
        load(tmp_path / "nothing.npz")
    with pytest.raises(ValueError, match="is a folder; load takes the name of a file"):
        load(tmp_path)


def test_other_errors_of_reading_are_not_damage(tmp_path, monkeypatch):
    save(tmp_path / "a", np.ones(3))
    for error in (OSError(errno.EIO, "input/output error"), MemoryError()):

        def fails(*args, error=error, **kwargs):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(np.lib.format, "read_array", fails)
            with pytest.raises(type(error)):
                load(tmp_path / "a")
    assert load(tmp_path / "a").shape == (3,)


def peak_of(call):
    """Bytes of memory that NumPy and Python take for a call, at most, and what it returned or raised."""
    tracemalloc.start()
    try:
        result = call()
    except ValueError as error:
        result = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak, result


def test_small_files_do_not_fill_the_memory(tmp_path):
    """Arrays that the description does not name are not read, and others not before their size is known to be right."""
    zeros, size = np.zeros(2**25, np.uint8), 2**25
    for name, content in (("unnamed", 3), ("named", {"numpy": "0"})):
        text = json.dumps({"format": "npgp", "version": 1, "content": content}).encode()
        description = np.frombuffer(text, np.uint8)
        np.savez_compressed(tmp_path / f"{name}.npz", **{"npgp": description, "0": zeros})
        assert (tmp_path / f"{name}.npz").stat().st_size < 2**16
    # An array that says it is larger than what the file has of it.
    with zipfile.ZipFile(tmp_path / "larger.npz", "w") as archive:
        archive.writestr("npgp.npy", npy(description))
        archive.writestr("0.npy", npy(zeros[:1000]).replace(b"(1000,), }", b"(1000000000000,), }"))
    # One that is in many places would be as many arrays to JAX; save never does that.
    twice = {"format": "npgp", "version": 1, "content": {"list": [{"jax": "0"}] * 2}}
    write(tmp_path / "twice.npz", twice, **{"0": np.ones(3, np.float32)})

    load(tmp_path / "unnamed.npz")  # what is imported at first is not counted
    for name, message in (
        ("unnamed", None),
        ("named", r"named.npz' holds arrays of more than max_bytes = \d+ bytes, .* pass load a larger max_bytes"),
        ("twice", "is damaged, or no file that npgp.save wrote"),
        ("larger", "is damaged, or no file that npgp.save wrote"),
    ):
        peak, result = peak_of(lambda name=name: load(tmp_path / f"{name}.npz"))
        assert peak < size / 4, name
        assert result == 3 if message is None else re.search(message, str(result)), result
    for max_bytes in (size + 2000, 2 * size):
        np.testing.assert_array_equal(load(tmp_path / "named.npz", max_bytes=max_bytes), zeros)
    with pytest.raises(ValueError, match=f"more than max_bytes = {size} bytes"):
        load(tmp_path / "named.npz", max_bytes=size)
    with pytest.raises(ValueError, match="max_bytes is 0; it must be at least 1"):
        load(tmp_path / "named.npz", max_bytes=0)


def npy(array):
    """The bytes of a file that has this array alone."""
    np.save(file := io.BytesIO(), array)
    return file.getvalue()


SAVED = {"kernel": KERNEL, "arrays": (np.arange(3), jnp.asarray(0.1), [np.float64(2.0)]), "key": jax.random.key(1)}


@functools.cache
def saved_bytes():
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "a", SAVED)
        return (Path(folder) / "a").read_bytes()


REFUSED = "is damaged, or no file|has version|npgp does not have|differs from this version's|64-bit|larger max_bytes"


@hypothesis.settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=3), st.booleans())
def test_other_bytes_are_refused_or_change_nothing(tmp_path_factory, changes, cut):
    content, path = bytearray(saved_bytes()), tmp_path_factory.getbasetemp() / "changed"
    for place, byte in changes:
        content[int(place * (len(content) - 1))] = byte
    path.write_bytes(content[: int(changes[0][0] * len(content))] if cut else content)
    try:
        loaded = load(path)
    except ValueError as error:
        assert re.search(REFUSED, str(error))
    else:
        assert_same(loaded, SAVED)


JSON = st.recursive(
    st.sampled_from(
        [None, True, -1, 2, 0.5, "0", "1", "", "npgp.kernels:RBF", "npgp.kernels:Sum", "a:b", "threefry2x32"]
    ),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["numpy", "jax", "scalar", "key", "impl", "weak", "tuple", "dict", "class", "fields", "kernels"]
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=4,
)


@hypothesis.settings(max_examples=100)
@given(st.data())
def test_other_descriptions_are_refused_in_one_way(tmp_path_factory, data):
    with np.load(io.BytesIO(saved_bytes())) as file:
        arrays = dict(file)
    header = json.loads(arrays.pop("npgp").tobytes())
    node = header
    while True:  # to a place in it
        key = data.draw(st.sampled_from(range(len(node)) if isinstance(node, list) else list(node)))
        if not isinstance(node[key], list | dict) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    if isinstance(node, dict) and data.draw(st.booleans()):
        del node[key]
    else:
        node[key] = data.draw(JSON)
    path = tmp_path_factory.getbasetemp() / "changed"
    write(path, header, **arrays)
    try:
        load(path)
    except ValueError as error:
        assert re.search(REFUSED, str(error))


def test_later_versions_are_refused(tmp_path):
    write(tmp_path / "a", {"format": "npgp", "version": 3, "new": "layout"})
    with pytest.raises(ValueError, match="has version 3 of the file format; this npgp reads 1"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "builtins:dict",
        "npgp.io.saving:os",
        "npgp.io.saving:_Builder",
        "npgp.io.saving:load",
        "npgp.io.saving:Path",
        "npgp.variational:dist",
        "npgp.io.saving:Distribution",  # a distribution, but another package's
        "npgp.nowhere:RBF",
        "npgp.kernels:Gone",
        "npgp.kernels:RBF.correlation",
        "npgpx.kernels:RBF",
        "test_saving:Doubled",
        "",
    ],
)
def test_only_known_classes_are_rebuilt(tmp_path, name):
    write(tmp_path / "a", {"format": "npgp", "version": 1, "content": {"class": name, "fields": {}}})
    with pytest.raises(ValueError, match="which npgp does not have"):
        load(tmp_path / "a")


def test_classes_that_changed(tmp_path):
    def content(cls, **fields):
        return {"format": "npgp", "version": 1, "content": {"class": cls, "fields": fields}}

    # Defaults fill no gaps: what they were when the file was written is not known.
    bad = [
        content("npgp.kernels:RBF", lengthscale=0.5, active_dims=None),
        content("npgp.kernels:RBF", lengthscale=0.5, variance=1.0, active_dims=None, period=2.0),
        content("npgp.kernels:Scaled", scale=2.0),
        content("npgp.variational:MeanOnlyNormal", loc=0.0, _validate_args=None, _event_shape=None, location=0.0),
    ]
    for description, names in zip(
        bad, ("'variance'", "'period'", "'kernel'", "'_batch_shape', 'location'"), strict=True
    ):
        write(tmp_path / "b", description)
        with pytest.raises(ValueError, match=rf"differs from this version's in \[{names}\]"):
            load(tmp_path / "b")
    # A class that has moved may be given.
    write(tmp_path / "c", content("npgp.old_room:RBF", lengthscale=0.5, variance=1.0, active_dims=None))
    assert load(tmp_path / "c", classes=[kernels.RBF]) == kernels.RBF(0.5)


def test_64_bit_arrays_do_not_lose_digits_in_silence(tmp_path):
    with jax.enable_x64(True):
        save(tmp_path / "a", kernels.RBF(jnp.asarray([0.1])))
        save(tmp_path / "b", jnp.arange(3))
        assert load(tmp_path / "a").lengthscale.dtype == jnp.float64
    with jax.enable_x64(False):
        for name, dtype in (("a", "float64"), ("b", "int64")):
            with pytest.raises(ValueError, match=rf"has arrays of {dtype}.*jax_enable_x64"):
                load(tmp_path / name)
        save(tmp_path / "c", np.arange(3.0))  # NumPy's arrays keep theirs
        assert load(tmp_path / "c").dtype == np.float64


def test_files_are_as_readable_as_others(tmp_path):
    save(tmp_path / "a", 1)
    (tmp_path / "b").touch()
    assert os.stat(tmp_path / "a").st_mode == os.stat(tmp_path / "b").st_mode
