"""One session: what a page is showing, what it asked for, what it is told.

The page sends small messages (``{"do": "select", "block": 3, "seq": 7}``) and gets
messages back; a message says ``seq`` of the request it answers, so the page knows when
what it asked for is on the screen. Nothing here draws and nothing waits: models run in
the worker's thread, pictures are made in a thread of the session, and both come back to
the event loop through ``post``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from explorer.app.cards import TABS, Board, RenderedCard, look, seen
from explorer.app.figures import CellFigure, MosaicFigure
from explorer.app.loop_monitor import LoopLagMonitor
from explorer.app.messages import (
    attention_words,
    compare_words,
    diagram_words,
    first_tab,
    part_words,
    router_words,
    run_words,
)
from explorer.app.requests import clamped, impossible, looked_at, sentence, whole
from explorer.app.runs import Run
from explorer.app.store import ANY_PROMPT, Store, default_prompt, shown_source, source_choices
from explorer.app.worker import Job, Worker
from explorer.widgets.views import attention as views_attention
from explorer.widgets.views import router as views_router
from explorer.widgets.views.code import Intervention
from explorer.widgets.views.selection import Selection

log = logging.getLogger(__name__)

_PATTERNS = tuple(views_attention.CHOICES)
_ROUTERS = tuple(views_router.CHOICES)


@dataclass(frozen=True)
class Services:
    """What all sessions share."""

    worker: Worker
    store: Store
    diagrams: Callable[[Any], dict[str, Any]]
    lateness: LoopLagMonitor
    default_source: str
    default_prompt: str | None


@dataclass(frozen=True)
class Ran:
    """What a finished run hands to the page."""

    model: Any
    run: Run
    diagram: dict[str, Any]
    decode: Callable[[int], str]


class Session:
    """The controller of one page."""

    def __init__(
        self,
        services: Services,
        board: Board,
        send: Callable[[dict], None],
        post: Callable[[Callable[[], None]], None],
        together: Callable[[], Any],
    ) -> None:
        self.services, self.board = services, board
        self._send, self._post, self._together = send, post, together
        self.chosen = Selection()
        self.tab, self._asked = "router", False
        self.run: Run | None = None
        self.other: Run | None = None
        self.interventions: list[tuple[Intervention, bool]] = []
        self._loading = ""
        self.job: Job | None = None
        self._decode: Callable[[int], str] = str
        self._pictures = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pictures")
        self._newest = 0
        self._closed = False
        board.wire = self._wire

    # -- messages from the page --------------------------------------------

    def receive(self, message: dict[str, Any]) -> None:
        """Act on one message of the page; what it does not understand it ignores."""
        handler = (
            getattr(self, f"_do_{message.get('do')}", None) if isinstance(message, dict) else None
        )
        if handler is not None:
            handler(message)

    def _do_hello(self, message: dict[str, Any]) -> None:
        self.board.ink.change("dark" if message.get("theme") == "dark" else "light")
        wish = message.get("wish") if isinstance(message.get("wish"), dict) else {}
        self._asked = wish.get("tab") in TABS
        self.tab = wish["tab"] if self._asked else "router"
        self.chosen = Selection(
            **{name: whole(wish.get(name), 0) for name in ("block", "token", "head")}
        )
        if "token" not in wish:
            self.chosen = self.chosen.moved(token=-1)
        if isinstance(wish.get("part"), str):
            self.chosen = self.chosen.moved(part=wish["part"])
        default = self.services.default_source
        source = str(wish.get("model") or default)
        prompt = str(wish.get("prompt") or "") or (
            self.services.default_prompt if source == default else None
        )
        if not self._opens_unasked(source):
            # A link is anybody's: what it names is opened, or fetched, once the person here says so.
            self._tell(
                {
                    "hello": {
                        "models": source_choices(),
                        "source": source,
                        "prompt": prompt or ANY_PROMPT,
                    },
                    "notice": f"The address of this page names the model {source}: press Run to load it.",
                }
            )
            return
        self._tell({"hello": {"models": source_choices(), "source": source, "prompt": prompt}})
        self._start(source, prompt)

    def _opens_unasked(self, source: str) -> bool:
        """Whether a page may start with a model nobody here chose: the command line's, a shipped one, one already loaded."""
        shipped = {choice["source"] for choice in source_choices()}
        return (
            source == self.services.default_source
            or source in shipped
            or source in self.services.store.models
        )

    def _do_theme(self, message: dict[str, Any]) -> None:
        with self._together():
            self.board.ink.change("dark" if message.get("theme") == "dark" else "light")

    def _do_run(self, message: dict[str, Any]) -> None:
        self._start(str(message.get("model") or ""), str(message.get("prompt") or ""))

    def _do_cancel(self, message: dict[str, Any]) -> None:
        if self.job is not None:
            self.job.cancel()

    def _do_select(self, message: dict[str, Any]) -> None:
        changes: dict[str, Any] = {
            name: whole(message[name], getattr(self.chosen, name))
            for name in ("block", "token", "head")
            if name in message
        }
        for name, allowed in (("pattern", _PATTERNS), ("router", _ROUTERS)):
            if message.get(name) in allowed:
                changes[name] = message[name]
        if "part" in message:
            changes["part"] = str(message["part"] or "")
        if message.get("tab") in TABS:
            self.tab = message["tab"]
        self.chosen = self.chosen.moved(**changes)
        self._show(message.get("seq"))

    def _do_intervene(self, message: dict[str, Any]) -> None:
        """Take over the page's list of switches, then run what is switched on."""
        rows = message.get("list")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            return None
        if self._loading and self.run is not None and self._loading != self.run.origin.source:
            return self._keep(
                "Another model is being loaded: interventions can be made once it is here, or after Cancel."
            )
        listed = []
        for row in rows:
            one = Intervention(
                str(row.get("kind")),
                whole(row.get("layer"), -1),
                whole(row.get("index"), -1),
                str(row.get("host") or ""),
            )
            if (problem := impossible(self.run, one)) is not None:
                return self._keep(problem)
            listed.append((one, bool(row.get("on"))))
        self.interventions = listed
        self._tell({"interventions": self._intervention_words()})
        self._intervene()

    def _keep(self, notice: str) -> None:
        """Refuse a list of switches: say why, and let the page show the ones in force."""
        self._tell({"notice": notice, "interventions": self._intervention_words()})

    def _do_shown(self, message: dict[str, Any]) -> None:
        """Let the panels show the run with or without the interventions."""
        if self.run is not None and self.other is not None:
            wanted = self.other if message.get("shown") == "after" else self.other.baseline
            if wanted.number != self.run.number:
                self.run = wanted
                self._show(message.get("seq"))

    # -- running models -----------------------------------------------------

    def _start(self, source: str, prompt: str | None) -> None:
        """Load and run; a missing prompt is the specimen's own."""

        def work(job: Job) -> Ran:
            store = self.services.store
            job.stage(f"Loading {shown_source(source)}")
            model = store.model(source)
            run = store.run(source, default_prompt(model) if prompt is None else prompt, (), job)
            return Ran(model, run, self.services.diagrams(model), store.decoder(source))

        self._submit("Waiting for the worker", work, self._ran)
        self._loading = source

    def _ran(self, ran: Ran) -> None:
        if self.run is not None:
            if self.run.origin.source != ran.run.origin.source:
                # Switches and places are those of the model that was shown.
                self.interventions, self.chosen = [], Selection()
            self.chosen = self.chosen.moved(token=-1)
        if self.run is None and not self._asked:
            self.tab = first_tab(ran.run)
        self.run, self.other, self._decode = ran.run, None, ran.decode
        self.board.on_them.clear()
        self._tell(
            {
                "run": run_words(ran.model, ran.run),
                "diagram": ran.diagram,
                "notice": None,
                "interventions": self._intervention_words(),
            }
        )
        if any(on for _, on in self.interventions):
            self._intervene()
        self._show(None)

    def _intervene(self) -> None:
        """Run what is switched on; with nothing on, show the plain run again."""
        active = tuple(one for one, on in self.interventions if on)
        if self.run is None:
            return None
        base = self.run.baseline
        if not active:
            self.run, self.other = base, None
            return self._show(None)
        origin = base.origin
        self._submit(
            "Waiting for the worker",
            lambda job: self.services.store.run(origin.source, origin.prompt, active, job),
            self._intervened,
        )

    def _intervened(self, run: Run) -> None:
        if self.run is not None and self.run.number != self.run.baseline.number:
            self.run = run  # the panels show what the interventions made, and go on doing so
        self.other = run
        self._show(None)

    def _submit(self, title: str, work: Callable[[Job], Any], then: Callable[[Any], None]) -> None:
        """Queue a job for this session; an earlier one that is not done is cancelled."""
        if self.job is not None:
            self.job.cancel()
        self._loading = ""
        job = Job(
            title, work, lambda job: self._post(lambda: self._finished(job, then)), self._moved
        )
        self.job = job
        self._moved(job)
        self.services.worker.submit(job)

    def _moved(self, job: Job) -> None:
        self._post(
            lambda: (
                self._tell({"job": {"title": job.title, "share": job.share}})
                if job is self.job
                else None
            )
        )

    def _finished(self, job: Job, then: Callable[[Any], None]) -> None:
        if job is not self.job or self._closed:
            return
        self.job, self._loading = None, ""
        said: dict[str, Any] = {"job": None}
        if job.error is not None:
            said["notice"] = sentence(job.error)
        elif job.cancelled:
            said["notice"] = "Cancelled; what is shown is the last finished run."
        self._tell(said)
        if job.error is None and not job.cancelled:
            then(job.result)

    # -- showing ------------------------------------------------------------

    def _show(self, seq: int | None) -> None:
        """Bring the page to the current selection: pictures first made aside, then put up in one go."""
        if self.run is None:
            return
        self.chosen = clamped(self.run, self.chosen)
        self._newest += 1
        filled = self.services.store.filled
        turn, run, chosen, tab = self._newest, filled(self.run), self.chosen, self.tab
        other = None if self.other is None else filled(self.other)
        # The diagram need not wait for pictures.
        self._tell({"marks": diagram_words(run, chosen), "marked": seq})
        # What is in view is read here: figures belong to this thread.
        cards = [
            (card, self.board.zoom_of(card)) for card in self.board.stale(tab, run, other, chosen)
        ]

        def prepare() -> None:
            if turn != self._newest:
                return  # a newer selection is waiting behind this one
            looked = [look(card, seen(card, run, other), chosen, zoom) for card, zoom in cards]
            for one in looked:
                self.board.make(one)
            texts = self._texts(run, other, chosen, tab)
            self._post(lambda: self._put(turn, seq, (run, other), chosen, tab, looked, texts))

        self._aside(prepare)

    def _put(
        self,
        turn: int,
        seq: int | None,
        runs: tuple[Run, Run | None],
        chosen: Selection,
        tab: str,
        looked: list[RenderedCard],
        texts: dict[str, Any],
    ) -> None:
        """Back on the event loop: pictures, dashed lines and words in one go."""
        if self._closed or turn != self._newest:
            return
        with self._together():
            cards = {one.card.name: self.board.put(one, chosen) for one in looked}
            self.board.follow(tab, chosen)
            self._send(
                {
                    "seq": seq,
                    "cards": cards,
                    **texts,
                    "tab": tab,
                    "status": [f"loop at most {1000 * self.services.lateness.worst:.0f} ms late"],
                    "selection": {
                        name: getattr(chosen, name)
                        for name in ("block", "token", "head", "pattern", "router", "part")
                    },
                }
            )
        self._fetch_missing(*runs, chosen)

    def _redraw(self, name: str) -> None:
        """After a zoom: the exact cells of the window that is now in view."""
        self.board.on_them.pop(name, None)
        self._show(None)

    def _texts(self, run: Run, other: Run | None, chosen: Selection, tab: str) -> dict[str, Any]:
        """The words of the page that follow the selection."""
        texts = {
            "compare": compare_words(run.baseline, other, chosen, self._decode),
            "shown": "after" if other is not None and run.number == other.number else "before",
        }
        if tab == "router":
            texts["router"] = router_words(run, chosen)
        if tab == "attention":
            texts["attention"] = attention_words(run, chosen)
        if tab == "tensor" and chosen.part:
            texts["part"] = part_words(run, chosen)
        return texts

    def _fetch_missing(self, run: Run, other: Run | None, chosen: Selection) -> None:
        """Record what is looked at and was left out of the run; first the logits, which need no forward."""
        store = self.services.store
        if self.job is not None:
            return None
        for one in filter(None, (run.baseline, other)):
            if one.lacks_logits(chosen.token):
                return self._submit(
                    "Waiting for the worker",
                    lambda job: store.logits(one, chosen.token, job),
                    lambda _: self._show(None),
                )
        missing = [place for place in looked_at(run, chosen, self.tab) if run.askable(*place)]
        if missing:
            self._submit(
                "Waiting for the worker", lambda job: store.part(run, missing, job), self._recorded
            )

    def _recorded(self, _: None) -> None:
        self.board.on_them.clear()
        self._show(None)

    def _aside(self, work: Callable[[], None]) -> None:
        """Run pure work in the session's own thread, logging what goes wrong."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                log.exception("making a picture failed")
                text = sentence(error)
                self._post(lambda: self._tell({"notice": text}))

        if not self._closed:
            self._pictures.submit(guarded)

    # -- the figures --------------------------------------------------------

    def _wire(self, name: str, figure: Any) -> None:
        """Listen to what is done on a figure that has come onto the page."""
        if isinstance(figure, MosaicFigure):
            figure.on_tap(lambda x, y: self._tapped_tile(name, x, y))
        elif isinstance(figure, CellFigure):
            figure.window_changed = lambda: self._redraw(name)
            figure.on_tap(lambda x, y: self._tapped_cell(name, x, y))

    def _tapped_tile(self, name: str, x: float, y: float) -> None:
        drawn = self.board.figures[name].drawn
        tile = drawn.tile_at(x, y) if drawn is not None else None
        if tile is not None:
            self._do_select({"head": tile})

    def _tapped_cell(self, name: str, x: float, y: float) -> None:
        """A click on a cell selects its token (of the rows where both axes are tokens), and its block or head."""
        column, row = round(x), round(y)
        changes = {
            "router_grid": {"token": row},
            "attention_one": {"token": row},
            "state_one": {"token": row},
            "router_load": {"block": row},
            "state_kept": {"token": column, "head": row},
            "state_written": {"token": column, "head": row},
            "stream_addends": {"token": column},
            "stream_norms": {"token": column},
        }.get(name)
        if changes is not None:
            self._do_select(changes)

    def _intervention_words(self) -> list[dict[str, Any]]:
        return [{**asdict(one), "on": on, "words": one.words} for one, on in self.interventions]

    def _tell(self, message: dict[str, Any]) -> None:
        if not self._closed:
            self._send(message)

    def close(self) -> None:
        """The page is gone: stop what runs for it."""
        self._closed = True
        if self.job is not None:
            self.job.cancel()
        self._pictures.shutdown(wait=False, cancel_futures=True)
