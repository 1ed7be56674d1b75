# %% [markdown]
# # Spherical features
#
# Inducing points are values of $f$ at places. There are other things to know of a function: with kernels that live on a
# sphere, its *harmonics*, and the *units of a neural network*. Both are inducing blocks like any other: alone or beside
# points, with every likelihood and bound. This notebook shows
#
# 1. zonal kernels, and their spectra;
# 2. harmonics, activations and points: how much of $f$ each explains;
# 3. how many levels activations should have;
# 4. activations with orthogonal points, on one input, with the variance taken apart;
# 5. classification in minibatches;
# 6. two layers of units: a deep GP.
#
# Sources: Dutordoir, Durrande & Hensman (2020) for harmonics, Dutordoir et al. (2021) and Sun et al. (2020) for
# activations, Tiao, Dutordoir & Picheny (2023) for activations with orthogonal points.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from scipy.stats import norm

import npgp
from npgp import kernels, plots
from npgp.features import ReLU, Softplus
from npgp.inducing import left_out

jax.config.update("jax_enable_x64", True)
plt.rcParams["figure.dpi"] = 150

# %% [markdown]
# ## 1. Zonal kernels
#
# An input gets a bias as one more coordinate, $\tilde x = (\sqrt{w_1}\,x_1, \dots, \sqrt{w_D}\,x_D, \sqrt b)$, and is
# projected on the unit sphere of $d = D + 1$ dimensions. A zonal kernel is a function of the angle there, times the
# norms:
#
# $$k(x, x') = \sigma^2\,\|\tilde x\|\,\|\tilde x'\|\;\kappa(\cos\theta).$$
#
# The weights $w$ are the inverse squared lengthscales of such a kernel (ARD), and $b$ says where on the sphere the data
# lie. Because of the norms, functions grow like straight lines far from the data. The arc-cosine kernel is the prior of
# an infinitely wide layer of rectified linear units; the spherical RBF and Matérn kernels have a lengthscale besides.
#
# On the sphere all of these have the same eigenfunctions, the spherical harmonics, level by level; the kernel says only
# how much variance a level has, its eigenvalue $\lambda_\ell$. A unit of a neural network, $\sigma(z^\top u)$, is a
# zonal function too, with coefficients $\varsigma_\ell$.

# %%
arccos, matern = kernels.ZonalArcCosine(order=1), kernels.ZonalMatern52(lengthscale=1.0)
figure = plots.plot_spectra(
    {"arc-cosine": arccos, "Matérn-5/2": matern, "RBF": kernels.ZonalRBF(lengthscale=1.0)},
    {"ReLU": ReLU(), "softplus": Softplus()},
    dimension=2,
)

# %% [markdown]
# The arc-cosine kernel has no levels 3, 5, 7, …, and neither have ReLU and softplus: they match. Where a kernel has
# levels that an activation has not, as Matérn has, these features say nothing of that part of $f$. And where the
# kernel's eigenvalues fall much faster than the activation's, as those of RBF do beside ReLU's, most of what a unit
# says is about high levels, of which $f$ hardly has anything. `npgp` cuts every unit off at levels that you choose;
# what is left is an exact feature of $f$, for which every bound is a bound.
#
# ## 2. What features explain
#
# Three kinds of features, for the same kernel and the same inputs. `left_out` is the share of the prior variance of $f$
# that they leave out, on average over the inputs: the mean of $d_n / k_{nn}$. The inputs are those of the *banana* set
# (Rätsch, Onoda & Müller 2001), from the folder that the environment variable `NPGP_DATA` names, or two moons instead.


# %%
def load_banana():
    try:
        data = npgp.datasets.load("banana_large")
        return data["X"], data["y"].astype(int), "banana"
    except FileNotFoundError:
        rng = np.random.default_rng(0)
        y = rng.integers(0, 2, 2000)
        angle = rng.uniform(0, np.pi, 2000)
        moon = np.column_stack([np.cos(angle), np.sin(angle) - 0.25])
        X = np.where(y[:, None] == 1, moon, [0.6, 0.0] - moon) + 0.25 * rng.normal(size=(2000, 2))
        return X / X.std(axis=0), y, "two moons (simulated)"


X_all, y_all, name = load_banana()
num_train, num_test = 400, 1000
order = np.random.default_rng(1).permutation(len(X_all))
train, test = order[:num_train], order[num_train : num_train + num_test]
X, y, X_test, y_test = X_all[train], y_all[train], X_all[test], y_all[test]


def directions(kernel, inputs):
    """Units that look at inputs: their directions on the sphere."""
    return np.asarray(kernel.polar(jnp.asarray(inputs))[1])


