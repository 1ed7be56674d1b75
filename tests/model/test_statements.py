"""Several statements of one draw are values of one function: their joint law, in Python loops, scans and windows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import NOISE, X, compiled, rbf, sparse_gp, traces
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import Predictive
from numpyro.infer.util import log_density

import npgp

#: At inputs of an earlier statement, close to these, and elsewhere.
AT = (X[:3].copy(), np.concatenate([X[1:2], X[:1] + 0.01]), X[4:6].copy() - 0.3)
#: Each of two or three factors has a jitter of 1e-8 relative to the prior variance.
JITTER = 1e-7


def law(model, *args, guided=False):
    """Mean, and covariance over all statements' values, which are affine in what is drawn: exactly, by the Jacobian."""

    def noise():
        trace = handlers.trace(handlers.seed(model, 0)).get_trace(*args)
        return {n: s["value"] for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}

    shapes = {name: value.shape for name, value in jax.eval_shape(noise).items()}

    def values(noise):
        sites = handlers.trace(handlers.substitute(handlers.seed(model, 0), noise)).get_trace(*args)
        return jnp.concatenate([jnp.ravel(s["value"]) for s in sites.values() if s["type"] == "deterministic"])

    zero = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    mean, jacobian = compiled(lambda: (values(zero), jax.jacobian(values)(zero)))()
    flat = np.concatenate([np.asarray(j).reshape(len(mean), -1) for j in jacobian.values()], axis=1)
    return np.asarray(mean), flat @ flat.T


@pytest.mark.parametrize("structure", ["svgp", "solve"])
def test_statements_have_the_joint_law_of_one_function(structure, float64):
    def model():
        f = sparse_gp(structure, jitter=1e-12).draw()
        for i, x in enumerate(AT):
            npgp.sample(f"f{i}", f(jnp.asarray(x)))

    x = np.concatenate(AT)
    mean, covariance = law(model)
    np.testing.assert_array_equal(mean, 0.0)
    np.testing.assert_allclose(covariance, rbf(x, x), atol=JITTER)


def test_sums_and_functions_of_a_plate_have_the_law_of_one_function_each(float64):
    def model():
        f, g = sparse_gp(jitter=1e-12).draw(), sparse_gp(name="g", jitter=1e-12).draw()
        npgp.sample("a", f(AT[0]) - 2.0 * g(AT[0]))
        npgp.sample("b", 3.0 * g(AT[1]))
        npgp.sample("c", f(AT[1]))

    (a, b), k = AT[:2], rbf
    expected = np.block(
        [
            [5 * k(a, a), -6 * k(a, b), k(a, b)],
            [-6 * k(b, a), 9 * k(b, b), np.zeros((2, 2))],
            [k(b, a), np.zeros((2, 2)), k(b, b)],
        ]
    )
    np.testing.assert_allclose(law(model)[1], expected, atol=10 * JITTER)

    def plated(own):
        scales = np.array([[0.7], [1.5]])
        with numpyro.plate("functions", 2, dim=-2):
            f = npgp.SparseGP("f", npgp.RBF(scales if own else 1.0), X[:3].copy(), jitter=1e-12).draw()
        npgp.sample("a", f(AT[0]))
        npgp.sample("b", f(AT[1]))

    def ragged(own):
        scales, group = np.array([[0.7], [1.5]]), np.array([0, 1, 1])
        with numpyro.plate("functions", 2, dim=-2):
            f = npgp.SparseGP("f", npgp.RBF(scales if own else 1.0), X[:3].copy(), jitter=1e-12).draw()
        npgp.sample("a", f(AT[0])[group, np.arange(3)])
        npgp.sample("b", f(AT[1])[np.array([1, 0]), np.arange(2)])

    for own in (False, True):
        lengths = (0.7, 1.5) if own else (1.0, 1.0)
        for statement in (plated, ragged):
            if statement is plated:
                x = np.concatenate([a, a, b, b])
                group = np.repeat([0, 1, 0, 1], [3, 3, 2, 2])
            else:
                x, group = np.concatenate([a, b]), np.array([0, 1, 1, 1, 0])
            by_group = np.stack([rbf(x, x, length, 1.0) for length in lengths])
            expected = np.where(group[:, None] == group, by_group[group, np.arange(len(x))], 0.0)
            np.testing.assert_allclose(law(statement, own)[1], expected, atol=JITTER, err_msg=str((own, statement)))


def test_statements_under_q_have_the_joint_law_of_q(float64):
    """N(m, S) of the inducing values, and the prior given these: by a guide, whose values the model takes."""

    def model():
        f = sparse_gp(jitter=1e-12).draw()
        for i, x in enumerate(AT):
            npgp.sample(f"f{i}", f(jnp.asarray(x)))

    guide = npgp.AutoSparseGP(model)
    factor = np.tril(np.random.default_rng(0).normal(size=(3, 3)))
    params = {"f.u.loc": jnp.arange(3.0), "f.u.scale_tril": jnp.asarray(factor)}
    names = ["f.u", *(f"f{i}.residual" for i in range(3))]
    sizes = [3, *map(len, AT)]

    def values(noise):
        values = dict(zip(names, jnp.split(noise, np.cumsum(sizes)[:-1]), strict=True))
        values["f.u"] = params["f.u.loc"] + params["f.u.scale_tril"] @ values["f.u"]
        sites = traces(model, guide, params, values=values)[1]
        return jnp.concatenate([sites[f"f{i}"]["value"] for i in range(3)])

    zero = jnp.zeros(sum(sizes))
    mean, J = compiled(lambda: (values(zero), jax.jacobian(values)(zero)))()
    x, Z = np.concatenate(AT), np.asarray(sparse_gp().inducing[0].inputs)
    A = np.linalg.solve(np.linalg.cholesky(rbf(Z, Z)), rbf(Z, x))
    np.testing.assert_allclose(mean, A.T @ np.arange(3.0), atol=1e-7)
    expected = rbf(x, x) - A.T @ A + A.T @ factor @ factor.T @ A
    np.testing.assert_allclose(J @ J.T, expected, atol=JITTER)


