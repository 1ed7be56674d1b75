#!/usr/bin/env python
"""The README's picture: its first model, fitted to data that are simulated.

python scripts/examples/first_model.py --out docs/_static
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from common import Arguments, write_picture

EFFECT = 0.7
Z = np.linspace(0.0, 6.0, 20)[:, None]


def truth(x: np.ndarray) -> np.ndarray:
    return np.sin(2.0 * x)


def simulated(rows: int = 120) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0.0, 6.0, (rows, 1)), axis=0)
    dose = rng.uniform(size=rows)
    return X, dose, truth(X[:, 0]) + EFFECT * dose + 0.2 * rng.normal(size=rows)


def model(X, dose, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    f = npgp.SparseGP("f", npgp.RBF(lengthscale), inducing=Z).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X) + effect * dose, npgp.Gaussian(scale=noise), obs=y)


def main(argv: list[str] | None = None) -> None:
    parser = Arguments(__doc__)
    parser.shared("out", "seed", steps={"default": 400})
    args = parser.read(argv)

    X, dose, y = simulated()
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.05, args.steps), TraceMeanField_ELBO())
    key = jax.random.key(args.seed)
    params = npgp.fit(svi, key, args.steps, X, dose, y=y, progress=False).params
    grid = np.linspace(-0.5, 6.5, 200)
    f = npgp.posterior("f", model, guide, params, X, dose)
    mean, variance = map(np.asarray, f.mean_and_variance(grid[:, None]))
    draws = guide.sample_posterior(key, params, X, dose, sample_shape=(4000,))
    effect = np.asarray(draws["effect"])
    print(f"effect {effect.mean():.2f} ± {effect.std():.2f}, the simulation's {EFFECT}")

    blue, red = npgp.plots.COLORS[:2]
    figure, (left, right) = npgp.plots.subplots(1, 2, figsize=(9.0, 3.4), width_ratios=(2.6, 1.0))
    width = 1.645 * np.sqrt(variance)
    left.fill_between(grid, mean - width, mean + width, color=blue, alpha=0.25, lw=0, label="90% interval of f")
    left.plot(grid, mean, color=blue, label="mean of f")
    left.plot(grid, truth(grid), color="k", ls="--", lw=1.0, label="the simulation's f")
    left.plot(X[:, 0], y - effect.mean() * dose, ".", color="0.5", ms=4, label="y less the effect of the dose")
    left.plot(Z[:, 0], np.full(len(Z), -1.75), "|", color=red, ms=9, label="inducing inputs")
    left.set(xlabel="x", ylabel="f(x)", ylim=(-1.95, 2.45), xlim=(-0.5, 6.5))
    left.legend(frameon=False, ncols=2, loc="upper center", fontsize=8)
    right.hist(effect, bins=40, density=True, color=blue, alpha=0.5, label="posterior")
    top = right.get_ylim()[1]
    right.plot([EFFECT, EFFECT], [0, 1.05 * top], "k--", lw=1.0, label="the simulation's")
    right.set(xlabel="effect of the dose", yticks=[], ylim=(0, 1.4 * top))
    right.legend(frameon=False, fontsize=8, loc="upper right")
    write_picture(args.out / "first_model.png", figure, dpi=120)


if __name__ == "__main__":
    main()
