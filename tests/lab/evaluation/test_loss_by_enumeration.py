"""The loss summed over all masked sentences, against loops over all sentences and positions, and against samples."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.lab.evaluation.evaluator import Evaluator, evaluate, pending
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.lab.evaluation.loss import exact_targets, pretraining_loss
from isoloss.lab.languages.config import BracketsConfig, HMMConfig, PCFGConfig
from isoloss.lab.languages.hmm import HMM
from isoloss.lab.models.make import make_model
from isoloss.lab.training.train import train
from isoloss.run_config import ModelConfig, ObjectiveConfig, TrainConfig
from isoloss.runs import Run
from isoloss.statistics.comparison import paired_difference
from isoloss.statistics.estimate import Estimate
from isoloss.studies import Experiment
from isoloss.studies.claims import Claim, Contrast, Verdict, answer
from isoloss.studies.results import difference, measured
from isoloss.studies.verify import verify_run

ONE = ObjectiveConfig(masking="one")
CAUSAL = ObjectiveConfig(kind="causal")


class TwoLengths(HMM):
    """Sentences of 2 or 3 tokens, whose log-probability is given the length."""

    @property
    def length_probs(self):
        return torch.tensor([0, 0, 0.3, 0.7], dtype=torch.float64)


PARSED = PCFGConfig(levels=2, symbols_per_level=2, rules_per_symbol=3, vocab_size=3, stop_probability=0.3)
MARKOV = HMMConfig(states=4, blocks=2, vocab_size=4, length=3, seed=5)
LANGUAGES = {
    "grammar": PARSED.build(),
    "hmm": MARKOV.build(),
    "brackets": BracketsConfig(length=6).build(),
    "two lengths": TwoLengths.from_config(MARKOV),
}


def model_of(language, seed=0, dtype=torch.float64, architecture="bert"):
    """A model that is far from uniform."""
    config = ModelConfig(architecture=architecture, size="d16", dropout=0.0)
    model = make_model(config, language, seed=seed).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.to(dtype)


def strings_of(language):
    """The probability of every string; `log_prob` has tests of its own."""
    strings = {}
    for length, share in enumerate(language.length_probs.tolist()):
        own = {}
        for x in itertools.product(range(language.vocab_size), repeat=length) if share else ():
            try:
                own[x] = math.exp(float(language.log_prob(torch.tensor([x]), torch.tensor([length]))))
            except IsolossError:
                own[x] = 0.0
        strings |= {x: share * p / math.fsum(own.values()) for x, p in own.items()}
    assert math.fsum(strings.values()) == pytest.approx(1, rel=1e-12)
    return strings


def slow_loss(model, language):
    """The entropy and the KL, each token of each string by itself."""
    strings, entropy, kl = strings_of(language), 0.0, 0.0
    width = language.max_length
    for x, probability in strings.items():
        for t in range(len(x)) if probability else ():
            joint = [strings[*x[:t], c, *x[t + 1 :]] for c in range(language.vocab_size)]
            p = [each / math.fsum(joint) for each in joint]
            ids = torch.tensor([[*x[:t], language.mask_id, *x[t + 1 :], *[language.pad_id] * (width - len(x))]])
            present = torch.tensor([[1] * len(x) + [0] * (width - len(x))])
            with torch.no_grad():
                logits = model(input_ids=ids, attention_mask=present).logits[0, t].tolist()
            normalizer = math.log(math.fsum(map(math.exp, logits)))
            weight = probability / len(x)
            entropy -= weight * math.fsum(q * math.log(q) for q in p if q > 0)
            kl += weight * math.fsum(q * (math.log(q) - logits[c] + normalizer) for c, q in enumerate(p) if q > 0)
    return entropy, kl


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_loss_is_the_sum_over_all_sentences_and_positions(name):
    language = LANGUAGES[name]
    model, whole = model_of(language), exact_targets(language, num_sentences="all", objective=ONE, seed=0)
    entropy, kl = slow_loss(model, language)
    assert kl > 0.01
    wide = pretraining_loss(model, whole, batch_size=50)
    narrow = pretraining_loss(model.float(), whole)
    for key, value in (("entropy", entropy), ("kl", kl), ("loss", entropy + kl)):
        assert wide[key].value == pytest.approx(value, rel=1e-10, abs=1e-12)
        assert narrow[key].value == pytest.approx(value, rel=1e-5, abs=1e-12)


def slow_causal_loss(model, language):
    """The same of next tokens, from sums over all strings that begin alike."""
    strings, entropy, kl, tokens = strings_of(language), 0.0, 0.0, 0.0
    for x, probability in strings.items():
        for t in range(len(x)) if probability else ():
            joint = [
                math.fsum(p for y, p in strings.items() if len(y) > t and y[: t + 1] == (*x[:t], c))
                for c in range(language.vocab_size)
            ]
            p = [each / math.fsum(joint) for each in joint]
            ids = torch.tensor([[language.start.id, *x[:t]]])
            with torch.no_grad():
                log_q = model(input_ids=ids).logits[0, -1].log_softmax(dim=0).tolist()
            tokens += probability
            entropy -= probability * math.fsum(q * math.log(q) for q in p if q > 0)
            kl += probability * math.fsum(q * (math.log(q) - log_q[c]) for c, q in enumerate(p) if q > 0)
    return entropy / tokens, kl / tokens


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_loss_of_a_causal_model_is_the_sum_over_all_sentences_and_positions(name):
    language = LANGUAGES[name]
    model = model_of(language, architecture="opt")
    targets = exact_targets(language, num_sentences="all", objective=CAUSAL, seed=0)
    found = pretraining_loss(model, targets, batch_size=50)
    entropy, kl = slow_causal_loss(model, language)
    assert kl > 0.01
    for key, value in (("entropy", entropy), ("kl", kl), ("loss", entropy + kl)):
        assert found[key].value == pytest.approx(value, rel=1e-10, abs=1e-12)
        assert found[key].is_exact
    if name != "two lengths":  # it draws the longer ones alone
        drawn = pretraining_loss(model, exact_targets(language, num_sentences=5_000, objective=CAUSAL, seed=1))
        assert abs(drawn["kl"].value - kl) < 4 * drawn["kl"].stderr
    # not kept, but computed a part at a time
    anew = replace(targets, kept=None)
    assert pretraining_loss(model, anew)["kl"].value == pytest.approx(kl, rel=1e-10)


def test_the_sum_is_told_to_be_exact():
    language = LANGUAGES["grammar"]
    whole = exact_targets(language, num_sentences="all", objective=ONE, seed=0)
    found = pretraining_loss(model_of(language), whole)
    assert list(found) == ["entropy", "kl", "loss"]
    for name, estimate in found.items():
        assert estimate.is_exact
        assert str(estimate).endswith(" nats per predicted token (exact)")
        assert estimate.method == f"exact conditionals, {name}: a sum over all {len(whole)} masked sentences"
        assert (estimate.num_predictions, estimate.influence) == (len(whole), None)
        assert dict(estimate.details) == {"device": "cpu", "dtype": "float64", "masking": "one"}
        assert Estimate.from_dict(json.loads(json.dumps(estimate.to_dict()))) == estimate
    other = pretraining_loss(model_of(language, seed=1), whole)
    moved = paired_difference(found["kl"], other["kl"])
    assert moved.is_exact
    assert moved.value == found["kl"].value - other["kl"].value


# --- runs ------------------------------------------------------------------------------------------------------------

CONFIG = TrainConfig(
    language=PARSED,
    model=ModelConfig(size="d16", dropout=0.0),
    objective=ONE,
    steps=20,
    batch_size=8,
    checkpoints=(10,),
    device="cpu",
)
ALL = {"loss_sentences": "all"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("runs") / "run")
    train(run, CONFIG, CONFIG.language.build())
    evaluator = Evaluator(run, ALL)
    for step in (10, 20):
        evaluator.evaluate("loss", step)
    return run


def test_evaluations_of_a_run_are_kept_and_measured_again_to_the_same(run):
    assert pending(run, ["loss"], [10, 20], ALL) == []
    assert pending(run, ["loss"], [10, 20], {}) == [(10, "loss"), (20, "loss")]
    checks = dict(verify_run(run, Experiment(config=CONFIG, measurements=()), ["loss"], [10, 20], ALL))
    assert set(checks.values()) == {None}
    assert any("measured again" in name for name in checks)


def test_differences_of_exact_values_are_exact(run):
    later, earlier = (measured(run, "loss", step) for step in (20, 10))
    a, b = later["kl"].value, earlier["kl"].value
    assert a != b
    moved, halved = (difference(later["kl"], earlier["kl"], factor=factor) for factor in (1.0, 0.5))
    assert (moved.value, halved.value) == (a - b, a - 0.5 * b)
    assert moved.is_exact
    assert halved.is_exact
    assert moved.unit == "nats per predicted token"
    claim = Claim(id="less", statement="Less.", direction="decrease" if a < b else "increase", of=print, measures="kl")
    (found,) = answer(
        claim, Contrast(names=("early", "late"), pairs=((earlier, later),), needs_same_loss=False), {"": "kl"}
    )
    assert found.verdict is Verdict.SHOWN
    assert "early, both exact: " in found.explanation
    others = replace(earlier["kl"], inputs="others")
    with pytest.raises(IsolossError, match="not made on the same examples"):
        difference(later["kl"], others)
    sampled = replace(earlier["kl"], stderr=0.1, samples=9)
    with pytest.raises(IsolossError, match="not made on the same examples"):
        difference(later["kl"], sampled)


def test_other_probabilities_are_other_inputs(run):
    """Two languages with the same sentences, which differ in how likely these are."""
    checkpoint = run.checkpoint(20)
    languages = [HMMConfig(states=2, blocks=1, vocab_size=3, length=3, seed=seed) for seed in (0, 1)]
    inputs = {evaluate(checkpoint, "loss", language=each, settings=ALL)[0].inputs for each in languages}
    assert len(inputs) == 2


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "objective", "num", "sentence"),
    [
        (PARSED, ONE, "al", "num_sentences is 'al'; it must be a whole number or all"),
        (PARSED, ObjectiveConfig(masking="fraction"), "all", "masks a fraction of 0.15: give a number of sentences to"),
        (
            PCFGConfig(),
            ONE,
            "all",
            "about 10^12 strings of tokens, more than the 65,536 that can be enumerated: give a",
        ),
    ],
)
def test_what_cannot_be_summed_is_refused(config, objective, num, sentence):
    with pytest.raises(IsolossError) as refused:
        exact_targets(config.build(), num_sentences=num, objective=objective, seed=0)
    assert sentence in str(refused.value)


def test_a_loss_without_exact_probabilities_is_no_sum(run, tmp_path):
    np.save(tmp_path / "ids.npy", np.zeros((20, 4), dtype=np.int64))
    inputs = InputConfig(mask_id=4)
    with pytest.raises(IsolossError, match="text has no exact probabilities to sum over: give a number of sentences"):
        evaluate(run.checkpoint(20), "loss", data=tmp_path / "ids.npy", inputs=inputs, settings=ALL)
