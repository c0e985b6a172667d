"""Auxiliary samples: against plain loops, in the estimate, and everything that they refuse."""

import itertools
import math
import types

import numpy as np
import pytest
import small_models
import torch
import torch.nn.functional as F
from small_models import cut
from torch import nn

from isoloss.comparison.traces import compare_traces
from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace
from isoloss.flatness._ghost import auxiliary
from isoloss.flatness._ghost.auxiliary import AuxiliarySample, Bigrams, _Tokens
from isoloss.seeds import generator

VOCAB, LENGTH, TOPICS = 24, 8, 4
MASK = VOCAB - 1


def bert(*, size=8, vocab=VOCAB):
    return small_models.bert(vocab, seed=0, size=size, layers=1, spread=0.4, dtype=torch.float32)


def topical(n, *names, documents=None, hide=True):
    """Sequences of a topic each, the words of which all other topics leave out; one word is hidden."""
    draws = generator(0, *names)
    topics = torch.randint(TOPICS, (n,), generator=draws)
    if documents is not None:  # one topic a document
        topics = topics[documents - documents.min()]
    words = torch.randint((VOCAB - 1) // TOPICS, (n, LENGTH), generator=draws)
    ids = TOPICS * words + topics[:, None]
    labels, places = torch.full_like(ids, -100), torch.randint(LENGTH, (n, 1), generator=draws)
    if hide:
        labels.scatter_(1, places, ids.gather(1, places))
        ids = ids.scatter(1, places, MASK)
    batch = {"input_ids": ids, "labels": labels}
    return batch if documents is None else {**batch, "documents": documents}


# --- what is read ----------------------------------------------------------------------------------------------------


def shown(batch):
    """Each sequence's tokens, without padding and with those that are hidden."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).tolist()
    rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), mask, strict=True)
    return [[y if y != -100 else i for i, y, here in zip(*row, strict=True) if here] for row in rows]


def log_probabilities(sequences, halves, vocabulary):
    """The mean log-probability of each token after the one before, by the other half, with plain dictionaries."""
    values = []
    for tokens, half in zip(sequences, halves, strict=True):
        others = [other for other, its in zip(sequences, halves, strict=True) if its != half]
        pairs = [pair for other in others for pair in itertools.pairwise(other)]
        logs = []
        for i, j in itertools.pairwise(tokens):
            frequency = (sum(b == j for _, b in pairs) + 0.5) / (len(pairs) + 0.5 * vocabulary)
            after = sum(a == i for a, _ in pairs)
            logs.append(math.log((pairs.count((i, j)) + 5 * frequency) / (after + 5)))
        values.append(math.fsum(logs) / max(1, len(logs)))
    return values


def reference(weight, batch, clusters, halves):
    """Each sequence's features, their mean, and the covariance of its error, by loops."""
    sequences = shown(batch)
    means = np.array([sum(weight[i].double().numpy() for i in tokens) / len(tokens) for tokens in sequences])
    values = np.column_stack([log_probabilities(sequences, halves, len(weight)), means])
    mean = values.mean(axis=0)
    sums = {}
    for cluster, value in zip(clusters, values - mean, strict=True):
        sums[cluster] = sums.get(cluster, 0) + value
    number, scatter = len(sums), sum(np.outer(s, s) for s in sums.values())
    return values, mean, scatter * number / (number - 1) / len(values) ** 2


def halves_of(batch):
    tokens = _Tokens.of(batch, VOCAB)
    return Bigrams(VOCAB)._split(tokens.ids, tokens.present, tokens.documents)[0].tolist()


@pytest.mark.parametrize("sizes", [[90], [1] * 90, [40, 7, 43]])
@pytest.mark.parametrize("by_document", [False, True])
@pytest.mark.parametrize("padded", ["", "left", "right"])
def test_means_and_their_errors_are_those_of_plain_loops(sizes, by_document, padded):
    model, batch = bert(), topical(90, "pool")
    if padded:
        mask = (torch.arange(LENGTH) < 1 + torch.arange(90)[:, None] % LENGTH).long()
        batch["attention_mask"] = mask.flip(1) if padded == "left" else mask
    tokens = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    present = batch.get("attention_mask", torch.ones_like(tokens)).bool()
    # equal sequences are one cluster
    clusters = [tuple(row[here].tolist()) for row, here in zip(tokens, present, strict=True)]
    if by_document:
        batch["documents"] = torch.arange(90) // 4 + 70
        clusters = batch["documents"].tolist()
    pool = AuxiliarySample.read(model, iter(cut(batch, sizes)))
    halves = halves_of(batch)
    values, mean, covariance = reference(model.get_input_embeddings().weight.detach(), batch, clusters, halves)
    assert (pool.num_sequences, pool.by_document) == (90, by_document)
    np.testing.assert_allclose(pool.mean, mean, rtol=1e-6)
    along = pool.directions.numpy()
    np.testing.assert_allclose(along.T @ along, np.eye(9), atol=1e-12)
    assert along[0].tolist() == [1.0] + [0.0] * 8
    np.testing.assert_allclose(pool.covariance, along.T @ covariance @ along, atol=1e-6 * covariance.max())
    embedded = pool.covariance[1:, 1:]
    variances = embedded.diagonal()
    np.testing.assert_allclose(embedded, torch.diag(variances), atol=1e-6 * float(variances.max()))
    assert variances.tolist() == sorted(variances.tolist(), reverse=True)
    np.testing.assert_allclose(pool.features(batch), (values - mean) @ along, atol=1e-6)


def test_a_sequence_is_in_one_half_whatever_is_hidden_or_padded():
    batch = topical(400, "pool")
    halves = halves_of(batch)
    assert 150 < sum(halves) < 250
    assert halves_of(topical(400, "pool", hide=False)) == halves
    for sides in ((0, 3), (2, 0)):
        wide = {name: F.pad(value, sides, value=7) for name, value in batch.items()}
        wide["attention_mask"] = F.pad(torch.ones(400, LENGTH), sides)
        assert halves_of(wide) == halves
    assert halves_of({name: value[17:40] for name, value in batch.items()}) == halves[17:40]
    moved = {name: value.roll(1, dims=1) for name, value in batch.items()}
    assert halves_of(moved) != halves
    documents = torch.arange(400) // 3
    by_document = halves_of({**batch, "documents": documents})
    assert halves_of({**batch, "documents": documents.tolist()}) == by_document  # as a checked batch has them
    named = halves_of({**batch, "documents": [f"d{number}" for number in documents.tolist()]})
    assert all(named[3 * i] == named[3 * i + 1] == named[3 * i + 2] for i in range(133))
    assert 0.4 < sum(named) / len(named) < 0.6
    assert 150 < sum(by_document) < 250
    assert all(len(set(by_document[i : i + 3])) == 1 for i in range(0, 399, 3))


@pytest.mark.parametrize(("within", "by_document"), [(True, False), (False, True)])
def test_features_have_the_mean_and_the_error_that_they_say(within, by_document):
    """Of measured sequences in a pool, whose pairs it counts, and of others; the first feature alone, in its error."""
    model, n, size = bert(), 60, 240
    draws = generator(0, "markov", int(within))
    transitions = torch.rand(VOCAB, VOCAB, generator=draws).pow(20)
    transitions = (transitions / transitions.sum(dim=1, keepdim=True)).cumsum(dim=1)
    deviations = []
    for _ in range(80):
        ids = torch.randint(VOCAB, (size + n, 1), generator=draws)
        for _ in range(LENGTH - 1):
            drawn = torch.rand(size + n, 1, generator=draws)
            following = (transitions[ids[:, -1]] < drawn).sum(dim=1, keepdim=True).clamp(max=VOCAB - 1)
            ids = torch.cat([ids, following], dim=1)
        documents = torch.arange(size + n) // 3
        batch = {"input_ids": ids, **({"documents": documents} if by_document else {})}
        whole = {name: value[:size] for name, value in batch.items()}
        measured = {name: value[:n] if within else value[size:] for name, value in batch.items()}
        pool = AuxiliarySample.read(model, [whole])
        of_auxiliary = float(pool.covariance[0, 0])
        variance = of_auxiliary * size / n + (
            -of_auxiliary if within else of_auxiliary
        )  # of a part of the pool, or of others, less it
        deviations.append(float(pool.features(measured)[:, 0].mean()) / math.sqrt(variance))
    assert abs(np.mean(deviations)) < 4 / math.sqrt(80)
    assert np.std(deviations) == pytest.approx(1, abs=4 / math.sqrt(160))


def test_pairs_of_a_large_vocabulary_share_counts(monkeypatch):
    ids = torch.randint(6, (300, 10), generator=generator(0, "ids"))
    whole, few = Bigrams(6), None
    monkeypatch.setattr(auxiliary, "_MOST", 7)
    few = Bigrams(6)
    for table in (whole, few):
        table.add(ids, None, None)
    assert [len(counts) for counts in few._counts] == [14, 12, 12]
    assert float(few._counts[0].sum()) == float(whole._counts[0].sum()) == 2700
    assert float(few._counts[0].max()) < 300
    assert not torch.allclose(few.log_probability(ids, None, None), whole.log_probability(ids, None, None))


def test_there_are_at_most_16_directions_those_of_the_largest_variance():
    model, batch = bert(size=32, vocab=64), {"input_ids": torch.randint(64, (500, 4), generator=generator(0, "ids"))}
    pool = AuxiliarySample.read(model, [batch])
    values = model.get_input_embeddings().weight.detach()[batch["input_ids"]].mean(dim=1).double()
    largest = torch.linalg.eigvalsh(torch.cov(values.T)).flip(0)[:16] / 500
    assert pool.directions.shape == (33, 17)
    np.testing.assert_allclose(pool.covariance.diagonal()[1:], largest, rtol=1e-5)


def test_directions_without_variance_are_left_out():
    ids = torch.tensor([[1, 1], [2, 2], [3, 3]])[torch.randint(3, (60,), generator=generator(0, "ids"))]
    batch = {"input_ids": ids, "documents": torch.arange(60)}
    assert AuxiliarySample.read(bert(), [batch]).directions.shape == (9, 3)  # three points lie in a plane
    same = AuxiliarySample.read(
        bert(), [{"input_ids": torch.ones(60, 2, dtype=torch.int64), "documents": torch.arange(60)}]
    )
    assert same.directions.shape == (9, 1)
    assert same.features({"input_ids": torch.ones(5, 2, dtype=torch.int64)}).shape == (5, 1)


# --- in the estimate -------------------------------------------------------------------------------------------------


class Topical(nn.Module):
    """A model whose confidence, and with it the trace, depends on a sequence's topic."""

    def __init__(self, by=0.0):
        super().__init__()
        draws = generator(0, "topical")
        self.words, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB, bias=False)
        marks = torch.randn(TOPICS, 8, generator=draws) * torch.arange(TOPICS)[:, None]
        with torch.no_grad():
            self.words.weight.copy_(0.3 * torch.randn(VOCAB, 8, generator=draws))
            self.words.weight[: VOCAB - 1] += marks[torch.arange(VOCAB - 1) % TOPICS]
            self.head.weight.copy_(torch.randn(VOCAB, 8, generator=draws))
            for parameter in self.parameters():
                parameter += by * torch.randn(parameter.shape, generator=draws)

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids):
        words = self.words(input_ids)
        return types.SimpleNamespace(logits=self.head(words + words.mean(dim=1, keepdim=True)))


