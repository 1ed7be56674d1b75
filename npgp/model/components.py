"""
Components that share one q(ε): those whose values are summed in one statement, such as ``observe("y", f(X) + g(X))``.

Which they are (:func:`joined`), and their q (:class:`JointPseudoData`), of which each component samples its part in its
turn: the first from its marginal, each later one given those before; functions of a plate last, each by itself given
those that all share. The mathematics is in npgp/variational/joint.py.

The q depends on the kernels of all members, while a model may make the second kernel after it has drawn the first
component. So the automatic guide runs the model once before, with the other sites at their values (:func:`survey`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpyro
from numpyro import handlers

from npgp import linalg
from npgp.context import under
from npgp.contract import Message
from npgp.model.draw import Cache, Function
from npgp.model.latents import Latents
from npgp.model.protocol import Draw
from npgp.model.pseudo_data import JOINED, declared, values_and_root
from npgp.model.rerun import Hidden, is_no_parameter
from npgp.model.sites import FUNCTION, LATENTS, SCALE, WHITENED, is_gp_site, is_observation
from npgp.programs.operations import Operations
from npgp.programs.tracing import current_trace, trace_of
from npgp.sparse.projection import Members, Projector
from npgp.sparse.ragged import MemberRows, Places
from npgp.variational.joint import Branches, JointBlock, joint_posterior, times_factor
from npgp.variational.pseudo import joint_root
from npgp.variational.reports import reported_jointly

T = TypeVar("T")
#: Components are joined as long as they have so many inducing features together.
MOST = 1000
#: The largest standard deviation of pseudo-data's noise at the start, as a multiple of the usual one.
WIDEST = 30.0


# ---------------------------------------------------------------------------------------------------------------
# Which components


def survey(model: Callable, values: Mapping[str, jax.Array], args: tuple, kwargs: dict[str, Any]) -> dict[str, Message]:
    """The trace of a model at values of its other sites, its GPs drawn from the prior; parameters as handlers say."""
    with (
        Hidden(hides=is_no_parameter),
        handlers.trace() as sites,
        under(unseen=True),
    ):
        handlers.seed(handlers.substitute(model, data=dict(values)), 0)(*args, **kwargs)
    return sites


class Joined(NamedTuple):
    """Which components share one q(ε), and which do not though they meet."""

    #: The groups, each as the sites of its members' first blocks, the largest first, but before all the one that is
    #: drawn in a plate.
    groups: list[tuple[str, ...]]
    #: Of components in no group, by the ``id`` of their draw, why: a key of :data:`ADVICE`.
    reasons: dict[int, str]


#: What would let components share one q(ε), by why they do not.
ONE_KERNEL = "let one component have the sum of their kernels, if they are at the same inputs"
ADVICE = {
    # Of a component by itself,
    "mixed": "draw the functions one by one, outside plates, and add a multiple of each, W[:, :1] * g1(X) + ...",
    "family": 'SparseGPs share one whose first block is whitened and "dense", outside loops and plates of plates',
    "dependent": "no kernel of components that share one may depend on a GP",
    # and beside the others.
    "order": "draw components outside plates before those in a plate",
    "plates": ONE_KERNEL,
    "size": f"they have more than {MOST} inducing features together: take fewer, or {ONE_KERNEL}",
    "latents": "components that are different latent values of one observation share none",
    "sampled": "state their sum itself, f(X) + g(X), without npgp.sample",
}
ALONE = ("mixed", "family", "dependent", "sampled")


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
    inducing = {
        n: m["value"] for n, m in sites.items() if is_gp_site(m) and FUNCTION in m["infer"] and WHITENED in m["infer"]
    }
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
    draws = [id(sites[name]["infer"][FUNCTION]) for name in inducing]

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


def joined(
    model: Callable,
    sites: dict[str, Message],
    args: tuple,
    kwargs: dict[str, Any],
    sampled: Mapping[str, Numbers],
) -> Joined:
    """
    The groups of components that share a q.

    Members are :class:`~npgp.SparseGP` components drawn outside control flow, whose first block is dense and whose
    parameters are whitened, and whose kernel and inducing features do not depend on a GP. Those that meet in one sum
    belong together. One of them may be drawn in a plate at dim −2, after all the others, if its values are not mixed.
    Of more than :data:`MOST` features together, the largest components are left out. A group two of whose members are
    different latent values of one observation is none: likelihoods take these to be independent. So do statements about
    a component take sampled values of others: of those no group has both.

    :param model: the model.
    :param sites: its trace.
    :param sampled: of :func:`sampled_into`.
    """
    by_name = statements(sites)
    stated = list(by_name.values())
    terms = [term for latents in stated for part in latents.parts for term in part.terms]
    mixed = {id(term.function.source) for term in terms if term.mixing is not None}
    functions = {
        name: msg["infer"][FUNCTION]
        for name, msg in sites.items()
        if is_gp_site(msg) and isinstance(msg["infer"].get(FUNCTION), Function) and _may_join(msg, mixed)
    }
    names = {id(function): name for name, function in functions.items()}
    others = {id(term.function.source) for term in terms} - set(names)
    reasons = {source: "mixed" if source in mixed else "family" for source in others}
    found = [group for group in that_meet(stated, names) if len(group) > 1]
    after_gp = dependent(model, functions, args, kwargs) if found else set()
    order, groups = list(sites), []

    def leave_out(which: Iterable[str], why: str) -> None:
        reasons.update({id(functions[name]): why for name in which})

    for group in found:
        leave_out(group & after_gp, "dependent")
        group -= after_gp
        about = [
            name
            for name in sampled
            if is_observation(sites[name]) and group & {names.get(id(f.source)) for f in by_name[name].functions}
        ]
        apart = {names[draw] for name in about for draw in sampled[name].all if draw in names}
        leave_out(group & apart, "sampled")
        group -= apart
        single = [name for name in group if not functions[name].batch_shape]
        last = max((order.index(name) for name in single), default=-1)
        plated = [name for name in order if name in group and functions[name].batch_shape]
        later = [name for name in plated if order.index(name) > last]
        if len(group) > 1:  # taken back below of those that find their place
            leave_out(group, "order" if single and plated and not later else "plates" if len(plated) > 1 else "size")
        size = 0
        members = []
        for name in sorted([*single, *later[:1]], key=lambda n: (_size(functions[n]), order.index(n))):
            size += _size(functions[name])
            if size <= MOST:
                members.append(name)
            else:
                leave_out([name], "size")
        if any(_apart(latents, names, set(members)) for latents in stated):
            leave_out(members, "latents")
        elif len(members) > 1:
            members.sort(key=lambda n: (n not in later, -_size(functions[n]), order.index(n)))
            groups.append(tuple(members))
            for name in members:
                del reasons[id(functions[name])]
    # Of those that share one, too: in an offset q takes them for independent all the same.
    reasons |= {draw: "sampled" for numbers in sampled.values() for draw in set().union(*numbers.offsets)}
    return Joined(groups, reasons)


class Meeting(NamedTuple):
    """Components that meet in one sum and share no q(ε)."""

    #: The components and the statement, in words.
    words: str
    draws: tuple[Draw, ...]


def meetings(
    sites: dict[str, Message], latent: Container[str], shared: Container[str], sampled: Mapping[str, Numbers]
) -> list[Meeting]:
    """
    Where components that share no q(ε) meet in a sum, perhaps by sampled values, or are mixed by a matrix.

    :param sites: the model's trace.
    :param latent: its latent sites; components whose inducing values are known meet nothing.
    :param shared: sites of the first blocks of components that share one.
    :param sampled: of :func:`sampled_into`.
    """
    drawn = {name: msg for name, msg in sites.items() if is_gp_site(msg) and FUNCTION in msg["infer"]}
    fixed = {id(msg["infer"][FUNCTION]) for name, msg in drawn.items() if name not in latent}
    together = {id(msg["infer"][FUNCTION]) for name, msg in drawn.items() if name in shared}
    found = []
    functions = {id(msg["infer"][FUNCTION]): msg["infer"][FUNCTION] for msg in drawn.values()}
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
                draws = (*(term.function.source for term in terms), *(functions[draw] for draw in offset))
                found.append(Meeting(f"{' and '.join(names)}, which meet in {name!r}", draws))
    for name in [name for name in sampled if name not in stated]:
        for offset in sampled[name].offsets:
            draws = tuple(functions[draw] for draw in functions if draw in offset - fixed)
            if len(draws) > 1 and offset - fixed - together:
                words = " and ".join(f"sampled values of {draw.name}" for draw in draws)
                found.append(Meeting(f"{words}, which meet in {name!r}", draws))
    return found


def advice(draws: Sequence[Draw], reasons: Mapping[int, str]) -> str:
    """What would let components that meet share one q(ε)."""
    found = dict.fromkeys(reasons[id(draw)] for draw in draws if id(draw) in reasons)
    return "; ".join(ADVICE[why] for why in ([why for why in found if why in ALONE] or found))


def _size(function: Function) -> int:
    """The number of features of a component's first block."""
    return jnp.shape(function.values[0])[-1]


