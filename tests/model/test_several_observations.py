"""Observations of several latent values, mixed outputs, simulated observations: statements against dense algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import NOISE, VARIANCE, X_NEW, Dense, X, Y, Z, compiled, make_elbo, rbf, worst_z_of_moments
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Predictive, log_likelihood

import npgp
from npgp.conditionals import as_conditional
from npgp.conditionals.base import row_elbo
from npgp.likelihoods import HeteroscedasticGaussian, Softmax
from npgp.sparse.residuals import GroupResidual, RowResidual

CLASSES = np.array([0, 2, 1, 1, 0, 2, 2, 1])


def draw(name: str, inducing=Z, lengthscale: float = 0.7) -> npgp.model.Function:
    k = npgp.RBF(lengthscale=lengthscale, variance=VARIANCE)
    return npgp.SparseGP(name, k, jnp.asarray(inducing.copy()), jitter=1e-12).draw()


def random_q(name: str, seed: int, size: int = 3, batch: tuple[int, ...] = ()) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    factor = np.tril(0.2 * rng.normal(size=(*batch, size, size)), -1)
    factor = factor + np.eye(size) * rng.uniform(0.3, 0.9, (*batch, 1, size))
    return {f"{name}.u.loc": jnp.asarray(rng.normal(size=(*batch, size))), f"{name}.u.scale_tril": jnp.asarray(factor)}


# ---------------------------------------------------------------------------------------------------------------
# Several latent values


def heteroscedastic(conditional="tight", likelihood=None):
    def model(X, y=None):
        f, g = draw("f"), draw("g", lengthscale=1.5)
        npgp.observe(
            "y",
            (f(X), g(X) - 1.0),
            likelihood or HeteroscedasticGaussian(),
            obs=y,
            conditional=conditional,
        )

    return model


def dense_rows(conditional: str, f: Dense, g: Dense) -> np.ndarray:
    """E log N(y | f, e²ᵍ) in closed form, with the conditional's terms; rows one by one."""
    inverse = np.exp(-2 * (g.mean - 1.0) + 2 * g.variance)  # E e^(−2g) with g's residual at its prior
    precision = inverse if conditional == "tight" else 0.0
    left = f.residual / (1 + precision * f.residual)
    cost = 0.5 * np.log1p(precision * f.residual) - 0.5 * precision * left
    square = (Y - f.mean) ** 2 + f.explained + left
    return -0.5 * np.log(2 * np.pi) - (g.mean - 1.0) - 0.5 * inverse * square - cost


@pytest.mark.parametrize("conditional", ["prior", "tight", "grouped"])
def test_two_gps_of_mean_and_log_scale_have_the_dense_elbo(conditional, float64):
    params = random_q("f", 0) | random_q("g", 1)
    f, g = Dense(([Z], ("dense",)), X, params), Dense(([Z], ("dense",)), X, params, "g", lengthscale=1.5)
    model = heteroscedastic(npgp.conditionals.Grouped(1) if conditional == "grouped" else conditional)
    value = compiled(make_elbo(model))(jax.random.key(0), params, jnp.asarray(X), jnp.asarray(Y))
    expected = np.sum(dense_rows("tight" if conditional == "grouped" else conditional, f, g)) - f.kl - g.kl
    # The curvature rule is a damped iteration, and stationary in λ.
    np.testing.assert_allclose(value, expected, rtol=1e-9 if conditional == "prior" else 1e-6)


def test_any_numpyro_distribution_of_two_gps_is_the_closed_form(float64):
    params = random_q("f", 0) | random_q("g", 1)
    values = [
        compiled(make_elbo(heteroscedastic("prior", likelihood=likelihood)))(jax.random.key(0), params, X, Y)
        for likelihood in (HeteroscedasticGaussian(), lambda f, g: dist.Normal(f, jnp.exp(g)))
    ]
    np.testing.assert_allclose(*values, rtol=1e-8)


