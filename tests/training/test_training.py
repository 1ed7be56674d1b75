import importlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

import npgp
from npgp.model.row_params import row_param
from npgp.training import Callback, FitResult, NonFiniteLossError, adam, evaluate, fit, row_adam
from npgp.training.data import Data

fit_module = importlib.import_module("npgp.training.loop")  # the package's `fit` may be the function
N = 60
X = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
Y = X @ np.array([1.0, -2.0], np.float32)
KEY = random.key(0)


def regression(X, y=None, *, size):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", size, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 0.3), obs=y)


def mean_field(X, y=None, *, size):
    loc = numpyro.param("loc", jnp.zeros(2))
    scale = numpyro.param("scale", 0.1 * jnp.ones(2), constraint=dist.constraints.positive)
    numpyro.sample("w", dist.Normal(loc, scale).to_event(1))


def make_svi(model=regression, guide=mean_field, optim=None, **static):
    return SVI(model, guide, optim or adam(0.05), Trace_ELBO(), **(static or {"size": N}))


def no_guide(*args, **kwargs):
    pass


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = random.key_data(x), random.key_data(y)
        np.testing.assert_array_equal(x, y)


def test_full_batch_equals_svi_run():
    key = random.PRNGKey(3)  # the other tests use a typed key
    svi = make_svi()
    ours = fit(svi, key, 200, X, y=Y, progress=False)
    theirs = svi.run(key, 200, X, y=Y, progress_bar=False)
    assert ours.losses.shape == (200,) and isinstance(ours.losses, np.ndarray)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-3)
    for name, value in theirs.params.items():
        np.testing.assert_allclose(ours.params[name], value, rtol=1e-3, atol=1e-4)


def test_minibatches_reach_the_optimum():
    svi = make_svi(optim=adam(0.05, 1500))
    result = fit(svi, KEY, 1500, X, y=Y, batch_size=20, progress=False)
    precision = X.T @ X / 0.3**2 + np.eye(2)
    exact = np.linalg.solve(precision, X.T @ Y / 0.3**2)
    np.testing.assert_allclose(result.params["loc"], exact, atol=0.02)
    # The scale tells whether batches were scaled up to all rows.
    np.testing.assert_allclose(result.params["scale"], np.diag(precision) ** -0.5, rtol=0.2)


def test_every_epoch_is_a_fresh_permutation():
    inputs = Data((X,), {}, KEY, 20, None)
    epochs = inputs.rows(0, 6).reshape(2, N)
    assert (np.sort(epochs) == np.arange(N)).all()
    assert (epochs[0] != epochs[1]).any()
    # A function of the step alone, whatever was asked before.
    np.testing.assert_array_equal(inputs.rows(4, 2), Data((X,), {}, KEY, 20, None).rows(0, 6)[4:])
    other = Data((X,), {}, random.key(1), 20, None)
    assert (other.rows(0, 1) != inputs.rows(0, 1)).any()


def test_remainder_is_left_out_without_bias():
    inputs = Data((X,), {}, KEY, 25, None)
    rows = inputs.rows(0, 4000)
    assert all(len(set(batch)) == 25 for batch in rows.tolist())
    epoch = rows[:2].ravel()
    assert len(set(epoch.tolist())) == 50
    # Every row is in 25/60 of the batches: within five standard deviations.
    share = np.bincount(rows.ravel(), minlength=N) / 4000
    p = 25 / N
    assert np.abs(share - p).max() < 5 * np.sqrt(p * (1 - p) / 4000)


