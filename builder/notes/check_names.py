"""Which names notes may use: a name that nothing has is a mistake, or news the notes missed."""

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

from explorer import vocabulary
from explorer.specimens.recipes import FAMILIES

#: ``{value:router_logits}`` or ``{value:mlp.router_logits}`` in prose.
MARKUP = re.compile(r"\{value:([^{}\s]*)\}")

_SPAN = re.compile(r"(`+)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_NAME = r"[A-Za-z_]\w*"
_CHAIN = re.compile(rf"{_NAME}(?:\[[^\]\n]*\])*(?:\(\))?(?:\.{_NAME}(?:\[[^\]\n]*\])*(?:\(\))?)*")
_BRACKETS = re.compile(r"\[[^\]\n]*\]|\(\)")
_SNAKE = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+")
_IDENTIFIER = re.compile(_NAME)

#: Special tokens such as ``<|im_start|>``: text, not names.
_SPECIAL_TOKEN = re.compile(r"<\|[^|\s]*\|>")


def check_names(
    blocks: Iterable[Any], namespace: Mapping[str, Any], words: Iterable[str] = ()
) -> Iterator[tuple[int, str]]:
    """Yield ``(line, message)`` for every name in ``blocks`` that nothing has.

    ``namespace`` is what the executed blocks find: a ``model`` in it lends the names of
    its modules, configuration and source. ``words`` are names declared by the notes.
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
    """``text`` as a standard value's name, host and all, where it is one; else None."""
    try:
        vocabulary.lookup(text)
    except vocabulary.UnknownValue:
        return None
    return text


def _prose(text: str, first: int, known: set[str], native: set[str]) -> Iterator[tuple[int, str]]:
    for mark in MARKUP.finditer(text):
        try:
            vocabulary.lookup(mark[1])
        except vocabulary.UnknownValue as error:
            yield first + text.count("\n", 0, mark.start()), str(error)
    for span in _SPAN.finditer(text):
        line = first + text.count("\n", 0, span.start())
        for chain in _CHAIN.finditer(_SPECIAL_TOKEN.sub(" ", span[2])):
            message = _wrong(_BRACKETS.sub("", chain[0]).split("."), known, native)
            if message:
                yield line, message


def _shown_code(
    text: str, first: int, known: set[str], native: set[str]
) -> Iterator[tuple[int, str]]:
    """Code that is not run: only what hangs on a host, or nearly is a value's name, can be judged."""
    for number, line in enumerate(text.split("\n"), start=first):
        code = line.partition("#")[0]
        for chain in _CHAIN.finditer(code):
            host, *rest = _BRACKETS.sub("", chain[0]).split(".")
            for name in rest:
                judged = host in vocabulary.HOSTS or difflib.get_close_matches(
                    name, vocabulary.NAMES, n=1, cutoff=0.85
                )
                message = _wrong([host, name], known | {host}, native) if judged else None
                if message:
                    yield number, message
                host = name


def _wrong(names: list[str], known: set[str], native: set[str]) -> str | None:
    """What is wrong with a dotted name, or None: an unknown part, or a value on a host without it."""
    for host, name in zip([None, *names], names):
        if _SNAKE.fullmatch(name) and name not in known:
            near = difflib.get_close_matches(name, vocabulary.NAMES, n=3, cutoff=0.5)
            hint = (
                f"the nearest values are {', '.join(near)}"
                if near
                else "no standard value is near it"
            )
            return (
                f"there is no {name!r} among the standard values, the model's names and this file's own; {hint} "
                "(a name from elsewhere is listed in the front matter's words)"
            )
        elsewhere = (
            name in vocabulary.NAMES
            and host in vocabulary.HOSTS
            and name not in vocabulary.BY_HOST[host]
        )
        if elsewhere and name not in native:
            hosts = ", ".join(value.host for value in vocabulary.lookup(name))
            return f"{host} has no value {name!r}; it is on {hosts}"
    return None


def _own_names() -> set[str]:
    """Names that hold for every file: the vocabulary, this library's public ones, torch, Python."""
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
    """A module's public names, those of its classes, and their parameters."""
    names: set[str] = set()
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        names.add(name)
        members = [thing, *vars(thing).values()] if inspect.isclass(thing) else [thing]
        if inspect.isclass(thing):
            names.update(member for member in dir(thing) if not member.startswith("_"))
            names.update(getattr(thing, "__annotations__", ()))
        for member in members:
            names |= _parameters(member)
    return names


def _parameters(thing: Any) -> set[str]:
    if not callable(thing):
        return set()
    try:
        return set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return set()


def _native_names(model: Any) -> set[str]:
    """Every name the transformers model has: modules, parameters, configuration, the words of its source."""
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
    """Variables, attributes, keywords and imports of a block that is going to be executed anyway."""
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
