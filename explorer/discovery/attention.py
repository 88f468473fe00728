"""Finding the values of softmax attention: handed to a function of its own, or worked out in place."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    argument,
    around,
    children,
    innermost,
    is_norm,
    maker_candidate,
    result,
)
from explorer.discovery.residual import Part, leads, weighted
from explorer.discovery.trace_graph import PASSING, Call, TraceGraph, tensors
from explorer.vocabulary import BY_HOST
from explorer.vocabulary.availability import needs_setting, not_present, not_traced

NO_PATTERN = 'the {name} attention never holds the pattern as a tensor; load the model with attn_implementation="eager"'
_SOFTMAX = ("_softmax", "softmax")
_PRODUCTS = ("bmm", "matmul", "mm", "baddbmm")

#: What may stand between the product of queries and keys and the softmax: scale, mask, bias, cap, a change of dtype.
_BETWEEN = PASSING | frozenset(
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
HEADS = ("attention_queries", "attention_keys", "attention_values")


def interface(graph: TraceGraph, module: Call) -> Call | None:
    """The call that takes queries, keys and values: in the module's own forward, with three
    four-dimensional tensors and the module itself."""
    found = _interfaces(graph, module)
    return found[0] if found else None


def _interfaces(graph: TraceGraph, module: Call) -> list[Call]:
    return [
        call
        for call in graph.inside(module)
        if call.module == module.module
        and len(call.labels) == 1
        and call.fn is not None
        and any(a is module.fn for a in call.args)
        and sum(isinstance(a, torch.Tensor) and a.dim() == 4 for a in call.args) >= 3
    ]


def patterns(graph: TraceGraph, module: Call) -> list[int]:
    """The softmaxes whose result is multiplied with values, and whose input is made of a product."""
    return [
        i
        for name in _SOFTMAX
        for i in graph.indices(module, name)
        if _mixing(graph, module, i) and _product(graph, module, i) is not None
    ]


def is_attention(graph: TraceGraph, module: Call) -> bool:
    return interface(graph, module) is not None or bool(patterns(graph, module))


def _mixing(graph: TraceGraph, module: Call, softmax: int) -> list[int]:
    """The products that take a softmax's result."""
    leaving = _kept(graph, graph.ops[softmax].makes[0])
    return [
        i
        for name in _PRODUCTS
        for i in graph.indices(module, name)
        if i > softmax and leaving & set(graph.ops[i].reads)
    ]


def _kept(graph: TraceGraph, key: int) -> set[int]:
    """The pattern on its way to the values: copies, views, and what a mask of zeros leaves of it."""
    found, todo = set(), [key]
    while todo:
        for new in graph.onward(todo.pop()) - found:
            found.add(new)
            todo += [
                made
                for i in graph.readers.get(new, ())
                if graph.ops[i].name in ("mul", "where", "masked_fill", "native_dropout")
                for made in graph.ops[i].makes
                if graph.tensors[made].shape[-2:] == graph.tensors[new].shape[-2:]
            ]
    return found


def _product(graph: TraceGraph, module: Call, softmax: int) -> int | None:
    """The product of queries and keys a softmax is taken of."""
    todo, seen = [(graph.ops[softmax].reads[0], softmax)], set()
    while todo:
        key, before = todo.pop(0)
        index = graph.maker(key, before)
        if index is None or index < module.start or index in seen:
            continue
        seen.add(index)
        if graph.ops[index].name in _PRODUCTS:
            return index
        if graph.ops[index].name in _BETWEEN:
            todo += [(k, index) for k in graph.ops[index].reads]
    return None


