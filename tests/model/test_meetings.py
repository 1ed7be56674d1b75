"""Components that meet in a statement and share no q(ε): what is said of them, and what is refused."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from models import NOISE, X, Y
from numpyro import handlers

import npgp

GAUSSIAN = npgp.Gaussian(variance=NOISE)


def said(model, **options):
    """What the guide warns of at its first call: the components, and the way out."""
    guide = npgp.AutoSparseGP(model, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guide._setup(jnp.asarray(X), jnp.asarray(Y))
    sentences = [str(warning.message).removeprefix("q(ε) takes for independent ") for warning in caught]
    return [tuple(sentence.split(": intervals may be far too narrow. To mend it, ")) for sentence in sentences]


def words(model, **options):
    found = said(model, **options)
    assert all("let npgp.observe state their sum" in way_out for _, way_out in found)
    assert said(model, joint=False) == []
    return [names for names, _ in found]


def component(name, kernel=None, **more):
    return npgp.SparseGP(name, npgp.RBF(1.0) if kernel is None else kernel, X[:3], **more)


def test_components_that_share_no_q():
    def chain(X, y, rows=None):
        f, g, h = (component(name).draw() for name in "fgh")
        with npgp.plate("data", len(X) if rows is None else 100, rows=len(X)):
            npgp.observe("y", f(X) + g(X), GAUSSIAN, obs=y)
            npgp.observe("y2", 2.0 * g(X) + h(X), GAUSSIAN, obs=y)

    meet = ["f and g, which meet in 'y'", "g and h, which meet in 'y2'"]
    assert words(chain) == [] and said(chain, dependence="independent") == []
    for dependence in ("coupled", "pseudo-data"):
        found = said(chain, dependence=dependence)
        assert [names for names, _ in found] == meet
        assert all(way_out.startswith("leave dependence at its default; to accept it") for _, way_out in found)
    # In minibatches they share one if rows are as many as features.
    assert words(functools.partial(chain, rows=100)) == []
    assert words(lambda X, y: chain(X[:4], y[:4], rows=100)) == meet
    with pytest.raises(TypeError, match="joint is 'yes'"):
        npgp.AutoSparseGP(chain, joint="yes")

    def dependent(X, y):
        scale = npgp.sample("scale", component("d").draw()(X))
        f, e = component("f").draw(), component("e", npgp.RBF(jnp.exp(scale[0]))).draw()
        npgp.observe("y", f(X) + e(X), GAUSSIAN, obs=y)

    assert words(dependent) == ["f and e, which meet in 'y'"]

    def latents(X, y):
        """Mean and log-scale, which the likelihood takes to be independent."""
        f, g, h = (component(n).draw() for n in "fgh")
        npgp.observe("y", (f(X) + g(X), h(X)), lambda m, s: dist.Normal(m, jnp.exp(s)), obs=y)
        npgp.observe("y2", g(X) + h(X), GAUSSIAN, obs=y)

    assert words(latents) == ["f and g, which meet in 'y'", "g and h, which meet in 'y2'"]
    assert words(handlers.condition(latents, data={"f.u": jnp.zeros(3), "h.u": jnp.zeros(3)})) == []  # known


def test_sampled_values_meet_a_component_in_its_offset():
    """Whatever is made of them; beside another statement of both, too."""

    def offset(X, y, rest=False):
        f, g = component("f").draw(), component("g").draw()
        value = npgp.sample("value", f(X))
        npgp.observe("y", g(X) + jnp.tanh(2.0 * value), GAUSSIAN, obs=y)
        if rest:
            npgp.observe("y2", g(X) - f(X), GAUSSIAN, obs=y)

    assert words(offset) == ["g and sampled values of f, which meet in 'y'"]
    expected = ["g and sampled values of f, which meet in 'y'", "g and f, which meet in 'y2'"]
    assert words(functools.partial(offset, rest=True)) == expected
    for known in ("f.u", "g.u"):
        assert words(handlers.condition(offset, data={known: jnp.zeros(3)})) == []


def test_sampled_values_of_several_components_meet_in_an_observation():
    """In one parameter of a ``numpyro.sample``: a sum, or what is made of it; not in different ones, nor in a chain."""

    def sampled(X, y, family=lambda f, g: dist.Normal(jnp.sin(f + g), 0.1), chain=None):
        f = npgp.sample("f_", component("f").draw()(X))
        other = component("g", npgp.RBF(jnp.exp(f[0])) if chain == "kernel" else None).draw()
        numpyro.sample("y", family(f, npgp.sample("g_", other(f[:, None] if chain == "rows" else X))), obs=y)

    assert words(sampled) == ["sampled values of f and sampled values of g, which meet in 'y'"]
    heteroscedastic = functools.partial(sampled, family=lambda f, g: dist.Normal(f, jnp.exp(g)))
    chains = [functools.partial(sampled, family=lambda f, g: dist.Normal(g, 0.1), chain=c) for c in ("rows", "kernel")]
    for model in (heteroscedastic, *chains, handlers.condition(sampled, data={"g.u": jnp.zeros(3)})):
        assert words(model) == []


@pytest.mark.parametrize("place", ["offset", "factor", "rows"])
def test_a_statement_beside_sampled_values_of_its_own_component_is_refused(place):
    """f(X) + value taken for a sum of independent ones has half its variance, and an ELBO above the evidence."""

    def model(X, y):
        f = component("f").draw()
        value = npgp.sample("value", f(X))
        latent = {"offset": f(X) + value, "factor": value * f(X), "rows": f(value[:, None])}[place]
        npgp.observe("y", latent, GAUSSIAN, obs=y)

    for options in ({}, {"dependence": "independent"}):
        with pytest.raises(ValueError, match="y observes f beside values that npgp.sample has sampled of it"):
            said(model, **options)


def test_the_guide_says_why_a_component_is_not_given_rows():
    """One sentence for each component whose q(ε) is its own."""

    def model(X, y, case=None, rows=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        if case == "discrete":
            level += numpyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        values = npgp.sample("values", component("d").draw()(X)) if case in ("kernel", "numbers", "sampled") else None
        f = component("f", npgp.RBF(jnp.exp(values[0])) if case == "kernel" else None).draw()
        factor = values if case == "numbers" else 1.0
        with npgp.plate("data", len(X) if rows is None else 100, rows=len(X)):
            if case == "local":
                level += numpyro.sample("local", dist.Normal(0.0, 1.0))
            npgp.observe("y", factor * f(X) + level, GAUSSIAN, obs=y)

    def why(name, X=X, y=Y, traced=False, **options):
        guide = npgp.AutoSparseGP(functools.partial(model, **options))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            jax.eval_shape(lambda *traced: guide._setup(*(traced or (X, y))) and None, *([X, y] if traced else []))
        (line,) = [line for line in str(guide).splitlines() if line.strip().startswith(f"{name}:")]
        return line.split(": ")[1].removeprefix("a q(ε) of its own, because ")

    assert why("f").startswith("one q(ε), the posterior given the rows")
    assert why("f", case="discrete") == "the model has discrete sites"
    assert why("f", case="kernel") == "its kernel or its inducing features depend on a GP"
    assert why("f", case="numbers") == "numbers in y depend on a GP"
    assert why("d", case="sampled").startswith("its values are sampled, and the data alone do not")
    assert why("f", case="local", rows=True) == "local has a part of its entries in each step"
    assert why("f", rows=True, traced=True).endswith("is inside jit")
    assert why("f", X[:2], Y[:2], rows=True) == "there are fewer rows at once than inducing features"


def test_a_dear_step_is_said():
    """By operations with matrices: N K² + K³/3 with K = 25 × 100 values stacked, N M² + M³/3 with M = 100 of each."""
    inputs = jnp.linspace(0.0, 1.0, 1000)[:, None]

    def many(X, y, count=25):
        functions = [npgp.SparseGP(f"f{i}", npgp.RBF(1.0), inputs[::10]).draw() for i in range(count)]
        with numpyro.plate("data", 1000):
            npgp.observe("y", sum(f(inputs) for f in functions), GAUSSIAN, obs=jnp.zeros(1000))

    N, K, M = 1000, 2500, 100
    ((sentence,),) = said(many)
    times = (N * K**2 + K**3 / 3) / (25 * (N * M**2 + M**3 / 3))
    assert sentence.startswith(f"a step takes about {times:.0f} times as long as with a q(ε) for each of f0, f1, ")
    assert "has 2500 inducing values together" in sentence and "joint=False" in sentence
    assert said(functools.partial(many, count=4)) == []
