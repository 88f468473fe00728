"""The block diagram at desktop width: the stream runs down the left, the sublayers' boxes branch
off to the right.
"""

from __future__ import annotations

from collections.abc import Sequence

from explorer.widgets.diagram.description import Block, Pill, Sublayer, joint_type
from explorer.widgets.diagram.draw import Canvas
from explorer.widgets.diagram.geometry import PILL, Box, Point, mono_width
from explorer.widgets.diagram.wide_inside import LEFT, RIGHT, draw_sublayer

STREAM = 24.0
NORM_X, NORM_W = 48.0, 162.0
#: Of several adds in a row, how far below each other they are.
ADDS = 44.0
#: Where the lines into the sublayers' boxes end.
INTO = LEFT - 1


def draw(canvas: Canvas, block: Block) -> tuple[float, float]:
    """Draw the whole block; returns the drawing's size."""
    width, top, bottom, entry, join = 864.0, 8.0, 0.0, 0.0, 0.0
    exits: dict[int, Point] = {}
    crossed: list[float] = []
    _mark(canvas, block.stream("layer_input"), 16, below=True)
    for segment in block.segments:
        norms: dict[str, Box] = {}
        crossed = crossed if not segment.reads else []
        if segment.is_mid:
            _mark(canvas, block.stream("layer_mid"), join + 34)
        for sub in segment.reads:
            # Beside the first box the stream's label has two lines, so its norm hangs lower.
            lead = 42 if bottom or join else 56
            if bottom and sub is not segment.reads[0]:
                top = max(bottom + 30, entry + 20 - lead)
            exits[sub.index] = draw_sublayer(canvas, sub, top)
            bottom = exits[sub.index][1]
            entry = _enter(canvas, sub, top + lead, norms)
        if segment.step.kind != "add":
            join = max(join or 16, entry) + ADDS
            canvas.step(STREAM, join, segment.step)
        # The last box's result goes straight down, those from above it around it, nearest first.
        for sub in sorted(segment.adds, key=lambda sub: -exits[sub.index][1]):
            join = max(bottom + 22, entry + 26, join + ADDS)
            start = exits[sub.index]
            below = sum(other[1] > start[1] for other in exits.values())
            lane = RIGHT + 2 + 10 * below if below else None
            width = max(width, (lane or 0) + 12)
            _join(canvas, sub, start, join, lane, crossed)
            crossed += [join] if lane else []
        top = join + 18
    end = join + 42
    _mark(canvas, block.stream("layer_output"), end - 8, room=300)
    canvas.stream(STREAM, 16, end + 8)
    return width, end + 16


def _mark(
    canvas: Canvas, pill: Pill | None, y: float, below: bool = False, room: float = LEFT - 4
) -> None:
    """A named point of the stream, its type beside it, up to ``room``, or ``below``."""
    canvas.dot(STREAM, y)
    if not pill:
        return
    box = canvas.stream_pill(pill, STREAM + 10, y - PILL / 2)
    if below:
        canvas.type(STREAM + 17, y + 22, pill.type)
    else:
        canvas.type(box.right + 2, y + 4, pill.type, room=room - box.right)


def _enter(canvas: Canvas, sub: Sublayer, y: float, norms: dict[str, Box]) -> float:
    """From the stream through the norm into the sublayer; returns the y below what was drawn.

    ``norms`` are those drawn on this segment of the stream, by module: a norm that several
    sublayers read stands once.
    """
    norm, box = sub.norm, Box(NORM_X, y, NORM_W, 52)
    if not norm:
        return _enter_without_norm(canvas, sub.called_with, box)
    if norm.scaled:
        canvas.text(INTO - 8, box.cy + 15, "× scale", "note", anchor="end")
    if norm.on_stream:
        return _branch(canvas, None, box.cy, norm.output, sub.called_with)
    shared = norms.setdefault(norm.module, box)
    if shared is not box:
        return _branch(canvas, shared, box.cy, norm.output, sub.called_with)
    canvas.edge((STREAM, box.cy), (box.x - 1, box.cy))
    canvas.box(box, "norm", "norm", 10)
    room = box.w - 14
    squeezed = room if mono_width(norm.module, 10.8) > room else None
    canvas.text(box.cx, y + 18, norm.module, "normname", "norm", anchor="middle", width=squeezed)
    if norm.output:
        canvas.pill(norm.output, box.x + 6, y + 25, box.w - 12, size=10.5)
    if sub.called_with:
        return _called_with(canvas, sub.called_with, norm.output, box)
    canvas.edge((box.right, box.cy), (INTO, box.cy))
    if norm.output:
        canvas.type(box.x + 4, box.bottom + 13, norm.output.type, room=NORM_W + 8)
    return box.bottom + 16


def _enter_without_norm(canvas: Canvas, called_with: Pill | None, box: Box) -> float:
    canvas.edge((STREAM, box.cy), (INTO, box.cy))
    if not called_with:
        return box.cy
    canvas.pill(called_with, box.cx - 48, box.cy - PILL / 2, 96)
    canvas.type(box.x + 4, box.cy + PILL / 2 + 12, called_with.type, room=NORM_W + 8)
    return box.cy + PILL


def _branch(
    canvas: Canvas, norm: Box | None, y: float, output: Pill | None, called_with: Pill | None
) -> float:
    """From a ``norm`` drawn above, or from the stream that has gone through it, to a sublayer;
    returns the y below what was drawn.
    """
    x = norm.right - 18 if norm else STREAM
    way: Sequence[Point] = ((x, norm.bottom),) if norm else ()
    if not output:
        canvas.edge(*way, (x, y), (INTO, y))
        return y
    pill = canvas.pill(output, NORM_X + 6, y - PILL / 2, NORM_W - 12, size=10.5)
    canvas.edge(*way, *(((x, pill.y - 1),) if norm else ((x, y), (pill.x - 1, y))))
    if called_with:
        return _called_with(canvas, called_with, output, pill)
    canvas.edge((pill.right, y), (INTO, y))
    canvas.type_under(pill, output.type, NORM_W)
    return pill.bottom + 14


def _called_with(canvas: Canvas, called_with: Pill, norm_output: Pill | None, above: Box) -> float:
    """What the sublayer is called with, between the norm ``above`` and the sublayer; returns the
    bottom.
    """
    pill = canvas.pill(called_with, above.cx - 48, above.bottom + 30, 96)
    shown = joint_type(called_with, *([norm_output] if norm_output else []))
    canvas.type(above.cx + 8, above.bottom + 18, shown, room=INTO - above.cx - 8)
    canvas.edge((above.cx, above.bottom), (above.cx, pill.y - 1))
    canvas.edge((pill.right, pill.cy), (INTO, pill.cy))
    return pill.bottom


def _join(
    canvas: Canvas,
    sub: Sublayer,
    start: Point,
    y: float,
    lane: float | None,
    crossed: Sequence[float],
) -> None:
    """The addend on its way back to the stream, and the ⊕ where it is added."""
    canvas.addend(start, (STREAM + 12, y), sub.addend, lane, crossed)
    if sub.output:
        canvas.stream_pill(sub.output, NORM_X + 6, y - PILL - 1, sub.output_label)
        canvas.type(NORM_X + 13, y + 14, sub.output.type)
    canvas.node(STREAM, y, "+", 11)
