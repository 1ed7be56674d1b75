"""
Which tests are of which module of npgp. As a program it prints the test files of what the working tree has changed.

The nearest test files of ``npgp/sparse/groups.py`` are, in this order: those with its name in theirs
(``test_groups.py``), those that import it, all others in the folder of its name (``tests/sparse``; ``tests/ground`` for
a module in no folder), and those with the folder's name in theirs (``test_conditionals.py``).
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def test_files() -> dict[str, str]:
    """The text of every test file by its path from the root."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return {str(file.relative_to(ROOT)): file.read_text() for file in files if file.parent.name != "notebooks"}


def nearest(module: str) -> list[str]:
    """
    The test files nearest to a module.

    :param module: its file from the root, such as ``"npgp/sparse/groups.py"``.
    """
    path = Path(module)
    name, folder = path.stem.strip("_"), "ground" if len(path.parts) == 2 else path.parts[1]
    dotted, package = ".".join(path.with_suffix("").parts), ".".join(path.parent.parts)
    used = re.compile(
        rf"import {re.escape(dotted)}\b|from {re.escape(dotted)} |from {re.escape(package)} import .*\b{name}\b"
    )
    named = [file for file in test_files() if name in Path(file).stem]
    named.sort(key=lambda file: (Path(file).stem != f"test_{name}", f"/{folder}/" not in file))
    importing = [file for file, text in test_files().items() if used.search(text)]
    beside = [file for file in test_files() if file.startswith(f"tests/{folder}/")]
    of_folder = [file for file in test_files() if folder in Path(file).stem]
    return list(dict.fromkeys([*named, *importing, *beside, *of_folder]))


def changed() -> list[str]:
    """The test files of all modules and test files that differ from the last commit."""
    listed = ["git diff --name-only HEAD", "git ls-files --others --exclude-standard"]
    files = [
        file for command in listed for file in subprocess.check_output(command.split(), cwd=ROOT, text=True).split()
    ]
    found: list[str] = []
    for file in files:
        if file in test_files():
            found.append(file)
        elif file.startswith("npgp/") and file.endswith(".py"):
            found += nearest(file)
        elif file.startswith("tests/support/"):
            used = re.compile(rf"^(import|from) {Path(file).stem}\b", re.MULTILINE)
            found += [test for test, text in test_files().items() if used.search(text)]
        elif file.startswith("scripts/") and file.endswith(".py"):
            found += [test for test, text in test_files().items() if f'"{Path(file).stem}"' in text]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    print("\n".join(changed()), file=sys.stdout)
