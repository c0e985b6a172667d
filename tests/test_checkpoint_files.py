"""Folders that hold no model as they are: adapters, outputs of trainers, parts, pointers, damaged configs."""

import copy
import importlib.util
import json
import shutil

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from isoloss import fisher_trace
from isoloss.checkpoints.loading import load_model, quiet
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab.languages.config import TeacherConfig

# peft asks transformers by a name that it is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

INPUT = torch.tensor([[1, 2, 3, 4]])
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 3\n"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=12, **sizes)).eval()


@pytest.fixture
def folder(model, tmp_path):
    with quiet():
        model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(model, tmp_path):
    with quiet():
        model.save_pretrained(tmp_path / "sharded", max_shard_size=4096)
    return tmp_path / "sharded"


def refused(message, folder):
    with pytest.raises(IsolossError, match=message) as caught:
        load_model(folder, device="cpu")
    assert "\n" not in str(caught.value)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("quantization", [None, {"quant_method": "of-tomorrow", "bits": 8}], ids=["none", "unknown"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_without_a_known_quantization_are_not_read_as_weights(dtype, quantization, folder):
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    coded = {**weights, name: (100 * weights[name]).to(dtype)}
    save_file(coded, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", quantization_config=quantization)
    refused(f"model holds {name} in (I8|F8_E4M3), and its config.json has no quantization_config that transf", folder)


# --- adapters


def adapted(base, config):
    """An adapter as after some training, with its base."""
    with quiet():
        return trained(get_peft_model(LlamaForCausalLM.from_pretrained(base), config))


def trained(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]),
        LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=["lm_head"], use_dora=True),
    ],
    ids=["lora", "dora and a head"],
)
def test_an_adapter_is_merged_into_its_base(config, model, folder, tmp_path):
    expected = adapted(folder, config)
    expected.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    loaded = load_model(tmp_path / "adapter", device="cpu")
    assert (loaded.kind, loaded.architecture, loaded.name) == ("causal", "LlamaForCausalLM", str(tmp_path / "adapter"))
    torch.testing.assert_close(loaded.model(INPUT).logits, expected(INPUT).logits)
    assert (loaded.model(INPUT).logits - model(INPUT).logits).abs().max() > 0.01
    # its flatness is over all weights of the merged model
    merged = LlamaForCausalLM(model.config).eval()
    merged.load_state_dict(loaded.model.state_dict())
    batch = {"input_ids": torch.arange(24).view(6, 4) % 12, "labels": torch.arange(24).view(6, 4) % 12}
    assert fisher_trace(loaded.model, [batch]).value == fisher_trace(merged, [batch]).value


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head", "embed_tokens"]}], ids=["frozen", "trained"])
def test_an_adapter_may_have_more_tokens_than_its_base(more, folder, tmp_path):
    base = LlamaForCausalLM.from_pretrained(folder)
    base.resize_token_embeddings(15, mean_resizing=False)
    expected = trained(get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], **more)))
    expected.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(folder))
    loaded = load_model(tmp_path / "adapter", device="cpu").model
    assert loaded.config.vocab_size == 15
    torch.testing.assert_close(loaded(INPUT).logits, expected(INPUT).logits)


def test_an_adapter_to_weights_drawn_at_random_is_refused(folder, tmp_path):
    """PEFT draws them anew as it loads the adapter, and gets another model each time."""
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa_niter_2")
    adapted(folder, config).save_pretrained(tmp_path / "adapter")
    refused(
        r"drawn at random from those of .*\(init_lora_weights is 'pissa_niter_2'\): convert it", tmp_path / "adapter"
    )


def test_an_adapter_can_be_a_teacher(folder, tmp_path):
    expected = adapted(folder, LoraConfig(r=2, target_modules=["q_proj"]))
    expected.save_pretrained(tmp_path / "adapter")
    teacher = TeacherConfig(checkpoint=str(tmp_path / "adapter"), tokens=(3, 4, 5), length=4, start_id=1).build()
    base = TeacherConfig(checkpoint=str(folder), tokens=(3, 4, 5), length=4, start_id=1).build()
    assert teacher.config.content != base.config.content


