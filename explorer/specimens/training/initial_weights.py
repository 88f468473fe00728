"""Initial weights for training: the recipe's random numbers, a few of them changed so that the
model soon learns to copy.

From a plain random start a small model takes very many steps to form induction heads, which look
up what followed an earlier occurrence of the present token. These changes shorten that; everything
is trained from there on.
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
SUBLAYER_OUTPUT_SCALE = 0.1  # what a sublayer adds is at first small beside the embedding
CONVOLUTION_SCALE = 0.3
PREVIOUS_TOKEN_BIAS = 2.8  # size of the query and key biases that favour the previous token
MIN_FREQUENCY = 0.05  # radians a token; a slower pair of channels hardly distinguishes neighbours


@torch.no_grad()
def prepare(model: PreTrainedModel, std: float) -> None:
    """Change freshly drawn parameters of ``model`` in place; ``std`` is that of its matrices.

    The head starts as a copy of the embedding, sublayers start with small outputs, and the previous
    token is made easy to attend to: by the short convolution of every Gated DeltaNet mixer, or by
    the biases of the first block's queries and keys.
    """
    embedding = model.model.embed_tokens.weight
    model.lm_head.weight.copy_(embedding)  # the likeliest next token is at first the present one
    embedding.mul_(EMBEDDING_STD / std)
    for name, parameter in model.named_parameters():
        if name.endswith(SUBLAYER_OUTPUTS):
            parameter.mul_(SUBLAYER_OUTPUT_SCALE)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            _match_queries_to_previous_keys(layer.linear_attn)
    first = getattr(model.model.layers[0], "self_attn", None)
    if first is not None and first.q_proj.bias is not None:
        _favour_previous_token(first, model.model.rotary_emb.inv_freq)


def _match_queries_to_previous_keys(mixer: Any) -> None:
    """Make a Gated DeltaNet mixer's key at a token about equal to the query of the token before.

    A query then finds the token after an earlier occurrence of its own token, as an induction head
    does. Keys get the queries' projection, and the convolution delays keys by one token.
    """
    width, keys = mixer.head_k_dim, mixer.key_dim
    fused = mixer.in_proj_qkvz.weight.view(mixer.num_k_heads, -1, mixer.hidden_size)
    fused[:, width : 2 * width] = fused[:, :width]
    # [channels, taps]: channels are queries, keys, values; the last tap is the present token.
    taps = mixer.conv1d.weight[:, 0]
    taps.mul_(CONVOLUTION_SCALE)
    taps[:keys, -1] += 1
    taps[keys : 2 * keys, -2] += 1
    taps[2 * keys :, -1] += 1


def _favour_previous_token(attention: Any, frequencies: torch.Tensor) -> None:
    """Make the query heads of the first key head attend to the previous token.

    ``frequencies`` [head_dim / 2] are the rotary ones, in radians a token. A bias is the same at
    every token, so after rotation the two biases add to a score a term of the distance alone. It is
    largest one token back where the query's bias is the key's, rotated back by one token.
    """
    sizes = PREVIOUS_TOKEN_BIAS * (frequencies > MIN_FREQUENCY)
    key = torch.cat([sizes, torch.zeros_like(sizes)])
    query = torch.cat([sizes * frequencies.cos(), -sizes * frequencies.sin()])
    groups = attention.num_key_value_groups
    attention.k_proj.bias[: attention.head_dim] += key
    attention.q_proj.bias[: groups * attention.head_dim] += query.repeat(groups)
