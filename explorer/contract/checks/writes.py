"""Laws about writing: every write reaches the model, at exactly the place written.

One forward serves them all: the batch is one row of text repeated, and each row is edited
in one value of one block, at one position. Rows do not see each other, so each shows what
its own edit did. `WriteObserver` looks at what the model really goes on with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import Key, ModelUnderTest, attempt
from explorer.contract.registry import invariant
from explorer.discovery.hook_point import HookPoint, get_element, read_value, to_layout

HOSTS = tuple(vocabulary.HOSTS)
#: Layouts of a state: one for the whole call, without an axis of tokens.
STATES = ("State", "ChannelState", "UnitState")


class WriteObserver:
    """What a running model goes on with at the places of some values, whatever a trace block was shown.

    ``seen`` maps each value to the tensor, in the vocabulary's layout, as it stood when
    the forward moved on from its place; ``logits`` is what the model returned.
    """

    def __init__(self, subject: ModelUnderTest, keys: list[Key]) -> None:
        self.subject = subject
        self.taps = subject.model.taps
        self.keys = keys
        self.seen: dict[Key, torch.Tensor] = {}
        self.logits: torch.Tensor | None = None

    @contextmanager
    def watching(self) -> Iterator[WriteObserver]:
        """Look over the shoulder of the engine and of the taps for a while."""
        engine, taps = self.subject.model.interleaver, self.taps
        handle, fire = engine.handle, taps.fire

        def handled(location: str, value: Any) -> Any:
            value = handle(location, value)
            for key in self._at(location, native=True):
                self._see(key, self._reach(key).place, value)
            return value

        def fired(hook_group: Any, container: Any) -> Any:
            changed = fire(hook_group, container)
            for key in self._at(hook_group.location, native=False):
                place = hook_group.members.get(key[0].name)
                if place is not None:
                    self._see(key, place, container if changed is None else changed)
            return changed

        returned = self.subject.hf.register_forward_hook(
            lambda *call: setattr(self, "logits", call[-1].logits.detach().clone())
        )
        engine.handle, taps.fire = handled, fired
        try:
            yield self
        finally:
            del engine.handle, taps.fire
            returned.remove()

    def _reach(self, key: Key) -> Any:
        value, layer = key
        return self.taps.hosts[value.host, layer].reach[value.name]

    def _at(self, location: str, native: bool) -> list[Key]:
        return [
            key
            for key in self.keys
            if (reach := self._reach(key)).location == location and reach.native == native
        ]

    def _see(self, key: Key, place: HookPoint, container: Any) -> None:
        value, layer = key
        raw = get_element(container, place)
        if raw is None:
            return
        sizes = {**self.taps.hosts[value.host, layer].host.sizes, **self.taps.call}
        sizes |= {"query": sizes["seq"], "key": sizes["seq"]}
        repeated = place.selection is None and raw.numel() == prod(
            sizes[axis] for axis in value.axes
        )
        numbers = self.taps.hosts[value.host, layer].numbers(place)
        tensor = (
            to_layout(raw, place.arrangement, value.axes, sizes)
            if repeated
            else read_value(raw, place, value.axes, sizes, numbers)
        )
        self.seen[key] = tensor.detach().clone()


@dataclass
class Write:
    """One value written: the row and position edited, what was served, what was written and what was raised.

    ``names`` are the values that are this one tensor, in a parallel block say, whose parts share a norm.
    """

    key: Key
    row: int
    position: int
    names: tuple[vocabulary.Value, ...]
    served: torch.Tensor | None = None
    wrote: torch.Tensor | None = None
    error: BaseException | None = None

    @property
    def spot(self) -> tuple:
        """The edited part, as an index: one row, one position, everything else."""
        index = {"batch": self.row, "seq": self.position, "query": self.position}
        return tuple(index.get(axis, slice(None)) for axis in self.key[0].axes)


def edited(s: ModelUnderTest, key: Key, old: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """Something else of the same kind: other ids, no mask, or every number changed by up to three quarters."""
    value, layer = key
    if s.stepped(key):
        return -old  # no small change moves weights that are the same for every choice but next to a tie; the other order does
    if old.is_floating_point():
        factor = 0.25 + 1.5 * torch.rand(old.shape, generator=noise)
        return old * factor.to(old)
    if value.name == "attention_mask":
        return torch.zeros_like(old)
    count = (
        s.model.vocab_size if value.layout == "Tokens" else s.envoy(value.host, layer).num_experts
    )
    return (old + 1) % count


def _written(s: ModelUnderTest, how: str) -> tuple[list[Write], WriteObserver, torch.Tensor]:
    """Every writable value of one block of each kind, written in one trace: assigned, or edited in place.

    With it what the model went on with, and the logits of the same rows unwritten.
    """
    name = f"written {how}"
    if name not in s.memo:
        kinds = {None, *(block.layers[0] for block in s.blocks)}
        # A state is one matrix for the whole call: it has laws of its own.
        keys = [
            key
            for key in s.order()
            if key[0].written
            and key[1] in kinds
            and "batch" in key[0].axes
            and key[0].layout not in STATES
        ]
        names = _same_tensor(s, keys)
        keys = list(names)
        writes = [Write(key, row, s.seq // 2, names[key]) for row, key in enumerate(keys)]
        ids = s.ids[:1].expand(len(keys), -1).contiguous()
        noise = torch.Generator().manual_seed(0)
        witness = WriteObserver(s, keys)
        with witness.watching(), torch.no_grad(), s.model.trace(ids):
            for write in writes:
                write.error = attempt(lambda: _write(s, write, how, noise))
        if "unwritten" not in s.memo:
            s.memo["unwritten"] = s.forward(ids).logits
        s.memo[name] = writes, witness, s.memo["unwritten"]
    return s.memo[name]


def _same_tensor(s: ModelUnderTest, keys: list[Key]) -> dict[Key, tuple[vocabulary.Value, ...]]:
    """The first name of each tensor, and with it all names of it."""
    first: dict[tuple, Key] = {}
    names: dict[Key, tuple[vocabulary.Value, ...]] = {}
    for key in keys:
        reach = s.model.taps.hosts[key[0].host, key[1]].reach[key[0].name]
        first_key = first.setdefault(
            (reach.location, reach.place.element, reach.place.call_site), key
        )
        names[first_key] = (*names.get(first_key, ()), key[0])
    return names


def _write(s: ModelUnderTest, write: Write, how: str, noise: torch.Generator) -> None:
    served = s.read(write.key)
    write.served = served.clone()
    new = edited(s, write.key, served[write.spot], noise)
    if how == "in place":
        served[write.spot] = new
        write.wrote = served.clone()
    else:
        changed = served.clone()
        changed[write.spot] = new
        write.wrote = changed.clone()
        s.write(write.key, changed)


@invariant(
    "writes land",
    "An assignment and an in-place edit of every writable value reach the model, on every kind of block: it goes on with what was written and its logits move.",
    *HOSTS,
)
def land(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for how in ("assigned", "in place"):
        writes, witness, plain = _written(s, how)
        for write in _of(writes, host):
            t.of(*write.names)
            where = _where(write, how)
            if write.error is not None:
                t.holds(where, False, f"it raises {write.error!r}")
                continue
            t.same(where, witness.seen.get(write.key), write.wrote)
            t.holds(where, not torch.equal(write.wrote, write.served), "the edit changed nothing")
            moved = witness.logits[write.row] != plain[write.row]
            idle = write.key[0].name == "attention_mask" and not s.masks
            if not idle and not s.indifferent(write.key):
                t.holds(
                    where, moved.any(), "the logits did not move"
                )  # scores that only decide the choice may leave it as it was
    for key in s.order():
        if (
            key[0].host == host
            and key[0].written
            and "batch" not in key[0].axes
            and key[1] in (None, *s.first(host))
        ):
            _whole_lands(s, t, key)
    if host in vocabulary.RECURRENT and s.layers(host, "state_output") and s.continues:
        _states_land(s, t, host)


@invariant(
    "edits are position-exact",
    "An edit at one position changes nothing else of the value it is made on.",
    *HOSTS,
    bfloat16=0.0,
)
def exact(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for how in ("assigned", "in place"):
        writes, witness, _ = _written(s, how)
        for write in _of(writes, host):
            t.of(*write.names)
            where = _where(write, how)
            seen = witness.seen.get(write.key)
            if write.error is not None or seen is None:
                t.holds(
                    where,
                    False,
                    f"it raises {write.error!r}"
                    if write.error
                    else "the model was not seen to go on",
                )
                continue
            other = seen != write.served
            t.holds(where, other[write.spot].any(), "the edit did not arrive at all")
            other[write.spot] = False
            t.holds(where, not other.any(), f"{int(other.sum())} numbers elsewhere changed with it")


# In bfloat16 a rounding step upstream can change a choice of experts, so this is held in float32 alone.
@invariant(
    "edits do not reach back",
    "An edit at one position leaves the logits before that position as they were.",
    *HOSTS,
    float32=1e-5,
    when=lambda s: s.causal,
)
def forward_only(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for how in ("assigned", "in place"):
        writes, witness, plain = _written(s, how)
        for write in _of(writes, host):
            t.of(*write.names)
            before = slice(0, write.position)
            t.holds(_where(write, how), write.error is None, f"it raises {write.error!r}")
            t.near(_where(write, how), witness.logits[write.row, before], plain[write.row, before])


def _of(writes: list[Write], host: str) -> list[Write]:
    return [write for write in writes if any(value.host == host for value in write.names)]


def _where(write: Write, how: str) -> tuple[int | None, str]:
    return write.key[1], f"{write.key[0].name} {how}"


def _whole_lands(s: ModelUnderTest, t: Comparisons, key: Key) -> None:
    """A value that all rows share, written in a trace of its own."""
    t.of(key[0])
    for how in ("assigned", "in place"):
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad(), s.model.trace(s.ids):
            served = s.read(key)
            new = edited(s, key, served, noise)
            if how == "assigned":
                s.write(key, new)
            else:
                served.copy_(new)
            logits = s.model.logits.save()
        t.holds(
            (key[1], f"{key[0].name} {how}"),
            not torch.equal(logits, s.plain),
            "the logits did not move",
        )


def _states_land(s: ModelUnderTest, t: Comparisons, host: str) -> None:
    """state_input and state_output, written in place and by assignment, for one row and head alone."""
    last = s.seq - 1
    with torch.no_grad():
        clean = s.hf(**s.continued(last), cache=s.prefilled(last), use_cache=True).logits
    for layer in s.first(host, "state_output"):
        for how in ("assigned", "in place"):
            if vocabulary.BY_HOST[host]["state_input"].written and layer in s.layers(
                host, "state_input"
            ):
                _input_lands(s, t, host, layer, how, clean)
            _output_lands(s, t, host, layer, how)


def _change(s: ModelUnderTest, host: str, layer: int, name: str, how: str) -> None:
    """Inside a trace: halve a state, for one row and head alone."""
    state = getattr(s.envoy(host, layer), name)
    if how == "assigned":
        setattr(s.envoy(host, layer), name, _half(state))
    else:
        state[0, 0] *= 0.5


def _input_lands(
    s: ModelUnderTest, t: Comparisons, host: str, layer: int, how: str, clean: torch.Tensor
) -> None:
    last, mix, value = s.seq - 1, s.envoy(host, layer), vocabulary.BY_HOST[host]["state_input"]
    with torch.no_grad(), s.model.trace(s.continued(last), cache=s.prefilled(last), use_cache=True):
        _change(s, host, layer, "state_input", how)
        logits = s.model.logits.save()
    t.of(value)
    _only_first_row(t, (layer, f"state_input {how}"), logits, clean)
    with torch.no_grad(), s.model.trace(s.ids):
        mix.state_input = torch.ones(
            s.batch, *(getattr(mix, axis) for axis in value.axes[1:]), dtype=s.dtype
        )
        logits = s.model.logits.save()
    t.holds(
        (layer, "state_input of a fresh prompt"),
        not torch.equal(logits, s.plain),
        "the logits did not move",
    )


def _output_lands(s: ModelUnderTest, t: Comparisons, host: str, layer: int, how: str) -> None:
    last = s.seq - 1
    cache, before = s.prefilled(1), s.prefilled(1)
    inputs = s.continued(1, last)
    try:
        with torch.no_grad():
            s.hf(**inputs, cache=before, use_cache=True)
    except (RuntimeError, ValueError):  # a kernel that takes no state with several tokens
        inputs, cache, before = {"input_ids": s.ids[:, :last]}, None, None
    with (
        torch.no_grad(),
        s.model.trace(inputs, **({"cache": cache} if cache is not None else {}), use_cache=True),
    ):
        _change(s, host, layer, "state_output", how)
        kept = s.model.output.save()
    with torch.no_grad():
        before = before if before is not None else s.hf(**inputs, use_cache=True).cache
        after, want = (
            s.hf(**s.continued(last), cache=c, use_cache=True).logits for c in (kept.cache, before)
        )
    t.of(vocabulary.BY_HOST[host]["state_output"])
    _only_first_row(t, (layer, f"state_output {how}"), after, want)


def _half(state: torch.Tensor) -> torch.Tensor:
    state = state.clone()
    state[0, 0] *= 0.5
    return state


def _only_first_row(
    t: Comparisons, where: tuple[int, str], logits: torch.Tensor, clean: torch.Tensor
) -> None:
    t.holds(where, not torch.equal(logits[0], clean[0]), "the logits did not move")
    t.near(where, logits[1:], clean[1:], 1e-5)


@invariant(
    "writing back what was read",
    "Assigning every value what it already is, or writing it over itself in place, leaves the logits as they were, to the bit.",
    "model",
    bfloat16=0.0,
)
def unchanged(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    keys = [key for key in s.order() if key[0].written]
    with torch.no_grad(), s.model.trace(s.ids):
        for key in keys:
            s.write(key, s.read(key))
        assigned = s.model.logits.save()
    with torch.no_grad(), s.model.trace(s.ids):
        for key in keys:
            value = s.read(key)
            if isinstance(value, torch.Tensor):
                value.copy_(value.clone())
        in_place = s.model.logits.save()
    t.of(*(value for value, _ in keys))
    t.same("assigned", assigned, s.plain)
    t.same("in place", in_place, s.plain)
