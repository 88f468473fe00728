"""Find the values of softmax attention, passed to an attention function or computed in place."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

from explorer.discovery.addend_owner import feeds_into
from explorer.discovery.addends import Addend, weight_products
from explorer.discovery.attention_operations import (
    attention_operations,
    is_kernel,
    probability_tensors,
    softmaxes,
    value_products,
)
from explorer.discovery.attention_scores import find_scaling_sinks, find_scores
from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    argument_candidate,
    child_calls,
    functions_inside,
    is_norm,
    latest_result,
    modules_around,
    result_candidate,
)
from explorer.discovery.details import AttentionOperations
from explorer.discovery.trace_graph import Call, TraceGraph, tensors
from explorer.vocabulary import BY_HOST, reasons


def attention_functions(graph: TraceGraph, module: Call) -> list[Call]:
    """Return the calls in a module's own forward that are an attention as one function."""
    return [
        call
        for call in graph.inside(module)
        if call.module == module.module and _is_attention_function(call)
    ]


def _is_attention_function(call: Call) -> bool:
    """Return whether a call in a module's forward takes queries, keys and values.

    It is one of torch's attention kernels, or takes the module as well.
    """
    if call.fn is None or len(call.labels) != 1 or len(_four_dimensional(call)) < 3:
        return False
    module = None if call.parent is None else call.parent.fn
    return is_kernel(call) or any(argument is module for argument in call.args)


def _four_dimensional(call: Call) -> list[int | str]:
    """Return the positions and keywords of a call's four-dimensional arguments."""
    return [name for name, a in call.arguments() if isinstance(a, torch.Tensor) and a.dim() == 4]


def is_attention(graph: TraceGraph, module: Call) -> bool:
    """Return whether a module's call contains softmax attention."""
    return any(map(_is_attention_function, graph.inside(module))) or bool(
        attention_operations(graph, module)
    )


def find_attention(graph: TraceGraph, module: Call, addend: Addend) -> HostFindings:
    """Find the values of one attention module, which adds ``addend`` to the residual stream."""
    findings = HostFindings(module.module)
    functions = attention_functions(graph, module)
    operations = attention_operations(graph, module)
    if len(functions) > 1:
        return _only_output(graph, module, addend, "calls")
    if functions:
        function = functions[0]
        given = dict(function.arguments())
        heads = [
            TensorCandidate(given[name], function, "input", name)
            for name in _four_dimensional(function)[:3]
        ]
        softmax = softmaxes(graph, function)
        mixed = _returned_heads(graph, function, heads[0].tensor, softmax)
        lengths = (heads[0].tensor.shape[2], heads[1].tensor.shape[2])
        if is_kernel(function):
            # Called by the module itself, it takes keys and values as the forward repeats them.
            operands = [(id(one.tensor), function.start) for one in heads]
            heads = _heads_in_place(graph, module, operands, lengths)
    elif len(operations) > 1:
        return _only_output(graph, module, addend, "softmaxes")
    else:
        function, softmax = None, [operations[0].softmax]
        lengths = tuple(graph.tensors[graph.ops[softmax[0]].reads[0]].shape[-2:])
        heads = _heads_in_place(graph, module, _operands(graph, operations[0]), lengths)
        mixed = _mixed_in_place(graph, module, operations[0], lengths[0])
    batch = next(tensors((module.args, module.kwargs))).shape[0]
    _add_heads(findings, heads, lengths, batch)
    find_scores(findings, graph, function or module, softmax, module.start)
    reason = reasons.HEADS_NOT_RETURNED
    findings.add("attention_head_outputs", mixed, reason)
    _find_projection(findings, graph, module, addend)
    _find_gate(findings, graph, module)
    find_scaling_sinks(findings, graph, module)
    if len(operations) == 1:
        findings.set_details(attention=operations[0])
    anchor = function or (mixed.call if mixed is not None else None)
    if anchor is not None:
        findings.set_details(**modules_around(graph, module, anchor))
    return findings


def _only_output(graph: TraceGraph, module: Call, addend: Addend, what: str) -> HostFindings:
    """Return the findings of a module with several attentions: no value inside is the whole."""
    findings = HostFindings(module.module)
    name = module.module.rpartition(".")[2]
    reason = reasons.several_attentions(name, what)
    findings.missing = {name: reason for name in BY_HOST["self_attn"] if name != "attention_output"}
    _find_projection(findings, graph, module, addend)
    findings.candidates.pop("attention_premix", None)
    findings.missing["attention_premix"] = reason
    return findings