def test_values_at_one_input_are_one_value_in_float32():
    def model():
        f = npgp.SparseGP("f", npgp.RBF(1.0), X[:3].astype(np.float32)).draw()
        return [npgp.sample(f"f{i}", f(X.astype(np.float32))) for i in range(3)]

    draw = jax.jit(jax.vmap(lambda key: jnp.stack(handlers.seed(model, key)())))
    draws = draw(jax.random.split(jax.random.key(0), 20))
    assert np.all(np.isfinite(draws))
    assert np.max(np.abs(draws - draws[:, :1])) < 0.03  # the factor's jitter, 1e-5 of the variance, is .0045


def test_state_space_model_is_one_function_along_its_path(float64):
    """x_{t+1} = f(x_t), the density of whose path is that of f's values at the states."""
    states = np.array([0.3, 0.5, -0.2, 0.31, 0.1])[:, None]

    def model():
        f = sparse_gp(jitter=1e-12).draw()
        for t in range(4):
            npgp.sample(f"f{t}", f(states[t : t + 1]))

    def window():
        f = sparse_gp(jitter=1e-12).draw()
        known = jnp.zeros((4, 1)), jnp.full(4, jnp.nan)
        for t in range(4):
            x = states[t : t + 1]
            value = npgp.sample(f"f{t}", f(x), earlier=known)
            known = jnp.concatenate([known[0][1:], x]), jnp.concatenate([known[1][1:], value])

    for statement in (model, window):
        np.testing.assert_allclose(law(statement)[1], rbf(states[:4], states[:4]), atol=JITTER)


def test_observations_are_given_the_sampled_values(float64):
    """Without q, y is observed of f given ε and the values sampled: a known f at its own inputs."""

    def model(y):
        f = sparse_gp(jitter=1e-12).draw()
        npgp.sample("value", f(AT[0]))
        npgp.observe("y", f(AT[1]), npgp.Gaussian(variance=NOISE), obs=y)

    rng = np.random.default_rng(1)
    u, z, y = rng.normal(size=3), rng.normal(size=3), rng.normal(size=2)

    @jax.jit
    def found(given):
        density, trace = log_density(model, (y,), {}, given)
        return density, trace["value"]["value"]

    density, value = found({"f.u": u, "value.residual": z})
    Z = np.asarray(sparse_gp().inducing[0].inputs)
    L = np.linalg.cholesky(rbf(Z, Z))
    known, at = np.concatenate([Z, AT[0]]), np.concatenate([L @ u, value])
    K = rbf(known, known) + 1e-9 * np.diag(np.repeat([0.0, 1.0], 3))
    W = np.linalg.solve(K, rbf(known, AT[1]))
    mean, variance = W.T @ at, np.diag(rbf(AT[1], AT[1]) - W.T @ rbf(known, AT[1]))
    expected = sum(dist.Normal(0.0, 1.0).log_prob(v).sum() for v in (u, z))
    expected += dist.Normal(mean, np.sqrt(variance + NOISE)).log_prob(y).sum()
    np.testing.assert_allclose(density, expected, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------------
# In scan


def test_samples_in_scan_need_a_window(float64):
    """A window as long as the loop has the law of the loop; without one an error says what to do."""
    x = np.concatenate(AT[:2])

    def model(earlier):
        f = sparse_gp(jitter=1e-12).draw()

        def step(carry, x):
            inputs, values = carry
            value = npgp.sample("f", f(x[None]), earlier=carry if earlier is None else earlier)
            return (jnp.concatenate([inputs[1:], x[None]]), jnp.concatenate([values[1:], value])), value

        scan(step, (jnp.zeros((5, 1)), jnp.full(5, jnp.nan)), jnp.asarray(x))

    np.testing.assert_allclose(law(model, None)[1], rbf(x, x), atol=JITTER)
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match="inside a loop.*earlier="):
        model(True)
    A = np.linalg.cholesky(rbf(Z := np.asarray(sparse_gp().inducing[0].inputs), Z))
    A = np.linalg.solve(A, rbf(Z, x))
    independent = A.T @ A + np.diag(np.diag(rbf(x, x) - A.T @ A))
    np.testing.assert_allclose(law(model, False)[1], independent, atol=JITTER)


def test_earlier_values_must_fit():
    x = jnp.asarray(AT[0])
    for error, earlier, options, words in [
        (TypeError, "all", {}, ["earlier is"]),
        (ValueError, (x, jnp.zeros(2)), {}, [r"\(2,\).*\(3,\)"]),
        (ValueError, (x, jnp.zeros(3)), {"joint": False}, ["joint=False"]),
    ]:
        with handlers.seed(rng_seed=0), pytest.raises(error, match=".*".join(words)):
            npgp.sample("v", sparse_gp().draw()(x), earlier=earlier, **options)


def test_predictive_after_training_draws_one_function(float64):
    def model():
        f = sparse_gp(jitter=1e-12).draw()
        npgp.sample("a", f(AT[0]))
        npgp.sample("b", f(AT[0][::-1]))

    draws = Predictive(model, {"f.u": jnp.ones((5, 3))})(jax.random.key(0))
    np.testing.assert_allclose(draws["a"], draws["b"][:, ::-1], atol=1e-3)  # jitter
