"""Files that npgp.save wrote in version 1 of the format load, and compute what they computed."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import npgp

FOLDER = Path(__file__).with_name("version_1")
#: Of each file the type of its object, and expressions for its expected arrays (see the manifest).
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
#: Whose numbers are computed again, in compiled programs; the others are loaded.
COMPUTED = (
    "posterior",
    "posterior_outputs",
    "posterior_spherical",
    "collapsed_prior",
    "collapsed_shared",
    "collapsed_tight",
    "collapsed_grouped",
    "collapsed_grouped_int",
    "collapsed_full",
    "collapsed_blocks",
    "approximate_pitc",
    "uncertain_tight",
    "uncertain_prior",
    "mixed_posterior",
    "corrected_local",
    "nngp",
    "vnngp",
    "standardizer",
)


@pytest.mark.parametrize("name", MANIFEST)
def test_they_load(name):
    obj = npgp.load(FOLDER / f"{name}.npz")
    assert type(obj).__name__ == MANIFEST[name]["type"]


@pytest.mark.parametrize("name", COMPUTED)
def test_they_compute_what_they_did(name):
    obj = npgp.load(FOLDER / f"{name}.npz")
    with np.load(FOLDER / f"expected_{name}.npz") as file:
        arrays = dict(file)
    given = {key: arrays[f"input_{key}"] for key in MANIFEST[name]["inputs"]}
    names, expression = next(iter(MANIFEST[name]["expected"].items()))
    # Outside the format alone: the expression is as users of version 1 wrote it.
    expression = expression.replace("near)", "neighbors=near)")

    def evaluate(given):
        return eval(expression, {"obj": obj, "npgp": npgp, "jax": jax, "jnp": jnp, "np": np, **given})

    found = (evaluate if name == "standardizer" else jax.jit(evaluate))(given)
    found = found if isinstance(found, tuple) else (found,)
    for output, value in zip(names.split(), found, strict=True):
        expected = arrays[f"output_{output}"]
        # As far as float32 goes: compiled, and by another order of operations.
        np.testing.assert_allclose(value, expected, rtol=2e-4, atol=2e-4 * (1.0 + np.max(np.abs(expected))))


def test_what_was_saved_as_words_are_objects():
    grouped = npgp.load(FOLDER / "collapsed_grouped.npz")
    assert isinstance(grouped.conditional, npgp.Grouped) and grouped.conditional.groups.num_rows == 24
    assert npgp.load(FOLDER / "collapsed_full.npz").conditional == npgp.Full()
    assert npgp.load(FOLDER / "sparse_gp.npz").covariances == ("dense", "mean-only")


def test_they_are_written_again_in_the_present_version(tmp_path):
    obj = npgp.load(FOLDER / "collapsed_grouped.npz")
    npgp.save(tmp_path / "file", obj)
    with np.load(tmp_path / "file") as file:
        header = json.loads(file["npgp"].tobytes())
    assert header["version"] == 2 and header["content"]["class"] == "npgp.collapsed:CollapsedGP"
    again = npgp.load(tmp_path / "file")
    for a, b in zip(jax.tree.leaves(obj), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
