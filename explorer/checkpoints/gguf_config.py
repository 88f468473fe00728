"""The configuration of a GGUF file: every key that changes the numbers is in it, or is refused.

transformers reads some keys of each architecture and passes over the rest. Here each key of the
file's own architecture is set in the configuration, which afterwards must say the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from explorer.checkpoints.configuration import has_causal_model
from explorer.checkpoints.gguf_file import contents, stated
from explorer.checkpoints.gguf_rope import rope_parameters, rotary_sizes, unread
from explorer.checkpoints.weights import no_language_model
from explorer.errors import LoadError

#: Keys of an architecture that change no number: how it was trained, or how it is to be used. Keys
#: of other groups (general, tokenizer, split, quantize and those of tools) change none either.
HARMLESS = frozenset(
    {
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "pooling_type",
        "classifier.output_labels",
        "decoder_start_token_id",
    }
)

#: The fields of a configuration that a key may stand for; a configuration has one of them.
FIELDS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "block_count": ("num_hidden_layers",),
    "vocab_size": ("vocab_size",),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "expert_shared_count": ("n_shared_experts",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_gating_func": ("scoring_func",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("global_head_dim", "head_dim"),
    "attention.value_length": ("global_head_dim", "head_dim"),
    "attention.key_length_swa": ("head_dim",),
    "attention.value_length_swa": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": (
        "layer_norm_epsilon",
        "layer_norm_eps",
        "norm_epsilon",
        "norm_eps",
    ),
    "attention.sliding_window": ("sliding_window",),
    "attention.sliding_window_pattern": ("layer_types",),
    "attention.scale": ("attention_multiplier", "query_pre_attn_scalar"),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "router_logit_softcapping": ("router_logit_softcapping",),
    "logit_scale": ("logit_scale",),
    "residual_scale": ("residual_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "use_parallel_residual": ("use_parallel_residual", "parallel_attn"),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "conv_kernel"),
    "ssm.state_size": ("linear_key_head_dim", "state_size"),
    "ssm.time_step_rank": ("linear_num_value_heads", "time_step_rank"),
    "ssm.group_count": ("linear_num_key_heads",),
    "shortconv.l_cache": ("conv_L_cache",),
    "full_attention_interval": ("full_attention_interval",),
}

#: Keys that mean nothing where no field stands for them: the model has no such limit or count.
_ONLY_LIMITS = ("context_length", "vocab_size", "full_attention_interval")

#: Keys that models without what they count have as zero.
_ZERO_IS_NONE = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")

#: What a key says that leaves the numbers as they are, where no field stands for it.
_NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.output_scale": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_shared_count": 0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
    "nextn_predict_layers": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "router_logit_softcapping": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "attention.sliding_window": 0,
    "ssm.dt_b_c_rms": False,
    "interleave_moe_layer_step": 1,
}

#: Scoring functions of routers by their number in a file.
_GATING = {1: "softmax", 2: "sigmoid"}

#: The one that a family's routers always have, where it is not the first.
_GATED = {"minimax_m2": 2}

#: Attention scales follow the heads' size, but for one size of each of these architectures, which
#: is known by its number of blocks.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


def own_keys(reader: Any) -> dict[str, Any]:
    """The metadata of a file's architecture, without the architecture's name in front."""
    own = f"{stated(reader, 'general.architecture')}."
    return {
        name.removeprefix(own): contents(field)
        for name, field in reader.fields.items()
        if name.startswith(own)
    }


def file_config(label: str, reader: Any, raw: Mapping[str, Any]) -> Any:
    """Return the configuration of a file, ``raw`` being what transformers reads of it.

    Raises LoadError, naming the key, where the file says what the configuration cannot.
    """
    from transformers import CONFIG_MAPPING

    architecture = str(stated(reader, "general.architecture"))
    kind = str(raw.get("model_type"))
    if kind == "mistral":  # what transformers makes of a llama of this name, and cannot load
        kind, raw = architecture, {**raw, "model_type": architecture}
    if kind not in CONFIG_MAPPING:
        raise LoadError(f"{label} is a {kind}, of which transformers has no model.")
    if not has_causal_model(plain := CONFIG_MAPPING[kind]()):
        raise LoadError(no_language_model(label, plain))
    keys = {
        key: value
        for key, value in own_keys(reader).items()
        if key not in HARMLESS and not (key in _ZERO_IS_NONE and value == 0)
    }
    _predicted_blocks(architecture, keys)
    names = {tensor.name for tensor in reader.tensors}
    make = CONFIG_MAPPING[kind].from_dict
    # Some families' models look for the last in what a configuration has beside its fields; where
    # one does not, its weights have other sizes.
    known = {**_fields_of(plain), "head_dim": None}
    aliases = CONFIG_MAPPING[kind].attribute_map
    # Else a special token that the file does not name is that of some released checkpoint.
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    settled = special | dict(raw) | {"tie_word_embeddings": "output.weight" not in names}
    for key, value in keys.items():
        if field := _field(known, key):
            blocks = int(keys.get("block_count", 0))
            settled[aliases.get(field, field)] = _meant(field, value, blocks)
    settled |= _from_tensors(known, names)
    settled |= _implied(architecture, keys, _fields_of(make(settled)))
    config = make(settled)
    if rope := rope_parameters(label, architecture, keys, config, reader):
        settled.pop("rope_theta", None)
        config = make(settled | {"rope_parameters": rope})
    said = {name: value for name, value in _fields_of(config).items() if name in known}
    for key, value in keys.items():
        if not key.startswith("rope.") and not _says(said, key, value):
            raise unread(label, f"{architecture}.{key}", value)
    return config


def check_rotary(label: str, reader: Any, model: Any) -> None:
    """Raise LoadError unless a model rotates as many dimensions of a head as its file says."""
    architecture = stated(reader, "general.architecture")
    key = f"{architecture}.rope.dimension_count"
    count, sizes = stated(reader, key), rotary_sizes(model)
    if count and count not in sizes:
        raise unread(label, key, count)


def _predicted_blocks(architecture: str, keys: dict[str, Any]) -> None:
    """Take out of the counts the blocks that predict further tokens, where transformers does."""
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

    if architecture in GGUF_CONFIG_ARCHS and "block_count" in keys:
        keys["block_count"] -= keys.pop("nextn_predict_layers", 0)


def _fields_of(config: Any) -> dict[str, Any]:
    """What a configuration says, by every name it goes under."""
    said = config.to_dict()
    return said | {alias: said.get(own) for alias, own in config.attribute_map.items()}


def _field(known: Mapping[str, Any], key: str) -> str | None:
    """The field of a configuration that a key stands for, None where it has none."""
    return next((name for name in FIELDS.get(key, ()) if name in known), None)


def _meant(field: str, value: Any, blocks: int) -> Any:
    """A key's value as the field of a configuration says it."""
    if field == "scoring_func":
        return _GATING.get(value, value)
    if field == "query_pre_attn_scalar":
        return round(value**-2)
    if field == "layer_types":
        return _layer_types(value, blocks)
    if isinstance(value, list) and value:  # one number for each block, zero where it has none
        return max(value) if len({one for one in value if one}) == 1 else value
    return value


