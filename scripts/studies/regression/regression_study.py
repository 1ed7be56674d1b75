#!/usr/bin/env python
"""What the conditional and the predictive variance buy on regression data, and what they cost.

Four parts, all by default:

    grouped    ``prior``, ``tight`` and ``grouped`` fits, each with and without the local correction
    snelson    the bounds on Snelson's data with five inducing points, and with five mean-only points more
    steps      time of a step of minibatch SVI with ``grouped``, against ``tight``
    table1     Bui, Ashman & Turner 2025, table 1: the training-point term of the predictive variance

    NPGP_DATA=... python scripts/studies/regression/regression_study.py grouped snelson --json out/regression.json
    NPGP_DATA=... python scripts/studies/regression/regression_study.py table1 --sets wine solar --splits 10

Fits are collapsed (``npgp.CollapsedGP``), by L-BFGS over hyperparameters and inducing inputs, in float64. Inputs and
target are standardised, and so are the errors and log-likelihoods. Of kin40k and protein a random subset of rows is
used: at full size they are for minibatches.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy.optimize import minimize
from scipy.stats import norm
from threadpoolctl import threadpool_limits

import npgp
import npgp.inducing
from npgp import datasets

PARTS = ("grouped", "snelson", "steps", "table1")
CONDITIONALS = ("prior", "tight", "grouped")
KERNELS = {"matern32": npgp.Matern32, "rbf": npgp.RBF}
#: Inducing points and the largest group of each set of the first part.
SIZES = {"concrete": (64, 64), "kin8nm": (128, 64), "power": (64, 64), "kin40k": (128, 64), "protein": (128, 64)}
TABLE1 = ("wine", "solar", "pumadyn32nm")
#: Logs of lengthscales, variance and noise stay within these.
LOG_BOUNDS = (-9.0, 7.0)
#: Snelson's data: relative to the prior variance.
SNELSON_JITTER = 1e-6


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all if omitted")
    parser.add_argument("--sets", nargs="+", choices=(*SIZES, *TABLE1), help="these data sets alone")
    parser.add_argument("--splits", type=int, default=1, help="how many of the train/test splits")
    parser.add_argument("--rows", type=int, default=8000, help="of larger training sets, as many rows at random")
    parser.add_argument("--iterations", type=int, default=300, help="of L-BFGS, at most")
    parser.add_argument("--inducing", type=int, default=100, help="inducing points, for table1")
    parser.add_argument("--kernel", choices=KERNELS, default="matern32", help="for grouped and table1, with ARD")
    parser.add_argument("--restarts", type=int, default=24, help="further starts on Snelson's data, at random")
    parser.add_argument("--repetitions", type=int, default=21, help="of each time measured")
    parser.add_argument("--cpu-time", action="store_true", help="measure processor time: for a busy machine")
    parser.add_argument("--quick", action="store_true", help="a few rows, points and iterations: a check that it runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(unknown)}; parts are {', '.join(PARTS)}.")
    args.parts = args.parts or list(PARTS)
    if args.quick:
        args.rows, args.iterations, args.inducing, args.restarts, args.repetitions = 120, 8, 10, 1, 2
        args.sets = args.sets or ["concrete", "wine"]
    if min(args.splits, args.rows, args.iterations, args.inducing, args.repetitions) < 1 or args.restarts < 0:
        parser.error("counts must be positive.")
    return args


# ---------------------------------------------------------------------------------------------------------------
# Measuring


def interleaved(
    calls: Mapping[str, Callable[[], Any]], base: str, repetitions: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, tuple[float, float]]:
    """
    Time calls in turn, so that whatever else the machine does meets all of them alike.

    :param calls: what to time; each is called once before.
    :param base: the call that others are compared with.
    :param repetitions: rounds.
    :param clock: in seconds.
    :return: of each call the median of its milliseconds, and that of its ratio to the base in the same round.
    """
    for call in calls.values():
        jax.block_until_ready(call())
    times = np.empty((repetitions, len(calls)))
    for i in range(repetitions):
        for j, call in enumerate(calls.values()):
            begin = clock()
            jax.block_until_ready(call())
            times[i, j] = 1e3 * (clock() - begin)
    ratios = times / times[:, [list(calls).index(base)]]
    return {
        name: (float(ms), float(ratio))
        for name, ms, ratio in zip(calls, np.median(times, 0), np.median(ratios, 0), strict=True)
    }


def clock(args: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if args.cpu_time else time.perf_counter


class Score(NamedTuple):
    """Of predictions of standardised targets."""

    rmse: float
    log_likelihood: float


def score(y, mean, variance, noise: float) -> Score:
    """:param variance: of f; the noise is added."""
    y, mean, variance = map(np.asarray, (y, mean, variance))
    log_likelihood = norm.logpdf(y, mean, np.sqrt(variance + noise))
    return Score(float(np.sqrt(np.mean(np.square(y - mean)))), float(np.mean(log_likelihood)))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean, with its standard error if there are several values."""
    text = f"{np.mean(values):.{digits}f}"
    if len(values) == 1:
        return text
    return f"{text} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.{digits}f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for first, *others in (heads, *rows):
        print("  ".join([first.ljust(widths[0]), *(v.rjust(w) for v, w in zip(others, widths[1:], strict=True))]))
    print()


