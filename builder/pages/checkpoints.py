"""Parts of a page that may differ between a family's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

Record = Mapping[str, Any]
Part = TypeVar("Part")


class Variant(NamedTuple, Generic[Part]):
    """A part of the page for some checkpoints.

    ids: theirs, separated by spaces, "" where it is for all. visible: whether the page shows it
    when it opens, which is on the default checkpoint.
    """

    ids: str
    part: Part
    visible: bool


def by_checkpoint(
    records: Sequence[Record], part: Callable[[Record], Part], of: Sequence[Record] | None = None
) -> list[Variant[Part]]:
    """Return a part of the page for each of ``records``, equal parts once.

    ``of``: all records of the page, where ``records`` may be only some of them; then a part that
    ``records`` share still names their checkpoints.
    """
    of = of or records
    if not records:
        return []
    groups: dict[str, tuple[list[str], Part]] = {}
    for record in records:
        content = part(record)
        groups.setdefault(str(content), ([], content))[0].append(record["checkpoint"])
    if len(groups) == 1 and len(records) == len(of):
        return [Variant("", next(iter(groups.values()))[1], True)]
    default = of[0]["checkpoint"]
    return [Variant(" ".join(ids), content, default in ids) for ids, content in groups.values()]
