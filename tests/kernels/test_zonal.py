"""Zonal kernels and their coefficients on the sphere, against scipy's quadrature and special functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from scipy import integrate, special

from npgp.features import LeakyReLU, Probit, ReLU, Softplus
from npgp.kernels import RBF, ZonalArcCosine, ZonalMatern12, ZonalMatern32, ZonalMatern52, ZonalRBF, gegenbauer
from npgp.kernels.zonal import Zonal, as_zonal

DIMENSIONS = (2, 5, 64)
LEVELS = tuple(range(8))
LENGTHSCALE, SLOPE, SHARPNESS = 0.6, 0.3, 4.0


def zonal(name, lengthscale):
    """A kernel, or a shape of activations, by name."""
    return {
        "ZonalRBF": lambda: ZonalRBF(lengthscale),
        "ZonalMatern12": lambda: ZonalMatern12(lengthscale),
        "ZonalMatern32": lambda: ZonalMatern32(lengthscale),
        "ZonalMatern52": lambda: ZonalMatern52(lengthscale),
        "ZonalArcCosine 0": lambda: ZonalArcCosine(0, degree=0),
        "ZonalArcCosine 1": lambda: ZonalArcCosine(1),
    }[name]()


#: Of the angle θ, written anew.
KERNELS = {
    "ZonalRBF": lambda r, theta: np.exp(-0.5 * r**2),
    "ZonalMatern12": lambda r, theta: np.exp(-r),
    "ZonalMatern32": lambda r, theta: (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r),
    "ZonalMatern52": lambda r, theta: (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r),
    "ZonalArcCosine 0": lambda r, theta: (np.pi - theta) / np.pi,
    "ZonalArcCosine 1": lambda r, theta: (np.sin(theta) + (np.pi - theta) * np.cos(theta)) / np.pi,
}
SHAPES = {
    "ReLU": (ReLU(), lambda t: np.maximum(t, 0)),
    "LeakyReLU": (LeakyReLU(SLOPE), lambda t: np.where(t > 0, t, SLOPE * t)),
    "Softplus": (Softplus(SHARPNESS), lambda t: np.log1p(np.exp(SHARPNESS * t)) / SHARPNESS),
    "Probit": (Probit(SHARPNESS), lambda t: 0.5 + 0.5 * special.erf(SHARPNESS * t / np.sqrt(2))),
    "function": (lambda t: jnp.where(t > 0, t**2, 0.5), lambda t: np.where(t > 0, t**2, 0.5)),
}


def legendre(d, level, t):
    if d == 2:
        return special.eval_chebyt(level, t)
    return special.eval_gegenbauer(level, d / 2 - 1, t) / special.eval_gegenbauer(level, d / 2 - 1, 1.0)


@functools.cache
def independent():
    """λ and ς of everything at all dimensions, by scipy's adaptive quadrature in the angle."""

    def integrand(theta):
        r, t = 2 * np.sin(theta / 2) / LENGTHSCALE, np.cos(theta)
        values = [f(r, theta) for f in KERNELS.values()] + [f(t) for _, f in SHAPES.values()]
        weighted = [[legendre(d, level, t) * np.sin(theta) ** (d - 2) for level in LEVELS] for d in DIMENSIONS]
        return np.multiply.outer(np.array(values), np.array(weighted))

    whole = [
        integrate.quad_vec(integrand, *ends, epsabs=1e-13, epsrel=1e-13)[0]
        for ends in ((0, np.pi / 2), (np.pi / 2, np.pi))
    ]
    mass = np.array([special.beta((d - 1) / 2, 0.5) for d in DIMENSIONS])
    return dict(zip([*KERNELS, *SHAPES], sum(whole) / mass[:, None], strict=True))


