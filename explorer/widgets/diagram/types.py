"""Types as the diagram writes them: axes by name or in numbers, shortened where there is no room.

``block-diagram.js`` writes them again when another notation is asked for, by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from explorer.vocabulary.formatting import CALL, short_dtype

#: As long as most: a batch and a sequence.
_USUAL = {"B": "1", "S": "4096"}


@dataclass(frozen=True)
class Type:
    """A tensor's type: its axes by the names of their sizes and in numbers, and its dtype, empty where that goes without saying.

    ``of`` are the values that are so, as ``host.name``.
    """

    names: tuple[str, ...]
    numbers: tuple[str, ...]
    dtype: str = ""
    of: tuple[str, ...] = field(default=(), compare=False)

    @property
    def longest(self) -> int:
        """Letters it takes in the longest notation: with numbers for what the call decides, of a usual length."""
        filled = [_USUAL.get(axis, axis) for axis in self.numbers]
        return max(len(written(self.names, self.dtype)), len(written(filled, self.dtype)))

    def plain(self) -> Type:
        return replace(self, dtype="")

    def also(self, keys: Iterable[str]) -> Type:
        return replace(self, of=(*self.of, *keys))


def type_of(
    row: Mapping[str, Any],
    inferred: Mapping[str, Any] | None = None,
    of: str = "",
    layer: int | None = None,
) -> Type:
    """The type of a value's row on block ``layer``: as ``inferred`` by a signature, else by the names of its layout's axes."""
    if inferred and inferred["numbers"]:
        # A mark after the number of an axis that no expression was found for.
        names = [f"{axis[1:]}?" if axis.startswith("?") else axis for axis in inferred["dims"]]
        numbers, dtype = inferred["numbers"], inferred["dtype"]
    else:
        shape = row.get("shape") or {}
        names = [axis_name(axis) for axis in shape.get("symbols") or row["dims"]]
        own = next(
            (other["numbers"] for other in shape.get("others", ()) if layer in other["layers"]),
            shape.get("numbers"),
        )
        numbers, dtype = [CALL.get(axis, axis) for axis in own or row["dims"]], row.get("dtype")
    return Type(
        tuple(names),
        tuple(str(number) for number in numbers),
        short_dtype(dtype or ""),
        (of,) if of else (),
    )


def axis_name(axis: str) -> str:
    """An axis as types write it: ``batch`` is B, ``num_kv_heads`` is KvHeads, ``hidden_size`` is Hidden."""
    if axis in CALL:
        return CALL[axis]
    words = axis.removeprefix("num_").removesuffix("_size").split("_")
    return "".join(word[:1].upper() + word[1:] for word in words)


def written(axes: Sequence[str], dtype: str = "", room: float = float("inf")) -> str:
    """``f32[B, S, Hidden]``. Where that has more letters than there is room for, … stands for the longest axes, each in its place."""
    shown = list(axes)
    while len(text := f"{dtype}[{', '.join(shown)}]") > room:
        longest = max(range(len(shown)), key=lambda at: len(shown[at]), default=0)
        if not shown or len(shown[longest]) < 2:
            break
        shown[longest] = "…"
    return text
