"""Why a value is not available, as data: the kind of reason, and the sentence people read."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class ReasonKind(Enum):
    """What a reason says of the model, the most informative kind first."""

    NOT_TRACED = "the model has it or may have it, and where was not found"
    NEEDS_SETTING = "the model has it when it is loaded with other settings"
    NOT_PRESENT = "this part of the model has no such value"
    NOT_IN_BLOCK = "this block has no such part; another block may"


@dataclass(frozen=True)
class Unavailability:
    """Why one value is not available: the kind of reason, and a sentence without its full stop."""

    kind: ReasonKind
    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def by_nature(self) -> bool:
        """Whether the model has no such value, rather than one that is not served."""
        return self.kind in (ReasonKind.NOT_PRESENT, ReasonKind.NOT_IN_BLOCK)


def not_traced(text: str) -> Unavailability:
    """The model has the value, or may have it, and where it is read was not found."""
    return Unavailability(ReasonKind.NOT_TRACED, text)


def needs_setting(text: str) -> Unavailability:
    """With the settings the model was loaded with, the value never becomes a tensor."""
    return Unavailability(ReasonKind.NEEDS_SETTING, text)


def not_present(text: str) -> Unavailability:
    """The block has the part, and the part has no such value."""
    return Unavailability(ReasonKind.NOT_PRESENT, text)


def not_in_block(text: str) -> Unavailability:
    """The block has no such part."""
    return Unavailability(ReasonKind.NOT_IN_BLOCK, text)


def more_informative(first: Unavailability, second: Unavailability) -> Unavailability:
    """The more informative of two reasons, by the order of `ReasonKind`; else the first."""
    order = list(ReasonKind)
    return min(first, second, key=lambda reason: order.index(reason.kind))


def most_informative(reasons: Iterable[Unavailability]) -> str:
    """The sentence of the most informative reason."""
    found = list(reasons)
    if not found:
        return "it is not on the blocks asked for"
    return functools.reduce(more_informative, found).text