def note(text: str) -> None:
    print(textwrap.fill(text, 118))


# ---------------------------------------------------------------------------------------------------------------
# Collapsed fits


class Fit(NamedTuple):
    """A collapsed fit: the bound, where it is taken, and how many iterations that took."""

    bound: float
    theta: np.ndarray
    iterations: int


def gp_at(theta, X, groups, conditional: str, kernel: str) -> npgp.CollapsedGP:
    """The GP at logs of D lengthscales, variance and noise variance, and inducing inputs, in one vector."""
    columns = X.shape[1]
    scales = jnp.exp(theta[: columns + 2])
    return npgp.CollapsedGP(
        KERNELS[kernel](scales[:columns], scales[columns]),
        X,
        theta[columns + 2 :].reshape(-1, columns),
        scales[columns + 1],
        conditional=conditional,  # type: ignore[arg-type]
        groups=groups if conditional == "grouped" else None,
    )


@partial(jax.jit, static_argnames=("conditional", "kernel"))
def loss_and_slope(theta, X, y, groups, conditional: str, kernel: str):
    """The negative bound for each row, and its gradient."""
    return jax.value_and_grad(lambda t: -gp_at(t, X, groups, conditional, kernel).log_prob(y) / len(y))(theta)


def lbfgs(loss: Callable, start: np.ndarray, num_logs: int, iterations: int) -> tuple[float, np.ndarray, int]:
    """Minimise from a start, whose first so many entries are logs: the least loss, where, and the iterations."""

    def numpy_loss(theta):
        value, slope = loss(theta)
        return float(value), np.asarray(slope, float)

    bounds = [LOG_BOUNDS] * num_logs + [(None, None)] * (len(start) - num_logs)
    options = {"maxiter": iterations, "maxfun": 2 * iterations, "ftol": 1e-12, "gtol": 1e-8}
    optimum = minimize(numpy_loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return float(optimum.fun), optimum.x, int(optimum.nit)


def start_at(X: np.ndarray, inducing: int, seed: int) -> np.ndarray:
    """Lengthscales √D, variance 1, noise variance .1, inducing inputs from k-means."""
    columns = X.shape[1]
    Z = np.asarray(npgp.inducing.kmeans(X, inducing, seed))
    return np.concatenate([np.full(columns, 0.5 * math.log(columns)), [0.0, math.log(0.1)], Z.ravel()])


def fit(data, groups, conditional: str, start: np.ndarray, args: argparse.Namespace) -> Fit:
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    loss = partial(loss_and_slope, X=X, y=y, groups=groups, conditional=conditional, kernel=args.kernel)
    value, theta, iterations = lbfgs(loss, start, X.shape[1] + 2, args.iterations)
    return Fit(-value, theta, iterations)


@partial(jax.jit, static_argnames=("conditional", "kernel"))
def condition(theta, X, y, groups, conditional: str, kernel: str) -> npgp.Posterior:
    return gp_at(theta, X, groups, conditional, kernel).condition(y)


@jax.jit
def predict(posterior, X):
    return posterior.mean_and_variance(X)


def load(name: str, split: int, args: argparse.Namespace) -> datasets.RegressionSplit:
    """A split, with at most so many training rows and half as many test rows, at random."""
    data = datasets.uci(name, split)
    rng = np.random.default_rng(args.seed)
    fields = data.__dict__.copy()
    for kind, most in (("train", args.rows), ("test", max(args.rows // 2, 1))):
        if len(fields[f"y_{kind}"]) > most:
            rows = np.sort(rng.choice(len(fields[f"y_{kind}"]), most, replace=False))
            for key in (f"X_{kind}", f"y_{kind}"):
                fields[key] = fields[key][rows]
    return datasets.RegressionSplit(**fields)


# ---------------------------------------------------------------------------------------------------------------
# Parts


def grouped(args: argparse.Namespace) -> dict:
    """Each conditional on each set, with and without the local correction."""
    print("PRIOR, TIGHT AND GROUPED CONDITIONALS, with and without the local correction\n")
    note(
        "The bound is per training row. RMSE and mean log-likelihood are of test rows, standardised; '+' is with the "
        "local correction, from the training rows of the same group. Times are of the bound with its gradient, all at "
        "one place, and the ratio is to that of tight."
    )
    print()
    report = {}
    for name in [name for name in SIZES if args.sets is None or name in args.sets]:
        inducing, size = (10, 16) if args.quick else SIZES[name]
        results: dict[str, dict[str, list[float]]] = {c: {} for c in CONDITIONALS}
        for split in range(args.splits):
            data = load(name, split, args)
            for conditional, figures in grouped_split(data, inducing, size, args, timed=split == 0).items():
                for key, value in figures.items():
                    results[conditional].setdefault(key, []).append(value)
        shape = {"rows": len(data.y_train), "test_rows": len(data.y_test), "columns": data.X_train.shape[1]}
        report[name] = {**shape, "inducing": inducing, "group_size": size, "splits": args.splits, "methods": results}
        subset = ", random subsets" if len(data.y_train) == args.rows else ""
        print(
            f"{name}: {shape['rows']} training and {shape['test_rows']} test rows{subset}, {shape['columns']} columns; "
            f"M = {inducing}, groups of at most {size}; "
            + ("split 0" if args.splits == 1 else f"splits 0 to {args.splits - 1}, mean ± standard error")
        )
        heads = ("", "bound", "RMSE", "RMSE +", "log-lik.", "log-lik. +", "iterations", "ms", "ratio")
        keys = ("bound", "rmse", "rmse_local", "log_likelihood", "log_likelihood_local")
        table(
            heads,
            [
                (
                    conditional,
                    *(spread(r[key]) for key in keys),
                    spread(r["iterations"], 0),
                    f"{r['gradient_ms'][0]:.1f}",
                    f"{r['gradient_ratio'][0]:.2f}",
                )
                for conditional, r in results.items()
            ],
        )
    return report


def grouped_split(data, inducing: int, size: int, args: argparse.Namespace, timed: bool) -> dict[str, dict]:
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    groups = npgp.median_split(data.X_train, size)
    start = start_at(data.X_train, inducing, args.seed)
    figures, thetas = {}, {}
    for conditional in CONDITIONALS:
        fitted = fit(data, groups, conditional, start, args)
        thetas[conditional] = fitted.theta
        noise = float(np.exp(fitted.theta[X.shape[1] + 1]))
        posterior = condition(fitted.theta, X, y, groups, conditional, args.kernel)
        corrected = npgp.local_correction(posterior, X, y, npgp.Gaussian(noise), groups)
        plain = score(data.y_test, *predict(posterior, data.X_test), noise)
        local = score(data.y_test, *predict(corrected, data.X_test), noise)
        figures[conditional] = {
            "bound": fitted.bound,
            "rmse": plain.rmse,
            "log_likelihood": plain.log_likelihood,
            "rmse_local": local.rmse,
            "log_likelihood_local": local.log_likelihood,
            "noise_variance": noise,
            "iterations": fitted.iterations,
        }
    if timed:
        calls = {c: partial(loss_and_slope, thetas["tight"], X, y, groups, c, args.kernel) for c in CONDITIONALS}
        for conditional, (ms, ratio) in interleaved(calls, "tight", args.repetitions, clock(args)).items():
            figures[conditional].update(gradient_ms=ms, gradient_ratio=ratio)
    return figures


@partial(jax.jit, static_argnames=("mean_only", "conditional"))
def snelson_loss(theta, X, y, groups, mean_only: int, conditional: str):
    def loss(theta):
        lengthscale, variance, noise = jnp.exp(theta[:3])
        points = theta[3:, None]
        blocks = [points[: len(points) - mean_only], points[len(points) - mean_only :]][: 1 + (mean_only > 0)]
        return -npgp.CollapsedGP(
            npgp.RBF(lengthscale, variance),
            X,
            blocks,
            noise,
            conditional=conditional,  # type: ignore[arg-type]
            covariances=("dense", "prior")[: len(blocks)],
            jitter=SNELSON_JITTER,
            groups=groups,
        ).log_prob(y)

    return jax.value_and_grad(loss)(theta)


def snelson(args: argparse.Namespace) -> dict:
    """Bounds with five inducing points, by conditional."""
    inputs, targets, _ = datasets.snelson()
    X, y = jnp.asarray(inputs), jnp.asarray(targets)
    print("SNELSON'S DATA, 200 rows, squared-exponential kernel\n")
    note(
        "Bounds maximised over lengthscale, variance, noise and inducing inputs: from lengthscale = variance = noise "
        f"= 1 and random data points, and the best of that start and {args.restarts} random ones."
    )
    print()

    @jax.jit
    @jax.value_and_grad
    def evidence_loss(theta):
        lengthscale, variance, noise = jnp.exp(theta)
        return -npgp.exact_log_evidence(npgp.RBF(lengthscale, variance), X, y, noise)

    exact = -lbfgs(evidence_loss, np.zeros(3), 3, 200)[0]
    report: dict[str, Any] = {"exact": exact}
    cases = {"5 points": (0, 10), "5 points and 5 mean-only": (5, 25)}
    for title, (mean_only, size) in cases.items():
        rng = np.random.default_rng(args.seed)
        starts = []
        for i in range(args.restarts + 1):
            points = inputs[rng.choice(len(inputs), 5, replace=False), 0]
            hyper = np.zeros(3) if i == 0 else rng.normal(size=3)
            more = rng.choice(inputs[:, 0], mean_only, replace=False)
            starts.append(np.concatenate([hyper, points, more]))
        groups = npgp.median_split(inputs, size)
        rows, figures = [], {}
        for conditional in (*CONDITIONALS, "full"):
            part = groups if conditional == "grouped" else None
            loss = partial(snelson_loss, X=X, y=y, groups=part, mean_only=mean_only, conditional=conditional)
            fits = [lbfgs(loss, start, 3, 4 * args.iterations) for start in starts]
            value, theta, _ = min(fits, key=lambda f: f[0])
            lengthscale, variance, noise = map(float, np.exp(theta[:3]))
            figures[conditional] = {
                "first_start": -fits[0][0],
                "best": -value,
                "lengthscale": lengthscale,
                "variance": variance,
                "noise_variance": noise,
            }
            label = f"{conditional}, groups of at most {size}" if part is not None else conditional
            numbers = figures[conditional].values()
            rows.append((label, *(f"{v:.{2 if i < 2 else 3}f}" for i, v in enumerate(numbers))))
        report[title] = figures
        rows.append(("exact GP", "", f"{exact:.2f}", "", "", ""))
        table((title, "first start", "best", "lengthscale", "variance", "noise"), rows)
    return report


def steps(args: argparse.Namespace) -> list[dict]:
    """Time of a step of minibatch SVI, by number of inducing points and size of groups."""
    batch, sizes, group_sizes = (128, (16,), (16,)) if args.quick else (1024, (128, 256, 512), (8, 16, 32, 64))
    print("A STEP OF MINIBATCH SVI\n")
    note(
        f"numpyro's SVI with AutoSparseGP and Adam, float32, batches of {batch} rows with 8 columns, Matérn-3/2 with "
        "ARD; hyperparameters, inducing inputs and q(u) are all learned. Median milliseconds, and the ratio to tight."
    )
    print()
    report = []
    with jax.enable_x64(False):
        for inducing in sizes:
            calls = {c: svi_step(inducing, batch, c, 1) for c in ("prior", "tight")}
            calls |= {f"groups of {g}": svi_step(inducing, batch, "grouped", g) for g in group_sizes}
            measured = interleaved(calls, "tight", args.repetitions, clock(args))
            default = npgp.sparse.groups.default_size(inducing)
            report.append({"inducing": inducing, "default_size": default, "measured": {}})
            for name, (ms, ratio) in measured.items():
                report[-1]["measured"][name] = {"ms": ms, "ratio": ratio}
            print(f"M = {inducing}; the library's default size of groups is {default}")
            table(("", "ms", "ratio"), [(name, f"{ms:.1f}", f"{ratio:.2f}") for name, (ms, ratio) in measured.items()])
    return report


def svi_step(inducing: int, batch: int, conditional: str, size: int) -> Callable[[], Any]:
    """A compiled step on one batch, laid out group after group."""
    rng = np.random.default_rng(0)
    rows = 8 * batch
    X = rng.uniform(-1.7, 1.7, (rows, 8)).astype(np.float32)
    Z = X[rng.choice(rows, inducing, replace=False)]
    groups = npgp.median_split(X, size)
    # Numbers of rows are powers of two, so that groups are full and nothing is padded.
    assert groups.size == size
    x, mask = groups.arrange(X), groups.mask.ravel()
    y = np.sin(2.0 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * rng.normal(size=rows).astype(np.float32)
    is_grouped = conditional == "grouped"

    def model(x, y, mask):
        positive = constraints.softplus_positive
        lengthscale = numpyro.param("lengthscale", jnp.full(8, 2.0), constraint=positive)
        kernel = npgp.Matern32(lengthscale, numpyro.param("variance", 1.0, constraint=positive))
        noise = numpyro.param("noise_variance", 0.1, constraint=positive)
        f = npgp.SparseGP("f", kernel, numpyro.param("Z", jnp.asarray(Z))).draw()
        with npgp.plate("data", rows, rows=batch):
            npgp.observe(
                "y",
                f(x),
                npgp.Gaussian(noise),
                obs=y,
                mask=mask if is_grouped else None,
                conditional=conditional,  # type: ignore[arg-type]
                groups=size if is_grouped else None,
            )

    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), TraceMeanField_ELBO())
    arrays = [jnp.asarray(a[:batch]) for a in (x, y.astype(np.float32), mask)]
    state = jax.jit(svi.init)(jax.random.key(0), *arrays)
    step = jax.jit(lambda state: svi.update(state, *arrays))
    return lambda: step(state)


def table1(args: argparse.Namespace) -> dict:
    """The training-point term of the predictive variance: accuracy with and without it, and what it costs."""
    print("THE TRAINING-POINT TERM OF THE PREDICTIVE VARIANCE (Bui, Ashman & Turner 2025, table 1)\n")
    note(
        f"tight fits with M = {args.inducing} inducing points, {args.kernel} kernel with ARD, "
        + (f"splits 0 to {args.splits - 1}, mean ± standard error. " if args.splits > 1 else "split 0. ")
        + "The term makes the variance smaller and leaves the mean, so the RMSE, as it is. 'std' is the median "
        "predictive standard deviation, noise included. Cost: seconds for all test rows of split 0, with everything "
        "prepared, and the ratio."
    )
    print()
    report, rows = {}, []
    for name in [name for name in TABLE1 if args.sets is None or name in args.sets]:
        scores: dict[str, list[float]] = {
            key: [] for key in ("rmse", "log_likelihood", "rmse_exact", "log_likelihood_exact", "std", "std_exact")
        }
        cost: dict[str, tuple[float, float]] = {}
        for split in range(args.splits):
            data = load(name, split, args)
            X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
            fitted = fit(data, None, "tight", start_at(data.X_train, args.inducing, args.seed), args)
            noise = float(np.exp(fitted.theta[X.shape[1] + 1]))
            plain = condition(fitted.theta, X, y, None, "tight", args.kernel)
            exact = npgp.exact_variance(plain, X, y, npgp.Gaussian(noise))
            moments = predict(plain, data.X_test), predict(exact, data.X_test)
            for suffix, (mean, variance) in zip(("", "_exact"), moments, strict=True):
                result = score(data.y_test, mean, variance, noise)
                scores[f"rmse{suffix}"].append(result.rmse)
                scores[f"log_likelihood{suffix}"].append(result.log_likelihood)
                scores[f"std{suffix}"].append(float(np.sqrt(np.median(variance) + noise)))
            if split == 0:
                calls = {"without": partial(predict, plain, data.X_test), "with": partial(predict, exact, data.X_test)}
                repetitions = min(args.repetitions, max(2, int(2e4 / len(y))))
                cost = interleaved(calls, "without", repetitions, clock(args))
            del exact, moments
        report[name] = {
            "rows": len(y),
            "test_rows": len(data.y_test),
            "inducing": args.inducing,
            "splits": args.splits,
            **scores,
            "seconds": cost["without"][0] / 1e3,
            "seconds_exact": cost["with"][0] / 1e3,
            "cost_ratio": cost["with"][1],
        }
        figures = report[name]
        for label, suffix in (("without", ""), ("with", "_exact")):
            rows.append(
                (
                    name if not suffix else "",
                    str(len(y)) if not suffix else "",
                    label,
                    spread(scores[f"rmse{suffix}"]),
                    spread(scores[f"log_likelihood{suffix}"], 4),
                    f"{np.mean(scores[f'std{suffix}']):.4f}",
                    f"{figures[f'seconds{suffix}']:.4f}",
                    f"{figures['cost_ratio']:.0f}" if suffix else "1",
                )
            )
    table(("", "rows", "term", "RMSE", "log-likelihood", "std", "seconds", "ratio"), rows)
    return report


# ---------------------------------------------------------------------------------------------------------------


def plot_log_likelihoods(report: Mapping[str, Any]):
    """A panel for each set: test log-likelihood of each conditional, without and with the local correction."""
    from matplotlib import pyplot as plt

    from npgp.plots import COLOURS

    size = (max(6.4, 1.4 + 2.5 * len(report)), 2.7)
    figure, axes = plt.subplots(1, len(report), figsize=size, sharey=True, squeeze=False, layout="constrained")
    places = np.arange(len(CONDITIONALS))[::-1]
    for ax, (name, result) in zip(axes[0], report.items(), strict=True):
        for place, conditional, colour in zip(places, CONDITIONALS, COLOURS, strict=False):
            method = result["methods"][conditional]
            plain, local = (np.mean(method[key]) for key in ("log_likelihood", "log_likelihood_local"))
            ax.plot([plain, local], [place, place], color=colour, lw=1.2, zorder=1)
            ax.plot(plain, place, "o", ms=7, mec=colour, mfc="white", mew=1.5)
            ax.plot(local, place, "o", ms=7, color=colour)
        ax.set_title(f"{name}, M = {result['inducing']}", fontsize=10)
        ax.set_ylim(-0.6, len(CONDITIONALS) - 0.4)
        ax.margins(x=0.15)
        ax.locator_params(axis="x", nbins=4)
        ax.grid(axis="x", color="0.9", lw=0.7)
        ax.set_axisbelow(True)
    axes[0, 0].set_yticks(places, CONDITIONALS)
    figure.supxlabel("mean test log-likelihood per row, nats (higher is better)", fontsize=10)
    empty = plt.Line2D([], [], ls="", marker="o", ms=7, mec="0.3", mfc="white", mew=1.5)
    full = plt.Line2D([], [], ls="", marker="o", ms=7, color="0.3")
    labels = ["from the inducing points alone", "with the local correction"]
    figure.legend([empty, full], labels, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return figure


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    report: dict[str, Any] = {}
    with threadpool_limits(limits=1, user_api="blas"):
        for part in args.parts:
            report[part] = {"grouped": grouped, "snelson": snelson, "steps": steps, "table1": table1}[part](args)
    if report.get("grouped"):
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / "regression.png"
        plot_log_likelihoods(report["grouped"]).savefig(path, dpi=130)
        print(f"wrote {path}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {args.json}")
    return report


if __name__ == "__main__":
    main()
