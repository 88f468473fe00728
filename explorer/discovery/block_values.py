"""Find the block's own values: its norms' outputs, its MLP's input, the stream in its middle."""

from __future__ import annotations

from explorer.discovery.candidates import (
    TensorCandidate,
    argument_candidate,
    functions_inside,
    result_candidate,
)
from explorer.discovery.sublayer import BlockFindings, Sublayer, first_and_second
from explorer.discovery.trace_graph import PASSING, Call, TraceGraph, tensors
from explorer.vocabulary import reasons
from explorer.vocabulary.availability import Unavailability


def find_block_values(findings: BlockFindings, graph: TraceGraph, block: Call) -> None:
    """Add the values of the host ``layers`` to the findings of a block."""
    first, second = first_and_second(findings.sublayers)
    _find_norm_output(findings, graph, "attention_norm_output", first)
    _find_norm_output(findings, graph, "mlp_norm_output", second)
    _find_mlp_input(findings, graph, block)
    _find_mid(findings, graph, block, first, second)


def _find_norm_output(
    findings: BlockFindings, graph: TraceGraph, name: str, sublayer: Sublayer | None
) -> None:
    """Find the output of the norm that a sublayer reads."""
    own = findings.hosts["layers"]
    if sublayer is None:
        own.missing[name] = _why_without_second(findings)
    elif sublayer.norm is not None:
        norm = graph.only_call(sublayer.norm)
        own.candidates[name] = TensorCandidate(norm.output, norm, "output", None)
    elif sublayer.scaled_norm:
        own.missing[name] = reasons.norm_then_scaled(sublayer.host)
    else:
        own.missing[name] = reasons.no_norm_before(sublayer.host)


def _why_without_second(findings: BlockFindings) -> Unavailability:
    """Return why a block with one sublayer has none of the values around a second."""
    for module, host in findings.feeding.items():
        return reasons.feeds_sublayer(module, host)
    return reasons.ONE_SUBLAYER


def _find_mlp_input(findings: BlockFindings, graph: TraceGraph, block: Call) -> None:
    """Find what the MLP reads."""
    own = findings.hosts["layers"]
    if "mlp" not in findings.calls:
        own.missing["mlp_input"] = (
            _why_without_second(findings) if findings.feeding else reasons.NO_MLP
        )
        return
    entering = _entering(graph, block, findings.calls["mlp"])
    neurons = findings.hosts["mlp"].candidates.get("mlp_neurons")
    # A module that is the down projection alone is called with the neurons.
    if entering is not None and neurons is not None and entering.tensor is neurons.tensor:
        entering = None
    reason = reasons.MLP_INPUT_NOT_PASSED
    own.add("mlp_input", entering, reason)


def _entering(graph: TraceGraph, block: Call, call: Call) -> TensorCandidate | None:
    """Return what a sublayer is called with: its module's argument, or the block's own result."""
    tensor_id = id(next(tensors((call.args, call.kwargs))))
    if call.part_of is None:
        return argument_candidate(call, {tensor_id})
    readers = {
        op
        for key in graph.onward(tensor_id)
        for op in graph.readers.get(key, ())
        if block.start <= op < block.stop and graph.ops[op].name not in PASSING
    }
    own_readers = {op for op in readers if call.start <= op < call.stop}
    if own_readers < readers:
        # Other sublayers read it too: only a module that is the sublayer's sole reader will do.
        takers = (
            c
            for c in graph.inside(call)
            if not c.labels and all(c.start <= op < c.stop for op in own_readers)
        )
        arguments = (argument_candidate(c, {tensor_id}) for c in takers)
        return next((candidate for candidate in arguments if candidate is not None), None)
    results = (
        result_candidate(c, {tensor_id})
        for c in functions_inside(graph, block)
        if c.ended <= call.began
    )
    return next((candidate for candidate in results if candidate is not None), None)


def _find_mid(
    findings: BlockFindings,
    graph: TraceGraph,
    block: Call,
    first: Sublayer,
    second: Sublayer | None,
) -> None:
    """Find the residual stream that the second sublayer reads, where the block makes it."""
    own = findings.hosts["layers"]
    if second is None:
        own.missing["layer_mid"] = reasons.ADDS_ONCE if findings.feeding else reasons.ONE_SUBLAYER
    elif second.stage is None or first.stage is None:
        own.missing["layer_mid"] = reasons.NO_ONE_POINT
    elif second.stage == first.stage:
        own.missing["layer_mid"] = reasons.PARALLEL
    else:
        # Where it is made, not where it is taken: the block adds to it past the sublayer too.
        step = findings.steps[second.stage - 1]
        made = graph.onward(step.made)
        results = (
            result_candidate(c, made)
            for c in functions_inside(graph, block)
            if c.start <= step.ops[-1] < c.stop
        )
        candidate = next((one for one in results if one is not None), None)
        reason = reasons.MID_NOT_RETURNED
        if own.add("layer_mid", candidate, reason) is not None:
            findings.mid_step = second.stage
