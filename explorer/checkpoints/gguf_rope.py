"""The rotary embedding of a GGUF file, from its keys and the factors it may hold as tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from explorer.errors import LoadError

#: Tensors that a file may hold beside the weights, which divide the rotary frequencies.
FACTORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}

#: Keys of YaRN, by what transformers calls them.
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}

#: Keys that are followed where they say this, which is what they say where they are not there.
_ASSUMED: dict[str, tuple[float, ...]] = {
    "yarn_ext_factor": (1.0, -1.0),
    "yarn_attn_factor": (1.0, -1.0),
    "yarn_log_multiplier": (0.0,),
    "alpha": (0.0, 1.0),
}

_SCALING = "rope.scaling."


def rope_parameters(
    label: str, architecture: str, keys: Mapping[str, Any], config: Any, reader: Any
) -> dict[str, Any] | None:
    """Return the rotary parameters of a file's configuration; None where nothing rotates.

    Raises LoadError, naming the key or the tensor, for what transformers cannot follow.
    """

    own = {key: value for key, value in keys.items() if key.startswith("rope.")}
    factors = {
        tensor.name: [float(one) for one in tensor.data.reshape(-1)]
        for tensor in reader.tensors
        if tensor.name in FACTORS
    }
    parameters = copy.deepcopy(getattr(config, "rope_parameters", None))
    if not parameters:
        for key in own.keys() - {"rope.dimension_count"}:
            raise unread(label, f"{architecture}.{key}", own[key])
        return None
    # Where blocks of two kinds rotate apart, the file's scaling is of those that see everything.
    whole = parameters.get("full_attention", parameters)
    sliding = parameters.get("sliding_attention", {})
    known = {"rope.dimension_count", "rope.freq_base", "rope.scale_linear"}
    if sliding:
        known |= {"rope.freq_base_swa", "rope.dimension_count_swa"}
        sliding["rope_theta"] = own.get("rope.freq_base_swa", sliding["rope_theta"])
    if getattr(config, "rope_parameters", {}).get("mrope_section"):
        known.add("rope.dimension_sections")
    whole["rope_theta"] = own.get("rope.freq_base", whole["rope_theta"])
    size = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    count = own.get("rope.dimension_count")
    if count and not sliding and count / size != whole.get("partial_rotary_factor", 1.0):
        whole["partial_rotary_factor"] = count / size
    for key in own:
        if key not in known and not key.startswith(_SCALING):
            raise unread(label, f"{architecture}.{key}", own[key])
    try:
        _scale(whole, own, factors, config)
    except _Unread as refused:
        name = refused.args[0]
        raise unread(
            label, name if name in FACTORS else f"{architecture}.{name}", own.get(name)
        ) from None
    return parameters


def unread(label: str, name: str, value: Any = None) -> LoadError:
    """The error for a key of a file that is not followed."""
    said = "" if value is None or isinstance(value, list) else f" = {value}"
    return LoadError(
        f"{label} says {name}{said}, which transformers' model of it cannot follow; "
        "load the checkpoint's safetensors instead."
    )


class _Unread(Exception):
    """A key or a tensor that cannot be followed."""


def _scale(
    whole: dict[str, Any], own: Mapping[str, Any], factors: Mapping[str, Any], config: Any
) -> None:
    """Set the scaling that keys and tensors say in rotary parameters."""
    scaling = {
        key.removeprefix(_SCALING): value for key, value in own.items() if key.startswith(_SCALING)
    }
    factor = scaling.pop("factor", own.get("rope.scale_linear", 0.0))
    kind = scaling.pop("type", "linear" if factor else "none")
    if not factor and kind in ("linear", "yarn"):
        kind = "none"
    attention = scaling.pop("attn_factor", 1.0)
    original = scaling.pop("original_context_length", None)
    theta = {name: whole[name] for name in ("rope_theta", "partial_rotary_factor") if name in whole}
    plain = whole.get("rope_type") == "default"
    if plain or kind != "none":
        extra = {} if plain else {name: whole[name] for name in ("truncate",) if name in whole}
        for name in ("mrope_section", "mrope_interleaved"):
            if name in whole:
                extra[name] = whole[name]
        whole.clear()
        whole.update(theta | {"rope_type": "default"} | extra)
    if factors:
        _divided(whole, factors, original, attention, config)
        if kind not in ("none", "longrope"):
            raise _Unread(f"{_SCALING}type")
    elif kind == "linear":
        whole |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        whole |= {"rope_type": "yarn", "factor": factor}
        if original:
            whole["original_max_position_embeddings"] = original
        for key, name in _YARN.items():
            if key in scaling:
                whole[name] = scaling.pop(key)
        if attention != 1.0:
            whole["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    elif kind != "none":
        raise _Unread(f"{_SCALING}type")
    if attention != 1.0 and kind in ("linear", "none") and not factors:
        raise _Unread(f"{_SCALING}attn_factor")
    for key, value in scaling.items():
        if key in ("finetuned", *_YARN) or value in _ASSUMED.get(key, ()):
            continue
        raise _Unread(f"{_SCALING}{key}")


def _divided(
    whole: dict[str, Any],
    factors: Mapping[str, list[float]],
    original: int | None,
    attention: float,
    config: Any,
) -> None:
    """Set factors that divide the frequencies: one set, or one for short and one for long."""
    both = factors.get("rope_freqs.weight")
    long = factors.get("rope_factors_long.weight", both)
    short = factors.get("rope_factors_short.weight", both)
    if long is None or short is None or (both and len(factors) > 1):
        raise _Unread(next(iter(factors)))
    whole |= {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "attention_factor": attention,
        "original_max_position_embeddings": original or config.max_position_embeddings,
    }


def rotary_sizes(model: Any) -> set[int]:
    """How many dimensions of a head a built model rotates, of each of its rotary embeddings."""
    return {
        2 * buffer.shape[-1]
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and buffer is not None
    }
