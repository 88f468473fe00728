"""The block diagram of a loaded model: the site's own element, from the facts of this very
model.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from explorer.facts.record import anatomy
from explorer.widgets.diagram.diagram import element

_numbers = itertools.count(1)
_drawn: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def diagram(model: Any) -> dict[str, Any]:
    """The element's HTML for the page, with a key that tells whether it is another one than before.

    Each loaded model has a key of its own: two checkpoints may go by one name. Made once
    per model, in the thread that runs models.
    """
    if model not in _drawn:
        record = {"family": model.family, "checkpoint": model.label, **anatomy(model)}
        _drawn[model] = {"key": str(next(_numbers)), "html": element([record], card=False)}
    return _drawn[model]
