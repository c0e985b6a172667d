"""Plans: what is refused, and names that are too long for files."""

import pytest

from isoloss.errors import IsolossError
from isoloss.studies.plan import Unit, check


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
