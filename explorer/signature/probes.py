"""Probing a family: changing its sizes, all at once where that builds, and noting every tensor's shape each time."""

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
    divided,
    even_multiple,
    joint_multiples,
    just_above,
    may_divide,
    odd_multiple,
    steps_of,
)

#: Batch and tokens of the first probe, and the primes that they change to.
BATCH, SEQ = 3, 11
OTHER_BATCHES, OTHER_SEQS = (5, 7, 2, 31), (13, 17, 19, 23)

#: Probes in which all sizes change: so many for products, so many more where some axis is a sum.
_JOINT, _JOINT_FOR_SUMS = 2, 4

#: Models that are built at most: where sizes change all at once, where each changes alone, and for one joint probe.
_MOST_BUILDS_JOINTLY, _MOST_BUILDS, _MOST_BUILDS_OF_A_JOINT = 100, 260, 30


class Probes:
    """The probes of one model and what they showed.

    ``runs`` are the sizes of each probe and ``observations`` its shapes, the first of them with the model's own sizes and narrow
    windows. ``joints`` are the probes in which most sizes changed; ``singles`` are, by name, the probes in which that size alone
    changed, where that was needed. ``dependent`` are sizes that cannot be chosen since others decide them. ``fixed`` are sizes
    that could not be changed. Sizes change to multiples of what they are where that builds, so rounding to a multiple shows
    only where it rounds one of these.
    """

    def __init__(self, model: ResizableModel) -> None:
        self.model = model
        self.builds = 0
        self._builds_of_joint = 0
        self._start(self.observed({}, BATCH, SEQ))
        # Multiples would make a small model with weights a large one.
        if model.with_weights or not self._probe_jointly():
            self._start(self.observations[0])
            self._probe_singly()

    def _start(self, first: Observation) -> None:
        """Forget all probes but the first."""
        self.dependent: dict[str, Expr] = {}
        self.fixed: list[str] = []
        self.runs: list[dict[str, int]] = []
        self.observations: list[Observation] = []
        self.joints: list[JointRun] = []
        self.singles: dict[str, list[int]] = {}
        #: How each size was changed that was changed alone.
        self.steps: dict[str, Step] = {}
        #: Sizes of which multiples do not build and a number close by changes nothing: a share of it may be rounded.
        self.perhaps_rounded: list[str] = []
        self._add({}, BATCH, SEQ, first)
        self._most_builds = self.builds + _MOST_BUILDS

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
        if len(self.joints) >= _JOINT:
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

    def _probe_jointly(self) -> bool:
        """Change all sizes at once, several times; whether every axis resolved and every size changed that can."""
        self._most_builds = self.builds + _MOST_BUILDS_JOINTLY
        names = [*self.model.numbers]
        failed = self._joint(names, 0)
        refused = bool(failed)
        if refused:
            failed = self._without_coupled(failed)
            self._change_alone(failed)
            names = [name for name in names if name not in failed or name in self.steps]
        for turn in range(1, _JOINT + refused):
            self._joint(self._movable(names), turn)
        self._change_alone(self._unchanged(self._movable(names)))
        if len(self.joints) < _JOINT:
            return False
        if self._unresolved():
            for turn in range(len(self.joints), _JOINT_FOR_SUMS):
                self._joint(self._movable(names), turn)
        return self.builds < self._most_builds and not self._unresolved()

    def _probe_singly(self) -> None:
        """Change each size alone, then all at once in the ways that worked."""
        self._change_call()
        self._change_alone([*self.model.numbers])
        for turn in range(3):
            self._joint_by_steps(turn)
        self._use_even_multiples()

    def _unresolved(self) -> set[tuple[int, ...]]:
        fitted = self.fitter().fit_all(self.vectors())
        return {vector for vector, expression in fitted.items() if expression is None}

    def _movable(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.dependent and name not in self.fixed]

    def _unchanged(self, names: Sequence[str]) -> list[str]:
        """Those sizes that no probe changed."""
        return [name for name in names if len({run[name] for run in self.runs}) == 1]

    def observed(self, numbers: Mapping[str, int], batch: int, seq: int) -> Observation:
        self.builds += 1
        return self.model.observe(numbers, batch, seq)

    def attempt(
        self, numbers: Mapping[str, int], batch: int = BATCH, seq: int = SEQ
    ) -> Observation | None:
        """What is seen with other numbers; None where that does not build or run, or has other tensors."""
        if self.builds >= self._most_builds:
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

    def _add(
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

    def _joint(self, names: Sequence[str], turn: int) -> list[str]:
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
        chosen: dict[str, int] = {}
        failed: list[str] = []
        self._builds_of_joint = self.builds + _MOST_BUILDS_OF_A_JOINT
        observation = self._grow(
            chosen, {name: options[name] for name in ordered}, failed, batch, seq
        )
        if observation is not None:
            run = self._add(chosen, batch, seq, observation)
            kept = {
                name: multiple
                for name, multiple in multiples.items()
                if name in calls or chosen.get(name) == own[name] * multiple.factor
            }
            self.joints.append(JointRun(run, kept))
        return failed

    def _divisors(self) -> list[tuple[str, str]]:
        """Pairs of sizes of which the first has to divide the second, so that a size that follows is a whole number."""
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
        """Take as many sizes as build together into ``chosen``, the others into ``failed``; what the last that built showed."""
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

    # -- one size at a time -----------------------------------------------------------

    def _change_call(self) -> None:
        """Change the batch and the tokens, each alone."""
        for name, calls in (
            ("B", [(batch, SEQ) for batch in OTHER_BATCHES]),
            ("S", [(BATCH, seq) for seq in OTHER_SEQS]),
        ):
            for batch, seq in calls:
                observation = self.attempt({}, batch, seq)
                if observation is not None:
                    self.singles[name] = [self._add({}, batch, seq, observation)]
                    break

    def _without_coupled(self, failed: list[str]) -> list[str]:
        """Find sizes that follow from others among those that refuse to change with all others; what is left to change alone."""
        from explorer.signature.coupling import can_change, find_dependent

        # Some refused only because a size that has to be their multiple did.
        failed = [name for name in failed if not can_change(self, name)]
        while len(failed) > 1:
            left = find_dependent(self, failed, among=True)
            if len(left) == len(failed):
                break
            failed = left
        return failed

    def _change_alone(self, names: Sequence[str]) -> None:
        """Change each size alone, or with sizes found to depend on it."""
        from explorer.signature.coupling import find_dependent

        failed = [name for name in names if not self.move(name)]
        # Such a size may have to move together with one that does not move at all.
        rounded = self.perhaps_rounded if failed else []
        failed += rounded
        while set(failed) - set(rounded):
            left = find_dependent(self, failed)
            if len(left) == len(failed):
                break
            failed = left
        self.fixed += [name for name in failed if name not in (*self.dependent, *rounded)]
        for name in self.dependent:
            self.singles.pop(name, None)
            self.steps.pop(name, None)

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
                    self.singles[name] = [self._add({name: value}, BATCH, SEQ, observation)]
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

    # -- all at once, by the steps that worked alone ------------------------------------

    def _joint_by_steps(self, turn: int) -> None:
        """Change as many sizes as will at once, each to a number it had in no other probe."""
        options = self._options([name for name in self.steps if name in self.singles], turn)
        batch, seq = OTHER_BATCHES[turn + 1], OTHER_SEQS[turn + 1]
        chosen: dict[str, int] = {}
        self._builds_of_joint = self.builds + _MOST_BUILDS_OF_A_JOINT
        observation = self._grow(chosen, options, [], batch, seq)
        if observation is not None:
            self._add(chosen, batch, seq, observation)

    def _options(self, names: Sequence[str], turn: int) -> dict[str, list[int]]:
        """Numbers to give each size in a joint probe, the likeliest first; equal sizes get different ones.

        A size that could be changed in one way only because others limit it keeps to that way, so that the probe builds.
        """
        found: dict[str, list[int]] = {}
        for at, name in enumerate(names):
            number, step = self.model.numbers[name], self.steps[name]
            taken = {
                values[0] for other, values in found.items() if self.model.numbers[other] == number
            }
            values = [step(number, turn)]
            if step is odd_multiple:
                values = [
                    value
                    for i in range(6)
                    if (value := odd_multiple(number, turn + 1 + at + i)) not in taken
                ][:1]
            others = () if step is just_above else (divided(number, 0), even_multiple(number, 0))
            found[name] = [
                value
                for value in dict.fromkeys([*values, step(number, 0), *others])
                if value > 0 and value != number
            ]
        return {name: values for name, values in found.items() if values}

    def _use_even_multiples(self) -> None:
        """Where an axis does not resolve, a division may have left a remainder: multiply what moves it by two instead."""
        fitter = self.fitter()
        suspects = {
            name
            for vector in self.vectors()
            if fitter.fit(vector) is None
            for name in fitter.moves(vector)
        }
        moved = False
        for name in [*self.steps]:
            if name not in suspects or self.steps[name] is not odd_multiple:
                continue
            before = self.singles.get(name)
            if self.move(name, (even_multiple, divided)):
                moved = moved or self.singles.get(name) != before
        if moved:
            kept = [0, *sorted(at for single in self.singles.values() for at in single)]
            self.runs = [self.runs[at] for at in kept]
            self.observations = [self.observations[at] for at in kept]
            self.singles = {
                name: [kept.index(at) for at in single] for name, single in self.singles.items()
            }
            self.joints = []
            for turn in range(3):
                self._joint_by_steps(turn)
