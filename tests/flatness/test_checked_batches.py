"""What a batch may hold: lists, arrays and narrow ids count as tensors of int64; what does not fit is told."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from isoloss import fisher_trace
from isoloss.errors import IsolossError
from isoloss.flatness import loss_rises
from isoloss.model_checks import position_ids

VOCAB, LENGTH, MOST = 11, 6, 8
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
SIZES |= {"vocab_size": VOCAB, "max_position_embeddings": MOST}
IDS = torch.randint(0, VOCAB, (6, LENGTH), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS), "documents": torch.arange(6)}


def bert():
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SIZES)).eval()


def gpt2(seed=0):
    torch.manual_seed(seed)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": MOST, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes)).eval()


def opt():
    torch.manual_seed(0)
    sizes = {"ffn_dim": 16, "word_embed_proj_dim": 8, **SIZES}
    return OPTForCausalLM(OPTConfig(**sizes)).eval()


OTHER_TYPES = {
    "lists": torch.Tensor.tolist,
    "tuples": lambda value: tuple(map(tuple, value.tolist())) if value.ndim > 1 else tuple(value.tolist()),
    "arrays": torch.Tensor.numpy,
    "uint8": lambda value: value.to(torch.uint8),
    "int16": lambda value: value.to(torch.int16),
}


def measured(batch):
    pool = [batch, batch] if "documents" in batch else None
    return (
        fisher_trace(bert(), [batch], rescaling="minimal").value,
        fisher_trace(gpt2(), [batch], num_sequences=4, auxiliary_sample=pool).value,
        loss_rises(gpt2(), [batch])["int8-rise"].value,
    )


@pytest.fixture(scope="module")
def expected():
    return measured(BATCH)


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_numbers_of_any_type_are_the_same_batch(expected, kind):
    assert measured({name: OTHER_TYPES[kind](value) for name, value in BATCH.items()}) == expected


def positions(first, length=LENGTH):
    return {"position_ids": torch.arange(first, first + length).expand(6, -1)}


REFUSED = {
    "rows of two lengths": (
        {"input_ids": [[1, 2], [3]]},
        r"input_ids cannot become a tensor \(.*\): give all",
    ),
    "short documents": ({"documents": [0, 1]}, "`documents` must have one document id for each of the 6 sequences"),
    "one document": ({"documents": 3}, "`documents` must have one document id for each of the 6 sequences"),
    "labels": ({"labels": torch.full_like(IDS, VOCAB)}, f"a label is {VOCAB}; the model predicts ids 0 to {VOCAB - 1}"),
    "late positions": (positions(MOST - 1), "position_ids are 7 to 12; the model knows ids 0 to 7"),
    "negative positions": (positions(-1), "position_ids are -1 to 4; the model knows ids 0 to 7"),
    "fractions": ({"position_ids": torch.rand(6, LENGTH)}, "position_ids are torch.float32; ids are integers"),
    "few positions": (positions(0, 5), r"labels of shape \(6, 6\) do not fit position_ids of shape \(6, 5\)"),
    "a short mask": (
        {"attention_mask": torch.ones(6, 5, dtype=torch.int64)},
        r"labels of shape \(6, 6\) do not fit attention_mask of shape \(6, 5\)",
    ),
    "no ids": ({"input_ids": None}, "there are no `input_ids` of shape"),
    "few rows of positions": (
        {"position_ids": torch.arange(LENGTH).repeat(2, 1)},
        r"labels of shape \(6, 6\) do not fit position_ids of shape \(2, 6\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_sentence(case):
    wrong, sentence = REFUSED[case]
    batches = [{**BATCH, **wrong}]
    with pytest.raises(IsolossError, match=sentence):
        fisher_trace(gpt2(), batches)


def test_token_types_that_the_model_does_not_have():
    with pytest.raises(IsolossError, match="token_type_ids are 2 to 2; the model knows ids 0 to 1"):
        fisher_trace(bert(), [{**BATCH, "token_type_ids": torch.full_like(IDS, 2)}])


@pytest.mark.parametrize("build", [bert, gpt2, opt, lambda: RobertaForMaskedLM(RobertaConfig(**SIZES)).eval()])
def test_the_model_runs_at_all_positions_that_it_is_said_to_know_and_at_no_other(build):
    model = build()
    known = position_ids(model, explicit=True)
    for position in (known.start - 1, known.start, known.stop - 1, known.stop):
        batch = {"input_ids": IDS[:1], "position_ids": torch.full((1, LENGTH), position)}
        if position in known:
            model(**batch)
        else:
            with pytest.raises((IndexError, RuntimeError)):
                model(**batch)


def test_rotary_positions_have_no_end():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    assert position_ids(model) is None
    assert fisher_trace(model, [{**BATCH, **positions(MOST)}]).value > 0
