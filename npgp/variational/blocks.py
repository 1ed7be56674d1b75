"""
q(ε): the approximate posterior over whitened inducing values, one independent Gaussian per block.

``q(ε) = Π_i N(m_i, S_i)`` against the prior ``Π_i N(0, I)``. S_i is dense, diagonal, or left at the prior I. Blocks
are NumPyro distributions with closed-form KL divergences, so a guide samples from them like from any other.

A joint q(ε) of several components, which an observation is the sum of, is one Gaussian, site by site.
Data about ``y = f(x) + g(x)`` say little about how y is split, so that f and g are far from independent given y.
Stacked over components, ε = (ε_1, …, ε_C) has the covariance T Tᵀ (row_sites.py). With T lower triangular,
component k is drawn given those before: ``ε_k = m_k + Σ_{j<k} T_kj z_j + T_kk z_k``. Its rows of T alone are a root of
its own marginal covariance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.kl import kl_divergence

from npgp import checks, linalg
from npgp.contract import FixedConstraint, FixedTransform, is_prng_key
from npgp.sparse.projection import Projection

#: Mean and scale of a block; ``None`` for the scale of one whose covariance is not learned.
Arrays = tuple[jax.Array, jax.Array | None]

# ---------------------------------------------------------------------------------------------------------------
# The distributions of one block


class WhitenedPrior(dist.Distribution):
    """
    The prior of a block's whitened values, ``ε ~ N(0, I_M)``.

    .. code-block:: python

        epsilon = npgp.variational.WhitenedPrior(6).sample(key)  # (6,)

    :param size: number of features M.
    """

    support = constraints.real_vector
    pytree_aux_fields = ("size",)

    def __init__(self, size: int, *, validate_args=None):
        self.size = size
        super().__init__((), (size,), validate_args=validate_args)

    def sample(self, key, sample_shape=()):
        if not is_prng_key(key):
            raise ValueError("a GP is drawn without a random key: run the model under SVI, MCMC, Predictive or a seed.")
        return jax.random.normal(key, sample_shape + self.batch_shape + self.event_shape)

    def log_prob(self, value):
        return -0.5 * (jnp.sum(jnp.square(value), -1) + self.size * math.log(2.0 * math.pi))


class BlockNormal(dist.Distribution):
    """
    ``N(m, S)`` over one block's whitened values; subclasses differ in how S is held.

    ``learned`` says whether S is. A block left at its prior covariance moves the mean alone: its variance belongs
    to the residual.
    """

    support = constraints.real_vector
    learned = True
    #: Whether it shares q with other blocks.
    joint = False
    #: How S is held, as :class:`~npgp.SparseGP` and others name it.
    kind: str

    loc: jax.Array

    def _color(self, z: jax.Array) -> jax.Array:
        """``L_S z`` over the last axis."""
        raise NotImplementedError

    def _whiten(self, z: jax.Array) -> jax.Array:
        """``L_S⁻¹ z`` over the last axis."""
        raise NotImplementedError

    def log_det(self) -> jax.Array:
        """``log |S|``, batch shape."""
        raise NotImplementedError

    def trace(self) -> jax.Array:
        """``tr S``, batch shape."""
        raise NotImplementedError

    def factor_times(self, A: jax.Array) -> jax.Array:
        """
        ``L_Sᵀ A`` for A of shape (M, N), or batch + (M, N): batch shape + (M, N). Its columns' squared norms are
        variances.
        """
        raise NotImplementedError

    @property
    def scale_array(self) -> jax.Array | None:
        """L_S, (..., M, M), or its diagonal, (..., M), by the kind; ``None`` where S is not learned."""
        return None

    def _arrays(self, function: Callable[[jax.Array, int], jax.Array]) -> Arrays:
        """Arguments of :func:`block_normal`, by a function of each array and its number of axes without batch."""
        scale = self.scale_array
        return function(self.loc, 1), None if scale is None else function(scale, 2 if self.kind == "dense" else 1)

    def arrays(self, batch: tuple[int, ...]) -> Arrays:
        """Arguments of :func:`block_normal` for each function of a batch."""
        return self._arrays(lambda x, own: jnp.broadcast_to(x, batch + x.shape[x.ndim - own :]))

    def without_last_batch_dim(self) -> BlockNormal:
        """The same distribution, its last batch dimension (of size 1) dropped."""
        return block_normal(self.kind, *self._arrays(lambda x, own: jnp.squeeze(x, -own - 1) if x.ndim > own else x))

    def take(self, members: jax.Array) -> BlockNormal:
        """Select members of the batch by number, (C,)."""
        return block_normal(self.kind, *self._arrays(lambda x, own: x[members] if x.ndim > own else x))

    def marginal(self) -> BlockNormal:
        """The block's distribution by itself, where others depend on it (npgp/variational/blocks.py)."""
        return self

    def sample(self, key, sample_shape=()):
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        z = jax.random.normal(key, sample_shape + self.batch_shape + self.event_shape, self.loc.dtype)
        return self.loc + self._color(z)

    def log_prob(self, value):
        z = self._whiten(value - self.loc)
        return -0.5 * (jnp.sum(jnp.square(z), -1) + self.log_det() + self.event_shape[0] * math.log(2.0 * math.pi))

    def kl(self) -> jax.Array:
        """``KL[N(m, S) ‖ N(0, I)]``, batch shape."""
        size = self.event_shape[0]
        return 0.5 * (self.trace() + jnp.sum(jnp.square(self.loc), -1) - size - self.log_det())

    @property
    def mean(self):
        return self.loc


