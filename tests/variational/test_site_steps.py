"""
Natural gradients for q(ε) given pseudo-data: the optimum in one step, reports, and training faster than Adam's.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from models import compiled, make_elbo, rbf, trajectory
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import npgp
from npgp.context import under
from npgp.variational import natural, natural_gradient
from npgp.variational.parameterizations import Slot, pseudo_posterior, reported

N, NOISE = 24, 0.2
_rng = np.random.default_rng(5)
X = np.sort(_rng.uniform(0.0, 5.0, (N, 1)), 0)
F = np.sin(2.0 * X[:, 0]) + 0.4 * X[:, 0] - 1.0
Y = F + np.sqrt(NOISE) * _rng.normal(size=N)
COUNTS = np.round(np.exp(F + 1.0))
Z, O = np.array([[0.5], [1.7], [3.1], [4.4]]), np.array([[1.1], [2.4], [3.8]])


def component(kinds="dense"):
    blocks = [jnp.asarray(block.copy()) for block in ([Z] if isinstance(kinds, str) else [Z, O])]
    return npgp.SparseGP("f", npgp.RBF(0.7, variance=1.3), blocks, kinds, jitter=1e-12)


def regression(X, y=None, rows=None, kinds="dense", outputs=None, likelihood=None):
    likelihood = likelihood or npgp.Gaussian(variance=NOISE)
    if outputs is None:
        f = component(kinds).draw()
        with npgp.plate("data", N, rows):
            npgp.observe("y", f(X), likelihood, obs=y)
    else:
        with numpyro.plate("outputs", outputs, dim=-2):
            f = component(kinds).draw()
            with npgp.plate("data", N, rows):
                npgp.observe("y", f(X), likelihood, obs=y)


def point_guide(X, y=None, rows=None, kinds="dense", outputs=None, likelihood=None):
    """One q(ε) given pseudo-data, whose hyperparameters are a point."""
    if outputs is None:
        component(kinds).guide(pseudo_data=True)
    else:
        with numpyro.plate("outputs", outputs, dim=-2):
            component(kinds).guide(pseudo_data=True)


def test_pseudo_data_start_with_noise_of_a_share_of_the_priors_deviation(float64):
    site = handlers.trace(handlers.seed(point_guide, 0)).get_trace(X)["f.u.pseudo_scale"]
    np.testing.assert_allclose(site["value"], component().init_scale * np.sqrt(1.3), rtol=1e-9)
    assert component().init_scale < 0.5


@pytest.fixture
def undamped(monkeypatch):
    monkeypatch.setattr(natural, "DAMPING", 0.0)


def steps(num, *args, rate=1.0, particles=1, change=None, optim=None, **static):
    """The trajectory of the regression."""
    model, guide = partial(regression, **static), partial(point_guide, **static)
    optim = natural_gradient(rate) if optim is None else optim
    svi = SVI(model, guide, optim, TraceMeanField_ELBO(num_particles=particles))
    return trajectory(svi, num, *args, change=change)


def pseudo_data(params, step=-1, site="f.u"):
    """z and Λ."""
    scale = params[f"{site}.pseudo_scale"][step]
    lower = np.tril(params[f"{site}.pseudo_lower"][step], -1)
    R = (lower + np.eye(scale.shape[-1])) / scale[..., None]
    return params[f"{site}.unit"][step] * params[f"{site}.pseudo_loc"][step], R @ np.swapaxes(R, -1, -2)


def exact(x, y, weight=1.0):
    """What the data say of u: z and Λ."""
    W = np.linalg.solve(rbf(Z, Z), rbf(Z, x))
    precision = weight * W @ W.T / NOISE
    return np.linalg.solve(precision, weight * W @ y / NOISE), precision


# ---------------------------------------------------------------------------------------------------------------
# Hyperparameters at a point


@pytest.mark.parametrize("particles", [1, 3])
def test_a_unit_step_is_the_optimum(particles, undamped, float64):
    params, losses = steps(2, X, Y, particles=particles)
    for after in range(2):  # the second step changes nothing
        for found, expected in zip(pseudo_data(params, after), exact(X, Y), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-7)
    np.testing.assert_allclose(losses[1:], losses[2], rtol=1e-12)
    assert losses[0] > losses[1] + 1.0


def test_damping_takes_a_few_steps_more(float64):
    _, damped = steps(4, X, Y)
    assert damped[4] < damped[3] + 1e-9 and damped[1] - damped[4] < 1e-3 * (damped[0] - damped[4])


def test_minibatches_weigh_and_functions_in_plates_have_their_own(undamped, float64):
    rows, both = np.arange(0, N, 2), np.stack([Y, -(Y**2)])
    params, _ = steps(1, X[rows], both[:, rows], rows, outputs=2)
    values, precision = pseudo_data(params)
    for found, Lambda, y in zip(values[:, 0], precision[:, 0], both, strict=True):
        expected = exact(X[rows], y[rows], weight=2.0)
        np.testing.assert_allclose(found, expected[0], rtol=1e-7)
        np.testing.assert_allclose(Lambda, expected[1], rtol=1e-7)


def test_units_do_not_matter(float64):
    def change(factor, params):
        return params | {"f.u.pseudo_loc": 0.3 / factor * jnp.ones(4), "f.u.unit": factor * params["f.u.unit"]}

    poisson = npgp.Poisson()
    one, other = (
        steps(2, X, COUNTS, rate=0.5, change=partial(change, factor), likelihood=poisson)[0] for factor in (1.0, 30.0)
    )
    for a, b in zip(pseudo_data(one), pseudo_data(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_the_step_is_that_of_the_parameters_of_q(undamped, float64):
    """In natural parameters, which differ by the prior's: as the optimizer steps those of an ordinary guide."""
    poisson = npgp.Poisson()
    rate, model = 0.3, partial(regression, likelihood=poisson)
    rng = np.random.default_rng(2)
    data = {"pseudo_loc": rng.normal(size=4), "pseudo_scale": rng.uniform(0.3, 0.6, 4), "unit": np.ones(1)}
    data = {f"f.u.{name}": jnp.asarray(value) for name, value in data.items()}
    data["f.u.pseudo_lower"] = jnp.asarray(rng.normal(size=(4, 4)))
    L = np.linalg.cholesky(rbf(Z, Z))

    def whitened(z, precision):
        S = np.linalg.inv(np.eye(4) + L.T @ precision @ L)
        return {"f.u.loc": S @ L.T @ precision @ z, "f.u.scale_tril": np.linalg.cholesky(S)}

    begin = whitened(*pseudo_data(jax.tree.map(lambda x: np.asarray(x)[None], data)))
    params, losses = steps(1, X, COUNTS, rate=rate, change=lambda _: data, likelihood=poisson)
    assert losses[1] < losses[0]
    svi = SVI(model, npgp.AutoSparseGP(model, dependence="independent"), natural_gradient(rate), TraceMeanField_ELBO())

    def step(start):
        return svi.get_params(svi.update(svi.init(jax.random.key(0), X, COUNTS, init_params=start), X, COUNTS)[0])

    expected = compiled(step)(jax.tree.map(jnp.asarray, begin))
    found = whitened(*pseudo_data(params))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("kinds", ["diagonal", ("dense", "mean-only")], ids=str)
