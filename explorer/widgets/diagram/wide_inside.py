"""The sublayer boxes of the block diagram at desktop width: what a sublayer computes, left to
right.
"""

from __future__ import annotations

from explorer.widgets.diagram.cells import cell_grid
from explorer.widgets.diagram.description import (
    Attention,
    Convolution,
    Experts,
    Mlp,
    NotTraced,
    Recurrence,
    SharedExpert,
    Sublayer,
    captioned_types,
    joint_type,
)
from explorer.widgets.diagram.draw import Canvas
from explorer.widgets.diagram.geometry import PILL, Box, Inside, Point, mono_width, sans_width, wrap

LEFT, RIGHT = 232.0, 856.0
X0, X1 = LEFT + 14, RIGHT - 14
#: Pitch of pills close under each other.
PITCH = 27.5


def draw_sublayer(canvas: Canvas, sub: Sublayer, top: float) -> Point:
    """A sublayer's box below ``top``; returns the point at its bottom where the result leaves."""
    inside = _draw_inside(canvas, sub, _heading(canvas, sub, top))
    x, start = inside.exit
    y = inside.bottom
    if untyped := canvas.untyped(sub.host, "shared_experts"):
        y = canvas.types(X0 + 2, y + 14, captioned_types(untyped), x - X0 - 14) + 4
    y = _other_values(canvas, sub, y)
    lines = wrap(sub.steps, 440)
    first = max(y, start) + 16
    bottom = canvas.lines(x - 10, first, lines, "note", anchor="end") - 4 if lines else y + 8
    # Tall enough for what enters it at the left.
    bottom = max(bottom, top + (150 if sub.called_with else 104))
    box = Box(LEFT, top, RIGHT - LEFT, bottom - top)
    canvas.box(box, sub.colour, beneath=True)
    canvas.edge((x, start), (x, bottom), arrow=False)
    return x, bottom


def _heading(canvas: Canvas, sub: Sublayer, top: float) -> float:
    """Title, module, and the sizes at the right or, where they are long, below; returns the y that
    the inside starts from.
    """
    canvas.title(X0 + 2, top + 27, sub.title, sub.host, sub.colour)
    room = X1 - (X0 + 30 + len(sub.title) * 9.4 + mono_width(sub.host, 12))
    if sans_width(sub.summary) <= room:
        canvas.text(X1 - 2, top + 27, sub.summary, "note", anchor="end")
        return top + 42
    return canvas.lines(X0 + 2, top + 46, wrap(sub.summary, X1 - X0), "note") - 2


