"""Bayesian GPLVMs of the oil-flow data: bounds, the recipe, reconstruction."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from common import scores
from npgp import datasets, gplvm
from npgp.collapsed.uncertain import penalty_nodes
from npgp.gplvm import BayesianGPLVM, CollapsedGPLVM, Encoder, FreeNormal, Point, Start, infer_latents, pca_start
from npgp.gplvm.new_rows import NewRows
from npgp.training import row_adam
from studies.runner import Records, Study

#: How a positive parameter is made of a free one.
POSITIVE = {"softplus": constraints.softplus_positive, "log": constraints.positive}
#: The quantile of a standard normal that leaves 5% on each side.
QUANTILE = 1.6448536


@lru_cache(maxsize=1)
def oil_flow(data: str, rows: int | None) -> datasets.OilFlow:
    """The first rows of the oil-flow data, or simulated ones."""
    if data == "simulated":
        return datasets.simulate_oil_flow(jax.random.key(0), rows or 200)
    found = datasets.oil_flow("train")
    return datasets.OilFlow(found.Y[:rows], found.labels[:rows], None)


def rmse(values, truth: np.ndarray, where: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(values) - truth)[where])))


def coverage(mean, scale, truth: np.ndarray, where: np.ndarray) -> float:
    """The share of the true values that lie in central 90% intervals."""
    return float(np.mean((np.abs(np.asarray(mean) - truth) <= QUANTILE * np.asarray(scale))[where]))


# ---------------------------------------------------------------------------------------------------------------
# The bounds


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


#: Collapsed bounds; the last has m_n a function of x_n, as the uncollapsed bounds have.
FORMS = {"uncollapsed": ("prior", "tight", "grouped"), "collapsed": ("prior", "tight", "tight, m(x)")}
#: Draws of x in the penalty of the last collapsed bound, when it is trained and, others, when it is evaluated.
PENALTY_DRAWS, EVALUATION_DRAWS = 16, 64
#: Of the comparison of bounds.
BOUNDS = {
    "data": "real",
    "rows": int,
    "latent_dim": 10,
    "inducing": 25,
    "group_size": 16,
    "steps": 20_000,
    "learning_rate": 0.01,
    "continue_steps": 5000,
    "continue_rate": 0.003,
    "collapsed_steps": 1200,
    "positive": "softplus",
    "noise_start": 0.02,
    "latent_scale": 0.3,
    "draws": 200,
}


def bounds_start(args: argparse.Namespace, Y: np.ndarray, seed: int) -> Start:
    start = pca_start(jax.random.key(seed), Y, args.latent_dim, args.inducing)
    return dataclasses.replace(start, noise_variance=args.noise_start, latent_scale=args.latent_scale)


def uncollapsed(args: argparse.Namespace, Y: np.ndarray, seed: int, conditional: str) -> BayesianGPLVM:
    groups = (
        npgp.conditionals.Grouped(npgp.sparse.median_split(Y, args.group_size)) if conditional == "grouped" else None
    )
    positive = POSITIVE[args.positive]
    return BayesianGPLVM(
        bounds_start(args, Y, seed), conditional=groups or conditional, latents=FreeLatents(positive), positive=positive
    )


def collapsed(args: argparse.Namespace, Y: np.ndarray, seed: int, form: str, draws: Any) -> CollapsedGPLVM:
    draws = draws if form == "tight, m(x)" else None
    return CollapsedGPLVM(bounds_start(args, Y, seed), conditional=form.split(",")[0], penalty_draws=draws)


def residual(projector, params: Mapping[str, jax.Array], key: jax.Array, columns: int) -> tuple:
    """
    Of one draw of x from q: the mean over rows of d_n/σ², and what ``tight`` gains over ``prior`` there,
    ``½ D Σ [d_n/σ² − log(1 + d_n/σ²)] / N``.
    """
    x = params["x.loc"] + params["x.scale"] * jax.random.normal(key, params["x.loc"].shape)
    share = projector(x).residual_variance() / params["noise_variance"]
    return jnp.mean(share), 0.5 * columns * jnp.mean(share - jnp.log1p(share))


def evaluator(args: argparse.Namespace, Y: np.ndarray, names: Sequence[str] = FORMS["uncollapsed"]) -> Callable:
    """A function of parameters and keys: for each key, all bounds per row at the same draw of x, and `residual`."""
    models = {c: uncollapsed(args, Y, 0, c) for c in names}
    Y, (rows, columns) = jnp.asarray(Y), Y.shape

    @jax.jit
    def evaluate(params, keys):
        def one(key):
            loss = TraceMeanField_ELBO().loss
            bounds = {c: -loss(key, params, m.model, m.guide, Y) / rows for c, m in models.items()}
            return bounds, *residual(models[names[0]].posterior(params).projector, params, key, columns)

        return jax.lax.map(one, keys)

    return evaluate


def collapsed_evaluator(args: argparse.Namespace, Y: np.ndarray) -> Callable:
    """As `evaluator`, for collapsed bounds, which have no noise but that of the last one's penalty."""
    draws = penalty_nodes(jax.random.key(1), EVALUATION_DRAWS, len(Y), args.latent_dim)
    models = {form: collapsed(args, Y, 0, form, draws) for form in FORMS["collapsed"]}
    Y, (rows, columns) = jnp.asarray(Y), Y.shape

    @jax.jit
    def evaluate(params, keys):
        projector = models["prior"].posterior(params, Y).projector
        bounds = {form: model.bound(params, Y) / rows for form, model in models.items()}
        return bounds, *jax.lax.map(lambda key: residual(projector, params, key, columns), keys)

    return evaluate


