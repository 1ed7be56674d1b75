"""
q(ε) of components as the posterior given pseudo-observations ("sites") of the rows of a program's own statements.

Which components meet in one statement, such as ``observe("y", f(X) + g(X))``, from abstract runs of a model
(:func:`by_rows`), and their q (:class:`GivenRows`). What a row sees of them is what its statement says: sums, mixes and
plates, in any order of drawing. The mathematics is in npgp/variational/row_sites.py.

q depends on all statements, which come after the draws. So the automatic guide runs the model once before, with the
other sites at their values (:func:`survey`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import lax
from numpyro import handlers
from numpyro.distributions import constraints

from npgp.conditionals import Gain
from npgp.context import under
from npgp.contract import (
    Message,
    base_of,
    frames,
    given_by,
    is_enumerated,
    mask_of,
    plate_takes_all,
    random_key,
)
from npgp.likelihoods import Gaussian
from npgp.likelihoods.base import without_missing
from npgp.model.function import Cache, Function, compute_together
from npgp.model.latent import Latent, Latents, Term
from npgp.model.sites import Hidden, info_of, is_inducing, is_no_parameter, is_observation, is_scaled
from npgp.programs.operations import Operations
from npgp.programs.tracing import current_trace, trace_of
from npgp.sparse.ragged import Places
from npgp.variational.blocks import BlockNormal, JointBlock, block_normal
from npgp.variational.row_sites import Independent, Rows, expected_sites, posterior_given, working_sites

T = TypeVar("T")

#: A step of a q(ε) for several components is dear from so many operations on, and where it has so many times those that
#: it has with one for each.
DEAR, DEARER = 10**9, 20


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


#: Suffixes of the parameters of a statement's pseudo-observations: what they are in units of, values, and deviations.
UNIT, LOC, SCALE_OF_ROWS = "site_unit", "site_loc", "site_scale"


def blocks_of(sites: Mapping[str, Message]) -> dict[int, list[str]]:
    """Of each draw, by its ``id``, the sites of its blocks."""
    found: dict[int, list[str]] = {}
    for name, msg in sites.items():
        if is_inducing(msg) and isinstance(info_of(msg).function, Function):
            found.setdefault(id(info_of(msg).function), []).append(name)
    return found


def said_of_rows(sites: Mapping[str, Message]) -> dict[str, Latents]:
    """The statements that say something of rows: not those of what groups gain, which are of rows stated before."""

    def is_gain(msg: Message) -> bool:
        return is_observation(msg) and isinstance(info_of(msg).conditional, Gain)

    return {name: latents for name, latents in statements(sites).items() if not is_gain(sites[name])}


# ---------------------------------------------------------------------------------------------------------------
# Which components


class Group(NamedTuple):
    """
    Components that share one q(ε), each as the sites of its blocks.

    :param shared: those that rows of several members see.
    :param own: those of which each row sees one member: functions in a plate; or components that are alike, one for
        each member.
    """

    shared: tuple[tuple[str, ...], ...]
    own: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def components(self) -> list[tuple[str, ...]]:
        """All of them."""
        return [*self.shared, *(component for alike in self.own for component in alike)]

    @property
    def sites(self) -> list[str]:
        """The sites of all blocks."""
        return [site for component in self.components for site in component]


def by_rows(
    sites: Mapping[str, Message],
    dependent: set[str],
    numbers: Mapping[str, set[int]],
    observed: bool,
    excluded: Mapping[str, str],
) -> tuple[list[Group], dict[str, str]]:
    """
    The groups of components whose q is given by the rows of their statements, and why others' is not.

    Members are :class:`~npgp.SparseGP` components drawn outside control flow, whose kernel and inducing features, and
    the numbers of whose statements, do not depend on a GP. Components that meet in a sum are one group, which is none
    if two of them are different latent values of one observation: likelihoods take these to be independent. In
    minibatches there are at least as many rows as inducing features.

    :param sites: the model's trace.
    :param dependent: first sites of components whose kernel or inducing features depend on a GP.
    :param numbers: of each statement, the ``id`` of draws on whose sampled values its numbers depend.
    :param observed: whether to leave out components whose values are sampled. What is known of these values is in
        statements of NumPyro's, so that two numbers for each would have to be learned from nothing.
    :param excluded: statements whose rows cannot be stored, and why.
    :return: the groups; and by first site, why a component is in none.
    """
    blocks, stated = blocks_of(sites), said_of_rows(sites)
    if any(msg["type"] == "sample" and not msg["is_observed"] and is_enumerated(msg) for msg in sites.values()):
        return [], {names[0]: "the model has discrete sites" for names in blocks.values()}
    why: dict[int, str] = {}
    for draw, names in blocks.items():
        if not _may_be(sites, names):
            why[draw] = "it is drawn in a loop, or its inducing values are known"
        elif names[0] in dependent:
            why[draw] = "its kernel or its inducing features depend on a GP"
    for name, latents in stated.items():
        reason = excluded.get(name)
        if any(f.source.here is not latents.here for f in latents.functions if isinstance(f.source, Function)):
            reason = f"{name} is stated in a loop"
        elif numbers.get(name):
            reason = f"numbers in {name} depend on a GP"
        elif observed and not is_observation(sites[name]):
            reason = "its values are sampled, and the data alone do not say what they are"
        for f in latents.functions if reason else ():
            why.setdefault(id(f.source), str(reason))
    order = list(blocks)
    groups = []
    for met in that_meet(stated.values(), {draw: draw for draw in blocks.keys() - why.keys()}):
        group = _parted([blocks[draw] for draw in sorted(met, key=order.index)], sites, stated)
        both = [name for name, one in stated.items() if _makes_dependent(group, one, blocks)]
        if both:
            why |= dict.fromkeys(met, f"latent values of {both[0]}, which are independent in q, would not be")
        elif not _has_rows(group, sites, stated):
            why |= dict.fromkeys(met, "there are fewer rows at once than inducing features")
        else:
            groups.append(group)
    return groups, {blocks[draw][0]: reason for draw, reason in why.items() if draw in blocks}


def meet_in(group: Group, sites: Mapping[str, Message]) -> bool:
    """Whether a group is of several components, or of functions that are mixed."""
    functions = [info_of(sites[names[0]]).function for names in group.shared]
    return len(group.shared) + len(group.own) > 1 or any(math.prod(f.batch_shape) > 1 for f in functions)


def _makes_dependent(group: Group, latents: Latents, blocks: Mapping[int, list[str]]) -> bool:
    """Whether a group makes different latent values of one observation dependent."""
    if latents.num_latents == 1:
        return False
    members = {*group.components}
    met = [{tuple(blocks.get(id(f.source), ())) for f in part.functions} & members for part in latents.parts]
    return sum(map(bool, met)) > 1 or (len(met) == 1 and bool(met[0]) and bool(group.shared))


def _may_be(sites: Mapping[str, Message], names: Sequence[str]) -> bool:
    messages = [sites[name] for name in names]
    function = info_of(messages[0]).function
    # In a loop, the draw has values that are traced there.
    drawn = [not msg["is_observed"] and any(msg["value"] is value for value in function.values) for msg in messages]
    return all(drawn) and len(names) == len(function.values)


def in_parts(sites: Mapping[str, Message]) -> set[str]:
    """Latent sites and statements of a part of a plate's members, and statements that may be."""
    plates = {name for name, msg in sites.items() if msg["type"] == "plate" and not plate_takes_all(msg)}
    stated = said_of_rows(sites)
    latent = {n for n, m in sites.items() if m["type"] == "sample" and not (m["is_observed"] or is_observation(m))}
    about = {name: sites[name] for name in stated.keys() | latent}
    parts = {name for name, msg in about.items() if any(frame.name in plates for frame in frames(msg))}
    return parts | {name for name in stated if is_scaled(sites[name])}


