"""Sizes by name, against the paper's table and against the models that are built from them."""

import subprocess
import sys

import pytest
import torch

from isoloss.config import ModelConfig
from isoloss.errors import IsolossError
from isoloss.models import bert, opt
from isoloss.models.sizes import SIZES, Shape, find_architecture, num_parameters, shape

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


def test_the_sizes_are_the_papers_table():
    rows = [Shape(*map(int, line.split())) for line in TABLE_3.split("\n") if line]
    assert [shape(f"d{row.d_model}") for row in rows] == rows
    assert set(SIZES) == {"d16", "d32", *(f"d{row.d_model}" for row in rows)}


@pytest.mark.parametrize("name", SIZES)
def test_the_closed_form_counts_the_built_models_parameters(name):
    with torch.device("meta"):
        settings = {"vocab_size": 202, "max_length": 32, "pad_id": 200, "seed": 0}
        models = {
            "bert": bert.build(ModelConfig(size=name), **settings),
            "opt": opt.build(ModelConfig(size=name), start_id=201, end_id=None, **settings),
        }
    for architecture, model in models.items():
        counted = num_parameters(shape(name), vocab_size=202, max_length=32, architecture=architecture)
        assert counted == sum(p.numel() for p in model.parameters())


def test_an_unknown_size_names_the_choices():
    with pytest.raises(IsolossError, match=r"no model size 'd65'; the sizes are d16, d32, d64, .*d1536"):
        shape("d65")


def test_an_unknown_architecture_names_the_choices():
    with pytest.raises(IsolossError, match=r"no architecture 'gpt'; the architectures are bert, opt"):
        find_architecture("gpt")
    with pytest.raises(IsolossError, match=r"no architecture 'gpt'"):
        num_parameters(shape("d16"), 10, 10, "gpt")


def test_sizes_are_known_without_torch():
    code = "import sys, isoloss.models.sizes; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
