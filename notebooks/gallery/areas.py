# %% [markdown]
# # From areas to a map
#
# Counts, votes or yields are often known for areas alone: districts, fields, catchments. Here 80 areas of unequal shape
# each report the mean of a smooth quantity over all of their ground, and what is wanted is the map. An area's mean is a
# linear functional of the map: with the ground as a grid of 576 places and a matrix B whose rows say which places areas
# have, the rows of the model are `B @ f(grid)`. Nothing is smoothed by hand, no area is taken for its center, and the
# posterior says how well each place is known. The exact GP's answer, by dense algebra, stands beside.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import npgp
from npgp.functionals import at

plt.rcParams["figure.dpi"] = 150

jax.config.update("jax_enable_x64", True)  # collapsed bounds want double precision

# %%
rng = np.random.default_rng(3)
side, num_areas, noise = 24, 80, 0.05
line = (np.arange(side) + 0.5) / side
grid = np.stack(np.meshgrid(line, line), -1).reshape(-1, 2)
truth = np.sin(5.0 * grid[:, 0]) * np.cos(4.0 * grid[:, 1]) + np.exp(-30.0 * np.sum((grid - [0.7, 0.3]) ** 2, 1))
centers = rng.uniform(size=(num_areas, 2))
area = np.argmin(np.sum((grid[:, None] - centers) ** 2, -1), 1)  # of each place
area = np.unique(area, return_inverse=True)[1]
B = (area == np.arange(area.max() + 1)[:, None]).astype(float)
B /= B.sum(1, keepdims=True)
y = B @ truth + noise * rng.normal(size=len(B))
print(f"{len(B)} areas of {np.bincount(area).min()} to {np.bincount(area).max()} places")

# %% [markdown]
# The model: an area's observation is the mean of f over its places, with noise. Lengthscale, variance and noise are at
# their joint mode, found by L-BFGS.

# %%
rows = B @ at(grid)
Z = np.stack(np.meshgrid(np.linspace(0, 1, 9), np.linspace(0, 1, 9)), -1).reshape(-1, 2)


def gp(rows, lengthscale, sd, noise):
    return npgp.CollapsedGP(npgp.RBF(lengthscale, variance=sd**2), rows, Z, npgp.Gaussian(scale=noise))


def model(rows, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.7))
    sd = numpyro.sample("sd", dist.HalfNormal(2.0))
    scale = numpyro.sample("noise", dist.HalfNormal(0.3))
    numpyro.sample("y", gp(rows, lengthscale, sd, scale), obs=y)


data = (rows, y)

# %%
mode = npgp.fit_collapsed(jax.random.key(0), model, *data, progress=False).params
lengthscale, sd, scale = (float(mode[f"{name}_auto_loc"]) for name in ("lengthscale", "sd", "noise"))
print(f"lengthscale {lengthscale:.2f}, sd {sd:.2f}, noise {scale:.3f}")
posterior = gp(rows, lengthscale, sd, scale).condition(y)
mean, variance = posterior.mean_and_variance(grid)

# %% [markdown]
# The exact GP at the same hyperparameters: 576 places, 80 observations.

# %%
K = sd**2 * np.exp(-0.5 * np.sum((grid[:, None] - grid) ** 2, -1) / lengthscale**2)
gain = np.linalg.solve(B @ K @ B.T + scale**2 * np.eye(len(B)), B @ K).T
exact, exact_variance = gain @ y, np.diag(K) - np.sum(gain * (K @ B.T), 1)
away = np.max(np.abs(mean - exact) / np.sqrt(exact_variance))
print(f"means differ from the exact GP's by at most {away:.4f} of its sds")
step = y[area]  # each place takes its area's value
for name, values in (("areas' values", step), ("map", mean)):
    print(f"RMSE of the {name}: {np.sqrt(np.mean((values - truth) ** 2)):.3f}")
inside = np.mean(np.abs(mean - truth) < 1.645 * np.sqrt(variance))
print(f"{inside:.0%} of the places inside 90% intervals")
# A sum over a region is a functional, too: the mean of the right half.
right = (grid[:, 0] > 0.5).astype(float)[None] / np.sum(grid[:, 0] > 0.5)
half, half_variance = posterior.mean_and_variance(right @ at(grid))
print(f"mean of the right half {half[0]:.3f} ± {np.sqrt(half_variance[0]):.3f}, truth {(right @ truth)[0]:.3f}")

# %%
figure, axes = plt.subplots(1, 4, figsize=(13.0, 3.4), layout="constrained")
limits = dict(vmin=truth.min(), vmax=truth.max())
panels = ("what 80 areas report", "the map, from these", "the truth", "sd of the map")
for ax, values, title in zip(axes, (step, mean, truth, np.sqrt(variance)), panels, strict=True):
    options = {} if title.startswith("sd") else limits
    shown = ax.imshow(np.reshape(values, (side, side)), origin="lower", extent=(0, 1, 0, 1), **options)
    figure.colorbar(shown, ax=ax, shrink=0.8)
    ax.set(title=title, xticks=[], yticks=[])

# %% [markdown]
# The map knows slopes within areas from the areas around. It is least sure at the border and in large areas.
#
# Of counts the expected number is the mean of exp f over an area, not the exponential of a mean: [differences, averages
# and slopes](../../docs/howto/functionals.md) says what to write.
