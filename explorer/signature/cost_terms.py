"""Parts of cost formulas: operations of a product, bytes of a number, labels of kinds of blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from explorer.signature.expressions import Expr, product
from explorer.signature.sizes import camel


class UnknownCost(ValueError):
    """A cost whose formula cannot be had, since an axis did not resolve."""


def bytes_of(dtype: str) -> int:
    """Return the bytes of one number of a dtype."""
    if "|" in dtype:
        raise UnknownCost(f"some blocks have it in another dtype ({dtype})")
    return getattr(torch, dtype).itemsize


def product_operations(
    kind: str, left: Sequence[Expr], right: Sequence[Expr], out: Sequence[Expr]
) -> Expr:
    """Return the operations of a matrix product: two for each multiplication."""
    if kind == "aten.convolution":
        return product([Expr.number(2), left[0], *right, *out[2:]])
    return product([Expr.number(2), *left, right[-1]])


def enclosing_paths(path: str) -> list[str]:
    """Return a module's path and those of the modules around it, innermost first."""
    steps = path.split(".")
    return [".".join(steps[:i]) for i in range(len(steps), 0, -1)]


def value_or_unknown(ask: Callable[[], Any]) -> Any:
    """Return what ``ask`` returns, or ``{"unknown": reason}`` where it raises UnknownCost."""
    try:
        return ask()
    except UnknownCost as error:
        return {"unknown": str(error)}


def label_kinds(model: nn.Module, blocks: Sequence[nn.Module], said: Sequence[str]) -> list[str]:
    """Return a word for each kind of block: the classes that only its submodules have, without the
    family's name, else the configuration's word for it (``said``).
    """
    prefix = type(model).__name__.partition("For")[0]
    parts = [
        [(path, type(one).__name__) for path, one in block.named_modules() if path]
        for block in blocks
    ]
    common = set.intersection(*map(set, parts)) if parts else set()
    words: list[str] = []
    for at, own in enumerate(parts):
        names = [
            name for path, name in own if (path, name) not in common and name.startswith(prefix)
        ]
        apart = [name.removeprefix(prefix) for name in dict.fromkeys(names)]
        choices = ["".join(apart[:count]) for count in range(1, len(apart) + 1)]
        words.append(
            next(
                (word for word in [*choices, camel(said[at])] if word and word not in words),
                f"Kind{at + 1}",
            )
        )
    return words
