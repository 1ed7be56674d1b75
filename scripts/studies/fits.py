"""What several studies fit with: data, learned parameters, L-BFGS of collapsed bounds, MCMC."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, init_to_median
from scipy.optimize import OptimizeResult, minimize

import common
import npgp
import npgp.inducing
import regression_sets
from regression_sets import RegressionSplit

#: Logs of lengthscales, variance and noise variance stay within these.
LOG_BOUNDS = (-9.0, 7.0)


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


def simulated(rows: int, seed: int = 0, columns: int = 3) -> RegressionSplit:
    """A smooth function of two columns, in units of its own: a set that needs no file."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows + rows // 4, columns))
    y = np.sin(2.0 * X[:, 0]) + 0.5 * np.abs(X[:, 1]) + 0.1 * rng.normal(size=len(X))
    y = (y - np.mean(y[:rows])) / np.std(y[:rows])
    return RegressionSplit(X[:rows], y[:rows], X[rows:], y[rows:], 7.0)


def uci(name: str, split: int, rows: int | None = None, seed: int = 0) -> RegressionSplit:
    """A split of a UCI set, with at most so many training rows and half as many test rows, at random."""
    if name == "simulated":
        return simulated(rows or 200, split)
    data = regression_sets.uci(name, split)
    rng, fields = np.random.default_rng(seed), dict(data.__dict__)
    for kind, most in (("train", rows), ("test", rows and max(rows // 2, 1))):
        if most is not None and len(fields[f"y_{kind}"]) > most:
            chosen = np.sort(rng.choice(len(fields[f"y_{kind}"]), most, replace=False))
            fields |= {key: fields[key][chosen] for key in (f"X_{kind}", f"y_{kind}")}
    return RegressionSplit(**fields)


def learned(start: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a model with these starts: hyperparameters are positive, what is called inducing… is not."""
    positive = constraints.softplus_positive
    return {
        name: numpyro.param(name, value, constraint=constraints.real if "inducing" in name else positive)
        for name, value in start.items()
    }


def beside_neighbors(start: dict[str, Any], component: Callable[[dict[str, Any]], npgp.SparseGP]) -> Callable:
    """A model of rows that :func:`with_neighbors` makes: Gaussian noise, inducing points and neighbors (VIF)."""

    def model(X, y, X_near, y_near, there, *, size):
        params = learned(start)
        f = component(params).draw()
        values = f(X_near.reshape(-1, X.shape[1])), jnp.where(there, y_near, jnp.nan)
        with npgp.plate("data", size, rows=X.shape[0]):
            likelihood = npgp.Gaussian(variance=params["noise_variance"])
            npgp.observe("y", f(X), likelihood, obs=y, neighbors=values)

    return model


def with_neighbors(X: np.ndarray, y: np.ndarray, neighbors: npgp.neighbors.Neighbors) -> tuple[np.ndarray, ...]:
    """Rows, those of their neighbors, (N, k, D) and (N, k), and which of these there are."""
    near, there = np.asarray(neighbors.rows), np.asarray(neighbors.mask)
    return X, y, X[near], y[near], there


def nuts_draws(model: Any, key: jax.Array, warmup: int, draws: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Draws of one chain of NUTS, by one program; the model's arguments last."""
    kernel = NUTS(model, init_strategy=init_to_median, target_accept_prob=0.9)

    @jax.jit
    def run(key):
        mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, progress_bar=False)
        mcmc.run(key, *args, **kwargs)
        return mcmc.get_samples()

    return jax.block_until_ready(run(key))


# ---------------------------------------------------------------------------------------------------------------
# Collapsed bounds by L-BFGS


def lbfgs(
    loss: Callable[[np.ndarray], tuple[Any, Any]],
    start: np.ndarray,
    iterations: int,
    num_logs: int = 0,
    until: Callable[[], bool] = lambda: False,
    **options: float,
) -> OptimizeResult:
    """
    Minimize from a start.

    :param loss: the value and its gradient. A value that is not finite sends the line search back.
    :param num_logs: so many first entries are logs, and stay within `LOG_BOUNDS`.
    :param until: asked after each iteration; the search ends where it says yes.
    :param options: of SciPy's L-BFGS-B, such as ``ftol``.
    """

    def numpy_loss(theta):
        value, slope = loss(theta)
        return (float(value), np.asarray(slope, float)) if np.isfinite(value) else (1e10, np.zeros_like(theta))

    def callback(intermediate_result):
        if until():
            raise StopIteration

    bounds = [LOG_BOUNDS] * num_logs + [(None, None)] * (len(start) - num_logs)
    options = {"maxiter": iterations, "maxfun": 2 * iterations, "ftol": 1e-12, "gtol": 1e-8} | options
    how: dict[str, Any] = dict(method="L-BFGS-B", bounds=bounds, callback=callback, options=options)
    return minimize(numpy_loss, start, jac=True, **how)


def _isotropic(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """With one lengthscale for all columns, the geometric mean of theirs."""
    return lambda lengthscale, variance: kernel(jnp.exp(jnp.mean(jnp.log(lengthscale))), variance=variance)


KERNELS: dict[str, Callable[..., Any]] = {"matern32": npgp.Matern32, "rbf": npgp.RBF}
KERNELS |= {f"{name}-isotropic": _isotropic(kernel) for name, kernel in KERNELS.items()}


class Kind(NamedTuple):
    """
    A bound or an approximation of a GP with Gaussian noise, for compiled programs.

    :param name: a conditional of ``CollapsedGP``, a method of ``ApproximateGP``, or ``nngp``.
    :param grouped: whether rows are taken in groups.
    :param kernel: a key of `KERNELS`.
    :param blocks: of inducing points, equally large.
    """

    name: str
    grouped: bool = False
    kernel: str = "matern32"
    blocks: int = 1

    def gp(self, theta, X, groups, power=1.0) -> npgp.CollapsedGP | npgp.ApproximateGP | npgp.neighbors.ResponseNNGP:
        """
        The GP at logs of D lengthscales, variance and noise variance, and inducing inputs, in one vector; if there are
        none, all inputs are. For ``nngp`` and ``vif`` ``groups`` are the neighbors.
        """
        D = X.shape[1]
        scales = jnp.exp(theta[: D + 2])
        kernel, noise = KERNELS[self.kernel](scales[:D], variance=scales[D]), {"noise_variance": scales[D + 1]}
        if self.name == "nngp":
            return npgp.neighbors.ResponseNNGP(kernel, X, groups, **noise)
        Z = theta[D + 2 :].reshape(-1, D) if len(theta) > D + 2 else X
        if self.name == "vif":
            return npgp.ApproximateGP(kernel, X, Z, method="vif", neighbors=groups, **noise)
        groups = groups if self.grouped else None
        if self.name in ("prior", "tight", "grouped"):
            conditional = npgp.conditionals.Grouped(groups) if self.grouped else self.name
            return npgp.CollapsedGP(kernel, X, jnp.split(Z, self.blocks), conditional=conditional, **noise)
        return npgp.ApproximateGP(kernel, X, Z, method=self.name, power=power, groups=groups, **noise)


@partial(jax.jit, static_argnames="kind")
def loss_and_slope(theta, X, y, groups, power, kind: Kind):
    """The negative bound, or log density, for each row, and its gradient."""
    return jax.value_and_grad(lambda t: -kind.gp(t, X, groups, power).log_prob(y) / len(y))(theta)


@partial(jax.jit, static_argnames="kind")
def condition(theta, X, y, groups, power, kind: Kind) -> Any:
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


def fit_collapsed(
    data, groups, kind: Kind, args: argparse.Namespace, power: float = 1.0, start=None, until=None
) -> Collapsed:
    """L-BFGS from `start_at`, if no other start is there; ``args`` has inducing, seed and iterations."""
    X, y = jnp.asarray(data.X_train), jnp.asarray(data.y_train)
    loss = partial(loss_and_slope, X=X, y=y, groups=groups, power=power, kind=kind)
    start = start_at(data.X_train, args.inducing, args.seed) if start is None else start
    jax.block_until_ready(loss(start))  # compiles
    began = time.perf_counter()
    found = lbfgs(loss, start, args.iterations, X.shape[1] + 2, until=until() if until else lambda: False)
    seconds, noise = time.perf_counter() - began, math.exp(found.x[X.shape[1] + 1])
    return Collapsed(-float(found.fun), found.x, noise, int(found.nit), int(found.nfev), seconds)
