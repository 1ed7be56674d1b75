"""What training makes of observed statements: a batch must stand for all rows, and every row must be possible."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

import npgp
from npgp.likelihoods import Columns, Factorized
from npgp.training import DataError, Stream, fit
from npgp.training.data import Data
from npgp.training.observed import check_of_rows

KEY = jax.random.key(0)
N, B = 60, 20
X = np.random.default_rng(0).uniform(0, 4, size=(N, 1)).astype(np.float32)
Y = np.random.default_rng(1).poisson(1.0, N).astype(np.float32)
Z = np.array([[1.0], [3.0]], np.float32)


def no_guide(*args, **kwargs):
    pass


def svi_of(model):
    return SVI(model, no_guide, optax.sgd(0.01), Trace_ELBO())


def look(model, *args, batch_size: int | None = B, **kwargs) -> None:
    """What :func:`fit` does before it trains; nothing is compiled but what checks the rows."""
    inputs = Data(args, kwargs, KEY, batch_size, None)
    check_of_rows(svi_of(model), {}, inputs, 0)


def mean_of(X):
    return numpyro.param("w", 0.0) * X[:, 0]


# ---------------------------------------------------------------------------------------------------------------
# Scales


def in_plate(plate, weights=None, sample=None):
    """A model whose observations are in what ``plate(B)`` makes."""

    def model(X, y):
        scale = 1.0 if weights is None else weights(X)
        with plate(len(X)), handlers.scale(scale=scale):
            (sample or numpyro.sample)("y", dist.Normal(mean_of(X), 1.0), obs=y)

    return model


def observed(name, fn, obs):
    """The same as a statement of GP values."""
    f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
    npgp.observe(name, f(jnp.zeros((obs.shape[0], 1))) + fn.mean, npgp.Gaussian(variance=1.0), obs=obs)


def outer_f(X, y):
    f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
    with numpyro.plate("data", len(X)):
        npgp.observe("y", f(X), npgp.Poisson(), obs=y)


def nothing(size):
    return handlers.block(hide=[])


def several_outputs(X, y, size=N):
    with numpyro.plate("outputs", 3, dim=-2), npgp.plate("rows", size, rows=len(X), dim=-1):
        numpyro.sample("y", dist.Normal(mean_of(X), 1.0), obs=jnp.broadcast_to(y, (3, len(X))))


def rows_at_the_left(X, y, size=N):
    with npgp.plate("rows", size, rows=len(X), dim=-2), numpyro.plate("times", 3, dim=-1):
        numpyro.sample("y", dist.Normal(mean_of(X)[:, None], 1.0), obs=jnp.broadcast_to(y[:, None], (len(X), 3)))


def several_to_a_row(X, y, size=N):
    with npgp.plate("values", 3 * size, rows=3 * len(X)):
        numpyro.sample("y", dist.Normal(jnp.tile(mean_of(X), 3), 1.0), obs=jnp.tile(y, 3))


def virtual(X, y, size=N):
    """What is observed is a constant, of the rows' values."""
    with npgp.plate("rows", size, rows=len(X)):
        numpyro.sample("v", dist.Bernoulli(logits=mean_of(X)), obs=jnp.ones(len(X)))


def other_data(X, y):
    """Observations that have as many rows as a batch by chance, or a multiple, and are all there."""
    with npgp.plate("rows", N, rows=len(X)):
        numpyro.sample("y", dist.Normal(mean_of(X), 1.0), obs=y)
    numpyro.sample("sensors", dist.Normal(numpyro.param("b", jnp.zeros(B)), 1.0), obs=np.ones(B))
    with numpyro.plate("more", 2 * B):
        numpyro.sample("others", dist.Normal(0.0, 1.0), obs=np.ones(2 * B))


def in_a_loop(X, y, size=N):
    def body(level, y):
        with npgp.plate("rows", size, rows=len(X)):
            numpyro.sample("y", dist.Normal(level, 1.0), obs=y)
        return level, None

    scan(body, numpyro.param("level", 0.0), jnp.stack([y, y]))


