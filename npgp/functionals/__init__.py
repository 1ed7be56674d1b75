"""
Rows that are linear functionals of a function, where others are its values at points: weighted sums of values,
derivatives, and sums of these.

A row's functional is ``ℓ f = Σ_j w_j f(x_j)`` or ``∂f/∂x_d (x)``. A GP's values under such functionals are jointly
Gaussian: of their covariances with each other, and with inducing features, everything else is made (docs/theory.md).
"""

from npgp.functionals.rows import Functionals, Piece, at, average, derivative

__all__ = ["Functionals", "Piece", "at", "average", "derivative"]
