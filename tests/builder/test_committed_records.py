"""The committed records equal those that the present code makes."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any

import pytest

from builder.records.collect import NOTES, families_with_notes
from builder.records.facts_file import comparable
from explorer.facts.record import facts

#: How many families a run of the tests picks.
PICKED = 2

#: What the contract finds, and sentences, which may be reworded without renewing every record.
LEFT_OUT = (
    "contract",
    "verified",
    "about",
    "condition",
    "convention",
    "counted",
    "evidence",
    "label",
    "meaning",
    "note",
    "printout",
    "size_notes",
    "sources",
    "summary",
    "text",
)


def picked() -> list[str]:
    """A few families, others with every release of transformers."""

    def rank(name: str) -> str:
        return hashlib.sha256(f"record {name} {version('transformers')}".encode()).hexdigest()

    return sorted(families_with_notes(), key=rank)[:PICKED]


def reduced(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: reduced(value) for key, value in found.items() if key not in LEFT_OUT}
    return [reduced(item) for item in found] if isinstance(found, list) else found


@pytest.mark.slow
@pytest.mark.parametrize("family", picked())
def test_the_committed_records_equal_regenerated_ones(family: str) -> None:
    """All but what the contract finds, whose report a record does not hold in full."""
    committed = json.loads((NOTES / family / "facts.json").read_text(encoding="utf-8"))
    known: list = []
    for record in committed[:2]:
        specimen = record["provenance"]["specimen"]
        made = facts(family, record["checkpoint"], None, specimen, known)
        ours, theirs = reduced(comparable(made)), reduced(comparable(record))
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert ours[key] == value, f"{record['checkpoint']}: {key}"
