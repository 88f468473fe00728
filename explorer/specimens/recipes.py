"""How each specimen is made: the generic small configuration, changed by a committed file."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from explorer.specimens import small
from explorer.specimens.errors import UnknownFamily

FOLDER = Path(__file__).parent

#: The families with notes and a page; every other decoder of transformers is built by rules.
FAMILIES = (
    "llama",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "gpt2",
    "gpt_neox",
    "gptj",
    "bloom",
    "opt",
    "gemma2",
    "olmo2",
    "cohere",
    "granite",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "mamba",
    "mamba2",
    "jamba",
    "nemotron_h",
    "falcon_h1",
    "recurrent_gemma",
    "lfm2",
    "kimi_linear",
    "flint",
)

#: Defaults of what a family's own file may leave out.
STD = 0.1
PROMPT = "In the beginning God created the heaven and the earth"


@dataclass(frozen=True)
class Recipe:
    """How a specimen is made.

    ``config`` are arguments of the configuration's class that come before the generic small ones.
    ``std`` and ``norm_std`` are the standard deviations of what is drawn with ``seed``; ``weights``
    is None where all weights are drawn.
    """

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
    """The recipe of ``family``, a decoder's model type: ``<family>.json``, else the generic one.

    Every key of the file may be left out. Raises UnknownFamily, with the nearest names, for others.
    """
    if family not in small.types():
        raise UnknownFamily(_unknown(str(family)))
    path = FOLDER / f"{family}.json"
    given = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    init = given.get("init", {})
    return Recipe(
        family=family,
        architecture=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family],
        config={
            name: value for name, value in given.get("config", {}).items() if name != "model_type"
        },
        seed=given.get("seed", 0),
        std=init.get("std", STD),
        norm_std=init.get("norm_std", STD),
        weights=FOLDER / given["weights"] if given.get("weights") else None,
        prompt=given.get("prompt", PROMPT),
    )


def _unknown(family: str) -> str:
    """Return why there is no such specimen, and which to use instead."""
    if (reason := small.why_excluded(family)) is not None:
        return (
            f"There is no specimen of the family {family!r}, which is {reason}; "
            "ask for a decoder, such as 'llama'."
        )
    known = small.types()
    same_start = sorted(
        (name for name in known if family and name.startswith(family)),
        key=lambda name: (name not in FAMILIES, name),
    )
    near = same_start or difflib.get_close_matches(family, known, n=1, cutoff=0.4)
    more = f"{', '.join(FAMILIES)} and {len(known) - len(FAMILIES)} more decoders of transformers"
    return f"There is no specimen of the family {family!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"there are {more}."
    )
