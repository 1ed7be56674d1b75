"""Data sets: loaders of real data and a simulation of the oil-flow measurements.

Real data come from the folder named by the environment variable ``NPGP_DATA``. Where it is not there,
:func:`oil_flow` is downloaded, which needs the extra ``npgp[data]``. :func:`simulate_oil_flow` needs neither files
nor a network.

Every loader returns NumPy arrays. Features and real-valued targets are float64, whatever the
precision they are stored in; JAX casts them to its own default precision when they enter a model.
"""

from npgp.datasets._oil import OilFlow, load, oil_flow, simulate_oil_flow, snelson

__all__ = [
    "OilFlow",
    "load",
    "oil_flow",
    "simulate_oil_flow",
    "snelson",
]
