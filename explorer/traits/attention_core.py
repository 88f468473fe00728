"""The heart of one attention: the product of queries and keys, the softmax over it, and the product with the values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch

from explorer.discovery.anatomy import HostAnatomy
from explorer.discovery.trace_graph import Call, tensors
from explorer.traits.probe import ModelProbe
from explorer.traits.replayable_graph import PASSING, NoNumbers, ReplayableGraph

_SOFTMAX = ("_softmax", "softmax")
_MIXING = ("bmm", "matmul", "mm", "baddbmm")

#: What may stand between the product and the softmax.
_BETWEEN = PASSING | frozenset(
    [
        "add",
        "add_",
        "sub",
        "mul",
        "mul_",
        "div",
        "div_",
        "tanh",
        "where",
        "masked_fill",
        "masked_fill_",
        "cat",
        "clamp",
        "minimum",
        "maximum",
        "native_dropout",
        "dropout",
    ]
)

#: What leaves of a pattern what is multiplied with the values.
_LEAVING = PASSING | frozenset(
    ["mul", "where", "masked_fill", "native_dropout", "dropout", "slice", "narrow", "index"]
)


@dataclass(frozen=True)
class AttentionCore:
    """One attention's heart, by the operations of a run: softmax, product of queries and keys, product with the values."""

    witness: ModelProbe
    layer: int
    host: HostAnatomy
    call: Call
    softmax: int
    product: int
    mixing: int
    between: tuple[int, ...]

    @property
    def trail(self) -> ReplayableGraph:
        return self.witness.trail

    @property
    def queries(self) -> int:
        return self.trail.ops[self.product].reads[-2]

    @property
    def keys(self) -> int:
        return self.trail.ops[self.product].reads[-1]

    @property
    def values(self) -> int:
        """The operand of the mixing product that is no pattern."""
        pattern = _onward(self.trail, self.trail.ops[self.softmax].makes[0], self.mixing)
        return next(key for key in self.trail.ops[self.mixing].reads[-2:] if key not in pattern)

    @cached_property
    def scores(self) -> list[int]:
        """The operations that the product goes through to become what the softmax is taken of."""
        made, found = set(self.trail.ops[self.product].makes), []
        for index in self.between:
            if made & set(self.trail.ops[index].reads):
                made.update(self.trail.ops[index].makes)
                found.append(index)
        return found

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of the softmax, and keys."""
        return self.trail.tensors[self.trail.ops[self.softmax].reads[0]].shape[
            -1
        ], self.witness.lengths[1]

    def cuts(self, key: int, at: int) -> list[int]:
        """The projections that made an operand of a product."""
        return self.trail.cuts(key, at, self.call.start)

    @cached_property
    def query_cuts(self) -> list[int]:
        return self.cuts(self.queries, self.product)

    @cached_property
    def key_cuts(self) -> list[int]:
        return self.cuts(self.keys, self.product)

    @cached_property
    def value_cuts(self) -> list[int]:
        return self.cuts(self.values, self.mixing)

    def after_projection(self, key: int, cuts: Collection[int]) -> list[int]:
        """The operations that a projection's result goes through to become an operand of the product of queries and keys."""
        made = {tensor for cut in cuts for tensor in self.trail.ops[cut].makes}
        found = []
        for index in self.trail.between(key, self.product, cuts, self.call.start):
            if made & set(self.trail.ops[index].reads):
                made.update(self.trail.ops[index].makes)
                found.append(index)
        return found

    def norms(self, key: int, cuts: Collection[int]) -> list[int]:
        """The norms among them."""
        return [i for i in self.after_projection(key, cuts) if self.trail.norming(i)]

    def scale(self) -> float | None:
        """The single number that the product of what the projections made is multiplied with, all in all.

        A norm undoes what came before it. None where its numbers are not known.
        """
        numbers = self.witness.numbers
        try:
            factor = self.trail.factor(self.scores, numbers) * self.trail.ops[
                self.product
            ].kwargs.get("alpha", 1)
            for key, cuts in ((self.queries, self.query_cuts), (self.keys, self.key_cuts)):
                after = self.after_projection(key, cuts)
                last = max((i for i in after if self.trail.norming(i)), default=-1)
                factor *= self.trail.factor([i for i in after if i > last], numbers)
        except NoNumbers:
            return None
        return factor

    def alike(self, operations: Collection[int]) -> dict[int, torch.Tensor]:
        """Numbers for what projections made, the same for every token, and for what comes into the block."""
        keys = [made for index in operations for made in self.trail.ops[index].makes]
        stream = next(tensors((self.call.args, self.call.kwargs)))
        return {key: _same(self.trail.tensors[key]) for key in (*keys, id(stream))}

    def owner(self, index: int) -> str:
        """The name of the module an operation ran in."""
        return self.trail.owners[index].module.rpartition(".")[2]


def attention_cores(witness: ModelProbe) -> list[AttentionCore]:
    """The heart of the attention in one block of each kind that has one whose scores go through a softmax."""
    found = (
        _heart(witness, layer, host, witness.host_call(layer, host))
        for layer, host in witness.hosts("self_attn")
    )
    return [heart for heart in found if heart is not None]


def hidden(witness: ModelProbe) -> list[int]:
    """The first block of each kind that has an attention somewhere, and no host for it."""
    return [
        layer
        for layer in witness.firsts
        if not (host := witness.anatomy.block(layer).hosts["self_attn"]).hook_points
        and _heart(witness, layer, host, witness.call(layer, "")) is not None
    ]


def _heart(witness: ModelProbe, layer: int, host: HostAnatomy, call: Call) -> AttentionCore | None:
    trail = witness.trail
    for softmax in (i for name in _SOFTMAX for i in trail.indices(call, name)):
        between = _to_product(trail, softmax, call.start)
        if between is None:
            continue
        product, *rest = between
        leaving = _onward(trail, trail.ops[softmax].makes[0], call.stop)
        for mixing in range(softmax + 1, call.stop):
            if trail.ops[mixing].name in _MIXING and leaving & set(trail.ops[mixing].reads):
                return AttentionCore(
                    witness, layer, host, call, softmax, product, mixing, tuple(rest)
                )
    return None


def _to_product(trail: ReplayableGraph, softmax: int, start: int) -> list[int] | None:
    """The product a softmax is taken of, and behind it what stands between the two; None where it is of none."""
    todo, seen, product = [(trail.ops[softmax].reads[0], softmax)], set(), None
    while todo:
        index = trail.maker(*todo.pop(0))
        if index is None or index < start or index in seen:
            continue
        if trail.ops[index].name in _MIXING:
            if product is None and not trail.weighted([index]):
                product = index
            continue
        if trail.ops[index].name in _BETWEEN:
            seen.add(index)
            todo += [(key, index) for key in trail.ops[index].reads]
    return None if product is None else [product, *sorted(seen)]


def _onward(trail: ReplayableGraph, key: int, stop: int) -> set[int]:
    """A pattern and what is left of it on its way to the values."""
    found, todo = {key}, [key]
    while todo:
        for index in trail.readers.get(todo.pop(), ()):
            if index < stop and trail.ops[index].name in _LEAVING:
                new = [made for made in trail.ops[index].makes if made not in found]
                found.update(new)
                todo += new
    return found


def _same(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers in the shape of a tensor that differ along its last axis alone."""
    row = (
        torch.rand(
            tensor.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        + 0.5
    )
    return row.expand(tensor.shape).clone()
