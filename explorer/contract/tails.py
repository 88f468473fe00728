"""What a block does to a part's result before it adds it, done again by hand."""

from __future__ import annotations

import torch

from explorer.contract.subject import Subject


def added(s: Subject, host: str, layer: int, made: torch.Tensor, clean: torch.Tensor | None = None) -> torch.Tensor:
    """What the block adds where a part's weights made ``made`` [batch seq hidden_size]: through the norms after them, and scaled.

    The scale is one number for each channel, fitted to what the untouched model adds of ``clean``
    (``made`` itself where that is not given).
    """
    tail = s.traits(host, layer)["tail"]
    with torch.no_grad():
        for path in tail.modules:
            made = s.module(layer, path)(made)
            clean = None if clean is None else s.module(layer, path)(clean)
    if not tail.scaled:
        return made
    base = (made if clean is None else clean).double().flatten(0, -2)
    want = s.get(host, "mlp_output" if host == "mlp" else "attention_output", layer).double().flatten(0, -2)
    scale = (base * want).sum(0) / (base * base).sum(0)  # least squares
    return (made.double() * scale).to(made.dtype)


def followed(s: Subject, host: str, layer: int) -> bool:
    """Whether what is done to a part's result is norms and scaling alone; a shared expert's goes into the mixture as it is."""
    tail = s.traits(host, layer).get("tail")
    return tail is not None and tail.followed
