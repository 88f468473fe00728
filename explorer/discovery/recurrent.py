"""Finding the values of a recurrent mixer: a module whose kernel hands a state on."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    argument,
    around,
    bound,
    maker_candidate,
    result,
)
from explorer.discovery.fixed_decay import fading, find_fading, outputs
from explorer.discovery.residual import CannotTrace, Part, weighted
from explorer.discovery.trace_graph import PASSING, Call, TraceGraph, tensors
from explorer.vocabulary import BY_HOST, MIXERS, resolve
from explorer.vocabulary.availability import not_present, not_traced
from explorer.vocabulary.mixer_kinds import LINEAR_ATTN

#: What the delta rule's kernels call their arguments, by value.
_DELTA = dict(zip(LINEAR_ATTN.replayed, LINEAR_ATTN.kernel.takes, strict=True))


@dataclass(frozen=True)
class Kernel:
    """The call of a recurrence, and the host whose values it takes and returns."""

    host: str
    call: Call


def kernel(graph: TraceGraph, module: Call) -> Kernel | None:
    """The outermost call in a module that takes what a recurrence is run with.

    Raises CannotFollow where there are several.
    """
    found = [
        Kernel(host, call)
        for call in graph.inside(module)
        if call.fn is not None and (host := _host(call)) is not None
    ]
    if not found:
        step = fading(graph, module)
        call = None if step is None else outputs(graph, module, step)
        return None if call is None else Kernel("retention", call)
    depth = min((one.call.module.count("."), len(one.call.labels)) for one in found)
    outer = [one for one in found if (one.call.module.count("."), len(one.call.labels)) == depth]
    if len(outer) > 1:
        raise CannotTrace(
            f"{module.module} runs its recurrence in several calls, of which none is the whole"
        )
    return outer[0]


def _host(call: Call) -> str | None:
    """The host of a recurrence's kernel, told by what it takes."""
    if not (inspect.isfunction(call.fn) or inspect.ismethod(call.fn)):
        return None
    names = set(inspect.signature(inspect.unwrap(call.fn)).parameters)
    kinds = [
        kind for kind in MIXERS.values() if kind.kernel and names.issuperset(kind.kernel.takes)
    ]
    for kind in sorted(kinds, key=lambda kind: kind.kernel.dims is None):
        if kind.kernel.dims is None:
            return kind.host
        argument, dims = kind.kernel.dims
        if bound(call, argument).tensor.dim() == dims:
            return kind.host
    return None


def find_recurrent(graph: TraceGraph, module: Call, part: Part) -> HostFindings:
    """Spots of one recurrent mixer that ran once."""
    finds = HostFindings(module.module)
    found = kernel(graph, module)
    resolve(MIXERS[found.host].kernel_values)(finds, graph, module, found.call)
    finds.candidates = {name: spot for name, spot in finds.candidates.items() if spot is not None}
    finds.note(**around(graph, module, found.call))
    if MIXERS[found.host].kernel is not None:
        finds.note(kernel=found.call.name)
    if (owner := graph.owners[weighted(graph, part)[-1]]) is not None:
        finds.note(output_projection=owner.module)
    if "conv_input" in BY_HOST[found.host]:
        _convolution(finds, graph, module)
    return finds


