"""What ``scripts/benchmarks/gpu.py`` asks of npgp beside steps: is it right there?

Right is what a processor of this machine says in double precision; the accelerator computes the same bounds and
gradients in both precisions. Kernel matrices are well conditioned, so that rounding alone explains little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_process import clear, configure, device_memory  # noqa: F401 (asked for by the worker)
from npgp_programs import versions  # noqa: F401 (asked for by the worker)
from numpyro.infer import TraceMeanField_ELBO

import npgp

COLUMNS, LENGTHSCALE = 3, 0.5
#: What a gradient may differ by, in units of what a bound may.
GRADIENT_UNITS = 20.0
#: Blocks and covariances of q.
STRUCTURES: dict[str, tuple[int, Any]] = {
    "SVGP": (1, "dense"),
    "diagonal": (1, "diagonal"),
    "SOLVE-GP": (2, ["dense", "dense"]),
    "ODVGP": (2, ["dense", "mean-only"]),
    "three blocks": (3, ["dense", "diagonal", "mean-only"]),
}
CONDITIONALS = ("prior", "tight", "grouped", "shared", "full")
#: Likelihoods of other proofs than the Gaussian, with the counts, signs or numbers that they are of.
LIKELIHOODS: dict[str, tuple[Callable[[], npgp.Likelihood], Callable[[np.ndarray], np.ndarray]]] = {
    "Poisson": (lambda: npgp.Poisson(), lambda y: np.floor(np.exp(y))),
    "Bernoulli": (lambda: npgp.Bernoulli(), lambda y: (y > 0).astype(float)),
    "StudentT": (lambda: npgp.StudentT(df=4.0, scale=0.3), lambda y: y),
}


def compare(
    case: str, rows: int, inducing: int, group_size: int, conditionals: Sequence[str] = CONDITIONALS
) -> dict[str, Any]:
    """
    Differences of the accelerator's bounds and gradients from the processor's in float64, both relative.

    :param case: a structure, with Gaussian noise; a likelihood; or collapsed bounds.
    :param conditionals: those to compare, of which structures alone have ``"shared"``.
    :return: for each dtype and conditional the differences of the bound and of its gradient, and what both may be.
    """
    data = _data(rows, inducing, case)
    conditionals = [name for name in conditionals if name != "shared" or case in STRUCTURES]
    fn = _collapsed if case == "collapsed" else _uncollapsed
    function = fn(case, conditionals, data, npgp.sparse.median_split(data["X"], group_size))
    accelerator, processor = jax.devices()[0], _processor()
    programs = [("float64", processor), ("float64", accelerator), ("float32", accelerator)]
    params = {name: np.broadcast_to(p, (len(conditionals), *np.shape(p))) for name, p in data["params"].items()}
    lowered = [_lowered(function, params, dtype, device) for dtype, device in programs]
    with ThreadPoolExecutor() as threads:
        compiled = list(threads.map(lambda program: program[0].compile(), lowered))
    found = []
    for (dtype, _), program, (_, arguments) in zip(programs, compiled, lowered, strict=True):
        with jax.enable_x64(dtype == "float64"):
            found.append(jax.tree.map(lambda a: np.asarray(a, np.float64), program(arguments)))
    reference, *others = found
    answer: dict[str, Any] = {"case": case, "condition": data["condition"], "conditionals": {}}
    for (dtype, _), (value, gradient) in zip(programs[1:], others, strict=True):
        for i, name in enumerate(conditionals):
            differences = relative(value[i], reference[0][i], _of(gradient, i), _of(reference[1], i))
            answer["conditionals"].setdefault(name, {})[dtype] = differences
    answer["bounds"] = dict(zip(conditionals, reference[0].tolist(), strict=True))
    answer["tolerance"] = {dtype: tolerance(dtype, data["condition"]) for dtype in ("float64", "float32")}
    return answer


def tolerance(dtype: str, condition: float) -> list[float]:
    """
    What the relative differences of a bound and of its gradient may be.

    Solving with a factor of K loses κ(K) units of rounding in the worst case, which is what a bound may differ by. A
    gradient takes further solves, and is also looked at where it is a hundredth of the whole: 20 times as much. In
    float32 on a processor bounds differed by .03 of that unit and gradients by 2.3 of it at most; with products rounded
    as in TF32 gradients differ by 130 and more.
    """
    unit = float(np.finfo(dtype).eps) * condition
    return [unit, GRADIENT_UNITS * unit]


def relative(value, reference, gradient: dict[str, Any], expected: dict[str, Any]) -> list[float]:
    """
    Differences of a bound and of its gradient: of that the largest over parameters, each by its own norm, or by a
    hundredth of the whole gradient's where it is less than that.
    """
    whole = np.sqrt(sum(np.sum(np.square(g)) for g in expected.values()))
    norms = {name: max(np.linalg.norm(g), 0.01 * whole) for name, g in expected.items()}
    slopes = [np.linalg.norm(gradient[name] - g) / norms[name] for name, g in expected.items() if norms[name] > 0.0]
    return [float(abs(value - reference) / abs(reference)), float(np.max(slopes))]


def _of(gradient: dict[str, Any], i: int) -> dict[str, Any]:
    return {name: values[i] for name, values in gradient.items()}


def _processor():
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        raise RuntimeError("JAX_PLATFORMS leaves out the processor, the reference: make it cuda,cpu.") from None


def _data(rows: int, inducing: int, case: str) -> dict[str, Any]:
    """Inputs and targets, and parameters for each conditional; q's are neither the prior's nor zero."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1.7, 1.7, (rows, COLUMNS))
    y = np.sin(2.0 * X[:, 0]) + 0.5 * X[:, 1] + 0.3 * rng.normal(size=rows)
    blocks, kinds = STRUCTURES.get(case, STRUCTURES["SVGP"])
    Z = rng.uniform(-1.7, 1.7, (inducing, COLUMNS))
    params: dict[str, Any] = {"lengthscale": np.full(COLUMNS, LENGTHSCALE), "variance": np.asarray(1.2)}
    params |= {"noise": np.asarray(0.1), "scale": np.asarray(0.5)}
    for i, part in enumerate(np.array_split(Z, blocks)):
        size, kind = len(part), kinds if blocks == 1 else kinds[i]
        params |= {f"Z{i}": part, f"loc{i}": 0.3 * rng.normal(size=size)}
        if kind == "dense":
            params[f"covariance{i}"] = np.tril(rng.normal(size=(size, size)), -1) * 0.1 / size**0.5 + 0.5 * np.eye(size)
        elif kind == "diagonal":
            params[f"covariance{i}"] = rng.uniform(0.3, 0.9, size)
    r = np.sqrt(3.0) * np.linalg.norm((Z[:, None] - Z) / LENGTHSCALE, axis=-1)
    condition = float(np.linalg.cond((1.0 + r) * np.exp(-r) + 1e-5 * np.eye(inducing)))
    y = LIKELIHOODS[case][1](y) if case in LIKELIHOODS else y
    return {"X": X, "y": y, "params": params, "condition": condition}


