"""Costs as formulas over generics: parameters, bytes of weights and caches, operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from explorer.accounting import counts as accounting
from explorer.accounting.parameter_roles import PARTS, Parts
from explorer.signature.cost_terms import (
    UnknownCost,
    bytes_of,
    enclosing_paths,
    label_kinds,
    product_operations,
    value_or_unknown,
)
from explorer.signature.expressions import Expr, product, total
from explorer.signature.observation import PREFILL, TensorSite
from explorer.signature.sizes import order, per_block
from explorer.signature.types import Type, Types

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Json = dict[str, Any]

#: What the operations counted are, for whoever prints the number.
COUNTED = (
    "matrix products and convolutions of one decoding step, "
    "a multiplication and an addition counted as two"
)

#: The part of the operations that grows with the context: queries by keys, probabilities by values.
OVER_CONTEXT = "attention over the context"

#: Tokens in the cache and the new one together, in formulas.
CONTEXT = "T"

#: The shortest context plotted, its largest share of the longest, and the longest by default.
_SHORTEST, _SHARE, _LONGEST = 1024, 16, 1 << 17


@dataclass
class Costs:
    """Formulas of one model.

    ``few`` has one block of each kind and is what ``types`` are of; ``blocks`` is the block list's
    path; ``layers`` are, for each block of ``few``, those of ``whole`` that are so; ``sizes`` the
    numbers of the generics, to which the kinds of blocks are added.
    """

    whole: PreTrainedModel
    few: PreTrainedModel
    types: Types
    blocks: str
    layers: Sequence[Sequence[int]]
    sizes: dict[str, int]
    counts: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        firsts = [
            at for at, layers in enumerate(self.layers) if layers and layers not in self.layers[:at]
        ]
        lists = [
            values
            for values in per_block(self.few.config).values()
            if all(isinstance(one, str) for one in values)
        ]
        said = ["_".join(values[at] for values in lists) for at in firsts]
        labels = label_kinds(
            self.few, [self.few.get_submodule(f"{self.blocks}.{at}") for at in firsts], said
        )
        self.counts = {
            at: "Layers" if len(firsts) == 1 else f"{label}Layers"
            for at, label in zip(firsts, labels, strict=True)
        }
        self.sizes |= {name: len(self.layers[at]) for at, name in self.counts.items()}
        try:
            self.parts = Parts(self.whole, accounting.run(self.whole))
        except Exception:
            self.parts = Parts(self.whole, None)

    # -- everything ---------------------------------------------------------------

    def json(self) -> Json:
        """``{parameters, weights, cache, flops, kinds}``; what cannot be had is ``{unknown:
        reason}``.

        ``over``, of the cache and of the operations, is what they come to for one sequence at some
        lengths of the context: rows of the length, what grows with it and what does not.
        """
        return {
            "kinds": [
                {"name": name, "number": self.sizes[name], "layers": list(self.layers[at])}
                for at, name in self.counts.items()
                if name != "Layers"
            ],
            "parameters": value_or_unknown(self.parameters),
            "weights": value_or_unknown(self.weights),
            "cache": value_or_unknown(self.cache),
            "flops": value_or_unknown(self.flops),
        }

    # -- parameters ---------------------------------------------------------------

    def parameters(self) -> Json:
        """Total, active and by part, as `explorer.accounting.counts` counts them."""
        every: dict[str, list[Expr]] = {}
        used: dict[str, list[Expr]] = {}
        for part, _, count, active in self._parameters():
            every.setdefault(part, []).append(count)
            used.setdefault(part, []).append(active)
        rows = [
            {
                "part": part,
                **self._formula(total(every[part])),
                "active": self._formula(total(used[part])),
            }
            for part in PARTS
            if part in every
        ]
        held: Counter[str] = Counter()
        for path, parameter in self.whole.named_parameters():
            held[self.parts.part(path, parameter)] += parameter.numel()
        if held != {row["part"]: row["number"] for row in rows}:
            raise UnknownCost("what the formulas come to is not what the model has")
        whole = self._formula(total(one for counts in every.values() for one in counts))
        if accounting.parameters(self.whole)["active"] is None:  # not told, rather than all of them
            return {
                **whole,
                "by_part": [
                    {key: said for key, said in row.items() if key != "active"} for row in rows
                ],
            }
        return {
            **whole,
            "active": self._formula(total(one for counts in used.values() for one in counts)),
            "by_part": rows,
        }

    def weights(self) -> list[Json]:
        """Bytes of the parameters, by dtype."""
        by_dtype: dict[str, list[Expr]] = {}
        for _, dtype, count, _ in self._parameters():
            by_dtype.setdefault(dtype, []).append(count * Expr.number(bytes_of(dtype)))
        return [
            {"dtype": dtype, **self._formula(total(counts))} for dtype, counts in by_dtype.items()
        ]

    def _parameters(self) -> list[tuple[str, str, Expr, Expr]]:
        """Part, dtype, count and active count of every parameter, over all blocks that have it; one
        shared by two modules once."""
        found: dict[tuple[str, str, str, Expr, Expr], list[int | None]] = {}
        own = dict(self.whole.named_parameters())
        for path, parameter in self.few.named_parameters():
            owner, _, name = path.rpartition(".")
            at = self._block(owner)
            if at is not None and at not in self.counts:
                continue
            one = self.types.by_site[TensorSite("", owner, "parameter", name)]
            count = self._size(one, path)
            here = (
                path
                if at is None
                else f"{self.blocks}.{self.layers[at][0]}."
                f"{path.removeprefix(f'{self.blocks}.{at}.')}"
            )
            part = self.parts.part(here, own.get(here, parameter))
            active = count * self._share(here, owner, one) if part == "routed experts" else count
            inner = path if at is None else path.removeprefix(f"{self.blocks}.{at}.")
            found.setdefault((part, str(one.dtype), inner, count, active), []).append(at)
        return [
            (part, dtype, count * self._times(where), active * self._times(where))
            for (part, dtype, _, count, active), where in found.items()
        ]

    def _share(self, here: str, owner: str, one: Type) -> Expr:
        """Which part of an expert's parameters a token uses."""
        experts, chosen = self.parts.routing(here)
        if chosen is None:
            raise UnknownCost("how many experts a token chooses is not known")
        every = one.axes[0]
        integers = [
            other.axes[-1]
            for path in enclosing_paths(owner)
            for site, other in self.types.by_site.items()
            if site[:3] == (PREFILL, path, "in") and other.dtype.startswith("int")
        ]
        for slots in integers:
            if (
                isinstance(slots, Expr)
                and isinstance(every, Expr)
                and len(every.terms) == 1
                and slots.names <= self.sizes.keys()
                and (slots.value(self.sizes), every.value(self.sizes)) == (chosen, experts)
            ):
                ((powers, factor),) = every.terms
                return slots * Expr.of(
                    {tuple((name, -power) for name, power in powers): 1 / factor}
                )
        return Expr.number(Fraction(chosen, experts))

    # -- what a call keeps ------------------------------------------------------------

    def cache(self) -> Json:
        """Bytes kept after ``S`` tokens of ``B`` sequences, by kind of block and whether they
        grow."""
        try:
            accounting.cache_sizes(self.whole)
        except (
            ValueError
        ) as error:  # something is kept that a formula over what the cache holds would leave out
            raise UnknownCost(str(error)) from error
        where: dict[str, Expr] = {}
        rows: dict[tuple[str, bool], list[Expr]] = {}
        for at, name in self.counts.items():
            prefix = f"{self.blocks}.{at}"
            for site, one in self.types.by_site.items():
                held = site.what == "held" and f"{site.path}.".startswith(f"{prefix}.")
                if site.call == PREFILL and (held or (site.what, site.path) == ("cache", str(at))):
                    size = (
                        self._size(one, site.name, where, "Held")
                        * Expr.number(bytes_of(one.dtype))
                        * Expr.name(name)
                    )
                    grows = bool(size.names & {"S", *where})
                    rows.setdefault((name, grows), []).append(size)
        parts = [
            {"blocks": name, "grows": grows, **self._formula(total(sizes))}
            for (name, grows), sizes in rows.items()
        ]
        whole = total(one for sizes in rows.values() for one in sizes)
        return {
            **self._formula(whole),
            "by_kind": parts,
            "where": self._where(where),
            "over": self._over(whole, "S", where),
        }

    # -- operations -------------------------------------------------------------------

    def flops(self) -> Json:
        """Operations for one more token where the context, that token counted, is ``T`` tokens."""
        where: dict[str, Expr] = {}
        parts: dict[str, list[Expr]] = {}
        for site, left in self.types.by_site.items():
            if site.what != "matmul" or not site.name.endswith(".left"):
                continue
            at = self._block(site.path)
            if at is not None and at not in self.counts:
                continue
            stem = site.name.removesuffix("left")
            right, out = (
                self.types.by_site[site._replace(name=f"{stem}{side}")] for side in ("right", "out")
            )
            kind = stem.split(".", 1)[1].rstrip(".")
            axes = [
                [self._axis(axis, site.path, where, "Seen") for axis in one.axes]
                for one in (left, right, out)
            ]
            count = product_operations(kind, *axes) * self._times([at])
            parts.setdefault(self._part_of(site.path, kind, at), []).append(count)
        if not parts:
            raise UnknownCost("no decoding step was run")
        context = {"Past": Expr.name(CONTEXT) + Expr.number(-1), "B": Expr.number(1)}
        summed = {part: total(counts).replaced(context) for part, counts in parts.items()}
        rows = [
            {"part": part, **self._formula(summed[part])}
            for part in (*PARTS, OVER_CONTEXT)
            if part in summed
        ]
        whole = total(summed.values())
        seen = {name: expression.replaced(context) for name, expression in where.items()}
        return {
            **self._formula(whole),
            "by_part": rows,
            "where": self._where(where, context),
            "counted": COUNTED,
            "over": self._over(whole, CONTEXT, seen),
        }

    def _part_of(self, path: str, kind: str, at: int | None) -> str:
        inner = path.removeprefix(f"{self.blocks}.{at}").lstrip(".")
        here = path if at is None else f"{self.blocks}.{self.layers[at][0]}.{inner}".rstrip(".")
        mixer = next(
            (one for one in (*enclosing_paths(here), here) if one in self.parts.mixers), None
        )
        if (
            kind.endswith(("bmm", "baddbmm"))
            and mixer is not None
            and self.parts.mixers[mixer] == "attention"
        ):
            return OVER_CONTEXT
        module = self.whole.get_submodule(here)
        if module is self.whole.get_output_embeddings():
            return "head"
        name, parameter = next(iter(module.named_parameters()), (None, None))
        if name is None or parameter is None:
            return "other"
        return self.parts.part(f"{here}.{name}".lstrip("."), parameter)

    # -- formulas ---------------------------------------------------------------------

    def _formula(self, expression: Expr) -> Json:
        """``{formula, numbers, number}``: with names, with this model's sizes, and the number where
        nothing else is in it."""
        expression = self._gathered(expression)
        filled = expression.at(self.sizes)
        constant = filled.constant
        return {
            "formula": expression.text(order()),
            "numbers": filled.text(order()),
            "number": constant,
        }

    def _over(self, whole: Expr, length: str, where: Mapping[str, Expr]) -> list[list[int]]:
        """Rows of a length of the context, what grows with it and what does not, of one sequence;
        lengths double up to the longest."""
        longest = self.sizes.get("MaxSeq", _LONGEST)
        shortest = min(_SHORTEST, longest // _SHARE)
        lengths = [
            tokens
            for at in range(longest.bit_length())
            if shortest <= (tokens := 1 << at) < longest
        ]
        growing = Expr.of(
            (powers, factor)
            for powers, factor in whole.terms
            if {name for name, _ in powers} & {length, *where}
        )
        found = []
        for tokens in [*lengths, longest]:
            sizes = {**self.sizes, "B": 1, length: tokens}
            sizes |= {name: int(expression.value(sizes)) for name, expression in where.items()}
            more, every = int(growing.value(sizes)), int(whole.value(sizes))
            found.append([tokens, more, every - more])
        return found

    def _gathered(self, expression: Expr) -> Expr:
        """The same with ``Layers`` for what every kind of block has as much of."""
        kinds = set(self.counts.values())
        apart: dict[tuple, dict[str, Any]] = {}
        for powers, factor in expression.terms:
            own = [name for name, _ in powers if name in kinds]
            if len(own) == 1 and len(kinds) > 1:
                apart.setdefault((tuple(one for one in powers if one[0] != own[0]), factor), {})[
                    own[0]
                ] = powers
        found = list(expression.terms)
        for (rest, factor), by_kind in apart.items():
            if by_kind.keys() == kinds:
                found = [term for term in found if term[0] not in by_kind.values()]
                found.append((tuple(sorted((*rest, ("Layers", 1)))), factor))
        return Expr.of(found)

    def _where(self, where: Mapping[str, Any], context: Mapping[str, Expr] | None = None) -> Json:
        """What the names stand for that are the smaller of two sizes."""
        found = {}
        for name, expression in where.items():
            expression = expression.replaced(context or {})
            found[name] = {
                "formula": expression.text(order()),
                "numbers": expression.at(self.sizes).text(order()),
            }
        return found

    def _axis(self, axis: Expr | int | None, at: str, where: dict[str, Any], word: str) -> Expr:
        if not isinstance(axis, Expr):
            raise UnknownCost(f"an axis of {at} did not resolve")
        if axis.cap is None:
            return axis
        name = next((name for name, known in where.items() if known == axis), None)
        if name is None:
            name = word if not where else f"{word}{len(where) + 1}"
            where[name] = axis
        return Expr.name(name)

    def _size(
        self, one: Type, at: str, where: dict[str, Any] | None = None, word: str = ""
    ) -> Expr:
        return product(
            self._axis(axis, at, {} if where is None else where, word) for axis in one.axes
        )

    def _block(self, path: str) -> int | None:
        rest = path.removeprefix(f"{self.blocks}.")
        return None if rest == path else int(rest.partition(".")[0])

    def _times(self, where: Sequence[int | None]) -> Expr:
        """How many blocks there are of these kinds: ``Layers`` where they are all of them."""
        if where == [None]:
            return Expr.number(1)
        kinds = {self.counts[at] for at in where if at is not None}
        if kinds == set(self.counts.values()):
            return Expr.name("Layers")
        return total(Expr.name(name) for name in kinds)
