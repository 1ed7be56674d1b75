# %% [markdown]
# # A first sparse GP
#
# For NumPyro users who have not used a sparse Gaussian process before. The first three cells are a whole analysis:
# data, a model and its training, predictions. After that,
#
# 1. what the approximation costs;
# 2. a GP as one term of a larger model, trained on minibatches;
# 3. the same larger model with NUTS, to see what the variational answer got wrong.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import print_summary
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO

import npgp
from npgp import plots
from npgp.collapsed import exact_log_evidence

plt.rcParams["figure.dpi"] = 150


def curve(x):
    return np.sin(2 * x) + 0.6 * np.sin(5.5 * x * np.exp(-x / 12))


rng = np.random.default_rng(1)
num_rows, noise_variance = 500, 0.04
x = np.sort(rng.uniform(0, 10, num_rows))
y = curve(x) + np.sqrt(noise_variance) * rng.normal(size=num_rows)
X = x[:, None]  # inputs are always of shape (rows, columns)


# %%
def model(X, y=None, *, num_inducing=25, conditional="tight"):
    positive = constraints.softplus_positive
    kernel = npgp.RBF(
        lengthscale=numpyro.param("lengthscale", 1.0, constraint=positive),
        variance=numpyro.param("variance", 1.0, constraint=positive),
    )
    noise = numpyro.param("noise_variance", 0.5, constraint=positive)
    Z = numpyro.param("inducing", jnp.linspace(0.0, 10.0, num_inducing)[:, None])
    f = npgp.SparseGP("f", kernel, inducing=Z).draw()
    with numpyro.plate("data", X.shape[0]):
        npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y, conditional=conditional)


def train(num_steps=None, **settings):
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.05, num_steps), TraceMeanField_ELBO(), **settings)
    result = npgp.fit(svi, jax.random.key(0), num_steps, X, y, progress=False)
    return result, npgp.posterior("f", model, guide, result.params, X, **settings)


result, posterior = train()

# %%
grid = np.linspace(-0.5, 10.5, 300)


def new_observations(result, posterior):
    mean, variance = posterior.mean_and_variance(grid[:, None])
    return mean, np.sqrt(variance + result.params["noise_variance"]), result.params["inducing"]


def draw(fits):
    figure = plots.plot_fit(x, y, grid, {name: new_observations(*fit) for name, fit in fits.items()})
    for ax in figure.axes:
        ax.plot(grid, curve(grid), "k", lw=0.8, label="truth")
    figure.axes[0].get_legend().remove()
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8)


draw({"25 inducing inputs": (result, posterior)})

# %% [markdown]
# An exact GP with $N$ rows needs $O(N^3)$ work. A sparse GP summarizes the function by its values at $M$ *inducing
# inputs* $Z$, the ticks at the bottom of the picture, which are yours to choose or, as here, to train. Those values get
# an approximate posterior $q$, and the work per step is $O(N M^2)$, or $O(B M^2)$ for a batch of $B$ rows.
#
# The model is an ordinary NumPyro program; nothing variational is written in it. `SparseGP(...).draw()` draws the
# function once, outside the plate over rows; `f(X)` is its values at rows, and `observe` says how they are seen. Kernel
# hyperparameters are numbers, `numpyro.param` or `numpyro.sample`; here they are parameters, so they get point
# estimates.
#
# `AutoSparseGP` derives the guide. Training is NumPyro's `SVI` with `TraceMeanField_ELBO`; `npgp.fit` is a loop around
# `svi.update` that can take minibatches and stops at NaN; without a number of steps it ends when the posterior has
# arrived. `npgp.posterior` is the posterior of $f$ with mean, variance,
# covariance and joint draws at any inputs; the band is for new observations, so it includes the noise variance.
#
# ## 1. What the approximation costs
#
# `conditional` chooses between two bounds on the log evidence. `"prior"` is the classical one; `"tight"`, the default,
# is never below it for the same $q$, hyperparameters and inducing inputs, and costs the same. With 500 rows the exact
# log evidence is still cheap: for any hyperparameters, inducing inputs and $q$, the ELBO is at most that at those
# hyperparameters, and what it lacks is the price of being sparse.

# %%
fits = {"25 inducing, tight": (result, posterior)}
for conditional in ("tight", "prior"):
    fits[f"15 inducing, {conditional}"] = train(num_inducing=15, conditional=conditional)

