"""Numbers in sentences."""

from __future__ import annotations

import math


def nats(value: float) -> str:
    """Two or three digits."""
    size = abs(value)
    if size < 1e-4:
        return "less than 0.0001 nats"
    decimals = 0 if size >= 100 else 1 if size >= 10 else 1 - math.floor(math.log10(size))
    return f"{value:.{decimals}f} nats"


def change(gain: float, conditional: str) -> str:
    if abs(gain) < 0.01:
        return f"leave the {conditional!r} bound as it is"
    return f"{'raise' if gain > 0 else 'lower'} the {conditional!r} bound by {nats(abs(gain))}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
