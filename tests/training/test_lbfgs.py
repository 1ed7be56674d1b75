"""L-BFGS: it finds minima that are known, steps back from where the loss is not finite, and says why it ended."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from npgp.training import lbfgs


def rosenbrock(params):
    x = jnp.concatenate([params["a"], params["b"].ravel()])
    return jnp.sum(100.0 * jnp.square(x[1:] - jnp.square(x[:-1])) + jnp.square(1.0 - x[:-1]))


def test_a_curved_valley(x64):
    start = {"a": jnp.full(3, -1.2, x64), "b": jnp.zeros((2, 2), x64)}
    result = lbfgs.minimize(rosenbrock, start, max_steps=300, tolerance=1e-12, window=5, progress=False)
    tolerance = 1e-6 if x64 == jnp.float64 else 1e-2
    jax.tree.map(lambda x: np.testing.assert_allclose(x, 1.0, atol=tolerance), result.params)
    assert result.params["b"].shape == (2, 2) and result.params["a"].dtype == x64
    assert result.converged or "precision" in result.message
    assert len(result.losses) < 200
    assert np.all(np.diff(result.losses) < 0)
    np.testing.assert_allclose(result.losses[0], rosenbrock(start), rtol=1e-6)
    np.testing.assert_allclose(result.losses[-1], rosenbrock(result.params), rtol=1e-3, atol=1e-10)


def test_ill_conditioned_in_as_few_steps_as_scipy(float64):
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(30, 30)))[0]
    H = basis * np.geomspace(1e-2, 1e3, 30) @ basis.T
    target = rng.normal(size=30)

    def loss(x, target):
        return 0.5 * (x - target) @ H @ (x - target) + jnp.sum((x - target) ** 4)

    result = lbfgs.minimize(loss, jnp.zeros(30), jnp.array(target), tolerance=1e-5, window=20, progress=False)
    assert result.converged and result.message == "the last steps gained less than the tolerance"
    assert result.losses[-1] < 1e-4
    gradient, trace = jax.jit(jax.value_and_grad(loss)), []
    optimize.minimize(
        lambda x: jax.tree.map(np.asarray, gradient(x, target)),
        np.zeros(30),
        jac=True,
        method="L-BFGS-B",
        callback=lambda intermediate_result: trace.append(intermediate_result.fun),
    )
    for level in (1.0, 1e-2):
        assert np.argmax(result.losses < level) < 1.3 * np.argmax(np.array(trace) < level) + 5


def test_it_steps_back_from_where_the_loss_is_not_finite(float64):
    """The first step goes far out of the domain, where the loss is NaN or infinite."""

    def loss(x, outside):
        return jnp.sum(jnp.where(x > 0.0, 50.0 * x - jnp.log(jnp.where(x > 0.0, x, 1.0)), outside))

    for outside in (jnp.nan, -jnp.inf):
        result = lbfgs.minimize(
            loss,
            jnp.full(2, 0.1),
            outside,
            tolerance=1e-12,
            window=3,
            progress=False,
        )
        np.testing.assert_allclose(result.params, 0.02, rtol=1e-4)
        assert np.all(np.isfinite(result.losses))


def test_slopes_decide_where_rounding_hides_which_loss_is_lower(float64):
    """By losses alone the search ends after 44 steps, .27 above the least."""
    curvatures = jnp.logspace(-2, 2, 50)

    def exact(x):
        return jnp.sum(curvatures * jnp.square(x - 1.0))

    def rounded(x):
        return 1e4 + exact(x) + jax.lax.stop_gradient(0.03 * jnp.sin(1e9 * jnp.sum(x)))

    result = lbfgs.minimize(rounded, jnp.zeros(50), max_steps=150, window=1000, progress=False)
    assert len(result.losses) == 151 and np.any(np.diff(result.losses) > 0.0)
    assert exact(result.params) < 0.05


def test_how_it_ends(float64):
    def square(x):
        return jnp.sum(jnp.square(x))

    result = lbfgs.minimize(rosenbrock, {"a": jnp.zeros(2), "b": jnp.zeros(2)}, max_steps=3, progress=False)
    assert not result.converged and len(result.losses) == 4 and result.message == "stopped after max_steps steps"
    result = lbfgs.minimize(square, jnp.zeros(2), progress=False)
    assert result.converged and len(result.losses) == 1
    # A loss whose gradient points the wrong way has no lower point along any direction that it is asked for.
    result = lbfgs.minimize(
        lambda x: square(x) - 2.0 * (square(x) - jax.lax.stop_gradient(square(x))), jnp.ones(2), progress=False
    )
    assert not result.converged and "no better point" in result.message
    np.testing.assert_array_equal(result.params, 1.0)

    def interrupt(loss):
        raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="Interrupted: 0 of 1000 steps"):
        result = lbfgs.minimize(square, jnp.ones(2), describe=interrupt, progress=False)
    assert not result.converged and result.message == "interrupted" and result.losses.tolist() == [2.0]


def test_what_the_loss_depends_on_is_renewed(float64):
    """The second function is higher all over: what was lower under the first counts for nothing."""
    others = iter([(jnp.asarray([3.0, -1.0]), jnp.asarray(50.0)), None, None])
    asked = []

    def renew(x):
        asked.append(np.asarray(x))
        return next(others)

    def loss(x, target, level):
        return level + jnp.sum(jnp.cosh(x - target))

    args = jnp.ones(2), jnp.asarray(0.0)
    result = lbfgs.minimize(loss, jnp.zeros(2), *args, max_steps=60, tolerance=1e-12, renew=renew, progress=False)
    np.testing.assert_allclose(asked[0], 1.0, atol=0.05)  # after 4 steps
    np.testing.assert_allclose(result.params, [3.0, -1.0], atol=1e-5)
    assert len(asked) >= 2 and not isinstance(next(others, None), tuple)
    assert result.converged or "precision" in result.message
    assert result.losses[0] < 5 < 50 < result.losses[-1] < 52.001


def test_refusals():
    for start in (-1.0, jnp.inf):
        with pytest.raises(FloatingPointError, match="the loss is nan at the start"):
            lbfgs.minimize(lambda x: jnp.sum(jnp.log(x)), jnp.full(2, start), progress=False)
    for options in (dict(max_steps=0), dict(tolerance=-1.0), dict(window=0), dict(tolerance=np.nan)):
        with pytest.raises(ValueError, match="they must be at least 1, 1 and 0"):
            lbfgs.minimize(jnp.sum, jnp.ones(2), **options)


def test_other_units_are_the_same_point_and_slope():
    scale, new = jnp.array([1.0, 4.0]), jnp.array([2.0, 0.5])
    before = lbfgs._before(jnp.array([3.0, -2.0]), scale, 3, 10)._replace(gradient=jnp.array([0.5, -1.5]))
    after = lbfgs._rescaled(before, new)
    np.testing.assert_allclose(after.x * new, before.x * scale)
    np.testing.assert_allclose(after.gradient / new, before.gradient / scale)
