"""The block diagram at phone width: the boxes stack, the stream stays at the left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from explorer.widgets.diagram.block import Block, Part, Record, attribute, types_line
from explorer.widgets.diagram.boxes import funnel
from explorer.widgets.diagram.draw import PILL, Box, Canvas, mono_width, wrap
from explorer.widgets.palette import role_of

WIDTH, STREAM = 400.0, 13.0
LEFT, RIGHT = 32.0, 396.0
X0, X1 = LEFT + 11, RIGHT - 11
MIDDLE = (X0 + X1) / 2
Point = tuple[float, float]


def draw(canvas: Canvas, block: Block) -> tuple[float, float]:
    """The whole block; returns the drawing's size."""
    width, y = WIDTH, mark(canvas, block, "layer_input", 14)
    leaves: dict[int, Point] = {}
    crossed: list[float] = []
    for turn in block.turns():
        norms: dict[str, Box] = {}
        crossed = crossed if not turn.reads else []
        if turn.after and turn.after == block.mid:
            y = mark(canvas, block, "layer_mid", y)
        for sub in turn.reads:
            top = enter(canvas, block, sub, y, norms)
            leaves[id(sub)] = sublayer(canvas, block, sub, top)
            y = leaves[id(sub)][1] + 20
        if turn.kind != "add":
            canvas.step(STREAM, y + 4, turn)
            y += 28
        # The last box's result goes straight down, those from above it around it, the nearest first.
        for number, sub in enumerate(sorted(turn.adds, key=lambda sub: -leaves[id(sub)][1])):
            start = leaves[id(sub)]
            below = sum(other[1] > start[1] for other in leaves.values())
            lane = RIGHT + 8 * below if below else None
            width = max(width, (lane or 0) + 8)
            y -= 10 if number else 0
            y = join(canvas, block, sub, start, y, lane, crossed)
            crossed += [y - 50] if lane else []
    y = mark(canvas, block, "layer_output", y)
    canvas.under.insert(0, f'<path class="bd-stream role-stream" d="M{STREAM} 14V{y:.1f}"/>')
    return width, y + 4


def mark(canvas: Canvas, block: Block, name: str, y: float) -> float:
    """A named point of the stream; returns where the next thing starts."""
    canvas.dot(STREAM, y)
    part = block.part("layers", name)
    if part:
        pill = canvas.pill(
            part, STREAM + 12, y - PILL / 2, mono_width(name, 12) + 14, bare=True, size=12
        )
        canvas.type(pill.right + 6, y + 4, block.type(part), room=RIGHT - pill.right - 6)
    return y + 24


def enter(canvas: Canvas, block: Block, sub: Record, y: float, norms: dict[str, Box]) -> float:
    """The norm, and the way into the sublayer's box; returns the box's top.

    ``norms`` are those drawn on this stretch of the stream, by module: a norm that several sublayers read stands once.
    """
    norm = sub.get("norm")
    called_with = block.part("layers", "mlp_input") if sub["host"] == "mlp" else None
    part = block.part("layers", norm["value"]) if norm and norm.get("value") else None
    if norm and norm["on_stream"]:
        return branch(canvas, block, None, y, [part for part in (part, called_with) if part])
    if norm and norm["module"] in norms:
        return branch(
            canvas,
            block,
            norms[norm["module"]],
            y,
            [part for part in (part, called_with) if part],
            norm["scaled"],
        )
    if not norm:
        if not called_with:
            canvas.edge((STREAM, y + 8), (MIDDLE, y + 8), (MIDDLE, y + 25))
            return y + 26
        return called(canvas, block, called_with, (STREAM, y), y + 4)
    box = norms[norm["module"]] = canvas.box(Box(LEFT, y, RIGHT - LEFT, 36), "norm", "norm", 10)
    canvas.edge((STREAM, box.cy), (box.x - 1, box.cy))
    canvas.text(X0, box.cy + 4, norm["module"], "normname", "norm")
    if part:
        canvas.pill(part, X1 - 150, box.cy - PILL / 2, 150, size=10.5)
    top = box.bottom
    if called_with:
        return called(canvas, block, called_with, (X0 + 60, top), top + 18, part)
    canvas.edge((X0 + 60, top), (X0 + 60, top + 21))
    if norm["scaled"]:
        canvas.text(X0 + 72, top + 14, "× scale", "note")
    if part:
        canvas.type(X0 + 72, top + 14, block.type(part), room=RIGHT - X0 - 72)
    return top + 22


