"""Rows that are of one function of a plate each, and functions with inputs each, against rectangles and single GPs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO

import npgp
from npgp.sparse.ragged import Places

RNG = np.random.default_rng(3)
G, T, M = 4, 7, 3
X, Z, OWN = RNG.uniform(size=(T, 2)), RNG.uniform(size=(M, 2)), RNG.uniform(size=(G, M, 2))
# Function 2 has no rows, function 0 has most; one place is observed twice.
PLACES = np.array([(0, 3), (3, 1), (0, 0), (1, 6), (0, 6), (3, 3), (0, 2), (0, 5), (1, 0), (0, 4), (0, 1)])
GROUP, ROW = PLACES.T
Y = RNG.normal(size=len(PLACES))
POINTS = np.random.default_rng(4).uniform(size=(T, 3, 2))
LENGTHSCALES = np.array([[0.3], [0.5], [0.8], [1.0]])
COVARIANCES = {"dense": ["dense"], "diagonal": ["diagonal"], "blocks": ["dense", "mean-only"]}


def functions(own, covariances="dense"):
    """Functions of a plate, with a kernel and inducing inputs each or the same."""
    with numpyro.plate("functions", G, dim=-2):
        kernel = npgp.Matern32(LENGTHSCALES if own else 0.5, variance=1.3)
        blocks = [OWN if own else Z, X[:2]][: len(COVARIANCES[covariances])]
        return npgp.SparseGP("g", kernel, blocks, COVARIANCES[covariances]).draw()


def rows_of(f, functionals):
    """Values at T rows, or averages and slopes."""
    return f.average(POINTS) - f.derivative(X, 1) if functionals else f(X)


def values(own, covariances, shared, functionals=False):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([G, 1]).to_event(2))
    f = npgp.SparseGP("f", npgp.RBF(1.0), Z[:2]).draw() if shared else None
    v = rows_of(functions(own, covariances), functionals) * np.array([[1.0], [2.0], [0.5], [-1.0]]) + level
    return v if f is None else v + 0.5 * f(X)


def model(own=False, covariances="dense", shared=False, conditional="tight", ragged=True, functionals=False):
    def long(group, row, y=None):
        chosen = values(own, covariances, shared, functionals)[group, row]
        with numpyro.plate("rows", len(group)):
            npgp.observe("y", chosen, npgp.Gaussian(variance=0.3), obs=y, conditional=conditional)

    def rectangle(group, row, y=None):
        v = values(own, covariances, shared, functionals)
        y = jnp.full((G, T), jnp.nan).at[group, row].set(y)
        with numpyro.plate("outputs", G, dim=-2), numpyro.plate("rows", T):
            npgp.observe("y", v, npgp.Gaussian(variance=0.3), obs=y, mask=~jnp.isnan(y), conditional=conditional)

    return long if ragged else rectangle


@pytest.mark.parametrize(
    ("own", "covariances", "shared", "conditional", "functionals"),
    [
        (True, "dense", True, "tight", False),
        (False, "blocks", False, "prior", True),
        (True, "diagonal", False, "prior", False),
    ],
)
def test_training_is_that_of_a_rectangle_with_missing_entries(
    own, covariances, shared, conditional, functionals, float64
):
    """Bound and gradient at the same parameters; of functions beside a shared one the starts differ."""
    options = {"functionals": functionals}
    kinds = [model(own, covariances, shared, conditional, ragged=r, **options) for r in (True, False)]
    svis = [SVI(m, npgp.AutoSparseGP(m), numpyro.optim.Adam(0.05), TraceMeanField_ELBO()) for m in kinds]

    @jax.jit
    def bounds(key, *data):
        starts = [svi.optim.get_params(svi.init(key, *data).optim_state) for svi in svis]
        # Away from the start, where some gradients are 0.
        at = jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(1.0, x.size + 1)).reshape(x.shape), starts[0])

        def bound(svi):
            def of(at):
                return svi.loss.loss(key, svi.constrain_fn(at), svi.model, svi.guide, *data)

            return jax.value_and_grad(of)(at)

        return [bound(svi) for svi in svis], starts

    (ragged, rectangle), starts = bounds(jax.random.key(0), GROUP, ROW, Y)
    np.testing.assert_allclose(ragged[0], rectangle[0], rtol=1e-11)
    assert jax.tree.structure(starts[0]) == jax.tree.structure(starts[1])
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(starts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), ragged[1], rectangle[1])


@pytest.mark.parametrize("own", [False, True])
def test_density_without_a_guide_is_that_of_a_rectangle(own, float64):
    data = {"level": np.ones((G, 1)), "g.u": RNG.normal(size=(G, 1, M))}

    @jax.jit
    def density(data):
        both = [model(own, ragged=r) for r in (True, False)]
        return jnp.stack([numpyro.infer.util.log_density(m, (GROUP, ROW, Y), {}, data)[0] for m in both])

    ragged, rectangle = density(data)
    np.testing.assert_allclose(ragged, rectangle, rtol=1e-12)


@pytest.mark.parametrize(("own", "functionals"), [(False, True), (True, False)])
def test_residuals_covary_within_functions_alone(own, functionals, float64):
    groups = npgp.sparse.consecutive(len(PLACES), 4)

    @jax.jit
    def both():
        with handlers.seed(rng_seed=0):
            f = functions(own)
            f.q = tuple(npgp.variational.DenseNormal(v, jnp.eye(M)) for v in f.values)
            rows = rows_of(f, functionals)
            chosen = rows[GROUP, ROW]
            given = [latent.terms[0].function.given(latent.terms[0].X, joint=True) for latent in (rows, chosen)]
            return *(part.residual for part in given), chosen.group_covariance(groups)

    whole, residual, within = both()
    whole = np.broadcast_to(whole, (G, T, T))
    expected = np.zeros((len(PLACES), len(PLACES)))
    for i, (g, n) in enumerate(PLACES):
        for j, (h, m) in enumerate(PLACES):
            expected[i, j] = whole[g, n, m] if g == h else 0.0
    np.testing.assert_allclose(residual, expected, atol=1e-12)
    for place, rows in enumerate(np.asarray(groups.rows)):
        np.testing.assert_allclose(within[place], expected[np.ix_(rows, rows)], atol=1e-7)


def test_groups_of_rows_know_of_covariances_within_functions(float64):
    """Whether a group of rows has those of one function or of two, the bound is that of functions one by one."""
    group, row = np.repeat(np.arange(G), 4), np.tile([5, 0, 2, 6], G)
    y = RNG.normal(size=(G, 4))

    def together(size):
        def model():
            f = functions(True)
            with numpyro.plate("rows", group.size):
                grouped = npgp.conditionals.Grouped(npgp.sparse.consecutive(group.size, size))
                npgp.observe("y", f(X)[group, row], npgp.Gaussian(variance=0.3), obs=y.ravel(), conditional=grouped)

        return model

    def apart():
        grouped = npgp.conditionals.Grouped(npgp.sparse.single(4))
        for g in range(G):
            f = npgp.SparseGP(f"g{g}", npgp.Matern32(LENGTHSCALES[g, 0], variance=1.3), OWN[g]).draw()
            with numpyro.plate(f"rows{g}", 4):
                npgp.observe(f"y{g}", f(X[row[:4]]), npgp.Gaussian(variance=0.3), obs=y[g], conditional=grouped)

    @jax.jit
    def bounds(key):
        svis = [SVI(m, npgp.AutoSparseGP(m), numpyro.optim.Adam(0.05), TraceMeanField_ELBO()) for m in models]
        return [svi.evaluate(svi.init(key)) for svi in svis]

    models = apart, together(4), together(8)
    one_by_one, *found = bounds(jax.random.key(0))
    np.testing.assert_allclose(found, one_by_one, rtol=1e-10)


@pytest.mark.parametrize("statement", ["observe", "sample"])
def test_simulated_values_are_those_of_the_functions(statement, float64):
    """With inducing points at the rows nothing is left to the residual: values are the functions' own."""

    def simulated(group, row):
        with numpyro.plate("functions", G, dim=-2):
            g = npgp.SparseGP("g", npgp.RBF(0.5), X).draw()
        numpyro.deterministic("whole", g(X).moments().mean)
        with numpyro.plate("rows", len(group)):
            if statement == "observe":
                npgp.observe("v", g(X)[group, row], npgp.Gaussian(variance=1.0))
            else:
                npgp.sample("v", g(X)[group, row])

    drawn = jax.jit(lambda: Predictive(simulated, num_samples=2)(jax.random.key(0), GROUP, ROW))()
    found = drawn["v.latent" if statement == "observe" else "v"]
    np.testing.assert_allclose(found, drawn["whole"][:, GROUP, ROW], atol=1e-3)