def find_attention(graph: TraceGraph, module: Call, part: Part) -> HostFindings:
    """Spots of one attention module that ran once. ``part`` is what it adds to the stream."""
    finds = HostFindings(module.module)
    call = interface(graph, module)
    if call is not None:
        if len(_interfaces(graph, module)) > 1:
            return _several(graph, module, part, "calls")
        heads = [
            TensorCandidate(a, call, "input", i)
            for i, a in enumerate(call.args)
            if isinstance(a, torch.Tensor) and a.dim() == 4
        ][:3]
        returned = call.output[0] if isinstance(call.output, (tuple, list)) else call.output
        mixed = result(call, {id(returned)})
        softmax = [i for name in _SOFTMAX for i in graph.indices(call, name)]
        if (
            len(softmax) == 1
            and (products := _mixing(graph, call, softmax[-1]))
            and id(returned) not in graph.onward(graph.ops[products[-1]].makes[0])
        ):
            # Something is done to them before they are returned.
            onward = sorted(
                graph.onward(graph.ops[products[-1]].makes[0]), key=lambda k: graph.maker(k)
            )
            mixed = _split(
                graph,
                [c for c in graph.inside(call) if c.fn is not None],
                onward,
                heads[0].tensor.shape[2],
                heads[0].tensor.shape[0],
                False,
            )
        lengths = (heads[0].tensor.shape[2], heads[1].tensor.shape[2])
    else:
        softmax = patterns(graph, module)
        if len(softmax) > 1:
            return _several(graph, module, part, "patterns")
        heads, mixed = _in_place(graph, module, softmax[0])
        lengths = tuple(graph.tensors[graph.ops[softmax[0]].reads[0]].shape[-2:])
    batch = next(tensors((module.args, module.kwargs))).shape[0]
    _heads(finds, heads, lengths, batch)
    _pattern(finds, graph, call or module, softmax, module.start)
    if mixed is None:
        finds.missing["attention_head_outputs"] = not_traced("no call returns the heads' outputs")
    else:
        finds.candidates["attention_head_outputs"] = mixed
    _projection(finds, graph, module, part)
    _gate(finds, graph, module)
    anchor = call or (mixed.call if mixed is not None else None)
    if anchor is not None:
        finds.note(**around(graph, module, anchor))
    return finds


def _several(graph: TraceGraph, module: Call, part: Part, what: str) -> HostFindings:
    """An attention that is made of several: what it adds is known, and nothing inside is the whole."""
    finds = HostFindings(module.module)
    reason = not_traced(
        f"{module.module.rpartition('.')[2]} computes its attention in several {what}, of which none is the whole"
    )
    names = [
        name
        for name in BY_HOST["self_attn"]
        if name not in ("attention_output", "attention_premix")
    ]
    finds.missing = dict.fromkeys(names, reason)
    _projection(finds, graph, module, part)
    finds.candidates.pop("attention_premix", None)
    finds.missing["attention_premix"] = reason
    return finds


def _heads(
    finds: HostFindings, heads: list[TensorCandidate | None], lengths: tuple[int, int], batch: int
) -> None:
    """Queries, keys and values, one head at a time: the sizes they name. ``lengths`` are those of the pattern."""
    query, key = lengths
    finds.sizes |= {"query": query, "key": key}
    for name, spot, length, count, width in zip(
        HEADS,
        heads,
        (query, key, key),
        ("num_heads", "num_kv_heads", "num_kv_heads"),
        ("qk_head_dim", "qk_head_dim", "head_dim"),
    ):
        shape = None if spot is None else _by_head(tuple(spot.tensor.shape), length, batch)
        if shape is None:
            finds.missing[name] = not_traced("no call takes or returns it one head at a time")
        else:
            finds.candidates[name] = spot
            finds.sizes = {count: shape[0], width: shape[1], **finds.sizes}


def _by_head(shape: tuple[int, ...], length: int, batch: int) -> tuple[int, int] | None:
    """How many heads and how wide, where a tensor has an axis of tokens and one of heads, or the heads beside the batch."""
    if len(shape) == 4 and shape[0] == batch:
        if shape[2] == length:
            return shape[1], shape[3]
        return (
            (shape[2], shape[3])
            if shape[1] == length
            else (shape[1], shape[2])
            if shape[3] == length
            else None
        )
    if len(shape) == 3 and shape[0] % batch == 0 and shape[0] > batch and length in shape[1:]:
        return shape[0] // batch, shape[2] if shape[1] == length else shape[1]
    return None


