#!/usr/bin/env python
"""A step function: a stationary GP cannot, a deep one can.

One lengthscale must serve the flat parts and the step: a GP with a stationary kernel rings, or takes the step for
noise. In two layers the first bends the axis, so that the step is far apart for the second. The picture has both
posteriors, with draws of functions, and the first layer's function.

python scripts/examples/step_function.py --out docs/_static
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import jax
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from common import Arguments, write_picture

Z = np.linspace(-1.0, 1.0, 15, dtype=np.float32)[:, None]


def simulated(rows: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    X = np.sort(rng.uniform(-1.0, 1.0, (rows, 1)), axis=0).astype(np.float32)
    return X, (np.where(X[:, 0] > 0.0, 1.0, -1.0) + 0.05 * rng.normal(size=rows)).astype(np.float32)


def model(X, y=None, *, layers: int):
    positive = constraints.positive
    noise = numpyro.param("noise", 0.1, constraint=positive)
    made = []
    for i in range(layers):
        lengthscale = numpyro.param(f"lengthscale_{i}", 0.4, constraint=positive)
        variance = numpyro.param(f"variance_{i}", 1.0 if i + 1 == layers else 0.3, constraint=positive)
        made.append(npgp.Layer(npgp.RBF(lengthscale, variance=variance), numpyro.param(f"Z_{i}", Z)))
    f = npgp.DeepGP("f", made).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X), npgp.Gaussian(scale=noise), obs=y)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = Arguments(__doc__)
    parser.shared("out", "seed", steps={"default": None, "help": "as many as it takes, if omitted"})
    args = parser.read(argv)

    X, y = simulated()
    grid = np.linspace(-1.2, 1.2, 121, dtype=np.float32)[:, None]
    blue, red = npgp.plots.COLORS[:2]
    figure, axes = npgp.plots.subplots(1, 3, figsize=(11.0, 3.4))
    elbos = {}
    for axis, layers, title in zip(axes, (1, 2), ("one layer", "two layers"), strict=False):
        this = partial(model, layers=layers)
        guide = npgp.AutoSparseGP(this)
        svi = SVI(this, guide, npgp.adam(0.02, args.steps), TraceMeanField_ELBO(num_particles=4 if layers > 1 else 1))
        result = npgp.fit(svi, jax.random.key(args.seed), args.steps, X, y, progress=False)
        elbos[title] = float(-np.mean(result.losses[-max(1, len(result.losses) // 20) :]))
        f = npgp.posterior("f", this, guide, result.params, X)
        mean, variance = (np.asarray(v) for v in replace(f, draws=500).mean_and_variance(grid))
        draws = np.asarray(f.sample(jax.random.key(args.seed + 1), grid, (8,)))
        width = 1.645 * np.sqrt(variance)
        axis.fill_between(grid[:, 0], mean - width, mean + width, color=blue, alpha=0.2, lw=0, label="90% interval")
        axis.plot(grid[:, 0], draws.T, color=blue, lw=0.6, alpha=0.6)
        axis.plot(grid[:, 0], mean, color=blue, lw=1.8, label="mean")
        axis.plot(X[:, 0], y, ".", color="0.3", ms=4, label="data")
        axis.set(title=f"{title}: ELBO {elbos[title]:.0f}", xlabel="x", ylabel="f(x)", ylim=(-2.2, 2.2))
        print(f"{title}: ELBO {elbos[title]:.1f}")
        if layers == 2:
            first = np.asarray(f.layers[0].sample(jax.random.key(args.seed + 2), grid, (8,)))[:, 0] + grid[:, 0]
            axes[2].plot(grid[:, 0], first.T, color=red, lw=0.8)
            axes[2].set(title="the first layer, draws", xlabel="x", ylabel="what the second layer takes")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    write_picture(args.out / "step_function.png", figure, dpi=110)
    return elbos


if __name__ == "__main__":
    main()
