"""Traits of softmax attention: heads, projections, norms, scores, windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from explorer.discovery.trace_graph import tensors
from explorer.traits.attention_core import AttentionCore
from explorer.traits.evidence import Evidence, blocks, listed, name, number
from explorer.traits.probe import FAR, ModelProbe
from explorer.traits.replayable_graph import NoNumbers, ReplayableGraph


def attention(probe: ModelProbe, cores: Sequence[AttentionCore]) -> Evidence:
    """Yield the traits of attention, each from the first kind of block that shows it."""
    yield from _grouped_heads(probe)
    for rule in (_latent, _fused, _qk_norm, _biases, _sinks, _cap, _multiplier):
        seen: set[str] = set()
        for core in cores:
            for trait, evidence in rule(core):
                if trait not in seen:
                    seen.add(trait)
                    yield trait, evidence
    for _, host in probe.hosts("self_attn"):
        if gates := [value for value in ("head_gate", "head_scale") if value in host.hook_points]:
            yield "head_gate", f"read at {host.hook_points[gates[0]][0].description}"
            break
    yield from _windows(probe)


def _grouped_heads(probe: ModelProbe) -> Evidence:
    for _, host in probe.hosts("self_attn"):
        heads, kv_heads = host.sizes.get("num_heads"), host.sizes.get("num_kv_heads")
        if heads and kv_heads and kv_heads < heads:
            trait = "multi_query" if kv_heads == 1 else "grouped_query"
            plural = "s" if kv_heads > 1 else ""
            yield trait, f"{heads} query heads share {kv_heads} key-value head{plural}"
            return


# -- projections -------------------------------------------------------------------------


def _latent(core: AttentionCore) -> Evidence:
    values, keys, queries = (
        _from_latent(core, projections)
        for projections in (core.value_projections, core.key_projections, core.query_projections)
    )
    sizes = core.host.sizes
    if values and set(values) == set(core.value_projections) and set(keys) & set(values):
        evidence = _latent_evidence(core, values, "keys and values")
        if "qk_head_dim" in sizes:
            evidence += (
                f"; queries and keys are {sizes['qk_head_dim']} wide, values {sizes['head_dim']}"
            )
        yield "latent_attention", evidence
    if queries and set(queries) == set(core.query_projections):
        yield "latent_queries", _latent_evidence(core, queries, "queries")


def _from_latent(core: AttentionCore, projections: Sequence[int]) -> dict[int, list[int]]:
    """Return the projections of a narrower vector, each with the projections that make that vector.

    Both have to be in the attention itself.
    """
    graph, found = core.graph, {}
    for index in projections:
        weight = graph.weight_of(index)
        if weight.dim() != 2:
            continue
        latent = graph.input_of(index)
        earlier = graph.projections(latent, index, core.call.start)
        is_narrow = graph.tensors[latent].shape[-1] < max(weight.shape)
        if earlier and is_narrow and all(graph.weight_of(i).dim() == 2 for i in earlier):
            found[index] = earlier
    return found


def _latent_evidence(core: AttentionCore, from_latent: dict[int, list[int]], what: str) -> str:
    index, earlier = next(iter(from_latent.items()))
    width = core.graph.tensors[core.graph.input_of(index)].shape[-1]
    makers = listed(map(core.module_name, earlier))
    return f"{core.module_name(index)} makes {what} from the {width}-dimensional output of {makers}"


def _fused(core: AttentionCore) -> Evidence:
    queries = core.query_projections
    if len(queries) == 1 and queries == core.key_projections == core.value_projections:
        yield "fused_qkv", f"{core.module_name(queries[0])} makes queries, keys and values"


def _qk_norm(core: AttentionCore) -> Evidence:
    found = {
        "queries": core.norms(core.queries, core.query_projections),
        "keys": core.norms(core.keys, core.key_projections),
    }
    norms = [index for indices in found.values() for index in indices]
    if not norms:
        return
    width = core.graph.normed_width(norms[0])
    over = "one head" if width == core.host.sizes.get("qk_head_dim") else f"{width} dimensions"
    paths = (core.graph.owner(index).module for index in norms)
    modules = [path for path in paths if path != core.call.module]
    by = f"by {listed(map(name, modules))}" if modules else "in the attention's own forward"
    what = listed(what for what, indices in found.items() if indices)
    yield "qk_norm", f"{what} are normed {by}, over {over}"


def _biases(core: AttentionCore) -> Evidence:
    projections = sorted({*core.query_projections, *core.key_projections, *core.value_projections})
    biased = [index for index in projections if _has_bias(core.graph.owner(index).fn)]
    if biased:
        evidence = (
            f"{listed(map(core.module_name, biased))} ha{'s' if len(biased) == 1 else 've'} a bias"
        )
        if others := [index for index in projections if index not in biased]:
            evidence += f", {listed(map(core.module_name, others))} none"
        yield "qkv_bias", evidence
    path = core.host.details.output_projection
    if path and _has_bias(core.probe.module(core.layer, path)):
        yield "output_bias", f"{name(path)} has a bias"


def _has_bias(module: torch.nn.Module) -> bool:
    return isinstance(getattr(module, "bias", None), torch.nn.Parameter)


# -- scores ------------------------------------------------------------------------------


def _sinks(core: AttentionCore) -> Evidence:
    if core.has_sinks:
        yield "attention_sinks", "the softmax has one more column than there are keys"


def _cap(core: AttentionCore) -> Evidence:
    cap = core.host.details.score_cap
    if cap is not None:
        yield "attention_cap", f"a tanh before the softmax keeps scores within ±{number(cap)}"


def _multiplier(core: AttentionCore) -> Evidence:
    """Compare the scale of the scores with one over the root of the head's width."""
    width = core.graph.tensors[core.queries].shape[-1]
    scale, usual = core.scale(), width**-0.5
    if scale is not None and abs(scale / usual - 1) > 1e-2:
        yield (
            "attention_multiplier",
            f"scores are queries · keys times {number(scale)}, not 1/√{width} = {number(usual)}",
        )


