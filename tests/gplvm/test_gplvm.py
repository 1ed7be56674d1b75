"""The Bayesian GPLVM: an ordinary model, hence at known latents so many sparse regressions."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import Dense, compiled, make_elbo, train

import npgp

ROWS, COLUMNS, LATENT = 6, 3, 2
LENGTHSCALE, VARIANCE, NOISE = np.array([0.8, 1.5]), 1.2, 0.3
POINTS = np.array([[-1.0, 0.3], [0.2, -0.5], [1.1, 0.8], [0.0, 1.2]])
_rng = np.random.default_rng(0)
LATENTS = _rng.normal(size=(ROWS, LATENT))
DATA = np.stack([np.sin(2 * LATENTS[:, 0]), LATENTS[:, 1], np.cos(LATENTS[:, 0])], 1) + 0.1
SCALE = 1e-7  # of q(x): so small that the draws are the means


def make_gplvm(dtype=float, **kwargs):
    start = npgp.gplvm.pca_start(jax.random.key(0), DATA.astype(dtype), LATENT, len(POINTS))
    return npgp.BayesianGPLVM(start, **kwargs)


def make_params(dtype=float):
    """Parameters of some q(ε) for each output, and of latents that are all but known."""
    rng = np.random.default_rng(1)
    size = len(POINTS)
    factors = np.tril(0.1 * rng.normal(size=(COLUMNS, 1, size, size)), -1) + 0.4 * np.eye(size)
    params = {
        "lengthscale": LENGTHSCALE,
        "variance": VARIANCE,
        "inducing": POINTS,
        "noise_variance": NOISE,
        "f.u.loc": 0.5 * rng.normal(size=(COLUMNS, 1, size)),
        "f.u.scale_tril": factors,
        "x.loc": LATENTS,
        "x.scale": np.full((ROWS, LATENT), SCALE),
    }
    return {name: jnp.asarray(value, dtype) for name, value in params.items()}


def dense_outputs(rows=slice(None), lengthscales=(LENGTHSCALE,) * COLUMNS, variances=(VARIANCE,) * COLUMNS):
    """Each output's sparse GP at the latent means, by dense algebra."""
    params = jax.tree.map(np.asarray, make_params())
    for d, (lengthscale, variance) in enumerate(zip(lengthscales, variances, strict=True)):
        own = {f"f.u.{part}": params[f"f.u.{part}"][d, 0] for part in ("loc", "scale_tril")}
        yield Dense(([POINTS], ("dense",)), LATENTS[rows], own, lengthscale=lengthscale, variance=variance)


def latent_kl(rows=slice(None)):
    return 0.5 * np.sum(SCALE**2 + LATENTS[rows] ** 2 - 1 - 2 * np.log(SCALE))


def dense_elbo(rows=slice(None), conditional="tight", mask=None, **kernels):
    """The minibatch's share of the ELBO, scaled to all rows."""
    Y = (DATA - DATA.mean(0))[rows]
    mask = np.ones(Y.shape, bool) if mask is None else mask[rows]
    outputs = list(dense_outputs(rows, **kernels))
    terms = sum(np.sum(o.rows(y, conditional, NOISE)[m]) for o, y, m in zip(outputs, Y.T, mask.T, strict=True))
    return (terms - latent_kl(rows)) * ROWS / len(Y) - sum(o.kl for o in outputs)


# ---------------------------------------------------------------------------------------------------------------
# The ELBO


@pytest.mark.parametrize("conditional, x64", [("prior", False), ("tight", True)], indirect=["x64"])
def test_elbo_at_known_latents_is_that_of_sparse_regressions(conditional, x64):
    gplvm = make_gplvm(x64, conditional=conditional)
    elbo = make_elbo(gplvm.model, gplvm.guide)
    value, gradient = compiled(jax.value_and_grad(elbo, 1))(jax.random.key(0), make_params(x64), DATA.astype(x64))
    assert value.dtype == x64
    np.testing.assert_allclose(value, dense_elbo(conditional=conditional), rtol=1e-6 if x64 == jnp.float64 else 1e-3)
    for name, leaf in gradient.items():
        assert leaf.dtype == x64 and np.all(np.isfinite(leaf)) and np.any(leaf != 0), name


