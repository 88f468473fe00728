"""Follow the residual stream through one block: each add, scale, shift and norm on its way."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from explorer.discovery.candidates import is_norm, result_candidate
from explorer.discovery.details import OutputSteps, Step
from explorer.discovery.trace_graph import PASSING, Call, Op, TraceGraph, tensors

ADDS = ("add", "add_")
SCALES = ("mul", "mul_", "div", "div_")


class CannotTrace(ValueError):
    """The block's output is not its input plus a sum of addends that can be distinguished."""


def residual_input(block: Call) -> torch.Tensor:
    """Return the residual stream entering a block: the first tensor the block is called with."""
    return next(tensors((block.args, block.kwargs)))


def residual_steps(graph: TraceGraph, block: Call) -> list[Step]:
    """Return what the block does to its residual stream, first to last.

    Walks back from the block's output to its input along adds, whose other operand is an addend,
    and along scales, shifts and norms of the stream itself. Of several paths the one with the
    fewest of those is taken. Raises CannotTrace when there is no such path.
    """
    found = _Walk(graph, block).back(id(next(tensors(block.output))), None)
    if not found:
        raise CannotTrace(
            f"the output of {block.module} is not its input plus a sum of addends, scaled or normed"
        )
    return found


class _Walk:
    """The walk back along the residual stream of one block."""

    def __init__(self, graph: TraceGraph, block: Call) -> None:
        self.graph, self.block = graph, block
        self.entering = id(residual_input(block))
        self.constants = constants_of(block)

    def back(self, tensor_id: int, before: int | None) -> list[Step] | None:
        """Return the steps from the block's input to a tensor; None where it is not the stream."""
        graph, block = self.graph, self.block
        while (op := graph.maker(tensor_id, before)) is not None and op >= block.start:
            owner = graph.owners[op]
            if (
                owner is not None
                and owner is not block
                and is_norm(graph, owner)
                and result_candidate(owner, {tensor_id}) is not None
            ):
                return self._through_norm(owner, tensor_id)
            if graph.ops[op].name in PASSING:
                tensor_id, before = graph.ops[op].reads[0], op
                continue
            paths = [path for path in self._through(graph.ops[op], op) if path is not None]
            return min(paths, key=lambda path: sum(s.kind != "add" for s in path), default=None)
        # No operation of the block made it or changed it in place.
        return [] if tensor_id == self.entering else None

    def _through_norm(self, norm: Call, made: int) -> list[Step] | None:
        """Return the path that leads through a norm of the stream, whose result is ``made``."""
        rest = self.back(id(norm.args[0]), norm.start) if norm.args else None
        if rest is None:
            return None
        ops = tuple(range(norm.start, norm.stop))
        return [*rest, Step("norm", ops, made, by=path_in_block(norm.module, self.block))]

    def _through(self, op: Op, index: int) -> Iterator[list[Step] | None]:
        """Yield the paths through one operation, by each operand that may be the stream."""
        made, pairs = op.makes[0], (op.reads, op.reads[::-1])
        if op.name in ADDS and len(op.reads) == 2:
            for main, other in pairs:
                if (rest := self.back(main, index)) is not None:
                    by = self._constant(other, index)
                    yield [
                        *rest,
                        Step("add", (index,), made, key=other)
                        if by is None
                        else Step("shift", (index,), made, by=by),
                    ]
        elif op.name in SCALES and len(op.reads) == 1 and len(op.numbers) == 1:
            if (rest := self.back(op.reads[0], index)) is not None:
                yield [*rest, Step("scale", (index,), made, by=_number(op))]
        elif op.name in ("mul", "mul_") and len(op.reads) == 2:
            for main, other in pairs:
                by = self._constant(other, index)
                if by is not None and (rest := self.back(main, index)) is not None:
                    yield [*rest, Step("scale", (index,), made, by=by)]

    def _constant(self, tensor_id: int, before: int) -> str | None:
        """Return the path of the block's parameter or buffer that a tensor is, if it is one."""
        chain = self.graph.back(tensor_id, before)
        return next((self.constants[key] for key in chain if key in self.constants), None)


def _number(op: Op) -> float:
    """Return the factor of an operation that scales by one number."""
    return 1 / op.numbers[0] if op.name.startswith("div") else op.numbers[0]


def path_in_block(path: str, block: Call) -> str:
    """Return a module's path counted from the block."""
    return path.removeprefix(f"{block.module}.")


def constants_of(call: Call) -> dict[int, str]:
    """Return the paths of a module's parameters and buffers by the tensors' ids."""
    return {
        id(tensor): name for name, tensor in (*call.fn.named_parameters(), *call.fn.named_buffers())
    }


def find_output_steps(
    graph: TraceGraph, block: Call, ops: frozenset[int], last_op: int
) -> OutputSteps:
    """Return what happens to a sublayer's result before the block adds it.

    ops: the operations that make the addend. last_op: the one that makes the sublayer's result.
    """
    maker = graph.owner(last_op)
    found: list[Step] = []
    complete = True
    for index in sorted(i for i in ops if i > last_op):
        owner, op = graph.owner(index), graph.ops[index]
        if owner is maker and not any(True for _ in maker.fn.children()):
            continue  # a bias, or what else the module of one product does to it
        if owner is not block and is_norm(graph, owner):
            step = Step("norm", (), 0, by=path_in_block(owner.module, block))
            found += [step] if step not in found else []
        elif op.name in SCALES and (by := _operand(graph, block, index, ())) is not None:
            found.append(Step("scale", (), 0, by=by))
        elif op.name in ADDS and (by := _operand(graph, block, index, (op.name,))) is not None:
            found.append(Step("shift", (), 0, by=by))
        elif op.name not in PASSING:
            complete = False
    return OutputSteps(tuple(found), complete)


def _operand(
    graph: TraceGraph, block: Call, index: int, adds: tuple[str, ...]
) -> float | str | None:
    """Return what an operation multiplies with, or, if it is one of ``adds``, what it adds.

    That is a number, or the path of a parameter or buffer from the block; None for anything else.
    """
    op = graph.ops[index]
    if len(op.reads) == 1 and len(op.numbers) == 1:
        return _number(op)
    constants = constants_of(block)
    found = [
        constants[key] for read in op.reads for key in graph.back(read, index) if key in constants
    ]
    if len(op.reads) == 2 and len(found) == 1 and op.name in ("mul", "mul_", *adds):
        return found[0]
    return None
