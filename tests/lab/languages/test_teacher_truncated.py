"""Conditionals over the likeliest tokens: what is kept, and that what is left out never exceeds its bound."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from teacher_models import build, enumerated, next_logs

from isoloss.errors import IsolossError
from isoloss.lab.languages.teacher import Teacher

IDS, LENGTH = (5, 2, 8, 3), 3
EVERYWHERE = torch.arange(LENGTH)


def everything(model):
    """All sentences, their lengths, and all positions of each."""
    sequences, joint = enumerated(model, IDS, LENGTH)
    n = len(sequences)
    return sequences, joint.flatten(), torch.full((n,), LENGTH), EVERYWHERE.expand(n, -1)


def left_out(teacher, found, sequences, lengths):
    """(n, T): the exact probability of the tokens that are not kept, given all the others."""
    probs = teacher.log_conditionals(sequences, lengths).exp()
    kept = torch.zeros(*probs.shape[:2], len(IDS) + 1, dtype=torch.bool).scatter(2, found.tokens, True)[..., :-1]
    return probs.masked_fill(kept, 0).sum(dim=2)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.3, 0.6, 1.2]),
    mass=st.floats(0.05, 1),
    candidates=st.sampled_from([None, None, 1, 2, 3]),
)
def test_what_is_left_out_is_within_its_bound_and_is_the_prior_mass_in_the_mean(seed, scale, mass, candidates):
    model = build("gpt2", seed, scale)
    teacher = Teacher(model, IDS, LENGTH)
    sequences, joint, lengths, positions = everything(model)
    found = teacher.truncated_log_conditionals(
        sequences, lengths, positions=positions, mass=mass, candidates=candidates
    )
    exact = left_out(teacher, found, sequences, lengths)
    assert (exact <= found.left_out_bound + 1e-12).all()
    assert (found.left_out_bound <= 1).all()
    torch.testing.assert_close(found.left_out_bound[:, -1], found.left_out_prior[:, -1], rtol=0, atol=1e-12)
    probs = joint.exp()[:, None]
    torch.testing.assert_close(
        (probs * exact).sum(dim=0), (probs * found.left_out_prior).sum(dim=0), rtol=0, atol=1e-10
    )


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), mass=st.floats(0.05, 1))
def test_the_fewest_likeliest_tokens_of_that_mass_are_kept(seed, mass):
    model = build("opt", seed)
    teacher = Teacher(model, IDS, LENGTH)
    sequences, _, lengths, positions = everything(model)
    found = teacher.truncated_log_conditionals(sequences, lengths, positions=positions, mass=mass)
    logs = teacher.log_conditionals(sequences, lengths)
    prior = next_logs(model, sequences, IDS).exp()
    tiny = math.log(torch.finfo(torch.float64).tiny)
    for row in range(0, len(sequences), 5):
        for position in range(LENGTH):
            q = prior[row, position]
            order = sorted(range(len(IDS)), key=lambda token, q=q: -q[token])
            count = next(k for k in range(1, 5) if k == 4 or q[order[:k]].sum() >= mass)
            kept = order[:count]
            size = found.tokens.shape[2]
            assert found.tokens[row, position].tolist() == kept + [teacher.pad_id] * (size - count)
            expected = logs[row, position, kept].log_softmax(dim=0)
            torch.testing.assert_close(found.log_conditionals[row, position, :count], expected, rtol=0, atol=1e-10)
            assert (found.log_conditionals[row, position, count:] == tiny).all()
            assert found.left_out_prior[row, position].item() == pytest.approx(1 - q[kept].sum().item(), abs=1e-12)
            true = logs[row, position, kept].exp()
            upper = found.log_conditionals[row, position, :count].exp()
            assert (true <= upper + 1e-12).all()
            assert (true >= (1 - found.left_out_bound[row, position]) * upper - 1e-12).all()


def test_with_all_tokens_nothing_is_left_out():
    model = build("gpt2")
    teacher = Teacher(model, IDS, LENGTH)
    sequences, _, lengths, positions = everything(model)
    found = teacher.truncated_log_conditionals(sequences, lengths, positions=positions, candidates=4)
    expected = teacher.log_conditionals(sequences, lengths).gather(2, found.tokens)
    torch.testing.assert_close(found.log_conditionals, expected, rtol=0, atol=1e-10)
    assert not found.left_out_prior.any()
    assert not found.left_out_bound.any()


def test_positions_are_those_asked_for():
    model = build("gpt2")
    teacher = Teacher(model, IDS, LENGTH)
    sequences = enumerated(model, IDS, LENGTH)[0]
    lengths = torch.arange(len(sequences)) % LENGTH + 1
    whole = teacher.truncated_log_conditionals(sequences, lengths, positions=(lengths - 1)[:, None], candidates=2)
    single = teacher.truncated_log_conditionals(sequences, lengths, positions=lengths - 1, candidates=2)
    assert [tuple(field.shape) for field in single] == [(64, 2), (64, 2), (64,), (64,)]
    for one, two in zip(single, whole, strict=True):
        assert torch.equal(one, two[:, 0])
    for length in range(1, LENGTH + 1):
        rows = lengths == length
        alone = teacher.truncated_log_conditionals(
            sequences[rows], lengths[rows], positions=lengths[rows] - 1, candidates=2
        )
        for one, two in zip(single, alone, strict=True):
            torch.testing.assert_close(one[rows], two, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mass": 0.0}, r"mass is 0\.0; it must be above 0 and at most 1"),
        ({"mass": 1.5}, r"mass is 1\.5; it must be above 0"),
        ({"candidates": 0}, "candidates is 0; it must be from 1 to 4"),
        ({"candidates": 5}, "candidates is 5; it must be from 1 to 4"),
        ({"positions": torch.tensor([3])}, "sentence 0 has no position 3"),
    ],
)
def test_numbers_out_of_range(options, message):
    teacher = Teacher(build("gpt2"), IDS, LENGTH)
    arguments = {"positions": torch.tensor([0])} | options
    with pytest.raises(IsolossError, match=message):
        teacher.truncated_log_conditionals(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([3]), **arguments)
