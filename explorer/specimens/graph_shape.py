"""The graph of a recorded run up to sizes: what two models of one architecture have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import nn

from explorer.discovery.recorded_run import RecordedRun
from explorer.discovery.trace_graph import Op


def graph_shape(run: RecordedRun) -> str:
    """Return a hash of a run's operations, their wiring, and the modules and parameters they are
    of.

    Sizes and other numbers do not count, nor how many blocks of each kind there are; how many kinds
    there are does.
    """
    graph = run.prompt.whole
    calls = [call for call in graph.calls if not call.labels]
    paths = {run.block_path(layer): layer for layer in range(len(run.blocks))}
    of_blocks = {paths[call.module]: call for call in reversed(calls) if call.module in paths}
    firsts = [of_blocks[layer] for layer in run.firsts if layer in of_blocks]
    blocks = sorted(
        repr((wiring(graph.ops[one.start : one.stop]), modules(one.fn.modules()))) for one in firsts
    )
    inside = {i for call in of_blocks.values() for i in range(call.start, call.stop)}
    outside = [op for i, op in enumerate(graph.ops) if i not in inside]
    around = [call.fn for call in calls if not call.module.startswith(tuple(paths))]
    found = (blocks, wiring(outside), modules(around))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:20]


def wiring(ops: Iterable[Op]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return the names of operations and the tensors each reads and makes, which are numbered in
    the order they appear.
    """
    numbers: dict[int, int] = {}

    def numbered(keys: Iterable[int]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(key, len(numbers)) for key in keys)

    return [(op.name, numbered(op.reads), numbered(op.makes)) for op in ops]


def modules(found: Iterable[nn.Module]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the class of each module and the names of the parameters that are its own."""
    return [
        (
            type(module).__qualname__,
            tuple(name for name, _ in module.named_parameters(recurse=False)),
        )
        for module in found
    ]
