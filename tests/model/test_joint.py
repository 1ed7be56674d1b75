"""Components that share one q(ε): exactness, bounds, the chain rule of divergences, which components share, draws."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONDITIONALS, NOISE, STRUCTURES, X_NEW, X, Y, compiled, make_elbo, rbf, traces
from numpyro import handlers
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from oracles import log_normal

import npgp
from npgp.model import components

#: Lengthscales and variances of f and g.
F, G = (2.0, 1.5), (0.4, 0.6)
SLOPE = 1.5
SITES = ["f.u", "g.u"]


def two(X, y=None, structure=None, conditional="tight", first=None):
    """A slope and two GPs, all hyperparameters known; inducing points at all inputs if no structure is named."""
    slope = numpyro.sample("slope", dist.Normal(0.0, SLOPE))
    blocks, kinds = ([X if first is None else first], None) if structure is None else STRUCTURES[structure]
    f = npgp.SparseGP("f", npgp.RBF(F[0], variance=F[1]), [jnp.asarray(b) for b in blocks], kinds, jitter=1e-13).draw()
    g = npgp.SparseGP("g", npgp.RBF(G[0], variance=G[1]), X if structure is None else X[:3], jitter=1e-13).draw()
    with numpyro.plate("data", len(X)):
        mean = f(X) + X[:, 0] * g(X) + slope * X[:, 0]
        npgp.observe("y", mean, npgp.Gaussian(variance=NOISE), obs=y, conditional=conditional)


def start(model, guide, *args):
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    return compiled(lambda *args: svi.get_params(svi.init(jax.random.key(0), *args)))(*args)


def random_params(params, seed):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(v + 0.5 * rng.uniform(0 if "scale" in n else -1, 1, np.shape(v))) for n, v in params.items()}


def stacked(guide_trace):
    """m and T of q(ε_f, ε_g), from the sites' distributions."""
    f, g = (guide_trace[name]["fn"] for name in SITES)
    T = jnp.concatenate([jnp.pad(f.rows, [(0, 0), (0, g.rows.shape[1] - f.rows.shape[1])]), g.rows])
    return jnp.concatenate([f.loc, g.loc]), T


def oracle():
    """Covariances of y − slope x, and of f and x g with it and each other, at the rows."""
    x = X[:, 0]
    of_f, of_g = rbf(X, X, *F), x[:, None] * rbf(X, X, *G) * x
    return of_f, of_g, of_f + of_g + NOISE * np.eye(len(X))


def exact_params(params):
    """Λ = (1, x)(1, x)ᵀ/σ² of each row, all of it among the first component's pseudo-data; the second's say nothing."""
    x, (_, _, C) = X[:, 0], oracle()
    variance = 1 / (1 / SLOPE**2 + x @ np.linalg.solve(C, x))
    slope = variance * x @ np.linalg.solve(C, Y)
    none = np.zeros((8, 8))
    exact = {
        "auto_loc": np.array([slope]),
        "auto_scale_tril": np.array([[np.sqrt(variance)]]),
        "f.u.unit": np.ones(1),
        "f.u.pseudo_loc": Y - slope * x,
        "f.u.pseudo_scale": np.full(8, np.sqrt(NOISE)),
        "f.u.pseudo_lower": none,
        "f.u.coupling": -x[:, None],
        "f.u.noise_coupling": np.zeros(1),
        "g.u.unit": np.ones(1),
        "g.u.pseudo_loc": np.zeros(8),
        "g.u.pseudo_scale": np.full(8, 1e8),
        "g.u.pseudo_lower": none,
        "g.u.coupling": np.zeros((8, 1)),
        "g.u.noise_coupling": np.zeros(1),
        "g.u.with.f.u": np.diag(x),
    }
    assert {n: np.shape(v) for n, v in exact.items()} == {n: np.shape(v) for n, v in params.items()}
    return jax.tree.map(jnp.asarray, exact)


@pytest.fixture(scope="module")
def exact():
    """The guide of the exact posterior, its parameters, and what it does at a slope."""
    with jax.enable_x64(True):
        guide = npgp.AutoSparseGP(two, dependence="pseudo-data")
        params = exact_params(start(two, guide, X, Y))

        def run(slope, key):
            guide_trace, trace = traces(two, guide, params, jnp.asarray(X), jnp.asarray(Y), values={"slope": slope})
            kls = [dist.kl_divergence(guide_trace[n]["fn"], trace[n]["fn"]) for n in SITES]
            drawn = {n: guide_trace[n]["value"] for n in SITES}
            log_q = sum(guide_trace[n]["fn"].log_prob(drawn[n]) for n in SITES)
            moments = trace["y"]["fn"].moments
            elbo = make_elbo(two, guide)(key, params, jnp.asarray(X), jnp.asarray(Y))
            return stacked(guide_trace), moments, kls, drawn, log_q, elbo

        return guide, params, compiled(run)


