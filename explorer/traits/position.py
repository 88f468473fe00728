"""Traits of position: how a model knows where in the text a token stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from explorer.discovery.trace_graph import tensors
from explorer.traits.attention_core import AttentionCore, hidden
from explorer.traits.evidence import blocks, name, number
from explorer.traits.probe import ModelProbe
from explorer.traits.replayable_graph import NoNumbers, ReplayableGraph

Found = Iterator[tuple[str, str]]

#: Two numbers are told apart from here on: what was worked out in double precision is far closer where it is equal.
_EQUAL = 1e-11

_TURN = "dimensions of equal queries differ from token to token"


@dataclass(frozen=True)
class Turned:
    """How one attention's queries follow the position.

    ``dimensions`` of ``width`` turn; ``queries`` are those of equal tokens [rows seq width].
    """

    dimensions: int
    width: int
    queries: torch.Tensor


def position(witness: ModelProbe, found: Sequence[AttentionCore]) -> Found:
    """Traits of position; that there is none is said where every attention could be asked."""
    turned = {heart.layer: turn for heart in found if (turn := _turned(heart)) is not None}
    count = witness.model.num_layers
    where = lambda layers: blocks([i for layer in layers for i in witness.group(layer)], count)  # noqa: E731
    turning = {layer: turn for layer, turn in turned.items() if turn.dimensions}
    partial = {layer: turn for layer, turn in turning.items() if turn.dimensions < turn.width}
    if partial:
        turn = next(iter(partial.values()))
        yield "partial_rotary", f"{turn.dimensions} of {turn.width} {_TURN}, in {where(partial)}"
    if full := [layer for layer in turning if layer not in partial]:
        yield "rotary", f"all {turning[full[0]].width} {_TURN}, in {where(full)}"
    if turning and (rest := [layer for layer in turned if layer not in turning]):
        yield "rotary_some", f"equal queries stay equal in the attention of {where(rest)}"
    if len(others := _frequencies(turning)) > 1:
        yield (
            "rotary_bases",
            f"equal queries are turned by other angles in {where(others[1])} than in {where(others[0])}",
        )
    yield from _mrope(witness)
    biased = dict(bias for heart in found for bias in _bias(heart))
    yield from biased.items()
    added = list(_added(witness))
    yield from added
    asked = (
        len(turned) == len(witness.hosts("self_attn"))
        and not hidden(witness)
        and not witness.hosts("mixer")
    )
    if asked and not turning and not biased and not added:
        what = (
            "equal queries stay equal wherever they stand, "
            if turned
            else "no block has attention, "
        )
        yield "no_position", f"{what}and nothing but the embedding enters the first block"


def _turned(heart: AttentionCore) -> Turned | None:
    """The queries as the scores use them when every token's projection gave the same; None where they cannot be worked out."""
    try:
        queries = heart.trail.replay(
            heart.queries, heart.alike(heart.query_cuts), heart.witness.numbers, heart.product
        )
    except NoNumbers:
        return None
    seq, width = heart.witness.lengths[1], queries.shape[-1]
    rows = queries.reshape(-1, seq, width) if queries.shape[-2] == seq else None
    if rows is None:
        return None
    apart = (rows - rows[:, :1]).abs().amax((0, 1)) > _EQUAL * rows.abs().max()
    if apart.all() and _parallel(rows):  # longer or shorter with the position, but not turned
        apart = torch.zeros_like(apart)
    return Turned(int(apart.sum()), width, rows)


def _parallel(rows: torch.Tensor) -> bool:
    along = torch.nn.functional.cosine_similarity(rows, rows[:, :1], dim=-1)
    return bool((along > 1 - 1e-9).all())


def _frequencies(turning: dict[int, Turned]) -> list[list[int]]:
    """Blocks whose queries are alike, by how they turn them."""
    groups: list[list[int]] = []
    for layer, turn in turning.items():
        for group in groups:
            other = turning[group[0]].queries
            if other.shape == turn.queries.shape and torch.allclose(
                other, turn.queries, rtol=1e-9, atol=0
            ):
                group.append(layer)
                break
        else:
            groups.append([layer])
    return groups


