"""Traits: what is particular about a model, decided by tests of the built model.

Discovery knows which mixers there are, what a block adds and how a router scores. The rest is
tested on a recorded run of shapes, parts of which are run again with numbers: whether equal tokens
have equal queries, which function makes the neurons, which tokens a late token may attend to.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from explorer.traits.attention import attention
from explorer.traits.attention_core import attention_cores
from explorer.traits.catalogue import ENTRIES
from explorer.traits.evidence import Evidence
from explorer.traits.mixers import block, mixers
from explorer.traits.mixture import mixture
from explorer.traits.mlp import mlp
from explorer.traits.norms_and_scales import norms, scales
from explorer.traits.position import position
from explorer.traits.probe import ModelProbe

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel


@dataclass(frozen=True)
class Trait:
    """One trait of one model: the catalogue's name, label and meaning, and the model's evidence."""

    name: str
    label: str
    meaning: str
    evidence: str


def traits(model: LanguageModel) -> list[dict[str, str]]:
    """Return the traits of a loaded model, with or without weights, in the catalogue's order.

    Each is a mapping with ``name``, ``label``, ``meaning`` and ``evidence``.
    """
    found = dict(_tested(ModelProbe(model)))
    return [
        asdict(Trait(entry.name, entry.label, entry.meaning, found[entry.name]))
        for entry in ENTRIES
        if entry.name in found
    ]


def _tested(probe: ModelProbe) -> Evidence:
    cores = attention_cores(probe)
    yield from attention(probe, cores)
    yield from position(probe, cores)
    for rule in (mixers, norms, block, mlp, mixture, scales):
        yield from rule(probe)
