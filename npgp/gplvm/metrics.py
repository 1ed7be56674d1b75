"""Figures of merit for fitted models."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial import cKDTree

__all__ = ["nearest_neighbor_errors"]


def nearest_neighbor_errors(points: ArrayLike, labels: ArrayLike) -> int:
    """
    Leave-one-out nearest-neighbor errors: how many points have a nearest other point of another class.

    .. code-block:: python

        latents, labels = np.array([[0.0], [0.1], [5.0], [5.1]]), np.array([0, 0, 1, 1])
        assert npgp.gplvm.nearest_neighbor_errors(latents, labels) == 0

    :param points: (N, Q), scaled as distances should be taken: for a GPLVM, latent means over lengthscales.
    :param labels: classes, (N,).
    :return: a count out of N.
    :raises ValueError: for fewer than two points, or labels of another length.
    """
    points, labels = np.asarray(points), np.asarray(labels)
    if len(points) < 2 or labels.shape != points.shape[:1]:
        raise ValueError(f"points of shape {points.shape} and labels of shape {labels.shape} do not match.")
    two = cKDTree(points).query(points, 2)[1]  # the point itself is one of them, unless there are more at its place
    nearest = np.where(two[:, 0] == np.arange(len(points)), two[:, 1], two[:, 0])
    return int(np.sum(labels[nearest] != labels))
