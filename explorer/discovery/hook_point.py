"""Hook points: where in a forward pass a value is, and what its layout is there.

A hook point names a module, a call inside its forward, an argument or result of that call, and the
arrangement of the value's axes in the tensor found there. The call's labels are looked up anew each
time a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from math import prod
from typing import Any

import torch

#: One entry per dimension of the native tensor: the axes merged into it, in order.
Arrangement = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ExpertSelection:
    """Selects a value's entries from a native tensor that has an entry for every candidate.

    axis: the value's axis of selected entries. full_axis: the native tensor's axis in its place.
    indices: name of the value of the same host that holds the selected indices and is read earlier
    in the call; "" where the first entries are selected.
    """

    axis: str
    full_axis: str
    indices: str

    def native_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes of the native tensor for a value with ``axes``."""
        return tuple(self.full_axis if axis == self.axis else axis for axis in axes)


@dataclass(frozen=True)
class HookPoint:
    """Where one value is read and written.

    module: path of the module from the root of the model, ``"model.layers.0.mlp"``.
    operation: labels of the nested calls inside that module's forward, outermost first; empty for
        the module's own input or output.
    side: ``"input"`` or ``"output"`` of the module or the operation.
    element: argument position or keyword, or element of a returned tuple; None for an output that
        is the tensor itself.
    arrangement: how the value's axes lie in the native tensor.
    description: the hook point in words, for pages and errors.
    repeat: an axis that the code after the hook point repeats, and how often. The value is served
        after the repeat; that code accepts it as well.
    written_over: whether later code writes into this tensor in place.
    call_index: which of the module's calls in one forward, from 0, where it makes several.
    selection: how the value's entries are selected from the native tensor; None for all of it.
    scale: what the native tensor is multiplied with to be the value.
    """

    module: str
    side: str
    element: int | str | None
    arrangement: Arrangement
    description: str
    operation: tuple[str, ...] = ()
    repeat: tuple[str, int] | None = None
    written_over: bool = False
    call_index: int | None = None
    selection: ExpertSelection | None = None
    scale: float = 1.0

    @property
    def call_site(self) -> tuple[str, tuple[str, ...], str]:
        """Module, operation and side: equal for values that pass at the same moment."""
        return (self.module, self.operation, self.side)


def arrange(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    sizes: dict[str, int],
    order: tuple[str, ...] | None = None,
) -> Arrangement | None:
    """Return how ``axes`` lie in a tensor of ``shape``, or None when they do not fit.

    Each native dimension is one axis, several neighbouring axes merged, or none where its extent is
    1. ``order`` fixes the order of the axes; without it the order of ``axes`` is tried first, so
    that equal sizes do not suggest a transposition.
    """
    if any(axis not in sizes for axis in axes) or prod(shape) != prod(sizes[a] for a in axes):
        return None
    orders = permutations(axes) if order is None else [order]
    arrangements = (_group_axes(shape, order, sizes) for order in orders)
    return next((found for found in arrangements if found is not None), None)


def _group_axes(
    shape: tuple[int, ...], order: tuple[str, ...], sizes: dict[str, int]
) -> Arrangement | None:
    """Distribute the axes in ``order`` over the dimensions of ``shape``, as few to each as fit."""
    if not shape:
        return None if order else ()
    for count in (*range(1, len(order) + 1), 0):
        if prod(sizes[axis] for axis in order[:count]) == shape[0]:
            rest = _group_axes(shape[1:], order[count:], sizes)
            if rest is not None:
                return (order[:count], *rest)
    return None


def is_identity(arrangement: Arrangement, axes: tuple[str, ...]) -> bool:
    """Return whether the native tensor already has the layout's axes in order."""
    return arrangement == tuple((axis,) for axis in axes)


def to_layout(
    tensor: torch.Tensor, arrangement: Arrangement, axes: tuple[str, ...], sizes: dict[str, int]
) -> torch.Tensor:
    """Return the native ``tensor`` with the layout's ``axes``; a view wherever one exists."""
    if is_identity(arrangement, axes):
        return tensor
    flat = [axis for group in arrangement for axis in group]
    sizes = actual_sizes(tuple(tensor.shape), arrangement, sizes)
    return tensor.reshape([sizes[axis] for axis in flat]).permute(
        [flat.index(axis) for axis in axes]
    )


def actual_sizes(
    shape: tuple[int, ...], arrangement: Arrangement, sizes: dict[str, int]
) -> dict[str, int]:
    """Return ``sizes`` with the lengths that the native tensor's own shape fixes.

    The keys may be more or fewer than the call's tokens, and some modules work on another width.
    """
    found = dict(sizes)
    for extent, group in zip(shape, arrangement, strict=True):
        lengths = [
            axis
            for axis in group
            if axis in ("seq", "query", "key") or (axis == "hidden_size" and len(group) == 1)
        ]
        if lengths:
            found[lengths[0]] = extent // prod(found[axis] for axis in group if axis not in lengths)
    return found


