"""q must come from guide to model: training raises where it does not, and other uses of a model do not need it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from models import NOISE, X, Y, Z, sparse_gp
from numpyro import handlers
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

import npgp

KEY = jax.random.key(0)
LOST = "f\\.u has the guide's value but not the guide's q, so training would maximize another density"


def model(X, y=None):
    f = sparse_gp("odvgp", k=npgp.RBF(numpyro.param("lengthscale", 0.7))).draw()
    with numpyro.plate("rows", len(X)):
        npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)


def by_hand(X, y=None):
    sparse_gp("odvgp").guide()


def neighbors(X, y=None):
    f = npgp.VNNGP("f", npgp.RBF(), Z, 2).draw()
    with numpyro.plate("rows", len(X)):
        npgp.observe("y", f(X, np.zeros((len(X), 1), int)), npgp.Gaussian(variance=NOISE), obs=y)


def svi(of, guide=None, loss=None):
    return SVI(of, guide or npgp.AutoSparseGP(of), npgp.adam(0.01), loss or TraceMeanField_ELBO())


@pytest.fixture
def lossy_replay(monkeypatch):
    """NumPyro's ``replay`` as it may be one day: values come from guide to model, and the ``infer`` dict does not."""

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["name"] in self.trace and not msg["is_observed"]:
            msg["value"] = self.trace[msg["name"]]["value"]

    with monkeypatch.context() as patch:
        yield lambda: patch.setattr(handlers.replay, "process_message", process_message)


CASES = {
    "automatic": (model, None),
    "by hand": (model, by_hand),
    "scope": (handlers.scope(model, prefix="a", divider="."), None),
    "scope by hand": (handlers.scope(model, prefix="a", divider="."), handlers.scope(by_hand, prefix="a", divider=".")),
    "neighbors": (neighbors, None),
}


@pytest.mark.parametrize("case", CASES)
def test_training_without_q_is_an_error(case, lossy_replay):
    one = svi(*CASES[case])
    state = jax.eval_shape(one.init, KEY, X, Y)
    lossy_replay()
    for use, start in ((one.init, KEY), (one.update, state), (one.evaluate, state)):
        with pytest.raises(RuntimeError, match=LOST):
            jax.eval_shape(use, start, X, Y)
    with pytest.raises(RuntimeError, match=LOST):
        npgp.fit(one, KEY, 2, X, Y, progress=False)


@pytest.mark.parametrize("loss", [Trace_ELBO(), TraceMeanField_ELBO(num_particles=2)])
def test_so_it_is_with_other_losses(loss, lossy_replay):
    one = svi(model, loss=loss)
    state = jax.eval_shape(one.init, KEY, X, Y)
    jax.eval_shape(one.update, state, X, Y)
    lossy_replay()
    with pytest.raises(RuntimeError, match=LOST):
        jax.eval_shape(one.update, state, X, Y)


def test_uses_without_q_need_none(lossy_replay):
    """Also where ``replay`` loses what it should not: nothing else is to be refused for it."""
    guide = npgp.AutoSparseGP(model)
    one = svi(model, guide)
    params = jax.jit(lambda: one.get_params(one.init(KEY, X, Y)))()
    plain = svi(model, AutoNormal(model))
    plain_state = plain.init(KEY, X, Y)  # here, as autoguides keep what they see first
    lossy_replay()
    traced = []

    def uses(key):
        draws = guide.sample_posterior(key, params, X, Y, sample_shape=(2,))
        Predictive(model, draws)(key, X)
        Predictive(model, guide=guide, params=params, num_samples=2)(key, X)
        one = {name: value[0] for name, value in draws.items() if name in ("f.u", "f.v")}
        for given in (handlers.condition(model, one), handlers.substitute(model, one)):
            traced.append(handlers.trace(handlers.seed(given, key)).get_trace(X, Y))
        log_density(model, (X, Y), {}, one)  # as NUTS
        # ε as any other latent value: the guide has no q, and the bound is that of the model without one.
        plain.update(plain_state, X, Y)
        # Conditioned on inducing values, the model has none to be guided.
        some = {"f.u": jnp.zeros(3), "f.v": jnp.zeros(2)}
        given = handlers.seed(handlers.condition(model, some), key)
        handlers.replay(given, handlers.trace(handlers.seed(guide, key)).get_trace(X, Y))(X, Y)
        return jnp.zeros(())

    jax.eval_shape(uses, KEY)
    assert all("f.u" in sites for sites in traced)
