"""Invariants of writing: every write reaches the model, at exactly the position written.

One forward covers them all: the batch is one row of text repeated, and in each row one value of
one block is edited at one position. Rows are independent, so each shows what its own edit did.
`WriteObserver` copies what the model actually continues with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest, ValueKey, attempt
from explorer.contract.registry import invariant
from explorer.contract.write_observer import WriteObserver
from explorer.meta_device import cache_of

#: Layouts of a state: one for the whole call, without an axis of tokens.
STATE_LAYOUTS = ("State", "ChannelState", "UnitState")

#: The two ways to write a value in a trace.
_WAYS = ("assigned", "in place")

_UNCHANGED_LOGITS = "the logits did not change"


@dataclass
class Write:
    """One value written: where it was edited, what was served, what was written, what was raised.

    ``values`` are all values that are this tensor: sublayers of a parallel block share a norm.
    """

    key: ValueKey
    row: int
    position: int
    values: tuple[vocabulary.Value, ...]
    served: torch.Tensor | None = None
    wrote: torch.Tensor | None = None
    error: Exception | None = None

    @property
    def index(self) -> tuple:
        """The index of what is edited: one row and one position, and all of every other axis."""
        where = {"batch": self.row, "seq": self.position, "query": self.position}
        return tuple(where.get(axis, slice(None)) for axis in self.key[0].axes)


@dataclass(frozen=True)
class WriteRun:
    """One trace in which every value was written; ``clean_logits`` are those without writes."""

    way: str
    writes: list[Write]
    observer: WriteObserver
    clean_logits: torch.Tensor

    def of(self, host: str) -> Iterator[tuple[Write, tuple[int | None, str]]]:
        """Yield the writes of a host's values, each with the words for where it was made."""
        for write in self.writes:
            if any(value.host == host for value in write.values):
                yield write, (write.key[1], f"{write.key[0].name} {self.way}")


def edited(
    subject: ModelUnderTest, key: ValueKey, old: torch.Tensor, noise: torch.Generator
) -> torch.Tensor:
    """Return other ids, an empty mask, or every number scaled by 0.25 to 1.75."""
    value, layer = key
    if subject.piecewise_constant(key):
        return -old  # a small change moves no weight except near a tie; the reverse order does
    if old.is_floating_point():
        factor = 0.25 + 1.5 * torch.rand(old.shape, generator=noise)
        return old * factor.to(old)
    if value.name == "attention_mask":
        return torch.zeros_like(old)
    if value.layout == "Tokens":
        return (old + 1) % subject.model.vocab_size
    return (old + 1) % subject.envoy(value.host, layer).num_experts


def _write_runs(subject: ModelUnderTest) -> list[WriteRun]:
    """Return one run per way of writing."""
    return [
        subject.once(f"writes {way}", lambda way=way: _write_run(subject, way)) for way in _WAYS
    ]


def _write_run(subject: ModelUnderTest, way: str) -> WriteRun:
    """Write every writable value of one block of each kind in one trace."""
    layers = {None, *(block.layers[0] for block in subject.block_kinds)}
    # A state is one matrix for the whole call: `_compare_states` writes it.
    keys = [
        key
        for key in subject.reading_order()
        if key[0].written
        and key[1] in layers
        and "batch" in key[0].axes
        and key[0].layout not in STATE_LAYOUTS
    ]
    values = _by_tensor(subject, keys)
    position = subject.seq // 2
    writes = [Write(key, row, position, values[key]) for row, key in enumerate(values)]
    ids = subject.ids[:1].expand(len(writes), -1).contiguous()
    noise = torch.Generator().manual_seed(0)
    observer = WriteObserver(subject, list(values))
    with observer.watching(), torch.no_grad(), subject.model.trace(ids):
        for write in writes:
            write.error = attempt(lambda write=write: _write(subject, write, way, noise))
    clean = subject.once("logits without writes", lambda: subject.native.forward(ids).logits)
    return WriteRun(way, writes, observer, clean)


def _by_tensor(
    subject: ModelUnderTest, keys: list[ValueKey]
) -> dict[ValueKey, tuple[vocabulary.Value, ...]]:
    """Return the first value of each tensor served, and all values that are that tensor."""
    first: dict[tuple, ValueKey] = {}
    values: dict[ValueKey, tuple[vocabulary.Value, ...]] = {}
    for key in keys:
        address = subject.model.taps.hosts[key[0].host, key[1]].addresses[key[0].name]
        point = address.hook_point
        key_of_tensor = first.setdefault((address.location, point.element, point.call_site), key)
        values[key_of_tensor] = (*values.get(key_of_tensor, ()), key[0])
    return values


