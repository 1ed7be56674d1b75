"""
The classical approximations of a GP with Gaussian noise: SoR, DTC, FITC (= SPGP) and PITC, as NumPyro distributions.

Each replaces the model by one that is cheap and then computes exactly (Quiñonero-Candela & Rasmussen 2005). With
``Q = Aᵀ A``, what the inducing features explain of the covariance, and ``D = K − Q`` what they leave::

    method    y ~ N(mean, Q + Λ)              f(x*) given the inducing values
    sor       Λ = σ² I                        no variance
    dtc       Λ = σ² I                        its residual variance d*
    fitc      Λ = σ² I + diag D               d*
    pitc      Λ = σ² I + blocks of D          d*

So these are approximations of the model, not bounds: the log density may lie above the exact GP's evidence, and its
maximum over inducing inputs may be where it is furthest above. :class:`npgp.CollapsedGP` has the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp import checks, linalg
from npgp.densities import JointDensity
from npgp.features import InducingBlock, Points
from npgp.kernels import Kernel, as_kernel
from npgp.keys import known_key
from npgp.pytrees import pytree
from npgp.sparse.groups import Groups, kmeans_groups
from npgp.sparse.projection import Projection, Projector, as_blocks, factorize
from npgp.sparse.residuals import GroupResidual
from npgp.variational.blocks import DenseNormal, whitened_mean, whitened_variance
from npgp.variational.optimum import ScaledProjection, gaussian_optimum
from npgp.variational.posterior import Posterior

__all__ = ["ApproximateGP", "DegeneratePosterior", "Method"]

Method = Literal["sor", "dtc", "fitc", "pitc"]


class ApproximateGP(JointDensity, dist.Distribution):
    """
    Gaussian-noise observations of a GP under a classical approximation: ``log_prob(y)`` is the exact log density of an
    approximate model, **not a bound** on the GP's evidence. For NUTS, L-BFGS or SVI over hyperparameters and inducing
    inputs:

    .. code-block:: python

        numpyro.sample("y", npgp.ApproximateGP(kernel, X, Z, noise_variance, method="fitc"), obs=y)

    The cost is O(N M²), and O(N g²) more for PITC with blocks of g rows. Several outputs that share the GP's
    hyperparameters are rows of y: ``log_prob`` maps (..., N) to (...).

    - ``"sor"``, subset of regressors (Smola & Bartlett 2001): f is ``A(x)ᵀ ε``, a model of finitely many parameters.
      Its predictive variance goes to 0 away from the inducing points, where it should be largest.
    - ``"dtc"``, deterministic training conditional (Seeger et al. 2003): the density and the mean of SoR, and a
      predictive variance with the residual's, never below SoR's. The density is SGPR's bound without its penalty.
    - ``"fitc"``, fully independent training conditional, also SPGP (Snelson & Ghahramani 2006): rows keep their own
      residual variance. It may take residual variance for noise, and learns inducing inputs that make it so.
    - ``"pitc"``, partially independent training conditional (Schwaighofer & Tresp 2003): rows keep their residual
      covariance within blocks. One block of all rows is the exact GP at these rows; blocks of one row are FITC.

    :param kernel: the kernel.
    :param X: training inputs, shape (N, D).
    :param inducing: Z of shape (M, D), or a block of features. A list of arrays means all their points together.
    :param noise_variance: σ², a scalar or one for each row (N,).
    :param offset: what is added to f, such as a mean function's values at X; a scalar or (N,). Add its values at new
        inputs to predictions.
    :param method: which of the four.
    :param groups: for ``"pitc"``, its blocks (:func:`npgp.median_split`, :func:`npgp.sparse.kmeans_groups`). If they
        are left out they are made of X by k-means, with at most M rows each.
    :param jitter: relative jitter tried first.
    :raises ValueError: for inputs of the wrong shape, for a noise variance known not to be positive, for blocks of
        features other than points in a list, and for groups of other rows or with a method that has none.
    """

    support = constraints.real_vector
    reparametrized_params: list[str] = []
    pytree_data_fields = ("kernel", "X", "block", "noise_variance", "offset", "groups")
    pytree_aux_fields = ("method", "jitter")

    def __init__(
        self,
        kernel: Kernel,
        X: ArrayLike,
        inducing: object,
        noise_variance: ArrayLike,
        *,
        offset: ArrayLike = 0.0,
        method: Method = "fitc",
        groups: Groups | None = None,
        jitter: float | None = None,
        validate_args=None,
    ):
        if method not in get_args(Method):
            raise ValueError(f"method is {method!r}; it must be one of {', '.join(map(repr, get_args(Method)))}.")
        checks.require_positive(noise_variance, "noise_variance")
        self.kernel = as_kernel(kernel)
        self.X = checks.inputs(X)
        self.block = _together(as_blocks(inducing))
        rows = self.X.shape[0]
        if groups is None and method == "pitc":
            if checks.is_traced(X):
                raise ValueError("X is traced, so it gives no blocks: pass groups=npgp.median_split(X, size).")
            groups = kmeans_groups(known_key(), X, self.block.size)
        _check_groups(method, groups, rows)
        checks.require_per_row(noise_variance, "noise_variance", rows)
        checks.require_per_row(offset, "offset", rows)
        self.noise_variance = noise_variance
        self.offset = offset
        self.method = method
        self.groups = groups
        self.jitter = jitter
        super().__init__((), (rows,), validate_args=validate_args)

    def log_prob(self, value):
        """The approximate model's log density of observations y of shape (..., N): (...)."""
        checks.require_rows(value, self.event_shape[0])
        checks.require_finite(value, "y")
        _, projection, noise = self._project()
        scaled = ScaledProjection.of(_whitened(projection, noise), 1.0)
        y = noise.whiten(value - self.offset)
        log_det = noise.log_determinant() + linalg.log_determinant(scaled.factor(0))
        square = jnp.sum(jnp.square(y), -1) - scaled.explained(y)
        return -0.5 * (square + log_det + y.shape[-1] * math.log(2.0 * math.pi))

    def _project(self) -> tuple[Projector, Projection, Noise]:
        projector = factorize(self.kernel, (self.block,), self.jitter)
        projection = projector(self.X)
        variance = jnp.broadcast_to(jnp.asarray(self.noise_variance, self.X.dtype), self.X.shape[:1])
        if self.method == "fitc":
            return projector, projection, RowNoise(jnp.sqrt(variance + projection.residual_variance()))
        scale = jnp.sqrt(variance)
        if self.groups is None:
            return projector, projection, RowNoise(scale)
        residual = GroupResidual(projector.group_covariance(self.X, projection.A, self.groups), self.groups)
        return projector, projection, GroupNoise(scale, residual.factor(residual.roots(1.0 / variance)), self.groups)

    def sample(self, key, sample_shape=()):
        """Joint draws of observations from the approximate model, whose covariance is Q + Λ, at O(N M²)."""
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        _, projection, noise = self._project()
        (A,) = projection.A
        shape, keys = sample_shape + self.batch_shape, jax.random.split(key)
        f = linalg.matmul(jax.random.normal(keys[0], (*shape, A.shape[0]), A.dtype), A)
        return self.offset + f + noise.color(jax.random.normal(keys[1], shape + self.event_shape, A.dtype))

    def condition(self, y: ArrayLike) -> Posterior | DegeneratePosterior:
        """
        The posterior of f, without the offset, given observations y of shape (..., N): the method's own predictive
        equations (Quiñonero-Candela & Rasmussen 2005, eqs. 16, 20, 24 and 31).

        :return: a :class:`npgp.Posterior`; for ``"sor"``, whose functions have no residual,
            a :class:`DegeneratePosterior`.
        :raises ValueError: if y has NaN or another number of rows.
        """
        y = checks.observations(y, self.event_shape[0], self.X.dtype)
        projector, projection, noise = self._project()
        whitened = _whitened(projection, noise)
        (q,) = gaussian_optimum(whitened, noise.whiten(y - self.offset), 1.0, ("dense",))
        if self.method == "sor":
            assert isinstance(q, DenseNormal)
            return DegeneratePosterior(projector, q)
        return Posterior(projector, (q,))

    def log_likelihood(self, y: ArrayLike) -> jax.Array:
        """
        Log likelihood row by row given the posterior, ``log ∫ p(y_n | f_n) p(f_n | y) df_n``: (..., N).

        How well the posterior fits the data it has seen; not for LOO.
        """
        mean, variance = self.condition(y).mean_and_variance(self.X)
        return dist.Normal(mean + self.offset, jnp.sqrt(variance + self.noise_variance)).log_prob(jnp.asarray(y))


