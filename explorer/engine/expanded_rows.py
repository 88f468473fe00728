"""Rows of an invoke where generation runs several for each prompt: beams, or several answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from explorer.engine.nnsight_api import Batcher

#: The options of ``generate`` that make several rows of one prompt, next to each other.
_EXPANDING = ("num_beams", "num_return_sequences")


class ExpandedBatcher(Batcher):
    """Gives each invoke its own rows, as the engine does, however many rows there are a prompt.

    The engine knows an invoke's rows in a tensor with as many rows as there are prompts, and hands
    every other tensor to all invokes as a whole.
    """

    def _narrow_tensor(self, tensor: torch.Tensor, group: list[int]) -> torch.Tensor:
        count = self._rows_per_prompt(tensor)
        if not count:
            return tensor
        start, size = group
        view: Any = tensor.narrow(0, start * count, size * count)
        view._nnsight_batch = True  # the engine's mark of a part that it made
        return view

    def _widen_tensor(
        self, full: torch.Tensor, group: list[int], edited: torch.Tensor
    ) -> torch.Tensor:
        count = self._rows_per_prompt(full)
        if not count:
            return edited
        start, size = (count * number for number in group)
        return torch.cat([full[:start], edited, full[start + size :]])

    def _rows_per_prompt(self, tensor: torch.Tensor) -> int:
        """Return how many rows of a tensor there are for each prompt; 0 where it is no batch."""
        if not tensor.dim():
            return 0
        count, rest = divmod(tensor.shape[0], self.total)
        return count if not rest and count in {1, *self._expansions()} else 0

    def _expansions(self) -> Iterator[int]:
        given = [self.kwargs, self.extra_kwargs, *(kwargs for _, kwargs in self.invokes)]
        default = getattr(self.envoy._module, "generation_config", None)
        for name in _EXPANDING:
            for options in given:
                config = options.get("generation_config")
                yield from (options.get(name) or 1, getattr(config, name, None) or 1)
            yield getattr(default, name, None) or 1
