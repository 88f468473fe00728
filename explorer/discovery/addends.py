"""The addends of a block: what it adds to its residual stream, and what makes each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from explorer.discovery.candidates import (
    TensorCandidate,
    argument_candidate,
    calls_around,
    result_candidate,
)
from explorer.discovery.details import Step
from explorer.discovery.residual import ADDS, CannotTrace, residual_input, residual_steps
from explorer.discovery.trace_graph import Call, TraceGraph

#: Operations that multiply matrices or convolve.
PRODUCTS = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "matmul",
        "linear",
        "_grouped_mm",
        "convolution",
        "mv",
        "addmv",
        "dot",
    ]
)

#: Those that may multiply two activations.
_MATRIX_PRODUCTS = frozenset(["bmm", "baddbmm", "mm", "matmul"])

#: Operations that combine positions: a sublayer with one of them is no MLP, unless it selects.
_MIXING = frozenset(
    ["convolution", "constant_pad_nd", "cumsum", "cumprod", "_softmax", "softmax", "roll", "flip"]
)
SELECTING = frozenset(["topk", "sort", "argmax", "max"])

#: Operations by which rows of a parameter are picked, as an expert's matrix is.
_PICKS = frozenset(
    [
        "embedding",
        "index",
        "index_select",
        "gather",
        "select",
        "split",
        "split_with_sizes",
        "unbind",
        "chunk",
        "narrow",
        "mul",
        "add",
    ]
)


@dataclass(frozen=True)
class Addend:
    """One addend of a block and what made it.

    tensor_id: the tensor. add: index of the operation that adds it. ops: the operations that made
    it from the residual stream. stage: how many steps the stream had taken when the addend's
    sublayer read it; None where it read the stream at several stages or not at all.
    """

    tensor_id: int
    add: int
    ops: frozenset[int]
    stage: int | None


def find_addends(graph: TraceGraph, block: Call) -> list[Addend]:
    """Return the block's addends, first to last.

    A sum of two that the block itself adds up is one addend; see `split_addend`.
    """
    steps = residual_steps(graph, block)
    stages = _stages(steps)
    return [
        _addend(graph, block, step.key, step.ops[0], stages) for step in steps if step.kind == "add"
    ]


def split_addend(graph: TraceGraph, block: Call, addend: Addend) -> list[Addend]:
    """Return the addends that the block itself summed before it added the sum.

    Returns the addend alone where the block did not, or where the two share a product with weights.
    """
    *_, last = graph.back(addend.tensor_id, addend.add)
    index = graph.maker(last, addend.add)
    if index is None or index < block.start or graph.owners[index] is not block:
        return [addend]
    op, shape = graph.ops[index], graph.tensors[last].shape
    if (
        op.name not in ADDS
        or len(op.reads) != 2
        or any(graph.tensors[read].shape != shape for read in op.reads)
    ):
        return [addend]
    stages = _stages(residual_steps(graph, block))
    pair = [_addend(graph, block, read, index, stages) for read in op.reads]
    pair.sort(key=lambda one: max(one.ops, default=0))
    first, second = (set(weight_products(graph, one)) for one in pair)
    if not first or not second or first & second:
        return [addend]
    return [one for half in pair for one in split_addend(graph, block, half)]


def _stages(steps: list[Step]) -> dict[int, int]:
    """Return, for each operation on the residual stream, how many steps end with it."""
    return {index: number for number, step in enumerate(steps, 1) for index in step.ops}


def _addend(
    graph: TraceGraph, block: Call, tensor_id: int, add: int, stages: dict[int, int]
) -> Addend:
    """Walk back from an addend to the residual stream, whose operations ``stages`` numbers."""
    entering = id(residual_input(block))
    ops: set[int] = set()
    read: set[int] = set()
    todo = [(tensor_id, add)]
    while todo:
        tensor, before = todo.pop()
        index = graph.maker(tensor, before)
        if index is None or index < block.start:
            if tensor == entering:
                read.add(0)
        elif index in stages:
            read.add(stages[index])
        elif index not in ops:
            ops.add(index)
            todo += [(source, index) for source in graph.ops[index].reads]
    return Addend(tensor_id, add, frozenset(ops), read.pop() if len(read) == 1 else None)


def weight_products(graph: TraceGraph, addend: Addend) -> list[int]:
    """Return the operations of an addend that multiply with a parameter, in order."""
    return [
        i for i in sorted(addend.ops) if graph.ops[i].name in PRODUCTS and _reads_weights(graph, i)
    ]


def _reads_weights(graph: TraceGraph, index: int) -> bool:
    """Return whether an operation reads a parameter, or rows picked from one."""
    return any(
        isinstance(graph.tensors[source], torch.nn.Parameter)
        for read in graph.ops[index].reads
        for source in picked_from(graph, read, index)
    )


def picked_from(graph: TraceGraph, tensor_id: int, before: int) -> list[int]:
    """Return a tensor and what it was copied, viewed or picked by rows from, nearest first."""
    chain = graph.back(tensor_id, before)
    while (index := graph.maker(chain[-1], before)) is not None and graph.ops[index].name in _PICKS:
        before = index
        chain += graph.back(graph.ops[index].reads[0], index)
    return chain


def mixes_positions(graph: TraceGraph, ops: Collection[int]) -> bool:
    """Return whether operations combine positions, as a mixer's do.

    A product of two activations does; an MLP has none.
    """
    names = {graph.ops[i].name for i in ops}
    return (
        bool(names & _MIXING and not names & SELECTING)
        or "convolution" in names
        or any(graph.ops[i].name in _MATRIX_PRODUCTS and not _reads_weights(graph, i) for i in ops)
    )


def addend_candidate(graph: TraceGraph, block: Call, addend: Addend) -> TensorCandidate:
    """Return where an addend passes: the outermost module that returns it, else the nearest call.

    Raises CannotTrace where no call takes or returns it.
    """
    chain = graph.back(addend.tensor_id, addend.add)
    inside = graph.inside(block)
    found = [
        candidate
        for call in inside
        if (candidate := result_candidate(call, chain)) is not None
        and _unchanged(graph, candidate, addend.add)
    ]
    modules = [candidate for candidate in found if not candidate.call.labels]
    if modules:
        return min(modules, key=lambda candidate: candidate.call.module.count("."))
    functions = [candidate for candidate in found if candidate.call.fn is not None]
    if functions:
        return min(functions, key=lambda one: (chain.index(id(one.tensor)), len(one.call.labels)))
    for call in calls_around(inside, addend.add):
        if (candidate := argument_candidate(call, chain)) is not None:
            return candidate
    raise CannotTrace(f"no call returns an addend of {block.module}")


def _unchanged(graph: TraceGraph, candidate: TensorCandidate, add: int) -> bool:
    """Return whether no operation wrote into a call's result before it was added."""
    made = graph.maker(id(candidate.tensor), add)
    return made is None or made < candidate.call.stop
