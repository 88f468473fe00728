"""The values of one location, as a trace block holds them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from explorer.discovery.hook_point import get_element, with_element
from explorer.model.address import BatchShared, ValueAddress, unwrap
from explorer.model.edits import check_experts
from explorer.model.errors import Unavailable


@dataclass
class _Copy:
    """A value as the block has it.

    ``version`` is what PyTorch had counted of its in-place changes, None where the block
    assigned it.
    """

    name: str
    address: ValueAddress
    value: Any
    version: int | None

    @property
    def is_changed(self) -> bool:
        if self.version is None:
            return True
        return isinstance(self.value, torch.Tensor) and (
            self.value._version != self.version or self.value.requires_grad
        )


class ServedValues:
    """What the forward passed at one location, and the copies of it that a trace block was given.

    raw: what passed; address: of the value that was asked for; num_experts: how many experts the
    host has, where it has any.
    """

    def __init__(self, raw: Any, address: ValueAddress, num_experts: int | None = None) -> None:
        self.raw = raw
        self.native = address.native
        self.num_experts = num_experts
        # By tensor, not by name: two names of one tensor share a copy, so an edit by either is
        # the edit.
        self._copies: dict[Hashable, _Copy] = {}
        self._derived: list[tuple[str, torch.Tensor, int]] = []

    def remember_derived(self, expression: str, value: Any) -> Any:
        """Remember a value computed from these, so that a write into it is refused; return it."""
        if isinstance(value, torch.Tensor):
            self._derived.append((expression, value, value._version))
        return value

    def copy_of(self, name: str, address: ValueAddress) -> Any:
        """Return the block's copy of one value: the same object however often it is read."""
        key = self._key(address)
        if key not in self._copies:
            value = self._passed(name, address)
            copied = value.clone() if isinstance(value, torch.Tensor) else value
            self._copies[key] = _Copy(name, address, copied, getattr(copied, "_version", 0))
        return self._copies[key].value

    def assign(self, name: str, address: ValueAddress, value: Any) -> None:
        """Take what a block assigned to a value."""
        self._copies[self._key(address)] = _Copy(name, address, value, None)

    def write_back(self) -> Any:
        """Return what the model goes on with: the original wherever a copy was only read."""
        for expression, value, version in self._derived:
            if value._version != version:
                raise Unavailable(
                    f"{expression} is computed from other values: what is written into it reaches "
                    "nothing. Clone it first, or write what it is computed from."
                )
        container = self.raw
        for copied in self._copies.values():
            if copied.is_changed:
                value = copied.value
                # The model gets a copy in turn, so that neither sees the other's later edits.
                value = value.clone() if isinstance(value, torch.Tensor) else value
                container = self._put(container, copied.name, copied.address, value)
        return container

    def _passed(self, name: str, address: ValueAddress) -> Any:
        """Return a value as the forward passed it."""
        if self.native:
            return get_element(self.raw, address.hook_point)
        if name not in self.raw:
            raise Unavailable(
                f"{name} is unavailable: a decoding step's kernel does not hold it as a tensor of "
                "its own; trace the whole sequence at once."
            )
        return unwrap(self.raw[name])

    def _key(self, address: ValueAddress) -> Hashable:
        """Return what values that are one tensor of one layout have in common."""
        point = address.hook_point
        return (
            point.element
            if self.native
            else (point.element, point.arrangement, point.repeat, point.scale)
        )

    def _put(self, container: Any, name: str, address: ValueAddress, value: Any) -> Any:
        if name == "expert_indices" and self.num_experts is not None:
            check_experts(value, self.num_experts)
        if self.native:
            return with_element(container, address.hook_point, value)
        shared = isinstance(container[name], BatchShared)
        return {**container, name: BatchShared(value) if shared else value}
