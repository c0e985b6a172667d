"""The batch of a step and its loss, against the definition written out."""

import itertools

import pytest
import torch
from stepping import gradients_of
from toy_language import PairLanguage

from isoloss.errors import IsolossError
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.languages.exact import all_sentences
from isoloss.lab.models.architectures import BERT
from isoloss.lab.models.make import make_model
from isoloss.lab.training.objectives import check_language, prediction_loss, training_batch
from isoloss.run_config import ModelConfig, ObjectiveConfig, TrainConfig
from isoloss.text.masking import IGNORED

CPU = torch.device("cpu")


def config(**changes):
    return TrainConfig(language=PCFGConfig(), batch_size=16, **changes)


@pytest.mark.parametrize("masking", ["one", "fraction"])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_the_loss_is_the_mean_cross_entropy_of_the_masked_tokens(masking, is_ragged):
    language = PairLanguage(is_ragged=is_ragged)
    objective = ObjectiveConfig(masking=masking, fraction=0.4)
    batch, num_tokens = training_batch(language, config(objective=objective), 1, CPU)
    sentences = language.batch(1, 16, seed=0)
    assert num_tokens == int(sentences.lengths.sum())
    assert ("attention_mask" in batch) == is_ragged

    model = BERT.new_model(ModelConfig(size="d16"), vocab_size=10, max_length=4, pad_id=8, seed=0).double().eval()
    terms = []
    for i, length in enumerate(sentences.lengths.tolist()):
        hidden = [t for t in range(4) if batch["labels"][i, t] != IGNORED]
        assert hidden
        assert all(t < length for t in hidden)
        sentence = sentences.tokens[i, :length].clone()
        sentence[hidden] = language.mask_id
        log_probs = model(input_ids=sentence[None]).logits[0].log_softmax(-1)
        terms += [-log_probs[t, sentences.tokens[i, t]] for t in hidden]
    assert len(terms) == 16 or masking == "fraction"
    torch.testing.assert_close(
        prediction_loss(model, batch, causal=False), torch.stack(terms).mean(), rtol=1e-12, atol=0
    )


def test_a_batch_is_a_function_of_seed_and_step():
    """Sentences and hidden positions, which change even where the sentences do not."""

    class Constant(PairLanguage):
        def batch(self, step, n, *, seed):
            return super().batch(1, n, seed=0)

    for language in (PairLanguage(), Constant()):
        first, again, *others = (
            training_batch(language, config(seed=seed), step, CPU).inputs
            for step, seed in ((1, 0), (1, 0), (2, 0), (1, 1))
        )
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not any(torch.equal(first["labels"] == IGNORED, other["labels"] == IGNORED) for other in others)
        same = [torch.equal(first["input_ids"], other["input_ids"]) for other in others]
        assert same == [False, False]


def test_training_shows_the_corruption_and_predicts_the_same():
    language = PairLanguage()
    batches = [
        training_batch(language, config(objective=ObjectiveConfig(corruption=name)), 1, CPU).inputs
        for name in ("mask", "bert")
    ]
    assert batches[0]["labels"].equal(batches[1]["labels"])
    shown = [batch["input_ids"][batch["labels"] != IGNORED] for batch in batches]
    assert (shown[0] == language.mask_id).all()
    assert 0 < (shown[1] == language.mask_id).sum() < len(shown[1])


@pytest.mark.parametrize("is_ragged", [False, True])
def test_the_causal_loss_is_the_mean_cross_entropy_of_every_token_given_those_before(is_ragged):
    language = PairLanguage(is_ragged=is_ragged)
    batch, num_tokens = training_batch(language, config(objective=ObjectiveConfig(kind="causal")), 1, CPU)
    sentences = language.batch(1, 16, seed=0)
    assert num_tokens == int(sentences.lengths.sum()) + 16  # the starts
    assert ("attention_mask" in batch) == is_ragged

    model = make_model(ModelConfig(architecture="opt", size="d16"), language, seed=0).double().eval()
    terms = []
    for tokens, length in zip(sentences.tokens.tolist(), sentences.lengths.tolist(), strict=True):
        for t in range(length):
            before = torch.tensor([[language.mask_id, *tokens[:t]]])
            terms.append(-model(input_ids=before).logits[0, -1].log_softmax(-1)[tokens[t]])
    loss = prediction_loss(model, batch, causal=True)
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=1e-12, atol=0)


