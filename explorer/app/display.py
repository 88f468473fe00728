"""What one page displays: the run and selection it shows, and how pictures reach the page.

Pictures are made in a thread of the page's own; figures belong to the event loop's thread and are
changed through ``post``. A picture for a selection that is no longer the newest is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from explorer.app.cards import CardBoard, RenderedCard, render_card, run_for_card
from explorer.app.figures import CellFigure, MosaicFigure
from explorer.app.loop_monitor import LoopLagMonitor
from explorer.app.messages import (
    attention_summary,
    comparison_summary,
    diagram_marks,
    router_summary,
    tensor_summary,
)
from explorer.app.requests import clamp_selection, error_sentence
from explorer.app.runs import Run
from explorer.app.store import Store
from explorer.app.worker import Worker
from explorer.widgets.views.selection import Selection

log = logging.getLogger(__name__)

Message = dict[str, Any]

#: Of the cards whose cells can be clicked: what of the selection a cell's row and column set.
_CELL_SELECTS = {
    "router_grid": {"token": "row"},
    "attention_one": {"token": "row"},
    "state_one": {"token": "row"},
    "router_load": {"block": "row"},
    "state_kept": {"token": "column", "head": "row"},
    "state_written": {"token": "column", "head": "row"},
    "stream_addends": {"token": "column"},
    "stream_norms": {"token": "column"},
}


@dataclass(frozen=True)
class Services:
    """What all pages share."""

    worker: Worker
    store: Store
    diagrams: Callable[[Any], dict[str, Any]]
    loop_lag: LoopLagMonitor
    default_source: str
    default_prompt: str | None


class Display:
    """The run, the selection and the tab of one page, and the cards drawn for them.

    ``run`` is what the cards show; ``other`` is the run with interventions where there are some. A
    subclass says what a click selects (`select`) and how values that a run left out are recorded
    (`record_missing`).
    """

    def __init__(
        self,
        services: Services,
        board: CardBoard,
        send: Callable[[Message], None],
        post: Callable[[Callable[[], None]], None],
        batched: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.services, self.board = services, board
        self._send, self._post, self._batched = send, post, batched
        self.selection = Selection()
        self.tab = "router"
        self.run: Run | None = None
        self.other: Run | None = None
        self._decode: Callable[[int], str] = str
        self._pictures = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pictures")
        self._newest = 0
        self._closed = False
        board.on_figure_added = self._connect_clicks

    def select(self, changes: dict[str, int]) -> None:
        """Change the selection after a click on a figure."""
        raise NotImplementedError

    def record_missing(self, run: Run, other: Run | None, selection: Selection) -> None:
        """Record what is looked at and was left out of the runs on show."""
        raise NotImplementedError

    def reply(self, message: Message) -> None:
        """Send a message to the page, unless it is gone."""
        if not self._closed:
            self._send(message)

    def close(self) -> None:
        """Stop drawing: the page is gone."""
        self._closed = True
        self._pictures.shutdown(wait=False, cancel_futures=True)

    def refresh(self, seq: int | None) -> None:
        """Bring the page up to date: render cards in the background, then draw them together."""
        if self.run is None:
            return
        self.selection = clamp_selection(self.run, self.selection)
        self._newest += 1
        with_recorded_since = self.services.store.with_recorded_since
        refresh_number, run, selection, tab = (
            self._newest,
            with_recorded_since(self.run),
            self.selection,
            self.tab,
        )
        other = None if self.other is None else with_recorded_since(self.other)
        # The diagram need not wait for pictures.
        self.reply({"marks": diagram_marks(run, selection), "marked": seq})
        # What is in view is read here: figures belong to this thread.
        cards = [
            (card, self.board.zoom_of(card))
            for card in self.board.stale(tab, run, other, selection)
        ]

        def prepare() -> None:
            if refresh_number != self._newest:
                return  # a newer selection is waiting behind this one
            rendered = [
                render_card(card, run_for_card(card, run, other), selection, zoom)
                for card, zoom in cards
            ]
            for one in rendered:
                self.board.make(one)
            texts = self._texts(run, other, selection, tab)
            self._post(
                lambda: self._draw_rendered(
                    refresh_number, seq, (run, other), selection, tab, rendered, texts
                )
            )

        self._in_background(prepare)

    def _draw_rendered(
        self,
        refresh_number: int,
        seq: int | None,
        runs: tuple[Run, Run | None],
        selection: Selection,
        tab: str,
        rendered: list[RenderedCard],
        texts: dict[str, Any],
    ) -> None:
        """Draw rendered cards and send the texts, in one batch on the event loop."""
        if self._closed or refresh_number != self._newest:
            return
        with self._batched():
            cards = {one.card.name: self.board.put(one, selection) for one in rendered}
            self.board.follow(tab, selection)
            self._send(
                {
                    "seq": seq,
                    "cards": cards,
                    **texts,
                    "tab": tab,
                    "status": [f"loop at most {1000 * self.services.loop_lag.worst:.0f} ms late"],
                    "selection": {
                        name: getattr(selection, name)
                        for name in ("block", "token", "head", "pattern", "router", "part")
                    },
                }
            )
        self.record_missing(*runs, selection)

    def _redraw(self, name: str) -> None:
        """Draw a card again after a zoom, with the exact cells of the visible range."""
        self.board.shown_keys.pop(name, None)
        self.refresh(None)

    def _texts(self, run: Run, other: Run | None, selection: Selection, tab: str) -> dict[str, Any]:
        """Return the texts of the page that depend on the selection."""
        texts = {
            "compare": comparison_summary(run.baseline, other, selection, self._decode),
            "shown": "after" if other is not None and run.number == other.number else "before",
        }
        if tab == "router":
            texts["router"] = router_summary(run, selection)
        if tab == "attention":
            texts["attention"] = attention_summary(run, selection)
        if tab == "tensor" and selection.part:
            texts["part"] = tensor_summary(run, selection)
        return texts

    def _in_background(self, work: Callable[[], None]) -> None:
        """Run pure work in the page's own thread and report what fails."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                log.exception("making a picture failed")
                text = error_sentence(error)
                self._post(lambda: self.reply({"notice": text}))

        if not self._closed:
            self._pictures.submit(guarded)

    # -- the figures --------------------------------------------------------

    def _connect_clicks(self, name: str, figure: Any) -> None:
        """Listen to the events of a figure that was added to the page."""
        if isinstance(figure, MosaicFigure):
            figure.on_tap(lambda x, y: self._tapped_tile(name, x, y))
        elif isinstance(figure, CellFigure):
            figure.window_changed = lambda: self._redraw(name)
            figure.on_tap(lambda x, y: self._tapped_cell(name, x, y))

    def _tapped_tile(self, name: str, x: float, y: float) -> None:
        """Select the head of the tile that was clicked."""
        drawn = self.board.figures[name].drawn
        tile = drawn.tile_at(x, y) if drawn is not None else None
        if tile is not None:
            self.select({"head": tile})

    def _tapped_cell(self, name: str, x: float, y: float) -> None:
        """Select the token, block or head of a clicked cell."""
        cell = {"row": round(y), "column": round(x)}
        changes = {name: cell[side] for name, side in _CELL_SELECTS.get(name, {}).items()}
        if changes:
            self.select(changes)
