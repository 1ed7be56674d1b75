"""SVI in minibatches on tens of thousands of rows: structures, conditionals, batches of groups, and four methods."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from common import moments, plus_minus, table
from npgp import datasets
from studies.fits import (
    METHODS,
    NOISE_VARIANCE,
    STRUCTURES,
    VARIANCE,
    Layout,
    Method,
    Program,
    Rows,
    best_elbo,
    component,
    elbo_of_chunks,
    float32_split,
    learned,
    predict,
    regression_model,
    scores,
    simulated,
    start_of,
    start_of_lengthscales,
    start_points,
    with_points,
)
from studies.runner import Records, Study

SETS = ("kin40k", "protein", "keggdirected")

# ---------------------------------------------------------------------------------------------------------------
# Structures and conditionals


@partial(jax.jit, static_argnames="covariances")
def local_predict(params, covariances: tuple[str, ...], X, y, X_test, groups: npgp.sparse.Groups):
    """Mean and variance of y at test inputs, with the local correction."""
    noise = params["noise_variance"]
    posterior = component(params, covariances).posterior(params)
    local = npgp.local_correction(posterior, X, y, npgp.Gaussian(variance=noise), groups)
    mean, variance = local.mean_and_variance(X_test)
    return mean, variance + noise


def structures(args: argparse.Namespace, split: int, M: int, structure: str, conditional: str) -> dict[str, Any]:
    rows, chosen = float32_split(args.data, split, args.rows), STRUCTURES[structure]
    groups, neighbors = (npgp.median_split(rows.X, size) for size in (args.group_size, args.neighbors))
    layout = Layout.of(rows, conditional, groups, args.batch_size)
    model = regression_model(start_of(args, split, chosen, M), chosen.covariances, conditional, layout.group_size)
    guide, size = npgp.AutoSparseGP(model), len(layout.arrays[0])
    svi = SVI(model, guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO(), size=size)
    key, batch = jax.random.key(args.seed + split), [a[: layout.batch_size] for a in layout.arrays]
    how = dict(batch_size=layout.batch_size, group_size=layout.group_size, progress=False)
    began = time.perf_counter()
    begin = jax.jit(svi.init)(key, *batch)  # operation by operation this takes seconds
    params = npgp.fit(svi, key, args.steps, *layout.arrays, init_state=begin, **how).params
    seconds = time.perf_counter() - began
    best = {
        kind: float(best_elbo(params, rows.X, rows.y, chosen.covariances, kind, groups if kind == "grouped" else None))
        for kind in {conditional, "grouped"}
    }
    local = scores(*local_predict(params, chosen.covariances, rows.X, rows.y, rows.X_test, neighbors), rows.y_test)
    return {
        "elbo": elbo_of_chunks(model, guide)(params, layout.chunks()) / len(rows.y),
        "best_elbo": best[conditional] / len(rows.y),
        "best_grouped_elbo": best["grouped"] / len(rows.y),
        **scores(*predict(params, rows.X_test, chosen.covariances), rows.y_test),
        **{f"{name}_local": value for name, value in local.items()},
        "seconds": seconds,
        "noise_variance": float(params["noise_variance"]),
    }


# ---------------------------------------------------------------------------------------------------------------
# Batches of groups


class Scheme(NamedTuple):
    """
    How a step is made.

    :param rows: independent rows of a step, as a share of a batch.
    :param groups: the share of rows in whole groups.
    :param whole: whether the whole ELBO is of the groups; else what they gain.
    :param size: rows in a group, at most; the option's if omitted.
    :param late: the share of steps before groups come in, in place of rows.
    :param natural: q(ε) by natural gradients.
    """

    rows: float
    groups: float
    whole: bool = False
    size: int | None = None
    late: float = 0.0
    natural: bool = False


SCHEMES = {
    "tight": Scheme(1.0, 0.0),
    "grouped": Scheme(0.0, 1.0, whole=True),
    "grouped, by 4": Scheme(0.0, 1.0, whole=True, size=4),
    "switch": Scheme(1.0, 1.0, whole=True, late=0.75),
    "spread, 1/2 + 1/2": Scheme(0.5, 0.5),
    "spread, 3/4 + 1/4": Scheme(0.75, 0.25),
    "spread, 1 + 1/4": Scheme(1.0, 0.25),
    "spread, 1 + 1/8": Scheme(1.0, 0.125),
    "tight, then spread": Scheme(1.0, 0.125, late=0.75),
    "tight, natural": Scheme(1.0, 0.0, natural=True),
    "grouped, natural": Scheme(0.0, 1.0, whole=True, natural=True),
    "spread, 3/4 + 1/4, natural": Scheme(0.75, 0.25, natural=True),
    "spread, 1 + 1/4, natural": Scheme(1.0, 0.25, natural=True),
}
#: Batches of which the gradient's variance is taken; steps of one program.
BATCHES, CALL = 100, 100
#: Names of parameters, by their kind.
KINDS = {"f.u.loc": "mean of q", "f.u.scale_tril": "scale of q", "inducing0": "inducing inputs"}


class Arrays(NamedTuple):
    """Rows, and rows laid out group after group, with their mask."""

    X: jax.Array
    y: jax.Array
    X_groups: jax.Array
    y_groups: jax.Array
    mask: jax.Array
    size: int

    @classmethod
    def of(cls, rows: Rows, size: int) -> Arrays:
        groups = npgp.median_split(rows.X, size)
        arranged = groups.arrange(rows.X), groups.arrange(rows.y), np.asarray(groups.mask).ravel()
        return cls(*map(jnp.asarray, (rows.X, rows.y, *arranged)), groups.size)

    def batch(self, rows: jax.Array, groups: jax.Array) -> tuple[jax.Array, ...]:
        places = (groups[:, None] * self.size + jnp.arange(self.size)).ravel()
        return self.X[rows], self.y[rows], self.X_groups[places], self.y_groups[places], self.mask[places]


def batched_svi(scheme: Scheme, start: dict[str, Any], data: Arrays, args: argparse.Namespace) -> SVI:
    """Of a model of independent rows, if there are any in a batch, and of whole groups, if there are any."""

    def model(X, y, X_groups, y_groups, mask):
        params = learned(start)
        f, likelihood = component(params, ("dense",)).draw(), npgp.Gaussian(variance=params["noise_variance"])
        if len(X):
            with npgp.plate("rows", len(data.y), rows=len(X)):
                npgp.observe("y", f(X), likelihood, obs=y, conditional="tight")
        if len(X_groups):
            with npgp.plate("places", len(data.mask), rows=len(X_groups)):
                kind = npgp.Grouped(data.size)
                if scheme.whole:
                    npgp.observe("groups", f(X_groups), likelihood, obs=y_groups, conditional=kind, mask=mask)
                else:
                    npgp.tighten("gain", f(X_groups), likelihood, y_groups, kind, mask=mask)

    adam = npgp.adam(args.learning_rate, args.steps)
    optimizer = npgp.natural_gradient(0.1, adam) if scheme.natural else adam
    return SVI(model, npgp.AutoSparseGP(model), optimizer, TraceMeanField_ELBO())


def batches(scheme: Scheme, data: Arrays, args: argparse.Namespace, steps: int, seed: int) -> list[np.ndarray]:
    """Which rows and which groups make each step, each (steps, size), in random order epoch by epoch."""
    rng, N, count = np.random.default_rng(seed), len(data.y), len(data.mask) // data.size

    def numbers(count: int, size: int) -> np.ndarray:
        if not size:
            return np.zeros((steps, 0), int)
        each = count // size
        epochs = [rng.permutation(count)[: each * size].reshape(-1, size) for _ in range(-(-steps // each))]
        return np.concatenate(epochs)[:steps]

    rows = numbers(N, round(scheme.rows * args.batch_size))
    return [rows, numbers(count, round(scheme.groups * args.batch_size * count / N))]


def train_scheme(args: argparse.Namespace, split: int, name: str) -> tuple[dict, dict, float]:
    """Trained parameters, the same unconstrained, and milliseconds of the processor of a step."""
    scheme, start = SCHEMES[name], start_of(args, split, STRUCTURES[args.structure], args.inducing)
    data = Arrays.of(float32_split(args.data, split, args.rows), scheme.size or args.group_size)
    svi, numbers = batched_svi(scheme, start, data, args), batches(scheme, data, args, args.steps, args.seed)

    @partial(jax.jit, static_argnames="which")
    def run(state, rows, groups, which):
        def step(state, at):
            rows, groups = at
            rows, groups = rows if "r" in which else rows[:0], groups if "g" in which else groups[:0]
            return svi.update(state, *data.batch(rows, groups))

        return lax.scan(step, state, (rows, groups))

    late = round(scheme.late * args.steps / CALL) * CALL
    state = jax.jit(svi.init)(jax.random.key(args.seed), *data.batch(numbers[0][0], numbers[1][0]))
    seconds, compiled = 0.0, {}
    for first in range(0, args.steps, CALL):
        part = [n[first : first + CALL] for n in numbers]
        which = "r" if first < late else "g" if late and scheme.whole else "rg"
        if which not in compiled:
            compiled[which] = run.lower(state, *part, which=which).compile()
        began = time.process_time()
        state, _ = jax.block_until_ready(compiled[which](state, *part))
        seconds += time.process_time() - began
    return svi.get_params(state), svi.optim.get_params(state.optim_state), 1e3 * seconds / args.steps


def group_batches(args: argparse.Namespace, split: int, scheme: str) -> dict[str, Any]:
    params, _, ms = train_scheme(args, split, scheme)
    rows, found = float32_split(args.data, split, args.rows), {}
    start = {key: params[key] for key in ("lengthscale", "variance", "noise_variance", "inducing0")}
    groups = npgp.median_split(rows.X, args.group_size)
    for conditional in ("tight", "grouped"):
        layout = Layout.of(rows, conditional, groups, args.batch_size)
        model = regression_model(start, ("dense",), conditional, layout.group_size)
        elbo = elbo_of_chunks(model, npgp.AutoSparseGP(model))(params, layout.chunks())
        found[f"{conditional}_elbo"] = elbo / len(rows.y)
    return found | scores(*predict(params, rows.X_test), rows.y_test) | {"ms": ms}


def gradient_noise(args: argparse.Namespace, scheme: str) -> dict[str, Any]:
    """The variance of the gradient over batches where ``tight`` ends, summed over each kind of parameters."""
    loose, how = where_tight_ends(argparse.Namespace(**vars(args))), SCHEMES[scheme]
    data = Arrays.of(float32_split(args.data, 0, args.rows), how.size or args.group_size)
    svi = batched_svi(how, start_of(args, 0, STRUCTURES[args.structure], args.inducing), data, args)
    numbers = batches(how, data, args, 5 if args.quick else BATCHES, 1)
    jax.jit(svi.init)(jax.random.key(0), *data.batch(numbers[0][0], numbers[1][0]))

    @jax.jit
    def variances(loose, numbers):
        def slope(at):
            def loss(loose):
                params = svi.constrain_fn(loose)
                return svi.loss.loss(jax.random.key(0), params, svi.model, svi.guide, *data.batch(*at))

            return jax.grad(loss)(loose)

        return jax.tree.map(lambda g: jnp.sum(jnp.var(g, axis=0)), lax.map(slope, numbers))

    found = dict.fromkeys((*KINDS.values(), "hyperparameters"), 0.0)
    for key, value in variances(loose, tuple(numbers)).items():
        found[KINDS.get(key, "hyperparameters")] += float(value)
    return found


_ENDS: dict[str, dict] = {}


def where_tight_ends(args: argparse.Namespace) -> dict:
    """Unconstrained parameters, trained once."""
    key = str(sorted((name, str(value)) for name, value in vars(args).items()))
    if key not in _ENDS:
        _ENDS[key] = train_scheme(args, 0, "tight")[1]
    return _ENDS[key]


def multiples(records: Records, markdown: bool) -> str:
    """Variances as multiples of those of whole groups."""
    base = next((record for record in records if record["scheme"] == "grouped"), None)
    if base is None:
        return ""
    kinds = [kind for kind in base if kind != "scheme"]
    lines = [(r["scheme"], *(f"{r[kind] / base[kind]:.2f}" for kind in kinds)) for r in records]
    return table(("over that of grouped", *kinds), lines, markdown=markdown)


# ---------------------------------------------------------------------------------------------------------------
# SVGP, SOLVE-GP, and the same with the tight conditional


@lru_cache(maxsize=2)
def random_split(name: str, split: int, most: int | None) -> Rows:
    """A tenth of the rows for tests; standardized by the training rows, of which there may be a limit."""
    data = simulated(400) if name == "simulated" else datasets.uci(name, 0, standardize=False)
    X, y = np.concatenate([data.X_train, data.X_test]), np.concatenate([data.y_train, data.y_test])
    test, train = np.split(np.random.default_rng(split).permutation(len(y)), [len(y) // 10])
    train = train[:most]
    y = (y - y[train].mean()) / y[train].std()
    X = (X - X[train].mean(0)) / np.where(np.ptp(X[train], axis=0) > 0, X[train].std(0), 1.0)
    return Rows(*(array.astype(jnp.result_type(float)) for array in (X[train], y[train], X[test], y[test])))


_PROGRAMS: dict[tuple, Program] = {}


def program_of(key: tuple, make: Callable[[], Program]) -> Program:
    """A method with M points is compiled once for each set, whose splits have equally many rows."""
    if key not in _PROGRAMS:
        _PROGRAMS[key] = make()
    return _PROGRAMS[key]


def conditional_of(method: Method) -> str:
    return "tight" if method.tight else "prior"


def four_methods(args: argparse.Namespace, set: str, split: int, M: int, method: str) -> dict[str, Any]:
    data, how, seed = random_split(set, args.seed + split, args.rows), METHODS[method], args.seed + split
    hyper = {"lengthscale": start_of_lengthscales(data.X), "variance": VARIANCE, "noise_variance": NOISE_VARIANCE}
    start = with_points(hyper, start_points(data.X, M, seed), how.blocks)

    def make() -> Program:
        model = regression_model(start, how.covariances, conditional_of(how))
        return Program(model, len(data.y), args)

    program = program_of((set, M, method, args.steps, len(data.y)), make)
    params, times = program.train(data.X, data.y, start, seed)
    best = float(best_elbo(params, data.X, data.y, how.covariances, conditional_of(how)))
    return {
        "elbo": program.elbo(params, data.X, data.y) / len(data.y),
        "best_elbo": best / len(data.y),
        **scores(*predict(params, data.X_test, how.covariances), data.y_test),
        **times,
        "noise_variance": float(params["noise_variance"]),
    }


#: What is compared, the first of each pair being the better one if the claim holds; and whether the second has but the
#: M/2 points of the first block.
PAIRS = (
    ("T-SVGP", "SVGP", False),
    ("T-SOLVE-GP", "SOLVE-GP", False),
    ("SOLVE-GP", "SVGP", True),
    ("T-SOLVE-GP", "T-SVGP", True),
    ("SOLVE-GP", "SVGP", False),
    ("T-SOLVE-GP", "T-SVGP", False),
)


def pairs(figures: dict[str, int], records: Records, markdown: bool) -> str:
    """
    What the first method of each pair gains over the second, split by split; positive is better.

    :param figures: what is compared, with the sign of what is better.
    """
    found = {(r.get("set"), r["M"], r["method"], r["split"]): r for r in records}
    lines = []
    for first, second, halved in PAIRS:
        cells = dict.fromkeys((name, M) for name, M, method, _ in found if method == first)
        for name, M in cells:
            both = [
                (a, b)
                for (set, size, method, split), a in found.items()
                if (set, size, method) == (name, M, first)
                and (b := found.get((set, M // 2 if halved else M, second, split)))
            ]
            if both:
                texts = [plus_minus(*moments(sign * (a[k] - b[k]) for a, b in both), 4) for k, sign in figures.items()]
                cost = plus_minus(*moments(a["step_ms"] / b["step_ms"] for a, b in both), 2)
                pair = f"{first} over {second}{' of M/2' if halved else ''}"
                lines.append([name or "", M, pair, *texts, cost])
    heads = ("set", "M", "gain of", *figures, "time per step, ratio")
    return table(heads, lines, left=(0, 2), markdown=markdown) if lines else ""


FIT = {"rmse": ("test RMSE", 4), "log_likelihood": ("test log-likelihood", 4)}
SMALL = {"data": "simulated", "rows": 60, "steps": 6, "batch_size": 20, "group_size": 4, "split": [0]}

STUDIES = {
    "kin40k": Study(
        """Minibatch SVI on tens of thousands of rows in float32: SVGP and SOLVE-GP, with three conditionals.

