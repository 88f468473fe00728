"""The outcome of the contract as plain data: one row per invariant and host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from explorer import vocabulary


@dataclass(frozen=True)
class Check:
    """One invariant on one host.

    host is written as on the pages (``model.layers[i].mlp``). ``about`` states what is checked,
    ``detail`` what was measured. ``worst`` is the largest error, relative to the largest magnitude
    of the tensor it occurred in, or None where nothing was compared with a tolerance. ``values``
    are the values compared, as ``host.name``; of a failed check, those whose comparisons failed.
    """

    name: str
    host: str
    about: str
    passed: bool
    detail: str
    worst: float | None = None
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotApplicable:
    """An invariant that says nothing of a host of this model, and why, as a clause."""

    name: str
    host: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The outcome of the whole contract on one model; the three outcomes are counted apart."""

    checks: list[Check] = field(default_factory=list)
    passed: int = 0
    failed: int = 0
    not_applicable: list[NotApplicable] = field(default_factory=list)

    @classmethod
    def of(cls, checks: list[Check], not_applicable: Iterable[NotApplicable] = ()) -> Report:
        """Make the report of some checks."""
        passed = sum(check.passed for check in checks)
        return cls(checks, passed, len(checks) - passed, list(not_applicable))

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON types: ``checks`` and ``not_applicable`` with their fields, the
        numbers ``passed`` and ``failed``.
        """
        return {
            **asdict(self),
            "checks": [{**asdict(check), "values": list(check.values)} for check in self.checks],
        }


def value_names(values: Iterable[vocabulary.Value]) -> tuple[str, ...]:
    """Return values as ``host.name``, in the vocabulary's order."""
    chosen = set(values)
    return tuple(f"{value.host}.{value.name}" for value in vocabulary.VALUES if value in chosen)


def verified(checks: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the values, as ``host.name``, that a passed check compared and no failed one."""
    passed: set[str] = set()
    failed: set[str] = set()
    for check in checks:
        (passed if check["passed"] else failed).update(check["values"])
    return passed - failed
