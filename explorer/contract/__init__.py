"""The contract: what is proven of a loaded model, law by law, on every block that hosts it.

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
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import Invariant, invariants
from explorer.contract.report import Check, Report, named, verified

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel

__all__ = ["Check", "Report", "check", "verified"]


def check(
    model: LanguageModel,
    prompt: str | None = None,
    bfloat16: LanguageModel | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Prove the contract on ``model`` and say what was measured.

    prompt: some text; its tokens are what the model is run on. bfloat16: the same model in
    bfloat16, on which the numeric laws are run again and which stands beside it as the second
    model of the process; built where the model is a specimen in float32, else left out.
    progress: called with (checks done, checks).

    Laws that do not apply to the model (no router, no state) are not listed. A law that
    raises is a failed check. A model without weights is held to the laws about names,
    layouts and refusals alone; one that is not in float32 to those whose tolerance holds there.
    """
    if bfloat16 is None and model.label.startswith("specimen:") and model.dtype == torch.float32:
        from explorer.checkpoints.load import load

        bfloat16 = load(model.label, dtype=torch.bfloat16)
    again = None if bfloat16 is None else ModelUnderTest(bfloat16, prompt)
    if again is not None and not again.runs:  # it stands beside the model in float32 then
        from explorer.checkpoints.load import load

        again, bfloat16 = None, load(model.label)
    subjects = {
        "": ModelUnderTest(model, prompt, bfloat16),
        **({" (bfloat16)": again} if again is not None else {}),
    }
    todo = [
        (law, host, mark)
        for law in invariants()
        for mark in subjects
        for host in law.hosts
        if _applies(law, host, subjects[mark], again=bool(mark))
    ]
    checks = []
    for law, host, mark in todo:
        checks.append(_proven(law, host, subjects[mark], mark))
        if progress is not None:
            progress(len(checks), len(todo))
    return Report.of(checks)


def _applies(law: Invariant, host: str, subject: ModelUnderTest, again: bool) -> bool:
    if (subject.meta and not law.shapes) or (again and law.bfloat16 is None):
        return False
    if subject.dtype != torch.float32 and law.bfloat16 is None and law.float32 > 0:
        return False  # its tolerance is stated for float32 alone
    return law.applies(subject, host)


def _proven(law: Invariant, host: str, subject: ModelUnderTest, mark: str) -> Check:
    """Run one law on one host."""
    comparisons = Comparisons(
        law.float32 if subject.dtype == torch.float32 else law.bfloat16 or 0.0
    )
    subject.looked = comparisons.looked
    try:
        law.run(subject, host, comparisons)
        passed, detail = comparisons.passed, comparisons.detail
        values = comparisons.values if passed else comparisons.failing
    except Exception as error:  # a law that cannot be carried out is a law that does not hold
        passed, detail = False, f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        values = comparisons.values | comparisons.looked
    # A failure is one whatever it looks at; a check of form alone verifies nothing it holds of.
    return Check(
        f"{law.name}{mark}",
        vocabulary.HOSTS[host].path,
        law.about,
        passed,
        detail,
        comparisons.worst,
        named(() if law.form and passed else values),
    )