@pytest.mark.parametrize("slope", [-0.4, 1.3])
def test_the_exact_posterior_is_in_the_family(exact, slope, float64):
    """Given each slope, of f and g jointly; with the slope's own posterior, that of the three, and the evidence."""
    (m, T), moments, _, _, _, elbo = exact[2](jnp.asarray(slope), jax.random.key(3))
    x, (of_f, of_g, C) = X[:, 0], oracle()
    both = np.concatenate([of_f, of_g])
    left = Y - slope * x
    mean = both @ np.linalg.solve(C, left)
    zero = np.zeros((8, 8))
    covariance = np.block([[of_f, zero], [zero, of_g]]) - both @ np.linalg.solve(C, both.T)
    factors = [np.linalg.cholesky(rbf(X, X, *F)), x[:, None] * np.linalg.cholesky(rbf(X, X, *G))]
    L = np.block([[factors[0], zero], [zero, factors[1]]])
    np.testing.assert_allclose(L @ m, mean, atol=1e-6)
    np.testing.assert_allclose(L @ T @ T.T @ L.T, covariance, atol=1e-6)  # among them those of f with g
    assert np.abs(covariance[:8, 8:]).max() > 0.05
    sums = np.hstack([np.eye(8), np.eye(8)])
    np.testing.assert_allclose(moments.mean, sums @ mean + slope * x, atol=1e-6)
    np.testing.assert_allclose(moments.variance, np.diag(sums @ covariance @ sums.T), atol=1e-6)
    evidence = log_normal(Y, C + SLOPE**2 * np.outer(x, x))
    np.testing.assert_allclose(elbo, evidence, atol=1e-6)  # at a draw of the slope from its posterior


def test_divergences_and_densities_of_sites_add_up(exact, float64):
    """The chain rule: to the divergence, and at draws the density, of the joint Gaussian."""
    (m, T), _, kls, drawn, log_q, _ = exact[2](jnp.asarray(0.7), jax.random.key(3))
    S = np.asarray(T @ T.T)
    kl = 0.5 * (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1])
    np.testing.assert_allclose(sum(kls), kl, rtol=1e-9)
    dets = [np.linalg.slogdet(B)[1] for B in (S, S[:8, :8], S[8:, 8:])]
    assert dets[1] + dets[2] - dets[0] > 1.0  # what the two have in common, twice
    np.testing.assert_allclose(log_q, log_normal(np.concatenate([drawn[n] for n in SITES]) - m, S), rtol=1e-8)


# ---------------------------------------------------------------------------------------------------------------
# Bounds


@functools.cache
def bound(structure, conditional):
    model = functools.partial(two, structure=structure, conditional=CONDITIONALS[conditional])
    guide = npgp.AutoSparseGP(model, dependence="pseudo-data")

    def value(params, slope):
        guide_trace, trace = traces(model, guide, params, jnp.asarray(X), jnp.asarray(Y), values={"slope": slope})
        latent = [n for n in guide_trace if n[:2] in ("f.", "g.") and guide_trace[n]["type"] == "sample"]
        kl = sum(jnp.sum(dist.kl_divergence(guide_trace[n]["fn"], trace[n]["fn"])) for n in latent)
        return jnp.sum(trace["y"]["fn"].log_prob(Y)) - kl

    return compiled(value), start(model, guide, X, Y)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    pair=st.sampled_from([("solve", "grouped"), ("odvgp", "tight")]),
    width=st.floats(0.01, 3.0),
)
def test_never_above_the_evidence(seed, pair, width):
    with jax.enable_x64(True):
        value, params = bound(*pair)
        params = random_params(params, seed)
        params |= {n: width * v for n, v in params.items() if n.endswith("pseudo_scale")}
        slope = np.random.default_rng(seed).normal()
        found = float(value(params, jnp.asarray(slope)))
    assert found <= log_normal(Y - slope * X[:, 0], oracle()[2]) + 1e-8


def test_components_by_themselves_are_in_the_family(float64):
    """Without what pseudo-data of one see of the other."""
    model = functools.partial(two, structure="odvgp")
    together, apart = (
        npgp.AutoSparseGP(model, dependence="pseudo-data"),
        npgp.AutoSparseGP(model, joint=False, dependence="pseudo-data"),
    )
    params = random_params(start(model, together, X, Y), 2)
    none = params | {"g.u.with.f.u": jnp.zeros((3, 3))}
    assert set(start(model, apart, X, Y)) == set(params) - {"g.u.with.f.u"}
    given_params = {n: v for n, v in params.items() if n != "g.u.with.f.u"}
    args = jnp.asarray(X), jnp.asarray(Y)
    one = compiled(make_elbo(model, together))
    other = compiled(make_elbo(model, apart))(jax.random.key(1), given_params, *args)
    np.testing.assert_allclose(one(jax.random.key(1), none, *args), other, rtol=1e-12)
    assert abs(one(jax.random.key(1), params, *args) - other) > 0.1


# ---------------------------------------------------------------------------------------------------------------
# One component for all members of a plate, and one for each

