"""Recurrent state as pictures: what is kept, what is written, what the state holds, what it attends to."""

from __future__ import annotations

import numpy as np

from explorer.recording import Recording
from explorer.widgets.drawing import Curve, Curves, Heatmap, Mosaic, Refusal, Tile
from explorer.widgets.reduction import MINIMUM, causal
from explorer.widgets.selection import Recorded, Replayed, Selection, array, is_recurrent, numbered_axis, plain, token_axis
from explorer.widgets.views_attention import bounds, mosaic_columns

#: What the reader of an implied attention must know.
IMPLIED_NOTE = (
    "Exact: head outputs = M · values. Column j stands after the short convolution, "
    "so it already mixes the tokens just before j; rows need not sum to one and entries can be negative."
)


def refusal(rec: Recorded, layer: int, name: str = "decays") -> Refusal | None:
    """Why block ``layer`` has no state to show, None where it has one."""
    if not is_recurrent(rec, layer):
        others = [str(other) for other in range(rec.num_layers) if is_recurrent(rec, other)]
        where = f" Blocks with a state: {', '.join(others)}." if others else " No block of this model has one."
        return Refusal(
            "This block is softmax attention: it carries a key/value cache that grows with the text, "
            f"not a recurrent state.{where} Its pattern is under Attention."
        )
    return None if (name, layer) in rec else Refusal(rec.why(name, layer))


def heads(rec: Recorded, layer: int) -> int:
    """How many recurrent heads the block has (value heads)."""
    return rec["decays", layer].shape[2]


def _per_head(rec: Recorded, chosen: Selection, values: np.ndarray, title: str, note: str, **bounds) -> Heatmap:
    """Heads down, tokens across, from ``[seq heads]``."""
    return Heatmap(
        title=f"{title}, block {chosen.block}", x=token_axis(rec),
        y=numbered_axis("head", values.shape[1]), values=values.T, note=note, **bounds,
    )


def kept(rec: Recorded, chosen: Selection) -> Heatmap | Refusal:
    """The share of its state each head keeps at each token: ``exp(decays)``, 0 to 1."""
    if (reason := refusal(rec, chosen.block)) is not None:
        return reason
    decays = array(rec, "decays", chosen.block)
    channels = decays.ndim == 3
    values = np.exp(decays.mean(-1) if channels else decays)
    note = "1 keeps everything, 0 forgets everything."
    if channels:
        note += " One decay per channel here: the mean of the log decays is shown."
    return _per_head(rec, chosen, values, "kept: exp(decays)", note, low=0.0, high=1.0, reduction=MINIMUM)


def written(rec: Recorded, chosen: Selection) -> Heatmap | Refusal:
    """The write strength of each token in each head: ``betas``."""
    if (reason := refusal(rec, chosen.block, "betas")) is not None:
        return reason
    return _per_head(
        rec, chosen, array(rec, "betas", chosen.block), "written: betas",
        "The share of its own prediction error the token writes into the state.", low=0.0, high=1.0,
    )


def norms(rec: Recording, layer: int) -> np.ndarray:
    """Frobenius norm of every head's state after every token, replayed: ``[seq heads]``.

    This runs through all tokens one by one; ask a worker for it on long prompts.
    """
    return plain(rec.state_norms(layer)[0])


def norm_over_time(rec: Recorded, chosen: Selection, values: np.ndarray | None) -> Curves | Refusal:
    """The state norms as lines, the chosen head among all; ``values`` as `norms` gives them."""
    if (reason := refusal(rec, chosen.block)) is not None:
        return reason
    if values is None:
        return Refusal("The state is being replayed …")
    head = min(chosen.head, values.shape[1] - 1)
    others = tuple(
        Curve(f"head {other}", values[:, other], "muted") for other in range(values.shape[1]) if other != head
    )
    return Curves(
        title=f"state norm after each token, block {chosen.block}", x=token_axis(rec), unit="‖S‖",
        lines=(*others, Curve(f"head {head}", values[:, head], "recurrent")),
        note=f"Head {head} heavy, the others thin; replayed from the recorded kernel arguments.",
    )


def matrix(rec: Replayed, chosen: Selection) -> Heatmap | Refusal:
    """The state of the chosen head after the chosen token: key channels down, value channels across."""
    if (reason := refusal(rec, chosen.block)) is not None:
        return reason
    state = state_at(rec, chosen)
    return Heatmap(
        title=f"state of head {chosen.head} after token {chosen.token}, block {chosen.block}",
        x=numbered_axis("value channel", state.shape[1]), y=numbered_axis("key channel", state.shape[0]),
        values=state, signed=True, note="Row k holds what would be read by a query along key channel k.",
    )


def state_at(rec: Replayed, chosen: Selection) -> np.ndarray:
    """The state matrix ``[key_dim value_dim]`` of the chosen head after the chosen token, replayed up to it."""
    return plain(rec.state(chosen.block, chosen.head, chosen.token)[0])


def implied(rec: Recorded, chosen: Selection) -> Heatmap | Refusal:
    """The implied attention of the chosen head: query tokens down, key tokens across."""
    if (reason := refusal(rec, chosen.block, "state_attention")) is not None:
        return reason
    values = array(rec, "state_attention", chosen.block)
    head = min(chosen.head, len(values) - 1)
    return Heatmap(
        title=f"implied attention of head {head}, block {chosen.block}",
        x=token_axis(rec, "token read (key)"), y=token_axis(rec, "token reading (query)"),
        values=causal(values[head]), note=IMPLIED_NOTE, **bounds(rec, signed=True),
    )


def all_implied(rec: Recorded, chosen: Selection) -> Mosaic | Refusal:
    """The implied attention of every head of the block, as tiles."""
    if (reason := refusal(rec, chosen.block, "state_attention")) is not None:
        return reason
    values = array(rec, "state_attention", chosen.block)
    tiles = tuple(Tile(f"{head}", "", value) for head, value in enumerate(values))
    return Mosaic(
        title=f"implied attention of all {len(tiles)} heads, block {chosen.block}",
        tiles=tiles, columns=mosaic_columns(len(tiles), 1), **bounds(rec, signed=True),
    )

