"""The block diagram at desktop width: the stream runs down the left, the sublayers' boxes branch off to the right."""

from __future__ import annotations

from collections.abc import Sequence

from explorer.widgets.diagram.block import Block, Part, Record
from explorer.widgets.diagram.boxes import DRAW, LEFT, RIGHT, draw_mlp
from explorer.widgets.diagram.draw import PILL, Box, Canvas, mono_width

#: Names of the values on the stream, by where they stand.
_ENTERS, _BETWEEN, _LEAVES = "layer_input", "layer_mid", "layer_output"

STREAM = 24.0
NORM_X, NORM_W = 48.0, 162.0
#: Of several adds in a row, how far below each other they stand.
ADDS = 44.0


def draw(canvas: Canvas, block: Block) -> tuple[float, float]:
    width, top, bottom, entry, join = 864.0, 8.0, 0.0, 0.0, 0.0
    leaves: dict[int, tuple[float, float]] = {}
    crossed: list[float] = []
    _mark(canvas, block, _ENTERS, 16, below=True)
    for turn in block.turns():
        norms: dict[str, Box] = {}
        crossed = crossed if not turn.reads else []
        if turn.after and turn.after == block.mid:
            _mark(canvas, block, _BETWEEN, join + 34)
        for sub in turn.reads:
            draw = DRAW.get(sub["role"], draw_mlp)
            # Beside the first box the stream's label has two lines, so its norm hangs lower.
            lead = 42 if bottom or join else 56
            if bottom and sub is not turn.reads[0]:
                top = max(bottom + 30, entry + 20 - lead)
            bottom, x = draw(canvas, block, sub, top)
            entry = _enter(canvas, block, sub, top + lead, norms)
            leaves[id(sub)] = (x, bottom)
        if turn.kind != "add":
            join = max(join or 16, entry) + ADDS
            canvas.step(STREAM, join, turn)
        # The last box's result goes straight down, those from above it around it, the nearest first.
        for sub in sorted(turn.adds, key=lambda sub: -leaves[id(sub)][1]):
            join = max(bottom + 22, entry + 26, join + ADDS)
            start = leaves[id(sub)]
            below = sum(other[1] > start[1] for other in leaves.values())
            lane = RIGHT + 2 + 10 * below if below else None
            width = max(width, (lane or 0) + 12)
            _join(canvas, block, sub, start, join, lane, crossed)
            crossed += [join] if lane else []
        top = join + 18
    end = join + 42
    _mark(canvas, block, _LEAVES, end - 8)
    canvas.under.insert(0, f'<path class="bd-stream role-stream" d="M{STREAM} 16V{end + 8:.1f}"/>')
    return width, end + 16


def _mark(canvas: Canvas, block: Block, name: str, y: float, below: bool = False) -> None:
    """A named point of the stream."""
    part = block.part("layers", name)
    canvas.dot(STREAM, y)
    if part:
        pill = canvas.pill(
            part, STREAM + 10, y - PILL / 2, mono_width(name, 12) + 14, bare=True, size=12
        )
        if below:
            canvas.type(STREAM + 17, y + 22, block.type(part))
        else:
            canvas.type(
                pill.right + 2,
                y + 4,
                block.type(part),
                room=(300 if name == _LEAVES else LEFT - 4) - pill.right,
            )


def _enter(canvas: Canvas, block: Block, sub: Record, y: float, norms: dict[str, Box]) -> float:
    """From the stream through the norm into the sublayer; returns the y below what was drawn.

    ``norms`` are those drawn on this stretch of the stream, by module: a norm that several sublayers read stands once.
    """
    norm, box = sub.get("norm"), Box(NORM_X, y, NORM_W, 52)
    into = LEFT - 1
    called_with = block.part("layers", "mlp_input") if sub["host"] == "mlp" else None
    if not norm:
        canvas.edge((STREAM, box.cy), (into, box.cy))
        if called_with:
            canvas.pill(called_with, box.cx - 48, box.cy - PILL / 2, 96)
            canvas.type(box.x + 4, box.cy + PILL / 2 + 12, block.type(called_with), room=NORM_W + 8)
        return box.cy + (PILL if called_with else 0)
    part = block.part("layers", norm["value"]) if norm.get("value") else None
    if norm["scaled"]:
        canvas.text(into - 8, box.cy + 15, "× scale", "note", anchor="end")
    if norm["on_stream"]:
        return _branch(canvas, block, Box(STREAM, box.cy, 0, 0), box.cy, part, called_with, into)
    shared = norms.setdefault(norm["module"], box)
    if shared is not box:
        return _branch(canvas, block, shared, box.cy, part, called_with, into)
    canvas.edge((STREAM, box.cy), (box.x - 1, box.cy))
    canvas.box(box, "norm", "norm", 10)
    room = box.w - 14
    canvas.text(
        box.cx,
        y + 18,
        norm["module"],
        "normname",
        "norm",
        anchor="middle",
        width=room if mono_width(norm["module"], 10.8) > room else None,
    )
    if part:
        canvas.pill(part, box.x + 6, y + 25, box.w - 12, size=10.5)
    if not called_with:
        canvas.edge((box.right, box.cy), (into, box.cy))
        if part:
            canvas.type(box.x + 4, box.bottom + 13, block.type(part), room=NORM_W + 8)
        return box.bottom + 16
    return _called(canvas, block, [called_with, *([part] if part else [])], box, into)


def _branch(
    canvas: Canvas,
    block: Block,
    norm: Box,
    y: float,
    part: Part | None,
    called_with: Part | None,
    into: float,
) -> float:
    """From a norm drawn above, or one the stream has gone through, to a sublayer that reads it; returns the y below what was drawn."""
    x = norm.right - 18
    way = ((STREAM, y),) if not norm.w else ((x, norm.bottom), (x, y))
    if not part:
        canvas.edge(*way, (into, y))
        return y
    pill = canvas.pill(part, NORM_X + 6, y - PILL / 2, NORM_W - 12, size=10.5)
    canvas.edge(*way[:1], (x, pill.y - 1) if norm.w else (pill.x - 1, y))
    if called_with:
        return _called(canvas, block, [called_with, part], pill, into)
    canvas.edge((pill.right, y), (into, y))
    canvas.type_under(pill, block.type(part), NORM_W)
    return pill.bottom + 14


def _called(canvas: Canvas, block: Block, parts: Sequence[Part], above: Box, into: float) -> float:
    """What the sublayer is called with, the first of ``parts``, between what it comes from, the other, and the sublayer."""
    pill = canvas.pill(parts[0], above.cx - 48, above.bottom + 30, 96)
    canvas.type(above.cx + 8, above.bottom + 18, block.type(*parts), room=into - above.cx - 8)
    canvas.edge((above.cx, above.bottom), (above.cx, pill.y - 1))
    canvas.edge((pill.right, pill.cy), (into, pill.cy))
    return pill.bottom


def _join(
    canvas: Canvas,
    block: Block,
    sub: Record,
    start: tuple[float, float],
    y: float,
    lane: float | None,
    crossed: Sequence[float],
) -> None:
    """The addend on its way back to the stream, and the ⊕ where it is added."""
    part = block.part(sub["host"], sub["output"])
    canvas.addend(start, (STREAM + 12, y), block.addend(sub), lane, crossed)
    if part:
        name = block.adds(sub)
        canvas.pill(
            part, NORM_X + 6, y - PILL - 1, mono_width(name, 12) + 14, bare=True, size=12, text=name
        )
        canvas.type(NORM_X + 13, y + 14, block.type(part))
    canvas.node(STREAM, y, "+", 11)
