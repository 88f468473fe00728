"""Why a value is not there, as data: what kind of reason it is, and the sentence people read.

Imports nothing of this package, so that what finds and what tells can both use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a reason says of the model; in order, the one that tells most of several blocks first."""

    UNFOLLOWED = "the model has it or may have it, and where is not followed"
    SETTING = "the model has it when it is loaded another way"
    ABSENT = "this part of the model has no such thing"
    ELSEWHERE = "this block has no such part, as another may"


@dataclass(frozen=True)
class Missing:
    """One value's absence: its kind, and ``text``, a sentence without its full stop. As a string it is the sentence."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def by_nature(self) -> bool:
        """Whether there is nothing to serve, rather than something that is not served."""
        return self.kind in (Kind.ABSENT, Kind.ELSEWHERE)


def unfollowed(text: str) -> Missing:
    """The model has the value, or may have it, and where it is handed over was not found."""
    return Missing(Kind.UNFOLLOWED, text)


def setting(text: str) -> Missing:
    """The way the model is loaded keeps the value from being made as a tensor."""
    return Missing(Kind.SETTING, text)


def absent(text: str) -> Missing:
    """The part is there, and has no such value."""
    return Missing(Kind.ABSENT, text)


def elsewhere(text: str) -> Missing:
    """The block has no such part."""
    return Missing(Kind.ELSEWHERE, text)


#: What is said of a value of which nothing else is known.
NOTHING = unfollowed("nothing was found that plays this part")


def telling(reasons: Iterable[Missing]) -> str:
    """Of the blocks' reasons the one that says most: not merely that a block is of another kind."""
    order = list(Kind)
    found = min(reasons, key=lambda reason: order.index(reason.kind), default=None)
    return "it is not on the blocks asked for" if found is None else found.text
