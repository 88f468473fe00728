"""Recording: one forward, any set of values, in any order."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from explorer import vocabulary
from explorer.discovery.hook_point import get_element, with_element
from explorer.model.address import REPLAY, BatchShared, ValueAddress, replay_of, unwrap
from explorer.model.edits import Edit, JointEdit
from explorer.model.envoys import COMPUTED, Unavailable, implied
from explorer.model.taps import HostTaps
from explorer.recurrence.replay import Replay
from explorer.vocabulary import RecordWhen, key_of, recorded_as
from explorer.vocabulary.availability import Unavailability, most_informative
from explorer.vocabulary.formatting import numbered

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel

Key = tuple[str, int | None]


class Cancelled(Exception):
    """The run was told to stop before it finished."""


class NotRecorded(KeyError):
    """A recording does not hold what was asked of it; the message says why."""

    def __str__(self) -> str:
        return self.args[0]


@dataclass(repr=False)
class Recording:
    """What one forward was seen to do: plain tensors on the CPU, by value name and layer.

    ``rec["router_logits", 3]`` and, for the model's own values, ``rec["logits"]``;
    every tensor is in the vocabulary's layout. ``mixers`` are the hosts that mix positions on each block, ``kinds``
    the first of each; where a block has two, the second's values go by ``"mixer.state_output"``.
    ``bytes`` is what the tensors take; ``weights`` says what the numbers come from.
    """

    label: str
    weights: str
    input_ids: torch.Tensor
    tokens: list[str]
    mixers: list[tuple[str, ...]]
    values: dict[Key, Any] = field(default_factory=dict)
    missing: dict[Key, Unavailability] = field(default_factory=dict)
    seconds: float = 0.0
    edits: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Recording({self.label!r}, weights {self.weights!r}, {len(self.tokens)} tokens, {self.bytes} bytes: {', '.join(self.names)})"

    def __getitem__(self, key: str | Key) -> Any:
        if (asked := _asked(key)) is None:
            raise NotRecorded(
                f'A recording is asked by value name, with a block for a value of one: rec["decays", 0]. {_said(key)} is no such thing.'
            )
        if (found := self.key(*asked)) not in self.values:
            raise NotRecorded(self.why(*asked))
        return self.values[found]

    def __contains__(self, key: str | Key) -> bool:
        asked = _asked(key)
        return asked is not None and self.key(*asked) in self.values

    def __iter__(self) -> Iterator[Key]:
        """The name and block of every value, as they were met."""
        return iter(self.values)

    def key(self, name: str, layer: int | None) -> Key:
        """The key a value is kept under: with ``"mlp.router_logits"`` its bare name, and blocks counted from 0."""
        if layer is not None and -self.num_layers <= layer < 0:
            layer += self.num_layers
        mixers = self.mixers[layer] if layer is not None and 0 <= layer < self.num_layers else ()
        return recorded_as(name, mixers), layer

    def layers(self, name: str) -> tuple[int, ...]:
        """The blocks this value was recorded on. Raises UnknownValue for a name the vocabulary does not have."""
        vocabulary.lookup(name)
        return tuple(layer for layer in range(self.num_layers) if (name, layer) in self)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in self.values))

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    @property
    def bytes(self) -> int:
        return sum(
            v.numel() * v.element_size()
            for v in self.values.values()
            if isinstance(v, torch.Tensor)
        )

    def why(self, name: str, layer: int | None = None) -> str:
        """Why a value is not in the recording."""
        meant = vocabulary.lookup(name)
        if (key := self.key(name, layer)) in self.values:
            return f"{name} was recorded."
        if key in self.missing:
            return str(self.missing[key])
        blocks = numbered("block", self.num_layers)
        if layer is None and all(value.host != "model" for value in meant):
            return f"{name} is a value of a block: say which, of {blocks}."
        if layer is not None and not -self.num_layers <= layer < self.num_layers:
            return f"There is no block {layer}: this recording has {blocks}."
        if layer is not None and all(value.host == "model" for value in meant):
            return f"{name} is a value of the whole model: ask for it without a block."
        host = name.rpartition(".")[0]
        if (
            layer is not None
            and host
            and all(value.host not in self.mixers[layer] for value in meant)
            and vocabulary.HOSTS[meant[0].host].mixer
        ):
            return f"block {layer} has no {host}: its mixer is {' and '.join(self.mixers[layer]) or 'none'}."
        return f"{name} was not asked for when this was recorded."

    @property
    def kinds(self) -> list[str]:
        """Each block's (first) mixer, by host name; ``"none"`` where it has none."""
        return [mixers[0] if mixers else "none" for mixers in self.mixers]

    def recurrent(self, layer: int) -> str | None:
        """The host of a block's recurrence, None where it has none."""
        return next(
            (mixer for mixer in self.mixers[self._block(layer)] if mixer in vocabulary.RECURRENT),
            None,
        )

    def _block(self, layer: int) -> int:
        """A block by its number from 0; raises NotRecorded where there is no such block."""
        number = whole(layer)
        if number is None or not -self.num_layers <= number < self.num_layers:
            raise NotRecorded(
                f"There is no block {_said(layer)}: this recording has {numbered('block', self.num_layers)}."
            )
        return number % self.num_layers

    def addends(self, layer: int) -> tuple[str, ...]:
        """The names of what a block adds to the stream, as recorded: its mixers', then its MLP's."""
        layer = self._block(layer)
        values = [vocabulary.BY_HOST[mixer]["attention_output"] for mixer in self.mixers[layer]] + [
            vocabulary.BY_HOST["mlp"]["mlp_output"]
        ]
        names = [key_of(value, self.mixers[layer]) for value in values]
        return tuple(name for name in names if (name, layer) in self.values)

    def replay(self, layer: int) -> Replay:
        """The recurrent kernel's arguments on one block, to run again; raises NotRecorded where one is not there."""
        layer = self._block(layer)
        host = self.recurrent(layer)
        if host is None:
            raise NotRecorded(
                f"block {layer} has no recurrence to run again: its mixer is {self.kinds[layer]}."
            )
        names = {
            name: key_of(vocabulary.BY_HOST[host][name], self.mixers[layer])
            for name in vocabulary.MIXERS[host].replayed
        }
        lacking = {
            name
            for name, key in names.items()
            if (key, layer) in self.missing and self.missing[key, layer].by_nature
        }
        return Replay(
            host,
            {
                name: self.values.get((key, layer))
                if name == "state_input" or name in lacking
                else self[f"{host}.{name}", layer]
                for name, key in names.items()
            },
        )

    def states(self, layer: int, head: int) -> Iterator[torch.Tensor]:
        """State [batch key_dim value_dim] of one head (or channel) after each token, by replay; memory for one at a time."""
        for _, state in self.replay(layer).steps([_number("head", head)]):
            yield state[:, 0]

    def state(self, layer: int, head: int, token: int) -> torch.Tensor:
        """State [batch key_dim value_dim] of one head (or channel) after one token, by replay.

        Raises NotRecorded where there is no such block, or nothing to replay on it, and ValueError for a head or token there is not.
        """
        return self.replay(layer).state_at(_number("token", token), [_number("head", head)])[:, 0]

    def state_norms(self, layer: int) -> torch.Tensor:
        """Frobenius norm of every head's (or channel's) state after every token [batch seq heads], by replay."""
        return self.replay(layer).norms()


