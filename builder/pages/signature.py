"""A family's signature as its page shows it: what its checkpoints share once, in symbols, and
their numbers separately.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from markupsafe import Markup

from builder.pages.checkpoints import Record, Variant, by_checkpoint
from explorer.vocabulary.formatting import ranges, short_dtype

Json = Mapping[str, Any]

#: The path of a block: that of the block list and one number.
_BLOCK_PATH = re.compile(r"^\D+\.\d+$")

#: The names in a formula.
_NAME = re.compile(r"[A-Za-z]\w*")

#: What an entry does with the cache, by whether it reads it and whether it writes it.
_CACHE_USE = {
    (True, True): "reads and writes the cache",
    (False, True): "writes the cache",
    (False, False): "uses no cache",
}


class Generics(TypedDict):
    """The names that types are written in, with numbers; ``axes`` are expressions of several
    names.
    """

    rows: list[Json]
    axes: list[tuple[str, int]]
    variables: list[tuple[str, str]]


class CacheRow(TypedDict):
    """What one kind of block keeps between calls; each of ``tensors`` also says how it
    ``grows``.
    """

    where: str
    on: list[Variant[str]]
    tensors: list[Json]


class ClassRow(TypedDict):
    """A module class. ids: the checkpoints that have it, "" where all have; visible: whether the
    default one has it.
    """

    name: str
    is_block: bool
    ids: str
    visible: bool
    on: list[Variant[str]]
    members: list[Variant[Json]]


class Types(TypedDict):
    """What the page's section on types is filled with; ``dtype`` is "" where no checkpoint has a
    signature.
    """

    dtype: str
    unknown: list[Variant[str]]
    generics: list[Variant[Generics]]
    entries: list[Variant[list[Json]]]
    caches: list[Variant[list[CacheRow]]]
    classes: list[ClassRow]
    resolved: list[Variant[Json]]
    linked: set[tuple[str, str]]


def context(records: Sequence[Record]) -> Types:
    """Return what the page's section on types is filled with."""
    signed = [record for record in records if "unknown" not in record["signature"]]
    reasons = by_checkpoint(records, lambda record: record["signature"].get("unknown", ""))
    return {
        "dtype": signed[0]["signature"]["dtype"] if signed else "",
        "unknown": [reason for reason in reasons if reason.part],
        "generics": by_checkpoint(signed, generics, records),
        "entries": by_checkpoint(signed, entries, records),
        "caches": by_checkpoint(signed, lambda record: cache_rows(record, signed), records),
        "classes": classes(records, signed),
        "resolved": by_checkpoint(signed, lambda record: record["signature"]["resolved"], records),
        "linked": {(row["host"], row["name"]) for row in records[0]["values"]},
    }


# -- types as HTML ----------------------------------------------------------------


def type_html(one: Json) -> Markup:
    """Return a type with its axes marked up, for the script to show their numbers: ``bf16[B, S,
    Hidden]``.
    """
    axes = Markup(", ").join(map(axis_html, one["dims"]))
    return Markup("{}[{}]").format(short_dtype(one["dtype"]), axes)


def axis_html(text: str) -> Markup:
    """Return one axis: a number as it is, an unresolved one marked, any other as a name whose
    number can be shown.
    """
    if text.startswith("?"):
        return Markup('<b class="bare" title="this axis did not resolve">{}?</b>').format(text[1:])
    if text == "*" or text.isdigit():
        return Markup("{}").format(text)
    return Markup("<i>{}</i>").format(text)


def class_html(one: Json) -> Markup:
    """Return a submodule's class with the arguments of its generics."""
    arguments = Markup("")
    if one["arguments"]:
        arguments = Markup("&lt;{}&gt;").format(Markup(", ").join(map(axis_html, one["arguments"])))
    count = f"{one['count']} × " if one.get("count") else ""
    return Markup("{}{}{}").format(count, one["class"], arguments)


# -- parts of the section ---------------------------------------------------------


def generics(record: Record) -> Generics:
    found = record["signature"]
    return {
        "rows": found["generics"],
        "axes": list(found["axes"].items()),
        "variables": list(found["variables"].items()),
    }


