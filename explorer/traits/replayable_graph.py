"""A run of shapes alone, recorded with its operations, so that any part of it can be run again with numbers.

The run costs what shapes cost, whatever the model's size. What a part of it *does* is asked
afterwards: the tensors it starts from are given numbers, and the operations up to the
tensor in question are run again on those.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_map

from explorer.discovery.trace_graph import PASSING, Call, TraceGraph, tensors
from explorer.discovery.trace_recorder import Recorder

#: Operations that multiply with weights, where one of what they read is a parameter.
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

#: Operations that measure a length or a deviation, which a norm then divides by.
_NORMING = frozenset(
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

#: Numbers are worked out in double precision: the slowest rotary frequencies turn by less than single precision can tell.
_FLOATS = torch.float64


class NoNumbers(ValueError):
    """Part of a run that cannot be run again: it starts from tensors whose numbers nobody knows."""


@dataclass
class ReplayableGraph(TraceGraph):
    """A recorded run whose operations can be run again."""

    def sources(
        self, key: int, before: int | None = None, start: int = 0, stop: Collection[int] = ()
    ) -> list[int]:
        """The operations from ``start`` on that made tensor ``key`` as it was before an operation; none behind ``stop``."""
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
        """The parameter a tensor is, or is a view or copy of."""
        return next(
            (
                t
                for k in self.back(key, before)
                if isinstance(t := self.tensors[k], torch.nn.Parameter)
            ),
            None,
        )

    def weighted(self, indices: Sequence[int]) -> list[int]:
        """Of some operations those that multiply with a parameter."""
        return [
            i
            for i in indices
            if self.ops[i].name in PRODUCTS
            and any(self.parameter(key, i) is not None for key in self.ops[i].reads)
        ]

    def cuts(self, key: int, before: int | None, start: int) -> list[int]:
        """The nearest operations with weights that a tensor was made by: what stands between it and them is without weights."""
        found: set[int] = set()
        seen: set[int] = set()
        todo = [(key, before)]
        while todo:
            index = self.maker(*todo.pop())
            if index is None or index < start or index in seen:
                continue
            seen.add(index)
            if self.weighted([index]):
                found.add(index)
            else:
                todo += [(read, index) for read in self.ops[index].reads]
        return sorted(found)

    def between(self, key: int, before: int | None, cuts: Collection[int], start: int) -> list[int]:
        """The operations between ``cuts`` and a tensor."""
        return [i for i in self.sources(key, before, start, cuts) if i not in cuts]

    def matrix(self, product: int) -> torch.nn.Parameter:
        """The weights an operation multiplies with."""
        found = [
            p for k in self.ops[product].reads if (p := self.parameter(k, product)) is not None
        ]
        return max(found, key=lambda p: p.dim())

    def taken(self, product: int) -> int:
        """The tensor an operation multiplies with weights."""
        reads = self.ops[product].reads
        return next(
            k
            for k in reads
            if self.parameter(k, product) is None and self.tensors[k].is_floating_point()
        )

    def factor(
        self, indices: Iterable[int], numbers: Callable[[torch.Tensor], torch.Tensor]
    ) -> float:
        """What some operations multiply with and divide by, where that is one number: the product of all.

        Raises NoNumbers as `replay` does.
        """
        factor = 1.0
        for index in indices:
            op = self.ops[index]
            if (
                op.name not in ("mul", "mul_", "div", "div_")
                or not self.tensors[op.makes[0]].is_floating_point()
            ):
                continue
            by = prod(op.numbers)
            for key in op.reads[1:]:
                if self.tensors[key].dim() == 0:
                    by *= float(self.replay(key, {}, numbers, index))
            factor = factor * by if op.name.startswith("mul") else factor / by
        return factor

    def norming(self, index: int) -> bool:
        """Whether an operation measures a length or a deviation: the heart of a norm."""
        op = self.ops[index]
        return op.name in _NORMING or (op.name == "pow" and -0.5 in op.numbers)

    def norms(self, call: Call) -> bool:
        """Whether a call of a module norms what it is called with, and multiplies it with no matrix on the way."""
        entered, own = next(tensors((call.args, call.kwargs)), None), range(call.start, call.stop)
        alike = (
            entered is not None
            and isinstance(call.output, torch.Tensor)
            and call.output.shape == entered.shape
        )
        return alike and any(map(self.norming, own)) and not self.weighted(own)

    def normed_width(self, norm: int) -> int:
        """How many numbers a norming operation works on together."""
        key, before = self.ops[norm].reads[0], norm
        while self.tensors[key].shape[-1] == 1 and (index := self.maker(key, before)) is not None:
            key, before = self.ops[index].reads[0], index
        return self.tensors[key].shape[-1]

    def replay(
        self,
        key: int,
        given: Mapping[int, torch.Tensor],
        numbers: Callable[[torch.Tensor], torch.Tensor],
        before: int | None = None,
    ) -> torch.Tensor:
        """The tensor ``key`` as it was before an operation, worked out in double precision on the CPU.

        given: numbers of tensors by key; what made those is not run. numbers: those of what nothing
        in the run made, parameters and buffers; it may raise NoNumbers.
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

        def number(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in values:
                    values[id(value)] = numbers(value)
                return values[id(value)]
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return _FLOATS if isinstance(value, torch.dtype) and value.is_floating_point else value

        for index in sorted(needed):
            op = self.ops[index]
            assert op.function is not None
            out = op.function(*tree_map(number, op.args), **tree_map(number, op.kwargs))
            for made, result in zip(op.makes, tensors(out), strict=False):
                if made not in given:
                    values[made] = result.to(_FLOATS) if result.is_floating_point() else result
        return number(self.tensors[key])


def recorded(root: torch.nn.Module, run: Callable[[], Any]) -> ReplayableGraph:
    """What happens in ``root``, a model of shapes alone, when ``run`` is called: operations, and calls of modules."""
    with torch.no_grad(), Recorder(root, whole=True) as recorder:
        run()
    assert recorder.whole is not None
    return ReplayableGraph(**vars(recorder.whole))


__all__ = ["PASSING", "PRODUCTS", "NoNumbers", "ReplayableGraph", "recorded"]
