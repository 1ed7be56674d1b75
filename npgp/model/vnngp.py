"""
Variational nearest-neighbor GPs (Wu, Pleiss & Cunningham 2022) as a component of a NumPyro model: ``VNNGP``.

Inducing values have Vecchia's prior, and values of f depend on their k nearest inducing values alone::

    p(u) = Π_j N(u_j; b_jᵀ u_n(j), F_j),     p(f_i | u) = N(b_iᵀ u_n(i), F_i),     q(u) = Π_j N(u_j; m_j, s_j²)

    KL[q ‖ p] = Σ_j E_{q(u_n(j))} KL[q(u_j) ‖ p(u_j | u_n(j))]

Both the data's terms and those of the inducing values are sums, so both are minibatched: a step factorizes one k × k
matrix for each row and each inducing point of its batches, however many there are of either. There may be as many
inducing points as data.

The residuals of rows are independent given u, for this is the prior of *this* model, not of the GP: every conditional
of :func:`npgp.observe` that goes row by row bounds the log evidence of the nearest-neighbor model, whatever the
likelihood. That evidence itself may lie above or below the GP's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp import checks, linalg
from npgp.contract import frames, random_key, under_predictive
from npgp.kernels import Kernel
from npgp.model.draw import Draw, Given, Moments, Points
from npgp.model.latent import Latent, NoArray, Term
from npgp.model.row_params import row_param
from npgp.model.sites import (
    INFO,
    Catch,
    SiteInfo,
    approximation,
    check_draw_context,
    followed,
    in_automatic_guide,
    info_of,
)
from npgp.neighbors.nngp import NNGP, MeanFieldNormal
from npgp.neighbors.posterior import NeighborPosterior, NeighborRows, with_neighbors
from npgp.neighbors.search import Neighbors, repeated_sites
from npgp.sparse.groups import Groups
from npgp.variational.parameterizations import COUPLING, LOC, checked_values, linear, trained_values


@dataclass(frozen=True)
class VNNGP:
    """
    A GP with neighbors among many inducing points, as a component of a NumPyro model. Where lengthscales are short, or
    sites are many, it keeps detail that :class:`npgp.SparseGP` must smooth away. Tiny here; in earnest with 15
    neighbors, and batches of a thousand:

    .. code-block:: python

        before = npgp.neighbors.nearest_before(Z, 5)  # once, before the model
        neighbors = npgp.neighbors.nearest(X, Z, 5)


        def near(X, neighbors, y=None, *, size):
            f = npgp.VNNGP("f", kernel, Z, before, batch_size=4).draw()
            with npgp.plate("data", size, rows=X.shape[0]):
                npgp.observe("y", f(X, neighbors=neighbors), npgp.Gaussian(variance=0.1), obs=y)


        simulated = Predictive(near, num_samples=2)(key, X, neighbors, size=len(X))["y"]
        nearby = SVI(
            near,
            npgp.AutoSparseGP(near),
            npgp.adam(0.01, 10_000),
            TraceMeanField_ELBO(),
            size=len(X),
        )
        # tables = npgp.training.row_adam(0.01, 10_000)
        # npgp.fit(nearby, key, 10_000, X, neighbors, y, batch_size=10, row_optim=tables)

    ``q(u)`` is mean-field; its parameters ``name.u.loc`` and ``name.u.scale`` are row tables
    (:func:`npgp.model.row_param`): with ``row_optim`` a step touches the entries that it needs alone. Without a guide,
    f's inducing values are one site ``name.u`` with an :class:`npgp.neighbors.NNGP` prior, for NUTS too. Where
    inducing points are the training inputs, say so by ``neighbors = np.arange(len(X))[:, None]``: f at each row is its
    own inducing value. Inputs that are repeated, such as a station's, are inducing points once: ``Z, row = np.unique(X,
    axis=0, return_inverse=True)``, and ``neighbors = row.reshape(-1, 1)``.

    As q(u) takes inducing values for independent, standard deviations are too small where the lengthscale spans many
    inducing points, and training prefers lengthscales that are too short (of counts at 20,000 sites a third of the true
    one, and 62% of f inside 90% intervals). Use fewer points there, ``SparseGP``, or
    ``npgp.ApproximateGP(method="vif")``, which takes any likelihood and has the right ones.

    :param name: prefix of the site and parameters; unique in the model.
    :param kernel: the kernel, npgp's or tinygp's.
    :param inducing: Z, shape (M, D); all training inputs, say. Constants: neighbors are found once.
    :param neighbors: of each inducing point among those before it, made of Z by :func:`npgp.neighbors.nearest_before`;
        or their number k, to be found here in max–min order. To measure distances in other units than before, such as
        lengthscales that have been learned, train on with ``nearest_before(Z, k, scale=lengthscale)``.
    :param batch_size: inducing points that a step of SVI looks at, M_b; all if omitted. They are drawn anew at each
        step, one from each of M_b runs of the neighbors' order, so the KL divergence is estimated without bias.
    :param init_loc: initial means of q(u), a scalar or (M,): data, where inducing points are data.
    :param init_scale: initial standard deviations of q(u), as a share of those that the prior has given neighbors.
    :param jitter: relative jitter tried first (:func:`npgp.linalg.cholesky`).
    :raises TypeError: for inducing inputs that are not floating.
    :raises ValueError: for inducing inputs of another shape, without rows or with NaN, neighbors of other sites,
        inducing inputs that repeat one another, and a batch larger than M.
    """

    name: str
    kernel: Kernel
    inducing: Any
    neighbors: Neighbors | int = 15
    _: KW_ONLY
    batch_size: int | None = None
    init_loc: ArrayLike = 0.0
    init_scale: float = 0.1
    jitter: float | None = None

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name is {self.name!r}; it must be a non-empty string.")
        inducing = checks.concrete_inputs(self.inducing, "inducing")
        prior = NNGP(self.kernel, inducing, self.neighbors, jitter=self.jitter)
        object.__setattr__(self, "kernel", prior.kernel)
        object.__setattr__(self, "inducing", prior.X)
        object.__setattr__(self, "neighbors", prior.neighbors)
        size = prior.event_shape[0]
        if repeated := repeated_sites(prior.X, prior.neighbors):
            raise ValueError(
                f"inducing has {repeated} rows that repeat another, whose value q(u) would take for independent: give "
                "each once, inducing, row = np.unique(X, axis=0, return_inverse=True), and f(X, "
                "neighbors=row.reshape(-1, 1))."
            )
        if self.batch_size is not None:
            number = checks.whole_number(self.batch_size, "batch_size")
            must_be = f"at most {size}, the number of inducing points"
            checks.whole_number(number, "batch_size", most=size, must_be=must_be)
        checks.require_per_row(self.init_loc, "init_loc", size)
        checks.require_positive(self.init_scale, "init_scale")

    @property
    def site(self) -> str:
        """Name of the inducing values' site, ``name.u``."""
        return f"{self.name}.u"

    @property
    def size(self) -> int:
        """Number of inducing points M."""
        return self.inducing.shape[0]

    def prior(self) -> NNGP:
        """The distribution of the inducing values."""
        return NNGP(self.kernel, self.inducing, self.neighbors, jitter=self.jitter)

    def __call__(self, X: ArrayLike):
        raise TypeError(f"{self.name} is a component, and no function yet: f = gp.draw() first, then f(X).")

    def draw(self) -> NeighborFunction:
        """
        Draw f once: its inducing values, and the function they and the residual make.

        :raises ValueError: inside a plate, ``handlers.scale`` or ``handlers.mask``.
        """
        return self._draw(in_automatic_guide(), shared=True, t=followed().t)

    def guide(self, t: ArrayLike | None = None) -> NeighborFunction:
        """
        In a hand-written guide: sample the inducing values from q(u), whose parameters it declares. Call it where the
        model calls :meth:`draw`; and where the model calls :func:`npgp.sample`, do so on what this returns.

        :param t: as for :meth:`npgp.SparseGP.guide`; C is a row table (M, T), too.
        """
        return self._draw(guided=True, shared=False, t=None if t is None else checked_values(t))

    def posterior(
        self, params: dict[str, jax.Array], prefix: str = "", t: ArrayLike | None = None
    ) -> NeighborPosterior:
        """
        The posterior of f at trained parameters, with this object's kernel, inducing points and neighbors.

        :param params: trained parameters, ``FitResult.params``.
        :param prefix: put before the parameters' names, for a component inside ``handlers.scope``.
        :param t: as for :meth:`npgp.SparseGP.posterior`.
        :raises KeyError: if the parameters of q(u) are not among them.
        """
        read: Any = trained_values(params, f"{prefix}{self.site}", self.name)
        loc, scale, *C = (read(part, None, None) for part in (LOC, "scale", *([] if t is None else [COUPLING])))
        if t is not None:
            loc = loc + linear(f"{prefix}{self.site}.{COUPLING}", C[0], checked_values(t))
        return self._posterior(loc, scale)

    def _posterior(self, loc: jax.Array, scale: jax.Array) -> NeighborPosterior:
        neighbors: Any = self.neighbors
        return NeighborPosterior(self.kernel, self.inducing, neighbors, loc, scale, self.jitter)

    def _draw(self, guided: bool, shared: bool, t: jax.Array | None = None) -> NeighborFunction:
        q = _approximate(self, t) if guided else None
        with (catch := Catch("sample")):
            fn = self.prior() if q is None else q.q
            value = numpyro.sample(self.site, fn, infer={INFO: SiteInfo(kind="diagonal", q=q)})
        check_draw_context(self.site, catch.message)
        if around := frames(catch.message):
            plate = around[0].name
            raise ValueError(
                f"{self.site} is drawn inside plate {plate!r}; draw a VNNGP outside plates, several by name."
            )
        q = approximation(self.site, catch.message)
        if q is None and jnp.shape(value) != (self.size,):
            raise ValueError(
                f"{self.site} has a value of shape {jnp.shape(value)}, but there are {self.size} inducing points: the "
                "guide, or the posterior samples, were made with others."
            )
        function = NeighborFunction(self, value, q, guided)
        info = info_of(catch.message)
        function.substituted = self.site if info.substituted else None
        catch.message["infer"][INFO] = replace(info, function=function if shared else None)
        return function


