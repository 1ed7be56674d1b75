"""Spherical features and orthogonal points: UCI sets, Snelson's data, and flights."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO

import common
import npgp
import npgp.inducing
from common import clock, interleaved, moments, plus_minus, table
from npgp import datasets
from npgp.features import Activations, Points, ReLU, Softplus
from npgp.inducing.levels import choose_levels, left_out
from npgp.kernels import Kernel, ZonalArcCosine, ZonalMatern52, gegenbauer
from studies.fits import lbfgs, learned, maximum, uci
from studies.runner import Records, Study

SETS = {"yacht": "yacht_raw", "energy": "energy", "concrete": "concrete", "kin8nm": "kin8nm", "power": "power"}
FEATURES = ("relu", "softplus", "points")
#: Logs of weights, bias, noise variance and lengthscale stay within these.
LOG_BOUNDS = (-12.0, 8.0)
#: The highest level that is tried; and rows that variance is left out of.
HIGHEST, LEVEL_ROWS = 6, 500
#: Coefficients of activations below this, relative to the largest, are rounding error.
ABSENT = 1e-6
#: Tables 3 and 4 of Tiao, Dutordoir & Picheny 2023: means and spreads over five repetitions.
PUBLISHED = Path(__file__).with_name("tiao2023_tables_3_4.json")


def sizes(size: int) -> dict[str, tuple[int, ...]]:
    """The blocks of each column of the tables, by its name."""
    return {str(size): (size,), f"{size}+{size}": (size, size), str(2 * size): (2 * size,)}


class Model(NamedTuple):
    """
    What a compiled bound depends on, other than arrays, at a vector: logs of D weights, bias, noise variance (and
    lengthscale), then blocks row by row.
    """

    kernel: str
    feature: str
    blocks: tuple[int, ...]
    levels: tuple[int, ...] = ()
    conditional: str = "prior"

    def logs(self, columns: int) -> int:
        """How many logs of hyperparameters there are."""
        return columns + 2 + (self.kernel == "matern52")

    def kernel_at(self, theta, columns: int) -> Kernel:
        hyper = jnp.exp(theta[: self.logs(columns)])
        weights, bias = hyper[:columns], hyper[columns]
        if self.kernel == "arccos":
            return ZonalArcCosine(weight_variance=weights, bias_variance=bias)
        return ZonalMatern52(hyper[-1], weight_variance=weights, bias_variance=bias)

    def blocks_at(self, theta, columns: int) -> list[Points | Activations]:
        width = columns + (self.feature != "points")
        end = self.logs(columns) + self.blocks[0] * width
        first = theta[self.logs(columns) : end].reshape(-1, width)
        if self.feature == "points":
            blocks: list[Points | Activations] = [Points(first)]
        else:
            blocks = [Activations(first, ReLU() if self.feature == "relu" else Softplus(), self.levels)]
        return blocks + [Points(theta[end:].reshape(-1, columns))][: len(self.blocks) - 1]

    def gp(self, theta, X) -> npgp.CollapsedGP:
        columns = X.shape[1]
        return npgp.CollapsedGP(
            self.kernel_at(theta, columns),
            X,
            self.blocks_at(theta, columns),
            noise_variance=jnp.exp(theta[columns + 1]),
            conditional=self.conditional,  # type: ignore[arg-type]
            covariances=("dense",) * len(self.blocks),
        )

    def rows_at(self, theta, points: np.ndarray) -> np.ndarray:
        """Points as rows of the first block: themselves, or as directions."""
        if self.feature == "points":
            return points
        return np.asarray(self.kernel_at(theta, points.shape[1]).polar(points)[1])  # type: ignore[attr-defined]


@partial(jax.jit, static_argnames="model")
def loss_and_slope(theta, X, y, model: Model):
    """The negative bound for each row, and its gradient."""
    return jax.value_and_grad(lambda t: -model.gp(t, X).log_prob(y) / len(y))(theta)


@partial(jax.jit, static_argnames="model")
def bound(theta, X, y, model: Model):
    """The bound for each row."""
    return model.gp(theta, X).log_prob(y) / len(y)


@partial(jax.jit, static_argnames="model")
def predict(theta, X, y, X_test, model: Model):
    """Mean and variance of y at test inputs; and the share of f's variance that the features leave out of rows of X."""
    gp = model.gp(theta, X)
    mean, variance = gp.condition(y).mean_and_variance(X_test)
    return mean, variance + gp.noise_variance, left_out(gp.kernel, gp.blocks, X)


