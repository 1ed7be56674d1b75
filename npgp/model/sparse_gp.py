"""
A GP as a part of a NumPyro model: ``SparseGP``, and its draw f.

How q(ε) reaches the model. A guide samples the whitened sites from q(ε) and puts q in each site's ``infer`` dict;
NumPyro's ``replay``, which SVI uses, copies that dict from guide to model. So in the model ``draw`` finds q there
under SVI, and does not find it under NUTS or ``Predictive``. With q at hand a statement stands for its share of the
ELBO; without, for the generative model. Nothing variational is declared in the model, which is complete by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions.distribution import MaskedDistribution
from numpyro.primitives import _PYRO_STACK, Messenger, apply_stack

from npgp import checks, linalg
from npgp.features import InducingBlock
from npgp.kernels import Kernel, as_kernel
from npgp.model.latent import Latent, Moments, Term
from npgp.sparse.groups import Groups
from npgp.sparse.projection import Projection, Projector, as_blocks, factorize
from npgp.variational.blocks import (
    SCALE_CONSTRAINTS,
    SCALE_NAMES,
    BlockNormal,
    DenseNormal,
    DiagonalNormal,
    MeanOnlyNormal,
    WhitenedPrior,
    learned_blocks,
    whitened_mean,
    whitened_variance,
)
from npgp.variational.posterior import Posterior
from npgp.variational.structure import check_covariances

__all__ = ["Function", "SparseGP", "plate"]

# Keys of a site's ``infer`` dict. The first marks the sites of this library and holds q(ε) in a guide.
Q = "npgp"
FUNCTION = "npgp.function"
OBSERVATION = "npgp.observation"
WHITENED = "npgp.whitened"

#: Type of the nameless message by which a component asks whether it runs inside the automatic guide.
CONTEXT = "npgp.context"


def is_gp_site(msg: dict[str, Any]) -> bool:
    """Whether a message is one of this library's latent sites, which a guide for the rest of the model leaves out."""
    return msg["type"] == "sample" and Q in (msg.get("infer") or {})


def is_observation(msg: dict[str, Any]) -> bool:
    """Whether a message is an observation of GP values, which is no latent site even where no data are given."""
    return msg["type"] == "sample" and OBSERVATION in (msg.get("infer") or {})


class Catch(Messenger):
    """Keeps the message of the statement it encloses, which every handler then completes."""

    message: dict[str, Any]

    def __init__(self, type: str):
        super().__init__()
        self.type = type

    def process_message(self, msg):
        if msg["type"] == self.type:
            self.message = msg


def ask(type: str) -> bool:
    """Whether a handler around this answers a nameless message of this type with true."""
    return bool(apply_stack({"type": type, "fn": lambda: False, "args": (), "kwargs": {}, "value": None})["value"])


def in_automatic_guide() -> bool:
    return ask(CONTEXT)


def plates_around() -> list[numpyro.plate]:
    """The plates that enclose this."""
    return [handler for handler in _PYRO_STACK if isinstance(handler, numpyro.plate)]


def _plate_shape(frames) -> tuple[int, ...]:
    sizes = {frame.dim: frame.size for frame in frames}
    return tuple(sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0))


# ---------------------------------------------------------------------------------------------------------------
# The component


