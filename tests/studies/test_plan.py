"""Plans: what is refused, in which order units are started, and how much work a large plan is."""

import sys
from functools import partial

import pytest

from isoloss.errors import IsolossError
from isoloss.studies.plan import Resources, Unit, check, in_order, makespan, upward_rank
from isoloss.studies.run import loop
from isoloss.studies.run.loop import Options


def unit(name, *after, seconds=1.0, cores=1):
    needs = Resources(cores=cores)
    return Unit(name=name, arguments=("ls",), done=lambda: False, after=after, seconds=seconds, needs=needs)


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


def test_the_longest_chain_comes_first():
    first, long = unit("first", seconds=2), unit("long", seconds=5)
    units = [long, first, unit("second", "first", seconds=4), unit("third", "second")]
    check(units)
    assert upward_rank(units) == {"long": 5, "first": 7, "second": 5, "third": 1}


def test_of_several_followers_the_longest_counts():
    units = [unit("first", seconds=1), unit("short", "first", seconds=2), unit("long", "first", seconds=9)]
    assert upward_rank(units)["first"] == 10


def calls(function, *arguments):
    """How many functions are called, compiled ones included: a measure of time that no other process disturbs."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("function", [in_order, lambda units: makespan(units, 3)])
def test_the_work_on_a_plan_grows_with_its_units(function, cores):
    """Not with their square, not even where units of two cores wait while one core of three is free."""

    def plan(count):
        pairs = ((unit(f"train {i}", cores=cores), unit(f"measure {i}", f"train {i}")) for i in range(count))
        return [each for pair in pairs for each in pair]

    assert calls(function, plan(400)) < 4.8 * calls(function, plan(100))  # 4 times, and a logarithm


def test_a_job_costs_the_same_in_a_large_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "LOOK_SECONDS", 1e9)  # what others do is looked up by the clock

    def carry_out(count):
        done = set()
        units = [
            Unit(
                name=f"{i}",
                arguments=("ls",),
                done=partial(done.__contains__, f"{i}"),
                needs=Resources(cores=2 - i % 2),
            )
            for i in range(count)
        ]
        made = loop.Loop(units, tmp_path / f"{count}", Options())
        while not made.finished:
            job = made.take(lambda needs: needs.cores == 1) or made.take()  # the others wait for a while
            done.add(job.unit.name)
            made.finish(job, 0)
            made.report_done()

    assert calls(carry_out, 200) < 4.8 * calls(carry_out, 50)
