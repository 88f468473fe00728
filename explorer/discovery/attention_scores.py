"""Find the scores, probabilities and sinks of a softmax attention."""

from __future__ import annotations

import torch

from explorer.discovery.attention_operations import (
    BEFORE_SOFTMAX,
    PRODUCTS,
    operations_before,
    probability_tensors,
    value_products,
)
from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    argument_candidate,
    calls_around,
    latest_result,
)
from explorer.discovery.trace_graph import PASSING, Call, TraceGraph
from explorer.vocabulary import reasons


def find_scores(
    findings: HostFindings, graph: TraceGraph, call: Call, softmax: list[int], start: int
) -> None:
    """Find scores, probabilities and sinks around the last softmax within ``call``.

    Scores are what the innermost call around the softmax takes; probabilities are what the product
    with the values takes. ``start`` is the first operation of the attention's module.
    """
    names = ("attention_scores", "attention_probabilities")
    if not softmax:
        name = call.name.removesuffix("_forward").removesuffix("_attention")
        name = "sdpa" if name == "scaled_dot_product" else name
        findings.missing.update(dict.fromkeys(names, reasons.no_probabilities(name)))
        has_sinks = any(isinstance(one, torch.nn.Parameter) for _, one in call.arguments())
        findings.missing["attention_sinks"] = (
            reasons.sinks_in_kernel(name) if has_sinks else reasons.NO_SINKS
        )
        return
    inside, op = graph.inside(call), softmax[-1]
    scores, reader, sinks = _without_sinks(graph, op, findings.sizes["key"])
    reason = reasons.SCORES_NOT_PASSED
    findings.add(names[0], _scores(graph, inside, scores, reader), reason)
    findings.add(names[1], _probabilities(graph, call, inside, op), reason)
    findings.set_details(**_score_details(graph, call, op, start))
    if sinks is None:
        findings.missing["attention_sinks"] = reasons.NO_SINKS
        return
    findings.add(
        "attention_sinks", _sinks(graph, inside, sinks, reader), reasons.SINKS_NOT_RETURNED
    )


def find_scaling_sinks(findings: HostFindings, graph: TraceGraph, module: Call) -> None:
    """Find sinks that scale the heads' outputs by the share that the softmax with them would leave.

    That is ``sigmoid(logsumexp(scores) - sinks)``, each head's scale.
    """
    scale = findings.candidates.get("head_scale")
    if scale is None:
        return
    sigmoid = _made_by(graph, id(scale.tensor), scale.call.stop, "sigmoid")
    sub = None if sigmoid is None else _made_by(graph, graph.ops[sigmoid].reads[0], sigmoid, "sub")
    if sub is None or len(graph.ops[sub].reads) != 2:
        return
    total, sinks = graph.ops[sub].reads
    parameters = {id(parameter) for parameter in module.fn.parameters()}
    if _made_by(graph, total, sub, "logsumexp") is None or not parameters & set(
        graph.back(sinks, sub)
    ):
        return
    del findings.missing["attention_sinks"]
    found = _sinks(graph, graph.inside(module), sinks, sub)
    if findings.add("attention_sinks", found, reasons.SCALING_SINKS_NOT_RETURNED) is not None:
        findings.set_details(scaling_sinks=True)


def _made_by(graph: TraceGraph, tensor_id: int, before: int, name: str) -> int | None:
    """Return the operation called ``name`` that made what a tensor is a view of, if it did."""
    op = graph.maker(graph.back(tensor_id, before)[-1], before)
    return op if op is not None and graph.ops[op].name == name else None


def _sinks(graph: TraceGraph, calls: list[Call], sinks: int, reader: int) -> TensorCandidate | None:
    """Return the sink logits where the first call returns them."""
    functions = [call for call in calls if call.fn]
    sources = reversed(graph.back(sinks, reader))
    returned = (latest_result(functions, source) for source in sources)
    return next((candidate for candidate in returned if candidate is not None), None)


def _scores(
    graph: TraceGraph, inside: list[Call], scores: int, reader: int
) -> TensorCandidate | None:
    """Return the scores as an argument of the innermost call around their reader, or a result."""
    sources = graph.back(scores, reader)
    for call in calls_around(inside, reader):
        if candidate := argument_candidate(call, sources):
            return candidate
    return latest_result(inside, scores)


def _probabilities(
    graph: TraceGraph, call: Call, inside: list[Call], softmax: int
) -> TensorCandidate | None:
    """Return the probabilities as an argument of the call that multiplies them with the values."""
    made = probability_tensors(graph, graph.ops[softmax].makes[0])
    for op in value_products(graph, call, softmax):
        read = next(read for read in graph.ops[op].reads if read in made)
        for around in calls_around(inside, op):
            if candidate := argument_candidate(around, graph.back(read, op)):
                return candidate
    return None


