"""Averages over large arrays, in programs that are compiled as users compile them (see scripts/test)."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from npgp import likelihoods


@pytest.mark.parametrize(
    "make, classes",
    [
        (lambda: likelihoods.Softmax(10), 10),
        (lambda: likelihoods.Factorized(lambda f: dist.Laplace(f, 0.1)), 5),
    ],
)
def test_large_arrays_are_averaged_as_small_ones(make, classes):
    """Where the values at all nodes are so many that XLA's own sum over a leading axis is wrong (jaxlib 0.10.2)."""
    likelihood = make()
    rng = np.random.default_rng(0)
    shape = (4096,) if classes == 10 else (10, 4096)
    y = rng.integers(0, classes, shape).astype(np.float32)
    many = (10, *shape) if classes == 10 else shape
    mean, variance = (rng.uniform(0.1, 2, many).astype(np.float32) for _ in range(2))

    # A function's average is that of Ordinal, of an integrand whose peaks are sought first: a dear program.
    for name in ("expected_log_prob", "log_marginal")[: 1 if isinstance(likelihood, likelihoods.Factorized) else 2]:
        rule = jax.jit(getattr(likelihood, name))
        whole = rule(y, mean, variance)
        parts = [
            rule(y[..., i : i + 512], mean[..., i : i + 512], variance[..., i : i + 512]) for i in range(0, 4096, 512)
        ]
        np.testing.assert_allclose(whole, jnp.concatenate(parts, -1), rtol=1e-4, atol=1e-4, err_msg=name)
