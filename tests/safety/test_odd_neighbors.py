"""Neighbors: their search, NNGP, kriging and VNNGP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import problem as p
from judge import attempt, finite, mistakes, same
from numpyro import handlers

import npgp
from npgp import neighbors as nb


def _sites() -> np.ndarray:
    """Where the problem's rows are, as numbers that JAX does not trace."""
    return p.X.astype(jnp.result_type(float))


def _program(**options: Any) -> Callable[..., None]:
    def program(X, y):
        f = npgp.VNNGP("f", p.kernel(), _sites(), 3, **options).draw()
        with npgp.plate("data", p.N, rows=X.shape[0]):
            npgp.observe("y", f(X), p.gaussian(), obs=y)

    return program


def _f(**options: Any) -> Any:
    with handlers.seed(rng_seed=0):
        return npgp.VNNGP("f", p.kernel(), p.x(), 3, **options).draw()


MISTAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    "no neighbors": ("size, neighbors", lambda: nb.nearest_before(p.X, 0)),
    "half a neighbor": ("size, neighbors", lambda: nb.nearest_before(p.X, 1.5)),
    "neighbors as a string": ("size, neighbors", lambda: nb.NNGP(p.kernel(), p.x(), "3")),
    "an unknown order": ("ordering", lambda: nb.nearest_before(p.X, 3, ordering="random walk")),
    "a random order without a key": ("rng_key", lambda: nb.nearest_before(p.X, 3, ordering="random")),
    "NaN sites": ("X", lambda: nb.nearest_before(np.where(p.X > 2, np.nan, p.X), 3)),
    "whole-number sites": ("X, X_new", lambda: nb.nearest(np.arange(4)[:, None], p.X, 3)),
    "more neighbors than sites": ("size, rows, sites", lambda: nb.nearest(p.X, p.X, 40)),
    "other columns": ("columns, X_new, X", lambda: nb.nearest(np.ones((3, 2)), p.X, 2)),
    "a scale of zero": ("scale", lambda: nb.nearest(p.X, p.X, 3, scale=0.0)),
    "a negative scale": ("scale", lambda: nb.nearest_before(p.X, 3, scale=-1.0)),
    "neighbors of other sites": ("neighbors", lambda: nb.NNGP(p.kernel(), p.x(), nb.nearest_before(p.X[:6], 2))),
    "values of other sites": ("value", lambda: nb.NNGP(p.kernel(), p.x(), 3).log_prob(p.x(p.Y[:4]))),
    "conditioning on NaN": ("value, y", lambda: nb.NNGP(p.kernel(), p.x(), 3).condition(p.x(p.Y * np.nan))),
    "traced sites": ("X", lambda: jax.jit(lambda X: nb.NNGP(p.kernel(), X, 3).log_prob(p.x(p.Y)))(p.x())),
    "kriging at other columns": (
        "columns",
        lambda: nb.NNGP(p.kernel(), p.x(), 3).condition(p.x(p.Y)).mean(p.x(np.ones((2, 2)))),
    ),
    "kriging with neighbors of other rows": (
        "neighbors",
        lambda: nb.NNGP(p.kernel(), p.x(), 3).condition(p.x(p.Y)).mean(p.x(p.X_NEW), neighbors=np.zeros((2, 3), int)),
    ),
    "kriging with neighbors that are not there": (
        "neighbors",
        lambda: nb.NNGP(p.kernel(), p.x(), 3).condition(p.x(p.Y)).mean(p.x(p.X_NEW), neighbors=np.full((3, 2), 99)),
    ),
    "kriging with negative neighbors": (
        "neighbors",
        lambda: nb.NNGP(p.kernel(), p.x(), 3).condition(p.x(p.Y)).mean(p.x(p.X_NEW), neighbors=np.full((3, 2), -1)),
    ),
    "kriging with neighbors in halves": (
        "neighbors",
        lambda: nb.NNGP(p.kernel(), p.x(), 3).condition(p.x(p.Y)).mean(p.x(p.X_NEW), neighbors=np.full((3, 2), 0.5)),
    ),
    "a batch of more inducing points than there are": (
        "batch_size",
        lambda: npgp.VNNGP("f", p.kernel(), p.x(), 3, batch_size=13),
    ),
    "no batch": ("batch_size", lambda: npgp.VNNGP("f", p.kernel(), p.x(), 3, batch_size=0)),
    "means of other points": ("init_loc", lambda: npgp.VNNGP("f", p.kernel(), p.x(), 3, init_loc=np.zeros(5))),
    "a negative start": ("init_scale", lambda: npgp.VNNGP("f", p.kernel(), p.x(), 3, init_scale=-1.0)),
    "no name": ("name", lambda: npgp.VNNGP(None, p.kernel(), p.x(), 3)),
    "the component is called": ("draw", lambda: npgp.VNNGP("f", p.kernel(), p.x(), 3)(p.x())),
    "draws inside a plate": ("plate", lambda: _drawn_in_a_plate()),
    "rows with neighbors that are not there": ("neighbors", lambda: _f()(p.x(), np.full((p.N, 2), 50))),
    "rows with neighbors of other rows": ("neighbors", lambda: _f()(p.x(), np.zeros((3, 2), int))),
    "params of another component": ("params, f.u.loc", lambda: npgp.VNNGP("f", p.kernel(), p.x(), 3).posterior({})),
    "a batched guide without batches of rows": (
        "plate, size, batch_size, neighbors",
        lambda: p.fit(_program(batch_size=4), p.x(p.X[:6]), p.x(p.Y[:6])).losses,
    ),
}


def _drawn_in_a_plate() -> Any:
    with handlers.seed(rng_seed=0), numpyro.plate("outputs", 2, dim=-2):
        return npgp.VNNGP("f", p.kernel(), p.x(), 3).draw()


@mistakes(MISTAKES)
def test_mistake(make: Callable[[], Any]) -> Any:
    return make()


@attempt("answer", cases={"all": p.N - 1, "more than there are": 40}, x64=None)
def test_vecchia_with_all_neighbors_is_the_GP(k: int) -> Any:
    k = min(k, p.N - 1) if k == p.N - 1 else k
    response = nb.ResponseNNGP(p.kernel(), p.x(), k, noise_variance=p.NOISE)
    return same(jax.jit(lambda y: response.log_prob(y))(p.x(p.Y)), p.log_evidence())


@attempt("either", "X, sites, neighbors, jitter, duplicate", cases=("NNGP", "ResponseNNGP", "VNNGP"))
def test_duplicate_sites(which: str) -> Any:
    X = np.repeat(p.X[:6], 2, axis=0)
    if which == "ResponseNNGP":
        return same(
            nb.ResponseNNGP(p.kernel(), p.x(X), 11, noise_variance=p.NOISE).log_prob(p.x(p.Y)), p.log_evidence(X)
        )
    if which == "NNGP":
        y = np.repeat(p.Y[:6], 2)
        return finite(nb.NNGP(p.kernel(), p.x(X), 3).log_prob(p.x(y)))

    def program(X, y):
        f = npgp.VNNGP("f", p.kernel(), X, 3).draw()
        npgp.observe("y", f(X), p.gaussian(), obs=y)

    with jax.ensure_compile_time_eval():
        inputs = p.x(X)

    def closed(y):
        program(inputs, y)

    return finite(p.fit(closed, p.x(p.Y), steps=5).losses)
