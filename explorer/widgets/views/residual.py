"""The residual stream as pictures: its norm, and how much each sublayer adds to it."""

from __future__ import annotations

import numpy as np
import torch

from explorer import vocabulary
from explorer.widgets.views.picture import Axis, Heatmap, Refusal
from explorer.widgets.views.selection import Recorded, Selection, token_axis, unavailable


def token_norms(tensor: torch.Tensor) -> np.ndarray:
    """Euclidean norm of every token's vector: ``[seq]`` of ``[batch seq hidden_size]``."""
    return tensor[0].float().norm(dim=-1).numpy()


def _log10(values: np.ndarray) -> np.ndarray:
    """Norms differ by orders of magnitude (a first token may be a hundred times longer): their
    logarithm is drawn.
    """
    return np.log10(np.maximum(values, 1e-12))


def addend_norms(rec: Recorded) -> Heatmap | Refusal:
    """Tokens across; down, per block, the norm of each addend over that of the stream it joins."""
    rows, labels = [], []
    for layer in range(rec.num_layers):
        if ("layer_input", layer) not in rec:
            continue
        stream = np.maximum(token_norms(rec["layer_input", layer]), 1e-12)
        for name in rec.addends(layer):
            rows.append(_log10(token_norms(rec[name, layer]) / stream))
            labels.append(f"{layer} {_sublayer_name(rec, layer, name)}")
    if not rows:
        return unavailable(rec, "layer_input", 0)
    return Heatmap(
        title="addends: log₁₀ of their norm over that of the stream entering the block",
        x=token_axis(rec),
        y=Axis("block and sublayer", tuple(labels)),
        values=np.stack(rows),
        signed=True,
        note="0 means as long as the stream it is added to, 1 ten times as long, −1 a tenth.",
    )


def _sublayer_name(rec: Recorded, layer: int, name: str) -> str:
    """The sublayer that makes an addend, in a word or two."""
    if name.endswith("mlp_output"):
        return "MLP"
    mixer = rec.mixers[layer][1 if "." in name else 0]
    return (
        "attention"
        if mixer == "self_attn"
        else "recurrent mixer"
        if mixer in vocabulary.RECURRENT
        else "mixer"
    )


def stream_norms(rec: Recorded) -> Heatmap | Refusal:
    """Tokens across, blocks down: the norm of the stream into each block, and out of the last."""
    layers = [layer for layer in range(rec.num_layers) if ("layer_input", layer) in rec]
    if not layers:
        return unavailable(rec, "layer_input", 0)
    rows = [_log10(token_norms(rec["layer_input", layer])) for layer in layers]
    labels = [f"into {layer}" for layer in layers]
    if ("layer_output", layers[-1]) in rec:
        rows.append(_log10(token_norms(rec["layer_output", layers[-1]])))
        labels.append(f"out of {layers[-1]}")
    return Heatmap(
        title="stream: log₁₀ of the norm of every token's vector",
        x=token_axis(rec),
        y=Axis("point of the stream", tuple(labels)),
        values=np.stack(rows),
    )


def line_weights(rec: Recorded, selection: Selection) -> dict[str, float]:
    """For the diagram: the norms of the selected block's addends at the selected token, by value.

    Each is divided by the largest of any block at that token, so 0 to 1.
    """
    norms = {
        (name, layer): float(rec[name, layer][0, selection.token].float().norm())
        for layer in range(rec.num_layers)
        for name in rec.addends(layer)
    }
    largest = max(norms.values(), default=0.0) or 1.0
    return {name: norms[name, selection.block] / largest for name in rec.addends(selection.block)}
