"""Finding the values of a mixture whose experts are no one module: rows of tables, or stacks of matrices run on tokens sorted by expert."""

from __future__ import annotations

import torch

from explorer.discovery.candidates import HostFindings, children, maker_candidate
from explorer.discovery.mlp import DENSE, find_router, find_shared, scoring_of
from explorer.discovery.trace_graph import Call, TraceGraph
from explorer.vocabulary.availability import not_present, not_traced


def find_apart(graph: TraceGraph, module: Call) -> HostFindings | None:
    """Spots of a mixture that is a top-k, weights for what it chose, and two modules that hold a row or a matrix for each expert; None where there is none.

    Both are called before the weighted results are added up, which is the routed output.
    """
    choices = graph.indices(module, "topk")
    inside = [c for c in graph.inside(module) if c.fn is not None]
    for choice in reversed(choices):
        numbers = _numbers(graph, module, choice)
        weights = _last_alike(
            graph,
            module,
            next(k for k in graph.ops[choice].makes if graph.tensors[k].is_floating_point()),
        )
        routed = _first_whole(graph, module, weights)
        held = _holding(graph, module, choice, routed)
        candidates = {
            "expert_indices": maker_candidate(inside, numbers),
            "expert_weights": maker_candidate(inside, weights),
            "routed_output": None if routed is None else _handed(graph, inside, routed),
        }
        # The activation, which may run elsewhere too.
        between = [
            c
            for c in graph.calls
            if len(held) == 2
            and not c.labels
            and c.module.rpartition(".")[0] == module.module
            and held[0].ended < c.began
            and c.stop < graph.maker(routed)
            and not any(True for _ in c.fn.parameters())
        ]
        if not between or None in candidates.values():
            continue
        finds = HostFindings(module.module, candidates)
        finds.missing = dict.fromkeys(
            DENSE, not_present("this MLP is a mixture: every expert has neurons of its own")
        )
        finds.sizes = {"top_k": graph.tensors[numbers].shape[-1]}
        tables = isinstance(held[0].fn, torch.nn.Embedding)
        finds.missing["expert_outputs"] = (
            not_present("this mixture adds what its experts make up in one product")
            if tables
            else not_traced(
                "this mixture runs its tokens sorted by expert, so that no slot's output stands in the slot's place"
            )
        )
        paths = (*(c.module for c in held), between[0].module)
        finds.note(**{"expert_tables" if tables else "expert_stacks": paths})
        if numbers in graph.ops[choice].makes:
            find_router(finds, graph, module, numbers)
        else:
            finds.note(scoring=scoring_of(graph, module, None, choice, weights))
            finds.missing |= dict.fromkeys(
                ("router_logits", "router_scores"),
                not_present(
                    "this router scores the two halves of every expert's key apart, and has no tensor with a score for each expert"
                ),
            )
        finds.sizes["num_experts"] = _each(held[0])
        finds.made = graph.maker(routed)
        find_shared(finds, graph, module, None, graph.tensors[routed], finds.made + 1)
        return finds
    return None


def _each(held: Call) -> int | None:
    """For how many experts a module holds something: rows of a table, or matrices."""
    weight = getattr(held.fn, "weight", None)
    return (
        weight.shape[0]
        if isinstance(held.fn, torch.nn.Embedding)
        or (isinstance(weight, torch.Tensor) and weight.dim() == 3)
        else None
    )


def _holding(graph: TraceGraph, module: Call, choice: int, routed: int | None) -> list[Call]:
    """The modules that hold something for each expert, called between the choice and the routed output."""
    last = None if routed is None else graph.maker(routed)
    return [
        c
        for c in children(graph, module)
        if last is not None and c.start > choice and c.stop <= last and _each(c) is not None
    ]


def _numbers(graph: TraceGraph, module: Call, choice: int) -> int:
    """The expert numbers: what the choice numbers, or what is picked from other numbers by it."""
    chosen = next(
        key for key in graph.ops[choice].makes if not graph.tensors[key].is_floating_point()
    )
    picked = [
        made
        for i in graph.indices(module, "gather")
        if chosen in graph.ops[i].reads
        for made in graph.ops[i].makes
        if not graph.tensors[made].is_floating_point()
    ]
    return picked[0] if picked else chosen


def _last_alike(graph: TraceGraph, module: Call, key: int) -> int:
    """The last of what is made of the chosen scores in their own shape, one after another."""
    while True:
        made = [
            new
            for i in graph.readers.get(key, ())
            if module.start <= i < module.stop
            for new in graph.ops[i].makes
            if new != key
            and graph.tensors[new].shape == graph.tensors[key].shape
            and graph.tensors[new].is_floating_point()
            and len(
                [
                    k
                    for k in graph.ops[i].reads
                    if graph.tensors[k].shape == graph.tensors[key].shape
                ]
            )
            == 1
        ]
        if not made:
            return key
        key = made[0]


def _first_whole(graph: TraceGraph, module: Call, weights: int) -> int | None:
    """The first tensor as large as a stream that weighted results go into."""
    wanted = next(iter(module.args)).shape
    reached, made = {weights}, []
    for index in range(module.start, module.stop):
        if reached & set(graph.ops[index].reads):
            reached.update(graph.ops[index].makes)
            made += [
                k
                for k in graph.ops[index].makes
                if graph.tensors[k].shape[-1] == wanted[-1]
                and graph.tensors[k].numel() == wanted.numel()
            ]
    # Slots of one expert each are as large, sorted by expert: what they are put back in order in comes after.
    ordered = [k for k in made if graph.ops[graph.maker(k)].name.startswith("index_add")]
    return (ordered or made or [None])[0]


def _handed(graph: TraceGraph, inside: list[Call], key: int) -> object:
    """Where a tensor, or a view of it, is first the result of a call."""
    found = [
        spot
        for k in sorted(graph.onward(key), key=lambda k: graph.maker(k))
        if (spot := maker_candidate(inside, k)) is not None
    ]
    return found[0] if found else None
