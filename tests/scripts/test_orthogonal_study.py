"""The study of orthogonal inducing points: that it runs, and that its divergences and operation counts are right."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import loading
import numpy as np
import pytest
from figures import assert_pictures

from npgp import linalg
from studies.orthogonal import clusters, programs, structures

METHODS = ("SGPR on both", "SOLVE-GP", "ODVGP", "SGPR on the first")


@pytest.fixture
def script():
    return loading.script("orthogonal_study")


@pytest.fixture
def run(script, tmp_path):
    """Runs main with arguments; the report, as returned and as read from the file it wrote."""

    def run(*args: str) -> dict:
        path = tmp_path / "figures" / "report.json"
        report = script.main([*args, "--out", str(tmp_path), "--json", str(path)])
        # Values NaN and infinity are no JSON.
        assert json.loads(path.read_text(), parse_constant=pytest.fail) == report
        return report

    return run


@pytest.mark.slow
def test_structures_stand_in_their_order(run, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("NPGP_DATA", raising=False)
    report = run("--quick")
    printed = capsys.readouterr().out
    assert "simulated" in report["data"] and report["data"] in printed
    assert "differs from Fernlund" in printed
    names = ("fits", "separation", "allocation", "clusters")
    assert_pictures(tmp_path, *(f"orthogonal_{name}.png" for name in names))

    fits = report["fits"]
    for name, fit in fits.items():
        same = pytest.approx(fit["union_there"], abs=1e-6)
        assert fit["bound"] == same if name.startswith("SGPR") else fit["bound"] <= fit["union_there"] + 1e-6, name
        assert fit["union_there"] < fit["evidence_there"] <= report["exact"]["log_evidence"] + 1e-6
        # SGPR with as many points may take any place that another structure takes.
        assert (
            len(fit["Z"] + fit["O"]) < 4 or fits[f"SGPR(4), {fit['conditional']}"]["bound"] >= fit["union_there"] - 1e-6
        )

    separation = report["separation"]
    for name in ("Z close together", "Z all over the data"):
        for structure in ("SOLVE-GP", "ODVGP"):
            kl = np.array(separation[name][f"{structure} to SGPR"])
            assert kl == pytest.approx(separation[name][f"{structure}: difference of bounds"], abs=1e-5)
            assert kl[0] == pytest.approx(0.0, abs=1e-3) and np.all(kl[1:] > 0.0)
    assert separation["Z close together"]["SOLVE-GP to SGPR"][-1] < 1e-3

    allocation = report["allocation"]
    assert allocation["first"] == [2, 4]
    for name in ("greedy", "k-means", "optimized"):
        kl = np.array([allocation[name][method] for method in METHODS])
        assert np.all(kl > 0.0)
        assert kl[:, -1] == pytest.approx(kl[0, -1], rel=1e-9)
        if name != "optimized":
            assert np.all(np.diff(kl, axis=0) > -1e-6)
    optimized = allocation["optimized"]["SGPR on both"][0]
    assert all(allocation[name]["SGPR on both"][0] >= optimized for name in ("greedy", "k-means"))

    near, far = report["clusters"]
    assert far["correlation, apart"] < 1e-3 < near["correlation, apart"]
    assert far["SOLVE-GP to SGPR, apart"] < 1e-4 < 1e-2 < far["SOLVE-GP to SGPR, mixed"]
    assert far["ODVGP to SGPR, apart"] > 1.0


class Traced:
    """In the place of a compiled program: looked through, not compiled."""

    product_flops = lapack_flops = flops = 2.0

    def __init__(self, function, *args):
        assert jax.eval_shape(function, *args)

    def __call__(self):
        pass


@pytest.mark.slow
def test_cost_is_measured_for_all_methods(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(programs, "program", Traced)
    report = run("--quick", "--cost")
    assert_pictures(tmp_path, "orthogonal_cost.png")
    assert "load average" in capsys.readouterr().out
    for kind in ("uncollapsed", "collapsed"):
        methods = report[kind]["16"]
        assert list(methods) == ["SVGP", "SOLVE-GP", "ODVGP"]
        assert methods["SVGP"]["time_ratio"] == [1.0, 1.0, 1.0]
        for figures in methods.values():
            assert 0.0 < figures["seconds"][0] <= figures["seconds"][1] <= figures["seconds"][2]
    assert len(report["breakdown"]["stages"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("step", ["uncollapsed_step", "collapsed_step"])
def test_steps_have_finite_values_and_gradients(step):
    X = jnp.asarray(np.random.default_rng(0).normal(size=(12, programs.COLUMNS)))
    value, gradient = getattr(programs, step)(4, "SOLVE-GP", X, jnp.sin(X[:, 0]))()
    leaves = jax.tree.leaves(gradient)
    assert np.isfinite(value) and all(np.all(np.isfinite(leaf)) for leaf in leaves)
    assert all(np.any(leaf != 0.0) for leaf in leaves)


@pytest.mark.parametrize("method, share", [("SVGP", 1.0), ("SOLVE-GP", 0.5), ("ODVGP", 0.25)])
def test_products_with_S_are_halved_and_quartered(method, share):
    M, batch = 16, 64
    function, arguments = programs.stages(M, method, jnp.ones((batch, programs.COLUMNS)))["products with S"]
    products = share * 2 * M**2 * batch
    counted = programs.program(function, *arguments)
    # Beside the products, their squares and sums.
    assert products < counted.product_flops < 1.2 * products
    assert counted.lapack_flops == 0.0


def test_divergence_of_whitened_values_is_that_of_f(float64):
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0.0, 5.0, 40))[:, None]
    data = structures.Data(X, np.sin(2.0 * X[:, 0]) + 0.3 * rng.normal(size=40), np.log([0.7, 0.8, 0.1]), 0.0)
    points, split = np.array([0.4, 2.0, 3.4, 1.1, 4.6]), 3

    @partial(jax.jit, static_argnums=0)
    def at_points(structure):
        gp = structures.collapsed(data.hyper, jnp.asarray(points), data.X, split, structure, "prior")
        posterior, at = gp.condition(data.y), jnp.asarray(points)[:, None]
        return posterior.mean(at), posterior.covariance(at)

    mean1, S1 = map(np.asarray, at_points("SGPR"))
    for structure in ("SOLVE-GP", "ODVGP"):
        mean, S = map(np.asarray, at_points(structure))
        shift = mean1 - mean
        log_dets = np.linalg.slogdet(S1)[1] - np.linalg.slogdet(S)[1]
        expected = 0.5 * (np.trace(np.linalg.solve(S1, S)) + shift @ np.linalg.solve(S1, shift) - 5 + log_dets)
        assert expected > 0.05
        assert structures.kl_to_sgpr(points, data, split, structure) == pytest.approx(expected, rel=1e-4)


def test_correlation_of_single_points_is_the_kernel():
    assert clusters.largest_correlation(np.array([0.3]), np.array([1.5])) == pytest.approx(np.exp(-0.72), rel=1e-6)
    repeated = clusters.largest_correlation(np.array([0.3, 1.5]), np.array([1.5, 4.0]))
    assert repeated == pytest.approx(1.0, abs=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="calls of LAPACK are counted on a CPU only")
def test_operations_of_lapack_are_counted():
    n, m = 6, 5  # with more columns LAPACK inverts the factor, and the rest is a product

    def solve(K, B):
        return linalg.solve_lower(linalg.cholesky(K)[0], B)

    counted = programs.program(solve, jnp.eye(n), jnp.ones((n, m)))
    assert counted.lapack_flops == pytest.approx(n**3 / 3 + n**2 * m)
    assert programs.program(jnp.matmul, jnp.eye(n), jnp.ones((n, m))).lapack_flops == 0.0