@jax.jit
def computed(lengthscale):
    """λ of every kernel, by its own formula and by quadrature, and its derivative; ς of every shape."""

    def eigenvalues(lengthscale):
        kernels = {name: zonal(name, lengthscale) for name in KERNELS}
        own = {name: jnp.stack([k.eigenvalues(LEVELS, d) for d in DIMENSIONS]) for name, k in kernels.items()}
        by_quadrature = {
            name: jnp.stack([Zonal.level_variances(kernels[name], LEVELS, d) for d in DIMENSIONS])
            for name in ("ZonalMatern12", "ZonalArcCosine 1")
        }
        return own, by_quadrature

    (own, by_quadrature), (slope, _) = jax.jvp(eigenvalues, (lengthscale,), (jnp.ones_like(lengthscale),))
    shapes = {}
    for name, (shape, _) in SHAPES.items():
        given = [gegenbauer.coefficients(shape, d, LEVELS) / gegenbauer.multiplicities(d, LEVELS) for d in DIMENSIONS]
        closed = [
            shape.coefficients(d, LEVELS) / gegenbauer.multiplicities(d, LEVELS)
            for d in DIMENSIONS
            if hasattr(shape, "coefficients")
        ]
        shapes[name] = jnp.stack(given), jnp.stack(closed or given)
    return own, by_quadrature, slope, shapes


def evaluated(dtype, lengthscale=LENGTHSCALE):
    return jax.tree.map(lambda a: np.asarray(a, float), computed(jnp.asarray(lengthscale, dtype)))


def test_coefficients_agree_with_independent_quadrature(x64):
    own, by_quadrature, _, shapes = evaluated(x64)
    N = np.array([gegenbauer.multiplicities(d, LEVELS) for d in DIMENSIONS])
    tolerance = {jnp.float32: 1e-6, jnp.float64: 1e-12}[x64]
    for name in KERNELS:
        np.testing.assert_allclose(own[name], independent()[name], rtol=0, atol=tolerance)
    # What a kernel of one's own would have, by quadrature, is good to the rounding of a level's harmonics together.
    for name, a in by_quadrature.items():
        assert np.all(a >= 0)
        assert np.all(np.abs(a - N * own[name]) < 50 * tolerance * np.sqrt(N))
    for name, both in shapes.items():
        for s in both:
            np.testing.assert_allclose(s, independent()[name], rtol=0, atol=tolerance)


def test_small_coefficients_have_all_their_digits(x64):
    lengthscale = 2.0
    own = evaluated(x64, lengthscale)[0]
    rtol = {jnp.float32: 1e-5, jnp.float64: 1e-11}[x64]
    z = lengthscale**-2.0
    for i, d in enumerate(DIMENSIONS):
        alpha = (d - 2) / 2
        bessel = np.array([special.ive(level + alpha, z) for level in LEVELS])
        exact = bessel * np.exp(special.gammaln(alpha + 1) + alpha * np.log(2 / z))
        assert exact[-1] < 1e-10
        np.testing.assert_allclose(own["ZonalRBF"][i], exact, rtol=rtol)


def test_precision_does_not_depend_on_the_lengthscale(float64):
    # Against float32: one of them would be far off if terms canceled.
    for lengthscale in (0.05, 0.3, 3.0, 30.0):
        double = evaluated(jnp.float64, lengthscale)[0]
        with jax.enable_x64(False):
            single = evaluated(jnp.float32, lengthscale)[0]
        for name in KERNELS:
            seen = double[name] > 1e-36
            np.testing.assert_allclose(single[name][seen], double[name][seen], rtol=3e-5)


def test_derivatives_are_finite_differences(float64):
    _, _, slope, _ = evaluated(float64)
    h = 1e-5
    ends = [evaluated(float64, LENGTHSCALE + s * h)[0] for s in (1, -1)]
    for name in KERNELS:
        np.testing.assert_allclose(slope[name], (ends[0][name] - ends[1][name]) / (2 * h), rtol=1e-6, atol=1e-9)
    assert np.max(np.abs(slope["ZonalMatern32"])) > 0.1


def test_arc_cosine_lacks_levels():
    for order, absent in ((0, (2, 4, 6)), (1, (3, 5, 7))):
        a = np.asarray(ZonalArcCosine(order).level_variances(LEVELS, 5))
        np.testing.assert_array_equal(np.flatnonzero(a == 0), absent)


