#!/usr/bin/env python
"""The README's picture: runs the first program of README.md, as it stands there, and keeps what it draws.

python scripts/examples/first_model.py --out docs/_static
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from common import Arguments, write_picture


def main(argv: list[str] | None = None) -> None:
    import matplotlib

    parser = Arguments(__doc__)
    parser.shared("out")
    args = parser.read(argv)
    matplotlib.use("Agg")

    (program, *_) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    *before, saves = program.rstrip().split("\n")
    assert saves.startswith("figure.savefig("), "the program ends with its picture"
    names: dict = {}
    exec(compile("\n".join(before), "README.md", "exec"), names)
    write_picture(args.out / "first_model.png", names["figure"], dpi=120)


if __name__ == "__main__":
    main()