# ---------------------------------------------------------------------------------------------------------------
# q(u)


@dataclass(frozen=True, eq=False)
class Approximation:
    """
    q(u) as the guide's site has it, and where to find it at other inducing points.

    :param q: what the site is sampled from.
    :param at: means and standard deviations at given numbers of inducing points.
    :param key: where q is that of a batch: decides the draws of inducing values outside it.
    """

    q: MeanFieldNormal
    at: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    key: jax.Array | None


def _approximate(gp: VNNGP, t: jax.Array | None) -> Approximation:
    """Declare the parameters of q(u), which follows t, and choose this step's inducing points."""
    neighbors: Any = gp.neighbors
    names: dict[str, str] = {}

    def start(part: str) -> Callable[[jax.Array], jax.Array]:
        def loc(key):
            return jnp.broadcast_to(jnp.asarray(gp.init_loc, gp.inducing.dtype), (gp.size,)) + 0.0

        def scale(key):
            return gp.init_scale * jnp.sqrt(gp.prior().factor().variance)

        def coupling(key):
            assert t is not None
            return jnp.zeros((gp.size, t.shape[0]), gp.inducing.dtype)

        return {LOC: loc, "scale": scale, COUPLING: coupling}[part]

    def table(part: str, rows: jax.Array | None) -> jax.Array:
        constraint = constraints.softplus_positive if part == "scale" else constraints.real
        with (catch := Catch("param")):
            values = row_param(f"{gp.site}.{part}", start(part), rows, constraint)
        name = names.setdefault(part, catch.message["name"])
        if catch.message["name"] != name:
            raise ValueError(
                f"f was drawn where its parameter is {name!r} and is evaluated where that would be "
                f"{catch.message['name']!r}: evaluate f inside the same handlers.scope."
            )
        return values

    def mean(rows: jax.Array | None) -> jax.Array:
        loc = table(LOC, rows)
        return loc if t is None else loc + linear(f"{gp.site}.{COUPLING}", table(COUPLING, rows), t)

    # Predictive, and functions that return the posterior, need all inducing values.
    if gp.batch_size is None or under_predictive(gp.site):
        loc, scale = mean(None), table("scale", None)
        rows = jnp.asarray(neighbors.rows)
        q = MeanFieldNormal(loc, scale, loc[rows], scale[rows], gp.size)
        return Approximation(q, lambda rows: (loc[rows], scale[rows]), None)
    key = random_key(gp.site)
    if key is None:
        raise ValueError(f"{gp.site}: choosing inducing points needs a random key; wrap the guide in handlers.seed.")
    batch_key, draw_key = jax.random.split(key)
    # One place from each of B runs of the order, whose lengths differ by one at most.
    ends = np.arange(gp.batch_size + 1) * gp.size // gp.batch_size
    places = jax.random.randint(batch_key, (gp.batch_size,), jnp.asarray(ends[:-1]), jnp.asarray(ends[1:]))
    sites = jnp.asarray(neighbors.order)[places]
    rows = jnp.concatenate([sites[:, None], jnp.asarray(neighbors.rows)[sites]], axis=1)  # (B, 1 + K)
    loc, scale = mean(rows), table("scale", rows)
    counts = jnp.asarray(np.diff(ends), loc.dtype)
    q = MeanFieldNormal(loc[:, 0], scale[:, 0], loc[:, 1:], scale[:, 1:], gp.size, sites=sites, counts=counts)
    return Approximation(q, lambda rows: (mean(rows), table("scale", rows)), draw_key)


