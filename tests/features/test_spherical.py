"""Spherical harmonics and activations as inducing features, against explicit harmonics and dense algebra."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

import npgp
from npgp.collapsed import CollapsedGP
from npgp.features import (
    Activations,
    LeakyReLU,
    Points,
    ReLU,
    Softplus,
    SphericalHarmonics,
    as_block,
    covariance,
)
from npgp.features.activations import fundamental_system
from npgp.inducing.selection import choose_levels, left_out
from npgp.kernels import RBF, ZonalArcCosine, ZonalMatern12, ZonalMatern32, ZonalMatern52, ZonalRBF
from npgp.kernels.gegenbauer import multiplicity
from npgp.pytrees import pytree
from npgp.sparse.projection import Projector, factorize
from npgp.variational import DenseNormal

NOISE = 0.1


def legendre(d, level, t):
    if d == 2:
        return special.eval_chebyt(level, t)
    return special.eval_gegenbauer(level, d / 2 - 1, t) / special.eval_gegenbauer(level, d / 2 - 1, 1.0)


def random_units(seed, rows, d):
    U = np.random.default_rng(seed).normal(size=(rows, d))
    return U / np.linalg.norm(U, axis=1, keepdims=True)


def sphere_rule(d, degree):
    """Nodes and weights on the sphere that are exact for polynomials of a degree."""
    if d == 2:
        angles = 2 * np.pi * np.arange(degree + 1) / (degree + 1)
        return np.column_stack([np.cos(angles), np.sin(angles)]), np.full(degree + 1, 1 / (degree + 1))
    U, w = sphere_rule(d - 1, degree)
    t, v = (
        special.roots_gegenbauer(degree // 2 + 1, d / 2 - 1)
        if d > 3
        else np.polynomial.legendre.leggauss(degree // 2 + 1)
    )
    nodes = [np.column_stack([np.full(len(U), s), np.sqrt(1 - s**2) * U]) for s in t]
    return np.concatenate(nodes), np.kron(v / v.sum(), w)


# ---------------------------------------------------------------- harmonics


@pytest.mark.parametrize(("d", "levels"), [(2, (0, 1, 6)), (3, (0, 1, 2, 5)), (5, (0, 1, 3)), (12, (0, 1, 2))])
def test_harmonics_satisfy_the_addition_theorem_and_are_orthonormal(d, levels, x64):
    block = SphericalHarmonics(levels, d)
    U = random_units(0, 30, d)
    Y = np.asarray(jax.jit(block)(jnp.asarray(U, x64)))
    assert Y.shape == (block.size, 30) and Y.dtype == x64
    tolerance = {jnp.float32: 2e-5, jnp.float64: 1e-11}[x64]
    for level, rows in zip(levels, np.split(Y, np.cumsum(block.counts)[:-1]), strict=True):
        N = multiplicity(d, level)
        assert len(rows) == N
        np.testing.assert_allclose(rows.T @ rows, N * legendre(d, level, U @ U.T), atol=tolerance * N)
    if d <= 5 and x64 == jnp.float64:
        nodes, weights = sphere_rule(d, 2 * max(levels))
        Y = np.asarray(jax.jit(block)(nodes))
        np.testing.assert_allclose((Y * weights) @ Y.T, np.eye(block.size), atol=1e-10)


def test_fundamental_systems_are_found_once_and_well_conditioned():
    for d, level in ((3, 9), (9, 3), (20, 2)):
        V, W = fundamental_system(d, level)
        N = multiplicity(d, level)
        assert V.shape == (N, d) and W.shape == (N, N)
        assert np.linalg.cond(W) < 100
        assert fundamental_system(d, level)[0] is V


def test_number_of_harmonics_is_limited():
    assert SphericalHarmonics((2,), 64).size == 2079
    with pytest.raises(ValueError, match=r"are 45,696 spherical harmonics \(45,696 at level 3\); at most 4,000"):
        SphericalHarmonics((3,), 64)
    with pytest.raises(ValueError, match="must list at least one level, from 0 and increasing"):
        SphericalHarmonics((1, 1), 3)
    with pytest.raises(TypeError, match="it must list the levels"):
        SphericalHarmonics(3, 3)
    with pytest.raises(ValueError, match="dimension is 1"):
        SphericalHarmonics((0,), 1)


def test_harmonics_within_a_number_are_those_of_largest_eigenvalues():
    # d = 4: 1, 4, 9, 16, 25, … harmonics; the kernel lacks levels 3, 5, …
    assert SphericalHarmonics.within(60, ZonalArcCosine(), 3) == SphericalHarmonics((0, 1, 2, 4), 4)
    assert SphericalHarmonics.within(38, ZonalArcCosine(), 3).size == 14
    assert SphericalHarmonics.within(31, ZonalMatern32(), 3) == SphericalHarmonics((0, 1, 2, 3), 4)
    with pytest.raises(ValueError, match="size is 0"):
        SphericalHarmonics.within(0, ZonalRBF(), 3)


def test_levels_are_chosen_inside_a_traced_model():
    """As ``fit`` traces it; for a kernel that is known. Of one that is not, no levels are."""

    def model(variance):
        known = SphericalHarmonics.within(60, ZonalArcCosine(), 3)
        assert known == SphericalHarmonics((0, 1, 2, 4), 4)
        with pytest.raises(TypeError, match="kernel has traced hyperparameters.* call within before"):
            SphericalHarmonics.within(60, ZonalArcCosine(weight_variance=variance), 3)
        return known.gram(ZonalArcCosine(weight_variance=variance))

    assert jax.eval_shape(model, 1.0).shape == (39, 39)


# ---------------------------------------------------------------- covariances


def explicit_harmonics(d, most, U):
    """Real harmonics of levels up to most in the plane and in space, orthonormal on average, and their levels."""
    rows, levels = [], []
    azimuth = np.arctan2(U[:, 1], U[:, 0])
    for level in range(most + 1):
        for m in range(-level, level + 1):
            if d == 2 and abs(m) != level:
                continue
            wave = np.cos(m * azimuth) if m >= 0 else np.sin(-m * azimuth)
            k = abs(m)
            if d == 3:
                norm = (2 * level + 1) * special.factorial(level - k) / special.factorial(level + k)
                wave = wave * np.sqrt(norm) * special.lpmv(k, level, U[:, 2])
            rows.append(wave * (1 if m == 0 else np.sqrt(2)))
            levels.append(level)
    return np.array(rows), np.array(levels)


def block_of_each_kind(d):
    Z = random_units(1, 5, d)
    return [
        SphericalHarmonics((0, 2, 3), d),
        SphericalHarmonics((1, 4), d),
        Activations(1.7 * Z[:3], Softplus(3.0), range(6)),
        Activations(Z[1:4], lambda t: jnp.sin(2 * t) + t**2, (0, 1, 2, 5)),
    ]


@pytest.mark.parametrize(
    ("d", "kernel"),
    [(2, ZonalMatern32(0.7, variance=1.3, bias_variance=0.6)), (3, 1.5 * ZonalArcCosine(1))],
    ids=["2", "3"],
)
def test_covariances_among_features_are_inner_products_of_their_covariances_with_f(d, kernel, float64):
    blocks = block_of_each_kind(d)
    X = np.random.default_rng(0).normal(size=(400, d - 1))

    @jax.jit
    def everything(kernel, blocks, X):
        zonal, scale = npgp.kernels.zonal.as_zonal(kernel, "")
        cross = [block.cross(kernel, X) for block in blocks]
        pairs = {
            (i, j): a.gram(kernel) if i == j else covariance(kernel, a, b)
            for i, a in enumerate(blocks)
            for j, b in enumerate(blocks)
            if i <= j or (i, j) in ((1, 0), (3, 0), (3, 2))
        }
        return zonal.polar(X), scale * zonal.variance * zonal.eigenvalues(range(6), d), cross, pairs

    (radius, U), eigenvalues, cross, pairs = jax.tree.map(np.asarray, everything(kernel, blocks, X))
    Y, levels = explicit_harmonics(d, 5, U)
    weights = []
    for K_uf in cross:
        c, *_ = np.linalg.lstsq(Y.T, (K_uf / radius).T, rcond=None)
        np.testing.assert_allclose(Y.T @ c, (K_uf / radius).T, atol=1e-9)  # these levels are all there is
        absent = eigenvalues[levels] == 0
        np.testing.assert_allclose(c[absent], 0.0, atol=1e-7)
        weights.append((c / np.sqrt(np.where(absent, 1.0, eigenvalues[levels]))[:, None])[~absent])
    assert len(pairs) == 13
    for (i, j), K in pairs.items():
        same = weights[i].T @ weights[j]
        if i == j and i < 2:  # a level that the kernel lacks keeps its harmonics, which say nothing of f
            seen = np.diag(same) > 0.5
            np.testing.assert_array_equal(K, np.eye(len(K)))
            same, K = same[np.ix_(seen, seen)], K[np.ix_(seen, seen)]
        np.testing.assert_allclose(K, same, atol=1e-6)
    for i in (2, 3):
        np.testing.assert_allclose(np.diag(pairs[i, i]), 1.0, atol=1e-12)
        assert np.min(np.linalg.eigvalsh(pairs[i, i])) > -1e-12


def test_units_are_the_functions_they_name(float64):
    # At many levels the series is the activation itself, up to the features' scale.
    X = np.random.default_rng(0).normal(size=(50, 2))
    kernel, z = ZonalMatern12(), np.array([[0.3, -1.2, 0.8]])
    _, U = map(np.asarray, kernel.polar(jnp.asarray(X)))
    t = U @ z[0] / np.linalg.norm(z)
    for shape, sigma, atol in (
        (Softplus(3.0), np.log1p(np.exp(3 * t)) / 3, 1e-7),
        (LeakyReLU(0.2), np.where(t > 0, t, 0.2 * t), 4e-3),
    ):
        block = Activations(z, shape, range(23))
        K_uf = np.asarray(jax.jit(lambda block: block.cross(kernel, X))(block))[0] / np.asarray(kernel.polar(X)[0])
        scale = (K_uf @ sigma) / (sigma @ sigma)
        assert scale > 0
        np.testing.assert_allclose(K_uf / scale, sigma, atol=atol * 10)


# ---------------------------------------------------------------- residual variance


#: Dimensions, and whether in float64, where the least excess shows.
CASES = [(2, True), (5, True), (9, True), (33, True), (2, False), (5, False), (9, False), (33, False)]


@pytest.mark.parametrize(("d", "double"), CASES)
def test_residual_variance_is_not_negative(d, double):
    kernel = {2: ZonalMatern52(0.8), 5: ZonalArcCosine(1), 9: ZonalRBF(4.0), 33: ZonalArcCosine(0)}[d]
    dtype = np.float64 if double else np.float32
    rng = np.random.default_rng(d)
    X = rng.normal(size=(10_000, d - 1)).astype(dtype)
    Z = X[:15]  # where nothing is left
    units = Activations(random_units(d, 20 if d < 9 else 5, d).astype(dtype), ReLU() if d < 9 else Softplus(), range(7))
    harmonics = SphericalHarmonics.within(4 * d, kernel, d - 1)
    blocks = {2: [units, Z], 5: [harmonics, dataclasses.replace(units, levels=(2, 4))], 9: [units, harmonics]}

    @jax.jit
    def shares_left(blocks, X):
        projection = factorize(kernel, [as_block(block) for block in blocks])(X)
        explained = jnp.stack([jnp.sum(A**2, 0) for A in projection.A])
        return 1 - jnp.cumsum(explained, 0) / projection.prior_variance  # not clipped

    with jax.enable_x64(double):
        shares = np.asarray(shares_left(blocks.get(d, [harmonics, Z]), X))
    assert shares.dtype == dtype
    assert np.min(shares) > -(1e-7 if double else 1e-4)
    # Little is left somewhere, as otherwise the test would be idle, and the second block has a part in that.
    assert np.min(shares[1]) < 0.01
    assert np.max(shares[0] - shares[1]) > 0.005


# ---------------------------------------------------------------- regression


def data(seed=0, rows=12, columns=2):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, columns))
    return X, np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=rows)


def test_all_harmonics_to_a_level_are_the_exact_gp_of_the_truncated_kernel(float64):
    X, y = data()
    new = np.random.default_rng(3).normal(size=(12, 2))
    kernel, levels = ZonalMatern52(0.9, variance=1.4), (0, 1, 2, 3)
    U = {name: np.column_stack([x, np.ones(len(x))]) for name, x in (("X", X), ("new", new))}
    a = np.asarray(kernel.level_variances(levels, 3))

    def truncated(A, B):
        norms = np.outer(np.linalg.norm(A, axis=1), np.linalg.norm(B, axis=1))
        t = A @ B.T / norms
        return 1.4 * norms * sum(a_l * legendre(3, level, t) for a_l, level in zip(a, levels, strict=True))

    mean, cov = oracles.gp_posterior(
        truncated(U["X"], U["X"]), truncated(U["new"], U["X"]), truncated(U["new"], U["new"]), y, NOISE
    )

    @jax.jit
    def run(X, y, new):
        gp = CollapsedGP(kernel, X, SphericalHarmonics(levels, 3), noise_variance=NOISE, conditional="prior")
        posterior = gp.condition(y)
        residual = posterior.projector(new).residual_variance()
        return posterior.mean(new), posterior.variance(new) - residual, gp.log_prob(y), kernel.diag(X)

    value, variance, bound, prior = map(np.asarray, run(X, y, new))
    np.testing.assert_allclose(value, mean, atol=1e-6)
    np.testing.assert_allclose(variance, np.diag(cov), atol=1e-6)
    K = truncated(U["X"], U["X"])
    exact = oracles.log_normal(y, K + NOISE * np.eye(12)) - 0.5 * np.sum(prior - np.diag(K)) / NOISE
    np.testing.assert_allclose(bound, exact, atol=1e-5)


def blocks_of_each_kind(Z, O, z, sharpness):
    """For every kind, a block to be first and one to be second."""
    return {
        "points": (Points(Z), Points(O)),
        "harmonics": (SphericalHarmonics((0, 1), 3), SphericalHarmonics((2,), 3)),
        "units": (Activations(z[:4], Softplus(sharpness), range(5)), Activations(z[4:], ReLU(), range(5))),
    }


@jax.jit
def covariances_of_pairs(kernel, Z, O, z, sharpness, X):
    kinds = blocks_of_each_kind(Z, O, z, sharpness)
    alone = {name: [(block.gram(kernel), block.cross(kernel, X)) for block in pair] for name, pair in kinds.items()}
    return alone, {(a, b): covariance(kernel, kinds[a][0], kinds[b][1]) for a in kinds for b in kinds}, kernel(X)


@settings(max_examples=8)
@given(seed=st.integers(0, 999), lengthscale=st.floats(0.3, 2.0), sharpness=st.floats(1.0, 6.0))
def test_bounds_are_below_the_evidence_for_every_pair_of_blocks(seed, lengthscale, sharpness, float64):
    X, y = data(seed)
    rng = np.random.default_rng(seed)
    Z, O, z = rng.normal(size=(4, 2)), rng.normal(size=(3, 2)), rng.normal(size=(7, 3))
    kernel = ZonalRBF(lengthscale, variance=0.8, weight_variance=np.array([1.5, 0.5]), bias_variance=0.7)
    alone, between, K_ff = jax.tree.map(np.asarray, covariances_of_pairs(kernel, Z, O, z, sharpness, X))
    exact = oracles.log_normal(y, K_ff + NOISE * np.eye(len(y)))
    assert len(between) == 9
    for (a, b), K_ab in between.items():
        (K_a, K_af), (K_b, K_bf) = alone[a][0], alone[b][1]
        K_uu = np.block([[K_a, K_ab], [K_ab.T, K_b]])
        assert np.min(np.linalg.eigvalsh(K_uu)) > -1e-10
        K_uu = K_uu + 1e-10 * np.eye(len(K_uu))
        joint = oracles.Joint((len(K_a), len(K_b)), K_uu, np.concatenate([K_af, K_bf]), K_ff)
        assert np.min(np.linalg.eigvalsh(joint.residual())) > -1e-7
        prior, tight = (joint.bound(y, NOISE, [True, True], conditional) for conditional in ("prior", "tight"))
        first = oracles.Joint((len(K_a),), K_a + 1e-10 * np.eye(len(K_a)), K_af, K_ff).bound(y, NOISE, [True])
        assert first - 1e-6 <= prior <= tight + 1e-9 <= exact + 1e-6, (a, b)


@pytest.mark.parametrize("last", ["dense"])
def test_minibatches_of_the_component_average_to_the_collapsed_bound(last, float64):
    X, y = data(4)
    rng = np.random.default_rng(0)
    kernel = ZonalArcCosine(1, weight_variance=0.8)
    units = Activations(rng.normal(size=(4, 3)), Softplus(), (1, 2, 4))
    blocks, kinds = [SphericalHarmonics((0, 1), 3), units, rng.normal(size=(3, 2))], ("dense", "dense", last)
    gp = npgp.SparseGP("f", kernel, blocks, kinds)

    def model(X, y=None):
        f = gp.draw()
        with npgp.plate("data", 12, rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    @jax.jit
    def optimum(X, y):
        collapsed = CollapsedGP(kernel, X, blocks, noise_variance=NOISE, covariances=kinds)
        return collapsed.log_prob(y), gp.params(collapsed.condition(y).q)

    bound, params = optimum(X, y)
    batches = X.reshape(3, 4, 2), y.reshape(3, 4)
    elbo = models.compiled(jax.vmap(models.make_elbo(model), (None, None, 0, 0)))

    def at(params):
        values = elbo(jax.random.key(3), params, *batches)
        assert np.ptp(values) > 0.1  # one batch is not the other
        return np.mean(values)

    np.testing.assert_allclose(at(params), bound, rtol=1e-9)
    # Less than at the optimum anywhere else.
    assert at({name: value + 0.1 for name, value in params.items()}) < bound - 0.1


def test_classification_is_bounded_by_the_evidence(float64):
    X, y = np.array([[-0.9], [0.2], [1.1]]), np.array([0.0, 1.0, 1.0])
    kernel, z = ZonalMatern52(0.8), np.array([[1.0, 0.4], [-0.7, 1.0], [0.1, 1.0]])

    def model(X, y=None):
        f = npgp.SparseGP("f", kernel, [Activations(z, Softplus(), range(5)), X[:1]]).draw()
        npgp.observe("y", f(X), npgp.Bernoulli("probit"), obs=y)

    _, losses = models.train(model, npgp.AutoSparseGP(model), 150, X, y)
    # The evidence by Gauss and Hermite's rule in the three directions of f.
    L = np.linalg.cholesky(jax.jit(kernel)(X))
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    grid, mass = (np.stack(np.meshgrid(*[a] * 3), -1).reshape(-1, 3) for a in (nodes, weights / np.sum(weights)))
    evidence = np.log(np.prod(mass, -1) @ np.prod(special.ndtr((2 * y - 1) * (grid @ L.T)), -1))
    assert evidence - 0.1 < -losses[-1] < evidence
    assert losses[0] > losses[-1] + 1.0


def test_whitened_features_are_the_functionals_of_f_that_they_name(float64):
    # On the circle (d = 2) f = ‖x̃‖ g(x̃/‖x̃‖), and features are integrals of g against explicit functions: harmonics over
    # √λ_ℓ, and Σ_ℓ ς_ℓ/λ_ℓ 2 cos ℓ(θ − θ_m) for activations. So ε = L⁻¹u is a linear map of g on a fine grid.
    kernel, levels = ZonalRBF(0.6, variance=1.4, bias_variance=0.5), (0, 1, 2, 4)
    theta, directions = 2 * np.pi * np.arange(64) / 64, np.array([0.3, 1.1, 2.0, 4.0])
    nodes = np.column_stack([np.cos(theta), np.sin(theta)])
    z = 2.0 * np.column_stack([np.cos(directions), np.sin(directions)])
    harmonics, units = SphericalHarmonics((0, 2, 3), 2), Activations(z, Softplus(3.0), levels)
    X = np.random.default_rng(0).normal(size=(7, 1))
    scaled = np.column_stack([X, np.full(7, np.sqrt(0.5))])
    norm = np.linalg.norm(scaled, axis=1)

    def covariance_of_g(U, V):
        return 1.4 * np.exp(-0.5 * ((U[:, None] - V) ** 2).sum(-1) / 0.6**2)

    K, at = covariance_of_g(nodes, nodes), np.array(levels)
    eigenvalues = special.ive(np.arange(5), 0.6**-2)
    sigma = np.mean([np.log1p(np.exp(3 * np.cos(theta))) / 3 * np.cos(level * theta) for level in levels], axis=-1)
    waves = np.where(at == 0, 1, 2)[:, None, None] * np.cos(at[:, None, None] * (theta - directions[:, None]))
    phi = np.einsum("l,lmt->mt", sigma / eigenvalues[at], waves)
    phi /= np.sqrt(np.diag(phi @ K @ phi.T))[:, None]

    @jax.jit
    def run(X):
        projector = factorize(kernel, [units, harmonics], 1e-12)
        root = jnp.sqrt(1.4 * np.repeat(eigenvalues[[0, 2, 3]], [1, 2, 2]))[:, None]
        return projector(X).A, projector.whiten([phi, harmonics(jnp.asarray(nodes)) / root / 64])

    A, epsilon = (np.concatenate(parts) for parts in run(X))
    assert np.linalg.norm(A[4:]) > 0.1  # the second block has something left
    np.testing.assert_allclose(epsilon @ K @ epsilon.T, np.eye(9), atol=1e-8)
    np.testing.assert_allclose(epsilon @ covariance_of_g(nodes, scaled / norm[:, None]) * norm, A, atol=1e-8)
    # The same said by draws of g.
    draws = np.linalg.eigh(K)
    g = np.random.default_rng(1).normal(size=(4000, 64)) * np.sqrt(np.maximum(draws[0], 0.0)) @ draws[1].T
    np.testing.assert_allclose(np.cov(g @ epsilon.T, rowvar=False), np.eye(9), atol=5 * np.sqrt(2 / 4000))


def test_gradients_are_finite_differences(float64):
    X, y = data(5)
    rng = np.random.default_rng(1)

    @jax.jit
    @jax.value_and_grad
    def loss(at):
        kernel = ZonalMatern32(
            at["lengthscale"], variance=at["variance"], weight_variance=at["weights"], bias_variance=at["bias"]
        )
        units = Activations(at["directions"], Softplus(at["sharpness"]), range(5))
        projection = factorize(kernel, [SphericalHarmonics((0, 1), 3), units])(X)
        return sum(jnp.sum(jnp.sin(A) * y) for A in projection.A) + jnp.sum(projection.residual_variance() * y)

    at = {
        "lengthscale": np.array(0.8),
        "variance": np.array(1.2),
        "weights": np.array([0.7, 1.5]),
        "bias": np.array(0.6),
        "directions": rng.normal(size=(4, 3)),
        "sharpness": np.array(2.5),
    }
    slopes = loss(at)[1]
    for name, slope in slopes.items():
        direction = rng.normal(size=np.shape(at[name]))
        ends = [float(loss({**at, name: at[name] + h * direction})[0]) for h in (1e-6, -1e-6)]
        expected = (ends[0] - ends[1]) / 2e-6
        assert abs(expected) > 1e-4
        np.testing.assert_allclose(np.sum(np.asarray(slope) * direction), expected, rtol=1e-4, err_msg=name)


@dataclasses.dataclass(frozen=True)
class Silent:
    """Features that do not say that they are independent."""

    block: SphericalHarmonics

    def __getattr__(self, name):
        if name == "gram_diagonal":
            raise AttributeError(name)
        return getattr(self.block, name)


def test_independent_features_need_no_cholesky_factor(float64):
    X, y = data(6)
    harmonics, kernel = SphericalHarmonics((0, 1), 3), ZonalArcCosine(1)
    unwhitened = npgp.SparseGP("f", kernel, [harmonics, X[:2]], whitened=False)

    @jax.jit
    def run(X, y):
        quick, dense = (factorize(kernel, [first, Points(X[:2])], 1e-12) for first in (harmonics, Silent(harmonics)))
        posterior = CollapsedGP(kernel, X, [harmonics, X[:2]], noise_variance=NOISE).condition(y)
        again = unwhitened.posterior(unwhitened.params(posterior.q))  # through factors as matrices
        A = [projector(X).A for projector in (quick, dense)]
        return A, (quick.factors, dense.factors), (posterior.mean(X), again.mean(X)), quick.cholesky[0], quick.jitter

    A, factors, means, L, jitter = run(X, y)
    for pair in (A, factors, means):
        for one, other in zip(*pair, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-9)
    np.testing.assert_array_equal(L, np.ones(4))
    assert jitter[0] == 0


# ---------------------------------------------------------------- levels and errors


def test_levels_are_those_that_leave_least_out(float64):
    X = np.random.default_rng(0).normal(size=(60, 2))
    kernel = ZonalArcCosine(1)
    units = Activations(random_units(2, 12, 3), Softplus())
    choice = choose_levels(kernel, units, X, most=4)
    assert list(choice.left_out) == [0, 1, 2, 4]  # the kernel has no others
    best = min(choice.left_out, key=choice.left_out.get)
    assert choice.block.levels == tuple(level for level in choice.left_out if level <= best)
    blocks = [SphericalHarmonics((0, 1), 3)]
    share = float(jax.jit(lambda X: left_out(kernel, blocks, X))(X))
    # Less than the harmonics of level 0 alone leave, which explain a_0 of every input's variance.
    a = np.asarray(kernel.level_variances((0, 1), 3))
    np.testing.assert_allclose(share, 1 - np.sum(a), atol=1e-6)


def test_blocks_that_add_nothing_are_refused():
    kernel = ZonalMatern32()
    harmonics, units = SphericalHarmonics((0, 1, 2), 3), Activations(np.ones((2, 3)), levels=(0, 1, 2))
    with pytest.raises(ValueError, match=r"have the same spherical harmonics, of levels \[2\]"):
        covariance(kernel, harmonics, SphericalHarmonics((2, 3), 3))
    with pytest.raises(ValueError, match=r"activations have levels \(0, 1, 2\), all harmonics of which are in a block"):
        covariance(kernel, harmonics, units)
    with pytest.raises(
        ValueError, match="SphericalHarmonics features have dimension 4, but the kernel's inputs have 2"
    ):
        SphericalHarmonics((0,), 4).cross(kernel, np.ones((2, 2)))
    with pytest.raises(ValueError, match="Activations features have dimension 3, but the kernel's inputs have 3"):
        units.cross(kernel, np.ones((2, 3)))
    with pytest.raises(TypeError, match="the kernel is RBF, but Activations features need a zonal kernel"):
        units.gram(RBF())
    with pytest.raises(ValueError, match="have none in common; add levels"):
        Activations(np.ones((2, 3)), levels=(3, 5)).gram(ZonalArcCosine(1))
    with pytest.raises(TypeError, match="it must be a function of cosines"):
        Activations(np.ones((2, 3)), 3.0)
    with pytest.raises(ValueError, match="^directions has a row of zeros"):
        Activations(np.array([[1.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match="^directions has shape"):
        Activations(np.ones(3))


def test_whole_functions_cannot_be_drawn_from_spherical_features():
    projector = Projector(ZonalArcCosine(), (SphericalHarmonics((0,), 3),), (jnp.ones(1),), ((),), (0.0,))
    posterior = npgp.variational.Posterior(projector, (DenseNormal(jnp.zeros(1), jnp.eye(1)),))
    with pytest.raises(NotImplementedError, match="SphericalHarmonics features are no points: use Posterior.sample"):
        posterior.draw_functions(jax.random.key(0))


def test_blocks_are_pytrees():
    units = Activations(np.ones((2, 3)), Softplus(2.0), (0, 1))
    assert len(jax.tree.leaves(units)) == 2
    function = functools.partial(jnp.clip, min=0.0)
    assert len(jax.tree.leaves(Activations(np.ones((2, 3)), function))) == 1
    assert jax.tree.leaves(SphericalHarmonics((0, 1), 3)) == []
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), units, dataclasses.replace(units, directions=np.eye(3)[:2]))
    grams = jax.jit(jax.vmap(lambda block: block.gram(ZonalArcCosine())))(batch)
    assert grams.shape == (2, 2, 2)
    np.testing.assert_allclose(grams[0], 1.0, rtol=1e-5)  # the same direction twice
    assert grams[1, 0, 1] < 0.9


# ---------------------------------------------------------------- a block of one's own


@pytree
@dataclasses.dataclass(frozen=True)
class Means:
    """The means of f over sets of points, (M, K, D), written by what the protocol says."""

    points: jax.Array

    @property
    def size(self):
        return self.points.shape[0]

    def gram(self, kernel):
        return jnp.mean(jax.vmap(lambda Z: self.cross(kernel, Z))(self.points), axis=-1)

    def cross(self, kernel, X):
        return jnp.mean(jax.vmap(lambda Z: kernel(Z, X))(self.points), axis=1)

    def cross_features(self, kernel, other):
        return jnp.mean(jax.vmap(lambda Z: other.cross(kernel, Z))(self.points), axis=-1)


def test_a_block_from_outside_goes_with_every_other_before_and_after_it(float64):
    rng = np.random.default_rng(5)
    kernel = ZonalMatern32(0.8)
    means = Means(jnp.asarray(rng.normal(size=(3, 4, 2))))
    others = (
        Points(rng.normal(size=(5, 2))),
        SphericalHarmonics((0, 1), 3),
        Activations(rng.normal(size=(4, 3)), Softplus(), (0, 1, 2)),
        Means(jnp.asarray(rng.normal(size=(2, 3, 2)))),
    )
    everywhere = Points(means.points.reshape(-1, 2))
    weights = np.kron(np.eye(3), np.full(4, 0.25))

    @jax.jit
    def computed():
        explained = [
            jnp.sum(jnp.stack([jnp.square(A).sum(0) for A in factorize(kernel, blocks, 1e-10)(everywhere.inputs).A]), 0)
            for other in others
            for blocks in ((means, other), (other, means))
        ]
        pairs = [(covariance(kernel, means, other), covariance(kernel, other, means)) for other in others]
        crosses = [other.cross(kernel, everywhere.inputs) for other in others]
        grams = means.gram(kernel), everywhere.gram(kernel)
        return grams, pairs, crosses, explained, kernel.diag(everywhere.inputs)

    (gram, everywhere_gram), pairs, crosses, explained, prior = computed()
    np.testing.assert_allclose(gram, weights @ everywhere_gram @ weights.T, atol=1e-12)
    for (before, after), cross in zip(pairs, crosses, strict=True):
        expected = weights @ np.asarray(cross).T
        np.testing.assert_allclose(before, expected, atol=1e-12)
        np.testing.assert_allclose(after, expected.T, atol=1e-12)
    for share in explained:
        assert np.all(share <= prior + 1e-9)
