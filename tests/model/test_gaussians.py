"""The automatic guide's own distribution of the sites beside the GPs: NumPyro's autoguides' density, and no state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import compiled, rbf
from numpyro import handlers
from numpyro.infer import SVI, RenyiELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import log_density

import npgp
from npgp.contract import Frame
from npgp.model.gaussians import Site

RNG = np.random.default_rng(3)
X = RNG.uniform(size=(12, 1))
Y = np.sin(6.0 * X[:, 0])
G = np.arange(12) % 3


def others():
    """Sites of many supports, plates and shapes; one support is computed by the model."""
    upper = jnp.asarray([1.0, 3.0]) + 1.0
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    box = numpyro.sample("box", dist.Uniform(jnp.zeros(2), upper).to_event(1))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("groups", 3, dim=-2):
        slope = numpyro.sample("slope", dist.Normal(0.0, tau))
        numpyro.sample("pair", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))
    return tau, box, weights, slope


def model(X, y=None):
    tau, box, weights, slope = others()
    f = npgp.SparseGP("f", npgp.RBF(tau + box[0]), jnp.linspace(0.0, 1.0, 4)[:, None]).draw()
    with numpyro.plate("rows", len(X)):
        npgp.observe("y", f(X) + slope[G, 0] * weights[0], npgp.Gaussian(scale=0.1 + box[1]), obs=y)


def params_and_draws(guide, key):
    """Parameters of a guide, moved away from where training starts; and values of the sites that it draws there."""

    @compiled
    def start(key):
        with handlers.trace() as sites, handlers.seed(rng_seed=key):
            guide(X, Y)
        found = {"param": {}, "sample": {}}
        for name, site in sites.items():
            found.get(site["type"], {})[name] = site["value"]
        return found

    found, rng = start(key), np.random.default_rng(0)
    params = {n: x * rng.uniform(0.5, 1.5, np.shape(x)) for n, x in sorted(found["param"].items())}
    return params, {name: x for name, x in found["sample"].items() if not name.startswith("f.")}


@pytest.mark.parametrize("together", [False, True])
def test_densities_are_those_of_numpyros_autoguides(together, float64):
    hidden = handlers.block(model, hide=["f.u", "y"])
    if together:
        # One Gaussian, whose entries NumPyro has in the order of its own.
        own, of_numpyro = npgp.AutoSparseGP(model), AutoMultivariateNormal
    else:
        own, of_numpyro = npgp.AutoSparseGP(model, dependence="independent"), AutoNormal
    params, drawn = params_and_draws(own, jax.random.key(0))
    if together:
        size = len(params["joint_loc"])

        @compiled
        def numbers():
            other = of_numpyro(hidden)
            handlers.seed(other, 0)(X, Y)  # which sets it up
            return other._unpack_latent(jnp.arange(size)), own._parts[0].joint.unpacked(jnp.arange(size))

        theirs, ours = numbers()
        order, to = (np.concatenate([np.ravel(v[n]) for n in ours]).astype(int) for v in (ours, theirs))
        assert sorted(to) == sorted(order) == list(range(size))
        to = to[np.argsort(order)]

        def shuffled(x):
            found = np.zeros(size)
            found[to] = x
            return found

        z, L = np.random.default_rng(1).normal(size=size), params["joint_scale_tril"]
        covariance = np.zeros((size, size))
        covariance[np.ix_(to, to)] = L @ L.T
        given = {"auto_loc": shuffled(params["joint_loc"]), "auto_scale_tril": np.linalg.cholesky(covariance)}
        values = [{"_auto_latent": z}, {"_auto_latent": shuffled(z)}]
    else:
        given = {name: params[name] for name in params if not name.startswith("f.")}
        values = [drawn, drawn]

    def log_q(guide, params, value):
        """Log density without that of the GP's site, and the other sites' values and numbers of event dimensions."""
        guide = handlers.seed(handlers.substitute(guide, data=value), 0)
        density, trace = log_density(guide, (X, Y), {}, params)
        sites = {name: site for name, site in trace.items() if site["type"] == "sample" and name != "_auto_latent"}
        f = sites.pop("f.u", None)
        gp = 0.0 if f is None else jnp.sum(f["fn"].log_prob(f["value"]))
        return density - gp, {name: (site["value"], site["fn"].event_dim) for name, site in sites.items()}

    mine, found = compiled(functools.partial(log_q, own))(params, values[0])
    # A guide of its own for each program: it keeps what it computes when it is set up.
    theirs, wanted = compiled(lambda *args: log_q(of_numpyro(hidden), *args))(given, values[1])
    for name, (value, event_dim) in wanted.items():
        np.testing.assert_allclose(found[name][0], value, rtol=1e-10)
        assert found[name][1] == event_dim
    np.testing.assert_allclose(mine, theirs, rtol=1e-10)


def test_members_of_a_subsampled_plate_start_from_the_draws_by_turns():
    site = Site("x", (5,), 0, (Frame("members", -1, 2),), (5,), dist.constraints.real)
    np.testing.assert_array_equal(site.whole(jnp.array([1.0, 2.0])), [1.0, 2.0, 1.0, 2.0, 1.0])


def test_starts_are_medians_of_the_prior(float64):
    """Of 15 draws, as ``init_to_median`` has them: within four standard errors of a median."""
    guide = npgp.AutoSparseGP(model, dependence="independent")
    svi = SVI(model, guide, npgp.adam(0.1, 10), TraceMeanField_ELBO())

    @compiled
    def started():
        params = svi.get_params(svi.init(jax.random.key(2), X, Y))
        return params, guide.median(params, X, Y), guide.quantiles(params, [0.1, 0.9], X, Y)["box"]

    params, median, (low, high) = started()
    assert abs(median["tau"] - 0.674) < 4 * 1.25 * 0.6 / np.sqrt(15)
    np.testing.assert_array_less(np.abs(median["box"] - np.array([1.0, 2.0])), 4 * 1.25 * np.array([0.58, 1.2]) / 4)
    np.testing.assert_allclose(jnp.sum(median["weights"]), 1.0)
    np.testing.assert_allclose(params["pair_auto_scale"], 0.1 * np.ones((3, 1, 2)))
    assert np.all(low > 0) and np.all(high < np.array([2.0, 4.0])) and np.all(low < median["box"])
    with pytest.raises(TypeError, match="lacks the model's arguments: supports of sites depend on them"):
        guide.median(params)


def test_sites_with_measurements_start_at_their_mode(float64):
    """In the same plate: in closed form, with densities of unconstrained values; the level at a median."""
    measured, spread = RNG.normal(size=12), RNG.uniform(0.5, 2.0, 12)

    def measured_model(y=None):
        level = numpyro.sample("level", dist.Normal(0.7, 1.0))
        f = npgp.SparseGP("f", npgp.RBF(1.0), jnp.linspace(-2.0, 2.0, 4)[:, None]).draw()
        with numpyro.plate("rows", 12):
            x = numpyro.sample("x", dist.Normal(level, 2.0))
            numpyro.sample("measured", dist.Normal(x, 0.5), obs=measured)
            scale = numpyro.sample("scale", dist.HalfNormal(1.0))
            numpyro.sample("spread", dist.Normal(0.0, scale), obs=spread)
            npgp.observe("y", f(x[:, None]) + level, npgp.Gaussian(scale=0.1), obs=y)

    guide = npgp.AutoSparseGP(measured_model)
    svi = SVI(measured_model, guide, npgp.adam(0.1, 10), TraceMeanField_ELBO())
    starts = compiled(lambda: guide.median(svi.get_params(svi.init(jax.random.key(0), Y)), Y))()
    level = starts["level"]
    np.testing.assert_allclose(starts["x"], (level / 4.0 + measured / 0.25) / (1.0 / 4.0 + 1.0 / 0.25), rtol=1e-5)
    # log p = −s²/2 + log s − log s − spread²/(2 s²)
    np.testing.assert_allclose(starts["scale"], np.sqrt(spread), rtol=1e-5)
    assert abs(level - 0.7) < 4 * 1.25 / np.sqrt(15)


def test_it_runs_inside_jit_and_vmap(float64):
    """Eight fits in one program are eight fits, whichever is the first."""
    svi = SVI(model, npgp.AutoSparseGP(model), npgp.adam(0.01, 10), TraceMeanField_ELBO())
    keys = jax.random.split(jax.random.key(0), 8)

    @compiled
    def steps(keys):
        states = jax.vmap(lambda key: svi.init(key, X, Y))(keys)
        step = jax.vmap(lambda state, _: svi.update(state, X, Y), (0, None))
        states, losses = jax.lax.scan(step, states, length=2)
        return svi.get_params(states), losses[-1]

    params, losses = steps(keys)
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(vars(svi.guide)))
    again, turned = steps(keys[::-1])
    np.testing.assert_allclose(turned[::-1], losses, rtol=1e-8)
    for name, x in params.items():
        np.testing.assert_allclose(again[name][::-1], x, rtol=1e-7, atol=1e-9)
    assert np.ptp(np.asarray(losses)) > 0.1  # other keys, other starts


def test_bounds_that_the_model_computes_are_no_tracers_after_a_fit():
    def bounded(X, y=None):
        low = jnp.min(X) - 1.0
        level = numpyro.param("level", low + 0.5, constraint=numpyro.distributions.constraints.greater_than(low))
        f = npgp.SparseGP("f", npgp.RBF(), jnp.linspace(0.0, 1.0, 4)[:, None]).draw()
        npgp.observe("y", f(X) + level, npgp.Gaussian(scale=0.1), obs=y)

    svi = SVI(bounded, npgp.AutoSparseGP(bounded), npgp.adam(0.01, 3), TraceMeanField_ELBO())
    result = npgp.fit(svi, jax.random.key(0), 3, jnp.asarray(X), jnp.asarray(Y), progress=False)
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(svi.constrain_fn.args))
    np.testing.assert_allclose(svi.get_params(result.state)["level"], result.params["level"])


def test_guides_that_keep_what_they_compute_are_set_up_first():
    """An object that notes an array at its first call and calls a function, which calls an autoguide."""

    def model(X, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        f = npgp.SparseGP("f", npgp.RBF(1.0), jnp.linspace(0.0, 1.0, 4)[:, None]).draw()
        with numpyro.plate("rows", len(X)):
            npgp.observe("y", f(X) + slope, npgp.Gaussian(scale=0.1), obs=y)

    inner = AutoNormal(handlers.block(model, hide=["f.u", "y"]))

    def by_hand(X, y=None):
        return inner(X, y)

    class Noting:
        noted = None

        def __call__(self, X, y=None):
            if self.noted is None:
                self.noted = jnp.sum(X)
            numpyro.param("of_noted", self.noted)
            return by_hand(X, y)

    guide = npgp.AutoSparseGP(model, [Noting()], dependence="independent")
    svi = SVI(model, guide, npgp.adam(0.01, 3), TraceMeanField_ELBO())
    for _ in range(2):
        result = npgp.fit(svi, jax.random.key(0), 2, jnp.asarray(X), jnp.asarray(Y), progress=False)
    assert np.isfinite(result.losses).all()
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(vars(guide)))
    assert npgp.posterior("f", model, guide, result.params, X, Y).batch_shape == ()


def test_what_has_no_distribution_is_said():
    def discrete(X, y=None):
        numpyro.sample("kind", dist.Bernoulli(0.5))
        model(X, y)

    with pytest.raises(ValueError, match="kind is a discrete latent site.*sum it out"):
        handlers.seed(npgp.AutoSparseGP(discrete), 0)(X, Y)


def level_beside(X, y=None):
    """A level beside a function at fixed hyperparameters: given the level, q(ε) is the exact posterior."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    f = npgp.SparseGP("f", npgp.RBF(0.3), jnp.linspace(0.0, 1.0, 4)[:, None]).draw()
    with numpyro.plate("rows", len(X)):
        npgp.observe("y", f(X) + level, npgp.Gaussian(scale=0.3), obs=y, conditional="prior")


