"""The one Cholesky: what it factorizes, what it adds, what its derivatives are; and who is turned away."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax import lax
from jax.extend.core import jaxprs_in_params

from npgp import checks, linalg
from npgp.programs import QUICK, Program

EPS = {jnp.float32: 1e-5, jnp.float64: 1e-13}
cholesky = jax.jit(linalg.cholesky, static_argnames="jitter")


def random_psd(seed, size, dtype):
    W = np.random.default_rng(seed).normal(size=(size, size))
    return (W @ W.T / size + 0.3 * np.eye(size)).astype(dtype)


def added(K, jitter):
    """What a relative jitter puts on the diagonal of K: of each row's own variance, and a little of their mean."""
    variance = np.diagonal(K, axis1=-2, axis2=-1)
    return (jitter * (variance + jitter * variance.mean(-1, keepdims=True)))[..., None] * np.eye(K.shape[-1])


def with_eigenvalues(values, dtype):
    """A symmetric matrix with these eigenvalues; (1, …, 1) is the eigenvector of the last."""
    Q, _ = np.linalg.qr(np.c_[np.ones(len(values)), np.random.default_rng(0).normal(size=(len(values), 2))])
    return (Q[:, ::-1] * values @ Q[:, ::-1].T).astype(dtype)


#: The diagonal is 1 and the last eigenvalue -3e-4: a jitter of 1e-4 cannot help, one of 1e-3 does.
NEEDS_JITTER = np.array([1.50015, 1.50015, -3e-4])


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("size", [1, 6])
def test_cholesky_reproduces_the_matrix_and_the_jitter_it_reports(x64, size):
    K = np.stack([random_psd(seed, size, x64) for seed in range(20)])
    L, jitter = map(np.asarray, jax.jit(jax.vmap(linalg.cholesky))(K))
    assert L.dtype == jitter.dtype == x64 and jitter.shape == (20,)
    np.testing.assert_array_equal(L, np.tril(L))
    assert np.all(np.diagonal(L, axis1=1, axis2=2) > 0)
    np.testing.assert_array_equal(jitter, np.asarray(linalg.default_jitter(x64), x64))  # nothing was retried
    expected = K + added(K, jitter[:, None])
    np.testing.assert_allclose(L @ np.swapaxes(L, 1, 2), expected, atol=EPS[x64] * np.max(K))


def test_default_jitter_is_above_rounding_of_its_dtype():
    # Below ~100 ε a Gram matrix of rank one could fail to factorize, and above 1e-4 the bounds would feel it.
    for dtype in (jnp.float32, jnp.float64):
        assert 50 * jnp.finfo(dtype).eps < linalg.default_jitter(dtype) < 1e-4


def test_only_the_upper_triangle_is_read(x64):
    K = random_psd(1, 3, x64)
    spoiled = np.triu(K) + np.tril(np.full_like(K, np.nan), -1)
    np.testing.assert_array_equal(cholesky(spoiled)[0], cholesky(K)[0])


def test_jitter_is_retried_inside_jit_and_reported(x64):
    K = with_eigenvalues(NEEDS_JITTER, x64)
    L, jitter = map(np.asarray, cholesky(K))
    np.testing.assert_allclose(jitter, 1e-3, rtol=1e-5)
    np.testing.assert_allclose(L @ L.T, K + added(K, 1e-3), atol=10 * EPS[x64])
    # The attempts count from what the caller asks for.
    np.testing.assert_allclose(cholesky(K, jitter=2e-3)[1], 2e-3, rtol=1e-5)


def test_jitter_is_relative(x64):
    K = random_psd(0, 3, x64)
    np.testing.assert_allclose(cholesky(1e6 * K)[0], 1e3 * np.asarray(cholesky(K)[0]), rtol=100 * EPS[x64])
    # … to what the caller says: a residual that is all rounding has no scale of its own.
    L, jitter = cholesky(np.zeros((3, 3), x64), scale=np.array([4.0, 1.0, 0.01], x64))
    np.testing.assert_allclose(L, np.sqrt(jitter) * np.diag([2.0, 1.0, 0.1]), rtol=3e-3)


