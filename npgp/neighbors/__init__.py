"""Nearest neighbors: their search, and the priors and posteriors in which a value depends on few others."""

from npgp.neighbors.mean_field import MeanFieldNormal
from npgp.neighbors.nngp import NNGP, ResponseNNGP, WhitenNNGP
from npgp.neighbors.posterior import NearPosterior, NeighborPosterior
from npgp.neighbors.search import Neighbors, Waves, nearest, nearest_before, order_sites
from npgp.neighbors.vecchia import VecchiaFactor

__all__ = [
    "NNGP",
    "MeanFieldNormal",
    "NearPosterior",
    "NeighborPosterior",
    "Neighbors",
    "ResponseNNGP",
    "VecchiaFactor",
    "Waves",
    "WhitenNNGP",
    "nearest",
    "nearest_before",
    "order_sites",
]
