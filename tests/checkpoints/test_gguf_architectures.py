"""A GGUF file of every architecture that transformers reads gives the logits of the same weights as
a folder, or is refused by the key or the tensor that is not followed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from gguf.quants import _type_traits
from torch.testing import assert_close
from transformers import AutoModelForCausalLM
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

from explorer import load, specimens
from tests.support.folders import not_loaded
from tests.support.gguf_models import ARCHITECTURES, tensors_of, write_model

_PLAIN = {"use_sliding_window": False, "layer_types": None, "sliding_window": None}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

#: How a configuration differs from the specimen's where the format cannot say that one.
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": _PLAIN,
    "qwen2_moe": {**_PLAIN, "mlp_only_layers": []},
    "qwen3": _PLAIN,
    "qwen3_moe": {},
    "phi3": {},
    "bloom": {},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": None},
    "stablelm": {},
    "gpt2": {},
    "starcoder2": {},
    "mamba": {},
    "nemotron": {},
    "gemma2": {"query_pre_attn_scalar": 24, "head_dim": 24, "layer_types": None},
    "gemma3_text": {"query_pre_attn_scalar": 24, "head_dim": 24, "layer_types": None},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "minimax_m2": {},
    "qwen3_5_text": {
        "layer_types": None,
        "num_hidden_layers": 4,
        "linear_num_value_heads": 3,
        "rope_parameters": {**_MROPE, "mrope_section": [3, 2, 1]},
    },
    "qwen3_5_moe_text": {"linear_num_value_heads": 5},
    "gpt_oss": {},
    "gemma4_text": {
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    },
}

#: The key or the tensor by which a file of an architecture is refused.
REFUSED = {"gpt_oss": "blk.0.ffn_gate_exps.weight", "gemma4_text": "gemma4.attention.key_length"}

#: Architectures of models that are no decoders, or that transformers reads and has no model of.
OTHERS = {"t5": "no_language_model", "umt5": "no_language_model", "deci": "no_model"}

FAST = ("llama", "gemma2", "qwen3_moe")


@cache
def module(family: str, **changes: Any) -> Any:
    """A random model of a family, of the specimen's sizes."""
    config = specimens.config_of(family)
    changed = {**config.to_dict(), **SETTINGS.get(family, {}), **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = AutoModelForCausalLM.from_config(
            type(config).from_dict(changed), dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.03)
    return made.eval()


def with_rope(family: str, **rope: Any) -> Any:
    """A model with other rotary parameters, and the weights of `module`."""
    plain = module(family)
    said = plain.config.to_dict()
    own = said["rope_parameters"]
    scaled = {**own, **rope} | ({"rope_type": "default"} if not rope else {})
    made: Any = AutoModelForCausalLM.from_config(
        type(plain.config).from_dict({**said, "rope_parameters": scaled}),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    made.load_state_dict(plain.state_dict())
    return made.eval()


IDS = torch.randint(5, 200, (1, 80), generator=torch.Generator().manual_seed(0))


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def assert_same(path: Path, wanted: Any) -> None:
    assert_close(logits(load(path).hf), logits(wanted), atol=5e-6, rtol=1e-5)


def test_every_architecture_that_transformers_reads_is_tried():
    read = (GGUF_CONFIG_MAPPING.keys() | GGUF_CONFIG_ARCHS.keys()) - {"general", "tokenizer"}
    names = {"gemma3_text": "gemma3", "gemma4_text": "gemma4"}
    names |= {family: ARCHITECTURES[family] for family in ("qwen3_5_text", "qwen3_5_moe_text")}
    assert {names.get(family, family) for family in (*SETTINGS, *OTHERS)} == read


@pytest.mark.parametrize(
    "family",
    [
        family if family in FAST else pytest.param(family, marks=pytest.mark.slow)
        for family in SETTINGS
        if family not in REFUSED
    ],
)
def test_a_file_gives_the_logits_of_the_same_weights_as_a_folder(family, tmp_path):
    assert_same(write_model(tmp_path / "x.gguf", module(family)), module(family))


@pytest.mark.parametrize("family", REFUSED)
def test_an_architecture_that_is_not_followed_is_refused_by_name(family, tmp_path):
    file = write_model(tmp_path / "x.gguf", module(family))
    message = "tensor_without_place" if family == "gpt_oss" else "key_not_followed"
    assert REFUSED[family] in not_loaded(file, message)


@pytest.mark.parametrize("family", OTHERS)
def test_an_architecture_without_a_language_model(family, tmp_path):
    architecture = "t5" if family == "umt5" else family
    file = write_model(tmp_path / "x.gguf", module("llama"), named=(architecture, family))
    not_loaded(file, OTHERS[family], model_type=family)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}


@pytest.mark.parametrize(
    ("family", "rope", "keys"),
    [
        ("qwen2", YARN, YARN_KEYS),
        ("llama", YARN, YARN_KEYS | {"rope.scaling.finetuned": True}),
        (
            "llama",
            YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
            YARN_KEYS | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
        ),
        (
            "llama",
            YARN | {"attention_factor": 0.5 * (0.1 * numpy.log(4.0) + 1)},
            YARN_KEYS | {"rope.scaling.attn_factor": 0.5},
        ),
        (
            "llama",
            {"rope_type": "linear", "factor": 3.0},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
        ),
        ("llama", {"rope_type": "linear", "factor": 3.0}, {"rope.scale_linear": 3.0}),
        ("llama", {}, {"rope.scaling.type": "none"}),
    ],
)
def test_a_scaled_rotary_embedding_is_followed(family, rope, keys, tmp_path):
    wanted = with_rope(family, **rope)
    if rope:
        assert not torch.allclose(logits(wanted), logits(module(family)), atol=1e-3)
    assert_same(write_model(tmp_path / "x.gguf", module(family), keys), wanted)


def test_rotary_factors_stored_as_a_tensor_are_followed(tmp_path):
    """Llama 3.1's scaling is stored as what the frequencies are divided by."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
    wanted = with_rope("llama", **scaling, low_freq_factor=1.0, high_freq_factor=4.0)
    plain = module("llama").model.rotary_emb.inv_freq
    factors = (plain / wanted.model.rotary_emb.inv_freq).numpy()
    assert factors.max() == 8
    file = tmp_path / "x.gguf"
    assert_same(write_model(file, module("llama"), tensors={"rope_freqs.weight": factors}), wanted)


def test_short_and_long_rotary_factors_are_followed(tmp_path):
    half = module("phi3").model.rotary_emb.inv_freq.shape[0]
    short, long = numpy.linspace(1, 2, half), numpy.linspace(2, 9, half)
    wanted = with_rope(
        "phi3",
        rope_type="longrope",
        short_factor=short.tolist(),
        long_factor=long.tolist(),
        attention_factor=1.25,
        original_max_position_embeddings=64,
    )
    file = write_model(
        tmp_path / "x.gguf",
        module("phi3"),
        {"rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 64},
        tensors={"rope_factors_short.weight": short, "rope_factors_long.weight": long},
    )
    found = load(file).hf
    for length in (40, 80):  # on both sides of the original length
        assert_close(logits(found, IDS[:, :length]), logits(wanted, IDS[:, :length]))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "attn_logit_softcapping", 30.0),
        ("llama", "attention.scale", 0.5),
        ("llama", "expert_count", 8),
        ("llama", "expert_weights_scale", 2.5),
        ("llama", "logit_scale", 0.25),
        ("llama", "residual_scale", 0.5),
        ("llama", "embedding_scale", 12.0),
        ("llama", "attention.sliding_window", 4),
        ("llama", "attention.causal", False),
        ("llama", "some.new.key", 1),
        ("llama", "rope.scaling.yarn_ext_factor", 0.5),
        ("llama", "rope.scaling.alpha", 1000.0),
        ("llama", "rope.scaling.type", "other"),
        ("llama", "rope.scaling.attn_factor", 2.0),
        ("llama", "rope.dimension_sections", [2, 2, 2, 2]),
        ("gpt2", "rope.freq_base", 1e4),
        ("bloom", "attention.max_alibi_bias", 4.0),
        ("falcon", "attention.head_count_kv", 2),
    ],
)
def test_a_key_that_the_model_cannot_follow_is_named(family, key, value, tmp_path):
    file = write_model(tmp_path / "x.gguf", module(family), {key: value})
    said = not_loaded(file, "key_not_followed", {"weights": False}, path="x.gguf")
    assert f"x.gguf says {family}.{key}" in said


def test_keys_with_a_field_are_set(tmp_path):
    keys = {
        "final_logit_softcapping": 2.5,
        "attn_logit_softcapping": 4.0,
        "attention.sliding_window": 5,
        "attention.scale": 0.5,
    }
    config = load(write_model(tmp_path / "x.gguf", module("gemma2"), keys), weights=False).hf.config
    assert (config.final_logit_softcapping, config.attn_logit_softcapping) == (2.5, 4.0)
    assert (config.sliding_window, config.query_pre_attn_scalar) == (5, 4.0)


def test_keys_that_change_no_number_are_passed_over(tmp_path):
    keys = {
        "attention.causal": True,
        "expert_count": 0,
        "logit_scale": 1.0,
        "tensor_data_layout": "Meta AI original pth",
        "rope.scaling.finetuned": False,
    }
    assert_same(write_model(tmp_path / "x.gguf", module("llama"), keys), module("llama"))


def test_a_file_that_does_not_say_how_many_key_heads_there_are(tmp_path):
    alike = module("llama", num_key_value_heads=module("llama").config.num_attention_heads)
    file = write_model(tmp_path / "x.gguf", alike, without=("attention.head_count_kv",))
    assert_same(file, alike)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_norm_2.weight", "blk.1.ffn_gate_inp.bias", "blk.0.attn_sinks.weight"]
)
def test_a_tensor_without_a_place_is_named(name, tmp_path):
    tensors = {name: numpy.ones(8, dtype=numpy.float32)}
    file = write_model(tmp_path / "x.gguf", module("qwen3_moe"), tensors=tensors)
    not_loaded(file, "tensor_without_place", {"weights": False}, name=name)


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_head_is_the_embedding_where_the_file_has_none(family, tmp_path):
    apart = module(family, tie_word_embeddings=False)
    assert not torch.equal(apart.lm_head.weight, apart.get_input_embeddings().weight)
    assert_same(write_model(tmp_path / "x.gguf", apart), apart)
    found = load(write_model(tmp_path / "y.gguf", apart, without=("output.weight",))).hf
    assert torch.equal(found.lm_head.weight, apart.get_input_embeddings().weight)


def test_every_type_that_gguf_can_dequantise_gives_its_numbers(tmp_path):
    """One block's matrix is stored in each of the types, as blocks of arbitrary bytes."""
    kinds = list(_type_traits)
    sizes = {"hidden_size": 32, "intermediate_size": 256, "num_attention_heads": 2, "head_dim": 16}
    many = module("llama", num_hidden_layers=len(kinds), num_key_value_heads=2, **sizes)
    random = numpy.random.default_rng(0)
    raw = {}
    for block, kind in enumerate(kinds):
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        # Below 0x3c, two bytes are no infinity and nothing that is not a number.
        stored = random.integers(0, 0x3C, (32, 256 // elements * size), dtype=numpy.uint8)
        raw[f"blk.{block}.ffn_down.weight"] = (stored, kind)
    found = load(write_model(tmp_path / "x.gguf", many, raw=raw)).hf
    for block, kind in enumerate(kinds):
        wanted = torch.from_numpy(gguf.dequantize(*raw[f"blk.{block}.ffn_down.weight"]))
        assert torch.equal(found.model.layers[block].mlp.down_proj.weight, wanted), kind
        assert wanted.isfinite().all() and wanted.std() > 0
    assert len(kinds) > 20 and len(dict(tensors_of(many, "llama"))) > 9 * len(kinds)
