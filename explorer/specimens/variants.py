"""Variants of a specimen: one field of its configuration moved to another plausible value.

What is plausible follows from a field's kind and from what transformers knows: flags are flipped,
numbers moved, strings replaced by others that the type's own source compares them with. Whether a
value is legal, and whether it changes anything, is found out by building and running the model.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from explorer.specimens.building import Specimen, build_recipe, config_of
from explorer.specimens.recipes import recipe
from explorer.specimens.small import rules, small_config

#: A field of a configuration and its other value; of a part's field, the part and such a pair.
Change = dict[str, Any]

#: The largest number that is proposed: a variant is small too.
_LARGEST = 4096

#: Other activation functions that are proposed to each type, not the same to all.
_ACTIVATIONS = 2

#: Fields that every configuration class has, and which no forward reads.
_OF_EVERY_CLASS = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig))

#: The parameters of each kind of rotary embedding, besides those that every kind has.
_LONG = {"original_max_position_embeddings": 1024}
_ROPE: Mapping[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, **_LONG},
    "longrope": {"factor": 2.0, "short_factor": [1.5], "long_factor": [3.0], **_LONG},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_LONG},
}


class Known(NamedTuple):
    """What a type's source says: by field, strings that it is compared with; the kinds of blocks
    that are named; by name, the default of what is read though it is no field.
    """

    strings: dict[str, set[str]]
    kinds: set[str]
    more: dict[str, Any]


def changes(family: str) -> list[Change]:
    """Return what to try on the specimen of ``family``, in the order of its fields."""
    config = config_of(family)
    known = known_of(sources_of(family))
    found = [*proposals(config, known, _depth(config), family)]
    fields = {field.name for field in dataclasses.fields(config)}
    for name, default in known.more.items():
        if name not in fields and name not in config.attribute_map:
            found += [{name: other} for other in other_values(default)]
    # What a forward also takes as an argument is an option of a call, and not of the architecture.
    of_call = inspect.signature(_model_class(family).forward).parameters
    return [change for change in found if not of_call.keys() & change.keys()]


def arguments(family: str, change: Change) -> dict[str, Any]:
    """Return the arguments that `small.small_config` takes to make the configuration of a variant.

    A list over the blocks comes with the specimen's depth and its other lists.
    """
    given = {**rules()["small"].get(family, {}), **recipe(family).config}
    config = config_of(family)
    if any(_over_blocks(name, vars(config).get(name), _depth(config)) for name in change):
        names = [
            name for name in (*rules()["per_layer"], *rules()["depth"]) if name in vars(config)
        ]
        given |= {name: vars(config)[name] for name in names}
    for name, value in change.items():
        if isinstance(vars(config).get(name), PreTrainedConfig):
            value = {**given.get(name, {}), **value}
        given[name] = value
    return given


def build(family: str, change: Change) -> Specimen:
    """Build the specimen of ``family`` with one field moved; all its weights are random.

    Raises SpecimenError where a parameter would be empty, and whatever transformers raises.
    """
    return build_recipe(replace(recipe(family), config=arguments(family, change), weights=None))


def configuration(family: str, change: Change) -> PreTrainedConfig:
    """Return the configuration of a variant."""
    return small_config(family, **arguments(family, change), dtype="float32")


def sources_of(family: str) -> list[str]:
    """Return the source of a type's modeling and configuration modules."""
    names = [_model_class(family).__module__, type(config_of(family)).__module__]
    return [inspect.getsource(sys.modules[name]) for name in dict.fromkeys(names)]


def _model_class(family: str) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM._model_mapping[type(config_of(family))]
    return model[0] if isinstance(model, tuple) else model


# -- what the source says ---------------------------------------------------------


def known_of(sources: Iterable[str]) -> Known:
    """Return what the source of a type says of the values of its fields."""
    known = Known({}, set(), {})
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Constant) and node.value in ALLOWED_LAYER_TYPES:
            known.kinds.add(str(node.value))
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = {text for side in sides for text in _texts(side)}
            for name in filter(None, map(_name, sides)):
                known.strings.setdefault(name, set()).update(texts)
        elif isinstance(node, ast.Call) and _name(node.func) == "getattr" and len(node.args) == 3:
            of, name, default = node.args
            if _name(of) == "config" and isinstance(name, ast.Constant):
                value = default.value if isinstance(default, ast.Constant) else None
                known.more.setdefault(str(name.value), value)
    return known