#: 2ν of the Matérn kernel that is as rough.
ROUGHNESS = {"ZonalMatern12": 1, "ZonalMatern32": 3, "ZonalMatern52": 5, "ZonalArcCosine 0": 1, "ZonalArcCosine 1": 3}


@pytest.mark.parametrize("name", KERNELS)
def test_series_reconstructs_the_kernel_at_the_rate_of_its_smoothness(name, float64):
    d, theta = 3, np.linspace(0.0, np.pi, 41)
    exact = KERNELS[name](2 * np.sin(theta / 2) / LENGTHSCALE, theta)
    levels = tuple(range(41))
    a = np.asarray(zonal(name, LENGTHSCALE).level_variances(levels, d))
    P = np.array([legendre(d, level, np.cos(theta)) for level in levels])
    errors = {L: np.max(np.abs(exact - a[: L + 1] @ P[: L + 1])) for L in (5, 10, 20, 40)}
    assert errors[5] > errors[10] > 1.5 * errors[20] or errors[10] < 1e-13
    # All terms are positive, so that the error is the variance that is left out.
    np.testing.assert_allclose(errors[40], 1 - np.sum(a), atol=1e-13)
    if name in ROUGHNESS:
        # Of a power of the level, which it is at levels far above: below by .04, .13 to .15 and .24.
        np.testing.assert_allclose(np.log2(errors[20] / errors[40]), ROUGHNESS[name], rtol=0.06)
    else:
        assert errors[20] < 1e-12


def test_series_of_polynomials(x64):
    t = np.linspace(-1, 1, 30)
    levels, c = (0, 2, 3, 7), np.array([0.3, -0.5, 0.7, 1.1])
    for d in DIMENSIONS:
        expected = sum(c_l * legendre(d, level, t) for c_l, level in zip(c, levels, strict=True))
        value = jax.jit(functools.partial(gegenbauer.series, dimension=d, levels=levels))(
            jnp.asarray(c, x64), t=jnp.asarray(t, x64)
        )
        np.testing.assert_allclose(value, expected, atol={jnp.float32: 2e-6, jnp.float64: 1e-13}[x64])


# ---------------------------------------------------------------- kernels


OPTIONS = {"variance": 1.3, "weight_variance": (0.5, 1.0, 2.0), "bias_variance": 0.7}


@jax.jit
def matrices(X, X2):
    options = OPTIONS | {"weight_variance": jnp.asarray(OPTIONS["weight_variance"])}
    made = {
        "arc-cosine 0": ZonalArcCosine(0, degree=0, **options),
        "arc-cosine 1": ZonalArcCosine(1, **options),
        "RBF": 2.0 * ZonalRBF(0.8, degree=2, **options),
        "columns": ZonalMatern32(0.8, active_dims=(0, 2), weight_variance=jnp.asarray((0.5, 2.0))),
    }
    return {name: (k(X, X2), k(X), k.diag(X)) for name, k in made.items()}


def test_kernels_are_their_formulas(x64):
    rng = np.random.default_rng(0)
    X, X2 = rng.normal(size=(5, 3)), rng.normal(size=(4, 3))
    made = jax.tree.map(np.asarray, matrices(X.astype(x64), X2.astype(x64)))
    rtol = {jnp.float32: 2e-5, jnp.float64: 1e-9}[x64]
    for cross, whole, diagonal in made.values():
        assert cross.dtype == whole.dtype == diagonal.dtype == x64
        np.testing.assert_allclose(diagonal, np.diag(whole), rtol=rtol)
    for order in (0, 1):
        expected = oracles.arc_cosine(X, X2, order, *OPTIONS.values())
        np.testing.assert_allclose(made[f"arc-cosine {order}"][0], expected, rtol=rtol)

    def polar(X, weights=(0.5, 1.0, 2.0), bias=0.7):
        X = np.column_stack([X * np.sqrt(weights), np.full(len(X), np.sqrt(bias))])
        norm = np.linalg.norm(X, axis=1)
        return norm, X / norm[:, None]

    (r, U), (r2, U2) = polar(X), polar(X2)
    expected = 2.6 * np.outer(r**2, r2**2) * oracles.stationary("RBF", U, U2, 0.8)
    np.testing.assert_allclose(made["RBF"][0], expected, rtol=rtol)
    (r, U), (r2, U2) = (polar(x[:, [0, 2]], (0.5, 2.0), 1.0) for x in (X, X2))
    expected = np.outer(r, r2) * oracles.stationary("Matern32", U, U2, 0.8)
    np.testing.assert_allclose(made["columns"][0], expected, rtol=rtol)


