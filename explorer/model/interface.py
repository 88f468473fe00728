"""What the rest of this package needs of a loaded model.

`LanguageModel` satisfies it. The modules it is made of (envoys, prompts, the recorder) depend on
this description instead of on the class, so that none of them imports what imports them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from transformers import PreTrainedModel

from explorer.discovery.anatomy import Anatomy
from explorer.model.host_taps import HostTaps
from explorer.model.snapshots import ChangeHistory
from explorer.model.support import Support
from explorer.model.taps import Taps
from explorer.vocabulary import Value


class TracedModel(Protocol):
    """What reading and writing values in a trace needs."""

    anatomy: Anatomy
    taps: Taps

    def reading_order(self, layer: int) -> list[str]:
        """Return the names of a block's values in the order the forward passes them."""
        ...


class PromptedModel(Protocol):
    """What checking a prompt needs."""

    anatomy: Anatomy
    tokenizer: Any
    #: How much padding on a side changes the logits of a text, as a share, once measured.
    padding_effects: dict[str, float]
    #: Whether a prompt longer than the model was made for has been warned of.
    warned_of_length: bool

    @property
    def hf(self) -> PreTrainedModel:
        """The transformers model."""
        ...


class RecordedModel(TracedModel, PromptedModel, Protocol):
    """What recording a forward needs."""

    lock: threading.RLock
    change_history: ChangeHistory

    @property
    def num_layers(self) -> int:
        """The number of blocks."""
        ...

    @property
    def mixers(self) -> Sequence[tuple[str, ...]]:
        """The hosts that mix positions on each block."""
        ...

    def layer_index(self, layer: int) -> int:
        """Return ``layer`` counted from 0; raise ValueError where there is no such block."""
        ...

    def support(self, layer: int | None = None) -> Support:
        """Return what can be served, and why not the rest."""
        ...

    def writable(self, name: str, layer: int | None) -> tuple[Value, HostTaps]:
        """Return the value to write and the taps of its host.

        Raise with the reason where it cannot be.
        """
        ...
