"""Find the values of a mixture of experts whose experts are one module."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from explorer.discovery.candidates import HostFindings, TensorCandidate, latest_result
from explorer.discovery.mlp import DENSE
from explorer.discovery.moe_sum import find_routed_sum
from explorer.discovery.router import find_router
from explorer.discovery.trace_graph import Call, TraceGraph
from explorer.vocabulary import reasons
from explorer.vocabulary.availability import Unavailability


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
    find_routed_sum(findings, graph, module, experts, experts.output, experts.stop)
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
