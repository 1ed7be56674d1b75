"""What handlers, plates and losses around statements change: it is heeded, or refused in a sentence."""

from contextlib import contextmanager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import NOISE, VARIANCE, Dense, X, Y, Z, compiled, elbo_value, make_elbo, random_params, sparse_gp
from numpyro import handlers
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from scipy import stats

import npgp

KEY = jax.random.key(0)
N = len(X)


def model(X, y=None, likelihood=None, **options):
    f = sparse_gp(jitter=1e-12).draw()
    with numpyro.plate("rows", len(X)):
        npgp.observe("y", f(X), likelihood or npgp.Gaussian(variance=NOISE), obs=y, **options)


def traced(of, *args, loss=None, guide=None):
    """Where training would raise; nothing is computed."""
    jax.eval_shape(lambda params: make_elbo(of, guide, loss)(KEY, params, *args), random_params())


# ---------------------------------------------------------------------------------------------------------------
# Losses


def test_losses_that_are_no_expectation_are_refused():
    def drawn(X, y, **options):
        f = sparse_gp().draw()
        with numpyro.plate("rows", len(X)):
            value = npgp.sample("f", f(X), **options)
            numpyro.sample("y", dist.Normal(value, 0.1), obs=y)

    class Weighted(RenyiELBO):
        pass

    for loss in (RenyiELBO(), RenyiELBO(alpha=2.0, num_particles=3), Weighted()):
        for of in (model, lambda X, y: drawn(X, y, joint=False), lambda X, y: drawn(X, y, conditional="shared")):
            with pytest.raises(ValueError, match=rf"(y|f) stands for .* as {type(loss).__name__} supposes: use Trace"):
                traced(of, X, Y, loss=loss)
        traced(drawn, X, Y, loss=loss)  # ordinary sites with ordinary densities
    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01), RenyiELBO())
    with pytest.raises(ValueError, match="RenyiELBO"):
        jax.eval_shape(jax.jit(svi.update), jax.eval_shape(svi.init, KEY, X, Y), X, Y)


def test_expectations_are_right_with_several_particles(float64):
    expected = elbo_value(model, random_params(), X, Y)
    losses = [TraceMeanField_ELBO(2), TraceGraph_ELBO(), Trace_ELBO(3)]

    def shares(key, params):
        return jnp.stack([make_elbo(model, loss=loss)(key, params, X, Y) for loss in losses])

    values = compiled(jax.vmap(shares, (0, None)))(jax.random.split(KEY, 4000), random_params())
    np.testing.assert_allclose(values[:, 0], expected, rtol=1e-10)
    error = np.std(values, 0) / np.sqrt(len(values))
    assert np.all(np.abs(np.mean(values, 0)[1:] - expected) < 5.0 * error[1:])


def test_enumeration_is_no_reason_to_refuse():
    pytest.importorskip("funsor")
    traced(model, X, Y, loss=TraceEnum_ELBO())


# ---------------------------------------------------------------------------------------------------------------
# Masks


def test_masks_by_handlers_are_masks_by_argument_in_groups(float64):
    """And the bound stays below the evidence of what is observed, which it did not where groups saw rows masked."""
    groups, rng, count = npgp.conditionals.Grouped(3), np.random.default_rng(5), 300
    data = {
        "X": rng.uniform(0.0, 1.0, (count, 6, 1)),
        "y": rng.normal(size=(count, 6)) * np.exp(rng.normal(size=(count, 1))),
        "mask": rng.uniform(size=(count, 6)) < 0.6,
        "lengthscale": np.exp(rng.normal(size=count) - 1.0),
        "noise": np.exp(2.0 * rng.normal(size=count) - 3.0),
    }
    data["mask"][:, 0] = True

    def bounds(X, y, mask, lengthscale, noise):
        gp = npgp.SparseGP("f", npgp.RBF(lengthscale=lengthscale), X[:2], jitter=1e-12)

        def observed(by_handler):
            f = gp.draw()
            with numpyro.plate("rows", 6), handlers.mask(mask=mask if by_handler else jnp.ones(6, bool)):
                npgp.observe(
                    "y",
                    f(X),
                    npgp.Gaussian(variance=noise),
                    obs=y,
                    conditional=groups,
                    mask=None if by_handler else mask,
                )

        ignored = jnp.where(mask, noise, 1e12)
        q = (
            npgp.CollapsedGP(gp.kernel, X, X[:2], noise_variance=ignored, jitter=1e-12)
            .condition(jnp.where(mask, y, 0.0))
            .q
        )
        return [make_elbo(observed)(KEY, gp.params(q), by_handler) for by_handler in (True, False)]

    by_handler, by_argument = compiled(jax.vmap(bounds))(*data.values())
    evidence = []
    for inputs, y, mask, lengthscale, noise in zip(*data.values(), strict=True):
        x = inputs[mask, 0]
        K = np.exp(-0.5 * ((x[:, None] - x) / lengthscale) ** 2) + noise * np.eye(len(x))
        evidence.append(stats.multivariate_normal.logpdf(y[mask], np.zeros(len(x)), K))
    np.testing.assert_allclose(by_handler, by_argument, rtol=1e-10)
    assert np.all(by_handler < np.array(evidence) + 1e-8 * np.abs(evidence))


