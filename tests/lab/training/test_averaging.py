"""The mean of checkpoints, and what has none: it is refused in one sentence with both values."""

import json
import shutil

import pytest
import torch
from running import small, trained
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from isoloss import average_checkpoints
from isoloss.checkpoints.loading import load_model
from isoloss.cli.main import main
from isoloss.errors import IsolossError, IsolossWarning

UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = [f"w{number}" for number in range(10)]


@pytest.fixture
def make(tmp_path):
    """A function that saves a small Llama with a tokenizer of words."""

    def made(name, *, words=WORDS, normalizer=None, **config):
        torch.manual_seed(len(list(tmp_path.iterdir())))
        sizes = {"vocab_size": 12, "num_key_value_heads": 2, **SIZES, **config}
        LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / name)
        backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", "_", *words])}, unk_token="?"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        if normalizer is not None:
            backend.normalizer = normalizer
        PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", pad_token="_").save_pretrained(tmp_path / name)
        return tmp_path / name

    return made


def edit_config(folder, **changes):
    path = folder / "config.json"
    document = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
    return folder


def edit_weights(folder, edit):
    path = folder / "model.safetensors"
    changed = {name: edit(name, tensor).contiguous() for name, tensor in load_file(path).items()}
    save_file(changed, path, metadata={"format": "pt"})
    return folder


def refused(message, *folders):
    output = folders[0].parent / "mean"
    with pytest.raises(IsolossError, match=message) as caught:
        average_checkpoints(folders, output)
    assert "\n" not in str(caught.value)
    assert not output.exists()


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_the_mean_of_checkpoints_is_a_checkpoint(tmp_path, capsys):
    run = trained(tmp_path / "run", small(checkpoints=(4, 7)))
    folders = [run.checkpoint(4), run.checkpoint(7), run.path]
    assert main(["average", *map(str, folders), "--output", str(tmp_path / "soup")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'soup'}: the mean of 3 checkpoints\n"
    made = AutoModelForMaskedLM.from_pretrained(tmp_path / "soup", local_files_only=True)
    parts = [weights(run.checkpoint(step)) for step in (4, 7, 10)]
    for name, parameter in made.named_parameters():
        expected = sum(part[name].double() for part in parts) / 3
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-6, atol=1e-8)
    assert sorted(path.name for path in (tmp_path / "soup").iterdir()) == ["config.json", "model.safetensors"]


def test_weights_in_several_files_are_averaged(tmp_path):
    model = load_model(str(trained(tmp_path / "run", small()).checkpoint(10))).model
    model.save_pretrained(tmp_path / "whole")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    average_checkpoints([tmp_path / "whole", tmp_path / "shards"], tmp_path / "mean")
    got, start = weights(tmp_path / "mean"), weights(tmp_path / "whole")
    assert got.keys() == start.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, start[name] + 0.5)