def test_batches_slice_rows_pass_indices_and_scale_the_loss():
    seen = []

    def model(X, scale, data, rows, flag, size):
        assert flag == "text" and isinstance(size, int)
        assert X.shape == (20, 2) and data["y"].shape == (20,) and scale.shape == (3,)
        jax.debug.callback(lambda *a: seen.append([np.asarray(x) for x in a]), X, data["y"], rows)
        mean = numpyro.param("mean", 0.0)
        with numpyro.plate("data", size, subsample_size=20):
            numpyro.sample("y", dist.Normal(mean, 1), obs=data["y"])

    svi = make_svi(model, no_guide, optax.sgd(0.0), size=N)
    args = (X, np.ones(3), {"y": Y})
    result = fit(
        svi, KEY, 3, *args, flag="text", batch_size=20, indices="rows", progress=False
    )  # fmt: skip
    jax.effects_barrier()
    assert {x.dtype for _, _, x in seen} == {np.dtype(np.int32)}
    assert {i for _, _, rows in seen for i in rows.tolist()} == set(range(N))
    for x, y, rows in seen:
        np.testing.assert_array_equal(x, X[rows])
        np.testing.assert_array_equal(y, Y[rows])
    # The batches of an epoch are a partition: with frozen parameters their mean is the full loss.
    full = -dist.Normal(0, 1).log_prob(Y).sum()
    np.testing.assert_allclose(result.losses.mean(), full, rtol=1e-5)


@pytest.mark.parametrize("row_optim", [None, row_adam(0.1)], ids=["dense", "rows"])
def test_the_number_of_the_step_is_passed_on(row_optim):
    """Also to a continuation; not by evaluate, so that what a schedule changes in training is not evaluated."""

    def model(x, t=None):
        numpyro.factor("time", -1.0 * (100.0 if t is None else t))

    def guide(x, t=None):
        row_param("a", np.zeros((3, 1), np.float32))

    svi = SVI(model, guide, optax.sgd(0.1), Trace_ELBO())
    options = {"steps": "t", "row_optim": row_optim, "progress": False}
    first = fit(svi, KEY, 3, X[:3], **options)
    more = fit(svi, KEY, 2, X[:3], init_state=first.state, **options)
    np.testing.assert_array_equal([*first.losses, *more.losses], range(5))
    assert evaluate(svi, KEY, more, X[:3], num_draws=2)[0] == -100.0
    for name in ("t", "rows"):
        with pytest.raises(ValueError, match=f"steps='{name}' names an argument"):
            fit(svi, KEY, 3, x=X[:3], indices="rows", steps=name, **({"t": 1.0} if name == "t" else {}))


def test_indices_without_batches_are_all_rows():
    def model(X, rows):
        assert rows.shape == (N,) and rows.dtype == jnp.int32
        table = numpyro.param("table", jnp.zeros(N))
        numpyro.factor("f", -jnp.sum((table[rows] - X[:, 0]) ** 2))

    svi = SVI(model, no_guide, adam(0.1), Trace_ELBO())
    result = fit(svi, KEY, 200, X, indices="rows", progress=False)
    np.testing.assert_allclose(result.params["table"], X[:, 0], atol=0.01)


@pytest.mark.parametrize("batch_size", [None, 16])
def test_one_compilation_and_eager_init(batch_size):
    concrete, traced = [], []

    def model(X, size):
        (traced if isinstance(X, jax.core.Tracer) else concrete).append(X.shape)
        numpyro.factor("f", -jnp.sum((X.mean(0) - numpyro.param("m", jnp.zeros(2))) ** 2))

    svi = make_svi(model, no_guide, size=N)
    result = fit(svi, KEY, 1, X, batch_size=batch_size, progress=False)
    once = len(traced)
    assert len(concrete) == 1 and once >= 1
    fit(svi, KEY, 2500, X, batch_size=batch_size, progress=False)
    fifths = 1  # looks at the posterior after each fifth of so many steps have one program
    assert len(concrete) == 2 and len(traced) == 2 * once + fifths
    fit(svi, KEY, 50, X, batch_size=batch_size, progress=False, steps_per_call=7)
    assert len(concrete) == 3 and len(traced) == 3 * once + fifths
    # A continuation neither initializes again nor traces more, once there is a program for its calls. The model's
    # observed statements were looked at by the call before.
    again = dict(batch_size=batch_size, progress=False, init_state=result.state)
    look = 1
    fit(svi, KEY, 50, X, steps_per_call=7, **again)
    looked = 3 * once + fifths
    assert len(concrete) == 3 and len(traced) == looked
    fit(svi, KEY, 50, X, **again)
    fit(svi, KEY, 500, X, **again)
    step = once - look + fifths
    assert len(concrete) == 3 and len(traced) == looked + step
    for _ in range(2):
        evaluate(svi, KEY, result, X, batch_size=batch_size)
    assert len(traced) == looked + step + 1