def called(
    canvas: Canvas, block: Block, part: Part, start: Point, y: float, norm: Part | None = None
) -> float:
    """What the sublayer is called with, on the way from ``start``, a ``norm``'s, into its box; returns the box's top."""
    pill = canvas.pill(part, X0 + 12, y, 96)
    if start[0] < pill.x:
        canvas.edge((start[0], pill.cy), (pill.x - 1, pill.cy))
    else:
        canvas.edge(start, (pill.cx, pill.y - 1))
    canvas.type(
        pill.right + 8,
        pill.cy + 3.5,
        block.type(part, *([norm] if norm else [])),
        room=RIGHT - pill.right - 8,
    )
    canvas.edge((pill.cx, pill.bottom), (pill.cx, pill.bottom + 17))
    return pill.bottom + 18


def branch(
    canvas: Canvas,
    block: Block,
    norm: Box | None,
    y: float,
    parts: Sequence[Part],
    scaled: bool = False,
) -> float:
    """From a norm drawn above, past the box that reads it first, to the next; from the stream where that went through the norm.

    Returns the box's top.
    """
    x = STREAM if norm is None else (STREAM + LEFT) / 2
    way = (
        ()
        if norm is None
        else ((norm.x + 10, norm.bottom), (norm.x + 10, norm.bottom + 9), (x, norm.bottom + 9))
    )
    if scaled:
        canvas.text(MIDDLE - 8, y + 21, "× scale", "note", anchor="end")
    if not parts:
        canvas.edge(*way, (x, y + 8), (MIDDLE, y + 8), (MIDDLE, y + 25))
        return y + 26
    pills = [
        canvas.pill(part, X0 + (170 * index), y, 150 if index == 0 else 96, size=10.5)
        for index, part in enumerate(parts)
    ]
    canvas.edge(*way, (x, pills[0].cy), (pills[0].x - 1, pills[0].cy))
    for one, other in zip(pills, pills[1:]):
        canvas.edge((one.right, one.cy), (other.x - 1, other.cy))
    canvas.edge((pills[-1].cx, pills[-1].bottom), (pills[-1].cx, pills[-1].bottom + 21))
    canvas.type(
        pills[-1].cx + 8,
        pills[-1].bottom + 14,
        block.type(*reversed(parts)),
        room=RIGHT - pills[-1].cx - 8,
    )
    return pills[-1].bottom + 22


def join(
    canvas: Canvas,
    block: Block,
    sub: Record,
    start: Point,
    y: float,
    lane: float | None,
    crossed: Sequence[float],
) -> float:
    """The addend, back to the stream; returns where the next mark stands."""
    canvas.addend(start, (STREAM + 11, y), block.addend(sub), lane, crossed)
    part = block.part(sub["host"], sub["output"])
    if part:
        name = block.adds(sub)
        pill = canvas.pill(
            part, LEFT + 2, y + 4, mono_width(name, 12) + 14, bare=True, size=12, text=name
        )
        canvas.type(pill.right + 8, y + 19, block.type(part), room=RIGHT - pill.right - 8)
    canvas.node(STREAM, y, "+", 10)
    return y + 50