def test_blocks_of_other_features(float64):
    """Activations and orthogonal points, under a zonal kernel: as many regressions with these blocks."""
    directions = np.random.default_rng(2).normal(size=(3, LATENT + 1))

    def zonal(lengthscale, variance):
        return npgp.kernels.ZonalMatern52(1.0, variance=variance, weight_variance=lengthscale**-2)

    def blocks(directions, points):
        return npgp.features.Activations(directions, levels=(0, 1, 2, 4)), points

    offset = np.zeros(COLUMNS)
    start = npgp.gplvm.Start(LATENTS.copy(), blocks(directions, POINTS.copy()), offset, lengthscale=LENGTHSCALE.copy())
    gplvm = npgp.BayesianGPLVM(start, kernel=zonal)

    def regressions(Y):
        gp = npgp.SparseGP("f", zonal(LENGTHSCALE, 1.0), list(blocks(directions, POINTS.copy())))
        with numpyro.plate("outputs", COLUMNS, dim=-2):
            f = gp.draw()
        with numpyro.plate("outputs", COLUMNS, dim=-2), numpyro.plate("rows", ROWS):
            npgp.observe("y", f(LATENTS.copy()), npgp.Gaussian(variance=NOISE), obs=Y.T)

    rng = np.random.default_rng(1)
    params = {"inducing": directions, "inducing2": POINTS, "variance": 1.0, "lengthscale": LENGTHSCALE}
    params |= {"noise_variance": NOISE, "x.loc": LATENTS, "x.scale": np.full((ROWS, LATENT), SCALE)}
    for site, size in (("f.u", 3), ("f.v", len(POINTS))):
        params[f"{site}.loc"] = rng.normal(size=(COLUMNS, 1, size))
        params[f"{site}.scale_tril"] = np.broadcast_to(0.4 * np.eye(size), (COLUMNS, 1, size, size))
    params = {name: jnp.asarray(value) for name, value in params.items()}
    elbo, expected = make_elbo(gplvm.model, gplvm.guide), make_elbo(regressions)
    value, gradient = compiled(jax.value_and_grad(elbo, 1))(jax.random.key(0), params, DATA.copy())
    expected = compiled(expected)(jax.random.key(0), params, DATA.copy())
    np.testing.assert_allclose(value, expected - latent_kl(), rtol=1e-6)
    assert all(np.any(gradient[name] != 0) for name in ("inducing", "inducing2", "x.loc"))
    mean = compiled(lambda params: gplvm.posterior(params).mean(LATENTS.copy()))(params)
    assert mean.shape == (COLUMNS, ROWS)
    with pytest.raises(TypeError, match="is Activations; the collapsed bound has inducing inputs"):
        npgp.gplvm.CollapsedGPLVM(npgp.gplvm.Start(LATENTS.copy(), blocks(directions, POINTS)[0], offset))


def test_rows_in_groups(float64):
    # Of unequal length, and with entries missing: a group's penalty is that of the rows that an output has seen.
    groups = npgp.sparse.consecutive(ROWS, 4)
    mask = np.ones(DATA.shape, bool)
    mask[[1, 3, 5], [0, 0, 2]] = False

    pair = make_gplvm(), make_gplvm(conditional=npgp.conditionals.Grouped(groups))

    @compiled
    def elbos(params, key):
        return [make_elbo(g.model, g.guide)(key, params, DATA, mask=mask) for g in pair]

    tight, grouped = elbos(make_params(), jax.random.key(0))
    gain = 0.0
    for output, seen in zip(dense_outputs(), mask.T, strict=True):
        D = output.K - output.Q
        for rows in (np.arange(4), np.arange(4, 6)):
            rows = rows[seen[rows]]
            inside = D[np.ix_(rows, rows)] / NOISE
            gain += 0.5 * np.sum(np.log1p(np.diag(inside))) - 0.5 * np.linalg.slogdet(np.eye(len(rows)) + inside)[1]
    assert gain > 0.01
    np.testing.assert_allclose(grouped - tight, gain, rtol=1e-4)