def _in_place(
    graph: TraceGraph, module: Call, softmax: int
) -> tuple[list[TensorCandidate | None], TensorCandidate | None]:
    """Queries, keys, values and the heads' outputs around the products of an attention that calls no function with them."""
    query, key = graph.tensors[graph.ops[softmax].reads[0]].shape[-2:]
    product, mixing = _product(graph, module, softmax), _mixing(graph, module, softmax)[0]
    pattern = _kept(graph, graph.ops[softmax].makes[0])
    values = next(k for k in graph.ops[mixing].reads if k not in pattern)
    batch = next(tensors((module.args, module.kwargs))).shape[0]
    inside = [c for c in graph.inside(module) if c.fn is not None]
    # A call without a cache does not come to the cache's own.
    lasting = [c for c in inside if not isinstance(getattr(c.fn, "__self__", None), Cache)]
    found = [
        _split(graph, lasting, graph.back(k, at), length, batch, far)
        or _split(graph, inside, graph.back(k, at), length, batch, far)
        for k, at, length, far in (
            (graph.ops[product].reads[-2], product, query, False),
            (graph.ops[product].reads[-1], product, key, True),
            (values, mixing, key, True),
        )
    ]
    onward = sorted(graph.onward(graph.ops[mixing].makes[0]), key=lambda k: graph.maker(k))
    return found, _split(graph, inside, onward, query, batch, False)


def _split(
    graph: TraceGraph, inside: list[Call], chain: list[int], length: int, batch: int, far: bool
) -> TensorCandidate | None:
    """Of the tensors in ``chain`` one with an axis of heads and one of tokens, where a call takes or returns it.

    The first of them, or the last: what keys and values were before they were repeated.
    """
    found = None
    for key in chain:
        if _by_head(tuple(graph.tensors[key].shape), length, batch) is None:
            continue
        for call in inside:
            if (spot := result(call, {key}) or argument(call, {key})) is not None:
                if not far:
                    return spot
                found = spot
                break
    return found


def _pattern(
    finds: HostFindings, graph: TraceGraph, call: Call, softmax: list[int], start: int
) -> None:
    """The softmax is the operation; scores are what the innermost call around it takes, and the
    probabilities are what the product with the values takes."""
    names = ("attention_scores", "attention_probabilities")
    if not softmax:
        reason = needs_setting(NO_PATTERN.format(name=call.name.removesuffix("_attention_forward")))
        finds.missing.update(dict.fromkeys(names, reason))
        return
    inside, index = graph.inside(call), softmax[-1]
    entering, at, sinks = _before_sinks(graph, index, finds.sizes["key"])
    chain = graph.back(entering, at)
    scores = next(
        (s for c in innermost(inside, at) if (s := argument(c, chain))), None
    ) or maker_candidate(inside, entering)
    leaving = _kept(graph, graph.ops[index].makes[0])
    products = [
        i
        for name in _PRODUCTS
        for i in graph.indices(call, name)
        if leaving & set(graph.ops[i].reads)
    ]
    weights = next(
        (
            s
            for i in products
            for c in innermost(inside, i)
            if (
                s := argument(c, graph.back(next(k for k in graph.ops[i].reads if k in leaving), i))
            )
        ),
        None,
    )
    for name, spot in zip(names, (scores, weights)):
        if spot is None:
            finds.missing[name] = not_traced(
                "the modeling code passes this tensor to no call of its own"
            )
        else:
            finds.candidates[name] = spot
    finds.note(**_score_traits(graph, call, index, start))
    if sinks is None:
        finds.missing["attention_sinks"] = not_present("this attention has no sink logits")
    elif (
        spot := next(
            (
                s
                for k in reversed(graph.back(sinks, at))
                if (s := maker_candidate([c for c in inside if c.fn], k))
            ),
            None,
        )
    ) is not None:
        finds.candidates["attention_sinks"] = spot
    else:
        finds.missing["attention_sinks"] = not_traced(
            "its softmax has a column that is no key's, and no call returns what stands in it"
        )