def sublayer(canvas: Canvas, block: Block, sub: Record, top: float) -> Point:
    """Title, content, steps and the box around them; returns where the result leaves the box."""
    role = role_of(sub["host"])
    canvas.title(X0, top + 25, sub["title"], attribute(sub["host"]), role)
    y = canvas.lines(X0, top + 44, wrap(sub.get("summary") or "", X1 - X0), "note")
    y, (x, start) = DRAW.get(sub["role"], draw_mlp)(canvas, block, sub, y - 4)
    y = others(canvas, block, sub, y)
    left = x > MIDDLE  # the text stands where there is room
    lines = wrap(" · ".join(sub.get("steps") or ()), x - X0 - 10 if left else X1 - x - 10)
    # At the left it would stand on what is drawn there: below that.
    first = max(start + 24, y + 12) if left else start + 16
    bottom = max(
        canvas.lines(
            x + (-10 if left else 10), first, lines, "note", anchor="end" if left else "start"
        )
        - 4,
        y + 8,
    )
    canvas.edge((x, start), (x, bottom), arrow=False)
    under(canvas, Box(LEFT, top, RIGHT - LEFT, bottom - top), role, "box", 13)
    return x, bottom


def others(canvas: Canvas, block: Block, sub: Record, y: float) -> float:
    """Rows of what the drawing of a sublayer has no place for; returns the y below."""
    rest = block.rest(sub, canvas.drawn)
    for index in range(0, len(rest), 2):
        row(
            canvas,
            block,
            rest[index : index + 2],
            y + 4,
            w=X1 - X0 if len(rest) > index + 1 else 160,
        )
        y += PILL + 22
    return y


def draw_plain(canvas: Canvas, block: Block, sub: Record, y: float) -> tuple[float, Point]:
    """A sublayer whose inside is not followed: what is said of it."""
    said = (
        f"What is inside is not followed: {sub['note']}."
        if sub.get("note")
        else "What is inside is not followed."
    )
    y = canvas.lines(X0, y + 12, wrap(said, X1 - X0), "note")
    return y, (X1 - 40, y)


def row(
    canvas: Canvas,
    block: Block,
    parts: Sequence[Part],
    y: float,
    typed: bool = True,
    x: float = X0,
    w: float = X1 - X0,
) -> list[Box]:
    """Pills of equal width side by side, each with its type below."""
    gap = 10.0
    width = (w - gap * (len(parts) - 1)) / max(len(parts), 1)
    boxes = []
    for index, part in enumerate(parts):
        box = canvas.pill(part, x + index * (width + gap), y, width)
        if typed:
            canvas.type_under(box, block.type(part), width + gap - 2)
        boxes.append(box)
    return boxes


def draw_attention(canvas: Canvas, block: Block, sub: Record, y: float) -> tuple[float, Point]:
    host = sub["host"]
    if not block.part(host, "attention_probabilities") or not block.part(host, "attention_values"):
        return draw_plain(canvas, block, sub, y)
    asks = row(canvas, block, block.parts(host, ("attention_queries", "attention_keys")), y)
    y += 56
    scores = row(canvas, block, block.parts(host, ("attention_scores",)), y, w=190)
    for box in asks:
        side = box.right if box.cx < MIDDLE else box.x
        canvas.edge(
            (side, box.cy), (MIDDLE, box.cy), (MIDDLE, y - 1), arrow=bool(scores) and box is asks[0]
        )
    sinks = block.part(host, "attention_sinks")
    if sinks:
        pill = canvas.pill(sinks, X0 + 206, y + 29, 124)
        canvas.type(pill.x + 4, pill.y - 4, block.type(sinks), room=pill.w)
        canvas.edge((pill.x, pill.cy), (X0 + 164, pill.cy))
    y += 58
    mix = row(canvas, block, block.parts(host, ("attention_probabilities",)), y, w=172)
    meet = (X0 + 190, y + PILL / 2)
    values = block.part(host, "attention_values")
    for score, weights in zip(scores, mix):
        canvas.edge((X0 + 163, score.bottom), (X0 + 163, weights.y - 1))
        canvas.text(X0 + 155, weights.y - 7, "softmax", "note", anchor="end")
        canvas.edge((weights.right, weights.cy), (meet[0] - 8, meet[1]))
    if values:
        pill = canvas.pill(values, X0 + 212, y, X1 - X0 - 212)
        canvas.type(X1 - 2, y + PILL + 12, block.type(values), room=X1 - meet[0] - 4, anchor="end")
        canvas.edge((pill.x, pill.cy), (meet[0] + 8, meet[1]))
    canvas.node(*meet, "×", 8, "attention")
    return heads_out(canvas, block, host, meet, y + 50)


