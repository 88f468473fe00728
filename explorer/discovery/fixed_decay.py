"""Find the values of linear attention whose state decays by one fixed factor per head.

Its forward multiplies the matrices itself, without a kernel, and passes the state to a cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    argument_candidate,
    functions_inside,
    latest_result,
    own_calls,
    result_candidate,
)
from explorer.discovery.residual import CannotTrace, constants_of
from explorer.discovery.trace_graph import Call, TraceGraph, tensors

_PRODUCTS = ("bmm", "matmul")


@dataclass(frozen=True)
class StateUpdate:
    """One update of the state: ``state = exp(sign * constant) * state + product``.

    state: the new state [batch heads key_dim value_dim] where it is passed to the cache. product:
    index of the product of keys and values. log_decay: path of the constant, and its sign.
    before: the tensor that is the state before the update.
    """

    state: TensorCandidate
    product: int
    log_decay: tuple[str, float]
    before: int


def find_state_update(graph: TraceGraph, module: Call) -> StateUpdate | None:
    """Return how a module updates the state it passes to a cache.

    None where it passes none that decays by a constant.
    """
    for call in _cache_calls(graph, module):
        for position, item in call.arguments():
            if isinstance(item, torch.Tensor) and item.dim() == 4:
                update = _decay_and_product(graph, module, id(item), call.start)
                if update is not None:
                    return StateUpdate(TensorCandidate(item, call, "input", position), *update)
    return None


def _cache_calls(graph: TraceGraph, module: Call) -> list[Call]:
    """Return the calls of a cache's methods in a module's own forward."""
    own = own_calls(graph, module)
    return [call for call in own if isinstance(getattr(call.fn, "__self__", None), Cache)]


def _decay_and_product(
    graph: TraceGraph, module: Call, state: int, before: int
) -> tuple[int, tuple[str, float], int] | None:
    """Return product, decay and former state of one made as ``exp(constant) * state + product``."""
    add = graph.maker(graph.back(state, before)[-1], before)
    if add is None or graph.ops[add].name not in ("add", "add_") or len(graph.ops[add].reads) != 2:
        return None
    for decayed, new in (graph.ops[add].reads, graph.ops[add].reads[::-1]):
        scale, product = (graph.maker(graph.back(key, add)[-1], add) for key in (decayed, new))
        if (
            scale is None
            or product is None
            or graph.ops[scale].name != "mul"
            or graph.ops[product].name not in _PRODUCTS
        ):
            continue
        tokens = graph.tensors[graph.ops[product].reads[1]].shape[-2]
        for factor, former in (graph.ops[scale].reads, graph.ops[scale].reads[::-1]):
            if (log_decay := _log_decay(graph, module, factor, scale, tokens)) is not None:
                return product, log_decay, graph.back(former, scale)[-1]
    return None


def _log_decay(
    graph: TraceGraph, module: Call, factor: int, before: int, tokens: int
) -> tuple[str, float] | None:
    """Return the path and sign of the parameter or buffer whose exponential a factor is.

    It may be multiplied before the exponential with the number of tokens that the update takes in.
    """
    op = graph.maker(graph.back(factor, before)[-1], before)
    if op is None or graph.ops[op].name != "exp":
        return None
    sign, constants = 1.0, constants_of(module)
    while True:
        chain = graph.back(graph.ops[op].reads[0], op)
        if (path := next((constants[key] for key in chain if key in constants), None)) is not None:
            return f"{module.module}.{path}", sign
        op = graph.maker(chain[-1], op)
        if op is None or len(graph.ops[op].reads) != 1:
            return None
        if graph.ops[op].name == "neg":
            sign = -sign
        elif graph.ops[op].name != "mul" or graph.ops[op].numbers != (tokens,):
            return None


def head_outputs(graph: TraceGraph, module: Call, update: StateUpdate) -> TensorCandidate | None:
    """Return where all heads' outputs are concatenated along the tokens."""
    batch, heads, _, width = update.state.tensor.shape
    seq = next(tensors((module.args, module.kwargs))).shape[1]
    made = [
        key
        for op in graph.indices(module, "cat")
        for key in graph.ops[op].makes
        if tuple(graph.tensors[key].shape) == (batch, heads, seq, width)
    ]
    return latest_result(functions_inside(graph, module), made[-1]) if made else None


