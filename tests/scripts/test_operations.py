"""The script that counts operations of training steps: of a loop as often as it is written, and of a model's step."""

import json

import jax
import jax.numpy as jnp
import loading
import pytest


@pytest.fixture
def script():
    return loading.script("operations")


def test_equations_inside_others_count_as_often_as_they_occur(script):
    def twice(x):
        return jnp.sin(jnp.cos(x))

    def program(x):
        return jax.jit(twice)(x) + jax.lax.fori_loop(0, 5, lambda i, x: x * x, x)

    alone = script.equations(jax.make_jaxpr(twice)(1.0))
    once, both = (script.equations(jax.make_jaxpr(f)(1.0)) for f in (jax.jit(twice), lambda x: program(program(x))))
    assert (alone, once) == (2, 3)
    assert both == 2 * script.equations(jax.make_jaxpr(program)(1.0)) > 2 * once


def test_a_step_is_counted(script, tmp_path, capsys, monkeypatch):
    for name, value in dict(ROWS=12, POINTS=3, BATCH=5).items():
        monkeypatch.setattr(script, name, value)
    path = tmp_path / "figures" / "operations.json"
    report = script.main(["--models", "SVGP, minibatch", "--json", str(path)])
    assert json.loads(path.read_text()) == report
    (counts,) = report.values()
    assert set(counts) == {"equations", "instructions", "flops"} and all(n > 100 for n in counts.values())
    assert f"{counts['equations']:,}" in capsys.readouterr().out
