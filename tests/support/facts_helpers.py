"""What the tests of records share."""

from __future__ import annotations

from functools import cache

from explorer.facts.record import facts


@cache
def record(family: str) -> dict:
    return facts(family)


def names(family: str, host: str) -> set[str]:
    return {row["name"] for row in record(family)["values"] if row["host"] == host}
