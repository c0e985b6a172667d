"""Models that are sharded by `fully_shard` (FSDP2), in two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROCESSES = """
import json, os, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from small_models import gpt2, llama, rows
from isoloss.errors import IsolossError
from isoloss.flatness import empirical_fisher_trace, fisher_trace, hessian_trace, squared_parameter_norm
rank = int(os.fork() == 0)  # one process imports for both
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)


def sharded(model, *parts):
    for part in parts:
        fully_shard(part)
    return fully_shard(model)


def gradients(model):
    ids = rows(2, 4, 5)["input_ids"]
    model(ids).logits.sum().backward()
    found = [parameter.grad.to_local().tolist() for parameter in model.parameters()]
    model.zero_grad()
    with torch.no_grad():  # which leaves the root's parameters whole
        model(ids)
    return found


batches = [rows(40, 6, 5, seed, predicted=[(1, 3), (2, 4, 5), (0, 1)]) for seed in range(2)]
more = [rows(200, 6, 5, 9)]
first, second = gpt2(5), llama(5)
blocks = [*first.transformer.h], [*second.model.layers, second.lm_head]
found = {}
for name, model, parts in (("gpt2", first, blocks[0]), ("llama", second, blocks[1])):
    def traces():
        return [
            fisher_trace(model, batches, num_probes=2),
            fisher_trace(model, batches, auxiliary_sample=more),
            empirical_fisher_trace(model, batches),
        ]

    alone = traces()
    sharded(model, *parts)
    before = gradients(model)
    found[name] = [[each.to_dict() for each in pair] for pair in zip(alone, traces(), strict=True)]
    assert gradients(model) == before  # the model trains on as if it had not been measured
for measure in (
    lambda: fisher_trace(first, batches, method="paper"),
    lambda: fisher_trace(first, batches, rescaling="minimal"),
    lambda: fisher_trace(first, batches, distributed=True),
    lambda: hessian_trace(first, batches),
    lambda: squared_parameter_norm(first),
):
    try:
        measure()
    except IsolossError as error:
        found.setdefault("refused", []).append(str(error))
with open(f"{sys.argv[1]}.{rank}", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
sys.exit(0 if rank else os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_sharded_model_has_the_trace_of_the_whole_one_in_every_process(tmp_path):
    meeting, here = tmp_path / "meeting", str(Path(__file__).parent)
    path = os.pathsep.join([here, *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-c", PROCESSES, meeting], env=environment, check=True, timeout=300)
    for rank in range(2):
        found = json.loads(Path(f"{meeting}.{rank}").read_text())
        for alone, sharded in (*found["gpt2"], *found["llama"]):
            for name in ("value", "stderr", "by_parameter", "by_parameter_stderr"):
                assert sharded[name] == pytest.approx(alone[name], rel=1e-9), name
            assert sharded["details"]["positions_selected"] == alone["details"]["positions_selected"]
            assert sharded["details"]["num_parameters"] == alone["details"]["num_parameters"]
        assert len(found["refused"]) == 5
        assert "leave it out, and give every process the same batches" in found["refused"].pop(2)
        assert all("is sharded by fully_shard, and this measure needs whole weights" in one for one in found["refused"])
