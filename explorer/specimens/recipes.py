"""The committed description of each specimen: configuration, seed, weights file, prompt."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from explorer.specimens.errors import UnknownFamily

FOLDER = Path(__file__).parent
FAMILIES = ("llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")


@dataclass(frozen=True)
class Recipe:
    """How a specimen is made. ``weights`` is None where it is drawn from ``seed``."""

    family: str
    architecture: str
    config: dict[str, Any]
    seed: int
    std: float
    norm_std: float
    weights: Path | None
    prompt: str

    @property
    def measured_path(self) -> Path:
        return FOLDER / f"{self.family}.measured.json"


@cache
def recipe(family: str) -> Recipe:
    """The recipe of ``family``. Raises UnknownFamily, naming the nearest, for any other name."""
    if family not in FAMILIES:
        begun = [known for known in FAMILIES if known.startswith(str(family))] if family else []
        near = begun or difflib.get_close_matches(str(family), FAMILIES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(FAMILIES)}."
        raise UnknownFamily(f"There is no specimen of the family {family!r}; {hint}")
    data = json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))
    return Recipe(
        family=family,
        architecture=data["architecture"],
        config=data["config"],
        seed=data["seed"],
        std=data["init"]["std"],
        norm_std=data["init"]["norm_std"],
        weights=FOLDER / data["weights"] if data["weights"] else None,
        prompt=data["prompt"],
    )
