"""The register of laws: what each proves, on which hosts, and what it needs to apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from explorer.contract.comparisons import Comparisons

if TYPE_CHECKING:
    from explorer.contract.model_under_test import ModelUnderTest


@dataclass(frozen=True)
class Invariant:
    """One thing that holds on every family.

    name, about: a few words, and one sentence that says what is proven.
    hosts: the hosts it is proven on, one check each; it applies to those that are there.
    needs: values that must be available on the host for it to apply; any block will do.
    when: whether the model has what it is about, for what is no value of the host; None where that is all it takes.
    float32, bfloat16: relative errors allowed; None for bfloat16 where it is not run again in it.
    shapes: whether it also holds of a model without weights.
    form: whether it looks at how values are handed over and not at what they are, so that it verifies none of them.
    pair: whether it takes a second model beside the first. last: whether it looks at the model after all others.
    """

    name: str
    about: str
    hosts: tuple[str, ...]
    run: Callable[[ModelUnderTest, str, Comparisons], None]
    needs: tuple[str, ...] = ()
    float32: float = 0.0
    bfloat16: float | None = None
    shapes: bool = False
    pair: bool = False
    last: bool = False
    form: bool = False
    when: Callable[[ModelUnderTest], bool] | None = None

    def applies(self, subject: ModelUnderTest, host: str) -> bool:
        if (self.pair and subject.other is None) or (
            self.when is not None and not self.when(subject)
        ):
            return False
        return subject.has(host) and all(subject.layers(host, name) for name in self.needs)


_INVARIANTS: list[Invariant] = []


def invariant(
    name: str,
    about: str,
    *hosts: str,
    needs: tuple[str, ...] = (),
    float32: float = 0.0,
    bfloat16: float | None = None,
    shapes: bool = False,
    pair: bool = False,
    last: bool = False,
    form: bool = False,
    when: Callable[[ModelUnderTest], bool] | None = None,
) -> Callable:
    """Register a function ``(subject, host, tally)`` that makes a law's comparisons."""

    def register(run: Callable[[ModelUnderTest, str, Comparisons], None]) -> Callable:
        _INVARIANTS.append(
            Invariant(
                name, about, hosts, run, needs, float32, bfloat16, shapes, pair, last, form, when
            )
        )
        return run

    return register


def invariants() -> Iterator[Invariant]:
    """Every law, in the order they are read and run; those that look at the model afterwards come last."""
    # Importing a module registers its laws.
    from explorer.contract.checks import (  # noqa: F401
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

    yield from (each for each in _INVARIANTS if not each.last)
    yield from (each for each in _INVARIANTS if each.last)
