"""Latent inputs: starts, the Bayesian GPLVM, its collapsed form, and new rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
import problem as p
from judge import attempt, finite, mistakes, same

import npgp
from npgp import gplvm as g


def data(rows: int = 20) -> np.ndarray:
    rng = np.random.default_rng(0)
    t = rng.normal(size=(rows, 1))
    return np.hstack([np.sin(t), t**2, t]) + 0.05 * rng.normal(size=(rows, 3))


def _start(Y: Any = None, dim: Any = 1, size: Any = 4, **options: Any) -> g.Start:
    return g.pca_start(p.key(), data() if Y is None else Y, dim, size, **options)


def _fit(
    Y: Any = None, start: g.Start | None = None, steps: int = 2, fit: dict[str, Any] | None = None, **options: Any
) -> Any:
    model = npgp.BayesianGPLVM(start or _start(), **options)
    svi = p.svi_of(model.model, guide=model.guide, rate=0.01)
    return npgp.fit(svi, p.key(), steps, p.x(data() if Y is None else Y), progress=False, **(fit or {}))


@cache
def _trained(x64: bool) -> tuple[npgp.BayesianGPLVM, Any]:
    with jax.enable_x64(x64):
        model = npgp.BayesianGPLVM(_start())
        return model, npgp.fit(p.svi_of(model.model, guide=model.guide), p.key(), 5, p.x(data()), progress=False).params


def _new(Y: Any, **options: Any) -> Any:
    model, params = _trained(False)
    return g.infer_latents(
        model.posterior(params), model.likelihood_at(params), Y, offset=model.start.offset, **options
    )


def _holes() -> np.ndarray:
    Y = data()
    Y[3, 1] = np.nan
    return Y


MISTAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    "Y of one axis": ("Y", lambda: _start(data()[:, 0])),
    "Y with NaN": ("Y, mask", lambda: _start(_holes())),
    "Y of whole numbers": ("Y", lambda: _start(np.arange(60).reshape(20, 3))),
    "complex Y": ("Y", lambda: _start(data() + 1j)),
    "a masked Y": ("Y, mask, masked", lambda: _start(np.ma.masked_array(data(), data() > 1))),
    "no latent dimensions": ("latent_dim", lambda: _start(dim=0)),
    "1.5 latent dimensions": ("latent_dim", lambda: _start(dim=1.5)),
    "more dimensions than columns": ("latent_dim", lambda: _start(dim=9)),
    "no inducing points": ("num_inducing", lambda: _start(size=0)),
    "more inducing points than rows": ("num_inducing, size", lambda: _start(size=99)),
    "a mask of another shape": ("mask", lambda: _start(mask=np.ones(20, bool))),
    "a mask of numbers": ("mask", lambda: _start(mask=np.full((20, 3), 0.5))),
    "a column that nobody has": (
        "mask, column, columns",
        lambda: _start(mask=np.array([True, True, False]) & np.ones((20, 3), bool)),
    ),
    "a start that is an array": ("start", lambda: npgp.BayesianGPLVM(data())),
    "a kernel for a kernel's class": ("kernel", lambda: _fit(kernel=npgp.RBF())),
    "an unknown conditional": ("conditional", lambda: npgp.BayesianGPLVM(_start(), conditional="best")),
    "a likelihood by word": ("likelihood", lambda: npgp.BayesianGPLVM(_start(), likelihood="gaussian")),
    "training on other columns": ("Y", lambda: _fit(data()[:, :2])),
    "training on other rows": ("Y", lambda: _fit(data(30))),
    "training on NaN": ("args[0], Y, mask, allow_nan", lambda: _fit(_holes())),
    "NaN without a mask": ("y, Y, mask", lambda: _fit(_holes(), fit=dict(allow_nan=True))),
    "batches without row numbers": ("Y, rows, indices, batch_size", lambda: _fit(fit=dict(batch_size=5))),
    "a mask of other rows in training": ("mask", lambda: _fit(fit=dict(mask=np.ones((5, 3), bool)))),
    "a kernel without closed form": (
        "kernel, Matern32",
        lambda: g.CollapsedGPLVM(_start(), kernel=npgp.Matern32).fit(data()),
    ),
    "collapsed with NaN": ("Y", lambda: g.CollapsedGPLVM(_start()).fit(_holes())),
    "collapsed with other rows": ("Y", lambda: g.CollapsedGPLVM(_start()).fit(data(7))),
    "collapsed grouped": ("conditional", lambda: g.CollapsedGPLVM(_start(), conditional="grouped").fit(data())),
    "new rows of other columns": ("Y", lambda: _new(data()[:2, :2])),
    "new rows with NaN": ("Y, mask", lambda: _new(_holes()[2:5])),
    "new rows with a mask of others": ("mask", lambda: _new(data()[:2], mask=np.ones((3, 3), bool))),
    "candidates of other dimensions": ("candidates", lambda: _new(data()[:2], candidates=np.ones((5, 4), np.float32))),
    "classes of other rows": ("labels", lambda: _fit(prior=g.ClassNormal(np.zeros(3, int)))),
    "a mixture of other dimensions": (
        "means, NormalMixture",
        lambda: _fit(prior=g.NormalMixture(np.zeros((2, 5), np.float32))),
    ),
    "times of other rows": (
        "times, Dynamical",
        lambda: _fit(
            prior=g.Dynamical(np.linspace(0, 1, 7, dtype=np.float32), np.linspace(0, 1, 3, dtype=np.float32), 0.3)
        ),
    ),
    "an encoder without network or key": ("rng_key, network, Encoder", lambda: _fit(latents=g.Encoder())),
    "errors of other rows": ("labels", lambda: g.nearest_neighbor_errors(data(), np.zeros(3, int))),
    "a threshold above 1": ("threshold", lambda: g.effective_dimensions(np.ones(3), threshold=2.0)),
}


@mistakes(MISTAKES)
def test_mistake(make: Callable[[], Any]) -> Any:
    return make()


@attempt("answer", cases=("float32", "float64"))
def test_starts_are_finite(which: str) -> Any:
    """One column that is constant, one far from zero."""
    Y = data()
    Y[:, 0], Y[:, 1] = 3.0, Y[:, 1] + 1e6
    with jax.enable_x64(which == "float64"):
        start = _start(Y)
        losses = _fit(Y, start).losses
    return finite(start.latents), finite(losses)


@attempt("either", "float64, converged, bound, float32, jax_enable_x64")
def test_collapsed_in_float32_is_that_of_float64() -> Any:
    Y, steps = data(30), 100
    found = g.CollapsedGPLVM(_start(Y, size=6)).fit(p.x(Y), max_steps=steps, progress=False)
    with jax.enable_x64(True):
        expected = g.CollapsedGPLVM(_start(Y, size=6)).fit(Y, max_steps=steps, progress=False)
    return same(found.bounds[-1], expected.bounds[-1], 1e-2, 1.0)


@attempt("warning", "converged, steps, max_steps", x64=True)
def test_collapsed_stops_before_the_optimum() -> Any:
    return g.CollapsedGPLVM(_start(data(30), size=6)).fit(data(30), max_steps=3, progress=False).bounds[-1]


@attempt("answer")
def test_new_rows_that_are_training_rows() -> Any:
    """A row with nothing seen keeps the prior; the others are finite."""
    seen = np.ones((2, 3), bool)
    seen[1] = False
    found = _new(p.x(data()[:2]), mask=seen)
    return finite(found.loc), same(found.loc[1], [0.0], 0, 0.05), same(found.scale[1], [1.0], 0.05)
