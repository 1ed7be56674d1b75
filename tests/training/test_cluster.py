"""The program for clusters, on one and on two processes of this machine."""

import os
import signal
import socket
import subprocess
import sys
import threading
import warnings

import jax.numpy as jnp
import loading
import numpy as np
import pytest

import npgp

SCRIPT = loading.path("train")


def arguments(folder, run, *options):
    settings = ["--inducing", 8, "--batch-size", 40, "--steps", 30, *options]
    return list(map(str, [folder / "X.npy", folder / "y.npy", folder / run, *settings]))


def start(folder, run, *options):
    command = [sys.executable, SCRIPT, *arguments(folder, run, *options)]
    environment = os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SCRIPT.parents[2])}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(list(map(str, command)), env=environment, **pipes)


def here(capsys, folder, run):
    """The program in this process, which has all modules already; and what it says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", npgp.training.TrainingWarning)  # of few steps
        loading.script("train").main(arguments(folder, run))
    return capsys.readouterr().out


def finish(*processes):
    said = [process.communicate(timeout=300)[0] for process in processes]
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text[-3000:]
    return said


def write_data(folder):
    rng = np.random.default_rng(0)
    X = 50 + 10 * rng.uniform(-2, 2, size=(400, 2))
    np.save(folder / "X.npy", X)
    np.save(folder / "y.npy", 1000 + 7 * np.sin(X[:, 0] / 10) + rng.normal(size=400))
    return X


def start_two(folder, run, *options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    several = ["--distributed", "--coordinator", address, "--processes", 2, "--process"]
    return [start(folder, run, *options, *several, process) for process in range(2)]


@pytest.mark.slow
def test_two_processes_train_what_one_trains_and_go_on_from_their_checkpoints(tmp_path, float64, capsys):
    X = write_data(tmp_path)
    said = here(capsys, tmp_path, "one")
    first, second = finish(*start_two(tmp_path, "two"))
    assert "30 steps, ELBO per row" in said and "30 steps, ELBO per row" in first and "saved" not in second
    one, together = (npgp.load(tmp_path / run / "model.npz") for run in ("one", "two"))

    def predict(model, X):
        mean, variance = model["posterior"].mean_and_variance(model["inputs"](jnp.asarray(X)))
        return model["targets"].inverse(mean), variance

    for a, b in zip(predict(one, X[:50]), predict(together, X[:50]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)
    assert abs(predict(one, X)[0].mean() - 1000) < 5  # in units of the targets

    # All is trained: the same call has the result from the checkpoint, the same bits, also in one process.
    (tmp_path / "two" / "model.npz").unlink()
    assert first.splitlines()[-1] == here(capsys, tmp_path, "two").splitlines()[-1]
    again = npgp.load(tmp_path / "two" / "model.npz")
    assert (np.asarray(again["posterior"].q[0].loc) == np.asarray(together["posterior"].q[0].loc)).all()


@pytest.mark.slow
def test_processes_leave_together_when_one_is_told_to_terminate(tmp_path):
    write_data(tmp_path)
    folder = tmp_path / "run" / "checkpoints"
    processes = start_two(tmp_path, "run", "--steps", 1_000_000, "--minutes", 1000)
    too_long = threading.Timer(300, lambda: [process.kill() for process in processes])
    too_long.start()
    said = ""
    while "ELBO" not in said:  # the bar of the first process, once it has taken steps
        said += (more := processes[0].stdout.read(1))
        assert more, said
    assert not any(folder.glob("npgp_*"))  # none is due for hours
    processes[1].send_signal(signal.SIGTERM)
    rest = [process.communicate(timeout=100)[0] for process in processes]
    too_long.cancel()
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, (said, rest)
    (saved,) = folder.glob("npgp_*")
    assert int(saved.name.removeprefix("npgp_")) > 0
