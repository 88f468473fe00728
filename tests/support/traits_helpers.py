"""What the tests of traits share."""

from __future__ import annotations

from explorer.model.language_model import LanguageModel
from explorer.traits import traits


def found(model: LanguageModel) -> dict[str, str]:
    return {trait["name"]: trait["evidence"] for trait in traits(model)}
