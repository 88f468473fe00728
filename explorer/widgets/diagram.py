"""The block diagram: facts of a block in, one inline SVG out. No Panel, no torch.

``block_svg`` draws one block shape; ``element`` gives the whole ``<block-diagram>`` of
a family (strip, slider, drawings, card), which works without JavaScript and comes
alive with ``assets/block-diagram.js``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from explorer.widgets import diagram_element, diagram_narrow, diagram_wide
from explorer.widgets.diagram_block import Block, Record, shapes
from explorer.widgets.diagram_draw import PILL, Box, Canvas, mono_width

__all__ = ["ASSETS", "LAYOUTS", "block_svg", "element"]

#: Where ``block-diagram.js`` and ``block-diagram.css`` are.
ASSETS = Path(__file__).with_name("assets")

LAYOUTS = ("wide", "narrow")

#: Names of the values on the stream, by where they stand.
_ENTERS, _BETWEEN, _LEAVES = "layer_input", "layer_mid", "layer_output"


def block_svg(record: Record, shape: int = 0, layout: str = "wide") -> str:
    """The diagram of the ``shape``-th distinct block of a facts record, as SVG.

    ``layout`` is ``wide`` (boxes branch right) or ``narrow`` (boxes stack, the stream
    stays). Raises ValueError for another one and IndexError for a shape the record lacks.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"There is no layout {layout!r}; there are {' and '.join(LAYOUTS)}.")
    block = shapes(record)[shape]
    canvas = Canvas()
    width, height = (_wide if layout == "wide" else diagram_narrow.draw)(canvas, block)
    return canvas.svg(width, height, f"Block {block.first}: {block.title()}", layout)


def element(records: Sequence[Record], *, card: bool = True, strip: bool = True) -> str:
    """HTML of a family's ``<block-diagram>``: one record per checkpoint, the first is shown.

    ``card`` and ``strip`` leave out what a surface shows in its own way.
    """
    return diagram_element.element(records, block_svg, card=card, strip=strip)


STREAM = 24.0
NORM_X, NORM_W = 48.0, 162.0


def _wide(canvas: Canvas, block: Block) -> tuple[float, float]:
    top, join = 8.0, 0.0
    _mark(canvas, block, _ENTERS, 16, with_type=True)
    for index, sub in enumerate(block.sublayers):
        draw = diagram_wide.DRAW.get(sub["role"], diagram_wide.draw_mlp)
        bottom, leaves = draw(canvas, block, sub, top)
        # Beside the first box the stream's label has two lines, so its norm hangs lower.
        entry = _enter(canvas, block, sub, top + (56 if index == 0 else 42))
        join = max(bottom + 22, entry + 26)
        _join(canvas, block, sub, (leaves, bottom), join)
        if index + 1 < len(block.sublayers):
            _mark(canvas, block, _BETWEEN, join + 34)
        top = bottom + 40
    end = join + 42
    _mark(canvas, block, _LEAVES, end - 8)
    canvas.under.insert(0, f'<path class="bd-stream role-stream" d="M{STREAM} 16V{end + 8:.1f}"/>')
    return 864.0, end + 16


def _mark(canvas: Canvas, block: Block, name: str, y: float, with_type: bool = False) -> None:
    """A named point of the stream."""
    part = block.part("layers", name)
    canvas.dot(STREAM, y)
    if part:
        canvas.pill(part, STREAM + 10, y - PILL / 2, mono_width(name, 12) + 14, bare=True, size=12)
        if with_type:
            canvas.type(STREAM + 17, y + 22, block.type(part, with_dtype=True))


def _enter(canvas: Canvas, block: Block, sub: Record, y: float) -> float:
    """From the stream through the norm into the sublayer; returns the y below what was drawn."""
    norm, box = sub.get("norm"), Box(NORM_X, y, NORM_W, 52)
    into = diagram_wide.LEFT - 1
    called_with = block.part("layers", "mlp_input") if sub["host"] == "mlp" else None
    if not norm:
        canvas.edge((STREAM, box.cy), (into, box.cy))
        return box.cy
    canvas.edge((STREAM, box.cy), (box.x - 1, box.cy))
    canvas.box(box, "norm", "norm", 10)
    canvas.text(box.cx, y + 18, norm["module"], "normname", "norm", anchor="middle")
    part = block.part("layers", norm["value"]) if norm.get("value") else None
    if part:
        canvas.pill(part, box.x + 6, y + 25, box.w - 12, size=10.5)
    if not called_with:
        canvas.edge((box.right, box.cy), (into, box.cy))
        if part:
            canvas.type(box.x + 4, box.bottom + 13, block.type(part))
        return box.bottom + 16
    pill = canvas.pill(called_with, box.cx - 48, box.bottom + 30, 96)
    canvas.type(box.cx + 8, box.bottom + 18, block.type(called_with))
    canvas.edge((box.cx, box.bottom), (box.cx, pill.y - 1))
    canvas.edge((pill.right, pill.cy), (into, pill.cy))
    return pill.bottom


def _join(canvas: Canvas, block: Block, sub: Record, start: tuple[float, float], y: float) -> None:
    """The addend on its way back to the stream, and the ⊕ where it is added."""
    part = block.part(sub["host"], sub["output"])
    name = sub["output"]
    canvas.edge(start, (start[0], y), (STREAM + 12, y), kind="addend", attrs=f' data-addend="{block.addend(sub)}"')
    if part:
        width = mono_width(name, 12) + 14
        canvas.pill(part, NORM_X + 6, y - PILL - 1, width, bare=True, size=12)
        canvas.type(NORM_X + 13, y + 14, block.type(part, with_dtype=True))
    canvas.node(STREAM, y, "+", 11)
