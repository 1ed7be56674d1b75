"""Imports of packages that only some functions need."""

from __future__ import annotations

import importlib
from typing import Any

#: Names under which packages are installed, where these are not the names that are imported.
_INSTALLED_AS = {"sklearn": "scikit-learn"}


def optional(module: str, *, extra: str, what: str, otherwise: str = "") -> Any:
    """
    A module of a package that npgp can do without.

    :param module: its full name, such as ``"sklearn.cluster"``.
    :param extra: the extra of npgp that installs it.
    :param what: what needs it, with which the error begins: a noun in the singular, such as ``"k-means"``.
    :param otherwise: a sentence at the error's end, of what can be done without the package.
    :raises ModuleNotFoundError: if the package is not installed.
    """
    parts = module.split(".")
    try:
        for i in range(len(parts)):  # a package that is blocked blocks what is in it
            found = importlib.import_module(".".join(parts[: i + 1]))
    except ModuleNotFoundError as error:
        package = _INSTALLED_AS.get(parts[0], parts[0])
        message = f"{what} needs {package}: pip install npgp[{extra}]. {otherwise}"
        raise ModuleNotFoundError(message.strip(), name=error.name) from error
    return found
