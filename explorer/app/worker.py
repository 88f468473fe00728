"""One thread that runs models: jobs wait in a queue, report progress, and can be cancelled.

A loaded model serves one thread at a time, and the server's event loop must never
wait for one, so everything that touches a model is a job here.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)


class Cancelled(Exception):
    """The job was cancelled before it was done."""


@dataclass
class Job:
    """One piece of work: ``work(job)`` runs in the worker's thread, then ``done(job)``.

    ``done`` and ``moved`` are called in the worker's thread and must pass results to the event
    loop themselves.
    Afterwards exactly one of ``result``, ``error`` and ``cancelled`` is set.
    """

    title: str
    work: Callable[[Job], Any]
    done: Callable[[Job], None]
    moved: Callable[[Job], None] = lambda job: None
    share: float | None = None
    result: Any = None
    error: BaseException | None = None
    cancelled: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Ask the job to stop at the next place where it can."""
        self._stop.set()

    def stopping(self) -> bool:
        return self._stop.is_set()

    def stage(self, title: str) -> None:
        """Name what the job is doing now; raises `Cancelled` when it should stop instead."""
        self.check()
        self.title, self.share = title, None
        self.moved(self)

    def progress(self, finished: int, total: int) -> None:
        """How far it is; raises nothing, so that a model may call it from anywhere."""
        self.share = finished / total if total else None
        self.moved(self)

    def check(self) -> None:
        if self.stopping():
            raise Cancelled


class Worker:
    """The thread and its queue."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="model worker", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Job:
        """Put a job at the end of the queue."""
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Stop after the jobs already queued."""
        self._jobs.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._one(job)

    def _one(self, job: Job) -> None:
        try:
            job.check()
            job.result = job.work(job)
        except Cancelled:
            job.cancelled = True
        except BaseException as error:
            # Not only Exception: a panic in a tokenizer's Rust code must not end the thread either.
            # Whatever is raised after a request to stop counts as cancelled.
            job.cancelled = job.stopping()
            job.error = None if job.cancelled else error
        try:
            job.done(job)
        except BaseException:
            log.exception("passing on the result of %r failed", job.title)
