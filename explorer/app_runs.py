"""Runs: what one forward of a prompt left behind, and what of it is worth recording.

A `Run` is a recording with what was asked for later (one value of one block at a
time) beside it; views read it like a recording.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from explorer import vocabulary
from explorer.widgets.snippets import Origin

#: What one run may hold, in bytes. Patterns of many blocks over a long prompt would
#: be far above it; those are then recorded one block at a time, when looked at.
BUDGET = 1_500_000_000

#: Never recorded with a run: one matrix per token, or wide and rarely looked at.
_ON_DEMAND = {"states", "expert_outputs", "lm_head_output"}
_SQUARE = {"Pattern", "StatePattern"}
_STATE = "state is one matrix per head and token: the State panel draws that of the chosen head after the chosen token."

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Plan:
    """What to record: value names for all blocks, and those left to be asked for block by block."""

    names: tuple[str, ...]
    later: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Wanted:
    """One value a model can give: its qualified name, whether it grows with the square of the prompt, its size."""

    name: str
    square: bool
    bytes: int


def wanted(model: Any, tokens: int) -> list[Wanted]:
    """Everything the model can give for a prompt of ``tokens`` tokens, with what it would take in float32."""
    found = []
    for row in model.support():
        layers = [None] * row.available if row.host == "model" else list(row.layers)
        if not layers or row.name in _ON_DEMAND | {"state"}:
            continue
        square = row.value.layout in _SQUARE
        count = sum(_elements(model, row.value, layer, tokens) for layer in layers)
        found.append(Wanted(f"{row.host}.{row.name}", square, 4 * count))
    return found


def _elements(model: Any, value: vocabulary.Value, layer: int | None, tokens: int) -> int:
    """About how many numbers a value holds; an axis whose size nothing states counts as the stream's width."""
    sizes = model.sizes
    if layer is not None:
        sizes = sizes | model.anatomy.block(layer).hosts[value.host].sizes
    count = 1
    for axis in value.axes:
        if axis in vocabulary.CALL_AXES:
            count *= 1 if axis == "batch" else tokens
        else:
            count *= sizes.get(axis, model.hidden_size)
    return count


def plan(values: Iterable[Wanted], budget: int = BUDGET) -> Plan:
    """Record everything where it fits; else what grows with the square of the prompt only when looked at."""
    rows = list(values)
    total = sum(row.bytes for row in rows)
    now = [row for row in rows if total <= budget or not row.square]
    return Plan(
        tuple(row.name for row in now), tuple(row.name for row in rows if row not in now),
        sum(row.bytes for row in now),
    )


Key = tuple[str, int | None]


def left_out(model: Any, later: Iterable[str]) -> tuple[frozenset[Key], dict[Key, str]]:
    """What may still be asked of a run that left ``later`` out, and why the model has not the rest.

    Both by value and block, as a recording knows them: a value is asked for only where the model has it.
    """
    asked, reasons = set(), {}
    for row in model.support():
        layers = [None] * row.available if row.host == "model" else list(row.layers)
        reasons |= {(row.value.key, layer): reason for layer, reason in row.reasons.items()}
        if row.name == "state":
            reasons |= {(row.value.key, layer): _STATE for layer in layers}
        elif row.name in _ON_DEMAND or f"{row.host}.{row.name}" in later:
            asked |= {(row.value.key, layer) for layer in layers}
    return frozenset(asked), reasons


@dataclass
class Run:
    """One recorded forward. ``baseline`` is the run without interventions (itself where there are none).

    ``later`` is what was left out and may be asked for, ``reasons`` why the model has not the rest.
    """

    origin: Origin
    recording: Any
    later: frozenset[Key] = frozenset()
    reasons: dict[Key, str] = field(default_factory=dict)
    norms: dict[int, np.ndarray] = field(default_factory=dict)
    parts: dict[tuple[str, int | None], torch.Tensor] = field(default_factory=dict)
    baseline: "Run" = None  # type: ignore[assignment]  set below
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        self.baseline = self.baseline or self

    @property
    def tokens(self) -> list[str]:
        return self.recording.tokens

    @property
    def kinds(self) -> list[str]:
        return self.recording.kinds

    @property
    def num_layers(self) -> int:
        return self.recording.num_layers

    @property
    def bytes(self) -> int:
        """What the run holds beside its baseline."""
        parts = (part for part in self.parts.values() if isinstance(part, torch.Tensor))
        return self.recording.bytes + sum(part.numel() * part.element_size() for part in parts)

    def __contains__(self, key: Any) -> bool:
        return key in self.recording or self._key(key) in self.parts

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.parts[self._key(key)] if self._key(key) in self.parts else self.recording[key]

    def _key(self, key: str | Key) -> Key:
        return self.recording.key(*(key if isinstance(key, tuple) else (key, None)))

    def why(self, name: str, layer: int | None = None) -> str:
        """Why a value is not here: the model's own reason where it has it nowhere in this block."""
        return self.reasons.get(self._key((name, layer))) or self.recording.why(name, layer)

    def add(self, key: str, layer: int | None, tensor: torch.Tensor, keep: int = 4) -> None:
        """Keep a value asked for later; the oldest of more than ``keep`` go."""
        self.parts[self._key((key, layer))] = tensor
        while len(self.parts) > keep:
            self.parts.pop(next(iter(self.parts)))

    def askable(self, name: str, layer: int | None) -> bool:
        """Whether a value that is not here was left to be asked for (rather than unavailable)."""
        return (name, layer) not in self and self._key((name, layer)) in self.later
