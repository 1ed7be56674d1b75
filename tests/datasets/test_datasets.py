"""Tests of npgp.datasets."""

import hashlib
import http.server
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npgp import datasets
from npgp.datasets import _oil

KEY = jax.random.PRNGKey(3)
OFFSETS = np.array(_oil.VERTICAL + _oil.HORIZONTAL)
CHORDS = 2 * np.sqrt(1 - OFFSETS**2)


def digest(*arrays: np.ndarray) -> str:
    blocks = (np.ascontiguousarray(a, dtype=f"<{a.dtype.kind}8").tobytes() for a in arrays)
    return hashlib.sha256(b"".join(blocks)).hexdigest()[:16]


def one_nearest_neighbor_errors(Y, labels):
    squares = (Y**2).sum(axis=1)
    distance = squares[:, None] + squares[None, :] - 2 * Y @ Y.T
    np.fill_diagonal(distance, np.inf)
    return int((labels[distance.argmin(axis=1)] != labels).sum())


@pytest.fixture
def no_data(monkeypatch):
    monkeypatch.delenv("NPGP_DATA", raising=False)


# ---------------------------------------------------------------- files of the data folder


def test_load_promotes_floats_only(tmp_path, monkeypatch):
    monkeypatch.setenv("NPGP_DATA", str(tmp_path))
    np.savez(tmp_path / "toy.npz", x=np.float32([0.1]), k=np.int8([3]), mask=np.array([True]))
    data = datasets.load("toy")
    assert {key: value.dtype for key, value in data.items()} == {"x": "f8", "k": "i1", "mask": "?"}
    assert data["x"][0] == np.float32(0.1)


def test_load_refuses_pickles(tmp_path, monkeypatch):
    monkeypatch.setenv("NPGP_DATA", str(tmp_path))
    np.savez(tmp_path / "toy.npz", x=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="pickle"):
        datasets.load("toy")


