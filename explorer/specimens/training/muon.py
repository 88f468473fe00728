"""The optimizer Muon, which orthogonalizes the momentum before each step. It needs far fewer steps
than Adam here.

Source: Keller Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

import torch

#: Coefficients of the quintic Newton-Schulz iteration: singular values end between about 0.7 and
#: 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return roughly the nearest (semi-)orthogonal matrix of each of [..., rows, columns]."""
    a, b, c = QUINTIC
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for weights [..., rows, columns]; leading axes (experts) are stacks of matrices."""

    def __init__(
        self, parameters, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update every weight that has a gradient; ``closure`` is not called."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: torch.Tensor, group: dict) -> None:
        """Update one weight in place, with Nesterov momentum and decoupled weight decay."""
        state, momentum = self.state[weight], group["momentum"]
        if not state:
            state["average"] = torch.zeros_like(weight)
        assert weight.grad is not None
        average = state["average"].lerp_(weight.grad, 1 - momentum)
        direction = orthogonalize(weight.grad.lerp(average, momentum))
        scale = max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(direction, alpha=-group["lr"] * scale)