def _conditional(name: str, groups) -> npgp.conditionals.Conditional | str:
    return npgp.conditionals.Grouped(groups) if name == "grouped" else name


def _kernel(p) -> npgp.Kernel:
    return npgp.Matern32(p["lengthscale"], variance=p["variance"])


def _uncollapsed(case: str, conditionals: Sequence[str], data: dict[str, Any], groups) -> Callable:
    """A function of parameters, one set for each conditional: their ELBOs."""
    blocks, kinds = STRUCTURES.get(case, STRUCTURES["SVGP"])
    names = {1: ["u"], 2: ["u", "v"], 3: ["u1", "u2", "u3"]}[blocks]

    def elbo(p, conditional: str, X, y):
        likelihood = LIKELIHOODS[case][0]() if case in LIKELIHOODS else npgp.Gaussian(variance=p["noise"])

        def gp():
            Z = [p[f"Z{i}"] for i in range(blocks)]
            return npgp.SparseGP("f", _kernel(p), Z, covariances=kinds, jitter=1e-5)

        def model(X, y):
            f = gp().draw()
            with npgp.plate("data", len(X)):
                npgp.observe("y", f(X), likelihood, obs=y, conditional=_conditional(conditional, groups))

        values = {f"f.{name}.loc": p[f"loc{i}"] for i, name in enumerate(names)}
        for i, name in enumerate(names):
            if f"covariance{i}" in p:
                kind = "scale_tril" if p[f"covariance{i}"].ndim == 2 else "scale"
                values[f"f.{name}.{kind}"] = p[f"covariance{i}"]
        values["y.residual_scale"] = p["scale"]
        return -TraceMeanField_ELBO().loss(jax.random.key(0), values, model, lambda X, y: gp().guide(), X, y)

    def elbos(params):
        X, y = (jnp.asarray(data[name], params["noise"].dtype) for name in ("X", "y"))
        return jnp.stack([elbo(_of(params, i), name, X, y) for i, name in enumerate(conditionals)])

    return elbos


def _collapsed(case: str, conditionals: Sequence[str], data: dict[str, Any], groups) -> Callable:
    """The same of collapsed bounds."""

    def elbos(params):
        X, y = (jnp.asarray(data[name], params["noise"].dtype) for name in ("X", "y"))
        found = []
        for i, name in enumerate(conditionals):
            p, how = _of(params, i), _conditional(name, groups)
            found.append(
                npgp.CollapsedGP(
                    _kernel(p), X, p["Z0"], noise_variance=p["noise"], conditional=how, jitter=1e-5
                ).log_prob(y)
            )
        return jnp.stack(found)

    return elbos


def _lowered(function: Callable, params: dict[str, Any], dtype: str, device) -> tuple[Any, Any]:
    """A program for all bounds and their gradients, which is yet to be compiled, and what it is to be given."""

    def both(params):
        values, back = jax.vjp(function, params)
        return values, back(jnp.ones_like(values))[0]  # each bound has parameters of its own

    with jax.enable_x64(dtype == "float64"), jax.default_device(device):
        arguments = {name: jax.device_put(value.astype(dtype), device) for name, value in params.items()}
        return jax.jit(both).lower(arguments), arguments
