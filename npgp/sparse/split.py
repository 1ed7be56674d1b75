"""A GP as the sum of two: what inducing features explain, of low rank, and what they leave."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from npgp import linalg
from npgp.kernels import Kernel, as_kernel
from npgp.programs.backend import maximum
from npgp.pytrees import pytree
from npgp.sparse.projection import Projector, as_blocks, factorize


@pytree
class LowRankKernel(Kernel):
    """
    The covariance of what inducing features explain, ``Σ_i A_i(x)ᵀ A_i(x')``; made by :func:`split_kernel`.

    :param projector: the factorized inducing features.
    """

    projector: Projector

    matrix_fields: ClassVar[tuple[str, ...]] = ("projector",)

    def _projections(self, X: jax.Array) -> jax.Array:
        return jnp.concatenate(self.projector(X).A)

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        A = self._projections(X)
        return linalg.gram(A.T) if X2 is None else linalg.matmul(A.T, self._projections(X2))

    def diag(self, X: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(self._projections(X)), axis=0)

    @property
    def differentiable(self) -> bool:
        return self.projector.kernel.differentiable

    @property
    def wants_double(self) -> bool:
        return self.projector.kernel.wants_double

    def level_columns(self, columns: int) -> frozenset[int]:
        return self.projector.kernel.level_columns(columns)


@pytree
class ResidualKernel(LowRankKernel):
    """
    The covariance of what inducing features leave, ``k(x, x') − Σ_i A_i(x)ᵀ A_i(x')``; made by :func:`split_kernel`.

    :param projector: the factorized inducing features.
    """

    def __call__(self, X: jax.Array, X2: jax.Array | None = None) -> jax.Array:
        return self.projector.kernel(X, X2) - super().__call__(X, X2)

    def diag(self, X: jax.Array) -> jax.Array:
        return maximum(self.projector.kernel.diag(X) - super().diag(X), 0.0)


def split_kernel(kernel: Kernel, inducing: Any, *, jitter: float | None = None) -> tuple[LowRankKernel, ResidualKernel]:
    """
    Split a GP into two independent ones whose sum it is: of what inducing features explain, and of what they leave. So
    each may have an approximation of its own, such as neighbors for what is left (VIF; Gyger, Furrer & Sigrist 2025)
    under any likelihood:

    .. code-block:: python

        smooth, rough = npgp.sparse.split_kernel(kernel, Z)
        before = npgp.neighbors.nearest_before(X, 5, kernel=kernel, inducing=Z)


        def counts(X, y=None):
            f = npgp.SparseGP("f", smooth, Z).draw()
            r = npgp.VNNGP("r", rough, X, before).draw()
            values = f(X) + r(X, neighbors=np.arange(len(X))[:, None])
            with numpyro.plate("data", len(X)):
                npgp.observe("y", values, npgp.Poisson(), obs=y)

    :param kernel: the kernel.
    :param inducing: Z of shape (M, D), a block of features, or a list of these.
    :param jitter: relative jitter tried first.
    :return: the kernel of low rank, and that of the residual.
    """
    projector = factorize(as_kernel(kernel), as_blocks(inducing), jitter)
    return LowRankKernel(projector), ResidualKernel(projector)
