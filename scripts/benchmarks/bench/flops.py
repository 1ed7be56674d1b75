"""The matrix products that a training step of whitened SVGP cannot do without: what its time is measured against.

Counted are dense products, two operations per multiply-add, of a step whose terms per row are Gaussian, with M inducing
points and B rows. W = L⁻¹ is the inverse Cholesky factor of K_uu, A = W K_uf, R the factor of q's covariance.

By rows: A, RᵀA, and backwards R(RᵀA), A(RᵀA)ᵀ, Ā Aᵀ, WᵀĀ: six products of 2M²B. K̄_uu = −Wᵀ S W: two of 2M³. L and W:
M³/3 each.

By A Aᵀ: A, A Aᵀ, and backwards (WᵀC̄)A: three products of 2M²B. R Rᵀ, (A Aᵀ)R, WᵀC̄, C̄(A Aᵀ), −Wᵀ S W: six of 2M³.
L and W as before.

The less of the two is the limit: the second where B is more than 4/3 of M. Half of the entries of W and R are zero, and
A Aᵀ is symmetric; a routine that knew would do up to half of this. Kernel matrices cost D/M of a product, and are left
out, like all else that is of order M² or MB.
"""

from __future__ import annotations

FACTOR = 2.0 / 3.0


def by_rows(M: int, B: int) -> float:
    return 12.0 * M**2 * B + (4.0 + FACTOR) * M**3


def by_gram(M: int, B: int) -> float:
    return 6.0 * M**2 * B + (12.0 + FACTOR) * M**3


def svgp_step(M: int, B: int) -> float:
    """Operations of one step."""
    return min(by_rows(M, B), by_gram(M, B))


def product(M: int, B: int) -> float:
    """Operations of an (M, M) times an (M, B) matrix."""
    return 2.0 * M**2 * B
