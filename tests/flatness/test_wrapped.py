"""Models and batches as they come: compiled, with checkpoints, adapted, in inference mode; batches without a label."""

import types

import peft
import pytest
import torch
from dense_curvature import VOCAB, batch_of, gpt2
from flatness_measures import MEASURES, WAYS, unlabeled
from plain_gradients import check_norms
from small_models import llama
from test_position_selection import all_signs, assert_exact  # noqa: F401 (a fixture)
from torch import nn

from isoloss.cli import measure as command
from isoloss.comparison.traces import compare_traces
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.flatness import (
    fisher_trace,
)
from isoloss.flatness._curvature import MeanLoss
from isoloss.model_checks import is_causal

pytestmark = [
    # peft and the callers of peft ask transformers by names that it is about to drop
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning"),
    # three products are enough to compare with, and not to converge
    pytest.mark.filterwarnings("ignore:the search for eigenvalues ended"),
]


PADDING = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def batches():
    return [batch_of(4, seed=1), batch_of(4, seed=2)]


def compiled():
    return torch.compile(gpt2(), backend="eager")


def test_the_kind_of_a_wrapped_model_is_that_of_the_model():
    adapted = peft.get_peft_model(gpt2(), peft.LoraConfig(r=1, target_modules=["c_attn"], fan_in_fan_out=True))
    for model in (compiled(), nn.DataParallel(gpt2()), adapted, torch.compile(adapted, backend="eager")):
        assert is_causal(model)


def test_a_model_that_was_loaded_in_inference_mode_is_refused():
    with torch.inference_mode():
        model = gpt2()
    with pytest.raises(IsolossError, match="GPT2LMHeadModel was loaded in torch"):
        fisher_trace(model, batches())


class Checkpointing(nn.Module):
    """Calls torch's checkpoint by itself, around a part in which positions meet."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.mix, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.use_reentrant = use_reentrant

    def body(self, x):
        return self.norm(self.mix(x.cumsum(dim=1)).tanh())

    def forward(self, input_ids):
        x = torch.utils.checkpoint.checkpoint(self.body, self.embed(input_ids), use_reentrant=self.use_reentrant)
        return types.SimpleNamespace(logits=self.head(x))


def test_a_model_that_checkpoints_by_itself():
    model, batch = Checkpointing(use_reentrant=False).double(), batches()[0]
    check_norms(model, batch)


@pytest.mark.parametrize("name", WAYS[:4])
def test_a_model_whose_checkpoints_take_no_part_in_a_gradient(name):
    model = Checkpointing(use_reentrant=True).double()
    model.config = types.SimpleNamespace(is_decoder=True, vocab_size=VOCAB)
    with pytest.raises(IsolossError, match=r"Checkpointing recomputes activations .*reentrant=True.*switch that off"):
        MEASURES[name](model, batches())


def test_one_row_of_positions_gives_the_enumerated_trace(all_signs):  # noqa: F811
    given = {**batch_of(3, seed=1), "position_ids": torch.tensor([[3, 1, 0, 2]])}
    given["labels"][:, 2] = -100
    model = gpt2()
    assert_exact(model, given, causal=True, vocab=VOCAB, reference=InOrder(model))


class InOrder(nn.Module):
    """A model that takes its positions in one order, whichever rows of them it is given."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids):
        return self.model(input_ids=input_ids, position_ids=torch.tensor([[3, 1, 0, 2]]))


