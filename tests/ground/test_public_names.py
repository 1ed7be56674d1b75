"""What npgp offers: the names at its top, and that whatever can be saved has a public name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from numpyro.distributions import Distribution

import npgp
from npgp.io.saving import public_name

ROOT = Path(npgp.__file__).parent
FOLDERS = sorted(f"npgp.{path.parent.name}" for path in ROOT.glob("*/__init__.py"))

#: A change of this list is a change for every user: say so in CHANGELOG.md.
NAMES = """
RBF VNNGP ApproximateGP AutoSparseGP BayesianGPLVM Bernoulli CollapsedGP DeepGP Gaussian Layer Matern32
Matern52 Poisson SparseGP Standardizer StudentT adam certificate check_posterior conditionals datasets evaluate features
fit fit_collapsed gplvm inducing infer joint kernels likelihoods load local_correction natural_gradient neighbors
observe plate plots posterior pytree sample save tighten to_arviz training
""".split()


def test_the_top_is_what_it_is():
    assert npgp.__all__ == NAMES
    assert [name for name in NAMES if not hasattr(npgp, name)] == []
    assert set(NAMES) <= set(dir(npgp))


def test_pictures_are_imported_when_asked_for():
    script = "import sys, npgp; assert 'matplotlib' not in sys.modules; npgp.plots.plot_fit"
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="module 'npgp' has no attribute 'plot'"):
        npgp.plot  # noqa: B018


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_offer_what_they_say(folder):
    module = importlib.import_module(folder)
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert inspect.getdoc(module)


def saved() -> list[type]:
    """Every class of arrays and numbers that is not private to its file."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(["npgp", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        for cls in vars(importlib.import_module(name)).values():
            own = inspect.isclass(cls) and cls.__module__ == name and not cls.__name__.startswith("_")
            if own and (dataclasses.is_dataclass(cls) or issubclass(cls, Distribution)) and is_pytree(cls):
                found.append(cls)
    return found


def is_pytree(cls: type) -> bool:
    """Whether JAX knows its parts, as it does of all that can be in a posterior, a kernel or a distribution."""
    import jax

    instance = object.__new__(cls)
    try:
        return not jax.tree_util.all_leaves([instance])
    except Exception:  # it is taken apart, and has no parts yet
        return True


def test_what_can_be_saved_has_a_public_name():
    classes = saved()
    assert len(classes) > 60
    unnamed = []
    for cls in classes:
        try:
            public_name(cls)
        except TypeError as error:
            unnamed.append(str(error))
    assert not unnamed
