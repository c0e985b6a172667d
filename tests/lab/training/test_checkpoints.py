"""Checkpoint folders: whole, loadable by transformers, and refused when they are damaged or of another run."""

import json

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertTokenizerFast

from isoloss import config as configs
from isoloss import files
from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.models.architectures import BERT
from isoloss.lab.training.checkpoints import TrainerState, load, load_weights, remove_except, save, weights_sha256
from isoloss.run_config import ModelConfig, OptimizerConfig, TrainConfig
from isoloss.runs import Run

INPUT = torch.tensor([[1, 2, 9, 4]])
CONFIG = TrainConfig(language=PCFGConfig(), batch_size=8)
STATE = TrainerState(step=7, config=configs.identity(CONFIG), loss_sum_nats=0.1 + 0.2, loss_count=3, initial_sha256="a")


def model(seed=0, size="d16"):
    return BERT.new_model(ModelConfig(size=size), vocab_size=10, max_length=4, pad_id=8, seed=seed)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "step-7"
    save(path, model(), {"exp_avg/x": torch.arange(3.0), "step/x": torch.tensor(7.0)}, STATE)
    return path


def test_what_is_saved_is_loaded_to_the_last_bit(folder):
    other = model(seed=1)
    state, tensors = load(folder, other, config=CONFIG)
    assert state == STATE
    assert torch.equal(tensors["exp_avg/x"], torch.arange(3.0))
    assert torch.equal(tensors["step/x"], torch.tensor(7.0))
    for got, want in zip(other.state_dict().values(), model().state_dict().values(), strict=True):
        assert torch.equal(got, want)
    assert other.cls.predictions.decoder.weight is other.bert.embeddings.word_embeddings.weight


def test_plain_transformers_and_our_loader_give_the_same_logits(folder):
    expected = model().eval()(INPUT).logits
    torch.testing.assert_close(AutoModelForMaskedLM.from_pretrained(folder).eval()(INPUT).logits, expected)
    torch.testing.assert_close(load_model(folder).model(INPUT).logits, expected)


def test_saving_twice_gives_the_same_bytes_and_nothing_on_the_terminal(folder, tmp_path, capfd):
    save(tmp_path / "again", model(), {"exp_avg/x": torch.arange(3.0), "step/x": torch.tensor(7.0)}, STATE)
    names = {"config.json", "model.safetensors", "trainer.json", "trainer.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    document = json.loads((folder / "trainer.json").read_text())
    assert document["loss_sum_nats"] == 0.1 + 0.2
    assert set(document["sha256"]) == names - {"trainer.json"}
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_goes_along(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    tokenizer = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))
    save(tmp_path / "step-1", model(), {}, STATE, tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "step-1")("a b").input_ids == tokenizer("a b").input_ids


def test_the_recorded_hash_is_that_of_the_weights(folder):
    assert weights_sha256(folder) == files.sha256(folder / "model.safetensors")
    assert load_weights(folder, model(seed=1)) == weights_sha256(folder)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    broken = model()
    with torch.no_grad():
        broken.cls.predictions.bias[3] = float("nan")
    with pytest.raises(IsolossError, match=r"after step 7 the weights cls\.predictions\.bias are not finite"):
        save(tmp_path / "step-7", broken, {}, STATE)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(IsolossError, match=r"cannot write the checkpoint .*step-7"):
        save(tmp_path / "file" / "step-7", model(), {}, STATE)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "trainer.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_tensors_are_refused(folder, name, damage):
    path = folder / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    if damage == "flip":
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:20])
    else:
        path.unlink()
    with pytest.raises(IsolossError, match=rf"{name} is damaged: delete its folder and those of later steps to go"):
        load(folder, model(), config=CONFIG)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", r"is damaged or .* \(it lacks config, initial_sha256, "),
        ('{"step": 7}', r"is damaged or .* \(it lacks config, initial_sha256, "),
        ("[]", "is damaged: its content is not what was written; delete"),
        ("{", "is not a readable JSON file"),
    ],
)
def test_a_damaged_record_is_refused(folder, content, message):
    (folder / "trainer.json").write_text(content)
    with pytest.raises(IsolossError, match=r"trainer\.json " + message):
        load(folder, model(), config=CONFIG)


def rewritten(folder, change):
    path = folder / "trainer.json"
    document = files.read_sealed(path, "")
    change(document)
    files.write_sealed(path, document)


def test_a_record_of_another_version_names_the_fields(folder):
    rewritten(folder, lambda document: document.update(color=3))
    with pytest.raises(IsolossError, match=r"of another version of isoloss \(it also has color\): delete its folder"):
        load(folder, model(), config=CONFIG)


def test_a_config_of_another_version_names_the_fields(folder):
    rewritten(folder, lambda document: document["config"].update(color="red"))
    with pytest.raises(IsolossError, match=r"of another config \(color is not set here and 'red' there\)"):
        load(folder, model(), config=CONFIG)
    rewritten(folder, lambda document: document["config"].pop("color") and document["config"].pop("seed"))
    with pytest.raises(IsolossError, match=r"of another config \(seed is 0 here and not set there\)"):
        load(folder, model(), config=CONFIG)


def test_a_checkpoint_of_another_config_is_refused(folder):
    other = TrainConfig(language=PCFGConfig(), batch_size=9, optimizer=OptimizerConfig(name="sgd"), threads=3)
    refused = model(seed=1)
    before = [p.clone() for p in refused.parameters()]
    with pytest.raises(
        IsolossError,
        match=r"\(optimizer\.name is 'sgd' here and 'adamw' there; batch_size is 9 here and 8 there\)",
    ):
        load(folder, refused, config=other)
    assert all(torch.equal(p, b) for p, b in zip(refused.parameters(), before, strict=True))


def test_weights_of_another_shape_or_depth_are_refused(tmp_path, folder):
    with pytest.raises(IsolossError, match=r"word_embeddings\.weight has the shape \(10, 16\) there and \(10, 32\) in"):
        load_weights(folder, model(size="d32"))
    deep, shallow = model(size="d128"), model(size="d128")
    del shallow.bert.encoder.layer[1:]
    save(tmp_path / "deep", deep, {}, STATE)
    save(tmp_path / "shallow", shallow, {}, STATE)
    with pytest.raises(IsolossError, match=r"layer\.1\.\S+ has the shape \(128,\) there and none in the model"):
        load_weights(tmp_path / "deep", shallow)
    with pytest.raises(IsolossError, match=r"layer\.1\.\S+ has the shape none there and \(128, 128\) in the model"):
        load_weights(tmp_path / "shallow", deep)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(IsolossError, match=r"is not a checkpoint folder: it has no model\.safetensors"):
        load_weights(tmp_path, model())
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(IsolossError, match="is not a readable safetensors file"):
        load_weights(tmp_path, model())


def test_the_newest_is_found_and_others_are_removed(tmp_path):
    run = Run(tmp_path)
    assert run.steps() == []
    for step in (0, 9, 10):
        save(run.checkpoint(step), model(), {}, STATE)
    remove_except(run, {0, 10, 20})
    assert run.steps() == [0, 10]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-0", "step-10"]
