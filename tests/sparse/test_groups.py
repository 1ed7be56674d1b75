"""Groups of rows: that they are a partition, of neighbors, and that inputs find the group they belong to."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from npgp.sparse import groups
from npgp.sparse.groups import consecutive, default_size, kmeans_groups, median_split, single

#: Few shapes, as each is compiled anew.
ROWS, SIZES = 13, (1, 2, 5, 13)


def by_kmeans(X, size):
    return kmeans_groups(jax.random.key(0), X, size)


def members(made):
    """The rows of each group."""
    return [rows[mask].tolist() for rows, mask in zip(made.rows, made.mask, strict=True)]


def check_partition(made, num_rows, size):
    lengths = [len(rows) for rows in members(made)]
    assert made.num_rows == num_rows
    assert made.rows.shape == made.mask.shape == (made.count, made.size)
    assert made.rows.dtype == np.int32 and made.mask.dtype == bool
    assert sorted(row for rows in members(made) for row in rows) == list(range(num_rows))
    assert min(lengths) >= 1 and made.size == max(lengths) <= size
    for rows, mask, length in zip(made.rows, made.mask, lengths, strict=True):
        assert np.all(mask[:length]) and not np.any(mask[length:])
        assert np.all(np.diff(rows[:length]) > 0) and np.all(rows[length:] == rows[0])
    return lengths


def check_training_rows_find_their_group(made, X):
    """Or, where rows coincide in all columns, the group of one of these."""
    assigned = np.asarray(made.assign(X))
    assert assigned.dtype == np.int32
    for row, group in enumerate(assigned):
        twins = np.flatnonzero(np.all(X == X[row], axis=1))
        assert group in [g for g, rows in enumerate(members(made)) if set(rows) & set(twins.tolist())]
        if twins.size == 1:
            assert row in members(made)[group]


def split_by_recursion(X, rows, size, order):
    """Median split as one would write it for one group."""
    if len(rows) <= size:
        return [sorted(rows)]
    column = int(np.argmax(np.std(X[rows], axis=0)))
    rows = sorted(rows, key=lambda n: (X[n, column], *(X[n, c] for c in order), n))
    half = (len(rows) + 1) // 2
    return split_by_recursion(X, rows[:half], size, order) + split_by_recursion(X, rows[half:], size, order)


# ---------------------------------------------------------------- median split

#: Mostly few different values, so that ties and duplicates abound; a subnormal number is 0 to XLA.
numbers = st.sampled_from([-1.0, 0.0, -0.0, 0.5, 1.0, 1.0 + 2.0**-20, 1e30]) | st.floats(
    -(2.0**127), 2.0**127, width=32, allow_subnormal=False
)


@pytest.mark.parametrize("size", SIZES)
@given(X=hnp.arrays(np.float32, (ROWS, 2), elements=numbers))
@example(X=np.zeros((ROWS, 2), np.float32))
@example(X=np.array([[np.nextafter(1.0, 1.0 + n), n % 2] for n in range(ROWS)], np.float32))
def test_any_inputs_are_split_in_even_groups_and_find_them_again(size, X):
    made = median_split(X, size)
    lengths = check_partition(made, ROWS, size)
    assert min(lengths) >= (size + 1) // 2
    check_training_rows_find_their_group(made, X)


def test_neighboring_numbers_and_other_dtypes_find_their_group(x64):
    steps = np.arange(ROWS) * np.finfo(x64).eps
    X = np.stack([1.0 + steps, np.zeros(ROWS)], 1).astype(x64)[np.random.default_rng(0).permutation(ROWS)]
    check_training_rows_find_their_group(median_split(X, 1), X)
    # Without 64-bit numbers JAX will round these, to values that are fewer or fall on the other side of a median.
    X = np.random.default_rng(1).normal(1.0, 1e-7, (ROWS, 2))
    merged = pytest.warns(UserWarning, match="different values become")
    with merged if x64 == jnp.float32 else contextlib.nullcontext():
        groups = median_split(X, 2)
    check_training_rows_find_their_group(groups, np.asarray(jnp.asarray(X)))


@pytest.mark.parametrize("digits", [10, 0])
@pytest.mark.parametrize("size", [1, 3, 8, 40])
def test_median_split_is_the_recursive_one(float64, size, digits):
    rng = np.random.default_rng(size)
    # Rounded inputs tie in single columns and in all.
    X = np.round(rng.normal(size=(51, 3)) * 1.5, digits) * [1.0, 0.83, 1.37]
    order = np.argsort(-np.std(X, axis=0))
    expected = split_by_recursion(X, list(range(51)), size, order)
    assert (len(np.unique(X, axis=0)) < 51) == (digits == 0)
    made = median_split(X, size)
    assert members(made) == expected
    check_training_rows_find_their_group(made, X)


def test_halves_are_made_at_the_median_of_the_widest_column():
    X = np.stack([np.arange(8.0), 100.0 * np.array([3, 1, 0, 2, 7, 5, 6, 4]), np.zeros(8)], 1)
    assert members(median_split(X, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert members(median_split(X, 2)) == [[1, 2], [0, 3], [5, 7], [4, 6]]
    # One outlier in a column makes no large standard deviation.
    X = np.stack([np.arange(100.0), np.where(np.arange(100) == 7, 120.0, 0.0)], 1)
    assert members(median_split(X, 50)) == [list(range(50)), list(range(50, 100))]


def test_extreme_sizes():
    X = np.random.default_rng(0).normal(size=(ROWS, 2))
    one_each = median_split(X, 1)
    assert (one_each.count, one_each.size) == (ROWS, 1)
    for size in (ROWS, 10**9):
        all_rows = median_split(X, size)
        assert members(all_rows) == [list(range(ROWS))]
        np.testing.assert_array_equal(all_rows.assign(X), 0)


@functools.cache
def plane(num_rows=2000):
    return np.random.default_rng(0).uniform(size=(num_rows, 2))


@pytest.mark.parametrize("make", [median_split, by_kmeans])
def test_groups_are_of_neighbors(make):
    X = plane()
    made = make(X, 20)
    check_partition(made, 2000, 20)
    within = np.mean([np.sum(np.var(X[rows], axis=0)) * len(rows) for rows in members(made)]) * made.count / 2000
    # All rows have 1/6; a square cell that holds 20 of 2000 rows has 20/2000 of that.
    assert within < 3.0 / 6.0 * 20 / 2000


# ---------------------------------------------------------------- assignment of new inputs


def test_on_a_line_inputs_join_the_nearest_row(x64):
    rng = np.random.default_rng(3)
    X = rng.uniform(-3.0, 3.0, (ROWS, 1)).astype(x64)
    new = rng.uniform(-4.0, 4.0, (500, 1)).astype(x64)
    made = median_split(X, 2)
    own = np.zeros(ROWS, int)
    for group, rows in enumerate(members(made)):
        own[rows] = group
    nearest = np.argmin(np.abs(new - X.T), axis=1)
    np.testing.assert_array_equal(made.assign(new), own[nearest])
    # Groups are an argument of compiled code like any other.
    np.testing.assert_array_equal(jax.jit(lambda made, x: made.assign(x))(made, new), own[nearest])


def test_ties_go_by_the_other_columns():
    # The first column spreads most, but ties at its median: the second decides there, and only there.
    X = np.array([[-9.0, 0.5], [-9.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 3.0], [0.0, 4.0], [9.0, 0.0], [9.0, 0.5]])
    made = median_split(X, 4)
    assert members(made) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    new = np.array([[0.0, 0.9], [0.0, 1.1], [-0.1, 9.0], [0.1, -9.0]])
    np.testing.assert_array_equal(made.assign(new), [0, 1, 0, 1])


# ---------------------------------------------------------------- k-means


def blobs(lengths, seed=0):
    rng = np.random.default_rng(seed)
    centers = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    labels = rng.permutation(np.repeat(np.arange(4), lengths))
    return centers[labels] + 0.5 * rng.normal(size=(labels.size, 2)), labels


def test_kmeans_groups_are_the_clusters_where_these_are_small_enough(x64):
    X, labels = blobs([6, 7, 8, 7])
    made = kmeans_groups(jax.random.key(0), X.astype(x64), 8)
    clusters = {tuple(np.flatnonzero(labels == k).tolist()) for k in range(4)}
    assert {tuple(rows) for rows in members(made)} == clusters
    near = np.asarray(made.assign(np.array([[9.0, 1.0], [1.0, 9.0], [1.0, 1.0], [9.0, 9.0]], x64)))
    for group, k in zip(near, (1, 2, 0, 3), strict=True):
        assert labels[made.rows[group, 0]] == k


def test_large_cells_of_kmeans_are_split():
    X, labels = blobs([1, 2, 30, 60])
    made = kmeans_groups(jax.random.key(0), X, 25)  # four cells: the largest in three or four, one of a single row
    lengths = check_partition(made, 93, 25)
    assert made.count == 1 + 1 + 2 + 4 and sorted(lengths) == [1, 2, 15, 15, 15, 15, 15, 15]
    assert all(len(set(labels[rows])) == 1 for rows in members(made))
    check_training_rows_find_their_group(made, X.astype(np.float32))


def test_kmeans_groups_of_duplicates_and_of_single_rows():
    X = np.repeat(np.array([[0.0, 1.0], [2.0, 0.0]]), 6, axis=0)
    check_training_rows_find_their_group(made := kmeans_groups(jax.random.key(0), X, 2), X)
    check_partition(made, 12, 2)
    X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
    check_training_rows_find_their_group(made := kmeans_groups(jax.random.key(0), X, 1), X)
    assert made.count == 12


def test_same_seed_same_groups():
    X = plane(300)
    first, again, other = (members(kmeans_groups(jax.random.key(seed), X, 10)) for seed in (1, 1, 2))
    assert first == again != other


# ---------------------------------------------------------------- without inputs


def test_consecutive_and_single():
    made = consecutive(7, 3)
    assert members(made) == [[0, 1, 2], [3, 4, 5], [6]]
    np.testing.assert_array_equal(made.rows[2], [6, 6, 6])
    check_partition(made, 7, 3)
    check_partition(consecutive(7, 100), 7, 7)
    everything = single(4)
    assert members(everything) == [[0, 1, 2, 3]]
    np.testing.assert_array_equal(everything.assign(np.zeros((2, 5))), [0, 0])
    with pytest.raises(ValueError, match="made without inputs"):
        made.assign(np.zeros((2, 5)))


# ---------------------------------------------------------------- values by row and by group


def test_gather_and_scatter_are_inverse(x64):
    made = median_split(plane(ROWS), 4)
    assert not made.mask.all()
    v = np.random.default_rng(0).normal(size=(2, 3, ROWS)).astype(x64)

    @jax.jit
    def both(made, v):
        by_group = made.gather(v)
        # What is at the places beyond a group's length does not matter.
        return by_group, made.scatter(jnp.where(made.mask, by_group, jnp.nan))

    by_group, by_row = both(made, v)
    assert by_group.shape == (2, 3, made.count, made.size) and by_group.dtype == x64
    for g, rows in enumerate(members(made)):
        np.testing.assert_array_equal(by_group[..., g, : len(rows)], v[..., rows])
        np.testing.assert_array_equal(by_group[..., g, len(rows) :], v[..., rows[:1]].repeat(4 - len(rows), -1))
    np.testing.assert_array_equal(by_row, v)


def test_data_are_laid_out_group_after_group(x64):
    made = median_split(plane(ROWS), 4)
    X = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(x64)
    for array in (X, X[:, 0], np.arange(ROWS)):
        laid_out = made.arrange(array)
        assert type(laid_out) is np.ndarray and laid_out.dtype == array.dtype
        assert laid_out.shape == (made.count * made.size, *array.shape[1:])
        by_group = laid_out.reshape(made.count, made.size, *array.shape[1:])
        for g, rows in enumerate(members(made)):
            np.testing.assert_array_equal(by_group[g, : len(rows)], array[rows])
        np.testing.assert_array_equal(made.scatter(np.moveaxis(by_group, (0, 1), (-2, -1))), array.T)
        from_jax = made.arrange(jnp.asarray(array))
        assert isinstance(from_jax, jax.Array)
        np.testing.assert_array_equal(from_jax, laid_out)
    np.testing.assert_array_equal(jax.jit(lambda made: made.arrange(X))(made), made.arrange(X))


@pytest.mark.parametrize("made", [consecutive(12, 4), single(12), median_split(np.arange(12.0)[::-1, None], 4)])
def test_gram_matrices_are_those_of_the_columns_of_each_group(x64, made):
    A, weights = (np.random.default_rng(0).normal(size=size).astype(x64) for size in ((3, 12), (made.size, made.size)))
    members = A[:, made.rows]  # (M, G, g)
    gram, pull = jax.vjp(jax.jit(made.gram), A)
    np.testing.assert_allclose(gram, np.einsum("mgi,mgj->gij", members, members), rtol=1e-5, atol=1e-5)
    found = np.asarray(pull(jnp.broadcast_to(weights, gram.shape))[0])
    expected = np.einsum("mgj,ij->mgi", members, weights + weights.T)
    np.testing.assert_allclose(found[:, made.rows], expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- the size


def test_default_size_grows_with_the_square_of_the_features():
    assert [default_size(M) for M in (1, 128, 256, 512, 10**5)] == [4, 4, 16, 64, 64]
    sizes = [default_size(M) for M in range(1, 600)]
    assert sizes == sorted(sizes)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("make", [median_split, by_kmeans])
def test_bad_inputs_are_refused(make):
    X = plane(ROWS)
    for error, words, wrong in [
        (ValueError, "X has NaN or infinite", np.where(X == X[3], np.nan, X)),
        (ValueError, "X has NaN or infinite", np.where(X == X[3], np.inf, X)),
        (ValueError, r"X has shape \(13,\)", X[:, 0]),
        (ValueError, "at least one row", X[:0]),
        (TypeError, "X has dtype int64", X.astype(int)),
    ]:
        with pytest.raises(error, match=words):
            make(wrong, 4)
    with pytest.raises(TypeError, match="X is traced; groups are made outside jit"):
        jax.jit(lambda X: make(X, 4).rows)(X)
    with pytest.raises(ValueError, match="size is 0; it must be at least 1"):
        make(X, 0)
    with pytest.raises(TypeError, match=r"size is 2.5; it must be a whole number"):
        make(X, 2.5)


def test_wrong_numbers_and_shapes_are_refused():
    made = median_split(plane(ROWS), 4)
    for call, words in [
        (lambda: made.gather(np.zeros(12)), r"v has shape \(12,\); its last axis must be the 13 rows"),
        (lambda: made.gather(0.0), "v has shape"),
        (lambda: made.scatter(np.zeros((4, 3))), r"w has shape \(4, 3\); its last axes must be \(4, 4\)"),
        (lambda: made.arrange(np.zeros((2, 13))), r"array has shape \(2, 13\); its first axis must be the 13 rows"),
        (lambda: made.assign(np.zeros((5, 3))), "X_new has 3 columns; the inputs that were split have 2"),
        (lambda: made.assign(np.zeros(5)), r"X_new has shape \(5,\)"),
        (lambda: consecutive(0, 3), "num_rows is 0"),
        (lambda: consecutive(3, -1), "size is -1"),
        (lambda: single(-2), "num_rows is -2"),
        (lambda: default_size(0), "num_inducing is 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


def test_of_many_rows_a_part_is_clustered_and_there_are_few_cells(monkeypatch):
    monkeypatch.setattr(groups, "FULL_KMEANS_ROWS", 1000)
    monkeypatch.setattr(groups, "MAX_CELLS", 7)
    X = plane().astype(np.float32)
    made = kmeans_groups(jax.random.key(0), X, 20)
    check_partition(made, 2000, 20)
    assert len(made.tree.centers) == 7
    own = np.zeros(2000, int)
    own[made.rows[made.mask]] = np.nonzero(made.mask)[0]
    np.testing.assert_array_equal(made.assign(X), own)


def test_groups_of_consecutive_rows_move_nothing():
    v = np.arange(24.0).reshape(2, 12)
    for made, moves in ((consecutive(12, 4), False), (single(12), False), (median_split(plane(12)[::-1], 4), True)):
        for function, array in ((made.gather, v), (made.gather_rows, v.T), (made.scatter, made.gather(v))):
            assert ("gather[" in str(jax.make_jaxpr(function)(array))) == moves