def test_softmax_of_functions_in_a_plate_is_that_of_a_tuple(float64):
    params = random_q("f", 0, batch=(3, 1))
    single = {
        f"{name}.u.{part}": params[f"f.u.{part}"][i, 0]
        for i, name in enumerate("abc")
        for part in ("loc", "scale_tril")
    }

    def plated(X, y=None):
        with numpyro.plate("classes", 3, dim=-2):
            f = draw("f")
        with numpyro.plate("data", X.shape[0]):
            return npgp.observe("y", f(X), Softmax(3), obs=y)

    def separate(X, y=None):
        npgp.observe("y", tuple(draw(name)(X) for name in "abc"), Softmax(3), obs=y)

    args = jnp.asarray(X), jnp.asarray(CLASSES)
    one = compiled(make_elbo(plated))(jax.random.key(0), params, *args)
    other = compiled(make_elbo(separate))(jax.random.key(0), single, *args)
    np.testing.assert_allclose(one, other, rtol=1e-10)

    prior = Predictive(plated, num_samples=400)(jax.random.key(1), jnp.asarray(X))
    assert prior["y"].shape == (400, 8) and prior["y.latent"].shape == (400, 3, 8)
    assert set(np.unique(prior["y"])) == {0, 1, 2}


def brute_force(nodes: int, covariances: list[np.ndarray], log_prob) -> float:
    """log E Π_n p(y_n | f_n) for two rows and independent latents with these covariances, by tensor quadrature."""
    z, w = np.polynomial.hermite_e.hermegauss(nodes)
    w = w / w.sum()
    dims = 2 * len(covariances)
    grid = np.stack(np.meshgrid(*[z] * dims, indexing="ij")).reshape(len(covariances), 2, -1)
    weights = np.prod(np.stack(np.meshgrid(*[w] * dims, indexing="ij")).reshape(dims, -1), 0)
    latents = np.stack([np.linalg.cholesky(D) @ g for D, g in zip(covariances, grid, strict=True)])  # (C, 2, points)
    return float(np.log(np.sum(weights * np.exp(np.sum(log_prob(latents), 0)))))


def log_heteroscedastic(y):
    return lambda f: -0.5 * np.log(2 * np.pi) - f[1] - 0.5 * ((y[:, None] - f[0]) * np.exp(-f[1])) ** 2


def log_softmax(y):
    return lambda f: np.take_along_axis(f, y[None, :, None], 0)[0] - np.log(np.sum(np.exp(f), 0))


@pytest.mark.parametrize("kind", ["heteroscedastic", "softmax"])
def test_certified_bounds_lie_below_the_evidence(kind, float64):
    """No inducing features, two rows, random residual covariances: row by row, in one group, and at the prior."""
    likelihood = HeteroscedasticGaussian() if kind == "heteroscedastic" else Softmax(2)
    names = ("prior", "tight", "shared", "grouped", "full")

    @compiled
    def bounds(D, y, m):
        groups = npgp.sparse.consecutive(2, 2)
        zero, d = jnp.zeros((2, 2)), jnp.diagonal(D, axis1=1, axis2=2)
        residuals = [RowResidual(d)] * 3 + [GroupResidual(D[:, None], groups)] * 2
        return [
            jnp.sum(row_elbo(as_conditional(name), likelihood, y, zero, zero, residual, m))
            for name, residual in zip(names, residuals, strict=True)
        ]

    rng = np.random.default_rng(0)
    gaps = []
    for _ in range(12):
        a = rng.normal(size=(2, 2)) * [[1.5], [0.7 if kind == "heteroscedastic" else 1.5]]
        D = np.stack([np.outer(v, v) * (1 - 0.9 * (1 - np.eye(2)) * rng.uniform()) + 0.01 * np.eye(2) for v in a])
        y = rng.normal(size=2) if kind == "heteroscedastic" else rng.integers(0, 2, 2)
        log_prob = log_heteroscedastic(y) if kind == "heteroscedastic" else log_softmax(y)
        evidence = brute_force(30, list(D), log_prob)
        values = bounds(D, jnp.asarray(y), rng.uniform(0.05, 1.0))
        gaps.append(evidence - np.asarray(values))
    gaps = dict(zip(names, np.transpose(gaps), strict=True))
    assert all(np.all(gap > -1e-6) for gap in gaps.values()), gaps
    assert np.all(gaps["tight"] <= gaps["prior"] + 1e-9)
    assert np.mean(gaps["grouped"]) < np.mean(gaps["tight"]) < 0.9 * np.mean(gaps["prior"])


