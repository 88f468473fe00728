"""Runs on the meta device of forwards that look at numbers, such as positions or chosen experts.

A tensor on the meta device has a shape and no numbers, so a forward that asks for one (``item``,
``nonzero``, a condition) stops there. Most such numbers do not depend on weights: positions, masks,
lengths. They are computed on the processor beside the run on the meta device. Which experts a
router chooses does depend on weights, and any choice leads the forward through its code; so one is
made up.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

#: The largest tensor whose numbers are kept.
_LARGEST = 1 << 20

#: Operations that choose by size, by the position of the indices among their results.
_CHOOSING = {"topk": 1, "sort": 1, "max": 1, "min": 1, "argmax": 0, "argmin": 0, "argsort": 0}


class KnownNumbers(TorchDispatchMode):
    """While open, tensors on the meta device keep the numbers that do not depend on weights.

    An operation whose operands are all known is run on the processor too. Where the shape of a
    result depends on known numbers, zeros stand in for the operands that are not known.
    """

    def __init__(self) -> None:
        super().__init__()
        #: By the id of a tensor on the meta device: itself, so that the id stays its own, and a
        #: tensor with its numbers.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
        on_meta = [one for one in given if one.device.type == "meta"]
        if not on_meta and _device(kwargs) != "meta":
            return func(*args, **kwargs)
        known = [one for one in on_meta if id(one) in self._known]
        complete = len(known) == len(on_meta)
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            # The result, or its shape, depends on numbers.
            if not known or func._schema.is_mutable:
                raise
            numbers = self._on_processor(func, args, kwargs)
            tensors = any(isinstance(one, torch.Tensor) for one in tree_iter(numbers))
            if complete and (_device(kwargs) == "cpu" or not tensors):
                return numbers
            if not tensors:
                raise
            out = tree_map(_without_numbers, numbers)
            self._keep(out, numbers if complete else None)
            return out
        numbers = None
        if complete and _is_small(out) and not _is_uninitialised(func):
            with suppress(NotImplementedError):  # on some dtypes the processor cannot
                numbers = self._on_processor(func, args, kwargs)
        if numbers is None:
            if func._schema.is_mutable:
                self._forget(args[0])
            numbers = _made_up_choice(func, args, kwargs, out)
        self._keep(out, numbers)
        return out

    def _on_processor(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation on numbers, zeros where they are not known."""
        args, kwargs = tree_map(self._numbers, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)

    def _numbers(self, value: Any) -> Any:
        """Return a tensor with the numbers of one on the meta device; anything else as it is."""
        if not isinstance(value, torch.Tensor) or value.device.type != "meta":
            return value
        if id(value) in self._known:
            return self._known[id(value)][1]
        return torch.zeros((), dtype=value.dtype).expand(value.shape)

    def _keep(self, out: Any, numbers: Any) -> None:
        """Keep the numbers of an operation's results; None among them where there are none."""
        for one, known in zip(_results(out), _results(numbers), strict=False):
            if isinstance(one, torch.Tensor) and isinstance(known, torch.Tensor):
                self._known[id(one)] = one, known

    def _forget(self, written: torch.Tensor) -> None:
        """Forget the numbers of all that shares storage with what unknown numbers went into."""
        storage = written.untyped_storage()._cdata
        for key, (tensor, _) in list(self._known.items()):
            if tensor.untyped_storage()._cdata == storage:
                del self._known[key]


def _device(kwargs: dict[str, Any]) -> str | None:
    """Return the type of the device that an operation is asked to make its result on."""
    asked = kwargs.get("device")
    return None if asked is None else torch.device(asked).type


def _results(out: Any) -> tuple[Any, ...] | list[Any]:
    """Return what an operation returned, as a sequence."""
    return out if isinstance(out, tuple | list) else (out,)


def _without_numbers(value: Any) -> Any:
    """Return a tensor on the meta device like another; anything else as it is."""
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def _is_small(out: Any) -> bool:
    """Return whether all results are small enough for their numbers to be kept."""
    return all(one.numel() <= _LARGEST for one in tree_iter(out) if isinstance(one, torch.Tensor))


def _is_uninitialised(func: Any) -> bool:
    """Return whether an operation makes a tensor without setting its numbers."""
    return "empty" in func._schema.name


def _made_up_choice(func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
    """Return indices that an operation on unknown numbers may choose, in their place among results.

    Those of each row differ, and begin at another index than those of the row before.
    """
    position = _CHOOSING.get(func._schema.name.removeprefix("aten::"))
    results = _results(out)
    if position is None or position >= len(results) or results[position].dtype != torch.long:
        return None
    indices = results[position]
    named = {
        one.name: one.default_value for one in func._schema.arguments if one.has_default_value()
    }
    named |= dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    dim, chosen_from = named.get("dim"), args[0]
    if dim is None or indices.dim() < chosen_from.dim():  # one index for each row
        count = chosen_from.numel() if dim is None else chosen_from.shape[dim]
        made = torch.arange(indices.numel()).reshape(indices.shape) % count
    else:
        rows = indices.movedim(dim, -1)
        slots = torch.arange(rows.shape[-1])
        starts = torch.arange(rows.numel() // max(rows.shape[-1], 1))
        made = (starts[:, None] + slots) % chosen_from.shape[dim]
        made = made.reshape(rows.shape).movedim(-1, dim)
    return [*[None] * position, made]
