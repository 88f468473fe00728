"""Small plots of costs over the length of the context, as SVG: both axes in doublings, a point for each length worked out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

#: The drawing, and the place of its axes in it.
_WIDTH, _HEIGHT = 400, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 42, 36

#: Most labels on an axis.
_LABELS = 6


@dataclass(frozen=True)
class Curve:
    """One line of a plot: its name, the role whose colour it has, its numbers, and whether it is drawn dashed."""

    name: str
    role: str
    numbers: Sequence[int]
    dashed: bool = False


def ticks(least: int, most: int, base: int) -> list[int]:
    """Round numbers from below ``least`` to above ``most``, few of them: powers of two, or of ten with twice and five times those."""

    def powers(base: int, times: Sequence[int]) -> list[int]:
        every = sorted(
            one * base**power
            for one in times
            for power in range(math.ceil(math.log(most, base)) + 2)
        )
        low = max(number for number in every if number <= least)
        high = min(number for number in every if number >= most and number > low)
        return [number for number in every if low <= number <= high]

    found = powers(base, (1,) if base == 2 else (1, 2, 5))
    if base != 2 and len(found) > _LABELS:
        found = powers(base, (1,))
    step = -(-(len(found) - 1) // (_LABELS - 1))
    # So many steps that the last one reaches the top.
    return (
        [
            found[0] * (found[1] // found[0]) ** (step * at)
            for at in range(-(-(len(found) - 1) // step) + 1)
        ]
        if step > 1
        else found
    )


def plot(
    title: str,
    across: str,
    lengths: Sequence[int],
    curves: Sequence[Curve],
    said: Callable[[float], str],
    counted: Callable[[float], str],
    base: int = 2,
) -> Markup:
    """Curves over ``lengths``, with what each point comes to on hover and on focus.

    title: what is drawn, with its unit; across: what the lengths are of; said: a number of a curve in words;
    counted: a length in words; base: of the round numbers along the side, 2 or 10. Numbers that are 0 have no place on
    such an axis and are left out.
    """
    drawn = [curve for curve in curves if any(curve.numbers)]
    every = [number for curve in drawn for number in curve.numbers if number]
    marks = ticks(min(every), max(every), base)
    low, high = math.log2(marks[0]), math.log2(marks[-1])
    first, last = math.log2(lengths[0]), math.log2(lengths[-1])

    def x(length: float) -> float:
        span = (math.log2(length) - first) / (last - first) if last > first else 0.5
        return round(_LEFT + span * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(number: float) -> float:
        return round(
            _HEIGHT
            - _BOTTOM
            - (math.log2(number) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM),
            1,
        )

    parts = [Markup('<text class="axis" x="2" y="11">{}</text>').format(title)]
    for mark in marks:
        at = y(mark)
        parts.append(
            Markup(
                '<path class="grid" d="M{} {}H{}"/><text class="axis" x="{}" y="{}" text-anchor="end">{}</text>'
            ).format(_LEFT, at, _WIDTH - _RIGHT, _LEFT - 5, at + 3.5, said(mark))
        )
    step = -(-len(lengths) // _LABELS)
    for length in lengths[::-1][::step]:
        parts.append(
            Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                x(length), _HEIGHT - _BOTTOM + 14, counted(length)
            )
        )
    parts.append(
        Markup('<text class="axis" x="{}" y="{}" text-anchor="end">{}</text>').format(
            _WIDTH - _RIGHT, _HEIGHT - 5, across
        )
    )
    for curve in drawn:
        line = "L".join(
            f"{x(length)} {y(number)}"
            for length, number in zip(lengths, curve.numbers, strict=True)
            if number
        )
        parts.append(
            Markup('<path class="curve role-{}{}" d="M{}"/>').format(
                curve.role, " dashed" if curve.dashed else "", line
            )
        )
    parts += [
        _point(length, [(curve, curve.numbers[at]) for curve in drawn], x, y, said, counted)
        for at, length in enumerate(lengths)
    ]
    return Markup('<svg viewBox="0 0 {} {}" role="group" aria-label="{}">{}</svg>').format(
        _WIDTH, _HEIGHT, title, Markup("").join(parts)
    )


def _point(
    length: int,
    values: Sequence[tuple[Curve, int]],
    x: Callable,
    y: Callable,
    said: Callable,
    counted: Callable,
) -> Markup:
    """All curves at one length: marks, a strip to point at, and a sentence."""
    at = x(length)
    told = ", ".join(f"{curve.name} {said(number)}" for curve, number in values)
    told += f", together {said(sum(number for _, number in values))}" if len(values) > 1 else ""
    sentence = f"{counted(length)} tokens: {told}"
    marks = Markup("").join(
        Markup('<circle class="role-{}" cx="{}" cy="{}" r="2.6"/>').format(
            curve.role, at, y(number)
        )
        for curve, number in values
        if number
    )
    return Markup(
        '<g class="point" tabindex="0" role="img" aria-label="{}"><rect x="{}" y="{}" width="16" height="{}"/>{}'
        '<text x="{}" y="{}" text-anchor="middle">{}</text></g>'
    ).format(
        sentence,
        at - 8,
        _TOP - 8,
        _HEIGHT - _TOP - _BOTTOM + 8,
        marks,
        (_LEFT + _WIDTH - _RIGHT) / 2,
        27,
        sentence,
    )
