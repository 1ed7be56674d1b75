"""Bounds and approximations with q(ε) at its optimum, as distributions over all observations; certificates."""

from npgp.collapsed.approximations import (
    ApproximateGP,
    DegeneratePosterior,
    GroupNoise,
    RowNoise,
    VecchiaNoise,
    VIFPosterior,
)
from npgp.collapsed.certificates import Advice, Certificate, certificate, evidence_bounds
from npgp.collapsed.collapsed_gp import CollapsedGP
from npgp.collapsed.gaussian import collapsed_bound, exact_log_evidence, upper_bound
from npgp.collapsed.lengthscales import ShorterLengthscales
from npgp.collapsed.points import EnoughPoints, enough_points
from npgp.collapsed.psi import ExpectedProjection, PsiStatistics, expected_projection, psi_statistics
from npgp.collapsed.uncertain import UncertainInputGP, penalty_nodes
from npgp.variational.row_sites import Sites

__all__ = [
    "Advice",
    "ApproximateGP",
    "Certificate",
    "CollapsedGP",
    "DegeneratePosterior",
    "EnoughPoints",
    "ExpectedProjection",
    "GroupNoise",
    "PsiStatistics",
    "RowNoise",
    "ShorterLengthscales",
    "Sites",
    "UncertainInputGP",
    "VIFPosterior",
    "VecchiaNoise",
    "certificate",
    "collapsed_bound",
    "enough_points",
    "evidence_bounds",
    "exact_log_evidence",
    "expected_projection",
    "penalty_nodes",
    "psi_statistics",
    "upper_bound",
]
