"""
What npgp relies on in NumPyro and JAX, wrapped in ``contract.py`` and ``programs/tracing.py``: do they do it?

Needs nothing but NumPyro, JAX and pytest, so that any versions of them can be tried by themselves::

    python -m pytest --noconftest tests/ground/test_contract.py
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.contrib.einstein import RBFKernel, SteinVI
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import SVI, Predictive, RenyiELBO, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

KEY = jax.random.key(0)
VERSIONS = f"NumPyro {numpyro.__version__} and JAX {jax.__version__}"


@functools.cache
def alone(name):
    """A file by itself: the rest of npgp needs more than NumPyro and JAX."""
    path = Path(__file__).parents[2] / "npgp" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"npgp_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contract():
    """What is relied on in NumPyro."""
    return alone("contract")


def tracing():
    """What is relied on in JAX."""
    return alone("programs/tracing")


TESTED: set[str] = set()


def relies(sentence: str, *names: str):
    """
    Marks a test of something relied on.

    :param sentence: what that is.
    :param names: what wraps it, in ``npgp/contract.py`` or ``npgp/programs/tracing.py``.
    """
    TESTED.update(names)
    where = f"{', '.join(names)}, in npgp/contract.py or npgp/programs/tracing.py"

    def decorate(test):
        def run():
            try:
                test()
            except Exception as error:
                pytest.fail(
                    f"npgp relies on this, and {VERSIONS} do otherwise: {sentence} It is wrapped in {where}. "
                    f"({type(error).__name__}: {error})"
                )

        run.__name__, run.__doc__ = test.__name__, sentence
        return run

    return decorate


def traced(use):
    """Do something without computing anything, which is quick."""
    jax.eval_shape(lambda: (use(), None)[1])


def run(model, *args):
    """The messages of a model, by site; their values have shapes, but no numbers."""
    sites = {}
    traced(lambda: sites.update(handlers.trace(handlers.seed(model, KEY)).get_trace(*args)))
    return sites


# ---------------------------------------------------------------------------------------------------------------
# Statements and their handlers


@relies(
    "names that are not documented are where they were: the stack of handlers, its messages' way through it, the base "
    "class of optimizers.",
)
def test_the_file_can_be_imported():
    contract()


def handler(name, seen, **answers):
    """A handler that notes what it sees, and changes messages of samples."""

    class Noting(contract().Handler):
        def process_message(self, msg):
            if msg["type"] == "sample":
                seen.append((name, "before", msg, msg["value"]))
                msg.update(answers)

        def postprocess_message(self, msg):
            if msg["type"] == "sample":
                seen.append((name, "after", msg, msg["value"]))

    return Noting()


@relies(
    "handlers see each statement's message, one object throughout, the innermost first, before it has a value and "
    "after; they can give the value, and can add keys.",
    "Handler",
)
def test_handlers_see_messages():
    seen = []
    with handlers.seed(rng_seed=0), handler("outer", seen), handler("inner", seen, mine=object()):
        drawn = numpyro.sample("x", dist.Normal())
    assert [(name, when) for name, when, *_ in seen if when == "before"] == [("inner", "before"), ("outer", "before")]
    assert [when for _, when, *_ in seen] == ["before", "before", "after", "after"]
    assert len({id(message) for _, _, message, _ in seen}) == 1 and "mine" in seen[0][2]
    assert [value for *_, value in seen[:2]] == [None, None] and all(value is drawn for *_, value in seen[2:])
    with handler("answers", seen := [], value=jnp.asarray(7.0)):
        assert numpyro.sample("x", dist.Normal()) == 7.0


@relies(
    "the messages of statements, and a trace, have the entries that npgp reads: type, name, value; fn, is_observed, "
    "intermediates, scale, kwargs['rng_key'] and infer of a sample; kwargs['constraint'] of a param.",
    "Message",
)
def test_messages():
    things = {"anything": object()}

    def model():
        numpyro.param("p", 1.0, constraint=constraints.positive)
        numpyro.param("q", lambda key: jnp.ones(2))
        numpyro.sample("x", dist.Normal(), infer=things)
        numpyro.sample("y", dist.Normal(), obs=1.0)
        numpyro.deterministic("d", 2.0)
        with handlers.scale(scale=3.0):
            numpyro.sample("scaled", dist.Normal())

    sites = run(model)
    assert {name: site["type"] for name, site in sites.items()} == {
        "p": "param", "q": "param", "x": "sample", "y": "sample", "d": "deterministic", "scaled": "sample"
    }  # fmt: skip
    assert all(site["name"] == name and site["value"] is not None for name, site in sites.items())
    assert sites["p"]["kwargs"]["constraint"] is constraints.positive and "constraint" not in sites["q"]["kwargs"]
    x, y = sites["x"], sites["y"]
    assert x["infer"] is things and isinstance(x["fn"], dist.Normal) and x["kwargs"]["rng_key"] is not None
    assert not x["is_observed"] and y["is_observed"] and x["scale"] is None and sites["scaled"]["scale"] == 3.0
    assert x["intermediates"] == y["intermediates"] == []


@relies(
    "a message of an unknown type is left alone by the handlers around, but for block; trace does not keep it where it "
    "is not post-processed. scope changes its name.",
    "name_here",
)
def test_questions():
    def name():
        return contract().name_here("x")

    around = [
        handlers.seed(rng_seed=0),
        handlers.trace(),
        handlers.substitute(data={"x": 1.0}),
        handlers.condition(data={"y": 1.0}),
        handlers.replay(trace={}),
        handlers.mask(mask=False),
        handlers.scale(scale=2.0),
        handlers.uncondition(),
        handlers.infer_config(config_fn=lambda site: {}),
        handlers.block(expose_types=["npgp.name"]),
        handlers.block(hide=["y"]),
        handlers.block(expose=["x"]),
        handlers.block(hide_fn=lambda message: message["name"] == "y" or message["is_observed"]),
    ]
    assert name() == "x"
    for one in around:
        with handlers.scope(prefix="a"), one:
            assert name() == "a/x"
        with one:
            assert name() == "x"
    with handlers.seed(rng_seed=0), handlers.scope(prefix="a"), numpyro.plate("rows", 3), handlers.scope(prefix="b"):
        assert name() == "a/b/x"
    for hide in (handlers.block(), handlers.block(hide=["x"]), handlers.block(hide_fn=lambda m: m["name"] == "x")):
        with handlers.scope(prefix="a"), hide:
            assert name() == "x"
    with handlers.trace() as kept:
        name()
    assert not kept


@relies(
    "seed answers a message of type prng_key with a random key, as it does numpyro.prng_key, each time another one.",
    "random_key",
)
def test_random_keys_by_name():
    assert contract().random_key("x") is None
    with handlers.seed(rng_seed=0):
        keys = [numpyro.prng_key(), numpyro.prng_key()]
    with handlers.seed(rng_seed=0), handlers.block(hide_fn=lambda message: message["name"] == "y"):
        assert all(jnp.all(contract().random_key("x") == key) for key in keys)


@relies(
    "condition and substitute have their values in a dictionary data, by the name that scope has made of the site's, "
    "and the outermost wins.",
    "given_by",
)
def test_given_values():
    given, condition, substitute = contract().given_by, handlers.condition, handlers.substitute
    assert given(condition, "x") is None
    for kind, other in ((condition, substitute), (substitute, condition)):
        with kind(data={"x": 2.0}), kind(data={"x": 1.0, "y": 3.0}):
            assert given(kind, "x") == 2.0 and given(kind, "y") == 3.0 and given(other, "x") is None
            with handlers.seed(rng_seed=0):
                assert numpyro.sample("x", dist.Normal()) == 2.0
            with handlers.block():
                assert given(kind, "x") is None
        with kind(data={"a/x": 4.0}), handlers.scope(prefix="a"):
            assert given(kind, "x") == 4.0
    with condition(condition_fn=lambda site: 1.0), substitute(substitute_fn=lambda site: 1.0):
        assert given(condition, "x") is None and given(substitute, "x") is None


@relies(
    "losses run the model, also inside jit, in a method loss or loss_with_mutable_state of an ELBO.", "losses_around"
)
def test_losses_around():
    seen = []

    def model():
        seen.append(contract().losses_around())
        numpyro.sample("x", dist.Normal())

    def guide():
        numpyro.sample("x", dist.Normal(numpyro.param("loc", 0.5), 1.0))

    run(model)
    assert seen == [[]]
    for loss in (TraceMeanField_ELBO(), Trace_ELBO(2, vectorize_particles=False), TraceGraph_ELBO(), RenyiELBO()):
        svi = SVI(model, guide, numpyro.optim.SGD(0.1), loss)
        state = jax.eval_shape(svi.init, KEY)
        for use in (svi.update, jax.jit(functools.partial(svi.update)), svi.evaluate):
            seen.clear()
            jax.eval_shape(use, state)
            assert seen and all(set(found) == {loss} for found in seen), type(loss).__name__


@relies("SteinVI runs model and guide in its method init before all others.", "is_in_stein_vi")
def test_stein_vi():
    seen = []

    def model():
        seen.append(contract().is_in_stein_vi())
        numpyro.sample("x", dist.Normal())

    def guide():
        seen.append(contract().is_in_stein_vi())
        numpyro.sample("x", dist.Normal(numpyro.param("loc", 0.5), 1.0))

    optim = numpyro.optim.SGD(0.1)
    jax.eval_shape(SVI(model, guide, optim, Trace_ELBO()).init, KEY)
    assert seen == [False] * len(seen) != []
    seen.clear()
    SteinVI(model, guide, optim, RBFKernel(), num_stein_particles=2).init(KEY)
    assert seen == [True] * len(seen) != []


def pair(q, prefix=None):
    """A model, a guide whose site carries q, and what the model's site had at each run."""
    seen = []

    def model():
        with handlers.trace() as sites:
            numpyro.sample("x", dist.Normal())
        message = sites["x"]
        seen.append((message["infer"].get("mine"), message["value"], contract().replayed("x")))

    def guide():
        numpyro.sample("x", dist.Normal(numpyro.param("loc", 0.5), 1.0), infer={"mine": q})

    if prefix is not None:
        return handlers.scope(model, prefix=prefix), handlers.scope(guide, prefix=prefix), seen
    return model, guide, seen


