"""q(ε) given pseudo-observations of rows: random programs of sums, mixes and plates against dense algebra."""

from functools import partial

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import STRUCTURES, compiled, make_elbo, rbf, train
from numpyro import handlers
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from oracles import log_normal

import npgp
from npgp.variational.blocks import JointBlock

G, N, P = 3, 7, 4
NOISE, LEVEL, EFFECT = 0.05, 1.5, 0.8


class Program:
    """
    A random program with Gaussian noise: one to four components, functions of their own, of a plate of G, or mixes of
    G into P outputs, drawn in any order; a level and effects of groups; observations missing here and there.
    """

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.form = ("one", "groups", "long", "mix")[seed % 4]
        outs = {"groups": (G,), "mix": (P,)}.get(self.form, ())
        self.X = np.sort(rng.uniform(0, 4, N))[:, None]
        rows = 2 * N if self.form == "long" else N
        self.group, self.row = rng.integers(0, G, rows), rng.integers(0, N, rows)
        self.shape = (*outs, rows)
        self.y, self.mask = rng.normal(size=self.shape), rng.uniform(size=self.shape) < 0.8
        self.level = bool(rng.integers(2))
        self.effects = self.form in ("groups", "long") and bool(rng.integers(2))
        self.W = rng.normal(size=(P, G))
        self.components = []
        for i in range(int(rng.integers(1, 5))):
            plate = self.form != "one" and bool(rng.integers(2)) and i < 3
            scales = [(), (rows,), *([(outs[0], 1)] if outs else [])]
            self.components.append(
                {
                    "name": f"f{i}",
                    "plate": plate,
                    "kernel": (rng.uniform(0.4, 1.5), rng.uniform(0.3, 1.5)),
                    "Z": np.linspace(0, 4, int(rng.integers(3, 6)))[:, None] + 0.01,
                    "scale": rng.uniform(0.5, 1.5, scales[rng.integers(len(scales))]),
                }
            )

    def model(self, y=None, given=None):
        """The statements; at given effects if there are any."""
        given, X = given or {}, jnp.asarray(self.X)
        total = jnp.zeros(self.shape)
        if self.level:
            total = total + numpyro.sample("level", dist.Normal(0.0, LEVEL))
        if self.effects:
            with numpyro.plate("groups", G, dim=-2):
                effect = numpyro.sample("effect", dist.Normal(0.0, EFFECT))
            total = total + (effect if self.form == "groups" else effect[self.group, 0])
        for c in self.components:
            Z, (lengthscale, variance) = c["Z"], c["kernel"]
            gp = npgp.SparseGP(c["name"], npgp.RBF(lengthscale, variance=variance), jnp.asarray(Z), jitter=1e-12)
            if c["plate"]:
                with numpyro.plate("functions", G, dim=-2):
                    f = gp.draw()(X)
                f = self.W @ f if self.form == "mix" else f[self.group, self.row] if self.form == "long" else f
            else:
                f = gp.draw()(X[self.row] if self.form == "long" else X)
            total = jnp.asarray(c["scale"]) * f + total
        npgp.observe("y", total, npgp.Gaussian(variance=NOISE), obs=y, mask=self.mask, conditional="prior")

    def _seen(self, c):
        """What entries of y see of each function of a component, (functions, entries), and each entry's input."""
        rows = self.row if self.form == "long" else np.arange(N)
        ones = np.ones(self.shape)
        if not c["plate"]:
            seen = ones[None]
        elif self.form == "mix":
            seen = self.W.T[:, :, None] * ones
        else:
            member = self.group if self.form == "long" else np.arange(G)[:, None]
            seen = (np.arange(G).reshape(-1, *[1] * len(self.shape)) == member) * ones
        inputs = np.broadcast_to(self.X[rows, 0], self.shape)
        return (c["scale"] * seen)[:, self.mask], inputs[self.mask][:, None]

    def dense(self):
        """Covariances of y: that of effects, that of inducing values, and the residuals' variances."""
        size = int(self.mask.sum())
        effects, inducing, residual = np.zeros((size, size)), np.zeros((size, size)), np.zeros(size)
        for c in self.components:
            (seen, x), Z, kernel = self._seen(c), c["Z"], c["kernel"]
            Q = rbf(x, Z, *kernel) @ np.linalg.solve(rbf(Z, Z, *kernel), rbf(Z, x, *kernel))
            inducing += (seen.T @ seen) * Q
            residual += (seen.T @ seen).diagonal() * (kernel[1] - Q.diagonal())
        for factors in self.of_effects().values():
            effects += factors @ factors.T
        return effects, inducing, residual

    def of_effects(self):
        """What entries of y see of the level and of each effect, in units of their priors' standard deviations."""
        found = {}
        if self.level:
            found["level"] = LEVEL * np.ones((int(self.mask.sum()), 1))
        if self.effects:
            group = np.broadcast_to(self.group if self.form == "long" else np.arange(G)[:, None], self.shape)
            found["effect"] = EFFECT * (group[self.mask][:, None] == np.arange(G)).astype(float)
        return found


