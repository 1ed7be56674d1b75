"""``--data FILE.npz``: rows of the user's own, and what is said of files that are none."""

import numpy as np
import pytest

from studies import own_file


def test_splits_are_standardized_and_partition_the_rows(tmp_path):
    rng = np.random.default_rng(0)
    X, y = rng.normal(3.0, 2.0, (37, 2)), rng.normal(10.0, 4.0, 37)
    X[:, 1] = 1.0  # constant
    np.savez(tmp_path / "mine.npz", X=X, y=y)
    found = [own_file.split(tmp_path / "mine.npz", i) for i in range(own_file.SEEDED_FOLDS)]
    tests = np.concatenate([data.y_test * data.y_scale + data.y_mean for data in found])
    np.testing.assert_allclose(np.sort(tests), np.sort(y))
    for data in found:
        np.testing.assert_allclose(data.X_train.mean(0), 0.0, atol=1e-12)
        np.testing.assert_allclose(data.X_train.std(0), [1.0, 0.0], atol=1e-12)
        np.testing.assert_allclose([data.y_train.mean(), data.y_train.std()], [0.0, 1.0], atol=1e-12)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"X": np.zeros((20, 2))}, "y is not a file"),
        ({"X": np.zeros(20), "y": np.zeros(20)}, r"X has shape \(20,\)"),
        ({"X": np.full((20, 2), np.nan), "y": np.zeros(20)}, "NaN"),
    ],
)
def test_other_files_are_refused(arrays, words, tmp_path):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(SystemExit, match=words):
        own_file.rows(tmp_path / "mine.npz")
    with pytest.raises(SystemExit, match="No such file"):
        own_file.rows(tmp_path / "other.npz")
