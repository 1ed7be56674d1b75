"""GPs in NumPyro models: components, their draws, the statements that use them, and guides."""

from npgp.model.guides import AutoSparseGP, posterior
from npgp.model.latent import Latent
from npgp.model.observation import joint, observe, sample
from npgp.model.row_params import RowOptimizer, row_param
from npgp.model.sparse_gp import Function, SparseGP, plate
from npgp.model.vnngp import VNNGP

__all__ = [
    "VNNGP",
    "AutoSparseGP",
    "Function",
    "Latent",
    "RowOptimizer",
    "SparseGP",
    "joint",
    "observe",
    "plate",
    "posterior",
    "row_param",
    "sample",
]
