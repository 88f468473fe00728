"""The numbers of a model's buffers, which the meta device does not have.

They are computed from the configuration, so that building a module again gives them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: The most elements a factory gives numbers to while a module is built again.
_MOST_ELEMENTS = 1 << 16


class Buffers:
    """The buffers of ``meta_model``, a model of shapes, by name.

    loaded: the model it is built like, whose own buffers are used where they have numbers.
    blocks: the path of the blocks. depth: how many blocks are needed.
    """

    def __init__(
        self, loaded: torch.nn.Module, meta_model: torch.nn.Module, blocks: str, depth: int
    ) -> None:
        self.loaded, self.meta_model, self.blocks, self.depth = loaded, meta_model, blocks, depth

    def numbers(self, name: str) -> torch.Tensor | None:
        """Return a buffer with its numbers; None where it is too large to make."""
        buffer = self._loaded.get(name)
        if buffer is None or buffer.device.type == "meta":
            buffer = self.rebuilt(name)
        return None if buffer is None or buffer.device.type == "meta" else buffer

    @cached_property
    def _loaded(self) -> dict[str, torch.Tensor]:
        return dict(self.loaded.named_buffers())

    def rebuilt(self, name: str) -> torch.Tensor | None:
        """Return a buffer as its module computes it when it is built again.

        The whole model is built where the module cannot be built from the configuration alone.
        """
        path, _, own_name = name.rpartition(".")
        module = self.meta_model.get_submodule(path)
        layer = next((int(step) for step in path.split(".") if step.isdigit()), None)
        config: Any = self.meta_model.config
        available = {
            "config": getattr(module, "config", config.get_text_config()),
            "layer_idx": layer,
        }
        parameters = [
            parameter
            for parameter in inspect.signature(type(module)).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        buildable = all(p.name in available or p.default is not p.empty for p in parameters)
        if not buildable or self.blocks.startswith(path):
            return self._of_whole_model.get(name)
        arguments = {p.name: available[p.name] for p in parameters if p.name in available}
        with _few_numbers():
            rebuilt = type(module)(**arguments)
        return dict(rebuilt.named_buffers()).get(own_name)

    @cached_property
    def _of_whole_model(self) -> dict[str, torch.Tensor]:
        """The buffers of the model built again, with as many blocks as are needed."""
        meta_model: Any = self.meta_model
        full_depth = meta_model.config.get_text_config().num_hidden_layers
        try:
            return self._built(self.depth)
        except Exception:  # some classes need as many blocks as their configuration lists
            return self._built(full_depth)

    def _built(self, depth: int) -> dict[str, torch.Tensor]:
        meta_model: Any = self.meta_model
        config = copy.deepcopy(meta_model.config)
        config.get_text_config().num_hidden_layers = depth
        with _few_numbers():
            return dict(type(meta_model)._from_config(config).named_buffers())


@contextmanager
def _few_numbers() -> Iterator[None]:
    """Build modules with numbers in small tensors only, and restore the process's random state."""
    with torch.random.fork_rng(devices=[]), _FewNumbers():
        yield


class _FewNumbers(TorchFunctionMode):
    """Makes large floating-point tensors, which are weights, on the meta device."""

    factories = frozenset(
        (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.factories:
            on_meta = func(*args, **{**kwargs, "device": "meta"})
            if on_meta.is_floating_point() and on_meta.numel() > _MOST_ELEMENTS:
                return on_meta
        return func(*args, **kwargs)