MEMBERS, TIMES = 3, 4
PANEL_X, PANEL_Y = X[:TIMES], np.stack([Y[:TIMES], Y[2 : 2 + TIMES], -Y[4 : 4 + TIMES]])


def panel(X, y=None, own=G, shared=1):
    """f(x) + g_j(x), hyperparameters known: one kernel for all g, or one for each; f may be in two parts."""
    parts = [
        npgp.SparseGP(f"f{i}", npgp.RBF(F[0] + i, variance=F[1] / shared), PANEL_X, jitter=1e-13).draw()
        for i in range(shared)
    ]
    with numpyro.plate("members", MEMBERS, dim=-2):
        g = npgp.SparseGP("g", npgp.RBF(own[0], variance=own[1]), PANEL_X, jitter=1e-13).draw()
        with numpyro.plate("times", len(X)):
            npgp.observe("y", sum((f(X) for f in parts), g(X)), npgp.Gaussian(variance=NOISE), obs=y)


def members_rows(guide_trace, names):
    """m and T of q(ε_f…, ε_1, …, ε_G), from the sites' distributions: the members side by side."""
    blocks = [guide_trace[name]["fn"] for name in names]
    g, K = guide_trace["g.u"]["fn"], sum(block.loc.size for block in blocks)
    T = np.zeros((K + MEMBERS * TIMES,) * 2)
    end = 0
    for block in blocks:
        T[end : end + block.loc.size, : block.rows.shape[1]] = block.rows
        end += block.loc.size
    for j in range(MEMBERS):
        at = slice(K + j * TIMES, K + (j + 1) * TIMES)
        T[at, :K], T[at, at] = g.rows[j, 0, :, :K], g.rows[j, 0, :, K:]
    return np.concatenate([*(block.loc for block in blocks), g.loc.ravel()]), T


@functools.cache
def panel_run(shared=1, own=None):
    """The guide, its first parameters, and what it does with some."""
    model = functools.partial(panel, shared=shared, own=G if own is None else (np.array(own)[:, None], G[1]))
    guide = npgp.AutoSparseGP(model, dependence="pseudo-data")
    args = jnp.asarray(PANEL_X), jnp.asarray(PANEL_Y)

    def run(params):
        guide_trace, trace = traces(model, guide, params, *args)
        names = [*(f"f{i}.u" for i in range(shared)), "g.u"]
        kl = sum(jnp.sum(dist.kl_divergence(guide_trace[n]["fn"], trace[n]["fn"])) for n in names)
        log_q = sum(jnp.sum(guide_trace[n]["fn"].log_prob(guide_trace[n]["value"])) for n in names)
        site = trace["y"]["fn"]
        kept = {n: {"fn": guide_trace[n]["fn"], "value": guide_trace[n]["value"]} for n in names}
        return kept, kl, log_q, site.moments, jnp.sum(site.log_prob(args[1])) - kl

    return guide, start(model, guide, *args), compiled(run)


def panel_covariances(own=G[0]):
    """Of f, of each g, and of all observations."""
    of_f = rbf(PANEL_X, PANEL_X, *F)
    of_g = [rbf(PANEL_X, PANEL_X, ell, G[1]) for ell in np.broadcast_to(own, MEMBERS)]
    C = np.kron(np.ones((MEMBERS, MEMBERS)), of_f) + NOISE * np.eye(MEMBERS * TIMES)
    for j, K in enumerate(of_g):
        C[j * TIMES : (j + 1) * TIMES, j * TIMES : (j + 1) * TIMES] += K
    return of_f, of_g, C


def test_the_exact_posterior_of_a_panel_is_in_the_family(float64):
    """What rows say is all said at the members' points, of f and the member's own function."""
    _, params, run = panel_run()
    none = {n: np.zeros_like(v) for n, v in params.items() if n.endswith(("pseudo_lower", "pseudo_loc"))}
    exact = none | {
        "f0.u.unit": np.ones(1),
        "g.u.unit": np.ones((MEMBERS, 1, 1)),
        "f0.u.pseudo_scale": np.full(TIMES, 1e8),
        "g.u.pseudo_scale": np.full((MEMBERS, 1, TIMES), np.sqrt(NOISE)),
        "g.u.pseudo_loc": PANEL_Y[:, None],
        "f0.u.with.g.u": np.broadcast_to(np.eye(TIMES), (MEMBERS, 1, TIMES, TIMES)),
    }
    assert {n: np.shape(v) for n, v in exact.items()} == {n: np.shape(v) for n, v in params.items()}
    found, _, _, moments, elbo = run(jax.tree.map(jnp.asarray, exact))
    of_f, of_g, C = panel_covariances()
    y = PANEL_Y.ravel()
    np.testing.assert_allclose(elbo, log_normal(y, C), atol=1e-6)
    # Of (f, g_1, g_2, g_3), with rows' sums f + g_j.
    prior = np.zeros((TIMES * (1 + MEMBERS),) * 2)
    for j, K in enumerate([of_f, *of_g]):
        prior[j * TIMES : (j + 1) * TIMES, j * TIMES : (j + 1) * TIMES] = K
    sums = np.hstack([np.kron(np.ones((MEMBERS, 1)), np.eye(TIMES)), np.eye(MEMBERS * TIMES)])
    gain = np.linalg.solve(C, sums @ prior).T
    mean, covariance = gain @ y, prior - gain @ sums @ prior
    m, T = members_rows(found, ["f0.u"])
    L = np.linalg.cholesky(prior + 1e-13 * np.eye(len(prior)))
    np.testing.assert_allclose(L @ m, mean, atol=1e-6)
    np.testing.assert_allclose(L @ T @ T.T @ L.T, covariance, atol=1e-6)
    assert np.abs(covariance[TIMES : 2 * TIMES, 2 * TIMES : 3 * TIMES]).max() > 0.05  # of one member with another
    np.testing.assert_allclose(moments.mean.ravel(), sums @ mean, atol=1e-6)
    np.testing.assert_allclose(moments.variance.ravel(), np.diag(sums @ covariance @ sums.T), atol=1e-6)


