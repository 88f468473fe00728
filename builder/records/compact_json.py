"""JSON that is short and still read line by line: what fits on a line stands on one."""

from __future__ import annotations

import json
from typing import Any

#: The longest line, in characters, that more than a plain value is put on.
_WIDTH = 160


def text(value: Any, depth: int = 0) -> str:
    """``value`` as JSON, indented by one space a level; lists of plain values are never broken."""
    flat = json.dumps(value, ensure_ascii=False)
    nested = isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(one, dict | list) for one in value)
    )
    if not nested or not value or len(flat) + depth <= _WIDTH:
        return flat
    if isinstance(value, dict):
        parts = [
            f"{json.dumps(key, ensure_ascii=False)}: {text(one, depth + 1)}"
            for key, one in value.items()
        ]
    else:
        parts = [text(one, depth + 1) for one in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    inner = "\n" + " " * (depth + 1)
    return f"{first}{inner}{f',{inner}'.join(parts)}\n{' ' * depth}{last}"
