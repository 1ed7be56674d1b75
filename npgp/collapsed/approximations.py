"""
Approximations of a GP with Gaussian noise that are no bounds, as NumPyro distributions: SoR, DTC, FITC (= SPGP), PITC,
VIF and power EP.

With ``Q = Aᵀ A``, what the inducing features explain of the covariance, ``D`` what they leave, its diagonal or its
blocks, and power EP's power α in (0, 1]::

    method            log N(y; mean, Q + Λ) − cost    Λ                                 cost
    sor, dtc                                          σ² I                              0
    fitc, pitc                                        σ² I + D                          0
    vif                                               σ² I + D, by Vecchia              0
    pep                                               σ² I + α D                        (1 − α)/(2α) log|I + α D/σ²|
    structured-pep                                    ((1 − α)/σ² + α (σ² I + D)⁻¹)⁻¹   ½ log|I + (1 − α) D/σ²|

Given the inducing values f(x*) has its residual variance d*, but under SoR none. The first five replace the model by
one that is cheap and then compute exactly (Quiñonero-Candela & Rasmussen 2005). Power EP keeps the model and lies
between FITC or PITC, which it is at α = 1, and a bound, which it is in the limit of α → 0: that of the conditional
``prior`` (Bui, Yan & Turner 2017), or of ``tight`` and ``grouped`` if q's residual is structured (docs/theory.md,
section 5.6). All may lie above the exact GP's evidence, and their maximum over inducing inputs may be where they are
furthest above. :class:`npgp.CollapsedGP` has the bounds.

Under other likelihoods the evidence is by one Gaussian pseudo-observation for each row, found as those of the collapsed
bounds are (npgp/variational/row_sites.py). With pseudo-observations ỹ_n of noise variance τ_n the posterior q(f) of a
GP has, whatever the GP,

    KL[q ‖ p] = Σ_n E_q[log N(ỹ_n; f_n, τ_n)] − log p(ỹ)

so that ``log p(ỹ) + Σ_n E_q[log p(y_n | f_n) − log N(ỹ_n; f_n, τ_n)]`` is the ELBO at q, and at the best q its gradient
in the hyperparameters is that of ``log p(ỹ)`` at these pseudo-observations, and of the expectations at these moments.
With the density and the moments of an approximation it is an estimate of the evidence, no bound.

Inducing points and neighbors together: Vecchia's approximation of what inducing points leave, "VIF" (Gyger, Furrer &
Sigrist 2025), the method ``"vif"`` of :class:`npgp.ApproximateGP`.

With c the covariance that the inducing features leave and N(n) neighbors of row n among the rows before it in an order

    C_n = c(X_N(n), X_N(n)) + σ² I,    w_n = C_n⁻¹ c(X_N(n), x_n),    F_n = c(x_n, x_n) + σ² − w_nᵀ c(X_N(n), x_n)

observations are a linear regression on the whitened inducing values whose rows are transformed (docs/theory.md, section
5.7)::

    p(y | ε) = Π_n N(y_n − Σ_j w_nj y_j; ãᵀ_n ε, F_n),    ã_n = a_n − Σ_j w_nj a_j

Without inducing features it is the response NNGP, without neighbors FITC, with all rows before for neighbors the GP.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp import checks, linalg
from npgp.checks import known_key
from npgp.conditionals.base import Observations
from npgp.contract import Stackable, per_stacked
from npgp.densities import JointDensity
from npgp.features import InducingBlock, Points
from npgp.functionals.rows import Functionals, RowsLike, as_rows
from npgp.kernels import Kernel, as_kernel
from npgp.likelihoods import Gaussian, Likelihood
from npgp.likelihoods.continuous import likelihood_or_noise, noise_variance_of
from npgp.neighbors.posterior import NearPosterior, with_neighbors
from npgp.neighbors.search import AMONG, Neighbors, most_correlated, nearest, needed, neighbors_of
from npgp.neighbors.vecchia import MergedFactor, VecchiaFactor, factor_of_rows, new_site_weights, of_sites, what_is_left
from npgp.predictions import FunctionPosterior
from npgp.programs.compiled import STEPS, one_program
from npgp.pytrees import pytree
from npgp.sparse.groups import Groups, kmeans_groups
from npgp.sparse.projection import Projection, Projector, as_blocks, factorize
from npgp.sparse.residuals import GroupResidual, Residual, residual_of
from npgp.variational.blocks import BlockNormal, whitened_mean, whitened_variance
from npgp.variational.posterior import Posterior
from npgp.variational.row_sites import MIN_CURVATURE, Sites, search_sites, warn_unless_arrived, working_sites
from npgp.variational.updates import ScaledProjection, gaussian_optimum

Method = Literal["sor", "dtc", "fitc", "pitc", "vif", "pep", "structured-pep"]
#: Methods that have a power, and those that may have groups.
POWERS, GROUPED = ("pep", "structured-pep"), ("pitc", "pep", "structured-pep")


class ApproximateGP(JointDensity, Stackable):
    """
    Observations of a GP with Gaussian noise under a classical approximation: ``log_prob(y)`` is the exact log density
    of an approximate model, or power EP's estimate of the log evidence; **not a bound** on it. For NUTS, L-BFGS or SVI
    over hyperparameters and inducing inputs:

    .. code-block:: python

        numpyro.sample(
            "y",
            npgp.ApproximateGP(kernel, X, Z, npgp.Gaussian(scale=0.3), method="fitc"),
            obs=y,
        )

    The cost is O(N M²), and O(N g²) more with blocks of g rows. Several outputs that share the GP's
    hyperparameters are rows of y: ``log_prob`` maps (..., N) to (...).

    - ``"sor"``, subset of regressors (Smola & Bartlett 2001): f is ``A(x)ᵀ ε``, a model of finitely many parameters.
      Its predictive variance goes to 0 away from the inducing points, where it should be largest.
    - ``"dtc"``, deterministic training conditional (Seeger et al. 2003): the density and the mean of SoR, and a
      predictive variance with the residual's, never below SoR's. The density is SGPR's bound without its penalty.
    - ``"fitc"``, fully independent training conditional, also SPGP (Snelson & Ghahramani 2006): rows keep their own
      residual variance. It may take residual variance for noise, and learns inducing inputs that make it so.
    - ``"pitc"``, partially independent training conditional (Schwaighofer & Tresp 2003): rows keep their residual
      covariance within blocks. One block of all rows is the exact GP at these rows; blocks of one row are FITC.
    - ``"vif"``, Vecchia-inducing-points full-scale approximation (Gyger, Furrer & Sigrist 2025): each row keeps its
      residual covariance with its neighbors. It has what inducing points know, of far away, and what neighbors know.
      With all rows before it for neighbors it is the GP; O(N k (k² + M)) more than FITC for k neighbors. For other
      likelihoods than Gaussian noise each row has a Gaussian pseudo-observation, which a search finds (docs/theory.md,
      section 5.7); ``log_prob`` is an estimate of the log evidence then.
    - ``"pep"``, power EP (Bui, Yan & Turner 2017) at its fixed point, row by row or within blocks: ``power=1`` is FITC
      or PITC, and small powers are near SGPR's bound, the conditional ``prior``.
    - ``"structured-pep"``, power EP where the residual's posterior is not the prior's (the idea: Bui & Titsias 2025;
      the closed form: docs/theory.md, section 5.6): ``power=1`` is FITC or PITC again, and small powers are near
      the bounds of the conditionals ``tight`` and ``grouped``.

    :param kernel: the kernel.
    :param X: training inputs, shape (N, D), or functionals.
    :param inducing: Z of shape (M, D), or a block of features. A list of arrays means all their points together.
    :param likelihood: Gaussian noise, as ``npgp.Gaussian(scale=0.3)``; for ``"vif"`` any of one latent value.
    :param noise_variance: in its stead σ², a scalar or one for each row (N,).
    :param offset: what is added to f, such as a mean function's values at X; a scalar or (N,). Add its values at new
        inputs to predictions.
    :param method: which of the seven.
    :param power: α in (0, 1], for ``"pep"`` and ``"structured-pep"`` alone; may be traced.
    :param groups: for ``"pitc"`` and power EP, blocks (:func:`npgp.sparse.median_split`,
        :func:`npgp.sparse.kmeans_groups`). If they are left out power EP goes row by row, and those of PITC are made
        of X by k-means, with at most M rows each.
    :param neighbors: for ``"vif"`` at inputs, and it needs them: made of X by :func:`npgp.neighbors.nearest_before`,
        best with ``kernel=`` and ``inducing=``; or their number, 10 to 30 for most data, to be found as for
        :class:`npgp.neighbors.ResponseNNGP`, several measurements of one site being its mean.
    :param jitter: relative jitter tried first.
    :raises TypeError: for another likelihood than Gaussian noise and another method than ``"vif"``.
    :raises ValueError: for inputs of the wrong shape, for a noise variance known not to be positive, for a likelihood
        of several latent values, for blocks of features other than points in a list, for a power outside (0, 1],
        missing or with a method that has none, and for groups of other rows or with a method that has none.
    """

    support = constraints.real_vector
    counted = "X"
    pytree_data_fields = ("kernel", "X", "block", "likelihood", "offset", "groups", "neighbors", "power")
    pytree_aux_fields = ("method", "jitter")

    def __init__(
        self,
        kernel: Kernel,
        X: RowsLike,
        inducing: object,
        likelihood: Gaussian | None = None,
        *,
        noise_variance: ArrayLike | None = None,
        offset: ArrayLike = 0.0,
        method: Method = "fitc",
        power: ArrayLike | None = None,
        groups: Groups | None = None,
        neighbors: Neighbors | int | None = None,
        jitter: float | None = None,
        validate_args=None,
    ):
        if method not in get_args(Method):
            raise ValueError(f"method is {method!r}; it must be one of {', '.join(map(repr, get_args(Method)))}.")
        self.likelihood: Likelihood = likelihood_or_noise(likelihood, noise_variance, only_gaussian=method != "vif")
        if self.likelihood.num_latents > 1:
            raise ValueError(
                f"likelihood is {self.likelihood.described}, which has {self.likelihood.num_latents} latent values a "
                "row; method 'vif' is for one."
            )
        _check_power(method, power)
        self.kernel = as_kernel(kernel)
        self.X = as_rows(X)
        self.block = _together(as_blocks(inducing))
        rows = self.X.shape[0]
        if groups is None and method == "pitc":
            if any(map(checks.is_traced, jax.tree.leaves(X))):
                raise ValueError("X is traced, so it gives no blocks: pass groups=npgp.sparse.median_split(X, size).")
            groups = kmeans_groups(known_key(), X, self.block.size)
        _check_groups(method, groups, rows)
        if isinstance(self.likelihood, Gaussian):
            checks.require_per_row(self.likelihood.variance, "noise_variance", rows)
        checks.require_per_row(offset, "offset", rows)
        self.offset = offset
        self.method = method
        self.power = power
        self.groups = groups
        if (neighbors is None) == (method == "vif"):
            is_there = "missing" if neighbors is None else "given"
            raise ValueError(
                f"neighbors is {is_there}, but method is {method!r}; 'vif' needs them, such as neighbors=15, and no "
                "other method has any."
            )
        self.neighbors: Neighbors | None = None
        if neighbors is not None:
            if isinstance(X, Functionals):
                raise ValueError("X has functionals; method 'vif' is for values of f at inputs (N, D), with neighbors.")
            self.searched = not isinstance(neighbors, Neighbors)
            self.neighbors = neighbors_of(X, neighbors, kernel=self.kernel, inducing=self.block, merge=True)
        self.jitter = jitter
        super().__init__((), (rows,), validate_args=validate_args)
        self.count_axes()

    @property
    def noise_variance(self) -> ArrayLike:
        """σ² of Gaussian noise."""
        return noise_variance_of(self.likelihood)

    @per_stacked
    def log_prob(self, value):
        """The method's log density of observations y of shape (..., N), or its estimate: (...)."""
        rows = self._observations(value)
        projector, projection = self._projected()
        if isinstance(self.likelihood, Gaussian):
            noise, cost = self._noise(projector, projection, self.likelihood.variance)
            return _log_density(projection, noise, rows.y - self.offset) - cost

        def density(y: jax.Array) -> jax.Array:
            return self._estimate(projector, projection, replace(rows, y=y)).log_density

        return jnp.vectorize(density, signature="(n)->()")(rows.y)

    def _observations(self, y: Any) -> Observations:
        shape, dtype = (..., *self.event_shape), self.X.dtype
        return Observations.of(y, self.likelihood, shape, offset=self.offset, dtype=dtype)

    def _projected(self) -> tuple[Projector, Projection]:
        projector = factorize(self.kernel, (self.block,), self.jitter)
        return projector, projector(self.X)

    def _noise(self, projector: Projector, projection: Projection, variance: Any) -> tuple[Noise, jax.Array]:
        """Λ for noise of a variance, and what is taken off the log density."""
        variance = jnp.broadcast_to(jnp.asarray(variance, self.X.dtype), self.X.shape[:1])
        none = jnp.zeros((), variance.dtype)
        if self.method in ("sor", "dtc"):
            return RowNoise(jnp.sqrt(variance)), none
        if self.method == "vif":
            assert isinstance(self.X, jax.Array)
            return VecchiaNoise.of(projector, self.X, projection, needed(self.neighbors), variance), none
        residual = residual_of(projector, self.X, projection, (True,), self.groups)
        # FITC and PITC are power EP with the power 1, structured or not.
        power = jnp.asarray(1.0 if self.power is None else self.power, variance.dtype)
        return _power_ep(residual, variance, power, self.method == "structured-pep")

    def _estimate(self, projector: Projector, projection: Projection, rows: Observations) -> Estimate:
        """Of VIF under any likelihood, with the pseudo-observations that stand for the rows."""

        def gaussian(arrays: tuple[Projector, Projection], y: jax.Array, variance: jax.Array) -> Any:
            noise, _ = self._noise(*arrays, variance)
            posterior = self._vif_posterior(*arrays, noise, y, variance)
            return _log_density(arrays[1], noise, y), lambda: self._of_rows(posterior.at_points())

        return estimate(gaussian, (projector, projection), rows, projection.prior_variance)

    def _vif_posterior(
        self, projector: Projector, projection: Projection, noise: Noise, y: jax.Array, variance: jax.Array
    ) -> VIFPosterior:
        (q,) = gaussian_optimum(_whitened(projection, noise), noise.whiten(y), 1.0, ("dense",))
        (X, A), y, merged, neighbors = of_sites((self.X, projection.A[0].T), y, variance, needed(self.neighbors))
        return VIFPosterior(projector, q, X, A.T, y, neighbors, merged)

    def _of_rows(self, values: Any) -> Any:
        """Values of sites, (S,), at the rows."""
        repeats = needed(self.neighbors).repeats
        return values if repeats is None else jax.tree.map(lambda v: v[repeats.site], values)

    def sample(self, key, sample_shape=()):
        """
        Joint draws of observations from the approximate model, whose covariance is Q + Λ, at O(N M²). Power EP keeps
        the model, and has the draws of FITC or PITC, rows or blocks of which are as the GP's.
        """
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        model = self
        if self.method in POWERS:
            model = copy.copy(self)
            model.power = 1.0
        variance = self.likelihood.variance if isinstance(self.likelihood, Gaussian) else 0.0
        projector, projection = self._projected()
        noise, _ = model._noise(projector, projection, variance)
        (A,) = projection.A
        shape, keys = sample_shape + self.batch_shape, jax.random.split(key, 3)
        f = linalg.matmul(jax.random.normal(keys[0], (*shape, A.shape[0]), A.dtype), A)
        values = self.offset + f + noise.color(jax.random.normal(keys[1], shape + self.event_shape, A.dtype))
        return values if isinstance(self.likelihood, Gaussian) else self.likelihood.sample(keys[2], values)

    def condition(self, y: ArrayLike) -> Posterior | DegeneratePosterior | VIFPosterior:
        """
        The posterior of f, without the offset, given observations y of shape (..., N): the method's own predictive
        equations (Quiñonero-Candela & Rasmussen 2005, eqs. 16, 20, 24 and 31; power EP's are those of 24 and 31 with
        its own Λ).

        :return: a :class:`npgp.variational.Posterior`; for ``"sor"``, whose functions have no residual,
            a :class:`DegeneratePosterior`; for ``"vif"`` a :class:`VIFPosterior`.
        :raises ValueError: if y has NaN or another number of rows, or is not possible for the likelihood; for several
            outputs, where noise is not Gaussian.
        """
        rows = self._observations(y)
        if not isinstance(self.likelihood, Gaussian) and rows.y.ndim > 1:
            raise ValueError(f"y has shape {rows.y.shape}; condition takes one of {self.event_shape} of these.")
        posterior, kl_gap = one_program(lambda: self._conditioned(rows), options=STEPS)
        words = "where the search ended another step would move the posterior by {gap}; use float64"
        warn_unless_arrived(kl_gap, f"ApproximateGP: {words}.")
        return posterior

    def _conditioned(self, rows: Observations) -> tuple[Any, jax.Array]:
        """The posterior, and what a search leaves to go."""
        projector, projection = self._projected()
        kl_gap = jnp.zeros((), self.X.dtype)
        if isinstance(self.likelihood, Gaussian):
            y, variance = rows.y - self.offset, self.likelihood.variance
        else:
            _, y, variance, kl_gap = self._estimate(projector, projection, rows)
        noise, _ = self._noise(projector, projection, variance)
        if self.method == "vif":
            return self._vif_posterior(projector, projection, noise, y, jnp.asarray(variance, y.dtype)), kl_gap
        (q,) = gaussian_optimum(_whitened(projection, noise), noise.whiten(y), 1.0, ("dense",))
        return DegeneratePosterior(projector, q) if self.method == "sor" else Posterior(projector, (q,)), kl_gap

    def log_likelihood(self, y: ArrayLike) -> jax.Array:
        """
        Log likelihood row by row given the posterior, ``log ∫ p(y_n | f_n) p(f_n | y) df_n``: (..., N).

        How well the posterior fits the data it has seen; not for LOO.
        """
        mean, variance = self.condition(y).mean_and_variance(self.X)
        return self.likelihood.log_marginal(jnp.asarray(y, mean.dtype), mean + self.offset, variance)


