"""Any small transformers model written as the GGUF file that converters make of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy
from gguf.quants import quantize

from explorer.specimens import bpe

#: The format's own name of a model type, where it is another.
ARCHITECTURES = {
    "mistral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}

#: Keys that converters write of every model, by the configuration's name.
_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "conv_L_cache": "shortconv.l_cache",
    "use_parallel_residual": "use_parallel_residual",
    "full_attention_interval": "full_attention_interval",
    "conv_kernel": "ssm.conv_kernel",
    "state_size": "ssm.state_size",
    "time_step_rank": "ssm.time_step_rank",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
}

#: Architectures whose norms are stored as the weight plus one.
_OFFSET_NORMS = ("gemma2", "gemma3", "nemotron")


def own_keys(config: Any, architecture: str) -> dict[str, Any]:
    """The keys that a converter writes of a configuration, without the architecture in front."""
    said = config.to_dict() | {own: getattr(config, own) for own in config.attribute_map}
    keys = {
        key: value
        for name, key in _KEYS.items()
        if isinstance(value := said.get(name), int | float)
    }
    heads = keys.get("attention.head_count")
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if heads and rope:
        size = said.get("head_dim") or config.hidden_size // heads
        keys["rope.freq_base"] = float(rope["rope_theta"])
        partial = rope.get("partial_rotary_factor", 1.0)
        if architecture not in ("gemma2", "gemma3", "gemma4"):
            keys["rope.dimension_count"] = int(partial * size)
        if said.get("head_dim"):
            keys["attention.key_length"] = keys["attention.value_length"] = size
        if rope.get("mrope_section"):
            keys["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    _OWN.get(architecture, lambda config, keys: None)(config, keys)
    return keys


def _mamba_keys(config: Any, keys: dict[str, Any]) -> None:
    keys |= {"ssm.inner_size": config.intermediate_size, "ssm.dt_b_c_rms": False}
    keys |= {"feed_forward_length": 0, "attention.head_count": 0, "context_length": 1 << 20}
    keys["attention.layer_norm_rms_epsilon"] = keys.pop("attention.layer_norm_epsilon")


def _falcon_keys(config: Any, keys: dict[str, Any]) -> None:
    keys |= {"attention.head_count_kv": 1, "feed_forward_length": config.ffn_hidden_size}


def _bloom_keys(config: Any, keys: dict[str, Any]) -> None:
    keys |= {"context_length": 64, "feed_forward_length": 4 * config.hidden_size}
    keys["attention.head_count_kv"] = config.num_attention_heads


def _gpt2_keys(config: Any, keys: dict[str, Any]) -> None:
    keys["feed_forward_length"] = config.n_inner or 4 * config.hidden_size


def _lfm2_keys(config: Any, keys: dict[str, Any]) -> None:
    keys["feed_forward_length"] = config.intermediate_size
    keys["attention.head_count_kv"] = [
        config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types
    ]


def _nemotron_keys(config: Any, keys: dict[str, Any]) -> None:
    keys["attention.layer_norm_epsilon"] = keys.pop("attention.layer_norm_rms_epsilon")


def _minimax_keys(config: Any, keys: dict[str, Any]) -> None:
    keys["expert_feed_forward_length"] = config.intermediate_size
    keys["expert_gating_func"] = 2


def _qwen35_keys(config: Any, keys: dict[str, Any]) -> None:
    keys |= {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
    }
    keys.setdefault("full_attention_interval", 4)


def _gemma4_keys(config: Any, keys: dict[str, Any]) -> None:
    whole = config.per_layer_config[config.layer_types.index("full_attention")]
    for name in ("key", "value"):
        keys[f"attention.{name}_length"] = whole.head_dim
        keys[f"attention.{name}_length_swa"] = config.to_dict()["head_dim"]
    keys["attention.sliding_window_pattern"] = [
        kind == "sliding_attention" for kind in config.layer_types
    ]


_OWN: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "mamba": _mamba_keys,
    "falcon": _falcon_keys,
    "bloom": _bloom_keys,
    "gpt2": _gpt2_keys,
    "lfm2": _lfm2_keys,
    "nemotron": _nemotron_keys,
    "minimax-m2": _minimax_keys,
    "gemma4": _gemma4_keys,
    "qwen35": _qwen35_keys,
    "qwen35moe": _qwen35_keys,
}


def paired(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Rows of queries or keys with the two halves of each head in turn, as llama's are stored."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def tensors_of(module: Any, architecture: str) -> Iterator[tuple[str, numpy.ndarray]]:
    """The tensors that a converter makes of a model."""
    config = module.config
    kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for key, parameter in module.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = parameter.detach().float().numpy()
        if (block := re.match(r"\w+\.(?:layers|h)\.(\d+)\.", key)) and (
            named := _split(key, array)
        ):
            yield from ((f"blk.{block[1]}.{name}", part) for name, part in named.items())
            continue
        base, _, leaf = key.rpartition(".")
        if leaf not in ("weight", "bias"):
            base, leaf = key, "weight" if "experts" in key else ""
        name = table.get_name(base) or table.get_name(base.removeprefix("transformer."))
        assert name is not None, f"the format has no name for {key}"
        yield f"{name}.{leaf}".rstrip("."), _stored(key, array, architecture, config)


def _split(key: str, array: numpy.ndarray) -> dict[str, numpy.ndarray]:
    """The tensors of a block that one parameter becomes, where the names do not say it."""
    if key.endswith("mlp.experts.gate_up_proj"):
        gate, up = numpy.split(array, 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    if key.endswith("mlp.experts.gate_up_proj_bias"):
        return {"ffn_gate_exps.bias": array[..., ::2], "ffn_up_exps.bias": array[..., 1::2]}
    if key.endswith("mlp.experts.down_proj_bias"):
        return {"ffn_down_exps.bias": array}
    if key.endswith(("e_score_correction_bias", "dt_bias", "A_log")):
        leaf = key.rpartition(".")[2]
        return {
            "e_score_correction_bias": {"exp_probs_b.bias": array},
            "dt_bias": {"ssm_dt.bias": array},
            "A_log": {"ssm_a": -numpy.exp(array)},
        }[leaf]
    return {}


def _stored(key: str, array: numpy.ndarray, architecture: str, config: Any) -> numpy.ndarray:
    """A parameter as the format stores it."""
    heads = getattr(config, "num_attention_heads", 1)
    if "norm" in key and key.endswith("weight"):
        offset = architecture in _OFFSET_NORMS or (
            architecture in ("qwen35", "qwen35moe") and "linear_attn.norm" not in key
        )
        return array + 1 if offset else array
    if architecture == "llama" and re.search(r"[qk]_proj", key):
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        return paired(array, heads if "q_proj" in key else key_heads)
    if architecture == "bloom" and "query_key_value" in key:
        array = array.reshape(heads, 3, -1, *array.shape[1:]).swapaxes(0, 1)
        return array.reshape(-1, *array.shape[3:])
    if architecture == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", key):
        return array.T
    if "conv" in key and array.ndim == 3:
        return array[:, 0]
    return array[0] if key.endswith("shared_expert_gate.weight") else array


def write_model(
    path: Path,
    module: Any,
    extra: dict[str, Any] | None = None,
    stored: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tensors: dict[str, numpy.ndarray] | None = None,
    without: tuple[str, ...] = (),
    raw: dict[str, tuple[numpy.ndarray, gguf.GGMLQuantizationType]] | None = None,
    named: tuple[str, str] | None = None,
) -> Path:
    """Write a model's file; return its path.

    extra: keys of its architecture beside or instead of its own; without: keys and tensors left
    out; tensors: further ones; stored: the type of its matrices; raw: tensors as bytes of a type;
    named: the architecture and the name that the file says instead of its own.
    """
    config = module.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    said, name = named or (architecture, config.model_type)
    writer = gguf.GGUFWriter(path, said)
    writer.add_name(name)
    for key, value in (own_keys(config, architecture) | (extra or {})).items():
        if key not in without:
            _add(writer, f"{said}.{key}", value)
    writer.add_file_type(0)
    _add_vocabulary(writer, config.vocab_size)
    for name, array in [*tensors_of(module, architecture), *(tensors or {}).items()]:
        if name in without:
            continue
        if name in (raw or {}):
            array, kind = raw[name]
            writer.add_tensor(name, array, raw_dtype=kind)
            continue
        matrix = array.ndim > 1 and "norm" not in name
        kind = stored if matrix else gguf.GGMLQuantizationType.F32
        array = numpy.ascontiguousarray(array, dtype=numpy.float32)
        writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Write the specimens' tokenizer, filled up to a number of tokens as converters do."""
    tokenizer = bpe.load_tokenizer(512)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = set(tokenizer.all_special_tokens)
    types = [3 if token in special else 1 for token in tokens]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types + [5] * (len(tokens) - len(types)))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    writer.add_token_merges(merges)
