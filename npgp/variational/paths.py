"""Whole functions drawn from a posterior, by pathwise conditioning."""

from __future__ import annotations

import functools
import math
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp

from npgp import checks, linalg
from npgp.chunks import map_chunks, rows_at_once
from npgp.features import Points
from npgp.functionals.rows import Functionals, RowsLike
from npgp.programs.compiled import STEPS, on_grid, one_program
from npgp.pytrees import pytree
from npgp.sparse.projection import Members, Projector
from npgp.variational.blocks import Arrays, BlockNormal, block_normal, whitened_mean


@pytree
class Paths:
    """
    Functions drawn from a posterior; made by :meth:`Posterior.draw_functions`.

    ``paths(X)`` evaluates them at any inputs, at O(M² + M F) work a row, and ``jax.grad`` differentiates them.

    :param projector: the factorized inducing blocks.
    :param feature_arrays: the arrays in φ, of which the kernel knows the rest; of functions with a kernel each batch +
        (...).
    :param feature_weights: w, (draws,) + batch + (F,).
    :param block_weights: for each block ``ε_i − ε⁰_i``, (draws,) + batch + (M_i,).
    :param num_features: as for :meth:`Posterior.draw_functions`.
    """

    projector: Projector | Members
    feature_arrays: tuple[jax.Array, ...]
    feature_weights: jax.Array
    block_weights: tuple[jax.Array, ...]
    num_features: int = field(metadata={"static": True})

    def __call__(self, X: RowsLike) -> jax.Array:
        """The functions' values at inputs X (N, D), or under functionals: (draws,) + batch + (N,)."""
        if isinstance(X, Functionals):
            return one_program(lambda: X.of(self._values), options=STEPS)
        return on_grid(Paths._values, self, checks.inputs(X))

    def _values(self, X: jax.Array) -> jax.Array:
        members = math.prod(self.projector.batch_shape)
        features = self.feature_weights.shape[-1] + sum(w.shape[-1] for w in self.block_weights)
        size = rows_at_once(members * features + math.prod(self.feature_weights.shape[:-1]))
        return map_chunks(self._values_of_rows, size, X, axis=-1)

    def _values_of_rows(self, X: jax.Array) -> jax.Array:
        if batch := len(self.projector.batch_shape):
            w, blocks = jax.tree.map(lambda x: jnp.moveaxis(x, 0, batch), (self.feature_weights, self.block_weights))
            values = self.projector.each(
                lambda projector, arrays, w, blocks: Paths(
                    projector, arrays, w, blocks, self.num_features
                )._values_of_rows(X),
                self.feature_arrays,
                w,
                blocks,
            )
            return jnp.moveaxis(values, batch, 0)
        update = whitened_mean(self.projector(X), self.block_weights)
        # φ is a function with arrays. Drawing them again might give others, on another day with another JAX.
        draw = functools.partial(self.projector.kernel.random_features, columns=X.shape[1], count=self.num_features)
        structure = jax.tree.structure(jax.eval_shape(draw, jax.random.key(0)))
        phi = jax.tree.unflatten(structure, self.feature_arrays)
        return linalg.matmul(self.feature_weights, phi(X).T) + update


def draw_functions(
    projector: Projector | Members,
    q: tuple[BlockNormal, ...],
    batch_shape: tuple[int, ...],
    rng_key: jax.Array,
    num_draws: int,
    num_features: int,
) -> Paths:
    """Draw whole functions; :meth:`npgp.variational.Posterior.draw_functions` says what everything is."""
    blocks: Any = projector.blocks
    for block in blocks:
        if not isinstance(block, Points):
            raise NotImplementedError(
                "draw_functions needs the values of prior draws at inducing points, and "
                f"{type(block).__name__} features are no points: use Posterior.sample."
            )
    if projector.batch_shape:
        return _of_members(projector.expand(batch_shape), q, rng_key, num_draws, num_features)
    inputs = [block.inputs for block in blocks]
    phi_key, w_key, noise_key, q_key = jax.random.split(rng_key, 4)
    phi = projector.kernel.random_features(phi_key, inputs[0].shape[1], num_features)
    features = [phi(Z) for Z in inputs]
    dtype, shape = projector.cholesky[0].dtype, (num_draws, *batch_shape)
    w = jax.random.normal(w_key, (*shape, features[0].shape[1]), dtype)

    values = []
    noise_keys = jax.random.split(noise_key, len(inputs))
    for Z, phi_Z, jitter, key in zip(inputs, features, projector.jitter, noise_keys, strict=True):
        # The factors are those of u with noise: the jitter.
        noise = jnp.sqrt(linalg.jitter_variance(jitter, projector.kernel.diag(Z)))
        u = linalg.matmul(w, phi_Z.T)
        u = u + noise * jax.random.normal(key, u.shape, dtype)
        values.append(u.reshape(math.prod(shape), Z.shape[0]).T)
    weights = []
    for block, prior, key in zip(q, projector.whiten(values), jax.random.split(q_key, len(q)), strict=True):  # type: ignore[union-attr]
        if block.learned:
            drawn = block.expand(batch_shape).sample(key, (num_draws,))
            weights.append(drawn - prior.T.reshape(drawn.shape))
        else:
            weights.append(jnp.broadcast_to(block.loc, (*shape, *block.event_shape)))
    return Paths(projector, tuple(jax.tree.leaves(phi)), w, tuple(weights), num_features)


def _of_members(
    members: Members, q: tuple[BlockNormal, ...], rng_key: jax.Array, num_draws: int, num_features: int
) -> Paths:
    """Functions with a kernel each: with random features each."""
    batch = members.batch_shape
    if any(block.joint for block in q):
        raise NotImplementedError(
            "draw_functions has no draws of functions with a kernel each that q makes dependent: use Posterior.sample."
        )

    def of_one(projector: Projector, key: jax.Array, arrays: tuple[Arrays, ...]):
        blocks = tuple(block_normal(block.kind, *values) for block, values in zip(q, arrays, strict=True))
        paths = draw_functions(projector, blocks, (), key, num_draws, num_features)
        return paths.feature_arrays, paths.feature_weights, paths.block_weights

    keys = jax.random.split(rng_key, batch)
    found, w, weights = members.each(of_one, keys, tuple(block.arrays(batch) for block in q))
    w, weights = jax.tree.map(lambda x: jnp.moveaxis(x, len(batch), 0), (w, weights))
    return Paths(members, found, w, weights, num_features)
