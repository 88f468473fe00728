"""The router as pictures: who chose which expert, how firmly, and which expert nobody chose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from explorer.widgets.views.picture import MARKED_ROWS, Axis, Curve, Curves, Heatmap, Refusal
from explorer.widgets.views.selection import (
    Recorded,
    Selection,
    array,
    missing,
    numbered_axis,
    token_axis,
)

#: What the token × expert picture can show, and the words for it.
CHOICES = {
    "scores": "scores the choice is made on",
    "logits": "raw router logits",
    "weights": "weights of the chosen",
}


def refusal(rec: Recorded, layer: int) -> Refusal | None:
    """Why block ``layer`` has no router to show, None where it has one."""
    if ("expert_indices", layer) in rec:
        return None if ("router_logits", layer) in rec else missing(rec, "router_logits", layer)
    if all(("expert_indices", other) not in rec for other in range(rec.num_layers)):
        if not any(("mlp_output", other) in rec for other in range(rec.num_layers)):
            return Refusal("No block of this model has a router: it has no MLP.")
        return Refusal(
            "No block of this model has a router: every MLP is dense, each token runs through all of it. "
            "Its neurons can be read by clicking mlp_neurons in the diagram."
        )
    return missing(rec, "expert_indices", layer)


def token_by_expert(rec: Recorded, chosen: Selection) -> Heatmap | Refusal:
    """Tokens down, experts across, the chosen slots outlined: ``[seq num_experts]`` of one block."""
    if (reason := refusal(rec, chosen.block)) is not None:
        return reason
    indices = array(rec, "expert_indices", chosen.block)
    if chosen.router == "weights":
        values, signed = _spread(rec, chosen.block, indices), False
    else:
        values = array(rec, f"router_{chosen.router}", chosen.block)
        signed = chosen.router == "logits"
    tokens, slots = indices.shape
    marks = np.stack([indices.ravel(), np.repeat(np.arange(tokens), slots)], axis=1)
    return Heatmap(
        title=f"{CHOICES[chosen.router]}, block {chosen.block}",
        x=numbered_axis("expert", values.shape[1]),
        y=token_axis(rec),
        values=values,
        signed=signed,
        marks=marks.astype(np.int32),
        note=f"Outlined: the {slots} experts each token was sent to"
        + (
            "."
            if tokens <= MARKED_ROWS
            else f", once you zoom in to {MARKED_ROWS} tokens or fewer; “weights of the chosen” shows all of them."
        ),
    )


def _spread(rec: Recorded, layer: int, indices: np.ndarray) -> np.ndarray:
    """The multipliers of the chosen slots put at their experts, empty elsewhere: ``[seq num_experts]``."""
    weights = array(rec, "expert_weights", layer)
    values = np.full((len(indices), num_experts(rec, layer)), np.nan, dtype=np.float32)
    np.put_along_axis(values, indices, weights, axis=1)
    return values


def num_experts(rec: Recorded, layer: int) -> int:
    return rec["router_logits", layer].shape[-1]


def load(rec: Recorded, layer: int) -> np.ndarray:
    """How many tokens chose each expert of a block: ``[num_experts]``."""
    return np.bincount(
        array(rec, "expert_indices", layer).ravel(), minlength=num_experts(rec, layer)
    )


def layer_by_expert(rec: Recorded) -> Heatmap | Refusal:
    """Blocks down, experts across: the share of all tokens that chose the expert."""
    layers = [layer for layer in range(rec.num_layers) if refusal(rec, layer) is None]
    if not layers:
        return refusal(rec, 0) or Refusal("No block has a router.")
    widest = max(num_experts(rec, layer) for layer in layers)
    values = np.full((len(layers), widest), np.nan, dtype=np.float32)
    for row, layer in enumerate(layers):
        counts = load(rec, layer)
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


def margins(rec: Recorded, chosen: Selection) -> Curves | Refusal:
    """Per token, how far the last chosen expert was ahead of the first rejected one."""
    if (reason := refusal(rec, chosen.block)) is not None:
        return reason
    if ("router_margin", chosen.block) not in rec:
        return missing(rec, "router_margin", chosen.block)
    values = array(rec, "router_margin", chosen.block)
    return Curves(
        title="margin: last chosen minus first rejected score",
        x=token_axis(rec),
        unit="score",
        lines=(Curve("router_margin", values, "router"),),
        note="Near zero, a breath would have sent the token elsewhere.",
    )


@dataclass(frozen=True)
class Slot:
    """One routing slot of one token."""

    expert: int
    weight: float


def slots_of(rec: Recorded, chosen: Selection) -> tuple[Slot, ...]:
    """The experts of the chosen token with their multipliers, in slot order."""
    experts = array(rec, "expert_indices", chosen.block)[chosen.token]
    weights = array(rec, "expert_weights", chosen.block)[chosen.token]
    return tuple(Slot(int(expert), float(weight)) for expert, weight in zip(experts, weights))


def unused(rec: Recorded, layer: int) -> tuple[int, ...]:
    """Experts of a block that no token of the prompt chose."""
    return tuple(int(expert) for expert in np.flatnonzero(load(rec, layer) == 0))