@pytest.mark.parametrize("batch_size, steps_per_call", [(None, None), (16, 7)])
def test_continuation_is_exact(batch_size, steps_per_call):
    def run(num_steps, **kwargs):
        svi = make_svi(optim=adam(0.05, 100))  # afresh, as in another process
        return fit(svi, KEY, num_steps, X, y=Y, batch_size=batch_size, progress=False, **kwargs)

    whole = run(100, steps_per_call=steps_per_call)
    part = run(60, steps_per_call=steps_per_call)
    state = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), part.state)
    rest = run(40, init_state=state, steps_per_call=steps_per_call)
    assert len(rest.losses) == 40
    np.testing.assert_array_equal(np.concatenate([part.losses, rest.losses]), whole.losses)
    assert_same(rest.state, whole.state)
    assert_same(rest.params, whole.params)


def diverging(at, kind):
    """Model of one parameter that moves by 1 per step, up to NaN in the loss or the gradient."""

    def model():
        a = numpyro.param("a", 0.0)
        bad = a > at - 0.5
        if kind == "loss":
            numpyro.factor("f", jnp.where(bad, jnp.nan, a))
        else:
            # The derivative of sqrt at zero is infinite, and here multiplied by zero.
            numpyro.factor("f", a + jnp.sqrt(jnp.where(bad, 0.0 * a, 1.0)))

    return SVI(model, no_guide, optax.sgd(1.0), Trace_ELBO())


@pytest.mark.parametrize("steps_per_call", [None, 5])
@pytest.mark.parametrize("at", [1, 10])
def test_nan_loss_is_refused(at, steps_per_call):
    with pytest.raises(NonFiniteLossError) as caught:
        fit(diverging(at, "loss"), KEY, 50, progress=False, steps_per_call=steps_per_call)
    error = caught.value
    assert error.step == at
    message = str(error)
    assert f"The ELBO is nan at step {at}; the last finite one was {at - 1}." in message
    assert "learning rate" in message and "jitter" in message and "x64" in message
    # The state kept is the last one whose ELBO was finite, and the losses led there.
    assert float(error.result.params["a"]) == at - 1
    np.testing.assert_array_equal(error.result.losses, -np.arange(at - 1.0))


def test_nan_gradient_is_refused():
    with pytest.raises(NonFiniteLossError, match="gradient .* at step 5: a became NaN") as caught:
        fit(diverging(5, "gradient"), KEY, 6, progress=False)
    assert caught.value.step == 5
    assert float(caught.value.result.params["a"]) == 5
    assert len(caught.value.result.losses) == 5
    # Also when nothing comes after it that would show the NaN.
    with pytest.raises(NonFiniteLossError):
        fit(diverging(5, "gradient"), KEY, 6, progress=False, steps_per_call=6)


def test_nan_at_the_first_step_keeps_the_start():
    with pytest.raises(NonFiniteLossError, match="first of this call") as caught:
        fit(diverging(0, "loss"), KEY, 6, progress=False)
    assert caught.value.step == 0 and len(caught.value.result.losses) == 0
    state = fit(diverging(4, "loss"), KEY, 4, progress=False).state
    with pytest.raises(NonFiniteLossError) as caught:
        fit(diverging(4, "loss"), KEY, 6, progress=False, init_state=state)
    assert caught.value.step == 4
    assert_same(caught.value.result.state, state)


