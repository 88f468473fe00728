"""What a running model continues with after a write, whatever the trace block was shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from explorer.contract.model_under_test import ModelUnderTest, ValueKey
from explorer.discovery.hook_point import HookPoint, get_element, read_value, to_layout
from explorer.model.address import ValueAddress


class WriteObserver:
    """Copies the tensors with which a model continues at the hook points of some values.

    ``seen`` maps each value to the tensor, in the vocabulary's layout, as it was when the forward
    moved on; ``logits`` is what the model returned.
    """

    def __init__(self, subject: ModelUnderTest, keys: list[ValueKey]) -> None:
        self.subject, self.keys = subject, keys
        self.taps = subject.model.taps
        self.seen: dict[ValueKey, torch.Tensor] = {}
        self.logits = torch.empty(0)

    @contextmanager
    def watching(self) -> Iterator[WriteObserver]:
        """Observe what the engine and the taps return to the model while the context is open."""
        engine, taps = self.subject.model.interleaver, self.taps
        handle, pass_through = engine.handle, taps.pass_through

        def handled(provider: str, value: Any) -> Any:
            value = handle(provider, value)
            for key in self._at(provider, native=True):
                self._see(key, self.address(key).hook_point, value)
            return value

        def fired(hook_group: Any, container: Any) -> Any:
            changed = pass_through(hook_group, container)
            for key in self._at(hook_group.location, native=False):
                point = hook_group.members.get(key[0].name)
                if point is not None:
                    self._see(key, point, container if changed is None else changed)
            return changed

        def returned(module: torch.nn.Module, args: Any, output: Any) -> None:
            self.logits = output.logits.detach().clone()

        handle_of_hook = self.subject.hf.register_forward_hook(returned)
        engine.handle, taps.pass_through = handled, fired
        try:
            yield self
        finally:
            del engine.handle, taps.pass_through
            handle_of_hook.remove()

    def address(self, key: ValueKey) -> ValueAddress:
        """Return where the model serves a value."""
        value, layer = key
        return self.taps.hosts[value.host, layer].addresses[value.name]

    def _at(self, location: str, native: bool) -> list[ValueKey]:
        addresses = ((key, self.address(key)) for key in self.keys)
        return [key for key, a in addresses if a.location == location and a.native == native]

    def _see(self, key: ValueKey, point: HookPoint, container: Any) -> None:
        value, layer = key
        raw = get_element(container, point)
        if raw is None:
            return
        host_taps = self.taps.hosts[value.host, layer]
        sizes = {**host_taps.host.sizes, **self.taps.call_sizes}
        sizes |= {"query": sizes["seq"], "key": sizes["seq"]}
        whole = point.selection is None and point.scale == 1
        has_all = whole and raw.numel() == prod(sizes[axis] for axis in value.axes)
        tensor = (
            to_layout(raw, point.arrangement, value.axes, sizes)
            if has_all
            else read_value(raw, point, value.axes, sizes, host_taps.selection(point))
        )
        self.seen[key] = tensor.detach().clone()
