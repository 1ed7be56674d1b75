"""The ten digits of MNIST: SVGP and SOLVE-GP with two conditionals, and a convolutional GP."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import datasets
from npgp.likelihoods import Likelihood
from npgp.likelihoods.numerics import deviation, log_normal_cdf
from npgp.likelihoods.quadrature import hermite
from npgp.pytrees import pytree, static
from studies.fits import METHODS, Method, Program, Rows, component, in_chunks, start_points, with_points
from studies.minibatches import pairs, program_of
from studies.runner import Study

DIGITS = 10

#: Start of the kernel: of its variance; of its lengthscale, in distances between digits (their median).
VARIANCE, LENGTHSCALE = 4.0, 1.0

#: And of the scale of ``shared``: nearly the prior's conditional, which 1 is.
RESIDUAL_SCALE = 0.95

#: Digits that k-means and the median distance look at, at most.
START_ROWS = 10_000

#: Rows at a time where no gradient is taken: the softmax's quadrature needs memory for hundreds of nodes per row.
CHUNK = 1000


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


@lru_cache(maxsize=2)
def load(simulated: bool, rows: int | None, test_rows: int | None, seed: int) -> Rows:
    """Pixels from 0 to 1, and digits; with a limit on training rows, as many at random."""
    data = simulated_digits() if simulated else datasets.load("mnist")
    order = np.random.default_rng(seed).permutation(len(data["y_train"]))[:rows]
    X, X_test = (images.reshape(len(images), -1) / 255.0 for images in (data["x_train"][order], data["x_test"]))
    y, y_test = (labels.astype(np.int32) for labels in (data["y_train"][order], data["y_test"]))
    return Rows(X.astype(np.float32), y, X_test[:test_rows].astype(np.float32), y_test[:test_rows])


def digits(args: argparse.Namespace, likelihood: str, seed: int, M: int, method: str) -> dict[str, Any]:
    data, how = load(args.quick, args.rows, args.test_rows, seed), METHODS[method]
    hyper = {"lengthscale": LENGTHSCALE * median_distance(data.X[:START_ROWS]), "variance": VARIANCE}
    if how.tight and TIGHT[likelihood] == "shared":
        hyper["y.residual_scale"] = RESIDUAL_SCALE
    start = with_points(hyper, start_points(data.X[:START_ROWS], M, seed), how.blocks)
    model = make_model(how, M, data.X.shape[1], likelihood)
    program = program_of((likelihood, M, method, args.steps), lambda: Program(model, len(data.y), args, CHUNK))
    params, times = program.train(data.X, data.y, start, seed)
    chunks, mask = in_chunks(CHUNK, data.X_test)
    probabilities = np.moveaxis(np.asarray(predict(params, chunks, how, likelihood)), 1, -1)[mask]
    return {"elbo": program.elbo(params, data.X, data.y) / len(data.y), **scores(probabilities, data.y_test), **times}


# ---------------------------------------------------------------------------------------------------------------
# Patches

SIDE, PATCH = 28, 5
#: Start of g's kernel: lengthscale and variance. f is the mean of g over 576 places.
PATCH_LENGTHSCALE, PATCH_VARIANCE = 1.5, 50.0


@lru_cache(maxsize=1)
def images(simulated: bool, rows: int | None, test_rows: int, seed: int) -> Rows:
    """Digits as rows of pixels in [0, 1], and their classes; or blurred spots in the place of digits."""
    if simulated:
        rng, n = np.random.default_rng(0), (rows or 60) + test_rows
        labels = rng.integers(0, DIGITS, n)
        angle = 2 * np.pi * labels / DIGITS + 0.1 * rng.normal(size=n)
        i, j = np.mgrid[:SIDE, :SIDE]
        at = 14 + 9 * np.stack([np.sin(angle), np.cos(angle)])[:, :, None, None]
        X = np.exp(-((i - at[0]) ** 2 + (j - at[1]) ** 2) / 20.0).reshape(n, -1).astype(np.float32)
        return Rows(X[:-test_rows], labels[:-test_rows], X[-test_rows:], labels[-test_rows:])
    data, parts = datasets.load("mnist"), []
    kept = np.sort(np.random.default_rng(seed).permutation(60_000)[:rows])
    for kind, some in (("train", kept), ("test", np.arange(test_rows))):
        parts += [data[f"x_{kind}"][some].reshape(len(some), -1).astype(np.float32) / 255.0, data[f"y_{kind}"][some]]
    return Rows(*parts)


def starting_patches(X: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Different patches of the data that are not blank, at random."""
    rng = np.random.default_rng(seed)
    kernel = npgp.kernels.Convolutional(npgp.RBF(), image_shape=(SIDE, SIDE), patch_shape=(PATCH, PATCH))
    patches = np.asarray(kernel.patches(X[rng.permutation(len(X))[:200]])).reshape(-1, PATCH * PATCH)
    patches = np.unique(patches[patches.std(1) > 0.1], axis=0)
    return patches[rng.permutation(len(patches))[:size]]


