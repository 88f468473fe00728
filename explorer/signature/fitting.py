"""Fitting: the one expression over a family's sizes that gives a number in every probe."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from explorer.signature.expressions import Expr, Powers
from explorer.signature.joint_fitting import LARGEST_DIVISOR, LARGEST_FACTOR, JointFitter

#: Most terms of a sum that are tried, by how many names are in it.
_TERMS = {1: 2, 2: 3, 3: 4, 4: 4, 5: 3, 6: 3, 7: 2}


#: Candidates that are looked at in one go, and how far off they may be, of the numbers' own size,
#: to be solved for.
_AT_ONCE, _NEAR = 256, 1e-3


@dataclass(frozen=True)
class Rounded:
    """A share of the size ``of``, rounded up to a multiple of the size ``to``."""

    of: str
    share: Fraction
    to: str

    @property
    def name(self) -> str:
        return f"Rounded{self.of}"

    def value(self, sizes: Mapping[str, int]) -> int:
        multiple = sizes[self.to]
        return -(-int(self.share * sizes[self.of]) // multiple) * multiple

    def __str__(self) -> str:
        return f"{Expr.of({((self.of, 1),): self.share})} rounded up to a multiple of {self.to}"


class Fitter:
    """Finds the expression of an axis from its numbers in all probes.

    joint: reads it off the probes in which all sizes changed; singles: by name, the index of the
    probes in which that one size differs from the first probe, alone or with sizes that follow from
    it, for what cannot be read off; roundings: pairs of sizes of which the first may be rounded up
    to a multiple of the second.
    """

    def __init__(
        self,
        runs: Sequence[Mapping[str, int]],
        singles: Mapping[str, Sequence[int]],
        dependent: Mapping[str, Expr] | None = None,
        joint: JointFitter | None = None,
        roundings: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.runs, self.singles, self.dependent = runs, singles, dict(dependent or {})
        self.joint, self.roundings = joint, roundings
        #: Sizes that are others rounded up, by a name of their own.
        self.rounded: dict[str, Rounded] = {}
        self._known: dict[tuple[int, ...], Expr | None] = {}

    def fit_all(self, observed: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Expr | None]:
        """The expression of each: products first, as sums are made of those."""
        wanted = list(dict.fromkeys(observed))
        if self.joint is not None:
            for numbers in wanted:
                if len(set(numbers)) > 1:
                    self.joint.product(numbers)
        return {numbers: self.fit(numbers) for numbers in wanted}

    def fit(self, observed: Sequence[int]) -> Expr | None:
        """The simplest expression with these numbers, None where there is none or several are as
        simple."""
        key = tuple(observed)
        if key not in self._known:
            self._known[key] = self._without_bare_share(self._read(key)) or self._rounded(key)
        return self._known[key]

    def _read(self, observed: tuple[int, ...]) -> Expr | None:
        if len(set(observed)) == 1:
            return Expr.number(observed[0])
        if self.joint is not None:
            found = self.joint.product(observed) or self.joint.short_sum(observed)
            found = found or self._rounded(observed) or self.joint.sum(observed)
            if found is not None:
                return found
        return self._search(observed)

    @staticmethod
    def _without_bare_share(found: Expr | None) -> Expr | None:
        """What was found, unless it is a share and a bare number besides: so a root or a rounding
        looks between a few points."""
        parts = dict(found.terms) if found is not None else {}
        bent = () in parts and any(factor.denominator > 1 for factor in parts.values())
        return None if bent else found

    def moves(self, observed: Sequence[int]) -> list[str]:
        """The sizes that change the number when they alone change."""
        return [
            name for name, at in self.singles.items() if any(observed[i] != observed[0] for i in at)
        ]

    def _search(self, observed: tuple[int, ...]) -> Expr | None:
        names = self.moves(observed)
        if not names:
            return Expr.number(observed[0]) if len(set(observed)) == 1 else None
        if len(names) > max(_TERMS):
            return None
        names += [
            name for name, expression in self.dependent.items() if expression.names <= set(names)
        ]
        numbers = {name: np.array([float(run[name]) for run in self.runs]) for name in names}
        wanted = frozenset(self.moves(observed))
        found: dict[Expr, Expr] = {}
        simplest: tuple | None = None
        for rank, chosen in self._near_candidates(tuple(names), numbers, observed):
            if simplest is not None and rank > simplest:
                break
            if (
                frozenset(
                    one for powers in chosen for name, _ in powers for one in self._free_names(name)
                )
                != wanted
            ):
                continue
            expression = self._solve(chosen, numbers, observed)
            if expression is not None:  # the same in other words is no other expression
                same = expression.replaced(self.dependent)
                if same not in found or self._dependents_in(expression) < self._dependents_in(
                    found[same]
                ):
                    found[same] = expression
                simplest = rank
        return next(iter(found.values())) if len(found) == 1 else None

    def _near_candidates(
        self, names: tuple[str, ...], numbers: Mapping[str, np.ndarray], observed: tuple[int, ...]
    ) -> Iterator[tuple[tuple, tuple[Powers, ...]]]:
        """The candidates that some real factors bring near the numbers, simplest first.

        Many are looked at in one go, which is far faster than solving for each; none that fits is
        left out.
        """
        candidates, wanted = _candidates(names), np.array(observed, dtype=float)
        columns = {
            powers: np.prod(
                [np.ones(len(observed)), *(numbers[name] ** power for name, power in powers)],
                axis=0,
            )
            for _, powers in _ranked(names)
        }
        columns = {powers: column / np.linalg.norm(column) for powers, column in columns.items()}
        for start in range(0, len(candidates), _AT_ONCE):
            some = candidates[start : start + _AT_ONCE]
            near: set[int] = set()
            for terms in {len(chosen) for _, chosen in some}:
                at = [i for i, (_, chosen) in enumerate(some) if len(chosen) == terms]
                spanned, _ = np.linalg.qr(
                    np.stack(
                        [np.stack([columns[powers] for powers in some[i][1]], axis=1) for i in at]
                    )
                )
                left = wanted - np.einsum(
                    "irk,ik->ir", spanned, np.einsum("irk,r->ik", spanned, wanted)
                )
                near.update(
                    i
                    for i, off in zip(at, np.linalg.norm(left, axis=1), strict=True)
                    if off <= _NEAR * np.linalg.norm(wanted)
                )
            yield from (some[i] for i in sorted(near))

    def _dependents_in(self, expression: Expr) -> int:
        return len(expression.names & self.dependent.keys())

    def _free_names(self, name: str) -> frozenset[str]:
        return self.dependent[name].names if name in self.dependent else frozenset((name,))

    def _rounded(self, observed: tuple[int, ...]) -> Expr | None:
        """Of two sizes, one that is a share of the one, rounded up to a multiple of the other."""
        pairs = {*self.roundings}
        names = self.moves(observed)
        if len(names) == 2:
            pairs |= {(names[0], names[1]), (names[1], names[0])}
        found = {
            rounded
            for of, to in pairs
            for rounded in self._roundings(of, to, observed)
            if all(
                rounded.value(run) == number
                for run, number in zip(self.runs, observed, strict=True)
            )
        }
        if len(found) != 1:
            return None
        size = found.pop()
        if self.rounded.setdefault(size.name, size) != size:
            return None  # one name for two sizes would give one of them the other's number
        return Expr.name(size.name)

    def _roundings(self, of: str, to: str, observed: tuple[int, ...]) -> set[Rounded]:
        return {
            Rounded(of, share, to)
            for run, number in zip(self.runs, observed, strict=True)
            if (share := Fraction(number, run[of]).limit_denominator(12)) > 0
        }

    def _solve(
        self, chosen: Sequence[Powers], numbers: Mapping[str, np.ndarray], observed: tuple[int, ...]
    ) -> Expr | None:
        ones = np.ones(len(observed))
        columns = [
            np.prod([ones, *(numbers[name] ** power for name, power in powers)], axis=0)
            for powers in chosen
        ]
        wanted = np.array(observed, dtype=float)
        if len(columns) == 1:
            factors = [wanted[0] / columns[0][0]]
        else:
            scale = [column.max() for column in columns]
            matrix = np.stack(
                [column / top for column, top in zip(columns, scale, strict=True)], axis=1
            )
            if len(observed) <= len(chosen):
                return None
            solved, _, rank, _ = np.linalg.lstsq(matrix, wanted, rcond=1e-9)
            if rank < len(chosen) or not np.allclose(matrix @ solved, wanted, rtol=1e-6, atol=1e-3):
                return None
            factors = [one / top for one, top in zip(solved, scale, strict=True)]
        exact = [Fraction(factor).limit_denominator(LARGEST_DIVISOR) for factor in factors]
        if any(not factor or abs(factor.numerator) > LARGEST_FACTOR for factor in exact):
            return None
        expression = Expr.of(zip(chosen, exact, strict=True))
        return (
            expression
            if all(
                expression.value(run) == number
                for run, number in zip(self.runs, observed, strict=True)
            )
            else None
        )


@lru_cache(maxsize=512)
def _ranked(names: tuple[str, ...]) -> list[tuple[tuple[int, int], Powers]]:
    """Every product of some of the names, at most one of them a divisor, with how involved it is;
    the bare number first.

    A name may come twice where there are few of them.
    """
    found: list[tuple[tuple[int, int], Powers]] = [((0, 0), ())]
    powers = (0, 1, -1, 2) if len(names) < 3 else (0, 1, -1)
    for signs in itertools.product(powers, repeat=len(names)):
        below, above = signs.count(-1), sum(sign for sign in signs if sign > 0)
        if above and below <= 1:
            found.append(
                (
                    (below, above + below),
                    tuple(
                        sorted(
                            (name, sign) for name, sign in zip(names, signs, strict=True) if sign
                        )
                    ),
                )
            )
    return sorted(found)


@lru_cache(maxsize=512)
def _candidates(names: tuple[str, ...]) -> list[tuple[tuple, tuple[Powers, ...]]]:
    """Sums of products of the names, simplest first: few terms, few divisors, short products."""
    return sorted(_sums(names))


def _sums(names: tuple[str, ...]) -> Iterator[tuple[tuple, tuple[Powers, ...]]]:
    products = _ranked(names)
    for terms in range(1, _TERMS.get(len(names), 1) + 1):
        # Many terms are tried with few kinds of products only, or there are too many sums.
        pool = (
            products
            if terms <= 2
            else [one for one in products if not one[0][0] and one[0][1] <= 2]
        )
        for chosen in itertools.combinations(pool, terms):
            ranks = [rank for rank, _ in chosen]
            yield (
                (terms, sum(rank[0] for rank in ranks), sum(rank[1] for rank in ranks)),
                tuple(powers for _, powers in chosen),
            )
