"""Pools of sequences that are only read: against plain loops, in the estimate, and everything that they refuse."""

import dataclasses
import math
import types

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from isoloss.errors import IsolossError
from isoloss.measures.flatness import fisher_trace, record
from isoloss.measures.flatness.compare import _paired, compare
from isoloss.measures.flatness.pool import Pool
from isoloss.seeds import generator

VOCAB, LENGTH, TOPICS = 24, 8, 4
MASK = VOCAB - 1


def bert(seed=0, *, size=8, vocab=VOCAB, cls=BertForMaskedLM):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=size,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * size,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.4,
    )
    return cls(config).eval()


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


def cut(batch, sizes):
    parts = {name: value.split(sizes) for name, value in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]


# --- what is read ----------------------------------------------------------------------------------------------------


def reference(weight, batch, clusters):
    """Each sequence's mean embedding, their mean, and the covariance of its error, by loops."""
    ids, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).tolist()
    means = []
    for row, shown, present in zip(ids, labels, mask, strict=True):
        tokens = [y if y != -100 else i for i, y, here in zip(row, shown, present, strict=True) if here]
        means.append(sum(weight[i].double().numpy() for i in tokens) / len(tokens))
    means = np.array(means)
    mean = means.mean(axis=0)
    sums = {}
    for cluster, values in zip(clusters, means - mean, strict=True):
        sums[cluster] = sums.get(cluster, 0) + values
    number, scatter = len(sums), sum(np.outer(s, s) for s in sums.values())
    return means, mean, scatter * number / (number - 1) / len(means) ** 2


@pytest.mark.parametrize("sizes", [[90], [1] * 90, [40, 7, 43]])
@pytest.mark.parametrize("by_document", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_means_and_their_errors_are_those_of_plain_loops(sizes, by_document, padded):
    model, batch = bert(), topical(90, "pool")
    if padded:
        batch["attention_mask"] = (torch.arange(LENGTH) < 1 + torch.arange(90)[:, None] % LENGTH).long()
    clusters = list(range(90))
    if by_document:
        batch["documents"] = torch.arange(90) // 4 + 70
        clusters = batch["documents"].tolist()
    pool = Pool.read(model, cut(batch, sizes))
    means, mean, covariance = reference(model.get_input_embeddings().weight.detach(), batch, clusters)
    assert (pool.num_sequences, pool.by_document) == (90, by_document)
    np.testing.assert_allclose(pool.mean, mean, rtol=1e-6)
    along = pool.directions.numpy()
    np.testing.assert_allclose(along.T @ along, np.eye(8), atol=1e-12)
    np.testing.assert_allclose(along.T @ covariance @ along, np.diag(pool.variances), atol=1e-6 * covariance.max())
    assert pool.variances.tolist() == sorted(pool.variances.tolist(), reverse=True)
    np.testing.assert_allclose(pool.features(batch), (means - mean) @ along, atol=1e-6)


def test_there_are_at_most_16_directions_those_of_the_largest_variance():
    model, batch = bert(size=32, vocab=64), {"input_ids": torch.randint(64, (500, 4), generator=generator(0, "ids"))}
    pool = Pool.read(model, [batch])
    values = model.get_input_embeddings().weight.detach()[batch["input_ids"]].mean(dim=1).double()
    largest = torch.linalg.eigvalsh(torch.cov(values.T)).flip(0)[:16] / 500
    assert pool.directions.shape == (32, 16)
    np.testing.assert_allclose(pool.variances, largest, rtol=1e-5)


def test_directions_without_variance_are_left_out():
    ids = torch.tensor([[1, 1], [2, 2], [3, 3]])[torch.randint(3, (60,), generator=generator(0, "ids"))]
    assert Pool.read(bert(), [{"input_ids": ids}]).directions.shape == (8, 2)  # three points lie in a plane
    same = Pool.read(bert(), [{"input_ids": torch.ones(60, 2, dtype=torch.int64)}])
    assert same.directions.shape == (8, 0)
    assert same.features({"input_ids": torch.ones(5, 2, dtype=torch.int64)}).shape == (5, 0)


def test_hidden_tokens_count_as_what_they_are():
    hidden, shown = topical(50, "pool"), topical(50, "pool", hide=False)
    assert not torch.equal(hidden["input_ids"], shown["input_ids"])
    model = bert()
    assert torch.equal(Pool.read(model, [hidden]).mean, Pool.read(model, [shown]).mean)
    pool = Pool.read(model, [shown])
    assert torch.equal(pool.features(hidden), pool.features({"input_ids": shown["input_ids"]}))


def test_embeddings_of_any_dtype_are_read():
    model, batch = bert(), topical(200, "pool")
    exact = Pool.read(model.double(), [batch])
    rough = Pool.read(model.bfloat16(), [batch])
    np.testing.assert_allclose(rough.mean, exact.mean, atol=0.01)
    np.testing.assert_allclose(rough.variances, exact.variances, rtol=0.1)
    assert rough.variances.dtype == torch.float64


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


def measure(model, batch, *, num_probes=8, **options):
    return fisher_trace(model, [batch], causal=False, num_probes=num_probes, **options)


def repeated(model, number, *, sequences=256, size=8):
    """Estimates of fresh sequences, with a fresh pool of `size` times as many and without."""
    found = []
    for repetition in range(number):
        batch = topical(sequences, "measured", repetition)
        pool = [topical(size * sequences, "pool", repetition)]
        found.append([measure(model, batch, seed=repetition, pool=p) for p in (pool, None)])
    return list(zip(*found, strict=True))


def test_what_tokens_tell_is_averaged_over_the_pool():
    pooled, alone = repeated(Topical(), 40)
    assert {e.details["pool_directions"] for e in pooled} == {8}
    assert {e.details["pool_sequences"] for e in pooled} == {2048}
    assert {(e.details["pool_directions"], e.details["pool_sequences"]) for e in alone} == {(0, 0)}
    spreads = [float(np.std([e.value for e in some], ddof=1)) for some in (pooled, alone)]
    errors = [math.sqrt(np.mean([e.stderr**2 for e in some])) for some in (pooled, alone)]
    assert errors[0] < 0.7 * errors[1]
    for spread, error in zip(spreads, errors, strict=True):
        assert spread == pytest.approx(error, rel=4 / math.sqrt(2 * 39))
    means = [np.mean([e.value for e in some]) for some in (pooled, alone)]
    assert abs(means[0] - means[1]) < 4 * math.hypot(*errors) / math.sqrt(40)


@pytest.mark.slow
def test_the_interval_covers_with_a_pool():
    pooled, alone = repeated(Topical(), 400, sequences=512, size=4)
    truth = np.mean([e.value for e in pooled])  # with a twentieth of one's error
    # 95 % nominal; the binomial standard deviation over 400 repetitions is 1.1 points
    assert 0.92 <= np.mean([e.ci95[0] < truth < e.ci95[1] for e in pooled]) <= 0.98
    assert abs(truth - np.mean([e.value for e in alone])) < 4 * alone[0].stderr / 20


def test_a_causal_model_of_transformers_takes_a_pool():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2, n_positions=LENGTH, bos_token_id=None, initializer_range=0.5
    )
    model = GPT2LMHeadModel(config).eval()
    measured, pool = (topical(n, name, hide=False) for n, name in ((512, "measured"), (4096, "pool")))
    measured["labels"] = measured["input_ids"]
    pooled, alone = fisher_trace(model, [measured], pool=[pool]), fisher_trace(model, [measured])
    assert pooled.details["pool_directions"] == 8
    assert pooled.stderr < 0.97 * alone.stderr
    assert pooled.value == pytest.approx(alone.value, abs=4 * alone.stderr)


