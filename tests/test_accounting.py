"""Counts and sizes against hand arithmetic and against the tensors transformers really makes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from explorer import accounting, cards

SMALL = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
         "vocab_size": 50}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
RECURRENT = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
             "linear_value_head_dim": 7, "shared_expert_intermediate_size": 9, "partial_rotary_factor": 0.4}


def small(family: str, **kwargs):
    sizes = {
        "llama": {"intermediate_size": 30, **SMALL},
        "mistral": {"intermediate_size": 30, "sliding_window": 5, **SMALL},
        "qwen3_moe": {"intermediate_size": 30, **SMALL, **MIXTURE},
        "qwen3_next": {"intermediate_size": 30, **SMALL, **MIXTURE, **RECURRENT},
        "qwen3_5_moe_text": {**SMALL, **MIXTURE, **RECURRENT},
        "mixtral": {"intermediate_size": 16, "num_local_experts": 6, "num_experts_per_tok": 2, **SMALL},
    }
    return AutoConfig.for_model(family, **{**sizes[family], **kwargs})


FAMILIES = ("llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")


def rows(config) -> dict[str, dict]:
    return {row["part"]: row for row in accounting.parameters(accounting.build_meta(config))["by_part"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_add_up_to_every_parameter(family):
    model = accounting.build_meta(small(family))
    counted = accounting.parameters(model)
    assert counted["total"] == sum(p.numel() for p in model.parameters()) == sum(r["count"] for r in counted["by_part"])
    assert counted["active"] == sum(r["active"] for r in counted["by_part"]) <= counted["total"]
    assert "other" not in [r["part"] for r in counted["by_part"]]
    assert all(r["count"] > 0 for r in counted["by_part"])


def test_parts_of_a_dense_model_by_hand():
    found = rows(small("llama"))
    assert {part: row["count"] for part, row in found.items()} == {
        "embedding": 50 * 24, "head": 50 * 24, "attention": 4 * 24 * 10 * (4 + 2 + 2 + 4), "dense mlp": 4 * 3 * 24 * 30,
        "norms": (4 * 2 + 1) * 24,
    }
    assert all(row["count"] == row["active"] for row in found.values())


def test_a_tied_matrix_is_counted_once_and_says_so():
    found = rows(small("llama", tie_word_embeddings=True))
    assert "head" not in found
    assert found["embedding"]["count"] == 50 * 24
    assert found["embedding"]["note"] == "also the head: one matrix, counted once"


def test_parts_of_a_hybrid_mixture_by_hand():
    found = rows(small("qwen3_next"))
    conv, width = 2 * 2 * 6 + 4 * 7, 4
    mixer = 24 * (conv + 4 * 7) + 24 * 2 * 4 + conv * width + 2 * 4 + 7 + 4 * 7 * 24
    assert found["linear attention"]["count"] == 3 * mixer
    assert found["attention"]["count"] == 24 * 10 * (2 * 4 + 2 + 2 + 4) + 2 * 10     # gate, and the head norms
    assert found["router"]["count"] == 4 * 24 * 6
    assert found["routed experts"]["count"] == 4 * 6 * 3 * 24 * 16
    assert found["routed experts"]["active"] == 4 * 2 * 3 * 24 * 16
    assert found["routed experts"]["note"] == "2 of 6 for each token"
    assert found["shared expert"]["count"] == 4 * (3 * 24 * 9 + 24)                   # and its gate
    assert found["norms"]["count"] == (4 * 2 + 1) * 24


def test_dense_blocks_among_mixtures():
    found = rows(small("qwen3_moe", mlp_only_layers=[0]))
    assert found["dense mlp"]["count"] == 3 * 24 * 30
    assert found["routed experts"]["count"] == 3 * 6 * 3 * 24 * 16


def test_another_family_of_mixtures():
    found = rows(small("mixtral"))
    assert (found["routed experts"]["active"], found["router"]["count"]) == (4 * 2 * 3 * 24 * 16, 4 * 24 * 6)


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
        "router": (15, 15), "routed experts": (45, 18), "other": (7, 7),
    }
    wrapper = type("Wrapper", (), {"_module": Listed(num_experts_per_tok=2)})()
    assert accounting.parameters(wrapper) == counted


def test_an_unknown_choice_is_not_guessed():
    counted = accounting.parameters(Listed())
    assert (counted["total"], counted["active"]) == (67, None)
    assert {r["part"]: r["active"] for r in counted["by_part"]} == {"router": 15, "routed experts": None, "other": 7}


def test_build_meta():
    config = small("qwen3_next")
    before = json.dumps(config.to_dict(), default=str)
    model = accounting.build_meta(config, dtype=torch.float32, experts_implementation="eager")
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float32)}
    assert not model.training
    assert model.config._attn_implementation == "eager" and model.config._experts_implementation == "eager"
    assert json.dumps(config.to_dict(), default=str) == before
    with pytest.raises(ValueError, match="no causal language model for a t5 configuration"):
        accounting.build_meta(AutoConfig.for_model("t5"))


@pytest.mark.parametrize("family", (*FAMILIES, "mistral"))
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 3), (3, 11)])
def test_sizes_are_those_of_the_cache_transformers_makes(family, batch, tokens):
    model = accounting.build_meta(small(family))
    assert accounting.cache_bytes(model, tokens, batch) == accounting.measured_cache_bytes(model, tokens, batch)


@pytest.mark.parametrize("id", ["Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-30B-A3B"])
def test_sizes_at_the_released_size(id):
    model = accounting.build_meta(cards.config(id))
    assert accounting.cache_bytes(cards.config(id), 3, 2) == accounting.measured_cache_bytes(model, 3, 2)


def test_sizes_of_a_hybrid_by_hand():
    found = {row["name"]: row for row in accounting.cache_sizes(cards.config("Qwen/Qwen3.5-35B-A3B"))}
    keys, state, history = (found[name] for name in ("keys and values", "recurrent state", "convolution inputs"))
    assert keys["per_token_bytes"] == 10 * 2 * 2 * 256 * 2 and keys["fixed_bytes"] is None
    assert keys["layers"] == list(range(3, 40, 4))
    assert state["fixed_bytes"] == 30 * 2 * 2**20 and state["per_token_bytes"] is None     # 2 MiB in each block
    assert state["dtype"] == "float32" and history["dtype"] == "bfloat16"
    assert history["fixed_bytes"] == 30 * 8192 * 4 * 2


@pytest.mark.parametrize("id", cards.IDS)
def test_formula_numbers_and_bytes_agree(id):
    for row in accounting.cache_sizes(cards.config(id)):
        named = {generic["name"]: generic["number"] for generic in row["generics"]}
        filled = [named.get(symbol, symbol) for symbol in row["formula"].split(" × ")]
        assert " × ".join(map(str, filled)) == row["numbers"]
        assert math.prod(map(int, filled)) == (row["per_token_bytes"] or row["fixed_bytes"])
        assert all(generic["source"] for generic in row["generics"])
        json.dumps(row)


def test_sizes_follow_the_dtype():
    half, single = (accounting.cache_bytes(small("llama"), 5, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert single == 2 * half
    assert accounting.cache_bytes(accounting.build_meta(small("llama"), dtype=torch.float32), 5) == single


def test_a_window_bounds_the_cache():
    config = small("mistral")
    (row,) = accounting.cache_sizes(config)
    assert row["tokens_at_most"] == 4 and "window of 5" in row["note"]
    assert accounting.cache_bytes(config, 4) == accounting.cache_bytes(config, 400)


@pytest.mark.parametrize(("config", "sentence"), [
    (AutoConfig.for_model("mamba"), "not known"),
    (AutoConfig.for_model("deepseek_v3"), "latent attention"),
])
def test_an_unknown_cache_is_not_guessed(config, sentence):
    with pytest.raises(ValueError, match=sentence):
        accounting.cache_sizes(config)
