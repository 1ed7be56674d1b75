"""``SparseGP``: a GP with inducing features as a component of a NumPyro model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import lax
from jax.typing import ArrayLike

from npgp import checks, linalg
from npgp.context import context
from npgp.features import InducingBlock
from npgp.functionals.rows import RowsLike
from npgp.inducing.selection import Unchosen, blocks_or_number, choose
from npgp.kernels import Kernel, as_kernel
from npgp.kernels.base import warn_of_white_noise
from npgp.model.function import Cache, Function, without_row_dim
from npgp.model.sites import (
    CHOSEN,
    INFO,
    NOTHING,
    Catch,
    Followed,
    SiteInfo,
    approximation,
    check_draw_context,
    fixed_beside,
    followed,
    in_automatic_guide,
    info_of,
    plate_shape,
    shared_part,
    trained,
)
from npgp.sparse.projection import Members, Projector, factorize_members
from npgp.variational.blocks import SCALE_NAMES, BlockNormal, DiagonalNormal, WhitenedPrior, check_covariances
from npgp.variational.parameterizations import (
    LOC,
    POINTS,
    PSEUDO_DATA,
    Block,
    checked_values,
    has_pseudo_data,
    site_names,
    trained_values,
)
from npgp.variational.posterior import Posterior


@dataclass(frozen=True)
class SparseGP:
    """
    A Gaussian process with inducing features, as a component of a NumPyro model:

    .. code-block:: python

        def model(X, y=None):
            kernel = npgp.RBF(
                lengthscale=numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
            )
            f = npgp.SparseGP("f", kernel, inducing=Z).draw()
            with numpyro.plate("data", X.shape[0]):
                npgp.observe("y", f(X), npgp.Gaussian(variance=0.1), obs=y)

    Draw f outside the plate over rows; inside plates at dim −2 and below there is one function for each member. They
    share kernel and inducing features, but for hyperparameters that begin with the plates' axes, as they have if they
    are sampled in the same plates: a variance (Q, 1), a lengthscale (Q, 1) or, for D input columns, (Q, 1, D); and for
    inducing inputs (Q, M, D)::

        with numpyro.plate("functions", Q, dim=-2):
            lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
            g = npgp.SparseGP("g", npgp.RBF(lengthscale), inducing=Z).draw()

    :param name: prefix of the sites and parameters; unique in the model.
    :param kernel: the kernel, npgp's or tinygp's; its hyperparameters are numbers, ``numpyro.param`` or
        ``numpyro.sample`` values.
    :param inducing: Z of shape (M, D), a block of features, or a list of these: the blocks of the orthogonal
        decomposition, in order. Numbers, a ``numpyro.param`` or a sampled value. Each function's own: (Q, M, D). Or
        the number M of points, which are chosen from the rows that a training first evaluates f at: the centers of
        k-means clusters, columns in units of their standard deviations. They are the parameter ``name.u.inducing``,
        which training leaves as it is, and which predictions and MCMC need.
    :param covariances: S_i of q(ε) for each block: ``"dense"``, ``"diagonal"`` or ``"mean-only"`` (the block moves the
        mean only; such blocks come last). One word for all blocks is allowed; dense if omitted. ``["dense",
        "mean-only"]`` is ODVGP, ``["dense", "dense"]`` SOLVE-GP.
    :param init_scale: initial standard deviation of q(ε), as a share of the prior's: small, so that the start is near
        f = 0, where exponential links and log-scales do not explode.
    :param jitter: relative jitter tried first (:func:`npgp.linalg.cholesky`).
    :param whitened: whether the parameters are those of q(ε). If not, they are those of the inducing values less what
        the blocks before explain of them, ``m_u = L m`` and ``S_u = L S Lᵀ``, which do not move with the kernel's
        hyperparameters. Dense and mean-only blocks have the same family either way; a diagonal S_u is another one.
    :raises TypeError: for inducing inputs that are not floating.
    :raises ValueError: for inducing inputs of another shape, without rows or with NaN; in :meth:`draw`, for
        hyperparameters or inducing inputs of another number of functions than the plates have; and, where their number
        is given and f is evaluated, for fewer different rows, columns of labels, and values of ε from elsewhere, as
        under NUTS, without the parameter that has the points.
    """

    name: str
    kernel: Kernel
    inducing: Any
    covariances: Sequence[str] | str | None = None
    init_scale: float = 0.1
    jitter: float | None = None
    whitened: bool = True

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name is {self.name!r}; it must be a non-empty string.")
        object.__setattr__(self, "kernel", as_kernel(self.kernel))
        blocks = blocks_or_number(self.inducing)
        object.__setattr__(self, "inducing", blocks)
        kinds = check_covariances(self.covariances, len(blocks))
        object.__setattr__(self, "covariances", kinds)
        checks.require_positive(self.init_scale, "init_scale")
        warn_of_white_noise(self.kernel, f"SparseGP {self.name!r}")

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the whitened sites: ``name.u``, ``name.v`` for a second block, ``name.u1`` … for more."""
        return site_names(self.name, len(self.inducing))

    def _layout(self) -> list[tuple[str, InducingBlock, str]]:
        """Site, inducing block and covariance structure of each block."""
        kinds: Any = self.covariances
        return list(zip(self.sites, self.inducing, kinds, strict=True))

    def __call__(self, X: ArrayLike):
        raise TypeError(f"{self.name} is a component, and no function yet: f = gp.draw() first, then f(X).")

    def draw(self) -> Function:
        """
        Draw f once: the whitened sites ε_i ~ N(0, I), and the function they and the residual make.

        :raises ValueError: inside the plate over rows, a subsampled plate, ``handlers.scale`` or ``handlers.mask``.
        """
        return self._draw(in_automatic_guide(), shared=True, follows=followed())

    def guide(self, t: ArrayLike | None = None, pseudo_data: bool = False) -> Function:
        """
        In a hand-written guide: sample the whitened sites from q(ε), whose parameters ``name.u.loc`` and
        ``name.u.scale_tril`` (``scale`` if diagonal) it declares. Call it where the model calls :meth:`draw`, in the
        same plates; and where the model calls :func:`~npgp.sample`, do so on what this returns. The kernel
        is not looked at unless f is evaluated.

        :param t: values of other latent sites, (T,), that q(ε) is to follow: its mean is then ``m + C t``, with
            parameters C, ``name.u.coupling`` of shape (M, T), that start at 0. Sample these sites before, and make t
            unconstrained, centered and scaled, such as ``jnp.stack([(level - loc) / scale, ...])``. Sites whose prior
            depends on f are not for t.
        :param pseudo_data: whether q(ε) is the posterior given pseudo-data under this component's kernel, whose values
            are affine in t, as :class:`npgp.AutoSparseGP` has it by default. The kernel must be that of the model, with
            the hyperparameters that the guide has drawn; and t is centered, but not scaled.
        :raises TypeError: if ``t`` is not real.
        :raises ValueError: if ``t`` is no vector.
        """
        return self._draw(
            guided=True, shared=False, follows=Followed(None if t is None else checked_values(t), pseudo_data)
        )

    def posterior(self, params: dict[str, jax.Array], prefix: str = "", t: ArrayLike | None = None) -> Posterior:
        """
        The posterior of f at trained parameters, with this object's kernel and inducing features.

        :param params: trained parameters, from ``svi.get_params(state)``.
        :param prefix: put before the parameters' names, for a component inside ``handlers.scope``.
        :param t: the values of other sites that q(ε) follows, if it follows any (:class:`npgp.AutoSparseGP`); 0 if
            omitted, which with Gaussian guides is where these sites have their medians.
        :raises KeyError: if the parameters of q(ε) are not among them.
        """
        trained(params)
        t = None if t is None else checked_values(t)
        if self._chosen and (points := params.get(f"{prefix}{self._chosen}")) is not None:
            return self._with_points(points).posterior(params, prefix, t)
        plates = self._plates(params, prefix)
        projector = factorize_members(self.kernel, self.inducing, plates, self.jitter)
        q = []
        for block in self._blocks(plates, lambda: projector):
            site = f"{prefix}{block.site}"
            read = trained_values(params, site, self.name)
            q.append(without_row_dim(block.q(read, t, has_pseudo_data(params, site))))
        return Posterior(projector, tuple(q))

    def _plates(self, params: dict[str, jax.Array], prefix: str) -> tuple[int, ...]:
        """Shape of the plates that f is drawn in, from its parameters."""
        first = f"{prefix}{self.sites[0]}"
        values = params.get(f"{first}.{PSEUDO_DATA[0]}", params.get(f"{first}.{LOC}"))
        return () if values is None else jnp.shape(values)[:-1]

    def _blocks(self, plates: tuple[int, ...], projector: Callable[[], Projector | Members]) -> list[Block]:
        """What the parameters of each block are of, with the factors that a projector has."""
        return [
            Block(
                site, block.size, kind, self.init_scale, self.whitened, plates, partial(_factor, projector, i, plates)
            )
            for i, (site, block, kind) in enumerate(self._layout())
        ]

    def params(self, q: Sequence[BlockNormal], prefix: str = "") -> dict[str, jax.Array]:
        """
        The parameters at which the guide's q(ε) is the one given: to start SVI from a collapsed optimum, say::

            optimum = npgp.CollapsedGP(
                kernel, X, gp.inducing, noise_variance=noise_variance
            ).condition(y)
            npgp.fit(svi, key, 1000, X, y, init_params=gp.params(optimum.q))

        :param q: the approximate posterior of each block (``Posterior.q``), of the same structure as this component's.
        :param prefix: put before the parameters' names, for a component inside ``handlers.scope``.
        :raises ValueError: for another structure.
        """
        params: dict[str, jax.Array] = {}
        shape = jnp.broadcast_shapes(*(block.batch_shape for block in q))
        plates = (*shape, 1) if shape else ()
        factors: Sequence[jax.Array | None] = [None] * len(self.inducing)
        if not self.whitened:
            projector = factorize_members(self.kernel, self.inducing, plates, self.jitter)
            factors = [block.matrix() for block in self._blocks(plates, lambda: projector)]
        kinds = [block.kind for block in q]
        sizes = [block.event_shape[0] for block in q]
        if kinds != list(self.covariances or ()) or sizes != [block.size for block in self.inducing]:
            raise ValueError(
                f"q has blocks {kinds} of sizes {sizes}, but {self.name} has {list(self.covariances or ())} of sizes "
                f"{[block.size for block in self.inducing]}."
            )
        for (site, block, _), q_block, L in zip(self._layout(), q, factors, strict=True):
            # Rows have a dimension of size 1 in the batch.
            batch = (*q_block.batch_shape, 1) if q_block.batch_shape else ()
            loc = jnp.reshape(q_block.loc, (*batch, block.size))
            params[f"{prefix}{site}.{LOC}"] = loc if L is None else linalg.matmul(L, loc[..., None])[..., 0]
            if q_block.learned:
                if q_block.kind == "diagonal" and L is not None:
                    raise ValueError(f"{self.name} has unwhitened diagonal blocks, which are another family than q's.")
                _, scale = q_block.marginal().arrays(q_block.batch_shape)
                assert scale is not None
                scale = jnp.reshape(scale, batch + scale.shape[len(q_block.batch_shape) :])
                params[f"{prefix}{site}.{SCALE_NAMES[q_block.kind]}"] = scale if L is None else linalg.matmul(L, scale)
        return params

    def _with_points(self, points: jax.Array) -> SparseGP:
        """The component with the points that were chosen for it."""
        return replace(self, inducing=points)

    @property
    def _chosen(self) -> str | None:
        """The parameter that points are in, where only their number is given."""
        return f"{self.sites[0]}.{POINTS}" if isinstance(self.inducing[0], Unchosen) else None

    def _draw(self, guided: bool, shared: bool, follows: Followed = NOTHING) -> Function:
        if name := self._chosen:
            with suppress(_NoPoints):
                return self._with_points(_stated_points(name, _no_points))._draw(guided, shared, follows)
        values, q, messages, fixed, priors = [], [], [], False, []
        plates, parts = plate_shape(), [shared_part(site) if guided and shared else None for site in self.sites]
        cache = Cache(self.kernel, self.inducing, plates, self.jitter) if parts[0] is None else parts[0].cache
        for block, part in zip(self._blocks(plates, lambda: cache.projector), parts, strict=True):
            site, q_block = block.site, None
            if part is not None:
                q_block = part.block
            elif guided:
                q_block = block.q(partial(_declared, site), follows.t, follows.pseudo_data)
            with (catch := Catch("sample")):
                priors.append(_Prior(block.size))
                fn = priors[-1] if q_block is None else q_block
                info = SiteInfo(kind=block.kind, q=q_block, whitened=self.whitened)
                value = _stated(site, fn, {INFO: info})
            check_draw_context(site, catch.message)
            messages.append(catch.message)
            values.append(_check_block_shape(site, value, block))
            q.append(approximation(site, catch.message))
            fixed = fixed or fixed_beside(site, catch.message)
        if guided or fixed or any(block is not None for block in q):
            # By ``do`` or ``condition``, where q is known of others: all of ε_i is at the value.
            q = [
                DiagonalNormal(jnp.asarray(value), jnp.zeros_like(value)) if block is None else block
                for value, block in zip(values, q, strict=True)
            ]
            fixed = any(message["is_observed"] for message in messages)
        from_guide = info_of(messages[0]).function
        if from_guide is not None:
            cache = from_guide.cache
        if shared and not (self._chosen or context().unseen):
            # Here and not where f is first evaluated, which may be inside a scan, where nothing of it could be kept.
            cache.prepare()
        function = Function(self.name, tuple(values), None if q[0] is None else tuple(q), guided, cache)
        function.fixed, function.component = fixed, self
        function.substituted = next((m["name"] for m in messages if info_of(m).substituted), None)
        if self._chosen:
            function.choose = partial(self._choose, own=priors[0].drawn or function.q is not None)
        for message in messages:
            # A hand-written guide may hold another kernel: only the automatic one shares its factorization.
            message["infer"][INFO] = replace(info_of(message), function=function if shared else None)
        return function

    def _choose(self, function: Function, X: RowsLike, own: bool) -> None:
        """
        Choose points from the first rows that f is evaluated at, and state them as a parameter.

        :param own: whether ε was drawn in this run or a guide has q of it; if not, it may be of other points.
        """
        name, size = self._chosen, self.inducing[0].size
        assert name is not None
        if not (own or context().unseen):  # where the automatic guide looks at the model, it may
            raise ValueError(
                f"{self.sites[0]} has a value of its own, as under NUTS or from draws, but its {size} inducing points "
                f"would be chosen anew, from the rows at hand: give the points themselves, inducing=npgp.inducing."
                f"kmeans(key, X, {size}), or the trained parameters, among which {name!r} has them."
            )
        component = self._with_points(_stated_points(name, lambda key: choose(self.kernel, X, size)))
        function.cache.inducing, function.component = component.inducing, component


