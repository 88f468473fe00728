"""What a model keeps between calls and which module keeps it, found by running the model once.

Whatever lets a token see earlier ones has to keep something of them: softmax attention
its keys and values, any other mixer a state. So who writes to the cache tells the token
mixers of a model apart from the rest, under whatever names they go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: What a tensor of the cache is, by the attribute it has there.
_KINDS = {
    "keys": "keys",
    "values": "values",
    "conv_states": "convolution",
    "recurrent_states": "recurrent",
}


@dataclass(frozen=True)
class CachedTensor:
    """One tensor that outlives a call.

    ``kind`` is "keys", "values", "convolution" or "recurrent" (or the cache's own name
    for what is none of them); ``shape`` starts with the batch, and keys and values are
    [batch kv_heads tokens width].
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
    """A token mixer: the module at ``path``, the block it is of, and what it keeps.

    ``window`` is the number of tokens its attention sees, None where it sees all.
    """

    path: str
    layer: int
    held: tuple[CachedTensor, ...]
    window: int | None = None

    @property
    def attends(self) -> bool:
        """Whether it keeps keys, which is what softmax attention does."""
        return any(one.kind == "keys" for one in self.held)


@dataclass(frozen=True)
class CacheProbe:
    """One run of a model of ``dtype`` on ``tokens`` tokens, with its keepers in the order of the blocks.

    ``slots`` is, by module path, how many integers for each token a module was called with:
    the numbers of the experts it goes to, where the module holds the experts.
    """

    keepers: tuple[CacheOwner, ...]
    slots: dict[str, int]
    tokens: int
    dtype: torch.dtype


def probe_cache(
    model: PreTrainedModel, tokens: int = 3, batch: int = 2, whole: bool = False
) -> CacheProbe:
    """Run ``model`` on a prompt of ``tokens`` tokens and see what it keeps.

    Blocks built alike keep alike, so only the first of them is run, unless ``whole`` or
    the forward does not go through that way. Works on any device, the meta device
    included, and leaves the model as it was. Raises whatever the model's forward raises.
    """
    if whole:
        return _run(model, tokens, batch, {})
    try:
        return _run(model, tokens, batch, _repeats(model))
    except Exception:  # a block may need what a block that was left out has made
        return _run(model, tokens, batch, {})


