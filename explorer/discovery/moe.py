"""Find the values of a mixture of experts whose experts are one module, and of a shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    child_calls,
    latest_result,
    own_calls,
)
from explorer.discovery.mlp import DENSE
from explorer.discovery.router import constant_path, find_router
from explorer.discovery.trace_graph import Call, TraceGraph
from explorer.vocabulary import reasons
from explorer.vocabulary.availability import Unavailability

#: Why a mixture has no values of a dense MLP.


@dataclass(frozen=True)
class ExpertsCall:
    """The call of the module that holds all experts, with its expert indices and weights."""

    call: Call
    indices: TensorCandidate
    weights: TensorCandidate


def find_experts(graph: TraceGraph, module: Call) -> ExpertsCall | None:
    """Return the outermost module inside that takes expert indices and weights of their shape."""
    found = [
        experts
        for call in graph.inside(module)
        if not call.labels and (experts := _as_experts(call)) is not None
    ]
    return min(found, key=lambda experts: experts.call.module.count("."), default=None)


def _as_experts(call: Call) -> ExpertsCall | None:
    """Return a call with its first integer argument with a slot axis and weights of that shape."""
    arguments = [
        TensorCandidate(item, call, "input", position)
        for position, item in call.arguments()
        if isinstance(item, torch.Tensor)
    ]
    for indices in arguments:
        if indices.tensor.is_floating_point() or indices.tensor.dim() < 2:
            continue
        for weights in arguments:
            if weights.tensor.is_floating_point() and weights.tensor.shape == indices.tensor.shape:
                return ExpertsCall(call, indices, weights)
    return None


def find_mixture(graph: TraceGraph, module: Call, found: ExpertsCall) -> HostFindings:
    """Find the values of a mixture whose experts are one module; see `find_experts`."""
    experts, indices = found.call, found.indices
    findings = HostFindings(module.module)
    findings.missing = dict.fromkeys(DENSE, reasons.NOT_DENSE)
    findings.candidates = {
        "expert_indices": indices,
        "expert_weights": found.weights,
        "routed_output": TensorCandidate(experts.output, experts, "output", None),
    }
    findings.sizes["top_k"] = indices.tensor.shape[-1]
    findings.set_details(experts=experts.module)
    stacked = next((p.shape[0] for p in experts.fn.parameters() if p.dim() == 3), None)
    if stacked is not None:
        findings.sizes["num_experts"] = stacked
    if (width := _expert_width(graph, experts)) is not None:
        findings.sizes["intermediate_size"] = width
    find_router(findings, graph, module, id(indices.tensor))
    slots = _slot_outputs(graph, experts, findings.sizes["top_k"])
    findings.add("expert_outputs", slots, _why_no_slots(experts))
    findings.last_op = experts.stop - 1
    find_shared_expert(findings, graph, module, experts, experts.output, experts.stop)
    return findings


def _expert_width(graph: TraceGraph, experts: Call) -> int | None:
    """Return how many neurons an expert has.

    That is the width of the first inner module's result, or, where the experts' matrices are one
    tensor, the input width of the down projection.
    """
    for call in graph.inside(experts):
        if not call.labels and isinstance(call.output, torch.Tensor):
            return call.output.shape[-1]
    down = getattr(experts.fn, "down_proj", None)
    if not isinstance(down, torch.Tensor) or down.dim() != 3:
        return None
    return down.shape[1 if getattr(experts.fn, "is_transposed", False) else 2]


def _slot_outputs(graph: TraceGraph, experts: Call, top_k: int) -> TensorCandidate | None:
    """Return the outputs by slot: what is summed over an axis of slots into the routed output."""
    out = experts.output
    shape = (*out.shape[:-1], top_k, out.shape[-1])
    chain = set(graph.back(id(out)))
    for op in graph.indices(experts, "sum"):
        slots = graph.ops[op].reads[0]
        if chain & set(graph.ops[op].makes) and tuple(graph.tensors[slots].shape) == shape:
            earlier = [c for c in graph.inside(experts) if c.labels and c.stop <= op]
            if (candidate := latest_result(earlier, slots)) is not None:
                return candidate
    return None


def _why_no_slots(experts: Call) -> Unavailability:
    """Return why no tensor holds the outputs by slot."""
    # transformers sets this attribute on an experts class whose implementation can be chosen.
    if hasattr(experts.fn, "_is_expert_parallel"):
        return reasons.EXPERTS_ADD_AT_ONCE
    return reasons.EXPERTS_ONE_BY_ONE


def find_shared_expert(
    findings: HostFindings,
    graph: TraceGraph,
    module: Call,
    experts: Call | None,
    routed_output: torch.Tensor,
    stop: int,
) -> None:
    """Find the output of the shared expert: what the mixture adds to its routed output.

    Looks at the operations of ``module`` from index ``stop`` on, where the routed output is done.
    """
    routed = graph.onward(id(routed_output))
    scales = [
        op
        for name in ("mul", "mul_", "div")
        for op in graph.indices(module, name)
        if op >= stop and routed & set(graph.ops[op].reads) and len(graph.ops[op].reads) == 1
    ]
    scaled = {key for op in scales for made in graph.ops[op].makes for key in graph.onward(made)}
    summands = routed | scaled
    adds = [
        op
        for name in ("add", "add_")
        for op in graph.indices(module, name)
        if op >= stop and len(graph.ops[op].reads) == 2
    ]
    add = next((op for op in adds if summands & set(graph.ops[op].reads)), None)
    if add is None:
        shape = routed_output.shape
        other = any(
            all(graph.tensors[k].shape == shape for k in graph.ops[op].reads) for op in adds
        )
        findings.missing["shared_expert_output"] = (
            reasons.ADDED_BESIDE_EXPERTS if other else reasons.NO_SHARED_EXPERT
        )
        return
    reads = graph.ops[add].reads
    if all(k in summands or constant_path(graph, module, k, add) is not None for k in reads):
        findings.missing["shared_expert_output"] = reasons.NO_SHARED_EXPERT
        return
    if not routed & set(reads):
        numbers = [
            1 / n if graph.ops[op].name == "div" else n
            for op in scales
            for n in graph.ops[op].numbers
        ]
        findings.set_details(routed_factor=prod(numbers))
    _add_shared_expert(findings, graph, module, experts, routed_output, add, summands)


def _add_shared_expert(
    findings: HostFindings,
    graph: TraceGraph,
    module: Call,
    experts: Call | None,
    routed_output: torch.Tensor,
    add: int,
    summands: set[int],
) -> None:
    """Add the shared expert's output, the operand of ``add`` that is not the routed output."""
    shared = next(read for read in graph.ops[add].reads if read not in summands)
    # A call that ends later may have written the sum over this operand.
    earlier = [c for c in own_calls(graph, module) if c.stop <= add]
    inner = child_calls(graph, module)
    candidate = latest_result(earlier, shared) or latest_result(inner, shared)
    reason = reasons.SHARED_EXPERT_NOT_RETURNED
    if findings.add("shared_expert_output", candidate, reason) is None:
        return
    findings.last_op = add
    width = routed_output.shape[-1]
    for call in inner:
        if (
            isinstance(call.output, torch.Tensor)
            and call.output.shape[-1] == width
            and call is not experts
            and any(True for _ in call.fn.children())
        ):
            findings.set_details(shared=call.module, shared_gated=id(call.output) != shared)
            return
