"""What a checkpoint costs, as its page shows it: formulas over the generics, numbers, and plots
over the context.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar

from markupsafe import Markup

from builder.pages.checkpoints import Record, Variant, by_checkpoint
from builder.pages.figures import Figure, figures, size, thousands
from builder.pages.plot import Curve, plot

Json = Mapping[str, Any]
_Part = TypeVar("_Part")

_NAME = re.compile(r"[A-Za-z]\w*")

#: The costs of a signature, as a page names those without a formula.
_COSTS = {
    "parameters": "parameters",
    "weights": "bytes of weights",
    "cache": "caches and state",
    "flops": "operations for a token",
}


@dataclass(frozen=True)
class Formula:
    """A cost as a formula.

    symbols: over the generics. value: what it comes to, a number or a formula of what the call
    decides. where: further names in ``symbols`` and what they are. parts: the same cost by part.
    """

    name: str
    symbols: str
    value: str
    where: tuple[tuple[str, str], ...] = ()
    parts: tuple[Formula, ...] = ()


@dataclass(frozen=True)
class FormulaRow:
    """A cost of all checkpoints: its values, its formulas (symbols and ``where``), and its rows
    by part.
    """

    name: str
    numbers: list[Variant[str]]
    formulas: list[Variant[tuple[str, tuple[tuple[str, str], ...]]]]
    parts: list[FormulaRow]


class Numbers(TypedDict):
    """The costs of a checkpoint that are shown in numbers."""

    figures: list[Figure]
    parameters: Json
    plots: list[tuple[Markup, str]]
    caches_unknown: str | None
    unknown: list[str]


def numbers(record: Record) -> Numbers:
    """Return the costs of a checkpoint in numbers; checkpoints with equal ones share them."""
    return {
        "figures": figures(record),
        "parameters": record["parameters"],
        "plots": plots(record),
        "caches_unknown": record.get("caches_unknown"),
        "unknown": _unknown(record),
    }


def _cost(record: Record, name: str) -> Any:
    """Return a cost of a record's signature, None where there is none."""
    found = record["signature"].get("costs", {}).get(name)
    return None if not found or "unknown" in found else found


def _unknown(record: Record) -> list[str]:
    """Return the costs without a formula, each with the reason."""
    costs = record["signature"].get("costs", {})
    return [
        f"{label}: {costs[name]['unknown']}"
        for name, label in _COSTS.items()
        if name in costs and "unknown" in costs[name]
    ]


def formula_rows(records: Sequence[Record]) -> list[FormulaRow]:
    """Return a row for every cost that has a formula in any of the records."""
    return _rows(records, [list(formulas(record)) for record in records])


def _rows(records: Sequence[Record], found: Sequence[Sequence[Formula]]) -> list[FormulaRow]:
    by_name = {
        record["checkpoint"]: {formula.name: formula for formula in own}
        for record, own in zip(records, found, strict=True)
    }

    def variants(name: str, part: Callable[[Formula], _Part]) -> list[Variant[_Part]]:
        def of(record: Record) -> _Part | None:
            formula = by_name[record["checkpoint"]].get(name)
            return part(formula) if formula else None

        return [
            Variant(ids, content, visible)
            for ids, content, visible in by_checkpoint(records, of)
            if content is not None
        ]

    def parts(name: str) -> list[Sequence[Formula]]:
        own = [by_name[record["checkpoint"]].get(name) for record in records]
        return [formula.parts if formula else () for formula in own]

    return [
        FormulaRow(
            name,
            variants(name, lambda formula: formula.value),
            variants(name, lambda formula: (formula.symbols, formula.where)),
            _rows(records, parts(name)),
        )
        for name in dict.fromkeys(name for own in by_name.values() for name in own)
    ]


