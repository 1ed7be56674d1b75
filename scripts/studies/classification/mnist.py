#!/usr/bin/env python
"""SVGP and SOLVE-GP with the prior's and the tight conditional on the ten digits of MNIST.

After the classification experiments of Bui, Ashman & Turner (2025): bound, test accuracy and log-likelihood against
the number of inducing points M, a line for each of SVGP, T-SVGP, SOLVE-GP and T-SOLVE-GP. Settings of theirs that we
could not see may differ.

Ten functions, one for each digit, share a Matérn-3/2 kernel of the pixels (one lengthscale) and the inducing inputs,
and each has a dense q. The likelihood is the softmax of the ten values, or the robust maximum of Hernández-Lobato,
Hernández-Lobato & Dupont (2011): the digit is that of the largest value, or with probability 0.001 any other.
Everything is learned at once by Adam on minibatches. On the test digits: accuracy and negative log predictive density
(NLPD).

M counts all inducing points: SOLVE-GP has M/2 + M/2 where SVGP has M, and it is compared with SVGP of M/2 points too.
All four methods start at the same M inputs: the centers of k-means of at most 10,000 training digits. The softmax is
log-concave, and T- is the conditional ``tight``. The robust maximum is not: ``tight`` would be the prior's for it, and
T- is ``shared``, with one learned scale of what the points leave, which is a bound too.

    NPGP_DATA=... python scripts/studies/classification/mnist.py --json out/mnist.json
    NPGP_DATA=... python scripts/studies/classification/mnist.py --full --json out/mnist.json

The first takes half an hour on two cores; the second is for an accelerator. What stands in scripts/benchmarks/results
was written with ``--out scripts/benchmarks/results --markdown scripts/benchmarks/results/mnist.md``.

With ``--json`` every fit is written when it ends, and a later run with the same file and settings does those that are
missing. A method with M points is compiled once for all repetitions, which differ in the training digits drawn, the
start and the batches; the test digits are the set's own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints

import npgp
from npgp import datasets
from npgp.likelihoods import Likelihood
from npgp.likelihoods.numerics import deviation, log_normal_cdf
from npgp.likelihoods.quadrature import hermite
from npgp.pytrees import pytree, static

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Arguments, whole
from studies.regression.four_methods import Cells, Metric, by_cell, draw, print_fit, report
from studies.regression.minibatch import (
    Method,
    Program,
    Records,
    Rows,
    component,
    fit_missing,
    in_chunks,
    shared_options,
    with_defaults,
    with_points,
)

DIGITS = 10
#: Start of the kernel: of its variance; of its lengthscale, in distances between digits (their median).
VARIANCE, LENGTHSCALE = 4.0, 1.0
#: And of the scale of ``shared``: nearly the prior's conditional, which 1 is.
RESIDUAL_SCALE = 0.95
#: Digits that k-means and the median distance look at, at most.
START_ROWS = 10_000
#: Rows at a time where no gradient is taken: the softmax's quadrature needs memory for hundreds of nodes per row.
CHUNK = 1000

METRICS = {
    "elbo": Metric("ELBO per row", 4, 1),
    "accuracy": Metric("test accuracy", 4, 1),
    "nlpd": Metric("test NLPD", 4, -1),
    "step_ms": Metric("ms per step", 1, 0),
    "seconds": Metric("seconds", 0, 0),
}
PANELS = ("elbo", "accuracy", "nlpd", "step_ms")
NOTE = (
    "Means over repetitions ± standard errors. ELBO per row: of all training digits. NLPD: mean over test digits, in "
    "nats. Seconds: of training, without compilation."
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--likelihood", choices=list(LIKELIHOODS), default="softmax")
    parser.add_argument("--repetitions", dest="splits", type=whole, help="how many")
    parser.add_argument("--test-rows", type=whole, help="so many test digits at most, the first")
    parser.add_argument("--simulated", action="store_true", help="blurred spots in place of digits, which need no file")
    shared_options(parser)
    args = parser.parse_args(argv)
    defaults: dict[str, Any] = {"natural": 0.0}
    if args.quick:
        defaults |= {"splits": 1, "inducing": [8], "steps": 20, "rows": 100, "batch_size": 50, "learning_rate": 0.05}
        args.simulated = True
    elif args.full:
        defaults |= {"splits": 3, "inducing": [256, 512, 1024, 2048], "steps": 20_000, "batch_size": 1024}
        defaults["learning_rate"] = 0.01
    else:
        defaults |= {"splits": 2, "inducing": [100, 200], "steps": 600, "rows": 5000, "batch_size": 256}
        defaults["learning_rate"] = 0.02
    return with_defaults(parser, args, defaults)


@pytree
@dataclass(frozen=True, eq=False)
class RobustMax(Likelihood):
    """
    The class of the largest of C latent values, or with probability ``error`` any of the others, all alike.

    Not log-concave: it has the same value wherever another class is ahead.

    :param num_classes: C.
    :param error: the probability of other classes together.
    :param num_nodes: nodes of the Gauss-Hermite rule over the class's own value.
    """

    num_classes: int = static(DIGITS)
    error: float = static(1e-3)
    num_nodes: int = static(64)

    @property
    def num_latents(self) -> int:  # type: ignore[override]
        return self.num_classes

    def _support(self, y):
        return (y >= 0) & (y < self.num_classes) & (y == jnp.floor(y)), f"a class below {self.num_classes}"

    def _log_probabilities(self) -> tuple[float, float]:
        """log p(y | f) where y's value is the largest, and elsewhere."""
        return float(np.log1p(-self.error)), float(np.log(self.error / (self.num_classes - 1)))

    def log_prob(self, f, y):
        right, wrong = self._log_probabilities()
        return jnp.where(jnp.argmax(f, axis=0) == y, right, wrong)

    def sample(self, rng_key, f):
        best, keys = jnp.argmax(f, axis=0), jax.random.split(rng_key)
        another = (best + jax.random.randint(keys[0], best.shape, 1, self.num_classes)) % self.num_classes
        return jnp.where(jax.random.bernoulli(keys[1], self.error, best.shape), another, best)

    def log_wins(self, y, mean, variance):
        """log P(f_y is the largest) for f ~ N(mean, variance), by quadrature over f_y."""
        nodes, weights = (jnp.asarray(array, mean.dtype)[:, None] for array in hermite(self.num_nodes))
        sd = deviation(variance)
        own = jnp.arange(self.num_classes)[:, None] == jnp.asarray(y)
        own_mean, own_sd = (jnp.sum(jnp.where(own, values, 0.0), axis=0) for values in (mean, sd))
        f = (own_mean + own_sd * nodes)[:, None]  # (nodes, 1, N)
        below = jnp.where(own, 0.0, log_normal_cdf((f - mean) / sd))
        return logsumexp(jnp.log(weights) + jnp.sum(below, axis=1), axis=0)

    def expected_log_prob(self, y, mean, variance):
        right, wrong = self._log_probabilities()
        return wrong + (right - wrong) * jnp.exp(self.log_wins(y, mean, variance))

    def log_marginal(self, y, mean, variance):
        right, wrong = (np.exp(p) for p in self._log_probabilities())
        return jnp.log(wrong + (right - wrong) * jnp.exp(self.log_wins(y, mean, variance)))

    def probabilities(self, mean, variance):
        """P(y = c) for all classes, (C, N); normalized, as each has a quadrature's error."""
        p = jax.lax.map(lambda c: jnp.exp(self.log_marginal(c, mean, variance)), jnp.arange(self.num_classes))
        return p / jnp.sum(p, axis=0)