def statements(sites: Mapping[str, Message]) -> dict[str, Latents]:
    """What statements about GP values are about, by their names."""
    return {name: msg["infer"][LATENTS] for name, msg in sites.items() if LATENTS in (msg.get("infer") or {})}


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


def _may_join(msg: Message, mixed: set[int]) -> bool:
    infer, function = msg["infer"], msg["infer"][FUNCTION]
    dense = infer.get(WHITENED) and infer.get(SCALE) == "scale_tril"
    in_place = len(function.batch_shape) < 2 and id(function) not in mixed
    return bool(dense) and not msg["is_observed"] and in_place and msg["value"] is function.values[0]


def _apart(latents: Latents, names: dict[int, str], members: set[str]) -> bool:
    """Whether an observation has two members as different latent values."""
    return sum(any(names.get(id(f.source)) in members for f in part.functions) for part in latents.parts) > 1


def dependent(model: Callable, functions: dict[str, Function], args: tuple, kwargs: dict[str, Any]) -> set[str]:
    """The components whose kernel, or inducing features, depend on inducing values: a survey does not know these."""

    def priors(*values):
        sites = survey(model, dict(zip(functions, values, strict=True)), args, kwargs)
        return {name: list(sites[name]["infer"][FUNCTION].cache.projector.cholesky) for name in functions}

    operations = Operations(priors, *(f.values[0] for f in functions.values()))
    return {name for name in functions if operations.part(name)[0]}


