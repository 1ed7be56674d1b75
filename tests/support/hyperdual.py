"""Values with two directional derivatives and their mixed one, in NumPy's 80-bit numbers: an oracle of derivatives."""

from __future__ import annotations

import numpy as np

Wide = np.longdouble
SQRT3, SQRT5 = np.sqrt(Wide(3)), np.sqrt(Wide(5))


class Hyperdual:
    """``v + a s + b t + c st`` with ``s² = t² = 0``: derivatives along s, along t, and along both."""

    def __init__(self, v, a=0.0, b=0.0, c=0.0):
        self.parts = np.broadcast_arrays(*(np.asarray(part, Wide) for part in (v, a, b, c)))

    def __add__(self, other):
        return Hyperdual(*(x + y for x, y in zip(self.parts, lift(other).parts, strict=True)))

    def __sub__(self, other):
        return self + lift(other) * -1.0

    def __mul__(self, other):
        (v, a, b, c), (w, d, e, f) = self.parts, lift(other).parts
        return Hyperdual(v * w, v * d + a * w, v * e + b * w, v * f + a * e + b * d + c * w)

    def __getitem__(self, index):
        return Hyperdual(*(part[index] for part in self.parts))

    def sum(self, axis):
        return Hyperdual(*(part.sum(axis) for part in self.parts))

    def through(self, f, f1, f2):
        """A function of it, from that function's value and first two derivatives."""
        _, a, b, c = self.parts
        return Hyperdual(f, f1 * a, f1 * b, f1 * c + f2 * a * b)

    def power(self, p):
        v = self.parts[0]
        return self.through(v**p, p * v ** (p - 1), p * (p - 1) * v ** (p - 2))


def lift(x):
    return x if isinstance(x, Hyperdual) else Hyperdual(x)


# ---------------------------------------------------------------------------------------------------------------
# Correlations and their first two derivatives in the squared distance; a kink has slope 0


def _matern12(q):
    r = np.sqrt(q)
    e = np.exp(-r)
    at = np.where(r > 0, r, 1)
    return e, np.where(r > 0, -e / (2 * at), 0), np.where(r > 0, e / 4 * (1 / at**2 + 1 / at**3), 0)


def _matern32(q):
    a = SQRT3 * np.sqrt(q)
    e = np.exp(-a)
    return (1 + a) * e, -1.5 * e, np.where(a > 0, 9 * e / (4 * np.where(a > 0, a, 1)), 0)


def _matern52(q):
    a = SQRT5 * np.sqrt(q)
    e = np.exp(-a)
    return (1 + a + a**2 / 3) * e, -5 * (1 + a) * e / 6, 25 * e / 12


#: Of the scaled squared distance.
STATIONARY = {
    "RBF": lambda q: (np.exp(-q / 2), -np.exp(-q / 2) / 2, np.exp(-q / 2) / 4),
    "RationalQuadratic": lambda q: (1 / (1 + q / 2), -1 / (2 * (1 + q / 2) ** 2), 1 / (2 * (1 + q / 2) ** 3)),
    "Matern12": _matern12,
    "Matern32": _matern32,
    "Matern52": _matern52,
}


def arc_cosine(order, chord2):
    """``J_n(θ)/π`` of the squared chord ``2 − 2 cos θ``, with slopes by J_n of lower order."""
    q = np.minimum(chord2, Wide(4))
    theta = 2 * np.arcsin(np.sqrt(q) / 2)
    sine, cosine = np.sqrt(q * (4 - q)) / 2, 1 - q / 2
    at = np.where(sine > 0, sine, 1)
    rest = np.arctan2(Wide(0), Wide(-1)) - theta
    J0 = rest, np.where(sine > 0, -1 / (2 * at), 0), np.where(sine > 0, cosine / (4 * at**3), 0)
    J1 = sine + rest * cosine, -J0[0] / 2, -J0[1] / 2
    J2 = 3 * sine * cosine + rest * (1 + 2 * cosine**2), -2 * J1[0], -2 * J1[1]
    return [part / np.arctan2(Wide(0), Wide(-1)) for part in (J0, J1, J2)[order]]
