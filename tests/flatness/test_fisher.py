"""The Fisher trace against enumeration of every label and every probe."""

import itertools
import math

import pytest
import torch
from small_models import MODELS, Windows, bert, cut, exact, gpt2, patch_probes, rows

from isoloss.flatness import _parameters, fisher, fisher_trace
from isoloss.flatness._ghost import controls, engine

# --- exactness -------------------------------------------------------------------------------------------------------


def copied(batch, copies):
    """A batch of so many copies, each of which is a document."""
    documents = torch.arange(copies).repeat_interleave(len(batch["labels"]))
    return {**{name: value.repeat(copies, 1) for name, value in batch.items()}, "documents": documents}


def expectation_over_signs(monkeypatch, model, batch, *, causal, positions, vocab):
    """The mean of `fisher_trace` over every sign vector, the same ones in each sequence; v and -v give the same."""
    choices = [torch.tensor([1, *rest]) for rest in itertools.product((-1, 1), repeat=vocab * positions - 1)]
    values, splits, size = [], [], len(batch["labels"])
    # a copy of the batch for each choice; so few sequences have no controls, whose coefficients would join them
    for start in range(0, len(choices), 8):
        some = choices[start : start + 8]
        patch_probes(monkeypatch, lambda sequence, some=some: some[sequence // size])
        found = fisher_trace(model, [copied(batch, len(some))], causal=causal)
        assert found.details["sequences"] == size * len(some) < 32
        values.append(found.value)
        splits.append(list(found.by_parameter.values()))
    return math.fsum(values) / len(values), torch.tensor(splits, dtype=torch.float64).mean(dim=0)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_single_positions_are_exact_over_all_signs(name, monkeypatch):
    make, causal = MODELS[name]
    model, batch = make(4), rows(2, 5, 4, predicted=((2,), (4,)))
    mean, split = expectation_over_signs(monkeypatch, model, batch, causal=None, positions=1, vocab=4)
    truth, truth_split = exact(model, batch, causal=causal)
    assert mean == pytest.approx(sum(truth) / 2, rel=1e-10)
    torch.testing.assert_close(split, truth_split, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("chunk", "positions"), [(1, 1), (35, 7), (24, 5)])
def test_the_trace_does_not_depend_on_the_blocks_of_the_vocabulary(chunk, positions, monkeypatch):
    """The blocks divide the 14 positions and 10 ids, or do not."""
    model, batches = gpt2(10), cut(rows(8, 8, 10, predicted=(range(8),)), [2, 2, 2, 2])
    expected = fisher_trace(model, batches, causal=True)
    for module in (engine, _parameters):
        monkeypatch.setattr(module, "_PART", chunk)
    monkeypatch.setattr(controls, "_CHUNK", {"cpu": chunk})
    monkeypatch.setattr(controls, "_ROWS", positions)
    found = fisher_trace(model, batches, causal=True)
    assert found.value == pytest.approx(expected.value, rel=1e-11)
    assert found.stderr == pytest.approx(expected.stderr, rel=1e-9)


def test_positions_of_one_sequence_are_exact_over_all_signs(monkeypatch):
    model, batch = gpt2(3), rows(2, 5, 3, seed=2, predicted=((1, 4),))
    mean, _ = expectation_over_signs(monkeypatch, model, batch, causal=True, positions=2, vocab=3)
    truth, _ = exact(model, batch, causal=True)
    assert mean == pytest.approx(sum(truth) / 4, rel=1e-10)


def test_padding_and_extra_inputs_are_passed_on(monkeypatch):
    model, batch = bert(3), rows(2, 4, 3, seed=3)
    batch["attention_mask"][1, 3:] = 0
    batch["token_type_ids"] = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    mean, _ = expectation_over_signs(monkeypatch, model, batch, causal=None, positions=1, vocab=3)
    truth, _ = exact(model, batch, causal=False)
    assert mean == pytest.approx(sum(truth) / 2, rel=1e-10)
    del batch["token_type_ids"]
    without, _ = exact(model, batch, causal=False)
    assert sum(without) != pytest.approx(sum(truth), rel=1e-3)


def test_only_parameters_that_require_a_gradient_count(monkeypatch):
    model, batch = bert(3), rows(2, 4, 3, seed=3)
    frozen = [p for name, p in model.named_parameters() if "layer.0" in name]
    for parameter in frozen:
        parameter.requires_grad_(False)
    mean, _ = expectation_over_signs(monkeypatch, model, batch, causal=None, positions=1, vocab=3)
    truth, _ = exact(model, batch, causal=False)
    assert mean == pytest.approx(sum(truth) / 2, rel=1e-10)
    found = fisher_trace(model, [batch])
    assert not any("layer.0" in name for name in found.by_parameter)
    assert found.details["num_parameters"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert not any(parameter.requires_grad for parameter in frozen)


# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("bert untied", "ghost", {}),
        ("gpt2", "ghost", {"num_probes": 2}),
        ("gpt2", "paper", {"num_probes": 3}),
    ],
)
def test_the_estimate_agrees_with_enumeration_on_the_same_inputs(name, method, options):
    make, causal = MODELS[name]
    sequences = {"ghost": 48, "paper": 9}[method]  # the paper's takes a backward pass for each prediction
    model, batch = make(11), rows(sequences, 6, 11, seed=5, predicted=((2,), (1, 4), (5,)))
    truth, split = exact(model, batch, causal=causal)
    mean = sum(truth) / len(truth)
    given = {**batch, "documents": torch.arange(sequences)}  # what looks like separators is drawn at random
    e = fisher_trace(model, [given], method=method, **options)
    # inputs are the same in every copy, so only the probes vary
    copies = {"ghost": 32, "paper": 8}[method]
    several = fisher_trace(model, [copied(batch, copies)], method=method, seed=1, **options)
    assert abs(several.value - mean) < 4 * several.stderr
    of_probes = several.stderr * math.sqrt(copies)
    assert abs(e.value - mean) < 4 * of_probes < mean
    splits, errors = (torch.tensor(list(of.values())) for of in (several.by_parameter, several.by_parameter_stderr))
    assert bool(((splits - split).abs() <= 5 * errors + 1e-12).all())
    assert e.stderr > of_probes  # it covers the inputs too
    assert sum(e.by_parameter.values()) == pytest.approx(e.value, rel=1e-12)
    assert list(e.by_parameter_stderr) == list(e.by_parameter)
    assert sum(e.by_layer.values()) == pytest.approx(e.value, rel=1e-12)
    assert list(e.by_layer_stderr) == list(e.by_layer)
    assert all(0 <= error <= 2 * e.stderr for error in e.by_parameter_stderr.values())
    assert list(e.by_parameter) == [n for n, _ in model.named_parameters()]
    assert e.num_predictions == len(truth) == 4 * sequences // 3
    assert e.num_probes == options.get("num_probes", 1)
    assert e.samples == sequences
    assert e.method == {"ghost": "Fisher, exact expectation over labels", "paper": "Fisher, sampled labels"}[method]
    assert e.unit == "nats per predicted token"


@pytest.mark.parametrize(
    ("method", "sequences", "repetitions", "options"),
    [
        ("ghost", 64, 60, {}),
        pytest.param("ghost", 512, 1600, {}, marks=pytest.mark.slow),
        pytest.param("paper", 60, 400, {"num_probes": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_interval_covers_the_truth_over_all_inputs(method, sequences, repetitions, options):
    torch.manual_seed(0)
    model = Windows(4, 3).double()
    everything = torch.tensor(list(itertools.product(range(4), repeat=3)))
    weights = torch.linspace(1, 5, len(everything), dtype=torch.float64)  # the inputs' distribution
    # rows predict one or two positions, so the number of predicted positions varies between groups
    both = {"input_ids": everything, "labels": everything * torch.tensor([0, 1, 1]) + torch.tensor([-100, 0, 0])}
    values = torch.tensor(exact(model, both, causal=False)[0], dtype=torch.float64).view(-1, 2)
    two = everything[:, 0] == 0
    share = weights / weights.sum()
    positions = (share * (1 + two)).sum()
    truth = float((share * (values[:, 1] + two * values[:, 0])).sum() / positions)
    both["labels"][~two, 1] = -100

    covered, squares = [], []
    for repetition in range(repetitions):
        generator = torch.Generator().manual_seed(repetition)
        chosen = torch.multinomial(weights, sequences, replacement=True, generator=generator)
        batch = {name: value[chosen] for name, value in both.items()}
        found = fisher_trace(model, [batch], method=method, causal=False, seed=repetition, **options)
        low, high = found.ci95
        covered.append(low < truth < high)
        squares.append(((found.value - truth) / found.stderr) ** 2)
    # 95 % nominal, and three binomial standard deviations: 8.4 points over 60 repetitions
    error = 3 * math.sqrt(0.95 * 0.05 / repetitions)
    assert 0.95 - error <= sum(covered) / len(covered) <= 0.95 + error
    # their mean is 1, to 18 % over 60 repetitions: an error that is too small or large by a third is seen
    assert sum(squares) / repetitions == pytest.approx(1, abs=3 * math.sqrt(2 / repetitions))


# --- further probes of the last layer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (0.001, 8), (0.02, 5), (0.025, 4), (0.026, 0), (1.0, 0)])
def test_there_are_as_many_further_probes_as_a_tenth_of_a_forward_pass_pays_for(share, number):
    assert fisher._tail_probes(share) == number


def test_further_probes_of_the_last_layer_take_noise_away_and_leave_the_mean(monkeypatch):
    model, batch = bert(7, layers=3), rows(24, 16, 7)
    truth = math.fsum(exact(model, batch, causal=False)[0]) / 24
    noise = []
    for most in (8, 0):
        monkeypatch.setattr(fisher, "_MOST_TAIL_PROBES", most)
        found = fisher_trace(model, [copied(batch, 64)])  # the inputs are the same in every copy
        assert found.details["tail_probes"] == min(most, 4)
        assert abs(found.value - truth) < 4 * found.stderr < 0.1 * truth
        noise.append(found.stderr**2)
    # the ratio of two variances of 64 draws has a standard error of 25 %; it is 3.4
    assert noise[0] < noise[1] / 1.64


def test_no_signs_are_drawn_twice(monkeypatch):
    draw, names, octets = controls.packed_probes, [], []

    def signs(streams, device, seed, **options):
        names.extend(name for _, name in streams)
        octets.extend(draw(streams, device, seed, **options))
        return draw(streams, device, seed, **options)

    monkeypatch.setattr(controls, "packed_probes", signs)
    model, batch = bert(70, layers=4, size=16), rows(6, 16, 70)
    assert fisher_trace(model, [batch], num_probes=2).details["tail_probes"] == 4
    assert len(set(names)) == len(names) == 6 * 2 * 2
    assert len({tuple(row.tolist()) for row in octets}) == len(octets) == 2 * (1 + 4)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [64, 512])
@pytest.mark.parametrize(("make", "causal"), [(lambda: bert(7, layers=3), False), (lambda: gpt2(7, spread=0.05), True)])
def test_the_interval_covers_with_every_control_in_use(make, causal, sequences):
    model, predicted = make(), ((1,),) if not causal else (tuple(range(1, 8)),)
    found = [
        fisher_trace(model, [rows(sequences, 16 if not causal else 8, 7, seed=100 + s, predicted=predicted)], seed=s)
        for s in range(400)
    ]
    truth = math.fsum(e.value for e in found) / 400  # of all repetitions, with a twentieth of one's error
    assert found[0].details["tail_probes"] == (0 if causal else 4)
    # 95 % nominal; the binomial standard deviation over 400 repetitions is 1.1 points
    assert 0.92 <= sum(e.ci95[0] < truth < e.ci95[1] for e in found) / 400 <= 0.98
