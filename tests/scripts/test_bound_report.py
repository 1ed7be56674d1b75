"""The bound report: its file against dense algebra, the order of its bounds, and what it says of bad files."""

import functools
import json
import re

import jax
import loading
import numpy as np
import oracles
import pytest

from npgp.sparse.groups import median_split

JITTER = 1e-9


@pytest.fixture
def report(tmp_path):
    """Runs the script on a problem; what it wrote."""
    module = loading.script("bound_report")

    def run(problem: dict, *arguments: str) -> dict:
        np.savez(tmp_path / "problem.npz", **problem)
        path = tmp_path / "new folder" / "report.json"
        returned = module.main([str(tmp_path / "problem.npz"), "--json", str(path), *arguments])
        written = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
        assert written == returned
        return written

    run.module = module
    return run


def problem(N=24, D=2) -> dict:
    """Two input columns, inducing inputs in three blocks."""
    rng = np.random.default_rng(3)
    X, Z, O, O2, Xs = (rng.uniform(-2, 2, size=(rows, D)) for rows in (N, 5, 4, 3, 6))
    lengthscale, variance, noise = np.array([0.8, 1.5])[:D], 1.4, 0.05
    K = oracles.stationary("Matern32", X, X, lengthscale, variance)
    y = np.linalg.cholesky(K + noise * np.eye(N)) @ rng.normal(size=N)
    hyperparameters = dict(kernel="Matern32", lengthscale=lengthscale, variance=variance, noise=noise, jitter=JITTER)
    return dict(X=X, y=y, Z=Z, O=O, O2=O2, Xs=Xs, **hyperparameters)


def dense(given: dict, structure: str, X: np.ndarray) -> tuple[oracles.Joint, list[bool]]:
    """The joint covariance of a structure's inducing values and function values, and which blocks are learned."""
    names = [name for name in ("Z", "O", "O2") if name in given]
    blocks = [given[name] for name in names]
    kernel = functools.partial(
        oracles.stationary, given["kernel"], lengthscale=given["lengthscale"], variance=given["variance"]
    )
    inducing = {"sgpr": blocks[:1], "union": [np.concatenate(blocks)]}.get(structure, blocks)
    learned = [True] + [structure != "odvgp"] * (len(inducing) - 1)
    return oracles.Joint.of(kernel, inducing, X, JITTER), learned


@pytest.mark.slow  # to compile
def test_figures_are_dense_algebra(report, capsys):
    given = problem()
    X, y, noise = given["X"], given["y"], given["noise"]
    found = report(given, "--group-size", "4")
    assert set(found) == {"exact", "upper", "bounds", "predictions"}
    assert set(found["bounds"]) == set(found["predictions"]) == {"sgpr", "union", "solve", "odvgp"}

    with jax.enable_x64(True):
        partition = median_split(X, 4)
    groups = [rows[mask] for rows, mask in zip(partition.rows, partition.mask, strict=True)]
    printed = capsys.readouterr().out
    uppers = []
    for structure, bounds in found["bounds"].items():
        joint, learned = dense(given, structure, X)
        assert list(bounds) == ["prior", "artemev", "tight", "grouped", "full"]
        for word, bound in bounds.items():
            expected = joint.bound(y, noise, learned, {"artemev": "shared"}.get(word, word), groups)
            assert bound == pytest.approx(expected, rel=1e-6), (structure, word)
            assert f"{bound:.4f}" in printed
        D = joint.residual()
        uppers.append(oracles.titsias_upper(joint.K_ff - D, np.linalg.eigvalsh(D)[-1], y, noise))

        # q's moments: the means with all blocks together, each learned covariance by itself.
        at, _ = dense(given, structure, np.concatenate([X, given["Xs"]]))
        train, new = slice(0, len(X)), slice(len(X), None)
        Q = at.K_ff - at.residual()
        mean = Q[new, train] @ np.linalg.solve(Q[train, train] + noise * np.eye(len(X)), y)
        variance = np.diag(at.K_ff)[new].copy()
        for A, use in zip(at.A, learned, strict=True):
            if use:
                B = np.eye(len(A)) + A[:, train] @ A[:, train].T / noise
                variance -= np.diag(A.T @ (np.eye(len(A)) - np.linalg.inv(B)) @ A)[new]
        assert set(found["predictions"][structure]) == {"mean", "variance"}
        np.testing.assert_allclose(found["predictions"][structure]["mean"], mean, atol=1e-6)
        np.testing.assert_allclose(found["predictions"][structure]["variance"], variance, atol=1e-6)
    exact = oracles.log_normal(y, joint.K_ff + noise * np.eye(len(X)))
    assert found["exact"] == pytest.approx(exact, rel=1e-8)
    assert found["upper"] == pytest.approx(min(uppers), rel=1e-6)
    assert f"{exact:.4f}" in printed and f"{found['upper']:.4f}" in printed

    # The order that must hold, by DESIGN section 5.
    assert found["upper"] > exact
    for bounds in found["bounds"].values():
        ladder = [*bounds.values(), exact]
        assert ladder == sorted(ladder) and len(set(ladder)) == 6
    for word in ("prior", "artemev", "tight", "grouped", "full"):
        sgpr, union, solve, odvgp = (found["bounds"][name][word] for name in ("sgpr", "union", "solve", "odvgp"))
        assert union > solve and odvgp > sgpr
        assert solve > odvgp or word != "prior"
        assert solve < odvgp or word != "full"


