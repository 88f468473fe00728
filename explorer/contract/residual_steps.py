"""What a block does to a part's result before it adds it, done again by hand."""

from __future__ import annotations

import operator

import torch

from explorer.contract.model_under_test import ModelUnderTest
from explorer.discovery.details import Step


def added(s: ModelUnderTest, host: str, layer: int, made: torch.Tensor) -> torch.Tensor:
    """What the block adds where a part's weights made ``made`` [batch seq hidden_size]: through the norms and scales after them."""
    for step in s.details(host, layer).output_steps.steps:
        made = changed(s, layer, step, made)
    return made


def changed(s: ModelUnderTest, layer: int, step: Step, stream: torch.Tensor) -> torch.Tensor:
    """A stream normed, scaled or shifted as a step of the block does it."""
    with torch.no_grad():
        if step.kind == "norm":
            return s.module(layer, step.by)(stream)
        by = step.by if isinstance(step.by, float | int) else constant(s, layer, step.by)
        return stream * by if step.kind == "scale" else stream + by


def constant(s: ModelUnderTest, layer: int, path: str) -> torch.Tensor:
    """A parameter or buffer by its path from the block."""
    return operator.attrgetter(path)(s.module(layer, "")).detach()


def followed(s: ModelUnderTest, host: str, layer: int) -> bool:
    """Whether what is done to a part's result is norms and scales alone."""
    return s.details(host, layer).output_steps.complete