class Untold(Topical):
    """A model that does not look at its words."""

    def forward(self, input_ids):
        return types.SimpleNamespace(logits=self.head(0 * self.words(input_ids) + 1))


def measure(model, batch, *, num_probes=4, **options):
    return fisher_trace(model, [batch], causal=False, num_probes=num_probes, **options)


def repeated(model, number, *, sequences=256, size=8):
    """Estimates of fresh sequences, with a fresh pool of `size` times as many and without."""
    found = []
    for repetition in range(number):
        batch = topical(sequences, "measured", repetition)
        pool = [topical(size * sequences, "pool", repetition)]
        found.append([measure(model, batch, seed=repetition, auxiliary_sample=p) for p in (pool, None)])
    return list(zip(*found, strict=True))


def test_what_tokens_tell_is_averaged_over_the_pool():
    pooled, alone = repeated(Topical(), 8)
    assert {e.details["auxiliary_directions"] for e in pooled} == {8}
    assert {e.details["auxiliary_sequences"] for e in pooled} == {2048}
    assert {(e.details["auxiliary_directions"], e.details["auxiliary_sequences"]) for e in alone} == {(0, 0)}
    spreads = [float(np.std([e.value for e in some], ddof=1)) for some in (pooled, alone)]
    errors = [math.sqrt(np.mean([e.stderr**2 for e in some])) for some in (pooled, alone)]
    assert errors[0] < 0.7 * errors[1]
    for spread, error in zip(spreads, errors, strict=True):
        assert spread == pytest.approx(error, rel=3 / math.sqrt(2 * 7))
    means = [np.mean([e.value for e in some]) for some in (pooled, alone)]
    assert abs(means[0] - means[1]) < 4 * math.hypot(*errors) / math.sqrt(8)


