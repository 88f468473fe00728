"""What a view returns: plain descriptions of pictures, without a drawing library.

A view is a pure function from (recording, selection) to one of the classes here:
a `Heatmap`, a `Mosaic` of small heatmaps, `Curves` over the tokens, or a `Refusal`
that says in one sentence why there is nothing to draw. `picture` and
`mosaic_picture` turn the first two into bytes of palette indexes, reduced to the
cells that fit, with the reduction named and the scale in numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from explorer.widgets.views.downsample import (
    EMPTY,
    FURTHEST,
    MAXIMUM,
    Scale,
    Window,
    cells_in_window,
    hide_future,
    quantised,
    reduction_text,
    scale_of,
)

#: The most cells a side of one picture is sent with: what a panel shows, and at
#: one byte a cell well below a megabyte a message.
CELLS = 640

#: The most cells a side of one tile of a mosaic.
TILE_CELLS = 72


#: Cells in view beyond which outlines would hide what they outline.
MARKED_ROWS, MARKED_COLUMNS = 64, 160


@dataclass(frozen=True)
class Axis:
    """One axis of a picture: what it counts and what its steps are called."""

    title: str
    labels: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.labels)


class ScaleOptions(TypedDict, total=False):
    """The options of `Heatmap` and `Mosaic` that decide their scale."""

    signed: bool
    low: float | None
    high: float | None
    clip: float | None


@dataclass(frozen=True)
class Refusal:
    """Nothing to draw, and the sentence that says why."""

    reason: str


@dataclass(frozen=True)
class Heatmap:
    """A matrix to draw: ``values[y, x]``, row 0 on top. NaN and minus infinity are drawn empty.

    ``signed`` chooses the map that is centred on zero. ``low`` and ``high`` fix the scale
    where the quantity has bounds of its own (a probability); otherwise it is taken
    from the numbers, up to their percentile ``clip`` where that is given. ``marks`` are
    cells ``(x, y)`` to outline. ``note`` is one sentence a reader needs to
    understand the picture.
    """

    title: str
    x: Axis
    y: Axis
    values: np.ndarray
    signed: bool = False
    low: float | None = None
    high: float | None = None
    clip: float | None = None
    reduction: str = ""
    marks: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int32))
    note: str = ""

    @property
    def reduction_name(self) -> str:
        """Which of its cells a reduced cell shows."""
        return self.reduction or (FURTHEST if self.signed else MAXIMUM)


@dataclass(frozen=True)
class Tile:
    """One small picture of a mosaic; ``group`` names what it shares with its row."""

    label: str
    group: str
    values: np.ndarray


@dataclass(frozen=True)
class Mosaic:
    """Small heatmaps in a grid of ``columns``, all on one scale.

    ``patterns`` says that the tiles are causal patterns: what lies above the
    diagonal is drawn empty; the tiles themselves stay views of what was recorded.
    """

    title: str
    tiles: tuple[Tile, ...]
    columns: int
    patterns: bool = True
    signed: bool = False
    low: float | None = None
    high: float | None = None
    clip: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """One line over the tokens."""

    label: str
    values: np.ndarray
    role: str = "ink"


@dataclass(frozen=True)
class Curves:
    """Lines over the tokens on one axis of numbers."""

    title: str
    x: Axis
    unit: str
    lines: tuple[Curve, ...]
    note: str = ""

    @property
    def bounds(self) -> tuple[float, float]:
        """Ends of the axis of numbers: the numbers with a margin, zero included where nothing is
        negative.
        """
        values = np.concatenate([line.values for line in self.lines])
        values = values[np.isfinite(values)]
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
        low = min(low, 0.0)
        margin = 0.05 * (high - low) or 0.5
        return (low - margin if low < 0 else low), high + margin


@dataclass(frozen=True)
class Picture:
    """Palette indexes ``[rows, columns]`` (uint8, row 0 on top) and where they lie on the axes.

    ``left, top, wide, high`` are in cells of the full matrix, so that a picture of a
    window lands where its cells are.
    """

    indexes: np.ndarray
    left: float
    top: float
    wide: float
    high: float
    scale: Scale
    reduction: str


def picture(heatmap: Heatmap, window: Window | None = None, cells: int = CELLS) -> Picture:
    """The cells of ``heatmap`` inside ``window`` (everything when None), at most ``cells`` a side.

    The scale is that of the whole matrix, so that zooming never changes a colour.
    """
    scale = scale_of(heatmap.values, heatmap.signed, heatmap.low, heatmap.high, heatmap.clip)
    part, box, factors = cells_in_window(heatmap.values, window, cells, heatmap.reduction_name)
    return Picture(
        indexes=quantised(part, scale),
        left=box.left,
        top=box.top,
        # A last block that is not full is drawn at full size: cells stay where they are.
        wide=part.shape[1] * factors[1],
        high=part.shape[0] * factors[0],
        scale=scale,
        reduction=reduction_text(factors, heatmap.reduction_name),
    )


def marks_in(
    heatmap: Heatmap, drawn: Picture, rows: int = MARKED_ROWS, columns: int = MARKED_COLUMNS
) -> np.ndarray:
    """The outlines to draw over a picture: those in view, none where cells are too small to have
    one.
    """
    if drawn.high > rows or drawn.wide > columns:
        return heatmap.marks[:0]
    x, y = heatmap.marks[:, 0], heatmap.marks[:, 1]
    inside = (
        (x >= drawn.left)
        & (x < drawn.left + drawn.wide)
        & (y >= drawn.top)
        & (y < drawn.top + drawn.high)
    )
    return heatmap.marks[inside]


@dataclass(frozen=True)
class MosaicPicture:
    """One image of all tiles, and where each tile lies in it, in cells."""

    indexes: np.ndarray
    boxes: tuple[Window, ...]
    scale: Scale
    reduction: str

    def tile_at(self, x: float, y: float) -> int | None:
        """The number of the tile at a point of the image, None between tiles."""
        for number, box in enumerate(self.boxes):
            if box.left <= x < box.right and box.top <= y < box.bottom:
                return number
        return None


#: Cells left free between tiles, and above each for its label.
GAP, LABEL = 4, 12


def mosaic_picture(mosaic: Mosaic, cells: int = TILE_CELLS) -> MosaicPicture:
    """All tiles of ``mosaic`` as one image, each reduced to at most ``cells`` a side.

    Small tiles are enlarged by whole factors, so that four tokens are as visible as four hundred.
    """
    extreme = FURTHEST if mosaic.signed else MAXIMUM
    small = [
        cells_in_window(
            hide_future(tile.values) if mosaic.patterns else tile.values, None, cells, extreme
        )
        for tile in mosaic.tiles
    ]
    # Every reduction in use keeps the extremes, so the scale of what is drawn is the scale of all.
    shown = np.concatenate([part.ravel() for part, _, _ in small])
    scale = scale_of(shown, mosaic.signed, mosaic.low, mosaic.high, mosaic.clip)
    factors = small[0][2]
    parts = []
    for part, _, _ in small:
        zoom = max(1, cells // max(part.shape))
        parts.append(np.kron(quantised(part, scale), np.ones((zoom, zoom), dtype=np.uint8)))
    high, wide = (max(part.shape[axis] for part in parts) for axis in (0, 1))
    rows = -(-len(parts) // mosaic.columns)
    image = np.full(
        (rows * (high + GAP + LABEL), mosaic.columns * (wide + GAP) - GAP), EMPTY, dtype=np.uint8
    )
    boxes = []
    for number, part in enumerate(parts):
        row, column = divmod(number, mosaic.columns)
        top, left = row * (high + GAP + LABEL) + LABEL, column * (wide + GAP)
        image[top : top + part.shape[0], left : left + part.shape[1]] = part
        boxes.append(Window(left, top, left + part.shape[1], top + part.shape[0]))
    return MosaicPicture(image, tuple(boxes), scale, reduction_text(factors, extreme))
