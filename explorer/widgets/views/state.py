"""Recurrent state as pictures: how much is retained and written, the state, implied attention.

A recurrence has a state for each of its heads, or a small one for each of its many
channels (`unit_of`); what is written here of heads holds for channels then.
"""

from __future__ import annotations

import numpy as np

from explorer import vocabulary
from explorer.vocabulary.formatting import size_in_bytes
from explorer.vocabulary.mixers import StateView
from explorer.widgets.views.attention import mosaic_columns, pattern_scale
from explorer.widgets.views.downsample import MINIMUM, hide_future
from explorer.widgets.views.picture import Curve, Curves, Heatmap, Mosaic, Refusal, Tile
from explorer.widgets.views.selection import (
    MeasuresStates,
    Recorded,
    Replay,
    Replayable,
    Selection,
    as_array,
    describe_mixers,
    first_row,
    has_attention,
    numbered_axis,
    recurrence_of,
    recurrent_host,
    token_axis,
    unavailable,
)

#: What a reader needs to know of an implied attention.
IMPLIED_NOTE = (
    "Exact: head outputs = M · values. Column j is position j after the short convolution, "
    "so it already mixes the tokens just before j; rows need not sum to one and entries can be "
    "negative."
)

#: The most lines drawn beside the selected head's: a thousand channels would be a black bar.
_LINES = 32

#: Memory that computing one channel's implied attention may take, in bytes.
_PATTERN_BYTES = 500_000_000


def by_head(host: str) -> bool:
    """Whether a recurrence has a state per head, rather than per channel."""
    return "heads" in vocabulary.BY_HOST[host]["state_output"].axes


def view_of(host: str) -> StateView:
    """What the state panel shows of a recurrence at each token."""
    view = vocabulary.MIXERS[host].state_view
    if view is None:
        raise ValueError(f"{host} has no state to show.")
    return view


def unit_of(host: str) -> str:
    """What has a state of its own, in a word: head or channel."""
    return "head" if by_head(host) else "channel"


def refusal(rec: Recorded, layer: int, name: str | None = None) -> Refusal | None:
    """Why block ``layer`` has no state to show, None where it has one; or no value ``name``."""
    host = recurrence_of(rec, layer)
    if host is None:
        return no_state(rec, layer)
    key = f"{host}.{name or view_of(host).retained}"
    return None if (key, layer) in rec else unavailable(rec, key, layer)


def no_state(rec: Recorded, layer: int) -> Refusal:
    """Why a block without a recurrence has no state, and which blocks have one."""
    others = [str(other) for other in range(rec.num_layers) if recurrence_of(rec, other)]
    where = "No block of this model has one."
    if others:
        where = f"Blocks with a state: {', '.join(others)}."
    if not has_attention(rec, layer):
        return Refusal(f"This block has no recurrent state: {describe_mixers(rec, layer)}. {where}")
    return Refusal(
        "This block is softmax attention: it carries a key/value cache that grows with the text, "
        f"not a recurrent state. {where} Its pattern is under Attention."
    )


def recurrence_value(rec: Recorded, layer: int, name: str) -> np.ndarray:
    """A value of the block's recurrence, first row of the batch; a fixed one is repeated for every
    token.
    """
    found = vocabulary.BY_HOST[recurrent_host(rec, layer)][name]
    if found.fixed:
        return np.tile(as_array(rec[f"{found.host}.{name}", layer]), (len(rec.tokens), 1))
    return first_row(rec, f"{found.host}.{name}", layer)


def _per_head(
    rec: Recorded,
    selection: Selection,
    values: np.ndarray,
    title: str,
    note: str,
    high: float | None,
    reduction: str = "",
) -> Heatmap:
    """Heads down, tokens across, from ``[seq heads]``."""
    return Heatmap(
        title=f"{title}, block {selection.block}",
        x=token_axis(rec),
        y=numbered_axis(unit_of(recurrent_host(rec, selection.block)), values.shape[1]),
        values=values.T,
        note=note,
        low=0.0,
        high=high,
        reduction=reduction,
    )


def retained_share(rec: Recorded, selection: Selection) -> Heatmap | Refusal:
    """The share of its state that each head retains at each token, 0 to 1."""
    if (reason := refusal(rec, selection.block)) is not None:
        return reason
    shown = view_of(recurrent_host(rec, selection.block))
    values = recurrence_value(rec, selection.block, shown.retained)
    note = "1 retains everything, 0 forgets everything."
    if values.ndim == 3:
        values = values.mean(-1)
        note += " One decay per entry of the state here: the mean of the log decays is shown."
    title = f"exp({shown.retained})" if shown.logarithm else shown.retained
    title = f"retained share: {title}"
    return _per_head(
        rec,
        selection,
        np.exp(values) if shown.logarithm else values,
        title,
        note,
        high=1.0,
        reduction=MINIMUM,
    )


def write_strength(rec: Recorded, selection: Selection) -> Heatmap | Refusal:
    """How strongly each token is written in each head."""
    host = recurrence_of(rec, selection.block)
    if host is None:
        return no_state(rec, selection.block)
    shown = view_of(host)
    if shown.written is None:
        return Refusal(
            "Nothing scales what this recurrence writes: its attention_values are added to the "
            "state as they are."
        )
    if (reason := refusal(rec, selection.block, shown.written)) is not None:
        return reason
    values = recurrence_value(rec, selection.block, shown.written)
    high = vocabulary.BY_HOST[host][shown.written].high
    return _per_head(rec, selection, values, shown.title, shown.note, high)


def norms_per_token(rec: MeasuresStates, layer: int) -> np.ndarray:
    """Frobenius norm of every head's state after every token, replayed: ``[seq heads]``.

    This runs through all tokens one by one; ask a worker for it on long prompts.
    """
    return as_array(rec.state_norms(layer)[0])