print(f"{'':>20}{'ELBO':>9}{'exact log evidence':>21}{'noise variance':>17}")
for name, (result, _) in fits.items():
    lengthscale, variance, noise = (result.params[key] for key in ("lengthscale", "variance", "noise_variance"))
    evidence = exact_log_evidence(npgp.RBF(lengthscale, variance=variance), X, y, noise_variance=noise)
    print(f"{name:>20}{-result.losses[-1]:9.1f}{evidence:21.1f}{noise:17.4f}")
print(f"{'truth':>20}{noise_variance:47.4f}")

# %%
draw(fits)

# %% [markdown]
# Fifteen inducing inputs are too few for this curve: both bounds explain a part of the signal as noise. The tight one
# is higher and does so a little less, but it does not make up for missing inducing inputs. With 25 of them, the ELBO is
# a fifth of a nat short of the exact GP. Where the exact evidence is out of reach, add inducing inputs until the ELBO
# stops rising.

# %% [markdown]
# ## 2. A GP inside a larger model
#
# The GP need not be the whole model. Here an outcome depends on age by some smooth curve, and on a treatment by an
# `effect` that we want to know. The treatment was given more often at ages where the outcome is high anyway, so the
# difference of the two groups' means is far from the effect.

# %%
rng = np.random.default_rng(5)
num_people = 1000
true_effect, true_noise = 0.5, 0.5


def trend(age):
    return np.sin(0.9 * age) + 0.4 * np.cos(2.3 * age)


age = rng.uniform(0, 10, num_people)
treated = rng.uniform(size=num_people) < 1 / (1 + np.exp(-trend(age)))
outcome = trend(age) + true_effect * treated + true_noise * rng.normal(size=num_people)
difference = outcome[treated].mean() - outcome[~treated].mean()
print(f"difference of means {difference:.2f}, true effect {true_effect}")

# %% [markdown]
# Everything unknown has a prior now, the kernel's lengthscale included. GP values add up with other terms: `f(age) +
# effect * group` is passed to `observe` as it is, and $f$ is still integrated out row by row. The group is coded −½ and
# ½, so that the effect does not shift the overall level, which is $f$'s.
#
# For minibatches, `npgp.plate` takes the number of rows of the whole data set, by which a batch is scaled up.
# We hand it to `SVI` as a static keyword argument.

# %%
inducing = np.linspace(0, 10, 15)[:, None]


def hyperparameters():
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    return npgp.RBF(lengthscale, variance=amplitude**2), noise**2


def effect_model(X, group, y=None, *, size):
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    kernel, noise_variance = hyperparameters()
    f = npgp.SparseGP("f", kernel, inducing).draw()
    with npgp.plate("people", size, rows=X.shape[0]):
        npgp.observe("y", f(X) + effect * group, npgp.Gaussian(variance=noise_variance), obs=y)


# %% [markdown]
# `AutoSparseGP` has one multivariate normal distribution for the sites that are not a GP's, and the GP's own posterior
# follows these. It starts at the prior medians: NumPyro by itself would start at a random point, and from a bad one the
# lengthscale can stay far too long for thousands of steps. `fit(batch_size=...)` cuts every array among the arguments.
#
# How sure the guide is of the hyperparameters is learned last, from noisy gradients. Eight draws a step, which cost
# little more than one here, quiet them, and training goes on until no standard deviation changes any more.

# %%
data = (age[:, None], treated - 0.5, outcome)
guide = npgp.AutoSparseGP(effect_model)
num_steps = None  # as many as it takes
eight_draws = TraceMeanField_ELBO(num_particles=8)
svi = SVI(effect_model, guide, npgp.adam(0.05, num_steps), eight_draws, size=num_people)
result = npgp.fit(svi, jax.random.key(0), num_steps, *data, batch_size=100, progress=False)
elbo, error = npgp.evaluate(svi, jax.random.key(1), result, *data)
print(f"ELBO {elbo:.1f} ± {error:.1f}\n{result.convergence}")
figure = plots.plot_elbo({"effect model": -result.losses}, rows=num_people, window=200)

# %% [markdown]
# Draws from the guide are draws from the approximate posterior, as with any autoguide.

# %%
draws = guide.sample_posterior(jax.random.key(2), result.params, *data, size=num_people, sample_shape=(1000,))
for name, truth in [("effect", true_effect), ("noise", true_noise), ("lengthscale", None)]:
    print(f"{name:>12}: {draws[name].mean():.3f} ± {draws[name].std():.3f}", f"(truth {truth})" if truth else "")

