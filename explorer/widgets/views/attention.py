"""Softmax attention as pictures: all heads small, one large, grouped heads marked."""

from __future__ import annotations

import numpy as np

from explorer.vocabulary import BY_HOST
from explorer.widgets.views.downsample import hide_future
from explorer.widgets.views.picture import Heatmap, Mosaic, Refusal, ScaleOptions, Tile
from explorer.widgets.views.selection import (
    Recorded,
    Selection,
    as_array,
    describe_mixers,
    has_attention,
    recurrence_of,
    token_axis,
    unavailable,
)

#: What the attention panel can show, and its title.
CHOICES = {"probabilities": "probabilities", "scores": "scores before the softmax"}

#: A pattern over more tokens than this has its scale clipped.
_LONG = 48


def pattern_name(selection: Selection) -> str:
    return f"attention_{selection.pattern}"


def refusal(rec: Recorded, selection: Selection) -> Refusal | None:
    """Why there is no pattern to show on the selected block, None where there is one."""
    if not has_attention(rec, selection.block):
        state = recurrence_of(rec, selection.block)
        implied = " Its implied attention is under State." if state else ""
        return Refusal(
            f"This block has no softmax pattern: {describe_mixers(rec, selection.block)}.{implied}"
        )
    name = pattern_name(selection)
    return None if (name, selection.block) in rec else unavailable(rec, name, selection.block)


def num_heads(rec: Recorded, selection: Selection) -> int:
    """The number of heads of the selected block's pattern."""
    return rec[pattern_name(selection), selection.block].shape[1]


def heads_per_group(rec: Recorded, layer: int) -> int:
    """How many query heads share one key/value head; 1 where each has its own."""
    if ("attention_keys", layer) not in rec or not has_attention(rec, layer):
        return 1
    queries = rec["attention_queries", layer].shape[1] if ("attention_queries", layer) in rec else 0
    return max(1, queries // rec["attention_keys", layer].shape[1])


def _pattern(rec: Recorded, selection: Selection, head: int) -> np.ndarray:
    """The pattern of one head ``[query key]``, as recorded."""
    return as_array(rec[pattern_name(selection), selection.block][0, head])


def pattern_scale(rec: Recorded, signed: bool) -> ScaleOptions:
    """The scale of a pattern: 0 to 1 or symmetric about zero; clipped on long prompts.

    Over hundreds of tokens each row's weight is spread thin, and only the first rows reach one.
    """
    clip = 99.5 if len(rec.tokens) > _LONG else None
    return (
        {"signed": True, "clip": clip}
        if signed
        else {"signed": False, "low": 0.0, "high": 1.0, "clip": clip}
    )


def all_heads(rec: Recorded, selection: Selection) -> Mosaic | Refusal:
    """Every head of the block as a tile; heads that share keys and values are in one row."""
    if (reason := refusal(rec, selection)) is not None:
        return reason
    group = heads_per_group(rec, selection.block)
    tiles = tuple(
        Tile(f"{head}", f"kv {head // group}" if group > 1 else "", _pattern(rec, selection, head))
        for head in range(num_heads(rec, selection))
    )
    return Mosaic(
        title=f"all {len(tiles)} heads, block {selection.block}",
        tiles=tiles,
        columns=mosaic_columns(len(tiles), group),
        **pattern_scale(rec, BY_HOST["self_attn"][pattern_name(selection)].signed),
        note=(
            f"Grouped queries: the {group} heads of a group share one key and one value head."
            if group > 1
            else ""
        ),
    )


def mosaic_columns(count: int, group: int) -> int:
    """Columns of the mosaic: whole groups side by side, near a square, at most 8 wide."""
    if count <= 4:
        return count
    wanted = min(8, max(4, int(np.ceil(np.sqrt(count)))))
    if group == 1:
        return wanted
    return min(count, max(group, wanted // group * group))


def one_head(rec: Recorded, selection: Selection) -> Heatmap | Refusal:
    """The pattern of the selected head: query tokens down, key tokens across."""
    if (reason := refusal(rec, selection)) is not None:
        return reason
    head = min(selection.head, num_heads(rec, selection) - 1)
    group = heads_per_group(rec, selection.block)
    shared = f", reads key/value head {head // group}" if group > 1 else ""
    values = hide_future(_pattern(rec, selection, head))
    return Heatmap(
        title=f"head {head} of block {selection.block}{shared}",
        x=token_axis(rec, "token read (key)"),
        y=token_axis(rec, "token reading (query)"),
        values=values,
        **pattern_scale(rec, BY_HOST["self_attn"][pattern_name(selection)].signed),
        note=_row_note(rec, selection, values),
    )


def _row_note(rec: Recorded, selection: Selection, values: np.ndarray) -> str:
    """What the rows of a pattern sum to, where that is not one."""
    if selection.pattern != "probabilities":
        return "Cells above the diagonal are masked and drawn empty."
    sums = np.nansum(values, axis=1)
    if np.allclose(sums, 1.0, atol=1e-2):
        return "Each row sums to one."
    return (
        f"Rows sum to {sums.min():.2f} … {sums.max():.2f}: the rest of the weight went to the "
        "attention sinks; rows are not renormalised."
    )


def most_read_keys(rec: Recorded, selection: Selection, count: int = 5) -> list[tuple[int, float]]:
    """The key positions the selected token attends to most, with the numbers, strongest first."""
    row = hide_future(_pattern(rec, selection, min(selection.head, num_heads(rec, selection) - 1)))[
        selection.token
    ]
    order = np.argsort(np.where(np.isfinite(row), -row, np.inf))[:count]
    return [(int(key), float(row[key])) for key in order if np.isfinite(row[key])]