def _mrope(witness: ModelProbe) -> Found:
    rope = getattr(witness.config, "rope_parameters", None) or {}
    for one in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if sections := one.get("mrope_section"):
            yield (
                "mrope",
                f"the configuration's mrope_section is {sections}; on text alone it does not show",
            )
            return


def _bias(heart: AttentionCore) -> Found:
    """What is added to the scores of equal tokens, different from key to key."""
    trail = heart.trail
    made = {
        *trail.ops[heart.product].makes,
        *(key for index in heart.scores for key in trail.ops[index].makes),
    }
    for index in (heart.product, *heart.scores):
        op = trail.ops[index]
        if op.name not in ("add", "add_", "baddbmm"):
            continue
        for key in op.reads[:1] if op.name == "baddbmm" else [k for k in op.reads if k not in made]:
            rows = _last_rows(heart, key, index)
            if rows is None or (rows == rows[:, :1]).all():
                continue
            steps = rows.diff(dim=-1)
            straight = torch.allclose(steps, steps[:, :1].expand_as(steps), rtol=1e-2, atol=1e-6)
            if straight and steps[:, 0].unique().numel() == len(rows):
                slopes = f"{number(float(steps.min()))} to {number(float(steps.max()))}"
                yield (
                    "alibi",
                    f"what is added to the scores falls by {slopes} for each token further back, head by head",
                )
            else:
                yield (
                    "score_bias",
                    "what is added to the scores of equal tokens differs from key to key",
                )


def _last_rows(heart: AttentionCore, key: int, index: int) -> torch.Tensor | None:
    """Of what is added to the scores when all tokens are equal, the last token's row for each head: [heads keys].

    What the mask hides is left out. None where it has no axis of heads, or its numbers are not known.
    """
    trail = heart.trail
    try:
        added = trail.replay(
            key, heart.alike(trail.cuts(key, index, heart.call.start)), heart.witness.numbers, index
        )
    except NoNumbers:
        return None
    if added.dim() < 3 or not added.is_floating_point():
        return None
    rows = added[..., -1, :]
    seen = (rows > -1e4).flatten(0, -2).all(0)
    heads = rows.reshape(-1, rows.shape[-1])[: heart.host.sizes.get("num_heads", 1)]
    return heads[:, seen] if seen.any() else None


def _added(witness: ModelProbe) -> Found:
    """What is added to the embedding of the ids: a vector for each position."""
    trail = witness.trail
    call = witness.call(0, "")
    stream = next(tensors((call.args, call.kwargs)))
    ids = of_ids(trail, call.start)
    batch, seq = witness.lengths
    for index in trail.sources(id(stream), call.start):
        op = trail.ops[index]
        if op.name not in ("add", "add_") or len(op.reads) != 2 or not set(op.reads) & ids:
            continue
        for key in set(op.reads) - ids:
            tensor = trail.tensors[key]
            if tensor.dim() < 2 or tensor.shape[-2] != seq:
                continue
            made = trail.sources(key, index)
            read = (trail.tensors[k] for i in made for k in trail.ops[i].reads)
            table = next(
                (
                    t
                    for t in read
                    if isinstance(t, torch.nn.Parameter) and t.requires_grad and t.dim() == 2
                ),
                None,
            )
            if table is None:
                yield (
                    "fixed_positions",
                    "what is added to the embedding for each position is computed, not learned",
                )
            else:
                where = next(
                    name(trail.owners[i].module)
                    for i in reversed(made)
                    if trail.owners[i] is not None
                )
                yield (
                    "learned_positions",
                    f"{where} has {table.shape[0]} vectors, one of which is added for each position",
                )


def of_ids(trail: ReplayableGraph, stop: int) -> set[int]:
    """The tensors that the token ids went into, before the first block."""
    first = trail.calls[0]
    made = {id(t) for t in tensors((first.args, first.kwargs)) if t.dtype == torch.long}
    for index in range(stop):
        if made & set(trail.ops[index].reads):
            made.update(trail.ops[index].makes)
    return made
