"""The rise of the loss under rounded weights, against weights rounded one by one and losses taken one by one."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from isoloss.errors import IsolossError
from isoloss.flatness import Noise, Rounding, loss_rises
from isoloss.flatness.robustness import rounded_layers
from isoloss.seeds import generator

VOCAB, WIDTH = 11, 12


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=8)).eval()


def llama():
    sizes = {"hidden_size": WIDTH, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=1, **sizes)).eval()


def bert():
    sizes = {"hidden_size": WIDTH, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, max_position_embeddings=8, **sizes)).eval()


MODELS = {"gpt2": (gpt2, 8), "llama": (llama, 14), "bert": (bert, 13)}  # and how many layers are rounded


def one_by_one(weight, bits, group_size):
    """Round a matrix (outputs, inputs), weight by weight in Python's floats."""
    rows = []
    for row in weight.double().tolist():
        size, out = group_size or len(row), []
        for start in range(0, len(row), size):
            group = row[start : start + size]
            scale = max(map(abs, group)) / (2 ** (bits - 1) - 1)
            out += [round(w / scale) * scale if scale else 0.0 for w in group]
        rows.append(out)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 5), (4, 128), (2, 1)])
def test_weights_are_rounded_to_the_nearest_value_of_their_group(bits, group_size):
    weight = torch.randn(7, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight[2] = 0
    rounded = Rounding(bits=bits, group_size=group_size).round(weight)
    assert torch.allclose(rounded, one_by_one(weight, bits, group_size), rtol=1e-12, atol=0)
    whole = Rounding(bits=bits).round(weight)
    assert max(len(row.unique()) for row in whole) <= 2**bits - 1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 5)])
def test_the_rise_is_the_difference_of_losses_with_its_error_over_documents(name, bits, group_size):
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)  # so that rounding changes the loss
    ids, documents = torch.randint(0, VOCAB, (24, 6)), torch.arange(24) // 4
    labels = ids if name != "bert" else torch.where(torch.arange(6) % 3 == 1, ids, -100)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batches = [{"input_ids": ids, "labels": labels, "documents": documents}]
    change = Rounding(bits=bits, group_size=group_size)
    rise = loss_rises(model, batches, {"rise": change})["rise"]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    other = copy.deepcopy(model)
    rounded = 0
    for key, module in other.named_modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if is_linear and key not in ("lm_head", "cls.predictions.decoder"):
            weight = module.weight.data
            turned = weight.T if type(module).__name__ == "Conv1D" else weight
            weight.copy_(
                one_by_one(turned, bits, group_size).T if turned is not weight else one_by_one(weight, bits, group_size)
            )
            rounded += 1
    assert rounded == MODELS[name][1] == len(rounded_layers(model))

    def losses(model):
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        shift = 0 if name == "bert" else 1
        logits, targets = logits[:, : 6 - shift], labels[:, shift:]
        each = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=-100)
        return each.sum(dim=1), (targets != -100).sum(dim=1)

    (after, counts), (plain, _) = losses(other), losses(model)
    by_document = (after - plain).view(6, 4).sum(dim=1)
    positions = counts.view(6, 4).sum(dim=1).double()
    value = float(by_document.sum() / positions.sum())
    # documents of one size: the error of a mean
    each = by_document / positions
    assert abs(value) > 1e-4
    assert rise.value == pytest.approx(value, rel=1e-9)
    assert rise.stderr == pytest.approx(float(each.std()) / math.sqrt(6), rel=1e-9)
    assert (rise.samples, rise.num_predictions) == (6, int(positions.sum()))


def test_the_rise_under_noise_is_the_mean_over_draws_of_opposite_sign():
    torch.manual_seed(0)
    model = llama().double()
    ids = torch.randint(0, VOCAB, (8, 5))
    batches = [{"input_ids": ids[:5], "labels": ids[:5]}, {"input_ids": ids[5:], "labels": ids[5:]}]
    rise = loss_rises(model, batches, {"noise": Noise(relative_std=0.1, pairs=3, seed=4)})["noise"]

    @torch.no_grad()
    def loss(weights):
        logits = torch.func.functional_call(model, weights, (ids,)).logits[:, :-1]
        return float(nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:]))

    plain, rises, relative = dict(model.named_parameters()), [], []
    for pair in range(3):
        noise = {
            name: torch.randn(value.shape, generator=generator(4, "noise", pair, name), dtype=torch.float64)
            * (0.1 * value.detach().square().mean().sqrt())
            for name, value in plain.items()
        }
        relative += [float(noise[name].std() / plain[name].detach().std()) for name in plain if "mlp" in name]
        both = [loss({name: value + sign * noise[name] for name, value in plain.items()}) for sign in (1, -1)]
        rises += [each - loss(plain) for each in both]
    assert rise.value == pytest.approx(sum(rises) / 6, rel=1e-9)
    assert relative == pytest.approx([0.1] * len(relative), rel=0.15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Rounding(bits=1), "bits is 1; weights are rounded to between 2 and 8 bits"),
        (lambda: Rounding(bits=4, group_size=0), "group_size is 0; a group has at least one weight"),
        (lambda: Noise(relative_std=0.0), r"relative_std is 0\.0; it must be more than 0 and finite"),
        (lambda: Noise(relative_std=0.1, pairs=0), "pairs is 0; it must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(change, message):
    with pytest.raises(IsolossError, match=message):
        change()


def test_a_model_without_a_linear_layer_is_refused():
    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(VOCAB, VOCAB)

        def forward(self, input_ids):
            return CausalLMOutput(logits=self.table(input_ids))

    ids = torch.arange(12).view(4, 3) % VOCAB
    with pytest.raises(IsolossError, match="Bigram has no linear layer to round besides its output layer"):
        loss_rises(Bigram(), [{"input_ids": ids, "labels": ids}], causal=True)


def test_the_output_layer_of_a_module_that_does_not_name_it_stays():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.middle = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    assert list(rounded_layers(Own())) == ["middle"]
