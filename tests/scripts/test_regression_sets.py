"""Splits of regression sets, beside the arrays that are stored."""

import numpy as np
import pytest
from loading import script

from npgp import datasets

regression_sets = script("regression_sets")


@pytest.mark.parametrize(("name", "splits"), [("servo", 10), ("autos", 10), ("yacht_raw", 10), ("power", 20)])
def test_uci_splits(data_dir, name, splits):
    data = datasets.load(f"uci_{name}")
    n = len(data["y"])
    tests = []
    for k in range(splits):
        train, test = regression_sets.rows_of(name, data, k)
        np.testing.assert_array_equal(np.sort(np.r_[train, test]), np.arange(n))
        assert 0.05 < len(test) / n < 0.15
        tests.append(test)
    if "test_idx" in data:
        np.testing.assert_array_equal(tests[3], np.sort(data["test_idx"][3]))
    else:
        np.testing.assert_array_equal(np.sort(np.concatenate(tests)), np.arange(n))
    with pytest.raises(ValueError, match=f"must be 0..{splits - 1}, got {splits}"):
        regression_sets.uci(name, splits)
    with pytest.raises(ValueError, match="got 'orig'"):
        regression_sets.uci(name, "orig")


@pytest.mark.parametrize(
    ("name", "shapes"),
    [("kin40k", ((10000, 8), (30000, 8))), ("pumadyn32nm", ((7168, 32), (1024, 32)))],
)
def test_uci_original_split(data_dir, name, shapes):
    data = regression_sets.uci(name, "orig", standardize=False)
    assert (data.X_train.shape, data.X_test.shape) == shapes
    stored = datasets.load(f"uci_{name}")
    np.testing.assert_array_equal(data.X_train, stored["X"][stored["orig_train_idx"]])
    np.testing.assert_array_equal(data.y_test, stored["y"][stored["orig_test_idx"]])
    rows = np.r_[stored["orig_train_idx"], stored["orig_test_idx"]]
    np.testing.assert_array_equal(np.sort(rows), np.arange(len(stored["y"])))


@pytest.mark.parametrize("name", ["yacht", "challenger", "sml"])
def test_uci_standardization(data_dir, name):
    raw, data = regression_sets.uci(name, 4, standardize=False), regression_sets.uci(name, 4)
    assert {array.dtype for array in (data.X_train, data.y_train, data.X_test, data.y_test)} == {np.dtype(np.float64)}
    constant = np.ptp(raw.X_train, axis=0) == 0
    assert constant.sum() == {"yacht": 0, "challenger": 1, "sml": 4}[name]
    np.testing.assert_allclose(data.X_train.mean(axis=0), 0, atol=1e-9)
    np.testing.assert_allclose(data.X_train.std(axis=0), np.where(constant, 0, 1), atol=1e-9)
    np.testing.assert_allclose([data.y_train.mean(), data.y_train.std()], [0, 1], atol=1e-9)
    mean, scale = raw.X_train.mean(axis=0), np.where(constant, 1, raw.X_train.std(axis=0))
    np.testing.assert_allclose(data.X_test * scale + mean, raw.X_test, atol=1e-9)
    np.testing.assert_allclose(data.y_test * data.y_scale + raw.y_train.mean(), raw.y_test, atol=1e-9)
    assert raw.y_scale == 1.0
