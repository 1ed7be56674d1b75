"""Any NumPyro distribution as a likelihood."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.distribution import validation_enabled
from scipy import special

from npgp.checks import is_traced, whole_number
from npgp.contract import base_of
from npgp.likelihoods.base import Likelihood, aligned, check_nodes, check_quadrature
from npgp.likelihoods.classes import Ordinal
from npgp.likelihoods.continuous import AsymmetricLaplace, Laplace, VonMises
from npgp.likelihoods.counts import Binomial, NegativeBinomial, Poisson
from npgp.likelihoods.numerics import floats
from npgp.likelihoods.proportions import Beta, BetaBinomial
from npgp.likelihoods.quadrature import NUM_NODES_EACH, normal_moments
from npgp.programs.later import see_later
from npgp.pytrees import pytree, static

#: Values of f so far out stand for all: what is possible there and at 0 is possible at every f.
_FAR = 100.0
#: Equidistant values of f at which log p is looked at where it is said to be concave.
LOOKED_AT = np.linspace(-4.0, 4.0, 9)
#: Nats of a log-probability that may be lost to rounding without a word.
LOST = 1e-3
#: Likelihoods that are NumPyro's distributions of these names, with log-densities that are finite further out.
INSTEAD = {
    "BernoulliProbs": "Bernoulli",
    "BinomialProbs": "Binomial",
    "NegativeBinomialProbs": "NegativeBinomial",
    "TwoSidedTruncatedDistribution": "TruncatedGaussian",
    "LeftTruncatedDistribution": "TruncatedGaussian",
    "RightTruncatedDistribution": "TruncatedGaussian",
}


#: Values of f, irregular, at which a function's parameters are compared; so far out that usual clipping is noticed.
COMPARED_AT = (0.0, 1.0, -1.37, 3.1, -7.7, 13.3, -19.6, 25.0, -41.0, 83.0)
#: Operations by which a function may be another one between these values.
PIECEWISE = frozenset(
    "abs ceil clamp cond eq floor ge gt is_finite le lt max min ne rem round scan select_n sign sort while".split()
)
#: How much parameters may differ there, relative to their size: 1 − σ(f) has as few digits in float64.
ALIKE = 1e-6


def _beta(made: Any) -> tuple[Any, jax.Array]:
    return _bare(Beta, concentration=made.concentration1 + made.concentration0), _log_odds(made)


def _beta_binomial(made: Any) -> tuple[Any, jax.Array]:
    total = made.concentration1 + made.concentration0
    return _bare(BetaBinomial, trials=made.total_count, concentration=total), _log_odds(made)


def _log_odds(made: Any) -> jax.Array:
    return jnp.log(made.concentration1) - jnp.log(made.concentration0)


def _gamma_poisson(made: Any) -> tuple[Any, jax.Array]:
    f = jnp.log(made.concentration) - jnp.log(made.rate)
    return _bare(NegativeBinomial, concentration=made.concentration), f


#: npgp's likelihoods of NumPyro's distributions, and the latent value: log p without differences of large log-gammas,
#: nor maxima, whose slopes JAX before 0.12 loses where XLA computes an operand twice (jax-ml/jax#40564).
OURS: dict[type, Callable[[Any], tuple[Any, jax.Array]]] = {
    dist.AsymmetricLaplaceQuantile: lambda made: (
        _bare(AsymmetricLaplace, scale=made.scale, quantile=made.quantile),
        made.loc,
    ),
    dist.Beta: _beta,
    dist.BetaProportion: _beta,
    dist.BetaBinomial: _beta_binomial,
    dist.BinomialLogits: lambda made: (_bare(Binomial, trials=made.total_count), made.logits),
    dist.GammaPoisson: _gamma_poisson,
    dist.Laplace: lambda made: (_bare(Laplace, scale=made.scale), made.loc),
    dist.NegativeBinomial2: _gamma_poisson,
    dist.NegativeBinomialLogits: _gamma_poisson,
    dist.OrderedLogistic: lambda made: (_bare(Ordinal, cutpoints=made.cutpoints), made.predictor),
    dist.Poisson: lambda made: (Poisson(), jnp.log(made.rate)),
    dist.VonMises: lambda made: (_bare(VonMises, concentration=made.concentration), made.loc),
}


def _bare(cls: type, **parameters: Any) -> Any:
    """A likelihood whose parameters are not checked: at nodes far out they may be 0 or infinite."""
    made: Any = object.__new__(cls)
    for each in dataclasses.fields(cls):
        object.__setattr__(made, each.name, parameters.get(each.name, each.default))
    return made


@pytree
@dataclass(frozen=True, eq=False)
class Factorized(Likelihood):
    """
    What a function makes of f: ``Factorized(lambda f: dist.Weibull(jnp.exp(f), 2.0))``.

    Of two latent values it makes ``Factorized(lambda f, g: dist.StudentT(4.0, f, jnp.exp(g)), num_latents=2)``, and
    likewise of three.

    The function is called with an extra leading axis on f, for the quadrature's nodes. It is compared by identity: make
    it once, or jitted functions that take this object compile again. Integrals over one latent value look at the
    integrand: the log-density may be narrow beside f's distribution, have kinks, or two peaks. What has more peaks,
    such as a normal distribution around a sine of f, may need more nodes. Over several latent values it may be narrow,
    or have a kink, in the first alone. :func:`quadrature_error` measures what is left. A distribution that npgp has
    too, such as ``dist.Laplace(f, 0.5)``, has its integrals, if its latent value is linear in f and no other parameter
    depends on f, without pieces such as ``jnp.maximum`` and traced whole numbers.

    Of two parametrizations choose that in logits and logarithms. NumPyro's censored distributions have
    log-probabilities that stop at the log of machine epsilon, and are not log-concave for that reason:
    :func:`npgp.observe` warns of them; see :class:`CensoredGaussian` and :class:`Weibull`.

    .. code-block:: python

        heavy = npgp.likelihoods.Factorized(lambda f: dist.StudentT(4.0, f, 0.1))
        assert heavy.log_prob(0.0, 1.0) < heavy.log_prob(0.0, 0.1)

    :param fn: from latent values, one argument each, to a NumPyro distribution of their shape, with scalar events.
    :param log_concave: whether log p(y | f) is concave in f for every y: the caller vouches. It is looked at for some f
        only, which is no proof (docs/theory.md, section 2.3). With True, ``tight`` is a bound by that proof and at less
        cost, and averages are of one peak; False is always safe. Of two latent values, True means jointly in both, and
        ``(0,)`` or ``(1,)`` in that one whatever the other is.
    :param num_nodes: nodes of the quadrature, for each latent value; by default 64, 24 for each of two and
        10 of three. Of several latent values the first has two to six times as many: let it be the location, beside
        which the density is narrowest.
    :param num_latents: number of latent values, 1 to 3.
    :raises ValueError: if ``fn`` is not a function, for no nodes, for more than three latent values, if ``log_concave``
        names one there is not, and, when used, for events that are not scalar, and a log p that is not concave.
    :raises TypeError: when used, if ``fn`` returns no NumPyro distribution.
    :raises NotImplementedError: for the moments of a distribution that has none in NumPyro.
    """

    fn: Callable[..., Distribution] = field(metadata={"static": True})
    log_concave: bool | tuple[int, ...] = static(False, kw_only=True)
    num_nodes: int = static(None, kw_only=True)
    num_latents: int = static(1, kw_only=True)  # type: ignore[misc]
    by_quadrature: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self) -> None:
        if self.num_nodes is None:
            object.__setattr__(self, "num_nodes", NUM_NODES_EACH.get(self.num_latents, 1))
        whole_number(self.num_latents, "Factorized num_latents")
        _check_arguments(self.fn, self.num_latents)
        check_nodes(self)
        check_quadrature(self)
        if not callable(self.fn):
            raise ValueError(f"Factorized fn is {self.fn!r:.80}; it must be a function of f.")
        if not isinstance(self.log_concave, bool):
            object.__setattr__(self, "log_concave", tuple(self.log_concave))
            if not set(self.log_concave) <= set(range(self.num_latents)):
                raise ValueError(
                    f"Factorized log_concave is {self.log_concave}; it must be True, False or indices of the "
                    f"{self.num_latents} latent values."
                )

    @property
    def concave(self) -> tuple[int, ...]:
        """The latent values for which the caller vouches."""
        if isinstance(self.log_concave, tuple):
            return self.log_concave
        return tuple(range(self.num_latents)) if self.log_concave else ()

    @property
    def proof(self) -> str:  # type: ignore[override]
        """``"log-concave"`` if the caller vouches for it, else ``"none"``."""
        return "log-concave" if len(set(self.concave)) == self.num_latents else "none"

    @property
    def described(self) -> str:
        """In messages: the name of the distribution that the function makes."""
        return f"the function's {self._name}"

    @property
    def instead(self) -> str:
        """In messages: a likelihood of npgp that is the same, with tails that do not underflow."""
        ours = INSTEAD.get(self._name)
        return "" if ours is None else f", or take npgp.likelihoods.{ours}"

    @property
    def _name(self) -> str:
        return type(
            base_of(self._made(jnp.zeros(self.num_latents) if self.num_latents > 1 else jnp.zeros(())))
        ).__name__

    def _made(self, f: ArrayLike) -> Any:
        return self.fn(*floats(f)) if self.num_latents == 1 else self.fn(*floats(f)[0])

    def _distribution(self, f: ArrayLike) -> Distribution:
        return self._checked(self._made(f))

    def _checked(self, made: Any) -> Distribution:
        if not isinstance(made, Distribution):
            raise TypeError(f"Factorized fn returned {made!r:.80}; it must return a NumPyro distribution.")
        if made.support is None:
            raise TypeError(
                f"Factorized fn returned a {type(made).__name__} whose support is None; it must be a constraint, such "
                "as numpyro.distributions.constraints.real."
            )
        if made.event_shape:
            raise ValueError(
                f"Factorized fn returned events of shape {made.event_shape}; they must be scalar, one for each row. "
                "Where the likelihood does not factorize over rows, npgp.sample gives GP values as arrays, to be used "
                "in numpyro.sample with any distribution."
            )
        return made

    def check(self, y: ArrayLike) -> None:
        if not is_traced(y):
            latents = () if self.num_latents == 1 else (self.num_latents,)
            for f in (-1.0, 1.0):
                self._check_link(f, (*latents, *np.shape(y)))
            self._check_rows(latents, np.shape(y))
            self._check_concave(y)
            made = self._made(jnp.zeros((*latents, *np.shape(y))))
            _warn_of_tails(made)
            self._warn_of_counts(made, np.asarray(y))
        super().check(y)

    def _warn_of_counts(self, made: Distribution, y: np.ndarray) -> None:
        """Warn of counts so large that NumPyro's differences of log-gammas leave few digits of a log-probability."""
        if type(made) in OURS:
            return
        made = base_of(made)
        trials = getattr(made, "total_count", 0)
        if not made.support.is_discrete:
            return
        most = np.nanmax(np.concatenate([[0.0], np.ravel(y), np.ravel(0 if is_traced(trials) else trials)]))
        lost = 0.5 * float(jnp.finfo(jnp.result_type(float)).eps) * float(special.gammaln(most + 1.0))
        if lost > LOST:
            warnings.warn(
                f"The log-probabilities of {type(made).__name__} are rounded to {lost:.1g} nats at counts of {most:g}, "
                f"as differences of log-gammas. Compute in float64{self.instead}.",
                stacklevel=4,
            )

    def _check_rows(self, latents: tuple[int, ...], rows: tuple[int, ...]) -> None:
        """Raise ``ValueError`` where fn makes other rows of f than f has, of which it may get several values each."""
        shape = (2 if rows[:1] != (2,) else 3, *rows)
        try:
            made = self._checked(self._made(jnp.zeros((*latents, *shape)))).batch_shape
        except (TypeError, ValueError):  # parameters that do not go with f at all: observe says so, with its rows
            return
        try:
            fits = np.broadcast_shapes(made, shape) == shape
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"Factorized fn makes distributions of shape {made} of f with shape {shape}; it must treat each value "
                "of f by itself, without sums over rows."
            )

    def _check_concave(self, y: Any) -> None:
        """Raise ``ValueError`` where log p curves upward in a latent value in which it is said to be concave."""
        for index in self.concave:

            def along(f: float, index: int = index) -> jax.Array:
                latents = [jnp.full(np.shape(y), f if c == index else 0.0) for c in range(self.num_latents)]
                return self.log_prob(latents[0] if self.num_latents == 1 else jnp.stack(latents), y)

            _require_concave(jnp.stack([along(f) for f in LOOKED_AT]), y=np.asarray(y), message=self._not_concave)

    @property
    def _not_concave(self) -> str:
        return f"Factorized log_concave is {self.log_concave}, but log p of {self.described} curves upward in f near"

    def _check_link(self, f: float, shape: tuple[int, ...]) -> None:
        """Raise ``ValueError`` where fn has f, any real number, for a parameter that is not, such as a rate."""
        link = f"at f = {f:g}, and GP values may be any real numbers: use a link, as in dist.Poisson(jnp.exp(f))."
        try:
            made = self._made(jnp.full(shape, f))
        except ValueError as error:  # of NumPyro, where that checks by itself
            raise ValueError(f"Factorized fn fails, {str(error).rstrip('.')}, {link}") from error
        made = base_of(self._checked(made))
        for name, constraint in made.arg_constraints.items():
            value = vars(made).get(name)
            if value is None or constraints.is_dependent(constraint):
                continue
            outside = f"Factorized fn makes a {type(made).__name__} with {name} outside {constraint} {link}"
            _require_inside(value, constraint=constraint, message=outside)

    def _support(self, y: Any) -> tuple[Any, str]:
        latents = () if self.num_latents == 1 else (self.num_latents,)
        shape = (*latents, *y.shape)
        with numpyro.validation_enabled(False):  # far out, rates may be 0 or infinite
            made = [self._distribution(jnp.full(shape, f)) for f in (0.0, -_FAR, _FAR)]
        # NumPy's comparisons fail at bounds that are traced.
        values = jnp.asarray(y) if any(map(is_traced, jax.tree.leaves([m.support for m in made]))) else y
        possible = made[0].support(values) & made[1].support(values) & made[2].support(values)
        name, bounds = type(made[0]).__name__, jax.tree.leaves(made[0].support)
        if type(made[0]) in OURS:  # supports of NumPyro's are closed where densities are 0 or infinite at an end
            at, meaning = OURS[type(made[0])](made[0])[0]._support(values)
            return possible & at, f"{meaning}, as of {name}"
        if any(np.ndim(bound) or is_traced(bound) for bound in bounds):
            return possible, f"in the support of {name} for every f, so that bounds must not depend on f"
        return possible, f"in the support of {name}, {made[0].support}"

    def stand_in(self, y: ArrayLike) -> ArrayLike:
        latents = () if self.num_latents == 1 else (self.num_latents,)
        with validation_enabled(False):
            support = self._distribution(jnp.zeros((*latents, *jnp.shape(y)))).support
        try:
            possible = support.feasible_like(jnp.zeros(jnp.shape(y)))
        except NotImplementedError:  # a constraint of the user's own, which does not say
            return 1
        # The lower end of a closed interval is possible, and may have no slope.
        inside = possible + (support(possible + 1) & ~support(possible - 1))
        return possible if support.is_discrete else inside

    def log_prob(self, f: ArrayLike, y: Any) -> jax.Array:
        (f,) = aligned(self, y, f)
        dtype = floats(f, y)[0].dtype
        with validation_enabled(False):  # nodes may be where a parameter overflows
            made = self._distribution(f)
            if made.support.is_discrete and jnp.issubdtype(jnp.result_type(y), jnp.floating):
                y = jnp.asarray(y).astype(int)  # by which some distributions index
            if type(made) in OURS:
                likelihood, latent = self._instead(y, f) or OURS[type(made)](made)
                log_prob = likelihood.log_prob(latent, y)
            elif type(made) in (dist.MixtureSameFamily, dist.MixtureGeneral):
                # As NumPyro's, whose sum over the last axis takes XLA on a CPU twice as long.
                each = jnp.moveaxis(made.component_log_probs(y), -1, 0)
                log_prob = jax.nn.logsumexp(jnp.where(each == -jnp.inf, -jnp.inf, each), axis=0)
            else:
                log_prob = made.log_prob(y)
            if constraints.is_dependent(type(made).support):  # it may depend on f
                log_prob = jnp.where(made.support(jnp.asarray(y)), log_prob, -jnp.inf)
        # NumPyro may promote Python numbers to float64 where that is enabled.
        return log_prob.astype(dtype)

    def _latent(self, f: jax.Array) -> tuple[jax.Array, Any]:
        """The latent value and the likelihood, of npgp's, that the function makes of f; ``KeyError`` for others."""
        made = self._made(f)
        likelihood, latent = OURS[type(made)](made)
        return latent, likelihood

    @cached_property
    def _is_linear(self) -> bool:
        """
        Whether the function makes a likelihood of npgp's that does not depend on f, of a latent value linear in f.

        A function without pieces whose slope is the same at ten places has it everywhere; and for all values of traced
        parameters, if it has for numbers in their stead that are in no relation; but whole ones may tell them apart.
        """
        if self.num_latents > 1:
            return False
        with validation_enabled(False), jax.enable_x64(True):
            try:
                program = jax.make_jaxpr(self._latent)(0.0)
            except (KeyError, TypeError, ValueError, IndexError):  # of rows alone, or in one precision
                return False
            text, traced = str(program), [c for c in program.consts if is_traced(c)]
            whole = re.search("new_dtype=u?int", text) or not all(jnp.issubdtype(c.dtype, jnp.floating) for c in traced)
            if PIECEWISE & set(re.findall(r"= (\w+)", text)) or (traced and whole):
                return False
            rng = np.random.default_rng(0)
            consts = [rng.uniform(0.5, 1.0, c.shape).astype(c.dtype) if is_traced(c) else c for c in program.consts]
            with jax.ensure_compile_time_eval():
                at = partial(jax.core.eval_jaxpr, program.jaxpr, consts)
                latents, *parameters = map(np.asarray, jax.vmap(at)(jnp.asarray(COMPARED_AT)))
        offset, slope = latents[0], latents[1] - latents[0]
        f = np.reshape(COMPARED_AT, (-1,) + (1,) * offset.ndim)
        with np.errstate(all="ignore"):
            apart = np.abs(latents - (offset + slope * f)) > ALIKE * (np.abs(offset) + np.abs(slope * f))
        alike = all(np.allclose(array, array[:1], rtol=ALIKE, atol=0.0) for array in parameters)
        near = np.all(slope != 0) and np.all(np.isfinite(latents[:5]))
        return bool(alike and near and not np.any(apart & np.isfinite(latents)))

    def _instead(self, y: ArrayLike, *moments: ArrayLike) -> tuple[Any, ...] | None:
        """npgp's likelihood, and mean and variances of its latent value for those of f; ``None`` if there is none."""
        if not self._is_linear:
            return None
        mean, *variances = floats(*moments)
        dtype = floats(y, *moments)[0].dtype
        with validation_enabled(False):
            offset, slope, likelihood = jax.jvp(
                self._latent, (jnp.zeros((), dtype),), (jnp.ones((), dtype),), has_aux=True
            )
        offset, slope, likelihood = jax.tree.map(lambda array: jnp.asarray(array, dtype), (offset, slope, likelihood))
        moved = (slope**2 * variance for variance in variances)
        return likelihood.with_nodes(self.num_nodes), offset + slope * mean, *moved

    def expected_log_prob(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        own = self._instead(y, mean, variance)
        return super().expected_log_prob(y, mean, variance) if own is None else own[0].expected_log_prob(y, *own[1:])

    def log_marginal(self, y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> jax.Array:
        own = self._instead(y, mean, variance)
        return super().log_marginal(y, mean, variance) if own is None else own[0].log_marginal(y, *own[1:])

    def sample(self, rng_key: jax.Array, f: ArrayLike) -> jax.Array:
        return self._distribution(*aligned(self, 0.0, f)).sample(rng_key)

    def moments(self, mean: ArrayLike, variance: ArrayLike) -> tuple[jax.Array, jax.Array]:
        def conditional(f: jax.Array) -> tuple[jax.Array, jax.Array]:
            made = self._distribution(f)
            try:
                return made.mean, made.variance
            except NotImplementedError:
                raise NotImplementedError(
                    f"the moments of y are not known: {type(made).__name__} has no mean or variance in NumPyro."
                ) from None

        mean, variance = aligned(self, 0.0, mean, variance)
        return normal_moments(conditional, mean, variance, self.num_nodes, self.num_latents)


def _warn_of_tails(made: Distribution) -> None:
    """
    Warn of NumPyro's censored and truncated distributions, whose log-probabilities are logarithms of what underflows.

    They end at the log of the smallest number there is, or of machine epsilon; or they are infinite.
    """
    name = type(made).__name__
    if name.endswith("CensoredDistribution"):
        warnings.warn(
            f"The log-probabilities of {name} stop where the tail is below machine precision, so that rows that "
            "contradict f count for too little. npgp.likelihoods.CensoredGaussian and Weibull have exact tails.",
            stacklevel=3,
        )
    if name.endswith("TruncatedDistribution"):
        warnings.warn(
            f"The log-probabilities of {name} are infinite where f is so far outside the bounds that the probability "
            "inside is below the smallest number. npgp.likelihoods.TruncatedGaussian has exact tails.",
            stacklevel=3,
        )


def _check_arguments(fn: Callable, num_latents: int) -> None:
    """Raise ``TypeError`` for a function that does not take so many latent values."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of what has none that can be looked at
        return
    try:
        signature.bind(*[None] * num_latents)
    except TypeError:
        values = "one latent value, f" if num_latents == 1 else f"{num_latents} latent values, an argument each"
        raise TypeError(
            f"likelihood is a function with the arguments {signature}; it must take {values}. For two pass both: "
            "npgp.observe(name, (f(X), g(X)), lambda f, g: …)."
        ) from None


def as_likelihood(obj: Likelihood | Callable[..., Distribution], num_latents: int = 1) -> Likelihood:
    """
    A likelihood from what a user may pass as one.

    .. code-block:: python

        assert isinstance(
            npgp.likelihoods.as_likelihood(lambda f: dist.Laplace(f, 1.0)),
            npgp.likelihoods.Likelihood,
        )

    :param obj: a :class:`Likelihood`, returned as it is, or a function from latent values, one argument each, to a
        NumPyro distribution, which becomes :class:`Factorized`.
    :param num_latents: number of the function's arguments.
    :raises TypeError: for anything else.
    :raises ValueError: for a function of more than three latent values.
    """
    if isinstance(obj, Likelihood):
        return obj
    is_class = isinstance(obj, type) and issubclass(obj, Likelihood)
    if callable(obj) and not is_class and not isinstance(obj, Distribution):
        return Factorized(obj, num_latents=num_latents)
    raise TypeError(
        f"likelihood is {obj!r:.80}; it must be a Likelihood, such as Bernoulli(), or a function from f to a NumPyro "
        "distribution."
    )


def _require_concave(values: Any, *, y: np.ndarray, message: str) -> None:
    if is_traced(values):
        see_later(partial(_require_concave, y=y, message=message), values)
        return
    log_p = np.asarray(values, float)
    rounding = 64.0 * float(jnp.finfo(values.dtype).eps) * np.abs(log_p[1:-1])
    upward = (log_p[:-2] + log_p[2:] - 2.0 * log_p[1:-1] > rounding + LOST) & np.isfinite(log_p[1:-1])
    if np.any(upward):
        at, *row = np.argwhere(upward)[0]
        wrong = np.broadcast_to(y, log_p.shape[1:])[tuple(row)]
        raise ValueError(f"{message} {LOOKED_AT[at + 1]:g}, for y = {wrong:g}: leave log_concave out.")


def _require_inside(value: Any, *, constraint: Any, message: str) -> None:
    if is_traced(value):
        see_later(partial(_require_inside, constraint=constraint, message=message), value)
    elif not np.all(constraint(np.asarray(value))):
        raise ValueError(message)
