"""The cards of the explorer: which view each shows, in which kind of figure, with which text.

``CARDS`` is the plan, as data. `render_card` is pure and may run in any thread: it turns a card, a
run and a selection into a view and its picture. `CardBoard` holds the figures of one page and puts
rendered cards on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bokeh.models import Column

from explorer.app.figure_base import FigureTheme
from explorer.app.figures import CellFigure, CurveFigure, MarkedFigure, MosaicFigure, Zoom
from explorer.app.runs import Run
from explorer.widgets.views import attention as views_attention
from explorer.widgets.views import code as code
from explorer.widgets.views import next_token as views_next
from explorer.widgets.views import residual as views_residual
from explorer.widgets.views import router as views_router
from explorer.widgets.views import state as views_state
from explorer.widgets.views import tensor as views_tensor
from explorer.widgets.views.downsample import Scale
from explorer.widgets.views.labels import number
from explorer.widgets.views.picture import (
    Curves,
    Heatmap,
    Mosaic,
    MosaicPicture,
    Picture,
    Refusal,
    mosaic_picture,
    picture,
)
from explorer.widgets.views.selection import Selection

log = logging.getLogger(__name__)

View = Heatmap | Mosaic | Curves | Refusal


@dataclass(frozen=True)
class Card:
    """One card: its figure, its view, and the fields of the selection that the view depends on.

    ``token`` says which dashed lines follow the selected token: "row", "column", "both" or "".
    ``compares`` marks a card that always shows the run with interventions.
    """

    name: str
    tab: str
    kind: type
    view: Callable[[Run, Selection], View]
    depends: tuple[str, ...]
    token: str = ""
    code: Callable[[Run, Selection], str] | None = None
    compares: bool = False


CARDS: tuple[Card, ...] = (
    Card(
        "router_grid",
        "router",
        MarkedFigure,
        views_router.token_by_expert,
        ("block", "router"),
        "row",
        code.router_grid,
    ),
    Card(
        "router_margin",
        "router",
        CurveFigure,
        views_router.margins,
        ("block",),
        "column",
        code.router_margin,
    ),
    Card(
        "router_load",
        "router",
        CellFigure,
        lambda run, selection: views_router.layer_by_expert(run),
        (),
        "",
        code.router_load,
    ),
    Card(
        "attention_all",
        "attention",
        MosaicFigure,
        views_attention.all_heads,
        ("block", "pattern"),
        "",
        code.attention_all,
    ),
    Card(
        "attention_one",
        "attention",
        CellFigure,
        views_attention.one_head,
        ("block", "head", "pattern"),
        "both",
        code.attention_one,
    ),
    Card(
        "state_kept",
        "state",
        CellFigure,
        views_state.retained_share,
        ("block",),
        "column",
        code.state_retained,
    ),
    Card(
        "state_written",
        "state",
        CellFigure,
        views_state.write_strength,
        ("block",),
        "column",
        code.state_written,
    ),
    Card(
        "state_norm",
        "state",
        CurveFigure,
        lambda run, selection: views_state.norm_over_time(
            run, selection, run.norms.get(selection.block)
        ),
        ("block", "head"),
        "column",
        code.state_norm,
    ),
    Card(
        "state_all",
        "state",
        MosaicFigure,
        views_state.implied_attention_of_all_heads,
        ("block",),
        "",
        code.state_all,
    ),
    Card(
        "state_one",
        "state",
        CellFigure,
        views_state.implied_attention,
        ("block", "head"),
        "both",
        code.state_one,
    ),
    Card(
        "state_matrix",
        "state",
        CellFigure,
        views_state.state_matrix,
        ("block", "head", "token"),
        "",
        code.state_matrix,
    ),
    Card(
        "stream_addends",
        "stream",
        CellFigure,
        lambda run, selection: views_residual.addend_norms(run),
        (),
        "column",
        code.stream_addends,
    ),
    Card(
        "stream_norms",
        "stream",
        CellFigure,
        lambda run, selection: views_residual.stream_norms(run),
        (),
        "column",
        code.stream_norms,
    ),
    Card(
        "compare_kl",
        "compare",
        CurveFigure,
        lambda run, selection: views_next.divergence_by_position(
            run.baseline, None if run.before is None else run
        ),
        (),
        "column",
        code.compare,
        compares=True,
    ),
    Card(
        "part",
        "tensor",
        CellFigure,
        views_tensor.value_picture,
        ("block", "head", "token", "part"),
        "row",
    ),
)

TABS = ("tensor", "router", "attention", "state", "stream", "compare")


@dataclass(frozen=True)
class RenderedCard:
    """A view and its picture, ready to be put on a figure."""

    card: Card
    view: View
    drawn: Picture | MosaicPicture | None
    key: tuple
    run: Run


def run_for_card(card: Card, run: Run, other: Run | None) -> Run:
    """Return the run a card shows: the one on show, or the one with interventions."""
    return other if card.compares and other is not None else run.baseline if card.compares else run


def key_of(card: Card, run: Run, selection: Selection) -> tuple:
    """Return what a card's picture depends on: equal keys mean equal pictures."""
    return (run.number, *(getattr(selection, name) for name in card.depends))


def render_card(card: Card, run: Run, selection: Selection, zoom: Zoom | None) -> RenderedCard:
    """Make the view of one card and its picture. Pure; ``zoom`` is the figure's visible range."""
    try:
        view = card.view(run, selection)
    except Exception as error:
        log.exception("the card %s failed", card.name)
        view = Refusal(f"This could not be drawn: {type(error).__name__}: {error}")
    drawn: Picture | MosaicPicture | None = None
    if isinstance(view, Heatmap):
        drawn = picture(view, zoom.window_for(view) if zoom is not None else None)
    elif isinstance(view, Mosaic):
        drawn = mosaic_picture(view)
    return RenderedCard(card, view, drawn, key_of(card, run, selection), run)


