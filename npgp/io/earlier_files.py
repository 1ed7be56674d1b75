"""Files of version 1, which named modules and had words where there are objects now."""

from __future__ import annotations

from typing import Any

from npgp.sparse.conditionals import Grouped, as_conditional

#: Where classes may be that version 1 found in a module.
FOLDERS = tuple(
    f"npgp.{name}"
    for name in (
        "kernels",
        "likelihoods",
        "features",
        "sparse",
        "neighbors",
        "variational",
        "collapsed",
        "model",
        "training",
        "io",
        "gplvm",
    )
)


def from_version_1(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """
    Fields as they are called now.

    :param name: the class's name.
    :param fields: its fields by their names in version 1.
    """
    fields = dict(fields)
    if "mean_value" in fields and name in ("CollapsedGP", "ApproximateGP", "UncertainInputGP"):
        fields["offset"] = fields.pop("mean_value")
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