def _log_density(projection: Projection, noise: Noise, y: jax.Array) -> jax.Array:
    """``log N(y; 0, Q + Λ)``."""
    scaled = ScaledProjection.of(_whitened(projection, noise), 1.0)
    white = noise.whiten(y)
    log_det = noise.log_determinant() + linalg.log_determinant(scaled.factor(0))
    square = jnp.sum(jnp.square(white), -1) - scaled.explained(white)
    return -0.5 * (square + log_det + y.shape[-1] * math.log(2.0 * math.pi))


def _together(blocks: tuple[InducingBlock, ...]) -> InducingBlock:
    """Merge features into one block: without q only their span counts."""
    if len(blocks) == 1:
        return blocks[0]
    points = [block.inputs for block in blocks if isinstance(block, Points)]
    if len(points) < len(blocks):
        raise ValueError("inducing is a list with features other than points; give these alone, as one block.")
    return Points(jnp.concatenate(points))


def _check_power(method: str, power: Any) -> None:
    if method not in POWERS:
        if power is not None:
            raise ValueError(f"power is given, but method is {method!r}; only 'pep' and 'structured-pep' have one.")
        return
    if jnp.ndim(0.0 if power is None else checks.array(power, "power")):
        raise ValueError(f"power has shape {jnp.shape(power)}; it must be a scalar.")
    if power is None or (not checks.is_traced(power) and not 0.0 < float(power) <= 1.0):
        raise ValueError(
            f"power is {power}; for method {method!r} it must be above 0 and at most 1 (npgp.CollapsedGP has the "
            "limit of 0)."
        )