def test_adapters_that_cannot_be_merged(folder, tmp_path, monkeypatch):
    adapter, config = tmp_path / "adapter", tmp_path / "adapter" / "adapter_config.json"
    adapted(folder, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
    weights = load_file(adapter / "adapter_model.safetensors")
    more = {**weights, "base_model.model.lm_head.lora_A.weight": torch.ones(2, 16)}
    save_file(more, adapter / "adapter_model.safetensors")
    refused("weights in .* are not those of its adapter_config.json: base_model.model.lm_head.lora_A.weight$", adapter)
    save_file(dict([weights.popitem()]), adapter / "adapter_model.safetensors")
    refused(r"are not those of its adapter_config.json: base_model.model.model.layers.0.self_attn.q_proj.lora", adapter)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(f"adapter is an adapter of {folder}, which PEFT merges into it: pip install peft$", adapter)
    monkeypatch.undo()
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    refused(f"is an adapter of {folder} without adapter_model.safetensors$", adapter)
    edit(config, base_model_name_or_path=str(tmp_path / "gone"))
    (adapter / "adapter_model.bin").rename(adapter / "adapter_model.safetensors")
    refused("adapter is an adapter of .*gone: there is no checkpoint .*gone: it is not a folder", adapter)
    edit(config, base_model_name_or_path=None)
    refused("names no base_model_name_or_path", adapter)
    shutil.copy(config, folder)
    refused(r"holds a whole model and an adapter \(adapter_config.json\): move one of them", folder)


@pytest.mark.filterwarnings("ignore:.*`tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_one_of_two_tied_weights_is_not_merged_into_both(target, model, tmp_path):
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = True
    with quiet():
        LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
        adapted(tmp_path / "tied", LoraConfig(r=2, target_modules=[target])).save_pretrained(
            tmp_path / "adapter", save_embedding_layers=True
        )
    refused("adapter that cannot be merged into .*: merged, the model predicts otherwise", tmp_path / "adapter")


def test_a_prompt_is_not_merged(folder, tmp_path):
    prompt = adapted(folder, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    prompt.save_pretrained(tmp_path / "prompt")
    refused(r"is an adapter \(PROMPT_TUNING\) that cannot be merged into", tmp_path / "prompt")


# --- folders around checkpoints, parts and pointers


def test_the_output_of_a_trainer_names_its_last_checkpoint(folder, tmp_path):
    output = tmp_path / "output"
    for step in (500, 1000):
        shutil.copytree(folder, output / f"checkpoint-{step}")
    message = f"no config.json; name a checkpoint in it, such as {output}/checkpoint-1000$"
    refused(message, output)
    shutil.copy(folder / "config.json", output)
    refused(f"has no weights: name a checkpoint in it, such as {output}/checkpoint-1000$", output)


def test_what_git_leaves_of_a_file_without_lfs(folder):
    (folder / "model.safetensors").write_text(POINTER)
    refused(
        f"model.safetensors is a pointer of Git LFS, not the file itself: git -C {folder} lfs pull gets it$", folder
    )


def test_parts_of_weights_name_the_command_that_joins_them(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model_fsdp_0").mkdir()
    (folder / "pytorch_model_fsdp_0" / "__0_0.distcp").touch()
    refused(f"has no weights: FSDP .*: accelerate merge-weights {folder}/pytorch_model_fsdp_0 {folder}$", folder)
    (folder / "global_step10").mkdir()
    (folder / "pytorch_model.bin").touch()
    refused(
        "DeepSpeed saves weights in parts, and its zero_to_fp32.py, which puts them together, is not there$", folder
    )
    (folder / "zero_to_fp32.py").touch()
    refused(f": python {folder}/zero_to_fp32.py {folder} {folder} --safe_serialization$", folder)


def test_shards_without_their_index_or_one_of_them(model, sharded):
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 1
    torch.testing.assert_close(load_model(sharded, device="cpu").model(INPUT).logits, model(INPUT).logits)
    shards[1].rename(sharded / "away")
    refused(f"lacks {shards[1].name}, which its model.safetensors.index.json names: copy or download it too$", sharded)
    (sharded / "model.safetensors.index.json").unlink()
    refused(f"has no weights: {shards[0].name} is one shard, and model.safetensors.index.json, which", sharded)
    for path in sharded.glob("*.safetensors"):
        path.rename(sharded / "consolidated.safetensors")
    refused("there is no model.safetensors in it, but consolidated.safetensors$", sharded)


def test_an_index_names_safetensors_beside_it_alone(sharded, tmp_path):
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name, shard = next(iter(weight_map.items()))
    torch.save(load_file(sharded / shard), sharded / "pytorch_model.bin")
    shutil.copy(sharded / shard, tmp_path / "outside.safetensors")
    for other in ("pytorch_model.bin", "../outside.safetensors", str(tmp_path / "outside.safetensors"), 3):
        edit(index, weight_map={**weight_map, name: other})
        refused(f"names the file '{other}': it must be a .*safetensors file beside it$", sharded)
    edit(index, weight_map=[])
    refused("has no weight_map, which says what file each weight is in$", sharded)


def test_a_weight_is_read_from_the_shard_that_the_index_names(model, sharded):
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    first = min(weight_map, key=weight_map.get)
    last = sharded / max(weight_map.values())
    save_file({**load_file(last), first: torch.ones_like(model.state_dict()[first])}, last, metadata={"format": "pt"})
    with pytest.warns(IsolossWarning, match=f"transformers loads {first} with other values than are stored"):
        loaded = load_model(sharded, device="cpu").model
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    save_file({"nothing": torch.zeros(1)}, sharded / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(IsolossWarning, match=r"index.json of other files: as in transformers, model.safetensors is"):
        refused("lacks weights of LlamaForCausalLM", sharded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"transformers_weights": "other.safetensors"},
            r"names weights other than model.safetensors \(transformers_weights\)",
        ),
        *(
            ({"architectures": wrong}, "is not a model's config: its architectures are .*, not a list of names$")
            for wrong in ("LlamaForCausalLM", 3, [3])
        ),
        *(
            ({"model_type": wrong}, "is not a model's config: its model_type is .*, not a name$")
            for wrong in (["llama"], {"llama": 1}, 3)
        ),
    ],
)
def test_configs_that_are_no_models(changes, message, folder):
    edit(folder / "config.json", **changes)
    refused(f"config.json {message}", folder)
