"""Discovery: run a shape-only twin of a model once and say where each of its standard values is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from explorer import vocabulary
from explorer.discovery.backbone import Backbone, PassthroughBlock, find_backbone, kinds
from explorer.discovery.block import (
    BlockFindings,
    CannotTrace,
    Sublayer,
    find_block,
    first_and_second,
)
from explorer.discovery.candidates import HostFindings, TensorCandidate
from explorer.discovery.details import HostDetails, Step
from explorer.discovery.final_norm import watched
from explorer.discovery.hook_point import HookPoint
from explorer.discovery.residual import stream
from explorer.discovery.trace_graph import record_graph
from explorer.meta_device import (
    mask_arguments,
    probe_lengths,
    with_first_blocks,
    without_padding_warning,
)
from explorer.vocabulary.availability import (
    NOT_FOUND,
    Unavailability,
    not_in_block,
    not_present,
    not_traced,
)

#: Parameters of a model of which a whole forward more is nothing.
_SMALL = 10_000_000


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


def discover(twin: torch.nn.Module, alike: bool = True) -> Anatomy:
    """Find the standard values of ``twin``, a model that no engine has wrapped yet: on the meta device in bfloat16, or a small one.

    alike: whether blocks of equal modules are taken for equal; where the forward multiplies with numbers, which may be a
    block's own, they are not.
    It runs shortened to the blocks that differ and is left as it was found, unless its experts
    run in a loop: such a twin must not be used for anything else.

    Raises NotADecoder when the model has no list of blocks between an embedding and a head, CannotFollow
    when a block is not its input plus what mixers and MLPs return, and whatever the model's own forward raises.
    """
    try:
        return _discover(twin, alike, masked=False)
    except (NotImplementedError, RuntimeError):
        if twin.device.type != "meta":
            raise
        # Some look for packed sequences among the positions where no mask is given, and shapes alone have none to look at.
        with suppress(NotImplementedError, RuntimeError):
            return _discover(twin, alike, masked=True)
        raise


def _discover(twin: torch.nn.Module, alike: bool, masked: bool) -> Anatomy:
    """What `discover` finds, the model called with an attention mask of ones where ``masked``."""
    base = find_backbone(twin, partial(_ran, masked=masked))
    blocks = twin.get_submodule(base.blocks)
    groups = kinds(blocks) if alike else [(layer,) for layer in range(len(blocks))]
    depth = max(group[0] for group in groups) + 1
    if getattr(twin.config.get_text_config(), "_experts_implementation", None) == "eager":
        _choose_no_expert(twin)
    paths = [f"{base.blocks}.{group[0]}" for group in groups]
    batch, seq = probe_lengths(twin)
    named = twin.config.get_text_config().to_dict().get("num_hidden_layers", len(blocks))
    if (
        named != len(blocks) or twin.num_parameters() < _SMALL
    ):  # some go through their blocks more than once
        every = [f"{base.blocks}.{layer}" for layer in range(len(blocks))]
        for path, count in _runs(twin, every, masked).items():
            if count != 1:
                raise CannotTrace(
                    f"{path} runs {count} times in a forward"
                    if count
                    else f"{path} does not run in a forward over token ids alone"
                )
    ids = (
        torch.arange(batch * seq, device=twin.device).view(batch, seq)
        % twin.config.get_text_config().vocab_size
    )
    with (
        torch.no_grad(),
        without_padding_warning(twin),
        with_first_blocks(twin, base.blocks, depth),
    ):
        with record_graph(twin, paths) as prompt, watched(twin, base) as ending:
            out = twin(ids, use_cache=True, **mask_arguments(ids, masked))
        norm, turn = ending.norm()
        first = [find_block(prompt, path) for path in paths]
        for path in paths:
            shape = tuple(stream(prompt.module(path)).shape)
            if len(shape) != 3 or shape[:2] != (batch, seq):
                raise CannotTrace(
                    f"the stream entering {path} is {list(shape)}, not one vector for each of {batch} x {seq} tokens"
                )
        second: list[BlockFindings | None] = [None] * len(paths)
        if "cache" in out and any(
            vocabulary.HOSTS[host].mixer and host != "self_attn"
            for finds in first
            for host in finds.hosts
        ):
            with record_graph(twin, paths) as step:
                twin(ids[:, :1], cache=out.cache, use_cache=True)
            second = [find_block(step, path) for path in paths]
    if alike and any(
        step.kind == "scale" and not isinstance(step.by, str)
        for finds in first
        for step in finds.steps
    ):
        return _discover(twin, False, masked)
    sizes = {"batch": batch, "seq": seq, "step": 1}
    shared = _shared(twin)
    found = [
        _block(group, path, a, b, sizes, shared)
        for group, path, a, b in zip(groups, paths, first, second)
    ]
    width = first[0].hosts["layers"].sizes["hidden_size"]
    fits = twin.get_input_embeddings().weight.shape[1] == width
    reason = (
        None
        if norm is not None
        else not_present("this model has no norm between the last block and the head")
    )
    anatomy = Anatomy(
        base,
        norm,
        found,
        ending.head is out.logits,
        ending.head_reads(norm),
        fits,
        reason,
        turn,
        masked=masked,
    )
    anatomy.passable = _passable(twin, base, found, masked)
    return anatomy


def _passable(
    twin: torch.nn.Module, base: Backbone, found: list[BlockAnatomy], masked: bool
) -> bool:
    """Whether the forward goes on where blocks hand on the stream alone, and nothing of what else they return or keep for others."""
    holder, blocks = (
        twin.get_submodule(base.blocks.rpartition(".")[0]),
        twin.get_submodule(base.blocks),
    )
    ids = torch.zeros(1, 3, dtype=torch.long, device=twin.device)
    stream = torch.zeros(
        1, 3, found[0].hosts["layers"].sizes["hidden_size"], dtype=twin.dtype, device=twin.device
    )
    name = base.blocks.rpartition(".")[2]
    handing = [
        PassthroughBlock(block, stream, kind.hosts["layers"].details.returns)
        for layer, block in enumerate(blocks)
        for kind in found
        if layer in kind.layers
    ]
    try:
        with torch.no_grad(), without_padding_warning(twin):
            for left in (layer for kind in found for layer in kind.layers[:2]):
                setattr(
                    holder,
                    name,
                    torch.nn.ModuleList([*handing[:left], blocks[left], *handing[left + 1 :]]),
                )
                twin(ids, **mask_arguments(ids, masked))
    except (TypeError, AttributeError, LookupError, ValueError, RuntimeError):  # whatever it misses
        return False
    finally:
        setattr(holder, name, blocks)
    return True


def _ran(twin: torch.nn.Module, paths: Sequence[str], masked: bool = False) -> list[str]:
    """Which of the modules at ``paths`` a forward over token ids runs, and runs once."""
    return [path for path, count in _runs(twin, paths, masked).items() if count == 1]


def _runs(twin: torch.nn.Module, paths: Sequence[str], masked: bool) -> dict[str, int]:
    """How often a forward over token ids runs each of the modules at ``paths``."""
    counts = dict.fromkeys(paths, 0)
    hooks = [
        twin.get_submodule(path).register_forward_hook(
            lambda *_, path=path: counts.update({path: counts[path] + 1})
        )
        for path in paths
    ]
    ids = torch.zeros(1, 3, dtype=torch.long, device=twin.device)
    try:
        with torch.no_grad(), without_padding_warning(twin):
            twin(ids, **mask_arguments(ids, masked))
    finally:
        for hook in hooks:
            hook.remove()
    return counts


def _choose_no_expert(twin: torch.nn.Module) -> None:
    """Let the loop over the chosen experts run on shapes alone.

    Which experts are chosen is data, and the meta device has none. The loop starts from zeros in the
    shape of its input and adds each chosen expert's tokens; with none chosen it returns the zeros.
    They are made of the routing's tensors too, as what the loop returns is.
    """

    def forward(
        self: torch.nn.Module,
        hidden_states: torch.Tensor,
        *routing: torch.Tensor,
        **options: object,
    ) -> torch.Tensor:
        chosen = sum(
            tensor.sum()
            for tensor in (*routing, *options.values())
            if isinstance(tensor, torch.Tensor)
        )
        return torch.zeros_like(hidden_states) + (chosen * 0).to(hidden_states)

    for module in twin.modules():
        if hasattr(module, "_is_expert_parallel"):  # what transformers' own experts classes set
            kind = type(module)
            module.__class__ = type(
                kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__}
            )


def _shared(twin: torch.nn.Module) -> set[str]:
    """Paths of modules that stand in the model more than once, so that what passes in one passes in all."""
    paths: dict[int, list[str]] = {}
    for name, module in twin.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(name)
    return {name for names in paths.values() if len(names) > 1 for name in names}


def _block(
    layers: tuple[int, ...],
    path: str,
    prompt: BlockFindings,
    step: BlockFindings | None,
    call: dict[str, int],
    shared: set[str],
) -> BlockAnatomy:
    hosts = {}
    for name, finds in prompt.hosts.items():
        again = step.hosts.get(name) if step is not None else None
        for found in (finds, again) if again is not None else (finds,):
            _apart(found, shared)
        hosts[name] = _host(name, path, finds, again, call, prompt.visited)
    order, stepped = _order(prompt, hosts), _order(step, hosts) if step is not None else ()
    for name in vocabulary.HOSTS:
        if name != "model" and name not in hosts:
            missing = dict.fromkeys(vocabulary.BY_HOST[name], without(name, prompt.hosts))
            if (
                name == "shared_experts"
                and "mlp" in prompt.hosts
                and "shared_expert_output" in prompt.hosts["mlp"].candidates
            ):
                missing = dict.fromkeys(
                    missing,
                    not_present(
                        "this block's shared expert is a part of its MLP, no module of its own"
                    ),
                )
            hosts[name] = HostAnatomy(name, "", {}, {}, missing, HostDetails())
    return BlockAnatomy(
        layers, hosts, tuple(prompt.sublayers), order, tuple(prompt.steps), prompt.mid, stepped
    )


def _apart(finds: HostFindings, shared: set[str]) -> None:
    """Where a value passes in a module that other blocks have too: read it at this block's own call of that module, or not at all."""

    def within(path: str) -> bool:
        return any(path == other or path.startswith(f"{other}.") for other in shared)

    for value, spot in list(finds.candidates.items()):
        call = spot.call
        if not within(call.module):
            continue
        if call.made_in is not None and not call.labels and not within(call.made_in[0]):
            finds.candidates[value] = replace(
                spot, call=replace(call, module=call.made_in[0], labels=call.made_in[1])
            )
        else:
            finds.missing[value] = not_traced(
                "it is handed over in a module that other blocks share"
            )
            del finds.candidates[value]


