"""One block as an inline SVG."""

from __future__ import annotations

from explorer.widgets.diagram import narrow, wide
from explorer.widgets.diagram.describe import Record, describe
from explorer.widgets.diagram.description import Block
from explorer.widgets.diagram.draw import Canvas

_DRAW = {"wide": wide.draw, "narrow": narrow.draw}
LAYOUTS = tuple(_DRAW)


def block_svg(record: Record, shape: int = 0, layout: str = "wide") -> str:
    """The diagram of the ``shape``-th distinct block of a facts record, as SVG.

    ``layout`` is ``wide`` (boxes branch right) or ``narrow`` (boxes stack, the stream
    stays). Raises ValueError for another one and IndexError for a shape the record lacks.
    """
    if layout not in _DRAW:
        raise ValueError(f"There is no layout {layout!r}; there are {' and '.join(LAYOUTS)}.")
    return draw(describe(record)[shape], layout)


def draw(block: Block, layout: str) -> str:
    """One described block as SVG."""
    canvas = Canvas()
    width, height = _DRAW[layout](canvas, block)
    return canvas.svg(width, height, f"Block {block.first}: {block.title}", layout)
