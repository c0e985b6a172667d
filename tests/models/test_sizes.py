"""Sizes by name, against the paper's tables and against the models that are built from them."""

import subprocess
import sys

import pytest
import torch

from isoloss.config import ModelConfig
from isoloss.errors import IsolossError
from isoloss.models import bert, bert_pre_ln, lstm, opt
from isoloss.models.sizes import (
    ARCHITECTURES,
    LSTM_SIZES,
    SIZES,
    Shape,
    check_size,
    find_architecture,
    lstm_shape,
    num_parameters,
    shape,
    sizes_of,
)

TABLE_3 = """
64   1  1 256
128  2  4 512
192  3  5 768
256  4  6 1024
512  8  8 2048
768  12 12 3072
1024 16 16 4096
1280 20 20 5120
1536 24 24 6144
"""

# width, heads and layers; the feed-forward width is 4 times the width, whatever the table's last column says
TABLE_4 = """
128  2  4
192  3  5
320  5  6
384  6  7
640  10 12
960  15 16
1920 30 20
"""

LSTMS = {128: 4, 256: 6, 512: 8, 768: 12, 1024: 16}
SMALL = {"d16", "d32", "h16", "h32", "h64"}


def test_the_sizes_are_the_papers_tables():
    rows = [Shape(*map(int, line.split())) for line in TABLE_3.split("\n") if line]
    for width, heads, layers in (map(int, line.split()) for line in TABLE_4.split("\n") if line):
        rows.append(Shape(width, heads, layers, 4 * width))
    assert [shape(f"d{row.d_model}") for row in rows] == rows
    assert {*SIZES} - SMALL == {f"d{row.d_model}" for row in rows}
    assert {name: row.num_layers for name, row in LSTM_SIZES.items() if name not in SMALL} == {
        f"h{hidden}": layers for hidden, layers in LSTMS.items()
    }
    assert all(name == f"h{row.hidden}" for name, row in LSTM_SIZES.items())


@pytest.mark.parametrize(("architecture", "name"), [(a, name) for a in ARCHITECTURES for name in sizes_of(a)])
def test_the_closed_form_counts_the_built_models_parameters(architecture, name):
    build = {"bert": bert.build, "bert-pre-ln": bert_pre_ln.build, "lstm": lstm.build, "opt": opt.build}[architecture]
    settings = {"vocab_size": 202, "pad_id": 200, "seed": 0}
    if architecture != "lstm":
        settings["max_length"] = 32
    if architecture == "opt":
        settings |= {"start_id": 201, "end_id": None}
    with torch.device("meta"):
        model = build(ModelConfig(architecture=architecture, size=name), **settings)
    size = sizes_of(architecture)[name]
    counted = num_parameters(size, vocab_size=202, max_length=32, architecture=architecture, pad_id=200)
    assert counted == sum(p.numel() for p in model.parameters())


def test_the_largest_model_has_the_papers_950_million():
    assert round(num_parameters(shape("d1920"), 30522, 512) / 1e6, -1) == 950


def test_an_unknown_size_names_the_choices():
    with pytest.raises(IsolossError, match=r"no model size 'd65'; the sizes are d16, d32, d64, .*d1920"):
        shape("d65")
    with pytest.raises(IsolossError, match=r"lstm has no model size 'd64'; its sizes are h16, .*h1024"):
        lstm_shape("d64")
    with pytest.raises(IsolossError, match=r"opt has no model size 'h16'; its sizes are d16, .*d1920"):
        check_size("opt", "h16")


def test_an_unknown_architecture_names_the_choices():
    with pytest.raises(
        IsolossError, match=r"no architecture 'gpt'; the architectures are bert, bert-pre-ln, lstm, opt"
    ):
        find_architecture("gpt")
    with pytest.raises(IsolossError, match=r"no architecture 'gpt'"):
        num_parameters(shape("d16"), 10, 10, "gpt")


def test_a_shape_of_another_kind_is_refused():
    with pytest.raises(IsolossError, match="a Shape is not a shape of the architecture lstm"):
        num_parameters(shape("d16"), 10, 10, "lstm")
    with pytest.raises(IsolossError, match="a LSTMShape is not a shape of the architecture bert"):
        num_parameters(lstm_shape("h16"), 10, 10)


def test_sizes_are_known_without_torch():
    code = "import sys, isoloss.models.sizes; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
