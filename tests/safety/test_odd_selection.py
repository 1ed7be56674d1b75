"""Inducing points, groups, features, corrections, row tables, ArviZ and joint use of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problem as p
from judge import attempt, mistakes, same
from numpyro import handlers

import npgp
from npgp import features, inducing, kernels


def _posterior() -> npgp.variational.Posterior:
    return p.sparse_gp().posterior(p.as_params(p.optimum()))


def _groups() -> Any:
    return npgp.sparse.median_split(p.x(), 4)


MISTAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    "k-means of no points": ("size", lambda: inducing.kmeans(p.key(), p.x(), 0)),
    "k-means of more points than rows": ("size", lambda: inducing.kmeans(p.key(), p.x(), 13)),
    "k-means of rows that are all the same": ("size", lambda: inducing.kmeans(p.key(), np.ones((9, 1), np.float32), 3)),
    "k-means of a vector": ("X", lambda: inducing.kmeans(p.key(), p.x()[:, 0], 3)),
    "k-means under jit": ("X", lambda: jax.jit(lambda X: inducing.kmeans(p.key(), X, 3))(p.x())),
    "k-means of 2.5 points": ("size", lambda: inducing.kmeans(p.key(), p.x(), 2.5)),
    "k-means with a number for a key": ("rng_key", lambda: inducing.kmeans(0, p.x(), 3)),
    "a subset of more rows": ("size", lambda: inducing.random_subset(p.key(), p.x(), 99)),
    "a subset of NaN": ("X", lambda: inducing.random_subset(p.key(), np.full((5, 1), np.nan, np.float32), 2)),
    "greedy variance of duplicates": (
        "size",
        lambda: inducing.greedy_variance(p.kernel(), np.ones((9, 1), np.float32), 3),
    ),
    "greedy variance of a class": ("kernel", lambda: inducing.greedy_variance(npgp.RBF, p.x(), 3)),
    "greedy fit of NaN": (
        "y",
        lambda: inducing.greedy_fit(p.key(), p.kernel(), p.x(), p.x(p.Y * np.nan), 3, noise_variance=0.1),
    ),
    "greedy fit of other rows": (
        "y",
        lambda: inducing.greedy_fit(p.key(), p.kernel(), p.x(), p.x(p.Y[:3]), 3, noise_variance=0.1),
    ),
    "greedy fit without noise": (
        "noise_variance",
        lambda: inducing.greedy_fit(p.key(), p.kernel(), p.x(), p.x(p.Y), 3, noise_variance=0.0),
    ),
    "greedy fit of no candidates": (
        "candidates",
        lambda: inducing.greedy_fit(p.key(), p.kernel(), p.x(), p.x(p.Y), 3, noise_variance=0.1, candidates=0),
    ),
    "groups of no rows": ("size", lambda: npgp.sparse.median_split(p.x(), 0)),
    "groups of a string": ("groups", lambda: npgp.conditionals.Grouped("3")),
    "groups of NaN": ("X", lambda: npgp.sparse.median_split(p.x(p.X * np.nan), 3)),
    "groups under jit": ("X", lambda: jax.jit(lambda X: jnp.asarray(npgp.sparse.median_split(X, 3).rows))(p.x())),
    "arranging other rows": ("array", lambda: _groups().arrange(p.x(p.X[:5]))),
    "assigning other columns": ("X_new, columns", lambda: _groups().assign(p.x(np.ones((2, 2))))),
    "correction of other rows": (
        "groups, rows",
        lambda: npgp.local_correction(_posterior(), p.x(p.X[:6]), p.x(p.Y[:6]), p.gaussian(), _groups()),
    ),
    "correction of NaN": (
        "y",
        lambda: npgp.local_correction(_posterior(), p.x(), p.x(p.Y * np.nan), p.gaussian(), _groups()),
    ),
    "correction out of support": (
        "y",
        lambda: npgp.local_correction(_posterior(), p.x(), p.x(-np.ones(p.N)), npgp.Poisson(), _groups()),
    ),
    "update of other rows": ("y", lambda: _posterior().update(p.x(), p.x(p.Y[:4]), p.gaussian())),
    "update of NaN": ("y", lambda: _posterior().update(p.x(), p.x(p.Y * np.nan), p.gaussian())),
    "update out of support": ("y", lambda: _posterior().update(p.x(), p.x(-np.ones(p.N)), npgp.Poisson())),
    "update by a word": ("likelihood", lambda: _posterior().update(p.x(), p.x(p.Y), "gaussian")),
    "the derivative of Matérn-1/2": (
        "kernel, Matern12, derivative, differentiable",
        lambda: (
            npgp.SparseGP("f", npgp.kernels.Matern12(), p.x(p.Z))
            .posterior(p.as_params(p.optimum()))
            .derivative(p.x(p.X_NEW))
        ),
    ),
    "harmonics of no levels": ("levels", lambda: features.SphericalHarmonics((), 2)),
    "harmonics of a half level": ("levels, level", lambda: features.SphericalHarmonics((0.5,), 2)),
    "harmonics of a plain kernel": (
        "kernel, zonal, Zonal, RBF",
        lambda: npgp.CollapsedGP(
            npgp.RBF(), p.x(), features.SphericalHarmonics((0, 1), 2), noise_variance=0.1
        ).log_prob(p.x(p.Y)),
    ),
    "harmonics of other columns": (
        "columns, dimension",
        lambda: npgp.CollapsedGP(
            kernels.ZonalRBF(), p.x(), features.SphericalHarmonics((0, 1), 5), noise_variance=0.1
        ).log_prob(p.x(p.Y)),
    ),
    "activations of one axis": ("directions", lambda: features.Activations(np.ones(3, np.float32))),
    "activations of NaN": ("directions", lambda: features.Activations(np.full((3, 2), np.nan, np.float32))),
    "activations of direction zero": ("directions", lambda: features.Activations(np.zeros((3, 2), np.float32))),
    "activations of negative levels": (
        "levels",
        lambda: features.Activations(np.ones((3, 2), np.float32), levels=(-1,)),
    ),
    "activations of a number": ("shape", lambda: features.Activations(np.ones((3, 2), np.float32), 3)),
    "a table of rows that are not there": ("rows, row_param", lambda: _table(np.array([0, 9]))),
    "a table of rows in halves": ("rows, row_param", lambda: _table(np.array([0.5]))),
    "a table of negative rows": ("rows, row_param", lambda: _table(np.array([-1]))),
    "ArviZ of numbers": ("samples", lambda: npgp.to_arviz(p.key(), p.model, 3, p.x(), p.x(p.Y))),
    "ArviZ of no samples": ("samples", lambda: npgp.to_arviz(p.key(), p.model, {}, p.x(), p.x(p.Y))),
    "ArviZ of unlike samples": (
        "samples, f.u, draws, shape",
        lambda: npgp.to_arviz(p.key(), p.model, {"f.u": p.x(np.zeros((5, 4))), "l": p.x(np.zeros(3))}, p.x(), p.x(p.Y)),
    ),
    "a standardizer of nothing": ("data, rows, row, values", lambda: npgp.Standardizer.of(np.zeros((0, 2)))),
    "a standardizer of NaN": ("data, allow_nan, NaN", lambda: npgp.Standardizer.of(np.array([1.0, np.nan]))),
    "a standardizer of strings": ("data, numbers", lambda: npgp.Standardizer.of(np.array(["a", "b"]))),
    "a standardizer of complex numbers": ("data, complex, numbers", lambda: npgp.Standardizer.of(np.array([1j, 2.0]))),
    "a standardizer of other columns": (
        "columns, column, shape, values",
        lambda: npgp.Standardizer.of(np.eye(3))(np.ones((2, 2))),
    ),
}


def _table(rows: np.ndarray) -> Any:
    with handlers.seed(rng_seed=0):
        return npgp.model.row_param("t", p.x(np.zeros((5, 2))), rows)


@mistakes(MISTAKES)
def test_mistake(make: Callable[[], Any]) -> Any:
    return make()


@attempt("answer", cases=("kmeans", "greedy_variance", "random_subset", "greedy_fit"))
def test_as_many_points_as_rows(which: str) -> Any:
    Z = {
        "kmeans": lambda: inducing.kmeans(p.key(), p.x(), p.N),
        "greedy_variance": lambda: inducing.greedy_variance(p.kernel(), p.x(), p.N),
        "random_subset": lambda: inducing.random_subset(p.key(), p.x(), p.N),
        "greedy_fit": lambda: inducing.greedy_fit(p.key(), p.kernel(), p.x(), p.x(p.Y), p.N, noise_variance=0.1),
    }[which]()
    return same(np.sort(np.ravel(Z)), np.sort(p.X[:, 0]), 1e-5)


@attempt("answer", cases=("constant column", "far from zero", "integers", "one row"))
def test_standardizer(which: str) -> Any:
    data = {
        "constant column": np.column_stack([np.ones(9), np.arange(9.0)]),
        "far from zero": 1e9 + np.arange(9.0)[:, None],
        "integers": np.arange(9)[:, None],
        "one row": np.array([[3.0, 4.0]]),
    }[which]
    scaled = np.asarray(npgp.Standardizer.of(data)(data), float)
    sd = np.asarray(data, float).std(0)
    expected = (data - np.mean(np.asarray(data, float), 0)) / np.where(sd == 0, 1, sd)
    return same(scaled, expected, 1e-4, 1e-4)