def figures_of(params: Mapping[str, Any], labels) -> dict[str, Any]:
    """Of a trained model: noise, nearest-neighbor errors in latent space, relevant dimensions."""
    return {
        "noise_variance": float(params["noise_variance"]),
        "nn_errors": gplvm.nearest_neighbor_errors(params["x.loc"] / params["lengthscale"], labels),
        "relevant_dims": gplvm.effective_dimensions(gplvm.relevance(params)),
    }


def oil_bounds(args: argparse.Namespace, form: str, seed: int) -> Records:
    """Each bound trained from the same start, and each further from the solution of ``prior``."""
    data, names = oil_flow(args.data, args.rows), FORMS[form]
    Y = data.Y
    evaluate = (evaluator if form == "uncollapsed" else collapsed_evaluator)(args, Y)

    def by_svi(name: str, before: Mapping[str, np.ndarray] | None) -> dict[str, Any]:
        steps, rate = (args.steps, args.learning_rate) if before is None else (args.continue_steps, args.continue_rate)
        model = uncollapsed(args, Y, seed, name)
        svi = SVI(model.model, model.guide, npgp.adam(rate, steps), TraceMeanField_ELBO())
        key = jax.random.split(jax.random.key(seed))[0]
        return npgp.fit(svi, key, steps, jnp.asarray(Y), init_params=before, progress=False).params

    def by_lbfgs(name: str, before: Mapping[str, np.ndarray] | None) -> dict[str, Any]:
        steps = args.collapsed_steps if before is None else args.collapsed_steps // 3
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*has not converged", RuntimeWarning)
            return collapsed(args, Y, seed, name, PENALTY_DRAWS).fit(Y, steps, params=before, progress=False).params

    train, found, of_prior = by_svi if form == "uncollapsed" else by_lbfgs, [], None
    for start in ("the same", "that of prior"):
        before = None if start == "the same" else {name: jnp.asarray(value) for name, value in of_prior.items()}
        for name in names:
            params = {key: np.asarray(value) for key, value in train(name, before).items()}
            of_prior = params if before is None and name == "prior" else of_prior
            bounds, share, gain = evaluate(
                params, jax.random.split(jax.random.split(jax.random.key(seed))[1], args.draws)
            )
            here = {c: float(np.mean(value)) for c, value in bounds.items()}
            figures = {"bound": here[name], "less_prior": here[name] - here["prior"], "bounds_here": here}
            figures |= {"gain_here": float(np.mean(gain)), "residual_over_noise": float(np.mean(share))}
            found.append({"start": start, "conditional": name} | figures | figures_of(params, data.labels))
    return found


