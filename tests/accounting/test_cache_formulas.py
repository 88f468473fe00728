"""Sizes of caches and states against hand arithmetic and against the tensors transformers really
keeps.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoConfig

from explorer.accounting import counts as accounting
from explorer.accounting.cache_formulas import figure
from explorer.checkpoints import cards
from explorer.meta_device import build_meta
from explorer.specimens.small import small_config
from tests.support.configs import FAMILIES, TWENTY, built, small

#: The blocks, then the axes, then bytes, of one checkpoint of each kind of cache.
BY_HAND = [
    # One latent of 512 and a rotary key of 64 for all heads.
    ("deepseek-ai/DeepSeek-V3", ["61 × 576 × 2"]),
    (
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        ["20 × 32 × 128 × 128 × 4", "20 × 12288 × 4 × 2", "7 × 576 × 2"],
    ),
    ("openai/gpt-oss-20b", ["12 × 2 × 8 × 64 × 2", "12 × 2 × 8 × 64 × 2"]),
    ("state-spaces/mamba-130m-hf", ["24 × 1536 × 16 × 4", "24 × 1536 × 4 × 2"]),
    ("mistralai/Mamba-Codestral-7B-v0.1", ["64 × 128 × 64 × 128 × 4", "64 × 10240 × 4 × 2"]),
    (
        "tiiuae/Falcon-H1-0.5B-Base",
        ["36 × 2 × 2 × 64 × 2", "36 × 24 × 64 × 128 × 4", "36 × 1792 × 4 × 2"],
    ),
    ("google/recurrentgemma-2b", ["18 × 2560 × 4", "18 × 2560 × 3 × 2", "8 × 2 × 1 × 256 × 2"]),
    ("LiquidAI/LFM2-1.2B", ["10 × 2048 × 3 × 2", "6 × 2 × 8 × 64 × 2"]),
]

#: One checkpoint of each other family that has a card.
MEASURED = [
    card.id for card in cards.all_cards() if card.place == 1 and card.id not in dict(BY_HAND)
]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 3), (3, 11)])
def test_sizes_are_those_of_the_cache_transformers_makes(family, batch, tokens):
    model = build_meta(small(family))
    assert accounting.cache_bytes(model, tokens, batch) == accounting.measured_cache_bytes(
        model, tokens, batch
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", TWENTY)
def test_sizes_of_the_twenty_are_those_really_kept(family):
    model, batch, tokens = build_meta(small_config(family)), 3, 11
    assert accounting.cache_bytes(model, tokens, batch) == accounting.measured_cache_bytes(
        model, tokens, batch
    )


@pytest.mark.slow
@pytest.mark.parametrize("id", MEASURED)
def test_sizes_at_the_released_size(id):
    model = built(id)
    assert accounting.cache_bytes(model, 5, 1) == accounting.measured_cache_bytes(model, 5, 1)


@pytest.mark.slow
def test_sizes_of_a_hybrid_by_hand():
    found = {
        row["name"]: row for row in accounting.cache_sizes(cards.config("Qwen/Qwen3.5-35B-A3B"))
    }
    keys, state, history = (
        found[name] for name in ("keys and values", "recurrent state", "convolution inputs")
    )
    assert keys["per_token_bytes"] == 10 * 2 * 2 * 256 * 2 and keys["fixed_bytes"] is None
    assert keys["layers"] == list(range(3, 40, 4))
    assert (
        state["fixed_bytes"] == 30 * 2 * 2**20 and state["per_token_bytes"] is None
    )  # 2 MiB in each block
    assert state["dtype"] == "float32" and history["dtype"] == "bfloat16"
    assert history["fixed_bytes"] == 30 * 8192 * 4 * 2


@pytest.mark.slow
@pytest.mark.parametrize("id", [*MEASURED, *dict(BY_HAND)])
def test_formula_numbers_and_bytes_agree(id):
    for row in accounting.cache_sizes(built(id)):
        named = {generic["name"]: generic["number"] for generic in row["generics"]}
        filled = [named.get(symbol, symbol) for symbol in row["formula"].split(" × ")]
        assert " × ".join(map(str, filled)) == row["numbers"]
        assert math.prod(map(int, filled)) == (row["per_token_bytes"] or row["fixed_bytes"])
        assert all(generic["source"] for generic in row["generics"])
        assert "read off the cache" not in [generic["source"] for generic in row["generics"]]
        json.dumps(row)


@pytest.mark.parametrize(("id", "numbers"), BY_HAND)
def test_sizes_by_kind_of_block(id, numbers):
    assert [row["numbers"] for row in accounting.cache_sizes(built(id))] == numbers


def test_sources_are_worked_out():
    config = AutoConfig.for_model("gpt2", n_embd=48, n_head=6)
    assert figure(config, "hidden_size ÷ num_attention_heads") == 8
    assert figure(config, "2 × hidden_size + 3 × num_attention_heads - 1") == 113
    assert (
        figure(config, "hidden_size ÷ 5") is figure(config, "hidden_size × no_such_figure") is None
    )
    assert figure(small_config("gemma4_text"), "head_dim") is None  # one for each block


def test_sizes_follow_the_dtype():
    half, single = (
        accounting.cache_bytes(small("llama"), 5, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert single == 2 * half
    assert accounting.cache_bytes(build_meta(small("llama"), dtype=torch.float32), 5) == single


def test_a_window_bounds_the_cache():
    config = small("mistral")
    (row,) = accounting.cache_sizes(config)
    assert row["tokens_at_most"] == 4 and "window of 5" in row["note"]
    assert accounting.cache_bytes(config, 4) == accounting.cache_bytes(config, 400)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("rwkv", "nothing"),
        ("deepseek_v32", "indexer_keys"),
        ("cpmant", r"keys of \d+ positions .* \d+ tokens"),
    ],
)
def test_an_unknown_cache_is_not_guessed(family, named):
    with pytest.raises(ValueError, match=named):
        accounting.cache_sizes(small_config(family))
