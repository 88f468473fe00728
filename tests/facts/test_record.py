"""The facts record: its keys, and that it covers what the best hand-typed pages have."""

from __future__ import annotations

import json

import pytest

from explorer import vocabulary
from explorer.facts import record as facts_module
from explorer.facts.record import facts
from tests.support.facts_helpers import names, record

FAMILIES = ("llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")


KEYS = {
    "schema",
    "family",
    "checkpoint",
    "architecture",
    "versions",
    "parameters",
    "sizes",
    "config",
    "blocks",
    "values",
    "printout",
    "traits",
    "contract",
    "provenance",
}


#: Rows every reference page of a mixture family lists, by host.
ROWS = {
    "model": (
        "logits token_embeddings final_norm_output lm_head_output next_token_probs "
        "input_ids attention_mask input_size"
    ),
    "model.layers[i]": (
        "layer_input attention_norm_output layer_mid mlp_norm_output mlp_input layer_output"
    ),
    "model.layers[i].self_attn": (
        "attention_queries attention_keys attention_values "
        "attention_scores attention_premix "
        "attention_output attention_probabilities attention_head_outputs"
    ),
    "model.layers[i].mlp": (
        "mlp_output router_logits expert_weights expert_indices expert_outputs routed_output"
    ),
}


RECURRENT = (
    "attention_output state states attention_queries attention_keys attention_values "
    "decays betas state_input "
    "attention_head_outputs state_output"
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_record_has_every_key_and_is_plain_json(family):
    found = record(family)
    assert set(found) >= KEYS
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe_text"])
@pytest.mark.parametrize("host", ROWS)
def test_the_rows_of_reference_pages_are_covered(family, host):
    assert set(ROWS[host].split()) <= names(family, host)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_the_recurrent_and_shared_rows_are_covered(family):
    assert set(RECURRENT.split()) | {"state_attention", "conv_input"} <= names(
        family, "model.layers[i].linear_attn"
    )
    assert "shared_expert_output" in names(family, "model.layers[i].mlp")
    assert {"mlp_activation", "mlp_neurons"} <= names(family, "model.layers[i].mlp.shared_experts")
    assert "head_gate" in names(family, "model.layers[i].self_attn")


def test_a_family_without_a_part_does_not_list_its_values():
    assert names("llama", "model.layers[i].linear_attn") == set()
    assert "router_logits" not in names("llama", "model.layers[i].mlp")
    assert "shared_expert_output" not in names("qwen3_moe", "model.layers[i].mlp")
    assert "head_gate" not in names("qwen3_moe", "model.layers[i].self_attn")


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_has_one_number_or_letter_per_axis_and_a_place(family):
    for row in record(family)["values"]:
        assert row["dims"] == list(vocabulary.LAYOUTS[row["layout"]].axes)
        assert len(row["shape"]["numbers"]) == len(row["dims"]), row["name"]
        assert row["read_at"], row["name"]


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_cover_every_layer_once(family):
    found = record(family)
    layers = sorted(layer for block in found["blocks"] for layer in block["layers"])
    assert layers == list(range(found["sizes"]["num_layers"]))


def test_figures_of_the_reference_pages():
    found = record("qwen3_next")
    delta, full = sorted(found["blocks"], key=lambda block: block["layers"][0])
    assert full["layers"] == list(range(3, 48, 4)) and len(delta["layers"]) == 36
    assert (
        delta["identity"]
        == "layers[i].input + linear_attn.attention_output + mlp.mlp_output == layer_output"
    )
    assert delta["sublayers"][0]["summary"] == "16 key heads × 128 · 32 value heads × 128"
    rows = {(row["host"], row["name"]): row for row in found["values"]}
    assert rows["model.layers[i].linear_attn", "state_output"]["shape"]["numbers"] == [
        "B",
        32,
        128,
        128,
    ]
    assert rows["model.layers[i].linear_attn", "decays"]["dtype"] == "float32"
    assert rows["model.layers[i].linear_attn", "attention_queries"]["shape"]["numbers"] == [
        "B",
        "S",
        32,
        128,
    ]
    assert rows["model.layers[i].self_attn", "attention_keys"]["shape"]["numbers"] == [
        "B",
        2,
        "S",
        256,
    ]
    assert rows["model.layers[i].mlp", "expert_outputs"]["shape"]["numbers"] == ["B", "S", 10, 2048]
    assert found["size_notes"]["intermediate_size"]
    traits = {trait["name"]: trait for trait in found["traits"]}
    assert {
        "hybrid",
        "head_gate",
        "mixture",
        "shared_expert",
        "qk_norm",
        "partial_rotary",
        "one_plus_gain",
        "grouped_query",
    } <= set(traits)
    assert "64 of 256" in traits["partial_rotary"]["evidence"]


def test_traits_are_tested_on_each_model():
    assert "one_plus_gain" not in {trait["name"] for trait in record("qwen3_moe")["traits"]}
    assert "tied_head" in {trait["name"] for trait in record("llama")["traits"]}
    assert "mrope" in {trait["name"] for trait in record("qwen3_5_moe_text")["traits"]}


@pytest.mark.slow
def test_another_checkpoint_has_its_own_sizes():
    found = facts("qwen3_5_moe_text", "Qwen/Qwen3.5-397B-A17B")
    assert found["sizes"]["num_layers"] == 60
    assert found["blocks"][0]["hosts"]["mlp"]["sizes"]["num_experts"] == 512
    assert found["parameters"]["total"] == pytest.approx(396.3e9, rel=1e-3)


def test_a_value_is_verified_where_a_check_that_held_compared_it_and_none_that_failed():
    def check(passed: bool, *values: str) -> dict:
        return {
            "name": "a check",
            "host": "model",
            "about": "It holds.",
            "passed": passed,
            "detail": "",
            "worst": None,
            "values": list(values),
        }

    report = {
        "checks": [check(True, "mlp.mlp_output", "model.logits"), check(False, "model.logits")],
        "passed": 1,
        "failed": 1,
    }
    found = facts("llama", contract=report)
    assert [row["name"] for row in found["values"] if row["verified"]] == ["mlp_output"]
    assert (
        all("values" not in each for each in found["contract"]["checks"])
        and len(found["contract"]["checks"]) == 2
    )
    assert not any(row["verified"] for row in record("llama")["values"])


@pytest.mark.slow
def test_a_family_without_a_card_has_the_sizes_of_its_type_and_says_so():
    found = facts("apertus")
    assert (
        found["checkpoint"] == "default:apertus"
        and not found["released"]
        and record("llama")["released"]
    )
    assert "no released checkpoint" in found["provenance"]["sources"]["config"]
    assert (
        found["title"] == "Apertus" and found["summary"] == "32 blocks, each Attention, then MLP."
    )
    # What the class's own default lacks is named where it is filled in.
    assert "with num_experts_per_tok set" in facts_module._origin(
        "deepseek_v2", "default:deepseek_v2"
    )
