"""The attempts to break npgp: how they are judged, and how a process that stops is ended. The stress study, small."""

import json

import jax
import loading
import numpy as np
import pytest

import npgp

loading.path("break")  # puts the scripts on the path
from studies.safety import attempt, wide  # noqa: E402
from studies.safety.attempts import load  # noqa: E402


def judged(run, wants="either", names=("X",)):
    return attempt.outcome(attempt.Attempt("a name", "a theme", "beyond", wants, names, run)).kind


def raised(error):
    def run():
        raise error

    return run


def test_answers_are_judged_by_numbers():
    assert judged(lambda: attempt.same(1.0, 1.0 + 1e-9)) == "right answer"
    assert judged(lambda: attempt.same(1.0, 1.1)) == "silent wrong"
    assert judged(lambda: [attempt.same(1.0, 1.0), attempt.same(np.nan, 1.0)]) == "NaN in silence"
    assert judged(lambda: attempt.same([1.0, 2.0], [1.0, 2.0, 3.0])) == "silent wrong"
    assert judged(lambda: attempt.finite([1.0, np.inf])) == "NaN in silence"
    assert judged(lambda: attempt.true(False)) == "silent wrong"
    # What is accepted though it has no right answer.
    assert judged(lambda: 3.0, "error") == "silent wrong"
    assert judged(lambda: (np.array([np.nan]), None), "error") == "NaN in silence"
    assert judged(lambda: attempt.same(1.0, 1.0), "error") == "silent wrong"


def test_errors_are_judged_by_where_they_are_raised_and_what_they_say():
    assert judged(lambda: npgp.checks.inputs(np.ones(3, int), "X"), "error") == "clear error"
    assert judged(lambda: npgp.checks.inputs(np.ones(3, int), "X"), "answer") == "refused wrongly"
    assert judged(lambda: npgp.checks.inputs(np.ones(3, int), "X"), "error", ("Z",)) == "unclear error"
    # The same words from elsewhere, and what is no check.
    assert judged(raised(ValueError("X has shape (3,); it must be (rows, columns).")), "error") == "unclear error"
    assert judged(lambda: jax.numpy.ones(3) @ jax.numpy.ones(4), "error", ()) == "unclear error"
    assert judged(lambda: npgp.linalg.cholesky("X"), "error", ()) == "unclear error"


@pytest.mark.parametrize(
    "message, kind",
    [
        ("X is 3; it must be 4.", "clear error"),
        ("X is 3", "unclear error"),
        ("Z is 3; it must be 4.", "unclear error"),
        ("X is 3;\nit must be 4.", "unclear error"),
        ("X is 3; it must be 4. " * 40, "unclear error"),
    ],
)
def test_messages_name_what_is_wrong_and_what_is_accepted(message, kind, monkeypatch):
    monkeypatch.setattr(attempt, "_HOME", str(loading.SCRIPTS.parent))
    assert judged(raised(ValueError(message)), "error") == kind


def test_warnings_are_words_too():
    def warned(message):
        import warnings

        warnings.warn(message, stacklevel=1)
        return attempt.same(1.0, 2.0)

    assert judged(lambda: warned("X is too large; use float64.")) == "clear warning"
    assert judged(lambda: warned("something")) == "silent wrong"
    assert judged(lambda: warned("X is too large; use float64."), "warning") == "clear warning"


def test_there_are_hundreds_of_attempts_of_every_item():
    found = load()
    assert len(found) >= 300
    items = {a.item for a in found.values()}
    assert items >= {*map(str, range(1, 21)), "gradients", "hangs", "files"}


def test_an_attempt_is_made_in_a_process_of_its_own(tmp_path, capsys):
    module = loading.script("break")
    path = tmp_path / "report.json"
    module.main(["--only", "wrong lengthscale [zero]", "--json", str(path)])
    report = json.loads(path.read_text())
    assert report["counts"] == {"clear error": 1} and report["attempts"] == 1
    assert "lengthscale is 0.0" in report["entries"][0]["said"]
    assert "clear error" in capsys.readouterr().out


def test_processes_that_stop_or_die_are_ended_and_the_rest_goes_on(monkeypatch, tmp_path):
    module = loading.script("break")
    child = tmp_path / "child.py"
    child.write_text(
        "import json, sys, time, os\n"
        "names, report = json.load(open(sys.argv[2])), open(sys.argv[4], 'a', buffering=1)\n"
        "for name in names:\n"
        "    report.write(json.dumps({'began': name}) + '\\n')\n"
        "    if name == 'sleeps': time.sleep(1000)\n"
        "    while name == 'spins': pass\n"
        "    if name == 'dies': os._exit(7)\n"
        "    report.write(json.dumps({'name': name, 'class': 'right answer', 'said': '', 'seconds': 0}) + '\\n')\n"
    )
    monkeypatch.setattr(module, "__file__", str(child))
    found = module.attempted(["a", "sleeps", "b", "spins", "dies", "c"], limit=2.0, idle=1.5)
    assert {entry["name"]: entry["class"] for entry in found} == {
        "a": "right answer",
        "sleeps": "hang",
        "b": "right answer",
        "spins": "hang",
        "dies": "unclear error",
        "c": "right answer",
    }


