"""Which heads look at the previous token, and which at what followed last time.

Softmax heads are read by their attention probabilities. A Gated DeltaNet head
has no pattern of its own; its exact implied attention M takes the place, each row
divided by the sum of its absolute entries, so that shares compare.
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

Patterns = dict[
    tuple[str, int], Tensor
]  # (host, layer) -> [batch heads query key], shares of each row


def figures(model: PreTrainedModel, windows: Tensor, segments: Tensor) -> dict[str, Any]:
    """The strongest heads of each kind of mixer: their mean share, and that of an even pattern.

    ``windows`` [batch, seq] is text, for the previous token. ``segments`` [batch, seq] is repeated
    once, for the induction target: the token after the earlier copy of the present one.
    """
    size = segments.shape[1]
    twice = torch.cat([segments, segments], dim=1)
    found = patterns(model, windows)
    read_as = {
        "linear_attn_read_as": "absolute implied attention, each row divided by its sum; "
        "keys stand after the convolution"
    }
    return {
        "previous_token": _strongest(found, windows.shape[1], back=1, first=1),
        "induction_target": _strongest(patterns(model, twice), 2 * size, back=size - 1, first=size),
        **(read_as if any(host == "linear_attn" for host, _ in found) else {}),
    }


def _strongest(found: Patterns, length: int, back: int, first: int) -> dict[str, Any]:
    """The head of each kind with the largest mean share ``back`` positions back.

    Positions before ``first`` are left out.
    """
    queries = torch.arange(first, length)
    best: dict[str, Any] = {}
    for (host, layer), rows in found.items():
        shares = rows[:, :, queries, queries - back].mean(dim=(0, 2))
        share, head = shares.max(0)
        if host not in best or share > best[host]["share"]:
            best[host] = {"layer": layer, "head": int(head), "share": round(float(share), 4)}
    best["even_share"] = round(float((1.0 / (queries + 1)).mean()), 4)
    return best


def patterns(model: PreTrainedModel, rows: Tensor) -> Patterns:
    """Every head's shares on ``rows`` [batch, seq], eager attention assumed."""
    with _Inputs(model) as inputs, torch.no_grad():
        attentions = iter(model(rows, use_cache=False, output_attentions=True).attentions)
        found: Patterns = {}
        for index, layer in enumerate(model.model.layers):
            if index in inputs.seen:
                weights = implied_attention(layer.linear_attn, inputs.seen[index]).abs()
                found["linear_attn", index] = weights / weights.sum(-1, keepdim=True).clamp_min(
                    1e-12
                )
            else:
                found["self_attn", index] = next(attentions)
    return found


class _Inputs(ExitStack):
    """While open, collect each DeltaNet mixer's input: ``seen[layer]`` [batch seq hidden_size]."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}
        for index, layer in enumerate(model.model.layers):
            if hasattr(layer, "linear_attn"):
                handle = layer.linear_attn.register_forward_pre_hook(
                    self._keep(index), with_kwargs=True
                )
                self.callback(handle.remove)

    def _keep(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
            self.seen[index] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

        return hook


def implied_attention(mixer: Any, hidden: Tensor) -> Tensor:
    """M [batch heads query key] of a Qwen3-Next DeltaNet ``mixer`` on a fresh prompt.

    ``hidden`` [batch seq hidden_size] is the mixer's input, without padding.
    """
    parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden))
    queries, keys, values, _, strengths, steps = parts
    fused = torch.cat([part.flatten(2) for part in (queries, keys, values)], dim=-1).transpose(1, 2)
    mixed = nn.functional.silu(mixer.conv1d(fused)[..., : hidden.shape[1]]).transpose(1, 2)
    queries, keys = (
        part.unflatten(-1, (mixer.num_k_heads, mixer.head_k_dim))
        for part in mixed.split(mixer.key_dim, dim=-1)[:2]
    )
    decays = -mixer.A_log.float().exp() * softplus(steps.float() + mixer.dt_bias)
    return state_attention(queries, keys, decays, strengths.sigmoid())
