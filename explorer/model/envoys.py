"""The standard values as attributes of the engine's envoys.

Reading one inside a trace waits for the forward to reach its place and hands out
a copy: what the model does to its tensor later does not show in it. When the block
moves on, what it made of the copy (an in-place edit, an assignment) goes back.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import torch

from explorer import vocabulary
from explorer.discovery.hook_point import get_element, with_element
from explorer.engine.nnsight_api import Envoy, Mediator, OutOfOrderError, WriteBack, eproperty
from explorer.model.address import REPLAY, BatchShared, ValueAddress, replay_of, unwrap
from explorer.model.taps import HostTaps
from explorer.recurrence.replay import Replay
from explorer.vocabulary.availability import NOT_FOUND, Unavailability

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel


class Unavailable(ValueError):
    """The value cannot be had here; the message says why and what would change that."""


class OutsideTrace(ValueError):
    """A value of the forward pass was asked for with no forward running."""


class PassedBy(OutOfOrderError):
    """The forward had already gone past a value when it was asked for."""


class Visit:
    """One moment of the forward as a trace block holds it: what came, and the copies handed out."""

    def __init__(self, raw: Any, reach: ValueAddress, experts: int | None = None) -> None:
        self.raw = raw
        self.experts = experts
        self.native = reach.native
        #: By what is handed out, not by its name: two names of one tensor share a copy, so an edit by either is the edit.
        self.views: dict[Any, tuple[str, Any, int, ValueAddress]] = {}
        #: What was worked out from them and handed out, with what to call it: nothing written into that reaches the model.
        self.derived: list[tuple[str, torch.Tensor, int]] = []

    def computed(self, expression: str, value: Any) -> Any:
        """Remember a value worked out at this moment, so that an edit of it is not lost without a word."""
        if isinstance(value, torch.Tensor):
            self.derived.append((expression, value, value._version))
        return value

    def view(self, name: str, reach: ValueAddress) -> Any:
        """The copy of one value; the same object however often it is read at this moment."""
        key = self._key(name, reach)
        if key not in self.views:
            if not self.native and name not in self.raw:
                raise Unavailable(
                    f"{name} is unavailable: a decoding step's kernel does not hold it as a tensor of its own; trace the whole sequence at once."
                )
            tensor = get_element(self.raw, reach.place) if self.native else unwrap(self.raw[name])
            copied = tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
            self.views[key] = (name, copied, getattr(copied, "_version", 0), reach)
        return self.views[key][1]

    def assign(self, name: str, reach: ValueAddress, value: Any) -> None:
        self.views[self._key(name, reach)] = (name, value, -1, reach)

    def _key(self, name: str, reach: ValueAddress) -> Any:
        # What a moment hands over once is one tensor, whatever it is called and however it is laid out.
        return (
            reach.place.element
            if self.native
            else (reach.place.element, reach.place.arrangement, reach.place.repeat)
        )

    def back(self) -> Any:
        """What the model goes on with: the original where a copy was only looked at."""
        for expression, value, version in self.derived:
            if value._version != version:
                raise Unavailable(
                    f"{expression} is computed from other values: what is written into it reaches nothing. Clone it first, or write what it is computed from."
                )
        changed = self.raw
        for name, value, version, reach in self.views.values():
            if not isinstance(value, torch.Tensor):
                if version == -1:
                    changed = self._put(changed, name, reach, value)
            elif value._version != version or value.requires_grad:
                # The model gets a copy in turn, so that neither sees the other's later edits.
                changed = self._put(changed, name, reach, value.clone())
        return changed

    def _put(self, raw: Any, name: str, reach: ValueAddress, value: Any) -> Any:
        if (
            name == "expert_indices"
            and self.experts is not None
            and not ((value >= 0) & (value < self.experts)).all()
        ):
            raise ValueError(
                f"There are experts 0 to {self.experts - 1}; expert_indices were given {int(value.min())} to {int(value.max())}."
            )
        if self.native:
            return with_element(raw, reach.place, value)
        return {**raw, name: BatchShared(value) if isinstance(raw[name], BatchShared) else value}


class StandardValue(eproperty):
    """One standard value on the envoys of its host."""

    def __init__(self, value: vocabulary.Value) -> None:
        super().__init__(key=value.name, description=value.meaning)
        self.value = value
        self.name = value.name
        self.__doc__ = f"{value.typed}: {value.meaning}"

    def __str__(self) -> str:
        return f"({self.name}) -> {self.value.typed}: {self.value.meaning}"

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        return self._standard(obj).read(self.value)

    def __set__(self, obj: Any, value: Any) -> None:
        self._standard(obj).write(self.value, value)

    def _standard(self, obj: Any) -> Standard:
        """The envoy's standard side; a module of the same class elsewhere in the model has none."""
        standard = obj.__dict__.get("_standard")
        if standard is None:
            raise Unavailable(
                f"{obj.path} hosts no standard values, so it has no {self.value.name}."
            )
        return standard


