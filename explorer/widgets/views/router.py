"""The router as pictures: which token chose which expert, by what margin, and unused experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from explorer.widgets.views.picture import MARKED_ROWS, Axis, Curve, Curves, Heatmap, Refusal
from explorer.widgets.views.selection import (
    Recorded,
    Selection,
    first_row,
    numbered_axis,
    token_axis,
    unavailable,
)

#: What the token × expert picture can show, and its title.
CHOICES = {
    "scores": "scores the choice is made on",
    "logits": "raw router logits",
    "weights": "weights of the chosen experts",
}


def refusal(rec: Recorded, layer: int) -> Refusal | None:
    """Why block ``layer`` has no router to show, None where it has one."""
    if ("expert_indices", layer) in rec:
        return None if ("router_logits", layer) in rec else unavailable(rec, "router_logits", layer)
    if all(("expert_indices", other) not in rec for other in range(rec.num_layers)):
        if not any(("mlp_output", other) in rec for other in range(rec.num_layers)):
            return Refusal("No block of this model has a router: it has no MLP.")
        return Refusal(
            "No block of this model has a router: every MLP is dense, each token runs through all "
            "of it. Its neurons can be read by clicking mlp_neurons in the diagram."
        )
    return unavailable(rec, "expert_indices", layer)


def token_by_expert(rec: Recorded, selection: Selection) -> Heatmap | Refusal:
    """Tokens down, experts across, the chosen ones outlined: ``[seq num_experts]`` of one block."""
    if (reason := refusal(rec, selection.block)) is not None:
        return reason
    indices = first_row(rec, "expert_indices", selection.block)
    if selection.router == "weights":
        values, signed = _weights_by_expert(rec, selection.block, indices), False
    else:
        values = first_row(rec, f"router_{selection.router}", selection.block)
        signed = selection.router == "logits"
    tokens, slots = indices.shape
    note = f"Outlined: the {slots} experts each token was sent to"
    if tokens > MARKED_ROWS:
        note += (
            f", once you zoom in to {MARKED_ROWS} tokens or fewer; "
            "“weights of the chosen experts” shows all of them"
        )
    marks = np.stack([indices.ravel(), np.repeat(np.arange(tokens), slots)], axis=1)
    return Heatmap(
        title=f"{CHOICES[selection.router]}, block {selection.block}",
        x=numbered_axis("expert", values.shape[1]),
        y=token_axis(rec),
        values=values,
        signed=signed,
        marks=marks.astype(np.int32),
        note=f"{note}.",
    )


def _weights_by_expert(rec: Recorded, layer: int, indices: np.ndarray) -> np.ndarray:
    """The weights of the chosen experts, NaN at all others: ``[seq num_experts]``."""
    weights = first_row(rec, "expert_weights", layer)
    values = np.full((len(indices), num_experts(rec, layer)), np.nan, dtype=np.float32)
    np.put_along_axis(values, indices, weights, axis=1)
    return values


def num_experts(rec: Recorded, layer: int) -> int:
    return rec["router_logits", layer].shape[-1]


def tokens_per_expert(rec: Recorded, layer: int) -> np.ndarray:
    """How many tokens chose each expert of a block: ``[num_experts]``."""
    return np.bincount(
        first_row(rec, "expert_indices", layer).ravel(), minlength=num_experts(rec, layer)
    )


def layer_by_expert(rec: Recorded) -> Heatmap | Refusal:
    """Blocks down, experts across: the share of all tokens that chose the expert."""
    layers = [layer for layer in range(rec.num_layers) if refusal(rec, layer) is None]
    if not layers:
        return refusal(rec, 0) or Refusal("No block has a router.")
    widest = max(num_experts(rec, layer) for layer in layers)
    values = np.full((len(layers), widest), np.nan, dtype=np.float32)
    for row, layer in enumerate(layers):
        counts = tokens_per_expert(rec, layer)
        values[row, : len(counts)] = counts / len(rec.tokens)
    slots = rec["expert_indices", layers[0]].shape[-1]
    return Heatmap(
        title="load: share of tokens that chose each expert",
        x=numbered_axis("expert", widest),
        y=Axis("block", tuple(str(layer) for layer in layers)),
        values=values,
        low=0.0,
        note=f"An even spread would give every expert {slots / widest:.3g}.",
    )


def margins(rec: Recorded, selection: Selection) -> Curves | Refusal:
    """Per token, the score of the last chosen expert minus that of the first rejected one."""
    if (reason := refusal(rec, selection.block)) is not None:
        return reason
    if ("router_margin", selection.block) not in rec:
        return unavailable(rec, "router_margin", selection.block)
    values = first_row(rec, "router_margin", selection.block)
    return Curves(
        title="margin: last chosen minus first rejected score",
        x=token_axis(rec),
        unit="score",
        lines=(Curve("router_margin", values, "router"),),
        note="A margin near zero means a small change would alter the routing.",
    )


@dataclass(frozen=True)
class Slot:
    """One routing slot of one token."""

    expert: int
    weight: float


def slots_of(rec: Recorded, selection: Selection) -> tuple[Slot, ...]:
    """The experts of the selected token with their weights, in slot order."""
    experts = first_row(rec, "expert_indices", selection.block)[selection.token]
    weights = first_row(rec, "expert_weights", selection.block)[selection.token]
    return tuple(
        Slot(int(expert), float(weight)) for expert, weight in zip(experts, weights, strict=True)
    )


def unused_experts(rec: Recorded, layer: int) -> tuple[int, ...]:
    """Experts of a block that no token of the prompt chose."""
    return tuple(int(expert) for expert in np.flatnonzero(tokens_per_expert(rec, layer) == 0))
