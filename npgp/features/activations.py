"""Neural-network activations as inducing features of zonal kernels: a layer of units with trainable directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial, all_leaves
from jax.typing import ArrayLike

from npgp import checks
from npgp.checks import require_positive
from npgp.features.harmonics import SphericalHarmonics, require_dimension
from npgp.kernels import Kernel, gegenbauer
from npgp.kernels.zonal import Zonal, as_zonal
from npgp.linalg import matmul, safe_sqrt
from npgp.programs.backend import maximum
from npgp.programs.later import see_later
from npgp.pytrees import pytree, static

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
        mine, others = (block.profile(kernel)[_level_index(block.levels, shared)] for block in (self, other))
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


def _level_index(levels: Sequence[int], chosen: Sequence[int]) -> np.ndarray:
    return np.array([levels.index(level) for level in chosen])


def _require_some(coefficients: jax.Array, *, message: str) -> None:
    if checks.is_traced(coefficients):
        see_later(partial(_require_some, message=message), coefficients)
    elif not np.any(np.asarray(coefficients)):
        raise ValueError(message)
