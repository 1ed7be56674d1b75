"""Families of q(x) and priors of x in a GPLVM, against dense algebra, and against each other where they coincide."""

from dataclasses import replace

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import Dense, compiled, make_elbo
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from scipy import stats
from test_gplvm import (
    COLUMNS,
    DATA,
    LATENT,
    LATENTS,
    LENGTHSCALE,
    NOISE,
    POINTS,
    ROWS,
    VARIANCE,
    dense_elbo,
    latent_kl,
    make_gplvm,
    make_params,
)

import npgp
from npgp.gplvm import ClassNormal, Dynamical, Encoder, FreeNormal, NormalMixture, Point
from npgp.gplvm.guides import RowNormal


def value_of(gplvm, params, seed=0, **kwargs):
    elbo = compiled(make_elbo(gplvm.model, gplvm.guide))
    return float(elbo(jax.random.key(seed), params, jnp.asarray(DATA.copy()), **kwargs))


def mean_value(gplvm, params, count, **kwargs):
    """Mean of the ELBO over draws, and its standard error."""
    elbo = make_elbo(gplvm.model, gplvm.guide)
    Y = jnp.asarray(DATA.copy())
    run = compiled(jax.vmap(lambda key: elbo(key, params, Y, **kwargs)))
    values = np.asarray(run(jax.random.split(jax.random.key(1), count)))
    return values.mean(), values.std(ddof=1) / np.sqrt(count)


# ---------------------------------------------------------------------------------------------------------------
# Families of q(x)


def test_full_covariance(float64):
    """A diagonal factor is the diagonal family, draw by draw; the divergence is that of multivariate normals."""
    scale = np.random.default_rng(0).uniform(0.1, 0.5, (ROWS, LATENT))
    diagonal = make_params() | {"x.scale": jnp.asarray(scale)}
    full = make_params() | {"x.scale_tril": jnp.asarray(np.stack([np.diag(s) for s in scale]))}
    expected = value_of(make_gplvm(), diagonal)
    assert value_of(make_gplvm(latents=FreeNormal(full=True)), full) == pytest.approx(expected, rel=1e-9)

    rng = np.random.default_rng(1)
    L = np.tril(rng.normal(size=(3, 2, 2)))
    L[:, [0, 1], [0, 1]] = rng.uniform(0.3, 1.0, (3, 2))
    loc, mean, sd = rng.normal(size=(3, 2)), rng.normal(size=(3, 2)), rng.uniform(0.5, 2.0, (3, 2))
    got = kl_divergence(RowNormal(loc, scale_tril=L), dist.Normal(mean, sd).to_event(1))
    dense = dist.MultivariateNormal(mean, scale_tril=np.stack([np.diag(s) for s in sd]))
    np.testing.assert_allclose(got, kl_divergence(dist.MultivariateNormal(loc, scale_tril=L), dense), rtol=1e-10)


def test_point_estimates(float64):
    params = make_params()
    params.pop("x.scale")
    data = dense_elbo() + latent_kl()
    log_prior = stats.norm.logpdf(LATENTS).sum()
    assert value_of(make_gplvm(latents=Point()), params) == pytest.approx(data + log_prior, rel=1e-6)
    assert value_of(make_gplvm(latents=Point(prior=False)), params) == pytest.approx(data, rel=1e-6)


class Dense2(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(2 * LATENT, kernel_init=flax.linen.initializers.zeros)(x)


def eqx_zeros():
    layer = eqx.nn.Linear(COLUMNS, 2 * LATENT, key=jax.random.key(0))
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (jnp.zeros((2 * LATENT, COLUMNS)), jnp.zeros(2 * LATENT)))


