"""Reading and writing the standard values of one host inside a trace."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from explorer import vocabulary
from explorer.engine.nnsight_api import Mediator, OutOfOrderError, WriteBack
from explorer.model.address import REPLAY, ValueAddress, replay_of
from explorer.model.derived import DERIVATIONS, replayed_value
from explorer.model.errors import AlreadyPassed, OutsideTrace, Unavailable
from explorer.model.host_taps import HostTaps
from explorer.model.interface import TracedModel
from explorer.model.served_values import ServedValues
from explorer.recurrence.replay import Replay
from explorer.vocabulary import reasons
from explorer.vocabulary.availability import Unavailability


class HostValues:
    """The standard values of one host, as the blocks of a trace read and write them.

    ``layer`` is None for the model's own.

    ``taps`` is None where the host has no value that can be read; ``missing`` has the reason for
    each that cannot. ``sizes`` are the host's.
    """

    def __init__(
        self,
        model: TracedModel,
        name: str,
        layer: int | None,
        taps: HostTaps | None,
        missing: Mapping[str, Unavailability],
        sizes: dict[str, int],
    ) -> None:
        self.model = model
        self.name = name
        self.layer = layer
        self.taps = taps
        self.missing = missing
        self.sizes = sizes

    # -- names ----------------------------------------------------------------

    def expression(self, value: str) -> str:
        """Return the Python expression that reads a value here."""
        return f"{vocabulary.HOSTS[self.name].path.replace('[i]', f'[{self.layer}]')}.{value}"

    def resembles_value(self, name: str) -> bool:
        """Return whether ``name`` is a value of another host, or nearly one of this host."""
        return name in vocabulary.NAMES or bool(
            difflib.get_close_matches(name, vocabulary.BY_HOST[self.name], n=1, cutoff=0.8)
        )

    def unknown(self, name: str) -> str:
        """Return the message for ``name``, where there is nothing of that name here."""
        here = self.expression("").rstrip(".")
        if (hosts := vocabulary.of_attribute(name)) and self.layer is not None:
            reason = self.model.anatomy.block(self.layer).hosts[hosts[0]].missing
            return f"{here} has no {name}: {next(iter(reason.values()))}."
        elsewhere = [value.host for value in vocabulary.VALUES if value.name == name]
        if elsewhere:
            places = " and ".join(f"{vocabulary.HOSTS[host].path} ({host})" for host in elsewhere)
            return f"{here} has no {name}; it is a value of {places}."
        names = [*vocabulary.BY_HOST[self.name], *self.sizes]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        nearest = f"; the nearest names are {', '.join(near)}" if near else ""
        return f"{here} has no {name}{nearest}."

    def _unavailable(self, value: vocabulary.Value, reason: object) -> Unavailable:
        return Unavailable(f"{self.expression(value.name)} is unavailable: {reason}.")

    def _not_held(self, value: vocabulary.Value, argument: str) -> Unavailable:
        """Return the error for a kernel without a tensor for an argument that a value needs."""
        return self._unavailable(
            value,
            f"a decoding step's kernel does not hold {argument} as a tensor of its own; "
            "trace the whole sequence at once",
        )

    # -- reading and writing ------------------------------------------------------

    def read(self, value: vocabulary.Value) -> Any:
        """Return a copy of a value, waiting for the forward to reach it."""
        if value.derived:
            return self._derived(value)
        address = self._address(value)
        found = self._served(value, address).copy_of(value.name, address)
        if found is None and not value.optional:
            raise self._unavailable(
                value,
                "this call does not make it. A call that keeps no cache leaves no state, "
                "and one on embeddings has no ids",
            )
        return found

    def write(self, value: vocabulary.Value, new: Any) -> None:
        """Have the model go on with ``new`` in place of a value."""
        expression = self.expression(value.name)
        if not value.written:
            raise Unavailable(value.unwritten.format(name=expression))
        address = self._address(value)
        served = self._served(value, address)
        now = served.copy_of(value.name, address)
        if isinstance(now, torch.Tensor):
            if self.name != "model" and getattr(new, "shape", None) != now.shape:
                given = list(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
                raise ValueError(
                    f"{expression} is a tensor {list(now.shape)}; it was given {given}."
                )
            if isinstance(new, torch.Tensor) and new.dtype != now.dtype:
                raise ValueError(f"{expression} is of {now.dtype}; it was given {new.dtype}.")
        served.assign(value.name, address, new)

    def _address(self, value: vocabulary.Value) -> ValueAddress:
        """Return how a value is reached, or raise Unavailable with the reason."""
        if self.taps is None or value.name not in self.taps.addresses:
            raise self._unavailable(value, self.missing.get(value.name, reasons.NOT_FOUND))
        return self.taps.addresses[value.name]

    def _served(self, value: vocabulary.Value, address: ValueAddress) -> ServedValues:
        """Return what passes at a value's location, waiting for it unless the block has it."""
        mediator = self._mediator(value)
        current = mediator.transform
        occurrence = mediator.wanted(address.location)
        if (
            current is not None
            and isinstance(current.view, ServedValues)
            and (current.location, current.occurrence) == (address.location, occurrence)
        ):
            return current.view
        raw = self._wait(mediator, address.location, value, occurrence)
        served = ServedValues(raw, address, self.sizes.get("num_experts"))
        mediator.transform = WriteBack(
            served.write_back, served, self, address.location, occurrence
        )
        return served

    def _derived(self, value: vocabulary.Value) -> Any:
        """Return a value that is computed from others."""
        if value.name in self.missing or self.taps is None:
            raise self._unavailable(value, self.missing.get(value.name, reasons.NOT_FOUND))
        expression = self.expression(value.name)
        if self.name in vocabulary.RECURRENT and not value.fixed:
            if value.name == "state":
                return self._state(value, self.taps)
            served = self._served(value, self.taps.addresses["state_output"])
            replay = replay_of(self.name, served.raw[REPLAY])
            self._check_complete(value, replay)
            return served.remember_derived(
                expression, replayed_value(value.name, replay, expression)
            )
        source = vocabulary.BY_HOST[self.name][value.source or ""]
        address = self._address(source)
        served = self._served(value, address)
        if value.fixed:
            computed = self.taps.constants[value.name].clone()
        else:
            computed = DERIVATIONS[value.name](served.copy_of(source.name, address), self.sizes)
        return served.remember_derived(expression, computed)

    def _state(self, value: vocabulary.Value, taps: HostTaps) -> torch.Tensor:
        """Return the state after the token that the block's iteration has reached."""
        found = self._wait(self._mediator(value), taps.state_location, value, None)
        if isinstance(found, str):
            raise self._not_held(value, found)
        return found.clone()

    def _check_complete(self, value: vocabulary.Value, replay: Replay) -> None:
        """Raise Unavailable where the call lacks an argument its recurrence is run again from."""
        if (lacking := replay.lacks(self.missing)) is not None:
            raise self._not_held(value, lacking)

    # -- waiting for the forward -----------------------------------------------------

    def _mediator(self, value: vocabulary.Value) -> Mediator:
        """Return the engine's side of the running trace block.

        Raise OutsideTrace where none is running.
        """
        expression = self.expression(value.name)
        try:
            mediator = Mediator.current(expression)
        except ValueError:
            recorded = f"model.record(prompt, [{value.name!r}])"
            if value.name == "state":  # one token's: a recording replays it for a head
                recorded = f"model.record(prompt).state({self.layer}, head, token)"
            raise OutsideTrace(
                f"{expression} is a value of the forward pass: read it inside "
                f"`with model.trace(prompt):`, or take it from `{recorded}`."
            ) from None
        if not self.model.taps.open:
            raise OutsideTrace(
                f"{expression} is served while the whole model runs: read it inside "
                "`with model.trace(prompt):`."
            )
        return mediator

    def _wait(
        self, mediator: Mediator, location: str, value: vocabulary.Value, occurrence: int | None
    ) -> Any:
        """Wait until the forward reaches a location; return what passes there."""
        if occurrence is not None and self._has_passed(mediator, location):
            raise AlreadyPassed(self._order(mediator, value))
        wanted = mediator.wanted(location)
        try:
            raw = Mediator.value(location)
        except OutOfOrderError:
            self._never_reached(mediator, location, value, wanted)
        # Kept where it ends with the block.
        mediator._last_value_read = (self, value.name)  # pyright: ignore[reportAttributeAccessIssue]
        return raw

    def _never_reached(
        self, mediator: Mediator, location: str, value: vocabulary.Value, wanted: int
    ) -> NoReturn:
        """Raise the error for a value that the forward ended without.

        Call it while the engine's own error is handled.
        """
        step_only = self.model.taps.call_sizes.get("seq") == 1
        if self.taps is not None and value.name in self.taps.host.prompt_only and step_only:
            raise self._not_held(value, value.name) from None
        # Under tracer.iter the engine only warns when the run ends early; a step that ran
        # and left this value out is an error there too.
        ran = max(self.model.taps.step, mediator.occurrence(location) - 1)
        if mediator.iteration == 0 or wanted <= ran:
            raise AlreadyPassed(
                f"{self.expression(value.name)} was never reached: the forward ran without the "
                "part it is in, which a skipped module, an early stop or a call without a cache "
                "leaves out."
            ) from None
        raise

    def _has_passed(self, mediator: Mediator, location: str) -> bool:
        """Return whether the step this read belongs to has already gone past the location.

        A step that is not pinned is the one the forward is in; without this check
        the engine would wait for the next step and return its tensor instead.
        """
        done = mediator.occurrence(location)
        wanted = mediator.iteration if mediator.iteration is not None else self.model.taps.step
        return done > wanted

    def _order(self, mediator: Mediator, value: vocabulary.Value) -> str:
        """Return the message for a read too late, with the order that works."""
        text = f"{self.expression(value.name)} was asked for after the forward had passed it"
        last: tuple[HostValues, str] | None = getattr(mediator, "_last_value_read", None)
        if last is None:
            text += "."
        else:
            host, name = last
            text += (
                f": it had reached {host.expression(name)}.{self._before(value.name, host, name)}"
            )
        return (
            f"{text} Ask for it first, ask in a tracer.invoke() block of its own, "
            "or use model.record, which takes any order."
        )

    def _before(self, value: str, other: HostValues, reached: str) -> str:
        """Return the sentence, after a space, that a value here comes before one there."""
        if self.layer is None or self.layer != other.layer:
            earlier = (
                "The model's inputs and embeddings come"
                if self.layer is None
                else f"Block {self.layer} comes"
            )
            later = "first" if other.layer is None else f"before block {other.layer}"
            return f" {earlier} {later}."
        both = {
            f"{host.name}.{name}".removeprefix("layers.")
            for host, name in ((self, value), (other, reached))
        }
        names = [name for name in self.model.reading_order(self.layer) if name in both]
        return f" In this block the forward passes {' → '.join(names)}." if len(names) > 1 else ""
