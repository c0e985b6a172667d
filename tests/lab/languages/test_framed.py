"""Languages between [CLS] and [SEP]: what is framed, predicted and measured; the contract has their numbers."""

import math

import pytest
import torch

from isoloss import evaluate, finetune, linear_probe, make_task, pretrain
from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.evaluation.loss import exact_targets, pretraining_loss, why_no_exact_targets
from isoloss.lab.languages.config import (
    BracketsConfig,
    DyckConfig,
    HMMConfig,
    PCFGConfig,
    WithSpecialTokensConfig,
)
from isoloss.lab.languages.exact import all_sentences, masked_sentences, why_not_enumerable
from isoloss.lab.languages.special_tokens import WithSpecialTokens
from isoloss.lab.models.make import make_model
from isoloss.lab.training.objectives import training_batch
from isoloss.run_config import ModelConfig, ObjectiveConfig, TrainConfig
from isoloss.text.masking import IGNORED, mask, predict_next

INNER = {
    "pcfg": PCFGConfig(levels=2, symbols_per_level=2, rules_per_symbol=3, vocab_size=3, stop_probability=0.3),
    "hmm": HMMConfig(states=4, blocks=2, vocab_size=4, length=3, seed=5),
    "brackets": BracketsConfig(length=6),
    "dyck": DyckConfig(max_length=4, max_depth=2),
}
FRACTION = ObjectiveConfig(masking="fraction", fraction=0.5)


@pytest.fixture(params=INNER)
def framed(request):
    return WithSpecialTokensConfig(language=INNER[request.param]).build()


def some(language, n=40):
    return language.sample(n, generator=torch.Generator().manual_seed(0))


def test_sentences_are_those_of_the_inner_language(framed):
    inner = framed.inner
    for own, other in (
        (some(framed), some(inner)),
        (framed.batch(3, 20, seed=1), inner.batch(3, 20, seed=1)),
        (all_sentences(framed)[0], all_sentences(inner)[0]),
    ):
        assert torch.equal(own.lengths, other.lengths + 2)
        for row, length, plain in zip(own.tokens.tolist(), own.lengths.tolist(), other.tokens.tolist(), strict=True):
            assert row[0] == framed.cls_id
            assert row[length - 1] == framed.sep_id
            assert row[1 : length - 1] == plain[: length - 2]
            assert set(row[length:]) <= {framed.pad_id}
        back = framed.bare(own)
        assert torch.equal(back.tokens, other.tokens)
        assert torch.equal(back.lengths, other.lengths)
    ids = {framed.cls_id, framed.sep_id, framed.pad_id, framed.mask_id}
    assert ids == set(range(inner.vocab_size, inner.vocab_size + 4))
    assert framed.model_vocab_size == inner.vocab_size + 4
    assert framed.vocabulary == (*inner.vocabulary, "[CLS]", "[SEP]")
    assert framed.tasks() == inner.tasks()
    if inner.latent_name == "tree":
        own, other = (
            each.sample(5, generator=torch.Generator().manual_seed(0), latent=True) for each in (framed, inner)
        )
        assert framed.describe_latent(own) == inner.describe_latent(other)


def test_the_loss_over_all_sentences(framed):
    objective = ObjectiveConfig()
    model = make_model(ModelConfig(size="d16", dropout=0.0), framed, seed=0).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
            )
    whole = exact_targets(framed, num_sentences="all", objective=objective, seed=0)
    found = pretraining_loss(model, whole)
    inner = exact_targets(framed.inner, num_sentences="all", objective=objective, seed=0)
    wanted = float(inner.weights @ inner.entropy)
    assert found["entropy"].value == pytest.approx(wanted, rel=1e-10, abs=1e-12)
    kl = 0.0
    sentences, positions, weights = masked_sentences(framed)
    bare = framed.bare(sentences)
    logs = framed.inner.log_conditionals(bare.tokens, bare.lengths, positions=positions - 1)
    for i, t in enumerate(positions.tolist()):
        ids = sentences.tokens[i : i + 1].clone()
        ids[0, t] = framed.mask_id
        with torch.no_grad():
            present = sentences.present()[i : i + 1].long()
            log_q = model(input_ids=ids, attention_mask=present).logits[0, t].log_softmax(dim=-1)
        p = logs[i].exp()
        kl += float(weights[i] * (p * (logs[i] - log_q[: framed.inner.vocab_size]))[p > 1e-300].sum())
    assert kl > 0.01
    assert found["kl"].value == pytest.approx(kl, rel=1e-9)


@pytest.mark.parametrize("objective", [ObjectiveConfig(), FRACTION, ObjectiveConfig(masking="fraction", fraction=1.0)])
def test_only_inner_tokens_are_predicted(framed, objective):
    sentences = some(framed, 200)
    batch = mask(sentences, framed, objective, generator=torch.Generator().manual_seed(1))
    labels = batch["labels"]
    assert int(labels.max()) < framed.inner.vocab_size
    assert torch.equal(batch["input_ids"][:, 0], sentences.tokens[:, 0])
    if objective.fraction == 1:
        assert torch.equal((labels != IGNORED).sum(dim=1), sentences.lengths - 2)
    following = predict_next(sentences, framed)
    assert torch.equal(following["input_ids"], sentences.tokens)
    assert int(following["labels"].max()) < framed.inner.vocab_size
    measured = exact_targets(framed, num_sentences=50, objective=objective, seed=0)
    assert int(measured.batch["labels"].max()) < framed.inner.vocab_size
    config = TrainConfig(language=framed.config, num_sentences=20, masked_copies=2, objective=objective, batch_size=40)
    inputs, _ = training_batch(framed, config, 1, torch.device("cpu"))
    assert int(inputs["labels"].max()) < framed.inner.vocab_size
    assert (inputs["input_ids"][:, 0] == framed.cls_id).all()


