"""Small configurations and released sizes that tests of counts and sizes share."""

from __future__ import annotations

from functools import cache

from transformers import AutoConfig

from explorer.checkpoints import cards
from explorer.meta_device import build_meta

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 50,
}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 7,
    "shared_expert_intermediate_size": 9,
    "partial_rotary_factor": 0.4,
}


def small(family: str, **kwargs):
    sizes = {
        "llama": {"intermediate_size": 30, **SMALL},
        "mistral": {"intermediate_size": 30, "sliding_window": 5, **SMALL},
        "qwen3_moe": {"intermediate_size": 30, **SMALL, **MIXTURE},
        "qwen3_next": {"intermediate_size": 30, **SMALL, **MIXTURE, **RECURRENT},
        "qwen3_5_moe_text": {**SMALL, **MIXTURE, **RECURRENT},
        "mixtral": {
            "intermediate_size": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            **SMALL,
        },
    }
    return AutoConfig.for_model(family, **{**sizes[family], **kwargs})


FAMILIES = ("llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")

#: Between them every way of mixing tokens and every build of a block there is a card for.
TWENTY = (
    "gpt2",
    "gpt_neox",
    "gptj",
    "bloom",
    "opt",
    "gemma2",
    "olmo2",
    "cohere",
    "granite",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "mamba",
    "mamba2",
    "jamba",
    "nemotron_h",
    "falcon_h1",
    "recurrent_gemma",
    "lfm2",
    "kimi_linear",
)


@cache
def built(id: str):
    """A checkpoint of a card at its released size, on the meta device."""
    return build_meta(cards.config(id))
