"""What is being looked at, and what a view needs of a recording."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from explorer import vocabulary
from explorer.recurrence.replay import Replay
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


class Replayed(Recorded, Protocol):
    """A recording that can run its recurrence again, from the state its forward began with."""

    def replay(self, layer: int) -> Replay: ...


@dataclass(frozen=True)
class Selection:
    """Block, token and head under the eye, and what each panel is set to show."""

    block: int = 0
    token: int = 0
    head: int = 0
    pattern: str = "probabilities"
    router: str = "scores"
    part: str = ""

    def moved(self, **changes: Any) -> Selection:
        return replace(self, **changes)


def array(rec: Recorded, name: str, layer: int | None) -> np.ndarray:
    """A recorded value as float32 (integers stay integers), first row of the batch.

    Values with a batch axis lose it: ``[batch seq num_experts]`` gives ``[seq num_experts]``.
    """
    tensor = rec[name, layer] if layer is not None else rec[name]
    return plain(tensor[0])


def plain(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a numpy array that pictures are made of."""
    return (tensor.float() if tensor.is_floating_point() else tensor).detach().cpu().numpy()


def missing(rec: Recorded, name: str, layer: int | None) -> Refusal:
    """The recording's own reason why ``name`` is not there on ``layer``, as a sentence."""
    reason = rec.why(name, layer)
    return Refusal(f"{reason[0].upper()}{reason[1:].rstrip('.')}.")


def token_axis(rec: Recorded, title: str = "token") -> Axis:
    return Axis(title, axis_labels(rec.tokens))


def numbered_axis(title: str, count: int) -> Axis:
    return Axis(title, tuple(str(number) for number in range(count)))


def attends(rec: Recorded, layer: int) -> bool:
    """Whether block ``layer`` has softmax attention."""
    return "self_attn" in rec.mixers[layer]


def recurrence_of(rec: Recorded, layer: int) -> str | None:
    """The host of the recurrence of block ``layer``, None where it has none."""
    return next((mixer for mixer in rec.mixers[layer] if mixer in vocabulary.RECURRENT), None)


def mixer_words(rec: Recorded, layer: int) -> str:
    """What mixes positions in block ``layer``, as the end of a sentence."""
    meanings = [vocabulary.HOSTS[mixer].meaning for mixer in rec.mixers[layer]]
    return (
        f"its mixer is {' beside '.join(meanings)}" if meanings else "nothing in it mixes positions"
    )