@pytest.mark.slow
def test_the_interval_covers_with_a_pool():
    pooled, alone = repeated(Topical(), 400, sequences=512, size=4)
    truth = np.mean([e.value for e in pooled])  # with a twentieth of one's error
    # 95 % nominal; the binomial standard deviation over 400 repetitions is 1.1 points
    assert 0.92 <= np.mean([e.ci95[0] < truth < e.ci95[1] for e in pooled]) <= 0.98
    assert abs(truth - np.mean([e.value for e in alone])) < 4 * alone[0].stderr / 20


def test_documents_are_the_clusters_of_a_pool_too():
    documents = torch.arange(9000) // 3
    model, measured = Topical(), topical(900, "measured", documents=documents[:900])
    pool = [topical(9000, "pool", documents=documents)]
    found, alone = measure(model, measured, auxiliary_sample=pool), measure(model, measured)
    assert (found.samples, found.details["clusters"], found.details["auxiliary_directions"]) == (300, "documents", 8)
    assert found.stderr < 0.7 * alone.stderr
    assert sum(found.by_parameter.values()) == pytest.approx(found.value, rel=1e-12)
    assert sum(found.by_layer.values()) == pytest.approx(found.value, rel=1e-12)


def test_a_pool_of_something_else_is_not_used():
    batch, other = topical(300, "measured"), {"input_ids": torch.full((3000, LENGTH), 3)}
    alone, found = measure(Topical(), batch), measure(Topical(), batch, auxiliary_sample=[topical(100, "pool"), other])
    assert (found.details["auxiliary_differs"], found.details["auxiliary_directions"]) == (True, 0)
    # the controls lie in a wider table, so that sums over them may be rounded in another order
    assert (found.value, found.stderr) == pytest.approx((alone.value, alone.stderr), rel=1e-12)


