"""Training that is shared among devices and processes gives what one device gives."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from npgp.training import Sharding

CHILD = Path(__file__).with_name("devices_child.py")
#: In float64: what another order of additions may change in a dozen steps of Adam.
TOLERANCE = 1e-10


def start(*args):
    tests = CHILD.parent.parent  # and the npgp beside them, whichever is installed
    environment = os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(CHILD), *map(str, args)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*processes):
    said = [process.communicate(timeout=300)[0] for process in processes]
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text[-3000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of one process with eight devices, and of two processes with two each."""
    folder = tmp_path_factory.mktemp("devices")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [folder / f"{name}.npz" for name in ("one", "first", "second")]
    finish(start(files[0], 8))
    finish(*(start(file, 2, port, process) for process, file in enumerate(files[1:])))
    return [dict(np.load(file)) for file in files]


def of_case(found, case):
    prefix = f"{case}/"
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


def assert_close(a, b):
    assert a.keys() == b.keys() and len(a) >= 3
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
    assert np.ptp(a["losses"]) > 1  # training got somewhere


@pytest.mark.parametrize(
    "case, alone",
    [("neighbors/8", "neighbors/0"), ("outputs/8", "outputs/0"), ("gplvm/8", "gplvm/0")],
)
def test_neighbors_from_a_file_and_all_rows_of_outputs_and_latents(results, case, alone):
    """Batches of the first have noise, whose draws are those of the whole batch however many devices there are."""
    assert_close(of_case(results[0], case), of_case(results[0], alone))


def test_work_on_rows_is_divided(results):
    """Per step, gradients are summed once; nothing else goes between devices, and none computes A of all rows."""
    sums, *others, parts, wholes = results[0]["collectives"]
    assert sums == 1 and not any(others)
    assert parts > 0 and wholes == 0


def test_parameters_of_outputs_are_divided_with_their_moments(results):
    """Means and factors of q, two moments and an average of each are in four parts."""
    parts = results[0]["parts"]
    assert (parts == 0.25).sum() == 8 and set(parts) == {0.25, 1.0}


def test_two_processes(results):
    """Batches of rows between processes: tests/training/test_cluster.py."""
    (one, *two), case = results, "outputs"
    for found in two:
        assert_close(of_case(found, case), of_case(one, f"{case}/0"))
    for name, value in of_case(two[0], case).items():  # both know the whole result, the same bits
        np.testing.assert_array_equal(value, two[1][f"{case}/{name}"])


def test_each_process_reads_its_own_rows(results):
    assert results[1]["local"].tolist() == [2, 0] and results[2]["local"].tolist() == [2, 32]


def test_bad_meshes():
    mesh = jax.make_mesh((1,), ("data",))
    with pytest.raises(ValueError, match="mesh has the axes .'data',.; one of them must be 'rows'"):
        Sharding(mesh)
    with pytest.raises(ValueError, match="params.'w'. is .*'outputs'.*; the mesh has the axes .'rows',."):
        Sharding(params={"w": P("outputs")})
    sharding = Sharding(params={"w": P("rows")})
    with pytest.raises(ValueError, match="params divides 'w'; the parameters are a, b"):
        sharding.check_names({"a": 0, "b": 0})
