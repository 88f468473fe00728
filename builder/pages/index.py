"""The index: a card for each family, and filters by trait and by value name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from builder.pages.checkpoints import Record
from explorer.traits.catalogue import BY_NAME, ENTRIES, GROUPS, group_of
from explorer.widgets.diagram.describe import attribute_of_path, describe

#: The group of traits that are not in the catalogue: those of records that an older version made.
_OTHERS = "others"

_ORDER = {entry.name: number for number, entry in enumerate(ENTRIES)}


class Trait(TypedDict):
    name: str
    label: str
    meaning: str


class TraitFilter(Trait):
    """A trait to filter by and the number of families that have it."""

    families: int


class TraitGroup(TypedDict):
    label: str
    traits: list[TraitFilter]


class ValueFilter(TypedDict):
    """A value to filter by and the number of families that serve it."""

    name: str
    families: int


class Card(TypedDict):
    """A family on the index, from its default checkpoint.

    marks: the role and the description of each block. distinctive: traits that at most half of the
    families have; common: the others. values: host and name of each value it serves.
    """

    family: str
    title: str
    summary: str
    traits: list[Trait]
    distinctive: list[Trait]
    common: list[Trait]
    marks: list[tuple[str, str]]
    parameters: Mapping[str, Any]
    checkpoints: list[str]
    contract: Mapping[str, Any]
    values: list[tuple[str, str]]


def context(
    families: Sequence[Sequence[Record]], notes: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Return what the index's template is filled with: ``cards``, ``groups``, ``values`` and
    ``names``.

    ``families``: the records of each family, default checkpoint first. ``notes``: the front matter
    of each family's notes by family (``title``, ``summary``).
    """
    made = cards(families, notes)
    names = sorted({name for card in made for _, name in card["values"]})
    groups = trait_groups(made)
    return {"cards": made, "groups": groups, "values": value_filters(made), "names": names}


def cards(
    families: Sequence[Sequence[Record]], notes: Mapping[str, Mapping[str, str]]
) -> list[Card]:
    """Return the card of each family."""
    made = [_card(records, notes.get(records[0]["family"], {})) for records in families]
    having = Counter(trait["name"] for card in made for trait in card["traits"])
    for card in made:
        for trait in card["traits"]:
            few = 2 * having[trait["name"]] <= len(made)
            card["distinctive" if few else "common"].append(trait)
    return made


def trait_groups(cards: Sequence[Card]) -> list[TraitGroup]:
    """Return the traits of all cards by group, both in the catalogue's order."""
    traits: dict[str, TraitFilter] = {}
    for trait in (trait for card in cards for trait in card["traits"]):
        traits.setdefault(trait["name"], {**trait, "families": 0})["families"] += 1
    found: list[TraitGroup] = []
    for group, label in (*GROUPS.items(), ("", _OTHERS)):
        members = [trait for name, trait in traits.items() if group_of(name) == group]
        members.sort(key=lambda trait: _ORDER.get(trait["name"], 0))
        if members:
            found.append({"label": label, "traits": members})
    return found


def value_filters(cards: Sequence[Card]) -> list[ValueFilter]:
    """Return the values that some families serve and others do not, by name."""
    serving = Counter(name for card in cards for name in {name for _, name in card["values"]})
    return [
        {"name": name, "families": count}
        for name, count in sorted(serving.items())
        if count < len(cards)
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
        "traits": [_trait(trait) for trait in first["traits"]],
        "distinctive": [],
        "common": [],
        "marks": marks,
        "parameters": first["parameters"],
        "checkpoints": [record["checkpoint"] for record in records],
        "contract": first["contract"],
        "values": [(attribute_of_path(row["host"]), row["name"]) for row in first["values"]],
    }


def _trait(trait: Mapping[str, str]) -> Trait:
    """Return a record's trait in the catalogue's present words; in its own where the catalogue
    has none.
    """
    entry = BY_NAME.get(trait["name"])
    if entry is None:
        return {"name": trait["name"], "label": trait["label"], "meaning": trait["meaning"]}
    return {"name": entry.name, "label": entry.label, "meaning": entry.meaning}
