"""The invariants of the contract, one file per subject, in the order of the reports."""

from __future__ import annotations

from explorer.contract.checks import (
    acting,
    attention,
    dense,
    gradients,
    inputs,
    isolation,
    mixture,
    names,
    order,
    reading,
    recurrent,
    residual,
    writes,
)
from explorer.contract.registry import Invariant

#: The order of a report: a failure of a later subject often follows from one of an earlier.
_SUBJECTS = (
    names,
    reading,
    writes,
    order,
    residual,
    acting,
    inputs,
    attention,
    recurrent,
    mixture,
    dense,
    gradients,
    isolation,
)

_ALL: tuple[Invariant, ...] = tuple(each for file in _SUBJECTS for each in file.INVARIANTS)

#: Every invariant in the order of running; those that look at the model afterwards come last.
INVARIANTS = tuple(sorted(_ALL, key=lambda each: each.last))