@dataclass(frozen=True)
class SparseGP:
    """
    A Gaussian process with inducing features, as a component of a NumPyro model::

        def model(X, y=None):
            kernel = npgp.RBF(lengthscale=numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0)))
            f = npgp.SparseGP("f", kernel, inducing=Z).draw()
            with numpyro.plate("data", X.shape[0]):
                npgp.observe("y", f(X), npgp.Gaussian(0.1), obs=y)

    Draw f outside the plate over rows; inside plates at dim −2 and below there is one function for each member, and
    all share kernel and inducing features.

    :param name: prefix of the sites and parameters; unique in the model.
    :param kernel: the kernel, npgp's or tinygp's; its hyperparameters are numbers, ``numpyro.param`` or
        ``numpyro.sample`` values.
    :param inducing: Z of shape (M, D), a block of features, or a list of these: the blocks of the orthogonal
        decomposition, in order. Numbers, a ``numpyro.param`` or a sampled value.
    :param covariances: S_i of q(ε) for each block: ``"dense"``, ``"diagonal"`` or ``"prior"`` (the block moves the mean
        only; such blocks come last). One word for all blocks is allowed; dense if omitted. ``["dense", "prior"]`` is
        ODVGP, ``["dense", "dense"]`` SOLVE-GP.
    :param init_scale: initial standard deviation of q(ε), as a share of the prior's.
    :param jitter: relative jitter tried first (:func:`npgp.linalg.cholesky`).
    :param whitened: whether the parameters are those of q(ε). If not, they are those of the inducing values less what
        the blocks before explain of them, ``m_u = L m`` and ``S_u = L S Lᵀ``, which do not move with the kernel's
        hyperparameters. Dense and mean-only blocks have the same family either way; a diagonal S_u is another one.
    :raises TypeError: for inducing inputs that are not floating.
    :raises ValueError: for inducing inputs of another shape, without rows or with NaN.
    """

    name: str
    kernel: Kernel
    inducing: Any
    covariances: Sequence[str] | str | None = None
    init_scale: float = 1.0
    jitter: float | None = None
    whitened: bool = True

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name is {self.name!r}; it must be a non-empty string.")
        object.__setattr__(self, "kernel", as_kernel(self.kernel))
        blocks = as_blocks(self.inducing)
        object.__setattr__(self, "inducing", blocks)
        kinds = check_covariances(self.covariances, len(blocks))
        object.__setattr__(self, "covariances", kinds)
        checks.require_positive(self.init_scale, "init_scale")

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the whitened sites: ``name.u``, ``name.v`` for a second block, ``name.u1`` … for more."""
        count = len(self.inducing)
        suffixes = ("u", "v")[:count] if count <= 2 else tuple(f"u{i + 1}" for i in range(count))
        return tuple(f"{self.name}.{suffix}" for suffix in suffixes)

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
        return self._draw(guided=in_automatic_guide(), shared=True)

    def guide(self) -> Function:
        """
        In a hand-written guide: sample the whitened sites from q(ε), whose parameters ``name.u.loc`` and
        ``name.u.scale_tril`` (``scale`` if diagonal) it declares. Call it where the model calls :meth:`draw`, in the
        same plates; and where the model calls :func:`~npgp.sample`, do so on what this returns. The kernel
        is not looked at unless f is evaluated.
        """
        return self._draw(guided=True, shared=False)

    def posterior(self, params: dict[str, jax.Array], prefix: str = "") -> Posterior:
        """
        The posterior of f at trained parameters, with this object's kernel and inducing features.

        :param params: trained parameters, from ``svi.get_params(state)``.
        :param prefix: put before the parameters' names, for a component inside ``handlers.scope``.
        :raises KeyError: if the parameters of q(ε) are not among them.
        """
        projector = factorize(self.kernel, self.inducing, self.jitter)
        q = []
        for (site, _, kind), L in zip(self._layout(), projector.factors, strict=True):
            names = [f"{prefix}{site}.loc"] + ([f"{prefix}{site}.{SCALE_NAMES[kind]}"] if kind in SCALE_NAMES else [])
            missing = [name for name in names if name not in params]
            if missing:
                raise KeyError(f"params has no {missing[0]!r}, which the approximate posterior of {self.name} needs.")
            arrays = [params[name] for name in names]
            scale = arrays[1] if len(arrays) > 1 else None
            q.append(_without_row_dim(_block_normal(kind, arrays[0], scale, None if self.whitened else L)))
        return Posterior(projector, tuple(q))

    def params(self, q: Sequence[BlockNormal], prefix: str = "") -> dict[str, jax.Array]:
        """
        The parameters at which the guide's q(ε) is the one given: to start SVI from a collapsed optimum, say::

            optimum = npgp.CollapsedGP(kernel, X, gp.inducing, noise_variance).condition(y)
            npgp.fit(svi, key, 1000, X, y, init_params=gp.params(optimum.q))

        :param q: the approximate posterior of each block (``Posterior.q``), of the same structure as this component's.
        :param prefix: put before the parameters' names, for a component inside ``handlers.scope``.
        :raises ValueError: for another structure.
        """
        params: dict[str, jax.Array] = {}
        factors: Sequence[jax.Array | None] = [None] * len(self.inducing)
        if not self.whitened:
            factors = factorize(self.kernel, self.inducing, self.jitter).factors
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
            params[f"{prefix}{site}.loc"] = loc if L is None else linalg.matmul(L, loc[..., None])[..., 0]
            if isinstance(q_block, DiagonalNormal):
                if L is not None:
                    raise ValueError(f"{self.name} has unwhitened diagonal blocks, which are another family than q's.")
                params[f"{prefix}{site}.scale"] = jnp.reshape(q_block.scale, (*batch, block.size))
            elif isinstance(q_block, DenseNormal):
                tril = jnp.broadcast_to(q_block.scale_tril, (*q_block.batch_shape, block.size, block.size))
                tril = jnp.reshape(tril, (*batch, block.size, block.size))
                params[f"{prefix}{site}.scale_tril"] = tril if L is None else linalg.matmul(L, tril)
        return params

    def _draw(self, guided: bool, shared: bool) -> Function:
        values, q, messages = [], [], []
        own_cache = _Cache()
        if guided and not self.whitened:
            own_cache.projector = factorize(self.kernel, self.inducing, self.jitter)
        for i, (site, block, kind) in enumerate(self._layout()):
            L = own_cache.projector.factors[i] if own_cache.projector else None
            q_block = _declare_block(site, block, kind, self.init_scale, L) if guided else None
            with (catch := Catch("sample")):
                fn = WhitenedPrior(block.size) if q_block is None else q_block
                value = numpyro.sample(site, fn, infer={Q: q_block, WHITENED: self.whitened})
            check_draw_context(site, catch.message)
            messages.append(catch.message)
            values.append(_check_block_shape(site, value, block, kind))
            q.append(catch.message["infer"].get(Q))
        from_guide = messages[0]["infer"].get(FUNCTION)
        cache = from_guide.cache if from_guide is not None else own_cache
        if shared and cache.projector is None:
            # Here and not where f is first evaluated, which may be inside a scan, from which nothing may be kept.
            cache.projector = factorize(self.kernel, self.inducing, self.jitter)
        function = Function(self, tuple(values), None if q[0] is None else tuple(q), guided, cache)
        for message in messages:
            # A hand-written guide may hold another kernel: only the automatic one shares its factorisation.
            message["infer"][FUNCTION] = function if shared else None
        return function


def _block_normal(kind: str, loc: jax.Array, scale: jax.Array | None, L: jax.Array | None) -> BlockNormal:
    """q(ε) of one block; parameters are unwhitened if its Cholesky factor L is given."""
    if L is not None:
        loc = _solve(L, loc[..., None])[..., 0]
        if kind == "diagonal":
            assert scale is not None
            kind, scale = "dense", scale[..., None] * jnp.eye(scale.shape[-1], dtype=scale.dtype)
        scale = None if scale is None else _solve(L, scale)
    if kind == "prior":
        return MeanOnlyNormal(loc)
    return DiagonalNormal(loc, scale) if kind == "diagonal" else DenseNormal(loc, scale)


def _solve(L: jax.Array, B: jax.Array) -> jax.Array:
    return linalg.solve_lower(jnp.broadcast_to(L, (*B.shape[:-2], *L.shape)), B)


def _declare_block(site: str, block: InducingBlock, kind: str, init_scale: float, L: jax.Array | None) -> BlockNormal:
    """q(ε) of one block, with its parameters declared; their batch is that of the enclosing plates."""
    dtype = jnp.result_type(float)
    catch = Catch("param")

    def start(key):
        # When a parameter is first made, the plates around it have put themselves on its message.
        return jnp.zeros((*_plate_shape(catch.message["cond_indep_stack"]), block.size), dtype)

    with catch:
        loc = numpyro.param(f"{site}.loc", start)
    if kind == "prior":
        return _block_normal(kind, loc, None, L)
    prior = jnp.eye(block.size, dtype=dtype) if L is None else L.astype(dtype)
    prior = prior if kind == "dense" else jnp.diagonal(prior)
    scale = init_scale * jnp.broadcast_to(prior, (*jnp.shape(loc)[:-1], *prior.shape))
    name = SCALE_NAMES[kind]
    return _block_normal(kind, loc, numpyro.param(f"{site}.{name}", scale, constraint=SCALE_CONSTRAINTS[name]), L)


def check_draw_context(site: str, msg: dict[str, Any]) -> None:
    """Raise ``ValueError`` if a site is drawn where handlers around would change the prior of f."""
    frames = msg["cond_indep_stack"]
    rows = [frame.name for frame in frames if frame.dim == -1]
    if rows:
        raise ValueError(
            f"{site} is drawn inside plate {rows[0]!r} at dim=-1, which is the dimension of rows: draw f outside it, "
            "and put plates over functions at dim=-2 or below."
        )
    fn = msg["fn"]
    masked = isinstance(fn, MaskedDistribution) and fn._mask is not True and fn._mask is not False
    scale = msg["scale"]
    scaled = scale is not None and (checks.is_traced(scale) or np.any(np.asarray(scale) != 1.0))
    if masked or scaled:
        cause = "handlers.mask" if masked else "a subsampled plate or handlers.scale"
        raise ValueError(f"{site} is drawn inside {cause}, which would change the prior of f: draw f outside it.")


def _check_block_shape(site: str, value: jax.Array, block: InducingBlock, kind: str) -> jax.Array:
    shape = jnp.shape(value)
    if shape[-1:] != (block.size,) or (len(shape) > 1 and shape[-2] != 1):
        raise ValueError(
            f"{site} has a value of shape {shape}, but its inducing block has {block.size} features: the guide, or the "
            "posterior samples, were made with other inducing features."
        )
    return value


class _Cache:
    """Factorisation and projections of one draw, each computed when first asked for."""

    def __init__(self):
        self.projector: Projector | None = None
        self.projections: list[tuple[jax.Array, Projection]] = []


class Function:
    """
    A draw of a sparse GP: a function of inputs. Made by :meth:`SparseGP.draw`.

    ``f(X)`` is a :class:`~npgp.model.latent.Latent`, which :func:`~npgp.observe` and
    :func:`~npgp.sample` take.
    """

    def __init__(self, gp: SparseGP, values, q: tuple[BlockNormal, ...] | None, guided: bool, cache: _Cache):
        self.gp, self.values, self.q, self.guided, self.cache = gp, values, q, guided, cache

    def __repr__(self):
        return f"<draw of SparseGP {self.gp.name!r}>"

    def __call__(self, X: ArrayLike) -> Latent:
        """
        f at inputs X of shape (N, D): shape (N,), or (outputs, N) if f was drawn in a plate at dim −2.

        :raises TypeError: for inputs that are not floating.
        :raises ValueError: for inputs of another shape, without rows or with NaN.
        """
        X = checks.inputs(X)
        return Latent((Term(jnp.ones((), X.dtype), self, X),), jnp.zeros((), X.dtype))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the plates that f was drawn in, less the dimension of rows."""
        return jnp.shape(self.values[0])[:-2]

    @property
    def projector(self) -> Projector:
        if self.cache.projector is None:
            self.cache.projector = factorize(self.gp.kernel, self.gp.inducing, self.gp.jitter)
        return self.cache.projector

    def project(self, X: jax.Array) -> Projection:
        for seen, projection in self.cache.projections:
            if seen is X:
                return projection
        self.cache.projections.append((X, self.projector(X)))
        return self.cache.projections[-1][1]

    def _rows(self, value: jax.Array, projection: Projection) -> jax.Array:
        # ε carries a dimension of size 1 where rows go.
        return value.reshape(self.batch_shape + projection.prior_variance.shape)

    def moments(self, X: jax.Array) -> Moments:
        """Mean, variance from ε, and residual variance at each row."""
        projection = self.project(X)
        if self.q is None:
            mean = whitened_mean(projection, self.values)
            return Moments(
                self._rows(mean, projection), jnp.zeros_like(projection.prior_variance), projection.residual_variance()
            )
        mean = whitened_mean(projection, [block.loc for block in self.q])
        variance = whitened_variance(projection, self.q)
        if variance.ndim > 1:
            variance = self._rows(variance, projection)
        return Moments(self._rows(mean, projection), variance, projection.residual_variance(learned_blocks(self.q)))

    def group_covariance(self, X: jax.Array, groups: Groups) -> jax.Array:
        """The residual's prior covariance within groups of rows, (G, g, g); only where a guide gave q."""
        assert self.q is not None
        return self.projector.group_covariance(X, self.project(X).A, groups, learned_blocks(self.q))

    def given_values(self, X: jax.Array, blocks: Sequence[bool]) -> jax.Array:
        """``Σ_i A_iᵀ ε_i`` with the drawn values, or q's mean for blocks not kept."""
        projection = self.project(X)
        values = [
            value if use or self.q is None else self.q[i].loc
            for i, (value, use) in enumerate(zip(self.values, blocks, strict=True))
        ]
        return self._rows(whitened_mean(projection, values), projection)

    @property
    def learned(self) -> list[bool]:
        """Of each block, whether its variance is part of q; all of them without a guide."""
        return [True] * len(self.values) if self.q is None else list(learned_blocks(self.q))

    def residual_variance(self, X: jax.Array, blocks: Sequence[bool]) -> jax.Array:
        """What blocks leave of the prior's variance, (N,)."""
        return self.project(X).residual_variance(blocks)

    def residual_covariance(self, X: jax.Array, blocks: Sequence[bool]) -> jax.Array:
        """What blocks leave of the prior's covariance, (N, N)."""
        return self.projector.residual_covariance(X, self.project(X).A, blocks)

    def prior_variance(self, X: jax.Array) -> jax.Array:
        """k(x, x), (N,)."""
        return self.project(X).prior_variance

    def posterior(self) -> Posterior:
        """The posterior object of this draw; only where a guide gave q."""
        if self.q is None:
            raise ValueError(f"{self.gp.name} has no approximate posterior here: the model was run without a guide.")
        return Posterior(self.projector, tuple(_without_row_dim(block) for block in self.q))


