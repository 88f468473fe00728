"""What an invariant of the contract is: what it states, on which hosts, and when it applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest

#: Makes an invariant's comparisons on one host of a model.
Run = Callable[[ModelUnderTest, str, Comparisons], None]


@dataclass(frozen=True)
class Invariant:
    """One statement that has to hold on every family.

    name, about: a few words, and one sentence that states what is checked.
    hosts: the hosts it is checked on, one check each; hosts the model does not have are left out.
    needs: values that must be available on the host, on whichever blocks.
    when: a further condition on the model, or None.
    float32, bfloat16: relative tolerances; None for bfloat16 means it is not repeated in bfloat16.
    shapes: whether it can be checked on a model without weights.
    form: whether it checks how values are served and not what they are, so that it verifies none.
    pair: whether it needs a second model. last: whether it has to run after all others.
    otherwise: why it does not apply where ``when`` does not hold.
    """

    name: str
    about: str
    hosts: tuple[str, ...]
    run: Run
    needs: tuple[str, ...] = ()
    float32: float = 0.0
    bfloat16: float | None = None
    shapes: bool = False
    form: bool = False
    pair: bool = False
    last: bool = False
    when: Callable[[ModelUnderTest], bool] | None = None
    otherwise: str = ""

    def reason_against(self, subject: ModelUnderTest, host: str) -> str | None:
        """Return why this invariant does not apply to a host of a model, None where it does."""
        if subject.on_meta and not self.shapes:
            return "a model without weights has no numbers to compare"
        if subject.dtype != torch.float32 and self.bfloat16 is None and self.float32 > 0:
            return "its tolerance is stated for float32 alone"
        if self.pair and subject.other is None:
            return "there is no second model in the process"
        for name in self.needs:
            if not subject.layers(host, name):
                return f"{name} is unavailable: {subject.reason(host, name)}"
        if self.when is not None and not self.when(subject):
            return self.otherwise
        return None


def invariant(
    name: str,
    about: str,
    *hosts: str,
    needs: tuple[str, ...] = (),
    float32: float = 0.0,
    bfloat16: float | None = None,
    shapes: bool = False,
    form: bool = False,
    pair: bool = False,
    last: bool = False,
    when: Callable[[ModelUnderTest], bool] | None = None,
    otherwise: str = "",
) -> Callable[[Run], Invariant]:
    """Make an invariant of the function ``(subject, host, compare)`` that does its comparisons."""

    def made(run: Run) -> Invariant:
        return Invariant(
            name,
            about,
            hosts,
            run,
            needs,
            float32,
            bfloat16,
            shapes,
            form,
            pair,
            last,
            when,
            otherwise,
        )

    return made
