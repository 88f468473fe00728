"""Doing the same to many things, each in a process of its own that may take so long and so much memory.

The processes are forked from one server that has imported what all of them need, so
that each starts in a few milliseconds and none sees what another left behind.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

#: Seconds between two looks at how long and how large the processes are.
_EVERY = 0.1


@dataclass(frozen=True)
class Limits:
    """What one process may take: seconds by the clock, bytes of memory resident at a time."""

    seconds: float = 600.0
    memory: int = 6 << 30


@dataclass(frozen=True)
class Stopped:
    """A process that gave no result; ``reason`` says why, in words."""

    reason: str


class OutOfTime(BaseException):
    """Raised by `within`; no Exception, so that code which tries things and goes on when they fail does not go on after it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise OutOfTime once the block has kept this process's processor busy for ``seconds``; for a main thread alone."""

    def ring(signum: int, frame: Any) -> None:
        raise OutOfTime(f"it took more than {seconds:g} seconds of processor time")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class _Running:
    """One process at work, and the end of the pipe its result comes through."""

    def __init__(
        self, context: Any, function: Callable[[str], Any], task: str, limits: Limits
    ) -> None:
        self.task, self.limits = task, limits
        self.results, sending = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_work, args=(function, task, sending, limits.seconds), daemon=True
        )
        self.process.start()  # returns when the process is there: the server's own start is not counted
        self.since = time.monotonic()
        sending.close()

    def outcome(self) -> Any:
        """The result, a `Stopped` where there will be none, or `_Running` itself while it goes on."""
        if self.results.poll():
            try:
                return self.results.recv()
            except EOFError:  # the pipe's other end is closed, and nothing was sent
                self.process.join()
                return Stopped(_death(self.process.exitcode))
        if time.monotonic() - self.since > self.limits.seconds:
            return Stopped(f"it took more than {self.limits.seconds:g} seconds")
        if _resident(self.process.pid) > self.limits.memory:
            return Stopped(
                f"it needed more than {self.limits.memory / (1 << 30):.3g} GiB of memory"
            )
        return self

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.results.close()


def each(
    function: Callable[[str], Any],
    tasks: Sequence[str],
    jobs: int,
    limits: Limits = Limits(),
    preload: Sequence[str] = (),
) -> Iterator[tuple[str, Any]]:
    """``(task, function(task))`` for every task, in the order they finish, ``jobs`` at a time.

    function: importable by name, its result picklable. preload: modules the server imports once.
    In place of a result there is a `Stopped` where the process died, took too long or grew too large, or where
    the function raised. When the caller stops looking (Ctrl-C included), what runs is killed.
    The memory is watched where the system has /proc.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preload])
    waiting, running = list(reversed(tasks)), []
    try:
        with _interrupts_held():  # the server inherits this, and Ctrl-C is the caller's alone
            from multiprocessing import forkserver

            forkserver.ensure_running()
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Running(context, function, waiting.pop(), limits))
            connection.wait([one.results for one in running], timeout=_EVERY)
            for one in list(running):
                found = one.outcome()
                if found is not one:
                    running.remove(one)
                    one.end()
                    yield one.task, found
    finally:
        for one in running:
            one.end()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(function: Callable[[str], Any], task: str, sending: Any, seconds: float) -> None:
    """What each process does; whatever it prints goes nowhere."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(quiet, stream)
    faulthandler.disable()
    # Should the parent die without ending this: no longer than it was given.
    limit = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    try:
        found = function(task)
    except Exception as error:
        found = Stopped(
            f"it raised {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
        )
    sending.send(found)
    sending.close()


def _death(code: int | None) -> str:
    """What became of a process that sent nothing."""
    if code is not None and code < 0:
        return f"it died of {signal.Signals(-code).name}"
    return f"it ended with exit code {code} and no result"


def _resident(pid: int | None) -> int:
    """Bytes of a process that are in memory, 0 where that cannot be looked up."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0