def heads_out(
    canvas: Canvas, block: Block, host: str, meet: Point, y: float
) -> tuple[float, Point]:
    """From where weights meet values, through a gate where there is one, to the projection's input."""
    heads = row(canvas, block, block.parts(host, ("attention_head_outputs",)), y, w=172)
    gate = next(iter(block.parts(host, ("head_gate", "head_scale"))), None)
    premix = block.part(host, "attention_premix")
    canvas.edge((meet[0], meet[1] + 8), (meet[0], y + PILL / 2), (X0 + 173, y + PILL / 2))
    y += PILL + 28
    if gate and heads:
        pill = canvas.pill(gate, X0 + 212, y - 20, 96)
        canvas.type_under(pill, block.type(gate), X1 - pill.x)
        canvas.edge((pill.x, pill.cy), (X0 + 154 + 7, pill.cy))
        canvas.edge((X0 + 154, heads[0].bottom), (X0 + 154, pill.cy - 7))
        canvas.node(X0 + 154, pill.cy, "×", 7, "attention")
        canvas.edge((X0 + 154, pill.cy + 7), (X0 + 154, y + 15))
        y += 16
    elif heads:
        canvas.edge((X0 + 154, heads[0].bottom), (X0 + 154, y - 5))
        y -= 4
    if premix:
        row(canvas, block, [premix], y, w=172)
        y += PILL
    return y + 14, (X0 + 154, y)


def draw_recurrent(canvas: Canvas, block: Block, sub: Record, y: float) -> tuple[float, Point]:
    host = sub["host"]
    before = block.parts(host, ("conv_input",))
    if before:
        pill = canvas.pill(before[0], X0, y, 165)
        canvas.type(X0 + 28, y + PILL + 12, block.type(before[0]), room=X1 - X0 - 28)
        canvas.edge((X0 + 16, pill.bottom), (X0 + 16, y + 41))
        y += 42
    for names in (
        ("attention_queries", "attention_keys"),
        ("attention_values", "decays", "betas", "recurrent_gate", "skip"),
    ):
        if not (parts := block.parts(host, names)):
            continue
        if len(parts) > 2:
            row(canvas, block, parts[:1], y, w=(X1 - X0 - 10) / 2)
            canvas.pair(parts[1:], X0 + (X1 - X0 + 10) / 2, y, (X1 - X0 - 10) / 2)
            y = canvas.types(X0 + 4, y + PILL + 26, types_line(block, parts[1:]), X1 - X0 - 4) - 35
        else:
            row(canvas, block, parts, y)
        y += 42
    y = rule(canvas, block, sub, y)
    turn, trunk = y + 9, X1 - 6
    state = block.parts(host, ("state_output", "state", "states"))
    if state:
        canvas.edge((MIDDLE, y), (MIDDLE, y + 17))
        canvas.pair(state, X0, y + 18, X1 - X0 - 20)
        y = (
            canvas.types(
                X0 + 4, y + 53, types_line(block, canvas.untyped(attribute(host))), X1 - X0 - 24
            )
            - 7
        )
    heads = row(canvas, block, block.parts(host, ("attention_head_outputs",)), y + 18, w=190)
    for pill in heads:
        canvas.edge(
            (X1 - 60, turn - 9),
            (X1 - 60, turn),
            (trunk, turn),
            (trunk, pill.cy),
            (pill.right + 1, pill.cy),
        )
        y = pill.bottom
    gate = block.part(host, "head_gate")
    if gate:
        pill = canvas.pill(gate, X0 + 196, y + 20)
        canvas.type_under(pill, block.type(gate), X1 - pill.x)
        canvas.edge((X0 + 170, y + 14), (X0 + 170, pill.cy - 7), arrow=False)
        canvas.edge((pill.x, pill.cy), (X0 + 177, pill.cy))
        canvas.node(X0 + 170, pill.cy, "×", 7, "recurrent")
        y = pill.cy + 7
    return y + 14, (X0 + 170, y)