LIKELIHOODS: dict[str, Any] = {"softmax": npgp.likelihoods.Softmax(DIGITS), "robust-max": RobustMax()}
#: What T- stands for: the tightest conditional that is a bound.
TIGHT: dict[str, str] = {"softmax": "tight", "robust-max": "shared"}


def load(args: argparse.Namespace, repetition: int) -> Rows:
    """Pixels from 0 to 1, and digits; with a limit on training rows, as many at random."""
    data = simulated_digits() if args.simulated else datasets.load("mnist")
    order = np.random.default_rng(args.seed + repetition).permutation(len(data["y_train"]))[: args.rows]
    X, X_test = (images.reshape(len(images), -1) / 255.0 for images in (data["x_train"][order], data["x_test"]))
    dtype = jnp.result_type(float)
    y, y_test = (labels.astype(np.int32) for labels in (data["y_train"][order], data["y_test"]))
    return Rows(X.astype(dtype), y, X_test[: args.test_rows].astype(dtype), y_test[: args.test_rows])


def simulated_digits(rows: int = 400) -> dict[str, np.ndarray]:
    """Images of 6 × 6 pixels: a spot for each class, at ten places, with noise."""
    rng = np.random.default_rng(0)
    labels = rng.integers(DIGITS, size=rows)
    center = np.stack([1 + labels % 4, 1 + labels // 4], axis=1) + 0.2 * rng.normal(size=(rows, 2))
    grid = np.stack(np.meshgrid(np.arange(6), np.arange(6), indexing="ij"), axis=-1)
    distance = np.sum((grid - center[:, None, None]) ** 2, axis=-1)
    images = np.clip(255 * np.exp(-distance) + 20 * rng.normal(size=distance.shape), 0, 255).astype(np.uint8)
    half = rows // 2
    return {"x_train": images[:half], "y_train": labels[:half], "x_test": images[half:], "y_test": labels[half:]}


def median_distance(X: np.ndarray) -> float:
    """Of pairs of neighbors in the order given, which is random."""
    return float(np.median(np.linalg.norm(X[1:] - X[:-1], axis=1)))


def make_model(method: Method, M: int, columns: int, likelihood: str) -> Callable:
    conditional = TIGHT[likelihood] if method.tight else "prior"

    def model(X, y=None, mask=None, *, size):
        positive = constraints.softplus_positive
        params: dict[str, Any] = {
            "lengthscale": numpyro.param("lengthscale", 1.0, constraint=positive),
            "variance": numpyro.param("variance", VARIANCE, constraint=positive),
        }
        for name in (f"inducing{i}" for i in range(method.blocks)):  # their values come with the start
            params[name] = numpyro.param(name, jnp.zeros((M // method.blocks, columns)))
        with numpyro.plate("digits", DIGITS, dim=-2):
            f = component(params, method.covariances).draw()
        with npgp.plate("data", size, rows=X.shape[0]):
            npgp.observe("y", f(X), LIKELIHOODS[likelihood], obs=y, conditional=conditional, mask=mask)

    return model


@partial(jax.jit, static_argnames=("method", "likelihood"))
def predict(params, chunks, method: Method, likelihood: str):
    """Probabilities of the ten digits for rows in chunks (chunks, rows, columns): (chunks, 10, rows)."""
    posterior = component(params, method.covariances).posterior(params)

    def of_chunk(X):
        return LIKELIHOODS[likelihood].probabilities(*posterior.mean_and_variance(X))

    return jax.lax.map(of_chunk, chunks)


def scores(probabilities: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """
    Accuracy and mean negative log-probability.

    :param probabilities: of the classes, (rows, C).
    :param y: classes, (rows,).
    """
    own = np.asarray(probabilities, np.float64)[np.arange(len(y)), y]
    return {
        "accuracy": float(np.mean(np.argmax(probabilities, axis=1) == y)),
        "nlpd": -float(np.mean(np.log(own))),
    }


def fit(program: Program, method: Method, data: Rows, Z: np.ndarray, likelihood: str, seed: int) -> dict[str, Any]:
    """Train one method once; its figures."""
    hyper = {"lengthscale": LENGTHSCALE * median_distance(data.X[:START_ROWS]), "variance": VARIANCE}
    if method.tight and TIGHT[likelihood] == "shared":
        hyper["y.residual_scale"] = RESIDUAL_SCALE
    params, times = program.train(data.X, data.y, with_points(hyper, Z, method.blocks), seed)
    *chunks, mask = in_chunks(CHUNK, data.X_test)
    probabilities = np.moveaxis(np.asarray(predict(params, chunks[0], method, likelihood)), 1, -1)[mask]
    rows = len(data.y)
    return {
        "elbo": program.elbo(params, data.X, data.y) / rows,
        **scores(probabilities, data.y_test),
        **times,
        "lengthscale": float(params["lengthscale"]),
        "variance": float(params["variance"]),
        "rows": rows,
        "test_rows": len(data.y_test),
    }


def run(args: argparse.Namespace) -> Records:
    """Fit what the file does not have."""
    names = ("likelihood", "steps", "batch_size", "learning_rate", "natural", "float64", "seed", "simulated")
    settings = {name: getattr(args, name) for name in names}
    records = Records(args.json, settings | {"most_rows": args.rows, "most_test_rows": args.test_rows})

    def make_program(method: Method, M: int, data: Rows) -> Program:
        return Program(make_model(method, M, data.X.shape[1], args.likelihood), len(data.y), args, CHUNK)

    fit_missing(
        records,
        args,
        "mnist",
        load=partial(load, args),
        make_program=make_program,
        fit=lambda program, method, data, Z, seed: fit(program, method, data, Z, args.likelihood, seed),
        say=lambda cell, figures: print_fit(cell, figures, METRICS),
        start_rows=START_ROWS,
    )
    return records


def main(argv: list[str] | None = None) -> Cells:
    args = parse(argv)
    jax.config.update("jax_enable_x64", args.float64)
    records = run(args)
    cells = by_cell(records, args, ["mnist"])
    report(records, cells, METRICS, NOTE, args, "MNIST: SVGP, SOLVE-GP and the tight conditional", __file__)
    draw(cells, METRICS, PANELS, args.out / "mnist.png")
    return cells


if __name__ == "__main__":
    main()
