import itertools
import sys

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection, PathCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from scipy import special

from npgp import plots
from npgp.features import ReLU, Softplus
from npgp.gplvm import canonical_latents
from npgp.kernels import RBF, ZonalArcCosine, ZonalRBF
from npgp.training import Convergence, FitResult
from npgp.variational.posterior import Decomposition

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
    (ax,) = check(
        plots.plot_latents(mean, scale, [0.1, 0.5, 0.0, 1.0], labels, class_names=["a", "b", "c"], title="oil")
    )
    assert ax.get_xlabel() == "latent dimension 4 (most relevant)"
    assert ax.get_ylabel() == "latent dimension 2 (second most relevant)"
    assert ax.get_title() == "oil"
    assert legend(ax) == ["a", "b", "c"]
    shown = [c.get_offsets().data for c in ax.collections if c.get_offsets().shape == (3, 2)]
    np.testing.assert_allclose(np.concatenate(shown), mean[:, [3, 1]])


def test_latents_without_names_number_the_classes():
    labels = np.arange(16) % 8  # more classes than colors
    (ax,) = check(plots.plot_latents(RNG.normal(size=(16, 2)), np.ones((16, 2)), [1.0, 0.2], labels))
    assert legend(ax) == [f"class {k}" for k in range(8)]


def points_of(ax, count=None) -> np.ndarray:
    """What is scattered, series by series."""
    series = [c.get_offsets().data for c in ax.collections if isinstance(c, PathCollection)]
    return np.concatenate([s for s in series if count is None or len(s) == count])


def test_latents_without_classes_or_bars():
    mean = RNG.normal(size=(9, 3))
    (ax,) = check(
        plots.plot_latents(mean, None, [1.0, 0.1, 0.5], units="lengthscales", dimension_names=["a", "b", "c"])
    )
    assert (ax.get_xlabel(), ax.get_ylabel()) == (
        "a (most relevant), in lengthscales",
        "c (second most relevant), in lengthscales",
    )
    assert ax.get_legend() is None and not [c for c in ax.collections if isinstance(c, LineCollection)]
    np.testing.assert_allclose(points_of(ax), mean[:, [0, 2]])


def test_latents_without_a_label_are_not_taken_for_the_last_class():
    mean = RNG.normal(size=(4, 2))
    (ax,) = check(
        plots.plot_latents(mean, np.ones((4, 2)), [1.0, 0.5], np.array([1, -1, 0, 1]), class_names=["up", "down"])
    )
    assert legend(ax) == ["up", "down", "no label"]
    np.testing.assert_allclose(points_of(ax), mean[[2, 0, 3, 1]])


def test_latents_of_parameters_are_their_canonical_ones():
    params = {
        "x.loc": RNG.normal(size=(9, 3)),
        "x.scale": np.full((9, 3), 0.1),
        "lengthscale": np.array([1.0, 0.2, 5.0]),
    }
    labels = np.repeat([0, 1, 2], 3)
    latents = canonical_latents(params)
    for given in (params, latents, FitResult(params, None, np.zeros(1))):
        (ax,) = check(plots.plot_latents(given, labels))
        assert ax.get_xlabel() == "latent dimension 2 (most relevant), in lengthscales"
        assert legend(ax) == ["class 0", "class 1", "class 2"]
        np.testing.assert_allclose(points_of(ax, 3), latents.loc[:, :2])
    with pytest.raises(ValueError, match="relevance is missing"):
        plots.plot_latents(latents.loc)