def find_fixed_decay(
    findings: HostFindings, graph: TraceGraph, module: Call, outputs: Call
) -> None:
    """Find queries, keys and values, the heads' outputs, and the state entering and leaving."""
    update = find_state_update(graph, module)
    if update is None:
        raise CannotTrace(f"{module.module} passes no state with a fixed decay to a cache")
    _, heads, key_dim, value_dim = update.state.tensor.shape
    findings.sizes = {
        "heads": heads,
        "key_heads": heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
    }
    keys, values = graph.ops[update.product].reads[:2]
    states = _states(graph, module, update)
    reading = next(
        (
            op
            for name in _PRODUCTS
            for op in graph.indices(module, name)
            if graph.back(graph.ops[op].reads[1], op)[-1] in states
        ),
        None,
    )
    candidates = {
        "attention_queries": None
        if reading is None
        else _whole_operand(graph, module, graph.ops[reading].reads[0], reading, heads),
        "attention_keys": _whole_operand(graph, module, keys, update.product, heads),
        "attention_values": _whole_operand(graph, module, values, update.product, heads),
        "state_input": _state_input(graph, module, update),
        "attention_head_outputs": head_outputs(graph, module, update),
        "state_output": update.state,
    }
    findings.candidates = {name: one for name, one in candidates.items() if one is not None}
    findings.set_details(constants={"decays": update.log_decay})


def _states(graph: TraceGraph, module: Call, update: StateUpdate) -> set[int]:
    """Return the new state, the one before it, and so on: a forward may update it several times."""
    state = graph.back(id(update.state.tensor), update.state.call.start)[-1]
    found, former = {state}, update.before
    while former not in found:
        found.add(former)
        made = _decay_and_product(graph, module, former, module.stop)
        former = former if made is None else made[2]
    return found


def _whole_operand(
    graph: TraceGraph, module: Call, operand: int, before: int, heads: int
) -> TensorCandidate | None:
    """Return what an operand was before it was scaled by constants and cut into chunks."""
    seq = next(tensors((module.args, module.kwargs))).shape[1]
    constants, chain = constants_of(module), graph.back(operand, before)
    while (
        (op := graph.maker(chain[-1], before)) is not None
        and graph.ops[op].name == "mul"
        and len(graph.ops[op].reads) == 2
    ):
        scaled = [
            key
            for key in graph.ops[op].reads
            if not any(source in constants for source in graph.back(key, op))
        ]
        if len(scaled) != 1:
            return None
        chain, before = chain + graph.back(scaled[0], op), op
    functions = [call for call in own_calls(graph, module) if call.fn is not None]
    for key in reversed(chain):
        tensor = graph.tensors[key]
        if tensor.dim() != 4 or sorted(tensor.shape[1:3]) != sorted((heads, seq)):
            continue
        for call in functions:
            if candidate := result_candidate(call, {key}) or argument_candidate(call, {key}):
                return candidate
    return None


def _state_input(graph: TraceGraph, module: Call, update: StateUpdate) -> TensorCandidate | None:
    """Return the state as the cache returns it: None on a prompt without a cached state."""
    shape = update.state.tensor.shape
    reading = [
        call
        for call in _cache_calls(graph, module)
        if call is not update.state.call
        and (
            call.output is None
            or (isinstance(call.output, torch.Tensor) and call.output.shape == shape)
        )
    ]
    if len(reading) != 1:
        return None
    axes = ("batch", "heads", "key_dim", "value_dim")
    return TensorCandidate(reading[0].output, reading[0], "output", None, axes=axes)
