"""``SparseGP``, its draw, and what the statements accept and refuse."""

import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import (
    NOISE,
    Dense,
    X,
    Y,
    Z,
    affine,
    compiled,
    elbo_value,
    kernel,
    log_normal,
    make_elbo,
    random_params,
    regression,
    sparse_gp,
)
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.util import log_density

import npgp


def run(model, *args):
    """The model's trace, with a seed."""
    return handlers.trace(handlers.seed(model, jax.random.key(0))).get_trace(*args)


def a_draw(name="f"):
    with handlers.seed(rng_seed=0):
        return sparse_gp(name=name).draw()


class OneSentence:
    """Expects an error of a type, whose message is one sentence that has the words given."""

    def __init__(self, error, *words):
        self.error, self.words = error, words

    def __enter__(self):
        self.raised = pytest.raises(self.error)
        self.info = self.raised.__enter__()

    def __exit__(self, *exception):
        suppress = self.raised.__exit__(*exception)
        message = str(self.info.value)
        assert "\n" not in message and 20 < len(message) < 250, message
        assert message.endswith("."), message
        for word in self.words:
            assert word in message, message
        return suppress


# ---------------------------------------------------------------------------------------------------------------
# The object


def test_sites_are_named_by_block():
    blocks = [Z, Z + 0.5, Z + 1.0]
    assert npgp.SparseGP("f", kernel(), Z).sites == ("f.u",)
    assert npgp.SparseGP("f", kernel(), blocks[:2]).sites == ("f.u", "f.v")
    assert npgp.SparseGP("f", kernel(), blocks).sites == ("f.u1", "f.u2", "f.u3")
    assert npgp.SparseGP("f", kernel(), blocks, "diagonal").covariances == ("diagonal",) * 3


def test_draw_makes_the_sites_and_no_others():
    trace = run(lambda: sparse_gp("odvgp").draw())
    assert list(trace) == ["f.u", "f.v"]
    assert [trace[name]["value"].shape for name in trace] == [(3,), (2,)]
    assert all(np.asarray(site["fn"].log_prob(site["value"])).shape == () for site in trace.values())


def test_three_blocks_have_the_dense_elbo(float64):
    """Nobody else offers more than two, so that they are tested here: the same q as one block of all features."""
    rng = np.random.default_rng(0)
    parts = [Z, models.O, np.array([[0.1]])]
    params, factors = {}, []
    for i, part in enumerate(parts):
        params[f"f.u{i + 1}.loc"] = jnp.asarray(rng.normal(size=len(part)))
        factors.append(np.tril(0.2 * rng.normal(size=(len(part), len(part))), -1) + 0.5 * np.eye(len(part)))
        params[f"f.u{i + 1}.scale_tril"] = jnp.asarray(factors[-1])

    def model(blocks):
        def run(X, y):
            f = npgp.SparseGP("f", kernel(), blocks, jitter=1e-12).draw()
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

        return run

    fused = np.zeros((6, 6))
    start = 0
    for factor in factors:
        fused[start : (start := start + len(factor)), start - len(factor) : start] = factor
    one = {
        "f.u.loc": jnp.concatenate([params[f"f.u{i}.loc"] for i in (1, 2, 3)]),
        "f.u.scale_tril": jnp.asarray(fused),
    }
    separate = elbo_value(model([jnp.asarray(part) for part in parts]), params, X, Y)
    together = elbo_value(model(jnp.concatenate(parts)), one, X, Y)
    np.testing.assert_allclose(separate, together, rtol=1e-7)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (("f", "rbf", Z), TypeError, ["kernel", "rbf", "npgp.kernels"]),
        (("f", npgp.RBF, Z), TypeError, ["kernel"]),
        (("", npgp.RBF(), Z), TypeError, ["name"]),
        ((3, npgp.RBF(), Z), TypeError, ["name"]),
        (("f", npgp.RBF(), []), ValueError, ["inducing", "empty"]),
        (("f", npgp.RBF(), Z[:, 0]), ValueError, ["inducing", "(3,)", "[:, None]"]),
        (("f", npgp.RBF(), Z[:0]), ValueError, ["inducing", "at least one"]),
        (("f", npgp.RBF(), np.where(Z > 1, np.nan, Z)), ValueError, ["inducing", "NaN"]),
        (("f", npgp.RBF(), np.arange(3)[:, None]), TypeError, ["inducing", "int"]),
        (("f", npgp.RBF(), [Z, Z[:, 0]]), ValueError, ["inducing[1]"]),
        (("f", npgp.RBF(), [Z], ["full"]), ValueError, ["covariances", "'full'", "'dense'"]),
        (("f", npgp.RBF(), [Z, Z], ["dense"]), ValueError, ["covariances", "2 blocks"]),
        (("f", npgp.RBF(), [Z, Z], ["mean-only", "dense"]), ValueError, ["mean-only", "last"]),
        (("f", npgp.RBF(), Z, "dense", 0.0), ValueError, ["init_scale", "positive"]),
    ],
)
def test_component_refuses(arguments, error, words):
    with OneSentence(error, *words):
        npgp.SparseGP(*arguments)


