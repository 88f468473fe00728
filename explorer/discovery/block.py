"""Find the sublayers of one block and the values on each."""

from __future__ import annotations

from functools import partial

from explorer.discovery.addend_owner import feeding_mixers, owner_module, several_mixers
from explorer.discovery.addends import (
    SELECTING,
    Addend,
    addend_candidate,
    find_addends,
    mixes_positions,
    split_addend,
    weight_products,
)
from explorer.discovery.attention import is_attention
from explorer.discovery.block_values import find_block_values
from explorer.discovery.candidates import (
    HostFindings,
    TensorCandidate,
    argument_candidate,
    is_norm,
    result_candidate,
)
from explorer.discovery.mlp import DENSE, ROUTED, find_dense
from explorer.discovery.moe import find_experts, find_mixture
from explorer.discovery.moe_all_experts import find_all_experts_mixture
from explorer.discovery.moe_tables import find_table_mixture
from explorer.discovery.recurrent import find_kernel
from explorer.discovery.residual import (
    SCALES,
    CannotTrace,
    find_output_steps,
    residual_input,
    residual_steps,
)
from explorer.discovery.short_convolution import is_gated_convolution
from explorer.discovery.sublayer import BlockFindings, Sublayer
from explorer.discovery.trace_graph import Call, TraceGraph, tensors
from explorer.vocabulary import HOSTS, MIXERS, reasons, resolve


def find_block(graph: TraceGraph, path: str) -> BlockFindings:
    """Find the sublayers of the block at ``path`` and the values on each.

    Raises CannotTrace when the block's output is not its input plus distinguishable addends,
    or when two sublayers are of one kind.
    """
    block = graph.module(path)
    if block is None:
        raise CannotTrace(f"{path} does not run exactly once in a forward")
    findings = BlockFindings(path)
    own = findings.hosts["layers"] = HostFindings(path)
    leaving = next(tensors(block.output))
    reason = reasons.NOT_PASSED
    own.add("layer_input", argument_candidate(block, {id(residual_input(block))}), reason)
    own.add("layer_output", result_candidate(block, {id(leaving)}), reason)
    own.sizes["hidden_size"] = leaving.shape[-1]
    if isinstance(block.output, (tuple, list)):
        own.set_details(returns=len(block.output))
    findings.steps = residual_steps(graph, block)
    sublayers = _sublayer_calls(graph, block)
    known_mixer = any(HOSTS[host].mixer and host != "mixer" for *_, host in sublayers)
    for addend, call, add_number, host in sublayers:
        # Beside a mixer of a known kind, an unknown one is an extra sublayer.
        if host == "mixer" and known_mixer:
            host = "extra"
        _add_sublayer(findings, graph, block, addend, call, add_number, host)
    find_block_values(findings, graph, block)
    findings.visited = {
        (call.module, call.labels)
        for call in graph.calls
        if block.start <= call.start and call.stop <= block.stop
    }
    return findings


def _sublayer_calls(graph: TraceGraph, block: Call) -> list[tuple[Addend, Call, int, str]]:
    """Return the block's addends with the call, the number of the add, and the host of each."""
    role_of = partial(_role, graph)
    found = []
    for number, whole in enumerate(find_addends(graph, block), 1):
        addends = split_addend(graph, block, whole)
        calls = [owner_module(graph, block, addend, role_of) for addend in addends]
        hosts = [
            _host(graph, block, call, addend) for call, addend in zip(calls, addends, strict=True)
        ]
        if len(set(hosts)) < len(hosts):  # the two addends belong to one sublayer
            addends, calls = [whole], [owner_module(graph, block, whole, role_of)]
            hosts = [_host(graph, block, calls[0], whole)]
        found += [
            (addend, call, number, host)
            for addend, call, host in zip(addends, calls, hosts, strict=True)
        ]
    return found


def _role(graph: TraceGraph, call: Call) -> str | None:
    """Return the role of a module that is clear from its inside: ``"mixer"`` or ``"experts"``."""
    if find_kernel(graph, call) is not None or is_attention(graph, call):
        return "mixer"
    return "experts" if find_experts(graph, call) is not None else None


def _host(graph: TraceGraph, block: Call, call: Call, addend: Addend) -> str:
    """Return the host of the sublayer that makes an addend."""
    if call.part_of is not None and several_mixers(graph, block, addend, partial(_role, graph)):
        return "mixer"
    kernel = find_kernel(graph, call)
    if kernel is not None:
        return kernel.host
    if is_attention(graph, call):
        return "self_attn"
    if is_gated_convolution(graph, call, addend):
        return "short_conv"
    # A convolution after the module's own result does not make the module a mixer.
    own = [i for i in addend.ops if call.part_of is not None or i < call.stop]
    return "mixer" if mixes_positions(graph, own) else "mlp"


