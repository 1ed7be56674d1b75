"""What the tests of the NumPyro component share: small data, runners, and GP algebra in dense NumPy matrices."""

from __future__ import annotations

from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO

import npgp

LENGTHSCALE, VARIANCE, NOISE = 0.7, 1.3, 0.2
RESIDUAL_SCALE = 0.4  # m of the conditional "shared"
PRECISION = 2.5  # λ of the conditional "published"

_rng = np.random.default_rng(7)
X = _rng.uniform(0.0, 4.0, (8, 1))
X_NEW = _rng.uniform(-0.5, 4.5, (8, 1))  # as many rows as X, elsewhere
Y = np.sin(2.0 * X[:, 0]) + 0.3 * _rng.normal(size=8)
Z = np.array([[0.5], [2.0], [3.5]])
O = np.array([[1.2], [2.9]])

#: Inducing blocks, and the covariance structure of q(ε) for each.
STRUCTURES = {
    "svgp": ([Z], ("dense",)),
    "mean-field": ([Z], ("diagonal",)),
    "odvgp": ([Z, O], ("dense", "mean-only")),
    "solve": ([Z, O], ("dense", "dense")),
}
ORTHOGONAL = ("svgp", "odvgp", "solve")
CONDITIONALS = {"prior": "prior", "tight": "tight", "grouped": npgp.conditionals.Grouped(4), "full": "full"}
#: Every structure and every conditional, in few programs: of a structure, a conditional sees the rows' moments alone.
PAIRS = [(s, "tight") for s in STRUCTURES] + [("solve", c) for c in CONDITIONALS if c != "tight"]


def kernel() -> npgp.RBF:
    return npgp.RBF(lengthscale=LENGTHSCALE, variance=VARIANCE)


def sparse_gp(structure: str = "svgp", name: str = "f", k=None, jitter: float | None = None) -> npgp.SparseGP:
    blocks, kinds = STRUCTURES[structure]
    # Copies: JAX remembers the conversion of an array object that a failed trace made, with the precision of then.
    blocks = [jnp.asarray(block.copy()) for block in blocks]
    return npgp.SparseGP(name, kernel() if k is None else k, blocks, kinds, jitter=jitter)


def regression(structure="svgp", conditional="tight", likelihood=None):
    """The model of the README: one GP, observed."""

    def model(X, y=None):
        f = sparse_gp(structure, jitter=1e-12).draw()
        npgp.observe("y", f(X), likelihood or npgp.Gaussian(variance=NOISE), obs=y, conditional=conditional)

    return model


def _blocks(structure):
    return STRUCTURES[structure] if isinstance(structure, str) else structure


def sites(structure, name: str = "f") -> tuple[str, ...]:
    return tuple(f"{name}.{suffix}" for suffix, _ in zip("uv", _blocks(structure)[0], strict=False))


def random_params(structure: str = "svgp", seed: int = 0, name: str = "f") -> dict[str, jax.Array]:
    """Parameters of a q(ε) that is neither the prior nor the optimum, but explains Y to a degree."""
    rng = np.random.default_rng(seed)
    A = Dense(structure, X).A
    mean = np.linalg.solve(A @ A.T + NOISE * np.eye(len(A)), A @ Y) + 0.2 * rng.normal(size=len(A))
    params, start = {}, 0
    for site, block, kind in zip(sites(structure, name), *STRUCTURES[structure], strict=True):
        size = len(block)
        params[f"{site}.loc"] = jnp.asarray(mean[start : start + size])
        start += size
        if kind == "dense":
            factor = np.tril(0.1 * rng.normal(size=(size, size)), -1) + np.diag(rng.uniform(0.2, 0.6, size))
            params[f"{site}.scale_tril"] = jnp.asarray(factor)
        elif kind == "diagonal":
            params[f"{site}.scale"] = jnp.asarray(rng.uniform(0.2, 0.6, size))
    return params


def params_of(posterior: npgp.variational.Posterior, structure: str = "svgp", name: str = "f") -> dict[str, jax.Array]:
    """The parameters of q(ε) that a posterior holds, under the names that guides give them."""
    params = {}
    for site, block in zip(sites(structure, name), posterior.q, strict=True):
        params[f"{site}.loc"] = block.loc
        if block.learned:
            params[f"{site}.scale_tril"] = block.scale_tril
    return params


