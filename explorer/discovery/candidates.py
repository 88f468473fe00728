"""Candidates: tensors of a trace that hold a value, before the order of their axes is known."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from explorer.discovery.details import HostDetails
from explorer.discovery.hook_point import ExpertSelection, HookPoint, arrange
from explorer.discovery.trace_graph import PASSING, Call, TraceGraph, tensors
from explorer.engine.instrument import OPERATORS
from explorer.vocabulary.availability import Unavailability


@dataclass(frozen=True)
class TensorCandidate:
    """A tensor that holds a value, and the call that takes or returns it.

    optional_tensor: the tensor; None where the call takes or returns None in its place, as a state
    before the first token.
    side, element: as of `HookPoint`. repeat: an axis that the code after it repeats, and how often.
    axes: the order of the tensor's axes, where the call fixes it. written_over: whether later code
    writes into the tensor in place. selection: how the value's entries are selected from it. scale:
    what the tensor is multiplied with to be the value.
    """

    optional_tensor: torch.Tensor | None
    call: Call
    side: str
    element: int | str | None
    repeat: tuple[str, int] | None = None
    axes: tuple[str, ...] | None = None
    written_over: bool = False
    selection: ExpertSelection | None = None
    scale: float = 1.0

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor. Raises LookupError where there is None in its place."""
        if self.optional_tensor is None:
            raise LookupError(f"{self.description} is None")
        return self.optional_tensor

    @property
    def time(self) -> int:
        """When the tensor passes, in the order of all calls of the trace."""
        return self.call.began if self.side == "input" else self.call.ended

    @property
    def description(self) -> str:
        """The place in words, from the names in the modeling code."""
        module = self.call.module.rsplit(".", 1)[-1]
        if not self.call.labels:
            owner = "the block" if module.isdigit() else f"the module {module}"
            return f"{self._side_in_words} of {owner}"
        owner = self.call.parent
        where = "the block" if module.isdigit() else module
        within = (
            f"in {owner.name}"
            if owner is not None and owner.labels
            else f"in the forward of {where}"
        )
        if self.call.fn in OPERATORS:
            operand = "right" if self.element == 1 else "left"
            side = "" if self.side == "output" else f"the {operand} side of "
            return f"{side}a {OPERATORS[self.call.fn]}, {within}"
        if self.call.fn is None:
            variable = self.call.labels[-1].rsplit("_", 1)[0]
            return f"the value assigned to {variable}, {within}"
        return f"{self._side_in_words} of {self.call.name}, {within}"

    @property
    def _side_in_words(self) -> str:
        """Side and element in words; an argument by the name of the function's parameter."""
        if self.side == "output":
            return "the output" if self.element is None else f"output {self.element}"
        name = self.element
        fn = self.call.fn
        parameters = _parameters(fn if self.call.labels else getattr(fn, "forward", fn))
        if isinstance(name, int) and name < len(parameters):
            name = parameters[name]
        return f"argument {name}"

    def hook_point(self, axes: tuple[str, ...], sizes: dict[str, int]) -> HookPoint | None:
        """Return the hook point of a value with ``axes``; None when the tensor lacks those axes."""
        axes = axes if self.selection is None else self.selection.native_axes(axes)
        shape = (
            tuple(self.tensor.shape)
            if self.optional_tensor is not None
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
            description += f", each head repeated {self.repeat[1]} times as the code does next"
        if self.selection is not None:
            by = self.selection.indices
            description += f", the entries that {by} selects" if by else ", its first entries"
        if self.scale != 1:
            description += f", times {self.scale:g} as the code does to the experts' sum"
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
            scale=self.scale,
        )


def _parameters(fn: Any) -> list[str]:
    """Return the names of a function's parameters without ``self``; empty without a signature."""
    try:
        names = list(inspect.signature(inspect.unwrap(fn)).parameters)
    except (TypeError, ValueError):
        return []
    return names[1:] if names[:1] == ["self"] else names


@dataclass
class HostFindings:
    """What was found on one host of one block.

    module: path of the host's module. candidates: by value name. sizes: lengths of axes. missing:
    why a value is not among the candidates. last_op: index of the operation that makes the host's
    result, where that is not its last product with weights. dense: what was found on a dense MLP
    beside a mixture. made_by: the operations that make such a dense MLP's result.
    """

    module: str
    candidates: dict[str, TensorCandidate] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    missing: dict[str, Unavailability] = field(default_factory=dict)
    details: HostDetails = field(default_factory=HostDetails)
    last_op: int | None = None
    dense: HostFindings | None = None
    made_by: frozenset[int] = frozenset()

    def add(
        self, name: str, candidate: TensorCandidate | None, otherwise: Unavailability
    ) -> TensorCandidate | None:
        """Record the candidate of a value, or, where it is None, why there is none; return it."""
        if candidate is None:
            self.missing[name] = otherwise
        else:
            self.candidates[name] = candidate
        return candidate

    def set_details(self, **changes: Any) -> None:
        """Replace fields of ``details``."""
        self.details = replace(self.details, **changes)


def result_candidate(call: Call, tensor_ids: Iterable[int]) -> TensorCandidate | None:
    """Return the element of the call's result that is one of the tensors, if any."""
    ids = set(tensor_ids)
    if isinstance(call.output, torch.Tensor):
        found = id(call.output) in ids
        return TensorCandidate(call.output, call, "output", None) if found else None
    if isinstance(call.output, (tuple, list)):
        for index, item in enumerate(call.output):
            if isinstance(item, torch.Tensor) and id(item) in ids:
                return TensorCandidate(item, call, "output", index)
    return None


