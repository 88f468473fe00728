"""Sizes that cannot be chosen since others decide them, found by trying what their numbers
suggest."""

from __future__ import annotations

from collections.abc import Sequence

from explorer.signature.expressions import Expr
from explorer.signature.probes import Probes
from explorer.signature.sizes import last_word, relations

#: Relations between numbers that are tried for each size that does not change alone.
_MOST_RELATIONS = 16

#: A size, another that may follow from it, and how.
Hint = tuple[str, str, Expr]


def relations_among(probes: Probes, failed: Sequence[str]) -> list[tuple[str, Expr]]:
    """How sizes that refuse to change may follow from each other, the likeliest first: equal sizes
    of one sort, then what relates most of them."""
    derived = probes.model.derived

    def likely(hint: Hint) -> tuple[bool, bool, int]:
        name, other, expression = hint
        same = expression == Expr.name(name) and last_word(name) == last_word(other)
        return not same, other not in derived, -len(expression.names)

    inside = [hint for hint in _hints(probes, failed) if not _outside(hint, failed)]
    return [
        *dict.fromkeys((other, expression) for _, other, expression in sorted(inside, key=likely))
    ]


def _hints(probes: Probes, failed: Sequence[str]) -> list[Hint]:
    """How sizes may follow from those that refuse to change, the likeliest first.

    What relates sizes that all refuse to change alone is likeliest to be why they do.
    """
    numbers, derived, dependent = probes.model.numbers, probes.model.derived, probes.dependent
    found = [
        (name, other, expression)
        for name in failed
        for at, (other, expression) in enumerate(relations(numbers, name, derived))
        if other not in (*dependent, *probes.singles)
        and not expression.names & dependent.keys()
        and (at < _MOST_RELATIONS or {other, *expression.names} <= {*failed})
    ]
    return sorted(
        found, key=lambda hint: (_outside(hint, failed), hint[1] not in derived, len(hint[2].names))
    )


def _outside(hint: Hint, failed: Sequence[str]) -> int:
    """How many sizes of a relation do not refuse to change."""
    return len({hint[1], *hint[2].names} - {*failed})


def change_alone(probes: Probes, names: Sequence[str]) -> None:
    """Change each size alone, or with sizes found to depend on it."""
    failed = [name for name in names if not probes.move(name)]
    # Such a size may have to move together with one that does not move at all.
    rounded = probes.perhaps_rounded if failed else []
    failed += rounded
    while set(failed) - set(rounded):
        left = _find_dependent(probes, failed)
        if len(left) == len(failed):
            break
        failed = left
    probes.fixed += [name for name in failed if name not in (*probes.dependent, *rounded)]
    for name in probes.dependent:
        probes.singles.pop(name, None)
        probes.steps.pop(name, None)


def _find_dependent(probes: Probes, failed: Sequence[str]) -> list[str]:
    """Find one size that follows from others, so that most of ``failed`` can change that could not;
    what is left of them."""
    best: tuple[int, Hint] | None = None
    for hint in _hints(probes, failed)[: 2 * _MOST_RELATIONS]:
        name, other, expression = hint
        if best is not None and _outside(hint, failed) > _outside(best[1], failed):
            break
        probes.dependent[other] = expression
        if probes.can_change(name):
            others = [one for one in failed if one not in (name, other)]
            freed = 1 + sum(probes.can_change(one) for one in others)
            if best is None or freed > best[0]:
                best = freed, hint
        del probes.dependent[other]
        if best is not None and best[0] >= len(failed) - 1:
            break
    if best is None:
        return list(failed)
    _, other, expression = best[1]
    probes.dependent[other] = expression
    return [name for name in failed if name != other and not probes.move(name)]
