"""
Check of a guide's posterior by importance ratios of the whole model: Pareto k̂ of their tail, and what means and
standard deviations are by the weights.

Neither does alone. k̂ is about the tail: below .7 the weights can be relied upon, but q may have two thirds of the
model's standard deviations then; and beside a posterior that is skewed a little it is above 1, though all but the far
tail is right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import Delta
from numpyro.infer import SVI
from numpyro.infer.util import log_density

from npgp import checks, linalg
from npgp.conditionals import Tight
from npgp.contract import Handler, Message, base_of, frames, is_enumerated, plate_size
from npgp.likelihoods import Gaussian, Likelihood, quadrature_error
from npgp.model.function import Function
from npgp.model.given_rows import meetings, sampled_into, statements
from npgp.model.guides import AutoSparseGP, set_up
from npgp.model.observation import LatentObservation
from npgp.model.sites import Trained, info_of, is_gp_site, is_latent, is_observation, traced_inside, trained
from npgp.programs.compiled import QUICK, STEPS, one_program
from npgp.sparse.projection import Projector
from npgp.variational.blocks import BlockNormal, JointBlock, MeanOnlyNormal

__all__ = ["PosteriorCheck", "check_posterior", "too_few_points"]

#: Estimates by the weights converge in practice below this.
USABLE = 0.7
#: q is near the model's posterior where means differ by less, in its standard deviations, and the logarithms of these,
#: by weights that leave so many of the draws. (Of 53 pairs of densities, in 1 to 50 dimensions, narrow, heavy-tailed
#: and skewed, 20 times 2000 draws of each, those taken for near most times have standard deviations that are off by 12%
#: at most; those ever taken for near, by 15%.)
NEAR, LEFT = 0.1, 0.5
#: So many entries of a site are looked at together: of 2000 draws, 64 MB.
ENTRIES = 4096
#: One in so many draws has a second one of the functions' values, with all else the same.
AGAIN = 4
#: Ratios (in nats) that differ by less are all the same, but for rounding: there is no tail to look at.
SAME = 1e-2
#: Errors of quadrature, in nats of all rows, that are worth a word.
COARSE = 0.5
#: Likewise what residuals cost, in nats for each row. Training lowers it where points are too few, by longer
#: lengthscales and more noise: it was .037 where twice the points gained .2 and half of the intervals of 90% missed.
COSTLY = 0.03


@dataclass(frozen=True)
class PosteriorCheck:
    """
    Result of :func:`npgp.check_posterior`; as a string it is a sentence with advice.

    :param khat: the estimated shape k̂ of the tail of the importance ratios; −∞ if all ratios are the same. Below .7 the
        weights can be relied upon.
    :param draws: number of draws that it is estimated from.
    :param effective: effective number of these draws if they are weighted by their smoothed ratios.
    :param spread: standard deviation of the logarithms of the ratios, in nats; 0 for the exact posterior.
    :param of_functions: of this what the values of functions make, ε, with all other sites the same: it is ``spread``
        where ε alone is off, and 0 where q(ε) is right given the others.
    :param elbo: their mean, an estimate of the ELBO.
    :param independent: what q takes for independent though it meets in one statement, in words: components, and latent
        inputs of rows. Their intervals may be far too narrow, for which few draws have no eye.
    :param jitter: the most that jitter added to an inducing value's variance, as a share of the least noise variance of
        Gaussian observations; 0 without these.
    :param quadrature: by how many nats expectations of all rows, or log marginals, change with twice as many nodes, at
        one draw; 0 where they are in closed form.
    :param points: what the residual that inducing features leave costs, in nats for each row, at one draw.
    :param dtype: of the densities; advice about jitter depends on it.
    :param follows: whether the guide is an :class:`npgp.AutoSparseGP` whose q(ε) follows the other sites.
    :param sites: the draws of latent sites, (draws, …) each, but for inducing values whose q(ε) is not learned.
    :param weights: their smoothed importance weights, which sum to 1.
    """

    khat: float
    draws: int
    effective: float
    spread: float
    elbo: float
    of_functions: float | None = None
    independent: tuple[str, ...] = ()
    jitter: float = 0.0
    quadrature: float = 0.0
    points: float = 0.0
    dtype: str = "float32"
    follows: bool = False
    sites: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    weights: np.ndarray | None = field(default=None, repr=False, compare=False)

    def reweight(self, num_draws: int = 1000, rng_key: jax.Array | None = None) -> dict[str, jax.Array]:
        """
        Draws of the latent sites that stand for the model's posterior better than the guide's do: those of this check,
        each taken as often as its smoothed importance weight says. They are for what ``mcmc.get_samples()`` is for:
        ``npgp.posterior("f", model, draws, params, X)``, ``Predictive`` and :func:`npgp.to_arviz`. With k̂ above .7
        they are no substitute for MCMC, and with few :attr:`effective` draws most are copies of a few.

        .. code-block:: python

            check = npgp.check_posterior(key, model, guide, params, X, y, draws=200)
            f = npgp.posterior("f", model, check.reweight(100), params, X)

        :param num_draws: number of draws.
        :param rng_key: for the choice, which is systematic: a draw with weight w is taken w times ``num_draws`` times,
            rounded up or down.
        :return: draws by name, (num_draws, …).
        :raises ValueError: for a check without draws.

        Source: Vehtari, Simpson, Gelman, Yao & Gabry 2024 (PSIS); Kitagawa 1996 (systematic resampling).
        """
        num_draws = checks.whole_number(num_draws, "num_draws")
        if self.weights is None:
            raise ValueError("this check has no draws: take one that npgp.check_posterior returned.")
        key = jax.random.key(0) if rng_key is None else rng_key
        start, order = jax.random.split(key)
        places = (np.arange(num_draws) + float(jax.random.uniform(start))) / num_draws
        chosen = np.searchsorted(np.cumsum(self.weights), places).clip(max=len(self.weights) - 1)
        chosen = np.asarray(jax.random.permutation(order, chosen))
        return {name: jnp.asarray(value[chosen]) for name, value in self.sites.items()}

    @property
    def moved(self) -> dict[str, float]:
        """By how many of the guide's standard deviations means are off by the weights, of each site the most."""
        return {name: moved for name, (moved, _) in self._by_weights.items()}

    @property
    def widened(self) -> dict[str, float]:
        """
        Of each site's entries, the logarithm of the standard deviation by the weights over the guide's that is furthest
        from 0: above where the guide's is too narrow.
        """
        return {name: widened for name, (_, widened) in self._by_weights.items()}

    @cached_property
    def _by_weights(self) -> dict[str, tuple[float, float]]:
        if self.weights is None:
            return {}
        found = {}
        for name, draws in self.sites.items():
            entries = np.reshape(draws, (len(self.weights), -1))
            starts = range(0, max(entries.shape[1], 1), ENTRIES)
            pieces = [_off(entries[:, i : i + ENTRIES], self.weights) for i in starts]
            moved, widened = np.concatenate(pieces, axis=1)
            if moved.size:
                found[name] = float(np.max(np.abs(moved))), float(max(widened, key=abs))
        return found

    @property
    def near(self) -> bool:
        """
        True if means and standard deviations are the model's to a tenth of a standard deviation, by weights that leave
        at least half of the draws.
        """
        differ = [*self.moved.values(), *map(abs, self.widened.values())]
        known = self.khat < USABLE if not differ else max(differ) < NEAR
        return known and self.effective >= LEFT * self.draws

    @property
    def trusted(self) -> bool:
        """True if q is :attr:`near`, no components that meet are independent in it, and numerical errors are small."""
        exact = linalg.jitter_beside_noise(self.jitter, self.dtype) is None and self.quadrature < COARSE
        return self.near and not self.independent and exact

    def _differences(self) -> str:
        """What the weights say, as the end of a sentence."""
        moved, widened = self.moved, self.widened
        if not moved:
            return ""
        mean, deviation = max(moved, key=lambda n: moved[n]), max(widened, key=lambda n: abs(widened[n]))
        off, narrow = 100.0 * np.expm1(abs(widened[deviation])), "narrow" if widened[deviation] > 0.0 else "wide"
        return (
            f", by the weights means are off by up to {moved[mean]:.2f} standard deviations ({mean}), and these by up "
            f"to {off:.0f}% ({deviation}, too {narrow})"
        )

    def __str__(self) -> str:
        by_weights = self._differences()
        if self.near and self.khat < USABLE:
            advice = f"good: the guide's posterior is near the model's{by_weights}"
        elif self.near:
            advice = f"usable: all but the tails is near the model's posterior{by_weights}"
        elif self.khat < USABLE:
            advice = (
                f"the guide's posterior is not the model's{by_weights}. These weights can be relied upon: "
                "check.reweight() returns draws by them"
            )
        else:
            follow = (
                "let q(ε) follow the other sites, and these each other, as npgp.AutoSparseGP(model) does by default; "
            )
            advice = (
                f"the guide's posterior is not the model's{by_weights}, and weights so uneven see but a part of it. "
                f"Train until it has arrived, num_steps=None, if it has not; {'' if self.follows else follow}or run "
                "NUTS, over hyperparameters alone where the GP is stated as npgp.CollapsedGP"
            )
        khat = "−∞" if self.khat == -np.inf else f"{self.khat:.2f}"
        verdict = f"Pareto k̂ = {khat} (weighted, {self.draws} draws are worth {self.effective:.0f}): {advice}."
        if self.of_functions is not None and not self.near:
            others = np.sqrt(max(self.spread**2 - self.of_functions**2, 0.0))
            verdict += (
                f" Of what log ratios differ by, {others:.1f} nats are of the other sites, {self.of_functions:.1f} of "
                "functions given these."
            )
        if self.independent:
            verdict += (
                f" But q takes for independent {'; '.join(self.independent)}: their intervals may be far too narrow "
                "whatever k̂ is."
            )
        if sentence := linalg.jitter_beside_noise(self.jitter, self.dtype):
            verdict += f" But {sentence}"
        if self.quadrature >= COARSE:
            verdict += (
                f" But integrals of the likelihood change by {self.quadrature:.2g} nats if nodes are doubled: give the "
                "likelihood more num_nodes."
            )
        if self.points > COSTLY:
            verdict += (
                f" But what inducing points leave of f costs {self.points:.2g} nats a row: they may be too few, see "
                "npgp.collapsed.enough_points."
            )
        return verdict


