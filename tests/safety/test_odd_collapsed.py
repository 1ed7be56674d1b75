"""Collapsed bounds, classical approximations and certificates: observations, settings, orders and extremes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import problem as p
from judge import attempt, finite, mistakes, true

import npgp
from npgp.conditionals import Grouped
from npgp.sparse import median_split

CONDITIONALS = ("prior", "shared", "tight", "grouped", "full")


def _gp(**options: Any) -> npgp.CollapsedGP:
    return npgp.CollapsedGP(p.kernel(), p.x(), p.x(p.Z), noise_variance=p.NOISE, **options)


DENSITIES: dict[str, Callable[[], Any]] = {
    "CollapsedGP": _gp,
    "ApproximateGP": lambda: npgp.ApproximateGP(p.kernel(), p.x(), p.x(p.Z), noise_variance=p.NOISE),
    "UncertainInputGP": lambda: npgp.collapsed.UncertainInputGP(
        p.kernel(), p.x(), 0.1, p.x(p.Z), noise_variance=p.NOISE
    ),
    "ResponseNNGP": lambda: npgp.neighbors.ResponseNNGP(p.kernel(), p.x(), 3, noise_variance=p.NOISE),
    "NNGP": lambda: npgp.neighbors.NNGP(p.kernel(), p.x(), 3),
}


def _nan() -> np.ndarray:
    return np.where(np.arange(p.N) == 2, np.nan, p.Y).astype(np.float32)


@attempt("error", "y, value, obs", cases=DENSITIES)
def test_density_of_NaN(make: Callable[[], Any]) -> Any:
    return make().log_prob(_nan())


@attempt("error", "y, value, obs", cases=("sample", "MCMC", "SVI"))
def test_NaN_in_a_model_with_CollapsedGP(how: str) -> Any:
    import numpyro
    from numpyro import handlers
    from numpyro.infer import MCMC, NUTS, autoguide

    def program(y):
        l = numpyro.sample("l", numpyro.distributions.LogNormal(0.0, 0.3))
        numpyro.sample("y", npgp.CollapsedGP(npgp.RBF(l), p.x(), p.x(p.Z), noise_variance=0.2), obs=y)

    if how == "sample":
        with handlers.seed(rng_seed=0), handlers.trace() as trace:
            program(_nan())
        return trace["y"]["fn"].log_prob(trace["y"]["value"])
    if how == "SVI":
        return p.fit(program, svi=p.svi_of(program, guide=autoguide.AutoNormal(program)), y=_nan()).losses
    mcmc = MCMC(NUTS(program), num_warmup=2, num_samples=2, progress_bar=False)
    mcmc.run(p.key(), _nan())
    return mcmc.get_samples()["l"]


@attempt("either", "noise, jitter, float64, X, full", cases=CONDITIONALS)
def test_duplicate_rows_with_almost_no_noise(conditional: str) -> Any:
    """Float32, noise/variance of 1e-7: finite, no more than the evidence with an allowance, in order or refused."""
    X = np.repeat(np.round(p.X[:6], 2), 2, axis=0).astype(np.float32)
    y = np.repeat(p.Y[:6], 2)
    noise = 1e-7 * p.VARIANCE
    chosen = Grouped(median_split(X, 4)) if conditional == "grouped" else conditional
    gp = npgp.CollapsedGP(p.kernel(), X, X[::4], noise_variance=noise, conditional=chosen)
    found = float(jax.jit(gp.log_prob)(p.x(y)))
    # Covariances are right to ε k, which is ε k/σ² nats in a direction of variance σ², and the fit to y²/σ².
    rounding = np.finfo(np.float32).eps * np.sum(1 + (p.VARIANCE + y**2) / noise)
    evidence = p.log_evidence(X, y, noise)
    return finite(found), true(found <= evidence + rounding, f"bound {found:.4g}, evidence {evidence:.4g}")


@attempt(
    "error",
    "y, value, rows, shape",
    cases={"fewer": p.Y[:5], "a column": p.Y[:, None], "one": p.Y[0], "none": p.Y[:0]},
)
def test_observations_of_other_rows(y: Any) -> Any:
    return _gp().log_prob(p.x(y))


@attempt(
    "error",
    "y, value, rows, shape",
    cases=("ApproximateGP", "UncertainInputGP", "ResponseNNGP", "exact", "upper_bound"),
)
def test_other_densities_of_other_rows(which: str) -> Any:
    y = p.x(p.Y[:, None])
    if which == "exact":
        return npgp.collapsed.exact_log_evidence(p.kernel(), p.x(), y, noise_variance=p.NOISE)
    if which == "upper_bound":
        return npgp.collapsed.upper_bound(p.kernel(), p.x(), y, p.x(p.Z), noise_variance=p.NOISE)
    return DENSITIES[which]().log_prob(y)


SETTINGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "an offset of other rows": ("offset", lambda: _gp(offset=np.ones(3, np.float32)).log_prob(p.x(p.Y))),
    "an offset of NaN": ("offset", lambda: _gp(offset=np.nan).log_prob(p.x(p.Y))),
    "an offset as a string": ("offset", lambda: _gp(offset="1").log_prob(p.x(p.Y))),
    "a negative jitter": ("jitter", lambda: _gp(jitter=-0.5).log_prob(p.x(p.Y))),
    "a jitter of NaN": ("jitter", lambda: _gp(jitter=np.nan).log_prob(p.x(p.Y))),
    "an unknown conditional": ("conditional", lambda: _gp(conditional="tightest")),
    "a conditional's class": ("conditional", lambda: _gp(conditional=npgp.conditionals.Tight)),
    "unknown covariances": ("covariances", lambda: _gp(covariances=["full"])),
    "too many covariances": ("covariances", lambda: _gp(covariances=["dense", "dense"])),
    "an unknown method": (
        "method",
        lambda: npgp.ApproximateGP(p.kernel(), p.x(), p.x(p.Z), noise_variance=0.1, method="vfe"),
    ),
    "groups for FITC": (
        "groups, method",
        lambda: npgp.ApproximateGP(p.kernel(), p.x(), p.x(p.Z), noise_variance=0.1, groups=median_split(p.x(), 3)),
    ),
    "groups of other rows": (
        "groups",
        lambda: _gp(conditional=Grouped(median_split(p.x(p.X[:5]), 3))).log_prob(p.x(p.Y)),
    ),
    "a negative error of inputs": (
        "scale",
        lambda: npgp.collapsed.UncertainInputGP(p.kernel(), p.x(), -0.1, p.x(p.Z), noise_variance=0.1),
    ),
    "an error of NaN": (
        "scale",
        lambda: npgp.collapsed.UncertainInputGP(p.kernel(), p.x(), np.nan, p.x(p.Z), noise_variance=0.1),
    ),
    "a kernel without closed form": (
        "kernel, Matern32",
        lambda: npgp.collapsed.UncertainInputGP(npgp.Matern32(), p.x(), 0.1, p.x(p.Z), noise_variance=0.1).log_prob(
            p.x(p.Y)
        ),
    ),
    "an odd number of penalty draws": (
        "penalty_draws, draws",
        lambda: npgp.collapsed.UncertainInputGP(p.kernel(), p.x(), 0.1, p.x(p.Z), noise_variance=0.1, penalty_draws=3),
    ),
    "a grouped bound of uncertain inputs": (
        "conditional",
        lambda: npgp.collapsed.UncertainInputGP(
            p.kernel(), p.x(), 0.1, p.x(p.Z), noise_variance=0.1, conditional="grouped"
        ),
    ),
    "a certificate under jit": (
        "certificate",
        lambda: jax.jit(lambda y: npgp.certificate(p.kernel(), p.x(), y, p.x(p.Z), noise_variance=0.1).lower)(p.x(p.Y)),
    ),
    "a certificate of several outputs": (
        "y",
        lambda: npgp.certificate(p.kernel(), p.x(), p.x([p.Y]), p.x(p.Z), noise_variance=0.1),
    ),
    "a certificate of NaN": ("y", lambda: npgp.certificate(p.kernel(), p.x(), _nan(), p.x(p.Z), noise_variance=0.1)),
    "conditioning on NaN": ("y", lambda: _gp().condition(_nan())),
    "conditioning on other rows": ("y", lambda: _gp().condition(p.x(p.Y[:4]))),
    "predictions at other columns": ("columns", lambda: _gp().condition(p.x(p.Y)).mean(p.x(np.ones((2, 3))))),
    "predictions at NaN": ("X", lambda: _gp().condition(p.x(p.Y)).variance(np.full((2, 1), np.nan, np.float32))),
    "predictions in batches of 0": ("batch_size", lambda: _gp().condition(p.x(p.Y)).mean_and_variance(p.x(), 0)),
    "predictions in batches of 1.5": ("batch_size", lambda: _gp().condition(p.x(p.Y)).mean_and_variance(p.x(), 1.5)),
    "random features of no draws": (
        "num_draws",
        lambda: _gp().condition(p.x(p.Y)).draw_functions(p.key(), 0),
    ),
}


@mistakes(SETTINGS)
def test_setting(make: Callable[[], Any]) -> Any:
    return make()


def _wiggly() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """60 rows that five points cannot follow."""
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0.0, 10.0, (60, 1)), axis=0)
    return X, np.sin(8.0 * X[:, 0]) + 0.05 * rng.normal(size=60), np.linspace(0.0, 10.0, 5)[:, None]


@attempt("answer", x64=True)
def test_fit_with_a_lengthscale_below_the_spacing_of_points() -> Any:
    """``fit`` sees no data as such; what is to be called after it says that the points are too few, and how many do."""
    X, y, Z = _wiggly()

    def program(X, y):
        import numpyro
        from numpyro.distributions import constraints

        l = numpyro.param("l", 0.2, constraint=constraints.positive)
        f = npgp.SparseGP("f", npgp.RBF(l), Z).draw()
        npgp.observe("y", f(X), npgp.Gaussian(variance=0.01), obs=y)

    svi = p.svi_of(program, rate=0.02)
    params = p.fit(program, X, y, steps=300, svi=svi).params
    posterior = npgp.posterior("f", program, svi.guide, params, X, y)
    text = str(npgp.collapsed.enough_points(posterior, X, y, npgp.Gaussian(variance=0.01)))
    return true(re.search(r"too few: to come within 0.01 nats a row takes about \d+", text), text)
