"""Cards as models: configurations, kinds of blocks, figures, and cards that are wrong."""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files

import pytest

from explorer.checkpoints import cards
from tests.support.card_helpers import REQUIRED
from tests.support.configs import built
from tests.support.messages import sentence


def test_a_config_is_fresh_every_time():
    one, other = (cards.config("Qwen/Qwen3.5-35B-A3B") for _ in range(2))
    one.rope_parameters["mrope_section"].append(1)
    one.num_hidden_layers = 1
    assert other.rope_parameters["mrope_section"] == [11, 11, 10]
    assert cards.config("Qwen/Qwen3.5-35B-A3B").num_hidden_layers == 40


@pytest.mark.parametrize(
    ("id", "recurrent", "attention"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 36, 12),
        ("Qwen/Qwen3-Coder-Next", 36, 12),
        ("Qwen/Qwen3.5-35B-A3B", 30, 10),
        ("Qwen/Qwen3.5-122B-A10B", 36, 12),
        ("Qwen/Qwen3.5-397B-A17B", 45, 15),
        ("Qwen/Qwen3.6-35B-A3B", 30, 10),
    ],
)
def test_every_fourth_block_is_attention(id, recurrent, attention):
    kinds = cards.config(id).layer_types
    assert (kinds.count("linear_attention"), kinds.count("full_attention")) == (
        recurrent,
        attention,
    )
    assert all(kind == "full_attention" for kind in kinds[3::4])


@pytest.mark.parametrize(
    ("id", "kinds"),
    [
        ("google/gemma-2-2b", "sliding_attention full_attention " * 13),
        ("openai/gpt-oss-20b", "sliding_attention full_attention " * 12),
        (
            "ai21labs/Jamba-v0.1",
            ("linear_attention " * 4 + "full_attention " + "linear_attention " * 3) * 4,
        ),
        (
            "google/recurrentgemma-2b",
            "linear_attention linear_attention sliding_attention " * 8 + "linear_attention " * 2,
        ),
        (
            "LiquidAI/LFM2-1.2B",
            "conv conv full_attention " * 3 + "conv full_attention " * 3 + "conv",
        ),
        (
            "moonshotai/Kimi-Linear-48B-A3B-Instruct",
            ("linear_attention " * 3 + "full_attention ") * 6
            + "linear_attention " * 2
            + "full_attention",
        ),
    ],
)
def test_kinds_of_blocks_in_their_order(id, kinds):
    assert list(cards.config(id).layer_types) == kinds.split()


@pytest.mark.parametrize(
    ("id", "kinds"),
    [
        ("nvidia/Nemotron-H-8B-Base-8K", {"linear_attention": 24, "mlp": 24, "full_attention": 4}),
        (
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            {"linear_attention": 23, "moe": 23, "full_attention": 6},
        ),
    ],
)
def test_kinds_of_blocks_by_number(id, kinds):
    assert (
        Counter(cards.config(id).layer_types) == kinds and cards.config(id).num_hidden_layers == 52
    )


def test_dense_blocks_come_first():
    """Three of DeepSeek-V3's blocks and one of Moonlight's and of Kimi Linear's have no experts."""
    firsts = {
        "deepseek-ai/DeepSeek-V3": 3,
        "moonshotai/Moonlight-16B-A3B": 1,
        "moonshotai/Kimi-Linear-48B-A3B-Instruct": 1,
    }
    for id, first in firsts.items():
        mixture = [hasattr(block.mlp, "experts") for block in built(id).model.layers]
        assert mixture == [False] * first + [True] * (len(mixture) - first)


