"""Simulation-based calibration (Talts et al. 2018): are posteriors as wide as they should be?"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax
from numpyro import handlers
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from scipy import stats

import npgp
from studies.fits import nuts_draws
from studies.runner import Records, Study

#: Inputs of the data, and the new ones at which f is ranked.
ROWS = 16

X = np.linspace(0.0, 1.0, ROWS)[:, None]

X_NEW = np.array([[0.37], [1.15]])

#: Inducing points where they are fewer than the rows.
FEW = np.linspace(0.0, 1.0, 6)[:, None]

#: Mean count where f = 0.
EXPOSURE = 4.0

#: A covariate, at the data and at the new inputs.
COVARIATE = np.random.default_rng(0).normal(size=ROWS + len(X_NEW))

FUNCTION_VALUES = ("f(.37)", "f(1.15)")


def priors() -> npgp.kernels.Kernel:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(np.log(0.3), 0.4))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    return npgp.Matern32(lengthscale, variance=variance)


def sample_noise() -> jax.Array:
    return numpyro.sample("noise_variance", dist.LogNormal(np.log(0.1), 0.5))


def effects(X, y=None, Z=X):
    f = npgp.SparseGP("f", priors(), jnp.asarray(Z)).draw()
    noise = sample_noise()
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    # At the data, at the new inputs, or at both.
    covariate = {ROWS: COVARIATE[:ROWS], len(X_NEW): COVARIATE[ROWS:]}.get(X.shape[0], COVARIATE)
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X) + (level + effect * covariate), npgp.Gaussian(variance=noise), obs=y)


def uncollapsed(likelihood: Callable[[], npgp.likelihoods.Likelihood]) -> Callable:
    """A GP observed under a likelihood, which is made in the model."""

    def model(X, y=None, Z=X):
        f = npgp.SparseGP("f", priors(), jnp.asarray(Z)).draw()
        made = likelihood()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X), made, obs=y)

    return model


def collapsed(likelihood: Callable[[], npgp.likelihoods.Likelihood]) -> Callable:
    """The same model with q(ε) collapsed."""

    def model(X, y=None, Z=X):
        kernel = priors()
        numpyro.sample("y", npgp.CollapsedGP(kernel, X, jnp.asarray(Z), likelihood=likelihood()), obs=y)

    return model


@dataclass(frozen=True)
class Case:
    """
    A model and a way to draw from its posterior.

    :param model: what is fitted, a function of X, y and Z.
    :param simulated: what data, hyperparameters and f are drawn from.
    :param draw: from ``(key, model, y, args)`` to draws of the hyperparameters and of f at new inputs.
    :param parameters: names of the hyperparameters.
    :param inducing: Z.
    """

    model: Callable
    simulated: Callable
    draw: Callable
    parameters: tuple[str, ...]
    inducing: np.ndarray

    @property
    def quantities(self) -> tuple[str, ...]:
        return self.parameters + FUNCTION_VALUES


def run_nuts(key, model, y, args) -> dict:
    draws = nuts_draws(model, key, args.warmup, args.draws * args.thin, X, y)
    return jax.tree.map(lambda values: values[:: args.thin], draws)


def by_nuts(key, model, y, args) -> tuple[dict, jax.Array]:
    keys = jax.random.split(key)
    samples = run_nuts(keys[0], model, y, args)
    return samples, Predictive(model, samples)(keys[1], X_NEW)["y.latent"]


def by_collapsed_nuts(key, model, y, args) -> tuple[dict, jax.Array]:
    keys = jax.random.split(key)
    samples = run_nuts(keys[0], model, y, args)

    def moments(sample):
        with handlers.trace() as sites, handlers.seed(rng_seed=0), handlers.substitute(data=sample):
            model(X, y)
        return sites["y"]["fn"].condition(y).mean_and_variance(X_NEW)

    mean, variance = jax.vmap(moments)(samples)
    return samples, mean + jnp.sqrt(variance) * jax.random.normal(keys[1], mean.shape)


def by_svi(key, model, y, args) -> tuple[dict, jax.Array]:
    keys = jax.random.split(key, 3)
    guide = npgp.AutoSparseGP(model, dependence=args.dependence)
    svi = SVI(model, guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
    state = svi.init(keys[0], X, y)
    state, _ = lax.scan(lambda state, _: svi.update(state, X, y), state, length=args.steps)
    samples = guide.sample_posterior(keys[1], svi.get_params(state), X, y, sample_shape=(args.draws,))
    return samples, Predictive(model, samples)(keys[2], X_NEW)["y.latent"]


KERNEL = ("lengthscale", "variance")

WITH_NOISE = (*KERNEL, "noise_variance")


def noisy() -> npgp.Gaussian:
    return npgp.Gaussian(variance=sample_noise())


def counts() -> npgp.Poisson:
    return npgp.Poisson(exposure=EXPOSURE)


gaussian, poisson, bernoulli = map(uncollapsed, (noisy, counts, npgp.Bernoulli))

CASES = {
    "gaussian-nuts": Case(collapsed(noisy), npgp.joint(gaussian), by_collapsed_nuts, WITH_NOISE, X),
    "poisson-nuts": Case(poisson, poisson, by_nuts, KERNEL, FEW),
    "gaussian-svi": Case(gaussian, npgp.joint(gaussian), by_svi, WITH_NOISE, X),
    "poisson-svi": Case(poisson, npgp.joint(poisson), by_svi, KERNEL, X),
    "effects-svi": Case(effects, npgp.joint(effects), by_svi, (*WITH_NOISE, "level", "effect"), X),
    "poisson-collapsed": Case(collapsed(counts), npgp.joint(poisson), by_collapsed_nuts, KERNEL, X),
    "bernoulli-collapsed": Case(collapsed(npgp.Bernoulli), npgp.joint(bernoulli), by_collapsed_nuts, KERNEL, X),
}


def run_case(name: str, args: argparse.Namespace) -> np.ndarray:
    """Ranks (replications, quantities) of the true values among the draws."""
    case = CASES[name]

    def fitted(X, y=None):
        return case.model(X, y, Z=case.inducing)

    def simulated(X):
        return case.simulated(X, Z=case.inducing)

    def replicate(key):
        prior_key, posterior_key = jax.random.split(key)
        # Data and the f to rank at once: both depend on the same ε, and jointly on the same residual.
        truth = Predictive(simulated, num_samples=1)(prior_key, np.concatenate([X, X_NEW]))
        truth = {name: value[0] for name, value in truth.items()}
        y, f = truth["y"][:ROWS] + args.shift, truth["y.latent"][ROWS:]
        samples, f_draws = case.draw(posterior_key, fitted, y, args)
        true_values = jnp.stack([*(truth[name] for name in case.parameters), *f])
        draws = jnp.column_stack([*(samples[name] for name in case.parameters), f_draws])
        return jnp.sum(draws < true_values, 0), jnp.all(jnp.isfinite(draws))

    # Not the same true values in all cases.
    key = jax.random.fold_in(jax.random.key(args.seed), list(CASES).index(name))
    keys = jax.random.split(key, args.replications)
    batch = args.batch if args.batch > 1 else None
    ranks, finite = jax.jit(lambda keys: lax.map(replicate, keys, batch_size=batch))(keys)
    if not np.all(finite):
        raise FloatingPointError(f"{np.sum(~np.asarray(finite))} of {args.replications} posteriors are not finite.")
    return np.asarray(ranks)


def band_p_value(ranks: np.ndarray, draws: int, simulations: int = 4000, seed: int = 0) -> float:
    """
    The p-value of uniform ranks by the simultaneous band of their distribution function (Säilynoja, Bürkner & Vehtari
    2022): the smallest pointwise p-value at any rank, against its distribution under uniformity, by simulation.

    :param ranks: integers (n,) in 0 to ``draws``.
    :param draws: the number of draws that each rank is among.
    """
    ranks = np.asarray(ranks)
    if ranks.min() < 0 or ranks.max() > draws:
        raise ValueError(f"ranks run from {ranks.min()} to {ranks.max()}; they must lie in 0 to {draws}.")
    n, places = len(ranks), np.arange(draws)
    share, counts = (places[:, None] + 1) / (draws + 1), np.arange(n + 1)
    # p[j, c]: of c ranks being at most j.
    p = 2 * np.minimum(stats.binom.cdf(counts, n, share), stats.binom.sf(counts - 1, n, share))

    def smallest(of_ranks):
        return p[places, np.cumsum(of_ranks, -1)[..., :-1]].min(-1)

    observed = smallest(np.bincount(ranks, minlength=draws + 1))
    rng = np.random.default_rng(seed)
    null = smallest(rng.multinomial(n, np.full(draws + 1, 1 / (draws + 1)), size=simulations))
    return float((1 + np.sum(null <= observed * (1 + 1e-12))) / (1 + simulations))


def judge(ranks: np.ndarray, draws: int) -> dict[str, float]:
    """Figures of one quantity's ranks."""
    u = (np.asarray(ranks) + 0.5) / (draws + 1)
    return {
        "p_band": band_p_value(ranks, draws),
        "mean_rank": float(np.mean(u)),
        "spread": float(np.mean((u - 0.5) ** 2) * 12),
    }


