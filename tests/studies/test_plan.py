"""Plans: what is refused, and in which order units are started."""

import pytest

from isoloss.errors import IsolossError
from isoloss.studies.plan import Unit, check, urgency


def unit(name, *after, seconds=1.0):
    return Unit(name=name, arguments=("ls",), done=lambda: False, after=after, seconds=seconds)


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


def test_the_longest_chain_comes_first():
    first, long = unit("first", seconds=2), unit("long", seconds=5)
    units = [long, first, unit("second", "first", seconds=4), unit("third", "second")]
    check(units)
    assert urgency(units) == {"long": 5, "first": 7, "second": 5, "third": 1}


def test_of_several_followers_the_longest_counts():
    units = [unit("first", seconds=1), unit("short", "first", seconds=2), unit("long", "first", seconds=9)]
    assert urgency(units)["first"] == 10