def _add_sublayer(
    findings: BlockFindings,
    graph: TraceGraph,
    block: Call,
    addend: Addend,
    call: Call,
    add_number: int,
    host: str,
) -> None:
    """Find the values of one sublayer and add it to the findings."""
    taken = {HOSTS[other].attribute for other in findings.hosts}
    if host in ("mlp", "mixer") and HOSTS[host].attribute in taken:
        host = "extra"
    if HOSTS[host].attribute in taken:
        raise CannotTrace(f"{findings.path} has two sublayers of the kind {host}")
    candidate = addend_candidate(graph, block, addend)
    products = [
        i for i in weight_products(graph, addend) if call.part_of is not None or i < call.stop
    ]
    role, values = _find_values(graph, call, addend, host, products)
    last_op = products[-1] if values.last_op is None else values.last_op
    values.set_details(
        output_steps=find_output_steps(graph, block, addend.ops, last_op),
        convolved_output=any(
            graph.ops[i].name == "convolution" and i > products[-1] for i in addend.ops
        ),
    )
    values.sizes["hidden_size"] = candidate.tensor.shape[-1]
    findings.hosts[host], findings.calls[host] = values, call
    if values.details.shared:
        findings.hosts["shared_experts"] = _find_shared(graph, values.details.shared)
    if (dense := values.dense) is not None:
        steps = find_output_steps(graph, block, dense.made_by, dense.last_op or 0)
        dense.set_details(output_steps=steps)
        findings.hosts["dense_mlp"] = dense
    feeding = feeding_mixers(graph, block, addend, call, partial(_role, graph))
    norm = _norm_before(graph, block, call)
    scaled_norm = _norm_before(graph, block, call, scaled=True) if norm is None else None
    sublayer = Sublayer(
        role,
        host,
        call.module,
        candidate,
        norm,
        add_number,
        addend.stage,
        scaled_norm,
        tuple(child.module.rpartition(".")[2] for child in feeding),
    )
    values.candidates[sublayer.output] = candidate
    findings.sublayers.append(sublayer)


def _find_values(
    graph: TraceGraph, call: Call, addend: Addend, host: str, products: list[int]
) -> tuple[str, HostFindings]:
    """Return the role of a sublayer and the values found on it."""
    if host == "extra":
        return "extra", HostFindings(call.module)
    if host in MIXERS:
        role, finder = MIXERS[host].sublayer, MIXERS[host].finder
        return role, resolve(finder)(graph, call, addend) if finder else HostFindings(call.module)
    if (experts := find_experts(graph, call)) is not None:
        return "experts", find_mixture(graph, call, experts)
    mixture = find_all_experts_mixture(graph, call) or find_table_mixture(graph, call)
    if mixture is not None:
        return "experts", mixture
    selecting = next(
        (graph.ops[i].name for i in addend.ops if graph.ops[i].name in SELECTING), None
    )
    if selecting is None:
        return "mlp", find_dense(graph, call, products)
    findings = HostFindings(call.module)
    reason = reasons.selects_modules(_name_of(call), selecting)
    findings.missing = dict.fromkeys((*DENSE, *ROUTED), reason)
    return "experts", findings


def _find_shared(graph: TraceGraph, path: str) -> HostFindings:
    """Find the values of a shared expert, a dense MLP inside the mixture."""
    call = graph.only_call(path)
    findings = find_dense(graph, call)
    findings.candidates["mlp_output"] = TensorCandidate(call.output, call, "output", None)
    findings.sizes["hidden_size"] = call.output.shape[-1]
    findings.missing = {
        name: reason for name, reason in findings.missing.items() if name.startswith("mlp_")
    }
    return findings


def _name_of(call: Call) -> str:
    """Return how an error names a sublayer."""
    if call.part_of is not None:
        return f"a part of {call.module} without a module of its own"
    return call.module


def _norm_before(graph: TraceGraph, block: Call, call: Call, scaled: bool = False) -> str | None:
    """Return the path of the norm whose output a sublayer is called with, or None.

    scaled: whether the output may be multiplied with numbers in between.
    """
    entering = graph.back(id(next(tensors((call.args, call.kwargs)))), call.start)
    while (
        scaled
        and (op := graph.maker(entering[-1], call.start)) is not None
        and graph.ops[op].name in SCALES
        and len(graph.ops[op].reads) == 1
    ):
        entering += graph.back(graph.ops[op].reads[0], op)
    norms = [
        c
        for c in graph.inside(block)
        if is_norm(graph, c) and result_candidate(c, entering) is not None and c.ended <= call.began
    ]
    return norms[-1].module if norms else None
