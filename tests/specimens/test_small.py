"""The small models of every decoder: built by rules, showing what the type has, alive, and the same
at every build.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from explorer import specimens
from explorer.meta_device import build_meta
from explorer.specimens import small
from explorer.specimens.small import default_config, small_config

TYPES = small.types()
#: Its vision tower needs a package that is not installed; its text model is a type of its own.
NOT_BUILT = {"gemma3n"}
BUILT = tuple(name for name in TYPES if name not in NOT_BUILT)
#: Draft models: they take the target model's states and no token ids.
DRAFTS = {"gemma4_assistant", "gemma4_unified_assistant"}
#: No cache can be made from its configuration, which has several depths.
NO_CACHE = {"blt"}

#: Kinds that the code of these types has and their default configuration does not show.
HIDDEN = {
    "lfm2": {"conv", "full_attention"},
    "qwen2": {"sliding_attention"},
    "qwen3": {"sliding_attention"},
    "mellum": {"dense", "sliding_attention"},
    "laguna": {"sliding_attention"},
    "ministral": {"full_attention", "sliding_attention"},
    "inkling_text": {"dense", "sparse"},
    "glm_moe_dsa": {"shared"},
    "minimax_m3_vl_text": {"minimax_m3_sparse", "dense"},
    "cohere2_moe": {"dense", "sparse"},
    "granitemoehybrid": {"linear_attention", "full_attention"},
    "bamba": {"linear_attention", "full_attention"},
    "zaya": {"hybrid_sliding"},
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kinds(config) -> set:
    """What the lists over the blocks of a configuration name."""
    text = config.get_text_config()
    lists = [getattr(text, name, None) for name in small.rules()["per_layer"]]
    return {str(entry) for values in lists if isinstance(values, list | tuple) for entry in values}


def test_every_causal_language_model_is_a_decoder_or_excluded_with_a_reason():
    excluded = [name for names in small.rules()["excluded"].values() for name in names]
    assert len(excluded) == len(set(excluded)) and set(excluded) <= set(
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    assert sorted([*TYPES, *excluded]) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(TYPES) == 161
    assert small.why_excluded("bert") and small.why_excluded("llama") is None


def names_of(config) -> set[str]:
    """The arguments of a configuration's class and of those of its parts."""
    found = {field.name for field in dataclasses.fields(config)}
    for part in vars(config).values():
        found |= names_of(part) if isinstance(part, PreTrainedConfig) else set()
    return found


def test_every_rule_is_about_something_some_decoder_has():
    rules = small.rules()
    names = set().union(*(names_of(default_config(name)) for name in TYPES))
    assert {
        *rules["sizes"],
        *rules["longest"],
        *rules["depth"],
        *rules["per_layer"],
        *rules["with"],
    } <= names
    assert {*rules["small"], *rules["defaults"]} <= set(CONFIG_MAPPING)


@pytest.mark.parametrize("name", TYPES)
def test_a_small_configuration_is_small(name):
    config = small_config(name)
    text = config.get_text_config()
    assert type(config) is CONFIG_MAPPING[name]
    if name == "blt":  # four stacks, each with a depth of its own
        depths = [
            config.encoder_config,
            config.decoder_config,
            config.global_config,
            config.patcher_config,
        ]
        assert all(part.num_hidden_layers <= 4 for part in depths)
        return
    if name == "hrm_text":  # counts every pass over its two stacks
        assert text.num_layers_per_stack <= 4
    else:
        assert 2 <= text.num_hidden_layers <= 4
    assert text.vocab_size == 2048
    assert text.hidden_size <= 128
    for key, value in text.to_dict().items():
        if ("dropout" in key or "pdrop" in key) and not key.startswith(
            "summary"
        ):  # of another head
            assert not isinstance(value, float) or value == 0, key


@pytest.mark.parametrize("name", TYPES)
def test_sizes_distinguish_the_axes(name):
    text = small_config(name).get_text_config()
    keys = (
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "moe_intermediate_size",
        "intermediate_size",
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
    )
    sizes: dict[str, int] = {}
    for key in keys:
        value = text.__dict__.get(key)
        if isinstance(value, int):
            sizes[key] = value
    if text.__dict__.get("kv_lora_rank"):  # latent attention has as many key heads
        sizes.pop("num_key_value_heads", None)
    if text.__dict__.get("num_attention_heads") == text.__dict__.get(
        "num_key_value_heads"
    ):  # the class has no grouping
        sizes.pop("num_key_value_heads", None)
    sizes = {key: size for key, size in sizes.items() if "expert" not in key} | {
        "experts": max((size for key, size in sizes.items() if "expert" in key), default=0)
    }
    twice = [size for size, times in Counter(sizes.values()).items() if times > 1]
    assert not twice, f"equal sizes {twice} in {sizes}"


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_every_default_builds_at_its_full_size(name):
    model = build_meta(default_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) > 1000


@pytest.mark.parametrize("name", BUILT)
def test_every_kind_of_block_of_the_default_is_shown(name):
    lost = kinds(default_config(name)) - kinds(small_config(name)) - {"10000.0"}
    # Numbers over the blocks (rotary bases, counts of heads) are made small like any other.
    assert not {kind for kind in lost if not kind.replace(".", "").isdigit()}


@pytest.mark.parametrize("name", HIDDEN)
def test_kinds_that_the_default_hides_are_shown(name):
    config = small_config(name)
    shown = kinds(config) | set(getattr(config, "layers_block_type", None) or ())
    assert HIDDEN[name] <= shown, shown


def test_what_is_asked_for_comes_before_the_rules():
    config = small_config("mistral", hidden_size=48, num_hidden_layers=5)
    assert (config.hidden_size, config.num_hidden_layers) == (48, 5)
    pattern = small_config("gemma3_text", num_hidden_layers=7).layer_types
    assert len(pattern) == 7 and pattern.count("full_attention") == 1  # the class's own


def test_a_composite_type_is_shrunk_in_all_its_parts():
    config = small_config("gemma3")
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 64
    assert config.text_config.vocab_size == 2048 and config.text_config.eos_token_id == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_every_small_model_is_alive_finite_and_the_same_again(name):
    """Many in one process, one after the other: none leaves anything behind that another trips
    over.
    """
    first = specimens.build(name)
    for path, parameter in first.model.named_parameters():
        assert parameter.numel() == 1 or parameter.unique().numel() > 1, (
            f"{path} is {parameter.flatten()[0]} throughout"
        )
    again = specimens.build(name).model.state_dict()
    assert all(
        torch.equal(tensor, again[path]) for path, tensor in first.model.state_dict().items()
    )
    if name in DRAFTS:
        return
    ids = torch.arange(1, 129).view(2, 64)
    with torch.no_grad():
        logits = first.model(ids, use_cache=name not in NO_CACHE).logits
    assert logits.shape[:2] == ids.shape
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.01 and logits.abs().max() < 1000


def test_what_is_built_is_what_transformers_maps_the_type_to():
    for name in ("qwen3_5", "gpt-sw3", "sarvam_mla", "llama4"):
        assert type(specimens.build(name).model).__name__ == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