@pytest.mark.parametrize("likelihood", [HeteroscedasticGaussian(), Softmax(2)], ids=lambda value: type(value).__name__)
def test_gradients_are_those_of_the_bound(likelihood, float64):
    """Whether the site precisions are stationary, and stopped, or not."""
    rng = np.random.default_rng(3)
    at, direction = rng.uniform(0.2, 1.0, (2, 3, 2, 4))

    def bound(at):
        terms = row_elbo(npgp.conditionals.Tight(), likelihood, jnp.array([0.0, 1.0, 1.0, 0.0]), *at)
        return jnp.sum(terms)

    slope = np.sum(compiled(jax.grad(bound))(at) * direction)
    value, step = compiled(bound), 1e-4
    difference = (value(at + step * direction) - value(at - step * direction)) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=2e-4)


def test_latents_of_one_observation_are_checked():
    def run(latent, likelihood):
        with handlers.seed(rng_seed=0):
            f, g = draw("f"), draw("g")
            with numpyro.plate("classes", 3, dim=-2):
                h = draw("h")
            npgp.observe("y", latent(f, g, h), likelihood, obs=np.zeros(8))

    for latent, likelihood, words in [
        (lambda f, g, h: (f(X), g(X)), npgp.Gaussian(variance=0.1), "1 latent value per observation, but 2 are given"),
        (
            lambda f, g, h: f(X),
            HeteroscedasticGaussian(),
            r"2 latent values per observation, but 1 is given, of shape \(8,\)",
        ),
        (lambda f, g, h: h(X), Softmax(4), r"4 latent values per observation, but 3 are given, of shape \(3, 8\)"),
        (lambda f, g, h: (f(X), f(X)), HeteroscedasticGaussian(), "f occurs twice in one observation"),
        (lambda f, g, h: (f(X), g(X[:5])), HeteroscedasticGaussian(), r"different shapes: \(8,\), \(5,\)"),
        (lambda f, g, h: np.ones((2, 3)) @ h(X), Softmax(2), "mixed of the same functions"),
        (lambda f, g, h: f(X) * np.ones((2, 1)), Softmax(2), "spread over several outputs"),
    ]:
        with pytest.raises(ValueError, match=words):
            run(latent, likelihood)
    with pytest.raises(TypeError, match="observe was given a ndarray"):
        run(lambda f, g, h: (f(X), np.zeros(8)), HeteroscedasticGaussian())


# ---------------------------------------------------------------------------------------------------------------
# Mixed outputs


def outputs(W, count=2, conditional="tight", likelihood=None, transform=None):
    def model(X, Y=None):
        with numpyro.plate("functions", count, dim=-2):
            g = draw("g")
        values = g(X) if W is None else W @ g(X)
        values = values if transform is None else transform(values)
        npgp.observe("y", values, likelihood or npgp.Gaussian(variance=NOISE), obs=Y, conditional=conditional)

    return model


YS = np.stack([Y, np.cos(X[:, 0]), Y**2])


def elbo_of_mixed(model):
    """With a q(ε) for each function of a plate, independent of the others'."""
    return make_elbo(model, npgp.AutoSparseGP(model, joint=False))


