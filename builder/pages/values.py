"""Tables of a family page: values by host, the hosts' own sizes, the contract's checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from builder.pages.checkpoints import Record, Variant, by_checkpoint
from builder.pages.figures import layer_ranges
from explorer import vocabulary
from explorer.widgets.diagram.describe import attribute_of_host, attribute_of_path

#: What a value's row shows of its record.
_COLUMNS = (
    "name",
    "layout",
    "dims",
    "meaning",
    "read_at",
    "condition",
    "writable",
    "optional",
    "verified",
)


class ValueTable(TypedDict):
    """One host's values in one checkpoint; each row has `_COLUMNS` and ``some``, its blocks
    where not all serve it.
    """

    class_name: str
    rows: list[dict[str, Any]]


class HostSection(TypedDict):
    """A host's section: its path and key, what it is, its values, and the blocks that have it,
    in words.
    """

    path: str
    key: str
    meaning: str
    tables: list[Variant[ValueTable]]
    on: list[Variant[str]]


class CheckGroup(TypedDict):
    """The checks of one invariant; ``about`` is what it states, "" where its checks differ in
    that.
    """

    name: str
    about: str
    checks: list[Mapping[str, Any]]
    failed: int


def host_sections(records: Sequence[Record]) -> list[HostSection]:
    """Return a section for each host that any checkpoint has, in the vocabulary's order."""
    present = {"model", "layers"} | {
        name for record in records for block in record["blocks"] for name in block["hosts"]
    }
    served = {row["host"]: None for record in records for row in record["values"]}
    paths = dict.fromkeys(host.path for host in vocabulary.HOSTS.values()) | served
    return [_section(records, path, present) for path in paths if path in served]


def _section(records: Sequence[Record], path: str, present: set[str]) -> HostSection:
    # Several kinds of mixer have one path: describe those that are there.
    meanings = (
        host.meaning
        for host in vocabulary.HOSTS.values()
        if host.path == path and host.name in present
    )
    return {
        "path": path,
        "key": attribute_of_path(path),
        "meaning": "; ".join(meanings),
        "tables": by_checkpoint(records, lambda record: _table(record, path)),
        "on": by_checkpoint(records, lambda record: _on(record, path)),
    }


def _table(record: Record, path: str) -> ValueTable:
    rows = [row for row in record["values"] if row["host"] == path]
    layers = _layers(record, path)

    def some(row: Mapping[str, Any]) -> str:
        own = row["layers"]
        return "" if own is None or set(own) == layers else layer_ranges(own)

    return {
        "class_name": rows[0].get("class", "") if rows else "",
        "rows": [{**{key: row.get(key) for key in _COLUMNS}, "some": some(row)} for row in rows],
    }


def _on(record: Record, path: str) -> str:
    """Return as text which blocks of a checkpoint have a host, "" for a host of the model."""
    layers, count = _layers(record, path), record["sizes"]["num_layers"]
    if not layers:
        return ""
    if len(layers) == count:
        return f"on all {count} blocks"
    return f"on {len(layers)} of {count} blocks: {layer_ranges(sorted(layers))}"


def _layers(record: Record, path: str) -> set[int]:
    return {
        layer for row in record["values"] if row["host"] == path for layer in row["layers"] or ()
    }


def host_sizes(record: Record) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the hosts' own sizes by path, from the first block of each shape that has the host."""
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for block in sorted(record["blocks"], key=lambda block: block["layers"][0]):
        for name, host in block["hosts"].items():
            if host.get("sizes"):
                # A host without a module of its own is named by its standard name.
                path = f"layers[{block['layers'][0]}].{host['path'] or attribute_of_host(name)}"
                found.setdefault(name, (path, host["sizes"]))
    return list(found.values())


def check_groups(record: Record) -> list[CheckGroup]:
    """Return the contract's checks by invariant, those with failures first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for check in record["contract"]["checks"]:
        groups.setdefault(check["name"], []).append(check)
    found: list[CheckGroup] = []
    for name, checks in groups.items():
        statements = {check["about"] for check in checks}
        about = statements.pop() if len(statements) == 1 else ""
        failed = sum(not check["passed"] for check in checks)
        found.append({"name": name, "about": about, "checks": checks, "failed": failed})
    return sorted(found, key=lambda group: -group["failed"])
