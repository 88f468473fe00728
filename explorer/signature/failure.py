"""What a model of other sizes that does not build or run tells of why."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from explorer.signature.steps import Multiple

_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Failure:
    """A model of other sizes that does not build or run, or has other tensors.

    ``progress`` is how far it came, larger the further; ``said`` are the numbers of the error's
    text, ``near`` those that its function had at hand; ``too_large`` is where a tensor has more
    elements than torch can count.
    """

    progress: tuple[int, ...] = ()
    said: frozenset[int] = frozenset()
    near: frozenset[int] = frozenset()
    too_large: bool = False

    @classmethod
    def of(cls, error: Exception, tensors: int) -> Failure:
        """What an error tells that was raised after so many tensors were noted."""
        frames = [
            (frame, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if not frame.f_code.co_filename.startswith(_TORCH)
        ]
        return cls(
            (tensors, *(line for _, line in frames)),
            frozenset(map(int, re.findall(r"\d+", str(error)))),
            frozenset(_at_hand(frames[-1][0])),
            "overflow" in str(error),
        )

    def blamed(self, multiples: Mapping[str, Multiple]) -> list[str]:
        """The sizes of which the numbers show the primes, where they changed to ``multiples``:
        those that the text names, if that is more than one."""

        def changed(numbers: frozenset[int]) -> list[str]:
            return [
                name
                for name, multiple in multiples.items()
                if any(number and number % multiple.prime == 0 for number in numbers)
            ]

        said = changed(self.said)
        return said if len(said) > 1 else changed(self.said | self.near)


def _at_hand(frame: FrameType) -> Iterator[int]:
    """The numbers of a function's variables: integers, axes of tensors, and what its module has."""
    for value in frame.f_locals.values():
        yield from _integers(value)
        if isinstance(value, torch.nn.Module):
            yield from (one for one in vars(value).values() if type(one) is int)


def _integers(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    elif isinstance(value, torch.Tensor):
        yield from value.shape
    elif isinstance(value, list | tuple):
        yield from (one for one in value if type(one) is int)
