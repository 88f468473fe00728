"""Taps: where a running forward hands the standard values over, and takes edits back.

A tap is put on a module's boundary with a hook, or inside its forward by running
the engine's instrumented copy of it in place of its own. Taps exist while a
`Taps.armed` block is open and belong to one model: a plain forward outside it runs
untouched, and two models never share one.

What arrives at a tap goes to a *sink*, which may hand back something else to go on with.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from explorer import vocabulary
from explorer.discovery.anatomy import Anatomy, HostAnatomy
from explorer.discovery.hook_point import (
    HookPoint,
    get_element,
    is_identity,
    read_value,
    with_element,
    write_value,
)
from explorer.engine.instrument import OPERATORS, instrumented
from explorer.engine.nnsight_api import NO_SKIP, STATE, SourceNotAvailable, State, bind, make_op
from explorer.engine.observers import ModelBusy, Observer
from explorer.engine.reference_kernels import reference
from explorer.model.address import REPLAY, BatchShared, ValueAddress, replay_of, unwrap
from explorer.recurrence.replay import Replay
from explorer.vocabulary import MIXERS


@dataclass
class HookGroup:
    """One tap: the values handed over there."""

    location: str
    side: str
    host: HostTaps
    members: dict[str, HookPoint] = field(default_factory=dict)


@dataclass
class _Node:
    """One call inside a forward: taps before and after it, and calls inside it."""

    before: list[HookGroup] = field(default_factory=list)
    after: list[HookGroup] = field(default_factory=list)
    calls: dict[str, _Node] = field(default_factory=dict)


class HostTaps:
    """The taps of one host of one block: locations by value name, and what the last call's kernel got."""

    def __init__(self, path: str, host: HostAnatomy) -> None:
        self.path = path
        self.host = host
        self.values = vocabulary.BY_HOST[host.name]
        self.reach: dict[str, ValueAddress] = {}
        self.hook_groups: dict[tuple, HookGroup] = {}
        self.kept: dict[str, torch.Tensor | None] = {}
        #: What the recurrence is run again from, where it can be.
        self.replayed = MIXERS[host.name].replayed if "state_output" in host.hook_points else ()
        for name, hook_points in host.hook_points.items():
            self._add(name, hook_points)
        #: Values that are constants of the model.
        self._constants: dict[str, tuple[torch.nn.Module, str, float]] = {}
        #: What numbers the entries that other values have of what is found at their places, and where those are.
        numbered = {
            name: by
            for name, hook_points in host.hook_points.items()
            for place in hook_points
            if place.selection is not None and (by := place.selection.indices)
        }
        self.choosing = set(numbered.values())
        self.chosen = {self.reach[name].location for name in numbered}
        if {"expert_indices", "expert_weights"} <= set(self.reach) and self.reach[
            "expert_indices"
        ].location != self.reach["expert_weights"].location:
            self.choosing.add(
                "expert_indices"
            )  # whoever edits weights by their experts needs both at once
            self.chosen.add(self.reach["expert_weights"].location)

    def _elsewhere(self, hook_points: tuple[HookPoint, ...]) -> tuple[HookPoint, ...]:
        """Where another kind of call hands a value over: with the values it shares its first moment with, where it says nothing itself."""
        if len(hook_points) > 1:
            return hook_points
        beside = [
            found
            for found in self.host.hook_points.values()
            if found[0].call_site == hook_points[0].call_site and found[0].operation
        ]
        return max(beside, key=len, default=hook_points)

    def _add(self, name: str, hook_points: tuple[HookPoint, ...]) -> None:
        """The first place names the location; the others lead to the same one on other kinds of call.

        Values share a location where every kind of call hands them over at one moment.
        """
        first = hook_points[0]
        native = (
            len(hook_points) == 1
            and not first.operation
            and first.repeat is None
            and first.call_index is None
            and first.selection is None
            and is_identity(first.arrangement, self.values[name].axes)
        )
        module = _joined(self.path, first.module)
        hook_groups = "+".join(
            f"{place.module.removeprefix(first.module)}{'/'.join(place.operation)}.{place.side}"
            for place in self._elsewhere(hook_points)
        )
        location = (
            f"{module}.{first.side}" if native else f"{module}@{hook_groups}:{self.host.name}"
        )
        self.reach[name] = ValueAddress(location, first, native)
        for place in hook_points:
            hook_group = self.hook_groups.setdefault(
                (*place.call_site, location), HookGroup(location, place.side, self)
            )
            hook_group.members[name] = place

    @property
    def fixed(self) -> dict[str, torch.Tensor]:
        """Values that are constants of the model, as they are now: one number per head."""
        return {
            name: sign * getattr(module, leaf).detach().float().flatten()
            for name, (module, leaf, sign) in self._constants.items()
        }

    def fix(self, name: str, module: torch.nn.Module, leaf: str, sign: float) -> None:
        """Have a value read off a parameter or buffer, times a sign, its numbers in the order of the heads."""
        self._constants[name] = module, leaf, sign

    @property
    def given(self) -> dict[str, torch.Tensor | None]:
        """What the last call's kernel got, constants of the model among it."""
        return self.kept | self.fixed

    def numbers(self, place: HookPoint) -> torch.Tensor | None:
        """The entries of what is found at a place that are the value, where it has some of them alone."""
        return None if place.selection is None else self.kept.get(place.selection.indices)

    def unnumbered(self, place: HookPoint) -> bool:
        """Whether a value is some entries of what is found at a place, and nothing in this call said which."""
        return (
            place.selection is not None
            and bool(place.selection.indices)
            and self.numbers(place) is None
        )

    @property
    def replay_location(self) -> str:
        """After the kernel, where its arguments are served again under `REPLAY`."""
        return self.reach["state_output"].location

    @property
    def state_location(self) -> str:
        return f"{self.path}.{self.host.module}@state"