@pytest.mark.parametrize("name", ["lengthscale", "variance"])
@pytest.mark.parametrize("value", [-1.0, 0.0, np.nan])
def test_constant_hyperparameters_must_be_positive(name, value):
    with OneSentence(ValueError, name, "positive"):
        npgp.RBF(**{name: value})


def test_posterior_needs_the_parameters():
    with pytest.raises(KeyError, match=r"f\.v\.loc"):
        sparse_gp("odvgp").posterior({"f.u.loc": jnp.zeros(3), "f.u.scale_tril": jnp.eye(3)})


def test_a_draw_has_a_posterior_only_under_a_guide():
    with OneSentence(ValueError, "f", "without a guide"):
        a_draw().posterior()


# ---------------------------------------------------------------------------------------------------------------
# Where a draw may stand


def drawing():
    sparse_gp().draw()


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(
    "make_context, words",
    [
        (lambda: numpyro.plate("data", 8), ["'data'", "dim=-1", "outside"]),
        (lambda: numpyro.plate("outputs", 8, subsample_size=4, dim=-2), ["subsampled plate", "outside"]),
        (lambda: npgp.plate("outputs", 8, rows=4, dim=-2), ["subsampled plate", "outside"]),
        (lambda: handlers.scale(scale=2.0), ["handlers.scale", "outside"]),
        (lambda: handlers.mask(mask=jnp.array([True, False])), ["handlers.mask", "outside"]),
    ],
)
def test_draw_refuses_contexts_that_change_the_prior(make_context, words, guided):
    def model():
        with make_context():
            sparse_gp().guide() if guided else drawing()

    with OneSentence(ValueError, "f.u", *words):
        run(model)


@pytest.mark.parametrize(
    "make_context",
    [
        lambda: numpyro.plate("outputs", 8, dim=-2),
        lambda: handlers.scale(scale=1.0),
        lambda: handlers.mask(mask=False),  # Predictive runs models so
        lambda: handlers.mask(mask=True),
        lambda: handlers.scope(prefix="a"),
    ],
)
def test_draw_accepts_contexts_that_leave_the_prior_alone(make_context):
    def model():
        with make_context():
            drawing()

    assert len([site for site in run(model).values() if site["type"] == "sample"]) == 1


def test_what_wants_an_array_says_so():
    with handlers.seed(rng_seed=0):
        gp = sparse_gp()
        f = gp.draw()
    for operation in (lambda v: v[0], lambda v: v**2, lambda v: v @ Y, lambda v: 1.0 / v, np.asarray):
        with pytest.raises(TypeError, match=r"npgp\.sample the values first"):
            operation(f(X))
    with pytest.raises(TypeError, match=r"gp\.draw\(\) first"):
        gp(X)


def test_a_draw_needs_a_random_key():
    with pytest.raises(ValueError, match="drawn without a random key"):
        sparse_gp().draw()


def test_a_name_can_be_used_once():
    def model():
        drawing()
        drawing()

    with pytest.raises(ValueError, match=r"f\.u is drawn twice in one model"):
        run(model)


def test_model_and_guide_must_have_the_same_inducing_shapes():
    def model(inducing):
        def run(X, y):
            f = npgp.SparseGP("f", kernel(), inducing).draw()
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

        return run

    guide = npgp.AutoSparseGP(model(jnp.asarray(Z[:2])))
    svi = SVI(model(jnp.asarray(Z)), guide, numpyro.optim.Adam(0.1), TraceMeanField_ELBO())
    with OneSentence(ValueError, "f.u", "(2,)", "3 features"):
        jax.eval_shape(svi.init, jax.random.key(0), X, Y)


