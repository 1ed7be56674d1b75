"""Kernels: hyperparameters that are none, and values and gradients where distances are hard to compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problem as p
from judge import attempt, finite, mistakes, same

import npgp
from npgp import kernels as k

HYPERPARAMETERS: dict[str, Any] = {
    "zero": 0.0,
    "negative": -1.0,
    "NaN": np.nan,
    "infinity": np.inf,
    "None": None,
    "a string": "1.0",
    "complex": 1.0 + 1.0j,
    "a dictionary": {"l": 1.0},
    "another number of columns": np.ones(3, np.float32),
    "a matrix": np.ones((1, 1), np.float32),
    "a list with a negative one": [1.0, -1.0],
    "empty": np.zeros(0, np.float32),
    "a distribution": None,
}


def _hyperparameter(what: str) -> Any:
    import numpyro.distributions as dist

    return dist.LogNormal(0.0, 1.0) if what == "a distribution" else HYPERPARAMETERS[what]


@attempt("error", "lengthscale", cases=HYPERPARAMETERS.keys())
def test_wrong_lengthscale(what: str) -> Any:
    return npgp.Matern32(_hyperparameter(what))(p.x(np.hstack([p.X, p.X])))


@attempt("error", "variance", cases=[w for w in HYPERPARAMETERS if w not in ("a matrix", "empty")])
def test_wrong_variance(what: str) -> Any:
    return npgp.Matern32(1.0, variance=_hyperparameter(what))(p.x())


@attempt("either", "lengthscale", cases=("list", "tuple", "numpy", "whole numbers", "float64 scalar"))
def test_odd_lengthscale(what: str) -> Any:
    X = np.hstack([p.X, 2.0 * p.X])
    value = {
        "list": [0.9, 2.0],
        "tuple": (0.9, 2.0),
        "numpy": np.array([0.9, 2.0]),
        "whole numbers": np.array([1, 2]),
        "float64 scalar": np.float64(0.9),
    }[what]
    expected = p.gram(X, lengthscale=np.asarray(value, float), variance=1.0)
    return same(npgp.RBF(value)(p.x(X)), expected)


@attempt("error", "variance", cases=("RBF", "Linear", "Constant", "White", "Matern52", "ZonalRBF"))
def test_a_bare_number_whose_meaning_must_be_guessed(name: str) -> Any:
    return getattr(k, name)(1.0, 2.0) if name in ("RBF", "Matern52", "ZonalRBF") else getattr(k, name)(2.0)


MISTAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    "a column that is not there": ("active_dims", lambda: npgp.RBF(active_dims=(1,))(p.x())),
    "columns as a list": ("active_dims", lambda: npgp.RBF(active_dims=[0])(p.x())),
    "a column as a number": ("active_dims", lambda: npgp.RBF(active_dims=0)(p.x())),
    "no columns": ("active_dims", lambda: npgp.RBF(active_dims=())(p.x())),
    "scaling by a negative number": ("scale", lambda: (-2.0 * npgp.RBF())(p.x())),
    "a degree of one half": ("degree", lambda: k.Polynomial(0.5)(p.x())),
    "a negative degree": ("degree", lambda: k.Polynomial(-1)(p.x())),
    "arc-cosine of order 7": ("order", lambda: k.ArcCosine(7)(p.x())),
    "a period of zero": ("period", lambda: k.Periodic(0.0)(p.x())),
    "a negative alpha": ("alpha", lambda: k.RationalQuadratic(1.0, alpha=-1.0)(p.x())),
    "other columns": ("columns", lambda: npgp.RBF()(p.x(), p.x(np.ones((3, 2))))),
    "a class for a kernel": ("kernel", lambda: npgp.SparseGP("f", npgp.RBF, p.x(p.Z))),
    "a function for a kernel": ("kernel", lambda: npgp.SparseGP("f", lambda a, b: 1.0, p.x(p.Z))),
    "a string for a kernel": ("kernel", lambda: npgp.CollapsedGP("rbf", p.x(), p.x(p.Z), noise_variance=0.1)),
    "None for a kernel": (
        "kernel",
        lambda: npgp.collapsed.exact_log_evidence(None, p.x(), p.x(p.Y), noise_variance=0.1),
    ),
    "outputs that W has not": (
        "output, outputs, column, W",
        lambda: k.Coregion(npgp.RBF(), np.ones((2, 1), np.float32))(p.x(np.array([[0.5, 5.0]]))),
    ),
    "W of one axis": ("W", lambda: k.Coregion(npgp.RBF(), np.ones(3, np.float32))),
    "features of no draws": ("count", lambda: npgp.RBF().random_features(p.key(), 1, 0)),
}


@mistakes(MISTAKES)
def test_wrong_kernel(make: Callable[[], Any]) -> Any:
    return make()


@attempt("error", "kernel, number", cases={"a sum": lambda: npgp.RBF() + 1.0, "a power": lambda: npgp.RBF() ** 2})
def test_kernel_and_a_number(make: Callable[[], Any]) -> Any:
    return make()


# ---------------------------------------------------------------------------------------------------------------
# Values and gradients

STATIONARY = ("RBF", "Matern12", "Matern32", "Matern52", "RationalQuadratic")


def _distance_derivative(name: str, r: np.ndarray) -> np.ndarray:
    """The correlation's derivative."""
    root3, root5 = np.sqrt(3), np.sqrt(5)
    return {
        "RBF": lambda: -r * np.exp(-(r**2) / 2),
        "Matern12": lambda: -np.exp(-r),
        "Matern32": lambda: -3 * r * np.exp(-root3 * r),
        "Matern52": lambda: -5 / 3 * r * (1 + root5 * r) * np.exp(-root5 * r),
        "RationalQuadratic": lambda: -r / (1 + r**2 / 2) ** 2,
    }[name]()