# %% [markdown]
# Predictions of $y$ at new inputs are the usual `Predictive` with model, guide and parameters. The inputs may be any,
# and any number of them; `size` is then their number. Here each age is asked for twice, untreated and treated.

# %%
grid = np.linspace(0, 10, 100)
new_age, new_group = np.tile(grid, 2)[:, None], np.repeat([-0.5, 0.5], len(grid))
predictive = Predictive(effect_model, guide=guide, params=result.params, num_samples=1000)
new_y = np.asarray(predictive(jax.random.key(3), new_age, new_group, size=len(new_age))["y"])

figure, ax = plt.subplots(figsize=(7.0, 3.8), layout="constrained")
for group, name, rows, color in [(-0.5, "untreated", ~treated, "C0"), (0.5, "treated", treated, "C1")]:
    of_group = new_y[:, new_group == group]
    ax.scatter(age[rows], outcome[rows], s=5, alpha=0.4, color=color)
    ax.plot(grid, of_group.mean(axis=0), color=color, label=f"{name}: mean and 90 % of new outcomes")
    ax.fill_between(grid, *np.quantile(of_group, [0.05, 0.95], axis=0), color=color, alpha=0.2, lw=0)
ax.set(xlabel="age", ylabel="outcome")
_ = ax.legend(frameon=False, fontsize=8)

# %% [markdown]
# ## 3. The same model with NUTS
#
# With Gaussian noise the optimal $q$ is known in closed form. `CollapsedGP` puts it in: its log density is the bound
# as a function of the hyperparameters alone, and NUTS can sample those. It wants all rows at every step.


# %%
def collapsed_model(X, group, y=None):
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    kernel, noise_variance = hyperparameters()
    numpyro.sample(
        "y", npgp.CollapsedGP(kernel, X, inducing, noise_variance=noise_variance, offset=effect * group), obs=y
    )


num_warmup, num_samples = 300, 500


@jax.jit  # all of it is one program, and compiled at once
def run_nuts(key):
    mcmc = MCMC(NUTS(collapsed_model), num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    mcmc.run(key, *data)
    return mcmc.get_samples()


samples = run_nuts(jax.random.key(4))
print_summary(samples, group_by_chain=False)

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.0, 3.2), layout="constrained")
for ax, name in zip(axes, ["effect", "lengthscale"], strict=True):
    for method, values in [("NUTS, collapsed", samples[name]), ("SVI", draws[name])]:
        print(f"{name:>12}, {method}: {values.mean():.3f} ± {values.std():.3f}")
        ax.hist(np.asarray(values), bins=30, density=True, alpha=0.6, label=method)
    ax.set(xlabel=name, ylabel="posterior density")
axes[0].axvline(true_effect, color="k", lw=0.8, ls="--", label="truth")
_ = axes[0].legend(frameon=False, fontsize=8)

# %% [markdown]
# The two agree, about the lengthscale too. The guide can follow because $q$ of the function's values does: with
# `dependence="independent"` the function that it holds fits one lengthscale only, and that posterior is ten times too
# narrow.
#
# The guide of part 2 takes minibatches, in which it has to learn how $q$ follows. With all rows at every step $q$ is
# the posterior given the rows, for each draw of everything else; with Gaussian noise nothing of it is trained then, and
# `npgp.fit(svi, key, None, ...)` ends when the rest stands still (notebook 03). `npgp.check_posterior` says whether a
# guide's draws are to be trusted. For data that fit in memory the collapsed model is the reference, with NUTS.

# %% [markdown]
# ## Where next
#
# - Other likelihoods: `npgp.Bernoulli`, `npgp.Poisson`, `npgp.StudentT`, or any function from $f$ to a NumPyro
#   distribution, in place of `npgp.Gaussian`.
# - `npgp.sample` turns $f(X)$ into an array, for models in which it enters other than as a sum.
# - `npgp.SparseGP` with a list of inducing blocks, for the orthogonal decomposition; in a plate at dim −2, for several
#   functions.
# - `npgp.BayesianGPLVM`, where the inputs are unknown: `scripts/examples/oil_flow.py`.
# - `scripts/study.py snelson-bounds` compares the bounds on a small real data set, collapsed and by SVI.
