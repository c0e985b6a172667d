"""Memory that is freed and needed again: counted by the page faults of a process of its own."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.machine import physical_memory, resolve_device

PASSES = 20
PROGRAM = f"""
import resource
import torch  # before anything is counted, as its import allocates and frees too
from isoloss.machine import disable_malloc_trim

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def one_pass():
    blocks = [b"x" * (4 << 20) for _ in range(12)]  # 48 MiB, every page written

for prepare in (lambda: None, disable_malloc_trim):
    prepare()
    for _ in range(3):
        one_pass()
    before = faults()
    for _ in range({PASSES}):
        one_pass()
    print(faults() - before)
"""


def page_faults():
    """Page faults of the passes before and after `disable_malloc_trim`, with the allocator's own settings."""
    settings = ("MALLOC", "GLIBC_TUNABLES", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if not any(part in name for part in settings)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this threshold")
def test_freed_memory_is_not_fetched_again():
    given_back, kept = page_faults()
    assert given_back >= 12 * PASSES  # once a block even with pages of 2 MiB, 1,024 times with those of 4 KiB
    assert kept < given_back / 50


GIVE_BACK = """
import psutil
import torch
from isoloss.lab.training.process import process_settings

with process_settings(1, torch.device("cpu")):
    blocks = [b"x" * (4 << 20) for _ in range(50)]
    last = blocks.pop()  # what is freed lies below what is kept
    before = psutil.Process().memory_info().rss
    del blocks
    freed = psutil.Process().memory_info().rss
print(before - freed, before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the function that trim_malloc calls")
def test_what_was_freed_in_training_is_given_back():
    done = subprocess.run([sys.executable, "-c", GIVE_BACK], check=True, capture_output=True, text=True)
    by_itself, given_back = (int(word) for word in done.stdout.split())
    assert by_itself < 20 << 20
    assert given_back > 180 << 20


def test_a_job_may_have_less_memory_than_the_machine(monkeypatch):
    monkeypatch.delenv("SLURM_MEM_PER_NODE", raising=False)
    machine = physical_memory()
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "64")
    assert physical_memory() == min(machine, 64 * 2**20)


def test_devices_by_name():
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0", "", "auto:1"])
def test_an_unknown_device_names_the_choices(name):
    with pytest.raises(IsolossError, match=f"the device is '{name}'; it must be auto, cpu, cuda, cuda:N or mps"):
        resolve_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_device_that_is_not_here(name):
    with pytest.raises(IsolossError, match="torch finds no CUDA device here; use cpu or auto"):
        resolve_device(name)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="says what happens without an Apple GPU")
def test_mps_where_there_is_none():
    with pytest.raises(IsolossError, match="no Apple GPU"):
        resolve_device("mps")
