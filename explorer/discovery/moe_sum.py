"""Follow the routed experts' output to where something else joins it, and find what joins."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from explorer.discovery.candidates import (
    HostFindings,
    child_calls,
    is_norm,
    latest_result,
    own_calls,
)
from explorer.discovery.dense_branch import find_dense_branch
from explorer.discovery.details import Step
from explorer.discovery.residual import ADDS, SCALES
from explorer.discovery.router import constant_path
from explorer.discovery.trace_graph import PASSING, Call, TraceGraph, tensors
from explorer.vocabulary import reasons
from explorer.vocabulary.availability import Unavailability


@dataclass(frozen=True)
class _Routed:
    """The routed output at one point of its way through a mixture.

    tensor_id: the tensor it is. last_op: the operation that made it. scale: the number that every
    slot was multiplied with by then. projection: path of the module that brought it back to the
    stream's width, or "". steps: norms and other factors on the way after that.
    """

    tensor_id: int
    last_op: int
    scale: float = 1.0
    projection: str = ""
    steps: tuple[Step, ...] = ()


def find_routed_sum(
    findings: HostFindings,
    graph: TraceGraph,
    module: Call,
    experts: Call | None,
    made: torch.Tensor,
    stop: int,
) -> None:
    """Follow what the experts ``made``, complete at operation ``stop``, through a mixture.

    Sets the routed output as it joins what is added to it, with the factor on it as a part of every
    slot's weight, and finds what joins: a shared expert, or a dense branch with a host of its own.
    """
    path = _path(findings, graph, module, _Routed(id(made), stop - 1))
    joined, add = path[-1], _reader(graph, module, path[-1])
    if add is None or not _joins(graph, module, add, joined):
        # A norm belongs to the whole result then, and so does what the block multiplies it with.
        inside = path[:1] if module.part_of is not None else path
        _set_routed(findings, graph, module, [one for one in inside if not one.steps][-1])
        findings.missing["shared_expert_output"] = _why_nothing_joins(graph, module, made, stop)
        return
    _set_routed(findings, graph, module, [one for one in path if not one.steps][-1])
    findings.set_details(routed_steps=joined.steps)
    findings.last_op = add
    _add_joining(findings, graph, module, experts, add, joined)


def _path(findings: HostFindings, graph: TraceGraph, module: Call, start: _Routed) -> list[_Routed]:
    """Return the routed output at each point of its way to where something joins it."""
    path = [start]
    # A factor on the result is one on the slots only where their weights multiply their outputs.
    folds = not findings.details.runs_all_experts
    while (index := _reader(graph, module, path[-1])) is not None:
        now, op, owner = path[-1], graph.ops[index], graph.owner(index)
        own = graph.onward(now.tensor_id)
        after = replace(now, tensor_id=op.makes[0] if op.makes else 0, last_op=index)
        if owner.module != module.module and is_norm(graph, owner):
            step = Step("norm", (), 0, by=owner.module)
            after = _Routed(id(owner.output), owner.stop - 1, now.scale, now.projection)
            path.append(replace(after, steps=(*now.steps, step)))
        elif op.name in SCALES and len(op.reads) == 1 and len(op.numbers) == 1:
            number = 1 / op.numbers[0] if op.name.startswith("div") else op.numbers[0]
            if folds and not now.steps:
                path.append(replace(after, scale=now.scale * number))
            else:
                step = Step("scale", (), 0, by=number)
                path.append(replace(after, steps=(*now.steps, step)))
        elif op.name in ("mul", "mul_") and len(op.reads) == 2:
            other = next((key for key in op.reads if key not in own), None)
            by = None if other is None else constant_path(graph, module, other, index)
            if by is None:
                break
            path.append(replace(after, steps=(*now.steps, Step("scale", (), 0, by=by))))
        elif op.name in ("mm", "addmm") and not now.steps and _widens(graph, index, owner, own):
            # A number before a bias is no part of the bias, and one after it is.
            folds = folds and op.name == "mm"
            path.append(replace(after, projection=owner.module))
        else:
            break
    return path


def _reader(graph: TraceGraph, module: Call, now: _Routed) -> int | None:
    """Return the first operation of a mixture that makes something new of its routed output."""
    readers = (
        index
        for key in graph.onward(now.tensor_id)
        for index in graph.readers.get(key, ())
        if now.last_op < index < module.stop and graph.ops[index].name not in PASSING
    )
    return min(readers, default=None)


def _widens(graph: TraceGraph, index: int, owner: Call, own: set[int]) -> bool:
    """Return whether an operation multiplies with a module's matrix and changes the width."""
    op = graph.ops[index]
    read = next((key for key in op.reads if key in own), None)
    return (
        read is not None
        and owner.fn is not None
        and not any(True for _ in owner.fn.children())
        and any(parameter.dim() == 2 for parameter in owner.fn.parameters())
        and graph.tensors[op.makes[0]].shape[-1] != graph.tensors[read].shape[-1]
    )


