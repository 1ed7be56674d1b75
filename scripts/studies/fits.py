"""What several studies fit with: data, learned parameters, L-BFGS of collapsed bounds, SVI in minibatches, MCMC."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import lax
from numpyro.distributions import constraints
from numpyro.infer import MCMC, SVI, TraceMeanField_ELBO
from scipy.optimize import OptimizeResult, minimize

import common
import npgp
import npgp.inducing
from npgp import datasets

#: Logs of lengthscales, variance and noise variance stay within these.
LOG_BOUNDS = (-9.0, 7.0)
#: Start of the hyperparameters of minibatch fits, for standardized data; lengthscales start at this share of √D.
LENGTHSCALE, VARIANCE, NOISE_VARIANCE = 0.7, 1.0, 0.1
#: Rows at a time where no gradient is taken.
CHUNK = 4096


class Rows(NamedTuple):
    """Standardized rows for training and for testing."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def scores(mean, variance, y) -> dict[str, float]:
    """RMSE and mean log-likelihood of normal predictions of y."""
    rmse, nlpd = common.scores(mean, variance, np.asarray(y, np.float64))
    return {"rmse": rmse, "log_likelihood": -nlpd}


def simulated(rows: int, seed: int = 0, columns: int = 3) -> datasets.RegressionSplit:
    """A smooth function of two columns, in units of its own: a set that needs no file."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows + rows // 4, columns))
    y = np.sin(2.0 * X[:, 0]) + 0.5 * np.abs(X[:, 1]) + 0.1 * rng.normal(size=len(X))
    mean, scale = float(np.mean(y[:rows])), float(np.std(y[:rows]))
    y, unit = (y - mean) / scale, (np.zeros(columns), np.ones(columns))
    return datasets.RegressionSplit(X[:rows], y[:rows], X[rows:], y[rows:], *unit, 20.0 + 7.0 * mean, 7.0 * scale)


def uci(
    name: str, split: int, rows: int | None = None, seed: int = 0, test_rows: int | None = None
) -> datasets.RegressionSplit:
    """A split of a UCI set, with at most so many training rows and half as many test rows, at random."""
    if name == "simulated":
        return simulated(rows or 200, split)
    data = datasets.uci(name, split)
    rng, fields = np.random.default_rng(seed), dict(data.__dict__)
    for kind, most in (("train", rows), ("test", test_rows or (rows and max(rows // 2, 1)))):
        if most is not None and len(fields[f"y_{kind}"]) > most:
            chosen = np.sort(rng.choice(len(fields[f"y_{kind}"]), most, replace=False))
            fields |= {key: fields[key][chosen] for key in (f"X_{kind}", f"y_{kind}")}
    return datasets.RegressionSplit(**fields)


def learned(start: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a model with these starts: hyperparameters are positive, what is called inducing… is not."""
    positive = constraints.softplus_positive
    return {
        name: numpyro.param(name, value, constraint=constraints.real if "inducing" in name else positive)
        for name, value in start.items()
    }


def mcmc_draws(kernel: Any, key: jax.Array, warmup: int, draws: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Draws of one chain, by one program; the model's arguments last."""

    @jax.jit
    def run(key):
        mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, progress_bar=False)
        mcmc.run(key, *args, **kwargs)
        return mcmc.get_samples()

    return run(key)


# ---------------------------------------------------------------------------------------------------------------
# Collapsed bounds by L-BFGS


def lbfgs(
    loss: Callable[[np.ndarray], tuple[Any, Any]],
    start: np.ndarray,
    iterations: int,
    num_logs: int = 0,
    limits: tuple[float, float] = LOG_BOUNDS,
    **options: float,
) -> OptimizeResult:
    """
    Minimize from a start.

    :param loss: the value and its gradient. A value that is not finite sends the line search back.
    :param num_logs: so many first entries are logs, and stay within the limits.
    :param options: of SciPy's L-BFGS-B, such as ``ftol``.
    """

    def numpy_loss(theta):
        value, slope = loss(theta)
        return (float(value), np.asarray(slope, float)) if np.isfinite(value) else (1e10, np.zeros_like(theta))

    bounds = [limits] * num_logs + [(None, None)] * (len(start) - num_logs)
    options = {"maxiter": iterations, "maxfun": 2 * iterations, "ftol": 1e-12, "gtol": 1e-8} | options
    return minimize(numpy_loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)


def maximum(objective, starts, iterations: int, num_logs: int, **options) -> tuple[float, np.ndarray]:
    """The most that L-BFGS finds of a value with its gradient, from any of the starts, and where it is."""

    def loss(theta):
        value, slope = objective(theta)
        return -value, -np.asarray(slope)

    optima = (lbfgs(loss, np.asarray(start), iterations, num_logs, **options) for start in starts)
    best = min(optima, key=lambda optimum: optimum.fun)
    return -float(best.fun), best.x