def _without_row_dim(block: BlockNormal) -> BlockNormal:
    """Drop the dimension of size 1 that holds the place of rows in a batch of functions."""
    return block.without_last_batch_dim() if block.batch_shape else block


def plate(name: str, size: int, rows: ArrayLike | int | None = None, dim: int | None = None) -> numpyro.plate:
    """
    The plate over rows when minibatches are passed to the model as arguments::

        def model(X, y=None, *, size):
            with npgp.plate("data", size, rows=X.shape[0]):
                npgp.observe("y", f(X), likelihood, obs=y)

    Log densities inside are scaled by ``size / batch size``, as in ``numpyro.plate(subsample_size=…)``, but no indices
    are drawn.

    :param name: name of the plate.
    :param size: number of rows of the whole data set.
    :param rows: the row numbers of this batch, (B,), which ``with`` returns; or B alone, where the model needs no row
        numbers. All rows if omitted.
    :param dim: the plate's dimension; the rightmost free one if omitted.
    :raises ValueError: for an empty batch, or one larger than the data.
    """
    if rows is None:
        return numpyro.plate(name, size, dim=dim)
    indices = jnp.arange(rows) if jnp.ndim(rows) == 0 else jnp.asarray(rows)
    if not 0 < indices.shape[0] <= size:
        raise ValueError(f"plate {name!r}: the batch has {indices.shape[0]} rows; it must have between 1 and {size}.")
    with handlers.substitute(data={name: indices}):
        return numpyro.plate(name, size, subsample_size=indices.shape[0], dim=dim)
