"""The certificate: its interval holds the evidence, and its advice is what dense algebra says."""

import dataclasses
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import npgp
from npgp.collapsed import CollapsedGP
from npgp.collapsed.certificates import certificate, evidence_bounds
from npgp.conditionals import Grouped, Prior, Shared, Tight
from npgp.features import Points
from npgp.kernels import RBF, Matern32
from npgp.sparse.groups import consecutive, median_split
from npgp.sparse.projection import factorize
from npgp.variational.updates import ScaledProjection

MODULE = importlib.import_module("npgp.collapsed.certificates")
N = 15
SIZE = 4  # of consecutive groups; the last is shorter
GROUPS = [np.arange(N)[i : i + SIZE] for i in range(0, N, SIZE)]
CONDITIONALS = ("prior", "shared", "tight", "grouped", "full")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Two columns, two blocks of inducing inputs, one noise variance for each row."""

    X: np.ndarray
    Z: np.ndarray
    O: np.ndarray
    y: np.ndarray
    noise: np.ndarray
    lengthscale: float
    variance: float

    @classmethod
    def random(cls, seed: int):
        rng = np.random.default_rng(seed)
        X, Z, O = (rng.normal(size=(rows, 2)) for rows in (N, 2, 3))
        lengthscale, variance = np.exp(rng.normal([1.3, 0.5], [0.7, 0.5]))
        noise = variance * np.exp(rng.normal(-3.5, 0.7, size=N))
        K = oracles.stationary("Matern32", X, X, lengthscale, variance)
        y = np.linalg.cholesky(K + np.diag(noise)) @ rng.normal(size=N)
        return cls(X, Z, O, y, noise, lengthscale, variance)

    @property
    def kernel(self) -> Matern32:
        return Matern32(self.lengthscale, variance=self.variance)

    @property
    def formula(self):
        return functools.partial(oracles.stationary, "Matern32", lengthscale=self.lengthscale, variance=self.variance)

    def joint(self, *blocks) -> oracles.Joint:
        return oracles.Joint.of(self.formula, blocks, self.X, 1e-8)

    def greedy(self, given: list[np.ndarray], count: int) -> np.ndarray:
        """Rows of the largest variance given the blocks and the rows before."""
        chosen: list[np.ndarray] = []
        for _ in range(count):
            D = self.joint(*given, *chosen).residual() if given or chosen else self.formula(self.X, self.X)
            chosen.append(self.X[[np.argmax(np.diag(D))]])
        return np.concatenate(chosen)


@functools.cache
def certified(seed):
    """A random problem, its second block moving the mean only, and its certificate."""
    problem = Problem.random(seed)
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "MORE_POINTS", 6)  # few, and of as many the shapes are the same
        groups = consecutive(N, SIZE)
        blocks, kinds = [problem.Z, problem.O], ("dense", "mean-only")
        return problem, certificate(
            problem.kernel,
            problem.X,
            problem.y,
            blocks,
            noise_variance=problem.noise,
            covariances=kinds,
            grouped=Grouped(groups),
        )


#: The six more points are as many as are needed in the first two, and too few in the others.
SEEDS = [2, 3, 6]


@pytest.mark.parametrize("seed", SEEDS[1:])
def test_interval_holds_the_evidence(seed):
    problem, found = certified(seed)
    joint = problem.joint(problem.Z, problem.O)
    assert tuple(found.bounds) == CONDITIONALS
    for name, bound in found.bounds.items():
        expected = joint.bound(problem.y, problem.noise, [True, False], name, GROUPS)
        assert bound == pytest.approx(expected, rel=1e-7), name
    exact = oracles.log_normal(problem.y, joint.K_ff + np.diag(problem.noise))
    assert found.exact == pytest.approx(exact, rel=1e-8)
    D = joint.residual()
    upper = oracles.titsias_upper(joint.K_ff - D, np.linalg.eigvalsh(D)[-1], problem.y, problem.noise)
    assert found.upper == pytest.approx(upper, rel=1e-7)
    assert found.lower == max(found.bounds.values()) < exact < found.upper
    assert found.gap == found.upper - found.lower and found.advice.gap_per_row == found.gap / N


def test_many_rows_leave_out_what_is_cubic(float64):
    problem, whole = certified(SEEDS[0])
    grouped, covariances = Grouped(consecutive(N, SIZE)), ("dense", "mean-only")
    blocks = [problem.Z, problem.O]
    found = certificate(
        problem.kernel,
        problem.X,
        problem.y + 3,
        blocks,
        noise_variance=problem.noise,
        offset=3.0,
        exact_rows=N - 1,
        grouped=grouped,
        covariances=covariances,
    )
    gp = CollapsedGP(
        problem.kernel, problem.X, blocks, noise_variance=problem.noise, conditional=grouped, covariances=covariances
    )
    assert found.lower == pytest.approx(float(jax.jit(gp.log_prob)(problem.y)), rel=1e-9)
    assert found.exact is None and tuple(found.bounds) == CONDITIONALS[:4]
    assert found.bounds == pytest.approx({name: whole.bounds[name] for name in CONDITIONALS[:4]}, rel=1e-9)
    joint = problem.joint(problem.Z, problem.O)
    D = joint.residual()
    upper = oracles.titsias_upper(joint.K_ff - D, np.trace(D), problem.y, problem.noise)
    assert found.upper == pytest.approx(upper, rel=1e-7) and found.upper > whole.upper
    assert "it is" not in str(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_advice_is_dense_algebra(seed):
    problem, found = certified(seed)
    advice, y, noise = found.advice, problem.y, problem.noise
    best = max(CONDITIONALS[:4], key=lambda name: found.bounds[name])
    assert advice.conditional == best

    def bound(blocks, learned):
        return problem.joint(*blocks).bound(y, noise, learned, best, GROUPS)

    blocks = [problem.Z, problem.O]
    now = bound(blocks, [True, False])
    assert advice.learning_gain == pytest.approx(bound(blocks, [True, True]) - now, abs=1e-5)
    assert advice.fusing_gain == pytest.approx(bound([np.concatenate(blocks)], [True]) - now, abs=1e-5)

    # What the learned block leaves: mean-only blocks explain no variance.
    ratio = np.diag(problem.joint(problem.Z).residual()) / noise
    np.testing.assert_allclose(advice.row_penalty, 0.5 * np.log1p(ratio), atol=1e-8)
    assert advice.penalty == pytest.approx(0.5 * np.sum(np.log1p(ratio)), rel=1e-8)
    rows = round(advice.half_share * N)
    largest = np.sort(advice.row_penalty)[::-1]
    assert np.sum(largest[: rows - 1]) < 0.5 * advice.penalty <= np.sum(largest[:rows])

    points = problem.greedy([problem.Z], 6)
    penalties = [problem.joint(problem.Z, points[:i]).penalty([True, True], noise, "tight") for i in range(7)]
    assert advice.penalty_goal == pytest.approx(max(1.0, 0.1 * advice.penalty))
    reached = [i for i, penalty in enumerate(penalties) if penalty <= advice.penalty_goal]
    assert advice.points_needed == (reached[0] if reached else None)
    assert advice.points_tried == (reached[0] if reached else 6)
    m = advice.points_tried
    assert advice.points_penalty == pytest.approx(penalties[m], rel=1e-6)
    gain = bound([np.concatenate([problem.Z, points[:m]]), problem.O], [True, False]) - now
    assert advice.learned_points_gain == pytest.approx(gain, abs=1e-5)
    mean_only = problem.greedy(blocks, m)
    # In the last block and in one of its own: the same.
    for more in ([problem.Z, np.concatenate([problem.O, mean_only])], [*blocks, mean_only]):
        gain = bound(more, [True] + [False] * (len(more) - 1)) - now
        assert advice.mean_only_points_gain == pytest.approx(gain, abs=1e-5)


def test_problems_are_of_both_kinds():
    assert [certified(seed)[1].advice.points_needed for seed in SEEDS] == [6, 6, None]


def test_more_points_beside_a_block_that_is_not_dense(float64, monkeypatch):
    monkeypatch.setattr(MODULE, "MORE_POINTS", 2)
    problem = Problem.random(0)
    found = certificate(
        problem.kernel, problem.X, problem.y, problem.Z, noise_variance=0.01, covariances=("mean-only",), exact_rows=0
    )
    advice = found.advice
    assert advice.points_needed is None and advice.points_tried == 2
    assert advice.penalty == pytest.approx(0.5 * N * np.log1p(problem.variance / 0.01))
    points = problem.greedy([], 2)

    def bound(blocks, learned):
        return problem.joint(*blocks).bound(problem.y, 0.01, learned, advice.conditional, default_groups(problem.X))

    gain = bound([points, problem.Z], [True, False]) - bound([problem.Z], [False])
    assert advice.learned_points_gain == pytest.approx(gain, abs=1e-5)
    assert advice.fusing_gain is None and "Fusing" not in str(found)
    gain = bound([problem.Z], [True]) - bound([problem.Z], [False])
    assert advice.learning_gain == pytest.approx(gain, abs=1e-5)


def default_groups(X):
    """CollapsedGP's for few inducing inputs: of four rows at most."""
    groups = median_split(X, 4)
    return [rows[mask] for rows, mask in zip(groups.rows, groups.mask, strict=True)]