# ---------------------------------------------------------------------------------------------------------------
# Dense algebra


def rbf(A, B, lengthscale=LENGTHSCALE, variance=VARIANCE):
    return variance * np.exp(-0.5 * np.sum(((A[:, None] - B) / lengthscale) ** 2, -1))


def log_normal(y, mean, variance):
    return -0.5 * (np.log(2 * np.pi * variance) + (y - mean) ** 2 / variance)


class Dense:
    """
    The prior of f at inputs given ε, and q(f), from one Cholesky factor of all inducing values' joint covariance.

    No block is treated apart: S is block diagonal, with I where a block keeps its prior.

    :param structure: a name, or inducing blocks and their covariance structures.
    """

    def __init__(self, structure, inputs, params=None, name="f", **hyperparameters):
        blocks, kinds = _blocks(structure)
        inputs, inducing = np.asarray(inputs), np.concatenate(blocks)
        L = np.linalg.cholesky(rbf(inducing, inducing, **hyperparameters))
        self.A = np.linalg.solve(L, rbf(inducing, inputs, **hyperparameters))
        self.K = rbf(inputs, inputs, **hyperparameters)
        self.Q = self.A.T @ self.A
        self.D = self.K - self.Q
        size = len(inducing)
        self.learned = np.concatenate([np.full(len(b), k != "mean-only") for b, k in zip(blocks, kinds, strict=True)])
        # What the learned blocks leave over: a mean-only block's variance belongs to the residual.
        self.residual = np.diag(self.K) - np.sum(self.A[self.learned] ** 2, 0)
        self.m, self.S = np.zeros(size), np.eye(size)
        start = 0
        for site, block in zip(sites(structure, name), blocks, strict=True):
            rows = slice(start, start := start + len(block))
            if params is not None:
                self.m[rows] = params[f"{site}.loc"]
                if f"{site}.scale_tril" in params:
                    factor = np.asarray(params[f"{site}.scale_tril"])
                    self.S[rows, rows] = factor @ factor.T
                if f"{site}.scale" in params:
                    self.S[rows, rows] = np.diag(np.asarray(params[f"{site}.scale"]) ** 2)
        self.mean = self.A.T @ self.m
        self.cov = self.D + self.A.T @ self.S @ self.A
        self.variance = np.diag(self.cov)
        self.explained = self.variance - self.residual  # s_n
        sign, log_det = np.linalg.slogdet(self.S)
        assert sign == 1
        self.kl = 0.5 * (np.trace(self.S) + self.m @ self.m - size - log_det)

    def rows(self, y, conditional="tight", noise=NOISE):
        """Each row's share of the ELBO for Gaussian noise."""
        fit = log_normal(y, self.mean, noise)
        if conditional == "prior":
            return fit - 0.5 * self.variance / noise
        if conditional == "shared":
            m = RESIDUAL_SCALE
            return fit - 0.5 * (self.explained + m * self.residual) / noise - 0.5 * (m - 1 - np.log(m))
        if conditional == "published":
            c = self.residual / (1 + PRECISION * self.residual)
            penalty = 0.5 * PRECISION * c - 0.5 * np.log1p(PRECISION * self.residual)
            return fit - 0.5 * (self.explained + c) / noise + penalty
        return fit - 0.5 * self.explained / noise - 0.5 * np.log1p(self.residual / noise)

    def elbo(self, y, conditional="tight", noise=NOISE):
        return np.sum(self.rows(y, conditional, noise)) - self.kl


# ---------------------------------------------------------------------------------------------------------------
# Runners


def _quick_options() -> dict[str, bool | int]:
    """Options that compile these small functions in a quarter of the time, those that XLA knows."""
    known: dict[str, bool | int] = {}
    for name, value in {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 0}.items():
        with suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda: 0.0, compiler_options={name: value})()
            known[name] = value
    return known


_QUICK = _quick_options()


def compiled(fn, **kwargs):
    """``jax.jit``, for functions that run once or a few times."""
    return jax.jit(fn, compiler_options=_QUICK, **kwargs)


