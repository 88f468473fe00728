"""What runs after the blocks: the final norm of the residual stream, and the head."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from explorer.discovery.backbone import Backbone
from explorer.discovery.trace_graph import Call, TraceGraph, tensors


@dataclass
class AfterTheBlocks:
    """What ran after the last block of one forward.

    counts: how often each module outside the blocks ran.
    norms: path and call number (from 0) of each norm that the stream leaving the last block passes,
        in order. A norm is a module without a matrix, the outermost of several; after a matrix
        there is no residual stream any more.
    outputs: what those norms returned, by path.
    stream: what the last block returned.
    head_input, head: what the head was called with, and what it returned.
    """

    counts: Counter[str] = field(default_factory=Counter)
    norms: list[tuple[str, int]] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    stream: torch.Tensor | None = None
    head_input: torch.Tensor | None = None
    head: Any = None

    def norm(self) -> tuple[str | None, int | None]:
        """Return the last norm before the head: its path, and its call number if it has several."""
        path, call = self.norms[-1] if self.norms else (None, None)
        return path, call if path is not None and self.counts[path] > 1 else None

    def head_reads(self, norm: str | None) -> bool:
        """Return whether the head reads what a norm (or, without one, the last block) returned."""
        made = self.outputs.get(norm) if norm is not None else None if self.norms else self.stream
        read = self.head_input
        if not isinstance(made, torch.Tensor) or read is None:
            return False
        return read is made or read._base is (made if made._base is None else made._base)


def after_the_blocks(run: TraceGraph, base: Backbone) -> AfterTheBlocks:
    """Return what a recorded forward ran after its blocks; ``run`` holds every call of a module."""
    found = AfterTheBlocks()
    last, passing = f"{base.blocks}.{base.num_layers - 1}", False
    for call in sorted(run.calls, key=lambda call: call.ended):
        path = call.module
        if path == last:
            found.stream, found.norms, passing = next(tensors(call.output), None), [], True
        elif path == base.head:
            found.head_input, found.head = call.args[0], call.output
        elif (
            path
            and not path.startswith(f"{base.blocks}.")
            and not any(True for _ in call.fn.children())
        ):
            passing = passing and all(one.dim() == 1 for one in call.fn.parameters())
            if passing:
                found.outputs[path] = call.output
                found.norms.append((path, found.counts[path]))
            found.counts[path] += 1
        elif passing and path and _wraps_a_norm(found, call):
            found.norms = [one for one in found.norms if not one[0].startswith(f"{path}.")]
            found.outputs[path] = call.output
            found.norms.append((path, found.counts[path]))
            found.counts[path] += 1
    return found


def _wraps_a_norm(found: AfterTheBlocks, call: Call) -> bool:
    """Return whether a module has norms and no matrix, and ran one of them last."""
    inner = found.norms[-1][0] if found.norms else ""
    return inner.startswith(f"{call.module}.") and all(
        one.dim() == 1 for one in call.fn.parameters()
    )
