"""The inferred types of Qwen3.6 35B-A3B against a page of it typed by hand, on every axis that both
have."""

from __future__ import annotations

import pytest

from tests.support.signatures import signed

#: The page's generics and numbers; it calls Hidden H.
GENERICS = {
    "Vocab": 248320,
    "Hidden": 2048,
    "Heads": 16,
    "KvHeads": 2,
    "HeadDim": 256,
    "KeyHeads": 16,
    "ValueHeads": 32,
    "KeyDim": 128,
    "ValueDim": 128,
    "Conv": 8192,
    "Width": 4,
    "Experts": 256,
    "TopK": 8,
    "ExpertInner": 512,
    "SharedInner": 512,
    "MaxSeq": 262144,
}

#: The page's linear maps, by the class here that holds each: what goes in and what comes out.
LINEAR = {
    ("Qwen3_5MoeForCausalLM", "lm_head"): ("Hidden", "Vocab"),
    ("Qwen3_5MoeAttention", "q_proj"): ("Hidden", "2 * Heads * HeadDim"),
    ("Qwen3_5MoeAttention", "k_proj"): ("Hidden", "KvHeads * HeadDim"),
    ("Qwen3_5MoeAttention", "v_proj"): ("Hidden", "KvHeads * HeadDim"),
    ("Qwen3_5MoeAttention", "o_proj"): ("Heads * HeadDim", "Hidden"),
    ("Qwen3_5MoeGatedDeltaNet", "in_proj_qkv"): ("Hidden", "Conv"),
    ("Qwen3_5MoeGatedDeltaNet", "in_proj_z"): ("Hidden", "ValueHeads * ValueDim"),
    ("Qwen3_5MoeGatedDeltaNet", "in_proj_b"): ("Hidden", "ValueHeads"),
    ("Qwen3_5MoeGatedDeltaNet", "in_proj_a"): ("Hidden", "ValueHeads"),
    ("Qwen3_5MoeGatedDeltaNet", "out_proj"): ("ValueHeads * ValueDim", "Hidden"),
    ("Qwen3_5MoeSparseMoeBlock", "shared_expert_gate"): ("Hidden", "1"),
    ("Qwen3_5MoeMLP", "gate_proj"): ("Hidden", "SharedInner"),
    ("Qwen3_5MoeMLP", "up_proj"): ("Hidden", "SharedInner"),
    ("Qwen3_5MoeMLP", "down_proj"): ("SharedInner", "Hidden"),
}

#: The page's norms, by the class here that holds each.
NORMS = {
    ("Qwen3_5MoeTextModel", "norm"): "Hidden",
    ("Qwen3_5MoeDecoderLayer", "input_layernorm"): "Hidden",
    ("Qwen3_5MoeDecoderLayer", "post_attention_layernorm"): "Hidden",
    ("Qwen3_5MoeAttention", "q_norm"): "HeadDim",
    ("Qwen3_5MoeAttention", "k_norm"): "HeadDim",
}

#: The page's parameters, by class and name here.
PARAMETERS = {
    ("Embedding", "weight"): ["Vocab", "Hidden"],
    ("Qwen3_5MoeTopKRouter", "weight"): ["Experts", "Hidden"],
    ("Qwen3_5MoeExperts", "gate_up_proj"): ["Experts", "2 * ExpertInner", "Hidden"],
    ("Qwen3_5MoeExperts", "down_proj"): ["Experts", "Hidden", "ExpertInner"],
    ("Conv1d", "weight"): ["Conv", "1", "Width"],
    ("Qwen3_5MoeGatedDeltaNet", "A_log"): ["ValueHeads"],
    ("Qwen3_5MoeGatedDeltaNet", "dt_bias"): ["ValueHeads"],
    ("Qwen3_5MoeRMSNormGated", "weight"): ["ValueDim"],
}

#: What passes between the page's functions, by host and value here.
VALUES = {
    ("linear_attn", "attention_values"): ["B", "S", "ValueHeads", "ValueDim"],
    ("linear_attn", "decays"): ["B", "S", "ValueHeads"],
    ("linear_attn", "betas"): ["B", "S", "ValueHeads"],
    ("linear_attn", "state_output"): ["B", "ValueHeads", "KeyDim", "ValueDim"],
    ("linear_attn", "attention_head_outputs"): ["B", "S", "ValueHeads", "ValueDim"],
    ("self_attn", "attention_queries"): ["B", "Heads", "S", "HeadDim"],
    ("self_attn", "attention_keys"): ["B", "KvHeads", "S", "HeadDim"],
    ("self_attn", "attention_values"): ["B", "KvHeads", "S", "HeadDim"],
    ("mlp", "router_logits"): ["B", "S", "Experts"],
    ("layers[i]", "layer_input"): ["B", "S", "Hidden"],
    ("layers[i]", "layer_output"): ["B", "S", "Hidden"],
}


@pytest.fixture(scope="module")
def found() -> dict:
    return signed("qwen3_5_moe_text")


def classes(found: dict, name: str) -> list[dict]:
    return [one for one in found["blocks"] if one["class"] == name]


