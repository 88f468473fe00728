"""The Bokeh figures of the explorer: each is made once, then only its data is replaced.

A figure of cells has one image glyph over bytes that index one palette; the palette's mapper is
shared by all figures of a page and changes with the theme alone. Cell ``k`` spans ``k - 0.5`` to
``k + 0.5`` on its axis, so that ticks at whole numbers are at the middles of cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.events import RangesUpdate, Reset
from bokeh.models import (
    BoxAnnotation,
    ColumnDataSource,
    Image,
    MultiLine,
    Range1d,
    Rect,
    Span,
    Text,
)

from explorer.app.figure_base import FONT, BaseFigure, FigureTheme
from explorer.widgets.views.downsample import Window
from explorer.widgets.views.picture import Axis, Curves, Heatmap, MosaicPicture, Picture, marks_in


def _image(figure_theme: FigureTheme) -> Image:
    return Image(image="image", x="x", y="y", dw="dw", dh="dh", color_mapper=figure_theme.mapper)


def _nothing() -> dict[str, Any]:
    return {"image": [np.zeros((1, 1), dtype=np.uint8)], "x": [0], "y": [0], "dw": [1], "dh": [1]}


@dataclass(frozen=True)
class Zoom:
    """The visible range of a figure of a matrix of ``shape``, in the figure's coordinates."""

    shape: tuple[int, ...]
    left: float
    top: float
    right: float
    bottom: float

    def window_for(self, heatmap: Heatmap) -> Window | None:
        """Return the visible cells, None for all of them or for a matrix of another shape."""
        if self.shape != heatmap.values.shape:
            return None
        rows, columns = self.shape
        if (
            self.left <= -0.5
            and self.top <= -0.5
            and self.right >= columns - 0.5
            and self.bottom >= rows - 0.5
        ):
            return None
        return Window(self.left + 0.5, self.top + 0.5, self.right + 0.5, self.bottom + 0.5)


class CellFigure(BaseFigure):
    """A heatmap: one image glyph, and dashed lines along the selected row and column.

    ``window_changed`` is called after a zoom or a reset; the caller then draws the cells in `zoom`.
    """

    def __init__(self, figure_theme: FigureTheme, name: str) -> None:
        super().__init__(
            figure_theme,
            name,
            "box_zoom,pan,wheel_zoom,reset,save",
            active_drag="box_zoom",
            active_scroll=None,  # the wheel scrolls the page
            x_range=Range1d(start=-0.5, end=0.5),
            y_range=Range1d(start=0.5, end=-0.5),
        )
        self.window_changed: Callable[[], None] = lambda: None
        self._shape: tuple[int, ...] = ()
        self._axes: dict[str, Axis] = {}
        self.source = ColumnDataSource(data=_nothing())
        self._glyph(_image(figure_theme), self.source)
        self._spans = {
            side: Span(dimension=side, visible=False, line_width=1, line_dash=[4, 3])
            for side in ("width", "height")
        }
        self.figure.renderers.extend(self._spans.values())
        for axis in self.figure.axis:
            axis.update(ticker=figure_theme.ticker, major_label_policy=figure_theme.policy)
        for event in (RangesUpdate, Reset):
            self.figure.on_event(event, lambda event: self.window_changed())
        self._point_at(self.source)

    def colour(self) -> None:
        super().colour()
        for span in self._spans.values():
            span.line_color = self.figure_theme.role("ink")

    def zoom(self) -> Zoom:
        """Return the visible range; for the event loop's thread alone."""
        x: Any = self.figure.x_range
        y: Any = self.figure.y_range
        return Zoom(self._shape, x.start, y.end, x.end, y.start)

    def draw(self, heatmap: Heatmap, drawn: Picture) -> None:
        """Show a picture of ``heatmap`` (whole or a window of it) in one assignment."""
        if self._shape != heatmap.values.shape:
            self._shape = heatmap.values.shape
            self._frame(*self._shape)
        self._label("x", heatmap.x)
        self._label("y", heatmap.y)
        self.source.data = {
            "image": [drawn.indexes],
            "x": [drawn.left - 0.5],
            "y": [drawn.top - 0.5],
            "dw": [drawn.wide],
            "dh": [drawn.high],
        }

    def select(self, *, row: int | None = None, column: int | None = None) -> None:
        """Put the dashed lines of the selected token on a row, a column, both or none."""
        for side, place in (("width", row), ("height", column)):
            span = self._spans[side]
            if place is None:
                span.visible = False
            else:
                span.update(location=place, visible=True)

    def shows_tokens(self, side: str) -> bool:
        """Return whether an axis ("x" or "y") runs over the tokens of the prompt."""
        return side in self._axes and self._axes[side].title.startswith("token")

    def _frame(self, rows: int, columns: int) -> None:
        # Bounds first: a browser cuts ends off at the bounds it has when they arrive.
        plot = self.figure
        plot.x_range.update(bounds=(-0.5, columns - 0.5), start=-0.5, end=columns - 0.5)
        plot.x_range.update(reset_start=-0.5, reset_end=columns - 0.5)
        plot.y_range.update(bounds=(-0.5, rows - 0.5), start=rows - 0.5, end=-0.5)
        plot.y_range.update(reset_start=rows - 0.5, reset_end=-0.5)

    def _label(self, side: str, axis: Axis) -> None:
        if self._axes.get(side) == axis:
            return
        self._axes[side] = axis
        drawn = getattr(self.figure, f"{side}axis")[0]
        numbered = all(label == str(place) for place, label in enumerate(axis.labels))
        drawn.update(
            axis_label=axis.title,
            major_label_overrides={} if numbered else dict(enumerate(axis.labels)),
            major_label_orientation="vertical" if side == "x" and not numbered else "horizontal",
        )


