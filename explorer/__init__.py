"""Bestiary's library: language models with standard names and values, found by asking the built
model.

from explorer import load

model = load("specimen:qwen3_next")
with model.trace("In the beginning"):
    logits = model.layers[1].mlp.router_logits.save()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from explorer.checkpoints.load import load
    from explorer.model.edits import Edit, ablate_expert, zero_head

__version__ = "0.1.0"

#: Public names and the module each comes from; imported on first use, so that
#: the vocabulary can be read without torch.
_PUBLIC = {
    "load": "explorer.checkpoints.load",
    "Edit": "explorer.model.edits",
    "ablate_expert": "explorer.model.edits",
    "zero_head": "explorer.model.edits",
}

__all__ = ["Edit", "__version__", "ablate_expert", "load", "zero_head"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
