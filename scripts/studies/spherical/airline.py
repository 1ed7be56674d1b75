#!/usr/bin/env python
"""Minibatch SVI on flight delays with the arc-cosine kernel: points, activations and orthogonal points against time.

SVGP, SOLVE-GP, activations (rectified linear units) and activations with orthogonal points, with M, 2M and M + M
features, in float32: a weight for each column, Gaussian noise, inducing inputs and directions, all learned at once by
Adam, in equally many steps for all, which are too few to reach the optimum. First blocks start at the centers of
k-means, or point there; second ones are chosen greedily given the first. The levels of activations are those that leave
least variance out at the start (``npgp.inducing.choose_levels``), or the first six of the sphere.

    NPGP_DATA=... python scripts/studies/spherical/airline.py --json out/airline.json    ten minutes or so on two cores
    NPGP_DATA=... python scripts/studies/spherical/airline.py --data hflights2011

Without the file in the folder named by ``NPGP_DATA``, flights are simulated.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot as plt
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import datasets
from npgp.inducing.levels import left_out
from npgp.plots import COLORS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import (
    Arguments,
    interleaved,
    one_blas_thread,
    quartiles,
    scores,
    table,
    whole,
    write_json,
    write_picture,
)
from studies.shared import learned


@dataclass(frozen=True)
class Method:
    """
    :param name: with M for the number of features.
    :param blocks: what each block is made of, and its size in multiples of M.
    :param levels: of activations; chosen at the start if None.
    """

    name: str
    blocks: tuple[tuple[str, int], ...]
    levels: tuple[int, ...] | None = None

    def title(self, M: int) -> str:
        sizes = " + ".join(str(multiple * M) for _, multiple in self.blocks)
        return f"{self.name}, {sizes}"


SIX = tuple(range(6))
METHODS = {
    "svgp": Method("SVGP", (("points", 1),)),
    "svgp2": Method("SVGP", (("points", 2),)),
    "solve": Method("SOLVE-GP", (("points", 1), ("points", 1))),
    "activated": Method("activated", (("activations", 1),)),
    "activated2": Method("activated", (("activations", 2),)),
    "activated+points": Method("activated + points", (("activations", 1), ("points", 1))),
    "six+points": Method("activated, six levels, + points", (("activations", 1), ("points", 1)), SIX),
}
#: Start of the noise variance, for a standardized target; weights start at 1/D, the bias at 1.
NOISE_VARIANCE = 0.5
#: Rows that inducing inputs are chosen from, and rows that the share of variance left out is a mean over.
CANDIDATES, PROBES = 10_000, 1000
#: Test rows at a time.
CHUNK = 2048
#: Turns in which the steps of all methods are timed.
TURNS = 12
NOTE = (
    "RMSE and NLPD, the mean negative log predictive density, are of test rows; NLPD in minutes is that of the delay "
    "itself. left out: the mean share of prior variance that the features leave out, at the start and at the end. "
    "ELBO per row: mean over the last tenth of the steps' batches. A step's time is a median over turns of all methods."
)


HEADS = ("method", "levels", "left out", "ms a step", "seconds", "ELBO per row", "RMSE", "NLPD", "RMSE min", "NLPD min")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--data", choices=["airline2008_subset", "hflights2011"], default="airline2008_subset")
    add("--methods", choices=list(METHODS), nargs="+", default=list(METHODS))
    add("--features", type=whole, default=500, help="M")
    add("--evaluations", type=whole, default=6, help="of the test rows, during training")
    add("--small", action="store_true", help="few rows, features and steps")
    rows = dict(help="so many training rows, and test rows, drawn at random")
    json = dict(help="write the figures to this file, after every method")
    parser.shared("seed", "out", rows=rows, steps=250, batch_size=1024, learning_rate=0.03, json=json)
    args = parser.read(argv)
    if args.small:
        args.features, args.rows, args.steps, args.batch_size, args.evaluations = 12, 600, 40, 128, 2
    if args.steps < args.evaluations:
        parser.error("--evaluations must be between 1 and the steps.")
    return args


# ---------------------------------------------------------------------------------------------------------------
# Data


class Flights(NamedTuple):
    """
    Training and test rows, standardized by the training rows, in float32.

    :param spread: standard deviation of the training rows' delays in minutes.
    """

    title: str
    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    spread: float


def load(name: str, rows: int | None, seed: int) -> Flights:
    try:
        data = datasets.load(name)
        title, X, y, test = name, data["X"], data["y"], data["test_mask"]
    except FileNotFoundError:
        title, X, y, test = simulate(6000, seed)
    order = np.random.default_rng(seed).permutation(len(y))  # the file's is that of time
    train, test = (order[test[order] == side][:rows] for side in (False, True))
    X, y, X_test, y_test = X[train], y[train], X[test], y[test]
    center, scale = X.mean(axis=0), X.std(axis=0)
    arrays = ((X - center) / scale, (y - y.mean()) / y.std(), (X_test - center) / scale, (y_test - y.mean()) / y.std())
    return Flights(title, *(a.astype(np.float32) for a in arrays), float(y.std()))


def simulate(rows: int, seed: int) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Flights of 8 columns whose delays grow through the day and are noisy, with heavy tails; a third to test."""
    rng = np.random.default_rng(seed)
    month, day, weekday = rng.integers(1, 13, rows), rng.integers(1, 32, rows), rng.integers(1, 8, rows)
    distance = rng.gamma(2.0, 350.0, rows) + 80.0
    in_air = 18.0 + distance / 7.5 + rng.normal(0.0, 8.0, rows)
    departure, age = rng.uniform(330.0, 1350.0, rows), rng.uniform(0.0, 25.0, rows)
    arrival = np.mod(departure + in_air + 20.0, 1440.0)
    X = np.stack([month, day, weekday, departure, arrival, in_air, distance, age], axis=1)
    y = 12.0 * np.square(departure / 1000.0) + 6.0 * np.cos(0.5 * month) + 0.8 * (in_air - 18.0 - distance / 7.5) - 8.0
    y = y + 9.0 * rng.standard_t(3.0, rows)
    return "simulated flights, as the file was not found", X, y, rng.random(rows) < 1 / 3


