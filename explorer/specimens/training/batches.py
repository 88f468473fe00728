"""Training sequences: plain text, text with a passage said twice, and random tokens repeated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FIRST_WORD_ID = 1  # entry 0 is the end token, which is no part of a text


@dataclass(frozen=True)
class Diet:
    """What is drawn: lengths of sequences and repeated segments, and the share of each kind.

    What the two shares leave over is random tokens repeated.
    """

    length: int
    text: float
    text_twice: float
    segment: tuple[int, int]


class Sampler:
    """Draws sequences from a stream of token ids [tokens], reproducibly."""

    def __init__(self, stream: torch.Tensor, vocab_size: int, seed: int) -> None:
        self.stream, self.vocab_size = stream, vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, rows: int, diet: Diet) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids [rows, length], whether each one can be learned [rows, length])."""
        drawn = [self._row(diet) for _ in range(rows)]
        return torch.stack([ids for ids, _ in drawn]), torch.stack(
            [counted for _, counted in drawn]
        )

    def _row(self, diet: Diet) -> tuple[torch.Tensor, torch.Tensor]:
        shortest, longest = diet.segment
        kind, size = (
            torch.rand((), generator=self.generator).item(),
            shortest + self._below(longest - shortest + 1),
        )
        counted = torch.ones(diet.length, dtype=torch.bool)
        if kind < diet.text:
            return self._window(diet.length), counted
        if kind < diet.text + diet.text_twice:
            return self._text_twice(size, diet.length), counted
        # Nothing tells the first copy of a random segment; learning it would only add noise.
        counted[: size + 1] = False
        return repeated(self._random_segment(size), diet.length), counted

    def _below(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self.generator))

    def _window(self, length: int) -> torch.Tensor:
        start = self._below(len(self.stream) - length + 1)
        return self.stream[start : start + length]

    def _random_segment(self, size: int) -> torch.Tensor:
        return torch.randint(FIRST_WORD_ID, self.vocab_size, (size,), generator=self.generator)

    def _text_twice(self, size: int, length: int) -> torch.Tensor:
        """A window of text into which one of its own passages is copied again further on."""
        row = self._window(length).clone()
        first = self._below(length - 2 * size + 1)
        second = first + size + self._below(length - 2 * size - first + 1)
        row[second : second + size] = row[first : first + size]
        return row


def repeated(segment: torch.Tensor, length: int) -> torch.Tensor:
    """``segment`` said again and again until ``length`` tokens are full: [length]."""
    copies = -(-length // len(segment))
    return segment.repeat(copies)[:length]