def from_layout(
    tensor: torch.Tensor, arrangement: Arrangement, axes: tuple[str, ...]
) -> torch.Tensor:
    """Undo `to_layout`: return the tensor arranged as the model has it."""
    if is_identity(arrangement, axes):
        return tensor
    sizes = dict(zip(axes, tensor.shape, strict=True))
    flat = [axis for group in arrangement for axis in group]
    ordered = tensor.permute([axes.index(axis) for axis in flat])
    return ordered.reshape([prod(sizes[axis] for axis in group) for group in arrangement])


def read_value(
    tensor: torch.Tensor,
    place: HookPoint,
    axes: tuple[str, ...],
    sizes: dict[str, int],
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the value with the layout's ``axes`` from the native ``tensor`` found at ``place``.

    Repeats and factors are applied. ``indices`` are those of the selected entries, where the hook
    point has a selection by indices.
    """
    selection = place.selection
    if place.scale != 1:
        tensor = tensor * place.scale
    if selection is not None:
        native = to_layout(tensor, place.arrangement, selection.native_axes(axes), sizes)
        dim = axes.index(selection.axis)
        if not selection.indices:
            return native.narrow(dim, 0, sizes[selection.axis])
        return native.gather(dim, _expanded(indices, native, dim))
    if place.repeat is None:
        return to_layout(tensor, place.arrangement, axes, sizes)
    axis, times = place.repeat
    narrow = to_layout(tensor, place.arrangement, axes, {**sizes, axis: sizes[axis] // times})
    return narrow.repeat_interleave(times, dim=axes.index(axis))


def write_value(
    value: torch.Tensor,
    place: HookPoint,
    axes: tuple[str, ...],
    sizes: dict[str, int],
    native: torch.Tensor,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Undo `read_value`: return the tensor that replaces ``native`` at ``place``.

    Entries of ``native`` that are not selected stay as they are.
    """
    selection = place.selection
    if place.scale != 1:
        return _unscaled(value, place, axes, sizes, native, indices)
    if selection is None:
        return from_layout(value, place.arrangement, axes)
    native_axes, dim = selection.native_axes(axes), axes.index(selection.axis)
    whole = to_layout(native, place.arrangement, native_axes, sizes)
    if selection.indices:
        changed = whole.scatter(dim, _expanded(indices, whole, dim), value)
    else:
        count = value.shape[dim]
        changed = torch.cat([value, whole.narrow(dim, count, whole.shape[dim] - count)], dim)
    return from_layout(changed, place.arrangement, native_axes)


def _unscaled(
    value: torch.Tensor,
    place: HookPoint,
    axes: tuple[str, ...],
    sizes: dict[str, int],
    native: torch.Tensor,
    indices: torch.Tensor | None,
) -> torch.Tensor:
    """Return the tensor that replaces ``native``, where the value is a multiple of it.

    A division need not undo a multiplication exactly: numbers of the value that were not changed
    stay as they are in ``native``.
    """
    plain = replace(place, scale=1.0)
    before = read_value(native, plain, axes, sizes, indices)
    change = value - before * place.scale
    kept, new = before + change / place.scale, value / place.scale
    return write_value(torch.where(change == 0, kept, new), plain, axes, sizes, native, indices)


def _expanded(indices: torch.Tensor | None, whole: torch.Tensor, dim: int) -> torch.Tensor:
    """Return indices along ``dim``, their last axis, repeated over the later axes of ``whole``."""
    if indices is None:
        raise ValueError("a value selected by indices needs the indices")
    more = whole.shape[dim + 1 :]
    return indices.reshape(*indices.shape, *[1] * len(more)).expand(*indices.shape, *more)


def get_element(container: Any, place: HookPoint) -> Any:
    """Return the value at ``place`` in what the call received (``(args, kwargs)``) or returned."""
    element = place.element
    if place.side == "input":
        args, kwargs = container
        if isinstance(element, int):
            return args[element] if element < len(args) else None
        return kwargs.get(element)
    if element is None:
        return container
    if isinstance(element, str):
        return container[element]
    if isinstance(container, tuple | list):
        return container[element]
    # A call that returns a tuple in one setting may return its first element alone in another.
    return container if element == 0 else None


def with_element(container: Any, place: HookPoint, value: Any) -> Any:
    """Return ``container`` with ``value`` at ``place``, the original unchanged."""
    element = place.element
    if place.side == "input":
        args, kwargs = container
        if isinstance(element, int):
            return (*args[:element], value, *args[element + 1 :]), kwargs
        return args, {**kwargs, element: value}
    if isinstance(element, str):
        changed = type(container)(**container)
        changed[element] = value
        return changed
    if element is None or not isinstance(container, (tuple, list)):
        return value
    changed = list(container)
    changed[element] = value
    return type(container)(*changed) if hasattr(container, "_fields") else type(container)(changed)
