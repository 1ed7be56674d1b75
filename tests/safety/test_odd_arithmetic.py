"""GP values in expressions, and statements in the wrong place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import problem as p
from judge import attempt, mistakes, same
from numpyro import handlers

import npgp


def _f() -> Any:
    return p.sparse_gp().draw()


def _g() -> Any:
    return p.sparse_gp("g").draw()


def _two() -> Any:
    with numpyro.plate("outputs", 2, dim=-2):
        return p.sparse_gp("h").draw()


EXPRESSIONS: dict[str, Callable[[], Any]] = {
    "jnp.exp": lambda: jnp.exp(_f()(p.x())),
    "np.exp": lambda: np.exp(_f()(p.x())),
    "jnp.sum": lambda: jnp.sum(_f()(p.x())),
    "jnp.where": lambda: jnp.where(p.x(p.Y) > 0, _f()(p.x()), 0.0),
    "jax.nn.softplus": lambda: jax.nn.softplus(_f()(p.x())),
    "np.asarray": lambda: np.asarray(_f()(p.x())),
    "float": lambda: float(_f()(p.x(p.X[:1]))),
    "a power": lambda: _f()(p.x()) ** 2,
    "an index": lambda: _f()(p.x())[0],
    "len": lambda: len(_f()(p.x())),
    "iteration": lambda: list(_f()(p.x())),
    "a comparison": lambda: _f()(p.x()) > 0,
    "truth": lambda: bool(_f()(p.x())),
    "a product": lambda: _f()(p.x()) * _g()(p.x()),
    "division by GP values": lambda: 1.0 / _f()(p.x()),
    "f @ W": lambda: _two()(p.x()) @ jnp.ones((2, 2)),
    "abs": lambda: abs(_f()(p.x())),
    "jnp.concatenate": lambda: jnp.concatenate([_f()(p.x()), _g()(p.x())]),
    "jnp.stack": lambda: jnp.stack([_f()(p.x()), _g()(p.x())]),
    "numpyro.deterministic": lambda: jnp.asarray(numpyro.deterministic("fx", _f()(p.x()))),
    "in a distribution": lambda: numpyro.sample("y", dist.Normal(_f()(p.x()), 0.1), obs=p.x(p.Y)),
    "in a Poisson": lambda: numpyro.sample("y", dist.Poisson(rate=_f()(p.x())), obs=p.x(p.COUNTS)),
    "jnp.exp of the function": lambda: jnp.exp(_f()),
    "the function plus a number": lambda: _f() + 1.0,
    "W of another shape": lambda: jnp.ones((3, 5)) @ _two()(p.x()),
    "W of one function": lambda: jnp.ones((3, 1)) @ _f()(p.x()),
    "plus strings": lambda: _f()(p.x()) + "1",
    "times a list": lambda: _f()(p.x()) * [[1.0, 2.0], [3.0]],
    "plus an offset of other rows": lambda: npgp.observe("y", _f()(p.x()) + jnp.ones(5), p.gaussian(), obs=p.x(p.Y)),
    "times a matrix of columns": lambda: npgp.observe(
        "y", _f()(p.x()) * jnp.ones((p.N, 1)), p.gaussian(), obs=p.x(p.Y)
    ),
    "rows of another number": lambda: npgp.observe("y", _f()(p.x()) + _g()(p.x(p.X[:5])), p.gaussian(), obs=p.x(p.Y)),
}


@attempt("error", "npgp.sample, GP values, observe, draw, shape, f, W, rows", cases=EXPRESSIONS)
def test_expression(make: Callable[[], Any]) -> Any:
    with handlers.seed(rng_seed=0):
        return make()


def _within(plate: numpyro.plate) -> str:
    with plate:
        return "no error"


PLACES: dict[str, tuple[str, Callable[[], Any]]] = {
    "the component is called": ("draw", lambda: p.sparse_gp()(p.x())),
    "observe of an array": ("observe, GP values", lambda: npgp.observe("y", p.x(p.Y), p.gaussian())),
    "observe of the function": ("observe, GP values, f", lambda: npgp.observe("y", _f(), p.gaussian(), obs=p.x(p.Y))),
    "observe of the component": ("observe, GP values, draw", lambda: npgp.observe("y", p.sparse_gp(), p.gaussian())),
    "sample of an array": ("sample, GP values", lambda: npgp.sample("fx", p.x(p.Y))),
    "sample of a tuple": ("sample, GP values", lambda: npgp.sample("fx", (_f()(p.x()), _g()(p.x())))),
    "sample of tight": ("conditional", lambda: npgp.sample("fx", _f()(p.x()), conditional="tight")),
    "an unknown conditional": (
        "conditional",
        lambda: npgp.observe("y", _f()(p.x()), p.gaussian(), obs=p.x(p.Y), conditional="best"),
    ),
    "grouped without groups": (
        "groups",
        lambda: npgp.observe("y", _f()(p.x()), p.gaussian(), obs=p.x(p.Y), conditional="grouped"),
    ),
    "groups of other rows": (
        "groups",
        lambda: npgp.observe(
            "y",
            _f()(p.x()),
            p.gaussian(),
            obs=p.x(p.Y),
            conditional=npgp.conditionals.Grouped(npgp.sparse.median_split(p.x(p.X[:6]), 3)),
        ),
    ),
    "groups that do not divide": (
        "groups",
        lambda: npgp.observe("y", _f()(p.x()), p.gaussian(), obs=p.x(p.Y), conditional=npgp.conditionals.Grouped(5)),
    ),
    "one draw twice in a sum": (
        "draw, twice",
        lambda: npgp.observe("y", (lambda f: f(p.x()) + np.ones((2, 1)) * f(p.x() + 1.0))(_f()), p.gaussian()),
    ),
    "one latent value for two": (
        "latent",
        lambda: npgp.observe("y", _f()(p.x()), npgp.likelihoods.HeteroscedasticGaussian()),
    ),
    "two latent values for one": ("latent", lambda: npgp.observe("y", (_f()(p.x()), _g()(p.x())), p.gaussian())),
    "no name": ("name", lambda: npgp.SparseGP("", p.kernel(), p.x(p.Z))),
    "a number for a name": ("name", lambda: npgp.SparseGP(3, p.kernel(), p.x(p.Z))),
    "unknown covariances": ("covariances", lambda: p.sparse_gp(covariances="sparse")),
    "covariances of two blocks": ("covariances", lambda: p.sparse_gp(covariances=["dense", "dense"])),
    "mean-only first": (
        "covariances, mean-only",
        lambda: npgp.SparseGP("f", p.kernel(), [p.x(p.Z), p.x(p.Z + 0.3)], ["mean-only", "dense"]),
    ),
    "init_scale of zero": ("init_scale", lambda: p.sparse_gp(init_scale=0.0)),
    "a negative jitter": ("jitter", lambda: p.sparse_gp(jitter=-1.0).draw()(p.x()).moments()),
    "jitter is a string": ("jitter", lambda: p.sparse_gp(jitter="1e-6").draw()(p.x()).moments()),
    "plate of None": ("size, plate", lambda: _within(npgp.plate("d", None))),
    "plate of a string": ("size, plate", lambda: _within(npgp.plate("d", "12"))),
    "plate of one half": ("size, plate", lambda: _within(npgp.plate("d", 0.5))),
    "plate of an empty batch": ("rows, batch, plate", lambda: npgp.plate("d", 5, rows=0)),
    "plate of a batch too large": ("rows, batch, plate", lambda: npgp.plate("d", 5, rows=6)),
    "plate of rows that are not there": ("rows, plate", lambda: npgp.plate("d", 5, rows=np.array([0, 7]))),
    "plate of rows in halves": ("rows, plate", lambda: npgp.plate("d", 5, rows=np.array([0.5, 1.0]))),
    "plate of a matrix of rows": ("rows, plate", lambda: npgp.plate("d", 5, rows=np.array([[0, 1]]))),
}


@mistakes(PLACES)
def test_out_of_place(make: Callable[[], Any]) -> Any:
    with handlers.seed(rng_seed=0):
        return make()


@attempt("error", "plate, draw, scale, mask", cases=("plate over rows", "subsampled plate", "scale", "mask"))
def test_draw_inside(where: str) -> Any:
    def program(X, y):
        around = {
            "plate over rows": lambda: numpyro.plate("data", p.N),
            "subsampled plate": lambda: numpyro.plate("outputs", 9, subsample_size=3, dim=-2),
            "scale": lambda: handlers.scale(scale=2.0),
            "mask": lambda: handlers.mask(mask=np.arange(p.N) > 3),
        }[where]()
        with around:
            f = p.sparse_gp().draw()
        npgp.observe("y", f(X), p.gaussian(), obs=y)

    return p.first_loss(program, p.x(), p.x(p.Y))


@attempt("error", "shape, y, Y, (2, 12)", cases=("observe", "CollapsedGP", "BayesianGPLVM"))
def test_rows_by_columns_for_columns_by_rows(where: str) -> Any:
    Y = p.x(np.stack([p.Y, p.Y], axis=1))  # (N, P) for (P, N)
    if where == "CollapsedGP":
        return npgp.CollapsedGP(p.kernel(), p.x(), p.x(p.Z), noise_variance=p.NOISE).log_prob(Y)
    if where == "BayesianGPLVM":
        gplvm = npgp.BayesianGPLVM(npgp.gplvm.pca_start(p.key(), Y, 1, 3))
        return p.fit(gplvm.model, Y.T, svi=p.svi_of(gplvm.model, guide=gplvm.guide)).losses

    def program(X, y):
        with numpyro.plate("outputs", 2, dim=-2):
            f = p.sparse_gp().draw()
        with numpyro.plate("outputs", 2, dim=-2), numpyro.plate("data", p.N):
            npgp.observe("y", f(X), p.gaussian(), obs=y)

    return p.fit(program, p.x(), Y).losses


@attempt("answer", cases=("a sum", "an offset", "a factor", "a difference", "mixed", "two additive GPs"))
def test_expression_that_is_right(which: str) -> Any:
    """The moments of GP values under the prior."""
    with handlers.seed(rng_seed=0):
        f, g = _f(), _g()
        a, b = f(p.x()), g(p.x())
        latent = {
            "a sum": lambda: a + b,
            "an offset": lambda: 1.0 + a,
            "a factor": lambda: a * p.x(p.Y),
            "a difference": lambda: p.x(p.Y) - 2.0 * a,
            "mixed": lambda: jnp.array([[1.0, 2.0]]) @ _two()(p.x()),
            "two additive GPs": lambda: a / 2.0 + b,
        }[which]()
        moments = latent.moments()
    d = np.diag(p.projected()[1])
    factor = {
        "a sum": 2.0,
        "an offset": 1.0,
        "a factor": p.Y**2,
        "a difference": 4.0,
        "mixed": 5.0,
        "two additive GPs": 1.25,
    }
    return same(np.ravel(moments.residual), factor[which] * d, 2e-3, 1e-4)
