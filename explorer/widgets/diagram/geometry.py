"""Sizes and shapes of the drawing: boxes, text widths, rounded paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Point = tuple[float, float]

#: Height of a pill, and font sizes of its name and of a type.
PILL, NAME_SIZE, TYPE_SIZE = 23.0, 11.5, 10.0
#: Width of one character of a monospaced face, in units of its size; the widest in use.
MONO = 0.606
#: An average character of the proportional face, for wrapping.
SANS = 0.53


def mono_width(text: str, size: float = NAME_SIZE) -> float:
    return len(text) * size * MONO


def sans_width(text: str, size: float = 11.5) -> float:
    return len(text) * size * SANS


def wrap(text: str, width: float, size: float = 11.5) -> list[str]:
    """``text`` in lines that fit ``width``, broken at spaces."""
    room = max(int(width / (size * SANS)), 8)
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def number(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Box:
    """A rectangle in the drawing."""

    x: float
    y: float
    w: float
    h: float

    @property
    def right(self) -> float:
        return self.x + self.w

    @property
    def bottom(self) -> float:
        return self.y + self.h

    @property
    def cx(self) -> float:
        return self.x + self.w / 2

    @property
    def cy(self) -> float:
        return self.y + self.h / 2


class Inside(NamedTuple):
    """What was drawn inside a sublayer's box: the y below it, and where the result leaves."""

    bottom: float
    exit: Point


def rounded(points: Sequence[Point], radius: float = 7) -> str:
    """A path through ``points`` (axis-parallel legs) with its corners rounded."""
    d = [f"M{number(points[0][0])} {number(points[0][1])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        reach = min(radius, leg(before, corner) / 2, leg(corner, after) / 2)
        x0, y0 = toward(corner, before, reach)
        x1, y1 = toward(corner, after, reach)
        bend = f"{number(corner[0])} {number(corner[1])} {number(x1)} {number(y1)}"
        d.append(f"L{number(x0)} {number(y0)}Q{bend}")
    d.append(f"L{number(points[-1][0])} {number(points[-1][1])}")
    return "".join(d)


def leg(one: Point, other: Point) -> float:
    """The length of an axis-parallel line."""
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def toward(start: Point, end: Point, distance: float) -> Point:
    """The point ``distance`` from ``start`` on the way to ``end``."""
    share = distance / (leg(start, end) or 1.0)
    return start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share
