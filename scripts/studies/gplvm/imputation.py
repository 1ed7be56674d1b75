#!/usr/bin/env python
"""Missing entries imputed by a Bayesian GPLVM, from what is present in the same rows.

``oil``: entries of the oil-flow data are missing at random, from the model's training too. RMSE of the imputed values
against iterative PCA, the mean of the nearest rows, linear regressions and column means; how many of the true values
lie in 90% intervals; and, on the complete data, nearest-neighbor errors in latent space and the number of relevant
dimensions.

``faces``: half of each of some video frames is missing. The model is trained on the other frames, in minibatches and
float32; the latents of the new ones are inferred from the half that is seen. RMSE on the other half against the mean
face, the training face that is nearest on the seen half, and probabilistic PCA.

    python scripts/studies/gplvm/imputation.py oil                               simulated data, a minute or two
    python scripts/studies/gplvm/imputation.py faces                             simulated pictures
    NPGP_DATA=... python scripts/studies/gplvm/imputation.py oil --data real     the data of Bishop & James 1993
    NPGP_DATA=... python scripts/studies/gplvm/imputation.py faces --data real   1965 Frey faces of 28 × 20 pixels

The ranks of PCA and the number of nearest rows are those that are best on further entries, or frames, held out of the
training data. Every run on the oil flow is kept in a file of its own, and not repeated if that has the same settings.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, write_json
from studies.gplvm import face_imputation, oil_imputation
from studies.gplvm.training import add_arguments, fill


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    oil, faces = modes.add_parser("oil"), modes.add_parser("faces")
    for mode, latent_dim, steps in ((oil, 10, "1500; 6000 for real data"), (faces, 20, "1500; 3000 for real data")):
        mode.add_argument("--latent-dim", type=int, default=latent_dim)
        add_arguments(mode, inducing=50, steps=dict(help=steps))

    oil.add_argument("--missing", nargs="+", type=float, help="shares; 0 0.3, or 0 0.1 ... 0.5 for real data")
    oil.add_argument("--seeds", type=int, help="1, or 2 for real data")
    anew = "infer the latents anew, each from so many candidates, which takes minutes; 0: do not"
    oil.add_argument("--starts", type=int, default=0, help=anew)
    oil.add_argument("--runs", type=Path, default=Path("out/imputation"), help="folder of the single runs")

    add = faces.add_argument
    add("--held-out", choices=["last", "every"], default="last", help="the last frames, or evenly spaced ones")
    add("--new-rows", type=int, help="how many; 10, or 100 of the real ones")
    halves = face_imputation.HALVES
    add("--halves", nargs="+", choices=halves, default=["lower", "right"], help="that are missing, in turn")
    add("--covariances", choices=["dense", "diagonal"], default="dense", help="of the inducing values")
    add("--starts", type=int, default=4, help="candidates from which the latents of a frame are inferred")
    faces.shared("seed")

    args = parser.read(argv)
    real = args.data == "real"
    fill(args, {"rows": None if real else 200})
    if args.mode == "oil":
        missing = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5] if real else [0.0, 0.3]
        fill(args, {"steps": 6000 if real else 1500, "seeds": 2 if real else 1, "missing": missing})
        if not all(0.0 <= share < 1.0 for share in args.missing):
            parser.error("--missing must be shares from 0 to below 1.")
    else:
        fill(args, {"steps": 3000 if real else 1500, "new_rows": 100 if real else 10})
    if args.latent_dim < 1 or args.batch_size < 0:
        parser.error("counts must be positive.")
    return args


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    report = (oil_imputation if args.mode == "oil" else face_imputation).study(args)
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
