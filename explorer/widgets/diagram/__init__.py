"""The block diagram: facts of a block in, inline SVG and HTML out. No Panel, no torch.

``block_svg`` draws one block shape; ``element`` gives the whole ``<block-diagram>`` of
a family (strip, slider, drawings, card), which works without JavaScript and comes
alive with ``assets/block-diagram.js``.
"""

from pathlib import Path

from explorer.widgets.diagram.page_element import element
from explorer.widgets.diagram.svg import LAYOUTS, block_svg

__all__ = ["ASSETS", "LAYOUTS", "block_svg", "element"]

#: The folder of ``block-diagram.js`` and ``block-diagram.css``.
ASSETS = Path(__file__).parents[1] / "assets"