def test_each_function_has_its_inputs(float64):
    inputs = RNG.uniform(size=(G, 5, 2))
    group, row = np.repeat(np.arange(G), 5), np.tile(np.arange(5), G)

    @functools.partial(jax.jit, static_argnums=0)
    def moments(own):
        with handlers.seed(rng_seed=0):
            f = functions(own)
            f.q = tuple(npgp.variational.DenseNormal(v, 0.5 * jnp.eye(M)) for v in f.values)
            each = f(inputs)
            one_by_one = [jax.tree.map(lambda x, g=g: x[g], f(inputs[g]).moments()) for g in range(G)]
            return each.moments(), each[group, row].moments(), jax.tree.map(lambda *x: jnp.stack(x), *one_by_one), f.q

    for own in (False, True):
        each, chosen, one_by_one, q = moments(own)
        for a, b, c in zip(each, chosen, one_by_one, strict=True):
            np.testing.assert_allclose(a, c, atol=1e-12)
            np.testing.assert_allclose(b, c.ravel(), atol=1e-12)

        kernel = npgp.Matern32(LENGTHSCALES if own else 0.5, variance=1.3)
        blocks = [npgp.features.Points(OWN if own else Z)]
        blocks_q = tuple(npgp.variational.DenseNormal(b.loc[:, 0], b.scale_tril) for b in q)
        noise = npgp.Gaussian(variance=0.3)

        @jax.jit
        def of_posterior(blocks_q, kernel=kernel, blocks=blocks, noise=noise):
            posterior = npgp.variational.Posterior(npgp.sparse.factorize_members(kernel, blocks, (G, 1)), blocks_q)
            of_one = posterior.covariance(inputs[1])[1], posterior.log_density(inputs[1], np.ones((G, 5)), noise)[1]
            of_all = posterior.covariance(inputs), posterior.log_density(inputs, np.ones((G, 5)), noise)
            in_parts = posterior.mean_and_variance(inputs, batch_size=2)[0]
            drawn = posterior.sample(jax.random.key(0), inputs, (2,))
            return posterior.mean_and_variance(inputs), in_parts, of_all, of_one, drawn

        (mean, variance), in_parts, (covariance, density), of_one, drawn = of_posterior(blocks_q)
        np.testing.assert_allclose(mean, one_by_one[0], atol=1e-12)
        np.testing.assert_allclose(variance, one_by_one[1] + one_by_one[2], atol=1e-12)
        np.testing.assert_allclose(in_parts, mean, atol=1e-12)
        np.testing.assert_allclose(np.diagonal(covariance, axis1=-2, axis2=-1), variance, atol=1e-12)
        np.testing.assert_allclose(covariance[1], of_one[0], atol=1e-12)
        np.testing.assert_allclose(density[1], of_one[1], atol=1e-12)
        assert drawn.shape == (2, G, 5)