def test_masks_that_are_not_row_by_row_are_refused():
    def masked(X, y, outer, inner):
        f = sparse_gp().draw()
        with outer, numpyro.plate("rows", N), inner:
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y, conditional=npgp.conditionals.Grouped(2))

    def refused(words, outer, inner):
        with pytest.raises(ValueError, match=words):
            traced(lambda X, y: masked(X, y, outer(), inner), X, Y)

    for mask in (np.ones((N, 1), bool), np.ones(3, bool)):
        words = rf"handlers.mask has shape .* for observations of shape \({N},\)"
        refused(words, nullcontext, handlers.mask(mask=mask))
    # In a plate of one member the observations have been expanded when the mask comes to them.
    words = r"y: Grouped\(2\) does not see this handlers\.mask: pass mask= to npgp\.observe"

    @contextmanager
    def outer():
        with handlers.mask(mask=np.ones((1, N), bool)), numpyro.plate("one", 1, dim=-2):
            yield

    refused(words, outer, nullcontext())


# ---------------------------------------------------------------------------------------------------------------
# Shapes


def test_parameters_of_likelihoods_must_have_the_shape_of_the_values():
    column = np.full((N, 1), NOISE)

    def refused(likelihood, words, y=Y):
        with pytest.raises(ValueError, match=words):
            traced(model, X, y, likelihood)
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(lambda: handlers.seed(model, 0)(X, None, likelihood))

    words = r"y: Gaussian has variance of shape \(8, 1\), but the GP values have shape \(8,\): give what differs"
    refused(npgp.Gaussian(variance=column), words)
    refused(npgp.Gaussian(variance=column[:5, 0]), r"variance of shape \(5,\)")
    refused(npgp.StudentT(df=column + 3.0, scale=0.1), r"StudentT has df of shape \(8, 1\)")
    refused(lambda f: dist.Normal(f, column), r"Factorized has terms of shape \(8, 8\)")
    for right in (NOISE, column[:, 0], column[:1, 0]):
        traced(model, X, Y, npgp.Gaussian(variance=right))
        traced(model, X, Y, lambda f, right=right: dist.Normal(f, right))


def test_values_that_a_plate_would_repeat_are_refused():
    def repeated(use):
        f = sparse_gp().draw()
        with numpyro.plate("copies", 3, dim=-2), numpyro.plate("rows", N):
            if use is npgp.observe:
                npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=Y)
            else:
                npgp.sample("y", f(X))

    for use in (npgp.observe, npgp.sample):
        with pytest.raises(ValueError, match=r"y has GP values of shape \(8,\), which plate 'copies' at dim=-2 would"):
            jax.eval_shape(lambda use=use: handlers.seed(repeated, 0)(use))


def test_transposed_observations_are_told():
    def several(y):
        with numpyro.plate("outputs", 3, dim=-2):
            f = sparse_gp().draw()
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    jax.eval_shape(handlers.seed(several, 0), np.zeros((3, N)))
    with pytest.raises(ValueError, match=r"obs has shape \(8, 3\); it must be \(3, 8\): transpose it"):
        jax.eval_shape(handlers.seed(several, 0), np.zeros((N, 3)))


