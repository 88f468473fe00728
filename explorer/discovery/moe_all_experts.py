"""Find the values of a mixture that runs every expert on every token, weighted before it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    child_calls,
    functions_inside,
    latest_result,
)
from explorer.discovery.hook_point import ExpertSelection
from explorer.discovery.mlp import DENSE
from explorer.discovery.moe_sum import find_routed_sum
from explorer.discovery.router import find_router, selected_indices
from explorer.discovery.trace_graph import Call, TraceGraph
from explorer.vocabulary import reasons

#: The slots of a token are the entries of the experts it selected, among those of all experts.
_SLOTS = ExpertSelection("top_k", "num_experts", "expert_indices")


def find_all_experts_mixture(graph: TraceGraph, module: Call) -> HostFindings | None:
    """Find the values of a mixture whose experts take a weighted copy of the tokens each.

    The tensors found have an entry for every expert; a token's slots are those it selected.
    Returns None where there is no such mixture.
    """
    for selection in graph.indices(module, "topk"):
        scores = graph.tensors[graph.ops[selection].reads[0]]
        count = scores.shape[-1]
        for experts in child_calls(graph, module):
            if experts.start > selection and _runs_all(experts, count, scores.numel() // count):
                return _find(graph, module, selection, experts, count)
    return None


def _runs_all(experts: Call, count: int, tokens: int) -> bool:
    """Return whether a module has a matrix for each expert and takes every token for each."""
    entering = next(iter(experts.args), None)
    return (
        isinstance(entering, torch.Tensor)
        and isinstance(experts.output, torch.Tensor)
        and experts.output.shape == entering.shape
        and entering.numel() == count * tokens * entering.shape[-1]
        and any(p.dim() == 3 and p.shape[0] == count for p in experts.fn.parameters())
    )


def _find(
    graph: TraceGraph, module: Call, selection: int, experts: Call, count: int
) -> HostFindings | None:
    """Find the values of the mixture with this top-k and these experts."""
    functions = functions_inside(graph, module)
    selected = selected_indices(graph, selection)
    if selected is None:
        return None
    indices = latest_result(functions, selected)
    weights = _weights(graph, module, experts, count)
    total = _sum_over_experts(graph, module, experts, count)
    if indices is None or weights is None or total is None:
        return None
    findings = HostFindings(module.module)
    findings.missing = dict.fromkeys(DENSE, reasons.NOT_DENSE)
    findings.sizes = {"top_k": indices.tensor.shape[-1]}
    findings.set_details(experts=experts.module, runs_all_experts=True)
    outputs, routed = graph.ops[total].reads[0], graph.ops[total].makes[0]
    slots = latest_result([c for c in functions if c.stop <= total], outputs)
    slot_axes = ("num_experts", "batch", "seq", "hidden_size")
    findings.candidates = {"expert_indices": indices, "expert_weights": weights}
    reason = reasons.NOT_RETURNED
    findings.add("expert_outputs", _with_slots(slots, slot_axes), reason)
    findings.add("routed_output", latest_result(functions, routed), reason)
    if (down := getattr(experts.fn, "down_proj", None)) is not None and down.dim() == 3:
        first_is_output = down.shape[2] == experts.output.shape[-1]
        findings.sizes["intermediate_size"] = down.shape[1 if first_is_output else 2]
    find_router(findings, graph, module, selected)
    findings.last_op = total
    find_routed_sum(findings, graph, module, experts, graph.tensors[routed], total + 1)
    return findings


def _with_slots(candidate: TensorCandidate | None, axes: tuple[str, ...]) -> TensorCandidate | None:
    """Return a candidate with ``axes``, of which the selected experts' entries are served."""
    return None if candidate is None else replace(candidate, axes=axes, selection=_SLOTS)


def _weights(graph: TraceGraph, module: Call, experts: Call, count: int) -> TensorCandidate | None:
    """Return what the copies are multiplied with: one number for each token and expert."""
    entering = graph.back(id(experts.args[0]), experts.start)
    op = graph.maker(entering[-1], experts.start)
    if op is None or graph.ops[op].name != "mul":
        return None
    factor = next((key for key in graph.ops[op].reads if graph.tensors[key].shape[-1] == 1), None)
    if factor is None:
        return None
    by_token = [
        key
        for key in graph.back(factor, op)
        if graph.tensors[key].shape[-1] == count and graph.tensors[key].dim() < 4
    ]
    if not by_token:
        return None

    def returned(calls: Iterable[Call]) -> TensorCandidate | None:
        return latest_result([c for c in calls if c.stop <= op], by_token[-1])

    found = returned(child_calls(graph, module)) or returned(functions_inside(graph, module))
    return _with_slots(found, ("batch", "seq", "num_experts"))


def _sum_over_experts(graph: TraceGraph, module: Call, experts: Call, count: int) -> int | None:
    """Return the operation that sums what all experts made of each token."""
    made = graph.onward(id(experts.output))
    return next(
        (
            op
            for op in graph.indices(module, "sum")
            if set(graph.ops[op].reads) & made
            and graph.tensors[graph.ops[op].reads[0]].shape[0] == count
            and graph.tensors[graph.ops[op].makes[0]].dim() == 2
        ),
        None,
    )