def test_ends_where_the_gradient_vanishes(kinds, float64):
    static = {"kinds": kinds, "likelihood": npgp.Poisson()}
    params, losses = steps(60, X, COUNTS, rate=0.7, **static)
    assert np.all(np.diff(losses) < 1e-9 * np.abs(losses[1:]))
    model, guide = partial(regression, **static), partial(point_guide, **static)
    elbo = make_elbo(model, guide)
    end = {name: jnp.asarray(value[-1]) for name, value in params.items()}
    for name, gradient in compiled(jax.grad(lambda p: elbo(jax.random.key(0), p, X, COUNTS)))(end).items():
        assert np.abs(gradient).max() < 1e-3, name  # blocks take turns


# ---------------------------------------------------------------------------------------------------------------
# Reports


@pytest.mark.parametrize("diagonal_factor, diagonal_noise", [(False, True), (True, False)])
def test_reports(diagonal_factor, diagonal_noise, float64):
    """Over draws in ``vmap``: covariances are summed, and gradients in W are autodiff's where the mean is held."""
    rng = np.random.default_rng(0)
    factors = np.abs(rng.normal(size=(3, 4))) + 0.3 if diagonal_factor else np.tril(rng.normal(size=(3, 4, 4)))
    root = np.tril(rng.normal(size=(4, 4)), -1) + np.diag(rng.uniform(0.5, 1.5, 4))
    root, z = np.diag(root) if diagonal_noise else root, rng.normal(size=4)
    full = factors[..., None] * np.eye(4) if diagonal_factor else factors
    A = rng.normal(size=(4, 4))

    def of_q(m, S):
        return jnp.sum(jnp.sin(A @ S @ A.T)) + jnp.sum(jnp.cos(S @ m))

    def loss(slot):
        def one(L):
            q = reported("f.u", pseudo_posterior(L, z, root, diagonal_factor), L, root, diagonal_factor)
            F = q.scale_tril if q.kind == "dense" else jnp.diag(q.scale)
            return of_q(q.loc, F @ F.T)

        with under(slots={"f.u": slot}):
            return jnp.mean(jax.vmap(one)(jnp.asarray(factors)))

    def held(W):
        def one(L):
            R = jnp.diag(root) if diagonal_noise else root
            H = R.T @ L
            S = [jnp.linalg.inv(jnp.eye(4) + H.T @ V @ H) for V in (jnp.eye(4), jnp.diag(W) if W.ndim == 1 else W)]
            return of_q(S[0] @ H.T @ R.T @ z, S[1])

        return jnp.mean(jax.vmap(one)(jnp.asarray(full)))

    W = jnp.ones(4) if diagonal_noise else jnp.eye(4)
    slot = Slot(jnp.zeros_like(W), jnp.zeros((4, 4)), jnp.zeros(()))
    report, expected = compiled(lambda slot, W: (jax.grad(loss)(slot), jax.grad(held)(W)))(slot, W)
    expected = expected if diagonal_noise else 0.5 * (expected + expected.T)
    assert report.draws == 3.0
    np.testing.assert_allclose(report.covariance, sum(L @ L.T for L in full), rtol=1e-12)
    np.testing.assert_allclose(report.precision, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lengthscale", [1.0, 0.3])
def test_values_that_the_prior_has_nearly_equal_have_a_direction_in_float32(lengthscale):
    """
    Pseudo-data that know these by their differences, where ``Rᵀ K R`` is a difference of numbers 1e6 times as large and
    has had no factor: X = −2 Q G Q in float64, with damping for float32's rounding.
    """
    x = np.linspace(0.0, 1.0, 20)[:, None]
    K, G = rbf(x, x, lengthscale, 1.0), 1e-3 * np.cov(_rng.normal(size=(20, 40)))
    R = np.linalg.cholesky(np.linalg.inv(K + {1.0: 1e-4, 0.3: 1e-6}[lengthscale] * np.eye(20)))
    to_real = numpyro.distributions.biject_to(numpyro.distributions.constraints.positive).inv
    scale = 1.0 / np.diag(R)
    q = {"f.u.pseudo_loc": np.ones(20), "f.u.pseudo_scale": to_real(jnp.asarray(scale)), "f.u.unit": to_real(1.0)}
    q |= {"f.u.pseudo_lower": np.tril(R * scale[:, None], -1)}
    q = {name: jnp.asarray(value, jnp.float32) for name, value in q.items()}
    grads = {name: jnp.full_like(value, 1e-3) for name, value in q.items()}
    direction = natural.Direction("f.u", q, grads, jnp.asarray(G, jnp.float32), jnp.asarray(K, jnp.float32))
    assert direction.finite
    damping = natural.DAMPING + np.finfo(np.float32).eps * np.sum(np.abs(R).sum(0) ** 2)
    Q = np.eye(20) + np.linalg.inv(R.T @ K @ R + damping * np.eye(20))
    expected = -2.0 * Q @ G @ Q
    assert np.linalg.norm(direction.X - expected) < 0.1 * np.linalg.norm(expected)  # rounding is that of T, damped


def test_a_direction_that_rounding_leaves_nothing_of_ends_training(monkeypatch):
    """The loss and its gradients are finite, and q(ε) would stay as it is."""
    monkeypatch.setattr(natural, "start_average", lambda sites, q: jnp.full((4, 4), jnp.inf))
    svi = SVI(regression, point_guide, natural_gradient(0.5), TraceMeanField_ELBO())
    with pytest.raises(FloatingPointError, match="is bad at step 0: f.u.pseudo_loc"):
        npgp.fit(svi, jax.random.key(0), 3, X, Y, progress=False)


def test_averages():
    average, report = jnp.eye(2), Slot(jnp.zeros((2, 2)), 6.0 * jnp.eye(2), jnp.asarray(2.0))
    np.testing.assert_allclose(natural.average(average, report, jnp.asarray(0)), 3.0 * np.eye(2))
    np.testing.assert_allclose(natural.average(average, report, jnp.asarray(1)), 2.0 * np.eye(2))
    np.testing.assert_allclose(natural.average(average, report, jnp.asarray(900)), 1.1 * np.eye(2), rtol=1e-6)
    for bad in (report._replace(draws=jnp.asarray(0.0)), report._replace(covariance=jnp.full((2, 2), jnp.nan))):
        np.testing.assert_array_equal(natural.average(average, bad, jnp.asarray(3)), average)


# ---------------------------------------------------------------------------------------------------------------
# In use


def reached(model, optim, num, X, y, start=None):
    """Parameters after training, and the mean ELBO over draws that are always the same."""
    guide = npgp.AutoSparseGP(model, dependence="pseudo-data")
    svi = SVI(model, guide, optim, TraceMeanField_ELBO())

    def run(key, start):
        state = svi.init(key, X, y, init_params=start)
        state = jax.lax.fori_loop(0, num, lambda _, state: svi.update(state, X, y)[0], state)
        params, keys = svi.get_params(state), jax.random.split(jax.random.key(7), 200)
        loss = jax.lax.map(lambda key: TraceMeanField_ELBO().loss(key, params, model, guide, X, y), keys)
        return params, -jnp.mean(loss)

    return compiled(run)(jax.random.key(1), start)


def sampled(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.7))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    f = npgp.SparseGP("f", npgp.RBF(lengthscale, variance=scale**2), jnp.asarray(Z.copy()), jitter=1e-10).draw()
    with numpyro.plate("data", N):
        npgp.observe("y", f(X), npgp.Poisson(), obs=y)


