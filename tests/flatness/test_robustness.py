"""The rise of the loss under rounded weights, against weights rounded one by one and losses taken one by one."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

from isoloss.errors import IsolossError
from isoloss.flatness import Noise, Rounding, loss_rises
from isoloss.flatness._linear_maps import LinearMaps
from isoloss.flatness.robustness import _groups_and_parts, rounded_layers
from isoloss.seeds import generator
from isoloss.statistics.comparison import paired_difference
from isoloss.statistics.ratio import ratio

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
    def loss(weights, row):
        logits = torch.func.functional_call(model, weights, (ids[row, None],)).logits[:, :-1]
        return float(nn.functional.cross_entropy(logits.transpose(1, 2), ids[row, None, 1:]))

    plain, rises, relative = dict(model.named_parameters()), torch.zeros(8, dtype=torch.float64), []
    for row in range(8):
        for draw in range(3 * row, 3 * row + 3):
            noise = {
                name: torch.randn(value.shape, generator=generator(4, "noise", draw, name), dtype=torch.float64)
                * (0.1 * value.detach().square().mean().sqrt())
                for name, value in plain.items()
            }
            relative += [float(noise[name].std() / plain[name].detach().std()) for name in plain if "mlp" in name]
            both = [loss({name: plain[name] + sign * noise[name] for name in plain}, row) for sign in (1, -1)]
            rises[row] += (sum(both) / 2 - loss(plain, row)) / 3
    assert (rise.value, rise.stderr) == pytest.approx((float(rises.mean()), float(rises.std()) / math.sqrt(8)))
    assert (rise.samples, rise.details["draws"], rise.details["clusters"]) == (8, 24, "sequences")
    assert relative == pytest.approx([0.1] * len(relative), rel=0.15)


class Product(nn.Module):
    """Logits are `table[ids] @ matrix`; the matrix may be given."""

    def __init__(self, matrix=None):
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.matrix = nn.Parameter(torch.randn(WIDTH, VOCAB) if matrix is None else matrix)

    def forward(self, input_ids):
        return CausalLMOutput(logits=self.table(input_ids) @ self.matrix)


def test_the_error_under_noise_covers_draws_and_inputs_of_a_rise_and_of_a_difference():
    torch.manual_seed(0)
    models, repetitions = [Product(), Product()], 25
    found = []
    for seed in range(repetitions):
        ids = torch.randint(0, VOCAB, (12, 6))
        change = {"noise": Noise(relative_std=0.3, pairs=1, seed=seed)}
        one, two = (loss_rises(m, [{"input_ids": ids, "labels": ids}], change, causal=True)["noise"] for m in models)
        found.append([one, paired_difference(one, two)])
    for estimates in zip(*found, strict=True):
        values, errors = (np.array([getattr(e, name) for e in estimates]) for name in ("value", "stderr"))
        # (n - 1) s^2 / sigma^2 is chi-squared with n - 1 degrees of freedom; chance takes it out of this once in 100
        low, high = chi2.ppf([0.005, 0.995], repetitions - 1) / (repetitions - 1)
        assert low < values.var(ddof=1) / np.mean(errors**2) < high


def test_a_part_of_the_sequences_has_draws_of_its_own():
    """Groups share no draw, and their number of parts is in proportion to their sequences."""
    clusters = torch.tensor([0] * 12 + [1] * 24 + [2] * 4)
    groups, parts = _groups_and_parts(clusters)
    assert groups.tolist() == [0, 1, 2]
    assert [len(parts[clusters == i].unique()) for i in range(3)] == [6, 12, 2]
    assert parts.bincount().tolist() == [2] * 20
    groups, parts = _groups_and_parts(torch.arange(64))
    assert groups.bincount().tolist() == parts.bincount().tolist() == [4, 3, 3, 3, 3] * 4
    assert parts.tolist() == groups.tolist()


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


@pytest.mark.parametrize("shape_of", [lambda ids: (*ids.shape, VOCAB), lambda ids: (len(ids), -1, VOCAB)])
def test_a_module_may_need_the_logits_of_all_positions(shape_of):
    class Own(nn.Module):
        def __init__(self, shape_of):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.middle = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.head, self.shape_of = nn.Linear(WIDTH, VOCAB), shape_of

        def forward(self, input_ids):
            logits = self.head(self.middle(self.table(input_ids)))
            return CausalLMOutput(logits=logits if self.shape_of is None else logits.view(self.shape_of(input_ids)))

    # as many predicted positions as four sequences of another length would have
    ids = torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "labels": torch.where(torch.arange(8) < 4, ids, -100)}]
    rises, expected = (
        {name: rise.value for name, rise in loss_rises(Own(each).double(), batches, causal=False).items()}
        for each in (shape_of, None)
    )
    assert rises == pytest.approx(expected, rel=1e-9)
    assert abs(expected["noise-rise"]) > 1e-6


def test_the_output_layer_of_a_module_that_does_not_name_it_is_rounded_unless_it_is_an_embedding():
    class Own(nn.Module):
        def __init__(self, *, tied):
            super().__init__()
            # as many positions as the middle layer has outputs
            self.table, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(WIDTH, WIDTH)
            self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
            if tied:
                self.head.weight = self.table.weight

    assert list(rounded_layers(Own(tied=True))) == ["middle"]
    assert list(rounded_layers(Own(tied=False))) == ["middle", "head"]


def moe(cls, config, **sizes):
    sizes |= {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return cls(config(vocab_size=VOCAB, num_experts_per_tok=2, head_dim=6, pad_token_id=0, **sizes)).eval()


MIXTURES = {
    "mixtral": lambda: moe(MixtralForCausalLM, MixtralConfig, num_local_experts=3, intermediate_size=20),
    "qwen": lambda: moe(Qwen3MoeForCausalLM, Qwen3MoeConfig, num_experts=3, moe_intermediate_size=20),
    "gpt-oss": lambda: moe(GptOssForCausalLM, GptOssConfig, num_local_experts=3, intermediate_size=20),
}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_in_one_parameter_are_rounded_along_their_inputs(name, implementation):
    torch.manual_seed(0)
    model = MIXTURES[name]()
    model.set_experts_implementation(implementation)
    ids = torch.randint(0, VOCAB, (16, 6))
    rise = loss_rises(model, [{"input_ids": ids, "labels": ids}], {"rise": Rounding(bits=3, group_size=5)})["rise"]

    def loss():
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, :-1]
        return float(nn.functional.cross_entropy(logits.transpose(1, 2).double(), ids[:, 1:]))

    before, number = loss(), 0
    for key, value in model.named_parameters():
        is_expert = ".experts." in key and not key.endswith("bias")
        if is_expert or key.endswith("proj.weight"):
            turned = name == "gpt-oss" and is_expert  # (experts, inputs, outputs)
            matrices = value.data if is_expert else value.data[None]
            rows = [one_by_one(m.T if turned else m, 3, 5) for m in matrices]
            value.data = torch.stack([m.T if turned else m for m in rows]).view(value.shape).float()
            number += value.numel()
    assert rise.value == pytest.approx(loss() - before, abs=2e-6)
    assert abs(rise.value) > 1e-4
    assert rise.details["rounded_weights"] == rise.details["map_weights"] == number


class Parts(nn.Module):
    """Matrices in most of the forms that modules of one's own have, each at the logits' shape."""

    def __init__(self):
        super().__init__()
        weight = lambda *shape: nn.Parameter(torch.randn(*shape) / 4)  # noqa: E731
        self.table, self.places, self.bias = weight(VOCAB, WIDTH), weight(8, WIDTH), weight(2, WIDTH)
        self.right, self.bank, self.heads = weight(WIDTH, 24), weight(3, WIDTH, WIDTH), weight(WIDTH, 2, 6)
        self.scaled, self.left, self.never = weight(WIDTH, WIDTH), weight(WIDTH, WIDTH), weight(5, 2)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.lstm, self.conv = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.ones(2, 6))

    def forward(self, ids):
        x = self.table[ids] + self.places[: ids.shape[1]] + self.bias[0]
        x = x + (x @ self.right.to(torch.float64))[..., :WIDTH] + x @ self.bank[1]
        x = x + nn.functional.linear(x, 0.5 * self.bank[::2].flatten(0, 1).type_as(x))[..., WIDTH:]
        x = x + (torch.einsum("btd,dhk->bthk", x, self.heads) * self.gain).flatten(2)
        x = x + x @ self.scaled.T + (self.left @ x.mT).mT + self.attention(x, x, x)[0] + self.lstm(x)[0]
        x = x + self.conv(x.mT).mT + self.normed(x)
        return x @ self.table.T


def test_matrices_of_a_module_of_ones_own_are_found_in_its_forward_pass():
    torch.manual_seed(0)
    model = Parts().double().eval()
    ids = torch.randint(0, VOCAB, (4, 8))
    with torch.no_grad(), LinearMaps(model) as watched:
        model(ids)
    maps, number = watched.found(rounded_layers(model).values())
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected = {"right": (0,), "bank": (1,), "heads": (0,), "scaled": (1,), "left": (1,), "conv.weight": (1, 2)}
    expected |= dict.fromkeys(["attention.in_proj_weight", "attention.out_proj.weight"], (1,))
    expected |= dict.fromkeys(["lstm.weight_ih_l0", "lstm.weight_hh_l0"], (1,))
    expected["normed.parametrizations.weight.original1"] = (1,)
    assert {names[parameter]: axes for parameter, axes in maps.items()} == expected
    # a parameter that no product was seen of counts as a weight of maps that is not rounded
    assert number == sum(parameter.numel() for parameter in maps) + model.never.numel()


def test_of_packed_text_the_error_is_the_larger_one_of_sequences_and_blocks():
    torch.manual_seed(0)
    rounding, larger = Rounding(bits=8), set()
    model = llama()
    model.config.bos_token_id = model.config.eos_token_id = None  # nothing separates documents
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for layer in rounded_layers(rounded).values():
            layer.weight.copy_(rounding.round(layer.weight))
    for seed in range(4):
        # neighbors share tokens, as pieces of one text do
        ids = (torch.arange(64)[:, None] // 8 + torch.randint(5, (64, 8), generator=generator(seed, "ids"))) % VOCAB
        found = loss_rises(model, [{"input_ids": ids, "labels": ids}], {"int8": rounding})["int8-loss"]
        assert found.details["clusters"].startswith("blocks")
        with torch.no_grad():
            nats = [7 * float(rounded(row[None], labels=row[None]).loss) for row in ids]
        blocks = np.arange(64) * found.samples // 64
        sums = np.bincount(blocks, nats), np.bincount(blocks, np.full(64, 7.0))
        errors = ratio(nats, [7.0] * 64)[1], ratio(*sums)[1]
        larger.add(int(np.argmax(errors)))
        assert found.stderr == pytest.approx(max(errors), rel=1e-5)
    assert larger == {0, 1}
