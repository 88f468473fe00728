"""Taps: where a running forward passes its values to an observer, and takes changed ones back.

A tap is put on a module's boundary with a hook, or inside its forward by running a rewritten copy
in place of its own. Taps exist while a `Taps.opened` block is open and belong to one model: a plain
forward outside it runs untouched, and two models never share one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from explorer.discovery.anatomy import Anatomy, HostAnatomy
from explorer.discovery.hook_point import (
    HookPoint,
    get_element,
    read_value,
    with_element,
    write_value,
)
from explorer.engine.observers import ModelBusy, Observer
from explorer.engine.tapped_forwards import CallTaps, TappedForwards
from explorer.model.address import REPLAY, BatchShared, replay_of, unwrap
from explorer.model.host_taps import HookGroup, HostTaps, joined
from explorer.model.masks import is_padded


class Taps:
    """All taps of one model.

    root: the transformers model; anatomy: what discovery found; prefix: the engine's name for the
    root, with which its own locations begin; top: the host of the model's own values.

    ``hosts`` are by host name and block (None for the model). ``step`` is the number of the forward
    now running, from 0, ``call_sizes`` its batch and sequence length, and ``call_mask`` [batch seq]
    its mask, None where nothing is padded. ``on_meta``: the model has no weights.
    """

    def __init__(
        self, root: torch.nn.Module, anatomy: Anatomy, prefix: str, top: HostAnatomy
    ) -> None:
        self.root = root
        self.prefix = prefix
        self.step = -1
        self.call_sizes: dict[str, int] = {}
        self.call_mask: torch.Tensor | None = None
        self.on_meta = any(parameter.device.type == "meta" for parameter in root.parameters())
        self._observer: Observer | None = None
        self._thread = 0
        self._calls: Counter[str] = Counter()
        untyped: Any = root
        self._modules: dict[str, torch.nn.Module] = dict(
            untyped.named_modules(remove_duplicate=False)
        )
        self._forwards = TappedForwards(lambda: self._listener is not None, self.on_meta)
        self.hosts: dict[tuple[str, int | None], HostTaps] = {
            ("model", None): HostTaps(prefix, top)
        }
        for layer in range(anatomy.backbone.num_layers):
            path = f"{prefix}.{anatomy.backbone.blocks}.{layer}"
            for host in anatomy.block(layer).hosts.values():
                if host.hook_points:
                    self.hosts[host.name, layer] = taps = HostTaps(path, host)
                    self._add_constants(taps)
        self.locations = {
            address.location for taps in self.hosts.values() for address in taps.addresses.values()
        }
        # Where a decoding step passes nothing.
        self._prompt_only = self.locations - {
            address.location
            for taps in self.hosts.values()
            for name, address in taps.addresses.items()
            if name not in taps.host.prompt_only
        }

    def _module(self, path: str) -> torch.nn.Module:
        """Return the module that the engine calls ``path``."""
        return self._modules[path.removeprefix(self.prefix).lstrip(".")]

    def _add_constants(self, taps: HostTaps) -> None:
        """Give a host the parameters and buffers that its constant values are read off."""
        for name, value in taps.values.items():
            if value.fixed and name in taps.host.details.constants:
                path, sign = taps.host.details.constants[name]
                module, _, leaf = joined(taps.path, path).rpartition(".")
                taps.add_constant(name, self._module(module), leaf, sign)

    # -- opening ------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether a trace or a recording is running."""
        return self._observer is not None

    @property
    def _listener(self) -> Observer | None:
        """The observer, None where what passes a tap now is not of its run.

        It is where it passes in the run's thread, with somebody waiting.
        """
        observer = self._observer
        if observer is None or self._thread != threading.get_ident() or not observer.is_active():
            return None
        return observer

    @contextmanager
    def opened(
        self, observer: Observer, wanted: set[str] | None = None, native: bool = False
    ) -> Generator[Taps]:
        """Open the taps for ``observer``.

        wanted: the locations to tap; None for all, as for a model without weights, whose
        kernels run in torch only where they are tapped. native: tap also what the engine
        serves itself.
        """
        if self._observer is not None:
            raise ModelBusy
        wanted = None if self.on_meta else wanted
        self._observer, self._thread, self.step = observer, threading.get_ident(), -1
        calls: dict[str, CallTaps] = {}
        with ExitStack() as undo:
            undo.callback(self._close)
            handle = self.root.register_forward_pre_hook(
                self._begin_forward, with_kwargs=True, prepend=True
            )
            undo.callback(handle.remove)
            _run_uncompiled(self.root, undo)
            for taps in self.hosts.values():
                for hook_group in taps.hook_groups.values():
                    if hook_group.address.native and not native:
                        continue
                    if wanted is None or taps.is_needed(hook_group, wanted):
                        self._open_tap(hook_group, calls, undo)
            for path, of_module in calls.items():
                self._forwards.divert(self._module(path), of_module, undo)
            yield self

    def _close(self) -> None:
        self._observer, self.call_sizes, self.call_mask = None, {}, None
        for taps in self.hosts.values():
            taps.captured.clear()

    def _open_tap(self, hook_group: HookGroup, calls: dict[str, CallTaps], undo: ExitStack) -> None:
        """Put a tap on a module's boundary, or on a call inside its forward.

        The latter are collected in ``calls``, by the path of the module.
        """
        place = next(iter(hook_group.members.values()))
        path = joined(hook_group.host.path, place.module)
        if place.operation:
            call = calls.setdefault(path, CallTaps())
            for label in place.operation:
                call = call.calls.setdefault(label, CallTaps())
            taps = call.before if hook_group.side == "input" else call.after
            # The method is looked up at each call, so that a test can watch it.
            taps.append(lambda container: self.pass_through(hook_group, container))
            return
        module = self._module(path)
        if hook_group.side == "input":
            hook = module.register_forward_pre_hook(
                lambda _, args, kwargs: self._pass_boundary(hook_group, place, (args, kwargs)),
                with_kwargs=True,
            )
        else:
            # Before anybody else's hooks, so that a recording sees what a trace sees.
            hook = module.register_forward_hook(
                lambda _, args, out: self._pass_boundary(hook_group, place, out), prepend=True
            )
        undo.callback(hook.remove)

    # -- in a forward ---------------------------------------------------------

    def _begin_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """At the start of each forward: count it, and read off how long batch and sequence are."""
        observer = self._listener
        if observer is None:  # the model called on the side, within a trace or in another thread
            return
        self.step += 1
        for taps in self.hosts.values():
            for name in taps.selectors:  # an earlier step's indices do not hold for this one
                taps.captured.pop(name, None)
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None:
            ids = kwargs["inputs_embeds"]
        decoding = self.step > 0 and ids.shape[1] == 1
        left_out = self._prompt_only if decoding else frozenset[str]()
        self.call_sizes = {"batch": ids.shape[0], "seq": ids.shape[1]}
        mask: Any = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            mask = mask[:, -ids.shape[1] :]  # beside a cache it is of the earlier tokens too
        self.call_mask = mask if is_padded(mask, ids) else None
        observer.begin_forward(self.step, self.locations, left_out)
        self._calls.clear()

    def _pass_boundary(self, hook_group: HookGroup, place: HookPoint, container: Any) -> Any:
        """Pass what is at a module's boundary, at its calls that the hook point is of.

        That is one call of a forward, where the hook point names one, else all of them.
        """
        if place.call_index is not None and self._listener is not None:
            turn = self._calls[hook_group.location]
            self._calls[hook_group.location] += 1
            if turn != place.call_index:
                return None
        return self.pass_through(hook_group, container)

    def pass_through(self, hook_group: HookGroup, container: Any) -> Any:
        """Pass what is at a tap to the observer.

        Return the container to go on with, or None for the same.
        """
        observer = self._listener
        if observer is None:
            return None
        taps = hook_group.host
        needed_later = taps.selectors.union(taps.replay_names) & hook_group.members.keys()
        if needed_later:
            values = self._values_at(hook_group, container)
            for name in needed_later:
                taps.captured[name] = values[name]
            state = taps.captured.get("state_input")
            if "state_input" in needed_later and state is not None:
                taps.captured["state_input"] = state.clone()  # some kernels write over it
        if hook_group.address.native:
            changed = observer.exchange(hook_group.location, lambda: container)
        else:
            changed = self._exchange_by_name(observer, hook_group, container)
        if taps.replay_names and "state_output" in hook_group.members:
            self._offer_states(observer, taps)
        return changed

    def _values_at(self, hook_group: HookGroup, container: Any) -> dict[str, Any]:
        """Return the values at a tap by name, in the vocabulary's layouts."""
        taps = hook_group.host
        sizes = {**taps.host.sizes, **self.call_sizes}
        values: dict[str, Any] = {}
        if hook_group.location in taps.selected_locations:
            # With what selects them, for whoever edits the two together.
            values.update((name, taps.captured.get(name)) for name in taps.selectors)
        for name, place in hook_group.members.items():
            tensor = get_element(container, place)
            values[name] = (
                None
                if tensor is None or taps.lacks_selection(place)
                else read_value(tensor, place, taps.values[name].axes, sizes, taps.selection(place))
            )
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and "batch" not in taps.values[name].axes:
                values[name] = BatchShared(value)
        if taps.replay_names and "state_output" in hook_group.members:
            arguments = taps.kernel_arguments
            values[REPLAY] = {name: arguments.get(name) for name in taps.replay_names}
        return values

    def _exchange_by_name(self, observer: Observer, hook_group: HookGroup, container: Any) -> Any:
        """Pass a tap's values by name, and put those back that come back changed."""
        taps = hook_group.host
        served: dict[str, Any] = {}

        def make() -> dict[str, Any]:
            served.update(self._values_at(hook_group, container))
            return served

        changed = observer.exchange(hook_group.location, make)
        if changed is None:
            return None
        edited = {
            name for name in hook_group.members if unwrap(changed[name]) is not unwrap(served[name])
        }
        if any(hook_group.members[name].repeat for name in edited):
            # The kernel repeats all of its narrow arguments or none: pass all of them repeated.
            edited |= {name for name, place in hook_group.members.items() if place.repeat}
        for name in edited:
            place, value = hook_group.members[name], unwrap(changed[name])
            container = self._put_back(taps, name, place, container, value)
            if name in taps.captured:
                taps.captured[name] = changed[name]
        return container

    def _put_back(
        self, taps: HostTaps, name: str, place: HookPoint, container: Any, value: Any
    ) -> Any:
        """Return ``container`` with a changed value, in the model's arrangement of it."""
        if value is None:
            return with_element(container, place, None)
        found, sizes = get_element(container, place), {**taps.host.sizes, **self.call_sizes}
        axes = taps.values[name].axes
        native = write_value(value, place, axes, sizes, found, taps.selection(place))
        if place.written_over:
            with torch.no_grad():
                found.copy_(native)
            return container
        return with_element(container, place, native)

    def _offer_states(self, observer: Observer, taps: HostTaps) -> None:
        """After the kernel: offer the state after each token, computed as far as it is asked for.

        Where the recurrence cannot be run again, the name of what is lacking is offered instead.
        """
        arguments = taps.kernel_arguments
        lacking = replay_of(taps.host.name, arguments).lacks(taps.host.missing)
        states: Iterator[tuple[int, Any]] | None = None

        def state_after(token: int) -> torch.Tensor | str:
            nonlocal states
            if lacking:
                return lacking
            if states is None:
                states = enumerate(replay_of(taps.host.name, taps.kernel_arguments).steps())
            return next(state for index, (_, state) in states if index == token)

        for token in range(self.call_sizes["seq"]):
            observer.exchange(taps.state_location, partial(state_after, token))


def _run_uncompiled(root: torch.nn.Module, undo: ExitStack) -> None:
    """Have modules that were compiled run their own forwards, in which values can be read."""
    for module in root.modules():
        if (compiled := module.__dict__.get("_compiled_call_impl")) is not None:
            module.__dict__["_compiled_call_impl"] = None
            undo.callback(module.__dict__.__setitem__, "_compiled_call_impl", compiled)