def _other_values(canvas: Canvas, sub: Sublayer, y: float) -> float:
    """Rows of the values that the drawing of a sublayer has no place for; returns the y below."""
    rest = sub.other_values
    for index, pill in enumerate(rest):
        canvas.typed_pill(pill, X0 + 200 * (index % 3), y + 10 + 47 * (index // 3), 190, 198)
    return y + 47 * -(-len(rest) // 3)


def _draw_inside(canvas: Canvas, sub: Sublayer, y: float) -> Inside:
    match sub.inside:
        case Attention() as inside:
            return _attention(canvas, inside, y)
        case Recurrence() as inside:
            return _recurrence(canvas, inside, y)
        case Convolution() as inside:
            return _convolution(canvas, inside, y)
        case Experts() as inside:
            return _experts(canvas, inside, y)
        case Mlp() as inside:
            return _mlp(canvas, inside, y)
        case NotTraced(text):
            y = canvas.lines(X0 + 2, y + 12, wrap(text, X1 - X0), "note")
            return Inside(y - 10, (X1 - 60, y - 10))


def _attention(canvas: Canvas, inside: Attention, y: float) -> Inside:
    left, middle, right = X0, X0 + 198, X0 + 416
    # Sinks join between scores and softmax, and push what follows down.
    low = y + (94 if inside.sinks else 68)
    scores = inside.scores and canvas.typed_pill(inside.scores, middle, y + 6, 176, 192)
    for index, pill in enumerate((inside.queries, inside.keys)):
        if pill:
            box = canvas.pill(pill, left, y + 48 * index, 160)
            canvas.type_if_fits(box, pill.type, 176)
            if scores:
                canvas.curve((box.right, box.cy), (scores.x - 1, scores.cy), arrow=index == 1)
    values = canvas.pill(inside.values, left, low + 32, 160)
    canvas.type_if_fits(values, inside.values.type, 176)
    weights = canvas.typed_pill(inside.probabilities, middle, low, 176, 192)
    if scores:
        canvas.text(weights.x + 156, weights.y - 8, "softmax", "note", anchor="end")
        canvas.edge((weights.x + 164, scores.bottom), (weights.x + 164, weights.y - 1))
    if inside.sinks:
        sinks = canvas.typed_pill(inside.sinks, middle, y + 51, 118)
        canvas.edge((sinks.right, sinks.cy), (middle + 163, sinks.cy))
    x, meet = middle + 196, weights.cy
    canvas.edge((weights.right, meet), (x - 8, meet))
    canvas.edge((values.right, values.cy + 4), (x, values.cy + 4), (x, meet + 8))
    canvas.node(x, meet, "×", 8, "attention")
    end = y + 24
    if inside.head_outputs:
        heads = canvas.typed_pill(inside.head_outputs, right, y + 6, 176, 144)
        canvas.edge((x, meet - 8), (x, heads.cy), (heads.x - 1, heads.cy))
        end = heads.bottom
    end = _gate_and_premix(canvas, inside, right, y + 6, end)
    return Inside(max(values.bottom + 18, end + 18), (right + 160, end))


def _gate_and_premix(canvas: Canvas, inside: Attention, left: float, top: float, y: float) -> float:
    """From the heads' outputs, through a gate where there is one, to the projection's input;
    returns the bottom.
    """
    x = left + 148
    if inside.gate:
        gate = canvas.typed_pill(inside.gate, left, top + 46, room=144)
        y = canvas.gate(gate, x, y, "attention")
    if inside.premix:
        premix = canvas.typed_pill(inside.premix, left, top + 90, 176)
        canvas.edge((x, y), (x, premix.y - 1))
        y = premix.bottom
    return y


def _recurrence(canvas: Canvas, inside: Recurrence, y: float) -> Inside:
    rule = Box(X0 + 206, y + 34, 164, 122)
    given = _recurrence_inputs(canvas, inside, y, rule)
    _rule(canvas, inside, rule)
    end = _recurrence_results(canvas, inside, y, rule)
    return Inside(max(given, rule.bottom, end - 12), (X0 + 480, end))


def _recurrence_inputs(canvas: Canvas, inside: Recurrence, y: float, rule: Box) -> float:
    """What the recurrence is given, in a column, each flowing into the rule; returns the column's
    bottom.
    """
    if inside.conv_input:
        box = canvas.pill(inside.conv_input, X0, y, 160)
        canvas.type(X0 + 28, box.bottom + 12, inside.conv_input.type, room=176)
        canvas.edge((X0 + 16, box.bottom), (X0 + 16, y + 45))
        y += 46
    columns = [[pill] for pill in (inside.queries, inside.keys, inside.values) if pill]
    columns += [list(inside.gates)] if inside.gates else []
    for index, pills in enumerate(columns):
        last = canvas.pills(pills, X0, y, 160)[-1]
        canvas.curve((last.right, last.cy), (rule.x - 1, rule.cy), arrow=index == 0)
        y += 28
    return y - 5


def _rule(canvas: Canvas, inside: Recurrence, rule: Box) -> None:
    """The recurrence with its loop: the state leaves at the top and enters again."""
    canvas.box(rule, "recurrent", "rule", 9)
    canvas.text(rule.cx, rule.y + 24, inside.title, "operation", anchor="middle")
    for index, line in enumerate(inside.formulas):
        canvas.text(rule.cx, rule.y + 45 + 19 * index, line, "formula", anchor="middle")
    if inside.implied_attention:
        canvas.pill(inside.implied_attention, rule.cx - 68, rule.bottom - PILL - 12, 136)
    x, y = rule.right - 58, rule.y
    canvas.path(f"M{x} {y}C{x} {y - 34} {x + 40} {y - 34} {x + 40} {y - 7}", "loop", "recurrent")
    canvas.head((x + 40, y - 8), (x + 40, y - 1), "recurrent")
    if inside.state_input:
        state = canvas.pill(inside.state_input, rule.x - 24, rule.y - 38)
        canvas.edge((rule.x + 34, state.bottom), (rule.x + 34, rule.y - 1))


def _recurrence_results(canvas: Canvas, inside: Recurrence, y: float, rule: Box) -> float:
    """The state and what is read from it; returns the y where the result leaves."""
    x, w, trunk = X0 + 396, X1 - X0 - 396, rule.right + 12
    if inside.state_output:
        box = canvas.pill(inside.state_output, x, y + 6, w)
        states = [inside.state_input] if inside.state_input else []
        canvas.type_if_fits(box, joint_type(inside.state_output, *states), w + 4)
        canvas.edge((rule.right, y + 66), (trunk, y + 66), (trunk, box.cy), (x - 1, box.cy))
    if inside.replayed:
        first = canvas.pills(inside.replayed, x, y + 54, w)[0]
        canvas.edge((rule.right, first.cy), (x - 1, first.cy))
    if not inside.head_outputs:
        return y + 88
    heads = canvas.typed_pill(inside.head_outputs, x, y + 110, w)
    canvas.edge((rule.right, heads.cy), (x - 1, heads.cy))
    # Below the type of what leaves, unless a gate comes between.
    if not inside.gate:
        return heads.bottom + 16
    gate = canvas.typed_pill(inside.gate, X0 + 506, heads.bottom + 20, room=X1 - X0 - 494)
    return canvas.gate(gate, X0 + 480, heads.bottom + 16, "recurrent")


def _convolution(canvas: Canvas, inside: Convolution, y: float) -> Inside:
    """A short convolution as a mixer, and the gate on its output."""
    right, x = X0 + 416, X0 + 416 + 130
    y += 10
    box = canvas.box(Box(X0 + 208, y - 10, 164, PILL + 20), "recurrent", "rule", 9)
    text = ["causal convolution", "over a few tokens"]
    canvas.lines(box.cx, box.cy - 4, text, "note", anchor="middle")
    if inside.input:
        canvas.typed_pill(inside.input, X0, y, 160, 200)
    if inside.output:
        canvas.typed_pill(inside.output, right, y, X1 - right, 200)
    canvas.edge((X0 + 160, box.cy), (box.x - 1, box.cy))
    canvas.edge((box.right, box.cy), (right - 1, box.cy))
    end = y + PILL
    if inside.gate:
        gate = canvas.typed_pill(inside.gate, right, end + 22, room=124)
        end = canvas.gate(gate, x, end, "recurrent")
    return Inside(end + 14, (x, end))


def _experts(canvas: Canvas, inside: Experts, y: float) -> Inside:
    height = 172.0
    router = canvas.box(Box(X0, y - 2, 166, height), "router", "inner", 9)
    canvas.text(router.x + 12, router.y + 20, "router", "operation", "router")
    if inside.router_module:
        canvas.text(router.right - 12, router.y + 20, inside.router_module, "caption", anchor="end")
    for index, pill in enumerate(inside.router):
        canvas.pill(pill, router.x + 10, router.y + 29 + PITCH * index, router.w - 20)
    width = 208.0 if inside.shared else X1 - X0 - 166 - 34
    field = canvas.box(Box(router.right + 34, router.y, width, height), "mlp", "inner", 9)
    _expert_field(canvas, inside, field)
    canvas.edge((router.right, field.cy), (field.x - 1, field.cy))
    x = X1 - 60
    if not inside.shared:
        return Inside(field.bottom + 8, (x, field.bottom))
    meet = field.bottom + 16
    canvas.edge((field.cx, field.bottom), (field.cx, meet), (x - 8, meet))
    shared = Box(field.right + 16, field.y, X1 - field.right - 16, height)
    _shared_expert(canvas, inside.shared, shared)
    canvas.edge((x, shared.bottom), (x, meet - 8), arrow=False)
    canvas.node(x, meet, "+", 8, "mlp")
    return Inside(meet + 6, (x, meet + 8))


def _expert_field(canvas: Canvas, inside: Experts, field: Box) -> None:
    """The routed experts: cells, then their outputs."""
    canvas.text(field.x + 12, field.y + 20, "experts", "operation", "mlp")
    canvas.text(field.right - 12, field.y + 20, inside.caption, "caption", anchor="end")
    columns, pitch = cell_grid(inside.count, field.w - 22, 74)
    spare = 74 - pitch * -(-inside.count // columns)
    area = Box(field.x + 11, field.y + 31 + spare / 2, field.w - 22, 74)
    canvas.cells(area, inside.count, inside.chosen)
    for index, pill in enumerate(inside.outputs):
        canvas.pill(pill, field.x + 11, field.y + 111.5 + PITCH * index, field.w - 22)


def _shared_expert(canvas: Canvas, shared: SharedExpert, box: Box) -> None:
    """The expert every token runs through, dashed, with its gate."""
    canvas.box(box, "mlp", "dashed", 9)
    canvas.text(box.x + 12, box.y + 20, "shared expert", "operation", "mlp")
    for index, pill in enumerate(shared.values):
        canvas.pill(pill, box.x + 10, box.y + 29 + PITCH * index, box.w - 20)
    canvas.text(box.x + 14, box.y + 29 + PITCH * 3 + 16, shared.gate, "note")
    if shared.output:
        canvas.pill(shared.output, box.x + 8, box.y + 139, box.w - 16)


def _mlp(canvas: Canvas, inside: Mlp, y: float) -> Inside:
    """A dense MLP: the stream widened, the neurons, the stream again."""
    y += 2
    middle, width = (X0 + X1) / 2, 190.0
    up, down = Box(X0, y, 110, 82), Box(X1 - 110, y, 110, 82)
    canvas.funnel(up, wide="right")
    canvas.funnel(down, wide="left")
    neurons = inside.neurons
    first = y + 4 + 15 * (2 - len(neurons))
    for index, pill in enumerate(neurons):
        canvas.pill(pill, middle - width / 2, first + 30 * index, width)
    if neurons:
        canvas.edge((up.right, up.cy), (middle - width / 2 - 1, up.cy))
        canvas.edge((middle + width / 2, up.cy), (down.x - 1, up.cy))
        below, room = first + 30 * len(neurons) + 10, down.x - up.right
        canvas.type(middle, below, joint_type(*reversed(neurons)), room=room, anchor="middle")
    else:
        canvas.edge((up.right, up.cy), (down.x - 1, up.cy))
    if inside.widths:
        stream, hidden = inside.widths
        canvas.text(up.cx, up.cy + 4, f"{stream} → {hidden}", "caption", anchor="middle")
        canvas.text(down.cx, down.cy + 4, f"{hidden} → {stream}", "caption", anchor="middle")
    # The funnel's lower side rises to the right.
    return Inside(down.bottom + 14, (down.right - 14, down.bottom - 21.4))
