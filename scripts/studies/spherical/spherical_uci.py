#!/usr/bin/env python
"""Spherical features and orthogonal points on UCI regression sets, as in tables 3 and 4 of Tiao et al. (2023).

Test RMSE and negative log predictive density (NLPD) with the zonal arc-cosine (order 1) and Matérn-5/2 kernels. The
first block is activations (ReLU, softplus) or inducing points, in three sizes: M features, M with M orthogonal points
as second block (both with a dense covariance), and 2M features. M is 128.

    python scripts/studies/spherical/spherical_uci.py --sets yacht energy concrete --iterations 300 --json out/uci.json
    python scripts/studies/spherical/spherical_uci.py --sets kin8nm power --iterations 60 --json out/uci.json
    python scripts/studies/spherical/spherical_uci.py --sets keggdirected protein kin40k --kernels arccos
        --levels 6 --iterations 60 --repetitions 1 --json out/uci.json
    python scripts/studies/spherical/spherical_uci.py --sets simulated --quick

All but the last need the sets in the folder named by ``NPGP_DATA``. A run takes hours; with ``--json`` every fit is
written when it ends, and a later run with the same file does those that are missing and prints all of them
(``--report``: prints only).

The paper's own numbers are in ``tiao2023_tables_3_4.json``, beside this script, and are printed beside ours; cells of
ours that are worse by more than two standard errors (of the difference) are marked. Its tables print kin8nm's NLPD
without the minus sign, which is restored there. The paper's claim is tested besides: M orthogonal points beside M
activations do better than 2M activations. ``--data FILE.npz`` is for a set of your own, arrays X (N, D) and y (N,).

What is done: inputs and target standardized on the training rows, errors and densities in the target's own units. The
repetitions are the first of the sets' own random splits with a tenth of the rows for testing. Fits are collapsed
bounds, by L-BFGS in float64 over ARD weights, bias, lengthscale, noise variance and the directions or points; the
kernel's variance is 1, as its norms, of degree 1, have the scale already. The kernel starts at the best of a few
hyperparameters, points at k-means centers and directions at theirs. M + M and 2M continue from M's solution
for as many iterations again, with the same M new rows, of greatest variance given the features there are: as points, or
as directions. Both kernels are of bias-augmented inputs on the sphere, for points too: the prior is the same for all
features (which Matérn kernel the paper's points have, we could not see).

Activations have levels 0 to L, less those that the kernel lacks. L is chosen on the first repetition: by default it is
the one with the best bound after a quarter of the iterations; with ``--levels left-out`` the one that leaves least
variance out at the start (``npgp.inducing.levels.choose_levels``); ``--levels 6`` is the paper's choice, levels 0 to 5.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, one_blas_thread, whole, write_json
from studies import own_file
from studies.spherical.uci_data import LARGER, SETS, load
from studies.spherical.uci_fits import FEATURES, KERNELS, three_sizes
from studies.spherical.uci_tables import by_cell, claim, compared, levels_and_shares

#: Tables 3 and 4 of Tiao, Dutordoir & Picheny 2023: means and spreads over five repetitions.
PUBLISHED = Path(__file__).with_name("tiao2023_tables_3_4.json")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--sets", nargs="+", choices=(*SETS, *LARGER, "simulated"), default=list(SETS))
    add("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    add("--features", nargs="+", choices=FEATURES, default=list(FEATURES), help="of the first block")
    add("--size", type=whole, default=128, help="M")
    add("--iterations", type=whole, default=200, help="of L-BFGS at most, for M; and as many again")
    add("--levels", default="bound", help="'bound', 'left-out', or a number of levels, such as 6")
    add("--conditional", choices=("prior", "tight"), default="prior", help="the paper has 'prior'")
    add("--report", action="store_true", help="fit nothing: print what the file of --json has")
    add("--reference", type=Path, default=PUBLISHED, help="JSON file of numbers to be printed beside ours")
    add("--data", type=Path, help="a file of your own, in place of the sets")
    parser.shared(
        "quick",
        repetitions=dict(default=5, help="train/test splits, the sets' first"),
        rows=dict(help="of larger training sets, as many at random; of 'simulated', as many"),
        json=dict(help="write every fit to this file, and do not repeat those it has"),
    )
    args = parser.read(argv, dict(size=8, repetitions=2, iterations=10, rows=100))
    if args.levels not in ("bound", "left-out") and not (args.levels.isdigit() and int(args.levels) > 0):
        parser.error("--levels must be 'bound', 'left-out' or a positive number.")
    if args.report and args.json is None:
        parser.error("--report needs --json.")
    if args.data is not None:
        args.sets = [args.data.stem]
    return args


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Fit what the file does not have; all records of these settings."""
    saved = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    same = {"size": args.size, "levels_rule": args.levels, "conditional": args.conditional, "most_rows": args.rows}
    records = [r for r in saved if all(r[key] == value for key, value in same.items())]
    jobs = itertools.product(range(args.repetitions), args.sets, args.kernels, args.features)
    for repetition, name, kernel, feature in () if args.report else jobs:
        cell = {"set": name, "kernel": kernel, "feature": feature}
        mine = [r for r in records if all(r[key] == value for key, value in cell.items())]
        if any(r["repetition"] == repetition for r in mine):
            continue
        levels = {r["column"]: tuple(r["levels"]) for r in mine}
        with one_blas_thread():
            data = load(name, repetition, args.rows) if args.data is None else own_file.split(args.data, repetition)
            reports = three_sizes(data, kernel, feature, args, levels)
        for column, report in reports.items():
            records.append({**cell, "column": column, "repetition": repetition, **same, **report})
            saved.append(records[-1])
        write_json(args.json, saved, say=False)
        print(
            f"{name} {kernel} {feature}, repetition {repetition}: "
            + "; ".join(
                f"{column} RMSE {r['rmse']:.4g} NLPD {r['nlpd']:.3f} bound {r['bound']:.3f} ({r['seconds']:.0f} s)"
                for column, r in reports.items()
            ),
            flush=True,
        )
    return records


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    records = run(args)
    reference = json.loads(args.reference.read_text())
    cells = by_cell(records)
    reference = {name: reference[name] for name, *_ in cells if name in reference}
    if not cells:
        print("Nothing is there of these settings.")
        return records
    print(
        f"\nConditional '{args.conditional}'; levels of activations: {args.levels}. Means over repetitions ± standard "
        f"errors{'; in brackets, those of the reference' if reference else ''}.\n"
    )
    print("Test RMSE, in the target's units\n")
    compared(cells, args.size, "rmse", reference, 3)
    print("Negative log predictive density of test rows, in the target's units\n")
    compared(cells, args.size, "nlpd", reference, 3)
    print("Bound for each training row, of the standardized target\n")
    compared(cells, args.size, "bound", {}, 3)
    print("Gain of orthogonal points over as many more features of the first block's kind; positive is a gain\n")
    claim(cells, args.size)
    print("Highest level of activations, and share of f's variance left out by all blocks (mean of d_n/k_nn)\n")
    levels_and_shares(cells, args.size)
    return records


if __name__ == "__main__":
    main()
