#!/usr/bin/env python
"""What the choice of bound is worth for a Bayesian GPLVM of the oil-flow data: Bui, Ashman & Turner 2025, figure 5.

Three comparisons of ``prior`` (the classical bound), ``tight`` and ``grouped`` at the same settings, over several seeds
(of the inducing inputs and of the draws of x):

    independent   each trained from the same start
    continued     each trained further from the solution of ``prior``
    equal         each evaluated at the same parameters, those that ``prior`` was trained to

The first says which optimum training finds, and only the last two what the bound itself is worth there: in a model
with many local optima these are different things.

    python scripts/studies/gplvm/oil_bounds.py                                                     simulated, a minute or two
    NPGP_DATA=... python scripts/studies/gplvm/oil_bounds.py --data real --seeds 5 --steps 20000 --json out/oil_bounds.json
    NPGP_DATA=... python scripts/studies/gplvm/oil_bounds.py --data real --seeds 5 --steps 20000 --collapsed

Uncollapsed bounds are trained by Adam on all rows, one draw of x at each step, collapsed ones by L-BFGS on the
logarithms of positive parameters; all in float64. Every run is kept in a file of its own, and not repeated if that file
has the same settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import datasets, gplvm
from npgp.collapsed.uncertain import penalty_nodes
from npgp.gplvm import BayesianGPLVM, CollapsedGPLVM, Start, metrics, pca_start
from npgp.sparse.projection import Projector

CONDITIONALS = ("prior", "tight", "grouped")
#: Collapsed bounds; the last has m_n a function of x_n, as the uncollapsed bounds have.
COLLAPSED = ("prior", "tight", "tight, m(x)")
#: How a positive parameter is made of a free one.
POSITIVE = {"softplus": constraints.softplus_positive, "log": constraints.positive}
#: Draws of x in the penalty of the last collapsed bound, when it is trained and, others, when it is evaluated.
PENALTY_DRAWS, EVALUATION_DRAWS = 16, 64
#: Points of a trace that are kept, and that are drawn.
TRACE_POINTS, DRAWN_POINTS = 400, 100


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", choices=["simulated", "real"], default="simulated")
    add("--rows", type=int, help="the first so many rows; 200 to simulate, or all real ones, if omitted")
    add("--conditional", nargs="+", choices=CONDITIONALS, default=list(CONDITIONALS))
    add("--seeds", type=int, default=2)
    add("--latent-dim", type=int, default=10)
    add("--inducing", type=int, default=25, help="number of inducing inputs")
    add("--group-size", type=int, default=16, help="largest group of rows, by median split of the data")
    add("--steps", type=int, default=1000)
    add("--learning-rate", type=float, default=0.01, help="at first; it falls to 2%% along a cosine")
    add("--continue-steps", type=int, help="steps of further training from the solution of prior; half if omitted")
    add("--continue-rate", type=float, default=0.003)
    add("--positive", choices=POSITIVE, default="softplus", help="of lengthscales, variance and noise variance")
    add("--latent-positive", choices=POSITIVE, help="of the scales of q(x); as the others if omitted")
    add("--noise-start", type=float, default=0.02, help="initial noise variance")
    add("--latent-scale", type=float, default=0.3, help="initial standard deviation of q(x)")
    add("--draws", type=int, default=200, help="draws of x when a bound is evaluated")
    add("--collapsed", action="store_true", help="the collapsed bounds as well, by L-BFGS")
    add("--collapsed-steps", type=int, default=1500, help="of L-BFGS, at most")
    add("--runs", type=Path, default=Path("out/oil_bounds"), help="folder of the single runs")
    add("--out", type=Path, default=Path("out"), help="folder of the picture")
    add("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    args.latent_positive = args.latent_positive or args.positive
    args.continue_steps = args.steps // 2 if args.continue_steps is None else args.continue_steps
    args.conditional = [c for c in CONDITIONALS if c in args.conditional]
    if min(args.seeds, args.steps, args.inducing, args.group_size) < 1:
        parser.error("counts must be positive.")
    return args


# ---------------------------------------------------------------------------------------------------------------
# The model


@dataclasses.dataclass(frozen=True)
class FreeLatents:
    """
    ``q(x_n) = N(μ_n, diag s_n)``, as ``npgp.gplvm.FreeNormal``, with a choice of what is free in the scales.

    :param constraint: of the scales.
    """

    constraint: constraints.Constraint

    def __call__(self, start: Start, rows: numpyro.plate, Y: Any, mask: Any) -> None:
        loc = numpyro.param("x.loc", jnp.asarray(start.latents))
        scale = jnp.full(start.latents.shape, start.latent_scale)
        scale = numpyro.param("x.scale", scale, constraint=self.constraint)
        with rows as index:
            numpyro.sample("x", dist.Normal(loc[index], scale[index]).to_event(1))


def start_at(args: argparse.Namespace, Y: np.ndarray, seed: int) -> Start:
    start = pca_start(Y, args.latent_dim, args.inducing, seed=seed)
    return dataclasses.replace(start, noise_variance=args.noise_start, latent_scale=args.latent_scale)


def make(args: argparse.Namespace, Y: np.ndarray, seed: int, conditional: str) -> BayesianGPLVM:
    return BayesianGPLVM(
        start_at(args, Y, seed),
        conditional,  # type: ignore[arg-type]
        latents=FreeLatents(POSITIVE[args.latent_positive]),
        groups=npgp.median_split(Y, args.group_size) if conditional == "grouped" else None,
        positive=POSITIVE[args.positive],
    )


def make_collapsed(args: argparse.Namespace, Y: np.ndarray, seed: int, form: str, draws: Any) -> CollapsedGPLVM:
    conditional = "prior" if form == "prior" else "tight"
    return CollapsedGPLVM(start_at(args, Y, seed), conditional, penalty_draws=draws if form == COLLAPSED[-1] else None)


# ---------------------------------------------------------------------------------------------------------------
# Bounds at given parameters


def residual(projector: Projector, params: Mapping[str, jax.Array], key: jax.Array, columns: int) -> tuple:
    """
    Of one draw of x from q: the mean over rows of d_n/σ², and what ``tight`` gains over ``prior`` there,
    ``½ D Σ [d_n/σ² − log(1 + d_n/σ²)] / N``.
    """
    x = params["x.loc"] + params["x.scale"] * jax.random.normal(key, params["x.loc"].shape)
    share = projector(x).residual_variance() / params["noise_variance"]
    return jnp.mean(share), 0.5 * columns * jnp.mean(share - jnp.log1p(share))


def evaluator(args: argparse.Namespace, Y: np.ndarray) -> Callable:
    """A function of parameters and keys: for each key, all bounds per row at the same draw of x, and ``residual``."""
    models = {c: make(args, Y, 0, c) for c in args.conditional}
    first, Y = models[args.conditional[0]], jnp.asarray(Y)
    rows, columns = Y.shape

    @jax.jit
    def evaluate(params, keys):
        def one(key):
            loss = TraceMeanField_ELBO().loss
            bounds = {c: -loss(key, params, m.model, m.guide, Y) / rows for c, m in models.items()}
            return bounds, *residual(first.posterior(params).projector, params, key, columns)

        return jax.lax.map(one, keys)

    return evaluate


def collapsed_evaluator(args: argparse.Namespace, Y: np.ndarray) -> Callable:
    """As :func:`evaluator`, for collapsed bounds, which have no noise but that of the last one's penalty."""
    draws = penalty_nodes(EVALUATION_DRAWS, len(Y), args.latent_dim, seed=1)
    models = {form: make_collapsed(args, Y, 0, form, draws) for form in COLLAPSED}
    Y = jnp.asarray(Y)
    rows, columns = Y.shape

    @jax.jit
    def evaluate(params, keys):
        projector = models["prior"].posterior(params, Y).projector
        bounds = {form: model.bound(params, Y) / rows for form, model in models.items()}
        return bounds, *jax.lax.map(lambda key: residual(projector, params, key, columns), keys)

    return evaluate


