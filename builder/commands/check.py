"""``python -m builder check``: the contract of each family's specimen, as a table or as JSON.

With ``--all``, of every decoder of transformers, each in a process of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from builder.records.process_limits import Limits

if TYPE_CHECKING:
    from explorer.contract.report import Check, Report

#: The narrowest the column of details gets on a narrow terminal.
_NARROWEST = 40


def run(families: list[str], as_json: bool = False) -> int:
    """Prove the contract on the specimen of each of ``families`` (all where none is named) and print what was found.

    Returns 0, or 1 when a check failed or a specimen could not be loaded.
    """
    from explorer import specimens

    reports: dict[str, Report] = {}
    lost: dict[str, str] = {}
    for family in families or specimens.FAMILIES:
        try:
            reports[family] = _proven(family)
        except (ValueError, OSError) as error:
            lost[family] = str(error)
            print(f"{family}: {error}", file=sys.stderr)
    print(_json(reports, lost) if as_json else _tables(reports))
    return 1 if lost or any(report.failed for report in reports.values()) else 0


def run_all(
    jobs: int, as_json: bool = False, write: bool = False, limits: Limits = Limits()
) -> int:
    """Prove the contract on every decoder-only model type and print how far each is covered.

    ``write``: also keep the outcomes as the site's data. Returns 0, 1 when a law did not hold somewhere, or 2
    when there is no site to keep them in.
    """
    from tqdm import tqdm

    from builder.records import coverage

    if write and not coverage.DATA.parent.is_dir():
        print(
            f"There is no folder {coverage.DATA.parent} here: run --write from the root of the repository.",
            file=sys.stderr,
        )
        return 2
    families = coverage.types()
    outcomes: dict[str, coverage.Outcome] = {}
    with tqdm(total=len(families), unit="family", desc="coverage", file=sys.stderr) as bar:
        for family, found in coverage.sweep(families, jobs, limits):
            outcomes[family] = found
            bar.set_postfix_str(f"{family}: {found['verdict']}")
            bar.update()
    if write:
        print(f"Written: {coverage.write(outcomes)}", file=sys.stderr)
    print(
        json.dumps(dict(sorted(outcomes.items())), ensure_ascii=False, indent=1)
        if as_json
        else coverage.table(outcomes)
    )
    return 1 if any(found["verdict"] == "failed" for found in outcomes.values()) else 0


def _proven(family: str) -> Report:
    from tqdm import tqdm

    from builder.records.collect import one_thread
    from explorer import load
    from explorer.contract import check

    # A specimen's tensors are too small to share out among threads.
    with one_thread(), tqdm(desc=family, unit="check", leave=False, file=sys.stderr) as bar:

        def done(count: int, total: int) -> None:
            bar.total = total
            bar.update(count - bar.n)

        return check(load(f"specimen:{family}"), progress=done)


def _json(reports: dict[str, Report], lost: dict[str, str]) -> str:
    found = {
        "families": {family: report.to_json() for family, report in reports.items()},
        "errors": lost,
        "passed": sum(report.passed for report in reports.values()),
        "failed": sum(report.failed for report in reports.values()),
    }
    return json.dumps(found, ensure_ascii=False, indent=1)


def _tables(reports: dict[str, Report]) -> str:
    width = shutil.get_terminal_size((120, 24)).columns
    parts = [table(family, report, width) for family, report in reports.items()]
    passed, failed = (
        sum(getattr(r, name) for r in reports.values()) for name in ("passed", "failed")
    )
    parts.append(f"{passed} passed, {failed} failed")
    return "\n\n".join(parts)


def table(family: str, report: Report, width: int) -> str:
    """One family's checks, failures first, as lines no longer than ``width`` where that leaves room."""
    head = f"{family}: {report.passed} passed, {report.failed} failed"
    checks = sorted(report.checks, key=lambda check: check.passed)
    if not checks:
        return head
    names, hosts = (_column(checks, pick) for pick in (lambda c: c.name, lambda c: c.host))
    indent = len("FAILED") + names + hosts + 6
    lines = [head]
    for check in checks:
        verdict = "passed" if check.passed else "FAILED"
        first, *rest = textwrap.wrap(check.detail, max(_NARROWEST, width - indent)) or [""]
        lines.append(f"{verdict}  {check.name:<{names}}  {check.host:<{hosts}}  {first}".rstrip())
        lines += [
            " " * indent + line
            for line in (*rest, *(() if check.passed else _about(check, width - indent)))
        ]
    return "\n".join(lines)


def _about(check: Check, width: int) -> list[str]:
    """What a failed check was to prove."""
    return textwrap.wrap(f"It is to hold that: {check.about}", max(_NARROWEST, width))


def _column(checks: Iterable[Check], pick: Callable[[Check], str]) -> int:
    return max(len(pick(check)) for check in checks)
