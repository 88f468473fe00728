"""Pieces of evidence sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

#: What the rules yield: the key of a trait, and the evidence for it in words.
Evidence = Iterator[tuple[str, str]]


def blocks(layers: Collection[int], count: int) -> str:
    """Return which of ``count`` blocks, as in ``"12 of 24 blocks, block 3 first"``."""
    if len(layers) == count:
        return f"all {count} blocks" if count > 1 else "the one block"
    first = min(layers)
    if len(layers) == 1:
        return f"block {first} of {count}"
    return f"{len(layers)} of {count} blocks, block {first} first"


def listed(names: Iterable[str]) -> str:
    """Return ``"a, b and c"``, each name once."""
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} and {last}" if most else last


def name(path: str) -> str:
    """Return the last part of a module's path."""
    return path.rpartition(".")[2]


def number(value: float) -> str:
    """Return a number with at most four significant digits."""
    return f"{value:.4g}"
