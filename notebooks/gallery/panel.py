# %% [markdown]
# # A panel: units with trends of their own, and a policy
#
# Eight regions are followed for twelve years; in four of them a policy begins in year 6. All share a trend, each has
# a smooth deviation from it, and the policy's effect is to be told from these deviations: the Gaussian-process
# version of difference-in-differences (Arbour et al. 2021, "Using multitask Gaussian processes to estimate the effect
# of a targeted effort to remove firearms", is such a model). A straight comparison takes the deviations for noise,
# and its interval is too narrow.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO, init_to_median

import npgp

DRAWS = 200
plt.rcParams["figure.dpi"] = 150

# %%
rng = np.random.default_rng(4)
REGIONS, YEARS, TRUE_EFFECT = 8, 24, 0.8
year = np.linspace(0.0, 12.0, YEARS)
X = year[:, None]
shared = np.sin(0.5 * year) + 0.1 * year
K = 0.5**2 * np.exp(-0.5 * ((year[:, None] - year) / 3.0) ** 2) + 1e-8 * np.eye(YEARS)
own = rng.normal(size=(REGIONS, YEARS)) @ np.linalg.cholesky(K).T
treated = (np.arange(REGIONS)[:, None] < 4) & (year >= 6.0)
Y = shared + own + TRUE_EFFECT * treated + 0.3 * rng.normal(size=(REGIONS, YEARS))
Z = np.linspace(0.0, 12.0, 8)[:, None]


def model(X, treated, Y=None):
    effect = numpyro.sample("effect", dist.Normal(0.0, 2.0))
    deviation = numpyro.sample("deviation", dist.HalfNormal(1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 0.4))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    trend = npgp.SparseGP("trend", npgp.RBF(3.0, variance=4.0), Z).draw()
    with numpyro.plate("regions", REGIONS, dim=-2):
        own = npgp.SparseGP("own", npgp.RBF(lengthscale, variance=deviation**2), Z).draw()  # one for each region
        with numpyro.plate("years", len(X), dim=-1):
            npgp.observe("Y", trend(X) + own(X) + effect * treated, npgp.Gaussian(scale=noise), obs=Y)


data = (X, treated.astype(float), Y)

# %% [markdown]
# The same model by SVI with the default guide, and by NUTS, which is the reference.

# %%
guide = npgp.AutoSparseGP(model)
svi = SVI(model, guide, npgp.adam(0.03), TraceMeanField_ELBO())
result = npgp.fit(svi, jax.random.key(0), None, *data, progress=False)  # until the posterior stands still
print(result.convergence)
params = result.params
draws = {"SVI": guide.sample_posterior(jax.random.key(1), params, *data, sample_shape=(2000,))}

nuts = NUTS(model, init_strategy=init_to_median, target_accept_prob=0.9, max_tree_depth=5)
mcmc = MCMC(nuts, num_warmup=DRAWS, num_samples=DRAWS, progress_bar=False)
mcmc.run(jax.random.key(2), *data)
draws["NUTS"] = mcmc.get_samples()

# %%
before = year < 6.0
change = Y[:, ~before].mean(1) - Y[:, before].mean(1)
difference = change[:4].mean() - change[4:].mean()
residual = np.sqrt(change[:4].var(ddof=1) / 4 + change[4:].var(ddof=1) / 4)
print(f"simulated with an effect of {TRUE_EFFECT}; difference of differences {difference:.2f} ± {residual:.2f}")
print(f"{'':>16}{'SVI':>16}{'NUTS':>16}")
for name in ("effect", "deviation", "lengthscale", "noise"):
    cells = [f"{draws[how][name].mean():.2f} ± {draws[how][name].std():.2f}" for how in ("SVI", "NUTS")]
    print(f"{name:>16}{cells[0]:>16}{cells[1]:>16}")

# %% [markdown]
# The intervals are those of NUTS. In the default guide q of all nine functions is, for each draw of the coefficient and
# the hyperparameters, the posterior given all rows: with Gaussian noise nothing of it is trained.

# %%
figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.8), layout="constrained")
for i in range(REGIONS):
    color = "C3" if i < 4 else "0.6"
    axes[0].plot(year, Y[i], color=color, lw=0.9, label={0: "with the policy", 4: "without"}.get(i))
axes[0].axvline(6.0, color="k", lw=0.7, ls=":")
axes[0].set(xlabel="year", ylabel="outcome")
axes[0].legend(frameon=False, fontsize=8)
for how in ("SVI", "NUTS"):
    axes[1].hist(np.asarray(draws[how]["effect"]), 40, density=True, histtype="step", lw=1.4, label=how)
axes[1].axvline(TRUE_EFFECT, color="k", lw=1, ls="--", label="truth")
axes[1].set(xlabel="effect of the policy", yticks=[])
_ = axes[1].legend(frameon=False, fontsize=8)
