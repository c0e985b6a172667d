"""The presets: every value of the paper and of the authors' command, and options that win over them."""

import dataclasses
import inspect
import json

import pytest
import torch

from isoloss import config as configs
from isoloss.cli.main import main
from isoloss.cli.transfer import Args, method_config
from isoloss.errors import IsolossError
from isoloss.flatness import fisher
from isoloss.lab import languages
from isoloss.lab.evaluation.measures.base import make_measure
from isoloss.lab.finetune_config import FinetuneConfig
from isoloss.lab.languages.config import PRESETS as LANGUAGES
from isoloss.lab.languages.config import (
    BracketsConfig,
    CorpusConfig,
    HMMConfig,
    PCFGConfig,
    TeacherConfig,
    WithSpecialTokensConfig,
)
from isoloss.lab.presets import PRESETS, framed, load_preset, train_config
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.seeds import generator
from isoloss.transfer.config import ClassifierConfig, LinearProbeConfig

GRAMMAR, MARKOV = LANGUAGES["pcfg-paper"][0], LANGUAGES["hmm-paper"][0]
TEXT = CorpusConfig(paths=("text",), tokenizer="tokenizer")
TEACHER = TeacherConfig(checkpoint="teacher")
MASKED = ObjectiveConfig(kind="masked", masking="fraction", fraction=0.15, corruption="mask", labels="sampled")
ONE = dataclasses.replace(MASKED, masking="one")
PAPER = OptimizerConfig(
    name="adamw", learning_rate=1e-3, schedule="constant", warmup_steps=1000, weight_decay=0.01, betas=(0.9, 0.98)
)
AUTHORS = dataclasses.replace(PAPER, learning_rate=5e-4, schedule="linear", warmup_steps=3333, adam_eps=1e-6)
TEXT_PAPER = dataclasses.replace(PAPER, warmup_steps=5000)
POST, PRE = (ModelConfig(architecture=name, dropout=0.1) for name in ("bert", "bert-pre-ln"))


