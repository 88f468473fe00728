"""Find the values of a recurrent mixer, whose kernel carries a state from token to token."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

import torch

from explorer.discovery.addends import Addend, weight_products
from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    functions_inside,
    has_parameter,
    latest_result,
    modules_around,
    named_argument,
)
from explorer.discovery.fixed_decay import find_state_update, head_outputs
from explorer.discovery.residual import CannotTrace
from explorer.discovery.short_convolution import find_convolution_input
from explorer.discovery.trace_graph import Call, TraceGraph, tensors
from explorer.vocabulary import BY_HOST, MIXERS, reasons, resolve
from explorer.vocabulary.mixer_kinds import LINEAR_ATTN

#: The parameters of the delta rule's kernels, by value.
_DELTA = dict(
    zip(LINEAR_ATTN.replayed, LINEAR_ATTN.kernel.takes if LINEAR_ATTN.kernel else (), strict=True)
)


@dataclass(frozen=True)
class Kernel:
    """The call that runs a recurrence, and the host whose values it takes and returns."""

    host: str
    call: Call


def find_kernel(graph: TraceGraph, module: Call) -> Kernel | None:
    """Return the outermost call in a module that takes the operands of a recurrence.

    For a fixed decay, which has no kernel, it is the call that returns the heads' outputs.
    Raises CannotTrace where there are several.
    """
    found = [
        Kernel(host, call)
        for call in functions_inside(graph, module)
        if (host := _host_of_kernel(call)) is not None
    ]
    if not found:
        update = find_state_update(graph, module)
        outputs = None if update is None else head_outputs(graph, module, update)
        return None if outputs is None else Kernel("retention", outputs.call)
    depths = [(one.call.module.count("."), len(one.call.labels)) for one in found]
    outer = [one for one, depth in zip(found, depths, strict=True) if depth == min(depths)]
    if len(outer) > 1:
        raise CannotTrace(f"{module.module} runs its recurrence in several calls")
    return outer[0]


def _host_of_kernel(call: Call) -> str | None:
    """Return the host whose kernel a function is, by the names of its parameters."""
    if not (inspect.isfunction(call.fn) or inspect.ismethod(call.fn)):
        return None
    names = set(inspect.signature(inspect.unwrap(call.fn)).parameters)
    kernels = [
        (host, kind.kernel)
        for host, kind in MIXERS.items()
        if kind.kernel is not None and names.issuperset(kind.kernel.takes)
    ]
    # Kinds that the number of an argument's axes distinguishes come first.
    for host, kernel in sorted(kernels, key=lambda one: one[1].dims is None):
        if kernel.dims is None:
            return host
        parameter, dims = kernel.dims
        if _tensor(call, parameter).dim() == dims:
            return host
    return None


def _given(call: Call, name: str) -> TensorCandidate:
    """Return an argument that a kernel is always called with."""
    candidate = named_argument(call, name)
    if candidate is None:
        raise CannotTrace(f"{call.name} is called without {name}")
    return candidate


def _tensor(call: Call, name: str) -> torch.Tensor:
    """Return the tensor that a kernel is called with by a name."""
    return _given(call, name).tensor


def find_recurrent(graph: TraceGraph, module: Call, addend: Addend) -> HostFindings:
    """Find the values of one recurrent mixer, which adds ``addend`` to the residual stream."""
    kernel = find_kernel(graph, module)
    if kernel is None or (finder := MIXERS[kernel.host].kernel_values) is None:
        raise CannotTrace(f"{module.module} runs no recurrence")
    findings = HostFindings(module.module)
    resolve(finder)(findings, graph, module, kernel.call)
    findings.set_details(**modules_around(graph, module, kernel.call))
    if MIXERS[kernel.host].kernel is not None:
        findings.set_details(kernel=kernel.call.name)
    if (owner := graph.owners[weight_products(graph, addend)[-1]]) is not None:
        findings.set_details(output_projection=owner.module)
    if "conv_input" in BY_HOST[kernel.host]:
        find_convolution_input(findings, graph, module)
    return findings


def _set_candidates(findings: HostFindings, **candidates: TensorCandidate | None) -> None:
    """Set the candidates that are not None."""
    findings.candidates |= {name: one for name, one in candidates.items() if one is not None}


def find_delta_rule(findings: HostFindings, graph: TraceGraph, module: Call, call: Call) -> None:
    """The gated delta rule, with a decay per head or per channel."""
    arguments = {
        name: candidate
        for name, parameter in _DELTA.items()
        if (candidate := named_argument(call, parameter)) is not None
    }
    _, _, heads, value_dim = _tensor(call, "value").shape
    _, _, key_heads, key_dim = _tensor(call, "query").shape
    findings.sizes = {
        "heads": heads,
        "key_heads": key_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
    }
    for name in ("attention_queries", "attention_keys"):
        count = arguments[name].tensor.shape[2]
        if count != heads and _repeats_heads(graph, call, arguments[name].tensor, heads):
            arguments[name] = replace(arguments[name], repeat=("heads", heads // count))
    outputs, state = call.output[:2]
    _set_candidates(
        findings,
        **arguments,
        attention_head_outputs=TensorCandidate(outputs, call, "output", 0),
        state_output=TensorCandidate(state, call, "output", 1),
    )


def _repeats_heads(graph: TraceGraph, call: Call, tensor: torch.Tensor, heads: int) -> bool:
    """Return whether the kernel repeats this argument's key heads to the value heads itself.

    It then accepts an argument that is repeated already, so the value is read and written with an
    entry for each value head.
    """
    return any(
        isinstance(inner.output, torch.Tensor)
        and inner.output.dim() == 4
        and inner.output.shape[2] == heads
        and (getattr(inner.fn, "__self__", None) is tensor or any(a is tensor for a in inner.args))
        for inner in graph.inside(call)
    )


def find_ssd(findings: HostFindings, graph: TraceGraph, module: Call, call: Call) -> None:
    """Mamba-2: one decay per head. A decoding step's kernel takes one token, without its axis."""
    values, keys, step = _given(call, "hidden_states"), _given(call, "B"), _is_step(call)
    heads, width = values.tensor.shape[-2:]
    groups, size = keys.tensor.shape[-2:]
    findings.sizes = {"heads": heads, "key_heads": groups, "key_dim": size, "value_dim": width}
    repeat = ("heads", heads // groups) if groups != heads else None
    by_head, state_axes = ("batch", "seq", "heads"), ("batch", "heads", "value_dim", "key_dim")
    state = named_argument(call, "state" if step else "initial_states")
    _set_candidates(
        findings,
        attention_values=replace(values, axes=(*by_head, "value_dim")),
        attention_queries=replace(_given(call, "C"), axes=(*by_head, "key_dim"), repeat=repeat),
        attention_keys=replace(keys, axes=(*by_head, "key_dim"), repeat=repeat),
        state_input=None if state is None else replace(state, axes=state_axes, written_over=step),
    )
    # Most have their gate outside the kernel, in a norm.
    _find_state_space(findings, graph, call, state_axes)
    findings.candidates.pop("head_gate", None)
    findings.missing.pop("head_gate", None)


def find_selective_scan(
    findings: HostFindings, graph: TraceGraph, module: Call, call: Call
) -> None:
    """Mamba: a state per channel."""
    values, keys, step = _given(call, "hidden_states"), _given(call, "B"), _is_step(call)
    findings.sizes = {"channels": values.tensor.shape[1], "key_dim": keys.tensor.shape[1]}
    by_channel, shared = ("batch", "channels", "seq"), ("batch", "key_dim", "seq")
    if step:
        state = replace(_given(call, "state"), written_over=True)
    else:
        # The kernel of several tokens takes no state: the argument looked up there is None.
        state = TensorCandidate(None, call, "input", "initial_states")
    _set_candidates(
        findings,
        attention_values=replace(values, axes=by_channel),
        attention_queries=replace(_given(call, "C"), axes=shared),
        attention_keys=replace(keys, axes=shared),
        state_input=state,
    )
    findings.missing["head_gate"] = reasons.NO_KERNEL_GATE
    _find_state_space(findings, graph, call, ("batch", "channels", "key_dim"))


def find_gated_recurrence(
    findings: HostFindings, graph: TraceGraph, module: Call, call: Call
) -> None:
    """A gated linear recurrence: one number of state per channel."""
    values, gate = _given(call, "hidden_states"), _given(call, "recurrent_gate")
    findings.sizes = {"channels": values.tensor.shape[-1]}
    # A kernel that resets its state multiplies the gate first.
    products = graph.indices(call, "mul")
    reset = next((op for op in products if id(gate.tensor) in graph.ops[op].reads), None)
    if reset is not None:
        gate = latest_result(functions_inside(graph, call), graph.ops[reset].makes[0])
    outputs, state = call.output[:2]
    _set_candidates(
        findings,
        attention_values=values,
        recurrent_gate=gate,
        state_input=named_argument(call, "recurrent_states"),
        attention_head_outputs=TensorCandidate(outputs, call, "output", 0),
        state_output=TensorCandidate(state, call, "output", 1),
    )


def _is_step(call: Call) -> bool:
    """Return whether a state-space kernel is that of a decoding step."""
    return has_parameter(call, "state")


def _find_state_space(
    findings: HostFindings, graph: TraceGraph, call: Call, state_axes: tuple[str, ...]
) -> None:
    """Find what the two state-space kernels have in common."""
    skip = named_argument(call, "D")
    findings.add("skip", skip, reasons.NO_SKIP)
    _find_results(findings, graph, call, state_axes)
    _find_discretisation(findings, graph, call)
    _find_kernel_gate(findings, graph, call)


def _find_results(
    findings: HostFindings, graph: TraceGraph, call: Call, state_axes: tuple[str, ...]
) -> None:
    """Find a state-space kernel's outputs and new state; a decoding step overwrites it."""
    if _is_step(call):
        outputs, element = call.output, None
        functions = functions_inside(graph, call)
        state = latest_result(functions, id(_tensor(call, "state")))
    else:
        returned = list(tensors(call.output))
        outputs, element = returned[0], 0 if len(returned) > 1 else None
        state = TensorCandidate(returned[1], call, "output", 1) if len(returned) > 1 else None
    axes = findings.candidates["attention_values"].axes
    _set_candidates(
        findings,
        attention_head_outputs=TensorCandidate(outputs, call, "output", element, axes=axes),
        state_output=None if state is None else replace(state, axes=state_axes),
    )


def _find_discretisation(findings: HostFindings, graph: TraceGraph, call: Call) -> None:
    """Find step sizes and decays of a state-space kernel: a decay is the step size times A.

    The step sizes are served where the kernel first makes them.
    """
    rate = id(_tensor(call, "A"))
    functions = functions_inside(graph, call)
    for op in graph.indices(call, "mul"):
        reads = graph.ops[op].reads
        others = [key for key in reads if rate not in graph.back(key, op)]
        if len(reads) != 2 or len(others) != 1:
            continue
        results = (latest_result(functions, key) for key in graph.back(others[0], op))
        found = [candidate for candidate in results if candidate is not None]
        decays = latest_result(functions, graph.ops[op].makes[0])
        _set_candidates(findings, betas=found[-1] if found else None, decays=decays)
        return


def _find_kernel_gate(findings: HostFindings, graph: TraceGraph, call: Call) -> None:
    """Find the gate that the kernel makes of its argument z, and the outputs before the gate."""
    gate = named_argument(call, "z") if has_parameter(call, "z") else None
    if gate is None or gate.optional_tensor is None:
        return
    outputs = findings.candidates["attention_head_outputs"]
    op = graph.maker(graph.back(id(outputs.tensor))[-1])
    if op is None or graph.ops[op].name != "mul":
        return
    functions = functions_inside(graph, call)
    for read in graph.ops[op].reads:
        is_gate = _made_elementwise(graph, read, id(gate.tensor), op)
        name = "head_gate" if is_gate else "attention_head_outputs"
        candidate = latest_result(functions, read)
        if candidate is None:
            findings.candidates.pop(name, None)
        else:
            findings.candidates[name] = replace(candidate, axes=outputs.axes)
    findings.missing.pop("head_gate", None)


def _made_elementwise(graph: TraceGraph, tensor_id: int, source: int, before: int) -> bool:
    """Return whether a tensor is made of another by operations on one tensor alone."""
    while tensor_id != source:
        op = graph.maker(tensor_id, before)
        if op is None or len(graph.ops[op].reads) != 1:
            return False
        tensor_id, before = graph.ops[op].reads[0], op
    return True
