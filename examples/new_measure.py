"""How do I add a measure of my own, with an error, to every command?

This one is the accuracy of the most probable token. With an entry point in a package, `isoloss eval` has it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from isoloss import MEASURES, evaluate, pretrain
from isoloss.config import setting
from isoloss.lab.evaluation.measures.base import SeededMeasure
from isoloss.lab.languages.config import LAPTOP_PCFG
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.statistics.ratio import ratio_estimate


@dataclass(frozen=True, kw_only=True)
class Top1(SeededMeasure):
    """Accuracy of the most probable token at the predicted positions."""

    top1_sequences: int = setting(512, minimum=2)
    """Sequences to measure on."""

    def run(self, model: Any, context: Any) -> Mapping[str, Any]:
        right, predicted = [], []
        for batch in context.inputs(self.top1_sequences, self.seed).batches:
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            right.append((logits.argmax(-1) == batch["labels"]).sum(1))  # a label of -100 is never right
            predicted.append((batch["labels"] != -100).sum(1))
        # a ratio of sums that keeps the influence of each sequence, so that differences between models are paired
        return {"top1": ratio_estimate(torch.cat(right), torch.cat(predicted), unit="accuracy", method="top-1")}


MEASURES.register("top1", Top1)

config = TrainConfig(
    language=LAPTOP_PCFG, model=ModelConfig(size="d16"), steps=200, batch_size=32, checkpoints=(0,),
    device="cpu", threads=1,
)  # fmt: skip
pretrain("run", config)
print(evaluate("run", "top1"))