EXACT = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=2, vocab_size=4, stop_probability=0.3)


def enumerated_targets(language, batch):
    """Return a row for each masked token: its probabilities given the visible ones, by summing over all sentences."""
    rows = []
    lengths = batch.get("attention_mask", torch.ones_like(batch["labels"])).sum(1)
    for shown, labels, length in zip(batch["input_ids"], batch["labels"], lengths.tolist(), strict=True):
        every = torch.tensor(list(itertools.product(range(4), repeat=length)))
        probs = torch.zeros(len(every), dtype=torch.float64)
        for i, sentence in enumerate(every):
            masked = labels[:length] != IGNORED
            if torch.equal(sentence[~masked], shown[:length][~masked]):
                probs[i] = language.log_prob(sentence[None], torch.tensor([length])).exp()[0]
        for t in (labels != IGNORED).nonzero()[:, 0].tolist():
            rows.append(torch.stack([probs[every[:, t] == c].sum() for c in range(4)]) / probs.sum())
    return torch.stack(rows)


@pytest.mark.parametrize("masking", ["one", "fraction"])
def test_exact_targets_are_the_conditionals_given_the_visible_tokens(masking):
    language = EXACT.build().to(dtype=torch.float64)
    objective = ObjectiveConfig(masking=masking, fraction=0.5, labels="exact")
    batch = training_batch(language, config(objective=objective), 1, CPU).inputs
    assert (batch["labels"] != IGNORED).sum() == len(batch["targets"])
    assert ((batch["labels"] != IGNORED).sum(1) > 1).any() == (masking == "fraction")
    torch.testing.assert_close(batch["targets"], enumerated_targets(language, batch), rtol=1e-9, atol=1e-12)
    sampled = training_batch(language, config(objective=ObjectiveConfig(masking=masking, fraction=0.5)), 1, CPU).inputs
    assert all(torch.equal(sampled[name], batch[name]) for name in sampled)  # the same sentences and masks


def test_exact_targets_of_a_causal_model_are_the_conditionals_given_the_tokens_before():
    language = EXACT.build().to(dtype=torch.float64)
    objective, model = ObjectiveConfig(kind="causal", labels="exact"), ModelConfig(architecture="opt", size="d16")
    batch = training_batch(language, config(objective=objective, model=model), 1, CPU).inputs
    sentences, probabilities = all_sentences(language)
    rows = []
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        for t in range(len(ids) - 1):
            if labels[t + 1] != IGNORED:
                alike = (sentences.tokens[:, :t] == torch.tensor(ids[1 : t + 1])).all(dim=1) & (sentences.lengths > t)
                row = torch.zeros(4, dtype=torch.float64)
                rows.append(row.index_add_(0, sentences.tokens[alike, t], probabilities[alike]))
    expected = torch.stack(rows)
    expected /= expected.sum(dim=1, keepdim=True)
    torch.testing.assert_close(batch["targets"], expected, rtol=1e-9, atol=1e-12)


def test_exact_training_takes_the_mean_step_over_the_labels():
    language = EXACT.build().to(dtype=torch.float64)
    objective = ObjectiveConfig(labels="exact")
    model = make_model(ModelConfig(size="d16", dropout=0.0), language, seed=0).double()
    batch = training_batch(language, config(objective=objective), 1, CPU).inputs
    loss = prediction_loss(model, batch, causal=False)
    log_probs = model(batch["input_ids"], batch.get("attention_mask")).logits.log_softmax(-1)
    expected = 0.0
    for i, row in enumerate(enumerated_targets(language, batch)):
        t = int((batch["labels"][i] != IGNORED).nonzero()[0, 0])
        for label, probability in enumerate(row):
            expected = expected - probability * log_probs[i, t, label] / 16
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for got, want in zip(gradients_of(loss, model), gradients_of(expected, model), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_exact_labels_need_an_exact_language():
    check_language(ObjectiveConfig(labels="exact"), EXACT.build())
    check_language(ObjectiveConfig(), PairLanguage())
    with pytest.raises(IsolossError, match="PairLanguage has no exact conditionals: train on sampled labels"):
        check_language(ObjectiveConfig(labels="exact"), PairLanguage())
