"""
Training on several devices, to be run in a process of its own: the number of devices is fixed once JAX has started.

    python devices_child.py OUT DEVICES [PORT PROCESS]

With a port, it is process 0 or 1 of two, each with so many devices. Parameters, losses and counts go to OUT, by case.
"""

import os
import re
import sys
from pathlib import Path

out, devices, *process = sys.argv[1:]
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import numpyro  # noqa: E402
import numpyro.distributions as dist  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from numpyro.infer import SVI, TraceMeanField_ELBO  # noqa: E402

import npgp  # noqa: E402

if process:
    jax.distributed.initialize(f"127.0.0.1:{process[0]}", 2, int(process[1]))
jax.config.update("jax_enable_x64", True)
KEY = jax.random.key(0)
N, M, B, OUTPUTS = 96, 36, 64, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2))
Y = np.sin(X @ RNG.normal(size=(2, OUTPUTS))) + 0.1 * RNG.normal(size=(N, OUTPUTS))


def model(X, y=None, size=N):
    """A function with learned hyperparameters, one of them hidden, so that steps have noise."""
    lengthscale = numpyro.param("lengthscale", jnp.ones(2), constraint=dist.constraints.positive)
    Z = npgp.features.Points(numpyro.param("Z", jnp.asarray(X0)))
    f = npgp.SparseGP("f", npgp.Matern32(lengthscale), Z).draw()
    noise = numpyro.sample("noise", dist.LogNormal(-1, 1))
    with npgp.plate("data", size, rows=X.shape[0]):
        npgp.observe("y", f(X), npgp.Gaussian(variance=noise), obs=y)


def beside_neighbors(rows, y=None, size=N):
    """Rows beside the three before them: inputs (B, 4, 2), observations (B, 3), NaN where there are fewer."""
    lengthscale = numpyro.param("lengthscale", jnp.ones(2), constraint=dist.constraints.positive)
    f = npgp.SparseGP("f", npgp.Matern32(lengthscale), X0).draw()
    noise = numpyro.sample("noise", dist.LogNormal(-1, 1))
    inputs, near = rows[..., :8].reshape(-1, 4, 2), rows[..., 8:]
    with npgp.plate("data", size, rows=len(rows)):
        beside = f(inputs[:, 1:].reshape(-1, 2)), near
        npgp.observe("y", f(inputs[:, 0]), npgp.Gaussian(variance=noise), obs=y, neighbors=beside)


def outputs_model(X, y=None, size=N):
    """One function per output, each with its own q; trained on all rows."""
    lengthscale = numpyro.param("lengthscale", jnp.ones(2), constraint=dist.constraints.positive)
    with numpyro.plate("outputs", OUTPUTS, dim=-2):
        f = npgp.SparseGP("f", npgp.Matern32(lengthscale), npgp.features.Points(jnp.asarray(X0))).draw()
    with npgp.plate("data", size, rows=X.shape[0], dim=-1), numpyro.plate("outputs", OUTPUTS, dim=-2):
        npgp.observe("y", f(X), npgp.Poisson(), obs=None if y is None else jnp.round(jnp.exp(y)).T)


X0 = X[:M].copy()


def svi_of(model):
    # Rows whose pseudo-observations give q(ε) are on all devices.
    guide = npgp.AutoSparseGP(model, dependence="pseudo-data")
    return SVI(model, guide, npgp.adam(0.02, 100), TraceMeanField_ELBO())


def train(model, y, sharding=None, data=None, **kwargs):
    svi = svi_of(model)
    result = npgp.fit(
        svi, KEY, 12, X if data is None else data, y=y, progress=False, sharding=sharding, steps_per_call=5, **kwargs
    )
    return result, svi


def train_gplvm(sharding=None):
    """Latent inputs in tables of rows, and a q(ε) for each output."""
    gplvm = npgp.BayesianGPLVM(npgp.gplvm.pca_start(jax.random.key(0), Y, latent_dim=2, num_inducing=8))
    svi = SVI(gplvm.model, gplvm.guide, npgp.adam(0.02, 100), TraceMeanField_ELBO())
    return npgp.fit(svi, KEY, 12, Y, batch_size=B, indices="rows", progress=False, sharding=sharding, steps_per_call=5)