def test_links_are_asked_for():
    counts = np.ones(N, int)

    def refused(fn, words):
        with pytest.raises(ValueError, match=f"{words}.* use a link, as in dist"):
            handlers.seed(model, 0)(X, counts, fn)

    refused(lambda f: dist.Poisson(f), "Factorized fn .*rate.* at f = -1")
    refused(lambda f: dist.Exponential(-f), "Factorized fn .*rate.* at f = 1")
    refused(lambda f: dist.Bernoulli(probs=f), "Factorized fn .*probs.* at f = -1")
    refused(lambda f: dist.Normal(0.0, f), "Factorized fn .*scale.* at f = -1")
    for fn in (lambda f: dist.Poisson(jnp.exp(f)), lambda f: dist.Bernoulli(logits=f)):
        handlers.seed(model, 0)(X, counts, fn)


def test_sizes_of_plates():
    for size in (None, 3.5, "3"):
        with pytest.raises(TypeError, match=rf"plate 'd': size is {size!r}; it must be a whole number"):
            npgp.plate("d", size)


# ---------------------------------------------------------------------------------------------------------------
# Values given by handlers


def test_conditioned_observations_are_observations(float64):
    params = random_params()
    for options in ({}, {"conditional": npgp.conditionals.Grouped(4)}, {"conditional": "full"}):

        def conditioned(X, y, options=options):
            handlers.condition(model, {"y": y})(X, **options)

        def given(X, y, options=options):
            model(X, y, **options)

        np.testing.assert_allclose(elbo_value(conditioned, params, X, Y), elbo_value(given, params, X, Y), rtol=1e-12)


def test_conditioned_observations_are_checked():
    function = {"condition_fn": lambda msg: FOUND[0] if msg["name"] == "y" else None}
    FOUND = [Y]

    def refused(y, words, likelihood=None, **options):
        FOUND[0] = y
        for how in ({"data": {"y": y}}, function):
            with pytest.raises(ValueError, match=words):
                handlers.seed(handlers.condition(model, **how), 0)(X, None, likelihood, **options)

    refused(np.where(Y > 0, Y, np.nan), "y: obs has NaN")
    refused(Y[:, None], r"y: obs has shape \(8, 1\); it must be \(8,\)")
    refused(Y, "for Poisson it must be", npgp.Poisson())
    with pytest.raises(ValueError, match=r"Grouped\(2\) must know of observations: pass obs=y, or condition by data"):
        FOUND[0] = Y
        traced(handlers.condition(lambda X: model(X, conditional=npgp.conditionals.Grouped(2)), **function), X)
    scoped = handlers.condition(handlers.scope(model, prefix="a"), {"a/y": np.full(N, np.nan)})
    with pytest.raises(ValueError, match="y: obs has NaN"):
        handlers.seed(scoped, 0)(X)


@pytest.mark.parametrize("structure", ["svgp", "solve"])
def test_inducing_values_that_are_fixed_are_heeded(structure, float64):
    """The bound given ε is that of the GP that is left of the prior, which dense algebra knows."""
    fixed = {"f.u": jnp.asarray([0.3, -0.5, 0.8])}

    def one(X, y=None):
        f = sparse_gp(structure, jitter=1e-12).draw()
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    params, guide = random_params(structure), npgp.AutoSparseGP(one)
    near = {**params, "f.u.loc": fixed["f.u"], "f.u.scale_tril": 1e-7 * jnp.eye(3)}
    held = handlers.do(one, fixed)
    cases = [(one, near, guide), (held, params, guide), (held, params, npgp.AutoSparseGP(held))]
    cases.append((handlers.condition(one, fixed), params, guide))

    def bounds(near, params):
        """Without what f.u adds by itself, its divergence or its density."""
        loss = TraceMeanField_ELBO(sum_sites=False)
        shares = [loss.loss(KEY, at, of, by, X, Y) for of, at, by in cases]
        return [-sum(value for name, value in share.items() if name != "f.u") for share in shares]

    with pytest.warns(UserWarning, match="in guide but not model"):
        expected, *found = compiled(bounds)(near, params)
    np.testing.assert_allclose(found, [expected] * 3, rtol=1e-6)


def test_sampled_values_heed_what_is_fixed(float64):
    fixed = {"f.u": jnp.asarray([0.3, -0.5, 0.8])}

    def one(y=None):
        f = sparse_gp(jitter=1e-12).draw()
        return npgp.sample("v", f(Z))

    guide = npgp.AutoSparseGP(one)

    def values(key, params):
        found = []
        for of in (one, handlers.do(one, fixed)):
            first = handlers.trace(handlers.substitute(handlers.seed(guide, key), params)).get_trace()
            found.append(handlers.seed(handlers.replay(of, first), key)())
        return found

    free, held = compiled(values)(KEY, random_params())
    A = Dense("svgp", Z).A
    np.testing.assert_allclose(held, A.T @ fixed["f.u"], atol=1e-2)  # all but jitter is known at Z
    assert np.max(np.abs(free - held)) > 0.1