#: Of every form two, with and without a level, effects, plates, and factors of rows and of functions.
SEEDS = {4: (4, 1, 6, 7), 12: (12, 5, 14, 15)}


@pytest.mark.parametrize("first", SEEDS)
def test_random_programs_are_exact(first, float64):
    for seed in SEEDS[first]:
        program = Program(seed)
        effects, inducing, residual = program.dense()
        y = program.y[program.mask]
        covariance = effects + inducing + NOISE * np.eye(len(y))
        bound = log_normal(y, covariance) - 0.5 * residual.sum() / NOISE
        guide = npgp.AutoSparseGP(program.model, dependence="sites")
        Y = np.where(program.mask, program.y, np.nan)
        params = {}
        factors = program.of_effects()
        if factors:  # the Gaussian over effects is at its optimum by dense algebra
            H = np.concatenate(list(factors.values()), axis=1)
            prior = np.concatenate([np.full(F.shape[1], LEVEL if n == "level" else EFFECT) for n, F in factors.items()])
            S = np.eye(H.shape[1]) - H.T @ np.linalg.solve(covariance, H)
            params["joint_loc"] = prior * (H.T @ np.linalg.solve(covariance, y))
            params["joint_scale_tril"] = prior[:, None] * np.linalg.cholesky(S)
        elbos = compiled(jax.vmap(make_elbo(program.model, guide), (0, None, None)))(
            jax.random.split(jax.random.key(seed), 3), params, Y
        )
        np.testing.assert_allclose(elbos, bound, rtol=1e-7, atol=1e-7, err_msg=f"program {seed}, {program.form}")


def _primitives(jaxpr):
    """Names of all operations, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            yield from _primitives(inner) if hasattr(inner, "eqns") else ()


def test_many_components_are_factorized_at_once(float64):
    """A loop of components has the bound of dense algebra, and no more factorizations where it is longer."""
    factorizations = []
    for count in (2, 3):
        rng = np.random.default_rng(0)
        lengthscales, y = np.linspace(0.5, 1.5, count), rng.normal(size=(count, N))
        inputs = np.sort(rng.uniform(0, 4, N))[:, None]

        def model(y, count=count, lengthscales=lengthscales, inputs=inputs):
            X = jnp.asarray(inputs)
            f = npgp.SparseGP("f", npgp.RBF(0.8), inputs).draw()
            for i in range(count):
                g = npgp.SparseGP(f"g{i}", npgp.RBF(lengthscales[i]), inputs).draw()
                with numpyro.plate(f"rows{i}", N):
                    npgp.observe(f"y{i}", f(X) + g(X), npgp.Gaussian(variance=NOISE), obs=y[i])

        elbo = make_elbo(model, npgp.AutoSparseGP(model))
        program = jax.jit(lambda key, y, elbo=elbo: elbo(key, {}, y)).trace(jax.random.key(0), y)
        factorizations.append(list(_primitives(program.jaxpr)).count("cholesky"))
    assert factorizations[0] == factorizations[1]
    K = np.kron(np.ones((count, count)), rbf(inputs, inputs, 0.8, 1.0)) + NOISE * np.eye(count * N)
    for i, lengthscale in enumerate(lengthscales):
        own = slice(i * N, (i + 1) * N)
        K[own, own] += rbf(inputs, inputs, lengthscale, 1.0)
    elbo = program.lower().compile()(jax.random.key(0), jnp.asarray(y))
    np.testing.assert_allclose(elbo, log_normal(y.ravel(), K), atol=1e-4)


def test_a_site_without_draws_of_its_prior_is_covered(float64):
    """A level of a flat prior: at its posterior by dense algebra each draw's ELBO is the evidence."""
    y = 2.0 + np.sin(INPUTS[:, 0])

    def model(X, y):
        level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ()))
        f = npgp.SparseGP("f", npgp.RBF(0.8), X).draw()
        with numpyro.plate("rows", len(y)):
            npgp.observe("y", f(X) + level, npgp.Gaussian(variance=NOISE), obs=y)

    K = rbf(INPUTS, INPUTS, 0.8, 1.0) + NOISE * np.eye(len(y))
    information = np.linalg.inv(K).sum()
    mean = np.linalg.solve(K, y).sum() / information
    params = {"joint_loc": jnp.array([mean]), "joint_scale_tril": jnp.array([[information**-0.5]])}
    guide = npgp.AutoSparseGP(model)
    keys = jax.random.split(jax.random.key(0), 3)
    elbos = compiled(jax.vmap(make_elbo(model, guide), (0, None, None, None)))(keys, params, jnp.asarray(INPUTS), y)
    evidence = log_normal(y - mean, K) + 0.5 * np.log(2 * np.pi / information)
    np.testing.assert_allclose(elbos, evidence, atol=1e-4)