def _write(subject: ModelUnderTest, write: Write, way: str, noise: torch.Generator) -> None:
    served = subject.read(write.key)
    write.served = served.clone()
    new = edited(subject, write.key, served[write.index], noise)
    if way == "in place":
        served[write.index] = new
        write.wrote = served.clone()
    else:
        changed = served.clone()
        changed[write.index] = new
        write.wrote = changed.clone()
        subject.write(write.key, changed)


@invariant(
    "writes reach the model",
    "An assignment and an in-place edit of every writable value reach the model, on every kind of "
    "block: the model continues with what was written and its logits change.",
    *vocabulary.HOSTS,
)
def writes_land(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for run in _write_runs(subject):
        for write, where in run.of(host):
            compare.about(*write.values)
            if write.error is not None or write.wrote is None:
                compare.holds(where, False, f"it raises {write.error!r}")
                continue
            _compare_written(subject, compare, where, write, run.observer.seen.get(write.key))
            same = write.served is not None and torch.equal(write.wrote, write.served)
            compare.holds(where, not same, "the edit changed nothing")
            ignored = write.key[0].name == "attention_mask" and not subject.native.uses_mask
            # Scores that only decide which experts run may leave that decision as it was.
            if not ignored and not subject.never_weighs(write.key):
                changed = run.observer.logits[write.row] != run.clean_logits[write.row]
                compare.holds(where, changed.any(), _UNCHANGED_LOGITS)
    for key in subject.reading_order():
        value, layer = key
        shared = value.written and "batch" not in value.axes
        if value.host == host and shared and layer in (None, *subject.one_per_kind(host)):
            _compare_shared_value(subject, compare, key)
    if (
        host in vocabulary.RECURRENT
        and subject.layers(host, "state_output")
        and subject.native.returns_cache
    ):
        _compare_states(subject, compare, host)


def _compare_written(
    subject: ModelUnderTest,
    compare: Comparisons,
    where: tuple[int | None, str],
    write: Write,
    seen: torch.Tensor | None,
) -> None:
    """Compare what the model continues with and what was written.

    They are equal; where the value is a multiple of the model's tensor, up to that tensor's
    rounding, since not every number is such a multiple.
    """
    value, layer = write.key
    address = subject.model.taps.hosts[value.host, layer].addresses[value.name]
    if address.hook_point.scale == 1 or seen is None:
        compare.equal(where, seen, write.wrote)
    else:
        compare.close(where, seen, write.wrote, 2 * torch.finfo(subject.dtype).eps)


@invariant(
    "edits are position-exact",
    "An edit at one position changes nothing else of the value it is made on.",
    *vocabulary.HOSTS,
    bfloat16=0.0,
)
def position_exact(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for run in _write_runs(subject):
        for write, where in run.of(host):
            compare.about(*write.values)
            seen = run.observer.seen.get(write.key)
            if write.error is not None:
                compare.holds(where, False, f"it raises {write.error!r}")
                continue
            if seen is None or write.served is None:
                compare.holds(where, False, "the model was not seen to continue")
                continue
            changed = seen != write.served
            compare.holds(where, changed[write.index].any(), "the edit did not arrive")
            changed[write.index] = False
            compare.holds(where, not changed.any(), f"{int(changed.sum())} other elements changed")


# In bfloat16 rounding upstream can change a choice of experts, so this is checked in float32 only.
@invariant(
    "edits do not affect earlier tokens",
    "An edit at one position leaves the logits before that position unchanged.",
    *vocabulary.HOSTS,
    float32=1e-5,
    when=lambda subject: subject.native.causal,
    otherwise="the model attends to later tokens too",
)
def no_effect_on_earlier_tokens(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for run in _write_runs(subject):
        for write, where in run.of(host):
            compare.about(*write.values)
            before = (write.row, slice(0, write.position))
            compare.holds(where, write.error is None, f"it raises {write.error!r}")
            compare.close(where, run.observer.logits[before], run.clean_logits[before])


def _compare_shared_value(subject: ModelUnderTest, compare: Comparisons, key: ValueKey) -> None:
    """Write a value that all rows share, in a trace of its own."""
    compare.about(key[0])
    for way in _WAYS:
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad(), subject.model.trace(subject.ids):
            served = subject.read(key)
            new = edited(subject, key, served, noise)
            if way == "assigned":
                subject.write(key, new)
            else:
                served.copy_(new)
            logits = subject.model.logits.save()
        compare.holds(
            (key[1], f"{key[0].name} {way}"),
            not torch.equal(logits, subject.native.logits),
            _UNCHANGED_LOGITS,
        )


# -- states ------------------------------------------------------------------------


def _compare_states(subject: ModelUnderTest, compare: Comparisons, host: str) -> None:
    """Write state_input and state_output both ways, for one row and head only."""
    value = vocabulary.BY_HOST[host]["state_input"]
    for layer in subject.one_per_kind(host, "state_output"):
        for way in _WAYS:
            if value.written and layer in subject.layers(host, "state_input"):
                _compare_state_input(subject, compare, host, layer, way)
            _compare_state_output(subject, compare, host, layer, way)


def _halve_one_head(subject: ModelUnderTest, host: str, layer: int, name: str, way: str) -> None:
    """Inside a trace: halve a state, for one row and head only."""
    envoy = subject.envoy(host, layer)
    state = getattr(envoy, name)
    if way == "assigned":
        state = state.clone()
    state[0, 0] *= 0.5
    if way == "assigned":
        setattr(envoy, name, state)


def _compare_state_input(
    subject: ModelUnderTest, compare: Comparisons, host: str, layer: int, way: str
) -> None:
    """Write the state that enters a decoding step, and that of a fresh prompt, which has none."""
    last, native, model = subject.seq - 1, subject.native, subject.model
    inputs = native.continuation(last)
    clean = subject.once(
        "logits of the last token",
        lambda: native.forward(**inputs, **native.cache_after(last), use_cache=True).logits,
    )
    with torch.no_grad(), model.trace(inputs, **native.cache_after(last), use_cache=True):
        _halve_one_head(subject, host, layer, "state_input", way)
        logits = model.logits.save()
    value = vocabulary.BY_HOST[host]["state_input"]
    compare.about(value)
    _only_first_row_changes(compare, (layer, f"state_input {way}"), logits, clean)
    envoy = subject.envoy(host, layer)
    shape = [subject.batch, *(getattr(envoy, axis) for axis in value.axes[1:])]
    with torch.no_grad(), model.trace(subject.ids):
        envoy.state_input = torch.ones(shape, dtype=subject.dtype)
        logits = model.logits.save()
    compare.holds(
        (layer, "state_input of a fresh prompt"),
        not torch.equal(logits, native.logits),
        _UNCHANGED_LOGITS,
    )


def _compare_state_output(
    subject: ModelUnderTest, compare: Comparisons, host: str, layer: int, way: str
) -> None:
    """Write the state that leaves a call, and continue from the cache it was written into."""
    last, native = subject.seq - 1, subject.native
    inputs, clean_cache = native.continuation(1, last), native.cache_after(1)
    options = {**native.cache_after(1), "use_cache": True}
    try:
        native.forward(**inputs, **clean_cache, use_cache=True)
    except (RuntimeError, ValueError):  # a kernel that takes no state together with several tokens
        inputs, options = {"input_ids": subject.ids[:, :last]}, {"use_cache": True}
        clean_cache = cache_of(native.forward(**inputs, use_cache=True))
    with torch.no_grad(), subject.model.trace(inputs, **options):
        _halve_one_head(subject, host, layer, "state_output", way)
        output = subject.model.output.save()
    written, clean = (
        native.forward(**native.continuation(last), **(cache or {}), use_cache=True).logits
        for cache in (cache_of(output), clean_cache)
    )
    compare.about(vocabulary.BY_HOST[host]["state_output"])
    _only_first_row_changes(compare, (layer, f"state_output {way}"), written, clean)


def _only_first_row_changes(
    compare: Comparisons, where: tuple[int, str], logits: torch.Tensor, clean: torch.Tensor
) -> None:
    compare.holds(where, not torch.equal(logits[0], clean[0]), _UNCHANGED_LOGITS)
    compare.close(where, logits[1:], clean[1:], 1e-5)


@invariant(
    "writing back what was read",
    "Assigning every value to itself, or copying it onto itself in place, leaves the logits "
    "identical.",
    "model",
    bfloat16=0.0,
)
def write_back(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    keys = [key for key in subject.reading_order() if key[0].written]
    with torch.no_grad(), subject.model.trace(subject.ids):
        for key in keys:
            subject.write(key, subject.read(key))
        assigned = subject.model.logits.save()
    with torch.no_grad(), subject.model.trace(subject.ids):
        for key in keys:
            value = subject.read(key)
            if isinstance(value, torch.Tensor):
                value.copy_(value.clone())
        in_place = subject.model.logits.save()
    compare.about(*(value for value, _ in keys))
    compare.equal("assigned", assigned, subject.native.logits)
    compare.equal("in place", in_place, subject.native.logits)


INVARIANTS = (writes_land, position_exact, no_effect_on_earlier_tokens, write_back)
