"""Comparisons of tensors: what an invariant measured, and the sentence that reports it."""

from __future__ import annotations

from typing import Any

import torch

from explorer.vocabulary import Value
from explorer.vocabulary.formatting import ranges

#: Where a comparison was made: a block, words, or words about a block; None for the model itself.
Where = int | str | tuple[int | None, str] | None


class Comparisons:
    """Collects the comparisons of one invariant on one host.

    tolerance: the relative error that `close` accepts unless it is given another.
    ``current`` are the values that the next comparisons are about, ``values`` those compared so
    far, and ``failing`` those of the comparisons that failed.
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        self.tolerance = tolerance
        self.count = 0
        self.worst: float | None = None
        self.limit: float | None = None
        self.layers: set[int] = set()
        self.failures: list[str] = []
        self.current: set[Value] = set()
        self.values: set[Value] = set()
        self.failing: set[Value] = set()

    def about(self, *values: Value) -> None:
        """State that the next comparisons are about these values and no others."""
        self.current.clear()
        self.current.update(values)

    def close(
        self, where: Where, actual: Any, expected: Any, tolerance: float | None = None
    ) -> None:
        """Compare up to ``tolerance`` times the largest magnitude in ``expected``."""
        limit = self.tolerance if tolerance is None else tolerance
        self._count(where)
        if not _same_shape(actual, expected):
            self._fail(where, _mismatch(actual, expected))
            return
        error = difference(actual, expected)
        # Written so that a nan counts as the worst error and as a failure.
        if self.worst is None or not error <= self.worst:
            self.worst = error
        self.limit = limit if self.limit is None else max(self.limit, limit)
        if not error <= limit:
            self._fail(where, f"relative error {error:.2g}, tolerance {limit:.2g}")

    def equal(self, where: Where, actual: Any, expected: Any) -> None:
        """Compare for equality; tensors bit by bit, where nan equals nan."""
        if actual is None or expected is None:
            self.holds(where, actual is expected, _mismatch(actual, expected))
        elif not isinstance(actual, torch.Tensor):
            self.holds(where, actual == expected, f"{actual!r} instead of {expected!r}")
        elif not _same_shape(actual, expected) or actual.dtype != expected.dtype:
            self.holds(where, False, _mismatch(actual, expected))
        else:
            differs = (actual != expected) & ~(actual.isnan() & expected.isnan())
            self.holds(
                where,
                not differs.any(),
                f"{int(differs.sum())} of {differs.numel()} elements differ",
            )

    def holds(self, where: Where, condition: Any, otherwise: str) -> None:
        """Check a condition; ``otherwise`` is what to report where it is false."""
        self._count(where)
        if not condition:
            self._fail(where, otherwise)

    def _count(self, where: Where) -> None:
        self.count += 1
        self.values |= self.current
        layer, _ = _split(where)
        if layer is not None:
            self.layers.add(layer)

    def _fail(self, where: Where, problem: str) -> None:
        layer, what = _split(where)
        parts = ["" if layer is None else f"block {layer}", what]
        location = ", ".join(part for part in parts if part)
        self.failures.append(f"{location}: {problem}" if location else problem)
        self.failing |= self.current

    @property
    def passed(self) -> bool:
        return self.count > 0 and not self.failures

    @property
    def detail(self) -> str:
        """What was measured, in one sentence; on failure what failed first."""
        if not self.count:
            return "nothing to compare"
        counted = f"{self.count} comparison{'s' * (self.count > 1)}"
        if self.failures:
            return f"{len(self.failures)} of {counted} failed; the first: {self.failures[0]}"
        if self.layers:
            counted += f" on {blocks(self.layers)}"
        if self.worst is None:
            return counted
        error = "no error" if self.worst == 0 else f"largest relative error {self.worst:.2g}"
        return f"{counted}; {error} (tolerance {self.limit:.2g})"


def _split(where: Where) -> tuple[int | None, str]:
    """Return the block and the words of a `Where`."""
    if isinstance(where, tuple):
        return where
    return (where, "") if isinstance(where, int) else (None, where or "")


def blocks(layers: set[int]) -> str:
    """Return ``block 3`` or ``blocks 0-2, 5``."""
    return f"block{'' if len(layers) == 1 else 's'} {ranges(sorted(layers), dash='-')}"


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute error, relative to the largest finite magnitude in ``expected``.

    It is nan where either tensor holds a nan. Equal infinities, as in masks, count as no error.
    """
    a, b = actual.detach().double(), expected.detach().double()
    if not a.numel():
        return 0.0
    error = torch.where(a == b, torch.zeros_like(a), (a - b).abs()).max().item()
    # A mask holds the most negative number of its dtype, beside which every error would vanish.
    magnitudes = b[b.abs() < 1e30].abs()
    scale = magnitudes.max().item() if magnitudes.numel() else 0.0
    return error / (scale if scale > 0 else 1.0)


def _same_shape(actual: Any, expected: Any) -> bool:
    both = isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)
    return both and actual.shape == expected.shape


def _mismatch(actual: Any, expected: Any) -> str:
    return f"{_describe(actual)} instead of {_describe(expected)}"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__ if isinstance(value, BaseException) else repr(value)