# ---------------------------------------------------------------------------------------------------------------
# Their q


class JointPseudoData:
    """
    The q(ε) of a group, whose parameters are declared; their names have no scope but the sites' own.

    :param group: the members' sites, in the order of :func:`joined`. The first one's pseudo-data are about sums of all
        components at its inducing points, the next one's about those of all but the first, and so on.
    :param sites: of the survey.
    :param t: what the values are affine in.
    """

    def __init__(self, group: Sequence[str], sites: dict[str, Message], t: jax.Array | None):
        functions: dict[str, Function] = {name: sites[name]["infer"][FUNCTION] for name in group}
        #: Each member's factorization.
        self.caches: dict[str, Cache] = {name: function.cache for name, function in functions.items()}
        self._start = Start(group, functions, sites)
        single = [name for name in group if not functions[name].batch_shape]
        drawn = [name for name in sites if name in single]
        L = {name: self.caches[name].projector.cholesky[0] for name in single}
        values, roots = {}, {}
        for k, name in enumerate(group):
            noise = None if k == 0 else (lambda name=name: self._start.noise(name))
            values[name], roots[name] = _own(name, functions[name], t, noise)
        # What the pseudo-data of each see of the others: the later ones of the group.
        W = {
            (name, other): self._shared(name, other, functions[other].batch_shape)
            for k, name in enumerate(group)
            for other in group[:k]
        }
        R = joint_root([roots[n] for n in single], [[W[n, o] for o in single[:k]] for k, n in enumerate(single)])
        ends = list(accumulate(_size(functions[name]) for name in single))
        rows = dict(zip(single, jnp.split(R, ends[:-1]), strict=True))
        branches = None
        if group[0] not in single:
            # Rows have a dimension of size 1 in the batch.
            root, inverse = jnp.swapaxes(roots[group[0]][:, 0], -1, -2), linalg.diagonal(roots[group[0]])[:, 0]
            of_others = {name: jnp.swapaxes(W[name, group[0]][:, 0], -1, -2) * inverse[..., None] for name in drawn}
            scaled = linalg.matmul(root, values[group[0]][:, 0, :, None])[..., 0]
            branches = Branches(
                times_factor(root, *_factor(self.caches[group[0]].projector)),
                jnp.concatenate([times_factor(V, L[name]) for name, V in of_others.items()], axis=-1),
                sum((linalg.matmul(V, values[name][:, None])[..., 0] for name, V in of_others.items()), scaled),
            )
        H = jnp.concatenate([times_factor(rows[name].T, L[name]) for name in drawn], axis=1)
        scaled = linalg.matmul(R.T, jnp.concatenate([values[name] for name in single])[:, None])[:, 0]
        mean, factor = joint_posterior(H, scaled, branches)
        if branches is None:
            mean, factor = reported_jointly(group[0], mean, factor, H, [L[name] for name in single])
        #: Of each member its mean, and its rows of T.
        self._parts: dict[str, tuple[jax.Array, jax.Array]] = {}
        end = 0
        for name in drawn:
            first, end = end, end + _size(functions[name])
            self._parts[name] = mean[first:end], factor[first:end, :end]
        if branches is not None:
            of_plate = branches.given(mean, factor)
            self._parts[group[0]] = of_plate[0][:, None], of_plate[1][:, None]
        self._noise: list[jax.Array] = []

    def _shared(self, name: str, other: str, plates: tuple[int, ...]) -> jax.Array:
        """
        W: what the pseudo-data of another component see of this one's inducing values, (M, M of the other); where those
        are functions of a plate, (plate, 1) + that.
        """
        return numpyro.param(f"{name}{JOINED}{other}", lambda _: self._start.weights(name, other, plates))

    def parts(self) -> dict[str, Part]:
        """For each member's site, its part."""
        return {name: Part(self, name) for name in self._parts}

    def q(self, name: str) -> JointBlock:
        """A member's block, given those drawn before."""
        mean, rows = self._parts[name]
        return JointBlock(mean, rows, jnp.concatenate([jnp.zeros(0, mean.dtype), *self._noise]))

    def drawn(self, name: str, value: jax.Array) -> None:
        """Say which value a member has."""
        if not self._parts[name][0].ndim > 1:  # after functions of a plate comes no other
            self._noise.append(self.q(name).noise(value))