class MarkedFigure(CellFigure):
    """A heatmap with outlined cells: white inside black, visible on every colour of the map."""

    def __init__(self, figure_theme: FigureTheme, name: str) -> None:
        super().__init__(figure_theme, name)
        self.marks = ColumnDataSource({"x": np.zeros(0), "y": np.zeros(0)})
        for width, colour in ((3, "#10141b"), (1.3, "#ffffff")):
            outline = Rect(
                x="x",
                y="y",
                width=1,
                height=1,
                fill_color=None,
                line_width=width,
                line_color=colour,
            )
            self._glyph(outline, self.marks)

    def draw(self, heatmap: Heatmap, drawn: Picture) -> None:
        super().draw(heatmap, drawn)
        marks = marks_in(heatmap, drawn)
        if len(marks) or len(self.marks.data["x"]):
            self.marks.data = {axis: marks[:, n].astype(np.float32) for n, axis in enumerate("xy")}


class MosaicFigure(BaseFigure):
    """All heads small: one image of all tiles, their numbers as text, the selected one framed."""

    def __init__(self, figure_theme: FigureTheme, name: str) -> None:
        super().__init__(
            figure_theme, name, "", x_range=Range1d(start=0, end=1), y_range=Range1d(start=1, end=0)
        )
        self.source = ColumnDataSource(data=_nothing())
        self.labels = ColumnDataSource({"x": [], "y": [], "text": []})
        self.drawn: MosaicPicture | None = None
        self._glyph(_image(figure_theme), self.source)
        self._text = Text(
            x="x",
            y="y",
            text="text",
            text_font=value(FONT),
            text_font_size=value("11px"),
            text_baseline="bottom",
        )
        self._glyph(self._text, self.labels)
        self._frame = BoxAnnotation(
            left=0,
            right=0,
            top=0,
            bottom=0,
            fill_alpha=0,
            line_width=2.5,
            line_alpha=1,
            visible=False,
        )
        self.figure.add_layout(self._frame)
        self.figure.axis.visible = False
        self._point_at(None)

    def colour(self) -> None:
        super().colour()
        self.figure.outline_line_color = None
        self._text.text_color = self.figure_theme.role("muted")
        self._frame.line_color = self.figure_theme.role("attention")

    def draw(self, drawn: MosaicPicture, labels: list[str]) -> None:
        """Show all tiles in one assignment."""
        self.drawn = drawn
        rows, columns = drawn.indexes.shape
        self.source.data = {
            "image": [drawn.indexes],
            "x": [0],
            "y": [0],
            "dw": [columns],
            "dh": [rows],
        }
        self.labels.data = {
            "x": np.array([box.left for box in drawn.boxes], dtype=np.float32),
            "y": np.array([box.top - 1 for box in drawn.boxes], dtype=np.float32),
            "text": labels,
        }
        self.figure.x_range.update(start=-2, end=columns + 2)
        self.figure.y_range.update(start=rows, end=-2)

    def frame(self, tile: int) -> None:
        """Frame one tile."""
        if self.drawn is None:
            return
        box = self.drawn.boxes[min(tile, len(self.drawn.boxes) - 1)]
        self._frame.update(
            left=box.left - 1,
            right=box.right + 1,
            top=box.top - 1,
            bottom=box.bottom + 1,
            visible=True,
        )


class CurveFigure(BaseFigure):
    """Lines over the tokens, with a dashed line at the selected one."""

    def __init__(self, figure_theme: FigureTheme, name: str) -> None:
        super().__init__(
            figure_theme,
            name,
            "box_zoom,pan,reset,save",
            active_drag="box_zoom",
            active_scroll=None,
            x_range=Range1d(start=-0.5, end=0.5),
            y_range=Range1d(start=0, end=1),
        )
        self.source = ColumnDataSource({"xs": [], "ys": [], "colour": [], "width": []})
        self._glyph(
            MultiLine(xs="xs", ys="ys", line_color="colour", line_width="width"), self.source
        )
        self._span = Span(dimension="height", visible=False, line_width=1, line_dash=[4, 3])
        self.figure.renderers.append(self._span)
        self.figure.xaxis[0].update(
            ticker=figure_theme.ticker,
            major_label_policy=figure_theme.policy,
            major_label_orientation="vertical",
        )
        self._shown: Curves | None = None
        self._point_at(None)

    def colour(self) -> None:
        super().colour()
        self._span.line_color = self.figure_theme.role("ink")
        if self._shown is not None:
            self.draw(self._shown)

    def draw(self, curves: Curves) -> None:
        """Show the lines in one assignment."""
        x_changed = self._shown is None or self._shown.x != curves.x
        self._shown = curves
        tokens = np.arange(curves.x.size, dtype=np.float32)
        self.source.data = {
            "xs": [tokens for _ in curves.lines],
            "ys": [line.values.astype(np.float32) for line in curves.lines],
            "colour": [self.figure_theme.role(line.role) for line in curves.lines],
            "width": [0.8 if line.role == "muted" else 2.0 for line in curves.lines],
        }
        if x_changed:
            ends = (-0.5, curves.x.size - 0.5)
            self.figure.x_range.update(bounds=ends, start=ends[0], end=ends[1])
            self.figure.x_range.update(reset_start=ends[0], reset_end=ends[1])
            self.figure.xaxis[0].update(
                axis_label=curves.x.title, major_label_overrides=dict(enumerate(curves.x.labels))
            )
        self.figure.yaxis[0].axis_label = curves.unit
        low, high = curves.bounds
        self.figure.y_range.update(start=low, end=high)
        self.figure.y_range.update(reset_start=low, reset_end=high)

    def select(self, token: int) -> None:
        """Put the dashed line at a token."""
        self._span.update(location=token, visible=True)
