"""The sublayer boxes of the block diagram at desktop width: what a sublayer computes, left to right.

Each ``draw_*`` takes the canvas, the block, the sublayer's facts and the top of its
box; it returns the box's bottom and the x at which the result leaves it.
"""

from __future__ import annotations

from collections.abc import Callable

from explorer.widgets.diagram.block import Block, Record, attribute, types_line
from explorer.widgets.diagram.draw import PILL, Box, Canvas, wrap
from explorer.widgets.palette import role_of

LEFT, RIGHT = 232.0, 856.0
X0, X1 = LEFT + 14, RIGHT - 14
Leaves = tuple[float, float]


def heading(canvas: Canvas, sub: Record, top: float) -> None:
    """Title, where it hangs in the model, and its sizes at the right."""
    role = role_of(sub["host"])
    title, module = sub["title"], attribute(sub["host"])
    canvas.title(X0 + 2, top + 27, title, module, role)
    room = X1 - (X0 + 30 + len(title) * 9.4 + len(module) * 7.4)
    summary = sub.get("summary") or ""
    if len(summary) * 5.9 > room:
        summary = wrap(summary, room)[0].rstrip(" ·,→") + " …"
    canvas.text(X1 - 2, top + 27, summary, "note", anchor="end")


def closing(canvas: Canvas, sub: Record, y: float, leaves: float, room: float = 440) -> float:
    """The sublayer's last steps in words, beside the edge that leaves at ``leaves``; returns the box's bottom."""
    lines = wrap(" · ".join(sub.get("steps") or ()), room)
    return canvas.lines(leaves - 10, y, lines, "note", anchor="end") - (4 if lines else 10)


def others(canvas: Canvas, block: Block, sub: Record, y: float) -> float:
    """Rows of what the drawing of a sublayer has no place for; returns the y below."""
    rest = block.rest(sub, canvas.drawn)
    for index in range(0, len(rest), 3):
        for place, part in enumerate(rest[index : index + 3]):
            pill = canvas.pill(part, X0 + 200 * place, y, 190)
            canvas.type_under(pill, block.type(part), 198)
        y += PILL + 24
    return y


def frame(canvas: Canvas, sub: Record, top: float, bottom: float) -> None:
    """The box itself, drawn last because its height is known last, and put beneath its content."""
    mark = len(canvas.over)
    canvas.box(Box(LEFT, top, RIGHT - LEFT, bottom - top), role_of(sub["host"]))
    canvas.over.insert(0, canvas.over.pop(mark))


def draw_plain(canvas: Canvas, block: Block, sub: Record, top: float) -> Leaves:
    """A sublayer whose inside is not followed: what is said of it, and what can be read all the same."""
    heading(canvas, sub, top)
    y = canvas.lines(
        X0 + 2,
        top + 54,
        wrap(
            f"What is inside is not followed: {sub['note']}."
            if sub.get("note")
            else "What is inside is not followed.",
            X1 - X0,
        ),
        "note",
    )
    y = others(canvas, block, sub, y)
    # Tall enough for what enters it at the left.
    bottom = max(closing(canvas, sub, y + 4, X1 - 60), top + (150 if sub["host"] == "mlp" else 104))
    frame(canvas, sub, top, bottom)
    canvas.edge((X1 - 60, y - 10), (X1 - 60, bottom), arrow=False)
    return bottom, X1 - 60


