"""The standard values of a loaded model, typed: each axis of a layout as an expression over the
family's sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from explorer import vocabulary
from explorer.discovery.anatomy import Anatomy
from explorer.discovery.discover import discover
from explorer.model.shapes import shapes
from explorer.signature.expressions import Expr
from explorer.signature.probes import Probes
from explorer.signature.types import CALL_NAMES, Type, Types
from explorer.vocabulary.formatting import CALL

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel
    from explorer.model.support import Row

#: What the call decides, by axis.
_CALL = {axis: Expr.name(name) for axis, name in CALL.items()}

#: The sizes of one host of one kind of block, by axis.
HostSizes = dict[tuple[int, str], dict[str, Expr]]


def typed_values(
    model: LanguageModel,
    sizes: HostSizes,
    released: Mapping[str, int],
    write: Callable[[Type], dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each value, or for each of its types where kinds of blocks differ, and what did not
    resolve.

    A row is ``{host, name, modules, layers, type}``, what did not resolve ``{at, axis, number}``.
    ``sizes`` are the hosts' (`ProbedHosts.expressions`), ``released`` the model's own sizes.
    """
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
                    and not _fits(expression, tensor, at, row.value.axes, released)
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
    """The kinds of blocks that have a value, each with those of its blocks; the model's own is of
    none."""
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
    expression: Expr,
    tensor: torch.Tensor,
    at: int,
    axes: Sequence[str],
    released: Mapping[str, int],
) -> bool:
    """Whether an expression comes to what one run at the model's own size has."""
    if axes[at] in _CALL or at >= tensor.dim():
        return True
    return expression.value(released) == tensor.shape[at]


def _dtype(
    row: Row,
    tensor: torch.Tensor | None,
    tensors: Mapping[tuple, torch.Tensor],
    blocks: Sequence[int],
) -> str:
    """A value's dtype, or both where blocks differ. Of one the run leaves out: that of what it is
    derived from or comes back as, or a size's integers."""
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


class ProbedHosts:
    """The sizes that discovery gives the hosts in one probe where all sizes changed, to tell
    expressions for them."""

    def __init__(self, probes: Probes) -> None:
        self.probes = probes

    @cached_property
    def _run(self) -> int | None:
        """The last probe in which many sizes changed."""
        single = {at for runs in self.probes.singles.values() for at in runs}
        return next(
            (at for at in range(len(self.probes.runs) - 1, 0, -1) if at not in single), None
        )

    @cached_property
    def _anatomy(self) -> Anatomy:
        assert self._run is not None
        return discover(self.probes.model.build(self.probes.numbers_of(self._run)))

    def expressions(
        self,
        model: LanguageModel,
        types: Types,
        layers: Sequence[Sequence[int]],
        released: Mapping[str, int],
    ) -> HostSizes:
        """The expression of each size that discovery gives a host of ``model``.

        It is the one of the model's tensors' axes that has that number in the model and in the
        probe, where no other as simple does. ``layers`` are, for each block of the probes, the
        model's blocks that are equal.
        """
        found: HostSizes = {}
        if self._run is None:
            return found
        candidates, quotients = self._candidates(types)
        sizes = (released, self.probes.runs[self._run])
        for kind, block in enumerate(model.anatomy.blocks):
            at = next((i for i, equal in enumerate(layers) if block.layers[0] in equal), None)
            if at is None:
                continue
            probed = self._anatomy.block(at)
            for name, host in block.hosts.items():
                found[kind, name] = {}
                for axis, number in host.sizes.items():
                    numbers = (number, probed.hosts[name].sizes.get(axis))
                    expression = _simplest(candidates, sizes, numbers) or _simplest(
                        quotients, sizes, numbers
                    )
                    if expression is not None:
                        found[kind, name][axis] = expression
        logits = next(
            (one for site, one in types.by_site.items() if site[1:] == ("", "out", "logits")), None
        )
        top = {
            "hidden_size": found.get((0, "layers"), {}).get("hidden_size"),
            "vocab_size": None if logits is None else logits.axes[-1],
        }
        found[-1, "model"] = {
            axis: expression for axis, expression in top.items() if isinstance(expression, Expr)
        }
        return found

    def _candidates(self, types: Types) -> tuple[list[Expr], list[Expr]]:
        """What a host's size may be: an axis of a tensor, or a size; else a quotient of two, such
        as a head's width that the class computes."""
        dependent = self.probes.dependent
        axes = {axis.replaced(dependent): axis for axis in types.expressions() if axis.cap is None}
        axes = {key: axis for key, axis in axes.items() if not axis.names & {*CALL_NAMES, "Layers"}}
        names = {name for axis in types.expressions() for name in axis.replaced(dependent).names}
        names = [name for name in self.probes.model.numbers if name in names - dependent.keys()]
        axes |= {Expr.name(name): Expr.name(name) for name in names}
        candidates = sorted(axes.values(), key=lambda one: (*_involved(one), str(one)))
        quotients = [
            Expr.of({((one, 1), (other, -1)): 1}) for one, other in itertools.permutations(names, 2)
        ]
        return candidates, quotients


def _simplest(
    candidates: Sequence[Expr], sizes: Sequence[Mapping[str, int]], numbers: Sequence[int | None]
) -> Expr | None:
    """The first candidate with these numbers at these sizes; None where the next is as simple."""
    fits = [
        one
        for one in candidates
        if all(one.value(own) == number for own, number in zip(sizes, numbers, strict=True))
    ]
    unique = len(fits) == 1 or (fits and _involved(fits[0]) < _involved(fits[1]))
    return fits[0] if unique else None


def _involved(expression: Expr) -> tuple[int, int]:
    return len(expression.terms), len(expression.names)