def whole(number: Any) -> int | None:
    """A whole number of any kind (numpy's and torch's too) as Python's, None for what is not one."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None


def _number(what: str, number: Any) -> int:
    if (found := whole(number)) is None:
        raise ValueError(
            f"A {what} is given by its number, counted from 0; {_said(number)} is not one."
        )
    return found


def _said(thing: Any) -> str:
    """Something that was given, in a sentence."""
    return text if len(text := repr(thing)) <= 80 else f"{text[:79]}…"


def _asked(key: Any) -> Key | None:
    """The name and block somebody asks a recording for, None where it is neither."""
    name, layer, *more = key if isinstance(key, tuple) and key else (key, None)
    if more or not isinstance(name, str) or (layer is not None and whole(layer) is None):
        return None
    return name, None if layer is None else whole(layer)


class RecordingObserver:
    """A sink that keeps copies of what was asked for and makes the edits."""

    def __init__(
        self,
        wanted: dict[str, list[tuple[Key, str, ValueAddress]]],
        derived: dict[str, list[tuple[Key, str]]],
        edits: dict[str, list[tuple[Edit, str, ValueAddress]]],
        model: LanguageModel,
    ) -> None:
        self.wanted, self.derived, self.edits, self.model = wanted, derived, edits, model
        self.values: dict[Key, Any] = {}

    def active(self) -> bool:
        return True

    def begin(self, step: int, locations: Iterable[str]) -> None:
        """A recording is one forward: there is no step to tell from another."""

    def offer(self, location: str, make: Callable[[], Any]) -> Any:
        keys, edits = self.wanted.get(location, ()), self.edits.get(location, ())
        derived = self.derived.get(location, ())
        if not keys and not edits and not derived:
            return None
        raw = changed = make()
        for key, host in derived:
            self.values[key] = kept(self.model._replayed(key, replay_of(host, raw[REPLAY])))
        for edit, name, reach in edits:
            now = get_element(changed, reach.place) if reach.native else unwrap(changed[name])
            if now is None:
                raise Unavailable(
                    f"{edit.value} is None in this call, so there is nothing to edit."
                )
            new = (
                edit.change(now.clone(), changed)
                if isinstance(edit, JointEdit)
                else edit.change(now.clone())
            )
            if getattr(new, "shape", None) != now.shape:
                given = list(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
                raise ValueError(
                    f"The edit of {edit.value} returned {given} where {list(now.shape)} belongs."
                )
            if new.dtype != now.dtype:
                raise ValueError(
                    f"The edit of {edit.value} returned {new.dtype} where {now.dtype} belongs."
                )
            changed = (
                with_element(changed, reach.place, new)
                if reach.native
                else {
                    **changed,
                    name: BatchShared(new) if isinstance(changed[name], BatchShared) else new,
                }
            )
        for key, name, reach in keys:
            self.values[key] = kept(
                get_element(changed, reach.place) if reach.native else unwrap(changed[name])
            )
        return None if changed is raw else changed


def kept(value: Any) -> Any:
    """A snapshot on the CPU: a copy the model's later edits do not reach."""
    return (
        value.detach().clone().to("cpu")
        if isinstance(value, torch.Tensor) and value.device.type != "meta"
        else value
    )


