# %% [markdown]
# # Classification, and MCMC beside SVI
#
# A GP classifier, trained twice: by SVI, and by NUTS over everything it has, inducing values and hyperparameters. The
# model is the same both times. Then
#
# 1. two classes with SVI, and the decision surface;
# 2. the same model with NUTS: what changes, and what does not;
# 3. new data arrive;
# 4. labels that may be wrong: a likelihood of one's own;
# 5. three classes.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import expit
from numpyro import handlers
from numpyro.diagnostics import print_summary
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO, init_to_value, log_likelihood

import npgp
from npgp import plots

plt.rcParams["figure.dpi"] = 150

# %% [markdown]
# ## The data
#
# The *banana* set (Rätsch, Onoda & Müller 2001): two inputs, two classes that overlap. It is read from the folder that
# the environment variable `NPGP_DATA` names; where there is none, two interlocked moons stand in for it. We train on
# 400 rows, keep 400 for later, and test on 1000.


# %%
def load_banana():
    try:
        data = npgp.datasets.load("banana_large")
        return data["X"], data["y"].astype(int)
    except FileNotFoundError:
        rng = np.random.default_rng(0)
        y = rng.integers(0, 2, 2000)
        angle = rng.uniform(0, np.pi, 2000)
        moon = np.column_stack([np.cos(angle), np.sin(angle) - 0.25])
        X = np.where(y[:, None] == 1, moon, [0.6, 0.0] - moon) + 0.25 * rng.normal(size=(2000, 2))
        return X / X.std(axis=0), y


X_all, y_all = load_banana()
num_train, num_test = 400, 1000
order = np.random.default_rng(1).permutation(len(X_all))
train, later, test = np.split(order[: 2 * num_train + num_test], [num_train, 2 * num_train])
X, y = X_all[train], y_all[train]
X_test, y_test = X_all[test], y_all[test]

# %% [markdown]
# ## 1. Two classes with SVI
#
# The log odds of class 1 are a GP. Both hyperparameters have priors. The inducing inputs are parameters: they are
# trained, and get no posterior. They start at k-means centers of the inputs.

# %%
num_inducing = 20
Z = npgp.inducing.kmeans(jax.random.key(0), X, num_inducing)


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.7))
    amplitude = numpyro.sample("amplitude", dist.LogNormal(0.7, 0.7))
    inducing = numpyro.param("inducing", Z)
    f = npgp.SparseGP("f", npgp.RBF(lengthscale, variance=amplitude**2), inducing).draw()
    with numpyro.plate("data", len(X)):
        npgp.observe("y", f(X), npgp.Bernoulli(), obs=y)


def fit(model, num_steps, *data):
    """Train a model by SVI with the automatic guide; without a number of steps until its posterior stands still."""
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.03, num_steps), TraceMeanField_ELBO())
    return guide, npgp.fit(svi, jax.random.key(0), num_steps, *data, progress=False)


num_steps = None
guide, result = fit(model, num_steps, X, y)
print(result.convergence)
figure = plots.plot_elbo({f"{num_inducing} inducing inputs": -result.losses}, rows=num_train)
figure.set_size_inches(5.0, 3.0)

# %% [markdown]
# Training is nearly done after a few hundred steps: all that the picture shows after that is a third of a nat. For
# each draw of lengthscale and amplitude $q$ is the posterior given a pseudo-observation of each row, which starts at
# the likelihood's mode, so that little is left to learn.
#
# Predicted probabilities, from draws of the posterior. For new rows, `log_likelihood` with $y = 1$ is the log
# probability of class 1 given a draw of inducing values and hyperparameters, with the rest of $f$ integrated out. Its
# exponential, averaged over draws, is the prediction. The same two lines serve for NUTS below. `substitute` gives the
# model its trained inducing inputs.

# %%
num_draws = 500
trained_model = handlers.substitute(model, data=result.params)


