"""The benchmark: its programs do the same work, its count of operations is right, and it writes its three files."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from loading import SCRIPTS, script

sys.path.append(str(SCRIPTS / "benchmarks" / "bench"))
import bare_programs
import flops
import npgp_programs
from problems import synthetic

from npgp.programs.compiled import STEPS


def problem(tmp_path, inducing: int, rows: int, dtype: str):
    path = tmp_path / "problem.npz"
    synthetic(rows, 5, 3, inducing, rows).save(path)
    return type(synthetic(2, 1, 1, 1, 1)).load(path, dtype)


def test_npgp_and_jax_by_hand_take_the_same_steps(tmp_path):
    with jax.enable_x64(True):
        p = problem(tmp_path, 6, 20, "float64")  # a batch has all rows, so that their order is no matter
        programs = {"npgp": npgp_programs.make("svgp", p)}
        programs |= {kind: bare_programs.make(kind, p) for kind in ("svgp", "plain")}
        elbos = {name: program.elbo() for name, program in programs.items()}
        for program in programs.values():
            program.advance(1)
            program.advance(3)
        own = programs["npgp"].fit.result.params
        for kind in ("svgp", "plain"):
            assert np.isclose(elbos[kind], elbos["npgp"], rtol=1e-12)
            other = bare_programs.constrain(programs[kind].params)
            for name in other:
                named = {"Z": "Z0", "loc": "f.u.loc", "scale_tril": "f.u.scale_tril"}.get(name, name)
                np.testing.assert_allclose(other[name], own[named], rtol=1e-9, atol=1e-11, err_msg=name)
        assert np.max(np.abs(np.asarray(own["Z0"]) - p.Z)) > 0.03  # four steps of 0.01
        moments = [program.predictor()() for program in programs.values()]
        for other in moments[1:]:
            np.testing.assert_allclose(other, moments[0], rtol=1e-8)


@pytest.mark.parametrize("inducing, most", [(64, 1.55)])  # 1.33; JAX 0.12: 1.47
def test_a_step_is_hardly_a_larger_program_than_by_hand(inducing, most, tmp_path):
    p = problem(tmp_path, inducing, 1024, "float32")
    own, by_hand = npgp_programs.SVGP(p), bare_programs.SVGP(p)

    def many(state, X, y, steps):  # as fit and the program by hand take them
        return lax.fori_loop(0, steps, lambda _, carry: own.svi.update(carry[0], X, y), (state, jnp.zeros(())))

    def instructions(program, *args):
        return program.lower(*args).compile(options).as_text().count(" = ")

    def known(name):  # XLA stops at an option that it does not have
        try:
            jax.jit(jnp.negative).lower(1.0).compile({name: STEPS[name]})
        except jax.errors.JaxRuntimeError:
            return False
        return True

    options = {name: STEPS[name] for name in STEPS if known(name)}
    X, y = p.batch
    state = jax.eval_shape(lambda: own.svi.init(jax.random.key(0), X, y, init_params=own.q))
    ours = instructions(jax.jit(many), state, X, y, 1)
    given = by_hand.params, by_hand.optim_state, by_hand.X, by_hand.y, by_hand.batches(1), 1
    assert ours <= most * instructions(by_hand.run, *given)


@pytest.mark.parametrize("how", ["rows", "gram"])
def test_operations_are_those_of_the_compiled_step(how, tmp_path, monkeypatch):
    size, rows = 64, 256  # at one leaf, the factor is LAPACK's, which XLA does not count
    p = problem(tmp_path, size, rows, "float32")

    def loss(params, X, y):
        return bare_programs.elbo(params, X, y, rows, p.jitter, how)

    step = jax.jit(jax.value_and_grad(loss)).lower(bare_programs.start(p), *p.batch).compile()
    formula = {"rows": flops.by_rows, "gram": flops.by_gram}[how](size, rows) - flops.FACTOR * size**3
    kernels = 6 * 2 * p.X.shape[1] * size * (size + rows)
    elementwise = 60 * size * (size + rows)
    counted = step.cost_analysis()["flops"]
    assert formula < counted < formula + kernels + elementwise
    assert flops.svgp_step(1024, 1024) == flops.by_rows(1024, 1024) < flops.by_gram(1024, 1024)
    assert flops.svgp_step(256, 1024) == flops.by_gram(256, 1024) < flops.by_rows(256, 1024)


def missing(folder, monkeypatch):
    for library in ("gpytorch", "gpjax"):
        (folder / f"{library}.py").write_text("raise ImportError('none here')\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")


def test_it_writes_its_files_and_says_what_is_missing(tmp_path, capsys, monkeypatch):
    missing(tmp_path, monkeypatch)
    benchmark = script("benchmark")
    argv = "--quick --sizes 8 --dtypes float32 --parts steps --libraries bare gpytorch --out".split()
    report = benchmark.main([*argv, str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "benchmark.json").read_text()) == report
    text = (tmp_path / "out" / "benchmark.md").read_text()
    assert "gpytorch: not installed (none here): pip install --group bench" in text and "| 8 | float32 |" in text
    rows = {row["program"]: row for row in report["steps"]}
    assert set(rows) == {"JAX by hand", "JAX by hand, plain", "limit"}
    assert all(seconds > 0 for row in rows.values() for seconds in row["seconds"])
    assert len(rows["JAX by hand"]["seconds"]) == 2
    benchmark.check_elbos({"npgp": -100.0, "gpjax": -101.0}, 8, "float32")
    assert "!!! ELBOs DIFFER" in capsys.readouterr().out


def test_the_best_setting_ratios_and_the_time_to_a_target():
    benchmark = script("benchmark")
    row = dict(program="GPJax", M=8, dtype="float32")
    rows = [
        row | {"setting": "slow", "seconds": [3.0, 1.0, 2.5]},
        row | {"setting": "fast", "seconds": [8.0, 2.0, 2.0]},
    ]
    (chosen,) = benchmark.best(rows)
    assert chosen["setting"] == "fast"
    own = row | {"program": "npgp", "setting": "", "seconds": [1.0, 2.0, 1.0]}
    assert benchmark.by_program([own, chosen], "seconds", over="npgp").splitlines() == [
        "| M |   dtype |            GPJax |",
        "| - | ------: | ---------------: |",
        "| 8 | float32 | 0.50 (0.31–0.75) |",
    ]
    curve = [[1.0, 0.5], [2.0, 0.2], [3.0, 0.3]]
    assert benchmark.reached(curve, 0.3) == 2.0 and benchmark.reached(curve, 0.1) is None
