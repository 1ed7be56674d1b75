"""
New rows of a trained GPLVM: where in latent space they lie, and what their missing entries are.

Given x*, the D functions are independent under q, so what the model says of a new row is

    p(y* | x*) = Π_d ∫ p(y*_d | f) N(f; m_d(x*), v_d(x*)) df,    x* ~ p(x),

the product over the entries that are present. ``q(x*)`` is the Gaussian that maximizes a lower bound on the log
predictive density,

    log p(y*) ≥ E_{q(x*)}[log p(y* | x*)] − KL[q(x*) ‖ p(x*)].

Training has ``E_{q(f)}[log p(y_d | f)]``, with the conditional's term, where this has the log of an average, because
there q(f) is still to be chosen. Here it is not, and f is integrated out exactly. By Jensen's inequality that is higher
than the expectation: for Gaussian noise by ``½ (v_d/σ² − log(1 + v_d/σ²))`` or more for each entry, which would draw
new rows away from where the functions are uncertain; and it is higher than with the ``tight`` conditional, too.

Rows are independent problems, solved side by side in one program. Expectations under q(x*) are sums over fixed nodes,
so that each problem is deterministic and quasi-Newton steps end at an optimum. There may be several, more so the fewer
entries are present: each row starts from many places, and predictions mix the optima that were found.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.typing import ArrayLike

from npgp import checks
from npgp.chunks import map_chunks
from npgp.conditionals.base import require_possible
from npgp.gplvm.latent_search import Modes, Problem, affordable, find_modes, normal_rule, spread
from npgp.likelihoods import Likelihood, as_likelihood
from npgp.likelihoods.base import without_missing
from npgp.predictions import mixture_moments
from npgp.pytrees import pytree
from npgp.variational.posterior import Posterior

__all__ = ["Modes", "NewRows", "infer_latents"]


# ---------------------------------------------------------------------------------------------------------------
# The result


@pytree
class NewRows:
    """
    ``q(x*)`` of some rows, and what it says of their data; made by :func:`infer_latents`, or of an encoder's output::

        npgp.gplvm.NewRows(loc, scale).predict(posterior, likelihood)

    Where there are modes, data are predicted by their mixture; ``NewRows(rows.loc, rows.scale)`` has the best alone.

    .. code-block:: python

        rows = npgp.gplvm.NewRows(jnp.zeros((3, 1)), jnp.full((3, 1), 0.1))
        assert rows.loc.shape == (3, 1)  # rows.predict(posterior) has their data

    :param loc: means, batch + (Q,): (B, Q), or (Q,) for one row.
    :param scale: standard deviations, batch + (Q,), or lower Cholesky factors of covariances, batch + (Q, Q).
    :param elbo: the bound on the log predictive density of the entries present, in nats; batch.
    :param modes: all optima that were found, of which ``loc`` and ``scale`` are the best.
    :raises ValueError: for a scale of another shape.
    """

    loc: jax.Array
    scale: jax.Array
    elbo: jax.Array | None = None
    modes: Modes | None = None

    def __post_init__(self):
        shape = jnp.shape(self.loc)
        if not shape or jnp.shape(self.scale) not in (shape, (*shape, shape[-1])):
            raise ValueError(
                f"scale has shape {jnp.shape(self.scale)}; with loc of shape {shape} it must be that, for standard "
                "deviations, or with Q once more, for Cholesky factors."
            )

    def predict(
        self,
        posterior: Posterior,
        likelihood: Likelihood | Callable[..., dist.Distribution] | None = None,
        *,
        offset: ArrayLike = 0.0,
        num_nodes: int = 256,
    ) -> tuple[jax.Array, jax.Array]:
        """
        Mean and variance of the rows' data, with x* and f integrated out.

        :param posterior: of the D functions.
        :param likelihood: as for :func:`infer_latents`. If omitted, the moments are those of f plus the offset: for
            Gaussian noise, of the data without it.
        :param offset: as for :func:`infer_latents`.
        :param num_nodes: nodes for the expectation under each mode of q(x*), at least.
        :return: each batch + (D,).
        """
        offset = _offset(offset, (*jnp.shape(self.loc)[:-1], _columns(posterior)))
        num_nodes = checks.whole_number(num_nodes, "num_nodes")
        return _predict(self._mixture(), posterior, _one_latent(likelihood), offset, num_nodes)

    def sample(
        self,
        rng_key: jax.Array,
        posterior: Posterior,
        likelihood: Likelihood | Callable[..., dist.Distribution] | None = None,
        *,
        sample_shape: tuple[int, ...] = (),
        offset: ArrayLike = 0.0,
    ) -> jax.Array:
        """
        Draws of the rows' data, of all columns jointly: x* from q(x*), then f and y. Rows are independent.

        :param rng_key: a JAX random key.
        :param sample_shape: of the draws.
        :return: sample_shape + batch + (D,). Other arguments as for :meth:`predict`.
        """
        offset = _offset(offset, (*jnp.shape(self.loc)[:-1], _columns(posterior)))
        return _sample(rng_key, self._mixture(), posterior, _one_latent(likelihood), offset, tuple(sample_shape))

    def impute(
        self,
        posterior: Posterior,
        likelihood: Likelihood | Callable[..., dist.Distribution],
        Y: ArrayLike,
        *,
        mask: ArrayLike | str,
        offset: ArrayLike = 0.0,
        num_nodes: int = 256,
    ) -> tuple[jax.Array, jax.Array]:
        """
        The rows' data, with predictive means where an entry is missing; and the standard deviations of all entries,
        which are 0 where they are present.

        :param Y: the rows' data, batch + (D,).
        :param mask: True where an entry of Y is present, of Y's shape. Or ``"nan"``:
            those that are NaN are missing.
        :return: each batch + (D,). Other arguments as for :meth:`predict`.
        :raises ValueError: for Y or mask of another shape.
        """
        mean, variance = self.predict(posterior, likelihood, offset=offset, num_nodes=num_nodes)
        Y, present = checks.observed(Y, mean.shape, checks.mask_of(mask, of=Y), name="Y")
        assert present is not None
        return jnp.where(present, jnp.asarray(Y, mean.dtype), mean), jnp.where(present, 0.0, jnp.sqrt(variance))

    def _mixture(self) -> Modes:
        if self.modes is not None:
            return self.modes
        loc, scale = jnp.asarray(self.loc)[None], jnp.asarray(self.scale)[None]
        one = jnp.ones(loc.shape[:-1], loc.dtype)
        return Modes(loc, scale, one, one)


# ---------------------------------------------------------------------------------------------------------------
# Inference


def infer_latents(
    posterior: Posterior,
    likelihood: Likelihood | Callable[..., dist.Distribution],
    Y: ArrayLike,
    *,
    mask: ArrayLike | str | None = None,
    offset: ArrayLike = 0.0,
    prior: dist.Distribution | None = None,
    candidates: ArrayLike | None = None,
    start: ArrayLike | None = None,
    num_starts: int = 32,
    num_modes: int = 8,
    full: bool = True,
    num_nodes: int = 32,
    num_steps: int = 500,
    tolerance: float = 1e-4,
) -> NewRows:
    """
    ``q(x*)`` of new rows, complete or not, with the model as it is::

        posterior, likelihood = gplvm.posterior(params), gplvm.likelihood_at(params)
        model = dict(mask=present, offset=gplvm.start.offset)
        rows = npgp.gplvm.infer_latents(
            posterior, likelihood, Y, candidates=params["x.loc"], **model
        )
        filled, deviation = rows.impute(posterior, likelihood, Y, **model)

    Each row starts from the mean of the prior, from ``start``, and from those candidates at which the entries present
    are most probable, no two of which predict nearly the same data. From each it first goes to the nearest maximum of
    ``p(y*, x*)``, and around the maxima of the largest mass q(x*) is found. Nothing is drawn: the same arguments give
    the same result, and a row's does not depend on the others'. A row without any entry has its prior.

    :param posterior: of the D functions, of batch shape (D,).
    :param likelihood: p(y | f) for f of shape (D, rows), of one latent value. Its parameters are shared or one per
        column, (D, 1); :class:`npgp.likelihoods.Columns` for columns of several kinds.
    :param Y: the rows, (B, D), or (D,) for one.
    :param mask: True where an entry of Y is present, of Y's shape; the others may be NaN. Or ``"nan"``:
        those that are NaN are missing.
    :param offset: what is added to f, broadcasting to Y's shape: the offset of the columns, (D,).
    :param prior: p(x*), a NumPyro distribution over vectors (Q,) with one for all rows or a batch (B,) of them, such as
        ``dist.Normal(means, scales).to_event(1)``; N(0, I) if omitted.
    :param candidates: points where rows may lie, (C, Q), such as the latent means of the training rows; the inducing
        points if omitted.
    :param start: a further place to start from, (Q,) or one for each row (B, Q).
    :param num_starts: number of candidates to start from, for each row.
    :param num_modes: most optima of q(x*) that are looked for, for each row.
    :param full: whether q(x*) has a full covariance; independent coordinates if not. These are too narrow where entries
        are missing: what is present then determines some directions of x* far better than others.
    :param num_nodes: nodes for the expectation under q(x*), at least: pairs of opposite nodes along random axes, exact
        for cubics.
    :param num_steps: most evaluations of the bound, and of ``p(y*, x*)`` before.
    :param tolerance: a search ends when another step would gain less, in nats.
    :raises ValueError: for data of another shape, outside the likelihood's support, or NaN without mask; for points or
        a prior of another dimension; and for a likelihood of several latent values.
    :raises FloatingPointError: if the bound of some row is finite nowhere.

    With a row that is not done after ``num_steps`` steps, a ``RuntimeWarning`` says so; not inside ``jit``.

    Source: Titsias & Lawrence 2010, who adapt q(f) to the new rows as well; the nodes are those of a spherical-radial
    rule (Genz & Monahan 1998).
    """
    checked = _one_latent(likelihood)
    y, present = _check_data(Y, mask, checked, _columns(posterior), posterior.projector.cholesky[0].dtype)
    shape, dtype = jnp.shape(Y), y.dtype
    origins = _check_origins(posterior, candidates, start, prior, y.shape[1], dtype)
    counts = (("num_modes", num_modes), ("num_nodes", num_nodes), ("num_steps", num_steps))
    num_starts = checks.whole_number(num_starts, "num_starts", least=0)
    num_modes, num_nodes, num_steps = (checks.whole_number(value, name) for name, value in counts)
    checks.require_positive(tolerance, "tolerance")
    offset = jnp.broadcast_to(_offset(offset, shape), y.shape[::-1]).T.astype(dtype)
    candidates, start, prior = origins
    problem = Problem(posterior, checked, prior, y, offset, present)
    numbers = num_starts, num_modes, bool(full), num_nodes, num_steps
    modes, done = find_modes(problem, candidates, start, jnp.asarray(tolerance, dtype), *numbers)
    if len(shape) == 1:
        modes = jax.tree.map(lambda array: array[:, 0], modes)
    loc, scale, elbo, _ = (array[0] for array in modes)
    if not checks.is_traced(elbo):
        _check_result(elbo, done, num_steps)
    return NewRows(loc, scale, elbo, modes)


def _one_latent(likelihood: Any) -> Any:
    if likelihood is None:
        return None
    likelihood = as_likelihood(likelihood)
    if likelihood.num_latents != 1:
        raise ValueError(
            f"likelihood is {type(likelihood).__name__}, of {likelihood.num_latents} latent values per observation; it "
            "must be of one, as each column of a GPLVM has one function."
        )
    return likelihood


def _columns(posterior: Posterior) -> int:
    shape = posterior.batch_shape
    if len(shape) != 1:
        raise ValueError(f"posterior is of functions of batch shape {shape}; it must be (D,), one for each column.")
    return shape[0]


def _offset(offset: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    checks.require_broadcast(offset, shape, "offset", of="the data")
    checks.require_finite(offset, "offset")
    return jnp.broadcast_to(jnp.asarray(offset), shape)


def _check_data(Y, mask, likelihood: Likelihood, columns: int, dtype) -> tuple[jax.Array, jax.Array]:
    """Data, with a possible value where an entry is missing, and which are present; each (D, B)."""
    Y, mask = checks.observed(Y, (..., columns), mask, name="Y")
    if Y.ndim > 2 or not Y.size:
        raise ValueError(f"Y has shape {Y.shape}; it must be (rows, {columns}), or ({columns},) for one row.")
    present = jnp.ones(Y.shape, bool) if mask is None else mask
    y, present = ((jnp if checks.is_traced(x) else np).atleast_2d(x).T for x in (Y, present))
    require_possible(likelihood, y, present)
    present = jnp.asarray(present)
    return without_missing(likelihood, present, jnp.asarray(y, dtype))[0], present


def _check_origins(
    posterior: Posterior, candidates, start, prior, rows: int, dtype
) -> tuple[jax.Array, jax.Array | None, dist.Distribution]:
    """Candidates (C, Q), the row's own start (B, Q), and the prior."""
    first = posterior.projector.blocks[0]
    inducing = getattr(first, "inputs", None)
    if candidates is not None:
        candidates = checks.inputs(candidates, "candidates")
    if prior is not None and (not isinstance(prior, dist.Distribution) or len(prior.event_shape) != 1):
        raise ValueError(f"prior is {prior!r:.80}; it must be a NumPyro distribution over vectors, one for each row.")
    found = {
        "the inducing points": None if inducing is None else inducing.shape[1],
        "candidates": None if candidates is None else candidates.shape[1],
        "start": None if start is None else jnp.shape(start)[-1:],
        "prior": None if prior is None else prior.event_shape,
    }
    sizes = {name: int(np.prod(size)) for name, size in found.items() if size is not None}
    if not sizes:
        raise ValueError("the number of latent dimensions is not known: pass candidates.")
    latent_dim = next(iter(sizes.values()))
    for name, size in sizes.items():
        if size != latent_dim:
            known = next(iter(sizes))
            raise ValueError(f"{name} has {size} latent dimensions, but {known} {latent_dim}.")
    if start is not None:
        if jnp.shape(start) not in ((latent_dim,), (rows, latent_dim)):
            raise ValueError(f"start has shape {jnp.shape(start)}; it must be {(rows, latent_dim)} or ({latent_dim},).")
        checks.require_finite(start, "start")
        start = jnp.broadcast_to(jnp.asarray(start, dtype), (rows, latent_dim))
    if prior is None:
        prior = dist.Normal(jnp.zeros(latent_dim, dtype), 1.0).to_event(1)
    elif prior.batch_shape not in ((), (1,), (rows,)):
        raise ValueError(f"prior has batch shape {prior.batch_shape}; it must be () or ({rows},), one for each row.")
    if candidates is None:
        candidates = jnp.zeros((0, latent_dim)) if inducing is None else inducing
    return candidates.astype(dtype), start, prior


