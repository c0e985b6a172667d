"""Features against one forward pass per sentence, and the look-up table against whole sentences' probabilities."""

from __future__ import annotations

import resource
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2LMHeadModel, PreTrainedModel, RobertaPreLayerNormConfig
from transformers import RobertaPreLayerNormForMaskedLM as PreNorm

import small_checkpoints as small
from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Sentences
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.languages.pcfg import PCFG
from isoloss.lab.lookup import LEAST_PROBABILITY, log_lookup_features, lookup_features
from isoloss.transfer.features import extract, projection_matrix, store, why_no_features

SHAPE = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 12,
}


def bert() -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForMaskedLM(BertConfig(**SHAPE)).eval()


def pre_norm() -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return PreNorm(RobertaPreLayerNormConfig(**SHAPE, pad_token_id=0)).eval()


def varied(n: int = 37, length: int = 6) -> Sentences:
    g = seeds.generator(0, "sentences")
    lengths = torch.randint(1, length + 1, (n,), generator=g)
    tokens = torch.randint(3, 20, (n, length), generator=g)
    return Sentences(tokens.masked_fill(torch.arange(length) >= lengths[:, None], 0), lengths)


@pytest.mark.parametrize("model", [bert(), pre_norm()], ids=["bert", "pre-norm"])
def test_rows_are_the_states_of_each_sentence_alone(model: PreTrainedModel) -> None:
    sentences = varied()
    features = extract(model, sentences, batch_size=10)
    assert features.shape == (37, 6 * 8)
    assert features.dtype == torch.float32
    assert not features.requires_grad
    for row, tokens, length in zip(features, sentences.tokens, sentences.lengths.tolist(), strict=True):
        with torch.no_grad():
            alone = model.base_model(tokens[None, :length]).last_hidden_state[0]
        torch.testing.assert_close(row[: length * 8], alone.flatten(), rtol=1e-5, atol=1e-5)
        assert torch.equal(row[length * 8 :], torch.zeros((6 - length) * 8))


@pytest.mark.parametrize("model", [bert(), pre_norm()], ids=["bert", "pre-norm"])
def test_the_last_layer_is_what_the_head_reads(model: PreTrainedModel) -> None:
    sentences = varied()
    states = extract(model, sentences).unflatten(1, (6, 8))
    head = model.cls if isinstance(model, BertForMaskedLM) else model.lm_head
    with torch.no_grad():
        logits = model(sentences.tokens, attention_mask=sentences.present().long()).logits
        from_features = head(states)
    present = sentences.present()
    torch.testing.assert_close(from_features[present], logits[present], rtol=1e-5, atol=1e-5)


def test_other_layers_the_mean_and_single_tokens() -> None:
    model, sentences = bert(), varied()
    present = sentences.present()
    with torch.no_grad():
        states = model(sentences.tokens, attention_mask=present.long(), output_hidden_states=True).hidden_states
    for layer in (0, 1, 2, -1, -3):
        expected = states[layer].masked_fill(~present[:, :, None], 0.0)
        torch.testing.assert_close(extract(model, sentences, layer=layer), expected.flatten(1), rtol=1e-5, atol=1e-5)
    every = extract(model, sentences).unflatten(1, (6, 8))
    assert torch.equal(extract(model, sentences, pooling="first"), every[:, 0])
    assert torch.equal(extract(model, sentences, pooling="last"), every[torch.arange(37), sentences.lengths - 1])
    mean = extract(model, sentences, pooling="mean")
    assert mean.shape == (37, 8)
    for row, tokens_states, length in zip(mean, states[-1], sentences.lengths.tolist(), strict=True):
        torch.testing.assert_close(row, tokens_states[:length].mean(0), rtol=1e-5, atol=1e-5)


