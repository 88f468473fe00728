"""Sinks: who gets what passes the taps of a running forward, and may hand back something else.

The engine's interleaver serves the blocks of a trace; `explorer.model.recording` records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class ModelBusy(ValueError):
    """The model is already running one trace or recording in this thread."""


class Observer(Protocol):
    """Where a tap's values go."""

    def begin(self, step: int, locations: Iterable[str]) -> None:
        """Called as each forward begins, with its number and every location it may reach."""

    def active(self) -> bool:
        """Whether anything is listening; taps pass values through when not."""

    def offer(self, location: str, make: Callable[[], Any]) -> Any:
        """Hand over what ``make`` makes, if it is wanted; return what to go on with, or None for no change."""


class TraceObserver:
    """The engine's interleaver as a sink: serves the blocks of a trace."""

    def __init__(self, interleaver: Any) -> None:
        self.interleaver = interleaver
        self.starts = dict(interleaver.counts)

    def begin(self, step: int, locations: Iterable[str]) -> None:
        """Count the visits an earlier forward left out, where a module was skipped: the engine
        tells one step from the next by counting, and must not take this one for that."""
        counts = self.interleaver.counts
        for location in locations if step else ():
            counts[location] = max(counts.get(location, 0), self.starts.get(location, 0) + step)

    def active(self) -> bool:
        return self.interleaver.interleaving and self.interleaver.busy

    def offer(self, location: str, make: Callable[[], Any]) -> Any:
        if location in self.interleaver.parked or location in self.interleaver.observers:
            value = make()
            changed = self.interleaver.handle(location, value)
            return None if changed is value else changed
        self.interleaver.handle(location, None)  # nobody waits; the visit still counts
        return None
