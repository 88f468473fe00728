"""Find the values of a dense MLP: its activation and its neurons."""

from __future__ import annotations

import torch

from explorer.discovery.addends import picked_from
from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    calls_around,
    functions_inside,
    is_norm,
    latest_result,
    result_candidate,
)
from explorer.discovery.residual import constants_of
from explorer.discovery.trace_graph import PASSING, Call, TraceGraph
from explorer.vocabulary import reasons

DENSE = ("mlp_activation", "mlp_neurons")
ROUTED = (
    "router_logits",
    "router_scores",
    "expert_weights",
    "expert_indices",
    "expert_outputs",
    "routed_output",
    "shared_expert_output",
)

#: Operations that are a whole activation function.
_ACTIVATIONS = frozenset(["silu", "gelu", "relu", "leaky_relu", "elu", "softplus"])

#: The nonlinearities of an activation function that is written out in the forward.
_NONLINEAR = frozenset(["sigmoid", "tanh", "erf", "exp"])

#: The elementwise operations around such a nonlinearity.
_ELEMENTWISE = PASSING | frozenset(
    [
        "mul",
        "mul_",
        "div",
        "div_",
        "add",
        "add_",
        "sub",
        "neg",
        "pow",
        "clamp",
        "clamp_min",
        "clamp_max",
        "minimum",
        "maximum",
    ]
)


def find_dense(graph: TraceGraph, module: Call, products: list[int] | None = None) -> HostFindings:
    """Find the values of a dense MLP.

    The down projection is the last module that multiplies with weights; its input are the neurons.
    ``products`` are the MLP's products with weights, where the module's result is not simply that
    of the last one.
    """
    findings = HostFindings(module.module)
    findings.missing = dict.fromkeys(ROUTED, reasons.NOT_ROUTED)
    chain = graph.back(id(module.output)) if isinstance(module.output, torch.Tensor) else []
    inner = [c for c in graph.inside(module) if not c.labels]
    if products is not None:
        down = graph.owners[products[-1]]
    else:
        down = next((c for c in inner if result_candidate(c, chain) is not None), None)
        if down is None and (own := _own_down_projection(graph, module)) is not None:
            down, parameter = own
            findings.set_details(down_parameter=parameter)
    if down is None or (not down.labels and down.module == module.module) or not down.args:
        reason = reasons.MLP_OUTPUT_NOT_COMPUTED
        findings.missing |= dict.fromkeys(DENSE, reason)
        return findings
    neurons = down.args[0]
    findings.candidates["mlp_neurons"] = TensorCandidate(neurons, down, "input", 0)
    findings.sizes["intermediate_size"] = neurons.shape[-1]
    sources = graph.back(id(neurons))
    normed = any(
        is_norm(graph, c)
        and c.ended < down.began
        and c.start > 0
        and graph.module(c.module) is c
        and result_candidate(c, sources) is not None
        for c in inner
    )
    findings.set_details(normed_neurons=normed)
    activation = _activation(graph, module, down, neurons)
    findings.add("mlp_activation", activation, reasons.ACTIVATION_NOT_RETURNED)
    return findings


def _own_down_projection(graph: TraceGraph, module: Call) -> tuple[Call, str] | None:
    """Return the call of a module's last product with a parameter of its own, and that one's path.

    The call's first argument are the neurons.
    """
    constants = constants_of(module)
    products = [op for name in ("bmm", "mm", "matmul") for op in graph.indices(module, name)]
    for op in reversed(products):
        sources = picked_from(graph, graph.ops[op].reads[-1], op)
        path = next((constants[source] for source in sources if source in constants), None)
        around = calls_around(graph.inside(module), op)
        call = next((c for c in around if c.labels and c.fn is not None), None)
        if path is None or call is None:
            continue
        if call.args and isinstance(call.args[0], torch.Tensor):
            return call, f"{module.module}.{path}"
    return None


def _activation(
    graph: TraceGraph, module: Call, down: Call, neurons: torch.Tensor
) -> TensorCandidate | None:
    """Return the result of the activation: of a module, of a function, or written out.

    A module is an activation where its parameters are single numbers, a function where it runs an
    activation operation. Its result is as wide as the neurons.
    """
    wide = [
        c
        for c in functions_inside(graph, module)
        if c.ended < down.began
        and isinstance(c.output, torch.Tensor)
        and c.output.shape[-1] == neurons.shape[-1]
    ]
    modules = [
        c
        for c in wide
        if not c.labels and all(p.numel() == 1 for p in c.fn.parameters()) and c.start < c.stop
    ]
    functions = [
        c
        for c in wide
        if len(c.labels) == 1
        and c.module == module.module
        and any(graph.ops[op].name in _ACTIVATIONS for op in range(c.start, c.stop))
    ]
    if found := modules or functions:
        return TensorCandidate(found[0].output, found[0], "output", None)
    return _written_out_activation(graph, module, down, neurons)


def _written_out_activation(
    graph: TraceGraph, module: Call, down: Call, neurons: torch.Tensor
) -> TensorCandidate | None:
    """Return the result of an activation that is written out, such as ``x * sigmoid(x)``.

    It is the last result that is made elementwise of the nonlinearity's result and its input alone.
    """
    nonlinear = [
        op
        for op in range(module.start, down.start)
        if graph.ops[op].name in _NONLINEAR
        and graph.tensors[graph.ops[op].makes[0]].shape[-1] == neurons.shape[-1]
    ]
    if len(nonlinear) != 1:
        return None
    first = graph.ops[nonlinear[0]]
    root = _elementwise_root(graph, first.reads[0], nonlinear[0], module.start)
    result = first.makes[0]
    derived = [result]
    for index in range(nonlinear[0] + 1, down.start):
        op = graph.ops[index]
        if op.name not in _ELEMENTWISE or not set(op.reads) & set(derived):
            continue
        others = [read for read in op.reads if read not in derived]
        if all(_elementwise_root(graph, read, index, module.start) == root for read in others):
            derived += op.makes
            result = op.makes[0] if others else result
    own = [c for c in functions_inside(graph, module) if c.module == module.module]
    return latest_result(own, result)


def _elementwise_root(graph: TraceGraph, tensor_id: int, before: int, start: int) -> int:
    """Return the tensor that another was made of by elementwise operations on it alone."""
    while (
        (op := graph.maker(tensor_id, before)) is not None
        and op >= start
        and graph.ops[op].name in _ELEMENTWISE
        and len(graph.ops[op].reads) == 1
    ):
        tensor_id, before = graph.ops[op].reads[0], op
    return tensor_id