For each number of inducing points M: SVGP with M points that start at the centers of k-means; SOLVE-GP with M/2 + M/2,
the first at the centers of k-means and the second chosen greedily given the first; and SVGP that starts at the union of
these, without which a better start passes for a better structure. Matérn-3/2 with a lengthscale for each column,
Gaussian noise, everything learned at once by Adam, in equally many steps for all, which are too few to reach the
optimum. An hour or less on one core.""",
        structures,
        {
            "split": (0, 1),
            "M": (256, 512),
            "structure": ("SVGP", "union", "SOLVE-GP"),
            "conditional": ("prior", "tight", "grouped"),
        },
        {"elbo": ("ELBO per row", 4), "best_elbo": ("of best q", 4), "best_grouped_elbo": ("grouped, of best q", 4)}
        | FIT
        | {"rmse_local": ("RMSE +", 4), "log_likelihood_local": ("log lik. +", 4), "seconds": ("seconds", 0)},
        {
            "data": "kin40k",
            "rows": int,
            "steps": 1000,
            "batch_size": 1024,
            "learning_rate": 0.05,
            "group_size": 16,
            "neighbors": 64,
            "seed": 0,
        },
        choices={"structure": tuple(STRUCTURES)},
        lower=("rmse", "rmse_local", "seconds"),
        quick=SMALL | {"M": [8], "structure": ["three blocks"], "conditional": ["grouped"], "neighbors": 16},
        picture=("M", ("elbo", "log_likelihood")),
        note="ELBO per row: on all training rows; of best q: at the same hyperparameters and inducing inputs, with the "
        "trained conditional or 'grouped'. +: with the local correction. Seconds: of training, compilation included.",
        x64=False,
    ),
    "group-batches": Study(
        """Minibatches for groups

