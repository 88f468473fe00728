"""Adding a vector to the residual stream at chosen tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from explorer.model.recording import abbreviated_repr, as_int


def steered(
    stream: torch.Tensor,
    vector: torch.Tensor,
    positions: Any,
    batch_index: int | None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the stream [batch seq hidden_size] with ``vector`` [hidden_size] added.

    positions: a token, several, a slice, or None for all, counted in each row from its first token
    that ``mask`` [batch seq] does not hide; batch_index: a row, None for all. Raises ValueError for
    what is no such number and for a token or a row there is not.
    """
    batch, seq = stream.shape[:2]
    rows = range(batch) if batch_index is None else _indices("row", batch_index, batch)
    chosen = torch.zeros((batch, seq), dtype=torch.bool, device=stream.device)
    for row in rows:
        tokens = torch.arange(seq) if mask is None else mask[row].nonzero().flatten().cpu()
        asked = slice(None) if positions is None else _indices("position", positions, len(tokens))
        chosen[row, tokens[asked]] = True
    added = torch.zeros_like(stream)
    added[chosen] = vector
    return stream + added


def _indices(what: str, given: Any, length: int) -> Any:
    """Return the rows or positions asked for; raise ValueError for one there is not."""
    if isinstance(given, slice):
        return given if what == "position" else range(length)[given]  # pyright: ignore[reportUnknownVariableType]  a slice has no types
    several = as_int(given) is None and isinstance(given, Iterable)
    asked: list[Any] = list(given) if several else [given]  # pyright: ignore[reportUnknownArgumentType]
    numbers: list[int] = []
    for one in asked:
        number = as_int(one)
        if number is None or not -length <= number < length:
            raise ValueError(
                f"There is no {what} {abbreviated_repr(one)}: this call has {what}s 0 to "
                f"{length - 1}."
            )
        numbers.append(number)
    return numbers