def test_rows_of_unlike_size_have_a_jitter_each(x64):
    # As values and slopes in one kernel: the factor is that of the matrix of unit variances, row by row.
    K, size = with_eigenvalues(np.array([1.5, 1.5, 1e-3]), x64), np.array([10.0, 1.0, 0.1], x64)
    alike, apart = (np.asarray(cholesky(matrix)[0]) for matrix in (K, size[:, None] * K * size))
    np.testing.assert_allclose(apart / size[:, None], alike, rtol=2e-3)  # 2.5 and 6e-3 if relative to one mean
    # A row without any variance has a pivot all the same.
    L, jitter = map(np.asarray, cholesky(np.diag(np.array([1.0, 0.0, 4.0], x64))))
    assert L[1, 1] > 0 and jitter == x64(linalg.default_jitter(x64))


def test_no_jitter_if_none_is_asked_for_or_needed(x64):
    L, jitter = cholesky(4.0 * np.eye(3, dtype=x64), jitter=0.0)
    np.testing.assert_array_equal(L, 2.0 * np.eye(3))
    assert jitter == 0.0
    # Where some is needed, growing from zero must not go on forever.
    singular = with_eigenvalues(NEEDS_JITTER, x64)
    np.testing.assert_allclose(cholesky(singular, jitter=0.0)[1], 1e-3, rtol=1e-5)


def test_batches_share_one_jitter_unless_mapped(x64):
    batch = np.stack([random_psd(0, 3, x64), with_eigenvalues(NEEDS_JITTER, x64)])
    L, jitter = map(np.asarray, cholesky(batch))
    assert L.shape == (2, 3, 3) and jitter.shape == ()
    np.testing.assert_allclose(L @ np.swapaxes(L, 1, 2), batch + added(batch, jitter), atol=10 * EPS[x64])
    _, each = jax.jit(jax.vmap(linalg.cholesky))(batch)
    np.testing.assert_allclose(each, [linalg.default_jitter(x64), 1e-3], rtol=1e-5)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_hopeless_matrices_give_no_finite_factor_and_end(x64, bad):
    L, jitter = cholesky(np.diag(np.array([1.0, bad, 1.0], x64)))
    assert not np.any(np.isfinite(np.diag(L)[1:]))
    np.testing.assert_allclose(jitter, linalg.MAX_JITTER, rtol=1e-5)


# ---------------------------------------------------------------- derivatives


def factor_of(theta, jitter=None):
    """Symmetric psd matrices as a smooth function of anything, so that finite differences stay symmetric."""
    W = theta.reshape(3, 3)
    return linalg.cholesky(W @ W.T + jnp.eye(3, dtype=theta.dtype), jitter)[0]


def test_derivatives_of_the_factor_by_finite_differences(float64):
    # Every order of forward and reverse mode to the second.
    theta, v, w = jnp.asarray(np.random.default_rng(0).normal(size=(3, 9)))
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)))

    @jax.jit
    def derivatives(theta, jitter):
        def g(theta):
            return jnp.sum(weight * factor_of(theta, jitter))

        def forward(theta):
            return jax.jvp(g, (theta,), (v,))[1]

        def reverse(theta):
            return jax.grad(g)(theta) @ v

        first = jnp.stack([forward(theta), reverse(theta)])
        second = [d(theta) for f in (forward, reverse) for d in (along(f), lambda t, f=f: jax.grad(f)(t) @ w)]
        return g(theta), first, jnp.stack(second)

    def along(f):
        return lambda theta: jax.jvp(f, (theta,), (w,))[1]

    def difference(index, direction, jitter, h=1e-5):
        ends = [derivatives(theta + sign * h * direction, jitter)[index] for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2 * h)

    # With a jitter that is felt, the derivative of the mean diagonal it is relative to counts.
    for jitter in (1e-8, 0.1):
        _, first, second = derivatives(theta, jitter)
        np.testing.assert_allclose(first, difference(0, v, jitter), rtol=1e-7)
        np.testing.assert_allclose(second, np.tile(difference(1, w, jitter), 2), rtol=1e-6)