GOOD = {
    "numpyro.plate": in_plate(lambda size: numpyro.plate("data", N, subsample_size=size)),
    "npgp.plate": in_plate(lambda size: npgp.plate("data", N, rows=size)),
    "handlers.scale": in_plate(lambda size: numpyro.plate("data", size), lambda X: N / len(X)),
    "a computed scale": in_plate(lambda size: numpyro.plate("data", size), lambda X: jnp.float32(N) / len(X)),
    "without a plate": in_plate(nothing, lambda X: N / B),
    "weights": in_plate(lambda size: npgp.plate("data", N, rows=size), lambda X: X[:, 0]),
    "a tempered likelihood": in_plate(lambda size: npgp.plate("data", N, rows=size), lambda X: 0.5),
    "outputs": several_outputs,
    "rows at dim -2": rows_at_the_left,
    "several values to a row": several_to_a_row,
    "constants": virtual,
    "other data": other_data,
    "a loop": in_a_loop,
    "a factor of the author's": lambda X, y: numpyro.factor("f", 3.0 * mean_of(X)),
    "sums": lambda X, y: numpyro.factor("f", jnp.sum(mean_of(X))),
}
BAD = {
    "a plate that does not scale": (in_plate(lambda size: numpyro.plate("data", size)), "by 1,"),
    "GP values": (outer_f, "by 1,"),
    "no plate": (in_plate(nothing), "by 1,"),
    "another size": (in_plate(lambda size: npgp.plate("data", 2 * N, rows=size)), "by 6,.*'data' is one of 120"),
    "another scale": (in_plate(nothing, lambda X: 2.0), "by 2,"),
    "weights alone": (in_plate(lambda size: numpyro.plate("data", size), lambda X: X[:, 0]), "by weights"),
    "twice": (in_plate(lambda size: npgp.plate("data", N, rows=size), lambda X: N / B), "60 / 20 twice"),
    "outputs": (lambda X, y: several_outputs(X, y, 2 * N), "by 6,"),
    "rows at dim -2": (lambda X, y: rows_at_the_left(X, y, B), "by 1,"),
    "several values to a row": (lambda X, y: several_to_a_row(X, y, B), "by 1,"),
    "constants": (lambda X, y: virtual(X, y, B), "v scales .* by 1,"),
    "a loop": (lambda X, y: in_a_loop(X, y, B), "by 1,"),
    "a factor in a plate": (in_plate(lambda size: numpyro.plate("data", size), sample=lambda name, fn, obs:
                                     numpyro.factor(name, fn.log_prob(obs))), "by 1,"),
}  # fmt: skip


@pytest.mark.parametrize("model", GOOD.values(), ids=GOOD)
def test_batches_that_stand_for_all_rows(model):
    look(model, X, Y)


@pytest.mark.parametrize("model, words", BAD.values(), ids=BAD)
def test_batches_that_do_not(model, words):
    with pytest.raises(
        ValueError, match=f"{words}(.*they stand for 60 rows.*npgp.plate.'rows', 60, rows=20.)?"
    ) as error:
        look(model, X, Y)
    assert "\n" not in str(error.value)


def test_all_rows_at_every_step():
    """Where each step has all rows, a plate must not take them for a batch of more."""
    for good in (outer_f, in_plate(nothing), in_plate(nothing, lambda X: X[:, 0]), other_data):
        look(good, X, Y, batch_size=None)
    for run in (look, lambda *args, **options: fit(svi_of(args[0]), KEY, 1, *args[1:], progress=False, **options)):
        with pytest.raises(ValueError, match=r"60 rows of a step by 2,.*needs 1:.*'data' is one of 120"):
            run(in_plate(lambda size: npgp.plate("data", 2 * N, rows=size)), X, Y, batch_size=None)


def test_sources_that_do_not_tell_how_many_rows_there_are():
    batches = [(X[i : i + B], Y[i : i + B]) for i in range(0, N, B)]
    unscaled, scaled = (in_plate(lambda size, n=n: npgp.plate("data", n or size, rows=size)) for n in (None, N))
    for source in (Stream(batches), Stream(batches, num_rows=N)):
        look(scaled, source, batch_size=None)
        with pytest.raises(ValueError, match="y (does not scale|scales the 20 rows of a step by 1,)"):
            look(unscaled, source, batch_size=None)
    look(unscaled, Stream(batches, num_rows=B), batch_size=None)


