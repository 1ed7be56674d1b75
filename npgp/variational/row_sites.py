"""
The joint posterior of several functions given pseudo-observations of what rows see of them.

A row's predictor is ``s_n = o_n + Ã_nᵀ ε``, with ε the whitened inducing values of all functions, stacked. Given a
pseudo-observation of each, of mean ỹ_n and precision β_n,

    q(ε) ∝ N(ε; 0, I) Π_n N(ỹ_n; o_n + Ã_nᵀ ε, 1/β_n) = N(m, Λ⁻¹),
    Λ = I + Σ_n β_n Ã_n Ã_nᵀ,        m = Λ⁻¹ Σ_n β_n Ã_n (ỹ_n − o_n).

For Gaussian noise of variance 1/β_n about s_n, ỹ = y makes it the exact posterior of ε. Whatever sums, mixes and plates
a program's statements are made of, they are in Ã.

Functions of a plate, of which each row sees one, are independent of each other given those that rows of several see.
So Λ has the shape of an arrow, whose branches are eliminated one by one: for the member's own ε_j, ``D_j = I + Σ_n β_n
C_n C_nᵀ`` over the rows that see it, of which ``B_j = Σ_n β_n C_n Ã_nᵀ`` and ``h_j = Σ_n β_n C_n (ỹ_n − o_n)``,

    ε_j | ε ~ N(D_j⁻¹ (h_j − B_j ε), D_j⁻¹),        Λ less Σ_j B_jᵀ D_j⁻¹ B_j for the shared ε.

The cost grows linearly with the number of members.

Blocks of a structured q are independent of all else: the best such q has the same mean, and for each of them the
inverse of its own block of Λ, or of that block's diagonal, as its covariance (Opper & Archambeau 2009).

**The best pseudo-observations** at some hyperparameters: let row n's terms of the ELBO have the derivatives α_n in the
mean μ_n and −½ β_n in the variance s_n. Where the ELBO is stationary, q(ε) is the posterior given pseudo-observations
("sites") of precisions β_n, whatever the likelihood and conditional (Opper & Archambeau 2009):

    S_i⁻¹ = I + A_i diag(β) A_iᵀ,        (I + A diag(β) Aᵀ) m = A (α + β μ),    A all blocks stacked.

A step of rate ρ along the natural gradient is one of rate ρ in the sites, β_n and α_n + β_n μ_n (Khan & Lin 2017). So q
has two numbers a row, a step costs what the optimum for Gaussian noise costs, and the means of all blocks are found
together.

**The collapsed bound** for any likelihood is the ELBO at the best q(ε), found by a search for each value of the rest.
The ELBO is stationary in q(ε) there, so that its gradient in all else is the partial derivative at that q: nothing is
differentiated through the search (the envelope theorem). What the search leaves undone lowers the bound by about
:attr:`Found.kl_gap`, which is of second order in how far q is off.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.conditionals import Conditional
from npgp.conditionals.base import Observations
from npgp.likelihoods import Likelihood
from npgp.sparse.projection import Projection
from npgp.sparse.residuals import Residual
from npgp.variational.blocks import BlockNormal, block_normal, whitened_mean
from npgp.variational.parameterizations import covariance_factor


class Rows(NamedTuple):
    """
    Pseudo-observations of rows that are stated together, in S sets of N rows.

    :param shared: what they see of the shared ε, (S, K, N); or (1, K, N) if all sets see the same.
    :param own: what they see of the functions of their member, (S, M, N), or (1, M, N); ``None`` if nothing.
    :param members: the member that each set is of, (S,); ``None`` where set and member are the same.
    :param precision: β, (S, N), 0 of rows that tell nothing.
    :param shift: β (ỹ − o), (S, N).
    """

    shared: jax.Array
    own: jax.Array | None
    members: jax.Array | None
    precision: jax.Array
    shift: jax.Array


class Independent(NamedTuple):
    """
    A block whose q is independent of all else.

    :param start: its first entry among the shared ε, or among a member's.
    :param end: the entry after its last.
    :param kind: ``"dense"``, ``"diagonal"`` or ``"mean-only"``.
    :param functions: how many it is of, among the shared ε, each with a q of its own.
    """

    start: int
    end: int
    kind: str
    functions: int = 1

    def scale(self, Omega: jax.Array) -> jax.Array | None:
        """
        The scale of each function's q, (C, M, M) or (C, M); ``None`` if it moves the mean only.

        :param Omega: Λ − I, (K, K); or (C, M, M) of C members.
        """
        own = Omega[..., self.start : self.end, self.start : self.end]
        if self.kind == "mean-only":
            return None
        if own.ndim == 2:
            C, size = self.functions, own.shape[-1] // self.functions
            own = own.reshape(C, size, C, size)[np.arange(C), :, np.arange(C)]
        return covariance_factor(own) if self.kind == "dense" else 1.0 / jnp.sqrt(1.0 + linalg.diagonal(own))


class StackedNormal(NamedTuple):
    """
    q(ε), as means and rows of a lower-triangular factor: ``ε = mean + factor z`` without the independent blocks, and
    ``ε_j = mean_j + factor_j (z, z_j)``, with z and z_j standard normal.

    :param mean: of the shared ε, (K,), independent blocks among them.
    :param factor: of the others, (J, J).
    :param of_members: of the members, (G, M), independent blocks among them; ``None`` if there are none.
    :param factors: (G, M', J + M') of their others; ``None`` if there are none.
    :param scales: of each independent block, as :meth:`Independent.scale` has it.
    """

    mean: jax.Array
    factor: jax.Array
    of_members: jax.Array | None = None
    factors: jax.Array | None = None
    scales: tuple[jax.Array | None, ...] = ()


def posterior_given(
    rows: Sequence[Rows],
    members: int = 0,
    independent: Sequence[Independent] = (),
    independent_own: Sequence[Independent] = (),
) -> StackedNormal:
    """
    The posterior of ε, given pseudo-observations, or the best q(ε) of which some blocks are independent.

    :param rows: these, of which each has the same K and M.
    :param members: G, the number of members, 0 if there are no functions in a plate beside the shared ones.
    :param independent: blocks of the shared ε.
    :param independent_own: blocks of each member's.
    """
    A, precision, shift = (jnp.concatenate(arrays, axis=-1) for arrays in zip(*map(_as_one_set, rows), strict=True))
    Lambda, h = linalg.matmul(A * precision, A.T), linalg.matmul(A, shift[:, None])[:, 0]
    arrow: tuple[jax.Array, ...] = (Lambda, h)
    if members:
        seen = [(r.own, r) for r in _together(r for r in rows if r.own is not None) if r.own is not None]
        D = _total(_of_members(_weighted(own, r.precision), own, r.members, members) for own, r in seen)
        B = _total(_of_members(_weighted(own, r.precision), r.shared, r.members, members) for own, r in seen)
        h_own = _total(_of_members(_weighted(own, r.shift), None, r.members, members) for own, r in seen)
        arrow = (Lambda, h, D, B, h_own)
    found = _solved(*arrow)
    if independent or independent_own:
        i = _without(independent, h.shape[0])
        rest: tuple[jax.Array, ...] = (Lambda[i[:, None], i], h[i])
        if members:
            j = _without(independent_own, D.shape[-1])
            rest = (*rest, D[:, j[:, None], j], B[:, j[:, None], i], h_own[:, j])
        of_others = _solved(*rest)
        found = found._replace(factor=of_others.factor, factors=of_others.factors)
    scales = [block.scale(Lambda) for block in independent] + [block.scale(D) for block in independent_own]
    return found._replace(scales=tuple(scales))


def _without(independent: Sequence[Independent], size: int) -> np.ndarray:
    """The entries of no independent block."""
    alone = {i for block in independent for i in range(block.start, block.end)}
    return np.array([i for i in range(size) if i not in alone], int)


def _solved(
    Lambda: jax.Array,
    h: jax.Array,
    D: jax.Array | None = None,
    B: jax.Array | None = None,
    h_own: jax.Array | None = None,
) -> StackedNormal:
    """The posterior of the precision I + Λ and the natural mean h, with the arrow's branches D, B and h_j if given."""
    if D is None or B is None or h_own is None or not D.shape[-1]:
        return StackedNormal(*_mean_and_factor(Lambda, h))
    own = covariance_factor(D)
    transposed = jnp.swapaxes(own, -1, -2)
    V, v = linalg.matmul(transposed, B), linalg.matmul(transposed, h_own[..., None])[..., 0]
    said = V.reshape(v.size, V.shape[-1])
    h = h - linalg.matmul(v.reshape(1, -1), said)[0]
    mean, factor = _mean_and_factor(Lambda - linalg.gram(said.T), h)
    left = v - linalg.matmul(V, mean[:, None])[..., 0]
    means = linalg.matmul(own, left[..., None])[..., 0]
    across = -linalg.matmul(own, linalg.matmul(V, factor))
    return StackedNormal(mean, factor, means, jnp.concatenate([across, own], axis=-1))


