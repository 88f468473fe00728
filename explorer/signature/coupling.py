"""Sizes that cannot be chosen since others decide them, found by trying what their numbers
suggest."""

from __future__ import annotations

from collections.abc import Sequence

from explorer.signature.expressions import Expr
from explorer.signature.probes import Probes
from explorer.signature.sizes import relations
from explorer.signature.steps import STEPS

#: Relations between numbers that are tried for each size that does not change alone.
_MOST_RELATIONS = 16


def find_dependent(probes: Probes, failed: Sequence[str], among: bool = False) -> list[str]:
    """Find one size that follows from others, so that most of ``failed`` can change that could not;
    what is left of them.

    among: take none but one that follows from others of ``failed``.
    """
    best: tuple[int, str, Expr] | None = None
    hints = [(name, *hint) for name in failed for hint in _hints(probes, name, failed)]

    def outside(hint: tuple[str, str, Expr]) -> int:
        return len({hint[1], *hint[2].names} - set(failed))

    # What relates sizes that all refuse to change alone is likeliest to be why they do.
    derived = probes.model.derived
    hints.sort(key=lambda hint: (outside(hint), hint[1] not in derived, len(hint[2].names)))
    nearest = None
    for hint in hints[: 2 * _MOST_RELATIONS]:
        name, other, expression = hint
        dependent = probes.dependent
        if other in dependent or other in probes.singles or expression.names & dependent.keys():
            continue
        if nearest is not None and outside(hint) > nearest:
            break
        if among and outside(hint):
            break
        probes.dependent[other] = expression
        if can_change(probes, name):
            others = [one for one in failed if one not in (name, other)]
            freed = 1 + sum(can_change(probes, one) for one in others)
            if best is None or freed > best[0]:
                best, nearest = (freed, other, expression), outside(hint)
        del probes.dependent[other]
        if best is not None and (
            best[0] >= len(failed) - 1 or (among and best[2] == Expr.name(name))
        ):
            break
    if best is None:
        return list(failed)
    probes.dependent[best[1]] = best[2]
    if among:
        return [name for name in failed if name != best[1] and not can_change(probes, name)]
    return [name for name in failed if name != best[1] and not probes.move(name)]


def _hints(probes: Probes, name: str, failed: Sequence[str]) -> list[tuple[str, Expr]]:
    """Relations to try for one size: the likeliest, and those that are between sizes that do not
    change alone."""
    found = relations(probes.model.numbers, name, probes.model.derived)
    return [
        *found[:_MOST_RELATIONS],
        *(one for one in found[_MOST_RELATIONS:] if {one[0], *one[1].names} <= set(failed)),
    ]


def can_change(probes: Probes, name: str) -> bool:
    """Whether a size can be changed now to something that another model is built of."""
    for step in STEPS[:3]:
        observation = probes.attempt({name: step(probes.model.numbers[name], 0)})
        if observation is not None:
            return probes.changes_shapes(observation)
    return False


def without_coupled(probes: Probes, failed: list[str]) -> list[str]:
    """Find sizes that follow from others among those that refuse to change with all others; what is
    left to change alone."""
    # Some refused only because a size that has to be their multiple did.
    failed = [name for name in failed if not can_change(probes, name)]
    while len(failed) > 1:
        left = find_dependent(probes, failed, among=True)
        if len(left) == len(failed):
            break
        failed = left
    return failed


def change_alone(probes: Probes, names: Sequence[str]) -> None:
    """Change each size alone, or with sizes found to depend on it."""
    failed = [name for name in names if not probes.move(name)]
    # Such a size may have to move together with one that does not move at all.
    rounded = probes.perhaps_rounded if failed else []
    failed += rounded
    while set(failed) - set(rounded):
        left = find_dependent(probes, failed)
        if len(left) == len(failed):
            break
        failed = left
    probes.fixed += [name for name in failed if name not in (*probes.dependent, *rounded)]
    for name in probes.dependent:
        probes.singles.pop(name, None)
        probes.steps.pop(name, None)
