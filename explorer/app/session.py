"""One session: the requests of one page, and the jobs they start.

The page sends small messages (``{"do": "select", "block": 3, "seq": 7}``) and gets messages back;
a message repeats the ``seq`` of the request it answers, so the page knows when what it asked for is
on the screen. Clicks on figures come from Bokeh instead, through `explorer.app.display`, and end in
`Session.select`. Nothing here waits: models run in the worker's thread, pictures are made in a
thread of the page, and both come back to the event loop through ``post``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from explorer.app.cards import CardBoard
from explorer.app.display import Display, Message, Services
from explorer.app.messages import first_tab, run_summary
from explorer.app.requests import (
    Cancel,
    Hello,
    Intervene,
    Request,
    RunPrompt,
    Select,
    SetTheme,
    ShowRun,
    TooMuch,
    error_sentence,
    intervention_problem,
    parse,
    values_shown,
)
from explorer.app.runs import Run
from explorer.app.store import ANY_PROMPT, default_prompt, shown_source, source_choices
from explorer.app.worker import Job
from explorer.widgets.views.code import Intervention
from explorer.widgets.views.selection import Selection


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run passes to the page."""

    model: Any
    run: Run
    diagram: dict[str, Any]
    decode: Callable[[int], str]


class Session(Display):
    """The controller of one page: acts on its requests and queues jobs for the model worker."""

    def __init__(
        self,
        services: Services,
        board: CardBoard,
        send: Callable[[Message], None],
        post: Callable[[Callable[[], None]], None],
        batched: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(services, board, send, post, batched)
        self._tab_requested = False
        self.interventions: list[tuple[Intervention, bool]] = []
        self._loading = ""
        self.job: Job | None = None
        self._handlers: dict[type[Request], Callable[[Any], None]] = {
            Hello: self._on_hello,
            SetTheme: lambda request: self._on_theme(request.theme),
            RunPrompt: lambda request: self._start(request.model, request.prompt),
            Cancel: lambda request: self._cancel(),
            Select: self._on_select,
            Intervene: self._on_intervene,
            ShowRun: self._on_show_run,
            TooMuch: lambda request: self._refuse_switches(request.sentence),
        }

    # -- requests of the page -----------------------------------------------

    def receive(self, message: object) -> None:
        """Act on one message of the page; ignore one that is no request."""
        request = parse(message)
        if request is not None:
            self._handlers[type(request)](request)

    def _on_hello(self, hello: Hello) -> None:
        self.board.figure_theme.change(hello.theme)
        self._tab_requested = hello.tab is not None
        self.tab = hello.tab or "router"
        self.selection = hello.selection
        default = self.services.default_source
        source = hello.model or default
        prompt = hello.prompt or (self.services.default_prompt if source == default else None)
        answer = {"models": source_choices(), "source": source, "prompt": prompt}
        if not self._may_open(source):
            # Anybody can send a link: the model it names is loaded once the person here presses
            # Run.
            notice = f"The address of this page names the model {source}: press Run to load it."
            self.reply({"hello": answer | {"prompt": prompt or ANY_PROMPT}, "notice": notice})
            return
        self.reply({"hello": answer})
        self._start(source, prompt)

    def _may_open(self, source: str) -> bool:
        """Return whether a page may load this model unasked: the command line's, a shipped or a
        loaded one.
        """
        shipped = {choice["source"] for choice in source_choices()}
        return (
            source == self.services.default_source
            or source in shipped
            or source in self.services.store.models
        )

    def _on_theme(self, theme: str) -> None:
        with self._batched():
            self.board.figure_theme.change(theme)

    def _cancel(self) -> None:
        if self.job is not None:
            self.job.cancel()

    def _on_select(self, request: Select) -> None:
        self.tab = request.tab or self.tab
        self.selection = self.selection.moved(**request.changes)
        self.refresh(request.seq)

    def select(self, changes: dict[str, int]) -> None:
        """Change the selection after a click on a figure."""
        self._on_select(Select(changes))

    def _on_intervene(self, request: Intervene) -> None:
        """Take over the page's list of switches, then run those that are on."""
        if self._loading and self.run is not None and self._loading != self.run.origin.source:
            self._refuse_switches(
                "Another model is being loaded: interventions can be made once it is here, "
                "or after Cancel."
            )
            return
        for one, _ in request.switches:
            if (problem := intervention_problem(self.run, one)) is not None:
                self._refuse_switches(problem)
                return
        self.interventions = list(request.switches)
        self.reply({"interventions": self._switches()})
        self._run_interventions()

    def _refuse_switches(self, notice: str) -> None:
        """Refuse a list of switches: say why, and let the page show those in force."""
        self.reply({"notice": notice, "interventions": self._switches()})

    def _switches(self) -> list[dict[str, Any]]:
        return [{**asdict(one), "on": on, "words": one.words} for one, on in self.interventions]

    def _on_show_run(self, request: ShowRun) -> None:
        """Let the panels show the run with or without the interventions."""
        if self.run is not None and self.other is not None:
            run = self.other if request.after else self.other.baseline
            if run.number != self.run.number:
                self.run = run
                self.refresh(request.seq)

    # -- running models -----------------------------------------------------

    def _start(self, source: str, prompt: str | None) -> None:
        """Queue loading a model and running a prompt (None: the model's default prompt)."""

        def work(job: Job) -> FinishedRun:
            store = self.services.store
            job.stage(f"Loading {shown_source(source)}")
            model = store.model(source)
            run = store.run(source, default_prompt(model) if prompt is None else prompt, (), job)
            return FinishedRun(model, run, self.services.diagrams(model), store.decoder(source))

        self._submit("Waiting for the worker", work, self._run_finished)
        self._loading = source

    def _run_finished(self, ran: FinishedRun) -> None:
        if self.run is not None:
            if self.run.origin.source != ran.run.origin.source:
                # Switches and places are those of the model that was shown.
                self.interventions, self.selection = [], Selection()
            self.selection = self.selection.moved(token=-1)
        if self.run is None and not self._tab_requested:
            self.tab = first_tab(ran.run)
        self.run, self.other, self._decode = ran.run, None, ran.decode
        self.board.shown_keys.clear()
        self.reply(
            {
                "run": run_summary(ran.model, ran.run),
                "diagram": ran.diagram,
                "notice": None,
                "interventions": self._switches(),
            }
        )
        if any(on for _, on in self.interventions):
            self._run_interventions()
        self.refresh(None)

    def _run_interventions(self) -> None:
        """Run what is switched on; with nothing on, show the plain run again."""
        active = tuple(one for one, on in self.interventions if on)
        if self.run is None:
            return
        base = self.run.baseline
        if not active:
            self.run, self.other = base, None
            self.refresh(None)
            return
        origin = base.origin
        self._submit(
            "Waiting for the worker",
            lambda job: self.services.store.run(origin.source, origin.prompt, active, job),
            self._intervention_finished,
        )

    def _intervention_finished(self, run: Run) -> None:
        if self.run is not None and self.run.number != self.run.baseline.number:
            self.run = run  # the panels show what the interventions made, and go on doing so
        self.other = run
        self.refresh(None)

    def _submit(self, title: str, work: Callable[[Job], Any], then: Callable[[Any], None]) -> None:
        """Queue a job for this page and cancel its earlier one."""
        if self.job is not None:
            self.job.cancel()
        self._loading = ""
        job = Job(
            title,
            work,
            lambda job: self._post(lambda: self._job_finished(job, then)),
            self._job_moved,
        )
        self.job = job
        self._job_moved(job)
        self.services.worker.submit(job)

    def _job_moved(self, job: Job) -> None:
        self._post(
            lambda: (
                self.reply({"job": {"title": job.title, "share": job.share}})
                if job is self.job
                else None
            )
        )

    def _job_finished(self, job: Job, then: Callable[[Any], None]) -> None:
        if job is not self.job or self._closed:
            return
        self.job, self._loading = None, ""
        message: dict[str, Any] = {"job": None}
        if job.error is not None:
            message["notice"] = error_sentence(job.error)
        elif job.cancelled:
            message["notice"] = "Cancelled; what is shown is the last finished run."
        self.reply(message)
        if job.error is None and not job.cancelled:
            then(job.result)

    def record_missing(self, run: Run, other: Run | None, selection: Selection) -> None:
        """Record deferred values that are looked at; logits first, which need no forward."""
        store = self.services.store
        if self.job is not None:
            return
        for one in filter(None, (run.baseline, other)):
            if one.needs_logits(selection.token):
                self._submit(
                    "Waiting for the worker",
                    functools.partial(store.logits, one, selection.token),
                    lambda _: self.refresh(None),
                )
                return
        missing = [
            key for key in values_shown(run, selection, self.tab) if run.can_be_recorded(*key)
        ]
        if missing:
            self._submit(
                "Waiting for the worker",
                lambda job: store.record_more(run, missing, job),
                self._values_recorded,
            )

    def _values_recorded(self, _: None) -> None:
        self.board.shown_keys.clear()
        self.refresh(None)

    def close(self) -> None:
        """The page is gone: stop what runs for it."""
        super().close()
        if self.job is not None:
            self.job.cancel()