def draw_attention(canvas: Canvas, block: Block, sub: Record, top: float) -> Leaves:
    if not block.part(sub["host"], "attention_probabilities") or not block.part(
        sub["host"], "attention_values"
    ):
        return draw_plain(canvas, block, sub, top)
    heading(canvas, sub, top)
    get = lambda name: block.part(sub["host"], name)  # noqa: E731
    a, b, c = X0, X0 + 198, X0 + 416
    rows: dict[str, Box] = {}

    def put(name: str, x: float, y: float, w: float) -> None:
        part = get(name)
        if part:
            rows[name] = canvas.pill(part, x, y, w)
            # Short of the line that leaves the heads' outputs; what comes from the others leaves room beside them.
            canvas.type_under(rows[name], block.type(part), 144 if x == c else w + 16)

    # Sinks join between scores and softmax, and push what follows down.
    sinks = get("attention_sinks")
    low = top + (136 if sinks else 110)
    put("attention_queries", a, top + 42, 160)
    put("attention_keys", a, top + 90, 160)
    put("attention_values", a, low + 32, 160)
    put("attention_scores", b, top + 48, 176)
    put("attention_probabilities", b, low, 176)
    put("attention_head_outputs", c, top + 48, 176)
    score, mix = rows.get("attention_scores"), rows.get("attention_probabilities")
    for name in ("attention_queries", "attention_keys"):
        if name in rows and score:
            canvas.curve(
                (rows[name].right, rows[name].cy),
                (score.x - 1, score.cy),
                arrow=name == "attention_keys",
            )
    if score and mix:
        canvas.text(mix.x + 156, mix.y - 8, "softmax", "note", anchor="end")
        canvas.edge((mix.x + 164, score.bottom), (mix.x + 164, mix.y - 1))
    if sinks:
        pill = canvas.pill(sinks, b, top + 93, 118)
        canvas.type_under(pill, block.type(sinks))
        canvas.edge((pill.right, pill.cy), (b + 163, pill.cy))
    meet = (b + 196, low + PILL / 2)
    if mix:
        canvas.edge((mix.right, meet[1]), (meet[0] - 8, meet[1]))
    if "attention_values" in rows:
        values = rows["attention_values"]
        canvas.edge((values.right, values.cy + 4), (meet[0], values.cy + 4), (meet[0], meet[1] + 8))
    canvas.node(*meet, "×", 8, "attention")
    heads = rows.get("attention_head_outputs")
    if heads:
        canvas.edge((meet[0], meet[1] - 8), (meet[0], heads.cy), (heads.x - 1, heads.cy))
    end = gate_and_premix(canvas, block, sub, Box(c, top + 48, 176, PILL))
    rest = others(canvas, block, sub, max(low + 74, end - 4))
    bottom = closing(canvas, sub, max(low + 94, end + 8, rest + 12), c + 160)
    frame(canvas, sub, top, bottom)
    canvas.edge((c + 160, end - 18), (c + 160, bottom), arrow=False)
    return bottom, c + 160


def gate_and_premix(canvas: Canvas, block: Block, sub: Record, heads: Box) -> float:
    """From the heads' outputs, through a gate where there is one, to what the projection takes; returns the y below."""
    gates, premix = (
        block.parts(sub["host"], ("head_gate", "head_scale")),
        block.part(sub["host"], "attention_premix"),
    )
    y, x = heads.y + 90, heads.x + 148
    if gates:
        pill = canvas.pill(gates[0], heads.x, heads.y + 46)
        canvas.type_under(pill, block.type(gates[0]), 144)
        canvas.edge((pill.right, pill.cy), (x - 7, pill.cy))
        canvas.edge((x, heads.bottom), (x, pill.cy - 7))
        canvas.node(x, pill.cy, "×", 7, "attention")
        canvas.edge((x, pill.cy + 7), (x, y - 1))
    elif premix:
        canvas.edge((x, heads.bottom), (x, y - 1))
    if not premix:
        return heads.bottom + 18
    canvas.pill(premix, heads.x, y, heads.w)
    canvas.type(heads.x + 4, y + PILL + 12, block.type(premix), room=heads.w)
    return y + PILL + 18


def draw_recurrent(canvas: Canvas, block: Block, sub: Record, top: float) -> Leaves:
    heading(canvas, sub, top)
    host = sub["host"]
    rule = Box(X0 + 206, top + 76, 164, 122)
    reads = recurrent_reads(canvas, block, host, top, rule)
    draw_rule(canvas, block, sub, rule)
    end = recurrent_results(canvas, block, host, top, rule)
    said = canvas.types(
        X0 + 2,
        max(reads + 17, rule.bottom + 16),
        types_line(block, canvas.untyped(attribute(host))),
        468,
    )
    rest = others(canvas, block, sub, said + 10)
    bottom = closing(canvas, sub, max(said + 19, end + 19, rest + 4), X0 + 480)
    frame(canvas, sub, top, bottom)
    canvas.edge((X0 + 480, end), (X0 + 480, bottom), arrow=False)
    return bottom, X0 + 480


