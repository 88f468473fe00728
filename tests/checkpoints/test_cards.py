"""Every checkpoint card against its model, and against what is published of its counts."""

from __future__ import annotations

import re

import pytest
import torch

from explorer.accounting import counts as accounting
from explorer.checkpoints import cards
from tests.support.card_helpers import REQUIRED, counted, every_card
from tests.support.configs import built

#: Most need a model of each checkpoint's full size, which this file builds once.
pytestmark = pytest.mark.slow


def without(id: str, of: str, parts: tuple[str, ...]) -> int:
    """A count less the parts a statement leaves out of it."""
    rows = {row["part"]: row["count"] for row in counted(id)["by_part"]}
    return counted(id)[of] - sum(rows[part] for part in parts)


def test_the_checkpoints_by_family():
    assert {family: cards.family_checkpoints(family) for family in REQUIRED} == REQUIRED
    assert sorted(cards.IDS) == sorted(id for ids in REQUIRED.values() for id in ids)
    assert cards.family_checkpoints("no_such_family") == []


@every_card
def test_config_and_model_are_what_the_card_says(id):
    card, config, model = cards.card(id), cards.config(id), built(id)
    assert config.model_type == card.family == model.config.model_type
    assert config.architectures == [card.architecture] == [type(model).__name__]
    assert {p.device.type for p in model.parameters()} == {"meta"}
    # Some routers and decays stay in float32 whatever the model's dtype.
    assert (
        sum(p.numel() for p in model.parameters() if p.dtype != torch.bfloat16)
        < counted(id)["total"] / 1000
    )
    assert config.dtype == getattr(torch, card.dtype)
    for key, value in card.config.items():
        if key in ("rope_theta", "partial_rotary_factor"):
            assert config.rope_parameters[key] == value, key
        elif key == "rope_parameters":
            assert value.items() <= config.rope_parameters.items()
        else:
            assert getattr(config, key) == value, key


@every_card
def test_a_forward_runs_and_every_block_that_mixes_tokens_keeps_something(id):
    config, seen = cards.config(id), accounting.run(built(id))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    assert [owner.layer for owner in seen.owners if owner.attends] == [
        layer
        for layer, kind in enumerate(kinds)
        if kind in ("full_attention", "sliding_attention", "hybrid")
    ]
    assert [owner.layer for owner in seen.owners if not owner.attends] == [
        layer for layer, kind in enumerate(kinds) if kind in ("linear_attention", "conv", "hybrid")
    ]


@every_card
def test_computed_count_is_the_stated_one(id):
    """Half of the last digit stated, a whole one where the name covers a vision tower too."""
    card = cards.card(id)
    assert (
        abs(without(id, "total", card.stated_without) - card.stated_parameters)
        <= card.stated_within
    )
    assert (
        abs(without(id, "active", card.active_without) - card.stated_active)
        < card.stated_active_within
    )


@every_card
def test_dense_checkpoints_use_every_parameter(id):
    card = cards.card(id)
    dense = "routed experts" not in [row["part"] for row in counted(id)["by_part"]]
    assert (
        dense
        == (counted(id)["active"] == counted(id)["total"])
        == (card.active_text == card.total_text)
    )


@pytest.mark.parametrize("id", [card.id for card in cards.all_cards() if card.active_without])
def test_a_count_that_leaves_something_out_does_not_fit_with_it(id):
    card = cards.card(id)
    within = (card.stated_within, card.stated_active_within / 2)
    stated = (card.stated_parameters, card.stated_active)
    left_out = (
        without(id, "total", card.stated_without),
        without(id, "active", card.active_without),
    )
    whole = (counted(id)["total"], counted(id)["active"])
    assert all(
        abs(number - said) <= most
        for number, said, most in zip(left_out, stated, within, strict=True)
    )
    assert not all(
        abs(number - said) <= most for number, said, most in zip(whole, stated, within, strict=True)
    )
    assert set(card.stated_without) <= set(card.active_without) <= set(accounting.PARTS)


