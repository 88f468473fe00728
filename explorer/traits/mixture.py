"""Traits of mixtures of experts: where they are, how they route, and their shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from explorer.discovery.anatomy import HostAnatomy
from explorer.traits.evidence import Evidence, blocks, name, number
from explorer.traits.probe import ModelProbe
from explorer.traits.replayable_graph import NoNumbers


def mixture(probe: ModelProbe) -> Evidence:
    """Yield the traits of mixtures; those of the routing are the first kind of block's."""
    mixed, dense = (
        [
            layer
            for block in probe.anatomy.blocks
            if role in {sublayer.role for sublayer in block.sublayers}
            for layer in block.layers
        ]
        for role in ("experts", "mlp")
    )
    if not mixed:
        return
    count = probe.model.num_layers
    for layer, host in probe.hosts("mlp"):
        if host.details.scoring is not None:
            sizes = host.sizes
            yield (
                "mixture",
                f"{sizes['top_k']} of {sizes['num_experts']} experts per token, "
                f"in {blocks(mixed, count)}",
            )
            yield from _routing(probe, layer, host)
            yield from _shared_expert(probe, layer, host)
            break
    else:
        yield "mixture", f"in {blocks(mixed, count)}; how a token is routed is not traced"
    if dense:
        trait = "dense_first" if max(dense) < min(mixed) else "some_mixtures"
        yield trait, f"a dense MLP in {blocks(dense, count)}, a mixture in {blocks(mixed, count)}"


def _routing(probe: ModelProbe, layer: int, host: HostAnatomy) -> Evidence:
    scoring, experts = host.details.scoring, host.sizes["num_experts"]
    assert scoring is not None
    router = name(host.details.router) or "the router"
    for function in ("softmax", "sigmoid"):
        if scoring.function == function:
            yield (
                f"router_{function}",
                f"{router} takes a {function} of all {experts} logits before the top-k",
            )
        if scoring.after == function:
            yield (
                f"router_{function}_chosen",
                f"{router} takes a {function} of {host.sizes['top_k']} logits after the top-k",
            )
    selection = _find_selection(probe, layer, host)
    if selection is not None:
        if bias := _selection_bias(probe, selection, experts):
            yield "selection_bias", f"{bias} is added to the {experts} scores the top-k reads"
        if scoring.masked and (masked := _masked_experts(probe, selection, experts)):
            yield "expert_groups", f"{masked} of {experts} experts are masked before the top-k"
    if scoring.renormalised:
        yield "renormalised", "a sum and a division follow the top-k"
    factor = scoring.factor
    if factor is not None and factor != 1:
        by = name(factor) if isinstance(factor, str) else number(factor)
        yield "routed_factor", f"each weight is multiplied by {by}"


@dataclass(frozen=True)
class Selection:
    """The top-k of one router: the operation, the scores it reads, the projections of those."""

    topk: int
    scores: int
    logits: list[int]


def _find_selection(probe: ModelProbe, layer: int, host: HostAnatomy) -> Selection | None:
    """Return the last top-k over all experts."""
    graph, call, experts = probe.graph, probe.host_call(layer, host), host.sizes["num_experts"]
    for topk in reversed(graph.indices(call, "topk")):
        scores = graph.ops[topk].reads[0]
        if graph.tensors[scores].shape[-1] == experts:
            projections = graph.projections(scores, topk, call.start)
            logits = [
                index
                for index in projections
                if graph.tensors[graph.ops[index].makes[0]].shape[-1] == experts
            ]
            return Selection(topk, scores, logits)
    return None


def _selection_bias(probe: ModelProbe, selection: Selection, experts: int) -> str | None:
    """Return the name of a parameter or buffer [num_experts] added to the scores, or None."""
    graph = probe.graph
    for index in graph.between(selection.logits, selection.scores, selection.topk, 0):
        if graph.ops[index].name not in ("add", "add_"):
            continue
        for key in graph.ops[index].reads:
            source = graph.back(key, index)[-1]
            is_stored = graph.maker(source, index) is None
            path = probe.name(source)
            if graph.tensors[source].numel() == experts and is_stored and path:
                return name(path)
    return None


def _masked_experts(probe: ModelProbe, selection: Selection, experts: int) -> int:
    """Return how many experts a token cannot select, for logits of which no two are equal."""
    graph = probe.graph
    logits = {
        made: torch.randn(
            graph.tensors[made].shape,
            generator=torch.Generator().manual_seed(0),
            dtype=torch.float64,
        )
        for index in selection.logits
        for made in graph.ops[index].makes
    }
    try:
        scores = graph.replay(selection.scores, logits, probe.numbers, selection.topk)
    except NoNumbers:
        return 0
    row = scores.reshape(-1, experts)[0]
    masked = int((row == row.min()).sum())
    return masked if masked > 1 else 0


def _shared_expert(probe: ModelProbe, layer: int, host: HostAnatomy) -> Evidence:
    path = host.details.shared
    if path:
        yield "shared_expert", f"the output of {name(path)} is added to that of the routed experts"
        if (gate := _gate(probe, layer, path)) is not None:
            yield "shared_expert_gated", f"the output of {name(path)} is multiplied by {gate}"


def _gate(probe: ModelProbe, layer: int, shared: str) -> str | None:
    """Return what multiplies a shared expert's output, where that differs between tokens."""
    graph, call = probe.graph, probe.call(layer, shared)
    outputs = graph.onward(id(call.output))
    readers = sorted(index for key in outputs for index in graph.readers.get(key, ()))
    for index in readers:
        op = graph.ops[index]
        if index >= call.stop and op.name in ("mul", "mul_") and len(op.reads) == 2:
            others = [graph.tensors[key] for key in op.reads if key not in outputs]
            if others and others[0].dim() > 0:
                return f"{'one number' if others[0].shape[-1] == 1 else 'a vector'} per token"
    return None