def recurrent_reads(canvas: Canvas, block: Block, host: str, top: float, rule: Box) -> float:
    """The kernel's arguments in a column, each flowing into the rule; returns the column's bottom."""
    y = top + 42
    before = block.part(host, "conv_input")
    if before:
        pill = canvas.pill(before, X0, y, 160)
        canvas.type(X0 + 28, y + PILL + 12, block.type(before), room=176)
        canvas.edge((X0 + 16, pill.bottom), (X0 + 16, y + 45))
        y += 46
    rows = [
        block.parts(host, [name])
        for name in ("attention_queries", "attention_keys", "attention_values")
    ]
    rows.append(block.parts(host, ("decays", "betas", "recurrent_gate", "skip")))
    for index, parts in enumerate(filter(None, rows)):
        last = canvas.pair(parts, X0, y, 160)[-1]
        canvas.curve((last.right, last.cy), (rule.x - 1, rule.cy), arrow=index == 0)
        y += 28
    return y - 5


def draw_rule(canvas: Canvas, block: Block, sub: Record, rule: Box) -> None:
    """The recurrence with its loop: the state goes out at the top and comes in again."""
    title, lines = sub["rule"]["title"], sub["rule"]["lines"]
    canvas.box(rule, "recurrent", "rule", 9)
    canvas.text(rule.cx, rule.y + 24, title, "operation", anchor="middle")
    for index, line in enumerate(lines):
        canvas.text(rule.cx, rule.y + 45 + 19 * index, line, "formula", anchor="middle")
    implied = block.part(sub["host"], "state_attention")
    if implied:
        canvas.pill(implied, rule.cx - 68, rule.bottom - PILL - 12, 136)
    x, y = rule.right - 58, rule.y
    canvas.path(f"M{x} {y}C{x} {y - 34} {x + 40} {y - 34} {x + 40} {y - 7}", "loop", "recurrent")
    canvas.head((x + 40, y - 8), (x + 40, y - 1), "recurrent")
    enters = block.part(sub["host"], "state_input")
    if enters:
        pill = canvas.pill(enters, rule.x - 24, rule.y - 38)
        canvas.edge((rule.x + 34, pill.bottom), (rule.x + 34, rule.y - 1))


def recurrent_results(canvas: Canvas, block: Block, host: str, top: float, rule: Box) -> float:
    """State and read-out; returns the y below the read-out."""
    x, w, trunk = X0 + 396, X1 - X0 - 396, rule.right + 12
    leaves = block.part(host, "state_output")
    if leaves:
        pill = canvas.pill(leaves, x, top + 48, w)
        enters = block.part(host, "state_input")
        canvas.type(x, pill.bottom + 12, block.type(leaves, *([enters] if enters else [])), room=w)
        canvas.edge((rule.right, top + 108), (trunk, top + 108), (trunk, pill.cy), (x - 1, pill.cy))
    replayed = block.parts(host, ("state", "states"))
    if replayed:
        first = canvas.pair(replayed, x, top + 96, w)[0]
        canvas.edge((rule.right, first.cy), (x - 1, first.cy))
    heads = block.part(host, "attention_head_outputs")
    if not heads:
        return top + 130
    pill = canvas.pill(heads, x, top + 152, w)
    canvas.type_under(pill, block.type(heads), w)
    canvas.edge((rule.right, pill.cy), (x - 1, pill.cy))
    gate = block.part(host, "head_gate")
    if not gate:
        return pill.bottom + 16
    factor = canvas.pill(gate, X0 + 506, pill.bottom + 20)
    canvas.edge((X0 + 480, pill.bottom + 16), (X0 + 480, factor.cy - 7), arrow=False)
    canvas.edge((factor.x, factor.cy), (X0 + 487, factor.cy))
    canvas.node(X0 + 480, factor.cy, "×", 7, "recurrent")
    return factor.cy + 7