def norm_over_time(
    rec: Recorded, selection: Selection, values: np.ndarray | None
) -> Curves | Refusal:
    """The state norms as lines, the selected head among the others; ``values`` as `norms_per_token`
    gives them.
    """
    if (reason := refusal(rec, selection.block)) is not None:
        return reason
    if values is None:
        return Refusal("The state is being replayed …")
    word, count = unit_of(recurrent_host(rec, selection.block)), values.shape[1]
    head = min(selection.head, count - 1)
    some = (
        range(count)
        if count <= _LINES
        else sorted({round(place) for place in np.linspace(0, count - 1, _LINES)})
    )
    others = tuple(
        Curve(f"{word} {other}", values[:, other], "muted") for other in some if other != head
    )
    which = "the others" if count <= _LINES else f"{len(others)} of the {count} others"
    return Curves(
        title=f"state norm after each token, block {selection.block}",
        x=token_axis(rec),
        unit="‖S‖",
        lines=(*others, Curve(f"{word} {head}", values[:, head], "recurrent")),
        note=f"{word.capitalize()} {head} heavy, {which} thin; replayed from the recorded "
        "kernel arguments.",
    )


def state_matrix(rec: Replayable, selection: Selection) -> Heatmap | Refusal:
    """The state after the selected token: of the selected head, key channels down and value
    channels across, or of all channels.
    """
    if (reason := refusal(rec, selection.block)) is not None:
        return reason
    host, state = recurrent_host(rec, selection.block), state_at(rec, selection)
    after = f"after token {selection.token}, block {selection.block}"
    if by_head(host):
        return Heatmap(
            title=f"state of head {selected_head(rec, selection)} {after}",
            values=state,
            signed=True,
            x=numbered_axis("value channel", state.shape[1]),
            y=numbered_axis("key channel", state.shape[0]),
            note="Row k holds what would be read by a query along key channel k.",
        )
    return Heatmap(
        title=f"state of all {state.shape[1]} channels {after}",
        values=state,
        signed=True,
        x=numbered_axis("channel", state.shape[1]),
        y=numbered_axis("entry of its state", state.shape[0]),
        note="One column per channel, which has a state of its own.",
    )


def selected_head(rec: Recorded, selection: Selection) -> int:
    """The selected head, or the last where the recurrence has fewer than attention beside it."""
    host = recurrent_host(rec, selection.block)
    retained = vocabulary.BY_HOST[host][view_of(host).retained]
    axis = next(at for at, axis in enumerate(retained.axes) if axis in ("heads", "channels"))
    return min(selection.head, rec[f"{host}.{retained.name}", selection.block].shape[axis] - 1)


def state_at(rec: Replayable, selection: Selection) -> np.ndarray:
    """The state after the selected token, replayed: ``[key_dim value_dim]`` of the selected head,
    or ``[key_dim channels]``.
    """
    replay = rec.replay(selection.block)
    if by_head(replay.host):
        return as_array(replay.state_at(selection.token, [selected_head(rec, selection)])[0, 0])
    state = as_array(replay.state_at(selection.token)[0])
    return np.atleast_2d(state.T)


def implied_attention(rec: Replayable, selection: Selection) -> Heatmap | Refusal:
    """The implied attention of the selected head: query tokens down, key tokens across."""
    host = recurrence_of(rec, selection.block)
    if host is None:
        return no_state(rec, selection.block)
    needed = "state_attention" if by_head(host) else None
    if (reason := refusal(rec, selection.block, needed)) is not None:
        return reason
    head = selected_head(rec, selection)
    if by_head(host):
        values = as_array(rec[f"{host}.state_attention", selection.block][0, head])
    else:
        alone = rec.replay(selection.block).one_channel(head)
        size = 4 * len(rec.tokens) ** 2 * axis_length(alone, "key_dim")
        if size > _PATTERN_BYTES:
            return Refusal(
                f"For {len(rec.tokens)} tokens this would take {size_in_bytes(size)} to compute: "
                "shorten the prompt."
            )
        if not alone.fresh:
            return Refusal(
                "This run continued from an earlier state; implied attention is defined for a "
                "fresh prompt."
            )
        values = as_array(alone.state_attention()[0, 0])
    return Heatmap(
        title=f"implied attention of {unit_of(host)} {head}, block {selection.block}",
        x=token_axis(rec, "token read (key)"),
        y=token_axis(rec, "token reading (query)"),
        values=hide_future(values),
        note=IMPLIED_NOTE,
        **pattern_scale(rec, signed=True),
    )


def axis_length(replay: Replay, axis: str) -> int:
    """The length of an axis of what a recurrence is given, 1 where nothing has it."""
    for name, tensor in replay.given.items():
        axes = vocabulary.BY_HOST[replay.host][name].axes
        if tensor is not None and axis in axes:
            return tensor.shape[axes.index(axis)]
    return 1


def implied_attention_of_all_heads(rec: Recorded, selection: Selection) -> Mosaic | Refusal:
    """The implied attention of every head of the block, as tiles."""
    host = recurrence_of(rec, selection.block)
    if host is not None and not by_head(host):
        return Refusal(
            "This recurrence has a pattern per channel, too many for tiles: that of the selected "
            "one is below."
        )
    if (reason := refusal(rec, selection.block, "state_attention")) is not None:
        return reason
    values = recurrence_value(rec, selection.block, "state_attention")
    tiles = tuple(Tile(f"{head}", "", pattern) for head, pattern in enumerate(values))
    return Mosaic(
        title=f"implied attention of all {len(tiles)} heads, block {selection.block}",
        tiles=tiles,
        columns=mosaic_columns(len(tiles), 1),
        **pattern_scale(rec, signed=True),
    )
