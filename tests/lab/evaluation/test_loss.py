"""The pre-training loss against enumeration on a Markov chain, and the held-out loss against plain cross-entropy."""

import itertools
import json
import math

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from isoloss.errors import IsolossError
from isoloss.lab.evaluation import loss
from isoloss.lab.languages.base import ExactLanguage, Language, Sentences
from isoloss.run_config import ObjectiveConfig
from isoloss.seeds import generator
from isoloss.statistics.comparison import paired_difference
from isoloss.statistics.estimate import Estimate
from isoloss.text.masking import mask
from known_estimates import leave_one_out_error

ONE = ObjectiveConfig(masking="one")
FRACTION = ObjectiveConfig(masking="fraction", fraction=0.4)


class Chain(ExactLanguage):
    """A first-order Markov chain of 2 or 3 tokens; token 2 never follows token 0. Everything by enumeration."""

    vocab_size, max_length, vocabulary = 3, 3, ("a", "b", "c")
    pad_id, mask_id, model_vocab_size = 3, 4, 5
    num_held_out = 500
    first = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    step = torch.tensor([[0.3, 0.7, 0.0], [0.2, 0.2, 0.6], [0.45, 0.15, 0.4]], dtype=torch.float64)
    long = 0.6  # probability of 3 tokens

    def sentences(self):
        """Every (sentence, probability)."""
        for length, share in ((2, 1 - self.long), (3, self.long)):
            for tokens in itertools.product(range(3), repeat=length):
                yield tokens, share * self.given_length(tokens)

    def given_length(self, tokens):
        probability = float(self.first[tokens[0]])
        for previous, token in itertools.pairwise(tokens):
            probability *= float(self.step[previous, token])
        return probability

    def conditional(self, tokens, t):
        """Pr(x_t = c | the other tokens, the length) for each c."""
        weights = [self.given_length([*tokens[:t], c, *tokens[t + 1 :]]) for c in range(3)]
        return [w / sum(weights) for w in weights]

    def sample(self, n, *, generator=None, latent=False):
        tokens = torch.full((n, 3), self.pad_id)
        lengths = torch.where(torch.rand(n, generator=generator, dtype=torch.float64) < self.long, 3, 2)
        tokens[:, 0] = torch.multinomial(self.first, n, replacement=True, generator=generator)
        for t in (1, 2):
            drawn = torch.multinomial(self.step[tokens[:, t - 1].clamp_max(2)], 1, generator=generator)[:, 0]
            tokens[:, t] = torch.where(lengths > t, drawn, self.pad_id)
        return Sentences(tokens, lengths)

    def batch(self, step, n, *, seed):
        return self.sample(n, generator=generator(seed, "train", step))

    def held_out(self, n):
        return self.sample(min(n, 500), generator=generator(0, "held out"))

    def log_prob(self, tokens, lengths):
        rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
        return torch.tensor([math.log(self.given_length(x[:m])) for x, m in rows], dtype=torch.float64)

    def log_conditionals(self, tokens, lengths, *, mask=None, positions=None):
        out = torch.zeros(*tokens.shape, 3, dtype=torch.float64)
        tiny = torch.finfo(torch.float64).tiny
        for i, m in enumerate(lengths.tolist()):
            hidden = [False] * m if mask is None else mask[i, :m].tolist()
            for t in range(m):
                p = given_visible(self.given_length, tokens[i, :m].tolist(), hidden, t)
                out[i, t] = p.clamp_min(tiny).log()
        return out if positions is None else out.gather(1, positions[..., None].expand(-1, -1, 3))

    def conditional_entropy(self, tokens, lengths, *, mask=None, positions=None):
        log_p = self.log_conditionals(tokens, lengths, mask=mask, positions=positions)
        return -(log_p.exp() * log_p).sum(dim=-1)


class Corpus(Language):
    """The chain's sentences without their probabilities."""

    vocab_size, max_length, vocabulary = Chain.vocab_size, Chain.max_length, Chain.vocabulary
    pad_id, mask_id, model_vocab_size = Chain.pad_id, Chain.mask_id, Chain.model_vocab_size
    num_held_out = Chain.num_held_out

    def sample(self, n, *, generator=None, latent=False):
        return Chain().sample(n, generator=generator)

    def held_out(self, n=None):
        return Chain().held_out(n)


