"""Find a dense MLP that stands beside a mixture of experts and is added to its result."""

from __future__ import annotations

from dataclasses import replace

from explorer.discovery.addend_owner import owner_module
from explorer.discovery.addends import Addend, weight_products
from explorer.discovery.candidates import HostFindings, TensorCandidate
from explorer.discovery.mlp import DENSE, find_dense
from explorer.discovery.residual import CannotTrace
from explorer.discovery.trace_graph import Call, TraceGraph


def find_dense_branch(
    graph: TraceGraph, module: Call, added: int, add: int, candidate: TensorCandidate | None
) -> HostFindings | None:
    """Find the values of the dense MLP that makes a tensor ``added`` to a mixture's result.

    module: the call of the mixture. add: the operation that adds the tensor. candidate: where the
    tensor passes. Returns None where no dense MLP makes it, or its neurons are not found.
    """
    ops = _made_by(graph, module, added, add)
    addend = Addend(added, add, frozenset(ops), None)
    products = weight_products(graph, addend)
    if candidate is None or not products:
        return None
    try:
        call = owner_module(graph, module, addend, lambda _: None)
    except (CannotTrace, ValueError):
        return None
    findings = find_dense(graph, call, products)
    if "mlp_neurons" not in findings.candidates:
        return None
    findings.missing = {name: why for name, why in findings.missing.items() if name in DENSE}
    if call.part_of is not None:
        findings.module = ""
        for name, found in findings.candidates.items():
            findings.candidates[name] = _own_call(graph, found)
    findings.candidates["mlp_output"] = candidate
    findings.sizes["hidden_size"] = candidate.tensor.shape[-1]
    findings.made_by, findings.last_op = frozenset(ops), products[-1]
    return findings


def _made_by(graph: TraceGraph, module: Call, tensor_id: int, before: int) -> set[int]:
    """Return the operations of a mixture's call that made a tensor."""
    found: set[int] = set()
    todo = [(tensor_id, before)]
    while todo:
        index = graph.maker(*todo.pop())
        if index is not None and index >= module.start and index not in found:
            found.add(index)
            todo += [(read, index) for read in graph.ops[index].reads]
    return found


def _own_call(graph: TraceGraph, found: TensorCandidate) -> TensorCandidate:
    """Return a candidate at the module's own call, where the forward calls the module again."""
    call = found.call
    if call.labels or call.made_in is None or graph.module(call.module) is not None:
        return found
    module, labels = call.made_in
    return replace(found, call=replace(call, module=module, labels=labels))
