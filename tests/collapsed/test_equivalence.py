"""Methods that must agree, do: uncollapsed with collapsed, parametrizations, and structures that are each other's."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from models import Dense, O, X, Y, Z, compiled, elbo_value, kernel, make_elbo
from numpyro import handlers

import npgp
from npgp.sparse.groups import consecutive, median_split

Z2 = np.array([[3.9], [0.1]])
#: Inducing inputs of each block, and the covariance structure of q(ε) for each.
STRUCTURES = {
    "one block": ([Z], ("dense",)),
    "union": ([np.concatenate([Z, O])], ("dense",)),
    "mean field": ([Z], ("diagonal",)),
    "ODVGP": ([Z, O], ("dense", "mean-only")),
    "SOLVE-GP": ([Z, O], ("dense", "dense")),
    "mean-field ODVGP": ([Z, O], ("diagonal", "mean-only")),
    "three": ([Z, O, Z2], ("dense", "dense", "dense")),
    "three, last mean-only": ([Z, O, Z2], ("dense", "diagonal", "mean-only")),
}
CONDITIONALS = ("prior", "tight", "grouped", "full")
NOISE = np.linspace(0.1, 0.6, 8)  # one for each row


def gp_of(structure, **settings):
    blocks, kinds = STRUCTURES[structure] if isinstance(structure, str) else structure
    blocks = [jnp.asarray(block.copy()) for block in blocks]
    return npgp.SparseGP("f", kernel(), blocks, kinds, jitter=1e-12, **settings)


def model_of(gp, conditional="tight", noise=NOISE, likelihood=None):
    def model(X, y):
        f = gp.draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X), likelihood or npgp.Gaussian(variance=noise), obs=y, conditional=conditional)

    return model


def with_groups(conditional):
    return npgp.conditionals.Grouped(median_split(X.astype(np.float32), 3)) if conditional == "grouped" else conditional


def collapsed_of(gp, conditional, noise=NOISE):
    return npgp.CollapsedGP(
        gp.kernel,
        X,
        gp.inducing,
        noise_variance=noise,
        covariances=gp.covariances,
        conditional=with_groups(conditional),
        jitter=1e-12,
    )


@pytest.mark.parametrize("structure", ["SOLVE-GP", "three, last mean-only"])
def test_uncollapsed_at_the_optimum_is_collapsed_and_stationary(structure, float64):
    gp = gp_of(structure)

    @compiled
    def everything():
        optimum = collapsed_of(gp, "prior").condition(Y)
        params = gp.params(optimum.q)
        found = {}
        for conditional in CONDITIONALS:
            elbo = make_elbo(model_of(gp, with_groups(conditional)))
            value = jax.value_and_grad(lambda p, elbo=elbo: elbo(jax.random.key(0), p, X, Y))(params)
            elsewhere = {k: v + 0.1 if k.endswith("loc") else v * 1.1 for k, v in params.items()}
            off = elbo(jax.random.key(0), elsewhere, X, Y)
            found[conditional] = (*value, off, collapsed_of(gp, conditional).log_prob(Y))
        return found, optimum.mean_and_variance(X), gp.posterior(params).mean_and_variance(X)

    found, predictions, from_params = everything()
    for conditional, (elbo, gradient, off, bound) in found.items():
        np.testing.assert_allclose(elbo, bound, rtol=1e-9, err_msg=conditional)
        assert off < elbo - 1e-2
        for name, slope in gradient.items():
            lower = np.tril(slope) if name.endswith("tril") else slope
            assert np.max(np.abs(lower)) < 1e-7, (conditional, name)
    bounds = [found[conditional][0] for conditional in CONDITIONALS]
    assert np.all(np.diff(bounds) > 1e-5) and bounds[-1] > bounds[0] + 1e-3
    np.testing.assert_allclose(from_params, predictions, rtol=1e-9)


@pytest.mark.parametrize("structure", ["mean field", "SOLVE-GP", "ODVGP"])
def test_unwhitened_parameters_are_the_same_family(structure, float64):
    white, plain = gp_of(structure), gp_of(structure, whitened=False)
    diagonal = "diagonal" in white.covariances

    @compiled
    def both():
        q = collapsed_of(white, "tight").condition(Y).q
        params = {"white": white.params(q), "plain": {} if diagonal else plain.params(q)}
        if diagonal:
            params["plain"] = {"f.u.loc": jnp.array([0.3, -0.2, 0.5]), "f.u.scale": jnp.array([0.2, 0.5, 0.3])}
        elbos = {
            name: make_elbo(model_of(gp))(jax.random.key(0), params[name], X, Y)
            for name, gp in (("white", white), ("plain", plain))
        }
        return params, elbos, plain.posterior(params["plain"]).covariance(Z)

    params, elbos, covariance = both()
    L = np.linalg.cholesky(np.asarray(kernel()(jnp.asarray(Z))))
    if diagonal:  # a family of its own: independent inducing values
        np.testing.assert_allclose(covariance, np.diag([0.04, 0.25, 0.09]), atol=1e-9)
        m, S = params["plain"]["f.u.loc"], np.diag(params["plain"]["f.u.scale"])
        dense = {"f.u.loc": np.linalg.solve(L, m), "f.u.scale_tril": np.linalg.solve(L, S)}
        expected = elbo_value(model_of(gp_of("one block")), dense, X, Y)
        np.testing.assert_allclose(elbos["plain"], expected, rtol=1e-9)
        return
    np.testing.assert_allclose(elbos["plain"], elbos["white"], rtol=1e-9)
    np.testing.assert_allclose(params["plain"]["f.u.loc"], L @ params["white"]["f.u.loc"], rtol=1e-6)
    S = params["plain"]["f.u.scale_tril"] @ params["plain"]["f.u.scale_tril"].T
    np.testing.assert_allclose(covariance, S, atol=1e-9)


def test_unwhitened_start_is_the_whitened_one_and_trains_to_the_same_optimum(float64):
    gp = gp_of("SOLVE-GP", whitened=False)
    model = model_of(gp)
    guide = npgp.AutoSparseGP(model)
    svi = numpyro.infer.SVI(model, guide, npgp.adam(0.05, 800), numpyro.infer.TraceMeanField_ELBO())
    with pytest.warns(npgp.training.TrainingWarning, match="leave of f costs"):  # the points are few
        result = npgp.fit(svi, jax.random.key(0), 800, X, Y, progress=False)
    start = handlers.trace(handlers.seed(guide, 0)).get_trace(X, Y)
    np.testing.assert_allclose(start["f.u"]["fn"].scale_tril, 0.1 * np.eye(3), atol=1e-9)
    bound = compiled(lambda: collapsed_of(gp, "tight").log_prob(Y))()
    assert bound - 1e-3 < -result.losses[-1] < bound + 1e-6
    with pytest.raises(NotImplementedError, match="unwhitened"):
        guide.median(result.params)


def test_q_of_another_structure_is_refused():
    q = gp_of("one block").posterior({"f.u.loc": jnp.zeros(3), "f.u.scale_tril": jnp.eye(3)}).q
    for structure in ("mean field", "union", "SOLVE-GP"):
        with pytest.raises(ValueError, match="q has blocks \\['dense'\\] of sizes \\[3\\], but f has"):
            gp_of(structure).params(q)


# ---------------------------------------------------------------------------------------------------------------
# Structures that are each other's


def collapsed_value(structure, conditional="tight"):
    gp = gp_of(structure)
    return lambda: (collapsed_of(gp, conditional).log_prob(Y), collapsed_of(gp, conditional).condition(Y).variance(X))


def test_an_empty_block_changes_nothing(float64):
    nothing = np.zeros((0, 1))
    kinds = ("diagonal", "dense", "dense", "dense", "mean-only")
    pair = ([Z, O], ("dense", "dense")), ([nothing, Z, nothing, O, nothing], kinds)

    @compiled
    def everything():
        collapsed = [collapsed_value(structure)() for structure in pair]
        gps = [gp_of(structure) for structure in pair]
        params = [gp.params(collapsed_of(gp, "tight").condition(Y).q) for gp in gps]
        elbos = [make_elbo(model_of(gp))(jax.random.key(0), p, X, Y) for gp, p in zip(gps, params, strict=True)]
        return collapsed, elbos

    for without, with_empty in everything():
        for a, b in zip(jax.tree.leaves(without), jax.tree.leaves(with_empty), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-10)
    with pytest.raises(ValueError, match="at least one"):
        gp_of(([nothing], ("dense",)))


def test_blocks_of_one_point_are_one_block_with_a_diagonal_covariance(float64):
    single = ([Z[:1], Z[1:2], Z[2:]], ("dense",) * 3)
    for conditional in ("tight", "full"):
        blocks, mean_field = compiled(
            lambda c=conditional: (collapsed_value(single, c)(), collapsed_value("mean field", c)())
        )()
        np.testing.assert_allclose(blocks[0], mean_field[0], rtol=1e-9)
        np.testing.assert_allclose(blocks[1], mean_field[1], rtol=1e-9)


def test_a_block_that_repeats_another_adds_nothing(float64):
    # With the covariance of what is left at the level of the jitter, its q(ε) has no say in f.
    repeated = ([Z, Z + 1e-12], ("dense", "dense"))
    once, twice = compiled(lambda: (collapsed_value("one block")(), collapsed_value(repeated)()))()
    np.testing.assert_allclose(twice[0], once[0], atol=1e-3)


def test_fused_blocks_are_one_block(float64):
    # The same q over all inducing values: dense over the union, its factor block-diagonal in whitened coordinates.
    split, fused = gp_of("SOLVE-GP"), gp_of("union")

    @compiled
    def both():
        q = collapsed_of(split, "tight").condition(Y).q
        params = split.params(q)
        joint = {
            "f.u.loc": jnp.concatenate([block.loc for block in q]),
            "f.u.scale_tril": jax.scipy.linalg.block_diag(*(block.scale_tril for block in q)),
        }
        return [
            (make_elbo(model_of(gp, with_groups(c)))(jax.random.key(0), p, X, Y), gp.posterior(p).covariance(X))
            for c in ("tight", "grouped")
            for gp, p in ((split, params), (fused, joint))
        ]

    for a, b in np.array(both(), dtype=object).reshape(2, 2, 2):
        np.testing.assert_allclose(a[0], b[0], rtol=1e-9)
        np.testing.assert_allclose(a[1], b[1], atol=1e-9)


# ---------------------------------------------------------------------------------------------------------------
# Groups in a model


def test_minibatches_of_whole_groups_are_unbiased(float64):
    # Laid out group after group, the last one short: padded, and masked.
    groups = consecutive(8, 3)
    assert groups.count * groups.size > 8
    x, y, mask = groups.arrange(X), groups.arrange(Y), groups.mask.ravel()
    size, g = len(x), groups.size
    gp = gp_of("ODVGP")

    def model(x, y, mask):
        f = gp.draw()
        with npgp.plate("data", size, rows=x.shape[0]):
            npgp.observe(
                "y", f(x), npgp.Gaussian(variance=0.3), obs=y, mask=mask, conditional=npgp.conditionals.Grouped(g)
            )

    @compiled
    def values():
        params = gp.params(collapsed_of(gp, "tight", 0.3).condition(Y).q)
        params = {k: v + 0.2 if k.endswith("loc") else v * 1.3 for k, v in params.items()}
        elbo = make_elbo(model)
        key = jax.random.key(0)
        parts = [elbo(key, params, x[i : i + g], y[i : i + g], mask[i : i + g]) for i in range(0, size, g)]
        whole = make_elbo(model_of(gp, npgp.conditionals.Grouped(groups), 0.3))(key, params, X, Y)
        return jnp.stack(parts), elbo(key, params, x, y, mask), whole

    parts, padded, whole = values()
    np.testing.assert_allclose(padded, whole, rtol=1e-10)
    np.testing.assert_allclose(np.mean(parts), whole, rtol=1e-10)
    assert np.std(parts) > 0.1


def test_groups_do_not_stand_in_the_way_of_new_rows():
    groups = median_split(X.astype(np.float32), 3)
    gp = npgp.SparseGP("f", kernel(), jnp.asarray(Z.copy()))

    def model(X, y=None):
        f = gp.draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=y, conditional=npgp.conditionals.Grouped(groups))

    guide = npgp.AutoSparseGP(model)
    svi = numpyro.infer.SVI(model, guide, npgp.adam(0.05), numpyro.infer.TraceMeanField_ELBO())
    params = npgp.fit(svi, jax.random.key(0), 2, X.copy(), Y.copy(), progress=False).params
    draws = numpyro.infer.Predictive(model, guide=guide, params=params, num_samples=3)(jax.random.key(1), X[:5].copy())
    assert draws["y"].shape == (3, 5)
    assert npgp.posterior("f", model, guide, params, X[:5].copy()).mean(X[:5].copy()).shape == (5,)


def test_fit_takes_whole_groups():
    seen = []

    def model(x, number):
        seen.append(x.shape)
        with npgp.plate("data", 12, rows=x.shape[0]):
            # Rows of one group have one number, or the loss is not 0.
            numpyro.factor("apart", -jnp.sum(jnp.square(number.reshape(-1, 3) - number.reshape(-1, 3)[:, :1])))
            numpyro.param("p", 0.0)

    svi = numpyro.infer.SVI(model, lambda *args: numpyro.param("p", 0.0), npgp.adam(), numpyro.infer.Trace_ELBO())
    number = np.repeat(np.arange(4.0, dtype=np.float32), 3)
    x = np.zeros((12, 2), np.float32)
    result = npgp.fit(svi, jax.random.key(0), 20, x, number, batch_size=6, group_size=3, progress=False)
    assert np.all(result.losses == 0) and (6, 2) in seen
    apart = npgp.fit(svi, jax.random.key(0), 20, x, number, batch_size=6, progress=False)
    assert np.max(apart.losses) > 0
    with pytest.raises(ValueError, match="group_size is 5, which does not divide"):
        npgp.fit(svi, jax.random.key(0), 20, x, number, batch_size=6, group_size=5, progress=False)


def test_sums_multiples_and_outputs_in_groups(float64):
    # y_d = a_d (f + 2 g): a group's covariance is that of the sum, for each output its own.
    groups = consecutive(8, 4)
    a = np.array([[0.7], [1.6]])
    f, g = gp_of("one block"), npgp.SparseGP("g", npgp.RBF(1.1, variance=0.4), jnp.asarray(O.copy()), jitter=1e-12)
    y = np.stack([Y, Y**2])

    def model(conditional):
        def model(X, y):
            total = f.draw()(X) + 2.0 * g.draw()(X)
            with numpyro.plate("outputs", 1, dim=-2), numpyro.plate("data", 8):
                npgp.observe("y", a[0] * total, npgp.Gaussian(variance=0.3), obs=y, conditional=conditional)

        return model

    rng = np.random.default_rng(0)
    params = {
        "f.u.loc": rng.normal(size=3),
        "f.u.scale_tril": 0.3 * np.eye(3),
        "g.u.loc": rng.normal(size=2),
        "g.u.scale_tril": 0.5 * np.eye(2),
    }
    params = {name: jnp.asarray(value) for name, value in params.items()}
    tight, grouped = (
        elbo_value(model(conditional), params, X, Y)
        for conditional in (npgp.conditionals.Tight(), npgp.conditionals.Grouped(groups))
    )
    parts = [Dense(([Z], ("dense",)), X), Dense(([O], ("dense",)), X, name="g", lengthscale=1.1, variance=0.4)]
    D = a[0] ** 2 * (parts[0].D + 4.0 * parts[1].D) / 0.3
    blocks = [np.linalg.slogdet(np.eye(4) + D[i : i + 4, i : i + 4])[1] for i in (0, 4)]
    np.testing.assert_allclose(grouped - tight, 0.5 * (np.sum(np.log1p(np.diag(D))) - sum(blocks)), rtol=1e-8)
    assert grouped > tight + 0.01
    assert y.shape == (2, 8)


def test_full_needs_all_rows():
    gp = npgp.SparseGP("f", kernel(), jnp.asarray(Z.copy()))

    def model(X, y):
        f = gp.draw()
        with npgp.plate("data", 16, rows=8):
            npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=y, conditional="full")

    with pytest.raises(ValueError, match="needs all rows at once"):
        make_elbo(model)(jax.random.key(0), {}, X.copy(), Y.copy())


def test_an_observation_says_whether_it_is_certified():
    gp = npgp.SparseGP("f", kernel(), jnp.asarray(Z.copy()))
    for conditional, likelihood, certified in [
        ("tight", npgp.StudentT(df=3.0, scale=0.3), True),
        ("published", npgp.StudentT(df=3.0, scale=0.3), False),
        ("published", npgp.Bernoulli(), True),
        ("prior", npgp.Poisson(), True),
    ]:
        model = model_of(gp, conditional, likelihood=likelihood)
        guide = npgp.AutoSparseGP(model)
        y = np.ones(8, int)
        guide_trace = handlers.trace(handlers.seed(guide, 0)).get_trace(X.copy(), y)
        replayed = handlers.replay(handlers.seed(model, 1), guide_trace)
        assert handlers.trace(replayed).get_trace(X.copy(), y)["y"]["fn"].certified == certified
