#!/usr/bin/env python
"""Two data sets of the same things: a latent space that both share in part (manifold relevance determination).

Each of two views has its own functions, kernel, relevances and noise; the latent inputs are one. So each view switches
off the dimensions that it does not need: what stays on in both is shared, what stays on in one is private to it
(Damianou, Ek, Titsias & Lawrence 2012). The model is a few lines, written out here from npgp's building blocks. Then
rows of which only the first view is seen are found in latent space, and their second view is predicted.

    python scripts/examples/shared_latents.py    about a minute
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, table, whole, write_json, write_picture

#: Where a dimension counts, as a share of the view's most relevant one.
THRESHOLD = 0.1
COLUMNS, NOISE = 8, 0.05
VIEWS = ("first", "second")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    new = "further rows, of which the first view alone is seen"
    parser.add_argument("--new-rows", type=whole, default=50, help=new)
    parser.add_argument("--latent-dim", type=whole, default=6)
    parser.shared("seed", "out", "json", rows=200, inducing=30, steps=4000)
    return parser.read(argv)


def simulate(rows: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Two views, each of a signal that both share and of one of its own; and the three signals, (rows, 3)."""
    rng = np.random.default_rng(seed)
    signals = rng.normal(size=(rows, 3))  # shared, the first view's, the second view's
    views = []
    for own in (1, 2):
        inputs = signals[:, [0, own]]
        # Smooth functions: random features of a squared-exponential kernel of lengthscale 2.
        weights, phases = rng.normal(size=(2, 100)) / 2.0, rng.uniform(0.0, 2 * np.pi, 100)
        features = np.sqrt(2 / 100) * np.cos(inputs @ weights + phases)
        values = features @ rng.normal(size=(100, COLUMNS))
        values = (values - values.mean(0)) / values.std(0)
        views.append(values + NOISE * rng.normal(size=values.shape))
    return views, signals


