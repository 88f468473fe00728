"""Expressions read off probes in which all sizes change at once: products by their prime factors,
sums by a search."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from explorer.signature.expressions import Expr, Powers, total
from explorer.signature.sizes import table
from explorer.signature.steps import Multiple, exponents

#: The largest numerator and denominator of a factor.
LARGEST_FACTOR, LARGEST_DIVISOR = 4096, 64

#: Names of sizes that no other size is added to or multiplied by twice.
_ALONE = frozenset(("B", "Vocab", "MaxSeq"))

#: How many more probes than terms a sum over all sizes has to agree with.
_SPARE = 2

#: How far off, relative to its length, a candidate sum may be before it is solved exactly.
_NEAR = 1e-9

#: Below this length of what is left, two products count as parallel.
_PARALLEL = 1e-7


@dataclass(frozen=True)
class JointRun:
    """A probe in which many sizes changed: its place among the runs, and the multiple that each
    regular size changed to."""

    run: int
    multiples: Mapping[str, Multiple]


class JointFitter:
    """Finds the expression of an axis from its numbers in joint probes, without knowing which sizes
    it depends on.

    runs: the sizes of each probe, the first probe's first; joints: those in which most sizes
    changed to multiples by primes of their own; dependent: sizes that follow from others;
    irregular: names of sizes that changed in another way.
    """

    def __init__(
        self,
        runs: Sequence[Mapping[str, int]],
        joints: Sequence[JointRun],
        dependent: Mapping[str, Expr],
        irregular: Sequence[str],
    ) -> None:
        self.runs, self.joints, self.dependent = runs, joints, dependent
        self.irregular = [*irregular, *dependent]
        self.products: dict[tuple[int, ...], Expr] = {}
        self._pool: tuple[list[Powers], np.ndarray] | None = None

    # -- products ----------------------------------------------------------------

    def product(self, observed: tuple[int, ...]) -> Expr | None:
        """The simplest product of sizes with these numbers in every probe."""
        if observed not in self.products:
            found = self._product(observed)
            if found is None:
                return None
            self.products[observed] = found
        return self.products[observed]

    def _product(self, observed: tuple[int, ...]) -> Expr | None:
        for most in (1, 2):
            found: dict[Expr, Expr] = {}
            for powers in self._irregular_powers(most):
                expression = self._decoded(observed, powers)
                if expression is not None:
                    written_out = expression.replaced(self.dependent)
                    if written_out not in found or self._rank(expression) < self._rank(
                        found[written_out]
                    ):
                        found[written_out] = expression
            if found:
                simplest = min(map(self._rank, found.values()))
                best = [one for one in found.values() if self._rank(one)[:-1] == simplest[:-1]]
                return best[0] if len(best) == 1 else None
        return None

    def _irregular_powers(self, most: int) -> Iterator[dict[str, int]]:
        for count in range(most + 1):
            for names in itertools.combinations(self.irregular, count):
                for powers in itertools.product((1, -1), repeat=count):
                    yield dict(zip(names, powers, strict=True))

    def _decoded(self, observed: tuple[int, ...], irregular: Mapping[str, int]) -> Expr | None:
        """The product with the given powers of irregular sizes; the powers of the others are read
        off the joint probes."""

        def irregular_part(run: int) -> Fraction:
            found = Fraction(1)
            for name, power in irregular.items():
                found *= Fraction(self.runs[run][name]) ** power
            return found

        regular = [
            Fraction(observed[joint.run]) / irregular_part(joint.run) for joint in self.joints
        ]
        first = Fraction(observed[0]) / irregular_part(0)
        powers: dict[str, int] = {}
        for joint, number in zip(self.joints, regular, strict=True):
            read = exponents(number / first, joint.multiples)
            if read is None:
                return None
            powers |= read
        found = Expr.of({tuple({**powers, **irregular}.items()): 1})
        factor = observed[0] / found.value(self.runs[0])
        if factor.denominator > LARGEST_DIVISOR or factor.numerator > LARGEST_FACTOR:
            return None
        found = found * Expr.number(factor)
        return found if self._holds(found, observed) else None

    def _rank(self, expression: Expr) -> tuple[int, ...]:
        """How involved an expression is: terms, divisors, factors, sizes that follow from
        others."""
        powers = [power for term, _ in expression.terms for _, power in term]
        return (
            len(expression.terms),
            -sum(power for power in powers if power < 0),
            sum(map(abs, powers)),
            len(expression.names & self.dependent.keys()),
        )

    def _holds(self, expression: Expr, observed: Sequence[int]) -> bool:
        return all(
            expression.value(run) == number for run, number in zip(self.runs, observed, strict=True)
        )

    # -- sums ----------------------------------------------------------------------

    def short_sum(self, observed: tuple[int, ...]) -> Expr | None:
        """A number added to a multiple of one size, as in ``1 + S``, or that for each item of the
        batch, as in ``B + B * S``."""
        names = {name for joint in self.joints for name in joint.multiples} | {*self.irregular}
        found = []
        for name in sorted(names - self.dependent.keys()):
            each = [self._solved([(), ((name, 1),)], observed)]
            if name != "B":
                batch = ("B", 1)
                each.append(self._solved([(batch,), tuple(sorted([batch, (name, 1)]))], observed))
            found += [solved for solved in each if solved is not None]
        whole = [one for one in found if all(f.denominator == 1 for _, f in one.terms)]
        return whole[0] if len(whole) == 1 else None

    def sum(self, observed: tuple[int, ...]) -> Expr | None:
        """The simplest sum of up to three products of up to two sizes each, or of products that are
        axes by themselves."""
        for terms in (2, 3):
            if len(self.runs) < terms + _SPARE:
                return None
            found: dict[Expr, Expr] = {}
            for powers in self._near(observed, terms):
                expression = self._solved(powers, observed)
                if expression is not None and len(expression.terms) == terms:
                    written_out = expression.replaced(self.dependent)
                    if written_out not in found or self._rank(expression) < self._rank(
                        found[written_out]
                    ):
                        found[written_out] = expression
            if found:
                simplest = min(self._rank(one)[:-1] for one in found.values())
                best = [one for one in found.values() if self._rank(one)[:-1] == simplest]
                return best[0] if len(best) == 1 else None
        return None

    def _near(self, observed: tuple[int, ...], terms: int) -> Iterator[list[Powers]]:
        """The pairs or triples of the pool that some real factors bring to the numbers.

        Two products span a plane; the numbers are near a sum with a third where what the plane
        leaves of both is parallel.
        """
        pool, numbers = self._candidates()
        # Relative to the numbers wanted, so that every probe weighs the same.
        columns = numbers / np.array(observed, dtype=float)
        columns /= np.linalg.norm(columns, axis=1, keepdims=True)
        wanted = np.full(len(observed), len(observed) ** -0.5)
        pairs = np.array(list(itertools.combinations(range(len(pool)), 2)))
        first, second = columns[pairs[:, 0]], columns[pairs[:, 1]]
        second = second - np.einsum("ij,ij->i", first, second)[:, None] * first
        length = np.linalg.norm(second, axis=1, keepdims=True)
        second = second / np.where(length > _PARALLEL, length, np.inf)
        left = wanted - (first @ wanted)[:, None] * first
        left -= np.einsum("ij,ij->i", second, left)[:, None] * second
        rest = np.linalg.norm(left, axis=1)
        if terms == 2:
            for at in np.flatnonzero((rest < _NEAR) & (length[:, 0] > _PARALLEL)):
                yield [pool[index] for index in pairs[at]]
            return
        for third in range(2, len(pool)):
            own = np.flatnonzero(pairs[:, 1] < third)
            column = columns[third]
            other = column - (first[own] @ column)[:, None] * first[own]
            other -= np.einsum("ij,ij->i", second[own], other)[:, None] * second[own]
            lengths = np.linalg.norm(other, axis=1)
            other /= np.where(lengths > _PARALLEL, lengths, np.inf)[:, None]
            off = left[own] - np.einsum("ij,ij->i", other, left[own])[:, None] * other
            for at in np.flatnonzero(np.linalg.norm(off, axis=1) < _NEAR):
                if rest[own[at]] > _NEAR:
                    yield [*(pool[index] for index in pairs[own[at]]), pool[third]]

    def _candidates(self) -> tuple[list[Powers], np.ndarray]:
        """The products that sums are made of, and their numbers in every probe."""
        if self._pool is None:
            resolved = [
                term
                for one in self.products.values()
                for term, _ in one.terms
                if len(term) <= 3 and all(power > 0 for _, power in term)
            ]
            changed = {name for joint in self.joints for name in joint.multiples}
            names = sorted({*changed, *self.irregular} - _ALONE - self.dependent.keys())
            pairs = [
                ((first, 1), (second, 1))
                for first, second in itertools.combinations(names, 2)
                if "S" not in (first, second)
            ]
            pool: list[Powers] = list(
                dict.fromkeys([(), *(((name, 1),) for name in names), *pairs, *resolved])
            )
            columns = np.array(
                [[float(Expr.of({term: 1}).value(run)) for run in self.runs] for term in pool]
            )
            self._pool = pool, columns
        return self._pool

    def _solved(self, terms: Sequence[Powers], observed: Sequence[int]) -> Expr | None:
        """The sum of the products with exact factors that has these numbers in every probe."""
        columns = np.array(
            [[float(Expr.of({term: 1}).value(run)) for run in self.runs] for term in terms]
        )
        scale = columns.max(axis=1)
        solved, _, rank, _ = np.linalg.lstsq(
            (columns / scale[:, None]).T, np.array(observed, dtype=float), rcond=1e-12
        )
        if rank < len(terms):
            return None
        factors = [
            Fraction(factor / top).limit_denominator(LARGEST_DIVISOR)
            for factor, top in zip(solved, scale, strict=True)
        ]
        if any(not factor or abs(factor.numerator) > LARGEST_FACTOR for factor in factors):
            return None
        found = total(Expr.of({term: factor}) for term, factor in zip(terms, factors, strict=True))
        return found if self._holds(found, observed) else None


def rounding_pairs(
    names: Sequence[str], keys: Mapping[str, tuple[str, ...]]
) -> list[tuple[str, str]]:
    """Pairs of sizes of which the first may be rounded up to a multiple of the second, by the
    second's key."""
    multiples = [name for name in names if re.search(table()["roundings"], keys[name][-1])]
    return [(name, multiple) for multiple in multiples for name in names if name != multiple]