def mesh(*shape):
    names = ("rows", "outputs")[: len(shape)]
    return jax.make_mesh(shape, names, devices=jax.devices()[: int(np.prod(shape))])


def collectives(svi, sharding, y, batch_size):
    """Which operations between devices the compiled steps have, and whether work on rows is divided."""
    from npgp.training.data import Data
    from npgp.training.step import Step, steps_program

    inputs, step = Data((X,), {"y": y}, KEY, batch_size, None, sharding=sharding), Step(svi)
    state = step.init(KEY, X[:batch_size], y=y[:batch_size])
    program = steps_program(step, inputs.layout, 5, (sharding.replicated, sharding.of_state(state)))
    chunk = inputs.place(inputs.read(0, 5))
    text = program.prepare(sharding.place_state(state), inputs.arrays, chunk, 5).as_text()
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    counts = [len(re.findall(rf" {name}(?:-start)?\(", text)) for name in names]
    rows = (batch_size or N) // sharding.num_parts
    return np.array([*counts, len(re.findall(rf"\[{M},{rows}\]", text)), len(re.findall(rf"\[{M},{rows * 8}\]", text))])


def elsewhere():
    """A program goes where its arguments must stay, or where JAX is told to compute, whatever ran it before."""
    one, two, three = jax.devices()[:3]
    double = npgp.programs.Program(lambda x: {"twice": 2.0 * x})
    for place in (one, two):
        assert double(jax.device_put(X, place))["twice"].devices() == {place}
        assert double(jnp.asarray(X))["twice"].devices() == {one}
    with jax.default_device(three):
        assert double(X)["twice"].devices() == {three}


def main():
    found = {}

    def keep(case, result):
        params = {name: value for name, value in result.params.items() if name != "auto_rows"}
        found.update({f"{case}/{name}": np.asarray(value) for name, value in params.items()})
        found[f"{case}/losses"] = result.losses

    count = jax.device_count()
    if process:
        spread = npgp.training.Sharding(
            mesh(2, count // 2), params={"f.u.scale_tril": P("outputs"), "f.u.loc": P("outputs")}
        )
        keep("outputs", train(outputs_model, Y, spread)[0])
        found["local"] = np.asarray([jax.local_device_count(), npgp.training.Sharding().local_rows(B).start])
    else:
        keep("outputs/0", train(outputs_model, Y)[0])
        elsewhere()
        found["collectives"] = collectives(svi_of(model), npgp.training.Sharding(), Y[:, 0], B)
        before, path = np.arange(N)[:, None] - np.arange(4), Path(out).with_name("rows.npy")
        near = np.where(before[:, 1:] >= 0, Y[before[:, 1:], 0], np.nan)
        np.save(path, np.concatenate([X[before].reshape(N, 8), near], axis=1))
        file, how = np.load(path, mmap_mode="r"), {"batch_size": B, "allow_nan": True}
        keep("neighbors/0", train(beside_neighbors, Y[:, 0], data=np.load(path), **how)[0])
        keep("neighbors/8", train(beside_neighbors, Y[:, 0], npgp.training.Sharding(), file, **how)[0])
        spread = npgp.training.Sharding(mesh(2, 4), params={"f.u.scale_tril": P("outputs"), "f.u.loc": P("outputs")})
        result, svi = train(outputs_model, Y, spread)
        keep("outputs/8", result)
        keep("gplvm/0", train_gplvm())
        tables = {name: P("rows") for name in ("x.loc", "x.scale")}
        keep("gplvm/8", train_gplvm(npgp.training.Sharding(spread.mesh, params=tables | spread.params)))
        parts = jax.tree.leaves(spread.place_state(result.state))
        found["parts"] = np.asarray([x.addressable_shards[0].data.size / x.size for x in parts if x.size > 1])
        # A result is whole and on one device, to go on from without the others.
        alone = npgp.fit(svi, KEY, 3, X, y=Y, progress=False, init_state=result.state)
        assert np.isfinite(alone.losses).all()
    np.savez(out, **found)


if __name__ == "__main__":
    main()
