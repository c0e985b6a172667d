"""A Ray cluster that a study starts on this machine is there for this study alone."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")]

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
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    mode, listening, other = json.loads(done.stdout.splitlines()[-1])
    assert mode == "token"
    assert len(listening) >= 4
    assert {ip.removeprefix("::ffff:") for _, ip in listening} == {"127.0.0.1"}
    assert "AuthenticationError" in other
