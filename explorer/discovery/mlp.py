"""Finding the values of an MLP: dense, or a mixture with a router, experts and perhaps a shared expert."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from explorer.discovery.trace_graph import PASSING, Call, Flow
from explorer.discovery.residual import constants_of, origins
from explorer.discovery.candidates import (
    Finds,
    Spot,
    argument,
    children,
    innermost,
    is_norm,
    maker_spot,
    result,
)
from explorer.discovery.hook_point import Chosen
from explorer.vocabulary.availability import absent, setting, unfollowed

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


def experts_call(flow: Flow, module: Call) -> Call | None:
    """The outermost module within that is called with expert numbers and, in the same shape, their weights."""
    found = []
    for call in flow.inside(module):
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


def find_dense(flow: Flow, module: Call, products: list[int] | None = None) -> Finds:
    """Spots of a dense MLP: the down projection is the last module that multiplies with weights, the activation is a module before it.

    ``products`` are the operations that multiply with weights, where what the module returns is not simply the last one's result.
    """
    finds = Finds(module.module)
    finds.missing = dict.fromkeys(ROUTED, absent("this MLP is dense: it has no router"))
    chain = flow.back(id(module.output)) if isinstance(module.output, torch.Tensor) else []
    inner = [c for c in flow.inside(module) if not c.labels]
    down = (
        next((c for c in inner if result(c, chain) is not None), None)
        if products is None
        else flow.owners[products[-1]]
    )
    if down is None and products is None and (own := _own_product(flow, module)) is not None:
        down, finds.traits["down"] = own
    if down is None or not down.labels and down.module == module.module or not down.args:
        finds.missing |= dict.fromkeys(DENSE, unfollowed("no module makes the MLP's output"))
        return finds
    neurons = down.args[0]
    finds.spots["mlp_neurons"] = Spot(neurons, down, "input", 0)
    finds.sizes["intermediate_size"] = neurons.shape[-1]
    finds.traits["normed"] = any(
        is_norm(flow, c)
        and c.ended < down.began
        and c.start > 0
        and flow.module(c.module) is c
        and result(c, flow.back(id(neurons))) is not None
        for c in inner
    )
    activation = _activation(flow, module, down, neurons)
    if activation is None:
        finds.missing["mlp_activation"] = unfollowed("the activation is the result of no call")
    else:
        finds.spots["mlp_activation"] = activation
    return finds


def _own_product(flow: Flow, module: Call) -> tuple[Call, str] | None:
    """The call that does a module's last product, with a parameter of the module's own, and the parameter's path; the neurons are its first argument."""
    constants = constants_of(module)
    for index in reversed(
        [i for name in ("bmm", "mm", "matmul") for i in flow.indices(module, name)]
    ):
        path = next(
            (
                constants[k]
                for k in origins(flow, flow.ops[index].reads[-1], index)
                if k in constants
            ),
            None,
        )
        call = next(
            (c for c in innermost(flow.inside(module), index) if c.labels and c.fn is not None),
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
_ACTIVATIONS = frozenset("silu gelu relu leaky_relu elu softplus".split())


def _activation(flow: Flow, module: Call, down: Call, neurons: torch.Tensor) -> Spot | None:
    """The result, as wide as the neurons, of a module with no more than single numbers of its own or of a function that is an activation."""
    wide = [
        c
        for c in flow.inside(module)
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
        and any(flow.ops[i].name in _ACTIVATIONS for i in range(c.start, c.stop))
    ]
    found = modules or functions
    return (
        Spot(found[0].output, found[0], "output", None)
        if found
        else _by_hand(flow, module, down, neurons)
    )


#: What an activation written out in the forward bends its input with, and what it does beside that, number by number.
_BENDING = frozenset("sigmoid tanh erf exp".split())
_LEVEL = PASSING | frozenset(
    "mul mul_ div div_ add add_ sub neg pow clamp clamp_min clamp_max minimum maximum".split()
)


def _by_hand(flow: Flow, module: Call, down: Call, neurons: torch.Tensor) -> Spot | None:
    """The result of an activation that is written out, as ``x * sigmoid(x)``: the last product of what a bend makes with what went into it."""
    bends = [
        i
        for i in range(module.start, down.start)
        if flow.ops[i].name in _BENDING
        and flow.tensors[flow.ops[i].makes[0]].shape[-1] == neurons.shape[-1]
    ]
    if len(bends) != 1:
        return None
    bend = bends[0]
    root, made = (
        _level_root(flow, flow.ops[bend].reads[0], bend, module.start),
        flow.ops[bend].makes[0],
    )
    after = [made]
    for index in range(bend + 1, down.start):
        op = flow.ops[index]
        if op.name not in _LEVEL or not set(op.reads) & set(after):
            continue
        others = [key for key in op.reads if key not in after]
        if all(_level_root(flow, key, index, module.start) == root for key in others):
            after += op.makes
            made = op.makes[0] if others else made
    return maker_spot(
        [c for c in flow.inside(module) if c.module == module.module and c.fn is not None], made
    )


def _level_root(flow: Flow, key: int, before: int, start: int) -> int:
    """The tensor that one was made of number by number, with nothing but numbers beside it."""
    while (
        (index := flow.maker(key, before)) is not None
        and index >= start
        and flow.ops[index].name in _LEVEL
        and len(flow.ops[index].reads) == 1
    ):
        key, before = flow.ops[index].reads[0], index
    return key


def find_mixture(flow: Flow, module: Call, experts: Call) -> Finds:
    """Spots of a mixture whose experts are one module."""
    finds = Finds(module.module)
    finds.missing = dict.fromkeys(
        DENSE, absent("this MLP is a mixture: every expert has neurons of its own")
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
    finds.spots["expert_indices"] = Spot(indices[1], experts, "input", indices[0])
    finds.spots["expert_weights"] = Spot(weights[1], experts, "input", weights[0])
    finds.spots["routed_output"] = Spot(experts.output, experts, "output", None)
    finds.sizes["top_k"] = indices[1].shape[-1]
    finds.traits["experts"] = experts.module
    stacked = next((p.shape[0] for p in experts.fn.parameters() if p.dim() == 3), None)
    if stacked is not None:
        finds.sizes["num_experts"] = stacked
    inner = [c for c in flow.inside(experts) if not c.labels and isinstance(c.output, torch.Tensor)]
    if inner:
        finds.sizes["intermediate_size"] = inner[0].output.shape[-1]
    elif (wide := _expert_width(experts.fn)) is not None:
        finds.sizes["intermediate_size"] = wide
    find_router(finds, flow, module, id(indices[1]))
    _slots(finds, flow, experts)
    finds.made = experts.stop - 1
    find_shared(finds, flow, module, experts, experts.output, experts.stop)
    return finds


def _expert_width(experts: torch.nn.Module) -> int | None:
    """How many neurons an expert has: the input's width of its last matrix, where all experts' matrices are one tensor."""
    down = getattr(experts, "down_proj", None)
    return (
        None
        if not isinstance(down, torch.Tensor) or down.dim() != 3
        else down.shape[1 if getattr(experts, "is_transposed", False) else 2]
    )


def find_router(finds: Finds, flow: Flow, module: Call, indices: int) -> None:
    """The choice is the top-k that makes the indices, or the first of several that each take the largest left; the logits are the projection before it."""
    choices, inside = _choices(flow, module, indices), flow.inside(module)
    if not choices:
        finds.missing |= dict.fromkeys(
            ("router_logits", "router_scores"), unfollowed("no top-k makes the expert numbers")
        )
        return
    choice = choices[0]
    entering = flow.back(flow.ops[choice].reads[0], choice)
    scores = next(
        (s for c in innermost(inside, choice) if (s := argument(c, entering))), None
    ) or next(
        (
            s
            for key in entering
            if (s := maker_spot([c for c in inside if c.fn is not None and c.stop <= choice], key))
        ),
        None,
    )
    stacked = finds.sizes.get("num_experts")
    finds.sizes["num_experts"] = flow.tensors[flow.ops[choice].reads[0]].shape[-1]
    if stacked is not None and stacked < finds.sizes["num_experts"]:
        _idle(finds, flow, inside, choice)
    if finds.sizes["top_k"] >= finds.sizes["num_experts"]:
        finds.missing["router_margin"] = absent("every expert is chosen, so none is rejected")
    owner = next(c for c in innermost(inside, choice) if c.labels).module
    if owner != module.module:
        finds.traits["router"] = owner
    if scores is not None:
        finds.spots["router_scores"] = scores
    else:
        finds.missing["router_scores"] = unfollowed("the scores are passed to no call of their own")
    projections = [
        i
        for name in ("mm", "addmm", "bmm")
        for i in flow.indices(module, name)
        if i < choice and flow.tensors[flow.ops[i].makes[0]].shape[-1] == finds.sizes["num_experts"]
    ]
    for index in projections[-1:]:
        onward = flow.onward(flow.ops[index].makes[0])
        for call in innermost(inside, index):
            if call.fn is not None and (spot := result(call, onward)):
                finds.spots["router_logits"] = spot
                break
    if not projections and (projection := _wider(flow, module, choice)) is not None:
        projections = [projection]
        _first_of(finds, flow, inside, projection)
    if "router_logits" not in finds.spots:
        finds.missing["router_logits"] = unfollowed(
            "the router's projection is the result of no call"
        )
    weights = id(finds.spots["expert_weights"].tensor)
    scoring = scoring_of(flow, module, projections[-1] if projections else None, choice, weights)
    finds.traits["scoring"] = (
        scoring
        if len(choices) == 1
        else replace(scoring, after="none", renormalised=False, factor=None, repeated=True)
    )


def _wider(flow: Flow, module: Call, choice: int) -> int | None:
    """The projection that makes more than the scores of which the choice takes the largest, cut after the first ones."""
    count = flow.tensors[flow.ops[choice].reads[0]].shape[-1]
    made = _sources(flow, flow.ops[choice].reads[0], choice, module.start)
    cuts = [
        i
        for i in made
        if flow.ops[i].name == "slice"
        and flow.tensors[flow.ops[i].makes[0]].shape[-1] == count
        and flow.tensors[flow.ops[i].reads[0]].shape[-1] > count
        and flow.ops[i].numbers[1:2] == (0,)
    ]
    found = [
        i
        for i in made
        if flow.ops[i].name in ("mm", "addmm", "bmm")
        and cuts
        and flow.tensors[flow.ops[i].makes[0]].shape[-1]
        == flow.tensors[flow.ops[cuts[0]].reads[0]].shape[-1]
    ]
    return found[-1] if found else None


def _first_of(finds: Finds, flow: Flow, inside: list[Call], projection: int) -> None:
    """The router's logits as the first of what a projection makes."""
    onward = flow.onward(flow.ops[projection].makes[0])
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
        finds.spots["router_logits"] = replace(
            spot,
            axes=("batch", "seq", "num_projected"),
            chosen=Chosen("num_experts", "num_projected", ""),
        )


def _choices(flow: Flow, module: Call, indices: int) -> list[int]:
    """The operations that choose what ``indices`` number, first to last: one top-k, or one maximum for each slot."""
    found, todo = [], [(indices, None)]
    while todo:
        key, before = todo.pop()
        index = flow.maker(flow.back(key, before)[-1], before)
        if index is None or index < module.start:
            continue
        if flow.ops[index].name in ("topk", "max", "argmax"):
            found.append(index)
        elif flow.ops[index].name in ("cat", "masked_fill", "where"):
            todo += [
                (read, index)
                for read in flow.ops[index].reads
                if not flow.tensors[read].is_floating_point()
            ]
    return sorted(set(found))


def _idle(finds: Finds, flow: Flow, inside: list[Call], choice: int) -> None:
    """More can be chosen than there are experts: what does nothing has a number too, until the experts are called with another and a weight of nought."""
    numbers = next(
        (key for key in flow.ops[choice].makes if not flow.tensors[key].is_floating_point()), None
    )
    if (
        numbers is not None
        and (spot := maker_spot([c for c in inside if c.fn is not None], numbers)) is not None
    ):
        finds.spots["expert_indices"] = spot
        finds.traits["idle"] = True


@dataclass(frozen=True)
class Scoring:
    """How a router's logits become the weights of the chosen, read off the operations between them.

    function: ``"softmax"``, ``"sigmoid"`` or ``"none"``, of the logits before the choice. bias: the path of
    the numbers, one per expert, that are added for the choice alone. masked: whether experts, in groups, are
    struck out before it. after: ``"softmax"`` or ``"sigmoid"`` where that is taken of the chosen. renormalised: whether the chosen
    weights are divided by their sum. factor: what they are multiplied with at last: a number, or the path of
    a parameter with one for each expert; None where that is not followed. choice_only: whether the scores decide the choice and go into no weight.
    repeated: whether the slots are chosen one after another, each the largest of those left.
    """

    function: str
    bias: str = ""
    masked: bool = False
    after: str = "none"
    renormalised: bool = False
    factor: float | str | None = 1.0
    choice_only: bool = False
    repeated: bool = False

    @property
    def words(self) -> str:
        """In words, for a table."""
        parts = [
            self.function
            if self.function != "none"
            else f"{self.after} of the chosen"
            if self.after != "none"
            else "as projected"
        ]
        parts += ["plus a selection bias"] if self.bias else []
        parts += ["within the best groups"] if self.masked else []
        parts += ["one after another"] if self.repeated else []
        return ", ".join(parts)


_FUNCTIONS = ("softmax", "sigmoid")


def scoring_of(flow: Flow, module: Call, logits: int | None, choice: int, weights: int) -> Scoring:
    """``logits`` is the operation that projects, ``choice`` the top-k, ``weights`` the tensor the experts are called with."""
    start = logits if logits is not None else module.start
    before = _sources(flow, flow.ops[choice].reads[0], choice, start)
    names = [flow.ops[i].name for i in before]
    function = next((f for f in _FUNCTIONS if any(f in name for name in names)), "none")
    made = flow.maker(weights)
    chosen = _sources(flow, weights, None if made is None else made + 1, start)
    after = [i for i in chosen if i not in before and i > start]
    late = [flow.ops[i].name for i in after if i > choice]
    width = flow.tensors[flow.ops[choice].reads[0]].shape[-1]
    bias = next(
        (
            path
            for i in before
            if flow.ops[i].name in ("add", "add_")
            for read in flow.ops[i].reads
            if flow.tensors[read].numel() == width
            and (path := _constant(flow, module, read, i)) is not None
        ),
        "",
    )
    late_ops = [i for i in after if i > choice]
    return Scoring(
        function,
        bias,
        any("masked_fill" in n or n == "where" for n in names),
        next((f for f in _FUNCTIONS if any(f in n for n in late)), "none"),
        any(n in ("sum", "linalg_vector_norm") for n in late)
        and any(n.startswith("div") for n in late),
        _factor(flow, module, late_ops),
        choice_only=not set(flow.ops[choice].makes) & _made(flow, chosen)
        and flow.ops[choice].reads[0] not in _read(flow, chosen),
    )


def _constant(flow: Flow, module: Call, key: int, before: int) -> str | None:
    """The path of a parameter or buffer of a module that a tensor is, or was picked from."""
    constants = constants_of(module)
    return next(
        (f"{module.module}.{constants[k]}" for k in origins(flow, key, before) if k in constants),
        None,
    )


def _factor(flow: Flow, module: Call, ops: list[int]) -> float | str | None:
    """What operations multiply with: the product of their numbers, or one parameter; None where it is something else."""
    factor: float | str | None = 1.0
    for index in ops:
        if flow.ops[index].name in ("mul", "mul_"):
            if len(flow.ops[index].reads) == 1:
                factor = (
                    factor * prod(flow.ops[index].numbers) if isinstance(factor, float) else None
                )
            else:
                found = [
                    path
                    for key in flow.ops[index].reads
                    if (path := _constant(flow, module, key, index)) is not None
                    and flow.tensors[key].numel() > 1
                ]
                factor = found[0] if len(found) == 1 and factor == 1.0 else None
    return factor


def _sources(flow: Flow, key: int, before: int | None, start: int) -> list[int]:
    """The operations after ``start`` that a tensor is made with, through floating-point tensors alone."""
    found: set[int] = set()
    todo = [(key, before)]
    while todo:
        key, before = todo.pop()
        index = flow.maker(key, before)
        if (
            index is None
            or index < start
            or index in found
            or not flow.tensors[key].is_floating_point()
        ):
            continue
        found.add(index)
        todo += [(k, index) for k in flow.ops[index].reads]
    return sorted(found)


def _made(flow: Flow, ops: list[int]) -> set[int]:
    return {key for i in ops for key in flow.ops[i].makes if flow.tensors[key].is_floating_point()}


def _read(flow: Flow, ops: list[int]) -> set[int]:
    return {key for i in ops for key in flow.ops[i].reads}


def _slots(finds: Finds, flow: Flow, experts: Call) -> None:
    """The slots are what is summed, over a dimension of top_k, into the routed output."""
    out = experts.output
    shape = (*out.shape[:-1], finds.sizes["top_k"], out.shape[-1])
    chain = set(flow.back(id(out)))
    for index in flow.indices(experts, "sum"):
        slots = flow.ops[index].reads[0]
        if chain & set(flow.ops[index].makes) and tuple(flow.tensors[slots].shape) == shape:
            if spot := maker_spot(
                [c for c in flow.inside(experts) if c.labels and c.stop <= index], slots
            ):
                finds.spots["expert_outputs"] = spot
                return
    # What transformers sets on an experts class whose implementation can be chosen.
    chosen = hasattr(experts.fn, "_is_expert_parallel")
    finds.missing["expert_outputs"] = (
        setting(
            "this experts implementation adds each expert's output up at once; "
            'load the model with experts_implementation="grouped_mm" or "batched_mm"'
        )
        if chosen
        else unfollowed(
            "this mixture runs its experts one after another and adds each one's output up at once, so that no call hands over the slots'"
        )
    )


def find_shared(
    finds: Finds, flow: Flow, module: Call, experts: Call | None, output: torch.Tensor, stop: int
) -> None:
    """The shared expert's part is what is added to the routed ``output`` inside the mixture, made before operation ``stop``."""
    routed = flow.onward(id(output))
    scaled = [
        i
        for name in ("mul", "mul_", "div")
        for i in flow.indices(module, name)
        if i >= stop and routed & set(flow.ops[i].reads) and len(flow.ops[i].reads) == 1
    ]
    summed = routed | {
        key for i in scaled for made in flow.ops[i].makes for key in flow.onward(made)
    }
    adds = [
        i
        for name in ("add", "add_")
        for i in flow.indices(module, name)
        if i >= stop and summed & set(flow.ops[i].reads) and len(flow.ops[i].reads) == 2
    ]
    if not adds:
        later = [
            i
            for name in ("add", "add_")
            for i in flow.indices(module, name)
            if i >= stop
            and len(flow.ops[i].reads) == 2
            and all(flow.tensors[k].shape == output.shape for k in flow.ops[i].reads)
        ]
        finds.missing["shared_expert_output"] = (
            unfollowed("what is added after the experts is added to something else than their sum")
            if later
            else absent("this mixture has no shared expert")
        )
        return
    if all(
        k in summed or _constant(flow, module, k, adds[0]) is not None
        for k in flow.ops[adds[0]].reads
    ):
        finds.missing["shared_expert_output"] = absent("this mixture has no shared expert")
        return
    direct = routed & set(flow.ops[adds[0]].reads)
    finds.traits["routed_factor"] = (
        1.0
        if direct
        else prod(
            1 / n if flow.ops[i].name == "div" else n for i in scaled for n in flow.ops[i].numbers
        )
    )
    routed = summed
    key = next(k for k in flow.ops[adds[0]].reads if k not in routed)
    # A sum written over one of the two is that one no longer.
    own = [
        c
        for c in flow.inside(module)
        if c.module == module.module and len(c.labels) == 1 and c.stop <= adds[0]
    ]
    inner = children(flow, module)
    spot = maker_spot(own, key) or maker_spot(inner, key)
    if spot is None:
        finds.missing["shared_expert_output"] = unfollowed(
            "what the shared expert adds is the result of no call"
        )
        return
    finds.spots["shared_expert_output"] = spot
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
        finds.traits["shared"] = shared[0].module
        finds.traits["shared_gated"] = id(shared[0].output) != key
