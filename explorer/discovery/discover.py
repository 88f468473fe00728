"""Discovery: where each standard value of a model is, read off one recorded run of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace

import torch

from explorer import vocabulary
from explorer.discovery.anatomy import Anatomy, BlockAnatomy, HostAnatomy, without
from explorer.discovery.backbone import (
    Backbone,
    PassthroughBlock,
    find_backbone,
    stream_alone,
    swapped_blocks,
)
from explorer.discovery.block import find_block
from explorer.discovery.candidates import HostFindings, TensorCandidate
from explorer.discovery.details import AttentionOperations, HostDetails, Step
from explorer.discovery.final_norm import after_the_blocks
from explorer.discovery.hook_point import HookPoint
from explorer.discovery.record_run import record_run, recorded_run, remember
from explorer.discovery.recorded_run import RecordedRun
from explorer.discovery.residual import SCALES, CannotTrace, residual_input
from explorer.discovery.sublayer import BlockFindings
from explorer.meta_device import mask_arguments, without_padding_warning
from explorer.vocabulary.availability import NOT_FOUND, not_present, not_traced


def discover(twin: torch.nn.Module) -> Anatomy:
    """Find the standard values of ``twin``, a model that no engine has wrapped yet: on the meta device, or a small one.

    The model is run once (see `explorer.discovery.recorded_run`) and left as it was found, unless
    its experts run in a loop: such a twin must not be used for anything else.

    Raises NotADecoder when the model has no list of blocks between an embedding and a head,
    CannotTrace when a block is not its input plus what mixers and MLPs return, and whatever the
    model's own forward raises.
    """
    if getattr(twin.config.get_text_config(), "_experts_implementation", None) == "eager":
        _choose_no_expert(twin)
    run = recorded_run(twin)
    if run.backbone is None:
        find_backbone(twin)  # raises with the reason
    for layer in range(len(run.blocks)):
        if (count := run.visits(layer)) != 1:
            path = run.block_path(layer)
            raise CannotTrace(
                f"{path} runs {count} times in a forward"
                if count
                else f"{path} does not run in a forward over token ids alone"
            )
    first, second = _findings(run)
    scaled = any(
        step.kind == "scale" and not isinstance(step.by, str)
        for finds in first
        for step in finds.steps
    )
    if scaled and _own_factors(run):
        run = remember(twin, record_run(twin, run.masked, every_block=True, distinct=True))
        first, second = _findings(run)
    return _anatomy(run, first, second)


def _findings(run: RecordedRun) -> tuple[list[BlockFindings], list[BlockFindings | None]]:
    """What is found in the first block of each kind: in the prompt, and in the decoding step where it runs other code."""
    paths = [run.block_path(layer) for layer in run.firsts]
    first = [find_block(run.prompt.blocks, path) for path in paths]
    batch, seq = run.prompt.batch, run.prompt.seq
    for path in paths:
        shape = tuple(residual_input(run.prompt.blocks.module(path)).shape)
        if len(shape) != 3 or shape[:2] != (batch, seq):
            raise CannotTrace(
                f"the stream entering {path} is {list(shape)}, "
                f"not one vector for each of {batch} x {seq} tokens"
            )
    others = {host for finds in first for host in finds.hosts} - {"self_attn"}
    if "cache" not in run.prompt.output or not any(vocabulary.HOSTS[host].mixer for host in others):
        return first, [None] * len(paths)
    if run.step is None:
        raise run.step_error or CannotTrace("the model makes no decoding step with its own cache")
    return first, [find_block(run.step.blocks, path) for path in paths]


def _own_factors(run: RecordedRun) -> bool:
    """Whether equal blocks multiply with different numbers, so that each has to be looked at."""

    def factors(layer: int) -> list[tuple[str, tuple[float, ...]]]:
        call, graph = run.prompt.call(run.block_path(layer)), run.prompt.whole
        assert call is not None
        ops = (graph.ops[at] for at in range(call.start, call.stop))
        return [(op.name, op.numbers) for op in ops if op.name in SCALES and op.numbers]

    return any(
        factors(group[0]) != factors(group[1])
        for group in run.kinds
        if len(group) > 1 and group[1] in run.ran
    )


def _anatomy(
    run: RecordedRun, first: Sequence[BlockFindings], second: Sequence[BlockFindings | None]
) -> Anatomy:
    """The anatomy that follows from what was found in the first block of each kind."""
    base, twin = run.backbone, run.model
    assert base is not None
    sizes = {"batch": run.prompt.batch, "seq": run.prompt.seq, "step": 1}
    shared = _shared(twin)
    kinds: dict[object, BlockAnatomy] = {}
    for group, prompt, step in zip(run.kinds, first, second, strict=True):
        block = _block(group, prompt.path, prompt, step, sizes, shared)
        # Blocks that differ in a setting that shows nowhere in what was found are one kind.
        same = kinds.setdefault(_comparable(block, prompt.path), block)
        if same is not block:
            layers = tuple(sorted((*same.layers, *block.layers)))
            kinds[_comparable(block, prompt.path)] = replace(same, layers=layers)
    found = list(kinds.values())
    width = found[0].hosts["layers"].sizes["hidden_size"]
    ending = after_the_blocks(run.prompt.whole, base)
    norm, turn = ending.norm()
    anatomy = Anatomy(
        base,
        norm,
        found,
        head_is_last=ending.head is run.prompt.output.logits,
        head_reads_norm=ending.head_reads(norm),
        embedding_fits=twin.get_input_embeddings().weight.shape[1] == width,
        no_norm=None
        if norm is not None
        else not_present("this model has no norm between the last block and the head"),
        norm_turn=turn,
        masked=run.masked,
    )
    anatomy.passable = _passable(twin, base, found, run.masked)
    return anatomy


def _comparable(value: object, path: str) -> object:
    """What was found of the block at ``path``, as something that is equal for blocks that are: without tensors and positions in the run."""
    if isinstance(value, Step):
        return value.kind, _comparable(value.by, path)
    if isinstance(value, TensorCandidate | AttentionOperations):
        return None
    if isinstance(value, str):
        return value.removeprefix(path) if value.startswith(f"{path}.") else value
    if is_dataclass(value):
        own = [one.name for one in fields(value) if one.name != "layers"]
        return type(value), tuple(_comparable(getattr(value, name), path) for name in own)
    if isinstance(value, dict):
        return tuple((key, _comparable(one, path)) for key, one in value.items())
    if isinstance(value, tuple | list):
        return tuple(_comparable(one, path) for one in value)
    return value


def _passable(
    twin: torch.nn.Module, base: Backbone, found: Sequence[BlockAnatomy], masked: bool
) -> bool:
    """Whether a block runs where all others return the residual stream alone, and keep nothing for it."""
    blocks = list(twin.get_submodule(base.blocks))
    width = found[0].hosts["layers"].sizes["hidden_size"]
    entering = torch.zeros(1, 3, width, dtype=twin.dtype, device=twin.device)
    ids = torch.zeros(1, 3, dtype=torch.long, device=twin.device)
    passing = list(blocks)
    for kind in found:
        left = stream_alone(entering, kind.hosts["layers"].details.returns)
        for layer in kind.layers:
            passing[layer] = PassthroughBlock(blocks[layer], lambda *_, left=left: left)
    try:
        with torch.no_grad(), without_padding_warning(twin):
            for layer in (layer for kind in found for layer in kind.layers[:2]):
                swapped = [*passing[:layer], blocks[layer], *passing[layer + 1 :]]
                with swapped_blocks(twin, base.blocks, swapped):
                    twin(ids, **mask_arguments(ids, masked))
    except (TypeError, AttributeError, LookupError, ValueError, RuntimeError):  # whatever it misses
        return False
    return True


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

    made: dict[type, type] = {}
    for module in twin.modules():
        kind = type(module)
        if hasattr(module, "_is_expert_parallel"):  # what transformers' own experts classes set
            if kind not in made:
                own = {"forward": forward, "__module__": kind.__module__}
                made[kind] = type(kind.__name__, (kind,), own)
            module.__class__ = made[kind]


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
        layers, hosts, tuple(prompt.sublayers), order, tuple(prompt.steps), prompt.mid_step, stepped
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
        (spot.time, list(vocabulary.BY_HOST[name]).index(value), name, value)
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
        place = spot.hook_point(value.axes, sizes) if spot is not None else None
        own = sizes
        if place is None and (width := _own_width(value, spot)) is not None:
            own = {**sizes, "hidden_size": width}
            place = spot.hook_point(value.axes, own)
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
            place = other.hook_point(value.axes, extents) if other is not None else None
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
        elif (
            value.derived
            and name in vocabulary.MIXERS
            and prompt_only & set(vocabulary.MIXERS[name].replayed)
        ):
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
    if not value.own_width or spot is None or spot.optional_tensor is None or spot.tensor.dim() < 2:
        return None
    return spot.tensor.shape[-1]


def _relative(place: HookPoint, path: str) -> HookPoint:
    """The place with its module named from the block, so that one finding serves every equal block."""
    return replace(place, module=place.module.removeprefix(path).lstrip("."))