@attempt("answer", cases=STATIONARY, x64=None)
def test_values_at_and_near_points(name: str) -> Any:
    dtype = jnp.result_type(float)
    Z = np.linspace(0.0, 60.0, 25).astype(dtype)[:, None]
    X = np.concatenate([Z, np.nextafter(Z, 99, dtype=dtype), Z + 1e-6, Z + 1e-3]).astype(dtype)
    found = jax.jit(lambda l: getattr(k, name)(l)(X, Z))(3.0)
    return same(found, p.gram(X, Z, name, 3.0, 1.0), 1e-5 if dtype == jnp.float32 else 1e-12, 2e-6)


@attempt("answer", cases=("Matern12", "RBF"), x64=None)
def test_gradient_of_the_penalty_in_the_lengthscale(name: str) -> Any:
    """Rows within rounding of inducing points, as ``linspace`` makes them: the penalty and its gradient, compiled."""
    dtype = jnp.result_type(float)
    rng = np.random.default_rng(2)
    X = np.sort(np.concatenate([np.linspace(2.4, 57.6, 20), rng.uniform(2.4, 57.6, 20)])).astype(dtype)[:, None]
    Z = np.linspace(2.4, 57.6, 20).astype(dtype)[:, None]

    def penalty(logs):
        kernel = getattr(k, name)(jnp.exp(logs[0]), variance=jnp.exp(logs[1]))
        prior = npgp.CollapsedGP(kernel, X, Z, noise_variance=0.3, conditional="prior")
        sor = npgp.ApproximateGP(kernel, X, Z, noise_variance=0.3, method="dtc")
        y = jnp.zeros(40, dtype)
        return sor.log_prob(y) - prior.log_prob(y)

    def oracle(logs):
        _, D = p.projected(X, Z, name=name, lengthscale=np.exp(logs[0]), variance=np.exp(logs[1]))
        return np.trace(D) / 0.6

    step = jax.jit(jax.value_and_grad(penalty))
    answers = []
    for l in np.log([1.1, 2.3, 4.7]):
        value, gradient = step(jnp.array([l, 0.2], dtype))
        h = 1e-5
        slope = (oracle([l + h, 0.2]) - oracle([l - h, 0.2])) / (2 * h)
        expected = oracle([l, 0.2])
        tolerance = 3e-2 if dtype == jnp.float32 else 1e-4
        scale = tolerance * max(abs(expected), 1.0)
        answers += [
            same(value, expected, 0, scale, "penalty"),
            same(gradient[1], expected, 0, scale, "in log variance"),
            same(gradient[0], slope, 0, scale, "in log lengthscale"),
        ]
    return answers


def _pair_derivatives(kernel: Any, x: Any, z: Any) -> tuple[Any, Any]:
    """First and second derivative of k(x, z) in x, of one column, compiled."""

    def of(a):
        return kernel(a[None, None], z[None, None])[0, 0]

    return jax.jit(jax.grad(of))(x), jax.jit(jax.grad(jax.grad(of)))(x)


@attempt("answer", cases=("RBF", "Matern32", "Matern52"), x64=None)
def test_derivatives_in_inputs_that_coincide(name: str) -> Any:
    """∂k/∂x = 0 and ∂²k/∂x² = ρ''(0)/l² at x = z; Matérn-3/2 has a kink in its third derivative only."""
    curvature = {"RBF": -1.0, "Matern32": -3.0, "Matern52": -5.0 / 3.0}[name]
    first, second = _pair_derivatives(getattr(k, name)(0.5), p.x(1.3), p.x(1.3))
    return same(first, 0.0), same(second, curvature / 0.25)


