"""Running the contract's invariants on mutants: which invariant notices which mutant."""

from __future__ import annotations

import copy
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from explorer import vocabulary
from explorer.contract.checks import INVARIANTS
from explorer.contract.checks.residual import sublayer_inputs
from explorer.contract.comparisons import Comparisons, difference
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.mutants import Mutant, mutants_of
from explorer.contract.registry import Invariant
from explorer.discovery.hook_point import get_element, read_value
from explorer.engine.tapped_forwards import CallTaps, TappedForwards
from explorer.model.derived import DERIVATIONS, replayed_value
from explorer.model.prompts import model_inputs
from explorer.vocabulary import MIXERS

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel
    from explorer.model.recording import Recording

#: A mutant that differs by less, relative to the value's largest number, has the same numbers.
SAME = 1e-6


class _RunsTheModel(BaseException):
    """An invariant is about to run the model with its own hook points, which are no mutant's."""


@dataclass
class Outcome:
    """What became of a mutant.

    caught_by: the invariant that failed first, None where every one held. checked: the invariants
    that compared its value up to there. error: how far its numbers are from the value's, relative
    to the value's largest; None where it has another shape or type.
    """

    mutant: Mutant
    caught_by: str | None
    checked: tuple[str, ...]
    error: float | None


@dataclass
class MutationReport:
    """What became of the mutants of one model.

    unreached: how many are where the forward on real numbers does not pass. same: how many had the
    value's own numbers. repeated: how many had those of an earlier mutant of the value. All three
    are left out of ``outcomes``.
    """

    unreached: int = 0
    same: int = 0
    repeated: int = 0
    outcomes: list[Outcome] = field(default_factory=list[Outcome])

    @property
    def survivors(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.caught_by is None]

    @property
    def caught(self) -> int:
        return len(self.outcomes) - len(self.survivors)

    @property
    def share(self) -> float:
        """The share of mutants caught; 1 where there is none."""
        return self.caught / len(self.outcomes) if self.outcomes else 1.0

    def by_value(self) -> dict[str, tuple[int, int]]:
        """Return mutants and mutants caught, by value."""
        made = Counter(one.mutant.key for one in self.outcomes)
        left = Counter(one.mutant.key for one in self.survivors)
        return {name: (made[name], made[name] - left[name]) for name in sorted(made)}

    def by_invariant(self) -> dict[str, tuple[int, int]]:
        """Return by invariant how many mutants it looked at, and how many of them it caught.

        A mutant that one invariant caught is not shown to the next.
        """
        looked = Counter(name for one in self.outcomes for name in one.checked)
        caught = Counter(one.caught_by for one in self.outcomes if one.caught_by)
        return {name: (looked[name], caught[name]) for name in sorted(looked)}

    def to_json(self) -> dict[str, Any]:
        return {
            "made": self.unreached + self.same + self.repeated + len(self.outcomes),
            "unreached": self.unreached,
            "same": self.same,
            "repeated": self.repeated,
            "caught": self.caught,
            "left": len(self.survivors),
            "values": self.by_value(),
            "invariants": self.by_invariant(),
            "survivors": [
                {
                    "value": one.mutant.key,
                    "block": one.mutant.layer,
                    "read_from": one.mutant.description,
                    "error": one.error,
                    "held": list(one.checked),
                }
                for one in self.survivors
            ],
        }


def mutate(model: LanguageModel, prompt: str | None = None) -> MutationReport:
    """Make the mutants of every value a model serves, and run on each the invariants that compare
    that value with something, until one fails.

    An invariant is asked for what it compares of one run without edits: what it does after running
    the model again, with the value's real hook point, is left out.
    """
    subject = ModelUnderTest(model, prompt)
    mutants = mutants_of(model)
    captured = _captured(subject, mutants)
    invariants = _by_value(subject)
    report = MutationReport()
    met: dict[tuple[str, str, int | None], list[torch.Tensor]] = defaultdict(list)
    for mutant, native in zip(mutants, captured, strict=True):
        original = subject.recorded((mutant.value, mutant.layer))
        if native is None or not isinstance(original, torch.Tensor):
            report.unreached += 1
            continue
        outcome = Outcome(mutant, None, (), None)
        try:
            tensor = _read(subject, mutant, native)
        except (RuntimeError, IndexError, ZeroDivisionError, ValueError):
            tensor = None  # it cannot be read in the value's axes
        if tensor is not None:
            if tensor.shape == original.shape:
                outcome.error = difference(tensor, original)
                if outcome.error <= SAME:
                    report.same += 1
                    continue
            earlier = met[mutant.host, mutant.name, mutant.layer]
            if any(torch.equal(one, tensor) for one in earlier if one.shape == tensor.shape):
                report.repeated += 1
                continue
            earlier.append(tensor)
        report.outcomes.append(_outcome(subject, outcome, tensor, invariants))
    return report