def test_derivatives_at_the_jitter_that_was_needed(float64):
    K = with_eigenvalues(NEEDS_JITTER, jnp.float64)
    direction = random_psd(3, 3, jnp.float64)

    @functools.partial(jax.jit, static_argnums=1)
    def value_and_tangent(t, jitter):
        return jax.jvp(lambda t: linalg.cholesky(K + t * direction, jitter)[0], (t,), (1.0,))

    _, retried = value_and_tangent(0.0, None)
    np.testing.assert_allclose(retried, value_and_tangent(0.0, 1e-3)[1], rtol=1e-8)
    h = 1e-7
    difference = (value_and_tangent(h, None)[0] - value_and_tangent(-h, None)[0]) / (2 * h)
    np.testing.assert_allclose(retried, difference, rtol=1e-4, atol=1e-4)


def test_float32_derivatives_agree_with_float64():
    theta = np.random.default_rng(1).normal(size=9)

    def loss(theta):
        return jnp.sum(jnp.sin(factor_of(theta, jitter=1e-5)))

    gradient = jax.jit(jax.grad(loss))
    single = gradient(jnp.asarray(theta, jnp.float32))
    with jax.enable_x64(True):
        double = gradient(jnp.asarray(theta))
    np.testing.assert_allclose(single, double, rtol=1e-4, atol=1e-5)


def test_the_jitter_used_has_no_derivative(x64):
    gradient = jax.jit(jax.grad(lambda K: linalg.cholesky(K)[1]))(random_psd(0, 3, x64))
    np.testing.assert_array_equal(gradient, 0.0)


# ---------------------------------------------------------------- triangular systems by halves


#: Each of the sizes, transpositions and precisions: derivatives of a system are systems of the other transposition.
@pytest.mark.parametrize(
    ("rows", "columns", "substituted", "transpose", "x64"),
    [
        (7, 1, 0, True, False),
        (8, 9, 0, False, True),
        pytest.param(7, 3, 3, True, False, id="few columns, by substitution-True-float32"),
    ],
    indirect=["x64"],
)
def test_systems_by_halves_and_their_derivatives_are_those_of_plain_autodiff(
    x64, monkeypatch, transpose, rows, columns, substituted
):
    monkeypatch.setattr(linalg, "SUBSTITUTED", substituted)
    monkeypatch.setattr(linalg, "LARGEST_BLOCK", 2)  # 7 rows are four blocks, the last of which is smaller
    monkeypatch.setattr(linalg, "LOOPED", 4)  # 8 rows are a loop of two loops
    rng = np.random.default_rng(0)
    K = np.stack([random_psd(seed, rows, x64) for seed in range(2)])
    B, weight = rng.normal(size=(2, 2, rows, columns)).astype(x64)
    bar = rng.normal(size=(rows, rows)).astype(x64)
    tangent = np.stack([random_psd(seed, rows, x64) for seed in (2, 3)]), B[::-1]

    def ours(K, B, weight):
        L, _ = linalg.cholesky(K)
        return jnp.sum(weight * jnp.sin(linalg.solve_lower(L, B, transpose=transpose))) + jnp.sum(bar * L)

    def plain(K, B, weight):
        variance, jitter = jnp.diagonal(K), linalg.default_jitter(K.dtype)
        L = jnp.linalg.cholesky(K + jitter * jnp.diag(variance + jitter * jnp.mean(variance)))
        solved = jax.scipy.linalg.solve_triangular(L, B, lower=True, trans=int(transpose))
        return jnp.sum(weight * jnp.sin(solved)) + jnp.sum(bar * L)

    def everything(function):
        def of(K, B, weight, tangent):
            reverse = jax.value_and_grad(lambda K, B: function(K, B, weight), argnums=(0, 1))
            return jax.jvp(reverse, (K, B), tangent)  # value, gradient, forward mode and forward over reverse

        return jax.vmap(of)

    made = jax.jit(everything(ours))(K, B, weight, tangent)
    expected = Program(everything(plain), options=QUICK)(K, B, weight, tangent)  # only ours as users compile it
    tolerance = {jnp.float32: 1e-3, jnp.float64: 1e-9}[x64]
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert a.dtype == x64
        np.testing.assert_allclose(a, b, atol=tolerance * np.max(np.abs(b)))


