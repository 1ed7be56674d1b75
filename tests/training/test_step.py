"""The step is a pure function: in loops of the user's own it does what fit does."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

import npgp
from npgp.model import row_param
from npgp.training import Step, row_adam

KEY = random.key(0)
X = np.linspace(0.0, 4.0, 24, dtype=np.float32)[:, None]
Y = np.sin(2.0 * X[:, 0])


def gp_svi():
    def model(X, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        f = npgp.SparseGP("f", npgp.RBF(lengthscale), X[::6]).draw()
        with npgp.plate("rows", len(X)):
            npgp.observe("y", f(X), npgp.Gaussian(scale=0.2), obs=y)

    return SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.05), TraceMeanField_ELBO())


def table_svi(at=np.inf):
    """Means of rows, in a table; and a number that moves by about 1 a step, and makes NaN of a row once it is there."""

    def model(X, y, rows):
        mean = row_param("mean", np.zeros(len(Y), np.float32), rows)
        a = numpyro.param("a", 0.0)
        numpyro.factor("f", a - jnp.sum((mean - y) ** 2) + jnp.sum(jnp.sqrt(jnp.where(a > at, 0.0 * mean, 1.0))))

    return SVI(model, lambda X, y, rows: None, npgp.adam(1.0), Trace_ELBO())


def test_steps_in_a_scan_are_those_of_fit():
    step = Step(gp_svi())
    state, info = jax.jit(lambda state: lax.scan(lambda state, _: step(state, X, Y), state, length=12))(
        step.init(KEY, X, Y)
    )
    result = npgp.fit(gp_svi(), KEY, 12, X, Y, progress=False)
    np.testing.assert_allclose(info.loss, result.losses, rtol=1e-4)
    assert np.all(info.ok) and info.nan.keys() == result.params.keys() - {"auto_rows"}
    for name, value in step.get_params(state).items():
        np.testing.assert_allclose(value, result.params[name], rtol=1e-3, atol=1e-4)
    # A state of one goes on in the other.
    assert int(npgp.fit(step.svi, KEY, 3, X, Y, init_state=state, progress=False).state.optim_state[0]) == 15


def test_a_step_wants_a_start():
    state = Step(gp_svi()).init(KEY, X, Y)
    with pytest.raises(ValueError, match="this SVI has not seen its model yet: call step.init"):
        Step(gp_svi())(state, X, Y)


def test_many_trainings_in_one_program():
    step = Step(gp_svi())

    def train(key):
        return lax.scan(lambda state, _: step(state, X, Y), step.init(key, X, Y), length=5)

    keys = random.split(KEY, 3)
    _, together = jax.jit(jax.vmap(train))(keys)
    alone = [npgp.fit(gp_svi(), key, 5, X, Y, progress=False).losses for key in keys]
    np.testing.assert_allclose(together.loss, alone, rtol=1e-4)
    assert together.ok.shape == (3, 5)


def test_rows_of_tables_move_alone():
    rows = np.array([3, 7, 7])
    step = Step(table_svi(), row_adam(0.1))
    state = step.init(KEY, X, Y[rows], rows=rows)
    state, info = jax.jit(step)(state, X, Y[rows], rows=rows)
    assert info.ok and info.nan.keys() == {"a", "mean"}
    assert np.flatnonzero(step.get_params(state)["mean"]).tolist() == [3, 7]


@pytest.mark.parametrize("row_optim", [None, row_adam(0.1)], ids=["whole", "rows"])
def test_what_became_nan_is_named(row_optim):
    rows = np.arange(4)
    step = Step(table_svi(at=1.5), row_optim)
    state = step.init(KEY, X, Y[rows], rows=rows)
    take, said = jax.jit(lambda state: step(state, X, Y[rows], rows=rows)), []
    for _ in range(3):
        state, info = take(state)
        said.append((bool(info.ok), [name for name, bad in info.nan.items() if bad]))
    assert said == [(True, []), (True, []), (False, ["mean"])] and np.isfinite(info.loss)