def check_posterior(
    rng_key: jax.Array,
    model: Callable,
    guide: Callable,
    params: Mapping[str, Any],
    *args: Any,
    draws: int = 2000,
    **kwargs: Any,
) -> PosteriorCheck:
    """
    Estimate whether a guide's posterior is to be trusted.

    .. code-block:: python

        print(npgp.check_posterior(key, model, guide, params, X, y, draws=200))

    Draws of all latent sites, inducing values ε among them, are weighted by ``p(y, z) / q(z)``. If q were the
    posterior, all weights were the same; the heavier their tail is, the less q covers of what model and data leave
    possible. k̂ is the shape of the generalized Pareto distribution fitted to the largest weights: below .7 these can be
    relied upon, and say by how much means and standard deviations of each site are off (:attr:`PosteriorCheck.moved`,
    :attr:`PosteriorCheck.widened`). Above, they see but a part of what q does not cover; where they are nearly even all
    the same, that is the far tail.

    ``p(y, z)`` is the density of the bound: ``observe`` has each row's share of the ELBO at the drawn ε. So the
    weights' logarithms have the ELBO for their mean (nearly, where noise is not Gaussian and the conditional not
    ``"prior"``), and q at its optimum is perfect where noise is Gaussian and nothing else is sampled: what a GP loses
    beside few inducing points is not counted. A GP stated as :class:`npgp.CollapsedGP` has no ε among z, nor has a
    block that moves the mean only. Where the guide has no q(ε), such as ``AutoNormal(model)``, the density is that
    which NUTS samples. Parameters, and sites to which the guide gives one value (``AutoDelta``), are taken as known.

    k̂ speaks of all sites together: one that is wrong makes it large, and in hundreds of dimensions a little error in
    each does too. Where q is not near, pairs of draws that differ in ε alone say how much of the ratios' spread is of
    q(ε) given the other sites, and how much of these. (There is no k̂ of either: a ratio of the others' marginal
    densities is an integral over ε for each draw.) Of a mode of the posterior that no draw has met, no ratio knows.

    It also says where model and guide agree about numbers that are wrong: integrals of a likelihood that change if
    nodes are doubled, jitter of inducing values that is not small beside the noise, and inducing points that leave so
    much of f that hyperparameters are likely to be those of the points.

    :param rng_key: random key.
    :param model: the model.
    :param guide: its guide, automatic or written by hand.
    :param params: trained parameters, from ``svi.get_params(state)``.
    :param args: arguments of model and guide, observations included, for all rows.
    :param draws: number of draws, at least 100. With other keys k̂ comes out otherwise, by .1 to .2 where it is
        large.
    :raises ValueError: for minibatches: all rows are needed, as single batches say nothing of the posterior; if no site
        is observed; and for latent sites that the guide does not draw.
    :raises NotImplementedError: for a :class:`npgp.VNNGP`.
    :raises FloatingPointError: if a density is NaN.

    Source: Yao, Vehtari, Simpson & Gelman 2018; Vehtari, Simpson, Gelman, Yao & Gabry 2024 (PSIS).
    """
    draws = checks.whole_number(draws, "draws", least=100)
    checks.random_key(rng_key)
    given = trained(params)

    again = draws // AGAIN
    independent: tuple[str, ...] = ()
    functions: set[str] = set()  # names of their sites
    others = False

    def log_ratio(key: jax.Array, key_of_functions: jax.Array, first: ArrayLike) -> tuple:
        nonlocal independent, others
        values = traced_inside(given)
        guide_key, model_key = jax.random.split(key)
        seeded = handlers.seed(_FunctionsAnew(guide, key_of_functions, functions), guide_key)
        log_q, drawn = log_density(Trained(seeded, values), args, kwargs, {})
        approximate = {name: info_of(site).q for name, site in drawn.items() if is_gp_site(site)}
        for name, q in approximate.items():
            if not (q is None or isinstance(q, BlockNormal)):
                raise NotImplementedError(
                    f"{name} belongs to a VNNGP, whose posterior check_posterior does not know yet."
                )
        shared = {name for name, q in approximate.items() if isinstance(q, JointBlock)}
        # Inducing values at their draw, but for blocks that move the mean only, whose variance is the residual's.
        at_draw = {n: drawn[n]["value"] for n, q in approximate.items() if getattr(q, "learned", False)}
        replayed = handlers.replay(handlers.condition(model, data=at_draw), drawn)
        log_p, sites = log_density(Trained(handlers.seed(replayed, model_key), values), args, kwargs, {})
        _check(sites, {name for name, site in drawn.items() if is_latent(site)})
        for name, q in approximate.items():
            if isinstance(q, MeanOnlyNormal):
                # In the place of a draw's log ratio, its mean.
                ratio = (site[name]["fn"].log_prob(drawn[name]["value"]) for site in (sites, drawn))
                log_p = log_p - jnp.sum(q.kl()) - jnp.sum(jnp.subtract(*ratio))
        sampled = sampled_into(Trained(model, values), sites, args, kwargs)
        independent = tuple(dict.fromkeys([*meetings(sites, approximate, shared, sampled), *_inputs(sites, drawn)]))
        unknown = {name for name, q in approximate.items() if not (q is None or q.learned)}
        values = {n: site["value"] for n, site in drawn.items() if is_latent(site) and n not in unknown}
        functions.update(name for name in values if is_gp_site(drawn[name]))
        others = not values.keys() <= functions
        none = jnp.zeros(()), jnp.zeros(())
        costs = lax.cond(first, lambda: (_quadrature_error(sites), _residual_cost(sites)), lambda: none)
        return log_p - log_q, _jitter_share(sites), values, costs

    def compute() -> tuple:
        jax.eval_shape(log_ratio, rng_key, rng_key, True)  # which names the functions' sites
        keys, number = jax.random.split(rng_key, draws), draws + again
        of_functions = jax.random.split(jax.random.fold_in(rng_key, 1), number)
        every = jnp.concatenate([keys, keys[:again]]), of_functions, jnp.arange(number) == 0
        return lax.map(lambda each: log_ratio(*each), every)

    set_up(guide, args, kwargs)
    log_ratios, shares, values, (errors, costs) = one_program(compute, options=STEPS)
    jitter = float(np.median(shares))  # at most draws, not at the one with the least noise
    every = np.asarray(log_ratios, np.float64)
    judged = _judged(every[:draws])
    apart = every[draws:] - every[:again]
    values = jax.tree.map(lambda x: x[:draws], values)
    dtype = str(np.asarray(shares).dtype)
    follows = isinstance(guide, AutoSparseGP) and guide.dependence != "independent"
    return replace(
        judged,
        of_functions=float(np.sqrt(np.mean(apart[np.isfinite(apart)] ** 2) / 2.0)) if functions and others else None,
        independent=independent,
        jitter=jitter,
        quadrature=float(errors[0]),
        points=float(costs[0]),
        dtype=dtype,
        follows=follows,
        sites=jax.tree.map(np.asarray, values),
    )