def _joins(graph: TraceGraph, module: Call, index: int, now: _Routed) -> bool:
    """Return whether an operation adds something to the routed output that is no constant."""
    op, own = graph.ops[index], graph.onward(now.tensor_id)
    return (
        op.name in ADDS
        and len(op.reads) == 2
        and any(
            key not in own and constant_path(graph, module, key, index) is None for key in op.reads
        )
    )


def _why_nothing_joins(
    graph: TraceGraph, module: Call, made: torch.Tensor, stop: int
) -> Unavailability:
    """Return why there is no shared expert where nothing was found that joins the routed output."""
    for name in ADDS:
        for index in graph.indices(module, name):
            reads = graph.ops[index].reads
            if (
                index >= stop
                and len(reads) == 2
                and all(graph.tensors[key].shape == made.shape for key in reads)
                and all(constant_path(graph, module, key, index) is None for key in reads)
            ):
                return reasons.ADDED_BESIDE_EXPERTS
    return reasons.NO_SHARED_EXPERT


def _set_routed(findings: HostFindings, graph: TraceGraph, module: Call, routed: _Routed) -> None:
    """Serve the routed output at this point, and the slots with the factor that it has there."""
    candidates, scale = findings.candidates, routed.scale
    findings.last_op = max(routed.last_op, findings.last_op or 0)
    if scale != 1:
        for name in ("expert_weights", "expert_outputs"):
            if name in candidates:
                candidates[name] = replace(candidates[name], scale=scale)
        if (scoring := findings.details.scoring) is not None:
            factor = scoring.factor
            factor = factor * scale if isinstance(factor, float | int) else None
            findings.set_details(scoring=replace(scoring, factor=factor))
    if routed.projection:
        findings.set_details(routed_projection=routed.projection)
        findings.sizes["latent_size"] = candidates["routed_output"].tensor.shape[-1]
    if scale != 1 or routed.projection:
        earlier = [c for c in graph.inside(module) if c.start <= routed.last_op < c.stop]
        found = latest_result([c for c in earlier if c.fn is not None], routed.tensor_id)
        if found is None and not routed.projection:
            found = replace(candidates["routed_output"], scale=scale)
        elif found is None:
            del candidates["routed_output"]
        findings.add("routed_output", found, reasons.NOT_RETURNED)


def _add_joining(
    findings: HostFindings,
    graph: TraceGraph,
    module: Call,
    experts: Call | None,
    add: int,
    joined: _Routed,
) -> None:
    """Find what operation ``add`` adds to the routed output: a shared expert or a dense branch."""
    own = graph.onward(joined.tensor_id)
    other = next(read for read in graph.ops[add].reads if read not in own)
    # A call that ends later may have written the sum over this operand.
    earlier = [c for c in own_calls(graph, module) if c.stop <= add]
    inner = child_calls(graph, module)
    candidate = latest_result(earlier, other) or latest_result(inner, other)
    shared = _shared_module(graph, module, experts, inner, graph.tensors[other].shape[-1])
    if shared is not None:
        reason = reasons.SHARED_EXPERT_NOT_RETURNED
        if findings.add("shared_expert_output", candidate, reason) is not None:
            findings.set_details(shared=shared.module, shared_gated=id(shared.output) != other)
        return
    result = latest_result(inner, other) or candidate
    findings.dense = dense = find_dense_branch(graph, module, other, add, result)
    if dense is not None:
        findings.missing |= dict.fromkeys(("mlp_activation", "mlp_neurons"), reasons.DENSE_BESIDE)
    if dense is not None and module.part_of is not None:
        findings.missing["shared_expert_output"] = reasons.DENSE_NOT_SHARED
    elif dense is not None and result == candidate:
        findings.missing["shared_expert_output"] = reasons.DENSE_ADDS_IT
    else:
        findings.add("shared_expert_output", candidate, reasons.SHARED_EXPERT_NOT_RETURNED)


def _shared_module(
    graph: TraceGraph, module: Call, experts: Call | None, inner: list[Call], width: int
) -> Call | None:
    """Return the call of the shared expert among those of a mixture's children, if it has one.

    Of a mixture without a module of its own, that is a child that reads what the experts read.
    """

    def root(call: Call) -> int | None:
        entering = next(tensors((call.args, call.kwargs)), None)
        return None if entering is None else graph.back(id(entering), call.start)[-1]

    for call in inner:
        if (
            isinstance(call.output, torch.Tensor)
            and call.output.shape[-1] == width
            and call is not experts
            and any(True for _ in call.fn.children())
            and (experts is None or not call.start <= experts.start < call.stop)
            and (module.part_of is None or experts is None or root(call) == root(experts))
        ):
            return call
    return None
