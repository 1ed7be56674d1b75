"""GPJax's like of the first example in npgp's README: the same data, a sparse GP by Adam, and a picture of it."""

import gpjax as gpx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax as ox

rng = np.random.default_rng(0)
X = rng.uniform(0.0, 6.0, (120, 1)).astype(np.float32)
y = (np.sin(2.0 * X) + 0.2 * rng.normal(size=X.shape)).astype(np.float32)
data = gpx.Dataset(X=jnp.asarray(X), y=jnp.asarray(y))

prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=gpx.kernels.RBF(), jitter=1e-5)
q = gpx.variational_families.WhitenedVariationalGaussian(
    model=prior * gpx.likelihoods.Gaussian(), inducing_inputs=jnp.linspace(0.0, 6.0, 20, dtype=jnp.float32)[:, None]
)
q, history = gpx.fit(
    model=q,
    objective=lambda q, data: -gpx.objectives.elbo(q, data),
    train_data=data,
    optim=ox.adam(0.05),
    num_iters=400,
    key=jax.random.key(0),
    verbose=False,
)
grid = np.linspace(0.0, 6.0, 50, dtype=np.float32)[:, None]
f = q.condition(data)(jnp.asarray(grid), covariance="diagonal")
mean, deviation = np.asarray(f.mean), np.sqrt(np.asarray(f.variance))
plt.plot(X[:, 0], y[:, 0], ".")
plt.plot(grid[:, 0], mean)
plt.fill_between(grid[:, 0], mean - 2.0 * deviation, mean + 2.0 * deviation, alpha=0.3)
plt.savefig("first.png")
