"""Traits of softmax attention: heads, projections, norms, scores, windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from explorer.discovery.trace_graph import tensors
from explorer.traits.attention_core import AttentionCore
from explorer.traits.evidence import blocks, listed, name, number
from explorer.traits.probe import FAR, ModelProbe
from explorer.traits.replayable_graph import NoNumbers, ReplayableGraph

Found = Iterator[tuple[str, str]]


def attention(witness: ModelProbe, found: Sequence[AttentionCore]) -> Found:
    """Traits of the attention in the blocks that have one, each decided on the first kind of block that shows it."""
    yield from _heads(witness)
    for rule in (_latent, _fused, _qk_norm, _biases, _sinks, _cap, _multiplier):
        once: set[str] = set()
        for heart in found:
            for trait, evidence in rule(heart):
                if trait not in once:
                    once.add(trait)
                    yield trait, evidence
    for _, host in witness.hosts("self_attn"):
        if gates := [value for value in ("head_gate", "head_scale") if value in host.hook_points]:
            yield "head_gate", f"read at {host.hook_points[gates[0]][0].description}"
            break
    yield from _windows(witness)


def _heads(witness: ModelProbe) -> Found:
    for _, host in witness.hosts("self_attn"):
        heads, shared = host.sizes.get("num_heads"), host.sizes.get("num_kv_heads")
        if heads and shared and shared < heads:
            yield (
                "multi_query" if shared == 1 else "grouped_query",
                f"{heads} query heads over {shared} of keys and values",
            )
            return


def _latent(heart: AttentionCore) -> Found:
    values, keys, queries = (
        _narrow(heart, cuts) for cuts in (heart.value_cuts, heart.key_cuts, heart.query_cuts)
    )
    sizes = heart.host.sizes
    if values and set(values) == set(heart.value_cuts) and set(keys) & set(values):
        wide = (
            f"queries and keys are {sizes['qk_head_dim']} wide, values {sizes['head_dim']}"
            if "qk_head_dim" in sizes
            else ""
        )
        yield (
            "latent_attention",
            "; ".join(filter(None, (f"{_made(heart, values, 'keys and values')}", wide))),
        )
    if queries and set(queries) == set(heart.query_cuts):
        yield "latent_queries", _made(heart, queries, "queries")


def _narrow(heart: AttentionCore, cuts: Sequence[int]) -> dict[int, list[int]]:
    """The projections that read something narrower, which other projections of the same attention made, with those."""
    trail, found = heart.trail, {}
    for cut in cuts:
        if trail.matrix(cut).dim() != 2:
            continue
        before = trail.cuts(trail.taken(cut), cut, heart.call.start)
        narrow = trail.tensors[trail.taken(cut)].shape[-1] < max(trail.matrix(cut).shape)
        if before and narrow and all(trail.matrix(index).dim() == 2 for index in before):
            found[cut] = before
    return found


def _made(heart: AttentionCore, narrow: dict[int, list[int]], what: str) -> str:
    cut, before = next(iter(narrow.items()))
    width = heart.trail.tensors[heart.trail.taken(cut)].shape[-1]
    return f"{heart.owner(cut)} makes {what} of the {width} numbers a token that {listed(map(heart.owner, before))} made"


def _fused(heart: AttentionCore) -> Found:
    if len(heart.query_cuts) == 1 and heart.query_cuts == heart.key_cuts == heart.value_cuts:
        yield "fused_qkv", f"{heart.owner(heart.query_cuts[0])} makes all three"


def _qk_norm(heart: AttentionCore) -> Found:
    found = {
        "queries": heart.norms(heart.queries, heart.query_cuts),
        "keys": heart.norms(heart.keys, heart.key_cuts),
    }
    norms = [norm for each in found.values() for norm in each]
    if norms:
        width = heart.trail.normed_width(norms[0])
        wide = "one head" if width == heart.host.sizes.get("qk_head_dim") else f"{width} numbers"
        inside = [
            path for norm in norms if (path := heart.trail.owners[norm].module) != heart.call.module
        ]
        where = f"by {listed(map(name, inside))}" if inside else "in the attention's own forward"
        what = listed(what for what, each in found.items() if each)
        yield "qk_norm", f"{what} are normed {where} on their way to the scores, {wide} wide"


def _biases(heart: AttentionCore) -> Found:
    trail = heart.trail
    cuts = sorted({*heart.query_cuts, *heart.key_cuts, *heart.value_cuts})
    having = [cut for cut in cuts if _has_bias(trail.owners[cut].fn)]
    if having:
        of = f", of {listed(map(heart.owner, cuts))}" if len(having) < len(cuts) else ""
        yield (
            "qkv_bias",
            f"{listed(map(heart.owner, having))} {'has one' if len(having) == 1 else 'have one each'}{of}",
        )
    last = heart.host.details.output_projection
    if last and _has_bias(heart.witness.module(heart.layer, last)):
        yield "output_bias", f"{name(last)} has one"


def _has_bias(module: torch.nn.Module) -> bool:
    return getattr(module, "bias", None) is not None and isinstance(module.bias, torch.nn.Parameter)


def _sinks(heart: AttentionCore) -> Found:
    columns, keys = heart.columns
    if columns == keys + 1:
        yield "attention_sinks", "the softmax has one column more than there are keys"


def _cap(heart: AttentionCore) -> Found:
    if (cap := heart.host.details.score_cap) is not None:
        yield (
            "attention_cap",
            f"scores stay within ±{number(cap)}: a tanh stands before the softmax",
        )


def _multiplier(heart: AttentionCore) -> Found:
    """What the product of what the projections made is multiplied with by plain numbers on its way into the softmax."""
    width = heart.trail.tensors[heart.queries].shape[-1]
    factor, usual = heart.scale(), width**-0.5
    if factor is not None and abs(factor / usual - 1) > 1e-2:
        yield (
            "attention_multiplier",
            (
                f"scores are queries times keys times {number(factor)}; one over the root of {width} would be {number(usual)}"
            ),
        )


def _windows(witness: ModelProbe) -> Found:
    """What the mask lets a token see that stands behind many others, block by block."""
    count = witness.model.num_layers
    attending = [
        layer
        for layer in range(count)
        if witness.anatomy.block(layer).hosts["self_attn"].hook_points
    ]
    if not attending or witness.far is None:
        return
    views = _views(witness, attending)
    windows = {layer: view[0] for layer, view in views.items() if view[0] == view[1] <= FAR}
    chunks = [layer for layer, view in views.items() if view[1] == view[0] + 1 <= FAR]
    if windows:
        widths = " or ".join(map(str, sorted(set(windows.values()))))
        yield (
            "sliding_window",
            f"the mask of {blocks(windows, count)} leaves a token the last {widths} tokens, itself among them",
        )
    if chunks:
        one, next_one = views[chunks[0]]
        yield (
            "chunked_attention",
            (
                f"the mask of {blocks(chunks, count)} leaves the token at {FAR} the last {one} tokens, "
                f"and the one after it {next_one}"
            ),
        )
    limited = {*windows, *chunks}
    if limited and (rest := [layer for layer in views if layer not in limited]):
        yield "mixed_window", f"the mask of {blocks(rest, count)} leaves everything before a token"


def _views(witness: ModelProbe, layers: Sequence[int]) -> dict[int, tuple[int, int]]:
    """By block, how many tokens the two at FAR see, each itself included: as the masks say that blocks are handed."""
    trail, handed = witness.far
    windows = {
        layer: window
        for first, _ in witness.hosts("self_attn")
        if (window := _own_window(witness, first)) is not None
        for layer in witness.group(first)
    }
    known: dict[int, tuple[int, int] | None] = {}
    found = {}
    for layer in layers:
        masks = [
            t
            for t in tensors(_handed(handed[layer]))
            if t.dim() == 4 and t.shape[-2] == 2 < t.shape[-1]
        ]
        for mask in masks:
            if id(mask) not in known:
                known[id(mask)] = _seen(witness, trail, mask)
        views = {known[id(mask)] for mask in masks}
        view = views.pop() if len(views) == 1 else None
        if layer in windows:
            found[layer] = windows[layer], windows[layer]
        elif view is not None:
            found[layer] = view
    return found


def _own_window(witness: ModelProbe, layer: int) -> int | None:
    """The window of a square mask that an attention keeps as a buffer of its own; None where there is no such."""
    host = witness.anatomy.block(layer).hosts["self_attn"]
    prefix = f"{witness.path}.{layer}.{host.module}".rstrip(".")
    for own, buffer in witness.module(layer, host.module).named_buffers():
        if (
            buffer.dtype == torch.bool
            and buffer.dim() >= 2
            and buffer.shape[-1] == buffer.shape[-2] > 1
        ):
            mask = witness.buffers.numbers(f"{prefix}.{own}")
            if mask is not None and (seen := int(mask[..., -1, :].sum())) < mask.shape[-1]:
                return seen
    return None


def _seen(
    witness: ModelProbe, trail: ReplayableGraph, mask: torch.Tensor
) -> tuple[int, int] | None:
    try:
        rows = trail.replay(id(mask), {}, witness.numbers)[0, 0]
    except NoNumbers:
        return None
    visible = rows if rows.dtype == torch.bool else rows > -1e4
    return tuple(visible.sum(-1).tolist())


def _handed(call: tuple[tuple, dict]) -> list:
    """All that a block was called with but what it keeps between calls."""
    args, kwargs = call
    return [
        value
        for value in (*args, *kwargs.values())
        if isinstance(value, (torch.Tensor, tuple, list, dict))
    ]
