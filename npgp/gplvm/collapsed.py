"""
The collapsed Bayesian GPLVM: q(ε) at its optimum, x integrated out by ψ-statistics (Titsias & Lawrence 2010).

``p(x_n) = N(0, I_Q)``, ``q(x_n) = N(μ_n, diag s_n²)``, and D functions of x that share kernel and inducing inputs, each
with its own q(ε). The bound has no noise and depends on all rows at once: L-BFGS climbs it in a few hundred steps.
Minibatches, missing entries, other likelihoods, kernels, priors and guides of x are for
:class:`~npgp.gplvm.BayesianGPLVM`, whose parameters have the same names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.util import log_density

from npgp import checks
from npgp.collapsed.uncertain import UncertainInputGP
from npgp.conditionals import Conditional
from npgp.features import InducingBlock
from npgp.gplvm.start import Start
from npgp.kernels import RBF, Kernel
from npgp.model.sites import Hidden
from npgp.model.sparse_gp import SparseGP
from npgp.programs.compiled import STEPS, one_program
from npgp.training import lbfgs
from npgp.variational.posterior import Posterior

#: Differences of gradients that the directions of L-BFGS are made of.
MEMORY = 20
#: Compiler options of its steps: XLA's own. Fused loops over rows and pairs of inducing inputs take most of their time,
#: so that its emitters of such loops are worth a second more of compiling (M = 25 and 50: .74 and .82 of the time).
COMPILER_OPTIONS: dict[str, Any] = {}


class CollapsedFit(NamedTuple):
    """Result of :meth:`CollapsedGPLVM.fit`."""

    #: Parameters by site name, constrained.
    params: dict[str, jax.Array]
    #: The bound at the start and after each step, in nats, in float64.
    bounds: np.ndarray
    #: Whether the last steps gained less than the tolerance.
    converged: bool
    #: Why it ended.
    message: str

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return len(self.bounds) - 1


T = TypeVar("T")


def _in_double(compute: Callable[..., T], params: dict[str, Any], Y: ArrayLike) -> T:
    """
    What a function of parameters and data computes in float64, with the arrays of its result in JAX's own precision;
    of traced values, in that throughout.
    """
    if any(map(checks.is_traced, jax.tree.leaves((params, Y)))):
        return compute(params, Y)
    with jax.enable_x64(True):
        result = compute({name: jnp.asarray(value, float) for name, value in params.items()}, Y)
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)) if isinstance(x, jax.Array) else x, result)


@dataclass(frozen=True)
class CollapsedGPLVM:
    """
    A Bayesian GPLVM with Gaussian noise, collapsed::

        gplvm = npgp.gplvm.CollapsedGPLVM(
            npgp.gplvm.pca_start(key, Y, latent_dim=10, num_inducing=25)
        )
        result = gplvm.fit(Y)
        functions = gplvm.posterior(result.params, Y)

    It needs float64 (:class:`~npgp.collapsed.UncertainInputGP`), and computes in it by itself outside of ``jit``, where
    results are in JAX's own precision again. Inside, set ``jax_enable_x64``. To go on by SVI, or for whatever a
    :class:`~npgp.gplvm.BayesianGPLVM` can do, from its optimum::

        other = npgp.BayesianGPLVM(gplvm.start)
        npgp.fit(
            SVI(other.model, other.guide, ...),
            key,
            steps,
            Y,
            init_params=gplvm.svi_params(result.params, Y),
        )

    .. code-block:: python

        Y = np.random.default_rng(0).normal(size=(10, 4))
        start = npgp.gplvm.pca_start(key, Y, 2, 4)

        gplvm = npgp.gplvm.CollapsedGPLVM(start)  # gplvm.fit(Y) trains it

    :param start: where training starts; it fixes the numbers of rows, latent dimensions and inducing inputs.
    :param conditional: ``"tight"`` or ``"prior"`` (Titsias & Lawrence 2010).
    :param kernel: from lengthscale (Q,) and variance to a kernel made of ``RBF``, ``Linear`` and ``Constant`` by sums
        and scalings (:mod:`npgp.collapsed.psi`); RBF with one lengthscale each if omitted.
    :param penalty_draws: for ``"tight"``, as for :class:`~npgp.collapsed.UncertainInputGP`: the penalty is then
        estimated, with m_n a function of x_n as in the uncollapsed bound. If omitted it is in closed form, with one
        m_n for each row. Few draws can be exploited: evaluate the result with others.
    :param chunk_size: as for :func:`~npgp.collapsed.psi_statistics`.
    :raises ValueError: for several blocks of inducing inputs, or a kernel or a noise variance for each column.
    """

    start: Start
    _: KW_ONLY
    conditional: Conditional | str = "tight"
    kernel: Callable[..., Kernel] = RBF
    penalty_draws: ArrayLike | int | None = None
    chunk_size: int | None = None

    def __post_init__(self):
        first, *others = self.start.blocks
        if others:
            raise ValueError(
                f"start.inducing has {len(self.start.blocks)} blocks; the collapsed bound has one block of inducing "
                "inputs, BayesianGPLVM has several."
            )
        if isinstance(first, InducingBlock):
            raise TypeError(
                f"start.inducing is {type(first).__name__}; the collapsed bound has inducing inputs, an array, and "
                "BayesianGPLVM other features too."
            )
        for name in ("lengthscale", "variance"):
            if np.ndim(value := getattr(self.start, name)) > 1:
                raise ValueError(
                    f"start.{name} has shape {np.shape(value)}, one for each column; the collapsed bound has one "
                    "kernel for all, BayesianGPLVM may have one for each."
                )
        if np.ndim(self.start.noise_variance):
            raise ValueError(
                f"start.noise_variance has shape {np.shape(self.start.noise_variance)}; the collapsed bound has one "
                "for all columns, BayesianGPLVM may have one for each."
            )

    def model(self, Y: ArrayLike, mask: ArrayLike | str | None = None) -> None:
        """
        The model: the site ``y`` (D, N), whose density is the bound given q(x), and the factor ``x.kl``.

        Everything is a parameter: ``lengthscale``, ``variance``, ``inducing``, ``noise_variance``, ``x.loc`` and
        ``x.scale``. With an empty guide its ELBO is the bound.

        :param Y: all rows, (N, D).
        :param mask: True where an entry of Y is present, (N, D); the others may be NaN. Or ``"nan"``: those that are
            NaN are missing. Each column then has a q(ε) of its own covariance, at O(M³) for each.
        :raises ValueError: for Y of another shape, or with missing entries that no mask hides.
        """
        y, present = self._centered(Y, mask)
        gp = self._gp(present)
        with numpyro.plate("outputs", y.shape[0]):
            numpyro.sample("y", gp, obs=y)
        kl = 0.5 * (jnp.square(gp.loc) + jnp.square(gp.scale) - 1.0) - jnp.log(gp.scale)
        numpyro.factor("x.kl", -jnp.sum(kl))

    def bound(self, params: dict[str, jax.Array], Y: ArrayLike, *, mask: ArrayLike | str | None = None) -> jax.Array:
        """
        The bound on the log evidence of Y, in nats.

        :param params: parameters by site name.
        :param Y: all rows, (N, D).
        :param mask: which entries are present, as for :meth:`model`; likewise below.
        :raises KeyError: if a parameter is missing.
        """
        self._check_params(params)
        return _in_double(lambda params, Y: log_density(self.model, (Y, mask), {}, params)[0], params, Y)

    def fit(
        self,
        Y: ArrayLike,
        max_steps: int = 1000,
        *,
        mask: ArrayLike | str | None = None,
        params: dict[str, ArrayLike] | None = None,
        tolerance: float = 1e-4,
        window: int = 50,
        progress: bool = True,
    ) -> CollapsedFit:
        """
        Maximize the bound over all parameters, by L-BFGS in units of the lengthscales, in which a lengthscale changes
        the prior of x alone, and of the posteriors' widths (:class:`Coordinates`).

        :param Y: all rows, (N, D).
        :param max_steps: most steps.
        :param mask: which entries are present.
        :param params: where to start for the parameters that it names; the others start where ``start`` says.
        :param tolerance: it has converged when ``window`` steps together raise the bound by less than this, in nats per
            row.
        :param window: see ``tolerance``.
        :param progress: show a progress bar with the bound.
        :raises KeyError: for params of another name.
        :raises FloatingPointError: if the bound is not finite at the start.

        If it has not converged, a ``RuntimeWarning`` says so, and why.
        """
        self._centered(Y, mask)  # here, where its values can be seen

        def maximize(params, Y):
            return self._maximize(Y, mask, max_steps, params, tolerance, window, progress)

        result = CollapsedFit(*_in_double(maximize, params or {}, Y))
        if not result.converged:
            warnings.warn(
                f"CollapsedGPLVM.fit has not converged after {result.steps} steps: {result.message}. To go "
                "on from there, pass params=result.params.",
                RuntimeWarning,
                stacklevel=2,
            )
        return result

    def _maximize(self, Y, mask, max_steps, params, tolerance, window, progress) -> tuple:
        """Maximize the bound in the precision that JAX has; a tuple, which :func:`_in_double` converts."""
        sites = self._sites()
        if unknown := set(params) - set(sites):
            raise KeyError(f"params has {sorted(unknown)}, but the parameters are {sorted(sites)}.")
        rows = self.start.latents.shape[0]
        coordinates = Coordinates({name: constraint for name, (_, constraint) in sites.items()})
        values = {name: jnp.asarray(value) for name, (value, _) in sites.items()} | params
        result = lbfgs.minimize(
            lambda free, Y: -log_density(self.model, (Y, mask), {}, coordinates.constrained(free))[0],
            coordinates.free(values),
            jnp.asarray(Y),
            max_steps=max_steps,
            tolerance=tolerance * rows,
            window=window,
            memory=MEMORY,
            scales=coordinates.scales,
            options=COMPILER_OPTIONS,
            progress=progress,
            describe=lambda loss: f"bound {-loss:.6g}, per row {-loss / rows:.4g}",
        )
        constrained = coordinates.constrained
        return constrained(result.params), -result.losses, result.converged, result.message

    def posterior(
        self, params: dict[str, jax.Array], Y: ArrayLike, *, mask: ArrayLike | str | None = None
    ) -> Posterior:
        """
        The posterior of the D functions at the best q(ε), over latent space: means are (D, N).

        They are those of Y less ``start.offset``.

        :param params: parameters by site name.
        :param Y: all rows, (N, D).
        :param mask: which entries are present.
        :raises KeyError: if a parameter is missing.
        """
        self._check_params(params)

        def condition(params, Y):
            y, present = self._centered(Y, mask)
            with Hidden(), handlers.substitute(data=params):
                return one_program(lambda: self._gp(present).condition(y), options=STEPS)

        return _in_double(condition, params, Y)

    def svi_params(
        self, params: dict[str, jax.Array], Y: ArrayLike, *, mask: ArrayLike | str | None = None
    ) -> dict[str, jax.Array]:
        """
        Parameters at which a :class:`~npgp.gplvm.BayesianGPLVM` with the same start has this q(x) and the best q(ε).

        :param params: parameters by site name.
        :param Y: all rows, (N, D).
        :param mask: which entries are present.
        :raises KeyError: if a parameter is missing.
        """
        posterior = self.posterior(params, Y, mask=mask)
        gp = SparseGP("f", posterior.projector.kernel, posterior.projector.blocks)
        return {**params, **gp.params(posterior.q)}

    def init_params(self) -> dict[str, jax.Array]:
        """Parameters at the start, by site name."""
        return {name: value for name, (value, _) in self._sites().items()}

    def _gp(self, present: ArrayLike | None = None) -> UncertainInputGP:
        start, positive = self.start, constraints.positive
        shape, dtype = start.latents.shape, jnp.result_type(float)

        def param(name: str, value: ArrayLike, constraint: Any = constraints.real) -> jax.Array:
            return numpyro.param(name, jnp.asarray(value, dtype), constraint=constraint)

        kernel = self.kernel(
            lengthscale=param("lengthscale", jnp.broadcast_to(jnp.asarray(start.lengthscale), shape[1:]), positive),
            variance=param("variance", start.variance, positive),
        )
        return UncertainInputGP(
            kernel,
            param("x.loc", start.latents),
            param("x.scale", jnp.full(shape, start.latent_scale), positive),
            param("inducing", start.blocks[0]),  # type: ignore[arg-type]
            noise_variance=param("noise_variance", start.noise_variance, positive),
            conditional=self.conditional,
            penalty_draws=self.penalty_draws,
            mask=present,
            chunk_size=self.chunk_size,
        )

    def _centered(self, Y: ArrayLike, mask: ArrayLike | str | None) -> tuple[jax.Array, ArrayLike | None]:
        """Outputs as rows, (D, N), less their offset, and where they are present; ``None`` for everywhere."""
        expected = (self.start.latents.shape[0], self.start.offset.shape[0])
        Y, present = checks.observed(Y, expected, mask, name="Y")
        if not checks.is_traced(present) and np.all(True if present is None else present):
            present = None
        dtype = jnp.result_type(float)
        y = jnp.asarray(Y, dtype)
        y = y if present is None else jnp.where(present, y, 0.0)
        y = y.T - jnp.asarray(self.start.offset, dtype)[:, None]
        return y, None if present is None else present.T

    def _sites(self) -> dict[str, tuple[jax.Array, Any]]:
        """Start value and constraint of each parameter."""
        trace = handlers.trace(handlers.seed(self._gp, 0)).get_trace()
        sites = {name: site for name, site in trace.items() if site["type"] == "param"}
        return {
            name: (site["value"], site["kwargs"].get("constraint", constraints.real)) for name, site in sites.items()
        }

    def _check_params(self, params: dict[str, Any]) -> None:
        names = sorted(self._sites())
        if missing := [name for name in names if name not in params]:
            raise KeyError(f"params has no {missing[0]!r}; the parameters are {names}.")


#: What is in units of the lengthscales.
IN_LENGTHSCALES = ("x.loc", "x.scale", "inducing")
#: An inducing input's scale in standard deviations of q(x): all rows around hold it.
INDUCING_SCALE = 0.5
#: Scales of logarithms of the noise variance, the lengthscales, and of all else. All rows hold them, and first steps
#: that go far in them end where all data are noise.
NOISE_SCALE, LENGTHSCALE_SCALE, SCALE = 0.05, 0.02, 0.15


class Coordinates:
    """
    From parameters of a collapsed GPLVM to free coordinates and back, in which its bound is climbed in few steps.

    A latent space in units of its lengthscales: ``μ/ℓ``, ``log(s/ℓ)`` and ``Z/ℓ`` are free, so that ``log ℓ`` changes
    only the divergence from the prior, and pruning a dimension is one short way. Then each coordinate is scaled by
    about what the bound changes with by 1: means and inducing inputs by the standard deviations of q(x), which differ
    by orders of magnitude between dimensions and change as training goes, and so are taken anew now and then.

    :param constraints: of each parameter, by name.
    """

    def __init__(self, constraints: Mapping[str, Any]):
        self.transforms = {name: biject_to(constraint) for name, constraint in constraints.items()}

    def free(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Coordinates of parameters, of the same names."""
        ell = params["lengthscale"]
        scaled = {name: value / ell if name in IN_LENGTHSCALES else value for name, value in params.items()}
        return {name: self.transforms[name].inv(value) for name, value in scaled.items()}

    def constrained(self, free: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Parameters at coordinates."""
        scaled = {name: self.transforms[name](value) for name, value in free.items()}
        ell = scaled["lengthscale"]
        return {name: value * ell if name in IN_LENGTHSCALES else value for name, value in scaled.items()}

    def scales(self, free: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """About how far each coordinate is to go for the bound to change by 1."""
        logs = free["x.scale"]
        known = {
            "x.loc": jnp.exp(logs),
            "x.scale": jnp.ones(()),
            "inducing": INDUCING_SCALE * jnp.exp(jnp.mean(logs, axis=0)),
            "noise_variance": jnp.asarray(NOISE_SCALE),
            "lengthscale": jnp.asarray(LENGTHSCALE_SCALE),
        }
        return {name: known.get(name, jnp.asarray(SCALE)) for name in free}
