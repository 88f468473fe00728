"""Probes in which all sizes change at once, and the sizes that cannot be chosen since others decide
them, found by what a failed one tells."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from explorer.signature.coupling import relations_among
from explorer.signature.failure import Failure
from explorer.signature.joint_fitting import JointRun
from explorer.signature.observation import Observation
from explorer.signature.probes import BATCH, OTHER_BATCHES, OTHER_SEQS, SEQ, Probes
from explorer.signature.steps import MULTIPLES, joint_multiples, just_above, may_divide

#: The least prime of the first joint probe: smaller ones are in many numbers, so that an error
#: would not tell which size is to blame.
_TELLING = 11

#: Relations that are tried for the sizes to blame for one failure.
_MOST_RELATIONS = 16


class JointProbe:
    """One probe in which as many of the sizes ``names`` change as will at once.

    ``dropped`` are the sizes left out; ``turn`` is the number of the probe, by which its numbers
    differ from those of others.
    """

    def __init__(self, probes: Probes, names: Sequence[str], turn: int) -> None:
        self.probes, self.names, self.turn = probes, names, turn
        self.batch, self.seq = OTHER_BATCHES[turn], OTHER_SEQS[turn]
        self.dropped: list[str] = []
        self._least = 2 if turn else _TELLING
        self._choose_numbers()

    def run(self) -> list[str]:
        """Make the probe; returns the sizes that would not change."""
        chosen = self._without_blamed()
        failed: list[str] = []
        rest = {name: values for name, values in self.options.items() if name not in chosen}
        grow(self.probes, chosen, rest, failed, self.batch, self.seq)
        observation = self.probes.attempt(chosen, self.batch, self.seq)
        if observation is not None:
            run = self.probes.add(chosen, self.batch, self.seq, observation)
            kept = {
                name: multiple
                for name, multiple in self.multiples.items()
                if name in ("B", "S")
                or chosen.get(name) == self.probes.model.numbers[name] * multiple.factor
            }
            self.probes.joints.append(JointRun(run, kept))
        return failed

    def _choose_numbers(self) -> None:
        """The numbers to try for each size, the likeliest first, and which multiples they are."""
        probes, own = self.probes, self.probes.model.numbers
        windows = probes.model.window_names
        names = [name for name in self.names if name not in probes.dependent]
        regular = {
            name: own[name]
            for name in names
            if name not in windows and probes.steps.get(name) in (None, *MULTIPLES)
        }
        used = {
            name: [
                joint.multiples[name].prime for joint in probes.joints if name in joint.multiples
            ]
            for name in regular
        }
        calls = {"B": (BATCH, self.batch), "S": (SEQ, self.seq)}
        self.multiples = joint_multiples(regular, calls, _divisors(probes), used, self._least)
        # What the configuration's class works out from others is likeliest not to change with them.
        derived = probes.model.derived - probes.dependent.keys()
        equal = {own[name] for name in derived}
        names.sort(key=lambda name: (name in probes.steps, name in derived, own[name] in equal))
        self.options: dict[str, list[int]] = {}
        for at, name in enumerate(names):
            step = probes.steps.get(name, just_above if name in windows else None)
            values = [int(own[name] * self.multiples[name].factor)] if name in regular else []
            if step is not None:
                values += [step(own[name], self.turn + at), step(own[name], 0)]
            self.options[name] = values

    def _look(self) -> tuple[dict[str, int], Observation | Failure]:
        """The numbers of all sizes that are not dropped, and what they show."""
        chosen = {
            name: values[0] for name, values in self.options.items() if name not in self.dropped
        }
        seen = self.probes.look(chosen, self.batch, self.seq)
        if isinstance(seen, Failure) and seen.too_large and self._least > 2:
            self._least = 2
            self._choose_numbers()
            return self._look()
        return chosen, seen

    def _without_blamed(self) -> dict[str, int]:
        """Numbers that build, without the sizes that are to blame where others do not; where none
        was made before, sizes that others decide are found."""
        while True:
            chosen, seen = self._look()
            if not isinstance(seen, Failure) or not chosen:
                return chosen
            to_blame = seen.blamed(self.multiples)
            blamed = [name for name in chosen if name in to_blame]
            self.dropped += blamed or [*chosen][len(chosen) // 2 :]
            if not self.probes.joints:
                self._relate(blamed, seen)

    def _relate(self, blamed: Sequence[str], failure: Failure) -> None:
        """Find one size to blame that follows from others, so that the probe comes further with
        all that are to blame for this failure."""
        dependent, dropped = self.probes.dependent, self.dropped
        coupled = [
            name for name in self.options if name in dropped and self.probes.alone(name) is None
        ]
        for other, expression in relations_among(self.probes, coupled)[:_MOST_RELATIONS]:
            dependent[other] = expression
            related = {other, *expression.names, *blamed}
            self.dropped = [name for name in dropped if name not in related]
            self._choose_numbers()
            _, seen = self._look()
            if not isinstance(seen, Failure) or seen.progress > failure.progress:
                return
            del dependent[other]
        self.dropped = dropped
        self._choose_numbers()


def grow(
    probes: Probes,
    chosen: dict[str, int],
    options: Mapping[str, list[int]],
    failed: list[str],
    batch: int,
    seq: int,
) -> None:
    """Take as many sizes as build together into ``chosen``, the others into ``failed``.

    options: numbers to try for each size, the likeliest first.
    """
    if not options:
        return
    first = {name: values[0] for name, values in options.items()}
    if probes.attempt({**chosen, **first}, batch, seq) is not None:
        chosen |= first
    elif len(options) == 1:
        ((name, values),) = options.items()
        for value in values[1:]:
            if probes.attempt({**chosen, name: value}, batch, seq) is not None:
                chosen[name] = value
                return
        failed.append(name)
    else:
        names = list(options)
        half = len(names) // 2
        for part in (names[:half], names[half:]):
            grow(probes, chosen, {name: options[name] for name in part}, failed, batch, seq)


def _divisors(probes: Probes) -> set[tuple[str, str]]:
    """Pairs of sizes of which the first may have to divide the second, by their names, or so that a
    size that follows is a whole number and divisible by what may have to divide it."""
    numbers = probes.model.numbers
    pairs = {
        (one, other)
        for one, other in itertools.permutations(numbers, 2)
        if numbers[other] % numbers[one] == 0 and may_divide(one, other, numbers)
    }
    for dependent, expression in probes.dependent.items():
        powers = dict(power for names, _ in expression.terms for power in names)
        below = {name for name, power in powers.items() if power < 0}
        below |= {one for one, other in pairs if other == dependent}
        largest = max(powers.keys() - below, key=numbers.__getitem__, default=None)
        pairs |= {(one, largest) for one in below if largest is not None}
    return pairs
