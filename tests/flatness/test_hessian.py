"""The Hessian's trace against dense Hessians, its parts against each other, and its error against repetitions."""

import itertools
import math

import pytest
import torch
from dense_curvature import VOCAB, batch_of, bert, dense, flat, gpt2, on_vector, windows

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace, hessian_trace
from isoloss.flatness._ghost import controls


def named(model, *endings):
    return {name: p for name, p in model.named_parameters() if name.endswith(endings)}


def test_the_residual_is_exact_over_all_signs(monkeypatch):
    model, batches, causal = bert(), [batch_of(3, seed=1), batch_of(2, seed=2)], False
    parameters = dict(itertools.islice(named(model, "output.LayerNorm.bias").items(), 1))
    hessian, gauss_newton = dense(model, batches, causal=causal, parameters=parameters)
    drawn, chosen = controls.rademacher, []
    monkeypatch.setattr(
        controls,
        "rademacher",
        lambda shape, device, seed, *names: chosen[0] if names[0] == "residual" else drawn(shape, device, seed, *names),
    )
    values = []
    for signs in itertools.product((-1, 1), repeat=4):
        chosen[:] = [torch.tensor(signs)]
        found = hessian_trace(model, batches, causal=causal, parameters=parameters, group_size=2, num_probes=2)
        values.append(found.details["residual"])
    rest = float(hessian.trace() - gauss_newton.trace())
    assert sum(values) / len(values) == pytest.approx(rest, rel=1e-9)
    assert max(values) - min(values) > 1e-3 * abs(rest)


