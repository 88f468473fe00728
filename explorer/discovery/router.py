"""Find the values of a mixture's router: its logits, its scores and how they become weights."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from explorer.discovery.addends import picked_from
from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    argument_candidate,
    calls_around,
    latest_result,
    result_candidate,
)
from explorer.discovery.details import RouterScoring
from explorer.discovery.hook_point import ExpertSelection
from explorer.discovery.residual import constants_of
from explorer.discovery.trace_graph import Call, TraceGraph
from explorer.vocabulary import reasons

_FUNCTIONS = ("softmax", "sigmoid")


def find_router(findings: HostFindings, graph: TraceGraph, module: Call, indices: int) -> None:
    """Find the values of the router that makes the tensor ``indices`` of expert indices.

    The selection is the top-k that makes the indices, or the first of several operations that each
    take the largest score left; the logits are the result of the projection before it. Reads
    ``top_k`` and ``expert_weights`` from the findings.
    """
    selections, inside = _selections(graph, module, indices), graph.inside(module)
    if not selections:
        reason = reasons.NO_TOP_K
        findings.missing |= dict.fromkeys(("router_logits", "router_scores"), reason)
        return
    selection = selections[0]
    sizes = findings.sizes
    experts = sizes.get("num_experts")
    sizes["num_experts"] = graph.tensors[graph.ops[selection].reads[0]].shape[-1]
    if experts is not None and experts < sizes["num_experts"]:
        _find_null_experts(findings, graph, inside, selection)
    if sizes["top_k"] >= sizes["num_experts"]:
        reason = reasons.NONE_REJECTED
        findings.missing["router_margin"] = reason
    owner = next(c for c in calls_around(inside, selection) if c.labels).module
    if owner != module.module:
        findings.set_details(router=owner)
    reason = reasons.ROUTER_SCORES_NOT_PASSED
    findings.add("router_scores", _find_selection_scores(graph, inside, selection), reason)
    projection = _find_logits(findings, graph, module, selection)
    weights = id(findings.candidates["expert_weights"].tensor)
    scoring = scoring_of(graph, module, projection, selection, weights)
    if len(selections) > 1:
        scoring = replace(scoring, after="none", renormalised=False, factor=None, repeated=True)
    findings.set_details(scoring=scoring)


def selected_indices(graph: TraceGraph, selection: int) -> int | None:
    """Return the tensor of integers that a selection makes."""
    made = graph.ops[selection].makes
    return next((key for key in made if not graph.tensors[key].is_floating_point()), None)


def _selections(graph: TraceGraph, module: Call, indices: int) -> list[int]:
    """Return the operations that select ``indices``: one top-k, or one maximum for each slot."""
    found: set[int] = set()
    todo: list[tuple[int, int | None]] = [(indices, None)]
    while todo:
        tensor_id, before = todo.pop()
        op = graph.maker(graph.back(tensor_id, before)[-1], before)
        if op is None or op < module.start:
            continue
        if graph.ops[op].name in ("topk", "max", "argmax"):
            found.add(op)
        elif graph.ops[op].name in ("cat", "masked_fill", "where"):
            reads = graph.ops[op].reads
            todo += [(key, op) for key in reads if not graph.tensors[key].is_floating_point()]
    return sorted(found)


def _find_selection_scores(
    graph: TraceGraph, inside: list[Call], selection: int
) -> TensorCandidate | None:
    """Return the scores as an argument of the call that selects, else as a call's result."""
    sources = graph.back(graph.ops[selection].reads[0], selection)
    for call in calls_around(inside, selection):
        if candidate := argument_candidate(call, sources):
            return candidate
    earlier = [c for c in inside if c.fn is not None and c.stop <= selection]
    results = (latest_result(earlier, source) for source in sources)
    return next((candidate for candidate in results if candidate is not None), None)


def _find_null_experts(
    findings: HostFindings, graph: TraceGraph, inside: list[Call], selection: int
) -> None:
    """Serve the indices as selected, where more can be selected than there are experts.

    The surplus experts do nothing; before the experts run, its index is replaced and its
    weight becomes zero.
    """
    indices = selected_indices(graph, selection)
    if indices is None:
        return
    candidate = latest_result([c for c in inside if c.fn is not None], indices)
    if candidate is not None:
        findings.candidates["expert_indices"] = candidate
        findings.set_details(null_experts=True)


def _find_logits(
    findings: HostFindings, graph: TraceGraph, module: Call, selection: int
) -> int | None:
    """Find the logits, and return the projection that makes them."""
    count = findings.sizes["num_experts"]
    inside = graph.inside(module)
    projections = [
        op
        for name in ("mm", "addmm", "bmm")
        for op in graph.indices(module, name)
        if op < selection and graph.tensors[graph.ops[op].makes[0]].shape[-1] == count
    ]
    if projections:
        projection, logits = projections[-1], _innermost_result(graph, inside, projections[-1])
    else:
        projection, logits = _find_wider_projection(graph, module, selection), None
        if projection is not None:
            logits = _innermost_result(graph, inside, projection)
        if logits is not None:
            findings.sizes["num_projected"] = logits.tensor.shape[-1]
            logits = replace(
                logits,
                axes=("batch", "seq", "num_projected"),
                selection=ExpertSelection("num_experts", "num_projected", ""),
            )
    reason = reasons.ROUTER_LOGITS_NOT_RETURNED
    findings.add("router_logits", logits, reason)
    return projection


