"""Checkpoint cards: the configuration figures of released checkpoints, in small files of our own.

A card lets a checkpoint be built at its full released size without the network. It
holds the figures the configuration class needs, the parameter count the checkpoint's
name or description states, and where it states that; it is checked when it is
read. The count computed from the figures has to meet the stated one, which is tested.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    IDS: tuple[str, ...]

__all__ = [
    "IDS",
    "Card",
    "CardError",
    "UnknownCheckpoint",
    "all_cards",
    "card",
    "config",
    "family_checkpoints",
]

_COUNT = re.compile(r"(\d+)(?:\.(\d+))?([MB])")
_EXACT = re.compile(r"\d{1,3}(?:,\d{3})+")
_UNIT = {"M": 1e6, "B": 1e9}

#: Every key of a card file with the type its value must have.
_KEYS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "title": str,
    "family": str,
    "architecture": str,
    "place": int,
    "stated": str,
    "stated_in": str,
    "license": (str, type(None)),
    "dtype": str,
    "config": dict,
}
_OPTIONAL_KEYS: dict[str, type | tuple[type, ...]] = {
    "stated_active": str,
    "wrapper": str,
    "stated_counts": str,
    "stated_without": list,
    "active_without": list,
}


class CardError(ValueError):
    """A card file that does not say what a card must say."""


class UnknownCheckpoint(ValueError):
    """An id that no card has; the message names the nearest ids, else the families with cards."""

    def __init__(self, asked: str, nearest: list[str]) -> None:
        self.asked, self.nearest = asked, nearest
        shown = asked if len(asked) <= 80 else asked[:77] + "…"
        families = ", ".join(dict.fromkeys(one.family for one in all_cards()))
        near = (
            f"did you mean {' or '.join(nearest)}?"
            if nearest
            else f"explorer.checkpoints.cards.IDS lists those there are, of {families}."
        )
        super().__init__(f"No checkpoint card is called {shown!r}: {near}")


@dataclass(frozen=True)
class Card:
    """One released checkpoint.

    ``family`` is transformers' model type and ``architecture`` the class built from the
    figures; ``wrapper`` names the released multimodal class whose text side this is.
    ``total_text`` and ``active_text`` are counts as stated ("30.5B", "162,322,944"),
    ``stated_in`` says where. ``stated_counts`` is set where that statement covers more than
    is built here; ``stated_without`` and ``active_without`` are the parts (of
    `explorer.accounting.parameter_roles.PARTS`) that its total and its active count leave out.
    ``place`` orders the checkpoints of a family; 1 is the one its page opens with.
    ``dtype`` is that of the released weights, before any quantization.
    """

    id: str
    title: str
    family: str
    architecture: str
    place: int
    total_text: str
    active_text: str
    stated_in: str
    license: str | None
    dtype: str
    config: Mapping[str, Any]
    wrapper: str | None = None
    stated_counts: str | None = None
    stated_without: tuple[str, ...] = ()
    active_without: tuple[str, ...] = ()

    @property
    def stated_parameters(self) -> float:
        """The stated total as a number."""
        return _count(self.total_text)[0]

    @property
    def stated_active(self) -> float:
        """The stated number of parameters a token uses."""
        return _count(self.active_text)[0]

    @property
    def stated_within(self) -> float:
        """How far a computed total may lie from the stated one.

        Half of the last digit written, that is rounding; a whole one where the statement
        covers parts not built here.
        """
        last_digit = _count(self.total_text)[1]
        return last_digit if self.stated_counts else last_digit / 2

    @property
    def stated_active_within(self) -> float:
        """How far a computed active count may be from the stated one: under one of its last digit.

        Names round it either way, and differ in whether the embedding matrix, of which a
        token reads one row, is in it.
        """
        return _count(self.active_text)[1]


def _count(written: str) -> tuple[float, float]:
    """A count as a number, with the value of its last digit: "30.5B" is (30.5e9, 0.1e9)."""
    if _EXACT.fullmatch(written):
        return float(written.replace(",", "")), 1.0
    match = _COUNT.fullmatch(written)
    if match is None:
        raise CardError(f"a count is written like 30.5B, 135M or 162,322,944, not {written!r}")
    whole, fraction, unit = match.groups()
    digits = len(fraction or "")
    return float(f"{whole}.{fraction or 0}") * _UNIT[unit], _UNIT[unit] / 10**digits


def parse(text: str, name: str) -> Card:
    """Read a card. Raises CardError, naming the file and the first mistake in it."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise CardError(f"card {name} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CardError(f"card {name} is not a mapping")
    for key, kind in _KEYS.items():
        if key not in raw:
            raise CardError(f"card {name} lacks {key!r}")
        if not isinstance(raw[key], kind) or isinstance(raw[key], bool):
            raise CardError(f"card {name} has a value of the wrong kind for {key!r}: {raw[key]!r}")
    for key, value in raw.items():
        if key not in _KEYS and key not in _OPTIONAL_KEYS:
            raise CardError(f"card {name} has an unknown key {key!r}")
        if key in _OPTIONAL_KEYS and not isinstance(value, _OPTIONAL_KEYS[key]):
            raise CardError(f"card {name} has a value of the wrong kind for {key!r}: {value!r}")
    for key in ("stated_without", "active_without"):
        if not all(isinstance(part, str) for part in raw.setdefault(key, [])):
            raise CardError(f"card {name} has a value of the wrong kind for {key!r}: {raw[key]!r}")
        raw[key] = tuple(raw[key])
    raw.setdefault("stated_active", raw["stated"])  # a token uses all of a dense model
    try:
        for written in (raw["stated"], raw["stated_active"]):
            _count(written)
    except CardError as error:
        raise CardError(f"card {name}: {error}") from None
    return Card(total_text=raw.pop("stated"), active_text=raw.pop("stated_active"), **raw)