def _run(model: PreTrainedModel, tokens: int, batch: int, repeats: dict[str, str]) -> CacheProbe:
    """One run without the blocks ``repeats`` names, which do as the blocks do that it gives for them."""
    from transformers import DynamicCache

    calls: list[str] = []
    wrote: dict[tuple[int, str], str] = {}

    class Watched(DynamicCache):
        """Notes which module is running when something is written."""

        def update(
            self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            wrote[layer_idx, "keys"] = wrote[layer_idx, "values"] = calls[-1]
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

        def update_conv_state(
            self, conv_states: Any, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            wrote[layer_idx, "convolution"] = calls[-1]
            return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

        def update_recurrent_state(
            self, recurrent_states: Any, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            wrote[layer_idx, "recurrent"] = calls[-1]
            return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    cache = Watched(config=model.config)
    ids = torch.zeros(batch, tokens, dtype=torch.long, device=model.device)
    with (
        _watching(model, calls, (batch, tokens)) as slots,
        _remembering(model) as before,
        _without_padding(model.config),
        _leaving_out(model, repeats),
        torch.no_grad(),
    ):
        model(input_ids=ids, cache=cache, use_cache=True)
        found = [*_in_cache(cache.layers, wrote), *_in_modules(model, before, batch)]
    if repeats and len({keeper.path for keeper in found}) < len(found):
        raise RuntimeError("a block runs several times and keeps something each time")
    for block, first in repeats.items():
        found += [
            _moved(keeper, first, block, cache.layers)
            for keeper in found
            if _within(keeper.path, first)
        ]
        slots |= {
            block + path.removeprefix(first): number
            for path, number in slots.items()
            if _within(path, first)
        }
    return CacheProbe(tuple(_outermost(found)), slots, tokens, model.dtype)


def _repeats(model: nn.Module) -> dict[str, str]:
    """Blocks that are built like an earlier one, with the first of these."""
    firsts: dict[Any, str] = {}
    repeats: dict[str, str] = {}
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for path in lists:
        if any(_within(path, other) for other in lists if other != path):
            continue
        for index, block in enumerate(model.get_submodule(path)):
            first = firsts.setdefault((path, _build(block, index)), f"{path}.{index}")
            if first != f"{path}.{index}":
                repeats[f"{path}.{index}"] = first
    return repeats


def _build(block: nn.Module, index: int) -> tuple:
    """Everything about how a block is built but its own number."""

    def plain(module: nn.Module) -> tuple:
        return tuple(
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, int | float | str | None)
            and (value != index or isinstance(value, bool))
        )

    def shapes(module: nn.Module) -> tuple:
        return tuple(
            (name, None if one is None else one.shape) for name, one in module._parameters.items()
        )

    return tuple(
        (path, type(module), plain(module), shapes(module))
        for path, module in block.named_modules()
    )


def _within(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


def _moved(keeper: CacheOwner, first: str, block: str, layers: list[Any]) -> CacheOwner:
    """What a block keeps that is built like another, from what that one keeps."""
    layer = keeper.layer + int(block.rpartition(".")[2]) - int(first.rpartition(".")[2])
    window = (
        getattr(layers[layer], "sliding_window", None)
        if keeper.attends and layer < len(layers)
        else None
    )
    return CacheOwner(block + keeper.path.removeprefix(first), layer, keeper.held, window)


@contextmanager
def _leaving_out(model: nn.Module, repeats: dict[str, str]) -> Iterator[None]:
    """Blocks left out return what the block returned that they are built like."""
    returned: dict[str, Any] = {}
    handles = []

    def remember(first: str) -> Any:
        return lambda module, args, output: returned.__setitem__(first, output)

    def repeat(first: str) -> Any:
        return lambda *args, **kwargs: returned[first]

    try:
        for first in set(repeats.values()):
            handles.append(model.get_submodule(first).register_forward_hook(remember(first)))
        for block, first in repeats.items():
            model.get_submodule(block).forward = repeat(first)  # `_remembering` takes it away again
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watching(
    model: nn.Module, calls: list[str], size: tuple[int, int]
) -> Iterator[dict[str, int]]:
    """Keeps ``calls`` the stack of running modules and gives `Kept.slots`."""
    slots: dict[str, int] = {}

    def enter(path: str) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            calls.append(path)
            for given in (*args, *kwargs.values()):
                if isinstance(given, torch.Tensor) and given.dtype in (torch.int32, torch.int64):
                    if given.shape[:-1] in (size, (size[0] * size[1],)):
                        slots[path] = given.shape[-1]

        return hook

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        calls.pop()

    handles = []
    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(path), with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield slots
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_padding(config: PreTrainedConfig) -> Iterator[None]:
    """A model with a padding token looks for it in the ids, which have no values on the meta device."""
    figures = vars(config)  # set here, for some classes check what is set through them
    padding = figures.get("pad_token_id")
    if padding is None:
        yield
        return
    figures["pad_token_id"] = None
    try:
        yield
    finally:
        figures["pad_token_id"] = padding


@contextmanager
def _remembering(model: nn.Module) -> Iterator[dict[str, dict[str, Any]]]:
    """The plain attributes of every module, put back afterwards: some models keep their state there."""
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    try:
        yield before
    finally:
        for path, module in model.named_modules():
            for name in vars(module).keys() - before[path].keys():
                object.__delattr__(module, name)
            for name, value in before[path].items():
                if vars(module).get(name) is not value:
                    object.__setattr__(module, name, value)


def _in_cache(layers: list[Any], wrote: dict[tuple[int, str], str]) -> Iterator[CacheOwner]:
    """What each module has written to transformers' cache."""
    for index, layer in enumerate(layers):
        by_path: dict[str, list[CachedTensor]] = {}
        for name, value in vars(layer).items():
            kind = _KINDS.get(name, name)
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if (
                    isinstance(tensor, torch.Tensor) and tensor.dim()
                ):  # a bare number is bookkeeping
                    # What is written some other way goes with the block's keys or state.
                    writer = wrote.get((index, kind)) or next(
                        (path for (at, _), path in wrote.items() if at == index), ""
                    )
                    by_path.setdefault(writer, []).append(
                        CachedTensor(kind, tuple(tensor.shape), tensor.dtype)
                    )
        for path, held in by_path.items():
            keys = any(one.kind == "keys" for one in held)
            yield CacheOwner(
                path, index, tuple(held), getattr(layer, "sliding_window", None) if keys else None
            )


def _in_modules(
    model: nn.Module, before: dict[str, dict[str, Any]], batch: int
) -> Iterator[CacheOwner]:
    """Modules that hold on to tensors of the call themselves."""
    for path, module in model.named_modules():
        new = [
            tensor
            for name, tensor in vars(module).items()
            if isinstance(tensor, torch.Tensor)
            and tensor is not before[path].get(name)
            and tensor.dim() > 1
            and tensor.shape[0] == batch
        ]
        if new:
            widths = {
                child.kernel_size[-1] for child in module.modules() if isinstance(child, nn.Conv1d)
            }
            kinds = [
                "convolution" if {one.shape[-1], one.shape[-1] + 1} & widths else "recurrent"
                for one in new
            ]
            held = tuple(
                CachedTensor(kind, tuple(one.shape), one.dtype)
                for kind, one in zip(kinds, new, strict=True)
            )
            yield CacheOwner(
                path, next((int(name) for name in path.split(".") if name.isdigit()), 0), held
            )


def _outermost(found: list[CacheOwner]) -> list[CacheOwner]:
    """Keepers in the order of the blocks; one inside another is a part of it."""
    whole: dict[str, CacheOwner] = {}
    for keeper in sorted(found, key=lambda one: one.path.count(".")):
        steps = keeper.path.split(".")
        above = next(
            (path for i in range(1, len(steps)) if (path := ".".join(steps[:i])) in whole),
            keeper.path,
        )
        outer = whole.get(above, keeper)
        held = keeper.held if outer is keeper else (*outer.held, *keeper.held)
        whole[above] = CacheOwner(above, outer.layer, held, outer.window or keeper.window)
    return sorted(whole.values(), key=lambda one: one.layer)