def convolutional_model(
    X, y=None, *, size: int, patches: np.ndarray, whole_images: np.ndarray | None, conditional: str
):
    """
    :param size: number of training digits.
    :param patches: the first inducing patches.
    :param whole_images: the first inducing images, if there is a kernel of pixels beside.
    :param conditional: what q does to the residual.
    """
    positive = constraints.positive
    base = npgp.RBF(
        numpyro.param("lengthscale", PATCH_LENGTHSCALE, constraint=positive),
        variance=numpyro.param("variance", PATCH_VARIANCE, constraint=positive),
    )
    places = (SIDE - PATCH + 1) ** 2
    kernel = npgp.kernels.Convolutional(
        base,
        image_shape=(SIDE, SIDE),
        patch_shape=(PATCH, PATCH),
        weights=numpyro.param("weights", jnp.ones(places)) / places,
    )
    blocks: list[Any] = [npgp.features.Patches(numpyro.param("patches", patches))]
    total: npgp.kernels.Kernel = kernel
    if whole_images is not None:
        total = kernel + npgp.RBF(
            numpyro.param("pixel_lengthscale", 8.0, constraint=positive),
            variance=numpyro.param("pixel_variance", 1.0, constraint=positive),
        )
        blocks.append(numpyro.param("images", whole_images))
    with numpyro.plate("digits", DIGITS, dim=-2):
        f = npgp.SparseGP("f", total, blocks).draw()
    with npgp.plate("data", size, rows=X.shape[0]):
        npgp.observe("y", f(X), npgp.likelihoods.Softmax(DIGITS), obs=y, conditional=conditional)