class _FunctionsAnew(Handler):
    """Draws functions' sites by a random key of their own, so that they can be others where all else is the same."""

    def __init__(self, guide: Callable, key: jax.Array, sites: Collection[str]):
        super().__init__(guide)
        self.key, self.sites = key, sites

    def process_message(self, msg: Message) -> None:
        asked = is_gp_site(msg) or (msg["type"] == "prng_key" and msg.get("name") in self.sites)
        if asked and msg["value"] is None and msg["kwargs"].get("rng_key") is None:
            self.key, msg["kwargs"]["rng_key"] = jax.random.split(self.key)


def too_few_points(svi: SVI, params: Mapping[str, Any], args: tuple, kwargs: dict[str, Any]) -> str | None:
    """
    A sentence, if what inducing points leave of functions costs so much that hyperparameters are likely to be theirs.

    :param params: trained parameters.
    :param args: arguments of model and guide, observations included; some rows will do.
    """
    kwargs = kwargs | svi.static_kwargs

    def cost() -> jax.Array:
        values = traced_inside(params)
        drawn = handlers.trace(Trained(handlers.seed(svi.guide, 0), values)).get_trace(*args, **kwargs)
        if not any(isinstance(info_of(site).q, BlockNormal) for site in drawn.values() if is_gp_site(site)):
            return jnp.zeros(())
        model = handlers.seed(handlers.replay(svi.model, drawn), 1)
        return _residual_cost(handlers.trace(Trained(model, values)).get_trace(*args, **kwargs))

    found = float(one_program(cost, options=QUICK))
    if found <= COSTLY:
        return None
    return (
        f"what inducing points leave of f costs {found:.2g} nats a row, so that lengthscales and noise are likely to "
        "be those of the points, too large: take more (npgp.infer(..., grow=0.001) does), and see "
        "npgp.collapsed.enough_points."
    )


