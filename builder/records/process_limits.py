"""Call a function for many tasks, each in a process of its own with a limit on time and memory.

The processes are forked from one server that has imported what all of them need, so that each
starts in a few milliseconds and none sees what another left behind.
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
from typing import Any

import psutil

#: Seconds between two checks of the processes' time and memory.
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """What one process may use: seconds of wall time, and bytes of resident memory at any time."""

    seconds: float = 600.0
    memory: int = 6 << 30


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class NoResult:
    """Takes the place of the result of a process that gave none; ``reason`` is a clause such as "it
    died of SIGSEGV".
    """

    reason: str


class _Worker:
    """One running process and the end of the pipe that its result comes through."""

    def __init__(
        self, context: Any, function: Callable[[str], Any], task: str, limits: Limits
    ) -> None:
        self.task, self.limits = task, limits
        self.receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_run_task, args=(function, task, sender, limits.seconds), daemon=True
        )
        self.process.start()
        # Started after the server, whose own start is not counted.
        self.started = time.monotonic()
        sender.close()

    def poll(self) -> tuple[bool, Any]:
        """Return whether the process is done, and then its result, or a `NoResult` where there
        will be none.
        """
        if self.receiver.poll():
            try:
                return True, self.receiver.recv()
            except EOFError:  # the process closed the pipe without sending
                self.process.join()
                return True, NoResult(_exit_reason(self.process.exitcode))
        if time.monotonic() - self.started > self.limits.seconds:
            return True, NoResult(f"it took more than {self.limits.seconds:g} seconds")
        if _resident_bytes(self.process.pid) > self.limits.memory:
            limit = f"{self.limits.memory / (1 << 30):.3g} GiB"
            return True, NoResult(f"it needed more than {limit} of memory")
        return False, None

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.receiver.close()


def run_each(
    function: Callable[[str], Any],
    tasks: Sequence[str],
    jobs: int,
    limits: Limits = DEFAULT_LIMITS,
    preload: Sequence[str] = (),
) -> Iterator[tuple[str, Any]]:
    """Yield ``(task, function(task))`` for every task, in the order they finish, ``jobs`` at a
    time.

    function: importable by name, its result picklable. preload: modules that the server imports
    once. In place of a result there is a `NoResult` where the function raised, or where its process
    died or exceeded a limit. When the caller stops iterating (Ctrl-C included), running processes
    are killed.
    """
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preload])
    waiting = list(reversed(tasks))
    running: list[_Worker] = []
    try:
        with _interrupts_blocked():  # inherited by the server: Ctrl-C is for the caller alone
            forkserver.ensure_running()
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Worker(context, function, waiting.pop(), limits))
            connection.wait([worker.receiver for worker in running], timeout=_POLL_SECONDS)
            for worker in list(running):
                done, result = worker.poll()
                if done:
                    running.remove(worker)
                    worker.stop()
                    yield worker.task, result
    finally:
        for worker in running:
            worker.stop()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_task(function: Callable[[str], Any], task: str, sender: Any, seconds: float) -> None:
    """Run one task in its process and send the result; whatever it prints is discarded."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(devnull, stream)
    faulthandler.disable()
    # In case the parent dies without stopping this process.
    limit = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    try:
        result = function(task)
    except Exception as error:
        message = " ".join(str(error).split()) or "no message"
        result = NoResult(f"it raised {type(error).__name__}: {message}")
    sender.send(result)
    sender.close()


def _exit_reason(code: int | None) -> str:
    """Describe how a process ended that sent nothing."""
    if code is not None and code < 0:
        return f"it died of {signal.Signals(-code).name}"
    return f"it ended with exit code {code} and no result"


def _resident_bytes(pid: int | None) -> int:
    """Return a process's resident memory in bytes, 0 where it has ended."""
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