def _check_groups(method: str, groups: object, rows: int) -> None:
    if groups is None and method != "pitc":
        return
    if method not in GROUPED:
        raise ValueError(f"groups is given, but method is {method!r}; only 'pitc' and power EP have groups.")
    if not isinstance(groups, Groups):
        raise ValueError(f"groups is {groups!r}; it must be npgp Groups, such as npgp.sparse.median_split(X, size).")
    groups.of_rows(rows, "X has")


@pytree
class DegeneratePosterior(FunctionPosterior):
    """
    The posterior under SoR: of functions ``f(x) = A(x)ᵀ ε``, which the whitened inducing values ε determine.

    :param projector: the factorized inducing features.
    :param q: the posterior of ε; a batch of several outputs is allowed.
    """

    projector: Projector
    q: BlockNormal

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch of outputs."""
        return self.q.batch_shape

    def _moments(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        projection = self.projector(rows)
        mean = whitened_mean(projection, [self.q.loc])
        return mean, jnp.broadcast_to(whitened_variance(projection, [self.q]), mean.shape)

    def _covariance(self, rows: jax.Array) -> jax.Array:
        (A,) = self.projector(rows).A
        covariance = linalg.gram(jnp.swapaxes(self.q.factor_times(A), -1, -2))
        return jnp.broadcast_to(covariance, self.batch_shape + covariance.shape[-2:])

    def _sample(self, rng_key: jax.Array, rows: jax.Array, sample_shape: tuple[int, ...]) -> jax.Array:
        """Draws of f; one key gives one function at any inputs."""
        (A,) = self.projector(rows).A
        return linalg.matmul(self.q.sample(rng_key, sample_shape), A)


# ---------------------------------------------------------------------------------------------------------------
# Λ, by a root R with R Rᵀ = Λ


class Noise(Protocol):
    """Covariance Λ that the approximate model adds to Q."""

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
class RowNoise:
    """
    Rows one by one.

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
class GroupNoise:
    """
    Rows in blocks: ``R = σ F``, ``F Fᵀ = I + D / σ²`` within each block.

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


def _power_ep(residual: Residual, variance: jax.Array, power: jax.Array, structured: bool) -> tuple[Noise, jax.Array]:
    """
    Λ of power EP, and what it takes off the log density (docs/theory.md, section 5.6).

    With ``E = D / σ²``, Λ is ``σ² (I + α E (I + c E)⁻¹)``, c being 1 − α if the residual is structured, else 0.

    :param residual: the residual's prior, row by row or within groups.
    :param variance: σ², (N,).
    :param power: α.
    """
    c = 1.0 - power if structured else jnp.zeros_like(power)
    if isinstance(residual, GroupResidual):
        identity = jnp.eye(residual.covariance.shape[-1], dtype=variance.dtype)
        root = residual.roots(1.0 / variance)
        E, inner = root[..., :, None] * residual.covariance * root[..., None, :], c
        if structured:
            L, _ = linalg.cholesky(identity + c * E, jitter=0.0)
            E, inner = linalg.solve_lower(L, linalg.solve_lower(L, E), transpose=True), linalg.log_determinant(L)
        factor, _ = linalg.cholesky(identity + power * E, jitter=0.0)
        noise: Noise = GroupNoise(jnp.sqrt(variance), factor, residual.groups)
        outer = linalg.log_determinant(factor)
    else:
        E = residual.variance / variance
        share = power * E / (1.0 + c * E)
        noise = RowNoise(jnp.sqrt(variance * (1.0 + share)))
        inner, outer = jnp.log1p(c * E), jnp.log1p(share)
    return noise, 0.5 * jnp.sum(inner if structured else (1.0 - power) / power * outer)


def _whitened(projection: Projection, noise: Noise) -> Projection:
    """The projection of rows whitened by Λ, for which Λ is the identity."""
    return Projection(tuple(noise.whiten(A) for A in projection.A), projection.prior_variance)


#: Most steps of the search; it ends when a step has moved q(f) by no more nats than the tolerance.
MAX_STEPS, TOLERANCE = 30, 1e-4
#: Density and moments are not of one Gaussian, so a step of the search may lower the estimate by this share of it.
SLACK = 1e-4


class Estimate(NamedTuple):
    """
    :param log_density: the estimate.
    :param y: the pseudo-observations of f less the offset, (N,).
    :param noise_variance: their noise variances, (N,).
    :param kl_gap: nats by which one more step of the search would move q(f).
    """

    log_density: jax.Array
    y: jax.Array
    noise_variance: jax.Array
    kl_gap: jax.Array


def estimate(
    gaussian: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Callable[[], tuple[jax.Array, jax.Array]]]],
    arrays: Any,
    rows: Observations,
    prior_variance: jax.Array,
) -> Estimate:
    """
    :param gaussian: of arrays, observations (N,) and their noise variances (N,): their log density, and what computes
        f's means and variances at the rows.
    :param arrays: what hyperparameters decide of it.
    :param rows: what is observed, (N,), of one latent value.
    :param prior_variance: of f at the rows, (N,).
    """
    fixed, observed = lax.stop_gradient((arrays, rows))

    def observations(sites: Sites) -> tuple[jax.Array, jax.Array]:
        return sites.shift / sites.precision, 1.0 / sites.precision

    def solve(sites: Sites) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        y, noise = observations(sites)
        log_density, moments = gaussian(fixed, y, noise)
        mean, variance = moments()
        square = jnp.square(y - mean) + variance
        expected = -0.5 * jnp.sum(jnp.log(noise) + square / noise + math.log(2.0 * math.pi))
        return expected, (mean, variance, expected - log_density)

    def expected_log_prob(mean: jax.Array, variance: jax.Array, rows: Observations = observed) -> jax.Array:
        return jnp.sum(rows.likelihood.expected_log_prob(rows.y, mean + rows.offset, variance))

    prior = lax.stop_gradient(prior_variance)
    offset = jnp.broadcast_to(observed.offset, prior.shape)
    start = working_sites(observed.likelihood, observed.y, offset, prior, offset)
    least = MIN_CURVATURE / prior
    search = search_sites(solve, expected_log_prob, start, MAX_STEPS, TOLERANCE, slack=SLACK, least=least)
    found, kl_gap = lax.stop_gradient(search)
    y, noise = observations(found.sites)
    log_density, _ = gaussian(arrays, y, noise)
    value = log_density + expected_log_prob(found.mean, found.variance, rows) - found.solved
    return Estimate(value, y, noise, kl_gap)


@pytree
class VecchiaNoise:
    """
    What the inducing features leave and the noise together, by Vecchia's approximation: the Λ of the method.

    :param factor: of Λ's precision.
    """

    factor: VecchiaFactor | MergedFactor

    @classmethod
    def of(
        cls, projector: Projector, X: jax.Array, projection: Projection, neighbors: Neighbors, variance: jax.Array
    ) -> VecchiaNoise:
        """
        :param projector: the factorized inducing features, in one block.
        :param X: inputs, (N, D).
        :param projection: of these.
        :param neighbors: their order and neighbors.
        :param variance: σ², (N,).
        """
        sites, covariance = (X, projection.A[0].T), what_is_left(projector.kernel)
        return cls(factor_of_rows(covariance, sites, neighbors, variance, jitter=0.0))

    def whiten(self, v: jax.Array) -> jax.Array:
        """``Λ^−½ v`` over the last axis, (..., N)."""
        return self.factor.whiten(v)

    def color(self, z: jax.Array) -> jax.Array:
        """``Λ^½ z`` over the last axis, (..., N)."""
        return self.factor.color(z)

    def log_determinant(self) -> jax.Array:
        """``log |Λ|``."""
        return -self.factor.log_determinant()


@pytree
class VIFPosterior(NearPosterior):
    """
    The posterior of f by inducing points and neighbors, of :meth:`npgp.ApproximateGP.condition`: at new inputs f is
    regressed on the observations of its nearest rows, beside the inducing values, and independent between inputs given
    these values, but in joint draws (:class:`npgp.neighbors.NearPosterior`).

    :param projector: the factorized inducing features.
    :param q: the posterior of the whitened inducing values; a batch of several outputs is allowed.
    :param X: training inputs, (N, D).
    :param A: their projections, (M, N).
    :param y: observations less the offset, batch + (N,).
    :param neighbors: as the method had them: they say how many neighbors are used, and in which units of distance.
    :param noise_variance: σ², a scalar or (N,).
    """

    projector: Projector
    q: BlockNormal
    X: jax.Array
    A: jax.Array
    y: jax.Array
    neighbors: Neighbors
    noise_variance: ArrayLike

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch of outputs."""
        return self.y.shape[:-1]

    def at_points(self) -> tuple[jax.Array, jax.Array]:
        """Means and variances of f at the training inputs."""
        assert self.neighbors.around is not None
        return self._moments((self.X, jnp.asarray(self.neighbors.around)))

    def _points(self) -> tuple[jax.Array, Neighbors]:
        return self.X, self.neighbors

    def _explained(self, rng_key: jax.Array, sample_shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        epsilon = self.q.sample(rng_key, sample_shape)
        return lambda A: linalg.matmul(epsilon, A)

    def _at_points(self, X: jax.Array, times: Callable[[jax.Array], jax.Array] | None) -> tuple[Any, ...]:
        (A,), covariance = self.projector(X).A, what_is_left(self.projector.kernel)
        known, times = (0.0, self.q.factor_times) if times is None else (self.y, times)
        return covariance, (X, A.T), (self.X, self.A.T), self.noise_variance, known - times(self.A), times(A)

    def _rows(self, X: Any, neighbors: ArrayLike | None, batch_shape: tuple[int, ...]) -> Any:
        if neighbors is not None or checks.is_traced(X):
            rows = with_neighbors(X, neighbors, self.X, self.neighbors)
            return rows.X, rows.neighbors
        X, size = checks.inputs(X), self.neighbors.size_at_new
        near = nearest(X, self.X, min(AMONG * size, len(self.X)), scale=self.neighbors.scale)
        sites = X, jax.jit(Projector.__call__)(self.projector, X).A[0].T
        return X, jnp.asarray(most_correlated(self.projector.kernel, sites, (self.X, self.A.T), near, size))

    def _regression(self, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """f at rows given ε: its mean at ε = 0, batch + (N*,), its slopes in ε, (M, N*), and its variance, (N*,)."""
        X, near = rows
        (A,) = self.projector(X).A
        sites, covariance = (self.X, self.A.T), what_is_left(self.projector.kernel)
        w, variance = new_site_weights(covariance, (X, A.T), sites, near, self.noise_variance, 0.0)
        mean = jnp.sum(w * jnp.take(self.y, near, axis=-1), axis=-1)
        return mean, A - jnp.einsum("nk,nkm->mn", w, self.A.T[near]), variance

    def _moments(self, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        mean, slopes, variance = self._regression(rows)
        mean = mean + linalg.matmul(self.q.loc, slopes)
        variance = variance + jnp.sum(jnp.square(self.q.factor_times(slopes)), axis=-2)
        return mean, jnp.broadcast_to(variance, mean.shape)

    def _covariance(self, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        _, slopes, variance = self._regression(rows)
        covariance = linalg.gram(jnp.swapaxes(self.q.factor_times(slopes), -1, -2)) + jnp.diag(variance)
        return jnp.broadcast_to(covariance, self.batch_shape + covariance.shape[-2:])

    def _sample(
        self, rng_key: jax.Array, rows: tuple[jax.Array, jax.Array], sample_shape: tuple[int, ...]
    ) -> jax.Array:
        mean, slopes, variance = self._regression(rows)
        q_key, key = jax.random.split(rng_key)
        mean = mean + linalg.matmul(self.q.sample(q_key, sample_shape), slopes)
        return mean + jnp.sqrt(variance) * jax.random.normal(key, mean.shape, mean.dtype)