# -- what the mutants read --------------------------------------------------------------


def _captured(subject: ModelUnderTest, mutants: list[Mutant]) -> list[torch.Tensor | None]:
    """Run the model once and return the native tensor of each mutant, as it was when it passed."""
    found: list[torch.Tensor | None] = [None] * len(mutants)
    sites: dict[tuple, list[int]] = defaultdict(list)
    for index, mutant in enumerate(mutants):
        if mutant.point is not None:
            sites[mutant.point.call_site].append(index)
        else:
            module, _, leaf = mutant.constant.rpartition(".")
            constant = getattr(subject.hf.get_submodule(module), leaf).detach().float()
            found[index] = mutant.sign * constant.flatten()

    def note(indices: list[int], container: Any) -> None:
        for index in indices:
            point = mutants[index].point
            assert point is not None
            tensor = get_element(container, point)
            if found[index] is None and isinstance(tensor, torch.Tensor):
                found[index] = tensor.detach().clone()

    forwards = TappedForwards(lambda: True, False)
    calls: dict[str, CallTaps] = defaultdict(CallTaps)
    with ExitStack() as undo:
        for (path, operation, side), indices in sites.items():
            if operation:
                call = calls[path]
                for label in operation:
                    call = call.calls.setdefault(label, CallTaps())
                taps = call.before if side == "input" else call.after
                taps.append(lambda container, indices=indices: note(indices, container))
                continue
            module = subject.hf.get_submodule(path)
            if side == "input":
                hook = module.register_forward_pre_hook(
                    lambda _, args, kwargs, indices=indices: note(indices, (args, kwargs)),
                    with_kwargs=True,
                )
            else:
                hook = module.register_forward_hook(
                    lambda _, args, out, indices=indices: note(indices, out)
                )
            undo.callback(hook.remove)
        for path, of_module in calls.items():
            forwards.divert(subject.hf.get_submodule(path), of_module, undo)
        recurrent = any(
            host in vocabulary.RECURRENT for row in subject.model.mixers for host in row
        )
        options: dict[str, Any] = {"use_cache": True} if recurrent else {}
        subject.native.forward(**model_inputs(subject.model, subject.ids), **options)
    return found


def _read(subject: ModelUnderTest, mutant: Mutant, native: torch.Tensor) -> torch.Tensor:
    """Return a mutant's tensor with the axes of its value."""
    if mutant.point is None:
        return native
    host = subject.model.top if mutant.layer is None else subject.host(mutant.host, mutant.layer)
    lengths = {"batch": subject.batch, "seq": subject.seq, "query": subject.seq, "key": subject.seq}
    selection, indices = mutant.point.selection, None
    if selection is not None and selection.indices:
        by = vocabulary.BY_HOST[mutant.host][selection.indices]
        indices = subject.recorded((by, mutant.layer))
    axes = mutant.value.axes
    return read_value(native, mutant.point, axes, {**host.sizes, **lengths}, indices).clone()


# -- running invariants -------------------------------------------------------------------