def test_minibatches_are_unbiased_and_rows_index_the_latents(float64):
    gplvm = make_gplvm()
    elbo = make_elbo(gplvm.model, gplvm.guide)
    subsets = np.array(list(itertools.permutations(range(ROWS), 2)))  # in both orders
    Y, params = jnp.asarray(DATA), make_params()
    run = compiled(jax.vmap(lambda rows: elbo(jax.random.key(0), params, Y[rows], rows)))
    values = np.asarray(run(jnp.asarray(subsets)))
    np.testing.assert_allclose(values, [dense_elbo(subset) for subset in subsets], rtol=1e-5)
    np.testing.assert_allclose(values.mean(), dense_elbo(), rtol=1e-6)
    assert values.std() > 1.0


def test_order_of_rows_does_not_matter(float64):
    gplvm = make_gplvm()
    elbo = make_elbo(gplvm.model, gplvm.guide)
    order = jnp.array([3, 0, 5, 1, 4, 2])
    value = compiled(elbo)(jax.random.key(0), make_params(), jnp.asarray(DATA)[order], order)
    np.testing.assert_allclose(value, dense_elbo(), rtol=1e-6)


def test_missing_entries_are_left_out(float64):
    gplvm = make_gplvm()
    mask = np.random.default_rng(3).random(DATA.shape) < 0.6
    elbo = jax.value_and_grad(make_elbo(gplvm.model, gplvm.guide), 1)
    Y = jnp.asarray(np.where(mask, DATA, np.nan))
    value, gradient = compiled(elbo)(jax.random.key(0), make_params(), Y, None, mask)
    np.testing.assert_allclose(value, dense_elbo(mask=mask), rtol=1e-6)
    assert all(np.all(np.isfinite(leaf)) for leaf in gradient.values())
    # In a minibatch too.
    rows = jnp.array([4, 1])
    value, _ = compiled(lambda *args: elbo(*args, mask="nan"))(jax.random.key(0), make_params(), Y[rows], rows)
    np.testing.assert_allclose(value, dense_elbo(np.array([4, 1]), mask=mask), rtol=1e-6)


def test_latents_are_drawn_from_q(float64):
    """At a latent scale that matters, the ELBO is the average over x ~ q(x) of the regression's."""
    gplvm = make_gplvm(conditional="prior")
    params = make_params() | {"x.scale": jnp.full((ROWS, LATENT), 0.3)}
    elbo = make_elbo(gplvm.model, gplvm.guide)
    count = 2000
    keys = jax.random.split(jax.random.key(0), count)
    values = np.asarray(compiled(jax.vmap(lambda key: elbo(key, params, jnp.asarray(DATA))))(keys))

    rng = np.random.default_rng(2)
    own = jax.tree.map(np.asarray, params)
    Y = DATA - DATA.mean(0)
    by_hand = []
    for _ in range(1000):
        x = LATENTS + 0.3 * rng.normal(size=LATENTS.shape)
        total = 0.0
        for d in range(COLUMNS):
            q = {f"f.u.{part}": own[f"f.u.{part}"][d, 0] for part in ("loc", "scale_tril")}
            dense = Dense(([POINTS], ("dense",)), x, q, lengthscale=LENGTHSCALE, variance=VARIANCE)
            total += dense.elbo(Y[:, d], "prior", NOISE)
        by_hand.append(total)
    kl = 0.5 * np.sum(0.3**2 + LATENTS**2 - 1 - 2 * np.log(0.3))
    difference = values.mean() - (np.mean(by_hand) - kl)
    error = np.hypot(values.std() / count**0.5, np.std(by_hand) / 1000**0.5)
    assert abs(difference) < 4 * error < 2.0