def test_one_checkpoint_no_checkpoint_and_a_full_folder(tmp_path, capsys, make):
    first = make("first")
    refused("there is one checkpoint to average: name at least two", first)
    refused("none is not a checkpoint folder", first, tmp_path / "none")
    assert main(["average", str(first), str(first), "--output", str(first)]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"words": WORDS[::-1]},
            r"first and .*second have different tokenizers.*: 'w0' is token 2 of .*first and token 11 of .*second$",
        ),
        ({"normalizer": normalizers.Lowercase()}, "the normalizer is nothing in .*first and Lowercase in .*second$"),
        ({"hidden_act": "relu"}, "hidden_act is 'silu' in .*first and 'relu' in .*second, so they are different"),
        ({"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}, "rope_theta is 10000.0 in .* and 50.0 in"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, "num_attention_heads is 2 in .* and 4 in"),
        ({"hidden_size": 16}, "hidden_size is 8 in .* and 16 in"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 1 in .* and 2 in"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_functions_have_no_mean(make, changes, message):
    refused(message, make("first"), make("second", **changes))


def test_other_types_of_models_have_no_mean(make):
    second = edit_config(make("second"), model_type="mistral", architectures=["MistralForCausalLM"])
    refused("model_type is 'llama' in .*first and 'mistral' in", make("first"), second)


def test_a_config_of_code_of_its_own_is_compared_as_it_is_written(make, tmp_path):
    first, second = (edit_config(make(name), model_type="own", auto_map={"AutoConfig": name}) for name in ("a", "b"))
    average_checkpoints([first, second], tmp_path / "own")
    edit_config(second, width=2)
    refused("width is None in .* and 2 in", first, second)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_have_no_mean(make, dtype):
    second = edit_weights(make("second"), lambda name, w: (100 * w).to(dtype) if name == UP else w)
    refused(f"second holds {UP} in (I8|F8_E4M3), and its config.json has no quantization_config", make("first"), second)
    edit_config(second, quantization_config={"quant_method": "gptq"})
    refused("second has quantized weights", make("first"), second)


def test_integers_have_a_mean_only_where_they_are_equal(make, tmp_path):
    def stored(value):
        return lambda name, w: torch.full((2,), value) if name == NORM.replace("weight", "count") else w

    folders = [make(name) for name in ("a", "b")]
    for folder in folders:
        path = folder / "model.safetensors"
        save_file({**load_file(path), "model.norm.count": torch.full((2,), 7)}, path, metadata={"format": "pt"})
    average_checkpoints(folders, tmp_path / "equal")
    assert load_file(tmp_path / "equal" / "model.safetensors")["model.norm.count"].tolist() == [7, 7]
    edit_weights(folders[1], stored(8))
    refused(r"model.norm.count is torch.int64 in .*a and .* in .*b, and integers that differ have no mean", *folders)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_what_is_not_finite_has_no_mean(make, value):
    second = edit_weights(
        make("second"), lambda name, w: w.index_fill(0, torch.tensor([3]), value) if name == NORM else w
    )
    refused(f"{NORM} in .*second holds {value}, so there is no mean", make("first"), second)


def test_a_mean_too_large_for_its_type_is_refused(make):
    first = edit_weights(make("first"), lambda _, w: w + 1e6)
    second = edit_weights(make("second"), lambda _, w: w.half())
    with pytest.warns(IsolossWarning, match="F32 in .*first and F16 in .*second"):
        refused(r"is too large for torch\.float16, the type of .*second", first, second)


def test_types_may_differ_with_a_warning(make, tmp_path):
    first, second = make("first"), edit_weights(make("second"), lambda _, w: w.bfloat16())
    with pytest.warns(IsolossWarning, match=r"is F32 in .*first and BF16 in .*second: .* type of the last checkpoint$"):
        average_checkpoints([first, second], tmp_path / "mean")
    one, other, mean = (load_file(tmp_path / name / "model.safetensors")[UP] for name in ("first", "second", "mean"))
    assert torch.equal(mean, ((one.double() + other.double()) / 2).bfloat16())


def test_one_folder_counts_once(make, tmp_path):
    first = make("first")
    (tmp_path / "link").symlink_to(first)
    for again in (first, tmp_path / "link", first / ".." / "first"):
        refused("is named twice", first, again)
    shutil.copytree(first, tmp_path / "copy")
    with pytest.warns(IsolossWarning, match="first and .*copy have the same weights, which count twice"):
        average_checkpoints([first, tmp_path / "copy", make("second")], tmp_path / "mean")


def test_damaged_files_are_named(make):
    first, second = make("first"), make("second")
    (second / "tokenizer.json").write_text("{")
    refused("second holds no tokenizer that transformers can load: .*tokenizer.json is not a readable", first, second)
    weights = second / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    refused("the weights in .*second are damaged", first, second)
    edit_config(second, hidden_size="a")
    refused("the weights in .*second are damaged", first, second)


def test_leftovers_of_tools_are_no_difference(make, tmp_path):
    first, second = make("first"), make("second")
    edit_config(
        second,
        _name_or_path="elsewhere",
        transformers_version="4.30.0",
        torch_dtype="bfloat16",
        use_cache=False,
        bos_token_id=5,
        eos_token_id=[1, 2],
        attention_dropout=0.1,
        unsloth_version="2024.9",
        rope_parameters=None,
        rope_theta=10000.0,  # as older versions wrote it
    )
    (second / "tokenizer_config.json").write_text(
        json.dumps({**json.loads((second / "tokenizer_config.json").read_text()), "model_max_length": 77})
    )
    average_checkpoints([first, second], tmp_path / "mean")
    edit_config(second, pad_token_id=3)
    with pytest.warns(IsolossWarning, match="pad_token_id is None in .*first and 3 in .*second, which matters for few"):
        average_checkpoints([first, second], tmp_path / "again")
