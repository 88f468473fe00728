"""Numbers as pages write them, and the figures of a record with the formula behind each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from explorer.vocabulary.formatting import ranges, size_in_bytes

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """One number on a page: its name, its value as text, the formula behind it, and a remark."""

    name: str
    value: str
    formula: str
    note: str = ""


def count(value: float | None) -> str:
    """Return a count in short: 79.7 B, 134.5 M, 512."""
    if value is None:
        return "not known"
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= scale:
            return f"{value / (1e3 if unit == 'k' else scale):.1f} {unit}"
    return thousands(value)


def thousands(value: float) -> str:
    """Return a count in full with its thousands separated: 79 674 391 296."""
    return f"{value:,}".replace(",", "\u202f")


def size(value: float) -> str:
    """Return bytes in short, in powers of 1024."""
    return size_in_bytes(value, binary=True)


def layer_ranges(layers: Iterable[int]) -> str:
    """Return block numbers as ranges, ``0–2, 4–6, 8``, with an ellipsis after six of them."""
    return ranges(layers, most=6)


def figures(record: Record) -> list[Figure]:
    """Return parameters, active parameters, and caches and state of a sequence, each with its
    formula.
    """
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
        Figure("active per token", count(counted["active"]), used, counted.get("convention") or ""),
    ]
    rows = record.get("caches") or ()
    found += [_cache(row) for row in rows]
    longest = record["config"].get("max_position_embeddings")
    if rows and isinstance(longest, int):
        found.append(_longest_context(rows, longest))
    return found


def _cache(row: Mapping[str, Any]) -> Figure:
    """Return the figure of one kind of cache or state."""
    grows = row["fixed_bytes"] is None
    amount = f"{size(row['per_token_bytes'])} per token" if grows else size(row["fixed_bytes"])
    formula = f"{row['formula']} = {row['numbers']}"
    note = row.get("note") or ("" if grows else "for each sequence")
    return Figure(row["name"], amount, formula, note)


def _longest_context(rows: Iterable[Mapping[str, Any]], tokens: int) -> Figure:
    """Return the figure of all caches and state of one sequence of the longest length."""
    terms, total = [], 0
    for row in rows:
        amount = row["fixed_bytes"]
        if amount is None:
            amount = row["per_token_bytes"] * min(tokens, row["tokens_at_most"] or tokens)
        total += amount
        terms.append(f"{row['name']} {size(amount)}")
    return Figure(
        f"cache and state at {thousands(tokens)} tokens",
        size(total),
        " + ".join(terms),
        "one sequence at max_position_embeddings",
    )
