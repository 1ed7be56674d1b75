# %% [markdown]
# # Survival: a treatment, and a risk that depends on age as it likes
#
# Times to an event, of which some are censored: known to be longer than the time of observation. Weibull times with a
# treatment's effect on the log-time, and a GP for how it depends on age. Simulated: 120 people, risk highest for the
# youngest and oldest.

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
rng = np.random.default_rng(7)
N, TRUE_EFFECT, TRUE_SHAPE = 120, 0.5, 1.5
age = np.sort(rng.uniform(20.0, 80.0, N))
treated = rng.integers(0, 2, N)


def log_time(age):
    return 1.5 - 1.2 * ((age - 50.0) / 30.0) ** 2


time = np.exp(log_time(age) + TRUE_EFFECT * treated) * rng.exponential(size=N) ** (1.0 / TRUE_SHAPE)
end = rng.uniform(1.0, 8.0, N)
censored, observed = time > end, np.minimum(time, end)
X = (age[:, None] - 50.0) / 10.0
Z = np.linspace(-3.0, 3.0, 10)[:, None]


def parameters():
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 0.5))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 0.5))  # decades of age
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    return effect, shape, npgp.RBF(lengthscale, variance=scale**2)


def model(X, treated, censored, time=None):
    effect, shape, kernel = parameters()
    f = npgp.SparseGP("f", kernel + npgp.kernels.Constant(variance=4.0), Z).draw()  # with the level
    likelihood = npgp.likelihoods.Weibull(concentration=shape, censored=censored)
    with numpyro.plate("people", len(X)):
        npgp.observe("time", f(X) + effect * treated, likelihood, obs=time)


data = (X, treated, censored, observed)

# %% [markdown]
# By SVI with the default guide, and, as the reference, the exact GP by NUTS: values of the function at all ages are
# sampled, and the density of a time, or of having come so far without an event, is written out.

# %%
guide = npgp.AutoSparseGP(model)
svi = SVI(model, guide, npgp.adam(0.03), TraceMeanField_ELBO())
result = npgp.fit(svi, jax.random.key(0), None, *data, progress=False)  # until the posterior stands still
print(result.convergence)
params = result.params
draws = {"SVI": guide.sample_posterior(jax.random.key(1), params, *data, sample_shape=(2000,))}


def exact(X, treated, censored, time):
    effect, shape, kernel = parameters()
    L = jnp.linalg.cholesky(kernel(X) + 1e-4 * jnp.eye(len(X)))
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([len(X)]).to_event(1))
    f = numpyro.deterministic("f", numpyro.sample("level", dist.Normal(0.0, 2.0)) + L @ z)
    log_ratio = jnp.log(time) - f - effect * treated
    density = jnp.log(shape) - jnp.log(time) + shape * log_ratio
    numpyro.factor("time", jnp.where(censored, 0.0, density) - jnp.exp(shape * log_ratio))


nuts = NUTS(exact, init_strategy=init_to_median, max_tree_depth=6)
mcmc = MCMC(nuts, num_warmup=DRAWS, num_samples=DRAWS, progress_bar=False)
mcmc.run(jax.random.key(2), *data)
draws["NUTS"] = mcmc.get_samples()

# %%
naive = np.log(observed)[treated == 1].mean() - np.log(observed)[treated == 0].mean()
print(f"{censored.mean():.0%} censored; simulated with effect {TRUE_EFFECT} and shape {TRUE_SHAPE}")
print(f"difference of mean log-times, without regard to censoring: {naive:.2f}")
print(f"{'':>16}{'SVI':>16}{'exact, NUTS':>16}")
for name in ("effect", "shape", "lengthscale", "scale"):
    cells = [f"{draws[how][name].mean():.2f} ± {draws[how][name].std():.2f}" for how in ("SVI", "NUTS")]
    print(f"{name:>16}{cells[0]:>16}{cells[1]:>16}")

mean, variance = npgp.posterior("f", model, guide, params, *data, draws=50).mean_and_variance(X)
sd = np.sqrt(variance)
exact_mean, exact_sd = draws["NUTS"]["f"].mean(0), draws["NUTS"]["f"].std(0)
apart = np.mean(np.abs(mean - exact_mean) / exact_sd)
print(f"SVI's curve is {apart:.2f} standard deviations from the exact GP's on average,")
print(f"and its standard deviations are {np.mean(sd / exact_sd):.2f} of the exact GP's")

# %% [markdown]
# The effect and its interval are those of the exact GP. Leaving the censoring out would have halved the effect: who
# lives longer is censored more often.

# %%
figure, ax = plt.subplots(figsize=(6.0, 2.8), layout="constrained")
curves = {
    "SVI, 10 inducing points": (mean, mean - 1.645 * sd, mean + 1.645 * sd),
    "exact GP, NUTS": (exact_mean, *np.quantile(draws["NUTS"]["f"], [0.05, 0.95], axis=0)),
}
for (how, times), style in zip(curves.items(), ("C0-", "C1--"), strict=True):
    for value, width, label in zip(times, (1.8, 0.8, 0.8), (f"{how}: mean, 90% interval", None, None), strict=True):
        ax.plot(age, np.exp(value), style, lw=width, label=label)
ax.plot(age, np.exp(log_time(age)), "k:", lw=1.2, label="truth")
ax.set(xlabel="age", ylabel="scale of the time, untreated", ylim=(0, 8))
_ = ax.legend(frameon=False, fontsize=8, loc="upper right")
