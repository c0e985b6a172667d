"""Sizes by name, against the paper's tables and against the models that are built from them."""

import subprocess
import sys

import pytest
import torch

from isoloss import config as configs
from isoloss.errors import IsolossError
from isoloss.lab.models.architectures import BERT, LSTM, LSTM_SIZES, SIZES, LSTMShape, Shape, shape
from isoloss.registry import MODELS
from isoloss.run_config import ModelConfig

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
ARCHITECTURES = {name: MODELS.load(name) for name in MODELS}
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


@pytest.mark.parametrize(
    ("architecture", "name"), [(a, name) for a in ARCHITECTURES for name in ARCHITECTURES[a].sizes]
)
def test_the_closed_form_counts_the_built_models_parameters(architecture, name):
    own = ARCHITECTURES[architecture]
    config = ModelConfig(architecture=architecture, size=name)
    with torch.device("meta"):
        model = own.new_model(config, vocab_size=202, pad_id=200, max_length=32, start_id=201, seed=0)
    counted = own.num_parameters(own.sizes[name], vocab_size=202, max_length=32, pad_id=200)
    assert counted == sum(p.numel() for p in model.parameters())


def test_the_largest_model_has_the_papers_950_million():
    assert round(BERT.num_parameters(shape("d1920"), 30522, 512) / 1e6, -1) == 950


FREE = [
    ModelConfig(size="d16", width=24, heads=3, layers=2, ffn=20),
    ModelConfig(size="d64", heads=4),
    ModelConfig(architecture="bert-pre-ln", size="d16", layers=3, heads=8),
    ModelConfig(architecture="opt", size="d32", width=12, heads=2),
    ModelConfig(architecture="lstm", size="h16", layers=3, width=5),
    ModelConfig(architecture="lstm", size="h32", layers=2, directions=1),
    ModelConfig(architecture="lstm", size="h16", width=7, directions=1),
]


@pytest.mark.parametrize("config", FREE, ids=lambda config: config.architecture)
def test_a_free_shape_is_what_is_built_and_counted(config):
    own = ARCHITECTURES[config.architecture]
    model = own.new_model(config, vocab_size=13, pad_id=11, max_length=6, start_id=12, seed=0)
    size = own.sizes[config.size]
    built = model.config
    assert built.num_hidden_layers == (config.layers or size.num_layers)
    if config.architecture == "lstm":
        assert built.hidden_size == (config.width or size.hidden)
        assert built.num_directions == config.directions
    else:
        assert built.hidden_size == (config.width or size.d_model)
        assert built.num_attention_heads == (config.heads or size.num_heads)
        inner = built.ffn_dim if config.architecture == "opt" else built.intermediate_size
        assert inner == (config.ffn or 4 * built.hidden_size)
    counted = own.num_parameters(own.shape(config), 13, 6, pad_id=11)
    assert counted == sum(p.numel() for p in model.parameters())


def test_a_size_without_changes_is_its_shape():
    for name, architecture in ARCHITECTURES.items():
        for size, named in architecture.sizes.items():
            assert architecture.shape(ModelConfig(architecture=name, size=size)) == named


@pytest.mark.parametrize(("layers", "millions"), [(8, 67), (16, 134)])
def test_the_papers_lstms_read_one_way(layers, millions):
    """Without embeddings; the paper prints 67M and 135M."""
    config = ModelConfig(architecture="lstm", size="h1024", layers=layers, directions=1)
    with torch.device("meta"):
        model = LSTM.new_model(config, vocab_size=202, pad_id=200, max_length=32, seed=0)
    inner = sum(p.numel() for name, p in model.lstm.named_parameters() if not name.startswith("embeddings"))
    assert round(inner / 1e6) == millions
    assert inner == LSTM.num_parameters(LSTMShape(1024, layers, 1), 0, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(heads=3), "3 heads cannot divide the width 64 evenly; .* can be 1, 2, 4, 8, 16, 32, 64"),
        (ModelConfig(size="d192", width=64), "3 heads cannot divide the width 64 evenly"),
        (ModelConfig(dropout=1.0), "dropout is 1.0; it must be at least 0 and below 1"),
        (ModelConfig(architecture="opt", directions=1), "directions is 1, but opt is not an LSTM: leave it out"),
        (
            ModelConfig(architecture="lstm", size="h16", heads=2, ffn=3),
            "an LSTM has no attention heads and no feed-forward blocks: leave out heads and ffn",
        ),
        (ModelConfig(architecture="lstm", size="h16", heads=2), "leave out heads$"),
        (ModelConfig(architecture="lstm", size="h16", directions=3), "directions is 3; it must be one of 1, 2"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(config, message):
    with pytest.raises(IsolossError, match=message):
        configs.check(config)


def test_a_config_without_a_size_has_its_architectures():
    assert [ModelConfig(architecture=name).size for name in ARCHITECTURES] == [
        "d64",
        "d64",
        "h64",
        "d64",
        "d64",
        "d64",
        "m64",
    ]
    assert str(ModelConfig(architecture="lstm", directions=1, layers=3)) == "lstm h64, layers 3, directions 1"


def test_an_unknown_size_or_architecture_names_the_choices():
    with pytest.raises(IsolossError, match=r"no model size 'd65'; the sizes are d16, d32, d64, .*d1920"):
        shape("d65")
    with pytest.raises(IsolossError, match=r"lstm has no model size 'd64'; its sizes are h16, .*h1024"):
        configs.check(ModelConfig(architecture="lstm", size="d64"))
    with pytest.raises(IsolossError, match=r"opt has no model size 'h16'; its sizes are d16, .*d1920"):
        configs.check(ModelConfig(architecture="opt", size="h16"))
    with pytest.raises(
        IsolossError, match=r"no model 'gpt'; did you mean opt\? the models are bert, bert-pre-ln, lstm, opt"
    ):
        configs.check(ModelConfig(architecture="gpt"))


def test_sizes_are_known_without_torch():
    code = "import sys, isoloss.lab.models.architectures; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