@pytest.mark.parametrize(("shared", "own"), [(1, (0.3, 0.6, 1.0)), (2, None)], ids=["a kernel each", "two shared"])
def test_panels_are_the_posterior_given_all_pseudo_data(shared, own, float64):
    """Against one dense Gaussian: moments, the chain rule of divergences and densities; and below the evidence."""
    _, params, run = panel_run(shared, own)
    params = random_params(params, 3)
    found, kl, log_q, _, elbo = run(params)
    names = [f"f{i}.u" for i in range(shared)]
    m, T = members_rows(found, names)
    # Rows of pseudo-data: each member's, of all shared components and its own; then the shared components' own.
    K = shared * TIMES
    precision, shift = np.eye(K + MEMBERS * TIMES), np.zeros(K + MEMBERS * TIMES)
    kernels = [rbf(PANEL_X, PANEL_X, F[0] + i, F[1] / shared) for i in range(shared)]
    roots = {n: np.tril(params[f"{n}.pseudo_lower"], -1) + np.eye(TIMES) for n in [*names, "g.u"]}
    roots = {n: R / np.asarray(params[f"{n}.pseudo_scale"])[..., None] for n, R in roots.items()}
    values = {n: params[f"{n}.unit"] * params[f"{n}.pseudo_loc"] for n in roots}

    def say(H, z):
        nonlocal precision, shift
        precision, shift = precision + H.T @ H, shift + H.T @ z

    factors = [np.linalg.cholesky(k) for k in kernels]
    for j in range(MEMBERS):
        R, H = roots["g.u"][j, 0], np.zeros((TIMES, K + MEMBERS * TIMES))
        z = R.T @ values["g.u"][j, 0]
        for i, name in enumerate(names):
            W = params[f"{name}.with.g.u"][j, 0] * np.diag(R)
            H[:, i * TIMES : (i + 1) * TIMES] = W.T @ factors[i]
            z = z + W.T @ values[name]
        K_j = rbf(PANEL_X, PANEL_X, G[0] if own is None else own[j], G[1])
        H[:, K + j * TIMES : K + (j + 1) * TIMES] = R.T @ np.linalg.cholesky(K_j)
        say(H, z)
    for i, name in enumerate(names):
        H, z = np.zeros((TIMES, K + MEMBERS * TIMES)), roots[name].T @ values[name]
        H[:, i * TIMES : (i + 1) * TIMES] = roots[name].T @ factors[i]
        for later in range(i + 1, shared):
            W = params[f"{names[later]}.with.{name}"] * np.diag(roots[name])
            H[:, later * TIMES : (later + 1) * TIMES] = W.T @ factors[later]
            z = z + W.T @ values[names[later]]
        say(H, z)
    S = np.linalg.inv(precision)
    np.testing.assert_allclose(T @ T.T, S, atol=1e-8)
    np.testing.assert_allclose(m, S @ shift, atol=1e-7)
    joint = 0.5 * (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1])
    np.testing.assert_allclose(kl, joint, rtol=1e-8)
    drawn = np.concatenate([np.ravel(found[n]["value"]) for n in [*names, "g.u"]])
    np.testing.assert_allclose(log_q, log_normal(drawn - m, S), rtol=1e-7)
    _, _, C = panel_covariances(G[0] if own is None else own)
    if shared == 1:
        assert elbo < log_normal(PANEL_Y.ravel(), C)


# ---------------------------------------------------------------------------------------------------------------
# In use


