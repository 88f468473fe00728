"""One block of a facts record, as the diagram's layouts ask for it: rows, types, texts."""

from __future__ import annotations

import random
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from explorer.vocabulary import HOSTS
from explorer.vocabulary.formatting import short_dtype
from explorer.widgets.diagram.types import Type, type_of

Record = Mapping[str, Any]


def host_key(path: str) -> str:
    """The short name of a host: ``model.layers[i].mlp`` is ``mlp``, ``model.layers[i]`` is ``layers``."""
    return path.rpartition(".")[2].partition("[")[0]


def attribute(host: str) -> str:
    """What a block calls a host: kinds of one thing, such as ``ssd`` and ``selective_scan``, are all its ``mixer``."""
    return HOSTS[host].attribute if host in HOSTS and HOSTS[host].mixer else host


@dataclass(frozen=True)
class Part:
    """One readable value of the block: where it hangs and its row in the record."""

    host: str
    name: str
    row: Record

    @property
    def derived(self) -> bool:
        return not self.row.get("writable", True)

    @property
    def key(self) -> str:
        return f"{self.host}.{self.name}"

    @property
    def label(self) -> str:
        return f"{self.name}: {self.row['layout']} [{' '.join(self.row['dims'])}]"


@dataclass(frozen=True)
class Turn:
    """A stretch of the stream: ``after`` so many steps, the sublayers that read it there, and the step at its end.

    The step's ``kind`` is add (of ``adds``), scale or shift (by the number or the parameter ``by``; a list: a number for each
    block) or norm (the module ``by``).
    """

    after: int
    kind: str
    by: float | str | list[float] = ""
    reads: list[Record] = field(default_factory=list)
    adds: list[Record] = field(default_factory=list)

    @property
    def description(self) -> str:
        """The step in a few signs, where it is no add."""
        if isinstance(self.by, list):  # a number of each block's own
            by = f"{min(self.by):.4g} … {max(self.by):.4g}"
        else:
            by = self.by.rpartition(".")[2] if isinstance(self.by, str) else f"{self.by:.4g}"
        return {"scale": f"× {by}", "shift": f"+ {by}", "norm": by}[self.kind]


class Block:
    """A distinct block shape of a record.

    ``sublayers`` are the record's, in order; ``part(host, name)`` is a value this
    block has, or None.
    """

    def __init__(self, record: Record, index: int) -> None:
        self.record = record
        self.facts: Record = record["blocks"][index]
        self.sublayers: Sequence[Record] = self.facts["sublayers"]

    @property
    def first(self) -> int:
        return self.facts["layers"][0]

    @cached_property
    def rows(self) -> dict[tuple[str, str], Record]:
        return {
            (host_key(row["host"]), row["name"]): row
            for row in self.record["values"]
            if row["layers"] is None or self.first in row["layers"]
        }

    @cached_property
    def typed(self) -> dict[tuple[str, str], Record]:
        """The type that the record's signature has of each value of this block, where it has one."""
        return {
            (host_key(row["host"]), row["name"]): row["type"]
            for row in self.record.get("signature", {}).get("values", ())
            if not row["layers"] or self.first in row["layers"]
        }

    @cached_property
    def usual_dtype(self) -> str:
        """The dtype that goes without saying: the model's, or, where a record does not say that, its embedding's."""
        embedding = self.rows.get(("model", "token_embeddings"), {})
        return short_dtype(
            self.record.get("signature", {}).get("dtype") or embedding.get("dtype") or ""
        )

    def part(self, host: str, name: str) -> Part | None:
        row = self.rows.get((attribute(host), name))
        return Part(attribute(host), name, row) if row else None

    def parts(self, host: str, names: Iterable[str]) -> list[Part]:
        found = (self.part(host, name) for name in names)
        return [part for part in found if part]

    def rest(self, sub: Record, drawn: Container[str]) -> list[Part]:
        """The sublayer's values, those of its shared expert included, that ``drawn`` lacks; its addend is not among them."""
        found = self.parts(sub["host"], [name for name in sub["values"] if name != sub["output"]])
        if sub["host"] == "mlp":
            found += [
                Part(host, name, row)
                for (host, name), row in self.rows.items()
                if host == "shared_experts"
            ]
        return [part for part in found if part.key not in drawn]

    def addend(self, sub: Record) -> str:
        """The name that live marks know a sublayer's addend by: with its host where it stands beside attention."""
        beside = (
            sum(other["output"] == sub["output"] for other in self.sublayers) > 1
            and sub["host"] != "self_attn"
        )
        return f"{attribute(sub['host'])}.{sub['output']}" if beside else sub["output"]

    def adds(self, sub: Record) -> str:
        """The name to write at a sublayer's addend: with its host where another's is called the same."""
        same = sum(other["output"] == sub["output"] for other in self.sublayers) > 1
        return f"{attribute(sub['host'])}.{sub['output']}" if same else sub["output"]

    def type(self, part: Part, *others: Part, with_dtype: bool = False) -> Type:
        """The part's type, and that of those ``others`` that have the same; its dtype is written when it is unusual, or when ``with_dtype``."""
        kind = self._type(part, with_dtype)
        return kind.also(other.key for other in others if self._type(other, with_dtype) == kind)

    def _type(self, part: Part, with_dtype: bool) -> Type:
        kind = type_of(part.row, self.typed.get((part.host, part.name)), part.key, self.first)
        return kind.plain() if not with_dtype and kind.dtype == self.usual_dtype else kind

    def title(self) -> str:
        """The block in words: its sublayers' titles, beside each other where they read the same stream."""
        return self.facts["title"]

    def turns(self) -> list[Turn]:
        """The block down its stream: who reads it between two steps, and what the step that follows does to it."""
        found = [
            Turn(number, step["kind"], step.get("by", ""))
            for number, step in enumerate(self.facts["stream"])
        ]
        adds = [turn for turn in found if turn.kind == "add"]
        for sub in self.sublayers:
            added = adds[sub["turn"] - 1]
            # What reads the stream at several points is drawn where it last can.
            (added if sub["stage"] is None else found[sub["stage"]]).reads.append(sub)
            added.adds.append(sub)
        return found

    @property
    def mid(self) -> int | None:
        """After how many steps the stream is ``layer_mid``, None where the block has none."""
        return self.facts["mid"]


def shapes(record: Record) -> list[Block]:
    """The distinct block shapes of a record, by their first block."""
    order = sorted(range(len(record["blocks"])), key=lambda i: record["blocks"][i]["layers"][0])
    return [Block(record, index) for index in order]


#: What a line of types calls values whose names are long there.
_SHORT = {
    "attention_queries": "q",
    "attention_keys": "k",
    "attention_values": "v",
    "decays": "g",
    "betas": "β",
    "recurrent_gate": "a",
    "skip": "D",
    "state_attention": "M",
}


def types_line(block: Block, parts: Iterable[Part]) -> list[tuple[str, Type]]:
    """Captions with types, for one line under several pills: ``("q, k", type)``, those of one type together."""
    found: dict[Type, list[Part]] = {}
    for part in parts:
        found.setdefault(block.type(part), []).append(part)
    return [
        (", ".join(_caption(part) for part in alike), block.type(*alike))
        for alike in found.values()
    ]


def _caption(part: Part) -> str:
    return _SHORT.get(part.name) or re.sub("^(router|expert|mlp)_(?!output)", "", part.name)


def lit_cells(count: int, chosen: int) -> list[int]:
    """Which cells of the field stand for the chosen experts where no token is selected: scattered, always the same."""
    return sorted(random.Random(count).sample(range(count), min(chosen, count)))