def oil_recipe(args: argparse.Namespace, inducing: int, seed: int) -> dict[str, Any]:
    """One call of ``npgp.gplvm.fit``; from where it ends both bounds are climbed further."""
    data, rows = oil_flow(args.data, args.rows), len(oil_flow(args.data, args.rows).Y)
    began, options = time.perf_counter(), dict(max_steps=args.steps, progress=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has not converged", RuntimeWarning)
        fit = gplvm.fit(jax.random.key(seed), data.Y, args.latent_dim, inducing, **options)
        found = {"bound": fit.bound / rows, "seconds": time.perf_counter() - began}
        for conditional in ("prior", "tight") if args.pair_steps else ():
            model = gplvm.CollapsedGPLVM(fit.gplvm.start, conditional=conditional)
            params = {name: value for name, value in fit.params.items() if not name.startswith("f.u")}
            further = model.fit(data.Y, args.pair_steps, params=params, progress=False)
            found[conditional] = further.bounds[-1] / rows
    return found | figures_of(fit.params, data.labels)


# ---------------------------------------------------------------------------------------------------------------
# Reconstruction

GUIDES: dict[str, Callable[[], Any]] = {
    "point": lambda: Point(prior=False),
    "map": Point,
    "gaussian": FreeNormal,
    "amortized": lambda: Encoder(rng_key=jax.random.key(0)),
}
#: Standard deviation of the prior of test latents in spreads of the training latents, where training had no prior.
FLAT = 10.0


def errors(Y: np.ndarray, present: np.ndarray, mean, variance, noise: float, name: str) -> dict[str, float]:
    """
    How well entries are reconstructed. Of those that are missing also the negative log density per entry, and the share
    that lies in central 90% intervals, both with the noise.
    """
    mean, total, gap = np.asarray(mean), np.asarray(variance) + noise, ~present
    found = {f"{name}_rmse": rmse(mean, Y, present)}
    if gap.any():
        found |= {f"{name}_missing": rmse(mean, Y, gap), f"{name}_nlpd": scores(mean[gap], total[gap], Y[gap])[1]}
        found[f"{name}_coverage"] = coverage(mean, np.sqrt(total), Y, gap)
    return found


def reconstruction(args: argparse.Namespace, missing: float, guide: str, seed: int) -> Records:
    """Training and test rows, and missing entries: the same rows for all shares, and nested entries."""
    Y, rng = oil_flow(args.data, args.rows).Y, np.random.default_rng(seed)
    order, seen = rng.permutation(len(Y)), rng.uniform(size=Y.shape) >= missing
    test, rows = order[: args.test_rows], order[args.test_rows :]
    parts = [np.where(seen[some], Y[some], np.nan) for some in (rows, test)]
    masks = [None if seen[some].all() else seen[some] for some in (rows, test)]
    start = pca_start(jax.random.key(seed), parts[0], args.latent_dim, args.inducing, mask=masks[0])
    start = dataclasses.replace(start, noise_variance=args.noise_start, lengthscale=math.sqrt(args.latent_dim))
    model = BayesianGPLVM(start, conditional="tight", latents=GUIDES[guide](), positive=POSITIVE["log"])
    batches: dict[str, Any] = {}
    if args.batch_size < len(rows):
        batches = {"batch_size": args.batch_size}
    lazy = {"row_optim": row_adam(args.row_rate, args.steps)} if batches and guide != "amortized" else {}
    svi = SVI(model.model, model.guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
    keys, data = jax.random.split(jax.random.key(seed)), {} if masks[0] is None else {"mask": jnp.asarray(masks[0])}
    Y_rows, options = jnp.asarray(parts[0], jnp.result_type(float)), {"indices": "rows"} | data
    try:
        result = npgp.fit(svi, keys[0], args.steps, Y_rows, progress=False, **options, **batches, **lazy)
    except npgp.training.NonFiniteLossError as error:
        # Point estimates may fit the data without noise; where that ends numerically is their result.
        result = error.result
    elbo = npgp.evaluate(svi, keys[1], result, Y_rows, num_draws=100, **options)[0] / len(rows)
    params, offset = result.params, start.offset
    posterior, likelihood, noise = model.posterior(params), model.likelihood_at(params), float(params["noise_variance"])
    loc, scale = model.latents_at(params, parts[0], mask=masks[0])
    prior = None
    if guide == "point":
        prior = dist.Normal(jnp.mean(loc, 0), FLAT * jnp.std(loc, 0) + 1e-6).to_event(1)
    # Independent coordinates, as in the guides.
    how = {"mask": masks[1], "offset": offset, "prior": prior, "candidates": loc, "full": False}
    ways = {
        guide if guide != "amortized" else "amortized, inferred": infer_latents(posterior, likelihood, parts[1], **how)
    }
    if guide == "amortized":
        ways[guide] = NewRows(*model.latents_at(params, parts[1], mask=masks[1]))
    own = errors(Y[rows], seen[rows], *NewRows(loc, scale).predict(posterior, offset=offset), noise, "train")
    own |= {"elbo": elbo, "noise": math.sqrt(noise)}
    return [
        {"latents": name} | own | errors(Y[test], seen[test], *new.predict(posterior, offset=offset), noise, "test")
        for name, new in ways.items()
    ]


OF_MODELS = {
    "noise_variance": ("noise variance", 5),
    "nn_errors": ("NN errors", 1),
    "relevant_dims": ("relevant dims", 1),
}

STUDIES = {
    "oil-bounds": Study(
        """What the choice of bound is worth for a GPLVM of the oil-flow data, after figure 5 of Bui et al. 2025.

Three comparisons of ``prior`` (the classical bound), ``tight`` and ``grouped`` at the same settings: each trained from
the same start; each trained further from the solution of ``prior``; and each evaluated at the same parameters. The
first says which optimum training finds, and only the last two what the bound itself is worth there. Uncollapsed bounds
are trained by Adam on all rows, one draw of x at each step, collapsed ones by L-BFGS on the logarithms of positive
parameters; all in float64. ``--positive log --noise-start 0.2`` for the logarithms; ``--data simulated``.""",
        oil_bounds,
        {"form": tuple(FORMS), "seed": tuple(range(5))},
        {
            "bound": ("bound per row", 3),
            "less_prior": ("less prior's there", 3),
            "gain_here": ("½D mean(d/σ² − log …)", 3),
        }
        | {"residual_over_noise": ("mean d/σ²", 3)}
        | OF_MODELS,
        BOUNDS,
        rows=("form", "start", "conditional"),
        against=("conditional", "prior"),
        lower=("noise_variance", "nn_errors", "residual_over_noise"),
        quick={
            "data": "simulated",
            "rows": 16,
            "latent_dim": 2,
            "inducing": 3,
            "steps": 2,
            "continue_steps": 2,
            "seed": [0],
        }
        | {"form": ["uncollapsed"], "collapsed_steps": 3, "draws": 2, "group_size": 4},
    ),
    "oil-recipe": Study(
        """Which optimum a GPLVM of the oil-flow data reaches by ``npgp.gplvm.fit``, and what the bound is worth there.

From where it ends ``prior`` and ``tight`` are both climbed further, so that the optimum is the same one and the pairs
differ in the bound alone.""",
        oil_recipe,
        {"inducing": (25, 50), "seed": (0,)},
        {"bound": ("bound per row", 3), "prior": ("prior, further", 3), "tight": ("tight, further", 3)}
        | OF_MODELS
        | {"seconds": ("seconds", 0)},
        {"data": "real", "rows": int, "latent_dim": 10, "steps": 3600, "pair_steps": 200},
        quick={"data": "simulated", "rows": 24, "inducing": [4], "latent_dim": 2, "steps": 3, "pair_steps": 2},
    ),
    "oil-reconstruction": Study(
        """Reconstruction of oil-flow measurements by GPLVMs of four guides of the latents, after Lalchand et al. 2022.

Point estimates without a prior (Lawrence 2005) and with the prior N(0, I), q(x_n) = N(μ_n, S_n) with parameters for
each row, and q(x_n) from an encoder; of a random part of the rows, 950 of 1000; the other 50 are test rows, whose q(x)
is inferred at the trained model, and by the encoder where there is one. RMSE is in the units of the data, over all
entries of all columns alike. In float64, on minibatches. They report .0925 for Gaussian and .067 for amortized.""",
        reconstruction,
        {"missing": (0.0, 0.1, 0.3, 0.5), "guide": tuple(GUIDES), "seed": (0, 1, 2)},
        {"train_rmse": ("training rows", 4), "test_rmse": ("test rows", 4), "test_missing": ("missing entries", 3)}
        | {"test_nlpd": ("their NLPD", 2), "test_coverage": ("in 90% intervals", 2), "elbo": ("ELBO per row", 2)},
        {"data": "real", "rows": int, "inducing": 25, "latent_dim": 12, "batch_size": 100, "steps": 6000}
        | {"learning_rate": 0.03, "row_rate": 0.1, "noise_start": 0.2, "test_rows": 50},
        rows=("missing", "latents"),
        quick={"data": "simulated", "rows": 24, "inducing": 4, "latent_dim": 2, "steps": 3, "batch_size": 8}
        | {"seed": [0], "test_rows": 4, "missing": [0.3], "guide": ["amortized"]},
    ),
}
