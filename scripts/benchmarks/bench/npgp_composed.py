"""npgp's deep GP and mixture of functions with a kernel each, as its how-to pages write them."""

from __future__ import annotations

from typing import Any

import composed_problems
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from composed_problems import JITTER
from npgp_fit import Fit
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from problems import LEARNING_RATE

import npgp


def learned(name: str, value: jax.Array) -> Any:
    """A positive parameter, in GPyTorch's parametrization."""
    return numpyro.param(name, value, constraint=constraints.softplus_positive)


class Composed:
    """
    Adam on minibatches.

    :param arrays: file of the problem.
    :param batch_size: rows of a step.
    :param conditional: of what is observed.
    :param draws: of what is between layers, for each row.
    :param natural: rate of natural gradients for q(ε); Adam there too if omitted.
    """

    #: Whether components that meet in a sum share one q(ε).
    joint = True

    def __init__(
        self,
        arrays: str,
        batch_size: int,
        conditional: str = "prior",
        learning_rate: float = LEARNING_RATE,
        draws: int = 1,
        natural: float | None = None,
    ):
        data = composed_problems.load(arrays, np.dtype(jnp.result_type(float)))
        self.start, self.conditional = {name: jnp.asarray(value) for name, value in data.items()}, conditional
        self.guide, self.batch_size = npgp.AutoSparseGP(self.model, joint=self.joint), batch_size
        loss = TraceMeanField_ELBO(num_particles=draws)
        optimizer = npgp.adam(learning_rate)
        if natural is not None:
            optimizer = npgp.natural_gradient(natural, optimizer)
        self.svi = SVI(self.model, self.guide, optimizer, loss)
        self.fit = Fit(self.svi, *self.rows(), init_params=self.q(), batch_size=batch_size)
        self.advance = self.fit.advance

    def model(self, X, y=None):
        raise NotImplementedError

    def rows(self) -> tuple[jax.Array, jax.Array]:
        """Inputs and targets, row by row."""
        raise NotImplementedError

    def q(self) -> dict[str, jax.Array]:
        """The start of the guide's parameters."""
        raise NotImplementedError

    @property
    def seconds(self) -> float:
        return self.fit.seconds

    def elbo(self) -> float:
        """Of the first rows, at the start, averaged over draws."""
        batch = [array[: self.batch_size] for array in self.rows()]
        params = self.svi.get_params(self.svi.init(jax.random.key(0), *batch, init_params=self.q()))
        loss = TraceMeanField_ELBO()
        keys = jax.random.split(jax.random.key(1), composed_problems.DRAWS)
        return -float(jnp.mean(jax.lax.map(lambda key: loss.loss(key, params, self.model, self.guide, *batch), keys)))


class Deep(Composed):
    """A deep GP of two layers."""

    def model(self, X, y=None):
        start = self.start
        layers = []
        for i in (1, 2):
            kernel = npgp.RBF(
                learned(f"lengthscale{i}", start[f"lengthscale{i}"]),
                variance=learned(f"variance{i}", start[f"variance{i}"]),
            )
            width, mean = (len(start["loc1"]), start["mean"]) if i == 1 else (1, None)
            points = numpyro.param(f"Z{i}", start[f"Z{i}"])
            layers.append(npgp.Layer(kernel, points, width=width, mean=mean, jitter=JITTER))
        f = npgp.DeepGP("f", layers).draw()
        noise = learned("noise", start["noise"])
        with npgp.plate("data", len(start["X"]), rows=len(X)):
            npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y, conditional=self.conditional)

    def rows(self):
        return self.start["X"], self.start["y"]

    def q(self):
        start = self.start
        inner = {"f.1.u.loc": start["loc1"][:, None], "f.1.u.scale_tril": start["tril1"][:, None]}
        return inner | {"f.2.u.loc": start["loc2"][0], "f.2.u.scale_tril": start["tril2"][0]}


class Mixture(Composed):
    """Outputs that are mixtures of functions with lengthscales and inducing inputs of their own."""

    joint = False  # as it is elsewhere

    def model(self, X, y=None):
        start = self.start
        outputs, functions = start["W"].shape
        W = numpyro.param("W", start["W"])
        with numpyro.plate("functions", functions, dim=-2):
            lengthscale = learned("lengthscale", start["lengthscale"][:, None])
            g = npgp.SparseGP("g", npgp.RBF(lengthscale), numpyro.param("Z", start["Z"]), jitter=JITTER).draw()
        noise = learned("noise", start["noise"][:, None])
        Y = None if y is None else y.T
        with numpyro.plate("outputs", outputs, dim=-2), npgp.plate("data", len(start["X"]), rows=len(X)):
            npgp.observe("Y", W @ g(X), npgp.Gaussian(variance=noise), obs=Y, conditional=self.conditional)

    def rows(self):
        return self.start["X"], self.start["Y"].T

    def q(self):
        return {"g.u.loc": self.start["loc"][:, None], "g.u.scale_tril": self.start["tril"][:, None]}

    def figures(self) -> dict[str, float]:
        """The mean log density of an observation in new rows."""
        params = self.fit.result.params
        g = npgp.posterior("g", self.model, self.guide, params, self.start["X"][:2])
        mean, variance = g.mixed(params["W"]).mean_and_variance(self.start["X_new"])
        total = variance + params["noise"]
        density = -0.5 * (jnp.log(2.0 * jnp.pi * total) + (self.start["Y_new"] - mean) ** 2 / total)
        return {"log_density": float(jnp.mean(density))}
