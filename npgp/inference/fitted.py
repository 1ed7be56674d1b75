"""``infer``: guide, training and what it led to, in one call."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO

from npgp import checks
from npgp.collapsed import EnoughPoints, enough_points
from npgp.collapsed.lengthscales import MOST_POINTS
from npgp.io import load, save, to_arviz
from npgp.model import AutoSparseGP, posterior
from npgp.model.guides import set_up
from npgp.model.posteriors import statement_about
from npgp.model.sites import ROWS_TRAINED_ON
from npgp.programs.compiled import STEPS, one_program
from npgp.training import Convergence, FitResult, PosteriorCheck, TrainingWarning, adam, check_posterior, fit
from npgp.variational.averages import PosteriorMixture
from npgp.variational.parameterizations import POINTS, parts

#: Arguments of ``fit`` that are none of the model's.
FIT_OPTIONS = frozenset(inspect.signature(fit).parameters) - {"svi", "rng_key", "args", "kwargs"}
#: So many draws of a model are simulated at once.
AT_ONCE = 50


@dataclass(frozen=True)
class Inference:
    """
    An approximate posterior, and the model and data that it is of: what :func:`npgp.infer` returns.

    .. code-block:: python

        fitted = npgp.inference.Inference(model, guide, result.params, (X, y))
        fitted.save("fitted.npz")
        again = npgp.inference.Inference.load("fitted.npz", model, X, y)
        mean, variance = again.posterior("f", draws=10).mean_and_variance(X)

    :param model: the model.
    :param guide: its guide.
    :param params: trained parameters, by site name.
    :param args: positional arguments of the model, for all rows.
    :param kwargs: keyword arguments of the model, observations among them.
    :param convergence: how training ended.
    :param result: all that :func:`npgp.fit` returned; ``None`` after :meth:`load`.
    """

    model: Callable
    guide: Any
    params: Mapping[str, Any]
    args: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    convergence: Convergence | None = None
    result: FitResult | None = None

    def __repr__(self) -> str:
        """The guide and how training ended, without parameters and data."""
        return "\n".join(map(str, filter(None, [self.guide, self.convergence])))

    def posterior(self, name: str, draws: int = 100, rng_key: jax.Array | None = None) -> PosteriorMixture:
        """
        The posterior of a function of the model, averaged over the other sites: :func:`npgp.posterior`.

        :param name: the component's name.
        :param draws: number of draws of the other sites.
        :param rng_key: for these draws.
        """
        return posterior(
            name, self.model, self.guide, self.params, *self.args, draws=draws, rng_key=rng_key, **self.kwargs
        )

    def samples(self, rng_key: jax.Array, num_draws: int = 1000) -> dict[str, jax.Array]:
        """
        Draws of all latent sites, and of what is deterministic given these, (num_draws, …) each.

        :param rng_key: random key.
        :param num_draws: number of draws.
        """
        shape = (checks.whole_number(num_draws, "num_draws"),)
        return self.guide.sample_posterior(rng_key, self.params, *self.args, sample_shape=shape, **self.kwargs)

    def predict(self, rng_key: jax.Array, *args, num_draws: int = 1000, **kwargs) -> dict[str, jax.Array]:
        """
        New observations, ``y``, and the GP values behind them, ``y.latent``, by compiled code that simulates fifty
        draws at a time.

        :param rng_key: random key.
        :param args: positional arguments of the model, at new rows.
        :param num_draws: number of draws.
        :param kwargs: keyword arguments of the model, without observations.
        :return: arrays by site name, (num_draws, rows) for an observed site.
        """
        num_draws = checks.whole_number(num_draws, "num_draws")
        at_once = min(num_draws, AT_ONCE)
        predictive = Predictive(self.model, guide=self.guide, params=self.params, num_samples=at_once)

        def simulate():
            keys = jax.random.split(rng_key, -(-num_draws // at_once))
            return lax.map(lambda key: predictive(key, *args, **kwargs), keys)

        drawn = one_program(simulate, options=STEPS)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_draws], drawn)

    def check(self, rng_key: jax.Array | None = None, draws: int = 2000) -> PosteriorCheck:
        """
        Estimate whether the guide's posterior is to be trusted: :func:`npgp.check_posterior`.

        :param rng_key: random key.
        :param draws: number of draws.
        """
        key = jax.random.key(0) if rng_key is None else rng_key
        return check_posterior(key, self.model, self.guide, self.params, *self.args, draws=draws, **self.kwargs)

    def enough_points(self, name: str, rng_key: jax.Array | None = None, tolerance: float = 0.01) -> EnoughPoints:
        """
        Compare the bound with that of twice a function's inducing points, at one draw of the other sites:
        :func:`npgp.collapsed.enough_points`, of the function's own statement in the model.

        .. code-block:: python

            fitted = npgp.inference.Inference(model, guide, result.params, (X, y))
            print(fitted.enough_points("f"))

        :param name: the component's name.
        :param rng_key: for the draw.
        :param tolerance: what more points may gain, in nats for each row.
        :raises ValueError: unless one statement observes it, as a term of the only latent value, without a factor.
        """
        key = jax.random.key(0) if rng_key is None else rng_key
        stated = statement_about(name, self.model, self.guide, self.params, key, *self.args, **self.kwargs)
        return enough_points(
            stated.posterior,
            stated.X,
            stated.y,
            stated.likelihood,
            offset=stated.offset,
            mask=stated.mask,
            tolerance=tolerance,
        )

    def to_arviz(self, rng_key: jax.Array | None = None, num_draws: int = 1000, **options) -> Any:
        """
        Draws for ArviZ: :func:`npgp.to_arviz`.

        :param rng_key: random key.
        :param num_draws: number of draws.
        :param options: of :func:`npgp.to_arviz`.
        """
        key, draws_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
        draws, params = self.samples(draws_key, num_draws), self.params
        options = {"params": params, "convergence": self.convergence, **options, **self.kwargs}
        return to_arviz(key, self.model, draws, *self.args, **options)

    def save(self, path: str | os.PathLike) -> None:
        """
        Save parameters, and how training ended, for :meth:`load`; model and data are not in the file.

        :param path: of the file, for :func:`npgp.save`.
        """
        save(path, {"params": jax.device_get(dict(self.params)), "convergence": self.convergence})

    @classmethod
    def load(
        cls, path: str | os.PathLike, model: Callable, *args, guide: Callable | None = None, **kwargs
    ) -> Inference:
        """
        What :meth:`save` saved, with the model and the data that it is of.

        :param path: of the file.
        :param model: the model, as it was.
        :param args: its positional arguments, as they were.
        :param guide: as for :func:`npgp.infer`.
        :param kwargs: its keyword arguments, as they were.
        :raises ValueError: for a file that is not of :meth:`save`.
        """
        saved = load(path)
        if not (isinstance(saved, dict) and saved.keys() == {"params", "convergence"}):
            raise ValueError(f"{os.fspath(path)!r} is not a file that save of an npgp.inference.Inference wrote.")
        guide = AutoSparseGP(model) if guide is None else guide
        with_svi = SVI(model, guide, adam(0.05), TraceMeanField_ELBO())
        set_up(guide, args, kwargs)
        one_program(lambda: with_svi.init(jax.random.key(0), *args, **kwargs).rng_key)
        return cls(model, guide, saved["params"], args, kwargs, saved["convergence"])


def infer(
    model: Callable,
    rng_key: jax.Array,
    *args,
    guide: Callable | None = None,
    options: Mapping[str, Any] | None = None,
    grow: float | None = None,
    **kwargs,
) -> Inference:
    """
    Train a model's posterior until it has arrived. In short::

        guide = npgp.AutoSparseGP(model)
        svi = SVI(model, guide, npgp.adam(0.05), TraceMeanField_ELBO(num_particles=4))
        result = npgp.fit(svi, rng_key, None, *args, **kwargs)

    and what one does with these afterwards. Take these three lines yourself for another optimizer, loss or loop.

    .. code-block:: python

        quick = npgp.training.Arrival(tolerance=0.3, window=100)
        fitted = npgp.infer(
            curve, key, X, y=y, options={"callbacks": [quick], "progress": False}
        )
        print(fitted.convergence)
        f = fitted.posterior("f").mean(X)
        new = fitted.predict(key, X + 0.1)["y"]

    With ``grow``, inducing points whose number alone the model says (``inducing=20``) are as many as it takes: after
    each training twice as many of each function whose bound these raise by more than that, in nats for each row
    (:meth:`Inference.enough_points`), and training goes on with them::

        fitted = npgp.infer(model, key, X, y=y, grow=0.001)

    A nat in a thousand rows is what learned hyperparameters take that are within 5% of those without points; for
    predictions ten are enough. ``fitted.params["f.u.inducing"]`` has the points.

    :param model: the model.
    :param rng_key: random key.
    :param args: positional arguments of the model, for all rows.
    :param guide: its guide; :class:`npgp.AutoSparseGP` if omitted.
    :param options: of :func:`npgp.fit`, ``{"batch_size": 500}`` say; no ``checkpoints`` with ``grow``.
    :param grow: what twice the inducing points may gain, in nats for each row, where those at hand are enough; ``None``
        for the number that the model says.
    :param kwargs: keyword arguments of the model, observations among them.
    :raises ValueError: as :func:`npgp.fit` does.
    :raises TypeError: for an option of :func:`npgp.fit` among the model's arguments.
    """
    for name in kwargs:
        if name in FIT_OPTIONS:
            raise TypeError(f"{name} is an option of npgp.fit, and cannot be an argument of the model: {_where(name)}.")
    guide = AutoSparseGP(model) if guide is None else guide
    svi = SVI(model, guide, adam(0.05), TraceMeanField_ELBO(num_particles=4))
    options = dict(options or {})
    if grow is None:
        result = fit(svi, rng_key, None, *args, **options, **kwargs)
        return Inference(model, guide, result.params, args, kwargs, result.convergence, result)
    checks.require_positive(grow, "grow")
    if options.get("checkpoints") is not None:
        raise ValueError(
            "options has checkpoints, which are of one training, and grow takes several: leave out one of them."
        )
    while True:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "npgp.fit: what inducing points leave", TrainingWarning)
            result = fit(svi, rng_key, None, *args, **options, **kwargs)
        fitted = Inference(model, guide, result.params, args, kwargs, result.convergence, result)
        start, words = _with_more_points(fitted, rng_key, grow)
        if words is not None:
            warnings.warn(f"npgp.infer: grow={grow:g}, but {words}", TrainingWarning, stacklevel=2)
        if start is None:
            return fitted
        options["init_params"] = start


def _where(option: str) -> str:
    """Where to give an option of :func:`npgp.fit` that was given to :func:`infer` by its name."""
    if option in ("steps", "num_steps"):
        return "infer trains until the posterior has arrived, and npgp.fit for a number of steps"
    return f"write options={{{option!r}: ...}}"


def _with_more_points(
    fitted: Inference, rng_key: jax.Array, tolerance: float
) -> tuple[dict[str, Any] | None, str | None]:
    """
    Parameters to train on from, with twice the points of the functions that have too few, ``None`` if none has; and a
    sentence if there are no more points to be had.
    """
    params = {name: value for name, value in fitted.params.items() if name != ROWS_TRAINED_ON}
    chosen = {site: own for site, own in parts(params).items() if POINTS in own}
    if not chosen:
        return None, "no SparseGP of the model has a number for its inducing points: write inducing=20, say."
    start = None
    for site, own in sorted(chosen.items()):
        component = site.rpartition(".")[0]
        try:
            found = fitted.enough_points(component, rng_key, tolerance)
        except ValueError as error:
            return None, f"whether {component!r} has enough points is unknown: {error}"
        if found.enough:
            continue
        if found.features >= MOST_POINTS or not found.more:
            return None, f"the {found.features} inducing points of {component!r} are not enough: {found}"
        # Parameters of q(ε) are of the points at hand.
        start = {name: value for name, value in (start or params).items() if name.rpartition(".")[0] != site}
        start[f"{site}.{POINTS}"] = jnp.concatenate([own[POINTS], found.added])
    return start, None