def _total(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


def _mean_and_factor(Omega: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean ``(I + Ω)⁻¹ h``, and the factor of ``(I + Ω)⁻¹``."""
    if not h.shape[-1]:
        return h, Omega
    T = covariance_factor(Omega)
    return linalg.matmul(T, linalg.matmul(T.T, h[:, None]))[:, 0], T


def _weighted(A: jax.Array, weights: jax.Array) -> jax.Array:
    return A * weights[:, None, :]


def _together(rows: Iterable[Rows]) -> list[Rows]:
    """Sets that are stated one by one, of as many rows, side by side."""
    alike: dict[tuple[int, int], list[Rows]] = {}
    for i, r in enumerate(rows):
        one_by_one = len(r.precision) == 1 and r.members is not None
        alike.setdefault((r.precision.shape[-1], -1 if one_by_one else i), []).append(r)
    return [jax.tree.map(lambda *sets: jnp.concatenate(sets), *several) for several in alike.values()]


def _as_one_set(rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What all sets see of the shared ε, (K, N'); their precisions and shifts, (N',)."""
    A, precision, shift = rows.shared, rows.precision, rows.shift
    if len(A) == 1:  # the same for all sets
        precision, shift = jnp.sum(precision, axis=0), jnp.sum(shift, axis=0)
    return jnp.moveaxis(A, 1, 0).reshape(A.shape[1], precision.size), precision.ravel(), shift.ravel()


def _of_members(A: jax.Array, B: jax.Array | None, members: jax.Array | None, count: int) -> jax.Array:
    """``Σ_n A_sn B_snᵀ``, or ``Σ_n A_sn``, of each member: the sum over its sets."""
    sums = jnp.sum(A, axis=-1) if B is None else linalg.matmul(A, jnp.swapaxes(B, -1, -2))
    return sums if members is None else jax.ops.segment_sum(sums, members, count)


#: Times that a step is halved before the search ends.
MAX_HALVINGS = 12
#: Least rate that a step tries first.
LEAST_RATE = 1.0 / 16.0
#: Fall of the ELBO that may be rounding, relative to it and the dtype's resolution.
ROUNDING = 100.0
#: Where the ELBO's rise may be rounding, the search ends unless a step is by so much shorter than the one before.
SHORTER = 0.9

#: Newton steps to a row's mode, each of a standard deviation at most. They need not arrive.
MODE_ITERATIONS = 30
#: Rate of steps to a row's best Gaussian.
ROW_RATE = 0.5
#: Least precision of a pseudo-observation, relative to what is known of f there.
MIN_CURVATURE = 1e-3

#: Mean and scale of a block: L (..., M, M), or standard deviations (..., M).
Scaled = tuple[jax.Array, jax.Array]
#: The sum of all rows' terms of the ELBO, given their means and variances from ε, (..., N).
Expected = Callable[[jax.Array, jax.Array], jax.Array]


class Sites(NamedTuple):
    """
    Pseudo-observations of the rows' latent values, which make q(ε): what ``CollapsedGP.sites`` returns.

    .. code-block:: python

        sites = npgp.CollapsedGP(kernel, X, Z, npgp.Bernoulli()).sites(y > 0.0)
        assert sites.precision.shape == sites.shift.shape == (len(X),)

    :param precision: β_n, (..., N); below 0 where the likelihood curves upward.
    :param shift: β_n times the response, (..., N).
    """

    precision: jax.Array
    shift: jax.Array

    def moved_by(self, offset: jax.Array | float) -> Sites:
        """Sites of f + offset, from those of f."""
        return Sites(self.precision, self.shift + self.precision * offset)

    def towards(self, other: Sites, rate: jax.Array) -> Sites:
        """Part of the way to other sites."""
        return jax.tree.map(lambda a, b: a + rate * (b - a), self, other)


class Found(NamedTuple):
    """
    The end of a search.

    :param q: mean and scale of each block.
    :param cross_covariances: S_i A_i of each block, (..., M, N); ``None`` if it is mean-only.
    :param kl: KL[q(ε) ‖ p(ε)], (...).
    :param sites: where a further step would lead.
    :param kl_gap: nats by which a further step would move q(ε), to second order: about what the ELBO may still lack.
    """

    q: tuple[Scaled, ...]
    cross_covariances: tuple[jax.Array | None, ...]
    kl: jax.Array
    sites: Sites
    kl_gap: jax.Array


class _Solved(NamedTuple):
    means: jax.Array  # of all blocks, stacked
    factors: tuple[Any, ...]  # of each S_i⁻¹, (..., M, M), or its diagonal's root (..., M); None if it is mean-only


class Stationary(NamedTuple):
    """
    Where a search is.

    :param sites: the sites.
    :param target: where a whole step leads.
    :param solved: the posterior that the sites give.
    :param mean: its means of rows.
    :param variance: their variances.
    :param kl: its KL divergence from the prior, (...).
    :param elbo: the ELBO, of all together.
    """

    sites: Sites
    target: Sites
    solved: Any
    mean: jax.Array
    variance: jax.Array
    kl: jax.Array
    elbo: jax.Array


def search(
    A: Sequence[jax.Array],
    kinds: Sequence[str],
    expected: Expected,
    init_sites: Sites,
    max_steps: int,
    tolerance: float,
) -> Found:
    """
    :func:`search_sites` for the best q(ε).

    :param A: the blocks' projections, (..., M_i, N).
    :param kinds: ``"dense"``, ``"diagonal"`` or ``"mean-only"`` for each block.
    """

    def solve(sites: Sites) -> tuple[_Solved, tuple[jax.Array, jax.Array, jax.Array]]:
        solved = _solve(A, kinds, sites)
        return solved, _moments(A, kinds, sites, solved)

    state, kl_gap = search_sites(solve, expected, init_sites, max_steps, tolerance)
    q, cross_covariances = _blocks(A, kinds, state.solved), _cross_covariances(A, kinds, state.solved)
    return Found(q, cross_covariances, state.kl, state.target, kl_gap)


def search_sites(
    solve: Callable[[Sites], tuple[Any, tuple[jax.Array, jax.Array, jax.Array]]],
    expected: Expected,
    init_sites: Sites,
    max_steps: int,
    tolerance: float,
    *,
    slack: float | None = None,
    least: ArrayLike = -jnp.inf,
) -> tuple[Stationary, jax.Array]:
    """
    Go from given sites to the best ones, by steps that never lower the ELBO.

    The first step has the rate 1, at which it ends for Gaussian noise, and the others what the step before suggests, at
    most 1; each is halved until it does not lower the ELBO. The search does not begin at the prior: from where the data
    are far from what that expects, natural gradients lead astray. It goes there if the ELBO cannot be computed at the
    given sites.

    :param solve: from sites, the posterior that they give; its means and variances of rows, (..., N), and its KL
        divergence from the prior, (...).
    :param expected: the rows' terms of the ELBO, summed.
    :param init_sites: sites (..., N) to begin with, as :func:`working_sites` finds them.
    :param max_steps: most steps.
    :param tolerance: ends when a step would move the posterior by no more nats than this.
    :param slack: a step may lower the ELBO by so much, relative to it; what may be rounding if omitted.
    :param least: least precision of a site.
    :return: its end, and the nats by which a further step would move the posterior.
    """
    value_and_slopes = jax.value_and_grad(expected, argnums=(0, 1))

    def at(sites: Sites) -> Stationary:
        solved, (mean, variance, kl) = solve(sites)
        value, (slope, by_variance) = value_and_slopes(mean, variance)
        precision = jnp.maximum(-2.0 * by_variance, least)
        return Stationary(
            sites, Sites(precision, slope + precision * mean), solved, mean, variance, kl, value - jnp.sum(kl)
        )

    def step(carry):
        count, state, rate, before = carry
        first = count == 0  # to the given sites, from nowhere: here, so that the ELBO is in the program once
        fall = (ROUNDING * jnp.finfo(state.elbo.dtype).eps if slack is None else slack) * jnp.abs(state.elbo)

        def halve(tried):
            halvings, rate, new, _ = tried
            new = at(state.sites.towards(state.target, rate))
            # Where the ELBO cannot be computed at the start, any at which it can be is better.
            ok = jnp.isfinite(new.elbo) & ~(new.elbo < state.elbo - fall)
            return halvings + 1, 0.5 * rate, new, first | ok

        def again(tried):
            return (tried[0] <= MAX_HALVINGS) & ~tried[3]

        _, half, new, ok = lax.while_loop(again, halve, (0, rate, state, jnp.asarray(False)))
        taken = 2.0 * half
        kl_gap = jnp.where(first, jnp.inf, _length(state, new) / taken**2)
        rate = jnp.where(first, 1.0, _next_rate(state, new, taken))
        computed = jnp.isfinite(new.elbo)
        new = new._replace(target=jax.tree.map(lambda x: jnp.where(first & ~computed, 0.0, x), new.target))
        # The ELBO no longer increases beyond rounding: slopes of a quadrature are not exactly its values'.
        stalled = ~first & (new.elbo <= state.elbo + fall) & (kl_gap >= SHORTER * before)
        state = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, state)
        return jnp.where(ok & ~stalled, count + 1, max_steps + 1), state, rate, kl_gap

    def unfinished(carry):
        return (carry[0] <= max_steps) & ~(carry[3] <= tolerance)

    one = jnp.ones((), init_sites.shift.dtype)
    nowhere = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(at, init_sites))
    nowhere = nowhere._replace(target=init_sites, elbo=-jnp.inf * one)
    _, state, _, kl_gap = lax.while_loop(unfinished, step, (0, nowhere, one, jnp.inf * one))
    return state, kl_gap


