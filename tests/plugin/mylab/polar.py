"""An optimizer: Muon with exact orthogonal factors; AdamW for embeddings, norms and biases."""

from typing import Any

import torch

from isoloss.lab.training.optimizers import adamw


class Polar(torch.optim.Optimizer):
    """Matrices move by the nearest orthogonal matrix of their momentum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 0.05)
                left, _, right = torch.linalg.svd(momentum, full_matrices=False)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(left @ right, alpha=-0.2 * group["lr"] * max(matrix.shape) ** 0.5)


def polar(groups: list[dict[str, Any]], config: Any) -> list[torch.optim.Optimizer]:
    """Muon with exact orthogonal factors."""
    hidden = [group for group in groups if group["role"] == "hidden"]
    others = [group for group in groups if group["role"] != "hidden"]
    return [Polar(hidden, {"lr": config.learning_rate}), adamw(others, config)]
