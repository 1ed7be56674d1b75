"""Nearest neighbors: their search, and the priors and densities in which a value depends on few others."""

from npgp.neighbors.nngp import NNGP, Kriging, ResponseNNGP, WhitenNNGP
from npgp.neighbors.search import Neighbors, nearest, nearest_before, order_sites
from npgp.neighbors.vecchia import VecchiaFactor

__all__ = [
    "NNGP",
    "Kriging",
    "Neighbors",
    "ResponseNNGP",
    "VecchiaFactor",
    "WhitenNNGP",
    "nearest",
    "nearest_before",
    "order_sites",
]