def _about(
    group: Group, sites: Mapping[str, Message], stated: Mapping[str, Latents]
) -> tuple[dict[int, Function], dict[str, Latents]]:
    """A group's functions, by ``id``, and the statements about them."""
    functions = {id(f): f for f in (info_of(sites[name]).function for name in group.sites)}
    return functions, {
        n: latents for n, latents in stated.items() if functions.keys() & {id(f.source) for f in latents.functions}
    }


def _has_rows(group: Group, sites: Mapping[str, Message], stated: Mapping[str, Latents]) -> bool:
    """Whether rows are all that there are, or as many as inducing features, so that q can have any mean."""
    functions, about = _about(group, sites, stated)
    features = sum(jnp.size(value) for function in functions.values() for value in function.values)
    return features <= sum(math.prod(x.shape) for x in about.values()) or not in_parts(sites) & about.keys()


def dear(group: Group, sites: Mapping[str, Message]) -> str | None:
    """
    A sentence, if a step takes many times as long as with a q(ε) for each component, in operations with matrices.

    :param group: of the model's trace.
    :param sites: this.
    """
    functions, about = _about(group, sites, said_of_rows(sites))
    own = {id(info_of(sites[names[0]]).function): len(alike) for alike in group.own for names in alike}
    rows = sum(math.prod(x.shape) for x in about.values())

    def operations(size: int, count: int = 1, at: int = rows) -> int:
        return at * size**2 + count * size**3 // 3

    def features(function: Function) -> int:
        return sum(jnp.shape(value)[-1] for value in function.values)

    counts = {draw: math.prod(function.batch_shape) for draw, function in functions.items()}
    alone = sum(
        operations(features(f), counts[draw], rows * (1 if draw in own else counts[draw]))
        for draw, f in functions.items()
    )
    K = sum(counts[draw] * features(f) for draw, f in functions.items() if draw not in own)
    M = sum(features(f) // own[draw] for draw, f in functions.items() if draw in own)
    members = max((counts[draw] * own[draw] for draw in own), default=0)
    together = operations(K) + operations(M, members) + M * K * (rows + members * (M + K))
    if together < max(DEAR, DEARER * alone):
        return None
    names = ", ".join(function.name for function in functions.values())
    return (
        f"a step takes about {together / alone:.0f} times as long as with a q(ε) for each of {names}: their one q(ε) "
        f"has {K + members * M} inducing values together. Fewer inducing points, or AutoSparseGP(model, joint=False), "
        "take less."
    )


def _parted(components: Sequence[list[str]], sites: Mapping[str, Message], stated: Mapping[str, Latents]) -> Group:
    """A group, with those of its components apart that are of one plate: the plate with the most features."""
    draws = {id(info_of(sites[names[0]]).function): tuple(names) for names in components}
    functions = {draw: info_of(sites[names[0]]).function for draw, names in draws.items()}
    sums = [[t for t in part.terms if id(t.function.source) in draws] for s in stated.values() for part in s.parts]
    mixed = {id(term.function.source) for terms in sums for term in terms if term.mixing is not None}
    sizes: dict[tuple[int, ...], int] = {}
    for draw, function in functions.items():
        if math.prod(function.batch_shape) > 1 and draw not in mixed:
            features = sum(jnp.size(value) for value in function.values)
            sizes[function.batch_shape] = sizes.get(function.batch_shape, 0) + features
    largest = max(sizes, key=lambda batch: sizes[batch], default=())
    own: list[int] = []
    for draw, function in functions.items():
        if sizes and function.batch_shape == largest and draw not in mixed:
            together = {*own, draw}
            # In long format the rows of two components may be of different members.
            chosen = [[t for t in terms if id(t.function.source) in together] for terms in sums]
            places = [{id(t.places) for t in terms if t.places is not None} for terms in chosen]
            if all(len(of_sum) < 2 for of_sum in places):
                own.append(draw)
    of_members = [[draw] for draw in own] or _members_alike(functions, sums)
    apart = {draw for alike in of_members for draw in alike}
    shared = (names for draw, names in draws.items() if draw not in apart)
    return Group(tuple(shared), tuple(tuple(draws[draw] for draw in alike) for alike in of_members))


def _members_alike(functions: Mapping[int, Function], sums: Sequence[Sequence[Term]]) -> list[list[int]]:
    """The most components of one dense block, of a size, that do not meet each other: none, or a list of them."""
    met: dict[int, set[int]] = {draw: set() for draw in functions}
    for of_sum in ({id(term.function.source) for term in terms} for terms in sums):
        for draw in of_sum:
            met[draw] |= of_sum - {draw}
    alike: dict[tuple[int, ...], list[int]] = {}
    for draw in sorted(functions, key=lambda draw: len(met[draw])):
        function = functions[draw]
        one_block = len(function.values) == 1 and function.component.covariances == ("dense",)
        chosen = alike.setdefault(jnp.shape(function.values[0]), [])
        if one_block and not function.batch_shape and not met[draw].intersection(chosen):
            chosen.append(draw)
    most = max(alike.values(), key=len)
    return [most] if len(most) > 1 else []


# ---------------------------------------------------------------------------------------------------------------
# Their q


class Part(NamedTuple):
    """
    One block's part of a q that it shares.

    :param cache: the component's factorization.
    :param block: its q given the blocks drawn before.
    :param value: what was drawn.
    """

    cache: Cache
    block: BlockNormal
    value: jax.Array


class GivenRows:
    """
    The q(ε) of a group of components, whose parameters are declared: of each statement that is not of Gaussian noise
    about these components alone, a pseudo-observation of each row.

    :param group: the components.
    :param sites: of the survey.
    """

    def __init__(self, group: Group, sites: Mapping[str, Message]):
        self._sites = sites
        self._shared = {id(self._function(names)): names for names in group.shared}
        own = [{id(self._function(names)): names for names in alike} for alike in group.own]
        self._own = {draw: names for alike in own for draw, names in alike.items()}
        #: Where a member's functions are components, the member's number.
        self._member = {draw: i for alike in own if len(alike) > 1 for i, draw in enumerate(alike)}
        #: Of a member's functions, one after the other, the components.
        self._alike = [list(alike) for alike in own]
        counts = [len(alike) * math.prod(self._function(alike[0]).batch_shape) for alike in group.own]
        self._members = max(counts, default=0)
        # A sum that is sampled jointly has several sites.
        stated = {id(latents): name for name, latents in said_of_rows(sites).items()}
        functions = [self._function(names) for names in group.components]
        terms = [t for name in stated.values() for part in info_of(sites[name]).latents.parts for t in part.terms]
        compute_together((f.cache, [t.X for t in terms if t.function is f]) for f in functions)
        rows = [some for name in stated.values() for some in self._rows(name)]
        #: Of the shared ε, and of a member's, the blocks that are independent of all others.
        own_blocks = [alike[0] for alike in group.own]
        self._independent = [self._blocks_alone(components) for components in (group.shared, own_blocks)]
        self._q = posterior_given(rows, self._members, *(list(blocks.values()) for blocks in self._independent))

    def _blocks_alone(self, components: Sequence[Sequence[str]]) -> dict[str, Independent]:
        found: dict[str, Independent] = {}
        end = 0
        for names in components:
            function = self._function(names)
            count = 1 if id(function) in self._own else math.prod(function.batch_shape)
            for i, (site, value) in enumerate(zip(names, function.values, strict=True)):
                start, end, kind = end, end + count * jnp.shape(value)[-1], info_of(self._sites[site]).kind
                if i or kind != "dense":
                    found[site] = Independent(start, end, kind, count)
        return found

    def _function(self, names: Sequence[str]) -> Function:
        return info_of(self._sites[names[0]]).function

    def _rows(self, name: str) -> list[Rows]:
        """What a statement's rows see of the components, and their pseudo-observations."""
        latents = info_of(self._sites[name]).latents
        draws = {*self._shared, *self._own}
        known = [[t for t in part.terms if id(t.function.source) in draws] for part in latents.parts]
        if not any(known):
            return []
        exact = all(len(terms) == len(part.terms) for terms, part in zip(known, latents.parts, strict=True))
        values, precision = pseudo_observations(name, self._sites[name], exact)
        several = len(latents.parts) > 1
        return [
            self._seen(part, terms, values[i] if several else values, precision[i] if several else precision)
            for i, (part, terms) in enumerate(zip(latents.parts, known, strict=True))
            if terms
        ]

    def _seen(self, part: Latent, terms: Sequence[Term], values: jax.Array, precision: jax.Array) -> Rows:
        """What the rows of one latent value see, and what the pseudo-observations say of it."""
        shape = part.shape
        shift = precision * (values - part.offset)
        precision, shift = (jnp.broadcast_to(x, shape).reshape(-1, shape[-1]) for x in (precision, shift))
        seen: dict[int, list[jax.Array]] = {}
        members, places = None, None
        for term in terms:
            draw = id(term.function.source)
            if draw in self._shared:
                found = seen_by_rows(term, shape)
            else:
                found, members, places = seen_of_members(term, shape)
                if draw in self._member:
                    members = jnp.full(math.prod(shape[:-1]), self._member[draw])
            seen.setdefault(draw, []).append(found)

        def stacked(draws: Sequence[Sequence[int]], all_members: bool) -> jax.Array:
            """Of several functions, each of one of some components, (S, K, N); 0 of those that the rows do not see."""
            sets = max((len(x) for alike in draws for draw in alike for x in seen.get(draw, ())), default=1)
            found, unseen = [], 0  # features that the rows do not see, one after the other
            for alike in draws:
                size = self._size(alike[0], all_members)
                several = [jnp.broadcast_to(x, (sets, size, shape[-1])) for draw in alike for x in seen.get(draw, ())]
                if several:
                    found.append(jnp.zeros((sets, unseen, shape[-1]), precision.dtype))
                    found.append(sum(several[1:], several[0]))
                unseen = 0 if several else unseen + size
            found.append(jnp.zeros((sets, unseen, shape[-1]), precision.dtype))
            return jnp.concatenate(found, axis=1)

        shared = stacked([[draw] for draw in self._shared], True)
        if not any(draw in seen for draw in self._own):
            return Rows(shared, None, None, precision, shift)
        own = stacked(self._alike, False)
        if places is None:
            return Rows(shared, own, members, precision, shift)
        of_parts = places.parts

        def by_part(x: jax.Array) -> jax.Array:
            """(C, ..., B), from (1, ..., N)."""
            return jnp.moveaxis(of_parts.gather(x[0]), -2, 0)

        shared, own, precision, shift = map(by_part, (shared, own, precision, shift))
        precision, shift = (jnp.where(of_parts.mask, x, 0.0) for x in (precision, shift))
        return Rows(shared, own, places.members, precision, shift)

    def _size(self, draw: int, all_members: bool) -> int:
        """Number of features of a component, of one function or of all."""
        function = self._function((self._shared | self._own)[draw])
        features = sum(jnp.shape(value)[-1] for value in function.values)
        return features * math.prod(function.batch_shape) if all_members else features

    def draw(self) -> dict[str, Part]:
        """Draw ε, unless ``substitute`` gives it: of each site its part."""
        q, parts = self._q, dict[str, Part]()
        alone = self._independent[0] | self._independent[1]
        scales = dict(zip(alone, q.scales, strict=True))

        def drawn(site: str, function: Function, block: JointBlock) -> jax.Array:
            """The noise that a block's value is made of, which is drawn unless it is given."""
            given = given_by(handlers.substitute, site)
            value, noise = block.drawn(random_key(site)) if given is None else (given, block.noise(given))
            parts[site] = Part(function.cache, block, jnp.asarray(value))
            return noise

        def draw_in_turn(components: Mapping[int, Sequence[str]], means: Any, factors: Any, z: jax.Array) -> jax.Array:
            """Of G members, or of all as one member: means (G, M), rows of factors, and z of what is drawn before."""
            before, start = z.shape[-1], 0
            for draw, names in components.items():
                function = self._function(names)
                batch = (*function.batch_shape, 1) if function.batch_shape else ()
                for site, value in zip(names, function.values, strict=True):
                    shape = (*batch, jnp.shape(value)[-1])
                    size = math.prod(shape) // len(z)
                    loc = means[:, start : start + size].reshape(shape)
                    start += size
                    if site in alone:
                        scale, kind = scales[site], alone[site].kind
                        scale = None if scale is None else scale.reshape(*shape, *shape[-1:] * (kind == "dense"))
                        parts[site] = _drawn(site, function.cache, block_normal(kind, loc, scale))
                        continue
                    first, end = z.shape[-1] - before, z.shape[-1] + size
                    rows = factors[:, first : first + size, :end].reshape(*shape, end)
                    of_each = draw in self._own
                    earlier = z.reshape(*batch, -1) if of_each else z[0]
                    block = JointBlock(loc, rows, earlier, coupled=bool(batch) and not of_each)
                    z = jnp.concatenate([z, drawn(site, function, block).reshape(len(z), size)], axis=-1)
            return z

        z = draw_in_turn(self._shared, q.mean[None], q.factor[None], jnp.zeros((1, 0), q.mean.dtype))
        if self._member:  # the only functions of a member, each a component of its own
            each = (lax.split(cast(jax.Array, x), (1,) * self._members) for x in (q.of_members, q.factors))
            for (site,), loc, rows in zip(self._own.values(), *each, strict=True):
                drawn(site, self._function([site]), JointBlock(loc[0], rows[0], z[0]))
        elif self._own:
            draw_in_turn(self._own, q.of_members, q.factors, jnp.broadcast_to(z, (self._members, z.shape[-1])))
        return parts


def _drawn(site: str, cache: Cache, block: BlockNormal) -> Part:
    """A block with its value."""
    given = given_by(handlers.substitute, site)
    return Part(cache, block, block.sample(random_key(site)) if given is None else jnp.asarray(given))


def _scale(term: Term, shape: tuple[int, ...]) -> jax.Array:
    """A term's factor, (S, 1 or N); or (1, 1 or N) if it is the same for all sets of rows."""
    scale = term.scale
    if scale.ndim < 2:
        return scale.reshape(1, -1)
    return jnp.broadcast_to(scale, (*shape[:-1], scale.shape[-1])).reshape(-1, scale.shape[-1])


def _projections(term: Term) -> list[jax.Array]:
    """A_i of each block; batch + (M_i, N), or row by row (M_i, N) of chosen functions."""
    function = cast(Function, term.function)
    return list(function.points(term.X).A if term.places is not None else function.project(term.X).A)


def _members_of(function: Function, shape: tuple[int, ...]) -> np.ndarray:
    """The member that each set of rows sees of functions in plates, (S,)."""
    batch = function.batch_shape
    return np.broadcast_to(np.arange(math.prod(batch)).reshape(batch), shape[:-1]).ravel()


def seen_by_rows(term: Term, shape: tuple[int, ...]) -> jax.Array:
    """
    What rows see of a component's whitened values, block by block and in each block function by function.

    :param term: the component's values in a statement.
    :param shape: of that statement's values, (..., N), S sets of rows in all.
    :return: (S, K, N), or (1, K, N).
    """
    function, scale = cast(Function, term.function.source), _scale(term, shape)[:, None, None]
    count = math.prod(function.batch_shape)
    found = []
    for A in _projections(term):
        if term.places is not None:
            which = jax.nn.one_hot(term.places.group, count, axis=0, dtype=A.dtype)[None, :, None]
        elif term.mixing is not None:
            which = term.mixing[:, :, None, None]
        elif function.batch_shape:
            which = jax.nn.one_hot(_members_of(function, shape), count, dtype=A.dtype)[:, :, None, None]
        else:
            which = jnp.ones((1, 1, 1, 1), A.dtype)
        seen = scale * which * A.reshape(1, -1, *A.shape[-2:])  # sets, functions, features, rows
        found.append(seen.reshape(seen.shape[0], -1, seen.shape[-1]))
    return jnp.concatenate(found, axis=1)


def seen_of_members(term: Term, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array | None, Places | None]:
    """
    What rows see of their member's whitened values, (S, M, N) or (1, M, N); and which member, of each set or row.

    :param term: the functions' values in a statement.
    :param shape: of that statement's values.
    """
    function, scale = cast(Function, term.function.source), _scale(term, shape)[:, None]
    projections = _projections(term)
    if term.places is not None:
        return scale * jnp.concatenate(projections, axis=-2)[None], None, term.places
    members = _members_of(function, shape)
    count = math.prod(function.batch_shape)
    A = jnp.concatenate(projections, axis=-2)
    A = A.reshape(-1, *A.shape[-2:])
    same = np.array_equal(members, np.arange(count))
    return scale * (A if same or len(A) == 1 else A[members]), None if same else jnp.asarray(members), None


# ---------------------------------------------------------------------------------------------------------------
# Pseudo-observations


def pseudo_observations(name: str, msg: Message, exact: bool) -> tuple[jax.Array, jax.Array]:
    """
    The pseudo-observations of a statement's rows: values and precisions, (..., N), or (C, ..., N) of several latent
    values.

    :param name: the statement.
    :param msg: its message.
    :param exact: whether the data themselves are these where the likelihood is Gaussian.
    """
    latents = info_of(msg).latents
    shape = latents.shape if latents.num_latents == 1 else (latents.num_latents, *latents.shape)
    if not is_observation(msg):
        return _trained(name, shape, lambda: _nothing_yet(latents, shape))
    likelihood, present, y = info_of(msg).likelihood, present_rows(msg), msg["value"]
    # What one row of a part stands for.
    share = 1.0 if msg["scale"] is None else msg["scale"]
    if exact and isinstance(likelihood, Gaussian):
        (y,) = without_missing(likelihood, present, jnp.asarray(y))
        variance = jnp.broadcast_to(jnp.asarray(likelihood.variance, y.dtype), shape)
        values, precision = y, 1.0 / variance
        if is_scaled(msg):
            values, precision = _trained(name, shape, lambda: (y, share / variance), jnp.sqrt(variance))
    else:

        def start():
            mean, variance = expected(latents, shape)
            filled, mean, variance = without_missing(likelihood, present, jnp.asarray(y), mean, variance)
            variance = jnp.where(variance > 0.0, variance, 1.0)  # it is 0 where there is no observation
            if likelihood.num_latents == 1:
                sites = working_sites(likelihood, filled, mean, variance, 0.0)
            else:
                sites = expected_sites(likelihood, filled, mean, variance)
            return sites.shift / sites.precision, share * sites.precision

        values, precision = _trained(name, shape, start)
    return values, precision if present is None else jnp.where(present, precision, 0.0)


def present_rows(msg: Message) -> jax.Array | None:
    """Where the observations of a statement about GP values are present; ``None`` if all are."""
    present = info_of(msg).mask
    for mask in (mask_of(msg["fn"]), *getattr(base_of(msg["fn"]), "masks", ())):
        if mask is not True:
            present = mask if present is None else present & mask
    return present


def expected(latents: Latents, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """What the prior given the other sites expects of the predictors: mean, which is the offset, and variance."""
    mean = [jnp.broadcast_to(part.offset, part.shape) for part in latents.parts]
    variance = [sum(t.variance(t.function.given(t.X, joint=False).prior) for t in part.terms) for part in latents.parts]
    several = len(latents.parts) > 1
    found = [jnp.stack(jnp.broadcast_arrays(*x)) if several else x[0] for x in (mean, variance)]
    return jnp.broadcast_to(found[0], shape), jnp.broadcast_to(found[1], shape)


def _nothing_yet(latents: Latents, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Of values that other statements are about: that they are near what is expected."""
    mean, variance = expected(latents, shape)
    component = next((c for c in (getattr(f.source, "component", None) for f in latents.functions) if c), None)
    share = 0.05 if component is None else component.init_scale
    return mean, 1.0 / (share**2 * variance)


def _trained(
    name: str, shape: tuple[int, ...], start: Callable, noise: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """
    Pseudo-observations whose parameters are declared; ``start`` is computed only when it is wanted.

    :param noise: what their deviations are in units of, where that follows other sites.
    """
    made: list[tuple[jax.Array, jax.Array]] = []

    def begin() -> tuple[jax.Array, jax.Array, jax.Array]:
        if not made:
            made.append(start())
        values, precision = made[0]
        deviation = 1.0 / jnp.sqrt(precision)
        unit = jnp.exp(jnp.mean(jnp.log(deviation)))
        scale = deviation / (unit if noise is None else noise)
        return unit, jnp.broadcast_to(values / unit, shape), jnp.broadcast_to(scale, shape)

    unit = lax.stop_gradient(numpyro.param(f"{name}.{UNIT}", lambda _: begin()[0], constraint=constraints.positive))
    loc = numpyro.param(f"{name}.{LOC}", lambda _: begin()[1])
    scale = numpyro.param(f"{name}.{SCALE_OF_ROWS}", lambda _: begin()[2], constraint=constraints.positive)
    if jnp.shape(loc) != shape:
        raise ValueError(
            f"{name}.{LOC} has shape {jnp.shape(loc)}, but {name} has values of shape {shape}: q(ε) is the posterior "
            "given the rows trained on, so that the guide takes these alone. For other rows draw from it first, "
            "Predictive(model, guide.sample_posterior(key, params, X, y, sample_shape=(1000,)))."
        )
    return unit * loc, 1.0 / jnp.square((unit if noise is None else noise) * scale)