def test_a_step_takes_the_average_of_the_steps_before_it(monkeypatch, float64):
    """Its own draw moves slopes and average alike, and together they would be biased; the first has no other."""
    taken = []

    class Noting(natural.Direction):
        def __init__(self, sites, q, grads, in_precision, covariance):
            taken.append(covariance)
            super().__init__(sites, q, grads, in_precision, covariance)

    monkeypatch.setattr(natural, "Direction", Noting)
    guide = npgp.AutoSparseGP(sampled, dependence="pseudo-data")
    svi = SVI(sampled, guide, natural_gradient(0.5, npgp.adam(0.01)), TraceMeanField_ELBO())

    @compiled
    def two_steps(key):
        states = [svi.init(key, X, COUNTS)]
        for _ in range(2):
            states.append(svi.update(states[-1], X, COUNTS)[0])
        return [state.optim_state[1][1]["f.u"] for state in states[1:]], list(taken)

    (first, second), (at_first, at_second) = two_steps(jax.random.key(0))
    np.testing.assert_allclose(at_first, first, rtol=1e-12)
    np.testing.assert_allclose(at_second, first, rtol=1e-12)
    assert np.max(np.abs(second - first)) > 1e-3 * np.max(np.abs(first))


def test_ends_at_adams_optimum(float64):
    """Not to the last digit where K varies with the draw (docs/theory.md, 11.2)."""
    schedule = optax.cosine_decay_schedule(0.3, 1500)
    args = jnp.asarray(X), jnp.asarray(COUNTS)
    params, elbo = reached(sampled, natural_gradient(schedule, npgp.adam(0.03, 1500)), 1500, *args)
    deviation = jnp.sqrt(jnp.diag(params["joint_scale_tril"] @ params["joint_scale_tril"].T))
    assert jnp.all(deviation > 0.15)  # so that K varies
    _, further = reached(sampled, npgp.adam(0.01, 1500), 1500, *args, start=params)
    assert abs(further - elbo) < 0.05  # measured: .001


