"""Runs: what one forward of a prompt left behind, and which of its values are worth recording.

A `Run` is a recording with what is known beside it; views read it like a recording. Values that are
asked for afterwards (one value of one block at a time) are kept by the store and added to a copy of
the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from explorer import vocabulary
from explorer.recurrence.replay import Replay
from explorer.vocabulary import RecordWhen, key_of
from explorer.vocabulary.availability import Unavailability, most_informative
from explorer.vocabulary.formatting import size_in_bytes
from explorer.widgets.views import next_token as views_next
from explorer.widgets.views.code import Origin
from explorer.widgets.views.picture import Refusal

#: What one run may hold, in bytes. Patterns of many blocks over a long prompt would
#: be far above it; those are then recorded one block at a time, when looked at.
BUDGET = 2_000_000_000

#: What is recorded with a run; the rest is recorded when it is looked at.
_WITH_A_RUN = (RecordWhen.NEEDED, RecordWhen.FITTING)

Key = tuple[str, int | None]

_numbers = itertools.count(1)
_MISSING = Refusal("")


@dataclass(frozen=True)
class RecordingPlan:
    """What to record: value names for all blocks, and those deferred until they are looked at."""

    names: tuple[str, ...]
    deferred: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class RecordableValue:
    """One value a model can serve: its qualified name, its bytes, whether a run needs it."""

    name: str
    bytes: int
    needed: bool = False


class TooLong(ValueError):
    """A run that would not fit; the message says so in one sentence."""


def recordable_values(model: Any, tokens: int) -> list[RecordableValue]:
    """Return every value the model serves, with the bytes it takes in float32 for ``tokens``
    tokens.
    """
    found = []
    for row in model.support():
        layers = [None] * row.available if row.host == "model" else list(row.layers)
        if not layers or row.value.recorded not in _WITH_A_RUN:
            continue
        name = f"{row.host}.{row.name}"
        needed = row.value.recorded is RecordWhen.NEEDED or (
            name == "layers.layer_output" and logits_source(model)[0] == "layer_output"
        )
        found.append(
            RecordableValue(
                name, sum(value_bytes(model, row.value, layer, tokens) for layer in layers), needed
            )
        )
    return found


def logits_source(model: Any) -> Key:
    """Return the value that logits of single tokens are computed from: the head's input, if it is
    served.
    """
    plain = (
        model.anatomy.norm is not None
        and model.anatomy.head_is_last
        and model.anatomy.head_reads_norm
    )
    return ("final_norm_output", None) if plain else ("layer_output", model.num_layers - 1)


def value_bytes(model: Any, value: vocabulary.Value, layer: int | None, tokens: int) -> int:
    """Estimate the bytes of a value in float32; an unknown axis counts as ``hidden_size``."""
    sizes = model.sizes
    if layer is not None:
        sizes = sizes | model.anatomy.block(layer).hosts[value.host].sizes
    count = 4
    for axis in value.axes:
        if axis in vocabulary.CALL_AXES:
            count *= 1 if axis == "batch" else tokens
        else:
            count *= sizes.get(axis, model.hidden_size)
    return count


def plan_recording(values: Iterable[RecordableValue], budget: int | None = None) -> RecordingPlan:
    """Record everything that fits ``budget`` bytes; defer the largest values first.

    Raises TooLong where the values that every run needs are above the budget.
    """
    rows, deferred, budget = list(values), [], BUDGET if budget is None else budget
    total = sum(row.bytes for row in rows)
    for row in sorted((row for row in rows if not row.needed), key=lambda row: -row.bytes):
        if total <= budget:
            break
        deferred.append(row)
        total -= row.bytes
    if total > budget:
        raise TooLong(
            f"This run would take at least {size_in_bytes(total)}, above the limit of "
            f"{size_in_bytes(budget)} for one run: shorten the prompt."
        )
    return RecordingPlan(
        tuple(row.name for row in rows if row not in deferred),
        tuple(row.name for row in rows if row in deferred),
        total,
    )


def head_counts(model: Any) -> tuple[dict[str, int], ...]:
    """Return the number of heads (or channels with a state) of each mixer, block by block."""
    found = []
    for layer, mixers in enumerate(model.mixers):
        hosts = model.anatomy.block(layer).hosts
        found.append(
            {
                vocabulary.HOSTS[mixer].attribute: hosts[mixer].sizes[count]
                for mixer in mixers
                if (count := _counted(mixer))
            }
        )
    return tuple(found)


def _counted(mixer: str) -> str | None:
    """Return the axis of a mixer's heads or channels, None where it has neither."""
    outputs = vocabulary.BY_HOST[mixer].get("attention_head_outputs")
    return outputs and outputs.axes[2]