def draw_convolution(canvas: Canvas, block: Block, sub: Record, top: float) -> Leaves:
    """A short convolution as a mixer, and the gate on what it gives."""
    heading(canvas, sub, top)
    host, y, w, x = sub["host"], top + 52, 164.0, X0 + 416 + 130
    box = canvas.box(Box(X0 + 208, y - 10, w, PILL + 20), "recurrent", "rule", 9)
    canvas.lines(
        box.cx, box.cy - 4, ["causal convolution", "over a few tokens"], "note", anchor="middle"
    )
    for name, left, width in (("conv_input", X0, 160.0), ("conv_output", X0 + 416, X1 - X0 - 416)):
        part = block.part(host, name)
        if part:
            pill = canvas.pill(part, left, y, width)
            canvas.type_under(pill, block.type(part), 200)
    canvas.edge((X0 + 160, box.cy), (box.x - 1, box.cy))
    canvas.edge((box.right, box.cy), (X0 + 415, box.cy))
    end, gate = y + PILL, block.part(host, "conv_gate")
    if gate:
        pill = canvas.pill(gate, X0 + 416, end + 22)
        canvas.edge((pill.right, pill.cy), (x - 7, pill.cy))
        canvas.edge((x, end), (x, pill.cy - 7))
        canvas.type_under(pill, block.type(gate), 124)
        canvas.node(x, pill.cy, "×", 7, "recurrent")
        end = pill.cy + 7
    rest = others(canvas, block, sub, end + 16)
    bottom = closing(canvas, sub, max(end + 26, rest + 4), x)
    frame(canvas, sub, top, bottom)
    canvas.edge((x, end), (x, bottom), arrow=False)
    return bottom, x


def draw_experts(canvas: Canvas, block: Block, sub: Record, top: float) -> Leaves:
    if not sub["experts"]:
        return draw_plain(canvas, block, sub, top)
    heading(canvas, sub, top)
    host, experts, shared = sub["host"], sub["experts"], sub.get("shared")
    y, h = top + 40, 172
    router = canvas.box(Box(X0, y, 166, h), "router", "inner", 9)
    canvas.text(router.x + 12, y + 20, "router", "operation", "router")
    if sub.get("router"):
        canvas.text(router.right - 12, y + 20, sub["router"]["module"], "caption", anchor="end")
    names = ("router_logits", "router_scores", "router_margin", "expert_weights", "expert_indices")
    for index, part in enumerate(block.parts(host, names)):
        canvas.pill(part, router.x + 10, y + 29 + 27.5 * index, router.w - 20)
    width = 208.0 if shared else X1 - X0 - 166 - 34
    field = canvas.box(Box(router.right + 34, y, width, h), "mlp", "inner", 9)
    draw_field(canvas, block, sub, field)
    canvas.edge((router.right, field.cy), (field.x - 1, field.cy))
    meet = (X1 - 60, y + h + 16)
    if shared:
        canvas.edge((field.cx, field.bottom), (field.cx, meet[1]), (meet[0] - 8, meet[1]))
        draw_shared(canvas, block, sub, Box(field.right + 16, y, X1 - field.right - 16, h), meet)
    said = canvas.types(
        X0 + 2,
        meet[1] + 24,
        types_line(block, canvas.untyped(host, "shared_experts")),
        meet[0] - X0 - 10,
    )
    rest = others(canvas, block, sub, said + 12)
    bottom = (
        closing(canvas, sub, max(said + 19, rest + 14), meet[0])
        if sub.get("steps")
        else max(said + 14, rest + 2)
    )
    frame(canvas, sub, top, bottom)
    canvas.edge((meet[0], meet[1] + 8 if shared else field.bottom), (meet[0], bottom), arrow=False)
    return bottom, meet[0]


def draw_field(canvas: Canvas, block: Block, sub: Record, field: Box) -> None:
    """The routed experts: cells, then what they give."""
    experts, host = sub["experts"], sub["host"]
    canvas.text(field.x + 12, field.y + 20, "experts", "operation", "mlp")
    width = f", {experts['width']} wide" if experts.get("width") else ""
    canvas.text(
        field.right - 12,
        field.y + 20,
        f"{experts['chosen']} of {experts['count']}{width}",
        "caption",
        anchor="end",
    )
    canvas.cells(
        Box(field.x + 11, field.y + 31, field.w - 22, 74), experts["count"], experts["chosen"]
    )
    parts = block.parts(host, ("expert_outputs", "routed_output"))
    for index, part in enumerate(parts):
        canvas.pill(part, field.x + 11, field.y + 111.5 + 27.5 * index, field.w - 22)


