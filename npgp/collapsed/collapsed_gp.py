"""Observations of a sparse GP with q(ε) at its optimum, as a distribution."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from npgp import checks, linalg
from npgp.collapsed.gaussian import collapsed_bound
from npgp.conditionals import Conditional, as_conditional
from npgp.conditionals.base import Observations
from npgp.contract import Stackable, per_stacked
from npgp.densities import JointDensity
from npgp.features import Points
from npgp.functionals.rows import RowsLike, as_rows, covariance
from npgp.inducing.selection import Unchosen, blocks_or_number, choose
from npgp.kernels import Kernel, as_kernel
from npgp.kernels.base import warn_of_white_noise
from npgp.likelihoods import Gaussian, Likelihood
from npgp.likelihoods.continuous import likelihood_or_noise, noise_variance_of
from npgp.programs.compiled import STEPS, one_program
from npgp.programs.double import in_double_if
from npgp.sparse.projection import Members, Projection, Projector, factorize, factorize_members
from npgp.sparse.residuals import Residual, residual_of
from npgp.variational.blocks import block_normal, check_covariances
from npgp.variational.posterior import Posterior
from npgp.variational.row_sites import MAX_STEPS, Searched, Sites, searched_bound, warn_unless_arrived
from npgp.variational.updates import gaussian_optimum


class CollapsedGP(JointDensity, Stackable):
    """
    Observations of a sparse GP, with q(ε) collapsed: ``log_prob(y)`` is a lower bound on the log evidence, the ELBO at
    the best q(ε). For NUTS, L-BFGS or SVI over hyperparameters and all else of a model:

    .. code-block:: python

        numpyro.sample("y", npgp.CollapsedGP(kernel, X, Z, npgp.Gaussian(scale=0.3)), obs=y)
        counts, slope = np.round(3.0 * np.exp(y)), np.array([0.1])
        numpyro.sample(
            "y",
            npgp.CollapsedGP(kernel, X, Z, npgp.Poisson(), offset=1.0 + X @ slope),
            obs=counts,
        )

    For Gaussian noise it is in closed form. For other likelihoods each evaluation finds q(ε) by a few steps that cost
    what the closed form costs; its gradient is that of the ELBO at this q (the envelope theorem). What the search
    leaves undone, :meth:`shortfall` says; :meth:`condition` warns if it is much.

    Several outputs that share the GP's hyperparameters are rows of y: ``log_prob`` maps (..., N) to (...). State it
    outside the plate over rows, whose density it is together; a plate over outputs is right. Outputs with
    hyperparameters of their own are ``outputs`` in number, and the density maps (..., Q, N) to (..., Q)::

        with numpyro.plate("functions", Q, dim=-2):
            lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))  # (Q, 1)
        with numpyro.plate("outputs", Q):
            gp = npgp.CollapsedGP(npgp.RBF(lengthscale), X, Z, noise_variance=0.1, outputs=Q)
            numpyro.sample("Y", gp, obs=Y)  # (Q, N)

    :param kernel: the kernel.
    :param X: training inputs, shape (N, D), or functionals (:class:`npgp.functionals.Functionals`).
    :param inducing: Z of shape (M, D), a block of features, or a list of these; or a number of points, the centers of
        k-means clusters of X, the same at each evaluation.
    :param likelihood: p(y_n | f_n). One of C latent values (:class:`npgp.likelihoods.Softmax`) is of C functions with
        this kernel.
    :param noise_variance: in its stead σ² of Gaussian noise, a scalar or one for each row (N,).
    :param offset: what is added to f, such as a mean function's values at X; a scalar or (N,); for C latent values also
        (C, N) or (C, 1). Add its values at new inputs to predictions.
    :param conditional: what q does to the residual: :class:`~npgp.conditionals.Tight` (Bui et al. 2025),
        :class:`~npgp.conditionals.Grouped` (tighter, at a little more than its cost; neighbors are found in X if it has
        no groups), :class:`~npgp.conditionals.Full` (at O(N³)), :class:`~npgp.conditionals.Prior` (SGPR, Titsias 2009),
        :class:`~npgp.conditionals.Shared` (Artemev et al. 2021; for Gaussian noise), or a word for one.
    :param covariances: for each block ``"dense"``, ``"diagonal"`` (mean field) or ``"mean-only"`` (the block moves the
        mean only; such blocks come last). Dense throughout if omitted.
    :param mask: True where an observation is present, (N,) or of y's shape; the others may be NaN. Or ``"nan"``:
        those that are NaN are missing.
    :param weights: how often each row counts, (N,), not below 0: as so many rows like it, if they are whole numbers.
        Not for conditionals of groups.
    :param jitter: relative jitter tried first.
    :param max_steps: most steps of the search.
    :param tolerance: nats by which a step of the search moves q(ε) at its end, above 0; of about a tenth of that the
        bound falls short. 1e-6 in float32 and 1e-12 in float64 if omitted; for NUTS 1e-2 will do.
    :param start: pseudo-observations that the search begins with, as :meth:`sites` returns them for the same
        observations and other hyperparameters: half the steps. Nothing for Gaussian noise.
    :param outputs: the number Q of outputs, where they have a kernel, inducing inputs or noise each: hyperparameters of
        shape (Q, 1), or (Q, 1, D), and inducing inputs (Q, M, D), as :class:`npgp.SparseGP` takes them in a plate of Q
        members; parameters of the likelihood, offset and mask may be (Q, 1) or (Q, N). ``None`` for one function, or
        outputs that share all.
    :raises TypeError: for what is no likelihood, a bare number too, and unless one of likelihood and noise_variance is
        given.
    :raises ValueError: for inputs of the wrong shape, hyperparameters of another number of outputs, a noise variance
        known not to be positive, and a conditional that learns a parameter where the likelihood is not Gaussian.

    Source: the best q(ε) by pseudo-observations: Opper & Archambeau 2009; Khan & Lin 2017. Hyperparameters alone:
    Rue, Martino & Chopin 2009 (INLA), with Laplace's approximation where this has a bound.
    """

    support = constraints.real_vector
    counted = "X"
    pytree_data_fields = ("kernel", "X", "blocks", "likelihood", "offset", "conditional", "present", "weights", "start")
    pytree_aux_fields = ("covariances", "jitter", "max_steps", "tolerance", "outputs", "nan_is_missing")

    def __init__(
        self,
        kernel: Kernel,
        X: RowsLike,
        inducing: object,
        likelihood: Likelihood | None = None,
        *,
        noise_variance: ArrayLike | None = None,
        offset: ArrayLike = 0.0,
        conditional: Conditional | str = "tight",
        covariances: Sequence[str] | str | None = None,
        mask: ArrayLike | str | None = None,
        weights: ArrayLike | None = None,
        jitter: float | None = None,
        max_steps: int = MAX_STEPS,
        tolerance: float | None = None,
        start: Sites | None = None,
        outputs: int | None = None,
        validate_args=None,
    ):
        self.outputs = None if outputs is None else checks.whole_number(outputs, "outputs")
        conditional = as_conditional(conditional)
        self.likelihood: Likelihood = likelihood_or_noise(likelihood, noise_variance, only_gaussian=False)
        self.kernel = as_kernel(kernel)
        self.X = as_rows(X)
        blocks = blocks_or_number(inducing)
        chosen = isinstance(blocks[0], Unchosen)
        self.blocks = (Points(choose(self.kernel, self.X, blocks[0].size)),) if chosen else blocks
        warn_of_white_noise(self.kernel, "CollapsedGP")
        self.covariances = check_covariances(covariances, len(self.blocks))
        rows = self.X.shape[0]
        self.conditional = conditional.for_inputs(X, sum(block.size for block in self.blocks))
        groups = self.conditional.partition(rows)  # which checks them
        self.nan_is_missing = isinstance(mask, str)
        self.present = None if mask is None else checks.mask_of(mask, of=np.zeros(rows))
        self.weights = None if weights is None else checks.require_per_row(weights, "weights", rows)
        if weights is not None and not checks.is_traced(weights) and not np.all(np.asarray(weights) >= 0):
            raise ValueError("weights has negative or NaN entries; each says how often a row counts.")
        if weights is not None and groups is not None:
            raise ValueError(
                f"weights are given and conditional is {self.conditional!r}, which takes rows together: "
                "take 'tight' or 'prior'."
            )
        several = self.likelihood.num_latents > 1
        if several and self.outputs:
            raise ValueError(
                f"outputs is {self.outputs}, but {type(self.likelihood).__name__} mixes several latent values in one "
                "observation: for a kernel each take npgp.observe."
            )
        if self.closed_form:
            self._require_per_row(self.noise_variance, "noise_variance")
        elif self.conditional.parameter is not None:
            raise ValueError(
                f"conditional is {self.conditional!r}, which learns a parameter; its best value is known for Gaussian "
                "noise without a mask or weights alone: take 'tight', 'grouped' or 'prior'."
            )
        self.offset = checks.real(offset, "offset") if several else self._require_per_row(offset, "offset")
        checks.require_finite(self.offset, "offset")
        self.jitter = jitter
        self.max_steps = checks.whole_number(max_steps, "max_steps")
        if checks.is_traced(tolerance):
            raise TypeError("tolerance is traced; it must be a number that is known when the program is compiled.")
        self.tolerance = None if tolerance is None else float(checks.require_positive(tolerance, "tolerance"))
        self.start = None if start is None else self._checked_start(start)
        if self.outputs:
            self._projector()  # which checks the shapes; unused, the compiler drops it
        super().__init__((self.outputs,) if self.outputs else (), (rows,), validate_args=validate_args)
        self.count_axes()

    def _require_per_row(self, value: Any, name: str) -> Any:
        rows, Q = self.X.shape[0], self.outputs
        if Q is None or jnp.ndim(value) < 2:
            return checks.require_per_row(value, name, rows)
        if jnp.shape(value) not in ((Q, 1), (Q, rows)):
            raise ValueError(
                f"{name} has shape {jnp.shape(value)}; it must be (), ({rows},), ({Q}, 1) or ({Q}, {rows})."
            )
        return checks.real(value, name)

    def _checked_start(self, start: Any) -> Sites:
        if not isinstance(start, Sites):
            raise TypeError(f"start is {start!r:.80}; it must be what CollapsedGP(...).sites(y) returns.")
        rows = self.X.shape[0]
        for values in start:
            if jnp.shape(values)[-1:] != (rows,):
                raise ValueError(f"start has sites of shape {jnp.shape(values)}; X has {rows} rows.")
            if not checks.is_traced(values) and not np.all(np.isfinite(np.asarray(values))):
                raise ValueError("start has NaN or infinite entries: the search that found it has failed.")
        return Sites(*(jnp.asarray(values, self.X.dtype) for values in start))

    @property
    def closed_form(self) -> bool:
        """True where q(ε) needs no search: for Gaussian noise of rows that are all there, once each."""
        return isinstance(self.likelihood, Gaussian) and self.present is None and self.weights is None

    @property
    def has_mask(self) -> bool:
        """True if observations may be missing, and NaN there."""
        return self.present is not None

    @property
    def noise_variance(self) -> ArrayLike:
        """σ² of Gaussian noise."""
        return noise_variance_of(self.likelihood)

    @per_stacked
    def log_prob(self, value):
        """The bound for observations y of shape (..., N): (...)."""
        return self._each(CollapsedGP._bound, self._observations(value))

    def _bound(self, projector: Projector, rows: Observations, start: Sites | None) -> jax.Array:
        if not self.closed_form:
            return self._search(projector, rows, start).bound
        projection, residual = self._projected(projector)
        noise = rows.likelihood.variance  # type: ignore[attr-defined]
        return collapsed_bound(projection, residual, rows.y - rows.offset, noise, self.covariances, self.conditional)

    def shortfall(self, y: ArrayLike) -> jax.Array:
        """
        About how many nats ``log_prob(y)`` is below the bound at the very best q(ε): what one more step of the search
        would still move q(ε) by, in nats of KL divergence. A scalar; 0 for Gaussian noise.
        """
        rows = self._observations(y)
        if self.closed_form:
            return jnp.zeros((), self.X.dtype)
        kl_gap = one_program(lambda: self._each(CollapsedGP._optimum, rows)[1], options=STEPS)
        return jnp.sum(kl_gap)

    def condition(self, y: ArrayLike) -> Posterior:
        """
        The posterior of f, without the offset, given observations y of shape (..., N), or (outputs, N). For C latent
        values it has C functions, (C, ...).

        It warns where the search has not arrived, and where the jitter of the inducing values' covariance is no longer
        small beside the variance of Gaussian noise, as in float32 with a kernel whose variance is 1e4 times as large.

        :raises ValueError: if y has NaN or another number of rows, or is not possible for the likelihood.
        """
        rows = self._observations(y)
        if self.outputs and len(rows.y.shape) > 2:
            raise ValueError(f"y has shape {rows.y.shape}; condition takes one of {rows.y.shape[-2:]}.")
        posterior, kl_gap, share = one_program(lambda: self._conditioned(rows), options=STEPS)
        words = f"after {self.max_steps} steps another would move q(ε) by {{gap}}; raise max_steps, or use float64"
        warn_unless_arrived(kl_gap, f"CollapsedGP: {words}.")
        sentence = None if checks.is_traced(share) else linalg.jitter_beside_noise(float(share), self.X.dtype)
        if sentence:
            warnings.warn(f"CollapsedGP: {sentence}", RuntimeWarning, stacklevel=2)
        return posterior

    def sites(self, y: ArrayLike) -> Sites:
        """
        The Gaussian pseudo-observations, one for each row, given which the posterior of f is the best q(ε), for
        observations y of shape (..., N) or (outputs, N).

        They are what the data say about f, and hardly change with the hyperparameters: as ``start`` of other
        ``CollapsedGP`` they spare half of the search, as in NUTS over hyperparameters::

            mode = npgp.fit_collapsed(rng_key, model, X, y).params
            start = npgp.CollapsedGP(
                npgp.RBF(mode["lengthscale_auto_loc"]), X, Z, npgp.Bernoulli()
            ).sites(y)
            NUTS(model)  # whose CollapsedGP has start=start, tolerance=1e-2

        :raises ValueError: as for :meth:`condition`.
        """
        rows = self._observations(y)
        return one_program(lambda: self._each(CollapsedGP._sites, rows), options=STEPS)

    def _sites(self, projector: Projector, rows: Observations, start: Sites | None) -> Sites:
        if not self.closed_form:
            return self._search(projector, rows, start).sites.moved_by(rows.offset)
        noise = rows.likelihood.variance  # type: ignore[attr-defined]
        precision = jnp.broadcast_to(1.0 / jnp.asarray(noise, self.X.dtype), rows.y.shape)
        return Sites(precision, precision * rows.y)

    def _conditioned(self, rows: Observations) -> tuple[Posterior, jax.Array, jax.Array]:
        """The posterior, what the search leaves to go, and the jitter's share of the noise variance."""
        arrays, kl_gap = self._each(CollapsedGP._optimum, rows)
        q = (block_normal(kind, *values) for kind, values in zip(self.covariances, arrays, strict=True))
        projector = self._projector()
        share = jnp.zeros((), self.X.dtype)
        if isinstance(self.likelihood, Gaussian):
            share = jnp.max(projector.each(Projector.most_jitter)) / jnp.min(jnp.asarray(self.likelihood.variance))
        return Posterior(projector, tuple(q)), jnp.sum(kl_gap), share

    def _optimum(self, projector: Projector, rows: Observations, start: Sites | None):
        """The arrays of the best q(ε), and what the search leaves to go."""
        if self.closed_form:
            noise = rows.likelihood.variance  # type: ignore[attr-defined]
            q = gaussian_optimum(projector(self.X), rows.y - rows.offset, noise, self.covariances)
            kl_gap = jnp.zeros((), self.X.dtype)
        else:
            found = self._search(projector, rows, start)
            q, kl_gap = found.q, found.kl_gap
        return tuple((block.loc, block.scale_array) for block in q), kl_gap  # a Gaussian's S is one for all rows of y

    def log_likelihood(self, y: ArrayLike) -> jax.Array:
        """
        Log likelihood row by row given the posterior, ``log ∫ p(y_n | f_n) q(f_n) df_n``: (..., N).

        How well the posterior fits the data it has seen; not for LOO, which :func:`npgp.to_arviz` serves.
        """
        mean, variance = self.condition(y).mean_and_variance(self.X)
        rows = self._observations(y)
        return rows.likelihood.log_marginal(rows.y, mean + rows.offset, variance)

    def sample(self, key, sample_shape=()):
        """Joint draws from the prior with noise, at O(N³)."""
        checks.random_key(key, advice=checks.WITHOUT_SEED)
        L = in_double_if(self.kernel.wants_double, CollapsedGP._prior_factor, self)
        f_key, noise_key = jax.random.split(key)
        count = self.likelihood.num_latents
        shape = (() if count == 1 else (count,)) + sample_shape + self.batch_shape + self.event_shape
        f = linalg.matmul(L, jax.random.normal(f_key, shape, L.dtype)[..., None])[..., 0]
        return self.likelihood.sample(noise_key, self.offset + f)

    def _prior_factor(self) -> jax.Array:
        K = self._projector().each(lambda projector: covariance(projector.kernel, self.X))
        return linalg.cholesky(K, self.jitter)[0]

    def _projector(self) -> Projector | Members:
        if self.outputs is None:
            return factorize(self.kernel, self.blocks, self.jitter)
        return factorize_members(self.kernel, self.blocks, (self.outputs, 1), self.jitter).expand((self.outputs,))

    def _each(self, function: Callable[..., Any], rows: Observations) -> Any:
        """
        A function of this, the projector, the observations and where to start; with outputs of one each, of each of
        these by itself.

        :return: what it returns; for several outputs with theirs as the last axis of numbers, the first of all else.
        """
        of_these = functools.partial(CollapsedGP._each_here, function=function)
        return in_double_if(self.kernel.wants_double, of_these, self, rows)

    def _each_here(self, rows: Observations, function: Callable[..., Any]) -> Any:
        projector = self._projector()
        if self.outputs is None:
            return function(self, projector, rows, self.start)

        def per_output(x: Any) -> Any:
            if jnp.ndim(x) < 2 or jnp.shape(x)[0] != self.outputs:
                return jnp.broadcast_to(x, (self.outputs, *jnp.shape(x)))
            return x[:, 0] if jnp.shape(x)[1:] == (1,) else x

        arguments = rows.likelihood, rows.offset, rows.weights, self.start
        likelihood, offset, weights, start = jax.tree.map(per_output, arguments)
        y, present = jax.tree.map(lambda x: jnp.moveaxis(x, -2, 0), (rows.y, rows.present))
        each = Observations(y, likelihood, offset, present, weights)
        found = projector.each(functools.partial(function, self), each, start)
        return jnp.moveaxis(found, 0, -1) if isinstance(found, jax.Array) else found

    def _projected(self, projector: Projector) -> tuple[Projection, Residual]:
        projection = projector(self.X)
        learned = [kind != "mean-only" for kind in self.covariances]
        groups = self.conditional.partition(self.X.shape[0])
        return projection, residual_of(projector, self.X, projection, learned, groups)

    def _search(self, projector: Projector, rows: Observations, start: Sites | None) -> Searched:
        projection, residual = self._projected(projector)
        return searched_bound(
            projection,
            residual,
            rows,
            self.covariances,
            self.conditional,
            start=None if start is None else start.moved_by(-rows.offset),
            max_steps=self.max_steps,
            tolerance=self.tolerance,
        )

    def _observations(self, y: Any) -> Observations:
        """Observations, checked where they can be seen."""
        outputs = () if self.outputs is None else (self.outputs,)
        return Observations.of(
            y,
            self.likelihood,
            (..., *outputs, *self.event_shape),
            mask="nan" if self.nan_is_missing else self.present,
            offset=self.offset,
            weights=None if self.weights is None else jnp.asarray(self.weights, self.X.dtype),
            dtype=self.X.dtype,
            broadcast=True,
        )
