"""The errors a loaded model answers with when it cannot do what was asked."""

from __future__ import annotations

from explorer.engine.nnsight_api import OutOfOrderError


class Unavailable(ValueError):
    """The value cannot be had here; the message gives the reason and what would change it."""


class OutsideTrace(ValueError):
    """A value of the forward pass was asked for with no forward running."""


class AlreadyPassed(OutOfOrderError):
    """The forward had already gone past a value when it was asked for."""


class PromptError(ValueError):
    """The prompt cannot be run; the message says what to do."""


class Cancelled(Exception):
    """The run was asked to stop before it finished."""


class NotRecorded(KeyError):
    """A recording does not hold what was asked of it; the message gives the reason."""

    def __str__(self) -> str:
        return self.args[0]
