"""A run with its task and its measures: what is measured, that measuring changes nothing, and that it resumes."""

import dataclasses
import json

import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.evaluation.evaluator import Evaluator, evaluate
from isoloss.lab.evaluation.loss import exact_targets
from isoloss.lab.evaluation.pretraining import _VALIDATION_SEED, pretrain
from isoloss.lab.languages.config import LAPTOP_PCFG, BracketsConfig, PCFGConfig
from isoloss.lab.training.algorithms.config import AdversarialConfig, GradientConfig
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.runs import Run

CONFIG = TrainConfig(
    language=LAPTOP_PCFG,
    model=ModelConfig(size="d16", dropout=0.2),
    optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=2),
    steps=8,
    batch_size=8,
    log_every=2,
    checkpoints=(4,),
    measure_every=4,
    measure_sentences=64,
    threads=1,
    device="cpu",
)


def content(run):
    found = {str(p.relative_to(run.path)): p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    return {name: data for name, data in found.items() if name not in ("log.jsonl", ".lock", "run.json")}


def test_measuring_changes_nothing_in_training(tmp_path):
    before = torch.get_rng_state()
    measured = pretrain(tmp_path / "measured", CONFIG)
    assert torch.equal(torch.get_rng_state(), before)
    plain = pretrain(tmp_path / "plain", dataclasses.replace(CONFIG, measure_every=0))
    for step in (4, 8):
        for name in ("model.safetensors", "trainer.safetensors"):
            bytes_of = [(run.checkpoint(step) / name).read_bytes() for run in (measured, plain)]
            assert bytes_of[0] == bytes_of[1]
    names = ["kl_nats", "kl_stderr", "trace", "trace_stderr"]
    for line, without in zip(measured.metrics(), plain.metrics(), strict=True):
        found = [line.pop(name) for name in names if name in line]
        assert len(found) == (4 if line["step"] in (4, 8) else 0)
        assert line == without


def test_what_is_measured_is_what_eval_says(tmp_path):
    run = pretrain(tmp_path, CONFIG)
    evaluator = Evaluator(run, {"loss_sentences": 64, "num_sequences": 64, "seed": 0})
    for line in run.metrics()[1::2]:
        kl = evaluator.measure("loss", line["step"])[0].estimates["kl"]
        trace = evaluator.measure("trace", line["step"])[0].estimates["trace"]
        assert [line[name] for name in ("kl_nats", "kl_stderr")] == pytest.approx([kl.value, kl.stderr], rel=1e-5)
        assert [line[name] for name in ("trace", "trace_stderr")] == pytest.approx(
            [trace.value, trace.stderr], rel=1e-4
        )


def test_a_measured_run_goes_on_bit_for_bit(tmp_path, monkeypatch):
    whole = pretrain(tmp_path / "whole", CONFIG)
    language = CONFIG.language.build()
    stopped = Run(tmp_path / "stopped")
    draw = language.batch
    for at in (3, 5):

        def batch(step, n, *, seed, at=at):
            if step == at:
                raise ZeroDivisionError
            return draw(step, n, seed=seed)

        monkeypatch.setattr(type(language), "batch", lambda _self, *a, made=batch, **k: made(*a, **k))
        with pytest.raises(ZeroDivisionError):
            pretrain(stopped, CONFIG, language=language)
        monkeypatch.undo()
    pretrain(stopped, CONFIG, language=language)
    assert content(stopped) == content(whole)


def test_a_causal_model_and_one_of_text_are_measured(tmp_path, monkeypatch, vocab, words):
    causal = dataclasses.replace(
        CONFIG, model=ModelConfig(architecture="opt", size="d16"), objective=ObjectiveConfig(kind="causal")
    )
    last = pretrain(tmp_path / "causal", causal).metrics()[-1]
    assert last["trace"] > 0
    assert 0 < last["kl_nats"] < 3
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(words[i : i + 18]))
    corpus = languages.resolve(str(tmp_path / "text"), tokenizer=str(vocab), length=6)
    corpus = dataclasses.replace(corpus, held_out=0.4)
    line = pretrain(tmp_path / "run", dataclasses.replace(CONFIG, language=corpus)).metrics()[-1]
    assert 2 < line["held_out_nats"] < 6
    assert line["trace"] > 0