def test_mixed_functions_are_dependent_in_their_posterior(float64):
    """``W @ g(X)``, one output missing on a stretch: the posterior of g, mixed, is dense algebra's."""
    rng = np.random.default_rng(0)
    X, Z, new = (np.linspace(0, 4, n)[:, None] for n in (12, 9, 5))
    W = np.array([[1.0, 0.3, 0.2], [1.0, -0.3, 0.1]])
    Y = rng.normal(size=(2, 12))
    Y[1, 3:9] = np.nan

    def model(X, Y):
        with numpyro.plate("functions", 3, dim=-2):
            g = npgp.SparseGP("g", npgp.RBF(1.0), jnp.asarray(Z), jitter=1e-12).draw()
        npgp.observe("Y", W @ g(X), npgp.Gaussian(variance=NOISE), obs=Y, mask="nan")

    guide = npgp.AutoSparseGP(model, dependence="sites")

    @compiled
    def predict(Y):
        h = npgp.posterior("g", model, guide, {}, X, Y).mixed(W)
        # Functions are dearer to draw: a quarter of them, and twice the error.
        draws = h.sample(jax.random.key(0), new, (20_000,)), h.draw_functions(jax.random.key(1), 5_000, 256)(new)
        return h.mean(new), h.covariance(new), h.variance(new), h.output_covariance(new), draws

    found_mean, found, variance, at_rows_found, (samples, functions) = predict(Y)
    k = lambda a, b: rbf(a, b, 1.0, 1.0)  # noqa: E731
    Kuu = k(Z, Z)
    Q = lambda a, b: k(a, Z) @ np.linalg.solve(Kuu, k(Z, b))  # noqa: E731
    present = np.isfinite(Y.ravel())
    of_y = (np.kron(W @ W.T, Q(X, X)) + NOISE * np.eye(24))[np.ix_(present, present)]
    across = np.kron(W @ W.T, Q(new, X))[:, present]
    mean = across @ np.linalg.solve(of_y, Y.ravel()[present])
    covariance = np.kron(W @ W.T, k(new, new)) - across @ np.linalg.solve(of_y, across.T)
    np.testing.assert_allclose(np.ravel(found_mean), mean, atol=1e-6)
    np.testing.assert_allclose(np.reshape(found, (10, 10)), covariance, atol=1e-6)
    np.testing.assert_allclose(np.ravel(variance), np.diag(covariance), atol=1e-6)
    at_rows = np.einsum("pnrn->npr", covariance.reshape(2, 5, 2, 5))
    np.testing.assert_allclose(at_rows_found, at_rows, atol=1e-6)
    for draws, error in ((samples, 0.05), (functions, 0.1)):
        np.testing.assert_allclose(np.cov(np.asarray(draws).reshape(-1, 10).T), covariance, atol=error)


COUNTS = np.array([0, 1, 3, 4, 2, 1, 0])
Z = np.linspace(0, 4, 4)[:, None]
INPUTS = np.linspace(0, 4, len(COUNTS))[:, None]


def counts(X, y=None, conditional="tight"):
    """One function of counts, whose sites are trained."""
    f = npgp.SparseGP("f", npgp.RBF(0.8), jnp.asarray(Z)).draw()
    with numpyro.plate("data", len(X)):
        npgp.observe("y", f(X) + 0.3, npgp.Poisson(), obs=y, conditional=conditional)


def started(model, guide, *args, values=None):
    """The parameters at which training starts, and the ELBO there."""
    svi = SVI(model, guide, npgp.adam(0.05), TraceMeanField_ELBO())

    def start():
        state = svi.init(jax.random.key(0), *args, init_params=values)
        return svi.get_params(state), -svi.evaluate(state, *args)

    params, elbo = compiled(start)()
    return params, float(elbo)


def names_of_parameters(model, guide, *args):
    """Of those at which training starts: traced, not compiled."""
    svi = SVI(model, guide, npgp.adam(0.05), TraceMeanField_ELBO())
    return set(jax.eval_shape(lambda: svi.get_params(svi.init(jax.random.key(0), *args))))


def test_at_the_sites_of_the_collapsed_optimum_the_elbo_is_the_collapsed_bound(float64):
    collapsed = npgp.CollapsedGP(npgp.RBF(0.8), INPUTS, Z, npgp.Poisson(), offset=0.3, tolerance=1e-12)
    sites, bound = compiled(lambda: (collapsed.sites(COUNTS), collapsed.log_prob(COUNTS)))()
    guide = npgp.AutoSparseGP(counts, dependence="sites")
    best = {"y.site_unit": 0.5, "y.site_loc": 2.0 * sites.shift / sites.precision}
    best["y.site_scale"] = 2.0 / jnp.sqrt(sites.precision)
    params, elbo = started(guide.model, guide, INPUTS, COUNTS, values=best)
    np.testing.assert_allclose(elbo, bound, rtol=1e-9)
    # Training starts at Laplace's sites of the rows by themselves, and has nothing else of q(ε) to train.
    at_first, elbo = started(guide.model, guide, INPUTS, COUNTS)
    assert params.keys() == at_first.keys() == best.keys()
    assert bound - 0.5 < elbo < bound


