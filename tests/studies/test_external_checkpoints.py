"""Checkpoints trained elsewhere, compared by a study of one short file; and the file that `study new` writes."""

import json
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
)

from isoloss import config as configs
from isoloss import evaluate
from isoloss.cli.main import main
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.lab.languages.config import PCFGConfig
from isoloss.studies import load_study
from isoloss.studies.answer import Comparison
from isoloss.studies.folder import StudyFolder
from isoloss.studies.results import difference
from pages import unpacked
from studies_in_process import call

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(27))]
FILE = '''"""Three checkpoints, measured on one text."""

from isoloss.studies import Experiment, ExternalCheckpoint, Measurement, Scale, Study

MEASURED = Measurement(
    measures=("loss", "trace", "minimal-trace"), settings={"loss_sentences": 16, "num_sequences": 16}
)
RUNS = {
    name: Experiment(config=ExternalCheckpoint(checkpoint=f"models/{name}", data="text.txt"), measurements=(MEASURED,))
    for name in ("bert", "opt", "gpt2")
}
STUDY = Study(name="three", scales={"all": Scale(description="seconds", experiments=RUNS)})
'''


def save(model, folder, words=WORDS):
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    model.save_pretrained(folder)
    special = {f"{key}_token": word for key, word in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def gpt2(seed):
    torch.manual_seed(seed)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "bos_token_id": 2, "eos_token_id": 3}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), **sizes))


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertConfig(**sizes, intermediate_size=32, max_position_embeddings=32)
    opt = OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=16, max_position_embeddings=32, pad_token_id=0)
    save(BertForMaskedLM(bert), Path("models/bert"))
    save(OPTForCausalLM(opt), Path("models/opt"))
    save(gpt2(0), Path("models/gpt2"))
    draws = torch.randint(27, (900,), generator=torch.Generator().manual_seed(0)).tolist()
    Path("text.txt").write_text(" ".join(f"w{i}" for i in draws))
    Path("three.py").write_text(FILE)
    return Path("three.py")


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "log.jsonl"}


def test_three_checkpoints_are_compared_by_a_short_file(study, capsys, here):
    assert len(FILE.splitlines()) <= 30
    before = contents(Path("models"))
    call(capsys, "run", study, "--folder", "out", *here)
    assert contents(Path("models")) == before  # nothing is written there
    page = Path("out/report/index.html").read_text()
    for architecture in ("BertForMaskedLM", "OPTForCausalLM", "GPT2LMHeadModel"):
        assert architecture in page
    assert "models/opt" in unpacked(page, "configs")  # in the config that a click on the run shows
    state = json.loads(call(capsys, "status", study, "--folder", "out", "--json"))
    assert [(unit["unit"], unit["state"]) for unit in state["units"]] == [
        (f"measure {name}", "done") for name in ("bert", "opt", "gpt2")
    ]
    assert call(capsys, "verify", study, "--folder", "out").endswith("0 failed\n")
    call(capsys, "export", study, "--folder", "out", "--output", "kept")
    assert len(Path("kept/values.csv").read_text().splitlines()) == 1 + 3 * 3
    assert str(Path.cwd()).encode() not in b"".join(path.read_bytes() for path in Path("kept").rglob("*.*"))
    # the same numbers as isoloss measure
    results = StudyFolder(load_study(study), Path("out")).results()
    settings = {"loss_sentences": 16, "num_sequences": 16}
    for name in ("bert", "opt", "gpt2"):
        for one in evaluate(f"models/{name}", ["loss", "trace"], data="text.txt", settings=settings, device="cpu"):
            assert results.at(name)[one.measure].value == one.estimates[one.measure].value
    # causal models of one tokenizer are paired; a masked one predicts other tokens
    assert difference(results.at("opt")["loss"], results.at("gpt2")["loss"]).method == "paired difference"
    with pytest.raises(IsolossError, match="not made on the same examples"):
        difference(results.at("opt")["loss"], results.at("bert")["loss"])
    # what is lost is made again, to the byte
    runs = contents(Path("out/runs"))
    for file in ("trace@step-0.json", "minimal-trace@step-0.safetensors"):
        Path("out/runs/opt/evaluations", file).unlink()
    state = json.loads(call(capsys, "status", study, "--folder", "out", "--json"))
    assert [unit["state"] for unit in state["units"]] == ["done", "interrupted", "done"]
    call(capsys, "run", study, "--folder", "out", *here)
    assert contents(Path("out/runs")) == runs
    # a changed checkpoint is noticed and measured again
    kept = results.at("gpt2")["trace"].value
    save(gpt2(1), Path("models/gpt2"))
    assert main(["study", "verify", str(study), "--folder", "out"]) == 1
    assert "its weights are not those that were measured" in capsys.readouterr().out
    call(capsys, "run", study, "--folder", "out", *here)
    again = StudyFolder(load_study(study), Path("out")).results()
    assert again.at("gpt2")["trace"].value != kept
    assert call(capsys, "verify", study, "--folder", "out").endswith("0 failed\n")
    # so is a changed config, which decides what the same weights compute
    config = Path("models/gpt2/config.json")
    document = config.read_text()
    config.write_text(document.replace('"layer_norm_epsilon": 1e-05', '"layer_norm_epsilon": 0.1'))
    assert main(["study", "verify", str(study), "--folder", "out"]) == 1
    assert "gpt2: evaluations: missing, damaged, made with other weights" in capsys.readouterr().out
    config.write_text(document)
    # so is changed text
    Path("text.txt").write_text("w1 w2 " * 200)
    with pytest.raises(IsolossError, match=r"made by another plan \(they differ in runs"):
        main_study("run", study, "--folder", "out")