def find_delta_rule(finds: HostFindings, graph: TraceGraph, module: Call, call: Call) -> None:
    """The gated delta rule, with a decay per head or per channel."""
    candidates = {name: bound(call, argument) for name, argument in _DELTA.items()}
    values = candidates["attention_values"].tensor
    heads = values.shape[2]
    finds.sizes = {
        "heads": heads,
        "key_heads": candidates["attention_queries"].tensor.shape[2],
        "key_dim": candidates["attention_queries"].tensor.shape[3],
        "value_dim": values.shape[3],
    }
    for name in ("attention_queries", "attention_keys"):
        if candidates[name].tensor.shape[2] != heads:
            if _repeats(graph, call, candidates[name], heads):
                candidates[name] = replace(
                    candidates[name], repeat=("heads", heads // candidates[name].tensor.shape[2])
                )
    finds.candidates = {
        **candidates,
        "attention_head_outputs": TensorCandidate(call.output[0], call, "output", 0),
        "state_output": TensorCandidate(call.output[1], call, "output", 1),
    }


def find_ssd(finds: HostFindings, graph: TraceGraph, module: Call, call: Call) -> None:
    """Mamba-2: one decay per head. A decoding step's kernel takes one token, without an axis for it."""
    values, keys, step = bound(call, "hidden_states"), bound(call, "B"), _has(call, "state")
    *_, heads, width = values.tensor.shape
    groups, size = keys.tensor.shape[-2:]
    finds.sizes = {"heads": heads, "key_heads": groups, "key_dim": size, "value_dim": width}
    repeat = ("heads", heads // groups) if groups != heads else None
    narrow, state = ("batch", "seq", "heads", "key_dim"), ("batch", "heads", "value_dim", "key_dim")
    finds.candidates = {
        "attention_values": replace(values, axes=("batch", "seq", "heads", "value_dim")),
        "attention_queries": replace(bound(call, "C"), axes=narrow, repeat=repeat),
        "attention_keys": replace(keys, axes=narrow, repeat=repeat),
        "skip": bound(call, "D"),
        "state_input": _with(
            bound(call, "state" if step else "initial_states"), axes=state, written_over=step
        ),
    }
    _results(finds, graph, call, step, state)
    _steps(finds, graph, call)
    _ungated(finds, graph, call)
    finds.candidates.pop("head_gate", None)  # which most have outside the kernel, in a norm
    if finds.candidates["skip"] is None:
        finds.missing["skip"] = not_present("this mixer sends nothing past its state")


def find_selective_scan(finds: HostFindings, graph: TraceGraph, module: Call, call: Call) -> None:
    """Mamba: a state per channel."""
    values, keys, step = bound(call, "hidden_states"), bound(call, "B"), _has(call, "state")
    finds.sizes = {"channels": values.tensor.shape[1], "key_dim": keys.tensor.shape[1]}
    by_channel, shared = ("batch", "channels", "seq"), ("batch", "key_dim", "seq")
    finds.candidates = {
        "attention_values": replace(values, axes=by_channel),
        "attention_queries": replace(bound(call, "C"), axes=shared),
        "attention_keys": replace(keys, axes=shared),
        "skip": bound(call, "D"),
        # The kernel of several tokens takes no state: what is looked for there is None.
        "state_input": _with(bound(call, "state"), written_over=True)
        if step
        else TensorCandidate(None, call, "input", "initial_states"),
    }
    _results(finds, graph, call, step, ("batch", "channels", "key_dim"))
    _steps(finds, graph, call)
    if finds.candidates["skip"] is None:
        finds.missing["skip"] = not_present("this mixer sends nothing past its state")
    finds.missing["head_gate"] = not_present("this mixer does not gate its channels in its kernel")
    _ungated(finds, graph, call)


def find_gated_recurrence(finds: HostFindings, graph: TraceGraph, module: Call, call: Call) -> None:
    """A gated linear recurrence: one number of state per channel."""
    values, gate = bound(call, "hidden_states"), bound(call, "recurrent_gate")
    finds.sizes = {"channels": values.tensor.shape[-1]}
    inside = [c for c in graph.inside(call) if c.fn is not None]
    reset = next(
        (i for i in graph.indices(call, "mul") if id(gate.tensor) in graph.ops[i].reads), None
    )
    finds.candidates = {
        "attention_values": values,
        "recurrent_gate": gate
        if reset is None
        else maker_candidate(inside, graph.ops[reset].makes[0]),
        "state_input": bound(call, "recurrent_states"),
        "attention_head_outputs": TensorCandidate(call.output[0], call, "output", 0),
        "state_output": TensorCandidate(call.output[1], call, "output", 1),
    }


def find_fixed_decay(finds: HostFindings, graph: TraceGraph, module: Call, call: Call) -> None:
    find_fading(finds, graph, module)


def _has(call: Call, name: str) -> bool:
    return name in inspect.signature(inspect.unwrap(call.fn)).parameters


def _with(spot: TensorCandidate | None, **changes: object) -> TensorCandidate | None:
    return None if spot is None else replace(spot, **changes)


def _results(
    finds: HostFindings, graph: TraceGraph, call: Call, step: bool, state: tuple[str, ...]
) -> None:
    """What a state-space kernel returns; on a decoding step it writes the new state over the old one."""
    if step:
        old = bound(call, "state").tensor
        finds.candidates["attention_head_outputs"] = TensorCandidate(
            call.output, call, "output", None
        )
        finds.candidates["state_output"] = _with(
            maker_candidate([c for c in graph.inside(call) if c.fn is not None], id(old)),
            axes=state,
        )
    else:
        returned = list(tensors(call.output))
        finds.candidates["attention_head_outputs"] = TensorCandidate(
            returned[0], call, "output", 0 if len(returned) > 1 else None
        )
        if len(returned) > 1:
            finds.candidates["state_output"] = TensorCandidate(
                returned[1], call, "output", 1, axes=state
            )
    outputs = finds.candidates["attention_head_outputs"]
    finds.candidates["attention_head_outputs"] = replace(
        outputs, axes=finds.candidates["attention_values"].axes
    )


def _steps(finds: HostFindings, graph: TraceGraph, call: Call) -> None:
    """The step and the decay of each token, made in the kernel: the decay is the step times A, the step what that is made of."""
    rate = bound(call, "A").tensor
    inside = [c for c in graph.inside(call) if c.fn is not None]
    for index in graph.indices(call, "mul"):
        reads = graph.ops[index].reads
        if len(reads) == 2 and any(id(rate) in graph.back(key, index) for key in reads):
            other = next(key for key in reads if id(rate) not in graph.back(key, index))
            made = [
                spot
                for key in graph.back(other, index)
                if (spot := maker_candidate(inside, key)) is not None
            ]
            finds.candidates["betas"] = made[-1] if made else None
            finds.candidates["decays"] = maker_candidate(inside, graph.ops[index].makes[0])
            return


def _ungated(finds: HostFindings, graph: TraceGraph, call: Call) -> None:
    """Where the kernel multiplies its result with a gate of its argument z: the result before that, and the gate."""
    gate = bound(call, "z") if _has(call, "z") else None
    if gate is None or gate.tensor is None:
        return
    outputs = finds.candidates["attention_head_outputs"]
    inside = [c for c in graph.inside(call) if c.fn is not None]
    index = graph.maker(graph.back(id(outputs.tensor))[-1])
    if index is None or graph.ops[index].name != "mul":
        return
    made = {
        name: maker_candidate(inside, key)
        for key in graph.ops[index].reads
        for name in (
            "head_gate"
            if _comes_of(graph, key, id(gate.tensor), index)
            else "attention_head_outputs",
        )
    }
    for name, spot in made.items():
        finds.candidates[name] = _with(spot, axes=outputs.axes)
    finds.missing.pop("head_gate", None)


def _comes_of(graph: TraceGraph, key: int, source: int, before: int) -> bool:
    """Whether a tensor is made of another by operations on one tensor alone."""
    while key != source:
        index = graph.maker(key, before)
        if index is None or len(graph.ops[index].reads) != 1:
            return False
        key, before = graph.ops[index].reads[0], index
    return True


def _repeats(graph: TraceGraph, call: Call, spot: TensorCandidate, heads: int) -> bool:
    """Whether the kernel repeats this argument's key heads to the value heads itself.

    It then takes an argument that has been repeated already just as well, so the
    value is served, and written, one per value head, at the kernel's own call.
    """
    return any(
        isinstance(inner.output, torch.Tensor)
        and inner.output.dim() == 4
        and inner.output.shape[2] == heads
        and (
            getattr(inner.fn, "__self__", None) is spot.tensor
            or any(a is spot.tensor for a in inner.args)
        )
        for inner in graph.inside(call)
    )


def gates_a_convolution(graph: TraceGraph, module: Call, part: Part) -> bool:
    """Whether a part is a convolution between two projections, and products beside it: nothing that hands a state on."""
    found = _convolutions(graph, module, part)
    usual = PASSING | frozenset(
        [
            "mul",
            "silu",
            "cat",
            "constant_pad_nd",
            "split",
            "chunk",
            "convolution",
            "mm",
            "addmm",
            "bmm",
            "matmul",
            "linear",
            "add",
            "zeros",
            "copy_",
            "roll",
        ]
    )
    return len(found) == 1 and all(
        graph.ops[i].name in usual for i in part.ops if module.start <= i < module.stop
    )


def _convolutions(graph: TraceGraph, module: Call, part: Part) -> list[int]:
    return [i for i in graph.indices(module, "convolution") if i in part.ops]


def find_convolution(graph: TraceGraph, module: Call, part: Part) -> HostFindings:
    """Spots of a mixer that is a short convolution and nothing else."""
    finds = HostFindings(module.module)
    index = _convolutions(graph, module, part)[0]
    _convolution(finds, graph, module)
    onward = _trimmed(graph, graph.ops[index].makes[0])
    gates = [
        i for i in graph.indices(module, "mul") if i > index and onward & set(graph.ops[i].reads)
    ]
    inside = [
        c
        for c in graph.inside(module)
        if c.fn is not None and c.module == module.module and len(c.labels) == 1
    ]
    if not gates:
        finds.missing["conv_gate"] = not_present("this mixer does not gate its convolution")
        out = next((key for key in onward if maker_candidate(inside, key) is not None), None)
    else:
        out = next(key for key in graph.ops[gates[0]].reads if key in onward)
        gate = next(key for key in graph.ops[gates[0]].reads if key not in onward)
        # As an operand first: a prompt and a decoding step make it by other calls, and multiply by the same.
        spot = _operand(inside, gates[0], gate) or maker_candidate(inside, gate)
        finds.candidates |= {"conv_gate": spot} if spot is not None else {}
        finds.missing |= (
            {"conv_gate": not_traced("the gate is no result of a call in the mixer's forward")}
            if spot is None
            else {}
        )
    spot = (_operand(inside, gates[0], out) if gates else None) or maker_candidate(inside, out)
    if spot is not None:
        finds.candidates["conv_output"] = spot
    else:
        finds.missing["conv_output"] = not_traced(
            "what the convolution hands on is no result of a call in the mixer's forward"
        )
    finds.note(output_projection=graph.owners[weighted(graph, part)[-1]].module)
    return finds


def _operand(inside: Iterable[Call], index: int, key: int) -> TensorCandidate | None:
    """A tensor as the operand of the call that runs an operation."""
    return next(
        (
            spot
            for call in inside
            if call.start <= index < call.stop and (spot := argument(call, {key})) is not None
        ),
        None,
    )


def _trimmed(graph: TraceGraph, key: int) -> set[int]:
    """A convolution's result and what activation, views and cuts make of it."""
    found, todo = set(), [key]
    while todo:
        for new in graph.onward(todo.pop()) - found:
            found.add(new)
            todo += [
                made
                for i in graph.readers.get(new, ())
                if graph.ops[i].name in ("silu", "constant_pad_nd", "split", "narrow", "index")
                for made in graph.ops[i].makes
            ]
    return found


def _convolution(finds: HostFindings, graph: TraceGraph, module: Call) -> None:
    """The convolution's input before any cached history is put in front of it.

    Walks back from the convolution; of the tensors with the right axes, the
    earliest is before the cache on a prompt and on a decoding step alike.
    """
    found = graph.indices(module, "convolution")
    if not found:
        has = any(isinstance(inner, torch.nn.Conv1d) for inner in module.fn.modules())
        finds.missing["conv_input"] = (
            not_traced("its short convolution does not run as one operation")
            if has
            else not_present("this mixer has no short convolution")
        )
        return
    index = found[0]
    weight = next(key for key in graph.back(graph.ops[index].reads[1], index))
    kernel_weight = graph.tensors[weight]
    sizes = {"channels": kernel_weight.shape[0], "conv_width": kernel_weight.shape[-1]}
    if finds.sizes.get("channels", sizes["channels"]) != sizes["channels"]:
        finds.missing["conv_input"] = not_traced(
            "its convolution is over other channels than its values"
        )
        return
    finds.sizes |= sizes
    batch, seq = next(tensors((module.args, module.kwargs))).shape[:2]
    wanted = {(batch, kernel_weight.shape[0], seq), (batch, seq, kernel_weight.shape[0])}
    own = [c for c in graph.inside(module) if c.module == module.module and len(c.labels) == 1]
    key, before = graph.ops[index].reads[0], index
    while key is not None:
        if tuple(graph.tensors[key].shape) in wanted:
            made = [
                spot
                for call in own
                if call.stop <= index and (spot := result(call, {key})) is not None
            ]
            if made:
                finds.candidates["conv_input"] = min(made, key=lambda spot: spot.when)
        elif "conv_input" in finds.candidates:
            break
        key, before = _joined(graph, key, before)
    if "conv_input" not in finds.candidates:
        finds.missing["conv_input"] = not_traced(
            "what the convolution reads is no result of a call in the mixer's forward"
        )


def _joined(graph: TraceGraph, key: int, before: int) -> tuple[int | None, int]:
    """One step back towards the input: through copies and views, padding, and joining with a history."""
    index = graph.maker(key, before)
    if index is None or graph.ops[index].name not in PASSING | {"cat", "constant_pad_nd"}:
        return None, before
    # Of a history and what follows it, the newcomer is joined last.
    return graph.ops[index].reads[-1], index