def test_substituted_inducing_values_are_refused_in_training():
    value, guide = {"f.u": jnp.zeros(3)}, npgp.AutoSparseGP(model)
    for of, by in ((handlers.substitute(model, value), guide), (model, handlers.substitute(guide, value))):
        with pytest.raises(ValueError, match=r"f\.u is given a value by handlers\.substitute, .* use handlers\.do"):
            traced(of, X, Y, guide=by)
    jax.eval_shape(handlers.seed(handlers.substitute(guide, value), 0), X, Y)  # for the guide's own density


# ---------------------------------------------------------------------------------------------------------------
# Messages


def test_messages_have_names_for_functions_that_hide(float64):
    def several(X, y=None):
        f, h = sparse_gp().draw(), sparse_gp(name="h").draw()
        with numpyro.plate("rows", len(X)):
            value = npgp.sample("g", h(X))
            npgp.observe("y", f(X) + value, npgp.Gaussian(variance=NOISE), obs=y)

    names = []

    def hide(message):
        names.append(message["name"])
        return message["name"] == "nothing" or message["name"].startswith("other")

    hidden = handlers.scope(handlers.block(several, hide_fn=hide), prefix="a", divider=".")
    # That h is in the offset beside f is not at issue here.
    guide = npgp.AutoSparseGP(hidden, joint=False)
    svi = SVI(hidden, guide, npgp.adam(0.01), TraceMeanField_ELBO())
    state = jax.eval_shape(svi.init, KEY, X, Y)
    jax.eval_shape(svi.update, state, X, Y)
    params = jax.eval_shape(svi.get_params, state)
    assert {"a.f.u.loc", "a.h.u.scale_tril"} <= set(params)
    jax.eval_shape(lambda: numpyro.infer.Predictive(handlers.seed(hidden, 0), num_samples=2)(KEY, X))
    assert {"f.u", "g", "y"} <= set(names)


# ---------------------------------------------------------------------------------------------------------------
# Trained parameters


def test_posteriors_need_all_parameters(float64):
    def scaled(X, y=None):
        kernel = npgp.RBF(lengthscale=numpyro.param("lengthscale", 1.0), variance=VARIANCE)
        model_of = sparse_gp("odvgp", k=kernel).draw()
        npgp.observe("y", model_of(X), npgp.Gaussian(variance=NOISE), obs=y)

    guide = npgp.AutoSparseGP(scaled)
    params = {**random_params("odvgp"), "lengthscale": jnp.asarray(0.5)}
    jax.eval_shape(handlers.seed(guide, 0), X, Y)
    npgp.posterior("f", scaled, guide, params, X)
    npgp.posterior("f", handlers.substitute(scaled, {"lengthscale": 0.5}), guide, params, X)
    for missing in params:
        some = {name: value for name, value in params.items() if name != missing}
        with pytest.raises(KeyError, match=f"params has no '{missing}'"):
            npgp.posterior("f", scaled, guide, some, X)
        with pytest.raises(KeyError, match=f"params has no '{missing}'"):
            guide.sample_posterior(KEY, some, X)
        if missing != "lengthscale":
            with pytest.raises(KeyError, match=f"params has no '{missing}'"):
                guide.quantiles(some, [0.5])
    with pytest.raises(KeyError, match="params has no"):
        npgp.posterior("f", scaled, guide, {}, X)


def test_latent_variable_models_need_all_parameters():
    data = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    gplvm = npgp.BayesianGPLVM(npgp.gplvm.pca_start(KEY, data, latent_dim=1, num_inducing=2))
    svi = SVI(gplvm.model, gplvm.guide, npgp.adam(0.01), TraceMeanField_ELBO())
    params = jax.jit(lambda key: svi.get_params(svi.init(key, data)))(KEY)
    uses = {
        "lengthscale": gplvm.posterior,
        "inducing": gplvm.posterior,
        "noise_variance": gplvm.likelihood_at,
        "x.scale": gplvm.latents_at,
    }
    for missing, use in uses.items():
        use(params)
        with pytest.raises(KeyError, match=f"params has no '{missing}'"):
            use({name: value for name, value in params.items() if name != missing})
