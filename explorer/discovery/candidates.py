"""Spots: values recognised in one recorded run, before their axes are worked out."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from explorer.discovery.details import HostDetails
from explorer.discovery.hook_point import ExpertSelection, HookPoint, arrange
from explorer.discovery.trace_graph import Call, TraceGraph, tensors
from explorer.engine.instrument import OPERATORS
from explorer.vocabulary.availability import Unavailability


@dataclass(frozen=True)
class TensorCandidate:
    """One tensor, and where in the run it is handed over.

    ``repeat`` names an axis that what comes after repeats, and how often; ``axes`` the order
    of the tensor's axes, where what hands it over fixes it; ``written_over`` whether what comes after writes into the very tensor;
    ``selection`` that the value is some entries of it.
    """

    tensor: torch.Tensor | None
    call: Call
    side: str
    element: int | str | None
    repeat: tuple[str, int] | None = None
    axes: tuple[str, ...] | None = None
    written_over: bool = False
    selection: ExpertSelection | None = None

    @property
    def when(self) -> int:
        return self.call.began if self.side == "input" else self.call.ended

    @property
    def description(self) -> str:
        """The place in words, from the names the modeling code gives its calls."""
        module = self.call.module.rsplit(".", 1)[-1]
        if not self.call.labels:
            owner = "the block" if module.isdigit() else f"the module {module}"
            return f"{self._what} of {owner}"
        owner = self.call.parent
        where = "the block" if module.isdigit() else module
        within = (
            f"in {owner.name}"
            if owner is not None and owner.labels
            else f"in the forward of {where}"
        )
        if self.call.fn in OPERATORS:
            side = (
                "" if self.side == "output" else f"the {('left', 'right')[self.element]} side of "
            )
            return f"{side}a {OPERATORS[self.call.fn]}, {within}"
        if self.call.fn is None:
            variable = self.call.labels[-1].rsplit("_", 1)[0]
            return f"what {variable} is assigned, {within}"
        return f"{self._what} of {self.call.name}, {within}"

    @property
    def _what(self) -> str:
        """The side and element in words, an argument by the name the called function gives it."""
        if self.side == "output":
            return "the output" if self.element is None else f"output {self.element}"
        name = self.element
        fn = (
            getattr(self.call.fn, "forward", self.call.fn) if not self.call.labels else self.call.fn
        )
        if isinstance(name, int) and (parameters := _parameters(fn)) and name < len(parameters):
            name = parameters[name]
        return f"argument {name}"

    def place(self, axes: tuple[str, ...], sizes: dict[str, int]) -> HookPoint | None:
        """This spot as a place, or None when its tensor does not have the layout's axes."""
        axes = axes if self.selection is None else self.selection.native_axes(axes)
        shape = (
            tuple(self.tensor.shape)
            if self.tensor is not None
            else tuple(sizes[a] for a in self.axes or axes)
        )
        if self.repeat is not None:
            axis, times = self.repeat
            sizes = {**sizes, axis: sizes[axis] // times}
        arrangement = arrange(shape, axes, sizes, self.axes)
        if arrangement is None:
            return None
        description = self.description
        if self.repeat is not None:
            description += f", each of its heads repeated {self.repeat[1]} times as it does next"
        if self.selection is not None:
            description += (
                f", of which the slots are the entries that {self.selection.indices} names"
                if self.selection.indices
                else ", the first of it"
            )
        return HookPoint(
            self.call.module,
            self.side,
            self.element,
            arrangement,
            description,
            self.call.labels,
            self.repeat,
            self.written_over,
            selection=self.selection,
        )


def _parameters(fn: Any) -> list[str]:
    """The positional parameters of a Python function by name; empty for what has no signature."""
    try:
        names = list(inspect.signature(inspect.unwrap(fn)).parameters)
    except (TypeError, ValueError):
        return []
    return names[1:] if names[:1] == ["self"] else names


@dataclass
class HostFindings:
    """What was found on one host of one block: spots by value name, sizes, and why the rest is missing.

    ``made`` is the operation that made its result, where that is not the last one that multiplies with weights.
    """

    module: str
    candidates: dict[str, TensorCandidate] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    missing: dict[str, Unavailability] = field(default_factory=dict)
    details: HostDetails = HostDetails()
    made: int | None = None

    def note(self, **changes: Any) -> None:
        """Set fields of ``details``."""
        self.details = replace(self.details, **changes)


def result(call: Call, keys: Iterable[int]) -> TensorCandidate | None:
    """The element of what ``call`` returned that is one of the tensors ``keys``."""
    keys = set(keys)
    if isinstance(call.output, torch.Tensor):
        return (
            TensorCandidate(call.output, call, "output", None) if id(call.output) in keys else None
        )
    if isinstance(call.output, (tuple, list)):
        for index, item in enumerate(call.output):
            if isinstance(item, torch.Tensor) and id(item) in keys:
                return TensorCandidate(item, call, "output", index)
    return None


def argument(call: Call, keys: Iterable[int]) -> TensorCandidate | None:
    """The argument of ``call`` that is one of the tensors ``keys``."""
    keys = set(keys)
    for position, item in call.arguments():
        if isinstance(item, torch.Tensor) and id(item) in keys:
            return TensorCandidate(item, call, "input", position)
    return None


def innermost(calls: Iterable[Call], index: int) -> list[Call]:
    """The calls during which operation ``index`` ran, innermost first."""
    return sorted((c for c in calls if c.start <= index < c.stop), key=lambda c: c.stop - c.start)


def bound(call: Call, name: str) -> TensorCandidate | None:
    """The argument of a function call by the name its signature gives it."""
    names = list(inspect.signature(inspect.unwrap(call.fn)).parameters)
    if name in call.kwargs:
        return TensorCandidate(call.kwargs[name], call, "input", name)
    position = names.index(name) if name in names else len(call.args)
    if position < len(call.args):
        return TensorCandidate(call.args[position], call, "input", position)
    return None


def maker_candidate(within: list[Call], key: int) -> TensorCandidate | None:
    """The last call or assignment, as seen from one forward, whose result is tensor ``key``."""
    made = [spot for call in within if (spot := result(call, {key})) is not None]
    return max(made, key=lambda spot: spot.when) if made else None


def children(graph: TraceGraph, module: Call) -> list[Call]:
    """The direct child modules a module called, in order."""
    return [
        c
        for c in graph.inside(module)
        if not c.labels and c.module.rpartition(".")[0] == module.module
    ]


#: Operations that norm what they are given, or take the size of it to norm by.
_NORMING = frozenset(
    [
        "native_layer_norm",
        "_fused_rms_norm",
        "rms_norm",
        "rsqrt",
        "linalg_vector_norm",
        "native_group_norm",
    ]
)
_NOT_IN_A_NORM = frozenset(["_softmax", "softmax", "bmm", "topk", "convolution", "_grouped_mm"])


def is_norm(graph: TraceGraph, call: Call) -> bool:
    """Whether a call is of a module that norms what it is called with: by an operation of its own, and returns as much."""
    entered = next(tensors((call.args, call.kwargs)), None)
    if (
        call.labels
        or entered is None
        or not isinstance(call.output, torch.Tensor)
        or call.output.shape != entered.shape
    ):
        return False
    if any(p.dim() > 1 for p in call.fn.parameters(recurse=False)):
        return False
    names = {graph.ops[i].name for i in range(call.start, call.stop)}
    return not names & _NOT_IN_A_NORM and any(
        graph.ops[i].name in _NORMING and graph.owners[i] is call
        for i in range(call.start, call.stop)
    )


def around(graph: TraceGraph, module: Call, anchor: Call) -> dict[str, tuple[str, ...]]:
    """Names of the child modules called before and after ``anchor`` in a module's forward."""
    name = lambda call: call.module.rpartition(".")[2]  # noqa: E731
    called = children(graph, module)
    return {
        "modules_before": tuple(name(c) for c in called if c.ended < anchor.began),
        "modules_after": tuple(name(c) for c in called if c.began > anchor.ended),
    }
