"""Recorded values against an oracle that shares nothing with discovery: the modules of transformers
by torch's own hooks, and arithmetic from the weights.
"""

from __future__ import annotations

import pytest
import torch

from explorer import load
from explorer.contract.comparisons import difference
from tests.support.models import ids
from tests.support.oracle import observed
from tests.support.oracle_values import Names, values_of_block, values_of_model

NAMES = {
    "llama": Names(),
    "gpt2": Names(
        blocks="transformer.h",
        embedding="transformer.wte",
        final_norm="transformer.ln_f",
        first_norm="ln_1",
        second_norm="ln_2",
        attention="attn",
        attention_addend="attn",
        projection="c_proj",
        activation="act",
        down="c_proj",
    ),
    "gemma2": Names(
        attention_addend="post_attention_layernorm",
        second_norm="pre_feedforward_layernorm",
        mlp_addend="post_feedforward_layernorm",
    ),
    "granite": Names(
        scale=(
            ("self_attn.attention_output", "residual_multiplier"),
            ("mlp.mlp_output", "residual_multiplier"),
        )
    ),
    "olmo2": Names(
        first_norm="",
        second_norm="",
        attention_addend="post_attention_layernorm",
        mlp_addend="post_feedforward_layernorm",
    ),
    "cohere": Names(parallel=True),
    "qwen3_moe": Names(),
    "gpt_oss": Names(router="router"),
    "deepseek_v3": Names(shared="shared_experts"),
    "qwen3_next": Names(mixer="linear_attn", mixer_host="linear_attn", shared="shared_expert"),
    "mamba2": Names(
        blocks="backbone.layers",
        embedding="backbone.embeddings",
        final_norm="backbone.norm_f",
        first_norm="norm",
        mixer="mixer",
        mixer_host="ssd",
    ),
    "mamba": Names(
        blocks="backbone.layers",
        embedding="backbone.embeddings",
        final_norm="backbone.norm_f",
        first_norm="norm",
        mixer="mixer",
        mixer_host="selective_scan",
    ),
    "falcon_h1": Names(
        final_norm="model.final_layernorm",
        second_norm="pre_ff_layernorm",
        mlp="feed_forward",
        mlp_addend="feed_forward",
        mixer="mamba",
        mixer_host="ssd",
        scale=(
            ("self_attn.attention_output", "attention_out_multiplier"),
            ("ssd.attention_output", "ssm_out_multiplier"),
        ),
    ),
    "lfm2": Names(
        final_norm="model.embedding_norm",
        first_norm="operator_norm",
        second_norm="ffn_norm",
        projection="out_proj",
        mlp="feed_forward",
        mlp_addend="feed_forward",
        down="w2",
        mixer="conv",
        mixer_host="short_conv",
    ),
}

#: Rounding, and kernels that work in chunks beside a recurrence that goes token by token.
TOLERANCE = 2e-5


#: What the oracle has nothing for: a tuple of sizes, None on a fresh prompt.
LEFT = {"model.input_size", "linear_attn.state_input", "ssd.state_input"}
LEFT |= {"selective_scan.state_input"}


@pytest.mark.parametrize("family", NAMES)
def test_recorded_values_are_what_an_independent_witness_saw(family):
    model = load(f"specimen:{family}")
    tokens = ids(model)
    tokens = torch.cat([tokens, tokens.flip(1)])
    forward = observed(model.hf, tokens)
    expected = [(name, None, value) for name, value in values_of_model(forward, NAMES[family])]
    for layer in range(model.num_layers):
        found = values_of_block(forward, NAMES[family], layer)
        expected += [(name, layer, value) for name, value in found]
    rows = [row for row in model.support() if row.available and row.name != "state"]
    recording = model.record(tokens, [f"{row.host}.{row.name}" for row in rows])
    for name, layer, value in expected:
        assert (name, layer) in recording, (name, layer, recording.why(name, layer))
        served, value = comparable(name, recording[name, layer], value)
        assert served.shape == value.shape, (name, layer, served.shape, value.shape)
        assert torch.equal(served.isinf(), value.isinf()), (name, layer)
        assert difference(served, value) <= TOLERANCE, (name, layer, difference(served, value))
    seen = {(name, layer) for name, layer, _ in expected}
    for row in rows:
        bare = row.name if row.host in ("model", "layers") else f"{row.host}.{row.name}"
        for layer in [None] if row.host == "model" else row.layers:
            assert (bare, layer) in seen or f"{row.host}.{row.name}" in LEFT, (bare, layer)


def comparable(
    name: str, served: torch.Tensor, expected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both in float32; what is masked out of scores may be any very negative number."""
    served, expected = served.float(), expected.float()
    if name.endswith("scores"):
        served, expected = (one.masked_fill(one < -1e4, -torch.inf) for one in (served, expected))
    return served, expected