def _texts(node: ast.expr) -> list[str]:
    """Return the strings that an expression is made of."""
    elements = node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) else [node]
    constants = [one.value for one in elements if isinstance(one, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def _name(node: ast.expr) -> str | None:
    """Return the last name of what is compared: ``x`` of ``config.x`` and of ``config.x[0]``."""
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


# -- other values -----------------------------------------------------------------


def proposals(
    config: PreTrainedConfig, known: Known, depth: int | None = None, salt: str = ""
) -> Iterator[Change]:
    """Yield each change of one field of ``config``, those of its parts included.

    depth: the number of blocks. salt: chooses among what is too much to try on every type.
    """
    for field in dataclasses.fields(config):
        name = field.name
        if name in _OF_EVERY_CLASS:
            continue
        value = vars(config).get(name)
        if isinstance(value, PreTrainedConfig):
            within = proposals(value, known, _depth(value), salt)
            yield from ({name: change} for change in within)
        elif name in rules()["depth"]:
            yield {name: 1}
        elif value is not None and _over_blocks(name, value, depth):
            texts = known.kinds | _strings(known, name)
            yield from ({name: other} for other in _other_lists(list(value), texts))
        else:
            others = other_values(value, str(field.type), _strings(known, name), depth, salt)
            yield from ({name: other} for other in others)


def other_values(
    value: Any, kind: str = "", texts: Iterable[str] = (), depth: int | None = None, salt: str = ""
) -> list[Any]:
    """Return other values than ``value`` of a field.

    kind: its annotation. texts: strings that it is compared with. depth, salt: as for `proposals`.
    """
    found: list[Any] = []
    if isinstance(value, bool) or (value is None and "bool" in kind):
        found = [not value]
    elif isinstance(value, int):
        found = [number for number in (0, 1, value // 2, 2 * value) if number <= _LARGEST]
    elif isinstance(value, float):
        found = [0.0, 0.5, 1.0]
    elif isinstance(value, str):
        found = [*sorted(texts), *(_activations(salt) if value in ACT2FN else ())]
    elif isinstance(value, dict):
        found = _other_dicts(value)
    elif isinstance(value, list | tuple):
        found = [[], *([[0], [value[-1]], list(value[::-1])] if _numbers(value) else ())]
    elif value is None:
        found = [2, 8] if "int" in kind else [0.5, 8.0] if "float" in kind else []
        found += sorted(texts)
    if value is not None and not isinstance(value, bool) and "None" in kind:
        found.append(None)
    if "list" in kind and depth and value is None:
        found.append([0])
    if "list" in kind and depth and isinstance(value, int | float):
        found.append([2 * value, *[value] * (depth - 1)])
    return _different(found, value)


def _different(found: Iterable[Any], value: Any) -> list[Any]:
    """Return each value once, without ``value``; True is not 1 here."""
    kept: list[Any] = []
    for one in found:
        if repr(one) not in map(repr, [value, *kept]):
            kept.append(one)
    return kept


def _numbers(value: Iterable[Any]) -> bool:
    return bool(value) and all(isinstance(one, int | float) for one in value)


def _activations(salt: str) -> list[str]:
    """Return a few activation functions, others for each ``salt``."""

    def rank(name: str) -> str:
        return hashlib.sha256(f"{salt} {name}".encode()).hexdigest()

    return sorted(ACT2FN, key=rank)[:_ACTIVATIONS]


def _other_dicts(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a mapping with one of its entries moved, and every kind of rotary embedding."""
    if "rope_type" in value:
        kept = {key: one for key, one in value.items() if key in _ROPE_SHARED}
        kinds = [
            {"rope_type": "default"},
            *({"rope_type": of, **_ROPE.get(of, {})} for of in _KINDS),
        ]
        return [*({**kept, **kind} for kind in kinds), {**value, "partial_rotary_factor": 0.5}]
    return [{**value, key: other} for key, one in value.items() for other in other_values(one)]


_KINDS = tuple(ROPE_INIT_FUNCTIONS)
_ROPE_SHARED = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def _other_lists(value: list[Any], texts: Iterable[str]) -> list[list[Any]]:
    """Return other lists over the blocks: all alike, and the first block another."""
    entries: list[Any] = list(dict.fromkeys(value))
    if isinstance(value[0], str):
        entries += sorted(set(texts) - set(entries))
    elif isinstance(value[0], bool | int | float):
        entries += [one for one in other_values(value[0]) if one not in entries]
    alike = [[entry] * len(value) for entry in entries]
    return _different([*alike, *([entry, *value[1:]] for entry in entries)], value)


def _strings(known: Known, name: str) -> set[str]:
    """Return the strings that a field, or one entry of it, is compared with."""
    return known.strings.get(name, set()) | known.strings.get(name.removesuffix("s"), set())


def _depth(config: PreTrainedConfig) -> int | None:
    return next((vars(config)[name] for name in rules()["depth"] if name in vars(config)), None)


def _over_blocks(name: str, value: Any, depth: int | None) -> bool:
    """Whether a field has one entry for each block."""
    return name in rules()["per_layer"] and isinstance(value, list | tuple) and len(value) == depth
