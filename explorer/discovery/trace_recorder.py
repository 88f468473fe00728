"""Recording forwards of a model: operations at the dispatcher, calls in rewritten forwards."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from explorer.discovery.trace_graph import Call, Op, TraceGraph, tensors
from explorer.engine.instrument import instrumented
from explorer.engine.nnsight_api import SourceNotAvailable, bind
from explorer.engine.reference_kernels import reference, runs_kernels

#: Code whose calls are not worth following: bookkeeping, not the forward's arithmetic.
NOT_FOLLOWED = ("transformers.cache_utils", "transformers.masking_utils", "transformers.utils")


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


class _Operations(TorchDispatchMode):
    """Passes every operation to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.names: dict[Any, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in self.names:
            self.names[func] = func._schema.name.split("::")[-1]
        self.recorder.operation(self.names[func], func, args, kwargs, out)
        return out


class Recorder:
    """Records forwards of a model of shapes alone while it is open.

    ``blocks`` is the run of the modules at ``traced`` and all below them: their operations, and
    their calls down to the functions and assignments of the modeling code. Of the modules at
    ``called`` it has those calls too, without operations. ``whole`` is every operation and every
    call of a module, wherever in the model; None unless asked for. In ``whole``, what writes into a
    tensor counts as a maker of all that share its storage.

    The model must not be wrapped by the engine and is left as it was found. Where a package's
    kernel would run, the torch function does.

    operations: whether operations are recorded, or calls only.
    entered: called before each call of a module, with the path of the module and the call.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        traced: Iterable[str] = (),
        called: Iterable[str] = (),
        whole: bool = False,
        operations: bool = True,
        entered: Callable[[str, Call], None] | None = None,
    ) -> None:
        self.root = root
        self.blocks = TraceGraph()
        self.whole = TraceGraph() if whole else None
        self.running: list[Call] = []
        self._traced, self._called, self._entered = list(traced), list(called), entered
        self._operations = operations
        self._depth = 0
        self._clock = 0
        self._views: dict[int, dict[int, None]] = {}
        self._undo = ExitStack()

    def __enter__(self) -> Recorder:
        calls = _Calls(self.blocks)
        chosen: dict[str, torch.nn.Module] = {}
        for path in (*self._traced, *self._called):
            for name, module in self.root.get_submodule(path).named_modules():
                chosen.setdefault(f"{path}.{name}" if name else path, module)
        seen = set(chosen.values())
        with ExitStack() as undo:
            for path in self._traced:
                top = self.root.get_submodule(path)
                self._hook(undo, top.register_forward_pre_hook(lambda *_: self._count(1)))
                leave = top.register_forward_hook(lambda *_: self._count(-1), always_call=True)
                self._hook(undo, leave)
            for path, module in self.root.named_modules():
                if self.whole is not None:
                    enter = module.register_forward_pre_hook(self._enter(path), with_kwargs=True)
                    self._hook(undo, enter)
                    self._hook(undo, module.register_forward_hook(self._leave, with_kwargs=True))
                if module not in seen and runs_kernels(module):
                    self._replace(undo, module, _instrumented(module.forward, _in_torch))
            for path, module in chosen.items():
                self._replace(undo, module, calls.forward(module, path))
            if self._operations:
                undo.enter_context(_Operations(self))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._undo.__exit__(*exception)

    @staticmethod
    def _hook(undo: ExitStack, handle: Any) -> None:
        undo.callback(handle.remove)

    @staticmethod
    def _replace(undo: ExitStack, module: torch.nn.Module, forward: Callable) -> None:
        """Have a module run another forward."""
        own = module.__dict__.get("forward")
        module.__dict__["forward"] = forward
        if own is None:
            undo.callback(module.__dict__.pop, "forward", None)
        else:
            undo.callback(module.__dict__.__setitem__, "forward", own)

    def _count(self, by: int) -> None:
        self._depth += by

    def operation(self, name: str, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Record one operation where it is to be recorded."""
        if self.whole is None and not self._depth:
            return
        reads, makes = list(tensors((args, kwargs))), list(tensors(out))
        numbers = tuple(x for x in args if isinstance(x, (int, float)) and not isinstance(x, bool))
        op = Op(name, tuple(map(id, reads)), tuple(map(id, makes)), numbers, func, args, kwargs)
        if self._depth:
            self.blocks.add(op, reads, makes)
        if self.whole is not None:
            self.whole.add(op, reads, makes)
            self._written_in_place(self.whole, op, reads, makes)

    def _written_in_place(
        self,
        graph: TraceGraph,
        op: Op,
        reads: Sequence[torch.Tensor],
        makes: Sequence[torch.Tensor],
    ) -> None:
        """Note the last operation as a maker of all that shares storage with what it wrote into."""
        for tensor in (*reads, *makes):
            views = self._views.setdefault(tensor.untyped_storage()._cdata, {})
            views[id(tensor)] = None
        for tensor in makes:
            if id(tensor) in op.reads:
                for other in self._views[tensor.untyped_storage()._cdata]:
                    if other != id(tensor):
                        graph.makers.setdefault(other, []).append(len(graph.ops) - 1)

    def _enter(self, path: str) -> Callable[[torch.nn.Module, tuple, dict], None]:
        def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            graph = self.whole
            assert graph is not None
            self._clock += 1
            parent = self.running[-1] if self.running else None
            start, began = len(graph.ops), self._clock
            call = Call(path, (), module, args, kwargs, start, parent=parent, began=began)
            graph.calls.append(call)
            self.running.append(call)
            if self._entered is not None:
                self._entered(path, call)

        return hook

    def _leave(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        graph = self.whole
        assert graph is not None
        self._clock += 1
        call = self.running.pop()
        call.output, call.stop, call.ended = output, len(graph.ops), self._clock
        for tensor in tensors((call.args, call.kwargs, call.output)):
            graph.tensors[id(tensor)] = tensor


@contextmanager
def record_graph(root: torch.nn.Module, paths: Iterable[str]) -> Iterator[TraceGraph]:
    """Record what happens inside the modules at ``paths`` of ``root``, see `Recorder`."""
    with Recorder(root, paths) as recorder:
        yield recorder.blocks
