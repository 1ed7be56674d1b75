"""The order of rows: permutations, of which parts can be asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npgp.training import data
from npgp.training.data import Shuffle


@pytest.fixture
def computed(monkeypatch):
    """Also small sizes by the network."""
    monkeypatch.setattr(data, "MAX_KEPT", 0)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 5))
def test_an_epoch_visits_every_row_once(computed, size, seed, epoch):
    assert (np.sort(Shuffle([seed], size)(epoch, 0, size)) == np.arange(size)).all()


@pytest.mark.parametrize("network", [False, True])
def test_parts_are_those_of_the_whole(network, monkeypatch):
    if network:
        monkeypatch.setattr(data, "MAX_KEPT", 0)
    whole = Shuffle([3, 4], 1000)(2, 0, 1000)
    for start, stop in [(990, 1000), (0, 7), (500, 501)]:
        np.testing.assert_array_equal(Shuffle([3, 4], 1000)(2, start, stop), whole[start:stop])
    assert (Shuffle([3, 4], 1000)(3, 0, 1000) != whole).mean() > 0.9
    assert (Shuffle([3, 5], 1000)(2, 0, 1000) != whole).mean() > 0.9


def test_the_network_looks_random(computed):
    """Marginals, pairs of neighbors, cycles and inversions as of uniformly random permutations."""
    size, epochs = 30, 6000
    order = Shuffle([1], size)
    draws = np.stack([order(epoch, 0, size) for epoch in range(epochs)])
    # How often each row comes at each place: a χ² of 29² degrees of freedom, within five standard deviations.
    counts = np.stack([np.bincount(column, minlength=size) for column in draws.T])
    chi2 = ((counts - epochs / size) ** 2 / (epochs / size)).sum()
    assert abs(chi2 - 29**2) < 5 * np.sqrt(2 * 29**2)
    # Ordered pairs of rows in the first two places.
    pairs = np.bincount(draws[:, 0] * size + draws[:, 1], minlength=size**2).reshape(size, size)
    assert (np.diag(pairs) == 0).all()
    expected = epochs / (size * (size - 1))
    chi2 = ((pairs - expected) ** 2 / expected)[~np.eye(size, dtype=bool)].sum()
    assert abs(chi2 - 869) < 5 * np.sqrt(2 * 869)
    inversions = np.mean([np.triu(draw[:, None] > draw[None, :], 1).sum() for draw in draws[:500]])
    assert abs(inversions - size * (size - 1) / 4) < 5 * np.sqrt(size * (size - 1) * (2 * size + 5) / 72 / 500)


def test_large_orders_are_neither_drawn_nor_kept():
    order = Shuffle([1], 10**10)
    rows = order(5, 10**9, 10**9 + 50_000)
    assert len(set(rows.tolist())) == 50_000 and rows.min() >= 0 and rows.max() < 10**10
    assert abs(rows.mean() / 10**10 - 0.5) < 5 / np.sqrt(12 * 50_000)
    assert order._order.size == data._ROUNDS