def _layer_types(pattern: Any, blocks: int) -> list[str]:
    """The kinds of blocks by a file's pattern: whether each slides, or how often one does not."""
    if isinstance(pattern, list):
        slides = [bool(one) for one in pattern[:blocks]]
    else:
        slides = [bool((block + 1) % pattern) for block in range(blocks)] if pattern else []
    return ["sliding_attention" if one else "full_attention" for one in slides]


def _from_tensors(known: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """What a file says of biases and norms by having their tensors."""
    tensors = {
        "attention_bias": "attn_q.bias",
        "mlp_bias": "ffn_gate.bias",
        "qk_layernorm": "attn_q_norm.weight",
    }
    return {
        field: any(name.endswith(f".{tensor}") for name in names)
        for field, tensor in tensors.items()
        if isinstance(known.get(field), bool)
    }


def _implied(architecture: str, keys: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What the format leaves to the architecture, and transformers to a released checkpoint."""
    implied: dict[str, Any] = {}
    if architecture in _SCALED_BY_WIDTH and "attention.scale" not in keys:
        by_width = said["num_hidden_layers"] == _SCALED_BY_WIDTH[architecture]
        sizes = {**said, "head_dim": None} if by_width else said
        implied["query_pre_attn_scalar"] = _head_size(sizes)
    layered = "sliding_attention" in (said.get("layer_types") or ())
    if said.get("sliding_window") and "attention.sliding_window" not in keys and not layered:
        implied["sliding_window"] = None
    return implied


def _head_size(said: Mapping[str, Any]) -> int:
    return said.get("head_dim") or said["hidden_size"] // said["num_attention_heads"]


def _says(said: Mapping[str, Any], key: str, value: Any) -> bool:
    """Whether a configuration says what a key of its file does."""
    if key == "attention.head_count_kv" and "multi_query" in said:
        return not said.get("new_decoder_architecture") and _equal(
            value, 1 if said["multi_query"] else said["num_attention_heads"]
        )
    if (field := _field(said, key)) is not None and said[field] is not None:
        return _equal(_meant(field, value, said.get("num_hidden_layers") or 0), said[field])
    if key in _NEUTRAL:
        return _equal(value, _NEUTRAL[key])
    return key in _ONLY_LIMITS or (key in _DERIVED and _equal(value, _DERIVED[key](said)))


def _inner_size(said: Mapping[str, Any]) -> int:
    if "linear_value_head_dim" in said:
        return said["linear_value_head_dim"] * said["linear_num_value_heads"]
    return said["intermediate_size"]


#: What a key says where no field stands for it, as every model without one has it.
_DERIVED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "feed_forward_length": lambda said: 4 * said["hidden_size"],
    "attention.head_count_kv": lambda said: said["num_attention_heads"],
    "attention.key_length": _head_size,
    "attention.value_length": _head_size,
    "attention.max_alibi_bias": lambda said: 0.0 if "rope_parameters" in said else 8.0,
    "attention.scale": lambda said: _head_size(said) ** -0.5,
    "ssm.inner_size": _inner_size,
    "expert_gating_func": lambda said: _GATED.get(said["model_type"], 1),
}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)
    return one == other