class Standard:
    """The standard side of one envoy: its host, its layer, and how its values are read and written."""

    def __init__(
        self,
        model: LanguageModel,
        name: str,
        layer: int | None,
        taps: HostTaps | None,
        missing: dict[str, Unavailability],
        sizes: dict[str, int],
    ) -> None:
        self.model = model
        self.name = name
        self.layer = layer
        self.taps = taps
        self.missing = missing
        self.sizes = sizes

    def expression(self, value: str) -> str:
        """The Python expression that reads a value here."""
        return f"{vocabulary.HOSTS[self.name].path.replace('[i]', f'[{self.layer}]')}.{value}"

    def meant(self, name: str) -> bool:
        """Whether somebody who sets ``name`` here means a value: one of another host, or one misspelt."""
        return name in vocabulary.NAMES or bool(
            difflib.get_close_matches(name, vocabulary.BY_HOST[self.name], n=1, cutoff=0.8)
        )

    def unknown(self, name: str) -> str:
        """What to say to somebody who asked for ``name`` here, where there is nothing of that name."""
        here = self.expression("").rstrip(".")
        if (hosts := vocabulary.of_attribute(name)) and self.layer is not None:
            reason = self.model.anatomy.block(self.layer).hosts[hosts[0]].missing
            return f"{here} has no {name}: {next(iter(reason.values()))}."
        there = [value.host for value in vocabulary.VALUES if value.name == name]
        if there:
            return f"{here} has no {name}; it is a value of {' and '.join(f'{vocabulary.HOSTS[h].path} ({h})' for h in there)}."
        names = [*vocabulary.BY_HOST[self.name], *self.sizes]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        return f"{here} has no {name}" + (
            f"; the nearest names are {', '.join(near)}." if near else "."
        )

    def reach(self, value: vocabulary.Value) -> ValueAddress:
        """How to reach a value, or raise Unavailable with the reason."""
        if self.taps is None or value.name not in self.taps.reach:
            reason = self.missing.get(value.name, NOT_FOUND)
            raise Unavailable(f"{self.expression(value.name)} is unavailable: {reason}.")
        return self.taps.reach[value.name]

    # -- inside a trace -----------------------------------------------------

    def read(self, value: vocabulary.Value) -> Any:
        if value.derived:
            return self._derived(value)
        reach = self.reach(value)
        found = self._visit(value, reach).view(value.name, reach)
        if found is None and not value.optional:
            raise Unavailable(
                f"{self.expression(value.name)} is unavailable: this call does not make it. A call that keeps no cache "
                "leaves no state, and one on embeddings has no ids."
            )
        return found

    def write(self, value: vocabulary.Value, new: Any) -> None:
        if not value.written:
            raise Unavailable(value.unwritten.format(name=self.expression(value.name)))
        reach = self.reach(value)
        visit = self._visit(value, reach)
        now = visit.view(value.name, reach)
        if (
            isinstance(now, torch.Tensor)
            and self.name != "model"
            and getattr(new, "shape", None) != now.shape
        ):
            given = list(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
            raise ValueError(
                f"{self.expression(value.name)} is a tensor {list(now.shape)}; it was given {given}."
            )
        if (
            isinstance(now, torch.Tensor)
            and isinstance(new, torch.Tensor)
            and new.dtype != now.dtype
        ):
            raise ValueError(
                f"{self.expression(value.name)} is of {now.dtype}; it was given {new.dtype}."
            )
        visit.assign(value.name, reach, new)

    def _visit(self, value: vocabulary.Value, reach: ValueAddress) -> Visit:
        mediator = self._mediator(value)
        waiting = mediator.transform
        occurrence = mediator.wanted(reach.location)
        if (
            waiting is not None
            and isinstance(waiting.view, Visit)
            and waiting.location == reach.location
            and waiting.occurrence == occurrence
        ):
            return waiting.view
        raw = self._wait(mediator, reach.location, value, occurrence)
        visit = Visit(raw, reach, self.sizes.get("num_experts"))
        mediator.transform = WriteBack(visit.back, visit, self, reach.location, occurrence)
        return visit

    def _derived(self, value: vocabulary.Value) -> Any:
        if self.name in vocabulary.RECURRENT and not value.fixed:
            if value.name in self.missing:
                raise Unavailable(
                    f"{self.expression(value.name)} is unavailable: {self.missing[value.name]}."
                )
            mediator = self._mediator(value)
            if value.name == "state":
                location = self.taps.state_location
                found = self._wait(mediator, location, value, None)
                if isinstance(found, str):
                    raise Unavailable(self._not_held(value, found))
                return found.clone()
            visit = self._visit(value, self.taps.reach["state_output"])
            replay = replay_of(self.name, visit.raw[REPLAY])
            self._complete(value, replay)
            found = (
                replay.states()
                if value.name == "states"
                else implied(replay, self.expression(value.name))
            )
            return visit.computed(self.expression(value.name), found)
        if value.name in self.missing:
            raise Unavailable(
                f"{self.expression(value.name)} is unavailable: {self.missing[value.name]}."
            )
        reach = self.reach(vocabulary.BY_HOST[self.name][value.source])
        visit = self._visit(value, reach)
        if value.fixed:
            return visit.computed(self.expression(value.name), self.taps.fixed[value.name].clone())
        return visit.computed(
            self.expression(value.name),
            COMPUTED[value.name](visit.view(value.source, reach), self.sizes),
        )

    def _complete(self, value: vocabulary.Value, replay: Replay) -> None:
        """Raise Unavailable where the call was of a kind that does not hold all its recurrence is run again from."""
        if (lacks := replay.lacks(self.missing)) is not None:
            raise Unavailable(self._not_held(value, lacks))

    def _not_held(self, value: vocabulary.Value, name: str) -> str:
        return (
            f"{self.expression(value.name)} is unavailable: a decoding step's kernel does not hold {name} as a tensor of its own; "
            "trace the whole sequence at once."
        )

    def _mediator(self, value: vocabulary.Value) -> Mediator:
        expression = self.expression(value.name)
        try:
            mediator = Mediator.current(expression)
        except ValueError:
            recorded = f"model.record(prompt, [{value.name!r}])"
            if value.name == "state":  # one token's: a recording replays it for a head
                recorded = f"model.record(prompt).state({self.layer}, head, token)"
            raise OutsideTrace(
                f"{expression} is a value of the forward pass: read it inside `with model.trace(prompt):`, "
                f"or take it from `{recorded}`."
            ) from None
        if not self.model.taps.open:
            raise OutsideTrace(
                f"{expression} is served while the whole model runs: read it inside `with model.trace(prompt):`."
            )
        return mediator

    def _wait(
        self, mediator: Mediator, location: str, value: vocabulary.Value, occurrence: int | None
    ) -> Any:
        if occurrence is not None and self._passed(mediator, location):
            raise PassedBy(self._order(mediator, value))
        wanted = mediator.wanted(location)
        try:
            raw = Mediator.value(location)
        except OutOfOrderError:
            # Under tracer.iter the engine only warns when the run ends early; a step that ran
            # and left this value out is an error there too.
            if (
                self.taps is not None
                and value.name in self.taps.host.prompt_only
                and self.model.taps.call.get("seq") == 1
            ):
                raise Unavailable(self._not_held(value, value.name)) from None
            if mediator.iteration == 0 or mediator.occurrence(location) > wanted:
                raise PassedBy(
                    f"{self.expression(value.name)} was never reached: the forward ran without the part it is in, "
                    "which a skipped module, an early stop or a call without a cache leaves out."
                ) from None
            raise
        mediator._standard_last = (self, value.name)
        return raw

    def _passed(self, mediator: Mediator, location: str) -> bool:
        """Whether the step this read belongs to has already gone past the location.

        A step that is not pinned is the one the forward is in; without this check
        the engine would wait for the next step and hand out its tensor instead.
        """
        done = mediator.occurrence(location)
        wanted = mediator.iteration if mediator.iteration is not None else self.model.taps.step
        return done > wanted

    def _order(self, mediator: Mediator, value: vocabulary.Value) -> str:
        expression = self.expression(value.name)
        last: tuple[Standard, str] | None = getattr(mediator, "_standard_last", None)
        text = f"{expression} was asked for after the forward had passed it"
        if last is None:
            text += "."
        else:
            text += f": it had reached {last[0].expression(last[1])}. " + self._before(
                value.name, *last
            )
        return (
            f"{text} Ask for it first, ask in a tracer.invoke() block of its own, "
            "or use model.record, which takes any order."
        )

    def _before(self, value: str, other: Standard, reached: str) -> str:
        """In words, that ``value`` here comes before ``reached`` there."""
        if self.layer is None or self.layer != other.layer:
            where = (
                "The model's inputs and embeddings come"
                if self.layer is None
                else f"Block {self.layer} comes"
            )
            return (
                f"{where} first." if other.layer is None else f"{where} before block {other.layer}."
            )
        both = {
            f"{host.name}.{name}".removeprefix("layers.")
            for host, name in ((self, value), (other, reached))
        }
        names = [name for name in self.model.reading_order(self.layer) if name in both]
        return f"In this block the forward passes {' → '.join(names)}." if len(names) > 1 else ""


def implied(replay: Replay, expression: str) -> torch.Tensor:
    """The implied attention, refused where a state entered the call."""
    if not replay.fresh:
        raise Unavailable(
            f"{expression} is unavailable: this call continues from a cached state, and the implied attention "
            "is that of a fresh prompt. Trace the whole sequence at once."
        )
    return replay.state_attention()


def margin(scores: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
    """Score of the last chosen expert minus that of the first rejected one: [batch seq]."""
    best = scores.topk(sizes["top_k"] + 1, dim=-1).values
    return best[..., -2] - best[..., -1]


#: How values computed from one other value, and the sizes of their host, are computed from it.
COMPUTED = {
    "router_margin": margin,
    "next_token_probs": lambda logits, sizes: logits[:, -1].softmax(-1),
    "input_size": lambda ids, sizes: tuple(ids.shape),
}


class _Named:
    """Standard values and sizes as attributes; sizes are read-only, and a name there is not is answered in words."""

    def __getattr__(self, name: str) -> Any:
        standard = self.__dict__.get("_standard")
        if standard is None:
            return super().__getattr__(name)
        if name in standard.sizes:
            return standard.sizes[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(standard.unknown(name)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        standard = self.__dict__.get("_standard")
        if standard is not None and name in standard.sizes:
            raise AttributeError(f"{name} is a size of the built model and cannot be set.")
        if (
            standard is not None
            and standard.meant(name)
            and name not in self.__dict__
            and not hasattr(type(self), name)
        ):
            raise AttributeError(standard.unknown(name))
        super().__setattr__(name, value)


class HostEnvoy(_Named, Envoy):
    """An envoy with standard values."""


class _Nothing:
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class HostPart(_Named, _Nothing):
    """A host without a module of its own, part of its block's forward: the values and sizes of one, and nothing else.

    ``path`` is the engine's name of the block.
    """

    def __init__(self, path: str, standard: Standard) -> None:
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "_standard", standard)

    def __repr__(self) -> str:
        return f"({self._standard.expression('').rstrip('.')}): part of {self.path}, no module of its own"


class BlocksEnvoy(Envoy):
    """The list of blocks; an index that is not one is refused in words."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and not -len(self) <= key < len(self):
            raise IndexError(f"There is no block {key}: the model has blocks 0 to {len(self) - 1}.")
        return super().__getitem__(key)


def host_class(name: str, base: type = HostEnvoy) -> type:
    """The envoy class of one host: its values as class attributes."""
    members = {value.name: StandardValue(value) for value in vocabulary.BY_HOST[name].values()}
    return type(f"{name.title().replace('_', '')}Envoy", (base,), members)


HOST_CLASSES = {name: host_class(name) for name in vocabulary.HOSTS if name != "model"}
PART_CLASSES = {name: host_class(name, HostPart) for name in HOST_CLASSES}