Ways to make a step of about equally many rows, all but the first for one and the same bound, ``grouped``: whole groups
of neighbors; ``tight`` for three quarters of the steps, then whole groups ("switch"; "then spread": then the
following); ``tight`` on independent rows, and on a few groups what ``grouped`` gains over it (``npgp.tighten``,
"spread"), which is unbiased because ``grouped`` is ``tight`` plus the sum over groups of that gain. Figures are of all
training rows and, at the end, of the bound ``grouped`` itself. 36,000 rows: ``--rows 36000 --inducing 512 --batch-size
1024 --structure union``.""",
        group_batches,
        {"split": (0, 1, 2), "scheme": tuple(SCHEMES)},
        {"grouped_elbo": ("`grouped` ELBO per row", 4), "tight_elbo": ("`tight` ELBO", 4)}
        | FIT
        | {"ms": ("ms per step", 1)},
        batch_settings := {
            "data": "kin40k",
            "rows": 12_000,
            "inducing": 256,
            "steps": 1000,
            "batch_size": 512,
            "learning_rate": 0.05,
            "group_size": 16,
            "structure": "SVGP",
            "seed": 0,
        },
        against=("scheme", "tight"),
        lower=("rmse", "ms"),
        quick=SMALL | {"inducing": 4, "steps": CALL, "scheme": ["tight", "spread, 1 + 1/4"]},
        x64=False,
    ),
    "gradient-noise": Study(
        """How noisy the gradients of the ways to make batches are, at the place where ``tight`` ends.""",
        gradient_noise,
        {"scheme": tuple(name for name, scheme in SCHEMES.items() if not scheme.natural and not scheme.late)},
        {kind: (kind, 2) for kind in (*KINDS.values(), "hyperparameters")},
        batch_settings,
        quick={key: value for key, value in SMALL.items() if key != "split"}
        | {"inducing": 4, "steps": CALL, "scheme": ["grouped", "spread, 1 + 1/4"]},
        show=multiples,
        x64=False,
    ),
    "four-methods": Study(
        """Regression: SVGP, SOLVE-GP and the tight conditional, as Bui, Ashman & Turner (2025) compare them.

