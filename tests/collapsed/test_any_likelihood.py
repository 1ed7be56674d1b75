"""Collapsed bounds for likelihoods other than Gaussian: the ELBO at its maximum, and its gradient there."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import oracles
import pytest
from numpyro.infer.util import log_density

import npgp
from npgp import likelihoods
from npgp.collapsed import CollapsedGP
from npgp.conditionals.base import row_elbo
from npgp.variational import DenseNormal

_rng = np.random.default_rng(5)
COUNTS = _rng.poisson(np.exp(1.0 + np.sin(2.0 * models.X[:, 0]))).astype(float)
CLASSES = np.array([0, 1, 2, 1, 0, 2, 2, 1.0])
OUTLIER = np.where(np.arange(8) == 3, 6.0, models.Y)
LIKELIHOODS = {
    "Poisson": (npgp.Poisson(), COUNTS),
    "Bernoulli": (npgp.Bernoulli(), (models.Y > 0).astype(float)),
    "StudentT": (likelihoods.StudentT(df=3.0, scale=0.3), OUTLIER),
    "Softmax": (likelihoods.Softmax(3), CLASSES),
    "heteroscedastic": (likelihoods.HeteroscedasticGaussian(), models.Y),
}
GROUPS = npgp.sparse.median_split(models.X, 4)


def collapsed(likelihood, structure="svgp", kernel=None, X=models.X, **options):
    blocks, kinds = models.STRUCTURES[structure]
    blocks = [jnp.asarray(block.copy()) for block in blocks]
    kernel = models.kernel() if kernel is None else kernel
    return CollapsedGP(kernel, jnp.asarray(X.copy()), blocks, likelihood, covariances=kinds, jitter=1e-12, **options)


def elbo(gp, y, q):
    """The ELBO of a q(ε), from its definition."""
    projector = gp._projector()
    mean, _ = npgp.variational.Posterior(projector, q).mean_and_variance(gp.X)
    projection, residual = gp._projected(projector)
    variance = npgp.variational.blocks.whitened_variance(projection, q)
    terms = row_elbo(gp.conditional, gp.likelihood, y, mean + gp.offset, variance, residual)
    return jnp.sum(terms) - sum(jnp.sum(block.kl()) for block in q)


CASES = [
    ("Poisson", "solve", npgp.conditionals.Grouped(GROUPS)),
    ("Poisson", "mean-field", "tight"),
    ("StudentT", "odvgp", "prior"),
    ("heteroscedastic", "svgp", "prior"),
]


@pytest.mark.parametrize(("name", "structure", "conditional"), CASES, ids=lambda case: str(case)[:14])
def test_the_bound_is_the_largest_elbo(float64, name, structure, conditional):
    """No nearby q(ε) has a larger one, and its slope there is 0."""
    likelihood, y = LIKELIHOODS[name]
    gp = collapsed(likelihood, structure, conditional=conditional)

    @models.compiled
    def at_the_best(y):
        q = gp.condition(y).q
        keys = models.keys(21)

        def nearby(far, key):
            leaves, tree = jax.tree.flatten(q)
            noise = [
                jax.random.normal(k, x.shape) for k, x in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
            ]
            moved = [
                x + far * (jnp.tril(z) if x.ndim > 1 and x.shape[-1] == x.shape[-2] else z)
                for x, z in zip(leaves, noise, strict=True)
            ]
            return jax.value_and_grad(lambda q: elbo(gp, y, q))(jax.tree.unflatten(tree, moved))

        # The first is q itself.
        values, slopes = jax.lax.map(lambda a: nearby(*a), (jnp.where(jnp.arange(21) > 0, 1e-2, 0.0), keys))
        slopes = [
            (block.loc[0], jnp.tril(block.scale_tril[0]) if isinstance(block, DenseNormal) else 0.0) for block in slopes
        ]
        return gp.log_prob(y), values, slopes, gp.shortfall(y)

    bound, (value, *others), slopes, shortfall = at_the_best(jnp.asarray(y))
    np.testing.assert_allclose(bound, value, rtol=1e-12)
    assert max(np.abs(s).max() for s in jax.tree.leaves(slopes)) < 1e-5
    assert np.all(np.asarray(others) < bound)
    assert 0.0 <= shortfall < 1e-10


def test_gaussian_noise_by_search_is_the_closed_form(float64):
    """With a mask that hides nothing; one step of the search, for all structures in one program."""
    likelihood, y = npgp.Gaussian(variance=models.NOISE), jnp.asarray(models.Y.copy())

    @models.compiled
    def both(y):
        found = []
        for structure in models.STRUCTURES:
            closed = collapsed(likelihood, structure)
            searched = collapsed(likelihood, structure, mask=np.ones(8, bool))
            found.append([(gp.log_prob(y), gp.condition(y).mean_and_variance(gp.X)) for gp in (closed, searched)])
        return found

    for closed, searched in both(y):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), closed, searched)


def test_gradients_are_the_bounds(float64):
    """In hyperparameters, inducing inputs and offset, against finite differences."""
    likelihood, y = LIKELIHOODS["Poisson"]

    def bound(theta):
        kernel = npgp.RBF(jnp.exp(theta[0]), variance=jnp.exp(theta[1]))
        Z = jnp.asarray(models.Z.copy()) + theta[2]
        options = dict(offset=theta[3], conditional="tight", jitter=1e-10)
        return CollapsedGP(kernel, jnp.asarray(models.X.copy()), Z, likelihood, **options).log_prob(jnp.asarray(y))

    theta, h = jnp.array([-0.4, 0.3, 0.1, 0.2]), 1e-4
    slope = models.compiled(jax.grad(bound))(theta)
    values = models.compiled(lambda each: jax.lax.map(bound, each))(
        theta + h * jnp.concatenate([jnp.eye(4), -jnp.eye(4)])
    )
    np.testing.assert_allclose(slope, (values[:4] - values[4:]) / (2 * h), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("conditional", ["prior", npgp.conditionals.Grouped(2)], ids=["prior", "grouped"])
def test_below_the_evidence(float64, conditional):
    """Of many random problems with four rows that three functions make up, which can be summed over."""
    rng = np.random.default_rng(11)
    y = {"poisson": np.array([0.0, 3.0, 1.0, 6.0]), "logit": np.array([0.0, 1.0, 1.0, 1.0])}

    @models.compiled
    def bounds(X, Z, variance):
        kernel = npgp.kernels.Linear(variance=variance)
        options = dict(conditional=conditional, jitter=1e-10)
        counts = CollapsedGP(kernel, X, Z, npgp.Poisson(), **options).log_prob(y["poisson"])
        return {"poisson": counts, "logit": CollapsedGP(kernel, X, Z, npgp.Bernoulli(), **options).log_prob(y["logit"])}

    gaps = []
    for _ in range(20):
        X, variance = rng.normal(size=(4, 3)), np.exp(rng.normal())
        for name, bound in bounds(X, rng.normal(size=(2, 3)), variance).items():
            density = functools.partial(oracles.LOG_DENSITY[name], y=y[name])
            gaps.append(oracles.log_evidence(np.sqrt(variance) * X, density, 60) - bound)
    assert np.min(gaps) > 0.0 and np.median(gaps) < 2.0


# Rules of batching see which residuals of the search depend on what, and how many latents a row has.
def test_mapped_is_one_by_one(float64):
    """Under ``vmap`` over a lengthscale and the offset: the value, its gradient, and what is left to go."""
    likelihood, y = LIKELIHOODS["Poisson"]

    def bound(theta):
        gp = collapsed(likelihood, kernel=npgp.RBF(jnp.exp(theta), variance=1.3), conditional="prior", offset=theta)
        return gp.log_prob(jnp.asarray(y)), gp.shortfall(jnp.asarray(y))

    theta = jnp.array([-0.4, 1.0])
    slope = jax.value_and_grad(bound, has_aux=True)
    mapped, looped = models.compiled(lambda t: (jax.vmap(slope)(t), jax.lax.map(slope, t)))(theta)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), mapped, looped)
    assert np.all(mapped[0][1] < 1e-9)


def test_the_search_ends_where_rounding_lets_it_come_no_nearer(float64):
    """Softmax's slopes are its values' to 1e-7 only: without that rule all steps that are allowed were taken."""
    likelihood, _ = LIKELIHOODS["Softmax"]
    few, many = (collapsed(likelihood, conditional="prior", max_steps=steps) for steps in (15, 40))
    bounds = models.compiled(lambda y: (few.log_prob(y), many.log_prob(y), many.shortfall(y)))(CLASSES)
    assert bounds[0] == bounds[1] and bounds[2] < 1e-9


def test_rows_without_an_observation_are_left_out(float64):
    present = np.arange(8) % 3 != 1
    y = np.where(present, COUNTS, np.nan)
    whole = collapsed(npgp.Poisson(), mask=present)
    part = collapsed(npgp.Poisson(), X=models.X[present])
    one, other = models.compiled(lambda a, b: (whole.log_prob(a), part.log_prob(b)))(y, COUNTS[present])
    np.testing.assert_allclose(one, other, rtol=1e-10)

    marked = collapsed(npgp.Poisson(), mask="nan")
    np.testing.assert_allclose(models.compiled(lambda y: marked.log_prob(y))(y), other, rtol=1e-10)


@pytest.mark.parametrize("name", ["Poisson", "Gaussian"])
def test_a_weight_is_as_many_rows(name, float64):
    likelihood = npgp.Poisson() if name == "Poisson" else npgp.Gaussian(variance=0.3)
    weights = np.array([1, 2, 0, 1, 3, 1, 1, 2])
    repeated = np.repeat(np.arange(8), weights)
    weighted = collapsed(likelihood, weights=weights)
    rows = collapsed(likelihood, X=models.X[repeated])
    one, other = models.compiled(lambda a, b: (weighted.log_prob(a), rows.log_prob(b)))(COUNTS, COUNTS[repeated])
    np.testing.assert_allclose(one, other, rtol=1e-9)


def test_outputs_are_independent(float64):
    """Several rows of counts have the bounds that each has by itself."""
    gp, counts = collapsed(npgp.Poisson()), np.stack([COUNTS, COUNTS[::-1] * 3.0])
    both, each = models.compiled(lambda y: (gp.log_prob(y), jnp.stack([gp.log_prob(row) for row in y])))(counts)
    np.testing.assert_allclose(both, each, rtol=1e-9)


def test_in_a_model_with_effects(float64):
    """The density of the model is the prior's and the bound; draws and predictions have the observations' shape."""

    def model(y=None):
        effect = numpyro.sample("effect", dist.Normal())
        gp = collapsed(npgp.Poisson(), offset=effect * jnp.asarray(models.X[:, 0].copy()))
        numpyro.sample("y", gp, obs=y)

    value, gp = 0.3, collapsed(npgp.Poisson(), offset=0.3 * models.X[:, 0])
    density = models.compiled(lambda y: log_density(model, (y,), {}, {"effect": jnp.asarray(value)})[0])(COUNTS)

    @models.compiled
    def of(y):
        mean, variance = gp.condition(y).mean_and_variance(jnp.asarray(models.X.copy()))
        expected = npgp.Poisson().log_marginal(y, mean + gp.offset, variance)
        return gp.log_likelihood(y), expected, gp.log_prob(y), gp.sample(jax.random.key(0), (3,))

    terms, expected, bound, draws = of(jnp.asarray(COUNTS))
    np.testing.assert_allclose(density, dist.Normal().log_prob(value) + bound, rtol=1e-12)
    np.testing.assert_allclose(terms, expected, rtol=1e-6)
    assert draws.shape == (3, 8) and np.all(np.asarray(draws) == np.round(draws))


def test_saved_and_loaded(float64, tmp_path):
    gp = collapsed(npgp.Poisson(), mask=np.arange(8) < 6)
    npgp.save(tmp_path / "gp", gp)
    again = npgp.load(tmp_path / "gp")
    bounds = models.compiled(lambda y: (gp.log_prob(y), again.log_prob(y)))(COUNTS)
    assert bounds[0] == bounds[1]


def test_what_cannot_be_is_said():
    X, Z = jnp.asarray(models.X.copy()), jnp.asarray(models.Z.copy())
    with pytest.raises(ValueError, match="learns a parameter"):
        CollapsedGP(models.kernel(), X, Z, npgp.Poisson(), conditional="shared")
    with pytest.raises(ValueError, match=r"for Poisson it must be a count"):
        CollapsedGP(models.kernel(), X, Z, npgp.Poisson()).log_prob(COUNTS - 0.5)
    with pytest.raises(TypeError, match="likelihood is .*; it must be"):
        CollapsedGP(models.kernel(), X, Z, npgp.Poisson)
    with pytest.raises(ValueError, match="weights has negative or NaN"):
        CollapsedGP(models.kernel(), X, Z, npgp.Poisson(), weights=-np.ones(8))
    with pytest.raises(ValueError, match="weights are given and conditional is Grouped"):
        CollapsedGP(
            models.kernel(), X, Z, npgp.Poisson(), weights=np.ones(8), conditional=npgp.conditionals.Grouped(GROUPS)
        )
    with pytest.raises(TypeError, match="mask is 'missing'; it must be boolean"):
        CollapsedGP(models.kernel(), X, Z, npgp.Poisson(), mask="missing")
    with pytest.raises(AttributeError, match="Poisson, not Gaussian"):
        _ = CollapsedGP(models.kernel(), X, Z, npgp.Poisson()).noise_variance
    with pytest.warns(RuntimeWarning, match="after 1 steps another would move"):
        CollapsedGP(models.kernel(), X, Z, npgp.Poisson(), max_steps=1).condition(100.0 * COUNTS)


@pytest.mark.parametrize("density", ["CollapsedGP", "ApproximateGP", "ResponseNNGP", "UncertainInputGP"])
def test_noise_is_a_likelihood_or_a_variance_by_its_name(density):
    """A bare number could be a scale as well: it is refused."""
    X, Z, kernel = models.X.copy(), models.Z.copy(), npgp.RBF(0.9)
    given = {
        "CollapsedGP": (CollapsedGP, kernel, X, Z),
        "ApproximateGP": (npgp.ApproximateGP, kernel, X, Z),
        "ResponseNNGP": (npgp.neighbors.ResponseNNGP, kernel, X, 3),
        "UncertainInputGP": (npgp.collapsed.UncertainInputGP, kernel, X, 0.1, Z),
    }[density]
    gp = functools.partial(*given)
    np.testing.assert_allclose(gp(npgp.Gaussian(scale=0.2)).noise_variance, 0.04, rtol=1e-6)
    assert gp(noise_variance=0.04).noise_variance == 0.04
    with pytest.raises(TypeError, match=r"^likelihood is 0.04; it must be .*, and a noise variance is spelled noise_v"):
        gp(0.04)
    for noise, words in (((), "neither"), ((npgp.Gaussian(scale=0.2),), "both")):
        with pytest.raises(TypeError, match=f"noise_variance=… in its stead .*; {words} was given"):
            gp(*noise, **({"noise_variance": 0.04} if noise else {}))
    if density != "CollapsedGP":
        with pytest.raises(TypeError, match=r"must be npgp.Gaussian\(scale=…\)"):
            gp(npgp.Poisson())


def test_sites_of_other_hyperparameters_as_a_start(float64):
    """The same bound, gradient and posterior; and much nearer after a step than without, though the offset differs."""
    likelihood, y = LIKELIHOODS["Poisson"]

    @models.compiled
    def found(y):
        start = collapsed(likelihood, kernel=npgp.RBF(1.1, variance=2.0), offset=0.3).sites(y)

        def bound(lengthscale, start):
            return collapsed(likelihood, kernel=npgp.RBF(lengthscale), offset=-0.2, start=start).log_prob(y)

        bounds = [jax.value_and_grad(bound)(0.7, s) for s in (None, start)]
        there = collapsed(likelihood, kernel=npgp.RBF(0.7), offset=-0.2)
        one_step = [
            collapsed(likelihood, kernel=npgp.RBF(0.7), start=sites, max_steps=1).shortfall(y)
            for sites in (there.sites(y), None)
        ]
        moments = [
            gp.condition(y).mean_and_variance(gp.X)
            for gp in (there, collapsed(likelihood, kernel=npgp.RBF(0.7), offset=-0.2, start=start))
        ]
        return bounds, moments, one_step

    bounds, moments, (shortfall, without) = found(jnp.asarray(y))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8), *bounds)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *moments)
    assert shortfall < 0.1 * without


def test_sites_are_pseudo_observations(float64):
    """Gaussian ones given which the exact posterior is the best q(ε); for Gaussian noise, the observations."""
    likelihood, y = LIKELIHOODS["Poisson"]

    @models.compiled
    def both(y):
        gp = collapsed(likelihood, offset=0.4)
        sites = gp.sites(y)
        as_noise = collapsed(npgp.Gaussian(variance=1.0 / sites.precision), offset=0.4)
        gaussian = collapsed(npgp.Gaussian(variance=0.3)).sites(y)
        return [
            g.condition(v).mean_and_variance(g.X) for g, v in ((gp, y), (as_noise, sites.shift / sites.precision))
        ], gaussian

    moments, gaussian = both(jnp.asarray(y))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *moments)
    np.testing.assert_allclose(gaussian.precision, np.full(8, 1.0 / 0.3))
    np.testing.assert_allclose(gaussian.shift, y / 0.3)


def test_sites_of_outputs_with_kernels_of_their_own(float64):
    y = jnp.stack([jnp.asarray(COUNTS), jnp.asarray(COUNTS[::-1].copy())])
    lengthscale = jnp.array([[0.5], [1.5]])

    @models.compiled
    def found(y):
        own = functools.partial(collapsed, npgp.Poisson(), kernel=npgp.RBF(lengthscale), outputs=2)
        sites = own().sites(y)
        return sites, own().log_prob(y), own(start=sites, max_steps=1).log_prob(y)

    sites, bound, again = found(y)
    assert sites.precision.shape == (2, 8)
    np.testing.assert_allclose(again, bound, rtol=1e-9)


def test_a_wide_tolerance_costs_what_it_says(float64):
    likelihood, y = LIKELIHOODS["Bernoulli"]
    both = [collapsed(likelihood, tolerance=tolerance) for tolerance in (None, 1e-2)]
    best, rough = models.compiled(lambda y: [gp.log_prob(y) for gp in both])(y)
    assert 0.0 <= best - rough < 1e-2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"start": np.ones(8)}, TypeError, "must be what CollapsedGP"),
        ({"start": npgp.collapsed.Sites(np.ones(7), np.ones(7))}, ValueError, "X has 8 rows"),
        ({"start": npgp.collapsed.Sites(np.ones(8), np.full(8, np.nan))}, ValueError, "start has NaN"),
        ({"tolerance": 0.0}, ValueError, "tolerance is 0.0; it must be positive"),
    ],
)
def test_misuse_of_starts(options, error, words):
    with pytest.raises(error, match=words):
        collapsed(npgp.Poisson(), **options)


def test_a_tolerance_is_known_when_the_program_is_compiled():
    with pytest.raises(TypeError, match="tolerance is traced"):
        jax.jit(lambda tolerance: collapsed(npgp.Poisson(), tolerance=tolerance).log_prob(COUNTS))(0.1)
