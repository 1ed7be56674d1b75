"""What is easily written wrong about GPs in models, and the sentence that it gets."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import NOISE, X_NEW, Dense, X, Y, random_params, sparse_gp
from numpyro import handlers
from numpyro.contrib.einstein import RBFKernel, SteinVI
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import npgp
from npgp.model.sites import trained

KEY = jax.random.key(0)
INPUTS = jnp.asarray(X.copy())


def model(X, y=None):
    f = sparse_gp().draw()
    with numpyro.plate("rows", len(X)):
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)


def drawn(name="f"):
    with handlers.seed(rng_seed=0):
        return sparse_gp(name=name).draw()


# ---------------------------------------------------------------------------------------------------------------
# GP values are no arrays

OPERATIONS = {
    "float": float,
    "int": int,
    "len": len,
    "bool": bool,
    "abs": abs,
    "iter": list,
    "comparison": lambda v: v > 0,
    "equality": lambda v: v == 0.0,
    "equality with an array": lambda v: v == jnp.zeros(8),
    "power": lambda v: v**2,
    "power of a number": lambda v: 2.0**v,
    "remainder": lambda v: v % 2,
    "index": lambda v: v[0],
    "jnp.exp": jnp.exp,
    "np.exp": np.exp,
    "np.asarray": np.asarray,
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("what", ["f", "f(X)"])
def test_gp_values_are_no_arrays(what, operation):
    f = drawn()
    value = f if what == "f" else f(INPUTS)
    with pytest.raises(TypeError, match=r"npgp\.sample the values first"):
        operation(value)
    assert value == value and value != drawn() and value != "f" and hash(value)  # as objects are


@pytest.mark.parametrize(
    "operation", [lambda f: f + 1.0, lambda f: 2.0 * f, lambda f: -f, lambda f: f - f], ids=range(4)
)
def test_functions_are_evaluated_first(operation):
    with pytest.raises(TypeError, match=r"draw of SparseGP 'f'.* wants an array"):
        operation(drawn())
    with pytest.raises(TypeError, match=r"draw of SparseGP 'f'.* wants an array"):
        drawn("g")(INPUTS) + drawn()


@pytest.mark.parametrize("other", ["1", [[1.0, 2.0], [3.0]], 1j], ids=str)
def test_what_is_combined_with_gp_values_is_numbers(other):
    for operation in (lambda v: v + other, lambda v: v * other, lambda v: v / other):
        with pytest.raises(TypeError, match="what is combined with the GP values of f .* must be an array"):
            operation(drawn()(INPUTS))


def test_deterministic_sites_are_arrays():
    def stated(X, y=None):
        f = sparse_gp().draw()
        numpyro.deterministic("fx", f(X))
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    with pytest.raises(TypeError, match=r"^numpyro\.deterministic 'fx' is <f at rows.*; it must be an array, as npgp"):
        handlers.seed(npgp.AutoSparseGP(stated), 0)(INPUTS, Y)


# ---------------------------------------------------------------------------------------------------------------
# Supports


class Bounded(dist.Distribution):
    arg_constraints = {}
    support = dist.constraints.open_interval(0.0, 2.0)

    def __init__(self, loc):
        self.loc = loc
        super().__init__(jnp.shape(loc), ())

    def sample(self, key, sample_shape=()):
        return jnp.ones(sample_shape + self.batch_shape)

    def log_prob(self, value):
        return -0.5 * (value - self.loc) ** 2


class WithoutSupport(Bounded):
    support = None


@pytest.mark.filterwarnings("ignore:The log-probabilities of .*TruncatedDistribution are infinite")
def test_observations_are_in_the_support_whatever_f_is():
    """With bounds that follow f, E[log p(y | f)] would be −∞ for every Gaussian q(f), and its gradients NaN."""

    def outside(make, y):
        """Which y are outside, in a program, where bounds are traced."""
        likelihood = npgp.likelihoods.as_likelihood(make)
        jax.eval_shape(lambda: likelihood.check(y))
        return np.asarray(jax.jit(lambda y: npgp.likelihoods.base.impossible(likelihood, y)[0])(y)).tolist()

    y = np.array([0.5, 1.5])
    for make in (
        lambda f: dist.Uniform(jnp.zeros_like(f), 2.0),
        lambda f: dist.Uniform(-3.0, 2.0 + jnp.exp(f)),
        lambda f: dist.TruncatedNormal(f, 1.0, low=0.0, high=2.0),
        Bounded,
    ):
        npgp.likelihoods.as_likelihood(make).check(y)
        assert outside(make, y) == [False, False]
    for make, word in (
        (lambda f: dist.Uniform(f - 1.0, f + 2.0), "Uniform"),
        (lambda f: dist.Pareto(jnp.exp(f), 1.0), "Pareto"),
    ):
        with pytest.raises(ValueError, match=f"in the support of {word} for every f, so that bounds must not depend"):
            npgp.likelihoods.as_likelihood(make).check(y)
        assert outside(make, y) == [True, True]
    sentence = r"in the support of Bounded, OpenInterval\(lower_bound=0.0, upper_bound=2.0\)"
    with pytest.raises(ValueError, match=sentence):
        npgp.likelihoods.as_likelihood(Bounded).check(y + 1.0)


def test_distributions_have_a_support():
    def latent(X, y=None):
        npgp.observe(
            "y", sparse_gp().draw()(X) + numpyro.sample("l", WithoutSupport(1.0)), npgp.Gaussian(variance=NOISE), obs=y
        )

    sentence = r"WithoutSupport whose support is None; it must be a constraint, such as numpyro\.distributions\.constr"
    with pytest.raises(TypeError, match=f"l is drawn from a {sentence}"):
        handlers.seed(npgp.AutoSparseGP(latent), 0)(INPUTS, Y)
    with pytest.raises(TypeError, match=f"Factorized fn returned a {sentence}"):
        npgp.likelihoods.as_likelihood(WithoutSupport).check(Y)


class Positive(dist.constraints.Constraint):
    """A constraint that NumPyro does not know."""

    def __call__(self, x):
        return x > 0

    def tree_flatten(self):
        return (), ((), {})


class OfItsOwnSupport(dist.Exponential):
    support = Positive()


def test_supports_have_a_map_from_the_real_numbers_where_one_is_needed():
    """NumPyro's error has no words. A guide by hand may do without, and so may an observation."""

    def latent(X, y=None):
        scale = numpyro.sample("scale", OfItsOwnSupport(1.0))
        likelihood = lambda f: OfItsOwnSupport(jnp.exp(f) + 0.1)  # noqa: E731
        npgp.observe("y", sparse_gp().draw()(X) * scale, likelihood, obs=jnp.ones(len(X)))

    def same(X, y=None):
        numpyro.sample("scale", OfItsOwnSupport(1.0))

    def known(X, y=None):
        numpyro.sample("scale", dist.LogNormal(0.0, 1.0))

    sentence = "scale is drawn from a OfItsOwnSupport whose support is a Positive, .*no bijection.*register.Positive"
    for options in ({}, {"guide": AutoNormal, "dependence": "independent"}, {"guide": [same]}):
        with pytest.raises(ValueError, match=sentence):
            handlers.seed(npgp.AutoSparseGP(latent, **options), 0)(INPUTS, Y)
    svi = SVI(latent, npgp.AutoSparseGP(latent, [known]), npgp.adam(0.1), TraceMeanField_ELBO())
    assert np.isfinite(npgp.fit(svi, KEY, 1, INPUTS, Y, progress=False).losses[0])