def _returned_heads(
    graph: TraceGraph, function: Call, queries: torch.Tensor, softmax: list[int]
) -> TensorCandidate | None:
    """Return the heads' outputs of an attention function.

    That is its result, or, where it works on the mixed values before it returns them, those.
    """
    output = function.output
    returned = output[0] if isinstance(output, (tuple, list)) else output
    if len(softmax) == 1 and (products := value_products(graph, function, softmax[0])):
        mixed = graph.onward(graph.ops[products[-1]].makes[0])
        if id(returned) not in mixed:
            batch, _, length, _ = queries.shape
            chain = sorted(mixed, key=lambda tensor_id: graph.maker(tensor_id) or 0)
            functions = functions_inside(graph, function)
            return _by_head(graph, functions, chain, length, batch)
    return result_candidate(function, {id(returned)})


def _add_heads(
    findings: HostFindings,
    heads: list[TensorCandidate] | list[TensorCandidate | None],
    lengths: tuple[int, ...],
    batch: int,
) -> None:
    """Add queries, keys and values, and the sizes they show.

    lengths: those of the queries and of the keys.
    """
    query, key = lengths
    findings.sizes |= {"query": query, "key": key}
    names = ("attention_queries", "attention_keys", "attention_values")
    sizes = (
        (query, "num_heads", "qk_head_dim"),
        (key, "num_kv_heads", "qk_head_dim"),
        (key, "num_kv_heads", "head_dim"),
    )
    for name, candidate, (length, count, width) in zip(names, heads, sizes, strict=True):
        shape = None if candidate is None else _heads_and_width(candidate.tensor, length, batch)
        reason = reasons.NO_AXIS_OF_HEADS
        findings.add(name, None if shape is None else candidate, reason)
        if shape is not None:
            findings.sizes = {count: shape[0], width: shape[1], **findings.sizes}


def _heads_and_width(tensor: torch.Tensor, length: int, batch: int) -> tuple[int, int] | None:
    """Return the number of heads and their width, where a tensor has axes of tokens and of heads.

    The axis of heads may be merged into the batch.
    """
    shape = tuple(tensor.shape)
    if len(shape) == 4 and shape[0] == batch:
        if shape[2] == length:
            return shape[1], shape[3]
        if shape[1] == length:
            return shape[2], shape[3]
        return (shape[1], shape[2]) if shape[3] == length else None
    if len(shape) == 3 and shape[0] % batch == 0 and shape[0] > batch and length in shape[1:]:
        return shape[0] // batch, shape[2] if shape[1] == length else shape[1]
    return None


def _operands(graph: TraceGraph, attention: AttentionOperations) -> list[tuple[int, int]]:
    """Return the tensors that are queries, keys and values, and the operation that reads each."""
    product = attention.value_product
    probabilities = probability_tensors(graph, attention.probabilities(graph))
    values = next(read for read in graph.ops[product].reads if read not in probabilities)
    return [
        (attention.queries(graph), attention.score_product),
        (attention.keys(graph), attention.score_product),
        (values, product),
    ]


def _heads_in_place(
    graph: TraceGraph, module: Call, operands: list[tuple[int, int]], lengths: tuple[int, ...]
) -> list[TensorCandidate | None]:
    """Return where queries, keys and values pass, of an attention that the module computes.

    operands: the tensors, and the operation before which each is read.
    """
    batch = next(tensors((module.args, module.kwargs))).shape[0]
    functions = functions_inside(graph, module)
    # A forward without a cache does not reach the cache's own calls.
    cacheless = [c for c in functions if not isinstance(getattr(c.fn, "__self__", None), Cache)]
    chains = [graph.back(tensor_id, before) for tensor_id, before in operands]
    # Of keys and values the farthest back: not yet repeated for the query heads.
    chains[1:] = [chain[::-1] for chain in chains[1:]]
    # Where possible of any forward.
    return [
        _by_head(graph, cacheless, chain, length, batch)
        or _by_head(graph, functions, chain, length, batch)
        for chain, length in zip(chains, (lengths[0], lengths[1], lengths[1]), strict=True)
    ]


def _mixed_in_place(
    graph: TraceGraph, module: Call, attention: AttentionOperations, length: int
) -> TensorCandidate | None:
    """Return the heads' outputs of an attention without a function."""
    batch = next(tensors((module.args, module.kwargs))).shape[0]
    mixed = graph.onward(graph.ops[attention.value_product].makes[0])
    chain = sorted(mixed, key=lambda tensor_id: graph.maker(tensor_id) or 0)
    return _by_head(graph, functions_inside(graph, module), chain, length, batch)