def test_fit_refuses_before_it_trains():
    model, _ = BAD["a plate that does not scale"]
    with pytest.raises(ValueError, match="rows=20"):
        fit(svi_of(model), KEY, 5, X, Y, batch_size=B, progress=False)


# ---------------------------------------------------------------------------------------------------------------
# Values


def counts(X, y, mask=None, likelihood=None):
    f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
    with npgp.plate("data", N, rows=len(X)):
        npgp.observe("y", f(X), likelihood or npgp.Poisson(), obs=y, mask=mask)


def with_value(value, row=47):
    y = Y.copy()
    y[row] = value
    return y


@pytest.mark.parametrize("value", [-1.0, 0.5, np.inf, np.nan])
def test_every_row_is_looked_at(value):
    look(counts, X, Y)
    with pytest.raises(ValueError, match=rf"y has the value {value:g} in row 47; for Poisson it must be a count"):
        look(counts, X, with_value(value))


def test_rows_of_the_last_batch_and_masked_ones():
    mask = np.arange(N) != 59
    batch = 25  # the last batch of an epoch is left out, and differs from epoch to epoch
    look(counts, X, with_value(np.nan, 59), mask, batch_size=batch)
    with pytest.raises(ValueError, match="row 58"):
        look(counts, X, with_value(-1.0, 58), mask, batch_size=batch)


def test_likelihoods_that_depend_on_the_row():
    """And several of them, by column."""

    def binomial(X, y, trials):
        counts(X, y, likelihood=Factorized(lambda f: dist.Binomial(trials, logits=f)))

    trials = np.full(N, 9)
    look(binomial, X, Y, trials)
    trials[31] = Y[31] - 1
    with pytest.raises(ValueError, match=rf"y has the value {Y[31]:g} in row 31; for Factorized"):
        look(binomial, X, Y, trials)

    def columns(X, Y):
        with numpyro.plate("columns", 2, dim=-2):
            f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
            with npgp.plate("data", N, rows=len(X)):
                npgp.observe("Y", f(X), Columns([npgp.Bernoulli(), npgp.Poisson()]), obs=Y.T)

    look(columns, X, np.stack([Y > 0, Y], 1).astype(np.float32))
    with pytest.raises(ValueError, match=r"Y has the value 7 in row 33; for Bernoulli .*, for Poisson"):
        look(columns, X, np.stack([np.where(np.arange(N) == 33, 7, 0), Y], 1).astype(np.float32))


def test_values_that_are_drawn_are_left_alone():
    def model(X, y):
        shock = numpyro.sample("shock", dist.Normal(0.0, 1.0))
        counts(X, jnp.where(y > 100, y, shock))

    def guide(X, y):
        numpyro.sample("shock", dist.Normal(numpyro.param("loc", 0.0), 1.0))

    svi = SVI(model, guide, optax.sgd(0.01), Trace_ELBO())
    check_of_rows(svi, {}, Data((X, Y), {}, KEY, B, None), 0)


def test_what_was_trained_before_a_bad_row_is_kept():
    """Rows that are read as the training goes on are looked at before its steps."""

    def guide(X, y):
        npgp.SparseGP("f", npgp.RBF(1.0), Z).guide()

    svi = SVI(counts, guide, optax.sgd(0.01), Trace_ELBO())
    batches = [(X[i : i + B], with_value(-1.0)[i : i + B]) for i in range(0, N, B)]
    options = {"steps_per_call": 1, "progress": False}
    with pytest.raises(DataError, match="value -1 in row 7 of batch 2.*The 2 steps before it are in .*result") as error:
        fit(svi, KEY, 10, Stream(batches, num_rows=N), **options)
    assert error.value.step == 2
    # The same as training on the rows before it.
    good = fit(svi, KEY, 2, Stream(batches, num_rows=N), **options)
    np.testing.assert_array_equal(error.value.result.losses, good.losses)
    jax.tree.map(np.testing.assert_array_equal, error.value.result.params, good.params)

    # Also where reading fails.
    def broken():
        yield from batches[:2]
        raise OSError("the disk is gone")

    model = GOOD["npgp.plate"]
    with pytest.raises(DataError, match="OSError: the disk is gone. The 2 steps before") as error:
        fit(svi_of(model), KEY, 10, Stream(lambda epoch: broken(), num_rows=N), **options)
    assert len(error.value.result.losses) == error.value.step == 2
    assert isinstance(error.value.__cause__, OSError)