def test_missing_files_are_said_clearly(no_data, monkeypatch, tmp_path):
    for get in (lambda: datasets.load("coal"), datasets.snelson):
        with pytest.raises(FileNotFoundError, match=r"NPGP_DATA.*npgp\[data\]"):
            get()
    with pytest.raises(ValueError, match="letters"):
        datasets.load("../coal")
    monkeypatch.setenv("NPGP_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="NPGP_DATA is set to .* not a folder"):
        datasets.load("coal")


def test_snelson(data_dir):
    x_train, y_train, x_test = datasets.snelson()
    assert (x_train.shape, y_train.shape, x_test.shape) == ((200, 1), (200,), (301, 1))
    assert x_train.dtype == y_train.dtype == x_test.dtype == np.float64
    np.testing.assert_allclose(x_test[[0, -1], 0], [-3, 10])
    assert digest(x_train, y_train, x_test) == "cb374755e1058385"


# ---------------------------------------------------------------- oil flow

OIL_DIGESTS = {
    "train": ("8cc8b78555ef1310", "f83dd2553dad9bd8", "195736a536cb0b86"),
    "valid": ("a51f175067ec01db", "b05882e57556e1e1", "4d247d7307e4efea"),
    "test": ("18cdbd11375b02c4", "25c759d37f2547c3", "7dac60d14f556aae"),
}


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_oil_flow_values(data_dir, split):
    data = datasets.oil_flow(split)
    assert data.Y.shape == (1000, 12) and data.Y.dtype == np.float64
    assert data.labels.shape == (1000,) and data.labels.dtype == np.int64
    assert data.fractions.shape == (1000, 2) and data.fractions.dtype == np.float64
    assert (digest(data.Y), digest(data.labels), digest(data.fractions)) == OIL_DIGESTS[split]


def test_oil_flow_refuses_unknown_split():
    with pytest.raises(ValueError, match="split must be one of"):
        datasets.oil_flow("all")


def write_oil_text(folder: Path, data: datasets.OilFlow, stem: str) -> None:
    np.savetxt(folder / f"{stem}.txt", data.Y, fmt="%.17g")
    np.savetxt(folder / f"{stem}Lbls.txt", np.eye(3)[data.labels], fmt="%d")


@pytest.fixture
def served(monkeypatch, tmp_path):
    """A folder that a server of this machine serves in the place of the network; and a cache of pooch's own."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setattr(_oil, "_URL", f"http://127.0.0.1:{server.server_port}/{{name}}")
        for name in ("HOME", "XDG_CACHE_HOME"):
            monkeypatch.setenv(name, str(tmp_path / "home"))
        yield folder
        server.shutdown()


def test_oil_flow_download(no_data, monkeypatch, request):
    base = (
        "https://raw.githubusercontent.com/lawrennd/datasets_mirror/"
        "2eb6dce7501464457465facc7ef9334250efe4b4/three_phase_oil_flow/"
    )
    assert _oil._URL.format(name="DataVdn.txt") == base + "DataVdn.txt"
    served = request.getfixturevalue("served")
    made = datasets.simulate_oil_flow(KEY, 7)
    write_oil_text(served, made, "DataVdn")
    with pytest.raises(ValueError, match="hash"):
        datasets.oil_flow("valid")  # other contents than those that are published
    for file in served.iterdir():
        monkeypatch.setitem(_oil._SHA256, file.name, hashlib.sha256(file.read_bytes()).hexdigest())
    data = datasets.oil_flow("valid")
    np.testing.assert_array_equal(data.Y, made.Y)
    np.testing.assert_array_equal(data.labels, made.labels)
    assert data.fractions is None
    for file in served.iterdir():
        file.unlink()
    np.testing.assert_array_equal(datasets.oil_flow("valid").Y, made.Y)  # kept
    with pytest.raises(FileNotFoundError, match=r"NPGP_DATA.*npgp\[data\]"):
        datasets.oil_flow("train")


def test_oil_flow_digests_are_those_of_the_listing(data_dir):
    listing = data_dir / "OIL_SHA256"
    if not listing.is_file():
        pytest.skip("the listing is not in the data folder")
    words = [line.split() for line in listing.read_text().splitlines() if line.strip()]
    assert {name: value for value, name in words} == _oil._SHA256


def test_oil_flow_without_pooch(no_data, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"NPGP_DATA.*npgp\[data\].*simulate_oil_flow"):
        datasets.oil_flow()


@pytest.mark.parametrize(("columns", "classes"), [(11, np.eye(3)), (12, np.ones((3, 3)))])
def test_oil_flow_text_is_checked(tmp_path, columns, classes):
    np.savetxt(tmp_path / "DataTrn.txt", np.zeros((3, columns)))
    np.savetxt(tmp_path / "DataTrnLbls.txt", classes)
    paths = {name: tmp_path / name for name in ("DataTrn.txt", "DataTrnLbls.txt")}
    with pytest.raises(ValueError, match="oil-flow text files"):
        _oil._parse(paths, "train")


# ---------------------------------------------------------------- simulated oil flow


def random_shares(n, seed=0):
    shares = np.random.default_rng(seed).uniform(size=(n, 3))
    return shares / shares.sum(axis=1, keepdims=True)


def test_simulation_form_and_determinism():
    data = datasets.simulate_oil_flow(KEY, 100)
    assert data.Y.shape == (100, 12) and data.Y.dtype == np.float64
    assert data.labels.dtype == np.int64 and data.fractions.dtype == np.float64
    assert sorted(np.bincount(data.labels)) == [33, 33, 34]
    assert 40 < (np.diff(data.labels) != 0).sum() < 85  # mixed
    assert (data.fractions > 0).all() and (data.fractions.sum(axis=1) < 1).all()
    again = datasets.simulate_oil_flow(jax.random.key(3), 100)
    np.testing.assert_array_equal(data.Y, again.Y)
    np.testing.assert_array_equal(data.labels, again.labels)
    other = datasets.simulate_oil_flow(jax.random.PRNGKey(4), 100)
    assert (data.Y != other.Y).mean() > 0.99
    with pytest.raises(ValueError, match="n must be"):
        datasets.simulate_oil_flow(KEY, 0)
    with pytest.raises(ValueError, match="counts must be"):
        datasets.simulate_oil_flow(KEY, 3, counts=0.0)


def test_simulation_does_not_depend_on_precision():
    made = []
    for x64 in (False, True):
        with jax.enable_x64(x64):
            data = datasets.simulate_oil_flow(KEY, 50, counts=None)
            shares = np.c_[data.fractions, 1 - data.fractions.sum(axis=1)]
            lengths = np.asarray(_oil._path_lengths(shares, data.labels))
        assert lengths.dtype == (np.float64 if x64 else np.float32)
        # without counting noise, the measurements are the true path lengths
        np.testing.assert_allclose(data.Y, lengths[:, :, :2].reshape(50, 12), atol=1e-4)
        made.append(data)
    np.testing.assert_array_equal(made[0].labels, made[1].labels)
    np.testing.assert_array_equal(made[0].fractions, made[1].fractions)
    np.testing.assert_allclose(made[0].Y, made[1].Y, atol=1e-4)
    np.testing.assert_allclose(data.Y, lengths[:, :, :2].reshape(50, 12), atol=1e-12)


@settings(deadline=None, max_examples=100)
@given(
    st.tuples(*[st.floats(0, 1, width=32)] * 3).filter(lambda shares: sum(shares) > 1e-3),
    st.integers(0, 2),
)
def test_path_lengths_sum_to_the_chord(shares, label):
    shares = np.array([shares]) / sum(shares)
    lengths = np.asarray(_oil._path_lengths(shares, np.array([label])))[0]
    np.testing.assert_allclose(lengths.sum(axis=1), CHORDS, rtol=1e-5)
    assert (lengths > -1e-5).all()


def test_single_phase_fills_every_beam():
    for phase in range(3):
        expected = np.zeros((3, 6, 3))
        expected[:, :, phase] = CHORDS
        lengths = _oil._path_lengths(np.eye(3)[[phase] * 3], np.arange(3))
        np.testing.assert_allclose(lengths, expected, atol=1e-3)


def test_segment_areas():
    area_below, height_of = jax.jit(_oil.segment_area), jax.jit(_oil.segment_height)
    heights = np.linspace(-1, 1, 41)
    theta = np.arccos(-heights)
    analytic = (theta - np.sin(2 * theta) / 2) / np.pi
    np.testing.assert_allclose(area_below(heights), analytic, atol=1e-6)
    np.testing.assert_allclose(height_of(analytic), heights, atol=1e-3)
    np.testing.assert_allclose(area_below(height_of(analytic)), analytic, atol=1e-6)


@pytest.mark.parametrize("label", [0, 1, 2])
def test_path_lengths_agree_with_walking_along_the_beams(label):
    shares = random_shares(5, seed=label)
    lengths = np.asarray(_oil._path_lengths(shares, np.full(5, label)))
    steps = (np.arange(40000) + 0.5) / 40000
    along = CHORDS[:, None] * (steps - 0.5)
    across = np.broadcast_to(OFFSETS[:, None], along.shape)
    height = np.where(np.arange(6)[:, None] < 3, along, across)
    table = np.linspace(-1, 1, 100001)
    width = 2 * np.sqrt(1 - table**2)
    below = np.r_[0, np.cumsum((width[1:] + width[:-1]) / 2) * (table[1] - table[0])] / np.pi
    for share, length in zip(shares, lengths, strict=True):
        if label == _oil.HOMOGENEOUS:
            expected = CHORDS[:, None] * share
        else:
            # share of the disc further out or further down than the point
            inner = np.interp(height, table, below)
            outward = inner if label == _oil.STRATIFIED else 1 - along**2 - across**2
            phase = (outward > share[0]).astype(int) + (outward > share[0] + share[1])
            expected = CHORDS[:, None] * np.stack([(phase == p).mean(1) for p in range(3)], axis=1)
        np.testing.assert_allclose(length, expected, atol=3e-4)


def test_attenuation_and_inversion():
    shares = random_shares(50)
    lengths = np.asarray(_oil._path_lengths(shares, np.arange(50) % 3), dtype=np.float64)
    attenuation = np.einsum("nbp,ep->nbe", lengths, _oil.MU)
    assert 0.03 < attenuation.min() < attenuation.max() < 3
    # the same from the two linear equations written out, less the gas, for one beam
    (a, b), (c, d) = _oil.MU[:, :2] - _oil.MU[:, 2:]
    low, high = (attenuation[:, 2] - _oil.MU[:, 2] * CHORDS[2]).T
    water, oil = (d * low - b * high) / (a * d - b * c), (a * high - c * low) / (a * d - b * c)
    found = _oil.invert(attenuation)
    np.testing.assert_allclose(found[:, 2], np.stack([water, oil], axis=1), atol=1e-12)
    np.testing.assert_allclose(found, lengths[..., :2], atol=1e-4)


@pytest.mark.parametrize("counts", [5e3, 6.5e5])
def test_counting_noise(counts):
    data = datasets.simulate_oil_flow(KEY, 1000, counts=counts)
    shares = np.c_[data.fractions, 1 - data.fractions.sum(axis=1)]
    lengths = np.asarray(_oil._path_lengths(shares, data.labels), dtype=np.float64)
    errors = data.Y.reshape(-1, 6, 2) - lengths[..., :2]
    # back to attenuations, whose variance is one over the expected number of photons
    contrast = _oil.MU[:, :2] - _oil.MU[:, 2:]
    expected_counts = counts * np.exp(-np.einsum("nbp,ep->nbe", lengths, _oil.MU))
    standard = np.einsum("nbp,ep->nbe", errors, contrast) * np.sqrt(expected_counts)
    # a stratified interface may fall on either side of a horizontal beam by rounding
    standard = standard[(abs(standard) < 8).all(axis=(1, 2))]
    assert len(standard) >= 998
    assert abs(standard.mean()) < 0.06
    np.testing.assert_allclose(standard.var(axis=(0, 1)), 1, atol=0.1)
    assert abs(np.mean(standard[..., 0] * standard[..., 1])) < 0.05


def test_simulation_separates_the_classes_in_measurement_space():
    data = datasets.simulate_oil_flow(KEY, 1000)
    assert one_nearest_neighbor_errors(data.Y, data.labels) <= 20


def test_simulation_resembles_the_real_data(data_dir):
    real, made = datasets.oil_flow("train"), datasets.simulate_oil_flow(KEY, 1000)
    assert one_nearest_neighbor_errors(real.Y, real.labels) == 2
    spectra = [np.linalg.svd(Y - Y.mean(axis=0), compute_uv=False) for Y in (real.Y, made.Y)]
    np.testing.assert_allclose(spectra[1], spectra[0], rtol=0.2)
    np.testing.assert_allclose(made.Y.mean(axis=0), real.Y.mean(axis=0), atol=0.12)
    np.testing.assert_allclose(made.Y.std(axis=0), real.Y.std(axis=0), atol=0.08)


def test_real_rows_fit_the_geometry(data_dir):
    errors = []
    for split in ("train", "valid", "test"):
        real = datasets.oil_flow(split)
        shares = np.c_[real.fractions, 1 - real.fractions.sum(axis=1)]
        lengths = np.asarray(_oil._path_lengths(shares, real.labels))[..., :2]
        errors.append(real.Y.reshape(-1, 6, 2) - lengths)
    # shares are stored with four digits, so an interface may cross a horizontal beam
    assert (abs(np.concatenate(errors)) < 0.35).all(axis=(1, 2)).sum() >= 2998
    np.testing.assert_allclose(np.median(abs(np.concatenate(errors)), axis=0), 0.035, atol=0.02)


def test_every_public_name_is_documented():
    for name in datasets.__all__:
        assert getattr(datasets, name).__doc__
    assert _oil.ENV_VAR == "NPGP_DATA"
