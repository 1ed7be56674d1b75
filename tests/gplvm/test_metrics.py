import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npgp.gplvm.relevance import nearest_neighbor_errors


def brute_force(points, labels):
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    np.fill_diagonal(distances, np.inf)
    return sum(labels[np.argmin(row)] != label for row, label in zip(distances, labels, strict=True))


@given(seed=st.integers(0, 1000), rows=st.integers(2, 60), columns=st.integers(1, 20), classes=st.integers(1, 4))
def test_brute_force_agrees(seed, rows, columns, classes):
    rng = np.random.default_rng(seed)
    points, labels = rng.normal(size=(rows, columns)), rng.integers(classes, size=rows)
    assert nearest_neighbor_errors(points, labels) == brute_force(points, labels)


def test_a_point_is_not_its_own_neighbor():
    assert nearest_neighbor_errors([[0.0], [1.0]], [0, 1]) == 2
    assert nearest_neighbor_errors([[0.0], [1.0]], [1, 1]) == 0


@pytest.mark.parametrize("labels, errors", [([0, 1, 2, 2], 2), ([0, 0, 1, 2], 2), ([0, 0, 1, 1], 0)])
def test_coincident_points_are_each_others_neighbors(labels, errors):
    points = [[0.0, 0.0], [0.0, 0.0], [5.0, 5.0], [5.0, 5.0]]
    assert nearest_neighbor_errors(points, labels) == errors


def test_all_points_coincide():
    # Any other point may be taken for the nearest, but not the point itself.
    assert nearest_neighbor_errors(np.zeros((3, 2)), [0, 0, 0]) == 0
    assert nearest_neighbor_errors(np.zeros((3, 2)), [0, 1, 2]) == 3


def test_result_is_a_plain_number_and_labels_may_be_words():
    errors = nearest_neighbor_errors(np.arange(4.0)[:, None] ** 2, np.array(["a", "a", "b", "b"]))
    assert type(errors) is int
    assert errors == 1  # 4 is nearer to 1 than to 9


@pytest.mark.parametrize(
    "points, labels",
    [
        (np.zeros((1, 2)), [0]),
        (np.zeros((0, 2)), []),
        (np.zeros((3, 2)), [0, 1]),
        (np.zeros((3, 2)), [[0], [1], [2]]),
    ],
    ids=["one point", "no point", "too few labels", "labels in a column"],
)
def test_shapes_that_do_not_match_are_refused(points, labels):
    with pytest.raises(ValueError, match="do not match"):
        nearest_neighbor_errors(points, labels)
