"""
Inducing points and neighbors together (VIF) beside GPBoost's (Sigrist 2022; Gyger, Furrer & Sigrist 2025): fit and
predictions on one split of kin8nm, in one run.

    python scripts/benchmarks/vif.py --data SETS

4000 training and 2000 test rows, standardized by the training rows, Matérn-3/2 with a lengthscale for each column, 128
inducing points, 15 neighbors. npgp in float32: inducing inputs by k-means and then learned with the hyperparameters by
L-BFGS, in two rounds with neighbors found anew; GPBoost as it is set. Needs ``pip install -e . --group bench``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import npgp

POSITIVE = dist.constraints.positive


def split(folder: Path, training: int, test: int) -> tuple[np.ndarray, ...]:
    with np.load(folder / "uci_kin8nm.npz") as arrays:
        X, y = np.asarray(arrays["X"], float), np.ravel(arrays["y"]).astype(float)
    order = np.random.default_rng(0).permutation(len(y))
    train, rest = order[:training], order[training : training + test]
    X, y = (X - X[train].mean(0)) / X[train].std(0), (y - y[train].mean()) / y[train].std()
    return X[train], y[train], X[rest], y[rest]


def by_npgp(X, y, X_test, inducing: int, neighbors: int) -> tuple[np.ndarray, np.ndarray]:
    X, y, X_test = (np.asarray(x, np.float32) for x in (X, y, X_test))
    Z = np.asarray(npgp.inducing.kmeans(jax.random.key(0), X, inducing))
    start = {"lengthscale": np.full(X.shape[1], np.sqrt(X.shape[1]), np.float32), "variance": np.float32(1.0)}
    start |= {"noise": np.float32(0.2), "Z": Z}

    def gp(p, near) -> npgp.ApproximateGP:
        kernel = npgp.Matern32(p["lengthscale"], variance=p["variance"])
        return npgp.ApproximateGP(kernel, X, p["Z"], noise_variance=p["noise"], method="vif", neighbors=near)

    def model(near, y):
        learned = {name: numpyro.param(name, start[name], constraint=POSITIVE) for name in start if name != "Z"}
        numpyro.sample("y", gp(learned | {"Z": numpyro.param("Z", start["Z"])}, near), obs=y)

    def nearest(p):
        kernel = npgp.Matern32(p["lengthscale"], variance=p["variance"])
        return npgp.neighbors.nearest_before(X, neighbors, kernel=kernel, inducing=p["Z"])

    params = start
    for steps in (15, 25):
        near = nearest(params)
        fit = npgp.fit_collapsed(jax.random.key(0), model, near, y, init_params=params, max_steps=steps, progress=False)
        params = {name: fit.params[name] for name in start}
    mean, variance = gp(params, nearest(params)).condition(y).mean_and_variance(X_test)
    return np.asarray(mean, float), np.asarray(variance, float) + float(params["noise"])


def by_gpboost(X, y, X_test, inducing: int, neighbors: int) -> tuple[np.ndarray, np.ndarray]:
    import gpboost

    model = gpboost.GPModel(
        gp_coords=X,
        cov_function="matern_ard",
        cov_fct_shape=1.5,
        gp_approx="vif",
        num_neighbors=neighbors,
        num_ind_points=inducing,
        likelihood="gaussian",
    )
    model.fit(y=y)
    found = model.predict(gp_coords_pred=X_test, predict_var=True, predict_response=True)
    return found["mu"], found["var"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of uci_kin8nm.npz")
    parser.add_argument("--rows", type=int, nargs=2, default=(4000, 2000), help="for training and for testing")
    parser.add_argument("--inducing", type=int, default=128)
    parser.add_argument("--neighbors", type=int, default=15)
    parser.add_argument("--methods", nargs="+", default=["npgp", "gpboost"], choices=["npgp", "gpboost"])
    args = parser.parse_args()
    X, y, X_test, y_test = split(args.data, *args.rows)
    print("| | RMSE | NLPD | seconds of a processor |\n|---|---|---|---|", flush=True)
    for method in args.methods:
        began = time.process_time()
        mean, variance = {"npgp": by_npgp, "gpboost": by_gpboost}[method](X, y, X_test, args.inducing, args.neighbors)
        seconds = time.process_time() - began
        error = y_test - mean
        nlpd = np.mean(0.5 * (np.log(2.0 * np.pi * variance) + error**2 / variance))
        print(f"| {method} | {np.sqrt(np.mean(error**2)):.4f} | {nlpd:.4f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