def test_gradients_have_no_noise_where_the_posterior_is_this_gaussian(float64):
    """Of the level, by dense algebra; and elsewhere they are right on average."""
    Z = np.linspace(0.0, 1.0, 4)[:, None]
    K_uf = rbf(Z, X, 0.3, 1.0)
    precision = np.linalg.inv(K_uf.T @ np.linalg.solve(rbf(Z, Z, 0.3, 1.0), K_uf) + 0.09 * np.eye(12))
    deviation = (0.25 + np.sum(precision)) ** -0.5
    mean = deviation**2 * np.sum(precision @ Y)
    guide = npgp.AutoSparseGP(level_beside)

    @jax.jit
    def gradients(loc, scale, keys):
        params = {"joint_loc": jnp.reshape(loc, 1), "joint_scale_tril": jnp.reshape(scale, (1, 1))}
        loss = lambda params, key: TraceMeanField_ELBO().loss(key, params, level_beside, guide, X, Y)  # noqa: E731
        found = jax.vmap(jax.grad(loss), (None, 0))(params, keys)
        return jnp.stack([found[name].reshape(-1) for name in params])

    keys = jax.random.split(jax.random.key(0), 400)
    # jitter is added to K_uu
    np.testing.assert_allclose(gradients(mean, deviation, keys), 0.0, atol=1e-3 / deviation)
    loc, scale = mean + deviation, 0.5 * deviation
    found = gradients(loc, scale, keys)
    expected = np.array([(loc - mean) / deviation**2, scale / deviation**2 - 1.0 / scale])
    error = np.std(found, axis=1) / np.sqrt(400)
    assert np.all(np.abs(np.mean(found, axis=1) - expected) < 5 * error) and np.all(error < 0.1 * np.abs(expected))


