"""Outcomes of variants in words, for the table of ``check --variants`` and the coverage page."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Mapping

from builder.records.coverage import VERDICTS
from builder.records.coverage_text import by_reason, failures
from builder.records.variants import Change, FamilyVariants, Variant

#: The most characters of a list of values.
_LONGEST = 160


def change_text(change: Change) -> str:
    """Return a change as ``field = value``, the value as JSON."""
    [(name, value)] = change.items()
    return f"{name} = {json.dumps(value, ensure_ascii=False)}"


def details(variant: Variant) -> list[str]:
    """Return what there is to say of a variant, as sentences without a full stop."""
    lines = [variant["reason"]] if "reason" in variant else []
    lines += failures(variant.get("failed", ()))
    lacking = by_reason(variant.get("lacking", ()))
    lines += [f"no {_short(names)}: {reason}" for reason, names in lacking.items()]
    if unproven := variant.get("unproven"):
        lines.append(f"verified by no check: {_short(', '.join(unproven))}")
    return lines


def _short(names: str) -> str:
    return textwrap.shorten(names, _LONGEST, placeholder=" …")


def counts(found: Iterable[FamilyVariants]) -> str:
    """Return how many changes were tried, and how many variants have each verdict."""
    found = list(found)
    verdicts = dict.fromkeys(VERDICTS, 0)
    for one in found:
        for variant in one["variants"]:
            verdicts[variant["verdict"]] += 1
    words = [f"{count} {verdict}" for verdict, count in verdicts.items() if count]
    tried, rejected, same = (
        sum(one[name] for one in found) for name in ("tried", "rejected", "same")
    )
    kept = sum(len(one["variants"]) for one in found)
    return (
        f"{tried} changes tried: {rejected} do not run, {same} change no graph, {kept} variants"
        + (f" ({', '.join(words)})" if words else "")
    )


def summary(one: FamilyVariants) -> str:
    """Return what was tried of one family, or why there is no result."""
    return one["stopped"] if "stopped" in one else counts([one])


def table(found: Mapping[str, FamilyVariants], width: int | None = None) -> str:
    """Return the counts of each family and its variants that are not proven, then all counts."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    lines: list[str] = []
    for family, one in sorted(found.items()):
        lines += textwrap.wrap(f"{family}: {summary(one)}", width, subsequent_indent="  ")
        for variant in one["variants"]:
            if variant["verdict"] != "proven":
                head = f"{variant['verdict']}: {change_text(variant['change'])}"
                text = "; ".join([head, *details(variant)])
                lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    total = textwrap.wrap(
        f"{len(found)} decoders, {counts(found.values())}", width, subsequent_indent="  "
    )
    return "\n".join([*lines, "", *total])
