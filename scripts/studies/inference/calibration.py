#!/usr/bin/env python
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
tested by the simultaneous band of the ranks' distribution function (Säilynoja et al. 2022), with a Bonferroni
correction over a case's quantities; a χ² test is printed beside it. A guide that is too narrow piles ranks up at both
ends: ``--dependence independent`` shows it.

    python scripts/studies/inference/calibration.py --json out/calibration.json
    python scripts/studies/inference/calibration.py --cases gaussian-svi poisson-svi --dependence independent
    python scripts/studies/inference/calibration.py --cases gaussian-nuts --shift 0.5    wrong on purpose: must fail
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO
from scipy import stats

import npgp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, table, whole, write_json, write_picture

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
#: Bins of histograms and of the χ² test; the number of ranks must be a multiple.
BINS = 8
FUNCTION_VALUES = ("f(.37)", "f(1.15)")

NOTE = (
    "p: that ranks are uniform, by the simultaneous band of their distribution function, and by χ². Mean rank: 1/2 if "
    "right, less if draws are too high. Spread: 1 if right, more if draws are too narrow (ranks at both ends). "
    "Autocorrelation: of consecutive draws that are ranked. Verdict: by p of the band, times the number of quantities."
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--cases", choices=list(CASES), nargs="+", default=list(CASES))
    add("--replications", type=whole, default=320)
    add("--draws", type=whole, default=63, help="from each posterior; ranks are 0 to this number")
    add("--thin", type=whole, default=5, help="steps of NUTS for each draw")
    add("--warmup", type=whole, default=200, help="of NUTS")
    add("--batch", type=whole, default=32, help="replications at a time")
    add("--level", type=float, default=0.01, help="of the test, for each case")
    add("--dependence", choices=("pseudo-data", "coupled", "independent"), default="pseudo-data", help="of SVI's guide")
    add("--shift", type=float, default=0.0, help="add this to the data that the sampler is given")
    steps, rate = dict(default=3000, help="of SVI"), dict(default=0.03, help="of SVI")
    parser.shared("seed", "quick", "out", "json", steps=steps, learning_rate=rate)
    args = parser.read(argv)
    if args.quick:
        args.replications, args.draws, args.thin, args.warmup, args.steps, args.batch = 8, 7, 1, 20, 30, 1
    if (args.draws + 1) % BINS:
        parser.error(f"--draws must be one less than a multiple of {BINS}.")
    return args


def priors() -> npgp.kernels.Kernel:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(np.log(0.3), 0.4))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    return npgp.Matern32(lengthscale, variance=variance)


def sample_noise() -> jax.Array:
    return numpyro.sample("noise_variance", dist.LogNormal(np.log(0.1), 0.5))


def gaussian(X, y=None, Z=X):
    f = npgp.SparseGP("f", priors(), jnp.asarray(Z)).draw()
    noise = sample_noise()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y)


def effects(X, y=None, Z=X):
    f = npgp.SparseGP("f", priors(), jnp.asarray(Z)).draw()
    noise = sample_noise()
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    # At the data, at the new inputs, or at both.
    covariate = {ROWS: COVARIATE[:ROWS], len(X_NEW): COVARIATE[ROWS:]}.get(X.shape[0], COVARIATE)
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X) + (level + effect * covariate), npgp.Gaussian(variance=noise), obs=y)


def poisson(X, y=None, Z=X):
    f = npgp.SparseGP("f", priors(), jnp.asarray(Z)).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X), npgp.Poisson(exposure=EXPOSURE), obs=y)


def bernoulli(X, y=None, Z=X):
    f = npgp.SparseGP("f", priors(), jnp.asarray(Z)).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X), npgp.Bernoulli(), obs=y)


def collapsed(likelihood: Callable[[], npgp.likelihoods.Likelihood]) -> Callable:
    """The same model with q(ε) collapsed; the likelihood is made in the model."""

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
    :param draw: from ``(key, model, y, args)`` to draws of the hyperparameters and of f at new inputs, and diagnostics.
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


def run_nuts(key, model, y, args) -> tuple[dict, dict]:
    kernel = NUTS(model, target_accept_prob=0.9)
    mcmc = MCMC(
        kernel, num_warmup=args.warmup, num_samples=args.draws * args.thin, thinning=args.thin, progress_bar=False
    )
    mcmc.run(key, X, y, extra_fields=("diverging", "num_steps"))
    extra = mcmc.get_extra_fields()
    return mcmc.get_samples(), {"divergent": jnp.mean(extra["diverging"]), "leapfrogs": jnp.mean(extra["num_steps"])}


