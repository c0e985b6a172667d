"""Loading checkpoints: what transformers would load, and one clear sentence for everything else."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForPreTraining,
    FunnelConfig,
    FunnelForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from isoloss.checkpoints.loading import load_model, quiet
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab.models.architectures import BERT
from isoloss.model_checks import is_causal
from isoloss.run_config import ModelConfig

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 32}
NEO = {"hidden_size": 16, "num_layers": 2, "num_heads": 1, "attention_types": [[["global", "local"], 1]]}
BERT_CONFIG = BertConfig(vocab_size=12, **TINY)
INPUT = torch.tensor([[1, 2, 3, 4]])


@pytest.fixture
def bert_folder(tmp_path):
    folder = tmp_path / "a b" / "ü"
    with quiet():
        BERT.new_model(ModelConfig(size="d16"), vocab_size=12, max_length=6, pad_id=10, seed=0).save_pretrained(folder)
    return folder


def tiny(name):
    return tiny_models.build(tiny_models.known()[name], dtype=torch.float32)


def multimodal(name):
    model, config = (getattr(transformers, f"{name}{part}") for part in ("ForConditionalGeneration", "Config"))
    return tiny_models.build(tiny_models.Architecture(model, config, True), dtype=torch.float32)


def saved(model, folder):
    with quiet():
        model.save_pretrained(folder)
    return folder


def edit_config(folder, **changes):
    path = folder / "config.json"
    document = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def edit_weights(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def test_a_masked_model_loads_with_its_weights(bert_folder):
    loaded = load_model(bert_folder)
    assert (loaded.kind, loaded.architecture, loaded.name) == ("masked", "BertForMaskedLM", str(bert_folder))
    assert not loaded.model.training
    expected = BERT.new_model(ModelConfig(size="d16"), vocab_size=12, max_length=6, pad_id=10, seed=0).eval()
    torch.testing.assert_close(loaded.model(INPUT).logits, expected(INPUT).logits)


def test_dtype_and_attention_are_those_asked_for(bert_folder):
    loaded = load_model(str(bert_folder), dtype=torch.float64, attention="eager")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float64}
    assert loaded.model.config._attn_implementation == "eager"
    assert load_model(bert_folder).model.config._attn_implementation == "sdpa"


def test_attention_is_sdpa_where_the_architecture_has_it_else_eager(tmp_path):
    neo = saved(GPTNeoForCausalLM(GPTNeoConfig(vocab_size=12, **NEO)), tmp_path / "neo")
    llama = saved(LlamaForCausalLM(LlamaConfig(vocab_size=12, **TINY)), tmp_path / "llama")
    for folder, kernel in ((neo, "eager"), (llama, "sdpa")):
        edit_config(folder, _attn_implementation="flash_attention_2")  # as it was trained, elsewhere
        assert load_model(folder, device="cpu").model.config._attn_implementation == kernel
    refused("does not support an attention implementation through", neo, attention="sdpa")


def test_experts_compute_in_float64(tmp_path):
    config = MixtralConfig(vocab_size=12, num_key_value_heads=1, num_local_experts=2, **TINY)
    model = MixtralForCausalLM(config).double().eval()
    with torch.no_grad():
        model.set_experts_implementation("eager")
        expected = model(INPUT).logits
        loaded = load_model(saved(model, tmp_path / "model"), dtype=torch.float64, device="cpu")
        torch.testing.assert_close(loaded.model(INPUT).logits, expected)


@pytest.mark.parametrize(
    "name",
    [
        *("GPT2LMHeadModel", "LlamaForCausalLM", "BertLMHeadModel", "BertGenerationDecoder", "XLMWithLMHeadModel"),
        *("ReformerModelWithLMHead", "Emu3ForCausalLM", "MllamaForCausalLM", "Gemma3ForConditionalGeneration", "Llava"),
    ],
)
def test_a_causal_model_loads_and_is_causal(name, tmp_path):
    model = multimodal(name) if name == "Llava" else tiny(name)
    folder = saved(model, tmp_path / "model")
    if name.startswith("Bert"):
        edit_config(folder, is_decoder=True)
    if name.startswith("XLM"):
        edit_config(folder, causal=True)
    loaded = load_model(folder)
    assert (loaded.kind, loaded.architecture) == ("causal", type(model).__name__)
    changed = INPUT.clone()
    changed[0, -1] = 9
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(INPUT).logits[0, :-1], loaded.model(changed).logits[0, :-1])


@pytest.mark.parametrize("name", ["XLMWithLMHeadModel", "FlaubertWithLMHeadModel", "XLNetLMHeadModel"])
def test_a_model_that_sees_both_sides_is_masked_whatever_it_is_called(name, tmp_path):
    model = tiny(name)
    loaded = load_model(saved(model, tmp_path / "model"))
    assert (loaded.kind, loaded.architecture) == ("masked", name)
    assert not is_causal(loaded.model)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(INPUT).logits, model.eval()(INPUT).logits)


def test_a_published_checkpoint_loads(shared_data):
    loaded = load_model(shared_data / "stories260K" / "hf")
    assert (loaded.kind, loaded.architecture) == ("causal", "LlamaForCausalLM")
    assert loaded.model(INPUT).logits.isfinite().all()


def test_bert_as_google_trained_it_loads_as_a_masked_model(tmp_path, capfd):
    model = BertForPreTraining(BertConfig(vocab_size=12, **TINY)).eval()
    saved(model, tmp_path / "model")
    capfd.readouterr()
    with pytest.warns(IsolossWarning) as told:
        loaded = load_model(tmp_path / "model")
    assert capfd.readouterr() == ("", "")  # transformers reports the dropped next-sentence head at length
    assert loaded.kind == "masked"
    torch.testing.assert_close(loaded.model(INPUT).logits, model(INPUT).prediction_logits)
    assert [str(warning.message) for warning in told] == [
        f"{tmp_path / 'model'} has parts that a BertForMaskedLM does not have, and they are left out: "
        "bert.pooler.dense, cls.seq_relationship"
    ]


def test_quiet_restores_what_it_silenced():
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with quiet():
        assert not logging.is_progress_bar_enabled()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# --- weights that the model has no place for


LLAMA = LlamaConfig(vocab_size=12, **TINY)
NORM = "model.layers.0.self_attn.q_norm.weight"
LORA = "model.layers.0.self_attn.q_proj.lora_A.default.weight"


def with_weights(folder, model, **added):
    saved(model, folder)
    edit_weights(folder, lambda tensors: tensors.update(added))
    return folder


def assert_same(folder, model, **options):
    with torch.no_grad():
        torch.testing.assert_close(load_model(folder, **options).model(INPUT).logits, model.eval()(INPUT).logits)


def test_biases_that_the_config_does_not_announce_are_not_dropped(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=12, attention_bias=True, **TINY))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.1 * name.endswith("bias"))
    folder = saved(model, tmp_path / "model")
    assert_same(folder, model)
    edit_config(folder, attention_bias=False)
    refused(r"self_attn.k_proj.bias, .* 1 more; .*correct config.json, or .* \(--ignore-unexpected-weights\)$", folder)
    with pytest.warns(IsolossWarning, match="they are left out, and without them it is another function"):
        left_out = load_model(folder, ignore_unexpected_weights=True).model
    without = LlamaForCausalLM(LLAMA).eval()
    without.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(left_out(INPUT).logits, without(INPUT).logits)


@pytest.mark.parametrize("name", [NORM, LORA, "lm_head.bias", "model.norm.bias", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_inside_a_module_is_not_dropped(name, tmp_path):
    folder = with_weights(tmp_path / "model", LlamaForCausalLM(LLAMA), **{name: torch.ones(16)})
    refused(f"has weights that a LlamaForCausalLM with its config.json does not have: {name}; without", folder)


def test_heads_of_other_tasks_are_left_out_with_a_warning(tmp_path):
    model = LlamaForCausalLM(LLAMA)
    added = {"v_head.summary.weight": torch.ones(1, 16), "model.vision_tower.patches.bias": torch.ones(16)}
    folder = with_weights(tmp_path / "model", model, **added)
    with pytest.warns(IsolossWarning, match=r"they are left out: model.vision_tower.patches, v_head.summary$"):
        assert_same(folder, model)


def test_constants_that_older_versions_stored_are_no_weights(tmp_path):
    llama, gpt2 = LlamaForCausalLM(LLAMA), GPT2LMHeadModel(GPT2Config(vocab_size=12, n_embd=16, n_layer=1, n_head=1))
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert_same(with_weights(tmp_path / "llama", llama, **rotary), llama)
    mask = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    folder = with_weights(tmp_path / "gpt2", gpt2, **mask)
    edit_weights(folder, lambda tensors: rename(tensors, lambda name: name.removeprefix("transformer.")))
    assert_same(folder, gpt2)  # as the first GPT-2 on the hub is stored
    edit_weights(folder, lambda tensors: tensors.update({"h.0.attn.q_norm.weight": torch.ones(16)}))
    refused("does not have: h.0.attn.q_norm.weight; without", folder)


def rename(tensors, change):
    renamed = {change(name): value for name, value in tensors.items()}
    tensors.clear()
    tensors.update(renamed)


@pytest.mark.parametrize("prefix", ["module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_left_out_with_a_warning(prefix, tmp_path):
    model = LlamaForCausalLM(LLAMA)
    folder = saved(model, tmp_path / "model")
    edit_weights(folder, lambda tensors: rename(tensors, lambda name: prefix + name))
    with pytest.warns(IsolossWarning, match="prefixes of torch.compile or DataParallel in their names"):
        assert_same(folder, model)
    with pytest.warns(IsolossWarning, match="prefixes"):
        again = load_model(folder).model
    assert_same(saved(again, tmp_path / "again"), model)


def test_other_prefixes_are_missing_weights_and_named(tmp_path):
    folder = saved(LlamaForCausalLM(LLAMA), tmp_path / "model")
    edit_weights(folder, lambda tensors: rename(tensors, lambda name: f"student.{name}"))
    refused(r"lacks weights of LlamaForCausalLM: lm_head.weight, .*, and holds others, student\.", folder)


def test_the_padding_tokens_embedding_is_as_it_was_saved(tmp_path):
    config = FunnelConfig(vocab_size=12, d_model=16, n_head=2, d_head=8, d_inner=24, block_sizes=[1], pad_token_id=0)
    model = FunnelForMaskedLM(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 1.0  # transformers sets it to zero as it loads a Funnel
    folder = saved(model, tmp_path / "model")
    with pytest.warns(IsolossWarning, match=r"word_embeddings.weight with other values than are stored"):
        assert_same(folder, model, attention="eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_architecture_is_loaded_as_it_was_saved(tmp_path):
    """A new version of transformers may change weights as it loads them, or drop or miss some in silence."""
    loaded, refusals = 0, []
    for architecture in tiny_models.architectures():
        try:
            model = tiny_models.build(architecture, dtype=torch.float32)
        except Exception:
            continue
        folder = saved(model, tmp_path / architecture.name)
        if hasattr(model.config, "is_decoder") and architecture.causal:
            edit_config(folder, is_decoder=True)
        try:
            again = load_model(folder, attention="eager", device="cpu").model
        except IsolossError as error:
            refusals.append(str(error))
            continue
        torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
        save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
        refused("lacks weights of", folder, attention="eager")
        loaded += 1
    assert loaded > 150
    assert [each for each in refusals if not re.search("head is needed|Unrecognized config|is_decoder", each)] == []


# --- what is refused


def refused(message, source, **arguments):
    with pytest.raises(IsolossError, match=message) as caught:
        load_model(source, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("./missing", {}, "is not a folder"),
        ("BERT", {"revision": "main"}, "the revision is 'main', and .* is a folder"),
        ("owner/model@b", {"revision": "a"}, "the revision is 'a', and owner/model@b names another one"),
        ("BERT", {"attention": "fastest"}, "cannot be loaded: .*fastest"),
    ],
)
def test_what_is_no_checkpoint_and_no_option(source, options, message, bert_folder):
    refused(message, bert_folder if source == "BERT" else source, **options)


def test_a_name_that_cannot_be_fetched(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = "no-such-owner/no-such-model"
    refused(f"there is no checkpoint {name} on this machine, and the Hugging Face hub does not answer$", name)


class CountingHub(BaseHTTPRequestHandler):
    """A hub that has nothing, and counts what it is asked."""

    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def test_a_path_is_never_asked_for_on_the_hub_and_a_name_once(tmp_path):
    (tmp_path / "runs" / "first" / "checkpoints" / "step-100").mkdir(parents=True)
    paths = {
        "runs/frist": "runs/first",
        "runs/frist/checkpoints/step-100": "runs/first/checkpoints/step-100",
        "./runz": "runs",
        "step-100": None,
        "~/no-such-folder": None,
        "runs/first/": None,
    }
    names = ["someone/something", "rusn"]
    code = """