def test_background_is_the_function_on_what_is_shown():
    mean = RNG.normal(size=(9, 2))
    asked = []

    def background(points):
        asked.append(points)
        return points[:, 0] ** 2 + points[:, 1]

    ax, bar = check(plots.plot_latents(mean, None, [0.5, 1.0], background=background, background_label="how far"))
    assert bar.get_ylabel() == "how far"
    (mesh,) = [c for c in ax.collections if isinstance(c, QuadMesh)]
    corners = mesh.get_coordinates().reshape(-1, 2)
    np.testing.assert_allclose(corners, asked[0])
    np.testing.assert_allclose(np.ravel(mesh.get_array()), corners[:, 0] ** 2 + corners[:, 1])
    # As far as the points reach, and behind them.
    np.testing.assert_allclose([corners.min(0), corners.max(0)], np.transpose([ax.get_xlim(), ax.get_ylim()]))
    assert np.all(corners.min(0) < mean.min(0)[::-1]) and np.all(corners.max(0) > mean.max(0)[::-1])
    assert mesh.get_zorder() < min(c.get_zorder() for c in ax.collections if isinstance(c, PathCollection))


def test_background_as_values_on_a_grid():
    x, y = np.linspace(-3, 3, 4), np.linspace(-2, 2, 5)
    values = np.arange(20.0).reshape(5, 4)
    mean = RNG.normal(size=(9, 2))
    ax, _ = check(plots.plot_latents(mean, None, [1.0, 0.5], background=((x, y), values)))
    (mesh,) = [c for c in ax.collections if isinstance(c, QuadMesh)]
    np.testing.assert_allclose(mesh.get_array(), values)
    assert ax.get_xlim() == (-3, 3) and ax.get_ylim() == (-2, 2)
    with pytest.raises(ValueError, match=r"background has shape \(4, 5\); it must be \(5, 4\)"):
        plots.plot_latents(mean, None, [1.0, 0.5], background=((x, y), values.T))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((np.zeros((3, 1)), None, [1.0]), r"mean has shape \(3, 1\)"),
        ((np.zeros((3, 2)), np.zeros(3), [1.0, 1.0]), r"scale has shape \(3,\); it must be \(3, 2\)"),
        ((np.zeros((3, 2)), None, [1.0]), r"relevance has shape \(1,\)"),
        ((np.zeros((3, 2)), None, [1.0, 1.0], [0, 1]), r"labels has shape \(2,\)"),
    ],
)
def test_latents_of_other_shapes_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        plots.plot_latents(*arguments)


def test_each_class_of_latents_has_a_name():
    with pytest.raises(ValueError, match="class_names has 1 names, and labels the class 1"):
        plots.plot_latents(np.zeros((2, 2)), None, [1.0, 1.0], [0, 1], class_names=["one"])


def test_relevance_is_sorted():
    fits = {"prior": [0.2, 1.0, 0.5], "tight": [1.0, 0.0, 0.1]}
    (ax,) = check(plots.plot_relevance(fits, threshold=0.1))
    heights = [[bar.get_height() for bar in bars] for bars in ax.containers]
    np.testing.assert_allclose(heights, [[1.0, 0.5, 0.2], [1.0, 0.1, 0.0]])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "2", "3"]
    assert {"prior (3 of 3)", "tight (2 of 3)", "counts as relevant above 0.1"} == set(legend(ax))
    bars = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for group in ax.containers for bar in group)
    assert all(left[1] <= right[0] + 1e-9 for left, right in itertools.pairwise(bars))


def test_relevance_in_the_order_of_the_dimensions():
    fits = {"first view": [0.2, 1.0, 0.5], "second view": [1.0, 0.0, 0.1]}
    (ax,) = check(plots.plot_relevance(fits, by_rank=False))
    assert [[bar.get_height() for bar in bars] for bars in ax.containers] == list(fits.values())
    assert ax.get_xlabel() == "latent dimension"


def test_relevance_of_what_cannot_be_drawn_is_refused():
    for fits in ({}, {"fit": np.ones((2, 2))}):
        with pytest.raises(ValueError, match="one \\(Q,\\) for each fit"):
            plots.plot_relevance(fits)


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


