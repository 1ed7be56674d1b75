# %% [markdown]
# # Dose and response: a Hill curve that need not be right
#
# At which dose is half of the cells dead? Counts of survivors are fitted by Hill's curve, and the answer's interval
# takes the curve for granted. Here a GP on the logit scale says how the response departs from it, one for each
# compound with a common scale, so a compound that follows the curve lends certainty to none that does not. (GPs for
# such curves: Tansey et al. 2022, "Dose-response modeling in high-throughput cancer drug screenings".) Simulated:
# three compounds at nine doses, 40 cells each; the third one has a plateau that no Hill curve has.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO, init_to_median

import npgp

DRAWS = 200
plt.rcParams["figure.dpi"] = 150

# %%
rng = np.random.default_rng(9)
dose = np.linspace(-3.0, 3.0, 9)  # log10
true_mid, true_slope = np.array([-0.8, 0.5, 0.3]), np.array([2.0, 1.2, 2.5])


def true_logit(x):
    hill = -true_slope[:, None] * (x - true_mid[:, None])
    return hill + np.array([0.0, 0.0, 2.0])[:, None] * np.exp(-0.5 * (x - 1.2) ** 2 / 0.5**2)


CELLS = 40
alive = rng.binomial(CELLS, 1.0 / (1.0 + np.exp(-true_logit(dose))))
X = dose[:, None]
Z = np.linspace(-3.0, 3.0, 9)[:, None]


def survivors(f):
    return dist.Binomial(CELLS, logits=f)


def model(X, alive=None):
    with numpyro.plate("compounds", 3, dim=-2):
        mid = numpyro.sample("mid", dist.Normal(0.0, 1.5))
        slope = numpyro.sample("slope", dist.LogNormal(0.5, 0.5))
    departure = numpyro.sample("departure", dist.HalfNormal(1.0))
    with numpyro.plate("compounds", 3, dim=-2):
        f = npgp.SparseGP("f", npgp.RBF(0.7, variance=departure**2), Z).draw()
        with numpyro.plate("doses", len(X), dim=-1):
            npgp.observe("alive", f(X) - slope * (X[:, 0] - mid), survivors, obs=alive)


data = (X, alive)

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
print(f"{'':>16}{'SVI':>16}{'NUTS':>16}")
for name in ("mid", "slope"):
    for i in range(3):
        cells = [f"{draws[h][name][:, i].mean():.2f} ± {draws[h][name][:, i].std():.2f}" for h in ("SVI", "NUTS")]
        print(f"{name + ' ' + 'ABC'[i]:>16}{cells[0]:>16}{cells[1]:>16}")
cells = [f"{draws[h]['departure'].mean():.2f} ± {draws[h]['departure'].std():.2f}" for h in ("SVI", "NUTS")]
print(f"{'departure':>16}{cells[0]:>16}{cells[1]:>16}")


# %% [markdown]
# The two agree on the means. SVI's intervals of `mid` are three quarters to four fifths as wide as those of NUTS: a
# shift of Hill's curve and a departure can stand in for each other, and more so the larger the departures' scale is,
# which one Gaussian over scale and shifts cannot have. Where the interval is the answer, as here, take NUTS. With 40
# cells a dose, neither is sure of compound C's plateau.
#
# Predictions of new counts at doses in between, by NumPyro's `Predictive` from both: shares of survivors with 90%
# intervals.

# %%
grid = np.linspace(-3.0, 3.0, 60)
key = jax.random.key(3)
new = {
    "SVI": Predictive(model, guide=guide, params=params, num_samples=500)(key, grid[:, None])["alive"],
    "NUTS": Predictive(model, draws["NUTS"])(key, grid[:, None])["alive"],
}
figure, axes = plt.subplots(1, 3, figsize=(8.0, 2.6), layout="constrained", sharey=True)
for i, ax in enumerate(axes):
    for how, color in (("SVI", "C0"), ("NUTS", "C1")):
        share = np.asarray(new[how])[:, i] / CELLS
        ax.plot(grid, share.mean(0), color=color, label=how)
        ax.fill_between(grid, *np.quantile(share, [0.05, 0.95], axis=0), color=color, alpha=0.15, lw=0)
    ax.plot(grid, 1.0 / (1.0 + np.exp(-true_logit(grid)[i])), "k--", lw=1, label="truth")
    ax.plot(dose, alive[i] / CELLS, "k.", ms=5)
    ax.set(title=f"compound {'ABC'[i]}", xlabel="log10 of the dose")
axes[0].set_ylabel("share of survivors")
_ = axes[0].legend(frameon=False, fontsize=8, loc="lower left")
