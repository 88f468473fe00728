"""Finding the values of an MLP: dense, or a mixture with a router, experts and perhaps a shared expert."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    argument,
    children,
    innermost,
    is_norm,
    maker_candidate,
    result,
)
from explorer.discovery.details import RouterScoring
from explorer.discovery.hook_point import ExpertSelection
from explorer.discovery.residual import constants_of, origins
from explorer.discovery.trace_graph import PASSING, Call, TraceGraph
from explorer.vocabulary.availability import needs_setting, not_present, not_traced

ROUTED = (
    "router_logits",
    "router_scores",
    "expert_weights",
    "expert_indices",
    "expert_outputs",
    "routed_output",
    "shared_expert_output",
)
DENSE = ("mlp_activation", "mlp_neurons")


def experts_call(graph: TraceGraph, module: Call) -> Call | None:
    """The outermost module within that is called with expert numbers and, in the same shape, their weights."""
    found = []
    for call in graph.inside(module):
        if call.labels:
            continue
        numbers = [
            a
            for _, a in call.arguments()
            if isinstance(a, torch.Tensor) and not a.is_floating_point() and a.dim() > 1
        ]
        if any(
            a.shape == n.shape
            for n in numbers
            for _, a in call.arguments()
            if isinstance(a, torch.Tensor) and a.is_floating_point()
        ):
            found.append(call)
    return min(found, key=lambda call: call.module.count("."), default=None)


def find_dense(graph: TraceGraph, module: Call, products: list[int] | None = None) -> HostFindings:
    """Spots of a dense MLP: the down projection is the last module that multiplies with weights, the activation is a module before it.

    ``products`` are the operations that multiply with weights, where what the module returns is not simply the last one's result.
    """
    finds = HostFindings(module.module)
    finds.missing = dict.fromkeys(ROUTED, not_present("this MLP is dense: it has no router"))
    chain = graph.back(id(module.output)) if isinstance(module.output, torch.Tensor) else []
    inner = [c for c in graph.inside(module) if not c.labels]
    down = (
        next((c for c in inner if result(c, chain) is not None), None)
        if products is None
        else graph.owners[products[-1]]
    )
    if down is None and products is None and (own := _own_product(graph, module)) is not None:
        down, parameter = own
        finds.note(down_parameter=parameter)
    if down is None or (not down.labels and down.module == module.module) or not down.args:
        finds.missing |= dict.fromkeys(DENSE, not_traced("no module makes the MLP's output"))
        return finds
    neurons = down.args[0]
    finds.candidates["mlp_neurons"] = TensorCandidate(neurons, down, "input", 0)
    finds.sizes["intermediate_size"] = neurons.shape[-1]
    finds.note(
        normed_neurons=any(
            is_norm(graph, c)
            and c.ended < down.began
            and c.start > 0
            and graph.module(c.module) is c
            and result(c, graph.back(id(neurons))) is not None
            for c in inner
        )
    )
    activation = _activation(graph, module, down, neurons)
    if activation is None:
        finds.missing["mlp_activation"] = not_traced("the activation is the result of no call")
    else:
        finds.candidates["mlp_activation"] = activation
    return finds


def _own_product(graph: TraceGraph, module: Call) -> tuple[Call, str] | None:
    """The call that does a module's last product, with a parameter of the module's own, and the parameter's path; the neurons are its first argument."""
    constants = constants_of(module)
    for index in reversed(
        [i for name in ("bmm", "mm", "matmul") for i in graph.indices(module, name)]
    ):
        path = next(
            (
                constants[k]
                for k in origins(graph, graph.ops[index].reads[-1], index)
                if k in constants
            ),
            None,
        )
        call = next(
            (c for c in innermost(graph.inside(module), index) if c.labels and c.fn is not None),
            None,
        )
        if (
            path is not None
            and call is not None
            and call.args
            and isinstance(call.args[0], torch.Tensor)
        ):
            return call, f"{module.module}.{path}"
    return None


#: Operations that are an activation, or the whole of one.
_ACTIVATIONS = frozenset(["silu", "gelu", "relu", "leaky_relu", "elu", "softplus"])