def draw_shared(
    canvas: Canvas, block: Block, sub: Record, box: Box, meet: tuple[float, float]
) -> None:
    """The expert every token runs through, dashed, with its gate, joining the routed sum."""
    canvas.box(box, "mlp", "dashed", 9)
    canvas.text(box.x + 12, box.y + 20, "shared expert", "operation", "mlp")
    inside = block.parts("shared_experts", ("mlp_activation", "mlp_neurons", "mlp_output"))
    for index, part in enumerate(inside):
        canvas.pill(part, box.x + 10, box.y + 29 + 27.5 * index, box.w - 20)
    gate = (sub["shared"] or {}).get("gate")
    if gate:
        canvas.text(box.x + 14, box.y + 29 + 27.5 * 3 + 16, f"× {gate}", "note")
    added = block.part(sub["host"], "shared_expert_output")
    if added:
        canvas.pill(added, box.x + 8, box.y + 139, box.w - 16)
    canvas.node(*meet, "+", 8, "mlp")
    canvas.edge((meet[0], box.bottom), (meet[0], meet[1] - 8), arrow=False)


def draw_mlp(canvas: Canvas, block: Block, sub: Record, top: float) -> Leaves:
    """A dense MLP: the stream widened, the neurons, the stream again."""
    heading(canvas, sub, top)
    y, middle = top + 44, (X0 + X1) / 2
    up, down = Box(X0, y, 110, 82), Box(X1 - 110, y, 110, 82)
    canvas.under.append(funnel(up, wide="right") + funnel(down, wide="left"))
    neurons = block.parts(sub["host"], ("mlp_activation", "mlp_neurons"))
    width, first = 190.0, y + 4 + 15 * (2 - len(neurons))
    for index, part in enumerate(neurons):
        canvas.pill(part, middle - width / 2, first + 30 * index, width)
    if neurons:
        canvas.type(
            middle,
            first + 30 * len(neurons) + 10,
            block.type(*reversed(neurons)),
            room=down.x - up.right,
            anchor="middle",
        )
        stream = block.part(sub["host"], sub["output"])
        if stream:
            inner, outer = block.type(neurons[-1]).numbers[-1], block.type(stream).numbers[-1]
            canvas.text(up.cx, up.cy + 4, f"{outer} → {inner}", "caption", anchor="middle")
            canvas.text(down.cx, down.cy + 4, f"{inner} → {outer}", "caption", anchor="middle")
        canvas.edge((up.right, up.cy), (middle - width / 2 - 1, up.cy))
        canvas.edge((middle + width / 2, up.cy), (down.x - 1, up.cy))
    else:
        canvas.edge((up.right, up.cy), (down.x - 1, up.cy))
    rest = others(canvas, block, sub, y + 108)
    bottom = closing(canvas, sub, max(y + 122, rest + 10), down.right - 14)
    frame(canvas, sub, top, bottom)
    canvas.edge((down.right - 14, down.bottom - 21.4), (down.right - 14, bottom), arrow=False)
    return bottom, down.right - 14


def funnel(box: Box, wide: str) -> str:
    """A trapezium that stands for a projection to more (or fewer) dimensions."""
    inset = box.h * 0.3
    left, right = (inset, 0) if wide == "right" else (0, inset)
    return (
        f'<path class="bd-rule role-mlp" d="M{box.x:.1f} {box.y + left:.1f}L{box.right:.1f} {box.y + right:.1f}'
        f'V{box.bottom - right:.1f}L{box.x:.1f} {box.bottom - left:.1f}Z"/>'
    )


DRAW: dict[str, Callable[[Canvas, Block, Record, float], Leaves]] = {
    "attention": draw_attention,
    "recurrent": draw_recurrent,
    "convolution": draw_convolution,
    "mixer": draw_plain,
    "extra": draw_plain,
    "experts": draw_experts,
    "mlp": draw_mlp,
}
