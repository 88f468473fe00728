"""Recording: one forward of the whole model, with any set of values kept and any edits made."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from explorer import vocabulary
from explorer.discovery.hook_point import get_element, with_element
from explorer.model.address import REPLAY, BatchShared, ValueAddress, replay_of, unwrap
from explorer.model.derived import DERIVATIONS, replayed_value
from explorer.model.edits import Edit, JointEdit, check_experts
from explorer.model.errors import Cancelled, Unavailable
from explorer.model.interface import RecordedModel
from explorer.model.record_request import RequestedValue, check_edits
from explorer.model.recording import Key
from explorer.model.snapshots import Snapshots, shared_keys
from explorer.vocabulary import key_of

#: Called with the number of blocks done, and of all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Recorded:
    """The values of a forward, the keys of those that share memory, and the seconds it took."""

    values: dict[Key, Any]
    shared: set[Key]
    seconds: float


@dataclass(frozen=True)
class _PlannedEdit:
    """An edit, where what it edits is, and how many experts its host has (None: it has none)."""

    edit: Edit
    name: str
    address: ValueAddress
    num_experts: int | None


@dataclass
class _AtLocation:
    """What a recording does at one location.

    It makes edits, then takes snapshots of values; others it gets by running the recurrence again.
    """

    edits: list[_PlannedEdit] = field(default_factory=list[_PlannedEdit])
    values: list[tuple[Key, str, ValueAddress]] = field(
        default_factory=list[tuple[Key, str, ValueAddress]]
    )
    replayed: list[tuple[Key, vocabulary.Value]] = field(
        default_factory=list[tuple[Key, vocabulary.Value]]
    )


class _Plan:
    """What a recording does at each location, and which values it computes after the forward."""

    def __init__(
        self, model: RecordedModel, requested: list[RequestedValue], edits: Iterable[Edit]
    ) -> None:
        self.keys = {one.key for one in requested}
        self.locations: dict[str, _AtLocation] = {}
        self.derived: list[tuple[RequestedValue, Key]] = []
        for one in requested:
            self._add_value(model, one)
        for edit in edits:
            value, taps = model.writable(edit.value, edit.layer)
            edit.check(taps.host.sizes)
            address = taps.addresses[value.name]
            num_experts = taps.host.sizes.get("num_experts")
            self._at(address.location).edits.append(
                _PlannedEdit(edit, value.name, address, num_experts)
            )

    def _at(self, location: str) -> _AtLocation:
        return self.locations.setdefault(location, _AtLocation())

    def _add_value(self, model: RecordedModel, one: RequestedValue) -> None:
        value, taps = one.value, one.taps
        if value.name == "state":
            raise Unavailable(
                "state is one token's: take Recording.state(layer, head, token), or record states."
            )
        if value.name in ("states", "state_attention"):
            self._at(taps.replay_location).replayed.append((one.key, value))
            return
        key, name = one.key, value.name
        if value.source is not None:
            layer, name = one.key[1], value.source
            mixers = () if layer is None else model.mixers[layer]
            key = key_of(vocabulary.BY_HOST[value.host][name], mixers), layer
            self.derived.append((one, key))
        address = taps.addresses[name]
        self._at(address.location).values.append((key, name, address))


class _RecordingObserver:
    """Makes the edits of a plan in a running forward, and takes snapshots of its values."""

    def __init__(self, plan: _Plan, snapshots: Snapshots) -> None:
        self.plan, self.snapshots = plan, snapshots
        self.values: dict[Key, Any] = {}

    def is_active(self) -> bool:
        return True

    def begin_forward(
        self, step: int, locations: Iterable[str], left_out: Collection[str] = ()
    ) -> None:
        """Do nothing: a recording is one forward, so there are no steps to distinguish."""

    def exchange(self, location: str, make: Callable[[], Any]) -> Any:
        here = self.plan.locations.get(location)
        if here is None:
            return None
        passed = container = make()
        for key, value in here.replayed:
            name, layer = value.name, key[1]
            expression = f"{vocabulary.HOSTS[value.host].path.replace('[i]', f'[{layer}]')}.{name}"
            replay = replay_of(value.host, passed[REPLAY])
            self.values[key] = _on_cpu(replayed_value(name, replay, expression))
        for planned in here.edits:
            container = _edited(container, planned)
        edited = {planned.name for planned in here.edits}
        for key, name, address in here.values:
            value = _value_in(container, name, address)
            # An edit may return a tensor that its caller goes on using.
            self.values[key] = self.snapshots.take(
                (location, name), value, always_copy=name in edited
            )
        return None if container is passed else container


def _value_in(container: Any, name: str, address: ValueAddress) -> Any:
    return get_element(container, address.hook_point) if address.native else unwrap(container[name])


def _edited(container: Any, planned: _PlannedEdit) -> Any:
    """Return what passes at a location with an edit made in it."""
    edit, name, address = planned.edit, planned.name, planned.address
    now = _value_in(container, name, address)
    if now is None:
        raise Unavailable(f"{edit.value} is None in this call, so there is nothing to edit.")
    new: Any = (
        edit.change(now.clone(), container)
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
    if name == "expert_indices" and planned.num_experts is not None:
        check_experts(new, planned.num_experts)
    if address.native:
        return with_element(container, address.hook_point, new)
    shared = isinstance(container[name], BatchShared)
    return {**container, name: BatchShared(new) if shared else new}


def _on_cpu(value: Any) -> Any:
    """Return a tensor that was computed for the recording, without its graph and on the CPU."""
    if not isinstance(value, torch.Tensor) or value.device.type == "meta":
        return value
    return value.detach().to("cpu")


def record(
    model: RecordedModel,
    inputs: dict[str, torch.Tensor],
    requested: list[RequestedValue],
    edits: Sequence[Edit],
    progress: Progress | None,
    cancel: Callable[[], bool] | None,
) -> Recorded:
    """Run the model once on ``inputs`` and return the requested values.

    Where the model changes a tensor in place that it had left alone in earlier recordings, the
    forward runs a second time, with a copy of that tensor (`explorer.model.snapshots`).
    """
    check_edits(edits)
    plan = _Plan(model, requested, edits)
    # Only a cache is given the state of a recurrence; else the forward is the one anybody would
    # get.
    recurrent = any(host in vocabulary.RECURRENT for mixers in model.mixers for host in mixers)
    options = {"use_cache": True} if recurrent else {}
    start = time.perf_counter()
    while True:
        snapshots = Snapshots(model.change_history)
        observer = _RecordingObserver(plan, snapshots)
        with (
            torch.no_grad(),
            model.lock,
            model.taps.opened(observer, set(plan.locations), native=True),
            _reporting(model, progress, cancel),
        ):
            model.hf(**inputs, **options)
        if snapshots.verify():
            break
    values = observer.values
    for one, source in plan.derived:
        value, taps = one.value, one.taps
        values[one.key] = (
            _on_cpu(taps.constants[value.name])
            if value.fixed
            else DERIVATIONS[value.name](values[source], taps.host.sizes)
        )
    values = {key: value for key, value in values.items() if key in plan.keys}
    del observer  # it holds the values that were not requested too
    return Recorded(values, shared_keys(values), time.perf_counter() - start)


@contextmanager
def _reporting(
    model: RecordedModel, progress: Progress | None, cancel: Callable[[], bool] | None
) -> Generator[None]:
    """Report each block as it finishes, and stop the forward where ``cancel`` returns True."""
    if progress is None and cancel is None:
        yield
        return
    blocks: Any = model.hf.get_submodule(model.anatomy.backbone.blocks)

    def finished(index: int) -> None:
        if progress is not None:
            progress(index + 1, len(blocks))
        if cancel is not None and cancel():
            raise Cancelled("The run was cancelled.")

    def hook(index: int) -> Callable[[Any, Any, Any], None]:
        return lambda module, args, output: finished(index)

    handles = [block.register_forward_hook(hook(index)) for index, block in enumerate(blocks)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
