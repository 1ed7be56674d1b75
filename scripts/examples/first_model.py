#!/usr/bin/env python
"""The README's picture: runs the first program of README.md, as it stands there, and draws what it found.

python scripts/examples/first_model.py --out docs/_static
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import numpy as np

import npgp
from common import Arguments, write_picture

EFFECT = 0.7  # of README's simulation, as is the curve below


def truth(x: np.ndarray) -> np.ndarray:
    return np.sin(2.0 * x)


def main(argv: list[str] | None = None) -> None:
    parser = Arguments(__doc__)
    parser.shared("out")
    args = parser.read(argv)

    (program, *_) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(compile(program, "README.md", "exec"), names)
    X, dose, y, Z, effect = (np.asarray(names[name]) for name in ("X", "dose", "y", "Z", "effect"))

    grid = np.linspace(-0.5, 6.5, 200)
    f = npgp.posterior("f", names["model"], names["guide"], names["params"], X, dose)
    mean, variance = map(np.asarray, f.mean_and_variance(grid[:, None]))
    blue, red = npgp.plots.COLORS[:2]
    figure, (left, right) = npgp.plots.subplots(1, 2, figsize=(9.0, 3.4), width_ratios=(2.6, 1.0))
    width = 1.645 * np.sqrt(variance)
    left.fill_between(grid, mean - width, mean + width, color=blue, alpha=0.25, lw=0, label="90% interval of f")
    left.plot(grid, mean, color=blue, label="mean of f")
    left.plot(grid, truth(grid), color="k", ls="--", lw=1.0, label="the simulation's f")
    left.plot(X[:, 0], y - effect.mean() * dose, ".", color="0.5", ms=4, label="y less the effect of the dose")
    left.plot(Z[:, 0], np.full(len(Z), -1.75), "|", color=red, ms=9, label="inducing inputs")
    left.set(xlabel="x", ylabel="f(x)", ylim=(-1.95, 2.45), xlim=(-0.5, 6.5))
    left.legend(frameon=False, ncols=2, loc="upper center", fontsize=8)
    right.hist(effect, bins=40, density=True, color=blue, alpha=0.5, label="posterior")
    top = right.get_ylim()[1]
    right.plot([EFFECT, EFFECT], [0, 1.05 * top], "k--", lw=1.0, label="the simulation's")
    right.set(xlabel="effect of the dose", yticks=[], ylim=(0, 1.4 * top))
    right.legend(frameon=False, fontsize=8, loc="upper right")
    write_picture(args.out / "first_model.png", figure, dpi=120)


if __name__ == "__main__":
    main()