def test_the_estimate_agrees_with_the_dense_trace():
    model, batch, causal = gpt2(), batch_of(12), True
    hessian, gauss_newton = dense(model, [batch], causal=causal)
    # the inputs are the same in every copy and at every seed, so only the probes vary
    copies = {**{name: value.repeat(4, 1) for name, value in batch.items()}, "documents": torch.arange(48) // 12}
    found = [hessian_trace(model, [copies], group_size=1, num_probes=2, seed=seed) for seed in range(6)]
    for name, truth in (
        ("value", hessian.trace()),
        ("fisher", gauss_newton.trace()),
        ("residual", (hessian - gauss_newton).trace()),
    ):
        values = torch.tensor([e.value if name == "value" else e.details[name] for e in found], dtype=torch.float64)
        error = float(values.std()) / math.sqrt(len(values))
        assert abs(float(values.mean() - truth)) < 4 * error < 0.75 * float(gauss_newton.trace())
    assert float((gauss_newton - hessian).trace()) > 0.8 * float(gauss_newton.trace())  # so that the residual is seen
    truth = torch.stack([part.sum() for part in hessian.diagonal().split([p.numel() for p in model.parameters()])])
    splits = torch.tensor([list(e.by_parameter.values()) for e in found], dtype=torch.float64)
    assert bool(((splits.mean(0) - truth).abs() <= 5 * splits.std(0) / math.sqrt(len(found)) + 1e-12).all())
    for e in (*found, hessian_trace(model, [batch], group_size=3, num_probes=2)):
        assert e.value == pytest.approx(e.details["fisher"] + e.details["residual"], rel=1e-12)
        assert sum(e.by_parameter.values()) == pytest.approx(e.value, rel=1e-10)
    assert (e.samples, e.num_probes, e.num_predictions) == (4, 2, 18)


def test_the_fishers_part_is_that_of_fisher_trace():
    model, batch = bert(), batch_of(20)
    found = hessian_trace(model, [batch], group_size=4, seed=3)
    fisher = fisher_trace(model, [{**batch, "documents": torch.arange(20) // 4}], seed=3)
    assert found.details["fisher"] == pytest.approx(fisher.value, rel=1e-12)
    assert found.details["fisher_stderr"] == pytest.approx(fisher.stderr, rel=1e-10)


def test_the_cut_into_batches_does_not_count_and_documents_are_clusters():
    model, batch = windows(), batch_of(11)
    whole = hessian_trace(model, [batch], causal=False, group_size=4)
    sizes = [3, 6, 2]
    parts = [
        dict(zip(batch, part, strict=True)) for part in zip(*(v.split(sizes) for v in batch.values()), strict=True)
    ]
    done = []
    cut = hessian_trace(model, parts, causal=False, group_size=4, progress=done.append)
    assert cut.value == pytest.approx(whole.value, rel=1e-10)
    assert cut.stderr == pytest.approx(whole.stderr, rel=1e-10)
    assert done == [3, 9, 11]
    documents = torch.arange(11) // 4
    for number, part in enumerate(parts):
        part["documents"] = documents.split(sizes)[number]
    by_document = hessian_trace(model, parts, causal=False, group_size=1)
    assert (by_document.value, by_document.samples) == (cut.value, 3)
    fewer = hessian_trace(model, [batch], causal=False, group_size=4, num_sequences=9)
    assert (fewer.samples, fewer.details["sequences"]) == (3, 9)
    assert hessian_trace(model, [batch], causal=False, group_size=4, seed=1).value != whole.value


def test_the_error_is_the_spread_over_fresh_inputs_labels_and_probes():
    model = windows()
    found = [hessian_trace(model, [batch_of(64, seed=100 + r)], causal=False, seed=r, group_size=4) for r in range(24)]
    values = torch.tensor([e.value for e in found], dtype=torch.float64)
    rest = torch.tensor([e.details["residual"] for e in found], dtype=torch.float64)
    # a standard deviation over 24 repetitions is right to 15 %, so 3 of its errors are 45 %
    for spread, stated in (
        (values.std(), [e.stderr for e in found]),
        (rest.std(), [e.details["residual_stderr"] for e in found]),
    ):
        assert 0.55 < float(spread) / math.sqrt(sum(s * s for s in stated) / len(stated)) < 1.45
    # labels are drawn uniformly, so the exact expectation is the mean over all inputs and labels
    everything = torch.cartesian_prod(*[torch.arange(VOCAB)] * 3)
    tokens = everything.repeat_interleave(VOCAB, dim=0)
    answers = torch.arange(VOCAB).repeat(len(everything))
    traces = []
    for position in (1, 2):
        labels = torch.full_like(tokens, -100)
        labels[:, position] = answers
        logits, targets = on_vector(model, [{"input_ids": tokens, "labels": labels}], causal=False)
        theta = flat(dict(model.named_parameters()))
        loss = lambda v, logits=logits, targets=targets: torch.nn.functional.cross_entropy(logits(v), targets)  # noqa: E731
        traces.append(float(torch.autograd.functional.hessian(loss, theta).trace()))
    truth = (2 * traces[0] + traces[1]) / 3  # each second sequence predicts position 2 as well
    assert abs(float(values.mean()) - truth) < 4 * float(values.std()) / math.sqrt(len(values))


def test_the_published_code_is_as_published():
    model = bert()
    batches = [batch_of(size, seed=size) for size in (2, 5)]
    kept = {name: p for name, p in model.named_parameters() if name != "cls.predictions.bias"}
    expected = []
    for number, batch in enumerate(batches):
        hessian, _ = dense(model, [batch], causal=False, parameters=kept)
        z = torch.randn(len(hessian), generator=seeds.generator(7, "authors", number), dtype=torch.float64)
        expected.append(float(z @ hessian @ z))
    found = hessian_trace(model, batches, method="published-code", seed=7)
    assert found.value == pytest.approx(sum(expected) / 2, rel=1e-9)
    assert found.stderr == pytest.approx(
        float(torch.tensor(expected, dtype=torch.float64).std()) / math.sqrt(2), rel=1e-9
    )
    assert sum(found.by_parameter.values()) == pytest.approx(found.value, rel=1e-10)
    assert found.details["parameters_left_out"] == ["cls.predictions.bias"]
    assert (found.samples, found.details["sequences"]) == (2, 7)


def test_attention_by_sdpa_gives_the_same_and_the_model_is_left_alone():
    eager, sdpa = bert(), bert(attention="sdpa")
    sdpa.bert.embeddings.LayerNorm.bias.requires_grad_(False)
    eager.bert.embeddings.LayerNorm.bias.requires_grad_(False)
    flags = [p.requires_grad for p in sdpa.parameters()]
    with torch.no_grad():
        found = [hessian_trace(model, [batch_of(16)], num_probes=2).value for model in (eager, sdpa)]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert [p.requires_grad for p in sdpa.parameters()] == flags
    assert all(p.grad is None for p in sdpa.parameters())


def test_parameters_require_gradients_for_the_residual_only():
    model, seen = bert(), []

    def batches():
        for seed in range(3):
            seen.append(any(p.requires_grad for p in model.parameters()))
            yield batch_of(4, seed=seed)

    hessian_trace(model, batches(), group_size=4)
    assert seen == [False] * 3  # the forward pass for the Fisher's part keeps no graph of the weights
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "exact"}, "'exact'; it is one of residual, published-code"),
        ({"num_probes": 0}, "num_probes is 0"),
        ({"num_probes": 2, "method": "published-code"}, "num_probes is 2"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": 99}, "at least 2 independent"),
        ({"method": "published-code"}, "at least 2 batches, not 1"),
        ({"num_sequences": 1}, "num_sequences is 1"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(IsolossError, match=message):
        hessian_trace(windows(), [batch_of(9)], causal=False, **options)