def test_other_losses_have_the_whole_gradient(float64):
    """
    That of ``RenyiELBO`` by differences: what is left out of an ELBO's averages to zero there alone. Of an ELBO the
    differences at one key are not the gradient.
    """

    def drawn(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        f = npgp.SparseGP("f", npgp.RBF(0.3), jnp.linspace(0.0, 1.0, 4)[:, None]).draw()
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(npgp.sample("at_rows", f(X)) + level, 0.3), obs=y)

    guide = npgp.AutoSparseGP(drawn)
    svi = SVI(drawn, guide, npgp.adam(0.1, 10), TraceMeanField_ELBO())
    params = compiled(lambda: svi.get_params(svi.init(jax.random.key(0), X, Y)))()
    ratio = {}
    for loss in (RenyiELBO(num_particles=3), TraceMeanField_ELBO(num_particles=3)):

        def value(loc, loss=loss):
            return loss.loss(jax.random.key(1), params | {"joint_loc": loc}, drawn, guide, X, Y)

        loc, far = params["joint_loc"], 1e-5
        found = jax.jit(jax.value_and_grad(value))
        ratio[type(loss)] = float((found(loc + far)[0] - found(loc - far)[0]) / (2 * far * found(loc)[1][0]))
    assert ratio[RenyiELBO] == pytest.approx(1.0, rel=1e-5)
    assert ratio[TraceMeanField_ELBO] != pytest.approx(1.0, rel=1e-3)
