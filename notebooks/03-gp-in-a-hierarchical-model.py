# %% [markdown]
# # A GP in a hierarchical model
#
# Counts of a disease in areas of a map, with covariates, effects of regions, and a smooth spatial effect: a Poisson
# regression of which the GP is one term. The data are simulated, so that we can compare with the truth. The steps are
# those of any Bayesian analysis:
#
# 1. the model, and what its prior says about data;
# 2. the fit, and what happens to the covariates' effects without the spatial term;
# 3. whether the fit is to be trusted, and NUTS as a check;
# 4. posterior checks and model comparison with ArviZ;
# 5. predictions at new places, place by place and jointly.

# %%
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import print_summary
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO, init_to_value
from numpyro.infer.autoguide import AutoNormal

import npgp
from npgp import plots

warnings.filterwarnings("ignore", message="[\\s\\S]*ArviZ is undergoing")  # what ArviZ before 1.0 says at import
import arviz as az

plt.rcParams["figure.dpi"] = 150

# %% [markdown]
# ## The data
#
# A map of 100 km by 100 km with areas in 8 regions. Area $n$ has a count $y_n$, and an *exposure* $e_n$: the number of
# cases that its population would have at the average rate. The log of the relative risk is
#
# $$\eta_n = \text{level} + \beta_1\,\text{deprivation}_n + \beta_2\,\text{rurality}_n
# + \text{effect}_{\text{region}(n)} + f(s_n), \qquad y_n \sim \text{Poisson}(e_n \exp \eta_n),$$
#
# with $f$ drawn from a GP with a Matérn-3/2 kernel. Deprivation is correlated with $f$: it is higher where something
# that nobody measured raises the risk. Rurality is not.

# %%
rng = np.random.default_rng(4)
num_areas, num_regions = 300, 8
truth = {"level": 0.2, "beta": np.array([0.25, -0.2]), "spread": 0.3, "lengthscale": 20.0, "amplitude": 0.6}


def draw_gp(S, lengthscale, amplitude):
    r = np.sqrt(3) * np.linalg.norm(S[:, None] - S, axis=-1) / lengthscale
    covariance = amplitude**2 * (1 + r) * np.exp(-r) + 1e-8 * np.eye(len(S))
    return np.linalg.cholesky(covariance) @ rng.normal(size=len(S))


S = rng.uniform(0, 100, (num_areas, 2))  # km
town = [70.0, 62.0] + rng.uniform(0, 5, (20, 2))  # 20 areas of a town, for part 5
axis = np.linspace(1, 99, 40)
grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)  # for maps
f_S, f_town, f_grid = np.split(
    draw_gp(np.concatenate([S, town, grid]), truth["lengthscale"], truth["amplitude"]), [len(S), len(S) + len(town)]
)
centers = rng.uniform(0, 100, (num_regions, 2))


def region_of(S):
    return np.argmin(np.linalg.norm(S[:, None] - centers, axis=-1), axis=1)


