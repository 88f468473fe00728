"""Traits: what is particular about a model, decided by asking the built model.

What finding followed says much: which mixers there are, what a block adds, how a router scores. The rest is
asked of a run of shapes alone, pieces of which are run again with numbers: whether equal queries
differ from token to token, which function makes the neurons, what a token sees that stands far back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from explorer.traits.attention import attention
from explorer.traits.attention_core import attention_cores
from explorer.traits.catalogue import ENTRIES
from explorer.traits.mixers import block, mixers
from explorer.traits.mlp import mixture, mlp
from explorer.traits.norms_and_scales import norms, scales
from explorer.traits.position import position
from explorer.traits.probe import ModelProbe

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel


@dataclass(frozen=True)
class Trait:
    """One trait of one model: ``name``, ``label`` and ``meaning`` are the catalogue's, ``evidence`` is what this model showed."""

    name: str
    label: str
    meaning: str
    evidence: str


def traits(model: LanguageModel) -> list[dict[str, str]]:
    """The traits of a loaded model, which may be without weights, in the catalogue's order.

    Each is a mapping with ``name``, ``label``, ``meaning`` and ``evidence``.
    """
    found = dict(_asked(ModelProbe(model)))
    return [
        asdict(Trait(entry.name, entry.label, entry.meaning, found[entry.name]))
        for entry in ENTRIES
        if entry.name in found
    ]


def _asked(witness: ModelProbe) -> Iterator[tuple[str, str]]:
    """Every trait's name with its evidence."""
    attending = attention_cores(witness)
    yield from attention(witness, attending)
    yield from position(witness, attending)
    for rule in (mixers, norms, block, mlp, mixture, scales):
        yield from rule(witness)
