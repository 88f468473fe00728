"""Every checkpoint card against the counts its checkpoint states and the figures known of it."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files

import pytest
import torch

from explorer import accounting, cards

REQUIRED = {
    "qwen3_moe": ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-Coder-480B-A35B-Instruct"],
    "qwen3_next": ["Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Coder-Next"],
    "qwen3_5_moe_text": [
        "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-122B-A10B", "Qwen/Qwen3.5-397B-A17B", "Qwen/Qwen3.6-35B-A3B",
    ],
    "llama": ["HuggingFaceTB/SmolLM2-135M-Instruct"],
}

every_card = pytest.mark.parametrize("id", cards.IDS)


@cache
def built(id: str):
    return accounting.build_meta(cards.config(id))


def test_the_ten_checkpoints_by_family():
    assert {family: cards.family_checkpoints(family) for family in REQUIRED} == REQUIRED
    assert sorted(cards.IDS) == sorted(id for ids in REQUIRED.values() for id in ids)
    assert cards.family_checkpoints("no_such_family") == []


@every_card
def test_computed_count_is_the_stated_one(id):
    """Half of the last digit stated, a whole one where the name covers a vision tower too."""
    card, counted = cards.card(id), accounting.parameters(built(id))
    assert abs(counted["total"] - card.stated_parameters) <= card.stated_within
    assert abs(counted["active"] - card.stated_active) < card.stated_active_within


@every_card
def test_computed_counts_are_those_in_the_name(id):
    """Names round up or down, so less than one of their last digit: 30B-A3B, 480B-A35B, 135M."""
    counted = accounting.parameters(built(id))
    for number, unit in re.findall(r"-(\d+)([BM])\b", id):
        assert abs(counted["total"] - int(number) * {"B": 1e9, "M": 1e6}[unit]) < {"B": 1e9, "M": 1e6}[unit]
    for number in re.findall(r"-A(\d+)B", id):
        assert abs(counted["active"] - int(number) * 1e9) < 1e9


@pytest.mark.parametrize(("id", "written"), [
    ("Qwen/Qwen3-30B-A3B", "30.5 B"), ("Qwen/Qwen3-235B-A22B", "235.1 B"),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "480.2 B"), ("Qwen/Qwen3-Next-80B-A3B-Instruct", "79.7 B"),
    ("Qwen/Qwen3-Coder-Next", "79.7 B"), ("Qwen/Qwen3.6-35B-A3B", "34.7 B"), ("Qwen/Qwen3.5-35B-A3B", "34.7 B"),
])
def test_computed_count_to_three_digits(id, written):
    assert f"{accounting.parameters(built(id))['total'] / 1e9:.1f} B" == written


def test_smollm2_count_is_exact():
    assert accounting.parameters(built("HuggingFaceTB/SmolLM2-135M-Instruct"))["total"] == 134_515_008


@every_card
def test_text_side_plus_vision_tower_reaches_the_name(id):
    """Names of the multimodal checkpoints count the vision tower, which the text model lacks."""
    card = cards.card(id)
    assert (card.stated_counts is not None) == ("3.5-" in id)
    assert (card.wrapper is not None) == (card.family == "qwen3_5_moe_text")
    if card.stated_counts is None:
        return
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig

    with torch.device("meta"):
        tower = modeling.Qwen3_5MoeVisionModel(Qwen3_5MoeVisionConfig(out_hidden_size=card.config["hidden_size"]))
    text = accounting.parameters(built(id))["total"]
    whole = text + sum(parameter.numel() for parameter in tower.parameters())
    assert text < whole < card.stated_parameters + card.stated_within
    assert whole > card.stated_parameters - card.stated_within / 2


@every_card
def test_config_and_model_are_what_the_card_says(id):
    card, config, model = cards.card(id), cards.config(id), built(id)
    assert config.model_type == card.family == model.config.model_type
    assert config.architectures == [card.architecture] == [type(model).__name__]
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} == {config.dtype}
    rope = card.config.get("rope_parameters", card.config)
    assert config.rope_parameters["rope_theta"] == rope["rope_theta"]
    for key, value in card.config.items():
        if key not in ("rope_theta", "partial_rotary_factor", "rope_parameters"):
            assert getattr(config, key) == value, key


def test_a_config_is_fresh_every_time():
    one, other = (cards.config("Qwen/Qwen3.5-35B-A3B") for _ in range(2))
    one.rope_parameters["mrope_section"].append(1)
    one.num_hidden_layers = 1
    assert other.rope_parameters["mrope_section"] == [11, 11, 10]
    assert cards.config("Qwen/Qwen3.5-35B-A3B").num_hidden_layers == 40


@pytest.mark.parametrize(("id", "recurrent", "attention"), [
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", 36, 12), ("Qwen/Qwen3-Coder-Next", 36, 12), ("Qwen/Qwen3.5-35B-A3B", 30, 10),
    ("Qwen/Qwen3.5-122B-A10B", 36, 12), ("Qwen/Qwen3.5-397B-A17B", 45, 15), ("Qwen/Qwen3.6-35B-A3B", 30, 10),
])
def test_every_fourth_block_is_attention(id, recurrent, attention):
    kinds = cards.config(id).layer_types
    assert (kinds.count("linear_attention"), kinds.count("full_attention")) == (recurrent, attention)
    assert all(kind == "full_attention" for kind in kinds[3::4])


@pytest.mark.parametrize(("id", "figures"), [
    ("Qwen/Qwen3-30B-A3B", "48 2048 32 4 128 6144 128 8 768 151936 40960 1e6"),
    ("Qwen/Qwen3-235B-A22B", "94 4096 64 4 128 12288 128 8 1536 151936 40960 1e6"),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "62 6144 96 8 128 8192 160 8 2560 151936 262144 1e7"),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", "48 2048 16 2 256 5120 512 10 512 151936 262144 1e7"),
    ("Qwen/Qwen3-Coder-Next", "48 2048 16 2 256 5120 512 10 512 151936 262144 5e6"),
    ("Qwen/Qwen3.5-35B-A3B", "40 2048 16 2 256 - 256 8 512 248320 262144 1e7"),
    ("Qwen/Qwen3.5-122B-A10B", "48 3072 32 2 256 - 256 8 1024 248320 262144 1e7"),
    ("Qwen/Qwen3.5-397B-A17B", "60 4096 32 2 256 - 512 10 1024 248320 262144 1e7"),
    ("Qwen/Qwen3.6-35B-A3B", "40 2048 16 2 256 - 256 8 512 248320 262144 1e7"),
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "30 576 9 3 64 1536 - - - 49152 8192 1e5"),
])
def test_figures(id, figures):
    config = cards.config(id)
    names = (
        "num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size "
        "num_experts num_experts_per_tok moe_intermediate_size vocab_size max_position_embeddings"
    ).split()
    *numbers, theta = figures.split()
    for name, number in zip(names, numbers, strict=True):
        assert getattr(config, name, None) == (None if number == "-" else int(number)), name
    assert config.rope_parameters["rope_theta"] == float(theta)


@pytest.mark.parametrize(("asked", "nearest"), [
    ("Qwen/Qwen3-30B-A3", ["Qwen/Qwen3-30B-A3B"]),
    ("qwen3-coder-next", ["Qwen/Qwen3-Coder-Next"]),
    ("Qwen/Qwen3.5-397B-A17", ["Qwen/Qwen3.5-397B-A17B"]),
    ("SmolLM2-135M", ["HuggingFaceTB/SmolLM2-135M-Instruct"]),
    ("Qwen/Qwen3-30B-A3B-Instruct-2507", ["Qwen/Qwen3-30B-A3B"]),
])
def test_a_misspelt_id_gets_the_nearest(asked, nearest):
    with pytest.raises(cards.UnknownCheckpoint) as caught:
        cards.config(asked)
    assert caught.value.nearest == nearest
    assert str(caught.value) == f"No checkpoint card is called {asked!r}: did you mean {nearest[0]}?"


def test_an_id_like_no_other_gets_the_list_in_one_line():
    with pytest.raises(cards.UnknownCheckpoint) as caught:
        cards.card("<b>\n" + "x" * 500)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert all(id in str(caught.value) for id in cards.IDS)


def text_of(id: str = "Qwen/Qwen3-30B-A3B") -> dict:
    found = [json.loads(file.read_text()) for file in files(cards).iterdir() if file.name.endswith(".json")]
    return next(one for one in found if one["id"] == id)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"stated": None}, "card x.json has a value of the wrong kind for 'stated': None"),
    ({"stated": "30,5B"}, "card x.json: a count is written like 30.5B or 135M, not '30,5B'"),
    ({"place": True}, "wrong kind for 'place'"),
    ({"config": []}, "wrong kind for 'config'"),
    ({"wrapper": 3}, "wrong kind for 'wrapper'"),
    ({"parameters": 3}, "card x.json has an unknown key 'parameters'"),
    ({"family": ...}, "card x.json lacks 'family'"),
])
def test_a_card_is_checked_when_it_is_read(change, sentence):
    raw = {**text_of(), **change}
    raw = {key: value for key, value in raw.items() if value is not ...}
    with pytest.raises(cards.CardError, match=sentence.replace(".", r"\.")):
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


def test_cards_are_small_and_say_where_their_counts_stand():
    for file in files(cards).iterdir():
        if file.name.endswith(".json"):
            assert len(file.read_bytes()) < 2000
    assert all(card.stated_in and card.title for card in cards.all_cards())
