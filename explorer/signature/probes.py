"""Probing a family: which of its sizes may change, by changing them, and what every tensor's shape is each time."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from explorer.signature.expressions import Expr
from explorer.signature.fitting import Fitter, Rounded
from explorer.signature.running import Sites, build, observe, shorter
from explorer.signature.sizes import (
    Key,
    changed,
    choices,
    derived,
    figures,
    named,
    relations,
    table,
)

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

#: Batch and tokens of the first probe, and what they change to.
BATCH, SEQ = 3, 11
_OTHER_BATCHES, _OTHER_SEQS = (5, 7, 2, 4), (13, 17, 19, 23)

#: Probes beside the first that change every size at once: what was read off the others has to hold there too.
_JOINT = 3

#: Models that are built at most to find out which sizes may change.
_PATIENCE = 260

#: Of these, for one probe in which all sizes change at once.
_JOINT_PATIENCE = 30

#: Relations between numbers that are tried for each size that does not change alone.
_HINTS = 16


class Probes:
    """The probes of one configuration and their shapes.

    ``names`` are the sizes by figure, ``numbers`` those of the first probe by name; ``runs`` the sizes of each probe and
    ``sites`` what was seen there, the first of them the configuration's own sizes but for its windows; ``singles`` are, by
    name, the probes in which that size changed; ``follows`` are sizes that cannot be chosen since others decide them;
    ``stuck`` are those that may be sizes and could not be changed; ``asked`` is the configuration that types are for, with
    few blocks. Sizes change to multiples of what they are where that builds, so what a class rounds to shows only where
    it rounds one of these.

    released: the configuration whose sizes types are for, where ``config`` is a small one of which models with numbers
    are run, since without any the class does not run. cut: the block list's path and how many of its blocks are enough,
    where no configuration has so few.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        model_class: type,
        released: PreTrainedConfig | None = None,
        cut: tuple[str, int] | None = None,
    ) -> None:
        self.config, self.model_class, self.real, self.cut = (
            config,
            model_class,
            released is not None,
            cut,
        )
        self.asked = config
        found = figures(config)
        narrow: dict[str, int] = table()["windows"]
        self.windows = {
            key: narrow[key[-1]]
            for key, value in found.items()
            if value > narrow.get(key[-1], value)
        }
        self.names: dict[Key, str] = named(list(found))
        whole = figures(released or config)
        if lacking := found.keys() - whole.keys():
            raise ValueError(
                f"the configuration has no {', '.join(sorted('.'.join(key) for key in lacking))}, which a small one of its kind has"
            )
        self.released = {self.names[key]: whole[key] for key in found}
        self.numbers = {
            self.names[key]: self.windows.get(key, value) for key, value in found.items()
        }
        self.keys = {name: key for key, name in self.names.items()}
        self.derived = {self.names[key] for key in derived(config) if key in self.names}
        self.follows: dict[str, Expr] = {}
        self.stuck: list[str] = []
        self.runs: list[dict[str, int]] = []
        self.sites: list[Sites] = []
        self.singles: dict[str, list[int]] = {}
        self.error: Exception | None = None
        #: How often another model than the one that was run at many sizes was seen to have the same types; None of that one.
        self.seen: int | None = None
        self.tried, self._until = 0, 0
        self._ways: dict[str, _Way] = {}
        #: Sizes of which multiples do not build and a number close by changes nothing: its share may be rounded.
        self._doubtful: list[str] = []
        self._run()

    def elsewhere(
        self, config: PreTrainedConfig, model_class: type, cut: tuple[str, int] | None
    ) -> Probes | None:
        """These probes for the sizes of another configuration; None where it has other figures, or differs in more than figures."""
        found = figures(config)
        if choices(config) != choices(self.asked):
            return None
        narrow: dict[str, int] = table()["windows"]
        if (
            self.real
            or (self.model_class, self.cut) != (model_class, cut)
            or found.keys() != self.names.keys()
        ):
            return None
        if {
            key for key, value in found.items() if value > narrow.get(key[-1], value)
        } != self.windows.keys():
            return None
        other = copy.copy(self)
        other.asked, other.released = (
            config,
            {self.names[key]: value for key, value in found.items()},
        )
        if any(
            expression.value(other.released) != other.released[name]
            for name, expression in self.follows.items()
        ):
            return None
        return other

    def few(self, wide: bool = False) -> nn.Module:
        """The model that was asked about, with few blocks and narrow windows, or ``wide`` ones, its own."""
        model = build(
            changed(self.asked, {} if wide else self.windows), self.model_class, self.real
        )
        return model if self.cut is None else shorter(model, *self.cut)

    def looks(self) -> Iterator[tuple[dict[str, int], Sites]]:
        """What the model that was asked about shows, each time with its sizes: with narrow windows at two lengths, then with its own."""
        narrow = {self.names[key]: number for key, number in self.windows.items()}
        calls = [
            (narrow, BATCH, SEQ),
            (narrow, _OTHER_BATCHES[0], _OTHER_SEQS[0]),
            *([({}, BATCH, SEQ)] if narrow else []),
        ]
        for windows, batch, seq in calls:
            sizes = {**self.released, **windows, "B": batch, "S": seq, "Past": seq}
            yield (
                sizes,
                observe(self.few(wide=not windows and bool(narrow)), batch, seq, products=True),
            )

    def fitter(self) -> Fitter:
        return Fitter(self.runs, self.singles, self.follows)

    def know(self, rounded: Mapping[str, Rounded]) -> None:
        """Add sizes that follow by rounding to those of every probe."""
        for name, size in rounded.items():
            for sizes in (self.released, *self.runs):
                sizes.setdefault(name, size.value(sizes))

    def wide(self, batch: int, seq: int) -> Sites:
        """What is seen with the windows that the configuration has."""
        released = {self.names[key]: self.released[self.names[key]] for key in self.windows}
        return self._observe(released, batch, seq)

    # -- running ---------------------------------------------------------------

    def _run(self) -> None:
        base = self._observe({}, BATCH, SEQ)
        self._add({}, BATCH, SEQ, base)
        for name, calls in (
            ("B", [(batch, SEQ) for batch in _OTHER_BATCHES]),
            ("S", [(BATCH, seq) for seq in _OTHER_SEQS]),
        ):
            for batch, seq in calls:
                seen = self._attempt({}, batch, seq)
                if seen is not None:
                    self.singles[name] = [self._add({}, batch, seq, seen)]
                    break
        failed = [name for name in self.numbers if not self._move(name)]
        # Such a size may have to move together with one that does not move at all.
        apart = self._doubtful if failed else []
        failed += apart
        while set(failed) - set(apart):
            left = self._follow(failed)
            if len(left) == len(failed):
                break
            failed = left
        self.stuck = [name for name in failed if name not in self.follows and name not in apart]
        self.singles = {name: at for name, at in self.singles.items() if name not in self.follows}
        for turn in range(_JOINT):
            self._joint(turn)
        self._even_out()

    def _even_out(self) -> None:
        """Where an axis does not resolve, a division may have left a remainder: change what moves it by factors of two instead."""
        fitter = self.fitter()
        axes = [
            (site, axis) for site, own in self.sites[0].items() for axis in range(len(own.shape))
        ]
        vectors = {tuple(sites[site].shape[axis] for sites in self.sites) for site, axis in axes}
        suspects = {
            name
            for vector in vectors
            if fitter.fit(vector) is None
            for name in fitter.moves(vector)
        }
        moved = False
        for name in [
            name
            for name in self._ways
            if name in suspects and name in self.singles and self._ways[name] is _odd
        ]:
            before = self.singles[name]
            if not self._move(name, (_even, _part)):
                continue
            moved = moved or self.singles[name] != before
        if moved:
            kept = [0, *sorted(at for single in self.singles.values() for at in single)]
            self.runs, self.sites = [self.runs[at] for at in kept], [self.sites[at] for at in kept]
            self.singles = {
                name: [kept.index(at) for at in single] for name, single in self.singles.items()
            }
            for turn in range(_JOINT):
                self._joint(turn)

    def _observe(self, numbers: Mapping[str, int], batch: int, seq: int) -> Sites:
        self.tried += 1
        return observe(self._build(numbers), batch, seq, products=True)

    def _build(self, numbers: Mapping[str, int]) -> nn.Module:
        """A model with other numbers for some sizes, its windows narrow unless they are among them."""
        narrow = {key: self.numbers[self.names[key]] for key in self.windows}
        config = changed(
            self.config, narrow | {self.keys[name]: number for name, number in numbers.items()}
        )
        model = build(config, self.model_class, self.real)
        return model if self.cut is None else shorter(model, *self.cut)

    def model(self, run: int) -> nn.Module:
        """The model of one of the probes."""
        return self._build(
            {
                name: number
                for name, number in self.runs[run].items()
                if self.numbers.get(name, number) != number
            }
        )

    def _attempt(
        self, numbers: Mapping[str, int], batch: int = BATCH, seq: int = SEQ
    ) -> Sites | None:
        """What is seen with other numbers; None where that does not build, run, or makes another model of it."""
        if self.tried >= _PATIENCE:
            return None
        try:
            followed = self._followed(numbers)
            seen = self._observe(followed, batch, seq)
        except Exception as error:
            self.error = error
            return None
        base = self.sites[0]
        if seen.keys() != base.keys():
            return None
        same = all(
            len(one.shape) == len(base[site].shape) and one.dtype == base[site].dtype
            for site, one in seen.items()
        )
        return seen if same else None

    def _followed(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """The numbers with what follows from them; ValueError where that is no whole number."""
        whole = {**self.numbers, **numbers}
        for _ in range(len(self.follows)):
            for name, expression in self.follows.items():
                value = expression.value(whole)
                if value.denominator != 1 or value < 1:
                    raise ValueError(f"{name} would be {value}")
                whole[name] = int(value)
        return {name: value for name, value in whole.items() if value != self.numbers[name]}

    def _add(self, numbers: Mapping[str, int], batch: int, seq: int, seen: Sites) -> int:
        self.runs.append({**self.numbers, **self._followed(numbers), "B": batch, "S": seq})
        self.sites.append(seen)
        return len(self.runs) - 1

    # -- one size at a time ------------------------------------------------------

    def _ways_of(self, name: str) -> Sequence[_Way]:
        return _NARROW if self.keys[name][-1] in table()["windows"] else _WAYS

    def _move(self, name: str, ways: Sequence[_Way] = ()) -> bool:
        """Change one size alone, or with what is known to follow; whether that could be done."""
        refused = unchanged = False
        for way in ways or self._ways_of(name):
            value = way(self.numbers[name], 0)
            if value == self.numbers[name] or value < 1:
                continue
            seen = self._attempt({name: value})
            if seen is not None:
                if any(seen[site].shape != own.shape for site, own in self.sites[0].items()):
                    self.singles[name] = [self._add({name: value}, BATCH, SEQ, seen)]
                    self._ways[name] = way
                    return True
                unchanged = True
                if refused and way not in _MULTIPLES:
                    self._doubtful.append(name)
                # What another number rounds up to may be the same where a size is rounded.
                if not re.search(table()["roundings"], self.keys[name][-1]):
                    return True
            refused = refused or (seen is None and way in _MULTIPLES)
        return unchanged

    def _follow(self, failed: Sequence[str]) -> list[str]:
        """Find one size that follows from others, so that most of those can change that could not; what is left of them."""
        best: tuple[int, str, Expr] | None = None
        hints = [(name, *hint) for name in failed for hint in self._hints(name, failed)]

        def outside(hint: tuple[str, str, Expr]) -> int:
            return len({hint[1], *hint[2].names} - set(failed))

        # What relates sizes that all refuse to change alone is likeliest to be why they do.
        hints.sort(
            key=lambda hint: (outside(hint), hint[1] not in self.derived, len(hint[2].names))
        )
        nearest = None
        for hint in hints[: 2 * _HINTS]:
            name, other, expression = hint
            if (
                other in self.follows
                or other in self.singles
                or expression.names & self.follows.keys()
            ):
                continue
            if nearest is not None and outside(hint) > nearest:
                break
            self.follows[other] = expression
            if self._tries(name):
                freed = 1 + sum(self._tries(one) for one in failed if one not in (name, other))
                if best is None or freed > best[0]:
                    best, nearest = (freed, other, expression), outside(hint)
            del self.follows[other]
            if best is not None and best[0] >= len(failed) - 1:
                break
        if best is None:
            return list(failed)
        self.follows[best[1]] = best[2]
        return [name for name in failed if name != best[1] and not self._move(name)]

    def _hints(self, name: str, failed: Sequence[str]) -> list[tuple[str, Expr]]:
        """Relations to try for one size: the likeliest, and those that are between sizes that do not change alone."""
        found = relations(self.numbers, name, self.derived)
        return [
            *found[:_HINTS],
            *(one for one in found[_HINTS:] if {one[0], *one[1].names} <= set(failed)),
        ]

    def _tries(self, name: str) -> bool:
        """Whether a size can be changed now to something that another model is built of."""
        seen = next(
            (
                seen
                for way in _WAYS[:3]
                if (seen := self._attempt({name: way(self.numbers[name], 0)})) is not None
            ),
            None,
        )
        return seen is not None and any(
            seen[site].shape != own.shape for site, own in self.sites[0].items()
        )

    # -- all at once ---------------------------------------------------------------

    def _joint(self, turn: int) -> None:
        """A probe in which as many sizes as will are changed at once, each to a number it had in no other probe."""
        names = [name for name in self._ways if name in self.singles]
        options = self._options(names, turn)
        batch, seq = _OTHER_BATCHES[turn + 1], _OTHER_SEQS[turn + 1]
        kept: dict[str, int] = {}
        self._until = self.tried + _JOINT_PATIENCE
        seen = self._grow(kept, options, batch, seq)
        if seen is not None:
            self._add(kept, batch, seq, seen)

    def _options(self, names: Sequence[str], turn: int) -> dict[str, list[int]]:
        """Numbers to give each size in a joint probe, the likeliest first; equal sizes get different ones.

        A size that could be changed in one way only because others limit it keeps to that way, so that the probe builds.
        """
        found: dict[str, list[int]] = {}
        for at, name in enumerate(names):
            number, way = self.numbers[name], self._ways[name]
            taken = {values[0] for other, values in found.items() if self.numbers[other] == number}
            if way is _odd:
                values = [
                    value
                    for i in range(len(_ODD))
                    if (value := _odd(number, turn + 1 + at + i)) not in taken
                ][:1]
            else:
                values = [way(number, turn)]
            first = way(number, 0)
            others = () if way is _next else (_part(number, 0), _even(number, 0))
            found[name] = [
                value
                for value in dict.fromkeys([*values, first, *others])
                if value > 0 and value != number
            ]
        return found

    def _grow(
        self, kept: dict[str, int], options: dict[str, list[int]], batch: int, seq: int
    ) -> Sites | None:
        """Take as many sizes as build together into ``kept``; what is seen with the last that did."""
        if self.tried >= self._until:
            return None
        seen = self._attempt(
            {**kept, **{name: values[0] for name, values in options.items() if values}}, batch, seq
        )
        if seen is not None:
            kept |= {name: values[0] for name, values in options.items() if values}
            return seen
        if len(options) == 1:
            ((name, values),) = options.items()
            for value in values[1:]:
                seen = self._attempt({**kept, name: value}, batch, seq)
                if seen is not None:
                    kept[name] = value
                    return seen
            return None
        names = list(options)
        half = len(names) // 2
        first = self._grow(kept, {name: options[name] for name in names[:half]}, batch, seq)
        second = self._grow(kept, {name: options[name] for name in names[half:]}, batch, seq)
        return second or first


_Way = Callable[[int, int], int]

_ODD, _EVEN = (3, 5, 7, 11, 9, 13), (2, 4, 8, 16)


def _odd(number: int, turn: int) -> int:
    return number * _ODD[turn % len(_ODD)]


def _even(number: int, turn: int) -> int:
    return number * _EVEN[turn % len(_EVEN)]


def _part(number: int, turn: int) -> int:
    parts = [by for by in (2, 4, 3, 8, 6) if number % by == 0]
    return number // parts[turn % len(parts)] if parts else number


def _prime(number: int, turn: int) -> int:
    """One of the primes above a number, well apart from each other."""
    found = number + max(1, number // 8) * (turn + 1)
    while any(found % by == 0 for by in range(2, int(found**0.5) + 1)):
        found += 1
    return found


def _above(number: int, turn: int) -> int:
    return number + 8 * (2 * turn + 1)


def _next(number: int, turn: int) -> int:
    return number + 1 + turn % 4


def _below(number: int, turn: int) -> int:
    return number - 1 - turn


#: Ways to other numbers. A multiple keeps whatever the number could be divided by, so it comes first.
_MULTIPLES: tuple[_Way, ...] = (_odd, _even, _part)
_WAYS: tuple[_Way, ...] = (*_MULTIPLES, _prime, _above, _below)

#: A window has to stay narrower than the call.
_NARROW: tuple[_Way, ...] = (_next,)
