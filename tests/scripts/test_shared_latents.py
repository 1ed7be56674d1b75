"""The model of two data sets that share latent inputs: its bound, and a small run of the script."""

import json

import jax
import jax.numpy as jnp
import loading
import numpy as np
import pytest
from models import compiled, make_elbo

import npgp


@pytest.fixture(scope="module")
def script():
    with loading.restored():
        yield loading.script("shared_latents")


def test_equal_views_of_equal_kernels_are_one_gplvm(script, float64):
    """Two views that share every parameter are the columns of a single GPLVM."""
    views, _ = script.simulate(30, 0)
    shared = script.SharedLatents(views, 3, 6, 0)
    start = npgp.gplvm.Start(shared.latents, shared.inducing, np.zeros(2 * script.COLUMNS), noise_variance=0.1)
    one = npgp.BayesianGPLVM(start)
    rng = np.random.default_rng(1)
    loc, factor = rng.normal(size=(2 * script.COLUMNS, 1, 6)), np.tile(0.5 * np.eye(6), (2 * script.COLUMNS, 1, 1, 1))
    common = {"lengthscale": np.full(3, 1.5), "variance": 0.8, "inducing": shared.inducing}
    latents = {"x.loc": shared.latents, "x.scale": np.full((30, 3), 0.2)}
    params = {"noise_variance": 0.1, "f.u.loc": loc, "f.u.scale_tril": factor, **common, **latents}
    both = dict(latents)
    for view, part in (("first", slice(0, script.COLUMNS)), ("second", slice(script.COLUMNS, None))):
        both |= {f"{view}.{name}": value for name, value in common.items()} | {f"{view}.noise": 0.1}
        both |= {f"{view}.u.loc": loc[part], f"{view}.u.scale_tril": factor[part]}
    params, both = (jax.tree.map(jnp.asarray, p) for p in (params, both))
    # In expectation: their draws of x differ.
    keys = jax.random.split(jax.random.key(0), 300)
    a = compiled(jax.vmap(lambda key: make_elbo(one.model, one.guide)(key, params, np.hstack(views))))(keys)
    b = compiled(jax.vmap(lambda key: make_elbo(shared.model, shared.guide)(key, both, *views)))(keys)
    error = np.hypot(np.std(a), np.std(b)) / np.sqrt(len(keys))
    assert abs(np.mean(a) - np.mean(b)) < 4 * error < 0.02 * abs(np.mean(a))


def test_small_run(script, tmp_path, capsys):
    arguments = "--rows 30 --new-rows 5 --latent-dim 3 --inducing 6 --steps 20".split()
    report = script.main([*arguments, "--out", str(tmp_path), "--json", str(tmp_path / "report.json")])
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert all(np.isfinite(report[name]) for name in report if name.startswith("rmse"))
    assert (tmp_path / "shared_latents.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    assert "relevance in the first view" in printed and "nan" not in printed