def subs(found: dict, holder: str, name: str) -> list[dict]:
    return [
        sub for one in classes(found, holder) for sub in one["submodules"] if sub["name"] == name
    ]


def test_generics_have_the_page_s_names_and_numbers(found):
    rows = {row["name"]: row for row in found["generics"]}
    assert {name: rows[name]["number"] for name in GENERICS} == GENERICS
    assert rows["Conv"]["formula"] == "2 * KeyHeads * KeyDim + ValueHeads * ValueDim"
    assert (
        rows["KeyHeads"]["source"] == "linear_num_key_heads"
        and rows["ExpertInner"]["source"] == "moe_intermediate_size"
    )


@pytest.mark.parametrize(
    ("at", "wanted"), LINEAR.items(), ids=lambda one: one[1] if isinstance(one, tuple) else ""
)
def test_linear_maps_agree(found, at, wanted):
    (linear,) = classes(found, "Linear")
    assert linear["generics"] == ["In", "Out"] and linear["parameters"][0]["type"]["dims"] == [
        "Out",
        "In",
    ]
    held = subs(found, *at)
    assert held and all(
        sub["class"] == "Linear" and tuple(sub["arguments"]) == wanted for sub in held
    )


@pytest.mark.parametrize(
    ("at", "wanted"), NORMS.items(), ids=lambda one: one[1] if isinstance(one, tuple) else ""
)
def test_norms_agree(found, at, wanted):
    held = subs(found, *at)
    assert held and all(
        sub["class"] == "Qwen3_5MoeRMSNorm" and sub["arguments"] == [wanted] for sub in held
    )


@pytest.mark.parametrize(
    ("at", "wanted"),
    PARAMETERS.items(),
    ids=lambda one: ".".join(one) if isinstance(one, tuple) else "",
)
def test_parameters_agree(found, at, wanted):
    holder, name = at
    (one,) = classes(found, holder)
    assert (
        next(part for part in one["parameters"] if part["name"] == name)["type"]["dims"] == wanted
    )


def test_entries_agree(found):
    entries = {one["name"]: one for one in found["entries"]}
    for name, given, returned in (
        ("forward", ["B", "S"], ["B", "S", "Vocab"]),
        ("decode", ["B", "1"], ["B", "1", "Vocab"]),
        ("next_token", ["B", "S"], ["B", "Vocab"]),
    ):
        assert entries[name]["arguments"][0]["type"] == {
            "dims": given,
            "numbers": [int(one) if one.isdigit() else one for one in given],
            "dtype": "int64",
        }
        assert entries[name]["results"][0]["type"]["dims"] == returned


def test_what_is_kept_agrees_and_the_state_is_float32_in_a_bfloat16_model(found):
    assert found["dtype"] == "bfloat16"
    recurrent, softmax = found["cache"]
    assert len(recurrent["layers"]) == 30 and len(softmax["layers"]) == 10
    kept = {one["name"]: one for row in found["cache"] for one in row["tensors"]}
    assert (
        kept["recurrent_states"]["after_prefill"]
        == kept["recurrent_states"]["after_decode"]
        == {
            "dims": ["B", "ValueHeads", "KeyDim", "ValueDim"],
            "numbers": ["B", 32, 128, 128],
            "dtype": "float32",
        }
    )
    # The page keeps Width - 1 inputs of the convolution, channels last; transformers all Width,
    # channels before them.
    assert kept["conv_states"]["after_prefill"]["dims"] == ["B", "Conv", "Width"]
    for name in ("keys", "values"):
        assert kept[name]["after_prefill"]["dims"] == ["B", "KvHeads", "S", "HeadDim"]
        assert kept[name]["after_decode"]["dims"] == ["B", "KvHeads", "1 + Past", "HeadDim"]
    states = {part["name"]: part for one in found["blocks"] for part in one["state"]}
    assert states.keys() == kept.keys()


@pytest.mark.parametrize(
    ("at", "wanted"),
    VALUES.items(),
    ids=lambda one: ".".join(one) if isinstance(one, tuple) else "",
)
def test_what_passes_inside_agrees(found, at, wanted):
    host, name = at
    rows = [
        row
        for row in found["values"]
        if row["host"].rpartition(".")[2] == host and row["name"] == name
    ]
    assert rows and all(row["type"]["dims"] == wanted for row in rows)


def test_integers_and_float32_inside_are_told(found):
    dtypes = {
        (row["host"].rpartition(".")[2], row["name"]): row["type"]["dtype"]
        for row in found["values"]
    }
    assert (
        dtypes["mlp", "expert_indices"] == "int64" and dtypes["linear_attn", "decays"] == "float32"
    )
    assert (
        dtypes["linear_attn", "state_input"] == dtypes["linear_attn", "state_output"] == "float32"
    )
    assert dtypes["mlp", "expert_weights"] == "bfloat16"


def test_a_quarter_of_a_head_is_turned(found):
    (rotary,) = classes(found, "Qwen3_5MoeTextRotaryEmbedding")
    (forward,) = [one for one in rotary["functions"] if one["name"] == "forward"]
    assert [one["type"]["dims"] for one in forward["results"]] == [["B", "S", "HeadDim / 4"]] * 2
