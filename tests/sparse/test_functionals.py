"""Rows that are linear functionals: their covariances, and what is made of these, against dense algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import npgp
from npgp.functionals import at, average, derivative
from npgp.functionals import rows as functional_rows

LENGTHSCALE = np.array([0.8, 1.3])
KERNEL = npgp.RBF(LENGTHSCALE, variance=1.7)
NOISE = 0.1


def rbf(A, B):
    return 1.7 * np.exp(-0.5 * np.sum(np.square((A[:, None] - B) / LENGTHSCALE), -1))


def slopes(A, B, dim):
    """``Cov[f(a), ∂f/∂x_dim (b)]``."""
    return rbf(A, B) * (A[:, None, dim] - B[None, :, dim]) / LENGTHSCALE[dim] ** 2


def both_slopes(A, B, dim):
    away = (A[:, None, dim] - B[None, :, dim]) / LENGTHSCALE[dim] ** 2
    return rbf(A, B) * (1.0 / LENGTHSCALE[dim] ** 2 - np.square(away))


RNG = np.random.default_rng(0)
X, X2 = RNG.normal(size=(2, 6, 2))
Z = [RNG.normal(size=(5, 2)), RNG.normal(size=(3, 2))]
POINTS, WEIGHTS, B = RNG.normal(size=(6, 3, 2)), RNG.normal(size=(6, 3)), RNG.normal(size=(4, 6))
FACTOR = RNG.normal(size=6)
DIM = 1
#: All points that rows are made of: values at these, and slopes at X.
VALUES = np.concatenate([X, X2, POINTS.reshape(-1, 2)])
K_VALUES = np.block([[rbf(VALUES, VALUES), slopes(VALUES, X, DIM)], [slopes(VALUES, X, DIM).T, both_slopes(X, X, DIM)]])


def selected(first, weights):
    """The matrix that takes values to rows; row n has these weights from place ``first + n J`` on."""
    found = np.zeros((len(weights), len(K_VALUES)))
    for n, w in enumerate(weights):
        found[n, first + n * len(w) : first + (n + 1) * len(w)] = w
    return found


ONES = np.ones((6, 1))
AT, AT2, AVERAGE, SLOPE = selected(0, ONES), selected(6, ONES), selected(12, WEIGHTS), selected(30, ONES)
MEAN, SAME = selected(12, np.full((6, 3), 1 / 3)), selected(12, np.tile(WEIGHTS[0], (6, 1)))
#: Rows, and the matrices that make them of values and slopes.
ROWS = {
    "differences": (lambda: at(X) - FACTOR * at(X2), AT - FACTOR[:, None] * AT2),
    "averages": (lambda: average(POINTS, WEIGHTS), AVERAGE),
    "means, and values": (lambda: average(POINTS) - at(X), MEAN - AT),
    "averages of the same weights": (lambda: average(POINTS, WEIGHTS[0]) * FACTOR, FACTOR[:, None] * SAME),
    "slopes": (lambda: derivative(X, DIM), SLOPE),
    "sums of values": (lambda: B @ at(X), B @ AT),
    "sums of all": (lambda: B @ (average(POINTS, WEIGHTS) + 2.0 * derivative(X, -1)), B @ (AVERAGE + 2.0 * SLOPE)),
    "one after the other": (
        lambda: (B @ at(X)).followed_by(average(POINTS, WEIGHTS)),
        np.concatenate([B @ AT, AVERAGE]),
    ),
    "some": (lambda: average(POINTS, WEIGHTS).take(np.array([4, 0])), AVERAGE[[4, 0]]),
}
every_kind = pytest.mark.parametrize("kind", list(ROWS))


def joint(matrix, blocks):
    Z_all = np.concatenate(blocks)
    K_uf = np.concatenate([rbf(Z_all, VALUES), slopes(Z_all, X, DIM)], 1) @ matrix.T
    K_uu = rbf(Z_all, Z_all)
    K_uu += 1e-8 * np.diag(np.diag(K_uu))
    return oracles.Joint(tuple(map(len, blocks)), K_uu, K_uf, matrix @ K_VALUES @ matrix.T)


@every_kind
def test_covariances_are_those_of_the_sums_written_out(float64, kind):
    make, matrix = ROWS[kind]
    rows, expected = make(), matrix @ K_VALUES @ matrix.T
    other, other_matrix = ROWS["slopes"][0](), SLOPE
    found = jax.jit(
        lambda rows: (
            functional_rows.variance(KERNEL, rows),
            functional_rows.covariance(KERNEL, rows),
            functional_rows.covariance(KERNEL, rows, other),
            functional_rows.covariance(KERNEL, jnp.asarray(X2), rows),
            functional_rows.within_groups(KERNEL, rows, npgp.sparse.consecutive(len(rows), 2))[0],
        )
    )(rows)
    everything = (
        np.diag(expected),
        expected,
        matrix @ K_VALUES @ other_matrix.T,
        AT2 @ K_VALUES @ matrix.T,
        expected[:2, :2],
    )
    for a, b in zip(found, everything, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_chunks_change_nothing_and_gradients_are_those_of_finite_differences(float64, monkeypatch):
    block = npgp.features.Points(Z[0])

    def value(arrays, some=slice(None)):
        kernel = npgp.RBF(arrays["lengthscale"])
        rows = average(arrays["points"][some], arrays["weights"]) + at(arrays["X"][some])
        variance, cross = functional_rows.variance(kernel, rows), functional_rows.cross(block, kernel, rows)
        return jnp.sum(jnp.log(variance)) + jnp.sum(jnp.sin(cross))

    arrays = {"lengthscale": 1.3, "points": POINTS, "weights": np.abs(WEIGHTS[0]), "X": X}
    whole = jax.jit(lambda arrays: value(jax.tree.map(jnp.asarray, arrays)))(arrays)
    monkeypatch.setattr(functional_rows, "entries_at_once", lambda: 20)  # some rows at a time
    compiled = jax.jit(lambda arrays: jax.value_and_grad(value)(jax.tree.map(jnp.asarray, arrays)))
    found, slopes = compiled(arrays)
    np.testing.assert_allclose(found, whole, rtol=1e-12)
    for name, slope in slopes.items():
        direction = np.random.default_rng(1).normal(size=np.shape(arrays[name]))
        ends = [compiled(arrays | {name: np.asarray(arrays[name]) + h * direction})[0] for h in (1e-5, -1e-5)]
        expected = (float(ends[0]) - float(ends[1])) / 2e-5
        np.testing.assert_allclose(np.sum(np.asarray(slope) * direction), expected, rtol=1e-6, err_msg=name)


def test_collapsed_bounds_are_dense_algebra_and_below_the_evidence(float64):
    (make, matrix), blocks = ROWS["sums of all"], 2
    rows, dense = make(), joint(matrix, Z[:blocks])
    y = np.random.default_rng(1).normal(size=len(rows))
    groups = npgp.sparse.consecutive(len(rows), 2)
    given = {"prior": "prior", "tight": "tight", "grouped": npgp.conditionals.Grouped(groups)}

    @jax.jit
    def bounds(rows, y):
        options = dict(noise_variance=NOISE)
        gps = {name: npgp.CollapsedGP(KERNEL, rows, Z[:blocks], conditional=c, **options) for name, c in given.items()}
        evidence = npgp.collapsed.exact_log_evidence(KERNEL, rows, y, **options)
        return {name: gp.log_prob(y) for name, gp in gps.items()} | {"evidence": evidence}

    found = bounds(rows, y)
    numbers = [g[m] for g, m in zip(groups.rows, groups.mask, strict=True)]
    for name in given:
        np.testing.assert_allclose(found[name], dense.bound(y, NOISE, [True] * blocks, name, numbers), atol=1e-6)
    evidence = oracles.log_normal(y, dense.K_ff + NOISE * np.eye(len(y)))
    np.testing.assert_allclose(found["evidence"], evidence, rtol=1e-9)
    assert max(found[name] for name in given) < evidence


def test_bounds_of_random_functionals_are_in_order_and_below_the_evidence(float64):
    names = ("prior", "tight", "grouped", "full")

    @jax.jit
    def bounds(points, weights, B, y):
        rows = B @ (average(points, weights) - derivative(points[:, 0], 0))
        groups = npgp.conditionals.Grouped(npgp.sparse.consecutive(6, 3))
        given = [groups if name == "grouped" else name for name in names]
        found = [npgp.CollapsedGP(KERNEL, rows, Z[0], noise_variance=NOISE, conditional=c).log_prob(y) for c in given]
        K = functional_rows.covariance(KERNEL, rows) + NOISE * jnp.eye(6)
        half = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(K), y, lower=True)
        log_det = jnp.linalg.slogdet(K)[1]
        return jnp.stack([*found, -0.5 * (half @ half + log_det + 6 * jnp.log(2 * jnp.pi))])

    for seed in range(12):
        rng = np.random.default_rng(seed)
        shapes = (6, 3, 2), (6, 3), (6, 6), (6,)
        values = bounds(*(np.exp(rng.normal()) * rng.normal(size=shape) for shape in shapes))
        assert np.all(np.diff(values) > -1e-9), seed


@pytest.mark.parametrize("order", ["points first", "functionals first"])
def test_inducing_features_may_be_functionals(float64, order):
    rows, matrix = B @ derivative(X, DIM) + 0.5 * (B @ at(X2)), B @ SLOPE + 0.5 * B @ AT2
    blocks, matrices = {
        "points first": ([X2, rows], [AT2, matrix]),
        "functionals first": ([rows, X2], [matrix, AT2]),
    }[order]
    seen_rows, seen = ROWS["differences"][0](), ROWS["differences"][1]
    M = np.concatenate(matrices)
    K_uu = M @ K_VALUES @ M.T
    K_uu += 1e-8 * np.diag(np.diag(K_uu))
    dense = oracles.Joint(tuple(map(len, matrices)), K_uu, M @ K_VALUES @ seen.T, seen @ K_VALUES @ seen.T)
    y = np.random.default_rng(1).normal(size=6)
    found = jax.jit(lambda y: npgp.CollapsedGP(KERNEL, seen_rows, blocks, noise_variance=NOISE).log_prob(y))(y)
    np.testing.assert_allclose(found, dense.bound(y, NOISE, [True, True], "tight"), atol=1e-5)


def test_posteriors_of_all_kinds_of_rows_are_one_gaussian(float64):
    make, matrix = ROWS["averages"]
    y = np.random.default_rng(1).normal(size=6)
    both = ROWS["sums of values"][0]().followed_by(derivative(X, DIM))

    @jax.jit
    def predict(y):
        posterior = npgp.CollapsedGP(KERNEL, make(), Z, noise_variance=NOISE).condition(y)
        found = posterior.mean(both), posterior.variance(both, batch_size=3), posterior.covariance(both)
        paths = posterior.draw_functions(jax.random.key(0), 2)
        slopes = posterior.derivative(X, DIM)[0]
        return [(b.loc, b.scale_tril) for b in posterior.q], *found, slopes, paths(B @ at(X)), paths(X) @ B.T

    q, found_mean, variance, found_covariance, slope, of_path, path = predict(y)
    target = np.concatenate([B @ AT, SLOPE])
    dense = joint(np.concatenate([matrix, target]), Z)
    mean, covariance = map(np.asarray, dense.predict([m for m, _ in q], [L @ L.T for _, L in q]))
    own = slice(6, None)
    np.testing.assert_allclose(found_mean, mean[own], atol=1e-6)
    np.testing.assert_allclose(variance, np.diag(covariance)[own], atol=1e-6)
    np.testing.assert_allclose(found_covariance, covariance[own, own], atol=1e-6)
    np.testing.assert_allclose(slope, mean[10:], atol=1e-6)
    np.testing.assert_allclose(of_path, path, atol=1e-9)  # a path's rows are what functionals make of it


@pytest.mark.parametrize("x64", [False], ids=["float32"], indirect=True)
def test_differences_at_close_points_keep_their_digits(x64):
    X = np.linspace(0.0, 1.0, 5)[:, None]
    close = X + np.float32(1e-3)
    rows = at(X.astype(np.float32)) - at(close.astype(np.float32))
    h = np.float64(close.astype(np.float32)) - np.float64(X.astype(np.float32))
    exact = -2.0 * np.expm1(-0.5 * np.square(h[:, 0]))
    contrasts = average(np.stack([X, close], 1).astype(np.float32), np.array([1.0, -1.0]))
    slopes = derivative(X.astype(np.float32)) - derivative(close.astype(np.float32))
    for found, right in ((rows, exact), (contrasts, exact), (slopes, 3.0 * exact)):
        variance = functional_rows.variance(npgp.RBF(1.0), found)
        np.testing.assert_allclose(variance, right, rtol=1e-4)  # 1e-6; .06 is rounding's
        np.testing.assert_allclose(jnp.diagonal(functional_rows.covariance(npgp.RBF(1.0), found)), right, rtol=1e-4)


@pytest.mark.parametrize("x64", [False], ids=["float32"], indirect=True)
def test_averages_are_computed_in_float32(x64):
    """Where nothing cancels float64 would take twice the time: 576 patches of a digit are 576² values."""
    points = np.random.default_rng(0).normal(size=(3, 40, 2)).astype(np.float32)
    weights = np.random.default_rng(1).uniform(size=40).astype(np.float32)

    def variance(weights):
        return functional_rows.variance(npgp.RBF(1.0), average(points, weights))

    with jax.enable_x64(True):
        exact = functional_rows.variance(npgp.RBF(1.0), average(np.float64(points), np.float64(weights)))
    np.testing.assert_allclose(jax.jit(variance)(weights), exact, rtol=1e-5)
    assert not functional_rows.weights_cancel(average(points, weights))
    assert functional_rows.weights_cancel(average(points, weights - weights.mean()))
    assert functional_rows.weights_cancel(average(points) + derivative(points[:, 0]) - derivative(points[:, 1]))


def test_no_array_of_all_rows_points_and_features_is_made(float64):
    points = jax.ShapeDtypeStruct((4000, 50, 1), jnp.float64)

    def project(points):
        features = [npgp.features.Points(np.linspace(0.0, 1.0, 100)[:, None])]
        return npgp.sparse.factorize(npgp.RBF(1.0), features)(average(points)).residual_variance()

    memory = jax.jit(project).lower(points).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 4000 * 100 * 50 / 10


def test_no_array_of_all_pairs_of_points_is_made(float64):
    points = jax.ShapeDtypeStruct((400, 196, 9), jnp.float64)
    gradient = jax.grad(lambda points: jnp.sum(functional_rows.variance(npgp.RBF(1.0), average(points))))
    memory = jax.jit(gradient).lower(points).compile().memory_analysis().temp_size_in_bytes
    pairs, own = 8 * 400 * 196**2, 8 * 400 * 196 * 9
    assert memory < 16 * 8 * functional_rows.entries_at_once() + 4 * own < pairs


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: average(X), r"points has shape \(6, 2\); it must be \(rows, points of a row, input dimensions\)"),
        (lambda: average(POINTS, WEIGHTS[:2]), r"weights has shape \(2, 3\); for these points it must be \(6, 3\)"),
        (lambda: derivative(X, 2), "dim is 2; it must be the number of one of the 2 columns of X"),
        (lambda: at(X) + at(X[:3]), r"cannot add functionals of shapes \(6, 2\) and \(3, 2\): rows go by rows"),
        (lambda: at(X) * np.ones(4), r"6 functionals are multiplied by an array of shape \(4,\); it must be a number"),
        (lambda: np.ones((2, 4)) @ at(X), r"the matrix has shape \(2, 4\); it must have a column for each of 6 rows"),
        (
            lambda: functional_rows.variance(npgp.kernels.Matern12(1.0), derivative(X)),
            "functions drawn from Matern12 have no derivative; those from Matern32",
        ),
        (
            lambda: functional_rows.variance(npgp.kernels.Coregion(npgp.RBF(1.0), np.eye(2)), derivative(X, 1)),
            "column 1 holds levels",
        ),
    ],
)
def test_what_is_refused(make, error):
    with pytest.raises(ValueError, match=error):
        make()


def test_classical_approximations_take_functionals(float64):
    make, matrix = ROWS["averages"]
    y, dense = np.random.default_rng(1).normal(size=6), joint(matrix, Z[:1])
    Q = dense.K_uf.T @ np.linalg.solve(dense.K_uu, dense.K_uf)
    K = Q + np.diag(np.diag(dense.K_ff - Q)) + NOISE * np.eye(6)

    @jax.jit
    def found(y):
        fitc, dtc = (npgp.ApproximateGP(KERNEL, make(), Z[0], noise_variance=NOISE, method=m) for m in ("fitc", "dtc"))
        return fitc.log_prob(y), dtc.condition(y).mean(make())

    density, fitted = found(y)
    assert density == pytest.approx(oracles.log_normal(y, K), abs=1e-5)
    np.testing.assert_allclose(fitted, Q @ np.linalg.solve(Q + NOISE * np.eye(6), y), atol=1e-5)


def test_a_certificate_of_functionals_is_dense_algebra(float64):
    rows, matrix = ROWS["sums of all"][0](), ROWS["sums of all"][1]
    y = np.random.default_rng(1).normal(size=4)
    found = npgp.certificate(KERNEL, rows, y, Z[0], noise_variance=NOISE)
    dense = joint(matrix, Z[:1])
    assert found.exact == pytest.approx(oracles.log_normal(y, dense.K_ff + NOISE * np.eye(4)))
    assert found.bounds["tight"] == pytest.approx(dense.bound(y, NOISE, [True], "tight"), abs=1e-6)
    assert list(found.bounds) == ["prior", "shared", "tight", "grouped", "full"]
    assert found.bounds["tight"] < found.bounds["full"] < found.exact < found.upper
    # Points that are tried are among those that rows are made of: with all of these nothing is left but for slopes.
    assert found.advice.points_tried > 0 and found.advice.points_penalty < found.advice.penalty
    assert found.bounds["tight"] < found.bounds["grouped"] <= found.bounds["full"]


def test_whether_points_are_enough_for_functionals(float64):
    rng = np.random.default_rng(0)
    points = np.sort(rng.uniform(0.0, 10.0, 60))[:, None, None] + np.linspace(0.0, 0.5, 4)[:, None]
    rows, y = average(points), np.sin(2.0 * points[..., 0]).mean(1) + 0.05 * rng.normal(size=60)

    def check(Z, kernel=npgp.RBF(0.7)):  # noqa: B008  (frozen)
        gp = npgp.CollapsedGP(kernel, rows, Z, noise_variance=0.0025)
        posterior = jax.jit(lambda gp: gp.condition(y))(gp)
        return npgp.collapsed.enough_points(posterior, rows, y, npgp.Gaussian(variance=0.0025))

    few = check(np.linspace(0.0, 10.5, 6)[:, None])
    assert few.shorter is None and 12 < few.points_needed < 40
    many = check(np.linspace(0.0, 10.5, few.points_needed)[:, None])
    assert not few.enough and many.enough and few.gain > 10.0 > many.gain


def test_predictions_are_corrected_by_functionals_near_by(float64):
    """Given the inducing values it is the exact GP of the group's functionals; groups are of mean points."""
    (make, matrix), (new, new_matrix) = ROWS["averages"], ROWS["means, and values"]
    groups = npgp.sparse.median_split(make(), 3)
    mean_points = np.sum(np.abs(WEIGHTS)[..., None] * POINTS, 1) / np.sum(np.abs(WEIGHTS), 1)[:, None]
    np.testing.assert_array_equal(groups.rows, npgp.sparse.median_split(mean_points, 3).rows)
    dense, m = joint(np.concatenate([matrix, new_matrix]), Z[:1]), np.linspace(-1.0, 1.0, 5)
    u, y = np.linalg.cholesky(dense.K_uu) @ m, np.random.default_rng(1).normal(size=6)

    @jax.jit
    def predict(y):
        q = (npgp.variational.DenseNormal(jnp.asarray(m), 1e-9 * jnp.eye(5)),)
        posterior = npgp.variational.Posterior(npgp.sparse.factorize(KERNEL, [npgp.features.Points(Z[0])], 1e-8), q)
        corrected = npgp.local_correction(posterior, make(), y, npgp.Gaussian(variance=NOISE), groups)
        return *corrected.mean_and_variance(new()), groups.assign(new())

    K = np.block([[dense.K_uu, dense.K_uf], [dense.K_uf.T, dense.K_ff]])
    for i, (mean, variance, group) in enumerate(zip(*predict(y), strict=True)):
        rows = groups.rows[group][groups.mask[group]]
        seen, row = np.concatenate([np.arange(5), 5 + rows]), [11 + i]
        noise = np.concatenate([np.full(5, 1e-14), np.full(len(rows), NOISE)])
        values = np.concatenate([u, y[rows]])
        expected = oracles.gp_posterior(K[np.ix_(seen, seen)], K[np.ix_(row, seen)], K[np.ix_(row, row)], values, noise)
        np.testing.assert_allclose([mean, variance], [expected[0][0], expected[1][0, 0]], atol=1e-6)
