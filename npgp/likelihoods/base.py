"""What a likelihood is, with defaults by quadrature, and how far off these are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.likelihoods import quadrature
from npgp.likelihoods.numerics import LOG_2PI, deviation, floats
from npgp.programs.backend import maximum
from npgp.pytrees import ByName

#: What may be proven of a likelihood, from what is worth least to most.
PROOFS = ("none", "single-peaked", "log-concave", "gaussian")


class Likelihood(ByName):
    """
    p(y | f) for one latent value per observation, or several; the elements of all array arguments broadcast.

    With C ≥ 2 latent values per observation, f and their mean and variance have a leading axis of size C, for y of
    shape (..., N) they are (C, ..., N), and under the expectations the latent values are independent.

    Parameters may be traced, and may have one value per row. A likelihood of one's own subclasses this, as a frozen
    dataclass registered with :func:`npgp.pytree`, and gives :meth:`log_prob`, :meth:`sample` and
    :meth:`moments`; the other methods have defaults for up to three latent values, which need ``num_nodes``; and
    :meth:`stand_in` where 1 is no possible observation.

    :cvar proof: which proof makes the ELBO a bound on the evidence (docs/theory.md, section 2): ``"gaussian"`` (it has
        a :attr:`precision`), ``"log-concave"`` (log p(y | f) is concave in f for every y), ``"single-peaked"`` (the
        expected curvature of −log p under N(m, c) is positive in one interval of c, in which it rises and then falls;
        it has a :attr:`greatest_curvature`), or ``"none"``, which is always safe and the default. A wrong claim makes
        bounds that are wrong. With several latent values, ``"log-concave"`` means jointly in all of them.
    :cvar num_latents: number C of latent values per observation.
    :cvar smooth: whether log p, of one latent value, is known to be finite and analytic in f on a scale of 1 or so,
        and to grow no faster than a polynomial, whatever the parameters: half of the nodes then do, and need no second
        look.

    .. code-block:: python

        assert (
            isinstance(npgp.Poisson(), npgp.likelihoods.Likelihood)
            and npgp.Poisson().proof == "log-concave"
        )
    """

    proof: ClassVar[str] = "none"
    num_latents: ClassVar[int] = 1
    smooth: ClassVar[bool] = False
    num_nodes: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(cls.proof, str) and cls.proof not in PROOFS:  # it may be a property
            raise ValueError(f"{cls.__name__} has the proof {cls.proof!r}; it must be one of {', '.join(PROOFS)}.")

    @property
    def concave(self) -> tuple[int, ...]:
        """The latent values in which log p(y | f) is jointly concave, for every y and whatever the others are."""
        return tuple(range(self.num_latents)) if self.proof in ("gaussian", "log-concave") else ()

    @property
    def parts(self) -> tuple[Likelihood, ...]:
        """The likelihoods that this one is made of, each for outputs of its own; itself if there are no such."""
        return (self,)

    def by_part(self, fn: Callable[[Likelihood, Callable[..., Any]], Any]) -> Any:
        """
        ``fn(part, take)`` for each of :attr:`parts`, and what it returns put together; ``take(array, axis=-2)`` is the
        part's share of an array with outputs along this axis.
        """
        return fn(self, lambda array, axis=-2: array)

    def with_nodes(self, num_nodes: int) -> Likelihood:
        """This likelihood with another number of quadrature nodes; as it is, if it has none."""
        if not dataclasses.is_dataclass(self) or "num_nodes" not in {field.name for field in dataclasses.fields(self)}:
            return self
        return dataclasses.replace(self, num_nodes=num_nodes)

    @property
    def described(self) -> str:
        """In messages: the likelihood's name."""
        return type(self).__name__

    @property
    def instead(self) -> str:
        """In messages that advise another way to write it: a likelihood to use, if there is one."""
        return ""

    @property
    def by_quadrature(self) -> bool:
        """Whether :meth:`expected_log_prob` is quadrature of :meth:`log_prob`, not a formula of the class."""
        return type(self).expected_log_prob is Likelihood.expected_log_prob

    @property
    def precision(self) -> jax.Array:
        """For the proof ``"gaussian"``: one over the noise variance, a number or one for each row."""
        raise NotImplementedError(f"{type(self).__name__} has no noise variance.")

    @property
    def greatest_curvature(self) -> jax.Array:
        """For the proof ``"single-peaked"``: the most that minus the second derivative of log p in f can be."""
        raise NotImplementedError(f"{type(self).__name__} has no greatest curvature.")

    def log_prob(self, f: ArrayLike, y: ArrayLike) -> jax.Array:
        """
        log p(y | f).

        :param f: latent values.
        :param y: observations.
        """
        raise NotImplementedError

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        """
        y ~ p(y | f), one for each latent value; counts and labels are integers.

        :param rng_key: a JAX random key.
        :param f: latent values.
        """
        raise NotImplementedError

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """
        Mean and variance of y when f ~ N(mean, variance).

        :param mean: mean of f.
        :param variance: variance of f.
        """
        raise NotImplementedError

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        """
        E[log p(y | f)] when f ~ N(mean, variance).

        Its second derivative in the mean is twice its first in the variance (Price 1958) where log p has no kinks.
        Nodes so far out that their weight is below rounding count for nothing where log p is not finite there.

        :param y: observations.
        :param mean: mean of f.
        :param variance: variance of f.
        """
        mean, variance = aligned(self, y, mean, variance)
        check_quadrature(self)
        if self.smooth:
            return self._smooth_expectation(y, mean, variance)
        fixed = jax.tree.map(lax.stop_gradient, self)
        rule = quadrature.expectation if self.num_latents == 1 else quadrature.expectation_over_several
        return rule(lambda f: self.log_prob(f, y), lambda f: fixed.log_prob(f, y), mean, variance, self.num_nodes)

    def _smooth_expectation(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        """:meth:`expected_log_prob` where log p is :attr:`smooth`, of half the nodes, without a second look."""
        of = jax.eval_shape(lambda m, v: self.log_prob(m + v, y), mean, variance)
        mean, variance = (jnp.broadcast_to(array, of.shape).astype(of.dtype) for array in (mean, variance))
        f, weights = quadrature.smooth_rule(mean, variance, self.num_nodes)
        return linalg.weighted_sum(weights, self.log_prob(f, y))

    def expected_log_probs(
        self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike, more: ArrayLike
    ) -> Callable[[jax.Array], jax.Array]:
        """
        :meth:`expected_log_prob` as a function of a variance between ``variance`` and ``variance + more``.

        For one latent value, approximately, and without gradients in anything else: log p is evaluated once for all
        variances, unless there is a formula.

        :param y: observations.
        :param mean: mean of f.
        :param variance: the least variance of f.
        :param more: how much more it may be.
        """
        check_quadrature(self)
        fixed, mean, variance, more = jax.tree.map(lax.stop_gradient, (self, *floats(mean, variance, more)))
        if not self.by_quadrature:
            return lambda variance: fixed.expected_log_prob(y, mean, variance)
        of = jax.eval_shape(lambda m, v, d: self.log_prob(m + v + d, y), mean, variance, more)
        m, s, d = (jnp.broadcast_to(array, of.shape).astype(of.dtype) for array in (mean, variance, more))
        return quadrature.expectations(lambda f: fixed.log_prob(f, y), m, s, d, self.num_nodes)

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        """log ∫ p(y | f) N(f; mean, variance) df; arguments as for :meth:`expected_log_prob`."""
        mean, variance = aligned(self, y, mean, variance)
        check_quadrature(self)
        if self.num_latents == 2 and self.concave:
            return self._nested_log_marginal(y, mean, variance)
        fixed, C = jax.tree.map(lax.stop_gradient, self), self.num_latents
        of = jax.eval_shape(lambda m, v: self.log_prob(m + v, y), mean, variance)
        shape = of.shape if C == 1 else (C, *of.shape)
        mean, variance = (jnp.broadcast_to(array, shape).astype(of.dtype) for array in (mean, variance))
        return quadrature.log_average(
            lambda f: self.log_prob(f, y),
            lambda f: fixed.log_prob(f, y),
            mean,
            variance,
            self.num_nodes,
            C,
            bool(self.concave),
            finer=lambda: self._nested_log_marginal(y, mean, variance),
        )

    def _nested_log_marginal(self, y: ArrayLike, mean: jax.Array, variance: jax.Array) -> jax.Array:
        """
        Averaged over one latent value, for each value of the others: one in which log p is concave, or the first.

        The others' are equidistant: likelihoods of a scale break down far out.
        """
        C, num_nodes = self.num_latents, self.num_latents * self.num_nodes
        first = self.concave[0] if self.concave else 0
        order = np.array([first, *np.delete(np.arange(C), first)])
        m, v = mean[order], variance[order]
        sd, fixed = deviation(v[1:]), jax.tree.map(lax.stop_gradient, self)
        shape = jax.eval_shape(lambda m, v: self.log_prob(m + v, y), mean, variance).shape
        each = np.linspace(-quadrature.REACH, quadrature.REACH, num_nodes)
        z = np.stack(np.meshgrid(*[each] * (C - 1), indexing="ij"), axis=-1).reshape(-1, C - 1)
        log_weights = np.sum(np.log(each[1] - each[0]) - 0.5 * (z**2 + LOG_2PI), axis=-1)

        def log_prob(likelihood: Any, f: Any, others: Any) -> Any:
            return likelihood.log_prob(jnp.stack(jnp.broadcast_arrays(f, *others))[np.argsort(order)], y)

        def average(z: jax.Array) -> jax.Array:
            others = m[1:] + sd * z.reshape((-1,) + (1,) * (m.ndim - 1))
            at = lax.stop_gradient(others)
            return quadrature.log_average(
                lambda f: log_prob(self, f, others),
                lambda f: log_prob(fixed, f, at),
                jnp.broadcast_to(m[0], shape),
                jnp.broadcast_to(v[0], shape),
                quadrature.FIRST[C] * self.num_nodes,
                1,
                bool(self.concave),
            )

        if C > 2:  # too many to be kept for gradients
            average = jax.checkpoint(average)
        averages = lax.map(average, jnp.asarray(z, m.dtype), batch_size=num_nodes)
        return logsumexp(averages + log_weights.astype(m.dtype).reshape((-1,) + (1,) * len(shape)), axis=0)

    def expected_curvature(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        """
        κ = −2 ∂E[log p(y | f)]/∂variance, the expectation of −∂²log p/∂f², for each latent value.

        Non-negative in the latent values in which the likelihood is log-concave, of either sign otherwise. Arguments as
        for :meth:`expected_log_prob`.
        """
        mean, variance = aligned(self, y, mean, variance)
        # One derivative per element needs one variance per element.
        shape = jax.eval_shape(self.expected_log_prob, y, mean, variance).shape
        if self.num_latents == 1:
            variance = jnp.broadcast_to(variance, shape)
            tangent = jnp.ones_like(variance)
            _, slope = jax.jvp(lambda v: self.expected_log_prob(y, mean, v), (variance,), (tangent,))
            concave: Any = bool(self.concave)
        else:
            variance = jnp.broadcast_to(variance, (self.num_latents, *shape))
            slope = jax.grad(lambda v: jnp.sum(self.expected_log_prob(y, mean, v)))(variance)
            concave = np.isin(np.arange(self.num_latents), self.concave).reshape((-1,) + (1,) * len(shape))
        # Below 0 is rounding if the likelihood is log-concave; otherwise the sign is information.
        return jnp.where(concave, maximum(-2 * slope, 0.0), -2 * slope)

    def site_curvature(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array | None:
        """
        A quick, differentiable stand-in for :meth:`expected_curvature`, or ``None`` where that is quick enough itself.

        A certified conditional takes its site precisions from it: any positive values give a bound, and the nearer
        they are to the expected curvature the tighter it is. Arguments and result as for :meth:`expected_curvature`.
        """
        return None

    def stand_in(self, y: jax.Array) -> ArrayLike:
        """
        A possible observation at which log p and its slopes are finite: in masked rows it takes the place of y.

        :param y: observations, with anything in masked rows; the result broadcasts with them.
        """
        return 1

    def check(self, y: ArrayLike) -> None:
        """
        Raise ``ValueError`` if y has an impossible value; NaN (a masked row) and tracers pass.

        :param y: observations.
        """
        if checks.is_traced(y):
            return
        values = np.asarray(checks.array(y, "y"), float)
        possible, meaning = self._support(values)
        if not checks.is_traced(possible) and not np.all(possible | np.isnan(values)):
            wrong = np.extract(~(possible | np.isnan(values)), values)[0]
            raise ValueError(f"y has the value {wrong:g}; for {type(self).__name__} it must be {meaning}.")

    def _support(self, y: Any) -> tuple[Any, str]:
        """Which of these values, floats of NumPy or traced, are possible, and in words; NaN is not."""
        return abs(y) < np.inf, "finite"


def without_missing(
    likelihood: Likelihood, present: jax.Array | None, y: jax.Array, *moments: jax.Array
) -> tuple[jax.Array, ...]:
    """
    Observations and moments of f that are harmless in masked rows: whatever is computed there, and thrown away, is
    finite with all its gradients, which are products with 0.

    :param likelihood: of one part or several.
    :param present: where there is an observation, of y's shape or fewer axes; ``None`` for everywhere.
    :param y: observations (..., N); :meth:`Likelihood.stand_in` takes their place.
    :param moments: mean and variance of f, (..., N) or (C, ..., N), in whose place is 0.
    """
    if present is None:
        return y, *moments

    def observed(part: Any, take: Any) -> Any:
        instead, values = jnp.asarray(part.stand_in(take(y))), take(y)
        floating = jnp.issubdtype(values.dtype, jnp.floating)
        return jnp.where(take(present), values, instead.astype(values.dtype) if floating else instead)

    instead = (0.0, 0.0)
    filled = (jnp.where(present, value, other) for value, other in zip(moments, instead, strict=False))
    return likelihood.by_part(observed), *filled


def impossible(likelihood: Likelihood, y: jax.Array) -> tuple[jax.Array, str]:
    """
    Which values of y (..., D, N) cannot be observed, NaN among them; and what they must be, in words.

    :param likelihood: of one part or several.
    :param y: observations, floating; traced or not.
    """
    words = []

    def possible(part: Any, take: Any) -> Any:
        at, meaning = part._support(take(y))
        words.append(f"for {type(part).__name__} it must be {meaning}")
        return jnp.asarray(at)

    wrong = ~jnp.broadcast_to(likelihood.by_part(possible), y.shape).astype(bool) | jnp.isnan(y)
    return wrong, ", ".join(dict.fromkeys(words))


def quadrature_error(likelihood: Likelihood, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
    """
    The larger of the changes of ``expected_log_prob`` and ``log_marginal`` with twice the nodes.

    Elementwise, and 0 for closed forms. An estimate: make it where your data and posterior are.

    .. code-block:: python

        errors = npgp.likelihoods.quadrature_error(
            npgp.Bernoulli(), np.array([0.0, 1.0]), np.zeros(2), np.ones(2)
        )

    :param likelihood: the likelihood whose ``num_nodes`` is in question.
    :param y: observations.
    :param mean: mean of f.
    :param variance: variance of f.
    """

    def integrals(likelihood: Any) -> Any:
        arguments = y, mean, variance
        return likelihood.expected_log_prob(*arguments), likelihood.log_marginal(*arguments)

    finer = likelihood.with_nodes(2 * getattr(likelihood, "num_nodes", 0))
    changes = jax.tree.map(lambda a, b: jnp.abs(a - b), integrals(finer), integrals(likelihood))
    return jnp.maximum(*changes)


def check_nodes(likelihood: Likelihood) -> None:
    """Raise unless the number of quadrature nodes is a whole number of at least 1."""
    nodes = checks.whole_number(likelihood.num_nodes, f"{type(likelihood).__name__} num_nodes", must_be="positive")
    object.__setattr__(likelihood, "num_nodes", nodes)


def check_choice(likelihood: Likelihood, name: str, choices: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless this parameter is one of the choices."""
    value = getattr(likelihood, name)
    if value not in choices:
        accepted = " or ".join(map(repr, choices))
        raise ValueError(f"{type(likelihood).__name__} {name} is {value!r}; it must be {accepted}.")


def check_quadrature(likelihood: Likelihood) -> None:
    """Raise ``ValueError`` if there are more latent values than product quadrature can serve."""
    if likelihood.num_latents > 3:
        raise ValueError(
            f"{type(likelihood).__name__} takes {likelihood.num_latents} latent values per observation; quadrature "
            "serves up to 3. npgp.sample gives GP values as arrays, to be used in numpyro.sample with any distribution."
        )


def aligned(likelihood: Likelihood, y: ArrayLike, *values: ArrayLike) -> list[jax.Array]:
    """
    The values with as many axes after that of the latent values as broadcast against y, one latent value at a time.

    :param values: shape (C, ...), or numbers; arrays of any shape if the likelihood has one latent value.
    :raises ValueError: if the first axis has another size than C.
    """
    arrays, C = floats(*values), likelihood.num_latents
    if C == 1:
        return arrays
    for array in arrays:
        if array.ndim and array.shape[0] != C:
            raise ValueError(
                f"{type(likelihood).__name__} takes {C} latent values per observation, on the first axis; an array of "
                f"shape {array.shape} was given."
            )
    after = max(jnp.ndim(y), *(array.ndim - 1 for array in arrays))
    ones = [(1,) * (after + 1 - max(array.ndim, 1)) for array in arrays]
    shapes = [(*one, *array.shape[1:]) for array, one in zip(arrays, ones, strict=True)]
    return [
        jnp.broadcast_to(array.reshape((*array.shape[:1], *shape) if array.ndim else (1, *shape)), (C, *shape))
        for array, shape in zip(arrays, shapes, strict=True)
    ]