def test_two_latent_values_reach_the_best_q(float64):
    y = np.array([0.1, 0.5, -0.3, 0.9, 2.0, -1.5, 0.7])

    def model(X, y):
        f = npgp.SparseGP("f", npgp.RBF(1.0), jnp.asarray(Z)).draw()
        g = npgp.SparseGP("g", npgp.RBF(2.0, variance=0.5), jnp.asarray(Z)).draw()
        with numpyro.plate("data", len(X)):
            npgp.observe("y", (f(X), g(X)), npgp.likelihoods.HeteroscedasticGaussian(), obs=y)

    reached = {}
    for dependence in ("sites", "independent"):
        guide = npgp.AutoSparseGP(model, dependence=dependence)
        reached[dependence] = train(model, guide, 600, INPUTS, y)[1][-1]
    np.testing.assert_allclose(reached["sites"], reached["independent"], atol=2e-3)


def test_latent_values_that_another_statement_mixes_have_pseudo_data(float64):
    """Likelihoods take the latent values of an observation to be independent, and here they would not be."""

    def model(X, y, mixed=True):
        with numpyro.plate("functions", 2, dim=-2):
            f = npgp.SparseGP("f", npgp.RBF(1.0), jnp.asarray(Z)).draw()
        with numpyro.plate("data", len(X)):
            npgp.observe("y", f(X), npgp.likelihoods.HeteroscedasticGaussian(), obs=y)
            if mixed:
                with numpyro.plate("outputs", 1, dim=-2):
                    npgp.observe("z", np.ones((1, 2)) @ f(X), npgp.Gaussian(scale=0.3), obs=y[None])

    y = np.sin(INPUTS[:, 0])
    apart = partial(model, mixed=False)
    assert "y.site_loc" in names_of_parameters(apart, npgp.AutoSparseGP(apart, dependence="sites"), INPUTS, y)
    guide = npgp.AutoSparseGP(model, dependence="sites")
    with pytest.warns(UserWarning, match=r"takes for independent the functions of f"):
        names = names_of_parameters(model, guide, INPUTS, y)
    assert not any("site_" in name for name in names)


@pytest.mark.parametrize("likelihood", [npgp.Gaussian(variance=NOISE), npgp.Poisson()], ids=["Gaussian", "Poisson"])
def test_rows_left_out_by_masks_tell_nothing(likelihood, float64):
    """By ``mask``, and by ``handlers.mask``: as if these rows were not there, wherever pseudo-observations start."""
    present = np.array([True, True, False, True, False, True, True])
    y = np.where(present, np.round(1.0 + np.sin(INPUTS[:, 0])), 1e3)

    def model(X, y, mask=None, outside=None):
        f = npgp.SparseGP("f", npgp.RBF(0.8), jnp.asarray(Z)).draw()
        with numpyro.plate("data", len(X)), handlers.mask(mask=True if outside is None else outside):
            npgp.observe("y", f(X), likelihood, obs=y, mask=mask)

    def elbo(rows=(INPUTS, y), **masks):
        known = partial(model, **masks)
        return started(known, npgp.AutoSparseGP(known, dependence="sites"), *rows)[1]

    expected = elbo((INPUTS[present], y[present]))
    np.testing.assert_allclose([elbo(mask=present), elbo(outside=present)], expected, rtol=1e-9)


