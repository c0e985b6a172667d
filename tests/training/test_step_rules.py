"""Which rule a config gives, what is refused, and that every rule goes on bit for bit and trains through the loop."""

import pytest
import torch
from running import Signalling, content, small
from toy_language import PairLanguage

from isoloss import config as configs
from isoloss.errors import IsolossError
from isoloss.languages.config import PCFGConfig
from isoloss.models.make import make_model
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, TrainConfig
from isoloss.runs import Run
from isoloss.training.algorithms.adversarial import AdversarialStep, Examples
from isoloss.training.algorithms.build import make_rule
from isoloss.training.algorithms.config import AdversarialConfig, FisherPenaltyConfig, GradientConfig, SAMConfig
from isoloss.training.algorithms.fisher_penalty import FisherPenaltyStep
from isoloss.training.algorithms.sam import SAMStep
from isoloss.training.steps import GradientStep
from isoloss.training.trainer import Interrupted, train

ADVERSARIAL = AdversarialConfig(head_examples=8, loss_examples=4, task_examples=40)
RULES = [GradientConfig(), SAMConfig(), SAMConfig(batch="same"), ADVERSARIAL, FisherPenaltyConfig(sentences=3)]


def examples():
    sentences = PairLanguage().sample(40, generator=torch.Generator().manual_seed(0))
    return Examples(sentences, sentences.tokens[:, 0], 8)


@pytest.mark.parametrize(
    ("rule", "expected"),
    list(zip(RULES, [GradientStep, SAMStep, SAMStep, AdversarialStep, FisherPenaltyStep], strict=True)),
)
def test_the_config_decides_the_rule(rule, expected):
    config = small(rule=rule)
    assert configs.from_dict(TrainConfig, configs.to_dict(config)) == config
    model = make_model(ModelConfig(size="d16"), PairLanguage(), seed=0)
    assert type(make_rule(model, config, PairLanguage(), examples=examples())) is expected


@pytest.mark.parametrize(
    "changes",
    [
        *({"rule": rule} for rule in RULES[1:]),
        {"rule": SAMConfig(), "optimizer": OptimizerConfig(name="sgd", momentum=0.9, warmup_steps=3)},
        {"optimizer": OptimizerConfig(warmup_proportion=0.3, schedule="cosine", max_grad_norm=0.5)},
        {"optimizer": OptimizerConfig(warmup_steps=3, schedule="linear"), "micro_batch": 3},
    ],
    ids=["sam-halves", "sam-same", "adversarial", "fisher-penalty", "sam-sgd", "cosine-clipped", "linear-micro"],
)
def test_every_rule_goes_on_bit_for_bit(tmp_path, changes):
    config = small(**changes)
    whole, stopped = Run(tmp_path / "whole"), Run(tmp_path / "stopped")
    train(whole, config, PairLanguage(is_ragged=True), examples=examples())
    language = Signalling({3, 9}, is_ragged=True)
    for _ in range(2):
        with pytest.raises(Interrupted):
            train(stopped, config, language, examples=examples())
    train(stopped, config, language, examples=examples())
    assert content(stopped) == content(whole)


@pytest.mark.parametrize("objective", [{"masking": "one"}, {"masking": "fraction", "fraction": 0.4}])
def test_exact_labels_train_through_the_loop(tmp_path, objective):
    config = small(objective=ObjectiveConfig(labels="exact", **objective), micro_batch=3)
    train(Run(tmp_path / "exact"), config, config.language.build())
    sampled = small(objective=ObjectiveConfig(**objective), micro_batch=3)
    train(Run(tmp_path / "sampled"), sampled, config.language.build())
    losses = [Run(tmp_path / name).metrics()[-1]["loss_nats"] for name in ("exact", "sampled")]
    assert losses[0] != losses[1]
    with pytest.raises(IsolossError, match="PairLanguage has no exact conditionals"):
        train(Run(tmp_path / "none"), config, PairLanguage())
    assert not (tmp_path / "none").exists()


def test_what_a_rule_looks_at_is_in_the_metrics(tmp_path):
    for rule, names in [
        (SAMConfig(), ["loss_at_ascent_nats"]),
        (ADVERSARIAL, ["adversary_loss", "adversary_accuracy"]),
        (FisherPenaltyConfig(), ["trace_estimate"]),
    ]:
        run = Run(tmp_path / rule.kind)
        train(run, small(rule=rule), PairLanguage(), examples=examples())
        assert list(run.metrics()[0]) == ["step", "loss_nats", "learning_rate", "grad_norm", *names]


def test_an_objective_that_is_not_finite_stops_the_run(tmp_path):
    config = small(rule=SAMConfig(rho=1e30, batch="same"), checkpoints=(0,))
    with pytest.raises(
        IsolossError, match=r"loss_at_ascent_nats at step 1 is (nan|inf).*the checkpoint of step 0 is kept"
    ):
        train(Run(tmp_path), config, PairLanguage())
    assert Run(tmp_path).steps() == [0]


def test_the_adversary_needs_examples(tmp_path):
    with pytest.raises(IsolossError, match="the adversarial rule needs the examples of the task root"):
        train(Run(tmp_path / "run"), small(rule=ADVERSARIAL), PairLanguage())
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (SAMConfig(rho=0.0), "the sam rule's rho is 0.0; it must be above 0"),
        (SAMConfig(rho=float("nan")), "the sam rule's rho is nan"),
        (SAMConfig(batch="third"), "the sam rule's batch is 'third'; it must be halves or same"),
        (AdversarialConfig(weight=-1.0), "the adversarial rule's weight is -1.0; it must be above 0"),
        (AdversarialConfig(ridge=0.0), "the adversarial rule's ridge is 0.0; it must be above 0"),
        (AdversarialConfig(head_examples=1), "head_examples is 1; it must be at least 2"),
        (AdversarialConfig(loss_examples=0), "loss_examples is 0; it must be at least 1"),
        (AdversarialConfig(task_examples=255), r"draws 128 \+ 128 examples a step from task_examples, 255"),
        (FisherPenaltyConfig(coefficient=0.0), "the fisher-penalty rule's coefficient is 0.0; it must be above 0"),
        (FisherPenaltyConfig(sentences=0), "the fisher-penalty rule's sentences is 0; it must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_written(tmp_path, rule, message):
    with pytest.raises(IsolossError, match=message):
        train(Run(tmp_path / "run"), small(rule=rule), PairLanguage(), examples=examples())
    assert not (tmp_path / "run").exists()


def test_halves_need_an_even_batch(tmp_path):
    with pytest.raises(IsolossError, match="batch_size is 7; the sam rule's halves need an even number"):
        train(Run(tmp_path), small(rule=SAMConfig(), batch_size=7), PairLanguage())
    train(Run(tmp_path), small(rule=SAMConfig(batch="same"), batch_size=7, steps=1), PairLanguage())


def test_an_unknown_rule_or_field_is_refused():
    document = configs.to_dict(TrainConfig(language=PCFGConfig()))
    with pytest.raises(
        IsolossError,
        match="algorithm is one of gradient, sam, adversarial, fisher-penalty, not 'lion'",
    ):
        configs.from_dict(TrainConfig, {**document, "rule": {"kind": "lion"}})
    with pytest.raises(IsolossError, match="rho"):
        configs.from_dict(TrainConfig, {**document, "rule": {"kind": "gradient", "rho": 0.1}})
