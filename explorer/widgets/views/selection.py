"""What is selected on the page, and what a view needs of a recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from explorer import vocabulary
from explorer.widgets.views.labels import axis_labels
from explorer.widgets.views.picture import Axis, Refusal


class Recorded(Protocol):
    """The part of a recording that views read."""

    @property
    def tokens(self) -> list[str]: ...
    @property
    def mixers(self) -> list[tuple[str, ...]]: ...
    @property
    def num_layers(self) -> int: ...
    def __getitem__(self, key: Any) -> torch.Tensor: ...
    def __contains__(self, key: Any) -> bool: ...
    def why(self, name: str, layer: int | None) -> str: ...
    def addends(self, layer: int) -> tuple[str, ...]: ...


class Replay(Protocol):
    """The part of a replayed recurrence that views read, `explorer.recurrence.replay.Replay`."""

    @property
    def host(self) -> str: ...
    @property
    def given(self) -> Mapping[str, torch.Tensor | None]: ...
    @property
    def fresh(self) -> bool: ...
    def state_at(self, token: int, heads: Sequence[int] | None = None) -> torch.Tensor: ...
    def one_channel(self, channel: int) -> Replay: ...
    def state_attention(self) -> torch.Tensor: ...


class Replayable(Recorded, Protocol):
    """A recording that can run its recurrence again, from the state its forward began with."""

    def replay(self, layer: int) -> Replay: ...


class MeasuresStates(Protocol):
    """A recording that can replay all states of a block and measure them."""

    def state_norms(self, layer: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Selection:
    """The selected block, token, head and value (``part``), and what each panel is set to show."""

    block: int = 0
    token: int = 0
    head: int = 0
    pattern: str = "probabilities"
    router: str = "scores"
    part: str = ""

    def moved(self, **changes: Any) -> Selection:
        return replace(self, **changes)


def first_row(rec: Recorded, name: str, layer: int | None) -> np.ndarray:
    """A recorded value as float32 (integers stay integers), first row of the batch.

    Values with a batch axis lose it: ``[batch seq num_experts]`` gives ``[seq num_experts]``.
    """
    tensor = rec[name, layer] if layer is not None else rec[name]
    return as_array(tensor[0])


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a numpy array; numbers with a fraction become float32."""
    return (tensor.float() if tensor.is_floating_point() else tensor).detach().cpu().numpy()


def unavailable(rec: Recorded, name: str, layer: int | None) -> Refusal:
    """The recording's reason why it has no ``name`` on ``layer``, as a sentence."""
    reason = rec.why(name, layer)
    return Refusal(f"{reason[0].upper()}{reason[1:].rstrip('.')}.")


def token_axis(rec: Recorded, title: str = "token") -> Axis:
    return Axis(title, axis_labels(rec.tokens))


def numbered_axis(title: str, count: int) -> Axis:
    return Axis(title, tuple(str(number) for number in range(count)))


def has_attention(rec: Recorded, layer: int) -> bool:
    """Whether block ``layer`` has softmax attention."""
    return "self_attn" in rec.mixers[layer]


def recurrence_of(rec: Recorded, layer: int) -> str | None:
    """The host of the recurrence of block ``layer``, None where it has none."""
    return next((mixer for mixer in rec.mixers[layer] if mixer in vocabulary.RECURRENT), None)


def recurrent_host(rec: Recorded, layer: int) -> str:
    """The host of the recurrence of block ``layer``; raises ValueError where it has none."""
    host = recurrence_of(rec, layer)
    if host is None:
        raise ValueError(f"Block {layer} has no recurrence.")
    return host


def describe_mixers(rec: Recorded, layer: int) -> str:
    """What mixes positions in block ``layer``, as the end of a sentence."""
    meanings = [vocabulary.HOSTS[mixer].meaning for mixer in rec.mixers[layer]]
    return (
        f"its mixer is {' beside '.join(meanings)}" if meanings else "nothing in it mixes positions"
    )