plane = kernels.ZonalMatern52(lengthscale=0.5)
share = jax.jit(lambda block: left_out(plane, block, X))
print(f"{name}; share of the variance left out")
print(f"{'features':>10}{'points':>10}{'harmonics':>12}{'softplus units':>17}")
for size in (9, 25, 49, 100):
    centers = npgp.inducing.kmeans(jax.random.key(0), X, size)
    harmonics = npgp.features.SphericalHarmonics.within(size, plane, columns=2)
    units = npgp.features.Activations(directions(plane, centers), Softplus(), levels=range(7))
    shares = [float(share(block)) for block in (npgp.features.Points(centers), harmonics, units)]
    print(f"{size:>10}{shares[0]:10.3f}{shares[1]:12.3f}{shares[2]:17.3f}")

# %% [markdown]
# Harmonics need no inputs and no training, and their covariance is the identity, which saves a Cholesky factor. They
# are the best features there are on average over the whole *sphere*; but data fill only a part of it, and points go
# where the data are. In many dimensions levels are large as well: with 8 inputs, level 3 alone has 156 harmonics, and
# with 32 has 6,512.
#
# Each unit looks in a direction, which can be trained. All of them together are no more than the harmonics at their
# levels: nine units at nine harmonics (levels 0, 1, 2) are as good as these, and a hundred units are stuck, because
# softplus has no levels 3 and 5, which this kernel has.
#
# ## 3. How many levels
#
# Few levels make smooth features, which see little of a rough $f$. Many levels spend the features on what $f$ has
# little of. `choose_levels` tries them, for a kernel, units and inputs, and takes those that leave least out.

# %%
print(f"{'highest level':>14}" + "".join(f"{level:>7}" for level in range(9)))
centers = npgp.inducing.kmeans(jax.random.key(0), X, 25)
for shape in (Softplus(), ReLU()):
    units = npgp.features.Activations(directions(plane, centers), shape)
    choice = npgp.inducing.choose_levels(plane, units, X, most=8)
    shares = "".join(f"{choice.left_out[level]:7.3f}" for level in choice.left_out)
    print(f"{type(shape).__name__:>14}{shares}   chosen: levels {choice.block.levels}")

# %% [markdown]
# ## 4. Activations and orthogonal points
#
# Snelson's data: 200 rows, one input (where they are absent, a simulation of a similar curve). All features get the
# same arc-cosine kernel, in which the weight and the bias are trained; so are directions and inducing inputs. Eight
# units, sixteen units, eight units with eight points orthogonal to them, and points alone.

# %%
try:
    x, targets, _ = npgp.datasets.snelson()
except FileNotFoundError:
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0.0, 6.0, 200))
    targets = np.sin(2.5 * x) + 0.5 * np.sin(0.9 * x) + 0.28 * rng.normal(size=200)
x, targets = np.ravel(x).astype(float), np.ravel(targets).astype(float)
x = ((x - x.mean()) / x.std())[:, None]
targets = targets - targets.mean()
grid = np.linspace(-2.0, 2.0, 300)[:, None]


def units_at(z):
    return npgp.features.Activations(z, Softplus(), levels=range(11))


def fit_snelson(start, blocks_of):
    """Hyperparameters and blocks by L-BFGS; the bound, and the GP at its maximum."""

    def gp(weight, bias, noise, **arrays):
        kernel = kernels.ZonalArcCosine(1, weight_variance=weight, bias_variance=bias)
        return npgp.CollapsedGP(kernel, x, blocks_of(**arrays), noise_variance=noise, conditional="prior")

    def model():
        positive = {"weight": 4.0, "bias": 1.0, "noise": 0.1}
        values = {name: numpyro.param(name, value, constraint=constraints.positive) for name, value in positive.items()}
        values |= {name: numpyro.param(name, value) for name, value in start.items()}
        numpyro.sample("y", gp(**values), obs=targets)

    best = npgp.fit_collapsed(jax.random.key(0), model, max_steps=1000, progress=False)
    return -best.losses[-1], gp(**best.params)


def spread(size):
    """Inputs at equal shares of the data."""
    return np.quantile(x, (np.arange(size) + 0.5) / size)[:, None]


start = kernels.ZonalArcCosine(1, weight_variance=4.0)
z8, z16 = directions(start, spread(8)), directions(start, spread(16))
fits = {
    "8 units": fit_snelson({"z": z8}, units_at),
    "8 units + 8 points": fit_snelson({"z": z8, "Z": spread(8)}, lambda z, Z: [units_at(z), Z]),
    "16 units": fit_snelson({"z": z16}, units_at),
    "8 points": fit_snelson({"Z": spread(8)}, lambda Z: Z),
    "16 points": fit_snelson({"Z": spread(16)}, lambda Z: Z),
}