def _order(finds: BlockFindings, hosts: dict[str, HostAnatomy]) -> tuple[tuple[str, str], ...]:
    """Host and name of every value that has a place, in the order they are passed."""
    passed = [
        (spot.when, list(vocabulary.BY_HOST[name]).index(value), name, value)
        for name, found in finds.hosts.items()
        for value, spot in found.candidates.items()
        if name in hosts and value in hosts[name].hook_points
    ]
    return tuple((name, value) for _, _, name, value in sorted(passed))


def _host(
    name: str,
    path: str,
    finds: HostFindings,
    again: HostFindings | None,
    call: dict[str, int],
    visited: set,
) -> HostAnatomy:
    sizes = {**call, **finds.sizes}
    hook_points: dict[str, tuple[HookPoint, ...]] = {}
    missing, details = dict(finds.missing), finds.details.relative_to(path)
    prompt_only: set[str] = set()
    for value in vocabulary.BY_HOST[name].values():
        if value.derived:
            continue
        spot = finds.candidates.get(value.name)
        place = spot.place(value.axes, sizes) if spot is not None else None
        own = sizes
        if place is None and (width := _own_width(value, spot)) is not None:
            own = {**sizes, "hidden_size": width}
            place = spot.place(value.axes, own)
            details = replace(details, own_widths={**details.own_widths, value.name: width})
        if place is None:
            missing.setdefault(
                value.name,
                not_traced("it was found, but its axes are not the layout's")
                if spot
                else NOT_FOUND,
            )
            continue
        found = [place]
        if again is not None:
            other = again.candidates.get(value.name)
            long = again.sizes.get("key", 0) if value.layout in ("Keys", "Values") else call["step"]
            extents = {
                **sizes,
                **again.sizes,
                "hidden_size": own.get("hidden_size", 0),
                "seq": long,
            }
            place = other.place(value.axes, extents) if other is not None else None
            if (
                place is not None
                and place.call_site != found[0].call_site
                and place.call_site[:2] in visited
            ):
                place = None  # a prompt comes there too, with something else
            found += [place] if place is not None else []
            prompt_only |= {value.name} if place is None else set()
        unique: dict[tuple, HookPoint] = {}
        for one in found:  # where both calls hand it over at one place, that of the prompt, whose axes are all longer than one
            unique.setdefault((one.call_site, one.element), _relative(one, path))
        hook_points[value.name] = tuple(unique.values())
    for value in vocabulary.BY_HOST[name].values():
        if value.derived and value.source not in hook_points:
            missing[value.name] = missing.get(value.source) or not_traced(
                "what it is computed from was not found"
            )
        elif value.fixed and value.name not in details.constants:
            missing[value.name] = NOT_FOUND
        elif value.derived and prompt_only & set(vocabulary.REPLAYS.get(name, ())):
            prompt_only.add(value.name)
    lengths = ("query", "key")
    own = {axis: extent for axis, extent in finds.sizes.items() if axis not in lengths}
    return HostAnatomy(
        name,
        finds.module.removeprefix(path).lstrip("."),
        own,
        hook_points,
        missing,
        details,
        frozenset(prompt_only),
    )


def _own_width(value: vocabulary.Value, spot: TensorCandidate | None) -> int | None:
    """The width of a value that is not on the stream, where what was found has one axis for it."""
    if (
        value.name not in vocabulary.OFF_STREAM
        or spot is None
        or spot.tensor is None
        or spot.tensor.dim() < 2
    ):
        return None
    return spot.tensor.shape[-1]


def _relative(place: HookPoint, path: str) -> HookPoint:
    """The place with its module named from the block, so that one finding serves every equal block."""
    return replace(place, module=place.module.removeprefix(path).lstrip("."))