def test_copies_of_a_checkpoint_are_called_identical(study, capsys, here):
    shutil.copytree("models/gpt2", "models/copy")
    study.write_text(FILE.replace('("bert", "opt", "gpt2")', '("opt", "gpt2", "copy")'))
    assert "Identical weights: gpt2 and copy." in call(capsys, "run", study, "--folder", "out", *here)
    assert "Identical weights: gpt2 and copy." in Path("out/report/index.html").read_text()


def test_what_is_passed_on_names_no_folder_of_this_machine(study, capsys, here):
    folder = str(Path.cwd())
    text = FILE.replace("models/{name}", f"{folder}/models/{{name}}").replace("text.txt", f"{folder}/text.txt")
    text = text.replace('("bert", "opt", "gpt2")', '("gpt2",)').replace('"trace", "minimal-trace"', "")
    study.write_text(text)
    call(capsys, "run", study, "--folder", "out", *here)
    call(capsys, "export", study, "--folder", "out", "--output", "kept")
    files = [path for place in ("out/report", "kept") for path in Path(place).rglob("*.*")]
    assert {path.suffix for path in files} >= {".html", ".json", ".csv", ".md", ".tex"}
    assert not [path for path in files if folder.encode() in path.read_bytes()]
    page = Path("kept/index.html").read_text()
    assert "gpt2" in page
    assert "text.txt" in page


