"""Inputs, inducing inputs and noise of the wrong kind, shape or value, or of an odd one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import problem as p
from judge import attempt, same

import npgp


def _in_model(X: Any) -> Any:
    def program(X, y):
        npgp.observe("y", p.sparse_gp().draw()(X), p.gaussian(), obs=y)

    return same(p.first_loss(program, X, p.x(p.Y), params=p.as_params(p.optimum())), -p.bound())


def _collapsed(X: Any) -> Any:
    return same(npgp.CollapsedGP(p.kernel(), X, p.x(p.Z), noise_variance=p.NOISE).log_prob(p.x(p.Y)), p.bound())


def _exact(X: Any) -> Any:
    return same(npgp.collapsed.exact_log_evidence(p.kernel(), X, p.x(p.Y), noise_variance=p.NOISE), p.log_evidence())


def _fitc(X: Any) -> Any:
    A, D = p.projected()
    expected = p.log_normal(p.Y, A.T @ A + np.diag(np.diag(D) + p.NOISE))
    return same(npgp.ApproximateGP(p.kernel(), X, p.x(p.Z), noise_variance=p.NOISE).log_prob(p.x(p.Y)), expected)


def _nngp(X: Any) -> Any:
    gp = npgp.neighbors.ResponseNNGP(p.kernel(), X, p.N - 1, noise_variance=p.NOISE)
    return same(gp.log_prob(p.x(p.Y)), p.log_evidence())


def _posterior(X: Any) -> Any:
    posterior = p.sparse_gp().posterior(p.as_params(p.optimum()))
    return same(posterior.mean(X), p.exact_posterior(p.X)[0])


USES: dict[str, Callable[[Any], Any]] = {
    "in a model": _in_model,
    "CollapsedGP": _collapsed,
    "exact_log_evidence": _exact,
    "ApproximateGP": _fitc,
    "ResponseNNGP": _nngp,
    "Posterior.mean": _posterior,
}


def _with(row: int, value: float) -> np.ndarray:
    X = p.X.astype(np.float32)
    X[row, 0] = value
    return X


WRONG: dict[str, Callable[[], Any]] = {
    "whole numbers": lambda: np.arange(p.N)[:, None],
    "booleans": lambda: p.X > 2.0,
    "a vector": lambda: p.X[:, 0].astype(np.float32),
    "three axes": lambda: p.X[:, :, None].astype(np.float32),
    "no rows": lambda: np.zeros((0, 1), np.float32),
    "no columns": lambda: np.zeros((p.N, 0), np.float32),
    "two columns": lambda: np.hstack([p.X, p.X]).astype(np.float32),
    "NaN": lambda: _with(3, np.nan),
    "infinity": lambda: _with(0, np.inf),
    "complex numbers": lambda: p.X + 1j,
    "strings": lambda: p.X.astype(str),
    "objects": lambda: np.array([[None]] * p.N),
    "dates": lambda: np.arange(p.N).astype("datetime64[s]")[:, None],
    "a masked array": lambda: np.ma.masked_array(p.X, np.arange(p.N)[:, None] == 2),
    "None": lambda: None,
}

#: What can be taken for the same inputs, or refused.
ODD: dict[str, Callable[[], Any]] = {
    "a list of lists": lambda: p.X.tolist(),
    "objects that are numbers": lambda: p.X.astype(object),
    "a data frame": lambda: pd.DataFrame({"x": p.X[:, 0]}),
    "big-endian": lambda: p.X.astype(">f8"),
    "Fortran order, strided": lambda: np.asfortranarray(np.repeat(p.X, 3, axis=1))[:, 1:2],
    "read-only": lambda: np.frombuffer(p.X.tobytes()).reshape(-1, 1),
    "a JAX array": lambda: jnp.asarray(p.X),
    "nothing masked": lambda: np.ma.masked_array(p.X, False),
}

_cases = {f"{use}, {what}": (USES[use], make) for use in ("in a model", "CollapsedGP") for what, make in WRONG.items()}
_more = {
    f"{use}, {what}": (USES[use], WRONG[what])
    for use in ("exact_log_evidence", "ApproximateGP", "ResponseNNGP", "Posterior.mean")
    for what in ("whole numbers", "a vector", "no rows", "NaN", "two columns", "a masked array")
    if not (what == "two columns" and use in ("exact_log_evidence", "ResponseNNGP"))  # whose answer is right
}


@attempt("error", "X, inputs, array, arrays, columns, args[0], inducing", cases=_cases | _more)
def test_wrong_X(case: Any) -> Any:
    use, make = case
    use(make())
    return "no error"


@attempt(
    "either",
    "X, inputs",
    cases={f"{u}, {w}": (USES[u], ODD[w]) for u in ("in a model", "CollapsedGP") for w in ODD},
)
def test_odd_X(case: Any) -> Any:
    use, make = case
    return use(make())


WRONG_Z: dict[str, Callable[[], Any]] = {
    "whole numbers": lambda: np.arange(4)[:, None],
    "a vector": lambda: p.x(p.Z)[:, 0],
    "no points": lambda: np.zeros((0, 1), np.float32),
    "no blocks": lambda: [],
    "NaN": lambda: np.array([[0.0], [np.nan]], np.float32),
    "other columns": lambda: np.zeros((4, 2), np.float32),
    "a string": lambda: "points",
    "complex numbers": lambda: p.Z + 1j,
    "a masked array": lambda: np.ma.masked_array(p.Z, p.Z > 3),
    "a list of numbers": lambda: [0.4, 1.5, 2.6, 3.7],
    "a kernel": lambda: p.kernel(),
}


@attempt("error", "inducing, inducing[0], inputs, columns", cases=WRONG_Z)
def test_wrong_Z(make: Callable[[], Any]) -> Any:
    def program(X, y):
        f = npgp.SparseGP("f", p.kernel(), make()).draw()
        npgp.observe("y", f(X), p.gaussian(), obs=y)

    return p.fit(program, p.x(), p.x(p.Y)).losses


@attempt("answer", cases={"twice the same": [0, 0, 1, 2, 3], "all rows": None}, x64=True)
def test_points_that_coincide(rows: Any) -> Any:
    Z = p.X if rows is None else p.Z[rows]
    found = npgp.CollapsedGP(p.kernel(), p.X, Z, noise_variance=p.NOISE).log_prob(p.Y)
    return same(found, p.log_evidence() if rows is None else p.bound(), 1e-5)


@attempt("answer", x64=None)
def test_fewer_rows_than_points() -> Any:
    X, y = p.X[:2], p.Y[:2]
    found = npgp.CollapsedGP(p.kernel(), p.x(X), p.x(p.Z), noise_variance=p.NOISE).log_prob(p.x(y))
    return same(found, p.bound(inputs=X, y=y))


@attempt("answer", cases=("CollapsedGP", "exact_log_evidence", "ResponseNNGP"))
def test_one_row(which: str) -> Any:
    X, y = p.x(p.X[:1]), p.x(p.Y[:1])
    if which == "CollapsedGP":
        return same(
            npgp.CollapsedGP(p.kernel(), X, X, noise_variance=p.NOISE).log_prob(y), p.log_evidence(p.X[:1], p.Y[:1])
        )
    if which == "ResponseNNGP":
        return same(
            npgp.neighbors.ResponseNNGP(p.kernel(), X, 1, noise_variance=p.NOISE).log_prob(y),
            p.log_evidence(p.X[:1], p.Y[:1]),
        )
    return same(
        npgp.collapsed.exact_log_evidence(p.kernel(), X, y, noise_variance=p.NOISE), p.log_evidence(p.X[:1], p.Y[:1])
    )


@attempt("answer", cases={"tight": "tight", "full": "full", "shared": "shared", "prior": "prior"}, x64=True)
def test_all_rows_the_same(conditional: str) -> Any:
    X = np.full((p.N, 1), 1.7)
    found = npgp.CollapsedGP(p.kernel(), X, X[:1], noise_variance=p.NOISE, conditional=conditional).log_prob(p.Y)
    return same(found, p.log_evidence(X), 1e-4)


def _times(spread: float) -> np.ndarray:
    """Unix times, which float32 holds to 128 s."""
    return 1.7e9 + spread * np.arange(200.0)[:, None]


@attempt("warning", "X, args[0], inputs", cases={"2 s apart": 2.0, "1 minute apart": 60.0})
def test_times_that_merge_in_float32(spread: float) -> Any:
    X = _times(spread)
    return npgp.CollapsedGP(npgp.Matern32(20 * spread), X, X[::20], noise_variance=0.1).log_prob(
        np.sin(np.arange(200.0))
    )


@attempt("warning", "X, args[0], inputs, argument 'X'")
def test_times_that_merge_in_training() -> Any:
    X, y = _times(2.0), np.sin(np.arange(200.0) / 10)

    def program(X, y):
        f = npgp.SparseGP("f", npgp.Matern32(40.0), X[::40]).draw()
        npgp.observe("y", f(X), p.gaussian(), obs=y)

    return p.fit(program, X, y).losses


@attempt("answer", cases=("map", "NumPy", "JAX"))
def test_standardizer_of_times(which: str) -> Any:
    X = _times(2.0)
    expected = (X - X.mean(0)) / X.std(0)
    scaled = npgp.Standardizer.of(X)(X)
    if which == "map":
        return same(np.unique(np.asarray(scaled)).size, 200, what="different values")
    if which == "NumPy":
        return same(scaled, expected, atol=1e-5)
    y = jnp.sin(jnp.arange(200.0) / 10)
    inputs = jnp.asarray(scaled, jnp.float32)
    found = npgp.collapsed.exact_log_evidence(npgp.RBF(0.3), inputs, y, noise_variance=0.1)
    expected_evidence = p.log_evidence(expected, np.sin(np.arange(200.0) / 10), 0.1, lengthscale=0.3, variance=1.0)
    return same(found, expected_evidence)


@attempt("either", "mask, masked", cases=("inputs", "targets"))
def test_standardizer_of_a_masked_array(which: str) -> Any:
    values = p.X if which == "inputs" else p.Y
    data = np.ma.masked_array(values, values > 0.5)
    s = npgp.Standardizer.of(data)
    return same(np.ravel(s.mean)[0], data.mean()), same(np.ravel(s.scale)[0], data.std())


@attempt("error", "mask, masked", cases=("in memory", "on the host", "on the host, by keyword"))
def test_masked_array_in_training(which: str) -> Any:
    y = np.ma.masked_array(p.Y, np.arange(p.N) == 3)
    options = {} if which == "in memory" else dict(on_host=True, batch_size=4)

    def program(X, y):
        f = p.sparse_gp().draw()
        with npgp.plate("data", p.N, rows=len(X)):
            npgp.observe("y", f(X), p.gaussian(), obs=y)

    if "keyword" in which:
        return p.fit(program, p.X, y=y, **options).losses
    return p.fit(program, p.X, y, **options).losses


NOISES: dict[str, Any] = {
    "zero": 0.0,
    "negative": -0.1,
    "NaN": np.nan,
    "infinity": np.inf,
    "a string": "0.1",
    "None": None,
    "of fewer rows": np.full(3, 0.1, np.float32),
    "a column": np.full((p.N, 1), 0.1, np.float32),
    "complex": 0.1 + 0.1j,
    "one row negative": np.where(np.arange(p.N) == 4, -1.0, 0.1).astype(np.float32),
}


@attempt("error", "noise_variance", cases=NOISES)
def test_wrong_noise(noise: Any) -> Any:
    return npgp.CollapsedGP(p.kernel(), p.x(), p.x(p.Z), noise_variance=noise).log_prob(p.x(p.Y))


@attempt("error", "noise_variance", cases=("zero", "negative", "a column", "a string"))
def test_wrong_noise_of_the_exact_evidence(which: str) -> Any:
    return npgp.collapsed.exact_log_evidence(p.kernel(), p.x(), p.x(p.Y), noise_variance=NOISES[which])


@attempt("answer", cases={"list": list, "tuple": tuple, "numpy": np.asarray})
def test_noise_for_each_row(make: Callable[[Any], Any]) -> Any:
    noise = np.linspace(0.1, 0.4, p.N)
    given = make(noise.astype(np.float32).tolist())
    found = npgp.CollapsedGP(p.kernel(), p.x(), p.x(p.Z), noise_variance=given).log_prob(p.x(p.Y))
    return same(found, p.bound(noise=noise))


@attempt("answer", cases=("jit", "vmap", "jacfwd"), x64=True)
def test_bound_under_transformations(which: str) -> Any:
    def of(noise, X=None):
        return npgp.CollapsedGP(p.kernel(), p.x() if X is None else X, p.x(p.Z), noise_variance=noise).log_prob(
            p.x(p.Y)
        )

    if which == "jit":
        return same(jax.jit(of)(0.2, p.x()), p.bound(), 1e-6)
    noises = np.array([0.1, 0.2, 0.4])
    if which == "vmap":
        return same(jax.vmap(of)(noises), [p.bound(noise=n) for n in noises], 1e-6)
    h = 1e-5
    slope = (p.bound(noise=0.2 + h) - p.bound(noise=0.2 - h)) / (2 * h)
    return same(jax.jacfwd(of)(0.2), slope, 1e-4)
