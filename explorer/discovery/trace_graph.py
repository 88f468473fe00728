"""One forward of a model, recorded: every tensor operation and every call that led to it.

Two views of the same run are kept side by side. *Operations* are what the
dispatcher ran, with the tensors they read and made: the data's own history.
*Calls* are the modules and the function calls in the modeling code, each
spanning a range of operations: the places where a value can be handed over.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from explorer.engine.instrument import instrumented
from explorer.engine.nnsight_api import SourceNotAvailable, bind
from explorer.engine.reference_kernels import reference, runs_kernels

#: Operations that hand their one tensor on with the same numbers, perhaps laid out differently.
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

#: Code whose calls are not worth following: bookkeeping, not the forward's arithmetic.
NOT_FOLLOWED = ("transformers.cache_utils", "transformers.masking_utils", "transformers.utils")


@dataclass(frozen=True)
class Op:
    """One operation the dispatcher ran: its name, the ids of the tensors it read and made, and the plain numbers among its arguments."""

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    numbers: tuple[float, ...] = ()


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
    args: tuple
    kwargs: dict
    start: int
    output: Any = None
    stop: int = 0
    parent: Call | None = None
    began: int = 0
    ended: int = 0
    #: Of a module's call: the module in whose forward it was made, and the labels that lead to it there.
    made_in: tuple[str, tuple[str, ...]] | None = None
    #: The module's call this is a stretch of, where it is no call that was made but a part without a module.
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

    def add(
        self,
        name: str,
        reads: Iterable[torch.Tensor],
        makes: Iterable[torch.Tensor],
        numbers: Iterable[float] = (),
    ) -> None:
        reads, makes = tuple(reads), tuple(makes)
        index = len(self.ops)
        self.ops.append(Op(name, tuple(map(id, reads)), tuple(map(id, makes)), tuple(numbers)))
        for tensor in reads:
            self.tensors[id(tensor)] = tensor
            self.readers.setdefault(id(tensor), []).append(index)
        for tensor in makes:
            self.tensors[id(tensor)] = tensor
            self.makers.setdefault(id(tensor), []).append(index)

    def maker(self, key: int, before: int | None = None) -> int | None:
        """The last operation that made (or changed in place) tensor ``key``, before an operation."""
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
        """For each operation the innermost module's call it ran in; asked for once the run is over."""
        found: list[Call | None] = [None] * len(self.ops)
        for call in self.calls:  # outer calls come first
            if not call.labels:
                found[call.start : call.stop] = [call] * (call.stop - call.start)
        return found

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
    while (call := call.parent) is not None:
        if call is ancestor:
            return True
    return False


class _Operations(TorchDispatchMode):
    def __init__(self, graph: TraceGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        numbers = [x for x in args if isinstance(x, (int, float)) and not isinstance(x, bool)]
        self.graph.add(
            func._schema.name.split("::")[-1], tensors((args, kwargs or {})), tensors(out), numbers
        )
        return out


def _followed(fn: Any) -> bool:
    """Whether a call's own operations are worth seeing: a Python function of the modeling code."""
    inner = inspect.unwrap(fn) if callable(fn) else fn
    home = getattr(inner, "__module__", None) or ""
    return (
        isinstance(fn, (types.FunctionType, types.MethodType))
        and home.startswith("transformers.")
        and not home.startswith(NOT_FOLLOWED)
    )


class _Calls:
    """Rewrites the forwards of the recorded modules so that each call reports itself."""

    def __init__(self, graph: TraceGraph) -> None:
        self.graph = graph
        self.current: Call | None = None
        self.calling: tuple[torch.nn.Module | None, tuple[str, tuple[str, ...]] | None] = (
            None,
            None,
        )
        self.clock = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def run(self, call: Call, fn: Callable) -> Any:
        call.parent, self.current = self.current, call
        self.graph.calls.append(call)
        call.began = self.tick()
        try:
            call.output = fn(*call.args, **call.kwargs)
        finally:
            self.current = call.parent
        call.stop, call.ended = len(self.graph.ops), self.tick()
        for tensor in tensors((call.args, call.kwargs, call.output)):
            self.graph.tensors[id(tensor)] = tensor
        return call.output

    def op(self, module: str, labels: tuple[str, ...]) -> Callable:
        """The callback an instrumented function makes at each of its operations."""
        followed: dict[tuple, Callable] = {}

        def operation(location: str, fn: Callable, *args: Any, **kwargs: Any) -> Any:
            own = (*labels, location.removeprefix("source."))
            fn = reference(fn)  # the run is of shapes alone
            start = len(self.graph.ops)
            if fn is bind:
                return self.run(Call(module, own, None, args, {}, start), bind)
            if isinstance(fn, torch.nn.Module):  # reports itself, by its own path
                self.calling = (fn, (module, own))
                return fn(*args, **kwargs)
            target = fn
            if _followed(fn):
                if (own, fn) not in followed:
                    followed[own, fn] = _instrumented(fn, self.op(module, own))
                target = followed[own, fn]
            return self.run(Call(module, own, fn, args, kwargs, start), target)

        return operation

    def forward(self, module: torch.nn.Module, path: str) -> Callable:
        own = module.forward
        if type(module).__module__.startswith("transformers."):
            own = _instrumented(own, self.op(path, ()))

        def forward(*args: Any, **kwargs: Any) -> Any:
            called, made_in = self.calling
            self.calling, made_in = (None, None), made_in if called is module else None
            return self.run(
                Call(path, (), module, args, kwargs, len(self.graph.ops), made_in=made_in), own
            )

        return forward


def _instrumented(fn: Callable, op: Callable) -> Callable:
    try:
        return instrumented(fn, op)
    except SourceNotAvailable:
        return fn


def _in_torch(location: str, fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """What a forward that is not recorded does at each of its operations."""
    return reference(fn)(*args, **kwargs)


@contextmanager
def record_graph(root: torch.nn.Module, paths: Iterable[str]) -> Iterator[TraceGraph]:
    """Record what happens inside the modules at ``paths`` (and all below them) of ``root``.

    The model, of shapes alone, must not be wrapped by the engine and is left as it was found.
    Where a package's kernel would run, in any of its blocks, the torch function does.
    """
    graph = TraceGraph()
    calls = _Calls(graph)
    operations = _Operations(graph)
    chosen: dict[str, torch.nn.Module] = {}
    for path in paths:
        top = root.get_submodule(path)
        for name, module in top.named_modules():
            chosen.setdefault(f"{path}.{name}" if name else path, module)
    tops = [root.get_submodule(path) for path in paths]
    seen = set(chosen.values())
    others = [module for module in root.modules() if module not in seen and runs_kernels(module)]

    handles = []
    for top in tops:
        handles.append(top.register_forward_pre_hook(lambda *_: operations.__enter__() and None))
        handles.append(
            top.register_forward_hook(
                lambda *_: operations.__exit__(None, None, None), always_call=True
            )
        )
    try:
        for path, module in chosen.items():
            module.__dict__["forward"] = calls.forward(module, path)
        for module in others:
            module.__dict__["forward"] = _instrumented(module.forward, _in_torch)
        yield graph
    finally:
        for module in (*chosen.values(), *others):
            module.__dict__.pop("forward", None)
        for handle in handles:
            handle.remove()
