"""Finding the values of a linear attention whose state fades by one fixed factor per head: its forward multiplies matrices itself and hands the state to a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    argument,
    maker_candidate,
    result,
)
from explorer.discovery.residual import constants_of
from explorer.discovery.trace_graph import Call, TraceGraph, tensors

_PRODUCTS = ("bmm", "matmul")


@dataclass(frozen=True)
class Fading:
    """One step of the state: the call that hands it to a cache, the product added to it, and the logarithm of what it is multiplied with, a constant times a sign."""

    handed: TensorCandidate
    product: int
    decays: tuple[str, float]


def fading(graph: TraceGraph, module: Call) -> Fading | None:
    """What a module's forward does to the state that it hands to a cache, None where it hands on none that fades by a constant."""
    for call in graph.inside(module):
        if (
            call.module != module.module
            or len(call.labels) != 1
            or not isinstance(getattr(call.fn, "__self__", None), Cache)
        ):
            continue
        for position, item in call.arguments():
            if (
                isinstance(item, torch.Tensor)
                and item.dim() == 4
                and (found := _step(graph, module, id(item), call.start)) is not None
            ):
                return Fading(TensorCandidate(item, call, "input", position), *found)
    return None


def _step(
    graph: TraceGraph, module: Call, state: int, before: int
) -> tuple[int, tuple[str, float]] | None:
    """Of a state that is one before it times the exponential of a constant, plus a product: the product's operation, and the constant."""
    added = graph.maker(graph.back(state, before)[-1], before)
    if (
        added is None
        or graph.ops[added].name not in ("add", "add_")
        or len(graph.ops[added].reads) != 2
    ):
        return None
    for kept, new in (graph.ops[added].reads, graph.ops[added].reads[::-1]):
        scaled, product = (graph.maker(graph.back(key, added)[-1], added) for key in (kept, new))
        if (
            scaled is None
            or product is None
            or graph.ops[scaled].name != "mul"
            or graph.ops[product].name not in _PRODUCTS
        ):
            continue
        for key in graph.ops[scaled].reads:
            if (decays := _logarithm(graph, module, key, scaled)) is not None:
                return product, decays
    return None


def _logarithm(graph: TraceGraph, module: Call, key: int, before: int) -> tuple[str, float] | None:
    """The path of the parameter or buffer whose exponential (as often as the call has tokens) a tensor is, and its sign."""
    index = graph.maker(graph.back(key, before)[-1], before)
    if index is None or graph.ops[index].name != "exp":
        return None
    seq, sign, constants = (
        next(tensors((module.args, module.kwargs))).shape[1],
        1.0,
        constants_of(module),
    )
    while True:
        chain = graph.back(graph.ops[index].reads[0], index)
        if (path := next((constants[k] for k in chain if k in constants), None)) is not None:
            return f"{module.module}.{path}", sign
        index = graph.maker(chain[-1], index)
        if index is None or len(graph.ops[index].reads) != 1:
            return None
        if graph.ops[index].name == "neg":
            sign = -sign
        elif graph.ops[index].name != "mul" or graph.ops[index].numbers != (seq,):
            return None


def outputs(graph: TraceGraph, module: Call, found: Fading) -> Call | None:
    """The call that returns what all heads read."""
    spot = _outputs(graph, module, found)
    return None if spot is None else spot.call


def _outputs(graph: TraceGraph, module: Call, found: Fading) -> TensorCandidate | None:
    batch, heads, _, width = found.handed.tensor.shape
    seq = next(tensors((module.args, module.kwargs))).shape[1]
    inside = [c for c in graph.inside(module) if c.fn is not None]
    made = [
        key
        for i in graph.indices(module, "cat")
        for key in graph.ops[i].makes
        if tuple(graph.tensors[key].shape) == (batch, heads, seq, width)
    ]
    return maker_candidate(inside, made[-1]) if made else None


def find_fading(finds: HostFindings, graph: TraceGraph, module: Call) -> None:
    """Spots of queries, keys and values, of what the heads read, and of the state entering and leaving."""
    found = fading(graph, module)
    batch, heads, key_dim, value_dim = found.handed.tensor.shape
    finds.sizes = {"heads": heads, "key_heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    keys, values = graph.ops[found.product].reads[:2]
    reading = next(
        (
            i
            for name in _PRODUCTS
            for i in graph.indices(module, name)
            if _reads_state(graph, i, key_dim, value_dim)
        ),
        None,
    )
    finds.candidates = {
        "attention_queries": None
        if reading is None
        else _source(graph, module, graph.ops[reading].reads[0], reading, heads),
        "attention_keys": _source(graph, module, keys, found.product, heads),
        "attention_values": _source(graph, module, values, found.product, heads),
        "state_input": _entering(graph, module, found),
        "attention_head_outputs": _outputs(graph, module, found),
        "state_output": found.handed,
    }
    finds.note(constants={"decays": found.decays})


def _reads_state(graph: TraceGraph, index: int, key_dim: int, value_dim: int) -> bool:
    """Whether a product is one with a state."""
    first, second = (graph.tensors[key].shape for key in graph.ops[index].reads[:2])
    return (
        tuple(second[-2:]) == (key_dim, value_dim) and first[-1] == key_dim and first[-2] != key_dim
    )


def _source(
    graph: TraceGraph, module: Call, key: int, before: int, heads: int
) -> TensorCandidate | None:
    """What an operand was before it was cut into stretches of tokens and scaled by constants, where a call of the forward returns or takes it."""
    seq = next(tensors((module.args, module.kwargs))).shape[1]
    own = [
        c
        for c in graph.inside(module)
        if c.module == module.module and len(c.labels) == 1 and c.fn is not None
    ]
    constants, chain = constants_of(module), graph.back(key, before)
    while (
        (index := graph.maker(chain[-1], before)) is not None
        and graph.ops[index].name == "mul"
        and len(graph.ops[index].reads) == 2
    ):
        main = [
            k
            for k in graph.ops[index].reads
            if not any(c in constants for c in graph.back(k, index))
        ]
        if len(main) != 1:
            return None
        chain, before = chain + graph.back(main[0], index), index
    whole = [
        k
        for k in chain
        if graph.tensors[k].dim() == 4
        and sorted(graph.tensors[k].shape[1:3]) == sorted((heads, seq))
    ]
    return next(
        (
            spot
            for k in whole[::-1]
            for call in own
            if (spot := result(call, {k}) or argument(call, {k})) is not None
        ),
        None,
    )


def _entering(graph: TraceGraph, module: Call, found: Fading) -> TensorCandidate | None:
    """The state as the cache hands it out: nothing on a fresh prompt."""
    calls = [
        c
        for c in graph.inside(module)
        if c.module == module.module
        and len(c.labels) == 1
        and c is not found.handed.call
        and isinstance(getattr(c.fn, "__self__", None), Cache)
    ]
    given = [
        c
        for c in calls
        if c.output is None
        or (isinstance(c.output, torch.Tensor) and c.output.shape == found.handed.tensor.shape)
    ]
    if len(given) != 1:
        return None
    tensor = given[0].output
    return TensorCandidate(
        tensor, given[0], "output", None, axes=("batch", "heads", "key_dim", "value_dim")
    )
