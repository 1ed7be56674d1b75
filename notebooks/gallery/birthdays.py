# %% [markdown]
# # Births by day: trend, season, weekdays and holidays
#
# The cover example of Gelman et al., *Bayesian Data Analysis* (2013, chapter 21): daily births as a slow trend, a
# season, a weekly pattern, and effects of special days. Simulated: two years, fewer births on weekends and at three
# holidays. Trend and season are GPs, weekdays and holidays are coefficients. What is wanted are joint intervals of
# all of them, so the GPs are collapsed: `CollapsedGP` of the summed kernel, with the coefficients in its `offset`,
# and NUTS over what is left, thirteen numbers. The mode by L-BFGS is the quick answer.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_median

import npgp

plt.rcParams["figure.dpi"] = 150

jax.config.update("jax_enable_x64", True)  # collapsed bounds want double precision

# %%
rng = np.random.default_rng(1969)
day = np.arange(730)
weekday, of_year = day % 7, day % 365
true_weekday = np.array([0.3, 0.5, 0.4, 0.4, 0.3, -0.9, -1.0])
holidays = {"New Year": 0, "Fourth of July": 184, "Christmas": 358}
true_holiday = np.array([-1.2, -0.8, -1.5])
is_holiday = np.stack([of_year == at for at in holidays.values()], axis=1).astype(float)
smooth = (
    0.3 * np.sin(day / 200.0) + 0.4 * np.sin(2 * np.pi * day / 365.0 + 2.5) + 0.15 * np.cos(4 * np.pi * day / 365.0)
)
y = smooth + true_weekday[weekday] + is_holiday @ true_holiday + 0.3 * rng.normal(size=730)
X = day[:, None] / 365.0  # years
is_weekday = np.eye(7)[weekday]
Z = np.linspace(0.0, 2.0, 30)[:, None]


def gp(X, trend, season, noise, offset=0.0):
    yearly = npgp.kernels.Periodic(1.0, lengthscale=1.0, variance=season**2)
    return npgp.CollapsedGP(npgp.RBF(trend, variance=1.0) + yearly, X, Z, npgp.Gaussian(scale=noise), offset=offset)


def model(X, is_weekday, is_holiday, y=None):
    trend = numpyro.sample("trend", dist.LogNormal(0.0, 0.5))
    season = numpyro.sample("season", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    of_weekday = numpyro.sample("weekday", dist.Normal(0.0, 1.0).expand([7]).to_event(1))
    of_holiday = numpyro.sample("holiday", dist.StudentT(3.0, 0.0, 1.0).expand([3]).to_event(1))
    offset = is_weekday @ of_weekday + is_holiday @ of_holiday
    numpyro.sample("y", gp(X, trend, season, noise, offset), obs=y)


data = (X, is_weekday, is_holiday, y)

# %%
mode = npgp.fit_collapsed(jax.random.key(0), model, *data, progress=False).params
nuts = NUTS(model, init_strategy=init_to_median, max_tree_depth=5)
mcmc = MCMC(nuts, num_warmup=100, num_samples=150, progress_bar=False)
mcmc.run(jax.random.key(1), *data)
draws = mcmc.get_samples()


# %% [markdown]
# The exact GP, with trend, season and noise at NUTS's means: the posterior of the coefficients in closed form. The
# level of all weekdays is also the trend's and known to within 0.3 only, so weekdays are shown about their mean.


# %%
names = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun", *holidays]
about_mean = np.eye(10)
about_mean[:7, :7] -= 1.0 / 7.0


def exact():
    trend, season, noise = (float(draws[name].mean()) for name in ("trend", "season", "noise"))
    K = np.asarray(gp(X, trend, season, noise).kernel(X)) + noise**2 * np.eye(len(X))
    A = np.concatenate([is_weekday, is_holiday], axis=1)
    solved = np.linalg.solve(K, np.column_stack([A, y]))
    prior = np.diag(np.r_[np.ones(7), np.full(3, 1.0 / 3.0)])  # precisions; Student-t's is that of its variance
    covariance = np.linalg.inv(A.T @ solved[:, :-1] + prior)
    mean = about_mean @ covariance @ A.T @ solved[:, -1]
    return mean, np.sqrt(np.diag(about_mean @ covariance @ about_mean.T))


truth = about_mean @ np.concatenate([true_weekday, true_holiday])
both = np.concatenate([draws["weekday"], draws["holiday"]], axis=1) @ about_mean.T
at_mode = about_mean @ np.concatenate([mode["weekday_auto_loc"], mode["holiday_auto_loc"]])
mean, sd = exact()
print(f"{'':>16}{'truth':>8}{'mode':>8}{'NUTS, collapsed':>18}{'exact GP':>16}")
for i, name in enumerate(names):
    nuts = f"{both[:, i].mean():.2f} ± {both[:, i].std():.2f}"
    print(f"{name:>16}{truth[i]:8.2f}{at_mode[i]:8.2f}{nuts:>18}{f'{mean[i]:.2f} ± {sd[i]:.2f}':>16}")

# %%
sampled = {name: np.asarray(draws[name].mean(0)) for name in draws}
offset = is_weekday @ sampled["weekday"] + is_holiday @ sampled["holiday"]
f = gp(X, sampled["trend"], sampled["season"], sampled["noise"], offset).condition(y)
mean_f, variance_f = (np.asarray(part) for part in f.mean_and_variance(X))
level = sampled["weekday"].mean()
figure, axes = plt.subplots(1, 2, figsize=(8.0, 2.8), layout="constrained", width_ratios=(3, 2))
axes[0].plot(X[:, 0], y, ".", color="0.75", ms=2, label="days")
axes[0].plot(X[:, 0], mean_f + level, color="C0", label="trend and season")
axes[0].plot(X[:, 0], smooth + true_weekday.mean(), "k--", lw=1, label="truth")
axes[0].set(xlabel="year", ylabel="births, standardized", ylim=(y.min() - 0.2, y.max() + 1.0))
axes[0].legend(frameon=False, fontsize=8, ncols=3, loc="upper center")
low, high = np.quantile(both, [0.05, 0.95], axis=0)
axes[1].hlines(np.arange(10), low, high, color="C0", lw=2, label="90% interval")
axes[1].plot(truth, np.arange(10), "kx", ms=5, label="truth")
axes[1].set(yticks=np.arange(10), yticklabels=names, xlabel="effect (weekdays: about their mean)")
axes[1].invert_yaxis()
_ = axes[1].legend(frameon=False, fontsize=8, loc="upper left")
