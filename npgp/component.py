"""
A GP as a part of a NumPyro model: ``SparseGP``, its draw f, and the statements ``observe`` and ``sample``.

How q(ε) reaches the model. A guide samples the whitened sites from q(ε) and puts q in each site's ``infer`` dict;
NumPyro's ``replay``, which SVI uses, copies that dict from guide to model. So in the model ``draw`` finds q there
under SVI, and does not find it under NUTS or ``Predictive``. With q at hand a statement stands for its share of the
ELBO; without, for the generative model. Nothing variational is declared in the model, which is complete by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.distribution import MaskedDistribution
from numpyro.primitives import Messenger, apply_stack
from numpyro.util import is_prng_key

from npgp import conditionals, linalg
from npgp.collapsed import as_blocks, check_covariances
from npgp.features import InducingBlock
from npgp.kernels import Kernel
from npgp.likelihoods import Likelihood, as_likelihood
from npgp.projection import Projection, Projector, factorize
from npgp.variational import (
    BlockNormal,
    DenseNormal,
    DiagonalNormal,
    MeanOnlyNormal,
    Posterior,
    WhitenedPrior,
    learned_blocks,
    square_tril,
    whitened_mean,
    whitened_variance,
)

__all__ = ["Function", "Latent", "SparseGP", "observe", "plate", "sample"]

# Keys of a site's ``infer`` dict. The first marks the sites of this library and holds q(ε) in a guide.
Q = "npgp"
FUNCTION = "npgp.function"
VALUE = "npgp.value"

#: Type of the nameless message by which a component asks whether it runs inside the automatic guide.
CONTEXT = "npgp.context"


def is_gp_site(msg: dict[str, Any]) -> bool:
    """Whether a message is one of this library's latent sites, which a guide for the rest of the model leaves out."""
    return msg["type"] == "sample" and Q in (msg.get("infer") or {})


class _Catch(Messenger):
    """Keeps the message of the statement it encloses, which every handler then completes."""

    message: dict[str, Any]

    def __init__(self, type: str):
        super().__init__()
        self.type = type

    def process_message(self, msg):
        if msg["type"] == self.type:
            self.message = msg


