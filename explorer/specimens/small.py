"""Small configurations of any model type: the class's default, shrunk by rules over key names.

The rules, and the exceptions of single types, are data: ``defaults.json``.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import explorer.engine.nnsight_api  # noqa: F401  the engine must be imported before transformers' model classes

#: The specimens' tokenizer has one special token, its first entry.
TOKENS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}

#: Blocks of a specimen, where its type has no more kinds of them.
_BLOCKS = 3


@cache
def rules() -> dict[str, Any]:
    """Return the committed rules: types excluded by reason, sizes by key name, changes by type."""
    return json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))


@cache
def types() -> tuple[str, ...]:
    """Return the types of transformers' causal language models that are decoders only, sorted."""
    excluded = {name for names in rules()["excluded"].values() for name in names}
    return tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - excluded))


def why_excluded(model_type: str) -> str | None:
    """Return why a causal language model is excluded, as what it is; None for any other name."""
    return next(
        (reason for reason, names in rules()["excluded"].items() if model_type in names), None
    )


def default_config(model_type: str) -> PreTrainedConfig:
    """Return the default configuration of a type, corrected where no model can be built from it."""
    return _class(model_type)(**_corrected_defaults(model_type))


def small_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """Return a new small configuration of a type: few narrow blocks, at least one of each kind.

    ``overrides`` are arguments of the configuration's class and come before the rules; with a depth
    among them, the class decides the kinds of the blocks. A list over the blocks goes with a depth.
    """
    return _class(model_type)(**_small_arguments(model_type, overrides, top=True))


def _class(model_type: str) -> type[PreTrainedConfig]:
    return CONFIG_MAPPING[model_type]


def _corrected_defaults(model_type: str) -> dict[str, Any]:
    """Return the arguments that the default of a class lacks, those of its parts included."""
    found = {
        name: _repeated_to_depth(model_type, value) if name in rules()["per_layer"] else value
        for name, value in rules()["defaults"].get(model_type, {}).items()
    }
    sub_configs: Any = _class(model_type).sub_configs
    for name, part in sub_configs.items():
        of = getattr(part, "model_type", "")
        if name not in found and of in rules()["defaults"]:
            found[name] = {"model_type": of, **_corrected_defaults(of)}
    return found


def _repeated_to_depth(model_type: str, period: list[Any]) -> list[Any]:
    """Return a list over the blocks of the class's default depth that repeats ``period``."""
    fields = {field.name: field.default for field in dataclasses.fields(_class(model_type))}
    depth: Any = next(fields[name] for name in rules()["depth"] if name in fields)
    return [period[i % len(period)] for i in range(depth)]


def _small_arguments(
    model_type: str, overrides: dict[str, Any], top: bool = False
) -> dict[str, Any]:
    """Return the arguments that make a small configuration of a type."""
    config_class = _class(model_type)
    default = config_class(**_corrected_defaults(model_type))
    given = {**rules()["small"].get(model_type, {}), **overrides}
    shrunk = _sizes_by_rule(default, given)
    # Arguments of a part are in its shrunk configuration already.
    own = {name: value for name, value in given.items() if not isinstance(shrunk.get(name), dict)}
    arguments = {**_corrected_defaults(model_type), **shrunk, **own}
    names = {field.name for field in dataclasses.fields(config_class)}
    if top or "vocab_size" in names:
        arguments.update(
            {name: token for name, token in TOKENS.items() if name in names and name not in given}
        )
    depth = next((name for name in rules()["depth"] if name in names), None)
    if depth is None or depth in given:
        return arguments
    # The kinds of blocks are those that the class makes of the small sizes at its default depth.
    full_depth = config_class(**arguments)
    lists = {
        name: value
        for name in rules()["per_layer"]
        if name in names and _is_list(value := getattr(full_depth, name))
    }
    chosen = _blocks_to_keep(getattr(full_depth, depth), lists)
    return (
        arguments
        | {depth: len(chosen)}
        | {name: [value[i] for i in chosen] for name, value in lists.items()}
    )


def _sizes_by_rule(default: PreTrainedConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the rules over key names set; those of default None stay None."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(default):
        name = field.name
        value = default.__dict__.get(name, field.default)
        if isinstance(value, PreTrainedConfig) and value.model_type in CONFIG_MAPPING:
            found[name] = {
                "model_type": value.model_type,
                **_small_arguments(value.model_type, dict(given.get(name, {}))),
            }
        elif name in rules()["sizes"] and value is not None and not isinstance(value, bool):
            found[name] = rules()["sizes"][name]
        elif name in rules()["longest"] and value is not None:
            found[name] = max(value, rules()["longest"][name])
    for name, also in rules()["with"].items():
        if found.get(name) is not None:
            found |= {other: size for other, size in also.items() if other in found}
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _blocks_to_keep(depth: int, lists: dict[str, Any]) -> list[int]:
    """Return which blocks to keep: the first of each kind, then others until there are enough."""
    kinds = (
        list(zip(*(value[:depth] for value in lists.values()), strict=False))
        if lists
        else [()] * depth
    )
    firsts = sorted({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
    others = [index for index in range(depth) if index not in firsts]
    return sorted(firsts + others[: max(0, _BLOCKS - len(firsts))])
