"""Gradient noise scale and gradient agreement, against the gradients of all clusters written out."""

import itertools
import math

import numpy as np
import pytest
import torch
from dense_curvature import VOCAB, batch_of
from small_models import cut, gpt2

from isoloss import compare, evaluate
from isoloss.errors import IsolossError
from isoloss.examples import tiny_bert
from isoloss.flatness import gradient_agreement, gradient_noise_scale
from isoloss.lab.languages.config import PCFGConfig
from isoloss.statistics.comparison import paired_difference

MODEL = gpt2(VOCAB)


def signal(sequences, seed=0, frequent=1):
    """Sequences whose labels are at most `frequent`, so that their gradients have something in common."""
    batch = batch_of(sequences, seed=seed)
    batch["labels"].clamp_(max=frequent)
    return {**batch, "documents": torch.arange(sequences)}


def text(sequences=20, documents=12, seed=0):
    """Two batches whose documents, of one to several sequences and other numbers of tokens, lie in both."""
    batch = signal(sequences, seed)
    batch["documents"] = torch.arange(sequences).square() % documents
    return cut(batch, [sequences // 2, sequences - sequences // 2])


def gradients(model, batches):
    """(N, P) the gradient of each document's summed loss, and (N,) its predicted tokens, by plain backward passes."""
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    rows, sizes = [], []
    for document in dict.fromkeys(whole["documents"].tolist()):
        own = whole["documents"] == document
        logits = model(input_ids=whole["input_ids"][own]).logits[:, :-1]
        labels = whole["labels"][own][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
        rows.append(torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(model.parameters()))]))
        sizes.append(float((labels != -100).sum()))
    return torch.stack(rows).numpy(), np.array(sizes)


def over_pairs(values):
    """The mean of values (N, N) over different clusters."""
    n = len(values)
    return (values.sum() - values.trace()) / (n * (n - 1))


def squared_norm(g, m):
    return over_pairs(g @ g.T) / over_pairs(np.outer(m, m))


def spread(g, m):
    size, products = m.mean(), g @ g.T
    cross = over_pairs(m[:, None] * products) / size
    return (products.trace() / len(g) - 2 * cross + (m**2).mean() * squared_norm(g, m)) / size**2


def jackknife(value, *texts, centered=True):
    """The bias and the error by leaving out each cluster of each text in turn."""
    bias = square = 0.0
    for number, (g, m) in enumerate(texts):
        off = []
        for i in range(len(g)):
            less = list(texts)
            less[number] = np.delete(g, i, axis=0), np.delete(m, i)
            off.append(value(*itertools.chain(*less)) - value(*itertools.chain(*texts)))
        bias += (len(g) - 1) * float(np.mean(off))
        square += (len(g) - 1) * float(np.var(off) if centered else np.mean(np.square(off)))
    return bias, math.sqrt(square)


def noise_scale(g, m):
    return spread(g, m) / squared_norm(g, m)


def agreement(g, m, h, k):
    shared = g.sum(axis=0) @ h.sum(axis=0) / (m.sum() * k.sum())
    return shared / math.sqrt(squared_norm(g, m) * squared_norm(h, k))


def of_pairs(first, second):
    """The variance of a quadratic form in the clusters' deviations, across the mean gradients, pair by pair."""
    lengths = [math.sqrt(squared_norm(g, m)) * m.sum() for g, m in (first, second)]
    value, off = agreement(*first, *second), []
    for (g, m), length in zip((first, second), lengths, strict=True):
        mean = g.sum(axis=0) / m.sum()
        unit = mean / np.linalg.norm(mean)
        off.append([(d - d @ unit * unit) / length for d in g - np.outer(m, mean)])
    square = sum((a @ b) ** 2 for a, b in itertools.product(*off))
    return square + value**2 * sum((a @ b) ** 2 for part in off for a, b in itertools.combinations(part, 2))


