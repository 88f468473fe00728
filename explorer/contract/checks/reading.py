"""Laws about reading: what is promised reads, in its layout, the same by every way, and the rest is refused in words."""

from __future__ import annotations

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import Key, ModelUnderTest, attempt
from explorer.contract.registry import invariant
from explorer.model.envoys import Unavailable
from explorer.vocabulary.availability import Unavailability

HOSTS = tuple(vocabulary.HOSTS)

#: Layouts that hold whole numbers; every other holds floating-point ones.
_WHOLE = ("Tokens", "ExpertIndices")


@invariant(
    "values read",
    "Every value listed as available reads on every block listed, each axis as long as the size of its name.",
    *HOSTS,
    shapes=True,
    form=True,
)
def values_read(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for row in s.rows:
        if row.host != host or not row.available or row.name == "state":
            continue
        t.of(row.value)
        for layer in [None] if host == "model" else row.layers:
            name = row.name if host == "model" else f"{host}.{row.name}"
            if (name, layer) not in s.clean:
                t.holds(layer, False, f"{row.name}: {s.clean.why(name, layer)}")
                continue
            _shape(s, t, (row.value, layer), s.clean[name, layer])


def _shape(s: ModelUnderTest, t: Comparisons, key: Key, found: object) -> None:
    value, layer = key
    want = tuple(s.extent(key, axis) for axis in value.axes)
    if value.layout == "Size":
        t.holds(layer, found == want, f"{value.name} is {found}, not {want}")
    elif found is None:
        t.holds(layer, value.optional, f"{value.name} is None")
    else:
        t.holds(
            layer,
            tuple(found.shape) == want,
            f"{value.name} is {list(found.shape)} where {value.typed} is {list(want)}",
        )
        whole = value.layout in _WHOLE
        t.holds(layer, found.is_floating_point() is not whole, f"{value.name} is {found.dtype}")


@invariant(
    "trace equals record",
    "A value read in a trace, a value recorded and the output of the untouched model are the same to the bit.",
    *HOSTS,
    form=True,
)
def trace_equals_record(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    if host == "model":
        t.same("logits recorded", s.get("model", "logits"), s.plain)
    for (value, layer), found in s.traced.items():
        if value.host == host:
            t.of(value)
            t.same((layer, value.name), found, s.recorded((value, layer)))


@invariant(
    "record in any order",
    "record gives the same tensors whatever order the values are asked in, and whatever else is asked for.",
    "model",
    form=True,
)
def any_order(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    keys = [f"{row.host}.{row.name}" for row in s.rows if row.available and row.name != "state"]
    for names in (keys[::-1], keys[::2], keys[1::2]):
        again = s.model.record(s.ids, names)
        t.of()
        asked = {s.clean.key(name, row_layer) for name in names for row_layer in _where(s, name)}
        t.same("values recorded", set(again.values), asked)
        for (name, layer), found in again.values.items():
            t.of(s.named(name, layer))
            t.same((layer, name), found, s.clean[name, layer])


def _where(s: ModelUnderTest, name: str) -> list[int | None]:
    """The blocks that what ``name`` means is available on: kinds of mixer that go by one name are all meant; (None,) for the model's own."""
    if name.startswith("model."):
        return [None]
    return sorted(
        {layer for row in s.rows if row.value in vocabulary.lookup(name) for layer in row.layers}
    )


@invariant(
    "refused in words",
    "A value listed as unavailable raises Unavailable with one sentence that says why, in a trace and in record, on every kind of block.",
    "model",
    shapes=True,
    when=lambda s: bool(_missing(s)),
)
def refused(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    missing = _missing(s)
    told: list[BaseException | None] = []
    with torch.no_grad(), s.model.trace(s.ids):
        for value, layer, _ in missing:
            told.append(attempt(lambda: s.read((value, layer))))
    for (value, layer, reason), error in zip(missing, told, strict=True):
        where = (layer, f"{value.host}.{value.name}")
        # Where the host itself is missing it is the host's name that is refused, or a value of another part that goes by it.
        told_so = (isinstance(error, Unavailable) and reason.text in str(error)) or (
            isinstance(error, AttributeError)
            and any(words in str(error) for words in ("has no ", "has attribute"))
        )
        t.holds(where, told_so, f"a trace gives {error!r}")
        layers = None if layer is None else [layer]
        error = attempt(
            lambda: s.model.record(s.ids, [f"{value.host}.{value.name}"], layers=layers)
        )
        t.holds(
            where,
            isinstance(error, Unavailable) and reason.text in str(error),
            f"record gives {error!r}",
        )
        t.holds(
            where,
            len(reason.text.split()) > 3 and not reason.text.endswith("."),
            f"{reason.text!r} is no reason",
        )


def _missing(s: ModelUnderTest) -> list[tuple[vocabulary.Value, int | None, Unavailability]]:
    """What is listed as unavailable, on one block of each kind, and the reason given."""
    kinds = {None, *(block.layers[0] for block in s.blocks)}
    return [
        (row.value, layer, reason)
        for row in s.rows
        for layer, reason in row.reasons.items()
        if layer in kinds and not (layer is not None and _another(s, row.host, layer))
    ]


def _another(s: ModelUnderTest, host: str, layer: int) -> bool:
    """Whether a host's name leads to another host on a block, so that it reads that one's values."""
    found = (
        getattr(s.model.layers[layer], vocabulary.HOSTS[host].attribute, None)
        if host != "layers"
        else None
    )
    standard = getattr(found, "__dict__", {}).get("_standard")
    return standard is not None and standard.name != host


@invariant(
    "snapshots",
    "What a trace hands out stays as it was: nothing the model does to its tensors later, in that forward or the next step, shows in it.",
    *HOSTS,
    form=True,
)
def snapshots(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for (value, layer), (served, then) in _kept(s).items():
        if value.host == host and isinstance(served, torch.Tensor):
            t.of(value)
            t.same((layer, value.name), served, then)


def _kept(s: ModelUnderTest) -> dict[Key, tuple]:
    """Every value of the first step of a short generation, as served, and a copy made at that moment."""
    if "kept" not in s.memo:
        found: dict[Key, tuple] = {}
        keys = s.order()
        with (
            torch.no_grad(),
            s.model.generate(s.ids, max_new_tokens=2, min_new_tokens=2, do_sample=False),
        ):
            for key in keys:
                served = s.read(key)
                found[key] = (
                    served,
                    served.clone() if isinstance(served, torch.Tensor) else served,
                )
        s.memo["kept"] = found
    return s.memo["kept"]