def _joined(path: str, module: str) -> str:
    return f"{path}.{module}" if module else path


class Taps:
    """All taps of one model.

    root: the transformers model; anatomy: what discovery found; prefix: the
    engine's name for the root, with which its own locations begin.
    """

    def __init__(
        self, root: torch.nn.Module, anatomy: Anatomy, prefix: str, top: HostAnatomy
    ) -> None:
        self.root = root
        self.prefix = prefix
        self.hosts: dict[tuple[str, int | None], HostTaps] = {}
        self.step = -1
        self.shapes = any(parameter.device.type == "meta" for parameter in root.parameters())
        self.call: dict[str, int] = {}
        self._calls: Counter[str] = Counter()
        self.locations: set[str] = set()
        self._bodies: dict[str, tuple] = {}
        self._sink: Observer | None = None
        self._thread = 0
        self.modules = dict(root.named_modules(remove_duplicate=False))
        self.hosts["model", None] = HostTaps(prefix, top)
        for layer in range(anatomy.backbone.num_layers):
            path = f"{prefix}.{anatomy.backbone.blocks}.{layer}"
            for host in anatomy.block(layer).hosts.values():
                if host.hook_points:
                    self.hosts[host.name, layer] = HostTaps(path, host)
                    self._fix(self.hosts[host.name, layer])
        for taps in self.hosts.values():
            self.locations |= {reach.location for reach in taps.reach.values()}

    def module(self, taps: HostTaps, place: HookPoint) -> torch.nn.Module:
        path = _joined(taps.path, place.module).removeprefix(self.prefix).lstrip(".")
        return self.modules[path]

    def _fix(self, taps: HostTaps) -> None:
        """Tell a host where its constants stand in the model."""
        for name, value in taps.values.items():
            if value.fixed and name in taps.host.details.constants:
                path, sign = taps.host.details.constants[name]
                module, _, leaf = (
                    _joined(taps.path, path).removeprefix(self.prefix).lstrip(".").rpartition(".")
                )
                taps.fix(name, self.modules[module], leaf, sign)

    # -- arming -------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether a trace or a recording is running."""
        return self._sink is not None

    @property
    def _listening(self) -> bool:
        """Whether what passes a tap now belongs to the run: in its thread, with somebody waiting."""
        return (
            self._sink is not None and self._thread == threading.get_ident() and self._sink.active()
        )

    @contextmanager
    def armed(
        self, sink: Observer, wanted: set[str] | None = None, native: bool = False
    ) -> Iterator[Taps]:
        """Open the taps towards ``sink``; ``native`` also taps what the engine serves itself.

        ``wanted`` limits them to these locations; None opens all, as does a model without
        weights, whose kernels run in torch only where a tap looks on.
        """
        wanted = None if self.shapes else wanted
        if self._sink is not None:
            raise ModelBusy(
                "This model is in the middle of a trace; run another one before that block or after it."
            )
        self._sink, self._thread, self.step = sink, threading.get_ident(), -1
        trees: dict[str, _Node] = {}
        with ExitStack() as undo:
            undo.callback(self._closed)
            handle = self.root.register_forward_pre_hook(
                self._begin, with_kwargs=True, prepend=True
            )
            undo.callback(handle.remove)
            for taps in self.hosts.values():
                for hook_group in taps.hook_groups.values():
                    own = taps.reach[next(iter(hook_group.members))]
                    derived = (
                        taps.replayed
                        and wanted is not None
                        and {taps.replay_location, taps.state_location} & wanted
                    )
                    numbers = (
                        wanted is not None
                        and taps.chosen & wanted
                        and taps.choosing & set(hook_group.members)
                    )
                    if (
                        wanted is not None
                        and hook_group.location not in wanted
                        and not derived
                        and not numbers
                    ):
                        continue
                    if own.native and not native:
                        continue
                    self._open(taps, hook_group, trees, undo)
            for path, tree in trees.items():
                self._divert(path, tree, undo)
            yield self

    def _closed(self) -> None:
        self._sink, self.call = None, {}
        for taps in self.hosts.values():
            taps.kept.clear()

    def _begin(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        """At the start of each forward: which step it is, and how long batch and sequence are."""
        if (
            not self._listening
        ):  # the model called on the side, from within a trace or another thread
            return
        self.step += 1
        for taps in self.hosts.values():
            for name in taps.choosing:  # an earlier step's numbers say nothing of this one's
                taps.kept.pop(name, None)
        self._sink.begin(self.step, self.locations)
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None:
            ids = kwargs.get("inputs_embeds")
        self.call = {"batch": ids.shape[0], "seq": ids.shape[1]}
        self._calls.clear()

    def _open(
        self, taps: HostTaps, hook_group: HookGroup, trees: dict[str, _Node], undo: ExitStack
    ) -> None:
        place = next(iter(hook_group.members.values()))
        module = self.module(taps, place)
        if not place.operation:
            if hook_group.side == "input":
                hook = module.register_forward_pre_hook(
                    lambda _, args, kwargs: self._turned(hook_group, place, (args, kwargs)),
                    with_kwargs=True,
                )
            else:
                # Before anybody else's hooks, so that a recording sees what a trace sees.
                hook = module.register_forward_hook(
                    lambda _, args, out: self._turned(hook_group, place, out), prepend=True
                )
            undo.callback(hook.remove)
            return
        path = _joined(taps.path, place.module)
        node = trees.setdefault(path, _Node())
        for label in place.operation:
            node = node.calls.setdefault(label, _Node())
        (node.before if hook_group.side == "input" else node.after).append(hook_group)

    def _divert(self, path: str, tree: _Node, undo: ExitStack) -> None:
        """Run the instrumented copy of a module's forward while the taps are open."""
        module = self.modules[path.removeprefix(self.prefix).lstrip(".")]
        state = module.__dict__[STATE]
        if path not in self._bodies:
            holder: dict[str, _Node] = {}
            operation = self._op(
                holder, lambda: state.active()[:2] if state.sourced else (None, None)
            )
            self._bodies[path] = (_tapped(instrumented(state.original, operation)), holder)
        tapped, holder = self._bodies[path]
        holder["tree"] = tree
        undo.callback(setattr, state, "__class__", State)
        state.__class__ = tapped

    def _op(self, holder: dict[str, _Node], locate: Callable[[], tuple]) -> Callable:
        """What an instrumented forward calls at each of its operations.

        ``locate`` gives the engine's interleaver and path where somebody reads this
        forward's operations through the engine's own ``.source``, else Nones.
        """
        passing, inner = make_op(locate), {}

        def op(location: str, fn: Callable, *args: Any, **kwargs: Any) -> Any:
            fn = reference(fn) if self.shapes else fn
            node = holder["tree"].calls.get(location.removeprefix("source."))
            if node is None or not self._listening:
                return fn(*args) if fn in OPERATORS else passing(location, fn, *args, **kwargs)
            for hook_group in node.before:
                args, kwargs = self.fire(hook_group, (args, kwargs)) or (args, kwargs)
            if node.calls and fn is not bind:
                out = self._within(fn, location, node, locate, inner, args, kwargs)
            else:
                out = fn(*args) if fn in OPERATORS else passing(location, fn, *args, **kwargs)
            for hook_group in node.after:
                changed = self.fire(hook_group, out)
                out = out if changed is None else changed
            return out

        return op

    def _within(
        self,
        fn: Callable,
        location: str,
        node: _Node,
        locate: Callable,
        inner: dict,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """Run ``fn`` with the calls it makes tapped too; built once for each function met at a place."""
        if (location, fn) not in inner:
            holder: dict[str, _Node] = {}
            try:
                built = instrumented(fn, self._op(holder, lambda: _drilled(locate, location)))
            except SourceNotAvailable:
                built = fn
            inner[location, fn] = (built, holder)
        built, holder = inner[location, fn]
        holder["tree"] = node
        interleaver, path = locate()
        if interleaver is None:
            return built(*args, **kwargs)
        # The engine's own handling of an operation, except that what runs stays ours.
        base = f"{path}.{location}"
        args, kwargs = interleaver.handle(f"{base}.input", (args, kwargs))
        out = interleaver.handle(f"{base}.skip", NO_SKIP)
        if out is NO_SKIP:
            if base in interleaver.sourced:
                interleaver.handle(f"{base}.fn", fn)
            out = built(*args, **kwargs)
        return interleaver.handle(f"{base}.output", out)

    # -- firing -------------------------------------------------------------

    def _turned(self, hook_group: HookGroup, place: HookPoint, container: Any) -> Any:
        """Fire at a module's boundary: at each of its calls, or at the one of a forward the place is of."""
        if place.call_index is not None and self._listening:
            turn = self._calls[hook_group.location]
            self._calls[hook_group.location] += 1
            if turn != place.call_index:
                return None
        return self.fire(hook_group, container)

    def fire(self, hook_group: HookGroup, container: Any) -> Any:
        """Offer what is at a tap to the sink; return the container to go on with, or None for the same."""
        if not self._listening:
            return None
        taps = hook_group.host
        own = taps.reach[next(iter(hook_group.members))]
        if taps.replayed and set(hook_group.members) & set(taps.replayed):
            kept = {
                name: value
                for name, value in self._served(hook_group, container).items()
                if name in taps.replayed
            }
            if kept.get("state_input") is not None:  # some kernels write the new state over it
                kept["state_input"] = kept["state_input"].clone()
            taps.kept.update(kept)
        for name in taps.choosing & set(hook_group.members):
            taps.kept[name] = self._served(hook_group, container)[name]
        if own.native:
            changed = self._sink.offer(own.location, lambda: container)
        else:
            changed = self._edited(hook_group, container)
        if taps.replayed and "state_output" in hook_group.members:
            self._states(taps)
        return changed

    def _served(self, hook_group: HookGroup, container: Any) -> dict[str, torch.Tensor | None]:
        taps = hook_group.host
        sizes = {**taps.host.sizes, **self.call}
        found = {name: get_element(container, place) for name, place in hook_group.members.items()}
        served = {
            name: None
            if tensor is None or taps.unnumbered(place)
            else read_value(tensor, place, taps.values[name].axes, sizes, taps.numbers(place))
            for (name, tensor), place in zip(found.items(), hook_group.members.values())
        }
        if (
            hook_group.location in taps.chosen
        ):  # with what numbers them, for whoever edits the two together
            served = {name: taps.kept.get(name) for name in taps.choosing} | served
        for name, value in served.items():
            if isinstance(value, torch.Tensor) and "batch" not in taps.values[name].axes:
                served[name] = BatchShared(value)
        if taps.replayed and "state_output" in hook_group.members:
            served[REPLAY] = {name: taps.given.get(name) for name in taps.replayed}
        return served

    def _replay(self, taps: HostTaps) -> Replay:
        """The recurrence of the call whose kernel has just run, from what it was given."""
        return replay_of(taps.host.name, taps.given)

    def _edited(self, hook_group: HookGroup, container: Any) -> Any:
        """Serve a tap's values by name and put back those that come back changed."""
        served: dict[str, torch.Tensor | None] = {}

        def make() -> dict[str, torch.Tensor | None]:
            served.update(self._served(hook_group, container))
            return served

        changed = self._sink.offer(hook_group.location, make)
        if changed is None:
            return None
        edited = {
            name for name in hook_group.members if unwrap(changed[name]) is not unwrap(served[name])
        }
        if any(hook_group.members[name].repeat for name in edited):
            # The kernel repeats all of its narrow arguments or none: hand on all of them repeated.
            edited |= {name for name, place in hook_group.members.items() if place.repeat}
        for name in edited:
            place = hook_group.members[name]
            value = unwrap(changed[name])
            axes = hook_group.host.values[name].axes
            found, sizes = (
                get_element(container, place),
                {**hook_group.host.host.sizes, **self.call},
            )
            native = (
                value
                if value is None
                else write_value(value, place, axes, sizes, found, hook_group.host.numbers(place))
            )
            if place.written_over and native is not None:
                with torch.no_grad():
                    found.copy_(native)
            else:
                container = with_element(container, place, native)
            if name in hook_group.host.kept:
                hook_group.host.kept[name] = changed[name]
        return container

    def _states(self, taps: HostTaps) -> None:
        """After the kernel: the state after each token, made as far as somebody asks for it; or what is lacking to make it."""
        states: list[Iterator] = []
        lacks = self._replay(taps).lacks(taps.host.missing)

        def at(token: int) -> torch.Tensor | str:
            if lacks:
                return lacks
            if not states:
                states.append(enumerate(self._replay(taps).steps()))
            return next(state for index, (_, state) in states[0] if index == token)

        for token in range(self.call["seq"]):
            self._sink.offer(taps.state_location, lambda token=token: at(token))


def _tapped(body: Callable) -> type:
    """The class a module's engine state has while its taps are open: ``body`` runs in place of its own.

    What the engine meanwhile installs (its ``.source`` does so on first use) goes
    where it always goes and is what runs once the taps are closed.
    """
    return type(
        "TappedState",
        (State,),
        {"__slots__": (), "body": property(lambda _: body, State.body.__set__)},
    )


def _drilled(locate: Callable[[], tuple], location: str) -> tuple:
    """The engine's interleaver and path inside an operation somebody asked to look into, else Nones."""
    interleaver, path = locate()
    base = f"{path}.{location}"
    return (
        (interleaver, base)
        if interleaver is not None and interleaver.sourced.get(base)
        else (None, None)
    )