def working_sites(likelihood: Likelihood, y: jax.Array, mean: jax.Array, variance: jax.Array, offset) -> Sites:
    """
    Sites by Laplace's method, row by row, at the mode of ``p(y_n | f) N(f; mean, variance)``; of f less the offset.

    As in iteratively reweighted least squares.

    :param likelihood: of one latent value.
    :param y: observations, (..., N).
    :param mean: what is expected of f, (..., N).
    :param variance: its variance, (..., N).
    :param offset: what q(ε) is not to explain of f, (..., N).
    """

    def slopes(f):
        def slope(f):
            return jax.jvp(lambda f: likelihood.log_prob(f, y), (f,), (jnp.ones_like(f),))[1]

        value, change = jax.jvp(slope, (f,), (jnp.ones_like(f),))
        return value, jnp.maximum(-change, MIN_CURVATURE / variance)

    def newton(_, f):
        slope, curvature = slopes(f)
        step = (slope - (f - mean) / variance) / (curvature + 1.0 / variance)
        return f + jnp.clip(step, -jnp.sqrt(variance), jnp.sqrt(variance))

    f = lax.fori_loop(0, MODE_ITERATIONS, newton, mean)
    slope, curvature = slopes(f)
    return Sites(curvature, slope + curvature * f).moved_by(-offset)


