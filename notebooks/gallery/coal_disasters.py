# %% [markdown]
# # Events in time: a log-Gaussian Cox process
#
# When did accidents become rarer? Disasters in British coal mines (Jarrett 1979) are the standard example; here are
# 112 years simulated alike: about 3 disasters a year for forty years, a fall within a decade, 1 a year after that. A
# log-Gaussian Cox process (Møller, Syversveen & Waagepetersen 1998) has a GP for the logarithm of the rate, so the
# fall may be as fast or as slow as the data say, and there is no change point to assume.

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
rng = np.random.default_rng(1851)
years = np.arange(1851.0, 1963.0)
true_rate = 0.9 + 2.2 / (1.0 + np.exp((years - 1890.0) / 3.0))
counts = rng.poisson(true_rate)
X = (years[:, None] - 1907.0) / 10.0  # decades
Z = np.linspace(X.min(), X.max(), 20)[:, None]


def rate_kernel():
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 0.5))  # decades
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    return npgp.Matern32(lengthscale, variance=scale**2)


def model(X, counts=None):
    kernel = rate_kernel() + npgp.kernels.Constant(variance=1.0)  # with the level of the log-rate
    f = npgp.SparseGP("f", kernel, Z).draw()
    with numpyro.plate("years", len(X)):
        npgp.observe("counts", f(X), npgp.Poisson(), obs=counts)


data = (X, counts)

# %% [markdown]
# By SVI with the default guide, and, as the reference, the exact GP by NUTS: with 112 values to sample there is no need
# of inducing points, and a kernel of npgp is a function that gives a matrix.

# %%
guide = npgp.AutoSparseGP(model)
svi = SVI(model, guide, npgp.adam(0.03), TraceMeanField_ELBO())
result = npgp.fit(svi, jax.random.key(0), None, *data, progress=False)  # until the posterior stands still
print(result.convergence)
params = result.params
draws = {"SVI": guide.sample_posterior(jax.random.key(1), params, *data, sample_shape=(2000,))}


def exact(X, counts):
    L = jnp.linalg.cholesky(rate_kernel()(X) + 1e-5 * jnp.eye(len(X)))
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([len(X)]).to_event(1))
    f = numpyro.deterministic("f", numpyro.sample("level", dist.Normal(0.0, 1.0)) + L @ z)
    numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)


nuts = NUTS(exact, init_strategy=init_to_median, max_tree_depth=6)
mcmc = MCMC(nuts, num_warmup=DRAWS, num_samples=DRAWS, progress_bar=False)
mcmc.run(jax.random.key(2), *data)
draws["NUTS"] = mcmc.get_samples()

# %%
print(f"{'':>16}{'SVI':>16}{'exact, NUTS':>16}")
for name in ("lengthscale", "scale"):
    cells = [f"{draws[how][name].mean():.2f} ± {draws[how][name].std():.2f}" for how in ("SVI", "NUTS")]
    print(f"{name:>16}{cells[0]:>16}{cells[1]:>16}")

mean, variance = npgp.posterior("f", model, guide, params, *data, draws=50).mean_and_variance(X)
sd = np.sqrt(variance)
exact_mean, exact_sd = draws["NUTS"]["f"].mean(0), draws["NUTS"]["f"].std(0)
apart = np.abs(mean - exact_mean) / exact_sd
print(f"log-rates: SVI's means are {apart.mean():.2f} standard deviations off on average, {apart.max():.2f} at most;")
print(f"SVI's standard deviations are {np.mean(sd / exact_sd):.2f} of the exact GP's on average")

# %% [markdown]
# Both find the fall, and both draw it out: a lengthscale that suits decades of a constant rate is too long for a fall
# within one. That is the model's, and not the approximation's, for the exact GP says the same.

# %%
figure, ax = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
ax.bar(years, counts, width=0.9, color="0.85", label="disasters in a year")
curves = {
    "SVI, 20 inducing points": (mean, mean - 1.645 * sd, mean + 1.645 * sd),
    "exact GP, NUTS": (exact_mean, *np.quantile(draws["NUTS"]["f"], [0.05, 0.95], axis=0)),
}
for (how, rates), style in zip(curves.items(), ("C0-", "C1--"), strict=True):
    for rate, width, label in zip(rates, (1.8, 0.8, 0.8), (f"{how}: mean, 90% interval", None, None), strict=True):
        ax.plot(years, np.exp(rate), style, lw=width, label=label)
ax.plot(years, true_rate, "k:", lw=1.2, label="truth")
ax.set(xlabel="year", ylabel="disasters a year", ylim=(0, counts.max() * 1.05))
_ = ax.legend(frameon=False, fontsize=8, loc="upper right")
