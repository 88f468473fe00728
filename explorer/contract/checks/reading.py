"""Invariants of reading: layouts, agreement between the ways of reading, and refusals."""

from __future__ import annotations

from typing import Any

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest, ValueKey, attempt
from explorer.contract.registry import invariant
from explorer.model.errors import Unavailable
from explorer.vocabulary.availability import Unavailability

#: Layouts of integers; all others are floating-point.
_INTEGER_LAYOUTS = ("Tokens", "ExpertIndices")


@invariant(
    "values read",
    "Every value listed as available can be read on every block listed, each axis as long as the "
    "size of its name.",
    *vocabulary.HOSTS,
    shapes=True,
    form=True,
)
def values_read(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for row in subject.support:
        if row.host != host or not row.available or row.name == "state":
            continue
        compare.about(row.value)
        for layer in [None] if host == "model" else row.layers:
            name = row.name if host == "model" else f"{host}.{row.name}"
            if (name, layer) in subject.clean:
                _layout(subject, compare, (row.value, layer), subject.clean[name, layer])
            else:
                compare.holds(layer, False, f"{row.name}: {subject.clean.why(name, layer)}")


def _layout(subject: ModelUnderTest, compare: Comparisons, key: ValueKey, served: object) -> None:
    value, layer = key
    expected = tuple(subject.axis_length(key, axis) for axis in value.axes)
    if value.layout == "Size":
        compare.holds(layer, served == expected, f"{value.name} is {served}, not {expected}")
    elif not isinstance(served, torch.Tensor):
        compare.holds(layer, served is None and value.optional, f"{value.name} is {served!r}")
    else:
        shape = tuple(served.shape)
        compare.holds(
            layer,
            shape == expected,
            f"{value.name} is {list(shape)} where {value.typed} is {list(expected)}",
        )
        is_integer = value.layout in _INTEGER_LAYOUTS
        compare.holds(
            layer, served.is_floating_point() is not is_integer, f"{value.name} is {served.dtype}"
        )


@invariant(
    "trace equals record",
    "A value read in a trace, a value recorded and the untouched model's output are identical.",
    *vocabulary.HOSTS,
    form=True,
)
def trace_equals_record(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    if host == "model":
        logits = subject.get("model", "logits")
        compare.equal("logits recorded", logits, subject.native.logits)
    for (value, layer), served in subject.traced.items():
        if value.host == host:
            compare.about(value)
            compare.equal((layer, value.name), served, subject.recorded((value, layer)))


@invariant(
    "record in any order",
    "record returns the same tensors in whatever order values are requested, and whatever else is "
    "requested with them.",
    "model",
    form=True,
)
def any_order(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    keys = subject.recordable
    for names in (keys[::-1], keys[::2], keys[1::2]):
        recording = subject.model.record(subject.ids, names)
        compare.about()
        requested = {
            subject.clean.key(name, layer) for name in names for layer in _layers_of(subject, name)
        }
        compare.equal("values recorded", set(recording.values), requested)
        for (name, layer), served in recording.values.items():
            compare.about(subject.value_named(name, layer))
            compare.equal((layer, name), served, subject.clean[name, layer])


def _layers_of(subject: ModelUnderTest, name: str) -> list[Any]:
    """Return the blocks on which a name is available, for every kind of mixer that it may mean."""
    if name.startswith("model."):
        return [None]
    values = vocabulary.lookup(name)
    return sorted({layer for row in subject.support if row.value in values for layer in row.layers})


@invariant(
    "refusals give a reason",
    "A value listed as unavailable raises Unavailable with a sentence that gives the reason, in a "
    "trace and in record, on every kind of block.",
    "model",
    shapes=True,
    when=lambda subject: bool(_unavailable(subject)),
    otherwise="everything is available",
)
def refusals(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    unavailable = _unavailable(subject)
    errors: list[Exception | None] = []
    with torch.no_grad(), subject.model.trace(subject.ids):
        for value, layer, _ in unavailable:
            errors.append(attempt(lambda value=value, layer=layer: subject.read((value, layer))))
    for (value, layer, reason), error in zip(unavailable, errors, strict=True):
        name = f"{value.host}.{value.name}"
        where = (layer, name)
        gives_reason = isinstance(error, Unavailable) and reason.text in str(error)
        # Where the host does not exist, its name is refused, or a value of another host by it.
        no_such_name = isinstance(error, AttributeError) and any(
            words in str(error) for words in ("has no ", "has attribute")
        )
        compare.holds(where, gives_reason or no_such_name, f"a trace gives {error!r}")
        layers = None if layer is None else [layer]
        error = attempt(
            lambda name=name, layers=layers: subject.model.record(
                subject.ids, [name], layers=layers
            )
        )
        compare.holds(
            where,
            isinstance(error, Unavailable) and reason.text in str(error),
            f"record gives {error!r}",
        )
        compare.holds(
            where,
            len(reason.text.split()) > 3 and not reason.text.endswith("."),
            f"{reason.text!r} is no reason",
        )


def _unavailable(
    subject: ModelUnderTest,
) -> list[tuple[vocabulary.Value, int | None, Unavailability]]:
    """Return what is listed as unavailable on one block of each kind, with the reason."""
    layers = {None, *(block.layers[0] for block in subject.block_kinds)}
    return [
        (row.value, layer, reason)
        for row in subject.support
        for layer, reason in row.reasons.items()
        if layer in layers and (layer is None or not _other_host(subject, row.host, layer))
    ]


def _other_host(subject: ModelUnderTest, host: str, layer: int) -> bool:
    """Return whether a host's name leads to another host on a block, whose values it then reads."""
    if host == "layers":
        return False
    envoy = getattr(subject.model.layers[layer], vocabulary.HOSTS[host].attribute, None)
    standard = getattr(envoy, "__dict__", {}).get("_host_values")
    return standard is not None and standard.name != host


@invariant(
    "snapshots",
    "What a trace returns stays as it was: no later in-place change by the model, in the same "
    "forward or the next step, shows in it.",
    *vocabulary.HOSTS,
    form=True,
)
def snapshots(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    copies = subject.once("copies", lambda: _copies(subject))
    for (value, layer), (served, copied) in copies.items():
        if value.host == host and isinstance(served, torch.Tensor):
            compare.about(value)
            compare.equal((layer, value.name), served, copied)


def _copies(subject: ModelUnderTest) -> dict[ValueKey, tuple]:
    """Return every value of the first step of a generation as served, and a copy made at once."""
    copies: dict[ValueKey, tuple] = {}
    keys = subject.reading_order()
    with (
        torch.no_grad(),
        subject.model.generate(subject.ids, max_new_tokens=2, min_new_tokens=2, do_sample=False),
    ):
        for key in keys:
            served = subject.read(key)
            copies[key] = served, served.clone() if isinstance(served, torch.Tensor) else served
    return copies


INVARIANTS = (values_read, trace_equals_record, any_order, refusals, snapshots)
