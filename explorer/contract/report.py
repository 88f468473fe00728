"""What a run of the contract says: one row per law and host, plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from explorer import vocabulary


@dataclass(frozen=True)
class Check:
    """One law on one host.

    host is written as pages write it (``model.layers[i].mlp``). ``about`` says what is
    proven, ``detail`` what was measured; ``worst`` is the largest error met, relative to
    the largest number of the tensor it was met in, or None where nothing numeric was compared.
    ``values`` are the values compared, as ``host.name``; where the check failed, those the failed comparisons were of.
    """

    name: str
    host: str
    about: str
    passed: bool
    detail: str
    worst: float | None = None
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The outcome of the whole contract on one model."""

    checks: list[Check] = field(default_factory=list)
    passed: int = 0
    failed: int = 0

    @classmethod
    def of(cls, checks: list[Check]) -> Report:
        passed = sum(check.passed for check in checks)
        return cls(checks, passed, len(checks) - passed)

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    def to_json(self) -> dict[str, Any]:
        """``{checks: [{name, host, about, passed, detail, worst, values}], passed, failed}``."""
        return {
            **asdict(self),
            "checks": [{**asdict(check), "values": list(check.values)} for check in self.checks],
        }


def named(values: Iterable[vocabulary.Value]) -> tuple[str, ...]:
    """Values as a check names them, in the vocabulary's order."""
    there = set(values)
    return tuple(f"{value.host}.{value.name}" for value in vocabulary.VALUES if value in there)


def verified(checks: Iterable[Mapping[str, Any]]) -> set[str]:
    """The values, as ``host.name``, that a check which passed has compared and none which failed."""
    held: set[str] = set()
    broken: set[str] = set()
    for check in checks:
        (held if check["passed"] else broken).update(check["values"])
    return held - broken
