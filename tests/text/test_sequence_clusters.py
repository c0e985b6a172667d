"""Which sequences count as independent: copies, documents, separators, and neighbors that are alike."""

import math

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config

from isoloss import fisher_trace
from isoloss.comparison.traces import compare_traces
from isoloss.errors import IsolossError
from isoloss.flatness import FlatnessCallback
from isoloss.lab.evaluation.loss import text_loss
from isoloss.run_config import ObjectiveConfig
from isoloss.text.clusters import SequenceClusters
from isoloss.text.packing import pack

VOCAB, LENGTH = 60, 12


def clusters_of(ids, config=None, *, size=7, **inputs):
    """Clusters that were given the rows in batches, and the numbers of the rows."""
    clusters, numbers = SequenceClusters(config), []
    for start in range(0, len(ids), size):
        batch = {name: value[start : start + size] for name, value in {"input_ids": ids, **inputs}.items()}
        numbers.append(clusters.add(batch))
    return clusters, torch.cat(numbers)


def random_rows(n, seed=0, vocab=VOCAB):
    return torch.randint(3, vocab, (n, LENGTH), generator=torch.Generator().manual_seed(seed))


def texts(number, sizes, seed=0):
    """Token ids of texts, each in ten words of its own choice."""
    draws = np.random.default_rng(seed)
    return [
        draws.choice(draws.choice(np.arange(3, VOCAB), 10, replace=False), draws.integers(*sizes))
        for _ in range(number)
    ]


def packed(documents):
    """The documents end to end in rows, and the document in which each row begins."""
    rows = np.concatenate(list(pack(iter(documents), LENGTH)))
    starts = np.arange(len(rows)) * LENGTH
    of_row = np.searchsorted(np.cumsum([len(document) for document in documents]), starts, side="right")
    return torch.from_numpy(rows), torch.from_numpy(of_row)


def bert(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **sizes)).double().eval()


def batches_of(ids, size=128, **inputs):
    labels = torch.full_like(ids, -100)
    labels[:, 3] = ids[:, 3]
    whole = {"input_ids": ids, "labels": labels, **inputs}
    return [{name: value[i : i + size] for name, value in whole.items()} for i in range(0, len(ids), size)]


# --- copies ----------------------------------------------------------------------------------------------------------


def test_copies_are_one_cluster_whatever_is_masked_or_padded():
    ids = random_rows(6)
    twice = torch.cat([ids, ids.flip(0)])
    hidden = twice.clone()
    hidden[6:, 2] = 1
    labels = torch.where(hidden == twice, -100, twice)
    clusters, numbers = clusters_of(hidden, labels=labels)
    assert numbers.tolist() == [*range(6), *reversed(range(6))]
    assert (len(clusters), clusters.sequences, clusters.name) == (6, 12, "different sequences")
    wide = torch.cat([torch.full((6, 2), 9), ids], dim=1)
    mask = torch.cat([torch.zeros(6, 2), torch.ones(6, LENGTH)], dim=1)
    both = SequenceClusters()
    assert both.add({"input_ids": ids}).tolist() == both.add({"input_ids": wide, "attention_mask": mask}).tolist()


def test_copies_tell_no_more_than_one_of_them():
    model, ids = bert(), random_rows(32)
    once = fisher_trace(model, batches_of(ids))
    often = fisher_trace(model, batches_of(ids.repeat(16, 1)))
    assert (often.samples, often.details["clusters"], often.details["sequences"]) == (32, "different sequences", 512)
    # the probes of the copies differ, so that their part of the error is smaller, and that of the texts is not
    assert 0.5 * once.stderr < often.stderr < 1.5 * once.stderr
    assert "32 different sequences" in repr(often)
    declared = fisher_trace(model, batches_of(ids.repeat(16, 1), documents=torch.arange(512)))
    assert declared.samples == 512
    assert declared.stderr < 0.4 * often.stderr


def test_sequences_of_one_document_are_a_cluster_wherever_they_stand():
    clusters, numbers = clusters_of(random_rows(8), documents=torch.tensor([5, 5, 2, 5, 9, 9, 2, 1]))
    assert numbers.tolist() == [0, 0, 1, 0, 2, 2, 1, 3]
    assert (clusters.name, clusters.blocks()) == ("documents", None)


@pytest.mark.parametrize("documents", [["b", "b", "a"], np.array([4, 4, 1]), torch.tensor([0.5, 0.5, 1.5])], ids=str)
def test_ids_of_documents_may_be_of_any_kind(documents):
    assert clusters_of(random_rows(3), documents=documents)[1].tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "documents", [torch.arange(4), torch.zeros(3, 1), ["a", None, "b"], np.full(3, np.nan)], ids=str
)
def test_ids_of_documents_that_are_none(documents):
    with pytest.raises(IsolossError, match="`documents` must have one document id for each of the 3 sequences"):
        clusters_of(random_rows(3), documents=documents)


