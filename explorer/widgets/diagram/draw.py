"""What the block diagram is made of: boxes, pills, edges, types, as SVG text.

Colours come from classes (``role-attention``) and custom properties, so one drawing
serves both themes; nothing carries an id, so many drawings live in one page.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from explorer.widgets.diagram.description import Pill, StreamStep
from explorer.widgets.diagram.geometry import (
    MONO,
    NAME_SIZE,
    PILL,
    TYPE_SIZE,
    Box,
    Point,
    cell_grid,
    mono_width,
    number,
    rounded,
)
from explorer.widgets.diagram.types import Type, format_type

#: Radius of the node where a gate multiplies.
GATE_NODE = 7.0


@dataclass
class Canvas:
    """SVG elements in drawing order. Edges lie lowest, so that boxes and pills cover their ends; types highest, where they can unfold.

    ``drawn`` are the values that have a pill, by key; ``typed`` the keys of those whose type is written.
    """

    edges: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    drawn: dict[str, Pill] = field(default_factory=dict)
    typed: set[str] = field(default_factory=set)

    def svg(self, width: float, height: float, label: str, layout: str) -> str:
        """The whole drawing as one SVG element."""
        return (
            f'<svg class="bd-svg bd-{layout}" viewBox="0 0 {number(width)} {number(height)}" role="group"'
            f' aria-label="{escape(label)}">{"".join((*self.edges, *self.shapes, *self.labels))}</svg>'
        )

    # -- boxes and text ------------------------------------------------------------

    def box(
        self, box: Box, role: str, kind: str = "box", rx: float = 13, beneath: bool = False
    ) -> Box:
        """A rounded box of kind box, inner, dashed, norm, onstream or rule; ``beneath`` puts it under what has been drawn so far."""
        self.shapes.insert(
            0 if beneath else len(self.shapes),
            f'<rect class="bd-{kind} role-{role}" x="{number(box.x)}" y="{number(box.y)}"'
            f' width="{number(box.w)}" height="{number(box.h)}" rx="{number(rx)}"/>',
        )
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
        """A line of text of kind title, module, note, caption or formula. With ``width`` it is set that wide."""
        if not text:
            return
        classes = f"bd-{kind}" + (f" role-{role}" if role else "")
        attributes = "" if anchor == "start" else f' text-anchor="{anchor}"'
        if width:
            attributes += f' textLength="{number(width)}" lengthAdjust="spacingAndGlyphs"'
        self.shapes.append(
            f'<text class="{classes}" x="{number(x)}" y="{number(y)}"{attributes}>{escape(text)}</text>'
        )

    def title(self, x: float, y: float, title: str, module: str, role: str) -> None:
        """A sublayer's title and, after it, the module it is."""
        self.shapes.append(
            f'<text class="role-{role}" x="{number(x)}" y="{number(y)}"><tspan class="bd-title">{escape(title)}</tspan>'
            f'<tspan class="bd-module" dx="10">{escape(module)}</tspan></text>'
        )

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
        """Types on a line, each optionally with a caption before it; what takes more ``room`` than there is, in pixels, is shortened."""
        pairs = [item if isinstance(item, tuple) else ("", item) for item in types]
        captions = [
            ("  " if index else "") + (f"{caption} " if caption else "")
            for index, (caption, _) in enumerate(pairs)
        ]
        letters = float("inf") if room is None else room // (TYPE_SIZE * MONO)
        spare = letters - sum(
            len(caption) + one.max_length for caption, (_, one) in zip(captions, pairs, strict=True)
        )
        spans, short, full = [], "", ""
        for caption, (_, one) in zip(captions, pairs, strict=True):
            limit = one.max_length + spare // len(pairs)
            shown = format_type(one.names, one.dtype, limit)
            short += caption + shown
            full += caption + format_type(one.names, one.dtype)
            attributes = f' data-of="{escape(" ".join(one.of))}"'
            attributes += f' data-dtype="{escape(one.dtype)}"' if one.dtype else ""
            attributes += "" if room is None else f' data-room="{limit:.0f}"'
            spans.append(
                f'{escape(caption)}<tspan class="bd-t"{attributes}>{escape(shown)}</tspan>'
            )
            self.typed.update(one.of)
        # In full where it is pointed at or focused: by the script, and without one by the browser's tooltip.
        cut, tip = "", ""
        if short != full:
            cut = f' bd-cut" tabindex="0" role="img" aria-label="{escape(full)}'
            tip = f"<title>{escape(full)}</title>"
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.labels.append(
            f'<text class="bd-type{cut}" x="{number(x)}" y="{number(y)}"{place}>{tip}{"".join(spans)}</text>'
        )

    def type_under(self, pill: Box, shown: Type, room: float | None = None) -> None:
        """A type below its pill: as wide as that, or as the ``room`` there is."""
        self.type(pill.x + 4, pill.bottom + 12, shown, room=(room or pill.w) - 4)

    def type_if_fits(self, pill: Box, shown: Type, room: float) -> None:
        """A type below its pill where it fits; else it is left to the line of types below (`untyped`)."""
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
            # A caption as long as that stands above its type.
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
        """A readable value. ``bare`` leaves the outline away until it is pointed at or focused; ``text`` replaces its name."""
        text = text or pill.name
        width = w or mono_width(text, size) + 20
        self.drawn[pill.key] = pill
        classes = f"bd-part role-{pill.role}"
        classes += (" bd-bare" if bare else "") + (" bd-derived" if pill.read_only else "")
        small = f' font-size="{number(size)}"' if size != NAME_SIZE else ""
        self.shapes.append(
            f'<g class="{classes}" tabindex="0" role="button" data-value="{escape(pill.name)}" data-host="{escape(pill.host)}"'
            f' aria-label="{escape(pill.label)}">'
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(PILL)}" rx="{number(PILL / 2)}"/>'
            f'<text x="{number(x + width / 2)}" y="{number(y + 15.5)}"{small}>{escape(text)}</text></g>'
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

    def path(self, d: str, kind: str = "edge", role: str = "", attributes: str = "") -> None:
        classes = f"bd-{kind}" + (f" role-{role}" if role else "")
        self.edges.append(f'<path class="{classes}" d="{d}"{attributes}/>')

    def edge(
        self, *points: Point, arrow: bool = True, kind: str = "edge", attributes: str = ""
    ) -> None:
        """A line through right angles, with rounded corners and an arrow head at its end."""
        self.path(rounded(points), kind, attributes=attributes)
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
        """A result on its way from ``start`` back to the stream at ``end``; live marks know it by ``name``.

        It takes a ``lane`` past the boxes below its own; one without goes straight down, over the lines it has ``crossed``.
        """
        (x, top), (_, y) = start, end
        around = ((x, y),) if lane is None else ((x, top + 12), (lane, top + 12), (lane, y))
        for other in crossed if lane is None else ():
            self.path(f"M{number(x)} {number(other - 6)}v12", "bridge")
        self.edge(start, *around, end, kind="addend", attributes=f' data-addend="{escape(name)}"')

    def curve(self, start: Point, end: Point, arrow: bool = False) -> None:
        """A soft curve from left to right, or from top to bottom where that is the longer way."""
        (x0, y0), (x1, y1) = start, end
        if abs(x1 - x0) >= 8 and abs(x1 - x0) * 3 >= abs(y1 - y0):
            bend = (x1 - x0) * 0.62
            controls = f"{number(x0 + bend)} {number(y0)} {number(x1 - bend)} {number(y1)}"
            before = (x1 - 1, y1)
        else:
            bend = (y1 - y0) * 0.62
            controls = f"{number(x0)} {number(y0 + bend)} {number(x1)} {number(y1 - bend)}"
            before = (x1, y1 - 1)
        self.path(f"M{number(x0)} {number(y0)}C{controls} {number(x1)} {number(y1)}")
        if arrow:
            self.head(before, end)

    def head(self, before: Point, tip: Point, role: str = "") -> None:
        """An arrow head at ``tip``, of a line that comes from ``before``."""
        (x0, y0), (x, y) = before, tip
        across, down = (x > x0) - (x < x0), (y > y0) - (y < y0)
        corners = f"l{-7 * across} -3.6v7.2z" if across else f"l-3.6 {-7 * down}h7.2z"
        classes = "bd-head" + (f" role-{role}" if role else "")
        self.edges.append(f'<path class="{classes}" d="M{number(x)} {number(y)}{corners}"/>')

    def stream(self, x: float, top: float, bottom: float) -> None:
        """The residual stream, beneath everything."""
        self.edges.insert(
            0, f'<path class="bd-stream role-stream" d="M{number(x)} {number(top)}V{bottom:.1f}"/>'
        )

    # -- signs ---------------------------------------------------------------------

    def node(self, x: float, y: float, sign: str, r: float = 10, role: str = "stream") -> None:
        """A circle where two tensors meet: ``+`` or ``×``."""
        a = r * 0.45
        if sign == "+":
            strokes = f"M{number(x - a)} {number(y)}h{number(2 * a)}M{number(x)} {number(y - a)}v{number(2 * a)}"
        else:
            b = a * 0.8
            strokes = (
                f"M{number(x - b)} {number(y - b)}l{number(2 * b)} {number(2 * b)}"
                f"M{number(x + b)} {number(y - b)}l{number(-2 * b)} {number(2 * b)}"
            )
        self.shapes.append(
            f'<g class="bd-node role-{role}"><circle cx="{number(x)}" cy="{number(y)}" r="{number(r)}"/><path d="{strokes}"/></g>'
        )

    def gate(self, factor: Box, x: float, top: float, role: str) -> float:
        """A gate's pill multiplying what comes down from ``top`` at ``x``, on either side of it; returns the bottom of the ×."""
        side, into = (
            (factor.right, x - GATE_NODE) if factor.right < x else (factor.x, x + GATE_NODE)
        )
        self.edge((side, factor.cy), (into, factor.cy))
        self.edge((x, top), (x, factor.cy - GATE_NODE))
        self.node(x, factor.cy, "×", GATE_NODE, role)
        return factor.cy + GATE_NODE

    def step(self, x: float, y: float, step: StreamStep) -> None:
        """What is done to the stream itself at ``y``: a number it is multiplied with, a norm it goes through."""
        if step.kind == "norm":
            width = mono_width(step.text, 10.8) + 18
            self.box(Box(4, y - 12, width, 24), "norm", "onstream", 10)
            self.text(4 + width / 2, y + 4, step.text, "normname", "norm", anchor="middle")
            return
        self.node(x, y, "×" if step.kind == "scale" else "+", 9)
        self.text(x + 16, y + 4, step.text, "module", "stream")

    def dot(self, x: float, y: float, r: float = 4.5) -> None:
        """A named point of the stream."""
        self.shapes.append(
            f'<circle class="bd-dot role-stream" cx="{number(x)}" cy="{number(y)}" r="{number(r)}"/>'
        )

    def funnel(self, box: Box, wide: str) -> None:
        """A trapezium that stands for a projection to more dimensions (``wide`` right) or fewer (left)."""
        inset = box.h * 0.3
        left, right = (inset, 0) if wide == "right" else (0, inset)
        self.edges.append(
            f'<path class="bd-rule role-mlp" d="M{box.x:.1f} {box.y + left:.1f}L{box.right:.1f} {box.y + right:.1f}'
            f'V{box.bottom - right:.1f}L{box.x:.1f} {box.bottom - left:.1f}Z"/>'
        )

    def cells(self, area: Box, count: int, chosen: int) -> float:
        """The experts as a field of cells; returns the y under its last row.

        All cells are one line of dashes per row, and the lit ones a path over it: hundreds of elements would be most of a page.
        Which are lit, the numbers in ``data-lit``, is an illustration until a token is selected.
        """
        columns, pitch = cell_grid(count, area.w, area.h)
        side, lit = pitch * 0.76, lit_cells(count, chosen)
        left = area.x + (area.w - columns * pitch + pitch - side) / 2
        rows = [min(columns, count - first) for first in range(0, count, columns)]
        lines = "".join(
            f"M{left:.2f} {area.y + row * pitch + side / 2:.2f}h{(length - 1) * pitch + side:.2f}"
            for row, length in enumerate(rows)
        )
        squares = "".join(
            f"M{left + cell % columns * pitch:.2f} {area.y + cell // columns * pitch:.2f}h{side:.2f}v{side:.2f}h-{side:.2f}z"
            for cell in lit
        )
        self.shapes.append(
            f'<g class="bd-cells role-mlp" role="img" data-count="{count}" data-columns="{columns}" data-pitch="{pitch:.3f}"'
            f' data-left="{left:.2f}" data-top="{area.y:.2f}" data-side="{side:.2f}" data-lit="{" ".join(map(str, lit))}"'
            f' aria-label="{count} experts, {chosen} chosen for each token">'
            f'<path class="bd-every" d="{lines}" stroke-width="{side:.2f}" stroke-dasharray="{side:.3f} {pitch - side:.3f}"/>'
            f'<path class="bd-lit" d="{squares}"/></g>'
        )
        return area.y + len(rows) * pitch


def _type_line_width(*types: tuple[str, Type]) -> float:
    """Width of a line of types with captions, in pixels."""
    letters = sum(len(caption) + one.max_length + 3 for caption, one in types) - 2
    return letters * TYPE_SIZE * MONO


def lit_cells(count: int, chosen: int) -> list[int]:
    """Cells of the field that stand for the chosen experts where no token is selected: scattered, always the same."""
    return sorted(random.Random(count).sample(range(count), min(chosen, count)))
