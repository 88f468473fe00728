"""Small plots of costs over the context length, as SVG with logarithmic axes and a marker for
each computed length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

#: Size of the drawing, and the margins around its axes.
_WIDTH, _HEIGHT = 400, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 42, 36

#: Most labels on an axis.
_LABELS = 6

_TITLE = Markup('<text class="axis" x="2" y="11">{}</text>')
_GRID_LINE = Markup(
    '<path class="grid" d="M{} {}H{}"/><text class="axis" x="{}" y="{}" text-anchor="end">{}</text>'
)
_LENGTH_LABEL = Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">{}</text>')
_AXIS_LABEL = Markup('<text class="axis" x="{}" y="{}" text-anchor="end">{}</text>')
_CURVE = Markup('<path class="curve role-{}{}" d="M{}"/>')
_DOT = Markup('<circle class="role-{}" cx="{}" cy="{}" r="2.6"/>')
_POINT = Markup(
    '<g class="point" tabindex="0" role="img" aria-label="{}">'
    '<rect x="{}" y="{}" width="16" height="{}"/>{}'
    '<text x="{}" y="{}" text-anchor="middle">{}</text></g>'
)
_PLOT = Markup('<svg viewBox="0 0 {} {}" role="group" aria-label="{}">{}</svg>')


@dataclass(frozen=True)
class Curve:
    """One line of a plot: its name, the role whose colour it has, and its values, one for each
    length.
    """

    name: str
    role: str
    values: Sequence[int]
    dashed: bool = False


@dataclass(frozen=True)
class _Axes:
    """Logarithmic axes: the first and last length, and the lowest and highest value."""

    first: float
    last: float
    low: float
    high: float

    def x(self, length: float) -> float:
        span = 0.5
        if self.last > self.first:
            span = math.log2(length / self.first) / math.log2(self.last / self.first)
        return round(_LEFT + span * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        span = math.log2(value / self.low) / math.log2(self.high / self.low)
        return round(_HEIGHT - _BOTTOM - span * (_HEIGHT - _TOP - _BOTTOM), 1)


def ticks(least: int, most: int, base: int) -> list[int]:
    """Return at most six round numbers from below ``least`` to above ``most``.

    They are powers of ``base``; of ten, also twice and five times those where there is room.
    """

    def between(factors: Sequence[int]) -> list[int]:
        powers = range(math.ceil(math.log(most, base)) + 2)
        numbers = sorted(factor * base**power for factor in factors for power in powers)
        low = max(number for number in numbers if number <= least)
        high = min(number for number in numbers if number >= most and number > low)
        return [number for number in numbers if low <= number <= high]

    found = between((1,) if base == 2 else (1, 2, 5))
    if base != 2 and len(found) > _LABELS:
        found = between((1,))
    step = -(-(len(found) - 1) // (_LABELS - 1))
    if step <= 1:
        return found
    # Every step-th power, as many as reach the top.
    ratio = found[1] // found[0]
    return [found[0] * ratio ** (step * at) for at in range(-(-(len(found) - 1) // step) + 1)]


def plot(
    title: str,
    across: str,
    lengths: Sequence[int],
    curves: Sequence[Curve],
    value_text: Callable[[float], str],
    length_text: Callable[[float], str],
    base: int = 2,
) -> Markup:
    """Return curves over ``lengths``, with the values at each length on hover and on focus.

    title: what is drawn, with its unit; across: what the lengths are of; value_text, length_text:
    write a value and a length; base: of the vertical axis's labels, 2 or 10. Zeros have no place on
    a logarithmic axis and are left out.
    """
    drawn = [curve for curve in curves if any(curve.values)]
    values = [value for curve in drawn for value in curve.values if value]
    marks = ticks(min(values), max(values), base)
    axes = _Axes(lengths[0], lengths[-1], marks[0], marks[-1])
    parts = [_TITLE.format(title)]
    for mark in marks:
        at = axes.y(mark)
        label = value_text(mark)
        parts.append(_GRID_LINE.format(_LEFT, at, _WIDTH - _RIGHT, _LEFT - 5, at + 3.5, label))
    step = -(-len(lengths) // _LABELS)
    for length in lengths[::-1][::step]:
        label = length_text(length)
        parts.append(_LENGTH_LABEL.format(axes.x(length), _HEIGHT - _BOTTOM + 14, label))
    parts.append(_AXIS_LABEL.format(_WIDTH - _RIGHT, _HEIGHT - 5, across))
    for curve in drawn:
        line = "L".join(
            f"{axes.x(length)} {axes.y(value)}"
            for length, value in zip(lengths, curve.values, strict=True)
            if value
        )
        parts.append(_CURVE.format(curve.role, " dashed" if curve.dashed else "", line))
    for at, length in enumerate(lengths):
        here = [(curve, curve.values[at]) for curve in drawn]
        texts = [f"{curve.name} {value_text(value)}" for curve, value in here]
        if len(here) > 1:
            texts.append(f"together {value_text(sum(value for _, value in here))}")
        sentence = f"{length_text(length)} tokens: {', '.join(texts)}"
        parts.append(_point(length, here, axes, sentence))
    return _PLOT.format(_WIDTH, _HEIGHT, title, Markup("").join(parts))


def _point(length: int, values: Sequence[tuple[Curve, int]], axes: _Axes, sentence: str) -> Markup:
    """Return all curves at one length: their dots, a strip to point at, and a sentence."""
    x = axes.x(length)
    dots = Markup("").join(
        _DOT.format(curve.role, x, axes.y(value)) for curve, value in values if value
    )
    height = _HEIGHT - _TOP - _BOTTOM + 8
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return _POINT.format(sentence, x - 8, _TOP - 8, height, dots, middle, 27, sentence)