import sys
from isoloss.errors import IsolossError
from isoloss.checkpoints.loading import load_model
for name in sys.argv[1:]:
    if name == "wait":
        sys.stdin.readline()
        continue
    try:
        load_model(name)
    except IsolossError as error:
        print(error, flush=True)
"""
    with HTTPServer(("127.0.0.1", 0), CountingHub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", code, *paths, *names, "wait", *names]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=env, cwd=tmp_path, text=True, **pipes)
        said = [process.stdout.readline().rstrip() for _ in (*paths, *names)]
        server.shutdown()
        thread.join()
    # nobody answers any more
    gone, problems = process.communicate("go on\n", timeout=60)
    assert problems == ""
    for (path, meant), line in zip(paths.items(), said, strict=False):
        assert path.rstrip("/") in line
        assert line.endswith(f"did you mean {meant}?") == (meant is not None)
    of_models = [path for path in CountingHub.asked if path != "/api/agent-harnesses"]  # of the hub's own library
    assert of_models == ["/api/models/someone/something", "/api/models/rusn"]
    on_hub = "neither a folder here nor on the Hugging Face hub"
    assert said[-2:] == [
        f"there is no checkpoint someone/something, {on_hub}",
        f"there is no checkpoint rusn, {on_hub}; did you mean runs?",
    ]
    away = "on this machine, and the Hugging Face hub does not answer"
    assert gone.splitlines() == [
        f"there is no checkpoint someone/something {away}",
        f"there is no checkpoint rusn {away}; did you mean runs?",
    ]


def test_the_hubs_models_are_taken_from_its_cache_and_never_as_a_pickle(bert_folder, tmp_path, monkeypatch):
    for name in ("good", "pickled"):
        repository = tmp_path / "hub" / f"models--owner--{name}"
        shutil.copytree(bert_folder, repository / "snapshots" / "1")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("1")
    pickled = repository / "snapshots" / "1"
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    tagged = tmp_path / "hub" / "models--owner--good"
    shutil.copytree(bert_folder, tagged / "snapshots" / "2")
    weights = load_file(bert_folder / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, tagged / "snapshots" / "2" / "model.safetensors")
    (tagged / "refs" / "tagged").write_text("2")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    good, older, again = (
        load_model(name, revision=revision)
        for name, revision in (("owner/good", None), ("owner/good@tagged", None), ("owner/good", "tagged"))
    )
    number = sum(value.numel() for value in good.model.parameters())
    name = "owner/good@tagged"
    assert (good.kind, older.name, again.name) == ("masked", name, name)
    assert repr(older) == f"LoadedModel({name}: BertForMaskedLM, masked, {number:,} parameters)"
    for loaded in (older, again):
        for a, b in zip(good.model.parameters(), loaded.model.parameters(), strict=True):
            assert (b - a - 1).abs().max() < 1e-5
    refused("owner/pickled cannot be loaded from earlier downloads, .*: .* only as a pickle", "owner/pickled")
    there = "on this machine, only main, tagged, and the Hugging Face hub does not answer$"
    refused(f"there is no checkpoint owner/good@other {there}", "owner/good@other")
    (tagged / "snapshots" / "2" / "config.json").unlink()
    refused("owner/good@tagged cannot be loaded from earlier .*: .* it has no config.json$", "owner/good@tagged")


def test_a_model_in_the_hubs_cache_is_loaded_at_once_where_there_is_no_network(bert_folder, tmp_path):
    """Without HF_HUB_OFFLINE, transformers asks an unreachable hub for an adapter again and again."""
    repository = tmp_path / "home" / "hub" / "models--owner--model"
    (repository / "refs").mkdir(parents=True)
    for ref, commit in (("main", "a" * 40), ("step2", "b" * 40)):
        shutil.copytree(bert_folder, repository / "snapshots" / commit)
        (repository / "refs" / ref).write_text(commit)
    code = """
