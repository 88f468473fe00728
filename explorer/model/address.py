"""How a value is reached in a running forward, and how the engine carries what has no rows of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from explorer.discovery.hook_point import HookPoint
from explorer.recurrence.replay import Replay
from explorer.vocabulary import MIXERS

#: The name the recurrent kernel's arguments are served under once more when the kernel has run.
REPLAY = "@replay"


@dataclass(frozen=True)
class BatchShared:
    """A value that all rows of a batch share, as the engine carries it: it hands each block of a trace its own rows of tensors."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class ValueAddress:
    """How one value is reached: the location that names the moment, and its place.

    ``native`` locations are the engine's own (a module's input or output) and
    carry what the module got or returned; others carry a dict of values by name.
    """

    location: str
    place: HookPoint
    native: bool


def unwrap(value: Any) -> Any:
    """A value as it is, whether or not the engine carries it whole."""
    return value.tensor if isinstance(value, BatchShared) else value


def replay_of(host: str, kept: dict[str, Any]) -> Replay:
    """The recurrence of a call from what its kernel was given."""
    return Replay(host, {name: unwrap(kept.get(name)) for name in MIXERS[host].replayed})
