"""The ten digits of MNIST: SVGP and SOLVE-GP with two conditionals, and a convolutional GP."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import datasets
from studies.fits import METHODS, Method, Program, Rows, component, in_chunks, start_points, with_points
from studies.minibatches import pairs, program_of
from studies.runner import Study

DIGITS = 10

#: Start of the kernel: of its variance; of its lengthscale, in distances between digits (their median).
VARIANCE, LENGTHSCALE = 4.0, 1.0

#: Digits that k-means and the median distance look at, at most.
START_ROWS = 10_000

#: Rows at a time where no gradient is taken: the softmax's quadrature needs memory for hundreds of nodes per row.
CHUNK = 1000


SOFTMAX = npgp.likelihoods.Softmax(DIGITS)


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


def make_model(method: Method, M: int, columns: int) -> Callable:
    conditional = "tight" if method.tight else "prior"

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
            npgp.observe("y", f(X), SOFTMAX, obs=y, conditional=conditional, mask=mask)

    return model


@partial(jax.jit, static_argnames="method")
def predict(params, chunks, method: Method):
    """Probabilities of the ten digits for rows in chunks (chunks, rows, columns): (chunks, 10, rows)."""
    posterior = component(params, method.covariances).posterior(params)

    def of_chunk(X):
        return SOFTMAX.probabilities(*posterior.mean_and_variance(X))

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


def digits(args: argparse.Namespace, seed: int, M: int, method: str) -> dict[str, Any]:
    data, how = load(args.quick, args.rows, args.test_rows, seed), METHODS[method]
    hyper = {"lengthscale": LENGTHSCALE * median_distance(data.X[:START_ROWS]), "variance": VARIANCE}
    start = with_points(hyper, start_points(data.X[:START_ROWS], M, seed), how.blocks)
    model = make_model(how, M, data.X.shape[1])
    program = program_of((M, method, args.steps), lambda: Program(model, len(data.y), args, CHUNK))
    params, times = program.train(data.X, data.y, start, seed)
    chunks, mask = in_chunks(CHUNK, data.X_test)
    probabilities = np.moveaxis(np.asarray(predict(params, chunks, how)), 1, -1)[mask]
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
        npgp.observe("y", f(X), SOFTMAX, obs=y, conditional=conditional)


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
    density = SOFTMAX.log_marginal(y_test, mean, variance)
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
softmax of the ten values. Everything is learned at once by Adam on minibatches. M
counts all inducing points: SOLVE-GP has M/2 + M/2 where SVGP has M, and it is compared with SVGP of M/2 points too. All
four methods start at the same M inputs: the centers of k-means of at most 10,000 training digits. T- is the conditional
``tight``. ``--full`` is for an accelerator.""",
        digits,
        {"seed": (0, 1), "M": (100, 200), "method": tuple(METHODS)},
        {"elbo": ("ELBO per row", 4), "accuracy": ("test accuracy", 4), "nlpd": ("test NLPD", 4)}
        | {"step_ms": ("ms per step", 1), "seconds": ("seconds", 0)},
        {"rows": 5000, "test_rows": int, "steps": 600, "batch_size": 256, "learning_rate": 0.02, "natural": 0.0},
        quick={"seed": [0], "M": [4], "method": ["T-SOLVE-GP"], "steps": 3, "rows": 60, "batch_size": 20},
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