# ---------------------------------------------------------------------------------------------------------------
# UCI sets


def fit(data, model: Model, start: np.ndarray, iterations: int) -> tuple[np.ndarray, dict]:
    """The vector at the optimum, and what is reported of it, in the target's own units."""
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    began = time.perf_counter()
    loss = partial(loss_and_slope, X=X, y=y, model=model)
    optimum = lbfgs(loss, start, iterations, model.logs(X.shape[1]), LOG_BOUNDS, ftol=1e-11, maxcor=20)
    mean, variance, share = predict(optimum.x, X, y, jnp.asarray(data.X_test), model)
    rmse, nlpd = common.scores(mean, variance, data.y_test)
    return optimum.x, {
        "rmse": data.y_scale * rmse,
        "nlpd": math.log(data.y_scale) + nlpd,
        "bound": -float(optimum.fun),
        "left_out": float(share),
        "levels": list(model.levels),
        "iterations": int(optimum.nit),
        "seconds": time.perf_counter() - began,
    }


def first_start(data, model: Model, Z: np.ndarray) -> np.ndarray:
    """The vector with a first block at Z, and of a few hyperparameters those with the best bound."""
    columns = Z.shape[1]
    lengthscales = [()] if model.kernel == "arccos" else [(math.log(0.5),), (math.log(1.5),)]
    tried = []
    for weight, noise, scale in itertools.product((0.1, 0.3, 1.0, 3.0), (0.01, 0.1, 0.5), lengthscales):
        logs = np.concatenate([np.full(columns, math.log(weight / columns)), [0.0, math.log(noise), *scale]])
        tried.append(np.concatenate([logs, model.rows_at(logs, Z).ravel()]))
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    return tried[int(np.nanargmax([float(bound(theta, X, y, model)) for theta in tried]))]


def present(model: Model, theta, columns: int, highest: int) -> list[int]:
    """The levels up to the highest that kernel and activation have in common."""
    units: Any = model._replace(levels=tuple(range(highest + 1))).blocks_at(theta, columns)[0]
    profile = np.abs(np.asarray(units.profile(model.kernel_at(theta, columns))))
    return [level for level in units.levels if profile[level] > ABSENT * np.max(profile)]


def candidates(model: Model, theta: np.ndarray, data, rule: str) -> list[Model]:
    """The model with the levels that the rule allows its activations; the kernel and directions are those of theta."""
    if model.feature == "points":
        return [model]
    columns = data.X_train.shape[1]
    kernel: Any = model.kernel_at(theta, columns)
    if rule.isdigit():
        tried = tuple(range(int(rule)))
        has = np.asarray(kernel.level_variances(tried, columns + 1)) > 0
        return [model._replace(levels=tuple(level for level in tried if has[level]))]
    if rule == "left-out":
        units: Any = model._replace(levels=tuple(range(HIGHEST + 1))).blocks_at(theta, columns)[0]
        rows = np.random.default_rng(0).permutation(len(data.y_train))[:LEVEL_ROWS]
        return [
            model._replace(
                levels=choose_levels(kernel, units, jnp.asarray(data.X_train[rows]), most=HIGHEST).block.levels
            )
        ]
    levels = present(model, theta, columns, HIGHEST)
    return [model._replace(levels=tuple(levels[: i + 1])) for i in range(1, len(levels))]


