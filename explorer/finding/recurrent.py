"""Finding the values of a recurrent mixer: a module whose kernel hands a state on."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

import torch

from explorer.finding.flow import PASSING, Call, Flow
from explorer.finding.spots import Finds, Spot, around, bound, maker_spot
from explorer.finding.stream import Part
from explorer.vocabulary import REPLAYED

#: What the delta rule's kernels call their arguments, by value.
ARGUMENTS = dict(zip(REPLAYED, ("query", "key", "value", "g", "beta", "initial_state"), strict=True))


@dataclass(frozen=True)
class Kernel:
    """The call of a recurrence, and the host whose values it takes and returns."""

    host: str
    call: Call


def kernel(flow: Flow, module: Call) -> Kernel | None:
    """The call in the module's own forward that takes decays and write strengths and returns
    read-outs and a state."""
    for call in flow.inside(module):
        if call.module == module.module and len(call.labels) == 1 and inspect.isfunction(call.fn):
            names = inspect.signature(inspect.unwrap(call.fn)).parameters
            if set(ARGUMENTS.values()) <= set(names):
                return Kernel("linear_attn", call)
    return None


def find_recurrent(flow: Flow, module: Call, part: Part) -> Finds:
    """Spots of one gated-delta-rule mixer that ran once."""
    finds = Finds(module.module)
    call = kernel(flow, module).call
    spots = {name: bound(call, argument) for name, argument in ARGUMENTS.items()}
    values = spots["attention_values"].tensor
    heads = values.shape[2]
    finds.sizes = {
        "heads": heads,
        "key_heads": spots["attention_queries"].tensor.shape[2],
        "key_dim": spots["attention_queries"].tensor.shape[3],
        "value_dim": values.shape[3],
    }
    for name in ("attention_queries", "attention_keys"):
        if spots[name].tensor.shape[2] != heads:
            if _repeats(flow, call, spots[name], heads):
                spots[name] = replace(spots[name], repeat=("heads", heads // spots[name].tensor.shape[2]))
    finds.spots = {name: spot for name, spot in spots.items() if spot is not None}
    finds.spots["attention_head_outputs"] = Spot(call.output[0], call, "output", 0)
    finds.spots["state_output"] = Spot(call.output[1], call, "output", 1)
    finds.traits |= {"kernel": call.name, **around(flow, module, call)}
    _convolution(finds, flow, module)
    return finds


def _repeats(flow: Flow, call: Call, spot: Spot, heads: int) -> bool:
    """Whether the kernel repeats this argument's key heads to the value heads itself.

    It then takes an argument that has been repeated already just as well, so the
    value is served, and written, one per value head, at the kernel's own call.
    """
    return any(
        isinstance(inner.output, torch.Tensor)
        and inner.output.dim() == 4
        and inner.output.shape[2] == heads
        and (getattr(inner.fn, "__self__", None) is spot.tensor or any(a is spot.tensor for a in inner.args))
        for inner in flow.inside(call)
    )


def _convolution(finds: Finds, flow: Flow, module: Call) -> None:
    """The convolution's input before any cached history is put in front of it.

    Walks back from the convolution; of the tensors with the right axes, the
    earliest is before the cache on a prompt and on a decoding step alike.
    """
    convolutions = flow.indices(module, "convolution")
    if not convolutions:
        finds.missing["conv_input"] = "this mixer has no short convolution"
        return
    index = convolutions[0]
    weight = flow.tensors[flow.ops[index].reads[1]]
    finds.sizes |= {"channels": weight.shape[0], "conv_width": weight.shape[-1]}
    batch, seq = finds.spots["attention_values"].tensor.shape[:2]
    wanted = {(batch, weight.shape[0], seq), (batch, seq, weight.shape[0])}
    own = [c for c in flow.inside(module) if c.module == module.module and len(c.labels) == 1]
    key, before = flow.ops[index].reads[0], index
    while key is not None:
        if tuple(flow.tensors[key].shape) in wanted:
            spot = maker_spot(own, key)
            if spot is not None and spot.call.stop <= index:
                finds.spots["conv_input"] = spot
        elif "conv_input" in finds.spots:
            break
        key, before = _joined(flow, key, before)
    if "conv_input" not in finds.spots:
        finds.missing["conv_input"] = "what the convolution reads is no result of a call in the mixer's forward"


def _joined(flow: Flow, key: int, before: int) -> tuple[int | None, int]:
    """One step back towards the input: through copies and views, padding, and joining with a history."""
    index = flow.maker(key, before)
    if index is None or flow.ops[index].name not in PASSING | {"cat", "constant_pad_nd"}:
        return None, before
    # Of a history and what follows it, the newcomer is joined last.
    return flow.ops[index].reads[-1], index
