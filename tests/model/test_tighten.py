"""``tighten``: with rows observed one by one it is, on average over batches, the bound of ``grouped``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import compiled
from numpyro import handlers
from numpyro.infer import TraceMeanField_ELBO

import npgp

X = np.linspace(0.0, 3.0, 10)[:, None] + 0.1 * np.cos(np.arange(20.0)).reshape(10, 2)
Y = np.round(3.0 * np.square(np.sin(X[:, 0])))
GROUPS = npgp.sparse.median_split(X, 3)  # 4 groups of 2 and 3 rows
Z = X[::4] + 0.05
NOISE = {"gaussian": npgp.Gaussian(variance=0.3), "counts": npgp.Poisson()}


def model(batches, likelihood):
    """Rows (X, y), the groups' places (X, y, mask) or ``None``, and whether the whole ELBO is of the groups."""
    rows, places, whole = batches
    f = npgp.SparseGP("f", npgp.RBF(0.8), [Z[:2].copy(), Z[2:].copy()]).draw()
    if rows is not None:
        with npgp.plate("rows", 10, rows=len(rows[0])):
            npgp.observe("y", f(rows[0]), likelihood, obs=rows[1])
    if places is None:
        return
    points, y, mask = places
    with npgp.plate("places", GROUPS.mask.size, rows=len(points)):
        if whole:
            npgp.observe(
                "groups", f(points), likelihood, obs=y, conditional=npgp.conditionals.Grouped(GROUPS.size), mask=mask
            )
        else:
            npgp.tighten("gain", f(points), likelihood, y, npgp.conditionals.Grouped(GROUPS.size), mask=mask)


PLACES = GROUPS.arrange(X), GROUPS.arrange(Y), np.asarray(GROUPS.mask).ravel()


@pytest.mark.parametrize("kind", ["counts"])
def test_the_mean_over_batches_is_the_bound_of_grouped(float64, kind):
    guide = npgp.AutoSparseGP(lambda batches: model(batches, NOISE[kind]))

    @compiled
    def run(X, Y, places, key):
        def elbo(*batches):
            def given(batches):
                return model(batches, NOISE[kind])

            return -TraceMeanField_ELBO().loss(key, params, given, guide, batches)

        with handlers.seed(rng_seed=0):
            sites = handlers.trace(guide).get_trace(((X, Y), None, False))
        keys = iter(jax.random.split(key, 8))
        params = {
            name: site["value"] + 0.1 * jax.random.normal(next(keys), jnp.shape(site["value"]))
            for name, site in sites.items()
            if site["type"] == "param"
        }
        places = jax.tree.map(lambda a: a.reshape(GROUPS.count, GROUPS.size, *a.shape[1:]), places)

        def of_batch(numbers):
            rows, group = numbers
            return elbo((X[rows], Y[rows]), jax.tree.map(lambda a: a[group], places), False)

        rows, group = jnp.meshgrid(jnp.arange(5), jnp.arange(GROUPS.count))
        numbers = 2 * rows.reshape(-1, 1) + jnp.arange(2), group.ravel()
        whole = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), places)
        return elbo(None, whole, True), elbo((X, Y), None, False), jax.lax.map(of_batch, numbers)

    expected, alone, parts = run(X.copy(), Y.copy(), tuple(map(jnp.asarray, PLACES)), jax.random.key(1))
    np.testing.assert_allclose(np.mean(parts), expected, rtol=1e-10)
    assert np.ptp(parts) > 0.1 and expected > alone + 1e-3


def test_it_says_nothing_without_q():
    def sites(places):
        seeded, found = handlers.seed(lambda: model(((X, Y), places, False), NOISE["gaussian"]), rng_seed=0), set()
        jax.eval_shape(lambda: found.update(handlers.trace(seeded).get_trace()))
        return found

    assert sites(PLACES) - {"places"} == sites(None)


def test_conditionals_without_groups_are_refused():
    def stated(conditional):
        f = npgp.SparseGP("f", npgp.RBF(0.8), Z).draw()
        npgp.tighten("gain", f(X), NOISE["gaussian"], Y, conditional)

    for conditional in ("grouped", npgp.conditionals.Tight()):
        with pytest.raises(TypeError, match="gain takes groups alone, such as npgp.conditionals.Grouped"):
            handlers.seed(stated, 0)(conditional)
