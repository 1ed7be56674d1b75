"""The methods that are compared: what people are told of them, and which data they are not for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from studies.approximations.data import Data

#: The most columns that HSGP is for.
HSGP_COLUMNS = 3
#: Methods that are trained in minibatches.
MINIBATCHES = ("svgp", "vnngp")


@dataclass(frozen=True)
class Method:
    """
    What people are told of a method.

    :param title: its name.
    :param value: what is printed of the model: a lower bound on the log evidence, or a log density.
    :param advice: when to take it, in one line.
    """

    title: str
    value: str
    advice: str


BOUND, DENSITY = "lower bound", "density of its own model"
METHODS = {
    "exact": Method(
        "exact GP",
        "log evidence",
        "up to a few thousand rows: nothing to choose, and what the others approximate. O(N³) time, O(N²) memory.",
    ),
    "sgpr": Method(
        "SGPR",
        BOUND,
        "smooth functions: M points must cover the inputs at the distance of a lengthscale. A bound, so it is safe to "
        "optimize and to compare.",
    ),
    "solve": Method(
        "SOLVE-GP, tight",
        BOUND,
        "as SGPR, with the points in two blocks and the tighter conditional: a better bound as a rule, and "
        "cheaper from M = 256 on.",
    ),
    "fitc": Method(
        "FITC",
        DENSITY,
        "where noise differs between regions, or densities of test rows count most. No bound: it may be above the "
        "exact evidence, and its noise too small.",
    ),
    "nngp": Method(
        "NNGP, responses",
        DENSITY,
        "many rows, few columns, short lengthscales: maps. No inducing points to run out of; O(N k³) time, O(N k) "
        "memory. Gaussian noise; npgp.neighbors.NNGP for others.",
    ),
    "svgp": Method(
        "SVGP, minibatches",
        BOUND,
        "any likelihood, more rows than fit in memory, or GPs within larger models. As smooth as SGPR; needs thousands "
        "of steps.",
    ),
    "vnngp": Method(
        "VNNGP, minibatches",
        "lower bound for the NNGP",
        "as NNGP, with any likelihood, in minibatches: every row is an inducing point. q is mean-field, so variances "
        "come out small where neighbors are strongly correlated.",
    ),
    "hsgp": Method(
        "HSGP (NumPyro)",
        DENSITY,
        "one or two columns, and lengthscales that are long beside the domain over the functions per column: the "
        "cheapest of all. Shorter ones it cannot see.",
    ),
}


def reason_against(name: str, data: Data, args: argparse.Namespace) -> str | None:
    """Why a method is left out, unless it is asked for by name."""
    rows, columns = data.X.shape
    if name == "hsgp" and columns > HSGP_COLUMNS:
        return f"{columns} columns; its functions are a grid of all columns, for {HSGP_COLUMNS} at most"
    if args.methods is not None:
        return None
    if name == "exact" and rows > args.exact_rows:
        return f"{rows} rows, more than --exact-rows {args.exact_rows}"
    if name in MINIBATCHES and rows < 2 * args.batch_size:
        return f"{rows} rows need no minibatches of {args.batch_size}"
    return None
