"""Types as the diagram writes them: axes by name or in numbers, shortened where there is no room.

``block-diagram.js`` writes them again when another notation is asked for, by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from explorer.vocabulary.formatting import CALL, short_dtype

#: A batch size and a length that most calls do not exceed.
_USUAL_CALL = {"B": "1", "S": "4096"}


@dataclass(frozen=True)
class Type:
    """A tensor's type: its axes by the names of their sizes and in numbers, and its dtype, which
    may be left out.

    ``of`` are the values that have the type, as ``host.name``; it plays no part in comparisons.

    """

    names: tuple[str, ...]
    numbers: tuple[str, ...]
    dtype: str = ""
    of: tuple[str, ...] = field(default=(), compare=False)

    @property
    def max_length(self) -> int:
        """Letters of the longest notation, with usual numbers for what the call decides."""
        filled = [_USUAL_CALL.get(axis, axis) for axis in self.numbers]
        return max(len(format_type(axes, self.dtype)) for axes in (self.names, filled))

    def without_dtype(self) -> Type:
        return replace(self, dtype="")

    def also(self, keys: Iterable[str]) -> Type:
        """The type, standing for further values."""
        return replace(self, of=(*self.of, *keys))


def type_of(
    row: Mapping[str, Any], inferred: Mapping[str, Any] | None = None, layer: int | None = None
) -> Type:
    """The type of a value's row on block ``layer``: as a signature ``inferred`` it, else by the
    names of its layout's axes.
    """
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
    return Type(tuple(names), tuple(str(number) for number in numbers), short_dtype(dtype or ""))


def axis_name(axis: str) -> str:
    """An axis as types write it: ``batch`` is B, ``num_kv_heads`` is KvHeads, ``hidden_size`` is
    Hidden.
    """
    if axis in CALL:
        return CALL[axis]
    words = axis.removeprefix("num_").removesuffix("_size").split("_")
    return "".join(word[:1].upper() + word[1:] for word in words)


def format_type(axes: Sequence[str], dtype: str = "", room: float = float("inf")) -> str:
    """``f32[B, S, Hidden]``.

    Where that has more letters than ``room``, … replaces the longest axes, one by one.
    """
    shown = list(axes)
    while len(text := f"{dtype}[{', '.join(shown)}]") > room:
        longest = max(range(len(shown)), key=lambda at: len(shown[at]), default=0)
        if not shown or len(shown[longest]) < 2:
            break
        shown[longest] = "…"
    return text
