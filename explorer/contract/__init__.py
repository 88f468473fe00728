"""The contract: what has to hold of a loaded model, checked on every block that it concerns.

from explorer import load
from explorer.contract import check

report = check(load("specimen:qwen3_next"))
report.failed            # 0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from explorer import vocabulary
from explorer.contract.checks import INVARIANTS
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import Invariant
from explorer.contract.report import Check, NotApplicable, Report, value_names, verified

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel

__all__ = ["Check", "NotApplicable", "Report", "check", "verified"]


def check(
    model: LanguageModel,
    prompt: str | None = None,
    bfloat16: LanguageModel | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check the contract on ``model`` and report what was measured.

    prompt: text whose tokens the model is run on. bfloat16: the same model in bfloat16, on which
    the numeric invariants are repeated and which also serves as the second model of the process;
    loaded where the model is a specimen in float32, else left out.
    progress: called with (checks done, checks).

    Invariants that do not apply to a host the model has are listed apart, with the reason; those of
    hosts it does not have are left out. One that raises is a failed check. A model without weights
    is checked for names, layouts and refusals only; one that is not in float32 for what has a
    tolerance in its dtype.
    """
    if bfloat16 is None and model.reload is not None and model.dtype == torch.float32:
        bfloat16 = model.reload(torch.bfloat16)
    repeated = None if bfloat16 is None else ModelUnderTest(bfloat16, prompt)
    if repeated is not None and not repeated.native.runs:
        # The second model of the process is then another one in float32.
        repeated, bfloat16 = None, model.reload(None) if model.reload is not None else None
    subjects = {"": ModelUnderTest(model, prompt, bfloat16)}
    if repeated is not None:
        subjects[" (bfloat16)"] = repeated
    planned: list[tuple[Invariant, str, str]] = []
    not_applicable: list[NotApplicable] = []
    for invariant in INVARIANTS:
        for suffix, subject in subjects.items():
            if suffix and invariant.bfloat16 is None:
                continue
            for host in filter(subject.has, invariant.hosts):
                reason = invariant.reason_against(subject, host)
                if reason is None:
                    planned.append((invariant, host, suffix))
                elif not suffix:
                    path = vocabulary.HOSTS[host].path
                    not_applicable.append(NotApplicable(invariant.name, path, reason))
    checks = []
    for invariant, host, suffix in planned:
        checks.append(_checked(invariant, host, subjects[suffix], suffix))
        if progress is not None:
            progress(len(checks), len(planned))
    return Report.of(checks, not_applicable)


def _checked(invariant: Invariant, host: str, subject: ModelUnderTest, suffix: str) -> Check:
    """Run one invariant on one host."""
    in_float32 = subject.dtype == torch.float32
    compare = Comparisons(invariant.float32 if in_float32 else invariant.bfloat16 or 0.0)
    subject.values_read = compare.current
    try:
        invariant.run(subject, host, compare)
        passed, detail = compare.passed, compare.detail
        values = compare.values if passed else compare.failing
    except Exception as error:  # an invariant that cannot be checked does not hold
        passed, detail = False, f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        values = compare.values | compare.current
    # A passed check of form verifies no value; a failed one counts against all it compared.
    return Check(
        f"{invariant.name}{suffix}",
        vocabulary.HOSTS[host].path,
        invariant.about,
        passed,
        detail,
        compare.worst,
        value_names(() if invariant.form and passed else values),
    )