def test_extract_leaves_the_model_as_it_was() -> None:
    model = bert()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    extract(model, varied())
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_bad_input_is_named() -> None:
    model, sentences = bert(), varied()
    with pytest.raises(IsolossError, match="no layer 3: the model has hidden states 0 to 2"):
        extract(model, sentences, layer=3)
    with pytest.raises(IsolossError, match="no pooling 'max': choose concatenate, mean, first, last"):
        extract(model, sentences, pooling="max")
    with pytest.raises(IsolossError, match="batch_size is 0"):
        extract(model, sentences, batch_size=0)
    with pytest.raises(IsolossError, match="projection is 0; it must be at least 1"):
        extract(model, sentences, projection=0)
    with pytest.raises(IsolossError, match="up to 13 tokens, and the model reads 12 at most"):
        extract(model, Sentences(torch.full((1, 13), 4), torch.tensor([13])))
    with pytest.raises(IsolossError, match="the token id 20, and the model knows 0 to 19"):
        extract(model, Sentences(torch.tensor([[3, 20]]), torch.tensor([2])))
    with pytest.raises(IsolossError, match="at least one token"):
        extract(model, Sentences(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)))
    none = Sentences(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    for features_of in (lambda: extract(model, none), lambda: lookup_features(PCFG.from_text("S a 1\nS b 1"), none)):
        with pytest.raises(IsolossError, match="at least one sentence"):
            features_of()
    with pytest.raises(IsolossError, match="Linear does not run on token ids: "):
        extract(torch.nn.Linear(2, 2).eval(), sentences)
    with pytest.raises(IsolossError, match="only its layer -1 can be read, not 1"):
        extract(Own("a layer"), sentences, layer=1)
    model.base_model.encoder.train()  # one part is enough
    with pytest.raises(IsolossError, match=r"training mode.*model.eval\(\)"):
        extract(model, sentences)


class Own(torch.nn.Module):
    """Sums of the tokens so far, and an output layer that is written in one of several ways."""

    def __init__(self, output: str) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens, self.hidden, self.head = nn.Embedding(20, 8), nn.Linear(8, 30), nn.Linear(30, 24)
            self.narrow, self.output = nn.Linear(30, 8), output
        self.eval()

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.hidden(self.tokens(ids).cumsum(dim=1)).tanh()
        return self.narrow(states) if self.output in ("embeddings", "einsum") else states

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, table = self.states(ids), self.tokens.weight
        if self.output == "embeddings":
            return nn.functional.linear(states, table)
        if self.output == "einsum":
            return torch.einsum("btd,vd->btv", states, table)
        if self.output == "product":
            return 5 * torch.tanh(states @ self.head.weight.T)
        if self.output == "position first":
            return self.head(states.transpose(0, 1)).transpose(0, 1)
        if self.output == "lookup":  # the logits are no product
            return self.hidden(self.tokens(ids))[..., :20] ** 2 + self.narrow(states).sum()
        return self.head(states)[..., :20]  # the vocabulary is padded


@pytest.mark.parametrize("output", ["a layer", "embeddings", "einsum", "product", "position first"])
def test_the_states_of_ones_own_module_are_what_its_output_layer_reads(output: str) -> None:
    model, sentences = Own(output), varied()
    assert why_no_features(model, causal=True) is None
    last = extract(model, sentences, pooling="last", batch_size=10)
    for row, tokens, length in zip(last, sentences.tokens, sentences.lengths.tolist(), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(row, model.states(tokens[None, :length])[0, -1])


class Nameless(GPT2LMHeadModel):
    """A model of transformers whose class does not say where its body is, as those with code of their own."""

    base_model_prefix = "body"

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte


def test_a_model_that_names_no_body_is_read_like_a_module() -> None:
    model, sentences = small.gpt2(20), varied()
    nameless = Nameless(model.config).eval()
    nameless.load_state_dict(model.state_dict())
    expected = extract(model, sentences, pooling="last")
    torch.testing.assert_close(extract(nameless, sentences, pooling="last"), expected)


def test_a_module_whose_states_cannot_be_read_is_told_before() -> None:
    assert (
        why_no_features(Own("lookup"), causal=True)
        == "Own has no output layer that makes its logits from one state per token"
    )
    assert "takes no attention_mask" in str(why_no_features(Own("a layer"), causal=False))
    assert why_no_features(bert(), causal=False) is None
    with pytest.raises(IsolossError, match="Own has no output layer"):
        extract(Own("lookup"), varied())


@pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")  # which peft asks for
def test_the_states_of_an_adapted_model_are_its_own() -> None:
    base = bert()
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["query"], init_lora_weights=False)).eval()
    sentences = varied()
    with torch.no_grad():
        batch = {"input_ids": sentences.tokens, "attention_mask": sentences.present().long()}
        states = adapted(**batch, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(extract(adapted, sentences, pooling="first"), states[:, 0])
    assert not torch.allclose(states[:, 0], extract(bert(), sentences, pooling="first"))
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert "puts a prompt before the text" in str(
        why_no_features(peft.get_peft_model(small.gpt2(20), prompts), causal=True)
    )


# --- the look-up table


def test_the_look_up_table_holds_the_true_conditionals() -> None:
    """Each entry is Pr(sentence with the token put in) over the sum of it, from whole sentences' probabilities."""
    language = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=4, vocab_size=7, stop_probability=0.3).build()
    sentences = language.sample(40, generator=seeds.generator(0, "lookup"))
    assert len(set(sentences.lengths.tolist())) > 2
    table = lookup_features(language, sentences)
    assert table.dtype == torch.float32
    assert table.shape == (40, 4 * 7)
    table = table.unflatten(1, (4, 7))
    assert bool((table[~sentences.present()] == 0).all())
    for row, tokens, length in zip(table.double(), sentences.tokens, sentences.lengths, strict=True):
        for position in range(int(length)):
            weights = []
            for token in range(7):
                other = tokens.clone()
                other[position] = token
                try:
                    weights.append(float(language.log_prob(other[None], length[None]).exp()))
                except IsolossError:  # a sentence of probability 0
                    weights.append(0.0)
            expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
            torch.testing.assert_close(row[position], expected, rtol=1e-6, atol=1e-30)


