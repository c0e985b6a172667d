"""The Ray executor on a cluster of three nodes on this machine, one of which dies while it trains."""

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys

import psutil
import pytest
from longer_study import ENVIRONMENT, command, contents, ends, num_training, wait_for

from isoloss.errors import IsolossError
from isoloss.studies.plan import Unit
from isoloss.studies.run import ray as executor
from isoloss.studies.run.loop import Loop, Options

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),  # whose import takes seconds
    pytest.mark.filterwarnings("ignore"),  # Ray's own warnings
]


@pytest.fixture
def cluster(tmp_path):
    """A head without cores, and two nodes of one core each; the first has a folder for temporary files of its own."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.workers = [made.add_node(num_cpus=1, env_vars={"TMPDIR": str(tmp_path)}), made.add_node(num_cpus=1)]
    made.wait_for_nodes()
    yield made
    made.shutdown()


@contextlib.contextmanager
def driver_of(file, out, *options):
    """The study's driver; a test that fails leaves none behind, and shows what it said."""
    environment = {**ENVIRONMENT, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    words = command(file, out, "--executor", "ray", "--workers", "2", *options)
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        try:
            yield driver
        finally:
            if driver.poll() is None:
                driver.kill()
                print(driver.communicate()[0])


def kill_node(cluster, index, temporary):
    """Kill all processes of the node that has this folder for temporary files at once, as if the machine lost power.

    Ray's own removal leaves a worker the time to report that its unit is done.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(temporary):
                process.kill()
    cluster.remove_node(cluster.workers[index], allow_graceful=False)


def test_a_node_that_dies_while_it_trains_changes_no_byte(carried_out, tmp_path, cluster):
    file, expected = carried_out
    out = tmp_path / "out"
    with driver_of(file, out, "--address", cluster.address) as driver:
        wait_for(lambda: num_training(out) == 2)  # each node trains one
        kill_node(cluster, 0, tmp_path)
        said = driver.communicate(timeout=1200)[0]
    assert driver.returncode == 0, said
    assert "lost, " in said, said
    assert contents(out) == contents(expected)
    found = ends(out)
    assert found.pop("stopped", 0) == 1
    assert found == ends(expected)


def test_a_cluster_is_started_where_none_is_named_and_units_save_when_it_is_stopped(carried_out, tmp_path):
    file, expected = carried_out
    out = tmp_path / "out"
    with driver_of(file, out) as driver:
        wait_for(lambda: num_training(out))
        driver.send_signal(signal.SIGINT)
        said = driver.communicate(timeout=600)[0]
    assert driver.returncode == 130, said
    assert ends(out) == {"stopped": 2}
    with driver_of(file, out) as driver:
        said = driver.communicate(timeout=1200)[0]
    assert driver.returncode == 0, said
    assert contents(out) == contents(expected)
    assert any(len(steps) > 1 and steps[1] > 0 for steps in starts(out).values())


def starts(out):
    """The steps at which training was begun or resumed, by run."""
    logs = {path.parent.name: path.read_text().splitlines() for path in (out / "runs").glob("*/log.jsonl")}
    lines = {run: [json.loads(line) for line in log] for run, log in logs.items()}
    return {run: [line["step"] for line in log if line["event"] == "start"] for run, log in lines.items()}


def test_an_address_without_a_cluster_is_refused(tmp_path):
    unit = Unit(name="a", arguments=("ls",), done=lambda: False)
    options = Options(address="127.0.0.1:1")
    with pytest.raises(IsolossError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        executor.run(Loop([unit], tmp_path, options), options)


# --- whoever reaches the ports of a cluster that a study starts on this machine

OTHER = (
    "import ray; ray.init(address=ADDRESS, log_to_driver=False); ray.get(ray.remote(lambda: 1).remote()); print('in')"
)
PROBE = f"""
import json, os, subprocess, sys
import psutil
from isoloss.studies.run import ray as executor
from isoloss.studies.run.loop import Options

ray = executor._connect(Options())
ours = ray.get(ray.remote(lambda: os.environ["RAY_AUTH_MODE"]).remote())
me = psutil.Process()
found = [
    (process.name(), address.laddr.ip)
    for process in [me, *me.children(recursive=True)]
    for address in process.net_connections(kind="inet")
    if address.status == psutil.CONN_LISTEN
]
code = {OTHER!r}.replace("ADDRESS", repr(ray.get_runtime_context().gcs_address))
token = {{**os.environ, "RAY_AUTH_TOKEN": 64 * "0"}}
try:
    other = subprocess.run([sys.executable, "-c", code], env=token, capture_output=True, text=True, timeout=40)
    other = other.stdout + other.stderr
except subprocess.TimeoutExpired:
    other = "timeout"
ray.shutdown()
print(json.dumps([ours, found, other]))
"""


def test_its_ports_are_those_of_the_loopback_interface_and_need_a_token():
    done = subprocess.run([sys.executable, "-c", PROBE], env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    mode, listening, other = json.loads(done.stdout.splitlines()[-1])
    assert mode == "token"
    assert len(listening) >= 4
    assert {ip.removeprefix("::ffff:") for _, ip in listening} == {"127.0.0.1"}
    assert "AuthenticationError" in other
