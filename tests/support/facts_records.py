"""Facts records for tests that draw and render: real ones, of released checkpoints, made once a
run.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from explorer import vocabulary

#: What stands in for the contract's report, which takes a run of its own.
REPORT = {
    "checks": [
        {
            "name": "addends",
            "host": "model.layers[i]",
            "about": "layer_output",
            "passed": True,
            "detail": "input plus addends",
            "worst": 2.4e-07,
            "values": [f"{value.host}.{value.name}" for value in vocabulary.VALUES],
        },
        {
            "name": "reads",
            "host": "model.layers[i].mlp",
            "about": "mlp_output",
            "passed": True,
            "detail": "axes as named",
            "worst": None,
            "values": ["mlp.mlp_output"],
        },
    ],
    "passed": 2,
    "failed": 0,
}


@cache
def _made(family: str, checkpoint: str) -> dict[str, Any]:
    import explorer  # noqa: F401  before the engine
    from explorer.facts.record import facts

    return facts(family, checkpoint, REPORT, {"weights": "random, seed 0"})


def records(family: str, count: int = 2) -> list[dict[str, Any]]:
    """Records of the first ``count`` checkpoints of ``family``, or of its default; copies, so
    that a test may change them.
    """
    from explorer.facts.record import checkpoints

    return [copy.deepcopy(_made(family, checkpoint)) for checkpoint in checkpoints(family)[:count]]


@cache
def _drawn(family: str, place: int) -> dict[str, Any]:
    from explorer import load
    from explorer.facts.record import anatomy, checkpoints

    checkpoint = checkpoints(family)[place]
    return {"family": family, "checkpoint": checkpoint, **anatomy(load(checkpoint, weights=False))}


def drawn(family: str, place: int = 0) -> dict[str, Any]:
    """What a diagram is drawn from, of one of a family's checkpoints or of its default: a record
    without the rest, made faster; a copy, so that a test may change it.
    """
    return copy.deepcopy(_drawn(family, place))


def with_long_type(family: str, name: str = "attention_norm_output") -> dict[str, Any]:
    """A family's record in which one value's type has an axis too long for its place in the
    drawing.
    """
    (record,) = records(family, 1)
    for row in record["signature"]["values"]:
        if row["name"] == name:
            row["type"]["dims"][-1] = "NopeDim + RopeDim + StateDim"
    return record