def start_latents(views: list[np.ndarray], latent_dim: int) -> np.ndarray:
    """
    A third of the dimensions from what the views have in common, the others from what is left of each.

    The axes matter: no view can switch off a direction that is none of them.
    """
    size, key = len(views[0]), jax.random.key(0)
    common = max(1, latent_dim // 3)
    components = [npgp.gplvm.pca_start(key, Y, 2 * common + 1, 1).latents / np.sqrt(size) for Y in views]
    left, _, right = np.linalg.svd(components[0].T @ components[1])  # canonical correlations of the components
    shared = components[0] @ left[:, :common] + components[1] @ right[:common].T
    shared *= np.sqrt(size) / np.linalg.norm(shared, axis=0)
    latents = [shared]
    for i, Y in enumerate(views):
        rest = Y - shared @ np.linalg.lstsq(shared, Y)[0]
        own = (latent_dim - common + 1 - i) // 2
        latents.append(npgp.gplvm.pca_start(key, rest, own, 1).latents)
    return np.hstack(latents)


class SharedLatents:
    """The model, its guide, and each view's posterior."""

    def __init__(self, views: list[np.ndarray], latent_dim: int, num_inducing: int, seed: int):
        self.latents = start_latents(views, latent_dim)
        chosen = np.random.default_rng(seed).choice(len(views[0]), num_inducing, replace=False)
        self.inducing = self.latents[chosen]
        self.guide = npgp.AutoSparseGP(self.model, guide=self.latent_guide, dependence="pseudo-data")

    def function(self, view: str) -> npgp.SparseGP:
        """The GP of one view, with its own relevances."""
        latent_dim = self.latents.shape[1]
        start = {"lengthscale": jnp.full(latent_dim, 2.0), "variance": jnp.ones(())}
        positive = constraints.positive
        kernel = npgp.RBF(**{k: numpyro.param(f"{view}.{k}", v, constraint=positive) for k, v in start.items()})
        inducing = numpyro.param(f"{view}.inducing", jnp.asarray(self.inducing))
        return npgp.SparseGP(view, kernel, inducing, init_scale=0.3)

    def noise(self, view: str) -> npgp.Gaussian:
        return npgp.Gaussian(variance=numpyro.param(f"{view}.noise", jnp.asarray(0.1), constraint=constraints.positive))

    def model(self, *views):
        size, latent_dim = self.latents.shape
        functions = []
        for name, Y in zip(VIEWS, views, strict=True):
            with numpyro.plate(f"{name} columns", Y.shape[1], dim=-2):
                functions.append(self.function(name).draw())
        with (rows := numpyro.plate("rows", size, dim=-1)):
            x = numpyro.sample("x", dist.Normal(jnp.zeros((size, latent_dim)), 1.0).to_event(1))
        for name, Y, f in zip(VIEWS, views, functions, strict=True):
            with rows, numpyro.plate(f"{name} columns", Y.shape[1], dim=-2):
                npgp.observe(f"{name} view", f(x), self.noise(name), obs=jnp.asarray(Y).T)

    def latent_guide(self, *views):
        loc = numpyro.param("x.loc", jnp.asarray(self.latents))
        scale = numpyro.param("x.scale", jnp.full(self.latents.shape, 0.3), constraint=constraints.positive)
        with numpyro.plate("rows", len(self.latents), dim=-1):
            numpyro.sample("x", dist.Normal(loc, scale).to_event(1))

    def at(self, view: str, params) -> tuple[npgp.variational.Posterior, npgp.Gaussian]:
        """Posterior of a view's functions, and its likelihood, at trained parameters."""
        with numpyro.handlers.block(), numpyro.handlers.substitute(data=params):
            return self.function(view).posterior(params), self.noise(view)


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    views, _ = simulate(args.rows + args.new_rows, args.seed)
    old, new = slice(None, args.rows), slice(args.rows, None)
    means = [Y[old].mean(axis=0) for Y in views]
    views = [Y - mean for Y, mean in zip(views, means, strict=True)]
    print(f"two views of {args.rows} rows with {COLUMNS} columns each; Q = {args.latent_dim}, M = {args.inducing}")

    shared = SharedLatents([Y[old] for Y in views], args.latent_dim, args.inducing, args.seed)
    svi = SVI(shared.model, shared.guide, npgp.adam(0.02, args.steps), TraceMeanField_ELBO())
    key, known = jax.random.key(args.seed), [Y[old] for Y in views]
    params = npgp.fit(svi, key, args.steps, *known).params

    spread = np.asarray(params["x.loc"]).std(axis=0)
    relevance = {view: spread / np.asarray(params[f"{view}.lengthscale"]) for view in VIEWS}
    relevance = {view: values / values.max() for view, values in relevance.items()}
    on = {view: values >= THRESHOLD for view, values in relevance.items()}
    kinds = {(True, True): "shared", (True, False): "first view's", (False, True): "second view's"}
    lines = [
        [
            q + 1,
            *(f"{relevance[view][q]:.2f}" for view in VIEWS),
            kinds.get(tuple(bool(on[v][q]) for v in VIEWS), "off"),
        ]
        for q in range(args.latent_dim)
    ]
    print(table(("dimension", "relevance in the first view", "in the second view", ""), lines, left=(3,)))

    # What a row's first view says of its second.
    (first, noise), (second, _) = (shared.at(view, params) for view in VIEWS)
    rows = npgp.gplvm.infer_latents(first, noise, views[0][new], candidates=params["x.loc"])
    predicted, variance = rows.predict(second)
    truth = views[1][new]
    design = np.column_stack([views[0][old], np.ones(args.rows)])
    linear = np.column_stack([views[0][new], np.ones(args.new_rows)]) @ np.linalg.lstsq(design, views[1][old])[0]
    errors = {
        "rmse_shared_latents": float(np.sqrt(np.mean((predicted - truth) ** 2))),
        "rmse_linear_regression": float(np.sqrt(np.mean((linear - truth) ** 2))),
        "rmse_mean": float(np.sqrt(np.mean(truth**2))),
    }
    for name, value in errors.items():
        print(f"second view from the first, {name.removeprefix('rmse_').replace('_', ' ')}: RMSE {value:.3f}")
    score = (predicted - truth) / np.sqrt(variance + params["second.noise"])
    print(f"standard deviation of the errors in units of what was predicted: {np.std(score):.2f}")

    from npgp import plots

    bars = {f"{view} view": values for view, values in relevance.items()}
    write_picture(args.out / "shared_latents.png", plots.plot_relevance(bars, threshold=THRESHOLD, by_rank=False))
    report = errors | {
        "shared": int(np.sum(on["first"] & on["second"])),
        "private": [int(np.sum(on[a] & ~on[b])) for a, b in (VIEWS, VIEWS[::-1])],
        "score_sd": float(np.std(score)),
    }
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
