"""Softmax attention as pictures: all heads small, one large, grouped heads marked."""

from __future__ import annotations

import numpy as np

from explorer.vocabulary import BY_HOST
from explorer.widgets.views.downsample import causal
from explorer.widgets.views.picture import Heatmap, Mosaic, Refusal, Tile
from explorer.widgets.views.selection import (
    Recorded,
    Selection,
    attends,
    missing,
    mixer_words,
    plain,
    recurrence_of,
    token_axis,
)

#: What the attention panel can show: the vocabulary's name and the words for it.
CHOICES = {"probabilities": "probabilities", "scores": "scores before the softmax"}

#: Tokens from which a pattern's scale is cut off above.
_LONG = 48


def value_name(chosen: Selection) -> str:
    return f"attention_{chosen.pattern}"


def refusal(rec: Recorded, chosen: Selection) -> Refusal | None:
    """Why there is no pattern to show on the chosen block, None where there is one."""
    if not attends(rec, chosen.block):
        state = recurrence_of(rec, chosen.block)
        implied = " Its implied attention is under State." if state else ""
        return Refusal(
            f"This block has no softmax pattern: {mixer_words(rec, chosen.block)}.{implied}"
        )
    name = value_name(chosen)
    return None if (name, chosen.block) in rec else missing(rec, name, chosen.block)


def heads(rec: Recorded, chosen: Selection) -> int:
    """How many heads the pattern of the chosen block has."""
    return rec[value_name(chosen), chosen.block].shape[1]


def heads_per_group(rec: Recorded, layer: int) -> int:
    """How many query heads share one key/value head; 1 where each has its own."""
    if ("attention_keys", layer) not in rec or not attends(rec, layer):
        return 1
    queries = rec["attention_queries", layer].shape[1] if ("attention_queries", layer) in rec else 0
    return max(1, queries // rec["attention_keys", layer].shape[1])


def _pattern(rec: Recorded, chosen: Selection, head: int) -> np.ndarray:
    """The pattern of one head ``[query key]``, as recorded."""
    return plain(rec[value_name(chosen), chosen.block][0, head])


def bounds(rec: Recorded, signed: bool) -> dict[str, object]:
    """The scale of a pattern: 0 to 1 or symmetric; on long prompts it ends where nearly all cells do.

    Over hundreds of tokens a row's weight is spread thin, and only the first rows reach one.
    """
    clip = 99.5 if len(rec.tokens) > _LONG else None
    return (
        {"signed": True, "clip": clip}
        if signed
        else {"signed": False, "low": 0.0, "high": 1.0, "clip": clip}
    )


def all_heads(rec: Recorded, chosen: Selection) -> Mosaic | Refusal:
    """Every head of the block as a tile; heads that share keys and values stand in one row."""
    if (reason := refusal(rec, chosen)) is not None:
        return reason
    group = heads_per_group(rec, chosen.block)
    tiles = tuple(
        Tile(f"{head}", f"kv {head // group}" if group > 1 else "", _pattern(rec, chosen, head))
        for head in range(heads(rec, chosen))
    )
    return Mosaic(
        title=f"all {len(tiles)} heads, block {chosen.block}",
        tiles=tiles,
        columns=mosaic_columns(len(tiles), group),
        **bounds(rec, BY_HOST["self_attn"][value_name(chosen)].signed),
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


def one_head(rec: Recorded, chosen: Selection) -> Heatmap | Refusal:
    """The pattern of the chosen head: query tokens down, key tokens across."""
    if (reason := refusal(rec, chosen)) is not None:
        return reason
    head = min(chosen.head, heads(rec, chosen) - 1)
    group = heads_per_group(rec, chosen.block)
    shared = f", reads key/value head {head // group}" if group > 1 else ""
    values = causal(_pattern(rec, chosen, head))
    return Heatmap(
        title=f"head {head} of block {chosen.block}{shared}",
        x=token_axis(rec, "token read (key)"),
        y=token_axis(rec, "token reading (query)"),
        values=values,
        **bounds(rec, BY_HOST["self_attn"][value_name(chosen)].signed),
        note=row_sum_note(rec, chosen, values),
    )


def row_sum_note(rec: Recorded, chosen: Selection, values: np.ndarray) -> str:
    """What the rows of a pattern sum to, where that is not one."""
    if chosen.pattern != "probabilities":
        return "Cells above the diagonal are masked and drawn empty."
    sums = np.nansum(values, axis=1)
    if np.allclose(sums, 1.0, atol=1e-2):
        return "Each row sums to one."
    return f"Rows sum to {sums.min():.2f} … {sums.max():.2f}: the rest went to a sink and is not shown as renormalised."


def strongest(rec: Recorded, chosen: Selection, count: int = 5) -> list[tuple[int, float]]:
    """The key positions the chosen token reads most, with the numbers, strongest first."""
    row = causal(_pattern(rec, chosen, min(chosen.head, heads(rec, chosen) - 1)))[chosen.token]
    order = np.argsort(np.where(np.isfinite(row), -row, np.inf))[:count]
    return [(int(key), float(row[key])) for key in order if np.isfinite(row[key])]