# --- separators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 100])
def test_documents_that_separators_show(size):
    documents = [np.insert(text, 0, 1) for text in texts(40, (10, 50))]
    ids, of_row = packed(documents)
    config = GPT2Config(vocab_size=VOCAB, eos_token_id=1, bos_token_id=1)
    clusters, _ = clusters_of(ids, config, size=size)
    blocks = clusters.blocks()
    assert blocks.name == "documents found by their separators"
    assert torch.equal(blocks.labels, torch.unique(of_row, return_inverse=True)[1])
    pads = torch.full_like(ids, 1)  # where the separator pads as well, what is padding separates nothing
    whole, mask = torch.cat([ids, pads], dim=1), torch.cat([torch.ones_like(ids), torch.zeros_like(ids)], dim=1)
    for shift in (0, LENGTH):  # on the right and on the left
        padded, _ = clusters_of(whole.roll(shift, 1), config, size=size, attention_mask=mask.roll(shift, 1))
        assert torch.equal(padded.blocks().labels, blocks.labels)


def test_documents_that_positions_show():
    ids, of_row = packed(documents := texts(40, (10, 50)))
    positions, _ = packed([np.arange(len(text)) for text in documents])
    clusters, _ = clusters_of(ids, position_ids=positions)
    assert torch.equal(clusters.blocks().labels, torch.unique(of_row, return_inverse=True)[1])
    alone, _ = clusters_of(random_rows(40), position_ids=torch.arange(LENGTH).expand(40, -1))
    assert alone.blocks() is None


# --- neighbors -------------------------------------------------------------------------------------------------------


def test_pieces_of_longer_texts_are_told_from_sequences_in_random_order():
    ids, _ = packed(texts(60, (40, 140)))
    clusters, _ = clusters_of(ids)
    n = len(ids)
    blocks = clusters.blocks()
    count = round(math.sqrt(n) / 3)
    assert int(blocks.labels.max()) + 1 == count > 5
    assert (
        blocks.name
        == f"blocks of {n // count} or {n // count + 1} consecutive sequences ({n} in all), given these texts"
    )
    assert blocks.labels.bincount().max() - blocks.labels.bincount().min() <= 1
    assert blocks.labels.tolist() == sorted(blocks.labels.tolist())
    few = sum(
        clusters_of(ids[torch.randperm(n, generator=torch.Generator().manual_seed(i))], size=n)[0].is_packed()
        for i in range(60)
    )
    assert few <= 2  # 1 in 700 of each
    assert sum(clusters_of(random_rows(50, seed=i), size=50)[0].is_packed() for i in range(60)) <= 2
    small, _ = clusters_of(ids[:40])
    assert int(small.blocks().labels.max()) + 1 == 5
    assert clusters_of(ids[:9])[0].blocks() is None


def test_every_number_over_packed_text_has_the_larger_error():
    ids, _ = packed(texts(60, (40, 140)))
    models = {"a": bert(), "b": bert(1)}
    plain = compare_traces(models, batches_of(ids, documents=torch.arange(len(ids))))
    found = compare_traces(models, batches_of(ids))
    callback = FlatnessCallback(batches_of(ids), every=1)
    trace = fisher_trace(models["a"], callback._batches)
    objective = ObjectiveConfig()
    losses = [
        text_loss(models["a"], batches_of(ids, **given), objective=objective, seed=0, method="")["loss"]
        for given in ({}, {"documents": torch.arange(len(ids))})
    ]
    of_found, of_plain = found.models["a"], plain.models["a"]
    assert of_found["trace"].value == of_plain["trace"].value
    pairs = [
        (of_found["trace"], of_plain["trace"]),
        (trace, of_plain["trace"]),
        (of_found["loss"], of_plain["loss"]),
        (losses[0], losses[1]),
    ]
    for here, there in pairs:
        assert here.samples == round(math.sqrt(len(ids)) / 3)
        assert here.stderr >= there.stderr
    assert found.difference("trace", "a", "b").samples == trace.samples
    assert "consecutive sequences (" in repr(trace)


def test_intervals_over_packed_documents_hold_the_mean_of_many():
    """The tokens of a document are few, so that the losses of its rows are alike."""
    model, number = bert(), 60
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 8 if parameter.ndim > 1 else 1
    found = {name: [] for name in ("documents", "neighbors", "sequences")}
    for seed in range(number):
        ids, of_row = packed(texts(25, (20, 100), seed))
        for name, documents in zip(found, (of_row, None, torch.arange(len(ids))), strict=True):
            batch = {"input_ids": ids, "labels": ids} | ({} if documents is None else {"documents": documents})
            found[name].append(text_loss(model, [batch], objective=ObjectiveConfig(), seed=0, method="")["loss"])
    assert len({found["neighbors"][0].samples, found["documents"][0].samples}) == 2
    values = [one.value for one in found["documents"]]
    mean = np.average(values, weights=[one.num_predictions for one in found["documents"]])
    held = {name: sum(one.ci95[0] < mean < one.ci95[1] for one in several) for name, several in found.items()}
    squares = {name: np.mean([one.stderr**2 for one in several]) / np.var(values) for name, several in found.items()}
    deviation = math.sqrt(0.95 * 0.05 / number)
    for name in ("documents", "neighbors"):
        assert held[name] / number > 0.95 - 3 * deviation
        assert abs(squares[name] - 1) < 4 * math.sqrt(2 / number)
    assert squares["sequences"] < 0.6 * squares["documents"]
