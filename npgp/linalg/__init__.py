"""Numerics that all parts of the library share: exact products, triangular systems, and the one Cholesky."""

from npgp.linalg.factors import (
    DEFAULT_JITTER,
    MAX_JITTER,
    block_row,
    block_solve,
    block_solve_transposed,
    cholesky,
    default_jitter,
    factor_tangent,
    inverse_factor,
    inverse_of_reversed,
    log_determinant,
    lower_half,
    plain_cholesky,
)
from npgp.linalg.products import (
    diagonal,
    diagonal_matrix,
    gram,
    least_square,
    matmul,
    safe_sqrt,
    transposed_matmul,
    weighted_sum,
)
from npgp.linalg.triangular import lower_matmul, solve_lower

__all__ = [
    "DEFAULT_JITTER",
    "MAX_JITTER",
    "block_row",
    "block_solve",
    "block_solve_transposed",
    "cholesky",
    "default_jitter",
    "diagonal",
    "diagonal_matrix",
    "factor_tangent",
    "gram",
    "inverse_factor",
    "inverse_of_reversed",
    "least_square",
    "log_determinant",
    "lower_half",
    "lower_matmul",
    "matmul",
    "plain_cholesky",
    "safe_sqrt",
    "solve_lower",
    "transposed_matmul",
    "weighted_sum",
]