def _in_automatic_guide() -> bool:
    msg = {"type": CONTEXT, "fn": lambda: False, "args": (), "kwargs": {}, "value": None}
    return bool(apply_stack(msg)["value"])


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
    :param kernel: the kernel; its hyperparameters are numbers, ``numpyro.param`` or ``numpyro.sample`` values.
    :param inducing: Z of shape (M, D), a block of features, or a list of these: the blocks of the orthogonal
        decomposition, in order. Numbers, a ``numpyro.param`` or a sampled value.
    :param covariances: S_i of q(ε) for each block: ``"dense"``, ``"diagonal"`` or ``"prior"`` (the block moves the mean
        only; such blocks come last). One word for all blocks is allowed; dense if omitted. ``["dense", "prior"]`` is
        ODVGP, ``["dense", "dense"]`` SOLVE-GP.
    :param init_scale: initial standard deviation of q(ε), as a share of the prior's.
    :param jitter: relative jitter tried first (:func:`npgp.linalg.cholesky`).
    :raises TypeError: for inducing inputs that are not floating.
    :raises ValueError: for inducing inputs of another shape, without rows or with NaN.
    """

    name: str
    kernel: Kernel
    inducing: Any
    covariances: Sequence[str] | str | None = None
    init_scale: float = 1.0
    jitter: float | None = None

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name is {self.name!r}; it must be a non-empty string.")
        if not isinstance(self.kernel, Kernel):
            raise TypeError(f"kernel is a {type(self.kernel).__name__}; it must be an npgp kernel such as npgp.RBF().")
        blocks = as_blocks(self.inducing)
        object.__setattr__(self, "inducing", blocks)
        kinds = check_covariances(self.covariances, len(blocks), allowed=("dense", "diagonal", "prior"))
        object.__setattr__(self, "covariances", kinds)
        linalg.require_positive(self.init_scale, "init_scale")

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the whitened sites: ``name.u``, ``name.v`` for a second block, ``name.u1`` … for more."""
        count = len(self.inducing)
        suffixes = ("u", "v")[:count] if count <= 2 else tuple(f"u{i + 1}" for i in range(count))
        return tuple(f"{self.name}.{suffix}" for suffix in suffixes)

    def draw(self) -> Function:
        """
        Draw f once: the whitened sites ε_i ~ N(0, I), and the function they and the residual make.

        :raises ValueError: inside the plate over rows, a subsampled plate, ``handlers.scale`` or ``handlers.mask``.
        """
        return self._draw(guided=_in_automatic_guide(), shared=True)

    def guide(self) -> Function:
        """
        In a hand-written guide: sample the whitened sites from q(ε), whose parameters ``name.u.loc`` and
        ``name.u.scale_tril`` (``scale`` if diagonal) it declares. Call it where the model calls :meth:`draw`, in the
        same plates; and where the model calls :func:`sample`, do so on what this returns. The kernel is not looked
        at unless f is evaluated.
        """
        return self._draw(guided=True, shared=False)

    def posterior(self, params: dict[str, jax.Array], prefix: str = "") -> Posterior:
        """
        The posterior of f at trained parameters, with this object's kernel and inducing features.

        :param params: trained parameters, from ``svi.get_params(state)``.
        :param prefix: put before the parameters' names, for a component inside ``handlers.scope``.
        :raises KeyError: if the parameters of q(ε) are not among them.
        """
        q = []
        for site, kind in zip(self.sites, self.covariances, strict=True):  # type: ignore[arg-type]
            names = [f"{prefix}{site}.loc"] + ([f"{prefix}{site}.{_SCALE[kind]}"] if kind in _SCALE else [])
            missing = [name for name in names if name not in params]
            if missing:
                raise KeyError(f"params has no {missing[0]!r}, which the approximate posterior of {self.name} needs.")
            arrays = [params[name] for name in names]
            q.append(_without_row_dim(_block_normal(kind, arrays[0], arrays[1] if len(arrays) > 1 else None)))
        return Posterior(factorize(self.kernel, self.inducing, self.jitter), tuple(q))

    def _draw(self, guided: bool, shared: bool) -> Function:
        values, q, messages = [], [], []
        for site, block, kind in zip(self.sites, self.inducing, self.covariances, strict=True):  # type: ignore[arg-type]
            q_block = _declare_block(site, block, kind, self.init_scale) if guided else None
            with (catch := _Catch("sample")):
                value = numpyro.sample(site, WhitenedPrior(block.size) if q_block is None else q_block, infer={Q: q_block})
            _check_draw_context(site, catch.message)
            messages.append(catch.message)
            values.append(_check_block_shape(site, value, block, kind))
            q.append(catch.message["infer"].get(Q))
        from_guide = messages[0]["infer"].get(FUNCTION)
        cache = from_guide.cache if from_guide is not None else _Cache()
        function = Function(self, tuple(values), None if q[0] is None else tuple(q), guided, cache)
        for message in messages:
            # A hand-written guide may hold another kernel: only the automatic one shares its factorisation.
            message["infer"][FUNCTION] = function if shared else None
        return function


def _block_normal(kind: str, loc: jax.Array, scale: jax.Array | None) -> BlockNormal:
    if kind == "prior":
        return MeanOnlyNormal(loc)
    return DiagonalNormal(loc, scale) if kind == "diagonal" else DenseNormal(loc, scale)


#: Name of the scale parameter of q(ε) for each covariance structure.
_SCALE = {"dense": "scale_tril", "diagonal": "scale"}


def _declare_block(site: str, block: InducingBlock, kind: str, init_scale: float) -> BlockNormal:
    """q(ε) of one block, with its parameters declared; their batch is that of the enclosing plates."""
    dtype = jnp.result_type(float)
    catch = _Catch("param")

    def start(key):
        # When a parameter is first made, the plates around it have put themselves on its message.
        return jnp.zeros((*_plate_shape(catch.message["cond_indep_stack"]), block.size), dtype)

    with catch:
        loc = numpyro.param(f"{site}.loc", start)
    if kind == "prior":
        return _block_normal(kind, loc, None)
    scale, constraint = jnp.full(jnp.shape(loc), init_scale, dtype), constraints.softplus_positive
    if kind == "dense":
        scale, constraint = scale[..., None] * jnp.eye(block.size, dtype=dtype), square_tril
    return _block_normal(kind, loc, numpyro.param(f"{site}.{_SCALE[kind]}", scale, constraint=constraint))


