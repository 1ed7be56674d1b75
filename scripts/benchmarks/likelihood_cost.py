#!/usr/bin/env python
"""What a step with each likelihood costs: the ELBO and its gradient with ``tight``, beside ``prior`` and Bernoulli's.

All likelihoods that are built in, and some of NumPyro's distributions by a function, each with data that it simulated
itself, in one process and in turns. Ratios are medians of those within a round.

    python scripts/benchmarks/likelihood_cost.py --cpu-time --out scripts/benchmarks/results/likelihoods.md
    python scripts/benchmarks/likelihood_cost.py --only Beta "function: Beta" --repetitions 50
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import likelihoods as built_in

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, clock, command, interleaved, one_blas_thread, table
from likelihood_cases import CUTS, S, every_likelihood


class Learned(NamedTuple):
    """A function to a distribution with a parameter that is learned."""

    function: Callable[[Any], Callable[..., Any]]


LEARNED = {
    "Laplace": lambda c: lambda f: dist.Laplace(f, 0.5 * c),
    "Beta": lambda c: lambda f: dist.Beta(5 * c * S(f), 5 * c * S(-f)),
    "BetaBinomial": lambda c: lambda f: dist.BetaBinomial(5 * c * S(f), 5 * c * S(-f), 40),
    "NegativeBinomial2": lambda c: lambda f: dist.NegativeBinomial2(jnp.exp(f), 1.75 * c),
    "OrderedLogistic": lambda c: lambda f: dist.OrderedLogistic(f, c * jnp.asarray(CUTS, f.dtype)),
}


def cases(rows: int) -> dict[str, Any]:
    """A likelihood by each name; and those of several latent values, or of rows that are not alike."""
    cuts = CUTS + 0.2 * (np.arange(rows)[:, None] % 3 - 1)
    return every_likelihood() | {
        "Ordinal, cutpoints per row": built_in.Ordinal(cuts),
        "HeteroscedasticGaussian": built_in.HeteroscedasticGaussian(),
        "ZeroInflated, Poisson": built_in.ZeroInflated(npgp.Poisson()),
        "Hurdle, Poisson": built_in.Hurdle(npgp.Poisson()),
        "Softmax, 3 classes": built_in.Softmax(3),
        **{f"function, learned: {name}": Learned(function) for name, function in LEARNED.items()},
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these likelihoods, beside Bernoulli")
    out = dict(default=None, metavar="FILE", help="write the table to this file, with the command on top")
    parser.shared("float64", "quick", "cpu-time", rows=1000, inducing=50, repetitions=61, out=out)
    args = parser.read(argv, {"rows": 30, "inducing": 5, "repetitions": 1})
    unknown = set(args.only or ()) - set(cases(args.rows))
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: there is {', '.join(cases(args.rows))}")
    return args


def step(likelihood: Any, conditional: str, args: argparse.Namespace) -> Callable[[], Any]:
    """The negative ELBO of a GP for each latent value, and its gradient in all parameters; compiled."""
    num_latents = getattr(likelihood, "num_latents", 1)
    X = np.linspace(-2.0, 2.0, args.rows)[:, None]
    Z = np.linspace(-2.0, 2.0, args.inducing)[:, None]
    f = np.stack([np.sin(3.0 * X[:, 0] + i) for i in range(num_latents)])
    f = f[0] if num_latents == 1 else f
    learned = isinstance(likelihood, Learned)
    y = built_in.as_likelihood(likelihood.function(1.0) if learned else likelihood).sample(jax.random.key(0), f)

    def model(y):
        def draw(name):
            return npgp.SparseGP(name, npgp.RBF(numpyro.param(f"{name}.lengthscale", 0.5)), Z).draw()

        functions = [draw(f"f{i}")(X) for i in range(num_latents)]
        of = likelihood.function(numpyro.param("parameter", 1.0)) if learned else likelihood
        npgp.observe("y", functions if num_latents > 1 else functions[0], of, obs=y, conditional=conditional)

    svi = SVI(model, npgp.AutoSparseGP(model), optax.sgd(0.0), TraceMeanField_ELBO())
    state = svi.init(jax.random.key(0), y)

    @jax.jit
    def value_and_gradient(params, y):
        def loss(params):
            return svi.loss.loss(state.rng_key, svi.constrain_fn(params), svi.model, svi.guide, y)

        return jax.value_and_grad(loss)(params)

    params = svi.optim.get_params(state.optim_state)
    value, gradient = value_and_gradient(params, y)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((value, gradient)))
    return lambda: value_and_gradient(params, y)


def main(argv: list[str] | None = None) -> dict[str, tuple[float, float, float, float]]:
    args = parse(argv)
    chosen = {
        name: case for name, case in cases(args.rows).items() if not args.only or name in ("Bernoulli", *args.only)
    }
    with jax.enable_x64(args.float64), one_blas_thread():
        calls = {(name, c): step(case, c, args) for name, case in chosen.items() for c in ("prior", "tight")}
        seconds = interleaved(calls, args.repetitions, clock(args.cpu_time))
    report = {}
    for name in chosen:
        prior, tight = seconds[name, "prior"], seconds[name, "tight"]
        ratios = np.median(tight / prior), np.median(tight / seconds["Bernoulli", "tight"])
        report[name] = tuple(float(x) for x in (1e3 * np.median(prior), 1e3 * np.median(tight), *ratios))
    lines = [(name, *(f"{x:.2f}" for x in figures)) for name, figures in report.items()]
    header = ("likelihood", "prior, ms", "tight, ms", "tight/prior", "tight/Bernoulli's")
    text = table(header, lines, markdown=True)
    print(text)
    if args.out:
        precision = "float64" if args.float64 else "float32"
        intro = (
            f"# A step with each likelihood\n\n    {command(__file__, argv)}\n\nThe ELBO and its gradient, {args.rows} "
            f"rows, M = {args.inducing}, {precision}; medians of {args.repetitions} rounds in turn"
            f"{', of the processor' if args.cpu_time else ''}.\n\n"
        )
        args.out.write_text(intro + text + "\n")
    return report


if __name__ == "__main__":
    main()
