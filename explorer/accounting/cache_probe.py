"""What a model keeps between calls and which module keeps it, read off a recorded run.

Whatever lets a token see earlier ones has to keep something of them: softmax attention its keys and
values, any other mixer a state. So the modules that write to the cache are the token mixers of a
model, whatever their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from explorer.discovery.record_run import record_run, recorded_run
from explorer.discovery.recorded_run import RecordedRun

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What a tensor of the cache is, by the attribute it has there.
_KINDS = {
    "keys": "keys",
    "values": "values",
    "conv_states": "convolution",
    "recurrent_states": "recurrent",
}


@dataclass(frozen=True)
class CachedTensor:
    """One tensor that is kept for the next call.

    kind: "keys", "values", "convolution" or "recurrent"; else the attribute's own name.
    shape: begins with the batch; keys and values are [batch kv_heads tokens width].
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class CacheOwner:
    """A token mixer: the module at ``path``, the block it is in, and the tensors it keeps.

    window: how many tokens its attention sees, None where it sees all.
    """

    path: str
    layer: int
    tensors: tuple[CachedTensor, ...]
    window: int | None = None

    @property
    def attends(self) -> bool:
        """Whether it keeps keys, which is what softmax attention does."""
        return any(one.kind == "keys" for one in self.tensors)


@dataclass(frozen=True)
class CacheProbe:
    """What one prompt of ``tokens`` tokens left for the next call, in a model of ``dtype``.

    owners: the modules that keep something, in the order of the blocks. slots: by module path, how
    many integers for each token a module was called with, which are the indices of the experts
    that a token goes to where the module holds the experts.
    """

    owners: tuple[CacheOwner, ...]
    slots: dict[str, int]
    tokens: int
    dtype: torch.dtype


def probe_cache(model: PreTrainedModel) -> CacheProbe:
    """Return what ``model`` keeps after its recorded prompt; raises what its forward raises."""
    return cache_of(recorded_run(model))


def measure_cache(model: PreTrainedModel, tokens: int, batch: int = 1) -> CacheProbe:
    """Run all blocks on a prompt [batch tokens] and return what ``model`` keeps.

    Raises what its forward raises.
    """
    run = record_run(model, None, (batch, tokens), every_block=True, operations=False, step=False)
    return cache_of(run)


def cache_of(run: RecordedRun) -> CacheProbe:
    """Return what the prompt of a recorded run kept; blocks that did not run keep as equal ones."""
    found = [*_in_cache(run), *_in_modules(run)]
    slots = _slots(run)
    for group in run.kinds:
        first = run.block_path(group[0])
        for layer in (layer for layer in group if layer not in run.ran):
            block = run.block_path(layer)
            found += [
                _moved(owner, first, block, layer - group[0], run.prompt.windows)
                for owner in found
                if _within(owner.path, first)
            ]
            slots |= {
                block + path.removeprefix(first): number
                for path, number in slots.items()
                if _within(path, first)
            }
    return CacheProbe(tuple(_outermost(found)), slots, run.prompt.seq, run.model.dtype)


def _in_cache(run: RecordedRun) -> Iterator[CacheOwner]:
    """Yield what each module has written to transformers' cache."""
    kept: dict[tuple[int, str], list[CachedTensor]] = {}
    for layer, name, tensor, writer in run.prompt.cache:
        if layer is not None:
            attribute = name.partition(".")[0]
            one = CachedTensor(_KINDS.get(attribute, attribute), tuple(tensor.shape), tensor.dtype)
            kept.setdefault((layer, writer), []).append(one)
    for (layer, path), tensors in kept.items():
        keys = any(one.kind == "keys" for one in tensors)
        yield CacheOwner(path, layer, tuple(tensors), run.prompt.windows[layer] if keys else None)


def _in_modules(run: RecordedRun) -> Iterator[CacheOwner]:
    """Yield what modules keep themselves."""
    kept: dict[str, list[torch.Tensor]] = {}
    for (path, _), tensor in run.prompt.held.items():
        if tensor.shape[0] == run.prompt.batch:
            kept.setdefault(path, []).append(tensor)
    for path, tensors in kept.items():
        inside = run.model.get_submodule(path).modules()
        widths = {one.kernel_size[-1] for one in inside if isinstance(one, nn.Conv1d)}
        layer = next((int(name) for name in path.split(".") if name.isdigit()), 0)
        yield CacheOwner(
            path,
            layer,
            tuple(
                CachedTensor(
                    "convolution"
                    if {tensor.shape[-1], tensor.shape[-1] + 1} & widths
                    else "recurrent",
                    tuple(tensor.shape),
                    tensor.dtype,
                )
                for tensor in tensors
            ),
        )


def _slots(run: RecordedRun) -> dict[str, int]:
    """Return by module path how many integers for each token a module was called with."""
    batch, seq = run.prompt.batch, run.prompt.seq
    slots: dict[str, int] = {}
    for path, call in run.prompt.module_calls():
        for _, given in call.arguments():
            if (
                isinstance(given, torch.Tensor)
                and given.dtype in (torch.int32, torch.int64)
                and given.shape[:-1] in ((batch, seq), (batch * seq,))
            ):
                slots[path] = given.shape[-1]
    return slots


def _within(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


def _moved(
    owner: CacheOwner, first: str, block: str, by: int, windows: tuple[int | None, ...]
) -> CacheOwner:
    """Return an owner in the block at ``first`` as that in an equal block ``by`` blocks later."""
    layer = owner.layer + by
    window = windows[layer] if owner.attends and layer < len(windows) else None
    return replace(owner, path=block + owner.path.removeprefix(first), layer=layer, window=window)


def _outermost(found: Iterable[CacheOwner]) -> list[CacheOwner]:
    """Return owners in the order of the blocks, joined to the one whose module contains theirs."""
    outer: dict[str, CacheOwner] = {}
    for owner in sorted(found, key=lambda one: one.path.count(".")):
        steps = owner.path.split(".")
        above = (".".join(steps[:count]) for count in range(1, len(steps)))
        path = next((path for path in above if path in outer), owner.path)
        if path in outer:
            one = outer[path]
            joined = (*one.tensors, *owner.tensors)
            outer[path] = replace(one, tensors=joined, window=one.window or owner.window)
        else:
            outer[path] = owner
    return sorted(outer.values(), key=lambda one: one.layer)
