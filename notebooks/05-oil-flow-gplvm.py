# %% [markdown]
# # The Bayesian GPLVM on the oil flow
#
# Twelve measurements of the flow in an oil pipeline, taken by gamma rays along six beams, at a thousand moments. What
# happens in the pipe has far fewer degrees of freedom: how much of it is oil, water and gas, and whether they are
# mixed, in layers, or in rings. A GPLVM finds such coordinates without being told: each measurement is a GP of latent
# inputs, which are inferred along with everything else. In this notebook
#
# 1. a model is trained, and says how many dimensions it needs;
# 2. its latent space is looked at;
# 3. the classical bound and tighter ones are compared, at the same parameters;
# 4. entries are missing: in training, and in new rows;
# 5. other families of q(x) and priors of x take the place of the usual ones.

# %%
import os
import warnings
from dataclasses import replace

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp import datasets, plots
from npgp.conditionals import Grouped, Prior, Tight

numpyro.enable_x64()
plt.rcParams["figure.dpi"] = 150
# Bounds of GPLVMs rise for thousands of steps, by little in the end: `fit` says so, and here nothing waits for it.
warnings.filterwarnings("ignore", message="npgp.fit: the loss was still falling")
warnings.filterwarnings("ignore", message="npgp.gplvm.fit has not converged")

# %% [markdown]
# ## The data
#
# The set of Bishop & James (1993), itself a simulation, is read from the folder that the environment variable
# `NPGP_DATA` names. Where there is none, a simulation of ours from the same physics stands in for it, and the numbers
# below are of that one. Each row has the class of its flow, which the model does not see.

# %%
real = "NPGP_DATA" in os.environ
if real:
    data, unseen = datasets.oil_flow("train"), datasets.oil_flow("valid")
else:
    data, unseen = (datasets.simulate_oil_flow(jax.random.key(seed), 1000) for seed in (0, 1))
rows = 1000
Y, labels = data.Y[:rows], data.labels[:rows]
class_names = ("homogeneous", "annular", "stratified")
print("the oil flow of Bishop & James" if real else "simulated oil flow")
print(f"{Y.shape[0]} rows of {Y.shape[1]} measurements; {', '.join(class_names)}: {np.bincount(labels)} rows")

# %% [markdown]
# ## 1. A model, and the number of its dimensions
#
# `npgp.gplvm.fit` needs no start and no rates: several starts race on the collapsed bound, which has q(u) at its
# optimum and no noise, by L-BFGS, and the two best go on for at most 3600 steps. There are more latent dimensions
# than are needed, ten: each has a lengthscale of its own in the kernel, and those that explain nothing are switched off
# by their lengthscales growing long. They help on the way, though: with many dimensions clusters can pass one another,
# and `fit` narrows one after the other as long as the bound is the better for it. `tight`, the default, is the
# conditional of Bui, Ashman & Turner (2025).

# %%
num_inducing, steps = 25, 6000


def climb(Y, **options):
    return npgp.gplvm.fit(jax.random.key(0), Y, 10, num_inducing, max_steps=3600, progress=False, **options)


trained = climb(Y)
gplvm, params = trained.gplvm, trained.params
print(f"bound per row: {trained.bound / rows:.2f} nats; noise variance {params['noise_variance']:.4f}")

# %% [markdown]
# The relevance of a dimension is how far the rows are spread along it, in units of its lengthscale. The dimensions that
# count are those with at least a tenth of the largest relevance. That is a convention: one with a little less is
# narrow, and still tells rows apart.

# %%
relevance = trained.relevance
print(f"{npgp.gplvm.effective_dimensions(relevance)} of 10 dimensions count")
figure = plots.plot_relevance({"tight": relevance}, threshold=0.1)

# %% [markdown]
# ## 2. The latent space
#
# Directions, signs and scales of latent dimensions mean nothing by themselves. `canonical_latents` settles them: units
# of the lengthscale, most relevant first, signs by convention. Each point has bars of one standard deviation of q(x).
# The background is the variance of the functions: where it is light the model has seen rows, where it is grey it has
# not, and a row there would be a surprise.

# %%
latents = trained.latents
background = npgp.gplvm.predictive_variance(trained.posterior, latents)
figure = plots.plot_latents(trained, labels, class_names=class_names, background=background)
mistakes = npgp.gplvm.nearest_neighbor_errors(latents.loc, labels)
print(f"rows whose nearest neighbor in latent space is of another class: {mistakes} of {rows}")

# %% [markdown]
# ## 3. Bounds
#
# At given parameters each conditional gives a bound on the same evidence, and they are ordered: `grouped` lets rows
# that are close in data space share what the inducing points leave open. How much is gained depends on how much that
# is: here `tight` was trained, and has moved to where it does well.
#
# Training with each conditional may end elsewhere, at local optima that differ by more than the bounds do: compare
# conditionals at equal parameters, or from several starts (`python scripts/study.py oil-bounds`).