def _before_sinks(graph: TraceGraph, softmax: int, keys: int) -> tuple[int, int, int | None]:
    """The scores of the keys alone and the operation that takes them; the sinks beside them, where the softmax has such a column."""
    entering, at = _unshifted(graph, graph.ops[softmax].reads[0], softmax)
    if graph.tensors[entering].shape[-1] != keys + 1:
        return entering, at, None
    key, before = entering, softmax
    while (index := graph.maker(key, before)) is not None and graph.ops[index].name in PASSING | {
        "sub",
        "cat",
    }:
        if graph.ops[index].name == "cat":
            scores, sinks = graph.ops[index].reads[:2]
            return scores, index, sinks
        key, before = graph.ops[index].reads[0], index
    return entering, at, None


def _unshifted(graph: TraceGraph, key: int, before: int) -> tuple[int, int]:
    """The scores before the largest of each row is taken off them, which changes no softmax."""
    chain = graph.back(key, before)
    index = graph.maker(chain[-1], before)
    if (
        index is not None
        and graph.ops[index].name == "sub"
        and len(graph.ops[index].reads) == 2
        and graph.tensors[graph.ops[index].reads[1]].shape[-1] == 1
    ):
        return graph.ops[index].reads[0], index
    return key, before


def _score_traits(graph: TraceGraph, call: Call, softmax: int, start: int) -> dict:
    """What happens to the product on its way into the softmax: the cap, where a tanh is on it, whether the
    positions add a bias, and whether it is the sum of several products or has a bias that the text decides."""
    todo, seen = [(graph.ops[softmax].reads[0], softmax)], set()
    while todo:
        key, before = todo.pop()
        index = graph.maker(key, before)
        if (
            index is None
            or index < call.start
            or index in seen
            or graph.ops[index].name not in _BETWEEN
        ):
            continue
        seen.add(index)
        todo += [(k, index) for k in graph.ops[index].reads]
    capped = max((i for i in seen if graph.ops[i].name == "tanh"), default=None)
    cap = None
    if capped is not None:
        scaled = [
            i
            for i in graph.readers.get(graph.ops[capped].makes[0], ())
            if graph.ops[i].name in ("mul", "mul_")
        ]
        cap = next((number for i in scaled for number in graph.ops[i].numbers), 1.0)
    adds = [i for i in seen if graph.ops[i].name in ("add", "add_", "baddbmm")]
    both = any(
        len(graph.ops[i].reads) == 2
        and all(_made_of_product(graph, key, i) for key in graph.ops[i].reads)
        for i in adds
    )
    biased = [i for i in adds if _heads_differ(graph, i)]
    # A bias made in the attention is made of what the text says, not of its positions alone.
    own = any(
        _made_after(graph, key, i, start) and not _made_of_product(graph, key, i)
        for i in adds
        for key in (
            graph.ops[i].reads[:1] if graph.ops[i].name == "baddbmm" else graph.ops[i].reads
        )
    )
    return {"score_cap": cap, "position_bias": bool(biased), "summed_scores": both or own}


def _made_after(graph: TraceGraph, key: int, before: int, start: int) -> bool:
    """Whether a tensor, whatever it is a view of, was made after an operation."""
    chain = graph.back(key, before)
    index = graph.maker(chain[-1], before)
    return (
        index is not None
        and index >= start
        and graph.ops[index].name not in ("zeros", "empty", "full", "new_zeros")
    )


def _heads_differ(graph: TraceGraph, add: int) -> bool:
    """Whether something is added to the scores that has an axis of heads, which a mask has not."""
    out = graph.tensors[graph.ops[add].makes[0]]
    if graph.ops[add].name == "baddbmm":
        return graph.tensors[graph.ops[add].reads[0]].dim() == 3
    return any(
        tensor.dim() >= 3
        and out.dim() == 4
        and tensor.shape[-3] == out.shape[1] > 1
        and not _made_of_product(graph, key, add)
        for key in graph.ops[add].reads
        if (tensor := graph.tensors[key]) is not None
    )