@pytest.mark.parametrize(
    ("preset", "language", "own", "model", "objective", "optimizer", "steps", "num_sentences", "copies"),
    [
        ("paper", GRAMMAR, GRAMMAR, POST, ONE, PAPER, 30_000, 20_000_000, 0),
        ("paper", MARKOV, MARKOV, POST, ONE, PAPER, 30_000, 10_000_000, 0),
        ("paper", TEACHER, TEACHER, POST, ONE, PAPER, 30_000, 0, 0),
        ("paper", BracketsConfig(), BracketsConfig(), POST, ONE, PAPER, 30_000, 0, 0),
        ("paper", TEXT, TEXT, POST, MASKED, TEXT_PAPER, 30_000, 0, 0),
        ("authors", GRAMMAR, framed(GRAMMAR), PRE, MASKED, AUTHORS, 25_000, 20_000_000, 5),
        ("authors", framed(MARKOV), framed(MARKOV), PRE, MASKED, AUTHORS, 25_000, 10_000_000, 5),
        ("authors", BracketsConfig(), framed(BracketsConfig()), PRE, MASKED, AUTHORS, 25_000, 0, 0),
        ("authors", TEXT, TEXT, PRE, MASKED, AUTHORS, 25_000, 0, 0),
    ],
)
def test_every_field_of_a_run(preset, language, own, model, objective, optimizer, steps, num_sentences, copies):
    assert train_config(preset, language) == TrainConfig(
        language=own,
        model=model,
        objective=objective,
        optimizer=optimizer,
        steps=steps,
        batch_size=4096,
        num_sentences=num_sentences,
        masked_copies=copies,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_field_of_evaluations_and_transfer(name):
    preset = load_preset(name)
    assert preset.measures == {
        "loss_sentences": 1_000_000,
        "num_sequences": 10_000,
        "trace_method": "paper",
        "num_train": 100_000,
        "probe_epochs": 100,
        "probe_seeds": 5,
        "probe_standardize": False,
    }
    assert inspect.signature(fisher.fisher_trace).parameters["method"].default == "ghost"
    assert fisher._PAPER_LABELS == 50  # labels that the method paper samples unless told
    probe = {"solver": "adamw", "learning_rate": 1e-3, "epochs": 100, "seeds": 5, "standardize": False}
    assert preset.lookup == ClassifierConfig(**probe)
    finetuning = {"name": "adamw", "learning_rate": 1e-4, "weight_decay": 0.01, "seeds": 5, "pooling": "auto"}
    if name == "authors":  # the README's, whose polynomial schedule of power 1 is linear
        of_readme = {"epochs": 50, "warmup_steps": 50, "schedule": "linear"}
        assert preset.probe == LinearProbeConfig(**{**probe, **of_readme}, batch_size=512)
        assert preset.finetuning == FinetuneConfig(**finetuning, **of_readme, batch_size=128)
        assert preset.num_train == 10_000
    else:
        assert preset.probe == LinearProbeConfig(**probe, pooling="concatenate", projection=None, layer=-1)
        assert preset.finetuning == FinetuneConfig(**finetuning, epochs=10, warmup_steps=200)
        assert preset.num_train == 100_000
    wanted = {"paper": ("prefix-32", "prefix-16", "prefix-8"), "authors": ("root", "prefix-4", "prefix-2")}
    assert preset.tasks == dict(zip("ABC", wanted[name], strict=True))


def test_settings_win_and_are_checked():
    config = train_config("authors", "pcfg-authors", ModelConfig(size="d16"), seed=4, steps=5000, num_sentences=9)
    assert (config.model.architecture, config.seed, config.steps, config.num_sentences) == ("bert", 4, 5000, 9)
    assert config.masked_copies == 5
    brackets = train_config("authors", BracketsConfig(), num_sentences=20)
    assert (brackets.num_sentences, brackets.masked_copies) == (20, 5)
    causal = train_config("authors", GRAMMAR, ModelConfig(architecture="opt"))
    assert (causal.objective, causal.masked_copies) == (ObjectiveConfig(kind="causal"), 0)
    stages = train_config("paper", GRAMMAR, stages=(StageConfig(steps=3), StageConfig(steps=4)))
    assert stages.steps == 7
    with pytest.raises(IsolossError, match="batch_size is 0; it must be at least 1"):
        train_config("paper", GRAMMAR, batch_size=0)
    with pytest.raises(IsolossError, match=r"no preset 'author'; did you mean authors\?.*choose paper or authors"):
        train_config("author", GRAMMAR)


def test_a_stored_language_counts_as_what_it_is(tmp_path):
    path = tmp_path / "language.safetensors"
    languages.save(languages.load_language("framed:hmm-laptop"), path)
    config = languages.resolve(str(path))
    assert config.kind == "file"
    made = train_config("authors", config)
    assert (made.num_sentences, made.language) == (10_000_000, config)


def test_the_grammar_of_the_authors_shape():
    config = LANGUAGES["pcfg-authors"][0]
    language = config.build()
    assert (len(language.symbols) - 1, language.vocab_size, language.max_length) == (50, 200, 16)
    lengths = language.length_probs
    assert sum(n * p for n, p in enumerate(lengths.tolist())) == pytest.approx(10.7, abs=0.05)
    assert 4.2 < languages.entropy(language, num_sentences=1000).masked_token.value < 4.5
    inner = WithSpecialTokensConfig(language=config).build()
    for task in PRESETS["authors"].tasks.values():
        assert len(inner.labeling(task).classes) >= 10


# --- the command line


def of_command(capsys, tmp_path, *options):
    assert main(["train", str(tmp_path / "run"), *options, "--print-config", "--json"]) == 0
    return configs.from_dict(TrainConfig, json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["pcfg-paper", "hmm-paper", "brackets-8"])
def test_a_command_makes_the_same_config(capsys, tmp_path, preset, name):
    assert of_command(capsys, tmp_path, "--preset", preset, "--language", name) == train_config(preset, name)


def test_options_that_are_given_win_even_at_their_defaults(capsys, tmp_path):
    words = (
        "--preset authors --language pcfg-authors --frame none --learning-rate 1e-3 --schedule constant --steps 1000 "
        "--masking one --masked-copies 0 --num-sentences 0 --batch-size 128 --architecture bert "
        "--warmup-proportion 0.1 --adam-eps 1e-8"
    )
    plain = words.replace("--preset authors ", "") + " --weight-decay 0.01 --dropout 0.1 --no-compiled"
    config = of_command(capsys, tmp_path, *words.split())
    assert config == of_command(capsys, tmp_path, *plain.split())
    assert isinstance(config.language, PCFGConfig)
    sgd = of_command(
        capsys,
        tmp_path,
        *("--preset", "paper", "--language", "hmm-paper"),
        *("--optimizer", "sgd", "--size", "d16", "--seed", "3", "--labels", "exact"),
    )
    assert (sgd.optimizer.name, sgd.optimizer.warmup_steps, sgd.model.size, sgd.seed) == ("sgd", 1000, "d16", 3)
    assert (sgd.objective.labels, sgd.num_sentences) == ("exact", 10_000_000)


def test_a_frame_of_ones_own(capsys, tmp_path):
    config = of_command(capsys, tmp_path, "--language", "hmm-laptop", "--frame", "cls-sep")
    assert config.language == WithSpecialTokensConfig(language=LANGUAGES["hmm-laptop"][0])
    assert isinstance(of_command(capsys, tmp_path, "--language", "hmm-laptop").language, HMMConfig)
    assert of_command(capsys, tmp_path, "--language", "framed:hmm-laptop") == config
    with pytest.raises(IsolossError, match="text has the special tokens of its tokenizer"):
        configs.check(WithSpecialTokensConfig(language=TEXT))


def refusal(capsys, *words):
    assert main(list(map(str, words))) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "words",
    [
        ("train", "runs/a", "--language", "pcfg-laptop", "--preset", "papers"),
        ("measure", "runs/a", "--preset", "papers"),
        ("transfer", "runs/a", "--task", "root", "--preset", "papers"),
    ],
)
def test_an_unknown_preset_is_refused(capsys, words):
    told = refusal(capsys, *words)
    assert "no preset 'papers'" in told
    assert "choose paper or authors" in told


