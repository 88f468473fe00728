"""A family's signature as its page shows it: what its checkpoints have alike once, in symbols, and their numbers apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from explorer.vocabulary.formatting import ranges, short_dtype

Json = Mapping[str, Any]
Record = Mapping[str, Any]

#: ``[(ids, part, first shown?)]`` of records by a part of each, see `builder.pages.render.varying`.
Varying = Callable[[Sequence[Record], Callable[[Record], Any]], list[tuple[str, Any, bool]]]

#: The path of a block: the block list's, and one number.
_BLOCK = re.compile(r"^\D+\.\d+$")

#: The names in a formula.
_NAME = re.compile(r"[A-Za-z]\w*")


def context(records: Sequence[Record], varying: Varying) -> Json:
    """What the page's section is filled with; ``varying`` groups records by a part of them that they may have alike."""
    signed = [record for record in records if "unknown" not in record["signature"]]

    def apart(some: Sequence[Record], part: Callable[[Record], Any]) -> list[tuple[str, Any, bool]]:
        """The same, named by checkpoint also where all of ``some`` agree and they are not all there are."""
        found = varying(some, part)
        if len(some) == len(records) or len(found) > 1:
            return [(ids, one, here and some[0] is records[0]) for ids, one, here in found]
        return [
            (" ".join(record["checkpoint"] for record in some), one, some[0] is records[0])
            for _, one, _ in found
        ]

    reasons = varying(records, lambda record: record["signature"].get("unknown"))
    return {
        "typed": signed,
        "varying_of": apart,
        "untyped": [(reason, ids, here) for ids, reason, here in reasons if reason],
        "generics": generics,
        "entries": entries,
        "resolved": lambda record: record["signature"]["resolved"],
        "caches": lambda record: cache_rows(record, signed, varying),
        "classes": classes(records, signed, varying) if signed else [],
        "linked": {(row["host"], row["name"]) for row in records[0]["values"]},
    }


def type_html(one: Json) -> Markup:
    """A type with its axes marked, for the script to show their numbers: ``bf16[B, S, Hidden]``."""
    return Markup("{}[{}]").format(
        short_dtype(one["dtype"]), Markup(", ").join(map(axis_html, one["dims"]))
    )


def axis_html(text: str) -> Markup:
    """One axis: a number as it is, one that did not resolve with a mark, any other to be pointed at."""
    if text.startswith("?"):
        return Markup('<b class="bare" title="this axis did not resolve">{}?</b>').format(text[1:])
    return (
        Markup("{}").format(text)
        if text == "*" or text.isdigit()
        else Markup("<i>{}</i>").format(text)
    )


def bound_html(one: Json) -> Markup:
    """A submodule's class with what it binds the class's generics to."""
    bound = (
        Markup("&lt;{}&gt;").format(Markup(", ").join(map(axis_html, one["arguments"])))
        if one["arguments"]
        else ""
    )
    return Markup("{}{}{}").format(
        f"{one['count']} × " if one.get("count") else "", one["class"], bound
    )


def generics(record: Record) -> Json:
    """The names that types are written in, with numbers: ``{rows, axes, variables}``; ``axes`` are made of several names."""
    found = record["signature"]
    return {
        "rows": found["generics"],
        "axes": list(found["axes"].items()),
        "variables": list(found["variables"].items()),
    }


def entries(record: Record) -> list[Json]:
    """The calls a model takes, each with what it does to the cache, in words."""
    kept = list(
        dict.fromkeys(
            tensor["name"] for row in record["signature"]["cache"] for tensor in row["tensors"]
        )
    )
    names = f"the cache: {', '.join(kept)}" if kept else "the cache"
    words = {
        (True, True): f"reads and writes {names}",
        (False, True): f"writes {names}",
        (False, False): "keeps nothing",
    }
    return [
        _symbols({**entry, "cache": words[entry["reads"], entry["writes"]]})
        for entry in record["signature"]["entries"]
    ]


