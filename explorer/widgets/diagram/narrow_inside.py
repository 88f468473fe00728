"""The sublayer boxes of the block diagram at phone width: what a sublayer computes, downwards."""

from __future__ import annotations

from collections.abc import Sequence

from explorer.widgets.diagram.description import (
    Attention,
    Convolution,
    Experts,
    Mlp,
    NotTraced,
    Pill,
    Recurrence,
    Sublayer,
    captioned_types,
    joint_type,
)
from explorer.widgets.diagram.draw import Canvas
from explorer.widgets.diagram.geometry import MONO, PILL, TYPE_SIZE, Box, Inside, Point, wrap

LEFT, RIGHT = 32.0, 396.0
X0, X1 = LEFT + 11, RIGHT - 11
MIDDLE, FULL = (X0 + X1) / 2, X1 - X0
HALF = (FULL - 10) / 2


def draw_sublayer(canvas: Canvas, sub: Sublayer, top: float) -> Point:
    """A sublayer's box below ``top``; returns the point at its bottom where the result leaves."""
    canvas.title(X0, top + 25, sub.title, sub.host, sub.colour)
    y = canvas.lines(X0, top + 44, wrap(sub.summary, FULL), "note")
    y, (x, start) = _draw_inside(canvas, sub, y - 4)
    y = _other_values(canvas, sub, y)
    # The last steps are beside the way out, on the side with more room, below what is drawn.
    at_left = x > MIDDLE
    lines = wrap(sub.steps, x - X0 - 10 if at_left else X1 - x - 10)
    first = max(start + (24 if at_left else 16), y + 12)
    anchor = "end" if at_left else "start"
    end = canvas.lines(x + (-10 if at_left else 10), first, lines, "note", anchor=anchor)
    bottom = max(end - 4 if lines else 0, y + 8)
    canvas.edge((x, start), (x, bottom), arrow=False)
    canvas.box(Box(LEFT, top, RIGHT - LEFT, bottom - top), sub.colour, beneath=True)
    return x, bottom


def _other_values(canvas: Canvas, sub: Sublayer, y: float) -> float:
    """Rows of the values that the drawing of a sublayer has no place for; returns the y below."""
    rest = sub.other_values
    for index in range(0, len(rest), 2):
        pair = rest[index : index + 2]
        _row(canvas, pair, y + 4, w=FULL if len(pair) == 2 else 160)
        y += PILL + 22
    return y


def _draw_inside(canvas: Canvas, sub: Sublayer, y: float) -> Inside:
    match sub.inside:
        case Attention() as inside:
            return _attention(canvas, inside, y)
        case Recurrence() as inside:
            return _recurrence(canvas, inside, sub.host, y)
        case Convolution() as inside:
            return _convolution(canvas, inside, y)
        case Experts() as inside:
            return _experts(canvas, inside, y)
        case Mlp() as inside:
            return _mlp(canvas, inside, y)
        case NotTraced(text):
            y = canvas.lines(X0, y + 12, wrap(text, FULL), "note")
            return Inside(y, (X1 - 40, y))


def _row(
    canvas: Canvas, pills: Sequence[Pill], y: float, x: float = X0, w: float = FULL
) -> list[Box]:
    """Pills of equal width side by side, each with its type below."""
    width = (w - 10 * (len(pills) - 1)) / max(len(pills), 1)
    return [
        canvas.typed_pill(pill, x + index * (width + 10), y, width, width + 8)
        for index, pill in enumerate(pills)
    ]


def _rows(canvas: Canvas, rows: Sequence[Sequence[Pill]], y: float) -> float:
    """Rows of up to two pills, the rest sharing the second's half.

    Types are below their pills where all fit, else in lines below the rows.

    Returns the y of the last pill's or type's bottom.

    """
    rows = [row for row in rows if row]
    fit = all(len(row) <= 2 and all(_type_width(pill) <= HALF + 4 for pill in row) for row in rows)
    for row in rows:
        if fit:
            _row(canvas, row, y)
            y += 42
        else:
            canvas.pill(row[0], X0, y, HALF)
            canvas.pills(row[1:], X0 + HALF + 10, y, HALF)
            y += PILL + 6
    if fit:
        return y - 2
    pills = [pill for row in rows for pill in row]
    return canvas.types(X0 + 4, y + 7, captioned_types(pills), FULL - 4) + 5


def _fit(rows: Sequence[Sequence[Pill]]) -> bool:
    """Whether every type fits below its pill, in rows of up to two."""
    return all(len(row) <= 2 and all(_type_width(pill) <= HALF + 4 for pill in row) for row in rows)


def _type_width(pill: Pill) -> float:
    return pill.type.max_length * TYPE_SIZE * MONO