def _factor(projector: Projector | Members) -> tuple[jax.Array, bool]:
    """The factor L of a component's first block, with an axis in front if functions have one each; or its diagonal."""
    L = projector.cholesky[0]
    return L, L.ndim - len(projector.batch_shape) == 1


def _own(
    name: str, function: Function, t: jax.Array | None, noise: Callable[[], jax.Array] | None
) -> tuple[jax.Array, jax.Array]:
    """The values, and the root R, of a component's own pseudo-data."""
    L, diagonal = _factor(function.cache.projector)
    plates = (*function.batch_shape, 1) if function.batch_shape else ()
    if L.ndim > (1 if diagonal else 2):
        L = L[:, None]
    scale = function.component.init_scale
    parameter = declared(_size(function), "dense", scale, L, t, diagonal, plates, noise)
    return values_and_root(name, "dense", t, parameter)


class Part:
    """
    One component's part of a q that it shares.

    :param group: that q.
    :param name: the site of the component's first block.
    """

    def __init__(self, group: JointPseudoData, name: str):
        self._group, self._name = group, name
        #: The component's factorization.
        self.cache = group.caches[name]

    def q(self) -> JointBlock:
        """The block, given those drawn before."""
        return self._group.q(self._name)

    def drawn(self, value: jax.Array) -> None:
        """Say which value it has."""
        self._group.drawn(self._name, value)


# ---------------------------------------------------------------------------------------------------------------
# Where training starts


class Weights(NamedTuple):
    """
    What rows see of a component.

    :param values: weights of its inducing values, (M, N); of functions in a plate that may be plate + (M, N), or, where
        each row sees one of them, (C, M, B): by parts.
    :param places: the rows of these parts.
    """

    values: jax.Array
    places: Places | None

    def products(self, others: jax.Array) -> jax.Array:
        """Sums over rows of products with an earlier drawn component's weights (M', N): (M', M), or plate + that."""
        if self.places is not None:
            others = jnp.moveaxis(self.places.parts.gather(others), 0, -2)
        return self._of_members(linalg.matmul(others, jnp.swapaxes(self.values, -1, -2)))

    def squares(self) -> jax.Array:
        """Sums over rows of squares: (M,), or plate + that."""
        return self._of_members(jnp.sum(jnp.square(self.values), -1))

    def _of_members(self, sums: jax.Array) -> jax.Array:
        return sums if self.places is None else jax.ops.segment_sum(sums, self.places.members, self.places.functions)


