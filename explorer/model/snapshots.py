"""Snapshots of a running forward, copied only where the model changes a tensor afterwards.

A recorded tensor must stay as it was when the forward passed it. A copy always does that, but most
tensors of a forward are never changed in place, and copying every one of them costs a third of the
forward. PyTorch counts the in-place changes of a tensor, one counter for all views of a storage.
The first forward that takes a snapshot at some address copies it and looks at the end whether the
counter moved. If it did not, later forwards keep the tensor itself; if it did, they copy. The
counter is read again at the end of each of those, so a tensor that changes after all is noticed:
the forward then has to be run again, with a copy at that address.

Also copied are tensors that are a part of a larger storage, so that a small value does not keep a
large buffer in memory, and those that something else still holds when the forward has ended: a
parameter, or what the caller passed in.
"""

# PyTorch counts changes and uses under private names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

#: Where a snapshot is taken: the same for every forward of a model.
Address = Hashable
#: Whether the model changes in place what passes at an address, as far as that is known.
ChangeHistory = dict[Address, bool]


class Snapshots:
    """The snapshots of one forward. ``history`` belongs to the model and is added to."""

    def __init__(self, history: ChangeHistory) -> None:
        self.history = history
        self._probes: list[tuple[Address, torch.Tensor, int]] = []
        self._references: list[tuple[Address, torch.Tensor, int]] = []

    def take(self, address: Address, value: Any, always_copy: bool = False) -> Any:
        """Return ``value`` as it is now, on the CPU.

        What is no tensor, or has no data, is returned as it is.
        """
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            return value
        tensor = value.detach()
        if tensor.device.type != "cpu":
            return tensor.to("cpu")
        if always_copy or tensor.is_inference() or not _fills_its_storage(tensor):
            return tensor.clone()
        changes = self.history.get(address)
        if changes:
            return tensor.clone()
        if changes is None:
            self._probes.append((address, _version_probe(tensor), tensor._version))
            return tensor.clone()
        self._references.append((address, tensor, tensor._version))
        return tensor

    def verify(self) -> bool:
        """Return whether all snapshots are as they were taken, once the forward has ended."""
        for address, probe, version in self._probes:
            self.history[address] = self.history.get(address, False) or probe._version != version
        changed = [
            address for address, tensor, version in self._references if tensor._version != version
        ]
        self.history.update(dict.fromkeys(changed, True))
        self._probes.clear()
        self._references.clear()
        return not changed


def shared_keys(values: dict[Any, Any]) -> set[Any]:
    """Return the keys of the tensors that share their storage with others among ``values``.

    A tensor whose storage something else holds too is replaced by a copy.
    """
    by_storage: dict[int, tuple[torch.UntypedStorage, list[Any]]] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            storage = value.untyped_storage()
            by_storage.setdefault(storage._cdata, (storage, []))[1].append(key)
    shared: set[Any] = set()
    for address, (_, keys) in by_storage.items():
        # One use for each of the tensors, and one for the Python object of the storage.
        if torch._C._storage_Use_Count(address) > len(keys) + 1:
            values.update((key, values[key].clone()) for key in keys)
        elif len(keys) > 1:
            shared |= set(keys)
    return shared


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is all of its storage, each number once."""
    repeats = any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    return not repeats and tensor.nbytes == tensor.untyped_storage().nbytes()


def _version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor that shares ``tensor``'s version counter but not its storage."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype)
    return probe
