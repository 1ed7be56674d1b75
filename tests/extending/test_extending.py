"""What users write themselves, a file each and with public names alone, works everywhere."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import oracles
import pytest
from averages import Averages
from fixed_share import FixedShare
from geometric import Geometric
from numpyro import handlers
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from wendland import Wendland

import npgp

FOLDER = Path(__file__).parent
CLASSES = [Wendland, Geometric, Averages, FixedShare]
_rng = np.random.default_rng(0)
X = np.linspace(0.0, 3.0, 20, dtype=np.float32)[:, None]
Y = np.sin(2.0 * X[:, 0]) + 0.1 * _rng.normal(size=20).astype(np.float32)
COUNTS = _rng.geometric(1.0 / (1.0 + np.exp(-Y))).astype(np.float32) - 1.0
PLACES = np.linspace(0.0, 3.0, 15, dtype=np.float32).reshape(5, 3, 1)
Z = np.linspace(0.1, 2.9, 3, dtype=np.float32)[:, None]


def blocks(points_first=False):
    both = [Averages(jnp.asarray(PLACES)), jnp.asarray(Z)]
    return both[::-1] if points_first else both


def model(X, y=None):
    kernel = Wendland(numpyro.param("reach", 2.0, constraint=numpyro.distributions.constraints.positive))
    f = npgp.SparseGP("f", kernel, inducing=blocks()).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X), Geometric(), obs=y, conditional=FixedShare(0.4))


def test_they_are_written_with_public_names_alone():
    for file in ("wendland", "geometric", "averages", "fixed_share"):
        tree = ast.parse((FOLDER / f"{file}.py").read_text())
        imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        sources = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert "npgp" in imported and not [name for name in imported + sources if name.startswith("npgp.")]
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not [name for name in names if name.startswith("__") or name in ("_normal_rule", "_support")]


def test_observe_trains_and_predicts():
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.05), TraceMeanField_ELBO())
    result = npgp.fit(svi, jax.random.key(0), 200, X, COUNTS, progress=False)
    assert np.all(np.isfinite(result.losses)) and result.losses[-1] < result.losses[0] - 1.0
    draws = Predictive(model, guide=guide, params=result.params, num_samples=10)(jax.random.key(1), X)
    assert draws["y"].shape == (10, 20) and np.all(draws["y"] >= 0)
    mean, variance = npgp.posterior("f", model, guide, result.params, X).mean_and_variance(X)
    assert np.all(np.isfinite(mean)) and np.all(variance > 0)


def test_the_bound_holds_and_is_what_the_formulas_say(float64):
    kernel, share = Wendland(2.0), 0.4
    x, y = X.astype(float), Y.astype(float)

    def bound(conditional, points_first=False):
        return npgp.CollapsedGP(kernel, x, blocks(points_first), noise_variance=0.1, conditional=conditional).log_prob(
            y
        )

    bounds, evidence, d = jax.jit(
        lambda: (
            [bound(c) for c in (FixedShare(share), "shared", npgp.conditionals.Prior(), FixedShare(1.0))],
            npgp.collapsed.exact_log_evidence(kernel, x, y, noise_variance=0.1),
            npgp.CollapsedGP(kernel, x, blocks(), noise_variance=0.1).condition(y).decompose(x).variance[-1],
        )
    )()
    assert bounds[0] < bounds[1] < evidence  # one share, at most the best one's
    assert bounds[3] == pytest.approx(float(bounds[2]), rel=1e-12)
    gain = 0.5 * (1.0 - share) * np.sum(d) / 0.1 - 0.5 * 20 * (share - 1.0 - np.log(share))
    assert float(bounds[0] - bounds[2]) == pytest.approx(float(gain), rel=1e-9)
    # Either block may come first: with both learned, fused or in any order, features span the same functions.
    union = jax.jit(lambda: [bound("prior", points_first) for points_first in (False, True)])()
    assert np.all(np.array(union) < evidence)


def test_dense_algebra_of_the_feature(float64):
    kernel = Wendland(2.0)
    x = X[:6].astype(float)
    rows = PLACES.astype(float).reshape(-1, 1)
    K = np.asarray(kernel(jnp.asarray(np.concatenate([rows, x]))))
    average = np.kron(np.eye(5), np.full((1, 3), 1.0 / 3.0))
    K_uu, K_uf = average @ K[:15, :15] @ average.T, average @ K[:15, 15:]
    found = npgp.CollapsedGP(
        kernel, x, Averages(jnp.asarray(PLACES.astype(float))), noise_variance=0.1, conditional="prior", jitter=1e-12
    )
    Q = K_uf.T @ np.linalg.solve(K_uu, K_uf)
    y = Y[:6].astype(float)
    expected = oracles.log_normal(y, Q + 0.1 * np.eye(6)) - 0.5 * np.trace(K[15:, 15:] - Q) / 0.1
    assert float(jax.jit(lambda gp: gp.log_prob(y))(found)) == pytest.approx(expected, rel=1e-8)


def test_the_gplvm_takes_all_four():
    data = _rng.geometric(0.4, size=(12, 3)).astype(np.float32) - 1.0
    start = npgp.gplvm.pca_start(jax.random.key(0), data, latent_dim=1, num_inducing=4)
    places = np.asarray(start.latents)[:10].reshape(5, 2, 1)
    start = dataclasses.replace(start, inducing=Averages(jnp.asarray(places)))
    gplvm = npgp.BayesianGPLVM(
        start, conditional=FixedShare(0.3), likelihood=Geometric(), kernel=lambda lengthscale, variance: Wendland(3.0)
    )
    svi = SVI(gplvm.model, gplvm.guide, npgp.adam(0.02), TraceMeanField_ELBO())
    result = npgp.fit(svi, jax.random.key(0), 30, data, progress=False)
    # By 15 to 20 nats, and from step to step by one or two.
    assert np.mean(result.losses[-5:]) < np.mean(result.losses[:5]) - 5.0


def test_a_likelihood_of_ones_own_among_columns():
    likelihood = npgp.likelihoods.Columns([npgp.Gaussian(variance=0.1), Geometric()])
    residual = jnp.full((2, 5), 0.3)
    y, mean = jnp.ones((2, 5)), jnp.zeros((2, 5))
    from npgp.conditionals import Tight
    from npgp.conditionals.base import row_elbo

    @jax.jit
    def both():
        together = row_elbo(Tight(), likelihood, y, mean, residual, residual)
        return together, row_elbo(Tight(), Geometric(), y[1], mean[1], residual[1], residual[1])

    together, alone = both()
    np.testing.assert_allclose(together[1], alone, rtol=1e-6)


def test_what_a_conditional_lacks_is_named():
    class Bare(npgp.conditionals.Conditional):
        pass

    def model(conditional):
        f = npgp.SparseGP("f", npgp.RBF(), X[:3]).draw()
        npgp.observe("y", f(X), npgp.Gaussian(scale=0.1), obs=Y, conditional=conditional)

    with pytest.raises(TypeError, match="conditional is of class Bare, which must be under @npgp.pytree"):
        handlers.seed(model, 0)(Bare())
    npgp.pytree(Bare)
    with pytest.raises(NotImplementedError, match=r"Bare has no row_terms\(rows, parameter\)"):
        npgp.conditionals.Conditional.row_terms(Bare(), None)


def test_sample_takes_a_conditional_that_is_a_scale():
    def downstream(X, y=None):
        f = npgp.SparseGP("f", Wendland(2.0), inducing=blocks()).draw()
        with numpyro.plate("data", X.shape[0]):
            value = npgp.sample("f", f(X), conditional=FixedShare(0.5))
            numpyro.sample("y", numpyro.distributions.Normal(value, 0.1), obs=y)

    guide = npgp.AutoSparseGP(downstream)
    svi = SVI(downstream, guide, npgp.adam(0.05), TraceMeanField_ELBO())

    @models.compiled
    def values(keys):
        params = svi.get_params(svi.init(jax.random.key(0), X, Y))

        def one(key):  # as the loss has them
            first, second = jax.random.split(key)
            of_guide = handlers.trace(handlers.substitute(handlers.seed(guide, first), params)).get_trace(X, Y)
            replayed = handlers.substitute(handlers.replay(handlers.seed(downstream, second), of_guide), params)
            return handlers.trace(replayed).get_trace(X, Y)["f"]["value"]

        return params, jax.vmap(one)(keys)

    params, drawn = values(models.keys(4000))
    posterior = npgp.posterior("f", downstream, guide, params, X, Y)
    both = jax.jit(lambda posterior: (posterior.projector(X).residual_variance(), posterior.variance(X)))
    residual, variance = both(posterior)
    expected = variance - 0.5 * residual  # half of what the inducing values leave
    assert np.max(residual) > 0.5 * np.max(expected)
    np.testing.assert_allclose(np.var(drawn, 0), expected, rtol=5 * np.sqrt(2 / 4000))


def test_they_are_saved_and_loaded(tmp_path):
    gp = npgp.CollapsedGP(Wendland(2.0), X, blocks(), noise_variance=0.1, conditional=FixedShare(0.4))
    posterior = jax.jit(lambda gp: gp.condition(Y))(gp)
    npgp.save(tmp_path / "file", {"gp": gp, "posterior": posterior, "likelihood": Geometric()})
    with pytest.raises(ValueError, match=r"pass it: load\(path, classes=\["):
        npgp.load(tmp_path / "file")
    back = npgp.load(tmp_path / "file", classes=CLASSES)
    assert isinstance(back["gp"].conditional, FixedShare) and isinstance(back["likelihood"], Geometric)
    found = jax.jit(lambda gp, posterior: (gp.log_prob(Y), posterior.mean(X)))
    jax.tree.map(np.testing.assert_array_equal, found(back["gp"], back["posterior"]), found(gp, posterior))