def calibration(args: argparse.Namespace, case: str) -> Records:
    """Figures of each quantity."""
    columns: Any = zip(CASES[case].quantities, run_case(case, args).T, strict=True)
    return [{"quantity": quantity} | judge(column, args.draws) for quantity, column in columns]


def verdicts(records: Records, markdown: bool) -> str:
    """Of each case, by the least p of its quantities, times their number."""
    lines = []
    for case in dict.fromkeys(record["case"] for record in records):
        own = [record["p_band"] for record in records if record["case"] == case]
        p = min(1.0, len(own) * min(own))
        lines.append(f"- {case}: least p {p:.4f}, corrected: {'uniform' if p >= 0.01 else 'NOT UNIFORM'}")
    return "\n".join(lines)


STUDIES = {
    "calibration": Study(
        """Simulation-based calibration (Talts et al. 2018): are posteriors as wide as they should be?

Parameters, a function and data are drawn from the model; the rank of each true value among draws from its posterior is
uniform if inference is right. Each case has its own data from the very model that it targets:

    gaussian-nuts        NUTS over hyperparameters with ``CollapsedGP``; Z = X, where the bound is the evidence
    poisson-collapsed    the same for counts: the bound at the best q(ε) in the place of the evidence
    bernoulli-collapsed  the same for yes and no
    poisson-nuts         NUTS over (ε, hyperparameters) of ``observe`` without guide; few inducing points, so the data
                         are drawn from the density that NUTS targets: rows independent given ε (FITC)
    gaussian-svi         ``AutoSparseGP(model)``; Z = X, data from the GP
    poisson-svi          the same for counts
    effects-svi          the same for real numbers with a level and the effect of a covariate beside the GP

Ranks of the hyperparameters and of f at two new inputs, one between training inputs and one beyond them. Uniformity is
tested at level .01 by the simultaneous band of the ranks' distribution function (Säilynoja et al. 2022), with a
Bonferroni correction over a case's quantities. A guide that is too narrow piles ranks up at both ends: ``--dependence
independent`` shows it; ``--shift .5``, added to the data that the sampler is given, must fail.""",
        calibration,
        {"case": tuple(CASES)},
        {"p_band": ("p, band", 4), "mean_rank": ("mean rank", 3), "spread": ("spread", 2)},
        {
            "replications": 320,
            "draws": 63,
            "thin": 5,
            "warmup": 200,
            "batch": 32,
            "dependence": "sites",  # as by default
            "shift": 0.0,
            "steps": 3000,
            "learning_rate": 0.03,
            "seed": 0,
        },
        rows=("case", "quantity"),
        quick={"replications": 4, "draws": 7, "thin": 1, "warmup": 5, "steps": 5, "batch": 1}
        | {"case": ["gaussian-svi"]},
        show=verdicts,
        note="p: that ranks are uniform. Mean rank: 1/2 if right, less if draws are too high. Spread: the ranks' "
        "variance over that of uniform ones, more than 1 if draws are too narrow (ranks at both ends).",
    )
}
