"""Pieces of evidence in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def blocks(layers: Collection[int], count: int) -> str:
    """Which blocks, as evidence says it: ``"all 24 blocks"``, ``"12 of 24 blocks, the first of them block 3"``."""
    if len(layers) == count:
        return f"all {count} blocks" if count > 1 else "the one block"
    first = min(layers)
    if len(layers) == 1:
        return f"block {first} of {count}"
    return f"{len(layers)} of {count} blocks, the first of them block {first}"


def listed(names: Iterable[str]) -> str:
    """``"a, b and c"``, each once."""
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} and {last}" if most else last


def name(path: str) -> str:
    """What a module is called, of its path."""
    return path.rpartition(".")[2]


def number(value: float) -> str:
    """A number, at most four digits of it."""
    return f"{value:.4g}"