def test_values_that_are_sampled_have_sites_too(float64):
    """f is sampled, and observed by a statement of NumPyro's: q(ε) comes near the exact posterior's bound."""
    y = np.sin(INPUTS[:, 0])

    def model(X, y):
        f = npgp.sample("value", npgp.SparseGP("f", npgp.RBF(0.8), jnp.asarray(INPUTS), jitter=1e-12).draw()(X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = npgp.AutoSparseGP(model, dependence="sites")
    params, _ = train(model, guide, 1500, INPUTS, y)
    assert set(params) == {f"value.residual.site_{suffix}" for suffix in ("unit", "loc", "scale")}
    evidence = log_normal(y, rbf(INPUTS, INPUTS, 0.8, 1.0) + 0.25 * np.eye(len(y)))
    elbos = compiled(jax.vmap(make_elbo(model, guide), (0, None, None, None)))(
        jax.random.split(jax.random.key(0), 500), params, INPUTS, y
    )
    assert abs(float(jnp.mean(elbos)) - evidence) < 0.05


def test_new_rows_need_those_trained_on(float64, tmp_path):
    y = np.sin(INPUTS[:, 0])
    new = INPUTS[:3] + 0.2

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = npgp.SparseGP("f", npgp.RBF(0.8), jnp.asarray(Z)).draw()
        with numpyro.plate("data", len(X)):
            npgp.observe("y", f(X) + level, npgp.Gaussian(variance=NOISE), obs=y)

    guide = npgp.AutoSparseGP(model, dependence="sites")
    svi = SVI(model, guide, npgp.adam(0.05), TraceMeanField_ELBO())
    result = npgp.fit(svi, jax.random.key(0), 50, INPUTS, y, progress=False)
    bare = svi.get_params(result.state)
    with pytest.raises(ValueError, match=r"'y' is not observed here.*params of npgp.fit's result, or guide.with_rows"):
        Predictive(model, guide=guide, params=bare, num_samples=2)(jax.random.key(0), new)
    npgp.save(tmp_path / "params.npz", result.params)
    by_hand = guide.with_rows(bare, INPUTS, y=y)
    jax.tree.map(np.testing.assert_array_equal, by_hand, result.params)
    ways = {
        "by hand": (guide, by_hand),
        "from a file, with another guide": (
            npgp.AutoSparseGP(model, dependence="sites"),
            npgp.load(tmp_path / "params.npz"),
        ),
    }
    draws = {}
    for way, (guide, params) in ways.items():
        predict = compiled(Predictive(model, guide=guide, params=params, num_samples=400))
        draws[way] = predict(jax.random.key(1), new)["y.latent"]
    np.testing.assert_array_equal(*draws.values())
    samples = guide.sample_posterior(jax.random.key(2), bare, INPUTS, y, sample_shape=(400,))
    others = compiled(Predictive(model, samples))(jax.random.key(3), new)["y.latent"]
    deviations = np.std(others, axis=0)
    assert np.all(np.abs(np.mean(others, axis=0) - np.mean(draws["by hand"], axis=0)) < 0.3 * deviations)
    np.testing.assert_allclose(np.std(draws["by hand"], axis=0), deviations, rtol=0.2)
    at_training = npgp.posterior("f", model, guide, bare, INPUTS, y, draws=20).mean_and_variance(new)
    at_new = npgp.posterior("f", model, guide, result.params, new, draws=20).mean_and_variance(new)
    np.testing.assert_allclose(at_training, at_new, rtol=1e-9)
    # Training goes on from the result's parameters.
    again = npgp.fit(svi, jax.random.key(0), 2, INPUTS, y, init_params=result.params, progress=False)
    assert again.losses[0] < result.losses[0]


def test_inputs_that_are_sampled_are_in_one_gaussian_that_q_follows(float64):
    """Inputs measured with errors, of two functions: in a plate over rows, and beyond the reach of pseudo-data."""
    rng = np.random.default_rng(1)
    measured = np.linspace(0, 4, 8) + 0.3 * rng.normal(size=8)
    y = np.stack([np.sin(measured), np.cos(2 * measured)])

    def model(y):
        with numpyro.plate("rows", 8):
            x = numpyro.sample("x", dist.Normal(measured, 0.3))
        with numpyro.plate("functions", 2, dim=-2):
            f = npgp.SparseGP("f", npgp.RBF(0.8), jnp.asarray(np.linspace(-0.5, 4.5, 8)[:, None])).draw()
        with numpyro.plate("outputs", 2, dim=-2), numpyro.plate("data", 8):
            npgp.observe("y", f(x[:, None]), npgp.Gaussian(variance=0.01), obs=y)

    elbos, names = {}, {}
    for dependence in ("sites", "pseudo-data"):
        guide = npgp.AutoSparseGP(model, dependence=dependence)
        params, losses = train(model, guide, 800, y)
        elbos[dependence], names[dependence] = -np.mean(losses[-100:]), set(params)
    assert names["sites"] == {"joint_loc", "joint_scale_tril"}
    assert elbos["sites"] > elbos["pseudo-data"] + 0.2


def test_rows_that_groups_tighten_count_once(float64):
    """What groups of neighbors gain is about rows that are observed: q is the same, the ELBO that of groups."""
    y = np.sin(INPUTS[:, 0])
    groups = npgp.sparse.consecutive(len(INPUTS), len(INPUTS))

    def model(X, y, conditional="tight", gain=False):
        f, noise = npgp.SparseGP("f", npgp.RBF(0.8), jnp.asarray(Z)).draw(), npgp.Gaussian(variance=NOISE)
        with numpyro.plate("data", len(X)):
            npgp.observe("y", f(X), noise, obs=y, conditional=conditional)
        if gain:
            with numpyro.plate("groups", len(X)):
                npgp.tighten("gain", f(X), noise, y, npgp.conditionals.Grouped(groups))

    whole = partial(model, conditional=npgp.conditionals.Grouped(groups))
    expected = started(whole, npgp.AutoSparseGP(whole, dependence="sites"), INPUTS, y)[1]
    apart = partial(model, gain=True)
    found = started(apart, npgp.AutoSparseGP(apart, dependence="sites"), INPUTS, y)[1]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("plate", [npgp.plate, numpyro.plate])
def test_minibatches_have_pseudo_observations_of_the_rows_of_the_first_call(plate, float64):
    """Seven rows that stand for a hundred, as good as 100 / 7 each at the start: q is the posterior given these."""
    y, points, noise = np.sin(INPUTS[:, 0]), Z[:3], NOISE * N / 100

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = npgp.SparseGP("f", npgp.RBF(0.8), jnp.asarray(points), jitter=1e-12).draw()
        with plate("data", 100, len(X)):
            npgp.observe("y", f(X) + level, npgp.Gaussian(variance=NOISE), obs=y)

    guide = npgp.AutoSparseGP(model)
    params, _ = started(model, guide, INPUTS, y)
    assert "f: one q(ε), the posterior given some rows of their statements" in str(guide)
    np.testing.assert_allclose(params["y.site_scale"], (N / 100) ** 0.5, rtol=1e-9)
    # At another batch, and without rows among the parameters, as in training.
    at = handlers.substitute(guide, data=params | {"_auto_latent": jnp.asarray([0.3])})
    sites = compiled(lambda: handlers.trace(handlers.seed(at, 0)).get_trace(INPUTS[:4] + 0.1, y[:4])["f.u"]["fn"].loc)
    L = np.linalg.cholesky(rbf(points, points, 0.8, 1.0))
    A = np.linalg.solve(L, rbf(points, INPUTS, 0.8, 1.0))
    mean = np.linalg.solve(np.eye(3) + A @ A.T / noise, A @ (y - 0.3) / noise)
    np.testing.assert_allclose(sites(), mean, rtol=1e-7)
    # Fewer rows than features cannot give q any mean.
    few = npgp.AutoSparseGP(model)
    assert "f.u.pseudo_loc" in names_of_parameters(model, few, INPUTS[:2], y[:2])


def test_all_rows_first_and_a_part_of_them_later_is_an_error():
    def model(X, y=None):
        f = npgp.SparseGP("f", npgp.RBF(0.8), jnp.asarray(Z)).draw()
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        with npgp.plate("data", N, rows=len(X)):
            npgp.observe("y", f(X) + level, npgp.Gaussian(variance=NOISE), obs=y)

    y = np.sin(INPUTS[:, 0])
    guide = npgp.AutoSparseGP(model)
    names_of_parameters(model, guide, INPUTS, y)  # the guide sees all rows
    with pytest.raises(ValueError, match="'y' has a part of its rows here.*train by npgp.fit"):
        jax.eval_shape(lambda: handlers.seed(guide, 0)(INPUTS[:4], y[:4]))


def test_a_sum_in_minibatches_has_the_posterior_of_dense_algebra(float64):
    """All forty rows fit among those that are chosen, so that nothing of q(ε) is learned."""
    X = np.linspace(0.0, 4.0, 40)[:, None]
    y = np.sin(X[:, 0])

    def model(X, y=None):
        f = npgp.SparseGP("f", npgp.RBF(0.8), jnp.asarray(Z), jitter=1e-12).draw()
        g = npgp.SparseGP("g", npgp.RBF(1.5), jnp.asarray(Z), jitter=1e-12).draw()
        with npgp.plate("data", 40, rows=len(X)):
            npgp.observe("y", f(X) + g(X), npgp.Gaussian(variance=NOISE), obs=y, conditional="prior")

    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.01), TraceMeanField_ELBO())
    params = npgp.fit(svi, jax.random.key(0), 2, X, y, batch_size=10, progress=False).params
    assert params["auto_rows"]["y"].shape == (40,)
    found = npgp.posterior("f", model, guide, params, X[:3], y[:3]).variance(X[:5])
    (Kf, Rf), (Kg, _) = ((Q, np.diag(K - Q)) for K, Q in ((rbf(X, X, l, 1.0), nystrom(X, l)) for l in (0.8, 1.5)))
    S = Kf - Kf @ np.linalg.solve(Kf + Kg + NOISE * np.eye(40), Kf)
    np.testing.assert_allclose(found, (np.diag(S) + Rf)[:5], rtol=1e-6)


