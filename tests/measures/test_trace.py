"""The Fisher trace against enumeration of every label and every sign vector, and everything that it refuses."""

import itertools
import json
import math
import types
import weakref

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from isoloss.errors import IsolossError
from isoloss.estimate import Estimate
from isoloss.measures.flatness import InterruptedEstimate, fisher_trace, trace


def bert(vocab=3, *, tied=True, attention="eager", dropout=0.0, size=8, dtype=torch.float64, cls=BertForMaskedLM):
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=size,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * size,
        max_position_embeddings=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=None,
        attn_implementation=attention,
    )
    return cls(config).to(dtype).eval()


def gpt2(vocab=3):
    torch.manual_seed(4)
    config = GPT2Config(
        vocab_size=vocab,
        n_embd=8,
        n_layer=2,
        n_head=2,
        n_positions=8,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).double().eval()


def llama(vocab=3):
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    # transformers' own RMSNorm computes in float32 whatever the model's dtype, too coarse for a check in float64
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm):
                setattr(parent, name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
    return model.double().eval()


MODELS = {
    "bert": (bert, False),
    "bert untied": (lambda vocab=3: bert(vocab, tied=False), False),
    "gpt2": (gpt2, True),
    "llama": (llama, True),
}


def rows(n, length, vocab, seed=0, predicted=((1,),)):
    """A batch of n rows; row i predicts the positions predicted[i % len(predicted)]."""
    tokens = torch.randint(0, vocab, (n, length), generator=torch.Generator().manual_seed(seed))
    labels = torch.full_like(tokens, -100)
    for i in range(n):
        for position in predicted[i % len(predicted)]:
            labels[i, position] = tokens[i, position]
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def exact(model, batch, *, causal):
    """sum_y p_y ||grad log p_y||^2 by one gradient a label, for each predicted position; and by parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    values, split = [], torch.zeros(len(parameters), dtype=torch.float64)
    for i in range(len(batch["labels"])):
        inputs = {name: value[i : i + 1] for name, value in batch.items() if name != "labels"}
        for t in (batch["labels"][i] != -100).nonzero()[:, 0].tolist():
            log_p = model(**inputs).logits[0, t - causal].log_softmax(-1)
            total = 0.0
            for y in range(len(log_p)):
                gradients = torch.autograd.grad(log_p[y], parameters, retain_graph=True, allow_unused=True)
                norms = torch.stack(
                    [torch.zeros((), dtype=split.dtype) if g is None else (g * g).sum() for g in gradients]
                )
                total += log_p[y].exp().item() * float(norms.sum())
                split += log_p[y].exp().item() * norms
            values.append(total)
    return values, split / len(values)


# --- exactness -------------------------------------------------------------------------------------------------------


def expectation_over_signs(monkeypatch, model, batch, *, group_size, causal, positions_per_group, vocab, **options):
    """The mean of `fisher_trace` over every sign vector, the same ones in each group."""
    drawn = {}
    queue = []

    def signs(seed, sequence, probe, shape):
        if sequence % group_size == 0:
            queue[:] = drawn["signs"].split(vocab)
        return torch.stack([queue.pop(0) for _ in range(shape[0])])

    monkeypatch.setattr(trace, "_signs", signs)
    values, splits = [], []
    for choice in itertools.product((-1, 1), repeat=vocab * positions_per_group):
        drawn["signs"] = torch.tensor(choice)
        found = fisher_trace(model, [batch], group_size=group_size, causal=causal, **options)
        values.append(found.value)
        splits.append(list(found.by_parameter.values()))
    return math.fsum(values) / len(values), torch.tensor(splits, dtype=torch.float64).mean(dim=0)


@pytest.mark.parametrize("name", MODELS)
def test_single_positions_are_exact_over_all_signs(name, monkeypatch):
    make, causal = MODELS[name]
    model, batch = make(4), rows(2, 5, 4, predicted=((2,), (4,)))
    mean, split = expectation_over_signs(
        monkeypatch, model, batch, group_size=1, causal=None, positions_per_group=1, vocab=4
    )
    truth, truth_split = exact(model, batch, causal=causal)
    assert mean == pytest.approx(sum(truth) / 2, rel=1e-10)
    torch.testing.assert_close(split, truth_split, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_cross_terms_of_a_group_vanish_over_all_signs(name, monkeypatch):
    make, causal = MODELS[name]
    model, batch = make(3), rows(4, 4, 3, seed=1, predicted=((2,), (3,), (1,), (2,)))
    mean, split = expectation_over_signs(
        monkeypatch, model, batch, group_size=2, causal=None, positions_per_group=2, vocab=3
    )
    truth, truth_split = exact(model, batch, causal=causal)
    assert mean == pytest.approx(sum(truth) / 4, rel=1e-10)
    torch.testing.assert_close(split, truth_split, rtol=1e-9, atol=1e-12)


def test_positions_of_one_sequence_are_exact_over_all_signs(monkeypatch):
    model, batch = gpt2(3), rows(2, 5, 3, seed=2, predicted=((1, 4),))
    mean, _ = expectation_over_signs(
        monkeypatch, model, batch, group_size=1, causal=True, positions_per_group=2, vocab=3
    )
    truth, _ = exact(model, batch, causal=True)
    assert mean == pytest.approx(sum(truth) / 4, rel=1e-10)


def test_padding_and_extra_inputs_are_passed_on(monkeypatch):
    model, batch = bert(3), rows(2, 4, 3, seed=3)
    batch["attention_mask"][1, 3:] = 0
    batch["token_type_ids"] = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    mean, _ = expectation_over_signs(
        monkeypatch, model, batch, group_size=1, causal=None, positions_per_group=1, vocab=3
    )
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
    mean, _ = expectation_over_signs(
        monkeypatch, model, batch, group_size=1, causal=None, positions_per_group=1, vocab=3
    )
    truth, _ = exact(model, batch, causal=False)
    assert mean == pytest.approx(sum(truth) / 2, rel=1e-10)
    found = fisher_trace(model, [batch], group_size=1)
    assert not any("layer.0" in name for name in found.by_parameter)
    assert found.details["num_parameters"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert not any(parameter.requires_grad for parameter in frozen)


# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("bert", "sketch", {"group_size": 4}),
        ("bert", "sketch", {"group_size": 1, "num_probes": 3}),
        ("gpt2", "sketch", {"group_size": 8, "num_probes": 2}),
        ("llama", "sketch", {"group_size": 3}),
        ("bert", "paper", {"num_probes": 3}),
        ("gpt2", "paper", {"num_probes": 3}),
    ],
)
def test_the_estimate_agrees_with_enumeration_on_the_same_inputs(name, method, options):
    make, causal = MODELS[name]
    model, batch = make(11), rows(48, 6, 11, seed=5, predicted=((2,), (1, 4), (5,)))
    truth, split = exact(model, batch, causal=causal)
    mean = sum(truth) / len(truth)
    found = [fisher_trace(model, [batch], method=method, seed=seed, **options) for seed in range(10)]
    # inputs are the same at every seed, so only the probes vary: 4 standard errors of their mean
    values = torch.tensor([e.value for e in found], dtype=torch.float64)
    assert abs(float(values.mean()) - mean) < 4 * float(values.std()) / math.sqrt(len(values))
    assert float(values.std()) < 0.25 * mean
    splits = torch.tensor([list(e.by_parameter.values()) for e in found], dtype=torch.float64)
    assert bool(((splits.mean(dim=0) - split).abs() <= 5 * splits.std(dim=0) / math.sqrt(len(found)) + 1e-12).all())
    for e in found:
        assert abs(e.value - mean) < 4 * e.stderr
        assert sum(e.by_parameter.values()) == pytest.approx(e.value, rel=1e-12)
        assert list(e.by_parameter) == [n for n, _ in model.named_parameters()]
        assert e.num_inputs == len(truth) == 64
        assert e.num_probes == options.get("num_probes", 1)
        assert e.samples == math.ceil(48 / options.get("group_size", 1))
        assert e.method == {"sketch": "fisher, grouped sketch", "paper": "fisher, sampled labels"}[method]
        assert e.unit == "nats per predicted token"


class Windows(nn.Module):
    """A tiny masked model without a config: an embedding, a product of the neighbours, a tied head."""

    def __init__(self, vocab, size):
        super().__init__()
        self.embedding = nn.Embedding(vocab, size)
        self.mix = nn.Linear(size, size)

    def forward(self, input_ids):
        states = torch.tanh(self.mix(self.embedding(input_ids)))
        return types.SimpleNamespace(logits=states.cumsum(dim=1) @ self.embedding.weight.T)


@pytest.mark.parametrize(
    ("method", "groups", "options"),
    [("sketch", 40, {"group_size": 2}), pytest.param("paper", 60, {"num_probes": 2}, marks=pytest.mark.slow)],
)
def test_the_interval_covers_the_truth_over_all_inputs(method, groups, options):
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

    covered = []
    for repetition in range(200):
        generator = torch.Generator().manual_seed(repetition)
        n = groups * options.get("group_size", 1)
        chosen = torch.multinomial(weights, n, replacement=True, generator=generator)
        batch = {name: value[chosen] for name, value in both.items()}
        found = fisher_trace(model, [batch], method=method, causal=False, seed=repetition, **options)
        low, high = found.ci95
        covered.append(low < truth < high)
    # 95 % nominal: binomial standard deviation 1.5 points over 200 repetitions, and a slight undercoverage at 40 groups
    assert 0.90 <= sum(covered) / len(covered) <= 0.99


# --- invariances -----------------------------------------------------------------------------------------------------


def cut(batch, sizes):
    return [
        dict(zip(batch, parts, strict=True)) for parts in zip(*(v.split(sizes) for v in batch.values()), strict=True)
    ]


@pytest.mark.parametrize("method", ["sketch", "paper"])
def test_the_result_does_not_depend_on_how_rows_are_cut_into_batches(method):
    model, batch = bert(7, dtype=torch.float32), rows(20, 5, 7, predicted=((1,), (2, 3)))
    options = {"method": method, "num_probes": 2, "group_size": 3, "seed": 7}
    whole = fisher_trace(model, [batch], **options)
    for sizes in ([3, 17], [1] * 20, [10, 4, 6]):
        parts = fisher_trace(model, iter(cut(batch, sizes)), **options)
        assert (parts.value, parts.stderr, parts.by_parameter) == (whole.value, whole.stderr, whole.by_parameter)
    assert fisher_trace(model, [batch], **{**options, "seed": 8}).value != whole.value


def test_a_change_of_width_ends_a_group():
    model = bert(7)
    narrow, wide = rows(5, 4, 7), rows(4, 6, 7, seed=1)
    found = fisher_trace(model, [narrow, wide], group_size=4)
    assert found.samples == 3  # 4 + 1 narrow rows, 4 wide ones
    assert found.num_inputs == 9
    assert found.details["sequences"] == 9


def test_other_arguments_reach_the_model():
    model, batch = bert(7), rows(4, 4, 7)
    seen = []
    model.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs), with_kwargs=True)
    fisher_trace(model, [{**batch, "output_attentions": False}], group_size=2)
    assert [kwargs["output_attentions"] for kwargs in seen] == [False, False]
    assert all("labels" not in kwargs for kwargs in seen)


def test_label_values_are_not_used():
    model, batch = bert(7), rows(8, 4, 7)
    other = {**batch, "labels": torch.where(batch["labels"] == -100, -100, (batch["labels"] + 1) % 7)}
    assert fisher_trace(model, [batch], group_size=2).value == fisher_trace(model, [other], group_size=2).value


def test_attention_kernels_agree():
    batch = rows(24, 6, 7, predicted=((1, 3),))
    batch["attention_mask"][::2, 5:] = 0
    found = [fisher_trace(bert(7, attention=kernel), [batch], group_size=4) for kernel in ("eager", "sdpa")]
    assert found[0].value == pytest.approx(found[1].value, rel=1e-10)
    assert found[0].stderr == pytest.approx(found[1].stderr, rel=1e-9)
    assert [e.details["attention"] for e in found] == ["eager", "sdpa"]


def test_the_model_is_left_as_it_was_found():
    model, batch = bert(7).train(), rows(8, 4, 7)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = torch.ones_like(model.cls.predictions.bias)
    model.cls.predictions.bias.grad = gradient
    with torch.no_grad():
        fisher_trace(model, [batch], group_size=2)
        assert not torch.is_grad_enabled()
    assert model.training
    assert model.cls.predictions.bias.grad is gradient
    assert bool((gradient == 1).all())
    assert all(p.grad is None for name, p in model.named_parameters() if name != "cls.predictions.bias")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_only_one_groups_graph_is_alive_at_a_time():
    model, batch = bert(7), rows(8, 4, 7)
    earlier = []

    def count(_module, _inputs, output):
        assert all(logits() is None for logits in earlier)
        earlier.append(weakref.ref(output.logits))

    model.register_forward_hook(count)
    fisher_trace(model, [batch], group_size=2)
    assert len(earlier) == 4


def test_parameters_without_a_gradient_count_zero_and_are_named():
    torch.manual_seed(0)
    model = Windows(4, 3).double()
    batch = {"input_ids": rows(6, 3, 4)["input_ids"], "labels": rows(6, 3, 4)["labels"]}
    expected = fisher_trace(model, [batch], group_size=2, causal=False)
    model.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    found = fisher_trace(model, [batch], group_size=2, causal=False)
    assert found.value == expected.value
    assert found.by_parameter["unused"] == 0
    assert found.details["parameters_without_gradient"] == ["unused"]
    assert found.details["num_parameters"] == expected.details["num_parameters"] + 2


def test_bfloat16_agrees_with_float32_to_its_precision():
    batch = rows(64, 6, 7)
    wide, narrow = (fisher_trace(bert(7, dtype=d), [batch], group_size=4) for d in (torch.float32, torch.bfloat16))
    assert narrow.value == pytest.approx(wide.value, rel=0.05)
    assert (wide.details["dtype"], narrow.details["dtype"]) == ("float32", "bfloat16")


def test_the_estimate_says_what_was_done_and_survives_json():
    found = fisher_trace(bert(7), [rows(8, 4, 7)], group_size=2, seed=5)
    assert Estimate.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert found.seconds > 0
    assert dict(found.details) == {
        "device": "cpu",
        "dtype": "float64",
        "attention": "eager",
        "num_parameters": sum(p.numel() for p in bert(7).parameters()),
        "parameters_without_gradient": [],
        "sequences": 8,
        "seed": 5,
        "group_size": 2,
        "predicts": "masked tokens",
    }


# --- progress and interruption ---------------------------------------------------------------------------------------


def test_progress_counts_sequences():
    done = []
    fisher_trace(bert(7), [rows(7, 4, 7)], group_size=3, progress=done.append)
    assert done == [3, 6, 7]


def test_an_interruption_carries_the_estimate_so_far():
    model, batch = bert(7), rows(20, 4, 7)

    def stop(done):
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedEstimate) as caught:
        fisher_trace(model, [batch], group_size=4, progress=stop)
    first = fisher_trace(model, [{name: value[:12] for name, value in batch.items()}], group_size=4)
    assert isinstance(caught.value, KeyboardInterrupt)
    assert caught.value.partial.value == first.value
    assert caught.value.partial.stderr == first.stderr
    assert caught.value.partial.samples == 3


def test_an_interruption_before_there_is_an_error_bar_is_just_that():
    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fisher_trace(bert(7), [rows(8, 4, 7)], group_size=4, progress=stop)
    assert not isinstance(caught.value, InterruptedEstimate)


# --- refusals --------------------------------------------------------------------------------------------------------


def refuses(sentence, model, batches, **options):
    with pytest.raises(IsolossError, match=sentence):
        fisher_trace(model, batches, **options)


def test_dropout_that_is_on_is_refused():
    refuses(r"call model\.eval\(\)", bert(dropout=0.1).train(), [rows(4, 4, 3)])
    sleeping = llama()
    sleeping.train()
    sleeping.model.layers[0].self_attn.attention_dropout = 0.2
    refuses(r"self_attn has dropout 0\.2: call model\.eval\(\)", sleeping, [rows(4, 4, 3)])
    fisher_trace(bert(dropout=0.1), [rows(4, 4, 3)], group_size=1)
    fisher_trace(bert(dropout=0.0).train(), [rows(4, 4, 3)], group_size=1)


def test_a_batch_that_predicts_nothing_is_refused():
    nothing = rows(4, 4, 3, predicted=((),))
    refuses("batch 1 predicts nothing", bert(), [rows(4, 4, 3), nothing], group_size=1)
    refuses("batch 0 predicts nothing", gpt2(), [rows(4, 4, 3, predicted=((0,),))], group_size=1)


def test_logits_that_are_not_finite_are_refused():
    model = bert(4)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[3] = math.nan
    model.cls.predictions.decoder.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.float64))
    good, bad = rows(5, 4, 3), rows(5, 4, 3)
    bad["input_ids"][2, 0] = 3
    refuses(r"batch 1: the model's logits are NaN or infinite \(sequence 7\)", model, [good, bad], group_size=4)


def test_a_gradient_that_is_not_finite_is_refused():
    class Steep(Windows):
        def forward(self, input_ids):
            output = super().forward(input_ids)
            return types.SimpleNamespace(logits=output.logits + (self.mix.bias.sum() * 0).sqrt())

    refuses(
        "batch 0: the gradient of mix.bias is not finite",
        Steep(3, 2),
        [{name: value for name, value in rows(4, 4, 3).items() if name != "attention_mask"}],
        causal=False,
        group_size=2,
    )


def test_models_that_cannot_be_measured_are_refused():
    batch = rows(4, 4, 3)
    refuses("BertForMaskedLM has no trainable parameter", bert().requires_grad_(False), [batch])
    refuses(
        "BertForSequenceClassification gives no logits", bert(cls=BertForSequenceClassification), [batch], causal=False
    )
    refuses(
        "gives 2 logits a position for a vocabulary of 3", bert(cls=BertForTokenClassification), [batch], causal=False
    )
    refuses("BertModel gives no logits", bert().bert, [batch], causal=False)
    refuses("pass causal=False or causal=True", bert().bert, [batch])
    unreached = bert().requires_grad_(False)
    unreached.extra = nn.Parameter(torch.ones(1))
    refuses("no trainable parameter of BertForMaskedLM reaches its logits", unreached, [batch])


def test_batches_that_do_not_fit_are_refused():
    batch = rows(4, 4, 3)
    refuses("there are no batches", bert(), [])
    refuses(r"pass an iterable of batches", bert(), batch)
    refuses("batch 0 is no mapping with `labels`", bert(), [{"input_ids": batch["input_ids"]}])
    refuses("batch 0 is no mapping with `labels`", bert(), [batch["input_ids"]])
    refuses(
        r"labels of shape \(4, 3\) do not fit input_ids of shape \(4, 4\)",
        bert(),
        [{**batch, "labels": batch["labels"][:, :3]}],
    )
    refuses("do not fit attention_mask", bert(), [{**batch, "attention_mask": batch["attention_mask"][:2]}])
    states = {"inputs_embeds": torch.zeros(4, 5, 8, dtype=torch.float64), "labels": batch["labels"]}
    refuses(r"labels of shape \(4, 4\) do not fit logits of \(4, 5, 3\)", bert(), [states])


def test_fewer_than_two_groups_are_refused():
    refuses("4 sequences make one group of group_size 8.*reduce group_size", bert(), [rows(4, 4, 3)])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "hutchinson"}, "method is 'hutchinson'; it is one of sketch, paper"),
        ({"num_probes": 0}, "num_probes is 0; it must be at least 1"),
        ({"group_size": 0}, "group_size is 0; it must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(options, sentence):
    refuses(sentence, bert(), [rows(4, 4, 3)], **options)


def test_the_kind_of_model_is_read_from_its_class_or_config():
    kinds = {type(make()).__name__: trace._is_causal(make()) for make in (bert, gpt2, llama)}
    assert kinds == {"BertForMaskedLM": False, "GPT2LMHeadModel": True, "LlamaForCausalLM": True}
    decoder = nn.Module()
    decoder.config = types.SimpleNamespace(is_decoder=True)
    assert trace._is_causal(decoder) is True
