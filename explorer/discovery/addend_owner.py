"""Find the module that makes an addend, or the stretch of the block's forward that does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from explorer.discovery.addends import Addend, mixes_positions, weight_products
from explorer.discovery.residual import CannotTrace, residual_input
from explorer.discovery.trace_graph import Call, TraceGraph, tensors

#: The role of a module from its inside alone: ``"mixer"``, ``"experts"`` or None.
RoleOf = Callable[[Call], str | None]


def owner_module(graph: TraceGraph, block: Call, addend: Addend, role_of: RoleOf) -> Call:
    """Return the call of the smallest module that runs all of an addend's products with weights.

    Products on the way into that module (as of a norm) do not count, nor those beside the one
    module that ``role_of`` recognises. Where there is no such module, returns a stretch of the
    block's own call. Raises CannotTrace for an addend without weights.
    """
    products = weight_products(graph, addend)
    if not products:
        raise CannotTrace(f"an addend of {block.module} is computed without weights")
    return (
        _smallest_module(graph, block, products)
        or _main_child(graph, block, addend, products, role_of)
        or _stretch(graph, block, addend)
    )


def _smallest_module(graph: TraceGraph, block: Call, products: list[int]) -> Call | None:
    """Return the call of the smallest module inside the block that runs all of some products."""
    depth = block.module.count(".")
    owners = [graph.owner(i).module.split(".") for i in products]
    shared = [names[0] for names in zip(*owners, strict=False) if len(set(names)) == 1]
    if len({tuple(names) for names in owners}) == 1 and len(shared) > depth + 2:
        shared.pop()  # a single matrix is a layer of a larger module
    while len(shared) > depth + 1:
        call = graph.module(".".join(shared))
        if call is not None and all(call.start <= i < call.stop for i in products):
            return call
        shared.pop()
    return None


def _by_child(graph: TraceGraph, block: Call, products: list[int]) -> dict[str, list[int]]:
    """Group products by the path of the block's child that runs them."""
    depth = block.module.count(".") + 2
    groups: dict[str, list[int]] = {}
    for index in products:
        child = ".".join(graph.owner(index).module.split(".")[:depth])
        groups.setdefault(child, []).append(index)
    return groups


def several_mixers(graph: TraceGraph, block: Call, addend: Addend, role_of: RoleOf) -> bool:
    """Return whether several of the block's children that are mixers make one addend together."""
    calls = (graph.module(path) for path in _by_child(graph, block, weight_products(graph, addend)))
    roles = [role_of(call) for call in calls if call is not None and call is not block]
    return roles.count("mixer") > 1


def feeding_mixers(
    graph: TraceGraph, block: Call, addend: Addend, call: Call, role_of: RoleOf
) -> list[Call]:
    """Return the block's children with a mixer inside that run before an addend's own ``call``."""
    children = (
        graph.module(path) for path in _by_child(graph, block, weight_products(graph, addend))
    )
    return [
        child
        for child in children
        if child is not None
        and child is not block
        and child.ended < call.began
        and role_of(child) == "mixer"
    ]


def _main_child(
    graph: TraceGraph, block: Call, addend: Addend, products: list[int], role_of: RoleOf
) -> Call | None:
    """Return, of the block's children that share an addend's products, the main one.

    It is the last one where that is a mixer and all others lead into it, or the only mixer among
    them, else the last one where all others lead into it.
    """
    groups = _by_child(graph, block, products)
    while (convolution := _last_convolution(graph, groups)) is not None:
        del groups[convolution]
    last = max(groups, key=lambda path: max(groups[path]))
    calls = {
        path: call
        for path in groups
        if (call := graph.module(path)) is not None and any(True for _ in call.fn.children())
    }
    leads_to_last = last in calls and _all_lead_into(graph, block, groups, calls[last])
    if leads_to_last and mixes_positions(
        graph, [i for i in addend.ops if calls[last].start <= i < calls[last].stop]
    ):
        return _smallest_module(graph, block, groups[last]) or calls[last]
    roles = {path: role for path, call in calls.items() if (role := role_of(call)) is not None}
    if list(roles.values()).count("mixer") > 1:
        return None
    if len(roles) == 1:
        path, role = next(iter(roles.items()))
        # What is computed beside a mixture is a part of the same sublayer.
        beside = [
            own
            for other, own in groups.items()
            if other != path and not any(feeds_into(graph, i, calls[path]) for i in own)
        ]
        if role != "experts" or (path == last and not beside):
            return calls[path]
    if all(graph.ops[i].name == "convolution" for i in groups[last]):
        return None
    return calls[last] if leads_to_last else None