# %%
for conditional in (Prior(), Tight(), Grouped(npgp.sparse.median_split(Y, 16))):
    other = replace(gplvm, conditional=conditional)
    svi = SVI(other.model, other.guide, npgp.adam(0.03, steps), TraceMeanField_ELBO())
    there = svi.init(jax.random.key(0), Y=Y, init_params=params)
    value, _ = npgp.evaluate(svi, jax.random.key(1), there, Y=Y)
    print(f"{type(conditional).__name__.lower():>8}: {value / rows:.2f} nats per row")

# %% [markdown]
# ## 4. Missing entries
#
# Entries that are missing are NaN, and `mask="nan"` says so: they are left out of the likelihood, and the latent inputs
# are inferred from those that are there. We hide a quarter, train on the rest, and look at what is said of the hidden
# ones.

# %%
present = np.random.default_rng(2).random(Y.shape) < 0.75
Y_seen = np.where(present, Y, np.nan)
partial = climb(Y_seen, mask="nan")
at = partial.params
mean, variance = partial.gplvm.reconstruct(at, at["x.loc"], at["x.scale"])
scale = np.sqrt(variance + at["noise_variance"])


def rmse(values, where):
    return np.sqrt(np.mean((values - Y)[where] ** 2))


column_means = np.broadcast_to(np.nanmean(Y_seen, axis=0), Y.shape)
coverage = np.mean((np.abs(mean - Y) < 1.645 * scale)[~present])
print(f"RMSE of missing entries: {rmse(mean, ~present):.3f}; of the columns' means: {rmse(column_means, ~present):.3f}")
print(f"90% intervals hold {coverage:.0%} of them")
figure = plots.plot_imputation(Y, mean, scale, present, units="pipe radii")

# %% [markdown]
# New rows can be partial too. At fixed parameters `infer_latents` finds q(x) of each from what was measured, starting
# from several places in latent space, and `predict` says what the rest should be. Here the last six measurements, those
# of the horizontal beams, are missing in rows that the model has not seen. Half a row leaves several places possible;
# predictions mix those that were found. Their intervals are somewhat too narrow, as not all places are found.

# %%
Y_new = unseen.Y[:200]
seen = np.ones(Y_new.shape, bool)
seen[:, 6:] = False
posterior, likelihood = trained.posterior, trained.likelihood
offset = gplvm.start.offset
new = npgp.gplvm.infer_latents(
    posterior, likelihood, np.where(seen, Y_new, np.nan), mask="nan", offset=offset, candidates=params["x.loc"]
)
predicted, variance = new.predict(posterior, likelihood, offset=offset)
hidden = (predicted - Y_new)[~seen]
print(f"RMSE of the six hidden measurements: {np.sqrt(np.mean(hidden**2)):.3f}")
print(f"RMSE of the columns' means: {np.sqrt(np.mean((Y.mean(0) - Y_new)[~seen] ** 2)):.3f}")
print(f"90% intervals hold {np.mean(np.abs(hidden) < 1.645 * np.sqrt(variance[~seen])):.0%}")

# %% [markdown]
# ## 5. Other families, other priors
#
# With an encoder, q(x) is computed from the row by a network: parameters do not grow with the data, and new rows need
# no search. The prior of x is a choice as well. Here a few rows have labels: the rows of a class share a Gaussian of
# their own, those without a label have N(0, I). Such models are trained by SVI, from a start at the principal
# components (`npgp.gplvm.pca_start`), which ends lower than the climb of the collapsed bound; so here all are trained
# so, and for as many steps each, to be compared.

# %%
some = np.where(np.arange(rows) % 10 == 0, labels, -1)
free = npgp.BayesianGPLVM(npgp.gplvm.pca_start(jax.random.key(0), Y, latent_dim=10, num_inducing=num_inducing))
variants = {
    "free": free,
    "encoder": replace(free, latents=npgp.gplvm.Encoder(rng_key=jax.random.key(0))),
    "labels of every tenth row": replace(free, prior=npgp.gplvm.ClassNormal(some)),
}
for name, variant in variants.items():
    svi = SVI(variant.model, variant.guide, npgp.adam(0.03, steps), TraceMeanField_ELBO())
    result = npgp.fit(svi, jax.random.key(0), steps, progress=False, Y=Y)
    value, _ = npgp.evaluate(svi, jax.random.key(1), result, Y=Y)
    loc, scale = variant.latents_at(result.params, Y)
    mistakes = npgp.gplvm.nearest_neighbor_errors(np.asarray(loc / result.params["lengthscale"]), labels)
    print(f"{name:>26}: ELBO per row {value / rows:5.2f}, nearest neighbors of another class {mistakes:3d}")

# %% [markdown]
# A GPLVM is an ordinary NumPyro model around `npgp.SparseGP`. Two data sets that share latent inputs are one more
# component (`scripts/examples/shared_latents.py`); counts, labels and unlike columns are another likelihood
# (`npgp.likelihoods.Columns`), which `npgp.gplvm.fit` takes too, as it does many rows; time is another prior
# (`npgp.gplvm.Dynamical`).