def test_documents_are_the_clusters_of_a_pool_too():
    documents = torch.arange(9000) // 3
    model, measured = Topical(), topical(900, "measured", documents=documents[:900])
    pool = [topical(9000, "pool", documents=documents)]
    found, alone = measure(model, measured, pool=pool), measure(model, measured)
    assert (found.samples, found.details["clusters"], found.details["pool_directions"]) == (300, "documents", 8)
    assert found.stderr < 0.7 * alone.stderr


def test_the_parameters_add_up_with_a_pool():
    found = measure(Topical(), topical(300, "measured"), pool=[topical(3000, "pool")])
    assert found.details["pool_directions"] == 8
    assert sum(found.by_parameter.values()) == pytest.approx(found.value, rel=1e-12)
    assert sum(found.by_layer.values()) == pytest.approx(found.value, rel=1e-12)


def test_the_time_of_reading_counts():
    pool = dataclasses.replace(Pool.read(Topical(), [topical(300, "pool")]), seconds=1000.0)
    assert 1000 < measure(Topical(), topical(64, "measured"), pool=pool).seconds < 1100


def test_the_papers_estimator_takes_a_pool():
    batch, pool = topical(300, "measured"), [topical(3000, "pool")]
    options = {"method": "paper", "num_probes": 20}
    pooled, alone = (measure(Topical(), batch, pool=p, **options) for p in (pool, None))
    assert pooled.details["pool_directions"] == 8
    assert pooled.stderr < 0.8 * alone.stderr


def test_a_pool_of_something_else_is_not_used():
    batch, other = topical(300, "measured"), {"input_ids": torch.full((3000, LENGTH), 3)}
    alone, found = measure(Topical(), batch), measure(Topical(), batch, pool=[topical(100, "pool"), other])
    assert (found.details["unlike_pool"], found.details["pool_directions"]) == (True, 0)
    assert (found.value, found.stderr) == (alone.value, alone.stderr)


