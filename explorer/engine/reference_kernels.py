"""The torch functions that the faster kernels of packages implement.

A faster kernel runs only on the device it was written for. On the meta device the torch function
has to run, which takes the same arguments and returns the same results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxOutput


def reference(fn: Any) -> Any:
    """Return the torch function behind ``fn`` where it would run a package's kernel, or ``fn``."""
    if getattr(fn, "__name__", "") == "compile_friendly_flex_attention":
        return _flex_attention
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


def _flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    training: bool = False,
    enable_gqa: bool = False,
    **options: Any,
) -> Any:
    """Return what flex attention would, in shapes: it does not run on the meta device."""
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, enable_gqa=enable_gqa
    )
    logsumexp = query[..., 0].float()
    if options.get("return_aux") is not None:
        return mixed, AuxOutput(lse=logsumexp)
    return (mixed, logsumexp) if options.get("return_lse") else mixed
