"""What the diagram of a block shows, as typed data.

`describe.describe` makes it from a facts record. The layouts (`wide` and `narrow`) only place and
draw it, `outline` writes it as text and `element` takes the card's data from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from explorer.widgets.diagram.types import Type
from explorer.widgets.palette import role_of

#: Captions of values whose names are long, where types of several values share a line.
_CAPTIONS = {
    "attention_queries": "q",
    "attention_keys": "k",
    "attention_values": "v",
    "decays": "g",
    "betas": "β",
    "recurrent_gate": "a",
    "skip": "D",
    "state_attention": "M",
}


@dataclass(frozen=True)
class Pill:
    """A value that can be read.

    ``host`` is the attribute its host has in the block; ``full_type`` has the dtype, ``type`` only
    where it differs from the model's; ``label`` is what a screen reader says.
    """

    host: str
    name: str
    type: Type
    full_type: Type
    label: str
    read_only: bool

    @property
    def key(self) -> str:
        return f"{self.host}.{self.name}"

    @property
    def role(self) -> str:
        """The role of the palette it is drawn in."""
        return role_of(self.host, self.name)

    @property
    def caption(self) -> str:
        """A short name."""
        return _CAPTIONS.get(self.name) or re.sub("^(router|expert|mlp)_(?!output)", "", self.name)


def joint_type(pill: Pill, *others: Pill) -> Type:
    """The type of ``pill``, standing also for those of ``others`` that have the same."""
    return pill.type.also(other.key for other in others if other.type == pill.type)


def captioned_types(pills: Iterable[Pill]) -> list[tuple[str, Type]]:
    """Types with captions, for one line under several pills: ``("q, k", type)``; values of one type
    share an entry.
    """
    by_type: dict[Type, list[Pill]] = {}
    for pill in pills:
        by_type.setdefault(pill.type, []).append(pill)
    return [
        (", ".join(pill.caption for pill in equal), joint_type(*equal))
        for equal in by_type.values()
    ]


class _Inside:
    """The drawn inside of a sublayer.

    Every field is text, a number, a pill, a tuple of pills or a further inside.
    """

    @property
    def pills(self) -> list[Pill]:
        return list(_pills(self))


def _pills(item: Any) -> Iterator[Pill]:
    if isinstance(item, Pill):
        yield item
    elif isinstance(item, _Inside):
        for field in fields(item):  # type: ignore[arg-type]  # every subclass is a dataclass
            yield from _pills(getattr(item, field.name))
    elif isinstance(item, tuple):
        for one in item:
            yield from _pills(one)


@dataclass(frozen=True)
class NotTraced(_Inside):
    """A sublayer whose inside is not known, with the sentence that says so."""

    text: str


@dataclass(frozen=True)
class Attention(_Inside):
    """Softmax attention.

    ``sinks`` join the softmax; ``gate`` multiplies the heads' outputs; ``premix`` is the
    projection's input.
    """

    probabilities: Pill
    values: Pill
    queries: Pill | None
    keys: Pill | None
    scores: Pill | None
    sinks: Pill | None
    head_outputs: Pill | None
    gate: Pill | None
    premix: Pill | None


@dataclass(frozen=True)
class Recurrence(_Inside):
    """A recurrent mixer: what the recurrence is given, its rule and its state.

    ``gates`` are the decays and the factors on what is written; ``replayed`` are the states that a
    replay gives.
    """

    title: str
    formulas: tuple[str, ...]
    conv_input: Pill | None
    queries: Pill | None
    keys: Pill | None
    values: Pill | None
    gates: tuple[Pill, ...]
    state_input: Pill | None
    implied_attention: Pill | None
    state_output: Pill | None
    replayed: tuple[Pill, ...]
    head_outputs: Pill | None
    gate: Pill | None


@dataclass(frozen=True)
class Convolution(_Inside):
    """A short convolution as a mixer, and the gate on its output."""

    input: Pill | None
    output: Pill | None
    gate: Pill | None


@dataclass(frozen=True)
class SharedExpert(_Inside):
    """The expert that every token runs through: its values, its gate in words, and its share of the
    sum.
    """

    values: tuple[Pill, ...]
    gate: str
    output: Pill | None


@dataclass(frozen=True)
class Experts(_Inside):
    """A mixture of experts: ``chosen`` of ``count`` for each token, each ``width`` wide where that
    is known.
    """

    router_module: str
    router: tuple[Pill, ...]
    count: int
    chosen: int
    width: int | None
    outputs: tuple[Pill, ...]
    shared: SharedExpert | None

    @property
    def caption(self) -> str:
        width = f", {self.width} wide" if self.width else ""
        return f"{self.chosen} of {self.count}{width}"


@dataclass(frozen=True)
class Mlp(_Inside):
    """A dense MLP: the hidden neurons, and the widths of the stream and of the hidden layer where
    both are known.
    """

    neurons: tuple[Pill, ...]
    widths: tuple[str, str] | None


Inside = NotTraced | Attention | Recurrence | Convolution | Experts | Mlp


@dataclass(frozen=True)
class Norm:
    """The norm a sublayer reads the stream through.

    ``on_stream``: the stream itself has gone through it; ``scaled``: its output is multiplied by a
    number first.
    """

    module: str
    output: Pill | None
    on_stream: bool
    scaled: bool


@dataclass(frozen=True)
class Sublayer:
    """One sublayer: what it reads, what is inside, and what it adds to the stream.

    ``index`` counts a block's sublayers; ``called_with`` is the value it is called with, where that
    can be read beside the norm's output. ``values`` are those inside, in the order of the forward;
    ``steps`` are its last ones, in words. ``output_label`` is written at its addend, ``addend`` is
    the name live marks know the addend by.
    """

    index: int
    host: str
    role: str
    title: str
    summary: str
    norm: Norm | None
    called_with: Pill | None
    inside: Inside
    values: tuple[Pill, ...]
    steps: str
    output: Pill | None
    output_label: str
    addend: str
    windowed: bool

    @property
    def colour(self) -> str:
        """The role of the palette its box is drawn in."""
        return role_of(self.host)

    @property
    def other_values(self) -> list[Pill]:
        """The values that the drawing of the inside has no place for."""
        drawn = self.inside.pills
        return [pill for pill in self.values if pill not in drawn]


@dataclass(frozen=True)
class StreamStep:
    """What is done to the stream: an add, a scale or shift by a number or parameter, or a norm
    module on the stream itself.
    """

    kind: Literal["add", "scale", "shift", "norm"]
    operand: str = ""

    @property
    def text(self) -> str:
        return {"add": "", "scale": "× ", "shift": "+ ", "norm": ""}[self.kind] + self.operand


@dataclass(frozen=True)
class Segment:
    """A part of the stream: the sublayers that read it there, the step at its end, and the
    sublayers whose outputs that step adds.

    ``is_mid`` marks the segment that begins at ``layer_mid``.

    """

    is_mid: bool
    reads: tuple[Sublayer, ...]
    step: StreamStep
    adds: tuple[Sublayer, ...]


@dataclass(frozen=True)
class Block:
    """One distinct shape of block, and the blocks that have it.

    ``title`` names its sublayers; ``identity`` is the sum its output obeys. ``values`` are all that
    can be read on it, those of the model included, by ``(host, name)``.
    """

    layers: tuple[int, ...]
    title: str
    identity: str
    segments: tuple[Segment, ...]
    sublayers: tuple[Sublayer, ...]
    values: Mapping[tuple[str, str], Pill]
    usual_dtype: str

    @property
    def first(self) -> int:
        return self.layers[0]

    def pills(self, host: str, *names: str) -> list[Pill]:
        """Those of the named values of a host that the block has."""
        return [self.values[host, name] for name in names if (host, name) in self.values]

    def stream(self, name: str) -> Pill | None:
        """A named point of the stream: ``layer_input``, ``layer_mid``, ``layer_output``."""
        return self.values.get(("layers", name))
