"""Counts of parameters, by part and in use, against hand arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from explorer.accounting import counts as accounting
from explorer.checkpoints import cards
from explorer.meta_device import build_meta
from explorer.specimens.small import small_config
from tests.support.configs import FAMILIES, TWENTY, built, small


def rows(config) -> dict[str, dict]:
    return {row["part"]: row for row in accounting.parameters(build_meta(config))["by_part"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_add_up_to_every_parameter(family):
    model = build_meta(small(family))
    counted = accounting.parameters(model)
    assert (
        counted["total"]
        == sum(p.numel() for p in model.parameters())
        == sum(r["count"] for r in counted["by_part"])
    )
    assert counted["active"] == sum(r["active"] for r in counted["by_part"]) <= counted["total"]
    assert "other" not in [r["part"] for r in counted["by_part"]]
    assert all(r["count"] > 0 for r in counted["by_part"])


@pytest.mark.slow
@pytest.mark.parametrize("family", TWENTY)
def test_parts_of_the_twenty_add_up(family):
    model = build_meta(small_config(family))
    counted = accounting.parameters(model)
    assert (
        counted["total"]
        == sum(p.numel() for p in model.parameters())
        == sum(r["count"] for r in counted["by_part"])
    )
    assert counted["active"] == sum(r["active"] for r in counted["by_part"]) <= counted["total"]
    parts = [r["part"] for r in counted["by_part"]]
    assert "other" not in parts and len(set(parts)) == len(parts)
    assert ("routed experts" in parts) == (counted["active"] < counted["total"])


@pytest.mark.parametrize("id", [card.id for card in cards.all_cards() if card.place == 1])
def test_every_parameter_is_in_one_part(id):
    """The parts of each parameter, counted apart, come to the table; nothing is left over."""
    model = built(id)
    table = {row["part"]: row["count"] for row in accounting.parameters(model)["by_part"]}
    parts = accounting.Parts(model, accounting.run(model))
    count = dict.fromkeys(table, 0)
    for path, parameter in model.named_parameters():
        count[parts.part(path, parameter)] += parameter.numel()
    assert (
        count == table
        and sum(table.values()) == sum(p.numel() for p in model.parameters())
        and "other" not in table
    )


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        # Two tables of embeddings, fused projections with biases, and norms with biases.
        (
            "gpt2",
            {
                "embedding": 64 * (100 + 50),
                "attention": 2 * (64 * 192 + 192 + 64 * 64 + 64),
                "dense mlp": 2 * (2 * 64 * 112 + 112 + 64),
                "norms": 5 * 2 * 64,
            },
        ),
        # An MLP without a module; two more places than positions.
        (
            "opt",
            {
                "embedding": 64 * (100 + 52),
                "attention": 2 * 4 * (64 * 64 + 64),
                "dense mlp": 2 * (2 * 64 * 112 + 112 + 64),
                "norms": 5 * 2 * 64,
            },
        ),
        # Sandwich norms.
        (
            "gemma2",
            {
                "embedding": 100 * 64,
                "attention": 2 * 64 * 16 * (4 + 2 + 2 + 4),
                "dense mlp": 2 * 3 * 64 * 112,
                "norms": 9 * 64,
            },
        ),
    ],
)
def test_parts_of_dense_builds_by_hand(family, parts):
    sizes = {
        "gpt2": {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 2,
            "n_inner": 112,
            "vocab_size": 100,
            "n_positions": 50,
        },
        "opt": {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "ffn_dim": 112,
            "vocab_size": 100,
            "max_position_embeddings": 50,
        },
        "gemma2": {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "intermediate_size": 112,
            "vocab_size": 100,
        },
    }
    found = rows(AutoConfig.for_model(family, **sizes[family]))
    assert {part: row["count"] for part, row in found.items()} == parts
    assert ("token matrix" in found["embedding"]["note"]) == (family in ("gpt2", "opt"))
    assert "also the head" in found["embedding"]["note"]


def test_parts_of_blocks_with_one_sublayer_by_hand():
    found = rows(
        AutoConfig.for_model(
            "nemotron_h",
            hybrid_override_pattern="ME*-",
            hidden_size=64,
            intermediate_size=112,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=12,
            n_groups=2,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=28,
            vocab_size=100,
        )
    )
    conv = 8 * 16 + 2 * 2 * 12
    mixer = 64 * (8 * 16 + conv + 8) + conv * 4 + conv + 3 * 8 + 8 * 16 + 8 * 16 * 64
    assert {part: (row["count"], row["active"]) for part, row in found.items()} == {
        "embedding": (6400, 6400),
        "head": (6400, 6400),
        "attention": (12 * 16 * 64, 12 * 16 * 64),
        "mixer": (mixer, mixer),
        "router": (6 * 64, 6 * 64),
        "routed experts": (6 * 2 * 64 * 24, 2 * 2 * 64 * 24),
        "shared expert": (2 * 64 * 28, 2 * 64 * 28),
        "dense mlp": (2 * 64 * 112, 2 * 64 * 112),
        "norms": (5 * 64, 5 * 64),
    }
    assert found["mixer"]["note"] == "NemotronHMamba2Mixer" and found["routed experts"][
        "note"
    ].startswith("2 of 6")


@pytest.mark.parametrize(
    ("family", "mixer"),
    [
        ("mamba", "MambaMixer"),
        ("mamba2", "Mamba2Mixer"),
        ("jamba", "JambaMambaMixer"),
        ("falcon_h1", "FalconH1Mixer"),
        ("recurrent_gemma", "RecurrentGemmaRecurrentBlock"),
        ("lfm2", "Lfm2ShortConv"),
        ("kimi_linear", "KimiLinearDeltaAttention"),
    ],
)
def test_mixers_are_distinguished_from_attention(family, mixer):
    """A mixer's parameters are those of the modules of its class, whatever they are called and
    hold.
    """
    model = build_meta(small_config(family))
    (row,) = (row for row in accounting.parameters(model)["by_part"] if row["part"] == "mixer")
    modules = [module for module in model.modules() if type(module).__name__ == mixer]
    assert row["note"] == mixer and modules
    assert row["count"] == sum(p.numel() for module in modules for p in module.parameters())


def test_parts_of_a_dense_model_by_hand():
    found = rows(small("llama"))
    assert {part: row["count"] for part, row in found.items()} == {
        "embedding": 50 * 24,
        "head": 50 * 24,
        "attention": 4 * 24 * 10 * (4 + 2 + 2 + 4),
        "dense mlp": 4 * 3 * 24 * 30,
        "norms": (4 * 2 + 1) * 24,
    }
    assert all(row["count"] == row["active"] for row in found.values())


def test_a_tied_matrix_is_counted_once_and_says_so():
    found = rows(small("llama", tie_word_embeddings=True))
    assert "head" not in found
    assert found["embedding"]["count"] == 50 * 24
    assert "also the head" in found["embedding"]["note"]


def test_parts_of_a_hybrid_mixture_by_hand():
    found = rows(small("qwen3_next"))
    conv, width = 2 * 2 * 6 + 4 * 7, 4
    mixer = 24 * (conv + 4 * 7) + 24 * 2 * 4 + conv * width + 2 * 4 + 7 + 4 * 7 * 24
    assert found["mixer"]["count"] == 3 * mixer
    assert (
        found["attention"]["count"] == 24 * 10 * (2 * 4 + 2 + 2 + 4) + 2 * 10
    )  # gate, and the head norms
    assert found["router"]["count"] == 4 * 24 * 6
    assert found["routed experts"]["count"] == 4 * 6 * 3 * 24 * 16
    assert found["routed experts"]["active"] == 4 * 2 * 3 * 24 * 16
    assert found["routed experts"]["note"].startswith("2 of 6")
    assert found["shared expert"]["count"] == 4 * (3 * 24 * 9 + 24)  # and its gate
    assert found["norms"]["count"] == (4 * 2 + 1) * 24


def test_dense_blocks_among_mixtures():
    found = rows(small("qwen3_moe", mlp_only_layers=[0]))
    assert found["dense mlp"]["count"] == 3 * 24 * 30
    assert found["routed experts"]["count"] == 3 * 6 * 3 * 24 * 16


def test_another_family_of_mixtures():
    found = rows(small("mixtral"))
    assert (found["routed experts"]["active"], found["router"]["count"]) == (
        4 * 2 * 3 * 24 * 16,
        4 * 24 * 6,
    )


class Listed(nn.Module):
    """A made-up model whose experts are modules of their own."""

    def __init__(self, **config):
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(5))
        self.mlp.gate = nn.Linear(3, 5, bias=False)
        self.extra = nn.Parameter(torch.zeros(7))
        self.config = AutoConfig.for_model("llama", **config)

    def get_input_embeddings(self):
        return None

    get_output_embeddings = get_input_embeddings


def test_experts_in_a_list_and_parameters_of_no_known_part():
    counted = accounting.parameters(Listed(num_experts_per_tok=2))
    assert {r["part"]: (r["count"], r["active"]) for r in counted["by_part"]} == {
        "router": (15, 15),
        "routed experts": (45, 18),
        "other": (7, 7),
    }
    wrapper = type("Wrapper", (), {"_module": Listed(num_experts_per_tok=2)})()
    assert accounting.parameters(wrapper) == counted


def test_an_unknown_choice_is_not_guessed():
    counted = accounting.parameters(Listed())
    assert (counted["total"], counted["active"]) == (67, None)
    assert {r["part"]: r["active"] for r in counted["by_part"]} == {
        "router": 15,
        "routed experts": None,
        "other": 7,
    }
