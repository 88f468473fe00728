"""The block diagram of a loaded model: the site's own element, from the facts of this very model."""

from __future__ import annotations

from typing import Any

import torch

from explorer import facts
from explorer.widgets.diagram import element


def diagram(model: Any) -> dict[str, Any]:
    """The element's HTML for the page, with a key that tells whether it is another one than before."""
    return {"key": model.label, "html": element([record_of(model)], card=False)}


def record_of(model: Any) -> dict[str, Any]:
    """The part of a facts record that a diagram needs, at the sizes of the loaded model."""
    shapes = _shapes(model)
    return {
        "family": model.family, "checkpoint": model.label, "sizes": model.sizes,
        "blocks": [facts._block(model, block) for block in model.anatomy.blocks],
        "values": [facts._value(model, row, shapes, False) for row in model.support() if row.available],
    }


def _shapes(model: Any) -> dict[tuple[str, str], torch.Tensor]:
    """A tensor of each host's value, from two tokens through the first block of each shape."""
    layers = sorted({block.layers[0] for block in model.anatomy.blocks})
    recording = model.record([0, 1], layers=layers)
    found: dict[tuple[str, str], torch.Tensor] = {}
    for row in model.support():
        for layer in (None,) if row.host == "model" else [layer for layer in layers if layer in row.layers]:
            if (row.value.key, layer) in recording:
                found.setdefault((row.host, row.name), recording[row.value.key, layer])
    return found