def choose(
    model: LanguageModel, values: Iterable[str] | None, layers: Iterable[int] | None
) -> tuple[list, dict[Key, Unavailability]]:
    """The values to record as (value, layer, taps) rows, and why the others are not there.

    Raises UnknownValue for a name the vocabulary does not have, ValueError for what is no
    list of names or of blocks, Unavailable when a named value is on none of the layers.
    """
    values, chosen = _names(values), None if layers is None else _blocks(model, layers)
    named = (
        None if values is None else [value for name in values for value in vocabulary.lookup(name)]
    )
    rows, missing, asked = [], {}, {}
    for support in model.support():
        if named is not None and support.value not in named:
            continue
        if named is None and support.value.recorded is RecordWhen.NAMED:
            continue
        for layer in (None,) if support.host == "model" else range(model.num_layers):
            if layer is not None and chosen is not None and layer not in chosen:
                continue
            if support.available and (layer is None or layer in support.layers):
                rows.append((support.value, layer, model.taps.hosts[support.host, layer]))
            else:
                missing.setdefault((support.value.key, layer), support.reasons[layer])
                asked.setdefault(support.value, []).append(support.reasons[layer])
    if named is not None:
        for name in values:
            meant = vocabulary.lookup(name)
            if not any(row[0] in meant for row in rows):
                raise Unavailable(
                    f"{name} is unavailable on the blocks asked for: {most_informative(r for value in meant for r in asked.get(value, ()))}."
                )
    there = {(value.key, layer) for value, layer, _ in rows}
    return rows, {key: reason for key, reason in missing.items() if key not in there}


def _names(values: Any) -> list[str] | None:
    """What ``values`` asks for, as a list."""
    names = [values] if isinstance(values, str) else values
    try:
        names = None if names is None else list(names)
    except TypeError:
        names = [values]
    for name in names or ():
        if not isinstance(name, str):
            raise ValueError(
                f'values is a list of value names, such as ["decays", "logits"]; {_said(name)} is not one.'
            )
    return names


def _blocks(model: LanguageModel, layers: Any) -> list[int]:
    """What ``layers`` asks for, as block numbers."""
    one = whole(layers)
    try:
        given = [layers] if one is not None else list(layers)
    except TypeError:
        given = [layers]
    if not given:
        raise ValueError("layers is empty: name a block, or leave it out for all.")
    for layer in given:
        if whole(layer) is None:
            raise ValueError(
                f"layers is a list of block numbers ({numbered('block', model.num_layers)}); {_said(layer)} is not one."
            )
    return [model.layer_index(whole(layer)) for layer in given]


