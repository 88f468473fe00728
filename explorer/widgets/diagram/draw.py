"""What the block diagram is made of: boxes, pills, edges, types, as SVG text.

Colours come from classes (``role-attention``) and custom properties, so one drawing
serves both themes; nothing carries an id, so many drawings live in one page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from explorer.widgets.diagram.block import Part, Turn, lit_cells
from explorer.widgets.diagram.types import Type, written
from explorer.widgets.palette import role_of

PILL = 23.0
NAME = 11.5
TYPE = 10.0
#: Width of one character of a monospaced face, in units of its size; the widest in use.
MONO = 0.606
#: An average character of the proportional face, for wrapping.
SANS = 0.53


def mono_width(text: str, size: float = NAME) -> float:
    return len(text) * size * MONO


def wrap(text: str, width: float, size: float = 11.5) -> list[str]:
    """``text`` in lines that fit ``width``, broken at spaces."""
    room = max(int(width / (size * SANS)), 8)
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Box:
    """A rectangle in the drawing."""

    x: float
    y: float
    w: float
    h: float

    @property
    def right(self) -> float:
        return self.x + self.w

    @property
    def bottom(self) -> float:
        return self.y + self.h

    @property
    def cx(self) -> float:
        return self.x + self.w / 2

    @property
    def cy(self) -> float:
        return self.y + self.h / 2


@dataclass
class Canvas:
    """SVG elements in drawing order. Edges go beneath, so that boxes and pills cover their ends; types above all, where they can unfold.

    ``drawn`` are the values that have a pill, by key; ``typed`` the keys of those whose type is written.
    """

    under: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    drawn: dict[str, Part] = field(default_factory=dict)
    typed: set[str] = field(default_factory=set)

    def svg(self, width: float, height: float, label: str, layout: str) -> str:
        """The whole drawing as one SVG element."""
        return (
            f'<svg class="bd-svg bd-{layout}" viewBox="0 0 {number(width)} {number(height)}" role="group"'
            f' aria-label="{escape(label)}">{"".join(self.under)}{"".join(self.over)}{"".join(self.labels)}</svg>'
        )

    def box(self, box: Box, role: str, kind: str = "box", rx: float = 13) -> Box:
        """A rounded box; ``kind`` is box, inner, dashed, norm or rule."""
        self.over.append(
            f'<rect class="bd-{kind} role-{role}" x="{number(box.x)}" y="{number(box.y)}"'
            f' width="{number(box.w)}" height="{number(box.h)}" rx="{number(rx)}"/>'
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
        """A line of text; ``kind`` is title, module, note, caption or formula. With ``width`` it is set that wide."""
        classes = f"bd-{kind}" + (f" role-{role}" if role else "")
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        place += f' textLength="{number(width)}" lengthAdjust="spacingAndGlyphs"' if width else ""
        self.over.append(
            f'<text class="{classes}" x="{number(x)}" y="{number(y)}"{place}>{escape(text)}</text>'
        )

    def title(self, x: float, y: float, title: str, module: str, role: str) -> None:
        """A sublayer's title and, after it, the module it is."""
        self.over.append(
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

    def type(
        self,
        x: float,
        y: float,
        *types: Type | tuple[str, Type],
        room: float | None = None,
        anchor: str = "start",
    ) -> None:
        """Types on a line, each optionally with a caption before it; one that takes more ``room`` than there is, in pixels, is shortened."""
        pairs = [item if isinstance(item, tuple) else ("", item) for item in types]
        leads = [
            ("  " if index else "") + (f"{caption} " if caption else "")
            for index, (caption, _) in enumerate(pairs)
        ]
        letters = float("inf") if room is None else room // (TYPE * MONO)
        spare = letters - sum(
            len(lead) + kind.longest for lead, (_, kind) in zip(leads, pairs, strict=True)
        )
        spans, short, full = [], "", ""
        for lead, (_, kind) in zip(leads, pairs, strict=True):
            most = kind.longest + spare // len(pairs)
            shown = written(kind.names, kind.dtype, most)
            short, full = short + lead + shown, full + lead + written(kind.names, kind.dtype)
            attributes = f' data-of="{escape(" ".join(kind.of))}"' + (
                f' data-dtype="{escape(kind.dtype)}"' if kind.dtype else ""
            )
            attributes += "" if room is None else f' data-room="{most:.0f}"'
            spans.append(f'{escape(lead)}<tspan class="bd-t"{attributes}>{escape(shown)}</tspan>')
            self.typed.update(kind.of)
        # In full where it is pointed at or focused: the script's work, and without one the browser's.
        cut = (
            f' bd-cut" tabindex="0" role="img" aria-label="{escape(full)}' if short != full else ""
        )
        tip = f"<title>{escape(full)}</title>" if cut else ""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.labels.append(
            f'<text class="bd-type{cut}" x="{number(x)}" y="{number(y)}"{place}>{tip}{"".join(spans)}</text>'
        )

    def type_under(self, pill: Box, kind: Type, room: float | None = None) -> None:
        """A type below its pill: as wide as that, or as the ``room`` there is."""
        self.type(pill.x + 4, pill.bottom + 12, kind, room=(room or pill.w) - 4)

    def types(
        self, x: float, y: float, types: Sequence[tuple[str, Type]], width: float, pitch: float = 14
    ) -> float:
        """Types with captions in lines that fit ``width``; returns the y of the last line."""
        line: list[tuple[str, Type]] = []
        for pair in types:
            if line and _letters(*line, pair) * TYPE * MONO > width:
                self.type(x, y, *line, room=width)
                line, y = [], y + pitch
            # A caption as long as that stands above its type.
            if _letters(pair) * TYPE * MONO > width:
                self.text(x, y, pair[0], "type")
                pair, y = ("", pair[1]), y + pitch
            line.append(pair)
        if not line:
            return y - pitch
        self.type(x, y, *line, room=width)
        return y

    def untyped(self, *hosts: str) -> list[Part]:
        """What has a pill and no type yet, of these hosts."""
        return [
            part
            for part in self.drawn.values()
            if part.host in hosts and part.key not in self.typed
        ]

    def pill(
        self,
        part: Part,
        x: float,
        y: float,
        w: float | None = None,
        *,
        bare: bool = False,
        size: float = NAME,
        text: str | None = None,
    ) -> Box:
        """A readable value. ``bare`` leaves the outline away until it is pointed at or focused; ``text`` is its name unless given."""
        text = text or part.name
        width = w or mono_width(text, size) + 20
        self.drawn[part.key] = part
        role = role_of(part.host, part.name)
        classes = (
            f"bd-part role-{role}"
            + (" bd-bare" if bare else "")
            + (" bd-derived" if part.derived else "")
        )
        small = f' font-size="{number(size)}"' if size != NAME else ""
        self.over.append(
            f'<g class="{classes}" tabindex="0" role="button" data-value="{escape(part.name)}" data-host="{escape(part.host)}"'
            f' aria-label="{escape(part.label)}">'
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(PILL)}" rx="{number(PILL / 2)}"/>'
            f'<text x="{number(x + width / 2)}" y="{number(y + 15.5)}"{small}>{escape(text)}</text></g>'
        )
        return Box(x, y, width, PILL)

    def pair(
        self, parts: Sequence[Part], x: float, y: float, w: float, gap: float = 6
    ) -> list[Box]:
        """Pills side by side, sharing the width ``w`` by the lengths of their names."""
        letters = sum(len(part.name) + 3 for part in parts) or 1
        room = w - gap * (len(parts) - 1)
        boxes = []
        for part in parts:
            share = room * (len(part.name) + 3) / letters
            boxes.append(self.pill(part, x, y, share))
            x += share + gap
        return boxes

    def path(self, d: str, kind: str = "edge", role: str = "", attrs: str = "") -> None:
        classes = f"bd-{kind}" + (f" role-{role}" if role else "")
        self.under.append(f'<path class="{classes}" d="{d}"{attrs}/>')

    def edge(
        self,
        *points: tuple[float, float],
        arrow: bool = True,
        kind: str = "edge",
        role: str = "",
        attrs: str = "",
    ) -> None:
        """A line through right angles, with rounded corners and an arrow head at its end."""
        self.path(rounded(points), kind, role, attrs)
        if arrow:
            self.head(points[-2], points[-1], role)

    def addend(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
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
        self.edge(start, *around, end, kind="addend", attrs=f' data-addend="{name}"')

    def curve(
        self, start: tuple[float, float], end: tuple[float, float], arrow: bool = False
    ) -> None:
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

    def head(self, before: tuple[float, float], tip: tuple[float, float], role: str = "") -> None:
        (x0, y0), (x, y) = before, tip
        across, down = (x > x0) - (x < x0), (y > y0) - (y < y0)
        if across:
            corners = f"M{number(x)} {number(y)}l{-7 * across} -3.6v7.2z"
        else:
            corners = f"M{number(x)} {number(y)}l-3.6 {-7 * down}h7.2z"
        classes = "bd-head" + (f" role-{role}" if role else "")
        self.under.append(f'<path class="{classes}" d="{corners}"/>')

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
        self.over.append(
            f'<g class="bd-node role-{role}"><circle cx="{number(x)}" cy="{number(y)}" r="{number(r)}"/><path d="{strokes}"/></g>'
        )

    def step(self, x: float, y: float, turn: Turn) -> None:
        """What is done to the stream itself at ``y``: a number it is multiplied with, a norm it goes through."""
        if turn.kind == "norm":
            width = mono_width(turn.description, 10.8) + 18
            self.box(Box(4, y - 12, width, 24), "norm", "onstream", 10)
            self.text(4 + width / 2, y + 4, turn.description, "normname", "norm", anchor="middle")
            return
        self.node(x, y, "×" if turn.kind == "scale" else "+", 9)
        self.text(x + 16, y + 4, turn.description, "module", "stream")

    def dot(self, x: float, y: float, r: float = 4.5) -> None:
        self.over.append(
            f'<circle class="bd-dot role-stream" cx="{number(x)}" cy="{number(y)}" r="{number(r)}"/>'
        )

    def cells(self, area: Box, count: int, chosen: int) -> float:
        """The experts as a field of cells; returns the y under its last row.

        All cells are one line of dashes per row, and the lit ones a path over it: hundreds of elements would be most of a page.
        Which are lit, the numbers in ``data-lit``, is an illustration until a token is selected.
        """
        columns, pitch = grid(count, area.w, area.h)
        side, lit = pitch * 0.76, lit_cells(count, chosen)
        left = area.x + (area.w - columns * pitch + pitch - side) / 2
        rows = [min(columns, count - first) for first in range(0, count, columns)]
        lines = "".join(
            f"M{left:.2f} {area.y + row * pitch + side / 2:.2f}h{(wide - 1) * pitch + side:.2f}"
            for row, wide in enumerate(rows)
        )
        squares = "".join(
            f"M{left + cell % columns * pitch:.2f} {area.y + cell // columns * pitch:.2f}h{side:.2f}v{side:.2f}h-{side:.2f}z"
            for cell in lit
        )
        self.over.append(
            f'<g class="bd-cells role-mlp" role="img" data-count="{count}" data-columns="{columns}" data-pitch="{pitch:.3f}"'
            f' data-left="{left:.2f}" data-top="{area.y:.2f}" data-side="{side:.2f}" data-lit="{" ".join(map(str, lit))}"'
            f' aria-label="{count} experts, {chosen} chosen for each token">'
            f'<path class="bd-every" d="{lines}" stroke-width="{side:.2f}" stroke-dasharray="{side:.3f} {pitch - side:.3f}"/>'
            f'<path class="bd-lit" d="{squares}"/></g>'
        )
        return area.y + len(rows) * pitch


def _letters(*types: tuple[str, Type]) -> int:
    """How long a line of types with captions is."""
    return sum(len(caption) + kind.longest + 3 for caption, kind in types) - 2


def grid(count: int, width: float, height: float, most: float = 17.0) -> tuple[int, float]:
    """Columns and pitch of a field of ``count`` cells that fills ``width`` by ``height``.

    Full rows are preferred to larger cells, as long as they cost at most a fifth of the size.
    """

    def pitch(columns: int) -> float:
        return min(most, width / columns, height / -(-count // columns))

    # Of fields with cells of one size, the widest.
    best = max(range(1, count + 1), key=lambda columns: (pitch(columns), columns))
    even = max(
        (columns for columns in range(1, count + 1) if count % columns == 0),
        key=lambda columns: (pitch(columns), columns),
    )
    columns = even if pitch(even) >= 0.8 * pitch(best) else best
    return columns, pitch(columns)


def rounded(points: Sequence[tuple[float, float]], radius: float = 7) -> str:
    """A path through ``points`` (axis-parallel legs) with its corners rounded."""
    d = [f"M{number(points[0][0])} {number(points[0][1])}"]
    for before, corner, after in zip(points, points[1:], points[2:]):
        reach = min(radius, leg(before, corner) / 2, leg(corner, after) / 2)
        x0, y0 = toward(corner, before, reach)
        x1, y1 = toward(corner, after, reach)
        d.append(
            f"L{number(x0)} {number(y0)}Q{number(corner[0])} {number(corner[1])} {number(x1)} {number(y1)}"
        )
    d.append(f"L{number(points[-1][0])} {number(points[-1][1])}")
    return "".join(d)


def leg(one: tuple[float, float], other: tuple[float, float]) -> float:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def toward(
    start: tuple[float, float], end: tuple[float, float], distance: float
) -> tuple[float, float]:
    whole = leg(start, end) or 1.0
    share = distance / whole
    return start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share