class _Prior(WhitenedPrior):
    """The prior, which notes whether a value was drawn from it."""

    drawn = False

    def sample(self, key, sample_shape=()):
        self.drawn = True
        return super().sample(key, sample_shape)


class _NoPoints(Exception):
    """No handler has a value for the parameter of points that are to be chosen."""


def _no_points(key: jax.Array) -> jax.Array:
    raise _NoPoints


def _stated_points(name: str, init: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """
    The points that were chosen for a component, a parameter that training leaves as it is.

    :param name: the parameter's name.
    :param init: the first value, as a function of a random key; with :func:`_no_points` the parameter is stated only if
        handlers have a value, and else that is raised.
    """
    return lax.stop_gradient(numpyro.param(name, init, **{CHOSEN: True}))


def _factor(projector: Callable[[], Projector | Members], i: int, plates: tuple[int, ...]) -> tuple[jax.Array, bool]:
    """
    The factor of block i, and whether it is a diagonal. Where functions have one each, it has the plates' axes in
    front, with that of rows.
    """
    at_hand = projector()
    L, batch = at_hand.cholesky[i], at_hand.batch_shape
    if not batch:
        return L, L.ndim == 1
    own = L.shape[len(batch) :]
    return jnp.broadcast_to(L.reshape(*batch, 1, *own), (*plates, *own)), len(own) == 1


def _declared(site: str, part: str, start: Callable[[], jax.Array], constraint: Any) -> jax.Array:
    """A parameter of a site, declared in the enclosing plates."""
    return numpyro.param(f"{site}.{part}", start(), constraint=constraint)


def _stated(site: str, fn: Any, infer: dict[str, Any]) -> jax.Array:
    """The value of a whitened site."""
    try:
        return numpyro.sample(site, fn, infer=infer)
    except AssertionError as error:  # NumPyro's trace, of the second site of one name
        if "unique" not in str(error):
            raise
        raise ValueError(
            f"{site} is drawn twice in one model; draw a component once, and give each a name of its own: SparseGP("
            "name, …), or a handlers.scope around it."
        ) from None


def _check_block_shape(site: str, value: jax.Array, block: Block) -> jax.Array:
    shape = jnp.shape(value)
    if shape[-1:] != (block.size,) or (len(shape) > 1 and shape[-2] != 1):
        raise ValueError(
            f"{site} has a value of shape {shape}, but its inducing block has {block.size} features: the guide, or the "
            "posterior samples, were made with other inducing features."
        )
    return value