region = region_of(S)
truth["effect"] = truth["spread"] * rng.normal(size=num_regions)
deprivation = 0.6 * f_S / truth["amplitude"] + 0.8 * rng.normal(size=num_areas)
x = np.column_stack([deprivation, rng.normal(size=num_areas)])
exposure = np.exp(rng.normal(np.log(10), 0.6, num_areas))
log_risk = truth["level"] + x @ truth["beta"] + truth["effect"][region] + f_S
y = rng.poisson(exposure * np.exp(log_risk))
print(f"{y.sum()} cases in {num_areas} areas; counts from {y.min()} to {y.max()}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.0, 3.6), layout="constrained", sharex=True, sharey=True)
axes[0].scatter(*S.T, c=region, cmap="Set2", s=18)
axes[0].set(title="areas, colored by region", ylabel="north (km)")
points = axes[1].scatter(*S.T, c=np.log2((y + 0.5) / exposure), cmap="RdBu_r", vmin=-3, vmax=3, s=18)
axes[1].set_title("observed count / exposure")
colors = figure.colorbar(points, ax=axes[1], ticks=range(-3, 4), label="ratio")
colors.ax.set_yticklabels(["1/8", "1/4", "1/2", "1", "2", "4", "8"])
for ax in axes:
    ax.set(xlabel="east (km)", aspect="equal")

# %% [markdown]
# ## 1. The model
#
# An ordinary NumPyro model. All hyperparameters have priors; that of the lengthscale says, in kilometers, that risks
# vary over tens of kilometers: half of its mass lies between 14 and 28 km. The function is drawn outside the plate
# over areas. In the plate, `f(S) + eta` is the log of the relative risk, and `observe` integrates $f$ out, area by
# area.
#
# Without the spatial term nothing of `npgp` is left, and the observation is NumPyro's.

# %%
Z = npgp.inducing.greedy_variance(npgp.Matern32(20.0), S, 80)


def model(S, region, x, exposure, y=None, *, spatial=True):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("covariate", x.shape[1]):
        beta = numpyro.sample("beta", dist.Normal(0.0, 0.5))
    spread = numpyro.sample("spread", dist.HalfNormal(0.5))
    with numpyro.plate("region", num_regions):
        effect = numpyro.sample("effect", dist.Normal(0.0, spread))
    eta = level + x @ beta + effect[region]
    if spatial:
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(np.log(20.0), 0.5))  # km
        amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
        f = npgp.SparseGP("f", npgp.Matern32(lengthscale, variance=amplitude**2), Z).draw()
    with numpyro.plate("area", len(S)):
        if spatial:
            npgp.observe("y", f(S) + eta, npgp.Poisson(exposure=exposure), obs=y)
        else:
            numpyro.sample("y", dist.Poisson(exposure * jnp.exp(eta)), obs=y)


# %% [markdown]
# What does the prior say about data? `Predictive` with neither guide nor posterior draws from it. We look at two
# numbers of each simulated map: the total of all counts, and how much the ratio of count to exposure varies. (Under
# `jax.jit` such a call is compiled once, as a whole; without, operation by operation, which takes longer.)

# %%
inputs = (S, region, x, exposure)
num_draws = 1000
prior_y = jax.jit(Predictive(model, num_samples=num_draws))(jax.random.key(0), *inputs)["y"]


def variation(y):
    return np.log2((np.asarray(y) + 0.5) / exposure).std(axis=-1)


prior_total = np.asarray(prior_y.sum(axis=-1) / exposure.sum())
low, high = np.quantile(prior_total, [0.05, 0.95])
print(f"all counts / all exposures: {y.sum() / exposure.sum():.1f}, nine in ten prior draws {low:.1f} to {high:.0f}")
figure, axes = plt.subplots(1, 2, figsize=(8.0, 3.0), layout="constrained")
axes[0].hist(np.log2(prior_total), bins=30, color="0.7", label="prior predictive")
axes[0].axvline(np.log2(y.sum() / exposure.sum()), color="k", lw=1, label="observed")
axes[0].set(xlabel="log2(all counts / all exposures)", ylabel="draws")
axes[1].hist(variation(prior_y), bins=30, color="0.7")
axes[1].axvline(variation(y), color="k", lw=1)
axes[1].set(xlabel="standard deviation of log2(count / exposure)", ylabel="draws")
_ = axes[0].legend(frameon=False, fontsize=8)

# %% [markdown]
# The prior allows for far more and far fewer cases than a map would have at the average rate, and for maps from nearly
# flat to wildly varying. The data are well inside.
#
# ## 2. The fit
#
# `AutoSparseGP` makes a guide of the model. Level, effects and hyperparameters, 14 numbers, share one multivariate
# normal distribution, which starts at the prior medians, and the GP's own posterior follows them: given a draw of them
# it is the posterior given a pseudo-observation of each area, whose two numbers are trained. Without a number of steps
# training ends when no posterior moves any more, with eight draws a step. The model without the spatial
# term has no GP, and is trained by the same lines.


# %%
def train(spatial, num_steps=None, **options):
    variant = partial(model, spatial=spatial)
    guide = npgp.AutoSparseGP(variant, **options)
    svi = SVI(variant, guide, npgp.adam(0.02, num_steps), TraceMeanField_ELBO(num_particles=8))
    result = npgp.fit(svi, jax.random.key(1), num_steps, *inputs, y, progress=False)
    draws = guide.sample_posterior(jax.random.key(2), result.params, *inputs, y, sample_shape=(num_draws,))
    return guide, result, draws


