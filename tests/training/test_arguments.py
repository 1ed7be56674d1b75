"""What ``fit``, ``evaluate`` and optimizers are given by mistake, and the sentence that it gets."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from models import NOISE, X, Y, sparse_gp
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp

KEY, INPUTS, TARGETS = jax.random.key(0), jnp.asarray(X.copy()), jnp.asarray(Y.copy())


def model(X, y=None):
    npgp.observe("y", sparse_gp().draw()(X), npgp.Gaussian(variance=NOISE), obs=y)


def uniform(X, y=None):
    npgp.observe("y", sparse_gp().draw()(X), lambda f: dist.Uniform(f - 9.0, f + 9.0), obs=y)


def svi_of(program=model):
    return SVI(program, npgp.AutoSparseGP(program), npgp.adam(0.01), TraceMeanField_ELBO())


def fit(svi=None, key=KEY, steps=2, **options):
    return npgp.fit(svi_of() if svi is None else svi, key, steps, INPUTS, TARGETS, progress=False, **options)


def state_of_another():
    svi = SVI(lambda: None, lambda: numpyro.param("a", 0.0), npgp.adam(0.1), TraceMeanField_ELBO())
    return npgp.fit(svi, KEY, 1, progress=False).state


MISTAKES = {
    "an SVI": (TypeError, "svi is 3; it must be NumPyro's SVI", lambda: fit(3)),
    "a model": (TypeError, r"svi is <function model .*; it must be NumPyro's SVI\(model, guide", lambda: fit(model)),
    "a key": (TypeError, r"rng_key is 0; it must be a random key, such as jax\.random\.key\(0\)", lambda: fit(key=0)),
    "names": (
        ValueError,
        r"init_params has 'f\.w\.loc', but the model only \['f\.u\.loc', 'f\.u\.scale_tril'\]; their names must match",
        lambda: fit(init_params={"f.w.loc": jnp.zeros(3)}),
    ),
    "shapes": (
        ValueError,
        r"f\.u\.loc has shape \(9,\); it must be \(3,\)",
        lambda: fit(init_params={"f.u.loc": jnp.zeros(9)}),
    ),
    "a state": (
        TypeError,
        r"init_state is \{.*; it must be the state of a training",
        lambda: fit(init_state={"a": 0.0}),
    ),
    "another state": (ValueError, "init_state has 'a', but the model only", lambda: fit(init_state=state_of_another())),
    "a result": (
        TypeError,
        "result is None; it must be what npgp.fit returned",
        lambda: npgp.evaluate(svi_of(), KEY, None, INPUTS, TARGETS),
    ),
    "a support": (
        ValueError,
        "y has the value .* in row 0; for Factorized it must be in the support of Uniform for every f",
        lambda: fit(svi_of(uniform)),
    ),
    "another key": (TypeError, "rng_key is 1", lambda: npgp.evaluate(svi_of(), 1, None, INPUTS, TARGETS)),
}


@pytest.mark.parametrize(("error", "match", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_said(error, match, mistake):
    with pytest.raises(error, match=match):
        mistake()


def test_a_state_with_fewer_parameters_is_of_another_model():
    def fixed(X, y=None):
        npgp.observe("y", sparse_gp("mean-field").draw()(X), npgp.Gaussian(variance=NOISE), obs=y)

    state = fit(svi_of(fixed), steps=1).state
    with pytest.raises(ValueError, match=r"init_state has 'f\.u\.scale', but the model only"):
        fit(init_state=state)


@pytest.mark.parametrize("rate", [-0.1, np.nan, np.inf, "fast", optax.constant_schedule(0.1)])
def test_rates_are_numbers_from_0_on(rate):
    for make in (npgp.adam, npgp.training.row_adam):
        if make is npgp.training.row_adam and callable(rate):
            continue
        with pytest.raises((TypeError, ValueError), match=r"learning_rate is .*; it must be"):
            make(rate)
    npgp.adam(0.0)


@pytest.mark.parametrize("options", [dict(final=-1.0), dict(warmup=-1), dict(warmup=1.5), dict(num_steps=0)], ids=str)
def test_schedules_have_steps(options):
    (name,) = options
    with pytest.raises((TypeError, ValueError), match=rf"{name} is .*; it must be"):
        npgp.adam(0.1, **{"num_steps": 10, **options})


class Table:
    """What data frames have in common."""

    def __init__(self, values):
        self.values, self.shape = np.asarray(values), np.shape(values)

    def __array__(self, dtype=None, copy=None):
        return self.values.astype(dtype or self.values.dtype)


def in_batches(X, y, batch_size=4, by_hand=False, **options):
    def batches(X, y):
        f = sparse_gp().draw()
        with npgp.plate("rows", len(INPUTS), rows=np.shape(X)[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    guide = (lambda X, y: sparse_gp().guide()) if by_hand else npgp.AutoSparseGP(batches)
    svi = SVI(batches, guide, npgp.adam(0.01), TraceMeanField_ELBO())
    return npgp.fit(svi, KEY, 1, X, y, batch_size=batch_size, progress=False, **options)


@pytest.mark.parametrize(
    ("X", "y", "what"),
    [
        (Table(INPUTS), Table(TARGETS), r"args\[0\] has a Table of 8 rows"),
        (INPUTS, Table(TARGETS), r"args\[1\] has a Table of 8 rows"),
        (np.asarray(INPUTS).tolist(), TARGETS, r"args\[0\] has a list of 8 rows"),
    ],
    ids=["tables", "y", "lists"],
)
def test_batches_are_cut_from_arrays(X, y, what):
    with pytest.raises(TypeError, match=what + "; it must be an array of numbers for batch_size to cut"):
        in_batches(X, y)


@pytest.mark.parametrize("kind", [object, str])
def test_arrays_are_of_numbers(kind):
    for size in (4, None):
        with pytest.raises(TypeError, match=r"^args\[1\] has dtype .*; arrays must be of numbers"):
            in_batches(INPUTS, np.asarray(TARGETS).astype(kind), size)


def test_lists_of_other_lengths_are_no_data():
    X, y = INPUTS, TARGETS
    assert npgp.training.data.Data((X, y), {"columns": [0, 1], "t": Table([1.0])}, KEY, 4, None).num_rows == len(X)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(("length", "by_hand"), [(4, True), (4, False), (7, False)])
def test_observations_are_as_long_as_inputs(length, by_hand, on_host):
    """As long as a batch, they would go with whichever rows of X a step takes."""
    sentence = rf"args\[1\] has {length} rows, and args\[0\] has 8: batches are cut from arrays that are as long as the"
    # npgp's guide looks at more rows than a step's first.
    start = "y would have the same 4 values at each step: " if by_hand else "y: obs has shape"
    with pytest.raises(ValueError, match=start) as caught:
        in_batches(INPUTS, TARGETS[:length], by_hand=by_hand, on_host=on_host)
    assert caught.match(sentence)
