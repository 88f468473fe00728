"""The facts record: its keys, and that it covers what the best hand-typed pages have."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from explorer import load, vocabulary
from explorer.checkpoints import cards
from explorer.errors import LoadError
from explorer.facts import record as facts_module
from explorer.facts.record import facts
from explorer.meta_device import probe_lengths
from explorer.model.shapes import shapes
from tests.support.facts_records import drawn

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


@cache
def record(family: str) -> dict:
    return facts(family)


def names(family: str, host: str) -> set[str]:
    return {row["name"] for row in record(family)["values"] if row["host"] == host}


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


def test_traits_are_asked_of_each_model():
    assert "one_plus_gain" not in {trait["name"] for trait in record("qwen3_moe")["traits"]}
    assert "tied_head" in {trait["name"] for trait in record("llama")["traits"]}
    assert "mrope" in {trait["name"] for trait in record("qwen3_5_moe_text")["traits"]}


def test_another_checkpoint_has_its_own_sizes():
    found = facts("qwen3_5_moe_text", "Qwen/Qwen3.5-397B-A17B")
    assert found["sizes"]["num_layers"] == 60
    assert found["blocks"][0]["hosts"]["mlp"]["sizes"]["num_experts"] == 512
    assert found["parameters"]["total"] == pytest.approx(396.3e9, rel=1e-3)


def test_a_value_is_verified_where_a_check_that_held_compared_it_and_none_that_failed():
    def check(passed: bool, *values: str) -> dict:
        return {
            "name": "a law",
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


def test_the_shapes_are_those_of_a_forward_through_the_whole_model():
    """The run goes through no more blocks than differ; through all of them it finds the same."""
    model = load("Qwen/Qwen3-Next-80B-A3B-Instruct", weights=False)
    short = shapes(model)
    names = [row.value.key for row in model.support() if row.available and not row.value.derived]
    whole = model.record(
        torch.zeros(probe_lengths(model.hf), dtype=torch.long, device="meta"), names
    )
    assert len(model.layers) == 48 and len(short) > 40

    firsts = [block.layers[0] for block in model.anatomy.blocks]

    def told(value):
        return None if value is None else (value.shape, value.dtype)

    for row in model.support():
        where = [
            whole[row.value.key, layer]
            for layer in (row.layers or (None,))
            if (row.value.key, layer) in whole
        ]
        first = [
            told(short.get((row.host, row.name, at)))
            for at in ([None] if row.host == "model" else firsts)
            if at is None or at in row.layers
        ]
        assert not where or {told(value) for value in where} == set(first), row.name


@pytest.mark.parametrize(
    ("family", "block"),
    [
        (
            "falcon_h1",
            {
                "title": "Mamba-2 mixer beside Attention, then MLP",
                "hosts": {"ssd", "self_attn", "mlp"},
                "stages": [0, 0, 1],
                "mid": 1,
                "identity": (
                    "layers[i].input + mixer.attention_output + "
                    "self_attn.attention_output + mlp.mlp_output == layer_output"
                ),
                "norms": [
                    ("input_layernorm", False),
                    ("input_layernorm", True),
                    ("pre_ff_layernorm", False),
                ],
            },
        ),
        (
            "cohere",
            {
                "title": "Attention beside MLP",
                "hosts": {"self_attn", "mlp"},
                "stages": [0, 0],
                "mid": None,
                "identity": (
                    "layers[i].input + self_attn.attention_output + mlp.mlp_output == layer_output"
                ),
                "norms": [("input_layernorm", False), ("input_layernorm", False)],
            },
        ),
        (
            "mamba",
            {
                "title": "Mamba mixer",
                "hosts": {"selective_scan"},
                "stages": [0],
                "mid": None,
                "identity": "layers[i].input + mixer.attention_output == layer_output",
                "norms": [("norm", False)],
            },
        ),
        (
            "opt",
            {  # its MLP is part of the block's own forward
                "title": "Attention, then MLP",
                "hosts": {"self_attn", "mlp"},
                "stages": [0, 1],
                "mid": 1,
                "identity": (
                    "layers[i].input + self_attn.attention_output + mlp.mlp_output == layer_output"
                ),
                "norms": [("self_attn_layer_norm", False), ("final_layer_norm", False)],
            },
        ),
        (
            "zamba",
            {
                "title": "Mixer",
                "hosts": {"mixer"},
                "stages": [0],
                "mid": None,
                "identity": "layers[i].input + mixer.attention_output == layer_output",
                "norms": [("input_layernorm", False)],
            },
        ),
    ],
)
def test_blocks_of_other_builds_are_told_as_they_are(family, block):
    found = drawn(family)["blocks"][0]
    assert (
        found["title"] == block["title"]
        and found["identity"] == block["identity"]
        and found["mid"] == block["mid"]
    )
    assert set(found["hosts"]) == block["hosts"]
    assert [sub["stage"] for sub in found["sublayers"]] == block["stages"]
    assert [(sub["norm"]["module"], sub["norm"]["scaled"]) for sub in found["sublayers"]] == block[
        "norms"
    ]


def test_a_block_that_norms_its_stream_says_so_in_its_identity():
    found = drawn("openai-gpt")["blocks"][0]
    assert found["identity"] == (
        "layers[i].ln_2(layers[i].ln_1(layers[i].input + self_attn.attention_output) "
        "+ mlp.mlp_output) == layer_output"
    )
    assert [step["kind"] for step in found["stream"]] == ["add", "norm", "add", "norm"]
    assert found["sublayers"][1]["norm"]["on_stream"]


def test_a_model_whose_caches_are_not_known_says_why(monkeypatch):
    def unknown(model):
        raise ValueError("what it keeps is not known: it was not asked")

    monkeypatch.setattr("explorer.accounting.counts.cache_sizes", unknown)
    found = facts("gpt2")
    assert (
        found["caches"] == []
        and found["caches_unknown"] == "what it keeps is not known: it was not asked"
    )


def test_default_sizes_come_without_weights():
    with pytest.raises(
        LoadError, match="no released checkpoint, so it has no weights.*specimen:apertus"
    ):
        load("default:apertus")
    with pytest.raises(ValueError, match="did you mean 'apertus'"):
        load("default:apertu", weights=False)


def test_a_checkpoint_of_another_family_is_refused():
    with pytest.raises(ValueError, match="is of the family qwen3_next, not llama"):
        facts("llama", "Qwen/Qwen3-Next-80B-A3B-Instruct")
    with pytest.raises(cards.UnknownCheckpoint, match="did you mean"):
        facts("llama", "Qwen/Qwen3-Nxt-80B-A3B-Instruct")


def test_two_mixers_of_a_block_have_their_own_shapes():
    found = {
        (row["host"], row["name"]): row["shape"]["numbers"]
        for row in facts_module.anatomy(load("specimen:falcon_h1"))["values"]
    }
    model = load("specimen:falcon_h1")
    heads, mixer = model.layers[0].self_attn, model.layers[0].mixer
    assert found["model.layers[i].self_attn", "attention_queries"] == [
        "B",
        heads.num_heads,
        "S",
        heads.qk_head_dim,
    ]
    assert found["model.layers[i].mixer", "attention_queries"] == [
        "B",
        "S",
        mixer.heads,
        mixer.key_dim,
    ]


def test_kinds_of_blocks_with_other_widths_have_their_own_numbers():
    model = load("specimen:gemma4_text")
    row = next(
        row for row in facts_module.anatomy(model)["values"] if row["name"] == "attention_keys"
    )
    found = {
        layer: other["numbers"][-1] for other in row["shape"]["others"] for layer in other["layers"]
    }
    run = model.record("In the beginning", values=["attention_keys"])
    for layer in row["layers"]:
        assert (
            found.get(layer, row["shape"]["numbers"][-1]) == run["attention_keys", layer].shape[-1]
        )
    assert set(found.values()) - {row["shape"]["numbers"][-1]}
