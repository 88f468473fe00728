"""How sizes in bytes, block numbers, counts, dtypes and the call's axes are written everywhere."""

from __future__ import annotations

from collections.abc import Iterable

#: The axes whose length comes from the call, and the letter that types write for it.
CALL = {"batch": "B", "seq": "S", "query": "S", "key": "S"}

#: How types write dtypes; others keep torch's name.
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int64": "i64",
    "int32": "i32",
    "uint8": "u8",
}

_DECIMAL, _BINARY = ("B", "kB", "MB", "GB", "TB"), ("B", "KiB", "MiB", "GiB", "TiB")


def size_in_bytes(count: float, binary: bool = False) -> str:
    """A number of bytes to three digits: 812 B, 4.1 MB; with ``binary``, 2.25 MiB."""
    base, units = (1024, _BINARY) if binary else (1000, _DECIMAL)
    place = 0
    # What would be written as a whole thousand of one unit is one of the next.
    while place < len(units) - 1 and round(count) >= base:
        count, place = count / base, place + 1
    unit = units[place]
    return f"{count:.0f} {unit}" if unit == "B" or count >= 999.5 else f"{count:.3g} {unit}"


def ranges(numbers: Iterable[int], most: int | None = None, dash: str = "–") -> str:
    """Ascending numbers in runs: ``0–2, 5`` for 0, 1, 2, 5; an ellipsis after ``most`` runs."""
    runs: list[list[int]] = []
    for one in numbers:
        if runs and one == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], one]
        else:
            runs.append([one, one])
    words = [str(first) if first == last else f"{first}{dash}{last}" for first, last in runs[:most]]
    return ", ".join(words) + (", …" if most is not None and len(runs) > most else "")


def short_dtype(name: str) -> str:
    """``bfloat16`` as bf16, ``bfloat16|float32`` as bf16|f32."""
    return "|".join(_DTYPES.get(one, one) for one in name.split("|"))


def numbered(what: str, count: int) -> str:
    """The numbers of ``count`` things: ``blocks 0 to 3``, ``block 0 alone``, ``no blocks``."""
    if count < 2:
        return f"{what} 0 alone" if count else f"no {what}s"
    return f"{what}s 0 to {count - 1}"
