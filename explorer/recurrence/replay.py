"""Replay: run a recurrence again from the arguments of its kernel in one call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from explorer import vocabulary
from explorer.recurrence.delta_rule import Heads


@dataclass(frozen=True)
class Replay:
    """The arguments of a recurrence's kernel in one call, to run the recurrence again.

    ``given`` holds, by the names in ```Mixer.replayed```, tensors in the vocabulary's
    layouts; ``state_input`` may be None. Where a method takes ``heads``, those are replayed
    alone (channels, where the recurrence has a state for each).
    """

    host: str
    given: Mapping[str, torch.Tensor | None]

    @property
    def _kind(self) -> vocabulary.Mixer:
        return vocabulary.MIXERS[self.host]

    @property
    def state_input(self) -> torch.Tensor | None:
        return self.given.get("state_input")

    def lacks(self, missing: Collection[str]) -> str | None:
        """The first value that is needed and not given; None where all are.

        Those in ``missing``, which the model does not have, are not needed.
        """
        needed = [
            name for name in self._kind.replayed if name != "state_input" and name not in missing
        ]
        return next((name for name in needed if self.given.get(name) is None), None)

    @property
    def fresh(self) -> bool:
        """Whether no state entered the call, or the first token resets it."""
        if (gate := self._kind.reset_gate) is not None:
            values = self.given[gate]
            return values is not None and not values[:, 0].any()
        return self.state_input is None

    def _arguments(self, *without: str) -> list[torch.Tensor | None]:
        return [
            self.given.get(name)
            for name in self._kind.replayed
            if name not in ("state_input", *without)
        ]

    def steps(self, heads: Heads = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per token what is read [batch heads …] and the state after it [batch heads …]."""
        run = vocabulary.resolve(self._kind.steps)
        return run(*self._arguments(), state=self.state_input, heads=heads)

    def one_channel(self, channel: int) -> Replay:
        """The recurrence of one channel alone, where the state is one of channels."""
        given = dict(self.given)
        for name, tensor in given.items():
            axes = vocabulary.BY_HOST[self.host][name].axes
            if tensor is not None and "channels" in axes:
                given[name] = tensor.narrow(axes.index("channels"), channel, 1)
        return Replay(self.host, given)

    def run(self, heads: Heads = None) -> tuple[torch.Tensor, torch.Tensor]:
        """What every token reads [batch seq heads …], and the last state."""
        outputs, last = [], None
        for output, state in self.steps(heads):
            outputs.append(output)
            last = state
        if last is None:
            raise ValueError("a replay needs at least one token")
        return torch.stack(outputs, dim=1), last

    def states(self, heads: Heads = None) -> torch.Tensor:
        """The state after every token: [batch seq heads …]."""
        return torch.stack([state for _, state in self.steps(heads)], dim=1)

    def state_at(self, token: int, heads: Heads = None) -> torch.Tensor:
        """The state after one token [batch heads …], holding one state at a time.

        Raises ValueError where the call has no such token.
        """
        count = next(
            tensor for tensor in self._arguments()[::-1] if tensor is not None and tensor.dim() > 1
        ).shape[1]
        if not -count <= token < count:
            raise ValueError(f"token {token} is outside a sequence of {count} tokens")
        return next(
            state for index, (_, state) in enumerate(self.steps(heads)) if index == token % count
        )

    def norms(self) -> torch.Tensor:
        """The size (Frobenius norm) of every head's state after every token: [batch seq heads]."""
        return torch.stack(
            [
                state.flatten(2).norm(dim=-1) if state.dim() > 2 else state.abs()
                for _, state in self.steps()
            ],
            dim=1,
        )

    def state_attention(self) -> torch.Tensor:
        """The implied attention of a fresh prompt: [batch heads query key]."""
        mix = vocabulary.resolve(self._kind.implied_attention)
        return mix(*self._arguments("attention_values"))
