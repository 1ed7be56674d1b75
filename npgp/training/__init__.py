"""Training: a loop around NumPyro's ``SVI``, its batches, checkpoints and devices."""

from npgp.training.arrival import Arrival, Convergence
from npgp.training.callbacks import Best, Callback, Monitor
from npgp.training.checkpoints import Checkpoints
from npgp.training.collapsed_fit import CollapsedFit, fit_collapsed
from npgp.training.convergence import TrainingWarning
from npgp.training.devices import Sharding
from npgp.training.evaluation import evaluate
from npgp.training.lbfgs import LBFGSResult
from npgp.training.loop import fit
from npgp.training.optimizers import adam, row_adam
from npgp.training.results import DataError, FitResult, NonFiniteLossError, Seconds
from npgp.training.row_tables import RowOptimizer, RowState
from npgp.training.run import Training
from npgp.training.sources import Parquet, Source, Stream
from npgp.training.step import Info, Step
from npgp.training.trust import PosteriorCheck, check_posterior

__all__ = [
    "Arrival",
    "Best",
    "Callback",
    "Checkpoints",
    "CollapsedFit",
    "Convergence",
    "DataError",
    "FitResult",
    "Info",
    "LBFGSResult",
    "Monitor",
    "NonFiniteLossError",
    "Parquet",
    "PosteriorCheck",
    "RowOptimizer",
    "RowState",
    "Seconds",
    "Sharding",
    "Source",
    "Step",
    "Stream",
    "Training",
    "TrainingWarning",
    "adam",
    "check_posterior",
    "evaluate",
    "fit",
    "fit_collapsed",
    "row_adam",
]