@pytest.mark.parametrize("noise", [0.1, 1e-4])
def test_inducing_points_at_all_inputs_leave_nothing_open(x64, noise):
    rng = np.random.default_rng(0)
    X, y = np.linspace(0, 5, 12, dtype=x64)[:, None], rng.normal(size=12).astype(x64)
    found = certificate(Matern32(0.5), X, y, X, noise_variance=noise, grouped=Grouped(4))
    # The jitter leaves a little of the prior variance unexplained, and noise weighs it.
    jitter = {"float32": 1e-5, "float64": 1e-8}[jnp.dtype(x64).name]
    K = oracles.stationary("Matern32", X, X, 0.5)
    exact = oracles.log_normal(y.astype(float), K + noise * np.eye(12))
    allowed = 12 * jitter / noise * (1 + np.max(np.square(np.linalg.solve(K + noise * np.eye(12), y))) * noise)
    for value in (found.lower, found.exact, found.upper, *found.bounds.values()):
        assert value == pytest.approx(exact, abs=allowed + 5 * found.rounding)
    assert found.advice.points_needed == found.advice.points_tried == 0
    assert found.advice.learned_points_gain is None and found.advice.mean_only_points_gain is None
    assert "little left to explain" in str(found)
    # Single precision with little noise is said to be what it is.
    assert ("Beware: rounding" in str(found)) == (x64 == jnp.float32 and noise < 0.1)