class Bounded(dist.Distribution):
    """A uniform variable above f: observations are impossible for f above them."""

    support = dist.constraints.real

    def __init__(self, f):
        self.f = f
        super().__init__(jnp.shape(f))

    def log_prob(self, value):
        return jnp.where(value > self.f, -0.1 * (value - self.f), -jnp.inf)


@pytest.mark.parametrize(
    "fn, words",
    [
        (
            lambda f: dist.TruncatedNormal(f, 0.3, low=-0.5),
            r"y: log p\(y \| f\) is inf for the function's LeftTruncatedDistribution at f = -\d.*TruncatedGaussian\.",
        ),
        (
            Bounded,
            r"y: log p\(y \| f\) is -inf for the function's Bounded at f = .* whose support does not depend on f",
        ),
        (
            lambda f: dist.Gumbel(f, 0.001),
            r"y: log p\(y \| f\) is -inf for the function's Gumbel at f = .*: look at y, .* in float64;",
        ),
    ],
    ids=["infinite", "impossible", "overflow"],
)
@pytest.mark.filterwarnings("ignore:The log-probabilities of")
def test_the_likelihood_that_is_not_finite_is_named(fn, words):
    def model(X, y=None):
        f = npgp.SparseGP("f", npgp.RBF(1.0, variance=9.0), X[::3]).draw()
        with numpyro.plate("data", len(X)):
            npgp.observe("y", f(X), fn, obs=y, conditional="prior")

    rows = np.linspace(0.0, 6.0, 12)[:, None]
    svi = SVI(model, npgp.AutoSparseGP(model), adam(0.05, 3), TraceMeanField_ELBO())
    with pytest.raises(NonFiniteLossError, match=words):
        fit(svi, KEY, 3, rows, np.full(12, 0.2), progress=False)


def test_an_offset_that_is_not_finite_is_named():
    def model(X, exposure, y=None):
        f = npgp.SparseGP("f", npgp.RBF(1.0), X[::3]).draw()
        with numpyro.plate("data", len(X)):
            npgp.observe("y", f(X) + jnp.log(exposure), npgp.Poisson(), obs=y)

    svi = SVI(model, npgp.AutoSparseGP(model), adam(0.05, 3), TraceMeanField_ELBO())
    with pytest.raises(NonFiniteLossError, match="y: f itself is NaN or infinite there: .* an exposure of 0"):
        fit(svi, KEY, 3, np.linspace(0.0, 6.0, 12)[:, None], np.arange(12.0), np.ones(12), progress=False)


def test_initial_values_of_another_shape_are_named():
    def model(X, y=None):
        f = npgp.SparseGP("f", npgp.RBF(numpyro.param("scale", 1.0)), X[::3]).draw()
        with numpyro.plate("data", len(X)):
            npgp.observe("y", f(X), npgp.Gaussian(scale=0.1), obs=y)

    svi = SVI(model, npgp.AutoSparseGP(model), adam(0.05, 3), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match="RBF lengthscale has shape") as caught:
        fit(svi, KEY, 3, np.ones((6, 1)), np.ones(6), init_params={"scale": np.ones(3)}, progress=False)
    words = "init_params has the shapes {'scale': (3,)}; they must be those of the model's parameters."
    assert words in caught.value.__notes__


def test_non_finite_inputs_are_refused():
    bad = Y.copy()
    bad[[3, 7]] = np.nan, -np.inf
    with pytest.raises(ValueError, match="2 of 60 values in argument 'y' are NaN or infinite"):
        fit(make_svi(), KEY, 5, X, y=bad, progress=False)
    with pytest.raises(ValueError, match="2 of 60 values in args.1."):
        fit(make_svi(), KEY, 5, X, bad, progress=False)

    def masked(X, y, size):
        seen = jnp.isfinite(y)
        with numpyro.plate("data", size), numpyro.handlers.mask(mask=seen):
            mean = numpyro.param("mean", 0.0)
            numpyro.sample("y", dist.Normal(mean, 1), obs=jnp.where(seen, y, 0.0))

    svi = make_svi(masked, no_guide)
    result = fit(svi, KEY, 5, X, y=bad, allow_nan=True, progress=False)
    assert np.isfinite(result.losses).all()


