"""The sizes of a configuration: which of its figures there are, what they are called, and a copy
with other numbers."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explorer.signature.expressions import Expr

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: The largest numerator and denominator of a share that one size may be of another.
_PARTS = 16

#: Where a figure stands in a configuration: attribute names and keys, outermost first.
Key = tuple[str, ...]


@cache
def table() -> dict[str, Any]:
    """The committed data: patterns of key names for each generic, call variables, windows, and what
    is never a size."""
    return json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))


@cache
def order() -> dict[str, int]:
    """How names are sorted: what comes from the call first, then as the table lists them."""
    names = [*table()["variables"], *(name for name, _ in table()["generics"])]
    return {name: at for at, name in enumerate(names)}


def generic(key: str) -> str:
    """The field's name of a size, or the key's own in camel case."""
    for name, pattern in table()["generics"]:
        if re.match(pattern, key):
            return name
    return camel(key)


def camel(key: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[_.]", key) if part)


def text_key(config: PreTrainedConfig) -> Key:
    """Where the language model's part of a configuration is; empty where it is the whole."""
    part = config.get_text_config()
    return next(((name,) for name, value in vars(config).items() if value is part), ())


def figures(config: PreTrainedConfig, everything: bool = False) -> dict[Key, int]:
    """Every whole number of a configuration that may be a size, in its order; of its language part
    where it has several.

    everything: those that are never sizes too.
    """
    start = text_key(config)
    found: dict[Key, int] = {}
    _figures(at(config, start), start, found)
    if everything:
        return found
    never = table()["never"]
    return {
        key: value
        for key, value in found.items()
        if not re.search(never, key[-1]) and generic(key[-1]) != "Layers"
    }


def _figures(holder: Any, where: Key, found: dict[Key, int]) -> None:
    from transformers import PreTrainedConfig

    for name, value in (holder if isinstance(holder, dict) else vars(holder)).items():
        if not isinstance(name, str) or name.startswith(
            ("_", "rope_", "id2", "label2", "task_", "quantization")
        ):
            continue
        if type(value) is int and value > 0:
            found[*where, name] = value
        elif _repeats_one(value) and any(
            re.match(pattern, name) for _, pattern in table()["generics"]
        ):
            found[*where, name] = value[0]  # pyright: ignore[reportIndexIssue]  a list, as looked
        elif isinstance(value, PreTrainedConfig) or (
            isinstance(value, dict) and value and len(where) < 2
        ):
            _figures(value, (*where, name), found)


def choices(config: PreTrainedConfig) -> dict[Key, Any]:
    """What a configuration, its language part where it has several, says in flags and words: not
    how large, but what is built."""
    found: dict[Key, Any] = {}

    def gather(holder: Any, where: Key) -> None:
        for name, value in (holder if isinstance(holder, dict) else vars(holder)).items():
            if (
                not isinstance(name, str)
                or name.startswith("_")
                or name in ("dtype", "transformers_version", "architectures")
            ):
                continue
            if value is None or isinstance(value, bool | str):
                found[*where, name] = value
            elif isinstance(value, dict) or hasattr(value, "model_type"):
                gather(value, (*where, name))

    start = text_key(config)
    gather(at(config, start), start)
    return found