def test_random_features_average_to_the_kernel(float64):
    X, count = np.random.default_rng(0).normal(size=(6, 3)), 1000
    options = OPTIONS | {"weight_variance": np.array(OPTIONS["weight_variance"])}

    @jax.jit
    def estimates(X):
        made = {
            "arc-cosine 0": ZonalArcCosine(0, degree=0, **options),
            "arc-cosine 1": ZonalArcCosine(1, degree=2, **options),
            "RBF": 2.0 * ZonalRBF(0.4, **options),
            "columns": ZonalMatern32(0.8, active_dims=(0, 2)),
        }
        draws = {name: k.feature_draws(jax.random.key(0), 3, count)(X) for name, k in made.items()}
        features = made["RBF"].random_features(jax.random.key(0), 3, count)(X)
        products = {name: jnp.einsum("ncp,mcp->nmc", psi, psi) for name, psi in draws.items()}
        return {name: k(X) for name, k in made.items()}, products, features @ features.T

    exact, products, together = jax.tree.map(np.asarray, estimates(X))
    for name, each in products.items():
        error = np.std(each, -1) / np.sqrt(count)
        assert np.max(error) < 0.2 * np.max(exact[name])
        assert np.all(np.abs(np.mean(each, -1) - exact[name]) <= 5 * error + 1e-10), name
    np.testing.assert_allclose(together, np.mean(products["RBF"], -1), rtol=1e-10, atol=1e-12)


class Featureless(ZonalRBF):
    angular_draws = Zonal.angular_draws


def test_kernels_of_ones_own_may_have_no_random_features():
    with pytest.raises(NotImplementedError, match="Featureless has no random features; a zonal kernel of one's own"):
        Featureless().random_features(jax.random.key(0), 3, 4)


def test_what_is_refused():
    with pytest.raises(ValueError, match="order is 2; it must be 0 or 1"):
        ZonalArcCosine(2)
    with pytest.raises(ValueError, match="degree is 3"):
        ZonalRBF(degree=3)
    with pytest.raises(ValueError, match=r"lengthscale has shape \(2,\); it must be a scalar"):
        ZonalRBF(jnp.ones(2))
    with pytest.raises(ValueError, match="ZonalMatern12 lengthscale is -1"):
        ZonalMatern12(-1.0)
    with pytest.raises(ValueError, match="weight_variance has shape"):
        ZonalRBF(weight_variance=jnp.ones(2)).diag(jnp.ones((4, 3)))
    with pytest.raises(TypeError, match="the kernel is RBF, but Activations features need a zonal kernel"):
        as_zonal(2.0 * RBF(), "Activations")
    with pytest.raises(ValueError, match="gave shape"):
        gegenbauer.coefficients(jnp.sum, 3, (0, 1))


def test_number_of_harmonics():
    assert [gegenbauer.multiplicity(2, level) for level in range(4)] == [1, 2, 2, 2]
    assert [gegenbauer.multiplicity(3, level) for level in range(4)] == [1, 3, 5, 7]
    assert gegenbauer.multiplicity(64, 3) == 45_696
    for d in (4, 9, 33):  # homogeneous polynomials of degree ℓ are harmonics times powers of the norm
        for level in range(6):
            together = sum(gegenbauer.multiplicity(d, i) for i in range(level, -1, -2))
            assert together == special.comb(level + d - 1, level, exact=True)
