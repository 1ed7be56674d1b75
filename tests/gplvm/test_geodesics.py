"""Points whose distances are those along the data."""

from __future__ import annotations

import numpy as np
import pytest

from npgp.gplvm.start import geodesic_coordinates


def three_clusters() -> np.ndarray:
    rng = np.random.default_rng(0)
    centers = 8.0 * rng.normal(size=(3, 4))
    return np.concatenate([center + rng.normal(size=(25, 4)) for center in centers])


@pytest.mark.filterwarnings("ignore:Changing the sparsity structure")  # of the other library
@pytest.mark.filterwarnings("ignore:The number of connected components")
@pytest.mark.parametrize("neighbors", [3, 8])
def test_they_are_those_of_another_library(neighbors):
    """Of three clusters that no neighbor joins."""
    manifold = pytest.importorskip("sklearn.manifold")
    Y = three_clusters()
    other = manifold.Isomap(n_neighbors=neighbors, n_components=2).fit_transform(Y)
    points = geodesic_coordinates(Y, 2, neighbors)
    other = other / np.std(other[:, 0])
    np.testing.assert_allclose(np.abs(points), np.abs(other), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(points.T @ other, np.diag(np.diag(points.T @ other)), atol=1e-8 * len(Y))


def test_an_arc_is_unrolled():
    angle = np.linspace(0.0, 5.0, 80)
    Y = np.stack([np.cos(angle), np.sin(angle), np.zeros(80)], axis=1)
    (points,) = geodesic_coordinates(Y, 1, 2).T
    straight = (angle - np.mean(angle)) / np.std(angle)
    # At each end the second neighbor is a chord away.
    np.testing.assert_allclose(points * np.sign(points[-1]), straight, atol=1e-4)


def test_equal_rows_are_one_point():
    Y = np.repeat(three_clusters()[:10], 2, axis=0)
    points = geodesic_coordinates(Y, 2, 4)
    np.testing.assert_allclose(points[::2], points[1::2], atol=1e-7)
    np.testing.assert_array_equal(geodesic_coordinates(np.ones((5, 3)), 2, 8), 0.0)
