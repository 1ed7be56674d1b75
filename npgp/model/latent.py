"""
GP values at rows, before they are integrated out or sampled: linear combinations of draws and offsets; and those of an
observation, one or several.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.functionals.rows import ADVICE_EACH, Functionals, as_functionals
from npgp.likelihoods import Likelihood
from npgp.model.draw import Draw, Given, Moments
from npgp.model.sites import lost
from npgp.programs.backend import maximum
from npgp.programs.tracing import current_trace
from npgp.sparse.groups import Groups
from npgp.sparse.ragged import MemberRows, Places
from npgp.sparse.residuals import GroupResidual
from npgp.variational.blocks import sum_of_roots

#: What to write where an array is wanted.
NO_ARRAY = (
    "npgp.sample the values first, npgp.sample('f', f(X)), or let the likelihood transform them, "
    "lambda f: dist.Poisson(jnp.exp(f))"
)


@dataclass(frozen=True, eq=False)
class Term:
    """
    ``a · W f(X)``: one draw's values at rows X (N, D), with a factor and, for several outputs, a mixing matrix.

    :param scale: a, which broadcasts with the outputs, (..., N).
    :param function: f; its values have shape (..., N), or (..., Q, N) where there is a mixing matrix.
    :param X: the rows, as f takes them: their inputs, of shape (N, D).
    :param mixing: W, (P, Q).
    """

    scale: jax.Array
    function: Draw
    X: Any
    mixing: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = (*self.function.batch_shape, self.X.shape[-2])
        if self.mixing is not None:
            shape = (*shape[:-2], self.mixing.shape[0], shape[-1])
        return np.broadcast_shapes(jnp.shape(self.scale), shape)

    @property
    def places(self) -> Places | None:
        """The functions and rows chosen from those of a plate, ``f(X)[group, row]``."""
        return self.X.places if isinstance(self.X, MemberRows) else None

    def __mul__(self, factor: jax.Array) -> Term:
        return replace(self, scale=self.scale * factor)

    def chosen(self, places: Places) -> Term:
        """The term's values at chosen places among those of all functions and rows, (N,)."""
        if self.mixing is not None:
            raise ValueError(
                f"{self.function.name} is mixed by a matrix, so each of its values is of all its functions: choose "
                "rows of functions in a plate, f(X)[group, row], or state what is missing by mask=."
            )
        rows = MemberRows(self.X, places)
        function = self.function.chosen(rows)
        return Term(places.of(self.scale), function, rows.inputs if function is self.function else rows)

    @property
    def functionals(self) -> Functionals | None:
        """The term's values as functionals of its draw; ``None`` where they are no such, or differ between outputs."""
        plain = isinstance(self.X, Functionals) or (isinstance(self.X, jax.Array) and self.X.ndim == 2)
        if not plain or self.mixing is not None or self.scale.ndim > 1 or self.function.marginal_inputs:
            return None
        return as_functionals(self.X) * self.scale

    def mixed(self, W: jax.Array) -> Term:
        """``W @ term`` for W of shape (P, Q)."""
        scale = self.scale
        if not self.function.batch_shape and self.mixing is None:  # one function for all Q outputs
            if scale.ndim <= 1:
                return replace(self, scale=jnp.sum(W, 1)[:, None] * scale)
            if scale.shape[-1] == 1:
                return replace(self, scale=linalg.matmul(W, jnp.broadcast_to(scale, (W.shape[1], 1))))
        if scale.ndim > 1:
            if scale.ndim > 2 or scale.shape[-1] != 1:
                raise ValueError(
                    f"{self.function.name} has a factor of shape {scale.shape}, which differs between both rows and "
                    "outputs: mix first, and multiply then."
                )
            W, scale = W * scale[:, 0], jnp.ones((), scale.dtype)
        return Term(scale, self.function, self.X, W if self.mixing is None else linalg.matmul(W, self.mixing))

    def values(self, values: jax.Array) -> jax.Array:
        """The term, from values of f; also of the mean."""
        return self.scale * (values if self.mixing is None else linalg.matmul(self.mixing, values))

    def variance(self, variance: jax.Array) -> jax.Array:
        """The term's variance at each row, from that of f, (N,) if that is the same for all functions."""
        if self.mixing is not None:
            squares = jnp.square(self.mixing)
            if variance.ndim == 1:
                variance = jnp.sum(squares, 1)[:, None] * variance
            else:
                variance = linalg.matmul(squares, variance)
        return jnp.square(self.scale) * variance

    def root(self, root: jax.Array) -> jax.Array:
        """The root of the term's covariance with others, (..., K, N), from that of f."""
        if self.mixing is not None:
            mixed = linalg.matmul(self.mixing, root.reshape(*root.shape[:-2], -1))
            root = mixed.reshape(*mixed.shape[:-1], *root.shape[-2:])
        return (self.scale[..., None, :] if self.scale.ndim else self.scale) * root

    def covariance(self, D: jax.Array, groups: Groups) -> jax.Array:
        """
        The term's covariance within groups of rows, from that of f.

        :param D: (G, g, g); batch + that if it is not the same for all functions.
        :param groups: these.
        """
        if self.mixing is not None:
            squares = jnp.square(self.mixing)
            if D.ndim == 3:
                D = jnp.sum(squares, 1).reshape(-1, 1, 1, 1) * D
            else:
                rows = D.shape[-3:]
                D = linalg.matmul(squares, D.reshape(*D.shape[:-3], -1)).reshape(*D.shape[:-4], -1, *rows)
        a = self.scale
        if not a.ndim:
            return jnp.square(a) * D
        a = groups.gather(jnp.broadcast_to(a, (*a.shape[:-1], self.X.shape[-2])))
        return a[..., :, None] * D * a[..., None, :]


