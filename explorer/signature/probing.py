"""Probing a model: all sizes at once where that resolves every axis, else each size alone."""

from __future__ import annotations

from collections.abc import Sequence

from explorer.signature.coupling import change_alone
from explorer.signature.joint_probing import JointProbe, grow
from explorer.signature.probes import BATCH, FEWEST_JOINTS, OTHER_BATCHES, OTHER_SEQS, SEQ, Probes
from explorer.signature.resizable import ResizableModel
from explorer.signature.steps import divided, even_multiple, just_above, odd_multiple

#: Probes in which all sizes change, where some axis is a sum.
_JOINTS_FOR_SUMS = 4

#: Probes in which all sizes change, after each was changed alone.
_CHECKS = 3

#: Models that are built at most where sizes change all at once.
_MOST_BUILDS_JOINTLY = 100


def probe(model: ResizableModel) -> Probes:
    """Probe a model; raises whatever its forward raises at its own sizes."""
    probes = Probes(model)
    # Multiples would make a small model with weights a large one.
    if model.with_weights or not _probe_jointly(probes):
        probes.restart()
        _probe_singly(probes)
    return probes


def _probe_jointly(probes: Probes) -> bool:
    """Change all sizes at once, several times; whether every axis resolved and every size changed
    that can."""
    probes.allow(_MOST_BUILDS_JOINTLY)
    failed = JointProbe(probes, [*probes.model.numbers], 0).run()
    refused = bool(failed or probes.dependent)
    probes.fixed += [name for name in failed if not (probes.can_change(name) or probes.move(name))]
    names = [
        name
        for name in probes.model.numbers
        if name not in (*probes.dependent, *probes.fixed)
        and (name not in failed or name in probes.steps or probes.can_change(name))
    ]
    for turn in range(1, FEWEST_JOINTS + refused):
        JointProbe(probes, names, turn).run()
    if len(probes.joints) < FEWEST_JOINTS:
        return False
    unchanged = [name for name in names if len({run[name] for run in probes.runs}) == 1]
    probes.fixed += [name for name in unchanged if not probes.move(name)]
    if probes.unresolved():
        for turn in range(len(probes.joints), _JOINTS_FOR_SUMS):
            JointProbe(probes, names, turn).run()
    return not probes.exhausted and not probes.unresolved()


def _probe_singly(probes: Probes) -> None:
    """Change each size alone, then all at once in the ways that worked."""
    _change_call(probes)
    change_alone(probes, [*probes.model.numbers])
    _check_by_steps(probes)
    _use_even_multiples(probes)


def _change_call(probes: Probes) -> None:
    """Change the batch and the tokens, each alone."""
    for name, calls in (
        ("B", [(batch, SEQ) for batch in OTHER_BATCHES]),
        ("S", [(BATCH, seq) for seq in OTHER_SEQS]),
    ):
        for batch, seq in calls:
            observation = probes.attempt({}, batch, seq)
            if observation is not None:
                probes.singles[name] = [probes.add({}, batch, seq, observation)]
                break


def _check_by_steps(probes: Probes) -> None:
    """Change as many sizes as will at once, each to a number it had in no other probe; once where
    that runs with weights, as it is dear there."""
    for turn in range(1 if probes.model.with_weights else _CHECKS):
        options = _options(probes, [name for name in probes.steps if name in probes.singles], turn)
        batch, seq = OTHER_BATCHES[turn + 1], OTHER_SEQS[turn + 1]
        chosen: dict[str, int] = {}
        grow(probes, chosen, options, [], batch, seq)
        observation = probes.attempt(chosen, batch, seq)
        if observation is not None:
            probes.add(chosen, batch, seq, observation)


def _options(probes: Probes, names: Sequence[str], turn: int) -> dict[str, list[int]]:
    """Numbers to give each size in a joint probe, the likeliest first; equal sizes get different
    ones.

    A size that could be changed in one way only because others limit it keeps to that way, so that
    the probe builds.
    """
    found: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        number, step = probes.model.numbers[name], probes.steps[name]
        taken = {
            values[0] for other, values in found.items() if probes.model.numbers[other] == number
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


def _use_even_multiples(probes: Probes) -> None:
    """Where an axis does not resolve, a division may have left a remainder: multiply what moves it
    by two instead."""
    fitter = probes.fitter()
    suspects = {
        name
        for vector in probes.vectors()
        if fitter.fit(vector) is None
        for name in fitter.moves(vector)
    }
    moved = False
    for name in [*probes.steps]:
        if name not in suspects or probes.steps[name] is not odd_multiple:
            continue
        before = probes.singles.get(name)
        if probes.move(name, (even_multiple, divided)):
            moved = moved or probes.singles.get(name) != before
    if moved:
        kept = [0, *sorted(at for single in probes.singles.values() for at in single)]
        probes.runs = [probes.runs[at] for at in kept]
        probes.observations = [probes.observations[at] for at in kept]
        probes.singles = {
            name: [kept.index(at) for at in single] for name, single in probes.singles.items()
        }
        probes.joints = []
        _check_by_steps(probes)
