"""What a forward computes, seen without anything of discovery: torch's hooks, functions of the
modeling files replaced by ones that note their call, and arithmetic from the weights.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

#: The functions of modeling files whose calls are noted.
FUNCTIONS = (
    "eager_attention_forward",
    "apply_rotary_pos_emb",
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "mamba2_chunk_scan",
    "mamba_selective_scan",
)

#: A standard value's name with its host, and what it is.
Named = Iterator[tuple[str, torch.Tensor]]


@dataclass
class Noted:
    """One call: what it was given and what it returned, copied as they were then."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def input(self) -> torch.Tensor:
        """The first tensor it was given."""
        given = (*self.args, *self.kwargs.values())
        return next(one for one in given if isinstance(one, torch.Tensor))

    @property
    def result(self) -> torch.Tensor:
        """What it returned, or the first of that."""
        return self.output[0] if isinstance(self.output, tuple | list) else self.output


@dataclass
class Forward:
    """A plain forward: the calls of its modules by path, and of functions by name and by the path
    of the module that was running.
    """

    hf: Any
    ids: torch.Tensor
    output: Any = None
    modules: dict[str, list[Noted]] = field(default_factory=lambda: defaultdict(list))
    functions: dict[tuple[str, str], list[Noted]] = field(default_factory=lambda: defaultdict(list))

    def call(self, path: str) -> Noted:
        """Return the one call of a module."""
        (only,) = self.modules[path]
        return only

    def function(self, name: str, path: str) -> Noted | None:
        """Return the one call of a function in a module's forward, None where there was none."""
        calls = self.functions.get((name, path), [])
        assert len(calls) <= 1, (name, path, len(calls))
        return calls[0] if calls else None


def observed(hf: Any, ids: torch.Tensor) -> Forward:
    """Run a model once without any of its instrumentation and return what was seen."""
    forward = Forward(hf, ids)
    running: list[str] = []
    with ExitStack() as undo, torch.no_grad():
        for path, module in hf.named_modules():
            undo.enter_context(_hooks(forward, running, path, module))
        files = {type(module).__module__ for module in hf.modules()}
        for file in (sys.modules[name] for name in files if ".models." in name):
            for name in FUNCTIONS:
                if hasattr(file, name):
                    noting = _noting(forward, running, name, getattr(file, name))
                    undo.enter_context(mock.patch.object(file, name, noting))
        forward.output = hf(ids, use_cache=True)
    return forward


@contextmanager
def _hooks(forward: Forward, running: list[str], path: str, module: Any) -> Iterator[None]:
    given: list[tuple] = []

    def before(_: Any, args: tuple, kwargs: dict) -> None:
        running.append(path)
        given.append((_copied(args), _copied(kwargs)))

    def after(_: Any, args: tuple, kwargs: dict, output: Any) -> None:
        running.pop()
        forward.modules[path].append(Noted(*given.pop(), _copied(output)))

    handles = (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _noting(forward: Forward, running: list[str], name: str, function: Any) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        given = _copied(args), _copied(kwargs)
        output = function(*args, **kwargs)
        forward.functions[name, running[-1]].append(Noted(*given, _copied(output)))
        return output

    return noting


def _copied(value: Any) -> Any:
    """Copy the tensors in tuples, lists and dicts; anything else is left out of them or kept."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return tuple(_copied(one) for one in value)
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    return value