def test_wide_algebra_is_that_of_dense_matrices():
    rng = np.random.default_rng(0)
    X, Z, y = rng.normal(size=(2, 7, 2)), rng.normal(size=(2, 3, 2)), rng.normal(size=(2, 7))
    l, variance, noise = (np.array(v, np.longdouble) for v in ([0.7, 1.1], [1.3, 0.4], [0.2, 0.01]))
    K = wide.gram("Matern32", X, X, l, variance).astype(float)
    r = np.linalg.norm(X[:, :, None] - X[:, None], axis=-1) / l[:, None, None].astype(float) * np.sqrt(3)
    np.testing.assert_allclose(K, variance[:, None, None].astype(float) * (1 + r) * np.exp(-r), rtol=1e-12)
    full = K + noise[:, None, None].astype(float) * np.eye(7)
    expected = [
        -0.5 * (y[i] @ np.linalg.solve(full[i], y[i]) + np.linalg.slogdet(2 * np.pi * full[i])[1]) for i in range(2)
    ]
    np.testing.assert_allclose(
        wide.log_evidence("Matern32", X, y, l, variance, noise).astype(float), expected, rtol=1e-12
    )

    jitter = np.array([[1e-6, 1e-6, 1e-4], [1e-3, 1e-3, 1e-5]])  # of blocks of two points and of one
    of = wide.influence("Matern32", X, y, Z, l, variance, noise, jitter)
    Kuu, Kuf = (wide.gram("Matern32", Z, other, l, variance).astype(float) for other in (Z, X))
    for i in range(2):
        nugget, s2 = np.diag(jitter[i]) * float(variance[i]), float(noise[i])
        V = np.linalg.solve(Kuu[i] + nugget, Kuf[i])
        expected = np.linalg.solve(Kuf[i].T @ V + s2 * np.eye(7), y[i])
        np.testing.assert_allclose(of.alpha[i].astype(float), expected, rtol=1e-8)
        np.testing.assert_allclose(of.rows[i].astype(float), V, rtol=1e-8)
        np.testing.assert_allclose(of.points[i].astype(float), V @ expected, rtol=1e-8)
        A = np.linalg.solve(np.linalg.cholesky(Kuu[i] + nugget), Kuf[i])
        np.testing.assert_allclose(of.mean[i].astype(float), A @ expected, rtol=1e-8)
        np.testing.assert_allclose(of.scale[i].astype(float) ** 2, 1 + np.sum(A**2, -1) / s2, rtol=1e-8)
        np.testing.assert_allclose(of.inverse[i].astype(float) @ (np.eye(3) + A @ A.T / s2), np.eye(3), atol=1e-8)


def test_allowance_is_no_less_than_what_rounded_covariances_change():
    # The largest excess of float32: noise near the resolution of the variance, y that the points do not explain.
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(20, 24, 1)), rng.normal(size=(20, 24))
    Z, one = X[:, :8], np.ones(20, np.longdouble)
    data, jitter, eps = ("RBF", X, y, Z, 10 * one, one, 1e-6 * one), np.full((20, 8), 1e-5), 2.0**-23
    of, evidence = wide.influence(*data, jitter), wide.log_evidence(*data[:3], *data[4:])
    allowed = wide.allowances(y, one, 1e-6 * one, of, evidence, eps, one * 1e-5)
    Kuu = wide.gram("RBF", Z, Z, 10 * one, one) + 1e-5 * np.eye(8)

    def fit(Kuu, Kuf):
        return [
            -0.5 * b @ np.linalg.solve(k.T @ np.linalg.solve(K, k) + 1e-6 * np.eye(24), b)
            for K, k, b in zip(Kuu.astype(float), Kuf.astype(float), y, strict=True)
        ]

    Kuf = wide.gram("RBF", Z, X, 10 * one, one)
    moved = np.abs(np.subtract(fit(Kuu, Kuf.astype(np.float32)), fit(Kuu, Kuf)))
    assert np.all(moved < allowed["allowance"]) and np.any(moved > 10 * allowed["rounding"])
    assert np.all(allowed["allowance"] > allowed["rounding"])
    assert np.all(allowed["allowance"] - allowed["rounding"] < 1.01 * eps / 1e-5 * (np.abs(evidence) + 24))


def test_stress_counts_what_is_above_beyond_its_allowance():
    module = loading.script("stress")
    # By .9 out of order, of which twice the allowance is allowed.
    bounds = np.array([[-5.0, -4.0, -3.0, -2.0, -1.0], [-5.0, -4.0, -4.9, -2.0, 0.5]], np.longdouble)
    nothing = np.zeros(2, bool)
    of = dict(upper=np.array([1.0, -0.5]), evidence=np.zeros(2), rounding=np.full(2, 0.1), not_finite=nothing)
    checks = module.judged(bounds, allowance=np.full(2, 0.4), **of)["checks"]
    wrong = {name: (c["above"], c["violations"]) for name, c in checks.items() if c["above"]}
    assert wrong == {"full": (1, 1), "shared ≤ tight": (1, 1), "evidence ≤ upper": (1, 1)}
    checks = module.judged(bounds, allowance=np.full(2, 0.6), **of)["checks"]
    assert not any(c["violations"] for c in checks.values()) and checks["full"]["share_of_allowance"] == 0.5 / 0.6


@pytest.mark.slow  # to compile
def test_stress_is_passed_by_a_few_problems(tmp_path, capsys):
    module = loading.script("stress")
    path = tmp_path / "stress.json"
    arguments = ["problems", "line", "--quick", "--precisions", "float64", "--json", str(path)]
    module.main([*arguments, "--markdown", str(tmp_path / "stress.md")])
    figures = json.loads(path.read_text())["figures"]["float64"]
    assert figures["problems"]["not_finite"] == 0 and figures["line"]["RBF"]["svi"]["steps"] == 2
    assert "no violation" in capsys.readouterr().out
    assert "No violation" in (tmp_path / "stress.md").read_text()


@pytest.mark.slow
def test_stress_of_kin40k(data_dir):
    module = loading.script("stress")
    report = module.main(["kin40k", "--quick", "--precisions", "float32"])
    found = report["figures"]["float32"]["kin40k"]
    assert found["rows"] == 600 and found["in_order"] and found["steps"] == 20
