"""Natural gradients: the optimum in one step, the textbook's step by autodiff, and steps that must not be taken."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import compiled, make_elbo, rbf, trajectory
from numpyro.infer import SVI, TraceMeanField_ELBO

import npgp
from npgp.variational import natural
from npgp.variational.natural import natural_gradient

N, NOISE = 30, 0.2
_rng = np.random.default_rng(11)
X = np.sort(_rng.uniform(0.0, 5.0, (N, 1)), 0)
F = np.sin(2.0 * X[:, 0]) + 0.4 * X[:, 0] - 1.0
Y = F + np.sqrt(NOISE) * _rng.normal(size=N)
OUTPUTS = np.stack([Y, np.cos(Y)])
BLOCKS = [np.array([[0.5], [1.7], [3.1], [4.4]]), np.array([[1.1], [2.4], [3.8]]), np.array([[0.1], [4.9]])]
#: Covariance structures, one for each block used.
STRUCTURES = {
    "svgp": ("dense",),
    "mean-field": ("diagonal",),
    "odvgp": ("dense", "mean-only"),
    "solve": ("dense", "dense"),
    "three": ("dense", "dense", "mean-only"),
}


def inducing(structure):
    return [jnp.asarray(block) for block, _ in zip(BLOCKS, STRUCTURES[structure], strict=False)]


def sparse_gp(structure="svgp", name="f", kernel=None):
    kernel = models.kernel() if kernel is None else kernel
    return npgp.SparseGP(name, kernel, inducing(structure), STRUCTURES[structure], jitter=1e-12)


def regression(structure="svgp", conditional="tight", likelihood=None):
    def model(X, y=None):
        f = sparse_gp(structure).draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X), likelihood or npgp.Gaussian(variance=NOISE), obs=y, conditional=conditional)

    return model


def make_svi(model, *args, **static):
    return SVI(
        model,
        npgp.AutoSparseGP(model, dependence="independent"),
        natural_gradient(*args),
        TraceMeanField_ELBO(),
        **static,
    )


def random_start(params, seed=0):
    """Parameters of a q(ε) far from prior and optimum, in the shapes of ``params``; others as they are."""
    rng = np.random.default_rng(seed)
    start = {}
    for name, value in sorted(params.items()):
        start[name] = rng.normal(size=value.shape)
        if name.endswith("scale_tril"):
            start[name] = np.tril(0.2 * start[name], -1) + np.exp(0.3 * start[name]) * np.eye(value.shape[-1])
        elif name.endswith("scale"):
            start[name] = np.exp(0.3 * start[name])
        elif not name.endswith("loc"):
            start[name] = value
    return {name: jnp.asarray(value) for name, value in start.items()}


def steps(svi, num, *args, random=True):
    """The trajectory from a random start."""
    return trajectory(svi, num, *args, change=random_start if random else None)


def gradient_norms(model, params, *args):
    """Largest gradient of the ELBO by parameter."""
    elbo = make_elbo(model)
    grads = compiled(jax.grad(lambda p: elbo(jax.random.key(0), p, *args)))(params)
    return {name: float(jnp.abs(jnp.tril(g) if name.endswith("tril") else g).max()) for name, g in grads.items()}


def last(params):
    return {name: jnp.asarray(value[-1]) for name, value in params.items()}


def projections(blocks, **hyperparameters):
    """Whitened projections of X on all blocks at once, dense."""
    Z = np.concatenate(blocks)
    return np.linalg.solve(np.linalg.cholesky(rbf(Z, Z, **hyperparameters)), rbf(Z, X, **hyperparameters))


def assert_close(a, b, tol=1e-8):
    scale = np.max(np.abs(b))
    np.testing.assert_allclose(a, b, rtol=0, atol=tol * max(scale, 1e-3))


# ---------------------------------------------------------------------------------------------------------------
# Gaussian noise: one unit step is the optimum


@pytest.mark.parametrize(
    "structure, conditional",
    [("odvgp", "tight"), ("three", "prior")],
)
def test_a_unit_step_gives_the_collapsed_bound_and_its_posterior(structure, conditional, float64):
    params, losses = steps(make_svi(regression(structure, conditional), 1.0), 2, X, Y)
    gp = npgp.CollapsedGP(
        models.kernel(),
        jnp.asarray(X),
        inducing(structure),
        noise_variance=NOISE,
        conditional=conditional,
        covariances=STRUCTURES[structure],
        jitter=1e-12,
    )
    bound, q = compiled(lambda y: (gp.log_prob(y), gp.condition(y).q))(Y)
    assert losses[0] > losses[1] + 1.0
    np.testing.assert_allclose(losses[1:], -bound, rtol=1e-12)
    for site, block in zip(sparse_gp(structure).sites, q, strict=True):
        for after in range(2):  # the second step changes nothing
            assert_close(params[f"{site}.loc"][after], block.loc)
            if block.learned:
                assert_close(params[f"{site}.scale_tril"][after], block.scale_tril)
            else:
                assert f"{site}.scale_tril" not in params


def test_a_unit_step_gives_the_optimum_of_mean_field(float64):
    model = regression("mean-field")
    params, losses = steps(make_svi(model, 1.0), 2, X, Y)
    np.testing.assert_allclose(losses[2], losses[1], rtol=1e-12)
    A = projections(BLOCKS[:1])
    B = np.eye(len(A)) + A @ A.T / NOISE
    assert_close(params["f.u.loc"][0], np.linalg.solve(B, A @ Y / NOISE))
    assert_close(params["f.u.scale"][0] ** 2, 1.0 / np.diag(B))
    assert max(gradient_norms(model, last(params), X, Y).values()) < 1e-7


def test_several_outputs(float64):
    def model(X, y=None):
        with numpyro.plate("outputs", 2, dim=-2):
            f = sparse_gp("odvgp").draw()
        with numpyro.plate("outputs", 2, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    params, _ = steps(make_svi(model, 1.0), 1, X, OUTPUTS)
    A = projections(BLOCKS[:2])
    B = np.eye(len(A)) + A @ A.T / NOISE
    means = np.linalg.solve(B, A @ OUTPUTS.T / NOISE).T
    assert params["f.u.loc"].shape == (1, 2, 1, 4)
    assert_close(np.concatenate([params["f.u.loc"][0], params["f.v.loc"][0]], -1)[:, 0], means)
    for L in params["f.u.scale_tril"][0, :, 0]:
        assert_close(L @ L.T, np.linalg.inv(B[:4, :4]))


def test_components_that_share_observations(float64):
    # Additive GPs couple their means as blocks of one GP do.
    other = {"lengthscale": 0.3, "variance": 0.6}

    def model(X, y=None):
        f, g = sparse_gp().draw(), sparse_gp("svgp", "g", npgp.RBF(**other)).draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X) + g(X), npgp.Gaussian(variance=NOISE), obs=y)

    params, _ = steps(make_svi(model, 1.0), 1, X, Y)
    A = np.concatenate([projections(BLOCKS[:1]), projections(BLOCKS[:1], **other)])
    means = np.linalg.solve(np.eye(len(A)) + A @ A.T / NOISE, A @ Y / NOISE)
    assert_close(np.concatenate([params[f"{site}.loc"][0] for site in ("f.u", "g.u")]), means)


# ---------------------------------------------------------------------------------------------------------------
# Other likelihoods


def test_a_step_is_the_textbooks(float64):
    # θ = (S⁻¹ m, −½ S⁻¹), η = (m, S + m mᵀ): θ' = θ − ρ ∂ℓ/∂η, the gradient by autodiff through S = η₂ − m mᵀ.
    y = np.round(np.exp(F))
    model, rate = regression("svgp", "tight", npgp.Poisson()), 0.3
    elbo = make_elbo(model)

    def textbook(m, L):
        def loss(m, second):
            S = second - jnp.outer(m, m)
            S = 0.5 * (S + S.T)
            return -elbo(jax.random.key(0), {"f.u.loc": m, "f.u.scale_tril": jnp.linalg.cholesky(S)}, X, y)

        g1, g2 = jax.grad(loss, (0, 1))(m, L @ L.T + jnp.outer(m, m))
        precision = jnp.linalg.inv(L @ L.T)
        new = precision + rate * (g2 + g2.T)
        return jnp.linalg.solve(new, precision @ m - rate * g1), jnp.linalg.inv(new)

    svi = make_svi(model, rate)
    start = random_start({"f.u.loc": jnp.zeros(4), "f.u.scale_tril": jnp.zeros((4, 4))})
    mean, S = compiled(textbook)(start["f.u.loc"], start["f.u.scale_tril"])
    params, losses = steps(svi, 1, X, y)
    assert losses[1] < losses[0]  # so the step was not shortened
    L = params["f.u.scale_tril"][0]
    assert_close(params["f.u.loc"][0], mean, 1e-9)
    assert_close(L @ L.T, S, 1e-9)
    assert np.abs(mean - start["f.u.loc"]).max() > 0.1


def test_converges_where_the_gradient_vanishes(float64):
    y = np.round(np.exp(F))
    model = regression("solve", "tight", npgp.Poisson())
    params, _ = steps(make_svi(model, 0.8), 25, X, y)
    assert max(gradient_norms(model, last(params), X, y).values()) < 1e-6


def test_takes_fewer_steps_than_adam(float64):
    y = (Y > 0.0).astype(float)
    model = regression("odvgp", "prior", npgp.Bernoulli())
    params, losses = steps(make_svi(model, 0.8), 30, X, y, random=False)
    assert max(gradient_norms(model, last(params), X, y).values()) < 1e-6
    _, adam = models.train(model, npgp.AutoSparseGP(model), 100, X, y, rate=0.1)
    assert losses[0] == pytest.approx(adam[0], rel=1e-12)
    assert losses[10] < adam.min()
    assert losses[5] < adam[:30].min()


def test_heavy_tails_stay_finite_and_never_rise(float64):
    # Neither log-concave, nor is the Hessian of the means positive definite, with outliers.
    y = Y.copy()
    y[::4] += np.tile([15.0, -25.0], 4)
    model = regression("solve", "tight", npgp.StudentT(df=2.5, scale=0.2))
    params, losses = steps(make_svi(model, 1.0), 40, X, y)
    assert np.isfinite(losses).all()
    assert (np.diff(losses) < 1e-9 * np.abs(losses[1:])).all()
    assert max(gradient_norms(model, last(params), X, y).values()) < 1e-3


def test_steps_too_long_are_shortened(float64):
    # From the prior, a Newton step for a count of y overshoots to f = y, and exp(f) overflows.
    y = np.round(1000.0 * np.exp(F))
    params, losses = steps(make_svi(regression("svgp", "prior", npgp.Poisson()), 1.0), 40, X, y, random=False)
    assert np.isfinite(losses).all() and (np.diff(losses) < 1e-9 * np.abs(losses[1:])).all()
    assert losses[-2] - losses[-1] < 1e-6 * np.abs(losses[-1])
    assert np.isfinite(params["f.u.loc"]).all()


# ---------------------------------------------------------------------------------------------------------------
# Training


def test_minibatches_approach_the_optimum(float64):
    def model(X, y=None):
        f = sparse_gp("solve").draw()
        with npgp.plate("data", N, rows=X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=NOISE), obs=y)

    # From some step on 1/t: all batches weigh the same in the natural parameters.
    svi = make_svi(model, lambda step: 1.0 / (1.0 + step / 3.0))
    x, y = jnp.asarray(X), jnp.asarray(Y)

    def run(key):
        def step(state, key):
            rows = jax.random.choice(key, N, (10,), replace=False)
            return svi.update(state, x[rows], y[rows])

        state, _ = jax.lax.scan(step, svi.init(key, x[:10], y[:10]), jax.random.split(key, 600))
        return svi.get_params(state), state.optim_state[0]

    params, count = jax.tree.map(np.asarray, compiled(run)(jax.random.key(1)))
    assert count == 600
    A = projections(BLOCKS[:2])
    B = np.eye(len(A)) + A @ A.T / NOISE
    L = params["f.u.scale_tril"]
    # Six hundred batches of ten average to that, and to a hundredth of the diagonal.
    scale = np.sqrt(np.outer(np.diag(B), np.diag(B)))[:4, :4]
    np.testing.assert_allclose(np.linalg.inv(L @ L.T) / scale, B[:4, :4] / scale, atol=0.02)
    mean = np.concatenate([params["f.u.loc"], params["f.v.loc"]])
    exact = np.linalg.solve(B, A @ Y / NOISE)
    assert np.sqrt((mean - exact) @ B @ (mean - exact) / len(B)) < 0.1  # in posterior standard deviations; .04


def test_conjugate_gradients_go_on_to_two_thirds_of_the_digits(x64):
    # Forty eigenvalues between 1 and 10: some three digits in ten iterations.
    rng = np.random.default_rng(0)
    V = np.linalg.qr(rng.normal(size=(40, 40)))[0]
    A, b = (V * np.linspace(1.0, 10.0, 40)) @ V.T, rng.normal(size=40)

    def solve(b, most):
        rhs = {"a": b[:15], "b": b[15:].reshape(5, 5)}
        flat = lambda v: jnp.concatenate([v["a"], v["b"].ravel()])  # noqa: E731
        system = lambda v: {"a": (A_ := jnp.asarray(A, x64) @ flat(v))[:15], "b": A_[15:].reshape(5, 5)}  # noqa: E731
        return flat(natural._conjugate_gradients(system, lambda v: v, rhs, most))

    found = jax.jit(solve, static_argnums=1)
    left = [np.linalg.norm(b - A @ np.asarray(found(jnp.asarray(b, x64), most), float)) for most in (5, 100)]
    wanted = {"float32": 1e-4, "float64": 1e-10}[jnp.dtype(x64).name]
    assert left[1] < wanted * np.linalg.norm(b) < left[0]


@pytest.mark.parametrize("x64", [False], ids=["float32"], indirect=True)
def test_hyperparameters_are_trained_beside_q(x64):
    def model(X, y=None):
        scale = numpyro.param("lengthscale", 2.0, constraint=dist.constraints.softplus_positive)
        noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
        f = sparse_gp("svgp", kernel=npgp.RBF(lengthscale=scale)).draw()
        with numpyro.plate("data", X.shape[0]):
            npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y)

    args = jnp.asarray(X, x64), jnp.asarray(Y, x64)
    svi = make_svi(model, 0.5, npgp.adam(0.03))
    start = compiled(svi.init)(jax.random.key(0), *args)
    result = npgp.fit(svi, jax.random.key(0), 120, *args, init_state=start, progress=False)
    assert int(result.state.optim_state[0]) == 120
    assert result.losses[:5].mean() > result.losses[-20:].mean() + 5.0
    assert 0.4 < result.params["lengthscale"] < 1.5
    assert result.params["f.u.scale_tril"].dtype == x64
    assert {"noise_auto_loc", "noise_auto_scale", "f.u.loc"} < set(result.params)


# ---------------------------------------------------------------------------------------------------------------
# The optimizer by itself, on losses in closed form

IDENTITY = natural._transform("f.u.scale_tril").inv


def start_params(loc=(0.0, 0.0)):
    return {"f.u.loc": jnp.asarray(loc), "f.u.scale_tril": IDENTITY(jnp.eye(2)), "a": jnp.ones(())}


def quadratic(params):
    """A loss of q(ε) whose optimum is N(b, ½ I), and of one more parameter."""
    m, L = params["f.u.loc"], natural._transform("f.u.scale_tril")(params["f.u.scale_tril"])
    b = jnp.array([1.0, -2.0])
    log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(L)))
    return jnp.sum((m - b) ** 2) + jnp.sum(L**2) - 0.5 * log_det + params["a"] ** 2, {"seen": m}


def covariance(params):
    L = natural._transform("f.u.scale_tril")(params["f.u.scale_tril"])
    return L @ L.T


def one_step(fn, rate=1.0, params=None, others=None, method="eval_and_update", **kwargs):
    optim = natural_gradient(rate, optax.sgd(0.25) if others is None else others)
    state = optim.init(start_params() if params is None else params)
    output, new = compiled(lambda state: getattr(optim, method)(fn, state, **kwargs))(state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), new)
    return output, optim.get_params(new), new


@pytest.mark.parametrize(
    ("others", "forward"), [(optax.sgd(0.25), True), (numpyro.optim.SGD(0.25), False)], ids=["optax", "numpyro"]
)
def test_a_step(others, forward, x64):
    (loss, aux), params, state = one_step(quadratic, others=others, forward_mode_differentiation=forward)
    np.testing.assert_allclose(loss, 5.0 + 2.0 + 1.0, rtol=1e-6)
    np.testing.assert_array_equal(aux["seen"], [0.0, 0.0])
    np.testing.assert_allclose(params["f.u.loc"], [1.0, -2.0], rtol=1e-6)
    np.testing.assert_allclose(covariance(params), 0.5 * np.eye(2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(params["a"], 0.5, rtol=1e-6)
    assert int(state[0]) == 1


def test_schedule_counts_steps(float64):
    optim = natural_gradient(lambda step: jnp.where(step == 0, 1.0, 0.0), optax.sgd(0.25))
    update = compiled(lambda state: optim.eval_and_update(quadratic, state)[1])
    first = update(optim.init(start_params()))
    second = update(first)
    assert_close(optim.get_params(first)["f.u.loc"], np.array([1.0, -2.0]))
    np.testing.assert_array_equal(optim.get_params(first)["f.u.loc"], optim.get_params(second)["f.u.loc"])
    assert int(second[0]) == 2


def test_rate_is_halved_until_the_precision_is_positive(float64):
    # S'⁻¹ = (1 − ρ) I + ρ (1 − 10) I is positive definite for ρ < 1/10: 1/16 is tried first.
    def fn(params):
        S = covariance(params)
        kl = 0.5 * (jnp.trace(S) + jnp.sum(params["f.u.loc"] ** 2) - jnp.linalg.slogdet(S)[1])
        return kl - 5.0 * jnp.trace(S) + params["a"], None

    _, params, _ = one_step(fn, params=start_params((1.0, 1.0)))
    assert_close(covariance(params), np.eye(2) / (1.0 - 10.0 / 16.0))
    # With (1 − ρ) I + ρ I for the means, m' = m − ρ m.
    assert_close(params["f.u.loc"], np.full(2, 1.0 - 1.0 / 16.0))


def cliff(params):
    """Finite with finite gradients at the start alone."""
    loss, aux = quadratic(params)
    return jnp.where(params["f.u.loc"][0] == 0.0, loss, jnp.inf), aux


def broken(params):
    """A gradient of NaN in the mean."""
    loss, aux = quadratic(params)
    return loss + jnp.sum(jnp.sqrt(params["f.u.loc"] * 0.0)), aux


def test_what_cannot_be_improved_stays(float64):
    _, params, _ = one_step(cliff)
    np.testing.assert_array_equal(params["f.u.loc"], [0.0, 0.0])
    np.testing.assert_array_equal(params["f.u.scale_tril"], IDENTITY(jnp.eye(2)))
    np.testing.assert_allclose(params["a"], 0.5)


def test_bad_gradients_show(float64):
    (loss, _), params, _ = one_step(broken)
    assert np.isfinite(loss) and np.isnan(params["f.u.loc"]).all()
    (loss, _), params, state = one_step(broken, method="eval_and_stable_update")
    assert np.isnan(loss) and int(state[0]) == 0
    jax.tree.map(np.testing.assert_array_equal, params, start_params())
    (loss, _), params, state = one_step(quadratic, method="eval_and_stable_update")
    assert np.isfinite(loss) and int(state[0]) == 1


def test_sites_that_are_not_named_go_to_the_others(float64):
    def fn(params):
        return sum(jnp.sum((x - 1.0) ** 2) for x in params.values()), None

    start = {"f.u.loc": jnp.zeros(2), "s/g.u1.loc": jnp.zeros(3), "w.loc": jnp.zeros(2)}

    def after(sites):
        optim = natural_gradient(1.0, optax.sgd(0.25), sites=sites)
        return optim.get_params(compiled(lambda state: optim.eval_and_update(fn, state)[1])(optim.init(start)))

    both, one = after(None), after(["f.u"])
    np.testing.assert_allclose(both["s/g.u1.loc"], np.ones(3))
    np.testing.assert_allclose(one["s/g.u1.loc"], np.full(3, 0.5))
    for params in (both, one):
        np.testing.assert_allclose(params["f.u.loc"], np.ones(2))
        np.testing.assert_allclose(params["w.loc"], np.full(2, 0.5))


@given(seed=st.integers(0, 10**6), shift=st.floats(-3.0, 6.0))
def test_conjugate_gradients_solve_or_descend(seed, shift):
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        H, P, b = rng.normal(size=(5, 5)), rng.normal(size=(5, 5)), rng.normal(size=5)
        H, P = H + H.T + shift * np.eye(5), P @ P.T + 0.1 * np.eye(5)
        x = np.asarray(_solve(H, P, b))
    assert np.isfinite(x).all()
    assert b @ x > 0.0
    if np.linalg.eigvalsh(H)[0] > 0.1:
        np.testing.assert_allclose(H @ x, b, atol=1e-6)


@jax.jit
def _solve(H, P, b):
    def tree(v):
        return {"x": v[:2], "y": v[2:]}

    def flat(v):
        return jnp.concatenate([v["x"], v["y"]])

    solution = natural._conjugate_gradients(lambda v: tree(H @ flat(v)), lambda v: tree(P @ flat(v)), tree(b), 40)
    return flat(solution)


@pytest.mark.parametrize("size", [1, 4])
def test_new_scales_in_batches(size, x64):
    # Batches of shape (3, 1), as plates make them: with one feature, factors and deviations have the same shape.
    rng = np.random.default_rng(size)
    batch, rate = (3, 1), 0.4
    L = np.tril(rng.normal(size=(*batch, size, size)), -1) + rng.uniform(0.5, 1.5, (*batch, size, 1)) * np.eye(size)
    G = rng.normal(size=(*batch, size, size))
    G = 0.1 * G @ np.swapaxes(G, -1, -2)  # ∂ℓ/∂S
    loc = jnp.zeros((*batch, size), x64)
    s, g = np.abs(L[..., 0]) + 0.1, G[..., 0, :] ** 2
    grads = np.tril(2.0 * G @ L), 2.0 * s * g
    arrays = jax.tree.map(lambda x: jnp.asarray(x, x64), (L, s, *grads))
    factor, deviation = compiled(
        lambda L, s, L_grad, s_grad: (
            natural._natural_scale(loc, L, L_grad, rate),
            natural._natural_scale(loc, s, s_grad, rate),
        )
    )(*arrays)
    S = L @ np.swapaxes(L, -1, -2)
    expected = np.linalg.cholesky(np.linalg.inv(np.linalg.inv(S) + 2.0 * rate * G))
    tol = 1e-10 if x64 == jnp.float64 else 1e-4
    assert factor.dtype == deviation.dtype == x64
    np.testing.assert_allclose(factor, expected, rtol=tol, atol=tol)
    assert (np.triu(np.asarray(factor), 1) == 0.0).all()
    np.testing.assert_allclose(deviation, (s**-2.0 + 2.0 * rate * g) ** -0.5, rtol=tol, atol=tol)


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        ({"rate": 0.0}, ValueError, "rate is 0.0; it must be positive"),
        ({"rate": float("nan")}, ValueError, "rate is nan"),
        ({"rate": 1.5}, ValueError, "rate is 1.5; it must be at most 1"),
        ({"rate": "fast"}, TypeError, "rate is 'fast'; it must be a number or a schedule"),
        ({"others": 0.01}, TypeError, "others is a float"),
        ({"others": numpyro.optim.Minimize()}, TypeError, "others is a Minimize"),
        ({"sites": "f.u"}, TypeError, r"such as \['f.u'\]"),
        ({"max_iterations": 0}, ValueError, "max_iterations is 0"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        natural_gradient(**{"rate": 0.5, **kwargs})


@pytest.mark.parametrize(
    "params, kwargs, message",
    [
        ({"auto_loc": 3, "w.loc": 3}, {}, r"others is None.*\['auto_loc', 'w.loc'\]"),
        ({"f.u.loc": 3, "lengthscale": ()}, {}, r"others is None.*\['lengthscale'\]"),
        ({"f.u.loc": 3}, {"sites": ["g.u"]}, r"sites has 'g.u', but there is no parameter 'g.u.loc'"),
        ({"f.u.loc": 3, "f.u.scale_tril": (6,)}, {}, r"f.u.scale_tril shape \(6,\)"),
        ({"f.u.loc": 3, "f.u.scale": 3, "f.u.scale_tril": (3, 3)}, {}, "with scale_tril .* or scale"),
    ],
)
def test_bad_parameters(params, kwargs, message):
    with pytest.raises(ValueError, match=message):
        natural_gradient(0.5, **kwargs).init({name: jnp.zeros(shape) for name, shape in params.items()})


def test_without_parameters_of_q_all_is_left_to_others():
    """As where q(ε) is given rows: with parameters beside it, or with none at all, which is exact from the start."""
    loss = lambda params: (jnp.sum(jnp.square(params.get("level", jnp.ones(2)) - 3.0)), None)  # noqa: E731
    optimizer = natural_gradient(1.0, optax.sgd(0.25))
    state = optimizer.init({"level": jnp.zeros(2)})
    (value, _), state = optimizer.eval_and_update(loss, state)
    assert value == 18.0
    np.testing.assert_allclose(optimizer.get_params(state)["level"], 1.5)
    (value, _), same = optimizer.eval_and_stable_update(lambda params: (jnp.nan * params["level"][0], None), state)
    assert np.isnan(value)
    np.testing.assert_allclose(optimizer.get_params(same)["level"], 1.5)
    (value, _), state = optimizer.eval_and_update(loss, optimizer.init({}))
    assert value == 8.0 and optimizer.get_params(state) == {}


def test_update_needs_the_loss():
    with pytest.raises(TypeError, match="eval_and_update"):
        natural_gradient(0.5).update({}, None)