def test_models_share_a_pool_in_a_comparison():
    first, second = Topical(), Topical(by=0.05)
    pairs, own = [], []
    for repetition in range(40):
        batch, pool = topical(256, "measured", repetition), [topical(768, "pool", repetition)]
        found = compare({"a": first, "b": second}, [batch], seed=repetition, num_probes=8, pool=pool, causal=False)
        pairs.append(found.pair("a", "b").trace)
        own.append(found.models[1].trace)
        assert [m.trace.details["pool_directions"] for m in found.models] == [8, 8]
    alone = measure(second, batch, seed=39, pool=Pool.read(first, pool))
    assert (own[-1].value, own[-1].stderr) == pytest.approx((alone.value, alone.stderr), rel=1e-12)
    error = math.sqrt(np.mean([pair.stderr**2 for pair in pairs]))
    assert np.std([pair.value for pair in pairs], ddof=1) == pytest.approx(error, rel=4 / math.sqrt(2 * 39))
    assert error < 0.5 * own[0].stderr
    influence = torch.arange(264, dtype=torch.float64)  # of 256 clusters and 8 means
    assert _paired(0.0, influence, own[0], "").stderr == math.sqrt(float(influence.square().sum()) / (256 * 255))
    same = compare({"a": first, "b": first}, [batch], pool=pool, causal=False)
    assert (same.pair("a", "b").trace.value, same.pair("a", "b").trace.stderr) == (0.0, 0.0)
    assert [m.flattest for m in same.models] == [0.5, 0.5]


@pytest.mark.parametrize(("names", "used"), [(("untold", "topical"), 0), (("topical", "untold"), 8)])
def test_the_first_model_decides_for_all(names, used):
    models = {"untold": Untold(), "topical": Topical()}
    batch, pool = topical(300, "measured"), [topical(3000, "pool")]
    found = compare({name: models[name] for name in names}, [batch], num_probes=8, pool=pool, causal=False)
    assert [model.trace.details["pool_directions"] for model in found.models] == [used, used]
    alone = measure(models[names[1]], batch, pool=pool).details["pool_directions"]
    assert alone == 8 - used


# --- going on --------------------------------------------------------------------------------------------------------


def failing(batches, after):
    yield from batches[:after]
    raise RuntimeError("killed")


def test_a_record_knows_its_pool(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "_EVERY_SECONDS", 0.0)
    model, path = Topical(), tmp_path / "record"
    batches, pool = cut(topical(300, "measured"), [100, 100, 100]), [topical(3000, "pool")]
    straight = fisher_trace(model, batches, causal=False, pool=pool)
    with pytest.raises(RuntimeError, match="killed"):
        fisher_trace(model, failing(batches, 2), causal=False, pool=pool, resume=path)
    for other in (None, [topical(3000, "another pool")]):
        with pytest.raises(IsolossError, match=r"it differs in .*pool; remove it"):
            fisher_trace(model, batches, causal=False, pool=other, resume=path)
    resumed = fisher_trace(model, batches, causal=False, pool=pool, resume=path)
    assert (resumed.value, resumed.stderr) == (straight.value, straight.stderr)
    assert resumed.details["pool_directions"] == straight.details["pool_directions"] == 8


# --- what is refused -------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    """A model that has no input embeddings to ask for."""


@pytest.mark.parametrize(
    ("pool", "sentence"),
    [
        (topical(9, "pool"), "the pool is a single batch; pass an iterable of batches"),
        ([{"labels": torch.ones(4, 3)}], "a batch has no `input_ids` of shape"),
        ([{"input_ids": torch.ones(4, dtype=torch.int64)}], "a batch has no `input_ids` of shape"),
        ([torch.ones(4, 3, dtype=torch.int64)], "a batch has no `input_ids` of shape"),
        ([{"input_ids": torch.full((4, 3), VOCAB)}], "a token is 24; the model has embeddings for 0 to 23"),
        ([{"input_ids": torch.full((4, 3), -7)}], "a token is -7; the model has embeddings for 0 to 23"),
        ([], "the pool has 0 independent sequences or documents; it needs at least 2"),
        ([topical(1, "pool")], "the pool has 1 independent"),
        ([topical(4, "pool", documents=torch.zeros(4, dtype=torch.int64))], "the pool has 1 independent"),
        (
            [topical(4, "pool"), topical(4, "pool", documents=torch.arange(4))],
            "all batches of the pool have `documents`, or none has",
        ),
        ([topical(4, "pool", documents=torch.arange(4))], "the batches and their pool have `documents`, or neither"),
    ],
)
def test_bad_pools_get_one_sentence(pool, sentence):
    with pytest.raises(IsolossError, match=sentence):
        fisher_trace(bert(), [topical(64, "measured")], pool=pool)


def test_a_model_without_embeddings_has_no_pool():
    with pytest.raises(IsolossError, match="Bare has no input embeddings, by which a pool is read"):
        Pool.read(Bare(), [topical(9, "pool")])