def expected_sites(likelihood: Likelihood, y: jax.Array, mean: jax.Array, variance: jax.Array) -> Sites:
    """
    Sites row by row, for likelihoods of several latent values: those of the best Gaussian for each row by itself, in
    which its latent values are independent. The mode of ``p(y_n | f)`` in several values may be nowhere near it: that
    of a mean and a noise is at no noise.

    :param likelihood: of C latent values.
    :param y: observations, (..., N).
    :param mean: what is expected of f, (C, ..., N).
    :param variance: its variance, (C, ..., N).
    """
    slopes = jax.grad(lambda m, v: jnp.sum(likelihood.expected_log_prob(y, m, v)), argnums=(0, 1))

    def step(_, sites):
        v = 1.0 / (1.0 / variance + sites.precision)
        m = v * (mean / variance + sites.shift)
        slope, by_variance = slopes(m, v)
        precision = jnp.maximum(-2.0 * by_variance, MIN_CURVATURE / variance)
        return sites.towards(Sites(precision, slope + precision * m), jnp.asarray(ROW_RATE))

    # At first as good as known: far out log p may overflow.
    first = Sites(1e2 / variance, 1e2 * mean / variance)
    return lax.fori_loop(0, MODE_ITERATIONS, step, first)


def _next_rate(old: Stationary, new: Stationary, taken: jax.Array) -> jax.Array:
    """
    The rate at which the last step, in its own direction, would have reached its target (Barzilai & Borwein 1988).

    Where rows are far from Gaussian, or an observation has several latent values, steps of rate 1 can go to and fro.
    """

    def left(state: Stationary) -> tuple[jax.Array, jax.Array]:
        precision = state.target.precision - state.sites.precision
        return state.target.shift - state.sites.shift - precision * state.mean, precision

    (a, b), (c, d) = left(old), left(new)
    s = old.variance  # the metric of one row's Gaussian
    before, after = (jnp.sum(s * a * x + 0.5 * jnp.square(s) * b * y) for x, y in ((a, b), (c, d)))
    rate = taken * before / jnp.where(after < before, before - after, before)
    return jnp.where(after < before, jnp.clip(rate, LEAST_RATE, 1.0), 1.0)