# ---------------------------------------------------------------------------------------------------------------
# Latents


def test_latents_are_linear(float64):
    """Mean, variance from ε, and residual variance of a combination, against the two GPs' own."""
    a, b, offset = np.linspace(-1.0, 2.0, 8), 0.3, np.cos(X[:, 0])
    params = random_params("odvgp", 0, "f") | random_params("svgp", 1, "g")
    f, g = Dense("odvgp", X, params), Dense("svgp", X + 0.4, params, "g")

    def moments(combine):
        def model(X):
            f = sparse_gp("odvgp", jitter=1e-12).draw()
            g = sparse_gp(name="g", jitter=1e-12).draw()
            numpyro.deterministic("moments", tuple(combine(f(X), g(X + 0.4)).moments()))

        _, trace = models.traces(model, npgp.AutoSparseGP(model), params, jnp.asarray(X))
        return trace["moments"]["value"]

    combinations = {
        "sum": (lambda f, g: jnp.asarray(a) * f + g * b + jnp.asarray(offset), a, b, offset),
        "numpy": (lambda f, g: offset + a * f + b * g, a, b, offset),
        "difference": (lambda f, g: f - g / 2.0, 1.0, -0.5, 0.0),
        "reversed": (lambda f, g: offset - (f - g), -1.0, 1.0, offset),
        "numpy number": (lambda f, g: np.float64(2.0) * f + np.float64(0.5) + g, 2.0, 1.0, 0.5),
        "factored": (lambda f, g: -2.0 * (f + g - offset), -2.0, -2.0, 2.0 * offset),
    }
    results = compiled(lambda: {name: moments(combine) for name, (combine, *_) in combinations.items()})()
    for name, (_, a, b, offset) in combinations.items():
        expected = (
            a * f.mean + b * g.mean + offset,
            a**2 * f.explained + b**2 * g.explained,
            a**2 * f.residual + b**2 * g.residual,
        )
        for got, want in zip(results[name], expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-8, err_msg=name)


def test_sample_of_a_combination_has_its_covariance(float64):
    a = np.linspace(-1.0, 2.0, 8)

    def model(X):
        f, g = sparse_gp("odvgp", jitter=1e-12).draw(), sparse_gp(name="g", jitter=1e-12).draw()
        for name, joint in (("joint", True), ("rows", False)):
            npgp.sample(name, jnp.asarray(a) * f(X) - 0.5 * g(X + 0.4) + 3.0, joint=joint)

    def draw(values):
        trace = handlers.trace(handlers.substitute(model, values)).get_trace(jnp.asarray(X))
        return {name: trace[name]["value"] for name in ("joint", "rows")}

    sizes = {"f.u": 3, "f.v": 2, "g.u": 3, "rows.residual": 8} | {f"joint.residual.{name}": 8 for name in "fg"}
    mean, jacobian = affine(draw, sizes)
    f, g = Dense("odvgp", X), Dense("svgp", X + 0.4)
    scale = np.outer(a, a)
    residual = scale * f.D + 0.25 * g.D
    expected = {
        "joint": scale * f.K + 0.25 * g.K,
        "rows": scale * f.Q + 0.25 * g.Q + np.diag(np.diag(residual)),
    }
    for name, cov in expected.items():
        np.testing.assert_array_equal(mean[name], 3.0)
        np.testing.assert_allclose(sum(j @ j.T for j in jacobian[name].values()), cov, atol=2e-7)


def test_sample_of_a_function_shared_by_outputs_is_one_function(float64):
    """Coregionalization: outputs that are multiples of one g differ by the multiple only. Refusing is right too."""
    weights = np.array([[1.0], [-2.0]])

    def model(X):
        npgp.sample("f", jnp.asarray(weights) * sparse_gp(name="g", jitter=1e-12).draw()(X))

    def draw(values):
        return handlers.trace(handlers.substitute(model, values)).get_trace(jnp.asarray(X))["f"]["value"]

    try:
        shape = jax.eval_shape(lambda: run(model, jnp.asarray(X))["f.residual"]["value"]).shape
    except ValueError as error:
        assert re.search(r"g .*several outputs.*npgp\.sample", str(error))
        return
    _, jacobian = affine(draw, {"g.u": 3, "f.residual": shape})
    flat = np.concatenate([j.reshape(16, -1) for j in jacobian.values()], axis=1)
    expected = np.kron(weights @ weights.T, models.rbf(X, X))
    np.testing.assert_allclose(flat @ flat.T, expected, atol=2e-7)


