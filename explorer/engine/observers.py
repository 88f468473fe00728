"""Observers: who gets the values that pass the taps of a running forward, and may return others.

`TraceObserver` serves the blocks of a trace; `explorer.model.recorder` has one that records.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from explorer.engine.nnsight_api import end_wait


class ModelBusy(ValueError):
    """The model is already running one trace or recording in this thread."""

    def __init__(self) -> None:
        super().__init__(
            "This model is in the middle of a trace; run another one before that block or after it."
        )


class Observer(Protocol):
    """Gets the values that pass a model's taps."""

    def begin_forward(
        self, step: int, locations: Iterable[str], left_out: Collection[str] = ()
    ) -> None:
        """Called as each forward begins.

        step: its number; locations: every one that a forward may reach; left_out: those of them
        that this one does not.
        """
        ...

    def is_active(self) -> bool:
        """Return whether anything is listening; taps pass values through when not."""
        ...

    def exchange(self, location: str, make: Callable[[], Any]) -> Any:
        """Get what ``make`` returns, if it is wanted.

        What it returns is gone on with; None is for no change.
        """
        ...


class TraceObserver:
    """Serves the blocks of a trace, through the engine's interleaver."""

    def __init__(self, interleaver: Any) -> None:
        self.interleaver = interleaver
        self._counts_before = dict(interleaver.counts)

    def begin_forward(
        self, step: int, locations: Iterable[str], left_out: Collection[str] = ()
    ) -> None:
        """Count the visits that an earlier forward left out, and end what waits for one in vain.

        The engine distinguishes steps by counting visits, and must not take this step for one in
        which a module was skipped. A block that waits for such a visit, or for one that this
        forward leaves out, is told so by the error the engine has for it.
        """
        counts = self.interleaver.counts
        for location in locations if step else ():
            counts[location] = max(
                counts.get(location, 0), self._counts_before.get(location, 0) + step
            )
        known = set(locations) if step else frozenset[str]()
        for mediator in self.interleaver.mediators:
            while (waiting := mediator.pending) is not None and waiting.provider in known:
                ahead = waiting.iteration - mediator.occurrence(waiting.provider)
                if ahead > 0 or (ahead == 0 and waiting.provider not in left_out):
                    break
                end_wait(mediator)
        self.interleaver._reindex_parked()

    def is_active(self) -> bool:
        return self.interleaver.interleaving and self.interleaver.busy

    def exchange(self, location: str, make: Callable[[], Any]) -> Any:
        if location in self.interleaver.parked or location in self.interleaver.observers:
            value = make()
            changed = self.interleaver.handle(location, value)
            return None if changed is value else changed
        self.interleaver.handle(location, None)  # nobody waits; the visit still counts
        return None
