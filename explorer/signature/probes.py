"""Probing a family: changing its sizes, all at once where that builds, and noting every tensor's
shape each time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from explorer.signature.expressions import Expr
from explorer.signature.failure import Failure
from explorer.signature.fitting import Fitter
from explorer.signature.joint_fitting import JointFitter, JointRun, rounding_pairs
from explorer.signature.observation import Observation
from explorer.signature.resizable import ResizableModel
from explorer.signature.sizes import table
from explorer.signature.steps import MULTIPLES, Step, divided, even_multiple, steps_of

#: Batch and tokens of the first probe, and the primes that they change to.
BATCH, SEQ = 3, 11
OTHER_BATCHES, OTHER_SEQS = (5, 7, 2, 31), (13, 17, 19, 23)

#: Probes in which all sizes change that have to agree.
FEWEST_JOINTS = 2

#: Models that are built at most.
_MOST_BUILDS = 260


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
        #: What models of other sizes showed, by the sizes that differ, batch and tokens.
        self._looks: dict[tuple, Observation | Failure] = {}
        self._start(model.observe({}, BATCH, SEQ))

    def restart(self) -> None:
        """Forget all probes but the first."""
        self._start(self.observations[0])

    def _start(self, first: Observation) -> None:
        self._fitter: Fitter | None = None
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
        """What finds the expression of an axis from all probes there are."""
        if self._fitter is None:
            self._fitter = self._new_fitter()
        return self._fitter

    def _new_fitter(self) -> Fitter:
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

    def look(
        self, numbers: Mapping[str, int], batch: int = BATCH, seq: int = SEQ
    ) -> Observation | Failure:
        """What is seen with other numbers, and with what follows from them."""
        try:
            numbers = self.with_dependent(numbers)
        except ValueError:
            return Failure()
        key = (frozenset(numbers.items()), batch, seq)
        if key not in self._looks:
            if self.exhausted:
                return Failure()
            self.builds += 1
            self._looks[key] = self._observed(numbers, batch, seq)
        return self._looks[key]

    def _observed(self, numbers: Mapping[str, int], batch: int, seq: int) -> Observation | Failure:
        first, seen = self.observations[0], Observation()
        try:
            self.model.observe(numbers, batch, seq, seen)
        except Exception as error:  # a forward may raise anything
            return Failure.of(error, len(seen))
        same = seen.keys() == first.keys() and all(
            len(one.shape) == len(first[site].shape) and one.dtype == first[site].dtype
            for site, one in seen.items()
        )
        return seen if same else Failure((len(seen),))

    def attempt(
        self, numbers: Mapping[str, int], batch: int = BATCH, seq: int = SEQ
    ) -> Observation | None:
        """The same; None where that does not build or run, or has other tensors."""
        seen = self.look(numbers, batch, seq)
        return None if isinstance(seen, Failure) else seen

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
        self._fitter = None
        self.runs.append(sizes)
        self.observations.append(observation)
        return len(self.runs) - 1

    def changes_shapes(self, observation: Observation) -> bool:
        return any(
            observation[site].shape != own.shape for site, own in self.observations[0].items()
        )

    # -- one size at a time -------------------------------------------------------

    def alone(self, name: str) -> Observation | None:
        """What is seen with twice or half a size; None where it refuses."""
        number = self.model.numbers[name]
        others = {even_multiple(number, 0), divided(number, 0)} - {number}
        seen = (self.attempt({name: other}) for other in sorted(others, reverse=True))
        return next((one for one in seen if one is not None), None)

    def can_change(self, name: str) -> bool:
        """Whether twice or half a size changes any shape."""
        observation = self.alone(name)
        return observation is not None and self.changes_shapes(observation)

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
