"""A limit on the processor time that a stretch of code takes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OutOfTime(BaseException):
    """Raised by `processor_time_limit`; no Exception, so that code which catches those and goes
    on still stops.
    """


@contextmanager
def processor_time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime once the block has used ``seconds`` of processor time; for the main thread
    alone.
    """

    def stop(signum: int, frame: Any) -> None:
        raise OutOfTime(f"it took more than {seconds:g} seconds of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