def test_bad_arguments():
    for batch_size in (0, N + 1):
        with pytest.raises(ValueError, match=f"batch_size is {batch_size}, not in 1 to {N}"):
            fit(make_svi(), KEY, 5, X, y=Y, batch_size=batch_size)
    with pytest.raises(ValueError, match="need an array"):
        fit(diverging(5, "loss"), KEY, 5, batch_size=1)
    with pytest.raises(ValueError, match="given as well"):
        fit(make_svi(), KEY, 5, X, y=Y, indices="y")
    with pytest.raises(ValueError, match="num_steps"):
        fit(make_svi(), KEY, 0, X, y=Y)
    with pytest.raises(ValueError, match="steps_per_call"):
        fit(make_svi(), KEY, 1, X, y=Y, steps_per_call=0)
    for name, kind in (("sharding", "Sharding"), ("monitor", "Monitor"), ("checkpoints", "Checkpoints")):
        with pytest.raises(TypeError, match=f"{name} is 'run1'; it must be an npgp.training.{kind}"):
            fit(make_svi(), KEY, 1, X, y=Y, **{name: "run1"})
    with pytest.raises(ValueError, match="num_draws"):
        evaluate(make_svi(), KEY, None, X, y=Y, num_draws=1)
    with pytest.raises(ValueError, match="warmup"):
        adam(0.1, 10, warmup=10)


def test_first_array_in_call_order_counts_the_rows():
    inputs = Data((), {"y": Y, "inducing": np.zeros((5, 2))}, KEY, 20, None)
    assert inputs.num_rows == N
    _, kwargs = inputs.first_call()
    assert kwargs["y"].shape == (20,) and kwargs["inducing"].shape == (5, 2)


