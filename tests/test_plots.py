import itertools
import sys

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from npgp import plots
from npgp.posteriors import Decomposition

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def check(figure) -> list:
    """Render a figure, warnings being errors; its visible axes, all of which have labels."""
    assert isinstance(figure, Figure)
    figure.canvas.draw()
    axes = [ax for ax in figure.axes if ax.get_visible()]
    assert any(ax.get_xlabel() for ax in axes) or figure.get_supxlabel()
    assert all(ax.get_ylabel() for ax in axes) or figure.get_supylabel()
    return axes


def legend(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_latents_show_the_two_most_relevant_dimensions():
    mean, scale = RNG.normal(size=(9, 4)), np.full((9, 4), 0.1)
    labels = np.repeat([0, 1, 2], 3)
    (ax,) = check(plots.plot_latents(mean, scale, [0.1, 0.5, 0.0, 1.0], labels, ["a", "b", "c"], title="oil"))
    assert ax.get_xlabel() == "latent dimension 4 (most relevant)"
    assert ax.get_ylabel() == "latent dimension 2"
    assert ax.get_title() == "oil"
    assert legend(ax) == ["a", "b", "c"]
    shown = [c.get_offsets().data for c in ax.collections if c.get_offsets().shape == (3, 2)]
    np.testing.assert_allclose(np.concatenate(shown), mean[:, [3, 1]])


def test_latents_without_names_number_the_classes():
    labels = np.arange(16) % 8  # more classes than colours
    (ax,) = check(plots.plot_latents(RNG.normal(size=(16, 2)), np.ones((16, 2)), [1.0, 0.2], labels))
    assert legend(ax) == [f"class {k}" for k in range(8)]


def test_relevance_is_sorted():
    fits = {"prior": [0.2, 1.0, 0.5], "tight": [1.0, 0.0, 0.1]}
    (ax,) = check(plots.plot_relevance(fits, threshold=0.1))
    heights = [[bar.get_height() for bar in bars] for bars in ax.containers]
    np.testing.assert_allclose(heights, [[1.0, 0.5, 0.2], [1.0, 0.1, 0.0]])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "2", "3"]
    assert {"prior", "tight", "counts as relevant above 0.1"} == set(legend(ax))
    bars = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for group in ax.containers for bar in group)
    assert all(left[1] <= right[0] + 1e-9 for left, right in itertools.pairwise(bars))


def test_elbo_traces_are_averaged_per_row():
    trace = -100.0 / np.arange(1, 51)
    (ax,) = check(plots.plot_elbo({"tight": trace, "prior": trace - 10.0}, rows=10, window=5))
    assert "per row" in ax.get_ylabel()
    steps, values = ax.lines[0].get_data()
    assert (steps[0], steps[-1]) == (5, 50)
    np.testing.assert_allclose(values[[0, -1]], [trace[:5].mean() / 10, trace[-5:].mean() / 10])
    assert legend(ax) == ["tight: -0.21 at the end", "prior: -1.21 at the end"]
    assert ax.get_ylim()[1] > values[-1] > ax.get_ylim()[0]


def test_elbo_of_a_short_run_is_not_averaged_away():
    (ax,) = check(plots.plot_elbo({"fit": [-3.0, -2.0, -1.0]}))
    np.testing.assert_allclose(ax.lines[0].get_data(), [[1, 2, 3], [-3.0, -2.0, -1.0]])
    assert "per row" not in ax.get_ylabel()


@pytest.mark.parametrize("columns", [1, 4, 6])
def test_reconstruction_has_a_panel_per_column(columns):
    measured = RNG.normal(size=(7, columns))
    figure = plots.plot_reconstruction(measured, measured + 0.5, np.full_like(measured, 0.1))
    axes = check(figure)
    assert [ax.get_title() for ax in axes] == [f"column {d + 1}, RMSE 0.500" for d in range(columns)]
    assert figure.get_supxlabel() == "measured"


def test_reconstruction_names_columns():
    axes = check(plots.plot_reconstruction(np.zeros((3, 2)), np.ones((3, 2)), np.ones((3, 2)), ["up", "down"]))
    assert [ax.get_title() for ax in axes] == ["up, RMSE 1.000", "down, RMSE 1.000"]


@pytest.mark.parametrize("exact", [None, (np.zeros(11), np.ones(11))], ids=["alone", "with exact"])
def test_fit_has_a_panel_per_fit(exact):
    x, grid = RNG.normal(size=8), np.linspace(-2, 2, 11)
    fits = {
        "prior": (np.sin(grid), np.full(11, 0.2), np.zeros((3, 1))),
        "tight": (np.cos(grid), np.full(11, 0.1), np.ones(4)),
    }
    axes = check(plots.plot_fit(x, np.sin(x), grid, fits, exact))
    assert [ax.get_title() for ax in axes] == ["prior", "tight"]
    assert axes[-1].get_xlabel() == "x"
    for ax, (mean, _, inducing) in zip(axes, fits.values(), strict=True):
        lines = {line.get_label(): line for line in ax.lines}
        np.testing.assert_allclose(lines["mean ± 2 standard deviations"].get_ydata(), mean)
        np.testing.assert_allclose(lines["inducing inputs"].get_xdata(), np.ravel(inducing))
        assert ("exact GP" in lines) == (exact is not None)
    assert {"data", "inducing inputs"} <= set(legend(axes[0]))


@pytest.mark.parametrize("data", [None, (np.zeros((5, 1)), np.ones(5))], ids=["alone", "with data"])
def test_decomposition_has_a_panel_per_part_and_the_total(data):
    x, names = RNG.permutation(np.linspace(-2, 2, 11)), ("principal", "orthogonal", "residual")
    parts = Decomposition(names, RNG.normal(size=(3, 11)), RNG.uniform(size=(3, 11)))
    figure = plots.plot_decomposition(x[:, None], parts, data)
    figure.canvas.draw()
    axes, order = figure.axes, np.argsort(x)
    assert [ax.get_title() for ax in axes] == [*names, "total"]
    assert all(ax.get_xlabel() == "x" for ax in axes) and axes[0].get_ylabel() == "f"
    panels = [*zip(parts.mean, parts.variance, strict=True), (parts.mean.sum(0), parts.variance.sum(0))]
    for ax, (mean, variance) in zip(axes, panels, strict=True):
        np.testing.assert_allclose(ax.lines[0].get_data(), [x[order], mean[order]])
        (band,) = ax.collections[-1].get_paths()
        for sign in (-2, 2):
            edge = np.stack([x, mean + sign * np.sqrt(variance)], -1)
            distance = np.abs(edge[:, None] - band.vertices).sum(-1).min(1)
            np.testing.assert_allclose(distance, 0, atol=1e-12)
    explained = [text.get_text() for text in figure.legends[0].get_texts()]
    assert explained == ["data"] * (data is not None) + ["mean ± 2 standard deviations"]
    assert len(axes[-1].collections) == 1 + (data is not None)


def test_decomposition_of_what_cannot_be_drawn_is_refused():
    parts = Decomposition(("principal", "residual"), np.zeros((2, 3, 4)), np.zeros((2, 3, 4)))
    with pytest.raises(ValueError, match=r"X has shape \(4, 2\)"):
        plots.plot_decomposition(np.zeros((4, 2)), parts)
    with pytest.raises(ValueError, match=r"decomposition.mean has shape \(2, 3, 4\)"):
        plots.plot_decomposition(np.zeros(4), parts)


def test_missing_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install npgp\[plots\]"):
        plots.plot_elbo({"fit": [-1.0, 0.0]})
