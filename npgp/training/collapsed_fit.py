"""Models whose GPs are collapsed: their bound has no noise, so L-BFGS finds its optimum."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.svi import SVIState

from npgp import checks
from npgp.checks import host_generator
from npgp.contract import Handler, Message, constrained, unconstrained
from npgp.model.gaussians import Points
from npgp.model.guides import AutoSparseGP
from npgp.neighbors.search import Neighbors
from npgp.programs.compiled import QUICK, Program, one_program
from npgp.training.convergence import TrainingWarning
from npgp.training.data import Data, refuse_traced
from npgp.training.lbfgs import CONVERGED, MESSAGES, STALLED, LBFGSResult, minimize
from npgp.training.observed import check_of_rows
from npgp.training.step import Step

__all__ = ["CollapsedFit", "fit_collapsed"]

#: Neighbors are found anew where an unconstrained parameter, such as the logarithm of a lengthscale, has moved by more.
MOVED = 0.1
#: Standard deviation of what random starts add to the logarithms of positive parameters, and the like.
SPREAD = 1.0


class CollapsedFit(NamedTuple):
    """
    Result of :func:`fit_collapsed`.
    """

    #: Constrained values of all parameters, by site name.
    params: dict[str, Any]
    #: The negative bound at the start and after each step of the best search.
    losses: np.ndarray
    #: Whether its last steps gained less than the tolerance, or nothing that the precision tells.
    converged: bool
    #: Why it ended.
    message: str
    #: Where each search ended, in the order of the starts; infinity for one that could not begin.
    ends: np.ndarray


def fit_collapsed(
    rng_key: jax.Array,
    model: Callable,
    *args: Any,
    init_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    restarts: int = 0,
    max_steps: int = 1000,
    tolerance: float = 1e-6,
    progress: bool = True,
    **kwargs: Any,
) -> CollapsedFit:
    """
    Maximize the bound of a model whose GPs are collapsed, by L-BFGS:

    .. code-block:: python

        def model(X, y=None):
            lengthscale = numpyro.param(
                "lengthscale", 1.0, constraint=dist.constraints.positive
            )
            noise = numpyro.param("noise", 0.1, constraint=dist.constraints.positive)
            numpyro.sample(
                "y",
                npgp.CollapsedGP(npgp.RBF(lengthscale), X, Z, npgp.Gaussian(scale=noise)),
                obs=y,
            )


        y = y + 0.1 * np.random.default_rng(0).normal(size=len(y))
        params = npgp.fit_collapsed(jax.random.key(0), model, X, y).params
        gp = npgp.CollapsedGP(
            npgp.RBF(params["lengthscale"]), X, Z, npgp.Gaussian(scale=params["noise"])
        )
        posterior = gp.condition(y)

    ``numpyro.param`` statements are at their maximum of likelihood then, latent sites at the mode of their posterior
    (``AutoDelta``). All rows take part in each step: it is for data that fit in memory. In float64, please, as in all
    searches that go by small differences.

    Neighbors of distributions that were given their number are found at the start's hyperparameters. After 4, 8, 16 and
    so many steps and at the end they are found anew, and the search goes on, if these have moved by a tenth.

    A bound has several optima, above all in inducing inputs. Of searches from several starts the best is returned;
    ``ends`` tells what each came to. A keyboard interrupt ends the search that runs, with a warning.

    :param rng_key: for the start of what is random at the start, and the random starts.
    :param model: the model.
    :param args: its positional arguments, all rows.
    :param init_params: values to start from by site name, as for :func:`npgp.fit`; or a list of such, each a start.
    :param restarts: how many random starts there are besides: from the first one, with N(0, 1) added to the
        unconstrained values of all parameters that have a constraint, so to the logarithms of positive ones. Others,
        such as inducing inputs, stay, as nothing tells their scale.
    :param max_steps: most steps of each search.
    :param tolerance: a search has converged when so many steps as two for each number, and five, but no more than 50,
        gain less than this together, in nats.
    :param progress: show a progress bar for each search.
    :param kwargs: the model's keyword arguments.
    :raises TypeError: inside ``jit`` and other transformations.
    :raises ValueError: for a model with GPs that are not collapsed, a bound with noise, or no parameters; and for
        options and data as said above.
    :raises FloatingPointError: if the bound or its gradient is not finite at the first start.
    """
    refuse_traced("fit_collapsed", (rng_key, args, kwargs))
    checks.random_key(rng_key)
    restarts = checks.whole_number(restarts, "restarts", least=0)
    several = isinstance(init_params, (list, tuple)) and len(init_params) > 0
    starts: list[Any] = list(init_params) if several else [init_params]  # type: ignore[arg-type]
    if not all(values is None or isinstance(values, Mapping) for values in starts):
        raise TypeError(
            f"init_params is {init_params!r:.80}; it must be a dict of values by site name, or a list of such."
        )
    data = Data(args, kwargs, rng_key, None, None, allow_nan=None)
    call, arrays = data.layout.call, data.arrays
    guide = AutoSparseGP(model, Points)
    svi = SVI(model, guide, optax.sgd(1.0), Trace_ELBO())  # whose steps are not taken

    first_args, first_kwargs = data.first_call()
    at_start = KnownNeighbors({})
    try:
        with at_start:
            states = [Step(svi).init(rng_key, *first_args, init_params=values, **first_kwargs) for values in starts]
    except Exception:
        data.refuse_nan()  # which says where they came from
        raise
    if data.has_nan:
        check_of_rows(svi, one_program(lambda: svi.get_params(states[0])), data, 0)
    if guide.components:
        raise ValueError(
            f"the model draws the GP {guide.components[0]!r}, whose q(ε) is to be trained: npgp.fit does that. "
            "npgp.fit_collapsed is for GPs that are stated as npgp.CollapsedGP."
        )
    starts = [unconstrained(svi, state) for state in states]
    if not starts[0]:
        raise ValueError("the model has no parameters and no latent sites: there is nothing to fit.")
    starts += _random_starts(rng_key, svi, starts[0], restarts)

    def loss(params: dict[str, Any], key: jax.Array, inputs: Any) -> jax.Array:
        arrays, known = inputs
        at, keywords = call(arrays, None)
        with KnownNeighbors(known):
            return svi.evaluate(SVIState(svi.optim.init(params), None, key), *at, **keywords)

    def neighbors(params: dict[str, Any]) -> dict[str, Neighbors]:
        """What was found where numbers of neighbors are given, at these parameters."""
        state = SVIState(svi.optim.init(params), None, rng_key)
        values = one_program(lambda: svi.get_params(state))
        at = [handlers.substitute(handlers.seed(program, rng_key), values) for program in (guide, model)]
        drawn = handlers.trace(at[0]).get_trace(*first_args, **first_kwargs)
        sites = handlers.trace(handlers.replay(at[1], drawn)).get_trace(*first_args, **first_kwargs).values()
        return {site["name"]: site["fn"].neighbors for site in sites if _searched_neighbors(site)}

    keys, known = jax.random.split(rng_key), neighbors(starts[0]) if at_start.searched else {}
    evaluate = Program(loss, options=QUICK)
    once, again = (evaluate(starts[0], key, (arrays, known)) for key in keys)
    if np.isfinite(once) and np.isfinite(again) and not np.isclose(once, again, rtol=1e-4, atol=0.0):
        raise ValueError(
            f"the bound has noise, {-float(once):.6g} and {-float(again):.6g} with two random keys: L-BFGS cannot "
            "follow it. Use npgp.fit, or state the model without what it draws."
        )
    options = dict(max_steps=max_steps, tolerance=tolerance, progress=progress, describe=lambda x: f"bound {-x:.6g}")

    def search(start: dict[str, Any]) -> LBFGSResult:
        found_at = start

        def renew(params: dict[str, Any]) -> tuple[Any, ...] | None:
            nonlocal found_at
            if all(np.max(np.abs(params[name] - x), initial=0.0) <= MOVED for name, x in found_at.items()):
                return None
            found_at = params
            return keys[0], (arrays, neighbors(params))

        there = known if start is starts[0] or not known else neighbors(start)
        return minimize(loss, start, keys[0], (arrays, there), renew=renew if known else None, **options)  # type: ignore[arg-type]

    found = [_searched(search, x, must=i == 0) for i, x in enumerate(starts)]
    ends = np.array([np.inf if one is None else one.losses[-1] for one in found])
    best: Any = found[int(np.argmin(ends))]
    # A search that finds no lower point along the gradient either is at the optimum as far as the precision tells.
    converged = best.message in (MESSAGES[CONVERGED], MESSAGES[STALLED])
    if not converged:
        warnings.warn(
            f"npgp.fit_collapsed: the best search {best.message}, with a bound of {-best.losses[-1]:.6g}, and may not "
            "be at the optimum: give more max_steps, or start from result.params.",
            TrainingWarning,
            stacklevel=2,
        )
    state = SVIState(svi.optim.init(best.params), None, keys[0])
    params = one_program(lambda: svi.get_params(state))
    return CollapsedFit(params, best.losses, converged, best.message, ends)


class KnownNeighbors(Handler):
    """
    Gives distributions that found their neighbors by number those found before.

    :param neighbors: by site name.
    """

    def __init__(self, neighbors: dict[str, Neighbors]):
        super().__init__(None)
        self.neighbors = neighbors
        #: Whether there are such distributions.
        self.searched = False

    def process_message(self, msg: Message) -> None:
        """Replace the neighbors of the site's distribution."""
        if _searched_neighbors(msg):
            self.searched = True
            if msg["name"] in self.neighbors:
                msg["fn"] = copy.copy(msg["fn"])
                msg["fn"].neighbors = self.neighbors[msg["name"]]


def _searched_neighbors(site: Message) -> bool:
    return site["type"] == "sample" and getattr(site["fn"], "searched", False)


def _random_starts(rng_key: jax.Array, svi: SVI, first: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Starts with noise in what has a constraint: where the unconstrained value is another than the value."""
    values = one_program(lambda: constrained(svi, first))
    moved = [name for name, x in first.items() if not np.array_equal(np.asarray(x), np.asarray(values[name]))]
    rng = host_generator(rng_key)
    return [
        {
            name: x + SPREAD * rng.normal(size=x.shape).astype(x.dtype) if name in moved else x
            for name, x in first.items()
        }
        for _ in range(number)
    ]


def _searched(search: Callable[[dict[str, Any]], LBFGSResult], start: dict[str, Any], must: bool) -> LBFGSResult | None:
    try:
        return search(start)
    except FloatingPointError:
        if must:
            raise
        return None