def started(*args, **kwargs):
    """The average covariances of a new optimizer, for two components."""

    def two(X, y=None):
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        for name in "fg":
            f = npgp.SparseGP(name, npgp.RBF(noise), jnp.asarray(Z[:2])).draw()
            npgp.observe(f"y{name}", f(X), npgp.Gaussian(scale=noise), obs=y)

    guide = npgp.AutoSparseGP(two, AutoNormal, dependence="pseudo-data")
    svi = SVI(two, guide, natural_gradient(0.5, *args, **kwargs), TraceMeanField_ELBO())
    return jax.eval_shape(lambda: svi.init(jax.random.key(0), X, Y)).optim_state[1][1]


def test_sites_that_are_named_step():
    assert {site: average.shape for site, average in started(optax.adam(0.01)).items()} == {
        "f.u": (2, 2),
        "g.u": (2, 2),
    }
    assert set(started(optax.adam(0.01), sites=["g.u"])) == {"g.u"}


def test_forward_mode_is_refused(float64):
    svi = SVI(regression, point_guide, natural_gradient(0.5), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match="steps 'f.u', which is given by pseudo-data, by reverse-mode gradients"):
        jax.eval_shape(lambda: svi.update(svi.init(jax.random.key(0), X, Y), X, Y, forward_mode_differentiation=True))
    with pytest.raises(ValueError, match="others is None, but there are parameters .*noise_auto_loc"):
        started()
