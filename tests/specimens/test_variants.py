"""What is tried of a family's options, and which of two graphs are the same up to sizes."""

from __future__ import annotations

from functools import cache

import pytest
from transformers import AutoConfig

from explorer.discovery.record_run import record_run
from explorer.specimens import SpecimenError, config_of, variants
from explorer.specimens.graph_shape import graph_shape
from explorer.specimens.variants import Known, other_values

SOURCE = """
class Block:
    def __init__(self, config):
        if config.layer_types[0] == "sliding_attention" or config.kind in ("wide", "narrow"):
            self.norm = getattr(config, "use_norm", False)
        elif "post" != config.place:
            self.scale = getattr(config, "scale", 1.0)
        self.kinds = {"conv": 1, "other": 2}
"""


def graph(family: str, change: dict) -> str:
    return graph_shape(record_run(variants.build(family, change).model, step=False))


@cache
def own_graph(family: str) -> str:
    return graph(family, {})


# -- proposals --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind", "texts", "expected"),
    [
        (True, "bool", (), [False]),
        (None, "bool | None", (), [True]),
        (6, "int", (), [0, 1, 3, 12]),
        (1, "int | None", (), [0, 2, None]),
        (3000, "int", (), [0, 1, 1500]),
        (0.5, "float", (), [0.0, 1.0]),
        (None, "int | None", (), [2, 8]),
        (None, "float | None", (), [0.5, 8.0]),
        (None, "str | None", ("alibi",), ["alibi"]),
        ("rope", "str", ("rope", "alibi", "none"), ["alibi", "none"]),
        ([3, 4], "list[int]", (), [[], [0], [4], [4, 3]]),
        (
            {"width": 2, "on": False},
            "dict",
            (),
            [{"width": 0}, {"width": 1}, {"width": 4}, {"on": True}],
        ),
    ],
)
def test_other_values_follow_from_the_kind_of_a_field(value, kind, texts, expected):
    if isinstance(value, dict):
        expected = [value | one for one in expected]
    found = other_values(value, kind, texts)
    assert list(map(repr, found)) == list(map(repr, expected))


def test_a_number_that_may_be_a_list_over_the_blocks_gets_one():
    assert [8, 4, 4] in other_values(4, "int | list[int]", depth=3)


def test_activations_are_a_few_and_others_for_each_family():
    one, two = (other_values("silu", "str", salt=salt) for salt in ("llama", "gemma2"))
    assert one == other_values("silu", "str", salt="llama") and one != two
    assert "silu" not in one and 1 <= len(one) <= 2


def test_each_kind_of_rotary_embedding_is_proposed_with_its_parameters():
    found = other_values({"rope_type": "default", "rope_theta": 5.0}, "RopeParameters")
    by_type = {one["rope_type"]: one for one in found}
    assert {"linear", "dynamic", "yarn", "longrope", "llama3"} <= set(by_type)
    assert all(one["rope_theta"] == 5.0 for one in found)
    assert by_type["yarn"]["factor"] > 1 and by_type["longrope"]["short_factor"]
    assert any(one.get("partial_rotary_factor") == 0.5 for one in found)


def test_the_source_says_what_a_field_is_compared_with_and_what_is_read_beside_the_fields():
    known = variants.known_of([SOURCE])
    assert known.strings["layer_types"] == {"sliding_attention"}
    assert known.strings["kind"] == {"wide", "narrow"} and known.strings["place"] == {"post"}
    assert known.kinds == {"sliding_attention", "conv"}
    assert known.more == {"use_norm": False, "scale": 1.0}


def test_a_list_over_the_blocks_is_made_all_alike_and_with_another_first_block():
    config = AutoConfig.for_model("gemma2", num_hidden_layers=2)
    known = Known({}, {"conv"}, {})
    lists = [
        one["layer_types"] for one in variants.proposals(config, known, 2) if "layer_types" in one
    ]
    full, sliding = "full_attention", "sliding_attention"
    assert list(config.layer_types) == [sliding, full]
    assert [sliding, sliding] in lists and [full, full] in lists and ["conv", full] in lists


def test_fields_of_parts_are_proposed_within_their_part():
    found = [one["text_config"] for one in variants.changes("gemma4") if "text_config" in one]
    assert {"attention_bias": True} in found and {"tie_word_embeddings": False} in found


def test_options_of_a_call_are_not_tried():
    tried = {name for change in variants.changes("mixtral") for name in change}
    assert "sliding_window" in tried and not tried & {"use_cache", "output_router_logits"}


def test_a_variant_keeps_what_the_specimen_has_and_moves_one_field():
    before = config_of("deepseek_v3").to_dict()
    after = variants.configuration("deepseek_v3", {"q_lora_rank": None}).to_dict()
    assert {name for name in before if before[name] != after[name]} == {"q_lora_rank"}
    listed = ["full_attention"] * 3
    after = variants.configuration("gemma2", {"layer_types": listed})
    assert list(after.layer_types) == listed and after.num_hidden_layers == 3


def test_a_model_with_an_empty_parameter_is_no_variant():
    with (
        pytest.warns(UserWarning, match="zero-element"),
        pytest.raises(SpecimenError, match="is empty"),
    ):
        variants.build("llama", {"intermediate_size": 0})


# -- graphs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"intermediate_size": 20}),
        ("llama", {"num_hidden_layers": 4}),
        ("llama", {"rms_norm_eps": 0.5}),
        ("mixtral", {"num_local_experts": 4}),
    ],
)
def test_sizes_numbers_and_more_blocks_of_a_kind_leave_the_graph_as_it_is(family, change):
    assert graph(family, change) == own_graph(family)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"hidden_act": "relu"}),
        ("llama", {"tie_word_embeddings": False}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"layer_types": ["full_attention"] * 3}),
        ("deepseek_v3", {"norm_topk_prob": False}),
    ],
)
def test_an_option_that_changes_the_forward_changes_the_graph(family, change):
    assert graph(family, change) != own_graph(family)