@jax.jit
def probabilities(samples, X):
    """P(y = 1) at rows X, for each draw."""
    return jnp.exp(log_likelihood(trained_model, samples, X, jnp.ones(len(X), int))["y"])


@jax.jit
def draw(key):
    return guide.sample_posterior(key, result.params, X, y, sample_shape=(num_draws,))


axis = np.linspace(-3.2, 3.2, 60)
grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
everywhere = np.concatenate([X_test, grid])  # one call for both


def predict(samples):
    p = np.asarray(probabilities(samples, everywhere))
    return p[:, :num_test].mean(axis=0), p[:, num_test:].reshape(-1, len(axis), len(axis))


svi_draws = draw(jax.random.key(1))
svi_test, svi_map = predict(svi_draws)

# %% [markdown]
# How sure is $f$? `npgp.posterior` has its variance; with `draws` it is averaged over draws of the hyperparameters.


# %%
def averaged(model, guide, params):
    return npgp.posterior("f", model, guide, params, X, draws=50)


posterior = averaged(model, guide, result.params)
variance = posterior.variance(grid)


def scatter(ax, **kwargs):
    for label, marker, color in [(0, "o", plots.COLORS[0]), (1, "^", plots.COLORS[1])]:
        ax.scatter(*X[y == label].T, s=8, marker=marker, color=color, label=f"class {label}", **kwargs)


figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.6), layout="constrained", sharex=True, sharey=True)
image = axes[0].contourf(axis, axis, svi_map.mean(axis=0), np.linspace(0, 1, 11), cmap="RdYlBu_r", alpha=0.7)
axes[0].contour(axis, axis, svi_map.mean(axis=0), [0.5], colors="k", linewidths=1)
scatter(axes[0])
figure.colorbar(image, ax=axes[0], label="probability of class 1")
image = axes[1].contourf(axis, axis, np.sqrt(variance).reshape(len(axis), -1), 10, cmap="viridis")
axes[1].scatter(*result.params["inducing"].T, s=30, marker="x", color="w", label="inducing inputs")
figure.colorbar(image, ax=axes[1], label="standard deviation of f (log odds)")
for ax in axes:
    ax.set(xlabel="first input", aspect="equal")
axes[0].set_ylabel("second input")
axes[0].legend(fontsize=8, loc="lower right")
_ = axes[1].legend(fontsize=8, loc="lower right", facecolor="0.3", labelcolor="w")

# %% [markdown]
# Away from the data the probability goes back to ½ and the standard deviation to that of the prior.
#
# ## 2. The same model with NUTS
#
# Without a guide, the model is complete: its latent sites are the whitened inducing values `f.u`, with a standard
# normal prior, and the hyperparameters (Hensman et al. 2015). NUTS takes it as it is. It starts where SVI ended, and
# keeps the inducing inputs that SVI found.

# %%
start = init_to_value(values=guide.median(result.params, X, y))
num_warmup, num_samples = 300, 500


@jax.jit
def run_nuts(key):
    kernel = NUTS(trained_model, init_strategy=start)
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    mcmc.run(key, X, y, extra_fields=("diverging",))
    return mcmc.get_samples(), mcmc.get_extra_fields()["diverging"].sum()


nuts_draws, num_divergences = run_nuts(jax.random.key(2))
print(f"{num_divergences} divergences")
print_summary({name: nuts_draws[name] for name in ("lengthscale", "amplitude")}, group_by_chain=False)

# %%
nuts_test, nuts_map = predict(nuts_draws)


def report(name, p):
    """Error and mean log likelihood on the test rows."""
    error = np.mean((p > 0.5) != y_test)
    score = np.mean(np.log(np.where(y_test == 1, p, 1 - p)))
    print(f"{name:>32}: test error {error:.3f}, mean test log likelihood {score:.3f}")


