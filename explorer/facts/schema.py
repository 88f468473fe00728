"""The form of a record: what `explorer.facts.record.facts` returns, as it is written to JSON."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

#: A number for each axis; a letter for an axis whose length the call decides.
Extents = list[int | str]


class ExtentsOfBlocks(TypedDict):
    """The axes of a value on blocks where they differ from those of the first block."""

    layers: list[int]
    numbers: Extents


class ValueShape(TypedDict):
    """The axes of a value: their names, and their lengths on the first block that has the value."""

    symbols: list[str]
    numbers: Extents
    others: NotRequired[list[ExtentsOfBlocks]]


#: A value of the model. ``layers`` is None for a value of the whole model, ``dtype`` where it is
#: unknown. ``verified``: whether the contract has checked it.
ValueRecord = TypedDict(
    "ValueRecord",
    {
        "host": str,
        "name": str,
        "layout": str,
        "dims": list[str],
        "meaning": str,
        "read_at": str | None,
        "writable": bool,
        "layers": list[int] | None,
        "condition": str | None,
        "optional": bool,
        "shape": ValueShape,
        "dtype": str | None,
        "class": str,
        "verified": bool,
    },
)


class NormRecord(TypedDict):
    """The norm that a sublayer reads.

    value: the name of its output, None where that is no value. on_stream: whether the residual
    stream itself passes it. scaled: whether its output is scaled before the sublayer reads it.
    """

    module: str
    value: str | None
    on_stream: bool
    scaled: bool


class RouterRecord(TypedDict):
    module: str
    text: str


class ExpertsRecord(TypedDict):
    count: int
    chosen: int
    width: int | None


class SharedExpertRecord(TypedDict):
    module: str
    gate: str | None


class SublayerRecord(TypedDict):
    """One sublayer of a block.

    stage: how many steps of the block's ``stream`` precede what it reads, None where it reads the
    stream at several points. turn: which of the block's adds adds its output, from 1. steps: what
    follows its core until the add. rule: title and lines of the recurrence of a recurrent mixer.
    """

    role: str
    title: str
    window: int | None
    host: str
    norm: NormRecord | None
    summary: str
    values: list[str]
    output: str
    stage: int | None
    turn: int
    steps: list[str]
    note: str | None
    router: RouterRecord | None
    experts: ExpertsRecord | None
    shared: SharedExpertRecord | None
    rule: NotRequired[dict[str, Any]]


class StreamStep(TypedDict):
    """One thing a block does to its residual stream.

    kind: "add", "scale", "shift" or "norm".
    by: a number, the path of a parameter or module from the block, or a number for each block.
    """

    kind: str
    by: NotRequired[float | str | list[float | str | None]]


HostRecord = TypedDict("HostRecord", {"path": str, "class": str, "sizes": dict[str, int]})


#: A kind of block. ``mid`` is how many steps of ``stream`` precede ``layer_mid``, None without one;
#: ``identity`` what the block adds to its stream, as code.
BlockRecord = TypedDict(
    "BlockRecord",
    {
        "layers": list[int],
        "class": str,
        "title": str,
        "hosts": dict[str, HostRecord],
        "sublayers": list[SublayerRecord],
        "stream": list[StreamStep],
        "mid": int | None,
        "identity": NotRequired[str],
    },
)


class AnatomyRecord(TypedDict):
    """The part of a record that a diagram is drawn from."""

    sizes: dict[str, int]
    blocks: list[BlockRecord]
    values: list[ValueRecord]


class CacheRecord(TypedDict):
    """What a call keeps between tokens (`accounting.counts.cache_sizes`), or why it is unknown."""

    caches: list[dict[str, Any]]
    caches_unknown: NotRequired[str]


class FactsRecord(AnatomyRecord, CacheRecord):
    """Everything that a page shows of one checkpoint."""

    schema: int
    family: str
    checkpoint: str
    released: bool
    architecture: str
    title: str
    summary: str
    versions: dict[str, str]
    parameters: dict[str, Any]
    size_notes: dict[str, str]
    config: dict[str, Any]
    printout: str
    traits: list[dict[str, str]]
    contract: dict[str, Any]
    provenance: dict[str, Any]
    signature: dict[str, Any]
