"""
The Bayesian GPLVM: GPs whose inputs are latent (Titsias & Lawrence 2010), uncollapsed and minibatched (Lalchand,
Ravuri & Lawrence 2022).

``x_n ~ p(x_n)``, and D functions of x that share kernel and inducing inputs, each with its own q(ε). It is an ordinary
NumPyro model around a :class:`~npgp.SparseGP`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import constraints

from npgp import checks
from npgp.conditionals import Conditional, as_conditional
from npgp.gplvm.guides import FreeNormal, LatentGuide, LatentPrior, Point, standard_normal
from npgp.gplvm.start import Start
from npgp.kernels import RBF, Kernel
from npgp.likelihoods import Gaussian, Likelihood
from npgp.model import guides as guide
from npgp.model import observation as statements
from npgp.model import sites
from npgp.model import sparse_gp as component
from npgp.model.sites import Hidden
from npgp.predictions import mixture_moments
from npgp.variational.posterior import Posterior

#: What else than a function an argument may be.
_ALSO = {"likelihood": ", a likelihood or None", "kl_weight": " or None"}


@dataclass(frozen=True)
class BayesianGPLVM:
    """
    A Bayesian GPLVM as a model/guide pair, tiny here:

    .. code-block:: python

        Y = np.random.default_rng(0).normal(size=(20, 4))
        gplvm = npgp.BayesianGPLVM(npgp.gplvm.pca_start(key, Y, latent_dim=2, num_inducing=5))
        latent = SVI(gplvm.model, gplvm.guide, npgp.adam(0.01, 100), TraceMeanField_ELBO())
        trained = npgp.fit(latent, key, 100, Y)

    For minibatches, give row numbers along with the rows: ``npgp.fit(..., Y, batch_size=100, indices="rows")``.
    For several draws of x per step: ``TraceMeanField_ELBO(num_particles=10)``.

    :param start: where training starts; it fixes the numbers of rows, latent dimensions and inducing inputs. With
        several blocks of inducing inputs or features the functions are orthogonal sparse GPs (SOLVE-GP).
    :param conditional: what q does to the residual (:mod:`npgp.conditionals`). For
        :class:`~npgp.conditionals.Grouped`, rows that are close in data space:
        ``Grouped(npgp.sparse.median_split(Y, 16))``; with minibatches, ``Grouped(g)`` and data laid out group after
        group (:meth:`npgp.sparse.Groups.arrange`).
    :param kernel: from lengthscale (Q,) and variance to a kernel; RBF with one lengthscale each if omitted. Each column
        of Y has a kernel of its own if ``start`` has a lengthscale (D, 1, Q), or a variance (D, 1), for each.
    :param latents: the family of q(x): :class:`~npgp.gplvm.FreeNormal`, :class:`~npgp.gplvm.Encoder`,
        :class:`~npgp.gplvm.Point`, or a function as :mod:`npgp.gplvm.guides` says.
    :param prior: of the latents: :func:`~npgp.gplvm.standard_normal`, :class:`~npgp.gplvm.NormalMixture`,
        :class:`~npgp.gplvm.Dynamical`, :class:`~npgp.gplvm.ClassNormal`, or a function as :mod:`npgp.gplvm.guides`
        says.
    :param likelihood: a function without arguments that gives the likelihood of y, (D, B), and may declare parameters;
        or a likelihood. Gaussian noise with parameter ``noise_variance`` if omitted, one for all columns or one each as
        ``start.noise_variance`` says. For unlike columns there is :class:`npgp.likelihoods.Columns`.
    :param covariances: as for :class:`~npgp.SparseGP`.
    :param positive: constraint of the positive hyperparameters: their logarithm is free, so that a dimension can be
        switched off in few steps; or ``constraints.softplus_positive``.
    :param kl_weight: a function from the step to the weight of KL(q(x) ‖ p(x)), to anneal it: pass ``steps="step"`` to
        :func:`npgp.fit`. One throughout if omitted; with another weight the ELBO is no bound.
    :raises TypeError: for a start, a likelihood or a function of another type.
    :raises ValueError: for an unknown conditional.
    """

    start: Start
    _: KW_ONLY
    conditional: Conditional | str = "tight"
    kernel: Callable[..., Kernel] = RBF
    latents: LatentGuide = field(default_factory=FreeNormal)
    prior: LatentPrior = standard_normal
    likelihood: Likelihood | Callable[[], Likelihood] | None = None
    covariances: Sequence[str] | str | None = None
    positive: Any = field(default_factory=lambda: constraints.positive)
    kl_weight: Callable[[ArrayLike], ArrayLike] | None = None
    guide: guide.AutoSparseGP = field(init=False)

    def __post_init__(self):
        if not isinstance(self.start, Start):
            raise TypeError(
                f"start is a {type(self.start).__name__}; it must be a Start, as npgp.gplvm.pca_start makes it."
            )
        object.__setattr__(self, "conditional", as_conditional(self.conditional))
        if isinstance(self.kernel, Kernel):
            raise TypeError(
                f"kernel is {self.kernel!r:.80}; it must be a function that makes one of lengthscale and variance, "
                "which are learned: a class such as npgp.RBF."
            )
        for name in ("kernel", "latents", "prior", "likelihood", "kl_weight"):
            value = getattr(self, name)
            allowed = (value is None and name in ("likelihood", "kl_weight")) or callable(value)
            if not allowed and not (name == "likelihood" and isinstance(value, Likelihood)):
                raise TypeError(f"{name} is {value!r}; it must be a function{_ALSO.get(name, '')}.")
        object.__setattr__(
            self, "guide", guide.AutoSparseGP(self.model, guide=self.latent_guide, dependence="pseudo-data")
        )

    def model(
        self,
        Y: ArrayLike | None = None,
        rows: ArrayLike | None = None,
        mask: ArrayLike | str | None = None,
        step: ArrayLike | None = None,
    ) -> None:
        """
        The model: sites ``x`` (B, Q), ``f.u`` (D, 1, M) and ``y`` (D, B).

        :param Y: the rows at hand, (B, D); simulated if omitted.
        :param rows: their numbers in the whole data, (B,); all rows, in order, if omitted.
        :param mask: True where an entry of Y is present, (B, D); the others may be NaN. Or ``"nan"``:
            those that are NaN are missing.
        :param step: the step of training, for ``kl_weight``.
        :raises ValueError: for Y or mask of another shape.
        """
        start = self.start
        latent_dim, columns = start.latents.shape[1], start.offset.shape[0]
        mask = self._check(Y, rows, mask)
        outputs = numpyro.plate("outputs", columns, dim=-2)
        gp, likelihood = self._gp(), self._likelihood()
        with outputs:
            f = gp.draw()
        plate = self._rows(rows)
        with self._weight(step):
            x = self.prior(plate, latent_dim)
        with plate, outputs:
            statements.observe(
                "y",
                f(x) + jnp.asarray(start.offset, x.dtype)[:, None],
                likelihood,
                obs=None if Y is None else jnp.asarray(Y).T,
                conditional=self.conditional,
                mask=None if mask is None else jnp.asarray(mask).T,
            )

    def latent_guide(
        self,
        Y: ArrayLike | None = None,
        rows: ArrayLike | None = None,
        mask: ArrayLike | str | None = None,
        step: ArrayLike | None = None,
    ) -> None:
        """The guide of the latents alone; arguments are those of :meth:`model`."""
        with self._weight(step):
            self.latents(self.start, self._rows(rows), Y, self._check(Y, rows, mask))

    def _rows(self, rows: ArrayLike | None) -> numpyro.plate:
        return sites.plate("rows", self.start.latents.shape[0], rows, dim=-1)

    def _weight(self, step: ArrayLike | None):
        """The handler under which the latents are sampled, in model and guide."""
        if isinstance(self.latents, Point) and not self.latents.prior:
            return handlers.mask(mask=False)
        if self.kl_weight is None or step is None:
            return nullcontext()
        return handlers.scale(scale=self.kl_weight(step))

    def _gp(self) -> component.SparseGP:
        start = self.start
        lengthscale = jnp.asarray(start.lengthscale, jnp.result_type(float))
        shape = lengthscale.shape[:-1] if lengthscale.ndim > 1 else ()
        lengthscale = jnp.broadcast_to(lengthscale, (*shape, start.latents.shape[1]))
        kernel = self.kernel(
            lengthscale=numpyro.param("lengthscale", lengthscale, constraint=self.positive),
            variance=numpyro.param("variance", jnp.asarray(start.variance), constraint=self.positive),
        )
        names = ["inducing", *(f"inducing{i + 2}" for i in range(len(start.blocks) - 1))]
        inducing = [_declare(name, block) for name, block in zip(names, start.blocks, strict=True)]
        return component.SparseGP("f", kernel, inducing, self.covariances, init_scale=0.5)

    def _likelihood(self) -> Likelihood:
        if self.likelihood is not None:
            return self.likelihood if isinstance(self.likelihood, Likelihood) else self.likelihood()
        noise = jnp.asarray(self.start.noise_variance, jnp.result_type(float))
        noise = numpyro.param("noise_variance", noise, constraint=self.positive)
        return Gaussian(variance=noise if jnp.ndim(noise) == 0 else noise[:, None])

    def _check(self, Y, rows, mask) -> Any:
        """The mask, if all shapes are right."""
        batch = self.start.latents.shape[0] if rows is None else jnp.shape(rows)[0]
        expected = (batch, self.start.offset.shape[0])
        if Y is None:
            return None
        return checks.observed(Y, expected, mask, name="Y")[1]

    # -----------------------------------------------------------------------------------------------------------------
    # At trained parameters

    def posterior(self, params: dict[str, jax.Array]) -> Posterior:
        """
        The posterior of the D functions at trained parameters, over latent space: means are (D, N).

        They are those of f less ``start.offset``.

        :raises KeyError: if a parameter is missing, here and below.
        """
        with Hidden(), sites.Trained(None, params):
            return self._gp().posterior(params)

    def likelihood_at(self, params: dict[str, jax.Array] | None = None) -> Likelihood:
        """The likelihood of y, (D, N), at trained parameters; where training starts, if they are omitted."""
        with Hidden(), handlers.seed(rng_seed=0) if params is None else sites.Trained(None, params):
            return self._likelihood()

    def latents_at(
        self,
        params: dict[str, jax.Array],
        Y: ArrayLike | None = None,
        rows: ArrayLike | None = None,
        mask: ArrayLike | str | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """
        Mean and standard deviation of q(x) at trained parameters, each (B, Q).

        :param params: trained parameters.
        :param Y: data rows (B, D), which an encoder needs; any rows, where no parameters belong to them.
        :param rows: row numbers (B,) for the parameters that do; all rows if omitted.
        :param mask: True where an entry of Y is present. Or ``"nan"``:
            those that are NaN are missing.
        """
        plate = self._rows(rows)
        if Y is not None and rows is None and jnp.shape(Y)[0] != plate.size:
            plate = sites.plate("rows", jnp.shape(Y)[0], dim=-1)
        with Hidden(), sites.Trained(None, params), handlers.trace() as trace:
            with handlers.seed(rng_seed=0):
                self.latents(self.start, plate, Y, mask)
        q = trace["x"]["fn"]
        return q.mean, jnp.sqrt(q.variance)

    def reconstruct(
        self, params: dict[str, jax.Array], latents: ArrayLike, latent_scale: ArrayLike | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """
        Mean and variance of f at latent points, which for Gaussian noise is the noise-free data: each (N, D).

        :param params: trained parameters.
        :param latents: latent points, (N, Q).
        :param latent_scale: their standard deviations, (N, Q), integrated out by the spherical cubature rule of
            degree 3, with 2Q points; the latent points are taken as known if omitted.
        """
        posterior, latents = self.posterior(params), jnp.asarray(latents)
        points = [latents]
        if latent_scale is not None:
            step = jnp.sqrt(latents.shape[-1]) * jnp.asarray(latent_scale)
            axes = jnp.eye(latents.shape[-1], dtype=latents.dtype)
            points = [latents + sign * step * axis for axis in axes for sign in (1.0, -1.0)]
        moments = [posterior.mean_and_variance(point) for point in points]
        mean, variance = mixture_moments(*map(jnp.stack, zip(*moments, strict=True)))
        return mean.T + self.start.offset, variance.T


def _declare(name: str, block: Any) -> Any:
    """Inducing inputs, or all that is to be learned of a block of features, as parameters."""
    leaves, structure = jax.tree.flatten(block)
    names = [name] if len(leaves) == 1 else [f"{name}.{i}" for i in range(len(leaves))]
    values = [numpyro.param(n, jnp.asarray(leaf)) for n, leaf in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(structure, values)