def test_observing_a_sum_is_observing_the_gp_with_the_sum_kernel(float64):
    """Without guide, the density of y given both ε has the residual variances added."""

    def model(X, y):
        f, g = sparse_gp(jitter=1e-12).draw(), sparse_gp(name="g", jitter=1e-12).draw()
        npgp.observe("y", 2.0 * f(X) + g(-X) + 1.0, npgp.Gaussian(variance=NOISE), obs=y)

    rng = np.random.default_rng(0)
    eps = {"f.u": rng.normal(size=3), "g.u": rng.normal(size=3)}
    f, g = Dense("svgp", X), Dense("svgp", -X)
    mean = 2.0 * eps["f.u"] @ f.A + eps["g.u"] @ g.A + 1.0
    rows = log_normal(Y, mean, 4.0 * np.diag(f.D) + np.diag(g.D) + NOISE)
    expected = rows.sum() + sum(log_normal(e, 0.0, 1.0).sum() for e in eps.values())
    value = compiled(lambda e: log_density(model, (jnp.asarray(X), Y), {}, e)[0])(eps)
    np.testing.assert_allclose(value, expected, rtol=1e-8)


def f_of_two():
    with handlers.seed(rng_seed=0), numpyro.plate("functions", 2, dim=-2):
        return sparse_gp().draw()


def test_other_operations_ask_for_sample():
    f, g = a_draw()(X), a_draw("g")(X)
    with OneSentence(TypeError, "product", "npgp.sample"):
        f * g
    # The words are those of npgp and of JAX, whichever sees that these are no arrays.
    for operation in (jnp.exp, np.exp, jnp.stack, jax.nn.softplus, lambda f: f**2, lambda f: f @ jnp.ones(8)):
        with pytest.raises(TypeError, match=r"npgp\.sample the values first, .* or let the likelihood transform them"):
            operation([f, f] if operation is jnp.stack else f)
    with pytest.raises(TypeError):
        float(f)
    ones = np.ones(8)
    for left in (ones, jnp.asarray(ones)):
        for value in (left + f, left - f, left * f):
            assert value.shape == (8,)
    assert (np.ones((3, 2)) @ f_of_two()(X)).shape == (3, 8)
    assert "npgp.sample" in repr(f)


def test_values_at_different_rows_do_not_add():
    f, g = a_draw(), a_draw("g")
    with OneSentence(ValueError, "different rows", "f: (8,)", "g: (5,)"):
        f(X) + g(X[:5])
    with OneSentence(ValueError, "different rows", "offset (5,)"):
        f(X) + jnp.ones(5)


@pytest.mark.parametrize("use", ["observe", "sample"])
def test_one_draw_does_not_occur_twice_in_a_sum_with_factors_of_outputs(use):
    f = a_draw()
    latent = f(X) + jnp.ones((2, 1)) * f(X + 1.0)  # with the same factors for all it is one functional
    y = np.stack([Y, Y])
    with handlers.seed(rng_seed=0), OneSentence(ValueError, "draw of f occurs twice", "npgp.sample"):
        npgp.observe("y", latent, npgp.Gaussian(variance=0.1), obs=y) if use == "observe" else npgp.sample("v", latent)


@pytest.mark.parametrize(
    "inputs, error, words",
    [
        (np.arange(8)[:, None], TypeError, ["X", "int64", "astype(float)"]),
        (X[:, 0], ValueError, ["X", "(8,)", "X[:, None]"]),
        (X[None], ValueError, ["X", "(1, 8, 1)"]),
        (X[:0], ValueError, ["(0, 1)", "at least one row"]),
        (np.where(X > 1, np.nan, X), ValueError, ["X", "NaN"]),
        (np.where(X > 1, np.inf, X), ValueError, ["X", "infinite"]),
        ([["a"]], TypeError, ["X"]),
    ],
)
def test_inputs_are_checked(inputs, error, words):
    with OneSentence(error, *words):
        a_draw()(inputs)


def test_inputs_must_have_the_columns_of_the_inducing_inputs():
    with OneSentence(ValueError, "columns", "1 and 2"):
        run(regression(), np.ones((8, 2)), Y)


# ---------------------------------------------------------------------------------------------------------------
# Statements


