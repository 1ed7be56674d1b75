#!/usr/bin/env python
"""npgp under numerical stress, in float32 and float64: nothing is NaN, above the evidence, or out of order.

``problems``: 2400 random regressions, hostile on purpose: lengthscales and variances over four decades, noise from the
variance to a ten-millionth of it, rows that coincide, nearly coincide or lie far from the origin, inducing points at
rows, within rounding of rows, or one beside the other. The five collapsed bounds of three structures, their gradients
and Titsias' upper bound, compiled, against evidence from NumPy's 80-bit numbers.

``line``: 1000 inducing points on a line, noise of 1e-6 of the variance: the five bounds, their gradients, and SVI.

``kin40k``: 36,000 rows, M = 512, Adam at .1 for 2000 steps, all learned; the ELBO of all rows between its bounds.

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

    python scripts/studies/safety/stress.py problems line                    both precisions
    NPGP_DATA=... python scripts/studies/safety/stress.py kin40k             an hour on one core

The exit status is 1 after a violation.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, command, table, whole, write_json
from studies.regression.layouts import STRUCTURES as LAYOUTS
from studies.regression.layouts import Split
from studies.regression.minibatch import best_elbo, component, regression_model, start_of_lengthscales
from studies.safety import wide

PARTS = ("problems", "line", "kin40k")
ORDER = ("prior", "shared", "tight", "grouped", "full")
KERNELS = ("RBF", "Matern12", "Matern32", "Matern52", "RationalQuadratic")
#: Sizes of the two blocks, and whether each is learned.
STRUCTURES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "SGPR": ((8,), ("dense",)),
    "SOLVE-GP": ((5, 3), ("dense", "dense")),
    "ODVGP": ((5, 3), ("dense", "mean-only")),
}
ROWS, GROUP = 24, 4


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="problems, line, kin40k (all)")
    parser.add_argument("--problems", type=whole, default=2400, help="of the first part, in each precision (2400)")
    parser.add_argument("--points", type=whole, default=1000, help="of the second (1000)")
    parser.add_argument("--precisions", nargs="+", choices=("float32", "float64"), default=["float32", "float64"])
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file")
    parser.shared(
        "json",
        "quick",
        inducing=dict(default=512, help="points of kin40k (512)"),
        steps=dict(default=2000, help="of kin40k; the line has a tenth as many"),
        rows=dict(help="of kin40k, at most"),
        seed=0,
    )
    args = parser.read(argv, quick={"problems": 15, "points": 16, "inducing": 16, "steps": 20, "rows": 600})
    args.parts = args.parts or list(PARTS)
    if wrong := [part for part in args.parts if part not in PARTS]:
        parser.error(f"{wrong[0]} is no part; the parts are {', '.join(PARTS)}.")
    return args


# ---------------------------------------------------------------------------------------------------------------
# Random problems


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
        words: list[Any] = [npgp.Grouped(GROUP) if word == "grouped" else word for word in ORDER]
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
            "upper": npgp.upper_bound(k, one["X"], one["y"], blocks(one["Z"]), noise_variance=one["hyper"][2]),
            "jitter": jnp.stack(projector.jitter),
        }

    return jax.lax.map(one_problem, batch)


def random_problems(count: int, seed: int, dtype: Any) -> dict[str, Any]:
    """All figures of one precision."""
    settings = [
        (kernel, D, name) for kernel in KERNELS for name in STRUCTURES for D in ((1, 4) if name == "SGPR" else (2,))
    ]
    settings = settings[:: -(-20 * len(settings) // count) if count < 20 * len(settings) else 1]  # 20 for each program
    rng, found, examples = np.random.default_rng(seed), [], []
    for i, (kernel, columns, structure) in enumerate(settings):
        number = count * (i + 1) // len(settings) - count * i // len(settings)
        if not number:
            continue
        given = [problem(rng, columns, dtype) for _ in range(number)]
        batch = {name: np.stack([one[name] for one in given]) for name in given[0]}
        got = jax.tree.map(np.asarray, five_bounds(batch, kernel, structure))
        lengthscale, variance, noise = batch["hyper"].T.astype(np.longdouble)
        found.append(against_oracle(kernel, batch, lengthscale, variance, noise, got, STRUCTURES[structure][0]))
        for j in np.flatnonzero(found[-1]["not_finite"])[:2]:
            examples.append(f"{kernel}, {columns} columns, {structure}: {got['bounds'][j]} at {batch['hyper'][j]}")
    every = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    return {"problems": count, "examples": examples[:5]} | judged(**every)


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


def judged(
    bounds: np.ndarray,
    upper: np.ndarray,
    evidence: np.ndarray,
    rounding: np.ndarray,
    allowance: np.ndarray,
    not_finite: np.ndarray,
) -> dict[str, Any]:
    """How far bounds are above the evidence or out of order, by themselves and beyond the allowance."""
    of = dict(zip(ORDER, bounds.T, strict=True))
    excesses = {word: of[word] - evidence for word in ORDER}
    pairs = {f"{a} ≤ {b}": of[a] - of[b] for a, b in itertools.pairwise(ORDER)}
    excesses |= pairs | {"evidence ≤ upper": evidence - upper}
    checks = {}
    for name, excess in excesses.items():
        known = np.isfinite(excess)
        allowed = 2.0 * allowance if name in pairs else allowance
        checks[name] = {
            "above": int(np.sum(excess[known] > 0)),
            "most": float(np.max(excess[known], initial=0.0)),
            "share_of_allowance": float(np.max((excess / allowed)[known], initial=0.0)),
            "violations": int(np.sum((excess > allowed)[known])),
        }
    medians = {"median_rounding": float(np.median(rounding)), "median_allowance": float(np.median(allowance))}
    return {"checks": checks, **medians, "not_finite": int(not_finite.sum())}


# ---------------------------------------------------------------------------------------------------------------
# A thousand points on a line


def line(size: int, steps: int, seed: int, dtype: Any) -> dict[str, Any]:
    """Bounds, gradients and SVI with so many inducing points, noise 1e-6."""
    rng, rows = np.random.default_rng(seed), size * 3 // 2
    X = np.sort(rng.uniform(0, 10, (rows, 1)), axis=0).astype(dtype)
    Z = np.linspace(0, 10, size).astype(dtype)[:, None]
    y = (np.sin(2 * X[:, 0]) + 1e-3 * rng.normal(size=rows)).astype(dtype)
    noise, groups = np.asarray(1e-6, dtype), npgp.median_split(X, 32)
    report: dict[str, Any] = {}
    for kernel in ("RBF", "Matern32"):
        of: Any = getattr(npgp.kernels, kernel)

        @jax.jit
        def bounds(logs, of=of):
            k = of(jnp.exp(logs[0]), variance=jnp.exp(logs[1]))
            words = [npgp.Grouped(groups) if word == "grouped" else word for word in ORDER]
            return jnp.stack(
                [npgp.CollapsedGP(k, X, Z, noise_variance=noise, conditional=word).log_prob(y) for word in words]
            )

        def model(X, y, of=of):
            f = npgp.SparseGP("f", of(), jnp.asarray(Z)).draw()
            with npgp.plate("data", rows, rows=X.shape[0]):
                npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y)

        projector = npgp.sparse.factorize(of(), npgp.sparse.projection.as_blocks(Z))
        got = {
            "bounds": bounds(jnp.zeros(2, dtype)),
            "gradients": jax.jit(jax.grad(lambda logs, of=bounds: jnp.sum(of(logs))))(jnp.zeros(2, dtype)),
            "upper": npgp.upper_bound(of(), X, y, Z, noise_variance=noise),
            "jitter": projector.jitter[0][None],
        }
        got = {name: np.asarray(value)[None] for name, value in got.items()}
        one = np.ones(1, np.longdouble)
        found = against_oracle(kernel, {"X": X[None], "y": y[None], "Z": Z[None]}, one, one, one * noise, got, (size,))
        svi, _ = trained(model, X, y, max(steps // 10, 1), min(256, rows), 0.01)
        report[kernel] = judged(**found) | {
            "bounds": dict(zip(ORDER, got["bounds"][0].tolist(), strict=True)),
            "evidence": float(found["evidence"][0]),
            "upper": float(got["upper"][0]),
            "jitter": float(got["jitter"][0, 0]),
            "svi": svi,
        }
    return report


def trained(
    model: Any, X: np.ndarray, y: np.ndarray, steps: int, batch: int, rate: float, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Minibatch training: its figures, with the message if it stopped; and its parameters."""
    svi = SVI(model, npgp.AutoSparseGP(model), optax.adam(rate), TraceMeanField_ELBO(), **options)
    began, stopped = time.perf_counter(), None
    try:
        result = npgp.fit(svi, jax.random.key(0), steps, X, y, batch_size=batch, progress=False)
    except npgp.training.NonFiniteLossError as error:
        result, stopped = error.result, str(error)
    bad = sum(np.sum(~np.isfinite(x)) for x in jax.tree.leaves((result.params, result.losses)))
    figures = {
        "steps": len(result.losses),
        "first_loss": float(result.losses[0]) if len(result.losses) else float("nan"),
        "last_loss": float(np.mean(result.losses[-50:])) if len(result.losses) else float("nan"),
        "not_finite": int(bad),
        "stopped": stopped,
        "seconds": time.perf_counter() - began,
    }
    return figures, result.params