class DenseNormal(BlockNormal):
    """
    ``N(m, L Lᵀ)``.

    .. code-block:: python

        q = npgp.variational.DenseNormal(np.zeros(3), np.eye(3))
        assert q.event_shape == (3,)

    :param loc: m, shape (..., M).
    :param scale_tril: L, lower triangular with a positive diagonal, shape (..., M, M).
    """

    pytree_data_fields = ("loc", "scale_tril")
    kind = "dense"

    def __init__(self, loc, scale_tril, *, validate_args=None):
        batch = jax.lax.broadcast_shapes(jnp.shape(loc)[:-1], jnp.shape(scale_tril)[:-2])
        self.loc = jnp.broadcast_to(loc, batch + jnp.shape(loc)[-1:])
        self.scale_tril = scale_tril
        super().__init__(batch, jnp.shape(loc)[-1:], validate_args=validate_args)

    @property
    def scale_array(self):
        return self.scale_tril

    def _color(self, z):
        return linalg.matmul(self.scale_tril, z[..., None])[..., 0]

    def _whiten(self, z):
        L = jnp.broadcast_to(self.scale_tril, self.batch_shape + self.scale_tril.shape[-2:])
        return linalg.solve_lower(L, z[..., None])[..., 0]

    def log_det(self):
        return jnp.broadcast_to(linalg.log_determinant(self.scale_tril), self.batch_shape)

    def trace(self):
        return jnp.broadcast_to(jnp.sum(jnp.square(self.scale_tril), (-2, -1)), self.batch_shape)

    def factor_times(self, A):
        return linalg.lower_matmul(self.scale_tril, A, transpose=True)


class DiagonalNormal(BlockNormal):
    """
    ``N(m, diag s²)``: mean field.

    .. code-block:: python

        q = npgp.variational.DiagonalNormal(np.zeros(3), np.ones(3))
        assert q.event_shape == (3,)

    :param loc: m, shape (..., M).
    :param scale: s, positive, shape (..., M).
    """

    pytree_data_fields = ("loc", "scale")
    kind = "diagonal"

    def __init__(self, loc, scale, *, validate_args=None):
        shape = jax.lax.broadcast_shapes(jnp.shape(loc), jnp.shape(scale))
        self.loc, self.scale = jnp.broadcast_to(loc, shape), jnp.broadcast_to(scale, shape)
        super().__init__(shape[:-1], shape[-1:], validate_args=validate_args)

    @property
    def scale_array(self):
        return self.scale

    def _color(self, z):
        return self.scale * z

    def _whiten(self, z):
        return z / self.scale

    def log_det(self):
        return 2.0 * jnp.sum(jnp.log(self.scale), -1)

    def trace(self):
        return jnp.sum(jnp.square(self.scale), -1)

    def factor_times(self, A):
        return self.scale[..., None] * A


