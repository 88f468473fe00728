"""The numbers that sizes change to in a probe: multiples by primes of their own, or other numbers
close by."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

#: From a size and the number of the probe to another size.
Step = Callable[[int, int], int]

_ODD, _EVEN = (3, 5, 7, 11, 9, 13), (2, 4, 8, 16)

#: Sizes of which the first often has to divide the second, by their names.
_DIVISORS = (
    (re.compile(r"KvHeads$"), re.compile(r"(?<!Mamba)Heads$")),
    (re.compile(r"KeyHeads$"), re.compile(r"ValueHeads$")),
    (re.compile(r"ExpertGroups?$"), re.compile(r"^Experts$")),
    (re.compile(r"StateGroups$|^NumGroups$"), re.compile(r"(Heads|Channels)$")),
    (re.compile(r"Heads$"), re.compile(r"^Channels$")),
)

#: The same where no size is a head's width, which is then what the heads divide.
_WIDTHS = re.compile(r"^(Hidden|EmbeddingDim)$")


def odd_multiple(number: int, turn: int) -> int:
    return number * _ODD[turn % len(_ODD)]


def even_multiple(number: int, turn: int) -> int:
    return number * _EVEN[turn % len(_EVEN)]


def divided(number: int, turn: int) -> int:
    divisors = [by for by in (2, 4, 3, 8, 6) if number % by == 0]
    return number // divisors[turn % len(divisors)] if divisors else number


def prime_above(number: int, turn: int) -> int:
    """One of the primes above a number, well apart from each other."""
    found = number + max(1, number // 8) * (turn + 1)
    while not _is_prime(found):
        found += 1
    return found


def above(number: int, turn: int) -> int:
    return number + 8 * (2 * turn + 1)


def just_above(number: int, turn: int) -> int:
    return number + 1 + turn % 4


def just_below(number: int, turn: int) -> int:
    return number - 1 - turn


#: A multiple keeps whatever divides the number, so these are tried first.
MULTIPLES: tuple[Step, ...] = (odd_multiple, even_multiple, divided)
STEPS: tuple[Step, ...] = (*MULTIPLES, prime_above, above, just_below)

#: A window has to stay narrower than the call.
WINDOW_STEPS: tuple[Step, ...] = (just_above,)


@dataclass(frozen=True)
class Multiple:
    """What one size is multiplied by in a joint probe, and a prime in that factor which no later
    size's factor has."""

    factor: Fraction
    prime: int


def joint_multiples(
    numbers: Mapping[str, int],
    calls: Mapping[str, tuple[int, int]],
    divisors: Collection[tuple[str, str]],
    used: Mapping[str, Collection[int]],
    least: int,
) -> dict[str, Multiple]:
    """A multiple for each size such that a product of sizes shows its factors by the primes in it.

    calls: by name what the call decides (batch, tokens), before and in this probe; divisors: pairs
    of sizes of which the first has to divide the second; used: primes that a size had in earlier
    probes; least: the smallest number that may be one of the primes.

    A larger size has a larger prime, so that what may not exceed another does not. A size that
    another has to divide is multiplied by the other's factor too. The order is the one to read
    off factors in: of two sizes of which one has the other's prime, that one comes first.
    """
    taken = {after for _, after in calls.values()}
    primes = (prime for prime in _primes() if prime >= least and prime not in taken)
    kinds = [first for first, _ in _DIVISORS]

    def order(name: str) -> tuple[int, bool, int]:
        """By number; of equal ones first how many are chosen, then what may have to divide."""
        matching = [at for at, pattern in enumerate(kinds) if pattern.search(name)]
        return numbers[name], not name.startswith("Top"), min(matching, default=len(kinds))

    ordered = sorted(numbers, key=order)
    factors: dict[str, int] = {}
    own: dict[str, int] = {}
    for at, name in enumerate(ordered):
        own[name] = factors[name] = next(one for one in primes if one not in used.get(name, ()))
        for other in ordered[:at]:
            if (other, name) in divisors:
                factors[name] = math.lcm(factors[name], factors[other])
    found = {
        name: Multiple(Fraction(after, before), after) for name, (before, after) in calls.items()
    }
    return found | {
        name: Multiple(Fraction(factors[name]), own[name]) for name in reversed(ordered)
    }


def exponents(ratio: Fraction, multiples: Mapping[str, Multiple]) -> dict[str, int] | None:
    """The powers of sizes in a product that changed by ``ratio``; None where it is no such
    product."""
    found = {}
    for name, multiple in multiples.items():
        power = _valuation(ratio, multiple.prime)
        if power:
            found[name] = power
            ratio /= multiple.factor**power
    return found if ratio == 1 else None


def _valuation(ratio: Fraction, prime: int) -> int:
    power, above_line, below_line = 0, ratio.numerator, ratio.denominator
    while above_line % prime == 0:
        above_line //= prime
        power += 1
    while below_line % prime == 0:
        below_line //= prime
        power -= 1
    return power


def may_divide(name: str, other: str, names: Collection[str]) -> bool:
    """Whether a size may have to divide another, as far as their names tell."""
    if name == "Heads" and _WIDTHS.match(other):
        return "HeadDim" not in names
    return any(first.search(name) and second.search(other) for first, second in _DIVISORS)


def _primes() -> Iterator[int]:
    number = 2
    while True:
        if _is_prime(number):
            yield number
        number += 1


def _is_prime(number: int) -> bool:
    return all(number % by for by in range(2, int(number**0.5) + 1))


def steps_of(key: Sequence[str], windows: Collection[str]) -> Sequence[Step]:
    """The steps to try for the size at ``key`` of a configuration."""
    return WINDOW_STEPS if key[-1] in windows else STEPS