# ---------------------------------------------------------------------------------------------------------------
# Missing observations


def missing(X, y, mask="nan"):
    f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
    with npgp.plate("data", N, rows=len(X)):
        npgp.observe("y", f(X), npgp.Poisson(), obs=y, mask=mask)


def guide_of_missing(X, y, mask="nan"):
    npgp.SparseGP("f", npgp.RBF(1.0), Z).guide()


SEEN = np.arange(N) % 3 != 1
HOLES = np.where(SEEN, Y, np.nan).astype(np.float32)


@pytest.mark.parametrize("how", ["on the host", "from a stream"])
def test_nan_are_missing_observations(how):
    """No word to ``fit`` is needed, and the numbers are those of a mask; NaN elsewhere are refused all the same."""
    svi = SVI(missing, guide_of_missing, optax.sgd(0.001), TraceMeanField_ELBO())
    options = {"batch_size": B, "progress": False, "steps_per_call": 2, "on_host": how == "on the host"}

    def run(X, *data):
        if how != "from a stream":
            return fit(svi, KEY, 4, X, *data, **options).losses
        batches = [tuple(array[i : i + B] for array in (X, *data)) for i in range(0, N, B)]
        return fit(svi, KEY, 4, Stream(batches, num_rows=N), progress=False, steps_per_call=2).losses

    losses = run(X, HOLES)
    assert np.isfinite(losses).all()
    # Two programs, which XLA may fuse otherwise: to rounding.
    np.testing.assert_allclose(losses, run(X, HOLES, SEEN), rtol=2e-6)
    with pytest.raises(ValueError, match="NaN or infinite|value nan in row 4"):
        run(X, HOLES, np.where(np.arange(N) == 4, True, SEEN))
    with pytest.raises(ValueError, match="1 of 60 values in args.0. are NaN|1 values in the .* are NaN"):
        run(np.where(np.arange(N)[:, None] == 31, np.nan, X).astype(np.float32), HOLES)
    with pytest.raises(ValueError, match="y has the value inf|NaN or infinite"):
        run(X, np.where(np.arange(N) == 31, np.inf, HOLES).astype(np.float32))


def test_nan_without_a_mask_are_refused():
    svi = SVI(counts, guide_of_missing, optax.sgd(0.001), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match='20 of 60 values in args.1. are NaN .*mask="nan"'):
        fit(svi, KEY, 2, X, HOLES, progress=False)
    svi = SVI(missing, guide_of_missing, optax.sgd(0.001), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match="20 of 60 values in args.1. are NaN"):
        fit(svi, KEY, 2, X, HOLES, progress=False, allow_nan=False)


def test_nan_are_missing_in_collapsed_bounds_too():
    def model(X, y, mask):
        lengthscale = numpyro.param("lengthscale", 1.0, constraint=dist.constraints.positive)
        numpyro.sample("y", npgp.CollapsedGP(npgp.RBF(lengthscale), X, Z, npgp.Poisson(), mask=mask), obs=y)

    one, other = (npgp.fit_collapsed(KEY, model, X, HOLES, m, progress=False) for m in ("nan", SEEN))
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-6)
    with pytest.raises(ValueError, match="20 of 60 values in args.1. are NaN"):
        npgp.fit_collapsed(KEY, model, X, HOLES, None, progress=False)


def test_data_of_another_shape_are_looked_at_anew():
    def model(X, y):
        f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
        with npgp.plate("data", N, rows=len(X)):
            npgp.observe("y", f(X), npgp.Poisson(), obs=y if y.ndim == 1 else y[:, 1])

    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), TraceMeanField_ELBO())
    counts = np.ones(N)
    result = npgp.fit(svi, jax.random.key(0), 1, X, counts, batch_size=B, progress=False)
    table = np.stack([counts, counts], axis=1)
    table[7, 1] = -1.0
    with pytest.raises(ValueError, match="y has the value -1 in row 7"):
        npgp.fit(svi, jax.random.key(0), 1, X, table, batch_size=B, progress=False, init_state=result.state)
