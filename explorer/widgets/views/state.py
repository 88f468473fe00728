"""Recurrent state as pictures: what is kept, what is written, what the state holds, what it attends to.

A recurrence has a state for each of its heads, or a small one for each of its many
channels (`each`); where a text here says head, it is a channel of the latter.
"""

from __future__ import annotations

import numpy as np

from explorer import vocabulary
from explorer.model.recording import Recording
from explorer.recurrence.replay import Replay
from explorer.vocabulary.formatting import size_in_bytes
from explorer.vocabulary.mixers import StateView
from explorer.widgets.views.attention import bounds, mosaic_columns
from explorer.widgets.views.downsample import MINIMUM, causal
from explorer.widgets.views.picture import Curve, Curves, Heatmap, Mosaic, Refusal, Tile
from explorer.widgets.views.selection import (
    Recorded,
    Replayed,
    Selection,
    array,
    attends,
    missing,
    mixer_words,
    numbered_axis,
    plain,
    recurrence_of,
    token_axis,
)

#: What the reader of an implied attention must know.
IMPLIED_NOTE = (
    "Exact: head outputs = M · values. Column j stands after the short convolution, "
    "so it already mixes the tokens just before j; rows need not sum to one and entries can be negative."
)

#: Beside the chosen head's, so many lines are drawn: a thousand channels would be a black bar.
_LINES = 32

#: What working out one channel's implied attention may hold, in bytes.
_PATTERN_BYTES = 500_000_000


def by_head(host: str) -> bool:
    """Whether a recurrence has a state per head, rather than per channel."""
    return "heads" in vocabulary.BY_HOST[host]["state_output"].axes


def view_of(host: str) -> StateView:
    """What is shown of a recurrence's tokens."""
    return vocabulary.MIXERS[host].state_view


def each(host: str) -> str:
    """What has a state of its own: a head or a channel."""
    return "head" if by_head(host) else "channel"


def refusal(rec: Recorded, layer: int, name: str | None = None) -> Refusal | None:
    """Why block ``layer`` has no state to show, None where it has one."""
    host = recurrence_of(rec, layer)
    if host is None:
        others = [str(other) for other in range(rec.num_layers) if recurrence_of(rec, other)]
        where = (
            f" Blocks with a state: {', '.join(others)}."
            if others
            else " No block of this model has one."
        )
        if not attends(rec, layer):
            return Refusal(f"This block has no recurrent state: {mixer_words(rec, layer)}.{where}")
        return Refusal(
            "This block is softmax attention: it carries a key/value cache that grows with the text, "
            f"not a recurrent state.{where} Its pattern is under Attention."
        )
    key = f"{host}.{name or view_of(host).retained}"
    return None if (key, layer) in rec else missing(rec, key, layer)


def value(rec: Recorded, layer: int, name: str) -> np.ndarray:
    """A value of the block's recurrence, first row of the batch; one that is fixed, again for every token."""
    found = vocabulary.BY_HOST[recurrence_of(rec, layer)][name]
    if found.fixed:
        return np.tile(plain(rec[f"{found.host}.{name}", layer]), (len(rec.tokens), 1))
    return array(rec, f"{found.host}.{name}", layer)


def _per_head(
    rec: Recorded, chosen: Selection, values: np.ndarray, title: str, note: str, **bounds
) -> Heatmap:
    """Heads down, tokens across, from ``[seq heads]``."""
    return Heatmap(
        title=f"{title}, block {chosen.block}",
        x=token_axis(rec),
        y=numbered_axis(each(recurrence_of(rec, chosen.block)), values.shape[1]),
        values=values.T,
        note=note,
        **bounds,
    )


def kept(rec: Recorded, chosen: Selection) -> Heatmap | Refusal:
    """The share of its state each head keeps at each token, 0 to 1."""
    if (reason := refusal(rec, chosen.block)) is not None:
        return reason
    shown = view_of(recurrence_of(rec, chosen.block))
    values = value(rec, chosen.block, shown.retained)
    note = "1 keeps everything, 0 forgets everything."
    if values.ndim == 3:
        values = values.mean(-1)
        note += " One decay per entry of the state here: the mean of the log decays is shown."
    title = f"kept: exp({shown.retained})" if shown.logarithm else f"kept: {shown.retained}"
    return _per_head(
        rec,
        chosen,
        np.exp(values) if shown.logarithm else values,
        title,
        note,
        low=0.0,
        high=1.0,
        reduction=MINIMUM,
    )


def written(rec: Recorded, chosen: Selection) -> Heatmap | Refusal:
    """How strongly each token is written in each head."""
    host = recurrence_of(rec, chosen.block)
    if host is not None and view_of(host).written is None:
        return Refusal(
            "Nothing scales what this recurrence writes: its attention_values are added to the state as they are."
        )
    if (reason := refusal(rec, chosen.block, host and view_of(host).written)) is not None:
        return reason
    shown = view_of(host)
    return _per_head(
        rec,
        chosen,
        value(rec, chosen.block, shown.written),
        shown.title,
        shown.note,
        low=0.0,
        high=vocabulary.BY_HOST[host][shown.written].high,
    )


def norms(rec: Recording, layer: int) -> np.ndarray:
    """Frobenius norm of every head's state after every token, replayed: ``[seq heads]``.

    This runs through all tokens one by one; ask a worker for it on long prompts.
    """
    return plain(rec.state_norms(layer)[0])