def _made_of_product(graph: TraceGraph, key: int, before: int) -> bool:
    todo, seen = [(key, before)], set()
    while todo:
        key, before = todo.pop()
        index = graph.maker(key, before)
        if index is None or index in seen:
            continue
        seen.add(index)
        if graph.ops[index].name in _PRODUCTS:
            return True
        if graph.ops[index].name in _BETWEEN | {"gather", "index", "index_select", "sum"}:
            todo += [(k, index) for k in graph.ops[index].reads]
    return False


def _gate(finds: HostFindings, graph: TraceGraph, module: Call) -> None:
    """What the heads' outputs are multiplied with on their way to the projection: number by number, or head by head."""
    mixed = finds.candidates.get("attention_head_outputs")
    names = ("head_gate", "head_scale")
    if mixed is None:
        finds.missing |= dict.fromkeys(names, not_traced("the heads' outputs are not followed"))
        return
    onward = graph.onward(id(mixed.tensor))
    after = [
        i
        for i in graph.indices(module, "mul")
        if i >= mixed.call.stop
        and onward & set(graph.ops[i].reads)
        and not is_norm(graph, graph.owners[i])
    ]
    gate = next((key for i in after[:1] for key in graph.ops[i].reads if key not in onward), None)
    finds.missing |= dict.fromkeys(names, not_present("this attention does not gate its heads"))
    if gate is None:
        return
    whole = graph.tensors[gate].numel() < mixed.tensor.numel()
    own = [c for c in graph.inside(module) if c.module == module.module and c.labels]
    spot = maker_candidate([c for c in own if len(c.labels) == 1], gate) or maker_candidate(
        own, gate
    )
    if spot is None:
        finds.missing[names[whole]] = not_traced(
            "the gate is no result of a call in the attention's forward"
        )
    else:
        finds.candidates[names[whole]] = spot
        finds.missing[names[not whole]] = not_present(
            f"this attention gates its heads {'as a whole' if whole else 'number by number'}"
        )
        del finds.missing[names[whole]]


def _leads_to(graph: TraceGraph, mixed: TensorCandidate, product: int) -> bool:
    """Whether the heads' outputs go into what a module multiplies with its weights."""
    made, owner = graph.maker(id(mixed.tensor)), graph.owners[product]
    return made is not None and owner is not None and product > made and leads(graph, made, owner)


def _sorted(graph: TraceGraph, owner: Call, mixed: TensorCandidate) -> bool:
    """Whether a module takes the heads' outputs themselves, in another order of its rows."""
    given = next(iter(owner.args), None)
    if not isinstance(given, torch.Tensor):
        return False
    index = graph.maker(graph.back(id(given), owner.start)[-1], owner.start)
    return (
        index is not None
        and graph.ops[index].name == "index"
        and graph.tensors[graph.ops[index].reads[0]].numel() == given.numel()
        and id(mixed.tensor) in graph.back(graph.ops[index].reads[0], index)
    )


def _projection(finds: HostFindings, graph: TraceGraph, module: Call, part: Part) -> None:
    """The output projection is the first module after the heads' outputs that multiplies with weights; its input is the premix."""
    mixed = finds.candidates.get("attention_head_outputs")
    products = weighted(graph, part)
    after = products if mixed is None else [i for i in products if _leads_to(graph, mixed, i)]
    owner = graph.owners[after[0 if mixed is not None else -1]] if after else None
    if owner is not None and mixed is not None and _sorted(graph, owner, mixed):
        finds.candidates["attention_premix"] = mixed
    elif (
        owner is not None
        and owner.module != module.module
        and any(isinstance(a, torch.Tensor) for a in owner.args[:1])
    ):
        finds.candidates["attention_premix"] = TensorCandidate(owner.args[0], owner, "input", 0)
        if len(after) == 1 or mixed is None:
            finds.note(output_projection=owner.module)
        finds.note(
            output_norms=()
            if mixed is None
            else tuple(
                c.module
                for c in children(graph, module)
                if mixed.call.ended < c.began
                and c.ended < owner.began
                and is_norm(graph, c)
                and c.start in part.ops
            )
        )
    else:
        finds.missing["attention_premix"] = not_traced("no module makes the attention's output")