def test_what_moved_at_each_look():
    names = [f"site{i}" for i in range(8)]
    looks = tuple((step, {name: (i + 1.0) / step for i, name in enumerate(names)}) for step in (10, 20, 40))
    convergence = Convergence(True, 40, ((0.1, 25), (0.03, 15)), looks[-1][1], looks[-1][1], looks)
    (ax,) = check(plots.plot_convergence(convergence))
    falls, *curves, tenth = (line.get_data() for line in ax.lines)
    assert set(falls[0]) == {25} and set(tenth[1]) == {0.1}
    np.testing.assert_allclose(curves[0], [[10, 20, 40], [0.8, 0.4, 0.2]])  # of the site that moved most
    assert legend(ax) == ["the learning rate falls", *names[:1:-1], "a tenth"]
    with pytest.raises(ValueError, match="convergence has no history"):
        plots.plot_convergence(Convergence(False, 40, (), {}, {}))


@pytest.mark.parametrize("columns", [1, 4, 6])
def test_reconstruction_has_a_panel_per_column(columns):
    measured = RNG.normal(size=(7, columns))
    figure = plots.plot_reconstruction(measured, measured + 0.5, np.full_like(measured, 0.1))
    axes = check(figure)
    assert [ax.get_title() for ax in axes] == [f"column {d + 1}, RMSE 0.500" for d in range(columns)]
    assert figure.get_supxlabel() == "measured"


def test_reconstruction_names_columns():
    axes = check(
        plots.plot_reconstruction(np.zeros((3, 2)), np.ones((3, 2)), np.ones((3, 2)), column_names=["up", "down"])
    )
    assert [ax.get_title() for ax in axes] == ["up, RMSE 1.000", "down, RMSE 1.000"]


def test_reconstruction_leaves_out_what_was_not_measured():
    measured = np.array([[0.0, 1.0], [np.nan, 2.0], [2.0, 3.0]])
    axes = check(plots.plot_reconstruction(measured, np.ones((3, 2)), np.ones((3, 2)), units="cm"))
    np.testing.assert_allclose(points_of(axes[0]), [[0, 1], [2, 1]])
    assert axes[0].get_title() == "column 1, RMSE 1.000"
    assert axes[0].figure.get_supxlabel() == "measured (cm)"
    with pytest.raises(ValueError, match=r"scale has shape \(2, 2\); it must be \(3, 2\)"):
        plots.plot_reconstruction(measured, np.ones((3, 2)), np.ones((2, 2)))
    with pytest.raises(ValueError, match="column_names has 1 names for 2 columns"):
        plots.plot_reconstruction(measured, np.ones((3, 2)), np.ones((3, 2)), column_names=["up"])


# ---------------------------------------------------------------- what was missing


