"""A panel: what all groups share, what each has of its own, and levels of groups; by SVI's guides and by NUTS."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceMeanField_ELBO, log_likelihood

import npgp
from common import clock
from studies.fits import nuts_draws
from studies.runner import Study

TRUTH = {"tau": 0.5, "own_scale": 0.4, "noise": 0.3}

GUIDES: dict[str, dict[str, Any]] = {
    "joint": {},
    "joint, in a loop": {},
    "each by itself": {"joint": False},
    "independent": {"dependence": "independent"},
}


def simulate(groups: int, times: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times (N, 1), values (groups, N), and which of them are held out."""
    rng = np.random.default_rng(seed)
    x = np.linspace(0.0, 10.0, times)
    shared = 1.5 * np.sin(0.6 * x)
    near = np.exp(-0.5 * np.square((x[:, None] - x) / 1.5)) + 1e-9 * np.eye(times)
    own = TRUTH["own_scale"] * rng.normal(size=(groups, times)) @ np.linalg.cholesky(near).T
    level = TRUTH["tau"] * rng.normal(size=(groups, 1))
    y = 2.0 + shared + own + level + TRUTH["noise"] * rng.normal(size=(groups, times))
    held_out = np.zeros(y.shape, bool)
    for row in held_out:
        row[rng.permutation(times)[:2]] = True
    return x[:, None], y, held_out


def priors():
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    scale, own_scale = (numpyro.sample(name, dist.HalfNormal(1.5)) for name in ("scale", "own_scale"))
    lengthscale, own_lengthscale = (
        numpyro.sample(name, dist.LogNormal(np.log(2.0), 0.4)) for name in ("lengthscale", "own_lengthscale")
    )
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    kernels = npgp.RBF(lengthscale, variance=scale**2), npgp.RBF(own_lengthscale, variance=own_scale**2)
    return level, tau, noise, *kernels


def model(X, y=None, *, groups, Z, Z_own):
    level, tau, noise, kernel, own_kernel = priors()
    f = npgp.SparseGP("f", kernel, Z).draw()
    with numpyro.plate("groups", groups, dim=-2):
        of_group = numpyro.sample("of_group", dist.Normal(0.0, tau))
        own = npgp.SparseGP("own", own_kernel, Z_own).draw()
        with numpyro.plate("times", len(X)):
            mean = level + of_group + f(X) + own(X)
            npgp.observe("y", mean, npgp.Gaussian(scale=noise), obs=y, mask="nan")


def in_a_loop(X, y, *, groups, Z, Z_own):
    """The same, written as a component and a statement for each group."""
    level, tau, noise, kernel, own_kernel = priors()
    f = npgp.SparseGP("f", kernel, Z).draw()
    of_group = numpyro.sample("of_group", dist.Normal(0.0, tau).expand([groups, 1]).to_event(2))
    for i in range(groups):
        own = npgp.SparseGP(f"own{i}", own_kernel, Z_own).draw()
        with numpyro.plate(f"times{i}", len(X)):
            mean = level + of_group[i] + f(X) + own(X)
            npgp.observe(f"y{i}", mean, npgp.Gaussian(scale=noise), obs=y[i], mask="nan")


def held_out_density(of_panel: Callable, draws: dict, X, y: np.ndarray, held_out: np.ndarray) -> float:
    """Mean log density of the entries that were held out, each averaged over draws."""
    test = jnp.where(held_out, y, jnp.nan)
    kept = {name: value for name, value in draws.items() if name != "y"}
    each = jax.jit(lambda kept: log_likelihood(of_panel, kept, X, test)["y"])(kept)
    total = jax.scipy.special.logsumexp(each, axis=0) - jnp.log(each.shape[0])
    return float(np.mean(np.asarray(total)[held_out]))


def said(draws: dict) -> dict[str, Any]:
    """Means and standard deviations of what is asked."""
    levels = np.asarray(draws["level"])[:, None] + np.asarray(draws["of_group"]).reshape(len(draws["level"]), -1)
    found = {name: float(np.mean(draws[name])) for name in TRUTH} | {
        f"{name}_sd": float(np.std(draws[name])) for name in TRUTH
    }
    return {**found, "mean_level_sd": float(np.std(draws["level"])), "levels_sd": float(np.mean(levels.std(axis=0)))}


def panel(args: argparse.Namespace, q: str) -> dict[str, Any]:
    X, y, held_out = simulate(args.groups, args.times, args.seed)
    Z, Z_own = (np.linspace(0.0, 10.0, m)[:, None].astype(np.float32) for m in (2 * args.inducing, args.inducing))
    of_panel = partial(model, groups=args.groups, Z=Z, Z_own=Z_own)
    data = jnp.asarray(X, float), jnp.where(held_out, jnp.nan, y)
    now = clock(args.cpu_time)
    began, elbo = now(), None
    if q == "NUTS":
        draws = nuts_draws(of_panel, jax.random.key(2), args.draws // 2, args.draws, *data)
    else:
        trained = partial(in_a_loop, **of_panel.keywords) if q == "joint, in a loop" else of_panel
        guide = npgp.AutoSparseGP(trained, **GUIDES[q])
        svi = SVI(trained, guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
        result = npgp.fit(svi, jax.random.key(args.seed), args.steps, *data, progress=False)
        draws = guide.sample_posterior(jax.random.key(1), result.params, *data, sample_shape=(args.draws,))
        elbo = -float(np.mean(result.losses[-max(args.steps // 20, 1) :]))
        if trained is not of_panel:
            draws["own.u"] = jnp.stack([draws[f"own{i}.u"] for i in range(args.groups)], axis=1)[:, :, None]
    seconds = now() - began
    density = held_out_density(of_panel, draws, data[0], y, held_out)
    return {**said(draws), "held_out": density, "elbo": elbo, "seconds": seconds}


STUDIES = {
    "panel": Study(
        """A panel: what all groups share, what each has of its own, and levels of groups; by SVI's guides and by NUTS.

Thirty groups with twelve times each, simulated: a shared function, a function of each group's own with a scale, group
levels with a scale τ, noise. Two entries of each group are held out. The groups' functions sum to something like the
shared one, and their means to something like levels, so that all of it depends on each other given the data.""",
        panel,
        {"q": (*GUIDES, "NUTS")},
        {
            "tau": ("τ", 3),
            "tau_sd": ("sd", 3),
            "own_scale": ("own scale", 3),
            "own_scale_sd": ("sd", 3),
            "noise": ("noise", 3),
            "mean_level_sd": ("sd of mean level", 3),
            "levels_sd": ("sd of levels", 3),
            "held_out": ("log density held out", 3),
            "elbo": ("ELBO", 1),
            "seconds": ("seconds", 0),
        },
        {"groups": 30, "times": 12, "draws": 1000, "inducing": 6, "steps": 4000, "learning_rate": 0.02, "seed": 0},
        quick={"groups": 2, "times": 5, "draws": 4, "steps": 3, "inducing": 3, "q": ["joint"]},
        note=f"Simulated with {', '.join(f'{name} {value}' for name, value in TRUTH.items())}.",
        x64=False,
    )
}
