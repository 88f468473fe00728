"""What all Bokeh figures of a page share: theme, colours, axes and pointer events."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from bokeh.events import MouseLeave, MouseMove, Tap
from bokeh.models import (
    BasicTicker,
    CDSView,
    ColumnDataSource,
    CustomJS,
    GlyphRenderer,
    InlineStyleSheet,
    LinearColorMapper,
    NoOverlap,
)
from bokeh.models.glyph import Glyph
from bokeh.plotting import figure

from explorer.widgets import palette
from explorer.widgets.views.downsample import DIVERGING, SEQUENTIAL

FONT = "Inter, system-ui, sans-serif"
#: Ticks wanted on an axis; those that would overlap are left out by the axis itself.
_TICKS = 48

#: The toolbar is shown in a corner of the figure while the pointer is over it.
_TOOLS_CSS = """
:host(.bk-inner) {
  background: var(--role-ground); opacity: .94;
  width: min(100%, 190px) !important; margin-left: auto !important;
  border-radius: 8px; padding: 0 4px;
}
"""

#: Runs in the browser: reports the cell under the pointer without a round trip to the server.
_POINT = """
const detail = {figure: name, inside: cb_obj.event_name === "mousemove", x: cb_obj.x, y: cb_obj.y}
if (detail.inside && source !== null) {
  const {image, x, y, dw, dh} = source.data
  const cells = image[0], [rows, columns] = cells.shape
  const column = Math.floor((cb_obj.x - x[0]) / dw[0] * columns)
  const row = Math.floor((cb_obj.y - y[0]) / dh[0] * rows)
  detail.inside = column >= 0 && row >= 0 && column < columns && row < rows
  if (detail.inside) detail.index = cells[row * columns + column]
}
document.dispatchEvent(new CustomEvent("bestiary-point", {detail}))
"""


@functools.cache
def colours(theme: str) -> list[str]:
    """Return the palette of a theme.

    Index 0 is transparent, 1 to 127 are sequential, 128 to 254 diverging around zero, 255 is
    unused.
    """
    ends = [
        [ramp[round(step * (len(ramp) - 1) / (last - first))] for step in range(last - first + 1)]
        for (first, last), ramp in (
            (SEQUENTIAL, palette.sequential()),
            (DIVERGING, palette.diverging(theme)),
        )
    ]
    return ["rgba(0, 0, 0, 0)", *ends[0], *ends[1], palette.ROLES["ink"].on(theme)]


class FigureTheme:
    """What all figures of one page share: the colour mapper, the tickers and the theme."""

    def __init__(self, theme: str = "light") -> None:
        self.theme = theme
        self.mapper = LinearColorMapper(low=0, high=255, palette=colours(theme))
        self.ticker = BasicTicker(min_interval=1, desired_num_ticks=_TICKS, num_minor_ticks=0)
        self.policy = NoOverlap(min_distance=1)
        self.tools_style = InlineStyleSheet(css=_TOOLS_CSS)
        self._figures: list[BaseFigure] = []

    def role(self, name: str) -> str:
        """Return the colour of a role in the current theme."""
        return palette.ROLES[name].on(self.theme)

    def change(self, theme: str) -> None:
        """Redraw everything in the other theme."""
        if theme == self.theme:
            return
        self.theme = theme
        self.mapper.palette = colours(theme)
        for one in self._figures:
            one.colour()

    def add(self, figure: BaseFigure) -> None:
        """Colour a figure and keep it in step with the theme."""
        self._figures.append(figure)
        figure.colour()


class BaseFigure:
    """Base of all figures: axes, tools, colours, pointer events.

    A new one has no colours and belongs to no page: any thread may make it, and `FigureTheme.add`
    colours it.
    """

    def __init__(self, figure_theme: FigureTheme, name: str, tools: str, **options: Any) -> None:
        self.figure_theme, self.name = figure_theme, name
        self.figure = figure(
            name=f"figure_{name}",
            sizing_mode="stretch_both",
            tools=tools,
            toolbar_location="above" if tools else None,
            toolbar_inner=True,
            output_backend="canvas",
            min_border=2,
            background_fill_alpha=0,
            border_fill_alpha=0,
            **options,
        )
        self.figure.toolbar.logo = None
        self.figure.toolbar.autohide = True
        self.figure.toolbar.stylesheets = [figure_theme.tools_style]
        for axis in self.figure.axis:
            axis.major_label_text_font = axis.axis_label_text_font = FONT
            axis.major_label_text_font_size = axis.axis_label_text_font_size = "11px"
            axis.axis_label_text_font_style = "normal"
            axis.minor_tick_line_color = None
        self.figure.center = []  # no grid lines

    def colour(self) -> None:
        """Apply the colours of the current theme."""
        muted = self.figure_theme.role("muted")
        self.figure.outline_line_color = muted
        self.figure.outline_line_alpha = 0.4
        for axis in self.figure.axis:
            axis.major_label_text_color = axis.axis_label_text_color = muted
            axis.axis_line_color = axis.major_tick_line_color = muted
            axis.axis_line_alpha = axis.major_tick_line_alpha = 0.4

    def _glyph(self, glyph: Glyph, source: ColumnDataSource) -> None:
        """Add a glyph that looks the same selected or not (three fewer models than the default)."""
        self.figure.renderers.append(
            GlyphRenderer(
                data_source=source,
                glyph=glyph,
                view=CDSView(),
                selection_glyph=None,
                nonselection_glyph=None,
                hover_glyph=None,
                muted_glyph=None,
            )
        )

    def _point_at(self, source: ColumnDataSource | None) -> None:
        code = CustomJS(args={"name": self.name, "source": source}, code=_POINT)
        self.figure.js_on_event(MouseMove, code)
        self.figure.js_on_event(MouseLeave, code)

    def on_tap(self, do: Callable[[float, float], None]) -> None:
        """Call ``do(x, y)`` with the coordinates of each click."""

        def tapped(event: Any) -> None:
            do(event.x, event.y)

        self.figure.on_event(Tap, tapped)
