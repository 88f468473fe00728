"""Specimens: one small runnable model per family, trained or drawn from a seed and labelled so.

from explorer.specimens import build

specimen = build("qwen3_next")
specimen.weights      # "trained"
"""

from __future__ import annotations

from explorer.specimens.building import Specimen, build, config_of
from explorer.specimens.errors import SpecimenError, UnknownFamily
from explorer.specimens.recipes import FAMILIES

__all__ = ["FAMILIES", "Specimen", "SpecimenError", "UnknownFamily", "build", "config_of"]
