"""Compiled programs: each compiled once, whatever function it comes from, with checks of values that come later."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from programs import compilations

from npgp import checks
from npgp.programs import compiled
from npgp.programs.compiled import QUICK, STEPS, Program, on_grid, one_program, padded_size
from npgp.programs.later import SeesLater, see_later

X = np.arange(6.0, dtype=np.float32).reshape(3, 2)


def scaled(by):
    return lambda tree: {"sum": jnp.sum(by * tree["x"] ** 2), "pair": (tree["x"], jnp.cos(tree["y"]))}


def given(seed=0):
    return {"x": jnp.asarray(X) + seed, "y": jnp.asarray(float(seed))}


# ---------------------------------------------------------------------------------------------------------------
# program


def test_a_program_is_what_the_function_is():
    found, expected = Program(scaled(2.0))(given(1)), scaled(2.0)(given(1))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert a.dtype == b.dtype and a.weak_type == b.weak_type


def test_the_same_text_is_compiled_once_and_another_is_another():
    first, start = scaled(2.123), given()
    Program(first)(start)
    with compilations() as count:
        again = Program(scaled(2.123))(start)  # another function, which does the same
    assert count() == 0
    np.testing.assert_array_equal(again["sum"], Program(first)(start)["sum"])
    with compilations() as count:
        other = Program(scaled(3.123))(start)
    assert count() == 1
    np.testing.assert_allclose(other["sum"] / again["sum"], 3.123 / 2.123, rtol=1e-6)


def test_results_of_the_same_program_have_their_own_structure():
    x = jnp.ones(2)
    assert Program(lambda x: (x + 1.5,))(x)[0].shape == (2,)
    with compilations() as count:
        assert Program(lambda x: {"a": x + 1.5})(x)["a"].shape == (2,)
    assert count() == 0


def test_arguments_without_use_are_arguments():
    """XLA leaves them out; programs that differ in which of two they use are not taken for one another."""
    x, y = jnp.ones(2), jnp.arange(2.0)
    for function, expected in ((lambda x, y: x + 2.5, x), (lambda x, y: y + 2.5, y), (lambda x, y: 2.5 + x - x, 0 * x)):
        run = Program(function)
        for _ in range(2):
            np.testing.assert_array_equal(run(x, y), expected + 2.5)
    np.testing.assert_array_equal(Program(lambda x: x + 2.5)(y), y + 2.5)


def test_each_shape_and_dtype_has_its_program():
    run = Program(lambda x: x + 1)
    arrays = jnp.ones(2), jnp.ones(3), jnp.ones((2, 1)), jnp.ones(2, int)
    with compilations() as count:
        for x in (*arrays, *arrays):
            found = run(x)
            assert found.dtype == x.dtype
            np.testing.assert_array_equal(found, np.full(x.shape, 2))
    assert count() == len(arrays)


def test_what_is_closed_over_is_not_kept_alive():
    class Owner:
        pass

    owner = Owner()
    there = weakref.ref(owner)

    def function(x, owner=owner):
        return x + 4.5

    Program(function)(jnp.ones(2))
    del owner, function
    gc.collect()
    assert there() is None


def test_calls_of_python_are_those_of_their_function():
    seen = []
    for number in (1.0, 2.0):

        def function(x, number=number):
            jax.debug.callback(lambda: seen.append(number))
            return x + 1

        jax.block_until_ready(Program(function)(jnp.ones(2)))
        jax.effects_barrier()
    assert seen == [1.0, 2.0]


# ---------------------------------------------------------------------------------------------------------------
# one_program


def test_one_program_for_many_operations():
    shift = np.float32(0.1234)
    function = lambda: {"a": jnp.sin(X + shift) @ jnp.ones((2, 3)), "same": X, "word": "b"}  # noqa: E731
    one_program(lambda: jnp.ones(3))  # options that this XLA does not have are refused once in a process
    with compilations() as count:
        found = one_program(function)
    assert count() == 1 and found["same"] is X and found["word"] == "b"
    np.testing.assert_allclose(found["a"], np.sin(X + shift) @ np.ones((2, 3)), rtol=1e-6)
    with compilations() as count:
        one_program(lambda: {"a": jnp.sin(X + 1 + shift) @ jnp.ones((2, 3))})  # other numbers are no other program
    assert count() <= 1


def test_values_of_what_is_there_are_seen():
    def function():
        assert isinstance(jnp.asarray(X) + 1, jax.core.Tracer)
        return float(X[0, 1]) * jnp.ones(2)

    np.testing.assert_array_equal(one_program(function), [1.0, 1.0])


def test_inside_other_transformations_it_just_runs():
    f = lambda x: one_program(lambda: jnp.sum(jnp.sin(x) ** 2))  # noqa: E731
    x = jnp.arange(3.0)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(x)
    np.testing.assert_allclose(jax.grad(f)(x), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(f)(x[:, None]), jnp.sin(x) ** 2, rtol=1e-6)


def test_a_function_that_needs_values_has_them():
    assert float(one_program(lambda: jnp.ones(2) * float(jnp.ones(3).sum()))[0]) == 3.0
    assert one_program(lambda: np.asarray(jnp.ones(2)) + 1).tolist() == [2.0, 2.0]
    assert one_program(lambda: jnp.ones(2) if jnp.ones(()) > 0 else 1 / 0).shape == (2,)


@pytest.mark.parametrize("wrong", [True, False])
def test_checks_are_made_when_values_are_there(wrong):
    def function():
        scale = jnp.cos(jnp.asarray(3.0 if wrong else 0.3))  # negative for 3
        checks.require_positive(scale, "scale")
        checks.require_finite(jnp.log(scale), "the logarithm")
        return scale

    if wrong:
        with pytest.raises(ValueError, match=r"scale is -0\.98.*; it must be positive"):
            one_program(function)
    else:
        assert one_program(function) > 0


def test_checks_inside_loops_pass():
    def function():
        return jax.lax.map(lambda x: checks.require_positive(x, "x"), -jnp.ones(3))

    assert one_program(function).shape == (3,)
    assert jax.jit(lambda x: checks.require_positive(x, "x"))(-1.0) == -1.0  # where nobody sees them later


def test_checks_pass_through_handlers():
    def function():
        with handlers.trace(), handlers.seed(rng_seed=0), handlers.scale(scale=2.0):
            checks.require_positive(-jnp.ones(()), "x")

    with pytest.raises(ValueError, match=r"x is -1"):
        one_program(function)


def test_nothing_is_left_of_what_was_asked_for():
    with (later := SeesLater()):
        see_later(lambda x: 1 / 0, 3.0)
    assert len(later.values) == 1  # outside jit, what has no trace is of the same, which is none
    see_later(lambda x: 1 / 0, 3.0)


def test_threads_share_programs():
    results = []

    def work(i):
        results.append(float(one_program(lambda: jnp.sum(jnp.ones(i) * 1.5), options=QUICK)))

    threads = [threading.Thread(target=work, args=(1 + i % 2,)) for i in range(6)]
    [t.start() for t in threads]
    [t.join(100) for t in threads]
    assert sorted(results) == [1.5] * 3 + [3.0] * 3


# ---------------------------------------------------------------------------------------------------------------
# Grids


def moments(owner, X):
    mean = owner["w"] @ X.T
    return mean, X @ X.T


def test_rows_are_filled_up_and_cut():
    owner = {"w": jnp.ones((4, 2))}
    for rows in (1, 15, 16, 17, 100):
        X = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 2)), jnp.float32)
        mean, _ = on_grid(moments, owner, X)
        assert mean.shape == (4, rows)
        np.testing.assert_allclose(mean, owner["w"] @ X.T, rtol=1e-5, atol=1e-6)
        gram = on_grid(gram_of, owner, X, axes=(-2, -1))
        np.testing.assert_allclose(gram, X @ X.T, rtol=1e-5, atol=1e-6)


def gram_of(owner, X):
    return X @ X.T


def test_lengths_share_programs():
    owner = {"w": jnp.ones((4, 2))}
    rows = [jnp.asarray(np.ones((n, 2)), jnp.float32) for n in (40, 33, 64, 50)]
    on_grid(moments, owner, rows[0])
    with compilations() as count:
        for X in rows[1:]:
            on_grid(moments, owner, X)
    assert count() == 0


def test_sizes():
    sizes = {0: 16, 1: 16, 16: 16, 17: 32, 1000: 1024, 1024: 1024, 1025: 2048, 10_000: 10_240}
    assert {n: padded_size(n) for n in sizes} == sizes


def test_grids_in_transformations_and_without_rows():
    owner = {"w": jnp.ones((4, 2))}
    X = jnp.ones((5, 2))
    assert jax.jit(lambda X: on_grid(moments, owner, X)[0])(X).shape == (4, 5)
    slope = jax.grad(lambda w: on_grid(moments, {"w": w}, X)[0].sum())(owner["w"])
    np.testing.assert_allclose(slope, 5.0)
    assert on_grid(moments, owner, X[:0])[0].shape == (4, 0)


def test_options_that_xla_does_not_have_are_left_out():
    program = Program(scaled(7.0), options={"xla_no_such_option": True, **QUICK})
    np.testing.assert_allclose(program(given())["sum"], 7.0 * np.sum(X**2))


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("cpu", {"xla_cpu_use_fusion_emitters": False, "xla_cpu_experimental_ynn_fusion_type": ""}),
        ("gpu", {"xla_gpu_enable_triton_gemm": False}),
        ("tpu", {}),
    ],
)
def test_options_are_those_for_the_device(monkeypatch, backend, expected):
    seen = []
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(compiled, "_ALWAYS", {"xla_cpu_experimental_ynn_fusion_type": ""})  # as where loops are faulty
    monkeypatch.setattr(compiled, "_compiled_with", lambda options, lowered: seen.append(options) or lowered.compile())
    Program(scaled({"cpu": 11.0, "gpu": 12.0, "tpu": 13.0}[backend]), options=STEPS).prepare(given())
    assert seen == [expected]