def test_the_look_up_table_of_a_causal_model_holds_the_conditionals_of_the_next_token() -> None:
    language = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=4, vocab_size=7, stop_probability=0.3).build()
    sentences = language.sample(40, generator=seeds.generator(0, "lookup"))
    truth = language.log_next(*sentences[:2]).exp().float().masked_fill(~sentences.present()[:, :, None], 0.0)
    assert lookup_features(language, sentences, causal=True).equal(truth.flatten(1))
    logarithms = truth.clamp(min=LEAST_PROBABILITY).log().masked_fill(~sentences.present()[:, :, None], 0.0)
    assert log_lookup_features(language, sentences, causal=True).equal(logarithms.flatten(1))


# --- one token, pairs, projections


def test_token_types_are_read() -> None:
    model, sentences = bert(), varied()
    types = (torch.arange(6) >= 2).long().expand(37, 6)
    found = extract(model, sentences, types=types, batch_size=5)
    for row in range(37):
        length = int(sentences.lengths[row])
        with torch.no_grad():
            alone = model.base_model(sentences.tokens[row : row + 1, :length], token_type_ids=types[:1, :length])
        torch.testing.assert_close(found[row, : length * 8], alone.last_hidden_state.flatten(), rtol=1e-5, atol=1e-5)


def test_a_projection_keeps_squared_distances_in_expectation() -> None:
    model, sentences = bert(), varied()
    whole = extract(model, sentences)
    difference = whole[1:] - whole[:-1]
    ratios = []
    for seed in range(50):
        projected = whole @ projection_matrix(48, 16, seed)
        ratios.append((projected[1:] - projected[:-1]).square().sum() / difference.square().sum())
    found = torch.stack(ratios)
    assert abs(float(found.mean()) - 1) < 4 * float(found.std()) / 50**0.5
    expected = whole @ projection_matrix(48, 3, 0)
    torch.testing.assert_close(extract(model, sentences, projection=3, batch_size=11), expected)


# --- features in a file


def test_a_file_holds_what_memory_would(tmp_path: Path) -> None:
    model, sentences = bert(), varied()
    expected = extract(model, sentences, batch_size=10)
    exact = extract(model, sentences, path=tmp_path / "a.safetensors", batch_size=10)
    half = extract(model, sentences, path=tmp_path / "b.safetensors", dtype=torch.bfloat16, batch_size=10)
    assert (exact.shape, len(half), half.dtype) == ((37, 48), 37, torch.bfloat16)
    assert torch.equal(exact[:], expected)
    assert torch.equal(half[:], expected.bfloat16())
    assert torch.equal(half[30:99], expected.bfloat16()[30:])
    rows = torch.tensor([[36, 0, 5], [5, 5, 1]])
    assert torch.equal(half[rows], expected.bfloat16()[rows])
    # any reader of safetensors reads it
    assert torch.equal(load_file(tmp_path / "b.safetensors")["features"], expected.bfloat16())
    assert (tmp_path / "b.safetensors").stat().st_size < 37 * 48 * 2 + 200
    half_in_memory = {"dtype": torch.bfloat16, "memory_bytes": 37 * 48 * 2, "batch_size": 10}
    within = extract(model, sentences, path=tmp_path / "c", **half_in_memory)
    assert torch.equal(within, expected.bfloat16())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_features_in_a_file_take_memory_only_where_they_are_read(tmp_path: Path) -> None:
    n, width = 4000, 4096
    features = store(tmp_path / "x", (torch.ones(500, width) for _ in range(8)), shape=(n, width), dtype=torch.bfloat16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert float(features[torch.tensor([3999, 0])].sum()) == 2 * width
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < n * width * 2 / 2


def test_features_that_cannot_be_stored(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for blocks, dtype, message in (
        ([torch.ones(2, 3)], torch.float32, "there are 2 rows of features, not 3"),
        ([torch.ones(3, 2)], torch.float32, r"a block of features has the shape \(3, 2\), not \(B, 3\)"),
        ([torch.ones(3, 3)], torch.float16, "stored in float32 or bfloat16, not in torch.float16"),
    ):
        with pytest.raises(IsolossError, match=message):
            store(path, blocks, shape=(3, 3), dtype=dtype)
        assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(IsolossError, match=r"cannot write .*file/x: "):
        store(tmp_path / "file" / "x", [torch.ones(3, 3)], shape=(3, 3), dtype=torch.float32)