def test_the_adversary_gets_the_training_set_of_its_task(tmp_path):
    adversarial = AdversarialConfig(task="prefix-4", head_examples=16, loss_examples=16, task_examples=100)
    config = dataclasses.replace(CONFIG, algorithm=adversarial)
    run = pretrain(tmp_path / "run", config)
    assert json.loads((run.path / "metrics.jsonl").read_text().splitlines()[0])["adversary_loss"] > 0
    with pytest.raises(IsolossError, match="no task 'prefix-99'"):
        pretrain(
            tmp_path / "other",
            dataclasses.replace(config, algorithm=dataclasses.replace(adversarial, task="prefix-99")),
        )
    assert not (tmp_path / "other" / "run.json").exists()
    for task, message in (("root", "no task 'root': choose mismatch"), ("mismatch", "are not the language's")):
        spoiled = dataclasses.replace(adversarial, task=task)
        brackets = dataclasses.replace(config, language=BracketsConfig(length=4), algorithm=spoiled)
        with pytest.raises(IsolossError, match=message):
            pretrain(tmp_path / task, brackets)


def test_a_helper_raises_the_probes_accuracy_and_an_adversary_lowers_it(tmp_path):
    """Of prefix-2 of a small grammar, by the probe and examples of an evaluation: 30 and 70 points apart, +- 1.5."""
    config = TrainConfig(
        language=PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8),
        model=ModelConfig(size="d16", dropout=0.0),
        optimizer=OptimizerConfig(learning_rate=0.005, warmup_steps=0),
        **{"steps": 60, "batch_size": 64, "device": "cpu", "threads": 1},
    )
    accuracy = {}
    for name, algorithm in {
        "adversary": AdversarialConfig(task="prefix-2", weight=1.0),
        "neither": GradientConfig(),
        "helper": AdversarialConfig(task="prefix-2", weight=-1.0),
    }.items():
        run = pretrain(tmp_path / name, dataclasses.replace(config, algorithm=algorithm))
        settings = {"num_train": 512, "num_test": 2048, "probe_epochs": 20, "probe_seeds": 1}
        measured = Evaluator(run, settings).measure("probe-prefix-2", 60)[0]
        accuracy[name] = measured.estimates["accuracy"].value
    assert accuracy["adversary"] + 0.07 < accuracy["neither"] < accuracy["helper"] - 0.07


# --- targets


def test_a_stage_ends_where_the_kl_on_its_own_sentences_is_low_enough(tmp_path):
    """Every value in the metrics is that of the checkpoint on a draw which no evaluation makes."""
    stages = (
        StageConfig(steps=40, target_kl=0.27, validate_every=4),
        StageConfig(steps=4, optimizer=OptimizerConfig(name="sgd", learning_rate=0.01, warmup_steps=0)),
    )
    config = dataclasses.replace(
        CONFIG, stages=stages, steps=44, measure_every=0, checkpoints=tuple(range(0, 45, 4)), measure_sentences=256
    )
    run = pretrain(tmp_path, config)
    first, second = run.result()["stages"]
    assert (first["ended"], second["ended"]) == ("target reached", "steps done")
    assert second["step"] == first["step"] + 4
    evaluator = Evaluator(run, {"loss_sentences": 256, "seed": _VALIDATION_SEED})
    lines = [line for line in run.metrics() if "validation_kl_nats" in line]
    assert len(lines) == first["step"] // 4 > 1
    for line in lines:
        kl = evaluator.measure("loss", line["step"])[0].estimates["kl"]
        assert line["validation_kl_nats"] == pytest.approx(kl.value, rel=1e-5)
        assert line["validation_kl_stderr"] == pytest.approx(kl.stderr, rel=1e-5)
        assert (kl.value <= 0.27) == (line is lines[-1])
    language = config.language.build()
    drawn = [
        {
            tuple(row)
            for row in exact_targets(language, num_sentences=256, objective=config.objective, seed=seed)
            .batch["input_ids"]
            .tolist()
        }
        for seed in (0, _VALIDATION_SEED)
    ]
    assert len(drawn[0] & drawn[1]) < 20  # of 256 masked sentences