def test_tasks_have_the_labels_of_the_inner_language():
    for name, config in (("prefix-2", INNER["pcfg"]), ("root-latent", INNER["pcfg"]), ("state-2-latent", INNER["hmm"])):
        framed = WithSpecialTokensConfig(language=config).build()
        own, inner = (make_task(each, name, num_train=60, num_test=40) for each in (framed, framed.inner))
        assert torch.equal(own.test_labels, inner.test_labels)
        assert own.classes == inner.classes
        assert own.bayes.value == pytest.approx(inner.bayes.value, rel=1e-12)
        assert own.inputs()[0][0] == f"[CLS] {inner.inputs()[0][0]} [SEP]"
    brackets = WithSpecialTokensConfig(language=INNER["brackets"]).build()
    assert make_task(brackets, "mismatch", num_train=9, num_test=9).test.tokens.shape == (9, 8)


def test_the_prefix_of_a_name():
    assert languages.resolve("framed:brackets-8") == WithSpecialTokensConfig(language=BracketsConfig(length=8))
    with pytest.raises(IsolossError, match="no language 'brackets-9'"):
        languages.resolve("framed:brackets-9")
    with pytest.raises(IsolossError, match="needs language: give them in a"):
        languages.resolve("framed")
    twice = WithSpecialTokensConfig(language=WithSpecialTokensConfig(language=BracketsConfig()))
    with pytest.raises(IsolossError, match="already: leave out one frame"):
        twice.build()
    with pytest.raises(IsolossError, match="cannot be framed"):
        WithSpecialTokens(WithSpecialTokens(BracketsConfig().build()))


@pytest.mark.parametrize(
    ("row", "length", "message"),
    [
        ([2, 3, 0], 2, "sentence 0 has 2 tokens"),
        ([0, 0, 1, 3], 4, "must have .CLS. as its first token"),
        ([2, 0, 1, 1], 4, "must have .CLS. as its first token"),
        ([2, 0, 2, 3], 4, "and none between"),
        ([2, 0, 4, 3], 4, "holds the token id 4"),
    ],
)
def test_what_is_no_framed_sentence_is_refused(row, length, message):
    language = WithSpecialTokensConfig(language=BracketsConfig(length=2)).build()
    with pytest.raises(IsolossError, match=message):
        language.log_prob(torch.tensor([row]), torch.tensor([length]))
    if len(row) == 4 and max(row) < 4:
        assert not language.is_possible(torch.tensor([row]), torch.tensor([length])).any()


@pytest.mark.parametrize("config", [HMMConfig(length=4), BracketsConfig(length=4)], ids=["hmm", "brackets"])
def test_a_sentence_that_is_too_short_inside_its_frame_is_impossible(config):
    language = WithSpecialTokensConfig(language=config).build()
    tokens, lengths, _ = language.sample(2, generator=torch.Generator().manual_seed(0))
    assert language.is_possible(tokens, lengths).tolist() == [True, True]
    tokens[1, -2:] = torch.tensor([language.sep_id, language.pad_id])
    lengths[1] -= 1
    assert language.is_possible(tokens, lengths).tolist() == [True, False]


def test_a_language_with_few_exact_masks_is_refused_by_its_inner_tokens(monkeypatch):
    language = WithSpecialTokensConfig(language=BracketsConfig(length=6)).build()
    assert language.max_masked == 8
    monkeypatch.setattr(type(language.inner), "max_masked", property(lambda self: 2))
    assert language.max_masked == 2
    every = ObjectiveConfig(masking="fraction", fraction=1.0)
    assert "masks up to 6" in why_no_exact_targets(language, num_sentences=20, objective=every, seed=0)
    assert why_no_exact_targets(language, num_sentences=20, objective=ObjectiveConfig(), seed=0) is None
    assert why_not_enumerable(language) is None


def test_a_run_is_trained_measured_probed_and_fine_tuned(tmp_path):
    config = TrainConfig(
        language=WithSpecialTokensConfig(language=INNER["pcfg"]),
        model=ModelConfig(size="d16"),
        num_sentences=50,
        masked_copies=2,
        objective=ObjectiveConfig(masking="fraction"),
        steps=3,
        batch_size=8,
        device="cpu",
    )
    run = pretrain(tmp_path / "run", config)
    measures = ["loss", "trace", "minimal-trace", "probe-prefix-2", "lookup-prefix-2"]
    settings = {
        "loss_sentences": 50,
        "num_train": 40,
        "num_test": 40,
        "probe_epochs": 2,
        "probe_seeds": 1,
        "num_sequences": 20,
    }
    found = evaluate([str(run.path)], measures, settings=settings).to_dict()
    assert len(found) == len(measures)
    assert all(math.isfinite(row["estimates"][name]["value"]) for row in found for name in row["estimates"])
    model = load_model(str(run.last_checkpoint())).model
    task = make_task(config.language.build(), "prefix-2", num_train=40, num_test=20)
    for result in (
        linear_probe(model, task, epochs=2, seeds=1, pooling="first"),
        finetune(model, task, epochs=1, seeds=1),
    ):
        assert result.predictions.shape == (1, 20)
