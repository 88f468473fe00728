"""One live tensor: its facts, and a picture of it whatever its layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from explorer.vocabulary import Value, lookup
from explorer.widgets.views import state as views_state
from explorer.widgets.views.picture import Axis, Heatmap, Refusal
from explorer.widgets.views.selection import (
    Recorded,
    Replayable,
    Selection,
    as_array,
    numbered_axis,
    token_axis,
    unavailable,
)


@dataclass(frozen=True)
class TensorSummary:
    """Shape, layout, dtype and range of a tensor."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    layout: str
    dtype: str
    minimum: float
    mean: float
    maximum: float
    finite: bool


def value_of(key: str, mixers: Sequence[str]) -> Value:
    """The vocabulary's entry for a value name, on the first of a block's mixers that has it."""
    return lookup(key, mixers)[0]


def summarise(tensor: torch.Tensor, value: Value) -> TensorSummary:
    """Shape, dtype, minimum, mean and maximum; numbers that a mask set to the lowest one are left
    out.
    """
    hidden = masked(tensor)
    known = tensor.detach()[~hidden].float()
    ends = (
        (known.min(), known.mean(), known.max())
        if known.numel()
        else (torch.tensor(float("nan")),) * 3
    )
    return TensorSummary(
        tuple(tensor.shape),
        value.axes,
        value.layout,
        str(tensor.dtype).removeprefix("torch."),
        *(float(end) for end in ends),
        finite=not bool(hidden.any()),
    )


def masked(tensor: torch.Tensor) -> torch.Tensor:
    """Where a tensor has no number of its own: not finite, or near the lowest number of its dtype.

    Families hide a score by minus infinity, by that lowest number, or by adding it to the score.
    """
    numbers = tensor.detach()
    if not numbers.is_floating_point():
        return torch.zeros_like(numbers, dtype=torch.bool)
    return ~torch.isfinite(numbers) | (numbers <= torch.finfo(numbers.dtype).min / 2)


def value_picture(
    rec: Replayable, selection: Selection, key: str | None = None
) -> Heatmap | Refusal:
    """A picture of the selected value on the selected block, along two of its axes.

    A layout with three axes shows the selected head, one with a state the selected head
    after the run; a vector per token shows tokens down and channels across. ``state``
    is replayed: it is shown after the selected token.
    """
    key = key or selection.part
    value = value_of(key, rec.mixers[selection.block])
    if value.name == "state":
        return views_state.state_matrix(rec, selection)
    tensor = value_to_show(rec, selection, key)
    if isinstance(tensor, Refusal):
        return tensor
    matrix, axes, of = _matrix(tensor, value, selection)
    values = as_array(matrix).astype(np.float32)
    values[as_array(masked(matrix))] = np.nan
    signed = value.signed and bool(np.nanmin(values, initial=0.0) < 0)
    return Heatmap(
        title=f"{value.name}{of}",
        values=values,
        signed=signed,
        x=_axis(rec, axes[1], values.shape[1]),
        y=_axis(rec, axes[0], values.shape[0]),
    )


def value_to_show(rec: Replayable, selection: Selection, key: str) -> torch.Tensor | Refusal:
    """A value of the selected block in its layout, or why there is none to show.

    ``state`` is that of one head, or of all channels.
    """
    value = value_of(key, rec.mixers[selection.block])
    if value.name == "state":
        if (reason := views_state.refusal(rec, selection.block)) is not None:
            return reason
        replay = rec.replay(selection.block)
        return replay.state_at(
            selection.token,
            [views_state.selected_head(rec, selection)]
            if views_state.by_head(replay.host)
            else None,
        )
    layer = None if value.host == "model" else selection.block
    if (key, layer) not in rec:
        return unavailable(rec, key, layer)
    tensor = rec[key, layer]
    if tensor is None:
        return Refusal(f"{value.name} is None here: {value.meaning}.")
    if not isinstance(tensor, torch.Tensor):
        return Refusal(f"{value.name} is {tensor}: {value.meaning}.")
    return tensor


def _matrix(
    tensor: torch.Tensor, value: Value, selection: Selection
) -> tuple[torch.Tensor, tuple[str, str], str]:
    """Two axes of ``tensor``, their names, and words for the index taken along the others."""
    axes, of = list(value.axes), []
    if len(axes) != tensor.dim():  # a layout with one axis more on some families
        axes = axes + [f"axis {n}" for n in range(len(axes), tensor.dim())]
    if axes and axes[0] == "batch":
        tensor, axes = tensor[0], axes[1:]
    while tensor.dim() > 2:
        axis = _axis_to_fix(axes)
        index = _index(axes[axis], tensor.shape[axis], selection)
        of.append(f"{_singular(axes[axis])} {index}")
        tensor = tensor.select(axis, index)
        axes.pop(axis)
    while tensor.dim() < 2:
        tensor, axes = tensor.unsqueeze(0), ["", *axes]
    return tensor, (axes[0], axes[1]), f", {', '.join(of)}" if of else ""


def _axis_to_fix(axes: list[str]) -> int:
    """The axis to take one index of: the heads first, then slots, then the tokens."""
    for wanted in ("num_heads", "num_kv_heads", "heads", "top_k", "seq"):
        if wanted in axes:
            return axes.index(wanted)
    return 0


def _index(axis: str, size: int, selection: Selection) -> int:
    if axis in ("num_heads", "heads", "num_kv_heads"):
        return min(selection.head, size - 1)
    return min(selection.token, size - 1) if axis == "seq" else 0


def _singular(axis: str) -> str:
    return {
        "num_heads": "head",
        "heads": "head",
        "num_kv_heads": "key/value head",
        "top_k": "slot",
        "seq": "token",
    }.get(axis, axis)


def _axis(rec: Recorded, name: str, size: int) -> Axis:
    if name in ("seq", "query", "key") and size == len(rec.tokens):
        return token_axis(rec, {"query": "token reading", "key": "token read"}.get(name, "token"))
    return numbered_axis(name.replace("_", " "), size)
