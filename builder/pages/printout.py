"""The printout of a model as HTML, values and modules coloured by their role."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from explorer.vocabulary import HOSTS
from explorer.widgets.palette import role_of

_MODULE = re.compile(r"^(?P<indent> *)\((?P<name>[^()]+)\): (?P<rest>.*)$")
_VALUE = re.compile(
    r"^(?P<indent> *)\((?P<name>[\w.]+)\)(?P<arrow> -> )(?P<layout>[^:]*)(?P<rest>: .*)?$"
)


def printout_html(text: str) -> Markup:
    """Return what ``print(model)`` shows, escaped, with values and modules marked by role.

    A value line belongs to the host whose module encloses it, found by indentation.
    """
    stack: list[tuple[int, str]] = []
    lines = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip(" "))
        while stack and stack[-1][0] >= indent:
            stack.pop()
        host = stack[-1][1] if stack else "model"
        lines.append(_line(line, host))
        opened = _opened(line, host)
        if opened:
            stack.append((indent, opened))
    return Markup("\n").join(lines)


def _opened(line: str, host: str) -> str | None:
    """Return the host of the lines nested under ``line``, None where it opens none."""
    match = _MODULE.match(line)
    if not match or not line.rstrip().endswith("("):
        return None
    names = match["name"].split("/")
    for name in names:
        if name in HOSTS and name != "layers":
            return name
    if re.fullmatch(r"[\d, …–-]+", match["name"]):
        return "layers"
    return host


def _line(line: str, host: str) -> Markup:
    value = _VALUE.match(line)
    if value:
        # A value of a host without a module of its own is listed on the block, as
        # ``mlp.mlp_output``.
        prefix, _, bare = value["name"].rpartition(".")
        return Markup('{}(<b class="role-{}">{}</b>){}<i>{}</i>{}').format(
            value["indent"],
            role_of(prefix or host, bare),
            value["name"],
            value["arrow"],
            value["layout"],
            value["rest"] or "",
        )
    module = _MODULE.match(line)
    if module:
        return Markup('{}(<span class="role-{}">{}</span>): {}').format(
            module["indent"], _module_role(module["name"], host), module["name"], module["rest"]
        )
    return escape(line)


def _module_role(name: str, host: str) -> str:
    """Return the role of a module: that of the host it is, else by its name."""
    for alias in name.split("/"):
        if alias in HOSTS and alias not in ("model", "layers"):
            return role_of(alias)
        if alias == "router":
            return "router"
    return "norm" if "norm" in name else role_of(host)
