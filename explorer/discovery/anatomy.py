"""What discovery finds out about a model, as data: kinds of blocks, and where their values are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from explorer import vocabulary
from explorer.discovery.backbone import Backbone
from explorer.discovery.details import HostDetails, Step
from explorer.discovery.hook_point import HookPoint
from explorer.discovery.sublayer import Sublayer, first_and_second
from explorer.vocabulary import reasons
from explorer.vocabulary.availability import Unavailability

_WITHOUT = {
    "shared_experts": reasons.NO_SHARED_HOST,
    "dense_mlp": reasons.NO_DENSE_BRANCH,
    "mlp": reasons.NO_MLP,
    "extra": reasons.NO_OTHER_SUBLAYER,
}


def why_without(host: str, hosts: Collection[str], feeding: Mapping[str, str]) -> Unavailability:
    """Return why a block with ``hosts`` does not have ``host``.

    feeding: as of `BlockFindings`.
    """
    if feeding and host in ("self_attn", "mlp"):
        return reasons.feeds_sublayer(*next(iter(feeding.items())))
    if host == "mlp" and "extra" in hosts:
        return reasons.OTHER_SUBLAYER
    if host in _WITHOUT:
        return _WITHOUT[host]
    if "mixer" in hosts and vocabulary.HOSTS[host].mixer and host != "mixer":
        return reasons.INSIDE_MIXER
    mixers = [name for name in hosts if vocabulary.HOSTS[name].mixer]
    if not mixers:
        return reasons.NO_MIXER
    return reasons.other_mixer(mixers, [vocabulary.HOSTS[name].short for name in mixers])


@dataclass(frozen=True)
class HostAnatomy:
    """One host of one kind of block. All paths count from the block.

    name: the host's standard name. module: path of its module; "" for the block itself and for a
    host without one.
    sizes: lengths of its values' axes. hook_points: by value, one hook point for each way the
    forward reaches it (a prompt, a decoding step). missing: by value, why it is not available.
    details: what else is known of the host. prompt_only: values that a decoding step, which runs
    other code, does not have.
    """

    name: str
    module: str
    sizes: dict[str, int]
    hook_points: dict[str, tuple[HookPoint, ...]]
    missing: dict[str, Unavailability]
    details: HostDetails
    prompt_only: frozenset[str] = frozenset()

    @property
    def inline(self) -> bool:
        """Whether it is computed in the block's own forward, without a module."""
        return bool(self.hook_points) and not self.module and self.name not in ("layers", "model")


@dataclass(frozen=True)
class BlockAnatomy:
    """One kind of block.

    layers: indices of the blocks of this kind. hosts: by name, with those a block of this kind does
    not have. sublayers: what it adds to the residual stream, in order. order, step_order: host and
    name of every value in the order a prompt and a decoding step pass them; step_order is empty
    where they are equal. steps: what the block does to its residual stream. mid_step: how many of
    those ``layer_mid`` has behind it; None where there is no ``layer_mid``.
    """

    layers: tuple[int, ...]
    hosts: dict[str, HostAnatomy]
    sublayers: tuple[Sublayer, ...]
    order: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...] = ()
    mid_step: int | None = None
    step_order: tuple[tuple[str, str], ...] = ()

    @property
    def mixture_sum(self) -> str:
        """How a mixture's parts make its ``mlp_output``, as a formula; "" where that is not known.

        In its plain form it is ``mlp_output = routed_output + shared_expert_output``. Norms are
        written by the names of their modules, parameters by theirs.
        """
        mlp = self.hosts["mlp"]
        if "routed_output" not in mlp.hook_points or not mlp.details.output_steps.complete:
            return ""
        total = _applied("routed_output", mlp.details.routed_steps)
        dense = self.hosts["dense_mlp"]
        if "shared_expert_output" in mlp.hook_points:
            total += " + shared_expert_output"
        elif "mlp_output" in dense.hook_points:
            total += " + dense_mlp.mlp_output"
        return f"mlp_output = {_applied(total, mlp.details.output_steps.steps)}"

    def value_order(self, step: bool = False) -> tuple[tuple[str, str], ...]:
        """Return the order of values in a prompt, or with ``step`` in a decoding step."""
        return self.step_order if step and self.step_order else self.order

    @property
    def main_sublayers(self) -> tuple[Sublayer, Sublayer | None]:
        """The sublayers that read ``attention_norm_output`` and ``mlp_norm_output``."""
        return first_and_second(self.sublayers)


def _applied(formula: str, steps: Sequence[Step]) -> str:
    """Return a formula with steps applied to it."""
    for step in steps:
        by = f"{step.by:g}" if isinstance(step.by, float | int) else step.by
        if step.kind == "norm":
            formula = f"{by}({formula})"
        else:
            inner = f"({formula})" if " " in formula and step.kind == "scale" else formula
            formula = f"{by} · {inner}" if step.kind == "scale" else f"{inner} + {by}"
    return formula


@dataclass
class Anatomy:
    """What discovery found out about a model.

    backbone: paths of embedding, blocks and head.
    norm: path of the last norm of the residual stream before the head, or None.
    blocks: the kinds of blocks.
    head_is_last: whether the head's output is the logits.
    head_reads_norm: whether the head is called with the very output of ``norm``, or, without a
        norm, of the last block.
    embedding_fits: whether the embedding is as wide as the residual stream.
    why_no_norm: why ``norm`` is None.
    norm_call: which of the norm's calls in a forward it is, from 0; None where it is called once.
    masked: whether a run on shapes alone needs an attention mask.
    blocks_skippable: whether the model runs with blocks left out.
    """

    backbone: Backbone
    norm: str | None
    blocks: list[BlockAnatomy]
    head_is_last: bool
    head_reads_norm: bool = True
    embedding_fits: bool = True
    why_no_norm: Unavailability | None = None
    norm_call: int | None = None
    masked: bool = False
    blocks_skippable: bool = True

    @property
    def names(self) -> dict[str, str]:
        """Paths of the blocks and of the modules around them, by standard name."""
        found = {
            "embed_tokens": self.backbone.embedding,
            "layers": self.backbone.blocks,
            "lm_head": self.backbone.head,
        }
        return found if self.norm is None else {**found, "norm": self.norm}

    @property
    def width(self) -> int:
        """The width of the residual stream."""
        return self.blocks[0].hosts["layers"].sizes["hidden_size"]

    def block(self, layer: int) -> BlockAnatomy:
        """Return the anatomy of the block with this index."""
        return next(block for block in self.blocks if layer in block.layers)