guide, result, draws = train(spatial=True)
_, flat_result, flat_draws = train(spatial=False)
print(f"with f:\n{result.convergence}\n\nwithout f:\n{flat_result.convergence}")
figure = plots.plot_elbo({"with f": -result.losses, "without f": -flat_result.losses}, rows=num_areas)

# %% [markdown]
# Nothing moves any more, with $f$ or without.
#
# `to_arviz` collects the draws with all that ArviZ asks for: data, posterior predictive draws, pointwise log
# likelihood. Plates become named dimensions.

# %%
labels = {"covariate": ["deprivation", "rurality"]}
with_f = npgp.to_arviz(
    jax.random.key(3), partial(model, spatial=True), draws, *inputs, y, params=result.params, coords=labels
)
without_f = npgp.to_arviz(
    jax.random.key(4), partial(model, spatial=False), flat_draws, *inputs, y, params=flat_result.params, coords=labels
)
names = ["beta", "level", "spread", "lengthscale", "amplitude"]
true_values = np.concatenate([np.atleast_1d(truth[name]) for name in names])
table = az.summary(with_f, var_names=names, kind="stats")
table["truth"] = true_values
print("with f\n", table, "\n\nwithout f")
table = az.summary(without_f, var_names=names[:3], kind="stats")
table["truth"] = true_values[:4]
print(table)

# %% [markdown]
# Without $f$ the effect of deprivation is half again as large as it is in truth, and its interval is narrow and far
# away: deprivation stands for everything that raises the risk in the same places. With $f$ in the model, deprivation is
# compared between areas close to each other, and its effect is close to the truth. That works because deprivation also
# varies between neighbors. A covariate as smooth as $f$ itself could not be told apart from it, by this or any model.
#
# The spatial effect itself. `npgp.posterior` gives the posterior of $f$; with `draws` it is the average over so many
# draws of all that is sampled beside $f$.

# %%
f = npgp.posterior("f", model, guide, result.params, *inputs, draws=50, rng_key=jax.random.key(5))
mean, variance = f.mean_and_variance(grid)
scale = jnp.sqrt(variance)

figure, axes = plt.subplots(1, 3, figsize=(11.0, 3.5), layout="constrained", sharex=True, sharey=True)
shape = (len(axis), len(axis))
for ax, values, title in [(axes[0], f_grid, "truth"), (axes[1], mean, "posterior mean")]:
    image = ax.pcolormesh(axis, axis, np.reshape(values, shape), cmap="RdBu_r", vmin=-1.8, vmax=1.8)
    ax.set_title(title)
figure.colorbar(image, ax=axes[:2], label="f (log relative risk)", pad=0.01)
image = axes[2].pcolormesh(axis, axis, np.reshape(scale, shape), cmap="viridis", vmin=0)
axes[2].scatter(*S.T, s=3, color="w", label="areas")
axes[2].scatter(*Z.T, s=16, color="C1", marker="+", lw=0.8, label="inducing points")
axes[2].set_title("posterior standard deviation")
figure.colorbar(image, ax=axes[2], label="f (log relative risk)", pad=0.01)
axes[2].legend(loc="lower right", fontsize=7, facecolor="0.3", labelcolor="w")
for ax in axes:
    ax.set(xlabel="east (km)", aspect="equal")
_ = axes[0].set_ylabel("north (km)")

# %% [markdown]
# The map is right in the large, and smoother than the truth, as it must be with counts of this size. Its standard
# deviation is lowest where there are many areas.
#
# ## 3. Is the fit to be trusted?
#
# `check_posterior` finds out without another method: it weights draws of the guide by the model's density over the
# guide's, and looks at the tail of the weights. Pareto's $\hat k$ above 0.7 says no.
#
# For comparison a guide that takes $f$ as independent of everything else, and level, effects and hyperparameters as
# independent of each other: what SVI in larger models usually does, and with a number of steps, as is usual too.

