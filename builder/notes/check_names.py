"""Check the names that notes use: one that exists nowhere is a mistake, or was renamed since.

``{value:mlp.router_logits}`` must be a standard value, and a name in backticks with an underscore
in it must belong to a standard value, the model's own modules, configuration and source, this
library, torch, or the notes' own code; any other (for example an option of a
chat template) is listed in the front matter's ``words``. A value named on a host that does not have
it (``self_attn.betas``) is refused too.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import inspect
import keyword
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from builder.notes.read import Block
from explorer import vocabulary
from explorer.specimens.recipes import FAMILIES

#: ``{value:router_logits}`` or ``{value:mlp.router_logits}`` in prose.
VALUE_MARKUP = re.compile(r"\{value:([^{}\s]*)\}")

_SPAN = re.compile(r"(`+)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_NAME = r"[A-Za-z_]\w*"
_CHAIN = re.compile(rf"{_NAME}(?:\[[^\]\n]*\])*(?:\(\))?(?:\.{_NAME}(?:\[[^\]\n]*\])*(?:\(\))?)*")
_BRACKETS = re.compile(r"\[[^\]\n]*\]|\(\)")
_SNAKE = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+")
_IDENTIFIER = re.compile(_NAME)

#: Special tokens such as ``<|im_start|>`` (bars are escaped inside a table): text, not names.
_SPECIAL_TOKEN = re.compile(r"<\\?\|[^|\s]*\|>")


def check_names(
    blocks: Iterable[Block], namespace: Mapping[str, Any], words: Iterable[str] = ()
) -> Iterator[tuple[int, str]]:
    """Yield ``(line, message)`` for every name in ``blocks`` that is not known.

    ``namespace``: the names the executed blocks may use; of a ``model`` in it, the names of its
    modules, configuration and source are known too. ``words``: names that the notes declare.
    """
    blocks = list(blocks)
    native = _native_names(namespace.get("model"))
    known = _own_names() | native | set(words) | set(namespace)
    for block in blocks:
        if block.kind == "run":
            known |= _code_names(block.text)
    for block in blocks:
        if block.kind == "prose":
            yield from _prose(block.text, block.line, known, native)
        elif block.kind == "shown" and block.language == "python":
            yield from _shown_code(block.text, block.line, known, native)


def value_name(text: str) -> str | None:
    """Return ``text`` where it names a standard value, with or without its host; else None."""
    try:
        vocabulary.lookup(text)
    except vocabulary.UnknownValue:
        return None
    return text


def _prose(text: str, first: int, known: set[str], native: set[str]) -> Iterator[tuple[int, str]]:
    for mark in VALUE_MARKUP.finditer(text):
        try:
            vocabulary.lookup(mark[1])
        except vocabulary.UnknownValue as error:
            yield first + text.count("\n", 0, mark.start()), str(error)
    for span in _SPAN.finditer(text):
        line = first + text.count("\n", 0, span.start())
        for chain in _CHAIN.finditer(_SPECIAL_TOKEN.sub(" ", span[2])):
            message = _problem(_BRACKETS.sub("", chain[0]).split("."), known, native)
            if message:
                yield line, message


def _shown_code(
    text: str, first: int, known: set[str], native: set[str]
) -> Iterator[tuple[int, str]]:
    """Check code that is not run: only attributes of a host, and names close to a value's, can
    be judged.
    """
    for number, line in enumerate(text.split("\n"), start=first):
        code = line.partition("#")[0]
        for chain in _CHAIN.finditer(code):
            host, *rest = _BRACKETS.sub("", chain[0]).split(".")
            for name in rest:
                checked = host in vocabulary.HOSTS or difflib.get_close_matches(
                    name, vocabulary.NAMES, n=1, cutoff=0.85
                )
                message = _problem([host, name], known | {host}, native) if checked else None
                if message:
                    yield number, message
                host = name


def _problem(names: list[str], known: set[str], native: set[str]) -> str | None:
    """Return what is wrong with a dotted name, or None: an unknown part, or a value on a host
    without it.
    """
    for host, name in zip([None, *names[:-1]], names, strict=True):
        if _SNAKE.fullmatch(name) and name not in known:
            near = difflib.get_close_matches(name, vocabulary.NAMES, n=3, cutoff=0.5)
            hint = (
                f"the nearest values are {', '.join(near)}"
                if near
                else "no standard value is near it"
            )
            return (
                f"there is no {name!r} among the standard values, the model's names and this "
                f"file's own; {hint} "
                "(a name from elsewhere is listed in the front matter's words)"
            )
        on_wrong_host = (
            name in vocabulary.NAMES
            and host in vocabulary.HOSTS
            and name not in vocabulary.BY_HOST[host]
        )
        if on_wrong_host and name not in native:
            hosts = ", ".join(value.host for value in vocabulary.lookup(name))
            return f"{host} has no value {name!r}; it is on {hosts}"
    return None


def _own_names() -> set[str]:
    """Return the names known in every file: the vocabulary, this library's public ones, torch,
    Python.
    """
    import torch

    names = {*vocabulary.NAMES, *vocabulary.HOSTS, *FAMILIES, *keyword.kwlist, *dir(builtins)}
    for layout in vocabulary.LAYOUTS.values():
        names.update(layout.axes)
    for owner in (torch, torch.Tensor, torch.nn.functional, torch.testing):
        names.update(dir(owner))
    for name, module in list(sys.modules.items()):
        if name == "explorer" or name.startswith("explorer."):
            names |= _module_names(module)
    return names


def _module_names(module: ModuleType) -> set[str]:
    """Return a module's public names, those of its classes, and their parameters."""
    names: set[str] = set()
    for name, member in vars(module).items():
        if name.startswith("_") or getattr(member, "__module__", None) != module.__name__:
            continue
        names.add(name)
        names |= _parameters(member)
        if inspect.isclass(member):
            names.update(attribute for attribute in dir(member) if not attribute.startswith("_"))
            names.update(getattr(member, "__annotations__", ()))
            for attribute in vars(member).values():
                names |= _parameters(attribute)
    return names


def _parameters(function: Any) -> set[str]:
    if not callable(function):
        return set()
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def _native_names(model: Any) -> set[str]:
    """Return every name of the transformers model: modules, parameters, configuration,
    identifiers in its source.
    """
    native = getattr(model, "_module", model)
    if not hasattr(native, "named_modules"):
        return set()
    names: set[str] = set()
    for path, module in native.named_modules():
        names.update(path.split("."))
        names.update(key for key in vars(module) if not key.startswith("_"))
        names.update(name for name, _ in module.named_parameters(recurse=False))
    config = getattr(native, "config", None)
    if config is not None:
        names.update(config.to_dict())
        names |= _source_names(type(config).__module__)
    return names | _source_names(type(native).__module__)


def _source_names(module: str) -> set[str]:
    try:
        return set(_IDENTIFIER.findall(inspect.getsource(sys.modules[module])))
    except (KeyError, OSError, TypeError):
        return set()


def _code_names(code: str) -> set[str]:
    """Return the variables, attributes, keywords and imports of a block that will be executed."""
    names: set[str] = set()
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return names
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword | ast.arg) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.update(node.name.split("."))
    return names
