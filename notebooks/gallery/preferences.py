# %% [markdown]
# # Preferences: how sure is a difference?
#
# Sixty wines, each known by its sweetness, are tasted in pairs, and of each pair the better one is written down. A
# wine's utility is a GP of its sweetness, and a comparison is a row of its own, `f(X[first]) - f(X[second])`, with the
# probability of a choice by a logistic function (Bradley & Terry 1952; Chu & Ghahramani 2005). Tasters rarely had the
# sweetest third, so there is little to go by. Comparisons determine utilities up to a constant, so the standard
# deviation of a utility is not what one wants to know: that of a difference is. NUTS on the exact GP's 60 values stands
# beside.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import npgp
from npgp.functionals import at

plt.rcParams["figure.dpi"] = 150

jax.config.update("jax_enable_x64", True)  # for the exact GP's factor

# %%
rng = np.random.default_rng(1)
wines, tastings = 60, 400
sweetness = np.sort(rng.uniform(0.0, 4.0, wines))[:, None]
utility = 2.0 * np.sin(1.5 * sweetness[:, 0]) + 0.8 * sweetness[:, 0]
often = np.where(sweetness[:, 0] < 2.7, 1.0, 0.05)
pairs = np.array([rng.choice(wines, 2, replace=False, p=often / often.sum()) for _ in range(tastings)])
first, second = pairs.T
chosen = (rng.logistic(size=tastings) < utility[first] - utility[second]).astype(int)
Z = np.linspace(0.0, 4.0, 15)[:, None]


def hyperparameters():
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    return npgp.RBF(lengthscale, variance=numpyro.sample("sd", dist.LogNormal(0.5, 0.5)) ** 2)


def model(X, first, second, chosen=None):
    f = npgp.SparseGP("f", hyperparameters(), Z).draw()
    with numpyro.plate("tastings", len(first)):
        log_odds = f(X[first]) - f(X[second])
        npgp.observe("chosen", log_odds, npgp.Bernoulli(), obs=chosen)


data = (sweetness, first, second, chosen)
fitted = npgp.infer(model, jax.random.key(0), *data, options={"progress": False})
f = fitted.posterior("f")


def exact(X, first, second, chosen):
    K = hyperparameters()(X) + 1e-8 * jnp.eye(len(X))
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([len(X)]).to_event(1))
    f = numpyro.deterministic("f", jnp.linalg.cholesky(K) @ z)
    numpyro.sample("chosen", dist.Bernoulli(logits=f[first] - f[second]), obs=chosen)


mcmc = MCMC(NUTS(exact), num_warmup=500, num_samples=2000, progress_bar=False)
mcmc.run(jax.random.key(1), *data)
draws = np.asarray(mcmc.get_samples()["f"])

# %% [markdown]
# All differences from the wine in the middle, and those of 300 pairs at random. A posterior takes the same rows as the
# statement. Beside them, the standard deviation that one would make of two utilities' variances, as if these were
# independent.

# %%
middle = np.full(wines, wines // 2)
mean, variance = f.mean_and_variance(at(sweetness) - at(sweetness[middle]))
by_nuts = draws - draws[:, middle]
a, b = rng.integers(0, wines, (2, 300))
a, b = a[a != b], b[a != b]
pair_mean, pair_variance = f.mean_and_variance(at(sweetness[a]) - at(sweetness[b]))
pair_sd, nuts_sd = np.sqrt(pair_variance), (draws[:, a] - draws[:, b]).std(0)
own = f.variance(sweetness)
apart = np.abs(pair_mean - (draws[:, a] - draws[:, b]).mean(0)) / nuts_sd
print(f"means of differences are within {apart.max():.2f} sds of NUTS's, {apart.mean():.2f} on average")
low, high = np.quantile(pair_sd / nuts_sd, [0.05, 0.95])
print(f"nine of ten of their sds are {low:.2f} to {high:.2f} of NUTS's")
print(f"sd of a utility {np.sqrt(own).mean():.2f}, of a difference {pair_sd.mean():.2f} on average")

# %% [markdown]
# What a taster will say of two wines that were never compared, by the average over f:

# %%
new = np.array([[1.2], [3.5]])
row = at(new[:1]) - at(new[1:])
first_is_better = np.exp(f.log_density(row, np.ones(1), npgp.Bernoulli())[0])
print(f"sweetness 1.2 is preferred to 3.5 with probability {first_is_better:.2f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.0, 3.2), layout="constrained", width_ratios=[3, 2])
sd = np.sqrt(variance)
axes[0].fill_between(sweetness[:, 0], mean - 2 * sd, mean + 2 * sd, alpha=0.25, label="npgp, ± 2 sd")
axes[0].plot(sweetness, mean)
low, high = (by_nuts.mean(0) + sign * 2 * by_nuts.std(0) for sign in (-1, 1))
axes[0].plot(sweetness, low, "k:", label="NUTS, ± 2 sd")
axes[0].plot(sweetness, high, "k:")
axes[0].plot(sweetness, utility - utility[middle], "C3--", lw=1, label="simulated")
axes[0].plot(sweetness[first], np.full(tastings, axes[0].get_ylim()[0]), "|", color="0.4", ms=5)
axes[0].set(xlabel="sweetness (marks: wines tasted)", ylabel="utility, less the middle wine's")
axes[0].legend(fontsize=8, loc=(0.21, 0.12))
axes[1].plot(nuts_sd, np.sqrt(own[a] + own[b]), ".", ms=3, color="C1", label="as if independent")
axes[1].plot(nuts_sd, pair_sd, ".", ms=3, color="C0", label="of the difference")
axes[1].plot([0, nuts_sd.max()], [0, nuts_sd.max()], "k", lw=0.7)
axes[1].set(xlabel="sd of a difference by NUTS", ylabel="by npgp", xlim=(0, None), ylim=(0, None))
axes[1].legend(fontsize=8)
