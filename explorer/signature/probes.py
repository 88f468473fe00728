"""Probing a family: changing its sizes, all at once where that builds, and noting every tensor's
shape each time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from explorer.signature.expressions import Expr
from explorer.signature.fitting import Fitter
from explorer.signature.joint_fitting import JointFitter, JointRun, rounding_pairs
from explorer.signature.observation import Observation
from explorer.signature.resizable import ResizableModel
from explorer.signature.sizes import table
from explorer.signature.steps import (
    MULTIPLES,
    Step,
    joint_multiples,
    just_above,
    may_divide,
    steps_of,
)

#: Batch and tokens of the first probe, and the primes that they change to.
BATCH, SEQ = 3, 11
OTHER_BATCHES, OTHER_SEQS = (5, 7, 2, 31), (13, 17, 19, 23)

#: Probes in which all sizes change that have to agree.
FEWEST_JOINTS = 2

#: Models that are built at most, and for one probe in which all sizes change.
_MOST_BUILDS, _MOST_BUILDS_OF_A_JOINT = 260, 30


class Probes:
    """The probes of one model and what they showed.

    ``runs`` are the sizes of each probe and ``observations`` its shapes, the first of them with the
    model's own sizes and narrow windows. ``joints`` are the probes in which most sizes changed;
    ``singles`` are, by name, the probes in which that size alone changed, where that was needed.
    ``dependent`` are sizes that cannot be chosen since others decide them. ``fixed`` are sizes that
    could not be changed. Sizes change to multiples of what they are where that builds, so rounding
    to a multiple shows only where it rounds one of these.
    """

    def __init__(self, model: ResizableModel) -> None:
        self.model = model
        self.builds = 0
        self._builds_of_joint = 0
        self._start(self.observed({}, BATCH, SEQ))

    def restart(self) -> None:
        """Forget all probes but the first."""
        self._start(self.observations[0])

    def _start(self, first: Observation) -> None:
        self.dependent: dict[str, Expr] = {}
        self.fixed: list[str] = []
        self.runs: list[dict[str, int]] = []
        self.observations: list[Observation] = []
        self.joints: list[JointRun] = []
        self.singles: dict[str, list[int]] = {}
        #: How each size was changed that was changed alone.
        self.steps: dict[str, Step] = {}
        #: Sizes of which multiples do not build and a number close by changes nothing: a share of
        #: it may be rounded.
        self.perhaps_rounded: list[str] = []
        self.add({}, BATCH, SEQ, first)
        self.allow(_MOST_BUILDS)

    def allow(self, builds: int) -> None:
        """Build no more than so many models from here on."""
        self._most_builds = self.builds + builds

    @property
    def exhausted(self) -> bool:
        """Whether no more models may be built."""
        return self.builds >= self._most_builds

    # -- what was found ---------------------------------------------------------

    def vectors(self) -> set[tuple[int, ...]]:
        """The numbers of every axis, one in each probe."""
        return {
            tuple(observation[site].shape[axis] for observation in self.observations)
            for site, own in self.observations[0].items()
            for axis in range(len(own.shape))
        }

    def fitter(self) -> Fitter:
        joint = None
        if len(self.joints) >= FEWEST_JOINTS:
            irregular = [
                name
                for name in self.model.numbers
                if name not in self.dependent
                and any(
                    self.runs[joint.run][name] != self.model.numbers[name]
                    and name not in joint.multiples
                    for joint in self.joints
                )
            ]
            joint = JointFitter(self.runs, self.joints, self.dependent, irregular)
        free = [name for name in self.model.numbers if name not in self.dependent]
        roundings = rounding_pairs(free, self.model.keys)
        return Fitter(self.runs, self.singles, self.dependent, joint, roundings)

    def numbers_of(self, run: int) -> dict[str, int]:
        """The sizes in which a probe differs from the first."""
        numbers = self.model.numbers
        return {
            name: number
            for name, number in self.runs[run].items()
            if numbers.get(name, number) != number
        }

    # -- running ------------------------------------------------------------------

    def unresolved(self) -> set[tuple[int, ...]]:
        fitted = self.fitter().fit_all(self.vectors())
        return {vector for vector, expression in fitted.items() if expression is None}

    def observed(self, numbers: Mapping[str, int], batch: int, seq: int) -> Observation:
        self.builds += 1
        return self.model.observe(numbers, batch, seq)

    def attempt(
        self, numbers: Mapping[str, int], batch: int = BATCH, seq: int = SEQ
    ) -> Observation | None:
        """What is seen with other numbers; None where that does not build or run, or has other
        tensors."""
        if self.exhausted:
            return None
        try:
            observation = self.observed(self.with_dependent(numbers), batch, seq)
        except Exception:
            return None
        first = self.observations[0]
        if observation.keys() != first.keys():
            return None
        same = all(
            len(one.shape) == len(first[site].shape) and one.dtype == first[site].dtype
            for site, one in observation.items()
        )
        return observation if same else None

    def with_dependent(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """The numbers with what follows from them; ValueError where that is no whole number."""
        sizes = {**self.model.numbers, **numbers}
        for _ in range(len(self.dependent)):
            for name, expression in self.dependent.items():
                value = expression.value(sizes)
                if value.denominator != 1 or value < 1:
                    raise ValueError(f"{name} would be {value}")
                sizes[name] = int(value)
        return {name: value for name, value in sizes.items() if value != self.model.numbers[name]}

    def add(
        self, numbers: Mapping[str, int], batch: int, seq: int, observation: Observation
    ) -> int:
        sizes = {**self.model.numbers, **self.with_dependent(numbers), "B": batch, "S": seq}
        self.runs.append(sizes)
        self.observations.append(observation)
        return len(self.runs) - 1

    def changes_shapes(self, observation: Observation) -> bool:
        return any(
            observation[site].shape != own.shape for site, own in self.observations[0].items()
        )

    # -- all at once ----------------------------------------------------------------

    def change_jointly(self, names: Sequence[str], turn: int) -> list[str]:
        """Change as many sizes as will at once; returns those that would not."""
        own = self.model.numbers
        batch, seq = OTHER_BATCHES[turn], OTHER_SEQS[turn]
        regular = {
            name: own[name]
            for name in names
            if name not in self.model.window_names and self.steps.get(name) in (None, *MULTIPLES)
        }
        calls = {"B": (BATCH, batch), "S": (SEQ, seq)}
        used = {
            name: [joint.multiples[name].prime for joint in self.joints if name in joint.multiples]
            for name in regular
        }
        multiples = joint_multiples(regular, turn, calls, self._divisors(), used)
        options: dict[str, list[int]] = {}
        for at, name in enumerate(names):
            step = self.steps.get(name, just_above if name in self.model.window_names else None)
            options[name] = [int(own[name] * multiples[name].factor)] if name in regular else []
            if step is not None:
                options[name] += [step(own[name], turn + at), step(own[name], 0)]
        # What the configuration's class works out from others is likeliest not to change with them.
        derived = self.model.derived - self.dependent.keys()
        equal = {own[name] for name in derived}
        ordered = sorted(
            options, key=lambda name: (name in self.steps, name in derived, own[name] in equal)
        )
        ordered_options = {name: options[name] for name in ordered}
        chosen, failed, observation = self.change_together(ordered_options, batch, seq)
        if observation is not None:
            run = self.add(chosen, batch, seq, observation)
            kept = {
                name: multiple
                for name, multiple in multiples.items()
                if name in calls or chosen.get(name) == own[name] * multiple.factor
            }
            self.joints.append(JointRun(run, kept))
        return failed

    def change_together(
        self, options: Mapping[str, list[int]], batch: int, seq: int
    ) -> tuple[dict[str, int], list[str], Observation | None]:
        """Change as many sizes as build together; the numbers taken, the sizes that refused, and
        what the last that built showed.

        options: numbers to try for each size, the likeliest first.
        """
        chosen: dict[str, int] = {}
        failed: list[str] = []
        self._builds_of_joint = self.builds + _MOST_BUILDS_OF_A_JOINT
        observation = self._grow(chosen, dict(options), failed, batch, seq)
        return chosen, failed, observation

    def _divisors(self) -> list[tuple[str, str]]:
        """Pairs of sizes of which the first has to divide the second, so that a size that follows
        is a whole number."""
        found: list[tuple[str, str]] = []
        for dependent, expression in self.dependent.items():
            names = {name: power for powers, _ in expression.terms for name, power in powers}
            below = [name for name, power in names.items() if power < 0]
            if below:
                below += [
                    name
                    for name in self.model.numbers
                    if may_divide(name, dependent, self.model.numbers)
                ]
            found += [(one, name) for one in below for name, power in names.items() if power > 0]
        return found

    def _grow(
        self,
        chosen: dict[str, int],
        options: dict[str, list[int]],
        failed: list[str],
        batch: int,
        seq: int,
    ) -> Observation | None:
        """Take as many sizes as build together into ``chosen``, the others into ``failed``; what
        the last that built showed."""
        if self.builds >= self._builds_of_joint:
            failed += options
            return None
        first = {name: values[0] for name, values in options.items()}
        observation = self.attempt({**chosen, **first}, batch, seq)
        if observation is not None:
            chosen |= first
            return observation
        if len(options) == 1:
            ((name, values),) = options.items()
            for value in values[1:]:
                observation = self.attempt({**chosen, name: value}, batch, seq)
                if observation is not None:
                    chosen[name] = value
                    return observation
            failed.append(name)
            return None
        names = list(options)
        half = len(names) // 2
        parts = [{name: options[name] for name in part} for part in (names[:half], names[half:])]
        first_part, second_part = (self._grow(chosen, part, failed, batch, seq) for part in parts)
        return second_part or first_part

    # -- one size at a time

    def move(self, name: str, steps: Sequence[Step] = ()) -> bool:
        """Change one size alone, or with what is known to follow; whether that could be done."""
        refused = unchanged = False
        number = self.model.numbers[name]
        for step in steps or steps_of(self.model.keys[name], table()["windows"]):
            value = step(number, 0)
            if value == number or value < 1:
                continue
            observation = self.attempt({name: value})
            if observation is not None:
                if self.changes_shapes(observation):
                    self.singles[name] = [self.add({name: value}, BATCH, SEQ, observation)]
                    self.steps[name] = step
                    return True
                unchanged = True
                if refused and step not in MULTIPLES:
                    self.perhaps_rounded.append(name)
                # What another number rounds up to may be the same where a size is rounded.
                if not re.search(table()["roundings"], self.model.keys[name][-1]):
                    return True
            refused = refused or (observation is None and step in MULTIPLES)
        return unchanged
