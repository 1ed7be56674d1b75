"""
Components that share one q(ε): those whose values are summed in one statement, such as ``observe("y", f(X) + g(X))``.

Which they are (:func:`joined`), and their q (:class:`JointPseudoData`), of which each component samples its part in its
turn: the first from its marginal, each later one given those before. The mathematics is in npgp/variational/joint.py.

The q depends on the kernels of all members, while a model may make the second kernel after it has drawn the first
component. So the automatic guide runs the model once before, with the other sites at their values (:func:`survey`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from numpyro import handlers

from npgp import linalg
from npgp.contract import Message
from npgp.model.draw import Cache, Function
from npgp.model.latents import Latents
from npgp.model.pseudo_data import JOINED, declared, values_and_root
from npgp.model.rerun import Hidden
from npgp.model.sites import FUNCTION, LATENTS, SCALE, WHITENED, is_gp_site
from npgp.programs.operations import Operations
from npgp.variational.joint import JointBlock, joint_posterior

#: Components are joined as long as they have so many inducing features together.
MOST = 1000
#: The largest standard deviation of pseudo-data's noise at the start, as a multiple of the usual one.
WIDEST = 30.0


# ---------------------------------------------------------------------------------------------------------------
# Which components


def survey(model: Callable, values: Mapping[str, jax.Array], args: tuple, kwargs: dict[str, Any]) -> dict[str, Message]:
    """The trace of a model at values of its other sites, its GPs drawn from the prior; parameters as handlers say."""
    with Hidden(hides=lambda msg: msg["type"] not in ("param", "mutable")), handlers.trace() as sites:
        handlers.seed(handlers.substitute(model, data=dict(values)), 0)(*args, **kwargs)
    return sites


def joined(model: Callable, sites: dict[str, Message], args: tuple, kwargs: dict[str, Any]) -> list[tuple[str, ...]]:
    """
    The groups of components that share a q, each as the sites of its members' first blocks, the largest first.

    Members are :class:`~npgp.SparseGP` components drawn outside plates and control flow, whose first block is dense
    and whose parameters are whitened, and whose kernel and inducing features do not depend on a GP. Those that meet in
    one sum belong together. Of more than :data:`MOST` features together, the largest components are left out. A group
    two of whose members are different latent values of one observation is none: likelihoods take these to be
    independent.

    :param model: the model.
    :param sites: its trace.
    """
    functions = {
        name: msg["infer"][FUNCTION]
        for name, msg in sites.items()
        if is_gp_site(msg) and isinstance(msg["infer"].get(FUNCTION), Function) and _may_join(name, msg)
    }
    names = {id(function): name for name, function in functions.items()}
    statements = _statements(sites)
    found: list[set[str]] = []
    for latents in statements:
        for part in latents.parts:
            met = {names[id(f)] for f in part.functions if id(f) in names}
            touched = [group for group in found if group & met]
            found = [group for group in found if not group & met] + [met.union(*touched)]
    found = [group for group in found if len(group) > 1]
    if not found:
        return []
    dependent = _dependent(model, functions, args, kwargs)
    order, groups = list(sites), []
    for group in found:
        size = 0
        members = []
        for name in sorted(group - dependent, key=lambda n: (functions[n].values[0].size, order.index(n))):
            size += functions[name].values[0].size
            if size <= MOST:
                members.append(name)
        if len(members) > 1 and not any(_apart(latents, names, set(members)) for latents in statements):
            members.sort(key=lambda n: (-functions[n].values[0].size, order.index(n)))
            groups.append(tuple(members))
    return groups


def _statements(sites: dict[str, Message]) -> list[Latents]:
    """What statements about GP values are about."""
    return [msg["infer"][LATENTS] for msg in sites.values() if LATENTS in (msg.get("infer") or {})]


def _may_join(name: str, msg: Message) -> bool:
    infer, function = msg["infer"], msg["infer"][FUNCTION]
    dense = infer.get(WHITENED) and infer.get(SCALE) == "scale_tril"
    return bool(dense) and not msg["is_observed"] and jnp.ndim(msg["value"]) == 1 and msg["value"] is function.values[0]


def _apart(latents: Latents, names: dict[int, str], members: set[str]) -> bool:
    """Whether an observation has two members as different latent values."""
    return sum(any(names.get(id(f)) in members for f in part.functions) for part in latents.parts) > 1


def _dependent(model: Callable, functions: dict[str, Function], args: tuple, kwargs: dict[str, Any]) -> set[str]:
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

    :param group: the members' sites, the largest first. Its pseudo-data are about sums of all components at its
        inducing points, the next one's about those of all but the first, and so on.
    :param sites: of the survey.
    :param t: what the values are affine in.
    """

    def __init__(self, group: Sequence[str], sites: dict[str, Message], t: jax.Array | None):
        self._drawn = [name for name in sites if name in group]
        functions: dict[str, Function] = {name: sites[name]["infer"][FUNCTION] for name in group}
        #: Each member's factorization.
        self.caches: dict[str, Cache] = {name: function.cache for name, function in functions.items()}
        self._start = Start(group, functions, sites)
        factors = {name: cache.projector.cholesky[0] for name, cache in self.caches.items()}
        sizes = [function.values[0].size for function in functions.values()]
        values, roots, noises = {}, {}, {}
        for k, (name, L) in enumerate(factors.items()):
            noise = None if k == 0 else (lambda name=name: self._start.noise(name))
            parameter = declared(
                sizes[k], "dense", functions[name].component.init_scale, L, t, L.ndim == 1, noise=noise
            )
            values[name], own = values_and_root(name, "dense", t, parameter)
            noises[name] = linalg.diagonal(own)
            before = [self._shared(name, other) * noises[other] for other in group[:k]]
            after = jnp.zeros((sizes[k], sum(sizes[k + 1 :])), own.dtype)
            roots[name] = jnp.concatenate([*before, own, after], axis=1)
        ordered = ([of[name] for name in self._drawn] for of in (factors, values, roots))
        self._mean, self._factor = joint_posterior(*ordered)
        self._ends, end = {}, 0
        for name in self._drawn:
            end += functions[name].values[0].size
            self._ends[name] = end
        self._noise: list[jax.Array] = []

    def _shared(self, name: str, other: str) -> jax.Array:
        """W: what the pseudo-data of another component see of this one's inducing values, (M, M of the other)."""
        return numpyro.param(f"{name}{JOINED}{other}", lambda _: self._start.weights(name, other))

    def parts(self) -> dict[str, Part]:
        """For each member's site, its part."""
        return {name: Part(self, name) for name in self._drawn}

    def q(self, name: str) -> JointBlock:
        """A member's block, given those drawn before."""
        end = self._ends[name]
        mean = self._mean[:end][-self.caches[name].projector.cholesky[0].shape[0] :]
        before = jnp.concatenate([jnp.zeros(0, mean.dtype), *self._noise])
        return JointBlock(mean, self._factor[end - mean.shape[0] : end, :end], before)

    def drawn(self, name: str, value: jax.Array) -> None:
        """Say which value a member has."""
        self._noise.append(self.q(name).noise(value))


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
        self._statements = _statements(sites)
        self._seen: list[dict[str, jax.Array]] | None = None

    def _rows(self) -> list[dict[str, jax.Array]]:
        """For each sum in which members meet, the weights a w of each, (M, N)."""
        if self._seen is None:
            names = {id(function): name for name, function in self._functions.items()}
            self._seen = []
            for part in (part for latents in self._statements for part in latents.parts):
                terms = {names[id(t.function)]: t for t in part.terms if id(t.function) in names}
                if len(terms) > 1:
                    self._seen.append({name: self._weights(name, term) for name, term in terms.items()})
        return self._seen

    def _weights(self, name: str, term: Any) -> jax.Array:
        cache = self._functions[name].cache
        L = cache.projector.cholesky[0]
        A = cache.project(term.X).A[0]
        scale = jnp.broadcast_to(term.scale, (*term.scale.shape[:-1], A.shape[-1])) if term.scale.ndim else term.scale
        scale = scale if scale.ndim < 2 else scale.reshape(-1, A.shape[-1])[0]
        if L.ndim == 1:
            return A / L[:, None] * scale
        # (K + δ I)⁻¹ k: smooth, whatever the kernel's rank.
        K = linalg.gram(L)
        F = linalg.cholesky(K, jitter=1e-3)[0]
        return linalg.solve_lower(F, linalg.solve_lower(F, linalg.matmul(L, A)), transpose=True) * scale

    def weights(self, name: str, other: str) -> jax.Array:
        """The regression of what rows see of one component on what they see of an earlier one."""
        shape = tuple(self._functions[n].values[0].size for n in (name, other))
        dtype = jnp.result_type(float)
        met = [rows for rows in self._rows() if name in rows and other in rows]
        across = sum((linalg.matmul(rows[name], rows[other].T) for rows in met), jnp.zeros(shape, dtype))
        return across / self._seen_of(other)

    def _seen_of(self, name: str) -> jax.Array:
        total = sum((jnp.sum(jnp.square(rows[name]), 1) for rows in self._rows() if name in rows), jnp.zeros(()))
        return jnp.maximum(total, 1e-3 * jnp.mean(total) + jnp.finfo(total.dtype).tiny)

    def noise(self, name: str) -> jax.Array:
        """Of a later component: how much wider its own pseudo-data's noise is for what others' already say; (M,)."""
        total = self._seen_of(name)
        earlier = self._group[: self._group.index(name)]
        said = sum(linalg.matmul(jnp.square(self.weights(name, o)), self._seen_of(o)[:, None])[:, 0] for o in earlier)
        left = jnp.clip(1.0 - said / total, WIDEST**-2, 1.0)
        return 1.0 / jnp.sqrt(left)