def test_the_noise_scale_is_that_of_the_gradients_written_out():
    model, batches = MODEL, text()
    g, m = gradients(model, batches)
    assert len(set(m)) > 1
    found = gradient_noise_scale(model, batches)
    assert found.value == pytest.approx(noise_scale(g, m), rel=1e-9)
    assert found.stderr == pytest.approx(jackknife(noise_scale, (g, m), centered=False)[1], rel=1e-7)
    assert found.details["squared_norm"] == pytest.approx(squared_norm(g, m), rel=1e-9)
    assert found.details["tokens"] == pytest.approx(found.value * m.mean(), rel=1e-12)
    assert (found.unit, found.samples, found.num_predictions) == ("documents", len(m), int(m.sum()))
    assert found.stderr == pytest.approx(math.sqrt((found.influence**2).sum() / (len(m) * (len(m) - 1))))


def test_the_noise_scale_is_its_two_batch_form():
    batch = signal(8)
    batch["labels"][:, 2] = 1  # all predict two tokens
    g, m = gradients(MODEL, [batch])
    small, big = np.square(g / 2).sum(axis=1).mean(), np.square(g.sum(axis=0) / 16).sum()
    # McCandlish et al., appendix A.1, with batches of 1 and 8 sequences
    square, noise = (8 * big - small) / 7, (small - big) / (1 - 1 / 8)
    found = gradient_noise_scale(MODEL, [batch])
    assert set(m) == {2}
    assert found.value == pytest.approx(noise / square, rel=1e-12)
    assert found.details["squared_norm"] == pytest.approx(square, rel=1e-12)


def test_both_parts_of_the_noise_scale_are_without_bias():
    """The mean over all samples of three documents, drawn with replacement, from three documents."""
    batch, model = batch_of(3, seed=3), MODEL
    batch["labels"] = torch.tensor([-100, -100, 1, -100]).repeat(3, 1)
    g, _ = gradients(model, [{**batch, "documents": torch.arange(3)}])
    norms, spreads = [], []
    for drawn in itertools.product(range(3), repeat=3):
        sample = {name: value[list(drawn)] for name, value in batch.items()}
        found = gradient_noise_scale(model, [{**sample, "documents": torch.arange(3)}])
        norms.append(found.details["squared_norm"])
        spreads.append(found.value * norms[-1])
    assert np.mean(norms) == pytest.approx(np.square(g.mean(axis=0)).sum(), rel=1e-9)
    assert np.mean(spreads) == pytest.approx(np.square(g - g.mean(axis=0)).sum() / 3, rel=1e-9)


def test_the_agreement_is_that_of_the_gradients_written_out():
    model, texts = MODEL, (text(), text(30, 17, seed=1))
    written = [gradients(model, batches) for batches in texts]
    found = gradient_agreement(model, *texts)
    bias, error = jackknife(agreement, *written)
    assert found.value == pytest.approx(agreement(*itertools.chain(*written)) - bias, rel=1e-7)
    assert found.stderr**2 == pytest.approx(error**2 - of_pairs(*written), rel=1e-7)
    n = sum(len(m) for _, m in written)
    assert found.samples == len(found.influence) == n
    assert found.stderr == pytest.approx(math.sqrt((found.influence**2).sum() / (n * (n - 1))))
    assert found.num_predictions == sum(m.sum() for _, m in written)
    other = gradient_agreement(model, *texts[::-1])
    assert (other.value, other.stderr) == pytest.approx((found.value, found.stderr))
    assert paired_difference(found, found).value == 0


def test_halves_of_one_text_agree():
    """The plain cosine is far below 1, as the noise of a gradient adds to its norm."""
    off, plain = [], []
    for seed in range(4):
        halves = [[part] for part in cut(signal(40, seed, frequent=2), [20, 20])]
        found = gradient_agreement(MODEL, *halves)
        off.append((found.value - 1) / found.stderr)
        g, h = (gradients(MODEL, half)[0].sum(axis=0) for half in halves)
        plain.append(g @ h / math.sqrt(g @ g * (h @ h)))
    assert np.mean(plain) < 0.9
    assert abs(np.mean(off)) < 1
    assert 0.3 < np.std(off) < 1.7