def test_interrupt_returns_what_was_trained(monkeypatch):
    class Interrupted(Callback):
        def __call__(self, training):
            if training.step == 15:
                raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="15 of 50 steps"):
        result = fit(diverging(99, "loss"), KEY, 50, progress=False, steps_per_call=5, callbacks=[Interrupted()])
    assert len(result.losses) == 15 and int(result.state.optim_state[0]) == 15
    assert float(result.params["a"]) == 15

    def at_once(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(fit_module.Steps, "advance", at_once)
    with pytest.raises(KeyboardInterrupt):
        fit(diverging(99, "loss"), KEY, 50, progress=False)


def test_progress_bar(capsys):
    def model(X):
        numpyro.factor("f", -jnp.sum((X[0] - numpyro.param("m", jnp.zeros(2))) ** 2))

    svi = SVI(model, no_guide, adam(), Trace_ELBO())
    result = fit(svi, KEY, 150, X, steps_per_call=50)
    shown = capsys.readouterr().err
    elbo = -result.losses[-100:].mean()
    assert f"ELBO {elbo:.6g}, per row {elbo / N:.4g}" in shown and "150/150" in shown
    fit(diverging(99, "loss"), KEY, 5, progress=False)
    assert capsys.readouterr() == ("", "")


def test_calls_grow_to_about_a_second(monkeypatch):
    clock = [0.0]
    sizes = []
    real = fit_module.Steps.advance

    def timed(self, chunk, num_steps):
        sizes.append(num_steps)
        clock[0] += 0.005 * num_steps
        return real(self, chunk, num_steps)

    monkeypatch.setattr(fit_module.Steps, "advance", timed)
    monkeypatch.setattr(fit_module.time, "perf_counter", lambda: clock[0])
    fit(diverging(999, "loss"), KEY, 480, progress=False)
    assert sizes[:5] == [1, 1, 10, 100, 200] and sum(sizes) == 480


def test_init_params():
    result = fit(diverging(99, "loss"), KEY, 2, init_params={"a": jnp.array(5.0)}, progress=False)
    assert float(result.params["a"]) == 7


def test_evaluate():
    svi = make_svi()
    state = svi.init(KEY, X, y=Y)
    result = FitResult({}, state, np.empty(0))
    mean, error = evaluate(svi, random.key(1), result, X, y=Y, num_draws=400)
    assert 0 < error < 0.02 * abs(mean)
    # Batches: the same mean. A fresh `SVI`, as for a restored state.
    batch, batch_error = evaluate(make_svi(), random.key(3), state, X, y=Y, num_draws=600, batch_size=20)
    assert abs(batch - mean) < 5 * np.hypot(error, batch_error)


def test_standard_error():
    def model():
        numpyro.factor("f", numpyro.sample("noise", dist.Normal(7, 2)))

    def guide():
        numpyro.sample("noise", dist.Normal(7, 2))

    svi = SVI(model, guide, adam(), Trace_ELBO())
    state = svi.init(KEY)
    mean, error = evaluate(svi, KEY, state, num_draws=400)
    np.testing.assert_allclose(error, 2 / np.sqrt(400), rtol=0.2)
    assert abs(mean - 7) < 5 * error
    few = [evaluate(svi, random.key(i), state, num_draws=2)[1] for i in range(100)]
    np.testing.assert_allclose(np.mean(np.square(few)), 2**2 / 2, rtol=0.35)  # its square is unbiased


def learning_rates(optim, num_steps):
    """Adam moves by its learning rate when the gradient is constant."""
    params = jnp.zeros(())
    state, rates = optim.init(params), []
    for _ in range(num_steps):
        update, state = optim.update(jnp.ones(()), state, params)
        rates.append(-float(update))
    return rates


def test_adam_schedule():
    np.testing.assert_allclose(learning_rates(adam(0.1), 5), 0.1, rtol=1e-4)
    rates = learning_rates(adam(0.1, 20, final=0.05), 23)
    np.testing.assert_allclose(rates[0], 0.1, rtol=1e-4)
    np.testing.assert_allclose(rates[10], 0.1 * (1 + 0.05) / 2, rtol=1e-4)
    np.testing.assert_allclose(rates[20:], 0.005, rtol=1e-3)
    assert (np.diff(rates[:21]) < 0).all()
    rates = learning_rates(adam(0.1, 20, warmup=4), 21)
    np.testing.assert_allclose(rates[:5], 0.1 * np.arange(1, 6) / 5, rtol=1e-4)
    np.testing.assert_allclose(rates[20], 0.002, rtol=1e-3)


def test_inside_jit_it_says_so():
    svi = make_svi()
    with pytest.raises(TypeError, match="npgp.fit looks at values.*inside jit"):
        jax.jit(lambda: fit(svi, KEY, 5, X, y=Y, progress=False).losses)()
    with pytest.raises(TypeError, match="npgp.fit looks at values"):
        jax.grad(lambda y: fit(svi, KEY, 5, X, y=y, progress=False).losses[-1])(jnp.asarray(Y))
    with pytest.raises(TypeError, match="npgp.evaluate looks at values"):
        jax.vmap(lambda key: evaluate(svi, key, None, X, y=Y)[0])(random.split(KEY, 2))


def test_threads_take_turns_in_a_model():
    """NumPyro's handlers are those of all threads; one ``SVI`` may be in several."""
    inside = []

    def model(X, y=None, *, size):
        inside.append(threading.get_ident())
        time.sleep(0.02)
        regression(X, y, size=size)
        assert set(inside) == {threading.get_ident()}
        inside.clear()

    svi = make_svi(model)

    def run(seed):
        return fit(svi, random.key(seed), 10, X, y=Y, batch_size=20, progress=False)

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, range(2)))
    assert_same(together[1]._replace(losses=None), run(1)._replace(losses=None))
    assert (together[0].losses != together[1].losses).any()