# -- windows -----------------------------------------------------------------------------


def _windows(probe: ModelProbe) -> Evidence:
    """Find out how far back the masks of a late token reach, block by block."""
    count = probe.model.num_layers
    layers = [
        layer for layer in range(count) if probe.anatomy.block(layer).hosts["self_attn"].hook_points
    ]
    if not layers or probe.far is None:
        return
    visible = _visible_tokens(probe, layers)
    windows = {layer: seen[0] for layer, seen in visible.items() if seen[0] == seen[1] <= FAR}
    chunks = [layer for layer, seen in visible.items() if seen[1] == seen[0] + 1 <= FAR]
    if windows:
        widths = " or ".join(map(str, sorted(set(windows.values()))))
        yield (
            "sliding_window",
            f"in {blocks(windows, count)}, the mask admits the last {widths} tokens, "
            "the current one included",
        )
    if chunks:
        first, second = visible[chunks[0]]
        yield (
            "chunked_attention",
            f"in {blocks(chunks, count)}, the mask admits the last {first} tokens at position "
            f"{FAR} and the last {second} at the next",
        )
    limited = {*windows, *chunks}
    if limited and (rest := [layer for layer in visible if layer not in limited]):
        yield "mixed_window", f"in {blocks(rest, count)}, the mask admits all earlier tokens"


def _visible_tokens(probe: ModelProbe, layers: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return, by block, how many tokens the two tokens at FAR may attend to, each itself included.

    Blocks are left out whose masks are unknown or disagree.
    """
    if probe.far is None:
        return {}
    graph, block_calls = probe.far
    own_windows = {
        layer: window
        for first, _ in probe.hosts("self_attn")
        if (window := _own_window(probe, first)) is not None
        for layer in probe.group(first)
    }
    by_mask: dict[int, tuple[int, int] | None] = {}
    found: dict[int, tuple[int, int]] = {}
    for layer in layers:
        if layer in own_windows:
            found[layer] = own_windows[layer], own_windows[layer]
            continue
        masks = list(_masks(*block_calls[layer]))
        for mask in masks:
            if id(mask) not in by_mask:
                by_mask[id(mask)] = _visible(probe, graph, mask)
        counts = {by_mask[id(mask)] for mask in masks}
        if len(counts) == 1 and (seen := counts.pop()) is not None:
            found[layer] = seen
    return found


def _masks(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the masks [batch heads 2 keys] that a block is called with."""
    # A cache is an argument of another type, whose tensors are no masks.
    values = [
        value
        for value in (*args, *kwargs.values())
        if isinstance(value, torch.Tensor | tuple | list | dict)
    ]
    return [t for t in tensors(values) if t.dim() == 4 and t.shape[-2] == 2 < t.shape[-1]]


def _visible(
    probe: ModelProbe, graph: ReplayableGraph, mask: torch.Tensor
) -> tuple[int, int] | None:
    """Return how many tokens each of the two rows of a mask admits, or None where unknown."""
    try:
        rows = graph.replay(id(mask), {}, probe.numbers)[0, 0]
    except NoNumbers:
        return None
    admitted = rows if rows.dtype == torch.bool else rows > -1e4
    first, second = admitted.sum(-1).tolist()
    return first, second


def _own_window(probe: ModelProbe, layer: int) -> int | None:
    """Return the window of a square mask that is an attention's own buffer, or None."""
    host = probe.anatomy.block(layer).hosts["self_attn"]
    prefix = f"{probe.path}.{layer}.{host.module}".rstrip(".")
    for buffer_name, buffer in probe.module(layer, host.module).named_buffers():
        is_square = buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2] > 1
        if buffer.dtype == torch.bool and is_square:
            mask = probe.buffers.numbers(f"{prefix}.{buffer_name}")
            if mask is not None and (seen := int(mask[..., -1, :].sum())) < mask.shape[-1]:
                return seen
    return None