NETWORKS = {
    "function": lambda: lambda inputs: jnp.zeros((len(inputs), 2 * LATENT)),
    "equinox": eqx_zeros,
    "linen": lambda: Dense2(),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_encoders_begin_at_the_linear_map(kind, float64):
    """A network that gives zeros leaves the principal components: q(x) of the start, in every kind of encoder."""
    network = NETWORKS[kind]()
    Y = jnp.asarray(DATA.copy())
    for scale, free in [("network", FreeNormal()), ("rows", FreeNormal()), ("none", Point())]:
        gplvm, other = (make_gplvm(latents=latents) for latents in (Encoder(network, scale=scale), free))
        values = []
        for model in (gplvm, other):
            svi = SVI(model.model, model.guide, npgp.adam(0.01), TraceMeanField_ELBO())

            @compiled
            def loss(key, svi=svi):
                return svi.evaluate(svi.init(key, Y), Y)

            values.append(float(loss(jax.random.key(0))))
        assert values[0] == pytest.approx(values[1], rel=1e-9), scale
        if kind != "function":
            break  # the other two differ by what is tested for functions


def test_default_encoder(float64):
    gplvm = make_gplvm(latents=Encoder(rng_key=jax.random.key(0), width=8))
    mask = np.ones(DATA.shape, bool)
    mask[2, 1] = False
    Y = np.where(mask, DATA, np.nan)
    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        gplvm.latent_guide(Y, mask=mask)
    params = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
    loc, scale = gplvm.latents_at(params, Y, mask=mask)
    assert "x.loc" not in params and np.all(np.isfinite(loc))
    whole = np.delete(np.arange(ROWS), 2)
    # Near the components, of which the row with a missing entry sees only a part.
    np.testing.assert_allclose(loc[whole], gplvm.start.latents[whole], atol=0.05)
    np.testing.assert_allclose(scale, gplvm.start.latent_scale, rtol=0.1)
    # Any rows can be encoded, each by itself.
    new, _ = gplvm.latents_at(params, Y[[4, 2]], mask="nan")
    np.testing.assert_allclose(new, loc[np.array([4, 2])], rtol=1e-6)


def test_latents_at_rows(float64):
    params = make_params() | {"x.scale_tril": jnp.broadcast_to(jnp.array([[0.3, 0.0], [0.4, 0.1]]), (ROWS, 2, 2))}
    loc, scale = make_gplvm(latents=FreeNormal(full=True)).latents_at(params, rows=jnp.array([3, 1]))
    np.testing.assert_allclose(loc, LATENTS[[3, 1]])
    np.testing.assert_allclose(scale, [[0.3, np.hypot(0.4, 0.1)]] * 2)
    assert np.all(make_gplvm(latents=Point()).latents_at(params)[1] == 0)


def test_encoder_errors():
    with pytest.raises(ValueError, match="scale is 'row'"):
        Encoder(scale="row")
    with pytest.raises(ValueError, match="rng_key is missing"):
        Encoder()
    gplvm = make_gplvm(latents=Encoder(lambda inputs: jnp.zeros((len(inputs), 3))))
    with handlers.seed(rng_seed=0):
        with pytest.raises(ValueError, match=r"network gives shape \(6, 3\) .* twice the latent dimensions, \(6, 4\)"):
            gplvm.latent_guide(DATA)
        with pytest.raises(ValueError, match="Y is missing"):
            gplvm.latent_guide()
        with pytest.raises(TypeError, match="network is 3; it must be a module"):
            make_gplvm(latents=Encoder(3)).latent_guide(DATA)


# ---------------------------------------------------------------------------------------------------------------
# Priors of x


def test_class_normal(float64):
    labels = np.array([0, 1, -1, 1, 0, -1])
    rng = np.random.default_rng(4)
    means, scales = rng.normal(size=(2, LATENT)), rng.uniform(0.4, 1.5, (2, LATENT))
    params = make_params() | {"x.means": jnp.asarray(means), "x.scales": jnp.asarray(scales)}
    gplvm = make_gplvm(prior=ClassNormal(labels))
    m = np.where(labels[:, None] < 0, 0.0, means[labels])
    s = np.where(labels[:, None] < 0, 1.0, scales[labels])
    sd = 1e-7
    kl = np.sum(np.log(s / sd) + (sd**2 + (LATENTS - m) ** 2) / (2 * s**2) - 0.5)
    assert value_of(gplvm, params) == pytest.approx(dense_elbo() + latent_kl() - kl, rel=1e-6)
    # A batch takes its own rows' labels.
    rows = np.array([1, 2])
    kl_rows = np.sum((np.log(s / sd) + (sd**2 + (LATENTS - m) ** 2) / (2 * s**2) - 0.5)[rows])
    elbo = compiled(make_elbo(gplvm.model, gplvm.guide))
    got = elbo(jax.random.key(0), params, jnp.asarray(DATA[rows]), jnp.asarray(rows))
    assert float(got) == pytest.approx(dense_elbo(rows) + (latent_kl(rows) - kl_rows) * ROWS / 2, rel=1e-6)


def test_mixture(float64):
    """Draws have the mixture's moments; the ELBO counts log p(x) of the mixture."""
    means = np.array([[-1.0, 0.0], [2.0, 1.0]])
    gplvm = make_gplvm(prior=NormalMixture(means))
    weights, scales = np.array([0.3, 0.7]), np.array([[0.2, 0.5], [0.4, 0.1]])
    extra = {"x.weights": weights, "x.means": means, "x.scales": scales}
    params = make_params() | {name: jnp.asarray(value) for name, value in extra.items()}
    density = sum(w * stats.norm.pdf(LATENTS, m, s).prod(1) for w, m, s in zip(weights, means, scales, strict=True))
    log_ratio = stats.norm.logpdf(LATENTS).sum() - np.log(density).sum()
    # The standard normal's divergence is exact where this one's is estimated from draws: the same in expectation.
    mean, error = mean_value(gplvm, params, 400)
    assert abs(mean - (dense_elbo() - log_ratio)) < 4 * error < 1.0

    draws = compiled(lambda key: Predictive(gplvm.model, params=params, num_samples=3000)(key)["x"])(jax.random.key(2))
    x = np.asarray(draws).reshape(-1, LATENT)
    expected = weights @ means
    variance = weights @ (scales**2 + means**2) - expected**2
    np.testing.assert_allclose(x.mean(0), expected, atol=5 * np.sqrt(variance.max() / len(x)))
    np.testing.assert_allclose(x.var(0), variance, rtol=0.05)


TIMES = np.array([0.0, 0.5, 1.2, 2.0, 2.6, 3.1])


def dynamical(inducing=TIMES):
    return Dynamical(TIMES, inducing, lengthscale=1.1, noise=0.3)


def test_dynamical_prior_has_the_covariance_of_a_gp_over_time(float64):
    gplvm = make_gplvm(prior=dynamical())
    draws = compiled(lambda key: Predictive(gplvm.model, num_samples=6000)(key)["x"])(jax.random.key(3))
    K = np.exp(-0.5 * ((TIMES[:, None] - TIMES) / 1.1) ** 2) + 0.3**2 * np.eye(ROWS)
    for q in range(LATENT):
        x = np.asarray(draws)[:, :, q]
        np.testing.assert_allclose(x.T @ x / len(x), K, atol=5 * 1.1 * np.sqrt(2 / len(x)))
    between = np.einsum("snp,sn->p", np.asarray(draws), np.asarray(draws)[:, :, 0]) / len(draws)
    assert abs(between[1]) < 0.3 < between[0]


def test_dynamical_elbo(float64):
    """E over h of KL(q(x) ‖ N(h, τ²)), and the divergence of h's own q, in closed form."""
    knots = TIMES[::2]
    gplvm = make_gplvm(prior=dynamical(knots))
    rng = np.random.default_rng(6)
    loc = 0.5 * rng.normal(size=(LATENT, 1, 3))
    factor = np.tril(0.1 * rng.normal(size=(LATENT, 1, 3, 3)), -1) + 0.5 * np.eye(3)
    params = make_params() | {"h.lengthscale": jnp.asarray(1.1), "x.scale_of_noise": jnp.asarray(0.3)}
    params |= {"h.u.loc": jnp.asarray(loc), "h.u.scale_tril": jnp.asarray(factor)}
    expected = dense_elbo() + latent_kl()
    for q in range(LATENT):
        own = {"f.u.loc": loc[q, 0], "f.u.scale_tril": factor[q, 0]}
        h = Dense(([knots[:, None]], ("dense",)), TIMES[:, None], own, lengthscale=1.1, variance=1.0)
        square = (LATENTS[:, q] - h.mean) ** 2 + h.explained + h.residual
        expected -= np.sum(np.log(0.3 / 1e-7) + square / (2 * 0.3**2) - 0.5) + h.kl
    mean, error = mean_value(gplvm, params, 3000)
    assert abs(mean - expected) < 4 * error < 0.02 * abs(expected)


def test_prior_errors():
    with pytest.raises(TypeError, match="labels has dtype float64"):
        ClassNormal(np.zeros(3))
    with pytest.raises(ValueError, match="at least one known"):
        ClassNormal(np.array([-1, -1]))
    with pytest.raises(ValueError, match=r"means has shape \(3,\)"):
        NormalMixture(np.zeros(3))
    with pytest.raises(ValueError, match=r"times has shape \(6, 1\)"):
        Dynamical(TIMES[:, None], TIMES, 1.0)
    with handlers.seed(rng_seed=0):
        for prior, words in [
            (ClassNormal(np.array([0, 1])), "labels has 2 entries, but there are 6 rows"),
            (NormalMixture(np.zeros((2, 3))), "3 latent dimensions, but the model has 2"),
            (Dynamical(TIMES[:4], TIMES, 1.0), "times has 4 entries, but there are 6 rows"),
        ]:
            with pytest.raises(ValueError, match=words):
                make_gplvm(prior=prior).model(DATA)


# ---------------------------------------------------------------------------------------------------------------
# What else a GPLVM may have


def test_weight_of_the_divergence(float64):
    gplvm = make_gplvm(kl_weight=lambda step: jnp.minimum(1.0, 0.25 * (1 + step)))
    for step, weight in [(0, 0.25), (2, 0.75), (10, 1.0)]:
        value = value_of(gplvm, make_params(), step=step)
        assert value == pytest.approx(dense_elbo() + (1 - weight) * latent_kl(), rel=1e-6)
    assert value_of(gplvm, make_params()) == pytest.approx(dense_elbo(), rel=1e-6)


def test_noise_of_each_column(float64):
    noise = np.array([0.1, 0.3, 0.8])
    start = replace(make_gplvm().start, noise_variance=noise)
    params = make_params()
    params["noise_variance"] = jnp.asarray(noise)
    expected = -latent_kl()
    for d in range(COLUMNS):
        own = {f"f.u.{part}": np.asarray(params[f"f.u.{part}"])[d, 0] for part in ("loc", "scale_tril")}
        f = Dense(([POINTS], ("dense",)), LATENTS, own, lengthscale=LENGTHSCALE, variance=VARIANCE)
        expected += f.elbo((DATA - DATA.mean(0))[:, d], "tight", noise[d])
    gplvm = npgp.BayesianGPLVM(start)
    assert value_of(gplvm, params) == pytest.approx(expected, rel=1e-6)
    assert gplvm.likelihood_at(params).variance.shape == (COLUMNS, 1)


def test_orthogonal_blocks(float64):
    start = replace(make_gplvm().start, inducing=(POINTS[:2], POINTS[2:]))
    gplvm = npgp.BayesianGPLVM(start)
    rng = np.random.default_rng(8)
    params = make_params() | {"inducing": jnp.asarray(POINTS[:2]), "inducing2": jnp.asarray(POINTS[2:])}
    expected = -latent_kl()
    q = {}
    for site in ("f.u", "f.v"):
        q[f"{site}.loc"] = rng.normal(size=(COLUMNS, 1, 2))
        q[f"{site}.scale_tril"] = np.tril(0.1 * rng.normal(size=(COLUMNS, 1, 2, 2)), -1) + 0.4 * np.eye(2)
    params |= {name: jnp.asarray(value) for name, value in q.items()}
    for d in range(COLUMNS):
        own = {name: value[d, 0] for name, value in q.items()}
        blocks = ([POINTS[:2], POINTS[2:]], ("dense", "dense"))
        f = Dense(blocks, LATENTS, own, lengthscale=LENGTHSCALE, variance=VARIANCE)
        expected += f.elbo((DATA - DATA.mean(0))[:, d], "tight", NOISE)
    assert value_of(gplvm, params) == pytest.approx(expected, rel=1e-6)


def test_several_draws_of_x(float64):
    """The mean over particles is unbiased, and varies less."""
    gplvm = make_gplvm()
    params = make_params() | {"x.scale": jnp.full((ROWS, LATENT), 0.3)}
    Y = jnp.asarray(DATA.copy())

    def values(particles, count):
        loss = TraceMeanField_ELBO(num_particles=particles)
        run = compiled(jax.vmap(lambda key: -loss.loss(key, params, gplvm.model, gplvm.guide, Y)))
        return np.asarray(run(jax.random.split(jax.random.key(particles), count)))

    one, ten = values(1, 1000), values(10, 200)
    error = np.hypot(one.std() / 1000**0.5, ten.std() / 200**0.5)
    assert abs(one.mean() - ten.mean()) < 4 * error
    assert 0.2 < ten.std() / one.std() < 0.45  # 1/√10 = 0.32


def test_binary_columns(float64):
    """A likelihood of one's own, with data simulated from the model itself."""
    gplvm = npgp.BayesianGPLVM(replace(make_gplvm().start, offset=np.zeros(COLUMNS)), likelihood=npgp.Bernoulli())
    params = make_params()
    params.pop("noise_variance")
    simulate = compiled(lambda key: Predictive(gplvm.model, params=params, num_samples=50)(key))
    draws = simulate(jax.random.key(0))
    assert draws["y"].shape == (50, COLUMNS, ROWS) and set(np.unique(draws["y"])) == {0, 1}
    labels = (DATA > DATA.mean(0)).astype(float)
    elbo = compiled(make_elbo(gplvm.model, gplvm.guide))
    value = elbo(jax.random.key(0), params, jnp.asarray(labels))
    assert np.isfinite(value) and value < 0
    worse = params | {"f.u.loc": -params["f.u.loc"]}
    flipped = elbo(jax.random.key(0), worse, jnp.asarray(1 - labels))
    assert float(flipped) == pytest.approx(float(value), rel=1e-9)  # the sign of f is that of the labels


def test_start_from_missing_data(float64):
    """Low-rank data are recovered from 70% of their entries, and so are the components."""
    rng = np.random.default_rng(9)
    Y = rng.normal(size=(80, 2)) @ rng.normal(size=(2, 8)) + 3.0
    mask = rng.random(Y.shape) < 0.7
    start = npgp.gplvm.pca_start(jax.random.key(0), np.where(mask, Y, np.nan), 2, 5, mask=mask)
    fitted = start.latents @ np.linalg.lstsq(start.latents, Y - start.offset, rcond=None)[0] + start.offset
    naive = np.where(mask, Y, np.sum(Y * mask, 0) / mask.sum(0))
    assert np.sqrt(np.mean((fitted - Y) ** 2)) < 0.5 * np.sqrt(np.mean((naive - Y) ** 2))
    whole = npgp.gplvm.pca_start(jax.random.key(0), Y, 2, 5)
    np.testing.assert_allclose((Y - whole.offset) @ whole.projection, whole.latents, atol=1e-8)


def test_random_start(float64):
    start = npgp.gplvm.random_start(jax.random.key(0), DATA, 4, (2, 3), offset=0.0)
    assert [Z.shape for Z in start.blocks] == [(2, 4), (3, 4)] and np.all(start.offset == 0)
    again = npgp.gplvm.random_start(jax.random.key(0), DATA, 4, (2, 3), offset=0.0)
    np.testing.assert_array_equal(start.latents, again.latents)
    assert not np.array_equal(start.latents, npgp.gplvm.random_start(jax.random.key(1), DATA, 4, 5).latents)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"mask": np.ones((2, 2), bool)}, r"mask has shape \(2, 2\); it must be that of Y"),
        ({"mask": np.arange(3) < np.full((6, 1), 2)}, r"mask leaves no entry in columns \[2\]"),
        ({"offset": np.zeros(2)}, r"offset has shape \(2,\)"),
    ],
)
def test_start_refuses(kwargs, words):
    with pytest.raises(ValueError, match=words):
        npgp.gplvm.pca_start(jax.random.key(0), DATA, 2, 3, **kwargs)
    for make in (npgp.gplvm.pca_start, npgp.gplvm.random_start):
        with pytest.raises(TypeError, match="^mask has dtype float64; it must be boolean"):
            make(jax.random.key(0), DATA, 2, 3, mask=np.ones((6, 3)))
        with pytest.raises(ValueError, match="^Y is a NumPy masked array"):
            make(jax.random.key(0), np.ma.masked_less(DATA, 0.0), 2, 3)
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=r"mask has shape \(6, 2\); it must be that of Y"):
        make_gplvm().model(DATA, mask=np.ones((6, 2), bool))
    with handlers.seed(rng_seed=0):
        with pytest.raises(TypeError, match="^mask has dtype int64; it must be boolean"):
            make_gplvm().model(DATA, mask=np.ones((6, 3), int))
        with pytest.raises(ValueError, match="^Y is a NumPy masked array"):
            make_gplvm().model(np.ma.masked_less(DATA, 0.0))
    assert numpyro.get_mask() is None


