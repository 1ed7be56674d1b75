"""
Test for shorter lengthscales than the inducing features can follow.

A bound cannot tell. Where inducing points are further apart than a lengthscale they explain little of f, so that the
bound falls towards short lengthscales even where the evidence rises, and training ends at a long one. The data can:
here the evidence of neighboring rows is computed without inducing features, at ½, ¼, … of the lengthscales at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from npgp.features import InducingBlock
from npgp.functionals.rows import Functionals, Rows
from npgp.inducing.selection import greedy_variance
from npgp.kernels import Kernel
from npgp.sparse.groups import median_split
from npgp.sparse.projection import factorize

#: Rows whose evidence is computed: as many of so many neighbors each.
GROUPS, GROUP_ROWS = 4, 500
#: What lengthscales are divided by; and what the prior variance and that of Gaussian noise, in which training has put
#: what it could not explain, are multiplied by at each. The best of these counts.
DIVISORS, VARIANCES, NOISES = 2.0 ** np.arange(7), 4.0 ** np.arange(-3, 4), 4.0 ** np.arange(-3, 1)
#: A gain in log evidence, in nats, that is no accident; and what makes no difference, where fewer points do.
CLEAR_GAIN, EQUAL = 5.0, 2.0
#: Inducing features are too few where they leave more than this share of the prior variance, …
TOO_MUCH_LEFT = 0.2
#: … and enough where they leave this; up to so many points are chosen, from so many rows, to see how many that takes.
LITTLE_LEFT, MOST_POINTS, MOST_ROWS = 0.1, 1000, 5000


@dataclass(frozen=True)
class ShorterLengthscales:
    """
    Whether the data favor shorter lengthscales than those at hand, part of :func:`enough_points` and
    :func:`npgp.certificate`. ``print`` it for a report.

    :param divisor: of the lengthscales at hand, for the longest of those that explain the data best; 1 if none shorter
        are clearly better.
    :param gain: what they gain in log evidence, in nats; each with the best of several variances of prior and noise.
    :param rows: number of rows whose evidence that is, in groups of neighbors; each group is taken by itself.
    :param approximate: whether the likelihood is not Gaussian, and pseudo-observations stand for it.
    :param features: number of inducing features.
    :param unexplained: share of the prior variance at the rows that these leave, at the lengthscales that are best.
    :param points_needed: about how many inducing points would leave a tenth there, chosen one by one from the rows
        (:func:`npgp.inducing.greedy_variance`). ``None`` if the features are enough, or if 1000 points are too few.
    """

    divisor: float
    gain: float
    rows: int
    approximate: bool
    features: int
    unexplained: float
    points_needed: int | None

    @property
    def too_few(self) -> bool:
        """True if the inducing features are too few for these lengthscales."""
        return self.unexplained > TOO_MUCH_LEFT

    @property
    def found(self) -> str:
        """Whether there are such, in a sentence."""
        about = ", by Gaussian pseudo-observations" if self.approximate else ""
        rows = count(self.rows, "row")
        if self.divisor > 1:
            return (
                f"Lengthscales of 1/{self.divisor:.0f} of those at hand explain {rows} better, by {nats(self.gain)} of "
                f"log evidence{about}."
            )
        return f"No shorter lengthscales explain {rows} clearly better{about}."

    def __str__(self) -> str:
        first, share = self.found, f"{100 * self.unexplained:.0f}% of the prior variance unexplained"
        where, so = "At the lengthscales at hand", ""
        if self.divisor > 1:
            where, so = "There", ", so that training by a bound does not find them"
        if not self.too_few:
            only = ", so that it is training that has not found them" if self.divisor > 1 else ""
            return f"{first}\n{where} the {count(self.features, 'inducing feature')} leave {share}{only}."
        needed = f"some {self.points_needed}" if self.points_needed else f"more than {MOST_POINTS}"
        return (
            f"{first}\n{where} the {count(self.features, 'inducing feature')} leave {share}{so}: they are too few, and "
            f"{needed} inducing points would leave a tenth."
        )


def of_observations(
    kernel: Kernel,
    blocks: tuple[InducingBlock, ...],
    X: Any,
    target: np.ndarray,
    precision: np.ndarray,
    *,
    approximate: bool = False,
    jitter: float | None = None,
) -> ShorterLengthscales:
    """
    From Gaussian observations, with a precision of 0 for rows without any.

    :param target: observations of f, (N,).
    :param precision: their precisions, one over the noise variance, (N,).
    """
    evidence, rows = _evidence(kernel, X, target, precision, np.ones(1) if approximate else NOISES)
    gains = evidence[1:] - evidence[0]
    best = int(np.argmax(gains >= gains.max() - EQUAL))
    gain = float(gains[best])
    divisor = float(DIVISORS[1 + best]) if gain > CLEAR_GAIN else 1.0
    X = X[:: -(-X.shape[0] // MOST_ROWS)]
    features = sum(block.size for block in blocks)
    unexplained = float(_unexplained(kernel, divisor, blocks, X, jitter))
    needed = None
    if unexplained > TOO_MUCH_LEFT:
        most = min(MOST_POINTS, len(np.unique(np.asarray(X), axis=0)))
        _, left = greedy_variance(shortened(kernel, divisor), X, most, jitter=jitter, return_trace=True)
        enough = np.flatnonzero(np.asarray(left) <= LITTLE_LEFT * left[0])
        needed = int(enough[0]) if enough.size else None
    return ShorterLengthscales(divisor, gain, rows, approximate, features, unexplained, needed)


def _evidence(kernel: Kernel, X: jax.Array, target, precision, noises: np.ndarray) -> tuple[np.ndarray, int]:
    """
    Log evidence of some rows with lengthscales divided by each of ``DIVISORS``, up to a common constant, and the number
    of these rows. In float64, from covariances in JAX's precision.
    """
    inputs, chosen = np.asarray(X), [np.arange(X.shape[0])]
    if X.shape[0] > GROUP_ROWS:
        groups = median_split(X, GROUP_ROWS)
        some = np.unique(np.linspace(0, groups.count - 1, min(GROUPS, groups.count)).astype(int))
        chosen = [np.asarray(groups.rows[i])[np.asarray(groups.mask[i])] for i in some]
    evidence = np.zeros((len(DIVISORS), len(VARIANCES), len(noises)))
    noises = noises[:, None]
    for rows in chosen:
        root = np.sqrt(np.asarray(precision, float)[rows])
        scaled = root * np.asarray(target, float)[rows]
        for i, divisor in enumerate(DIVISORS):
            K = np.asarray(_gram(kernel, float(divisor), inputs[rows]), float)
            # Of n I + v S, S = Λ^½ K Λ^½: its eigenvectors are those of S, whatever the factors n and v are.
            values, vectors = np.linalg.eigh((root[:, None] * K * root)[np.ix_(root > 0, root > 0)])
            square = np.square(vectors.T @ scaled[root > 0])
            total = noises + VARIANCES[:, None, None] * np.maximum(values, 0.0)
            evidence[i] -= 0.5 * np.sum(np.log(total) + square / total, axis=-1)
    return evidence.max(axis=(1, 2)), sum(map(len, chosen))


_gram = jax.jit(lambda kernel, divisor, X: shortened(kernel, divisor)(X))


@jax.jit
def _unexplained(
    kernel: Kernel, divisor: float, blocks: tuple[InducingBlock, ...], X: jax.Array, jitter: float | None
) -> jax.Array:
    projection = factorize(shortened(kernel, divisor), blocks, jitter)(X)
    return jnp.sum(projection.residual_variance()) / jnp.sum(projection.prior_variance)


def has_lengthscale(kernel: Kernel, X: Rows) -> bool:
    """Whether shorter lengthscales can be looked at: of a kernel that has any, and of rows that have neighbors."""
    leaves = jax.tree_util.tree_leaves_with_path(kernel)
    return not isinstance(X, Functionals) and any(_is_lengthscale(path) for path, _ in leaves)


def _is_lengthscale(path: tuple) -> bool:
    return getattr(path[-1], "name", None) == "lengthscale"


def shortened(kernel: Kernel, divisor: float) -> Kernel:
    """The kernel with all its lengthscales divided by a number."""

    def one(path, leaf):
        return leaf / divisor if _is_lengthscale(path) else leaf

    return jax.tree_util.tree_map_with_path(one, kernel)


# ---------------------------------------------------------------------------------------------------------------
# Numbers in sentences


def nats(value: float) -> str:
    """Two or three digits."""
    size = abs(value)
    if size < 1e-4:
        return "less than 0.0001 nats"
    decimals = 0 if size >= 100 else 1 if size >= 10 else 1 - math.floor(math.log10(size))
    return f"{value:.{decimals}f} nats"


def change(gain: float, conditional: str) -> str:
    if abs(gain) < 0.01:
        return f"leave the {conditional!r} bound as it is"
    return f"{'raise' if gain > 0 else 'lower'} the {conditional!r} bound by {nats(abs(gain))}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
