"""Nearest neighbors: their search, and the priors and posteriors in which a value depends on few others."""

from npgp.neighbors.nngp import NNGP, MeanFieldNormal, ResponseNNGP, WhitenNNGP
from npgp.neighbors.posterior import NearPosterior, NeighborPosterior
from npgp.neighbors.search import Neighbors, Repeats, Waves, nearest, nearest_before, order_sites
from npgp.neighbors.vecchia import MergedFactor, VecchiaFactor

__all__ = [
    "NNGP",
    "MeanFieldNormal",
    "MergedFactor",
    "NearPosterior",
    "NeighborPosterior",
    "Neighbors",
    "Repeats",
    "ResponseNNGP",
    "VecchiaFactor",
    "Waves",
    "WhitenNNGP",
    "nearest",
    "nearest_before",
    "order_sites",
]
