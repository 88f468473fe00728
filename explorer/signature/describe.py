"""From the types of every tensor to what a page says: generics, entries, the cache, and each module
class once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from explorer.signature.expressions import Expr
from explorer.signature.observation import DECODE, PREFILL
from explorer.signature.sizes import order
from explorer.signature.types import Type, Types

Json = dict[str, Any]

#: What leaf classes that stand in a model with several sizes call the axes of their parameters, by
#: the number of axes.
_FORMAL = {
    "Linear": {"weight": ("Out", "In"), "bias": ("Out",)},
    "Conv1D": {"weight": ("In", "Out"), "bias": ("Out",)},
    "Embedding": {"weight": ("Entries", "Size")},
}


@dataclass
class Description:
    """A model with one block of each kind, its types, and how pages write a type.

    ``layers`` are, for each block of ``module``, the blocks of the whole model that are so;
    ``blocks`` is the block list's path; ``cache_writers`` is, by block, the path of the module that
    writes to its cache.
    """

    module: nn.Module
    types: Types
    write: Callable[[Type], Json]
    blocks: str
    layers: list[list[int]]
    cache_writers: Mapping[int, str]

    # -- entries ---------------------------------------------------------------

    def entries(self) -> list[Json]:
        """The calls a model takes: a prompt without a cache, with one, one token more, and what
        comes of the last position alone."""
        given, returned = self._io(PREFILL, "")
        logits = next((one for one in returned if one["name"] == "logits"), None)
        entries = [
            {
                "name": "forward",
                "arguments": given,
                "results": returned,
                "reads": False,
                "writes": False,
            }
        ]
        entries.append(
            {
                "name": "prefill",
                "arguments": given,
                "results": returned,
                "reads": False,
                "writes": True,
            }
        )
        given, returned = self._io(DECODE, "")
        if returned:
            entries.append(
                {
                    "name": "decode",
                    "arguments": given,
                    "results": returned,
                    "reads": True,
                    "writes": True,
                }
            )
        if logits is not None:
            kept = {
                key: [*value[:1], *value[2:]] if isinstance(value, list) else value
                for key, value in logits["type"].items()
            }
            entries.append(
                {
                    "name": "next_token",
                    "arguments": entries[0]["arguments"],
                    "results": [{"name": "probabilities", "type": kept}],
                    "reads": False,
                    "writes": False,
                }
            )
        return entries

    def _io(self, call: str, path: str) -> tuple[list[Json], list[Json]]:
        return self._named(call, path, "in"), self._named(call, path, "out")

    def _named(self, call: str, path: str, what: str) -> list[Json]:
        return [
            {"name": name, "type": self.write(found)}
            for name, found in self.types.at(call, path, what)
        ]

    # -- what is kept ------------------------------------------------------------

    def cache(self) -> list[Json]:
        """What each kind of block keeps between calls: after a prompt, and after one more token."""
        found = []
        for at, layers in self._kinds():
            tensors = self._kept(str(at), "cache")
            for path in self._inside(f"{self.blocks}.{at}"):
                tensors += self._kept(path, "held")
            if tensors:
                inner = (
                    self.cache_writers.get(at, "").removeprefix(f"{self.blocks}.{at}").lstrip(".")
                )
                found.append({"layers": layers, "module": inner, "tensors": tensors})
        return found

    def _kept(self, path: str, what: str) -> list[Json]:
        later = dict(self.types.at(DECODE, path, what))
        return [
            {
                "name": _plain(name),
                "after_prefill": self.write(first),
                "after_decode": self.write(later[name]) if name in later else None,
            }
            for name, first in self.types.at(PREFILL, path, what)
        ]

    def _kinds(self) -> Iterator[tuple[int, list[int]]]:
        """The first block of each kind, with those of the whole model that are so."""
        yield from (
            (at, layers)
            for at, layers in enumerate(self.layers)
            if layers and layers not in self.layers[:at]
        )

    # -- blocks ------------------------------------------------------------------

    def classes(self) -> list[Json]:
        """Each module class once, or once for each way it is built; the model first."""
        alike: dict[tuple, list[str]] = {}
        for path, module in self.module.named_modules():
            if (
                not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
                or type(module).forward is not nn.Module.forward
            ):
                alike.setdefault(self._built(module), []).append(path)
        formal = {
            path: _GenericClass(self, paths) for paths in alike.values() for path in paths[:1]
        }
        by_path = {path: formal[paths[0]] for paths in alike.values() for path in paths}
        return [self._class(paths, formal[paths[0]], by_path) for paths in alike.values()]

    @staticmethod
    def _built(module: nn.Module) -> tuple:
        children = tuple(
            (name, type(child).__name__)
            for name, child in module.named_children()
            if not name.isdigit()
        )
        own = tuple(name for name, one in module._parameters.items() if one is not None)
        return type(module).__name__, children, own

    def _class(
        self, paths: list[str], formal: _GenericClass, others: Mapping[str, _GenericClass]
    ) -> Json:
        path = paths[0]
        module = self.module.get_submodule(path)
        subs = []
        for name, child in module.named_children():
            inner = f"{path}.{name}".lstrip(".")
            if isinstance(child, nn.ModuleList) and len(child):
                kinds = (
                    {at: len(layers) for at, layers in self._kinds()}
                    if inner == self.blocks
                    else {0: len(child)}
                )
                subs += [
                    self._sub(name, f"{inner}.{at}", others, count) for at, count in kinds.items()
                ]
            else:
                subs.append(self._sub(name, inner, others, None))
        return {
            "class": type(module).__name__,
            "paths": list(dict.fromkeys(self._whole(one) for one in paths)),
            "layers": sorted({layer for one in paths for layer in self._layers(one)}),
            "generics": formal.names,
            "parameters": formal.fields("", "parameter"),
            "buffers": formal.fields("", "buffer"),
            "submodules": [sub for sub in subs if sub is not None],
            "state": self._state(paths),
            "functions": [
                one
                for one in (formal.function("forward", PREFILL), formal.function("decode", DECODE))
                if one is not None
            ],
        }

    def _sub(
        self, name: str, path: str, others: Mapping[str, _GenericClass], count: int | None
    ) -> Json | None:
        formal = others.get(path)
        if formal is None:
            return None
        found: Json = {
            "name": name,
            "class": type(self.module.get_submodule(path)).__name__,
            "arguments": formal.arguments(path),
        }
        return found if count is None else {**found, "count": count}

    def _state(self, paths: Sequence[str]) -> list[Json]:
        for at, path in self.cache_writers.items():
            if path in paths and at < len(self.layers):
                return self._kept(str(at), "cache") or self._kept(path, "held")
        return next((held for path in paths if (held := self._kept(path, "held"))), [])

    def _layers(self, path: str) -> list[int]:
        """The blocks of the whole model a path of the small one stands for."""
        rest = path.removeprefix(f"{self.blocks}.")
        return self.layers[int(rest.split(".")[0])] if rest != path else []

    def _whole(self, path: str) -> str:
        """The path in the whole model, of the first block that is so."""
        rest = path.removeprefix(f"{self.blocks}.")
        if rest == path:
            return path
        at, _, inner = rest.partition(".")
        return f"{self.blocks}.{(self.layers[int(at)] or [int(at)])[0]}.{inner}".rstrip(".")

    def _inside(self, path: str) -> Iterator[str]:
        for name, _ in self.module.get_submodule(path).named_modules():
            yield f"{path}.{name}".rstrip(".")


class _GenericClass:
    """One class and the generics of its own: names for the axes in which its instances differ.

    An axis that all instances have alike is written in the model's generics. Axes that differ in
    the same way share a name. Leading axes of what a forward takes, where they differ, are any.
    """

    def __init__(self, model: Description, paths: Sequence[str]) -> None:
        self.model, self.paths = model, paths
        self.kind = type(model.module.get_submodule(paths[0])).__name__
        self.own: dict[tuple[str, ...], str] = {}
        for name, found in self._fields("", "parameter"):
            hints = _FORMAL.get(self.kind, {}).get(name, ())
            for at in range(min(len(one.axes) for one in found)):
                self._axis([one.axes[at] for one in found], hints[at] if at < len(hints) else "")

    @property
    def names(self) -> list[str]:
        """The generics, what is read before what is returned."""
        return sorted(self.own.values(), key=lambda name: name != "In")

    def arguments(self, path: str) -> list[str]:
        """What an instance binds the generics to."""
        at, texts = self.paths.index(path), {name: texts for texts, name in self.own.items()}
        return [texts[name][at] for name in self.names]

    def fields(self, call: str, what: str) -> list[Json]:
        return [
            {"name": name, "type": self._type(found)} for name, found in self._fields(call, what)
        ]

    def function(self, name: str, call: str) -> Json | None:
        """The typed forward of one call; None where no instance ran in it."""
        given, returned = self.fields(call, "in"), self.fields(call, "out")
        return (
            {"name": name, "arguments": given, "results": returned} if given or returned else None
        )

    def _fields(self, call: str, what: str) -> Iterator[tuple[str, list[Type]]]:
        """Of each name the types in the instances; one that did not run takes and returns
        nothing."""
        every = [dict(self.model.types.at(call, path, what)) for path in self.paths]
        for name in dict.fromkeys(name for one in every for name in one):
            if call or all(name in one for one in every):
                yield name, [one[name] for one in every if name in one]

    def _text(self, axis: Expr | int | None) -> str:
        return self.model.write(Type((axis,), ""))["dims"][0]

    def _axis(self, axes: Sequence[Expr | int | None], hint: str = "") -> str:
        texts = tuple(self._text(axis) for axis in axes)
        if len(set(texts)) == 1:
            return texts[0]
        if texts not in self.own:
            name = hint or (
                "Size" if "Size" not in self.own.values() else f"Size{len(self.own) + 1}"
            )
            self.own[texts] = (
                name if name not in self.own.values() else f"{name}{len(self.own) + 1}"
            )
        return self.own[texts]

    def _type(self, found: Sequence[Type]) -> Json:
        whole = self.model.write(found[0])
        if all(self.model.write(one)["dims"] == whole["dims"] for one in found):
            return whole
        if len({len(one.axes) for one in found}) == 1:
            texts = [
                tuple(self._text(one.axes[at]) for one in found) for at in range(len(found[0].axes))
            ]
            if all(len(set(one)) == 1 or one in self.own for one in texts):
                dims = [one[0] if len(set(one)) == 1 else self.own[one] for one in texts]
                return {"dims": dims, "numbers": None, "dtype": whole["dtype"]}
        last = tuple(self._text(one.axes[-1]) if one.axes else "" for one in found)
        tail = last[0] if len(set(last)) == 1 else self.own.get(last, "*")
        return {
            "dims": ["*"] if tail == "*" else ["*", tail],
            "numbers": None,
            "dtype": whole["dtype"],
        }


def _plain(name: str) -> str:
    """A cache's tensor by its name alone, where there is one of them."""
    return name.removesuffix(".0")


def by_rank(names: Sequence[str]) -> list[str]:
    """Names as the table lists them, others behind."""
    rank = order()
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), name))