class Start:
    """
    What rows of data see of the components: the start of training; computed only when it is wanted.

    A row sees ``Σ_c a_c w_cᵀ u_c``, w the weights that interpolate between inducing values. The pseudo-data at an
    inducing point of the first component take the average of the rows around it, those that weigh its value.
    What is then left of a later component's weights is what its own pseudo-data see.

    :param group: the members' sites, the largest first.
    :param functions: their draws in the survey.
    :param sites: of the survey.
    """

    def __init__(self, group: Sequence[str], functions: dict[str, Function], sites: dict[str, Message]):
        self._group, self._functions = list(group), functions
        self._statements = list(statements(sites).values())
        self._seen: list[dict[str, Weights]] | None = None

    def _rows(self) -> list[dict[str, Weights]]:
        """For each sum in which members meet, the weights a w of each."""
        if self._seen is None:
            names = {id(function): name for name, function in self._functions.items()}
            self._seen = []
            for part in (part for latents in self._statements for part in latents.parts):
                terms = {names[id(t.function.source)]: t for t in part.terms if id(t.function.source) in names}
                if len(terms) > 1:
                    self._seen.append({name: self._weights(name, term) for name, term in terms.items()})
        return self._seen

    def _weights(self, name: str, term: Any) -> Weights:
        cache = self._functions[name].cache
        L, diagonal = _factor(cache.projector)
        A = term.function.project(term.X).A[0]
        rows = term.X.shape[-2]
        scale = jnp.broadcast_to(term.scale, (*term.scale.shape[:-1], rows)) if term.scale.ndim else term.scale
        scale = scale if scale.ndim < 2 else scale.reshape(-1, rows)[0]
        places = None
        if isinstance(term.X, MemberRows):
            places = term.X.places
            scale = jnp.where(places.parts.mask, places.parts.gather(jnp.broadcast_to(scale, rows)), 0.0)[:, None]
            L = L[places.members] if L.ndim > (1 if diagonal else 2) else L
        if diagonal:
            return Weights(A / L[..., None] * scale, places)
        # (K + δ I)⁻¹ k: smooth, whatever the kernel's rank.
        K = linalg.gram(L)
        F = linalg.cholesky(K, jitter=1e-3)[0]
        w = linalg.solve_lower(F, linalg.solve_lower(F, linalg.matmul(L, A)), transpose=True)
        return Weights(w * scale, places)

    def weights(self, name: str, other: str, plates: tuple[int, ...]) -> jax.Array:
        """The regression of what rows see of one component on what they see of an earlier one, perhaps of plates."""
        found = self._beside(name, other)
        if not plates:
            return found
        return jnp.broadcast_to(found if found.ndim == 2 else found[:, None], (*plates, 1, *found.shape[-2:]))

    def _beside(self, name: str, other: str) -> jax.Array:
        shape = tuple(_size(self._functions[n]) for n in (name, other))
        dtype = jnp.result_type(float)
        met = [rows for rows in self._rows() if name in rows and other in rows]
        across = [rows[other].products(rows[name].values) for rows in met]
        return sum(across, jnp.zeros(shape, dtype)) / self._seen_of(other)[..., None, :]

    def _seen_of(self, name: str) -> jax.Array:
        total = sum((rows[name].squares() for rows in self._rows() if name in rows), jnp.zeros(()))
        return jnp.maximum(total, 1e-3 * jnp.mean(total) + jnp.finfo(total.dtype).tiny)

    def noise(self, name: str) -> jax.Array:
        """Of a later component: how much wider its own pseudo-data's noise is for what others' already say; (M,)."""
        total = self._seen_of(name)
        earlier = self._group[: self._group.index(name)]
        said = [linalg.matmul(jnp.square(self._beside(name, o)), self._seen_of(o)[..., None])[..., 0] for o in earlier]
        # Of functions in a plate, all of which see the same rows of this one, the average.
        share = sum(jnp.mean(jnp.reshape(one, (-1, total.shape[-1])), axis=0) for one in said) / total
        return 1.0 / jnp.sqrt(jnp.clip(1.0 - share, WIDEST**-2, 1.0))