def test_start_takes_lists_and_refuses_what_is_no_number():
    start = npgp.gplvm.Start([[0.0, 1.0]], [[0.0, 0.0]], [0.0], lengthscale=[1, 2.0])
    assert start.latents.shape == (1, 2) and start.lengthscale.tolist() == [1.0, 2.0]
    with pytest.raises(TypeError, match="^variance is 'a'; it must be a real number"):
        npgp.gplvm.Start(np.zeros((2, 1)), np.zeros((1, 1)), np.zeros(1), variance="a")


def test_pca_of_numbers_far_from_zero_is_in_double_precision():
    rng = np.random.default_rng(0)
    Y = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 3)) + 2.0**31
    with pytest.warns(UserWarning, match=r"^Y, column \d: 40 different values become 1 in float32"):
        start = npgp.gplvm.pca_start(jax.random.key(0), Y, 2, 3)
    again = npgp.gplvm.pca_start(jax.random.key(0), Y - Y.mean(0), 2, 3)
    np.testing.assert_allclose(np.abs(start.latents), np.abs(again.latents), atol=1e-5)


def test_arguments_of_the_start_and_the_model_are_checked():
    start = make_gplvm().start
    for kwargs, words in [
        ({"latents": np.zeros(6)}, r"latents has shape \(6,\); it must be \(N, Q\)"),
        ({"inducing": np.zeros((5, 3))}, r"inducing has shape \(5, 3\); with these latents it must be \(M, 2\)"),
        ({"inducing": (POINTS, np.zeros(3))}, r"inducing has shape \(3,\)"),
        ({"noise_variance": np.ones(2)}, r"noise_variance has shape \(2,\); it must be a number or \(3,\)"),
        ({"lengthscale": -1.0}, "lengthscale is -1.0; it must be positive"),
        ({"projection": np.ones((2, 3))}, r"projection has shape \(2, 3\); it must be \(3, 2\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            replace(start, **kwargs)
    for kwargs, words in [
        ({"start": DATA}, "start is a ndarray; it must be a Start"),
        ({"latents": 3}, "latents is 3; it must be a function"),
        ({"likelihood": 0.1}, "likelihood is 0.1; it must be a function, a likelihood or None"),
    ]:
        with pytest.raises(TypeError, match=words):
            npgp.BayesianGPLVM(**{"start": start, **kwargs})
    with pytest.raises(ValueError, match="best"):
        npgp.BayesianGPLVM(start, conditional="best")
