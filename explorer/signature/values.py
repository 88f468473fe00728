"""The standard values of a loaded model, typed: each axis of a layout as an expression over the family's sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from explorer import vocabulary
from explorer.discovery.anatomy import Anatomy
from explorer.discovery.discover import discover
from explorer.model.shapes import shapes
from explorer.signature.expressions import Expr
from explorer.signature.probes import Probes
from explorer.signature.types import Type, Types
from explorer.vocabulary.formatting import CALL

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel
    from explorer.model.support import Row

#: What the call decides, by axis.
_CALL = {axis: Expr.name(name) for axis, name in CALL.items()}

#: Anatomies of probes that are compared with the model's own.
_COMPARED = 2

#: The sizes of one host of one kind of block, by axis.
_Sizes = dict[tuple[int, str], dict[str, Expr]]


def typed_values(
    model: LanguageModel,
    probes: Probes,
    types: Types,
    layers: Sequence[Sequence[int]],
    write: Callable[[Type], dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each value, or for each of its types where kinds of blocks differ, and what did not resolve.

    A row is ``{host, name, modules, layers, type}``, what did not resolve ``{at, axis, number}``. ``layers`` are, for
    each block of the probes, the model's blocks that are so.
    """
    sizes = _sizes(model, probes, types, layers)
    tensors = shapes(model)
    rows, unresolved = [], []
    for row in model.support():
        if not row.available:
            continue
        for kind, blocks in _kinds(row, model.anatomy):
            known = sizes.get((kind, row.host), {})
            tensor = tensors.get((row.host, row.name, blocks[0] if blocks else None))
            axes: list[Expr | int | None] = []
            for at, axis in enumerate(row.value.axes):
                expression = _CALL.get(axis) or known.get(axis)
                if (
                    tensor is not None
                    and expression is not None
                    and not _fits(expression, tensor, at, row.value.axes, probes)
                ):
                    expression = None
                if expression is None:
                    number = tensor.shape[at] if tensor is not None and at < tensor.dim() else None
                    unresolved.append(
                        {"at": f"{row.host}.{row.name}", "axis": at, "number": number}
                    )
                    axes.append(number)
                else:
                    axes.append(expression)
            new = {
                "host": vocabulary.HOSTS[row.host].path,
                "name": row.name,
                "type": write(Type(tuple(axes), _dtype(row, tensor, tensors, blocks))),
            }
            module = _module(model.anatomy, row.host, blocks)
            if rows and rows[-1] | new == rows[-1]:
                rows[-1]["layers"] = sorted([*rows[-1]["layers"], *blocks])
                rows[-1]["modules"].append(module)
            else:
                rows.append({**new, "modules": [module], "layers": blocks})
    return rows, unresolved


def _kinds(row: Row, anatomy: Anatomy) -> Iterator[tuple[int, list[int]]]:
    """The kinds of blocks that have a value, each with those of its blocks; the model's own is of none."""
    if row.host == "model":
        yield -1, []
        return
    for kind, block in enumerate(anatomy.blocks):
        blocks = [layer for layer in block.layers if layer in row.layers]
        if blocks:
            yield kind, blocks


def _module(anatomy: Anatomy, host: str, blocks: Sequence[int]) -> str:
    """The path of a host's module, of the first block that is so."""
    if host == "model":
        return ""
    inner = anatomy.block(blocks[0]).hosts[host].module
    return f"{anatomy.backbone.blocks}.{blocks[0]}.{inner}".rstrip(".")


def _fits(
    expression: Expr, tensor: torch.Tensor, at: int, axes: Sequence[str], probes: Probes
) -> bool:
    """Whether an expression comes to what one run at the model's own size has."""
    if axes[at] in _CALL or at >= tensor.dim():
        return True
    return expression.value(probes.released) == tensor.shape[at]


def _dtype(
    row: Row,
    tensor: torch.Tensor | None,
    tensors: Mapping[tuple, torch.Tensor],
    blocks: Sequence[int],
) -> str:
    """A value's dtype, or both where blocks differ. Of one the run leaves out: that of what it is derived from or comes back as, or a size's integers."""
    source = "state_output" if row.value.name == "state_input" else row.value.source
    name = (
        source if tensor is None and source is not None and row.value.layout != "Size" else row.name
    )
    found = [
        tensors[key] for at in (blocks[:2] or [None]) if (key := (row.host, name, at)) in tensors
    ]
    return (
        "|".join(dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in found)) or "int64"
    )


def _sizes(
    model: LanguageModel, probes: Probes, types: Types, layers: Sequence[Sequence[int]]
) -> _Sizes:
    """The expression of each size that discovery gives a host.

    It is the one of the model's tensors' axes that comes to that size in several probes, where no other as simple does.
    """
    axes = [
        axis
        for one in types.found.values()
        for axis in one.axes
        if isinstance(axis, Expr) and axis.cap is None
    ]
    known = {
        axis.replaced(probes.follows): axis
        for axis in axes
        if not axis.names & {"B", "S", "Past", "Layers"}
    }
    known |= {Expr.name(name): Expr.name(name) for name in probes.singles if name not in ("B", "S")}
    candidates = sorted(known.values(), key=lambda one: (*_involved(one), str(one)))
    # A size that no tensor of the model itself has may be a share: a head's width where the class cuts the hidden size.
    singles = [name for name in probes.singles if name not in ("B", "S")]
    shares = [
        Expr.of({((one, 1), (other, -1)): 1})
        for one in singles
        for other in singles
        if one != other
    ]
    single = {at for probe in probes.singles.values() for at in probe}
    compared = [at for at in range(len(probes.runs) - 1, 0, -1) if at not in single][:_COMPARED]
    anatomies = [discover(probes.model(at)) for at in compared]

    def fit(numbers: Sequence[int | None]) -> Expr | None:
        sizes = [probes.released, *(probes.runs[at] for at in compared)]

        def among(some: Sequence[Expr]) -> list[Expr]:
            return [
                one
                for one in some
                if all(one.value(run) == number for run, number in zip(sizes, numbers, strict=True))
            ]

        fits = among(candidates) or among(shares)
        return (
            fits[0]
            if len(fits) == 1 or (fits and _involved(fits[0]) < _involved(fits[1]))
            else None
        )

    found: _Sizes = {}
    for kind, block in enumerate(model.anatomy.blocks):
        at = next((i for i, alike in enumerate(layers) if block.layers[0] in alike), None)
        if at is None or not compared:
            continue
        others = [anatomy.block(at) for anatomy in anatomies]
        for name, host in block.hosts.items():
            fitted = {
                axis: fit([number, *(one.hosts[name].sizes.get(axis) for one in others)])
                for axis, number in host.sizes.items()
            }
            found[kind, name] = {
                axis: expression for axis, expression in fitted.items() if expression is not None
            }
    logits = next(
        (one for where, one in types.found.items() if where[1:] == ("", "out", "logits")), None
    )
    top = {
        "hidden_size": found.get((0, "layers"), {}).get("hidden_size"),
        "vocab_size": None if logits is None else logits.axes[-1],
    }
    found[-1, "model"] = {
        axis: expression for axis, expression in top.items() if isinstance(expression, Expr)
    }
    return found


def _involved(expression: Expr) -> tuple[int, int]:
    return len(expression.terms), len(expression.names)