def _check_draw_context(site: str, msg: dict[str, Any]) -> None:
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
    scaled = scale is not None and (linalg.is_traced(scale) or np.any(np.asarray(scale) != 1.0))
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

    ``f(X)`` is a :class:`Latent`, which :func:`observe` and :func:`sample` take.
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
        X = linalg.inputs(X)
        return Latent(((jnp.ones((), X.dtype), self, X),), jnp.zeros((), X.dtype))

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

    def given_values(self, X: jax.Array, keep: Sequence[bool]) -> tuple[jax.Array, Projection]:
        """``Σ_i A_iᵀ ε_i`` with the drawn values, or q's mean for blocks not kept; and the projection."""
        projection = self.project(X)
        values = [
            value if use or self.q is None else self.q[i].loc
            for i, (value, use) in enumerate(zip(self.values, keep, strict=True))
        ]
        return self._rows(whitened_mean(projection, values), projection), projection

    def posterior(self) -> Posterior:
        """The posterior object of this draw; only where a guide gave q."""
        if self.q is None:
            raise ValueError(f"{self.gp.name} has no approximate posterior here: the model was run without a guide.")
        return Posterior(self.projector, tuple(_without_row_dim(block) for block in self.q))


def _without_row_dim(block: BlockNormal) -> BlockNormal:
    """Drop the dimension of size 1 that holds the place of rows in a batch of functions."""
    return block.without_last_batch_dim() if block.batch_shape else block


class Moments(NamedTuple):
    """Row by row: mean, variance that comes from ε, and the residual's prior variance; shapes (..., N)."""

    mean: jax.Array
    variance: jax.Array
    residual: jax.Array


# ---------------------------------------------------------------------------------------------------------------
# Linear combinations of GPs at rows


