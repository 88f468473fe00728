"""Types: a tensor's axes as expressions over the family's sizes, and its dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from explorer.signature.expressions import Expr
from explorer.signature.fitting import Rounded
from explorer.signature.probes import BATCH, SEQ, Probes
from explorer.signature.running import DECODE, Seen, Site, Sites
from explorer.signature.sizes import order

#: What the call decides.
CALL_NAMES = frozenset(("B", "S", "Past"))

#: Tokens of the second call with wide windows.
LONGER = SEQ + 2


@dataclass(frozen=True)
class Type:
    """A tensor; ``dtype`` is torch's name.

    ``axes`` are expressions; where none was found the bare number, if it was the same at all sizes tried, else None.
    """

    axes: tuple[Expr | int | None, ...]
    dtype: str

    def holds(self, seen: Seen, sizes: Mapping[str, int]) -> bool:
        """Whether a tensor of a model of these sizes is of this type."""
        if len(self.axes) != len(seen.shape) or self.dtype != seen.dtype:
            return False
        return all(
            axis is None or number == (axis if isinstance(axis, int) else axis.value(sizes))
            for axis, number in zip(self.axes, seen.shape, strict=True)
        )

    def json(self, sizes: Mapping[str, int], aliases: Mapping[Expr, str]) -> dict[str, Any]:
        """``{dims, numbers, dtype}``: axes as text, and the same with ``sizes`` filled in; an unresolved one is "?" and its number, if that is known."""
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

    ``unresolved`` are the axes no expression was found for; ``rounded`` the sizes that are others rounded up.
    """

    found: dict[Site, Type]
    unresolved: list[tuple[Site, int, int | None]] = field(default_factory=list)
    rounded: dict[str, Rounded] = field(default_factory=dict)

    @classmethod
    def of(cls, probes: Probes) -> Types:
        fitter, base = probes.fitter(), probes.sites[0]
        wide = _without_windows(probes)
        types = cls({}, rounded=fitter.rounded)
        for site, own in base.items():
            axes: list[Expr | int | None] = []
            for axis, number in enumerate(own.shape):
                seen = [sites[site].shape[axis] for sites in probes.sites]
                expression = fitter.fit(seen)
                probes.know(types.rounded)
                if expression is not None and all(site in sites for sites in wide) and wide:
                    expression = _capped(
                        expression, [sites[site].shape[axis] for sites in wide], probes
                    )
                if expression is not None and _stuck(expression, probes):
                    expression = None
                bare = number if len(set(seen)) == 1 and not probes.real else None
                if expression is None:
                    types.unresolved.append((site, axis, bare))
                elif site.call == DECODE:
                    expression = expression.replaced({"S": Expr.name("Past")})
                axes.append(bare if expression is None else expression)
            types.found[site] = Type(tuple(axes), own.dtype)
        return types

    def held_to(
        self,
        whole: Sites,
        sizes: Mapping[str, int],
        alike: Callable[[Site], Site | None],
        depth: int,
    ) -> Types:
        """The same types, held to what the whole model shows at its own size.

        ``sizes`` are those of that run, ``alike`` the site of these types that one of it is like, None where there is none,
        ``depth`` how many blocks these types are of. As nothing but the depth differs, an axis that it contradicts grows
        with that, or is taken back. A tensor of another dtype on some blocks has both, as ``bfloat16|float32``.
        """
        deeper = Expr.of({(("Layers", 1),): Fraction(1, depth)})
        seen: dict[Site, list[Seen]] = {}
        for site, one in whole.items():
            if (own := alike(site)) in self.found:
                seen.setdefault(own, []).append(one)
        types = Types({}, [*self.unresolved], self.rounded)
        for site, one in self.found.items():
            found = [other for other in seen.get(site, ()) if len(other.shape) == len(one.axes)]
            axes: list[Expr | int | None] = []
            for at, axis in enumerate(one.axes):
                numbers = {other.shape[at] for other in found}
                if (
                    isinstance(axis, Expr)
                    and numbers == {(axis * deeper).value(sizes)}
                    and axis.cap is None
                ):
                    axis = axis * deeper if depth != sizes["Layers"] else axis
                elif isinstance(axis, Expr) and numbers - {axis.value(sizes)}:
                    axis = (
                        next(iter(numbers))
                        if len(numbers) == 1 and not axis.names & CALL_NAMES
                        else None
                    )
                    types.unresolved.append((site, at, axis))
                axes.append(axis)
            dtypes = dict.fromkeys([one.dtype, *(other.dtype for other in found)])
            types.found[site] = Type(tuple(axes), "|".join(dtypes))
        return types

    def elsewhere(
        self, probes: Probes, config: Any, model_class: type, cut: tuple[str, int] | None
    ) -> Probes | None:
        """The probes these types are of, for another configuration's sizes; None where it builds a model that does not have these types."""
        other = probes.elsewhere(config, model_class, cut)
        if other is None:
            return None
        other.know(self.rounded)
        other.seen = 0
        try:
            for sizes, seen in other.looks():
                if seen.keys() != self.found.keys() or not all(
                    self.found[site].holds(one, sizes) for site, one in seen.items()
                ):
                    return None
                other.seen += 1
        except Exception:
            return None
        return other

    @property
    def counts(self) -> tuple[int, int]:
        """How many axes there are and how many are resolved."""
        axes = sum(len(one.axes) for one in self.found.values())
        return axes, axes - len(self.unresolved)

    def at(self, call: str, path: str, what: str) -> Iterator[tuple[str, Type]]:
        """What there is of one module and kind, by name."""
        for site, found in self.found.items():
            if (site.call, site.path, site.what) == (call, path, what):
                yield site.name, found


def _stuck(expression: Expr, probes: Probes) -> bool:
    """Whether a bare number may be that of a size that could not be changed."""
    number = expression.constant
    return (
        number is not None
        and number > 1
        and any((own := probes.numbers[name]) > 1 and number % own == 0 for name in probes.stuck)
    )


def _without_windows(probes: Probes) -> list[Sites]:
    """What is seen where every window is wider than the call, for two lengths of it; nothing where there are no windows."""
    return [probes.wide(BATCH, seq) for seq in (SEQ, LONGER)] if probes.windows else []


def _capped(expression: Expr, numbers: list[int], probes: Probes) -> Expr | None:
    """The smaller of two where an axis has another length as soon as the window is wider than the call.

    numbers: the axis's in calls of `SEQ` and of `LONGER` tokens with wide windows.
    """
    if [
        expression.value({**probes.released, "B": BATCH, "S": seq}) for seq in (SEQ, LONGER)
    ] == numbers:
        return expression
    if numbers[1] - numbers[0] != LONGER - SEQ:
        return None
    longest = Expr.name("S") + Expr.number(numbers[0] - SEQ)
    return Expr(longest.terms, expression)