report("SVI", svi_test)
report("NUTS", nuts_test)
figure, axes = plt.subplots(1, 3, figsize=(9.0, 3.0), layout="constrained")
for ax, name, symbol in [(axes[0], "lengthscale", "lengthscale"), (axes[1], "amplitude", "amplitude (log odds)")]:
    for method, values in [("SVI", svi_draws[name]), ("NUTS", nuts_draws[name])]:
        ax.hist(np.asarray(values), bins=25, density=True, alpha=0.6, label=method)
    ax.set(xlabel=symbol, ylabel="posterior density")
axes[0].legend(frameon=False, fontsize=8)
axes[2].plot([0, 1], [0, 1], color="0.6", lw=0.8)
axes[2].scatter(svi_test, nuts_test, s=4, color="k", alpha=0.4)
_ = axes[2].set(xlabel="P(class 1), SVI", ylabel="P(class 1), NUTS", aspect="equal", title="test rows")

# %%
figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.7), layout="constrained", sharex=True, sharey=True)
for ax, name, p in [(axes[0], "SVI", svi_map), (axes[1], "NUTS", nuts_map)]:
    scatter(ax, alpha=0.4)
    for one in p[:: len(p) // 25]:
        ax.contour(axis, axis, one, [0.5], colors="k", linewidths=0.5, alpha=0.5)
    ax.contour(axis, axis, p.mean(axis=0), [0.5], colors="k", linewidths=2)
    ax.set(title=f"{name}: boundary, mean and 25 draws", xlabel="first input", aspect="equal")
axes[0].set_ylabel("second input")
_ = axes[0].legend(fontsize=8, loc="lower right")

# %% [markdown]
# Predicted probabilities and boundaries agree, and so do the scores on the test rows. By SVI the hyperparameters are as
# uncertain as by NUTS, and lengthscales one to two standard deviations longer. They are as uncertain because the
# guide's inducing values follow them; with `dependence="independent"` they would vary a third as much as under NUTS.
#
# The two do not aim at quite the same posterior. SVI bounds the evidence of the GP itself. NUTS samples the model as it
# is written, in which what the inducing values leave open of $f$ is independent from row to row (FITC). With enough
# inducing inputs little is left open.
#
# ## 3. New data arrive
#
# 400 more rows. `posterior.update` updates a posterior of $f$ and leaves hyperparameters and inducing inputs as they
# are: here the posterior at the medians of the hyperparameters, which are substituted in the guide. It needs neither
# training nor the first rows.


# %%
@jax.jit
def probability_of_1(mean, variance):
    return jnp.exp(npgp.Bernoulli().log_marginal(1, mean, variance))


X_later, y_later = X_all[later], y_all[later]
medians = {name: value for name, value in guide.median(result.params, X, y).items() if name != "f.u"}
at_medians = npgp.posterior("f", model, handlers.substitute(guide, data=medians), result.params, X)
updated = at_medians.update(X_later, y_later, npgp.Bernoulli())
for name, p in [("SVI", posterior), ("SVI, at the medians", at_medians), ("conditioned on the later rows", updated)]:
    report(name, probability_of_1(*p.mean_and_variance(X_test)))

# %% [markdown]
# ## 4. Labels that may be wrong
#
# Let a tenth of the training labels be flipped. A likelihood can be any function from $f$ to a NumPyro distribution,
# which may use other sites of the model: here the share of flipped labels. Expectations over $f$ are then by
# quadrature.


# %%
def robust_model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.7))
    amplitude = numpyro.sample("amplitude", dist.LogNormal(0.7, 0.7))
    flipped = numpyro.sample("flipped", dist.Uniform(0.0, 0.5))  # a larger share would turn f upside down
    f = npgp.SparseGP("f", npgp.RBF(lengthscale, variance=amplitude**2), Z).draw()
    with numpyro.plate("data", len(X)):
        npgp.observe("y", f(X), lambda f: dist.Bernoulli(flipped + (1 - 2 * flipped) * expit(f)), obs=y)