# ---------------------------------------------------------------------------------------------------------------
# Runs


def cached(args: argparse.Namespace, name: str, settings: dict, run: Callable[[], tuple[dict, dict]]) -> tuple:
    """The figures and parameters of a run: from its files if they have these settings, or else run and written."""
    figures_file, params_file = args.runs / f"{name}.json", args.runs / f"{name}.npz"
    settings = json.loads(json.dumps(settings))
    if figures_file.exists() and params_file.exists():
        kept = json.loads(figures_file.read_text())
        if kept["settings"] == settings:
            return kept["figures"], dict(np.load(params_file))
    figures, params = run()
    args.runs.mkdir(parents=True, exist_ok=True)
    np.savez(params_file, **params)
    figures_file.write_text(json.dumps({"settings": settings, "figures": figures}) + "\n")
    return figures, params


def thin(trace: np.ndarray) -> list[float]:
    """Means over windows of steps."""
    return [float(np.mean(part)) for part in np.array_split(trace, min(TRACE_POINTS, len(trace)))]


START = ("data", "rows", "latent_dim", "inducing", "noise_start", "latent_scale", "draws")
SVI_SETTINGS = (*START, "steps", "learning_rate", "positive", "latent_positive", "group_size")


def figures_of(params: Mapping[str, np.ndarray], labels, bounds: Mapping[str, Any], share, gain) -> dict:
    """
    What is reported of a trained model.

    :param bounds: per row, at these parameters: numbers, or one for each draw of x.
    """
    relevance = gplvm.relevance(params)
    return {
        "bounds_here": {name: float(np.mean(value)) for name, value in bounds.items()},
        "gain_here": float(np.mean(gain)),
        "residual_over_noise": float(np.mean(share)),
        "noise_variance": float(params["noise_variance"]),
        "variance": float(params["variance"]),
        "nn_errors": metrics.nearest_neighbour_errors(params["x.loc"] / params["lengthscale"], labels),
        "relevant_dims": gplvm.effective_dimensions(relevance),
        "relevances": np.sort(relevance)[::-1].tolist(),
    }


