"""Names for the axes of a loaded model's values, from its configuration alone.

A page of the site has them from the model's signature, for which the model is probed at several
sizes: too slow here. The names are the same ones, `explorer.signature.sizes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from explorer.signature.sizes import figures, generic
from explorer.widgets.diagram.types import axis_name

Row = Mapping[str, Any]

#: For an axis of the vocabulary, the sizes of a configuration that may be its length, the most
#: specific first.
_SIZES = {
    "num_heads": ("Heads",),
    "num_kv_heads": ("KvHeads", "Heads"),
    "head_dim": ("VDim", "HeadDim"),
    "qk_head_dim": ("NopeDim + RopeDim", "HeadDim", "QkDim"),
    "heads": ("ValueHeads", "LinearHeads", "MambaHeads", "Heads"),
    "key_dim": ("KeyDim", "LinearDim", "StateDim", "HeadDim"),
    "value_dim": ("ValueDim", "LinearDim", "MambaDim", "HeadDim"),
    "intermediate_size": ("SharedInner", "ExpertInner * SharedExperts", "ExpertInner", "Inner"),
}


def sizes_of(config: Any) -> dict[str, int]:
    """The sizes of a configuration by the names signatures give them."""
    sizes: dict[str, int] = {}
    for key, number in figures(config).items():
        sizes.setdefault(generic(key[-1]), number)
    return sizes


def named_types(rows: Iterable[Row], sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """The types of a record's values, as its signature would list them: one row per shape."""
    return [
        {
            "host": row["host"],
            "name": row["name"],
            "layers": layers,
            "type": {
                "dims": [
                    _name(axis, number, sizes, row["host"])
                    for axis, number in zip(row["shape"]["symbols"], numbers, strict=True)
                ],
                "numbers": numbers,
                "dtype": row["dtype"],
            },
        }
        for row in rows
        if row["shape"]
        for layers, numbers in _shapes(row)
    ]


def _shapes(row: Row) -> list[tuple[list[int], list[int | str]]]:
    """The shapes a value has, each with the blocks it has it on; no blocks for the model's."""
    others = row["shape"].get("others", [])
    elsewhere = {layer for other in others for layer in other["layers"]}
    first = [layer for layer in row["layers"] or () if layer not in elsewhere]
    return [
        (first, row["shape"]["numbers"]),
        *((other["layers"], other["numbers"]) for other in others),
    ]


def _name(axis: str, number: int | str, sizes: Mapping[str, int], host: str) -> str:
    """The name of an axis: of the first size that its length may be and is."""
    names = _SIZES.get(axis, ())
    if axis == "intermediate_size" and not host.endswith("shared_experts"):
        names = ("Inner", "ExpertInner")
    if axis == "qk_head_dim" and not sizes.keys() & {"HeadDim", "VDim"}:
        return "HeadDim"  # the width of the stream over the number of heads
    return next((name for name in names if _value(name, sizes) == number), axis_name(axis))


def _value(expression: str, sizes: Mapping[str, int]) -> int | None:
    """A size, or a sum or product of sizes; None where the configuration lacks one."""
    for sign, combine in ((" + ", sum), (" * ", math.prod)):
        parts = [sizes.get(name) for name in expression.split(sign)]
        if len(parts) > 1:
            known = [part for part in parts if part is not None]
            return combine(known) if len(known) == len(parts) else None
    return sizes.get(expression)