def formulas(record: Record) -> Iterator[Formula]:
    """Yield the costs of one checkpoint: parameters, active ones, weights, caches and state,
    operations per token.
    """
    if counted := _cost(record, "parameters"):
        parts = [(row["part"], row) for row in counted["by_part"]]
        yield _with_parts("parameters", counted, parts, thousands)
        if "active" in counted and counted["active"]["formula"] != counted["formula"]:
            active = [
                (row["part"], row["active"])
                for row in counted["by_part"]
                if row["active"]["formula"] != row["formula"]
            ]
            yield _with_parts("active per token", counted["active"], active, thousands)
    for row in _cost(record, "weights") or ():
        yield _with_parts(f"bytes of weights, {row['dtype']}", row, (), size)
    if (cache := _cost(record, "cache")) and cache["by_kind"]:
        kinds = [(_cache_kind(row), row) for row in cache["by_kind"]]
        yield _with_parts(
            "bytes of cache and state after S tokens of B sequences",
            cache,
            kinds if len(kinds) > 1 else (),
            size,
            cache["where"],
        )
    if flops := _cost(record, "flops"):
        parts = [(row["part"], row) for row in flops["by_part"]]
        name = "operations for a token at a context of T"
        yield _with_parts(name, flops, parts, thousands, flops["where"])


def _with_parts(
    name: str,
    cost: Json,
    parts: Sequence[tuple[str, Json]],
    write: Callable[[int], str],
    where: Mapping[str, Json] | None = None,
) -> Formula:
    """Return a cost with its parts; ``write`` turns a number into text."""
    total, *rest = (
        _formula(label, row, write, where or {}) for label, row in [(name, cost), *parts]
    )
    return replace(total, parts=tuple(rest))


def _formula(
    name: str, cost: Json, write: Callable[[int], str], where: Mapping[str, Json]
) -> Formula:
    value = cost["numbers"] if cost["number"] is None else write(cost["number"])
    names = _NAME.findall(cost["formula"])
    further = [(word, meaning["formula"]) for word, meaning in where.items() if word in names]
    return Formula(name, cost["formula"], value, tuple(further))


def _cache_kind(row: Json) -> str:
    blocks = "all blocks" if row["blocks"] == "Layers" else row["blocks"]
    return f"{blocks}, {'growing' if row['grows'] else 'fixed size'}"


def unbroken_terms(text: str) -> str:
    """Return a formula whose lines break only between its terms."""
    return text.replace(" * ", "\u00a0*\u00a0").replace(" / ", "\u00a0/\u00a0")


def plots(record: Record) -> list[tuple[Markup, str]]:
    """Return plots over the context length, each with its legend: cache and state, and
    operations for a token.
    """
    found = []
    if (cache := _cost(record, "cache")) and any(any(row[1:]) for row in cache["over"]):
        lengths, growing, constant = zip(*cache["over"], strict=True)
        curves = [
            Curve("cache", "attention", growing),
            Curve("state", "recurrent", constant, dashed=True),
        ]
        title = "cache and state of one sequence, bytes"
        drawn = plot(title, "tokens of the context", lengths, curves, size, tokens)
        legend = _legend(
            ("caches that grow with the context", growing), ("fixed-size state", constant)
        )
        found.append((drawn, legend))
    if flops := _cost(record, "flops"):
        lengths, growing, constant = zip(*flops["over"], strict=True)
        curves = [
            Curve("over the context", "attention", growing),
            Curve("all else", "mlp", constant, dashed=True),
        ]
        title = "operations for one more token"
        drawn = plot(title, "tokens of the context", lengths, curves, operations, tokens, 10)
        legend = _legend(("what grows with the context", growing), ("all else", constant))
        found.append((drawn, f"{legend}. Counts {flops['counted']}"))
    return found


def _legend(solid: tuple[str, Sequence[int]], dashed: tuple[str, Sequence[int]]) -> str:
    """Name the two lines of a plot, those that are drawn."""
    lines = (("solid", *solid), ("dashed", *dashed))
    return "; ".join(f"{line}: {name}" for line, name, values in lines if any(values))


def tokens(length: float) -> str:
    """Return a context length in short: 512, 8 k, 256 k, 1 M, in powers of 1024 where it is a
    whole number of them.
    """
    for scale, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if length >= scale and length % scale == 0:
            return f"{length // scale:.0f}\u202f{unit}"
    return thousands(int(length))


def operations(number: float) -> str:
    """Return a number of operations in short: 6.3 G, 812 M."""
    for scale, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g}\u202f{unit}"
    return f"{number:.0f}"
