"""The torch functions that the faster kernels of packages implement.

A faster kernel runs only on the device it was written for. On the meta device the torch function
has to run, which takes the same arguments and returns the same results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


def reference(fn: Any) -> Any:
    """Return the torch function behind ``fn`` where it would run a package's kernel, or ``fn``."""
    runs_kernel = inspect.isfunction(fn) and any(map(_has_kernel, _wrappers(fn)))
    return inspect.unwrap(fn) if runs_kernel else fn


def _wrappers(fn: Callable) -> list[Callable]:
    """Return a function and those it wraps, outermost first."""
    functions = [fn]
    while (inner := getattr(functions[-1], "__wrapped__", None)) is not None:
        functions.append(inner)
    return functions


def _has_kernel(fn: Callable) -> bool:
    """Return whether this is transformers' wrapper with a package's kernel behind it."""
    code = getattr(fn, "__code__", None)
    if code is None or "is_new_implementation" not in code.co_freevars:
        return False
    cells = dict(zip(code.co_freevars, fn.__closure__ or (), strict=True))
    return bool(cells["is_new_implementation"].cell_contents)


def runs_kernels(module: torch.nn.Module) -> bool:
    """Return whether a module's forward calls, by name, what would run a package's kernel."""
    forward = inspect.unwrap(type(module).forward)
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    return code is not None and any(
        reference(names.get(name)) is not names.get(name) for name in code.co_names
    )