@pytest.mark.parametrize("shortest, noises", [(0.5, (1e-1, 1e-4)), (50.0, (1e-5, 1e-7))])
def test_rounding_is_of_the_order_of_magnitude_said(shortest, noises):
    # Each in its own precision, of the same numbers; the largest of eight are .2 and .4 of what is said. With long
    # lengthscales and a noise that is all but lost in the variance, most is that of the fit.
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0, 10, size=(8, 40, 1)), axis=1)
    y = rng.normal(size=(8, 40))
    lengthscale, noise = shortest * np.exp(rng.normal(0.2, 0.5, size=8)), np.geomspace(*noises, 8)
    problems = [np.float32(value) for value in (X, y, lengthscale, noise)]

    @jax.jit
    @jax.vmap
    def figures(X, y, lengthscale, noise):
        block = Points(X[::4])
        conditionals = {"prior": Prior(), "shared": Shared(), "tight": Tight()}
        return evidence_bounds(RBF(lengthscale), X, y, noise, 1e-5, (block,), ("dense",), conditionals, False)

    single = jax.tree.map(np.asarray, figures(*problems))
    with jax.enable_x64(True):
        double = jax.tree.map(np.asarray, figures(*[np.float64(value) for value in problems]))
    for name, bound in single["bounds"].items():
        error = np.abs(bound - double["bounds"][name]) / single["rounding"]
        assert 0.1 < np.max(error) < 1.0, (name, error)


