"""Files of version 1, which named modules and had words where there are objects now."""

from __future__ import annotations

from typing import Any

import jax

from npgp.collapsed.searched import MAX_STEPS
from npgp.likelihoods import Gaussian
from npgp.sparse.conditionals import Grouped, as_conditional

#: Where the classes of a module are now; those of folders that were there before are still in these.
FOLDERS = {
    "npgp.approximations": "npgp.collapsed",
    "npgp.certificates": "npgp.collapsed",
    "npgp.component": "npgp.model",
    "npgp.corrections": "npgp.variational",
    "npgp.groups": "npgp.sparse",
    "npgp.latent": "npgp.model",
    "npgp.levels": "npgp.inducing",
    "npgp.nngp": "npgp.neighbors",
    "npgp.outputs": "npgp.variational",
    "npgp.posteriors": "npgp.variational",
    "npgp.projection": "npgp.sparse",
    "npgp.psi": "npgp.collapsed",
    "npgp.residuals": "npgp.sparse",
    "npgp.rows": "npgp.training",
    "npgp.standardize": "npgp.io",
    "npgp.uncertain": "npgp.collapsed",
    "npgp.vecchia": "npgp.neighbors",
    "npgp.vnngp": "npgp.model",
}
#: Classes that are not where the others of their module are.
CLASSES = {"npgp.vnngp:NeighborPosterior": "npgp.neighbors", "npgp.vnngp:MeanFieldNormal": "npgp.neighbors"}


def from_version_1(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """
    Fields as they are called now.

    :param name: the class's name.
    :param fields: its fields by their names in version 1.
    """
    fields = dict(fields)
    if "mean_value" in fields and name in ("CollapsedGP", "ApproximateGP", "UncertainInputGP", "NNGP", "ResponseNNGP"):
        fields["offset"] = fields.pop("mean_value")
    if name == "NNGP" and fields.get("noise_variance") is None:  # a constant of the class, which was written so
        fields["noise_variance"] = 0.0
    if name == "Tree":
        fields["centers"] = fields.pop("centres")
    if name == "Encoder":
        fields["rng_key"] = jax.random.key(fields.pop("seed"))
    if name == "CollapsedGP":  # of Gaussian noise alone, and all rows observed
        fields |= {
            "likelihood": Gaussian(variance=fields.pop("noise_variance")),
            "present": None,
            "max_steps": MAX_STEPS,
        }
    word = fields.get("conditional")
    if isinstance(word, str) and name in ("CollapsedGP", "UncertainInputGP", "CollapsedGPLVM"):
        groups = fields.pop("groups", None)
        fields["conditional"] = Grouped(groups) if word == "grouped" else as_conditional(word)
    kinds = fields.get("covariances")
    if isinstance(kinds, tuple):
        fields["covariances"] = tuple("mean-only" if kind == "prior" else kind for kind in kinds)
    elif kinds == "prior":
        fields["covariances"] = "mean-only"
    return fields
