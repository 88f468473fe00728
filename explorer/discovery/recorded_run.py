"""One recorded run of a model: a prompt and a decoding step, from which everything else is read.

Building a checkpoint on the meta device and running it once shows nearly everything that can be
known of it without weights. So it runs once: `record_run.recorded_run` returns a model's
`RecordedRun` and makes it on the first call. Discovery, traits, the counts of parameters and
caches, and the check of inferred types read that record. What else is needed of a run is added
here; nobody runs the model again for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from explorer.discovery.backbone import Backbone
from explorer.discovery.trace_graph import Call, TraceGraph

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CachedTensor(NamedTuple):
    """One tensor of the cache.

    layer: index in the cache, None where the cache has no list of layers.
    name: its attribute there; a dot and a key or index follow where that holds several tensors.
    writer: path of the module that was running when it was written, "" where that is not known.
    """

    layer: int | None
    name: str
    tensor: torch.Tensor
    writer: str


@dataclass
class RecordedForward:
    """One forward of a recorded run: the prompt, or the decoding step after it.

    batch, seq: the shape of the token ids.
    output: what the model returned.
    blocks: operations and calls inside the first block of each kind, calls of functions and
        assignments in the modeling code included; of the second block of each kind, calls only.
    whole: every operation that ran and every call of a module; the model's own has the path "".
        A block that did not run has a call too, with its arguments and what was returned for it.
    writers: by index in the cache and attribute, the path of the module that wrote there.
    cache: the tensors in the cache after this forward.
    windows: by index in the cache, the sliding window of the layer there, None where it has none.
    held: by module path and attribute, the tensors of two axes or more that modules keep for the
        next call themselves, which they did not have before the run.
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
        """Yield the path and the call of every module that ran, in the order the calls began."""
        return ((call.module, call) for call in self.whole.calls)

    def call(self, path: str) -> Call | None:
        """Return the first call of the module at ``path``, None where it did not run."""
        return next((call for call in self.whole.calls if call.module == path), None)


@dataclass
class RecordedRun:
    """A model's run on a prompt and, where the model returns a cache, on one decoding step.

    model: the model that ran. On the meta device its tensors only have shapes and dtypes.
    backbone: its embedding, block list and head; None where it has no single block list.
    kinds: indices of equal blocks, in order of first appearance (see `backbone.equal_blocks`).
    ran: the blocks that ran: the first two of each kind. Any other block was replaced by one that
        returns what the last equal block before it returned. All blocks ran where the forward fails
        that way or calls a block more than once.
    masked: whether the model was given an attention mask.
    asks_numbers: whether the forward asks for numbers on the meta device (see `KnownNumbers`).
    prompt, step: the two forwards. ``step`` is None where the model returned no cache, or where the
        step failed with ``step_error``.
    """

    model: PreTrainedModel
    backbone: Backbone | None
    kinds: list[tuple[int, ...]]
    ran: tuple[int, ...]
    masked: bool
    prompt: RecordedForward
    step: RecordedForward | None = None
    step_error: Exception | None = None
    asks_numbers: bool = False

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
        """Return the path of a block from the root of the model."""
        assert self.backbone is not None
        return f"{self.backbone.blocks}.{layer}"

    def equal_ran(self, layer: int) -> int:
        """Return the last block up to ``layer`` that ran and is equal to it."""
        group = next(group for group in self.kinds if layer in group)
        return max(one for one in group if one in self.ran and one <= layer)

    def visits(self, layer: int) -> int:
        """Return how often the prompt's forward called block ``layer``."""
        path = self.block_path(layer)
        return sum(call.module == path for call in self.prompt.whole.calls)


def named_tensors(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested mappings and sequences, with names made of keys and indices.

    depth: how deep the nesting is followed.
    """
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and isinstance(value, Mapping | tuple | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in pairs:
            yield from named_tensors(f"{name}.{key}" if name else str(key), one, depth - 1)


@lru_cache(maxsize=4096)
def _signature(kind: type) -> inspect.Signature:
    return inspect.signature(getattr(kind, "forward"))  # noqa: B009  only modules have one


def named_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of a module's call by the parameter names of its forward."""
    try:
        given = dict(_signature(type(call.fn)).bind(call.fn, *call.args, **call.kwargs).arguments)
    except TypeError:
        return {"input": call.args, **call.kwargs}
    given.pop("self", None)
    return given
