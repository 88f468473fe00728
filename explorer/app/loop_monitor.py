"""How late the server's event loop runs, which people notice as a page that does not answer."""

from __future__ import annotations

import asyncio
import time
from collections import deque

#: Seconds between looks, and how many looks the worst is taken over (half a minute).
_EVERY, _KEPT = 0.1, 300


class LoopLagMonitor:
    """Schedules a call every tenth of a second and notes how late it came."""

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=_KEPT)
        self._due = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch ``loop`` for as long as it runs."""
        self._due = time.perf_counter() + _EVERY
        loop.call_later(_EVERY, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._late.append(max(0.0, time.perf_counter() - self._due))
        self.start(loop)

    @property
    def worst(self) -> float:
        """The longest delay of the last half minute, in seconds."""
        return max(self._late, default=0.0)