def draw_convolution(canvas: Canvas, block: Block, sub: Record, y: float) -> tuple[float, Point]:
    """A short convolution as a mixer, and the gate on what it gives."""
    host, x = sub["host"], X0 + 120
    for pill in row(canvas, block, block.parts(host, ("conv_input",)), y, w=160):
        canvas.edge((x, pill.bottom), (x, pill.bottom + 21))
    box = canvas.box(Box(X0, y + 45, X1 - X0, 30), "recurrent", "rule", 9)
    canvas.text(box.cx, box.cy + 4, "causal convolution over a few tokens", "note", anchor="middle")
    canvas.edge((x, box.bottom), (x, box.bottom + 15))
    y = box.bottom + 16
    row(canvas, block, block.parts(host, ("conv_output",)), y, w=160)
    gate = block.part(host, "conv_gate")
    y += PILL
    if gate:
        pill = canvas.pill(gate, x + 30, y + 24)
        canvas.type(pill.right + 8, pill.cy + 4, block.type(gate), room=X1 - pill.right - 8)
        canvas.edge((x, y), (x, pill.cy - 7))
        canvas.edge((pill.x, pill.cy), (x + 7, pill.cy))
        canvas.node(x, pill.cy, "×", 7, "recurrent")
        y = pill.cy + 7
    return y + 14, (x, y)


def rule(canvas: Canvas, block: Block, sub: Record, y: float) -> float:
    """The recurrence, with the state that enters and its loop at the right."""
    title, lines = sub["rule"]["title"], sub["rule"]["lines"]
    canvas.edge((X0 + 78, y - 2), (X0 + 78, y + 17))
    inside = block.parts(sub["host"], ("state_input", "state_attention"))
    # A long formula leaves no room beside it.
    below = len(max(lines, key=len)) > 22 and bool(inside)
    box = canvas.box(Box(X0, y + 18, X1 - X0 - 40, 104 if below else 74), "recurrent", "rule", 9)
    canvas.text(box.x + 14, box.y + 22, title, "operation")
    for index, line in enumerate(lines):
        canvas.text(box.x + 14, box.y + 43 + 18 * index, line, "formula")
    if below:
        canvas.pair(inside, box.x + 12, box.bottom - PILL - 10, box.w - 40)
    for index, part in enumerate(inside if not below else ()):
        canvas.pill(part, box.right - 142, box.y + 12 + 28 * index, 130)
    x = box.right
    canvas.path(
        f"M{x} {box.y + 20}C{x + 34} {box.y + 20} {x + 34} {box.bottom - 20} {x + 7} {box.bottom - 20}",
        "loop",
        "recurrent",
    )
    canvas.head((x + 8, box.bottom - 20), (x + 1, box.bottom - 20), "recurrent")
    return box.bottom


