"""Plans: names and order of units, what they need, and what fits on a machine."""

import sys

import pytest

from isoloss.errors import IsolossError
from isoloss.studies import Measurement
from isoloss.studies.plan import Resources, Unit, check
from isoloss.studies.run.attempt import command
from isoloss.studies.run.local import Capacity, visible_gpus


def unit(name, *after):
    return Unit(name=name, arguments=("ls",), done=lambda: False, after=after)


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ([unit("a"), unit("a")], "two units of the plan are called 'a'"),
        ([unit("a", "b")], "'a' waits for 'b', which is not in the plan"),
        ([unit("a"), unit("b", "c"), unit("c", "b")], "the units b, c wait for each other"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(units, words):
    with pytest.raises(IsolossError, match=words):
        check(units)


@pytest.mark.parametrize("letter", ["a", "é", "語"])
def test_long_names_are_cut_to_what_file_systems_take(letter):
    one, other = unit(letter * 300), unit(letter * 301)
    assert len(one.file_name.encode()) <= 150
    assert one.file_name != other.file_name


def test_units_share_a_gpu_and_whole_ones_stay_free():
    capacity = Capacity(cores=8, gpus={"0": 1.0, "1": 1.0}, memory=4.0)
    third = Resources(gpus=1 / 3)
    placed = [capacity.reserve(third) for _ in range(3)]
    assert placed == [("0",), ("0",), ("0",)]
    assert capacity.reserve(Resources(gpus=1)) == ("1",)
    assert capacity.reserve(third) is None
    capacity.release(third, ("0",))
    assert capacity.reserve(third) == ("0",)


def test_cores_memory_and_processes_count():
    capacity = Capacity(cores=4, gpus={"0": 1.0, "1": 1.0, "2": 1.0}, memory=10.0)
    two = Resources(cores=2, processes=2, gpus=1, memory=6.0)
    assert capacity.reserve(two) == ("0", "1")
    assert capacity.cores == 0
    assert capacity.memory == 4.0
    assert not capacity.fits(Resources())
    capacity.release(two, ("0", "1"))
    assert capacity == Capacity(cores=4, gpus={"0": 1.0, "1": 1.0, "2": 1.0}, memory=10.0)
    assert not capacity.fits(Resources(memory=11.0))


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ({"cores": 3}, r"large needs 3 cores, 0 GPUs, 0 GiB of memory; there are 2 cores, 1 GPU, 8 GiB of memory"),
        ({"gpus": 2}, "large needs 1 core, 2 GPUs"),
        ({"memory": 9}, "large needs 1 core, 0 GPUs, 9 GiB of memory"),
    ],
)
def test_what_can_never_fit_is_refused(needs, words):
    unit = Unit(name="large", arguments=(), done=lambda: False, needs=Resources(**needs))
    with pytest.raises(IsolossError, match=words):
        Capacity(cores=2, gpus={"0": 1.0}, memory=8.0).check([unit])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cores": 0}, "cores of a unit of work is 0; it must be at least 1"),
        ({"gpus": -0.5}, "gpus of a unit of work is -0.5; it must be at least 0"),
        ({"cores": 1.5}, "cores of a unit of work is 1.5; it must be a whole number"),
        ({"gpus": 1.5}, "gpus of a unit of work is 1.5; above 1 it must be a whole number"),
        ({"gpus": 0.5, "processes": 2}, "gpus of a unit of work with 2 processes is 0.5; each needs a whole GPU"),
        ({"memory": float("nan")}, "memory of a unit of work is nan"),
    ],
)
def test_wrong_needs(given, words):
    with pytest.raises(IsolossError, match=words):
        Resources(**given)


def test_gpus_are_those_that_the_environment_names(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-77")
    assert visible_gpus() == ("2", "GPU-77")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()


def test_a_command_of_several_processes_is_started_by_torchrun():
    assert command(["train", "a"], Resources()) == [sys.executable, "-m", "isoloss", "train", "a"]
    torchrun = "torch.distributed.run --standalone --nproc-per-node 8"
    expected = [sys.executable, "-m", *torchrun.split(), "-m", "isoloss", "train", "a"]
    assert command(["train", "a"], Resources(processes=8)) == expected


def test_measuring_takes_one_process():
    with pytest.raises(IsolossError, match="a measurement needs 2 processes, but only training uses several"):
        Measurement(measures=("loss",), needs=Resources(processes=2))
