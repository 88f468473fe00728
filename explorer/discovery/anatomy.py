"""What discovery finds out about a model, as data: its backbone and its kinds of blocks, with the places of their values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from explorer import vocabulary
from explorer.discovery.backbone import Backbone
from explorer.discovery.details import HostDetails, Step
from explorer.discovery.hook_point import HookPoint
from explorer.discovery.sublayer import Sublayer, first_and_second
from explorer.vocabulary.availability import Unavailability, not_in_block, not_traced

_WITHOUT = {
    "shared_experts": "this block's MLP has no shared expert",
    "mlp": "this block has no MLP",
    "extra": "this block has no part beside its mixer and its MLP",
}


def without(host: str, there: Collection[str]) -> Unavailability:
    """Why a block whose hosts are ``there`` has not ``host``."""
    if host == "mlp" and "extra" in there:
        return not_traced("a further part of this block, which may be its MLP, is not followed")
    if host in _WITHOUT:
        return not_in_block(_WITHOUT[host])
    if "mixer" in there and vocabulary.HOSTS[host].mixer and host != "mixer":
        return not_traced("what is inside the mixer of this block is not followed")
    mixers = [name for name in there if vocabulary.HOSTS[name].mixer]
    if not mixers:
        return not_in_block("this block has no mixer: nothing in it reads another position")
    return not_in_block(
        f"this block's mixer is {' and '.join(mixers)}: {' and '.join(vocabulary.HOSTS[name].short for name in mixers)}"
    )


@dataclass(frozen=True)
class HostAnatomy:
    """One host of one kind of block: its module (relative to the block), sizes, and its values.

    ``hook_points`` holds one place per way the forward can reach the value (a prompt,
    a decoding step); ``missing`` the reason for each value that is not there; ``prompt_only`` are
    values that a decoding step, which runs other code, does not hold.
    """

    name: str
    module: str
    sizes: dict[str, int]
    hook_points: dict[str, tuple[HookPoint, ...]]
    missing: dict[str, Unavailability]
    details: HostDetails
    prompt_only: frozenset[str] = frozenset()

    @property
    def part(self) -> bool:
        """Whether it is a part of the block's own forward, without a module."""
        return bool(self.hook_points) and not self.module and self.name not in ("layers", "model")


@dataclass(frozen=True)
class BlockAnatomy:
    """One kind of block: the blocks that are so, their hosts, what they add, and the order of reading, which a decoding step may have of its own.

    ``steps`` is what the block does to its stream, and ``mid`` how many of them ``layer_mid`` has behind it, None where it is not there.
    """

    layers: tuple[int, ...]
    hosts: dict[str, HostAnatomy]
    sublayers: tuple[Sublayer, ...]
    order: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...] = ()
    mid: int | None = None
    step_order: tuple[tuple[str, str], ...] = ()

    def passes(self, step: bool = False) -> tuple[tuple[str, str], ...]:
        """Host and name of every value in the order the forward passes them: of a prompt, or of a decoding step."""
        return self.step_order if step and self.step_order else self.order

    @property
    def normed(self) -> tuple[Sublayer, Sublayer | None]:
        """The sublayers whose norms attention_norm_output and mlp_norm_output are of."""
        return first_and_second(self.sublayers)


@dataclass
class Anatomy:
    """What discovery found out about a model.

    ``norm`` is the last norm of the stream before the head, if any, else ``no_norm`` says why, and ``norm_turn`` which of its
    calls in a forward that is, from 0, None where it makes one; ``head_reads_norm`` is whether the head is called
    with its very output (the last block's, without one); ``head_is_last`` whether the head's output is the logits;
    ``embedding_fits`` whether the embedding is as wide as the stream; ``passable`` whether blocks can be left out;
    ``masked`` whether a run on shapes alone has to be given an attention mask.

    A block that runs twice in a forward is noticed on a model of up to `_SMALL` parameters wherever it stands; on a
    larger one where it is the first of its kind.
    """

    backbone: Backbone
    norm: str | None
    blocks: list[BlockAnatomy]
    head_is_last: bool
    head_reads_norm: bool = True
    embedding_fits: bool = True
    no_norm: Unavailability | None = None
    norm_turn: int | None = None
    masked: bool = False
    passable: bool = True

    @property
    def names(self) -> dict[str, str]:
        """The standard names of what is around the blocks, and of the blocks, with their paths."""
        found = {
            "embed_tokens": self.backbone.embedding,
            "layers": self.backbone.blocks,
            "lm_head": self.backbone.head,
        }
        return found if self.norm is None else {**found, "norm": self.norm}

    @property
    def width(self) -> int:
        """How wide the stream is."""
        return self.blocks[0].hosts["layers"].sizes["hidden_size"]

    def block(self, layer: int) -> BlockAnatomy:
        return next(block for block in self.blocks if layer in block.layers)
