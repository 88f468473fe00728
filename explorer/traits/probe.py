"""What traits are tested on: the recorded run of one model, and the masks of a late token."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from explorer.discovery.anatomy import Anatomy, HostAnatomy
from explorer.discovery.backbone import PassthroughBlock, stream_alone, swapped_blocks
from explorer.discovery.discover import discover
from explorer.discovery.record_run import cached_run, record_run, recorded_run
from explorer.discovery.recorded_run import RecordedRun
from explorer.discovery.trace_graph import Call, tensors
from explorer.meta_device import build_meta, without_padding_warning
from explorer.traits.buffers import Buffers
from explorer.traits.replayable_graph import NoNumbers, ReplayableGraph, recorded

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel

#: The position of a late token: behind any window, and no multiple of one.
FAR = 131_101

#: The most elements of a parameter for which random numbers are drawn.
_SMALL = 1 << 20


class ModelProbe:
    """One loaded model, and a model of shapes alone built like it, whose run is tested.

    ``probed`` is the second one, the loaded one itself where it has no weights. ``anatomy`` is what
    discovery found on it, ``path`` the path of its blocks.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.config = model.hf.config.get_text_config()
        eager = self.config._attn_implementation == "eager"
        # A loop over the selected experts, which transformers' own have, cannot run on shapes.
        expert_loop = self.config._experts_implementation == "eager" and any(
            hasattr(module, "_is_expert_parallel") for module in model.hf.modules()
        )
        recorded_before = cached_run(model.hf) if eager and not expert_loop else None
        self.probed: Any = (
            recorded_before.model
            if recorded_before is not None
            else build_meta(
                model.hf.config,
                experts_implementation="grouped_mm" if expert_loop else None,
                model_class=type(model.hf),
            )
        )
        # Discovery cannot see the scores of other implementations than the eager one either.
        self.anatomy: Anatomy = model.anatomy if eager else discover(self.probed)
        self.path = self.anatomy.backbone.blocks
        self.blocks = list(self.probed.get_submodule(self.path))

    # -- blocks --------------------------------------------------------------

    @property
    def kinds(self) -> list[tuple[int, ...]]:
        """Blocks that are equal in how they are built and set."""
        return self.run.kinds

    @property
    def first_layers(self) -> list[int]:
        """The first block of each kind."""
        return sorted(self.run.firsts)

    def group(self, layer: int) -> tuple[int, ...]:
        """Return the blocks of the same kind as a block."""
        return next(group for group in self.kinds if layer in group)

    def hosts(self, name: str) -> list[tuple[int, HostAnatomy]]:
        """Return the first block of each kind that has a host, with the host."""
        hosts = ((layer, self.anatomy.block(layer).hosts[name]) for layer in self.first_layers)
        return [(layer, host) for layer, host in hosts if host.hook_points]

    def host_call(self, layer: int, host: HostAnatomy) -> Call:
        """Return the call of a host's module, or of its block where the host has no module."""
        return self.call(layer, host.module)

    def call(self, layer: int, path: str) -> Call:
        """Return the first call of the module at a path from a block."""
        full_path = f"{self.path}.{layer}.{path}".rstrip(".")
        return next(call for call in self.graph.calls if call.module == full_path)

    def module(self, layer: int, path: str) -> torch.nn.Module:
        """Return the probed model's module at a path from a block."""
        return self.blocks[layer].get_submodule(path)

    # -- runs ----------------------------------------------------------------

    @cached_property
    def run(self) -> RecordedRun:
        """The recorded run of ``probed``: the loaded model where the forward needs numbers."""
        try:
            with self.model.lock:
                return recorded_run(self.probed)
        except (NotImplementedError, RuntimeError):
            if self.model.hf.device.type == "meta":
                raise
            self.probed = self.model.hf
            self.blocks = list(self.probed.get_submodule(self.path))
            with self.model.lock:
                return record_run(self.probed, step=False)

    @property
    def lengths(self) -> tuple[int, int]:
        """Batch and sequence length of the run; no size of the model equals one of them."""
        return self.run.prompt.batch, self.run.prompt.seq

    @cached_property
    def graph(self) -> ReplayableGraph:
        """A prompt through at least one block of each kind, and all that is around the blocks."""
        return ReplayableGraph.of(self.run.prompt.whole)

    @cached_property
    def far(self) -> tuple[ReplayableGraph, dict[int, tuple[tuple, dict[str, Any]]]] | None:
        """Two tokens behind FAR others: what runs around the blocks, and the blocks' arguments.

        None where the model takes no cache that is filled from outside.
        """
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        block_calls: dict[int, tuple[tuple, dict[str, Any]]] = {}

        def passthrough(layer: int) -> PassthroughBlock:
            returns = self.anatomy.block(layer).hosts["layers"].details.returns

            def result(args: tuple, kwargs: dict[str, Any]) -> object:
                block_calls[layer] = args, kwargs
                return stream_alone(next(tensors((args, kwargs))), returns)

            return PassthroughBlock(self.blocks[layer], result)

        cache = DynamicCache(config=self.probed.config)
        for layer in cache.layers:
            if isinstance(layer, DynamicLayer):
                past = torch.empty(1, 1, FAR, 1, device=self.probed.device, dtype=torch.bfloat16)
                layer.update(past, past)
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.probed.device)
        blocks = [passthrough(layer) for layer in range(len(self.blocks))]
        with (
            self.model.lock,
            without_padding_warning(self.probed),
            swapped_blocks(self.probed, self.path, blocks),
        ):
            try:
                graph = recorded(self.probed, lambda: self.probed(ids, cache=cache, use_cache=True))
            except Exception:  # a model with a cache of its own may raise anything
                return None
        return graph, block_calls

    # -- numbers -------------------------------------------------------------

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return numbers for a tensor that no recorded operation made.

        They are its own where it has some, a buffer's as computed, a small parameter's random.

        Raises NoNumbers for any other.
        """
        if tensor.device.type != "meta":
            return _double(tensor)
        if isinstance(tensor, torch.nn.Parameter) and tensor.numel() <= _SMALL:
            generator = torch.Generator().manual_seed(0)
            return 0.5 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        name = self.name(id(tensor))
        if name is not None and (buffer := self.buffers.numbers(name)) is not None:
            return _double(buffer)
        if tensor.numel() == 0:
            dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
            return torch.empty(tensor.shape, dtype=dtype)
        raise NoNumbers(f"the numbers of {name or 'a tensor'} {list(tensor.shape)} are unknown")

    def name(self, key: int) -> str | None:
        """Return the path of the parameter or buffer that a tensor of the graph is."""
        return self._names.get(key)

    @cached_property
    def buffers(self) -> Buffers:
        return Buffers(self.model.hf, self.probed, self.path, max(self.first_layers) + 1)

    @cached_property
    def _names(self) -> dict[int, str]:
        named = (*self.probed.named_parameters(), *self.probed.named_buffers())
        return {id(tensor): name for name, tensor in named}


def _double(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return tensor.double() if tensor.is_floating_point() else tensor