def _check_result(elbo: jax.Array, done: jax.Array, num_steps: int) -> None:
    wrong = int(np.sum(~np.isfinite(elbo)))
    if wrong:
        raise FloatingPointError(
            f"the bound of {wrong} of {elbo.size} rows is not finite wherever they started: their data may be far from "
            "what this posterior expects, or its parameters not finite; try float64, or pass candidates."
        )
    left = int(np.sum(~np.asarray(done)))
    if left:
        warnings.warn(
            f"infer_latents did not converge for {left} of {elbo.size} rows in {num_steps} steps: raise num_steps.",
            RuntimeWarning,
            stacklevel=3,
        )


# ---------------------------------------------------------------------------------------------------------------
# Predictions


@functools.partial(jax.jit, static_argnums=4)
def _predict(
    modes: Modes, posterior: Posterior, likelihood: Likelihood | None, offset: jax.Array, num_nodes: int
) -> tuple[jax.Array, jax.Array]:
    loc, scale, _, weight = modes
    Q, columns = loc.shape[-1], offset.shape[-1]
    nodes, weights = normal_rule(Q, num_nodes, loc.dtype)

    def part(loc, scale, offset):
        mean, variance = posterior.mean_and_variance(spread(loc, scale, nodes[:, None]).reshape(-1, Q))
        mean = mean + jnp.tile(offset.T, len(nodes)).astype(mean.dtype)
        if likelihood is not None:
            mean, variance = likelihood.moments(mean, variance)
        mean, variance = (array.reshape(columns, len(nodes), -1).transpose(1, 2, 0) for array in (mean, variance))
        return mixture_moments(mean, variance, weights[:, None, None])

    flat = (
        loc.reshape(-1, Q),
        scale.reshape(-1, *scale.shape[loc.ndim - 1 :]),
        jnp.broadcast_to(offset, (*weight.shape, columns)).reshape(-1, columns),
    )
    mean, variance = map_chunks(part, affordable(posterior, len(nodes)), *flat)
    mean, variance = (array.reshape(*weight.shape, columns) for array in (mean, variance))
    return mixture_moments(mean, variance, weight[..., None])


