# %% [markdown]
# # A step: one lengthscale cannot, two layers can
#
# Between flat parts a function jumps. A GP with a stationary kernel has one lengthscale for all of it, and rings, or
# takes the jump for noise. A deep GP (Damianou & Lawrence 2013) is a function of a function: the first stretches the
# axis where the jump is, and the second sees a slope. Here are 60 simulated rows, a component of two layers by SVI
# (Salimbeni & Deisenroth 2017), and both models exactly, by NUTS.

# %%
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO

import npgp

DRAWS = 300
plt.rcParams["figure.dpi"] = 150
jax.config.update("jax_enable_x64", True)

# %%
rng = np.random.default_rng(1)
X = np.sort(rng.uniform(-1.0, 1.0, (60, 1)), axis=0)


def step(x):
    return np.where(x > 0.0, 1.0, -1.0)


y = step(X[:, 0]) + 0.05 * rng.normal(size=60)
Z = np.linspace(-1.0, 1.0, 30)[:, None]


def hyperparameters(layers):
    noise = numpyro.sample("noise", dist.LogNormal(-2.5, 1.0))
    kernels = [npgp.RBF(numpyro.sample(f"lengthscale {i}", dist.LogNormal(-0.7, 0.7))) for i in range(1, layers + 1)]
    return noise, kernels


def model(X, y=None, layers=2):
    noise, kernels = hyperparameters(layers)
    f = npgp.DeepGP("f", [npgp.Layer(kernel, Z) for kernel in kernels]).draw()
    with numpyro.plate("rows", len(X)):
        npgp.observe("y", f(X), npgp.Gaussian(scale=noise), obs=y)


data = (X, y)


# %% [markdown]
# Exactly: given the values of the first function at the rows, drawn by NUTS, the second is a GP of these.


# %%
def exact(X, y, layers):
    noise, kernels = hyperparameters(layers)
    h = X
    if layers == 2:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([len(X)]).to_event(1))
        L = jnp.linalg.cholesky(kernels[0](X) + 1e-6 * jnp.eye(len(X)))
        h = numpyro.deterministic("h", X + (L @ z)[:, None])
    numpyro.sample("y", dist.MultivariateNormal(0.0, kernels[-1](h) + noise**2 * jnp.eye(len(X))), obs=y)


def predicted(key, draw, X_new, layers):
    """Mean and variance of the function at new inputs, given a draw; the first layer's values there are drawn."""
    h, h_new = X, X_new
    if layers == 2:
        kernel = npgp.RBF(draw["lengthscale 1"])
        K = kernel(X) + 1e-6 * jnp.eye(len(X))
        gain = jnp.linalg.solve(K, kernel(X, X_new)).T
        left = kernel(X_new) - gain @ kernel(X, X_new) + 1e-6 * jnp.eye(len(X_new))
        noise = jax.random.normal(key, (len(X_new), 1), X.dtype)
        h, h_new = draw["h"], X_new + gain @ (draw["h"] - X) + jnp.linalg.cholesky(left) @ noise
    kernel = npgp.RBF(draw[f"lengthscale {layers}"])
    cross = kernel(h, h_new)
    gain = jnp.linalg.solve(kernel(h) + draw["noise"] ** 2 * jnp.eye(len(X)), cross).T
    return gain @ y, 1.0 - jnp.sum(gain * cross.T, axis=1)


grid = np.linspace(-1.2, 1.2, 121)[:, None]
X_test = rng.uniform(-1.0, 1.0, (400, 1))
y_test = step(X_test[:, 0]) + 0.05 * rng.normal(size=400)
truth = step(X_test[:, 0])
rows, curves, bends = {}, {}, {}


def keep(how, layers, mean, variance, density):
    """The curve on the grid; of the test inputs, the error of the mean and the density of new rows."""
    error = np.sqrt(np.mean((mean[len(grid) :] - truth) ** 2))
    rows[how, layers] = f"{error:.3f}", f"{np.mean(density):+.2f}"
    curves[how, layers] = mean[: len(grid)], np.sqrt(variance[: len(grid)])


# %%
X_all = np.concatenate([grid, X_test])
for layers in (1, 2):
    this = partial(model, layers=layers)
    guide = npgp.AutoSparseGP(this)
    svi = SVI(this, guide, npgp.adam(0.03), TraceMeanField_ELBO())
    # Until the posterior stands still.
    params = npgp.fit(svi, jax.random.key(0), None, *data, progress=False).params
    f = npgp.posterior("f", this, guide, params, *data, draws=30)
    density = f.log_density(X_test, y_test, lambda sites: npgp.Gaussian(scale=sites["noise"]))
    keep("SVI", layers, *f.mean_and_variance(X_all), density)

    mcmc = MCMC(NUTS(partial(exact, layers=layers)), num_warmup=DRAWS, num_samples=DRAWS, progress_bar=False)
    mcmc.run(jax.random.key(2), *data)
    draws = mcmc.get_samples()
    at = jax.vmap(partial(predicted, X_new=X_all, layers=layers))
    means, variances = at(jax.random.split(jax.random.key(3), DRAWS), draws)
    new = dist.Normal(means, jnp.sqrt(variances + draws["noise"][:, None] ** 2)).log_prob(
        jnp.pad(y_test, (len(grid), 0))
    )
    density = jax.nn.logsumexp(new[:, len(grid) :], axis=0) - np.log(DRAWS)
    keep("NUTS", layers, means.mean(0), variances.mean(0) + means.var(0), density)

# %%
print(f"{'':>16}{'RMSE':>8}{'log density of a new row':>28}")
for (how, layers), (error, density) in sorted(rows.items(), key=lambda row: row[0][1]):
    print(f"{how:>5}, {layers} layer{'' if layers == 1 else 's':1}{error:>10}{density:>28}")

# %% [markdown]
# One layer rings on both sides of the jump, by either method. With two, the band is narrow in the flat parts and wide
# at the jump alone, and a new row is about twice as probable. Beyond the data NUTS is less sure than SVI.

# %%
figure, axes = plt.subplots(1, 2, figsize=(7.5, 2.9), layout="constrained", sharey=True)
for ax, layers in zip(axes, (1, 2), strict=True):
    ax.plot(X[:, 0], y, ".", color="0.6", ms=3, label="rows")
    for how, color in (("SVI", "C0"), ("NUTS", "C1")):
        mean, sd = curves[how, layers]
        ax.plot(grid[:, 0], mean, color, label=f"{how}, mean and 90%")
        ax.fill_between(grid[:, 0], mean - 1.645 * sd, mean + 1.645 * sd, color=color, alpha=0.2, lw=0)
    ax.set(title=f"{layers} layer{'' if layers == 1 else 's'}", xlabel="x", ylim=(-1.9, 1.9))
axes[0].set_ylabel("f(x)")
axes[0].legend(frameon=False, fontsize=8, loc="upper left")
