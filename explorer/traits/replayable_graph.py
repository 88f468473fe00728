"""A recorded run of shapes whose operations can be run again with numbers.

Recording takes as long as shapes take, whatever the size of the model. What a part of the model
*computes* is tested afterwards: the tensors it starts from are given numbers, and the operations up
to the tensor in question are run again on those.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_map

from explorer.discovery.trace_graph import PASSING, Call, TraceGraph, tensors
from explorer.discovery.trace_recorder import Recorder

#: Operations that multiply with weights, where one of their operands is a parameter.
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
        "_scaled_mm",
    ]
)

#: Operations that compute a length or a deviation, which a norm divides by.
_NORM_OPERATIONS = frozenset(
    [
        "rsqrt",
        "sqrt",
        "native_layer_norm",
        "_fused_rms_norm",
        "rms_norm",
        "linalg_vector_norm",
        "norm",
        "std",
    ]
)

#: The dtype of replays: the slowest rotary frequencies turn by less than float32 resolves.
_FLOAT = torch.float64

#: Gives the numbers of a tensor that no recorded operation made; it may raise NoNumbers.
Numbers = Callable[[torch.Tensor], torch.Tensor]


class NoNumbers(ValueError):
    """A part of the run cannot be run again, since tensors it starts from have no numbers."""


@dataclass
class ReplayableGraph(TraceGraph):
    """A recorded run. Tensors are named by their ids (``key``), operations by their indices."""

    @classmethod
    def of(cls, graph: TraceGraph) -> ReplayableGraph:
        """Return a graph that shares its record with another."""
        shared = ("ops", "calls", "tensors", "makers", "readers")
        return cls(**{name: getattr(graph, name) for name in shared})

    # -- where a tensor comes from -----------------------------------------------------

    def sources(
        self, key: int, before: int | None = None, start: int = 0, stop: Collection[int] = ()
    ) -> list[int]:
        """Return the operations that a tensor is computed with.

        key, before: the tensor as it is before operation ``before``. start: the first operation to
        consider. stop: operations whose own sources are left out.
        """
        found: set[int] = set()
        todo = [(key, before)]
        while todo:
            index = self.maker(*todo.pop())
            if index is None or index < start or index in found:
                continue
            found.add(index)
            if index not in stop:
                todo += [(read, index) for read in self.ops[index].reads]
        return sorted(found)

    def parameter(self, key: int, before: int | None = None) -> torch.nn.Parameter | None:
        """Return the parameter that a tensor is, or is a view or copy of."""
        originals = (self.tensors[each] for each in self.back(key, before))
        return next((t for t in originals if isinstance(t, torch.nn.Parameter)), None)

    # -- products with weights ---------------------------------------------------------

    def with_weights(self, indices: Iterable[int]) -> list[int]:
        """Return those of some operations that multiply with a parameter."""
        return [
            index
            for index in indices
            if self.ops[index].name in PRODUCTS
            and any(self.parameter(key, index) is not None for key in self.ops[index].reads)
        ]

    def projections(self, key: int, before: int | None, start: int) -> list[int]:
        """Return the last products with weights that a tensor is computed with.

        Between them and the tensor, nothing multiplies with weights.
        """
        found: set[int] = set()
        seen: set[int] = set()
        todo = [(key, before)]
        while todo:
            index = self.maker(*todo.pop())
            if index is None or index < start or index in seen:
                continue
            seen.add(index)
            if self.with_weights([index]):
                found.add(index)
            else:
                todo += [(read, index) for read in self.ops[index].reads]
        return sorted(found)

    def between(
        self, projections: Collection[int], key: int, before: int | None, start: int
    ) -> list[int]:
        """Return the operations between projections and a tensor."""
        sources = self.sources(key, before, start, stop=projections)
        return [index for index in sources if index not in projections]

    def weight_of(self, product: int) -> torch.nn.Parameter:
        """Return the weight that an operation multiplies with."""
        parameters = (self.parameter(key, product) for key in self.ops[product].reads)
        return max((p for p in parameters if p is not None), key=lambda p: p.dim())

    def input_of(self, product: int) -> int:
        """Return the tensor that an operation multiplies with its weight."""
        return next(
            key
            for key in self.ops[product].reads
            if self.parameter(key, product) is None and self.tensors[key].is_floating_point()
        )

    def owner(self, index: int) -> Call:
        """Return the call of the innermost module that ran an operation."""
        call = self.owners[index]
        assert call is not None  # the model itself runs every operation
        return call

    # -- scales and norms --------------------------------------------------------------

    def factor(self, indices: Iterable[int], numbers: Numbers) -> float:
        """Return the single number that some operations multiply with, all together.

        Other operations than multiplications and divisions by single numbers are ignored.

        Raises NoNumbers as `replay` does.
        """
        factor = 1.0
        for index in indices:
            op = self.ops[index]
            scales = op.name in ("mul", "mul_", "div", "div_")
            if not scales or not self.tensors[op.makes[0]].is_floating_point():
                continue
            by = prod(op.numbers)
            for key in op.reads[1:]:
                if self.tensors[key].dim() == 0:
                    by *= float(self.replay(key, {}, numbers, index))
            factor = factor * by if op.name.startswith("mul") else factor / by
        return factor

    def is_norm_operation(self, index: int) -> bool:
        """Return whether an operation computes a length or a deviation, as every norm does."""
        op = self.ops[index]
        return op.name in _NORM_OPERATIONS or (op.name == "pow" and -0.5 in op.numbers)

    def is_norm(self, call: Call) -> bool:
        """Return whether a module norms its input: shape kept, no product with weights."""
        entering = next(tensors((call.args, call.kwargs)), None)
        if entering is None or not isinstance(call.output, torch.Tensor):
            return False
        own = range(call.start, call.stop)
        same_shape = call.output.shape == entering.shape
        return same_shape and any(map(self.is_norm_operation, own)) and not self.with_weights(own)

    def normed_width(self, index: int) -> int:
        """Return how many elements a norm operation reduces together."""
        key, before = self.ops[index].reads[0], index
        while self.tensors[key].shape[-1] == 1 and (maker := self.maker(key, before)) is not None:
            key, before = self.ops[maker].reads[0], maker
        return self.tensors[key].shape[-1]

    # -- running again -----------------------------------------------------------------

    def replay(
        self,
        key: int,
        given: Mapping[int, torch.Tensor],
        numbers: Numbers,
        before: int | None = None,
    ) -> torch.Tensor:
        """Compute a tensor, as it is before an operation, in double precision on the CPU.

        given: numbers of tensors by key; the operations that made those are not run.
        numbers: gives those of parameters, buffers and other tensors that no operation made.

        Raises NoNumbers where ``numbers`` does.
        """
        if key in given:
            return given[key]
        needed: set[int] = set()
        todo = [(key, before)]
        while todo:
            tensor, at = todo.pop()
            index = None if tensor in given else self.maker(tensor, at)
            if index is not None and index not in needed:
                needed.add(index)
                todo += [(read, index) for read in self.ops[index].reads]
        values = dict(given)

        def with_numbers(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in values:
                    values[id(value)] = numbers(value)
                return values[id(value)]
            if isinstance(value, torch.device):
                return torch.device("cpu")
            is_float = isinstance(value, torch.dtype) and value.is_floating_point
            return _FLOAT if is_float else value

        for index in sorted(needed):
            op = self.ops[index]
            assert op.function is not None
            out = op.function(*tree_map(with_numbers, op.args), **tree_map(with_numbers, op.kwargs))
            for made, result in zip(op.makes, tensors(out), strict=False):
                if made not in given:
                    values[made] = result.to(_FLOAT) if result.is_floating_point() else result
        return with_numbers(self.tensors[key])


def recorded(root: torch.nn.Module, run: Callable[[], Any]) -> ReplayableGraph:
    """Record the operations and module calls of ``root``, a model of shapes, during ``run``."""
    with torch.no_grad(), Recorder(root, whole=True) as recorder:
        run()
    assert recorder.whole is not None
    return ReplayableGraph.of(recorder.whole)


__all__ = ["PASSING", "PRODUCTS", "NoNumbers", "Numbers", "ReplayableGraph", "recorded"]
