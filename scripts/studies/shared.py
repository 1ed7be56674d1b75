"""What several studies fit and summarize with: learned parameters, L-BFGS, draws by MCMC, means over splits."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel
from scipy.optimize import OptimizeResult, minimize

from common import moments, plus_minus, table, write_json

#: Logs of lengthscales, variance and noise variance stay within these.
LOG_BOUNDS = (-9.0, 7.0)


def learned(start: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a model with these starts: hyperparameters are positive, what is called inducing… is not."""
    positive = constraints.softplus_positive
    return {
        name: numpyro.param(name, value, constraint=constraints.real if "inducing" in name else positive)
        for name, value in start.items()
    }


def mcmc_draws(
    kernel: MCMCKernel, key: jax.Array, warmup: int, draws: int, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Draws of one chain, by one program; the model's arguments last."""

    @jax.jit
    def run(key):
        mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, progress_bar=False)
        mcmc.run(key, *args, **kwargs)
        return mcmc.get_samples()

    return run(key)


def lbfgs(
    loss: Callable[[np.ndarray], tuple[Any, Any]],
    start: np.ndarray,
    iterations: int,
    num_logs: int = 0,
    limits: tuple[float, float] = LOG_BOUNDS,
    **options: float,
) -> OptimizeResult:
    """
    Minimize from a start.

    :param loss: the value and its gradient. A value that is not finite sends the line search back.
    :param num_logs: so many first entries are logs, and stay within the limits.
    :param options: of SciPy's L-BFGS-B, such as ``ftol``.
    """

    def numpy_loss(theta):
        value, slope = loss(theta)
        return (float(value), np.asarray(slope, float)) if np.isfinite(value) else (1e10, np.zeros_like(theta))

    bounds = [limits] * num_logs + [(None, None)] * (len(start) - num_logs)
    options = {"maxiter": iterations, "maxfun": 2 * iterations, "ftol": 1e-12, "gtol": 1e-8} | options
    return minimize(numpy_loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)


def summarize(fits: Sequence[dict], by: Sequence[str], figures: Sequence[str]) -> list[dict[str, Any]]:
    """Means and standard errors (``…_error``) of figures over the fits that agree in these keys."""
    groups: dict[tuple, list[dict]] = {}
    for fit in fits:
        groups.setdefault(tuple(fit[key] for key in by), []).append(fit)
    rows = []
    for keys, members in groups.items():
        row = dict(zip(by, keys, strict=True)) | {"fits": len(members)}
        for key in figures:
            row[key], row[f"{key}_error"] = moments(fit[key] for fit in members)
        rows.append(row)
    return rows


def summary_table(
    rows: Sequence[dict], by: Mapping[str, str], figures: Mapping[str, tuple[str, int]], markdown: bool = False
) -> str:
    """Rows of :func:`summarize`; the columns' titles, and the digits of figures."""
    cells = [
        [row[key] for key in by]
        + [plus_minus(row[key], row[f"{key}_error"], digits) for key, (_, digits) in figures.items()]
        for row in rows
    ]
    return table(
        [*by.values(), *(title for title, _ in figures.values())], cells, left=range(len(by)), markdown=markdown
    )


def show_and_write(
    report: dict[str, Any],
    tables: Callable[[list[dict[str, Any]], bool], str],
    title: str,
    note: str,
    args: argparse.Namespace,
) -> None:
    """
    The end of a study: tables of its fits are printed, and written where ``--markdown`` and ``--json`` ask for it.

    :param report: the command and the fits.
    :param tables: made of the fits, and whether in Markdown.
    :param title: heading of the Markdown file.
    :param note: what the figures are.
    """
    print(f"\n{tables(report['fits'], False)}\n\n{note}")
    if args.markdown is not None:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        about = f"# {title}\n\n    {report['command']}\n\n{note}\n\n"
        args.markdown.write_text(f"{about}{tables(report['fits'], True)}\n", encoding="utf-8")
    write_json(args.json, report)