def test_rounding_is_of_the_data_and_of_the_fit(float64):
    # With long lengthscales the weights of the points, α = K_uu⁻¹ E[u], are large, and of opposite signs.
    rng = np.random.default_rng(1)
    X, noise = np.sort(rng.uniform(0, 10, 30))[:, None], 1e-3 * np.exp(rng.normal(size=30))
    y, Z = rng.normal(size=30), X[::6]
    K_uu, K_uf = (oracles.stationary("RBF", Z, other, 3.0, 2.0) for other in (Z, X))
    alpha = np.linalg.solve(K_uu + 1e-6 * 2.0 * np.eye(5) + (K_uf / noise) @ K_uf.T, K_uf @ (y / noise))
    w, left = np.linalg.norm(alpha), np.linalg.norm((y - K_uf.T @ alpha) / noise)
    fit, data = 0.5 * 2.0 * w * (w + 2.0 * left), np.sum(1.0 + (2.0 + y**2) / noise)
    assert fit > 2.0 * data
    found = evidence_bounds(
        RBF(3.0, variance=2.0), X, y, noise, 1e-6, (Points(Z),), ("dense",), {"tight": Tight()}, False
    )
    assert found["rounding"] == pytest.approx(np.finfo(float).eps * (data + fit), rel=1e-4)


def test_rounding_makes_no_negative_residual():
    # One row, and the inducing point at it: v − (v/√v)² is rounding, of either sign, and as large as the noise.
    variances = np.linspace(1.0, 2.0, 64, dtype=np.float32)
    X, y = np.zeros((1, 1), np.float32), np.full(1, 0.3, np.float32)

    @jax.jit
    @jax.vmap
    def figures(variance):
        block, noise = Points(X), 5e-8 * variance
        kernel = RBF(variance=variance)
        projector = factorize(kernel, (block,), 0.0)
        D = projector.residual_covariance(X, projector(X).A)
        return D[0, 0], evidence_bounds(kernel, X, y, noise, 0.0, (block,), ("dense",), {"tight": Tight()}, True)

    residual, found = jax.tree.map(np.asarray, figures(variances))
    assert np.min(residual) < -5e-8 * np.min(variances)  # it would make the noise negative
    assert np.all(np.isfinite(found["upper"]))
    exact = [oracles.log_normal(y.astype(float), np.array([[v * (1.0 + 5e-8)]])) for v in variances.astype(float)]
    assert np.all(found["upper"] > np.array(exact) - found["rounding"])


def test_report_is_of_these_numbers():
    _, found = certified(SEEDS[0])
    report = str(found)
    lower, upper, exact = re.search(r"between (\S+) and (\S+) nats; it is (\S+)\.\n", report).groups()
    # Rounded outwards, not further than one in the last place shown.
    last = 10.0 ** -len(lower.partition(".")[2])
    assert float(lower) <= found.lower < float(lower) + last < float(exact) + last
    assert float(upper) - last < found.upper <= float(upper)
    assert float(exact) == pytest.approx(found.exact, abs=last)
    advice = found.advice
    assert f"{100 * advice.half_share:.0f}% of the rows" in report
    assert f"{advice.points_tried} more inducing points would bring" in report
    gains = [float(gain) for gain in re.findall(r"would raise the 'grouped' bound by (\S+) nats", report)]
    told = (advice.learning_gain, advice.fusing_gain, advice.learned_points_gain, advice.mean_only_points_gain)
    np.testing.assert_allclose(gains, [gain for gain in told if gain >= 0.01], rtol=0.06)

    def said(**changes):
        return str(dataclasses.replace(advice, **changes))

    assert "would lower the 'tight' bound by 1.2 nats" in said(learning_gain=-1.234, conditional="tight")
    assert "Fusing all blocks into one would leave the 'grouped' bound as it is" in said(fusing_gain=-1e-5)
    assert "1 more inducing point would only bring the cost of 123 nats down to 0.0046 nats" in said(
        points_tried=1, points_needed=None, penalty=123.4, points_penalty=0.00456
    )
    assert "Beware" not in report
    assert "move these figures by 7.0 nats" in str(dataclasses.replace(found, rounding=7.0))
    touching = dataclasses.replace(found, upper=found.lower)
    assert f"{found.lower:.4f}"[:-1] in str(touching) and "less than 0.0001 nats apart" in str(touching)