def _length(old: Stationary, new: Stationary) -> jax.Array:
    """
    The KL divergence between two q(ε), to second order: half of its two directions' sum.

    In an exponential family that sum is the product of the changes in natural and in expectation parameters.
    """
    (precision, shift), (mean, variance) = old.sites, (old.mean, old.variance)
    change = new.variance - variance + (new.mean - mean) * (new.mean + mean)
    total = (new.sites.shift - shift) * (new.mean - mean) - 0.5 * (new.sites.precision - precision) * change
    return 0.5 * jnp.abs(jnp.sum(total))


def _solve(A: Sequence[jax.Array], kinds: Sequence[str], sites: Sites) -> _Solved:
    """The q(ε) that sites give; NaN where they give none: without jitter, which would make it another."""
    stacked = jnp.concatenate(A, axis=-2)
    weighted = stacked * sites.precision[..., None, :]
    B = linalg.matmul(weighted, jnp.swapaxes(stacked, -1, -2)) + jnp.eye(stacked.shape[-2], dtype=stacked.dtype)
    L = linalg.plain_cholesky(B)
    right = linalg.matmul(stacked, sites.shift[..., None])
    means = linalg.solve_lower(L, linalg.solve_lower(L, right), transpose=True)[..., 0]
    factors: list[jax.Array | None] = []
    first = 0
    for A_i, kind in zip(A, kinds, strict=True):
        end = first + A_i.shape[-2]
        if kind == "diagonal":
            factors.append(jnp.sqrt(linalg.diagonal(B)[..., first:end]))
        elif kind == "dense" and first == 0:
            factors.append(L[..., :end, :end])
        elif kind == "dense":
            factors.append(linalg.plain_cholesky(B[..., first:end, first:end]))
        else:
            factors.append(None)
        first = end
    return _Solved(means, tuple(factors))