def _check_edits(edits: Any) -> None:
    """Raise ValueError for what is no list of edits."""
    if not isinstance(edits, list | tuple):
        raise ValueError(
            f"edits is a list of edits, such as [zero_head(0, 3)]; {_said(edits)} is not one."
        )
    for edit in edits:
        if not isinstance(edit, Edit) or not callable(edit.change):
            raise ValueError(
                f"An edit is an Edit, as zero_head(0, 3) makes one, with a function that changes its value; {_said(edit)} is not one."
            )
        if edit.layer is not None and whole(edit.layer) is None:
            raise ValueError(
                f"The edit of {edit.value} is on a block given by its number, or on None for the model; {_said(edit.layer)} is neither."
            )


def record(
    model: LanguageModel,
    inputs: dict[str, torch.Tensor],
    rows: list[tuple],
    edits: Iterable[Edit],
    progress: Callable[[int, int], None] | None,
    cancel: Callable[[], bool] | None,
) -> dict[Key, Any]:
    """Run the model once on ``inputs`` and return copies of the values in ``rows``."""
    wanted: dict[str, list] = {}
    derived: dict[str, list] = {}
    later: list[tuple[vocabulary.Value, Key, Key, HostTaps]] = []
    for value, layer, taps in rows:
        mixers = model.mixers[layer] if layer is not None else ()
        key = (key_of(value, mixers), layer)
        if value.name == "state":
            raise Unavailable(
                "state is one token's: take Recording.state(layer, head, token), or record states."
            )
        if value.name in ("states", "state_attention"):
            derived.setdefault(taps.replay_location, []).append((key, value.host))
        elif value.derived:
            source = (key_of(vocabulary.BY_HOST[value.host][value.source], mixers), layer)
            later.append((value, key, source, taps))
            reach = taps.reach[value.source]
            wanted.setdefault(reach.location, []).append((source, value.source, reach))
        else:
            reach = taps.reach[value.name]
            wanted.setdefault(reach.location, []).append((key, value.name, reach))
    _check_edits(edits)
    changes: dict[str, list] = {}
    for edit in edits:
        value, taps = model.writable(edit.value, edit.layer)
        edit.check(taps.host.sizes)
        reach = taps.reach[value.name]
        changes.setdefault(reach.location, []).append((edit, value.name, reach))
    sink = RecordingObserver(wanted, derived, changes, model)
    with (
        model.lock,
        model.taps.armed(sink, {*wanted, *derived, *changes}, native=True),
        Watched(model, progress, cancel),
    ):
        # A state is handed on to a cache alone; else the forward is the one anybody would get.
        model.hf(
            **inputs,
            **(
                {"use_cache": True}
                if any(host in vocabulary.RECURRENT for mixers in model.mixers for host in mixers)
                else {}
            ),
        )
    for value, key, source, taps in later:
        sink.values[key] = (
            kept(taps.fixed[value.name])
            if value.fixed
            else COMPUTED[value.name](sink.values[source], taps.host.sizes)
        )
    asked = {
        (key_of(value, model.mixers[layer] if layer is not None else ()), layer)
        for value, layer, _ in rows
    }
    return {key: value for key, value in sink.values.items() if key in asked}


class Watched:
    """Report each block as it finishes, and stop the run when told to."""

    def __init__(
        self, model: LanguageModel, progress: Callable | None, cancel: Callable | None
    ) -> None:
        self.blocks = [layer._module for layer in model.layers]
        self.progress, self.cancel = progress, cancel
        self.hooks: list = []

    def __enter__(self) -> None:
        if self.progress is None and self.cancel is None:
            return
        for index, block in enumerate(self.blocks):
            self.hooks.append(
                block.register_forward_hook(lambda *_, index=index: self.passed(index))
            )

    def passed(self, index: int) -> None:
        if self.progress is not None:
            self.progress(index + 1, len(self.blocks))
        if self.cancel is not None and self.cancel():
            raise Cancelled("The run was cancelled.")

    def __exit__(self, *_: Any) -> None:
        for hook in self.hooks:
            hook.remove()


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return run(), time.perf_counter() - start


__all__ = ["Cancelled", "Recording", "choose", "implied", "record", "timed"]