def _attention(canvas: Canvas, inside: Attention, y: float) -> Inside:
    asks = [pill for pill in (inside.queries, inside.keys) if pill]
    fit, asked = _fit([asks]), y + PILL / 2
    y = _rows(canvas, [asks], y) + 16 if asks else y
    if inside.scores:
        scores = canvas.typed_pill(inside.scores, X0, y, 190)
        if asks and fit:
            for side, arrow in ((X0 + HALF, True), (X0 + HALF + 10, False))[: len(asks)]:
                canvas.edge((side, asked), (MIDDLE, asked), (MIDDLE, y - 1), arrow=arrow)
        elif asks:  # past the lines of types
            canvas.edge((X0 + HALF, asked), (X0 + HALF + 10, asked), arrow=False)
            x = X1 - 36
            canvas.edge((x, asked), (x, scores.cy), (scores.right + 1, scores.cy))
        canvas.edge((X0 + 163, scores.bottom), (X0 + 163, y + 57))
        canvas.text(X0 + 155, y + 51, "softmax", "note", anchor="end")
    if inside.sinks:
        sinks = canvas.pill(inside.sinks, X0 + 206, y + 29, 124)
        canvas.type(sinks.x + 4, sinks.y - 4, inside.sinks.type, room=sinks.w)
        canvas.edge((sinks.x, sinks.cy), (X0 + 164, sinks.cy))
    y += 58
    weights = canvas.typed_pill(inside.probabilities, X0, y, 172, 180)
    x, meet = X0 + 190, weights.cy
    canvas.edge((weights.right, meet), (x - 8, meet))
    values = canvas.pill(inside.values, X0 + 212, y, X1 - X0 - 212)
    room = X1 - x - 4
    canvas.type(X1 - 2, y + PILL + 12, inside.values.type, room=room, anchor="end")
    canvas.edge((values.x, values.cy), (x + 8, meet))
    canvas.node(x, meet, "×", 8, "attention")
    return _heads_out(canvas, inside, (x, meet), y + 50)


def _heads_out(canvas: Canvas, inside: Attention, meet: Point, y: float) -> Inside:
    """From where weights meet values, through a gate if there is one, to the projection's input."""
    x = X0 + 154
    canvas.edge((meet[0], meet[1] + 8), (meet[0], y + PILL / 2), (X0 + 173, y + PILL / 2))
    end = y + PILL
    if inside.head_outputs:
        canvas.typed_pill(inside.head_outputs, X0, y, 172, 180)
        if inside.gate:
            gate = canvas.typed_pill(inside.gate, X0 + 196, end + 8, 96, X1 - X0 - 196)
            end = canvas.gate(gate, x, end, "attention")
    if inside.premix:
        y = y + PILL + (44 if inside.gate else 24)
        canvas.edge((x, end), (x, y - 1))
        end = canvas.typed_pill(inside.premix, X0, y, 172, 180).bottom
    return Inside(end + 14, (x, end))


def _recurrence(canvas: Canvas, inside: Recurrence, host: str, y: float) -> Inside:
    if inside.conv_input:
        box = canvas.pill(inside.conv_input, X0, y, 165)
        canvas.type(X0 + 28, box.bottom + 12, inside.conv_input.type, room=FULL - 28)
        canvas.edge((X0 + 16, box.bottom), (X0 + 16, y + 41))
        y += 42
    asks = [pill for pill in (inside.queries, inside.keys) if pill]
    given = [*([inside.values] if inside.values else []), *inside.gates]
    y = _rows(canvas, [asks, given], y)
    y = _rule(canvas, inside, y)
    turn, trunk = y + 9, X1 - 6
    state = [*([inside.state_output] if inside.state_output else []), *inside.replayed]
    if state:
        canvas.edge((MIDDLE, y), (MIDDLE, y + 17))
        canvas.pills(state, X0, y + 18, FULL - 20)
        types = captioned_types(canvas.untyped(host))
        y = canvas.types(X0 + 4, y + 53, types, FULL - 24) - 7
    if not inside.head_outputs:
        return Inside(y + 14, (X0 + 170, y))
    # The result leaves past the end of its type.
    x = X0 + min(max(170, _type_width(inside.head_outputs) + 14), 226)
    heads = canvas.typed_pill(inside.head_outputs, X0, y + 18, x - X0 + 20)
    canvas.edge(
        (X1 - 60, turn - 9),
        (X1 - 60, turn),
        (trunk, turn),
        (trunk, heads.cy),
        (heads.right + 1, heads.cy),
    )
    y = heads.bottom
    if inside.gate:
        gate = canvas.typed_pill(inside.gate, x + 26, y + 20, room=X1 - x - 26)
        return Inside(gate.bottom + 16, (x, canvas.gate(gate, x, y, "recurrent")))
    return Inside(y + 16, (x, y))