@relies(
    "SVI runs the model under replay of the guide's trace, in init, update and evaluate and with each loss, and replay "
    "copies the infer dict of every unobserved site.",
    "replayed",
)
def test_svi_replays_the_guide():
    q = object()
    losses = [
        TraceMeanField_ELBO(),
        TraceMeanField_ELBO(num_particles=2),
        TraceMeanField_ELBO(num_particles=2, vectorize_particles=False),
        Trace_ELBO(),
        TraceGraph_ELBO(),
        RenyiELBO(num_particles=2),
    ]
    for loss in losses:
        model, guide, seen = pair(q)
        svi = SVI(model, guide, numpyro.optim.SGD(0.1), loss)
        state = jax.eval_shape(svi.init, KEY)
        runs = len(seen)
        jax.eval_shape(svi.update, state)
        assert 0 < runs < len(seen), type(loss).__name__
        jax.eval_shape(svi.evaluate, state)
        for arrived, _, site in seen:
            assert arrived is q and site is not None and site["infer"]["mine"] is q, type(loss).__name__


@relies(
    "replay is a handler with the trace as its attribute, finds sites by the name that scope has made of theirs, and "
    "leaves observed sites alone; other handlers do not change the name of an unknown message.",
    "replayed",
)
def test_what_is_replayed():
    q = object()
    model, guide, seen = pair(q)
    trace = run(guide)

    def at(handlers_around):
        for one in reversed(handlers_around):
            one.__enter__()
        try:
            return contract().replayed("x")
        finally:
            for one in handlers_around:
                one.__exit__(None, None, None)

    assert at([]) is None
    replay = handlers.replay(trace=trace)
    others = [handlers.seed(rng_seed=0), handlers.trace(), handlers.mask(mask=False), handlers.scale(scale=2.0)]
    for one in others:
        assert at([one, replay])["infer"]["mine"] is q and at([replay, one])["infer"]["mine"] is q
        assert at([one]) is None
    assert at([handlers.block(), replay]) is None
    assert at([handlers.scope(prefix="a"), replay]) == {}
    assert at([replay, handlers.scope(prefix="a")])["infer"]["mine"] is q
    scoped = run(handlers.scope(guide, prefix="a"))
    assert at([handlers.scope(prefix="a"), handlers.replay(trace=scoped)])["infer"]["mine"] is q
    run(handlers.replay(model, trace=trace))
    arrived, value, _ = seen[-1]
    assert arrived is q and value is trace["x"]["value"]
    run(handlers.replay(handlers.condition(model, {"x": 3.0}), trace=trace))
    arrived, value, _ = seen[-1]
    assert arrived is None and value == 3.0