def argument_candidate(call: Call, tensor_ids: Iterable[int]) -> TensorCandidate | None:
    """Return the argument of the call that is one of the tensors, if any."""
    ids = set(tensor_ids)
    for position, item in call.arguments():
        if isinstance(item, torch.Tensor) and id(item) in ids:
            return TensorCandidate(item, call, "input", position)
    return None


def has_parameter(call: Call, name: str) -> bool:
    """Return whether the called function has a parameter of this name."""
    return name in inspect.signature(inspect.unwrap(call.fn)).parameters


def named_argument(call: Call, name: str) -> TensorCandidate | None:
    """Return the argument that the called function's signature names ``name``, if it was given."""
    names = list(inspect.signature(inspect.unwrap(call.fn)).parameters)
    if name in call.kwargs:
        return TensorCandidate(call.kwargs[name], call, "input", name)
    position = names.index(name) if name in names else len(call.args)
    if position < len(call.args):
        return TensorCandidate(call.args[position], call, "input", position)
    return None


def latest_result(calls: Iterable[Call], tensor_id: int) -> TensorCandidate | None:
    """Return the result of the call or assignment that ended last among those with this result."""
    found = [
        candidate
        for call in calls
        if (candidate := result_candidate(call, {tensor_id})) is not None
    ]
    return max(found, key=lambda candidate: candidate.time) if found else None


def functions_inside(graph: TraceGraph, module: Call) -> list[Call]:
    """Return the calls of modules and functions inside a module's call, without assignments."""
    return [call for call in graph.inside(module) if call.fn is not None]


def own_calls(graph: TraceGraph, module: Call) -> list[Call]:
    """Return the calls and assignments in the module's own forward."""
    return [
        call
        for call in graph.inside(module)
        if call.module == module.module and len(call.labels) == 1
    ]


def calls_around(calls: Iterable[Call], op: int) -> list[Call]:
    """Return the calls during which operation ``op`` ran, innermost first."""
    return sorted((c for c in calls if c.start <= op < c.stop), key=lambda c: c.stop - c.start)


def child_calls(graph: TraceGraph, module: Call) -> list[Call]:
    """Return the calls of a module's direct children, in order."""
    return [
        c
        for c in graph.inside(module)
        if not c.labels and c.module.rpartition(".")[0] == module.module
    ]


#: Operations that normalise their input, or take its size to normalise by.
_NORMALISING = frozenset(
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

#: Operations on the way from a root to what divides by it.
_TO_DIVISOR = PASSING | frozenset(["add", "add_", "clamp", "clamp_min", "clamp_"])

#: What a module around a norm may do besides: anything from number to number, and means.
_AROUND_A_NORM = _TO_DIVISOR | frozenset(
    ["mul", "mul_", "div", "div_", "sub", "sub_", "neg", "pow", "sqrt", "reciprocal", "mean", "sum"]
)


def is_norm(graph: TraceGraph, call: Call) -> bool:
    """Return whether a call is of a norm module: it normalises its input and keeps the shape.

    The module may leave the normalising to a norm inside it.
    """
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
    ops = range(call.start, call.stop)
    if {graph.ops[i].name for i in ops} & _NOT_IN_A_NORM:
        return False
    normalising = [i for i in ops if _normalises(graph, i, call)]
    if any(graph.owners[i] is call for i in normalising):
        return True
    others = {graph.ops[i].name for i in ops if i not in normalising}
    return (
        bool(normalising)
        and others <= _AROUND_A_NORM | _NORMALISING
        and all(p.dim() < 2 for p in call.fn.parameters())
    )


def _normalises(graph: TraceGraph, index: int, call: Call) -> bool:
    """Return whether an operation within a call normalises, or takes a size to normalise by.

    That is a norm as one operation, or a root of fewer numbers than entered the call, which
    something is divided by, in whichever operations it is written.
    """
    op = graph.ops[index]
    if op.name in _NORMALISING:
        return True
    entered = next(tensors((call.args, call.kwargs)))
    if not op.makes or graph.tensors[op.makes[0]].numel() >= entered.numel():
        return False
    if op.name == "pow" and -0.5 in op.numbers:
        return True
    is_root = op.name in ("sqrt", "std") or (op.name == "pow" and 0.5 in op.numbers)
    return is_root and _divides(graph, op.makes[0], call.stop)


def _divides(graph: TraceGraph, tensor_id: int, stop: int) -> bool:
    """Return whether something is divided by a tensor, or by a little more, before ``stop``."""
    todo, seen = [tensor_id], set()
    while todo:
        key = todo.pop()
        for index in graph.readers.get(key, ()):
            op = graph.ops[index]
            if index >= stop or index in seen:
                continue
            seen.add(index)
            if op.name == "reciprocal" or (op.name in ("div", "div_") and op.reads[-1] == key):
                return True
            if op.name == "pow" and -1 in op.numbers:
                return True
            if op.name in _TO_DIVISOR:
                todo += op.makes
    return False


def modules_around(graph: TraceGraph, module: Call, anchor: Call) -> dict[str, tuple[str, ...]]:
    """Return names of the child modules called before and after ``anchor``, as host details."""
    calls = child_calls(graph, module)
    before = [c for c in calls if c.ended < anchor.began]
    after = [c for c in calls if c.began > anchor.ended]
    return {
        field_name: tuple(c.module.rpartition(".")[2] for c in called)
        for field_name, called in (("modules_before", before), ("modules_after", after))
    }