def norm_over_time(rec: Recorded, chosen: Selection, values: np.ndarray | None) -> Curves | Refusal:
    """The state norms as lines, the chosen head among the others; ``values`` as `norms` gives them."""
    if (reason := refusal(rec, chosen.block)) is not None:
        return reason
    if values is None:
        return Refusal("The state is being replayed …")
    word, count = each(recurrence_of(rec, chosen.block)), values.shape[1]
    head = min(chosen.head, count - 1)
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
        title=f"state norm after each token, block {chosen.block}",
        x=token_axis(rec),
        unit="‖S‖",
        lines=(*others, Curve(f"{word} {head}", values[:, head], "recurrent")),
        note=f"{word.capitalize()} {head} heavy, {which} thin; replayed from the recorded kernel arguments.",
    )


def matrix(rec: Replayed, chosen: Selection) -> Heatmap | Refusal:
    """The state after the chosen token: of the chosen head, key channels down and value channels across, or of all channels."""
    if (reason := refusal(rec, chosen.block)) is not None:
        return reason
    host, state = recurrence_of(rec, chosen.block), state_at(rec, chosen)
    after = f"after token {chosen.token}, block {chosen.block}"
    if by_head(host):
        return Heatmap(
            title=f"state of head {chosen_head(rec, chosen)} {after}",
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


def chosen_head(rec: Recorded, chosen: Selection) -> int:
    """The chosen head, or the last of a recurrence with fewer heads than the attention beside it."""
    host = recurrence_of(rec, chosen.block)
    kept = vocabulary.BY_HOST[host][view_of(host).retained]
    at = next(at for at, axis in enumerate(kept.axes) if axis in ("heads", "channels"))
    return min(chosen.head, rec[f"{host}.{kept.name}", chosen.block].shape[at] - 1)


def state_at(rec: Replayed, chosen: Selection) -> np.ndarray:
    """The state after the chosen token, replayed up to it: ``[key_dim value_dim]`` of the chosen head, or ``[key_dim channels]``."""
    replay = rec.replay(chosen.block)
    if by_head(replay.host):
        return plain(replay.state_at(chosen.token, [chosen_head(rec, chosen)])[0, 0])
    state = plain(replay.state_at(chosen.token)[0])
    return np.atleast_2d(state.T)


def implied(rec: Replayed, chosen: Selection) -> Heatmap | Refusal:
    """The implied attention of the chosen head: query tokens down, key tokens across."""
    host = recurrence_of(rec, chosen.block)
    if (
        reason := refusal(rec, chosen.block, "state_attention" if host and by_head(host) else None)
    ) is not None:
        return reason
    head = chosen_head(rec, chosen)
    if by_head(host):
        values = plain(rec[f"{host}.state_attention", chosen.block][0, head])
    else:
        alone = one_channel(rec.replay(chosen.block), head)
        needed = 4 * len(rec.tokens) ** 2 * length_of(alone, "key_dim")
        if needed > _PATTERN_BYTES:
            return Refusal(
                f"For {len(rec.tokens)} tokens this would take {size_in_bytes(needed)} to work out: shorten the prompt."
            )
        if not alone.fresh:
            return Refusal(
                "This run went on from an earlier state, and the implied attention is that of a fresh prompt."
            )
        values = plain(alone.state_attention()[0, 0])
    return Heatmap(
        title=f"implied attention of {each(host)} {head}, block {chosen.block}",
        x=token_axis(rec, "token read (key)"),
        y=token_axis(rec, "token reading (query)"),
        values=causal(values),
        note=IMPLIED_NOTE,
        **bounds(rec, signed=True),
    )


def one_channel(replay: Replay, channel: int) -> Replay:
    """A recurrence of channels with one of them alone."""
    given = {}
    for name, tensor in replay.given.items():
        axes = vocabulary.BY_HOST[replay.host][name].axes
        whole = tensor is None or "channels" not in axes
        given[name] = tensor if whole else tensor.narrow(axes.index("channels"), channel, 1)
    return Replay(replay.host, given)


def length_of(replay: Replay, axis: str) -> int:
    """The length of an axis of what a recurrence is given, 1 where nothing has it."""
    for name, tensor in replay.given.items():
        axes = vocabulary.BY_HOST[replay.host][name].axes
        if tensor is not None and axis in axes:
            return tensor.shape[axes.index(axis)]
    return 1


def all_implied(rec: Recorded, chosen: Selection) -> Mosaic | Refusal:
    """The implied attention of every head of the block, as tiles."""
    host = recurrence_of(rec, chosen.block)
    if host is not None and not by_head(host):
        return Refusal(
            "This recurrence has a pattern per channel, too many for tiles: that of the chosen one is below."
        )
    if (reason := refusal(rec, chosen.block, "state_attention")) is not None:
        return reason
    values = value(rec, chosen.block, "state_attention")
    tiles = tuple(Tile(f"{head}", "", pattern) for head, pattern in enumerate(values))
    return Mosaic(
        title=f"implied attention of all {len(tiles)} heads, block {chosen.block}",
        tiles=tiles,
        columns=mosaic_columns(len(tiles), 1),
        **bounds(rec, signed=True),
    )