def test_padding_that_moves_predictions_is_told():
    """GPT-2 counts its positions from the padding, Llama knows distances alone."""
    given = {**batch_of(4, length=3), "attention_mask": torch.ones(4, 3, dtype=torch.int64)}
    left = {name: nn.functional.pad(given[name], (1, 0), value=padding) for name, padding in PADDING.items()}
    right = {name: nn.functional.pad(given[name], (0, 1), value=padding) for name, padding in PADDING.items()}
    plain = MeanLoss(gpt2(), [given]).value()
    with pytest.warns(
        IsolossWarning, match=r"GPT2LMHeadModel predicts otherwise with padding than without .sequence 0"
    ):
        assert abs(MeanLoss(gpt2(), [left]).value() / plain - 1) > 0.01
    positions = (left["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    for batch in (right, {**left, "position_ids": positions}):
        assert MeanLoss(gpt2(), [batch]).value() == pytest.approx(plain)
    MeanLoss(llama(VOCAB), [left])


def test_packed_documents_that_see_each_other_are_told():
    """With an attention mask, even of ones, transformers does not look at where position ids start again."""
    given = {"input_ids": batch_of(4)["input_ids"], "position_ids": torch.tensor([[0, 1, 0, 1]])}
    given["labels"] = given["input_ids"].clone()
    given["labels"][:, 2] = -100
    MeanLoss(llama(VOCAB), [given])
    with pytest.warns(
        IsolossWarning, match=r"otherwise with documents before them than .* leave out the attention_mask"
    ):
        MeanLoss(llama(VOCAB), [{**given, "attention_mask": torch.ones(4, 4)}])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention_is_measured_or_refused_in_one_sentence():
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {"hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **options, attn_implementation="flex_attention")).eval()
    try:
        found = fisher_trace(model, batches()).value  # torch 2.10
    except IsolossError as error:
        assert 'no gradient on the device cpu: call model.set_attn_implementation("sdpa")' in str(error)  # noqa: PT017
        return
    model.set_attn_implementation("sdpa")
    assert found == pytest.approx(fisher_trace(model, batches()).value, rel=1e-5)


# --- virtual tokens ---------------------------------------------------------------------------------------------------


class Sliced(nn.Module):
    """A prompted model's logits at the tokens that it is given."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, **inputs):
        logits = self.model(input_ids=input_ids, **inputs).logits
        return types.SimpleNamespace(logits=logits[:, logits.shape[1] - input_ids.shape[1] :])


PROMPTS = {
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=6),
}


def prompted(kind):
    torch.manual_seed(0)
    model = gpt2().float()
    model.config.n_positions = 8
    model.transformer.wpe = nn.Embedding(8, 4)
    return peft.get_peft_model(model, PROMPTS[kind]()).double().eval()


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_of_peft(kind, all_signs):  # noqa: F811
    """The labels of virtual tokens are those of the tokens behind them."""
    model, batch = prompted(kind), batch_of(3, seed=1, padded=True)
    batch["labels"][:, 2] = -100
    place, slow = assert_exact(model, batch, causal=True, vocab=VOCAB, reference=Sliced(model))
    assert slow == []
    assert place != "after the head"


@pytest.mark.parametrize("name", WAYS[:4])
def test_prompts_in_every_measure(name):
    model = prompted("prompt")
    expected = MEASURES[name](RightLabels(model), batches())
    assert MEASURES[name](model, batches()).value == pytest.approx(expected.value, rel=1e-9)


class RightLabels(Sliced):
    """The same with a class name that tells what it predicts."""

    config = types.SimpleNamespace(is_decoder=True, vocab_size=VOCAB)


# --- batches without a label ------------------------------------------------------------------------------------------


def test_the_loss_of_a_comparison_skips_it_too():
    given = [batch_of(4, seed=1), unlabeled(2), batch_of(4, seed=2)]
    documents = [torch.tensor([0, 0, 1, 1]), torch.tensor([1, 2]), torch.tensor([2, 2, 3, 3])]
    given = [{**batch, "documents": names} for batch, names in zip(given, documents, strict=True)]
    whole = {key: torch.cat([batch[key] for batch in given]) for key in given[0]}
    apart, together = (compare_traces({"a": gpt2()}, part).models["a"] for part in (given, [whole]))
    for ours, theirs in ((apart[name], together[name]) for name in ("loss", "trace")):
        assert (ours.value, ours.stderr) == pytest.approx((theirs.value, theirs.stderr), rel=1e-9)
        assert ours.samples == theirs.samples == 4


def test_rules_that_end_early_wait_for_a_label():
    given = [unlabeled(64), *(batch_of(64, seed=seed) for seed in range(4))]
    assert fisher_trace(gpt2(), given, rtol=0.9).details["sequences"] == 128
    assert fisher_trace(gpt2(), given, seconds=1e-9).details["sequences"] == 128


def test_skipped_batches_are_in_what_is_printed():
    args = types.SimpleNamespace(rtol=None)

    def line(*given):
        return [text for text in command._remarks(args, fisher_trace(gpt2(), given), None) if "skipped" in text]

    assert line(*batches()) == []
    assert line(*batches(), unlabeled()) == ["1 batch skipped: every label is -100"]
    assert line(unlabeled(), *batches(), unlabeled()) == ["2 batches skipped: every label is -100"]