def test_draws_posteriors_and_saving(tmp_path, float64):
    model = functools.partial(two, structure="odvgp")
    guide, fewer = npgp.AutoSparseGP(model, dependence="pseudo-data"), (X, Y)
    params = random_params(start(model, guide, *fewer), 5)
    params |= {name: 0.0 * v for name, v in params.items() if "noise" in name}  # one covariance
    count = 3000
    draws = guide.sample_posterior(jax.random.key(1), params, *fewer, sample_shape=(count,))
    median = guide.median(params, *fewer)
    guide_trace, _ = compiled(
        lambda: tuple(
            {n: {"fn": m["fn"]} for n, m in t.items() if n in SITES}
            for t in traces(model, guide, params, *map(jnp.asarray, fewer), values={"slope": median["slope"]})
        )
    )()
    m, T = stacked(guide_trace)
    np.testing.assert_allclose(np.concatenate([median[n] for n in SITES]), m, rtol=1e-10)
    # Of coupled pseudo-data the draws have the slope's part, too: draws less their regression on it.
    both = np.concatenate([draws[n] for n in SITES], axis=1)
    t = np.asarray(draws["slope"] - median["slope"])[:, None]
    left = both - m - t * np.linalg.lstsq(t, both - m, rcond=None)[0]
    S, sample = np.asarray(T @ T.T), left.T @ left / count
    error = np.sqrt((np.outer(np.diag(S), np.diag(S)) + S**2) / count)
    assert np.abs((sample - S) / error).max() < 4.5
    assert np.abs(S[:3, 3:] / error[:3, 3:]).max() > 6  # the test would see their covariance missing
    quantiles = guide.quantiles(params, [0.5], *fewer)
    error = 1.2533 * np.std(draws["g.u"], 0) * np.sqrt(1 / count + 1 / 1000)  # of medians, by so many draws each
    assert np.all(np.abs(quantiles["g.u"][0] - np.median(draws["g.u"], 0)) < 4.5 * error)
    # One component by itself: its marginal.
    posterior = npgp.posterior("g", model, guide, params, *fewer)
    assert posterior.q[0].kind == "dense"
    factor = np.asarray(posterior.q[0].scale_tril)
    np.testing.assert_allclose(factor @ factor.T, S[3:, 3:], atol=1e-10)
    assert np.all(np.diag(factor) > 0) and np.all(np.triu(factor, 1) == 0)
    npgp.save(tmp_path / "posterior.npz", posterior)
    again = npgp.load(tmp_path / "posterior.npz")
    np.testing.assert_array_equal(again.mean_and_variance(X)[1], posterior.mean_and_variance(X)[1])
    # Rows that were not seen, and a guide that does not know the model yet.
    new = npgp.AutoSparseGP(model, dependence="pseudo-data")
    drawn = Predictive(model, guide=new, params=params, num_samples=5)(jax.random.key(0), jnp.asarray(X_NEW))
    assert drawn["y"].shape == (5, 8) and np.all(np.isfinite(drawn["y"]))
    gp = npgp.SparseGP("g", npgp.RBF(G[0], variance=G[1]), X[:3])
    with pytest.raises(ValueError, match=r"g.u is jointly Gaussian with \['f.u'\].*npgp.posterior"):
        gp.posterior(params)


def test_minibatches(float64):
    """The mean over batches is the ELBO of all rows, whichever rows the start has seen."""

    def model(X, y, rows):
        f = npgp.SparseGP("f", npgp.RBF(2.0), ALL[:3], jitter=1e-12).draw()
        g = npgp.SparseGP("g", npgp.RBF(0.4), ALL[2:4], jitter=1e-12).draw()
        with npgp.plate("data", 8, rows):
            npgp.observe("y", f(X) - g(X), npgp.Gaussian(variance=NOISE), obs=y)

    ALL, y = jnp.asarray(X), jnp.asarray(Y)
    guide = npgp.AutoSparseGP(model, dependence="pseudo-data")
    params = random_params(start(model, guide, ALL[:2], y[:2], jnp.arange(2)), 1)
    assert "g.u.with.f.u" in params and "f.u.coupling" not in params  # with nothing else to follow
    elbo = compiled(make_elbo(model, guide))
    parts = [elbo(jax.random.key(i), params, ALL[i : i + 2], y[i : i + 2], jnp.arange(i, i + 2)) for i in (0, 2, 4, 6)]
    whole = elbo(jax.random.key(3), params, ALL, y, jnp.arange(8))
    assert np.std(parts) > 0.1
    np.testing.assert_allclose(np.mean(parts), whole, rtol=1e-10)


