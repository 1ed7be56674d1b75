"""Latent inputs of simulated binary and count data are found again."""

from dataclasses import replace

import jax
import numpy as np
from models import train
from sklearn.cross_decomposition import CCA

import npgp

ROWS, COLUMNS = 90, 40


def simulated():
    """Data from smooth functions of two latents on a ring, and the true f."""
    rng = np.random.default_rng(3)
    angle = rng.uniform(0.0, 2.0 * np.pi, ROWS)
    x = np.stack([np.cos(angle), np.sin(angle)], 1) * np.sqrt(2.0)
    f = x @ rng.normal(size=(2, COLUMNS)) + 0.3 * rng.normal(size=COLUMNS)
    f = 0.7 * f + 1.0
    return x, f, rng.poisson(np.exp(f)).astype(np.float32), npgp.Poisson()


def test_latents_and_rates_are_found():
    x, f, Y, likelihood = simulated()
    offset = np.log(Y.mean(0))
    # Components of the data as they are would follow the large counts.
    start = npgp.gplvm.pca_start(jax.random.key(0), np.log1p(Y), 2, 12)
    start = replace(start, offset=np.broadcast_to(np.asarray(offset, float), COLUMNS))
    gplvm = npgp.BayesianGPLVM(start, likelihood=likelihood)
    params, losses = train(gplvm.model, gplvm.guide, 150, Y, rate=0.05)
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[:20].mean()

    found = np.asarray(params["x.loc"])
    a, b = CCA(n_components=2).fit(found, x).transform(found, x)
    first, second = (np.corrcoef(a[:, i], b[:, i])[0, 1] for i in range(2))
    assert min(first, second) > 0.93
    mean = np.asarray(jax.jit(gplvm.reconstruct)(params, found)[0])
    assert np.corrcoef(mean.ravel(), f.ravel())[0, 1] > 0.93
    # A constant explains far less.
    assert np.mean((mean - f) ** 2) < 0.25 * np.mean((f - f.mean(0)) ** 2)
