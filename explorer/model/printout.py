"""The printout of a model: native modules, standard names and values with their layouts."""

# The tree of envoys and modules is had from the engine alone.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import re

import torch

from explorer import vocabulary
from explorer.engine.nnsight_api import Envoy
from explorer.model.envoys import ModulelessHost, host_values
from explorer.model.host_values import HostValues

#: The first line of a run of blocks.
_RUN = re.compile(r"^(?P<indent> *)\((?P<name>\d+(?:-\d+)?)\): (?:\d+ x )?(?P<class>\w+)\($")


def printout(envoy: Envoy) -> str:
    """Return the native tree with aliases and, on each host, the values it serves.

    Neighbouring blocks that print the same are printed once.
    """
    module = envoy._module
    if isinstance(module, torch.nn.ModuleList) and len(module):
        return f"{module._get_name()}({_indented(_blocks(envoy))})"
    lines = [line for line in module.extra_repr().split("\n") if line]
    children = _children(envoy)
    values = _value_lines(envoy)
    if len(lines) == 1 and not children and not values:
        return f"{module._get_name()}({lines[0]})"
    return f"{module._get_name()}({_indented(lines + children + values)})"


def folded(lines: list[str]) -> list[str]:
    """Return a printout's lines, each run of blocks like an earlier one cut to ``… as (0-2)``."""
    folded_lines: list[str] = []
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
            folded_lines.append(f"{lines[index]} … as ({seen[body]}) … )")
            index = end + 1
            continue
        if run and end > index:
            seen[body] = run["name"]
        folded_lines.append(lines[index])
        index += 1
    return folded_lines


def _indented(lines: list[str]) -> str:
    text = "\n".join(lines).replace("\n", "\n  ")
    return f"\n  {text}\n" if lines else ""


def _children(envoy: Envoy) -> list[str]:
    """Return an envoy's children under their names.

    The standard name is in front where a child has another too.
    """
    names: dict[str, list[str]] = {}
    mounted: list[str] = []
    for alias, path in envoy._aliases.items():
        if "." in path:
            mounted.append(alias)
        else:
            names.setdefault(path, []).append(alias)
    inside = {getattr(envoy, alias) for alias in mounted}
    lines: list[str] = []
    for name, child in envoy._named_children():
        if mounted and any(_contains(child, other) for other in inside):
            continue  # its parts are mounted here, under their standard names
        own = (
            name if envoy._aliases.get(name, name) == name else f"E_{name}"
        )  # where another module goes by its name
        lines.append(f"({'/'.join([*names.get(name, []), own])}): {printout(child)}")
    return lines + [f"({alias}): {printout(getattr(envoy, alias))}" for alias in mounted]


def _contains(envoy: Envoy, other: Envoy) -> bool:
    """Return whether an envoy is somewhere above another."""
    return other.path.startswith(f"{envoy.path}.")


def _blocks(envoy: Envoy) -> list[str]:
    """Return the blocks of a list, neighbours that print the same as one entry."""
    runs: list[tuple[int, int, str]] = []
    for index, child in enumerate(envoy):
        printed = printout(child)
        if runs and runs[-1][2] == printed:
            runs[-1] = (runs[-1][0], index, printed)
        else:
            runs.append((index, index, printed))
    return [
        f"({first}): {printed}"
        if first == last
        else f"({first}-{last}): {last - first + 1} x {printed}"
        for first, last, printed in runs
    ]


def _value_lines(envoy: Envoy) -> list[str]:
    """Return a line for each value on an envoy.

    A block also has those of its hosts without a module.
    """
    values = host_values(envoy)
    if values is None:
        return []
    lines = [f"({line}" for line in _named_values(values)]
    if values.name == "layers":
        for attribute, part in envoy.__dict__.items():
            if isinstance(part, ModulelessHost):
                lines += [f"({attribute}.{line}" for line in _named_values(part._host_values)]
    return lines


def _named_values(values: HostValues) -> list[str]:
    """Return the values a host serves, each without the bracket its line begins with."""
    return [
        f"{value.name}) -> {value.on(values.sizes).typed}: {value.meaning}"
        for value in vocabulary.BY_HOST[values.name].values()
        if value.name not in values.missing
    ]