y_flipped = np.where(np.random.default_rng(2).uniform(size=num_train) < 0.1, 1 - y, y)
robust_guide, robust = fit(robust_model, num_steps, X, y_flipped)
flipped = robust_guide.quantiles(robust.params, [0.05, 0.5, 0.95], X, y)["flipped"]
for level, value in zip([5, 50, 95], flipped, strict=True):
    print(f"share of flipped labels, {level:2} % quantile: {value:.3f}")
robust_posterior = averaged(robust_model, robust_guide, robust.params)
report("from the flipped labels", probability_of_1(*robust_posterior.mean_and_variance(X_test)))

# %% [markdown]
# The interval holds the share. The test rows, whose labels are as they were, are predicted somewhat worse than from
# labels without errors.
#
# ## 5. Three classes
#
# `Softmax` has one latent function for each class, drawn together in a plate at dim −2. They share kernel and inducing
# inputs, and each has its own posterior. Here the hyperparameters are parameters, with point estimates. `num_nodes` is
# the accuracy of the integrals over $f$, which are the larger part of the work: 8 nodes suffice here.

# %%
rng = np.random.default_rng(3)
num_rows = 300
arm = rng.integers(0, 3, num_rows)
radius = rng.uniform(0.2, 2.5, num_rows)
angle = 2 * np.pi * arm / 3 + 0.9 * radius + 0.25 * rng.normal(size=num_rows)
X3 = np.column_stack([radius * np.cos(angle), radius * np.sin(angle)])
Z3 = npgp.inducing.kmeans(jax.random.key(0), X3, num_inducing)


def softmax_model(X, y=None):
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=constraints.softplus_positive)
    amplitude = numpyro.param("amplitude", 2.0, constraint=constraints.softplus_positive)
    with numpyro.plate("classes", 3, dim=-2):
        f = npgp.SparseGP("f", npgp.RBF(lengthscale, variance=amplitude**2), Z3).draw()
    with numpyro.plate("data", len(X)):
        npgp.observe("y", f(X), npgp.likelihoods.Softmax(3, num_nodes=8), obs=y)


guide3, result3 = fit(softmax_model, num_steps, X3, arm)
posterior3 = npgp.posterior("f", softmax_model, guide3, result3.params, X3)
class_probabilities = jax.jit(npgp.likelihoods.Softmax(3).probabilities)
p = np.asarray(class_probabilities(*posterior3.mean_and_variance(grid)))  # (classes, rows)

figure, axes = plt.subplots(1, 2, figsize=(8.0, 3.5), layout="constrained", sharex=True, sharey=True)
palette = np.array([[0.0, 0.45, 0.70], [0.84, 0.37, 0.0], [0.0, 0.62, 0.45]])
mixed = 1 - (1 - palette.T) @ p  # the classes' colors, mixed by their probabilities
extent = (axis[0], axis[-1], axis[0], axis[-1])
axes[0].imshow(mixed.T.reshape(len(axis), len(axis), 3), origin="lower", extent=extent, interpolation="bilinear")
for c in range(3):
    axes[0].scatter(*X3[arm == c].T, s=14, color=palette[c], edgecolor="k", lw=0.4, label=f"class {c}")
axes[0].set(title="colors mixed by probability", ylabel="second input")
axes[0].legend(fontsize=8, loc="lower right")
image = axes[1].contourf(axis, axis, p.max(axis=0).reshape(len(axis), -1), np.linspace(0.3, 1, 8), cmap="viridis")
axes[1].scatter(*Z3.T, s=30, marker="x", color="w")
axes[1].set_title("the likeliest class; crosses: inducing inputs")
figure.colorbar(image, ax=axes[1], label="probability")
for ax in axes:
    ax.set(xlabel="first input", aspect="equal")

# %% [markdown]
# ## Where next
#
# - More rows: `npgp.plate` and `npgp.fit(..., batch_size=B)`, as in notebook 01. NUTS needs all rows at every step.
# - Ordered classes: `npgp.likelihoods.Ordinal`.
# - Classes with covariates and group effects: `f(X) + effect * dose`, as in notebook 03.
