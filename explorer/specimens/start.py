"""Where training starts. The recipe's plain random numbers, with a few placed so that copying is in reach.

A small model finds "what followed this token last time?" only after very many
steps from a plain random start. These choices shorten that wait; everything is
trained from there on.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

EMBEDDING_STD = 0.5
SUBLAYER_OUTPUTS = ("out_proj.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj")
OUTPUT_SHARE = 0.1  # what every sublayer first adds is small beside the embedding
CONVOLUTION_SHARE = 0.3


@torch.no_grad()
def place(model: PreTrainedModel, std: float) -> None:
    """Changes the freshly drawn parameters of a Qwen3-Next ``model`` in place; matrices have deviation ``std``."""
    embedding = model.model.embed_tokens.weight
    model.lm_head.weight.copy_(embedding)  # a token read is at first the token said
    embedding.mul_(EMBEDDING_STD / std)
    for name, parameter in model.named_parameters():
        if name.endswith(SUBLAYER_OUTPUTS):
            parameter.mul_(OUTPUT_SHARE)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            _align(layer.linear_attn)


def _align(mixer: torch.nn.Module) -> None:
    """Keys start as queries do but one token late: a query meets the key of the token after its own."""
    width, keys = mixer.head_k_dim, mixer.key_dim
    fused = mixer.in_proj_qkvz.weight.view(mixer.num_k_heads, -1, mixer.hidden_size)
    fused[:, width : 2 * width] = fused[:, :width]
    taps = mixer.conv1d.weight[:, 0]  # [channels, taps]; channels are queries, keys, values; the last tap is now
    taps.mul_(CONVOLUTION_SHARE)
    taps[:keys, -1] += 1
    taps[keys : 2 * keys, -2] += 1
    taps[2 * keys :, -1] += 1