@cache
def all_cards() -> tuple[Card, ...]:
    """Every card, by family and then by place. Raises CardError where two contradict each other."""
    found = [
        parse(file.read_text(encoding="utf-8"), file.name)
        for file in files(__name__).iterdir()
        if file.name.endswith(".json")
    ]
    found.sort(key=lambda one: (one.family, one.place, one.id))
    for before, after in itertools.pairwise(found):
        if (before.family, before.place) == (after.family, after.place):
            raise CardError(
                f"cards {before.id} and {after.id} both have place {after.place} of {after.family}"
            )
    if len({one.id for one in found}) != len(found):
        raise CardError("two cards have one id")
    return tuple(found)


def _ids() -> tuple[str, ...]:
    return tuple(one.id for one in all_cards())


def __getattr__(name: str) -> Any:
    if name == "IDS":  # read with the cards, not with the module
        return _ids()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def card(id: str) -> Card:
    """The card of a checkpoint. Raises UnknownCheckpoint, with the nearest ids, without one."""
    for one in all_cards():
        if one.id == id:
            return one
    raise UnknownCheckpoint(id, _nearest(id))


def _nearest(asked: str) -> list[str]:
    """At most three ids similar to the given one, in any case, with or without the owner."""
    wanted = asked.lower().strip()

    def score(id: str) -> float:
        names = (id.lower(), id.lower().split("/")[-1])
        likeness = max(difflib.SequenceMatcher(None, wanted, name).ratio() for name in names)
        # A piece of an id, or an id with something added, may differ much in length.
        piece = (len(wanted) > 4 and wanted in names[0]) or names[1] in wanted
        return max(likeness, 0.9) if piece else likeness

    scores = {id: score(id) for id in _ids()}
    enough = max(0.75, max(scores.values()) - 0.05)  # one clear winner is named alone
    return sorted((id for id in scores if scores[id] >= enough), key=lambda id: -scores[id])[:3]


def family_checkpoints(family: str) -> list[str]:
    """The ids of a family's cards, its page's default first; empty for a family without cards."""
    return [one.id for one in all_cards() if one.family == family]


def config(id: str) -> PreTrainedConfig:
    """A fresh transformers configuration with the figures of a card.

    Its ``architectures`` and ``dtype`` are the card's. Raises UnknownCheckpoint.
    """
    from transformers import AutoConfig

    chosen = card(id)
    built = AutoConfig.for_model(
        chosen.family,
        **json.loads(json.dumps(chosen.config)),
        architectures=[chosen.architecture],
        dtype=chosen.dtype,
    )
    if "full_attention_interval" in chosen.config:
        # The class turns the interval into layer_types and drops it; pages show both.
        built.full_attention_interval = chosen.config["full_attention_interval"]
    return built