@every_card
def test_computed_counts_are_those_in_the_name(id):
    """Names round, by a sixteenth at most: 30B-A3B, 480B-A35B, 135M, 7B, 16B."""
    for number, unit in re.findall(r"-([\d.]+)([BMbm])\b", id):
        named = float(number) * {"B": 1e9, "M": 1e6}[unit.upper()]
        within = max({"B": 1e9, "M": 1e6}[unit.upper()] if "." not in number else 0, named / 16)
        assert abs(counted(id)["total"] - named) < within
    for number in re.findall(r"-A(\d+)B", id):
        assert abs(counted(id)["active"] - int(number) * 1e9) < 1e9


@pytest.mark.parametrize(
    ("id", "said"),
    [
        # What reports and model cards split their counts into.
        (
            "openai/gpt-oss-120b",
            {"routed experts + router": "114.71", "attention": "0.96", "embedding + head": "1.16"},
        ),
        (
            "openai/gpt-oss-20b",
            {"routed experts + router": "19.12", "attention": "0.64", "embedding + head": "1.16"},
        ),
        ("google/gemma-2-2b", {"attention + dense mlp + norms": "2.024517888"}),
        ("google/gemma-2-9b", {"attention + dense mlp + norms": "8.324201984"}),
        ("google/gemma-2-27b", {"attention + dense mlp + norms": "26.047480320"}),
        ("EleutherAI/pythia-160m", {"attention + dense mlp + norms": "0.085056000"}),
        ("bigscience/bloom-560m", {"embedding": "0.256901120"}),
        ("bigscience/bloom", {"embedding": "3.596615680"}),
        (
            "google/recurrentgemma-2b",
            {"attention + mixer + dense mlp + norms": "2.0", "embedding": "0.7"},
        ),
        ("deepseek-ai/DeepSeek-V3", {"embedding": "0.9", "head": "0.9"}),
    ],
)
def test_parts_are_those_published(id, said):
    rows = {row["part"]: row["count"] for row in counted(id)["by_part"]}
    for parts, billions in said.items():
        digits = len(billions.partition(".")[2])
        assert f"{sum(rows[part] for part in parts.split(' + ')) / 1e9:.{digits}f}" == billions, (
            parts
        )


@pytest.mark.parametrize(
    ("id", "number"),
    [
        ("openai-community/gpt2", 124_439_808),
        ("openai-community/gpt2-xl", 1_557_611_200),
        ("facebook/opt-125m", 125_239_296),
        ("EleutherAI/gpt-j-6b", 6_050_882_784),
        ("facebook/opt-6.7b", 6_658_473_984),
        ("google/gemma-2-2b", 2_614_341_888),
        ("ibm-granite/granite-3.0-8b-base", 8_170_848_256),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("state-spaces/mamba-2.8b-hf", 2_768_345_600),
    ],
)
def test_counts_to_the_last_parameter(id, number):
    assert counted(id)["total"] == number


def test_what_gpt_j_counts_eight_times():
    """Its card's count has eight copies of every norm, of the MLP's output bias and of a bias of
    the embedding.
    """
    width, blocks = 4096, 28
    norms, biases, embedding = 2 * (blocks + 1) * width, blocks * width, width
    assert (
        counted("EleutherAI/gpt-j-6b")["total"] + 7 * (norms + biases) + 8 * embedding
        == 6_053_381_344
    )


@pytest.mark.parametrize(
    ("id", "written"),
    [
        ("Qwen/Qwen3-30B-A3B", "30.5 B"),
        ("Qwen/Qwen3-235B-A22B", "235.1 B"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "480.2 B"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "79.7 B"),
        ("Qwen/Qwen3-Coder-Next", "79.7 B"),
        ("Qwen/Qwen3.6-35B-A3B", "34.7 B"),
        ("Qwen/Qwen3.5-35B-A3B", "34.7 B"),
    ],
)
def test_computed_count_to_three_digits(id, written):
    assert f"{counted(id)['total'] / 1e9:.1f} B" == written


def test_smollm2_count_is_exact():
    assert counted("HuggingFaceTB/SmolLM2-135M-Instruct")["total"] == 134_515_008


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
        tower = modeling.Qwen3_5MoeVisionModel(
            Qwen3_5MoeVisionConfig(out_hidden_size=card.config["hidden_size"])
        )
    text = counted(id)["total"]
    whole = text + sum(parameter.numel() for parameter in tower.parameters())
    assert text < whole < card.stated_parameters + card.stated_within
    assert whole > card.stated_parameters - card.stated_within / 2