def baselines(data: Flights) -> dict[str, list[float]]:
    """RMSE and NLPD of a constant, and of linear regression, with Gaussian noise."""
    designs = [(np.ones((len(X), 1)), np.c_[np.ones(len(X)), X]) for X in (data.X, data.X_test)]
    figures = {}
    for name, train, test in zip(("constant", "linear"), *designs, strict=True):
        weights = np.linalg.lstsq(train, data.y, rcond=None)[0]
        figures[name] = list(scores(test @ weights, np.mean(np.square(data.y - train @ weights)), data.y_test))
    return figures


# ---------------------------------------------------------------------------------------------------------------
# One method


def arc_cosine(params) -> npgp.kernels.ZonalArcCosine:
    """Its variance stays at 1: weights and bias have its scale already."""
    return npgp.kernels.ZonalArcCosine(weight_variance=params["weights"], bias_variance=params["bias"])


class Run:
    """
    The model of one method and what came of training it.

    :param starts: for each k-means, its centers, shared by the methods; filled when needed.
    """

    def __init__(self, method: Method, data: Flights, starts: dict[int, np.ndarray], args: argparse.Namespace):
        self.method, self.data, self.args = method, data, args
        columns = data.X.shape[1]
        self.start: dict[str, Any] = {
            "weights": jnp.full(columns, 1.0 / columns),
            "bias": jnp.ones(()),
            "noise": jnp.asarray(NOISE_VARIANCE),
        }
        rng = np.random.default_rng(args.seed)
        candidates = data.X[rng.permutation(len(data.X))[:CANDIDATES]]
        self.probes = jnp.asarray(candidates[:PROBES])
        self.levels, self.tried = method.levels, {}
        kernel = arc_cosine(self.start)
        for i, (kind, multiple) in enumerate(method.blocks):
            size = multiple * args.features
            if i:
                given = self.features(self.start, i)
                Z = npgp.inducing.greedy_variance(kernel, candidates, size, given=given)
            else:
                if size not in starts:
                    starts[size] = np.asarray(npgp.inducing.kmeans(jax.random.key(args.seed), candidates, size))
                Z = jnp.asarray(starts[size])
            if kind == "activations":
                # As long as weighted inputs are: a step of Adam then turns directions as much as it moves points.
                Z = np.sqrt(2.0 * columns) * kernel.polar(Z)[1]
            self.start[f"inducing{i}"] = Z
            if kind == "activations" and self.levels is None:
                choice = npgp.inducing.choose_levels(
                    kernel, npgp.features.Activations(self.start[f"inducing{i}"]), self.probes
                )
                self.levels, self.tried = choice.block.levels, choice.left_out

        self.svi = SVI(
            self.model,
            npgp.AutoSparseGP(self.model),
            npgp.adam(args.learning_rate, args.steps),
            TraceMeanField_ELBO(),
            size=len(data.y),
        )
        self._predict = jax.jit(self._moments)
        self._left_out = jax.jit(lambda params: left_out(arc_cosine(params), self.features(params), self.probes))

    def features(self, params, blocks: int | None = None) -> list:
        """The first so many inducing blocks, or all."""
        return [
            npgp.features.Activations(params[f"inducing{i}"], levels=self.levels)
            if kind == "activations"
            else npgp.features.Points(params[f"inducing{i}"])
            for i, (kind, _) in enumerate(self.method.blocks[:blocks])
        ]

    def component(self, params) -> npgp.SparseGP:
        return npgp.SparseGP("f", arc_cosine(params), self.features(params))

    def model(self, X, y=None, *, size):
        params = learned(self.start)
        f = self.component(params).draw()
        with npgp.plate("data", size, rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=params["noise"]), obs=y)

    def _moments(self, params, X):
        mean, variance = self.component(params).posterior(params).mean_and_variance(X, CHUNK)
        return mean, variance + params["noise"]

    def left_out(self, params) -> float:
        return float(self._left_out({name: params[name] for name in self.start}))

    def step(self) -> Callable[[], Any]:
        """One step from the start, compiled: to be timed."""
        size = min(self.args.batch_size, len(self.data.y))
        X, y = self.data.X[:size], self.data.y[:size]
        state = self.svi.init(jax.random.key(0), X, y)
        compiled = jax.jit(self.svi.update).lower(state, X, y).compile()
        return lambda: jax.block_until_ready(compiled(state, X, y))

    def train(self) -> dict[str, Any]:
        """Steps and evaluations in turn; the figures."""
        args, data = self.args, self.data
        first = max(args.steps // 50, 1)
        stops = np.unique(np.geomspace(first, args.steps, args.evaluations).round().astype(int)).tolist()
        state, done, losses, curve, seconds = None, 0, [], [], 0.0
        for stop in stops:
            began = time.perf_counter()
            result = npgp.fit(
                self.svi,
                jax.random.key(args.seed),
                stop - done,
                data.X,
                data.y,
                batch_size=min(args.batch_size, len(data.y)),
                init_state=state,
                progress=False,
            )
            seconds += time.perf_counter() - began
            state, done = result.state, stop
            losses.append(result.losses)
            rmse, nlpd = scores(*self._predict(result.params, data.X_test), data.y_test)
            curve.append({"step": stop, "rmse": rmse, "nlpd": nlpd})
        elbo = -np.concatenate(losses) / len(data.y)
        params = result.params
        fit = {
            "method": self.method.title(args.features),
            "levels": None if self.levels is None else list(self.levels),
            "left_out_by_highest_level": self.tried,
            "left_out": [self.left_out(self.start), self.left_out(params)],
            "curve": curve,
            "rmse": rmse,
            "nlpd": nlpd,
            "rmse_minutes": rmse * data.spread,
            "nlpd_minutes": nlpd + float(np.log(data.spread)),
            "elbo_per_row": float(np.mean(elbo[-max(args.steps // 10, 1) :])),
            "seconds_with_compilation": seconds,
            "weights": np.asarray(params["weights"]).tolist(),
            "bias": float(params["bias"]),
            "noise": float(params["noise"]),
        }
        bad = [key for key in ("rmse", "nlpd", "elbo_per_row", "left_out") if not np.all(np.isfinite(fit[key]))]
        if bad:
            raise FloatingPointError(f"{fit['method']}: not finite are {', '.join(bad)}.")
        return fit


# ---------------------------------------------------------------------------------------------------------------
# What people look at


def line(fit: dict) -> list[str]:
    """A line of the table."""
    levels = "" if fit["levels"] is None else f"to {fit['levels'][-1]}"
    shares = " → ".join(f"{share:.4f}" for share in fit["left_out"])
    times = [f"{1e3 * fit['step_seconds'][1]:.0f}", f"{fit['curve'][-1]['seconds']:.0f}"]
    figures = [f"{fit[key]:.4f}" for key in ("elbo_per_row", "rmse", "nlpd")]
    return [fit["method"], levels, shares, *times, *figures, f"{fit['rmse_minutes']:.2f}", f"{fit['nlpd_minutes']:.4f}"]


def draw(fits: Sequence[dict], title: str):
    """RMSE and NLPD of test rows against seconds of steps."""
    figure, axes = plt.subplots(1, 2, figsize=(11.6, 4.6), layout="constrained")
    styles = ("-o", "--s", ":^", "-.D")
    for ax, key in zip(axes, ("rmse", "nlpd"), strict=True):
        values = []
        for i, fit in enumerate(fits):
            seconds = [point["seconds"] for point in fit["curve"]]
            values += [point[key] for point in fit["curve"][1:]]
            style, color = styles[i // len(COLORS) % len(styles)], COLORS[i % len(COLORS)]
            ax.plot(seconds, [p[key] for p in fit["curve"]], style, color=color, ms=4, lw=1.3, label=fit["method"])
        margin = max(0.06 * (max(values) - min(values)), 1e-3)
        ax.set_ylim(min(values) - margin, max(values) + margin)  # the first may be far above
        ax.set_xscale("log")
        ax.set_xlabel("seconds of steps")
    axes[0].set_ylabel("test RMSE (standardized delay)")
    axes[1].set_ylabel("test NLPD (nats, standardized delay)")
    figure.suptitle(title, fontsize=11)
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=9, ncols=4, loc="outside lower center")
    return figure


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", False)
    data = load(args.data, args.rows, args.seed)
    print(f"{data.title}: {len(data.y)} training rows, {len(data.y_test)} test rows, spread {data.spread:.2f} minutes")
    settings = {key: getattr(args, key) for key in ("features", "steps", "batch_size", "learning_rate", "seed")}
    report: dict[str, Any] = {"data": data.title, "rows": [len(data.y), len(data.y_test)], "spread": data.spread}
    report |= settings | {"baselines": baselines(data), "fits": []}
    for name, (rmse, nlpd) in report["baselines"].items():
        print(f"{name}: RMSE {rmse:.4f} ({rmse * data.spread:.2f} minutes), NLPD {nlpd:.4f}")

    starts: dict[int, np.ndarray] = {}
    runs = {name: Run(METHODS[name], data, starts, args) for name in args.methods}
    with one_blas_thread():
        steps = {name: run.step() for name, run in runs.items()}
        seconds = interleaved(steps, 2 if args.small else TURNS, seed=args.seed)
    timed = {name: quartiles(each) for name, each in seconds.items()}
    for name, run in runs.items():
        low, median, high = (1e3 * s for s in timed[name])
        print(f"{run.method.title(args.features)}: {median:.1f} ms a step ({low:.1f} to {high:.1f})", flush=True)
    for name, run in runs.items():
        fit = run.train()
        fit["step_seconds"] = timed[name]
        for point in fit["curve"]:
            point["seconds"] = point["step"] * timed[name][1]
        report["fits"].append(fit)
        print(f"{fit['method']}: RMSE {fit['rmse']:.4f}, NLPD {fit['nlpd']:.4f}", flush=True)
        write_json(args.json, report, say=False)
    print(f"\n{table(HEADS, map(line, report['fits']))}\n{NOTE}")
    path = args.out / f"{args.data if data.title == args.data else 'simulated'}_time.png"
    title = f"{data.title}, {args.steps} steps of {args.batch_size} rows, float32"
    write_picture(path, draw(report["fits"], title))
    return report


if __name__ == "__main__":
    main()