def bert(seed=0, *, dropout=0.0, dtype=torch.float64, vocab=5):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.4,
        pad_token_id=3,
    )
    return BertForMaskedLM(config).to(dtype).eval()


class Plain(nn.Module):
    """The same model under another class: no shortcut for known architectures."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, input_ids, attention_mask):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask)


def per_sentence(model, tokens, t):
    """(entropy, KL) of one masked sentence, by the definition, one token at a time."""
    x = torch.tensor([[*tokens, *[3] * (3 - len(tokens))]])
    x[0, t] = 4
    present = torch.tensor([[1] * len(tokens) + [0] * (3 - len(tokens))])
    with torch.no_grad():
        logits = model(input_ids=x, attention_mask=present).logits[0, t].double().tolist()
    normalizer = math.log(math.fsum(math.exp(z) for z in logits))
    p = Chain().conditional(tokens, t)
    entropy = -math.fsum(q * math.log(q) for q in p if q > 0)
    kl = math.fsum(q * (math.log(q) - (logits[c] - normalizer)) for c, q in enumerate(p) if q > 0)
    return entropy, kl


def population(model):
    """Exact expectations of entropy and KL over sentences and masked positions."""
    entropy = kl = 0.0
    for tokens, probability in Chain().sentences():
        if probability == 0:
            continue
        for t in range(len(tokens)):
            h, d = per_sentence(model, tokens, t)
            entropy += probability / len(tokens) * h
            kl += probability / len(tokens) * d
    return entropy, kl


def make_targets(n=600, seed=0):
    return loss.exact_targets(Chain(), num_sentences=n, objective=ONE, seed=seed)


def held_out_loss(model, language, *, num_sequences, objective, seed, **options):
    batch = loss.held_out_batch(language, num_sequences=num_sequences, objective=objective, seed=seed)
    return loss.text_loss(model, [batch], objective=objective, seed=seed, method="held-out text", **options)


# --- exact languages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda model: model, Plain], ids=["bert", "any module"])
def test_values_are_exact_sentence_by_sentence(wrap):
    model, targets = bert(), make_targets(120)
    values = loss.kl_values(wrap(model), targets, batch_size=50)
    assert values.dtype == torch.float64
    for i in range(len(targets)):
        t = int((targets.batch["labels"][i] != -100).nonzero()[0])
        tokens = torch.where(
            targets.batch["labels"][i] == -100, targets.batch["input_ids"][i], targets.batch["labels"][i]
        )
        length = int(targets.batch["attention_mask"][i].sum())
        entropy, kl = per_sentence(model, tuple(tokens[:length].tolist()), t)
        assert float(targets.entropy[i]) == pytest.approx(entropy, rel=1e-12, abs=1e-14)
        assert float(values[i]) == pytest.approx(kl, rel=1e-10)


def test_estimates_agree_with_the_enumerated_expectation():
    model = bert()
    entropy, kl = population(model)
    found = loss.pretraining_loss(model, make_targets(4000, seed=3))
    assert list(found) == ["entropy", "kl", "loss"]
    for name, expected in (("entropy", entropy), ("kl", kl), ("loss", entropy + kl)):
        estimate = found[name]
        assert abs(estimate.value - expected) < 4 * estimate.stderr
        assert 0 < estimate.stderr < 0.03 * expected
        assert (estimate.samples, estimate.num_predictions) == (4000, 4000)
        assert estimate.unit == "nats per predicted token"
        assert Estimate.from_dict(json.loads(json.dumps(estimate.to_dict()))) == estimate
    assert found["loss"].value == pytest.approx(found["entropy"].value + found["kl"].value, rel=1e-12)


def test_errors_and_subsets_are_those_of_the_values():
    model, targets = bert(), make_targets(500)
    values = loss.kl_values(model, targets)
    found = loss.pretraining_loss(model, targets)["kl"]
    assert found.value == pytest.approx(float(values.mean()), rel=1e-13)
    assert found.stderr == pytest.approx(float(values.std()) / math.sqrt(500), rel=1e-12)
    assert found.details["subset_std"] == pytest.approx(float(values.view(5, 100).mean(dim=1).std()), rel=1e-12)
    assert found.details["subset_size"] == 100
    assert {name: found.details[name] for name in ("masking", "seed", "device", "dtype")} == {
        "masking": "one",
        "seed": 0,
        "device": "cpu",
        "dtype": "float64",
    }


def test_intervals_cover_the_expectation():
    model, covered, values = bert(), 0, set()
    expected = sum(population(model))
    for seed in range(60):
        found = loss.pretraining_loss(model, make_targets(50, seed=seed))["loss"]
        covered += found.ci95[0] < expected < found.ci95[1]
        values.add(found.value)
    assert covered >= 52  # of 57, with a binomial standard deviation of 1.7
    assert len(values) == 60


def test_a_model_that_knows_the_truth_has_no_kl():
    class Oracle(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, attention_mask):
            logits = torch.full((*input_ids.shape, 5), -1e4, dtype=torch.float64)
            for i, (x, m) in enumerate(zip(input_ids.tolist(), attention_mask.sum(dim=1).tolist(), strict=True)):
                p = torch.tensor(Chain().conditional(x[:m], x.index(4)), dtype=torch.float64)
                logits[i, x.index(4), :3] = p.log().clamp_min(-1e4)
            return type("Output", (), {"logits": logits})

    found = loss.pretraining_loss(Oracle(), make_targets(40))
    assert abs(found["kl"].value) < 1e-14
    assert found["loss"].value == pytest.approx(found["entropy"].value, rel=1e-14)


def test_mass_on_special_tokens_is_part_of_the_kl():
    model, targets = bert(), make_targets(30)
    before = loss.kl_values(model, targets)
    with torch.no_grad():
        model.cls.predictions.bias[4] += 3.0
    assert bool((loss.kl_values(model, targets) > before).all())


@pytest.mark.parametrize("batch_size", [64, 7, 1000])
def test_truth_and_values_do_not_depend_on_the_parts(batch_size, monkeypatch):
    model, kept = bert(), make_targets()
    values = loss.kl_values(model, kept)
    monkeypatch.setattr(loss, "_KEPT_BYTES", 0)
    monkeypatch.setattr(loss, "_PART_BYTES", 5 * 8 * 3)
    monkeypatch.setattr(loss, "_PART", 150)
    monkeypatch.setattr(loss, "ROWS", 5)
    targets = make_targets()
    assert targets.kept is None
    torch.testing.assert_close(targets.entropy, kept.entropy, rtol=1e-14, atol=1e-15)
    assert torch.equal(targets.log_conditionals(), kept.log_conditionals())
    done = []
    found = loss.kl_values(model, targets, batch_size=batch_size, progress=done.append)
    torch.testing.assert_close(found, values, rtol=1e-12, atol=1e-14)
    assert done == sorted(done)
    assert done[-1] == 600


@pytest.mark.parametrize(("part_bytes", "held"), [(100 * 24, 96), (10, 32), (1000 * 24, 992)])
def test_whole_batches_of_bounded_size_are_held(part_bytes, held, monkeypatch):
    monkeypatch.setattr(loss, "_PART_BYTES", part_bytes)
    assert make_targets().held_at_once(32) == held  # 24 bytes a sentence


def test_float32_models_agree_to_their_precision():
    targets = make_targets()
    wide, narrow = loss.kl_values(bert(), targets), loss.kl_values(bert(dtype=torch.float32), targets)
    torch.testing.assert_close(wide, narrow, rtol=1e-4, atol=1e-5)


# --- several masked tokens -------------------------------------------------------------------------------------------


def given_visible(probability, sentence, hidden, t):
    """Pr(x_t = c | visible tokens) for each c of three."""
    choices = [range(3) if gone or i == t else (x,) for i, (x, gone) in enumerate(zip(sentence, hidden, strict=True))]
    mass = torch.zeros(3, dtype=torch.float64)
    for full in itertools.product(*choices):
        mass[full[t]] += probability(list(full))
    return mass / mass.sum()


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed"])
def test_several_masked_tokens_are_predicted_from_the_visible_ones(kept, monkeypatch):
    language, probability = Chain(), Chain().given_length
    model = bert()
    if not kept:
        monkeypatch.setattr(loss, "_KEPT_BYTES", 0)
        monkeypatch.setattr(loss, "_PART_BYTES", 700)
    targets = loss.exact_targets(language, num_sentences=60, objective=FRACTION, seed=2)
    assert (targets.kept is not None) == kept
    log_conditionals = targets.log_conditionals()
    hidden = targets.batch["labels"] != -100
    assert torch.equal(targets.counts, hidden.sum(dim=1))
    assert targets.counts.max() >= 3
    tokens = torch.where(hidden, targets.batch["labels"], targets.batch["input_ids"])
    with torch.no_grad():
        logits = model(input_ids=targets.batch["input_ids"], attention_mask=targets.batch["attention_mask"]).logits
    log_q = logits.log_softmax(dim=-1)
    values = loss.kl_values(model, targets, batch_size=13)
    done = 0
    for i, m in enumerate(targets.batch["attention_mask"].sum(dim=1).tolist()):
        entropy = kl = 0.0
        for t in hidden[i].nonzero()[:, 0].tolist():
            p = given_visible(probability, tokens[i, :m].tolist(), hidden[i, :m].tolist(), t)
            torch.testing.assert_close(log_conditionals[done].exp(), p, rtol=1e-10, atol=1e-300)
            entropy -= float(torch.special.xlogy(p, p).sum())
            kl += float((torch.special.xlogy(p, p) - p * log_q[i, t, :3]).sum())
            done += 1
        assert float(targets.entropy[i]) == pytest.approx(entropy, rel=1e-10, abs=1e-13)
        assert float(values[i]) == pytest.approx(kl, rel=1e-9)
    assert done == len(log_conditionals)
    ends = targets.counts.cumsum(dim=0).tolist()
    assert torch.equal(targets.log_conditionals(7, 31), log_conditionals[ends[6] : ends[30]])
    found = loss.pretraining_loss(model, targets)
    for key, sums in (("entropy", targets.entropy), ("kl", values), ("loss", targets.entropy + values)):
        value = float(sums.sum() / targets.counts.sum())
        assert found[key].value == pytest.approx(value, rel=1e-12)
        assert found[key].stderr == pytest.approx(leave_one_out_error(sums, targets.counts), rel=1e-10)
        assert (found[key].samples, found[key].num_predictions) == (60, int(targets.counts.sum()))
        assert (found[key].details["masking"], found[key].details["fraction"]) == ("fraction", 0.4)


# --- differences -----------------------------------------------------------------------------------------------------


def test_a_paired_difference_is_exact_and_sharper():
    first, second = bert(), bert()
    with torch.no_grad():
        second.cls.predictions.bias[1] += 0.1
    expected = population(first)[1] - population(second)[1]
    targets = make_targets(3000, seed=5)
    a, b = loss.kl_values(first, targets), loss.kl_values(second, targets)
    found = paired_difference(*(loss.pretraining_loss(model, targets)["kl"] for model in (first, second)))
    assert abs(found.value - expected) < 4 * found.stderr
    assert found.stderr == pytest.approx(float((a - b).std()) / math.sqrt(3000), rel=1e-9)
    alone = math.hypot(*(float(v.std()) / math.sqrt(3000) for v in (a, b)))
    assert found.stderr < alone / 5


# --- corpora ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [ONE, FRACTION], ids=["one", "fraction"])
@pytest.mark.parametrize("wrap", [lambda model: model, Plain], ids=["bert", "any module"])
def test_held_out_loss_is_the_cross_entropy_per_token(objective, wrap):
    model, corpus = bert(), Corpus()
    done = []
    found = held_out_loss(
        wrap(model), corpus, num_sequences=200, objective=objective, seed=4, batch_size=30, progress=done.append
    )["loss"]
    batch = mask(corpus.held_out(200), corpus, objective, generator=generator(4, "evaluation masks"))
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    nats = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    counts = (batch["labels"] != -100).sum(dim=1)
    value = float(nats.sum() / counts.sum())
    assert found.value == pytest.approx(value, rel=1e-12)
    _, sentences = corpus.held_out(200).tokens.unique(dim=0, return_inverse=True)  # equal ones are one cluster
    n = int(sentences.max()) + 1
    sums = torch.zeros(n, dtype=torch.float64).index_add_(0, sentences, nats.sum(dim=1))
    sizes = torch.zeros(n, dtype=torch.int64).index_add_(0, sentences, counts)
    assert found.stderr == pytest.approx(leave_one_out_error(sums, sizes), rel=1e-10)
    assert (found.samples, found.num_predictions) == (n, int(counts.sum()))
    assert found.details["clusters"] == "different sequences"
    assert found.details.get("fraction") == (0.4 if objective is FRACTION else None)
    assert done == [30, 60, 90, 120, 150, 180, 200]


def test_documents_count_as_independent_where_the_batches_have_them():
    batch = loss.held_out_batch(Corpus(), num_sequences=60, objective=FRACTION, seed=1)
    documents = torch.arange(60) // 3
    by_sequence, by_document = (
        loss.text_loss(bert(), [given], objective=FRACTION, seed=1, method="")["loss"]
        for given in ({**batch, "documents": torch.arange(60)}, {**batch, "documents": documents})
    )
    assert (by_sequence.samples, by_document.samples) == (60, 20)
    assert by_document.value == pytest.approx(by_sequence.value, rel=1e-12)
    counts = (batch["labels"] != -100).sum(dim=1).double()
    # each influence is (n - 1) residual / (all positions - its own); a document's residual is its sequences' sum
    residuals = torch.from_numpy(by_sequence.influence) * (counts.sum() - counts) / 59
    left = counts.sum() - counts.view(20, 3).sum(dim=1)
    expected = 19 * residuals.view(20, 3).sum(dim=1) / left
    assert by_document.influence == pytest.approx(expected.numpy(), rel=1e-9)


def test_held_out_loss_of_an_exact_language_is_its_exact_loss_within_the_error_and_differences_are_sharper():
    first, second = bert(), bert()
    with torch.no_grad():
        second.cls.predictions.bias[1] += 0.1
    one, other = (
        held_out_loss(model, Chain(), num_sequences=500, objective=ONE, seed=0)["loss"] for model in (first, second)
    )
    assert abs(one.value - sum(population(first))) < 4 * one.stderr
    found = paired_difference(one, other)
    assert abs(found.value - sum(population(first)) + sum(population(second))) < 4 * found.stderr
    assert found.stderr < math.hypot(one.stderr, other.stderr) / 5


def test_held_out_loss_takes_what_there_is():
    found = held_out_loss(bert(), Corpus(), num_sequences=10_000, objective=ONE, seed=0)["loss"]
    assert found.num_predictions == 500
    assert found.samples == len(Corpus().held_out(500).tokens.unique(dim=0))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "objective", "n", "sentence"),
    [
        (Corpus(), ONE, 100, "Corpus has no exact conditionals: the measure loss is"),
        (Chain(), ONE, 9, "num_sentences is 9; an error bar needs at least 10"),
    ],
)
def test_exact_targets_that_cannot_be_had_are_refused(language, objective, n, sentence):
    with pytest.raises(IsolossError, match=sentence):
        loss.exact_targets(language, num_sentences=n, objective=objective, seed=0)


def test_models_that_cannot_be_measured_are_refused():
    targets = make_targets(20)
    with pytest.raises(IsolossError, match=r"call model\.eval\(\)"):
        loss.pretraining_loss(bert(dropout=0.1).train(), targets)
    with pytest.raises(IsolossError, match="batch_size is 0; it must be at least 1"):
        loss.pretraining_loss(bert(), targets, batch_size=0)
    broken = bert()
    with torch.no_grad():
        broken.cls.predictions.bias[0] = math.nan
    with pytest.raises(IsolossError, match="logits are NaN or infinite in sentences 0 to 19"):
        loss.pretraining_loss(broken, targets)
    small = bert()
    small.resize_token_embeddings(5)
    small.cls.predictions.decoder = nn.Linear(8, 2).double()
    with pytest.raises(IsolossError, match="the model knows 2 ids and the language has 3 tokens"):
        loss.pretraining_loss(small, targets)
    with pytest.raises(IsolossError, match="token 2 is not among the 2 ids of the model"):
        held_out_loss(small, Corpus(), num_sequences=50, objective=ONE, seed=0)
    with pytest.raises(IsolossError, match="there are 6 sequences; an error bar needs at least 10"):
        held_out_loss(bert(), Corpus(), num_sequences=6, objective=ONE, seed=0)