def _all_lead_into(
    graph: TraceGraph, block: Call, groups: dict[str, list[int]], call: Call
) -> bool:
    """Return whether all other children of the block lead into one that reads a whole stream."""
    entered = next(tensors((call.args, call.kwargs)), None)
    if entered is not None and entered.shape[-1] != residual_input(block).shape[-1]:
        return False  # only the second half: what enters it is not as wide as the residual stream
    return all(
        max(own) < call.start and feeds_into(graph, max(own), call)
        for path, own in groups.items()
        if path != call.module
    )


def _last_convolution(graph: TraceGraph, groups: dict[str, list[int]]) -> str | None:
    """Return the child that comes after all others and only convolves what they made, if any."""
    last = max(groups, key=lambda path: max(groups[path]))
    rest = [index for path, own in groups.items() if path != last for index in own]
    call = graph.module(last)
    if (
        not rest
        or call is None
        or any(graph.ops[i].name != "convolution" for i in groups[last])
        or min(groups[last]) < max(rest)
    ):
        return None
    return last if feeds_into(graph, max(rest), call) else None


def feeds_into(graph: TraceGraph, product: int, call: Call) -> bool:
    """Return whether the arguments of a module's call are made with the result of an operation."""
    found, todo = set(), [(id(tensor), call.start) for tensor in tensors((call.args, call.kwargs))]
    while todo:
        index = graph.maker(*todo.pop())
        if index is None or index in found or index < product:
            continue
        found.add(index)
        todo += [(source, index) for source in graph.ops[index].reads]
    return product in found


def _stretch(graph: TraceGraph, block: Call, addend: Addend) -> Call:
    """Return an addend's operations as a call of the block's module that spans them."""
    first = weight_products(graph, addend)[0]
    owner = graph.owner(first)
    start, stop = first if owner is block else owner.start, max(addend.ops) + 1
    inner = [
        c for c in graph.inside(block) if c.start < c.stop and start <= c.start and c.stop <= stop
    ]
    began, ended = min(c.began for c in inner), max(c.ended for c in inner)
    return Call(
        block.module,
        (),
        block.fn,
        (_entering(graph, block, owner, first),),
        {},
        start,
        graph.tensors[addend.tensor_id],
        stop,
        block.parent,
        began,
        ended,
        part_of=block,
    )


def _entering(graph: TraceGraph, block: Call, owner: Call, first: int) -> torch.Tensor:
    """Return what a stretch of a block's forward starts from: the input of its first product."""
    if owner is not block and isinstance(next(iter(owner.args), None), torch.Tensor):
        return owner.args[0]  # before the module flattens it
    reads = [
        graph.tensors[read]
        for read in graph.ops[first].reads
        if not isinstance(graph.tensors[read], torch.nn.Parameter)
    ]
    activations = (tensor for tensor in reads if not _is_weight(graph, id(tensor), first))
    return next(activations, reads[0])


def _is_weight(graph: TraceGraph, tensor_id: int, before: int) -> bool:
    """Return whether a tensor is a parameter or a view of one."""
    return any(
        isinstance(graph.tensors[source], torch.nn.Parameter)
        for source in graph.back(tensor_id, before)
    )
