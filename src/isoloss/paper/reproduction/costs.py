"""What training and measuring a model of the paper's sizes takes: time, memory and disk space, before it is tried.

These are rough: half or twice the time would be no surprise. Training takes 6 floating-point operations per parameter
and token (Kaplan et al., 2020, section 2.1) and 12 L d T per token for attention, at an assumed fraction of a GPU's
peak. Activations take 34 d + 5 h T bytes per token and layer in 16 bits (Korthikanti et al., 2022, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isoloss.lab.models.architectures import LSTMShape
from isoloss.registry import MODELS
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.studies.plan import Expected, Resources

PEAK = 989e12  # floating-point operations per second of one NVIDIA H100 in bfloat16, dense
UTILIZATION = 0.4  # of a transformer at least WIDE; narrower ones in proportion to their width
WIDE = 1024
LSTM_UTILIZATION = 0.1  # of one that is at least WIDE
BYTES = 16  # of a parameter's value, gradient and AdamW's two moments, in float32
MICRO_BATCH_BYTES = 20 * 2**30  # for the activations of a micro-batch
STEP_SECONDS = 0.01  # of a step at least: drawing its sentences, starting its kernels
EXAMPLES = {"qnli": 104_743 + 5_463, "sst2": 67_349 + 872, "rte": 2_490 + 277}  # of GLUE, to train on and to test on
OVERHEAD_SECONDS = 60.0  # of a measure: loading, exact conditionals on the CPU


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What costs depend on besides the model.

    Attributes:
        vocab_size: Ids that the model knows.
        length: The most tokens in a sentence.
        predicted: Predicted tokens in a sentence.
        truth: Floating-point operations of one exact conditional; 0: a small part of the rest.
    """

    vocab_size: int
    length: int
    predicted: float = 1.0
    truth: float = 0.0


def num_parameters(model: ModelConfig, tokens: Tokens) -> int:
    """Return the number of parameters, the embedding included.

    Example:
        >>> from isoloss.paper.reproduction.costs import Tokens, num_parameters
        >>> from isoloss.run_config import ModelConfig
        >>> num_parameters(ModelConfig(size="d1024"), Tokens(vocab_size=30_522, length=128))
        234011450
    """
    architecture = MODELS.load(model.architecture)
    count: int = architecture.num_parameters(architecture.shape(model), tokens.vocab_size, tokens.length)
    return count


def num_examples(measure: str, settings: Mapping[str, Any]) -> int:
    """Return how many examples the measure of a task reads; 0 of another measure.

    Example:
        >>> from isoloss.paper.reproduction.costs import num_examples
        >>> num_examples("finetune-rte", {"num_train": "all", "num_test": "all"})
        2767
    """
    kind, _, task = measure.partition("-")
    if kind not in ("probe", "projected", "finetune"):
        return 0
    wanted = settings["num_train"] + settings["num_test"] if settings["num_train"] != "all" else math.inf
    return int(min(EXAMPLES.get(task, math.inf), wanted))


def _width(shape: Any) -> int:
    return int(shape.hidden * shape.directions if isinstance(shape, LSTMShape) else shape.d_model)


def _forward_flops(model: ModelConfig, tokens: Tokens) -> float:
    """Return the operations of one sentence: all tokens through the layers, the predicted ones through the decoder."""
    shape = MODELS.load(model.architecture).shape(model)
    width = _width(shape)
    # the embeddings of tokens and positions are looked up, not multiplied by
    layers = num_parameters(model, tokens) - width * (tokens.vocab_size + tokens.length)
    # queries by keys, then weights by values: 2 d T each for a token
    attention = 0 if isinstance(shape, LSTMShape) else 4 * shape.num_layers * width * tokens.length
    return tokens.length * (2 * layers + attention) + tokens.predicted * 2 * width * tokens.vocab_size


def flops_per_second(model: ModelConfig, needs: Resources) -> float:
    """Return the operations per second that are assumed."""
    shape = MODELS.load(model.architecture).shape(model)
    utilization = LSTM_UTILIZATION if isinstance(shape, LSTMShape) else UTILIZATION
    return PEAK * utilization * min(1.0, _width(shape) / WIDE) * max(1.0, needs.all_gpus)


def micro_batch_size(model: ModelConfig, tokens: Tokens, batch_size: int, processes: int) -> int:
    """Return how many sentences a process computes on at once: the most, by halving, that keep to the memory."""
    size = batch_size // processes
    while size > 1 and size * _activation_bytes(model, tokens) > MICRO_BATCH_BYTES:
        size //= 2
    return size


def _activation_bytes(model: ModelConfig, tokens: Tokens) -> float:
    """Return the bytes of one sentence's activations, and of the logits of its predicted tokens in float32."""
    shape = MODELS.load(model.architecture).shape(model)
    width = _width(shape)
    heads = 0 if isinstance(shape, LSTMShape) else shape.num_heads
    layers: int = shape.num_layers * (34 * width + 5 * heads * tokens.length)
    # a logit and its gradient
    return tokens.length * layers + tokens.predicted * 8 * tokens.vocab_size


def training(config: TrainConfig, tokens: Tokens, needs: Resources, *, kept: int) -> Expected:
    """Return what training takes.

    Args:
        config: The run.
        tokens: Its language.
        needs: Its resources.
        kept: How many checkpoints it keeps.
    """
    model, parameters = config.model, num_parameters(config.model, tokens)
    # each of SAM's two passes takes half of the batch
    passes = 1.2 if config.algorithm.kind == "adversarial" else 1.0
    # a backward pass is twice a forward pass: gradients by inputs and by weights
    flops = 3 * _forward_flops(model, tokens) * config.batch_size * config.steps * passes
    micro = micro_batch_size(model, tokens, config.batch_size, needs.processes)
    return Expected(
        seconds=max(flops / flops_per_second(model, needs), config.steps * STEP_SECONDS),
        memory=round(4 * parameters + 4 * 2**30),
        gpu_memory=round(BYTES * parameters + micro * _activation_bytes(model, tokens)),
        # the last checkpoint has AdamW's two moments as well
        disk=4 * parameters * (kept + 2),
    )


def measuring(
    model: ModelConfig,
    tokens: Tokens,
    needs: Resources,
    *,
    checkpoints: int,
    conditionals: int,
    sentences: float,
    backward: float,
    measures: int,
) -> Expected:
    """Return what measuring some checkpoints of one run takes.

    Args:
        model: The model.
        tokens: Its language.
        needs: Its resources.
        checkpoints: How many there are.
        conditionals: Exact conditionals, which are computed once for all of them.
        sentences: Sentences that go through each model forward.
        backward: Sentences that go through it backward.
        measures: Number of measures.
    """
    flops = _forward_flops(model, tokens) * (sentences + 3 * backward)
    parameters = num_parameters(model, tokens)
    seconds = flops / flops_per_second(model, needs) + OVERHEAD_SECONDS * measures
    return Expected(
        # the conditionals are of the sentences alone, so one evaluation computes them for all checkpoints
        seconds=checkpoints * seconds + conditionals * tokens.truth / (PEAK * UTILIZATION),
        memory=round(4 * parameters + 8 * 2**30),
        gpu_memory=round(8 * parameters + MICRO_BATCH_BYTES),
        disk=checkpoints * measures * 2**17,
    )
