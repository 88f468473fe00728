"""How long a prompt a model takes: the length it was made for, and whether more can be run."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from explorer.model.errors import PromptError
from explorer.model.interface import PromptedModel

#: Rows that a table of learned positions has beyond the positions it is for, at most.
_SPARE_ROWS = 2


def check_length(model: PromptedModel, length: int) -> None:
    """Raise PromptError for a prompt longer than a model's table of positions.

    Warns, once for each model, of one longer than what a model was made for that computes its
    positions: it runs.
    """
    config: Any = model.hf.config
    config = config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if most is None:
        return
    if length > most and _has_table(model.hf, most):
        raise PromptError(
            f"The prompt has {length} tokens and the model takes at most {most}; shorten it."
        )
    made_for = scaled_length(config, most)
    if length > made_for and not model.warned_of_length:
        model.warned_of_length = True
        warnings.warn(
            f"The prompt has {length} tokens and the model was made for {made_for}: it runs, and "
            "what it computes beyond them may be poor.",
            stacklevel=2,
        )


def scaled_length(config: Any, most: int) -> int:
    """Return the length a configuration is for, with the scaling of its rotary embedding."""
    rope: Any = getattr(config, "rope_parameters", None) or {}
    lengths = [most]
    inner: list[Any] = [one for one in rope.values() if isinstance(one, dict)]
    for one in [rope, *inner]:
        original = one.get("original_max_position_embeddings") or most
        lengths.append(int(original * (one.get("factor") or 1)))
    return max(lengths)


def _has_table(module: torch.nn.Module, most: int) -> bool:
    """Whether a model looks its positions up in a table of as many rows, instead of computing them.

    The table is an embedding beside that of the tokens, or a buffer (of sines, or of a mask).
    """
    model: Any = module
    tokens = model.get_input_embeddings()
    tables = (part for part in model.modules() if isinstance(part, torch.nn.Embedding))
    if any(0 <= part.num_embeddings - most <= _SPARE_ROWS for part in tables if part is not tokens):
        return True
    return any(most in buffer.shape for _, buffer in model.named_buffers() if buffer.dim() > 1)