def test_a_preset_and_a_whole_config_are_refused(capsys, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(configs.to_toml(TrainConfig(language=PCFGConfig())))
    told = refusal(capsys, "train", tmp_path / "run", "--config", path, "--preset", "paper")
    assert "holds the whole config; leave out --preset" in told


def test_transfer_and_evaluation(capsys, tmp_path, monkeypatch):
    def method(*words):
        from isoloss.cli import options

        return method_config(options.parse(Args, "transfer", ["runs/a", "--task", "B", *words], examples=[]))

    assert method("--preset", "paper") == PRESETS["paper"].probe
    assert method("--preset", "paper", "--epochs", "3") == dataclasses.replace(PRESETS["paper"].probe, epochs=3)
    assert method("--preset", "paper", "--method", "finetune") == PRESETS["paper"].finetuning
    assert method("--preset", "paper", "--method", "lookup", "--seeds", "1").seeds == 1
    warm = method("--preset", "paper", "--method", "finetune", "--warmup-proportion", "0.1")
    assert (warm.warmup_steps, warm.warmup_proportion) == (None, 0.1)
    assert method("--preset", "paper", "--standardize", "True").standardize
    assert not method("--standardize", "False").standardize
    measure = make_measure("probe-root", PRESETS["paper"].measures)
    as_transfer = method("--preset", "paper", "--method", "lookup")
    assert measure._classifier() == as_transfer  # one probe, whichever command fits it
    run = tmp_path / "run"
    small = "--size d16 --steps 2 --batch-size 4 --num-sentences 9 --warmup-steps 1 --log-every 1 --device cpu"
    assert main(["train", str(run), "--preset", "authors", "--language", "pcfg-laptop", *small.split()]) == 0
    capsys.readouterr()
    words = "--measures loss trace --preset authors --loss-sentences 64 --num-sequences 20 --json"
    assert main(["measure", str(run), "--steps", "2", *words.split()]) == 0
    found = {each["measure"]: each for each in json.loads(capsys.readouterr().out)["evaluations"]}
    assert found["loss"]["settings"]["loss_sentences"] == 64
    assert found["trace"]["settings"]["trace_method"] == "paper"
    few = ("--preset", "authors", "--num-train", "64", "--num-test", "32", "--seeds", "1", "--epochs", "1", "--json")
    for task, name in (("A", "root"), ("B", "prefix-4"), ("C", "prefix-2")):
        assert main(["transfer", str(run), "--task", task, *few]) == 0
        assert json.loads(capsys.readouterr().out)["task"] == name
    assert main(["ls", "presets", "--json"]) == 0
    assert [row["preset"] for row in json.loads(capsys.readouterr().out)["presets"]] == list(PRESETS)


@pytest.mark.parametrize(("name", "length", "entropy"), [("pcfg-paper", 17, 3.196), ("hmm-paper", 16, 3.758)])
def test_the_papers_languages_have_its_mean_length_and_entropy(name, length, entropy):
    language = LANGUAGES[name][0].build()
    tokens, lengths, _ = language.sample(4000, generator=generator(0, "facts"))
    assert abs(lengths.double().mean() - length) < 4 * lengths.double().std() / 4000**0.5 + 1e-9
    # one masked token a sentence: every sentence counts alike, whatever its length
    each = language.conditional_entropy(tokens, lengths).double()
    present = torch.arange(tokens.shape[1]) < lengths[:, None]
    found = (each * present).sum(dim=1) / lengths
    assert abs(found.mean() - entropy) < 4 * found.std() / 4000**0.5 + 0.002