def _without_sinks(graph: TraceGraph, softmax: int, keys: int) -> tuple[int, int, int | None]:
    """Return the scores of the keys alone, the operation that reads them, and the sinks if any.

    Where the softmax has one column more than there are ``keys``, the scores and the sinks are what
    was concatenated.
    """
    scores, reader = _before_max_subtraction(graph, graph.ops[softmax].reads[0], softmax)
    if graph.tensors[scores].shape[-1] != keys + 1:
        return scores, reader, None
    tensor_id, before = scores, softmax
    while (op := graph.maker(tensor_id, before)) is not None and graph.ops[op].name in PASSING | {
        "sub",
        "cat",
    }:
        if graph.ops[op].name == "cat":
            keys_alone, sinks = graph.ops[op].reads[:2]
            return keys_alone, op, sinks
        tensor_id, before = graph.ops[op].reads[0], op
    return scores, reader, None


def _before_max_subtraction(graph: TraceGraph, tensor_id: int, before: int) -> tuple[int, int]:
    """Return the scores before each row's maximum is subtracted, which changes no softmax.

    Also returns the operation that reads them.
    """
    op = graph.maker(graph.back(tensor_id, before)[-1], before)
    if (
        op is not None
        and graph.ops[op].name == "sub"
        and len(graph.ops[op].reads) == 2
        and graph.tensors[graph.ops[op].reads[1]].shape[-1] == 1
    ):
        return graph.ops[op].reads[0], op
    return tensor_id, before


def _score_details(graph: TraceGraph, call: Call, softmax: int, start: int) -> dict[str, object]:
    """Return, as host details, what happens to the score product before the softmax."""
    ops = operations_before(graph, softmax, call.start, frozenset())
    adds = [op for op in ops if graph.ops[op].name in ("add", "add_", "baddbmm")]
    several_products = any(
        len(graph.ops[op].reads) == 2
        and all(_made_of_product(graph, read, op) for read in graph.ops[op].reads)
        for op in adds
    )
    # A bias made inside the attention depends on the text, not on the positions alone.
    bias_of_text = any(
        _made_after(graph, read, op, start) and not _made_of_product(graph, read, op)
        for op in adds
        for read in (
            graph.ops[op].reads[:1] if graph.ops[op].name == "baddbmm" else graph.ops[op].reads
        )
    )
    return {
        "score_cap": _cap(graph, ops),
        "position_bias": any(_adds_per_head(graph, op) for op in adds),
        "summed_scores": several_products or bias_of_text,
    }


def _cap(graph: TraceGraph, ops: set[int]) -> float | None:
    """Return what the result of a tanh is multiplied with; None without a tanh."""
    tanh = max((op for op in ops if graph.ops[op].name == "tanh"), default=None)
    if tanh is None:
        return None
    scaled = [
        op
        for op in graph.readers.get(graph.ops[tanh].makes[0], ())
        if graph.ops[op].name in ("mul", "mul_")
    ]
    return next((number for op in scaled for number in graph.ops[op].numbers), 1.0)


def _made_after(graph: TraceGraph, tensor_id: int, before: int, start: int) -> bool:
    """Return whether what a tensor is a view of was computed from operation ``start`` on."""
    op = graph.maker(graph.back(tensor_id, before)[-1], before)
    return (
        op is not None
        and op >= start
        and graph.ops[op].name not in ("zeros", "empty", "full", "new_zeros")
    )


def _adds_per_head(graph: TraceGraph, add: int) -> bool:
    """Return whether an addition to the scores has an axis of heads, which a mask has not."""
    out = graph.tensors[graph.ops[add].makes[0]]
    if graph.ops[add].name == "baddbmm":
        return graph.tensors[graph.ops[add].reads[0]].dim() == 3
    return any(
        (tensor := graph.tensors[read]).dim() >= 3
        and out.dim() == 4
        and tensor.shape[-3] == out.shape[1] > 1
        and not _made_of_product(graph, read, add)
        for read in graph.ops[add].reads
    )


def _made_of_product(graph: TraceGraph, tensor_id: int, before: int) -> bool:
    """Return whether a tensor of scores comes from a product."""
    todo, seen = [(tensor_id, before)], set()
    while todo:
        op = graph.maker(*todo.pop())
        if op is None or op in seen:
            continue
        seen.add(op)
        if graph.ops[op].name in PRODUCTS:
            return True
        if graph.ops[op].name in BEFORE_SOFTMAX | {"gather", "index", "index_select", "sum"}:
            todo += [(read, op) for read in graph.ops[op].reads]
    return False
