"""Many small factorizations side by side, which could stop for ever on few cores."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import problem as p
from judge import attempt, finite, same
from numpyro.infer import Predictive

import npgp

M = 60


def three_terms(X, y=None):
    """Three GPs summed, with sampled lengthscales."""
    latent = 0.0
    for name in "abc":
        l = numpyro.sample(f"l{name}", dist.LogNormal(0.0, 0.3))
        Z = jnp.linspace(0.0, 4.0, M)[:, None]
        latent = npgp.SparseGP(name, npgp.Matern32(l), Z).draw()(X) + latent
    with numpyro.plate("data", len(X)):
        npgp.observe("y", latent, p.gaussian(), obs=y)


@functools.cache
def _trained() -> tuple[Any, Any]:
    guide = npgp.AutoSparseGP(three_terms)
    svi = p.svi_of(three_terms, guide=guide)
    params = jax.jit(lambda key, X, y: svi.get_params(svi.init(key, X, y)))(p.key(), p.x(), p.x(p.Y))
    return guide, guide.with_rows(params, p.x(), p.x(p.Y))


@attempt("answer")
def test_draws_of_three_summed_GPs() -> Any:
    guide, params = _trained()
    run = Predictive(npgp.joint(three_terms), guide=guide, params=params, num_samples=32, parallel=True)
    draws = jax.jit(lambda key: run(key, p.x(p.X_NEW))["y"])  # all factorizations in one program
    return finite([draws(p.key(seed)) for seed in range(2)])


@attempt("answer")
def test_bounds_and_gradients_side_by_side() -> Any:
    Z = jnp.linspace(0.0, 4.0, 60)[:, None]
    X = p.x(np.linspace(0, 4, 240)[:, None])
    y = jnp.sin(3 * X[:, 0])
    inducing, conditional = [Z, Z[::3] + 0.01], npgp.conditionals.Grouped(12)

    def bound(logs):
        kernel = npgp.Matern32(jnp.exp(logs[0]), variance=jnp.exp(logs[1]))
        return npgp.CollapsedGP(kernel, X, inducing, noise_variance=0.1, conditional=conditional).log_prob(y)

    logs = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (64, 2)))
    step = jax.jit(jax.vmap(jax.value_and_grad(bound)))
    for _ in range(3):
        value, slope = step(logs)
    return finite(value), finite(slope)


@attempt("answer", cases=("VNNGP", "NNGP", "pitc"))
def test_many_small_matrices(which: str) -> Any:
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 10, (2000, 2)).astype(np.float32)
    y = np.sin(X[:, 0]).astype(np.float32)
    if which == "VNNGP":
        before = npgp.neighbors.nearest_before(X[:500], 15)

        def program(X, neighbors, y):
            with jax.ensure_compile_time_eval():
                Z = jnp.asarray(sites)
            f = npgp.VNNGP("f", npgp.RBF(), Z, before).draw()
            npgp.observe("y", f(X, neighbors), p.gaussian(), obs=y)

        sites = X[:500]
        neighbors = npgp.neighbors.nearest(X, X[:500], 15)
        return finite(p.fit(program, X, neighbors, y, steps=5).losses)
    if which == "NNGP":
        neighbors = npgp.neighbors.nearest_before(X, 15)
        of = jax.jit(
            jax.vmap(
                jax.value_and_grad(
                    lambda l: npgp.neighbors.ResponseNNGP(npgp.RBF(l), X, neighbors, noise_variance=0.1).log_prob(y)
                )
            )
        )
        return finite(of(jnp.linspace(0.5, 2.0, 4))[1])
    groups = npgp.sparse.median_split(X, 30)
    of = jax.jit(
        jax.grad(
            lambda l: npgp.ApproximateGP(
                npgp.RBF(l), X, X[:50], noise_variance=0.1, method="pitc", groups=groups
            ).log_prob(y)
        )
    )
    return finite(of(1.0))


@attempt("answer")
def test_a_dozen_batched_factorizations_in_one_program() -> Any:
    from npgp import linalg

    rng = np.random.default_rng(0)
    A = rng.normal(size=(12, 400, 30, 30)).astype(np.float32)
    K = jnp.asarray(A @ np.swapaxes(A, -1, -2) / 30 + np.eye(30, dtype=np.float32))

    @jax.jit
    def program(K):
        return [linalg.cholesky(K[i])[0] for i in range(12)]

    for _ in range(20):
        factors = program(K)
    return same(np.einsum("nij,nkj->nik", factors[3], factors[3]), K[3], 1e-3, 1e-3)
