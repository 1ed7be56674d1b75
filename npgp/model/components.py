"""Which components meet in one statement, such as ``observe("y", f(X) + g(X))``, from abstract runs of a model."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
from numpyro import handlers

from npgp.context import under
from npgp.contract import Message
from npgp.model.function import Function
from npgp.model.latent import Latents
from npgp.model.rerun import Hidden, is_no_parameter
from npgp.model.sites import info_of, is_inducing, is_observation
from npgp.programs.operations import Operations
from npgp.programs.tracing import current_trace, trace_of

T = TypeVar("T")


def survey(model: Callable, values: Mapping[str, jax.Array], args: tuple, kwargs: dict[str, Any]) -> dict[str, Message]:
    """The trace of a model at values of its other sites, its GPs drawn from the prior; parameters as handlers say."""
    with (
        Hidden(hides=is_no_parameter),
        handlers.trace() as sites,
        under(unseen=True),
    ):
        handlers.seed(handlers.substitute(model, data=dict(values)), 0)(*args, **kwargs)
    return sites


class Numbers(NamedTuple):
    """The draws, by their ``id``, on whose sampled values the numbers of a statement depend."""

    #: In the offset of each of its latent values; of an observation by ``numpyro.sample``, in each parameter.
    offsets: list[set[int]]
    #: In these, in factors or in rows.
    all: set[int]


def sampled_into(model: Callable, sites: dict[str, Message], args: tuple, kwargs: dict[str, Any]) -> dict[str, Numbers]:
    """
    Find which statements' numbers depend on values that :func:`npgp.sample` has sampled: statements about GP values,
    and observations by ``numpyro.sample``.

    :param model: the model.
    :param sites: its trace.
    :raises ValueError: for an observation whose numbers depend on a draw that is a term of it: q would be taken to be
        independent of itself, and the ELBO be no bound.
    """
    stated = statements(sites)
    if all(is_observation(sites[name]) for name in stated):
        return {}
    inducing = {n: m["value"] for n, m in sites.items() if is_inducing(m)}
    drawn = {n: m for n, m in sites.items() if m["type"] == "sample"}
    fixed = {n: m["value"] for n, m in drawn.items() if not m["is_observed"] and n not in inducing}
    observed = [n for n, m in drawn.items() if m["is_observed"] and n not in stated]
    leaves: dict[str, list[Any]] = {}

    def numbers(*values):
        seen = survey(model, fixed | dict(zip(inducing, values, strict=True)), args, kwargs)
        again, here = statements(seen), current_trace()
        found: dict[Any, Any] = {}

        def arrays(tree):
            """Those that are there after a loop."""
            return [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") and trace_of(x) in (None, here)]

        for name in stated:
            parts = again[name].parts
            terms = [(t.scale, t.mixing, getattr(t.X, "inputs", t.X)) for part in parts for t in part.terms]
            found |= {(name, i): arrays(part.offset) for i, part in enumerate(parts)}
            found[name, -1] = arrays(terms)
            kernels = [f.source.cache for f in again[name].functions if isinstance(f.source, Function)]
            found[name, -2] = arrays([cache.projector.cholesky for cache in kernels])
        for name in observed:
            leaves[name] = arrays(seen[name]["fn"])
            found |= {(name, i): [x] for i, x in enumerate(leaves[name])}
        return found

    operations = Operations(numbers, *inducing.values())
    draws = [id(info_of(sites[name]).function) for name in inducing]

    def needed(key: tuple[str, int]) -> set[int]:
        return {draws[i] for i in operations.part(key)[0]}

    found = {}
    through: dict[int, set[int]] = {}  # of each draw, those that its rows, factors or kernel are made of
    for name, latents in stated.items():
        offsets = [needed((name, i)) for i, _ in enumerate(latents.parts)]
        found[name] = Numbers(offsets, needed((name, -1)).union(*offsets))
        own = [f.name for f in latents.functions if id(f.source) in found[name].all]
        if own and is_observation(sites[name]):
            raise ValueError(
                f"{name} observes {own[0]} beside values that npgp.sample has sampled of it, in an offset, a factor or "
                "rows, and q would be taken for independent of itself: sample all of its values, and observe what is "
                "made of them by numpyro.sample."
            )
        for f in latents.functions:
            through.setdefault(id(f.source), set()).update(needed((name, -1)), needed((name, -2)) - {id(f.source)})
    for name in observed:
        of_each = [needed((name, i)) for i, _ in enumerate(leaves[name])]
        sums = [met - set().union(*(through.get(draw, ()) for draw in met)) for met in of_each]
        found[name] = Numbers([met for met in sums if len(met) > 1], set().union(*of_each))
    return found


def meetings(
    sites: dict[str, Message], latent: Container[str], shared: Container[str], sampled: Mapping[str, Numbers]
) -> list[str]:
    """
    Where components that share no q(ε) meet in a sum, perhaps by sampled values, or are mixed by a matrix: which, in
    words, and the statement.

    :param sites: the model's trace.
    :param latent: its latent sites; components whose inducing values are known meet nothing.
    :param shared: sites of the first blocks of components that share one.
    :param sampled: of :func:`sampled_into`.
    """
    drawn = {name: info_of(msg).function for name, msg in sites.items() if is_inducing(msg)}
    fixed = {id(function) for name, function in drawn.items() if name not in latent}
    together = {id(function) for name, function in drawn.items() if name in shared}
    found = []
    functions = {id(function): function for function in drawn.values()}
    stated = statements(sites)
    for name, latents in stated.items():
        for i, part in enumerate(latents.parts):
            offset = sampled[name].offsets[i] - fixed if name in sampled else set()
            terms = [term for term in part.terms if id(term.function.source) not in fixed]
            apart = [term for term in terms if id(term.function.source) not in together]
            mixed = [term for term in apart if term.mixing is not None and term.function.batch_shape[-1] > 1]
            if mixed or (len(terms) > 1 and apart) or (terms and offset):
                names = [f"the functions of {t.function.name}" if t in mixed else t.function.name for t in terms]
                names += [f"sampled values of {functions[draw].name}" for draw in functions if draw in offset]
                found.append(f"{' and '.join(names)}, which meet in {name!r}")
    for name in [name for name in sampled if name not in stated]:
        for offset in sampled[name].offsets:
            names = [f"sampled values of {functions[draw].name}" for draw in functions if draw in offset - fixed]
            if len(names) > 1 and offset - fixed - together:
                found.append(f"{' and '.join(names)}, which meet in {name!r}")
    return found


def statements(sites: Mapping[str, Message]) -> dict[str, Latents]:
    """What statements about GP values are about, by their names."""
    return {name: info_of(msg).latents for name, msg in sites.items() if info_of(msg).latents is not None}


def that_meet(stated: Iterable[Latents], names: Mapping[int, T]) -> list[set[T]]:
    """
    Components in groups: those of one sum are in the same.

    :param stated: what statements are about.
    :param names: of the components, by the ``id`` of their draws; others are left out.
    """
    found: list[set[T]] = []
    for part in (part for latents in stated for part in latents.parts):
        met = {names[id(f.source)] for f in part.functions if id(f.source) in names}
        touched = [group for group in found if group & met]
        found = [group for group in found if not group & met] + ([met.union(*touched)] if met else [])
    return found


def dependent(model: Callable, functions: dict[str, Function], args: tuple, kwargs: dict[str, Any]) -> set[str]:
    """The components whose kernel, or inducing features, depend on inducing values: a survey does not know these."""

    def priors(*values):
        sites = survey(model, dict(zip(functions, values, strict=True)), args, kwargs)
        return {name: list(info_of(sites[name]).function.cache.projector.cholesky) for name in functions}

    operations = Operations(priors, *(f.values[0] for f in functions.values()))
    return {name for name in functions if operations.part(name)[0]}