def _isotropic(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """With one lengthscale for all columns, the geometric mean of theirs."""
    return lambda lengthscale, variance: kernel(jnp.exp(jnp.mean(jnp.log(lengthscale))), variance=variance)


KERNELS: dict[str, Callable[..., Any]] = {"matern32": npgp.Matern32, "rbf": npgp.RBF}
KERNELS |= {f"{name}-isotropic": _isotropic(kernel) for name, kernel in KERNELS.items()}


class Kind(NamedTuple):
    """
    A bound or an approximation of a GP with Gaussian noise and one block of inducing points, for compiled programs.

    :param name: a conditional of ``CollapsedGP``, or a method of ``ApproximateGP``.
    :param grouped: whether rows are taken in groups.
    :param kernel: a key of `KERNELS`.
    """

    name: str
    grouped: bool = False
    kernel: str = "matern32"

    def gp(self, theta, X, groups, power=1.0) -> npgp.CollapsedGP | npgp.ApproximateGP:
        """The GP at logs of D lengthscales, variance and noise variance, and inducing inputs, in one vector."""
        D = X.shape[1]
        scales = jnp.exp(theta[: D + 2])
        given = KERNELS[self.kernel](scales[:D], variance=scales[D]), X, theta[D + 2 :].reshape(-1, D)
        groups = groups if self.grouped else None
        if self.name in ("prior", "tight", "grouped"):
            conditional = npgp.Grouped(groups) if self.grouped else self.name
            return npgp.CollapsedGP(*given, noise_variance=scales[D + 1], conditional=conditional)
        return npgp.ApproximateGP(*given, noise_variance=scales[D + 1], method=self.name, power=power, groups=groups)


@partial(jax.jit, static_argnames="kind")
def loss_and_slope(theta, X, y, groups, power, kind: Kind):
    """The negative bound, or log density, for each row, and its gradient."""
    return jax.value_and_grad(lambda t: -kind.gp(t, X, groups, power).log_prob(y) / len(y))(theta)


@partial(jax.jit, static_argnames="kind")
def condition(theta, X, y, groups, power, kind: Kind) -> npgp.Posterior:
    return kind.gp(theta, X, groups, power).condition(y)


def start_at(X: np.ndarray, inducing: int, seed: int) -> np.ndarray:
    """Lengthscales √D, variance 1, noise variance .1, inducing inputs from k-means."""
    columns = X.shape[1]
    Z = np.asarray(npgp.inducing.kmeans(jax.random.key(seed), X, inducing))
    return np.concatenate([np.full(columns, 0.5 * math.log(columns)), [0.0, math.log(0.1)], Z.ravel()])


class Collapsed(NamedTuple):
    """A fit: the value per row, where it is taken, the noise variance there, iterations and evaluations."""

    value: float
    theta: np.ndarray
    noise: float
    iterations: int
    evaluations: int
    seconds: float


def fit_collapsed(data, groups, kind: Kind, args: argparse.Namespace, power: float = 1.0) -> Collapsed:
    """L-BFGS from `start_at`; ``args`` has inducing, seed and iterations."""
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    loss = partial(loss_and_slope, X=X, y=y, groups=groups, power=power, kind=kind)
    start = start_at(data.X_train, args.inducing, args.seed)
    jax.block_until_ready(loss(start))  # compiles
    began = time.perf_counter()
    found = lbfgs(loss, start, args.iterations, X.shape[1] + 2)
    seconds, noise = time.perf_counter() - began, math.exp(found.x[X.shape[1] + 1])
    return Collapsed(-float(found.fun), found.x, noise, int(found.nit), int(found.nfev), seconds)


# ---------------------------------------------------------------------------------------------------------------
# SVI in minibatches


class Structure(NamedTuple):
    """
    How M inducing points are put in blocks.

    :param shares: the share of each block in M.
    :param covariances: of q(ε), one for each block.
    :param fused: whether the blocks are put together in one.
    """

    shares: tuple[float, ...]
    covariances: tuple[str, ...]
    fused: bool = False


STRUCTURES = {
    "SVGP": Structure((1.0,), ("dense",)),
    "SOLVE-GP": Structure((0.5, 0.5), ("dense", "dense")),
    "union": Structure((0.5, 0.5), ("dense",), fused=True),  # SVGP that starts where SOLVE-GP does
    "ODVGP": Structure((0.5, 0.5), ("dense", "mean-only")),
    "three blocks": Structure((0.5, 0.25, 0.25), ("dense", "dense", "dense")),
    "SVGP, mean field": Structure((1.0,), ("diagonal",)),
    "SOLVE-GP, mean field": Structure((0.5, 0.5), ("diagonal", "diagonal")),
}


def start_of_lengthscales(X: np.ndarray) -> np.ndarray:
    columns = X.shape[1]
    return np.full(columns, LENGTHSCALE * math.sqrt(columns), X.dtype)


@lru_cache(maxsize=4)
def float32_split(name: str, number: int, rows: int | None) -> Rows:
    """The first rows of a split, in single precision."""
    data = simulated(rows or 300, number) if name == "simulated" else datasets.uci(name, number)
    arrays = (data.X_train, data.y_train, data.X_test, data.y_test)
    return Rows(*(np.asarray(array[:rows], np.float32) for array in arrays))


@lru_cache(maxsize=16)
def starting_blocks(name: str, number: int, rows: int | None, sizes: tuple[int, ...], seed: int) -> list[np.ndarray]:
    """The first at the centers of k-means; each further one greedily for the variance that those before it leave."""
    X = float32_split(name, number, rows).X
    if len(sizes) == 1:
        return [np.asarray(npgp.inducing.kmeans(jax.random.key(seed), X, *sizes))]
    before = starting_blocks(name, number, rows, sizes[:-1], seed)
    kernel = npgp.Matern32(start_of_lengthscales(X), variance=VARIANCE)
    return [*before, np.asarray(npgp.inducing.greedy_variance(kernel, X, sizes[-1], given=before))]


def start_of(args: argparse.Namespace, split: int, structure: Structure, M: int) -> dict[str, Any]:
    """Hyperparameters and inducing inputs; ``args`` has data, rows and seed."""
    sizes = tuple(int(share * M) for share in structure.shares)
    blocks = starting_blocks(args.data, split, args.rows, sizes, args.seed + split)
    blocks = [np.concatenate(blocks)] if structure.fused else blocks
    X = float32_split(args.data, split, args.rows).X
    hyper = {"lengthscale": start_of_lengthscales(X), "variance": VARIANCE, "noise_variance": NOISE_VARIANCE}
    return hyper | {f"inducing{i}": jnp.asarray(Z) for i, Z in enumerate(blocks)}


def component(params: dict[str, Any], covariances: Sequence[str]) -> npgp.SparseGP:
    """The GP at these hyperparameters and inducing inputs; a covariance of q(ε) for each block."""
    kernel = npgp.Matern32(params["lengthscale"], variance=params["variance"])
    return npgp.SparseGP("f", kernel, [params[f"inducing{i}"] for i in range(len(covariances))], covariances)


def regression_model(start: dict[str, Any], covariances: Sequence[str], conditional: str, group_size: int = 1):
    """A model ``(X, y, mask, *, size)`` with Gaussian noise whose parameters all start at these values."""
    kind = npgp.Grouped(group_size) if conditional == "grouped" else conditional

    def model(X, y=None, mask=None, *, size):
        params = learned(start)
        f = component(params, covariances).draw()
        with npgp.plate("data", size, rows=X.shape[0]):
            likelihood = npgp.Gaussian(variance=params["noise_variance"])
            npgp.observe("y", f(X), likelihood, obs=y, conditional=kind, mask=mask)

    return model


@partial(jax.jit, static_argnames="covariances")
def predict(params, X, covariances: tuple[str, ...] = ("dense",)):
    """Mean and variance of y."""
    mean, variance = component(params, covariances).posterior(params).mean_and_variance(X, batch_size=CHUNK)
    return mean, variance + params["noise_variance"]


@partial(jax.jit, static_argnames=("covariances", "conditional"))
def best_elbo(params, X, y, covariances: tuple[str, ...], conditional: str, groups=None) -> jax.Array:
    """The ELBO at these hyperparameters and inducing inputs if q(ε) were the best one: what steps on q could win."""
    gp = component(params, covariances)
    given = npgp.Grouped(groups) if conditional == "grouped" else conditional
    options = dict(noise_variance=params["noise_variance"], conditional=given, covariances=covariances)
    return npgp.CollapsedGP(gp.kernel, X, gp.inducing, **options).log_prob(y)


def in_chunks(size: int, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Arrays in chunks of equally many rows, (chunks, size, …), and the mask of rows that do not fill the last one."""
    rows = len(arrays[0])
    size = min(size, rows)
    missing = -rows % size
    filled = [np.concatenate([array, array[:missing]]) for array in arrays]
    mask = np.arange(rows + missing) < rows
    return tuple(array.reshape(-1, size, *array.shape[1:]) for array in (*filled, mask))


def elbo_of_chunks(model: Callable, guide: Callable) -> Callable[[Any, tuple[np.ndarray, ...]], float]:
    """The ELBO of all rows, exactly, of parameters and chunks: the mean over these, each scaled up to all rows."""

    @jax.jit
    def losses(params, chunks):
        loss = partial(TraceMeanField_ELBO().loss, jax.random.key(0), params, model, guide)
        return lax.map(lambda chunk: loss(*chunk, size=chunks[-1].size), chunks)

    return lambda params, chunks: -float(np.mean(np.asarray(losses(params, chunks), np.float64)))


class Layout(NamedTuple):
    """
    Training rows in the order in which a conditional takes them.

    :param arrays: X, y, and for ``grouped`` the mask of places that hold a row.
    :param batch_size: rows, or places, per step.
    :param group_size: places of a group; 1 for conditionals that take rows one by one.
    """

    arrays: tuple[np.ndarray, ...]
    batch_size: int
    group_size: int = 1

    @classmethod
    def of(cls, rows: Rows, conditional: str, groups: npgp.sparse.Groups, batch_size: int) -> Layout:
        if conditional != "grouped":
            return cls((rows.X, rows.y), min(batch_size, len(rows.y)))
        arrays = (groups.arrange(rows.X), groups.arrange(rows.y), np.asarray(groups.mask).ravel())
        # Whole groups, of about as many rows as the others' batches have.
        count = min(max(round(batch_size * groups.count / len(rows.y)), 1), groups.count)
        return cls(arrays, count * groups.size, groups.size)

    def chunks(self) -> tuple[np.ndarray, ...]:
        """X, y and mask in chunks of whole groups, (chunks, size, …), the last filled up with what is masked."""
        places = len(self.arrays[0])
        size = min(CHUNK // self.group_size * self.group_size, places)
        mask = self.arrays[2] if len(self.arrays) > 2 else np.ones(places, bool)
        X, y, mask, own = in_chunks(size, *self.arrays[:2], mask)
        return X, y, mask & own


class Method(NamedTuple):
    """Of the comparison of four: blocks of equally many inducing points, and whether q tightens what they leave."""

    blocks: int
    tight: bool

    @property
    def covariances(self) -> tuple[str, ...]:
        return ("dense",) * self.blocks


METHODS = {
    "SVGP": Method(1, False),
    "T-SVGP": Method(1, True),
    "SOLVE-GP": Method(2, False),
    "T-SOLVE-GP": Method(2, True),
}


class Program:
    """
    A method with M points on data of one shape, compiled once for all splits.

    What differs between splits, the start too, comes as an argument.

    :param model: a model ``(X, y, mask, *, size)`` whose parameters all have values in the start of :meth:`train`.
    :param rows: training rows, N.
    :param args: steps, batch_size, learning_rate and natural.
    :param chunk: rows at a time for the ELBO of all.
    """

    def __init__(self, model: Callable, rows: int, args: argparse.Namespace, chunk: int = CHUNK):
        self.guide, self.chunk = npgp.AutoSparseGP(model), chunk
        self.steps, self.batch_size = args.steps, min(args.batch_size, rows)
        optimizer = npgp.adam(args.learning_rate, args.steps)
        if args.natural:
            optimizer = npgp.natural_gradient(args.natural, optimizer)
        self.svi = SVI(model, self.guide, optimizer, TraceMeanField_ELBO(), size=rows)
        self._init = jax.jit(self.svi.init)  # operation by operation this takes seconds
        self._elbo = elbo_of_chunks(model, self.guide)

    def train(self, X: np.ndarray, y: np.ndarray, start: dict[str, Any], seed: int) -> tuple[dict[str, Any], dict]:
        """Trained parameters, and seconds: of what compiles, of all other steps."""
        key = jax.random.key(seed)
        fit = partial(npgp.fit, self.svi, key, batch_size=self.batch_size, progress=False)
        began = time.perf_counter()
        first = fit(1, X, y, init_state=self._init(key, X[: self.batch_size], y[: self.batch_size], init_params=start))
        compiled = time.perf_counter()
        result = fit(self.steps - 1, X, y, init_state=first.state)
        seconds = time.perf_counter() - compiled
        times = {"compile_seconds": compiled - began, "seconds": seconds, "step_ms": 1e3 * seconds / (self.steps - 1)}
        return result.params, times

    def elbo(self, params: dict[str, Any], X: np.ndarray, y: np.ndarray) -> float:
        """The ELBO of all rows."""
        return self._elbo(params, in_chunks(self.chunk, X, y))


def start_points(X: np.ndarray, M: int, seed: int) -> np.ndarray:
    """The centers of k-means in a random order, so that any part of them is spread like all."""
    return np.random.default_rng(seed).permutation(np.asarray(npgp.inducing.kmeans(jax.random.key(seed), X, M)))


def with_points(start: dict[str, Any], Z: np.ndarray, blocks: int) -> dict[str, Any]:
    """The start of a fit: hyperparameters, and points divided among the blocks."""
    start = {name: jnp.asarray(value, Z.dtype) for name, value in start.items()}
    return start | {f"inducing{i}": jnp.asarray(block) for i, block in enumerate(np.split(Z, blocks))}
