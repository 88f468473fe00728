"""Rows of token ids of different length as one matrix, and masks of what is padding in it."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensor

from explorer.model.errors import PromptError


def pad(rows: list[list[int]], fill: int, side: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows of token ids as one matrix [batch seq], and its mask where they differ in length.

    fill: the id that stands at padding. side: "left" or "right", where the padding goes.
    """
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), fill, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = torch.tensor(row, dtype=torch.long), 1
    return ids, None if bool(mask.all()) else mask


def as_mask(given: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Return a mask [batch seq] of zeros and ones beside token ids; None for one without zeros.

    Raises PromptError where it has another shape, other numbers, or a row of zeros alone.
    """
    try:
        mask = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        mask = torch.empty(0)
    mask = mask.reshape(1, -1) if mask.dim() == 1 else mask
    if mask.shape != ids.shape:
        raise PromptError(
            f"The attention mask has the shape of the token ids, {list(ids.shape)}; this one "
            f"is {list(mask.shape)}."
        )
    if mask.device.type == "meta":
        return None
    if not ((mask == 0) | (mask == 1)).all() or not mask.any(-1).all():
        raise PromptError(
            "An attention mask is 1 at tokens and 0 at padding, with a token in each row."
        )
    return None if bool(mask.all()) else mask.long()


def is_padded(mask: Any, ids: torch.Tensor) -> bool:
    """Whether a mask is one of token ids [batch seq] with numbers in it and hides some of them."""
    return (
        isinstance(mask, torch.Tensor)
        and mask.shape == ids.shape[:2]
        and mask.device.type != "meta"
        and not isinstance(mask, FakeTensor)
        and not bool(mask.all())
    )