def test_models_share_an_auxiliary_sample_in_a_comparison():
    first, second = Topical(), Topical(by=0.05)
    pairs, own = [], []
    for repetition in range(8):
        batch, pool = topical(256, "measured", repetition), [topical(768, "pool", repetition)]
        found = compare_traces(
            {"a": first, "b": second}, [batch], seed=repetition, num_probes=4, auxiliary_sample=pool, causal=False
        )
        pairs.append(found.difference("trace", "a", "b"))
        own.append(found.models["b"]["trace"])
        assert [trace.details["auxiliary_directions"] for trace in found.of("trace").values()] == [8, 8]
    alone = measure(second, batch, seed=7, auxiliary_sample=AuxiliarySample.read(first, pool))
    assert (own[-1].value, own[-1].stderr) == pytest.approx((alone.value, alone.stderr), rel=1e-12)
    error = math.sqrt(np.mean([pair.stderr**2 for pair in pairs]))
    assert np.std([pair.value for pair in pairs], ddof=1) == pytest.approx(error, rel=3 / math.sqrt(2 * 7))
    assert error < 0.5 * own[0].stderr
    n = own[0].samples  # clusters; behind them are the auxiliary sample's means
    influence = own[0].influence
    assert len(influence) > n == 256
    assert float((influence**2).sum() / (n * (n - 1))) ** 0.5 == pytest.approx(own[0].stderr, rel=1e-12)
    same = compare_traces({"a": first, "b": first}, [batch], auxiliary_sample=pool, causal=False)
    assert same.ratio("trace", "a", "b") == (1.0, (1.0, 1.0))
    assert same.probability_of_smallest("trace") == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(("names", "used"), [(("untold", "topical"), 0), (("topical", "untold"), 8)])
def test_the_first_model_decides_for_all(names, used):
    models = {"untold": Untold(), "topical": Topical()}
    batch, pool = topical(300, "measured"), [topical(3000, "pool")]
    found = compare_traces(
        {name: models[name] for name in names}, [batch], num_probes=8, auxiliary_sample=pool, causal=False
    )
    assert [trace.details["auxiliary_directions"] for trace in found.of("trace").values()] == [used, used]
    alone = measure(models[names[1]], batch, auxiliary_sample=pool).details["auxiliary_directions"]
    assert alone == 8 - used


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "sentence"),
    [
        (topical(9, "pool"), "the auxiliary sample is a single batch; pass an iterable of batches"),
        ([{"labels": torch.ones(4, 3, dtype=torch.int64)}], "a batch has no `input_ids` of shape"),
        ([{"input_ids": torch.ones(4, dtype=torch.int64)}], "a batch has no `input_ids` of shape"),
        ([torch.ones(4, 3, dtype=torch.int64)], "batch 0 is a Tensor, not a mapping of input_ids"),
        ([{"input_ids": torch.full((4, 3), VOCAB)}], "a token is 24; the model has embeddings for 0 to 23"),
        ([{"input_ids": torch.full((4, 3), -7)}], "a token is -7; the model has embeddings for 0 to 23"),
        ([], "the auxiliary sample has 0 independent sequences or documents; it needs at least 2"),
        ([topical(1, "pool")], "the auxiliary sample has 1 independent"),
        ([topical(4, "pool", documents=torch.zeros(4, dtype=torch.int64))], "the auxiliary sample has 1 independent"),
        (
            [topical(4, "pool"), topical(4, "pool", documents=torch.arange(4))],
            "all batches of the auxiliary sample have `documents`, or none has",
        ),
        (
            [topical(4, "pool", documents=torch.arange(4))],
            "the batches and the auxiliary sample have `documents`, or neither",
        ),
    ],
)
def test_bad_auxiliary_samples_get_one_sentence(pool, sentence):
    with pytest.raises(IsolossError, match=sentence):
        fisher_trace(bert(), [topical(64, "measured")], auxiliary_sample=pool)
