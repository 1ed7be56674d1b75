"""Spherical harmonics as inducing features of zonal kernels: features whose covariance is diagonal."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from scipy.linalg import lapack, solve_triangular

from npgp import checks
from npgp.kernels import Kernel, gegenbauer
from npgp.kernels.zonal import Zonal, as_zonal
from npgp.linalg import matmul, safe_sqrt
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
