"""GPJax's SVGP: ``WhitenedVariationalGaussian``, ``objectives.elbo``, and the step of its ``fit``, compiled once.

``gpjax.fit`` compiles its scan anew at every call. The same step, with GPJax's own batches, is put in a scan that is
compiled once, and goes on where it was.
"""

from __future__ import annotations

from functools import partial

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import optax
from gpjax.fit import get_batch
from jax import lax
from jax_process import clear, configure, device_memory  # noqa: F401 (asked for by the worker)
from problems import LEARNING_RATE, Problem


def versions() -> dict[str, str]:
    return {"gpjax": gpx.__version__, "jax": jax.__version__, "backend": jax.default_backend()}


def make(kind: str, problem: Problem):
    return SVGP(problem)


def objective(q, data):
    return -gpx.objectives.elbo(q, data)


class SVGP:
    """Adam on minibatches, many steps in a device call."""

    def __init__(self, problem: Problem):
        self.problem, p = problem, problem
        kernel = gpx.kernels.Matern32(lengthscale=jnp.asarray(p.lengthscale), variance=jnp.asarray(p.variance, p.dtype))
        prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=kernel, jitter=p.jitter)
        likelihood = gpx.likelihoods.Gaussian(obs_stddev=jnp.sqrt(jnp.asarray(p.noise, p.dtype)))
        self.q = gpx.variational_families.WhitenedVariationalGaussian(
            model=prior * likelihood,
            inducing_inputs=jnp.asarray(p.Z),
            variational_mean=jnp.asarray(p.loc)[:, None],
            variational_root_covariance=jnp.asarray(p.scale_tril),
        )
        self.data = gpx.Dataset(X=jnp.asarray(p.X), y=jnp.asarray(p.y)[:, None])
        adam = optax.adam(LEARNING_RATE)
        arrays, self.static = eqx.partition(self.q, eqx.is_array)
        self.state = arrays, adam.init(arrays)
        self.key, static, batch_size = jax.random.key(0), self.static, p.batch_size

        @partial(jax.jit, donate_argnums=0)
        def run(state, data, keys, steps):
            def step(i, carry):
                arrays, optim_state, _ = carry
                q = eqx.combine(arrays, static)
                loss, gradient = eqx.filter_value_and_grad(objective)(q, get_batch(data, batch_size, keys[i]))
                updates, optim_state = adam.update(gradient, optim_state, arrays)
                return eqx.apply_updates(arrays, updates), optim_state, loss

            *state, loss = lax.fori_loop(0, steps, step, (*state, jnp.zeros((), data.X.dtype)))
            return tuple(state), loss

        self.run = run

    def advance(self, steps: int) -> None:
        self.key, key = jax.random.split(self.key)
        self.state, loss = self.run(self.state, self.data, jax.random.split(key, 1000), steps)
        if not jnp.isfinite(loss):
            raise FloatingPointError(f"The loss became {loss}.")

    def elbo(self) -> float:
        X, y = self.problem.batch
        batch = gpx.Dataset(X=jnp.asarray(X), y=jnp.asarray(y)[:, None], n_total=len(self.problem.y))
        return float(eqx.filter_jit(gpx.objectives.elbo)(self.q, batch)) + self.problem.jitter_of_rows

    def predictor(self):
        q, X_new = eqx.combine(self.state[0], self.static), jnp.asarray(self.problem.X_new)
        posterior = q.condition(self.data)

        @eqx.filter_jit
        def predict(posterior, X):
            f = posterior(X, covariance="diagonal")
            return f.mean, f.variance

        return lambda: jax.block_until_ready(predict(posterior, X_new))