def _repeats_one(value: Any) -> bool:
    """Whether a value is a list over the blocks with one number for all of them."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and type(value[0]) is int
        and value[0] > 0
        and len(set(value)) == 1
    )


def named(keys: Sequence[Key]) -> dict[Key, str]:
    """A name for each figure, no two alike."""
    found: dict[Key, str] = {}
    for key in keys:
        choices = [generic(key[-1]), camel(key[-1]), camel("_".join(key))]
        found[key] = next(name for name in choices if name not in found.values())
    return found


def changed(config: PreTrainedConfig, numbers: Mapping[Key, Any]) -> PreTrainedConfig:
    """A copy with other numbers, set without the checks of the class: they look at one figure at a
    time."""
    other = copy.deepcopy(config)
    for key, number in numbers.items():
        holder = at(other, key[:-1])
        inside = holder if isinstance(holder, dict) else vars(holder)
        before = inside.get(key[-1])
        inside[key[-1]] = (
            [number] * len(before or ()) if type(number) is int and _repeats_one(before) else number
        )
    return other


def at(holder: Any, key: Key) -> Any:
    """What stands there in a configuration."""
    for name in key:
        holder = holder[name] if isinstance(holder, dict) else vars(holder)[name]
    return holder


def depth_key(config: PreTrainedConfig) -> Key | None:
    """The figure that is the number of blocks, None where there is none."""
    start = text_key(config)
    holder = vars(at(config, start))
    return next(
        (
            (*start, name)
            for name, value in holder.items()
            if generic(name) == "Layers" and type(value) is int
        ),
        None,
    )


def _depth(config: PreTrainedConfig) -> int | None:
    """The number of blocks, which may be the length of a list."""
    key = depth_key(config)
    return (
        at(config, key)
        if key is not None
        else getattr(config.get_text_config(), "num_hidden_layers", None)
    )


def per_block(config: PreTrainedConfig) -> dict[Key, list[Any]]:
    """The lists of a configuration that hold an entry for each block."""
    start, count = text_key(config), _depth(config) or 0
    return {
        (*start, name): list(value)
        for name, value in vars(at(config, start)).items()
        if isinstance(value, list | tuple) and len(value) == count and count > 1
    }


def with_blocks(config: PreTrainedConfig, blocks: Sequence[int]) -> PreTrainedConfig:
    """A copy with as many blocks as ``blocks`` has entries, of the kinds that those blocks have in
    its lists."""
    start, key, count = text_key(config), depth_key(config), _depth(config) or 0
    new: dict[Key, Any] = {
        where: [values[i] for i in blocks] for where, values in per_block(config).items()
    }
    for name, value in vars(at(config, start)).items():
        if (
            (*start, name) not in new
            and isinstance(value, list | tuple)
            and value
            and _are_blocks(name, value, count)
        ):
            new[*start, name] = [blocks.index(i) for i in value if i in blocks]
        if name == "num_kv_shared_layers" and type(value) is int:  # so many of the last blocks
            new[*start, name] = sum(i >= count - value for i in blocks)
    return changed(config, new if key is None else {**new, key: len(blocks)})


def _are_blocks(name: str, value: Sequence[Any], count: int) -> bool:
    """Whether a list is of numbers of blocks."""
    return (
        "layer" in name
        and all(type(one) is int and 0 <= one < count for one in value)
        and len(set(value)) == len(value)
    )


def derived(config: PreTrainedConfig) -> set[Key]:
    """Figures that the configuration's class works out from others where nobody gives them."""
    start = text_key(config)
    holder = at(config, start)
    given = (
        {field.name: field.default for field in dataclasses.fields(holder)}
        if dataclasses.is_dataclass(holder)
        else {}
    )
    return {(*start, name) for name in vars(holder) if given.get(name) is None}


def relations(
    numbers: Mapping[str, int], moved: str, derived: Collection[str] = ()
) -> list[tuple[str, Expr]]:
    """What other sizes may follow from ``moved``, since the numbers fit: ``(name, expression)``,
    the likeliest first.

    Those in ``derived``, which the configuration's class works out where nobody gives them, come
    before others.

    Such a relation is a thing to try; what is taken for one is up to a model that builds with it
    and not without.
    """
    value, found = numbers[moved], []

    def term(*factors: tuple[str, int]) -> Expr:
        return Expr.of({tuple(sorted(factors)): 1})

    others = [name for name in numbers if name != moved and numbers[name] > 1]
    for name in others:
        own = numbers[name]
        for other in others:
            if other != name and own == value + numbers[other]:
                found.append((0, name, Expr.name(moved) + Expr.name(other)))
            if other != name and value > 1 and own == value * numbers[other]:
                found.append((1, name, term((moved, 1), (other, 1))))
            if other != name and own * value == numbers[other]:
                found.append((1, name, term((other, 1), (moved, -1))))
            if other != name and own * numbers[other] == value:
                found.append((1, name, term((moved, 1), (other, -1))))
        if own % value == 0 and own // value <= 8:
            found.append((0 if own == value else 2, name, Expr.of({((moved, 1),): own // value})))
        elif value % own == 0 and value // own <= 8:
            found.append((2, name, Expr.of({((moved, 1),): Fraction(own, value)})))
        elif (share := Fraction(own, value)).numerator <= _PARTS and share.denominator <= _PARTS:
            found.append((4, name, Expr.of({((moved, 1),): share})))
        for first, second in (
            (a, b) for a in others for b in others if name not in (a, b) and a != b
        ):
            if own * numbers[second] == value * numbers[first]:
                found.append((3, name, term((moved, 1), (first, 1), (second, -1))))
            if first < second and own * value == numbers[first] * numbers[second]:
                found.append((3, name, term((first, 1), (second, 1), (moved, -1))))
    word = last_word(moved)
    # Equal sizes of one sort, such as two widths, are the likeliest to be one size.
    found.sort(
        key=lambda one: (
            not (numbers[one[1]] == value and last_word(one[1]) == word),
            one[1] not in derived,
            one[0],
        )
    )
    return [(name, expression) for _, name, expression in found]


def last_word(name: str) -> str:
    return re.findall(r"[A-Z][a-z0-9]*|^[a-z0-9]+", name)[-1]