def test_near_one_the_error_is_that_of_the_square_of_the_noise():
    """There the jackknife's error is small by chance, together with the noise: 0.0021 for a value of 1.0096."""
    model, batches = tiny_bert()
    found = gradient_agreement(model, batches[:2], batches[2:])
    assert abs(found.value - 1) < 1.5 * found.stderr < 0.015


def test_a_document_in_both_texts_is_refused_under_whatever_id():
    one, other = signal(20), signal(20, seed=1)
    assert gradient_agreement(MODEL, [one], [other]).details["sequences"] == 40
    backwards = {name: value.flip(0) for name, value in one.items() if name != "documents"}
    with pytest.raises(IsolossError, match="no documents in common, and these have 20: leave them out of one"):
        gradient_agreement(MODEL, [one], [{**backwards, "documents": torch.arange(100, 120)}])
    first = {name: value[:10] for name, value in other.items() if name != "documents"}
    part = {name: torch.cat([value, first[name]]) for name, value in backwards.items()}
    with pytest.raises(IsolossError, match="these have 10:"):
        gradient_agreement(MODEL, [other], [{**part, "documents": torch.arange(30)}])
    model, batches = tiny_bert()  # masks hide other tokens in the copy
    copies = [{**batch, "input_ids": torch.where(batch["labels"] < 0, batch["input_ids"], 1)} for batch in batches]
    with pytest.raises(IsolossError, match="no sequences in common, and these have 64:"):
        gradient_agreement(model, batches, copies[::-1])


def test_too_few_inputs_are_refused():
    batch = batch_of(8)  # with random labels
    with pytest.raises(IsolossError, match="the gradients of 8 independent inputs are too few to tell"):
        gradient_noise_scale(MODEL, [{**batch, "documents": torch.arange(8)}])
    with pytest.raises(IsolossError, match="the gradients of 2 independent inputs are too few to tell"):
        gradient_noise_scale(MODEL, [signal(2)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts")
    model = gpt2(VOCAB)
    model.float().save_pretrained(path / "model")
    for name, seed in (("one", 0), ("other", 1)):
        ids = np.random.default_rng(seed).choice(VOCAB, (40, 6), p=[0.05, 0.6, 0.15, 0.1, 0.1])
        np.save(path / f"{name}.npy", ids)
    return path


def test_the_measure_reads_the_other_text(folder):
    options = {"data": folder / "one.npy", "device": "cpu"}
    settings = {"agreement_with": str(folder / "other.npy"), "num_sequences": 30}
    (found,) = evaluate(folder / "model", "gradient-agreement", settings=settings, **options)
    estimate = found.estimates["gradient-agreement"]
    assert estimate.details["sequences"] == 60
    assert abs(estimate.value - 1) < 4 * estimate.stderr
    models, measures = [str(folder / "model")], ["gradient-agreement"]
    compared = compare(models, measures=measures, settings=settings, robustness=False, **options)
    (estimates,) = compared.models.values()
    assert estimates["gradient-agreement"].value == pytest.approx(estimate.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "agreement_with names no other text"),
        ("one.npy", "two texts must have no sequences in common, and these have"),
        ("another.npy", r"agreement_with: there is no data .*another.npy; did you mean"),
    ],
)
def test_what_is_no_other_text_is_refused(folder, given, message):
    settings = {"agreement_with": given and str(folder / given)}
    with pytest.raises(IsolossError, match=message):
        evaluate(folder / "model", "gradient-agreement", data=folder / "one.npy", settings=settings)


def test_a_language_has_no_other_text(folder):
    settings, language = {"agreement_with": str(folder / "one.npy")}, PCFGConfig(levels=1, vocab_size=3)
    with pytest.raises(IsolossError, match="it takes two texts, and the model is measured on a language"):
        evaluate(folder / "model", "gradient-agreement", language=language, settings=settings)