@pytest.mark.parametrize(("members", "rows"), [(1, 9), (3, 40), (30, 7), (5, 5)])
def test_parts_hold_each_place_once_and_are_of_one_function(members, rows):
    rng = np.random.default_rng(members)
    group = rng.integers(members, size=rows)
    traced = jax.jit(lambda g: (p := Places(g, jnp.zeros(rows, int), (members, 1))) and (p.parts, p.members))
    parts, of = traced(group)
    assert sorted(np.asarray(parts.rows)[np.asarray(parts.mask)]) == list(range(rows))
    assert np.all(np.where(parts.mask, group[parts.rows], of[:, None]) == of[:, None])
    np.testing.assert_array_equal(parts.scatter(parts.gather(jnp.arange(rows))), np.arange(rows))


@pytest.mark.parametrize(
    ("index", "error", "match"),
    [
        (0, TypeError, "two arrays of N whole numbers"),
        ((GROUP, slice(None)), TypeError, "two arrays of N whole numbers"),
        ((GROUP, ROW[1:]), ValueError, "same length"),
        ((GROUP.astype(float), ROW), TypeError, "group has dtype float"),
        ((GROUP + 1, ROW), ValueError, "group has function 4; there are 4 functions"),
        ((GROUP, ROW - 1), ValueError, "row has row -1; there are 7 rows"),
        ((GROUP[:, None], ROW[:, None]), ValueError, "group has shape"),
    ],
)
def test_an_index_that_chooses_nothing_is_refused(index, error, match):
    with handlers.seed(rng_seed=0), pytest.raises(error, match=match):
        functions(False)(X)[index]


