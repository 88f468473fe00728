"""The page of the explorer as a Panel template: our own elements, nothing from other hosts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import panel as pn
from bokeh.document import Document

from explorer.app.cards import TABS, CardBoard
from explorer.app.figure_base import FigureTheme
from explorer.widgets import palette
from explorer.widgets.views import attention as views_attention
from explorer.widgets.views import router as views_router

ASSETS = Path(__file__).parents[1] / "widgets" / "assets"
_PAGE = Path(__file__).with_name("page.jinja")

#: The theme a page opens in, before anything of it is painted: the one chosen last, else what the
#: system prefers.
_THEME = """
document.documentElement.dataset.theme = (() => {
  try {
    const stored = localStorage.getItem("bestiary-theme")
    if (stored) return stored
  } catch (error) { /* storage may be off */ }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"
})()
"""

#: Steps of a colour ramp that are enough for a gradient beside a heatmap.
_STOPS = 12


class Bridge(pn.custom.JSComponent):
    """The message channel between page and server; it draws nothing.

    The page's script (``assets/explorer.js``) connects to it, whichever of the two loads first.
    """

    _esm = """
    export function render({ model }) {
      window.bestiaryBridge = model
      document.dispatchEvent(new CustomEvent("bestiary-bridge"))
      return document.createElement("span")
    }
    """


@functools.cache
def theme_css() -> str:
    """Return the role colours and the colour ramps of both themes as CSS custom properties."""
    selectors = {"light": ":root", "dark": ':root[data-theme="dark"]'}
    ramps = [
        f"{selectors[theme]} {{ --map-sequential: {_gradient(palette.sequential())}; "
        f"--map-diverging: {_gradient(palette.diverging(theme))}; }}"
        for theme in selectors
    ]
    return palette.css(selectors) + "\n".join(ramps)


def _gradient(ramp: Sequence[str]) -> str:
    stops = [ramp[round(step * (len(ramp) - 1) / (_STOPS - 1))] for step in range(_STOPS)]
    return f"linear-gradient(to right, {', '.join(stops)})"


def build(document: Document) -> tuple[pn.Template, CardBoard, Bridge]:
    """Build a page with a slot for each figure, and the bridge to its script.

    The slots are plain Bokeh columns that ``document`` holds from the start: figures are added
    without Panel.
    """
    board, bridge = CardBoard(FigureTheme()), Bridge()
    page = pn.Template(_PAGE.read_text(encoding="utf-8"))
    for name, value in _variables().items():
        page.add_variable(name, value)
    for slot in board.slots.values():
        document.add_root(slot)
    page.add_panel("bridge", bridge)
    return page, board, bridge


def _variables() -> Mapping[str, object]:
    return {
        "colours": theme_css(),
        "theme": _THEME,
        "tabs": TABS,
        "routers": dict(views_router.CHOICES),
        "patterns": dict(views_attention.CHOICES),
        "title": "Bestiary explorer",
    }