def draw_experts(canvas: Canvas, block: Block, sub: Record, y: float) -> tuple[float, Point]:
    host, experts, shared = sub["host"], sub["experts"], sub.get("shared")
    if not experts:
        return draw_plain(canvas, block, sub, y)
    router = block.parts(
        host,
        ("router_logits", "router_scores", "expert_weights", "expert_indices", "router_margin"),
    )
    y = grid(
        canvas, block, router, y, "router", "router", (sub.get("router") or {}).get("module", "")
    )
    canvas.edge((MIDDLE, y), (MIDDLE, y + 19))
    field = Box(X0, y + 20, X1 - X0, 0)
    canvas.text(field.x + 12, field.y + 20, "experts", "operation", "mlp")
    width = f", {experts['width']} wide" if experts.get("width") else ""
    canvas.text(
        field.right - 12,
        field.y + 20,
        f"{experts['chosen']} of {experts['count']}{width}",
        "caption",
        anchor="end",
    )
    below = canvas.cells(
        Box(field.x + 12, field.y + 31, field.w - 24, 64), experts["count"], experts["chosen"]
    )
    row(
        canvas,
        block,
        block.parts(host, ("expert_outputs", "routed_output")),
        below + 8,
        x=field.x + 10,
        w=field.w - 20,
    )
    y = below + 8 + PILL + 22
    under(canvas, Box(field.x, field.y, field.w, y - field.y), "mlp", "inner")
    if shared:
        inside = block.parts(
            "shared_experts", ("mlp_activation", "mlp_neurons", "mlp_output")
        ) + block.parts(host, ("shared_expert_output",))
        gate = f"× {shared['gate']}" if shared.get("gate") else ""
        canvas.node(MIDDLE, y + 11, "+", 7, "mlp")
        y = grid(canvas, block, inside, y + 22, "mlp", "shared expert", gate, "dashed")
    return y + 2, (X1 - 40, y)


def grid(
    canvas: Canvas,
    block: Block,
    parts: Sequence[Part],
    y: float,
    role: str,
    title: str,
    aside: str,
    kind: str = "inner",
) -> float:
    """A titled inner box with its pills two to a row; returns its bottom."""
    canvas.text(X0 + 12, y + 20, title, "operation", role)
    canvas.text(X1 - 12, y + 20, aside, "caption", anchor="end")
    rows = [parts[i : i + 2] for i in range(0, len(parts), 2)]
    for index, pair in enumerate(rows):
        full = X1 - X0 - 20
        row(
            canvas,
            block,
            pair,
            y + 30 + 29 * index,
            typed=False,
            x=X0 + 10,
            w=full if len(pair) == 2 else (full - 10) / 2,
        )
    bottom = (
        canvas.types(X0 + 12, y + 42 + 29 * len(rows), types_line(block, parts), X1 - X0 - 20) + 10
    )
    under(canvas, Box(X0, y, X1 - X0, bottom - y), role, kind)
    return bottom


def under(canvas: Canvas, box: Box, role: str, kind: str, rx: float = 9) -> None:
    """A box put beneath what has been drawn so far."""
    at = len(canvas.over)
    canvas.box(box, role, kind, rx)
    canvas.over.insert(0, canvas.over.pop(at))


def draw_mlp(canvas: Canvas, block: Block, sub: Record, y: float) -> tuple[float, Point]:
    up, down = Box(X0, y, 62, 56), Box(X1 - 62, y, 62, 56)
    canvas.under.append(funnel(up, wide="right") + funnel(down, wide="left"))
    neurons = block.parts(sub["host"], ("mlp_activation", "mlp_neurons"))
    for index, part in enumerate(neurons):
        canvas.pill(part, MIDDLE - 78, y + 2 + 14.5 * (2 - len(neurons)) + 29 * index, 156)
    if neurons:
        canvas.edge((up.right, up.cy), (MIDDLE - 79, up.cy))
        canvas.edge((MIDDLE + 78, up.cy), (down.x - 1, up.cy))
        canvas.type(MIDDLE, y + 72, block.type(*reversed(neurons)), room=X1 - X0, anchor="middle")
    else:
        canvas.edge((up.right, up.cy), (down.x - 1, up.cy))
    # The funnel's lower side rises to the right.
    return y + 74, (down.right - 31, down.bottom - 8)


DRAW: dict[str, Callable[[Canvas, Block, Record, float], tuple[float, Point]]] = {
    "attention": draw_attention,
    "recurrent": draw_recurrent,
    "convolution": draw_convolution,
    "mixer": draw_plain,
    "extra": draw_plain,
    "experts": draw_experts,
    "mlp": draw_mlp,
}