def _inputs(sites: dict[str, Message], drawn: dict[str, Message]) -> list[str]:
    """Latent inputs of functions, in words, of which the guide draws those of each row by themselves."""
    parts = [part for latents in statements(sites).values() for part in latents.parts]
    inputs = {id(term.X): term.function.name for part in parts for term in part.terms}
    # A Delta is a value made of a vector that was drawn before, on all of which it depends.
    alone = [n for n, site in drawn.items() if is_latent(site) and frames(site) and not isinstance(site["fn"], Delta)]
    return [
        f"the {name} of each row, inputs of {inputs[id(sites[name]['value'])]}, whose common shifts and warps the "
        "function would follow"
        for name in alone
        if id(sites[name]["value"]) in inputs
    ]


def _jitter_share(sites: dict[str, Message]) -> jax.Array:
    """The most that jitter added to an inducing value's variance, over the least noise variance; 0 without noise."""
    likelihoods = [fn.likelihood for fn, _ in _observations(sites)]
    noise = [jnp.min(jnp.asarray(p.variance)) for p in likelihoods if isinstance(p, Gaussian)]
    drawn = {id(f): f for f in (info_of(site).function for site in sites.values() if is_gp_site(site))}
    projectors = [f.cache.projector for f in drawn.values() if isinstance(f, Function)]
    added = [jnp.max(projector.each(Projector.most_jitter)) for projector in projectors]
    if not (noise and added):
        return jnp.zeros(())
    return jnp.max(jnp.stack(added)) / jnp.min(jnp.stack(noise))


