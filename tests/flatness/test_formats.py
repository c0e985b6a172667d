"""The grids of low-bit formats, against their definitions, torchao and bitsandbytes."""

import bisect
import dataclasses
import itertools

import pytest
import torch
from formats import digest, known

from isoloss.examples import tiny_bert
from isoloss.flatness import Rounding
from isoloss.flatness.formats import _NF4, FORMATS
from isoloss.lab.evaluation.measures.base import make_measure

# by torchao 0.18.0 and bitsandbytes 0.50.2, in float32 and bfloat16: python benchmarks/formats.py
DIGESTS = {
    "int4-asymmetric-128": ["0ea415dcc885fd25", "4c412ebe37a1f51c"],
    "int4-asymmetric-32": ["bb8b4c8c25ef1b53", "b20a8e1eb5b9c52a"],
    "int4-gptq": ["4430a2734d7f8a5f", "cdbb908ee2661641"],
    "nf4": ["c3bfae025b6d75b2", "197a0f5aebaafd1f"],
}


@pytest.mark.parametrize("name", DIGESTS)
def test_rounded_weights_are_those_of_torchao_and_bitsandbytes_bit_for_bit(name):
    assert [digest(FORMATS[name].round(weight)) for weight in known()] == DIGESTS[name]


def asymmetric(group, bits):
    low, high, last = min(*group, 0.0), max(*group, 0.0), 2**bits - 1
    scale = (high - low) / last or 1.0
    zero = round(-low / scale)
    return [(min(max(round(w * (1 / scale)) + zero, 0), last) - zero) * scale for w in group]


def gptq(group, bits):
    half = 2 ** (bits - 1)
    scale = 2 * max(map(abs, group)) / (2**bits - 1) or 1.0
    return [min(max(round(w * (1 / scale)), -half), half - 1) * scale for w in group]


def nf4(group, bits):
    scale = max(map(abs, group)) or 1.0
    between = [(a + b) / 2 for a, b in itertools.pairwise(_NF4)]
    return [_NF4[bisect.bisect_left(between, w / scale)] * scale for w in group]


@pytest.mark.parametrize(
    ("group_by_group", "bits", "size"),
    [(asymmetric, 4, 5), (asymmetric, 3, 13), (gptq, 4, 5), (gptq, 2, 1), (nf4, 4, 8)],
)
def test_groups_are_rounded_one_by_one(group_by_group, bits, size):
    weight = torch.randn(7, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight[2] = 0
    weight[3].abs_()
    rows = weight.view(1, -1) if group_by_group is nf4 else weight  # blocks of the whole matrix
    parts = [part.tolist() for row in rows for part in row.split(size)]
    expected = [value for part in parts for value in group_by_group(part, bits)]
    rounded = Rounding(bits=bits, group_size=size, grid=group_by_group.__name__).round(weight)
    torch.testing.assert_close(rounded.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_every_format_has_a_measure_of_its_rise():
    model, batches = tiny_bert()
    for name, rounding in FORMATS.items():
        (rise,) = make_measure(f"{name}-rise")(model, batches).estimates.values()
        assert dataclasses.asdict(rounding).items() <= rise.details.items()
        assert rise.stderr > 0