def nystrom(X, lengthscale):
    cross = rbf(X, Z, lengthscale, 1.0)
    return cross @ np.linalg.solve(rbf(Z, Z, lengthscale, 1.0), cross.T)


def test_draws_are_those_of_q_and_their_densities_sum_to_its(float64):
    """Shared after own, mixed, in long format: the sites' distributions, one given the others, make up N(m, Λ⁻¹)."""
    for seed in (3, 10):
        program = Program(seed)
        Y = np.where(program.mask, program.y, np.nan)
        guide = npgp.AutoSparseGP(program.model, dependence="sites")

        def traced(key, Y, guide=guide):
            trace = handlers.trace(handlers.seed(guide, key)).get_trace(Y)
            blocks = {n: m for n, m in trace.items() if m["type"] == "sample" and n.rsplit(".")[-1] in ("u", "v")}
            values = jnp.concatenate([jnp.ravel(msg["value"]) for msg in blocks.values()])
            log_q = sum(jnp.sum(msg["fn"].log_prob(msg["value"])) for msg in blocks.values())
            mean = jnp.concatenate([jnp.ravel(msg["fn"].loc) for msg in blocks.values()])
            return values, log_q, mean

        values, log_q, means = compiled(jax.vmap(traced, (0, None)))(jax.random.split(jax.random.key(0), 8_000), Y)
        values = np.asarray(values - means)  # of one Gaussian, whatever the effects are that the means follow
        covariance = np.cov(values.T)
        entropy = 0.5 * np.linalg.slogdet(2 * np.pi * np.e * covariance)[1]
        assert abs(entropy + np.mean(log_q)) < 0.1


