"""A checkpoint's configuration: what it may not choose, and sizes its files do not bear out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from explorer.errors import LoadError
from explorer.meta_device import build_meta

#: Keys of a configuration that choose which code runs. They are the caller's to choose: a name
#: such as "owner/kernel" would make transformers fetch that code and run it.
CHOOSES_CODE = ("_attn_implementation", "_experts_implementation")

#: Configuration keys that count things a model makes one module or list entry for each, as
#: transformers and GGUF files spell them: num_hidden_layers, n_head, llama.block_count.
_COUNTS = re.compile(
    r"(^|_)(num|n)_\w*(layer|block|expert|head|group)|(layers|blocks|experts|heads|groups|depth)$"
    r"|\.\w*(block|layer|expert|head|group)\w*_count",
    re.IGNORECASE,
)

#: No released model has more of anything that a key above counts.
_MOST = 100_000

#: What every model has at least one of.
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")

#: Keys whose value is never infinite, as limits may be.
_FINITE = re.compile(r"eps|theta|factor", re.IGNORECASE)

#: Blocks that are built without asking whether the file has as many tensors.
_FEW_BLOCKS = 1000

#: Numbers that a byte of a file can hold at most: one bit each.
_NUMBERS_PER_BYTE = 8

#: Modules a model may have. A released mixture with a module for each expert has about 100,000.
_MOST_MODULES = 200_000


def read_config(source: Any, label: str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Read a checkpoint's configuration with what it chooses about code taken out.

    Raises LoadError where a count in it is one that no model has.
    """
    from transformers import AutoConfig, PreTrainedConfig

    _check_file(Path(source) / "config.json")
    raw, _ = PreTrainedConfig.get_config_dict(source, **options)
    check_counts(label, raw)
    check_numbers(label, raw)
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    return without_choices(config)


def _check_file(file: Path) -> None:
    """Raise ValueError, saying what it is instead, for a file that is there and no JSON object."""
    if not file.is_file():
        return
    try:
        said = json.loads(file.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise ValueError("its configuration is not in UTF-8; save it so") from error
    except json.JSONDecodeError as error:
        marked = "BOM" in error.msg
        what = "begins with a byte-order mark; save it without" if marked else "is no JSON"
        raise ValueError(f"its configuration {what}") from error
    if not isinstance(said, dict):
        raise ValueError("its configuration is no JSON object")


def has_causal_model(config: Any) -> bool:
    """Whether transformers, or the checkpoint's own code, has a causal language model for it."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return type(config) in auto._model_mapping or hasattr(config, "auto_map")


def without_choices(config: Any) -> Any:
    """Set a configuration and those in it to transformers' own defaults for which code runs."""
    for name in CHOOSES_CODE:
        setattr(config, name, None)  # a property that sets it in the configurations inside too
    return config


def check_counts(label: str, keys: Mapping[str, Any]) -> None:
    """Raise LoadError where a count is above any model's; nested configurations included."""
    for name, value in _numbers(keys):
        if _COUNTS.search(name) and abs(value) > _MOST:
            raise LoadError(
                f"{label} says {name} is {value:,}, more than any model has; fetch it again."
            )


def check_numbers(label: str, keys: Mapping[str, Any]) -> None:
    """Raise LoadError for what is no number where one belongs, and for a size of nothing."""
    for name, value in _numbers(keys):
        if value != value or (value in (math.inf, -math.inf) and _FINITE.search(name)):
            raise LoadError(f"{label} says {name} is {value}, which is no number; fetch it again.")
        if name in _SIZES and value < 1:
            raise LoadError(f"{label} says {name} is {value}, which no model has; fetch it again.")


def _numbers(keys: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    waiting = list(keys.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.items()
        elif isinstance(value, int | float):
            yield str(name), value


def check_sizes(label: str, config: Any, names: Iterable[str], size: int) -> Any:
    """Return a configuration's model without weights; raise LoadError where it cannot be the
    one a file holds.

    names: the tensors of the file; size: the bytes of all its data. The model is built on the
    meta device, so that nothing is allocated for sizes that are not true.
    """
    blocks, tensors = getattr(config.get_text_config(), "num_hidden_layers", None), len(set(names))
    if isinstance(blocks, int) and blocks > max(_FEW_BLOCKS, tensors):
        raise LoadError(
            f"{label} says it has {blocks:,} blocks and holds {tensors:,} tensors; fetch it again."
        )
    with few_modules(label):
        model = build_meta(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _NUMBERS_PER_BYTE * size:
        raise LoadError(
            f"{label} says it has {count:,} parameters and its weights take {size:,} bytes; "
            "fetch both again."
        )
    return model


@contextmanager
def few_modules(label: str, most: int = _MOST_MODULES) -> Iterator[None]:
    """Raise LoadError in what builds a model of more modules than any released one has."""
    from torch.nn.modules.module import register_module_module_registration_hook

    made = 0

    def count(*registered: Any) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise LoadError(
                f"{label} says sizes of which a model would have over {most:,} modules, "
                "more than any has; fetch it again."
            )

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