def entries(record: Record) -> list[Json]:
    """Return the calls a model takes, each with what it does with the cache, in words."""
    signature = record["signature"]
    names = [tensor["name"] for row in signature["cache"] for tensor in row["tensors"]]
    names = f": {', '.join(dict.fromkeys(names))}" if names else ""

    def cache(entry: Json) -> str:
        use = _CACHE_USE[entry["reads"], entry["writes"]]
        return f"{use}{names}" if entry["writes"] else use

    return [_symbols({**entry, "cache": cache(entry)}) for entry in signature["entries"]]


def cache_rows(record: Record, records: Sequence[Record]) -> list[CacheRow]:
    """Return what each kind of block keeps between calls; its blocks are given for all of
    ``records``.
    """

    def on(at: int) -> Callable[[Record], str]:
        def blocks(one: Record) -> str:
            rows = one["signature"]["cache"]
            return _blocks(one, rows[at]["layers"]) if at < len(rows) else ""

        return blocks

    return [
        {
            "where": row["module"] or "the block",
            "on": by_checkpoint(records, on(at)),
            "tensors": [_symbols({**tensor, "grows": _grows(tensor)}) for tensor in row["tensors"]],
        }
        for at, row in enumerate(record["signature"]["cache"])
    ]


def _grows(tensor: Json) -> str:
    """Describe how a cached tensor grows with the number of tokens S."""
    growing = [text for text in tensor["after_prefill"]["dims"] if "S" in _NAME.findall(text)]
    if any(text.startswith("min(") for text in growing):
        return "up to the window"
    return "with every token" if growing else "fixed size"


def classes(records: Sequence[Record], signed: Sequence[Record]) -> list[ClassRow]:
    """Return every module class once, those of blocks first; ``signed``: the records that have a
    signature.
    """
    numbered = {record["checkpoint"]: dict(_numbered(record)) for record in signed}
    rows = []
    for key in dict.fromkeys(key for found in numbered.values() for key in found):
        having = [record for record in signed if key in numbered[record["checkpoint"]]]

        def on(record: Record, key: tuple[str, int] = key) -> str:
            return _blocks(record, numbered[record["checkpoint"]][key]["layers"])

        def members(record: Record, key: tuple[str, int] = key) -> Json:
            return _members(record, numbered[record["checkpoint"]][key])

        ids = [record["checkpoint"] for record in having]
        first = numbered[ids[0]][key]
        row: ClassRow = {
            "name": key[0],
            "is_block": all(map(_BLOCK_PATH.match, first["paths"])),
            "ids": "" if len(ids) == len(records) else " ".join(ids),
            "visible": records[0]["checkpoint"] in ids,
            "on": by_checkpoint(having, on),
            "members": by_checkpoint(having, members),
        }
        rows.append(row)
    return sorted(rows, key=lambda row: not row["is_block"])


def _numbered(record: Record) -> list[tuple[tuple[str, int], Json]]:
    """Return the classes by name and a number that distinguishes those of one name."""
    counts: dict[str, int] = {}
    found = []
    for one in record["signature"]["blocks"]:
        counts[one["class"]] = counts.get(one["class"], 0) + 1
        found.append(((one["class"], counts[one["class"]]), one))
    return found


def _blocks(record: Record, layers: Sequence[int]) -> str:
    count = record["sizes"]["num_layers"]
    if not layers:
        return ""
    if len(layers) == count:
        return f"all {count} blocks"
    return f"{len(layers)} of {count} blocks: {ranges(layers, most=6)}"


def _members(record: Record, one: Json) -> Json:
    """Return the members of a class in symbols; the decoding step only where its types differ
    from the prompt's.
    """
    forward, later = one["functions"][:1], one["functions"][1:]
    different = [
        step
        for step in later
        if any(step[key] != forward[0][key] for key in ("arguments", "results"))
    ]
    values = [
        {key: row[key] for key in ("host", "name", "type")}
        for row in record["signature"]["values"]
        if set(row["modules"]) & set(one["paths"])
    ]
    return _symbols(
        {
            "generics": one["generics"],
            "submodules": one["submodules"],
            "parameters": one["parameters"],
            "buffers": one["buffers"],
            "state": [{"name": row["name"], "type": row["after_prefill"]} for row in one["state"]],
            "functions": [*forward, *different],
            "values": values,
        }
    )


def _symbols(found: Any) -> Any:
    """Return the same data without the numbers of its types, in which checkpoints differ."""
    if isinstance(found, dict):
        return {key: _symbols(value) for key, value in found.items() if key != "numbers"}
    return [_symbols(value) for value in found] if isinstance(found, list) else found