def best(models: Sequence[Model], starts: Sequence[np.ndarray], data, iterations: int) -> int:
    """Which of several models has the best bound after a quarter of the iterations."""
    if len(models) == 1:
        return 0
    quarter = max(iterations // 4, 1)
    return int(np.argmax([fit(data, *pair, quarter)[1]["bound"] for pair in zip(models, starts, strict=True)]))


#: Levels of each column by set, kernel and feature: chosen on the first split.
_LEVELS: dict[tuple, dict[str, tuple[int, ...]]] = {}


def three_sizes(args: argparse.Namespace, set: str, kernel: str, feature: str, split: int) -> Records:
    """M features, M with M orthogonal points, and 2M features."""
    if (set, kernel, feature) not in _LEVELS and split != 0:
        three_sizes(args, set, kernel, feature, 0)
    levels = _LEVELS.setdefault((set, kernel, feature), {})
    data = uci(SETS.get(set, set), split, args.rows, split, args.rows and max(args.rows // 4, 1))
    (alone, both, double), columns = sizes(args.size), data.X_train.shape[1]
    Z = np.asarray(npgp.inducing.kmeans(jax.random.key(0), jnp.asarray(data.X_train), args.size))
    model = Model(kernel, feature, (args.size,), levels.get(alone, ()), args.conditional)
    if feature == "points" or alone in levels:
        start = first_start(data, model, Z)
    else:
        logs = first_start(data, model._replace(feature="points"), Z)[: model.logs(columns)]
        at = np.concatenate([logs, model.rows_at(logs, Z).ravel()])
        models = candidates(model, at, data, args.levels)
        starts = [first_start(data, model, Z) for model in models]
        chosen = best(models, starts, data, args.iterations)
        model, start = models[chosen], starts[chosen]
    theta, report = fit(data, model, start, args.iterations)
    reports = {alone: report}

    fitted, first = model.kernel_at(theta, columns), model.blocks_at(theta, columns)
    new = np.asarray(npgp.inducing.greedy_variance(fitted, jnp.asarray(data.X_train), args.size, given=first))
    logs, units = theta[: model.logs(columns)], theta[model.logs(columns) :].reshape(args.size, -1)
    if feature != "points":  # as long as the new ones
        units = units / np.linalg.norm(units, axis=1, keepdims=True)
    theta = np.concatenate([logs, units.ravel()])
    second = model._replace(blocks=(args.size, args.size))
    _, reports[both] = fit(data, second, np.concatenate([theta, new.ravel()]), args.iterations)

    start, larger = np.concatenate([theta, model.rows_at(theta, new).ravel()]), model._replace(blocks=(2 * args.size,))
    if double in levels:
        larger = larger._replace(levels=levels[double])
    else:
        models = candidates(larger, start, data, args.levels)
        larger = models[best(models, [start] * len(models), data, args.iterations)]
    _, reports[double] = fit(data, larger, start, args.iterations)
    for column, used in zip((alone, both, double), (model, model, larger), strict=True):
        levels.setdefault(column, used.levels)
    return [{"column": column} | report for column, report in reports.items()]


def against_the_paper(records: Records, markdown: bool) -> str:
    """Ours beside the published numbers, how many are worse, and whether orthogonal points gain over more features."""
    published, cells = json.loads(PUBLISHED.read_text()), {}
    for record in records:
        key = record["set"], record["kernel"], record["feature"]
        cells.setdefault(key, {}).setdefault(record["column"], {})[record["split"]] = record
    lines, text, counted, behind = [], [], 0, 0
    for key, columns in cells.items():
        for column, of in columns.items():
            theirs = published
            for word in (*key, column):
                theirs = theirs.get(word, {})
            for metric in theirs:
                ours = moments(r[metric] for r in of.values())
                worse = ours[0] - theirs[metric][0] > 2.0 * math.hypot(ours[1] or 0.0, theirs[metric][1]) + 0.005
                counted, behind = counted + 1, behind + worse
                mark = "worse" if worse else ""
                lines.append([*key, column, metric, plus_minus(*ours), plus_minus(*theirs[metric]), mark])
        _, both, double = columns
        gains = [columns[double][i]["nlpd"] - columns[both][i]["nlpd"] for i in columns[both] if i in columns[double]]
        if key[2] != "points":
            text.append(f"{', '.join(key)}: {both} over {double} by {plus_minus(*moments(gains), 4)} nats of NLPD")
    if lines:
        heads = ("set", "kernel", "features", "column", "", "ours", "published", "")
        text.insert(0, table(heads, lines, left=(0, 1, 2, 3, 4, 7), markdown=markdown))
        text.insert(1, f"{behind} of {counted} are worse than published by more than two standard errors.")
    return "\n\n".join(text)


# ---------------------------------------------------------------------------------------------------------------
# Snelson's data: levels and orthogonal points


def snelson_start(model: Model, logs: np.ndarray, X: np.ndarray, seed: int) -> np.ndarray:
    """Random rows as points or directions: of the same seed, a larger model has those of a smaller one and others."""
    rng = np.random.default_rng(seed)
    rows = X[rng.permutation(len(X))[: sum(model.blocks)]]
    first, second = np.split(rows, [model.blocks[0]])
    logs = logs + (seed > 0) * rng.normal(size=len(logs))
    return np.concatenate([logs, model.rows_at(logs, first).ravel(), second.ravel()])


def throughputs(models, logs, X, y, args: argparse.Namespace) -> dict[Model, np.ndarray]:
    """Evaluations per second of each bound with its gradient, in each turn."""
    theta = {model: snelson_start(model, logs, X, 0) for model in models}
    calls = {m: partial(loss_and_slope, theta[m], jnp.asarray(X), jnp.asarray(y), model=m) for m in theta}
    return {m: 1.0 / s for m, s in interleaved(calls, args.repetitions, clock(args.cpu_time), args.seed).items()}


@lru_cache(maxsize=1)
def standardized() -> tuple[np.ndarray, np.ndarray]:
    X, y, _ = datasets.snelson()
    return (X - X.mean()) / X.std(), (y - y.mean()) / y.std()


def snelson_levels(args: argparse.Namespace, units: str) -> Records:
    X, y = standardized()
    points = Model(args.kernel, "points", (1,), conditional=args.conditional)
    num_logs, options = points.logs(1), dict(limits=LOG_BOUNDS, maxcor=20)

    @jax.jit
    @jax.value_and_grad
    def exact(theta):
        return npgp.exact_log_evidence(points.kernel_at(theta, 1), X, y, noise_variance=jnp.exp(theta[2]))

    rng = np.random.default_rng(args.seed)
    evidence, logs = maximum(exact, rng.normal(size=(4, num_logs)), 1000, num_logs, **options)
    found: Records = [{"M": 0, "first": "exact evidence", "column": "", "bound": evidence}]
    around = [snelson_start(points._replace(blocks=(0,)), logs, X, seed) for seed in range(args.starts)]
    kinds = {"points": points}
    for number in (args.fewer, args.more):
        of_units = points._replace(feature=units)
        of_units = of_units._replace(
            levels=tuple(present(of_units._replace(blocks=(1,)), jnp.asarray([*logs, 1.0, 0.0]), 1, number - 1))
        )
        kinds[f"{number} levels"] = of_units
        block = npgp.features.SphericalHarmonics(of_units.levels, 2)

        @jax.jit
        @jax.value_and_grad
        def all_of_them(theta, block=block):
            kernel, noise = points.kernel_at(theta, 1), jnp.exp(theta[2])
            return npgp.CollapsedGP(kernel, X, block, noise_variance=noise, conditional=args.conditional).log_prob(y)

        value, _ = maximum(all_of_them, around, args.iterations, num_logs, **options)
        count = int(np.sum(gegenbauer.multiplicities(2, of_units.levels)))
        found.append({"M": count, "first": f"harmonics of {number} levels", "column": "", "bound": value})

    cells = {
        (M, kind, column): model._replace(blocks=blocks)
        for M in (*args.sizes, args.timed)
        for kind, model in kinds.items()
        for column, blocks in sizes(M).items()
    }
    fitted = dict.fromkeys(model for (M, *_), model in cells.items() if M in args.sizes)  # 2M may be another M
    bounds: dict[Model, float] = {}
    for model in fitted:

        def objective(theta, model=model):
            value, slope = loss_and_slope(theta, X, y, model)
            return -value, -slope

        starts = [snelson_start(model, logs, X, seed) for seed in range(args.starts)]
        bounds[model] = len(y) * maximum(objective, starts, args.iterations, num_logs, **options)[0]
    moved = 0.01 * np.random.default_rng(args.seed).normal(size=(args.rows, 1))
    rows = np.arange(args.rows) % len(y)
    many = throughputs(dict.fromkeys(cells.values()), logs, X[rows] + moved, y[rows], args)
    timings = {"few": throughputs(fitted, logs, X, y, args), "many": many}
    names = ("M", "M + M points", "2M")
    for (M, kind, column), model in cells.items():
        record: dict[str, Any] = {"M": M, "first": kind, "column": names[list(sizes(M)).index(column)]}
        record["bound"] = bounds.get(model)
        base = cells[M, "points", str(2 * M)]
        for name, speed in timings.items():
            record[name] = float(np.median(speed[model] / speed[base])) if model in speed else None
        found.append(record)
    return found


# ---------------------------------------------------------------------------------------------------------------
# Flights


class Flights(NamedTuple):
    """
    Training and test rows, standardized by the training rows, in float32.

    :param spread: standard deviation of the training rows' delays in minutes.
    """

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    spread: float


SIX = tuple(range(6))
#: What each block is made of, its size in multiples of M, and levels of activations; chosen at the start if None.
FLIGHT_METHODS: dict[str, tuple[tuple[tuple[str, int], ...], tuple[int, ...] | None]] = {
    "SVGP, M": ((("points", 1),), None),
    "SVGP, 2M": ((("points", 2),), None),
    "SOLVE-GP, M + M": ((("points", 1), ("points", 1)), None),
    "activated, M": ((("activations", 1),), None),
    "activated, 2M": ((("activations", 2),), None),
    "activated + points, M + M": ((("activations", 1), ("points", 1)), None),
    "activated, six levels, + points, M + M": ((("activations", 1), ("points", 1)), SIX),
}


@lru_cache(maxsize=1)
def flights(name: str, rows: int | None, seed: int) -> Flights:
    data = datasets.load(name)
    X, y, test = data["X"], data["y"], data["test_mask"]
    order = np.random.default_rng(seed).permutation(len(y))  # the file's is that of time
    train, test = (order[test[order] == side][:rows] for side in (False, True))
    X, y, X_test, y_test = X[train], y[train], X[test], y[test]
    center, scale = X.mean(axis=0), X.std(axis=0)
    arrays = ((X - center) / scale, (y - y.mean()) / y.std(), (X_test - center) / scale, (y_test - y.mean()) / y.std())
    return Flights(*(a.astype(np.float32) for a in arrays), float(y.std()))


def flight_scores(data: Flights, mean, variance) -> dict[str, float]:
    rmse, nlpd = common.scores(mean, variance, data.y_test)
    minutes = {"rmse_minutes": rmse * data.spread, "nlpd_minutes": nlpd + float(np.log(data.spread))}
    return {"rmse": rmse, "nlpd": nlpd} | minutes


def airline(args: argparse.Namespace, method: str) -> dict[str, Any]:
    data = flights(args.data, args.rows, args.seed)
    if method in ("constant", "linear"):
        ones = [np.ones((len(X), 1)) for X in (data.X, data.X_test)]
        train, test = (
            ones
            if method == "constant"
            else (np.c_[one, X] for one, X in zip(ones, (data.X, data.X_test), strict=True))
        )
        weights = np.linalg.lstsq(train, data.y, rcond=None)[0]
        return flight_scores(data, test @ weights, np.mean(np.square(data.y - train @ weights)))
    (blocks, levels), columns = FLIGHT_METHODS[method], data.X.shape[1]
    start: dict[str, Any] = {
        "weights": jnp.full(columns, 1.0 / columns),
        "bias": jnp.ones(()),
        "noise": jnp.asarray(0.5),
    }
    candidates = data.X[np.random.default_rng(args.seed).permutation(len(data.X))[:10_000]]

    def arc_cosine(params):  # its variance stays at 1: weights and bias have its scale already
        return ZonalArcCosine(weight_variance=params["weights"], bias_variance=params["bias"])

    def features(params, number: int | None = None) -> list:
        made = {"points": Points, "activations": partial(Activations, levels=levels)}
        return [made[kind](params[f"inducing{i}"]) for i, (kind, _) in enumerate(blocks[:number])]

    for i, (kind, multiple) in enumerate(blocks):
        size, kernel = multiple * args.features, arc_cosine(start)
        if i:
            Z = npgp.inducing.greedy_variance(kernel, candidates, size, given=features(start, i))
        else:
            Z = npgp.inducing.kmeans(jax.random.key(args.seed), candidates, size)
        if kind == "activations":
            # As long as weighted inputs are: a step of Adam then turns directions as much as it moves points.
            Z = np.sqrt(2.0 * columns) * kernel.polar(jnp.asarray(Z))[1]
        start[f"inducing{i}"] = jnp.asarray(Z)
        if kind == "activations" and levels is None:
            levels = choose_levels(
                kernel, Activations(start[f"inducing{i}"]), jnp.asarray(candidates[:1000])
            ).block.levels

    def component(params) -> npgp.SparseGP:
        return npgp.SparseGP("f", arc_cosine(params), features(params))

    def model(X, y=None):
        params = learned(start)
        f = component(params).draw()
        with npgp.plate("data", len(data.y), rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=params["noise"]), obs=y)

    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
    how = dict(batch_size=min(args.batch_size, len(data.y)), progress=False)
    result = npgp.fit(svi, jax.random.key(args.seed), args.steps, data.X, data.y, **how)
    params = result.params
    moments_of = jax.jit(lambda params, X: component(params).posterior(params).mean_and_variance(X, 2048))
    mean, variance = moments_of(params, data.X_test)
    elbo = -float(np.mean(result.losses[-max(args.steps // 10, 1) :])) / len(data.y)
    found = flight_scores(data, mean, np.asarray(variance) + float(params["noise"]))
    return found | {"elbo": elbo, "levels": levels and list(levels)}


STUDIES = {
    "spherical-uci": Study(
        """Spherical features and orthogonal points on UCI regression sets, as in tables 3 and 4 of Tiao et al. (2023).

The first block is activations (ReLU, softplus) or inducing points, in three sizes: M features, M with M orthogonal
points as second block (both with a dense covariance), and 2M features. Inputs and target are standardized on the
training rows, errors and densities in the target's own units; collapsed bounds by L-BFGS in float64 over ARD weights,
bias, lengthscale, noise variance and the directions or points; the kernel's variance is 1, as its norms, of degree 1,
have the scale already. The kernel starts at the best of a few hyperparameters, points at k-means centers and directions
at theirs. M + M and 2M continue from M's solution for as many iterations again, with the same M new rows, of greatest
variance given the features there are: as points, or as directions.

Activations have levels 0 to L, less those that the kernel lacks. L is chosen on the first split: by default it is the
one with the best bound after a quarter of the iterations; with ``--levels left-out`` the one that leaves least variance
out at the start; ``--levels 6`` is the paper's choice, levels 0 to 5. The paper's numbers are in
``tiao2023_tables_3_4.json``. Hours; ``--sets kin8nm power --iterations 60``; ``--sets keggdirected protein kin40k
--kernels arccos --levels 6 --iterations 60 --splits 0``.""",
        three_sizes,
        {"split": tuple(range(5)), "set": tuple(SETS), "kernel": ("arccos", "matern52"), "feature": FEATURES},
        {"rmse": ("RMSE", 3), "nlpd": ("NLPD", 3), "bound": ("bound per row", 3), "left_out": ("variance left out", 4)},
        {"size": 128, "iterations": 200, "levels": "bound", "conditional": "prior", "rows": int},
        rows=("set", "kernel", "feature", "column"),
        choices={"set": (*SETS, "kin40k", "protein", "keggdirected", "simulated")},
        quick={
            "set": ["simulated"],
            "kernel": ["arccos"],
            "feature": ["relu"],
            "split": [0],
            "size": 3,
            "iterations": 3,
        }
        | {"rows": 30, "levels": "4"},
        show=against_the_paper,
    ),
    "snelson-levels": Study(
        """Snelson's data: what orthogonal points, units and levels add to the bound, and at what throughput.

After figure 6 of Tiao, Dutordoir & Picheny (2023), whose claim is checked: on top of M activation features, M
orthogonal points add more to the bound than M further units or further levels do, at a higher throughput. Collapsed
bounds in float64 are maximized by L-BFGS over hyperparameters, directions and points, from the same starts for all:
hyperparameters of the exact GP, multiplied by random factors but for the first start, and random rows as points, or as
where directions point. Of inputs with one column the sphere is a circle, with one harmonic at level 0 and two at each
level that kernel and activation have in common: no number of units is better than these harmonics themselves, whose
bound is printed too. Throughput of a bound with its gradient is relative to that with 2M points, a median of ratios of
the same turn, with Snelson's rows ("few") and with as many as ``--rows``: his, repeated and moved a little.""",
        snelson_levels,
        {"units": ("relu",)},
        {"bound": ("bound, nats", 2), "few": ("throughput, few rows", 2), "many": ("many rows", 2)},
        {
            "kernel": "arccos",
            "fewer": 8,
            "more": 16,
            "timed": 128,
            "starts": 8,
            "iterations": 1000,
            "conditional": "prior",
            "rows": 10_000,
            "repetitions": 40,
            "seed": 0,
            "sizes": (4, 8, 16),
        },
        rows=("units", "first", "M", "column"),
        choices={"units": FEATURES[:2]},
        quick={
            "sizes": [1],
            "timed": 1,
            "starts": 1,
            "iterations": 2,
            "rows": 40,
            "repetitions": 2,
            "fewer": 2,
            "more": 3,
        },
    ),
    "airline": Study(
        """Minibatch SVI on flight delays with the arc-cosine kernel: points, activations and orthogonal points.

SVGP, SOLVE-GP, activations (rectified linear units) and activations with orthogonal points, with M, 2M and M + M
features, in float32: a weight for each column, Gaussian noise, inducing inputs and directions, all learned at once by
Adam, in equally many steps for all, which are too few to reach the optimum. First blocks start at the centers of
k-means, or point there; second ones are chosen greedily given the first. The levels of activations are those that leave
least variance out at the start (``npgp.inducing.choose_levels``), or the first six of the sphere.""",
        airline,
        {"method": ("constant", "linear", *FLIGHT_METHODS)},
        {
            "elbo": ("ELBO per row", 3),
            "rmse": ("RMSE", 3),
            "nlpd": ("NLPD", 3),
            "rmse_minutes": ("RMSE, minutes", 1),
            "nlpd_minutes": ("NLPD, minutes", 3),
        },
        {
            "data": "airline2008_subset",
            "features": 500,
            "rows": int,
            "steps": 250,
            "batch_size": 1024,
            "learning_rate": 0.03,
            "seed": 0,
        },
        quick={
            "features": 3,
            "rows": 60,
            "steps": 4,
            "batch_size": 20,
            "method": ["linear", "activated + points, M + M"],
        },
        note="Of test rows, standardized delay. ELBO per row: mean over the last tenth of the steps' batches.",
        x64=False,
    ),
}
