"""Places: where in a forward a value is, and how it is laid out there.

A place is *what it is* (which module, which call inside its forward, which
argument or result) together with the arrangement of the value's axes in the
tensor found there. The engine's labels in it are looked up anew each time a
model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

import torch

#: One entry per dimension of the native tensor: the axes merged into it, in order.
Arrangement = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ExpertSelection:
    """That a place holds an entry for each of many, of which a value has the few chosen.

    axis: the value's axis of the chosen. among: the axis the place has there instead. by: the value of the same
    host that numbers the chosen, handed over earlier in the call; empty where they are the first ones.
    """

    axis: str
    among: str
    by: str

    def axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes of what the place holds, where the value's are ``axes``."""
        return tuple(self.among if axis == self.axis else axis for axis in axes)


@dataclass(frozen=True)
class HookPoint:
    """Where one value is handed over.

    module: path of the module from the root of the model, ``"model.layers.0.mlp"``.
    operation: labels of the calls inside that module's forward leading to the
        place, outermost first; empty for the module's own boundary.
    side: ``"input"`` or ``"output"`` of the module or the operation.
    element: argument position or keyword, or element of a returned tuple; None
        for an output that is the tensor itself.
    arrangement: how the value's axes lie in the native tensor.
    says: the place in words, for pages and errors.
    repeat: an axis that the code after the place repeats, and how often; the
        value is served repeated already, which that code takes as well.
    written_over: whether the code after the place writes into the very tensor, which is then changed in place.
    turn: which of the module's calls in one forward, counted from 0, where it makes several; of a module's own boundary.
    chosen: that the value has some entries of what is found there, which is arranged with an axis for all of them.
    """

    module: str
    side: str
    element: int | str | None
    arrangement: Arrangement
    description: str
    operation: tuple[str, ...] = ()
    repeat: tuple[str, int] | None = None
    written_over: bool = False
    turn: int | None = None
    chosen: ExpertSelection | None = None

    @property
    def point(self) -> tuple[str, tuple[str, ...], str]:
        """What values handed over at the same moment share."""
        return (self.module, self.operation, self.side)


def arrange(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    sizes: dict[str, int],
    order: tuple[str, ...] | None = None,
) -> Arrangement | None:
    """How ``axes`` lie in a tensor of ``shape``, or None when they do not; ``order`` is theirs where it is known.

    Each native dimension is one axis, several neighbouring ones merged, or, where
    its extent is 1, none. The order asked for is tried first, so sizes that happen
    to be equal do not suggest a transposition.
    """
    if any(axis not in sizes for axis in axes) or prod(shape) != prod(sizes[a] for a in axes):
        return None
    orders = permutations(axes) if order is None else [order]
    return next(
        (found for order in orders if (found := _split(shape, order, sizes)) is not None), None
    )


def _split(
    shape: tuple[int, ...], order: tuple[str, ...], sizes: dict[str, int]
) -> Arrangement | None:
    """The axes in ``order`` over the dimensions of ``shape``, as few to each as will do."""
    if not shape:
        return None if order else ()
    for count in (*range(1, len(order) + 1), 0):
        if prod(sizes[axis] for axis in order[:count]) == shape[0]:
            rest = _split(shape[1:], order[count:], sizes)
            if rest is not None:
                return (order[:count], *rest)
    return None


def plain(arrangement: Arrangement, axes: tuple[str, ...]) -> bool:
    """True where the native tensor already has the layout's axes in order."""
    return arrangement == tuple((axis,) for axis in axes)


def to_layout(
    tensor: torch.Tensor, arrangement: Arrangement, axes: tuple[str, ...], sizes: dict[str, int]
) -> torch.Tensor:
    """The native ``tensor`` with the layout's ``axes``; a view wherever one exists."""
    if plain(arrangement, axes):
        return tensor
    flat = [axis for group in arrangement for axis in group]
    sizes = extents(tensor.shape, arrangement, sizes)
    return tensor.reshape([sizes[axis] for axis in flat]).permute(
        [flat.index(axis) for axis in axes]
    )


