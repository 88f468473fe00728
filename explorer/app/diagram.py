"""The block diagram of a loaded model: the element of the site, made from this model's facts."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from explorer.app.axis_names import named_types, sizes_of
from explorer.facts.record import anatomy
from explorer.widgets.diagram import element

_numbers = itertools.count(1)
_drawn: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def diagram(model: Any) -> dict[str, Any]:
    """Return the element's HTML, with a key that differs for each loaded model.

    Two checkpoints may share a name. Made once per model, in the thread that runs models.
    """
    if model not in _drawn:
        found = anatomy(model)
        types = named_types(found["values"], sizes_of(model.hf.config))
        record = {
            "family": model.family,
            "checkpoint": model.label,
            **found,
            "signature": {"values": types},
        }
        _drawn[model] = {"key": str(next(_numbers)), "html": element([record], card=False)}
    return _drawn[model]
