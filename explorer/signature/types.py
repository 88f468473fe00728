"""Types: a tensor's axes as expressions over the family's sizes, and its dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from explorer.signature.expressions import Expr
from explorer.signature.fitting import Rounded
from explorer.signature.observation import DECODE, Observation, TensorShape, TensorSite
from explorer.signature.probes import BATCH, SEQ, Probes
from explorer.signature.sizes import order

#: What the call decides.
CALL_NAMES = frozenset(("B", "S", "Past"))

#: Tokens of the second call with wide windows.
LONGER = SEQ + 2


@dataclass(frozen=True)
class Type:
    """A tensor; ``dtype`` is torch's name.

    ``axes`` are expressions; where none was found the bare number, if it was the same at all sizes
    tried, else None.
    """

    axes: tuple[Expr | int | None, ...]
    dtype: str

    def holds(self, seen: TensorShape, sizes: Mapping[str, int]) -> bool:
        """Whether a tensor of a model of these sizes is of this type."""
        if len(self.axes) != len(seen.shape) or self.dtype != seen.dtype:
            return False
        return all(
            axis is None or number == (axis if isinstance(axis, int) else axis.value(sizes))
            for axis, number in zip(self.axes, seen.shape, strict=True)
        )

    def json(self, sizes: Mapping[str, int], aliases: Mapping[Expr, str]) -> dict[str, Any]:
        """``{dims, numbers, dtype}``: axes as text, and the same with ``sizes`` filled in; an
        unresolved one is "?" and its number, if that is known."""
        numbers: list[int | str] = []
        dims: list[str] = []
        for axis in self.axes:
            if not isinstance(axis, Expr):
                dims.append("?" if axis is None else f"?{axis}")
                numbers.append("?" if axis is None else axis)
                continue
            dims.append(aliases.get(axis) or axis.text(order()))
            filled = axis.at(sizes)
            numbers.append(filled.text(order()) if filled.constant is None else filled.constant)
        return {"dims": dims, "numbers": numbers, "dtype": self.dtype}


@dataclass
class Types:
    """Every tensor that was seen, with its type.

    ``unresolved`` are the axes no expression was found for; ``rounded`` the sizes that are others
    rounded up.
    """

    by_site: dict[TensorSite, Type]
    unresolved: list[tuple[TensorSite, int, int | None]] = field(default_factory=list)
    rounded: dict[str, Rounded] = field(default_factory=dict)

    @classmethod
    def of(cls, probes: Probes) -> Types:
        """The types that agree with every probe."""
        fitter, first = probes.fitter(), probes.observations[0]
        fitter.fit_all(probes.vectors())
        for rounded in fitter.rounded.values():
            for sizes in (probes.model.released, *probes.runs):
                sizes.setdefault(rounded.name, rounded.value(sizes))
        wide = _with_wide_windows(probes)
        types = cls({}, rounded=fitter.rounded)
        for site, own in first.items():
            axes: list[Expr | int | None] = []
            for axis, number in enumerate(own.shape):
                seen = [observation[site].shape[axis] for observation in probes.observations]
                expression = fitter.fit(seen)
                if expression is not None and wide and all(site in one for one in wide):
                    lengths = [one[site].shape[axis] for one in wide]
                    expression = _capped(expression, lengths, probes)
                if expression is not None and _perhaps_a_fixed_size(expression, probes):
                    expression = None
                bare = number if len(set(seen)) == 1 and not probes.model.with_weights else None
                if expression is None:
                    types.unresolved.append((site, axis, bare))
                elif site.call == DECODE:
                    expression = expression.replaced({"S": Expr.name("Past")})
                axes.append(bare if expression is None else expression)
            types.by_site[site] = Type(tuple(axes), own.dtype)
        return types

    def checked_against(
        self,
        observation: Observation,
        sizes: Mapping[str, int],
        same_site: Callable[[TensorSite], TensorSite | None],
        depth: int,
    ) -> Types:
        """The same types, corrected by what the whole model shows at its own size.

        ``sizes`` are those of that run; ``same_site`` gives the site of these types that one of the
        whole model corresponds to, None where there is none; ``depth`` is how many blocks these
        types are of. As nothing but the depth differs, an axis that it contradicts grows with that,
        or is unresolved. A tensor of another dtype on some blocks has both, as
        ``bfloat16|float32``.
        """
        per_block = Expr.of({(("Layers", 1),): Fraction(1, depth)})
        seen: dict[TensorSite, list[TensorShape]] = {}
        for site, one in observation.items():
            own = same_site(site)
            if own is not None and own in self.by_site:
                seen.setdefault(own, []).append(one)
        types = Types({}, [*self.unresolved], self.rounded)
        for site, one in self.by_site.items():
            others = [other for other in seen.get(site, ()) if len(other.shape) == len(one.axes)]
            axes: list[Expr | int | None] = []
            for at, axis in enumerate(one.axes):
                numbers = {other.shape[at] for other in others}
                if (
                    isinstance(axis, Expr)
                    and axis.cap is None
                    and numbers == {(axis * per_block).value(sizes)}
                ):
                    axis = axis * per_block if depth != sizes["Layers"] else axis
                elif isinstance(axis, Expr) and numbers - {axis.value(sizes)}:
                    constant = len(numbers) == 1 and not axis.names & CALL_NAMES
                    axis = next(iter(numbers)) if constant else None
                    types.unresolved.append((site, at, axis))
                axes.append(axis)
            dtypes = dict.fromkeys([one.dtype, *(other.dtype for other in others)])
            types.by_site[site] = Type(tuple(axes), "|".join(dtypes))
        return types

    def hold(self, observation: Observation, sizes: Mapping[str, int]) -> bool:
        """Whether these are the types of every tensor of a model of these sizes."""
        return observation.keys() == self.by_site.keys() and all(
            self.by_site[site].holds(one, sizes) for site, one in observation.items()
        )

    def expressions(self) -> Iterator[Expr]:
        """Every axis that is resolved."""
        return (
            axis for one in self.by_site.values() for axis in one.axes if isinstance(axis, Expr)
        )

    @property
    def counts(self) -> tuple[int, int]:
        """How many axes there are and how many are resolved."""
        axes = sum(len(one.axes) for one in self.by_site.values())
        return axes, axes - len(self.unresolved)

    def at(self, call: str, path: str, what: str) -> Iterator[tuple[str, Type]]:
        """What there is of one module and kind, by name."""
        for site, found in self.by_site.items():
            if (site.call, site.path, site.what) == (call, path, what):
                yield site.name, found


def _perhaps_a_fixed_size(expression: Expr, probes: Probes) -> bool:
    """Whether a bare number may be that of a size that could not be changed."""
    number = expression.constant
    if number is None or number <= 1:
        return False
    fixed = [probes.model.numbers[name] for name in probes.fixed]
    return any(size > 1 and number % size == 0 for size in fixed)


def _with_wide_windows(probes: Probes) -> list[Observation]:
    """What is seen where every window is wider than the call, for two lengths of it; nothing where
    there are no windows."""
    if not probes.model.windows:
        return []
    return [probes.model.observe_with_wide_windows(BATCH, seq) for seq in (SEQ, LONGER)]


def _capped(expression: Expr, lengths: list[int], probes: Probes) -> Expr | None:
    """The smaller of two where an axis has another length as soon as the window is wider than the
    call.

    lengths: the axis's in calls of `SEQ` and of `LONGER` tokens with wide windows.
    """
    released = probes.model.released
    if [expression.value({**released, "B": BATCH, "S": seq}) for seq in (SEQ, LONGER)] == lengths:
        return expression
    if lengths[1] - lengths[0] != LONGER - SEQ:
        return None
    longest = Expr.name("S") + Expr.number(lengths[0] - SEQ)
    return Expr(longest.terms, expression)
