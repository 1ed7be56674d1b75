"""Values of one draw in several ``npgp.sample`` statements are those of one function, in law those of the exact GP."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO

import npgp

Z = np.linspace(-2.0, 2.0, 3)[:, None]  # leaves most open
X = np.array([[-1.7], [-0.4], [0.9]])
NEW = np.array([[0.1], [2.3]])
CLOSE = X[1:] + 0.3
START = 0.8


def rbf(X, X2, lengthscale=1.0):
    return np.exp(-0.5 * np.square((X - X2.T) / lengthscale))


def stacked_law(statements):
    """Covariance of all values that a model without guide samples: they are linear in its standard normal sites."""
    trace = handlers.trace(handlers.seed(statements, 0)).get_trace()
    sites = {name: site["value"] for name, site in trace.items() if site["type"] == "sample"}

    def values(flat):
        return jnp.concatenate([jnp.ravel(v) for v in handlers.substitute(statements, unflat(flat))()])

    flat, unflat = jax.flatten_util.ravel_pytree(sites)
    J = jax.jit(jax.jacobian(values))(flat)
    return J @ J.T


def test_values_of_one_function(float64):
    def statements():
        f = npgp.SparseGP("f", npgp.RBF(1.0), [Z, Z[:1] + 0.7]).draw()
        return npgp.sample("a", f(X)), npgp.sample("b", f(NEW) + 1.0), npgp.sample("c", -2.0 * f(CLOSE))

    inputs, scale = np.concatenate([X, NEW, CLOSE]), np.repeat([1.0, -2.0], [5, 2])
    np.testing.assert_allclose(stacked_law(statements), scale[:, None] * rbf(inputs, inputs) * scale, atol=1e-7)


def test_at_the_same_inputs(x64):
    def statements():
        f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
        return npgp.sample("a", f(X)), npgp.sample("b", f(X)), npgp.sample("c", f(X))

    same = np.kron(np.ones((3, 3)), rbf(X, X))
    # What is left at the same inputs is the jitter.
    np.testing.assert_allclose(stacked_law(statements), same, atol=1e-7 if x64 is jnp.float64 else 1e-4)


def test_sums_with_a_draw_in_common(float64):
    def statements():
        f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
        g = npgp.SparseGP("g", npgp.RBF(0.5), Z).draw()
        first = npgp.sample("f_first", f(X)), npgp.sample("g_first", g(NEW))
        return *first, npgp.sample("sum", f(X) + 3.0 * g(X)), npgp.sample("g_last", g(X))

    of_f = np.array([1.0, 0.0, 1.0, 0.0]).repeat([3, 2, 3, 3])
    of_g = np.array([0.0, 1.0, 3.0, 1.0]).repeat([3, 2, 3, 3])
    inputs = np.concatenate([X, NEW, X, X])
    right = np.outer(of_f, of_f) * rbf(inputs, inputs) + np.outer(of_g, of_g) * rbf(inputs, inputs, 0.5)
    np.testing.assert_allclose(stacked_law(statements), right, atol=1e-6)  # of eleven values three say nothing new


@pytest.mark.parametrize("own", [False, True], ids=["one kernel", "a kernel each"])
def test_functions_in_a_plate(own, float64):
    lengthscales = np.array([0.7, 1.3]) if own else np.ones(2)

    def statements():
        with numpyro.plate("functions", 2, dim=-2):
            f = npgp.SparseGP("f", npgp.RBF(lengthscales[:, None] if own else 1.0), Z).draw()
        return npgp.sample("a", f(X)), npgp.sample("b", f(NEW))

    law = stacked_law(statements)
    inputs, index = np.concatenate([X, NEW]), np.array([[0, 1, 2, 6, 7], [3, 4, 5, 8, 9]])
    for i, lengthscale in zip(index, lengthscales, strict=True):
        np.testing.assert_allclose(law[np.ix_(i, i)], rbf(inputs, inputs, lengthscale), atol=1e-7)
    np.testing.assert_allclose(law[np.ix_(*index)], 0.0, atol=1e-12)


def state_space(steps=4):
    """The state itself is the input of the next step; one that comes back sees the same function."""
    f = npgp.SparseGP("f", npgp.RBF(0.3), Z).draw()
    state, states = jnp.full(1, START), []
    for t in range(steps):
        state = npgp.sample(f"step{t}", f(state[:, None]))
        states.append(state)
    return jnp.concatenate(states)


def test_a_state_space_model(float64):
    """Its density at given states is the GP's at the inputs they are: p(x_1, …, x_T) = N(f(x_0), …; 0, K)."""
    trace = handlers.trace(handlers.seed(state_space, 1)).get_trace()
    sites = {name: site["value"] for name, site in trace.items() if site["type"] == "sample"}
    residuals = {name: value for name, value in sites.items() if name != "f.u"}

    def states(residuals):
        return handlers.substitute(state_space, {"f.u": sites["f.u"], **residuals})()

    x = states(residuals)
    inputs = jnp.concatenate([jnp.full(1, START), x[:-1]])[:, None]
    prior = npgp.sparse.factorize(npgp.RBF(0.3), [npgp.features.Points(jnp.asarray(Z))])
    A, K = prior(inputs).A[0], rbf(np.asarray(inputs), np.asarray(inputs), 0.3)
    given = dist.MultivariateNormal(A.T @ sites["f.u"], K - A.T @ A)  # given the inducing values
    J = jnp.stack([jax.grad(lambda r, t=t: states(r)[t])(residuals)[f"step{t}.residual"][0] for t in range(len(x))])
    noise = jnp.concatenate([residuals[f"step{t}.residual"] for t in range(len(x))])
    by_change_of_variables = dist.Normal().log_prob(noise).sum() - jnp.log(J).sum()
    np.testing.assert_allclose(given.log_prob(x), by_change_of_variables, rtol=1e-5)