def test_what_has_no_rows_to_choose_from_is_refused():
    with handlers.seed(rng_seed=0):
        f = functions(False)
        with pytest.raises(ValueError, match="mixed by a matrix"):
            (np.ones((2, G)) @ f(X))[[0, 1], [0, 1]]
        with pytest.raises(ValueError, match="inputs each"):
            f(np.zeros((3, 5, 2)))
        single = npgp.SparseGP("h", npgp.RBF(1.0), Z).draw()
        with pytest.raises(ValueError, match="one plate at dim=-2"):
            single(X)[GROUP, ROW]
        with pytest.raises(ValueError, match="drawn in plates|one function"):
            single(np.zeros((3, 5, 2)))
        with pytest.raises(ValueError, match="different functions of its plate: draw one function"):
            npgp.observe("y", f(X)[GROUP, ROW] - f(X)[GROUP[::-1], ROW], npgp.Gaussian(variance=1.0))
        own = np.tile(X, (G, 1, 1))
        for refused in (lambda: f.derivative(own), lambda: f.average(own[None]), lambda: f(own) - f(own)):
            with pytest.raises(ValueError, match=r"state all rows of all functions and choose by \[group, row\]"):
                npgp.observe("y", refused(), npgp.Gaussian(variance=1.0))


@pytest.mark.parametrize("traced", [False, True])
def test_rows_of_the_same_functions_are_subtracted(traced, float64):
    def moments(group):
        with handlers.seed(rng_seed=0):
            f = functions(True)
            f.q = tuple(npgp.variational.DenseNormal(v, 0.5 * jnp.eye(M)) for v in f.values)
            chosen = 2.0 * f(X)[group, ROW] - f(X[::-1])[group if traced else GROUP.copy(), ROW]
            return chosen.moments(), (2.0 * f(X) - f(X[::-1])).moments()

    found, whole = jax.jit(moments)(GROUP) if traced else jax.jit(lambda: moments(GROUP))()
    for a, b in zip(found, whole, strict=True):
        np.testing.assert_allclose(a, b[GROUP, ROW], atol=1e-12)


def test_a_traced_index_is_checked_where_training_starts():
    ragged = model()
    svi = SVI(ragged, npgp.AutoSparseGP(ragged), numpyro.optim.Adam(0.05), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match="group has function 4; there are 4 functions"):
        npgp.fit(svi, jax.random.key(0), 2, GROUP + 1, ROW, Y)
