"""Row tables: the statement, and training that moves the rows of a batch alone."""

import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.optim import Minimize, optax_to_numpyro
from numpyro.primitives import mutable

from npgp.contract import Optimizer
from npgp.model.row_params import row_param
from npgp.training import Callback, NonFiniteLossError, adam, evaluate, fit, row_adam
from npgp.training.data import Data
from npgp.training.interrupts import interrupts_held
from npgp.training.row_tables import RowOptimizer
from npgp.training.step import Step, steps_program

KEY = random.key(0)
N, Q, B = 24, 2, 4
RNG = np.random.default_rng(0)
Y = RNG.normal(size=(N, Q))
START = RNG.normal(size=(N, Q))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = random.key_data(x), random.key_data(y)
        np.testing.assert_array_equal(x, y)


def no_guide(*args, **kwargs):
    pass


# ---------------------------------------------------------------------------------------------------------------
# The statement


def test_the_statement_is_a_param_and_its_rows():
    rows = np.array([[3, 0], [0, 5]])

    def model():
        with numpyro.plate("plate", 2):
            return row_param("t", lambda key: random.normal(key, (N, Q)), rows)

    with handlers.trace() as sites:
        value = handlers.scope(handlers.seed(model, KEY), prefix="a")()
    site = sites["a/t"]
    assert site["type"] == "param" and site["value"].shape == (N, Q)
    np.testing.assert_array_equal(value, site["value"][rows])
    table = np.arange(N, dtype=np.float32)
    with handlers.substitute(data={"t": table}):
        np.testing.assert_array_equal(row_param("t", None, rows), table[rows])
    # Without handlers, and all rows.
    np.testing.assert_array_equal(row_param("t", table), table)
    # Predictive, with the parameters of a run.
    predictive = Predictive(
        lambda: numpyro.deterministic("value", row_param("t", table, rows)), params={"t": -table}, num_samples=2
    )
    np.testing.assert_array_equal(predictive(KEY)["value"][0], -table[rows])


def test_what_the_statement_refuses():
    table = np.zeros((N, Q), np.float32)
    with pytest.raises(TypeError, match="rows of 't' has dtype float32"):
        row_param("t", table, np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="rows of 't' has dtype bool"):
        row_param("t", table, np.ones(N, bool))
    with pytest.raises(ValueError, match="at least one row"):
        row_param("t", table, np.zeros(0, int))
    with pytest.raises(TypeError, match="dtype int32"):
        row_param("t", np.zeros((N, Q), np.int32))
    with pytest.raises(ValueError, match="must have rows"):
        row_param("t", np.float32(1.0))
    for number in (-1, N):
        with pytest.raises(ValueError, match=f"rows of 't' has {number}; row numbers must be in 0 to {N - 1}"):
            row_param("t", table, np.array([0, number]))
    for constraint in (constraints.simplex, constraints.interval(np.zeros(N), np.ones(N))):
        with pytest.raises(ValueError, match="not the same for each row by itself"):
            row_param("t", table[:, 0] + 1 / N, None, constraint)
    with pytest.raises(ValueError, match="no init"):
        row_param("t")
    # Where numbers have no values yet, rows that do not exist are NaN, and not others.
    value = jax.jit(lambda rows: row_param("t", table, rows))(np.array([0, -1, N]))
    np.testing.assert_array_equal(np.isnan(value[:, 0]), [False, True, True])


# ---------------------------------------------------------------------------------------------------------------
# Models: latent rows with a guide, and one whose gradients are known


def latent_model(Y, rows=None):
    noise = numpyro.param("noise", 1.0, constraint=constraints.positive)
    with numpyro.plate("data", N, subsample_size=len(Y)):
        x = numpyro.sample("x", dist.Normal(0, 1).expand([Q]).to_event(1))
        numpyro.sample("y", dist.Normal(x, noise).to_event(1), obs=Y)


def latent_guide(Y, rows=None):
    loc = row_param("x.loc", START, rows)
    scale = row_param("x.scale", lambda key: jnp.ones((N, Q)), rows, constraints.positive)
    with numpyro.plate("data", N, subsample_size=len(Y)):
        numpyro.sample("x", dist.Normal(loc, scale).to_event(1))


def latent_svi(optim=None, **loss):
    return SVI(latent_model, latent_guide, optim or adam(0.05, 30), Trace_ELBO(**loss))