@relies(
    "Predictive runs models under handlers.mask(mask=False), and a message of type inspect says so by mask.",
    "under_predictive",
)
def test_predictive_masks_everything():
    seen = []

    def model():
        seen.append(contract().under_predictive("x"))
        numpyro.sample("x", dist.Normal())

    def guide():
        numpyro.sample("x", dist.Normal(numpyro.param("loc", 0.5), 1.0))

    def of(use):
        seen.clear()
        traced(use)
        return set(seen)

    samples = {"x": jnp.zeros(2)}
    assert of(lambda: Predictive(model, num_samples=2)(KEY)) == {True}
    assert of(lambda: Predictive(model, samples)(KEY)) == {True}
    assert of(lambda: Predictive(model, samples, parallel=True)(KEY)) == {True}
    assert of(lambda: Predictive(model, guide=guide, params={"loc": 0.5}, num_samples=2)(KEY)) == {True}
    assert of(lambda: run(model)) == of(lambda: run(handlers.mask(model, mask=True))) == {False}
    svi = SVI(model, guide, numpyro.optim.SGD(0.1), Trace_ELBO())
    assert of(lambda: svi.update(svi.init(KEY))) == {False}


@relies("uncondition leaves a mark in the infer dict of the sites that it draws anew.", "was_observed")
def test_uncondition_leaves_a_mark():
    def model():
        numpyro.sample("x", dist.Normal())
        numpyro.sample("y", dist.Normal(), obs=5.0)

    for sites in (run(model), run(handlers.uncondition(model))):
        assert not contract().was_observed(sites["x"]) and contract().was_observed(sites["y"])
    assert not sites["y"]["is_observed"] and tracing().is_traced(sites["y"]["value"])


