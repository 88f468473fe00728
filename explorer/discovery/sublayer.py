"""What is found on one block, and on each of its sublayers: data, no detection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from explorer.discovery.candidates import HostFindings, TensorCandidate
from explorer.discovery.details import Step
from explorer.discovery.trace_graph import Call


@dataclass
class Sublayer:
    """One part of a block whose result the block adds to the residual stream.

    role: ``"attention"``, ``"recurrent"``, ``"convolution"``, ``"mixer"``, ``"experts"``, ``"mlp"``
        or ``"extra"``.
    host: the standard name of the host.
    module: path of its module; the block's own where it has none.
    addend: where its result passes.
    norm: path of the norm whose output it reads, or None.
    add_number: which of the block's adds to the stream adds it, from 1.
    stage: how many steps the stream had taken when the sublayer read it; None where it read the
        stream at several stages.
    scaled_norm: path of the norm whose output it reads multiplied with a number, or None.
    fed_by: names of modules with a mixer inside whose output enters it and is not added itself.
    """

    role: str
    host: str
    module: str
    addend: TensorCandidate
    norm: str | None
    add_number: int
    stage: int | None
    scaled_norm: str | None = None
    fed_by: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        """The name of the value that is the addend."""
        return {"mlp": "mlp_output", "extra": "extra_output"}.get(self.host, "attention_output")


@dataclass
class BlockFindings:
    """Everything found on one block.

    hosts: findings by host; ``layers`` is the block itself. steps: what the block does to its
    residual stream. mid_step: how many of them ``layer_mid`` has behind it, None where there is
    none. calls: the call of each sublayer, by host. visited: module and labels of every call made.
    """

    path: str
    hosts: dict[str, HostFindings] = field(default_factory=dict)
    sublayers: list[Sublayer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    mid_step: int | None = None
    calls: dict[str, Call] = field(default_factory=dict)
    visited: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)

    @property
    def feeding(self) -> dict[str, str]:
        """The host that each module feeds, by the module's name (see `Sublayer.fed_by`)."""
        return {name: sublayer.host for sublayer in self.sublayers for name in sublayer.fed_by}


def first_and_second(sublayers: Sequence[Sublayer]) -> tuple[Sublayer, Sublayer | None]:
    """Return the first sublayer, and the MLP, or without one the second sublayer, if any."""
    first, *rest = sublayers
    return first, next((sub for sub in rest if sub.host == "mlp"), rest[0] if rest else None)
