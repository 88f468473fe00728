"""Traits of position: how a model encodes where in the text a token is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from explorer.discovery.trace_graph import tensors
from explorer.traits.attention_core import AttentionCore, untraced_attention
from explorer.traits.evidence import Evidence, blocks, name, number
from explorer.traits.probe import ModelProbe
from explorer.traits.replayable_graph import NoNumbers, ReplayableGraph

#: Relative differences up to this count as rounding of double precision.
_ROUNDING = 1e-11


@dataclass(frozen=True)
class Rotation:
    """How one attention's queries depend on the position, when all tokens are equal.

    ``dimensions`` of ``width`` differ between positions. queries: [rows seq width].
    """

    dimensions: int
    width: int
    queries: torch.Tensor


def position(probe: ModelProbe, cores: Sequence[AttentionCore]) -> Evidence:
    """Yield the traits of position; ``no_position`` only where every attention could be tested."""
    rotations = {core.layer: r for core in cores if (r := _rotation(core)) is not None}
    yield from _rotary(probe, rotations)
    yield from _mrope(probe)
    biases = dict(bias for core in cores for bias in _score_bias(core))
    yield from biases.items()
    added = list(_added_to_embedding(probe))
    yield from added
    all_tested = (
        len(rotations) == len(probe.hosts("self_attn"))
        and not untraced_attention(probe)
        and not probe.hosts("mixer")
    )
    rotates = any(rotation.dimensions for rotation in rotations.values())
    if all_tested and not rotates and not biases and not added:
        attention = (
            "equal tokens have equal queries at every position"
            if rotations
            else "no block has attention"
        )
        yield "no_position", f"{attention}, and only the embedding enters the first block"


# -- rotary ------------------------------------------------------------------------------


def _rotary(probe: ModelProbe, rotations: dict[int, Rotation]) -> Evidence:
    count = probe.model.num_layers

    def where(layers: Sequence[int]) -> str:
        return blocks([i for layer in layers for i in probe.group(layer)], count)

    rotating = {layer: r for layer, r in rotations.items() if r.dimensions}
    partial = [layer for layer, r in rotating.items() if r.dimensions < r.width]
    full = [layer for layer in rotating if layer not in partial]
    still = [layer for layer in rotations if layer not in rotating]
    for trait, layers in (("partial_rotary", partial), ("rotary", full)):
        if layers:
            rotation = rotating[layers[0]]
            share = f"{rotation.dimensions} of" if trait == "partial_rotary" else "all"
            share = f"{share} {rotation.width}"
            yield (
                trait,
                f"{share} query dimensions of equal tokens differ between positions, "
                f"in {where(layers)}",
            )
    if rotating and still:
        yield "rotary_some", f"equal tokens have equal queries in {where(still)}"
    if len(groups := _by_angles(rotating)) > 1:
        yield (
            "rotary_bases",
            f"queries turn by other angles in {where(groups[1])} than in {where(groups[0])}",
        )


def _rotation(core: AttentionCore) -> Rotation | None:
    """Compute the queries of equal tokens; None where their numbers are unknown."""
    try:
        queries = core.graph.replay(
            core.queries,
            core.equal_tokens(core.query_projections),
            core.probe.numbers,
            core.operations.score_product,
        )
    except NoNumbers:
        return None
    seq, width = core.probe.lengths[1], queries.shape[-1]
    if queries.shape[-2] != seq:
        return None
    rows = queries.reshape(-1, seq, width)
    differs = (rows - rows[:, :1]).abs().amax((0, 1)) > _ROUNDING * rows.abs().max()
    if differs.all() and _parallel(rows):  # scaled by position, not rotated
        differs = torch.zeros_like(differs)
    return Rotation(int(differs.sum()), width, rows)


def _parallel(rows: torch.Tensor) -> bool:
    cosines = torch.nn.functional.cosine_similarity(rows, rows[:, :1], dim=-1)
    return bool((cosines > 1 - 1e-9).all())


def _by_angles(rotating: dict[int, Rotation]) -> list[list[int]]:
    """Group blocks by the queries of equal tokens."""
    groups: list[list[int]] = []
    for layer, rotation in rotating.items():
        for group in groups:
            other = rotating[group[0]].queries
            same_shape = other.shape == rotation.queries.shape
            if same_shape and torch.allclose(other, rotation.queries, rtol=1e-9, atol=0):
                group.append(layer)
                break
        else:
            groups.append([layer])
    return groups


def _mrope(probe: ModelProbe) -> Evidence:
    rope = getattr(probe.config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if sections := parameters.get("mrope_section"):
            yield "mrope", f"the configuration sets mrope_section to {sections}; text is unaffected"
            return


# -- biases in the scores -------------------------------------------------------------------


def _score_bias(core: AttentionCore) -> Evidence:
    """Look for what is added to the scores of equal tokens and differs from key to key."""
    graph = core.graph
    operations = (core.operations.score_product, *core.score_operations)
    scores = {key for index in operations for key in graph.ops[index].makes}
    for index in operations:
        op = graph.ops[index]
        if op.name not in ("add", "add_", "baddbmm"):
            continue
        added = op.reads[:1] if op.name == "baddbmm" else [k for k in op.reads if k not in scores]
        for key in added:
            rows = _last_rows(core, key, index)
            if rows is None or (rows == rows[:, :1]).all():
                continue
            steps = rows.diff(dim=-1)
            linear = torch.allclose(steps, steps[:, :1].expand_as(steps), rtol=1e-2, atol=1e-6)
            if linear and steps[:, 0].unique().numel() == len(rows):
                slopes = f"{number(float(steps.min()))} to {number(float(steps.max()))}"
                yield (
                    "alibi",
                    f"a bias lowers the scores by {slopes} per token of distance, "
                    "depending on the head",
                )
            else:
                yield "score_bias", "the bias of equal tokens' scores differs from key to key"


def _last_rows(core: AttentionCore, key: int, index: int) -> torch.Tensor | None:
    """Return what is added to the last token's scores when all tokens are equal [heads keys].

    Keys that the mask hides are left out. None where it has no axis of heads or unknown numbers.
    """
    graph = core.graph
    projections = graph.projections(key, index, core.call.start)
    try:
        added = graph.replay(key, core.equal_tokens(projections), core.probe.numbers, index)
    except NoNumbers:
        return None
    if added.dim() < 3 or not added.is_floating_point():
        return None
    rows = added[..., -1, :]
    visible = (rows > -1e4).flatten(0, -2).all(0)
    heads = rows.reshape(-1, rows.shape[-1])[: core.host.sizes.get("num_heads", 1)]
    return heads[:, visible] if visible.any() else None


# -- vectors added to the embedding -----------------------------------------------------------


def _added_to_embedding(probe: ModelProbe) -> Evidence:
    """Look for vectors, one per position, that are added to the embedding of the ids."""
    graph, first_block = probe.graph, probe.call(0, "")
    stream = next(tensors((first_block.args, first_block.kwargs)))
    from_ids = computed_from_ids(graph, first_block.start)
    seq = probe.lengths[1]
    for index in graph.sources(id(stream), first_block.start):
        op = graph.ops[index]
        adds = op.name in ("add", "add_") and len(op.reads) == 2
        if not adds or not set(op.reads) & from_ids:
            continue
        for key in set(op.reads) - from_ids:
            tensor = graph.tensors[key]
            if tensor.dim() >= 2 and tensor.shape[-2] == seq:
                yield _position_vectors(graph, graph.sources(key, index))


def _position_vectors(graph: ReplayableGraph, sources: Sequence[int]) -> tuple[str, str]:
    """Return the trait of vectors that some operations compute, with its evidence."""
    read = (graph.tensors[key] for index in sources for key in graph.ops[index].reads)
    tables = (
        tensor
        for tensor in read
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad and tensor.dim() == 2
    )
    table = next(tables, None)
    if table is None:
        return "fixed_positions", "computed vectors, one per position, are added to the embedding"
    owners = (graph.owners[index] for index in reversed(sources))
    module = next(name(call.module) for call in owners if call is not None)
    return (
        "learned_positions",
        f"{module} has {table.shape[0]} vectors, of which one per position is added",
    )


def computed_from_ids(graph: ReplayableGraph, stop: int) -> set[int]:
    """Return the tensors before operation ``stop`` that are computed from the token ids."""
    model = graph.calls[0]
    found = {id(t) for t in tensors((model.args, model.kwargs)) if t.dtype == torch.long}
    for index in range(stop):
        if found & set(graph.ops[index].reads):
            found.update(graph.ops[index].makes)
    return found
