"""What a measurement gives, and how it is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Figure:
    """One measured number.

    value: in ``unit``. aim: the most it should be, None where there is no aim. detail: how it came
    about. worst: the worst of several measurements, of which ``value`` is the median.
    """

    name: str
    value: float
    unit: str
    aim: float | None
    detail: str
    worst: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.aim is None else self.value <= self.aim


@dataclass(frozen=True)
class Settings:
    """What to measure and how often.

    families: to measure; requested: whether somebody named them. site: a built site, else one is
    built. quick: one repeat without a warm-up, few steps, and none of the figures
    that take longest, to try the measurements themselves.
    """

    families: tuple[str, ...] = ()
    requested: bool = False
    site: Path | None = None
    quick: bool = False

    @property
    def repeats(self) -> int:
        return 1 if self.quick else 7

    @property
    def tokens(self) -> int:
        return 64 if self.quick else 256

    @property
    def steps(self) -> int:
        return 5 if self.quick else 50


#: A section: yields its figures.
Section = Callable[[Settings], Iterator[Figure]]


def amount(value: float, unit: str) -> str:
    """Return a value with its unit, rounded for reading."""
    digits = 2 if unit == "x" else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as aligned text, the detail of each below it."""
    head = ("figure", "measured", "worst", "aim", "")
    rows = [
        (
            figure.name,
            amount(figure.value, figure.unit),
            "" if figure.worst is None else amount(figure.worst, figure.unit),
            "" if figure.aim is None else f"<= {figure.aim:g}",
            {True: "met", False: "missed", None: ""}[figure.met],
        )
        for figure in figures
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        return "  ".join(cells).rstrip()

    lines = [line(head)]
    for row, figure in zip(rows, figures, strict=True):
        lines += [line(row), f"    {figure.detail}"]
    return "\n".join(lines)
