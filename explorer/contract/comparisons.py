"""A tally of comparisons: what a law measured, and the sentence that reports it."""

from __future__ import annotations

from typing import Any

import torch

from explorer.vocabulary import Value
from explorer.vocabulary.formatting import ranges

#: Where a comparison was made: a block, words, or words about a block (None for the model itself).
Where = int | str | tuple[int | None, str] | None


class Comparisons:
    """Collects the comparisons of one law on one host.

    allowed: the relative error `near` lets pass unless told otherwise. ``looked`` are the values
    the next comparisons are about; ``values`` those compared so far, ``failing`` those of a comparison that failed.
    """

    def __init__(self, allowed: float = 0.0) -> None:
        self.allowed = allowed
        self.count = 0
        self.worst: float | None = None
        self.limit: float | None = None
        self.layers: set[int] = set()
        self.failures: list[str] = []
        self.looked: set[Value] = set()
        self.values: set[Value] = set()
        self.failing: set[Value] = set()

    def of(self, *values: Value) -> None:
        """What follows compares these values and no others, until another is looked at."""
        self.looked.clear()
        self.looked.update(values)

    def near(self, where: Where, got: Any, want: Any, allowed: float | None = None) -> None:
        """``got`` equals ``want`` up to ``allowed`` of the largest number in ``want``."""
        limit = self.allowed if allowed is None else allowed
        self._seen(where)
        if not _alike(got, want):
            self._fail(where, f"{_kind(got)} where {_kind(want)} belongs")
            return
        error = difference(got, want)
        if self.worst is None or not error <= self.worst:
            self.worst = error
        self.limit = limit if self.limit is None else max(self.limit, limit)
        if not error <= limit:
            self._fail(where, f"an error of {error:.2g} where {limit:.2g} is allowed")

    def same(self, where: Where, got: Any, want: Any) -> None:
        """``got`` equals ``want`` to the bit (None equals None)."""
        if got is None or want is None:
            self.holds(where, got is want, f"{_kind(got)} where {_kind(want)} belongs")
        elif not isinstance(got, torch.Tensor):
            self.holds(where, got == want, f"{got!r} where {want!r} belongs")
        elif not _alike(got, want) or got.dtype != want.dtype:
            self.holds(where, False, f"{_kind(got)} where {_kind(want)} belongs")
        else:
            other = (got != want) & ~((got != got) & (want != want))
            self.holds(
                where, not other.any(), f"{int(other.sum())} of {other.numel()} numbers differ"
            )

    def holds(self, where: Where, condition: Any, otherwise: str) -> None:
        """``condition`` is true; ``otherwise`` says in words what was found instead."""
        self._seen(where)
        if not condition:
            self._fail(where, otherwise)

    def _seen(self, where: Where) -> None:
        self.count += 1
        self.values |= self.looked
        layer = where[0] if isinstance(where, tuple) else where
        if isinstance(layer, int):
            self.layers.add(layer)

    def _fail(self, where: Where, words: str) -> None:
        layer, what = (
            where
            if isinstance(where, tuple)
            else (where, "")
            if isinstance(where, int)
            else (None, where)
        )
        place = ", ".join(
            part for part in ("" if layer is None else f"block {layer}", what) if part
        )
        self.failures.append(f"{place}: {words}" if place else words)
        self.failing |= self.looked

    @property
    def passed(self) -> bool:
        return self.count > 0 and not self.failures

    @property
    def detail(self) -> str:
        """What was measured, in one sentence; on failure what failed first."""
        if not self.count:
            return "nothing was found to compare"
        if self.failures:
            return f"{len(self.failures)} of {self.count} failed; first {self.failures[0]}"
        parts = [f"{self.count} comparison" + ("s" if self.count > 1 else "")]
        if self.layers:
            parts[0] += f" on {blocks(self.layers)}"
        if self.worst is None:
            return parts[0]
        exact = "equal to the bit" if self.worst == 0 else f"largest error {self.worst:.2g}"
        return f"{parts[0]}; {exact}, {self.limit:.2g} allowed"


def blocks(layers: set[int]) -> str:
    """``block 3``, ``blocks 0-2, 5``."""
    return f"block{'' if len(layers) == 1 else 's'} {ranges(sorted(layers), dash='-')}"


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest ``|got - want|``, relative to the largest finite ``|want|``; nan where either is nan.

    Equal infinities, as a mask has them, differ by nothing.
    """
    a, b = got.detach().double(), want.detach().double()
    if not a.numel():
        return 0.0
    gap = torch.where(a == b, torch.zeros_like(a), (a - b).abs()).max().item()
    # A mask is the most negative number there is: it would hide every error beside it.
    size = b[b.abs() < 1e30].abs()
    return gap / (scale if size.numel() and (scale := size.max().item()) > 0 else 1.0)


def _alike(got: Any, want: Any) -> bool:
    return (
        isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor) and got.shape == want.shape
    )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__ if isinstance(value, BaseException) else repr(value)
