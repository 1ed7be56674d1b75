"""Functions with a kernel each, against one projector for each; and which shapes are parted among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import npgp
from npgp import kernels
from npgp.features import Points
from npgp.sparse import Members, Projector, factorize, factorize_members, median_split

RNG = np.random.default_rng(0)
X, Z, Z2 = RNG.uniform(size=(8, 2)), RNG.uniform(size=(3, 2)), RNG.uniform(size=(2, 2, 2))
LENGTHSCALE, VARIANCE = np.array([[[0.3, 0.9]], [[1.2, 0.5]]]), np.array([[1.5], [0.4]])


@npgp.pytree
@dataclass(frozen=True)
class Network(npgp.kernels.Kernel):
    """A user's kernel, for one function: an RBF of features that a layer of weights makes."""

    matrix_fields = ("weights",)

    weights: Any
    height: Any

    def __call__(self, X, X2=None):
        F, F2 = (jnp.tanh(x @ self.weights) for x in (X, X if X2 is None else X2))
        return self.height * jnp.exp(-0.5 * jnp.sum((F[:, None] - F2) ** 2, -1))

    def diag(self, X):
        return self.height * jnp.ones(len(X))


WEIGHTS = RNG.normal(size=(2, 1))  # of the shape that two functions' numbers have
CASES = {
    "lengthscales and variances": (
        npgp.Matern32(LENGTHSCALE, variance=VARIANCE),
        lambda q: npgp.Matern32(LENGTHSCALE[q, 0], variance=VARIANCE[q, 0]),
    ),
    "one variance for all": (npgp.RBF(VARIANCE), lambda q: npgp.RBF(VARIANCE[q, 0])),
    "a kernel of kernels": (
        VARIANCE * (npgp.RBF(0.5) + kernels.Linear(variance=LENGTHSCALE)),
        lambda q: VARIANCE[q, 0] * (npgp.RBF(0.5) + kernels.Linear(variance=LENGTHSCALE[q, 0])),
    ),
    "a user's, with shared weights": (Network(WEIGHTS, VARIANCE), lambda q: Network(WEIGHTS, VARIANCE[q, 0])),
    "a user's, with weights each": (
        Network(WEIGHTS * np.ones((2, 1, 1, 1)), VARIANCE),
        lambda q: Network(WEIGHTS, VARIANCE[q, 0]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_all_that_a_projector_says_is_what_one_for_each_says(case, float64):
    kernel, of = CASES[case]
    blocks = [Points(Z2), Points(Z)]  # inputs of each function's own, and shared
    groups = median_split(X, 4)

    def said(projector):
        projection = projector(X)
        return (
            projection.A,
            projection.residual_variance((True, False)),
            projector.residual_covariance(X, projection.A),
            projector.group_covariance(X, projection.A, groups),
            projector.factors,
            projector.jitter,
        )

    @jax.jit
    def everything():
        all_of_them = factorize_members(kernel, blocks, (2, 1))
        assert all_of_them.batch_shape == (2,)
        again = factorize_members(all_of_them.kernel, all_of_them.blocks, (2, 1))  # as they were given
        each = [said(factorize(of(q), [Points(Z2[q]), Points(Z)])) for q in range(2)]
        return said(all_of_them), each, (again.cholesky[1], all_of_them.cholesky[1])

    together, each, (again, first) = jax.tree.map(np.asarray, everything())
    for q, wanted in enumerate(each):
        own = jax.tree.map(lambda a, q=q: a[q], together)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), own, wanted)
    np.testing.assert_allclose(again, first, rtol=1e-9)


def test_each_takes_the_jitter_that_its_kernel_needs():
    # A hundred points are of a few of the long one's features: without a jitter rounding leaves no factor.
    many = [Points(jnp.linspace(0.0, 1.0, 100)[:, None])]
    members = factorize_members(npgp.RBF(np.array([[1e-3], [1.0]])), many, (2, 1), jitter=0.0)
    assert members.jitter[0].shape == (2,) and members.jitter[0][0] == 0.0 < members.jitter[0][1]
    for jitter, L, one in zip(members.jitter[0], members.cholesky[0], (1e-3, 1.0), strict=True):
        K = np.asarray(npgp.RBF(one)(many[0].inputs)) + float(jitter) * np.eye(100)
        np.testing.assert_allclose(L @ L.T, K, atol=3e-6)


def test_what_all_share_is_one_projector():
    assert isinstance(factorize_members(npgp.RBF([0.5, 1.0]), [Points(Z)], (2, 1)), Projector)
    assert isinstance(factorize_members(Network(WEIGHTS, 1.0), [Points(Z)], (2, 1)), Projector)
    mixing = kernels.Coregion(npgp.RBF(0.5, active_dims=(0,)), np.ones((2, 1)))  # of the plates' shape, a matrix
    assert isinstance(factorize_members(mixing, [Points(np.zeros((2, 2)))], (2, 1)), Projector)


def test_two_plates_and_what_differs_in_one_of_them_alone(float64):
    lengthscale, variance = 0.3 + RNG.uniform(size=(3, 1, 1)), RNG.uniform(size=(1, 2, 1))
    members = factorize_members(npgp.RBF(lengthscale, variance=variance), [Points(Z)], (3, 2, 1))
    assert isinstance(members, Members) and members.batch_shape == (3, 2)
    one = factorize(npgp.RBF(lengthscale[2, 0, 0], variance=variance[0, 1, 0]), [Points(Z)])
    np.testing.assert_allclose(members(X).A[0][2, 1], one(X).A[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("kernel", "Z", "plates", "message"),
    [
        (npgp.RBF(np.ones((3, 1))), Z, (2, 1), r"RBF lengthscale has shape \(3, 1\).*plates of shape \(2, 1\)"),
        (npgp.RBF(0.5) + npgp.RBF(variance=np.ones((3, 1))), Z, (2, 1), r"RBF variance has shape \(3, 1\)"),
        (npgp.RBF(np.ones((2, 2))), Z, (2, 1), r"it must be \(\) or \(2,\), or, .*\(Q, 1\) or \(Q, 1, 2\)"),
        (npgp.RBF(np.ones((2, 1))), Z, (), r"lengthscale has shape \(2, 1\)"),
        (npgp.RBF(0.5), np.ones((3, 3, 2)), (2, 1), r"inducing has shape \(3, 3, 2\), but .* plates of shape \(2, 1\)"),
        (npgp.RBF(0.5), Z2, (), r"inducing has shape \(2, 2, 2\), but there is one function"),
    ],
)
def test_shapes_of_other_functions_are_errors_by_name(kernel, Z, plates, message):
    with pytest.raises(ValueError, match=message):
        factorize_members(kernel, [Points(Z)], plates)(X)
