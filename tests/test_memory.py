"""Memory that is freed and needed again: counted by the page faults of a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

from isoloss.memory import physical_memory

PASSES = 20
PROGRAM = f"""
import resource
import torch  # before anything is counted, as its import allocates and frees too
from isoloss.memory import keep_freed

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def one_pass():
    blocks = [b"x" * (4 << 20) for _ in range(12)]  # 48 MiB, every page written

for prepare in (lambda: None, keep_freed):
    prepare()
    for _ in range(3):
        one_pass()
    before = faults()
    for _ in range({PASSES}):
        one_pass()
    print(faults() - before)
"""


def page_faults():
    """The page faults of the passes before and after `keep_freed`, in a process with the allocator's own settings."""
    settings = ("MALLOC", "GLIBC_TUNABLES", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if not any(part in name for part in settings)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the threshold that keep_freed raises")
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the function that give_back_freed calls")
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
