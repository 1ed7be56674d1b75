#!/usr/bin/env python
"""How exact the integrals over latent values are: every likelihood of npgp, and NumPyro's distributions by a function.

E log p(y | f) and log ∫ p(y | f) N(f; m, v) df with their gradients in m and v, on a grid of m, v and y, in float32 and
in float64, beside quadrature of densities in 50 digits (mpmath): panels of Gauss's rule that narrow towards every mean,
peak, kink and jump. Errors are relative or absolute, whichever is less.

    python scripts/studies/likelihoods.py --markdown scripts/benchmarks/results/likelihood_accuracy.md

It needs mpmath, and takes some ten minutes on one core.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
from mpmath import mp

from npgp.likelihoods import as_likelihood

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Arguments, command, table
from likelihood_cases import CUTS, every_likelihood

mp.dps = 50
MEANS, VARIANCES = (-3.0, 0.5, 4.0), (1e-4, 0.01, 1.0, 25.0)
QUANTITIES = ("E log p", "its gradient", "log marginal", "its gradient")
LIMITS = {"float32": 1e-4, "float64": 1e-8}
log, exp, lgamma, log1p = mpmath.log, mpmath.exp, mpmath.loggamma, mpmath.log1p


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
    edges = [-mp.inf, *(mp.mpf(float(cut)) for cut in CUTS), mp.inf]
    a, b = edges[int(y)] - f, edges[int(y) + 1] - f
    a, b = (-b, -a) if a + b > 0 else (a, b)
    return log(cdf(b) - cdf(a))


def asymmetric_laplace(y, f, s, q):
    return log(q * (1 - q) / mp.mpf(s)) - (y - f) / s * (q - (y < f))


def von_mises(y, f, k):
    return k * mp.cos(y - f) - log(2 * mp.pi * mp.besseli(0, k))


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


# Densities, observations and where a density has kinks, jumps or peaks, by name -----------------------------------


def nowhere(y):
    return ()


def at_log(y):
    """Where eᶠ is near y: the peak of most densities of positive numbers and counts."""
    return (float(np.log(y)),) if y > 0 else (0.0,)


class Density(NamedTuple):
    log_prob: Callable
    ys: tuple
    breaks: Callable = nowhere


def location(log_prob, ys=(-2.0, 0.5), breaks=lambda y: (y,)):
    return Density(log_prob, ys, breaks)


def count(log_prob, ys=(0, 3, 40), breaks=at_log):
    return Density(log_prob, ys, breaks)


def positive(log_prob, ys=(0.125, 9.0), breaks=at_log):
    return Density(log_prob, ys, breaks)


#: Those of functions stand where they are npgp's likelihood of the name.
DENSITIES = {
    "Gaussian": location(lambda f, y: normal(y, f, 0.5)),
    "StudentT": location(lambda f, y: student(y, f, 4, 0.125)),
    "Laplace": location(lambda f, y: -abs(y - f) / 0.5),
    "AsymmetricLaplace": location(lambda f, y: asymmetric_laplace(y, f, 0.5, 0.75)),
    "CensoredGaussian, above": location(lambda f, y: log(ndtr((f - y) / 0.5))),
    "CensoredGaussian, between": location(lambda f, y: log(mass((y - f) / 0.5, (1 - f) / 0.5))),
    "TruncatedGaussian": location(lambda f, y: normal(y, f) - log(mass(-1 - f, 2 - f)), (-0.875, 0.5, 2.0)),
    "VonMises": location(
        lambda f, y: von_mises(y, f, 4), (-2.0, 0.5, 3.0), lambda y: [y + 2 * np.pi * k for k in range(-2, 3)]
    ),
    "Gamma": positive(lambda f, y: gamma(y, f, 2.5)),
    "Exponential": positive(lambda f, y: -f - y * exp(-f)),
    "Weibull": positive(lambda f, y: weibull(y, f, 1.5)),
    "Tweedie": positive(lambda f, y: tweedie(y, f, 1.25, 1.5), (0.0, 0.5, 9.0)),
    "Bernoulli": Density(lambda f, y: -softplus(f - 2 * y * f), (0, 1)),
    "Bernoulli, probit": Density(lambda f, y: log(ndtr(2 * y * f - f)), (0, 1)),
    "Ordinal": Density(lambda f, y: ordinal(y, f, sigmoid), (0, 1, 3), lambda y: tuple(CUTS)),
    "Ordinal, probit": Density(lambda f, y: ordinal(y, f, ndtr), (0, 1, 3), lambda y: tuple(CUTS)),
    "Poisson": count(lambda f, y: poisson(y, f + log(mp.mpf(2.5))), (0, 40, 10_000)),
    "function: Poisson": count(lambda f, y: poisson(y, f)),
    "Poisson, softplus": count(lambda f, y: poisson(y, log(softplus(f))), breaks=lambda y: (y,)),
    "NegativeBinomial": count(lambda f, y: negative_binomial(y, f, 1.75)),
    "Binomial": count(lambda f, y: binomial(y, f, 40), breaks=nowhere),
    "Binomial, 100,000 trials": count(lambda f, y: binomial(y, f, 100_000), (0, 7586), lambda y: (-2.5,)),
    "BetaBinomial": count(lambda f, y: beta_binomial(y, f, 40, 5), breaks=nowhere),
    "Beta": Density(lambda f, y: beta(y, 5 * sigmoid(f), 5 * sigmoid(-f)), (0.03125, 0.5)),
    "function: Normal": location(lambda f, y: normal(y, f, 1 / 64)),
    "function: Cauchy": location(lambda f, y: student(y, f, 1, 0.5)),
    "function: Logistic": location(lambda f, y: log(mp.mpf(2)) - softplus((y - f) / 0.5) - softplus((f - y) / 0.5)),
    "function: Gumbel": location(lambda f, y: log(mp.mpf(2)) - (y - f) / 0.5 - exp((f - y) / 0.5)),
    "function: MixtureSameFamily": location(
        lambda f, y: log(exp(normal(y, f - 1, 0.0625)) / 4 + 3 * exp(normal(y, f + 1, 0.0625)) / 4),
        breaks=lambda y: (y - 1, y, y + 1),
    ),
    "function: LogNormal": positive(lambda f, y: normal(log(y), f, 0.5) - log(y)),
    "function: InverseGamma": positive(lambda f, y: 2.5 * f - lgamma(mp.mpf(2.5)) - 3.5 * log(y) - exp(f) / y),
    "function: HalfNormal": positive(lambda f, y: log(mp.mpf(2)) + normal(y * exp(-f), 0) - f),
    "function: Pareto": positive(lambda f, y: f - exp(f) * log(16 * y) - log(y), breaks=lambda y: (0.0,)),
    "function: Kumaraswamy": Density(
        lambda f, y: log(mp.mpf(2)) + f + (exp(f) - 1) * log(y) + log1p(-(y ** exp(f))),
        (0.03125, 0.5),
        lambda y: (0.0,),
    ),
    "function: Geometric": count(lambda f, y: -softplus(-f) - y * softplus(f), breaks=nowhere),
    "function: ZeroInflatedPoisson": count(lambda f, y: log((y == 0) / mp.mpf(4) + 3 * exp(poisson(y, f)) / 4)),
}
SAME = {
    "AsymmetricLaplaceQuantile": "AsymmetricLaplace",
    "BetaProportion": "Beta",
    "NegativeBinomial2": "NegativeBinomial",
    "OrderedLogistic": "Ordinal",
}


def density(name: str) -> Density:
    own = name.removeprefix("function: ")
    return DENSITIES.get(name) or DENSITIES[SAME.get(own, own)]


# Truth and answers ---------------------------------------------------------------------------------------------


NODES, WEIGHTS = np.polynomial.legendre.leggauss(10)


class Panels:
    """log p at Gauss's nodes of panels of f, each evaluated once."""

    def __init__(self, case: Density, y: float):
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
        """The quantities of :data:`QUANTITIES`: gradients in m and √v."""
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
        return [*map(float, (*expectation, marginal, one / sd, (two - 1) / sd))]