print(f"{'':>20}{'bound':>9}{'noise variance':>17}")
for name, (bound, gp) in fits.items():
    print(f"{name:>20}{bound:9.1f}{gp.noise_variance:17.3f}")

# %% [markdown]
# Where do units fall short? Each column below is one fit. Above is the posterior of $f$ with the mean of each block,
# and below it the variance that is left, as a stack of what each block and the residual have of it.

# %%
parts = {}
for name in ("8 units", "8 units + 8 points"):
    gp = fits[name][1]
    parts[name] = jax.jit(lambda gp, grid: gp.condition(targets).decompose(grid))(gp, grid)
figure = plots.plot_variance(grid, parts, data=(x, targets))

# %% [markdown]
# With units alone nearly all the variance that is left amid the data is the residual's. Data cannot take it away: it is
# in functions that these features do not see, since each unit looks at half of the line at once, and eight of them see
# no fine detail anywhere. Eight more of the same kind help, as far as there are harmonics at their levels (13 here).
# Eight orthogonal points help more: they look where the units left most.
#
# On a single input, points are easy to place and do best by themselves. Units are meant for more inputs, where a
# point's influence does not reach far.
#
# ## 5. Classification in minibatches
#
# The blocks go wherever points go: here into a model with a Bernoulli likelihood, trained in minibatches. Directions
# and inducing inputs are parameters.


# %%
def classifier(centers, num_units):
    """Units that look at the first centers, and points at the others."""
    z_start, Z_start = directions(plane, centers[:num_units]), centers[num_units:]

    def model(X, y=None):
        positive = constraints.positive
        kernel = kernels.ZonalMatern52(
            numpyro.param("lengthscale", 0.5, constraint=positive),
            variance=numpyro.param("variance", 2.0, constraint=positive),
            bias_variance=numpyro.param("bias", 1.0, constraint=positive),
        )
        blocks = []
        if len(z_start):
            z = numpyro.param("directions", z_start)
            blocks.append(npgp.features.Activations(z, Softplus(), levels=range(7)))
        if len(Z_start):
            blocks.append(npgp.features.Points(numpyro.param("inducing", Z_start)))
        f = npgp.SparseGP("f", kernel, blocks).draw()
        with npgp.plate("data", num_train, rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Bernoulli("probit"), obs=y)

    return model


def train_svi(model, num_steps, *data, **options):
    """Train a model by SVI with the automatic guide; without a number of steps until its posterior stands still."""
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.02, num_steps), TraceMeanField_ELBO())
    return guide, npgp.fit(svi, jax.random.key(0), num_steps, *data, progress=False, **options)


def moments(model, guide, params, X_new):
    """Mean and variance of f at new rows."""
    return map(np.asarray, npgp.posterior("f", model, guide, params, X).mean_and_variance(X_new))