@contextmanager
def _not_run(model: LanguageModel) -> Iterator[None]:
    """Stop whoever would run the model with its hook points open."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _RunsTheModel

    taps: Any = model.taps
    taps.opened = stop
    try:
        yield
    finally:
        del taps.opened


def _by_value(
    subject: ModelUnderTest,
) -> dict[vocabulary.Value, list[tuple[float, Invariant, str]]]:
    """Return the invariants that compare each value with something, and their hosts, the quickest
    first.
    """
    # What is recorded, and what nnsight sees without hook points, is had while models may run.
    _ = subject.clean, subject.native.logits, sublayer_inputs(subject)
    found: dict[vocabulary.Value, list[tuple[float, Invariant, str]]] = defaultdict(list)
    for invariant in INVARIANTS:
        for host in filter(subject.has, invariant.hosts):
            if invariant.reason_against(subject, host) is not None:
                continue
            start = time.perf_counter()
            compare = _compared(subject, invariant, host)
            seconds = time.perf_counter() - start
            if compare.failures:
                raise ValueError(f"{invariant.name} fails without a mutant: {compare.detail}")
            for value in compare.values:
                found[value].append((seconds, invariant, host))
    for listed in found.values():
        listed.sort(key=lambda one: one[0])
    return found


def _compared(subject: ModelUnderTest, invariant: Invariant, host: str) -> Comparisons:
    """Run an invariant up to where it would run the model again, and return its comparisons."""
    compare = Comparisons(invariant.float32)
    subject.values_read = compare.current
    with _not_run(subject.model), suppress(_RunsTheModel):
        invariant.run(subject, host, compare)
    return compare


def _outcome(
    subject: ModelUnderTest,
    outcome: Outcome,
    tensor: torch.Tensor | None,
    invariants: dict[vocabulary.Value, list[tuple[float, Invariant, str]]],
) -> Outcome:
    """Show a mutant to the invariants that compare its value, until one fails."""
    mutant = outcome.mutant
    if tensor is None:
        return replace(outcome, caught_by="values read", checked=("values read",))
    try:
        clean, changed = _with(subject, mutant, tensor)
    except (RuntimeError, IndexError, ValueError):  # what is computed from the value raises
        return replace(outcome, caught_by="values read", checked=("values read",))
    mutated = copy.copy(subject)
    mutated.__dict__["clean"] = clean
    tried: dict[tuple[str, str], float] = {}
    for value in changed:
        for seconds, invariant, host in invariants[value]:
            tried[invariant.name, host] = seconds
    by_name = {one.name: one for one in INVARIANTS}
    checked: list[str] = []
    for name, host in sorted(tried, key=lambda key: tried[key]):
        checked.append(name)
        try:
            failed = bool(_compared(mutated, by_name[name], host).failures)
        except Exception:  # an invariant that cannot be checked does not hold
            failed = True
        if failed:
            return replace(outcome, caught_by=name, checked=tuple(checked))
    return replace(outcome, checked=tuple(checked))


def _with(
    subject: ModelUnderTest, mutant: Mutant, tensor: torch.Tensor
) -> tuple[Recording, list[vocabulary.Value]]:
    """Return the clean recording with a mutant in it, and the values that differ by it.

    What is computed from the value is computed from the mutant.
    """
    clean, layer = subject.clean, mutant.layer
    recording = replace(clean, values=dict(clean.values), shared=set(clean.shared))
    changed = [mutant.value]

    def put(value: vocabulary.Value, new: Any) -> None:
        name = value.name if value.host == "model" else f"{value.host}.{value.name}"
        key = clean.key(name, layer)
        recording.values[key] = new
        recording.shared.discard(key)

    put(mutant.value, tensor)
    replayed = MIXERS[mutant.host].replayed if mutant.host in MIXERS else ()
    sizes = (subject.model.top if layer is None else subject.host(mutant.host, layer)).sizes
    for value in _derived(subject, mutant.host, layer):
        if value.name in DERIVATIONS and value.source == mutant.name:
            put(value, DERIVATIONS[value.name](tensor, sizes))
        elif value.name in ("states", "state_attention") and mutant.name in replayed:
            assert layer is not None
            put(value, replayed_value(value.name, recording.replay(layer), value.name))
        else:
            continue
        changed.append(value)
    return recording, changed


def _derived(subject: ModelUnderTest, host: str, layer: int | None) -> list[vocabulary.Value]:
    """Return the values of a host that are computed from others."""
    return [
        row.value
        for row in subject.support
        if row.host == host
        and row.value.derived
        and row.available
        and (layer is None or layer in row.layers)
    ]