def test_bad_input_is_an_error_in_a_sentence(float64):
    problem, _ = certified(SEEDS[0])
    X, Z, y = problem.X, problem.Z, problem.y

    def refused(words, X=X, y=y, inducing=Z, noise=0.1, error=ValueError, kernel=problem.kernel, **settings):
        with pytest.raises(error, match=words):
            certificate(kernel, X, y, inducing, noise_variance=noise, **settings)

    refused(r"y has shape \(14,\); it must be \(15,\)", y=y[:14])
    refused(r"y has shape \(2, 15\)", y=np.stack([y, y]))
    refused("y has NaN", y=np.where(y > 0, y, np.nan))
    refused("offset has NaN", offset=np.nan)
    refused(r"offset has shape \(3,\)", offset=np.zeros(3))
    refused(r"X has shape \(15,\)", X=X[:, 0])
    refused("noise_variance is 0.0", noise=0.0)
    refused("empty list", inducing=[])
    refused("covariances is .* must give one of", covariances=("dense", "dense"))
    refused("a partition of 14 rows, but there are 15", grouped=Grouped(consecutive(14, 2)))
    refused("groups is 4; .* divide the 15 rows", grouped=Grouped(4))
    refused("exact_rows is 'all'", exact_rows="all", error=TypeError)
    with pytest.raises(TypeError, match="certificate was called on traced values"):
        jax.jit(lambda y: certificate(problem.kernel, X, y, Z, noise_variance=0.1).lower)(y)
    # Of the shapes of the problems above, and with numbers that overflow.
    overflow = dict(noise=problem.noise, inducing=[Z, problem.O], covariances=("dense", "mean-only"))
    refused(
        "figure is (nan|-?inf) in float64: check the hyperparameters",
        **overflow,
        kernel=Matern32(np.float64(1.0), variance=np.float64(1e308)),
        error=FloatingPointError,
        grouped=Grouped(consecutive(N, SIZE)),
    )


def test_upper_bounds_are_above_where_float32_has_no_factor():
    """Of points on a line with a millionth of noise: what the factorization takes on the diagonal is made up for."""
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0, 10, (450, 1)), axis=0)
    y = np.sin(2 * X[:, 0]) + 1e-3 * rng.normal(size=450)
    Z, noise = np.linspace(0, 10, 300)[:, None], 1e-6
    upper = npgp.collapsed.upper_bound(RBF(1.0), *(np.float32(x) for x in (X, y, Z)), noise_variance=np.float32(noise))
    scaled = ScaledProjection.of(factorize(RBF(1.0), [Points(np.float32(Z))])(np.float32(X)), np.float32(noise))
    assert np.max(scaled.added) > 1.0
    with pytest.raises(FloatingPointError, match="no Cholesky factor, as noise_variance is below"):
        npgp.collapsed.exact_log_evidence(RBF(1.0), np.float32(X), np.float32(y), noise_variance=np.float32(1e-20))
    with jax.enable_x64(True):
        X, y = np.float64(np.float32(X)), np.float64(np.float32(y))
        evidence = float(
            npgp.collapsed.exact_log_evidence(RBF(1.0), X, y, noise_variance=np.float64(np.float32(noise)))
        )
        wide = ScaledProjection.of(factorize(RBF(1.0), [Points(Z)])(X), noise)
        assert np.all(np.asarray(wide.added) == 0.0)
    # Each value of the diagonal is made up for by what it took; by the largest of all it would be 730 nats.
    assert np.isfinite(upper) and evidence < float(upper) < evidence + 300.0
