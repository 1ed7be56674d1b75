"""``fit`` and what goes with it: options, sources of batches, numbers that turn bad, and training that goes nowhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import problem as p
from judge import attempt, mistakes, same, true
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp


def batched(X, y):
    """Right for minibatches."""
    f = p.sparse_gp().draw()
    with npgp.plate("data", p.N, rows=X.shape[0]):
        npgp.observe("y", f(X), p.gaussian(), obs=y)


def _fit(*args: Any, program: Callable[..., None] = batched, **options: Any) -> Any:
    return p.fit(program, *(args or (p.x(), p.x(p.Y))), **options)


OPTIONS: dict[str, tuple[str, Callable[[], Any]]] = {
    "no steps": ("num_steps", lambda: _fit(steps=0)),
    "half a step": ("num_steps", lambda: _fit(steps=1.5)),
    "steps as a string": ("num_steps", lambda: _fit(steps="10")),
    "batches of no rows": ("batch_size", lambda: _fit(batch_size=0)),
    "batches of more rows than there are": ("batch_size", lambda: _fit(batch_size=13)),
    "batches of 2.5 rows": ("batch_size", lambda: _fit(batch_size=2.5)),
    "groups that do not divide": ("group_size", lambda: _fit(batch_size=4, group_size=3)),
    "groups of no rows": ("group_size", lambda: _fit(batch_size=4, group_size=0)),
    "no steps in a call": ("steps_per_call", lambda: _fit(steps_per_call=0)),
    "a monitor that is a function": ("monitor", lambda: _fit(monitor=lambda params: 0.0)),
    "checkpoints as a path": ("checkpoints", lambda: _fit(checkpoints="folder")),
    "sharding as a number": ("sharding", lambda: _fit(sharding=2)),
    "a number for an SVI": ("svi", lambda: npgp.fit(3, p.key(), 2, p.x(), progress=False)),
    "a model for an SVI": ("svi", lambda: npgp.fit(batched, p.key(), 2, p.x(), progress=False)),
    "a number for a key": ("rng_key", lambda: npgp.fit(p.svi_of(batched), 0, 2, p.x(), p.x(p.Y), progress=False)),
    "row_optim as an optimizer": ("row_optim", lambda: _fit(row_optim=optax.adam(0.1))),
    "initial values of no parameter": ("init_params", lambda: _fit(init_params={"f.w.loc": p.x(np.zeros(4))})),
    "initial values of another shape": (
        "init_params, f.u.loc",
        lambda: _fit(init_params={"f.u.loc": p.x(np.zeros(9))}),
    ),
    "initial values that are NaN": (
        "init_params, f.u.loc, ELBO",
        lambda: _fit(init_params={"f.u.loc": p.x(np.full(4, np.nan))}),
    ),
    "a state of another model": (
        "init_state",
        lambda: _fit(
            init_state=p.fit(
                lambda: numpyro.sample("x", dist.Normal()),
                svi=SVI(lambda: None, lambda: numpyro.param("a", 0.0), npgp.adam(0.1), TraceMeanField_ELBO()),
            ).state
        ),
    ),
    "parameters for a state": ("init_state", lambda: _fit(init_state=_fit().params)),
    "rows of two numbers": ("rows, y, shape, plate, observations", lambda: _fit(p.x(), p.x(p.Y[:8]), batch_size=4)),
    "NaN in an argument": ("args[1], y", lambda: _fit(p.x(), p.x(np.where(p.Y > 0, p.Y, np.nan)))),
    "an infinite number": ("args[0], X", lambda: _fit(p.x(np.where(p.X > 3, np.inf, p.X)), p.x(p.Y))),
    "a rate that is negative": ("learning_rate", lambda: npgp.adam(-0.1)),
    "a rate of NaN": ("learning_rate", lambda: npgp.adam(np.nan)),
    "a schedule of no steps": ("num_steps", lambda: npgp.adam(0.1, 0)),
    "a monitor that returns an array": (
        "metric, number",
        lambda: _fit(monitor=npgp.training.Monitor(lambda params: np.zeros(3), every=1)),
    ),
    "a monitor of no patience": ("patience", lambda: npgp.training.Monitor(lambda params: 0.0, patience=0)),
    "a stream of nothing": ("Stream, batch, batches", lambda: p.fit(p.model, npgp.training.Stream([]))),
    "a stream of unlike batches": (
        "Batch, batch",
        lambda: p.fit(p.model, npgp.training.Stream([(p.x(), p.x(p.Y)), (p.x(p.X[:5]), p.x(p.Y[:4]))]), steps=4),
    ),
    "a stream that ends": (
        "Stream, iterator",
        lambda: p.fit(p.model, npgp.training.Stream(iter([(p.X, p.Y)] * 2), num_rows=p.N), steps=5),
    ),
    "a stream of strings": ("Batch, batch, array", lambda: p.fit(p.model, npgp.training.Stream([np.array(["a"])]))),
    "a stream of NaN": (
        "batches, source, NaN",
        lambda: p.fit(p.model, npgp.training.Stream([(p.x(), p.x(p.Y * np.nan))])),
    ),
    "a stream of a number": ("Stream, batch, Batch", lambda: p.fit(p.model, npgp.training.Stream([1.0]))),
    "evaluation without draws": (
        "num_draws",
        lambda: npgp.evaluate(p.svi_of(batched), p.key(), _fit(), p.x(), p.x(p.Y), num_draws=0),
    ),
    "evaluation of nothing": ("result", lambda: npgp.evaluate(p.svi_of(batched), p.key(), None, p.x(), p.x(p.Y))),
}


@mistakes(OPTIONS)
def test_option(make: Callable[[], Any]) -> Any:
    return make()


# ---------------------------------------------------------------------------------------------------------------
# Rows after the first batch


@attempt("error", "y, observations, row, rows", cases=("out of support", "NaN by allow_nan", "on the host", "a stream"))
def test_bad_row_in_a_later_batch(which: str) -> Any:
    """Batches of four, one epoch and more: one row of twelve cannot be."""
    y = p.COUNTS.astype(np.float32)
    y[7] = -3.0 if which != "NaN by allow_nan" else np.nan

    def program(X, y):
        f = p.sparse_gp().draw()
        with npgp.plate("data", p.N, rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Poisson("softplus"), obs=y)

    X = p.X.astype(np.float32)
    options: dict[str, Any] = dict(steps=6, allow_nan=which == "NaN by allow_nan")
    if which == "a stream":
        return p.fit(
            program, npgp.training.Stream([(X[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)], num_rows=p.N), **options
        ).losses
    return p.fit(program, X, y, batch_size=4, on_host=which == "on the host", **options).losses


# ---------------------------------------------------------------------------------------------------------------
# Under jit, in threads


@attempt("error", "fit, jit", cases=("jit", "vmap", "grad"))
def test_fit_inside(transformation: str) -> Any:
    def of(y):
        return p.fit(batched, p.x(), y).losses[-1]

    if transformation == "vmap":
        return jax.vmap(of)(p.x([p.Y, p.Y]))
    return getattr(jax, transformation)(lambda y: jnp.sum(of(y)))(p.x(p.Y))


@attempt("either", "svi, thread, threads")
def test_one_svi_in_several_threads() -> Any:
    svi = p.svi_of(batched)
    expected = np.asarray(p.fit(batched, p.x(), p.x(p.Y), steps=30).losses)
    found: list[Any] = [None] * 4
    errors: list[BaseException] = []

    def work(i):
        try:
            found[i] = np.asarray(p.fit(batched, p.x(), p.x(p.Y), steps=30, svi=svi).losses)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [same(losses, expected) for losses in found]


# ---------------------------------------------------------------------------------------------------------------
# Training that goes nowhere


def _coal(init_scale: float | None) -> Callable[..., None]:
    def program(X, y):
        options = {} if init_scale is None else {"init_scale": init_scale}
        f = p.sparse_gp("f", jnp.linspace(0, 10, 12)[:, None], **options).draw()
        npgp.observe("y", f(X) * 1.5, npgp.Poisson(), obs=y)

    return program


def _counts() -> tuple[Any, Any]:
    X = np.linspace(0, 10, 60)[:, None]
    rate = np.exp(1.0 + np.sin(X[:, 0]))
    return p.x(X), p.x(np.random.default_rng(1).poisson(rate))


@attempt("answer")
def test_the_start_is_safe_for_exponential_links() -> Any:
    """The first loss is within some hundred nats of what training comes to, not a million above."""
    losses = p.fit(_coal(None), *_counts(), steps=300, svi=p.svi_of(_coal(None), rate=0.05)).losses
    return true(losses[0] < losses[-1] + 1000.0, f"first {losses[0]:.4g}, last {losses[-1]:.4g}")


@attempt("warning", "loss, losses, ELBO, learning_rate, steps", cases=("rising", "still falling"))
def test_a_loss_that_is_not_done(which: str) -> Any:
    def program(X, y):
        a = numpyro.param("a", 5.0)
        npgp.observe("y", p.sparse_gp().draw()(X) + a, p.gaussian(), obs=y)

    # Of fewer than 500 steps, as ``fit`` documents, nothing is said.
    rate, steps = (30.0, 600) if which == "rising" else (1e-3, 600)
    svi = SVI(
        program,
        npgp.AutoSparseGP(program),
        optax.sgd(1e-9) if which == "flat" else npgp.adam(rate),
        TraceMeanField_ELBO(),
    )
    losses = p.fit(program, p.x(), p.x(p.Y), steps=steps, svi=svi).losses
    return losses[[0, -1]]


@attempt("error", "ELBO, gradient, learning rate")
def test_rates_that_are_far_too_large() -> Any:
    def program(X, y):
        l = numpyro.param("l", 1.0, constraint=constraints.positive)
        npgp.observe("y", npgp.SparseGP("f", npgp.RBF(l), p.x(p.Z)).draw()(X), npgp.Poisson(), obs=y)

    losses = p.fit(program, p.x(), p.x(p.COUNTS), steps=50, svi=p.svi_of(program, rate=1e3)).losses
    return losses[[0, -1]]