# ---------------------------------------------------------------------------------------------------------------
# Layers


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            [{"mean": 0.0}, {}],
            r"layer 1 of deep has width=1, and the inducing inputs of layer 2 are for width=2: write",
        ),
        (
            [{"width": 2}, {}, {"Z": 4, "skip": True}],
            "layer 2 of deep has width=1, and the inducing inputs of layer 3 are for width=2",
        ),
        ([{"width": 3}, {"Z": 3}], r"layer 1 of deep has width=3, and 2 columns come in, .* width=2\), or mean=npgp"),
    ],
    ids=["next", "skip", "identity"],
)
def test_layers_are_as_wide_as_the_next_one_needs(options, sentence):
    def layer(Z=2, **more):
        return npgp.Layer(npgp.RBF(1.0), np.arange(3.0 * Z).reshape(3, Z), **more)

    with pytest.raises(ValueError, match=sentence):
        npgp.DeepGP("deep", [layer(**some) for some in options])
    npgp.DeepGP("deep", [layer(width=2), layer(Z=2, width=1, mean=0.0), layer(Z=3, skip=True)])


# ---------------------------------------------------------------------------------------------------------------
# Plates, names, keys


@pytest.mark.parametrize(
    ("rows", "error", "match"),
    [
        ([0, 7], ValueError, "rows has row 7; there are 5 rows: it must be between 0 and 4"),
        ([-1, 3], ValueError, "rows has row -1"),
        ([0.5, 1.0], TypeError, "rows has dtype float64; it must have whole numbers"),
        ([[0, 1]], ValueError, r"rows has shape \(1, 2\); it must have 1 dimension"),
        (0, ValueError, "rows is 0; it must be the rows of a batch, between 1 and 5"),
        (2.0, TypeError, "rows is 2.0; it must be a whole number"),
    ],
    ids=str,
)
def test_rows_of_a_plate_are_rows(rows, error, match):
    with pytest.raises(error, match=match):
        npgp.plate("d", 5, rows=np.asarray(rows) if isinstance(rows, list) else rows)


def test_rows_of_a_plate_may_be_traced():
    def total(rows):
        with npgp.plate("d", 5, rows=rows) as found:
            return jnp.sum(found)

    assert jax.jit(total)(jnp.array([1, 4])) == 5


