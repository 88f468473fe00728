"""Detect softmax attention in a trace: score product, softmax, product with the values.

The only detector of attention; all other modules use this one.
"""

from __future__ import annotations

import torch

from explorer.discovery.details import AttentionOperations
from explorer.discovery.trace_graph import PASSING, Call, TraceGraph

SOFTMAX = ("_softmax", "softmax")
PRODUCTS = ("bmm", "matmul", "mm", "baddbmm")

#: What may be between the product of queries and keys and the softmax: scale, mask, bias, cap,
#: a change of dtype.
BEFORE_SOFTMAX = PASSING | frozenset(
    [
        "add",
        "add_",
        "sub",
        "mul",
        "mul_",
        "div",
        "div_",
        "tanh",
        "where",
        "masked_fill",
        "masked_fill_",
        "cat",
        "clamp",
        "minimum",
        "maximum",
        "baddbmm",
        "native_dropout",
        "dropout",
    ]
)

#: What may be done to the probabilities before they are multiplied with the values.
_AFTER_SOFTMAX = ("mul", "where", "masked_fill", "native_dropout")


def is_kernel(call: Call) -> bool:
    """Return whether a call is of torch's own attention over queries, keys and values."""
    return call.fn is torch.nn.functional.scaled_dot_product_attention


def attention_operations(graph: TraceGraph, call: Call) -> list[AttentionOperations]:
    """Return every softmax attention whose operations ran within ``call``, first to last.

    An attention is a softmax of something made of a product, whose result goes into a product.
    """
    found = []
    for softmax in softmaxes(graph, call):
        products = value_products(graph, call, softmax)
        score_product = find_score_product(graph, call, softmax)
        if products and score_product is not None:
            between = tuple(sorted(operations_before(graph, softmax, call.start)))
            found.append(AttentionOperations(softmax, score_product, min(products), between))
    return found


def softmaxes(graph: TraceGraph, call: Call) -> list[int]:
    """Return the softmax operations that ran within ``call``."""
    return [op for name in SOFTMAX for op in graph.indices(call, name)]


def value_products(graph: TraceGraph, call: Call, softmax: int) -> list[int]:
    """Return the products within ``call`` that take a softmax's result."""
    probabilities = probability_tensors(graph, graph.ops[softmax].makes[0])
    return [
        op
        for name in PRODUCTS
        for op in graph.indices(call, name)
        if op > softmax and probabilities & set(graph.ops[op].reads)
    ]


def probability_tensors(graph: TraceGraph, tensor_id: int) -> set[int]:
    """Return a softmax's result and what is made of it on its way to the values.

    That is copies and views, and what masks, scales and dropout make of it.
    """
    found, todo = set(), [tensor_id]
    while todo:
        for new in graph.onward(todo.pop()) - found:
            found.add(new)
            todo += [
                made
                for op in graph.readers.get(new, ())
                if graph.ops[op].name in _AFTER_SOFTMAX
                for made in graph.ops[op].makes
                if graph.tensors[made].shape[-2:] == graph.tensors[new].shape[-2:]
            ]
    return found


def find_score_product(graph: TraceGraph, call: Call, softmax: int) -> int | None:
    """Return the product of queries and keys that a softmax is taken of.

    It is the nearest product without a parameter among its operands, else the nearest one: a bias
    by position may be a product with weights.
    """
    weighted = None
    todo, seen = [(graph.ops[softmax].reads[0], softmax)], set()
    while todo:
        tensor_id, before = todo.pop(0)
        op = graph.maker(tensor_id, before)
        if op is None or op < call.start or op in seen:
            continue
        seen.add(op)
        if graph.ops[op].name in PRODUCTS:
            if not _reads_parameter(graph, op):
                return op
            weighted = op if weighted is None else weighted
        elif graph.ops[op].name in BEFORE_SOFTMAX:
            todo += [(read, op) for read in graph.ops[op].reads]
    return weighted


def _reads_parameter(graph: TraceGraph, op: int) -> bool:
    """Return whether an operation reads a parameter, or a view of one."""
    return any(
        isinstance(graph.tensors[source], torch.nn.Parameter)
        for read in graph.ops[op].reads
        for source in graph.back(read, op)
    )


def operations_before(
    graph: TraceGraph, softmax: int, start: int, stop: frozenset[str] = frozenset(PRODUCTS)
) -> set[int]:
    """Return the operations from ``start`` on that make a softmax's input, back to products.

    stop: names of operations that are left out, and what they read with them.
    """
    todo, seen = [(graph.ops[softmax].reads[0], softmax)], set()
    while todo:
        op = graph.maker(*todo.pop())
        if op is None or op < start or op in seen:
            continue
        if graph.ops[op].name not in BEFORE_SOFTMAX or graph.ops[op].name in stop:
            continue
        seen.add(op)
        todo += [(read, op) for read in graph.ops[op].reads]
    return seen