@pytest.mark.parametrize(
    "obs, mask, words",
    [
        (Y[:, None], None, ["y", "(8, 1)", "(8,)"]),
        (Y[:5], None, ["y", "(5,)", "(8,)"]),
        (1.0, None, ["y", "()", "(8,)"]),
        (np.where(Y > 0, np.nan, Y), None, ["y", "NaN", "mask"]),
        (np.where(Y > 0, np.nan, Y), Y > -0.3, ["y", "NaN"]),  # the mask lets a NaN through
        (Y, np.ones(5, bool), ["mask", "(5,)", "(8,)"]),
    ],
)
def test_observations_are_checked(obs, mask, words):
    latent = a_draw()(X)
    with handlers.seed(rng_seed=0), OneSentence(ValueError, *words):
        npgp.observe("y", latent, npgp.Gaussian(variance=0.1), obs=obs, mask=mask)


@pytest.mark.parametrize(
    "obs, mask, error, words",
    [
        (Y + 1j, None, TypeError, ["y: obs", "complex128", "real numbers"]),
        (Y, (Y > 0).astype(float), TypeError, ["y: mask", "float64", "boolean", '"nan"']),
        (Y, [1] * 8, TypeError, ["y: mask", "int64", "boolean"]),
        (np.ma.masked_greater(Y, 0), None, ValueError, ["y: obs", "masked", "np.ma.getmaskarray"]),
        (["a"] * 8, None, TypeError, ["y: obs", "real numbers"]),
    ],
)
def test_observations_are_real_numbers_and_masks_boolean(obs, mask, error, words):
    latent = a_draw()(X)
    with handlers.seed(rng_seed=0), OneSentence(error, *words):
        npgp.observe("y", latent, npgp.Gaussian(variance=0.1), obs=obs, mask=mask)


def test_lists_are_arrays():
    latent = a_draw()(X.tolist())
    with handlers.seed(rng_seed=0):
        y = npgp.observe("y", latent, npgp.Gaussian(variance=0.1), obs=Y.tolist(), mask=(Y > 0).tolist())
    np.testing.assert_array_equal(y, Y.astype(np.float32))


def test_observations_must_lie_in_the_support():
    latent = a_draw()(X)
    with handlers.seed(rng_seed=0), OneSentence(ValueError, "Bernoulli", "0 or 1"):
        npgp.observe("y", latent, npgp.Bernoulli(), obs=Y)
    # A masked entry may be anything.
    npgp.observe("y", latent, npgp.Bernoulli(), obs=np.where(Y > 0, 1.0, -7.0), mask=Y > 0)


def test_conditionals_are_checked():
    latent = a_draw()(X)
    with handlers.seed(rng_seed=0):
        with OneSentence(ValueError, "'tigth'", "'tight'", "'prior'"):
            npgp.observe("y", latent, npgp.Gaussian(variance=0.1), obs=Y, conditional="tigth")
        with OneSentence(ValueError, "Tight()", "'prior' and 'shared'"):
            npgp.sample("v", latent, conditional="tight")


def test_statements_take_latents_and_likelihoods():
    f = a_draw()
    with handlers.seed(rng_seed=0):
        with OneSentence(TypeError, "observe", "f(X)"):
            npgp.observe("y", jnp.ones(8), npgp.Gaussian(variance=0.1), obs=Y)
        with OneSentence(TypeError, "sample", "Function", "f(X)"):
            npgp.sample("v", f)
        with pytest.raises(TypeError, match="Likelihood"):
            npgp.observe("y", f(X), 0.1, obs=Y)
        with pytest.raises(TypeError, match="Likelihood"):
            npgp.observe("y", f(X), dist.Normal(0.0, 1.0), obs=Y)


def test_likelihood_may_be_a_function(float64):
    values = [
        elbo_value(regression("svgp", "prior", likelihood), random_params(), X, Y)
        for likelihood in (npgp.Gaussian(variance=NOISE), lambda f: dist.Normal(f, NOISE**0.5))
    ]
    np.testing.assert_allclose(*values, rtol=1e-8)


def test_plate_checks_the_batch():
    for rows in (jnp.arange(0), jnp.arange(9), 0, 9):
        with pytest.raises(ValueError, match="between 1 and 8"):
            npgp.plate("data", 8, rows=rows)


