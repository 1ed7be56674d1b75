"""
The installed jaxlib as users have it: sums that some version computed wrongly, or crashed at, and slopes of maxima that
some lost, against float64 of NumPy and SciPy.

In a process of its own, without the flags of the tests around it, which a crash does not take along.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from npgp.programs.backend import maximum, wrong_sums

SUMS = """
import json, warnings
import jax, jax.numpy as jnp, numpy as np, scipy.special, scipy.stats, numpyro.distributions as dist
from jax.interpreters import ad

rng, errors = np.random.default_rng(0), {}

def compare(name, function, expected, *args):
    found, expected = np.asarray(jax.jit(function)(*args), float), expected(*(a.astype(float) for a in args))
    errors[name] = float(np.max(np.abs(found - expected) / (1 + np.abs(expected))))

def pairs(np):
    def function(s, y):
        c, v = np.stack([s, 1 - s], -1), np.stack([y, 1 - y], -1)
        return np.sum(v * c, -1) + np.sum(c, -1)
    return function

s, y = rng.uniform(size=(64, 1000)).astype("float32"), rng.uniform(size=1000).astype("float32")
compare("pairs", pairs(jnp), pairs(np), s, y)
for rows, bits in ((32_769, "float32"), (16_385, "float64")):
    with jax.enable_x64(bits == "float64"):
        X, A = rng.normal(size=(rows, 3)).astype(bits), rng.normal(size=(3, 3)).astype(bits)
        squares = jax.vmap(lambda row, A: jnp.sum((A @ row) ** 2), (0, None))
        compare(bits, squares, lambda X, A: ((X @ A.T) ** 2).sum(1), X, A)
w, v = rng.normal(size=8).astype("float32"), rng.normal(size=(8, 10, 3277)).astype("float32")
compare("weighted", lambda w, v: jnp.sum(w[:, None, None] * v, 0), lambda w, v: np.tensordot(w, v, 1), w, v)

rules = dict(ad.primitive_jvps)
import npgp

errors["rules of JAX"] = float(any(ad.primitive_jvps[primitive] is not rule for primitive, rule in rules.items()))
beta = npgp.likelihoods.as_likelihood(lambda f: dist.Beta(10 * jax.nn.sigmoid(f), 10 * jax.nn.sigmoid(-f)))
z, weights = np.polynomial.hermite_e.hermegauss(60)
shapes = [10 * scipy.special.expit(side * 0.1**0.5 * z) for side in (1, -1)]
expected = lambda y: scipy.stats.beta.logpdf(y[:, None], *shapes) @ weights / weights.sum()
compare("beta", lambda y: beta.expected_log_prob(y, jnp.zeros(len(y)), 0.1), expected, y)
f = np.linspace(-3, 4, 29, dtype="float32")
counts = lambda f: dist.BetaBinomial(5 * jax.nn.sigmoid(f), 5 * jax.nn.sigmoid(-f), 40)
counts = npgp.likelihoods.as_likelihood(counts).log_prob
def slope(f):
    a, b = 5 * scipy.special.expit(f), 5 * scipy.special.expit(-f)
    parts = [scipy.special.digamma(x) for x in (3 + a, 37 + b, a, b)]
    return a * b / 5 * (parts[0] - parts[1] - parts[2] + parts[3])
compare("betaln", jax.vmap(jax.grad(lambda f: counts(f, 3.0))), slope, f)
with jax.enable_x64(True):
    X = rng.normal(size=(40_000, 3))
    gp = npgp.CollapsedGP(npgp.kernels.Linear(variance=np.ones(3)), X, X[:3], noise_variance=0.1, jitter=1e-12)
    exact = 0.1 * ((X @ np.linalg.inv(X.T @ X + 0.1 * np.eye(3))) * X).sum(1)
    errors["linear"] = float(np.max(np.abs(gp.condition(np.sin(X[:, 0])).variance(X) / exact - 1)))
    # Sums of arrays made of 1, 6 and 6 columns.
    Z, x, s2 = rng.normal(size=(25, 6)), rng.normal(size=(40, 6)), 0.1
    half, apart = (Z[:, None] + Z) / 2, np.exp(-np.sum((Z[:, None] - Z) ** 2, -1) / 4)
    near = np.exp(-np.sum((x[:, None, None] - half) ** 2, -1) / (1 + 2 * s2)).sum(0) / (1 + 2 * s2) ** 3
    psi = lambda Z: npgp.collapsed.psi_statistics(npgp.RBF(np.ones(6)), Z, x, np.full((40, 6), s2**0.5)).psi2
    compare("psi", psi, lambda Z: apart * near, Z)
print(json.dumps(errors), flush=True)

u = rng.normal(size=(3, 1, 2, 2, 8, 8, 8)).astype("float32")
compare("seven axes", lambda u, v: jnp.sum(u * v, 3), lambda u, v: (u * v).sum(3), u, u)
print(json.dumps(errors))
"""


def test_sums_as_users_compile_them():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SUMS], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert {name: error for name, error in errors.items() if error > 1e-5} == {}
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flags", ["", "--xla_backend_optimization_level=0"])
def test_the_version_that_is_wrong_is_named(flags):
    assert "Install another version (pip install 'jaxlib!=0.10.2')" in wrong_sums("0.10.2", flags)
    assert wrong_sums("0.10.2", f"{flags} --xla_cpu_experimental_ynn_fusion_type=") is None
    assert wrong_sums("0.10.1", flags) is None
    assert wrong_sums("0.12.0.1", flags) is None


def test_slopes_of_maxima():
    x = jnp.asarray([0.0, 1.0, 2.0])
    assert maximum(x, 1.0).tolist() == [1.0, 1.0, 2.0]
    assert jax.vmap(jax.grad(maximum))(x, jnp.ones(3)).tolist() == [0.0, 0.5, 1.0]
    assert jax.vmap(jax.grad(maximum, 1))(jnp.ones(3), x).tolist() == [0.0, 0.5, 1.0]
    row, both = jax.vjp(maximum, x[None], jnp.stack([x, 1.0 - x]))[1](jnp.ones((2, 3)))
    assert (row + jnp.sum(both, axis=0)).tolist() == [[2.0, 2.0, 2.0]]
