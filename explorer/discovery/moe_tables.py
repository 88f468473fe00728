"""Find the values of a mixture whose experts are rows of two tables, or two stacks of matrices."""

from __future__ import annotations

import torch

from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    child_calls,
    functions_inside,
    latest_result,
)
from explorer.discovery.mlp import DENSE
from explorer.discovery.moe_sum import find_routed_sum
from explorer.discovery.router import find_router, scoring_of, selected_indices
from explorer.discovery.trace_graph import Call, TraceGraph
from explorer.vocabulary import reasons


def find_table_mixture(graph: TraceGraph, module: Call) -> HostFindings | None:
    """Find the values of a mixture with two modules that hold a row or a matrix for each expert.

    Both are called between the top-k and the routed output. Returns None where there is no such
    mixture.
    """
    for selection in reversed(graph.indices(module, "topk")):
        findings = _find_after(graph, module, selection)
        if findings is not None:
            return findings
    return None


def _find_after(graph: TraceGraph, module: Call, selection: int) -> HostFindings | None:
    """Find the values of the mixture whose experts this top-k selects, if it is one."""
    functions = functions_inside(graph, module)
    indices = _indices(graph, module, selection)
    if indices is None:
        return None
    scores = next(
        key for key in graph.ops[selection].makes if graph.tensors[key].is_floating_point()
    )
    weights = _weights(graph, module, scores)
    routed = _routed_output(graph, module, weights)
    if routed is None:
        return None
    last_op = graph.last_maker(routed)
    holders = _expert_holders(graph, module, selection, last_op)
    found = {
        "expert_indices": latest_result(functions, indices),
        "expert_weights": latest_result(functions, weights),
        "routed_output": _first_result(graph, functions, routed),
    }
    candidates = {name: one for name, one in found.items() if one is not None}
    activation = _activation(graph, module, holders, last_op)
    if activation is None or len(candidates) < len(found):
        return None
    findings = HostFindings(module.module, candidates, last_op=last_op)
    tables = isinstance(holders[0].fn, torch.nn.Embedding)
    findings.missing = dict.fromkeys(DENSE, reasons.NOT_DENSE)
    findings.missing["expert_outputs"] = (
        reasons.SUMMED_AT_ONCE if tables else reasons.SORTED_BY_EXPERT
    )
    findings.sizes = {"top_k": graph.tensors[indices].shape[-1]}
    paths = (*(call.module for call in holders), activation.module)
    findings.set_details(**{"expert_tables" if tables else "expert_stacks": paths})
    if indices in graph.ops[selection].makes:
        find_router(findings, graph, module, indices)
    else:
        scoring = scoring_of(graph, module, None, selection, weights)
        findings.set_details(scoring=scoring)
        findings.missing |= dict.fromkeys(
            ("router_logits", "router_scores"), reasons.SCORED_BY_HALVES
        )
    findings.sizes["num_experts"] = _expert_count(holders[0])
    find_routed_sum(findings, graph, module, None, graph.tensors[routed], last_op + 1)
    return findings


def _expert_count(call: Call) -> int:
    """Return for how many experts a module holds a row of a table or a matrix; 0 for none."""
    weight = getattr(call.fn, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return 0
    return weight.shape[0] if isinstance(call.fn, torch.nn.Embedding) or weight.dim() == 3 else 0


def _expert_holders(graph: TraceGraph, module: Call, selection: int, stop: int) -> list[Call]:
    """Return the calls of modules with something for each expert, between two operations."""
    return [
        call
        for call in child_calls(graph, module)
        if call.start > selection and call.stop <= stop and _expert_count(call)
    ]


def _activation(graph: TraceGraph, module: Call, holders: list[Call], stop: int) -> Call | None:
    """Return the call of the child without parameters that runs after the first of two holders.

    It is looked for among all calls, as it may run elsewhere in the module too.
    """
    if len(holders) != 2:
        return None
    return next(
        (
            call
            for call in graph.calls
            if not call.labels
            and call.module.rpartition(".")[0] == module.module
            and holders[0].ended < call.began
            and call.stop < stop
            and not any(True for _ in call.fn.parameters())
        ),
        None,
    )


def _indices(graph: TraceGraph, module: Call, selection: int) -> int | None:
    """Return the tensor of expert indices: the top-k's, or what is gathered by those."""
    selected = selected_indices(graph, selection)
    gathered = (
        made
        for op in graph.indices(module, "gather")
        if selected in graph.ops[op].reads
        for made in graph.ops[op].makes
        if not graph.tensors[made].is_floating_point()
    )
    return next(gathered, selected)


def _weights(graph: TraceGraph, module: Call, scores: int) -> int:
    """Return the weights: the last tensor made of the chosen scores in their own shape."""
    tensor_id = scores
    while True:
        shape = graph.tensors[tensor_id].shape

        def same_shape(key: int, shape: torch.Size = shape) -> bool:
            return graph.tensors[key].shape == shape

        made = [
            new
            for op in graph.readers.get(tensor_id, ())
            if module.start <= op < module.stop and sum(map(same_shape, graph.ops[op].reads)) == 1
            for new in graph.ops[op].makes
            if new != tensor_id and same_shape(new) and graph.tensors[new].is_floating_point()
        ]
        if not made:
            return tensor_id
        tensor_id = made[0]


def _routed_output(graph: TraceGraph, module: Call, weights: int) -> int | None:
    """Return the first tensor as large as the module's input that the weights enter."""
    entering = next(iter(module.args))
    reached, made = {weights}, []
    for op in range(module.start, module.stop):
        if reached & set(graph.ops[op].reads):
            reached.update(graph.ops[op].makes)
            made += [
                key
                for key in graph.ops[op].makes
                if graph.tensors[key].shape[-1] == entering.shape[-1]
                and graph.tensors[key].numel() == entering.numel()
            ]
    # With one slot per token the slots sorted by expert are as large; index_add restores the order.
    reordered = [
        key for key in made if graph.ops[graph.last_maker(key)].name.startswith("index_add")
    ]
    return next(iter(reordered or made), None)


def _first_result(
    graph: TraceGraph, functions: list[Call], tensor_id: int
) -> TensorCandidate | None:
    """Return where a tensor, or a view of it, is first the result of a call."""
    views = sorted(graph.onward(tensor_id), key=graph.last_maker)
    results = (latest_result(functions, key) for key in views)
    return next((candidate for candidate in results if candidate is not None), None)
