"""What leaves and enters: files, ArviZ, standardized data."""

from npgp.io.inference_data import to_arviz
from npgp.io.saving import load, save
from npgp.io.standardize import Standardizer

__all__ = [
    "Standardizer",
    "load",
    "save",
    "to_arviz",
]
