"""The Ray executor on a cluster of three nodes on this machine, one of which dies while it trains."""

import os
import subprocess
import time

import pytest
from longer_study import command, contents, ends, is_training

from isoloss.errors import IsolossError
from isoloss.studies.executors import ray as executor
from isoloss.studies.job import Options
from isoloss.studies.jobs import Jobs
from isoloss.studies.plan import Unit

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


@pytest.fixture
def cluster():
    """A head without cores, and two nodes of one core each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.workers = [made.add_node(num_cpus=1) for _ in range(2)]
    made.wait_for_nodes()
    yield made
    made.shutdown()


def start(file, out, *options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    words = command(file, out, "--executor", "ray", "--workers", "2", *options)
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, seconds=180.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_node_that_dies_while_it_trains_changes_no_byte(carried_out, tmp_path, cluster):
    file, expected = carried_out
    out = tmp_path / "out"
    driver = start(file, out, "--address", cluster.address)
    wait_for(lambda: is_training(out))
    cluster.remove_node(cluster.workers[0], allow_graceful=False)
    said = driver.communicate(timeout=400)[0]
    assert driver.returncode == 0, said
    assert "lost, " in said
    assert contents(out) == contents(expected)
    found = ends(out)
    assert found.pop("stopped", 0) >= 1
    assert found == {"done": len(list((expected / "leases").glob("*.done")))}


def test_a_cluster_is_started_where_none_is_named(carried_out, tmp_path):
    file, expected = carried_out
    driver = start(file, tmp_path / "out")
    said = driver.communicate(timeout=400)[0]
    assert driver.returncode == 0, said
    assert contents(tmp_path / "out") == contents(expected)


def test_an_address_without_a_cluster_is_refused(tmp_path):
    unit = Unit(name="a", arguments=("ls",), done=lambda: False)
    options = Options(address="127.0.0.1:1")
    with pytest.raises(IsolossError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        executor.run(Jobs([unit], tmp_path, options), options)
