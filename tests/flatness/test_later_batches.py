"""What the first two sequences do not show: caps, branches and masks on later ones, coincidences, models that draw."""

import math
from types import SimpleNamespace

import pytest
import torch
from plain_gradients import check_norms
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace

VOCAB, LENGTH, WIDTH = 11, 6, 8
SPECIAL = VOCAB - 1


class Mixing(nn.Module):
    """A language model of one attention and, by its kind, something that depends on more than the position."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.query, self.output, self.extra = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.double()

    def forward(self, input_ids):
        h = self.embedding(input_ids)
        if self.kind in ("special", "special, padded"):
            chosen, new = input_ids == SPECIAL, h.clone()
            rows = h[chosen]
            new[chosen] = self.extra(nn.functional.pad(rows, (0, 0)) if "padded" in self.kind else rows)
            h = new
        h = h + self.output((self.query(h) @ h.mT).softmax(-1) @ h)
        if self.kind == "capacity":  # never reached within one sequence
            on = (h.sum(-1) > -3).long()
            h = h + (on * (on.cumsum(1) <= 2 * LENGTH))[..., None] * self.extra(h)
        if self.kind == "branch" and (input_ids == SPECIAL).any():
            h = h + h.mean(1, keepdim=True)
        if self.kind == "length":
            h = h + self.gate * math.log(h.shape[1]) * h
        return SimpleNamespace(logits=self.head(h))


def tokens(count):
    return torch.randint(0, SPECIAL, (count, LENGTH), generator=torch.Generator().manual_seed(0))


def labeled(ids):
    return {"input_ids": ids, "labels": ids}


def test_a_cap_on_the_positions_that_pass():
    """It counts along a row, and selected positions are one row: only later sequences are beyond it."""
    ids = tokens(40)
    predictor, *_ = check_norms(Mixing("capacity"), labeled(ids))
    assert not predictor.selection.is_early


def test_a_branch_on_which_positions_meet_in_a_later_batch():
    first, second = tokens(80)[:40], tokens(80)[40:].clone()
    second[5, 2] = SPECIAL
    check_norms(Mixing("branch"), *map(labeled, (first, second, first)))


def test_a_later_batch_that_is_not_like_earlier_ones_that_were_not_checked():
    batches = [{"input_ids": ids, "labels": ids.clone()} for ids in tokens(64).split(8)]
    for batch in batches[2:]:
        batch["input_ids"][0, 0] = SPECIAL
    with pytest.raises(IsolossError, match="use batches of at least 32 sequences"):
        fisher_trace(Mixing("branch"), batches, causal=False)


def test_sequences_that_meet_in_the_model_itself_do_not_end_the_measurement():
    class Meeting(Mixing):
        def forward(self, input_ids):
            output = super().forward(input_ids)
            output.logits = output.logits * (1 + 0.1 * len(input_ids))
            return output

    fisher_trace(Meeting("none"), list(map(labeled, tokens(64).split(8))), causal=False)


@pytest.mark.parametrize(
    "kind", ["special", "special, padded"]
)  # of rows that are padded it is not known whose they are
@pytest.mark.parametrize("places", [[(2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 3)], [(6, 0), (6, 1)]])
def test_rows_chosen_by_a_mask_that_are_as_many_as_sequences(places, kind):
    ids = tokens(8)
    ids[0, 0] = ids[1, 0] = SPECIAL
    for place in places:
        ids[place] = SPECIAL
    batches = [ids] if len(places) == 6 else [ids[:2], ids[6:]]
    slow = ("extra.weight", "extra.bias") if "padded" in kind else ()
    check_norms(Mixing(kind), *map(labeled, batches), slow=slow)


def test_as_many_positions_are_predicted_as_a_sequence_has():
    """A gate that is zero hides in the logits that what it lets through depends on the number of positions."""
    ids = tokens(8)
    labels = ids.clone()
    labels[:, 1::2] = -100  # in two sequences as many as one has
    check_norms(Mixing("length"), {"input_ids": ids, "labels": labels})


def mixtral():
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, router_jitter_noise=0.9, max_position_embeddings=16,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def test_a_model_in_training_mode_that_draws_random_numbers_is_refused():
    ids, state = tokens(4), torch.get_rng_state()
    model = mixtral().train()
    torch.set_rng_state(state)
    with pytest.raises(IsolossError, match=r"draws random numbers: call model.eval\(\)"):
        fisher_trace(model, [labeled(ids)])
    assert torch.equal(torch.get_rng_state(), state)
    assert fisher_trace(model.eval(), [labeled(ids)]).value > 0


def test_statistics_of_batches_are_not_updated():
    model = Mixing("none")
    model.norm = nn.BatchNorm1d(WIDTH)
    with pytest.raises(IsolossError, match="norm normalizes by the batch"):
        fisher_trace(model.train(), [labeled(tokens(4))], causal=False)


def test_a_parameter_that_is_given_twice_counts_once():
    model, ids = Mixing("none"), tokens(4)
    once, twice = (
        fisher_trace(model, [labeled(ids)], causal=False, parameters=parameters)
        for parameters in ({"x": model.head.weight}, {"x": model.head.weight, "y": model.head.weight})
    )
    assert twice.by_parameter == once.by_parameter


@pytest.mark.parametrize(
    ("form", "slow"), [("packed", ("words.weight",)), ("flat", ()), ("interleaved", ("places.weight",))]
)
def test_lookups_for_all_sequences_that_the_model_reshapes(form, slow):
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, input_ids):
            number, places = len(input_ids), torch.arange(LENGTH)[None]
            if form == "packed":
                h = self.words(input_ids.reshape(1, -1)).view(number, LENGTH, WIDTH)
            else:
                h = self.words(input_ids)
                flat = self.places(places).view(LENGTH, WIDTH) if form == "flat" else None
                h = h + (flat if flat is not None else self.places(places).repeat_interleave(number, 0))
            return SimpleNamespace(logits=self.head(h))

    check_norms(Lookup().double(), labeled(tokens(4)), slow=slow)
