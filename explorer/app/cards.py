"""The cards of the explorer: which view each shows, in which figure, and the words beside it.

``CARDS`` is the plan, as data. ``look`` is pure and may run in any thread: it turns a
card, a run and a selection into a view and its picture. `Board` holds the figures of
one page and puts what was looked up on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bokeh.models import Column

from explorer.app.figures import (
    CellFigure,
    CurveFigure,
    FigureTheme,
    MarkedFigure,
    MosaicFigure,
    Zoom,
)
from explorer.app.runs import Run
from explorer.widgets.views import attention as views_attention
from explorer.widgets.views import code as snippets
from explorer.widgets.views import next_token as views_next
from explorer.widgets.views import residual as views_stream
from explorer.widgets.views import router as views_router
from explorer.widgets.views import state as views_state
from explorer.widgets.views import tensor as views_part
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
    """One card: its figure, its view, the parts of the selection the view depends on.

    ``token`` says which dashed lines follow the selected token: "row", "column", "both" or "".
    ``compares`` marks a card that shows the run with interventions whichever one the others show.
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
        snippets.router_grid,
    ),
    Card(
        "router_margin",
        "router",
        CurveFigure,
        views_router.margins,
        ("block",),
        "column",
        snippets.router_margin,
    ),
    Card(
        "router_load",
        "router",
        CellFigure,
        lambda run, chosen: views_router.layer_by_expert(run),
        (),
        "",
        snippets.router_load,
    ),
    Card(
        "attention_all",
        "attention",
        MosaicFigure,
        views_attention.all_heads,
        ("block", "pattern"),
        "",
        snippets.attention_all,
    ),
    Card(
        "attention_one",
        "attention",
        CellFigure,
        views_attention.one_head,
        ("block", "head", "pattern"),
        "both",
        snippets.attention_one,
    ),
    Card(
        "state_kept",
        "state",
        CellFigure,
        views_state.kept,
        ("block",),
        "column",
        snippets.state_kept,
    ),
    Card(
        "state_written",
        "state",
        CellFigure,
        views_state.written,
        ("block",),
        "column",
        snippets.state_written,
    ),
    Card(
        "state_norm",
        "state",
        CurveFigure,
        lambda run, chosen: views_state.norm_over_time(run, chosen, run.norms.get(chosen.block)),
        ("block", "head"),
        "column",
        snippets.state_norm,
    ),
    Card(
        "state_all",
        "state",
        MosaicFigure,
        views_state.all_implied,
        ("block",),
        "",
        snippets.state_all,
    ),
    Card(
        "state_one",
        "state",
        CellFigure,
        views_state.implied,
        ("block", "head"),
        "both",
        snippets.state_one,
    ),
    Card(
        "state_matrix",
        "state",
        CellFigure,
        views_state.matrix,
        ("block", "head", "token"),
        "",
        snippets.state_matrix,
    ),
    Card(
        "stream_addends",
        "stream",
        CellFigure,
        lambda run, chosen: views_stream.addend_norms(run),
        (),
        "column",
        snippets.stream_addends,
    ),
    Card(
        "stream_norms",
        "stream",
        CellFigure,
        lambda run, chosen: views_stream.stream_norms(run),
        (),
        "column",
        snippets.stream_norms,
    ),
    Card(
        "compare_kl",
        "compare",
        CurveFigure,
        lambda run, chosen: views_next.divergence_by_position(
            run.baseline, None if run.before is None else run
        ),
        (),
        "column",
        snippets.compare,
        compares=True,
    ),
    Card("part", "tensor", CellFigure, views_part.part, ("block", "head", "token", "part"), "row"),
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


def seen(card: Card, run: Run, other: Run | None) -> Run:
    """The run a card shows, of the one on show and the one with interventions."""
    return other if card.compares and other is not None else run.baseline if card.compares else run


def key_of(card: Card, run: Run, chosen: Selection) -> tuple:
    """What a card's picture depends on: equal keys, equal pictures."""
    return (run.number, *(getattr(chosen, name) for name in card.depends))


def look(card: Card, run: Run, chosen: Selection, zoom: Zoom | None) -> RenderedCard:
    """The view of one card and its bytes. Pure; ``zoom`` is what its figure has in view."""
    try:
        view = card.view(run, chosen)
    except Exception as error:
        log.exception("the card %s failed", card.name)
        view = Refusal(f"This could not be drawn: {type(error).__name__}: {error}")
    drawn: Picture | MosaicPicture | None = None
    if isinstance(view, Heatmap):
        drawn = picture(view, zoom.window_for(view) if zoom is not None else None)
    elif isinstance(view, Mosaic):
        drawn = mosaic_picture(view)
    return RenderedCard(card, view, drawn, key_of(card, run, chosen), run)