def _moments(
    A: Sequence[jax.Array], kinds: Sequence[str], sites: Sites, solved: _Solved
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean and variance that ε gives the rows, and KL[q(ε) ‖ p(ε)]."""
    means, factors = solved
    mean = linalg.matmul(means[..., None, :], jnp.concatenate(A, axis=-2))[..., 0, :]
    variance = jnp.zeros_like(mean)
    kl = 0.5 * jnp.sum(jnp.square(means), axis=-1)
    for A_i, factor, kind in zip(A, factors, kinds, strict=True):
        if kind == "dense":
            part = jnp.sum(jnp.square(linalg.solve_lower(factor, _like(factor, A_i))), axis=-2)
            variance = variance + part
            # tr S − M = −Σ β_n s_n, for S⁻¹ = I + A diag(β) Aᵀ
            kl = kl + 0.5 * (linalg.log_determinant(factor) - jnp.sum(sites.precision * part, axis=-1))
        elif kind == "diagonal":
            variance = variance + linalg.matmul((1.0 / jnp.square(factor))[..., None, :], jnp.square(A_i))[..., 0, :]
            kl = kl + 0.5 * jnp.sum(1.0 / jnp.square(factor) - 1.0 + 2.0 * jnp.log(factor), axis=-1)
    return mean, variance, kl


def _blocks(A: Sequence[jax.Array], kinds: Sequence[str], solved: _Solved) -> tuple[Scaled, ...]:
    """Mean and scale of each block; the scale of a mean-only block is 1, (M,)."""
    means, factors = solved
    blocks, first = [], 0
    for A_i, factor, kind in zip(A, factors, kinds, strict=True):
        mean = means[..., first : first + A_i.shape[-2]]
        first += A_i.shape[-2]
        if kind == "dense":
            blocks.append((mean, linalg.inverse_factor(factor)))
        else:
            blocks.append((mean, jnp.ones_like(mean) if factor is None else 1.0 / factor))
    return tuple(blocks)


def _cross_covariances(A: Sequence[jax.Array], kinds: Sequence[str], solved: _Solved) -> tuple[jax.Array | None, ...]:
    """S_i A_i of each block."""
    found: list[jax.Array | None] = []
    for A_i, factor, kind in zip(A, solved.factors, kinds, strict=True):
        if kind == "dense":
            half = linalg.solve_lower(factor, _like(factor, A_i))
            found.append(linalg.solve_lower(factor, half, transpose=True))
        else:
            found.append(None if factor is None else A_i / jnp.square(factor)[..., None])
    return tuple(found)


def _like(factor: jax.Array, A: jax.Array) -> jax.Array:
    """The projection, once for each factor of a batch."""
    return jnp.broadcast_to(A, factor.shape[:-2] + A.shape[-2:])


#: Most steps of the search; five to ten are usual from the start that it has, three to five from sites found before.
MAX_STEPS = 50
#: It ends when a step has moved q(ε) by no more nats than this. Each moves it by a tenth of the one before or less, so
#: that much less is left; the bound is off by that, but its gradient by as much as the root of it.
#: In float32 the bound itself is off by about 1e-7 of its own size, and its gradient by as much of its terms.
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


#: Warn if a further step of the search would move the posterior by more nats than this.
WARN_KL_GAP = 1e-2


def warn_unless_arrived(kl_gap: jax.Array, sentence: str) -> None:
    """
    Warn, of the caller's caller, where a search has not arrived, and that can be seen.

    :param kl_gap: nats by which a further step would move the posterior.
    :param sentence: what to say, with ``{gap}`` for these.
    """
    if not checks.is_traced(kl_gap) and not float(kl_gap) < WARN_KL_GAP:
        warnings.warn(sentence.format(gap=f"{float(kl_gap):.2g} nats"), RuntimeWarning, stacklevel=3)


class Searched(NamedTuple):
    """
    The bound, and what it was reached with.

    :param bound: the ELBO, one for each output: (...).
    :param q: the best q(ε), a constant for derivatives.
    :param sites: the pseudo-observations that make it, of f less the offset.
    :param kl_gap: nats by which one more step of the search would move q(ε), all outputs together.
    """

    bound: jax.Array
    q: tuple[BlockNormal, ...]
    sites: Sites
    kl_gap: jax.Array


def searched_bound(
    projection: Projection,
    residual: Residual,
    rows: Observations,
    covariances: Sequence[str],
    conditional: Conditional,
    *,
    start: Sites | None = None,
    max_steps: int = MAX_STEPS,
    tolerance: float | None = None,
) -> Searched:
    """
    The ELBO at the best q(ε), with the gradient that is right there.

    :param projection: of the training inputs.
    :param residual: what the blocks with a learned covariance leave at the training inputs.
    :param rows: what is observed of them.
    :param covariances: ``"dense"``, ``"diagonal"`` or ``"mean-only"`` for each block.
    :param conditional: what q does to the residual; one without a parameter to learn.
    :param start: sites of f less the offset to begin with, as a search nearby has found them.
    :param max_steps: most steps of the search.
    :param tolerance: nats at which it ends; :data:`TOLERANCE` if ``None``.
    """
    if tolerance is None:
        tolerance = TOLERANCE[projection.prior_variance.dtype.name]
    arguments = lax.stop_gradient((projection, residual, rows, conditional, start))
    found = lax.stop_gradient(_best(*arguments, tuple(covariances), max_steps, tolerance))
    q = tuple(block_normal(kind, *values) for kind, values in zip(covariances, found.q, strict=True))
    mean, variance = (
        whitened_mean(projection, [block.loc for block in q]),
        _variance(projection, found.cross_covariances),
    )
    kl = found.kl if rows.likelihood.num_latents == 1 else jnp.sum(found.kl, axis=0)
    terms = rows.elbo(conditional, mean, variance, residual)
    return Searched(jnp.sum(terms, axis=-1) - kl, q, found.sites, found.kl_gap)


def _best(projection, residual, rows: Observations, conditional, start, covariances, max_steps, tolerance) -> Found:
    def expected(mean: jax.Array, variance: jax.Array) -> jax.Array:
        return jnp.sum(rows.elbo(conditional, mean, variance, residual))

    init_sites = _first_sites(projection, rows, expected) if start is None else start
    init_sites = jax.tree.map(partial(jnp.broadcast_to, shape=rows.shape), init_sites)
    return search(projection.A, covariances, expected, init_sites, max_steps, tolerance)


def _variance(projection: Projection, cross_covariances: Sequence[jax.Array | None]) -> jax.Array:
    """
    The variance a_nᵀ S a_n that ε gives row n, with its first derivative 2 (S a_n)ᵀ da_n.

    From S A, which is at hand: half the work of the variance and its gradient from a factor of S.
    """
    total = jnp.zeros((), projection.prior_variance.dtype)
    for A, SA in zip(projection.A, cross_covariances, strict=True):
        if SA is not None:
            inner = jnp.sum(A * SA, axis=-2)
            total = total + 2.0 * inner - lax.stop_gradient(inner)
    return total


def _first_sites(projection: Projection, rows: Observations, expected: Expected) -> Sites:
    """Initial sites without a warm start."""
    zero = jnp.zeros(rows.shape, projection.prior_variance.dtype)
    if rows.likelihood.num_latents > 1 or len(rows.likelihood.parts) > 1:
        slope, by_variance = jax.grad(expected, argnums=(0, 1))(zero, zero)
        return Sites(-2.0 * by_variance, slope)
    prior = jnp.broadcast_to(projection.prior_variance, rows.shape)
    sites = working_sites(rows.likelihood, rows.y, zero + rows.offset, prior, rows.offset)
    sites = Sites(*map(rows.where_present, sites))
    if rows.weights is not None:
        sites = Sites(*(rows.weights * value for value in sites))
    return sites