class MeanOnlyNormal(BlockNormal):
    """
    ``N(m, I)``: the block moves the mean and leaves its variance to the residual (the v of ODVGP).

    .. code-block:: python

        q = npgp.variational.MeanOnlyNormal(jnp.array([0.5, -0.2]))
        q.kl()  # (0.25 + 0.04) / 2

    :param loc: m, shape (..., M).
    """

    pytree_data_fields = ("loc",)
    kind = "mean-only"
    learned = False

    def __init__(self, loc, *, validate_args=None):
        self.loc = jnp.asarray(loc)
        super().__init__(self.loc.shape[:-1], self.loc.shape[-1:], validate_args=validate_args)

    def _color(self, z):
        return z

    def _whiten(self, z):
        return z

    def log_det(self):
        return jnp.zeros(self.batch_shape, self.loc.dtype)

    def trace(self):
        return jnp.full(self.batch_shape, self.event_shape[0], self.loc.dtype)

    def factor_times(self, A):
        return jnp.broadcast_to(A, jnp.broadcast_shapes(self.batch_shape, A.shape[:-2]) + A.shape[-2:])


# Dispatch follows subclasses, so each class registers its own rule.
for _block in (DenseNormal, DiagonalNormal, MeanOnlyNormal):

    @kl_divergence.register(_block, WhitenedPrior)  # type: ignore[attr-defined]
    def _block_kl(q, p):
        return q.kl()


def block_normal(kind: str, loc: jax.Array, scale: jax.Array | None) -> BlockNormal:
    """A block of one of the words in :data:`STRUCTURES`, whose scale is L, s or nothing."""
    if kind == "mean-only":
        return MeanOnlyNormal(loc)
    return DenseNormal(loc, scale) if kind == "dense" else DiagonalNormal(loc, scale)


class SquareTril(FixedConstraint):
    """
    Lower-triangular square arrays with a positive diagonal.

    .. code-block:: python

        assert npgp.variational.square_tril(jnp.eye(3))
        # Of a model of one's own.
        numpyro.param("L", np.eye(3), constraint=npgp.variational.square_tril)
    """

    event_dim = 2

    def __call__(self, x):
        lower = jnp.all(jnp.triu(x, 1) == 0.0, axis=(-2, -1))
        return lower & jnp.all(linalg.diagonal(x) > 0.0, axis=-1)

    def feasible_like(self, prototype):
        return jnp.broadcast_to(jnp.eye(prototype.shape[-1], dtype=prototype.dtype), prototype.shape)


#: Constraint of a Cholesky factor that optimizers hold as a square array: no gather or scatter of triangles.
square_tril = SquareTril()


class SquareTrilTransform(FixedTransform):
    """Any square array → its lower triangle with a softplus diagonal. What is above the diagonal is ignored."""

    domain = constraints.independent(constraints.real, 2)
    codomain = square_tril

    def __call__(self, x):
        diagonal = jax.nn.softplus(linalg.diagonal(x))
        return jnp.tril(x, -1) + linalg.diagonal_matrix(diagonal)

    def _inverse(self, y):
        diagonal = linalg.diagonal(y)
        raw = diagonal + jnp.log(-jnp.expm1(-diagonal))
        return jnp.tril(y, -1) + linalg.diagonal_matrix(raw)

    def log_abs_det_jacobian(self, x, y, intermediates=None):
        return -jnp.sum(jax.nn.softplus(-linalg.diagonal(x)), -1)

    def forward_shape(self, shape):
        return shape

    def inverse_shape(self, shape):
        return shape


@biject_to.register(SquareTril)
def _(constraint):
    return SquareTrilTransform()


#: Name of the parameter that holds the scale, for each kind of block that has one; and the constraint it is under.
SCALE_NAMES = {"dense": "scale_tril", "diagonal": "scale"}
SCALE_CONSTRAINTS = {"scale_tril": square_tril, "scale": constraints.softplus_positive}


# ---------------------------------------------------------------------------------------------------------------
# What q(ε) says about f


#: Learned in full, learned as mean field, or left at the prior: such a block moves the mean only.
STRUCTURES = ("dense", "diagonal", "mean-only")


