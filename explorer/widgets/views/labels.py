"""Text from users and checkpoints, made safe to show: never interpreted, never invisible.

A token can hold anything: markup, a lone combining mark, a character that turns
the reading direction of its neighbours, a line break, half a UTF-8 sequence. The
functions here give what a person reads; escaping for HTML is done where HTML is made.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence

#: Visible signs for a space, a tab and line breaks, which would vanish otherwise.
SPACE = "·"
_VISIBLE = {" ": SPACE, "\t": "⇥", "\n": "⏎", "\r": "␍", "\u00a0": "⍽"}

#: A lone combining mark is drawn on this circle, as dictionaries do.
_CIRCLE = "◌"

#: First strong isolate and its end: what is between cannot turn the text around it.
_ISOLATE, _END = "\u2068", "\u2069"


def shown_token(text: str, limit: int | None = None) -> str:
    """One token as text to read: blanks and control characters visible, marks on a circle.

    ``limit`` cuts after that many characters, with an ellipsis. The empty token
    (a special token that decodes to nothing) is shown as ``∅``.
    """
    if not text:
        return "∅"
    shown = "".join(_shown_character(character) for character in text)
    if unicodedata.combining(text[0]):
        shown = _CIRCLE + shown
    if limit is not None and len(shown) > limit:
        shown = shown[: limit - 1] + "…"
    return shown


def _shown_character(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    # Cc control, Cf format (direction marks, joiners), Cs surrogate, Co private, Cn unassigned
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn"):
        return f"‹U+{ord(character):04X}›"
    return character


def axis_label(token: str, limit: int = 12) -> str:
    """A token as a tick label on a canvas: isolated in direction, and never read as mathematics.

    Bokeh typesets strings between ``$$``, ``\\(`` or ``\\[``; a joiner of no width
    separates those pairs.
    """
    shown = shown_token(token, limit)
    for pair in ("$$", "\\(", "\\["):
        shown = shown.replace(pair, f"{pair[0]}\u2060{pair[1]}")
    return f"{_ISOLATE}{shown}{_END}"


def axis_labels(tokens: Sequence[str]) -> tuple[str, ...]:
    """`axis_label` of every token, with its position, so that equal tokens differ."""
    return _axis_labels(tuple(tokens))


@functools.lru_cache(maxsize=32)
def _axis_labels(tokens: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{axis_label(token)} {position}" for position, token in enumerate(tokens))


def number(value: float, digits: int = 3) -> str:
    """A number to ``digits`` significant digits, short: 0.0314, −12.5, 1.2e+07, 0."""
    if value != value:
        return "nan"
    if value in (float("inf"), float("-inf")):
        return "∞" if value > 0 else "−∞"
    return f"{value:.{digits}g}".replace("-", "−") if value else "0"
