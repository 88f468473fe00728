"""Mutants of what is served: for each value, what stands near it in the forward with the same axes.

A mutant takes a value from another hook point: another operation of the same block, another element
of a tuple, the tensor's axes in another order, another block's constant. The contract is worth what
it makes of them: invariants that hold for a value's neighbour as well do not prove the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING

import torch

from explorer import vocabulary
from explorer.discovery.anatomy import HostAnatomy
from explorer.discovery.candidates import TensorCandidate
from explorer.discovery.hook_point import HookPoint, arrange
from explorer.discovery.record_run import recorded_run
from explorer.discovery.recorded_run import RecordedForward
from explorer.discovery.trace_graph import Call
from explorer.meta_device import build_meta
from explorer.model.host_taps import joined

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel


@dataclass(frozen=True)
class Mutant:
    """A value of one block, or of the model where ``layer`` is None, read from another place.

    point: the other place, its module counted from the root of the model; None for a constant,
    which is then the parameter or buffer at ``constant``. sign: what that is multiplied with.
    """

    host: str
    name: str
    layer: int | None
    point: HookPoint | None
    constant: str = ""
    sign: float = 1.0

    @property
    def value(self) -> vocabulary.Value:
        return vocabulary.BY_HOST[self.host][self.name]

    @property
    def key(self) -> str:
        """Host and name of the value."""
        return f"{self.host}.{self.name}"

    @property
    def description(self) -> str:
        """The other place in words."""
        if self.point is None:
            return f"{self.sign:+g} times {self.constant}"
        return f"{self.point.description} ({self.point.module}, {self.point.arrangement})"


def mutants_of(model: LanguageModel) -> list[Mutant]:
    """Return the mutants of every value that a model serves on one block of each kind.

    They come from a recorded run of the same configuration, so that a place is one that the forward
    passes. Several may hold equal numbers: that is for a run to measure.
    """
    forward = recorded_run(build_meta(model.hf.config)).prompt
    found = list(_of_host(forward, model.top, None, "", _whole_calls(model, forward)))
    for block in model.anatomy.blocks:
        layer = block.layers[0]
        path = f"{model.anatomy.backbone.blocks}.{layer}"
        calls = [
            call
            for call in forward.blocks.calls
            if call.module == path or call.module.startswith(f"{path}.")
        ]
        labels: dict[tuple, int] = {}
        for call in calls:
            labels[call.module, call.labels] = labels.get((call.module, call.labels), 0) + 1
        once = [call for call in calls if labels[call.module, call.labels] == 1]
        for host in block.hosts.values():
            found += _of_host(forward, host, layer, path, once)
            if len(block.layers) > 1:
                found += _of_next_block(host, layer, path, block.layers[1])
            found += _constants(model, host, layer)
    return found


def _whole_calls(model: LanguageModel, forward: RecordedForward) -> list[Call]:
    """Return the calls of modules outside the blocks, and of the blocks themselves."""
    blocks = model.anatomy.backbone.blocks
    depth = blocks.count(".") + 1
    calls = [
        call
        for call in forward.whole.calls
        if call.module
        and (not call.module.startswith(f"{blocks}.") or call.module.count(".") == depth)
    ]
    paths = [call.module for call in calls]
    return [call for call in calls if paths.count(call.module) == 1]


def _of_host(
    forward: RecordedForward, host: HostAnatomy, layer: int | None, path: str, calls: list[Call]
) -> Iterator[Mutant]:
    """Yield the mutants of one host's values; ``path`` is that of its block."""
    lengths = {"batch": forward.batch, "seq": forward.seq}
    lengths |= {"query": forward.seq, "key": forward.seq}
    for name, points in host.hook_points.items():
        value = vocabulary.BY_HOST[host.name][name]
        sizes = {**host.sizes, **lengths}
        if name in host.details.own_widths:
            sizes["hidden_size"] = host.details.own_widths[name]
        point = replace(points[0], module=joined(path, points[0].module))
        seen = {(point.call_site, point.element, point.arrangement)}
        for other in [
            *_other_arrangements(point, value.axes, sizes),
            *_others(point, value, sizes, calls),
        ]:
            key = (other.call_site, other.element, other.arrangement)
            if key not in seen:
                seen.add(key)
                yield Mutant(host.name, name, layer, other)


def _of_next_block(host: HostAnatomy, layer: int, path: str, next_layer: int) -> Iterator[Mutant]:
    """Yield each value read at its own place in the next block of the same kind."""
    there = f"{path.rpartition('.')[0]}.{next_layer}"
    for name, points in host.hook_points.items():
        point = replace(points[0], module=joined(there, points[0].module))
        yield Mutant(host.name, name, layer, point)


def _others(
    point: HookPoint, value: vocabulary.Value, sizes: dict[str, int], calls: list[Call]
) -> Iterator[HookPoint]:
    """Yield the places of other tensors that have a value's axes."""
    seen: set[int] = set()
    for call in calls:
        for candidate in _tensors_of(call):
            tensor = candidate.tensor
            integers = value.layout in ("Tokens", "ExpertIndices")
            if id(tensor) in seen or tensor.is_floating_point() is integers:
                continue
            selections = [None] if point.selection is None else [None, point.selection]
            for selection in selections:
                place = replace(candidate, selection=selection).hook_point(value.axes, sizes)
                if place is not None:
                    seen.add(id(tensor))
                    yield place


def _tensors_of(call: Call) -> Iterator[TensorCandidate]:
    """Yield every tensor that a call takes or returns."""
    for position, item in call.arguments():
        if isinstance(item, torch.Tensor):
            yield TensorCandidate(item, call, "input", position)
    if isinstance(call.output, torch.Tensor):
        yield TensorCandidate(call.output, call, "output", None)
    elif isinstance(call.output, tuple | list):
        for index, item in enumerate(call.output):
            if isinstance(item, torch.Tensor):
                yield TensorCandidate(item, call, "output", index)


def _other_arrangements(
    point: HookPoint, axes: tuple[str, ...], sizes: dict[str, int]
) -> Iterator[HookPoint]:
    """Yield a value's own place with its axes in every other order that fits the tensor."""
    native = axes if point.selection is None else point.selection.native_axes(axes)
    if any(axis not in sizes for axis in native):
        return
    if point.repeat is not None:
        axis, times = point.repeat
        sizes = {**sizes, axis: sizes[axis] // times}
    shape = []
    for group in point.arrangement:
        extent = 1
        for axis in group:
            extent *= sizes[axis]
        shape.append(extent)
    for order in permutations(native):
        arrangement = arrange(tuple(shape), native, sizes, order)
        if arrangement is not None and arrangement != point.arrangement:
            yield replace(point, arrangement=arrangement)


def _constants(model: LanguageModel, host: HostAnatomy, layer: int) -> Iterator[Mutant]:
    """Yield a constant with the other sign, and the same constant of the next block that has it."""
    blocks = model.anatomy.backbone.blocks
    for name, (path, sign) in host.details.constants.items():
        yield Mutant(host.name, name, layer, None, f"{blocks}.{layer}.{path}", -sign)
        for other in range(model.num_layers):
            there = model.anatomy.block(other).hosts[host.name].details.constants.get(name)
            if other != layer and there is not None:
                yield Mutant(host.name, name, layer, None, f"{blocks}.{other}.{there[0]}", sign)
                break
