"""A measure: how often the most probable token is the right one. `isoloss measure --measures top1` takes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isoloss.config import setting
from isoloss.lab.evaluation.measures.base import SeededMeasure


@dataclass(frozen=True, kw_only=True)
class Top1(SeededMeasure):
    """Accuracy of the most probable token at the predicted positions, with its standard error over sequences."""

    top1_sequences: int = setting(1024, minimum=2)
    """Sequences to measure on."""

    def run(self, model: Any, context: Any) -> Mapping[str, Any]:
        """Return the estimate, by its name."""
        import torch

        from isoloss.statistics.ratio import ratio_estimate

        right, predicted = [], []
        with torch.no_grad():
            for batch in context.inputs(self.top1_sequences, self.seed).batches:
                tensors = {name: value.to(model.device) for name, value in batch.items()}
                logits = model(input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"]).logits
                labels = tensors["labels"]
                if context.is_causal:  # position t predicts token t + 1
                    logits, labels = logits[:, :-1], labels[:, 1:]
                right.append((logits.argmax(-1) == labels).sum(1))  # a label of -100 is never right
                predicted.append((labels != -100).sum(1))
        estimate = ratio_estimate(torch.cat(right), torch.cat(predicted), unit="accuracy", method="top-1")
        return {"top1": estimate}