class Latent:
    """
    GP values at N rows that are neither integrated out nor sampled yet: ``f(X)``, and sums and multiples of these.

    ``f(X) + g(X2) + offset``, ``a * f(X)`` and differences are Latents. For any other expression, turn it into an
    array with :func:`sample` first.
    """

    # NumPy and JAX arrays on the left leave the operation to this class.
    __array_ufunc__ = None
    __array_priority__ = 1000

    def __init__(self, terms: tuple[tuple[jax.Array, Function, jax.Array], ...], offset: jax.Array):
        self.terms, self.offset = terms, offset
        try:
            self.shape  # noqa: B018
        except ValueError:
            shapes = [f"{f.gp.name}: {(*f.batch_shape, X.shape[0])}" for _, f, X in terms]
            raise ValueError(
                f"cannot add values at different rows: {', '.join(shapes)}, offset {jnp.shape(offset)}."
            ) from None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values, (..., N)."""
        shapes = [np.broadcast_shapes(jnp.shape(a), (*f.batch_shape, X.shape[0])) for a, f, X in self.terms]
        return np.broadcast_shapes(*shapes, jnp.shape(self.offset))

    def __repr__(self):
        names = " + ".join(f.gp.name for _, f, _ in self.terms)
        return f"<{names} at rows, shape {self.shape}; an array only after npgp.sample(...)>"

    def __add__(self, other):
        if isinstance(other, Latent):
            return Latent(self.terms + other.terms, self.offset + other.offset)
        return Latent(self.terms, self.offset + jnp.asarray(other))

    def __mul__(self, other):
        if isinstance(other, Latent):
            raise TypeError("a product of GP values is not Gaussian: npgp.sample one of the factors first.")
        other = jnp.asarray(other)
        return Latent(tuple((a * other, f, X) for a, f, X in self.terms), self.offset * other)

    def __neg__(self):
        return self * -1.0

    def __sub__(self, other):
        return self + (-other)

    def __rsub__(self, other):
        return -self + other

    def __truediv__(self, other):
        return self * (1.0 / jnp.asarray(other))

    __radd__ = __add__
    __rmul__ = __mul__

    @property
    def functions(self) -> list[Function]:
        """The draws that occur."""
        return [f for _, f, _ in self.terms]

    @property
    def variational(self) -> bool:
        """Whether a guide gave q for any of the draws."""
        return any(f.q is not None for f in self.functions)

    @property
    def guided(self) -> bool:
        return any(f.guided for f in self.functions)

    def check_independent(self) -> None:
        """Raise ``ValueError`` if one draw occurs twice: its values at two inputs are not independent."""
        if len(set(map(id, self.functions))) < len(self.terms):
            name = next(f.gp.name for f in self.functions if self.functions.count(f) > 1)
            raise ValueError(f"the draw of {name} occurs twice in one sum; npgp.sample its values first.")

    def moments(self) -> Moments:
        """Moments of the combination, the draws being independent; each of shape :attr:`shape`."""
        self.check_independent()
        mean = self.offset
        variance = residual = jnp.zeros((), mean.dtype)
        for a, f, X in self.terms:
            m = f.moments(X)
            mean = mean + a * m.mean
            variance = variance + jnp.square(a) * m.variance
            residual = residual + jnp.square(a) * m.residual
        return Moments(*(jnp.broadcast_to(v, self.shape) for v in (mean, variance, residual)))

    def residual_factor(self, joint: bool, keep: Sequence[Sequence[bool]]) -> jax.Array:
        """
        A square root of the residual's covariance at the rows: a factor (..., N, N) if joint, else standard
        deviations (..., N).

        :param keep: for each term, the blocks that are projected out.
        """
        parts = []
        for (a, f, X), blocks in zip(self.terms, keep, strict=True):
            projection = f.project(X)
            if joint:
                D = f.projector.residual_covariance(X, projection.A, blocks)
                scale = jnp.broadcast_to(a, (*jnp.shape(a)[:-1], X.shape[0]))
                parts.append(scale[..., :, None] * D * scale[..., None, :])
            else:
                parts.append(jnp.square(a) * projection.residual_variance(blocks))
        total = sum(parts[1:], parts[0])
        if not joint:
            return jnp.sqrt(jnp.maximum(total, jnp.finfo(total.dtype).tiny))
        # Relative to the prior variance: the residual vanishes at inducing points.
        prior = sum(jnp.mean(jnp.square(a) * f.project(X).prior_variance) for a, f, X in self.terms)
        return linalg.cholesky(total, scale=jnp.broadcast_to(prior, total.shape[:-2]))[0]


def as_latent(latent: object, where: str) -> Latent:
    """Pass a Latent through; anything else is an error that says what is accepted."""
    if isinstance(latent, Latent):
        return latent
    raise TypeError(
        f"{where} was given a {type(latent).__name__}; it takes GP values at rows, such as f(X) or "
        "f(X) + g(X2) + offset, where f = SparseGP(...).draw()."
    )


# ---------------------------------------------------------------------------------------------------------------
# Statements


class LatentObservation(dist.Distribution):
    """
    Observations of Gaussian latent values, which are integrated out row by row.

    With q at hand ``log_prob(y)`` is each row's share of the ELBO, else ``log ∫ p(y_n | f_n) N(f_n; μ_n, v_n) df_n``.
    Made by :func:`observe`.
    """

    support = constraints.real
    reparametrized_params: list[str] = []
    pytree_data_fields = ("likelihood", "moments", "parameter", "mask_", "residual_factor")
    pytree_aux_fields = ("conditional",)

    def __init__(
        self,
        likelihood: Likelihood,
        moments: Moments,
        conditional: conditionals.Conditional | None,
        parameter: ArrayLike | None = None,
        mask: jax.Array | None = None,
        residual_factor: jax.Array | None = None,
    ):
        self.likelihood, self.moments, self.conditional = likelihood, moments, conditional
        self.parameter, self.mask_, self.residual_factor = parameter, mask, residual_factor
        super().__init__(moments.mean.shape, (), validate_args=False)

    def log_prob(self, value):
        mean, variance, residual = self.moments
        # 1 is a possible observation of every likelihood; a masked row may hold NaN, also in the gradient.
        y = value if self.mask_ is None else jnp.where(self.mask_, value, 1)
        if self.conditional is None:
            terms = self.likelihood.log_marginal(y, mean, variance + residual)
        else:
            terms = conditionals.row_elbo(self.conditional, self.likelihood, y, *self.moments, self.parameter)
        return terms if self.mask_ is None else jnp.where(self.mask_, terms, 0.0)

    def sample(self, key, sample_shape=()):
        assert is_prng_key(key)
        mean, variance, residual = self.moments
        keys = jax.random.split(key, 3)
        shape = sample_shape + self.batch_shape
        z = jax.random.normal(keys[0], shape, mean.dtype)
        if self.residual_factor is None:
            f = mean + jnp.sqrt(variance + residual) * z
        else:
            f = mean + linalg.matmul(self.residual_factor, z[..., None])[..., 0]
            f = f + jnp.sqrt(variance) * jax.random.normal(keys[1], shape, mean.dtype)
        return self.likelihood.sample(keys[2], f)


def observe(
    name: str,
    latent: Latent,
    likelihood: Likelihood | Any,
    obs: ArrayLike | None = None,
    *,
    conditional: conditionals.Conditional = "tight",
    mask: ArrayLike | None = None,
    joint: bool = False,
) -> jax.Array:
    """
    Observe GP values through a likelihood, with f integrated out row by row. Use it inside the plate over rows.

    =================================  ===========================================================================
    SVI                                each row's expected log likelihood under q, with the conditional's term; no
                                       Monte Carlo noise for Gaussian and other closed forms
    NUTS, or a model without guide     ``log ∫ p(y_n|f_n) N(f_n; A_nᵀε, d_n) df_n``, the FITC-type density
    ``Predictive`` with a posterior    y from q(f) at the rows given; jointly in f on request
    =================================  ===========================================================================

    :param name: name of the site.
    :param latent: GP values at rows: ``f(X)``, or a sum of these and offsets.
    :param likelihood: an ``npgp`` likelihood, or a function from f to a NumPyro distribution.
    :param obs: observations of the latent's shape, (N,) or (outputs, N).
    :param conditional: what q does to the residual (:mod:`npgp.conditionals`): ``"tight"``, ``"prior"``, ``"shared"``
        or ``"published"``.
    :param mask: True where an observation is present, of the same shape; the others may be NaN.
    :param joint: when y is simulated, draw f jointly over rows at O(N³), not row by row.
    :raises TypeError: if ``latent`` is not GP values.
    :raises ValueError: for observations of another shape, or outside the likelihood's support, or NaN without mask.
    """
    latent = as_latent(latent, "observe")
    likelihood = as_likelihood(likelihood)
    conditionals.check(conditional)
    if obs is not None:
        obs = _check_observations(name, obs, mask, latent, likelihood)
    parameter = None
    if latent.variational and conditional in conditionals.LEARNED_PARAMETER:
        suffix, start, constraint = conditionals.LEARNED_PARAMETER[conditional]
        parameter = numpyro.param(f"{name}.{suffix}", start, constraint=constraint)
    if latent.guided and obs is not None:
        return obs  # a guide has no observed sites, and need not compute anything here
    moments = latent.moments()
    factor = None
    if joint and obs is None:
        factor = latent.residual_factor(True, [[True] * len(f.values) for f in latent.functions])
    distribution = LatentObservation(
        likelihood,
        moments,
        conditional if latent.variational else None,
        parameter,
        None if mask is None else jnp.asarray(mask),
        factor,
    )
    return numpyro.sample(name, distribution, obs=obs)


def _check_observations(name, obs, mask, latent: Latent, likelihood: Likelihood) -> jax.Array:
    for what, value in (("observations", obs), ("mask", mask)):
        if value is not None and jnp.shape(value) != latent.shape:
            raise ValueError(
                f"{name}: the {what} have shape {jnp.shape(value)} but the GP values have shape {latent.shape}."
            )
    seen = obs
    if mask is not None and not linalg.is_traced(obs) and not linalg.is_traced(mask):
        seen = np.asarray(obs)[np.asarray(mask).astype(bool)]
    if mask is None or seen is not obs:
        linalg.require_finite(seen, f"the observations of {name}")
        likelihood.check(seen)
    return jnp.asarray(obs)


def sample(name: str, latent: Latent, *, joint: bool = True, conditional: str = "prior") -> jax.Array:
    """
    GP values as an array, for any expression downstream. Use it inside the plate over rows.

    The randomness of the residual is the site ``name.residual``; ``name`` itself is a deterministic site.

    =================================  ===========================================================================
    SVI                                f from q, jointly over the rows unless ``joint=False``
    NUTS, or a model without guide     ``A_nᵀε`` plus the residual: the exact GP if joint, FITC's model if not
    ``Predictive`` with a posterior    a fresh draw at the rows given, whatever rows the posterior was trained on
    =================================  ===========================================================================

    :param name: name of the site.
    :param latent: GP values at rows: ``f(X)``, or a sum of these and offsets. Residuals of separate statements are
        independent.
    :param joint: draw the rows jointly, at O(N³), or from their marginals, which suffices for training where what
        follows factorises over rows, and then has less Monte Carlo noise.
    :param conditional: what q does to the residual: ``"prior"`` or ``"shared"``, the two that bound the evidence
        whatever follows.
    :return: shape (N,) or (outputs, N).
    """
    latent = as_latent(latent, "sample")
    latent.check_independent()
    conditionals.check(conditional, allowed=("prior", "shared"))
    shape = latent.shape
    scale: ArrayLike = 1.0
    if latent.variational and conditional == "shared":
        suffix, start, constraint = conditionals.LEARNED_PARAMETER["shared"]
        scale = jnp.sqrt(numpyro.param(f"{name}.{suffix}", start, constraint=constraint))
    if not latent.variational and numpyro.get_mask() is False:
        # Under Predictive: a residual sampled at the training rows must not be taken for one at these.
        key = numpyro.prng_key()
        if key is None:
            raise ValueError(f"{name}: sampling GP values needs a random key; wrap the model in handlers.seed.")
        return numpyro.deterministic(name, _assemble(latent, jax.random.normal(key, shape), scale, joint, conditional))
    prior = dist.Normal(jnp.zeros(shape), 1.0)
    q = dist.Normal(jnp.zeros(shape), scale)
    with (catch := _Catch("sample")):
        z = numpyro.sample(f"{name}.residual", q if latent.guided else prior, infer={Q: None})
    infer = catch.message["infer"]
    value = infer.get(VALUE)
    if value is None:
        value = _assemble(latent, z, scale, joint, conditional)
        if _in_automatic_guide():
            infer[VALUE] = value  # the model takes it from here, with no second projection
    return numpyro.deterministic(name, value)


def _assemble(latent: Latent, z: jax.Array, scale: ArrayLike, joint: bool, conditional: str) -> jax.Array:
    """GP values from the drawn ε and the residual's noise z, which has standard deviation ``scale`` under q."""
    if latent.variational and not joint:
        mean, variance, residual = latent.moments()
        total = variance + jnp.square(scale) * residual
        return mean + jnp.sqrt(jnp.maximum(total, jnp.finfo(total.dtype).tiny)) * z / scale
    # With its prior variance kept, a mean-only block's noise is drawn with ε; if not, it is part of the residual.
    keep = [
        [True] * len(f.values) if f.q is None or conditional == "prior" else list(learned_blocks(f.q))
        for f in latent.functions
    ]
    value = latent.offset
    for (a, f, X), blocks in zip(latent.terms, keep, strict=True):
        value = value + a * f.given_values(X, blocks)[0]
    factor = latent.residual_factor(joint, keep)
    noise = linalg.matmul(factor, z[..., None])[..., 0] if joint else factor * z
    return jnp.broadcast_to(value, z.shape) + noise


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