def _quadrature_error(sites: dict[str, Message]) -> jax.Array:
    """By how much expectations and log marginals of all rows change with twice the nodes, in nats."""
    total = jnp.zeros(())
    for fn, y in _observations(sites):
        mean, variance, residual = fn.moments
        rows = fn.observations(y)
        y, mean, variance = rows.filled(mean, variance + residual)

        def errors(
            part: Likelihood, take: Callable, y: Any = y, mean: Any = mean, variance: Any = variance
        ) -> jax.Array:
            return quadrature_error(part, take(y), take(mean), take(variance))

        changes = fn.likelihood.by_part(errors)
        total = total + jnp.sum(rows.where_present(changes))
    return total


def _residual_cost(sites: dict[str, Message]) -> jax.Array:
    """By how much a row's share of the ``tight`` ELBO would be higher without a residual, in nats."""
    total, count = jnp.zeros(()), jnp.zeros(())
    for fn, y in _observations(sites):
        if fn.conditional is None:
            continue
        rows, (mean, variance, left) = fn.observations(y), fn.moments
        none = rows.elbo(Tight(), mean, variance, jnp.zeros_like(left))
        cost = rows.where_present(none - rows.elbo(Tight(), mean, variance, left))
        total, count = total + jnp.sum(cost), count + jnp.sum(rows.where_present(jnp.ones_like(cost)))
    return total / jnp.maximum(count, 1.0)