size = 20
centers = npgp.inducing.kmeans(jax.random.key(0), X, size)
models = {
    f"{size} units": classifier(centers, size),
    f"{size // 2} units + {size // 2} points": classifier(centers, size // 2),
    f"{size} points": classifier(centers, 0),
}

axis = np.linspace(-3.2, 3.2, 60)
plane_grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
figure, axes = plt.subplots(1, len(models), figsize=(3.1 * len(models) + 0.6, 3.2), layout="constrained", squeeze=False)
for ax, (name, model) in zip(axes[0], models.items(), strict=True):
    guide, result = train_svi(model, 1500, X, y, batch_size=100)
    mean, variance = moments(model, guide, result.params, np.concatenate([X_test, plane_grid]))
    p = norm.cdf(mean / np.sqrt(1.0 + variance))  # probit: f integrated out
    p_test, p_grid = p[:num_test], p[num_test:].reshape(len(axis), len(axis))
    error = np.mean((p_test > 0.5) != y_test)
    log_likelihood = np.mean(np.log(np.where(y_test == 1, p_test, 1.0 - p_test)))
    print(f"{name}: test error {error:.3f}, mean test log-likelihood {log_likelihood:.3f}")
    image = ax.contourf(axis, axis, p_grid, np.linspace(0.0, 1.0, 11), cmap="RdBu_r")
    for label, color in ((0, "#2166ac"), (1, "#b2182b")):
        ax.scatter(*X[y == label].T, s=9, color=color, edgecolor="w", linewidth=0.4, label=f"class {label}")
    ax.set(title=name, xlabel="$x_1$", ylabel="$x_2$")
legend = figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
bar = figure.colorbar(image, ax=axes, label="P(class 1)")

# %% [markdown]
# All took 1500 steps, to be compared at equal cost, and probabilities may still move a little. The errors are alike. In
# log-likelihood points do best in the plane, too; ten of them beside ten units make up for
# more than half of what twenty units lack.
#
# ## 6. Two layers
#
# The value of one GP is the input of the next: $y = g(h) + \text{noise}$ with $h = x + f(x)$. Both are layers of units
# with trained directions, so that the mean of this deep GP is a neural network of two hidden layers, with uncertainty.
# `npgp.sample` gives the value of a GP as an array, for whatever comes next. The curve has a jump, which no zonal
# kernel of $x$ expects; the first layer can learn to stretch the inputs there.

# %%
rng = np.random.default_rng(0)
num_rows, half = 120, 10


def curve(x):
    return np.where(x > 0.4, 1.0, -1.0) + 0.2 * np.sin(3 * x)


x = np.sort(rng.uniform(-3.0, 3.0, num_rows))
targets = curve(x) + 0.15 * rng.normal(size=num_rows)
grid = np.linspace(-3.3, 3.3, 300)


def layer(name, size, levels, variance=1.0):
    """A GP whose features are units with trained directions."""
    angle = np.pi * (np.arange(size) + 0.5) / size
    z = numpyro.param(f"{name}.directions", np.stack([np.cos(angle), np.sin(angle)], axis=-1))
    positive = constraints.positive
    kernel = kernels.ZonalMatern52(
        numpyro.param(f"{name}.lengthscale", 0.7, constraint=positive),
        variance=numpyro.param(f"{name}.variance", variance, constraint=positive),
        weight_variance=numpyro.param(f"{name}.weight", 1.0, constraint=positive),
    )
    return npgp.SparseGP(name, kernel, npgp.features.Activations(z, Softplus(), levels), init_scale=0.1).draw()


def shallow(X, y=None):
    g = layer("g", 2 * half, range(13))
    noise = numpyro.param("noise", 0.05, constraint=constraints.positive)
    with numpyro.plate("data", len(X)):
        npgp.observe("y", g(X), npgp.Gaussian(variance=noise), obs=y)


def deep(X, y=None):
    f, g = layer("f", half, range(7), variance=0.1), layer("g", half, range(7))
    noise = numpyro.param("noise", 0.05, constraint=constraints.positive)
    with numpyro.plate("data", len(X)):
        h = npgp.sample("h", f(X) + X[:, 0], joint=False)  # what follows factorizes over rows
        npgp.observe("y", g(h[:, None]), npgp.Gaussian(variance=noise), obs=y)


models = {f"one layer of {2 * half} units": shallow, f"two layers of {half} units": deep}
figure, axes = plt.subplots(
    1, len(models), figsize=(4.2 * len(models), 3.2), layout="constrained", squeeze=False, sharey=True
)
for ax, (name, model) in zip(axes[0], models.items(), strict=True):
    guide, result = train_svi(model, None, x[:, None], targets)
    predict = Predictive(model, guide=guide, params=result.params, num_samples=300)
    draws = np.asarray(jax.jit(lambda key, predict=predict: predict(key, grid[:, None])["y.latent"])(jax.random.key(1)))
    mean, low, high = draws.mean(axis=0), *np.quantile(draws, [0.025, 0.975], axis=0)
    inside = np.abs(grid) < 3
    error = np.sqrt(np.mean((mean - curve(grid))[inside] ** 2))
    elbo = np.mean(-result.losses[-100:])
    print(
        f"{name}: ELBO {elbo:.1f}, noise variance {result.params['noise']:.3f}, "
        f"root mean square error of the curve {error:.3f}"
    )
    ax.scatter(x, targets, s=6, color="0.6", label="data")
    ax.plot(grid, curve(grid), color="k", lw=0.8, ls="--", label="truth")
    ax.plot(grid, mean, color=plots.COLORS[0], label="mean and 95% of draws")
    ax.fill_between(grid, low, high, color=plots.COLORS[0], alpha=0.2, lw=0)
    ax.set(title=name, xlabel="x")
axes[0, 0].set_ylabel("y")
handles = axes[0, -1].get_legend_handles_labels()
legend = figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)

# %% [markdown]
# The noise variance was 0.0225. One layer takes most of the jump for noise, and flattens the waves; two layers find the
# jump, but not the waves.
#
# More: the reproductions on npgp's site compare units, points and both on UCI data, after Tiao, Dutordoir & Picheny
# (2023).
