# %% [markdown]
# # Growth, season and a forecast: like CO2 on Mauna Loa
#
# The example of Rasmussen & Williams (2006, section 5.4.3): a slow rise, a season that changes shape slowly, faster
# departures, and noise, each a kernel of a sum. Here are sixteen years of months simulated alike, four of them held
# back. The noise is Gaussian and what is wanted is the joint posterior of all parts, so the approximate posterior is
# collapsed (`CollapsedGP` of the sum), and L-BFGS finds the hyperparameters. 192 rows are few enough for the exact GP
# beside it.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import npgp

plt.rcParams["figure.dpi"] = 150

jax.config.update("jax_enable_x64", True)  # collapsed bounds want double precision

# %%
rng = np.random.default_rng(1958)
t = np.arange(192) / 12.0
season = (3.0 + 0.05 * t) * np.sin(2 * np.pi * t) + 0.8 * np.cos(4 * np.pi * t)
ppm = 340.0 + 1.5 * t + 0.015 * t**2 + season + 0.6 * np.sin(2 * np.pi * t / 3.7) + 0.3 * rng.normal(size=192)
X, now = t[:, None], t < 12.0
middle, spread = ppm[now].mean(), ppm[now].std()
y = (ppm[now] - middle) / spread
Z = np.linspace(0.0, 12.0, 72)[:, None]  # six a year
START = {"growth": 10.0, "decay": 20.0, "shape": 1.0, "season": 0.3, "weather": 1.0, "departure": 0.05, "noise": 0.05}


def summands(p):
    growth = npgp.RBF(p["growth"], variance=10.0)
    season = npgp.kernels.Periodic(1.0, lengthscale=p["shape"], variance=p["season"]) * npgp.RBF(p["decay"])
    return growth, season, npgp.Matern32(p["weather"], variance=p["departure"])


def kernel(p):
    return npgp.kernels.Sum(summands(p))


def model(X, y=None):
    positive = dist.constraints.positive
    p = {name: numpyro.param(name, value, constraint=positive) for name, value in START.items()}
    numpyro.sample("y", npgp.CollapsedGP(kernel(p), X, Z, npgp.Gaussian(scale=p["noise"])), obs=y)


data = (X[now], y)

# %%
fit = npgp.fit_collapsed(jax.random.key(0), model, *data, progress=False)
best, variance = fit.params, fit.params["noise"] ** 2
sparse = npgp.CollapsedGP(kernel(best), X[now], Z, noise_variance=variance).condition(y)
evidence = npgp.collapsed.exact_log_evidence(kernel(best), X[now], y, noise_variance=variance)
print(f"bound {-fit.losses[-1]:.2f}, exact log evidence at the same hyperparameters {evidence:.2f}")

# %% [markdown]
# The exact GP, by dense algebra, with the same hyperparameters; and both with observations of the last four years.

# %%
K = np.asarray(kernel(best)(X))
solved = np.linalg.solve(K[np.ix_(now, now)] + variance * np.eye(now.sum()), np.column_stack([y, K[np.ix_(now, ~now)]]))
exact_mean = K[np.ix_(~now, now)] @ solved[:, 0]
exact_sd = np.sqrt(np.diag(K)[~now] - np.sum(K[np.ix_(now, ~now)] * solved[:, 1:], axis=0) + variance)
mean, f_variance = (np.asarray(part) for part in sparse.mean_and_variance(X[~now]))
sd = np.sqrt(f_variance + variance)
for name, m, s in (("72 inducing points", mean, sd), ("exact GP", exact_mean, exact_sd)):
    error = ppm[~now] - middle - spread * m
    inside = np.mean(np.abs(error) < 1.645 * spread * s)
    print(f"{name:>20}: forecast RMSE {np.sqrt(np.mean(error**2)):.3f} ppm, {inside:.0%} in 90% intervals")
apart, ratio = np.max(np.abs(mean - exact_mean) / exact_sd), np.max(np.abs(sd / exact_sd - 1))
print(f"means differ by at most {apart:.3f} standard deviations, standard deviations by {ratio:.2%}")

# %%
figure, ax = plt.subplots(figsize=(7.0, 2.8), layout="constrained")
ax.plot(t, ppm, "k.", ms=2.5, label="months")
ax.plot(t[~now], middle + spread * exact_mean, color="C1", label="exact GP")
ax.plot(t[~now], middle + spread * mean, "--", color="C0", label="forecast, 72 inducing points")
low, high = (middle + spread * (mean + z * sd) for z in (-1.645, 1.645))
ax.fill_between(t[~now], low, high, color="C0", alpha=0.2, lw=0)
ax.axvline(12.0, color="0.5", lw=0.7, ls=":")
ax.set(xlabel="year", ylabel="ppm")
_ = ax.legend(frameon=False, fontsize=8)

# %% [markdown]
# The parts, each with its 90% interval, again by dense algebra. The level can move between growth and departures, so
# their sum is known better than either.

# %%
covariance = K[np.ix_(now, now)] + variance * np.eye(now.sum())
figure, axes = plt.subplots(1, 3, figsize=(8.0, 2.4), layout="constrained")
for ax, part, name in zip(axes, summands(best), ("growth", "season", "departures"), strict=True):
    P = np.asarray(part(X[now]))
    m = spread * P @ np.linalg.solve(covariance, y)
    s = spread * np.sqrt(np.maximum(np.diag(P - P @ np.linalg.solve(covariance, P)), 0.0))
    ax.plot(t[now], m, color="C0")
    ax.fill_between(t[now], m - 1.645 * s, m + 1.645 * s, color="C0", alpha=0.25, lw=0)
    ax.set(title=name, xlabel="year")
_ = axes[0].set_ylabel("ppm")
