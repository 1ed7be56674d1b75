"""Observations of a sparse GP with q(ε) at its optimum, as a distribution."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp import checks, linalg
from npgp.collapsed.gaussian import collapsed_bound
from npgp.collapsed.searched import MAX_STEPS, Rows, Searched, searched_bound
from npgp.densities import JointDensity
from npgp.kernels import Kernel, as_kernel
from npgp.likelihoods import Gaussian, Likelihood
from npgp.programs.compiled import STEPS, one_program
from npgp.sparse.conditionals import Conditional, as_conditional
from npgp.sparse.projection import Projection, Projector, as_blocks, factorize
from npgp.sparse.residuals import Residual, residual_of
from npgp.variational.blocks import gaussian_optimum
from npgp.variational.posterior import Posterior
from npgp.variational.structure import check_covariances

__all__ = ["CollapsedGP"]

#: A search that leaves more nats than this undone is worth a word.
WORTH_A_WORD = 1e-2


class CollapsedGP(JointDensity, dist.Distribution):
    """
    Observations of a sparse GP, with q(ε) collapsed: ``log_prob(y)`` is a lower bound on the log evidence, the ELBO at
    the best q(ε). For NUTS, L-BFGS or SVI over hyperparameters and all else of a model:

    .. code-block:: python

        numpyro.sample("y", npgp.CollapsedGP(kernel, X, Z, noise_variance), obs=y)
        counts, slope = np.round(3.0 * np.exp(y)), np.array([0.1])
        numpyro.sample("y", npgp.CollapsedGP(kernel, X, Z, npgp.Poisson(), offset=1.0 + X @ slope), obs=counts)

    For Gaussian noise it is in closed form. For other likelihoods each evaluation finds q(ε) by a few steps that cost
    what the closed form costs; its gradient is that of the ELBO at this q (the envelope theorem). What the search
    leaves undone, :meth:`shortfall` says; :meth:`condition` warns if it is much.

    Several outputs that share the GP's hyperparameters are rows of y: ``log_prob`` maps (..., N) to (...). State it
    outside the plate over rows, whose density it is together; a plate over outputs is right.

    :param kernel: the kernel.
    :param X: training inputs, shape (N, D).
    :param inducing: Z of shape (M, D), a block of features, or a list of these.
    :param likelihood: p(y_n | f_n); or the variance σ² of Gaussian noise, a scalar or one for each row (N,). One of C
        latent values (:class:`npgp.likelihoods.Softmax`) is of C functions with this kernel.
    :param offset: what is added to f, such as a mean function's values at X; a scalar or (N,); for C latent values also
        (C, N) or (C, 1). Add its values at new inputs to predictions.
    :param conditional: what q does to the residual: :class:`npgp.Tight` (Bui et al. 2025), :class:`npgp.Grouped`
        (tighter, at a little more than its cost; neighbors are found in X if it has no groups), :class:`npgp.Full` (at
        O(N³)), :class:`npgp.Prior` (SGPR, Titsias 2009), :class:`npgp.Shared` (Artemev et al. 2021; for Gaussian
        noise),
        or a word for one.
    :param covariances: for each block ``"dense"``, ``"diagonal"`` (mean field) or ``"mean-only"`` (the block moves the
        mean only; such blocks come last). Dense throughout if omitted.
    :param mask: True where an observation is present, (N,) or of y's shape; the others may be NaN. Or ``"nan"``:
        those that are NaN are missing.
    :param weights: how often each row counts, (N,), not below 0: as so many rows like it, if they are whole numbers.
        Not for conditionals of groups.
    :param jitter: relative jitter tried first.
    :param max_steps: most steps of the search.
    :raises TypeError: for what is no likelihood.
    :raises ValueError: for inputs of the wrong shape, for a noise variance known not to be positive, and for a
        conditional that learns a parameter where the likelihood is not Gaussian.

    Source: the best q(ε) by pseudo-observations: Opper & Archambeau 2009; Khan & Lin 2017. Hyperparameters alone:
    Rue, Martino & Chopin 2009 (INLA), with Laplace's approximation where this has a bound.
    """

    support = constraints.real_vector
    reparametrized_params: list[str] = []
    pytree_data_fields = ("kernel", "X", "blocks", "likelihood", "offset", "conditional", "present", "weights")
    pytree_aux_fields = ("covariances", "jitter", "max_steps", "nan_is_missing")

    def __init__(
        self,
        kernel: Kernel,
        X: ArrayLike,
        inducing: object,
        likelihood: Likelihood | ArrayLike,
        *,
        offset: ArrayLike = 0.0,
        conditional: Conditional | str = "tight",
        covariances: Sequence[str] | str | None = None,
        mask: ArrayLike | str | None = None,
        weights: ArrayLike | None = None,
        jitter: float | None = None,
        max_steps: int = MAX_STEPS,
        validate_args=None,
    ):
        conditional = as_conditional(conditional)
        self.likelihood: Likelihood = likelihood if isinstance(likelihood, Likelihood) else _noise(likelihood)
        self.kernel = as_kernel(kernel)
        self.X = checks.inputs(X)
        self.blocks = as_blocks(inducing)
        self.covariances = check_covariances(covariances, len(self.blocks))
        rows = self.X.shape[0]
        self.conditional = conditional.for_inputs(X, sum(block.size for block in self.blocks))
        self.conditional.partition(rows)  # which checks the groups
        self.nan_is_missing = isinstance(mask, str)
        self.present = None if mask is None else checks.mask(mask, "mask", of=np.zeros(rows))
        self.weights = None if weights is None else checks.require_per_row(weights, "weights", rows)
        if weights is not None and not checks.is_traced(weights) and not np.all(np.asarray(weights) >= 0):
            raise ValueError("weights has negative or NaN entries; each says how often a row counts.")
        if weights is not None and self.conditional.partition(rows) is not None:
            raise ValueError(
                f"weights are given and conditional is {self.conditional!r}, which takes rows together: "
                "take 'tight' or 'prior'."
            )
        if self.closed_form:
            checks.require_per_row(self.noise_variance, "noise_variance", rows)
        elif self.conditional.parameter is not None:
            raise ValueError(
                f"conditional is {self.conditional!r}, which learns a parameter; its best value is known for Gaussian "
                "noise without a mask or weights alone: take 'tight', 'grouped' or 'prior'."
            )
        several = self.likelihood.num_latents > 1
        self.offset = checks.real(offset, "offset") if several else checks.require_per_row(offset, "offset", rows)
        checks.require_finite(self.offset, "offset")
        self.jitter = jitter
        self.max_steps = checks.whole_number(max_steps, "max_steps")
        super().__init__((), (rows,), validate_args=validate_args)

    @property
    def closed_form(self) -> bool:
        """Whether q(ε) needs no search: for Gaussian noise."""
        return isinstance(self.likelihood, Gaussian) and self.present is None and self.weights is None

    @property
    def has_mask(self) -> bool:
        """Whether observations may be missing, and NaN there."""
        return self.present is not None

    @property
    def noise_variance(self) -> ArrayLike:
        """σ² of Gaussian noise."""
        if not isinstance(self.likelihood, Gaussian):
            raise AttributeError(f"noise_variance: the likelihood is {type(self.likelihood).__name__}, not Gaussian.")
        return self.likelihood.variance

    def log_prob(self, value):
        """The bound for observations y of shape (..., N): (...)."""
        y = self._observations(value)
        if not self.closed_form:
            return self._search(y)[2].bound
        _, projection, residual = self._parts()
        return collapsed_bound(
            projection, residual, y - self.offset, self.noise_variance, self.covariances, self.conditional
        )

    def shortfall(self, y: ArrayLike) -> jax.Array:
        """
        About how many nats ``log_prob(y)`` is below the bound at the very best q(ε): what one more step of the search
        would still move q(ε) by, in nats of KL divergence. A scalar; 0 for Gaussian noise.
        """
        y = self._observations(y)
        if self.closed_form:
            return jnp.zeros((), self.X.dtype)
        return one_program(lambda: self._search(y)[2].to_go, options=STEPS)

    def condition(self, y: ArrayLike) -> Posterior:
        """
        The posterior of f, without the offset, given observations y of shape (..., N). For C latent values it has C
        functions, (C, ...).

        :raises ValueError: if y has NaN or another number of rows, or is not possible for the likelihood.
        """
        y = self._observations(y)
        if self.closed_form:
            return one_program(lambda: self._optimum(y), options=STEPS)
        projector, found = one_program(lambda: self._search(y)[::2], options=STEPS)
        if not checks.is_traced(found.to_go) and not float(found.to_go) < WORTH_A_WORD:
            warnings.warn(
                f"CollapsedGP: after {self.max_steps} steps another would move q(ε) by {float(found.to_go):.2g} nats; "
                "raise max_steps, or use float64.",
                RuntimeWarning,
                stacklevel=2,
            )
        return Posterior(projector, found.q)

    def log_likelihood(self, y: ArrayLike) -> jax.Array:
        """
        Log likelihood row by row given the posterior, ``log ∫ p(y_n | f_n) q(f_n) df_n``: (..., N).

        How well the posterior fits the data it has seen; not for LOO, which :func:`npgp.to_arviz` serves.
        """
        mean, variance = self.condition(y).mean_and_variance(self.X)
        return self.likelihood.log_marginal(self._observations(y), mean + self.offset, variance)

    def sample(self, key, sample_shape=()):
        """Joint draws from the prior with noise, at O(N³)."""
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        L, _ = linalg.cholesky(self.kernel(self.X), self.jitter)
        f_key, noise_key = jax.random.split(key)
        count = self.likelihood.num_latents
        shape = (() if count == 1 else (count,)) + sample_shape + self.batch_shape + self.event_shape
        f = linalg.matmul(L, jax.random.normal(f_key, shape, L.dtype)[..., None])[..., 0]
        return self.likelihood.sample(noise_key, self.offset + f)

    def _optimum(self, y: jax.Array) -> Posterior:
        projector, projection = self._project()
        q = gaussian_optimum(projection, y - self.offset, self.noise_variance, self.covariances)
        return Posterior(projector, q)

    def _project(self) -> tuple[Projector, Projection]:
        projector = factorize(self.kernel, self.blocks, self.jitter)
        return projector, projector(self.X)

    def _parts(self) -> tuple[Projector, Projection, Residual]:
        projector, projection = self._project()
        learned = [kind != "mean-only" for kind in self.covariances]
        groups = self.conditional.partition(self.X.shape[0])
        return projector, projection, residual_of(projector, self.X, projection, learned, groups)

    def _search(self, y: jax.Array) -> tuple[Projector, Projection, Searched]:
        projector, projection, residual = self._parts()
        present = self._present(y)
        present = None if present is None else jnp.asarray(present)
        weights = None if self.weights is None else jnp.asarray(self.weights, self.X.dtype)
        rows = Rows(y, self.likelihood, jnp.asarray(self.offset, self.X.dtype), present, weights)
        found = searched_bound(projection, residual, rows, self.covariances, self.conditional, max_steps=self.max_steps)
        return projector, projection, found

    def _observations(self, y: Any) -> jax.Array:
        """Observations, checked where they can be seen."""
        present = self._present(y)
        if present is None:
            y = checks.observations(y, self.event_shape[0], self.X.dtype)
        else:
            checks.require_rows(y, self.event_shape[0])
        if not checks.is_traced(y) and not checks.is_traced(present):
            seen = np.asarray(y) if present is None else np.where(present, np.asarray(y), np.nan)
            if present is not None:
                checks.require_finite(np.asarray(y)[np.broadcast_to(present, np.shape(y))], "y")
            self.likelihood.check(seen)
        return checks.to_device(y, "y", self.X.dtype)

    def _present(self, y: Any) -> Any:
        """Where there is an observation; ``None`` for everywhere."""
        return checks.mask("nan", of=checks.array(y, "y")) if self.nan_is_missing else self.present


def _noise(variance: Any) -> Gaussian:
    if callable(variance) or isinstance(variance, type):
        raise TypeError(
            f"likelihood is {variance!r:.80}; it must be an npgp likelihood such as npgp.Poisson(), or the variance of "
            "Gaussian noise."
        )
    return Gaussian(variance=checks.require_positive(variance, "noise_variance"))
