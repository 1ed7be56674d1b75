"""Imports of packages that only some functions need."""

from __future__ import annotations

import importlib
from typing import Any


def optional(module: str, *, extra: str, what: str, otherwise: str = "") -> Any:
    """
    A module of a package that npgp can do without.

    :param module: its full name, such as ``"pyarrow.dataset"``.
    :param extra: the extra of npgp that installs it.
    :param what: what needs it, with which the error begins: a noun in the singular, such as ``"to_arviz"``.
    :param otherwise: a sentence at the error's end, of what can be done without the package.
    :raises ModuleNotFoundError: if the package is not installed.
    """
    parts = module.split(".")
    try:
        for i in range(len(parts)):  # a package that is blocked blocks what is in it
            found = importlib.import_module(".".join(parts[: i + 1]))
    except ModuleNotFoundError as error:
        message = f"{what} needs {parts[0]}: pip install npgp[{extra}]. {otherwise}"
        raise ModuleNotFoundError(message.strip(), name=error.name) from error
    return found