def by_nuts(key, model, y, args) -> tuple[dict, jax.Array, dict]:
    keys = jax.random.split(key)
    samples, diagnostics = run_nuts(keys[0], model, y, args)
    return samples, Predictive(model, samples)(keys[1], X_NEW)["y.latent"], diagnostics


def by_collapsed_nuts(key, model, y, args) -> tuple[dict, jax.Array, dict]:
    keys = jax.random.split(key)
    samples, diagnostics = run_nuts(keys[0], model, y, args)

    def moments(sample):
        with handlers.trace() as sites, handlers.seed(rng_seed=0), handlers.substitute(data=sample):
            model(X, y)
        return sites["y"]["fn"].condition(y).mean_and_variance(X_NEW)

    mean, variance = jax.vmap(moments)(samples)
    return samples, mean + jnp.sqrt(variance) * jax.random.normal(keys[1], mean.shape), diagnostics


def by_svi(key, model, y, args) -> tuple[dict, jax.Array, dict]:
    keys = jax.random.split(key, 3)
    guide = npgp.AutoSparseGP(model, dependence=args.dependence)
    svi = SVI(model, guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
    state = svi.init(keys[0], X, y)
    state, losses = lax.scan(lambda state, _: svi.update(state, X, y), state, length=args.steps)
    samples = guide.sample_posterior(keys[1], svi.get_params(state), X, sample_shape=(args.draws,))
    # What the bound still gains in the last tenth, where its noise allows to see that.
    tenth = max(args.steps // 10, 1)
    gain = jnp.mean(losses[-2 * tenth : -tenth]) - jnp.mean(losses[-tenth:])
    return samples, Predictive(model, samples)(keys[2], X_NEW)["y.latent"], {"last_gain": gain}


KERNEL = ("lengthscale", "variance")
WITH_NOISE = (*KERNEL, "noise_variance")
CASES = {
    "gaussian-nuts": Case(
        collapsed(lambda: npgp.Gaussian(variance=sample_noise())),
        npgp.joint(gaussian),
        by_collapsed_nuts,
        WITH_NOISE,
        X,
    ),
    "poisson-nuts": Case(poisson, poisson, by_nuts, KERNEL, FEW),
    "gaussian-svi": Case(gaussian, npgp.joint(gaussian), by_svi, WITH_NOISE, X),
    "poisson-svi": Case(poisson, npgp.joint(poisson), by_svi, KERNEL, X),
    "effects-svi": Case(effects, npgp.joint(effects), by_svi, (*WITH_NOISE, "level", "effect"), X),
    "poisson-collapsed": Case(
        collapsed(lambda: npgp.Poisson(exposure=EXPOSURE)), npgp.joint(poisson), by_collapsed_nuts, KERNEL, X
    ),
    "bernoulli-collapsed": Case(collapsed(npgp.Bernoulli), npgp.joint(bernoulli), by_collapsed_nuts, KERNEL, X),
}


def autocorrelation(draws: jax.Array) -> jax.Array:
    """Correlation of consecutive draws, over the first axis; 1 where a sampler is stuck."""
    centered = draws - jnp.mean(draws, 0)
    square = jnp.sum(centered**2, 0)
    return jnp.where(square > 0, jnp.sum(centered[1:] * centered[:-1], 0) / jnp.where(square > 0, square, 1), 1.0)


def run_case(name: str, args: argparse.Namespace) -> tuple[np.ndarray, dict[str, float]]:
    """Ranks (replications, quantities) of the true values among the draws, and means of the diagnostics."""
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
        samples, f_draws, diagnostics = case.draw(posterior_key, fitted, y, args)
        true_values = jnp.stack([*(truth[name] for name in case.parameters), *f])
        draws = jnp.column_stack([*(samples[name] for name in case.parameters), f_draws])
        diagnostics["autocorrelation"] = jnp.max(autocorrelation(draws))
        return jnp.sum(draws < true_values, 0), jnp.all(jnp.isfinite(draws)), diagnostics

    # Not the same true values in all cases.
    key = jax.random.fold_in(jax.random.key(args.seed), list(CASES).index(name))
    keys = jax.random.split(key, args.replications)
    batch = args.batch if args.batch > 1 else None
    ranks, finite, diagnostics = jax.jit(lambda keys: lax.map(replicate, keys, batch_size=batch))(keys)
    if not np.all(finite):
        raise FloatingPointError(f"{np.sum(~np.asarray(finite))} of {args.replications} posteriors are not finite.")
    return np.asarray(ranks), {name: float(np.mean(value)) for name, value in diagnostics.items()}


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


def histogram(ranks: np.ndarray, draws: int) -> np.ndarray:
    return np.bincount(np.asarray(ranks) * BINS // (draws + 1), minlength=BINS)


def judge(ranks: np.ndarray, draws: int) -> dict[str, float]:
    """Figures of one quantity's ranks."""
    u = (np.asarray(ranks) + 0.5) / (draws + 1)
    return {
        "p_band": band_p_value(ranks, draws),
        "p_chi2": float(stats.chisquare(histogram(ranks, draws)).pvalue),
        "mean_rank": float(np.mean(u)),
        "spread": float(np.mean((u - 0.5) ** 2) * 12),
    }


def summary(cases: dict[str, dict]) -> str:
    """A row for each quantity, and the verdicts."""
    lines, verdicts = [], []
    for name, case in cases.items():
        for quantity, f in case["quantities"].items():
            p = (f"{f[key]:.4f}" for key in ("p_band", "p_chi2"))
            lines.append((name, quantity, *p, f"{f['mean_rank']:.3f}", f"{f['spread']:.2f}"))
        diagnostics = ", ".join(f"{key} {value:.3g}" for key, value in case["diagnostics"].items())
        verdict = "uniform" if case["uniform"] else "NOT UNIFORM"
        verdicts.append(
            f"{name}: {verdict} (least p {case['p']:.4f}, corrected); {diagnostics}, {case['seconds']:.0f} s"
        )
    heads = ("", "", "p, band", "p, chi2", "mean rank", "spread")
    return "\n".join([table(heads, lines, left=(0, 1)), *verdicts])


def picture(cases: dict[str, dict], replications: int):
    from matplotlib import pyplot as plt

    columns = max(len(case["quantities"]) for case in cases.values())
    figure, axes = plt.subplots(
        len(cases),
        columns,
        figsize=(2.5 * columns, 2.0 * len(cases)),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    low, high = stats.binom.interval(0.99, replications, 1 / BINS)
    for row, (name, case) in zip(axes, cases.items(), strict=True):
        for axis in row:
            axis.axis("off")
        for axis, (quantity, figures) in zip(row, case["quantities"].items(), strict=False):
            axis.axis("on")
            axis.axhspan(low, high, color="0.88")
            axis.axhline(replications / BINS, color="0.5", linewidth=0.8)
            axis.bar((np.arange(BINS) + 0.5) / BINS, figures["histogram"], 0.9 / BINS, color="C0")
            axis.set_title(f"{quantity.replace('_', ' ')}, p = {figures['p_band']:.2g}", fontsize=9)
            axis.set_xticks([0, 0.5, 1])
            axis.tick_params(labelsize=8)
        row[0].set_ylabel(name)
    figure.suptitle(f"Ranks of true values in {replications} replications, share of the draws below", fontsize=10)
    return figure


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    report: dict = {
        "replications": args.replications,
        "draws": args.draws,
        "rows": ROWS,
        "level": args.level,
        "shift": args.shift,
        "cases": {},
    }
    for name in args.cases:
        case = CASES[name]
        began = time.perf_counter()
        ranks, diagnostics = run_case(name, args)
        seconds = time.perf_counter() - began
        quantities: dict[str, dict] = {}
        for quantity, column in zip(case.quantities, ranks.T, strict=True):
            figures = judge(column, args.draws)
            ordered = {"histogram": histogram(column, args.draws).tolist(), "ranks": column.tolist()}
            quantities[quantity] = {**figures, **ordered}
        p = min(1.0, len(quantities) * min(figures["p_band"] for figures in quantities.values()))
        report["cases"][name] = {
            "p": p,
            "uniform": p >= args.level,
            "seconds": seconds,
            "diagnostics": diagnostics,
            "quantities": quantities,
        }
        print(f"{name} done in {seconds:.0f} s", flush=True)
        write_json(args.json, report, say=False)

    print(f"{args.replications} replications, {args.draws} draws of each posterior, {ROWS} rows; level {args.level:g}")
    print(summary(report["cases"]))
    print(NOTE)
    write_picture(args.out / "calibration.png", picture(report["cases"], args.replications))
    write_json(args.json, report)
    return report


if __name__ == "__main__":
    main()
