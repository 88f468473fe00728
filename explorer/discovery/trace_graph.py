"""One forward of a model, recorded: every tensor operation and every call that led to it.

Two views of the same run are kept side by side. *Operations* are what the
dispatcher ran, with the tensors they read and made: the data's own history.
*Calls* are the modules and the function calls in the modeling code, each
spanning a range of operations: where a value can be read or replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

#: Operations that return their one tensor with the same numbers, perhaps in another shape.
PASSING = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "clone",
        "contiguous",
        "_to_copy",
        "to",
        "transpose",
        "permute",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "slice",
        "alias",
        "detach",
        "lift_fresh",
    ]
)


@dataclass(frozen=True)
class Op:
    """One operation the dispatcher ran.

    reads, makes: ids of the tensors among its arguments and results. numbers: the plain numbers
    among its arguments. function, args, kwargs: the call itself, with which it can be run again.
    """

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    numbers: tuple[float, ...] = ()
    function: Callable[..., Any] | None = field(default=None, compare=False)
    args: tuple[Any, ...] = field(default=(), compare=False)
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any], compare=False)


@dataclass
class Call:
    """One call in the modeling code: a module, a function, or an assignment (``fn`` is None).

    ``labels`` lead to it inside the module's forward, outermost first, and are
    empty for the module itself. ``start`` and ``stop`` bound the operations it
    ran; ``began`` and ``ended`` order it among all calls.
    """

    module: str
    labels: tuple[str, ...]
    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    start: int
    output: Any = None
    stop: int = 0
    parent: Call | None = None
    began: int = 0
    ended: int = 0
    #: Of a module's call: the module whose forward made it, and the labels that lead to it there.
    made_in: tuple[str, tuple[str, ...]] | None = None
    #: Where this is no call but a part of a module's forward: the call of that module.
    part_of: Call | None = None

    @property
    def name(self) -> str:
        return (
            getattr(self.fn, "__name__", type(self.fn).__name__)
            if self.fn is not None
            else self.labels[-1]
        )

    def arguments(self) -> Iterator[tuple[int | str, Any]]:
        """Every argument with its position or keyword."""
        yield from enumerate(self.args)
        yield from self.kwargs.items()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


@dataclass
class TraceGraph:
    """The recorded run. Tensors are kept, so that an id always names one tensor."""

    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    makers: dict[int, list[int]] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)

    def add(self, op: Op, reads: Sequence[torch.Tensor], makes: Sequence[torch.Tensor]) -> None:
        """Append an operation, with the tensors it read and made."""
        index = len(self.ops)
        self.ops.append(op)
        for tensor in reads:
            self.tensors[id(tensor)] = tensor
            self.readers.setdefault(id(tensor), []).append(index)
        for tensor in makes:
            self.tensors[id(tensor)] = tensor
            self.makers.setdefault(id(tensor), []).append(index)

    def maker(self, key: int, before: int | None = None) -> int | None:
        """Return the last operation before another that made or wrote into tensor ``key``."""
        made = [i for i in self.makers.get(key, ()) if before is None or i < before]
        return made[-1] if made else None

    def back(self, key: int, before: int | None = None) -> list[int]:
        """Tensor ``key`` and what it is a copy or view of, nearest first."""
        chain = [key]
        while (index := self.maker(key, before)) is not None and self.ops[index].name in PASSING:
            key, before = self.ops[index].reads[0], index
            chain.append(key)
        return chain

    def onward(self, key: int) -> set[int]:
        """Tensor ``key`` and every copy or view made of it."""
        found, todo = {key}, [key]
        while todo:
            for index in self.readers.get(todo.pop(), ()):
                if self.ops[index].name in PASSING:
                    new = [made for made in self.ops[index].makes if made not in found]
                    found.update(new)
                    todo.extend(new)
        return found

    def indices(self, call: Call, name: str) -> list[int]:
        """The operations called ``name`` that ran within ``call``."""
        return [i for i in range(call.start, call.stop) if self.ops[i].name == name]

    @cached_property
    def owners(self) -> list[Call | None]:
        """For each operation, the innermost module's call it ran in; valid after the run."""
        found: list[Call | None] = [None] * len(self.ops)
        for call in self.calls:  # outer calls come first
            if not call.labels:
                found[call.start : call.stop] = [call] * (call.stop - call.start)
        return found

    def owner(self, op: int) -> Call:
        """Return the innermost module's call that an operation ran in.

        Raises LookupError for an operation outside the recorded modules.
        """
        if (call := self.owners[op]) is None:
            raise LookupError(f"operation {op} ran in no recorded module")
        return call

    def last_maker(self, key: int) -> int:
        """Return the last operation that made tensor ``key``. Raises LookupError without one."""
        if (op := self.maker(key)) is None:
            raise LookupError("no recorded operation made the tensor")
        return op

    def only_call(self, path: str) -> Call:
        """Return the call of a module that ran exactly once. Raises LookupError otherwise."""
        if (call := self.module(path)) is None:
            raise LookupError(f"{path} did not run exactly once")
        return call

    def module(self, path: str) -> Call | None:
        """The call of the module at ``path``, or None when it did not run exactly once."""
        found = [c for c in self.calls if c.module == path and not c.labels]
        return found[0] if len(found) == 1 else None

    def inside(self, call: Call) -> list[Call]:
        """Calls made while ``call`` ran, that ran once, so that their label names one moment."""
        outer = call.part_of or call
        within = [
            c
            for c in self.calls
            if c is not call and call.start <= c.start and c.stop <= call.stop and _below(c, outer)
        ]
        if call.part_of is not None:  # what ran no operation at all is within by the clock
            within = [c for c in within if call.began <= c.began and c.ended <= call.ended]
        counts: dict[tuple, int] = {}
        for c in within:
            counts[c.module, c.labels] = counts.get((c.module, c.labels), 0) + 1
        return [c for c in within if counts[c.module, c.labels] == 1]


def _below(call: Call, ancestor: Call) -> bool:
    above = call.parent
    while above is not None and above is not ancestor:
        above = above.parent
    return above is not None
