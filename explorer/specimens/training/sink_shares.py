"""How much of its attention every head gives its learned sink, and where.

A sink takes part in the softmax and is no key, so the weights of a row that the
module returns lack to one exactly what the sink got.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from explorer.specimens.training import heads


def figures(
    model: PreTrainedModel, untrained: PreTrainedModel, windows: Tensor, segments: Tensor
) -> dict[str, Any] | None:
    """What every head gives its sink, beside an even share; None for a family without sinks.

    On ``windows`` [batch, seq] of text: by all tokens, by a window's first token and by the later
    ones; and, for comparison, what the later ones give that first token as a key. On ``segments``
    [batch, seq], repeated once: by the tokens of each copy. The even share is the sink's where it
    is one more key and every visible key gets the same. ``untrained`` is the same model before
    training. Lists are by head; eager attention is assumed.
    """
    if not sinks(model):
        return None
    before, size = sinks(untrained), segments.shape[1]
    text = heads.patterns(model, windows)
    copies = heads.patterns(model, torch.cat([segments, segments], dim=1))
    layers = []
    for layer, attention in sinks(model).items():
        window, of_text, of_copies = (
            attention.sliding_window,
            text["self_attn", layer],
            copies["self_attn", layer],
        )
        near = slice(1, window)  # the later tokens that have the first one in sight
        layers.append(
            {
                "layer": layer,
                "attention": attention.layer_type,
                "sinks_before_training": _short(before[layer].sinks),
                "sinks": _short(attention.sinks),
                "all_tokens": _given(to_sink(of_text), window, slice(None)),
                "first_token": _given(to_sink(of_text), window, slice(1)),
                "later_tokens": _given(to_sink(of_text), window, slice(1, None)),
                "to_first_token": _given(of_text[..., 0], window, near),
                "first_copy": _given(to_sink(of_copies), window, slice(1, size)),
                "second_copy": _given(to_sink(of_copies), window, slice(size + 1, None)),
            }
        )
    return {
        "tokens": windows.numel(),
        "layers": layers,
        "strongest": _strongest(layers),
        "most_freed": _most_freed(layers),
    }


def sinks(model: PreTrainedModel) -> dict[int, Any]:
    """The attentions that have learned sinks, by layer."""
    found = {
        index: getattr(layer, "self_attn", None) for index, layer in enumerate(model.model.layers)
    }
    return {index: attention for index, attention in found.items() if hasattr(attention, "sinks")}


def to_sink(rows: Tensor) -> Tensor:
    """What the rows of a pattern [..., query, key] leave to the sink: [..., query], float64."""
    return 1 - rows.double().sum(-1)


def even_shares(length: int, window: int | None) -> Tensor:
    """The sink's share at each position [length] where it and every key in sight get the same."""
    in_sight = torch.arange(1, length + 1).clamp(max=window or length)
    return 1.0 / (in_sight + 1)


def _given(shares: Tensor, window: int | None, where: slice) -> dict[str, Any]:
    """Mean over rows and the positions ``where`` of ``shares`` [batch, heads, query], by head."""
    even = even_shares(shares.shape[-1], window)
    return {
        "share": _short(shares[..., where].mean((0, 2))),
        "even_share": _short(even[where].mean()),
    }


def _strongest(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The head that gives its sink most, over all tokens of the text."""
    layer, head = _best(layers, lambda layer, head: layer["all_tokens"]["share"][head])
    found = {kind: layer[kind]["share"][head] for kind in ("first_token", "later_tokens")}
    whole = layer["all_tokens"]
    return {
        "layer": layer["layer"],
        "head": head,
        "share": whole["share"][head],
        "even_share": whole["even_share"],
        **found,
    }


def _most_freed(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The head that takes most back from its sink once there is an earlier copy to look at."""
    layer, head = _best(
        layers,
        lambda layer, head: (
            layer["first_copy"]["share"][head] - layer["second_copy"]["share"][head]
        ),
    )
    return {
        "layer": layer["layer"],
        "head": head,
        **{kind: layer[kind]["share"][head] for kind in ("first_copy", "second_copy")},
    }


def _best(layers: list[dict[str, Any]], worth: Any) -> tuple[dict[str, Any], int]:
    every = [(layer, head) for layer in layers for head in range(len(layer["sinks"]))]
    return max(every, key=lambda one: worth(*one))


def _short(numbers: Tensor) -> Any:
    """A list of short numbers, or one where there is one."""
    return [round(x, 4) for x in numbers.tolist()] if numbers.dim() else round(numbers.item(), 4)
