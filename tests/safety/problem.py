"""The small problem that most attempts are about, and its oracle: dense matrices in NumPy, nothing of npgp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

N, M = 12, 4
LENGTHSCALE, VARIANCE, NOISE = 0.9, 1.3, 0.2
_rng = np.random.default_rng(5)
X = np.sort(_rng.uniform(0.0, 4.0, (N, 1)), axis=0)
Y = np.sin(2.0 * X[:, 0]) + 0.3 * _rng.normal(size=N)
Z = np.array([[0.4], [1.5], [2.6], [3.7]])
COUNTS = np.array([0, 1, 3, 2, 5, 4, 2, 0, 1, 1, 0, 6])
X_NEW = np.array([[0.2], [1.1], [3.3]])


def key(seed: int = 0) -> jax.Array:
    return jax.random.key(seed)


def x(array: Any = X) -> jax.Array:
    """An array in JAX's default precision."""
    return jnp.asarray(array, jnp.result_type(float))


def kernel(lengthscale: Any = LENGTHSCALE, variance: Any = VARIANCE) -> npgp.RBF:
    return npgp.RBF(lengthscale, variance=variance)


def sparse_gp(name: str = "f", inducing: Any = None, **options: Any) -> npgp.SparseGP:
    return npgp.SparseGP(name, kernel(), x(Z) if inducing is None else inducing, **options)


def gaussian() -> npgp.Gaussian:
    return npgp.Gaussian(variance=NOISE)


def model(inputs: Any, y: Any = None, likelihood: Any = None, **options: Any) -> None:
    """README's first model, without what is learned beside f."""
    f = sparse_gp().draw()
    with numpyro.plate("data", len(inputs)):
        npgp.observe("y", f(inputs), likelihood or gaussian(), obs=y, **options)


def observed(likelihood: Any, **options: Any) -> Callable[..., None]:
    """The model with another likelihood, or other options of ``observe``."""
    return lambda inputs, y=None: model(inputs, y, likelihood, **options)


def svi_of(program: Callable[..., None], loss: Any = None, guide: Any = None, rate: float = 0.01, **static: Any) -> SVI:
    return SVI(program, guide or npgp.AutoSparseGP(program), npgp.adam(rate), loss or TraceMeanField_ELBO(), **static)


def fit(program: Callable[..., None], *args: Any, steps: int = 2, svi: SVI | None = None, **options: Any) -> Any:
    """A few steps of training."""
    return npgp.fit(svi or svi_of(program), key(), steps, *args, progress=False, **options)


def first_loss(
    program: Callable[..., None], *args: Any, guide: Any = None, loss: Any = None, params: Any = None
) -> float:
    """The loss at a guide's start, or at parameters, as one compiled program."""
    svi = svi_of(program, loss, guide)
    state = svi.init(key(), *args, init_params=params)
    return float(jax.jit(lambda s: svi.evaluate(s, *args))(state))


# ---------------------------------------------------------------------------------------------------------------
# Dense algebra

CORRELATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "RBF": lambda r: np.exp(-(r**2) / 2),
    "Matern12": lambda r: np.exp(-r),
    "Matern32": lambda r: (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r),
    "Matern52": lambda r: (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r),
    "RationalQuadratic": lambda r: 1 / (1 + r**2 / 2),
}


def gram(a: Any, b: Any = None, name: str = "RBF", lengthscale: Any = LENGTHSCALE, variance: float = VARIANCE):
    """A covariance matrix, from differences."""
    a = np.asarray(a, float)
    b = a if b is None else np.asarray(b, float)
    r = np.sqrt(np.sum(((a[:, None] - b) / lengthscale) ** 2, axis=-1))
    return variance * CORRELATIONS[name](r)


def log_normal(y: Any, covariance: np.ndarray) -> float:
    values, vectors = np.linalg.eigh(covariance)
    z = vectors.T @ np.asarray(y, float)
    return float(-0.5 * (np.sum(z**2 / values) + np.sum(np.log(2 * np.pi * values))))


def log_evidence(inputs: Any = X, y: Any = Y, noise: Any = NOISE, **hyperparameters: Any) -> float:
    K = gram(inputs, **hyperparameters)
    return log_normal(y, K + np.diag(np.broadcast_to(noise, len(K))))


def projected(inputs: Any = X, inducing: Any = Z, **hyperparameters: Any) -> tuple[np.ndarray, np.ndarray]:
    """Whitened projections A (M, N), and the residual's covariance (N, N)."""
    L = np.linalg.cholesky(gram(inducing, **hyperparameters))
    A = np.linalg.solve(L, gram(inducing, inputs, **hyperparameters))
    return A, gram(inputs, **hyperparameters) - A.T @ A


def bound(
    conditional: str = "tight",
    inputs: Any = X,
    y: Any = Y,
    inducing: Any = Z,
    noise: Any = NOISE,
    groups: Any = None,
    **more: Any,
) -> float:
    """The collapsed bound of one dense block."""
    A, D = projected(inputs, inducing, **more)
    s2 = np.broadcast_to(np.asarray(noise, float), len(D))
    scaled = D / np.sqrt(np.outer(s2, s2))
    penalty = {
        "prior": lambda: 0.5 * np.trace(scaled),
        "tight": lambda: 0.5 * np.sum(np.log1p(np.diag(scaled))),
        "shared": lambda: 0.5 * len(D) * np.log1p(np.mean(np.diag(scaled))),
        "grouped": lambda: sum(0.5 * np.linalg.slogdet(np.eye(len(g)) + scaled[np.ix_(g, g)])[1] for g in groups),
        "full": lambda: 0.5 * np.linalg.slogdet(np.eye(len(D)) + scaled)[1],
    }[conditional]()
    return log_normal(y, A.T @ A + np.diag(s2)) - penalty


def optimum(inputs: Any = X, y: Any = Y, noise: float = NOISE, name: str = "f") -> dict[str, np.ndarray]:
    """Parameters of the best q(ε), under the names that guides give them."""
    A, _ = projected(inputs)
    S = np.linalg.inv(np.eye(len(A)) + A @ A.T / noise)
    return {f"{name}.u.loc": S @ A @ y / noise, f"{name}.u.scale_tril": np.linalg.cholesky(S)}


def as_params(values: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {site: x(value) for site, value in values.items()}


def exact_posterior(inputs: Any = X_NEW) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of f under the best q(ε), at new inputs."""
    A, D = projected(inputs)
    q = optimum()
    S = q["f.u.scale_tril"] @ q["f.u.scale_tril"].T
    return A.T @ q["f.u.loc"], np.diag(D) + np.einsum("mn,mk,kn->n", A, S, A)
