"""How a value is reached in a running forward, and how one without a batch axis is carried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from explorer.discovery.hook_point import HookPoint
from explorer.recurrence.replay import Replay
from explorer.vocabulary import MIXERS

#: The name under which the recurrent kernel's arguments are served again when the kernel has run.
REPLAY = "@replay"


@dataclass(frozen=True)
class BatchShared:
    """A value that all rows of a batch share.

    The engine passes each block of a trace its own rows of every tensor; a tensor in this class
    has no batch axis and reaches every block as it is.
    """

    tensor: torch.Tensor


@dataclass(frozen=True)
class ValueAddress:
    """How one value is reached: the location the engine knows it by, and its hook point.

    ``native`` locations are the engine's own (a module's input or output) and
    carry what the module got or returned; others carry a dict of values by name.
    """

    location: str
    hook_point: HookPoint
    native: bool


def unwrap(value: Any) -> Any:
    """Return a value itself, out of a `BatchShared` where it is in one."""
    return value.tensor if isinstance(value, BatchShared) else value


def replay_of(host: str, arguments: Mapping[str, Any]) -> Replay:
    """Return the recurrence of a call from the arguments that its kernel was given."""
    return Replay(host, {name: unwrap(arguments.get(name)) for name in MIXERS[host].replayed})
