"""Numbers of a model's buffers, which on the meta device have none: what they are computed from is the configuration alone."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: Numbers a factory makes at most while a module is built for the sake of its buffers.
_FEW = 1 << 16


class Buffers:
    """The buffers of ``twin``, a model of shapes alone, by name.

    loaded: the model it is built like, whose own are taken where they have numbers. blocks: the path of the
    blocks. depth: how many of those anybody asks about.
    """

    def __init__(
        self, loaded: torch.nn.Module, twin: torch.nn.Module, blocks: str, depth: int
    ) -> None:
        self.loaded, self.twin, self.blocks, self.depth = loaded, twin, blocks, depth

    def numbers(self, name: str) -> torch.Tensor | None:
        """A buffer with its numbers; None where it is too large to make."""
        found = self._own.get(name)
        found = found if found is not None and found.device.type != "meta" else self.made_anew(name)
        return None if found is None or found.device.type == "meta" else found

    @cached_property
    def _own(self) -> dict[str, torch.Tensor]:
        return dict(self.loaded.named_buffers())

    def made_anew(self, name: str) -> torch.Tensor | None:
        """A buffer as its module computes it when it is built once more; with the whole model, where it cannot be built alone."""
        path, _, own = name.rpartition(".")
        owner = self.twin.get_submodule(path)
        layer = next((int(step) for step in path.split(".") if step.isdigit()), None)
        given = {
            "config": getattr(owner, "config", self.twin.config.get_text_config()),
            "layer_idx": layer,
        }
        asked = [
            one
            for one in inspect.signature(type(owner)).parameters.values()
            if one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        alone = all(one.name in given or one.default is not one.empty for one in asked)
        if not alone or self.blocks.startswith(path):
            return self._whole.get(name)
        with _few_numbers():
            made = type(owner)(**{one.name: given[one.name] for one in asked if one.name in given})
        return dict(made.named_buffers()).get(own)

    @cached_property
    def _whole(self) -> dict[str, torch.Tensor]:
        """The buffers of the model built once more, as deep as anybody asks."""
        whole = self.twin.config.get_text_config().num_hidden_layers
        for depth in (self.depth, whole):
            config = copy.deepcopy(self.twin.config)
            config.get_text_config().num_hidden_layers = depth
            try:
                with _few_numbers():
                    return dict(type(self.twin)._from_config(config).named_buffers())
            except (
                Exception
            ):  # some classes cannot be built with fewer blocks than their lists name
                if depth == whole:
                    raise
        raise AssertionError("unreachable")


@contextmanager
def _few_numbers() -> Iterator[None]:
    """Modules built now get numbers where those are few; the process's random state is put back."""
    with torch.random.fork_rng(devices=[]), _FewNumbers():
        yield


class _FewNumbers(TorchFunctionMode):
    """What would hold many floating-point numbers is made of shapes alone: weights, not what buffers are computed from."""

    factories = frozenset(
        (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.factories:
            shapes = func(*args, **{**kwargs, "device": "meta"})
            if shapes.is_floating_point() and shapes.numel() > _FEW:
                return shapes
        return func(*args, **kwargs)
