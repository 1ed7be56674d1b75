"""The bounds that ``oil_bounds.py`` compares: their models, and their values at given parameters."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import TraceMeanField_ELBO

import npgp
from npgp.collapsed.uncertain import penalty_nodes
from npgp.gplvm import BayesianGPLVM, CollapsedGPLVM, Start, pca_start
from npgp.sparse.projection import Projector
from studies.gplvm.training import POSITIVE

CONDITIONALS = ("prior", "tight", "grouped")
#: Collapsed bounds; the last has m_n a function of x_n, as the uncollapsed bounds have.
COLLAPSED = ("prior", "tight", "tight, m(x)")
#: Draws of x in the penalty of the last collapsed bound, when it is trained and, others, when it is evaluated.
PENALTY_DRAWS, EVALUATION_DRAWS = 16, 64


@dataclasses.dataclass(frozen=True)
class FreeLatents:
    """
    ``q(x_n) = N(μ_n, diag s_n)``, as ``npgp.gplvm.FreeNormal``, with a choice of what is free in the scales.

    :param constraint: of the scales.
    """

    constraint: constraints.Constraint

    def __call__(self, start: Start, rows: numpyro.plate, Y: Any, mask: Any) -> None:
        loc = numpyro.param("x.loc", jnp.asarray(start.latents))
        scale = jnp.full(start.latents.shape, start.latent_scale)
        scale = numpyro.param("x.scale", scale, constraint=self.constraint)
        with rows as index:
            numpyro.sample("x", dist.Normal(loc[index], scale[index]).to_event(1))


def start_at(args: argparse.Namespace, Y: np.ndarray, seed: int) -> Start:
    start = pca_start(jax.random.key(seed), Y, args.latent_dim, args.inducing)
    return dataclasses.replace(start, noise_variance=args.noise_start, latent_scale=args.latent_scale)


def make(args: argparse.Namespace, Y: np.ndarray, seed: int, conditional: str) -> BayesianGPLVM:
    return BayesianGPLVM(
        start_at(args, Y, seed),
        conditional=npgp.Grouped(npgp.median_split(Y, args.group_size)) if conditional == "grouped" else conditional,
        latents=FreeLatents(POSITIVE[args.latent_positive]),
        positive=POSITIVE[args.positive],
    )


def make_collapsed(args: argparse.Namespace, Y: np.ndarray, seed: int, form: str, draws: Any) -> CollapsedGPLVM:
    conditional = "prior" if form == "prior" else "tight"
    draws = draws if form == COLLAPSED[-1] else None
    return CollapsedGPLVM(start_at(args, Y, seed), conditional=conditional, penalty_draws=draws)


def residual(projector: Projector, params: Mapping[str, jax.Array], key: jax.Array, columns: int) -> tuple:
    """
    Of one draw of x from q: the mean over rows of d_n/σ², and what ``tight`` gains over ``prior`` there,
    ``½ D Σ [d_n/σ² − log(1 + d_n/σ²)] / N``.
    """
    x = params["x.loc"] + params["x.scale"] * jax.random.normal(key, params["x.loc"].shape)
    share = projector(x).residual_variance() / params["noise_variance"]
    return jnp.mean(share), 0.5 * columns * jnp.mean(share - jnp.log1p(share))


def evaluator(args: argparse.Namespace, Y: np.ndarray) -> Callable:
    """A function of parameters and keys: for each key, all bounds per row at the same draw of x, and ``residual``."""
    models = {c: make(args, Y, 0, c) for c in args.conditional}
    first, Y = models[args.conditional[0]], jnp.asarray(Y)
    rows, columns = Y.shape

    @jax.jit
    def evaluate(params, keys):
        def one(key):
            loss = TraceMeanField_ELBO().loss
            bounds = {c: -loss(key, params, m.model, m.guide, Y) / rows for c, m in models.items()}
            return bounds, *residual(first.posterior(params).projector, params, key, columns)

        return jax.lax.map(one, keys)

    return evaluate


def collapsed_evaluator(args: argparse.Namespace, Y: np.ndarray) -> Callable:
    """As :func:`evaluator`, for collapsed bounds, which have no noise but that of the last one's penalty."""
    draws = penalty_nodes(jax.random.key(1), EVALUATION_DRAWS, len(Y), args.latent_dim)
    models = {form: make_collapsed(args, Y, 0, form, draws) for form in COLLAPSED}
    Y = jnp.asarray(Y)
    rows, columns = Y.shape

    @jax.jit
    def evaluate(params, keys):
        projector = models["prior"].posterior(params, Y).projector
        bounds = {form: model.bound(params, Y) / rows for form, model in models.items()}
        return bounds, *jax.lax.map(lambda key: residual(projector, params, key, columns), keys)

    return evaluate