def test_mixing_with_the_identity_is_independent_gps(float64):
    params = random_q("g", 2, batch=(2, 1))
    values = [
        compiled(elbo_of_mixed(outputs(W)))(jax.random.key(0), params, jnp.asarray(X), YS[:2])
        for W in (None, np.eye(2))
    ]
    np.testing.assert_allclose(*values, rtol=1e-12)


def test_mixed_outputs_have_the_dense_elbo(float64):
    """Also with a factor per function, an offset, and a factor per output, in any order."""
    params = random_q("g", 2, batch=(2, 1))
    W = np.array([[1.0, 0.5], [-0.3, 2.0], [0.7, 0.1]])
    a, b, c = np.array([[0.8], [1.4]]), np.array([[2.0], [1.0], [-1.0]]), 0.3

    def model(X, Y=None):
        with numpyro.plate("functions", 2, dim=-2):
            g = draw("g")
        mixed = b * (W @ (a * g(X) + c))
        npgp.observe("y", mixed, npgp.Gaussian(variance=NOISE), obs=Y)

    value = compiled(elbo_of_mixed(model))(jax.random.key(0), params, jnp.asarray(X), YS)
    parts = [Dense(([Z], ("dense",)), X, {name: leaf[i, 0] for name, leaf in params.items()}, "g") for i in range(2)]
    M = b * W * a[:, 0]
    mean = M @ np.stack([p.mean for p in parts]) + c * (b * W).sum(1)[:, None]
    explained = M**2 @ np.stack([p.explained for p in parts])
    residual = M**2 @ np.stack([p.residual for p in parts])
    fit = -0.5 * (np.log(2 * np.pi * NOISE) + ((YS - mean) ** 2 + explained) / NOISE) - 0.5 * np.log1p(residual / NOISE)
    np.testing.assert_allclose(value, fit.sum() - sum(p.kl for p in parts), rtol=1e-9)


def test_mixed_outputs_in_groups_stay_below_the_evidence(float64):
    """grouped ≥ tight ≥ prior, and all below the exact evidence of the linear model of coregionalization."""
    W = np.array([[1.0, 0.5], [-0.3, 2.0], [0.7, 0.1]])
    params = random_q("g", 2, batch=(2, 1))
    params["g.u.loc"] = 0.1 * params["g.u.loc"]

    def elbo(conditional):
        def model(X, Y=None):
            with numpyro.plate("functions", 2, dim=-2):
                g = draw("g")
            npgp.observe("y", W @ g(X), npgp.Gaussian(variance=NOISE), obs=Y, conditional=conditional)

        return float(compiled(elbo_of_mixed(model))(jax.random.key(0), params, jnp.asarray(X), YS))

    values = [elbo("prior"), elbo("tight"), elbo(npgp.conditionals.Grouped(4))]
    K = np.kron(W @ W.T, rbf(X, X)) + NOISE * np.eye(24)
    _, log_det = np.linalg.slogdet(2 * np.pi * K)
    evidence = -0.5 * log_det - 0.5 * YS.ravel() @ np.linalg.solve(K, YS.ravel())
    assert sorted(values) == values and values[-1] < evidence


def test_simulated_outputs_share_what_they_are_mixed_of(float64):
    """Prior draws have covariance W Wᵀ between the outputs of a row, also without ``joint``."""
    W = np.array([[1.0, 0.5], [-0.3, 2.0], [0.7, 0.1]])
    model = outputs(jnp.asarray(W))
    run = compiled(lambda key: Predictive(model, num_samples=6000)(key, jnp.asarray(X[:2]))["y.latent"])
    values = np.asarray(run(jax.random.key(0)))
    Q = rbf(X[:2], Z) @ np.linalg.solve(rbf(Z, Z), rbf(Z, X[:2]))
    cov = np.kron(W @ W.T, Q - np.diag(np.diag(Q)) + VARIANCE * np.eye(2))
    cov = cov + 1e-9 * np.eye(6)
    assert worst_z_of_moments(values.reshape(-1, 6), np.zeros(6), cov) < 4.5
    assert np.linalg.matrix_rank(values[0], tol=1e-6) <= 2


