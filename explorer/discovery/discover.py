"""Discovery: where each standard value of a model is, read off one recorded run of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from explorer import vocabulary
from explorer.discovery.anatomy import Anatomy, BlockAnatomy
from explorer.discovery.backbone import (
    Backbone,
    PassthroughBlock,
    blocks_at,
    equal_blocks,
    find_backbone,
    stream_alone,
    swapped_blocks,
)
from explorer.discovery.block import find_block
from explorer.discovery.block_anatomy import block_anatomy
from explorer.discovery.candidates import TensorCandidate
from explorer.discovery.details import AttentionOperations, Step
from explorer.discovery.final_norm import after_the_blocks
from explorer.discovery.record_run import record_run, recorded_run, remember
from explorer.discovery.recorded_run import RecordedRun
from explorer.discovery.residual import SCALES, CannotTrace, residual_input
from explorer.discovery.sublayer import BlockFindings
from explorer.discovery.trace_recorder import Recorder
from explorer.known_numbers import KnownNumbers
from explorer.meta_device import cache_of, mask_arguments, without_padding_warning
from explorer.vocabulary import reasons

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def discover(model: PreTrainedModel) -> Anatomy:
    """Find the standard values of ``model``, a model on the meta device, or a small one.

    The engine must not have wrapped it. It is run once (see `explorer.discovery.recorded_run`) and
    left as it was found, unless its experts run in a loop: such a model must not be used again.

    Raises NotADecoder when the model has no list of blocks between an embedding and a head,
    CannotTrace when a block is not its input plus what mixers and MLPs return, and whatever the
    model's own forward raises.
    """
    if getattr(model.config.get_text_config(), "_experts_implementation", None) == "eager":
        _choose_no_expert(model)
    run = recorded_run(model)
    if run.backbone is None:
        find_backbone(model)  # raises with the reason
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
        run = remember(model, record_run(model, run.masked, every_block=True, distinct=True))
        first, second = _findings(run)
    return _anatomy(run, first, second)


def _findings(run: RecordedRun) -> tuple[list[BlockFindings], list[BlockFindings | None]]:
    """Return what is found in the first block of each kind, in the prompt and in the decoding step.

    The step is searched where a mixer is not softmax attention, since that runs other code there.
    """
    paths = [run.block_path(layer) for layer in run.firsts]
    first = [find_block(run.prompt.blocks, path) for path in paths]
    batch, seq = run.prompt.batch, run.prompt.seq
    for path in paths:
        call = run.prompt.blocks.module(path)
        assert call is not None  # else it was refused above
        shape = tuple(residual_input(call).shape)
        if len(shape) != 3 or shape[:2] != (batch, seq):
            raise CannotTrace(
                f"the stream entering {path} is {list(shape)}, "
                f"not one vector for each of {batch} x {seq} tokens"
            )
    others = {host for finds in first for host in finds.hosts} - {"self_attn"}
    if cache_of(run.prompt.output) is None or not any(
        vocabulary.HOSTS[host].mixer for host in others
    ):
        return first, [None] * len(paths)
    if run.step is None:
        raise run.step_error or CannotTrace("the model makes no decoding step with its own cache")
    return first, [find_block(run.step.blocks, path) for path in paths]


def _own_factors(run: RecordedRun) -> bool:
    """Return whether equal blocks multiply with different numbers, so that all are searched."""

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
    """Return the anatomy, from what was found in the first block of each kind."""
    base, model = run.backbone, run.model
    assert base is not None
    sizes = {"batch": run.prompt.batch, "seq": run.prompt.seq, "step": 1}
    shared = _shared(model)
    equal = equal_blocks(run.blocks, model.config)
    kinds: dict[object, BlockAnatomy] = {}
    for group, prompt, step in zip(run.kinds, first, second, strict=True):
        block = block_anatomy(group, prompt, step, sizes, shared)
        # Where every block was searched, those of which the same was found are one kind again.
        of = next(at for at, layers in enumerate(equal) if group[0] in layers)
        key = of, _comparable(block, prompt.path)
        same = kinds.setdefault(key, block)
        if same is not block:
            layers = tuple(sorted((*same.layers, *block.layers)))
            kinds[key] = replace(same, layers=layers)
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
        embedding_fits=cast(torch.nn.Embedding, model.get_input_embeddings()).weight.shape[1]
        == width,
        why_no_norm=None if norm is not None else reasons.NO_FINAL_NORM,
        norm_call=turn,
        masked=run.masked,
    )
    anatomy.blocks_skippable = _blocks_skippable(run, base, found)
    return anatomy


def _comparable(value: object, path: str) -> object:
    """Return what was found of the block at ``path`` without its path, tensors and operations."""
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


def _blocks_skippable(run: RecordedRun, base: Backbone, found: Sequence[BlockAnatomy]) -> bool:
    """Return whether a block runs where all others return the residual stream and nothing else."""
    model, numbers = run.model, KnownNumbers() if run.asks_numbers else nullcontext()
    # With the calls recorded, torch's functions run in place of kernels, as they did before.
    ran = [run.block_path(layer) for kind in found for layer in kind.layers[:2]]
    blocks = list(blocks_at(model, base.blocks))
    width = found[0].hosts["layers"].sizes["hidden_size"]
    entering = torch.zeros(1, 3, width, dtype=model.dtype, device=model.device)
    passing = list(blocks)
    for kind in found:
        left = stream_alone(entering, kind.hosts["layers"].details.returns)
        for layer in kind.layers:
            passing[layer] = PassthroughBlock(blocks[layer], lambda *_, left=left: left)
    try:
        with (
            torch.no_grad(),
            without_padding_warning(model),
            numbers,
            Recorder(model, called=ran, operations=False),
        ):
            for layer in (layer for kind in found for layer in kind.layers[:2]):
                swapped = [*passing[:layer], blocks[layer], *passing[layer + 1 :]]
                ids = torch.zeros(1, 3, dtype=torch.long, device=model.device)
                with swapped_blocks(model, base.blocks, swapped):
                    model(ids, **mask_arguments(ids, run.masked))
    except (TypeError, AttributeError, LookupError, ValueError, RuntimeError):  # whatever it misses
        return False
    return True


def _choose_no_expert(model: PreTrainedModel) -> None:
    """Let the loop over the selected experts run on the meta device.

    Which experts are selected is data, and the meta device has none. The loop starts from zeros in
    the shape of its input and adds the output of each selected expert; with none it returns the
    zeros. They are made of the routing's tensors too, as the loop's output is.
    """

    def forward(
        self: torch.nn.Module,
        hidden_states: torch.Tensor,
        *routing: torch.Tensor,
        **options: object,
    ) -> torch.Tensor:
        zeros = torch.zeros_like(hidden_states)
        given = [one for one in (*routing, *options.values()) if isinstance(one, torch.Tensor)]
        for tensor in given:
            zeros = zeros + (tensor.sum() * 0).to(hidden_states)
        return zeros

    made: dict[type, type] = {}
    for module in model.modules():
        kind = type(module)
        if hasattr(module, "_is_expert_parallel"):  # what transformers' own experts classes set
            if kind not in made:
                own = {"forward": forward, "__module__": kind.__module__}
                made[kind] = type(kind.__name__, (kind,), own)
            module.__class__ = made[kind]


def _shared(model: PreTrainedModel) -> set[str]:
    """Return the paths of modules that are in the model more than once."""
    paths: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(name)
    return {name for names in paths.values() if len(names) > 1 for name in names}
