"""
Collapsed bounds for Gaussian inputs: regression with uncertain inputs, and what the collapsed GPLVM is made of.

The bound of :mod:`npgp.collapsed` in expectation over ``q(x_n) = N(μ_n, diag s_n²)``, at the q(ε) that is best for all
x together (Titsias & Lawrence 2010). With ``A_n = A(x_n)`` the whitened projection of a row, d_n the residual variance
that it leaves, and ``B = I + Σ_n ⟨A_n A_nᵀ⟩/σ_n²``,

    ½ ‖L_B⁻¹ Σ_n ⟨A_n⟩ y_n/σ_n²‖² − ½ Σ_n (y_n²/σ_n² + log 2πσ_n²) − ½ log|B| − penalty,

    penalty:  prior ½ Σ ⟨d_n⟩/σ_n²;   tight ½ Σ log(1 + ⟨d_n⟩/σ_n²), or lower, ½ Σ ⟨log(1 + d_n(x_n)/σ_n²)⟩.

The residual of ``tight`` has variance ``m_n d_n(x_n)``. The first form is for the best m_n that is one number for each
row, the second, lower by Jensen's inequality, for the best function of x_n; it has no closed form (docs/theory.md,
section 7).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp import checks, linalg
from npgp.checks import host_generator, known_key
from npgp.collapsed.psi import ExpectedProjection, expected_projection, gaussian_inputs, points
from npgp.conditionals import Conditional, Prior, Tight, as_conditional
from npgp.conditionals.base import Observations
from npgp.contract import Stackable, per_stacked
from npgp.densities import JointDensity
from npgp.kernels import Kernel, as_kernel
from npgp.likelihoods import Gaussian
from npgp.likelihoods.continuous import likelihood_or_noise
from npgp.sparse.residuals import RowResidual
from npgp.variational.blocks import DenseNormal
from npgp.variational.posterior import Posterior


def penalty_nodes(rng_key: jax.Array, count: int, rows: int, columns: int) -> np.ndarray:
    """
    Points that stand for a standard normal variable in each row: antithetic pairs of pseudo-random draws.

    Row by row their mean is 0 and they are unbiased: the expectation over keys of any average over them is exact.

    .. code-block:: python

        nodes = npgp.collapsed.penalty_nodes(key, 4, rows=30, columns=1)
        np.testing.assert_allclose(nodes.mean(0), 0.0, atol=1e-12)

    :param rng_key: decides the draws.
    :param count: how many S, even.
    :param rows: N.
    :param columns: Q.
    :return: (S, N, Q).
    :raises ValueError: if ``count`` is not even and positive.
    """
    if count < 2 or count % 2:
        raise ValueError(f"the number of penalty draws is {count}; it must be even, for they come in pairs ±.")
    half = host_generator(rng_key).normal(size=(count // 2, rows, columns))
    return np.concatenate([half, -half])


class UncertainInputGP(JointDensity, Stackable):
    """
    Gaussian-noise observations of a sparse GP at Gaussian inputs, with q(ε) collapsed.

    ``log_prob(y)`` is ``E_{q(x)}`` of the collapsed bound at the q(ε) that is best for it. If the inputs have that
    distribution a priori, independently of each other, it is a lower bound on ``log ∫ p(y | x) p(x) dx``: regression
    with inputs that were measured with known errors:

    .. code-block:: python

        numpyro.sample(
            "y",
            npgp.collapsed.UncertainInputGP(kernel, X, 0.1, Z, npgp.Gaussian(scale=0.3)),
            obs=y,
        )

    If they are latent with another prior, subtract the Kullback-Leibler divergence of q(x) from it, which belongs to
    the model (:class:`npgp.gplvm.CollapsedGPLVM`). Several outputs that share the GP's hyperparameters are rows of y:
    ``log_prob`` maps (..., N) to (...), with one computation of all that does not depend on y. For minibatches, other
    kernels or other likelihoods sample x in the model (:class:`npgp.BayesianGPLVM`).

    It wants float64: ``tr K_uu⁻¹ Cov[k(Z, x)]`` loses digits to the condition of K_uu. In float32 give a larger jitter.

    :param kernel: made of ``RBF``, ``Linear`` and ``Constant`` by sums and scalings (:mod:`npgp.collapsed.psi`).
    :param loc: means of the inputs, (N, Q).
    :param scale: their standard deviations, (N, Q), (Q,) or a scalar; 0 for inputs that are known.
    :param inducing: Z of shape (M, Q), or one block of :class:`npgp.features.Points`.
    :param likelihood: Gaussian noise, as ``npgp.Gaussian(scale=0.3)``.
    :param noise_variance: in its stead σ², a scalar or one for each row (N,).
    :param offset: what is added to f, a scalar or (N,), the same wherever in q(x) a row is.
    :param conditional: ``"tight"`` or ``"prior"`` (Titsias & Lawrence 2010).
    :param penalty_draws: for ``"tight"``: standard normal points ε, (S, N, Q) or (S, 1, Q) for the same in all rows, or
        an even number S of them (:func:`penalty_nodes`). The penalty is then ``⟨log(1 + d_n(x_n)/σ²)⟩`` as estimated at
        the points ``μ_n + s_n ε``: tighter in expectation, but an estimate, which an optimizer over many latents can
        exploit where S is small: evaluate the result with other points. If omitted the penalty has m_n free of x_n, in
        closed form.
    :param penalty_weights: weights of the points, (S,), for cubature rules; 1/S if omitted.
    :param mask: True where an observation is present, (N,), or (D, N) for D outputs; the others may be NaN. Outputs
        that miss entries of their own have a q(ε) of their own covariance, at O(M³) for each output.
    :param jitter: relative jitter tried first (:func:`npgp.linalg.cholesky`).
    :param chunk_size: as for :func:`~npgp.collapsed.psi_statistics`.
    :raises NotImplementedError: for kernels without a closed form.
    :raises TypeError: for inducing features that are not points, and for a mask that is not boolean.
    :raises ValueError: for several blocks, arrays of the wrong shape, and a variance known not to be positive.

    Source: Titsias & Lawrence 2010; Damianou, Titsias & Lawrence 2016; for ``tight``, Bui, Ashman & Turner 2025.
    """

    support = constraints.real_vector
    counted = "loc"
    pytree_data_fields = (
        "kernel",
        "loc",
        "scale",
        "inducing",
        "noise_variance",
        "offset",
        "penalty_draws",
        "penalty_weights",
        "conditional",
        "mask_",
    )
    pytree_aux_fields = ("jitter", "chunk_size")

    def __init__(
        self,
        kernel: Kernel,
        loc: ArrayLike,
        scale: ArrayLike,
        inducing: object,
        likelihood: Gaussian | None = None,
        *,
        noise_variance: ArrayLike | None = None,
        offset: ArrayLike = 0.0,
        conditional: Conditional | str = "tight",
        penalty_draws: ArrayLike | int | None = None,
        penalty_weights: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        jitter: float | None = None,
        chunk_size: int | None = None,
        validate_args=None,
    ):
        conditional = as_conditional(conditional)
        if type(conditional) not in (Tight, Prior):
            raise ValueError(f"conditional is {conditional!r}; with uncertain inputs it must be 'tight' or 'prior'.")
        noise_variance = likelihood_or_noise(likelihood, noise_variance).variance
        self.kernel = as_kernel(kernel)
        self.loc, self.scale = gaussian_inputs(loc, scale)
        self.inducing = points(inducing)
        rows, columns = self.loc.shape
        checks.require_per_row(noise_variance, "noise_variance", rows)
        checks.require_per_row(offset, "offset", rows)
        self.noise_variance = noise_variance
        self.offset = offset
        self.conditional = conditional
        if not isinstance(conditional, Tight) and penalty_draws is not None:
            raise ValueError(
                f"penalty_draws is given, but conditional is {conditional!r}; only 'tight' has such draws."
            )
        if isinstance(penalty_draws, int):
            penalty_draws = penalty_nodes(known_key(), penalty_draws, rows, columns)
        if penalty_draws is not None:
            shape = jnp.shape(penalty_draws)
            if len(shape) != 3 or not shape[0] or shape[1] not in (1, rows) or shape[2] != columns:
                raise ValueError(
                    f"penalty_draws has shape {shape}; it must be (S, {rows}, {columns}) or (S, 1, {columns})."
                )
        draws = None if penalty_draws is None else jnp.shape(penalty_draws)[0]
        if penalty_weights is not None and jnp.shape(penalty_weights) != (draws,):
            raise ValueError(
                f"penalty_weights has shape {jnp.shape(penalty_weights)}; there must be one for each of penalty_draws."
            )
        self.penalty_draws = penalty_draws
        self.penalty_weights = penalty_weights
        mask = None if mask is None else checks.mask_of(mask)
        if mask is not None and (mask.ndim not in (1, 2) or mask.shape[-1] != rows):
            raise ValueError(f"mask has shape {mask.shape}; it must be ({rows},), or (outputs, {rows}).")
        self.mask_ = mask
        self.jitter = jitter
        self.chunk_size = chunk_size
        super().__init__((), (rows,), validate_args=validate_args)
        self.count_axes()

    @per_stacked
    def log_prob(self, value):
        """The bound for observations y of shape (..., N): (...)."""
        y = self._observations(value)
        expected, noise = self._expected()
        factor, half = _solved(expected, noise, y)
        density = jnp.square(y) / noise + jnp.log(2.0 * math.pi * noise)
        fit = jnp.sum(jnp.square(half), axis=-1) - jnp.sum(jnp.where(jnp.isfinite(noise), density, 0.0), axis=-1)
        return 0.5 * (fit - linalg.log_determinant(factor)) - self._penalty(expected, noise)

    def condition(self, y: ArrayLike) -> Posterior:
        """
        The posterior of f, without the offset, given observations y of shape (..., N), at the best q(ε).

        :raises ValueError: if y has NaN where it is not masked, or another number of rows.
        """
        y = self._observations(y)
        expected, noise = self._expected()
        factor, half = _solved(expected, noise, y)
        loc = _solve_each(factor, half, transpose=True)
        return Posterior(expected.projector, (DenseNormal(loc, linalg.inverse_factor(factor)),))

    def _observations(self, y: ArrayLike) -> jax.Array:
        """Observations less the offset, checked, and anything where there is none."""
        likelihood, shape = Gaussian(variance=self.noise_variance), (..., *self.event_shape)
        if self.mask_ is not None and self.mask_.ndim == 2:
            shape = self.mask_.shape
        rows = Observations.of(y, likelihood, shape, mask=self.mask_, broadcast=True, dtype=self.loc.dtype)
        return rows.y - self.offset

    def sample(self, key, sample_shape=()):
        """Joint draws of inputs, function and noise, at O(N³) for each."""
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        shape = sample_shape + self.batch_shape

        def draw(key):
            x_key, f_key, noise_key = jax.random.split(key, 3)
            x = self.loc + self.scale * jax.random.normal(x_key, self.loc.shape, self.loc.dtype)
            L, _ = linalg.cholesky(self.kernel(x), self.jitter)
            f = linalg.matmul(L, jax.random.normal(f_key, self.event_shape, L.dtype))
            noise = jnp.sqrt(self.noise_variance) * jax.random.normal(noise_key, self.event_shape, L.dtype)
            return self.offset + f + noise

        keys = jax.random.split(key, math.prod(shape))
        return lax.map(draw, keys).reshape(shape + self.event_shape)

    def _expected(self) -> tuple[ExpectedProjection, jax.Array]:
        """
        The moments of the rows' projections, weighted by their precisions, and σ_n² for each row, (N,), or each
        output's, (D, N); infinite where there is no observation.
        """
        noise = jnp.broadcast_to(jnp.asarray(self.noise_variance, self.loc.dtype), self.event_shape)
        if self.mask_ is not None:
            noise = jnp.where(self.mask_, noise, jnp.inf)
        expected = expected_projection(
            self.kernel,
            self.inducing,
            self.loc,
            self.scale,
            1.0 / noise,
            jitter=self.jitter,
            chunk_size=self.chunk_size,
        )
        return expected, noise

    def _penalty(self, expected: ExpectedProjection, noise: jax.Array) -> jax.Array:
        if self.penalty_draws is None:
            penalty = partial(self.conditional.penalty, RowResidual(expected.residual_variance))
            return penalty(noise) if noise.ndim == 1 else jax.vmap(penalty)(noise)
        nodes = jnp.asarray(self.penalty_draws, self.loc.dtype)
        weights = 1.0 / nodes.shape[0] if self.penalty_weights is None else self.penalty_weights
        weights = jnp.broadcast_to(jnp.asarray(weights, self.loc.dtype), nodes.shape[:1])

        @jax.checkpoint
        def at_node(projector, loc, scale, node):
            variance = projector(loc + scale * node).residual_variance()
            return jnp.sum(jnp.log1p(variance / noise), axis=-1)

        def body(total, draw):
            node, weight = draw
            return total + weight * at_node(expected.projector, self.loc, self.scale, node), None

        total, _ = lax.scan(body, jnp.zeros(noise.shape[:-1], self.loc.dtype), (nodes, weights))
        return 0.5 * total


def _solved(expected: ExpectedProjection, noise: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """
    The Cholesky factor of B, (M, M), or each output's, (D, M, M); and ``L_B⁻¹ Σ_n ⟨A_n⟩ y_n/σ_n²`` for y of shape
    (..., N): (..., M).
    """
    size = expected.A.shape[0]
    scaled = expected.A / jnp.sqrt(noise)[..., None, :]
    B = jnp.eye(size, dtype=scaled.dtype) + linalg.gram(scaled) + expected.covariance
    factor, _ = linalg.cholesky(B, jitter=0.0)
    projected = linalg.matmul((y / noise).reshape(-1, y.shape[-1]), expected.A.T)
    return factor, _solve_each(factor, projected.reshape(*y.shape[:-1], size))


def _solve_each(factor: jax.Array, right: jax.Array, transpose: bool = False) -> jax.Array:
    """``L⁻¹ r``, or ``L⁻ᵀ r``, for each output's r, (..., M), and one factor, or (D, M) and one each."""
    if factor.ndim > 2:
        return linalg.solve_lower(factor, right[..., None], transpose=transpose)[..., 0]
    columns = right.reshape(-1, right.shape[-1]).T
    return linalg.solve_lower(factor, columns, transpose=transpose).T.reshape(right.shape)
