"""What the block diagram is made of: boxes, pills, edges, types, as SVG text.

Colours come from classes (``role-attention``) and custom properties, so one drawing
serves both themes; no element has an id, so one page can have many drawings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from explorer.widgets.diagram.cells import expert_cells
from explorer.widgets.diagram.description import Pill, StreamStep
from explorer.widgets.diagram.geometry import (
    MONO,
    NAME_SIZE,
    PILL,
    TYPE_SIZE,
    Box,
    Point,
    mono_width,
    number,
    rounded,
)
from explorer.widgets.diagram.markup import classes, tag
from explorer.widgets.diagram.types import Type, format_type

#: Radius of the node where a gate multiplies.
GATE_NODE = 7.0


@dataclass
class Canvas:
    """SVG elements in drawing order.

    ``edges`` lie lowest, so that boxes and pills cover their ends; ``labels``, the types, lie
    highest, where they can unfold. ``drawn`` are the values that have a pill, by key; ``typed``
    the keys of those whose type is written.
    """

    edges: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    drawn: dict[str, Pill] = field(default_factory=dict)
    typed: set[str] = field(default_factory=set)

    def svg(self, width: float, height: float, label: str, layout: str) -> str:
        """The whole drawing as one SVG element."""
        return tag(
            "svg",
            *self.edges,
            *self.shapes,
            *self.labels,
            class_=f"bd-svg bd-{layout}",
            viewBox=f"0 0 {number(width)} {number(height)}",
            role="group",
            aria_label=label,
        )

    # -- boxes and text ------------------------------------------------------------

    def box(
        self, box: Box, role: str, kind: str = "box", rx: float = 13, beneath: bool = False
    ) -> Box:
        """A rounded box of kind box, inner, dashed, norm, onstream or rule.

        ``beneath`` puts it under what has been drawn so far.
        """
        rect = tag(
            "rect", class_=classes(kind, role), x=box.x, y=box.y, width=box.w, height=box.h, rx=rx
        )
        self.shapes.insert(0 if beneath else len(self.shapes), rect)
        return box

    def text(
        self,
        x: float,
        y: float,
        text: str,
        kind: str,
        role: str = "",
        anchor: str = "start",
        width: float | None = None,
    ) -> None:
        """A line of text of kind note, caption, formula, operation, module, type or normname.

        With ``width`` it is set that wide.
        """
        if not text:
            return
        self.shapes.append(
            tag(
                "text",
                escape(text),
                class_=classes(kind, role),
                x=x,
                y=y,
                text_anchor=None if anchor == "start" else anchor,
                textLength=width,
                lengthAdjust="spacingAndGlyphs" if width else None,
            )
        )

    def title(self, x: float, y: float, title: str, module: str, role: str) -> None:
        """A sublayer's title and, after it, the module it is."""
        spans = (
            tag("tspan", escape(title), class_="bd-title"),
            tag("tspan", escape(module), class_="bd-module", dx=10),
        )
        self.shapes.append(tag("text", *spans, class_=f"role-{role}", x=x, y=y))

    def lines(
        self,
        x: float,
        y: float,
        lines: Sequence[str],
        kind: str,
        pitch: float = 16,
        anchor: str = "start",
    ) -> float:
        """Lines of text under each other; returns the y of the line after them."""
        for index, line in enumerate(lines):
            self.text(x, y + index * pitch, line, kind, anchor=anchor)
        return y + len(lines) * pitch

    # -- types ---------------------------------------------------------------------

    def type(
        self,
        x: float,
        y: float,
        *types: Type | tuple[str, Type],
        room: float | None = None,
        anchor: str = "start",
    ) -> None:
        """Types on a line, each optionally with a caption before it.

        What takes more ``room`` than there is, in pixels, is shortened.
        """
        pairs = [item if isinstance(item, tuple) else ("", item) for item in types]
        captions = [
            ("  " if index else "") + (f"{caption} " if caption else "")
            for index, (caption, _) in enumerate(pairs)
        ]
        letters = float("inf") if room is None else room // (TYPE_SIZE * MONO)
        used = sum(len(text) for text in captions) + sum(one.max_length for _, one in pairs)
        spare = (letters - used) // len(pairs)
        spans, short, full = [], "", ""
        for caption, (_, one) in zip(captions, pairs, strict=True):
            limit = one.max_length + spare
            shown = format_type(one.names, one.dtype, limit)
            short += caption + shown
            full += caption + format_type(one.names, one.dtype)
            span = tag(
                "tspan",
                escape(shown),
                class_="bd-t",
                data_of=" ".join(one.of),
                data_dtype=one.dtype or None,
                data_room=None if room is None else f"{limit:.0f}",
            )
            spans.append(escape(caption) + span)
            self.typed.update(one.of)
        # In full where it is pointed at or focused: by the script, else by the browser's tooltip.
        cut = short != full
        self.labels.append(
            tag(
                "text",
                tag("title", escape(full)) if cut else "",
                *spans,
                class_="bd-type bd-cut" if cut else "bd-type",
                tabindex="0" if cut else None,
                role="img" if cut else None,
                aria_label=full if cut else None,
                x=x,
                y=y,
                text_anchor=None if anchor == "start" else anchor,
            )
        )

    def type_under(self, pill: Box, shown: Type, room: float | None = None) -> None:
        """A type below its pill: as wide as that, or as the ``room`` there is."""
        self.type(pill.x + 4, pill.bottom + 12, shown, room=(room or pill.w) - 4)

    def type_if_fits(self, pill: Box, shown: Type, room: float) -> None:
        """A type below its pill where it fits; else it is left to a line of types (`untyped`)."""
        if shown.max_length * TYPE_SIZE * MONO <= room - 4:
            self.type_under(pill, shown, room)

    def types(
        self, x: float, y: float, types: Sequence[tuple[str, Type]], width: float, pitch: float = 14
    ) -> float:
        """Types with captions in lines that fit ``width``; returns the y of the last line."""
        line: list[tuple[str, Type]] = []
        for pair in types:
            if line and _type_line_width(*line, pair) > width:
                self.type(x, y, *line, room=width)
                line, y = [], y + pitch
            # A caption as long as that goes above its type.
            if _type_line_width(pair) > width:
                self.text(x, y, pair[0], "type")
                pair, y = ("", pair[1]), y + pitch
            line.append(pair)
        if not line:
            return y - pitch
        self.type(x, y, *line, room=width)
        return y

    def untyped(self, *hosts: str) -> list[Pill]:
        """The values of these hosts that have a pill and no type yet."""
        return [
            pill
            for pill in self.drawn.values()
            if pill.host in hosts and pill.key not in self.typed
        ]

    # -- pills ---------------------------------------------------------------------

    def pill(
        self,
        pill: Pill,
        x: float,
        y: float,
        w: float | None = None,
        *,
        bare: bool = False,
        size: float = NAME_SIZE,
        text: str | None = None,
    ) -> Box:
        """A readable value.

        ``bare`` leaves the outline away until it is pointed at or focused; ``text`` replaces its
        name.
        """
        text = text or pill.name
        width = w or mono_width(text, size) + 20
        self.drawn[pill.key] = pill
        kind = classes("part", pill.role)
        kind += (" bd-bare" if bare else "") + (" bd-derived" if pill.read_only else "")
        font = size if size != NAME_SIZE else None
        self.shapes.append(
            tag(
                "g",
                tag("rect", x=x, y=y, width=width, height=PILL, rx=PILL / 2),
                tag("text", escape(text), x=x + width / 2, y=y + 15.5, font_size=font),
                class_=kind,
                tabindex="0",
                role="button",
                data_value=pill.name,
                data_host=pill.host,
                aria_label=pill.label,
            )
        )
        return Box(x, y, width, PILL)

    def typed_pill(
        self, pill: Pill, x: float, y: float, w: float | None = None, room: float | None = None
    ) -> Box:
        """A readable value with its type below it, as `type_under` writes it."""
        box = self.pill(pill, x, y, w)
        self.type_under(box, pill.type, room)
        return box

    def stream_pill(self, pill: Pill, x: float, y: float, text: str | None = None) -> Box:
        """A value on the stream: a name without an outline."""
        width = mono_width(text or pill.name, 12) + 14
        return self.pill(pill, x, y, width, bare=True, size=12, text=text)

    def pills(
        self, pills: Sequence[Pill], x: float, y: float, w: float, gap: float = 6
    ) -> list[Box]:
        """Pills side by side, sharing the width ``w`` by the lengths of their names."""
        letters = sum(len(pill.name) + 3 for pill in pills) or 1
        room = w - gap * (len(pills) - 1)
        boxes = []
        for pill in pills:
            share = room * (len(pill.name) + 3) / letters
            boxes.append(self.pill(pill, x, y, share))
            x += share + gap
        return boxes

    # -- lines ---------------------------------------------------------------------

    def path(self, d: str, kind: str = "edge", role: str = "", addend: str | None = None) -> None:
        self.edges.append(tag("path", class_=classes(kind, role), d=d, data_addend=addend))

    def edge(
        self, *points: Point, arrow: bool = True, kind: str = "edge", addend: str | None = None
    ) -> None:
        """A line through right angles, with rounded corners and an arrow head at its end."""
        self.path(rounded(points), kind, addend=addend)
        if arrow:
            self.head(points[-2], points[-1])

    def addend(
        self,
        start: Point,
        end: Point,
        name: str,
        lane: float | None = None,
        crossed: Sequence[float] = (),
    ) -> None:
        """A result's way from ``start`` back to the stream at ``end``; live marks use ``name``.

        It takes a ``lane`` past the boxes below its own; one without goes straight down, over the
        lines it has ``crossed``.
        """
        (x, top), (_, y) = start, end
        around = ((x, y),) if lane is None else ((x, top + 12), (lane, top + 12), (lane, y))
        for other in crossed if lane is None else ():
            self.path(f"M{number(x)} {number(other - 6)}v12", "bridge")
        self.edge(start, *around, end, kind="addend", addend=name)

    def curve(self, start: Point, end: Point, arrow: bool = False) -> None:
        """A soft curve from left to right."""
        (x0, y0), (x1, y1) = start, end
        bend = (x1 - x0) * 0.62
        controls = f"{number(x0 + bend)} {number(y0)} {number(x1 - bend)} {number(y1)}"
        self.path(f"M{number(x0)} {number(y0)}C{controls} {number(x1)} {number(y1)}")
        if arrow:
            self.head((x1 - 1, y1), end)

    def head(self, before: Point, tip: Point, role: str = "") -> None:
        """An arrow head at ``tip``, of a line that comes from ``before``."""
        (x0, y0), (x, y) = before, tip
        across, down = (x > x0) - (x < x0), (y > y0) - (y < y0)
        corners = f"l{-7 * across} -3.6v7.2z" if across else f"l-3.6 {-7 * down}h7.2z"
        self.path(f"M{number(x)} {number(y)}{corners}", "head", role)

    def stream(self, x: float, top: float, bottom: float) -> None:
        """The residual stream, beneath everything."""
        d = f"M{number(x)} {number(top)}V{number(bottom)}"
        self.edges.insert(0, tag("path", class_=classes("stream", "stream"), d=d))

    # -- signs ---------------------------------------------------------------------

    def node(self, x: float, y: float, sign: str, r: float = 10, role: str = "stream") -> None:
        """A circle where two tensors meet: ``+`` or ``×``."""
        if sign == "+":
            a = r * 0.45
            across = f"M{number(x - a)} {number(y)}h{number(2 * a)}"
            strokes = f"{across}M{number(x)} {number(y - a)}v{number(2 * a)}"
        else:
            a = r * 0.36
            left, length = number(x - a), number(2 * a)
            falling = f"M{left} {number(y - a)}l{length} {length}"
            strokes = f"{falling}M{left} {number(y + a)}l{length} -{length}"
        circle = tag("circle", cx=x, cy=y, r=r)
        self.shapes.append(tag("g", circle, tag("path", d=strokes), class_=classes("node", role)))

    def gate(self, factor: Box, x: float, top: float, role: str) -> float:
        """A gate's pill multiplying what comes down from ``top`` at ``x``, on either side of it.

        Returns the bottom of the ×.
        """
        side, into = (
            (factor.right, x - GATE_NODE) if factor.right < x else (factor.x, x + GATE_NODE)
        )
        self.edge((side, factor.cy), (into, factor.cy))
        self.edge((x, top), (x, factor.cy - GATE_NODE))
        self.node(x, factor.cy, "×", GATE_NODE, role)
        return factor.cy + GATE_NODE

    def step(self, x: float, y: float, step: StreamStep) -> None:
        """What is done to the stream itself at ``y``: a scale, a shift or a norm."""
        if step.kind == "norm":
            width = mono_width(step.text, 10.8) + 18
            self.box(Box(4, y - 12, width, 24), "norm", "onstream", 10)
            self.text(4 + width / 2, y + 4, step.text, "normname", "norm", anchor="middle")
            return
        self.node(x, y, "×" if step.kind == "scale" else "+", 9)
        self.text(x + 16, y + 4, step.text, "module", "stream")

    def dot(self, x: float, y: float, r: float = 4.5) -> None:
        """A named point of the stream."""
        self.shapes.append(tag("circle", class_=classes("dot", "stream"), cx=x, cy=y, r=r))

    def funnel(self, box: Box, wide: str) -> None:
        """A trapezium for a projection to more dimensions (``wide`` right) or fewer
        (left).
        """
        inset = box.h * 0.3
        left, right = (inset, 0) if wide == "right" else (0, inset)
        x, end = number(box.x), number(box.right)
        upper = f"M{x} {number(box.y + left)}L{end} {number(box.y + right)}"
        lower = f"V{number(box.bottom - right)}L{x} {number(box.bottom - left)}Z"
        self.path(upper + lower, "rule", "mlp")

    def cells(self, area: Box, count: int, chosen: int) -> float:
        """The experts as a field of cells; returns the y under its last row."""
        markup, bottom = expert_cells(area, count, chosen)
        self.shapes.append(markup)
        return bottom


def _type_line_width(*types: tuple[str, Type]) -> float:
    """Width of a line of types with captions, in pixels."""
    letters = sum(len(caption) + one.max_length + 3 for caption, one in types) - 2
    return letters * TYPE_SIZE * MONO
