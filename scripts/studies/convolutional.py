"""A convolutional GP on the ten digits of MNIST."""

from __future__ import annotations

import argparse
import time
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpy.lib.stride_tricks import sliding_window_view
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import datasets
from npgp.functionals import average
from studies.fits import Rows
from studies.runner import Study

DIGITS = 10

SOFTMAX = npgp.likelihoods.Softmax(DIGITS)
SIDE, PATCH = 28, 5
#: Numbers of each patch's pixels in a row of X, (576, 25).
PIXELS = sliding_window_view(np.arange(SIDE**2).reshape(SIDE, SIDE), (PATCH, PATCH)).reshape(-1, PATCH**2)
#: Start of the kernel of a function of patches: lengthscale and variance. A digit is its mean over 576 places.
PATCH_LENGTHSCALE, PATCH_VARIANCE = 1.5, 50.0


@lru_cache(maxsize=1)
def images(rows: int | None, test_rows: int, seed: int) -> Rows:
    """Digits as rows of pixels in [0, 1], and their classes."""
    data, parts = datasets.load("mnist"), []
    kept = np.sort(np.random.default_rng(seed).permutation(60_000)[:rows])
    for kind, some in (("train", kept), ("test", np.arange(test_rows))):
        parts += [data[f"x_{kind}"][some].reshape(len(some), -1).astype(np.float32) / 255.0, data[f"y_{kind}"][some]]
    return Rows(*parts)


def starting_patches(X: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Different patches of the data that are not blank, at random."""
    rng = np.random.default_rng(seed)
    patches = X[rng.permutation(len(X))[:200]][:, PIXELS].reshape(-1, PATCH**2)
    patches = np.unique(patches[patches.std(1) > 0.1], axis=0)
    return patches[rng.permutation(len(patches))[:size]]


def convolutional_model(X, y=None, *, size: int, patches: np.ndarray, conditional: str):
    """
    :param size: number of training digits.
    :param patches: the first inducing patches.
    :param conditional: what q does to the residual.
    """
    positive = constraints.positive
    kernel = npgp.RBF(
        numpyro.param("lengthscale", PATCH_LENGTHSCALE, constraint=positive),
        variance=numpyro.param("variance", PATCH_VARIANCE, constraint=positive),
    )
    weights = numpyro.param("weights", jnp.ones(len(PIXELS))) / len(PIXELS)
    with numpyro.plate("digits", DIGITS, dim=-2):
        f = npgp.SparseGP("f", kernel, numpyro.param("patches", patches)).draw()
    with npgp.plate("data", size, rows=X.shape[0]):
        npgp.observe("y", f.average(X[:, PIXELS], weights), SOFTMAX, obs=y, conditional=conditional)


def convolutional(args: argparse.Namespace, M: int, conditional: str) -> dict[str, Any]:
    X, y, X_test, y_test = images(args.rows, args.test_rows, args.seed)
    options = {"patches": starting_patches(X, M, args.seed), "conditional": conditional}
    this = partial(convolutional_model, size=len(X), **options)
    guide = npgp.AutoSparseGP(this)
    svi = SVI(this, guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
    began, how = time.perf_counter(), dict(batch_size=min(args.batch_size, len(X)), progress=False)
    result = npgp.fit(svi, jax.random.key(args.seed), args.steps, X, y, **how)
    seconds = time.perf_counter() - began
    f = npgp.posterior("f", this, guide, result.params, X[:2])
    weights = result.params["weights"] / len(PIXELS)
    moments = [  # some at a time: all patches of all digits are a large array
        f.mean_and_variance(average(X_test[i : i + 100, PIXELS], weights)) for i in range(0, len(X_test), 100)
    ]
    mean, variance = (np.concatenate(values, -1) for values in zip(*moments, strict=True))
    density = SOFTMAX.log_marginal(y_test, mean, variance)
    return {
        "elbo": float(-np.mean(result.losses[-max(1, args.steps // 10) :]) / len(X)),
        "errors": float(100 * np.mean(mean.argmax(0) != y_test)),
        "nlpd": float(-np.mean(np.asarray(density))),
        "step_ms": 1e3 * seconds / args.steps,
    }


STUDIES = {
    "convolutional": Study(
        """A convolutional GP on the ten digits of MNIST, with the prior's and the tight conditional.

After van der Wilk, Rasmussen & Hensman (2017): ten functions, one for each digit, that share a kernel of patches of
5 × 5 pixels with a weight for each place, and M inducing patches; a softmax of their values; all learned by Adam on
batches. A digit's prior variance takes 576² kernel values, most of the time of a step.""",
        convolutional,
        {"M": (32, 64), "conditional": ("prior", "tight")},
        {"elbo": ("ELBO per row", 3), "errors": ("errors, %", 2), "nlpd": ("NLPD", 3), "step_ms": ("ms per step", 0)},
        {
            "rows": 5000,
            "test_rows": 1000,
            "steps": 300,
            "batch_size": 50,
            "learning_rate": 0.02,
            "seed": 0,
        },
        quick={"rows": 40, "steps": 2, "batch_size": 4, "M": [4], "conditional": ["tight"], "test_rows": 4},
        full={"rows": None, "steps": 20_000, "batch_size": 200, "M": [750], "test_rows": 10_000},
        x64=False,
    ),
}
