"""Running rewritten copies of forwards, with taps before and after some of their calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from explorer.engine.instrument import OPERATORS, instrumented
from explorer.engine.nnsight_api import NO_SKIP, STATE, SourceNotAvailable, State, bind, make_op
from explorer.engine.reference_kernels import reference

#: Gets ``(args, kwargs)`` before a call or what the call returned after it; returns what to go on
#: with in its place, or None for the same.
Tap = Callable[[Any], Any]
#: Gives the engine's interleaver and the path of a forward where somebody reads that forward's
#: operations through the engine's own ``.source``, else Nones.
Locate = Callable[[], tuple[Any, str | None]]


@dataclass
class CallTaps:
    """The taps of one call inside a forward, and of the calls that it makes, by label."""

    before: list[Tap] = field(default_factory=list)
    after: list[Tap] = field(default_factory=list)
    calls: dict[str, CallTaps] = field(default_factory=dict)


@dataclass
class _Rewritten:
    """A rewritten function, and the taps that it runs with at the moment."""

    run: Any = None
    taps: CallTaps = field(default_factory=CallTaps)


class TappedForwards:
    """The rewritten forwards of one model's modules, each rewritten once.

    is_listening: whether what passes belongs to the run that the taps are for; elsewhere calls run
    untapped. reference_kernels: whether a torch function runs in place of a package's kernel.
    """

    def __init__(self, is_listening: Callable[[], bool], reference_kernels: bool) -> None:
        self._is_listening = is_listening
        self._reference_kernels = reference_kernels
        self._states: dict[torch.nn.Module, _Rewritten] = {}

    def divert(self, module: torch.nn.Module, taps: CallTaps, undo: ExitStack) -> None:
        """Run the rewritten copy of a module's forward, with ``taps``, until ``undo`` closes."""
        state = module.__dict__[STATE]
        if module not in self._states:
            rewritten = _Rewritten()

            def locate() -> tuple[Any, str | None]:
                return state.active()[:2] if state.sourced else (None, None)

            operation = self._operation(rewritten, locate)
            rewritten.run = _tapped_state(instrumented(state.original, operation))
            self._states[module] = rewritten
        rewritten = self._states[module]
        rewritten.taps = taps
        undo.callback(setattr, state, "__class__", State)
        state.__class__ = rewritten.run

    def _operation(self, rewritten: _Rewritten, locate: Locate) -> Callable:
        """Return what a rewritten forward calls at each of its operations."""
        pass_through = make_op(locate)
        inner: dict[tuple[str, Callable], _Rewritten] = {}

        def operation(location: str, fn: Callable, *args: Any, **kwargs: Any) -> Any:
            fn = reference(fn) if self._reference_kernels else fn
            taps = rewritten.taps.calls.get(location.removeprefix("source."))
            if taps is None or not self._is_listening():
                return fn(*args) if fn in OPERATORS else pass_through(location, fn, *args, **kwargs)
            for tap in taps.before:
                args, kwargs = tap((args, kwargs)) or (args, kwargs)
            if taps.calls and fn is not bind:
                if (location, fn) not in inner:
                    inner[location, fn] = self._rewrite_called(fn, location, locate)
                inner[location, fn].taps = taps
                out = _run_called(inner[location, fn].run, fn, location, locate, args, kwargs)
            elif fn in OPERATORS:
                out = fn(*args)
            else:
                out = pass_through(location, fn, *args, **kwargs)
            for tap in taps.after:
                changed = tap(out)
                out = out if changed is None else changed
            return out

        return operation

    def _rewrite_called(self, fn: Callable, location: str, locate: Locate) -> _Rewritten:
        """Rewrite a function that a forward calls; what has no source stays as it is."""
        rewritten = _Rewritten()
        try:
            rewritten.run = instrumented(
                fn, self._operation(rewritten, lambda: _inside(locate, location))
            )
        except SourceNotAvailable:
            rewritten.run = fn
        return rewritten


def _run_called(
    run: Callable, fn: Callable, location: str, locate: Locate, args: tuple, kwargs: dict
) -> Any:
    """Call ``run``, the rewritten ``fn``.

    Where somebody looks into the forward, handle the call as the engine handles its operations.
    """
    interleaver, path = locate()
    if interleaver is None:
        return run(*args, **kwargs)
    base = f"{path}.{location}"
    args, kwargs = interleaver.handle(f"{base}.input", (args, kwargs))
    out = interleaver.handle(f"{base}.skip", NO_SKIP)
    if out is NO_SKIP:
        if base in interleaver.sourced:
            interleaver.handle(f"{base}.fn", fn)
        out = run(*args, **kwargs)
    return interleaver.handle(f"{base}.output", out)


def _tapped_state(body: Callable) -> type:
    """Return the class of a module's engine state while ``body`` runs in place of its own.

    What the engine meanwhile installs (its ``.source`` does so on first use) goes
    where it always goes and is what runs afterwards.
    """
    return type(
        "TappedState",
        (State,),
        {"__slots__": (), "body": property(lambda _: body, State.body.__set__)},
    )


def _inside(locate: Locate, location: str) -> tuple[Any, str | None]:
    """Return the engine's interleaver and path inside an operation it looks into, else Nones."""
    interleaver, path = locate()
    base = f"{path}.{location}"
    if interleaver is not None and interleaver.sourced.get(base):
        return interleaver, base
    return None, None
