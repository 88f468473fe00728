"""Outcomes in words, for the table of ``check --all`` and for the coverage page."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from builder.records.coverage import VERDICTS, FailedCheck, Lack, Outcome

#: How many items of a long list are named.
_NAMED = 4


def count_verdicts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Return how many outcomes have each verdict, from best to worst, verdicts of none left out."""
    counts = dict.fromkeys(VERDICTS, 0)
    for outcome in outcomes:
        counts[outcome["verdict"]] += 1
    return {verdict: count for verdict, count in counts.items() if count}


def details(outcome: Outcome) -> list[str]:
    """Return the details of an outcome as sentences without a full stop, the shortest first."""
    types = outcome.get("types")
    lines = []
    if "reason" in outcome:
        lines.append(outcome["reason"])
    if "served" in outcome and "checks" in outcome:
        lines.append(
            f"{len(outcome['served'])} values, {outcome['checks']['passed']} checks passed"
        )
    lines += failures(outcome.get("failed", ()))
    lacking = by_reason(outcome.get("lacking", ()))
    lines += [f"no {names}: {reason}" for reason, names in lacking.items()]
    if unproven := outcome.get("unproven"):
        lines.append(f"verified by no check: {_first_names(unproven)}")
    if types and "unknown" in types:
        lines.append(f"types: {types['unknown']}")
    return lines


def resolved_share(outcomes: Iterable[Outcome]) -> float | None:
    """Return the share of axes that resolved, in percent rounded down to a tenth; None where
    none is known.
    """
    found = [types for outcome in outcomes if (types := outcome.get("types")) and "axes" in types]
    axes = sum(types["axes"] for types in found)
    return 1000 * sum(types["resolved"] for types in found) // axes / 10 if axes else None


def percent(outcome: Outcome) -> str:
    """Return the share of an outcome's axes that resolved, "" where it is not known."""
    share = resolved_share([outcome])
    return "" if share is None else f"{share:g} %"


def resolved(outcomes: Mapping[str, Outcome]) -> str:
    """Describe how much of the types is resolved: of all model types together, and in how many of
    them.
    """
    shares = [
        share for outcome in outcomes.values() if (share := resolved_share([outcome])) is not None
    ]
    if not shares:
        return "No model type has a signature."
    complete, most = shares.count(100), sum(share >= 98 for share in shares)
    return (
        f"{len(shares)} of {len(outcomes)} model types have a signature, in which "
        f"{resolved_share(outcomes.values()):g} % of all axes resolved: every one in {complete}, "
        f"at least 98 % in {most}."
    )


def by_reason(lacking: Sequence[Lack]) -> dict[str, str]:
    """Return the lacking values by the reason they share, with their blocks where only some lack
    them.
    """
    groups: dict[str, list[str]] = {}
    for lack in lacking:
        where = f" ({lack['blocks']})" if lack["blocks"] else ""
        groups.setdefault(lack["reason"], []).append(lack["value"] + where)
    return {reason: ", ".join(values) for reason, values in groups.items()}


def failures(failed: Sequence[FailedCheck]) -> list[str]:
    """Return the failed checks, those with the same detail together, the first few of each."""
    groups: dict[str, list[str]] = {}
    for check in failed:
        name = f"{check['name']} on {check['host']}"
        groups.setdefault(check.get("detail", "failed"), []).append(name)
    lines = [f"{_first_names(names)}: {detail}" for detail, names in groups.items()]
    more = len(lines) - _NAMED
    return lines[:_NAMED] + ([f"and {more} more"] if more > 0 else [])


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def table(outcomes: Mapping[str, Outcome], width: int | None = None) -> str:
    """Return every outcome, best first, in lines of at most ``width`` characters, then the
    counts and the types.
    """
    width = width or shutil.get_terminal_size((120, 24)).columns
    order = list(VERDICTS)
    names = max(len(name) for name in outcomes)
    verdicts = max(len(verdict) for verdict in order)
    indent = names + verdicts + 14
    lines = []
    for family, outcome in sorted(
        outcomes.items(), key=lambda item: (order.index(item[1]["verdict"]), item[0])
    ):
        wrapped = [
            part
            for line in details(outcome)
            for part in textwrap.wrap(line, max(40, width - indent)) or [""]
        ]
        head = f"{family:<{names}}  {outcome['verdict']:<{verdicts}}  {percent(outcome):>8}"
        lines.append(f"{head}  {wrapped[0]}".rstrip())
        lines += [" " * indent + part for part in wrapped[1:]]
    counted = ", ".join(
        f"{count} {verdict}" for verdict, count in count_verdicts(outcomes.values()).items()
    )
    types = textwrap.wrap(resolved(outcomes), width, subsequent_indent="  ")
    return "\n".join([*lines, "", f"{len(outcomes)} decoders: {counted}", *types])
