"""Data sets: loaders of real data and a simulation of the oil-flow measurements.

Real data come from the folder named by the environment variable ``NPGP_DATA``. Where a set is not
there, :func:`oil_flow` and some names of :func:`uci` are downloaded, which needs the extra
``npgp[data]``. :func:`simulate_oil_flow` needs neither files nor a network.

Every loader returns NumPy arrays. Features and real-valued targets are float64, whatever the
precision they are stored in; JAX casts them to its own default precision when they enter a model.
"""

from npgp.datasets._files import load
from npgp.datasets._oil import OilFlow, oil_flow
from npgp.datasets._simulate import simulate_oil_flow
from npgp.datasets._toy import snelson
from npgp.datasets._uci import UCI_NAMES, RegressionSplit, uci

__all__ = [
    "UCI_NAMES",
    "OilFlow",
    "RegressionSplit",
    "load",
    "oil_flow",
    "simulate_oil_flow",
    "snelson",
    "uci",
]
