"""Numbers as pages write them, and the figures of a record with the formula behind each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from explorer.vocabulary.formatting import ranges, size_in_bytes

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """One number on a page: what it is, the number, and how it comes about."""

    name: str
    value: str
    formula: str
    note: str = ""


def count(value: float | None) -> str:
    """A count for reading: 79.7 B, 134.5 M, 512."""
    if value is None:
        return "not known"
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= scale:
            return f"{value / (1e3 if unit == 'k' else scale):.1f} {unit}"
    return thousands(value)


def thousands(value: float) -> str:
    """A count in full, its thousands apart: 79 674 391 296."""
    return f"{value:,}".replace(",", "\u202f")


def size(value: float) -> str:
    """Bytes for reading, in powers of 1024."""
    return size_in_bytes(value, binary=True)


def layer_ranges(layers: Iterable[int]) -> str:
    """Block numbers in words: ``0–2, 4–6, 8``; after six runs an ellipsis."""
    return ranges(layers, most=6)


def figures(record: Record) -> list[Figure]:
    """Parameters, active parameters, and what a sequence keeps, each with its formula and numbers."""
    counted = record["parameters"]
    parts = counted["by_part"]
    total = " + ".join(f"{part['part']} {count(part['count'])}" for part in parts)
    used = " + ".join(
        f"{part['part']} {count(part['active'])}" for part in parts if part["active"] != 0
    )
    found = [
        Figure(
            "parameters", count(counted["total"]), total, f"exactly {thousands(counted['total'])}"
        ),
        Figure(
            "active for each token", count(counted["active"]), used, counted.get("convention") or ""
        ),
    ]
    rows = record.get("caches") or ()
    found += [_kept(row) for row in rows]
    longest = record["config"].get("max_position_embeddings")
    if rows and isinstance(longest, int):
        found.append(_whole(rows, longest))
    return found


def _kept(row: Mapping[str, Any]) -> Figure:
    """One kind of cache or state."""
    grows = row["fixed_bytes"] is None
    amount = f"{size(row['per_token_bytes'])} a token" if grows else size(row["fixed_bytes"])
    formula = f"{row['formula']} = {row['numbers']}"
    return Figure(
        row["name"], amount, formula, row.get("note") or ("for each sequence" if not grows else "")
    )


def _whole(rows: Iterable[Mapping[str, Any]], tokens: int) -> Figure:
    """Everything one sequence of the longest length keeps."""
    terms, whole = [], 0
    for row in rows:
        if row["fixed_bytes"] is not None:
            bytes_ = row["fixed_bytes"]
        else:
            bytes_ = row["per_token_bytes"] * min(tokens, row["tokens_at_most"] or tokens)
        whole += bytes_
        terms.append(f"{row['name']} {size(bytes_)}")
    return Figure(
        f"kept at {thousands(tokens)} tokens",
        size(whole),
        " + ".join(terms),
        "one sequence at max_position_embeddings",
    )
