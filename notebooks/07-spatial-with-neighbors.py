# %% [markdown]
# # Spatial counts, with neighbors and with inducing points
#
# An inducing point speaks for the function within about a lengthscale of it. Where lengthscales are short and the map
# is wide, few points are not enough, and what lies between them is smoothed away. A *variational nearest-neighbor GP*
# (VNNGP; Wu, Pleiss & Cunningham 2022) has an inducing point at every site, and each value of $f$ depends on the
# nearest few alone. A step of training looks at minibatches of both sites and inducing points, so that its cost does
# not grow with their numbers. This notebook shows
#
# 1. a point pattern as counts of cells, and a model of it with either component;
# 2. maps of the intensity, and a check on cells held out;
# 3. what the ELBOs can be compared with, and where the standard deviations are wrong;
# 4. a simulation with a short lengthscale;
# 5. predictions between the cells;
# 6. the nearest-neighbor GP as a prior, under NUTS;
# 7. when to choose which.

# %%
from functools import partial

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from matplotlib.colors import LogNorm
from numpyro.distributions.constraints import positive
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy.optimize import minimize
from scipy.special import gammaln

import npgp

numpyro.enable_x64()
plt.rcParams["figure.dpi"] = 150

# %% [markdown]
# ## 1. Counts of cells
#
# The places of 126 pine saplings in a square (Finnish pines; Penttinen, Stoyan & Henttonen 1992), from the folder that
# the environment variable `NPGP_DATA` names, or else places drawn from a similar process. We count the trees in cells:
# the count $y_n$ of cell $n$ with area $a$ and center $s_n$ is
#
# $$y_n \sim \text{Poisson}\big(a \exp(\text{level} + f(s_n))\big),$$
#
# so that $\exp(\text{level} + f)$ is an intensity, trees per area of the square, whatever the cells are. A fifth of the
# cells, chosen at random, are hidden from all methods.


# %%
def grid(side):
    """Centers of side × side cells of the unit square."""
    axis = (np.arange(side) + 0.5) / side
    return np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)


def matern(a, b, lengthscale, amplitude):
    r = np.sqrt(3) * np.linalg.norm(a[:, None] - b, axis=-1) / lengthscale
    return amplitude**2 * (1 + r) * np.exp(-r)


def draw_gp(rng, sites, lengthscale, amplitude):
    covariance = matern(sites, sites, lengthscale, amplitude) + 1e-9 * np.eye(len(sites))
    return np.linalg.cholesky(covariance) @ rng.normal(size=len(sites))


def load_pines():
    try:
        return npgp.datasets.load("pines")["xy"], "pines"
    except FileNotFoundError:
        rng, fine = np.random.default_rng(0), grid(30)
        cells = np.repeat(np.arange(900), rng.poisson(np.exp(4.4 + draw_gp(rng, fine, 0.06, 0.9)) / 900))
        return fine[cells] + rng.uniform(-1 / 60, 1 / 60, (len(cells), 2)), "simulated trees"


