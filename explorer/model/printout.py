"""The printout of a model: native modules, standard names and values with their layouts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from explorer import vocabulary
from explorer.engine.nnsight_api import Envoy
from explorer.model.envoys import HostPart, Standard

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel

#: The first line of a run of blocks.
_RUN = re.compile(r"^(?P<indent> *)\((?P<name>\d+(?:-\d+)?)\): (?:\d+ x )?(?P<class>\w+)\($")


def printout(model: LanguageModel) -> str:
    """The native tree with aliases and, on each host, the values it serves; equal blocks once."""
    return _shown(model)


def folded(lines: list[str]) -> list[str]:
    """The lines with every run of blocks that repeats an earlier one cut to ``… as (0-2)``."""
    kept: list[str] = []
    seen: dict[tuple[str, ...], str] = {}
    index = 0
    while index < len(lines):
        run = _RUN.match(lines[index])
        end = index
        if run:
            end = next(
                (i for i in range(index, len(lines)) if lines[i] == f"{run['indent']})"), index
            )
        body = (run["class"], *lines[index + 1 : end]) if run else ()
        if run and body in seen:
            kept.append(f"{lines[index]} … as ({seen[body]}) … )")
            index = end + 1
            continue
        if run and end > index:
            seen[body] = run["name"]
        kept.append(lines[index])
        index += 1
    return kept


def _shown(envoy: Envoy) -> str:
    module = envoy._module
    if isinstance(module, torch.nn.ModuleList) and len(module):
        return f"{module._get_name()}({_body(_collapsed(envoy))})"
    lines = [line for line in module.extra_repr().split("\n") if line]
    children = _children(envoy)
    values = _values(envoy)
    if len(lines) == 1 and not children and not values:
        return f"{module._get_name()}({lines[0]})"
    return f"{module._get_name()}({_body(lines + children + values)})"


def _body(lines: list[str]) -> str:
    text = "\n".join(lines).replace("\n", "\n  ")
    return f"\n  {text}\n" if lines else ""


def _children(envoy: Envoy) -> list[str]:
    """Children under their names, the standard one in front where they have another."""
    names: dict[str, list[str]] = {}
    mounted = []
    for alias, path in envoy._aliases.items():
        if "." in path:
            mounted.append(alias)
        else:
            names.setdefault(path, []).append(alias)
    inside = {getattr(envoy, alias) for alias in mounted}
    lines = []
    for name, child in envoy._named_children():
        if mounted and any(_holds(child, other) for other in inside):
            continue  # its parts are mounted here, under their standard names
        own = (
            name if envoy._aliases.get(name, name) == name else f"E_{name}"
        )  # where another module goes by its name
        lines.append(f"({'/'.join([*names.get(name, []), own])}): {_shown(child)}")
    return lines + [f"({alias}): {_shown(getattr(envoy, alias))}" for alias in mounted]


def _holds(envoy: Envoy, other: Envoy) -> bool:
    return other.path.startswith(f"{envoy.path}.")


def _collapsed(envoy: Envoy) -> list[str]:
    runs: list[list] = []
    for index, child in enumerate(envoy):
        shown = _shown(child)
        if runs and runs[-1][2] == shown:
            runs[-1][1] = index
        else:
            runs.append([index, index, shown])
    return [
        f"({first}): {shown}"
        if first == last
        else f"({first}-{last}): {last - first + 1} x {shown}"
        for first, last, shown in runs
    ]


def _values(envoy: Envoy) -> list[str]:
    standard = envoy.__dict__.get("_standard")
    if standard is None:
        return []
    lines = [f"({line}" for line in _lines(standard)]
    if standard.name == "layers":  # parts of the block that are no modules show their values on it
        for attribute, part in envoy.__dict__.items():
            if isinstance(part, HostPart):
                lines += [f"({attribute}.{line}" for line in _lines(part._standard)]
    return lines


def _lines(standard: Standard) -> list[str]:
    """The values a host serves, each without the bracket its line begins with."""
    return [
        f"{value.name}) -> {value.typed}: {value.meaning}"
        for value in vocabulary.BY_HOST[standard.name].values()
        if value.name not in standard.missing
    ]
