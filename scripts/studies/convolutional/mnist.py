#!/usr/bin/env python
"""A convolutional GP on the ten digits of MNIST, with the prior's and the tight conditional.

After van der Wilk, Rasmussen & Hensman (2017): ten functions, one for each digit, that share a kernel of patches of
5 × 5 pixels with a weight for each place, and M inducing patches; a softmax of their values; all learned by Adam on
batches. ``--pixels`` adds an RBF kernel of whole images, with a second, orthogonal block of inducing images.

    NPGP_DATA=... python scripts/studies/convolutional/mnist.py --json out/convolutional_mnist.json
    NPGP_DATA=... python scripts/studies/convolutional/mnist.py --rows 60000 --test-rows 10000 --inducing 256 \\
        --steps 8000 --learning-rate 0.03 --conditionals tight
    NPGP_DATA=... python scripts/studies/convolutional/mnist.py --full --pixels --json out/convolutional_mnist.json

The first is a glance: few inducing patches and steps, and a subset of the digits. The second has all digits, and takes
half an hour on one core. The third, M = 750, is for an accelerator. k(x, x) takes 576² kernel values a digit, most of
the time of a step; ``--pixels`` takes as many for each pair of inducing images. A picture of the inducing patches is
written to ``--out``.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from common import Arguments, command, table, whole, write_json, write_picture
from npgp import datasets

DIGITS, SIDE, PATCH = 10, 28, 5
#: Start of g's kernel: lengthscale and variance. f is the mean of g over 576 places.
LENGTHSCALE, VARIANCE = 1.5, 50.0


def images(args: Any) -> tuple[np.ndarray, ...]:
    """Digits as rows of pixels in [0, 1], and their classes; or blurred spots in the corners in the place of digits."""
    if args.simulated:
        rng = np.random.default_rng(0)
        n = (args.rows or 60) + args.test_rows
        labels = rng.integers(0, DIGITS, n)
        angle = 2 * np.pi * labels / DIGITS + 0.1 * rng.normal(size=n)
        i, j = np.mgrid[:SIDE, :SIDE]
        at = 14 + 9 * np.stack([np.sin(angle), np.cos(angle)])[:, :, None, None]
        X = np.exp(-((i - at[0]) ** 2 + (j - at[1]) ** 2) / 20.0)
        X, cut = X.reshape(n, -1).astype(np.float32), n - args.test_rows
        return X[:cut], labels[:cut], X[cut:], labels[cut:]
    data = datasets.load("mnist")
    kept = np.sort(np.random.default_rng(args.seed).permutation(60_000)[: args.rows])
    parts = []
    for kind, rows in (("train", kept), ("test", np.arange(args.test_rows))):
        parts += [data[f"x_{kind}"][rows].reshape(len(rows), -1).astype(np.float32) / 255.0, data[f"y_{kind}"][rows]]
    return tuple(parts)


def starting_patches(X: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Different patches of the data that are not blank, at random."""
    rng = np.random.default_rng(seed)
    kernel = npgp.kernels.Convolutional(npgp.RBF(), image_shape=(SIDE, SIDE), patch_shape=(PATCH, PATCH))
    patches = np.asarray(kernel.patches(X[rng.permutation(len(X))[:200]])).reshape(-1, PATCH * PATCH)
    patches = np.unique(patches[patches.std(1) > 0.1], axis=0)
    return patches[rng.permutation(len(patches))[:size]]