@pytest.mark.parametrize("structure", [*STRUCTURES, "unwhitened"])
def test_a_structured_q_is_the_best_of_its_structure(structure, float64):
    """Several blocks, diagonal ones and such that move the mean alone: the ELBO is the collapsed bound."""
    blocks, kinds = STRUCTURES["solve" if structure == "unwhitened" else structure]
    inducing = [jnp.asarray(block.copy()) for block in blocks]
    gp = npgp.SparseGP("f", models.kernel(), inducing, kinds, jitter=1e-12, whitened=structure != "unwhitened")

    def model(X, y=None):
        f = gp.draw()
        with numpyro.plate("data", len(X)):
            npgp.observe("y", f(X) + 0.3, npgp.Gaussian(variance=NOISE), obs=y)

    guide = npgp.AutoSparseGP(model, dependence="sites")
    x, y = jnp.asarray(models.X.copy()), jnp.asarray(models.Y.copy())

    @compiled
    def both(x, y):
        elbo = make_elbo(model, guide)(jax.random.key(3), {}, x, y)
        gp = npgp.CollapsedGP(models.kernel(), x, inducing, noise_variance=NOISE, covariances=kinds, jitter=1e-12)
        best, f = gp.condition(y - 0.3), npgp.posterior("f", model, guide, {}, x, y)
        return (elbo, *f.mean_and_variance(x + 0.1)), (gp.log_prob(y - 0.3), *best.mean_and_variance(x + 0.1))

    (elbo, *moments), (bound, *expected) = both(x, y)
    np.testing.assert_allclose(elbo, bound, rtol=1e-9)
    np.testing.assert_allclose(moments, expected, rtol=1e-7, atol=1e-9)
    found = jax.eval_shape(lambda: guide.quantiles({}, [0.1, 0.9], x, y))
    assert {name: value.shape for name, value in found.items()} == {
        f"f.{site}": (2, len(block)) for site, block in zip(("u", "v"), blocks, strict=False)
    }