def check_covariances(covariances: Sequence[str] | str | None, blocks: int) -> tuple[str, ...]:
    """
    One word for each block, mean-only blocks last; dense throughout if omitted.

    :raises ValueError: for other words, or not one for each block.
    """
    if covariances is None:
        return ("dense",) * blocks
    kinds = (covariances,) * blocks if isinstance(covariances, str) else tuple(covariances)
    if len(kinds) != blocks or any(kind not in STRUCTURES for kind in kinds):
        raise ValueError(
            f"covariances is {covariances!r}; it must give one of {STRUCTURES} for each of {blocks} blocks."
        )
    if any(kind == "mean-only" and later != "mean-only" for kind, later in itertools.pairwise(kinds)):
        raise ValueError(
            f"covariances is {covariances!r}; blocks that move the mean only ('mean-only') must come last."
        )
    return kinds


def learned_blocks(q: Sequence[BlockNormal]) -> tuple[bool, ...]:
    """
    Which blocks' covariances q has learned; the residual is what these leave.

    .. code-block:: python

        q = [npgp.variational.WhitenedPrior(6), npgp.variational.MeanOnlyNormal(jnp.zeros(3))]
        npgp.variational.learned_blocks(q[1:])  # (False,)
    """
    return tuple(block.learned for block in q)


def along_rows(weights: jax.Array, A: jax.Array) -> jax.Array:
    """``Aᵀ w`` for weights batch + (M,), and A of shape (M, N) or batch + (M, N); batch + (N,)."""
    return linalg.matmul(weights, A) if A.ndim == 2 else linalg.matmul(weights[..., None, :], A)[..., 0, :]


def whitened_mean(projection: Projection, means: Sequence[jax.Array]) -> jax.Array:
    """
    ``Σ_i A_iᵀ m_i``.

    .. code-block:: python

        projection = npgp.sparse.factorize(kernel, [npgp.features.Points(Z)])(X)
        npgp.variational.whitened_mean(projection, [jnp.ones(6)])  # (30,)

    :param projection: of N inputs.
    :param means: for each block, shape batch + (M_i,).
    :return: shape batch + (N,).
    """
    return sum(along_rows(m, A) for m, A in zip(means, projection.A, strict=True))  # type: ignore[return-value]


def whitened_variance(projection: Projection, q: Sequence[BlockNormal]) -> jax.Array:
    """
    ``s_n = Σ_{i learned} ‖L_{S_i}ᵀ A_i,n‖²``, the part of the variance that comes from ε; batch + (N,).

    .. code-block:: python

        projection = npgp.sparse.factorize(kernel, [npgp.features.Points(Z)])(X)
        q = npgp.variational.gaussian_optimum(projection, y, noise_variance, ["dense"])
        # Of f at X.
        variance = (
            npgp.variational.whitened_variance(projection, q) + projection.residual_variance()
        )
    """
    parts = [
        jnp.sum(jnp.square(block.factor_times(A)), axis=-2)
        for block, A in zip(q, projection.A, strict=True)
        if block.learned
    ]
    return sum(parts, jnp.zeros_like(projection.prior_variance))


# ---------------------------------------------------------------------------------------------------------------
# Several components