def test_each_output_with_a_kernel_of_its_own(float64):
    """The ELBO, and what follows from the parameters, by each output's dense algebra."""
    lengthscales = np.exp(np.random.default_rng(3).normal(size=(COLUMNS, 1, LATENT)))
    kernels = {"lengthscale": lengthscales, "variance": np.array([[0.5], [1.0], [2.0]])}
    gplvm = make_gplvm()
    gplvm = dataclasses.replace(gplvm, start=dataclasses.replace(gplvm.start, **kernels))
    with numpyro.handlers.seed(rng_seed=0):
        sites = numpyro.handlers.trace(gplvm.guide).get_trace(DATA)
    params = make_params() | {name: jnp.asarray(value) for name, value in kernels.items()}
    assert {name: params[name].shape for name in kernels} == {name: sites[name]["value"].shape for name in kernels}
    elbo = make_elbo(gplvm.model, gplvm.guide)
    value, mean = compiled(lambda key, params, Y: (elbo(key, params, Y), gplvm.reconstruct(params, LATENTS)[0]))(
        jax.random.key(0), params, jnp.asarray(DATA)
    )
    own = dict(lengthscales=lengthscales[:, 0], variances=kernels["variance"][:, 0])
    np.testing.assert_allclose(value, dense_elbo(**own), rtol=1e-5)
    expected = np.stack([output.mean for output in dense_outputs(**own)], 1) + DATA.mean(0)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(
        npgp.gplvm.relevance(params), npgp.gplvm.relevance(LATENTS, lengthscales.min((0, 1))), rtol=1e-12
    )
    with pytest.raises(
        ValueError, match=r"start.lengthscale has shape \(3, 1, 2\), one for each column; the collapsed"
    ):
        npgp.gplvm.CollapsedGPLVM(gplvm.start)


def test_a_latent_guide_replaces_the_free_one(float64):
    """An encoder: its parameters, and no table of rows."""

    def encoder(start, rows, Y, mask):
        weights = numpyro.param("weights", jnp.ones((COLUMNS, LATENT)))
        with rows:
            numpyro.sample("x", dist.Normal((Y - DATA.mean(0)) @ weights, SCALE).to_event(1))

    gplvm = make_gplvm(latents=encoder)
    weights = np.linalg.lstsq(DATA - DATA.mean(0), LATENTS, rcond=None)[0]
    params = make_params() | {"weights": jnp.asarray(weights)}
    means = (DATA - DATA.mean(0)) @ weights
    params["x.loc"] = jnp.asarray(means)
    free = make_gplvm()
    value, gradient = compiled(jax.value_and_grad(make_elbo(gplvm.model, gplvm.guide), 1))(
        jax.random.key(0), params, jnp.asarray(DATA)
    )
    expected = compiled(make_elbo(free.model, free.guide))(jax.random.key(0), params, jnp.asarray(DATA))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert np.any(gradient["weights"] != 0) and np.all(gradient["x.loc"] == 0)


# ---------------------------------------------------------------------------------------------------------------
# Training and what follows


@pytest.fixture(scope="module")
def trained():
    """Rows of 5 smooth functions of 2 latent coordinates, without noise; float32, as on an accelerator."""
    rng = np.random.default_rng(5)
    x = rng.uniform(-1.5, 1.5, (60, 2))
    columns = [np.sin(x[:, 0]), np.cos(x[:, 1]), x[:, 0] * x[:, 1] / 2, x.sum(1) / 2, x[:, 1] - 3.0]
    Y = np.stack(columns, 1).astype(np.float32)
    gplvm = npgp.BayesianGPLVM(npgp.gplvm.pca_start(jax.random.key(0), Y, latent_dim=2, num_inducing=12))
    params, losses = train(gplvm.model, gplvm.guide, 500, Y, rate=0.03)
    return gplvm, Y, params, losses


def test_training_raises_the_elbo(trained):
    _, _, params, losses = trained
    assert np.all(np.isfinite(losses))
    assert losses[-50:].mean() < 0.1 * losses[0]
    assert params["x.loc"].shape == (60, 2) and np.all(params["x.scale"] > 0)


def test_reconstruction_of_training_rows(trained):
    gplvm, Y, params, _ = trained
    mean, variance = compiled(gplvm.reconstruct)(params, params["x.loc"])
    assert mean.shape == variance.shape == Y.shape
    assert np.all(variance > 0)
    assert np.sqrt(np.mean((mean - Y) ** 2)) < 0.1 * Y.std(0).mean()
    posterior = compiled(lambda x: gplvm.posterior(params).mean(x))(params["x.loc"])
    assert posterior.shape == (5, 60)
    np.testing.assert_allclose(posterior.T + gplvm.start.offset, mean, rtol=1e-5, atol=1e-5)
    # Each row is nearest to its own reconstruction.
    distances = np.linalg.norm(np.asarray(mean)[:, None] - Y, axis=-1)
    assert np.mean(distances.argmin(1) == np.arange(60)) > 0.9


