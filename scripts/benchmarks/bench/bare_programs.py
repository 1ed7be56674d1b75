"""An SVGP's training step in JAX alone, written by hand for this one model, and products of matrices.

Two versions. ``svgp`` is the fastest that we know how to write: the Cholesky factor comes with its inverse W, all else
is matrix products, and gradients reuse W. Since noise is Gaussian, the bound needs the rows' projections A only in
A Aᵀ and Aᵀm, and the gradient of these two is written out. ``plain`` is what one writes first: a Cholesky
factorization, a triangular solve, and JAX's own gradients of both.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax_process import clear, configure, device_memory  # noqa: F401 (asked for by the worker)
from problems import LEARNING_RATE, Problem

MAX_STEPS = 1000
#: At this size and below, a matrix is factorized by LAPACK; above, by halves.
LEAF = 128
#: The gradient goes by A Aᵀ where the batch has at least this many rows per inducing point, by rows otherwise.
GRAM_FROM = 2.0

matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def versions() -> dict[str, str]:
    return {"jax": jax.__version__, "backend": jax.default_backend(), "device": jax.devices()[0].device_kind}


def make(kind: str, problem: Problem | None, **options):
    return Products(**options) if kind == "matmul" else SVGP(problem, kind)


class Products:
    """A (size, size) matrix times a (size, columns) one, again and again; the first is orthogonal, so nothing grows."""

    def __init__(self, size: int, columns: int):
        rng, dtype = np.random.default_rng(0), jnp.result_type(float)
        self.left = jnp.asarray(np.linalg.qr(rng.normal(size=(size, size)))[0], dtype)
        self.right = jnp.asarray(rng.normal(size=(size, columns)), dtype)
        self.run = jax.jit(lambda a, b, count: lax.fori_loop(0, count, lambda _, b: matmul(a, b), b))

    def advance(self, steps: int) -> None:
        jax.block_until_ready(self.run(self.left, self.right, steps))


@jax.custom_jvp
def matern32(r2: jax.Array) -> jax.Array:
    """(1 + s) exp(−s) with s = √(3 r²). Its derivative, −3/2 exp(−s), has no root that could be of zero."""
    s = jnp.sqrt(3.0 * r2)
    return (1.0 + s) * jnp.exp(-s)


@matern32.defjvp
def _(primals, tangents):
    return matern32(primals[0]), -1.5 * jnp.exp(-jnp.sqrt(3.0 * primals[0])) * tangents[0]


def kernel(X1, X2, variance):
    """Of inputs that are scaled already."""
    r2 = jnp.sum(X1**2, 1)[:, None] + jnp.sum(X2**2, 1) - 2.0 * matmul(X1, X2.T)
    return variance * matern32(jnp.maximum(r2, 0.0))


def inverse_factor(K: jax.Array) -> jax.Array:
    """W = L⁻¹ of K = L Lᵀ, by halves: the second half's factor is that of its Schur complement."""
    size = len(K)
    if size <= LEAF:
        L = lax.linalg.cholesky(K, symmetrize_input=False)
        return solve_triangular(L, jnp.eye(size, dtype=K.dtype), lower=True)
    half = size // 2
    first = inverse_factor(K[:half, :half])
    below = matmul(K[half:, :half], first.T)  # the factor's block below the diagonal
    second = inverse_factor(K[half:, half:] - matmul(below, below.T))
    corner = -matmul(second, matmul(below, first))
    return jnp.block([[first, jnp.zeros((half, size - half), K.dtype)], [corner, second]])


def factor_cotangent(W: jax.Array, G: jax.Array) -> jax.Array:
    """The cotangent of K if that of A = W K_uf is Ā, and G = Ā Aᵀ."""
    P = jnp.tril(G) - 0.5 * jnp.diag(jnp.diag(G))
    return -matmul(W.T, matmul(0.5 * (P + P.T), W))


@jax.custom_vjp
def whiten(Kuu: jax.Array, Kuf: jax.Array) -> jax.Array:
    """A = L⁻¹ K_uf."""
    return matmul(inverse_factor(Kuu), Kuf)


def _whiten_forward(Kuu, Kuf):
    W = inverse_factor(Kuu)
    A = matmul(W, Kuf)
    return A, (W, A)


def _whiten_backward(saved, A_bar):
    W, A = saved
    return factor_cotangent(W, matmul(A_bar, A.T)), matmul(W.T, A_bar)


whiten.defvjp(_whiten_forward, _whiten_backward)


