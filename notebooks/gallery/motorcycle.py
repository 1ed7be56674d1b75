# %% [markdown]
# # Noise that changes: a motorcycle's impact
#
# Silverman's (1985) accelerations of a helmet after an impact are the standard example of noise that depends on the
# input: next to none before the impact, much after it. Here are 120 rows simulated alike. The model has two GPs, one
# for the mean and one for the logarithm of the noise's standard deviation (Goldberg, Williams & Bishop 1998).

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO, init_to_median

import npgp

DRAWS = 300
plt.rcParams["figure.dpi"] = 150

# %%
rng = np.random.default_rng(133)
time = np.sort(rng.uniform(2.0, 58.0, 120))


def acceleration(t):
    return -1.35 * np.exp(-(((t - 21.0) / 5.0) ** 2)) + 0.5 * np.exp(-(((t - 33.0) / 5.0) ** 2))


def noise_sd(t):
    return 0.03 + 0.25 / (1.0 + np.exp(-(t - 15.0) / 1.5)) * np.exp(-np.maximum(t - 35.0, 0.0) / 25.0)


y = acceleration(time) + noise_sd(time) * rng.normal(size=120)
X = time[:, None] / 10.0
Z = np.linspace(0.2, 5.8, 20)[:, None]
noise_kernel = npgp.RBF(1.5)  # of the logarithm of the standard deviation, about its level


def mean_kernel():
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    return npgp.Matern52(lengthscale, variance=scale**2)


def model(X, y=None):
    f = npgp.SparseGP("f", mean_kernel(), Z).draw()
    g = npgp.SparseGP("g", noise_kernel + npgp.kernels.Constant(variance=4.0), Z).draw()
    with numpyro.plate("rows", len(X)):
        npgp.observe("y", (f(X), g(X)), npgp.likelihoods.HeteroscedasticGaussian(), obs=y)


data = (X, y)

# %% [markdown]
# By SVI with the default guide, and, as the reference, exact GPs by NUTS: given g, the mean f is integrated out in
# closed form, and comes back by the usual formulas for each draw.

# %%
guide = npgp.AutoSparseGP(model)
svi = SVI(model, guide, npgp.adam(0.03), TraceMeanField_ELBO())
result = npgp.fit(svi, jax.random.key(0), None, *data, progress=False)  # until the posterior stands still
print(result.convergence)
params = result.params
draws = {"SVI": guide.sample_posterior(jax.random.key(1), params, *data, sample_shape=(2000,))}


def exact(X, y):
    K = mean_kernel()(X)
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([len(X)]).to_event(1))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    g = numpyro.deterministic("g", level + jnp.linalg.cholesky(noise_kernel(X) + 1e-4 * jnp.eye(len(X))) @ z)
    L = jnp.linalg.cholesky(K + jnp.diag(jnp.exp(2.0 * g)))
    numpyro.sample("y", dist.MultivariateNormal(0.0, scale_tril=L), obs=y)
    half = jax.scipy.linalg.solve_triangular(L, jnp.column_stack([y, K]), lower=True)
    numpyro.deterministic("f", half[:, 1:].T @ half[:, 0])
    numpyro.deterministic("variance of f", jnp.diag(K) - jnp.sum(half[:, 1:] ** 2, axis=0))


nuts = NUTS(exact, init_strategy=init_to_median, max_tree_depth=6)
mcmc = MCMC(nuts, num_warmup=DRAWS, num_samples=DRAWS, progress_bar=False)
mcmc.run(jax.random.key(2), *data)
draws["NUTS"] = mcmc.get_samples()

# %%
print(f"{'':>16}{'SVI':>16}{'exact, NUTS':>16}")
for name in ("lengthscale", "scale"):
    cells = [f"{draws[how][name].mean():.2f} ± {draws[how][name].std():.2f}" for how in ("SVI", "NUTS")]
    print(f"{name:>16}{cells[0]:>16}{cells[1]:>16}")

moments = {}
for name in ("f", "g"):
    moments["SVI", name] = npgp.posterior(name, model, guide, params, *data, draws=50).mean_and_variance(X)
    spread = draws["NUTS"]["variance of f"].mean(0) if name == "f" else 0.0
    moments["NUTS", name] = draws["NUTS"][name].mean(0), draws["NUTS"][name].var(0) + spread
for name, what in (("f", "mean"), ("g", "log of the noise")):
    (a, va), (b, vb) = moments["SVI", name], moments["NUTS", name]
    apart, ratio = np.mean(np.abs(a - b) / np.sqrt(vb)), np.mean(np.sqrt(va / vb))
    print(
        f"{what:>16}: SVI is {apart:.2f} standard deviations off on average; its own are {ratio:.2f} of the exact GP's"
    )

# %% [markdown]
# SVI and the exact GPs say the same of both functions. Both see less noise than there was where the curve is steepest,
# and its rise drawn out, for the lengthscale of its logarithm, 15 milliseconds, is too long for a rise within five.
# The thin lines are 90% of new rows.

# %%
figure, axes = plt.subplots(1, 2, figsize=(7.5, 2.8), layout="constrained")
axes[0].plot(time, y, ".", color="0.6", ms=3, label="rows")
for how, name, style in (("SVI", "SVI, 20 inducing points", "C0-"), ("NUTS", "exact GPs, NUTS", "C1--")):
    mean, noise = moments[how, "f"][0], np.exp(moments[how, "g"][0])
    axes[0].plot(time, mean, style, label=name)
    for side in (-1.645, 1.645):
        axes[0].plot(time, mean + side * noise, style, lw=0.8)
    axes[1].plot(time, noise, style, label=name)
axes[1].plot(time, noise_sd(time), "k:", lw=1.2, label="truth")
axes[0].set(xlabel="milliseconds after the impact", ylabel="acceleration")
axes[1].set(xlabel="milliseconds after the impact", ylabel="standard deviation of the noise", ylim=(0, None))
for ax in axes:
    ax.legend(frameon=False, fontsize=8, loc="lower right")
