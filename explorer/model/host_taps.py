"""What is tapped on one host of one block: which values, where, and under which location."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from explorer import vocabulary
from explorer.discovery.anatomy import HostAnatomy
from explorer.discovery.hook_point import HookPoint, is_identity
from explorer.model.address import ValueAddress
from explorer.vocabulary import MIXERS


@dataclass
class HookGroup:
    """One tap: the values that are read and written there, by name."""

    location: str
    side: str
    host: HostTaps
    members: dict[str, HookPoint] = field(default_factory=dict[str, HookPoint])

    @property
    def address(self) -> ValueAddress:
        """The address of its values, which have one location in common."""
        return self.host.addresses[next(iter(self.members))]


class HostTaps:
    """The taps of one host of one block.

    ``addresses`` are by value name. ``captured`` holds values of the call now running that
    are needed later in it: the arguments of the recurrent kernel, and the indices that select
    entries of other values. ``path`` is the engine's name of the block, or of the model.
    """

    def __init__(self, path: str, host: HostAnatomy) -> None:
        self.path = path
        self.host = host
        self.values = vocabulary.BY_HOST[host.name]
        self.addresses: dict[str, ValueAddress] = {}
        self.hook_groups: dict[tuple[Any, ...], HookGroup] = {}
        self.captured: dict[str, torch.Tensor | None] = {}
        #: The names of what the recurrence is run again from, where it can be.
        self.replay_names = MIXERS[host.name].replayed if "state_output" in host.hook_points else ()
        for name, hook_points in host.hook_points.items():
            self._add(name, hook_points)
        self._constants: dict[str, Callable[[], torch.Tensor]] = {}
        #: The values whose entries are selected by another value, with the name of that value.
        selected_by = {
            name: by
            for name, hook_points in host.hook_points.items()
            for place in hook_points
            if place.selection is not None and (by := place.selection.indices)
        }
        self.selectors = set(selected_by.values())
        self.selected_locations = {self.addresses[name].location for name in selected_by}
        # Whoever edits weights by their experts needs both at once.
        indices, weights = map(self.addresses.get, ("expert_indices", "expert_weights"))
        if indices is not None and weights is not None and indices.location != weights.location:
            self.selectors.add("expert_indices")
            self.selected_locations.add(weights.location)

    def _add(self, name: str, hook_points: tuple[HookPoint, ...]) -> None:
        """Add a value with its hook points, one for each kind of call.

        The first names the location; the others lead to the same location on other kinds of call.
        Values share a location where every kind of call passes them at the same point.
        """
        first = hook_points[0]
        native = (
            len(hook_points) == 1
            and not first.operation
            and first.repeat is None
            and first.call_index is None
            and first.selection is None
            and first.scale == 1
            and is_identity(first.arrangement, self.values[name].axes)
        )
        module = joined(self.path, first.module)
        points = "+".join(
            f"{place.module.removeprefix(first.module)}{'/'.join(place.operation)}.{place.side}"
            for place in self._points_of_location(hook_points)
        )
        location = f"{module}.{first.side}" if native else f"{module}@{points}:{self.host.name}"
        self.addresses[name] = ValueAddress(location, first, native)
        for place in hook_points:
            hook_group = self.hook_groups.setdefault(
                (*place.call_site, location), HookGroup(location, place.side, self)
            )
            hook_group.members[name] = place

    def _points_of_location(self, hook_points: tuple[HookPoint, ...]) -> tuple[HookPoint, ...]:
        """Return a value's hook points.

        For one that has a single point, those of the values that share it.
        """
        first, *others = hook_points
        if others:
            return hook_points
        sharing = [
            points
            for points in self.host.hook_points.values()
            if points[0].call_site == first.call_site and points[0].operation
        ]
        return max(sharing, key=len) if sharing else hook_points

    def add_constant(self, name: str, module: torch.nn.Module, leaf: str, sign: float) -> None:
        """Read a value off the parameter or buffer ``leaf`` of a module, times a sign."""
        self._constants[name] = lambda: sign * getattr(module, leaf).detach().float().flatten()

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The values that are constants of the model, as they are now: one number per head."""
        return {name: read() for name, read in self._constants.items()}

    @property
    def kernel_arguments(self) -> dict[str, torch.Tensor | None]:
        """What the running call's recurrent kernel was given, with constants of the model."""
        return self.captured | self.constants

    def selection(self, place: HookPoint) -> torch.Tensor | None:
        """Return the indices of the entries at a hook point that are the value.

        It is None where all entries are, or the first ones.
        """
        return None if place.selection is None else self.captured.get(place.selection.indices)

    def lacks_selection(self, place: HookPoint) -> bool:
        """Return whether nothing in this call has selected a value's entries.

        False where they are not selected: all entries at the hook point, or the first ones.
        """
        return (
            place.selection is not None
            and bool(place.selection.indices)
            and self.selection(place) is None
        )

    def is_needed(self, hook_group: HookGroup, locations: set[str]) -> bool:
        """Return whether a tap has to be open for the values at ``locations`` to be read."""
        if hook_group.location in locations:
            return True
        if self.replay_names and {self.replay_location, self.state_location} & locations:
            return True
        return bool(
            self.selected_locations & locations and self.selectors & set(hook_group.members)
        )

    @property
    def replay_location(self) -> str:
        """The location after the kernel, where its arguments are served again under `REPLAY`."""
        return self.addresses["state_output"].location

    @property
    def state_location(self) -> str:
        """The location where the states are served, token by token."""
        return f"{self.path}.{self.host.module}@state"


def joined(path: str, module: str) -> str:
    """Return the path of a module below another, which may be that one itself."""
    return f"{path}.{module}" if module else path