def fit(
    args: argparse.Namespace,
    data: datasets.OilFlow,
    evaluate: Callable,
    seed: int,
    conditional: str,
    before: Mapping[str, np.ndarray] | None = None,
) -> tuple[dict, dict]:
    """
    Train one model by SVI.

    :param before: parameters to continue from; the start's if omitted.
    :return: its figures, and its parameters.
    """
    steps, rate = (args.steps, args.learning_rate) if before is None else (args.continue_steps, args.continue_rate)
    name = f"{'independent' if before is None else 'continued'}-{conditional}-{seed}"
    settings = {key: getattr(args, key) for key in SVI_SETTINGS}
    if before is not None:
        settings |= {"continue_steps": steps, "continue_rate": rate}

    def run():
        print(f"  {name}", flush=True)
        model = make(args, data.Y, seed, conditional)
        svi = SVI(model.model, model.guide, npgp.adam(rate, steps), TraceMeanField_ELBO())
        key, evaluation = jax.random.split(jax.random.key(seed))
        init = None if before is None else {k: jnp.asarray(v) for k, v in before.items()}
        result = npgp.fit(svi, key, steps, jnp.asarray(data.Y), init_params=init, progress=False)
        params = {k: np.asarray(v) for k, v in result.params.items()}
        bounds, share, gain = evaluate(result.params, jax.random.split(evaluation, args.draws))
        bounds = {c: np.asarray(bounds[c]) for c in args.conditional}  # in this order
        own = bounds[conditional]
        figures = {
            "elbo_per_row": float(own.mean()),
            "monte_carlo_error": float(own.std(ddof=1) / math.sqrt(len(own))),
            **figures_of(params, data.labels, bounds, share, gain),
            "trace": thin(-result.losses / len(data.Y)),
        }
        return figures, params

    return cached(args, name, settings, run)


def fit_collapsed(
    args: argparse.Namespace,
    data: datasets.OilFlow,
    evaluate: Callable,
    seed: int,
    form: str,
    before: Mapping[str, np.ndarray] | None = None,
) -> tuple[dict, dict]:
    """Train one collapsed model by L-BFGS; as :func:`fit`."""
    steps = args.collapsed_steps if before is None else args.collapsed_steps // 3
    name = f"collapsed{'' if before is None else '-continued'}-{form.replace(', m(x)', '-mx')}-{seed}"
    settings = {key: getattr(args, key) for key in (*START, "collapsed_steps")}

    def run():
        print(f"  {name}", flush=True)
        model = make_collapsed(args, data.Y, seed, form, PENALTY_DRAWS)
        result = model.fit(data.Y, steps, before, progress=False)
        params = {k: np.asarray(v) for k, v in result.params.items()}
        bounds, share, gain = evaluate(result.params, jax.random.split(jax.random.key(seed), args.draws))
        bounds = {form: bounds[form] for form in COLLAPSED}
        trace = np.pad(result.bounds, (0, steps + 1 - len(result.bounds)), mode="edge")
        figures = {
            "elbo_per_row": float(bounds[form]),
            **figures_of(params, data.labels, bounds, share, gain),
            "steps": len(result.bounds) - 1,
            "converged": bool(result.converged),
            "trace": thin(trace / len(data.Y)),
        }
        return figures, params

    return cached(args, name, settings, run)


# ---------------------------------------------------------------------------------------------------------------
# What comes out