def test_components_have_names_of_their_own():
    def twice():
        return sparse_gp().draw(), sparse_gp().draw()

    with pytest.raises(ValueError, match=r"f\.u is drawn twice in one model; .* a name of its own"):
        handlers.trace(handlers.seed(twice, 0)).get_trace()


def test_draws_need_a_key():
    with handlers.substitute(data={"f.u": jnp.zeros(3)}):
        f = sparse_gp().draw()
        with pytest.raises(TypeError, match=r"rng_key is None; it must be a random key, .*handlers\.seed"):
            npgp.observe("y", f(INPUTS), npgp.Gaussian(variance=NOISE))
    guide = npgp.AutoSparseGP(model)
    with pytest.raises(TypeError, match=r"rng_key is 0; it must be a random key, such as jax\.random\.key\(0\)"):
        guide.sample_posterior(0, random_params(), INPUTS)


# ---------------------------------------------------------------------------------------------------------------
# Guides and parameters


def test_parameters_are_a_dictionary_of_numbers():
    guide, params = npgp.AutoSparseGP(model), random_params()
    for wrong, error, match in [
        (None, TypeError, "params is None; it must be the dictionary"),
        (list(params.values()), TypeError, r"params is \[Array.*; it must be the dictionary"),
        ({k: v * np.nan for k, v in params.items()}, ValueError, "params has NaN or infinities in 'f.u.loc'"),
        ({k: v[:2] for k, v in params.items()}, ValueError, r"f\.u\.loc has shape \(2,\); it must be \(3,\)"),
        (params | {"f.u.scale_tril": jnp.eye(2)}, ValueError, r"f\.u\.scale_tril has shape \(2, 2\); .* \(3, 3\)"),
    ]:
        with pytest.raises(error, match=match):
            npgp.posterior("f", model, guide, wrong, INPUTS)
    with pytest.raises(TypeError, match="params is None"):
        sparse_gp().posterior(None)
    mean = npgp.posterior("f", model, guide, params, INPUTS).mean(jnp.asarray(X_NEW))
    np.testing.assert_allclose(mean, Dense("svgp", X_NEW).A.T @ params["f.u.loc"], rtol=1e-3, atol=1e-3)


def test_stein_vi_is_not_for_these_priors():
    stein = SteinVI(model, npgp.AutoSparseGP(model), npgp.adam(0.1), RBFKernel(), num_stein_particles=2)
    with pytest.raises(
        ValueError, match=r"f\.u is drawn under SteinVI, .* loss_temperature, .* use SVI\(model, guide, "
    ):
        stein.init(KEY, INPUTS, Y)


def test_a_guide_draws_what_the_model_draws():
    svi = SVI(model, lambda X, y: None, npgp.adam(0.1), TraceMeanField_ELBO())
    state = svi.init(KEY, INPUTS, Y)
    with pytest.raises(ValueError, match=r"f\.u is not drawn by the guide; it must draw .*guide\(\)"):
        svi.evaluate(state, INPUTS, Y)


def test_what_is_no_guide_is_said_in_one_line():
    with pytest.raises(TypeError, match=r"^guide has [^\n]*; it must be an autoguide class[^\n]*$"):
        npgp.AutoSparseGP(model, jnp.arange(100.0))


@pytest.mark.parametrize("how", ["svi", "predictive", "posterior"])
def test_a_hide_fn_may_look_at_names(how):
    """All messages have one, those by which hidden sites ask for random keys too."""

    def learned(X, y=None):
        l = numpyro.sample("l", dist.LogNormal(0.0, 0.3))
        f = npgp.SparseGP("f", npgp.RBF(l), INPUTS[:3]).draw()
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    program = handlers.block(learned, hide_fn=lambda message: message["name"] == "nothing")
    guide = npgp.AutoSparseGP(program)
    svi = SVI(program, guide, npgp.adam(0.1), TraceMeanField_ELBO())
    state = jax.jit(svi.init)(KEY, INPUTS, Y)
    if how == "svi":
        assert np.isfinite(jax.jit(svi.evaluate)(state, INPUTS, Y))
    elif how == "posterior":
        params = guide.with_rows(svi.get_params(state), INPUTS, Y)
        assert guide.sample_posterior(KEY, params, INPUTS)["f.u"].shape == (3,)
    else:
        assert Predictive(npgp.joint(program), num_samples=2)(KEY, INPUTS)["y"].shape == (2, 8)


def test_parameters_may_be_trees_of_a_network():
    tree = {"net$params": {"weights": np.ones(2), "activation": "relu", "key": jax.random.key(0)}, "a": 1.0}
    assert trained(tree) is tree
    for bad in ({"net$params": {"weights": np.array([1.0, np.nan])}}, {"a": float("inf")}):
        with pytest.raises(ValueError, match="params has NaN or infinities in"):
            trained(bad)
