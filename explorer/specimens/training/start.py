"""Initial weights: the recipe's random numbers, with a few set so that copying is soon learned.

A small model finds "what followed this token last time?" only after very many
steps from a plain random start. These choices shorten that wait; everything is
trained from there on.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

EMBEDDING_STD = 0.5
SUBLAYER_OUTPUTS = (
    "out_proj.weight",
    "o_proj.weight",
    "down_proj.weight",
    "experts.down_proj",
    "experts.down_proj_bias",
)
OUTPUT_SHARE = 0.1  # what every sublayer first adds is small beside the embedding
CONVOLUTION_SHARE = 0.3
LOOK_BACK = 2.8  # size of the biases that prefer the token before
SLOWEST_TURN = 0.05  # radians a token; a slower pair of channels hardly tells neighbours apart


@torch.no_grad()
def place(model: PreTrainedModel, std: float) -> None:
    """Change the freshly drawn parameters of ``model``, whose matrices have deviation ``std``.

    The token before is brought within reach by the short convolution of a Gated DeltaNet mixer, or
    else by the biases on the first block's queries and keys.
    """
    embedding = model.model.embed_tokens.weight
    model.lm_head.weight.copy_(embedding)  # a token read is at first the token said
    embedding.mul_(EMBEDDING_STD / std)
    for name, parameter in model.named_parameters():
        if name.endswith(SUBLAYER_OUTPUTS):
            parameter.mul_(OUTPUT_SHARE)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            _align(layer.linear_attn)
    first = getattr(model.model.layers[0], "self_attn", None)
    if first is not None and first.q_proj.bias is not None:
        _look_back(first, model.model.rotary_emb.inv_freq)


def _align(mixer: Any) -> None:
    """Start keys as queries of the token before: a query meets the token after its own."""
    width, keys = mixer.head_k_dim, mixer.key_dim
    fused = mixer.in_proj_qkvz.weight.view(mixer.num_k_heads, -1, mixer.hidden_size)
    fused[:, width : 2 * width] = fused[:, :width]
    taps = mixer.conv1d.weight[
        :, 0
    ]  # [channels, taps]; channels are queries, keys, values; the last tap is now
    taps.mul_(CONVOLUTION_SHARE)
    taps[:keys, -1] += 1
    taps[keys : 2 * keys, -2] += 1
    taps[2 * keys :, -1] += 1


def _look_back(attention: Any, turns: torch.Tensor) -> None:
    """The heads that read the first key head start by looking one token back.

    A bias is the same at every token, so what two biases add to a score depends, once rotated by
    ``turns`` [head_dim / 2] (radians a token), on the distance alone. It is largest one token back
    where the query's bias is the key's, turned back by one token.
    """
    sizes = LOOK_BACK * (turns > SLOWEST_TURN)
    key = torch.cat([sizes, torch.zeros_like(sizes)])
    query = torch.cat([sizes * turns.cos(), -sizes * turns.sin()])
    groups = attention.num_key_value_groups
    attention.k_proj.bias[: attention.head_dim] += key
    attention.q_proj.bias[: groups * attention.head_dim] += query.repeat(groups)