@pytest.mark.parametrize("rows", [8, 7])  # the last block of 7 is smaller
def test_with_halves_as_on_a_gpu_systems_are_the_same(float64, monkeypatch, rows):
    monkeypatch.setattr(linalg, "LARGEST_BLOCK", 2)
    monkeypatch.setattr(linalg, "SUBSTITUTED", 0)
    monkeypatch.setattr(linalg, "LOOPED", 4)
    K, B = random_psd(0, rows, float64), np.random.default_rng(0).normal(size=(rows, 11))

    def solved(K, B):
        L = linalg.plain_cholesky(K)
        return linalg.solve_lower(L, jnp.sin(linalg.solve_lower(L, B)), transpose=True)

    def of(K, B):
        return jax.vjp(solved, K, B)[1](B)  # both solves, and the derivative of the factor

    looped = jax.jit(of)(K, B)
    monkeypatch.setattr(linalg, "on_cpu", lambda: False)
    monkeypatch.setattr(linalg, "_solve", None)  # is not called
    jax.clear_caches()  # JAX would know the solves
    for a, b in zip(jax.jit(lambda K, B: of(K, B))(K, B), looped, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12 * np.max(np.abs(b)))


def test_large_systems_take_matrix_products_and_no_large_solve(float64):
    # LAPACK inverts blocks of the diagonal, of at most LARGEST_BLOCK rows, in forward and reverse mode.
    rows = linalg.LARGEST_BLOCK + 1

    def program(size):
        def loss(K, B):
            return jnp.sum(linalg.solve_lower(linalg.cholesky(K)[0], B) ** 2)

        shapes = jax.ShapeDtypeStruct((size, size), float64), jax.ShapeDtypeStruct((size, 3 * size), float64)
        return jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*shapes)

    def solves(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "triangular_solve":
                yield equation.invars[0].aval.shape[-1]
            for inner in jaxprs_in_params(equation.params):
                yield from solves(inner)

    assert 0 < max(solves(program(rows).jaxpr)) <= linalg.LARGEST_BLOCK < rows


def test_few_columns_are_solved_by_substitution_on_a_cpu_and_by_halves_elsewhere(float64):
    size = 2 * linalg.LARGEST_BLOCK
    L = np.linalg.cholesky(random_psd(0, size, float64))
    B = np.random.default_rng(0).normal(size=(size, 2))
    blocks = f"tensor<2x{linalg.LARGEST_BLOCK}x{linalg.LARGEST_BLOCK}xf64>"  # the inverses

    def inverts(function, B, platform):
        return blocks in jax.jit(function).trace(L, B).lower(lowering_platforms=(platform,)).as_text()

    for transpose in (False, True):
        solve = functools.partial(linalg.solve_lower, transpose=transpose)
        assert not inverts(solve, B, "cpu") and inverts(solve, B, "cuda")
        # As many as are mapped: each column by itself is few, together they are not.
        many = np.random.default_rng(1).normal(size=(linalg.SUBSTITUTED, *B.shape))
        each = jax.vmap(solve, (None, 0))
        assert inverts(each, many, "cpu")
        expected = [scipy.linalg.solve_triangular(L, b, lower=True, trans=int(transpose)) for b in many]
        np.testing.assert_allclose(jax.jit(each)(L, many), expected, rtol=1e-9, atol=1e-12)


def test_float32_systems_by_halves_leave_the_variance_that_substitution_leaves_but_for_about_the_jitter():
    # Inputs far closer than a lengthscale, so that K is singular but for its jitter. A product with the inverse of the
    # whole factor would have errors in d several times as large.
    x = np.sort(np.random.default_rng(0).normal(size=(1500, 1)), axis=0).astype(np.float32)
    Z, X = x[::5], x

    def rbf(a, b):
        return np.exp(-2 * np.square(a - b.T))

    L, B = np.asarray(cholesky(rbf(Z, Z))[0]), rbf(Z, X)
    exact = scipy.linalg.solve_triangular(L.astype(float), B.astype(float), lower=True)
    by_inverse = scipy.linalg.solve_triangular(L, np.eye(len(L), dtype=np.float32), lower=True) @ B

    def error(A):
        return np.mean(np.abs(np.sum(np.square(A), 0) - np.sum(np.square(exact), 0)))

    assert error(scipy.linalg.solve_triangular(L, B, lower=True)) < 1e-6  # 2e-7
    # With blocks of 32 it would be 3e-7, and programs a third longer; the jitter alone moves d by as much. How products
    # are summed differs between processors: 6e-6 on one, 1.02e-5 on another.
    assert error(jax.jit(linalg.solve_lower)(L, B)) < 2.0 * linalg.DEFAULT_JITTER["float32"]
    assert error(by_inverse) > 1e-4  # 9e-4


# ---------------------------------------------------------------- other algebra


@pytest.mark.parametrize("size", [1, 6])
def test_inverse_factor_is_the_lower_factor_of_the_inverse(x64, size):
    L = np.linalg.cholesky(np.stack([random_psd(seed, size, x64) for seed in range(20)]))
    F = jax.jit(linalg.inverse_factor)(jnp.asarray(L))
    np.testing.assert_array_equal(F, np.tril(F))
    assert F.dtype == x64 and np.all(np.diagonal(F, axis1=1, axis2=2) > 0)
    half = np.swapaxes(L, 1, 2) @ np.asarray(F)  # orthogonal
    np.testing.assert_allclose(half @ np.swapaxes(half, 1, 2), np.tile(np.eye(size), (20, 1, 1)), atol=20 * EPS[x64])


def test_triangular_solves_and_determinant(float64):
    K = random_psd(0, 6, float64)
    B = np.random.default_rng(1).normal(size=(6, 3))
    L = np.linalg.cholesky(K)

    @jax.jit
    def algebra(L, B):
        solved = linalg.solve_lower(L, linalg.solve_lower(L, B), transpose=True)
        return solved, linalg.log_determinant(L), linalg.log_determinant(jnp.stack([L, 2 * L])[:, None])

    solved, log_det, batch = algebra(L, B)
    expected = np.linalg.slogdet(K)[1]
    np.testing.assert_allclose(solved, np.linalg.solve(K, B), rtol=1e-10)
    np.testing.assert_allclose(log_det, expected, rtol=1e-12)
    np.testing.assert_allclose(batch, [[expected], [expected + 12 * np.log(2)]], rtol=1e-12)


def test_matmul_multiplies_in_full_precision(x64):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(x64) for shape in ((2, 3, 4), (4, 5)))
    np.testing.assert_allclose(linalg.matmul(a, b), a @ b, atol=EPS[x64])
    # A CPU always does; what an accelerator is told is seen in the program, derivatives included.
    program = str(jax.make_jaxpr(jax.grad(lambda a: jnp.sum(linalg.matmul(a, b) ** 2)))(a))
    assert program.count("dot_general[") == program.count("Precision.HIGHEST, Precision.HIGHEST") == 2