def _activation(
    graph: TraceGraph, module: Call, down: Call, neurons: torch.Tensor
) -> TensorCandidate | None:
    """The result, as wide as the neurons, of a module with no more than single numbers of its own or of a function that is an activation."""
    wide = [
        c
        for c in graph.inside(module)
        if c.ended < down.began
        and isinstance(c.output, torch.Tensor)
        and c.output.shape[-1] == neurons.shape[-1]
        and c.fn is not None
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
        and any(graph.ops[i].name in _ACTIVATIONS for i in range(c.start, c.stop))
    ]
    found = modules or functions
    return (
        TensorCandidate(found[0].output, found[0], "output", None)
        if found
        else _by_hand(graph, module, down, neurons)
    )


#: What an activation written out in the forward bends its input with, and what it does beside that, number by number.
_BENDING = frozenset(["sigmoid", "tanh", "erf", "exp"])
_LEVEL = PASSING | frozenset(
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


def _by_hand(
    graph: TraceGraph, module: Call, down: Call, neurons: torch.Tensor
) -> TensorCandidate | None:
    """The result of an activation that is written out, as ``x * sigmoid(x)``: the last product of what a bend makes with what went into it."""
    bends = [
        i
        for i in range(module.start, down.start)
        if graph.ops[i].name in _BENDING
        and graph.tensors[graph.ops[i].makes[0]].shape[-1] == neurons.shape[-1]
    ]
    if len(bends) != 1:
        return None
    bend = bends[0]
    root, made = (
        _level_root(graph, graph.ops[bend].reads[0], bend, module.start),
        graph.ops[bend].makes[0],
    )
    after = [made]
    for index in range(bend + 1, down.start):
        op = graph.ops[index]
        if op.name not in _LEVEL or not set(op.reads) & set(after):
            continue
        others = [key for key in op.reads if key not in after]
        if all(_level_root(graph, key, index, module.start) == root for key in others):
            after += op.makes
            made = op.makes[0] if others else made
    return maker_candidate(
        [c for c in graph.inside(module) if c.module == module.module and c.fn is not None], made
    )


def _level_root(graph: TraceGraph, key: int, before: int, start: int) -> int:
    """The tensor that one was made of number by number, with nothing but numbers beside it."""
    while (
        (index := graph.maker(key, before)) is not None
        and index >= start
        and graph.ops[index].name in _LEVEL
        and len(graph.ops[index].reads) == 1
    ):
        key, before = graph.ops[index].reads[0], index
    return key


def find_mixture(graph: TraceGraph, module: Call, experts: Call) -> HostFindings:
    """Spots of a mixture whose experts are one module."""
    finds = HostFindings(module.module)
    finds.missing = dict.fromkeys(
        DENSE, not_present("this MLP is a mixture: every expert has neurons of its own")
    )
    indices = next(
        (p, a)
        for p, a in experts.arguments()
        if isinstance(a, torch.Tensor) and not a.is_floating_point()
    )
    weights = next(
        (p, a)
        for p, a in experts.arguments()
        if isinstance(a, torch.Tensor) and a.is_floating_point() and a.shape == indices[1].shape
    )
    finds.candidates["expert_indices"] = TensorCandidate(indices[1], experts, "input", indices[0])
    finds.candidates["expert_weights"] = TensorCandidate(weights[1], experts, "input", weights[0])
    finds.candidates["routed_output"] = TensorCandidate(experts.output, experts, "output", None)
    finds.sizes["top_k"] = indices[1].shape[-1]
    finds.note(experts=experts.module)
    stacked = next((p.shape[0] for p in experts.fn.parameters() if p.dim() == 3), None)
    if stacked is not None:
        finds.sizes["num_experts"] = stacked
    inner = [
        c for c in graph.inside(experts) if not c.labels and isinstance(c.output, torch.Tensor)
    ]
    if inner:
        finds.sizes["intermediate_size"] = inner[0].output.shape[-1]
    elif (wide := _expert_width(experts.fn)) is not None:
        finds.sizes["intermediate_size"] = wide
    find_router(finds, graph, module, id(indices[1]))
    _slots(finds, graph, experts)
    finds.made = experts.stop - 1
    find_shared(finds, graph, module, experts, experts.output, experts.stop)
    return finds


def _expert_width(experts: torch.nn.Module) -> int | None:
    """How many neurons an expert has: the input's width of its last matrix, where all experts' matrices are one tensor."""
    down = getattr(experts, "down_proj", None)
    return (
        None
        if not isinstance(down, torch.Tensor) or down.dim() != 3
        else down.shape[1 if getattr(experts, "is_transposed", False) else 2]
    )


def find_router(finds: HostFindings, graph: TraceGraph, module: Call, indices: int) -> None:
    """The choice is the top-k that makes the indices, or the first of several that each take the largest left; the logits are the projection before it."""
    choices, inside = _choices(graph, module, indices), graph.inside(module)
    if not choices:
        finds.missing |= dict.fromkeys(
            ("router_logits", "router_scores"), not_traced("no top-k makes the expert numbers")
        )
        return
    choice = choices[0]
    entering = graph.back(graph.ops[choice].reads[0], choice)
    scores = next(
        (s for c in innermost(inside, choice) if (s := argument(c, entering))), None
    ) or next(
        (
            s
            for key in entering
            if (
                s := maker_candidate(
                    [c for c in inside if c.fn is not None and c.stop <= choice], key
                )
            )
        ),
        None,
    )
    stacked = finds.sizes.get("num_experts")
    finds.sizes["num_experts"] = graph.tensors[graph.ops[choice].reads[0]].shape[-1]
    if stacked is not None and stacked < finds.sizes["num_experts"]:
        _idle(finds, graph, inside, choice)
    if finds.sizes["top_k"] >= finds.sizes["num_experts"]:
        finds.missing["router_margin"] = not_present("every expert is chosen, so none is rejected")
    owner = next(c for c in innermost(inside, choice) if c.labels).module
    if owner != module.module:
        finds.note(router=owner)
    if scores is not None:
        finds.candidates["router_scores"] = scores
    else:
        finds.missing["router_scores"] = not_traced("the scores are passed to no call of their own")
    projections = [
        i
        for name in ("mm", "addmm", "bmm")
        for i in graph.indices(module, name)
        if i < choice
        and graph.tensors[graph.ops[i].makes[0]].shape[-1] == finds.sizes["num_experts"]
    ]
    for index in projections[-1:]:
        onward = graph.onward(graph.ops[index].makes[0])
        for call in innermost(inside, index):
            if call.fn is not None and (spot := result(call, onward)):
                finds.candidates["router_logits"] = spot
                break
    if not projections and (projection := _wider(graph, module, choice)) is not None:
        projections = [projection]
        _first_of(finds, graph, inside, projection)
    if "router_logits" not in finds.candidates:
        finds.missing["router_logits"] = not_traced(
            "the router's projection is the result of no call"
        )
    weights = id(finds.candidates["expert_weights"].tensor)
    scoring = scoring_of(graph, module, projections[-1] if projections else None, choice, weights)
    finds.note(
        scoring=scoring
        if len(choices) == 1
        else replace(scoring, after="none", renormalised=False, factor=None, repeated=True)
    )


def _wider(graph: TraceGraph, module: Call, choice: int) -> int | None:
    """The projection that makes more than the scores of which the choice takes the largest, cut after the first ones."""
    count = graph.tensors[graph.ops[choice].reads[0]].shape[-1]
    made = _sources(graph, graph.ops[choice].reads[0], choice, module.start)
    cuts = [
        i
        for i in made
        if graph.ops[i].name == "slice"
        and graph.tensors[graph.ops[i].makes[0]].shape[-1] == count
        and graph.tensors[graph.ops[i].reads[0]].shape[-1] > count
        and graph.ops[i].numbers[1:2] == (0,)
    ]
    found = [
        i
        for i in made
        if graph.ops[i].name in ("mm", "addmm", "bmm")
        and cuts
        and graph.tensors[graph.ops[i].makes[0]].shape[-1]
        == graph.tensors[graph.ops[cuts[0]].reads[0]].shape[-1]
    ]
    return found[-1] if found else None


def _first_of(finds: HostFindings, graph: TraceGraph, inside: list[Call], projection: int) -> None:
    """The router's logits as the first of what a projection makes."""
    onward = graph.onward(graph.ops[projection].makes[0])
    spot = next(
        (
            spot
            for call in innermost(inside, projection)
            if call.fn is not None and (spot := result(call, onward))
        ),
        None,
    )
    if spot is not None:
        finds.sizes["num_projected"] = spot.tensor.shape[-1]
        finds.candidates["router_logits"] = replace(
            spot,
            axes=("batch", "seq", "num_projected"),
            selection=ExpertSelection("num_experts", "num_projected", ""),
        )


def _choices(graph: TraceGraph, module: Call, indices: int) -> list[int]:
    """The operations that choose what ``indices`` number, first to last: one top-k, or one maximum for each slot."""
    found, todo = [], [(indices, None)]
    while todo:
        key, before = todo.pop()
        index = graph.maker(graph.back(key, before)[-1], before)
        if index is None or index < module.start:
            continue
        if graph.ops[index].name in ("topk", "max", "argmax"):
            found.append(index)
        elif graph.ops[index].name in ("cat", "masked_fill", "where"):
            todo += [
                (read, index)
                for read in graph.ops[index].reads
                if not graph.tensors[read].is_floating_point()
            ]
    return sorted(set(found))


def _idle(finds: HostFindings, graph: TraceGraph, inside: list[Call], choice: int) -> None:
    """More can be chosen than there are experts: what does nothing has a number too, until the experts are called with another and a weight of nought."""
    numbers = next(
        (key for key in graph.ops[choice].makes if not graph.tensors[key].is_floating_point()), None
    )
    if (
        numbers is not None
        and (spot := maker_candidate([c for c in inside if c.fn is not None], numbers)) is not None
    ):
        finds.candidates["expert_indices"] = spot
        finds.note(null_experts=True)


_FUNCTIONS = ("softmax", "sigmoid")


def scoring_of(
    graph: TraceGraph, module: Call, logits: int | None, choice: int, weights: int
) -> RouterScoring:
    """``logits`` is the operation that projects, ``choice`` the top-k, ``weights`` the tensor the experts are called with."""
    start = logits if logits is not None else module.start
    before = _sources(graph, graph.ops[choice].reads[0], choice, start)
    names = [graph.ops[i].name for i in before]
    function = next((f for f in _FUNCTIONS if any(f in name for name in names)), "none")
    made = graph.maker(weights)
    chosen = _sources(graph, weights, None if made is None else made + 1, start)
    after = [i for i in chosen if i not in before and i > start]
    late = [graph.ops[i].name for i in after if i > choice]
    width = graph.tensors[graph.ops[choice].reads[0]].shape[-1]
    bias = next(
        (
            path
            for i in before
            if graph.ops[i].name in ("add", "add_")
            for read in graph.ops[i].reads
            if graph.tensors[read].numel() == width
            and (path := _constant(graph, module, read, i)) is not None
        ),
        "",
    )
    late_ops = [i for i in after if i > choice]
    return RouterScoring(
        function,
        bias,
        any("masked_fill" in n or n == "where" for n in names),
        next((f for f in _FUNCTIONS if any(f in n for n in late)), "none"),
        any(n in ("sum", "linalg_vector_norm") for n in late)
        and any(n.startswith("div") for n in late),
        _factor(graph, module, late_ops),
        choice_only=not set(graph.ops[choice].makes) & _made(graph, chosen)
        and graph.ops[choice].reads[0] not in _read(graph, chosen),
    )


def _constant(graph: TraceGraph, module: Call, key: int, before: int) -> str | None:
    """The path of a parameter or buffer of a module that a tensor is, or was picked from."""
    constants = constants_of(module)
    return next(
        (f"{module.module}.{constants[k]}" for k in origins(graph, key, before) if k in constants),
        None,
    )


def _factor(graph: TraceGraph, module: Call, ops: list[int]) -> float | str | None:
    """What operations multiply with: the product of their numbers, or one parameter; None where it is something else."""
    factor: float | str | None = 1.0
    for index in ops:
        if graph.ops[index].name in ("mul", "mul_"):
            if len(graph.ops[index].reads) == 1:
                factor = (
                    factor * prod(graph.ops[index].numbers) if isinstance(factor, float) else None
                )
            else:
                found = [
                    path
                    for key in graph.ops[index].reads
                    if (path := _constant(graph, module, key, index)) is not None
                    and graph.tensors[key].numel() > 1
                ]
                factor = found[0] if len(found) == 1 and factor == 1.0 else None
    return factor


def _sources(graph: TraceGraph, key: int, before: int | None, start: int) -> list[int]:
    """The operations after ``start`` that a tensor is made with, through floating-point tensors alone."""
    found: set[int] = set()
    todo = [(key, before)]
    while todo:
        key, before = todo.pop()
        index = graph.maker(key, before)
        if (
            index is None
            or index < start
            or index in found
            or not graph.tensors[key].is_floating_point()
        ):
            continue
        found.add(index)
        todo += [(k, index) for k in graph.ops[index].reads]
    return sorted(found)


def _made(graph: TraceGraph, ops: list[int]) -> set[int]:
    return {
        key for i in ops for key in graph.ops[i].makes if graph.tensors[key].is_floating_point()
    }


def _read(graph: TraceGraph, ops: list[int]) -> set[int]:
    return {key for i in ops for key in graph.ops[i].reads}


def _slots(finds: HostFindings, graph: TraceGraph, experts: Call) -> None:
    """The slots are what is summed, over a dimension of top_k, into the routed output."""
    out = experts.output
    shape = (*out.shape[:-1], finds.sizes["top_k"], out.shape[-1])
    chain = set(graph.back(id(out)))
    for index in graph.indices(experts, "sum"):
        slots = graph.ops[index].reads[0]
        if chain & set(graph.ops[index].makes) and tuple(graph.tensors[slots].shape) == shape:
            if spot := maker_candidate(
                [c for c in graph.inside(experts) if c.labels and c.stop <= index], slots
            ):
                finds.candidates["expert_outputs"] = spot
                return
    # What transformers sets on an experts class whose implementation can be chosen.
    chosen = hasattr(experts.fn, "_is_expert_parallel")
    finds.missing["expert_outputs"] = (
        needs_setting(
            "this experts implementation adds each expert's output up at once; "
            'load the model with experts_implementation="grouped_mm" or "batched_mm"'
        )
        if chosen
        else not_traced(
            "this mixture runs its experts one after another and adds each one's output up at once, so that no call hands over the slots'"
        )
    )


def find_shared(
    finds: HostFindings,
    graph: TraceGraph,
    module: Call,
    experts: Call | None,
    output: torch.Tensor,
    stop: int,
) -> None:
    """The shared expert's part is what is added to the routed ``output`` inside the mixture, made before operation ``stop``."""
    routed = graph.onward(id(output))
    scaled = [
        i
        for name in ("mul", "mul_", "div")
        for i in graph.indices(module, name)
        if i >= stop and routed & set(graph.ops[i].reads) and len(graph.ops[i].reads) == 1
    ]
    summed = routed | {
        key for i in scaled for made in graph.ops[i].makes for key in graph.onward(made)
    }
    adds = [
        i
        for name in ("add", "add_")
        for i in graph.indices(module, name)
        if i >= stop and summed & set(graph.ops[i].reads) and len(graph.ops[i].reads) == 2
    ]
    if not adds:
        later = [
            i
            for name in ("add", "add_")
            for i in graph.indices(module, name)
            if i >= stop
            and len(graph.ops[i].reads) == 2
            and all(graph.tensors[k].shape == output.shape for k in graph.ops[i].reads)
        ]
        finds.missing["shared_expert_output"] = (
            not_traced("what is added after the experts is added to something else than their sum")
            if later
            else not_present("this mixture has no shared expert")
        )
        return
    if all(
        k in summed or _constant(graph, module, k, adds[0]) is not None
        for k in graph.ops[adds[0]].reads
    ):
        finds.missing["shared_expert_output"] = not_present("this mixture has no shared expert")
        return
    direct = routed & set(graph.ops[adds[0]].reads)
    finds.note(
        routed_factor=1.0
        if direct
        else prod(
            1 / n if graph.ops[i].name == "div" else n for i in scaled for n in graph.ops[i].numbers
        )
    )
    routed = summed
    key = next(k for k in graph.ops[adds[0]].reads if k not in routed)
    # A sum written over one of the two is that one no longer.
    own = [
        c
        for c in graph.inside(module)
        if c.module == module.module and len(c.labels) == 1 and c.stop <= adds[0]
    ]
    inner = children(graph, module)
    spot = maker_candidate(own, key) or maker_candidate(inner, key)
    if spot is None:
        finds.missing["shared_expert_output"] = not_traced(
            "what the shared expert adds is the result of no call"
        )
        return
    finds.candidates["shared_expert_output"] = spot
    finds.made = adds[0]
    width = output.shape[-1]
    shared = [
        c
        for c in inner
        if isinstance(c.output, torch.Tensor)
        and c.output.shape[-1] == width
        and c is not experts
        and any(True for _ in c.fn.children())
    ]
    if shared:
        finds.note(shared=shared[0].module, shared_gated=id(shared[0].output) != key)