def cache_rows(record: Record, records: Sequence[Record], varying: Varying) -> list[Json]:
    """What each kind of block keeps between calls: ``[{where, on, tensors}]``, with how far each tensor grows.

    ``on`` are the blocks, as `varying` gives them over all of ``records``.
    """

    def blocks(at: int) -> Callable[[Record], str]:
        def on(one: Record) -> str:
            rows = one["signature"]["cache"]
            return _on(one, rows[at]["layers"]) if at < len(rows) else ""

        return on

    return [
        {
            "where": row["module"] or "the block",
            "on": varying(records, blocks(at)),
            "tensors": [_symbols({**tensor, "grows": _grows(tensor)}) for tensor in row["tensors"]],
        }
        for at, row in enumerate(record["signature"]["cache"])
    ]


def _grows(tensor: Json) -> str:
    dims = tensor["after_prefill"]["dims"]
    if any(text.startswith("min(") and "S" in _NAME.findall(text) for text in dims):
        return "slides: no more than a window"
    return (
        "full: grows with every token"
        if any("S" in _NAME.findall(text) for text in dims)
        else "one size at every length"
    )


def classes(records: Sequence[Record], signed: Sequence[Record], varying: Varying) -> list[Json]:
    """Every module class once: ``[{name, block, ids, here, on, members}]``, those of blocks first.

    ``on`` and ``members`` are lists as `varying` gives them, for the checkpoints in which they differ; ``ids`` are the
    checkpoints that have the class where not all have it, and ``here`` says whether the first has. ``signed`` are those
    of ``records`` that have a signature.
    """
    numbered = [dict(_numbered(record)) for record in signed]
    keys = list(dict.fromkeys(key for found in numbered for key in found))
    rows = []
    for key in keys:
        there = {
            record["checkpoint"]: found[key]
            for record, found in zip(signed, numbered, strict=True)
            if key in found
        }
        having = [record for record in signed if record["checkpoint"] in there]

        def of(record: Record, there: Mapping[str, Json] = there) -> Json:
            return there[record["checkpoint"]]

        first = next(iter(there.values()))
        rows.append(
            {
                "name": key[0],
                "block": all(map(_BLOCK.match, first["paths"])),
                "ids": "" if len(there) == len(records) else " ".join(there),
                "here": records[0]["checkpoint"] in there,
                "on": varying(having, lambda record, of=of: _on(record, of(record)["layers"])),
                "members": varying(having, lambda record, of=of: _members(record, of(record))),
            }
        )
    return sorted(rows, key=lambda row: not row["block"])


def _numbered(record: Record) -> list[tuple[tuple[str, int], Json]]:
    """Classes by name, those of one name told apart by a number."""
    counts: dict[str, int] = {}
    found = []
    for one in record["signature"]["blocks"]:
        counts[one["class"]] = counts.get(one["class"], 0) + 1
        found.append(((one["class"], counts[one["class"]]), one))
    return found


def _on(record: Record, layers: Sequence[int]) -> str:
    count = record["sizes"]["num_layers"]
    if not layers:
        return ""
    return (
        f"all {count} blocks"
        if len(layers) == count
        else f"{len(layers)} of {count} blocks: {ranges(layers, most=6)}"
    )


def _members(record: Record, one: Json) -> Json:
    """What a class has, in symbols; the decoding step only where it is typed otherwise than a prompt."""
    forward, *later = one["functions"] or [None]
    same = [
        step
        for step in later
        if forward and all(step[key] == forward[key] for key in ("arguments", "results"))
    ]
    values = [
        {key: row[key] for key in ("host", "name", "type")}
        for row in record["signature"]["values"]
        if set(row["modules"]) & set(one["paths"])
    ]
    found = {
        "generics": one["generics"],
        "submodules": one["submodules"],
        "parameters": one["parameters"],
        "buffers": one["buffers"],
        "state": [{"name": row["name"], "type": row["after_prefill"]} for row in one["state"]],
        "functions": [step for step in one["functions"] if step not in same],
        "values": values,
    }
    return _symbols(found)


def _symbols(found: Any) -> Any:
    """The same without the numbers of its types, which checkpoints differ in."""
    if isinstance(found, dict):
        return {key: _symbols(value) for key, value in found.items() if key != "numbers"}
    return [_symbols(value) for value in found] if isinstance(found, list) else found