# ---------------------------------------------------------------------------------------------------------------
# The function


class NeighborFunction(Draw, NoArray):
    """
    A draw of a :class:`VNNGP`: a function of inputs. Made by :meth:`VNNGP.draw`.

    ``f(X)`` is a :class:`~npgp.model.latent.Latent`, which :func:`~npgp.observe` and
    :func:`~npgp.sample` take.
    """

    meant = "a function, whose values at rows are f(X)"

    def __init__(self, gp: VNNGP, values: jax.Array, q: Approximation | None, guided: bool):
        super().__init__(gp.name, q, guided)
        self.gp, self.values = gp, values
        self.fixed = q is None  # or drawn without a guide
        self._regressions: list[tuple[NeighborRows, tuple[jax.Array, jax.Array]]] = []

    def __repr__(self):
        return f"<draw of VNNGP {self.gp.name!r}>"

    def __call__(self, X: ArrayLike, neighbors: ArrayLike | None = None) -> Latent:
        """
        f at inputs X of shape (N, D): shape (N,).

        :param X: inputs.
        :param neighbors: numbers of the inducing points that each row depends on, (N, k), made by
            :func:`npgp.neighbors.nearest`. Found here if omitted, where inputs are no traced arguments: as many as
            inducing points have. For rows that are inducing points, ``rows[:, None]`` says that f there is the inducing
            value.
        :raises TypeError: for inputs that are not floating, and where neighbors are to be found of traced ones.
        :raises ValueError: for inputs of another shape, without rows or with NaN, and neighbors of other rows.
        """
        given: Any = self.gp.neighbors
        rows = with_neighbors(X, neighbors, self.gp.inducing, given)
        return Latent((Term(jnp.ones((), rows.X.dtype), self, rows),), np.zeros((), rows.X.dtype))

    def _regression(self, rows: NeighborRows) -> tuple[jax.Array, jax.Array]:
        """Weights b (N, k) and residual variance F (N,)."""
        for seen, found in self._regressions:
            if seen is rows:
                return found
        self._regressions.append((rows, rows.regression(self.gp.kernel, self.gp.inducing, self.gp.jitter)))
        return self._regressions[-1][1]

    def _moments(self, rows: NeighborRows, shared: bool) -> Moments:
        b, F = self._regression(rows)
        if self.q is None:
            return Moments(jnp.sum(b * self.values[rows.neighbors], axis=-1), jnp.zeros_like(F), F)
        loc, scale = self.q.at(rows.neighbors)
        return Moments(jnp.sum(b * loc, axis=-1), jnp.sum(jnp.square(b * scale), axis=-1), F)

    def _group_covariance(self, rows: NeighborRows, groups: Groups) -> jax.Array:
        raise ValueError(
            f"{self.name} is a VNNGP, whose residuals are independent of each other: groups have nothing to add to "
            "conditional='tight'."
        )

    def _given(self, rows: NeighborRows, joint: bool, mean_only_in_residual: bool) -> Given:
        # ``b_iᵀ u_n(i)`` with the drawn inducing values, and F, a diagonal if it is wanted jointly over rows.
        b, F = self._regression(rows)
        if self.q is None or self.q.key is None:
            u = self.values[rows.neighbors]
        else:
            # A draw for each inducing point that is the same wherever it is needed.
            loc, scale = self.q.at(rows.neighbors)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(self.q.key, jnp.ravel(rows.neighbors))
            z = jax.vmap(lambda key: jax.random.normal(key, (), loc.dtype))(keys)
            u = loc + scale * z.reshape(loc.shape)
        # Residuals at different inputs are independent; at the same input it is one residual.
        points = self.points(rows)
        D = self.residual_between(points, points, ()) if joint else F
        return Given(jnp.sum(b * u, axis=-1), D, self.gp.kernel.diag(rows.X))

    def residual_blocks(self, mean_only_in_residual: bool) -> tuple[bool, ...]:
        return (True,)

    def points(self, rows: NeighborRows) -> Points:
        # F^½ is what rows at the same input have in common.
        return Points(rows.X, (linalg.safe_sqrt(self._regression(rows)[1])[None],))

    def residual_between(self, before: Points, after: Points, blocks: tuple[bool, ...]) -> jax.Array:
        # None between different inputs.
        same = jnp.all(cast(jax.Array, before.X)[:, None] == after.X, axis=-1)
        return jnp.where(same, before.A[0].T * after.A[0], 0.0)

    def posterior(self) -> NeighborPosterior:
        """The posterior object of this draw; only where a guide gave q."""
        if self.q is None:
            raise ValueError(f"{self.gp.name} has no approximate posterior here: the model was run without a guide.")
        if self.q.key is not None:
            raise ValueError(
                f"{self.gp.name} has a batch of its inducing values here; its posterior is npgp.posterior(...), or "
                "that of the component, given trained parameters."
            )
        return self.gp._posterior(*self.q.at(jnp.arange(self.gp.size)))

    def posterior_given_values(self) -> NeighborPosterior:
        """That of f given the drawn inducing values."""
        return self.gp._posterior(self.values, jnp.zeros_like(self.values))