@jax.custom_vjp
def moments(Kuu: jax.Array, Kuf: jax.Array, loc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A Aᵀ and Aᵀ m."""
    return _moments_forward(Kuu, Kuf, loc)[0]


def _moments_forward(Kuu, Kuf, loc):
    W = inverse_factor(Kuu)
    A = matmul(W, Kuf)
    C = matmul(A, A.T)
    return (C, matmul(loc, A)), (W, A, C, loc)


def _moments_backward(saved, cotangents):
    W, A, C, loc = saved
    C_bar, mean_bar = cotangents  # Ā = (C̄ + C̄ᵀ) A + m μ̄ᵀ is never formed
    C_bar = C_bar + C_bar.T
    loc_bar = matmul(A, mean_bar)
    Kuf_bar = matmul(matmul(W.T, C_bar), A) + matmul(W.T, loc)[:, None] * mean_bar
    return factor_cotangent(W, matmul(C_bar, C) + loc[:, None] * loc_bar), Kuf_bar, loc_bar


moments.defvjp(_moments_forward, _moments_backward)


@jax.custom_jvp
def gram(R: jax.Array) -> jax.Array:
    """R Rᵀ; its gradient takes one product."""
    return matmul(R, R.T)


@gram.defjvp
def _(primals, tangents):
    half = matmul(tangents[0], primals[0].T)
    return gram(primals[0]), half + half.T


def softplus_inverse(x):
    return x + np.log(-np.expm1(-np.asarray(x)))


def start(problem: Problem) -> dict[str, jax.Array]:
    """Unconstrained parameters."""
    R = problem.scale_tril
    values = {
        "Z": problem.Z,
        "lengthscale": softplus_inverse(problem.lengthscale),
        "variance": softplus_inverse(problem.variance),
        "noise": softplus_inverse(problem.noise),
        "loc": problem.loc,
        "scale_tril": np.tril(R, -1) + np.diag(softplus_inverse(np.diag(R))),
    }
    return {name: jnp.asarray(value, problem.dtype) for name, value in values.items()}


def constrain(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    positive = {name: jax.nn.softplus(params[name]) for name in ("lengthscale", "variance", "noise")}
    raw = params["scale_tril"]
    R = jnp.tril(raw, -1) + jnp.diag(jax.nn.softplus(jnp.diag(raw)))
    return {**params, **positive, "scale_tril": R}


def elbo(params, X, y, rows: int, jitter: float, how: str) -> jax.Array:
    """
    The bound of Hensman et al. (2013) with whitened inducing values.

    :param rows: N, to which the batch's terms are scaled up.
    :param how: ``gram``, ``rows`` or ``plain``: all the same number.
    """
    p = constrain(params)
    loc, R, noise, size = p["loc"], p["scale_tril"], p["noise"], len(params["Z"])
    Z, X = p["Z"] / p["lengthscale"], X / p["lengthscale"]
    Kuu = kernel(Z, Z, p["variance"]) + jitter * jnp.eye(size, dtype=X.dtype)
    Kuf = kernel(Z, X, p["variance"])
    if how == "gram":
        C, mean = moments(Kuu, Kuf, loc)
        variance = len(y) * p["variance"] - jnp.trace(C) + jnp.sum(gram(R) * C)
    else:
        if how == "rows":
            A = whiten(Kuu, Kuf)
        else:
            A = solve_triangular(jnp.linalg.cholesky(Kuu), Kuf, lower=True)
        mean = matmul(loc, A)
        variance = len(y) * p["variance"] - jnp.sum(A**2) + jnp.sum(matmul(R.T, A) ** 2)
    expected = -0.5 * (len(y) * jnp.log(2.0 * jnp.pi * noise) + (jnp.sum((y - mean) ** 2) + variance) / noise)
    kl = 0.5 * (jnp.sum(R**2) + jnp.sum(loc**2) - size) - jnp.sum(jnp.log(jnp.diag(R)))
    return rows / len(y) * expected - kl


class SVGP:
    """Adam on minibatches, many steps in a device call."""

    def __init__(self, problem: Problem, kind: str = "svgp"):
        if kind == "plain":
            how = "plain"
        else:
            how = "gram" if problem.batch_size >= GRAM_FROM * len(problem.Z) else "rows"
        self.problem, rows, jitter = problem, len(problem.y), problem.jitter
        self.X, self.y = jnp.asarray(problem.X), jnp.asarray(problem.y)
        self.rng = np.random.default_rng(0)
        self.order = np.empty(0, np.int32)
        adam = optax.adam(LEARNING_RATE)
        self.params = start(problem)
        self.optim_state = adam.init(self.params)
        self.bound = jax.jit(partial(elbo, rows=rows, jitter=jitter, how=how))

        @partial(jax.jit, donate_argnums=(0, 1))
        def run(params, state, X, y, batches, steps):
            def step(i, carry):
                params, state, _ = carry
                loss, gradient = jax.value_and_grad(lambda *a: -elbo(*a, rows=rows, jitter=jitter, how=how))(
                    params, X[batches[i]], y[batches[i]]
                )
                updates, state = adam.update(gradient, state, params)
                return optax.apply_updates(params, updates), state, loss

            return lax.fori_loop(0, steps, step, (params, state, jnp.zeros((), X.dtype)))

        self.run = run

    def batches(self, steps: int) -> np.ndarray:
        """Row numbers, (MAX_STEPS, B), of which the first ``steps`` are used; each epoch is a permutation."""
        size, rows = self.problem.batch_size, len(self.problem.y)
        numbers = np.zeros((MAX_STEPS, size), np.int32)
        for i in range(steps):
            if len(self.order) < size:
                self.order = self.rng.permutation(rows).astype(np.int32)
            numbers[i], self.order = self.order[:size], self.order[size:]
        return numbers

    def advance(self, steps: int) -> None:
        self.params, self.optim_state, loss = self.run(
            self.params, self.optim_state, self.X, self.y, self.batches(steps), steps
        )
        if not np.isfinite(loss):
            raise FloatingPointError(f"The loss became {loss}.")

    def elbo(self) -> float:
        return float(self.bound(start(self.problem), *self.problem.batch))

    def predictor(self):
        X_new = jnp.asarray(self.problem.X_new)
        p = jax.jit(constrain)(self.params)
        Z = p["Z"] / p["lengthscale"]
        W = jax.jit(inverse_factor)(
            kernel(Z, Z, p["variance"]) + self.problem.jitter * jnp.eye(len(Z), dtype=X_new.dtype)
        )

        @jax.jit
        def predict(W, p, X):
            A = matmul(W, kernel(p["Z"] / p["lengthscale"], X / p["lengthscale"], p["variance"]))
            explained = jnp.sum(matmul(p["scale_tril"].T, A) ** 2, 0) - jnp.sum(A**2, 0)
            return matmul(p["loc"], A), p["variance"] + explained

        return lambda: jax.block_until_ready(predict(W, p, X_new))