class JointBlock(BlockNormal):
    """
    One block of several that are jointly Gaussian; of functions in plates, these independent given the blocks before,
    or jointly Gaussian too.

    As a distribution it is the block's given the draws of those before, and of a plate's functions each one's given
    those before it. What else it says is of the block by itself: ``loc``, :meth:`factor_times` and :meth:`trace`.
    :meth:`kl` is the divergence of the former from the prior, averaged over draws of those before, so that the blocks'
    sum to the joint divergence.

    :param loc: the marginal mean m_k, (M,); or batch + (M,) of functions in plates.
    :param rows: the block's rows of T up to its diagonal block, (M, K); or batch + (M, K).
    :param before: draws of z for the blocks before, (K − M,), which functions in plates share; or batch + that.
        ``None`` where the block is asked for nothing but what it is by itself.
    :param coupled: whether the functions of a plate are jointly Gaussian: their rows, one function after the other, end
        with the diagonal block of all.
    """

    pytree_data_fields = ("loc", "rows", "before")
    pytree_aux_fields = ("coupled",)
    kind = "dense"
    joint = True

    def __init__(self, loc, rows, before, coupled=False, *, validate_args=None):
        self.loc, self.rows, self.before, self.coupled = loc, rows, before, coupled
        super().__init__(jnp.shape(loc)[:-1], jnp.shape(loc)[-1:], validate_args=validate_args)

    def _flat(self, array: jax.Array) -> jax.Array:
        """Batch + (M, ...), or of coupled functions (batch × M, ...)."""
        return array.reshape(-1, *array.shape[len(self.batch_shape) + 1 :]) if self.coupled else array

    @property
    def scale_tril(self) -> jax.Array:
        """T_kk, (..., M, M); of coupled functions that of all."""
        rows = self._flat(self.rows)
        return rows[..., rows.shape[-1] - rows.shape[-2] :]

    def at(self, z: jax.Array) -> jax.Array:
        """The value that is made of standard normal z, (..., M)."""
        rows, size = self._flat(self.rows), self._flat(self.loc).shape[-1]
        left = linalg.matmul(rows[..., : rows.shape[-1] - size], self.before[..., None])
        own = linalg.matmul(self.scale_tril, self._flat_values(z)[..., None])
        return self.loc + (left + own)[..., 0].reshape(z.shape)

    def _flat_values(self, values: jax.Array) -> jax.Array:
        own = len(self.batch_shape) + 1
        return values.reshape(*values.shape[: values.ndim - own], -1) if self.coupled else values

    @property
    def mean(self):
        return self.at(jnp.zeros_like(self.loc))

    def without_last_batch_dim(self):
        before = self.before if self.before is None or self.before.ndim == 1 else self.before[..., 0, :]
        return JointBlock(self.loc[..., 0, :], self.rows[..., 0, :, :], before, self.coupled)

    def take(self, members):
        return JointBlock(self.loc[members], self.rows[members], None)

    def noise(self, value: jax.Array) -> jax.Array:
        """The z_k that a value is made of."""
        left = self._flat_values(value - self.mean)
        return linalg.solve_lower(self.scale_tril, left[..., None])[..., 0].reshape(value.shape)

    def drawn(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[jax.Array, jax.Array]:
        """A draw, and the z_k that it is made of."""
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        z = jax.random.normal(key, sample_shape + self.batch_shape + self.event_shape, self.loc.dtype)
        return self.at(z), z

    def sample(self, key, sample_shape=()):
        return self.drawn(key, sample_shape)[0]

    def log_prob(self, value):
        z = self.noise(value)
        return -0.5 * (jnp.sum(jnp.square(z), -1) + self.log_det() + self.event_shape[0] * math.log(2.0 * math.pi))

    def log_det(self):
        diagonal = linalg.diagonal(self.scale_tril).reshape(self.loc.shape)
        return 2.0 * jnp.sum(jnp.log(diagonal), axis=-1)

    def trace(self):
        return jnp.sum(jnp.square(self.rows), (-2, -1))

    def factor_times(self, A):
        return linalg.matmul(jnp.swapaxes(self.rows, -1, -2), A)

    def marginal(self) -> BlockNormal:
        # Not by the factor of S_k, which would square the condition number.
        upper = jnp.linalg.qr(jnp.swapaxes(self._flat(self.rows), -1, -2), mode="r")
        signs = jnp.where(linalg.diagonal(upper) < 0, -1.0, 1.0)
        lower = jnp.swapaxes(upper * signs[..., None], -1, -2)
        if not self.coupled:
            return DenseNormal(self.loc, lower)
        rows = lower.reshape(*self.loc.shape, lower.shape[-1])
        return JointBlock(self.loc, rows, jnp.zeros(0, rows.dtype), coupled=True)


@kl_divergence.register(JointBlock, WhitenedPrior)  # type: ignore[attr-defined]
def _(q, p):
    return q.kl()


def sum_of_roots(roots: Sequence[jax.Array]) -> jax.Array:
    """
    The root of a sum, ``Σ_k T_kᵀ A_k``; (..., K, N).

    :param roots: ``T_kᵀ A_k`` of each block, (..., K_k, N): what a block drawn early lacks below is 0.
    """
    most = max(root.shape[-2] for root in roots)
    padded = [
        jnp.pad(root, [(0, 0)] * (root.ndim - 2) + [(0, most - root.shape[-2]), (0, 0)])
        if root.shape[-2] < most
        else root
        for root in roots
    ]
    return sum(padded[1:], padded[0])
