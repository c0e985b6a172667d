"""The objectives, masked and causal: the batch of a step as a pure function of seed and step, and its loss.

Shapes: n sentences, T tokens, k predicted tokens, d the model's width, V token ids.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Language, Sentences
from isoloss.lab.models.make import predicted_states
from isoloss.lab.training import training_set
from isoloss.run_config import ObjectiveConfig, TrainConfig
from isoloss.seeds import generator
from isoloss.text.masking import IGNORED, Batch, corrupt, objective_batch

# Logits held at a time. In float32 they take 16 MiB, below the 32 MiB from which glibc gives every buffer back to the
# system when it is freed: fetching it again, page by page, at every step takes longer than filling it.
_CHUNK = 1 << 22


class TrainingBatch(NamedTuple):
    """What a training step sees.

    The inputs are `input_ids`, `labels` and, where something is padded, `attention_mask`, each (n, T); with exact
    labels, `targets` (k, V): a row of probabilities for each of the k predicted tokens, sentence by sentence.
    """

    inputs: Batch
    num_tokens: int  # the masked ones counted and the padding not


def check_language(objective: ObjectiveConfig, language: Language) -> None:
    """Raise an `IsolossError` if `objective` asks for exact labels and `language` has none."""
    if objective.labels == "exact" and not language.is_exact:
        raise IsolossError(f"{type(language).__name__} has no exact conditionals: train on sampled labels")


def exact_targets(
    language: Language, sentences: Sentences, labels: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """Return (k, V) float64: the true conditionals of the predicted tokens, sentence by sentence.

    They are given all visible tokens or, if `causal`, those before. The labels (n, T) are -100 where nothing is
    predicted.
    """
    masked = labels != IGNORED
    tokens, lengths, _ = sentences
    if causal:
        # the labels of a start before the sentences are no tokens of theirs
        return language.log_next(tokens, lengths, without_special=True)[masked[:, -tokens.shape[1] :]].double().exp()
    # one masked token of a sentence is hidden by being the one asked for; the others would be computed for nothing
    if bool((masked.sum(dim=1) == 1).all()):
        positions = masked.int().argmax(dim=1, keepdim=True)
        return language.log_conditionals(tokens, lengths, positions=positions)[:, 0].double().exp()
    return language.log_conditionals(tokens, lengths, mask=masked)[masked].double().exp()


def training_batch(
    language: Language, config: TrainConfig, step: int, device: torch.device, rows: slice = slice(None)
) -> TrainingBatch:
    """Return the batch of training step `step`, from 1: the language's sentences, and what is predicted of them.

    Of its sentences, `rows` are wanted; `num_tokens` counts all.
    """
    if training_set.is_finite(config):
        drawn = training_set.examples(language, config, step)
        sentences = drawn.sentences
    else:
        sentences = language.batch(step, config.batch_size, seed=config.seed)
    if config.masked_copies:
        batch = training_set.masked_copy(drawn, language, config)
    else:
        masks = generator(config.seed, "masks", step)
        batch = objective_batch(sentences, language, config.objective, generator=masks)
        batch = corrupt(batch, language, config.objective, generator=masks)
    num_tokens = int(batch["attention_mask"].sum())
    if num_tokens == batch["attention_mask"].numel():
        # attention then adds no mask to its scores
        del batch["attention_mask"]
    # only now: the draws are of the whole batch, so that the processes' parts are those of one process
    batch = {name: tensor[rows] for name, tensor in batch.items()}
    if config.objective.labels == "exact":
        wanted = Sentences(sentences.tokens[rows], sentences.lengths[rows])
        causal = config.objective.kind == "causal"
        batch["targets"] = exact_targets(language, wanted, batch["labels"], causal=causal)
    return TrainingBatch({name: tensor.to(device) for name, tensor in batch.items()}, num_tokens)


def prediction_loss(model: PreTrainedModel, batch: Batch, *, causal: bool, precision: str = "float32") -> torch.Tensor:
    """Return the mean cross-entropy of the predicted tokens, in nats: a scalar (the paper, section 2.1).

    With `targets`, the mean cross-entropy to these probabilities, which is the expected loss of tokens drawn from them.
    The batch is as `training_batch` gives it. `bfloat16` runs the model under torch's autocast to bfloat16; the output
    layer and the softmax over the vocabulary, and in both cases the weights and their gradients, are of the weights'
    own dtype.
    """
    # nothing predicts a first token
    labels = batch["labels"][:, 1:] if causal else batch["labels"]
    output = model.get_output_embeddings()
    with torch.autocast(labels.device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        states = predicted_states(model, batch).to(output.weight.dtype)
    targets = batch["targets"].to(states.dtype) if "targets" in batch else labels[labels != IGNORED]
    return linear_cross_entropy(states, output.weight, output.bias, targets)


# --- cross-entropy chunk by chunk: the logits of a large vocabulary never exist all at once


def linear_cross_entropy(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Return the mean of `-log softmax(states @ weight.T + bias)[label]` over the rows, in nats: a scalar.

    Labels can be probabilities q instead: then it is the mean of `-sum_c q_c log softmax(...)_c`.

    Value and gradient agree with `torch.nn.functional.cross_entropy` on the logits. The gradient is computed with the
    value, so that no logits are kept: with p the softmax of a row and e the unit vector of its label, the gradient by
    the row's logits is (p - e) / k, or (sum(q) p - q) / k.

    The states are (k, d), at least one row, and the weight (V, d). Labels are (k,) int64, ids from 0 to V - 1; or (k,
    C) probabilities of the ids 0 to C - 1, C at most V. There is no second derivative.
    """
    loss: torch.Tensor = _LinearCrossEntropy.apply(states, weight, bias, labels)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
    ) -> torch.Tensor:
        k, num_ids, is_ids = len(states), len(weight), labels.ndim == 1
        size = max(1, min(k, _CHUNK // num_ids))
        # one buffer for all chunks, in which the logits of each become their gradient
        buffer = states.new_empty(size, num_ids)
        losses = states.new_empty(k)
        d_states, d_weight = torch.empty_like(states), torch.zeros_like(weight)
        d_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, k, size):
            rows = slice(start, min(start + size, k))
            logits = torch.mm(states[rows], weight.T, out=buffer[: rows.stop - start])
            if bias is not None:
                logits += bias
            # then exp cannot overflow; neither loss nor gradient changes
            logits -= logits.amax(dim=1, keepdim=True)
            losses[rows] = _ids(logits, labels[rows, None]) if is_ids else _mixed(logits, labels[rows])
            logits /= k
            torch.mm(logits, weight, out=d_states[rows])
            d_weight.addmm_(logits.T, states[rows])
            if d_bias is not None:
                d_bias += logits.sum(dim=0)
        ctx.save_for_backward(d_states, d_weight, d_bias)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # with create_graph, which would take the saved gradients for constants
        if torch.is_grad_enabled():
            raise IsolossError("the loss of training has no second derivative: take that of the model's logits")
        d_states, d_weight, d_bias = ctx.saved_tensors
        return d_loss * d_states, d_loss * d_weight, None if d_bias is None else d_loss * d_bias, None


def _ids(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return the losses (r,) of labels (r, 1), and put their gradients in the place of the logits (r, V)."""
    # before the logits are overwritten
    at_label = logits.gather(1, label)
    total = logits.exp_().sum(dim=1, keepdim=True)
    logits.div_(total).scatter_add_(1, label, torch.full_like(at_label, -1))
    return (total.log() - at_label)[:, 0]


def _mixed(logits: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the losses (r,) of probabilities (r, C), and put their gradients in the place of the logits (r, V)."""
    mass = q.sum(dim=1, keepdim=True)
    at_labels = (q * logits[:, : q.shape[1]]).sum(dim=1)
    total = logits.exp_().sum(dim=1, keepdim=True)
    # sum(q) p, as probabilities in float32 need not add up to exactly 1
    logits.div_(total / mass)
    logits[:, : q.shape[1]] -= q
    return (total.log() * mass)[:, 0] - at_labels