def model(X, y=None, *, size: int, patches: np.ndarray, whole_images: np.ndarray | None, conditional: str):
    """
    :param size: number of training digits.
    :param patches: the first inducing patches.
    :param whole_images: the first inducing images, if there is a kernel of pixels beside.
    :param conditional: what q does to the residual.
    """
    positive = constraints.positive
    base = npgp.RBF(
        numpyro.param("lengthscale", LENGTHSCALE, constraint=positive),
        variance=numpyro.param("variance", VARIANCE, constraint=positive),
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


def fit(data: tuple[np.ndarray, ...], M: int, conditional: str, args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of a fit, and its parameters."""
    X, y, X_test, y_test = data
    pixels = X[:: max(1, len(X) // M)][:M] if args.pixels else None
    patches = starting_patches(X, M, args.seed)
    this = partial(model, size=len(X), patches=patches, whole_images=pixels, conditional=conditional)
    guide = npgp.AutoSparseGP(this)
    svi = SVI(this, guide, npgp.adam(args.learning_rate, args.steps), TraceMeanField_ELBO())
    start = time.perf_counter()
    key = jax.random.key(args.seed)
    result = npgp.fit(svi, key, args.steps, X, y, batch_size=min(args.batch_size, len(X)), progress=False)
    seconds = time.perf_counter() - start
    f = npgp.posterior("f", this, guide, result.params, X[:2])
    mean, variance = (np.asarray(v) for v in f.mean_and_variance(X_test, 100))
    density = npgp.likelihoods.Softmax(DIGITS).log_marginal(y_test, mean, variance)
    last = max(1, args.steps // 10)
    found = {
        "M": M,
        "conditional": conditional,
        "elbo": float(-np.mean(result.losses[-last:]) / len(X)),
        "errors": float(100 * np.mean(mean.argmax(0) != y_test)),
        "nlpd": float(-np.mean(np.asarray(density))),
        "seconds": seconds,
    }
    return found, result.params


def picture(path: Path, params: dict[str, Any]) -> None:
    """Inducing patches with the largest part in some class's mean, and the weights of places."""
    patches, loc = np.asarray(params["patches"]), np.asarray(params["f.u.loc"])
    order = np.argsort(-np.max(np.abs(loc.reshape(DIGITS, -1)[:, : len(patches)]), axis=0))[:30]
    figure, axes = npgp.plots.subplots(4, 8, figsize=(8.0, 4.2))
    axes = np.ravel(axes)
    for axis in axes:
        axis.axis("off")
    for axis, i in zip(axes, order, strict=False):
        axis.imshow(patches[i].reshape(PATCH, PATCH), cmap="gray_r", vmin=0.0, vmax=1.0)
    side = SIDE - PATCH + 1
    axes[-1].imshow(np.asarray(params["weights"]).reshape(side, side), cmap="viridis")
    axes[-1].set_title("weights", fontsize=8)
    write_picture(path, figure)


def main(argv: list[str] | None = None) -> None:
    parser = Arguments(__doc__)
    parser.shared("quick", "full", "json", "seed", "out", rows=5000, steps=300, batch_size=50, learning_rate=0.02)
    parser.add_argument("--inducing", nargs="+", type=whole, metavar="M", default=[32, 64])
    parser.add_argument("--conditionals", nargs="+", choices=["prior", "tight"], default=["prior", "tight"])
    parser.add_argument("--test-rows", type=whole, default=1000, help="so many test digits, the first")
    parser.add_argument("--pixels", action="store_true", help="a kernel of whole images beside")
    parser.add_argument("--simulated", action="store_true", help="blurred spots, which need no file")
    quick = {"rows": 40, "steps": 3, "batch_size": 4, "inducing": [5], "conditionals": ["tight"], "test_rows": 4}
    args = parser.read(argv, quick)
    if args.full:
        args.rows, args.steps, args.batch_size, args.inducing, args.test_rows = None, 20_000, 200, [750], 10_000
    args.simulated |= args.quick
    data, records, params = images(args), [], {}
    for M in args.inducing:
        for conditional in args.conditionals:
            found, params = fit(data, M, conditional, args)
            records.append(found)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}, flush=True)
    header = ("M", "conditional", "ELBO per row", "errors, %", "NLPD", "seconds")
    rows = [(r["M"], r["conditional"], *(f"{r[k]:.3f}" for k in list(r)[2:])) for r in records]
    print(table(header, rows, left=(1,)))
    picture(args.out / "convolutional_patches.png", params)
    if args.json:
        write_json(args.json, {"command": command(__file__, argv), "records": records})


if __name__ == "__main__":
    main()