@pytest.mark.parametrize(
    ("id", "figures"),
    [
        ("Qwen/Qwen3-30B-A3B", "48 2048 32 4 128 6144 128 8 768 151936 40960 1e6"),
        ("Qwen/Qwen3-235B-A22B", "94 4096 64 4 128 12288 128 8 1536 151936 40960 1e6"),
        (
            "Qwen/Qwen3-Coder-480B-A35B-Instruct",
            "62 6144 96 8 128 8192 160 8 2560 151936 262144 1e7",
        ),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "48 2048 16 2 256 5120 512 10 512 151936 262144 1e7"),
        ("Qwen/Qwen3-Coder-Next", "48 2048 16 2 256 5120 512 10 512 151936 262144 5e6"),
        ("Qwen/Qwen3.5-35B-A3B", "40 2048 16 2 256 - 256 8 512 248320 262144 1e7"),
        ("Qwen/Qwen3.5-122B-A10B", "48 3072 32 2 256 - 256 8 1024 248320 262144 1e7"),
        ("Qwen/Qwen3.5-397B-A17B", "60 4096 32 2 256 - 512 10 1024 248320 262144 1e7"),
        ("Qwen/Qwen3.6-35B-A3B", "40 2048 16 2 256 - 256 8 512 248320 262144 1e7"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "30 576 9 3 64 1536 - - - 49152 8192 1e5"),
    ],
)
def test_figures(id, figures):
    config = cards.config(id)
    names = [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ]
    *numbers, theta = figures.split()
    for name, number in zip(names, numbers, strict=True):
        assert getattr(config, name, None) == (None if number == "-" else int(number)), name
    assert config.rope_parameters["rope_theta"] == float(theta)


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("Qwen/Qwen3-30B-A3", ["Qwen/Qwen3-30B-A3B"]),
        ("qwen3-coder-next", ["Qwen/Qwen3-Coder-Next"]),
        ("Qwen/Qwen3.5-397B-A17", ["Qwen/Qwen3.5-397B-A17B"]),
        ("SmolLM2-135M", ["HuggingFaceTB/SmolLM2-135M-Instruct"]),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", ["Qwen/Qwen3-30B-A3B"]),
    ],
)
def test_a_misspelt_id_gets_the_nearest(asked, nearest):
    with pytest.raises(cards.UnknownCheckpoint) as caught:
        cards.config(asked)
    assert caught.value.nearest == nearest
    wanted = sentence("no_such_card", name=asked, hint=f"did you mean {nearest[0]}?")
    assert wanted.fullmatch(str(caught.value))


def test_an_id_with_no_similar_one_lists_the_families_in_one_line():
    with pytest.raises(cards.UnknownCheckpoint) as caught:
        cards.card("<b>\n" + "x" * 500)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert all(family in str(caught.value) for family in REQUIRED)


def text_of(id: str = "Qwen/Qwen3-30B-A3B") -> dict:
    found = [
        json.loads(file.read_text())
        for file in files(cards).iterdir()
        if file.name.endswith(".json")
    ]
    return next(one for one in found if one["id"] == id)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"stated": None}, "x.json .*'stated': None"),
        ({"stated": "30,5B"}, "x.json.*'30,5B'"),
        ({"stated_active": "1,23"}, "x.json.*'1,23'"),
        ({"active_without": "embedding"}, "x.json.*'active_without'"),
        ({"stated_without": [3]}, "x.json.*'stated_without'"),
        ({"place": True}, "x.json.*'place'"),
        ({"config": []}, "x.json.*'config'"),
        ({"wrapper": 3}, "x.json.*'wrapper'"),
        ({"parameters": 3}, "x.json.*unknown.*'parameters'"),
        ({"family": ...}, "x.json lacks 'family'"),
    ],
)
def test_a_card_is_checked_when_it_is_read(change, named):
    raw = {**text_of(), **change}
    raw = {key: value for key, value in raw.items() if value is not ...}
    with pytest.raises(cards.CardError, match=named):
        cards.parse(json.dumps(raw), "x.json")


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_card_that_is_no_mapping(text):
    with pytest.raises(cards.CardError, match="card x.json is not"):
        cards.parse(text, "x.json")


def test_counts_as_written():
    card = cards.parse(json.dumps(text_of()), "x.json")
    assert (card.stated_parameters, card.stated_active) == (30.5e9, 3.3e9)
    assert card.stated_within == pytest.approx(0.05e9)
    assert card.stated_active_within == pytest.approx(0.1e9)
    assert card.stated_without == card.active_without == ()
    exact = cards.parse(
        json.dumps({**text_of(), "stated": "162,322,944", "active_without": ["embedding"]}),
        "x.json",
    )
    assert (exact.stated_parameters, exact.stated_within, exact.active_without) == (
        162_322_944,
        0.5,
        ("embedding",),
    )


def test_cards_are_small_and_give_the_source_of_their_counts():
    for file in files(cards).iterdir():
        if file.name.endswith(".json"):
            assert len(file.read_bytes()) < 2000
    assert all(card.stated_in and card.title for card in cards.all_cards())