def spread(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """The mean, with its standard error if there are several values."""
    text = f"{np.mean(values):{sign}.{digits}f}"
    if len(values) == 1:
        return text
    return f"{text} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.{digits}f}"


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a title and columns, flush right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    print(f"\n{title}")
    for line in (heads, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def compare(title: str, fits: Mapping[str, Sequence[dict]]) -> None:
    """
    Print the bounds of each seed, their means, and gains over the first conditional paired by seed.

    :param fits: for each conditional the figures of each seed.
    """
    base, *others = fits
    bounds = {c: np.array([f["elbo_per_row"] for f in runs]) for c, runs in fits.items()}
    heads = ["seed", *fits, *(f"{c} gains" for c in others)]
    heads += ["noise variance", "mean d/σ²", "NN errors", "relevant dims"]
    rows = []
    for seed in range(len(bounds[base])):
        here = [runs[seed] for runs in fits.values()]
        rows.append(
            [
                str(seed),
                *(f"{f['elbo_per_row']:.3f}" for f in here),
                *(f"{bounds[c][seed] - bounds[base][seed]:+.3f}" for c in others),
                " ".join(f"{f['noise_variance']:.5f}" for f in here),
                " ".join(f"{f['residual_over_noise']:.3f}" for f in here),
                " ".join(str(f["nn_errors"]) for f in here),
                " ".join(str(f["relevant_dims"]) for f in here),
            ]
        )
    means = [spread(v) for v in bounds.values()] + [spread(bounds[c] - bounds[base], sign="+") for c in others]
    rest = []
    for key, digits in (("noise_variance", 5), ("residual_over_noise", 3), ("nn_errors", 1), ("relevant_dims", 1)):
        rest.append(" ".join(f"{np.mean([f[key] for f in runs]):.{digits}f}" for runs in fits.values()))
    table(title, heads, [*rows, ["mean", *means, *rest]])


def compare_here(title: str, runs: Sequence[dict]) -> None:
    """Print all bounds at the parameters of one run of each seed."""
    bounds = {c: np.array([f["bounds_here"][c] for f in runs]) for c in runs[0]["bounds_here"]}
    base, *others = bounds
    rows = [
        [
            str(seed),
            *(f"{v[seed]:.3f}" for v in bounds.values()),
            *(f"{bounds[c][seed] - bounds[base][seed]:+.3f}" for c in others),
            f"{f['gain_here']:+.3f}",
        ]
        for seed, f in enumerate(runs)
    ]
    rows.append(
        [
            "mean",
            *(spread(v) for v in bounds.values()),
            *(spread(bounds[c] - bounds[base], sign="+") for c in others),
            spread([f["gain_here"] for f in runs], sign="+"),
        ]
    )
    heads = ["seed", *bounds, *(f"{c} gains" for c in others), "½D mean(d/σ² − log(1 + d/σ²))"]
    table(title, heads, rows)


#: Stages that continue, and those that they continue from.
BEFORE = {"continued": "independent", "collapsed_continued": "collapsed"}


def stage_steps(stage: str, args: argparse.Namespace) -> int:
    return {
        "independent": args.steps,
        "continued": args.continue_steps,
        "collapsed": args.collapsed_steps,
        "collapsed_continued": args.collapsed_steps // 3,
    }[stage]


def how(stage: str) -> str:
    return "collapsed, by L-BFGS" if stage.startswith("collapsed") else "uncollapsed, by SVI"


def draw(fits: Mapping[str, Mapping[str, Sequence[dict]]], args: argparse.Namespace, out: Path) -> Path:
    """
    The traces of the trainings: their mean over seeds, with a band from the lowest to the highest. Those that continue
    are drawn from where they start, the bound of ``prior`` at its solution, as the seeds' solutions lie apart.
    """
    from matplotlib import pyplot as plt

    from npgp.plots import COLOURS

    colours = dict(zip(dict.fromkeys((*CONDITIONALS, *COLLAPSED)), COLOURS, strict=False))
    columns = 2 if len(fits) > 1 else 1
    down = -(-len(fits) // columns)
    size = (5.4 * columns, 4.0 * down + 0.2)
    figure, axes = plt.subplots(down, columns, figsize=size, layout="constrained", squeeze=False)
    for ax in axes.flat[len(fits) :]:
        ax.set_visible(False)
    for ax, (stage, runs) in zip(axes.flat, fits.items(), strict=False):
        zero, steps = np.zeros((len(next(iter(runs.values()))), 1)), stage_steps(stage, args)
        first = stage in BEFORE.values()
        if not first:
            zero = np.array([[f["elbo_per_row"]] for f in fits[BEFORE[stage]]["prior"]])
        limits = []
        for conditional, figures in runs.items():
            traces = np.array([f["trace"] for f in figures]) - zero
            parts = np.array_split(traces, min(DRAWN_POINTS, traces.shape[1]), axis=1)
            traces = np.stack([part.mean(1) for part in parts], 1)
            at = (np.arange(traces.shape[1]) + 0.5) * steps / traces.shape[1]
            final = np.array([f["elbo_per_row"] for f in figures]) - zero[:, 0]
            ax.plot(at, traces.mean(0), color=colours[conditional], label=f"{conditional}: {spread(final, 2)}")
            ax.fill_between(at, traces.min(0), traces.max(0), color=colours[conditional], alpha=0.18, lw=0)
            limits.append([np.quantile(traces.min(0), 0.15 if first else 0.0), traces.max()])
        low, high = np.min(limits, 0)[0], np.max(limits, 0)[1]
        margin = 0.05 * (high - low)
        ax.set_ylim(low - margin, high + margin)  # the first steps are far below
        ax.set_title(("" if first else "trained on from the solution of prior, ") + how(stage), fontsize=10)
        ax.set_xlabel("step")
        ax.set_ylabel("bound per row (nats)" if first else "bound per row, less prior's at its solution")
        error = " ± standard error" if len(zero) > 1 else ""
        place = "lower right" if first else "best"
        ax.legend(frameon=False, loc=place, title=f"at the end: mean{error}", alignment="left")
    seeds = "lines: mean over seeds, bands: lowest to highest" if args.seeds > 1 else "one seed"
    figure.suptitle(f"Oil flow ({args.data}), M = {args.inducing}; {seeds}", fontsize=11)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "oil_bounds.png"
    figure.savefig(path, dpi=130)
    return path


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    if args.data == "real":
        data = datasets.oil_flow("train")
        data = datasets.OilFlow(data.Y[: args.rows], data.labels[: args.rows], None)
    else:
        data = datasets.simulate_oil_flow(jax.random.key(0), args.rows or 200)
    rows, columns = data.Y.shape
    print(
        f"oil flow, {args.data}: {rows} rows of {columns} measurements; Q = {args.latent_dim}, M = {args.inducing}, "
        f"{args.steps} steps; free: {args.positive}, of q(x) {args.latent_positive}; initial noise {args.noise_start:g}"
    )
    fits: dict[str, dict[str, list]] = {}
    parts = [("independent", "continued", fit, args.conditional, evaluator)]
    if args.collapsed:
        parts.append(("collapsed", "collapsed_continued", fit_collapsed, COLLAPSED, collapsed_evaluator))
    for stage, continued, train, names, make_evaluator in parts:
        evaluate = make_evaluator(args, data.Y)
        for seed in range(args.seeds):
            params = {}
            for name in names:
                figures, params[name] = train(args, data, evaluate, seed, name)
                fits.setdefault(stage, {}).setdefault(name, []).append(figures)
            for name in names if "prior" in names and stage_steps(continued, args) else []:
                figures, _ = train(args, data, evaluate, seed, name, params["prior"])
                fits.setdefault(continued, {}).setdefault(name, []).append(figures)

    for stage, runs in fits.items():
        steps = f"{how(stage)}, {stage_steps(stage, args)} steps"
        if stage in BEFORE:
            compare(f"Each trained on from the solution of prior, {steps}", runs)
        else:
            compare(f"Each trained from the same start, {steps}: bound per row in nats", runs)
        if stage.startswith("collapsed"):
            ends = [f["converged"] for figures in runs.values() for f in figures]
            print(f"L-BFGS converged in {sum(ends)} of {len(ends)} runs; the others ended at their last step.")
        for name, figures in runs.items() if stage not in BEFORE else []:
            compare_here(f"All bounds at the solution of {name}", figures)
    print(f"\nwrote {draw(fits, args, args.out)}")

    settings = (*SVI_SETTINGS, "continue_steps", "continue_rate", "collapsed_steps")
    report: dict[str, Any] = {"settings": {key: getattr(args, key) for key in settings}, "n_rows": rows}
    without_traces = {
        stage: {c: [{k: v for k, v in f.items() if k != "trace"} for f in figures] for c, figures in runs.items()}
        for stage, runs in fits.items()
    }
    report |= without_traces
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {args.json}")
    return report


if __name__ == "__main__":
    main()
