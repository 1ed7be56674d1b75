"""``sample``: GP values as an array, for any expression of a model."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike

from npgp import linalg
from npgp.contract import random_key, under_predictive
from npgp.model.latent import Latent, as_latent, square_root, times_root
from npgp.model.latents import Latents
from npgp.model.plates import check_plates
from npgp.model.sites import LATENTS, VALUE, Catch, Q, check_loss, conditional_parameter, in_automatic_guide
from npgp.sparse.conditionals import Conditional, Prior, as_conditional

__all__ = ["sample"]


def sample(name: str, latent: Latent, *, joint: bool = True, conditional: Conditional | str = "prior") -> jax.Array:
    """
    GP values as an array, for any expression downstream. Use it inside the plate over rows.

    The randomness of the residual is the site ``name.residual``; ``name`` itself is a deterministic site.

    =================================  ===========================================================================
    SVI                                f from q, jointly over the rows unless ``joint=False``
    NUTS, or a model without guide     ``A_nᵀε`` plus the residual: the exact GP if joint, FITC's model if not
    ``Predictive`` with a posterior    a fresh draw at the rows given, whatever rows the posterior was trained on
    =================================  ===========================================================================

    .. code-block:: python

        def downstream(X, y=None):
            f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
            value = npgp.sample("value", f(X))  # an array
            with numpyro.plate("data", len(X)):
                numpyro.sample("y", dist.Normal(jnp.tanh(value), 0.1), obs=y)

    :param name: name of the site.
    :param latent: GP values at rows: ``f(X)``, or a sum of these and offsets. Statements of one draw are values of one
        function: later ones are conditioned on earlier ones. (:func:`npgp.observe` is not: it integrates over what the
        inducing points leave open, whatever was sampled.)
    :param joint: draw the rows jointly with each other and with earlier statements of the same draw, at O(N³) for all N
        rows together, or from their marginals, independent given the inducing points. That suffices for training where
        what follows factorizes over rows, and then has less Monte Carlo noise.
    :param conditional: what q does to the residual: ``"prior"`` or ``"shared"``, the two that bound the evidence
        whatever follows; one of one's own if it has a :meth:`~npgp.Conditional.residual_scale`.
    :return: shape (N,) or (outputs, N).
    """
    latents = Latents((latent := as_latent(latent, "sample"),), 1)
    latents.check_independent()
    latents.check_unshared()
    if joint and not all(function.source.made_here for function in latents.functions):
        raise ValueError(
            f"{name}: {latents.functions[0].name} is drawn outside of this scan, whose steps would not be values of "
            "one function: sample in a Python loop, or write npgp.sample(..., joint=False) for values that are "
            "independent given the inducing points."
        )
    conditional = as_conditional(conditional)
    if latents.variational and not latents.guided and not (joint and isinstance(conditional, Prior)):
        check_loss(name, "values of f with less noise than draws of f have")
    shape = latent.shape
    check_plates(name, shape)
    parameter = conditional_parameter(name, conditional) if latents.variational else 1.0
    scale = conditional.residual_scale(parameter)
    if scale is None:
        raise ValueError(
            f"conditional is {conditional!r}; npgp.sample takes 'prior' and 'shared': bounds whatever follows."
        )
    scale = scale if latents.variational else 1.0
    keeps_prior = isinstance(conditional, Prior)
    if not latents.variational and under_predictive(name):
        # Under Predictive: a residual sampled at the training rows must not be taken for one at these.
        key = random_key(name)
        if key is None:
            raise ValueError(f"{name}: sampling GP values needs a random key; wrap the model in handlers.seed.")
        return numpyro.deterministic(name, _assemble(latents, jax.random.normal(key, shape), scale, joint, keeps_prior))
    prior = dist.Normal(jnp.zeros(shape), 1.0)
    q = dist.Normal(jnp.zeros(shape), scale)
    with (catch := Catch("sample")):
        z = numpyro.sample(f"{name}.residual", q if latents.guided else prior, infer={Q: None, LATENTS: latents})
    infer = catch.message["infer"]
    value = None if latents.fixed else infer.get(VALUE)
    if value is None:
        value = _assemble(latents, z, scale, joint, keeps_prior)
        if in_automatic_guide(f"{name}.residual"):
            infer[VALUE] = value  # the model takes it from here, with no second projection
    return numpyro.deterministic(name, value)


def _assemble(latents: Latents, z: jax.Array, scale: ArrayLike, joint: bool, keeps_prior: bool) -> jax.Array:
    """
    GP values from the drawn ε and the residual's noise z, which has standard deviation ``scale`` under q.

    :param keeps_prior: whether q leaves the residual its prior.
    """
    (latent,) = latents.parts
    if latents.variational and not joint:
        mean, variance, residual = latent.moments()
        total = variance + jnp.square(scale) * residual
        return mean + jnp.sqrt(jnp.maximum(total, jnp.finfo(total.dtype).tiny)) * z / scale
    # A mean-only block's variance is drawn with ε; otherwise it is part of the residual.
    mean, residual, prior = latent.given(joint, mean_only_in_residual=not keeps_prior)
    if joint:
        return jnp.broadcast_to(mean, z.shape) + Sampled.of(latent).add(latent, z, residual, prior, keeps_prior)
    return jnp.broadcast_to(mean, z.shape) + times_root(square_root(residual, prior, joint), z, joint)


class Sampled:
    """
    Residuals that were sampled so far of some draws, by blocks of a growing Cholesky factor: a statement's residual is
    its block row times the whitened noise of this statement and of those before.
    """

    def __init__(self) -> None:
        self.statements: list[_Statement] = []

    @classmethod
    def of(cls, latent: Latent) -> Sampled:
        """The residuals sampled so far of the draws in a sum, which are from now on kept together."""
        draws = [function.source for function in latent.functions]
        found = {id(draw.sampled): draw.sampled for draw in draws if draw.sampled is not None}
        together = cls()
        for sampled in found.values():
            # Of different draws: their blocks of the covariance are 0, and so are those of the factor.
            before = [None] * len(together.statements)
            together.statements += [s._replace(row=(*before, *s.row)) for s in sampled.statements]
        draws += [function.source for s in together.statements for function in s.latent.functions]
        for draw in draws:
            draw.sampled = together
        return together

    def add(self, latent: Latent, z: jax.Array, residual: jax.Array, prior: jax.Array, keeps_prior: bool) -> jax.Array:
        """
        A statement's residual given those before, (..., N).

        :param z: the statement's whitened noise, likewise.
        :param residual: the residual's covariance, (..., N, N).
        :param prior: prior variances, (..., N), for the jitter.
        :param keeps_prior: whether q leaves the residual its prior.
        """
        if any(s.keeps_prior != keeps_prior for s in self.statements):
            raise ValueError(
                "conditional differs from that of an earlier npgp.sample of the same draw; it must be one for all."
            )
        columns = [s.latent.residual_between(latent, mean_only_in_residual=not keeps_prior) for s in self.statements]
        lead = np.broadcast_shapes(residual.shape[:-2], *(D.shape[:-2] for D in columns if D is not None))
        row: list[jax.Array | None] = []
        total = jnp.zeros((), z.dtype)
        for statement, column in zip(self.statements, columns, strict=True):
            for block, solved in zip(statement.row, row, strict=True):
                if block is not None and solved is not None:
                    product = linalg.transposed_matmul(block, solved)
                    column = -product if column is None else column - product
            if column is not None:
                column = linalg.solve_lower(statement.root, jnp.broadcast_to(column, (*lead, *column.shape[-2:])))
                residual = residual - linalg.gram(jnp.swapaxes(column, -1, -2))
                total = total + linalg.transposed_matmul(column, statement.z[..., None])[..., 0]
            row.append(column)
        root = square_root(residual, prior, joint=True)
        self.statements.append(_Statement(latent, z, root, tuple(row), keeps_prior))
        return total + times_root(root, z, joint=True)


class _Statement(NamedTuple):
    """
    One statement's block row of the factor.

    :param root: the block on the diagonal, (..., N, N).
    :param row: those before it, transposed, (..., N_j, N); ``None`` for 0.
    """

    latent: Latent
    z: jax.Array
    root: jax.Array
    row: tuple[jax.Array | None, ...]
    keeps_prior: bool
