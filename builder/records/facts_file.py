"""Write a family's records beside its page, as JSON whose changes can be read line by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]

#: The longest line, in characters, that a list or an object with others inside is put on.
_WIDTH = 160


def write_facts(records: list[Record], folder: Path) -> Path:
    """Write ``facts.json`` into ``folder``; a record that is unchanged but for its date keeps
    its old date.
    """
    path = folder / "facts.json"
    before: dict[str, Record] = {}
    if path.is_file():
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
            before = {record["checkpoint"]: record for record in written}
        except (ValueError, KeyError, TypeError):
            before = {}  # damaged: write all of them
    kept = []
    for record in records:
        old = before.get(record["checkpoint"])
        kept.append(old if old is not None and comparable(old) == comparable(record) else record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compact_json(kept) + "\n", encoding="utf-8")
    return path


def comparable(record: Record) -> Record:
    """Return a copy of a record without its date and without measured errors, whose last digits
    depend on the machine.
    """
    copy = json.loads(json.dumps(record))
    copy["provenance"].pop("generated", None)
    for check in copy.get("contract", {}).get("checks", ()):
        for measured in ("detail", "worst"):
            check.pop(measured, None)
    return copy


def compact_json(value: Any, depth: int = 0) -> str:
    """Return ``value`` as JSON, indented by one space a level; lists of plain values stay on one
    line.
    """
    flat = json.dumps(value, ensure_ascii=False)
    nested = isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
    )
    if not nested or not value or len(flat) + depth <= _WIDTH:
        return flat
    if isinstance(value, dict):
        opening, closing = "{", "}"
        parts = [
            f"{json.dumps(key, ensure_ascii=False)}: {compact_json(item, depth + 1)}"
            for key, item in value.items()
        ]
    else:
        opening, closing = "[", "]"
        parts = [compact_json(item, depth + 1) for item in value]
    separator = "\n" + " " * (depth + 1)
    return f"{opening}{separator}{f',{separator}'.join(parts)}\n{' ' * depth}{closing}"