# ---------------------------------------------------------------------------------------------------------------
# kin40k


def kin40k(size: int, steps: int, rows: int | None, seed: int, dtype: Any) -> dict[str, Any]:
    """Adam at .1, everything learned; then the bounds of all rows at what was learned."""
    split = Split.load("kin40k", seed, rows)
    X, y = split.X.astype(dtype), split.y.astype(dtype)
    start = {"lengthscale": start_of_lengthscales(X), "variance": 1.0, "noise_variance": 0.1}
    start["inducing0"] = split.inducing(LAYOUTS["SVGP"], size, seed)[0]
    start = {name: jnp.asarray(value, dtype) for name, value in start.items()}
    model = regression_model(start, ("dense",), "tight")
    figures, params = trained(model, X, y, steps, min(1024, len(y)), 0.1, size=len(y))
    groups = npgp.median_split(X, 16)
    bounds = {}
    for word in ORDER[:4]:
        given = groups if word == "grouped" else None
        bounds[word] = float(best_elbo(params, X, y, ("dense",), word, given))
    gp = component(params, ("dense",))
    upper = float(npgp.upper_bound(gp.kernel, X, y, gp.inducing, noise_variance=params["noise_variance"]))
    ladder = [*bounds.values(), upper]
    return {
        "rows": len(y),
        "points": size,
        **figures,
        "bounds": bounds,
        "upper": upper,
        "noise_variance": float(params["noise_variance"]),
        "in_order": ladder == sorted(ladder),
        "not_finite": figures["not_finite"] + int(np.sum(~np.isfinite(ladder))),
    }