def _innermost_result(
    graph: TraceGraph, inside: list[Call], projection: int
) -> TensorCandidate | None:
    """Return a projection's result, or a view of it, as the result of the innermost call."""
    onward = graph.onward(graph.ops[projection].makes[0])
    results = (
        result_candidate(call, onward)
        for call in calls_around(inside, projection)
        if call.fn is not None
    )
    return next((candidate for candidate in results if candidate is not None), None)


def _find_wider_projection(graph: TraceGraph, module: Call, selection: int) -> int | None:
    """Return a projection of which only the first results are the logits of experts."""
    scores = graph.ops[selection].reads[0]
    count = graph.tensors[scores].shape[-1]
    made = _operations_back(graph, scores, selection, module.start)
    cut = next(
        (
            op
            for op in made
            if graph.ops[op].name == "slice"
            and graph.tensors[graph.ops[op].makes[0]].shape[-1] == count
            and graph.tensors[graph.ops[op].reads[0]].shape[-1] > count
            and graph.ops[op].numbers[1:2] == (0,)
        ),
        None,
    )
    if cut is None:
        return None
    width = graph.tensors[graph.ops[cut].reads[0]].shape[-1]
    found = [
        op
        for op in made
        if graph.ops[op].name in ("mm", "addmm", "bmm")
        and graph.tensors[graph.ops[op].makes[0]].shape[-1] == width
    ]
    return found[-1] if found else None


def scoring_of(
    graph: TraceGraph, module: Call, projection: int | None, selection: int, weights: int
) -> RouterScoring:
    """Return how logits become weights.

    projection: the operation that makes the logits. selection: the top-k. weights: the tensor of
    weights that the experts are called with.
    """
    start = projection if projection is not None else module.start
    scores = graph.ops[selection].reads[0]
    before = _operations_back(graph, scores, selection, start)
    names = [graph.ops[op].name for op in before]
    made = graph.maker(weights)
    to_weights = _operations_back(graph, weights, None if made is None else made + 1, start)
    late = [op for op in to_weights if op not in before and op > max(start, selection)]
    late_names = [graph.ops[op].name for op in late]
    floats = {
        key
        for op in to_weights
        for key in graph.ops[op].makes
        if graph.tensors[key].is_floating_point()
    }
    reads = {key for op in to_weights for key in graph.ops[op].reads}
    return RouterScoring(
        function=_function(names),
        bias=_selection_bias(graph, module, before, graph.tensors[scores].shape[-1]),
        masked=any("masked_fill" in name or name == "where" for name in names),
        after=_function(late_names),
        renormalised=any(name in ("sum", "linalg_vector_norm") for name in late_names)
        and any(name.startswith("div") for name in late_names),
        factor=_factor(graph, module, late),
        choice_only=not set(graph.ops[selection].makes) & floats and scores not in reads,
    )


def _function(names: list[str]) -> str:
    """Return the scoring function among operations by their names."""
    return next((f for f in _FUNCTIONS if any(f in name for name in names)), "none")


def _selection_bias(graph: TraceGraph, module: Call, ops: list[int], count: int) -> str:
    """Return the path of the parameter or buffer [count] that an operation adds, or ""."""
    for op in ops:
        if graph.ops[op].name not in ("add", "add_"):
            continue
        for read in graph.ops[op].reads:
            if graph.tensors[read].numel() == count and (
                path := constant_path(graph, module, read, op)
            ):
                return path
    return ""


def constant_path(graph: TraceGraph, module: Call, tensor_id: int, before: int) -> str | None:
    """Return the path of a module's parameter or buffer that a tensor is, or was picked from."""
    constants = constants_of(module)
    sources = picked_from(graph, tensor_id, before)
    found = (f"{module.module}.{constants[source]}" for source in sources if source in constants)
    return next(found, None)


def _factor(graph: TraceGraph, module: Call, ops: list[int]) -> float | str | None:
    """Return what operations multiply with: the product of their numbers, or one parameter's path.

    None where it is something else.
    """
    factor: float | str | None = 1.0
    for index in ops:
        op = graph.ops[index]
        if op.name not in ("mul", "mul_"):
            continue
        if len(op.reads) == 1:
            factor = factor * prod(op.numbers) if isinstance(factor, float) else None
        else:
            paths = [
                path
                for read in op.reads
                if (path := constant_path(graph, module, read, index)) is not None
                and graph.tensors[read].numel() > 1
            ]
            factor = paths[0] if len(paths) == 1 and factor == 1.0 else None
    return factor


def _operations_back(
    graph: TraceGraph, tensor_id: int, before: int | None, start: int
) -> list[int]:
    """Return the operations from ``start`` on that made a tensor, along floating-point tensors."""
    found: set[int] = set()
    todo = [(tensor_id, before)]
    while todo:
        tensor_id, before = todo.pop()
        op = graph.maker(tensor_id, before)
        if op is None or op < start or op in found:
            continue
        if not graph.tensors[tensor_id].is_floating_point():
            continue
        found.add(op)
        todo += [(read, op) for read in graph.ops[op].reads]
    return sorted(found)
