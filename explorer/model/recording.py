"""A recording: the values that one forward passed, and what can be computed from them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from explorer import vocabulary
from explorer.model.errors import NotRecorded
from explorer.recurrence.replay import Replay
from explorer.vocabulary import key_of, recorded_as
from explorer.vocabulary.availability import Unavailability
from explorer.vocabulary.formatting import numbered

#: What a recording has a value under: the value's name and the block, None for the model's own
#: values.
Key = tuple[str, int | None]


@dataclass(repr=False)
class Recording:
    """The values of one forward: plain tensors on the CPU, by value name and block.

    ``rec["router_logits", 3]`` is a value of block 3, ``rec["logits"]`` one of the model;
    every tensor is in the vocabulary's layout. Where two hosts of a block have values of one
    name, the second's is ``"mixer.state_output"``.

    label: what was run; weights: where its numbers come from; input_ids: the prompt [batch
    seq]; attention_mask: its mask [batch seq], 0 at padding, None where there is none;
    tokens: its first row as texts; mixers: the hosts that mix positions, for each
    block; values: the tensors; missing: the reason for each value that is not there; seconds:
    how long the forward took; edits: the descriptions of the edits made in it; shared: the
    keys of values that are one tensor in the model, and are copied when they are asked for;
    text: what the chat template made of messages, None where the prompt was none.
    """

    label: str
    weights: str
    input_ids: torch.Tensor
    tokens: list[str]
    mixers: list[tuple[str, ...]]
    values: dict[Key, Any] = field(default_factory=dict[Key, Any])
    missing: dict[Key, Unavailability] = field(default_factory=dict[Key, Unavailability])
    seconds: float = 0.0
    edits: tuple[str, ...] = ()
    shared: set[Key] = field(default_factory=set[Key])
    attention_mask: torch.Tensor | None = None
    text: str | None = None

    def __repr__(self) -> str:
        return (
            f"Recording({self.label!r}, weights {self.weights!r}, {len(self.tokens)} tokens, "
            f"{self.bytes} bytes: {', '.join(self.names)})"
        )

    def __getitem__(self, key: str | Key) -> Any:
        if (parsed := _parse_key(key)) is None:
            raise NotRecorded(
                "A recording is asked by value name, with a block for a value of one: "
                f'rec["decays", 0]. '
                f"{abbreviated_repr(key)} is no such thing."
            )
        if (stored := self.key(*parsed)) not in self.values:
            raise NotRecorded(self.why(*parsed))
        if stored in self.shared:
            self.values[stored] = self.values[stored].clone()
            self.shared.discard(stored)
        return self.values[stored]

    def __contains__(self, key: str | Key) -> bool:
        parsed = _parse_key(key)
        return parsed is not None and self.key(*parsed) in self.values

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the name and block of every value, in the order they were met."""
        return iter(self.values)

    def key(self, name: str, layer: int | None) -> Key:
        """Return the key that a value would be under.

        That is its bare name for ``"mlp.router_logits"``, and the block counted from 0.
        """
        if layer is not None and -self.num_layers <= layer < 0:
            layer += self.num_layers
        mixers = self.mixers[layer] if layer is not None and 0 <= layer < self.num_layers else ()
        return recorded_as(name, mixers), layer

    def layers(self, name: str) -> tuple[int, ...]:
        """Return the blocks that a value was recorded on.

        Raise UnknownValue for a name the vocabulary does not have.
        """
        vocabulary.lookup(name)
        return tuple(layer for layer in range(self.num_layers) if (name, layer) in self)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.values))

    @property
    def num_layers(self) -> int:
        """The number of blocks of the model, recorded or not."""
        return len(self.mixers)

    @property
    def bytes(self) -> int:
        """The memory that the tensors take."""
        return sum(
            v.numel() * v.element_size()
            for v in self.values.values()
            if isinstance(v, torch.Tensor)
        )

    def why(self, name: str, layer: int | None = None) -> str:
        """Return the reason why a value is not in the recording.

        Raise UnknownValue for a name there is not.
        """
        values = vocabulary.lookup(name)
        if (key := self.key(name, layer)) in self.values:
            return f"{name} was recorded."
        if key in self.missing:
            return str(self.missing[key])
        blocks = numbered("block", self.num_layers)
        if layer is None:
            if all(value.host != "model" for value in values):
                return f"{name} is a value of a block: say which, of {blocks}."
            return f"{name} was not asked for when this was recorded."
        if not -self.num_layers <= layer < self.num_layers:
            return f"There is no block {layer}: this recording has {blocks}."
        if all(value.host == "model" for value in values):
            return f"{name} is a value of the whole model: ask for it without a block."
        host, mixers = name.rpartition(".")[0], self.mixers[layer]
        absent = all(value.host not in mixers for value in values)
        if host and absent and vocabulary.HOSTS[values[0].host].mixer:
            return f"block {layer} has no {host}: its mixer is {' and '.join(mixers) or 'none'}."
        return f"{name} was not asked for when this was recorded."

    @property
    def kinds(self) -> list[str]:
        """Each block's (first) mixer, by host name; ``"none"`` where it has none."""
        return [mixers[0] if mixers else "none" for mixers in self.mixers]

    def recurrent(self, layer: int) -> str | None:
        """Return the host of a block's recurrence, None where it has none."""
        mixers = self.mixers[self._block(layer)]
        return next((mixer for mixer in mixers if mixer in vocabulary.RECURRENT), None)

    def _block(self, layer: int) -> int:
        """Return a block's number from 0; raise NotRecorded where there is no such block."""
        number = as_int(layer)
        if number is None or not -self.num_layers <= number < self.num_layers:
            raise NotRecorded(
                f"There is no block {abbreviated_repr(layer)}: this recording has "
                f"{numbered('block', self.num_layers)}."
            )
        return number % self.num_layers

    def addends(self, layer: int) -> tuple[str, ...]:
        """Return the recorded names of what a block adds to the stream.

        They are its mixers' outputs, then its MLP's.
        """
        layer = self._block(layer)
        mixers = self.mixers[layer]
        values = [
            *(vocabulary.BY_HOST[mixer]["attention_output"] for mixer in mixers),
            vocabulary.BY_HOST["mlp"]["mlp_output"],
        ]
        names = [key_of(value, mixers) for value in values]
        return tuple(name for name in names if (name, layer) in self.values)

    def replay(self, layer: int) -> Replay:
        """Return the arguments of a block's recurrent kernel, to run it again.

        Raise NotRecorded where one is not there.
        """
        layer = self._block(layer)
        host = self.recurrent(layer)
        if host is None:
            raise NotRecorded(
                f"block {layer} has no recurrence to run again: its mixer is {self.kinds[layer]}."
            )
        arguments: dict[str, Any] = {}
        for name in vocabulary.MIXERS[host].replayed:
            key = (key_of(vocabulary.BY_HOST[host][name], self.mixers[layer]), layer)
            # A prompt has no state that entered it, and some kinds lack an argument by nature.
            optional = name == "state_input" or (
                key in self.missing and self.missing[key].by_nature
            )
            arguments[name] = self.values.get(key) if optional else self[f"{host}.{name}", layer]
        return Replay(host, arguments)

    def states(self, layer: int, head: int) -> Iterator[torch.Tensor]:
        """Iterate over one head's (or channel's) state [batch key_dim value_dim] after each token.

        The recurrence is run again, with memory for one state at a time.
        """
        for _, state in self.replay(layer).steps([_require_int("head", head)]):
            yield state[:, 0]

    def state(self, layer: int, head: int, token: int) -> torch.Tensor:
        """Return one head's (or channel's) state [batch key_dim value_dim] after one token.

        The recurrence is run again up to there.
        Raises NotRecorded where there is no such block, or no recurrence on it, and
        ValueError for a head or token there is not.
        """
        heads = [_require_int("head", head)]
        return self.replay(layer).state_at(_require_int("token", token), heads)[:, 0]

    def state_norms(self, layer: int) -> torch.Tensor:
        """Return the Frobenius norms of the states after every token [batch seq heads].

        Where the recurrence has a state for each channel, they are by channel.
        """
        return self.replay(layer).norms()


def as_int(number: Any) -> int | None:
    """Return an integer of any kind (numpy's, torch's) as Python's, None for what is not one."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None


def abbreviated_repr(thing: Any) -> str:
    """Return the repr of what somebody gave, short enough for a sentence."""
    return text if len(text := repr(thing)) <= 80 else f"{text[:79]}…"


def _require_int(what: str, number: Any) -> int:
    if (integer := as_int(number)) is None:
        raise ValueError(
            f"A {what} is given by its number, counted from 0; "
            f"{abbreviated_repr(number)} is not one."
        )
    return integer


def _parse_key(key: Any) -> Key | None:
    """Return the name and block somebody asks a recording for, None where it is neither."""
    parts: tuple[Any, ...] = key if isinstance(key, tuple) and key else (key, None)  # pyright: ignore[reportUnknownVariableType]  of whatever
    name, layer, *more = parts
    if more or not isinstance(name, str) or (layer is not None and as_int(layer) is None):
        return None
    return name, None if layer is None else as_int(layer)