def _observations(sites: dict[str, Message]) -> list[tuple[LatentObservation, jax.Array]]:
    """Distribution and observed value of each statement of GP values."""
    observed = [site for site in sites.values() if site["type"] == "sample" and site["is_observed"]]
    pairs = [(base_of(site["fn"]), jnp.asarray(site["value"])) for site in observed]
    return [(fn, y) for fn, y in pairs if isinstance(fn, LatentObservation)]


def _check(sites: dict[str, Message], latent: set[str]) -> None:
    observed = False
    for name, msg in sites.items():
        if msg["type"] == "plate" and msg["value"].shape[0] != plate_size(msg):
            raise ValueError(
                f"plate {name!r} has {msg['value'].shape[0]} of its {plate_size(msg)} rows: check_posterior needs the "
                "model with all rows, not a minibatch."
            )
        if msg["type"] != "sample":
            continue
        observed = observed or msg["is_observed"]
        if msg["is_observed"] or name in latent:
            continue
        if is_observation(msg):
            raise ValueError(f"{name} is not observed: pass check_posterior the observations too.")
        what = "is summed out" if is_enumerated(msg) else "is not drawn by the guide"
        raise ValueError(
            f"{name}, a latent site of the model, {what}: check_posterior needs draws of all latent sites."
        )
    if not observed:
        raise ValueError("the model has no observed site with these arguments: pass the observations too.")


def _judged(log_ratios: np.ndarray) -> PosteriorCheck:
    """k̂ and what goes with it, from the logarithms of importance ratios."""
    draws = len(log_ratios)
    if np.isnan(log_ratios).any() or np.isposinf(log_ratios).any() or np.all(np.isneginf(log_ratios)):
        raise FloatingPointError(
            f"{np.sum(~np.isfinite(log_ratios))} of {draws} draws have a density that is not finite, of model or guide."
        )
    if np.ptp(log_ratios) < SAME:
        same, spread, elbo = np.full(draws, 1.0 / draws), float(np.std(log_ratios)), float(np.mean(log_ratios))
        return PosteriorCheck(float("-inf"), draws, float(draws), spread, elbo, weights=same)
    smoothed, khat = _smoothed(log_ratios - np.max(log_ratios))
    weights = np.exp(smoothed - np.max(smoothed))
    effective = np.sum(weights) ** 2 / np.sum(weights**2)
    spread = np.std(log_ratios[np.isfinite(log_ratios)])
    elbo, weights = float(np.mean(log_ratios)), weights / np.sum(weights)
    return PosteriorCheck(khat, draws, float(effective), float(spread), elbo, weights=weights)


def _off(draws: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """By how much means, in standard deviations, and logarithms of these are off: (2, entries that vary)."""
    values = draws[:, np.ptp(draws, axis=0) > 0.0].astype(np.float64)
    weighted, deviation = weights @ values, values.std(0)
    widened = 0.5 * np.log(weights @ (values - weighted) ** 2) - np.log(deviation)
    return np.stack([(weighted - values.mean(0)) / deviation, widened])


def _smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    """Pareto smoothing by ArviZ: logarithms of weights, and k̂ of the tail of the largest."""
    import arviz  # takes a second, and few programs need it

    if int(arviz.__version__.split(".")[0]) < 1:
        smoothed, khat = arviz.psislw(log_ratios)
    else:  # it takes log likelihoods, to leave one row out: the ratios' reciprocals
        from arviz_stats.base import array_stats

        smoothed, khat = array_stats.psislw(-log_ratios)
    return np.asarray(smoothed), float(khat)
