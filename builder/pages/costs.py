"""What a checkpoint costs, as its page shows it: formulas over the generics, numbers, and plots over the context."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from builder.pages.figures import figures, size, thousands
from builder.pages.plot import Curve, plot

Json = Mapping[str, Any]
Record = Mapping[str, Any]

_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True)
class Formula:
    """A cost in names and what it comes to: a number, or a formula of what the call decides; ``where`` says what further names are."""

    name: str
    symbols: str
    value: str
    where: tuple[tuple[str, str], ...] = ()
    parts: tuple[Formula, ...] = ()


def known(record: Record, name: str) -> Json | None:
    """A cost of a record's signature: None where there is none, and why not is `unknown`'s to say."""
    found = record["signature"].get("costs", {}).get(name)
    return None if not found or "unknown" in found else found


def unknown(record: Record) -> list[str]:
    """What of the costs has no formula, and why, in words."""
    costs = record["signature"].get("costs", {})
    names = {
        "parameters": "parameters",
        "weights": "bytes of weights",
        "cache": "caches and state",
        "flops": "operations for a token",
    }
    return [
        f"{said}: {costs[name]['unknown']}"
        for name, said in names.items()
        if name in costs and "unknown" in costs[name]
    ]


def view(record: Record) -> Json:
    """What is told of a checkpoint in numbers, for checkpoints that agree in it to share."""
    return {
        "figures": figures(record),
        "parameters": record["parameters"],
        "plots": plots(record),
        "caches_unknown": record.get("caches_unknown"),
        "unknown": unknown(record),
    }


def rows(
    records: Sequence[Record], varying: Callable[[Sequence[Record], Callable[[Record], Any]], list]
) -> list[Json]:
    """Every cost that has a formula: ``[{name, values, formulas, parts}]``, its parts told alike.

    ``values`` and ``formulas`` (symbols, and what further names are) are as `builder.pages.render.varying` gives them.
    """
    found = [list(formulas(record)) for record in records]
    return _rows(records, found, varying)


def _rows(
    records: Sequence[Record], found: Sequence[Sequence[Formula]], varying: Callable[..., list]
) -> list[Json]:
    by_name = {
        record["checkpoint"]: {one.name: one for one in own}
        for record, own in zip(records, found, strict=True)
    }

    def of(name: str, part: Callable[[Formula], Any]) -> list:
        told = varying(
            records,
            lambda record: part(one) if (one := by_name[record["checkpoint"]].get(name)) else None,
        )
        return [row for row in told if row[1] is not None]

    return [
        {
            "name": name,
            "values": of(name, lambda one: one.value),
            "formulas": of(name, lambda one: (one.symbols, one.where)),
            "parts": _rows(
                records,
                [
                    by_name[record["checkpoint"]][name].parts
                    if name in by_name[record["checkpoint"]]
                    else ()
                    for record in records
                ],
                varying,
            ),
        }
        for name in dict.fromkeys(name for own in by_name.values() for name in own)
    ]


def formulas(record: Record) -> Iterator[Formula]:
    """The costs of one checkpoint: parameters, active ones, bytes of weights, what is kept, operations for a token."""
    if counted := known(record, "parameters"):
        yield _whole(
            "parameters", counted, [(row["part"], row) for row in counted["by_part"]], thousands
        )
        if "active" in counted and counted["active"]["formula"] != counted["formula"]:
            active = [
                (row["part"], row["active"])
                for row in counted["by_part"]
                if row["active"]["formula"] != row["formula"]
            ]
            yield _whole("active for each token", counted["active"], active, thousands)
    for row in known(record, "weights") or ():
        yield _whole(f"bytes of weights, {row['dtype']}", row, (), size)
    if (kept := known(record, "cache")) and kept["by_kind"]:
        kinds = [(_of_kind(row), row) for row in kept["by_kind"]]
        yield _whole(
            "bytes kept after S tokens of B sequences",
            kept,
            kinds if len(kinds) > 1 else (),
            size,
            kept["where"],
        )
    if done := known(record, "flops"):
        parts = [(row["part"], row) for row in done["by_part"]]
        yield _whole(
            "operations for a token at a context of T", done, parts, thousands, done["where"]
        )


def _whole(
    name: str,
    one: Json,
    parts: Sequence[tuple[str, Json]],
    said: Callable[[int], str],
    where: Mapping[str, Json] | None = None,
) -> Formula:
    """A cost with its parts, numbers told by ``said``."""
    made = [_formula(called, row, said, where or {}) for called, row in [(name, one), *parts]]
    return replace(made[0], parts=tuple(made[1:]))


def _formula(
    name: str, one: Json, said: Callable[[int], str], where: Mapping[str, Json]
) -> Formula:
    value = one["numbers"] if one["number"] is None else said(one["number"])
    further = [
        (word, meaning["formula"])
        for word, meaning in where.items()
        if word in _NAME.findall(one["formula"])
    ]
    return Formula(name, one["formula"], value, tuple(further))


def _of_kind(row: Json) -> str:
    blocks = "all blocks" if row["blocks"] == "Layers" else row["blocks"]
    return f"{blocks}, {'growing' if row['grows'] else 'of one size'}"


def whole_terms(text: str) -> str:
    """A formula that lines break between its terms only."""
    return text.replace(" * ", "\u00a0*\u00a0").replace(" / ", "\u00a0/\u00a0")


def plots(record: Record) -> list[tuple[Markup, str]]:
    """What one sequence keeps and what one more token takes, over the length of the context, each with what its lines are."""
    found = []
    if (kept := known(record, "cache")) and any(any(row[1:]) for row in kept["over"]):
        lengths, grows, constant = zip(*kept["over"], strict=True)
        curves = [
            Curve("cache", "attention", grows),
            Curve("state", "recurrent", constant, dashed=True),
        ]
        drawn = plot(
            "kept by one sequence, bytes", "tokens of the context", lengths, curves, size, tokens
        )
        found.append(
            (
                drawn,
                _key(("caches that grow with the context", grows), ("state of one size", constant)),
            )
        )
    if done := known(record, "flops"):
        lengths, grows, constant = zip(*done["over"], strict=True)
        curves = [
            Curve("over the context", "attention", grows),
            Curve("all else", "mlp", constant, dashed=True),
        ]
        drawn = plot(
            "operations for one more token",
            "tokens of the context",
            lengths,
            curves,
            operations,
            tokens,
            10,
        )
        key = _key(("what grows with the context", grows), ("all else", constant))
        found.append((drawn, f"{key}. Counted are {done['counted']}"))
    return found


def _key(solid: tuple[str, Sequence[int]], dashed: tuple[str, Sequence[int]]) -> str:
    """What the lines of a plot are, those that are drawn."""
    said = [
        f"{line}: {name}"
        for line, (name, numbers) in (("solid", solid), ("dashed", dashed))
        if any(numbers)
    ]
    return "; ".join(said)


def tokens(length: float) -> str:
    """A length of the context, short: 512, 8 k, 256 k, 1 M, in powers of 1024 where it is a whole number of them."""
    for scale, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if length >= scale and length % scale == 0:
            return f"{length // scale:.0f}\u202f{unit}"
    return thousands(int(length))


def operations(number: float) -> str:
    """A number of operations, short: 6.3 G, 812 M."""
    for scale, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g}\u202f{unit}"
    return f"{number:.0f}"