def deferred_values(model: Any, deferred: Iterable[str]) -> tuple[frozenset[Key], dict[Key, str]]:
    """Return what a run that deferred these names may still record, and why the model lacks the
    rest.

    Both are keyed by value and block, as a recording is.
    """
    asked: set[Key] = set()
    lacking: dict[Key, list[Unavailability]] = {}
    for row in model.support():
        layers = [None] * row.available if row.host == "model" else list(row.layers)
        for layer, reason in row.reasons.items():
            lacking.setdefault((row.value.key, layer), []).append(reason)
        if row.name != "state" and (
            row.value.recorded not in _WITH_A_RUN or f"{row.host}.{row.name}" in deferred
        ):
            asked |= {
                (key_of(row.value, () if layer is None else model.mixers[layer]), layer)
                for layer in layers
            }
    return frozenset(asked), {key: most_informative(reasons) for key, reasons in lacking.items()}


@dataclass(frozen=True, eq=False)
class Run:
    """One recorded forward, immutable: sessions and threads share it.

    ``heads`` counts each block's heads by mixer. ``deferred`` holds what was left out and may be
    asked for, ``reasons`` why the model lacks the rest, ``norms`` the replayed state norms [seq
    heads] by block. ``before`` is the run without interventions, None where there are none.
    ``extra`` holds what was recorded since, or why it cannot be, in a copy made for looking at it
    (`with_extra`).
    """

    origin: Origin
    recording: Any
    heads: tuple[Mapping[str, int], ...]
    deferred: frozenset[Key] = frozenset()
    reasons: Mapping[Key, str] = field(default_factory=dict)
    norms: Mapping[int, np.ndarray] = field(default_factory=dict)
    before: Run | None = None
    extra: Mapping[Key, Any] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def baseline(self) -> Run:
        """The run without interventions, itself where there are none."""
        return self if self.before is None else self.before

    @property
    def tokens(self) -> list[str]:
        return self.recording.tokens

    @property
    def mixers(self) -> list[tuple[str, ...]]:
        return self.recording.mixers

    @property
    def num_layers(self) -> int:
        return self.recording.num_layers

    @property
    def bytes(self) -> int:
        """Bytes the run holds beside its baseline."""
        return self.recording.bytes + sum(norms.nbytes for norms in self.norms.values())

    def with_extra(self, extra: Mapping[Key, Any], before: Run | None = None) -> Run:
        """Return the same run, under its number, with values recorded since."""
        return replace(self, extra=dict(extra), before=before)

    def __contains__(self, key: Any) -> bool:
        return key in self.recording or not isinstance(
            self.extra.get(self.key(key), _MISSING), Refusal
        )

    def __getitem__(self, key: Any) -> torch.Tensor:
        found = self.extra.get(self.key(key), _MISSING)
        return self.recording[key] if isinstance(found, Refusal) else found

    def key(self, key: str | Key) -> Key:
        """Return the name and block that a value is stored under."""
        return self.recording.key(*(key if isinstance(key, tuple) else (key, None)))

    def why(self, name: str, layer: int | None = None) -> str:
        """Return why a value is not here: the model's own reason where no such value exists in the
        block.
        """
        key = self.key((name, layer))
        if isinstance(found := self.extra.get(key), Refusal):
            return found.reason
        return self.reasons.get(key) or self.recording.why(name, layer)

    def can_be_recorded(self, name: str, layer: int | None) -> bool:
        """Return whether a value was deferred and may be recorded now."""
        key = self.key((name, layer))
        return key in self.deferred and key not in self.extra and key not in self.recording

    def addends(self, layer: int) -> tuple[str, ...]:
        return self.recording.addends(layer)

    def replay(self, layer: int) -> Replay:
        """Return what the recurrence of a block is replayed from."""
        return self.recording.replay(layer)

    def needs_logits(self, token: int) -> bool:
        """Return whether the logits of a token were left out and are still to be computed."""
        return "logits" not in self and (views_next.LOGITS_OF_TOKEN, token) not in self
