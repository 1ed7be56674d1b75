"""Kernels on spheres at close rows, in programs compiled as users compile them: values and two derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hyperdual import STATIONARY, Hyperdual, arc_cosine

from npgp import kernels

LENGTHSCALE = 0.7


def _zonal(name, degree):
    def make(lengthscale, **given):
        return getattr(kernels, f"Zonal{name}")(lengthscale, degree=degree, **given)

    def correlation(chord2, lengthscale):
        q = chord2 * lengthscale.power(-2)
        return q.through(*STATIONARY[name](q.parts[0]))

    return make, correlation, degree


def _arc_cosine(order, degree=None):
    def make(lengthscale, **given):
        return (
            kernels.ArcCosine(order, **given) if zonal is None else kernels.ZonalArcCosine(order, degree=zonal, **given)
        )

    zonal, power = degree, order if degree is None else degree
    return make, lambda chord2, _: chord2.through(*arc_cosine(order, chord2.parts[0])), power


#: How npgp makes it from a lengthscale, its correlation by the oracle, and the power of the norms.
KERNELS = {
    "ZonalRBF": _zonal("RBF", 1),
    "ZonalMatern12": _zonal("Matern12", 0),
    "ZonalMatern32": _zonal("Matern32", 1),
    "ZonalMatern52": _zonal("Matern52", 2),
    "ZonalArcCosine 0": _arc_cosine(0, 0),
    "ZonalArcCosine 1": _arc_cosine(1, 1),
    "ArcCosine 0": _arc_cosine(0),
    "ArcCosine 1": _arc_cosine(1),
    "ArcCosine 2": _arc_cosine(2),
}
KINKS = ("ZonalMatern12", "ZonalArcCosine 0", "ArcCosine 0")
#: Arguments of a kernel, in the order of the numbers below.
HYPERPARAMETERS = ("lengthscale", "variance", "weight_variance", "bias_variance")


def inputs(dtype, columns, offset):
    """Rows of which some are at points, or 1e-16 to 1e-3 from them, as far as ``dtype`` tells these apart."""
    rng = np.random.default_rng(columns)
    Z = offset + rng.normal(size=(5, columns))
    if not offset:
        Z[0] = 0.0
    steps = np.array([0.0, *10.0 ** np.arange(-16, -2)])
    near = Z[np.arange(len(steps)) % 2] + steps[:, None] * rng.choice([-1.0, 1.0], (len(steps), columns))
    X = np.vstack([near, offset + rng.normal(size=(4, columns))]).astype(dtype)
    hyperparameters = (LENGTHSCALE, 1.3, rng.uniform(0.5, 2.0, columns), 0.8)
    return X, Z.astype(dtype), *(np.asarray(value, dtype) for value in hyperparameters)


def program(names):
    """Of every kernel: the matrix, the gradient of a weighted sum of it, and how that moves along a direction."""

    def one(name, weights, primals, tangents):
        def loss(X, Z, *hyperparameters):
            given = dict(zip(HYPERPARAMETERS, hyperparameters, strict=True))
            K = KERNELS[name][0](given.pop("lengthscale"), **given)(X, Z)
            return jnp.sum(weights * K), K

        gradient = jax.grad(loss, argnums=tuple(range(6)), has_aux=True)
        first, second, K = jax.jvp(gradient, primals, tangents, has_aux=True)
        return K, first, second

    return lambda weights, *a: {name: one(name, weights[name], *a) for name in names}


def oracle(name, primals, along, tangents):
    """The matrix, with derivatives along both, and the chord and a size of each: norms moved, relative to the norms."""
    X, Z, lengthscale, variance, weight, bias = (
        Hyperdual(p, a, b) for p, a, b in zip(primals, along, tangents, strict=True)
    )
    root = weight.power(0.5)

    def rows(A):
        weighted = A * root
        square = (weighted * weighted).sum(-1) + bias
        return weighted * square.power(-0.5)[:, None], bias.power(0.5) * square.power(-0.5), square

    (U, u0, n2), (V, v0, m2) = rows(X), rows(Z)
    difference, first = U[:, None] - V[None], u0[:, None] - v0[None]
    chord2 = (difference * difference).sum(-1) + first * first
    K = variance * n2.power(KERNELS[name][2] / 2)[:, None] * m2.power(KERNELS[name][2] / 2)[None]
    size = K.parts[0]
    K = K * KERNELS[name][1](chord2, lengthscale)

    def moved(i):
        def of(A, square):
            root_ = np.sqrt(weight.parts[0])
            change = A.parts[i] * root_ + A.parts[0] * weight.parts[i] / (2 * root_)
            change2 = np.sum(change**2, -1) + bias.parts[i] ** 2 / (4 * bias.parts[0])
            return np.sqrt(change2 / square.parts[0])

        hyper = abs(variance.parts[i] / variance.parts[0]) + abs(lengthscale.parts[i] / lengthscale.parts[0])
        return of(X, n2)[:, None] + of(Z, m2) + hyper

    return K.parts, np.sqrt(chord2.parts[0]), size, moved(1), moved(2)


def check(made, name, weights, primals, tangents, eps):
    """
    Points of the sphere are rounded by eps, and move by eps of how far their rows move in units of their norm: that is
    what is allowed, times the kernel's scale. A kink makes 1/chord of it in each derivative.
    """
    C = np.asarray(weights, np.longdouble)
    K, first, second = made
    for i, (g, h) in enumerate(zip(first, second, strict=True)):
        zero = [np.zeros_like(p) for p in primals]
        along = [*zero[:i], np.asarray(tangents[i]), *zero[i + 1 :]]
        (value, d1, _, d2), chord, size, moved, moved2 = oracle(name, primals, along, tangents)
        sharp = 1 + 1 / np.maximum(chord, 1e-30) if name in KINKS else 1.0
        if i == 0:
            tolerance = 60 * eps * size
            assert np.all(np.abs(K - value) <= tolerance), (name, float(np.max(np.abs(K - value) / tolerance)))
        axis = {0: 1, 1: 0}.get(i, (0, 1))
        for computed, terms, slack, what in (
            (g, d1, size * moved * sharp, "first"),
            (h, d2, size * moved * moved2 * sharp**2, "second"),
        ):
            # Of X and Z each row's part of the gradient, along its direction; of a hyperparameter all of it.
            made_ = np.sum(np.asarray(computed, np.longdouble) * tangents[i], axis=-1 if i < 2 else None)
            wanted, allowed = np.sum(C * terms, axis), 100 * eps * np.sum(np.abs(C) * slack, axis)
            error = np.abs(made_ - wanted)
            assert np.all(error <= allowed + 1e-35), (name, i, what, float(np.max(error / allowed)))


@functools.cache
def compiled(names):
    return jax.jit(program(names))


def given(x64, columns, offset, names):
    rng, eps = np.random.default_rng(0), float(jnp.finfo(x64).eps)
    primals = inputs(x64, columns, offset)
    tangents = tuple(np.asarray(rng.normal(size=np.shape(a)), x64) for a in primals)
    tangents = (*tangents[:3], *(0.1 * t for t in tangents[3:]))
    C = rng.normal(size=(len(primals[0]), len(primals[1])))
    weights = dict.fromkeys(names, C)
    for name in set(KINKS) & set(names):  # at the kink, and where rounding hides which side of it, there is no slope
        chord = oracle(name, primals, [0.0] * 6, [0.0] * 6)[1]
        weights[name] = np.where(chord < 200 * eps, 0.0, C)
    return {name: w.astype(x64) for name, w in weights.items()}, primals, tangents, eps


#: With a bias, points have a column more: 2, 3, 10 and 11, of which slopes are by differences, by differences of kinks
#: only, or by products (npgp/kernels/stationary.py).
#: Each kernel once, most in single precision, of which rounding hides most.
LOOKED_AT = {
    (1, False): ("ZonalRBF", "ZonalMatern12", "ArcCosine 1"),
    (1, True): ("ArcCosine 0",),
    (2, True): ("ZonalMatern32",),
    (9, False): ("ZonalArcCosine 1",),
    (10, False): ("ZonalMatern52", "ZonalArcCosine 0", "ArcCosine 2"),
}


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("columns, x64", LOOKED_AT, indirect=["x64"])
def test_values_and_derivatives_of_close_rows_on_the_sphere(columns, offset, x64):
    names = LOOKED_AT[columns, x64 == jnp.float64]
    weights, primals, tangents, eps = given(x64, columns, offset, names)
    made = jax.tree.map(np.asarray, compiled(names)(weights, primals, tangents))
    for name, computed in made.items():
        check(computed, name, weights[name], primals, tangents, eps)