Their figures 2, 3, 6 and 7 are the pattern: bound, test error and test log-likelihood against the number of inducing
points M, for SVGP, T-SVGP (``conditional="tight"``), SOLVE-GP and T-SOLVE-GP. Matérn-3/2 with a lengthscale for each
column, Gaussian noise, everything learned at once on minibatches, q(ε) by natural gradients, the rest by Adam; random
splits with a tenth of the rows for testing. M counts all inducing points: SOLVE-GP has M/2 + M/2, and is compared with
SVGP of M and of M/2 points. All start at the same M inputs, the centers of k-means. "Of best q" is the collapsed bound
at the trained hyperparameters and inducing inputs: what more steps on q alone could win. ``--full``: six hours on one
core, one of them without M = 1024.""",
        four_methods,
        {"set": SETS, "split": (0, 1), "M": (128, 256), "method": tuple(METHODS)},
        {"elbo": ("ELBO per row", 4), "best_elbo": ("of best q", 4)}
        | FIT
        | {"step_ms": ("ms per step", 1), "seconds": ("seconds", 0)},
        {"rows": int, "steps": 1500, "batch_size": 1024, "learning_rate": 0.05, "natural": 0.1, "seed": 0},
        choices={"set": (*SETS, "kin8nm", "power", "pumadyn32nm", "simulated")},
        quick={"set": ["simulated"], "split": [0], "M": [8], "method": ["SVGP", "T-SOLVE-GP"], "rows": 100, "steps": 4}
        | {"batch_size": 30},
        full={"split": [0, 1, 2], "M": [256, 512, 1024], "steps": 3000},
        picture=("M", ("elbo", "rmse", "log_likelihood", "step_ms")),
        show=partial(pairs, {"elbo": 1, "best_elbo": 1, "rmse": -1, "log_likelihood": 1}),
        note="Means over splits ± standard errors. ELBO per row: of all training rows. Test figures: of the standard"
        "ized target. Seconds: of training, without compilation.",
        x64=False,
    ),
}