@pytest.mark.parametrize("size", [1, 5, 33, 40])
def test_products_of_a_batch_of_factors_with_one_matrix(float64, size):
    """Cut in halves if large, an odd size too; and the derivatives are those of the whole product."""
    rng = np.random.default_rng(size)
    L, B = np.tril(rng.normal(size=(2, 3, size, size))), rng.normal(size=(size, 4))
    weights = rng.normal(size=(2, 3, size, 4))

    def total(product, L, B):
        return jnp.sum(weights * product(jnp.tril(L), B))

    @jax.jit
    def whole(L, B):
        return jnp.einsum("...ij,ik->...jk", L, B)

    product = functools.partial(linalg.lower_matmul, transpose=True)
    np.testing.assert_allclose(jax.jit(product)(L, B), whole(L, B), atol=1e-12)
    found, expected = (jax.jit(jax.grad(functools.partial(total, f), (0, 1)))(L, B) for f in (product, whole))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_diagonal_matrices_and_their_gradient(x64):
    d, slope = np.arange(1.0, 7.0, dtype=x64).reshape(2, 3), np.arange(18.0, dtype=x64).reshape(2, 3, 3)
    found, backward = jax.vjp(linalg.diagonal_matrix, d)
    assert found.dtype == x64
    np.testing.assert_array_equal(found, d[..., None] * np.eye(3))
    np.testing.assert_array_equal(backward(slope)[0], np.diagonal(slope, axis1=1, axis2=2))


