"""Which heads attend to the previous token, and which are induction heads.

Softmax heads are read by their attention probabilities. A Gated DeltaNet head has no attention
pattern; its exact implied attention is used instead, absolute values with each row divided by its
sum, so that the two kinds compare.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import PreTrainedModel

from explorer.recurrence.delta_rule import state_attention

#: (host, layer) -> [batch heads query key]; a row's entries are shares of it.
Patterns = dict[tuple[str, int], Tensor]


def head_metrics(model: PreTrainedModel, windows: Tensor, segments: Tensor) -> dict[str, Any]:
    """Return the strongest head of each kind of mixer, with its mean share and a uniform one.

    ``windows`` [batch, seq] is text, for the previous token. ``segments`` [batch, seq] is repeated
    once, for the induction target: the token after the earlier copy of the present one.
    """
    size = segments.shape[1]
    twice = torch.cat([segments, segments], dim=1)
    found = attention_patterns(model, windows)
    read_as = {
        "linear_attn_read_as": "absolute implied attention, each row divided by its sum; "
        "keys are read after the convolution"
    }
    return {
        "previous_token": _strongest(found, windows.shape[1], distance=1, first=1),
        "induction_target": _strongest(
            attention_patterns(model, twice), 2 * size, distance=size - 1, first=size
        ),
        **(read_as if any(host == "linear_attn" for host, _ in found) else {}),
    }


def _strongest(patterns: Patterns, length: int, distance: int, first: int) -> dict[str, Any]:
    """Return, for each host, the head with the largest mean share ``distance`` tokens back.

    The mean is over the queries ``first`` to ``length`` - 1.
    """
    queries = torch.arange(first, length)
    best: dict[str, Any] = {}
    for (host, layer), pattern in patterns.items():
        shares = pattern[:, :, queries, queries - distance].mean(dim=(0, 2))
        share, head = shares.max(0)
        if host not in best or share > best[host]["share"]:
            best[host] = {"layer": layer, "head": int(head), "share": round(float(share), 4)}
    best["even_share"] = round(float((1.0 / (queries + 1)).mean()), 4)
    return best


def attention_patterns(model: PreTrainedModel, ids: Tensor) -> Patterns:
    """Return the attention pattern of every block on ``ids`` [batch, seq].

    The model must use eager attention.
    """
    with _MixerInputs(model) as inputs, torch.no_grad():
        attentions = iter(model(ids, use_cache=False, output_attentions=True).attentions)
        patterns: Patterns = {}
        for index, layer in enumerate(model.model.layers):
            if index in inputs.by_layer:
                weights = implied_attention(layer.linear_attn, inputs.by_layer[index]).abs()
                patterns["linear_attn", index] = weights / weights.sum(-1, keepdim=True).clamp_min(
                    1e-12
                )
            else:
                patterns["self_attn", index] = next(attentions)
    return patterns


class _MixerInputs(ExitStack):
    """While open, collects each DeltaNet mixer's input: ``by_layer[i]`` [batch seq hidden_size]."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.by_layer: dict[int, Tensor] = {}
        for index, layer in enumerate(model.model.layers):
            if hasattr(layer, "linear_attn"):
                handle = layer.linear_attn.register_forward_pre_hook(
                    self._collect(index), with_kwargs=True
                )
                self.callback(handle.remove)

    def _collect(self, index: int) -> Callable[..., None]:
        """Return a hook that stores the input of the mixer of block ``index``."""

        def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
            self.by_layer[index] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

        return hook


def implied_attention(mixer: Any, hidden: Tensor) -> Tensor:
    """Return the implied attention [batch heads query key] of a Qwen3-Next DeltaNet ``mixer``.

    ``hidden`` [batch seq hidden_size] is the mixer's input, without padding and from an empty
    state.
    """
    projected = mixer.fix_query_key_value_ordering(
        mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden)
    )
    queries, keys, values, _, write_logits, steps = projected
    fused = torch.cat([part.flatten(2) for part in (queries, keys, values)], dim=-1).transpose(1, 2)
    mixed = nn.functional.silu(mixer.conv1d(fused)[..., : hidden.shape[1]]).transpose(1, 2)
    queries, keys = (
        part.unflatten(-1, (mixer.num_k_heads, mixer.head_k_dim))
        for part in mixed.split(mixer.key_dim, dim=-1)[:2]
    )
    decays = -mixer.A_log.float().exp() * softplus(steps.float() + mixer.dt_bias)
    return state_attention(queries, keys, decays, write_logits.sigmoid())
