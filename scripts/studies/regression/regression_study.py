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
target are standardized, and so are the errors and log-likelihoods. Of kin40k and protein a random subset of rows is
used: at full size they are for minibatches.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, one_blas_thread, whole, write_json, write_picture
from studies.regression.collapsed_fits import KERNELS
from studies.regression.held_out import SIZES, TABLE1, grouped, plot_log_likelihoods, table1
from studies.regression.snelson_bounds import snelson
from studies.regression.svi_steps import steps

PARTS = {"grouped": grouped, "snelson": snelson, "steps": steps, "table1": table1}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all if omitted")
    add("--sets", nargs="+", choices=(*SIZES, *TABLE1), help="these data sets alone")
    add("--splits", type=whole, default=1, help="how many of the train/test splits")
    add("--iterations", type=whole, default=300, help="of L-BFGS, at most")
    add("--kernel", choices=KERNELS, default="matern32", help="for grouped and table1; with ARD unless isotropic")
    add("--restarts", type=int, default=24, help="further starts on Snelson's data, at random")
    rows = dict(default=8000, help="of larger training sets, as many rows at random")
    inducing = dict(default=100, help="inducing points, for table1")
    parser.shared("cpu-time", "quick", "out", "json", rows=rows, inducing=inducing, repetitions=21, seed=1)
    args = parser.read(argv)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(unknown)}; parts are {', '.join(PARTS)}.")
    args.parts = args.parts or list(PARTS)
    if args.quick:
        args.rows, args.iterations, args.inducing, args.restarts, args.repetitions = 120, 8, 10, 1, 2
        args.sets = args.sets or ["concrete", "wine"]
    if args.restarts < 0:
        parser.error("--restarts must not be negative.")
    return args


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    with one_blas_thread():
        report: dict[str, Any] = {part: PARTS[part](args) for part in args.parts}
    if report.get("grouped"):
        write_picture(args.out / "regression.png", plot_log_likelihoods(report["grouped"]))
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