@pytest.mark.parametrize("form", ["groups", "long", "mix"])
def test_structured_components_beside_one_that_is_dense(form, float64):
    """
    First blocks are jointly Gaussian if they are dense, all others by themselves, those of each function in a plate by
    themselves: the ELBO at the best such q, by dense algebra.
    """
    Z, O = (np.asarray(x) for x in STRUCTURES["solve"][0])
    x, rng = models.X, np.random.default_rng(0)
    W = rng.normal(size=(3, 2)) if form == "mix" else np.eye(3)
    y = models.Y + rng.normal(size=(3, len(x)))
    inducing = {"f": [Z], "g": [Z, O, O + 0.37], "h": [O]}
    kinds = {"f": ("dense",), "g": ("dense", "dense", "diagonal"), "h": ("mean-only",)}
    lengthscales = {"f": 1.5, "g": 0.7, "h": 0.4}

    def gp(name):
        points = [jnp.asarray(block) for block in inducing[name]]
        return npgp.SparseGP(name, npgp.RBF(lengthscales[name]), points, kinds[name], jitter=1e-12)

    def model(X, y=None):
        f = gp("f").draw()
        with numpyro.plate("functions", W.shape[1], dim=-2):
            g, h = (gp(name).draw()(X) for name in "gh")
        if form == "long":
            group, row = np.divmod(np.arange(3 * len(x)), len(x))
            total, y = g[group, row] + h[group, row] + f(X[row]), y if y is None else y.reshape(-1)
        else:
            total = W @ g + W @ h + f(X) if form == "mix" else g + h + f(X)
        npgp.observe("y", total, npgp.Gaussian(variance=NOISE), obs=y, conditional="prior")

    size, A, S, left, joint = 0, [], [], 0.0, []
    for name in "fgh":
        points, mixed = np.concatenate(inducing[name]), np.ones((3, 1)) if name == "f" else W

        def k(a, b, name=name):
            return rbf(a, b, lengthscales[name], 1.0)

        seen = np.linalg.solve(np.linalg.cholesky(k(points, points)), k(points, x))
        left = left + np.sum(mixed**2, axis=1)[:, None] * (1.0 - np.sum(seen**2, axis=0))
        for i, block in enumerate(np.split(seen, np.cumsum([len(b) for b in inducing[name]])[:-1])):
            for column in mixed.T:
                own = slice(size, size := size + len(block))
                A.append((column[:, None] * block[:, None, :]).reshape(len(block), -1))
                if i == 0 and kinds[name][0] == "dense":
                    joint += range(own.start, own.stop)
                else:
                    S.append((own, kinds[name][i]))
    A, y_flat = np.concatenate(A), y.reshape(-1)
    Lambda = np.eye(size) + A @ A.T / NOISE
    mean = np.linalg.solve(Lambda, A @ y_flat / NOISE)
    blocks, S = S, np.zeros_like(Lambda)
    S[np.ix_(joint, joint)] = np.linalg.inv(Lambda[np.ix_(joint, joint)])
    for own, kind in blocks:
        best = {
            "dense": np.linalg.inv(Lambda[own, own]),
            "diagonal": np.diag(1.0 / np.diag(Lambda)[own]),
            "mean-only": np.eye(own.stop - own.start),
        }
        S[own, own] = best[kind]
    kl = 0.5 * (np.trace(S) + mean @ mean - len(A) - np.linalg.slogdet(S)[1])
    # Blocks that move the mean only leave their variance to the residual.
    rest = np.sum(A * (S @ A), axis=0) + left.reshape(-1)
    expected = np.sum(models.log_normal(y_flat, A.T @ mean, NOISE) - 0.5 * rest / NOISE) - kl
    elbos = models.over_keys(make_elbo(model, npgp.AutoSparseGP(model)), 3, {}, jnp.asarray(x), jnp.asarray(y))
    # One value for each draw of a u that others follow, of whose q's the divergence is taken: each is exact here.
    np.testing.assert_allclose(elbos, expected, rtol=1e-7)


def test_many_draws_are_those_of_their_keys_one_by_one(float64):
    """In parts of at most 16, for each has the projections of all rows; in any shape, with keys of either kind."""
    guide = npgp.AutoSparseGP(counts, dependence="sites")
    params = guide.with_rows(started(counts, guide, INPUTS, COUNTS)[0], INPUTS, COUNTS)

    @compiled
    def drawn(key):
        draws = guide.sample_posterior(key, params, INPUTS, sample_shape=(3, 7))["f.u"]
        return draws, guide.sample_posterior(jax.random.split(key, (3, 7))[2, 5], params, INPUTS)["f.u"]

    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        draws, one = drawn(key)
        np.testing.assert_allclose(draws[2, 5], one, rtol=1e-12)
        assert draws.shape == (3, 7, 4)


def test_a_block_is_drawn_given_those_before(float64):
    rng = np.random.default_rng(0)
    loc, before, z = (rng.normal(size=n) for n in (3, 2, 3))
    rows = np.concatenate([rng.normal(size=(3, 2)), np.tril(rng.normal(size=(3, 3)))], axis=1)
    block = JointBlock(*map(jnp.asarray, (loc, rows, before)))
    np.testing.assert_allclose(block.at(jnp.asarray(z)), loc + rows @ np.concatenate([before, z]), rtol=1e-12)
    np.testing.assert_allclose(block.mean, loc + rows[:, :2] @ before, rtol=1e-12)


@pytest.mark.parametrize("batch_size", [None, 6])
def test_the_number_of_all_rows_is_that_of_training(batch_size):
    """``size`` of a prediction is that of its own rows, fewer than those trained on; by the guide, or a new one."""

    def model(X, y=None, *, size):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        f = npgp.SparseGP("f", npgp.RBF(lengthscale), jnp.linspace(0.0, 1.0, 3)[:, None]).draw()
        with npgp.plate("rows", size, rows=len(X)):
            npgp.observe("y", f(X) + 1.0, npgp.Gaussian(scale=0.1), obs=y)

    X, y = np.linspace(0.0, 1.0, 12, dtype=np.float32)[:, None], np.zeros(12, np.float32)
    guide = npgp.AutoSparseGP(model)
    svi = SVI(model, guide, npgp.adam(0.01, 2), TraceMeanField_ELBO(), size=12)
    params = npgp.fit(svi, jax.random.key(0), 2, X, y, batch_size=batch_size, progress=False).params
    means = [npgp.posterior("f", model, g, params, X[:4], size=4).mean(X) for g in (guide, npgp.AutoSparseGP(model))]
    np.testing.assert_array_equal(*means)