def _by_head(
    graph: TraceGraph, calls: list[Call], chain: list[int], length: int, batch: int
) -> TensorCandidate | None:
    """Return the first tensor in a chain with axes of heads and tokens that a call passes."""
    for tensor_id in chain:
        if _heads_and_width(graph.tensors[tensor_id], length, batch) is None:
            continue
        for call in calls:
            candidate = result_candidate(call, {tensor_id}) or argument_candidate(call, {tensor_id})
            if candidate is not None:
                return candidate
    return None


def _find_gate(findings: HostFindings, graph: TraceGraph, module: Call) -> None:
    """Find what the heads' outputs are multiplied with before the output projection.

    That is ``head_gate``, with an entry for each channel, or ``head_scale``, one for each head.
    """
    mixed = findings.candidates.get("attention_head_outputs")
    names = ("head_gate", "head_scale")
    if mixed is None:
        reason = reasons.HEADS_NOT_FOUND
        findings.missing |= dict.fromkeys(names, reason)
        return
    onward = graph.onward(id(mixed.tensor))
    gating = next(
        (
            op
            for op in graph.indices(module, "mul")
            if op >= mixed.call.stop
            and onward & set(graph.ops[op].reads)
            and not is_norm(graph, graph.owner(op))
        ),
        None,
    )
    reads = () if gating is None else graph.ops[gating].reads
    gate = next((read for read in reads if read not in onward), None)
    if gate is None:
        reason = reasons.NO_HEAD_GATE
        findings.missing |= dict.fromkeys(names, reason)
        return
    per_head = graph.tensors[gate].numel() < mixed.tensor.numel()
    name, other = reversed(names) if per_head else names
    own = [c for c in graph.inside(module) if c.module == module.module and c.labels]
    candidate = latest_result([c for c in own if len(c.labels) == 1], gate) or latest_result(
        own, gate
    )
    reason = reasons.HEAD_GATE_NOT_RETURNED
    findings.add(name, candidate, reason)
    findings.missing[other] = (
        reasons.NO_HEAD_GATE
        if candidate is None
        else reasons.gates_each("head" if per_head else "channel")
    )


def _reads_heads(graph: TraceGraph, mixed: TensorCandidate, product: int) -> bool:
    """Return whether the heads' outputs enter the module that runs a product with weights."""
    made, owner = graph.maker(id(mixed.tensor)), graph.owners[product]
    return (
        made is not None and owner is not None and product > made and feeds_into(graph, made, owner)
    )


def _reads_reordered_heads(graph: TraceGraph, owner: Call, mixed: TensorCandidate) -> bool:
    """Return whether a module takes the heads' outputs with their rows in another order."""
    entering = next(iter(owner.args), None)
    if not isinstance(entering, torch.Tensor):
        return False
    op = graph.maker(graph.back(id(entering), owner.start)[-1], owner.start)
    return (
        op is not None
        and graph.ops[op].name == "index"
        and graph.tensors[graph.ops[op].reads[0]].numel() == entering.numel()
        and id(mixed.tensor) in graph.back(graph.ops[op].reads[0], op)
    )


def _find_projection(
    findings: HostFindings, graph: TraceGraph, module: Call, addend: Addend
) -> None:
    """Find the output projection and its input, the premix.

    It is the first module after the heads' outputs that multiplies with weights, or, without heads'
    outputs, the last one.
    """
    mixed = findings.candidates.get("attention_head_outputs")
    products = weight_products(graph, addend)
    if mixed is not None:
        products = [op for op in products if _reads_heads(graph, mixed, op)]
    owner = graph.owners[products[0 if mixed is not None else -1]] if products else None
    if owner is not None and mixed is not None and _reads_reordered_heads(graph, owner, mixed):
        findings.candidates["attention_premix"] = mixed
        return
    if (
        owner is None
        or owner.module == module.module
        or not any(isinstance(a, torch.Tensor) for a in owner.args[:1])
    ):
        reason = reasons.ATTENTION_OUTPUT_NOT_COMPUTED
        findings.missing["attention_premix"] = reason
        return
    findings.candidates["attention_premix"] = TensorCandidate(owner.args[0], owner, "input", 0)
    if len(products) == 1 or mixed is None:
        findings.set_details(output_projection=owner.module)
    if mixed is not None:
        norms = [
            call.module
            for call in child_calls(graph, module)
            if mixed.call.ended < call.began
            and call.ended < owner.began
            and is_norm(graph, call)
            and call.start in addend.ops
        ]
        findings.set_details(output_norms=tuple(norms))
