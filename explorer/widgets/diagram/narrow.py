"""The block diagram at phone width: the boxes stack, the stream stays at the left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from explorer.widgets.diagram.description import Block, Pill, Sublayer, joint_type
from explorer.widgets.diagram.draw import Canvas
from explorer.widgets.diagram.geometry import PILL, Box, Point
from explorer.widgets.diagram.narrow_inside import LEFT, MIDDLE, RIGHT, X0, X1, draw_sublayer

WIDTH, STREAM = 400.0, 13.0


def draw(canvas: Canvas, block: Block) -> tuple[float, float]:
    """Draw the whole block; returns the drawing's size."""
    width, y = WIDTH, _mark(canvas, block.stream("layer_input"), 14)
    exits: dict[int, Point] = {}
    crossed: list[float] = []
    for segment in block.segments:
        norms: dict[str, Box] = {}
        crossed = crossed if not segment.reads else []
        if segment.is_mid:
            y = _mark(canvas, block.stream("layer_mid"), y)
        for sub in segment.reads:
            exits[sub.index] = draw_sublayer(canvas, sub, _enter(canvas, sub, y, norms))
            y = exits[sub.index][1] + 20
        if segment.step.kind != "add":
            canvas.step(STREAM, y + 4, segment.step)
            y += 28
        # The last box's result goes straight down, those from above it around it, nearest first.
        for number, sub in enumerate(sorted(segment.adds, key=lambda sub: -exits[sub.index][1])):
            start = exits[sub.index]
            below = sum(other[1] > start[1] for other in exits.values())
            lane = RIGHT + 8 * below if below else None
            width = max(width, (lane or 0) + 8)
            y -= 10 if number else 0
            y = _join(canvas, sub, start, y, lane, crossed)
            crossed += [y - 50] if lane else []
    y = _mark(canvas, block.stream("layer_output"), y)
    canvas.stream(STREAM, 14, y)
    return width, y + 4


def _mark(canvas: Canvas, pill: Pill | None, y: float) -> float:
    """A named point of the stream; returns where the next thing starts."""
    canvas.dot(STREAM, y)
    if pill:
        box = canvas.stream_pill(pill, STREAM + 12, y - PILL / 2)
        canvas.type(box.right + 6, y + 4, pill.type, room=RIGHT - box.right - 6)
    return y + 24


def _enter(canvas: Canvas, sub: Sublayer, y: float, norms: dict[str, Box]) -> float:
    """The norm, and the way into the sublayer's box; returns the box's top.

    ``norms`` are those drawn on this segment of the stream, by module: a norm that several
    sublayers read stands once.
    """
    norm, called_with = sub.norm, sub.called_with
    if not norm:
        if called_with:
            return _called_with(canvas, called_with, (STREAM, y), y + 4)
        canvas.edge((STREAM, y + 8), (MIDDLE, y + 8), (MIDDLE, y + 25))
        return y + 26
    if norm.on_stream or norm.module in norms:
        pills = [pill for pill in (norm.output, called_with) if pill]
        above = None if norm.on_stream else norms[norm.module]
        return _branch(canvas, above, y, pills, norm.scaled)
    box = norms[norm.module] = canvas.box(Box(LEFT, y, RIGHT - LEFT, 36), "norm", "norm", 10)
    canvas.edge((STREAM, box.cy), (box.x - 1, box.cy))
    canvas.text(X0, box.cy + 4, norm.module, "normname", "norm")
    if norm.output:
        canvas.pill(norm.output, X1 - 150, box.cy - PILL / 2, 150, size=10.5)
    top = box.bottom
    if called_with:
        return _called_with(canvas, called_with, (X0 + 60, top), top + 18, norm.output)
    canvas.edge((X0 + 60, top), (X0 + 60, top + 21))
    if norm.scaled:
        canvas.text(X0 + 72, top + 14, "× scale", "note")
    if norm.output:
        canvas.type(X0 + 72, top + 14, norm.output.type, room=RIGHT - X0 - 72)
    return top + 22


def _called_with(
    canvas: Canvas, called_with: Pill, start: Point, y: float, norm_output: Pill | None = None
) -> float:
    """What the sublayer is called with, on the way from ``start``, the stream or a norm, into its
    box; returns the box's top.
    """
    pill = canvas.pill(called_with, X0 + 12, y, 96)
    if start[0] < pill.x:
        canvas.edge((start[0], pill.cy), (pill.x - 1, pill.cy))
    else:
        canvas.edge(start, (pill.cx, pill.y - 1))
    shown = joint_type(called_with, *([norm_output] if norm_output else []))
    canvas.type(pill.right + 8, pill.cy + 3.5, shown, room=RIGHT - pill.right - 8)
    canvas.edge((pill.cx, pill.bottom), (pill.cx, pill.bottom + 17))
    return pill.bottom + 18


def _branch(
    canvas: Canvas, norm: Box | None, y: float, pills: Sequence[Pill], scaled: bool
) -> float:
    """From a ``norm`` drawn above, past the box that reads it first, to the next; from the stream
    where that went through the norm.

    Returns the box's top.

    """
    x, way = STREAM, ()
    if norm:
        x, below = (STREAM + LEFT) / 2, norm.bottom + 9
        way = ((norm.x + 10, norm.bottom), (norm.x + 10, below), (x, below))
    if scaled:
        canvas.text(MIDDLE - 8, y + 21, "× scale", "note", anchor="end")
    if not pills:
        canvas.edge(*way, (x, y + 8), (MIDDLE, y + 8), (MIDDLE, y + 25))
        return y + 26
    boxes = [
        canvas.pill(pill, X0 + 170 * index, y, 150 if index == 0 else 96, size=10.5)
        for index, pill in enumerate(pills)
    ]
    canvas.edge(*way, (x, boxes[0].cy), (boxes[0].x - 1, boxes[0].cy))
    for one, other in pairwise(boxes):
        canvas.edge((one.right, one.cy), (other.x - 1, other.cy))
    last = boxes[-1]
    canvas.edge((last.cx, last.bottom), (last.cx, last.bottom + 21))
    shown = joint_type(*reversed(pills))
    canvas.type(last.cx + 8, last.bottom + 14, shown, room=RIGHT - last.cx - 8)
    return last.bottom + 22


def _join(
    canvas: Canvas,
    sub: Sublayer,
    start: Point,
    y: float,
    lane: float | None,
    crossed: Sequence[float],
) -> float:
    """The addend, back to the stream; returns where the next mark goes."""
    canvas.addend(start, (STREAM + 11, y), sub.addend, lane, crossed)
    if sub.output:
        pill = canvas.stream_pill(sub.output, LEFT + 2, y + 4, sub.output_label)
        canvas.type(pill.right + 8, y + 19, sub.output.type, room=RIGHT - pill.right - 8)
    canvas.node(STREAM, y, "+", 10)
    return y + 50
