"""What a block does to a sublayer's result before it adds it, computed again from the modules."""

from __future__ import annotations

import operator

import torch

from explorer.contract.model_under_test import ModelUnderTest
from explorer.discovery.details import Step


def addend_of(subject: ModelUnderTest, host: str, layer: int, made: torch.Tensor) -> torch.Tensor:
    """Apply the norms and scales behind a sublayer to what its weights made.

    made: [batch seq hidden_size].
    """
    for step in subject.details(host, layer).output_steps.steps:
        made = apply_step(subject, layer, step, made)
    return made


def apply_step(
    subject: ModelUnderTest, layer: int, step: Step, stream: torch.Tensor
) -> torch.Tensor:
    """Norm, scale or shift a stream as one step of a block does."""
    with torch.no_grad():
        if step.kind == "norm":
            return subject.module(layer, str(step.by))(stream)
        by = step.by if isinstance(step.by, float | int) else constant(subject, layer, step.by)
        return stream * by if step.kind == "scale" else stream + by


def constant(subject: ModelUnderTest, layer: int, path: str) -> torch.Tensor:
    """Return a parameter or buffer by its path from the block."""
    return operator.attrgetter(path)(subject.module(layer, "")).detach()


def tail_known(subject: ModelUnderTest, host: str, layer: int) -> bool:
    """Return whether only norms and scales are between a sublayer's result and its addend."""
    return subject.details(host, layer).output_steps.complete