def _together(blocks: tuple[InducingBlock, ...]) -> InducingBlock:
    """One block of all features. Only their span counts here, as there is no q that could part them."""
    if len(blocks) == 1:
        return blocks[0]
    points = [block.inputs for block in blocks if isinstance(block, Points)]
    if len(points) < len(blocks):
        raise ValueError("inducing is a list with features other than points; give these alone, as one block.")
    return Points(jnp.concatenate(points))


def _check_groups(method: str, groups: object, rows: int) -> None:
    if method != "pitc":
        if groups is not None:
            raise ValueError(f"groups is given, but method is {method!r}; only 'pitc' has groups.")
    elif not isinstance(groups, Groups):
        raise ValueError(f"groups is {groups!r}; it must be npgp Groups, such as npgp.median_split(X, size).")
    elif groups.num_rows != rows:
        raise ValueError(f"groups is a partition of {groups.num_rows} rows, but X has {rows} rows.")


@pytree
@dataclass(frozen=True)
class DegeneratePosterior:
    """
    The posterior under SoR: of functions ``f(x) = A(x)ᵀ ε``, which the whitened inducing values ε determine.

    .. code-block:: python

        gp = npgp.ApproximateGP(kernel, X, Z, noise_variance, method="sor")
        mean, variance = gp.condition(y).mean_and_variance(X)

    :param projector: the factorized inducing features.
    :param q: the posterior of ε; a batch of several outputs is allowed.
    """

    projector: Projector
    q: DenseNormal

    def mean(self, X: ArrayLike) -> jax.Array:
        """Posterior mean of f at inputs X (N, D): batch + (N,)."""
        return whitened_mean(self.projector(checks.inputs(X)), [self.q.loc])

    def variance(self, X: ArrayLike) -> jax.Array:
        """Posterior variance of f at inputs X (N, D): batch + (N,)."""
        return self.mean_and_variance(X)[1]

    def mean_and_variance(self, X: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Posterior mean and variance of f at inputs X (N, D): each batch + (N,)."""
        projection = self.projector(checks.inputs(X))
        mean = whitened_mean(projection, [self.q.loc])
        return mean, jnp.broadcast_to(whitened_variance(projection, [self.q]), mean.shape)

    def covariance(self, X: ArrayLike) -> jax.Array:
        """Joint posterior covariance of f at inputs X (N, D): batch + (N, N)."""
        (A,) = self.projector(checks.inputs(X)).A
        covariance = linalg.gram(jnp.swapaxes(self.q.factor_times(A), -1, -2))
        return jnp.broadcast_to(covariance, self.q.batch_shape + covariance.shape[-2:])

    def sample(self, rng_key: jax.Array, X: ArrayLike, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """Joint draws of f at inputs X (N, D), sample_shape + batch + (N,); one key gives one function at any X."""
        (A,) = self.projector(checks.inputs(X)).A
        return linalg.matmul(self.q.sample(rng_key, sample_shape), A)


# ---------------------------------------------------------------------------------------------------------------
# Λ, by a root R with R Rᵀ = Λ


class Noise(Protocol):
    """What the approximate model adds to Q."""

    def whiten(self, v: jax.Array) -> jax.Array:
        """``R⁻¹ v`` over the last axis, (..., N)."""
        ...

    def color(self, z: jax.Array) -> jax.Array:
        """``R z`` over the last axis, (..., N)."""
        ...

    def log_determinant(self) -> jax.Array:
        """``log |Λ|``."""
        ...


@pytree
@dataclass(frozen=True)
class RowNoise:
    """
    Rows one by one.

    .. code-block:: python

        noise = npgp.collapsed.RowNoise(jnp.full(30, 0.1))  # the standard deviation of each row

    :param scale: the root of Λ's diagonal, (N,).
    """

    scale: jax.Array

    def whiten(self, v):
        return v / self.scale

    def color(self, z):
        return z * self.scale

    def log_determinant(self):
        return 2.0 * jnp.sum(jnp.log(self.scale))


@pytree
@dataclass(frozen=True)
class GroupNoise:
    """
    Rows in blocks: ``R = σ F``, ``F Fᵀ = I + D / σ²`` within each block.

    .. code-block:: python

        groups = npgp.median_split(X, 5)
        factor = jnp.broadcast_to(jnp.eye(groups.size), (*groups.mask.shape, groups.size))  # of D = 0
        noise = npgp.collapsed.GroupNoise(jnp.full(30, 0.3), factor, groups)
        np.testing.assert_allclose(noise.whiten(jnp.asarray(y, jnp.float32)), y / 0.3, rtol=1e-5)

    :param scale: σ, (N,).
    :param factor: F, (G, g, g), with rows of the identity at places that are empty.
    :param groups: which rows these are.
    """

    scale: jax.Array
    factor: jax.Array
    groups: Groups

    def whiten(self, v):
        columns = self._columns(v / self.scale)
        return self._rows(linalg.solve_lower(self.factor, columns), v.shape)

    def color(self, z):
        return self._rows(linalg.matmul(self.factor, self._columns(z)), z.shape) * self.scale

    def _columns(self, v: jax.Array) -> jax.Array:
        """(..., N) as (G, g, product of the others)."""
        return self.groups.gather_rows(jnp.reshape(v, (-1, v.shape[-1])).T)

    def _rows(self, columns: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jnp.reshape(self.groups.scatter(jnp.moveaxis(columns, -1, 0)), shape)

    def log_determinant(self):
        return 2.0 * jnp.sum(jnp.log(self.scale)) + jnp.sum(linalg.log_determinant(self.factor))


def _whitened(projection: Projection, noise: Noise) -> Projection:
    """The projection of rows whitened by Λ, for which Λ is the identity."""
    return Projection(tuple(noise.whiten(A) for A in projection.A), projection.prior_variance)