def test_a_causal_run_ends_at_a_kl_to_the_next_tokens_truth(tmp_path):
    config = TrainConfig(
        language=PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8),
        model=ModelConfig(architecture="llama", size="d32", dropout=0.0),
        objective=ObjectiveConfig(kind="causal", labels="exact"),
        optimizer=OptimizerConfig(name="muon", learning_rate=0.01),
        stages=(StageConfig(steps=400, target_kl=0.1, validate_every=10),),
        batch_size=64,
        log_every=10,
        threads=1,
    )
    run = pretrain(tmp_path / "run", config)
    (ended,) = run.result()["stages"]
    assert ended["ended"] == "target reached"
    assert ended["validation_kl_nats"] <= 0.1
    found = evaluate(run.path, "loss", steps="last", settings={"loss_sentences": "all"})
    kl = found[0].estimates["kl"]
    assert kl.is_exact
    assert abs(kl.value - ended["validation_kl_nats"]) < 5 * ended["validation_kl_stderr"]


def test_a_target_loss_is_of_fresh_sentences_or_of_held_out_text(tmp_path, monkeypatch, vocab, words):
    stage = StageConfig(steps=8, target_loss=20.0, validate_every=2)
    causal = dataclasses.replace(
        CONFIG,
        **{"stages": (stage,), "measure_every": 0, "checkpoints": ()},
        model=ModelConfig(architecture="opt", size="d16"),
        objective=ObjectiveConfig(kind="causal"),
    )
    (ended,) = pretrain(tmp_path / "causal", causal).result()["stages"]
    assert (ended["step"], ended["ended"]) == (2, "target reached")
    assert 3.0 < ended["validation_loss_nats"] < 4.0  # of 32 tokens: 3.47 where nothing is known
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(words[i : i + 18]))
    corpus = dataclasses.replace(
        languages.resolve(str(tmp_path / "text"), tokenizer=str(vocab), length=6), held_out=0.4
    )
    text = dataclasses.replace(causal, language=corpus, model=CONFIG.model, objective=CONFIG.objective)
    (ended,) = pretrain(tmp_path / "run", text).result()["stages"]
    assert 2.0 < ended["validation_loss_nats"] < 6.0
    kl = dataclasses.replace(stage, target_loss=None, target_kl=1.0)
    with pytest.raises(IsolossError, match=r"target_kl is 1, but Corpus has no exact .* give target_loss"):
        pretrain(tmp_path / "none", dataclasses.replace(text, stages=(kl,)))
    assert not (tmp_path / "none").exists()


def test_a_complete_run_is_returned_as_it_is(tmp_path, monkeypatch):
    run = pretrain(tmp_path / "run", CONFIG)
    before = content(run)
    monkeypatch.setattr(type(CONFIG.language), "build", None)  # nothing is made, drawn or measured
    assert pretrain(run, CONFIG) == run
    assert content(run) == before
    with pytest.raises(IsolossError, match=r"holds a run of another config .*steps is 9 here and 8 there"):
        pretrain(run, dataclasses.replace(CONFIG, steps=9))


def test_a_run_says_in_a_line_what_it_is(tmp_path):
    assert repr(Run(tmp_path / "run")) == f"Run('{tmp_path}/run', not begun)"
    assert "<td>not begun</td>" in Run(tmp_path / "run")._repr_html_()
    run = pretrain(tmp_path / "run", CONFIG)
    assert repr(run) == f"Run('{tmp_path}/run', complete, checkpoints at steps [4, 8])"
    for cell in ("bert d16", "pcfg", "gradient", "nats at step 8"):
        assert cell in run._repr_html_()


def test_a_measure_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(IsolossError, match="measure_every is 5; it must be a multiple of log_every, 2"):
        pretrain(tmp_path / "run", dataclasses.replace(CONFIG, measure_every=5))
    with pytest.raises(IsolossError, match="measure_sentences is 3; it must be at least 10"):
        pretrain(tmp_path / "run", dataclasses.replace(CONFIG, measure_sentences=3))
    assert not (tmp_path / "run").exists()