def test_mixing_is_checked():
    with handlers.seed(rng_seed=0):
        f = draw("f")
        with numpyro.plate("functions", 2, dim=-2):
            g = draw("g")
    for W in (np.ones((3, 3)), np.ones(2), np.ones((2, 8))):
        with pytest.raises(ValueError, match=r"the matrix has shape .* and the GP values \(2, 8\)"):
            W @ g(X)
    with pytest.raises(ValueError, match=r"the GP values \(8,\)"):
        np.ones((2, 2)) @ f(X)
    with pytest.raises(ValueError, match="mix first"):
        np.ones((3, 2)) @ (g(X) * np.ones((2, 8)))
    with pytest.raises(ValueError, match="spread over several outputs"), handlers.seed(rng_seed=0):
        npgp.sample("v", np.eye(2) @ g(X))
    # What is shared already may be mixed further.
    np.testing.assert_allclose((np.ones((3, 2)) @ (f(X) + g(X))).terms[0].scale, np.full((3, 1), 2.0))


# ---------------------------------------------------------------------------------------------------------------
# Simulated observations


def regression(X, y=None):
    f = draw("f")
    with numpyro.plate("data", X.shape[0]):
        return npgp.observe("y", f(X) + 1.0, npgp.Gaussian(variance=NOISE), obs=y)


@pytest.mark.parametrize("joint", [False, True])
def test_simulated_latent_values_given_epsilon(joint, float64):
    """At posterior draws of ε: the residual row by row, or jointly; y is the latent value with noise."""
    epsilon = np.array([0.4, -1.0, 0.2])
    model = npgp.joint(regression) if joint else regression
    samples = {"f.u": jnp.broadcast_to(jnp.asarray(epsilon), (6000, 3))}
    predicted = compiled(lambda key: Predictive(model, samples)(key, jnp.asarray(X_NEW)))(jax.random.key(2))
    dense = Dense(([Z], ("dense",)), X_NEW)
    cov = dense.D if joint else np.diag(np.diag(dense.D))
    assert set(predicted) == {"y", "y.latent"}
    latent, noise = np.asarray(predicted["y.latent"]), np.asarray(predicted["y"] - predicted["y.latent"])
    assert worst_z_of_moments(latent, dense.A.T @ epsilon + 1.0, cov + 1e-12 * np.eye(8)) < 4.5
    assert worst_z_of_moments(noise, np.zeros(8), NOISE * np.eye(8)) < 4.5


def test_no_latent_values_where_y_is_given(float64):
    """A recorded draw would be replayed at other rows, and under MCMC it would be noise."""
    for model, args in [(regression, (X, Y)), (handlers.condition(regression, {"y": jnp.asarray(Y)}), (X,))]:
        trace = handlers.trace(handlers.seed(model, 0)).get_trace(*args)
        assert set(trace) == {"f.u", "data", "y"}
    trace = handlers.trace(handlers.seed(handlers.uncondition(regression), 0)).get_trace(X, Y)
    assert "y.latent" in trace


def subsampled(X, y=None):
    f = draw("f")
    with numpyro.plate("data", X.shape[0], subsample_size=4) as rows:
        npgp.observe("y", f(X[rows]), npgp.Gaussian(variance=NOISE), obs=None if y is None else y[rows])