@attempt("answer", cases=STATIONARY, x64=None)
def test_derivatives_in_inputs_that_are_near(name: str) -> Any:
    dtype = jnp.result_type(float)
    x, z = np.asarray(1.3, dtype), np.nextafter(np.asarray(1.3, dtype), dtype.type(2))
    first, _ = _pair_derivatives(getattr(k, name)(0.5), jnp.asarray(x), jnp.asarray(z))
    r = abs(float(x) - float(z)) / 0.5
    return same(first, _distance_derivative(name, np.asarray(r)) * np.sign(float(x) - float(z)) / 0.5, 1e-4, 1e-5)


@attempt("answer", cases=("Matern12", "Matern32", "Matern52"), x64=None)
def test_duplicate_rows_of_three_columns(name: str) -> Any:
    dtype = jnp.result_type(float)
    rng = np.random.default_rng(3)
    half = rng.normal(size=(8, 3)).astype(dtype)
    X, lengthscale = np.concatenate([half, half]), np.array([0.6, 0.026, 0.07])
    found = jax.jit(lambda l: getattr(k, name)(l, variance=39.3)(X))(lengthscale.astype(dtype))
    expected = p.gram(X, None, name, lengthscale, 39.3)
    return same(jnp.diagonal(found, 8), np.diagonal(expected, 8), 2 * float(jnp.finfo(dtype).eps), 0)


@attempt("answer", cases=("Matern12", "Matern32"), x64=True)
def test_evidence_of_duplicate_rows(name: str) -> Any:
    rng = np.random.default_rng(4)
    X = rng.normal(size=(10, 3))
    X, lengthscale = np.concatenate([X, X[:5]]), np.array([0.6, 0.026, 0.07])
    y = np.linalg.cholesky(p.gram(X, None, name, lengthscale, 39.3) + 7e-6 * np.eye(15)) @ rng.normal(size=15)
    found = npgp.collapsed.exact_log_evidence(getattr(k, name)(lengthscale, variance=39.3), X, y, noise_variance=7e-6)
    return same(found, p.log_evidence(X, y, 7e-6, name=name, lengthscale=lengthscale, variance=39.3), 1e-5)


@attempt("answer", cases=("ZonalMatern12", "ArcCosine 0"), x64=True)
def test_kinks_on_the_sphere_at_duplicate_rows(name: str) -> Any:
    rng = np.random.default_rng(4)
    X = rng.normal(size=(8, 3))
    X = np.concatenate([X, X])
    kernel = k.ArcCosine(0) if name == "ArcCosine 0" else k.ZonalMatern12()
    K = jax.jit(lambda X: kernel(X))(X)
    return same(jnp.diagonal(K, 8), kernel.diag(X[:8]), 1e-15, 1e-15)


@attempt("answer", cases={"1e4": 1e4, "1e6": 1e6}, x64=None)
def test_far_from_the_origin(shift: float) -> Any:
    dtype = jnp.result_type(float)
    X = (np.round(p.X * 16) / 16 + shift).astype(dtype)  # the sums are exact for 1e4 and 1e6 in float32 too
    X = np.asarray(X, dtype)
    found = jax.jit(lambda X: npgp.Matern32(0.9)(X))(X)
    return same(found, p.gram(X, None, "Matern32", 0.9, 1.0), 1e-4, 1e-5)


@attempt("answer", cases={"30 columns": 30, "200 columns": 200}, x64=None)
def test_many_columns(columns: int) -> Any:
    X = np.random.default_rng(1).normal(size=(9, columns)).astype(jnp.result_type(float))
    found = jax.jit(lambda X: npgp.Matern52(np.sqrt(columns))(X))(X)
    return same(found, p.gram(X, None, "Matern52", np.sqrt(columns), 1.0), 1e-4, 1e-5)


@attempt("either", "lengthscale, variance, X", cases={"1e-30": 1e-30, "1e30": 1e30, "1e-3": 1e-3, "1e10": 1e10})
def test_lengthscales_of_other_units(unit: float) -> Any:
    found = jax.jit(lambda l: npgp.Matern32(l)(p.x(p.X)))(unit)
    gradient = jax.jit(jax.grad(lambda l: jnp.sum(npgp.Matern32(l)(p.x(p.X)))))(unit)
    return same(found, p.gram(np.float32(p.X), None, "Matern32", unit, 1.0)), finite(gradient, "gradient")


@attempt("answer", cases={"1e-12": 1e-12, "1e12": 1e12}, x64=None)
def test_evidence_in_other_units(unit: float) -> Any:
    y = p.Y * np.sqrt(unit)
    gp = npgp.CollapsedGP(p.kernel(variance=p.VARIANCE * unit), p.x(), p.x(p.Z), noise_variance=p.NOISE * unit)
    return same(gp.log_prob(p.x(y)), p.bound() - 0.5 * p.N * np.log(unit))