# %%
by_itself = {"guide": partial(AutoNormal, init_scale=0.1), "dependence": "independent"}
apart, apart_result, apart_draws = train(True, num_steps=4000, **by_itself)
for name, fitted, found in [("independent", apart, apart_result), ("the default", guide, result)]:
    check = npgp.check_posterior(jax.random.key(7), model, fitted, found.params, *inputs, y, draws=10_000)
    print(f"{name:>11}: ELBO {check.elbo:.1f}, Pareto k {check.khat:.2f}")

# %% [markdown]
# The default is sixteen nats better, and passes; the other does not. NUTS can tell who is right: the model alone,
# without a guide, is complete, and NUTS samples all of it, the whitened inducing values too. It starts where SVI ended.
# `jax.jit` around the whole run spares the operation-by-operation compilation of its first step.

# %%
start = init_to_value(values=guide.median(result.params, *inputs, y))
num_warmup, num_samples = 250, 400


@jax.jit
def sample(key):
    mcmc = MCMC(NUTS(model, init_strategy=start), num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    mcmc.run(key, *inputs, y, extra_fields=("diverging",))
    return mcmc.get_samples(), mcmc.get_extra_fields()["diverging"].sum()


samples, num_divergences = sample(jax.random.key(6))
print(f"{num_divergences} divergences")
print_summary({name: samples[name] for name in [*names, "effect"]}, group_by_chain=False)

# %%
figure = plots.compare_posteriors(
    {"SVI, independent": apart_draws, "SVI, the default": draws, "NUTS": samples},
    names=[["beta", "level", "spread", "amplitude", "effect"], ["lengthscale"]],
    truth=truth,
    labels={
        "beta": labels["covariate"],
        "spread": "spread of effects",
        "amplitude": "amplitude of f",
        "effect": [f"effect of region {i}" for i in range(num_regions)],
    },
    units=["value (log relative risk)", "lengthscale of f (km)"],
)

# %% [markdown]
# All find the effects of the covariates. For the rest the independent guide is far too sure: level, region effects and
# the mean of $f$ over a region trade off, so that NUTS knows the level to ± 0.27 only, and the default to ± 0.30, where
# the independent guide says far less. The default's intervals are as wide as those of NUTS, of the amplitude and the
# lengthscale too. Its lengthscale is longer, though, 34 km on average against 24, where 20 is true: with 80 inducing
# points the bound is closer to the evidence for smoother functions. More inducing points would narrow that gap. NUTS
# has a gap of its own: it takes the rows for independent given the inducing values.
#
# ## 4. Posterior checks and comparison
#
# Do data simulated from the posterior look like the data? We compare two numbers: the variation of the ratios, as
# above, and Moran's $I$ of their logarithms, the correlation of an area with its five nearest neighbors.

# %%
distances = np.linalg.norm(S[:, None] - S, axis=-1)
neighbors = np.argsort(distances, axis=1)[:, 1:6]


def moran(y):
    ratio = np.log2((y + 0.5) / exposure)
    ratio = ratio - ratio.mean(axis=-1, keepdims=True)
    return np.mean(ratio[..., None] * ratio[..., neighbors], axis=(-1, -2)) / np.mean(ratio**2, axis=-1)


figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.2), layout="constrained")
for ax, statistic, title in [
    (axes[0], variation, "standard deviation of log2(count / exposure)"),
    (axes[1], moran, "Moran's I of log2(count / exposure)"),
]:
    for color, name, data in [("C0", "with f", with_f), ("C1", "without f", without_f)]:
        simulated = data["posterior_predictive"]["y"].values.reshape(-1, num_areas)
        ax.hist(statistic(simulated), bins=25, alpha=0.6, color=color, label=f"{name}, simulated")
    ax.axvline(statistic(y), color="k", lw=1, label="observed")
    ax.set(xlabel=title, ylabel="draws")
_ = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, fontsize=8)

# %% [markdown]
# Without $f$, simulated maps vary too little, and areas resemble their neighbors too little: the model cannot make
# such data. With $f$, the observed values are among the simulated ones.
#
# The same by leave-one-out cross-validation. It takes each area's log likelihood given a draw, which `to_arviz` has
# computed. That is the log likelihood of the *data*: given the inducing values and everything else, $\log p(y_n)$ with
# the rest of $f$ at this area integrated out. It is not a term of the bound that we trained on, and LOO is not the
# ELBO. The draws are from $q$, and LOO treats them as draws from the posterior.