# ---------------------------------------------------------------------------------------------------------------


def cases(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was looked at, by name."""
    for precision, parts in report["figures"].items():
        for part, figures in parts.items():
            if part == "line":
                yield from ((f"{precision}, {part}, {kernel}", found) for kernel, found in figures.items())
            else:
                yield f"{precision}, {part}", figures


def violations(report: dict[str, Any]) -> list[str]:
    """What must not be, in words."""
    wrong = []
    for where, found in cases(report):
        bad = found["not_finite"] + found.get("svi", {}).get("not_finite", 0)
        wrong += [f"{where}: {bad} not finite, and not a word"] * bool(bad)
        checks = found.get("checks", {}).items()
        wrong += [f"{where}: {name}, violated {c['violations']} times" for name, c in checks if c["violations"]]
        if found.get("in_order") is False:
            wrong.append(f"{where}: out of order")
    return wrong


def tables(report: dict[str, Any], markdown: bool = False) -> str:
    """All figures."""
    header = ["", "above", "most, nats", "of what is allowed", "violations"]
    parts = []
    for where, found in cases(report):
        text = f"**{where}**: {found['not_finite']} not finite"
        for run in [found.get("svi", found)]:
            if "steps" in run:
                end = f"stopped: {run['stopped']}" if run["stopped"] else f"{run['seconds']:.0f} s"
                text += f"; {run['steps']} steps, loss {run['first_loss']:.5g} to {run['last_loss']:.5g}, {end}"
        if "bounds" in found:
            ladder = {**found["bounds"], "evidence": found.get("evidence"), "upper": found["upper"]}
            text += "; " + ", ".join(f"{name} {value:.2f}" for name, value in ladder.items() if value is not None)
        if "checks" in found:
            rows = [
                [name, c["above"], f"{c['most']:.3g}", f"{c['share_of_allowance']:.2g}", c["violations"]]
                for name, c in found["checks"].items()
            ]
            text += (
                f"; rounding {found['median_rounding']:.3g}, allowance {found['median_allowance']:.3g} in the median"
            )
            text += "\n\n" + table(header, rows, markdown=markdown)
        parts.append(text)
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    report: dict[str, Any] = {"command": command(__file__, argv), "figures": {}}
    for precision in args.precisions:
        dtype, found = np.dtype(precision).type, report["figures"].setdefault(precision, {})
        with jax.enable_x64(precision == "float64"):
            for part in args.parts:
                began = time.perf_counter()
                if part == "problems":
                    found[part] = random_problems(args.problems, args.seed, dtype)
                elif part == "line":
                    found[part] = line(args.points, args.steps, args.seed, dtype)
                else:
                    found[part] = kin40k(args.inducing, args.steps, args.rows, args.seed, dtype)
                print(f"{precision}, {part}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
                write_json(args.json, report, say=False)
    report["violations"] = violations(report)
    text = tables(report) + "\n\n" + ("\n".join(report["violations"]) or "no violation")
    print(text)
    write_json(args.json, report)
    if args.markdown is not None:
        wrong = "\n".join(f"- {line}" for line in report["violations"]) or "No violation."
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(
            f"# Numbers under stress\n\n`{report['command']}`\n\n{tables(report, True)}\n\n{wrong}\n"
        )
    if report["violations"]:
        sys.exit(1)
    return report


if __name__ == "__main__":
    main()
