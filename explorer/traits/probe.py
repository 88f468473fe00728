"""One model under question: a run of shapes through its blocks, and what every block is handed late in a long text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from explorer.discovery.anatomy import Anatomy, HostAnatomy
from explorer.discovery.discover import discover
from explorer.discovery.trace_graph import Call, tensors
from explorer.meta_device import build_meta, mask_arguments, probe_lengths, without_padding_warning
from explorer.traits.buffers import Buffers
from explorer.traits.replayable_graph import NoNumbers, ReplayableGraph, recorded

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel

#: The place of the token whose view is asked for: behind any window, and no multiple of one.
FAR = 131_101

#: Blocks that are run at most: a stack in which every block differs is judged by one of each kind that finding told apart.
_DEEPEST = 16

#: Numbers of a parameter that any will do for.
_SMALL = 1 << 20


class ModelProbe:
    """What a loaded model is asked through. ``twin`` is the model, or one of shapes alone built like it."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        config = model.hf.config
        text = config.get_text_config()
        # transformers' own experts classes say so; a loop over the experts chosen cannot run on shapes alone.
        loops = text._experts_implementation == "eager" and any(
            hasattr(one, "_is_expert_parallel") for one in model.hf.modules()
        )
        eager = text._attn_implementation == "eager"
        if (
            model.hf.device.type == "meta"
            and model.hf.dtype == torch.bfloat16
            and eager
            and not loops
        ):
            self.twin = model.hf
        else:
            self.twin = build_meta(
                config,
                experts_implementation="grouped_mm" if loops else None,
                model_class=type(model.hf),
            )
        # Another attention than the eager one hides its scores from finding too.
        self.anatomy: Anatomy = model.anatomy if eager else discover(self.twin)
        self.config = text
        self.path = self.anatomy.backbone.blocks
        self.blocks = list(self.twin.get_submodule(self.path))

    # -- blocks --------------------------------------------------------------

    @cached_property
    def alike(self) -> list[tuple[int, ...]]:
        """Blocks that are alike in every plain attribute too, by number, in order of first appearance."""
        plain = [_plain(block) for block in self.blocks]
        names = {
            name for each in plain for name, value in each.items() if not isinstance(value, bool)
        }
        own = {
            name
            for name in names
            if all(each.get(name, layer) == layer for layer, each in enumerate(plain))
        }
        finer: dict[tuple, list[int]] = {}
        for number, block in enumerate(self.anatomy.blocks):
            for layer in block.layers:
                told = ((name, value) for name, value in plain[layer].items() if name not in own)
                finer.setdefault((number, *told), []).append(layer)
        groups = sorted(map(tuple, finer.values()))
        if max(group[0] for group in groups) < _DEEPEST:
            return groups
        return sorted(block.layers for block in self.anatomy.blocks)

    @property
    def firsts(self) -> list[int]:
        """One block of each kind."""
        return [group[0] for group in self.alike]

    def group(self, layer: int) -> tuple[int, ...]:
        """The blocks that are like the first of their kind."""
        return next(group for group in self.alike if group[0] == layer)

    def hosts(self, name: str) -> list[tuple[int, HostAnatomy]]:
        """The first block of each kind that has a host, with the host."""
        return [
            (layer, host)
            for layer in self.firsts
            if (host := self.anatomy.block(layer).hosts[name]).hook_points
        ]

    def host_call(self, layer: int, host: HostAnatomy) -> Call:
        """The call of a host's module, or of its block where it is a part without one."""
        return self.call(layer, host.module)

    def call(self, layer: int, path: str) -> Call:
        """The call of the module at a path from a block."""
        whole = f"{self.path}.{layer}.{path}".rstrip(".")
        return next(call for call in self.trail.calls if call.module == whole)

    def module(self, layer: int, path: str) -> torch.nn.Module:
        """A module of the twin, by its path from a block."""
        return self.blocks[layer].get_submodule(path)

    # -- the run -------------------------------------------------------------

    @cached_property
    def lengths(self) -> tuple[int, int]:
        """Batch and sequence length of the run; no size of the model equals one of them."""
        return probe_lengths(self.twin)

    @cached_property
    def trail(self) -> ReplayableGraph:
        """A prompt through one block of each kind, and through all around the blocks."""
        try:
            return self._prompted()
        except (NotImplementedError, RuntimeError):
            if self.model.hf.device.type == "meta":
                raise
            self.twin = self.model.hf  # a forward that looks at its numbers needs some
            self.blocks = list(self.twin.get_submodule(self.path))
            return self._prompted()

    def _prompted(self) -> ReplayableGraph:
        ids = torch.zeros(*self.lengths, dtype=torch.long, device=self.twin.device)
        with (
            self.model.lock,
            without_padding_warning(self.twin),
            _with_blocks(self.twin, self.path, self.blocks[: max(self.firsts) + 1]),
        ):
            return recorded(
                self.twin,
                lambda: self.twin(ids, use_cache=True, **mask_arguments(ids, self.anatomy.masked)),
            )

    @cached_property
    def far(self) -> tuple[ReplayableGraph, dict[int, Any]] | None:
        """Two tokens behind FAR others: what happens around the blocks, and what each block is called with.

        None where the model takes no cache that is filled from outside.
        """
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        handed: dict[int, Any] = {}
        stand_ins = [
            _StandIn(
                block, layer, self.anatomy.block(layer).hosts["layers"].details.returns, handed
            )
            for layer, block in enumerate(self.blocks)
        ]
        cache = DynamicCache(config=self.twin.config)
        for layer in cache.layers:
            if isinstance(layer, DynamicLayer):
                told = torch.empty(1, 1, FAR, 1, device=self.twin.device, dtype=torch.bfloat16)
                layer.update(told, told)
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.twin.device)
        with (
            self.model.lock,
            without_padding_warning(self.twin),
            _with_blocks(self.twin, self.path, stand_ins),
        ):
            try:
                return recorded(
                    self.twin, lambda: self.twin(ids, cache=cache, use_cache=True)
                ), handed
            except Exception:  # a model that keeps something of its own says so in ways of its own
                return None

    # -- numbers -------------------------------------------------------------

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Numbers for a tensor that the run found there: those it has, a buffer's own, any for a small parameter.

        Raises NoNumbers where there are none.
        """
        if tensor.device.type != "meta":
            return _double(tensor)
        if isinstance(tensor, torch.nn.Parameter) and tensor.numel() <= _SMALL:
            return 0.5 + torch.rand(
                tensor.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
            )
        name = self.name(id(tensor))
        if name is not None and (found := self.buffers.numbers(name)) is not None:
            return _double(found)
        if tensor.numel() == 0:
            return torch.empty(
                tensor.shape, dtype=torch.float64 if tensor.is_floating_point() else tensor.dtype
            )
        raise NoNumbers(f"nobody knows the numbers of {name or 'a tensor'} {list(tensor.shape)}")

    def name(self, key: int) -> str | None:
        """The path of a parameter or buffer of the twin, by the key it has in a trail."""
        return self._names.get(key)

    @cached_property
    def buffers(self) -> Buffers:
        return Buffers(self.model.hf, self.twin, self.path, max(self.firsts) + 1)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {
            id(tensor): name
            for name, tensor in (*self.twin.named_parameters(), *self.twin.named_buffers())
        }


def _double(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return tensor.double() if tensor.is_floating_point() else tensor


def _plain(block: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """The plain attributes of a block's modules, by path and name."""
    return {
        (path, name): value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None)
    }


class _StandIn(torch.nn.Module):
    """Notes what a block is called with and hands the stream on; otherwise the block to whoever looks."""

    def __init__(
        self, block: torch.nn.Module, layer: int, returns: int | None, handed: dict[int, Any]
    ) -> None:
        super().__init__()
        self.__dict__.update(block=block, layer=layer, returns=returns, handed=handed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.handed[self.layer] = (args, kwargs)
        stream = next(tensors((args, kwargs)))
        return stream if self.returns is None else (stream, *[None] * (self.returns - 1))


@contextmanager
def _with_blocks(root: torch.nn.Module, path: str, blocks: list[torch.nn.Module]) -> Iterator[None]:
    """``root`` with other blocks for the duration."""
    owner, _, name = path.rpartition(".")
    holder, whole = root.get_submodule(owner), root.get_submodule(path)
    setattr(holder, name, torch.nn.ModuleList(blocks))
    try:
        yield
    finally:
        setattr(holder, name, whole)
