"""
New rows of a GPLVM whose posterior is fixed: where in latent space they lie, and what their missing entries are.

Given x*, the D functions are independent under q, so what a trained model says of a new row is

    p(y* | x*) = Π_d ∫ p(y*_d | f) N(f; m_d(x*), v_d(x*)) df,    x* ~ p(x),

with the product over the entries that are present. ``q(x*)`` is the Gaussian that maximises the lower bound on its log
predictive density,

    log p(y*) ≥ E_{q(x*)}[log p(y* | x*)] − KL[q(x*) ‖ p(x*)].

Training has ``E_{q(f)}[log p(y_d | f)]`` in the place of the log of the average, because there q(f) is still to be
chosen. Here it is not, and f is integrated out exactly: by Jensen's inequality the bound is no lower, whatever the
conditional was. With the expectation, a new row would be drawn away from where the functions are uncertain twice over:
for Gaussian noise it costs ``v_d / (2σ²)`` per entry instead of at most ``½ log(1 + v_d / σ²)``.

Rows are independent problems, solved side by side in one program. Expectations over q(x*) are sums over fixed nodes, so
each problem is deterministic, and quasi-Newton steps end at its optimum. As p(y* | x*) may have several modes, more so
the fewer entries are present, each row starts from several places.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax
from jax.typing import ArrayLike

from npgp import linalg
from npgp.features import Points
from npgp.likelihoods import Likelihood, as_likelihood
from npgp.posteriors import Posterior
from npgp.pytrees import pytree

__all__ = ["NewRows", "infer_latents"]

#: Elements of the largest arrays, beyond which points are taken in parts.
BUDGET = 2**22
#: Radii of the rule for expectations under q(x), where there are nodes enough.
RADII = 3
#: Candidates whose predicted data differ by less than this share of the data's variance are one place to start from.
SEPARATION = 0.1
#: Least precision of a row's prior that the first guess of q(x) supposes.
MIN_PRECISION = 1e-2
#: A step changes the logarithm of no scale by more, and is halved no more often than this.
LARGEST_STEP, HALVINGS = 2.0, 20


# ---------------------------------------------------------------------------------------------------------------
# The result


@pytree
@dataclass(frozen=True)
class NewRows:
    """
    ``q(x*)`` of some rows, and what it says about their data; made by :func:`infer_latents`, or from what an encoder
    gives: ``NewRows(loc, scale)``.

    :param loc: means, batch + (Q,): (B, Q), or (Q,) for one row.
    :param scale: standard deviations, batch + (Q,), or lower Cholesky factors of covariances, batch + (Q, Q).
    :param elbo: the bound on the log predictive density of the entries present, in nats; batch.
    :param modes: where all starts led, best first, along a new leading axis: (S, B, Q), and so on.
    :raises ValueError: for a scale of another shape.
    """

    loc: jax.Array
    scale: jax.Array
    elbo: jax.Array | None = None
    modes: NewRows | None = None

    def __post_init__(self):
        shape = jnp.shape(self.loc)
        if not shape or jnp.shape(self.scale) not in (shape, (*shape, shape[-1])):
            raise ValueError(
                f"loc has shape {shape} and scale {jnp.shape(self.scale)}; they must be (..., Q), and (..., Q) or "
                "(..., Q, Q)."
            )
