"""
Inducing features of zonal kernels: spherical harmonics, whose covariance is diagonal, and neural-network activations,
a layer of units with trainable directions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial, all_leaves
from jax.typing import ArrayLike
from scipy.linalg import lapack, solve_triangular

from npgp import checks
from npgp.checks import require_positive
from npgp.kernels import Kernel, gegenbauer
from npgp.kernels.zonal import Zonal, as_zonal
from npgp.linalg import matmul, safe_sqrt
from npgp.programs.backend import maximum
from npgp.programs.later import see_later
from npgp.pytrees import pytree, static

#: Most harmonics in one block.
MAX_HARMONICS = 4000


@pytree
class SphericalHarmonics:
    """
    All spherical harmonics of some levels, as inducing features of a zonal kernel (:class:`npgp.kernels.Zonal`).

    They are the kernel's eigenfunctions: f's coefficients on them are independent, and they explain more of f than any
    other features of their number do, on average over the sphere. There is nothing in them to learn. In many
    dimensions few levels are affordable: d = 33 has 33 harmonics at level 1, 560 at 2 and 6,512 at 3.

    The literature's features have covariance ``diag(1/λ_ℓ)`` and covariance ``‖x‖ Y_ℓj(x/‖x‖)`` with f(x). These are
    the same times √λ_ℓ, which changes nothing in a model and lets a level that the kernel lacks (λ_ℓ = 0) be harmless:
    ``K_uu = I`` and ``K_uf = σ √λ_ℓ ‖x̃‖ Y_ℓj(x̃/‖x̃‖)``.

    .. code-block:: python

        kernel = npgp.kernels.ZonalArcCosine(weight_variance=1.0, bias_variance=1.0)
        block = npgp.features.SphericalHarmonics.within(9, kernel, columns=1)
        assert block.size <= 9

    :param levels: increasing, such as ``(0, 1, 2)``; :meth:`within` chooses them for a kernel.
    :param dimension: d, the number of input columns and one for the bias.
    :raises TypeError: for levels or a dimension that are not whole numbers.
    :raises ValueError: for levels that are not increasing, and for more than 4,000 harmonics.

    Source: Dutordoir, Durrande & Hensman 2020.
    """

    levels: tuple[int, ...] = static(None)
    dimension: int = static(None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dimension", gegenbauer.check_dimension(self.dimension))
        object.__setattr__(self, "levels", gegenbauer.check_levels(self.levels))
        if self.size > MAX_HARMONICS:
            counts = ", ".join(f"{n:,} at level {level}" for level, n in zip(self.levels, self.counts, strict=True))
            raise ValueError(
                f"levels {self.levels} in dimension {self.dimension} are {self.size:,} spherical harmonics ({counts}); "
                f"at most {MAX_HARMONICS:,} are possible."
            )

    @classmethod
    def within(cls, size: int, kernel: Kernel, columns: int) -> SphericalHarmonics:
        """
        The harmonics of as many whole levels as fit in a number of features, the kernel's largest λ_ℓ first.

        Levels are chosen for the kernel's hyperparameters, which must be known: in a model that learns them, call it
        before with initial values. Levels that the kernel lacks are left out.

        :param size: most features, up to 4,000.
        :param kernel: the zonal kernel.
        :param columns: the number of input columns.
        :raises TypeError: for a kernel with traced hyperparameters.
        :raises ValueError: if not even one level fits.
        """
        zonal, _ = as_zonal(kernel, cls.__name__)
        if any(map(checks.is_traced, jax.tree.leaves(zonal))):
            raise TypeError(
                "kernel has traced hyperparameters, such as a model's numpyro.param; levels are chosen for known ones: "
                "call within before, outside the model, for a kernel with initial values."
            )
        d = zonal.dimension(columns)
        limit = min(size, MAX_HARMONICS)
        candidates, counted = 0, 0
        while counted <= 2 * limit and gegenbauer.multiplicity(d, candidates) <= limit:  # every other one may be absent
            counted += gegenbauer.multiplicity(d, candidates)
            candidates += 1
        with jax.ensure_compile_time_eval():  # inside a traced model, too
            eigenvalues = np.asarray(_eigenvalues(zonal, candidates, d)) if candidates else np.zeros(0)
        levels: list[int] = []
        for level in sorted(range(candidates), key=lambda level: -eigenvalues[level]):
            count = gegenbauer.multiplicity(d, level)
            if eigenvalues[level] <= 0 or count > limit:
                break
            limit -= count
            levels.append(level)
        if not levels:
            raise ValueError(f"size is {size}; it must be at least 1, for the harmonic of level 0.")
        return cls(tuple(sorted(levels)), d)

    @property
    def counts(self) -> tuple[int, ...]:
        """Harmonics of each level."""
        return tuple(gegenbauer.multiplicity(self.dimension, level) for level in self.levels)

    @property
    def size(self) -> int:
        """Number of harmonics M."""
        return sum(self.counts)

    def gram_diagonal(self, kernel: Kernel) -> jax.Array:
        """The diagonal of :meth:`gram`, which has nothing else, (M,)."""
        return jnp.ones(self.size, as_zonal(kernel, type(self).__name__)[0].dtype)

    def gram(self, kernel: Kernel) -> jax.Array:
        """The identity, (M, M)."""
        return jnp.diag(self.gram_diagonal(kernel))

    def cross(self, kernel: Kernel, X: ArrayLike) -> jax.Array:
        """``σ √λ_ℓ ‖x̃‖ Y_ℓj(x̃/‖x̃‖)``, (M, N)."""
        zonal, scale = as_zonal(kernel, type(self).__name__)
        radius, unit = zonal.polar(jnp.asarray(X))
        require_dimension(self, unit.shape[-1])
        eigenvalues = zonal.eigenvalues(self.levels, self.dimension)
        amplitude = safe_sqrt(scale * zonal.variance * eigenvalues).astype(unit.dtype)
        return self.spread(amplitude)[:, None] * (radius * self(unit))

    def cross_features(self, kernel: Kernel, other: object) -> jax.Array:
        """
        Covariance with the harmonics of another block, which is 0, or with activations; (M, M').

        :raises ValueError: if harmonics have a level in common.
        """
        if hasattr(other, "with_harmonics"):
            return other.with_harmonics(kernel, self).T
        if not isinstance(other, SphericalHarmonics):
            return NotImplemented
        require_dimension(self, other.dimension)
        repeated = [level for level in self.levels if level in other.levels]
        if repeated:
            raise ValueError(
                f"two inducing blocks have the same spherical harmonics, of levels {repeated}: nothing is left "
                "of the second; give each block levels of its own."
            )
        return jnp.zeros((self.size, other.size), as_zonal(kernel, type(self).__name__)[0].dtype)

    def spread(self, values: jax.Array) -> jax.Array:
        """One value for each harmonic from one for each level, (M,)."""
        return jnp.repeat(values, np.array(self.counts), total_repeat_length=self.size)

    def __call__(self, unit: jax.Array) -> jax.Array:
        """
        The harmonics Y_ℓj, orthonormal under the sphere's uniform probability measure.

        :param unit: points of the sphere, (N, d).
        :return: (M, N), level by level.
        """
        return jnp.concatenate([_harmonics(self.dimension, level, unit) for level in self.levels])


@functools.partial(jax.jit, static_argnums=(1, 2))
def _eigenvalues(zonal: Zonal, levels: int, dimension: int) -> jax.Array:
    return zonal.eigenvalues(range(levels), dimension)


def require_dimension(block: Any, dimension: int) -> None:
    """Raise ``ValueError`` if a spherical block is made for another dimension than the kernel's inputs have."""
    if block.dimension != dimension:
        raise ValueError(
            f"the {type(block).__name__} features have dimension {block.dimension}, but the kernel's inputs have "
            f"{dimension - 1} columns, which with the bias makes {dimension}."
        )


def _harmonics(dimension: int, level: int, unit: jax.Array) -> jax.Array:
    points, whiten = fundamental_system(dimension, level)
    t = matmul(jnp.asarray(points.astype(unit.dtype)), unit.T)
    one_level = gegenbauer.series(jnp.ones(1, unit.dtype), dimension, (level,), t)
    return matmul(jnp.asarray(whiten.astype(unit.dtype)), one_level)


@functools.cache
def fundamental_system(dimension: int, level: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Points v_i of the sphere, one for each harmonic of a level, on which these are linearly independent.

    ``Y(u) = W P_ℓ(V u)``: with ``G_ij = N P_ℓ(v_i·v_j)`` and G = L Lᵀ, ``W = N L⁻¹`` makes them orthonormal. Of random
    points, those are taken that a pivoted Cholesky factorization takes first, which makes the volume large and G well
    conditioned. Computed once for each dimension and level, in float64, from a fixed seed; 2,000 harmonics take some
    seconds.

    :return: V (N, d) and W (N, N).
    """
    N = gegenbauer.multiplicity(dimension, level)
    # Directions and their opposites say the same of a level.
    candidates = np.random.default_rng(0).normal(size=(N + min(3 * N, 3000), dimension))
    candidates /= np.linalg.norm(candidates, axis=1, keepdims=True)
    G = N * gegenbauer.polynomials(dimension, (level,), candidates @ candidates.T)[0]
    _, pivots, rank, _ = lapack.dpstrf(G, lower=1, tol=1e-10 * N)
    assert rank >= N, f"found {rank} of {N} independent points for level {level} in dimension {dimension}"
    rows = np.sort(pivots[:N] - 1)
    L = np.linalg.cholesky(G[np.ix_(rows, rows)])
    return candidates[rows], N * solve_triangular(L, np.eye(N), lower=True)


#: A shape σ: a function of an array of cosines in [−1, 1], elementwise.
Shape = Callable[[jax.Array], ArrayLike]


@pytree
class LeakyReLU:
    """
    ``t`` for positive t, else ``slope · t``.

    .. code-block:: python

        # Inputs of one column.
        units = npgp.features.Activations(np.eye(2), shape=npgp.features.LeakyReLU())

    :param slope: a scalar; with 0, the rectified linear unit.
    """

    slope: ArrayLike = 0.01

    def __call__(self, t: jax.Array) -> jax.Array:
        return jnp.where(t > 0.0, t, self.slope * t)

    def coefficients(self, dimension: int, levels: Sequence[int]) -> jax.Array:
        """s_ℓ as :func:`npgp.kernels.gegenbauer.coefficients` gives them, in closed form."""
        rectified = np.array([gegenbauer.half_power(dimension, level, 1) for level in levels])
        linear = np.array([1.0 / dimension if level == 1 else 0.0 for level in levels])
        N = gegenbauer.multiplicities(dimension, levels)
        return (1.0 - self.slope) * (N * rectified) + self.slope * (N * linear)


@pytree
class ReLU:
    """
    The rectified linear unit, ``max(t, 0)``.

    .. code-block:: python

        # Inputs of one column.
        units = npgp.features.Activations(np.eye(2), shape=npgp.features.ReLU())
    """

    def __call__(self, t: jax.Array) -> jax.Array:
        return maximum(t, 0.0)

    def coefficients(self, dimension: int, levels: Sequence[int]) -> jax.Array:
        """s_ℓ as :func:`npgp.kernels.gegenbauer.coefficients` gives them, in closed form."""
        return LeakyReLU(0.0).coefficients(dimension, levels)


@pytree
class Softplus:
    """
    ``log(1 + exp(βt)) / β``, a smooth ReLU.

    .. code-block:: python

        # Inputs of one column.
        units = npgp.features.Activations(np.eye(2), shape=npgp.features.Softplus())

    :param sharpness: β > 0. At 1 it is the usual softplus, which is nearly linear between −1 and 1.
    """

    sharpness: ArrayLike = 3.0

    def __post_init__(self) -> None:
        require_positive(self.sharpness, "Softplus sharpness")

    def __call__(self, t: jax.Array) -> jax.Array:
        return jax.nn.softplus(self.sharpness * t) / self.sharpness


@pytree
class Probit:
    """
    ``Φ(βt)``, the normal distribution function: ``½ + ½ erf(βt/√2)``, a smooth step.

    .. code-block:: python

        # Inputs of one column.
        units = npgp.features.Activations(np.eye(2), shape=npgp.features.Probit())

    :param sharpness: β > 0.
    """

    sharpness: ArrayLike = 3.0

    def __post_init__(self) -> None:
        require_positive(self.sharpness, "Probit sharpness")

    def __call__(self, t: jax.Array) -> jax.Array:
        return jax.scipy.special.ndtr(self.sharpness * t)


@pytree
class Activations:
    """
    Units of a neural network, ``φ_m(x) = ‖x̃‖ σ(z_m·x̃ / (‖z_m‖ ‖x̃‖))``, as inducing features of a zonal kernel.

    The feature u_m is the inner product of f and φ_m in the kernel's Hilbert space, so that its covariance with f(x) is
    φ_m(x). Infinitely many levels may put φ_m outside that space; φ_m is its series of some levels here,
    ``σ(t) = Σ_ℓ s_ℓ P_ℓ(t)``, in K_uf as in K_uu and in the covariance with other blocks, and levels that the kernel
    lacks (λ_ℓ = 0) are dropped from all of these. Then nothing is approximated: the features are exact, whatever the
    levels, and every bound holds. Fewer levels make smoother features, which explain f worse where it is rough; more of
    them put ever more of K_uu in functions that f has little of; :func:`npgp.inducing.choose_levels` compares.

    Features have variance 1 (``K_uu`` has ones on its diagonal): only the direction of z_m counts, and no scale of σ.
    K_uu has no more independent rows than there are harmonics at the levels kept.

    .. code-block:: python

        # (M, D + 1): also one for the bias.
        directions = np.random.default_rng(0).normal(size=(8, 2))
        units = npgp.features.Activations(directions, npgp.features.ReLU(), levels=range(7))
        assert units.size == 8

    :param directions: z, (M, d), d being the number of input columns and one for the bias; numbers, a
        ``numpyro.param`` or a sampled value. ``kernel.polar(Z)[1]`` gives those of inputs Z.
    :param shape: σ, such as :class:`ReLU`, or any function of an array of cosines, elementwise. It should be analytic,
        but for a kink at 0. Hyperparameters of its own may be traced if it is a pytree; one function object should be
        used throughout, as ``jit`` compiles anew for each.
    :param levels: increasing.
    :param name: what error messages call the directions.
    :raises TypeError: for directions that are not floating, and a shape that cannot be called.
    :raises ValueError: for directions of another shape, with NaN or a row of zeros, and levels that are not increasing.

    Source: Dutordoir et al. 2021; Sun et al. 2020; Tiao, Dutordoir & Picheny 2023 (with α = (d − 2)/2).
    """

    directions: jax.Array
    shape: Shape = ReLU()
    levels: tuple[int, ...] = static(tuple(range(6)))
    name: str = static("directions", kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.shape):
            raise TypeError(f"shape is {self.shape!r}; it must be a function of cosines, such as npgp.features.ReLU().")
        object.__setattr__(self, "directions", checks.inputs(self.directions, self.name, allow_empty=True))
        gegenbauer.check_dimension(self.dimension)
        if not checks.is_traced(self.directions) and not np.all(np.any(np.asarray(self.directions) != 0, axis=-1)):
            raise ValueError(f"{self.name} has a row of zeros, which is no direction.")
        object.__setattr__(self, "levels", gegenbauer.check_levels(self.levels))
        if all_leaves([self.shape]):  # a plain function, which is part of the structure
            object.__setattr__(self, "shape", Partial(self.shape))

    @property
    def dimension(self) -> int:
        """d."""
        return self.directions.shape[-1]

    @property
    def size(self) -> int:
        """Number of units M."""
        return self.directions.shape[0]

    @property
    def unit(self) -> jax.Array:
        """The directions on the sphere, (M, d)."""
        return self.directions / jnp.sqrt(jnp.sum(jnp.square(self.directions), axis=-1, keepdims=True))

    def profile(self, kernel: Kernel) -> jax.Array:
        """
        e_ℓ, the features' coefficients on harmonics of variance 1, of unit length in all; (levels,).

        ``e_ℓ ∝ s_ℓ / √a_ℓ`` with a_ℓ the kernel's :meth:`~npgp.kernels.Zonal.level_variances`, 0 where a_ℓ is.
        """
        return self._profile(as_zonal(kernel, type(self).__name__)[0])[0]

    def _profile(self, zonal: Zonal) -> tuple[jax.Array, jax.Array]:
        """e_ℓ, and √a_ℓ."""
        own = getattr(self.shape, "coefficients", None)
        if own is None:
            s = gegenbauer.coefficients(self.shape, self.dimension, self.levels)
        else:
            s = own(self.dimension, self.levels)
        a = zonal.level_variances(self.levels, self.dimension)
        root = safe_sqrt(a)
        e = jnp.where(a > 0.0, s / jnp.where(a > 0.0, root, 1.0), 0.0)
        _require_some(
            e,
            message=f"the activations' levels are {self.levels}, of which {type(zonal).__name__} and the shape "
            f"{type(self.shape).__name__} have none in common; add levels.",
        )
        e = e / jax.lax.stop_gradient(jnp.max(jnp.abs(e)))  # squares of large ones would overflow
        e = e / jnp.sqrt(jnp.sum(jnp.square(e)))
        return e.astype(self.directions.dtype), root.astype(self.directions.dtype)

    def gram(self, kernel: Kernel) -> jax.Array:
        """``Σ_ℓ e_ℓ² P_ℓ(cos)`` of the angles among directions, (M, M)."""
        return self._inner(jnp.square(self.profile(kernel)), self.levels, self.unit)

    def cross(self, kernel: Kernel, X: ArrayLike) -> jax.Array:
        """``σ ‖x̃‖ Σ_ℓ e_ℓ √a_ℓ P_ℓ(cos)`` of the angles between directions and inputs, (M, N)."""
        zonal, scale = as_zonal(kernel, type(self).__name__)
        radius, unit = zonal.polar(jnp.asarray(X))
        require_dimension(self, unit.shape[-1])
        e, root = self._profile(zonal)
        amplitude = jnp.sqrt(scale * zonal.variance).astype(e.dtype)
        return radius * self._inner(amplitude * e * root, self.levels, unit)

    def cross_features(self, kernel: Kernel, other: object) -> jax.Array:
        """
        Covariance with other activations, which need not have the same shape or levels, or with harmonics; (M, M').

        :raises ValueError: if the others are harmonics of all levels of these, and come before them.
        """
        if isinstance(other, Activations):
            return self._with_activations(kernel, other)
        if isinstance(other, SphericalHarmonics):
            if all(level in other.levels for level in self.levels):
                raise ValueError(
                    f"the activations have levels {self.levels}, all harmonics of which are in a block before theirs: "
                    "nothing is left of them; give them a level more, or put them first."
                )
            return self.with_harmonics(kernel, other)
        return NotImplemented

    def _with_activations(self, kernel: Kernel, other: Activations) -> jax.Array:
        require_dimension(other, self.dimension)
        shared = [level for level in self.levels if level in other.levels]
        if not shared:
            return jnp.zeros((self.size, other.size), self.directions.dtype)
        mine, others = (block.profile(kernel)[np.array([*map(block.levels.index, shared)])] for block in (self, other))
        return self._inner(mine * others, shared, other.unit)

    def with_harmonics(self, kernel: Kernel, other: SphericalHarmonics) -> jax.Array:
        """Covariance with spherical harmonics, whichever come first; (M, M')."""
        require_dimension(other, self.dimension)
        mine = dict(zip(self.levels, self.profile(kernel), strict=True))
        e = jnp.stack([mine.get(level, jnp.zeros((), self.directions.dtype)) for level in other.levels])
        e = e / np.sqrt(gegenbauer.multiplicities(self.dimension, other.levels)).astype(e.dtype)
        return other.spread(e) * other(self.unit).T

    def _inner(self, coefficients: jax.Array, levels: Sequence[int], unit: jax.Array) -> jax.Array:
        return gegenbauer.series(coefficients, self.dimension, levels, matmul(self.unit, unit.T))


def _require_some(coefficients: jax.Array, *, message: str) -> None:
    if checks.is_traced(coefficients):
        see_later(partial(_require_some, message=message), coefficients)
    elif not np.any(np.asarray(coefficients)):
        raise ValueError(message)
