#!/usr/bin/env python
"""How exact the integrals over latent values are: every likelihood of npgp, and NumPyro's distributions by a function.

E log p(y | f) and log ∫ p(y | f) N(f; m, v) df with their gradients in m and v, and the second derivative of the latter
in m, on a grid of m, v and y, in float32 and in float64, beside quadrature of densities in 50 digits (mpmath): panels
of Gauss's rule that narrow towards every mean, peak, kink and jump. Errors are relative or absolute, whichever is less.

    python scripts/studies/likelihoods.py --markdown scripts/benchmarks/results/likelihood_accuracy.md

It needs mpmath, and takes some ten minutes on one core.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import numpyro.distributions as dist
from mpmath import mp

from npgp import likelihoods as L

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, command, table

mp.dps = 50
MEANS, VARIANCES = (-3.0, 0.5, 4.0), (1e-4, 0.01, 1.0, 25.0)
QUANTITIES = ("E log p", "gradient of E", "log marginal", "gradient", "second derivative")
PRECISIONS = ("float32", "float64")
NOTE = (
    f"The largest errors, relative or absolute, whichever is less, over means {MEANS}, variances {VARIANCES} and two\n"
    "or three observations, beside quadrature of densities in 50 digits. Gradients are in mean and standard deviation\n"
    "of f, second derivatives in the mean, times the variance. inf: no finite number, on which training ends with an\n"
    "error that names the likelihood and f. Functions whose densities are narrow, or have kinks, beside a wide f have\n"
    "inexact expectations: take the likelihood of npgp's where there is one."
)
CUTS = (-1.0, 0.25, 2.0)
S = jax.nn.sigmoid
log, exp, lgamma, log1p = mpmath.log, mpmath.exp, mpmath.loggamma, mpmath.log1p


class Case(NamedTuple):
    """A likelihood or a function, log p(y | f) in mpmath, observations, and where log p has kinks, jumps or peaks."""

    likelihood: Any
    log_prob: Callable
    ys: tuple
    breaks: Callable = lambda y: (y,)


# Densities, in mpmath ------------------------------------------------------------------------------------------


def sigmoid(f):
    return 1 / (1 + exp(-f))


def softplus(f):
    return log1p(exp(f)) if f < 0 else f + log1p(exp(-f))


def ndtr(x):
    return mp.erfc(-x / mp.sqrt(2)) / 2


def mass(a, b):
    """Φ(b) − Φ(a), from the tail where nothing cancels."""
    a, b = (-b, -a) if a + b > 0 else (a, b)
    return ndtr(b) - ndtr(a)


def choose(n, k):
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def normal(y, f, s=1):
    return -((y - f) ** 2) / (2 * mp.mpf(s) ** 2) - log(mp.mpf(s)) - log(2 * mp.pi) / 2


def student(y, f, df, s):
    norm = lgamma(mp.mpf(df + 1) / 2) - lgamma(mp.mpf(df) / 2) - log(df * mp.pi) / 2 - log(mp.mpf(s))
    return norm - mp.mpf(df + 1) / 2 * log1p(((y - f) / s) ** 2 / df)


def gamma(y, f, a):
    return a * log(mp.mpf(a)) - lgamma(a) + (a - 1) * log(y) - a * (f + y * exp(-f))


def weibull(y, f, k):
    return log(mp.mpf(k)) + (k - 1) * log(y) - k * f - (y * exp(-f)) ** k


def poisson(y, log_rate):
    return y * log_rate - exp(log_rate) - lgamma(y + 1)


def negative_binomial(y, f, r):
    return choose(y + r - 1, y) - y * softplus(log(mp.mpf(r)) - f) - r * softplus(f - log(mp.mpf(r)))


def binomial(y, f, n):
    return choose(n, y) - y * softplus(-f) - (n - y) * softplus(f)


def beta(y, a, b):
    return lgamma(a + b) - lgamma(a) - lgamma(b) + (a - 1) * log(y) + (b - 1) * log1p(-y)


def beta_binomial(y, f, n, t):
    a, b = t * sigmoid(f), t * sigmoid(-f)
    ratio = lgamma(y + a) - lgamma(a) + lgamma(n - y + b) - lgamma(b)
    return choose(n, y) + ratio - lgamma(n + t) + lgamma(mp.mpf(t))


def ordinal(y, f, cdf):
    edges = [-mp.inf, *map(mp.mpf, CUTS), mp.inf]
    a, b = edges[int(y)] - f, edges[int(y) + 1] - f
    a, b = (-b, -a) if a + b > 0 else (a, b)
    return log(cdf(b) - cdf(a))


def asymmetric_laplace(y, f, s, q):
    return log(q * (1 - q) / mp.mpf(s)) - (y - f) / s * (q - (y < f))


def von_mises(y, f, k):
    return k * mp.cos(y - f) - log(2 * mp.pi * mp.besseli(0, k))


def zero_inflated(y, p0, log_p, zero):
    return log(zero * (y == 0) + (1 - zero) * exp(log_p))


def tweedie(y, f, phi, p):
    def exponent(f):
        return (y * exp((1 - p) * f) / (1 - p) - exp((2 - p) * f) / (2 - p)) / phi

    if y == 0:
        return exponent(f)
    rate, terms = 1 / mp.mpf((2 - p) * phi), []
    for j in range(1, 150):
        a, scale = j * mp.mpf(2 - p) / (p - 1), mp.mpf(phi * (p - 1))
        terms.append(exp(poisson(j, log(rate)) + (a - 1) * log(y) - y / scale - lgamma(a) - a * log(scale)))
    return exponent(f) - exponent(0) + log(mp.fsum(terms))


# Cases ---------------------------------------------------------------------------------------------------------


def nowhere(y):
    return ()


def at_log(y):
    """Where eᶠ is near y: the peak of most densities of positive numbers and counts."""
    return (float(np.log(y)),) if y > 0 else (0.0,)


COUNTS, POSITIVE, REAL = (0, 3, 40), (0.125, 9.0), (-2.0, 0.5)

BUILT_IN = {
    "Gaussian": Case(L.Gaussian(variance=0.25), lambda f, y: normal(y, f, 0.5), REAL),
    "StudentT": Case(L.StudentT(df=4.0, scale=0.125), lambda f, y: student(y, f, 4, 0.125), REAL),
    "Laplace": Case(L.Laplace(scale=0.5), lambda f, y: -abs(y - f) / 0.5, REAL),
    "AsymmetricLaplace": Case(
        L.AsymmetricLaplace(scale=0.5, quantile=0.75), lambda f, y: asymmetric_laplace(y, f, 0.5, 0.75), REAL
    ),
    "CensoredGaussian, above": Case(
        L.CensoredGaussian(scale=0.5, until=np.inf), lambda f, y: log(ndtr((f - y) / 0.5)), REAL
    ),
    "CensoredGaussian, between": Case(
        L.CensoredGaussian(scale=0.5, until=1.0), lambda f, y: log(mass((y - f) / 0.5, (1 - f) / 0.5)), (-2.0, 0.5)
    ),
    "TruncatedGaussian": Case(
        L.TruncatedGaussian(scale=1.0, lower=-1.0, upper=2.0),
        lambda f, y: normal(y, f) - log(mass(-1 - f, 2 - f)),
        (-0.875, 0.5, 2.0),
    ),
    "VonMises": Case(
        L.VonMises(concentration=4.0),
        lambda f, y: von_mises(y, f, 4),
        (-2.0, 0.5, 3.0),
        lambda y: [y + 2 * np.pi * k for k in range(-2, 3)],
    ),
    "Gamma": Case(L.Gamma(concentration=2.5), lambda f, y: gamma(y, f, 2.5), POSITIVE, at_log),
    "Exponential": Case(L.Exponential(), lambda f, y: -f - y * exp(-f), POSITIVE, at_log),
    "Weibull": Case(L.Weibull(concentration=1.5), lambda f, y: weibull(y, f, 1.5), POSITIVE, at_log),
    "Tweedie": Case(
        L.Tweedie(dispersion=1.25, power=1.5), lambda f, y: tweedie(y, f, 1.25, 1.5), (0.0, 0.5, 9.0), at_log
    ),
    "Bernoulli logit": Case(L.Bernoulli(), lambda f, y: -softplus(f - 2 * y * f), (0, 1), nowhere),
    "Bernoulli probit": Case(L.Bernoulli("probit"), lambda f, y: log(ndtr(2 * y * f - f)), (0, 1), nowhere),
    "Ordinal logit": Case(L.Ordinal(CUTS), lambda f, y: ordinal(y, f, sigmoid), (0, 1, 3), lambda y: CUTS),
    "Ordinal probit": Case(L.Ordinal(CUTS, "probit"), lambda f, y: ordinal(y, f, ndtr), (0, 1, 3), lambda y: CUTS),
    "Poisson exp": Case(
        L.Poisson(exposure=2.5), lambda f, y: poisson(y, f + log(mp.mpf(2.5))), (0, 40, 10_000), at_log
    ),
    "Poisson softplus": Case(L.Poisson("softplus"), lambda f, y: poisson(y, log(softplus(f))), COUNTS),
    "NegativeBinomial": Case(
        L.NegativeBinomial(concentration=1.75), lambda f, y: negative_binomial(y, f, 1.75), COUNTS, at_log
    ),
    "Binomial": Case(L.Binomial(trials=40), lambda f, y: binomial(y, f, 40), COUNTS, nowhere),
    "Binomial, 100,000 trials": Case(
        L.Binomial(trials=100_000), lambda f, y: binomial(y, f, 100_000), (0, 7586), lambda y: (-2.5,)
    ),
    "BetaBinomial": Case(
        L.BetaBinomial(trials=40, concentration=5.0), lambda f, y: beta_binomial(y, f, 40, 5), COUNTS, nowhere
    ),
    "Beta": Case(
        L.Beta(concentration=5.0),
        lambda f, y: beta(y, 5 * sigmoid(f), 5 * sigmoid(-f)),
        (0.03125, 0.5),
        nowhere,
    ),
}


def step_mixture(f):
    pair = jnp.asarray([-1.0, 1.0], f.dtype)
    return dist.MixtureSameFamily(
        dist.Categorical(probs=jnp.array([0.25, 0.75])), dist.Normal(f[..., None] + pair, 0.0625)
    )


def ordered(f):
    return dist.OrderedLogistic(f, jnp.asarray(CUTS, f.dtype))


BY_FUNCTION = {
    "Normal, scale 1/64": Case(lambda f: dist.Normal(f, 1 / 64), lambda f, y: normal(y, f, 1 / 64), REAL),
    "StudentT": Case(lambda f: dist.StudentT(4.0, f, 0.125), lambda f, y: student(y, f, 4, 0.125), REAL),
    "Cauchy": Case(lambda f: dist.Cauchy(f, 0.5), lambda f, y: student(y, f, 1, 0.5), REAL),
    "Laplace": Case(lambda f: dist.Laplace(f, 0.5), lambda f, y: -abs(y - f) / 0.5, REAL),
    "AsymmetricLaplaceQuantile": Case(
        lambda f: dist.AsymmetricLaplaceQuantile(f, 0.5, 0.75), lambda f, y: asymmetric_laplace(y, f, 0.5, 0.75), REAL
    ),
    "Logistic": Case(
        lambda f: dist.Logistic(f, 0.5),
        lambda f, y: log(mp.mpf(2)) - softplus((y - f) / 0.5) - softplus((f - y) / 0.5),
        REAL,
    ),
    "Gumbel": Case(
        lambda f: dist.Gumbel(f, 0.5), lambda f, y: log(mp.mpf(2)) - (y - f) / 0.5 - exp((f - y) / 0.5), REAL
    ),
    "MixtureSameFamily of normals": Case(
        step_mixture,
        lambda f, y: log(exp(normal(y, f - 1, 0.0625)) / 4 + 3 * exp(normal(y, f + 1, 0.0625)) / 4),
        REAL,
        lambda y: (y - 1, y, y + 1),
    ),
    "LogNormal": Case(lambda f: dist.LogNormal(f, 0.5), lambda f, y: normal(log(y), f, 0.5) - log(y), POSITIVE, at_log),
    "Gamma": Case(lambda f: dist.Gamma(2.5, 2.5 * jnp.exp(-f)), lambda f, y: gamma(y, f, 2.5), POSITIVE, at_log),
    "InverseGamma": Case(
        lambda f: dist.InverseGamma(2.5, jnp.exp(f)),
        lambda f, y: 2.5 * f - lgamma(mp.mpf(2.5)) - 3.5 * log(y) - exp(f) / y,
        POSITIVE,
        at_log,
    ),
    "HalfNormal": Case(
        lambda f: dist.HalfNormal(jnp.exp(f)),
        lambda f, y: log(mp.mpf(2)) + normal(y * exp(-f), 0) - f,
        POSITIVE,
        at_log,
    ),
    "Weibull": Case(lambda f: dist.Weibull(jnp.exp(f), 1.5), lambda f, y: weibull(y, f, 1.5), POSITIVE, at_log),
    "Pareto": Case(
        lambda f: dist.Pareto(0.0625, jnp.exp(f)),
        lambda f, y: f - exp(f) * log(16 * y) - log(y),
        POSITIVE,
        lambda y: (0.0,),
    ),
    "Kumaraswamy": Case(
        lambda f: dist.Kumaraswamy(jnp.exp(f), 2.0),
        lambda f, y: log(mp.mpf(2)) + f + (exp(f) - 1) * log(y) + log1p(-(y ** exp(f))),
        (0.03125, 0.5),
        lambda y: (0.0,),
    ),
    "BetaProportion": Case(
        lambda f: dist.BetaProportion(S(f), 5.0), BUILT_IN["Beta"].log_prob, (0.03125, 0.5), nowhere
    ),
    "Beta, logits": Case(lambda f: dist.Beta(5 * S(f), 5 * S(-f)), BUILT_IN["Beta"].log_prob, (0.03125, 0.5), nowhere),
    "VonMises": Case(
        lambda f: dist.VonMises(f, 4.0), BUILT_IN["VonMises"].log_prob, (-2.0, 0.5, 3.0), BUILT_IN["VonMises"].breaks
    ),
    "Bernoulli": Case(lambda f: dist.Bernoulli(logits=f), BUILT_IN["Bernoulli logit"].log_prob, (0, 1), nowhere),
    "Geometric": Case(
        lambda f: dist.Geometric(logits=f), lambda f, y: -softplus(-f) - y * softplus(f), COUNTS, nowhere
    ),
    "Poisson": Case(lambda f: dist.Poisson(jnp.exp(f)), lambda f, y: poisson(y, f), COUNTS, at_log),
    "ZeroInflatedPoisson": Case(
        lambda f: dist.ZeroInflatedPoisson(0.25, rate=jnp.exp(f)),
        lambda f, y: log((y == 0) / mp.mpf(4) + 3 * exp(poisson(y, f)) / 4),
        COUNTS,
        at_log,
    ),
    "NegativeBinomial2": Case(
        lambda f: dist.NegativeBinomial2(jnp.exp(f), 1.75), BUILT_IN["NegativeBinomial"].log_prob, COUNTS, at_log
    ),
    "Binomial": Case(lambda f: dist.Binomial(40, logits=f), BUILT_IN["Binomial"].log_prob, COUNTS, nowhere),
    "Binomial, 100,000 trials": Case(
        lambda f: dist.Binomial(100_000, logits=f),
        BUILT_IN["Binomial, 100,000 trials"].log_prob,
        (0, 7586),
        lambda y: (-2.5,),
    ),
    "BetaBinomial": Case(
        lambda f: dist.BetaBinomial(5 * S(f), 5 * S(-f), 40), BUILT_IN["BetaBinomial"].log_prob, COUNTS, nowhere
    ),
    "OrderedLogistic": Case(ordered, BUILT_IN["Ordinal logit"].log_prob, (0, 1, 3), lambda y: CUTS),
}


# Truth and answers ---------------------------------------------------------------------------------------------


NODES, WEIGHTS = np.polynomial.legendre.leggauss(10)


class Panels:
    """log p at Gauss's nodes of panels of f, each evaluated once."""

    def __init__(self, case: Case, y: float):
        self.log_prob = lambda f: case.log_prob(f, mp.mpf(float(y)))
        around = np.array([*MEANS, *case.breaks(y)])
        distances = np.concatenate([[0.0, 0.02, 0.1], np.geomspace(0.3, 180.0, 12)])
        edges = np.unique(np.concatenate([around + s * d for d in distances for s in (-1, 1)]).round(6))
        edges = np.concatenate([edges[np.abs(edges) < 90.0], around, [-90.0, 90.0]])
        edges = np.unique(edges)
        self.start = list(itertools.pairwise(edges))
        self.known: dict[tuple, np.ndarray] = {}

    def _at(self, panel) -> np.ndarray:
        """Nodes, their weights, and log p, in 80 bits."""
        if panel not in self.known:
            a, b = panel
            nodes = 0.5 * (a + b) + 0.5 * (b - a) * NODES
            exact = [self.log_prob(mp.mpf(float(f))) for f in nodes]
            high = np.array([float(x) for x in exact])
            low = [float(x - h) if np.isfinite(h) else 0.0 for x, h in zip(exact, high, strict=True)]
            self.known[panel] = np.stack([nodes, 0.5 * (b - a) * WEIGHTS, np.longdouble(high) + np.longdouble(low)])
        return self.known[panel]

    def integrals(self, m: float, v: float) -> list[float]:
        """The quantities of :data:`QUANTITIES`: gradients in m and √v, the second derivative times v."""
        m, v, h = np.longdouble(m), np.longdouble(v), mp.mpf(10) ** -20
        at_mean, above = self.log_prob(mp.mpf(float(m))), self.log_prob(mp.mpf(float(m)) + h)
        smooth = np.isfinite(float(at_mean))
        at_mean, slope = map(np.longdouble, (float(at_mean), float((above - at_mean) / h)) if smooth else (0.0, 0.0))

        def sums(panels, top):  # (panels, 6): moments of the posterior of f, and E z^k log p
            f, w, log_p = np.stack([self._at(panel) for panel in panels]).transpose(1, 0, 2)
            z = (f - m) / np.sqrt(v)
            joint = log_p - 0.5 * z**2
            top = np.max(joint) if top is None else top
            near = (z**2 < 1200) & np.isfinite(log_p)
            change = np.where(near, log_p, at_mean) - at_mean - slope * (f - m)  # of which E z and E z² are as exact
            terms = [np.exp(joint - top), np.where(near, change, 0.0) * np.exp(-0.5 * z**2)]
            return np.stack([np.sum(w * t * z**k, axis=1) for t in terms for k in range(3)], axis=1), top

        panels, done, top = self.start, np.zeros(6, np.longdouble), None
        for _ in range(25):
            wholes, top_now = sums(panels, top)
            if top is None or top_now > top:
                top = top_now
                wholes, _ = sums(panels, top)
            halves = [half for a, b in panels for half in ((a, 0.5 * (a + b)), (0.5 * (a + b), b))]
            finer = sums(halves, top)[0].reshape(-1, 2, 6).sum(1)
            scale = np.abs(done) + np.sum(np.abs(finer), axis=0)
            scale[3:] += np.sqrt(v) * (1 + abs(at_mean))
            wrong = np.any(np.abs(finer - wholes) > 1e-13 * scale, axis=1)
            done = done + np.sum(finer[~wrong], axis=0)
            panels = [half for i, half in enumerate(halves) if wrong[i // 2]]
            if not panels:
                break
        else:
            raise ArithmeticError(f"no convergence at mean {m}, variance {v}")
        zero, one, two, *expected = done
        one, two = one / zero, two / zero
        e0, e1, e2 = (e / np.sqrt(2 * np.pi * v) for e in expected)
        sd, marginal = np.sqrt(v), np.log(zero) + top - 0.5 * np.log(2 * np.pi * v)
        expectation = at_mean + e0, slope + e1 / sd, (e2 - e0) / sd
        return [*map(float, (*expectation, marginal, one / sd, (two - 1) / sd, two - one**2 - 1))]


def answers(likelihood, y, m, v) -> np.ndarray:
    """npgp's, (7, rows), in the same units."""
    likelihood = L.as_likelihood(likelihood)

    @jax.jit
    def all_of(y, m, v):
        ones = jnp.ones_like(m)

        def both(method):
            value, pull = jax.vjp(lambda m, v: getattr(likelihood, method)(y, m, v), m, v)
            by_mean, by_variance = pull(jnp.ones_like(value))
            return value, by_mean, 2 * jnp.sqrt(v) * by_variance

        def slope(m):
            return jax.vjp(lambda m: likelihood.log_marginal(y, m, v), m)[1](ones)[0]

        return *both("expected_log_prob"), *both("log_marginal"), v * jax.jvp(slope, (m,), (ones,))[1]

    return np.stack([np.asarray(a, float) for a in all_of(y, m, v)])


def compare(case: Case) -> list[float]:
    """The largest errors of a case, relative or absolute, by precision and quantity."""
    grid = [(y, m, v) for y in case.ys for m in MEANS for v in VARIANCES]
    single = [np.float32(column) for column in zip(*grid, strict=True)]
    panels = {y: Panels(case, y) for y in case.ys}
    truth = np.array([panels[float(y)].integrals(m, v) for y, m, v in zip(*map(np.float64, single), strict=True)]).T
    worst = []
    for precision in PRECISIONS:
        with jax.enable_x64(precision == "float64"):
            got = answers(case.likelihood, *[np.asarray(a, precision) for a in single])
        error = np.abs(got - truth) / np.maximum(1.0, np.abs(truth))
        error = np.where(np.isfinite(error), error, np.inf)
        worst += [float(error[rows].max()) for rows in ([0], [1, 2], [3], [4, 5], [6])]
    return worst


def main(argv=None):
    parser = Arguments(__doc__)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose names match")
    args = parser.read(argv)
    lines: list[list[str]] = []

    def shown(markdown: bool) -> str:
        return table(
            ["likelihood", *[f"{p[5:]} bits: {q}" for p in PRECISIONS for q in QUANTITIES]], lines, (0,), markdown
        )

    for kind, cases in {"built in": BUILT_IN, "by function": BY_FUNCTION}.items():
        for name, case in cases.items():
            if re.search(args.only, f"{kind}: {name}"):
                errors = compare(case)
                lines.append([name if kind == "built in" else f"function: {name}", *[f"{e:.0e}" for e in errors]])
                print(*lines[-1], flush=True)
                if args.markdown is not None:
                    about = f"# Accuracy of likelihoods\n\n    {command(__file__, argv)}\n\n{NOTE}\n\n"
                    args.markdown.write_text(f"{about}{shown(True)}\n", encoding="utf-8")
    print(f"\n{shown(False)}\n\n{NOTE}")


if __name__ == "__main__":
    main()
