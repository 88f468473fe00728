"""The block diagram of a loaded model: the site's own element, from the facts of this very model."""

from __future__ import annotations

from typing import Any

from explorer.facts import anatomy
from explorer.widgets.diagram import element


def diagram(model: Any) -> dict[str, Any]:
    """The element's HTML for the page, with a key that tells whether it is another one than before."""
    record = {"family": model.family, "checkpoint": model.label, **anatomy(model)}
    return {"key": model.label, "html": element([record], card=False)}