def test_imputation_shows_missing_entries_alone():
    truth = RNG.normal(size=(10, 7))
    mean, present = truth + 1.0, np.ones((10, 7), bool)
    present[[1, 4, 5, 8], 2] = False
    present[:, 3] = False
    present[0, 5] = False
    truth[0, 5] = np.nan  # missing, and the truth is not known
    scale = np.full((10, 7), 0.6)  # the bars reach 1.2
    scale[4, 2] = 0.4
    figure = plots.plot_imputation(truth, mean, scale, present, column_names=[f"c{d}" for d in range(7)], units="cm")
    two, three = check(figure)
    assert two.get_title() == "c2, RMSE 1.000\n4 missing, 75% inside the bars"
    assert three.get_title() == "c3, RMSE 1.000\n10 missing, 100% inside the bars"
    rows = ~present[:, 2]
    np.testing.assert_allclose(points_of(two), np.stack([truth[rows, 2], mean[rows, 2]], -1))
    (bars,) = [c for c in two.collections if isinstance(c, LineCollection)]
    lengths = [segment[1, 1] - segment[0, 1] for segment in bars.get_segments()]
    np.testing.assert_allclose(lengths, 4 * scale[rows, 2])
    levels = {ax: [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"] for ax in (two, three)}
    np.testing.assert_allclose(levels[two], [truth[present[:, 2], 2].mean()])
    assert levels[three] == []  # nothing was present
    explained = [text.get_text() for text in figure.legends[0].get_texts()]
    assert explained == ["entry, ± 2 standard deviations", "equal", "mean of the column's present values"]
    assert (figure.get_supxlabel(), figure.get_supylabel()) == (
        "true value (cm)",
        "imputed (cm), ± 2 standard deviations",
    )


def test_a_few_long_bars_do_not_set_the_axis():
    truth = np.linspace(0.0, 1.0, 60)[:, None]
    scale = np.full((60, 1), 0.1)
    scale[[7, 30]] = 5.0
    (ax,) = check(plots.plot_imputation(truth, truth, scale, np.zeros((60, 1), bool)))
    (bars,) = [c for c in ax.collections if isinstance(c, LineCollection)]
    lengths = np.array([segment[1, 1] - segment[0, 1] for segment in bars.get_segments()])
    usual = np.setdiff1d(np.arange(60), [7, 30])
    np.testing.assert_allclose(lengths[usual], 0.4)
    np.testing.assert_allclose(lengths[[7, 30]], 1.4)  # from -.2 to 1.2, as far as the others
    marks = [np.stack(line.get_data(), -1) for line in ax.lines if line.get_marker() in "v^"]
    np.testing.assert_allclose(marks, [[[x, end] for x in truth[[7, 30], 0]] for end in (-0.2, 1.2)])
    assert "100% inside" in ax.get_title()  # by their full length


def test_imputation_of_nothing_or_of_other_shapes_is_refused():
    table = np.zeros((3, 2))
    with pytest.raises(ValueError, match="no missing entry"):
        plots.plot_imputation(table, table, table, np.ones((3, 2), bool))
    with pytest.raises(ValueError, match=r"present has shape \(2, 3\)"):
        plots.plot_imputation(table, table, table, np.zeros((2, 3), bool))


def pictures(axes) -> list[np.ma.MaskedArray]:
    return [ax.images[0].get_array() for ax in axes]


def test_imputed_images_have_a_row_for_each_thing():
    images, shape = RNG.uniform(size=(3, 20)), (5, 4)
    present = np.ones((3, 5, 4), bool)
    present[:, 3:] = False
    mean, scale = images + 1.0, RNG.uniform(0.5, 1.0, (3, 20))
    figure = plots.plot_imputed_images(images, mean, scale, present, shape, label="gray level")
    figure.canvas.draw()
    *panels, first_bar, second_bar = figure.axes
    assert len(panels) == 12 and {bar.get_ylabel() for bar in (first_bar, second_bar)} == {
        "gray level",
        "standard deviation",
    }
    assert [ax.get_ylabel() for ax in panels[::3]] == ["original", "seen", "imputed", "standard deviation"]
    original, seen, imputed, deviation = np.split(np.ma.stack(pictures(panels)), 4)
    square = images.reshape(3, 5, 4)
    np.testing.assert_allclose(original, square)
    np.testing.assert_array_equal(np.ma.getmaskarray(seen), ~present)
    np.testing.assert_allclose(imputed[:, :3], square[:, :3])
    np.testing.assert_allclose(imputed[:, 3:], square[:, 3:] + 1.0)
    np.testing.assert_array_equal(np.ma.getmaskarray(deviation), present)
    np.testing.assert_allclose(deviation[:, 3:], scale.reshape(3, 5, 4)[:, 3:])
    # One gray scale for all that are compared, and deviations from 0.
    limits = {ax.images[0].get_clim() for ax in panels[:9]}
    assert limits == {(images.min(), max(images.max(), mean[:, 12:].max()))}
    assert {ax.images[0].get_clim() for ax in panels[9:]} == {(0.0, scale[:, 12:].max())}


def test_images_in_either_layout():
    flat = RNG.uniform(size=(2, 6))
    figure = plots.plot_images({"original": flat, "reconstructed": flat.reshape(2, 3, 2)}, (3, 2))
    *panels, bar = figure.axes
    np.testing.assert_allclose(*np.split(np.stack(pictures(panels)), 2))
    assert bar.get_ylabel() == "pixel value"


@pytest.mark.parametrize(
    "images, deviations, words",
    [
        ({}, None, "must have images"),
        ({"a": np.zeros((2, 5))}, None, r"a has shape \(2, 5\); it must be \(K, 6\)"),
        ({"a": np.zeros((2, 6)), "b": np.zeros((3, 6))}, None, r"b has shape \(3, 6\); it must be \(2, 6\)"),
        ({"a": np.zeros((2, 6))}, {"a": np.zeros((2, 6))}, "a name of its own"),
    ],
)
def test_images_that_cannot_be_drawn_are_refused(images, deviations, words):
    with pytest.raises(ValueError, match=words):
        plots.plot_images(images, (3, 2), deviations=deviations)


def test_pictures_can_be_saved(tmp_path):
    table, present = RNG.normal(size=(8, 3)), np.arange(24).reshape(8, 3) % 3 > 0
    figures = {
        "latents": plots.plot_latents(table, abs(table), [1, 2, 3], background=lambda p: p[:, 0] ** 2),
        "imputation": plots.plot_imputation(table, table + 0.1, abs(table), present),
        "images": plots.plot_imputed_images(table, table, abs(table), present, (3, 1)),
    }
    for name, figure in figures.items():
        figure.savefig(path := tmp_path / f"{name}.png")
        assert path.read_bytes()[:5] == b"\x89PNG\r"


@pytest.mark.parametrize("exact", [None, (np.zeros(11), np.ones(11))], ids=["alone", "with exact"])
def test_fit_has_a_panel_per_fit(exact):
    x, grid = RNG.normal(size=8), np.linspace(-2, 2, 11)
    fits = {
        "prior": (np.sin(grid), np.full(11, 0.2), np.zeros((3, 1))),
        "tight": (np.cos(grid), np.full(11, 0.1), np.ones(4)),
    }
    axes = check(plots.plot_fit(x, np.sin(x), grid, fits, exact=exact))
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
    figure = plots.plot_decomposition(x[:, None], parts, data=data)
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


def test_variance_is_a_stack_of_parts():
    x = RNG.permutation(np.linspace(-2, 2, 9))
    one = Decomposition(("principal", "residual"), RNG.normal(size=(2, 9)) * [[1], [0]], RNG.uniform(size=(2, 9)))
    names = ("principal", "orthogonal", "residual")
    two = Decomposition(names, RNG.normal(size=(3, 9)) * [[1], [1], [0]], RNG.uniform(size=(3, 9)))
    figure = plots.plot_variance(x[:, None], {"two blocks": two, "one block": one}, data=(x, np.sin(x)))
    figure.canvas.draw()
    axes = np.array(figure.axes).reshape(2, 2)
    assert [ax.get_title() for ax in axes[0]] == ["two blocks", "one block"]
    assert [ax.get_ylabel() for ax in axes[:, 0]] == ["f", "posterior variance of f"]
    assert [ax.get_xlabel() for ax in axes[1]] == ["x", "x"]
    labels = ["data", "mean ± 2 standard deviations", "principal", "orthogonal", "residual"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels
    for (above, below), parts in zip(axes.T, (two, one), strict=True):
        order = np.argsort(x)
        total, *blocks = (line.get_data() for line in above.lines)
        np.testing.assert_allclose(total, [x[order], parts.mean.sum(0)[order]])
        np.testing.assert_allclose(blocks, [[x[order], mean[order]] for mean in parts.mean[:-1]])
        band, layers = above.collections[-1].get_paths()[0].vertices, below.collections
        edge = parts.mean.sum(0) + 2 * np.sqrt(parts.variance.sum(0))
        np.testing.assert_allclose([band[band[:, 0] == at, 1].max() for at in x], edge)
        assert len(layers) == len(parts.names)
        top = 0.0
        for layer, variance in zip(layers, parts.variance, strict=True):
            vertices = layer.get_paths()[0].vertices
            np.testing.assert_allclose([vertices[vertices[:, 0] == at, 1].min() for at in x], top, atol=1e-12)
            top = top + variance
            np.testing.assert_allclose([vertices[vertices[:, 0] == at, 1].max() for at in x], top)
        # Everything is in view.
        assert below.get_ylim()[0] == 0 and below.get_ylim()[1] > max(np.max(p.variance.sum(0)) for p in (one, two))
        colors = [tuple(layer.get_facecolor()[0]) for layer in layers]
        assert [line.get_color() for line in above.lines[1:]] == [to_hex(c).upper() for c in colors[:-1]]


def test_variance_of_what_cannot_be_drawn_is_refused():
    parts = Decomposition(("principal", "residual"), np.zeros((2, 3, 4)), np.zeros((2, 3, 4)))
    with pytest.raises(ValueError, match=r"decomposition.mean has shape \(2, 3, 4\)"):
        plots.plot_variance(np.zeros(4), {"three outputs": parts})
    with pytest.raises(ValueError, match="there must be at least one"):
        plots.plot_variance(np.zeros(4), {})


def test_spectra_have_the_levels_that_there_are(float64):
    # In space the cosine is uniform: E[t₊ P_ℓ] = 1/4, 1/6, 1/16, 0, −1/96.
    relu = np.array([1 / 4, 1 / 6, 1 / 16, 1 / 96])
    kernels = {"arc-cosine": 3.0 * ZonalArcCosine(1), "RBF": ZonalRBF(0.8)}
    shapes = {"ReLU": ReLU(), "softplus": Softplus(), "square": lambda t: 5.0 * t**2}
    (ax,) = check(plots.plot_spectra(kernels, shapes, 3, levels=(0, 1, 2, 3, 4)))
    assert ax.get_yscale() == "log" and "dimension 3" in ax.get_xlabel()
    assert legend(ax) == ["√λ, arc-cosine", "√λ, RBF", "|ς|, ReLU", "|ς|, softplus", "|ς|, square"]
    levels, sizes = zip(*(line.get_data() for line in ax.lines), strict=True)
    assert [list(at) for at in levels] == [[0, 1, 2, 4], [0, 1, 2, 3, 4], [0, 1, 2, 4], [0, 1, 2, 4], [0, 2]]
    np.testing.assert_allclose(sizes[0], np.sqrt(6) * relu, rtol=1e-12)
    z = 0.8**-2
    exact = np.sqrt(np.pi / (2 * z)) * special.ive(np.arange(5) + 0.5, z)
    np.testing.assert_allclose(sizes[1], np.sqrt(exact), rtol=1e-10)
    np.testing.assert_allclose(sizes[2], relu, rtol=1e-12)
    np.testing.assert_allclose(sizes[4], [5 / 3, 2 / 3], rtol=1e-12)
    with pytest.raises(TypeError, match="the kernel is RBF, but a spectrum's features need a zonal kernel"):
        plots.plot_spectra({"RBF": RBF()}, {}, 3)
    with pytest.raises(ValueError, match="kernels and shapes are both empty"):
        plots.plot_spectra({}, {}, 3)


def test_missing_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install npgp\[plots\]"):
        plots.plot_elbo({"fit": [-1.0, 0.0]})


# ---------------------------------------------------------------------------------------------------------------
# Posteriors by method


def draws_of(shift=0.0, scale=1.0):
    rng = np.random.default_rng(3)
    return {
        "level": shift + scale * rng.normal(size=400),
        "effect": shift + scale * rng.normal(size=(400, 3)),
        "f.u": rng.normal(size=(400, 40)),
    }


def segments_of(ax) -> list[np.ndarray]:
    """The intervals of each method: rows of low, high and height."""
    lines = [c.get_segments() for c in ax.collections if isinstance(c, LineCollection)]
    return [np.array([[s[0, 0], s[1, 0], s[0, 1]] for s in method]) for method in lines]


def test_posteriors_by_method_are_quantiles_with_the_truth():
    both = {"SVI": draws_of(scale=0.1), "NUTS": draws_of(0.5)}
    truth = {"level": 0.9, "effect": [0.0, 0.3, 9.0]}
    figure = plots.compare_posteriors(both, truth=truth, level=0.8, labels={"effect": ["north", "south", "west"]})
    (ax,) = check(figure)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["level", "north", "south", "west"]  # f.u has 40
    inside = []
    for found, draws in zip(segments_of(ax), both.values(), strict=True):
        values = np.column_stack([draws["level"], draws["effect"]])
        low, high = np.quantile(values, [0.1, 0.9], axis=0)
        np.testing.assert_allclose(found[:, :2], np.column_stack([low, high]))
        assert np.all(np.abs(found[:, 2] - np.arange(4)) < 0.5)
        true = np.array([0.9, 0.0, 0.3, 9.0])
        inside.append(int(np.sum((low < true) & (true < high))))
    assert inside == [1, 3]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    counts = [f"{m}: intervals of 80%, {n} of 4 hold the truth" for m, n in zip(both, inside, strict=True)]
    assert words == [*counts, "truth"]
    (marks,) = [line for line in ax.lines if line.get_marker() == "|"]
    np.testing.assert_allclose(marks.get_xydata(), np.column_stack([[0.9, 0.0, 0.3, 9.0], np.arange(4)]))


def test_posteriors_in_several_panels_and_of_many_methods():
    many = {f"method {i}": draws_of(0.1 * i) for i in range(8)}
    figure = plots.compare_posteriors(
        many, names=[["effect"], ["level"]], truth={"level": 0.0}, units=["effect", "level (m)"]
    )
    left, right = check(figure)
    assert (left.get_xlabel(), right.get_xlabel()) == ("effect", "level (m)")
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["effect[0]", "effect[1]", "effect[2]"]
    assert len(segments_of(left)) == len(segments_of(right)) == 8
    looks = {(line.get_color(), line.get_marker()) for line in left.lines}
    assert len(looks) == 8
    assert not [line for line in left.lines if line.get_marker() == "|"]  # no truth there


def test_posteriors_from_arviz():
    """Chains are put together; without a truth the legend counts nothing."""
    xarray = pytest.importorskip("xarray")
    draws = draws_of()
    level = xarray.DataArray(draws["level"].reshape(2, 200), dims=("chain", "draw"))
    effect = xarray.DataArray(draws["effect"].reshape(2, 200, 3), dims=("chain", "draw", "region"))
    groups = {"posterior": xarray.Dataset({"level": level, "effect": effect})}
    figure = plots.compare_posteriors({"a": groups, "b": draws}, names=["level", "effect"])
    (ax,) = check(figure)
    one, other = segments_of(ax)
    np.testing.assert_allclose(one[:, :2], other[:, :2])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"{m}: intervals of 90%" for m in "ab"]


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (({},), ValueError, "posteriors is empty"),
        (({"a": draws_of()}, {"level": 1.5}), ValueError, "level is 1.5; it must be between 0 and 1"),
        (({"a": draws_of()}, {"names": ["slope"]}), ValueError, "the draws of 'a' have no 'slope'"),
        (({"a": draws_of()}, {"names": "level"}), ValueError, "names is 'level'; it must be a list"),
        (({"a": draws_of()}, {"truth": {"effect": [1.0]}}), ValueError, "truth has 1 entries for 'effect'"),
        (({"a": draws_of()}, {"labels": {"effect": ["x"]}}), ValueError, "labels has 1 entries for 'effect'"),
        (({"a": draws_of()}, {"units": ["x", "y"]}), ValueError, "units has 2 names; there are 1 panels"),
        (({"a": [1.0, 2.0]},), TypeError, "posteriors has a list for 'a'"),
        (({"a": {"x": np.ones((5, 2))}, "b": {"x": np.ones(5)}}, {"names": ["x"]}), ValueError, "different shapes"),
        (({"a": {"x": np.ones(5)}, "b": {"z": np.ones(5)}},), ValueError, "no site of at most 30 entries in common"),
    ],
)
def test_posteriors_that_cannot_be_compared(arguments, error, words):
    with pytest.raises(error, match=words):
        plots.compare_posteriors(arguments[0], **(arguments[1] if len(arguments) > 1 else {}))
