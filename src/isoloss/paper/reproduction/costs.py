"""What training and measuring a model of the paper's sizes takes: time, memory and disk space, before it is tried.

These are rough: half or twice the time would be no surprise. Training takes 6 floating-point operations per parameter
and token (Kaplan et al., 2020, section 2.1) and 12 L d T per token for attention, at an assumed fraction of a GPU's
peak. Activations take 34 d + 5 h T bytes per token and layer in 16 bits (Korthikanti et al., 2022, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isoloss.lab.models.architectures import LSTMShape
from isoloss.registry import MODELS
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.studies.plan import Expected, Resources

PEAK = 989e12  # floating-point operations per second of one NVIDIA H100 in bfloat16, dense
UTILIZATION, LSTM_UTILIZATION = 0.4, 0.1  # of a model at least WIDE; narrower ones in proportion to their width
WIDE = 1024
BYTES = 16  # of a parameter's value, gradient and AdamW's two moments, in float32
MICRO_BATCH_BYTES = 20 * 2**30  # for the activations of a micro-batch
STEP_SECONDS = 0.01  # of a step at least: drawing its sentences, starting its kernels
EXAMPLES = {"qnli": 104_743 + 5_463, "sst2": 67_349 + 872, "rte": 2_490 + 277}  # of GLUE, to train on and to test on
OVERHEAD_SECONDS = 60.0  # of a measure: loading, exact conditionals on the CPU


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What costs depend on besides the model."""

    vocab_size: int  # ids that the model knows
    length: int  # the most tokens in a sentence
    predicted: float = 1.0  # predicted tokens in a sentence
    truth: float = 0.0  # floating-point operations of one exact conditional; 0: a small part of the rest


def shape(model: ModelConfig) -> Any:
    """Return the shape of a model, as its architecture has it."""
    return MODELS.load(model.architecture).shape(model)


@dataclass(frozen=True)
class Costs:
    """The costs of a model.

    Example:
        >>> from isoloss.paper.reproduction.costs import Costs, Tokens
        >>> from isoloss.run_config import ModelConfig
        >>> Costs(ModelConfig(size="d1024"), Tokens(vocab_size=30_522, length=128)).parameters  # with the embedding
        234011450
    """

    model: ModelConfig
    tokens: Tokens
    needs: Resources = field(default_factory=Resources)

    @property
    def parameters(self) -> int:
        """The number of parameters, the embedding included."""
        count = MODELS.load(self.model.architecture).num_parameters
        return int(count(shape(self.model), self.tokens.vocab_size, self.tokens.length))

    @property
    def _is_lstm(self) -> bool:
        return isinstance(shape(self.model), LSTMShape)

    @property
    def _width(self) -> int:
        of = shape(self.model)
        return int(of.hidden * of.directions if self._is_lstm else of.d_model)

    @property
    def _forward_flops(self) -> float:
        """The operations of one sentence: all tokens through the layers, the predicted ones through the decoder."""
        tokens, width = self.tokens, self._width
        # the embeddings of tokens and positions are looked up, not multiplied by
        layers = self.parameters - width * (tokens.vocab_size + tokens.length)
        # queries by keys, then weights by values: 2 d T each for a token
        attention = 0 if self._is_lstm else 4 * shape(self.model).num_layers * width * tokens.length
        return tokens.length * (2 * layers + attention) + tokens.predicted * 2 * width * tokens.vocab_size

    @property
    def _flops_per_second(self) -> float:
        utilization = LSTM_UTILIZATION if self._is_lstm else UTILIZATION
        return PEAK * utilization * min(1.0, self._width / WIDE) * max(1.0, self.needs.all_gpus)

    @property
    def _activation_bytes(self) -> float:
        """The bytes of one sentence's activations, and of the logits of its predicted tokens in float32."""
        of, tokens = shape(self.model), self.tokens
        heads = 0 if self._is_lstm else of.num_heads
        layers: int = of.num_layers * (34 * self._width + 5 * heads * tokens.length)
        # a logit and its gradient
        return tokens.length * layers + tokens.predicted * 8 * tokens.vocab_size

    def micro_batch_size(self, batch_size: int) -> int:
        """Return how many sentences a process computes on at once: the most, by halving, that keep to the memory."""
        size = batch_size // self.needs.processes
        while size > 1 and size * self._activation_bytes > MICRO_BATCH_BYTES:
            size //= 2
        return size

    def training(self, config: TrainConfig) -> Expected:
        """Return what a run of the model takes."""
        # each of SAM's two passes takes half of the batch
        passes = 1.2 if config.algorithm.kind == "adversarial" else 1.0
        # a backward pass is twice a forward pass: gradients by inputs and by weights
        flops = 3 * self._forward_flops * config.batch_size * config.steps * passes
        activations = self.micro_batch_size(config.batch_size) * self._activation_bytes
        return Expected(
            seconds=max(flops / self._flops_per_second, config.steps * STEP_SECONDS),
            memory=round(4 * self.parameters + 4 * 2**30),
            gpu_memory=round(BYTES * self.parameters + activations),
            # the last checkpoint has AdamW's two moments as well
            disk=4 * self.parameters * (len({*config.checkpoints, config.steps}) + 2),
        )

    def measuring(self, measures: Sequence[str], settings: Mapping[str, Any], *, checkpoints: int) -> Expected:
        """Return what measuring some checkpoints of one run takes."""
        examples = {name: num_examples(name, settings) for name in measures}
        forward = settings["loss_sentences"] + sum(examples.values())
        # for the paper's trace one pass for each of 50 sampled labels (appendix B.1) of each sequence; 5 seeds of 10
        # epochs of fine-tuning
        backward = settings["num_sequences"] * (51 if settings.get("trace_method") == "paper" else 2)
        backward += sum(50 * count for name, count in examples.items() if name.startswith("finetune-"))
        flops = self._forward_flops * (forward + 3 * backward)
        seconds = flops / self._flops_per_second + OVERHEAD_SECONDS * len(measures)
        # the conditionals are of the sentences alone, so one evaluation computes them for all checkpoints
        conditionals = settings["loss_sentences"] if "loss" in measures else 0
        return Expected(
            seconds=checkpoints * seconds + conditionals * self.tokens.truth / (PEAK * UTILIZATION),
            memory=round(4 * self.parameters + 8 * 2**30),
            gpu_memory=round(8 * self.parameters + MICRO_BATCH_BYTES),
            disk=checkpoints * len(measures) * 2**17,
        )


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
