"""Compiled training steps, and their stages, of SVGP with M points and of two sets of M/2; and their operations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import linalg
from npgp.features import covariance
from npgp.variational.blocks import DenseNormal, SquareTrilTransform
from studies.orthogonal.structures import STRUCTURES

#: How the M points are shared out to blocks, and S of each block.
METHODS = {"SVGP": (1, "SGPR"), "SOLVE-GP": (2, "SOLVE-GP"), "ODVGP": (2, "ODVGP")}
COLUMNS = 8


class Program(NamedTuple):
    """A compiled function with its arguments."""

    compiled: Any
    args: tuple

    def __call__(self):
        return jax.block_until_ready(self.compiled(*self.args))

    @property
    def product_flops(self) -> float:
        """Matrix products and elementwise work, by XLA's count, which knows nothing of LAPACK."""
        return float(self.compiled.cost_analysis()["flops"])

    @property
    def lapack_flops(self) -> float:
        """
        Calls of LAPACK in the compiled program (CPU): n³/3 for a Cholesky factor, n² m to solve for m columns.

        Only those of the main computation: retries with more jitter stand in loops that are not entered.
        """
        entry = self.compiled.as_text().split("\nENTRY ")[1]
        shape, target = r"f\d\d\[(\d+),(\d+)\]", r'custom_call_target="lapack_.(potrf|trsm)'
        calls = re.findall(rf"= \(?{shape}.*{target}", entry)
        return sum(int(n) ** 2 * int(m) / (3 if name == "potrf" else 1) for n, m, name in calls)

    @property
    def flops(self) -> float:
        return self.product_flops + self.lapack_flops


def program(function: Callable, *args) -> Program:
    return Program(jax.jit(function).lower(*args).compile(), args)


def with_gradient(function: Callable) -> Callable:
    """The function's values and, with these as cotangents, the derivatives with all arguments."""

    def both(*args):
        values, pull = jax.vjp(function, *args)
        return values, pull(values)

    return both


def uncollapsed_step(M: int, method: str, X, y) -> Program:
    """Value and gradient of the ELBO of a minibatch, with all of its parameters."""
    blocks, structure = METHODS[method]
    Z = starting_points(M, X.dtype)

    def positive(name, value):
        return numpyro.param(name, value, constraint=constraints.softplus_positive)

    def model(X, y):
        kernel = npgp.Matern32(
            positive("lengthscale", jnp.full(COLUMNS, 2.0, X.dtype)), variance=positive("variance", 1.0)
        )
        inducing = [numpyro.param(f"Z{i}", part) for i, part in enumerate(jnp.split(Z, blocks))]
        f = npgp.SparseGP("f", kernel, inducing, covariances=STRUCTURES[structure]).draw()
        with npgp.plate("data", 100 * len(X), rows=len(X)):
            npgp.observe("y", f(X), npgp.Gaussian(variance=positive("noise", 0.1)), obs=y, conditional="tight")

    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(), TraceMeanField_ELBO())
    key = jax.random.key(0)
    params = svi.optim.get_params(jax.jit(svi.init)(key, X, y).optim_state)

    def step(params, X, y):
        def loss(params):
            return svi.loss.loss(key, svi.constrain_fn(params), svi.model, svi.guide, X, y)

        return jax.value_and_grad(loss)(params)

    return program(step, params, X, y)


def collapsed_step(M: int, method: str, X, y) -> Program:
    """Value and gradient of the collapsed bound, with hyperparameters and inducing inputs."""
    blocks, structure = METHODS[method]
    start = (jnp.full(COLUMNS, 2.0, X.dtype), jnp.ones(2, X.dtype), starting_points(M, X.dtype))

    def step(parameters, X, y):
        def bound(parameters):
            lengthscale, (variance, noise), Z = parameters
            inducing, kernel = jnp.split(Z, blocks), npgp.Matern32(lengthscale, variance=variance)
            gp = npgp.CollapsedGP(kernel, X, inducing, noise_variance=noise, covariances=STRUCTURES[structure])
            return gp.log_prob(y)

        return jax.value_and_grad(bound)(parameters)

    return program(step, start, X, y)


def starting_points(M: int, dtype) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(M, COLUMNS)), dtype)


def stages(M: int, method: str, X) -> dict[str, tuple[Callable, tuple]]:
    """The parts of an uncollapsed step, one by one, with arguments such as they meet there."""
    blocks, structure = METHODS[method]
    kernel = npgp.Matern32(jnp.full(COLUMNS, 2.0, X.dtype), variance=jnp.ones((), X.dtype))
    Z = list(jnp.split(starting_points(M, X.dtype), blocks))
    learned = sum(kind == "dense" for kind in STRUCTURES[structure])
    h = M // blocks
    raw = [0.1 * jax.random.normal(jax.random.key(i), (h, h), X.dtype) for i in range(learned)]

    def kernels(kernel, Z):
        points = [npgp.features.Points(z) for z in Z]
        columns = [[covariance(kernel, b, block) for b in points[:i]] for i, block in enumerate(points)]
        return columns, [b.gram(kernel) for b in points], [b.cross(kernel, X) for b in points]

    def factors(columns, grams):
        L, cross = [], []
        for column, gram in zip(columns, grams, strict=True):
            before, C = linalg.block_row(L, cross, column, gram)
            L.append(linalg.cholesky(C)[0])
            cross.append(before)
        return L, cross

    def variances(S, A):
        return sum(
            jnp.sum(jnp.square(DenseNormal(a[:, 0], s).factor_times(a)), axis=0) for s, a in zip(S, A, strict=False)
        )

    def triangles(raw):
        S = [SquareTrilTransform()(r) for r in raw]
        return S, [DenseNormal(s[0], s).kl() for s in S]

    columns, grams, K = jax.jit(kernels)(kernel, Z)
    L, cross = jax.jit(factors)(columns, grams)
    A = jax.jit(linalg.block_solve)(L, cross, K)
    return {
        "kernel matrices": (kernels, (kernel, Z)),
        "Cholesky factors": (factors, (columns, grams)),
        "whitening solves": (linalg.block_solve, (L, cross, K)),
        "products with S": (variances, (jax.jit(triangles)(raw)[0], A)),
        "triangles and KL of q": (triangles, (raw,)),
    }
