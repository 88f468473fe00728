"""A signature as plain text, for a terminal and for pages without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from explorer.vocabulary.formatting import ranges, short_dtype

_Json = Mapping[str, Any]


class UnknownBlock(ValueError):
    """No module class of that name."""


def typed(one: _Json, numbers: bool = False) -> str:
    """A type on one line: ``bf16[B, S, Hidden]``, or with numbers for what this model has of
    them."""
    axes = one["numbers"] if numbers and one["numbers"] is not None else one["dims"]
    return f"{short_dtype(one['dtype'])}[{', '.join(map(str, axes))}]"


def text(signature: _Json, block: str | None = None, numbers: bool = False) -> str:
    """The whole signature, or that of the module classes called ``block``; raises UnknownBlock
    where there is none."""
    if block is None:
        return "\n".join(_whole(signature, numbers))
    found = [one for one in signature["blocks"] if one["class"] == block]
    if not found:
        names = list(dict.fromkeys(one["class"] for one in signature["blocks"]))
        raise UnknownBlock(f"This model has no module class {block!r}; it has {', '.join(names)}.")
    return "\n".join(line for one in found for line in _class(one, numbers)).rstrip()


def _whole(signature: _Json, numbers: bool) -> Iterator[str]:
    yield "generics"
    rows = signature["generics"]
    wide, long = max(len(row["name"]) for row in rows), max(len(str(row["number"])) for row in rows)
    for row in rows:
        formula = f"= {row['formula']}" if row.get("formula") else ""
        origin = " ".join(part for part in (row["source"], formula) if part)
        yield f"  {row['name']:<{wide}}  {row['number']:>{long}}  {origin}".rstrip()
    for name, meaning in signature["variables"].items():
        yield f"  {name:<{wide}}  {'':>{long}}  {meaning}"
    yield "\nentries"
    for entry in signature["entries"]:
        cache = {(True, True): ", cache", (False, True): ", new cache", (False, False): ""}[
            entry["reads"], entry["writes"]
        ]
        yield f"  {_function(entry, numbers, cache)}"
    yield "\ncache"
    for row in signature["cache"]:
        yield f"  blocks {ranges(row['layers'])}" + (f", {row['module']}" if row["module"] else "")
        for tensor in row["tensors"]:
            again = tensor["after_decode"]
            later = (
                f", then {typed(again, numbers)}"
                if again not in (None, tensor["after_prefill"])
                else ""
            )
            yield f"    {tensor['name']}: {typed(tensor['after_prefill'], numbers)}{later}"
    yield ""
    for one in signature["blocks"]:
        yield from _class(one, numbers)
    yield from _costs(signature["costs"])
    found = signature["resolved"]
    yield f"{found['resolved']} of {found['axes']} axes resolved in {found['probes']} probes"
    for one in found["unresolved"][:20]:
        yield f"  not resolved: axis {one['axis']} of {one['at']}, {one['number']}"
    if len(found["unresolved"]) > 20:
        yield f"  and {len(found['unresolved']) - 20} more"


def _costs(costs: _Json) -> Iterator[str]:
    """Each cost by its formula, then its number, or what it comes to for a call."""
    yield "costs"
    rows = {
        "parameters": costs["parameters"],
        "active parameters": costs["parameters"].get("active"),
        "bytes kept": costs["cache"],
        "operations for a token": costs["flops"],
    }
    for name, one in rows.items():
        if one is None:
            continue
        if "unknown" in one:
            yield f"  {name}: not known, {one['unknown']}"
            continue
        yield f"  {name} = {one['formula']}"
        yield f"    = {format(one['number'], ',') if one['number'] is not None else one['numbers']}"
        for word, meaning in one.get("where", {}).items():
            yield f"    {word} = {meaning['formula']} = {meaning['numbers']}"
    yield ""


def _class(one: _Json, numbers: bool) -> Iterator[str]:
    generics = f"<{', '.join(one['generics'])}>" if one["generics"] else ""
    where = f"  (blocks {ranges(one['layers'])})" if one["layers"] else ""
    yield f"{one['class']}{generics}{where}"
    for part in one["submodules"]:
        bound = f"<{', '.join(part['arguments'])}>" if part["arguments"] else ""
        count = f"{part['count']} × " if part.get("count") else ""
        yield f"  sub {part['name']}: {count}{part['class']}{bound}"
    for word, key in (("param", "parameters"), ("buffer", "buffers")):
        for part in one[key]:
            yield f"  {word} {part['name']}: {typed(part['type'], numbers)}"
    for part in one["state"]:
        yield f"  state {part['name']}: {typed(part['after_prefill'], numbers)}"
    for function in one["functions"]:
        yield f"  fn {_function(function, numbers)}"
    for part in one.get("values", ()):
        yield f"  value {part['name']}: {typed(part['type'], numbers)}"
    yield ""


def _function(one: _Json, numbers: bool, also: str = "") -> str:
    given = ", ".join(
        f"{part['name']}: {typed(part['type'], numbers)}" for part in one["arguments"]
    )
    arguments = f"{given}{also if given else also.lstrip(', ')}"
    return f"{one['name']}({arguments}) -> {_results(one['results'], numbers)}"


def _results(results: Sequence[_Json], numbers: bool) -> str:
    if not results:
        return "nothing"
    names = [
        f"{part['name']}: " if part["name"] and not part["name"].isdigit() else ""
        for part in results
    ]
    written = [
        name + typed(part["type"], numbers) for name, part in zip(names, results, strict=True)
    ]
    return written[0] if len(written) == 1 else f"({', '.join(written)})"
