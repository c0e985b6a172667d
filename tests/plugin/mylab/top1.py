"""A measure: how often the right token is among the most probable ones. `isoloss measure --measures top1` takes it."""

from typing import Annotated, Any

from isoloss.config import setting


def top1(
    model: Any,
    batches: Any,
    *,
    top1_guesses: Annotated[int, setting(minimum=1), "How many of the most probable tokens count."] = 1,
    causal: bool = False,
) -> Any:
    """Accuracy of the most probable token at the predicted positions, its error over independent sequences."""
    import torch

    from isoloss.statistics.ratio import ratio_estimate
    from isoloss.text.clusters import SequenceClusters

    clusters = SequenceClusters(model.config)
    numbers, right, predicted = [], [], []
    with torch.no_grad():
        for batch in batches:
            numbers.append(clusters.add(batch))
            inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
            logits, labels = model(**inputs).logits, batch["labels"].to(model.device)
            if causal:  # position t predicts token t + 1
                logits, labels = logits[:, :-1], labels[:, 1:]
            guesses = logits.topk(top1_guesses).indices
            right.append((guesses == labels[..., None]).any(-1).sum(1))  # a label of -100 is never right
            predicted.append((labels != -100).sum(1))
    # copies of a sequence, and the sequences of a document, count as one
    of = torch.cat(numbers)
    sums = [torch.zeros(len(clusters)).index_add_(0, of, torch.cat(x).cpu().float()) for x in (right, predicted)]
    return ratio_estimate(*sums, unit="accuracy", method="top-1")
