"""Why a value is not there, as data: what kind of reason it is, and the sentence people read.

Imports nothing of this package, so that what finds and what tells can both use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class ReasonKind(Enum):
    """What a reason says of the model; in order, the one that tells most of several blocks first."""

    NOT_TRACED = "the model has it or may have it, and where is not followed"
    NEEDS_SETTING = "the model has it when it is loaded another way"
    NOT_PRESENT = "this part of the model has no such thing"
    NOT_IN_BLOCK = "this block has no such part, as another may"


@dataclass(frozen=True)
class Unavailability:
    """One value's absence: its kind, and ``text``, a sentence without its full stop. As a string it is the sentence."""

    kind: ReasonKind
    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def by_nature(self) -> bool:
        """Whether there is nothing to serve, rather than something that is not served."""
        return self.kind in (ReasonKind.NOT_PRESENT, ReasonKind.NOT_IN_BLOCK)


def not_traced(text: str) -> Unavailability:
    """The model has the value, or may have it, and where it is handed over was not found."""
    return Unavailability(ReasonKind.NOT_TRACED, text)


def needs_setting(text: str) -> Unavailability:
    """The way the model is loaded keeps the value from being made as a tensor."""
    return Unavailability(ReasonKind.NEEDS_SETTING, text)


def not_present(text: str) -> Unavailability:
    """The part is there, and has no such value."""
    return Unavailability(ReasonKind.NOT_PRESENT, text)


def not_in_block(text: str) -> Unavailability:
    """The block has no such part."""
    return Unavailability(ReasonKind.NOT_IN_BLOCK, text)


#: What is said of a value of which nothing else is known.
NOT_FOUND = not_traced("nothing was found that plays this part")


def most_informative(reasons: Iterable[Unavailability]) -> str:
    """Of the blocks' reasons the one that says most: not merely that a block is of another kind."""
    order = list(ReasonKind)
    found = min(reasons, key=lambda reason: order.index(reason.kind), default=None)
    return "it is not on the blocks asked for" if found is None else found.text