def lazy_fit(num_steps, svi=None, **kwargs):
    options = {"batch_size": B, "indices": "rows", "progress": False, "row_optim": row_adam(0.05, 30), **kwargs}
    return fit(svi or latent_svi(), KEY, num_steps, Y, **options)


def test_with_all_rows_it_is_adam():
    whole = lazy_fit(30, batch_size=None, row_optim=None)
    lazy = lazy_fit(30, batch_size=None)
    assert lazy.params.keys() == whole.params.keys()
    for name, value in whole.params.items():
        assert lazy.params[name].dtype == value.dtype == jnp.float32
        np.testing.assert_allclose(lazy.params[name], value, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(lazy.losses, whole.losses, rtol=1e-4)


M, STEPS = 7, 5
NEIGHBOURS = RNG.integers(0, M, (N, 3))
NEIGHBOURS[:, 1] = NEIGHBOURS[:, 0]  # every batch asks for a row twice
FRIENDS = RNG.integers(0, N, N)
Z_START = RNG.normal(size=M)
SCALES = RNG.uniform(0.5, 2.0, (N, Q))
WEIGHTS = np.array([1.0, 0.5, -2.0])


def quadratic_model(Y, rows):
    """Two tables along the rows, one of them stated twice with other rows, and one along something else."""
    mean = numpyro.param("mean", 0.0)
    x = row_param("x", START, rows)
    friends = row_param("x", START, jnp.asarray(FRIENDS)[rows])
    scale = row_param("scale", SCALES, rows, constraints.positive)
    z = row_param("z", Z_START, jnp.asarray(NEIGHBOURS)[rows])
    row_loss = (
        0.5 * jnp.sum((x + mean - Y) ** 2 + 0.2 * friends**2 + scale**2 - 2.0 * jnp.log(scale), -1)
        + (z @ jnp.asarray(WEIGHTS)) ** 2
    )
    numpyro.factor("loss", -N / B * jnp.sum(row_loss))


def reference(batches, rates, b1=0.9, b2=0.999, eps=1e-8):
    """The same, lazily, in NumPy: unconstrained tables, and the visits of every row."""
    tables = {"mean": np.zeros(1), "x": START.copy(), "scale": np.log(SCALES), "z": Z_START.copy()}
    state = {name: [np.zeros(len(t), int), np.zeros_like(t), np.zeros_like(t)] for name, t in tables.items()}
    for rows, rate in zip(batches, rates, strict=True):
        grads = {name: np.zeros_like(t) for name, t in tables.items()}
        error = tables["x"][rows] + tables["mean"] - Y[rows]
        np.add.at(grads["x"], rows, error)
        np.add.at(grads["x"], FRIENDS[rows], 0.2 * tables["x"][FRIENDS[rows]])
        np.add.at(grads["scale"], rows, np.exp(2.0 * tables["scale"][rows]) - 1.0)
        total = tables["z"][NEIGHBOURS[rows]] @ WEIGHTS
        np.add.at(grads["z"], NEIGHBOURS[rows], 2.0 * total[:, None] * WEIGHTS)
        grads["mean"] += error.sum()
        asked = {"mean": [0], "x": [*rows, *FRIENDS[rows]], "scale": rows, "z": NEIGHBOURS[rows].ravel()}
        for name, numbers in asked.items():
            count, m, v = state[name]
            for n in set(numbers):
                g = N / B * grads[name][n]
                count[n] += 1
                m[n] = b1 * m[n] + (1 - b1) * g
                v[n] = b2 * v[n] + (1 - b2) * g**2
                step = (m[n] / (1 - b1 ** count[n])) / (np.sqrt(v[n] / (1 - b2 ** count[n])) + eps)
                tables[name][n] -= rate * step
    return tables, state


def test_minibatches_are_lazy_adam_row_by_row(float64):
    svi = SVI(quadratic_model, no_guide, adam(0.1, STEPS), Trace_ELBO())
    result = lazy_fit(STEPS, svi, row_optim=row_adam(0.1, STEPS))
    batches = Data((Y,), {}, KEY, B, "rows").rows(0, STEPS)
    rates = 0.1 * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * np.arange(STEPS) / STEPS)))
    tables, state = reference(batches, rates)
    optim_state = result.state.optim_state
    np.testing.assert_allclose(result.params["mean"], tables["mean"][0], rtol=1e-10)
    np.testing.assert_allclose(result.params["scale"], np.exp(tables["scale"]), rtol=1e-10)
    for name in ("x", "scale", "z"):
        np.testing.assert_allclose(optim_state.tables[name], tables[name], rtol=1e-10)
        count, m, v = optim_state.moments[name]
        np.testing.assert_array_equal(count, state[name][0])
        np.testing.assert_allclose(m, state[name][1], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(v, state[name][2], rtol=1e-9, atol=1e-12)
    # What no batch asked for is what it was, to the bit; and there is such a row, and one that came twice.
    asked = np.unique([batches, FRIENDS[batches]])
    rest = np.setdiff1d(np.arange(N), asked)
    assert 0 < len(rest) < N - 1 and (state["x"][0] > 1).any() and (state["x"][0] == 1).any()
    np.testing.assert_array_equal(result.params["x"][rest], START[rest])
    np.testing.assert_array_equal(optim_state.moments["x"].mu[rest], 0.0)


def test_rows_drawn_in_the_model():
    """The rows are known only inside: the guide's plate draws them."""

    def model(Y):
        with numpyro.plate("data", N, subsample_size=B) as rows:
            x = numpyro.sample("x", dist.Normal(0, 1).expand([Q]).to_event(1))
            numpyro.sample("y", dist.Normal(x, 0.5).to_event(1), obs=Y[rows])

    def guide(Y):
        with numpyro.plate("data", N, subsample_size=B) as rows:
            loc = row_param("x.loc", START, rows)
            numpyro.sample("x", dist.Normal(loc, 0.4).to_event(1))

    options = {"batch_size": None, "indices": None}
    result = lazy_fit(1, SVI(model, guide, adam(0.05), Trace_ELBO()), **options)
    moved = np.any(result.params["x.loc"] != START.astype(np.float32), -1)
    assert moved.sum() == B
    # Each of several particles draws others.
    with pytest.raises(ValueError, match="the same for all particles"):
        lazy_fit(1, SVI(model, guide, adam(0.05), Trace_ELBO(num_particles=2)), **options)


# ---------------------------------------------------------------------------------------------------------------
# The loop


def as_numpy(state):
    """A state as read from a file."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(x), state)


def test_continuation_is_exact():
    whole = lazy_fit(100)
    part = lazy_fit(60, steps_per_call=7)
    before = as_numpy(part.state)
    rest = lazy_fit(40, init_state=part.state, steps_per_call=7)
    np.testing.assert_array_equal(np.concatenate([part.losses, rest.losses]), whole.losses)
    assert_same(rest.state, whole.state)
    assert_same(rest.params, whole.params)
    # The state passed is not used up, though tables are written over in place.
    assert_same(part.state, before)


def diverging(at, kind):
    """A parameter that moves by 1 per step, up to NaN in the loss or in the gradient of a table."""

    def model(Y, rows):
        a = numpyro.param("a", 0.0)
        x = row_param("x", START, rows)
        bad = a > at - 0.5
        if kind == "loss":
            numpyro.factor("f", a - jnp.sum((x - Y) ** 2) + jnp.where(bad, jnp.nan, 0.0))
        else:
            # The derivative of sqrt at zero is infinite, and here multiplied by zero.
            numpyro.factor("f", a - jnp.sum((x - Y) ** 2) + jnp.sum(jnp.sqrt(jnp.where(bad, 0.0 * x, 1.0))))

    return SVI(model, no_guide, optax.sgd(1.0), Trace_ELBO())


@pytest.mark.parametrize("kind, good, steps_per_call", [("loss", 4, 5), ("gradient", 5, 20)])
def test_a_bad_step_leaves_the_last_good_state(kind, good, steps_per_call):
    words = "The ELBO is nan at step 5" if kind == "loss" else "gradient .* is bad at step 5: x became NaN"
    with pytest.raises(NonFiniteLossError, match=words) as caught:
        lazy_fit(20, diverging(5, kind), steps_per_call=steps_per_call)
    # As without the bad step: also at the first step of a device call, which takes back one of the call before.
    expected = lazy_fit(good, diverging(99, kind), steps_per_call=steps_per_call)
    assert caught.value.step == 5 and len(caught.value.result.losses) == good
    assert_same(caught.value.result.state, expected.state)
    assert_same(caught.value.result.params, expected.params)


def test_a_bad_first_step_leaves_the_start():
    state = as_numpy(lazy_fit(4, diverging(99, "loss")).state)
    with pytest.raises(NonFiniteLossError, match="first of this call") as caught:
        lazy_fit(6, diverging(4, "loss"), init_state=state)
    assert_same(caught.value.result.state, state)


def compiled(size, lazy):
    """The loop over steps, for a table of this many rows."""
    table = np.zeros((size, Q), np.float32)

    def model(X, rows):
        loc = row_param("loc", table, rows)
        scale = row_param("scale", table + 1.0, rows, constraints.positive)
        near = row_param("near", table, jnp.stack([rows, rows], -1))
        offset = numpyro.param("offset", jnp.zeros(Q))
        numpyro.factor("f", -jnp.sum((X - loc - offset) ** 2 / scale) - jnp.sum(jnp.sin(near)))

    svi = SVI(model, no_guide, adam(0.05, 100), Trace_ELBO())
    inputs = Data((np.zeros((size, Q), np.float32),), {}, KEY, B, "rows")
    args, kwargs = inputs.first_call()
    chunk = inputs.read(0, 1, 2)
    step = Step(svi, row_adam(0.05, 100) if lazy else None)
    state = step.init(KEY, *args, **kwargs)
    return steps_program(step, inputs.layout, 2).prepare(state, inputs.arrays, chunk, 2)


def operations(program, size):
    """Names of the operations of a step, and of what it calls, whose result has this many rows."""
    blocks = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \()", program.as_text())
    parts = {name[1]: block for block in blocks if (name := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", block))}
    entry = next(block for block in blocks if block.startswith("ENTRY"))
    outside = [line for line in entry.splitlines() if " while(" not in line]
    once = {name for line in outside for name in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line)}
    assert " while(" in entry
    text = "\n".join(block for name, block in parts.items() if name not in once and block is not entry)
    pattern = re.compile(r"= \w+\[([\d,]+)\]\S* ([\w\-]+)\(")
    return {op for shape, op in pattern.findall(text) if str(size) in shape.split(",")}


def test_no_step_touches_a_table_as_a_whole():
    small, large = (compiled(size, lazy=True) for size in (1013, 4013))
    # A fusion is listed with what it is made of. Nothing is copied; but once before the loop, whose start is kept.
    in_place = {"parameter", "get-tuple-element", "bitcast", "fusion", "scatter", "dynamic-update-slice"}
    assert operations(large, 4013) <= in_place
    assert operations(large, 4013) & {"scatter", "dynamic-update-slice"}
    assert small.cost_analysis()["flops"] == large.cost_analysis()["flops"]
    # That is not so of the dense loop, which the test would notice.
    assert {"multiply", "copy"} <= operations(compiled(1013, lazy=False), 1013)


def test_one_compilation():
    traced = []

    def model(Y, rows):
        x = row_param("x", START, rows)
        traced.extend([1] if isinstance(x, jax.core.Tracer) else [])
        numpyro.factor("f", -jnp.sum((x - Y) ** 2))

    svi = SVI(model, no_guide, adam(0.05), Trace_ELBO())
    lazy_fit(1, svi)
    once = len(traced)
    lazy_fit(2500, svi)
    assert len(traced) == 2 * once


def test_interrupt_returns_what_was_trained():
    class Interrupted(Callback):
        def __call__(self, training):
            if training.step == 15:
                raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="15 of 50 steps"):
        result = lazy_fit(50, steps_per_call=5, callbacks=[Interrupted()])
    assert len(result.losses) == 15 and int(result.state.optim_state.count) == 15
    assert all(np.isfinite(value).all() for value in result.params.values())


@pytest.fixture
def python_handles_interrupts():
    """As where the shell that started the tests has not told them to ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end_of_a_call(python_handles_interrupts):
    before, done = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is before


# ---------------------------------------------------------------------------------------------------------------
# Beside the rest


def test_evaluate_looks_at_rows_of_the_trained_tables():
    svi = latent_svi()
    lazy = lazy_fit(30, svi)
    whole = svi.init(KEY, Y, init_params=lazy.params)
    for batch_size in (None, B):
        options = {"num_draws": 5, "batch_size": batch_size, "indices": "rows"}
        ours, theirs = (evaluate(latent_svi(), KEY, state, Y, **options) for state in (lazy, whole))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


class Own(Optimizer):
    """An optimizer that evaluates the loss by itself, and more than once."""

    def __init__(self, optim):
        self.optim = optax_to_numpyro(optim)
        self.init, self.get_params = self.optim.init, self.optim.get_params

    def eval_and_update(self, fn, state, forward_mode_differentiation=False):
        jax.lax.while_loop(lambda i: i < 2, lambda i: i + jnp.isfinite(fn(self.get_params(state))[0]), 0)
        return self.optim.eval_and_update(fn, state)


def test_other_optimizers_beside_and_mutable_state():
    def model(Y, rows):
        latent_model(Y, rows)
        steps = mutable("steps", {"count": jnp.zeros(())})
        steps["count"] += 1.0

    results = [
        lazy_fit(30, SVI(model, latent_guide, optim, Trace_ELBO())) for optim in (adam(0.05, 30), Own(adam(0.05, 30)))
    ]
    for name, value in results[0].params.items():
        np.testing.assert_allclose(results[1].params[name], value, rtol=1e-4, atol=1e-5)
    assert results[0].state.mutable_state["steps"]["count"] == 31


def test_any_transformation_of_single_rows():
    """Plain gradient steps: the weight of a batch's rows is in the gradient, and each epoch has it once."""
    rate = 0.01
    optim = RowOptimizer(optax.identity(), lambda step: rate)

    def model(Y, rows):
        numpyro.factor("f", -0.5 * N / B * jnp.sum((row_param("x", START, rows) - Y) ** 2))

    result = lazy_fit(N // B, SVI(model, no_guide, adam(), Trace_ELBO()), row_optim=optim)
    np.testing.assert_allclose(result.params["x"], START - rate * N / B * (START - Y), rtol=1e-5, atol=1e-6)


def test_what_training_refuses():
    lazy, whole = lazy_fit(1), lazy_fit(1, row_optim=None)
    with pytest.raises(
        TypeError, match="row_optim is a GradientTransformation.*; it must be made by npgp.training.row_adam"
    ):
        lazy_fit(1, row_optim=optax.adam(0.1))
    with pytest.raises(TypeError, match="not beside Minimize"):
        lazy_fit(1, latent_svi(Minimize()))
    with pytest.raises(ValueError, match="init_state was trained without row_optim"):
        lazy_fit(1, init_state=whole.state)
    with pytest.raises(ValueError, match="init_state was trained with row_optim; give row_optim"):
        lazy_fit(1, init_state=lazy.state, row_optim=None)
    svi = latent_svi()
    svi.init(KEY, Y)
    for use in (svi.get_params, svi.update, svi.evaluate):
        with pytest.raises(TypeError, match="take result.params, npgp.evaluate"):
            use(*(lazy.state, Y)[: 1 if use == svi.get_params else 2])

    def plain(Y, rows):
        numpyro.factor("f", -jnp.sum(numpyro.param("x", START)[rows] ** 2))

    with pytest.raises(ValueError, match="neither model nor guide has a row table"):
        lazy_fit(1, SVI(plain, no_guide, adam(), Trace_ELBO()))

    def both(Y, rows):
        row_param("x", START, rows)
        plain(Y, rows)

    with pytest.raises(ValueError, match="'x' is a row table .* stated by numpyro.param as well"):
        lazy_fit(1, SVI(both, no_guide, adam(), Trace_ELBO()))

    def beyond(Y, rows):
        numpyro.factor("f", -jnp.sum(row_param("x", START, rows + at) ** 2))

    svi, at = SVI(beyond, no_guide, adam(), Trace_ELBO()), 0
    state = lazy_fit(1, svi).state
    at = 1  # which no check of values sees when training goes on
    with pytest.raises(NonFiniteLossError):
        lazy_fit(N // B, svi, init_state=state)


def test_row_adam_schedules():
    rates = np.array([row_adam(0.1, 20, warmup=4).learning_rate(i) for i in range(21)])
    np.testing.assert_allclose(rates[:5], 0.1 * np.arange(1, 6) / 5, rtol=1e-4)
    np.testing.assert_allclose(rates[20], 0.002, rtol=1e-3)
    assert row_adam(lambda step: 3.0 * step).learning_rate(2) == 6.0
    with pytest.raises(ValueError, match="learning_rate is a schedule"):
        row_adam(optax.constant_schedule(0.1), 20)
