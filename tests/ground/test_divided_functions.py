"""Operations: parts of a function, each alone, or what some arguments have no part in apart from the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from npgp import linalg
from npgp.programs import Operations


def test_what_results_depend_on_and_each_alone(capfd):
    def function(x, y, key):
        jax.debug.print("printed {}", x)
        z = jax.random.normal(key, (3,))
        return {"a": [jnp.where(y > 0, y, 1.0), 2.0 * y], "b": jnp.linalg.cholesky(jnp.eye(3) * x) @ z, "c": 3.0 * x[0]}

    args = (jnp.full(3, 4.0), jnp.array([-1.0, 2.0, 3.0]), jax.random.key(1))
    operations = Operations(function, *args)
    expected = function(*args)
    jax.effects_barrier()
    capfd.readouterr()
    for name, needs in (("a", {1}), ("b", {0, 2}), ("c", {0})):
        found, compute = operations.part(name)
        assert found == needs
        given = [arg if i in needs else None for i, arg in enumerate(args)]
        for got, wanted in zip(jax.tree.leaves(jax.jit(compute)(*given)), jax.tree.leaves(expected[name]), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
    jax.effects_barrier()
    assert "printed" not in capfd.readouterr().out


def of_a_factor(x, K, y):
    """What a division meets: a custom derivative, a loop, a print, arguments and numbers as results."""
    L, jitter = linalg.cholesky(K)
    jax.debug.print("printed {}", jitter)
    solved = linalg.solve_lower(L, y[:, None])[:, 0]
    total = lax.fori_loop(0, 3, lambda i, total: total + x * solved[i], jnp.zeros(()))
    return {"total": total, "rest": [jnp.sum(jnp.square(L)), y, jnp.array(2.0)]}


@pytest.mark.parametrize("moving", [{0}, {1}, {0, 2}, {0, 1, 2}, set()])
def test_a_function_in_two_is_the_function_as_are_its_derivatives(moving, capfd):
    args = jnp.array(0.5), jnp.eye(3) + 0.3, jnp.arange(3.0)
    others = jnp.array(-2.0), 2.0 * jnp.eye(3) + 0.1, jnp.array([1.0, -1.0, 2.0])
    before, after = Operations(of_a_factor, *args).divided(moving)

    def in_two(*args):
        return after(before(*args), *args)

    def changed(*others):
        """Of some arguments by what was kept of the others."""
        mixed = [others[i] if i in moving else arg for i, arg in enumerate(args)]
        kept = before(*(None if i in moving else arg for i, arg in enumerate(args)))
        return after(kept, *(other if i in moving else None for i, other in enumerate(others))), of_a_factor(*mixed)

    with_gradients = [
        jax.jit(jax.value_and_grad(lambda *args, f=f: f(*args)["total"], argnums=(0, 1, 2)))(*args)
        for f in (in_two, of_a_factor)
    ]
    for got, expected in (with_gradients, jax.jit(changed)(*others), (in_two(*args), of_a_factor(*args))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("printed") == 6  # nothing that a function does is left out, or done twice


def test_what_is_kept_is_not_computed_again():
    args = jnp.array(0.5), jnp.eye(3) + 0.3, jnp.arange(3.0)
    before, after = Operations(of_a_factor, *args).divided({0})
    kept = jax.eval_shape(before, *args)
    assert "cholesky" in str(jax.make_jaxpr(before)(*args))
    assert "cholesky" not in str(jax.make_jaxpr(after)(kept, *args))
