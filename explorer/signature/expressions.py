"""Sizes as expressions: sums of products of named sizes, in exact arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

#: The powers of names in one product, by name; a name to the power of zero is left out.
Powers = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Expr:
    """A sum of products: ``terms`` holds for each its powers and its factor, none of them zero, in
    a fixed order.

    ``cap`` is a second expression where the size is the smaller of the two.
    """

    terms: tuple[tuple[Powers, Fraction], ...]
    cap: Expr | None = None

    @classmethod
    def of(
        cls,
        terms: Mapping[Powers, Fraction | int] | Iterable[tuple[Powers, Fraction | int]],
        cap: Expr | None = None,
    ) -> Expr:
        """Collect like terms."""
        summed: dict[Powers, Fraction] = {}
        pairs: Any = terms.items() if isinstance(terms, Mapping) else terms
        for powers, factor in pairs:
            powers = tuple(sorted((name, power) for name, power in powers if power))
            summed[powers] = summed.get(powers, Fraction(0)) + Fraction(factor)
        return cls(
            tuple(sorted((powers, factor) for powers, factor in summed.items() if factor)), cap
        )

    @classmethod
    def number(cls, value: int | Fraction) -> Expr:
        return cls.of({(): Fraction(value)})

    @classmethod
    def name(cls, name: str) -> Expr:
        return cls.of({((name, 1),): Fraction(1)})

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name in it, those of its cap included."""
        own = frozenset(name for powers, _ in self.terms for name, _ in powers)
        return own | self.cap.names if self.cap is not None else own

    @property
    def constant(self) -> int | None:
        """Its number where it has no names."""
        return None if self.names or self.value({}).denominator != 1 else int(self.value({}))

    def value(self, sizes: Mapping[str, int]) -> Fraction:
        """What it comes to; KeyError for a name without a size."""
        total = Fraction(0)
        for powers, factor in self.terms:
            for name, power in powers:
                factor = factor * Fraction(sizes[name]) ** power
            total += factor
        return total if self.cap is None else min(total, self.cap.value(sizes))

    def replaced(self, by: Mapping[str, Expr]) -> Expr:
        """The same with names written out; a sum cannot be put where the name is a divisor, and is
        left."""
        whole = total(self._written(powers, factor, by) for powers, factor in self.terms)
        if whole != self and whole.names & by.keys():
            return whole.replaced(by)
        return Expr(whole.terms, None if self.cap is None else self.cap.replaced(by))

    @staticmethod
    def _written(powers: Powers, factor: Fraction, by: Mapping[str, Expr]) -> Expr:
        found = Expr.of({(): factor})
        for name, power in powers:
            other = by.get(name)
            if other is None or (power < 0 and len(other.terms) > 1):
                found = found * Expr.of({((name, power),): 1})
            elif power < 0:
                ((inner, times),) = tuple(other.terms)
                found = found * Expr.of(
                    {tuple((one, own * power) for one, own in inner): times**power}
                )
            else:
                found = product([found, *[other] * power])
        return found

    def at(self, sizes: Mapping[str, int]) -> Expr:
        """The same with numbers for some names."""
        return self.replaced({name: Expr.number(number) for name, number in sizes.items()})

    def __add__(self, other: Expr) -> Expr:
        return Expr.of([*self.terms, *other.terms])

    def __mul__(self, other: Expr) -> Expr:
        return Expr.of([(_merged([*a, *b]), x * y) for a, x in self.terms for b, y in other.terms])

    def text(self, order: Mapping[str, int] | None = None) -> str:
        """As pages write it: ``2 * Heads * HeadDim + KeyDim``, ``-1 + Width``, ``HeadDim / 4``;
        names in ``order``."""
        rank = order or {}

        def place(name: str) -> tuple[int, str]:
            return rank.get(name, len(rank)), name

        def key(term: tuple[Powers, Fraction]) -> tuple:
            powers = sorted((place(name) for name, _ in term[0]), key=lambda at: at)
            return bool(term[0]), powers

        written = ""
        for powers, factor in sorted(self.terms, key=key):
            sign = "-" if factor < 0 else "+"
            body = _product(sorted(powers, key=lambda at: place(at[0])), abs(factor))
            written = f"{written} {sign} {body}" if written else body if sign == "+" else f"-{body}"
        written = written or "0"
        return written if self.cap is None else f"min({written}, {self.cap.text(order)})"

    def __str__(self) -> str:
        return self.text()


def _merged(powers: Iterable[tuple[str, int]]) -> Powers:
    summed: dict[str, int] = {}
    for name, power in powers:
        summed[name] = summed.get(name, 0) + power
    return tuple(sorted((name, power) for name, power in summed.items() if power))


def _product(powers: list[tuple[str, int]], factor: Fraction) -> str:
    above = [name for name, power in powers for _ in range(max(power, 0))]
    below = [name for name, power in powers for _ in range(max(-power, 0))]
    top = [str(factor.numerator), *above] if factor.numerator != 1 or not above else above
    bottom = [str(factor.denominator), *below] if factor.denominator != 1 else below
    return " / ".join([" * ".join(top), *bottom])


def product(factors: Iterable[Expr]) -> Expr:
    """All of them multiplied."""
    found = Expr.number(1)
    for factor in factors:
        found = found * factor
    return found


def total(parts: Iterable[Expr]) -> Expr:
    """All of them added."""
    return Expr.of([term for part in parts for term in part.terms])
