"""Convolutional kernels and inducing patches: against sums that are written out, and as blocks of bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp.features import Patches
from npgp.kernels import Constant, Convolutional, convolutional

RNG = np.random.default_rng(3)
GRAY, COLOR, PATCH = (4, 5), (4, 5, 2), (2, 3)
#: For each case: shape of images, how channels are taken, number of patches and of their columns.
CASES = {
    "gray": (GRAY, "together", 9, 6),
    "channels together": (COLOR, "together", 9, 12),
    "channels apart": (COLOR, "apart", 18, 6),
}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def patches_of(image, shape, channels):
    """The patches of one flattened image, by loops."""
    pixels = image.reshape(*shape[:2], -1)
    found = []
    for row in range(shape[0] - PATCH[0] + 1):
        for column in range(shape[1] - PATCH[1] + 1):
            patch = pixels[row : row + PATCH[0], column : column + PATCH[1]]
            parts = [patch] if channels == "together" else np.moveaxis(patch, -1, 0)
            found += [part.ravel() for part in parts]
    return np.array(found)


def case(name, weighted=True):
    shape, channels, P, columns = CASES[name]
    X = RNG.normal(size=(3, int(np.prod(shape))))
    w = RNG.normal(size=P) if weighted else np.full(P, 1.0 / P)
    kernel = Convolutional(
        npgp.RBF(1.7, variance=0.9),
        image_shape=shape,
        patch_shape=PATCH,
        weights=w if weighted else None,
        channels=channels,
    )
    return kernel, X, w, [patches_of(x, shape, channels) for x in X], RNG.normal(size=(4, columns))


def rbf(a, b):
    return 0.9 * np.exp(-0.5 * np.sum((a[:, None] - b) ** 2, -1) / 1.7**2)


@pytest.mark.parametrize("name, weighted", [("gray", True), ("channels apart", True), ("channels together", False)])
def test_sums_over_patches(name, weighted, monkeypatch):
    kernel, X, w, patches, Z = case(name, weighted)
    np.testing.assert_array_equal(kernel.patches(X), patches)
    dense = np.array([[w @ rbf(a, b) @ w for b in patches] for a in patches])
    block = Patches(Z)
    for budget in (2**19, 1):  # all images at once, and one by one
        monkeypatch.setattr(convolutional, "entries_at_once", lambda budget=budget: budget)
        np.testing.assert_allclose(kernel(X), dense, rtol=1e-12)
        np.testing.assert_allclose(kernel(X, X[:2]), dense[:, :2], rtol=1e-12)
        np.testing.assert_allclose(kernel.diag(X), np.diag(dense), rtol=1e-12)
        cross = [[rbf(z[None], b)[0] @ w for b in patches] for z in Z]
        np.testing.assert_allclose(block.cross(kernel, X), cross, rtol=1e-12)
    np.testing.assert_allclose(block.gram(kernel), rbf(Z, Z), rtol=1e-12)
    # A factor, and a term beside.
    more = 4.0 * kernel + Constant(variance=0.3)
    np.testing.assert_allclose(block.cross(more, X), 2.0 * block.cross(kernel, X), rtol=1e-12)
    np.testing.assert_allclose(block.gram(more), block.gram(kernel))


def test_gradients_are_those_of_finite_differences(monkeypatch):
    monkeypatch.setattr(convolutional, "entries_at_once", lambda: 100)  # several chunks
    _, X, w, _, Z = case("channels apart")

    def value(parts):
        k = Convolutional(
            npgp.RBF(parts["lengthscale"]), image_shape=COLOR, patch_shape=PATCH, weights=parts["w"], channels="apart"
        )
        return jnp.sum(jnp.sin(Patches(parts["Z"]).cross(k, parts["X"]))) + jnp.sum(jnp.log(k.diag(parts["X"])))

    at = {"lengthscale": jnp.array(1.3), "w": jnp.asarray(w), "Z": jnp.asarray(Z), "X": jnp.asarray(X)}
    slopes, value = jax.jit(jax.grad(value))(at), jax.jit(value)
    for name, slope in slopes.items():
        direction = RNG.normal(size=np.shape(at[name]))
        ends = [value(at | {name: at[name] + step * direction}) for step in (1e-5, -1e-5)]
        np.testing.assert_allclose(jnp.sum(slope * direction), (ends[0] - ends[1]) / 2e-5, rtol=1e-6, err_msg=name)


def test_no_array_of_all_pairs_of_patches():
    kernel = Convolutional(npgp.RBF(1.0), image_shape=(16, 16), patch_shape=(3, 3))
    X = jnp.zeros((2000, 256), jnp.float32)
    pairs = 4 * len(X) * kernel.num_patches**2
    chunk = 4 * convolutional.entries_at_once()
    gradient = jax.grad(lambda X: jnp.sum(kernel.diag(X)))
    memory = jax.jit(gradient).lower(X).compile().memory_analysis().temp_size_in_bytes
    assert memory < 16 * chunk < pairs / 4


IMAGES = RNG.normal(size=(6, 20))
Y = RNG.normal(size=6)


def toy(case):
    gray = Convolutional(npgp.RBF(2.0), image_shape=GRAY, patch_shape=PATCH)
    small = Convolutional(npgp.Matern52(1.5), image_shape=GRAY, patch_shape=(2, 2))
    Z = [RNG.normal(size=(3, 6)), RNG.normal(size=(2, 6)), RNG.normal(size=(3, 4))]
    return {
        "patches and images": (3.0 * gray, [Patches(Z[0]), IMAGES[:2] + 0.1]),
        "images and patches": (3.0 * gray, [IMAGES[:2] + 0.1, Patches(Z[0])]),
        "two blocks of patches": (gray, [Patches(Z[0]), Patches(Z[1])]),
        "two sizes": (gray + 2.0 * small, [Patches(Z[0]), Patches(Z[2])]),
        "pixels beside": (gray + npgp.RBF(6.0), [Patches(Z[0]), IMAGES[:2]]),
    }[case]


@pytest.mark.parametrize("name", ["patches and images", "two sizes", "pixels beside"])
def test_bounds_are_below_the_evidence(name):
    kernel, blocks = toy(name)
    conditionals = ["prior", "shared", "tight", npgp.conditionals.Grouped(3), "full"]

    def bound(blocks, conditional):
        return npgp.CollapsedGP(kernel, IMAGES, blocks, noise_variance=0.2, conditional=conditional).log_prob(Y)

    @jax.jit
    def everything():
        evidence = npgp.collapsed.exact_log_evidence(kernel, IMAGES, Y, noise_variance=0.2)
        return [bound(blocks, conditional) for conditional in conditionals], evidence, bound([IMAGES], "prior")

    bounds, evidence, at_all = everything()
    assert np.all(np.diff([*bounds, evidence]) > 0)
    # Points at all images leave nothing: the exact k(X, X) is in both.
    np.testing.assert_allclose(at_all, evidence, atol=1e-4)


def test_classes_by_softmax():
    """C functions that share kernel and patches, in a plate; the ELBO of a batch and its gradient are finite."""
    X, labels = RNG.normal(size=(8, 20)), RNG.integers(0, 3, 8)
    patches = RNG.normal(size=(4, 6))

    def model(X, y=None):
        base = npgp.RBF(numpyro.param("lengthscale", 2.0), variance=9.0)
        weights = numpyro.param("weights", jnp.ones(9) / 9)
        kernel = Convolutional(base, image_shape=GRAY, patch_shape=PATCH, weights=weights)
        with numpyro.plate("classes", 3, dim=-2):
            f = npgp.SparseGP("f", kernel, Patches(numpyro.param("Z", patches))).draw()
        with npgp.plate("data", 8, rows=len(X)):
            npgp.observe("y", f(X), npgp.likelihoods.Softmax(3), obs=y, conditional="tight")

    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.05), TraceMeanField_ELBO())
    result = npgp.fit(svi, jax.random.key(0), 30, X, y=labels, progress=False)
    assert result.losses[-1] < result.losses[0]
    assert set(result.params) >= {"weights", "Z", "lengthscale"}
    assert np.ptp(result.params["weights"]) > 1e-3  # the weights are learned


def test_what_is_refused():
    kernel = Convolutional(npgp.RBF(), image_shape=GRAY, patch_shape=PATCH)
    shapes = {"image_shape": GRAY, "patch_shape": PATCH}
    with pytest.raises(TypeError, match="base is 1.0; it must be the kernel"):
        Convolutional(1.0, **shapes)
    with pytest.raises(TypeError, match="image_shape is 28; it must be a tuple of 2 or 3 sizes"):
        Convolutional(npgp.RBF(), image_shape=28, patch_shape=PATCH)
    with pytest.raises(ValueError, match=r"patch_shape is \(5, 1\), but images are of shape"):
        Convolutional(npgp.RBF(), image_shape=GRAY, patch_shape=(5, 1))
    with pytest.raises(ValueError, match="channels is 'both'"):
        Convolutional(npgp.RBF(), **shapes, channels="both")
    with pytest.raises(ValueError, match=r"X has shape \(2, 21\), but images of shape \(4, 5\) are rows of 20"):
        kernel.diag(np.zeros((2, 21)))
    with pytest.raises(ValueError, match=r"weights has shape \(4,\); images have 9 patches"):
        Convolutional(npgp.RBF(), **shapes, weights=np.ones(4)).diag(IMAGES)
    block = Patches(np.zeros((2, 6)))
    with pytest.raises(TypeError, match="the kernel is RBF, but Patches features need a Convolutional kernel"):
        block.gram(npgp.RBF())
    with pytest.raises(ValueError, match=r"have 6 columns, and the kernel's terms patches of \[6, 6\]"):
        block.gram(kernel + kernel)
    with pytest.raises(ValueError, match="have 5 columns"):
        Patches(np.zeros((2, 5))).gram(kernel)