@dataclass
class Board:
    """The places of one page for figures, the figures made so far, what is on them, and the words beside them.

    A figure is made when there is first something to draw on it (`make`, in any thread but one
    at a time) and put in its place with the drawing; ``wire`` then connects what is done on it.
    """

    ink: FigureTheme
    wire: Callable[[str, Any], None] = lambda name, figure: None
    hook_points: dict[str, Column] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    on_them: dict[str, tuple] = field(default_factory=dict)
    _made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hook_points = {
            card.name: Column(name=card.name, sizing_mode="stretch_both") for card in CARDS
        }

    def make(self, looked: RenderedCard) -> None:
        """Have a figure ready for what was looked up, where it needs one and there is none."""
        card = looked.card
        if card.name not in self._made and not isinstance(looked.view, Refusal):
            self._made[card.name] = card.kind(self.ink, card.name)

    def _figure(self, name: str) -> Any:
        """The figure of a card, in its place on the page."""
        if name not in self.figures:
            figure = self.figures[name] = self._made[name]
            self.ink.add(figure)
            self.wire(name, figure)
            self.hook_points[name].children = [figure.figure]
        return self.figures[name]

    def stale(self, tab: str, run: Run, other: Run | None, chosen: Selection) -> list[Card]:
        """The cards in view whose picture is no longer the one asked for."""
        return [
            card
            for card in CARDS
            if card.tab == tab
            and self.on_them.get(card.name) != key_of(card, seen(card, run, other), chosen)
            and (card.name != "part" or chosen.part)
        ]

    def zoom_of(self, card: Card) -> Zoom | None:
        """What the card's figure has in view, None for one that is always seen whole or not there yet."""
        figure = self.figures.get(card.name)
        return figure.zoom() if isinstance(figure, CellFigure) else None

    def put(self, looked: RenderedCard, chosen: Selection) -> dict[str, Any]:
        """Put a picture on its figure, which `make` has made; returns the words of the card."""
        card, view = looked.card, looked.view
        self.on_them[card.name] = looked.key
        if isinstance(view, Refusal):
            return {"refusal": view.reason, "title": None}
        figure = self._figure(card.name)
        if isinstance(view, Heatmap):
            figure.draw(view, looked.drawn)
        elif isinstance(view, Mosaic):
            figure.draw(looked.drawn, tile_labels(view))
        else:
            figure.draw(view)
        return words(looked, code=card.code(looked.run, chosen) if card.code else None)

    def follow(self, tab: str, chosen: Selection) -> None:
        """Move the dashed lines and the frame to the selected token and head."""
        for card in CARDS:
            figure = self.figures.get(card.name)
            if card.tab != tab or card.name not in self.on_them or figure is None:
                continue
            if isinstance(figure, MosaicFigure) and figure.drawn is not None:
                figure.frame(chosen.head)
            elif isinstance(figure, CurveFigure):
                figure.select(chosen.token)
            elif isinstance(figure, CellFigure):
                # A part's axes depend on the part: only one of tokens has a selected token to mark.
                figure.select(
                    row=chosen.token
                    if card.token in ("row", "both") and figure.shows_tokens("y")
                    else None,
                    column=chosen.token
                    if card.token in ("column", "both") and figure.shows_tokens("x")
                    else None,
                )


def tile_labels(mosaic: Mosaic) -> list[str]:
    return [f"{tile.label} · {tile.group}" if tile.group else tile.label for tile in mosaic.tiles]


def words(looked: RenderedCard, code: str | None) -> dict[str, Any]:
    """The words of a card, for the page: title, note, reduction, scale and axes."""
    view, drawn = looked.view, looked.drawn
    said: dict[str, Any] = {"refusal": None, "title": view.title, "note": view.note, "code": code}
    if drawn is not None:
        said |= {"reduction": drawn.reduction, "scale": scale_words(drawn.scale)}
    if isinstance(view, Mosaic):
        said["mosaic"] = [drawn.indexes.shape[1] + 4, drawn.indexes.shape[0] + 2]
    if isinstance(view, Heatmap):
        said["axes"] = {side: _axis_words(getattr(view, side)) for side in "xy"}
    elif isinstance(view, Curves):
        said["axes"] = {"x": _axis_words(view.x)}
    return said


def _axis_words(axis: Any) -> dict[str, Any]:
    """How the page names a step of an axis: tokens it knows, other labels only where they are not numbers."""
    if axis.title.startswith("token"):
        return {"title": axis.title, "tokens": True}
    plain = all(label == str(place) for place, label in enumerate(axis.labels))
    return {"title": axis.title} if plain else {"title": axis.title, "labels": list(axis.labels)}


def scale_words(scale: Scale) -> dict[str, Any]:
    """The scale in words: its ends, marked where numbers beyond them are drawn as the ends."""
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
