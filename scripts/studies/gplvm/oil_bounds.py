#!/usr/bin/env python
"""What the choice of bound is worth for a Bayesian GPLVM of the oil-flow data: Bui, Ashman & Turner 2025, figure 5.

Three comparisons of ``prior`` (the classical bound), ``tight`` and ``grouped`` at the same settings, over several seeds
(of the inducing inputs and of the draws of x):

    independent   each trained from the same start
    continued     each trained further from the solution of ``prior``
    equal         each evaluated at the same parameters, those that ``prior`` was trained to

The first says which optimum training finds, and only the last two what the bound itself is worth there: in a model
with many local optima these are different things.

    python scripts/studies/gplvm/oil_bounds.py    simulated, a minute or two
    NPGP_DATA=... python scripts/studies/gplvm/oil_bounds.py --data real --seeds 5 --steps 20000
    NPGP_DATA=... python scripts/studies/gplvm/oil_bounds.py --data real --seeds 5 --steps 20000 --collapsed

Uncollapsed bounds are trained by Adam on all rows, one draw of x at each step, collapsed ones by L-BFGS on the
logarithms of positive parameters; all in float64. Every run is kept in a file of its own, and not repeated if that file
has the same settings.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import datasets, gplvm
from npgp.gplvm import metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, whole, write_json, write_picture
from studies.gplvm.bounds import (
    COLLAPSED,
    CONDITIONALS,
    PENALTY_DRAWS,
    collapsed_evaluator,
    evaluator,
    make,
    make_collapsed,
)
from studies.gplvm.bounds_report import BEFORE, compare, compare_here, draw, how, stage_steps
from studies.gplvm.training import POSITIVE, add_arguments, chosen, kept, oil_flow

#: Points of a trace that are kept.
TRACE_POINTS = 400
START = ("data", "rows", "latent_dim", "inducing", "noise_start", "latent_scale", "draws")
SVI_SETTINGS = (*START, "steps", "learning_rate", "positive", "latent_positive", "group_size")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--conditional", nargs="+", choices=CONDITIONALS, default=list(CONDITIONALS))
    add("--seeds", type=whole, default=2)
    add("--latent-dim", type=whole, default=10)
    add("--group-size", type=whole, default=16, help="largest group of rows, by median split of the data")
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
    rate = dict(default=0.01, help="at first; it falls to 2%% along a cosine")
    add_arguments(parser, minibatches=False, inducing=25, steps=1000, learning_rate=rate)
    args = parser.read(argv)
    args.latent_positive = args.latent_positive or args.positive
    args.continue_steps = args.steps // 2 if args.continue_steps is None else args.continue_steps
    args.conditional = [c for c in CONDITIONALS if c in args.conditional]
    return args


def with_params(args: argparse.Namespace, name: str, settings: dict, run: Callable[[], tuple[dict, dict]]) -> tuple:
    """The figures and the parameters of a run, which has files of its own for both."""
    file = args.runs / f"{name}.npz"

    def write() -> dict:
        figures, params = run()
        args.runs.mkdir(parents=True, exist_ok=True)
        np.savez(file, **params)
        return figures

    if not file.exists():  # a figure without parameters is of no use here
        (args.runs / f"{name}.json").unlink(missing_ok=True)
    figures = kept(args, name, settings, write)
    with np.load(file) as params:
        return figures, dict(params)


def thin(trace: np.ndarray) -> list[float]:
    """Means over windows of steps."""
    return [float(np.mean(part)) for part in np.array_split(trace, min(TRACE_POINTS, len(trace)))]


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
        "nn_errors": metrics.nearest_neighbor_errors(params["x.loc"] / params["lengthscale"], labels),
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
    settings = chosen(args, SVI_SETTINGS)
    if before is not None:
        settings |= {"continue_steps": steps, "continue_rate": rate}

    def run():
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

    return with_params(args, name, settings, run)


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
    settings = chosen(args, (*START, "collapsed_steps"))

    def run():
        model = make_collapsed(args, data.Y, seed, form, PENALTY_DRAWS)
        result = model.fit(data.Y, steps, params=before, progress=False)
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

    return with_params(args, name, settings, run)


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    data = oil_flow(args)
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
    print()
    write_picture(args.out / "oil_bounds.png", draw(fits, args))

    settings = (*SVI_SETTINGS, "continue_steps", "continue_rate", "collapsed_steps")
    report: dict[str, Any] = {"settings": chosen(args, settings), "n_rows": rows}
    for stage, runs in fits.items():
        report[stage] = {c: [{k: v for k, v in f.items() if k != "trace"} for f in fs] for c, fs in runs.items()}
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
