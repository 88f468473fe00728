"""Finding the values of a mixture that runs every expert on every token, those not chosen on nothing."""

from __future__ import annotations

import torch

from explorer.discovery.candidates import HostFindings, TensorCandidate, children, maker_candidate
from explorer.discovery.hook_point import ExpertSelection
from explorer.discovery.mlp import DENSE, find_router, find_shared
from explorer.discovery.trace_graph import Call, TraceGraph
from explorer.vocabulary.availability import not_present, not_traced

#: The value that numbers the slots among the experts, all of which are run.
_SLOTS = ExpertSelection("top_k", "num_experts", "expert_indices")


def find_spread(graph: TraceGraph, module: Call) -> HostFindings | None:
    """Spots of a mixture whose experts are one module that is called with a copy of the tokens for each expert, weighted; None where there is none.

    What it makes for the experts that a token chose are its slots: each place there has an entry for every expert.
    """
    for choice in graph.indices(module, "topk"):
        count = graph.tensors[graph.ops[choice].reads[0]].shape[-1]
        tokens = graph.tensors[graph.ops[choice].reads[0]].numel() // count
        for experts in children(graph, module):
            if experts.start > choice and _all_at_once(experts, count, tokens):
                return _find(graph, module, choice, experts, count)
    return None


def _all_at_once(experts: Call, count: int, tokens: int) -> bool:
    """Whether a module has a matrix for each expert and is called with as many rows as there are tokens and experts."""
    given = next(iter(experts.args), None)
    return (
        isinstance(given, torch.Tensor)
        and isinstance(experts.output, torch.Tensor)
        and experts.output.shape == given.shape
        and given.numel() == count * tokens * given.shape[-1]
        and any(p.dim() == 3 and p.shape[0] == count for p in experts.fn.parameters())
    )


def _find(
    graph: TraceGraph, module: Call, choice: int, experts: Call, count: int
) -> HostFindings | None:
    inside = [c for c in graph.inside(module) if c.fn is not None]
    numbers = next(
        key for key in graph.ops[choice].makes if not graph.tensors[key].is_floating_point()
    )
    indices, weights, summed = (
        maker_candidate(inside, numbers),
        _weights(graph, module, experts, count),
        _sum(graph, module, experts, count),
    )
    if indices is None or weights is None or summed is None:
        return None
    finds = HostFindings(module.module)
    finds.missing = dict.fromkeys(
        DENSE, not_present("this MLP is a mixture: every expert has neurons of its own")
    )
    finds.sizes = {"top_k": indices.tensor.shape[-1]}
    finds.note(experts=experts.module, runs_all_experts=True)
    slots, routed = graph.ops[summed].reads[0], graph.ops[summed].makes[0]
    finds.candidates = {
        "expert_indices": indices,
        "expert_weights": weights,
        "expert_outputs": _with_all(
            maker_candidate([c for c in inside if c.stop <= summed], slots),
            ("num_experts", "batch", "seq", "hidden_size"),
        ),
        "routed_output": maker_candidate(inside, routed),
    }
    finds.missing |= {
        name: not_traced("it is the result of no call")
        for name, spot in finds.candidates.items()
        if spot is None
    }
    finds.candidates = {name: spot for name, spot in finds.candidates.items() if spot is not None}
    if (down := getattr(experts.fn, "down_proj", None)) is not None and down.dim() == 3:
        finds.sizes["intermediate_size"] = (
            down.shape[1] if down.shape[2] == experts.output.shape[-1] else down.shape[2]
        )
    find_router(finds, graph, module, numbers)
    finds.made = summed
    find_shared(finds, graph, module, experts, graph.tensors[routed], summed + 1)
    return finds


def _with_all(spot: TensorCandidate | None, axes: tuple[str, ...]) -> TensorCandidate | None:
    return (
        None
        if spot is None
        else TensorCandidate(
            spot.tensor, spot.call, spot.side, spot.element, axes=axes, selection=_SLOTS
        )
    )


def _weights(graph: TraceGraph, module: Call, experts: Call, count: int) -> TensorCandidate | None:
    """What the copies are multiplied with: one number for each token and expert, where a module or a call returns it."""
    entering = graph.back(id(experts.args[0]), experts.start)
    index = graph.maker(entering[-1], experts.start)
    if index is None or graph.ops[index].name != "mul":
        return None
    for key in graph.ops[index].reads:
        if graph.tensors[key].shape[-1] == 1:
            found = [
                k
                for k in graph.back(key, index)
                if graph.tensors[k].shape[-1] == count and graph.tensors[k].dim() < 4
            ]
            makers = (
                maker_candidate([c for c in calls if c.stop <= index], found[-1]) if found else None
                for calls in (
                    children(graph, module),
                    [c for c in graph.inside(module) if c.fn is not None],
                )
            )
            return _with_all(
                next((spot for spot in makers if spot is not None), None),
                ("batch", "seq", "num_experts"),
            )
    return None


def _sum(graph: TraceGraph, module: Call, experts: Call, count: int) -> int | None:
    """The operation that adds up what all experts made of a token."""
    made = graph.onward(id(experts.output))
    return next(
        (
            i
            for i in graph.indices(module, "sum")
            if set(graph.ops[i].reads) & made
            and graph.tensors[graph.ops[i].reads[0]].shape[0] == count
            and graph.tensors[graph.ops[i].makes[0]].dim() == 2
        ),
        None,
    )