def two_statements(y=None):
    f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
    a, b = npgp.sample("a", f(X)), npgp.sample("b", f(X[::-1]))
    numpyro.deterministic("difference", a - b[::-1])
    numpyro.sample("y", dist.Normal(a, 0.3).to_event(1), obs=y)


def test_with_a_guide_and_its_predictions(float64):
    guide = npgp.AutoSparseGP(two_statements)
    svi = SVI(two_statements, guide, npgp.adam(0.01), TraceMeanField_ELBO())
    y, key = np.array([0.3, -0.2, 1.0]), jax.random.key(0)
    params = npgp.fit(svi, key, 3, y, progress=False).params
    drawn = guide.sample_posterior(key, params, y, sample_shape=(5,))
    np.testing.assert_allclose(drawn["a"], drawn["b"][:, ::-1], atol=2e-3)  # the root of the jitter
    for of_guide in ({"guide": guide}, {"posterior_samples": {"f.u": drawn["f.u"]}}):
        predictive = Predictive(two_statements, params=params, num_samples=5, **of_guide)(key)
        assert np.std(predictive["a"]) > 0.1
        np.testing.assert_allclose(predictive["difference"], 0.0, atol=2e-3)


def test_in_a_scan_it_is_asked_for_by_name():
    def stepped(**options):
        f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()

        def step(state, _):
            state = npgp.sample("step", f(state[:, None]), **options)
            return state, state

        return scan(step, jnp.zeros(1), None, length=3)[1]

    with pytest.raises(ValueError, match="f is drawn outside of this scan.*joint=False"):
        handlers.seed(stepped, 0)()
    assert handlers.seed(stepped, 0)(joint=False).shape == (3, 1)


def test_what_cannot_be_conditioned_is_an_error():
    def long_format():
        with numpyro.plate("functions", 2, dim=-2):
            f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
        npgp.sample("a", f(X)[np.array([0, 1]), np.array([2, 0])])
        npgp.sample("b", f(X))

    with pytest.raises(ValueError, match="f was sampled before.*in one statement"):
        handlers.seed(long_format, 0)()