def extents(
    shape: tuple[int, ...], arrangement: Arrangement, sizes: dict[str, int]
) -> dict[str, int]:
    """``sizes`` with the lengths that the tensor itself tells: keys may be more than the call's tokens, or fewer, and a part may work on another width."""
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
    """Undo `to_layout`: the tensor in the layout's axes, arranged as the model has it."""
    if plain(arrangement, axes):
        return tensor
    sizes = dict(zip(axes, tensor.shape, strict=True))
    flat = [axis for group in arrangement for axis in group]
    spread = tensor.permute([axes.index(axis) for axis in flat])
    return spread.reshape([prod(sizes[axis] for axis in group) for group in arrangement])


def serve(
    tensor: torch.Tensor,
    place: HookPoint,
    axes: tuple[str, ...],
    sizes: dict[str, int],
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tensor found at ``place`` as the value: in the layout's axes, with repeats made, the entries ``numbers`` alone where some are chosen."""
    if place.chosen is not None:
        whole = to_layout(tensor, place.arrangement, place.chosen.axes(axes), sizes)
        dim = axes.index(place.chosen.axis)
        return (
            whole.gather(dim, _spread(numbers, whole, dim))
            if place.chosen.by
            else whole.narrow(dim, 0, sizes[place.chosen.axis])
        )
    if place.repeat is None:
        return to_layout(tensor, place.arrangement, axes, sizes)
    axis, times = place.repeat
    narrow = to_layout(tensor, place.arrangement, axes, {**sizes, axis: sizes[axis] // times})
    return narrow.repeat_interleave(times, dim=axes.index(axis))


def restore(
    value: torch.Tensor,
    place: HookPoint,
    axes: tuple[str, ...],
    sizes: dict[str, int],
    native: torch.Tensor,
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    """Undo `serve`: what goes to ``place`` where ``native`` was, the entries that were not chosen as they are in it."""
    if place.chosen is None:
        return from_layout(value, place.arrangement, axes)
    among = place.chosen.axes(axes)
    whole, dim = to_layout(native, place.arrangement, among, sizes), axes.index(place.chosen.axis)
    if place.chosen.by:
        return from_layout(
            whole.scatter(dim, _spread(numbers, whole, dim), value), place.arrangement, among
        )
    first = value.shape[dim]
    return from_layout(
        torch.cat([value, whole.narrow(dim, first, whole.shape[dim] - first)], dim),
        place.arrangement,
        among,
    )


def _spread(numbers: torch.Tensor, whole: torch.Tensor, dim: int) -> torch.Tensor:
    """Numbers of entries along ``dim``, the last of their axes, once for everything in an entry of ``whole``."""
    more = whole.shape[dim + 1 :]
    return numbers.reshape(*numbers.shape, *[1] * len(more)).expand(*numbers.shape, *more)


def take(container: Any, place: HookPoint) -> Any:
    """The value at ``place`` in what the call got (``(args, kwargs)``) or returned."""
    if place.side == "input":
        args, kwargs = container
        if isinstance(place.element, str):
            return kwargs.get(place.element)
        return args[place.element] if place.element < len(args) else None
    if place.element is None:
        return container
    if isinstance(place.element, int) and not isinstance(container, (tuple, list)):
        return (
            container if place.element == 0 else None
        )  # what returns a tuple elsewhere returns its first alone here
    return container[place.element]


def put(container: Any, place: HookPoint, value: Any) -> Any:
    """``container`` with ``value`` at ``place``, the original left as it was."""
    if place.side == "input":
        args, kwargs = container
        if isinstance(place.element, str):
            return args, {**kwargs, place.element: value}
        return (*args[: place.element], value, *args[place.element + 1 :]), kwargs
    if place.element is None:
        return value
    if isinstance(place.element, str):
        changed = type(container)(**container)
        changed[place.element] = value
        return changed
    if not isinstance(container, (tuple, list)):
        return value
    changed = list(container)
    changed[place.element] = value
    return type(container)(*changed) if hasattr(container, "_fields") else type(container)(changed)
