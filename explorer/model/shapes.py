"""Shapes and dtypes of a model's values: a tensor for each, on two blocks of each kind."""

from __future__ import annotations

from typing import Any

import torch

from explorer.discovery.backbone import swapped_blocks
from explorer.discovery.hook_point import HookPoint, get_element, read_value
from explorer.discovery.record_run import cached_run
from explorer.discovery.recorded_run import RecordedRun
from explorer.discovery.trace_graph import Call
from explorer.meta_device import probe_lengths
from explorer.model.language_model import LanguageModel
from explorer.model.support import Row

#: Tensors by host, name of the value and block, which is None on the model.
Tensors = dict[tuple[str, str, int | None], torch.Tensor]


def shapes(model: LanguageModel) -> Tensors:
    """Return a tensor for each value that is read in a forward, which leaves out the derived ones.

    On the meta device it has a shape and a dtype alone. Of each kind of block the first two are
    looked at: the second shows the dtype of what the first returns.
    """
    layers = sorted({layer for block in model.anatomy.blocks for layer in block.layers[:2]})
    rows = [row for row in model.support() if row.available and not row.value.derived]
    run = cached_run(model.hf)
    if run is not None and run.model is model.hf:
        return _in_run(model, run, rows, layers)
    return _recorded(model, rows, layers)


def _at(row: Row, layers: list[int]) -> list[int | None]:
    return [None] if row.host == "model" else [layer for layer in layers if layer in row.layers]


def _in_run(model: LanguageModel, run: RecordedRun, rows: list[Row], layers: list[int]) -> Tensors:
    """Read the values off the model's recorded run."""
    calls: dict[tuple[str, tuple[str, ...]], list[Call]] = {}
    inside = (call for call in run.prompt.blocks.calls if call.labels)
    for call in (*run.prompt.whole.calls, *inside):
        calls.setdefault((call.module, call.labels), []).append(call)
    found: Tensors = {}

    def native(place: HookPoint, prefix: str) -> Any:
        path = ".".join(part for part in (prefix, place.module) if part)
        made = calls.get((path, place.operation), [])
        if len(made) <= (place.call_index or 0):
            return None
        call = made[place.call_index or 0]
        return get_element(
            (call.args, call.kwargs) if place.side == "input" else call.output, place
        )

    def value(row: Row, layer: int | None) -> torch.Tensor | None:
        host = model.top if layer is None else model.anatomy.block(layer).hosts[row.host]
        prefix = "" if layer is None else run.block_path(layer)
        sizes = {**host.sizes, "batch": run.prompt.batch, "seq": run.prompt.seq}
        for place in host.hook_points[row.name]:
            tensor = native(place, prefix)
            if not isinstance(tensor, torch.Tensor):
                continue
            indices = None
            if place.selection is not None and place.selection.indices:
                indices = found.get((row.host, place.selection.indices, layer))
                if indices is None:
                    continue
            return read_value(tensor, place, row.value.axes, sizes, indices)
        return None

    # What selects the entries of others comes before them.
    for row in sorted(rows, key=lambda row: row.name != "expert_indices"):
        for layer in _at(row, layers):
            if (tensor := value(row, layer)) is not None:
                found[row.host, row.name, layer] = tensor
    return found


def _recorded(model: LanguageModel, rows: list[Row], layers: list[int]) -> Tensors:
    """Record the values: of a model with numbers, whose record is of another dtype."""
    ids = torch.zeros(*probe_lengths(model.hf), dtype=torch.long, device=model.hf.device)
    # By its host too: two mixers of a block may share a name.
    names = [row.name if row.host == "model" else f"{row.host}.{row.name}" for row in rows]
    # The blocks behind the last of these add nothing but time.
    path = model.anatomy.backbone.blocks
    blocks = list(model.hf.get_submodule(path).children())[: layers[-1] + 1]
    with model.lock, swapped_blocks(model.hf, path, blocks):
        recording = model.record(ids, names, layers=layers)
    return {
        (row.host, row.name, layer): recording[name, layer]
        for row, name in zip(rows, names, strict=True)
        for layer in _at(row, layers)
        if (name, layer) in recording and isinstance(recording[name, layer], torch.Tensor)
    }
