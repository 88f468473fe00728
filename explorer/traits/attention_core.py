"""The core of one attention: product of queries and keys, softmax, product with the values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from explorer.discovery.anatomy import HostAnatomy
from explorer.discovery.attention_operations import attention_operations, probability_tensors
from explorer.discovery.details import AttentionOperations
from explorer.discovery.trace_graph import Call, tensors
from explorer.traits.probe import ModelProbe
from explorer.traits.replayable_graph import NoNumbers, ReplayableGraph


@dataclass(frozen=True)
class AttentionCore:
    """One attention in a recorded run.

    layer, host: the first block of its kind, and the host there. call: the call it ran in.
    operations: its operations in the graph of the run.
    """

    probe: ModelProbe
    layer: int
    host: HostAnatomy
    call: Call
    operations: AttentionOperations

    @property
    def graph(self) -> ReplayableGraph:
        return self.probe.graph

    # -- queries, keys and values --------------------------------------------------

    @property
    def queries(self) -> int:
        """The tensor of queries that the scores are computed from."""
        return self.operations.queries(self.graph)

    @property
    def keys(self) -> int:
        """The tensor of keys that the scores are computed from."""
        return self.operations.keys(self.graph)

    @property
    def values(self) -> int:
        """The tensor of values: the operand of the value product that is not the probabilities."""
        probabilities = probability_tensors(self.graph, self.operations.probabilities(self.graph))
        operands = self.graph.ops[self.operations.value_product].reads[-2:]
        return next(key for key in operands if key not in probabilities)

    @cached_property
    def query_projections(self) -> list[int]:
        """The products with weights that make the queries."""
        return self.graph.projections(self.queries, self.operations.score_product, self.call.start)

    @cached_property
    def key_projections(self) -> list[int]:
        """The products with weights that make the keys."""
        return self.graph.projections(self.keys, self.operations.score_product, self.call.start)

    @cached_property
    def value_projections(self) -> list[int]:
        """The products with weights that make the values."""
        return self.graph.projections(self.values, self.operations.value_product, self.call.start)

    def after_projections(self, key: int, projections: Sequence[int]) -> list[int]:
        """Return the operations from projections' outputs to queries or keys."""
        made = {tensor for index in projections for tensor in self.graph.ops[index].makes}
        between = self.graph.between(
            projections, key, self.operations.score_product, self.call.start
        )
        return _downstream(self.graph, made, between)

    def norms(self, key: int, projections: Sequence[int]) -> list[int]:
        """Return the norm operations that a projection's output goes through."""
        after = self.after_projections(key, projections)
        return [index for index in after if self.graph.is_norm_operation(index)]

    # -- scores --------------------------------------------------------------------

    @cached_property
    def score_operations(self) -> list[int]:
        """The operations that the score product goes through on its way into the softmax."""
        made = set(self.graph.ops[self.operations.score_product].makes)
        return _downstream(self.graph, made, self.operations.between)

    @property
    def has_sinks(self) -> bool:
        """Whether the softmax has one more column than there are keys."""
        columns = self.graph.tensors[self.graph.ops[self.operations.softmax].reads[0]].shape[-1]
        return columns == self.probe.lengths[1] + 1

    def scale(self) -> float | None:
        """Return the number that the product of projected queries and keys is multiplied with.

        What comes before a norm is left out, since the norm undoes it. None where it is unknown.
        """
        graph, numbers = self.graph, self.probe.numbers
        try:
            factor = graph.factor(self.score_operations, numbers)
            factor *= graph.ops[self.operations.score_product].kwargs.get("alpha", 1)
            for key, projections in (
                (self.queries, self.query_projections),
                (self.keys, self.key_projections),
            ):
                after = self.after_projections(key, projections)
                last_norm = max(filter(graph.is_norm_operation, after), default=-1)
                factor *= graph.factor([i for i in after if i > last_norm], numbers)
        except NoNumbers:
            return None
        return factor

    def equal_tokens(self, projections: Collection[int]) -> dict[int, torch.Tensor]:
        """Return numbers, equal for every token, for projections' outputs and the block's input."""
        keys = [made for index in projections for made in self.graph.ops[index].makes]
        stream = next(tensors((self.call.args, self.call.kwargs)))
        return {key: _equal_rows(self.graph.tensors[key]) for key in (*keys, id(stream))}

    def module_name(self, index: int) -> str:
        """Return the name of the module that an operation ran in."""
        return self.graph.owner(index).module.rpartition(".")[2]


def attention_cores(probe: ModelProbe) -> list[AttentionCore]:
    """Return the core of the attention in one block of each kind that has a softmax attention."""
    found = (
        _find_core(probe, layer, host, probe.host_call(layer, host))
        for layer, host in probe.hosts("self_attn")
    )
    return [core for core in found if core is not None]


def untraced_attention(probe: ModelProbe) -> list[int]:
    """Return the first block of each kind that has an attention but no host for it."""
    hosts = ((layer, probe.anatomy.block(layer).hosts["self_attn"]) for layer in probe.first_layers)
    return [
        layer
        for layer, host in hosts
        if not host.hook_points
        and _find_core(probe, layer, host, probe.call(layer, "")) is not None
    ]


def _find_core(
    probe: ModelProbe, layer: int, host: HostAnatomy, call: Call
) -> AttentionCore | None:
    """Return the first attention that ran in a call; a router's softmax of a projection is none."""
    for operations in attention_operations(probe.graph, call):
        if not probe.graph.with_weights([operations.score_product]):
            return AttentionCore(probe, layer, host, call, operations)
    return None


def _downstream(graph: ReplayableGraph, made: set[int], indices: Collection[int]) -> list[int]:
    """Return those of some operations, in order, that some tensors go into."""
    made, found = set(made), []
    for index in indices:
        if made & set(graph.ops[index].reads):
            made.update(graph.ops[index].makes)
            found.append(index)
    return found


def _equal_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers in the shape of a tensor that differ along its last axis only."""
    generator = torch.Generator().manual_seed(0)
    row = 0.5 + torch.rand(tensor.shape[-1], generator=generator, dtype=torch.float64)
    return row.expand(tensor.shape).clone()
