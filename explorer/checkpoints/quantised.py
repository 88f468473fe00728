"""Checkpoints whose weights are quantised: read as the numbers they stand for, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from explorer.errors import LoadError

#: Methods whose weights transformers turns back into numbers on any machine. The others need a
#: package or a GPU, and compute with the quantised weights.
DEQUANTISED = ("fp8", "mxfp4")


def dequantised(label: str, config: Any) -> str:
    """Have a configuration's weights dequantised; return what to say of them, "" for plain ones.

    Raises LoadError, naming the method, for weights that cannot be.
    """
    said = getattr(config, "quantization_config", None)
    if said is None:
        return ""
    keys: dict[str, Any] = dict(said if isinstance(said, Mapping) else said.to_dict())
    method = str(keys.get("quant_method") or "a method that its quantization_config does not name")
    if method not in DEQUANTISED:
        raise LoadError(
            f"{label} is quantised by {method}, which is not read here; give a checkpoint that is "
            "not quantised, or a GGUF file of it."
        )
    config.quantization_config = keys | {"dequantize": True}
    return f", dequantised from {method}"


def check_scales(path: Path, config: Any) -> None:
    """Raise LoadError for a weight whose last block of a scale is not whole.

    transformers takes the size of a block from how many scales there are, which is another then.
    """
    from safetensors import safe_open

    said: dict[str, Any] = getattr(config, "quantization_config", None) or {}
    block = said.get("weight_block_size")
    if said.get("quant_method") != "fp8" or not block:
        return
    end = "_scale_inv"
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            for name in sorted(one for one in names if one.endswith(end)):
                if (weight := name.removesuffix(end)) not in names:
                    continue
                scales = opened.get_slice(name).get_shape()[-2:]
                sizes = opened.get_slice(weight).get_shape()[-2:]
                for count, size, width in zip(scales, sizes, block, strict=False):
                    if count > 1 and count * width != size:
                        raise LoadError(
                            f"{path} has {weight} in blocks of {block[0]} by {block[1]} that are "
                            "not all whole, which transformers reads wrongly; give a checkpoint "
                            "that is not quantised, or a GGUF file of it."
                        )
