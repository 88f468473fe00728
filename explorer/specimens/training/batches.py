"""Training sequences of three kinds: plain text, text in which a passage is repeated, and a random
segment repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FIRST_TEXT_ID = 1  # id 0 is the end-of-text token, which never occurs within a text


@dataclass(frozen=True)
class SequenceMix:
    """The length of the sequences, the share of each kind, and the lengths of repeated segments.

    length: tokens of a sequence. text_share, repeated_text_share: shares of sequences that are
    plain text and text with a repeated passage; the rest are random segments repeated.
    segment_lengths: the shortest and the longest segment in tokens, both included.
    """

    length: int
    text_share: float
    repeated_text_share: float
    segment_lengths: tuple[int, int]


class BatchSampler:
    """Samples batches of sequences from a stream of token ids [tokens], reproducibly."""

    def __init__(self, stream: torch.Tensor, vocab_size: int, seed: int) -> None:
        self.stream, self.vocab_size = stream, vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, batch_size: int, mix: SequenceMix) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids [batch, seq] and the mask [batch, seq] of those that can be predicted.

        The first copy of a random segment cannot: the loss leaves it out.
        """
        sequences = [self._sequence(mix) for _ in range(batch_size)]
        return torch.stack([ids for ids, _ in sequences]), torch.stack(
            [predictable for _, predictable in sequences]
        )

    def _sequence(self, mix: SequenceMix) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids [seq] and the mask [seq] of one sequence of a random kind."""
        shortest, longest = mix.segment_lengths
        kind, size = (
            torch.rand((), generator=self.generator).item(),
            shortest + self._random_below(longest - shortest + 1),
        )
        predictable = torch.ones(mix.length, dtype=torch.bool)
        if kind < mix.text_share:
            return self._text(mix.length), predictable
        if kind < mix.text_share + mix.repeated_text_share:
            return self._text_with_repeat(size, mix.length), predictable
        # Nothing predicts the first copy of a random segment; learning it would only add noise.
        predictable[: size + 1] = False
        return repeat_to_length(self._random_segment(size), mix.length), predictable

    def _random_below(self, high: int) -> int:
        """Return a random integer from 0 up to, but not including, ``high``."""
        return int(torch.randint(high, (), generator=self.generator))

    def _text(self, length: int) -> torch.Tensor:
        """Return ``length`` consecutive tokens from a random place of the stream: [length]."""
        start = self._random_below(len(self.stream) - length + 1)
        return self.stream[start : start + length]

    def _random_segment(self, size: int) -> torch.Tensor:
        """Return ``size`` ids drawn uniformly from the vocabulary: [size]."""
        return torch.randint(FIRST_TEXT_ID, self.vocab_size, (size,), generator=self.generator)

    def _text_with_repeat(self, size: int, length: int) -> torch.Tensor:
        """Return text in which a passage of ``size`` tokens is copied to a later place: [length].

        The copy overwrites the text there.
        """
        ids = self._text(length).clone()
        first = self._random_below(length - 2 * size + 1)
        second = first + size + self._random_below(length - 2 * size - first + 1)
        ids[second : second + size] = ids[first : first + size]
        return ids


def repeat_to_length(segment: torch.Tensor, length: int) -> torch.Tensor:
    """Repeat ``segment`` [tokens] and cut the result to ``length`` tokens: [length]."""
    copies = -(-length // len(segment))
    return segment.repeat(copies)[:length]