from isoloss.checkpoints.places import expand_checkpoints
from isoloss.checkpoints.loading import load_model
for name in ["owner/model", *expand_checkpoints(["owner/model@step*"]), "owner/model@" + 40 * "b"]:
    print(load_model(name, device="cpu").name)
"""
    env = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "HF_HUB_CACHE")}
    env |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": "http://127.0.0.1:9"}  # nobody is there
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.splitlines() == ["owner/model", "owner/model@step2", f"owner/model@{40 * 'b'}"], done.stderr
    assert "Retry" not in done.stderr
    assert "that were downloaded before are used" in done.stderr


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def only_a_pickle(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


MISSING = "bert.embeddings.LayerNorm.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "is not a checkpoint: it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not a readable JSON file"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is not a model's config"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (lambda folder: truncate(folder / "model.safetensors"), "the weights in .* are damaged"),
        (
            only_a_pickle,
            r"only as a pickle \(pytorch_model.bin\), and loading a pickle can run any code; read it with torch.load",
        ),
        (lambda folder: edit_config(folder, architectures=None), "names no architecture in its config.json"),
        (lambda folder: edit_config(folder, model_type="nobody"), "has the model type 'nobody', which this version of"),
        (
            lambda folder: edit_config(folder, max_position_embeddings=7),
            "another shape .*: bert.*position_embeddings.weight$",
        ),
        (lambda folder: edit_config(folder, hidden_size=65), "cannot be loaded|another shape"),
        (lambda folder: edit_config(folder, hidden_size="a"), "cannot be loaded"),
        (lambda folder: edit_config(folder, hidden_act="blah"), "cannot be loaded"),
        (lambda folder: edit_config(folder, num_hidden_layers=10**6), "num_hidden_layers is 1,000,000: one of the two"),
        (
            lambda folder: edit_config(folder, vocab_size=10**9),
            "config.json is of a model with [0-9,]+: one of the two",
        ),
        (lambda folder: edit_weights(folder, lambda tensors: tensors.pop(MISSING)), f"lacks weights of .*: {MISSING}$"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_is_wrong_with_a_folder_is_one_sentence(spoil, message, bert_folder):
    spoil(bert_folder)
    refused(message, bert_folder)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (lambda: transformers.BertModel(BERT_CONFIG), {}, "is a BertModel: a model with a language-modeling head is"),
        (lambda: transformers.BertForSequenceClassification(BERT_CONFIG), {}, "a model with a language-modeling head"),
        # a head would be newly initialized
        (
            lambda: transformers.BertModel(BERT_CONFIG, add_pooling_layer=False),
            {"architectures": ["BertForMaskedLM"]},
            "lacks weights of BertForMaskedLM: cls.predictions",
        ),
        (
            lambda: transformers.BertForMaskedLM(BERT_CONFIG),
            {"architectures": ["BertLMHeadModel"]},
            "is a BertLMHeadModel without is_decoder",
        ),
        # it is run to learn that it sees ahead
        (
            lambda: tiny("BertGenerationDecoder"),
            {"is_decoder": False},
            "is a BertGenerationDecoder.*: it sees the tokens that it would predict",
        ),
        (lambda: tiny("CpmAntForCausalLM"), {}, "is a CpmAntForCausalLM: it sees the tokens that it would predict"),
        (lambda: multimodal("Bart"), {}, "is a BartForConditionalGeneration: .* and no encoder-decoder"),
        (
            lambda: multimodal("Blip2"),
            {},
            "Blip2ForConditionalGeneration that does not run on token ids alone: .*'pixel_values'",
        ),
        (
            lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=1, n_embd=8, n_layer=1, n_head=1)),
            {},
            "has a vocabulary of 1 token, so the ids of any tokenizer are beyond it",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_models_that_predict_no_tokens_of_text_alone(make, changes, message, tmp_path):
    folder = saved(make(), tmp_path / "model")
    edit_config(folder, **changes)
    refused(message, folder)


def test_remote_code_runs_only_when_trusted(bert_folder, tmp_path):
    marker = tmp_path / "ran"
    (bert_folder / "own.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import BertConfig, BertForMaskedLM\n"
        "class OwnConfig(BertConfig):\n    model_type = 'own'\n"
        "class OwnForMaskedLM(BertForMaskedLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForMaskedLM": "own.OwnForMaskedLM"}
    edit_config(bert_folder, model_type="own", auto_map=auto_map, architectures=["OwnForMaskedLM"])
    refused("brings its own code for its model type 'own'", bert_folder)
    assert not marker.exists()
    loaded = load_model(bert_folder, trust_remote_code=True)
    assert marker.exists()
    assert type(loaded.model).__name__ == "OwnForMaskedLM"
    expected = BERT.new_model(ModelConfig(size="d16"), vocab_size=12, max_length=6, pad_id=10, seed=0).eval()
    torch.testing.assert_close(loaded.model(INPUT).logits, expected(INPUT).logits)


SCALED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scale", torch.arange(1.0, 1 + config.hidden_size), persistent=False)
        self.post_init()
    def forward(self, input_ids=None, **options):
        return super().forward(inputs_embeds=self.model.embed_tokens(input_ids) * self.scale, **options)
"""


