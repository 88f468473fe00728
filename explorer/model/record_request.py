"""What a recording is asked for: values, blocks and edits, checked before the forward runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from explorer import vocabulary
from explorer.model.edits import Edit
from explorer.model.errors import Unavailable
from explorer.model.host_taps import HostTaps
from explorer.model.interface import RecordedModel
from explorer.model.recording import Key, abbreviated_repr, as_int
from explorer.vocabulary import RecordWhen, key_of
from explorer.vocabulary.availability import Unavailability, more_informative, most_informative
from explorer.vocabulary.formatting import numbered


@dataclass(frozen=True)
class RequestedValue:
    """A value to record: ``key`` is what the recording has it under."""

    value: vocabulary.Value
    key: Key
    taps: HostTaps


def request_values(
    model: RecordedModel, values: Iterable[str] | None, layers: Iterable[int] | None
) -> tuple[list[RequestedValue], dict[Key, Unavailability]]:
    """Return the values to record, and the reasons why others asked for are not there.

    Raises UnknownValue for a name the vocabulary does not have, ValueError for what is no
    list of names or of blocks, Unavailable where a named value is on none of the blocks.
    """
    names, blocks = _names(values), None if layers is None else _blocks(model, layers)
    named = None if names is None else [v for name in names for v in vocabulary.lookup(name)]
    requested: list[RequestedValue] = []
    missing: dict[Key, Unavailability] = {}
    for row in model.support():
        value = row.value
        if not _is_meant(value, named):
            continue
        for layer in (None,) if row.host == "model" else range(model.num_layers):
            if layer is not None and blocks is not None and layer not in blocks:
                continue
            if row.available and (layer is None or layer in row.layers):
                mixers = () if layer is None else model.mixers[layer]
                key = key_of(value, mixers), layer
                requested.append(RequestedValue(value, key, model.taps.hosts[row.host, layer]))
            else:
                # Several hosts may have a value of one name: the reason that says most counts.
                reason, key = row.reasons[layer], (value.key, layer)
                missing[key] = more_informative(missing.get(key, reason), reason)
    _check_found(model, names, blocks, requested)
    found = {(one.value.key, one.key[1]) for one in requested}
    return requested, {key: reason for key, reason in missing.items() if key not in found}


def _is_meant(value: vocabulary.Value, named: list[vocabulary.Value] | None) -> bool:
    """Return whether a value is among those named; without names, all but those to be named."""
    return value.recorded is not RecordWhen.NAMED if named is None else value in named


def _check_found(
    model: RecordedModel,
    names: list[str] | None,
    blocks: list[int] | None,
    requested: list[RequestedValue],
) -> None:
    """Raise Unavailable for a name none of whose values is on the blocks asked for."""
    for name in names or ():
        values = vocabulary.lookup(name)
        if any(one.value in values for one in requested):
            continue
        reasons = [
            reason
            for row in model.support()
            if row.value in values
            for layer, reason in row.reasons.items()
            if layer is None or blocks is None or layer in blocks
        ]
        raise Unavailable(
            f"{name} is unavailable on the blocks asked for: {most_informative(reasons)}."
        )


def _names(values: Any) -> list[str] | None:
    """Return what ``values`` asks for as a list; None for everything."""
    if values is None:
        return None
    try:
        names = [values] if isinstance(values, str) else list(values)
    except TypeError:
        names = [values]
    for name in names:
        if not isinstance(name, str):
            raise ValueError(
                'values is a list of value names, such as ["decays", "logits"]; '
                f"{abbreviated_repr(name)} is not one."
            )
    return names


def _blocks(model: RecordedModel, layers: Any) -> list[int]:
    """Return what ``layers`` asks for as block numbers."""
    try:
        given = [layers] if as_int(layers) is not None else list(layers)
    except TypeError:
        given = [layers]
    if not given:
        raise ValueError("layers is empty: name a block, or leave it out for all.")
    blocks: list[int] = []
    for layer in given:
        if (number := as_int(layer)) is None:
            raise ValueError(
                f"layers is a list of block numbers ({numbered('block', model.num_layers)}); "
                f"{abbreviated_repr(layer)} is not one."
            )
        blocks.append(number)
    return [model.layer_index(number) for number in blocks]


def check_edits(edits: Any) -> None:
    """Raise ValueError for what is no list of edits."""
    listed: Any = edits
    if not isinstance(edits, list | tuple):
        raise ValueError(
            "edits is a list of edits, such as [zero_head(0, 3)]; "
            f"{abbreviated_repr(edits)} is not one."
        )
    for edit in listed:
        if not isinstance(edit, Edit) or not callable(edit.change):
            raise ValueError(
                "An edit is an Edit, as zero_head(0, 3) makes one, with a function that changes "
                f"its value; {abbreviated_repr(edit)} is not one."
            )
        if edit.layer is not None and as_int(edit.layer) is None:
            raise ValueError(
                f"The edit of {edit.value} is on a block given by its number, or on None for the "
                f"model; {abbreviated_repr(edit.layer)} is neither."
            )