def test_reconstruction_integrates_uncertain_latents(trained):
    """The cubature against plain Monte Carlo over the latent point."""
    gplvm, _, params, _ = trained
    point = params["x.loc"][:4]
    scale = np.full_like(point, 0.25)
    scale[:, 1] = 0.1

    @compiled
    def by_draws(key):
        x = point + scale * jax.random.normal(key, (4000, 4, 2))
        mean, variance = gplvm.posterior(params).mean_and_variance(x.reshape(-1, 2))
        mean, variance = (v.reshape(5, 4000, 4) for v in (mean, variance))
        return mean.mean(1).T + gplvm.start.offset, (variance.mean(1) + mean.var(1)).T

    mean, variance = by_draws(jax.random.key(0))
    got_mean, got_variance = compiled(gplvm.reconstruct)(params, point, scale)
    np.testing.assert_allclose(got_mean, mean, atol=0.01)
    np.testing.assert_allclose(got_variance, variance, rtol=0.1, atol=1e-3)
    _, known = compiled(gplvm.reconstruct)(params, point)
    assert np.all(got_variance.sum(1) > 1.5 * known.sum(1))


# ---------------------------------------------------------------------------------------------------------------
# The start, and errors


def test_pca_start(float64):
    start = npgp.gplvm.pca_start(jax.random.key(3), DATA, 2, 4)
    np.testing.assert_allclose(start.offset, DATA.mean(0))
    np.testing.assert_allclose(start.latents.T @ start.latents / ROWS, np.eye(2), atol=1e-10)
    centered = DATA - DATA.mean(0)
    # They span the best rank-2 approximation.
    residual = centered - start.latents @ np.linalg.lstsq(start.latents, centered, rcond=None)[0]
    np.testing.assert_allclose(np.sum(residual**2), np.linalg.svd(centered)[1][2] ** 2, atol=1e-10)
    rows = [np.flatnonzero((start.latents == z).all(1)) for z in start.inducing]
    assert len({int(row[0]) for row in rows}) == 4
    np.testing.assert_array_equal(start.inducing, npgp.gplvm.pca_start(jax.random.key(3), DATA, 2, 4).inducing)


def test_pca_start_without_variance_in_a_direction(float64):
    flat = np.outer(np.arange(6.0), [1.0, 2.0, -1.0])
    start = npgp.gplvm.pca_start(jax.random.key(0), flat, 2, 3)
    assert np.std(start.latents[:, 0]) == pytest.approx(1.0)
    np.testing.assert_array_equal(start.latents[:, 1], 0.0)


@pytest.mark.parametrize(
    "Y, latent_dim, num_inducing, error, words",
    [
        (DATA, 0, 4, ValueError, "latent_dim is 0; .* 1 to 3"),
        (DATA, 4, 4, ValueError, "latent_dim is 4; .* 1 to 3"),
        (DATA[:, :1], 2, 4, ValueError, r"latent_dim is 2; it must be 1, for principal components of \(6, 1\) data"),
        (DATA, 2, 7, ValueError, "num_inducing is 7; .* between 1 and the 6 rows"),
        (DATA, 2, 0, ValueError, "num_inducing is 0"),
        (DATA[:, 0], 1, 2, ValueError, r"Y has shape \(6,\)"),
        (np.where(DATA > 0.5, np.nan, DATA), 1, 2, ValueError, "Y has NaN"),
        (np.ones((6, 3), int), 1, 2, TypeError, "Y has dtype int"),
    ],
)
def test_pca_start_refuses(Y, latent_dim, num_inducing, error, words):
    with pytest.raises(error, match=words):
        npgp.gplvm.pca_start(jax.random.key(0), Y, latent_dim, num_inducing)


@pytest.mark.parametrize("shape, rows", [((6, 2), None), ((5, 3), None), ((3, 3), [0, 1])])
def test_data_must_match_the_row_numbers(shape, rows):
    gplvm = make_gplvm()
    rows = None if rows is None else jnp.array(rows)
    with numpyro.handlers.seed(rng_seed=0), pytest.raises(ValueError, match=r"Y has shape .* must be"):
        gplvm.model(np.ones(shape), rows)