class Counts:
    """Counts of side × side cells, some of them hidden."""

    def __init__(self, counts, side):
        self.y, self.side, self.area, self.sites = np.asarray(counts, float), side, 1 / side**2, grid(side)
        self.hidden = np.zeros(side**2, bool)
        self.hidden[np.random.default_rng(1).permutation(side**2)[: side**2 // 5]] = True
        self.S, self.y_seen = self.sites[~self.hidden], self.y[~self.hidden]
        self.start_level = np.log(self.y_seen.mean() / self.area)


places, name = load_pines()
side = 20
counts, _, _ = np.histogram2d(places[:, 1], places[:, 0], bins=side, range=[[0, 1], [0, 1]])
pines = Counts(counts.ravel(), side)
print(f"{name}: {len(places)} trees; {len(pines.y)} cells, {pines.hidden.sum()} hidden; counts to {counts.max():.0f}")

# %% [markdown]
# One model for both components. The rows of a VNNGP come with the numbers of the inducing points that they depend on.
# Here each row *is* an inducing point and depends on that one alone, so that `near` is its own number. With
# `near=None` it is a model of SVGP. Hyperparameters are `numpyro.param`s; they could be sampled from priors.


# %%
def model(S, near, y=None, *, component, data):
    lengthscale = numpyro.param("lengthscale", 0.1, constraint=positive)
    amplitude = numpyro.param("amplitude", 1.0, constraint=positive)
    level = numpyro.param("level", data.start_level)
    f = component(npgp.Matern32(lengthscale, variance=amplitude**2)).draw()
    with npgp.plate("cells", len(data.S), rows=len(S)):
        value = f(S) if near is None else f(S, neighbors=near)
        npgp.observe("y", value + level, npgp.Poisson(exposure=data.area), obs=y)


# %% [markdown]
# Neighbors are found once, before the model: of each inducing point among those before it in an order, here the ten
# nearest. SVGP gets a regular grid of inducing points.
#
# Both are trained by SVI with the automatic guide, in minibatches of cells. The VNNGP's inducing points come in
# minibatches as well, `batch_size`; with `row_optim` a step moves the entries of $q(u)$ that it looks at and no others.
# Each takes 3000 steps, whose rates fall on the way.

# %%
num_neighbors, batch, steps = 10, 80, 3000


def components(data, num_svgp):
    """Ways to make f of a kernel, and the rows' neighbors."""
    neighbors = npgp.neighbors.nearest_before(data.S, num_neighbors)
    return {
        "VNNGP": (
            lambda kernel: npgp.VNNGP("f", kernel, data.S, neighbors, batch_size=batch),
            np.arange(len(data.S))[:, None],
        ),
        "SVGP": (lambda kernel: npgp.SparseGP("f", kernel, grid(num_svgp)), None),
    }


def train(data, component, near):
    """ELBO (average of the last 200 steps), hyperparameters, and the posterior of f."""
    here = partial(model, component=component, data=data)
    svi = SVI(here, npgp.AutoSparseGP(here), npgp.adam(0.02, steps), TraceMeanField_ELBO())
    row_optim = None if near is None else npgp.training.row_adam(0.05, steps)
    result = npgp.fit(
        svi, jax.random.key(0), steps, data.S, near, data.y_seen, batch_size=batch, row_optim=row_optim, progress=False
    )
    params = result.params
    theta = {name: float(params[name]) for name in ("lengthscale", "amplitude", "level")}
    posterior = component(npgp.Matern32(theta["lengthscale"], variance=theta["amplitude"] ** 2)).posterior(params)
    return -np.mean(result.losses[-200:]), theta, posterior


def train_both(data, num_svgp):
    return {name: train(data, *made) for name, made in components(data, num_svgp).items()}


fits = train_both(pines, 8)

# %% [markdown]
# There are so few cells that we can do without sparsity for comparison: the *dense* GP, by Laplace's approximation, a
# Gaussian about the posterior's mode and an estimate of the log evidence. That approximates the posterior too, but all
# values of $f$ are dependent in it. Its hyperparameters maximize the estimate. The covariance `K` of the seen cells can
# be another than the kernel's.


# %%
def laplace(data, lengthscale, amplitude, level, K=None):
    """Estimate of the log evidence, and mean and variance of f at all cells."""
    K = matern(data.S, data.S, lengthscale, amplitude) + 1e-8 * np.eye(len(data.S)) if K is None else K
    f = np.log((data.y_seen + 0.5) / data.area) - level
    for _ in range(12):  # Newton's method
        expected = data.area * np.exp(level + f)
        root = np.sqrt(expected)
        L = np.linalg.cholesky(np.eye(len(K)) + root[:, None] * K * root)
        b = expected * f + data.y_seen - expected
        weights = b - root * np.linalg.solve(L.T, np.linalg.solve(L, root * (K @ b)))
        f = K @ weights
    expected = data.area * np.exp(level + f)
    fit = np.sum(data.y_seen * np.log(expected) - expected - gammaln(data.y_seen + 1))
    K_new = matern(data.sites, data.S, lengthscale, amplitude)
    half = np.linalg.solve(L, root[:, None] * K_new.T)
    evidence = fit - 0.5 * weights @ f - np.sum(np.log(np.diag(L)))
    return evidence, K_new @ weights, amplitude**2 - np.sum(half**2, axis=0)


def unpack(theta):
    return {"lengthscale": np.exp(theta[0]), "amplitude": np.exp(theta[1]), "level": theta[2]}


best = minimize(
    lambda theta: -laplace(pines, **unpack(theta))[0],
    [np.log(0.1), 0.0, pines.start_level],
    method="Nelder-Mead",
    options={"maxfev": 100},
)
dense = unpack(best.x)

# %% [markdown]
# ## 2. Maps, and cells held out
#
# A VNNGP predicts at any place from the inducing points nearest to it; the hidden cells are such places, since only
# seen cells are inducing points here. The intensity is log-normal. The maps differ also because each method has found
# hyperparameters of its own; colors are the same for all.


# %%
def predict(sites, fit):
    """Mean and variance of level + f."""
    _, theta, posterior = fit
    mean, variance = posterior.mean_and_variance(sites)
    return theta["level"] + np.asarray(mean), np.asarray(variance)


def intensity(mean, variance):
    """Mean and standard deviation of exp(level + f)."""
    first = np.exp(mean + 0.5 * variance)
    return first, first * np.sqrt(np.expm1(variance))


def score(data, mean, variance):
    """Log predictive density of the hidden cells' counts, one by one."""
    hidden, likelihood = data.hidden, npgp.Poisson(exposure=data.area)
    return np.asarray(likelihood.log_marginal(data.y[hidden], mean[hidden], variance[hidden]))


def report(data, moments, thetas):
    constant = score(data, np.full(len(data.y), data.start_level), np.full(len(data.y), 1e-12))
    print(f"log predictive density per hidden cell; constant rate: {constant.mean():.3f}")
    print(f"{'':>8}{'lengthscale':>13}{'amplitude':>11}{'density':>10}{'more than constant':>20}")
    for name, found in moments.items():
        density, theta = score(data, *found), thetas[name]
        gain, error = np.mean(density - constant), np.std(density - constant) / np.sqrt(len(constant))
        print(
            f"{name:>8}{theta['lengthscale']:13.3f}{theta['amplitude']:11.2f}{density.mean():10.3f}"
            f"{gain:+13.3f} ± {error:.3f}"
        )


moments = {name: predict(pines.sites, fit) for name, fit in fits.items()}
_, mean, variance = laplace(pines, **dense)
moments["dense"] = dense["level"] + mean, variance
thetas = {name: fit[1] for name, fit in fits.items()} | {"dense": dense}
report(pines, moments, thetas)


# %%
def draw_map(ax, data, values, **scale):
    edges = np.linspace(0, 1, data.side + 1)
    ax.set(aspect="equal", xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
    return ax.pcolormesh(edges, edges, values.reshape(data.side, data.side), **scale)


rows = [[intensity(*found)[part] for found in moments.values()] for part in (0, 1)]
figure, axes = plt.subplots(2, 3, figsize=(9.0, 6.0), layout="constrained", sharex=True, sharey=True)
for line, values, label in zip(axes, rows, ("mean", "standard deviation"), strict=True):
    scale = LogNorm(np.min(values), np.max(values))
    for ax, value, name in zip(line, values, moments, strict=True):
        image = draw_map(ax, pines, value, norm=scale)
        ax.set_title(f"{name}, {label}", fontsize=10)
    bar = figure.colorbar(image, ax=line, ticks=[30, 50, 100, 200, 500, 1000], format="%g")
    bar.minorticks_off()
    bar.set_label("trees per area of the square")
for ax in axes[0]:
    ax.scatter(*places.T, s=3, color="w")

# %% [markdown]
# SVGP, whose 64 points are an eighth of the square apart, finds a smooth trend. The VNNGP and the dense GP see what the
# eye sees as well: saplings stand in clusters, hardly larger than a cell (0.05). All three say more of the hidden cells
# than the constant rate; with 80 cells the differences between them are within their errors.
#
# ## 3. ELBOs and standard deviations
#
# SVGP's ELBO is a lower bound on the log evidence of the GP model. The VNNGP's is one on the log evidence of *another
# model*, in which the prior is the nearest-neighbor GP of these neighbors in this order, and that evidence may be
# above the GP's or below. So
#
# - ELBOs of SVGPs compare with each other, whatever their inducing points, and with the evidence of the GP;
# - ELBOs of VNNGPs with the same inducing points and neighbors compare with each other: kernels, covariates,
#   likelihoods;
# - one of each does not compare with the other. Predictions of held-out data do.
#
# In the table are the ELBOs, and Laplace's estimates of both evidences at the same hyperparameters. The third line is
# a VNNGP held at the smooth kernel that SVGP has found.


# %%
def neighbor_covariance(data, theta):
    """The seen cells' covariance in the nearest-neighbor prior."""
    kernel = npgp.Matern32(theta["lengthscale"], variance=theta["amplitude"] ** 2)
    factor = npgp.neighbors.NNGP(kernel, data.S, npgp.neighbors.nearest_before(data.S, num_neighbors)).factor()
    half = np.asarray(factor.color(np.eye(len(data.S))))
    return half.T @ half


def report_elbos(data, fits, moments):
    print(f"{'':>14}{'lengthscale':>13}{'ELBO':>9}{'log evidence: GP':>19}{'neighbors':>12}{'sd / dense sd':>15}")
    for name, (elbo, theta, _) in fits.items():
        evidence, _, variance = laplace(data, **theta)
        of_neighbors, _, _ = laplace(data, **theta, K=neighbor_covariance(data, theta))
        ratio = np.mean(np.sqrt(moments[name][1] / variance))
        print(f"{name:>14}{theta['lengthscale']:13.3f}{elbo:9.1f}{evidence:19.1f}{of_neighbors:12.1f}{ratio:15.2f}")


component, near = components(pines, 8)["VNNGP"]
smooth = fits["SVGP"][1]
kernel = npgp.Matern32(smooth["lengthscale"], variance=smooth["amplitude"] ** 2)
elbo, theta, posterior = train(pines, lambda _: component(kernel), near)
fits["VNNGP, smooth"] = elbo, smooth | {"level": theta["level"]}, posterior
moments["VNNGP, smooth"] = predict(pines.sites, fits["VNNGP, smooth"])
report_elbos(pines, fits, moments)

# %% [markdown]
# Ten neighbors are plenty: both models have about the same evidence. But the VNNGP's $q(u)$ takes the inducing values
# as independent, and under a smooth prior each is nearly determined by its neighbors. Independent values agree with
# such a prior only if they are known closely. So $q(u)$ is narrow: the standard deviations are a third of what they
# should be, and the ELBO is far below the evidence. Training sees this as a cost of long lengthscales and ends at a
# shorter one than the dense GP. Where the lengthscale is no longer than the distance between sites, as in the first
# line, little is lost.
#
# ## 4. A short lengthscale
#
# A simulation in which there is much to see: a lengthscale of 0.05 on 30 by 30 cells, and about eight events in each.


# %%
side = 30
truth = {"lengthscale": 0.05, "amplitude": 1.0, "level": np.log(5 * side**2)}
axis = np.linspace(0, 1, 400)
cut = np.column_stack([axis, np.full(len(axis), (side // 2 + 0.5) / side)])  # along a row of cells, for part 5
f_true = truth["level"] + draw_gp(np.random.default_rng(2), np.concatenate([grid(side), cut]), 0.05, 1.0)
f_cells, f_cut = np.split(f_true, [side**2])
simulated = Counts(np.random.default_rng(3).poisson(np.exp(f_cells) / side**2), side)
fits = train_both(simulated, 8)

moments = {name: predict(np.concatenate([simulated.sites, cut]), fit) for name, fit in fits.items()}
on_cut = {name: (mean[side**2 :], variance[side**2 :]) for name, (mean, variance) in moments.items()}
moments = {name: (mean[: side**2], variance[: side**2]) for name, (mean, variance) in moments.items()}
_, mean, variance = laplace(simulated, **truth)
moments["dense"] = truth["level"] + mean, variance  # given the true hyperparameters
report(simulated, moments, {name: fit[1] for name, fit in fits.items()} | {"dense": truth})
print("\nlog intensity, cells seen and hidden")
for name, (mean, variance) in moments.items():
    error, inside = mean - f_cells, np.abs(mean - f_cells) < 2 * np.sqrt(variance)
    parts = [
        f"error {np.sqrt(np.mean(error[cells] ** 2)):.2f}, truth within 2 sd {np.mean(inside[cells]):4.0%}"
        for cells in (~simulated.hidden, simulated.hidden)
    ]
    print(f"{name:>8}   {'      '.join(parts)}")
print()
report_elbos(simulated, fits, moments)

# %%
figure, axes = plt.subplots(2, 3, figsize=(9.0, 6.0), layout="constrained", sharex=True, sharey=True)
scale = {"cmap": "viridis", "vmin": f_cells.min(), "vmax": f_cells.max()}
image = draw_map(axes[0, 0], simulated, f_cells, **scale)
axes[0, 0].set_title("truth", fontsize=10)
seen = np.where(simulated.hidden, np.nan, simulated.y)
counts = draw_map(axes[1, 0], simulated, seen, cmap="magma", vmin=0, vmax=np.nanquantile(seen, 0.99))
axes[1, 0].set_title("counts (grey: hidden)", fontsize=10)
axes[1, 0].set_facecolor("0.7")
figure.colorbar(counts, ax=axes[1, 0], location="left", label="count")
widest = max(np.sqrt(moments[name][1]).max() for name in fits)
for column, name in enumerate(fits, 1):
    mean, variance = moments[name]
    draw_map(axes[0, column], simulated, mean, **scale)
    spread = draw_map(axes[1, column], simulated, np.sqrt(variance), cmap="cividis", vmin=0, vmax=widest)
    axes[0, column].set_title(f"{name}, mean", fontsize=10)
    axes[1, column].set_title(f"{name}, standard deviation", fontsize=10)
figure.colorbar(image, ax=axes[0], label="log intensity")
bar = figure.colorbar(spread, ax=axes[1], label="log intensity")

# %% [markdown]
# The VNNGP predicts as well as the dense GP that is told the true hyperparameters. SVGP sees a smoother map and is sure
# of it: its intervals hold the truth in less than half of the cells. More points help, but a step costs $M^3$, and a
# map twice as wide needs four times as many. The evidences show it too: at the hyperparameters that SVGP has found, its
# ELBO is hundreds of nats below the evidence of the GP.
#
# ## 5. Between the cells
#
# Prediction at new places needs no more than their nearest inducing points, `npgp.neighbors.nearest(X_new, Z, k)`,
# which a posterior finds by itself where inputs are not traced. Along a row of cells through the middle of the map:

# %%
figure, axes = plt.subplots(len(fits), 1, figsize=(8.0, 4.6), layout="constrained", sharex=True, sharey=True)
row = np.isclose(simulated.sites[:, 1], cut[0, 1])
for ax, (name, (mean, variance)) in zip(axes, on_cut.items(), strict=True):
    half = 2 * np.sqrt(variance)
    ax.fill_between(axis, mean - half, mean + half, color="C0", alpha=0.25, lw=0, label="± 2 standard deviations")
    ax.plot(axis, mean, color="C0", lw=1.2, label="posterior mean")
    ax.plot(axis, f_cut, color="k", lw=0.8, ls="--", label="truth")
    for hidden, marker in ((False, "|"), (True, "x")):
        at = simulated.sites[row & (simulated.hidden == hidden), 0]
        label = "hidden cell" if hidden else "cell"
        ax.plot(at, np.full(len(at), f_cut.min() - 1.5), "k" + marker, ms=6, label=label)
    ax.set(title=name, ylabel="log intensity")
axes[-1].set_xlabel("$s_1$")
legend = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)

# %% [markdown]
# Uncertainty grows at hidden cells, where the nearest counts are farther away. Mean and variance at each place are what
# a VNNGP is for. Its joint draws, `posterior.sample`, take values at places other than inducing points as independent
# given the inducing values; for curves or surfaces to look at, make the places inducing points.
#
# ## 6. The prior by itself, and NUTS
#
# The nearest-neighbor GP is also a NumPyro distribution, for any likelihood and NUTS. Then there is no $q$, and values
# are as dependent as the prior has them. It takes longer than all above, so these lines are not run here:
#
# ```python
# neighbors = npgp.neighbors.nearest_before(S, 10)
#
# def latent(y):
#     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(np.log(0.1), 1.0))
#     amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
#     level = numpyro.sample("level", dist.Normal(start_level, 1.0))
#     f = numpyro.sample("f", npgp.neighbors.NNGP(npgp.Matern32(lengthscale, amplitude**2), S, neighbors))
#     numpyro.sample("y", dist.Poisson(area * jnp.exp(level + f)), obs=y)
#
# mcmc = MCMC(NUTS(latent), num_warmup=500, num_samples=500)
# mcmc.run(key, y)
# ```
#
# Given one draw of hyperparameters and `f`, `npgp.neighbors.NNGP(kernel, S, neighbors).condition(f).sample(key,
# S_new)` goes on to new sites. Where data say little of each value, `npgp.neighbors.WhitenNNGP` helps; with Gaussian
# noise `npgp.neighbors.ResponseNNGP` integrates $f$ out. And a model with a `VNNGP` runs under NUTS as it is, without a
# guide, if its hyperparameters are sampled.
#
# ## 7. When to choose which
#
# | | `SparseGP` (SVGP) | `VNNGP` | `NNGP`, NUTS |
# |---|---|---|---|
# | good for lengthscales | that span many sites | about the distance of sites | of all sizes |
# | elsewhere | smooths detail away | is too sure, finds too short a lengthscale | |
# | approximates | the posterior | prior, by neighbors; posterior, values independent | the prior, by neighbors |
# | ELBO bounds | the GP's evidence | the nearest-neighbor GP's | |
# | cost of a step | $M^3 + B M^2$ | $(B + B_u)\,k^3$ for any number of sites | $N k^3$ |
# | inputs | any number of columns | few columns; constants | few columns; constants |
# | draws at new places | as smooth as the GP | independent given $u$ | independent given $f$ at sites |
#
# If in doubt, train both and compare predictions of held-out sites. The reproductions on npgp's site
# have figures of larger data, at equal cost of a step.