@relies("auxiliary sites of autoguides and of factor are marked in their infer dicts.", "is_auxiliary")
def test_auxiliary_sites():
    def model():
        numpyro.sample("x", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.factor("weight", 1.0)

    sites = run(AutoMultivariateNormal(model))
    auxiliary = {name for name, site in sites.items() if site["type"] == "sample" and contract().is_auxiliary(site)}
    assert auxiliary == {"_auto_latent"} and not contract().is_auxiliary(sites["x"])
    assert not contract().is_auxiliary(run(AutoNormal(model))["x"]) and contract().is_auxiliary(run(model)["weight"])


@relies(
    "autoguides of one latent vector say which of its values are which site's, before they are constrained.", "unpacked"
)
def test_latent_vectors():
    def model():
        numpyro.sample("x", dist.Normal(jnp.zeros((3, 2)), 1.0).to_event(2))
        numpyro.sample("scale", dist.HalfNormal())

    guide = AutoMultivariateNormal(model)
    sites = handlers.trace(handlers.seed(guide, KEY)).get_trace()
    values = contract().unpacked(guide, sites["_auto_latent"]["value"])
    assert {name: value.shape for name, value in values.items()} == {"x": (3, 2), "scale": ()}
    np.testing.assert_allclose(values["x"], sites["x"]["value"])
    for name in values:
        support = guide.prototype_trace[name]["fn"].support
        np.testing.assert_allclose(biject_to(support)(values[name]), sites[name]["value"], rtol=1e-6)
    places = contract().unpacked(guide, jnp.arange(guide.latent_dim))
    assert sorted(np.concatenate([np.ravel(place) for place in places.values()])) == list(range(7))
    # The same distribution as the guide samples, of its parameters by name.
    params = {name: site["value"] for name, site in sites.items() if site["type"] == "param"}
    np.testing.assert_allclose(guide.get_posterior(params).mean, sites["_auto_latent"]["fn"].mean)


@relies("a discrete site that is summed out says so by infer={'enumerate': 'parallel'}.", "is_enumerated")
def test_enumerated_sites():
    site = run(lambda: numpyro.sample("c", dist.Categorical(jnp.ones(2) / 2), infer={"enumerate": "parallel"}))["c"]
    assert contract().is_enumerated(site) and not contract().is_enumerated(run(pair(None)[1])["x"])


# ---------------------------------------------------------------------------------------------------------------
# Plates


@relies(
    "each plate puts its name, dimension and the size of its subsample on the messages of the statements in it; for "
    "params and deterministic values too, and before a param has its first value.",
    "Frame",
    "frames",
)
def test_frames():
    first = []

    class Keep(contract().Handler):
        def process_message(self, msg):
            if msg["type"] == "param":
                self.message = msg

    def model():
        with numpyro.plate("functions", 2, dim=-2), numpyro.plate("rows", 5, subsample_size=3):
            with (keep := Keep()):
                numpyro.param("p", lambda key: first.append(contract().frames(keep.message)) or jnp.zeros(()))
            numpyro.sample("x", dist.Normal())
            numpyro.deterministic("d", 1.0)
        numpyro.sample("outside", dist.Normal())

    sites = run(model)
    expected = {("functions", -2, 2), ("rows", -1, 3)}
    assert set(first[0]) == expected
    for name in ("p", "x", "d"):
        assert set(contract().frames(sites[name])) == expected, name
    assert contract().frames(sites["outside"]) == []
    scoped = run(handlers.scope(model, prefix="a"))["a/x"]
    assert {frame.name for frame in contract().frames(scoped)} == {"a/functions", "a/rows"}


@relies("the plates around are handlers in a list, and say their name, dimension and sizes.", "plates_around")
def test_plates_around():
    found = []

    def model():
        with numpyro.plate("functions", 2, dim=-2), handlers.mask(mask=True), numpyro.plate("rows", 5, 3):
            found.extend(contract().plates_around())
        assert contract().plates_around() == []

    run(model)
    assert [(p.name, p.dim, p.size, p.subsample_size) for p in found] == [("functions", -2, 2, 2), ("rows", -1, 5, 3)]


@relies("a plate takes the rows that substitute gives for its name, and scales what is in it.", "plate_of_rows")
def test_a_plate_of_given_rows():
    rows = jnp.asarray([4, 1])

    def model():
        with contract().plate_of_rows("rows", 6, rows) as index:
            assert index is rows
            numpyro.sample("x", dist.Normal())

    site = run(model)["x"]
    assert site["value"].shape == (2,) and site["scale"] == 3.0


@relies(
    "the message of a plate has the sizes of plate and subsample as its args and the rows as its value, and a handler "
    "can set them.",
    "plate_size",
    "plate_takes_all",
    "copy_rows",
    "take_all",
)
def test_the_message_of_a_plate():
    rows = {}

    def model():
        with numpyro.plate("all", 4) as every, numpyro.plate("some", 5, subsample_size=2) as some:
            numpyro.sample("x", dist.Normal())
        rows.update(all=every, some=some)

    sites = run(model)
    assert contract().plate_size(sites["all"]) == 4 and contract().plate_size(sites["some"]) == 5
    assert contract().plate_takes_all(sites["all"]) and not contract().plate_takes_all(sites["some"])

    class All(contract().Handler):
        def process_message(self, msg):
            if msg["type"] == "plate" and msg["value"] is None:
                contract().take_all(msg)

    class Same(contract().Handler):
        def process_message(self, msg):
            if msg["type"] == "plate":
                contract().copy_rows(msg, sites[msg["name"]])

    x = run(All(model))["x"]
    assert rows["all"].shape == (4,) and rows["some"].shape == x["value"].shape[:1] == (5,) and x["scale"] is None
    sites["some"]["value"] = jnp.asarray([3, 1])
    x = run(Same(model))["x"]
    assert rows["some"] is sites["some"]["value"] and x["value"].shape == (2, 4) and x["scale"] == 2.5


# ---------------------------------------------------------------------------------------------------------------
# Distributions


@relies("a distribution that was expanded, masked or made an event has what it was as its base_dist.", "base_of")
def test_the_base_of_a_distribution():
    normal = dist.Normal(jnp.zeros(3), 1.0)
    wrapped = normal.expand([2, 3]).mask(jnp.ones((2, 3), bool)).to_event(1)
    assert contract().base_of(wrapped) is normal and contract().base_of(normal) is normal
    assert wrapped.reinterpreted_batch_ndims == 1


@relies("a masked distribution keeps its mask, as a bool or an array of its batch's shape.", "mask_of")
def test_masks():
    normal = dist.Normal(jnp.zeros((2, 3)), 1.0)
    hidden = run(handlers.mask(lambda: numpyro.sample("x", normal), mask=False))["x"]["fn"]
    assert contract().mask_of(hidden) is False and contract().mask_of(normal) is True
    mask = jnp.asarray([True, False, True])
    np.testing.assert_array_equal(contract().mask_of(normal.mask(mask)), jnp.broadcast_to(mask, (2, 3)))


@relies("random keys of both styles are told from what is none, and no key is None.", "is_prng_key")
def test_random_keys():
    is_key = contract().is_prng_key
    assert is_key(KEY) and is_key(jax.random.PRNGKey(0))
    assert not is_key(None) and not is_key(0) and not is_key(jax.random.split(KEY)) and not is_key(jnp.zeros(3))
    keys = []

    class Noting(dist.Normal):
        def sample(self, key, sample_shape=()):
            keys.append(key)
            return jnp.zeros(())

    with handlers.trace():
        numpyro.sample("x", Noting())
    run(lambda: numpyro.sample("x", Noting()))
    assert keys[0] is None and is_key(keys[1])


def remembering():
    """A distribution that hands on ten times its sample, and as a trailing axis its negative."""

    class Remembering(contract().KeepsIntermediates, dist.Distribution):
        support = constraints.real
        pytree_data_fields = ("loc",)

        def __init__(self, loc):
            self.loc, self.given = loc, []
            super().__init__(jnp.shape(loc), ())

        def sample_with_intermediates(self, key, sample_shape=()):
            value = self.loc + jax.random.normal(key, sample_shape + self.batch_shape)
            return value, [10.0 * value, jnp.stack([value, -value], -1)]

        def sample(self, key, sample_shape=()):
            return self.sample_with_intermediates(key, sample_shape)[0]

        def log_prob(self, value, intermediates=None):
            self.given.append(intermediates)
            return -0.5 * (value - self.loc) ** 2

    return Remembering


@relies(
    "scan stacks the arrays of a site's distribution and takes log_prob of the stacked values, in plates too.",
    "Stackable",
    "per_stacked",
)
def test_stacked_distributions():
    class Sum(contract().Stackable):
        support = constraints.real_vector
        pytree_data_fields = ("rows", "scale")
        counted = "rows"

        def __init__(self, rows, scale):
            self.rows, self.scale = rows, scale
            super().__init__((), jnp.shape(rows))
            self.count_axes()

        @contract().per_stacked
        def log_prob(self, value, intermediates=None):
            assert jnp.shape(self.rows) == (2,) and jnp.shape(self.scale) == ()
            return jnp.sum(self.rows * value, -1) / self.scale

    rows, values = jnp.arange(6.0).reshape(3, 2), jnp.ones((3, 4, 2))

    def step(carry, step):
        with numpyro.plate("outputs", 4):
            numpyro.sample("x", Sum(step[0], carry), obs=step[1])
        return carry, None

    sites = handlers.trace(lambda: scan(step, jnp.asarray(2.0), (rows, values))).get_trace()
    density = sites["x"]["fn"].log_prob(sites["x"]["value"])
    np.testing.assert_allclose(density, jnp.broadcast_to(rows.sum(-1)[:, None] / 2.0, (3, 4)))


@relies(
    "what sample_with_intermediates returns beside a sample is in the message, in the order of the sample's axes, also "
    "in plates, with masks, under Predictive and uncondition; and losses pass it to log_prob.",
    "KeepsIntermediates",
)
def test_intermediates():
    Remembering = remembering()
    seen = []

    def model(obs=None, loc=None):
        fn = Remembering(jnp.arange(4.0)[None] if loc is None else loc)
        with numpyro.plate("functions", 3, dim=-2), numpyro.plate("rows", 4):
            with handlers.trace() as sites:
                numpyro.sample("y", fn, obs=obs)
        seen.append(sites["y"])

    mask = jnp.asarray([True, False, True, True])
    observed = jnp.ones((3, 4))
    uses = [
        lambda: run(model),
        lambda: run(handlers.mask(model, mask=False)),
        lambda: run(handlers.mask(model, mask=mask)),
        lambda: run(handlers.mask(handlers.mask(model, mask=mask), mask=False)),
        lambda: run(handlers.uncondition(model), observed),
        lambda: run(lambda: model(loc=jnp.zeros(()))),
    ]
    for use in uses:
        use()
        y = seen[-1]
        assert len(y["intermediates"]) == 2 and y["value"].shape == (3, 4)
        assert jax.eval_shape(y["fn"].log_prob, y["value"], y["intermediates"]).shape == (3, 4)
    for parallel in (False, True):
        traced(lambda parallel=parallel: Predictive(model, num_samples=2, parallel=parallel)(KEY))
        assert len(seen[-1]["intermediates"]) == 2
    run(model, observed)
    assert seen[-1]["intermediates"] == []

    @jax.jit
    def numbers():
        with handlers.seed(rng_seed=0):
            model()
        return seen[-1]["value"], seen[-1]["intermediates"]

    value, (ten, both) = numbers()
    np.testing.assert_allclose(ten, 10.0 * value, rtol=1e-6)
    np.testing.assert_allclose(both, np.stack([value, -value], -1), rtol=1e-6)

    fn = Remembering(jnp.zeros(2))
    normal = dist.Normal(jnp.zeros(2), 1.0)
    traced(lambda: Trace_ELBO().loss(KEY, {}, lambda: numpyro.sample("y", normal), lambda: numpyro.sample("y", fn)))
    assert fn.given and all(len(given) == 2 for given in fn.given)


@relies(
    "distributions are pytrees: leaves are the attributes in pytree_data_fields, structure those in pytree_aux_fields.",
    "KeepsIntermediates",
)
def test_distributions_are_pytrees():
    class Own(dist.Distribution):
        support = constraints.real
        reparametrized_params: list[str] = []
        pytree_data_fields = ("loc",)
        pytree_aux_fields = ("kind",)

        def __init__(self, loc, kind):
            self.loc, self.kind = loc, kind
            super().__init__(jnp.shape(loc), ())

    own = Own(jnp.arange(3.0), "plain")
    (leaf,), structure = jax.tree.flatten(own)
    assert leaf is own.loc and structure != jax.tree.structure(Own(jnp.arange(3.0), "other"))
    twice = jax.tree.map(lambda x: 2.0 * x, own)
    assert type(twice) is Own and twice.kind == "plain" and twice.batch_shape == (3,) and twice.loc[2] == 4.0


@relies(
    "TraceMeanField_ELBO takes the divergence of two distributions from the rule registered for their classes.",
    "KeepsIntermediates",
)
def test_registered_divergences():
    class P(dist.Normal):
        pass

    class Q(dist.Normal):
        pass

    kl_divergence.register(Q, P)(lambda q, p: jnp.asarray(42.0))
    loss = TraceMeanField_ELBO().loss(
        KEY, {}, lambda: numpyro.sample("x", P()), lambda: numpyro.sample("x", Q(1.0, 2.0))
    )
    assert loss == 42.0
    np.testing.assert_allclose(kl_divergence(dist.Normal(1.0), P()), 0.5, rtol=1e-6)  # subclasses follow their base


@relies("constraints are pytrees, with their bounds as leaves.", "bounds_of")
def test_bounds_of_constraints():
    bounds = contract().bounds_of(constraints.interval(jnp.zeros(3), jnp.ones(3)))
    assert sorted(jnp.shape(bound) for bound in bounds) == [(3,), (3,)]
    for constraint in (constraints.positive, constraints.simplex, constraints.real):
        assert all(jnp.ndim(bound) == 0 for bound in contract().bounds_of(constraint))


@relies(
    "constraints and transforms of one's own are pytrees and compare as they say; biject_to finds the transform by the "
    "constraint's class, SVI uses it, and its inv calls _inverse.",
    "FixedConstraint",
    "FixedTransform",
)
def test_constraints_of_ones_own():
    class Above(contract().FixedConstraint):
        def __call__(self, x):
            return x > 1.0

    class Shift(contract().FixedTransform):
        domain, codomain = constraints.real, Above()

        def __call__(self, x):
            return 1.0 + jnp.exp(x)

        def _inverse(self, y):
            return jnp.log(y - 1.0)

    biject_to.register(Above)(lambda constraint: Shift())
    assert Above() == Above() and Above() != constraints.positive and Shift() == Shift() and repr(Above()) == "Above()"
    for one in (Above(), Shift()):
        leaves, structure = jax.tree.flatten(one)
        assert leaves == [] and jax.tree.unflatten(structure, leaves) == one

    def model():
        numpyro.factor("weight", -numpyro.param("p", 3.0, constraint=Above()))

    svi = SVI(model, lambda: None, numpyro.optim.SGD(0.1), Trace_ELBO())
    state = svi.init(KEY)
    np.testing.assert_allclose(contract().unconstrained(svi, state)["p"], np.log(2.0), rtol=1e-6)
    np.testing.assert_allclose(svi.get_params(state)["p"], 3.0, rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------------
# Optimizers and SVI


def quadratic():
    numpyro.factor("weight", -0.5 * (numpyro.param("p", 3.0, constraint=constraints.positive) - 1.0) ** 2)


def an_svi(optim=None):
    return SVI(quadratic, lambda: None, optim or numpyro.optim.SGD(0.1), Trace_ELBO())


@relies(
    "SVI accepts an optimizer of one's own class and calls its init, get_params and eval_and_update, with "
    "unconstrained params and a function that returns the loss and an auxiliary value.",
    "Optimizer",
)
def test_an_optimizer_of_ones_own():
    calls = []

    class Own(contract().Optimizer):
        def __init__(self):
            pass

        def init(self, params):
            calls.append("init")
            return jnp.array(0), params

        def get_params(self, state):
            return state[1]

        def eval_and_update(self, fn, state, forward_mode_differentiation=False):
            calls.append("eval_and_update")
            loss, aux = fn(state[1])
            return (loss, aux), (state[0] + 1, {name: value + 1.0 for name, value in state[1].items()})

    svi = an_svi(Own())
    state = svi.init(KEY)
    new, loss = svi.update(state)
    assert calls == ["init", "eval_and_update"]
    np.testing.assert_allclose(loss, 2.0, rtol=1e-5)
    np.testing.assert_allclose(svi.get_params(new)["p"], 3.0 * np.e, rtol=1e-5)
    np.testing.assert_allclose(svi.evaluate(new), 0.5 * (3.0 * np.e - 1.0) ** 2, rtol=1e-5)


@relies(
    "an optimizer that does not say otherwise steps by update along the gradient of the loss, and Minimize, which says "
    "so, does not.",
    "follows_gradient",
)
def test_which_optimizers_follow_the_gradient():
    optim = numpyro.optim.Adam(0.1)
    assert contract().follows_gradient(optim) and not contract().follows_gradient(numpyro.optim.Minimize())

    def fn(params):
        return jnp.sum(params["p"] ** 3), "aux"

    state = optim.init({"p": jnp.asarray(2.0)})
    (loss, aux), new = optim.eval_and_update(fn, state)
    by_hand = optim.update({"p": jnp.asarray(12.0)}, state, value=loss)
    assert loss == 8.0 and aux == "aux"
    jax.tree.map(np.testing.assert_array_equal, new, by_hand)


@relies(
    "the state of an optimizer, NumPyro's or optax's, is a tuple that begins with the number of steps.", "step_count"
)
def test_the_number_of_steps():
    optax = pytest.importorskip("optax") if importlib.util.find_spec("optax") else None
    for optim in (numpyro.optim.Adam(0.1), *([optax.sgd(0.1)] if optax else [])):
        svi = an_svi(optim)

        @jax.jit
        def counts(svi=svi):
            states = [svi.init(KEY)]
            for _ in range(2):
                states.append(svi.update(states[-1])[0])
            return [contract().step_count(state.optim_state) for state in states]

        assert counts() == [0, 1, 2], optim


@relies(
    "SVI keeps its optimizer as optim and what it knows of constraints as constrain_fn, None before init; a copy can "
    "be given another optimizer.",
    "unconstrained",
    "constrained",
    "is_initialized",
    "with_optimizer",
    "copy_constraints",
)
def test_what_svi_keeps():
    svi = an_svi()
    assert not contract().is_initialized(svi)
    state = svi.init(KEY)
    assert contract().is_initialized(svi)
    values = contract().unconstrained(svi, state)
    np.testing.assert_allclose(values["p"], np.log(3.0), rtol=1e-6)
    np.testing.assert_allclose(contract().constrained(svi, values)["p"], 3.0, rtol=1e-6)
    assert contract().constrained(svi, {}) == {} and values["p"] < 2.0

    adam, fresh = numpyro.optim.Adam(0.1), an_svi()
    other = contract().with_optimizer(fresh, adam)
    assert type(other) is type(fresh) and fresh.optim is not adam and other.model is fresh.model
    other.init(KEY)
    assert contract().is_initialized(other) and not contract().is_initialized(fresh)
    contract().copy_constraints(other, fresh)
    np.testing.assert_allclose(fresh.get_params(state)["p"], 3.0, rtol=1e-6)
    np.testing.assert_allclose(fresh.evaluate(state), 2.0, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------------
# Arrays


@relies("arrays inside jit, vmap, grad and scan are of the class jax.core.Tracer, and others are not.", "is_traced")
def test_traced_arrays():
    seen = []

    def look(x):
        seen.append(tracing().is_traced(x))
        return x

    x = jnp.ones(2)
    jax.jit(look)(x)
    jax.vmap(look)(x)
    jax.grad(lambda x: look(x).sum())(x)
    jax.lax.scan(lambda carry, x: (look(carry), None), x, None, length=1)
    jax.eval_shape(look, x)
    assert seen and all(seen)
    assert not any(map(tracing().is_traced, (x, np.ones(2), 1.0, None)))


@relies("arrays know whether their dtype is weak, as that of Python numbers is.", "is_weakly_typed")
def test_weak_types():
    assert tracing().is_weakly_typed(jnp.asarray(1.0)) and not tracing().is_weakly_typed(jnp.ones(()))
    assert (jnp.asarray(1.0) * jnp.ones((), jnp.bfloat16)).dtype == jnp.bfloat16


@relies("JAX's configuration has the device where it computes.", "default_device")
def test_default_device():
    [first, *_] = jax.local_devices()
    assert tracing().default_device() == first
    with jax.default_device("cpu"):
        assert tracing().default_device() == "cpu"


@relies("traced arrays know what traces them, which is one object for all of them.", "trace_of", "current_trace")
def test_traces():
    of, current = tracing().trace_of, tracing().current_trace
    assert of(jnp.ones(2)) is None and current() is None

    @jax.jit
    def outer(x):
        assert of(x) is current() is of(jnp.sin(x)) is of(jnp.ones(3)) and current() is not None

        @jax.jit
        def inner(y):
            assert of(y) is current() is not of(x)
            return y

        jax.lax.scan(lambda carry, y: (carry, inner(y)), None, x)
        return x

    outer(jnp.ones(2))
    jax.vmap(lambda x: x if current() is None else 1 / 0)(jnp.ones(2))


@relies("what a program does is all in its text and the kinds of what it returns.", "out_avals", "calls_python")
def test_texts_of_programs():
    def text(function, *args):
        traced = jax.jit(function, keep_unused=True).trace(*args)
        return traced.lower().as_text(), tracing().out_avals(traced)

    x, here = jnp.ones(3), np.arange(3.0, dtype=np.float32)

    def made(number, array, power=2):
        return text(lambda x, unused: jnp.sum(number * (x + array) ** power), x, x)

    same = made(2.0, here)
    assert made(2.0, here.copy()) == same == made(2.0, jnp.asarray(here))
    assert not tracing().calls_python(same[0])
    others = [made(3.0, here), made(2.0, here + 1), made(2.0, here, 3), text(lambda x, y: jnp.sum(x), x, x)]
    others += [text(lambda x: x * 0 + 1.0, x), text(lambda x: jnp.asarray(1.0), x), text(lambda x: jnp.ones(()), x)]
    assert len({same, *others}) == 1 + len(others)
    assert text(lambda x: x, jax.random.key(0)) != text(lambda x: x, jax.random.key_data(jax.random.key(0)))
    for call in (jax.pure_callback, jax.experimental.io_callback):
        assert tracing().calls_python(text(lambda x, call=call: call(lambda x: x, x, x), x)[0])
    assert tracing().calls_python(text(lambda x: jax.debug.print("{}", x) or x, x)[0])


def test_everything_in_the_files_is_tested():
    assert {*contract().__all__, *tracing().__all__} == TESTED
