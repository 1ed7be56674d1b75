"""
Numbers under stress, in float32 and float64: nothing is NaN, above the evidence, or out of order.

Random regressions, hostile on purpose: lengthscales and variances over four decades, noise from the variance to a
ten-millionth of it, rows that coincide, nearly coincide or lie far from the origin, inducing points at rows, within
rounding of rows, or one beside the other. The five collapsed bounds, their gradients and Titsias' upper bound,
compiled, against evidence from NumPy's 80-bit numbers. What was found for 2400 problems of each precision, and for a
thousand points on a line, is on the page ``scripts/benchmarks/results/stress.md``.

What is allowed, by first-order analysis in 80-bit numbers, u = ε/2 being the unit roundoff. Covariances are off by
``e k`` each: ε k as kernels are evaluated, and (M + 1) u k by factorization and solves of M points (Higham 2002,
theorems 8.5 and 10.3). With ``α = (Q + σ²I)⁻¹ y``, ``w`` the same of the inducing points and v_n row n's weights of
these (:class:`wide.Influence`), and sums of absolute values |·|₁, all of them conspiring,

- the fit ``−½ yᵀ(Q + σ²I)⁻¹y`` moves by ``½ e k |w|₁ (|w|₁ + 2 |α|₁)``;
- the penalty by ``½ e Σ k (|v_n|₁ + 1)²/σ²``, of which the log-determinant takes a part back;
- as ``B = I + AAᵀ/σ²`` is formed and factorized to ``e' = (N + M + 1) u``, the fit by ``½ e' (Σ |m_i| √b_ii)²``, m the
  mean of ε, and the log-determinant by ``½ M log(1 + e' Σ |B⁻¹_ij| √b_ii √b_jj / M)``;
- all of it is rounded: ``ε Σ_n (1 + (k + y_n²)/σ²)``, called rounding at best below.

As ``|v_n|² ≤ 1/(4 jitter)`` and ``k|w|² ≤ |m|²/jitter``, this is ε/jitter times a term or so. Nor is more allowed than
rounding at best and ε/jitter of what the evidence is itself, ``ε/jitter (|log p(y)| + N)``: what the analysis allows of
the log-determinant of B says nothing for a thousand points. Each of two bounds may be off by that, so their order by
twice as much.

The excess that is largest in float32 is at noise of 1e-7 to 1e-6 of the variance, which is what float32 covariances
themselves are rounded to: exact algebra from npgp's rounded covariances is above by as much.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wide

import npgp

ORDER = ("prior", "shared", "tight", "grouped", "full")
#: Sizes of the two blocks, and whether each is learned.
STRUCTURES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "SGPR": ((8,), ("dense",)),
    "SOLVE-GP": ((5, 3), ("dense", "dense")),
    "ODVGP": ((5, 3), ("dense", "mean-only")),
}
ROWS, GROUP = 24, 4
#: Of each kind; the environment variable NPGP_PROBLEMS says another number, as it does at night.
PROBLEMS = int(os.environ.get("NPGP_PROBLEMS", 50))


def problem(rng: np.random.Generator, columns: int, dtype: Any) -> dict[str, np.ndarray]:
    """One regression; what is given to npgp is rounded here, so that the oracle has the same numbers."""
    X = rng.uniform(-1, 1, (ROWS, columns))
    pattern = rng.integers(5)
    if pattern == 1:  # pairs of equal rows
        X[1::2] = X[::2]
    elif pattern == 2:  # and of nearly equal ones
        X[1::2] = X[::2] + 10.0 ** rng.uniform(-16, -3, (ROWS // 2, 1))
    elif pattern == 3:  # clusters
        X = X[rng.integers(3, size=ROWS)] + 1e-2 * rng.normal(size=X.shape)
    elif pattern == 4:  # far from the origin
        X += 10.0 ** rng.uniform(1, 3)
    X = X.astype(dtype)
    Z = X[rng.permutation(ROWS)[:8]].copy()
    place = rng.integers(4)
    if place == 1:  # within rounding of rows
        Z = np.nextafter(Z, Z + rng.choice([-1.0, 1.0], Z.shape).astype(dtype))
    elif place == 2:  # beside one another
        Z[1::2] = Z[::2] + 10.0 ** rng.uniform(-6, -2)
    elif place == 3:
        Z = X.mean(0) + rng.uniform(-1, 1, Z.shape)
    variance = 10.0 ** rng.uniform(-2, 2)
    hyperparameters = np.array([10.0 ** rng.uniform(-2, 2), variance, variance * 10.0 ** rng.uniform(-7, 0)], dtype)
    y = np.sqrt(variance) * (np.sin(3 * (X - X.mean(0)).sum(1)) + 0.3 * rng.normal(size=ROWS))
    order = np.argsort(X[:, 0], kind="stable")  # so that groups of consecutive rows are neighbors
    return {"X": X[order], "y": y[order].astype(dtype), "Z": Z.astype(dtype), "hyper": hyperparameters}


@partial(jax.jit, static_argnames=("kernel", "structure"))
def five_bounds(batch: dict[str, jax.Array], kernel: str, structure: str) -> dict[str, jax.Array]:
    """The bounds, their gradients in the logs of hyperparameters, upper bound and jitter of each problem."""
    sizes, kinds = STRUCTURES[structure]

    def blocks(Z):
        return jnp.split(Z, np.cumsum(sizes)[:-1])

    def sum_and_bounds(logs, one):  # of factors, so that the numbers themselves are those of the oracle
        lengthscale, variance, noise = one["hyper"] * jnp.exp(logs)
        k = getattr(npgp.kernels, kernel)(lengthscale, variance=variance)
        words: list[Any] = [npgp.conditionals.Grouped(GROUP) if word == "grouped" else word for word in ORDER]
        data = k, one["X"], blocks(one["Z"])
        gps = [npgp.CollapsedGP(*data, noise_variance=noise, conditional=word, covariances=kinds) for word in words]
        bounds = jnp.stack([gp.log_prob(one["y"]) for gp in gps])
        return jnp.sum(bounds), bounds

    def one_problem(one):
        logs = jnp.zeros(3, one["hyper"].dtype)
        k = getattr(npgp.kernels, kernel)(one["hyper"][0], variance=one["hyper"][1])
        projector = npgp.sparse.factorize(k, npgp.sparse.projection.as_blocks(blocks(one["Z"])))
        (_, bounds), gradients = jax.value_and_grad(sum_and_bounds, has_aux=True)(logs, one)
        return {
            "bounds": bounds,
            "gradients": gradients,  # of their sum, which is NaN where one of theirs is
            "upper": npgp.collapsed.upper_bound(
                k, one["X"], one["y"], blocks(one["Z"]), noise_variance=one["hyper"][2]
            ),
            "jitter": jnp.stack(projector.jitter),
        }

    return jax.lax.map(one_problem, batch)


def against_oracle(
    kernel: str, data: Any, lengthscale: Any, variance: Any, noise: Any, got: Any, sizes: Sequence[int]
) -> dict[str, np.ndarray]:
    """What npgp got for a batch of problems, beside the evidence and the allowance in 80-bit numbers."""
    X, y, Z, hyperparameters = data["X"], data["y"], data["Z"], (lengthscale, variance, noise)
    jitter = np.repeat(got["jitter"], sizes, axis=1)
    influence = wide.influence(kernel, X, y, Z, *hyperparameters, jitter)
    evidence = wide.log_evidence(kernel, X, y, *hyperparameters)
    arrays = (got["bounds"], got["upper"][:, None], got["gradients"].reshape(len(X), -1))
    return {
        "bounds": got["bounds"].astype(np.longdouble),
        "upper": got["upper"].astype(np.longdouble),
        "evidence": evidence,
        **wide.allowances(y, variance, noise, influence, evidence, np.finfo(X.dtype).eps, jitter.min(1)),
        "not_finite": ~np.isfinite(np.concatenate(arrays, axis=1)).all(1),
    }


def violations(found: dict[str, np.ndarray]) -> dict[str, tuple[int, int]]:
    """How often bounds are above the evidence or out of order, by themselves and beyond the allowance."""
    of = dict(zip(ORDER, found["bounds"].T, strict=True))
    excesses = {word: of[word] - found["evidence"] for word in ORDER}
    pairs = {f"{a} ≤ {b}": of[a] - of[b] for a, b in itertools.pairwise(ORDER)}
    excesses |= pairs | {"evidence ≤ upper": found["evidence"] - found["upper"]}
    counts = {}
    for name, excess in excesses.items():
        allowed = 2.0 * found["allowance"] if name in pairs else found["allowance"]
        counts[name] = int(np.sum(excess > 0)), int(np.sum(excess > allowed))
    return counts


@pytest.mark.parametrize(
    "kernel, columns, structure, x64",
    [("RBF", 1, "SGPR", False), ("Matern32", 2, "SOLVE-GP", True), ("Matern12", 2, "ODVGP", False)],
    indirect=["x64"],
)
def test_hostile_problems(kernel, columns, structure, x64):
    rng = np.random.default_rng(0)
    given = [problem(rng, columns, np.dtype(x64)) for _ in range(PROBLEMS)]
    batch = {name: np.stack([one[name] for one in given]) for name in given[0]}
    got = jax.tree.map(np.asarray, five_bounds(batch, kernel, structure))
    lengthscale, variance, noise = batch["hyper"].T.astype(np.longdouble)
    found = against_oracle(kernel, batch, lengthscale, variance, noise, got, STRUCTURES[structure][0])
    assert not np.any(found["not_finite"])
    assert not {name: beyond for name, (_, beyond) in violations(found).items() if beyond}


def test_points_that_nearly_coincide_on_a_line():
    """A hundred points, fifteen for each lengthscale of a smooth kernel, and noise of a millionth; in float32."""
    dtype, rng = np.dtype(np.float32), np.random.default_rng(0)
    X = np.sort(rng.uniform(0, 7, (150, 1)), axis=0).astype(dtype)
    Z = np.linspace(0, 7, 100).astype(dtype)[:, None]
    y = (np.sin(2 * X[:, 0]) + 1e-3 * rng.normal(size=150)).astype(dtype)
    noise, groups = np.asarray(1e-6, dtype), npgp.sparse.median_split(X, 30)

    @jax.jit
    def bounds(logs):
        k = npgp.RBF(jnp.exp(logs[0]), variance=jnp.exp(logs[1]))
        words = [npgp.conditionals.Grouped(groups) if word == "grouped" else word for word in ORDER]
        gps = [npgp.CollapsedGP(k, X, Z, noise_variance=noise, conditional=word) for word in words]
        return jnp.stack([gp.log_prob(y) for gp in gps])

    got = {
        "bounds": bounds(jnp.zeros(2, dtype)),
        "gradients": jax.jit(jax.grad(lambda logs: jnp.sum(bounds(logs))))(jnp.zeros(2, dtype)),
        "upper": npgp.collapsed.upper_bound(npgp.RBF(), X, y, Z, noise_variance=noise),
        "jitter": npgp.sparse.factorize(npgp.RBF(), npgp.sparse.projection.as_blocks(Z)).jitter[0][None],
    }
    got = {name: np.asarray(value)[None] for name, value in got.items()}
    one = np.ones(1, np.longdouble)
    found = against_oracle("RBF", {"X": X[None], "y": y[None], "Z": Z[None]}, one, one, one * noise, got, (100,))
    assert not np.any(found["not_finite"])
    assert not {name: beyond for name, (_, beyond) in violations(found).items() if beyond}


def test_wide_algebra_is_that_of_dense_matrices():
    rng = np.random.default_rng(0)
    X, Z, y = rng.normal(size=(2, 7, 2)), rng.normal(size=(2, 3, 2)), rng.normal(size=(2, 7))
    l, variance, noise = (np.array(v, np.longdouble) for v in ([0.7, 1.1], [1.3, 0.4], [0.2, 0.01]))
    K = wide.gram("Matern32", X, X, l, variance).astype(float)
    r = np.linalg.norm(X[:, :, None] - X[:, None], axis=-1) / l[:, None, None].astype(float) * np.sqrt(3)
    np.testing.assert_allclose(K, variance[:, None, None].astype(float) * (1 + r) * np.exp(-r), rtol=1e-12)
    full = K + noise[:, None, None].astype(float) * np.eye(7)
    expected = [
        -0.5 * (y[i] @ np.linalg.solve(full[i], y[i]) + np.linalg.slogdet(2 * np.pi * full[i])[1]) for i in range(2)
    ]
    np.testing.assert_allclose(
        wide.log_evidence("Matern32", X, y, l, variance, noise).astype(float), expected, rtol=1e-12
    )

    jitter = np.array([[1e-6, 1e-6, 1e-4], [1e-3, 1e-3, 1e-5]])  # of blocks of two points and of one
    of = wide.influence("Matern32", X, y, Z, l, variance, noise, jitter)
    Kuu, Kuf = (wide.gram("Matern32", Z, other, l, variance).astype(float) for other in (Z, X))
    for i in range(2):
        nugget, s2 = np.diag(jitter[i]) * float(variance[i]), float(noise[i])
        V = np.linalg.solve(Kuu[i] + nugget, Kuf[i])
        expected = np.linalg.solve(Kuf[i].T @ V + s2 * np.eye(7), y[i])
        np.testing.assert_allclose(of.alpha[i].astype(float), expected, rtol=1e-8)
        np.testing.assert_allclose(of.rows[i].astype(float), V, rtol=1e-8)
        np.testing.assert_allclose(of.points[i].astype(float), V @ expected, rtol=1e-8)
        A = np.linalg.solve(np.linalg.cholesky(Kuu[i] + nugget), Kuf[i])
        np.testing.assert_allclose(of.mean[i].astype(float), A @ expected, rtol=1e-8)
        np.testing.assert_allclose(of.scale[i].astype(float) ** 2, 1 + np.sum(A**2, -1) / s2, rtol=1e-8)
        np.testing.assert_allclose(of.inverse[i].astype(float) @ (np.eye(3) + A @ A.T / s2), np.eye(3), atol=1e-8)


def test_allowance_is_no_less_than_what_rounded_covariances_change():
    # The largest excess of float32: noise near the resolution of the variance, y that the points do not explain.
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(20, 24, 1)), rng.normal(size=(20, 24))
    Z, one = X[:, :8], np.ones(20, np.longdouble)
    data, jitter, eps = ("RBF", X, y, Z, 10 * one, one, 1e-6 * one), np.full((20, 8), 1e-5), 2.0**-23
    of, evidence = wide.influence(*data, jitter), wide.log_evidence(*data[:3], *data[4:])
    allowed = wide.allowances(y, one, 1e-6 * one, of, evidence, eps, one * 1e-5)
    Kuu = wide.gram("RBF", Z, Z, 10 * one, one) + 1e-5 * np.eye(8)

    def fit(Kuu, Kuf):
        return [
            -0.5 * b @ np.linalg.solve(k.T @ np.linalg.solve(K, k) + 1e-6 * np.eye(24), b)
            for K, k, b in zip(Kuu.astype(float), Kuf.astype(float), y, strict=True)
        ]

    Kuf = wide.gram("RBF", Z, X, 10 * one, one)
    moved = np.abs(np.subtract(fit(Kuu, Kuf.astype(np.float32)), fit(Kuu, Kuf)))
    assert np.all(moved < allowed["allowance"]) and np.any(moved > 10 * allowed["rounding"])
    assert np.all(allowed["allowance"] > allowed["rounding"])
    assert np.all(allowed["allowance"] - allowed["rounding"] < 1.01 * eps / 1e-5 * (np.abs(evidence) + 24))


def test_what_is_beyond_its_allowance_is_counted():
    # By .9 out of order, of which twice the allowance is allowed.
    bounds = np.array([[-5.0, -4.0, -3.0, -2.0, -1.0], [-5.0, -4.0, -4.9, -2.0, 0.5]], np.longdouble)
    of = dict(bounds=bounds, upper=np.array([1.0, -0.5]), evidence=np.zeros(2))
    wrong = {name: count for name, count in violations(of | {"allowance": np.full(2, 0.4)}).items() if count[0]}
    assert wrong == {"full": (1, 1), "shared ≤ tight": (1, 1), "evidence ≤ upper": (1, 1)}
    assert not any(beyond for _, beyond in violations(of | {"allowance": np.full(2, 0.6)}).values())
