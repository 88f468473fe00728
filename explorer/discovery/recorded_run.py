"""One run of a built model, recorded: a prompt and a decoding step, of which everything else is read.

Building a checkpoint on the meta device and running it once tells nearly all there is to know of it
without weights. So it is run once: `record_run.recorded_run` gives a model's `RecordedRun`, making it on
the first call. Discovery, traits, the counts of parameters and caches, and the check of inferred types
read that record; whoever needs something more of the run adds it here instead of running the model again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from explorer.discovery.backbone import Backbone
from explorer.discovery.trace_graph import Call, TraceGraph


class CachedTensor(NamedTuple):
    """One tensor that is kept for the next call.

    layer: index in the cache, None where the cache has no list of layers. name: its attribute there,
    with the key or index behind a dot where the attribute holds several. writer: path of the module
    that was running when it was written, "" where it was not seen.
    """

    layer: int | None
    name: str
    tensor: torch.Tensor
    writer: str


@dataclass
class RecordedForward:
    """One forward of a recorded run: the prompt, or the decoding step after it.

    batch, seq: the lengths of the token ids it was called with.
    output: what the model returned.
    blocks: operations and calls inside the first block of each kind, the calls down to the functions and
        assignments of the modeling code; of the second block of each kind the calls alone.
    whole: every operation that ran and every call of a module, the model's own (path "") among them.
        Blocks that did not run have a call with what they were given and what they handed on.
    writers: by index in the cache and attribute, the path of the module that wrote there.
    cache: the tensors in the cache after this forward.
    windows: by index in the cache, the sliding window of the layer there, None where it has none.
    held: by module path and attribute, the tensors that modules themselves keep for the next call:
        those a module did not have before, of two axes or more.
    """

    batch: int
    seq: int
    output: Any
    blocks: TraceGraph
    whole: TraceGraph
    writers: dict[tuple[int, str], str] = field(default_factory=dict)
    cache: tuple[CachedTensor, ...] = ()
    windows: tuple[int | None, ...] = ()
    held: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def module_calls(self) -> Iterator[tuple[str, Call]]:
        """The path and the call of every module that ran, in the order the calls began."""
        return ((call.module, call) for call in self.whole.calls)

    def call(self, path: str) -> Call | None:
        """The first call of the module at ``path``, None where it did not run."""
        return next((call for call in self.whole.calls if call.module == path), None)


@dataclass
class RecordedRun:
    """A model run once on a prompt and, where it hands on something to go on from, one decoding step.

    model: the model that ran. On the meta device its tensors have shapes and dtypes alone.
    backbone: its embedding, block list and head; None where it has no single block list.
    kinds: indices of equal blocks, in order of first appearance (`backbone.equal_blocks`).
    ran: the blocks that ran, the first two of each kind. Each of the others handed on what the last
        equal block before it returned; where the forward does not go through that way, all ran.
    masked: whether it had to be given an attention mask.
    prompt, step: the two forwards; step is None where nothing was handed on, or where it failed with
        ``step_error``.
    """

    model: torch.nn.Module
    backbone: Backbone | None
    kinds: list[tuple[int, ...]]
    ran: tuple[int, ...]
    masked: bool
    prompt: RecordedForward
    step: RecordedForward | None = None
    step_error: Exception | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has no record: it may be changed."""
        return

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Nor has a model that was saved and loaded."""
        return type(None), ()

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first block of each kind."""
        return tuple(group[0] for group in self.kinds)

    @property
    def blocks(self) -> torch.nn.ModuleList:
        """The model's blocks; an empty list where it has no single block list."""
        if self.backbone is None:
            return torch.nn.ModuleList()
        found = self.model.get_submodule(self.backbone.blocks)
        assert isinstance(found, torch.nn.ModuleList)
        return found

    def block_path(self, layer: int) -> str:
        """The path of a block from the root of the model."""
        assert self.backbone is not None
        return f"{self.backbone.blocks}.{layer}"

    def equal_ran(self, layer: int) -> int:
        """The last block up to ``layer`` that ran and is equal to it: itself where it ran."""
        group = next(group for group in self.kinds if layer in group)
        return max(one for one in group if one in self.ran and one <= layer)

    def visits(self, layer: int) -> int:
        """How often the prompt's forward called block ``layer``."""
        path = self.block_path(layer)
        return sum(call.module == path for call in self.prompt.whole.calls)


def named_tensors(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a nest of mappings and sequences ``depth`` deep, each with a name: keys and indices behind dots."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and isinstance(value, Mapping | tuple | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in pairs:
            yield from named_tensors(f"{name}.{key}" if name else str(key), one, depth - 1)


@lru_cache(maxsize=4096)
def _signature(kind: type) -> inspect.Signature:
    return inspect.signature(kind.forward)  # pyright: ignore[reportAttributeAccessIssue]  of a module class


def named_arguments(call: Call) -> dict[str, Any]:
    """What a module was called with, by the names its forward gives its parameters."""
    try:
        given = dict(_signature(type(call.fn)).bind(call.fn, *call.args, **call.kwargs).arguments)
    except TypeError:
        return {"input": call.args, **call.kwargs}
    given.pop("self", None)
    return given
