"""What kernels are given by mistake, and scales at which numbers would overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import npgp
from npgp import kernels


@pytest.mark.parametrize("make", [npgp.RBF, kernels.Matern12, npgp.Matern32, npgp.Matern52, kernels.RationalQuadratic])
@pytest.mark.parametrize("unit", [1e-30, 1e30])
def test_values_and_gradients_are_numbers_in_any_unit(make, unit):
    """Where the square of a reciprocal lengthscale is no float32."""
    X = jnp.array([[0.0], [0.5], [2.0]])
    value, slope = jax.jit(jax.value_and_grad(lambda l: jnp.sum(make(l)(X))))(unit)
    expected = 9.0 if unit > 1 else 3.0
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert np.isfinite(slope)


def test_variances_are_scalars():
    with pytest.raises(ValueError, match=r"RBF variance has shape \(3,\); it must be a scalar"):
        npgp.RBF(1.0, variance=np.ones(3))(jnp.ones((4, 1)))


@pytest.mark.parametrize("combine", [lambda k: k + 0.1, lambda k: 0.1 + k, lambda k: k**2], ids=range(3))
def test_kernels_and_numbers(combine):
    with pytest.raises(TypeError, match=r"a kernel (plus 0\.1: .*Constant|to the power of 2: .*products)"):
        combine(npgp.RBF())


class Half(kernels.Kernel):
    """A kernel of a user's, without its diagonal."""

    def __call__(self, X, X2=None):
        return jnp.exp(-jnp.square(X - (X if X2 is None else X2).T))


class Wide(Half):
    """Its diagonal is a column."""

    def diag(self, X):
        return jnp.ones_like(X)


def test_what_a_kernel_of_ones_own_lacks():
    X = jnp.linspace(0.0, 1.0, 3)[:, None]
    with pytest.raises(NotImplementedError, match=r"^Half has no diag\(X\)"):
        npgp.CollapsedGP(Half(), X, X[:1], npgp.Gaussian(scale=0.1)).log_prob(X[:, 0])
    with pytest.raises(ValueError, match=r"^Wide.diag\(X\) has shape \(3, 1\); it must be \(3,\)"):
        npgp.CollapsedGP(Wide(), X, X[:1], npgp.Gaussian(scale=0.1)).log_prob(X[:, 0])