def look(model, **options):
    """The groups that share, and what is said of those that do not."""
    guide = npgp.AutoSparseGP(model, **{"dependence": "pseudo-data", **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guide._setup(jnp.asarray(X), jnp.asarray(Y))
    return [set(group) for group in guide._structure.groups], [str(warning.message) for warning in caught]


def groups(model, **options):
    """The groups of a model of which nothing needs to be said."""
    found, said = look(model, **options)
    assert said == []
    return found


def unshared(model, *expected):
    """The groups of a model of which so much is said: the components and the way out, in each sentence."""
    found, said = look(model)
    assert len(said) == len(expected) and look(model, joint=False)[1] == []
    for sentence, (names, way_out) in zip(said, expected, strict=True):
        assert f"for independent {names}: " in sentence and f"To mend it, {way_out}" in sentence
    return found


def component(name, kernel=None, **more):
    return npgp.SparseGP(name, npgp.RBF(1.0) if kernel is None else kernel, X[:3], **more)


def test_which_components_share(monkeypatch):
    noise = npgp.Gaussian(variance=NOISE)

    def chain(X, y):
        f, g, h, alone = (component(n).draw() for n in ("f", "g", "h", "alone"))
        npgp.observe("y", f(X) + g(X), noise, obs=y)
        npgp.observe("y2", 2.0 * g(X) + npgp_offset(X) + h(X), noise, obs=y)
        npgp.observe("y3", alone(X), noise, obs=y)

    def npgp_offset(X):
        return numpyro.sample("offset", dist.Normal(0.0, 1.0))

    assert groups(chain) == [{"f.u", "g.u", "h.u"}]
    for options in ({"joint": False}, {"dependence": "coupled", "joint": False}, {"dependence": "independent"}):
        assert groups(chain, **options) == []
    found, said = look(chain, dependence="coupled")
    assert found == [] and [sentence.split(":")[0] for sentence in said] == [
        "q(ε) takes for independent f and g, which meet in 'y'",
        "q(ε) takes for independent g and h, which meet in 'y2'",
    ]
    assert all('To mend it, write dependence="pseudo-data"; to accept' in sentence for sentence in said)

    def beside(X, y):  # functions of a plate, one of whose blocks moves the mean only: not given by rows, as f is
        f = component("f").draw()
        with numpyro.plate("functions", 2, dim=-2):
            blocks = dict(inducing=[X[:3], X[:2]], covariances=["dense", "mean-only"])
            g = npgp.SparseGP("g", npgp.RBF(1.0), **blocks).draw()
            npgp.observe("y", g(X) + f(X) + npgp_offset(X), noise, obs=jnp.stack([y, y]))

    (sentence,) = look(beside, dependence=None)[1]
    assert 'To mend it, write dependence="pseudo-data"; to accept' in sentence and groups(beside) == [{"f.u", "g.u"}]
    with pytest.raises(TypeError, match="joint is 'yes'"):
        npgp.AutoSparseGP(chain, joint="yes", dependence="pseudo-data")
    monkeypatch.setattr(components, "MOST", 6)
    assert unshared(chain, ("g and h, which meet in 'y2'", "they have more than")) == [{"f.u", "g.u"}]
    monkeypatch.undo()

    def scoped(X, y):
        with handlers.scope(prefix="a"):
            f = component("f").draw()
            with handlers.scope(prefix="b"):
                g = component("f").draw()
        npgp.observe("y", f(X) - g(X), noise, obs=y)

    assert groups(scoped) == [{"a/f.u", "a/b/f.u"}]
    names = start(scoped, npgp.AutoSparseGP(scoped, dependence="pseudo-data"), jnp.asarray(X), jnp.asarray(Y))
    assert "a/b/f.u.with.a/f.u" in names and not [n for n in names if not n.startswith("a/")]

    def others(X, y):
        """Diagonal, unwhitened, mixed, drawn in a plate before, with a kernel that depends on another: beside f."""
        with numpyro.plate("two", 2, dim=-2):
            several, before = component("c").draw(), component("c2").draw()
        f = component("f").draw()
        diagonal, unwhitened = component("a", covariances="diagonal").draw(), component("b", whitened=False).draw()
        npgp.observe("y", f(X) + diagonal(X) + unwhitened(X), noise, obs=y)
        npgp.observe("y2", f(X) + before(X), noise, obs=jnp.stack([y, y]))
        npgp.observe("y4", f(X) + jnp.eye(2) @ several(X), noise, obs=jnp.stack([y, y]))
        scale = npgp.sample("scale", component("d").draw()(X))
        npgp.observe("y3", f(X) + component("e", npgp.RBF(jnp.exp(scale[0]))).draw()(X), noise, obs=y)

    family, first = "SparseGPs share one whose first block", "draw components outside plates before"
    expected = [
        ("f and a and b, which meet in 'y'", family),
        ("f and c2, which meet in 'y2'", first),
        ("f and the functions of c, which meet in 'y4'", "draw the functions one by one, outside plates"),
        ("f and e, which meet in 'y3'", "no kernel of components"),
    ]
    assert unshared(others, *expected) == []

    def plated(X, y):
        """Of two components in plates one shares; a plate of plates does not."""
        f = component("f").draw()
        with numpyro.plate("two", 2, dim=-2):
            a, b = component("a").draw(), component("b").draw()
        with numpyro.plate("one", 2, dim=-2), numpyro.plate("other", 2, dim=-3):
            c = component("c").draw()
        npgp.observe("y", f(X) + a(X) + b(X), noise, obs=jnp.stack([y, y]))
        npgp.observe("y2", f(X) + c(X), noise, obs=jnp.broadcast_to(y, (2, 2, len(y))))

    expected = [
        ("f and a and b, which meet in 'y'", "let one component have the sum of their kernels"),
        ("f and c, which meet in 'y2'", family),
    ]
    assert unshared(plated, *expected) == [{"f.u", "a.u"}]

    def both(X, y):
        """Only among functions of a plate; and functions that do not meet, each with its own outputs or rows."""
        with numpyro.plate("two", 2, dim=-2):
            a, b, c, d = (component(n).draw() for n in "abcd")
        npgp.observe("y", a(X) + b(X), noise, obs=jnp.stack([y, y]))
        npgp.observe("y2", c(X), noise, obs=jnp.stack([y, y]))
        npgp.observe("y3", d(X)[np.arange(8) % 2, np.arange(8)], noise, obs=y)
        npgp.observe("y4", np.ones((2, 2)) @ d(X), noise, obs=jnp.stack([y, y]))

    expected = [
        ("a and b, which meet in 'y'", "let one component have the sum"),
        ("the functions of d, which meet in 'y4'", "draw the functions one by one"),
    ]
    assert unshared(both, *expected) == []
    known = handlers.condition(both, data={"a.u": jnp.zeros((2, 1, 3)), "d.u": jnp.zeros((2, 1, 3))})
    assert groups(known) == []  # what is known meets nothing

    def latents(X, y):
        """Mean and log-scale, which the likelihood takes to be independent."""
        f, g, h = (component(n).draw() for n in "fgh")
        npgp.observe("y", (f(X) + g(X), h(X)), lambda m, s: dist.Normal(m, jnp.exp(s)), obs=y)
        npgp.observe("y2", g(X) + h(X), noise, obs=y)

    way_out = "components that are different latent values"
    expected = [("f and g, which meet in 'y'", way_out), ("g and h, which meet in 'y2'", way_out)]
    assert unshared(latents, *expected) == []


def test_sampled_values_meet_a_component_in_its_offset():
    """Whatever is made of them; and where f and g would share one q by another statement, none is taken for two."""
    noise = npgp.Gaussian(variance=NOISE)

    def offset(X, y, rest=False):
        f, g = component("f").draw(), component("g").draw()
        value = npgp.sample("value", f(X))
        npgp.observe("y", g(X) + jnp.tanh(2.0 * value), noise, obs=y)
        if rest:
            npgp.observe("y2", g(X) - f(X), noise, obs=y)

    way_out = "state their sum itself, f(X) + g(X), without npgp.sample"
    assert unshared(offset, ("g and sampled values of f, which meet in 'y'", way_out)) == []
    expected = ("g and sampled values of f, which meet in 'y'", way_out), ("g and f, which meet in 'y2'", way_out)
    assert unshared(functools.partial(offset, rest=True), *expected) == []
    for known in ("f.u", "g.u"):
        assert groups(handlers.condition(offset, data={known: jnp.zeros(3)})) == []

    def elsewhere(X, y):
        """Sampled for a statement of NumPyro's; a scale for g; a site whose prior depends on f, which has its own q."""
        f, g, h = (component(n).draw() for n in "fgh")
        value = npgp.sample("value", f(X))
        numpyro.sample("counts", dist.Poisson(jnp.exp(value)), obs=jnp.ones(len(X)))
        level = numpyro.sample("level", dist.Normal(value[0], 1.0))
        npgp.observe("y", jnp.exp(value) * g(X) + level, noise, obs=y)
        npgp.observe("y2", f(X) + h(X), noise, obs=y)

    assert groups(elsewhere) == [{"f.u", "h.u"}]


def test_sampled_values_of_several_components_meet_in_an_observation():
    """In one parameter of a ``numpyro.sample``: a sum, or what is made of it; not in different ones, nor in a chain."""
    way_out = "state their sum itself, f(X) + g(X), without npgp.sample"

    def sampled(X, y, family=lambda f, g: dist.Normal(jnp.sin(f + g), 0.1), chain=None):
        f = npgp.sample("f_", component("f").draw()(X))
        other = component("g", npgp.RBF(jnp.exp(f[0])) if chain == "kernel" else None).draw()
        numpyro.sample("y", family(f, npgp.sample("g_", other(f[:, None] if chain == "rows" else X))), obs=y)

    assert unshared(sampled, ("sampled values of f and sampled values of g, which meet in 'y'", way_out)) == []
    heteroscedastic = functools.partial(sampled, family=lambda f, g: dist.Normal(f, jnp.exp(g)))
    chains = [functools.partial(sampled, family=lambda f, g: dist.Normal(g, 0.1), chain=c) for c in ("rows", "kernel")]
    for model in (heteroscedastic, *chains, handlers.condition(sampled, data={"g.u": jnp.zeros(3)})):
        assert unshared(model) == []


@pytest.mark.parametrize("place", ["offset", "factor", "rows"])
def test_a_statement_beside_sampled_values_of_its_own_component_is_refused(place):
    """f(X) + value taken for a sum of independent ones has half its variance, and an ELBO above the evidence."""

    def model(X, y):
        f = component("f").draw()
        value = npgp.sample("value", f(X))
        latent = {"offset": f(X) + value, "factor": value * f(X), "rows": f(value[:, None])}[place]
        npgp.observe("y", latent, npgp.Gaussian(variance=NOISE), obs=y)

    for options in ({}, {"dependence": "independent"}):
        with pytest.raises(ValueError, match="y observes f beside values that npgp.sample has sampled of it"):
            look(model, **options)


def mixed_one_by_one(K, Z):
    """Two functions, drawn outside plates, and a multiple of each in two outputs."""
    W = np.array([[1.0, 0.2], [1.0, -0.2]])

    def latent(X):
        g = [npgp.SparseGP(f"g{i}", npgp.RBF(1.0), Z).draw() for i in range(2)]
        return W[:, :1] * g[0](X) + W[:, 1:] * g[1](X)

    return latent, np.kron(W @ W.T, K(1.0))


def sum_of_kernels(K, Z):
    """What two functions of each output add up to."""

    def latent(X):
        with numpyro.plate("functions", 2, dim=-2):
            return npgp.SparseGP("f", npgp.RBF(1.0) + npgp.RBF(1.5), Z).draw()(X)

    return latent, np.kron(np.eye(2), K(1.0) + K(1.5))


def shared_first(K, Z):
    """A function of both outputs, and one of each."""

    def latent(X):
        f = npgp.SparseGP("f", npgp.RBF(1.0), Z).draw()
        with numpyro.plate("functions", 2, dim=-2):
            return f(X) + npgp.SparseGP("h", npgp.RBF(1.5), Z).draw()(X)

    return latent, np.kron(np.ones((2, 2)), K(1.0)) + np.kron(np.eye(2), K(1.5))


AT_ONCE, IN_STEPS = (npgp.natural_gradient(1.0, optax.set_to_zero()), 100), (npgp.adam(0.1, 1500), 1500)


@pytest.mark.parametrize(
    ("spelling", "optimizer", "steps"),
    [(mixed_one_by_one, *AT_ONCE), (sum_of_kernels, *AT_ONCE), (shared_first, *IN_STEPS)],
    ids=["mixed one by one", "sum of kernels", "shared first"],
)
def test_the_spellings_that_are_advised_have_the_intervals_of_dense_algebra(spelling, optimizer, steps, float64):
    """Where an output is missing, too; nothing is said of these."""
    X = np.linspace(0.0, 4.0, 12)[:, None]
    latent, prior = spelling(lambda lengthscale: rbf(X, X, lengthscale, 1.0), np.linspace(-0.2, 4.2, 9)[:, None])
    y = np.sin(2.0 * X[:, 0]) + np.array([[0.0], [0.3]])
    y[1, 4:9] = np.nan
    there = ~np.isnan(y.ravel())
    C = prior[np.ix_(there, there)] + 0.04 * np.eye(there.sum())
    gain = np.linalg.solve(C, prior[there]).T
    expected = np.sqrt(np.diag(prior - gain @ prior[there])).reshape(y.shape)

    def model(X, y=None):
        values = latent(X)
        with numpyro.plate("outputs", 2, dim=-2), numpyro.plate("data", len(X)):
            npgp.observe("y", values, npgp.Gaussian(scale=0.2), obs=y, mask="nan")

    guide = npgp.AutoSparseGP(model, dependence="pseudo-data")
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
    result = npgp.fit(svi, jax.random.key(0), steps, X, y, progress=False)
    np.testing.assert_allclose(-result.losses[-1], log_normal(y.ravel()[there], C), atol=0.02)
    _, trace = compiled(
        lambda: tuple(
            {n: {"moments": m["fn"].moments} for n, m in t.items() if n == "y"}
            for t in traces(model, guide, result.params, jnp.asarray(X), jnp.asarray(y))
        )
    )()
    mean, variance, residual = trace["y"]["moments"]
    np.testing.assert_allclose(mean.ravel(), gain @ y.ravel()[there], atol=0.02)
    np.testing.assert_allclose(np.sqrt(variance + residual), expected, rtol=0.05)


def test_a_later_components_noise_starts_at_what_the_earlier_leave(monkeypatch, float64):
    """Least squares, where each row sees one inducing value of the earlier component: weights, and what is left."""
    rng = np.random.default_rng(0)
    of_f, of_g = np.kron(np.eye(3), rng.uniform(0.5, 2.0, (4, 1))), rng.normal(size=(12, 2))
    monkeypatch.setattr(components, "_size", lambda size: size)
    start = components.Start(["f", "g"], {"f": 3, "g": 2}, {})
    start._seen = [{"f": components.Weights(of_f.T, None), "g": components.Weights(of_g.T, None)}]
    solved, left = np.linalg.lstsq(of_f, of_g)[:2]
    np.testing.assert_allclose(start.weights("g", "f", ()), solved.T, rtol=1e-9)
    np.testing.assert_allclose(start.noise("g"), np.sqrt(np.sum(of_g**2, 0) / left), rtol=1e-9)
