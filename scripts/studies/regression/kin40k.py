#!/usr/bin/env python
"""Minibatch SVI on tens of thousands of rows in float32: SVGP and SOLVE-GP, with three conditionals.

For each number of inducing points M: SVGP with M points that start at the centres of k-means; SOLVE-GP with M/2 + M/2,
the first at the centres of k-means and the second chosen greedily given the first; and SVGP that starts at the union of
these, without which a better start passes for a better structure. Each with the conditionals ``prior``, ``tight`` and
``grouped``: Matérn-3/2 with a lengthscale for each column, Gaussian noise, everything learned at once by Adam, in
equally many steps for all, which are too few to reach the optimum. Every fit is judged by its ELBO on all training
rows, and on the test rows by predictions from the inducing values alone and with the local correction.

    NPGP_DATA=... python scripts/studies/regression/kin40k.py --json out/kin40k.json                     an hour or less on one core
    NPGP_DATA=... python scripts/studies/regression/kin40k.py --all-structures                           a few steps of every structure

Other sets: ``--data protein`` or ``keggdirected``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import lax
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import datasets
from npgp.sparse.conditionals import Conditional

CONDITIONALS: tuple[Conditional, ...] = ("prior", "tight", "grouped")


@dataclass(frozen=True)
class Structure:
    """
    How M inducing points are put in blocks.

    :param shares: the share of each block in M.
    :param covariances: of q(ε), one for each block.
    :param fused: whether the blocks are put together in one.
    """

    shares: tuple[float, ...]
    covariances: tuple[str, ...]
    fused: bool = False


STRUCTURES = {
    "SVGP": Structure((1.0,), ("dense",)),
    "SOLVE-GP": Structure((0.5, 0.5), ("dense", "dense")),
    "union": Structure((0.5, 0.5), ("dense",), fused=True),  # SVGP that starts where SOLVE-GP does
    "ODVGP": Structure((0.5, 0.5), ("dense", "prior")),
    "three blocks": Structure((0.5, 0.25, 0.25), ("dense", "dense", "dense")),
    "SVGP, mean field": Structure((1.0,), ("diagonal",)),
    "SOLVE-GP, mean field": Structure((0.5, 0.5), ("diagonal", "diagonal")),
}
#: Start of the hyperparameters, for standardised data; lengthscales start at this share of √D.
LENGTHSCALE, VARIANCE, NOISE_VARIANCE = 0.7, 1.0, 0.1
#: Rows at a time where no gradient is taken.
CHUNK = 4096
#: Points of the ELBO curves in the report.
CURVE_POINTS = 100

NOTE = (
    "ELBO per row: on all training rows; of best q: with the same hyperparameters and inducing inputs, and the trained "
    "conditional or 'grouped'. RMSE and mean log-likelihood: of test rows, standardised target; +: with the local "
    "correction. Seconds: of training, compilation included. ±: standard error over splits."
)

BOUNDS = ("elbo_per_row", "best_elbo_per_row", "best_grouped_elbo_per_row")
METRICS = ("rmse", "log_likelihood", "rmse_local", "log_likelihood_local")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", choices=["kin40k", "protein", "keggdirected"], default="kin40k")
    parser.add_argument("--inducing", type=int, nargs="+", default=[256, 512], help="M, divisible by 4")
    parser.add_argument("--structures", choices=list(STRUCTURES), nargs="+", default=["SVGP", "union", "SOLVE-GP"])
    parser.add_argument("--conditionals", choices=CONDITIONALS, nargs="+", default=list(CONDITIONALS))
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1], help="which of the ten test folds")
    parser.add_argument("--rows", type=int, help="the first so many training rows, and test rows, of a split")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=1024, help="rows per step; for 'grouped' the nearest number")
    parser.add_argument("--group-size", type=int, default=16, help="rows in a group, at most, for 'grouped'")
    parser.add_argument("--neighbours", type=int, default=64, help="the same for the local correction")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0, help="to which the split's number is added")
    parser.add_argument("--all-structures", action="store_true", help="few steps of every structure: are all finite?")
    parser.add_argument("--quick", action="store_true", help="one fit of few rows, points and steps")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    parser.add_argument("--json", type=Path, help="write the figures to this file, after every fit")
    args = parser.parse_args(argv)
    if args.all_structures:
        args.inducing, args.splits, args.steps = args.inducing[:1], args.splits[:1], min(args.steps, 50)
        args.structures = list(STRUCTURES)
    if args.quick:
        args.structures, args.conditionals = ["union"], ["grouped"]
        args.inducing, args.splits, args.rows, args.steps = [16], [0], 600, 60
        args.batch_size, args.group_size, args.neighbours = 128, 8, 16
    if any(M < 4 or M % 4 for M in args.inducing):
        parser.error("--inducing must be positive multiples of 4.")
    return args


def start_of_lengthscales(X: np.ndarray) -> np.ndarray:
    columns = X.shape[1]
    return np.full(columns, LENGTHSCALE * np.sqrt(columns), X.dtype)


# ---------------------------------------------------------------------------------------------------------------
# One split: its rows, and starts that fits have in common


@dataclass
class Split:
    """Training and test rows of a split, standardised and in single precision."""

    number: int
    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray

    def __post_init__(self):
        self._starts: dict[tuple[int, ...], list[np.ndarray]] = {}

    @classmethod
    def load(cls, name: str, number: int, rows: int | None) -> Split:
        data = datasets.uci(name, number)
        arrays = (data.X_train, data.y_train, data.X_test, data.y_test)
        return cls(number, *(np.asarray(array[:rows], np.float32) for array in arrays))

    def blocks(self, sizes: tuple[int, ...], seed: int) -> list[np.ndarray]:
        """
        Where inducing inputs start, the same for all fits that ask for them.

        The first block is at the centres of k-means; each further one is chosen greedily for the variance that the
        blocks before it leave, by the kernel at its start.
        """
        if sizes not in self._starts:
            if len(sizes) == 1:
                self._starts[sizes] = [np.asarray(npgp.inducing.kmeans(self.X, *sizes, seed))]
            else:
                before = self.blocks(sizes[:-1], seed)
                kernel = npgp.Matern32(start_of_lengthscales(self.X), VARIANCE)
                Z = npgp.inducing.greedy_variance(kernel, self.X, sizes[-1], given=before)
                self._starts[sizes] = [*before, np.asarray(Z)]
        return self._starts[sizes]

    def inducing(self, structure: Structure, M: int, seed: int) -> list[np.ndarray]:
        blocks = self.blocks(tuple(int(share * M) for share in structure.shares), seed)
        return [np.concatenate(blocks)] if structure.fused else blocks


@dataclass(frozen=True)
class Layout:
    """
    Training rows in the order in which a conditional takes them.

    :param arrays: X, y, and for ``grouped`` the mask of places that hold a row.
    :param batch_size: rows, or places, per step.
    :param group_size: places of a group; 1 for conditionals that take rows one by one.
    """

    arrays: tuple[np.ndarray, ...]
    batch_size: int
    group_size: int = 1

    @classmethod
    def of(cls, split: Split, conditional: str, groups: npgp.Groups, batch_size: int) -> Layout:
        rows = len(split.y)
        if conditional != "grouped":
            return cls((split.X, split.y), min(batch_size, rows))
        arrays = (groups.arrange(split.X), groups.arrange(split.y), np.asarray(groups.mask).ravel())
        # Whole groups, of about as many rows as the others' batches have.
        count = min(max(round(batch_size * groups.count / rows), 1), groups.count)
        return cls(arrays, count * groups.size, groups.size)

    @property
    def places(self) -> int:
        return len(self.arrays[0])

    def chunks(self) -> tuple[np.ndarray, ...]:
        """X, y and mask in chunks of whole groups, (chunks, size, …), the last filled up with what is masked."""
        size = min(CHUNK // self.group_size * self.group_size, self.places)
        mask = self.arrays[2] if len(self.arrays) > 2 else np.ones(self.places, bool)
        missing = -self.places % size
        X, y = (np.concatenate([array, array[:missing]]) for array in self.arrays[:2])
        mask = np.concatenate([mask, np.zeros(missing, bool)])
        return tuple(array.reshape(-1, size, *array.shape[1:]) for array in (X, y, mask))


# ---------------------------------------------------------------------------------------------------------------
# One fit


def component(params: dict[str, Any], covariances: Sequence[str]) -> npgp.SparseGP:
    """The GP at these hyperparameters and inducing inputs."""
    kernel = npgp.Matern32(params["lengthscale"], params["variance"])
    inducing = [params[f"inducing{i}"] for i in range(len(covariances))]
    return npgp.SparseGP("f", kernel, inducing, covariances)


def make_model(
    start: dict[str, Any], covariances: Sequence[str], conditional: Conditional, group_size: int
) -> Callable:
    positive = constraints.softplus_positive
    groups = group_size if conditional == "grouped" else None

    def model(X, y=None, mask=None, *, size):
        params = {
            name: numpyro.param(name, value, constraint=constraints.real if "inducing" in name else positive)
            for name, value in start.items()
        }
        f = component(params, covariances).draw()
        with npgp.plate("data", size, rows=X.shape[0]):
            likelihood = npgp.Gaussian(params["noise_variance"])
            npgp.observe("y", f(X), likelihood, obs=y, conditional=conditional, mask=mask, groups=groups)

    return model


def full_elbo(model: Callable, guide: Callable, params, layout: Layout) -> float:
    """The ELBO on all training rows, exactly: the mean over equal chunks, each scaled up to all of them."""
    chunks = layout.chunks()
    size = chunks[2].size

    @jax.jit
    def losses(params, chunks):
        loss = TraceMeanField_ELBO().loss
        return lax.map(lambda chunk: loss(jax.random.key(0), params, model, guide, *chunk, size=size), chunks)

    return -float(np.mean(np.asarray(losses(params, chunks), np.float64)))


@partial(jax.jit, static_argnames=("covariances", "conditional"))
def best_elbo(params, covariances: tuple[str, ...], conditional: Conditional, X, y, groups: npgp.Groups | None):
    """The ELBO at these hyperparameters and inducing inputs if q(ε) were the best one: what steps on q could win."""
    gp = component(params, covariances)
    bound = npgp.CollapsedGP(
        gp.kernel,
        X,
        gp.inducing,
        params["noise_variance"],
        conditional=conditional,
        covariances=covariances,
        groups=groups,
    )
    return bound.log_prob(y)


@partial(jax.jit, static_argnames="covariances")
def predict(params, covariances: tuple[str, ...], X, y, X_test, groups: npgp.Groups):
    """Mean and variance of y at test inputs, by the inducing values alone and with the local correction; jitter."""
    noise = params["noise_variance"]
    posterior = component(params, covariances).posterior(params)
    local = npgp.local_correction(posterior, X, y, npgp.Gaussian(noise), groups)
    predictions = (posterior.mean_and_variance(X_test), local.mean_and_variance(X_test))
    return [(mean, variance + noise) for mean, variance in predictions], jnp.stack(posterior.jitter)


def scores(prediction, y) -> tuple[float, float]:
    """RMSE and mean log-likelihood of a prediction (mean, variance), in units of the standardised target."""
    mean, variance = (np.asarray(v, np.float64) for v in prediction)
    error = mean - y
    log_density = -0.5 * (np.log(2 * np.pi * variance) + error**2 / variance)
    return float(np.sqrt(np.mean(error**2))), float(np.mean(log_density))


def train(split: Split, M: int, name: str, conditional: Conditional, args: argparse.Namespace) -> dict[str, Any]:
    """Fit one GP; its figures. Stops with an error at the first number that is not finite."""
    structure = STRUCTURES[name]
    rows, seed = len(split.y), args.seed + split.number
    groups, neighbours = (npgp.median_split(split.X, size) for size in (args.group_size, args.neighbours))
    layout = Layout.of(split, conditional, groups, args.batch_size)
    start: dict[str, Any] = {
        "lengthscale": jnp.asarray(start_of_lengthscales(split.X)),
        "variance": VARIANCE,
        "noise_variance": NOISE_VARIANCE,
    }
    inducing = split.inducing(structure, M, seed)
    start |= {f"inducing{i}": jnp.asarray(Z) for i, Z in enumerate(inducing)}
    model = make_model(start, structure.covariances, conditional, layout.group_size)
    guide = npgp.AutoSparseGP(model)
    optimiser = npgp.adam(args.learning_rate, args.steps)
    svi = SVI(model, guide, optimiser, TraceMeanField_ELBO(), size=layout.places)

    began, cpu_began = time.perf_counter(), time.process_time()
    key, batch = jax.random.key(seed), [a[: layout.batch_size] for a in layout.arrays]
    result = npgp.fit(
        svi,
        key,
        args.steps,
        *layout.arrays,
        batch_size=layout.batch_size,
        group_size=layout.group_size,
        init_state=jax.jit(svi.init)(key, *batch),  # operation by operation this takes seconds
        progress=False,
    )
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    params = result.params
    (plain, local), jitter = predict(params, structure.covariances, split.X, split.y, split.X_test, neighbours)
    best, grouped = (
        float(best_elbo(params, structure.covariances, kind, split.X, split.y, groups if kind == "grouped" else None))
        for kind in (conditional, "grouped")
    )
    figures = (*scores(plain, split.y_test), *scores(local, split.y_test))
    fit = {
        "split": split.number,
        "inducing": M,
        "blocks": [len(Z) for Z in inducing],
        "structure": name,
        "conditional": conditional,
        "group_size": layout.group_size,
        "batch_size": layout.batch_size,
        "elbo_per_row": full_elbo(model, guide, params, layout) / rows,
        "best_elbo_per_row": best / rows,
        "best_grouped_elbo_per_row": grouped / rows,
        **dict(zip(METRICS, figures, strict=True)),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "lengthscale": np.asarray(params["lengthscale"]).tolist(),
        "variance": float(params["variance"]),
        "noise_variance": float(params["noise_variance"]),
        "jitter": np.asarray(jitter).tolist(),
        "curve": curve(-result.losses / rows),
    }
    require_finite(fit, params)
    return fit


def curve(trace: np.ndarray) -> dict[str, list]:
    """An ELBO trace as means over equally many steps: the last step of each mean, and its value."""
    ends = np.unique(np.linspace(0, len(trace), CURVE_POINTS + 1).round().astype(int))
    sums = np.add.reduceat(np.asarray(trace, np.float64), ends[:-1])
    return {"step": ends[1:].tolist(), "elbo_per_row": (sums / np.diff(ends)).tolist()}


def require_finite(fit: dict[str, Any], params: dict[str, Any]) -> None:
    values = {**params, "curve": fit["curve"]["elbo_per_row"]}
    values |= {name: fit[name] for name in (*BOUNDS, *METRICS, "jitter")}
    bad = [name for name, value in values.items() if not np.all(np.isfinite(value))]
    if bad:
        raise FloatingPointError(f"{fit['structure']}, {fit['conditional']}: not finite are {', '.join(bad)}.")


# ---------------------------------------------------------------------------------------------------------------
# What people look at


def by_method(fits: list[dict]) -> dict[tuple, list[dict]]:
    """The fits of all splits, by M, structure and conditional."""
    methods: dict[tuple, list[dict]] = {}
    for fit in fits:
        methods.setdefault((fit["inducing"], fit["structure"], fit["conditional"]), []).append(fit)
    return methods


def mean_and_error(fits: list[dict], key: str) -> tuple[float, float | None]:
    """Mean and standard error over splits; no error for a single one."""
    values = [fit[key] for fit in fits]
    error = None if len(values) < 2 else float(np.std(values, ddof=1) / np.sqrt(len(values)))
    return float(np.mean(values)), error


def summarise(fits: list[dict]) -> list[dict]:
    summary = []
    for (M, structure, conditional), same in by_method(fits).items():
        row: dict[str, Any] = {"inducing": M, "structure": structure, "conditional": conditional, "fits": len(same)}
        for key in (*BOUNDS, *METRICS, "seconds", "cpu_seconds"):
            row[key], row[f"{key}_error"] = mean_and_error(same, key)
        summary.append(row)
    return summary


def table(summary: list[dict]) -> str:
    """The printed table, one row per method; "+" is with the local correction."""
    columns = {"elbo_per_row": ("ELBO per row", 4), "best_elbo_per_row": ("of best q", 4)}
    columns |= {"best_grouped_elbo_per_row": ("grouped, of best q", 4)}
    columns |= {"rmse": ("RMSE", 4), "log_likelihood": ("log lik.", 4)}
    columns |= {"rmse_local": ("RMSE +", 4), "log_likelihood_local": ("log lik. +", 4)}
    columns |= {"seconds": ("seconds", 0), "cpu_seconds": ("of CPU", 0)}
    lines = [("M", "structure", "conditional", "fits", *(title for title, _ in columns.values()))]
    for row in summary:
        cells = []
        for key, (_, digits) in columns.items():
            error = row[f"{key}_error"]
            cells.append(f"{row[key]:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}"))
        lines.append((str(row["inducing"]), row["structure"], row["conditional"], str(row["fits"]), *cells))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def draw(fits: list[dict], title: str, path: Path) -> None:
    """ELBO curves, means over splits; a panel for each M."""
    from npgp.plots import COLOURS, _subplots

    methods = by_method(fits)
    sizes = list(dict.fromkeys(M for M, _, _ in methods))
    structures = list(dict.fromkeys(structure for _, structure, _ in methods))
    styles = dict(zip(structures, ["-", "--", ":", "-."] * len(structures), strict=False))
    figure, axes = _subplots(1, len(sizes), figsize=(1.4 + 5.2 * len(sizes), 4.4), squeeze=False, sharey=True)
    lowest, highest = np.inf, -np.inf
    for ax, M in zip(axes[0], sizes, strict=True):
        for (size, structure, conditional), same in methods.items():
            if size != M:
                continue
            values = np.mean([fit["curve"]["elbo_per_row"] for fit in same], axis=0)
            colour = COLOURS[CONDITIONALS.index(conditional)]
            label = f"{structure}, {conditional}"
            ax.plot(same[0]["curve"]["step"], values, styles[structure], color=colour, lw=1.4, label=label)
            # The first steps are far below and would hide the rest.
            lowest, highest = min(lowest, np.quantile(values, 0.15)), max(highest, values.max())
        ax.set_title(f"M = {M}", fontsize=10)
        ax.set_xlabel("step")
        ax.legend(frameon=False, fontsize=9, loc="lower right", handlelength=2.8)
    margin = 0.05 * (highest - lowest)
    axes[0, 0].set_ylim(lowest - margin, highest + margin)
    axes[0, 0].set_ylabel("ELBO per row, of minibatches (nats)")
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def finite_table(fits: list[dict]) -> str:
    """For ``--all-structures``: the ELBO per row at first and at last, all of which are finite."""
    lines = [("structure", "conditional", "blocks", "first ELBO", "last ELBO", "jitter")]
    for fit in fits:
        values = fit["curve"]["elbo_per_row"]
        blocks = " + ".join(str(size) for size in fit["blocks"])
        cells = (f"{values[0]:.3f}", f"{fit['elbo_per_row']:.3f}", f"{max(fit['jitter']):.0e}")
        lines.append((fit["structure"], fit["conditional"], blocks, *cells))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", False)
    settings = ("data", "steps", "batch_size", "learning_rate", "seed", "splits")
    report: dict[str, Any] = {key: getattr(args, key) for key in settings} | {"fits": [], "summary": []}
    for number in args.splits:
        split = Split.load(args.data, number, args.rows)
        print(f"{args.data}, split {number}: {len(split.y)} training rows, {len(split.y_test)} test rows", flush=True)
        for M in args.inducing:
            for structure in args.structures:
                for conditional in args.conditionals:
                    fit = train(split, M, structure, conditional, args)
                    report["fits"].append(fit)
                    report["summary"] = summarise(report["fits"])
                    print(
                        f"M = {M}, {structure}, {conditional}: ELBO per row {fit['elbo_per_row']:.4f}, RMSE "
                        f"{fit['rmse']:.4f}, {fit['seconds']:.0f} s",
                        flush=True,
                    )
                    if args.json:
                        args.json.parent.mkdir(parents=True, exist_ok=True)
                        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.all_structures:
        print(finite_table(report["fits"]))
        print(f"all {len(report['fits'])} fits are finite in float32")
    else:
        print(table(report["summary"]))
        print(NOTE)
        path = args.out / f"{args.data}_elbo.png"
        draw(report["fits"], f"{args.data}, batches of {args.batch_size} rows, float32", path)
        print(f"wrote {path}")
    if args.json:
        print(f"wrote {args.json}")
    return report


if __name__ == "__main__":
    main()