def convolutional(args: argparse.Namespace, M: int, conditional: str) -> dict[str, Any]:
    X, y, X_test, y_test = images(args.quick, args.rows, args.test_rows, args.seed)
    pixels = X[:: max(1, len(X) // M)][:M] if args.pixels else None
    options = {"patches": starting_patches(X, M, args.seed), "whole_images": pixels, "conditional": conditional}
    this = partial(convolutional_model, size=len(X), **options)
    guide = npgp.AutoSparseGP(this)
    svi = SVI(this, guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
    began, how = time.perf_counter(), dict(batch_size=min(args.batch_size, len(X)), progress=False)
    result = npgp.fit(svi, jax.random.key(args.seed), args.steps, X, y, **how)
    seconds = time.perf_counter() - began
    f = npgp.posterior("f", this, guide, result.params, X[:2])
    mean, variance = (np.asarray(v) for v in f.mean_and_variance(X_test, 100))
    density = npgp.likelihoods.Softmax(DIGITS).log_marginal(y_test, mean, variance)
    return {
        "elbo": float(-np.mean(result.losses[-max(1, args.steps // 10) :]) / len(X)),
        "errors": float(100 * np.mean(mean.argmax(0) != y_test)),
        "nlpd": float(-np.mean(np.asarray(density))),
        "step_ms": 1e3 * seconds / args.steps,
    }


STUDIES = {
    "mnist": Study(
        """MNIST: SVGP, SOLVE-GP and the tight conditional

After the classification experiments of Bui, Ashman & Turner (2025). Ten functions, one for each digit, share a
Matérn-3/2 kernel of the pixels (one lengthscale) and the inducing inputs, and each has a dense q. The likelihood is the
softmax of the ten values, or the robust maximum of Hernández-Lobato, Hernández-Lobato & Dupont (2011): the digit is
that of the largest value, or with probability 0.001 any other. Everything is learned at once by Adam on minibatches. M
counts all inducing points: SOLVE-GP has M/2 + M/2 where SVGP has M, and it is compared with SVGP of M/2 points too. All
four methods start at the same M inputs: the centers of k-means of at most 10,000 training digits. The softmax is
log-concave, and T- is the conditional ``tight``. The robust maximum is not: T- is ``shared``, with one learned scale of
what the points leave, which is a bound too. ``--full`` is for an accelerator.""",
        digits,
        {"likelihood": ("softmax",), "seed": (0, 1), "M": (100, 200), "method": tuple(METHODS)},
        {"elbo": ("ELBO per row", 4), "accuracy": ("test accuracy", 4), "nlpd": ("test NLPD", 4)}
        | {"step_ms": ("ms per step", 1), "seconds": ("seconds", 0)},
        {"rows": 5000, "test_rows": int, "steps": 600, "batch_size": 256, "learning_rate": 0.02, "natural": 0.0},
        choices={"likelihood": tuple(LIKELIHOODS)},
        quick={"seed": [0], "M": [4], "method": ["T-SOLVE-GP"], "steps": 3, "rows": 60, "batch_size": 20}
        | {"likelihood": ["robust-max"]},
        full={"seed": [0, 1, 2], "M": [256, 512, 1024, 2048], "steps": 20_000, "rows": None, "batch_size": 1024}
        | {"learning_rate": 0.01},
        picture=("M", ("elbo", "accuracy", "nlpd", "step_ms")),
        show=lambda records, markdown: pairs(
            {"elbo": 1, "accuracy": 1, "nlpd": -1}, [r | {"split": r["seed"]} for r in records], markdown
        ),
        note="Means over repetitions ± standard errors. NLPD: mean over test digits, in nats. Seconds: of training, "
        "without compilation.",
        x64=False,
    ),
    "convolutional": Study(
        """A convolutional GP on the ten digits of MNIST, with the prior's and the tight conditional.

After van der Wilk, Rasmussen & Hensman (2017): ten functions, one for each digit, that share a kernel of patches of
5 × 5 pixels with a weight for each place, and M inducing patches; a softmax of their values; all learned by Adam on
batches. ``--pixels`` adds an RBF kernel of whole images, with a second, orthogonal block of inducing images. k(x, x)
takes 576² kernel values a digit, most of the time of a step; ``--pixels`` takes as many for each pair of inducing
images.""",
        convolutional,
        {"M": (32, 64), "conditional": ("prior", "tight")},
        {"elbo": ("ELBO per row", 3), "errors": ("errors, %", 2), "nlpd": ("NLPD", 3), "step_ms": ("ms per step", 0)},
        {
            "rows": 5000,
            "test_rows": 1000,
            "steps": 300,
            "batch_size": 50,
            "learning_rate": 0.02,
            "pixels": False,
            "seed": 0,
        },
        quick={"rows": 40, "steps": 2, "batch_size": 4, "M": [4], "conditional": ["tight"], "test_rows": 4},
        full={"rows": None, "steps": 20_000, "batch_size": 200, "M": [750], "test_rows": 10_000},
        x64=False,
    ),
}