@dataclass
class CardBoard:
    """The figures of one page, the slots they are put in, and the key of what each shows.

    A figure is made when there is first something to draw on it (`make`, in any thread but one at a
    time) and added to the page with its first drawing; ``on_figure_added`` then connects events.
    """

    figure_theme: FigureTheme
    on_figure_added: Callable[[str, Any], None] = lambda name, figure: None
    slots: dict[str, Column] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    shown_keys: dict[str, tuple] = field(default_factory=dict)
    _made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = {
            card.name: Column(name=card.name, sizing_mode="stretch_both") for card in CARDS
        }

    def make(self, rendered: RenderedCard) -> None:
        """Create the figure of a rendered card, unless it exists or nothing is drawn."""
        card = rendered.card
        if card.name not in self._made and not isinstance(rendered.view, Refusal):
            self._made[card.name] = card.kind(self.figure_theme, card.name)

    def _figure(self, name: str) -> Any:
        """Return the figure of a card, adding it to the page the first time."""
        if name not in self.figures:
            figure = self.figures[name] = self._made[name]
            self.figure_theme.add(figure)
            self.on_figure_added(name, figure)
            self.slots[name].children = [figure.figure]
        return self.figures[name]

    def stale(self, tab: str, run: Run, other: Run | None, selection: Selection) -> list[Card]:
        """Return the cards of the tab whose picture is not the one the selection asks for."""
        return [
            card
            for card in CARDS
            if card.tab == tab
            and self.shown_keys.get(card.name)
            != key_of(card, run_for_card(card, run, other), selection)
            and (card.name != "part" or selection.part)
        ]

    def zoom_of(self, card: Card) -> Zoom | None:
        """Return the visible range of a card's figure, None where it has no zoom or is not there
        yet.
        """
        figure = self.figures.get(card.name)
        return figure.zoom() if isinstance(figure, CellFigure) else None

    def put(self, rendered: RenderedCard, selection: Selection) -> dict[str, Any]:
        """Draw a rendered card on its figure and return the card's texts for the page."""
        card, view = rendered.card, rendered.view
        self.shown_keys[card.name] = rendered.key
        if isinstance(view, Refusal):
            return card_message(rendered, None)
        figure = self._figure(card.name)
        if isinstance(view, Heatmap):
            figure.draw(view, rendered.drawn)
        elif isinstance(view, Mosaic):
            figure.draw(rendered.drawn, tile_labels(view))
        else:
            figure.draw(view)
        return card_message(
            rendered, code=card.code(rendered.run, selection) if card.code else None
        )

    def follow(self, tab: str, selection: Selection) -> None:
        """Move the dashed lines and the frame to the selected token and head."""
        for card in CARDS:
            figure = self.figures.get(card.name)
            if card.tab != tab or card.name not in self.shown_keys or figure is None:
                continue
            if isinstance(figure, MosaicFigure) and figure.drawn is not None:
                figure.frame(selection.head)
            elif isinstance(figure, CurveFigure):
                figure.select(selection.token)
            elif isinstance(figure, CellFigure):
                # A part's axes depend on the part: only one of tokens has a selected token to mark.
                figure.select(
                    row=selection.token
                    if card.token in ("row", "both") and figure.shows_tokens("y")
                    else None,
                    column=selection.token
                    if card.token in ("column", "both") and figure.shows_tokens("x")
                    else None,
                )


def tile_labels(mosaic: Mosaic) -> list[str]:
    """Return the label of each tile of a mosaic."""
    return [f"{tile.label} · {tile.group}" if tile.group else tile.label for tile in mosaic.tiles]


def card_message(rendered: RenderedCard, code: str | None) -> dict[str, Any]:
    """Return a card's texts for the page: title, note, reduction, scale and axes."""
    view, drawn = rendered.view, rendered.drawn
    if isinstance(view, Refusal):
        return {"refusal": view.reason, "title": None}
    message: dict[str, Any] = {
        "refusal": None,
        "title": view.title,
        "note": view.note,
        "code": code,
    }
    if drawn is not None:
        message |= {"reduction": drawn.reduction, "scale": scale_message(drawn.scale)}
    if isinstance(drawn, MosaicPicture):
        message["mosaic"] = [drawn.indexes.shape[1] + 4, drawn.indexes.shape[0] + 2]
    if isinstance(view, Heatmap):
        message["axes"] = {side: axis_message(getattr(view, side)) for side in "xy"}
    elif isinstance(view, Curves):
        message["axes"] = {"x": axis_message(view.x)}
    return message


def axis_message(axis: Any) -> dict[str, Any]:
    """Return how the page names the steps of an axis: as tokens, as numbers, or by labels."""
    if axis.title.startswith("token"):
        return {"title": axis.title, "tokens": True}
    plain = all(label == str(place) for place, label in enumerate(axis.labels))
    return {"title": axis.title} if plain else {"title": axis.title, "labels": list(axis.labels)}


def scale_message(scale: Scale) -> dict[str, Any]:
    """Return the scale for the page: its ends, marked where values beyond them are clipped."""
    low, middle, high = (
        number(value) for value in (scale.low, (scale.low + scale.high) / 2, scale.high)
    )
    if scale.clipped:
        low, high = (f"≤ {low}" if scale.signed else low), f"≥ {high}"
    return {
        "low": scale.low,
        "high": scale.high,
        "signed": scale.signed,
        "clipped": scale.clipped,
        "texts": [low, middle, high],
    }