# %%
warnings.filterwarnings("ignore", message="Estimated shape parameter")  # we count them ourselves
for name, data in [("with f", with_f), ("without f", without_f)]:
    k = az.loo(data, pointwise=True).pareto_k.values
    print(f"{name}: Pareto k above 0.7 in {np.sum(k > 0.7)} of {num_areas} areas")
print(az.compare({"with f": with_f, "without f": without_f}).to_string())

# %% [markdown]
# The model with $f$ predicts an area that it has not seen far better. In a few areas Pareto's $k$ is above 0.7, and
# their contributions are not to be relied upon; they are too few to matter for a difference of this size.
#
# ## 5. Predictions at new places
#
# A town of 5 km by 5 km with 20 areas of exposure 3 each, all with average covariates. `Predictive` takes the draws of
# NUTS, or guide and parameters of SVI, and any inputs. Its site `y.latent` is the value of `f(S) + eta`, the log of the
# relative risk; `y` are counts.
#
# By default each row of new inputs gets the part of $f$ that the inducing values leave open by itself, at no cost. For
# each area alone that is right. But the areas of a town are closer to each other than to the inducing points, and what
# these leave open is common to all areas. Where the question is about several of them, such as the *number of cases in
# the town*, `npgp.joint` makes each draw of $f$ one function.

# %%
new_exposure = np.full(len(town), 3.0)
new_inputs = (town, region_of(town), np.zeros((len(town), 2)), new_exposure)


@jax.jit
def predict(key):
    row_by_row = Predictive(model, samples)(key, *new_inputs)["y.latent"]
    jointly = Predictive(npgp.joint(model), samples)(key, *new_inputs)["y.latent"]
    return {"row by row": jnp.exp(row_by_row), "jointly": jnp.exp(jointly)}


risks = predict(jax.random.key(7))
true_risk = np.exp(truth["level"] + truth["effect"][new_inputs[1]] + f_town)

figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.4), layout="constrained")
order = np.argsort(true_risk)
for shift, color, (name, risk) in zip([-0.15, 0.15], ["C0", "C1"], risks.items(), strict=True):
    low, middle, high = np.quantile(risk, [0.05, 0.5, 0.95], axis=0)[:, order]
    at = np.arange(len(town)) + shift
    axes[0].vlines(at, low, high, color=color, lw=2, label=f"{name}, 90 % interval")
    axes[0].plot(at, middle, "o", ms=3, color=color)
    cases = np.asarray(risk @ new_exposure)
    low_cases, high_cases = np.quantile(cases, [0.05, 0.95])
    axes[1].hist(cases, bins=np.arange(15.0, 75.0, 2.0), density=True, histtype="step", lw=1.2, color=color)
    height = -0.006 if name == "jointly" else -0.012
    axes[1].plot([low_cases, high_cases], [height] * 2, lw=4, color=color, label=f"{name}, 90 % interval")
    print(
        f"{name:>10}: expected cases in the town {cases.mean():.1f} ± {cases.std():.1f}, "
        f"nine in ten draws {low_cases:.0f} to {high_cases:.0f}"
    )
axes[0].plot(true_risk[order], "k_", ms=9, label="truth")
axes[0].set(xlabel="area of the town, by true risk", ylabel="relative risk", xticks=[], ylim=(0, 1.45 * high.max()))
axes[1].axvline(true_risk @ new_exposure, color="k", lw=0.8, ls="--", label="truth")
axes[1].set(xlabel="expected number of cases in the town", ylabel="posterior density", ylim=(-0.018, 0.12))
for ax in axes:
    ax.legend(frameon=False, fontsize=8)

# %% [markdown]
# The intervals of single areas are the same both ways, up to the noise of 400 draws. The number of cases in the town is
# less certain than draws row by row say, and their interval (the bars below) is too short. They take for independent
# what 20 neighbors have in common.
#
# ## Where next
#
# - More areas than NUTS can take, or minibatches: notebook 01, part 2.
# - More inducing points at less cost, and bounds that lose less: notebook 02.
# - Counts with more variation than Poisson's: `npgp.likelihoods.NegativeBinomial` in the place of `npgp.Poisson`.
# - Classes, and SVI beside NUTS once more: notebook 04.
