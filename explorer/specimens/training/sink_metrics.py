"""How much of its attention every head gives its learned sink, and where.

A sink is one more logit of the softmax without a key, so a row of the returned attention
probabilities falls short of one by exactly the sink's share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from explorer.specimens.training.head_metrics import attention_patterns


def sink_metrics(
    model: PreTrainedModel, untrained: PreTrainedModel, windows: Tensor, segments: Tensor
) -> dict[str, Any] | None:
    """Return every head's share for its sink, beside a uniform one; None where there are no sinks.

    On text, ``windows`` [batch, seq]: the mean over all tokens, over a window's first token and
    over the later ones; and, for comparison, what the later ones give that first token as a key.
    On ``segments`` [batch, seq], repeated once: over the tokens of each copy. The uniform share is
    the sink's where it and every visible key get the same. ``untrained`` is the model before
    training. Lists are by head. The models must use eager attention.
    """
    if not attentions_with_sinks(model):
        return None
    before, size = attentions_with_sinks(untrained), segments.shape[1]
    text = attention_patterns(model, windows)
    copies = attention_patterns(model, torch.cat([segments, segments], dim=1))
    layers = []
    for layer, attention in attentions_with_sinks(model).items():
        window, of_text, of_copies = (
            attention.sliding_window,
            text["self_attn", layer],
            copies["self_attn", layer],
        )
        sees_first = slice(1, window)  # the later tokens whose window includes the first one
        layers.append(
            {
                "layer": layer,
                "attention": attention.layer_type,
                "sinks_before_training": _rounded(before[layer].sinks),
                "sinks": _rounded(attention.sinks),
                "all_tokens": _mean_share(sink_shares(of_text), window, slice(None)),
                "first_token": _mean_share(sink_shares(of_text), window, slice(1)),
                "later_tokens": _mean_share(sink_shares(of_text), window, slice(1, None)),
                "to_first_token": _mean_share(of_text[..., 0], window, sees_first),
                "first_copy": _mean_share(sink_shares(of_copies), window, slice(1, size)),
                "second_copy": _mean_share(sink_shares(of_copies), window, slice(size + 1, None)),
            }
        )
    return {
        "tokens": windows.numel(),
        "layers": layers,
        "strongest": _strongest(layers),
        "most_freed": _most_freed(layers),
    }


def attentions_with_sinks(model: PreTrainedModel) -> dict[int, Any]:
    """Return the attention modules that have learned sinks, by layer."""
    found = {
        index: getattr(layer, "self_attn", None) for index, layer in enumerate(model.model.layers)
    }
    return {index: attention for index, attention in found.items() if hasattr(attention, "sinks")}


def sink_shares(pattern: Tensor) -> Tensor:
    """Return what the rows of ``pattern`` [..., query, key] lack to one: [..., query], float64."""
    return 1 - pattern.double().sum(-1)


def uniform_shares(length: int, window: int | None) -> Tensor:
    """Return the sink's share [seq] where it and every visible key get the same."""
    visible_keys = torch.arange(1, length + 1).clamp(max=window or length)
    return 1.0 / (visible_keys + 1)


def _mean_share(shares: Tensor, window: int | None, where: slice) -> dict[str, Any]:
    """Return the mean of ``shares`` [batch, heads, query] by head, over the batch and the positions
    ``where``, beside the uniform share there.
    """
    uniform = uniform_shares(shares.shape[-1], window)
    return {
        "share": _rounded(shares[..., where].mean((0, 2))),
        "even_share": _rounded(uniform[where].mean()),
    }


def _strongest(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the head that gives its sink most, over all tokens of the text."""
    layer, head = _best(layers, lambda layer, head: layer["all_tokens"]["share"][head])
    by_position = {kind: layer[kind]["share"][head] for kind in ("first_token", "later_tokens")}
    all_tokens = layer["all_tokens"]
    return {
        "layer": layer["layer"],
        "head": head,
        "share": all_tokens["share"][head],
        "even_share": all_tokens["even_share"],
        **by_position,
    }


def _most_freed(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the head whose share for its sink drops most where there is an earlier copy."""
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


def _best(
    layers: list[dict[str, Any]], score: Callable[[dict[str, Any], int], float]
) -> tuple[dict[str, Any], int]:
    """Return the layer and the head of the highest score."""
    heads = [(layer, head) for layer in layers for head in range(len(layer["sinks"]))]
    return max(heads, key=lambda pair: score(*pair))


def _rounded(numbers: Tensor) -> Any:
    """Return a list of numbers of four decimals, or one number where ``numbers`` has no axis."""
    return [round(x, 4) for x in numbers.tolist()] if numbers.dim() else round(numbers.item(), 4)
