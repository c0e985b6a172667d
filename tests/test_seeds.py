"""Seeds: streams depend on every name and on nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from isoloss.seeds import derive, generator

names = st.lists(st.text(max_size=5) | st.integers(0, 100), max_size=3)


@given(st.integers(0, 2**40), names, st.integers(0, 2**40), names)
def test_streams_differ_where_seed_or_names_do(seed_a, names_a, seed_b, names_b):
    same = seed_a == seed_b and names_a == names_b
    assert (derive(seed_a, *names_a) == derive(seed_b, *names_b)) == same


def test_a_seed_is_the_same_on_every_machine():
    assert derive(0, "masks", 7) == 3929552222499900739
    assert 0 <= derive(3, "x") < 2**63


def test_a_generator_is_at_the_start_of_its_stream():
    first, second = (generator(1, "a") for _ in range(2))
    assert first.initial_seed() == derive(1, "a")
    assert first.get_state().equal(second.get_state())