@functools.partial(jax.jit, static_argnums=5)
def _sample(
    rng_key: jax.Array,
    modes: Modes,
    posterior: Posterior,
    likelihood: Likelihood | None,
    offset: jax.Array,
    sample_shape: tuple[int, ...],
) -> jax.Array:
    mode_key, x_key, f_key, y_key = jax.random.split(rng_key, 4)
    batch, Q, columns = modes.weight.shape[1:], modes.loc.shape[-1], offset.shape[-1]
    shape = (math.prod(sample_shape), math.prod(batch))
    weight, loc = modes.weight.reshape(-1, shape[1]), modes.loc.reshape(-1, shape[1], Q)
    scale = modes.scale.reshape(-1, shape[1], *modes.scale.shape[modes.loc.ndim - 1 :])
    mode = jax.random.categorical(mode_key, jnp.log(weight), axis=0, shape=shape)
    loc, scale = (array[mode, np.arange(shape[1])] for array in (loc, scale))
    x = spread(loc, scale, jax.random.normal(x_key, loc.shape, loc.dtype)).reshape(-1, Q)
    mean, variance = posterior.mean_and_variance(x, batch_size=affordable(posterior))
    shift = jnp.tile(offset.reshape(-1, columns).T, shape[0]).astype(mean.dtype)
    y = mean + shift + jnp.sqrt(variance) * jax.random.normal(f_key, mean.shape, mean.dtype)
    if likelihood is not None:
        y = likelihood.sample(y_key, y)
    return y.T.reshape(*sample_shape, *batch, columns)
