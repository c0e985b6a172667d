"""A teacher: work that is saved, draws, refusals, and how it is found again; the contract has its probabilities."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_languages import KINDS_OF_TEACHER
from teacher_models import VOCAB, build, enumerated, next_logs
from transformers import BertConfig, BertForMaskedLM

from isoloss import config as configs
from isoloss import evaluate, pretrain
from isoloss.checkpoints.loading import load_model, quiet
from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.languages.config import TeacherConfig
from isoloss.lab.languages.teacher import Teacher
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.runs import Run
from isoloss.studies import Experiment, Scale, Study
from isoloss.studies.folder import StudyFolder

IDS, LENGTH = (5, 2, 8), 4


@pytest.mark.parametrize("kind", KINDS_OF_TEACHER)
def test_which_work_is_saved(kind):
    scorer = Teacher(build(kind), IDS, LENGTH)._scorer
    assert (scorer.cut, scorer.cached) == (kind != "centered", kind != "windowed")
    assert scorer.model.get_output_embeddings().out_features == (VOCAB if kind == "centered" else len(IDS))


def test_a_teacher_in_half_precision_computes_in_single():
    teacher = Teacher(build("gpt2").half(), IDS, LENGTH)
    assert teacher.dtype == torch.float32
    assert repr(teacher).endswith("writes over 3 tokens; sentences of 4 tokens; torch.float32 on cpu)")
    assert teacher.vocabulary == ("t5", "t2", "t8")


def test_parts_of_any_size_give_the_same(monkeypatch):
    teacher = Teacher(build("opt"), IDS, LENGTH)
    sequences = enumerated(build("opt"), IDS, LENGTH)[0]
    lengths = torch.full((len(sequences),), LENGTH)
    expected = teacher.log_conditionals(sequences, lengths)
    monkeypatch.setattr("isoloss.lab.languages.teacher._POSITIONS", 7 * LENGTH)
    monkeypatch.setattr("isoloss.lab.languages.teacher._ROWS", 10)
    torch.testing.assert_close(teacher.log_conditionals(sequences, lengths), expected, rtol=0, atol=1e-12)


def test_the_model_that_was_given_is_left_alone():
    model = build("gpt2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Teacher(model, IDS, LENGTH).to(dtype=torch.float32)
    assert model.get_output_embeddings().out_features == VOCAB
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- draws -----------------------------------------------------------------------------------------------------------


def test_what_has_no_probability_is_never_drawn():
    model, ids = build("gpt2", scale=40), (2, 5, 8)  # all but the middle one are too rare for float64
    teacher = Teacher(model, ids, LENGTH)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)[:, None].expand(3, LENGTH)
    tokens = teacher._scorer.draw(uniforms)
    probs = next_logs(model, tokens, ids).exp()
    assert (probs.gather(2, tokens[..., None]) > 0).all()
    assert (probs[0, :, 0] == 0).any()
    assert (probs[2, :, -1] == 0).any()


def test_a_sentence_depends_on_the_seed_and_its_place_only():
    teacher = Teacher(build("gpt2"), IDS, LENGTH)
    many = teacher.sample(600, generator=torch.Generator().manual_seed(3)).tokens
    for n in (0, 1, 256, 300):
        assert torch.equal(teacher.sample(n, generator=torch.Generator().manual_seed(3)).tokens, many[:n])
    assert not torch.equal(many[:256], many[256:512])
    assert not torch.equal(teacher.sample(600, generator=torch.Generator().manual_seed(4)).tokens, many)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": (5,)}, "needs at least 2 tokens, not 1"),
        ({"tokens": (5, 2, 5)}, "the token 5 is named twice"),
        ({"tokens": (5, 9)}, "no token 9; the model's ids are from 0 to 8"),
        ({"tokens": (5, 1)}, "the token 1 is special"),
        ({"length": 0}, "the length is 0; it must be from 1 to 12 tokens"),
        ({"length": 13}, "the length is 13; it must be from 1 to 12 tokens"),
        ({"start_id": 9}, "start_id is 9; the model's ids are from 0 to 8"),
        ({"vocabulary": ("a", "b")}, "must be 3 different strings"),
    ],
)
def test_what_is_no_language(changes, message):
    arguments = {"tokens": IDS, "length": LENGTH} | changes
    with pytest.raises(IsolossError, match=message):
        Teacher(build("gpt2"), **arguments)


def test_where_a_sentence_begins():
    model = build("gpt2")
    assert Teacher(model, IDS, LENGTH).start_id == 0
    model.config.bos_token_id, model.config.eos_token_id = None, [7, 1]
    assert Teacher(model, IDS, LENGTH).start_id == 7
    sequences, joint = enumerated(model, IDS, LENGTH, start_id=7)
    found = Teacher(model, IDS, LENGTH).log_prob(sequences, torch.full((len(sequences),), LENGTH))
    torch.testing.assert_close(found, joint.flatten(), rtol=0, atol=1e-10)
    model.config.eos_token_id = None
    with pytest.raises(IsolossError, match="give its id as start_id, from 0 to 8"):
        Teacher(model, IDS, LENGTH)
    assert Teacher(model, IDS, LENGTH, start_id=3).start_id == 3


def test_too_many_completions_are_refused_and_one_token_never(monkeypatch):
    monkeypatch.setattr("isoloss.lab.languages.teacher._COMPLETIONS", 100)
    model = build("gpt2")
    with torch.no_grad():
        model.resize_token_embeddings(300, mean_resizing=False)
    teacher = Teacher(model, range(2, 299), 3)
    tokens, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([3])
    mask = torch.tensor([[True, False, True]])
    message = r"sentence 0 has (\d) unknown tokens, with 297\^\1 completions to add up; a teacher adds up 100 at most"
    for method in (teacher.log_prob, teacher.log_conditionals, teacher.conditional_entropy):
        with pytest.raises(IsolossError, match=message):
            method(tokens, lengths, mask=mask)
    one = torch.tensor([[True, False, False]])
    with pytest.raises(IsolossError, match="has 2 unknown tokens"):  # that and x_t
        teacher.log_conditionals(tokens, lengths, mask=one)
    found = teacher.log_conditionals(tokens, lengths, mask=one, positions=torch.tensor([0]))
    torch.testing.assert_close(found, teacher.log_conditionals(tokens, lengths)[:, 0], rtol=0, atol=1e-12)


def test_weights_that_are_not_numbers_are_told():
    model = build("gpt2")
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = math.nan
    teacher, tokens, lengths = Teacher(model, IDS, LENGTH), torch.tensor([[0, 1, 2, 0]]), torch.tensor([4])
    for method in (teacher.log_prob, teacher.log_conditionals):
        with pytest.raises(IsolossError, match="logits are not finite"):
            method(tokens, lengths)
    with pytest.raises(IsolossError, match="logits are not finite"):
        teacher.sample(1)


# --- as a config -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    build("gpt2").float().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_config_names_the_tokens_and_the_weights(folder):
    teacher = TeacherConfig(checkpoint=str(folder), length=4, vocab_size=3, samples=2000).build()
    config = teacher.config
    assert (config.checkpoint, config.start_id, config.tokens) == (str(folder), 0, teacher.tokens)
    assert teacher.dtype == torch.float32
    again = configs.from_dict(TeacherConfig, configs.to_dict(config)).build()
    assert again.config == config
    assert torch.equal(again.batch(0, 50, seed=0).tokens, teacher.batch(0, 50, seed=0).tokens)
    with pytest.raises(IsolossError, match="only in memory"):
        _ = Teacher(build("gpt2"), IDS, LENGTH).config


def test_a_teacher_is_named_by_its_folder_or_by_a_file(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = languages.resolve("model", length=6)
    assert isinstance(config, TeacherConfig)
    assert (config.checkpoint, config.length, len(config.tokens)) == (str(folder), 6, VOCAB - 2)
    assert languages.resolve("model", length=6) == config
    with pytest.raises(IsolossError, match="model is a checkpoint, a teacher: leave out --column"):
        languages.resolve("model", split="train")
    (tmp_path / "t.toml").write_text('kind = "teacher"\ncheckpoint = "model"\ntokens = [4, 3]\nlength = 5\n')
    read = languages.resolve("t.toml")
    assert (read.tokens, read.length, read.content, read.start_id) == ((4, 3), 5, config.content, 0)
    assert read.build().vocab_size == 2


def test_another_content_is_refused(folder, tmp_path):
    config = TeacherConfig(checkpoint=str(folder), tokens=IDS, length=4).build().config
    shutil.copytree(folder, tmp_path / "other")
    weights = load_file(folder / "model.safetensors")
    weights["transformer.wte.weight"][8, 0] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IsolossError, match=rf"has changed since the run began: its SHA-256 was {config.content[:16]}"):
        config.build()
    other = tmp_path / "other" / "config.json"
    document = json.loads(other.read_text())
    other.write_text(json.dumps(document | {"transformers_version": "0.1"}))
    same = configs.from_dict(TeacherConfig, configs.to_dict(config) | {"checkpoint": str(other.parent)})
    assert same.build().config.content == config.content
    other.write_text(json.dumps(document | {"layer_norm_epsilon": 0.1}))
    with pytest.raises(IsolossError, match="has changed since the run began"):
        same.build()


def test_the_teacher_of_a_run_may_be_relative_to_its_folder(folder, tmp_path):
    language = TeacherConfig(checkpoint="../model", tokens=IDS, length=4)
    config = TrainConfig(
        language=language, model=ModelConfig(size="d16", layers=1), steps=1, batch_size=2, device="cpu"
    )
    run = pretrain(tmp_path / "run", config)
    assert run.config == config
    assert run.absolute_config.language == dataclasses.replace(language, checkpoint=str(folder))
    (before,) = evaluate(run.path, "loss", settings={"loss_sentences": 10}, device="cpu")
    (tmp_path / "elsewhere").mkdir()
    for name in ("run", "model"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    moved = Run(tmp_path / "elsewhere" / "run")
    shutil.rmtree(moved.path / "evaluations")
    (again,) = evaluate(moved.path, "loss", settings={"loss_sentences": 10}, device="cpu")
    assert again.to_dict() == before.to_dict()
    study = StudyFolder(
        Study(
            name="taught",
            scales={"one": Scale(description="", experiments={"run": Experiment(config=config, measurements=())})},
        ),
        tmp_path / "study",
    )
    (tmp_path / "study" / "runs").mkdir(parents=True)
    for name in ("run", "model"):
        shutil.copytree(tmp_path / "elsewhere" / name, tmp_path / "study" / "runs" / name)
    (unit,) = study.plan()
    assert unit.done()
    weights = load_file(study.path / "runs/model/model.safetensors")
    weights["transformer.wte.weight"][8, 0] += 1e-3
    save_file(weights, study.path / "runs/model/model.safetensors", metadata={"format": "pt"})
    assert not unit.done()
    for use in (
        lambda path: pretrain(path, config),
        lambda path: evaluate(path, "trace", settings={"num_sequences": 4}, device="cpu"),
    ):
        with pytest.raises(IsolossError, match=r"the teacher of .* has changed since the run began, or is gone"):
            use(study.path / "runs/run")


def test_what_cannot_be_a_teacher(folder, tmp_path):
    masked = BertConfig(vocab_size=12, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    with torch.random.fork_rng(devices=[]), quiet():
        BertForMaskedLM(masked).save_pretrained(tmp_path / "bert")
    with pytest.raises(IsolossError, match="is a BertForMaskedLM: a teacher is a causal model"):
        languages.resolve(str(tmp_path / "bert"))
    with pytest.raises(IsolossError, match="is not a folder"):
        TeacherConfig(checkpoint="./nowhere").build()
    with pytest.raises(
        IsolossError, match=r"the tokens of a corpus cannot be counted: the folder .* holds no tokenizer"
    ):
        TeacherConfig(checkpoint=str(folder), corpus=("text.txt",)).build()
    for name in ("vocab_size", "samples"):
        with pytest.raises(IsolossError, match=f"{name} is 0; it must be at least 1"):
            TeacherConfig(checkpoint=str(folder), **{name: 0}, length=4).build()


# --- a published checkpoint ------------------------------------------------------------------------------------------


def test_a_published_checkpoint(shared_data):
    config = TeacherConfig(checkpoint=str(shared_data / "stories260K" / "hf"), vocab_size=20, length=12, samples=256)
    teacher = config.build()
    tokens, lengths = teacher.sample(2, generator=torch.Generator().manual_seed(0))[:2]
    model = load_model(config.checkpoint).model
    steps = next_logs(model, tokens, teacher.tokens, start_id=1).gather(2, tokens[..., None])[..., 0]
    torch.testing.assert_close(teacher.log_prob(tokens, lengths), steps.sum(dim=1), rtol=0, atol=1e-4)
    found = teacher.log_conditionals(tokens, lengths)
    for row, position in ((0, 0), (0, 7), (1, 11)):
        substituted = tokens[row].repeat(20, 1)
        substituted[:, position] = torch.arange(20)
        logs = next_logs(model, substituted, teacher.tokens, start_id=1).gather(2, substituted[..., None])[..., 0]
        torch.testing.assert_close(found[row, position], logs.sum(dim=1).log_softmax(dim=0), rtol=0, atol=1e-4)


def test_only_a_path_that_leads_out_of_the_runs_folder_is_relative_to_it(tmp_path):
    run = tmp_path / "runs" / "student"
    for folder in (run / "checkpoints", tmp_path / "runs" / "teacher"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
    beside = TeacherConfig(checkpoint="../teacher").within(run)
    assert beside.checkpoint == str((tmp_path / "runs" / "teacher").resolve())
    assert TeacherConfig(checkpoint="../teacher").teacher_sha256(run)
    for other in ("checkpoints", "../nowhere"):  # the first is also the name of a folder in the run's
        config = TeacherConfig(checkpoint=other)
        assert config.within(run) == config
        assert config.teacher_sha256(run) == ""