def test_constants_of_code_of_its_own_are_those_that_it_makes(tmp_path):
    """transformers 5 leaves what is in memory where code of its own keeps buffers that are not stored."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=12, **TINY)).eval()
    folder = saved(model, tmp_path / "model")
    (folder / "own.py").write_text(SCALED)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_config(folder, model_type="own", auto_map=auto_map, architectures=["OwnForCausalLM"])
    loaded = load_model(folder, trust_remote_code=True, device="cpu").model
    assert torch.equal(loaded.scale, torch.arange(1.0, 17.0))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(torch.arange(1.0, 17.0))
        torch.testing.assert_close(loaded(INPUT).logits, model(INPUT).logits)


def test_rwkv_keeps_its_weights_and_a_config_may_ask_for_tuples(tmp_path):
    config = RwkvConfig(vocab_size=12, hidden_size=8, num_hidden_layers=4, rescale_every=2, context_length=8)
    model = RwkvForCausalLM(config)
    folder = saved(model, tmp_path / "model")
    loaded = load_model(folder, device="cpu").model
    # it has run: with rescale_every, its third and fourth layers would be divided by 2
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    folder = saved(LlamaForCausalLM(LlamaConfig(vocab_size=12, **TINY)), tmp_path / "tuples")
    edit_config(folder, return_dict=False)
    assert load_model(folder, device="cpu").model(INPUT).logits.shape == (1, 4, 12)