def test_plate_gives_the_rows_and_scales():
    def model(rows):
        with npgp.plate("data", 8, rows=rows) as index:
            numpyro.deterministic("index", index)
            numpyro.sample("y", dist.Normal(0.0, 1.0), obs=jnp.zeros(len(index)))

    for rows, expected, scale in ((jnp.array([5, 2]), [5, 2], 4.0), (4, range(4), 2.0), (None, range(8), None)):
        trace = run(model, rows)
        np.testing.assert_array_equal(trace["index"]["value"], list(expected))
        assert trace["y"]["scale"] == scale


def test_numpyros_own_validation_passes(float64):
    params = random_params("odvgp")
    with numpyro.validation_enabled():
        value = elbo_value(regression("odvgp"), params, X, Y)
    np.testing.assert_allclose(value, Dense("odvgp", X, params).elbo(Y), rtol=1e-8)


# ---------------------------------------------------------------------------------------------------------------
# Numerics


@pytest.mark.parametrize("statement, x64", [("observe", False), ("sample", True)], indirect=["x64"])
def test_results_and_gradients_have_the_inputs_dtype(statement, x64):
    """pytest turns JAX's warning of a truncated float64 into an error."""

    def model(X, y):
        lengthscale = numpyro.param("lengthscale", 0.7, constraint=dist.constraints.positive)
        f = sparse_gp("odvgp", k=npgp.RBF(lengthscale, variance=models.VARIANCE)).draw()
        with numpyro.plate("data", X.shape[0]):
            if statement == "observe":
                npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)
            else:
                value = npgp.sample("f", f(X), joint=False)
                numpyro.sample("y", dist.Normal(value, NOISE**0.5), obs=y)

    params = jax.tree.map(lambda v: jnp.asarray(v, x64), random_params("odvgp") | {"lengthscale": 0.7})
    elbo = make_elbo(model)
    function = compiled(jax.value_and_grad(elbo, argnums=1))
    value, gradient = function(jax.random.key(0), params, jnp.asarray(X, x64), jnp.asarray(Y, x64))
    assert value.dtype == x64
    for name, leaf in gradient.items():
        assert leaf.dtype == x64 and np.all(np.isfinite(leaf)) and np.any(leaf != 0), name


def test_more_inducing_points_than_rows(float64):
    few_X, few_Y = X[:2], Y[:2]
    bound = npgp.CollapsedGP(kernel(), few_X, Z, noise_variance=NOISE)
    q = compiled(lambda: bound.condition(few_Y))().q[0]
    params = {"f.u.loc": q.loc, "f.u.scale_tril": q.scale_tril}

    def model(X, y):
        npgp.observe("y", sparse_gp().draw()(X), npgp.Gaussian(variance=NOISE), obs=y)

    np.testing.assert_allclose(elbo_value(model, params, few_X, few_Y), compiled(bound.log_prob)(few_Y), rtol=1e-9)


def test_duplicate_inducing_points_change_nothing_but_the_jitter(x64):
    inducing = jnp.asarray(np.concatenate([Z, Z[:1], Z[:1]]), x64)

    x, y = jnp.asarray(X, x64), jnp.asarray(Y, x64)

    def model(inducing):
        def run(X, y):
            f = npgp.SparseGP("f", kernel(), inducing).draw()
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

        return run

    @compiled
    def run(inducing):
        def bound(inducing):
            return npgp.CollapsedGP(kernel(), x, inducing, noise_variance=NOISE).log_prob(y)

        def elbo(params):
            return make_elbo(model(inducing))(jax.random.key(0), params, x, y)

        posterior = npgp.CollapsedGP(kernel(), x, inducing, noise_variance=NOISE).condition(y)
        params = models.params_of(posterior)
        made = model(inducing)
        jitter = npgp.posterior("f", made, npgp.AutoSparseGP(made), params, x, y).jitter[0]
        return jax.value_and_grad(bound)(inducing), jax.value_and_grad(elbo)(params), jitter

    (plain, _), _, plain_jitter = run(jnp.asarray(Z, x64))
    (bound, gradient), (elbo, elbo_gradient), jitter = run(inducing)
    single = x64 == jnp.float32
    np.testing.assert_allclose(bound, plain, rtol=1e-3 if single else 1e-6)
    np.testing.assert_allclose(elbo, plain, rtol=1e-3 if single else 1e-6)
    assert all(np.all(np.isfinite(leaf)) for leaf in [gradient, *elbo_gradient.values()])
    assert 0 < float(plain_jitter) <= float(jitter) <= 1e-3  # reported, as relative to the variance
