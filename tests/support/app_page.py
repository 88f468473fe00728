"""A session of the explorer whose page is a test: no browser, no server."""

from __future__ import annotations

import json
import threading
import time
from contextlib import nullcontext

from explorer import load
from explorer.app.cards import CardBoard
from explorer.app.display import Services
from explorer.app.figure_base import FigureTheme
from explorer.app.loop_monitor import LoopLagMonitor
from explorer.app.session import Session
from explorer.app.store import Store
from explorer.app.worker import Worker

HYBRID = "specimen:qwen3_5_moe_text"
PATIENCE = 60


class Page:
    """A session whose page is this object: what it was sent, and the loop it runs on."""

    def __init__(
        self, source: str = HYBRID, prompt: str | None = "In the beginning God", loads=load
    ) -> None:
        self.sent, self.waiting, self.lock = [], [], threading.Lock()
        services = Services(
            Worker(),
            Store(loads),
            lambda model: {"key": model.label, "html": ""},
            LoopLagMonitor(),
            source,
            prompt,
        )
        self.session = Session(
            services, CardBoard(FigureTheme()), self._sent, self._post, nullcontext
        )

    def _sent(self, message: dict) -> None:
        json.dumps(message)  # everything a page is sent is plain data
        self.sent.append(message)

    def _post(self, work) -> None:
        with self.lock:
            self.waiting.append(work)

    def say(self, **message) -> None:
        self.session.receive(message)

    def wait(self, until):
        """Run what is posted, as an event loop would, until ``until()`` is true."""
        end = time.monotonic() + PATIENCE
        while not (found := until()):
            assert time.monotonic() < end, self.sent[-3:]
            with self.lock:
                ready, self.waiting = self.waiting, []
            for work in ready:
                work()
            time.sleep(0.002)
        return found

    def last(self, key: str):
        return next((message[key] for message in reversed(self.sent) if key in message), None)

    @property
    def cards(self) -> dict:
        found: dict = {}
        for message in self.sent:
            found.update(message.get("cards") or {})
        return found

    def answered(self, seq: int):
        return self.wait(
            lambda: any(
                message.get("seq") == seq and "selection" in message for message in self.sent
            )
        )

    def start(self, **view) -> Page:
        self.say(do="hello", view=view)
        self.wait(lambda: self.last("selection"))
        return self
