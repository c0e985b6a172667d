"""The bidirectional LSTM against a loop over cells in float64, its padding, its checkpoints and its exact trace."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from isoloss.checkpoints.loading import load_model
from isoloss.flatness import fisher_trace
from isoloss.flatness._ghost.engine import GhostNorms
from isoloss.lab.models.lstm import LSTMConfig, LSTMForMaskedLM, LSTMModel

LENGTHS = (6, 1, 3, 6, 4)


def tiny(layers=3, dropout=0.0, **changes):
    """A model in float64 whose every parameter is drawn, the biases too."""
    config = LSTMConfig(
        vocab_size=12, hidden_size=5, num_hidden_layers=layers, hidden_dropout_prob=dropout, pad_token_id=10, **changes
    )
    model = LSTMForMaskedLM(config).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def padded(fill=10):
    ids = torch.randint(0, 10, (5, 6), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(6) < torch.tensor(LENGTHS)[:, None]).long()
    return ids.masked_fill(mask == 0, fill), mask


def one_way(lstm, inputs):
    """The states of one direction of one layer, gate by gate: input, forget, cell, output."""
    h = c = torch.zeros(lstm.hidden_size, dtype=torch.float64)
    states = []
    for x in inputs:
        gates = lstm.weight_ih_l0 @ x + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ h + lstm.bias_hh_l0
        i, f, g, o = gates.split(lstm.hidden_size)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        states.append(h)
    return states


def logits_of(model, tokens):
    """The logits of one sentence without padding, token by token."""
    states = [model.lstm.embeddings.weight[t] for t in tokens]
    for number, ahead in enumerate(model.lstm.forwards):
        from_left = one_way(ahead, states)
        if model.config.num_directions == 1:
            states = from_left
            continue
        from_right = one_way(model.lstm.backwards[number], states[::-1])[::-1]
        states = [torch.cat(pair) for pair in zip(from_left, from_right, strict=True)]
    return torch.stack([model.lstm.embeddings.weight @ s + model.decoder.bias for s in states])


@pytest.mark.parametrize("directions", [1, 2])
def test_the_logits_are_those_of_a_loop_over_cells(directions):
    model = tiny(num_directions=directions)
    ids, mask = padded()
    assert len(model.lstm.backwards) == (3 if directions == 2 else 0)
    logits = model(input_ids=ids, attention_mask=mask).logits
    assert logits.shape == (5, 6, 12)
    for row, tokens, length in zip(logits, ids.tolist(), LENGTHS, strict=True):
        torch.testing.assert_close(row[:length], logits_of(model, tokens[:length]), rtol=1e-12, atol=1e-12)
    whole = torch.tensor(LENGTHS) == 6
    torch.testing.assert_close(model(input_ids=ids[whole]).logits, logits[whole], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("directions", [1, 2])
def test_padding_may_be_anything_anywhere(directions):
    model = tiny(num_directions=directions)
    ids, mask = padded()
    expected = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    others, _ = padded(fill=3)
    longer = torch.nn.functional.pad(others, (0, 2), value=7)
    left = torch.stack([row.roll(6 - length) for row, length in zip(ids, LENGTHS, strict=True)])
    for changed, its_mask in [(longer, torch.nn.functional.pad(mask, (0, 2))), (left, mask.flip(1))]:
        got = model(input_ids=changed, attention_mask=its_mask, output_hidden_states=True)
        for ours, theirs in zip(
            (got.logits, *got.hidden_states), (expected.logits, *expected.hidden_states), strict=True
        ):
            torch.testing.assert_close(ours[its_mask.bool()], theirs[mask.bool()], rtol=0, atol=1e-14)


def test_hidden_states_are_the_embeddings_and_every_layer():
    model = tiny(layers=2)
    ids, mask = padded()
    output = model.lstm(ids, mask, output_hidden_states=True)
    assert [tuple(states.shape) for states in output.hidden_states] == [(5, 6, 10)] * 3
    torch.testing.assert_close(output.hidden_states[0], model.lstm.embeddings(ids), rtol=0, atol=0)
    torch.testing.assert_close(output.hidden_states[-1], output.last_hidden_state, rtol=0, atol=0)
    assert model.lstm(ids, mask).hidden_states is None


def test_dropout_lies_between_the_layers():
    ids, mask = padded()
    for layers, differs in [(1, False), (2, True)]:
        model = tiny(layers=layers, dropout=0.5)
        plain = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        torch.manual_seed(0)
        dropped = model.train()(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        assert bool((dropped != plain).any()) is differs


def test_the_loss_is_the_mean_over_the_labels():
    model = tiny()
    ids, mask = padded()
    labels = ids.masked_fill((mask == 0) | (torch.arange(6) % 2 == 1), -100)
    output = model(input_ids=ids, attention_mask=mask, labels=labels)
    scored = labels >= 0
    expected = torch.nn.functional.cross_entropy(output.logits[scored], labels[scored])
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)


# --- checkpoints


@pytest.mark.parametrize("directions", [1, 2])
def test_a_checkpoint_loads_as_any_other(tmp_path, directions):
    model = tiny(num_directions=directions).float()
    model.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    assert (document["model_type"], document["architectures"]) == ("isoloss-lstm", ["LSTMForMaskedLM"])
    assert "decoder.weight" not in load_file(tmp_path / "model.safetensors")  # the embedding, kept once
    ids, mask = padded()
    expected = model(input_ids=ids, attention_mask=mask).logits
    loaded = load_model(tmp_path)
    assert (loaded.kind, loaded.architecture) == ("masked", "LSTMForMaskedLM")
    for other in (
        loaded.model,
        load_model(tmp_path, attention="eager").model,
        AutoModelForMaskedLM.from_pretrained(tmp_path),
    ):
        assert other.decoder.weight is other.lstm.embeddings.weight
        torch.testing.assert_close(other(input_ids=ids, attention_mask=mask).logits, expected, rtol=0, atol=0)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is LSTMModel
    states = model.lstm(ids, mask).last_hidden_state
    torch.testing.assert_close(base(ids, mask).last_hidden_state, states, rtol=0, atol=0)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), LSTMConfig)


def test_a_checkpoint_that_does_not_name_directions_reads_both_ways(tmp_path):
    tiny().float().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    document.pop("num_directions", None)
    path.write_text(json.dumps(document))
    assert len(load_model(tmp_path).model.lstm.backwards) == 3


def test_an_untied_decoder_has_weights_of_its_own(tmp_path):
    model = tiny(tie_word_embeddings=False)
    assert model.decoder.weight is not model.lstm.embeddings.weight
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=torch.float64).model
    ids, mask = padded()
    expected = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(loaded(input_ids=ids, attention_mask=mask).logits, expected, rtol=0, atol=0)


# --- flatness


def predicting_batch():
    ids, mask = padded()
    hidden = torch.arange(6) == torch.tensor([2, 0, 1, 5, 3])[:, None]
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~hidden, -100)}


@pytest.mark.parametrize("directions", [1, 2])
def test_the_trace_knows_an_exact_rule_for_every_parameter(directions):
    model, batch = tiny(num_directions=directions), predicting_batch()
    assert list(fisher_trace(model, [batch]).details["parameters_by_autograd"]) == []
    cotangent = torch.randn(5, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with GhostNorms(model, causal=False) as predictor:
        norms = predictor.squared_norms(predictor.forward(batch), cotangent).by_column
        assert predictor.slow_parameters == predictor.unreached == ()
    named = dict(model.named_parameters())
    assert predictor.names == list(named)
    logits = model(batch["input_ids"], batch["attention_mask"]).logits[batch["labels"] >= 0]
    for row, u, got in zip(logits, cotangent, norms, strict=True):
        gradients = torch.autograd.grad(row @ u, list(named.values()), retain_graph=True)
        expected = torch.stack([gradient.square().sum() for gradient in gradients])
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_second_derivatives_are_those_of_finite_differences():
    model, batch = tiny(layers=2), predicting_batch()
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(4)
    along = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]

    def gradients(**options):
        loss = model(**batch).loss
        return torch.autograd.grad(loss, parameters, **options)

    slope = sum((g * v).sum() for g, v in zip(gradients(create_graph=True), along, strict=True))
    products = torch.autograd.grad(slope, parameters)
    step, ends = 1e-5, []
    for sign in (1, -2):
        with torch.no_grad():
            for p, v in zip(parameters, along, strict=True):
                p.add_(sign * step * v)
        ends.append(gradients())
    for product, ahead, behind in zip(products, *ends, strict=True):
        torch.testing.assert_close(product, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kernel", "uses_cudnn"), [("eager", False), ("sdpa", True)])
def test_eager_keeps_cudnn_out_while_the_layers_run(monkeypatch, kernel, uses_cudnn):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", True)
    model, seen = tiny(), []
    model.set_attn_implementation(kernel)
    model.lstm.forwards[2].register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
    model(input_ids=torch.arange(6)[None])
    assert (seen, torch.backends.cudnn.enabled) == ([uses_cudnn], True)


@pytest.mark.gpu
def test_eager_has_second_derivatives_on_a_gpu():
    model = tiny().to("cuda")
    ids = padded()[0].to("cuda")
    model.set_attn_implementation("eager")
    loss = model(input_ids=ids).logits.logsumexp(dim=-1).mean()
    first = torch.autograd.grad(loss, model.lstm.forwards[0].weight_hh_l0, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), model.lstm.forwards[0].weight_hh_l0)[0]
    assert bool(second.isfinite().all())
