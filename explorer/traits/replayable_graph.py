"""A run of shapes alone, recorded with its operations, so that any part of it can be run again with numbers.

The run costs what shapes cost, whatever the model's size. What a part of it *does* is asked
afterwards: the tensors it starts from are given numbers, and the operations up to the
tensor in question are run again on those.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from explorer.discovery.trace_graph import PASSING, Call, TraceGraph, tensors

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
    """A recorded run with the operations themselves. ``steps`` holds function, arguments and keywords of each."""

    steps: list[tuple[Callable, tuple, dict]] = field(default_factory=list)

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
            func, args, kwargs = self.steps[index]
            out = func(*tree_map(number, args), **tree_map(number, kwargs))
            for made, result in zip(self.ops[index].makes, tensors(out)):
                if made not in given:
                    values[made] = result.to(_FLOATS) if result.is_floating_point() else result
        return number(self.tensors[key])


class _Steps(TorchDispatchMode):
    """Records every operation; what writes into a tensor counts as a maker of all its views."""

    def __init__(self, trail: ReplayableGraph) -> None:
        super().__init__()
        self.trail = trail
        self.views: dict[int, list[int]] = {}

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        trail = self.trail
        numbers = [x for x in args if isinstance(x, (int, float)) and not isinstance(x, bool)]
        reads, makes = list(tensors((args, kwargs))), list(tensors(out))
        trail.steps.append((func, args, kwargs))
        trail.add(func._schema.name.split("::")[-1], reads, makes, numbers)
        index = len(trail.ops) - 1
        read = {id(t) for t in reads}
        for tensor in (*reads, *makes):
            others = self.views.setdefault(tensor.untyped_storage()._cdata, [])
            if id(tensor) not in others:
                others.append(id(tensor))
        for tensor in makes:
            if id(tensor) in read:  # written in place
                for other in self.views[tensor.untyped_storage()._cdata]:
                    if other != id(tensor):
                        trail.makers.setdefault(other, []).append(index)
        return out


def recorded(root: torch.nn.Module, run: Callable[[], Any]) -> ReplayableGraph:
    """What happens in ``root``, a model of shapes alone, when ``run`` is called: operations, and calls of modules."""
    trail = ReplayableGraph()
    stack: list[Call] = []
    clock = 0

    def entering(path: str) -> Callable:
        def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            nonlocal clock
            clock += 1
            call = Call(
                path,
                (),
                module,
                args,
                kwargs,
                len(trail.ops),
                parent=stack[-1] if stack else None,
                began=clock,
            )
            trail.calls.append(call)
            stack.append(call)

        return hook

    def leaving(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        nonlocal clock
        clock += 1
        call = stack.pop()
        call.output, call.stop, call.ended = output, len(trail.ops), clock
        for tensor in tensors((call.args, call.kwargs, call.output)):
            trail.tensors[id(tensor)] = tensor

    with ExitStack() as hooks:
        for path, module in root.named_modules():
            hooks.enter_context(
                _removed(module.register_forward_pre_hook(entering(path), with_kwargs=True))
            )
            hooks.enter_context(_removed(module.register_forward_hook(leaving, with_kwargs=True)))
        with torch.no_grad(), _Steps(trail):
            run()
    return trail


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


__all__ = ["PASSING", "PRODUCTS", "NoNumbers", "ReplayableGraph", "recorded"]