def _rule(canvas: Canvas, inside: Recurrence, y: float) -> float:
    """The recurrence, with the state that enters and its loop at the right; returns its bottom."""
    canvas.edge((X0 + 78, y - 2), (X0 + 78, y + 17))
    states = [pill for pill in (inside.state_input, inside.implied_attention) if pill]
    # A long formula leaves no room beside it.
    below = max(map(len, inside.formulas)) > 22 and bool(states)
    box = canvas.box(Box(X0, y + 18, FULL - 40, 104 if below else 74), "recurrent", "rule", 9)
    canvas.text(box.x + 14, box.y + 22, inside.title, "operation")
    canvas.lines(box.x + 14, box.y + 43, inside.formulas, "formula", pitch=18)
    if below:
        canvas.pills(states, box.x + 12, box.bottom - PILL - 10, box.w - 40)
    else:
        for index, pill in enumerate(states):
            canvas.pill(pill, box.right - 142, box.y + 12 + 28 * index, 130)
    x, top, bottom = box.right, box.y + 20, box.bottom - 20
    canvas.path(
        f"M{x} {top}C{x + 34} {top} {x + 34} {bottom} {x + 7} {bottom}", "loop", "recurrent"
    )
    canvas.head((x + 8, bottom), (x + 1, bottom), "recurrent")
    return box.bottom


def _convolution(canvas: Canvas, inside: Convolution, y: float) -> Inside:
    """A short convolution as a mixer, and the gate on its output."""
    x = X0 + 120
    if inside.input:
        pill = canvas.typed_pill(inside.input, X0, y, 160, FULL)
        canvas.edge((x, pill.bottom), (x, pill.bottom + 21))
    box = canvas.box(Box(X0, y + 45, FULL, 30), "recurrent", "rule", 9)
    text = "causal convolution over a few tokens"
    canvas.text(box.cx, box.cy + 4, text, "note", anchor="middle")
    canvas.edge((x, box.bottom), (x, box.bottom + 15))
    y = box.bottom + 16
    if inside.output:
        canvas.typed_pill(inside.output, X0, y, 160)
    y += PILL
    if inside.gate:
        gate = canvas.pill(inside.gate, x + 30, y + 24)
        canvas.type(gate.right + 8, gate.cy + 4, inside.gate.type, room=X1 - gate.right - 8)
        y = canvas.gate(gate, x, y, "recurrent")
    return Inside(y + 14, (x, y))


def _experts(canvas: Canvas, inside: Experts, y: float) -> Inside:
    # Two to a row: what is derived comes last.
    router = sorted(inside.router, key=lambda pill: pill.read_only)
    y = _grid(canvas, router, y, "router", "router", inside.router_module)
    canvas.edge((MIDDLE, y), (MIDDLE, y + 19))
    top = y + 20
    canvas.text(X0 + 12, top + 20, "experts", "operation", "mlp")
    canvas.text(X1 - 12, top + 20, inside.caption, "caption", anchor="end")
    area = Box(X0 + 12, top + 31, FULL - 24, 64)
    below = canvas.cells(area, inside.count, inside.chosen) + 8
    _row(canvas, inside.outputs, below, X0 + 10, FULL - 20)
    y = below + PILL + 22
    canvas.box(Box(X0, top, FULL, y - top), "mlp", "inner", 9, beneath=True)
    if shared := inside.shared:
        values = [*shared.values, *([shared.output] if shared.output else [])]
        canvas.node(MIDDLE, y + 11, "+", 7, "mlp")
        y = _grid(canvas, values, y + 22, "mlp", "shared expert", shared.gate, "dashed")
    return Inside(y + 2, (X1 - 40, y))


def _grid(
    canvas: Canvas,
    pills: Sequence[Pill],
    y: float,
    role: str,
    title: str,
    aside: str,
    kind: str = "inner",
) -> float:
    """A titled inner box with its pills two to a row; returns its bottom."""
    canvas.text(X0 + 12, y + 20, title, "operation", role)
    canvas.text(X1 - 12, y + 20, aside, "caption", anchor="end")
    width = (FULL - 30) / 2
    for index, pill in enumerate(pills):
        x = X0 + 10 + (width + 10) * (index % 2)
        canvas.pill(pill, x, y + 30 + 29 * (index // 2), width)
    first = y + 42 + 29 * -(-len(pills) // 2)
    bottom = canvas.types(X0 + 12, first, captioned_types(pills), FULL - 20) + 10
    canvas.box(Box(X0, y, FULL, bottom - y), role, kind, 9, beneath=True)
    return bottom


def _mlp(canvas: Canvas, inside: Mlp, y: float) -> Inside:
    up, down = Box(X0, y, 62, 56), Box(X1 - 62, y, 62, 56)
    canvas.funnel(up, wide="right")
    canvas.funnel(down, wide="left")
    neurons = inside.neurons
    first = y + 2 + 14.5 * (2 - len(neurons))
    for index, pill in enumerate(neurons):
        canvas.pill(pill, MIDDLE - 78, first + 29 * index, 156)
    if neurons:
        canvas.edge((up.right, up.cy), (MIDDLE - 79, up.cy))
        canvas.edge((MIDDLE + 78, up.cy), (down.x - 1, up.cy))
        shown = joint_type(*reversed(neurons))
        canvas.type(MIDDLE, y + 72, shown, room=FULL, anchor="middle")
    else:
        canvas.edge((up.right, up.cy), (down.x - 1, up.cy))
    # The funnel's lower side rises to the right.
    return Inside(y + 74, (down.right - 31, down.bottom - 8))