def test_inducing_inputs_in_one_block(report, capsys, monkeypatch):
    given = problem(N=9, D=1)
    for name in ("O", "O2", "Xs", "jitter"):
        del given[name]
    given |= dict(kernel="PERIODIC", period=[2.5], lengthscale=1.1, X=given["X"].astype(np.float32), comment="mine")
    monkeypatch.setattr(report.module, "EXACT_ROWS", 8)
    found = report(given)
    assert found["exact"] is None and found["predictions"] == {}
    assert list(found["bounds"]) == ["sgpr"]
    kernel = functools.partial(oracles.periodic, period=2.5, lengthscale=1.1, variance=1.4)
    joint = oracles.Joint.of(kernel, [given["Z"]], given["X"], 1e-8)  # npgp's own jitter
    for word, conditional in (("prior", "prior"), ("artemev", "shared"), ("tight", "tight")):
        bound = joint.bound(given["y"], given["noise"], [True], conditional)
        assert found["bounds"]["sgpr"].pop(word) == pytest.approx(bound, rel=1e-6)
    assert found["bounds"]["sgpr"] == {}
    D = joint.residual()
    upper = oracles.titsias_upper(joint.K_ff - D, np.trace(D), given["y"], given["noise"])
    assert found["upper"] == pytest.approx(upper, rel=1e-6)
    printed = capsys.readouterr().out
    assert "not read: comment" in printed and "not computed for more than 8 rows" in printed


def without(name):
    return lambda given: given.pop(name)


def put(**values):
    return lambda given: given.update(values)


BAD = {
    "no y": (without("y"), "has no y; it has X, Z, O"),
    "no kernel, no noise": (lambda given: (given.pop("kernel"), given.pop("noise")), "has no kernel, noise"),
    "unknown kernel": (put(kernel="matern42"), "kernel is 'matern42'; it must be one of rbf, "),
    "kernel without a lengthscale": (put(kernel="Linear"), "kernel is 'Linear'"),
    "two kernels": (put(kernel=["rbf", "rbf"]), "kernel is .* must be one of"),
    "X of one dimension": (put(X=np.zeros(24)), r"X has shape \(24,\); it must be \(rows, columns\)"),
    "y of two": (put(y=np.zeros((24, 1))), r"y has shape \(24, 1\); it must be \(24,\)"),
    "y of other rows": (put(y=np.zeros(23)), r"y has shape \(23,\)"),
    "Z of other columns": (put(Z=np.zeros((3, 1))), r"Z has shape \(3, 1\); it must be \(rows, 2\), as X has 2"),
    "no inducing inputs": (put(Z=np.zeros((0, 2))), r"Z has shape \(0, 2\)"),
    "O of other columns": (put(O=np.zeros((3, 3))), r"O has shape \(3, 3\)"),
    "Xs of other columns": (put(Xs=np.zeros((3, 3))), r"Xs has shape \(3, 3\)"),
    "O2 without O": (without("O"), "O2 is given, but not the blocks before it"),
    "O3 of a fourth block": (lambda given: given.update(O4=given.pop("O2")), "O4 is given, but not"),
    "NaN": (put(y=np.full(24, np.nan)), "y has NaN or infinite"),
    "words": (put(X=np.full((24, 2), "a")), "X has dtype .* must be real numbers"),
    "objects": (put(y=np.array([None] * 24)), "is not a file of arrays"),
    "lengthscales": (put(lengthscale=np.ones(3)), r"lengthscale has shape \(3,\); it must be \(\) or \(2,\)"),
    "variances": (put(variance=np.ones(2)), r"variance has shape \(2,\); it must be \(\)"),
    "lengthscale 0": (put(lengthscale=[1.0, 0.0]), r"lengthscale is \[1. 0.\]; it must be positive"),
    "variance below 0": (put(variance=-1.0), "variance is -1.0; it must be positive"),
    "noise 0": (put(noise=0), "noise is 0.0; it must be positive"),
    "jitter": (put(jitter=-1e-6), "jitter is -1e-06; .* between 0 and 0.1"),
    "overflow": (put(variance=1e308), "cannot be computed in float64: it came out as"),
}


@pytest.mark.parametrize("change, words", BAD.values(), ids=BAD)
def test_bad_problems_are_errors_in_a_sentence(report, change, words, capsys, tmp_path):
    given = problem()
    if words.startswith("cannot be computed"):
        given = {name: value for name, value in given.items() if not name.startswith("O")}
    change(given)
    with pytest.raises(SystemExit) as stopped:
        report(given)
    assert stopped.value.code == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "new folder").exists()


def test_bad_arguments(report, capsys, tmp_path):
    (tmp_path / "text.npz").write_text("X = 1")
    for arguments, words in (
        ([str(tmp_path / "none.npz")], "none.npz does not exist"),
        ([str(tmp_path / "text.npz")], "text.npz is not a file of arrays"),
        ([str(tmp_path)], "is not a file of arrays"),
        (["x.npz", "--group-size", "0"], "invalid positive whole number value: '0'"),
        (["x.npz", "--group-size", "2.5"], "invalid positive whole number value: '2.5'"),
    ):
        with pytest.raises(SystemExit):
            report.module.main([*arguments, "--json", str(tmp_path / "report.json")])
        assert words in capsys.readouterr().err
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(SystemExit):
        report.module.main([str(tmp_path / "array.npy"), "--json", str(tmp_path / "report.json")])
    assert "is not a file of arrays" in capsys.readouterr().err
