"""From numbers to the cells of a screen: named reductions, fixed scales, palette indexes.

Palette indexes are one byte: 0 is an empty cell, 1 to 127 run along the
sequential map from the low to the high end of the scale, 128 to 254 along the map
centred on zero (191 is zero). So one palette serves every picture and no colour
mapper ever changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EMPTY = 0

#: Which of the cells it covers a drawn cell shows, by name.
MAXIMUM, MINIMUM, FURTHEST = "maximum", "minimum", "furthest from zero"
SEQUENTIAL = (1, 127)
DIVERGING = (128, 254)


@dataclass(frozen=True)
class Window:
    """A rectangle of cells, ``right`` and ``bottom`` not included."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True)
class Scale:
    """The numbers at the ends of the colours. ``clipped``: numbers beyond are drawn as the ends."""

    low: float
    high: float
    signed: bool
    clipped: bool = False

    def index(self, value: float) -> int:
        """The palette index of one number."""
        return int(quantised(np.array([[value]], dtype=np.float32), self)[0, 0])


def scale_of(
    values: np.ndarray,
    signed: bool,
    low: float | None = None,
    high: float | None = None,
    clip: float | None = None,
) -> Scale:
    """The scale of a matrix: its own ends, or the given ones; symmetric about zero when signed.

    Sequential scales of numbers that are never negative start at zero, so that
    dark always means near zero. ``clip`` is a percentile of magnitudes to end
    the scale at: a few huge numbers then do not make all others dark.
    """
    finite = values[np.isfinite(values)]
    least, most = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    reach = float(np.percentile(np.abs(finite), clip)) if clip is not None and finite.size else None
    if signed:
        whole = max(abs(least), abs(most), abs(low or 0.0), abs(high or 0.0)) or 1.0
        end = reach if reach else whole
        return Scale(-end, end, True, end < max(abs(least), abs(most)))
    bottom = low if low is not None else min(least, 0.0) if least >= 0 else least
    top = high if high is not None else most
    if reach is not None and bottom < reach < top:
        return Scale(bottom, reach, False, reach < most)
    return Scale(bottom, top if top > bottom else bottom + 1.0, False)


def quantised(values: np.ndarray, scale: Scale) -> np.ndarray:
    """Palette indexes (uint8) of numbers on ``scale``; what is not finite becomes `EMPTY`."""
    first, last = DIVERGING if scale.signed else SEQUENTIAL
    share = (values.astype(np.float32) - scale.low) / (scale.high - scale.low)
    known = np.isfinite(values)
    share = np.clip(np.where(known, share, 0.0), 0.0, 1.0)
    return np.where(known, np.rint(first + share * (last - first)), EMPTY).astype(np.uint8)


def cells_in_window(
    values: np.ndarray, window: Window | None, cells: int, reduction: str
) -> tuple[np.ndarray, Window, tuple[int, int]]:
    """The cells of ``values`` in ``window``, reduced to at most ``cells`` a side.

    Returns the cells, the window of whole cells they cover, and how many rows and
    columns of the matrix one of them covers, (1, 1) where nothing was reduced.
    """
    rows, columns = values.shape
    box = _whole_cells(window, rows, columns)
    part = values[int(box.top) : int(box.bottom), int(box.left) : int(box.right)]
    factors = (max(1, -(-part.shape[0] // cells)), max(1, -(-part.shape[1] // cells)))
    return reduced(part, factors, reduction), box, factors


def hide_future(values: np.ndarray) -> np.ndarray:
    """A copy of a pattern ``[query key]`` with what the causal mask hides set to NaN.

    Kernels mask with minus infinity or with the lowest finite number, and leave zeros after
    the softmax, so everything above the diagonal is hidden.
    """
    rows, columns = values.shape
    drawn = values.astype(np.float32, copy=True)
    drawn[np.triu(np.ones((rows, columns), dtype=bool), k=1 + columns - rows)] = np.nan
    drawn[drawn < -1e30] = np.nan
    return drawn


def _whole_cells(window: Window | None, rows: int, columns: int) -> Window:
    """``window`` grown to whole cells and cut to the matrix; never empty."""
    if window is None:
        return Window(0, 0, columns, rows)
    left = min(max(int(np.floor(window.left)), 0), columns - 1)
    top = min(max(int(np.floor(window.top)), 0), rows - 1)
    right = max(min(int(np.ceil(window.right)), columns), left + 1)
    bottom = max(min(int(np.ceil(window.bottom)), rows), top + 1)
    return Window(left, top, right, bottom)


def reduced(values: np.ndarray, factors: tuple[int, int], reduction: str) -> np.ndarray:
    """Each block of ``factors`` cells as one: its maximum, its minimum, or the number furthest from
    zero.

    None hides a peak, as an average would. Empty cells (not finite) count only where a
    block has nothing else; the last block of a side may be smaller.

    """
    if factors == (1, 1):
        return values
    starts = [
        np.arange(0, length, factor) for length, factor in zip(values.shape, factors, strict=True)
    ]
    known = np.isfinite(values)
    upper = _fold(np.maximum, np.where(known, values, -np.inf), starts)
    if reduction == MAXIMUM:
        return upper
    lower = _fold(np.minimum, np.where(known, values, np.inf), starts)
    if reduction == MINIMUM:
        return lower
    return np.where(np.isfinite(upper) & (-lower > upper), lower, upper)


def _fold(operation: np.ufunc, values: np.ndarray, starts: list[np.ndarray]) -> np.ndarray:
    return operation.reduceat(operation.reduceat(values, starts[0], axis=0), starts[1], axis=1)


def reduction_text(factors: tuple[int, int], reduction: str) -> str:
    """What one cell shows, in words: "every cell shown" or "maximum of 4 × 4 cells"."""
    if factors == (1, 1):
        return "every cell shown"
    rows, columns = factors
    return f"{reduction} of {rows} × {columns} cells"