def _merged(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """Terms of one draw as one, of functionals, where they can be."""
    found: list[Term] = []
    for term in terms:
        sums = [(i, both) for i, other in enumerate(found) if (both := _sum(other, term)) is not None]
        if sums:
            found[sums[0][0]] = sums[0][1]
        else:
            found.append(term)
    return tuple(found)


def _sum(a: Term, b: Term) -> Term | None:
    """Two terms as one of functionals; ``None`` unless they are of one draw, and row by row of the same function."""
    if a.function.source is not b.function.source:
        return None
    chosen, other = a.places, b.places
    if chosen is None or other is None:
        if chosen is not other:
            return None
    elif not chosen.same_functions(other):
        return None
    else:
        a, b = (replace(term, X=term.X.inputs) for term in (a, b))
    before, after, one = a.functionals, b.functionals, jnp.ones((), a.scale.dtype)
    if before is None or after is None:
        return None
    if chosen is None:
        return Term(one, a.function, before + after)
    rows = MemberRows(before + after, chosen.with_rows_in_order())
    return Term(one, a.function.source.chosen(rows), rows)


class _NoArray(type):
    """JAX's functions refuse what is no array, and name its class: so the class says what to write."""

    meant: str

    def __repr__(cls):
        return f"<{cls.meant}: {NO_ARRAY}>"


class NoArray(metaclass=_NoArray):
    """
    What stands for GP values and is no array of them: all that Python and NumPy do with numbers is refused with what to
    write instead. Subclasses define the operations that they have.
    """

    #: What objects of this class are, as errors say.
    meant = "GP values"
    # NumPy and JAX arrays on the left leave the operation to this class.
    __array_priority__ = 1000

    def _refuse(self, *args):
        raise TypeError(f"{self!r}: this operation wants an array: {NO_ARRAY}.")

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        return self._refuse()

    __array__ = __getitem__ = __len__ = __iter__ = __contains__ = _refuse
    __float__ = __int__ = __complex__ = __index__ = __bool__ = __round__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __abs__ = __pos__ = __neg__ = __invert__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse

    def __eq__(self, other):
        # With numbers and arrays; else whether they are one and the same, as of all objects.
        return self._refuse() if isinstance(other, numbers.Number) or hasattr(other, "dtype") else NotImplemented

    __hash__ = object.__hash__


class Latent(NoArray):
    """
    GP values at N rows that are neither integrated out nor sampled yet: ``f(X)``, and sums and multiples of these.

    ``f(X) + g(X2) + offset``, ``a * f(X)``, differences, and ``W @ f(X)`` for several functions f, are Latents. So is
    ``f(X)[group, row]`` for functions in a plate at dim −2, data in long format: value n is that of function
    ``group[n]`` at row ``row[n]`` of X, for two arrays of N whole numbers, and no other values are computed. For any
    other expression, turn it into an array with :func:`npgp.sample` first.

    .. code-block:: python

        with numpyro.handlers.seed(rng_seed=0):
            f = npgp.SparseGP("f", kernel, Z).draw()
        assert isinstance(2.0 * f(X) + 1.0, npgp.model.Latent)
        with numpyro.handlers.seed(rng_seed=0), numpyro.plate("groups", 3, dim=-2):
            g = npgp.SparseGP("g", kernel, Z).draw()
        assert g(X)[np.array([0, 2, 2]), np.array([7, 7, 9])].shape == (3,)
    """

    meant = "GP values at rows"

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        operation = _REFLECTED.get(ufunc, "_refuse") if method == "__call__" and args[-1] is self else "_refuse"
        return getattr(self, operation)(args[0])

    def __init__(self, terms: tuple[Term, ...], offset: ArrayLike):
        self.terms = terms
        self.offset: Any = offset
        try:
            self.shape  # noqa: B018
        except ValueError:
            shapes = [f"{term.function.name}: {term.shape}" for term in terms]
            raise ValueError(
                f"cannot add values at different rows: {', '.join(shapes)}, offset {jnp.shape(offset)}."
            ) from None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values, (..., N)."""
        return np.broadcast_shapes(*(term.shape for term in self.terms), jnp.shape(self.offset))

    def __repr__(self):
        names = " + ".join(term.function.name for term in self.terms)
        return f"<{names} at rows, shape {self.shape}; an array only after npgp.sample(...)>"

    def __add__(self, other):
        if isinstance(other, Latent):
            return Latent(_merged(self.terms + other.terms), self.offset + other.offset)
        return Latent(self.terms, self.offset + self._operand(other))

    def __getitem__(self, index):
        if not isinstance(index, tuple) or len(index) != 2 or any(isinstance(i, slice) or i is None for i in index):
            raise TypeError(
                f"{self!r} is indexed by [group, row], two arrays of N whole numbers: the function of the plate that "
                f"each value is of, and its row of X. For all else, {NO_ARRAY}."
            )
        if len(self.shape) != 2:
            raise ValueError(
                f"{self!r}: [group, row] chooses among functions drawn in one plate at dim=-2, whose values have shape "
                "(functions, rows)."
            )
        places = Places(*index, within=self.shape)
        return Latent(tuple(term.chosen(places) for term in self.terms), places.of(self.offset))

    def __mul__(self, other):
        if isinstance(other, Latent):
            raise TypeError("a product of GP values is not Gaussian: npgp.sample one of the factors first.")
        other = self._operand(other)
        try:
            np.broadcast_shapes(self.shape, other.shape)
        except ValueError:
            raise ValueError(
                f"GP values of shape {self.shape} are multiplied by an array of shape {other.shape}."
            ) from None
        return Latent(tuple(term * other for term in self.terms), self.offset * other if self._shifted else self.offset)

    def __rmatmul__(self, W):
        W, shape = self._operand(W), self.shape
        of_one = [term.functionals for term in self.terms] if W.ndim == 2 and shape == W.shape[1:] else [None]
        if all(rows is not None for rows in of_one):
            one = jnp.ones((), W.dtype)
            rows = [Term(one, term.function, W @ own) for term, own in zip(self.terms, of_one, strict=True)]
            offset = linalg.matmul(W, jnp.broadcast_to(self.offset, shape)[:, None])[:, 0] if self._shifted else 0.0
            return Latent(tuple(rows), offset + np.zeros((), W.dtype))
        if W.ndim != 2 or len(shape) < 2 or shape[-2] != W.shape[1]:
            raise ValueError(
                f"the matrix has shape {W.shape} and the GP values {shape}; a matrix (P, Q) mixes the values "
                "(..., Q, N) of Q functions, drawn in a plate at dim=-2, and one of (N, J) sums the J values of one."
            )
        offset = self.offset
        if offset.ndim:
            offset = linalg.matmul(W, jnp.broadcast_to(offset, shape))
        elif self._shifted:
            offset = offset * (jnp.sum(W, 1)[:, None])
        return Latent(tuple(term.mixed(W) for term in self.terms), offset)

    def __neg__(self):
        return self * -1.0

    def __sub__(self, other):
        return self + (-other)

    def __rsub__(self, other):
        return -self + other

    def __truediv__(self, other):
        if isinstance(other, NoArray):
            self._refuse()
        return self * (1.0 / self._operand(other))

    __radd__ = __add__
    __rmul__ = __mul__

    def _operand(self, other: Any) -> jax.Array:
        """A number or an array that GP values are added to, or multiplied by."""
        if isinstance(other, NoArray):
            other._refuse()
        checks.array(other, f"what is combined with the GP values of {', '.join(f.name for f in self.functions)}")
        return jnp.asarray(other)

    @property
    def _shifted(self) -> bool:
        """Whether there is an offset. Draws have NumPy's 0, so that no factor of theirs becomes a part of one."""
        return not isinstance(self.offset, (np.ndarray, np.generic)) or bool(np.any(self.offset))

    @property
    def functions(self) -> list[Draw]:
        """The draws that occur."""
        return [term.function for term in self.terms]

    def _shared(self) -> list[jax.Array | None]:
        """Of each term the root of its covariance with other terms; of one that has no other, ``None``."""
        roots = [term.function.shared(term.X) for term in self.terms]
        several = sum(root is not None for root in roots) > 1
        return [
            None if root is None or not (several or term.mixing is not None) else term.root(root)
            for term, root in zip(self.terms, roots, strict=True)
        ]

    def check_unshared(self) -> None:
        """Raise ``ValueError`` if one draw serves several outputs: their residuals are one and the same."""
        for term in self.terms:
            own = (*term.function.batch_shape, term.X.shape[-2])
            if term.mixing is not None or math.prod(own) < math.prod(self.shape):
                name = term.function.name
                raise ValueError(
                    f"{name} is spread over several outputs, which share its residual: npgp.sample {name} by itself, "
                    "and multiply the values."
                )

    def moments(self) -> Moments:
        """Moments of the combination; each of shape :attr:`shape`."""
        mean = self.offset
        residual = jnp.zeros((), mean.dtype)
        halves = self._shared()
        together = [half for half in halves if half is not None]
        variance = jnp.sum(jnp.square(sum_of_roots(together)), axis=-2) if together else residual
        for term, half in zip(self.terms, halves, strict=True):
            m = term.function.moments(term.X) if half is None else term.function.moments(term.X, shared=False)
            mean = mean + term.values(m.mean)
            variance = variance + term.variance(m.variance)
            residual = residual + term.variance(m.residual)
        return Moments(*(jnp.broadcast_to(v, self.shape) for v in (mean, variance, residual)))

    def group_covariance(self, groups: Groups) -> jax.Array:
        """The residual's prior covariance within groups of rows, (..., G, g, g), where guides gave q for all draws."""
        parts = [term.covariance(term.function.group_covariance(term.X, groups), groups) for term in self.terms]
        return sum(parts[1:], parts[0])

    def simulate(self, rng_key: jax.Array, joint: bool, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """
        GP values given the drawn ε, with residuals from their prior: sample_shape + :attr:`shape`.

        :param joint: draw the residual jointly over rows, at O(N³), or row by row.
        """
        value = self.offset
        for term, key in zip(self.terms, jax.random.split(rng_key, len(self.terms)), strict=True):
            # Of the function by itself: outputs that are mixed of it share its residual.
            f = term.function.given(term.X, joint=joint)
            z = jax.random.normal(key, (*sample_shape, *f.mean.shape), f.mean.dtype)
            root = square_root(f, joint)
            value = value + term.values(f.mean + times_root(root, z, joint))
        return jnp.broadcast_to(value, (*sample_shape, *self.shape))


#: What NumPy calls where an array is on the left.
_REFLECTED = {
    np.add: "__radd__",
    np.subtract: "__rsub__",
    np.multiply: "__rmul__",
    np.matmul: "__rmatmul__",
    np.true_divide: "__rtruediv__",
}


def square_root(f: Given, joint: bool) -> jax.Array:
    """A square root of what is left of f at rows: a factor (..., N, N) if joint, else standard deviations (..., N)."""
    if not joint:
        return jnp.sqrt(maximum(f.residual, jnp.finfo(f.residual.dtype).tiny))
    # Relative to prior variances: the residual vanishes at inducing points, and at inputs of sampled values.
    return linalg.cholesky(f.residual, scale=jnp.broadcast_to(f.prior, f.residual.shape[:-1]))[0]


def times_root(root: jax.Array, z: jax.Array, joint: bool) -> jax.Array:
    """A residual, from its square root (:func:`square_root`) and standard normal noise (..., N)."""
    return linalg.matmul(root, z[..., None])[..., 0] if joint else root * z


def as_latent(latent: object, where: str) -> Latent:
    """Pass a Latent through; anything else is an error that says what is accepted."""
    if isinstance(latent, Latent):
        return latent
    raise TypeError(
        f"{where} was given a {type(latent).__name__}; it takes GP values at rows, such as f(X) or "
        "f(X) + g(X2) + offset, where f = SparseGP(...).draw()."
    )


class Latents:
    """
    What an observation depends on: one latent value per observation, or C of them on a leading axis.

    :param parts: the latent values; one Latent, or one for each of the C.
    :param num_latents: C. One Latent of shape (C, ..., N) holds all C.
    """

    def __init__(self, parts: tuple[Latent, ...], num_latents: int):
        self.parts, self.num_latents = parts, num_latents
        #: Where the statement is made: inside a loop of JAX, its rows are unknown beyond that.
        self.here = current_trace()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the observations, (..., N)."""
        shape = np.broadcast_shapes(*(part.shape for part in self.parts))
        return shape if self.num_latents == 1 or len(self.parts) > 1 else shape[1:]

    @property
    def functions(self) -> list[Draw]:
        """The draws that occur."""
        return [function for part in self.parts for function in part.functions]

    @property
    def variational(self) -> bool:
        """Whether a guide gave q for any of the draws."""
        return any(f.variational for f in self.functions)

    @property
    def guided(self) -> bool:
        """Whether this is a guide."""
        return any(f.guided for f in self.functions)

    @property
    def fixed(self) -> bool:
        """Whether any draw has other inducing values than the guide's."""
        return any(f.fixed for f in self.functions)

    def check_drawn(self) -> None:
        """Raise ``ValueError`` if q would be taken in the place of values that ``substitute`` gave."""
        for f in self.functions:
            if f.variational and not f.guided and f.substituted is not None:
                raise ValueError(lost(f.substituted))

    def check_grouped(self, conditional: object) -> None:
        """Raise ``ValueError`` if rows are taken together whose inputs are drawn one by one."""
        for f in self.functions:
            if f.variational and f.marginal_inputs:
                raise ValueError(
                    f"conditional is {conditional!r}, which takes rows together, but what comes into {f.name} is drawn "
                    "row by row, and the bound would be none: DeepGP(..., joint=True), or npgp.conditionals.Tight()."
                )

    def check_independent(self) -> None:
        """Raise ``ValueError`` if one draw occurs twice: its values at two inputs are not independent."""
        functions = [function.source for function in self.functions]
        if len(set(map(id, functions))) < len(functions):
            name = next(f.name for f in functions if functions.count(f) > 1)
            where = "twice in one sum" if len(self.parts) == 1 else "twice in one observation"
            if any(term.places is not None for part in self.parts for term in part.terms):
                raise ValueError(
                    f"{name} occurs {where}, with [group, row] of different functions of its plate: draw one function "
                    "instead, of inputs with a last column for the function's number, and the kernel "
                    "npgp.kernels.Coregion(kernel, np.zeros((G, 1)), kappa=1.0), under which levels are independent."
                )
            each = any(len(term.X.shape) > 2 for part in self.parts for term in part.terms)
            advice = ADVICE_EACH if each else "; npgp.sample its values first"
            raise ValueError(f"the draw of {name} occurs {where}{advice}.")
        if self.num_latents > 1 and any(term.mixing is not None for part in self.parts for term in part.terms):
            raise ValueError(
                "the latent values of one observation are mixed of the same functions, and so not independent: "
                "npgp.sample the functions, mix the values, and observe with numpyro.sample."
            )
        if self.num_latents > 1 and len(self.parts) == 1:
            self.check_unshared()

    def check_unshared(self) -> None:
        """Raise ``ValueError`` if one draw serves several outputs: their residuals are one and the same."""
        for part in self.parts:
            part.check_unshared()

    def _stack(self, values: Sequence[jax.Array]) -> jax.Array:
        if len(self.parts) == 1:
            return values[0]
        # Over the axes of outputs and rows; samples have theirs before.
        shapes = [(*value.shape[: value.ndim - len(self.shape)], *self.shape) for value in values]
        return jnp.stack([jnp.broadcast_to(value, shape) for value, shape in zip(values, shapes, strict=True)])

    def moments(self) -> Moments:
        """Moments of the values, (..., N) or (C, ..., N)."""
        self.check_independent()
        return Moments(*map(self._stack, zip(*(part.moments() for part in self.parts), strict=True)))

    def group_residual(self, groups: Groups) -> GroupResidual:
        """The residual's prior within groups of rows, where guides gave q for all draws."""
        parts = [part.group_covariance(groups) for part in self.parts]
        if len(parts) > 1:
            # What is the same for all outputs is factorized once: no broadcasting to them.
            ndim = len(self.shape) + 2
            parts = [part.reshape((1,) * (ndim - part.ndim) + part.shape) for part in parts]
            parts = [jnp.stack(jnp.broadcast_arrays(*parts))]
        return GroupResidual(parts[0], groups)

    def simulate(self, rng_key: jax.Array, joint: bool, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """Values given the drawn ε: sample_shape + shape for one latent; C goes before all, as likelihoods want it."""
        keys = jax.random.split(rng_key, len(self.parts))
        drawn = [part.simulate(key, joint, sample_shape) for part, key in zip(self.parts, keys, strict=True)]
        if self.num_latents > 1 and len(self.parts) == 1:
            return jnp.moveaxis(drawn[0], len(sample_shape), 0)
        return self._stack(drawn)


def as_latents(latent: object, likelihood: Likelihood) -> Latents:
    """
    The latent values that a likelihood depends on.

    :raises TypeError: for what is neither GP values nor a tuple of them.
    :raises ValueError: for another number of latent values than the likelihood has.
    """
    several = isinstance(latent, (tuple, list))
    given: Any = latent if several else (latent,)
    parts = tuple(as_latent(part, "observe") for part in given)
    count = likelihood.num_latents
    found = len(parts) if several else parts[0].shape[0] if count > 1 and len(parts[0].shape) > 1 else 1
    if found != count:
        what = f"{found} {'are' if found > 1 else 'is'} given" + ("" if several else f", of shape {parts[0].shape}")
        raise ValueError(
            f"{type(likelihood).__name__} has {count} latent value{'s' * (count > 1)} per observation, but {what}: "
            "pass a tuple such as (f(X), g(X)), or a draw of as many functions."
        )
    latents = Latents(parts, count)
    try:
        latents.shape  # noqa: B018
    except ValueError:
        shapes = ", ".join(str(part.shape) for part in parts)
        raise ValueError(f"the latent values of one observation have different shapes: {shapes}.") from None
    return latents