# ---------------------------------------------------------------- who is turned away


@pytest.mark.parametrize(
    "value, error, words",
    [
        (np.arange(6).reshape(3, 2), TypeError, "int"),
        (np.ones((3, 2), bool), TypeError, "bool"),
        (np.ones((3, 2), complex), TypeError, "complex"),
        ([[1, 2], [3, 4]], TypeError, "int"),
        (np.ones(3), ValueError, r"Z\[:, None\]"),
        (np.float64(1.0), ValueError, r"\(\)"),
        (np.ones((2, 3, 1)), ValueError, r"\(2, 3, 1\)"),
        (np.ones((0, 2)), ValueError, "at least one row"),
        (np.ones((2, 0)), ValueError, "one column"),
        (np.array([[1.0], [np.nan]]), ValueError, "NaN or infinite"),
        (np.array([[1.0], [-np.inf]]), ValueError, "NaN or infinite"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_inputs_names_the_argument_and_the_fault(value, error, words):
    with pytest.raises(error, match=words) as caught:
        checks.inputs(value, "Z")
    message = str(caught.value)
    assert message.startswith("Z ") and message.endswith(".") and "\n" not in message


def test_inputs_keeps_good_arrays(x64):
    X = np.random.default_rng(0).normal(size=(3, 2)).astype(x64)
    kept = checks.inputs(X)
    assert isinstance(kept, jax.Array) and kept.dtype == x64
    np.testing.assert_array_equal(kept, X)
    np.testing.assert_array_equal(checks.inputs([[0.5], [1.5]]), [[0.5], [1.5]])


def test_shapes_and_dtypes_of_traced_inputs_are_checked():
    # Values cannot be seen under jit; everything else can.
    finite_or_not = jax.jit(checks.inputs)(jnp.array([[jnp.nan]]))
    assert np.isnan(finite_or_not)
    with pytest.raises(ValueError, match="Z has shape"):
        jax.jit(lambda x: checks.inputs(x, "Z"))(jnp.ones(3))
    with pytest.raises(TypeError, match="Z has dtype int32"):
        jax.jit(lambda x: checks.inputs(x, "Z"))(jnp.ones((3, 1), jnp.int32))


@pytest.mark.parametrize("value", [-1.0, 0, np.nan, np.inf, np.array([1.0, -1.0]), jnp.zeros(2), np.float32(-2.0)])
def test_hyperparameters_must_be_positive(value):
    with pytest.raises(ValueError, match=r"^noise is .*it must be positive and finite\.$"):
        checks.require_positive(value, "noise")


def test_traced_hyperparameters_and_good_ones_pass():
    for value in (1, 0.5, np.ones(2), jnp.ones(2), np.float32(1.0)):
        checks.require_positive(value, "noise")

    @jax.jit
    def traced(value):
        checks.require_positive(value, "noise")
        checks.require_finite(value, "noise")
        return lax.stop_gradient(value)

    assert np.isnan(traced(jnp.nan))
    with pytest.raises(ValueError, match=r"^y has NaN or infinite entries"):
        checks.require_finite(np.array([1.0, np.nan]), "y")