def trajectory(svi, num, *args, change=None):
    """
    Constrained parameters after each of so many steps, and the losses before each, and after the last.

    :param change: what makes parameters to start at of those that ``svi`` would start at.
    """

    def run(*args):
        state = svi.init(jax.random.key(0), *args)
        if change is not None:
            state = svi.init(jax.random.key(0), *args, init_params=change(svi.get_params(state)))

        def step(state, _):
            state, loss = svi.update(state, *args)
            return state, (svi.get_params(state), loss)

        return jax.lax.scan(step, state, length=num + 1)[1]

    params, losses = compiled(run)(*args)
    return jax.tree.map(lambda x: np.asarray(x)[:num], params), np.asarray(losses)


def keys(n: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), n)


def make_elbo(model, guide=None, loss=None, **static):
    """``elbo(key, params, *args)``, not compiled."""
    guide, loss = guide or npgp.AutoSparseGP(model), loss or TraceMeanField_ELBO()

    def elbo(key, params, *args, **kwargs):
        return -loss.loss(key, params, model, guide, *args, **kwargs, **static)

    return elbo


def over_keys(fn, n, params, *args, seed=0):
    """Values of ``fn(key, params, *args)`` for n keys, compiled once."""
    return jax.tree.map(
        np.asarray, compiled(jax.vmap(fn, (0, None) + (None,) * len(args)))(keys(n, seed), params, *args)
    )


def elbo_value(model, params, *args, guide=None, loss=None) -> float:
    """The ELBO with one key, compiled."""
    return float(compiled(make_elbo(model, guide, loss))(jax.random.key(3), params, *args))


def adam(rate):
    """Adam on all parameters in one vector: a tenth less to compile, where steps take no time."""
    return optax.flatten(optax.adam(rate))


def train(model, guide, steps, *args, rate=0.05, seed=0):
    """Adam: the trained parameters and all losses."""
    svi = SVI(model, guide, adam(rate), TraceMeanField_ELBO())

    def run(*args):
        state = svi.init(jax.random.key(seed), *args)
        state, losses = jax.lax.scan(lambda state, _: svi.update(state, *args), state, length=steps)
        return svi.get_params(state), losses

    return jax.tree.map(np.asarray, compiled(run)(*args))


def nuts(model, *args, max_tree_depth=4, **lengths):
    """A chain of NUTS: draws by site, and which transitions diverged. As one program: its start alone is hundreds."""

    def run(key):
        mcmc = MCMC(NUTS(model, max_tree_depth=max_tree_depth), progress_bar=False, **lengths)
        mcmc.run(key, *args, extra_fields=("diverging",))
        return mcmc.get_samples(), mcmc.get_extra_fields()["diverging"]

    return compiled(run)(jax.random.key(0))


def traces(model, guide, params, *args, values=None, key=0):
    """Traces of guide and of the replayed model, as SVI makes them, with chosen values of latent sites."""
    guide_key, model_key = keys(2, key)
    start = handlers.substitute(handlers.seed(guide, guide_key), {**params, **(values or {})})
    guide_trace = handlers.trace(start).get_trace(*args)
    replayed = handlers.substitute(handlers.replay(handlers.seed(model, model_key), guide_trace), params)
    return guide_trace, handlers.trace(replayed).get_trace(*args)


def affine(fn, sizes):
    """``fn(values)`` at zero, and its Jacobian by site: all that there is to an affine function of noise."""
    zeros = {name: jnp.zeros(size) for name, size in sizes.items()}
    return jax.tree.map(np.asarray, compiled(lambda v: (fn(v), jax.jacfwd(fn)(v)))(zeros))


def worst_z_of_moments(draws, mean, cov) -> float:
    """The largest z-score of sample means and covariances of Gaussian draws (S, N)."""
    draws = np.asarray(draws, float)
    count = len(draws)
    diagonal = np.diag(cov)
    centerd = draws - mean
    z_mean = centerd.mean(0) / np.sqrt(diagonal / count)
    spread = np.sqrt((np.outer(diagonal, diagonal) + cov**2) / count)
    z_cov = (centerd.T @ centerd / count - cov) / spread
    return float(max(np.abs(z_mean).max(), np.abs(z_cov).max()))
