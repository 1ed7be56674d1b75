"""Models: plates, masks, observations and the arithmetic of GP values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import problem as p
from judge import attempt, same
from numpyro import handlers
from numpyro.infer import autoguide

import npgp

# ---------------------------------------------------------------------------------------------------------------
# The plate does not scale what fit cuts


def _bare_plate(X, y):
    f = p.sparse_gp().draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X), p.gaussian(), obs=y)


def _no_plate(X, y):
    npgp.observe("y", p.sparse_gp().draw()(X), p.gaussian(), obs=y)


def _plate_of_half(X, y):
    f = p.sparse_gp().draw()
    with npgp.plate("data", p.N // 2, rows=X.shape[0]):
        npgp.observe("y", f(X), p.gaussian(), obs=y)


def _plate_of_batch(X, y):
    f = p.sparse_gp().draw()
    with npgp.plate("data", X.shape[0], rows=X.shape[0]):
        npgp.observe("y", f(X), p.gaussian(), obs=y)


def _one_statement_outside(X, y):
    f = p.sparse_gp().draw()
    with npgp.plate("data", p.N, rows=X.shape[0]):
        npgp.observe("y", f(X), p.gaussian(), obs=y)
    npgp.observe("z", p.sparse_gp("g").draw()(X), p.gaussian(), obs=y)


def _numpyro_site_outside(X, y):
    value = npgp.sample("fx", p.sparse_gp().draw()(X))
    numpyro.sample("y", dist.Normal(value, 0.4), obs=y)


def _of_size(X, y, *, size):
    f = p.sparse_gp().draw()
    with npgp.plate("data", size, rows=X.shape[0]):
        npgp.observe("y", f(X), p.gaussian(), obs=y)


UNSCALED: dict[str, Callable[..., None]] = {
    "README's first model": _bare_plate,
    "no plate": _no_plate,
    "a plate of half the rows": _plate_of_half,
    "a plate of the batch": _plate_of_batch,
    "one statement outside": _one_statement_outside,
    "a site of NumPyro's outside": _numpyro_site_outside,
}


@attempt("error", "plate, batch_size, size", cases=UNSCALED)
def test_batches_that_are_not_scaled(program: Callable[..., None]) -> Any:
    return p.fit(program, p.x(), p.x(p.Y), batch_size=4).losses


@attempt("error", "plate, batch_size, size", cases=("on the host", "a stream", "a stream of unknown size"))
def test_batches_that_are_not_scaled_from(where: str) -> Any:
    if where == "on the host":
        return p.fit(_bare_plate, p.X.astype(np.float32), p.Y.astype(np.float32), batch_size=4, on_host=True).losses
    batches = [(p.X[i : i + 4].astype(np.float32), p.Y[i : i + 4].astype(np.float32)) for i in (0, 4, 8)]
    program = _bare_plate if where == "a stream" else _plate_of_batch
    return p.fit(program, npgp.training.Stream(batches, num_rows=p.N)).losses


@attempt("error", "size, plate, batch_size", cases={"half": 6, "twice": 24})
def test_SVI_of_another_size(size: int) -> Any:
    return p.fit(_of_size, p.x(), p.x(p.Y), svi=p.svi_of(_of_size, size=size), batch_size=4).losses


@attempt("answer", cases={"size": p.N})
def test_SVI_of_the_right_size(size: int) -> Any:
    """The mean over the batches of an epoch is the loss of all rows."""
    svi = p.svi_of(_of_size, size=size, rate=0.0)
    losses = p.fit(
        _of_size, p.x(), p.x(p.Y), svi=svi, steps=3, batch_size=4, init_params=p.as_params(p.optimum())
    ).losses
    return same(np.mean(losses), -p.bound())


# ---------------------------------------------------------------------------------------------------------------
# Joint densities in a plate

JOINT: dict[str, Callable[[], Any]] = {
    "CollapsedGP": lambda: npgp.CollapsedGP(p.kernel(), p.x(), p.x(p.Z), noise_variance=p.NOISE),
    "ApproximateGP": lambda: npgp.ApproximateGP(p.kernel(), p.x(), p.x(p.Z), noise_variance=p.NOISE),
    "UncertainInputGP": lambda: npgp.collapsed.UncertainInputGP(
        p.kernel(), p.x(), 0.1, p.x(p.Z), noise_variance=p.NOISE
    ),
    "ResponseNNGP": lambda: npgp.neighbors.ResponseNNGP(p.kernel(), p.X.astype(np.float32), 3, noise_variance=p.NOISE),
    "NNGP": lambda: npgp.neighbors.NNGP(p.kernel(), p.X.astype(np.float32), 3),
}


@attempt("error", "plate", cases=JOINT)
def test_joint_density_in_a_plate(make: Callable[[], Any]) -> Any:
    with handlers.seed(rng_seed=0), handlers.trace() as trace, numpyro.plate("data", p.N):
        numpyro.sample("y", make(), obs=p.x(p.Y))
    return sum(jnp.sum(site["fn"].log_prob(site["value"])) for site in trace.values() if site["type"] == "sample")


@attempt("error", "plate", cases=("npgp.plate", "subsampled", "under SVI"))
def test_joint_density_in_other_plates(which: str) -> Any:
    def program(y):
        plate = {
            "npgp.plate": lambda: npgp.plate("data", 24, rows=p.N),
            "subsampled": lambda: numpyro.plate("data", 24, subsample_size=p.N),
        }.get(which, lambda: numpyro.plate("data", p.N))()
        with plate:
            numpyro.sample("y", JOINT["CollapsedGP"](), obs=y)

    return p.first_loss(program, p.x(p.Y), guide=autoguide.AutoNormal(program))


@attempt("warning", "plate")
def test_latent_values_of_neighbors_in_a_plate_of_rows() -> Any:
    def program(y):
        with numpyro.plate("data", p.N):
            f = numpyro.sample("f", JOINT["NNGP"]())
            numpyro.sample("y", dist.Normal(f, 0.4), obs=y)

    return p.first_loss(program, p.x(p.Y), guide=autoguide.AutoNormal(program))


@attempt("answer", cases=("of outputs", "none"))
def test_joint_density_where_it_may_be(which: str) -> Any:
    def program(y):
        if which == "none":
            numpyro.sample("y", JOINT["CollapsedGP"](), obs=y[0])
        else:
            with numpyro.plate("outputs", 2):
                numpyro.sample("y", JOINT["CollapsedGP"](), obs=y)

    y = p.x([p.Y, p.Y[::-1]])
    from numpyro.infer.util import log_density

    expected = p.bound() + (p.bound(y=p.Y[::-1]) if which == "of outputs" else 0.0)
    return same(log_density(program, (y,), {}, {})[0], expected)


# ---------------------------------------------------------------------------------------------------------------
# Plates and shapes of observations


def _outputs(count: int, y_shape: Callable[[np.ndarray], Any], *, drawn: bool = False, plate: bool = True):
    def program(X, y):
        if drawn:
            with numpyro.plate("outputs", count, dim=-2):
                f = p.sparse_gp().draw()
        else:
            f = p.sparse_gp().draw()
        with numpyro.plate("data", p.N):
            if plate:
                with numpyro.plate("outputs", count, dim=-2):
                    npgp.observe("y", f(X), p.gaussian(), obs=y)
            else:
                npgp.observe("y", f(X), p.gaussian(), obs=y)

    return p.first_loss(program, p.x(), p.x(y_shape(p.Y)))


REPLICAS: dict[str, Callable[[], Any]] = {
    "y is replicated by a plate at −2": lambda: _outputs(3, lambda y: y),
    "f of one function, y of several": lambda: _outputs(3, lambda y: np.stack([y] * 3)),
    "y of one output for two functions": lambda: _outputs(2, lambda y: y, drawn=True),
    "rows of y transposed": lambda: _outputs(2, lambda y: np.stack([y, y], 1), drawn=True),
    "a column": lambda: _outputs(1, lambda y: y[:, None], plate=False),
    "fewer rows": lambda: _outputs(1, lambda y: y[:5], plate=False),
    "one number": lambda: _outputs(1, lambda y: y[0], plate=False),
}


@attempt("error", "y, plate, shape", cases=REPLICAS)
def test_observations_of_another_shape(make: Callable[[], Any]) -> Any:
    return make()


@attempt("warning", "y, plate")
def test_the_plate_of_outputs_is_missing() -> Any:
    return _outputs(2, lambda y: np.stack([y, y]), drawn=True, plate=False)


@attempt("error", "plate, rows, data", cases={"fewer": 5, "more": 40, "one": 1})
def test_plate_of_another_size(size: int) -> Any:
    def program(X, y):
        f = p.sparse_gp().draw()
        with numpyro.plate("data", size):
            npgp.observe("y", f(X), p.gaussian(), obs=y)

    return p.first_loss(program, p.x(), p.x(p.Y))


# ---------------------------------------------------------------------------------------------------------------
# Observations and masks of the wrong kind

WRONG_Y: dict[str, tuple[str, Any]] = {
    "NaN": ("either", np.where(np.arange(p.N) == 2, np.nan, p.Y)),
    "complex": ("either", p.Y + 1j),
    "masked": ("either", np.ma.masked_array(p.Y, p.Y > 0.5)),
    "strings": ("either", p.Y.astype(str)),
    "objects": ("either", np.array([None] * p.N)),
    "dates": ("either", np.arange(p.N).astype("datetime64[D]")),
    "a dictionary": ("either", {"y": p.Y}),
}


@attempt("error", "y, observations, obs, mask, masked", cases=WRONG_Y)
def test_wrong_y(case: tuple[str, Any]) -> Any:
    program = _closed_over(case[1])
    return p.fit(program, p.x()).losses


@attempt("error", "y, obs", cases=["NaN", "complex", "masked", "strings", "objects"])
def test_wrong_y_of_CollapsedGP(what: str) -> Any:
    return npgp.CollapsedGP(p.kernel(), p.x(), p.x(p.Z), noise_variance=p.NOISE).log_prob(WRONG_Y[what][1])


def _closed_over(y: Any, mask: Any = None) -> Callable[..., None]:
    def program(X):
        npgp.observe("y", p.sparse_gp().draw()(X), p.gaussian(), obs=y, mask=mask)

    return program


@attempt(
    "either",
    "y, observations, obs",
    cases=("list", "data frame's column", "float64", "big-endian", "whole numbers"),
)
def test_odd_y(what: str) -> Any:
    import pandas as pd

    y = np.round(p.Y * 3) if what == "whole numbers" else p.Y
    given = {
        "list": y.tolist(),
        "data frame's column": pd.Series(y),
        "float64": y,
        "big-endian": y.astype(">f8"),
        "whole numbers": y.astype(int),
    }[what]
    return same(p.first_loss(_closed_over(given), p.x(), params=p.as_params(p.optimum(y=y))), -p.bound(y=y))


MASKS: dict[str, Any] = {
    "numbers": np.linspace(0.0, 1.0, p.N),
    "zeros and ones": (np.arange(p.N) % 2).astype(np.int32),
    "NumPy's convention, a masked array": np.ma.masked_array(np.ones(p.N, bool), np.arange(p.N) == 1),
    "strings": np.array(["yes"] * p.N),
    "fewer rows": np.ones(5, bool),
    "a column": np.ones((p.N, 1), bool),
    "one number": True,
}


@attempt("error", "mask", cases=MASKS.keys())
def test_wrong_mask(what: str) -> Any:
    return p.fit(_closed_over(p.x(p.Y), MASKS[what]), p.x()).losses


@attempt("answer", cases=("none", "some", "all"))
def test_rows_that_are_masked(which: str) -> Any:
    mask = {"none": np.ones(p.N, bool), "some": np.arange(p.N) % 3 > 0, "all": np.zeros(p.N, bool)}[which]
    y = np.where(mask, p.Y, np.nan)
    q = p.optimum(p.X[mask], p.Y[mask]) if mask.any() else {"f.u.loc": np.zeros(4), "f.u.scale_tril": np.eye(4)}
    expected = p.bound(inputs=p.X[mask], y=p.Y[mask]) if mask.any() else 0.0
    return same(p.first_loss(_closed_over(p.x(y), mask), p.x(), params=p.as_params(q)), -expected)


@attempt("either", "mask, grouped, groups", cases=("handlers.mask", "mask="))
def test_grouped_with_masked_rows(which: str) -> Any:
    groups, mask = np.arange(p.N).reshape(4, 3), np.arange(p.N) % 3 > 0

    def program(X, y):
        f = p.sparse_gp().draw()
        if which == "mask=":
            npgp.observe("y", f(X), p.gaussian(), obs=y, mask=mask, conditional=npgp.conditionals.Grouped(3))
        else:
            with handlers.mask(mask=jnp.asarray(mask)):
                npgp.observe("y", f(X), p.gaussian(), obs=y, conditional=npgp.conditionals.Grouped(3))

    q = p.as_params(p.optimum(p.X[mask], p.Y[mask]))
    places = np.cumsum(mask) - 1
    expected = p.bound("grouped", p.X[mask], p.Y[mask], groups=[places[g[mask[g]]] for g in groups])
    return same(p.first_loss(program, p.x(), p.x(p.Y), params=q), -expected)


@attempt("either", "ELBO, scale, weights", cases=("weights", "NaN"))
def test_weights_of_rows(which: str) -> Any:
    weights = {
        "weights": np.linspace(0.5, 2.0, p.N),
        "NaN": np.full(p.N, np.nan),
    }[which]
    A, D = p.projected()
    q = p.optimum()
    S = q["f.u.scale_tril"] @ q["f.u.scale_tril"].T
    mean, s = A.T @ q["f.u.loc"], np.einsum("mn,mk,kn->n", A, S, A)
    rows = -0.5 * (np.log(2 * np.pi * p.NOISE) + ((p.Y - mean) ** 2 + s) / p.NOISE + np.log1p(np.diag(D) / p.NOISE))
    kl = 0.5 * (np.trace(S) + q["f.u.loc"] @ q["f.u.loc"] - 4 - np.linalg.slogdet(S)[1])

    def program(X, y):
        f = p.sparse_gp().draw()
        with numpyro.plate("data", p.N), handlers.scale(scale=jnp.asarray(weights)):
            npgp.observe("y", f(X), p.gaussian(), obs=y)

    if which == "NaN":
        return p.fit(program, p.x(), p.x(p.Y)).losses
    return same(p.first_loss(program, p.x(), p.x(p.Y), params=p.as_params(q)), kl - np.sum(weights * rows))
