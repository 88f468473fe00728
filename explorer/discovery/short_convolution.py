"""Find the values of a short convolution: a mixer of its own, or in front of a recurrence."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from explorer.discovery.addends import Addend, weight_products
from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    argument_candidate,
    latest_result,
    own_calls,
    result_candidate,
)
from explorer.discovery.trace_graph import PASSING, Call, TraceGraph, tensors
from explorer.vocabulary import reasons

#: What a gated convolution between two projections runs, beside views and copies.
_OPERATIONS = PASSING | frozenset(
    [
        "mul",
        "silu",
        "cat",
        "constant_pad_nd",
        "split",
        "chunk",
        "convolution",
        "mm",
        "addmm",
        "bmm",
        "matmul",
        "linear",
        "add",
        "zeros",
        "copy_",
        "roll",
    ]
)


def is_gated_convolution(graph: TraceGraph, module: Call, addend: Addend) -> bool:
    """Return whether an addend is one convolution between two projections, with gates, no more."""
    return len(_convolutions(graph, module, addend)) == 1 and all(
        graph.ops[op].name in _OPERATIONS for op in addend.ops if module.start <= op < module.stop
    )


def _convolutions(graph: TraceGraph, module: Call, addend: Addend) -> list[int]:
    """Return the convolutions in a module that make its addend."""
    return [op for op in graph.indices(module, "convolution") if op in addend.ops]


def find_gated_convolution(graph: TraceGraph, module: Call, addend: Addend) -> HostFindings:
    """Find the values of a mixer that is a short convolution and nothing else."""
    findings = HostFindings(module.module)
    convolution = _convolutions(graph, module, addend)[0]
    find_convolution_input(findings, graph, module)
    onward = _after_convolution(graph, graph.ops[convolution].makes[0])
    functions = [c for c in own_calls(graph, module) if c.fn is not None]
    gating = next(
        (
            op
            for op in graph.indices(module, "mul")
            if op > convolution and onward & set(graph.ops[op].reads)
        ),
        None,
    )

    if gating is None:
        findings.missing["conv_gate"] = reasons.NO_CONVOLUTION_GATE
        results = (latest_result(functions, key) for key in onward)
        output = next((candidate for candidate in results if candidate is not None), None)
    else:
        reads = graph.ops[gating].reads
        gate = next(key for key in reads if key not in onward)
        reason = reasons.GATE_NOT_RETURNED
        # As operands first: a prompt and a decoding step make them by different calls.
        gate_value = _operand(functions, gating, gate) or latest_result(functions, gate)
        findings.add("conv_gate", gate_value, reason)
        convolved = next(key for key in reads if key in onward)
        output = _operand(functions, gating, convolved) or latest_result(functions, convolved)
    reason = reasons.CONVOLUTION_OUTPUT_NOT_RETURNED
    findings.add("conv_output", output, reason)
    projection = graph.owner(weight_products(graph, addend)[-1])
    findings.set_details(output_projection=projection.module)
    return findings


def _operand(functions: Iterable[Call], op: int, tensor_id: int) -> TensorCandidate | None:
    """Return a tensor as the argument of the call that runs an operation."""
    arguments = (
        argument_candidate(call, {tensor_id}) for call in functions if call.start <= op < call.stop
    )
    return next((candidate for candidate in arguments if candidate is not None), None)


def _after_convolution(graph: TraceGraph, tensor_id: int) -> set[int]:
    """Return a convolution's result and what activation, views, padding and slices make of it."""
    found, todo = set(), [tensor_id]
    while todo:
        for new in graph.onward(todo.pop()) - found:
            found.add(new)
            todo += [
                made
                for op in graph.readers.get(new, ())
                if graph.ops[op].name in ("silu", "constant_pad_nd", "split", "narrow", "index")
                for made in graph.ops[op].makes
            ]
    return found


def find_convolution_input(findings: HostFindings, graph: TraceGraph, module: Call) -> None:
    """Find the first convolution's input before any cached history is concatenated to it.

    Walks back from the convolution; the earliest tensor with the right axes is in front of the
    cache on a prompt and on a decoding step alike.
    """
    convolutions = graph.indices(module, "convolution")
    if not convolutions:
        has_layer = any(isinstance(inner, torch.nn.Conv1d) for inner in module.fn.modules())
        findings.missing["conv_input"] = (
            reasons.CONVOLUTION_IN_PARTS if has_layer else reasons.NO_CONVOLUTION
        )
        return
    convolution = convolutions[0]
    weight = graph.tensors[graph.ops[convolution].reads[1]]
    sizes = {"channels": weight.shape[0], "conv_width": weight.shape[-1]}
    if findings.sizes.get("channels", sizes["channels"]) != sizes["channels"]:
        reason = reasons.CONVOLUTION_OF_OTHER_CHANNELS
        findings.missing["conv_input"] = reason
        return
    findings.sizes |= sizes
    findings.add(
        "conv_input",
        _before_history(graph, module, convolution, sizes["channels"]),
        reasons.CONVOLUTION_INPUT_NOT_RETURNED,
    )


def _before_history(
    graph: TraceGraph, module: Call, convolution: int, channels: int
) -> TensorCandidate | None:
    """Return the earliest tensor with the input's axes, back from the convolution."""
    batch, seq = next(tensors((module.args, module.kwargs))).shape[:2]
    shapes = {(batch, channels, seq), (batch, seq, channels)}
    earlier = [c for c in own_calls(graph, module) if c.stop <= convolution]
    candidate = None
    tensor_id, before = graph.ops[convolution].reads[0], convolution
    while True:
        if tuple(graph.tensors[tensor_id].shape) in shapes:
            results = (result_candidate(call, {tensor_id}) for call in earlier)
            found = [one for one in results if one is not None]
            candidate = min(found, key=lambda one: one.time) if found else candidate
        elif candidate is not None:
            return candidate
        op = graph.maker(tensor_id, before)
        if op is None or graph.ops[op].name not in PASSING | {"cat", "constant_pad_nd"}:
            return candidate
        # Of a history and what follows it, what is new is concatenated last.
        tensor_id, before = graph.ops[op].reads[-1], op