def answers(likelihood, y, m, v) -> np.ndarray:
    """npgp's, (6, rows), in the same units."""
    likelihood = as_likelihood(likelihood)

    @jax.jit
    def both_integrals(y, m, v):
        results = []
        for integral in (likelihood.expected_log_prob, likelihood.log_marginal):
            value, pull = jax.vjp(lambda m, v, integral=integral: integral(y, m, v), m, v)
            by_mean, by_variance = pull(jnp.ones_like(value))
            results += [value, by_mean, 2 * jnp.sqrt(v) * by_variance]
        return results

    return np.stack([np.asarray(a, float) for a in both_integrals(y, m, v)])


def compare(likelihood, case: Density) -> list[float]:
    """The largest errors, relative or absolute, by precision and quantity."""
    grid = [(y, m, v) for y in case.ys for m in MEANS for v in VARIANCES]
    single = [np.float32(column) for column in zip(*grid, strict=True)]
    panels = {y: Panels(case, y) for y in case.ys}
    truth = np.array([panels[float(y)].integrals(m, v) for y, m, v in zip(*map(np.float64, single), strict=True)]).T
    worst = []
    for precision in LIMITS:
        with jax.enable_x64(precision == "float64"):
            got = answers(likelihood, *[np.asarray(a, precision) for a in single])
        error = np.abs(got - truth) / np.maximum(1.0, np.abs(truth))
        error = np.where(np.isfinite(error), error, np.inf)
        worst += [float(error[rows].max()) for rows in ([0], [1, 2], [3], [4, 5])]
    return worst


def main(argv=None):
    parser = Arguments(__doc__)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", metavar="PATTERN", help="likelihoods whose names match")
    args = parser.read(argv)
    header = ["likelihood", *[f"{precision[5:]} bits: {quantity}" for precision in LIMITS for quantity in QUANTITIES]]
    lines, beyond = [], []
    for name, likelihood in every_likelihood().items():
        if not re.search(args.only, name):
            continue
        errors = compare(likelihood, density(name))
        limits = np.repeat(list(LIMITS.values()), len(QUANTITIES))
        beyond += [name] * bool(np.any(errors > limits))
        bold = np.where(errors > limits, "**", "")
        lines.append([name, *[f"{mark}{error:.0e}{mark}" for mark, error in zip(bold, errors, strict=True)]])
        print(*lines[-1], flush=True)
        about = (
            f"The largest errors, relative or absolute, whichever is less, over means {MEANS}, variances {VARIANCES} "
            "and two or three observations, beside quadrature of densities in 50 digits; gradients are in the mean and "
            f"standard deviation of f. Limits are {LIMITS['float32']:.0e} (float32) and {LIMITS['float64']:.0e} "
            f"(float64); above these, in bold: {', '.join(beyond) or 'none'}. inf is no finite number, on which "
            "training ends with an error that names the likelihood and f.\n"
        )
        if args.markdown is not None:
            text = f"# Accuracy of likelihoods\n\n    {command(__file__, argv)}\n\n{about}\n"
            args.markdown.write_text(f"{text}{table(header, lines, (0,), True)}\n", encoding="utf-8")
    print(f"\n{about}")


if __name__ == "__main__":
    main()