def test_rows_drawn_at_random_need_a_guide(float64):
    """NumPyro refuses them by itself where the model runs without; batches given as arguments have a density."""
    X_, Y_ = jnp.asarray(X), jnp.asarray(Y)
    for run in (
        lambda: MCMC(NUTS(subsampled), num_warmup=1, num_samples=1, progress_bar=False).run(jax.random.key(0), X_, Y_),
        lambda: log_likelihood(subsampled, {"f.u": jnp.zeros((2, 3))}, X_, Y_),
    ):
        with pytest.raises(ValueError, match=r"HMC/NUTS do not support subsampling"):
            run()

    def batch(X, y):
        f = draw("f")
        with npgp.plate("data", 8, rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    assert log_likelihood(batch, {"f.u": jnp.zeros((2, 3))}, X_[:4], Y_[:4])["y"].shape == (2, 4)


def test_plates_of_another_size_are_refused():
    def model(size, dim=-1, use=npgp.observe, **options):
        with handlers.seed(rng_seed=0):
            with numpyro.plate("functions", 2, dim=-2):
                g = draw("g")
            with numpyro.plate("data", size, dim=dim):
                if use is npgp.sample:
                    use("y", g(X))
                else:
                    use("y", g(X), npgp.Gaussian(variance=NOISE), obs=YS[:2])

    for use in (npgp.observe, npgp.sample):
        with pytest.raises(
            ValueError, match=r"y has GP values of shape \(2, 8\), but plate 'data' at dim=-1 has 9 members"
        ):
            model(9, use=use)
        with pytest.raises(ValueError, match=r"'data' at dim=-2 has 3 members\."):
            model(3, dim=-2, use=use)
        model(8, use=use)


# ---------------------------------------------------------------------------------------------------------------
# The latent values of simulated observations


def test_latent_values_are_those_of_the_observations_however_they_are_drawn(float64):
    """One function for several outputs: in plates, masked, without the data that there were, and in ``Predictive``."""

    def model(y=None, mask=True):
        with numpyro.plate("one", 1, dim=-2):
            f = draw("f")
        outputs = numpyro.plate("outputs", 3 if y is None else 1, dim=-2)
        with handlers.mask(mask=mask), outputs, numpyro.plate("rows", len(X)):
            npgp.observe("y", f(X), npgp.Gaussian(variance=1e-12), obs=y)

    zeros, some = np.zeros((1, len(X))), np.arange(len(X)) % 2 == 0
    uses = {
        "plain": model,
        "masked": lambda: model(mask=some),
        "masked by all": handlers.mask(lambda: model(mask=some), mask=False),
        "without its data": handlers.uncondition(lambda: model(zeros)),
        "without its data, masked": handlers.uncondition(lambda: model(zeros, some)),
    }

    def draws(key):
        traces = {name: handlers.trace(handlers.seed(use, key)).get_trace() for name, use in uses.items()}
        drawn = {name: (sites["y"]["value"], sites["y.latent"]["value"]) for name, sites in traces.items()}
        for parallel in (False, True):
            predicted = Predictive(model, num_samples=2, parallel=parallel)(key)
            drawn[f"predicted, parallel={parallel}"] = predicted["y"], predicted["y.latent"]
        return drawn

    for name, (y, latent) in compiled(draws)(jax.random.key(0)).items():
        count = 1 if name.startswith("without") else 3
        assert y.shape == latent.shape and y.shape[-2:] == (count, len(X))
        np.testing.assert_allclose(y, latent, atol=1e-4)
        assert count == 1 or np.std(y, axis=-2).min() > 1e-3  # the residuals of outputs are their own


def test_a_distribution_of_observations_is_not_changed_by_drawing(float64):
    def drawn(key):
        with handlers.seed(rng_seed=key), handlers.trace() as sites:
            f = draw("f")
            npgp.observe("y", f(X), npgp.Gaussian(variance=0.1))
        fn = sites["y"]["fn"]
        before = dict(vars(fn))
        first, _ = fn.sample_with_intermediates(key, (2,))
        assert vars(fn) == before
        return first, fn.sample(key, (2,))

    first, second = compiled(drawn)(jax.random.key(1))
    assert first.shape == (2, len(X))
    np.testing.assert_array_equal(first, second)
