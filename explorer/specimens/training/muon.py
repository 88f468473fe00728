"""Muon: momentum, made orthogonal before each step. It needs far fewer steps than Adam here.

Source: Keller Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

import torch

#: Coefficients of the quintic iteration: singular values end between about 0.7 and 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Roughly the nearest (semi-)orthogonal matrix, of the shape [..., rows, columns] given."""
    a, b, c = QUINTIC
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For weights of two or more dimensions; leading ones (experts) are stacks of matrices."""

    def __init__(
        self, parameters, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(weight, group)

    def _step_one(self, weight: torch.Tensor, group: dict) -> None:
        state, keep = self.state[weight], group["momentum"]
        if not state:
            state["average"] = torch.zeros_like(weight)
        assert weight.grad is not None
        average = state["average"].lerp_(weight.grad, 1 - keep)
        direction = orthogonal(weight.grad.lerp(average, keep))
        scale = max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(direction, alpha=-group["lr"] * scale)
