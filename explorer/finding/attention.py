"""Finding the values of a softmax attention module."""

from __future__ import annotations

import torch

from explorer.finding.flow import Call, Flow
from explorer.finding.spots import Finds, Spot, argument, around, innermost, maker_spot, result

NO_PATTERN = (
    "the {name} attention never holds the pattern as a tensor; load the model with attn_implementation=\"eager\""
)


def interface(flow: Flow, module: Call) -> Call | None:
    """The call that takes queries, keys and values: in the module's own forward, with three
    four-dimensional tensors and the module itself."""
    found = interfaces(flow, module)
    return found[0] if found else None


def interfaces(flow: Flow, module: Call) -> list[Call]:
    """Every such call of a module's forward."""
    return [
        call for call in flow.inside(module)
        if call.module == module.module and len(call.labels) == 1 and call.fn is not None
        and any(a is module.fn for a in call.args)
        and sum(isinstance(a, torch.Tensor) and a.dim() == 4 for a in call.args) >= 3
    ]


def find_attention(flow: Flow, module: Call, addend: int) -> Finds:
    """Spots of one attention module that ran once. ``addend`` is the tensor it adds to the stream."""
    finds = Finds(module.module)
    call = interface(flow, module)
    if call is None:
        reason = "this attention does not call a function with its queries, keys and values"
        finds.missing = {name: reason for name in ("attention_queries", "attention_keys", "attention_values",
                         "attention_scores", "attention_probabilities", "attention_head_outputs")}
    else:
        _arguments(finds, call)
        _pattern(finds, flow, call)
        _heads(finds, flow, module, call)
        finds.traits |= around(flow, module, call)
    _projection(finds, flow, module, addend)
    scores = finds.spots.get("attention_scores")
    if scores is not None and scores.tensor.shape[-1] > finds.sizes["key"]:
        finds.missing["attention_sinks"] = "its softmax has more columns than there are keys, and where they come from is not followed"
    finds.missing.setdefault("attention_sinks", "this attention has no sink logits")
    return finds


def _arguments(finds: Finds, call: Call) -> None:
    heads = [(i, a) for i, a in enumerate(call.args) if isinstance(a, torch.Tensor) and a.dim() == 4][:3]
    for name, (position, tensor) in zip(("attention_queries", "attention_keys", "attention_values"), heads):
        finds.spots[name] = Spot(tensor, call, "input", position)
    queries, keys, values = (tensor for _, tensor in heads)
    finds.sizes = {
        "num_heads": queries.shape[1],
        "num_kv_heads": keys.shape[1],
        "qk_head_dim": queries.shape[3],
        "head_dim": values.shape[3],
        "query": queries.shape[2],
        "key": keys.shape[2],
    }


def _pattern(finds: Finds, flow: Flow, call: Call) -> None:
    """The softmax is the operation; scores are what the innermost call around it takes, and the
    probabilities are what the product with the values takes."""
    softmax = [i for name in ("_softmax", "softmax") for i in flow.indices(call, name)]
    names = ("attention_scores", "attention_probabilities")
    if not softmax:
        reason = NO_PATTERN.format(name=call.name.removesuffix("_attention_forward"))
        finds.missing.update(dict.fromkeys(names, reason))
        return
    inside, index = flow.inside(call), softmax[-1]
    entering = flow.back(flow.ops[index].reads[0], index)
    leaving = flow.onward(flow.ops[index].makes[0])
    scores = next((s for c in innermost(inside, index) if (s := argument(c, entering))), None)
    products = [i for name in ("bmm", "matmul", "mm") for i in flow.indices(call, name)
                if leaving & set(flow.ops[i].reads)]
    weights = next((s for i in products for c in innermost(inside, i) if (s := argument(c, leaving))), None)
    for name, spot in zip(names, (scores, weights)):
        if spot is None:
            finds.missing[name] = "the modeling code passes this tensor to no call of its own"
        else:
            finds.spots[name] = spot


def _heads(finds: Finds, flow: Flow, module: Call, call: Call) -> None:
    """What the interface returns per head, and the gate it is multiplied with on its way out."""
    returned = call.output[0] if isinstance(call.output, (tuple, list)) else call.output
    finds.spots["attention_head_outputs"] = result(call, {id(returned)})
    onward = flow.onward(id(returned))
    after = [i for i in flow.indices(module, "mul") if i >= call.stop and onward & set(flow.ops[i].reads)]
    if not after:
        finds.missing["head_gate"] = "this attention does not gate its heads"
        return
    gate = next(key for key in flow.ops[after[0]].reads if key not in onward)
    own = [c for c in flow.inside(module) if c.module == module.module and len(c.labels) == 1]
    spot = maker_spot(own, gate)
    if spot is None:
        finds.missing["head_gate"] = "the gate is no result of a call in the attention's forward"
    else:
        finds.spots["head_gate"] = spot


def _projection(finds: Finds, flow: Flow, module: Call, addend: int) -> None:
    """The output projection is the module that makes the addend; its input is the premix."""
    chain = flow.back(addend)
    for call in flow.inside(module):
        if not call.labels and result(call, chain) is not None:
            finds.spots["attention_premix"] = Spot(call.args[0], call, "input", 0)
            finds.traits["projection"] = call.module
            return
    finds.missing["attention_premix"] = "no module makes the attention's output"
