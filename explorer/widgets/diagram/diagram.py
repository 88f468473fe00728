"""The block diagram: facts of a block in, one inline SVG out. No Panel, no torch.

``block_svg`` draws one block shape; ``element`` gives the whole ``<block-diagram>`` of
a family (strip, slider, drawings, card), which works without JavaScript and comes
alive with ``assets/block-diagram.js``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from explorer.widgets.diagram import element as diagram_element
from explorer.widgets.diagram import narrow as diagram_narrow
from explorer.widgets.diagram import wide as diagram_wide
from explorer.widgets.diagram.block import Record, shapes
from explorer.widgets.diagram.draw import Canvas

__all__ = ["ASSETS", "LAYOUTS", "block_svg", "element"]

#: Where ``block-diagram.js`` and ``block-diagram.css`` are.
ASSETS = Path(__file__).parents[1] / "assets"

LAYOUTS = ("wide", "narrow")


def block_svg(record: Record, shape: int = 0, layout: str = "wide") -> str:
    """The diagram of the ``shape``-th distinct block of a facts record, as SVG.

    ``layout`` is ``wide`` (boxes branch right) or ``narrow`` (boxes stack, the stream
    stays). Raises ValueError for another one and IndexError for a shape the record lacks.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"There is no layout {layout!r}; there are {' and '.join(LAYOUTS)}.")
    block = shapes(record)[shape]
    canvas = Canvas()
    width, height = (diagram_wide if layout == "wide" else diagram_narrow).draw(canvas, block)
    return canvas.svg(width, height, f"Block {block.first}: {block.title()}", layout)


def element(records: Sequence[Record], *, card: bool = True, strip: bool = True) -> str:
    """HTML of a family's ``<block-diagram>``: one record per checkpoint, the first is shown.

    ``card`` and ``strip`` leave out what a surface shows in its own way.
    """
    return diagram_element.element(records, block_svg, card=card, strip=strip)