def main_study(*words):
    from isoloss.cli import study as command

    return command.main([str(word) for word in words])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("models/{name}", "./models/no-{name}", "there is no checkpoint ./models/no-bert: it is not a folder"),
        ('data="text.txt"', 'data="test.txt"', "there is no data test.txt; did you mean text.txt"),
        (', data="text.txt"', "", "neither data nor a language"),
        ("measurements=", 'after=("opt",), measurements=', "external and not trained: leave out after"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(study, old, new, message):
    assert old in FILE
    study.write_text(FILE.replace(old, new))
    with pytest.raises(IsolossError, match=message):
        StudyFolder(load_study(study), Path("out")).prepare()
    assert not Path("out").exists()


def test_a_plan_needs_neither_a_folder_nor_a_checkpoint_of_the_hub(study, capsys, here):
    study.write_text(FILE.replace('f"models/{name}"', '"nobody/has-this"'))
    plan = json.loads(call(capsys, "plan", study, "--folder", "out", "--json"))["units"]
    assert [(unit["unit"], unit["state"]) for unit in plan] == [
        (f"measure {name}", "to do") for name in ("bert", "opt", "gpt2")
    ]
    StudyFolder(load_study(study), Path("out")).prepare()
    assert "to do" in call(capsys, "status", study, "--folder", "out")


def test_a_language_or_data():
    language = PCFGConfig(levels=2)
    assert ExternalCheckpoint(checkpoint="a", language=language).measured_on == "pcfg"
    with pytest.raises(IsolossError, match="both data and a language"):
        ExternalCheckpoint(checkpoint="a", language=language, data="text.txt")


def test_a_dataset_is_known_by_its_texts_wherever_it_lies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, texts in (("one", ["a b", "c"]), ("two", ["a b", "c"]), ("three", ["a b", "d"])):
        datasets.Dataset.from_dict({"body": texts, "id": ["1", "2"]}).save_to_disk(folder)

    def given(folder, column="body"):
        return ExternalCheckpoint(checkpoint="a", data=f"hf:{folder}", inputs=InputConfig(column=column))

    assert given("one").absolute().data == f"hf:{tmp_path / 'one'}"
    assert given("one").fingerprint == given("two").fingerprint == given("one").absolute().fingerprint
    assert len({given("one").fingerprint, given("three").fingerprint, given("one", "id").fingerprint}) == 3
    assert ExternalCheckpoint(checkpoint="a", data="python:docs").absolute().data == "python:docs"
    (tmp_path / "text.txt").write_text("text")
    plain = ExternalCheckpoint(checkpoint="a", data="text.txt")
    assert "column" not in configs.identity(plain)["inputs"]  # what was measured before stays measured


def test_a_checkpoint_is_measured_on_a_language_with_its_probes(study, capsys, here):
    language = "PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)"
    text = FILE.replace('data="text.txt"', f"language={language}").replace('("bert", "opt", "gpt2")', '("bert",)')
    text = text.replace('"minimal-trace")', '"probe-root")').replace(
        '"num_sequences": 16', '"num_sequences": 16, "num_train": 64, "num_test": 64, "probe_seeds": 2'
    )
    study.write_text(text.replace("\nMEASURED", "from isoloss.lab.languages.config import PCFGConfig\n\nMEASURED", 1))
    call(capsys, "run", study, "--folder", "out", *here)
    assert set(StudyFolder(load_study(study), Path("out")).results().at("bert")) >= {"kl", "trace", "probe-root"}


def test_new_writes_a_study_that_compares_external_checkpoints(study, capsys, here):
    data = ("--data", "text.txt")
    call(capsys, "new", "mine", "--checkpoints", "models/opt", "models/gpt2", *data)
    assert len(Path("mine.py").read_text().splitlines()) <= 30
    call(capsys, "run", "mine.py", *here)
    assert set(StudyFolder(load_study("mine.py"), Path("runs/mine-all")).results().experiments) == {"opt", "gpt2"}
    with pytest.raises(IsolossError, match=r"mine\.py is there already"):
        main_study("new", "mine")
    with pytest.raises(IsolossError, match="add --checkpoints"):
        main_study("new", "other", "--data", "text.txt")
    main_study("new", "other", "--checkpoints", "models/opt")
    assert load_study("other.py").scale().experiments["opt"].config.data == "python:docs"


def checkpoints_without_weights(*names):
    for name in names:
        Path(name).mkdir(parents=True)
        (Path(name) / "config.json").write_text("{}")
        (Path(name) / "model.safetensors").write_bytes(b"")


def test_new_gives_each_of_many_checkpoints_a_name_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("Some text.")
    named = ["one/a 3", "one/a-3", "two/a-3"]
    checkpoints_without_weights(*named, *(f"seed-{seed}/checkpoint-{step}" for seed in range(5) for step in range(12)))
    main_study("new", "mine", "--checkpoints", *named, "--data", "text.txt")
    experiments = load_study("mine.py").scale().experiments
    assert {name: one.config.checkpoint for name, one in experiments.items()} == dict(
        zip(["one-a-3", "one-a-3-2", "two-a-3"], named, strict=True)
    )
    main_study("new", "many", "--checkpoints", *(f"seed-{seed}" for seed in range(5)), "--data", "text.txt")
    capsys.readouterr()
    units = json.loads(call(capsys, "plan", "many.py", "--json"))["units"]
    assert {unit["unit"] for unit in units} == {
        f"measure seed-{seed}-checkpoint-{step}" for seed in range(5) for step in range(12)
    }


def test_new_refuses_a_checkpoint_that_is_none_before_anything_is_written(study):
    with pytest.raises(IsolossError, match="there is no checkpoint models/none: it is not a folder"):
        main_study("new", "mine", "--checkpoints", "models/opt", "models/none", "--data", "text.txt")
    assert not Path("mine.py").exists()


def test_a_study_of_checkpoints_says_which_is_flatter_where_that_can_be_said(study, capsys, here):
    call(capsys, "run", study, "--folder", "out", *here)
    document = json.loads(call(capsys, "report", study, "--folder", "out", "--json"))
    assert document["answer"][0]["value"] == "Not comparable"  # of three architectures
    page = Path("out/report/index.html").read_text()
    assert "Over the steps" not in page
    assert "<details" in page
    study.write_text(FILE.replace('"bert", "opt", "gpt2"', '"gpt2", "other", "copy"'))
    save(gpt2(1), Path("models/other"))
    shutil.copytree("models/gpt2", "models/copy")
    call(capsys, "run", study, "--folder", "again", *here)
    results = StudyFolder(load_study(study), Path("again")).results()
    rows = {(row.group, row.label): row for row in Comparison(results).rows()}
    assert len(rows) == 6
    by_hand = difference(results.at("other")["trace"], results.at("gpt2")["trace"])
    row = rows["other minus gpt2", "trace"]
    assert (row.value, row.low, row.high) == (by_hand.value, *by_hand.ci95)
    assert rows["copy minus gpt2", "loss"].value == 0
    label, *others = [card.label for card in Comparison(results).cards()]
    assert (label, others) == ("Which is the flattest?", ["The same loss?"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["../mine"], r"the study's name is '\.\./mine'"),
        (["same-loss"], "there is a study same-loss already"),
    ],
)
def test_new_refuses(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IsolossError, match=message):
        main_study("new", *words)
    assert not list(tmp_path.iterdir())


def test_new_writes_a_study_that_runs(tmp_path, monkeypatch, capsys, here):
    monkeypatch.chdir(tmp_path)
    call(capsys, "new", "mine")
    text = Path("mine.py").read_text()
    assert len(text.splitlines()) <= 30
    for ours, less in (("steps=400", "steps=4"), ("checkpoints=(200,)", "checkpoints=(2,)"), ("in (1, 2)", "in (1,)")):
        assert ours in text
        text = text.replace(ours, less)
    Path("mine.py").write_text(text)
    call(capsys, "run", "mine.py", *here)
    assert len(StudyFolder(load_study("mine.py"), Path("runs/mine-laptop")).results().checkpoints) == 4
