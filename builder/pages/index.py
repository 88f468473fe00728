"""The index: a card for each family, and filters by traits, in their groups, and by the names of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from explorer.traits.catalogue import BY_NAME, ENTRIES, GROUPS, group_of
from explorer.widgets.diagram.describe import attribute_of_path, describe

Record = Mapping[str, Any]
Card = dict[str, Any]

#: What traits are called together that the catalogue does not know: those of records an older version made.
_OTHERS = "others"

_ORDER = {entry.name: number for number, entry in enumerate(ENTRIES)}


def context(
    families: Sequence[Sequence[Record]], notes: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """What the index's template is filled with: ``cards``, ``groups``, ``values`` and ``names``.

    ``families``: the records of each family, default checkpoint first. ``notes``: front matter of
    each family's notes by family (``title``, ``summary``).
    """
    made = cards(families, notes)
    names = sorted({name for card in made for _, name in card["offers"]})
    return {"cards": made, "groups": groups(made), "values": some_values(made), "names": names}


def cards(
    families: Sequence[Sequence[Record]], notes: Mapping[str, Mapping[str, str]]
) -> list[Card]:
    """What the index shows of each family, from its default checkpoint.

    ``telling`` are the traits that half of the families have at most, ``usual`` the others.
    """
    made = [_card(records, notes.get(records[0]["family"], {})) for records in families]
    having = Counter(trait["name"] for card in made for trait in card["traits"])
    for card in made:
        few = [trait for trait in card["traits"] if 2 * having[trait["name"]] <= len(made)]
        card["telling"], card["usual"] = (
            few,
            [trait for trait in card["traits"] if trait not in few],
        )
    return made


def groups(made: Sequence[Card]) -> list[dict[str, Any]]:
    """The traits there are by group, both in the catalogue's order: ``[{label, traits: [{name, label, meaning, families}]}]``."""
    known: dict[str, dict[str, Any]] = {}
    for trait in (trait for card in made for trait in card["traits"]):
        known.setdefault(trait["name"], {**trait, "families": 0})["families"] += 1
    found = []
    for group, label in (*GROUPS.items(), ("", _OTHERS)):
        there = (trait for name, trait in known.items() if group_of(name) == group)
        traits = sorted(there, key=lambda trait: _ORDER.get(trait["name"], 0))
        if traits:
            found.append({"label": label, "traits": traits})
    return found


def some_values(made: Sequence[Card]) -> list[dict[str, Any]]:
    """The values that some families serve and others do not: ``[{name, families}]``, by name."""
    serving = Counter(name for card in made for name in {name for _, name in card["offers"]})
    return [
        {"name": name, "families": count}
        for name, count in sorted(serving.items())
        if count < len(made)
    ]


def _card(records: Sequence[Record], notes: Mapping[str, str]) -> Card:
    first = records[0]
    marks: list[tuple[str, str]] = [("", "")] * first["sizes"]["num_layers"]
    for block in describe(first):
        for layer in block.layers:
            marks[layer] = (block.sublayers[0].role, block.title)
    return {
        "family": first["family"],
        "title": notes.get("title") or first["title"],
        "summary": notes.get("summary") or first.get("summary") or "",
        "traits": [_said(trait) for trait in first["traits"]],
        "marks": marks,
        "parameters": first["parameters"],
        "checkpoints": [record["checkpoint"] for record in records],
        "contract": first["contract"],
        "offers": [(attribute_of_path(row["host"]), row["name"]) for row in first["values"]],
    }


def _said(trait: Mapping[str, str]) -> dict[str, str]:
    """A trait in the catalogue's words, whenever its record was made; in its own where the catalogue has none."""
    entry = BY_NAME.get(trait["name"])
    said = (
        trait
        if entry is None
        else {"name": entry.name, "label": entry.label, "meaning": entry.meaning}
    )
    return {key: said[key] for key in ("name", "label", "meaning")}
