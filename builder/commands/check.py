"""``python -m builder check``: the contract of each family's specimen, as a table or as JSON.

With ``--all``, of every decoder of transformers, each in a process of its own. With ``--variants``,
of each specimen with one field of its configuration moved, for each move that changes its graph.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from builder.commands.parsers import Parsers, usage_error
from builder.records.process_limits import DEFAULT_LIMITS, Limits
from builder.records.threads import one_thread

if TYPE_CHECKING:
    from explorer.contract.report import Check, Report

_T = TypeVar("_T")

#: The narrowest that the column of details gets on a narrow terminal.
_NARROWEST = 40


def add(parsers: Parsers) -> None:
    parser = parsers.add_parser("check", help="run the contract on the specimens")
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--all",
        action="store_true",
        help="every decoder of transformers, each in a process of its own",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="with --all or --variants: processes at a time, 1 or 2 (1 by default)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="with --all or --variants: write the outcomes as the site's data",
    )
    parser.add_argument(
        "--variants",
        action="store_true",
        help="the specimens with one field of their configuration moved",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="with --variants: use no outcomes of an interrupted run",
    )
    parser.add_argument(
        "--with",
        dest="release",
        metavar="RELEASE",
        help="under another release of a package, such as transformers==5.20.0",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from builder.commands.releases import ReleaseError, run_under
    from builder.records.collect import requested_families

    if args.release is not None:
        try:
            return run_under(args.release, _arguments(args))
        except ReleaseError as error:
            return usage_error(str(error))
    if args.fresh and not args.variants:
        return usage_error("--fresh goes with --variants.")
    if not args.all and not args.variants:
        if args.jobs is not None or args.write:
            return usage_error("--jobs and --write go with --all or --variants.")
        return check_families(requested_families(args.families), args.json)
    if args.all and args.families:
        return usage_error("--all checks every family: do not name any.")
    if args.jobs not in (None, 1, 2):
        return usage_error("--jobs takes 1 or 2: each process holds a model and its bfloat16 copy.")
    if args.variants:
        families = None if args.all else requested_families(args.families)
        return check_variants(families, args.jobs or 1, args.json, args.write, args.fresh)
    return check_all(args.jobs or 1, args.json, args.write)


def _arguments(args: argparse.Namespace) -> list[str]:
    """Return the words of the same command without its release."""
    jobs = [] if args.jobs is None else [f"--jobs={args.jobs}"]
    names = ("json", "all", "write", "variants", "fresh")
    flags = [f"--{name}" for name in names if getattr(args, name)]
    return ["check", *flags, *jobs, *args.families]


def check_families(families: list[str], as_json: bool = False) -> int:
    """Run the contract on the specimen of each of ``families`` (all where none is named) and print
    the reports.

    Returns 0, or 1 when a check failed or a specimen could not be loaded.
    """
    from explorer import specimens

    reports: dict[str, Report] = {}
    errors: dict[str, str] = {}
    for family in families or specimens.FAMILIES:
        try:
            reports[family] = _report(family)
        except (ValueError, OSError) as error:
            errors[family] = str(error)
            print(f"{family}: {error}", file=sys.stderr)
    print(_json(reports, errors) if as_json else _tables(reports))
    return 1 if errors or any(report.failed for report in reports.values()) else 0


def check_all(
    jobs: int, as_json: bool = False, write: bool = False, limits: Limits = DEFAULT_LIMITS
) -> int:
    """Run the contract on every decoder-only model type and print the outcomes.

    ``write``: also write them as the site's data. Returns 0, 1 when a check failed somewhere, or 2
    when there is no site to write them to.
    """
    from builder.records import coverage
    from builder.records.coverage_text import table

    if write and not coverage.DATA.parent.is_dir():
        return _no_site(coverage.DATA)
    families = coverage.types()
    outcomes: dict[str, coverage.Outcome] = {}
    for family, outcome in _with_bar(coverage.sweep(families, jobs, limits), len(families)):
        outcomes[family] = outcome
    if write:
        print(f"Written: {coverage.write(outcomes)}", file=sys.stderr)
    ordered = dict(sorted(outcomes.items()))
    print(json.dumps(ordered, ensure_ascii=False, indent=1) if as_json else table(outcomes))
    return 1 if any(outcome["verdict"] == "failed" for outcome in outcomes.values()) else 0


def check_variants(
    families: list[str] | None,
    jobs: int,
    as_json: bool = False,
    write: bool = False,
    fresh: bool = False,
) -> int:
    """Run the contract on the variants of ``families``, every decoder where it is None, and print
    the outcomes.

    ``write``: also write them as the site's data, beside those of families that are not named.
    ``fresh``: use no outcomes of an interrupted run. Returns as `check_all` does; 1 also where a
    family has no outcomes.
    """
    from builder.records import coverage, variants
    from builder.records.variants_text import table

    if write and not variants.DATA.parent.is_dir():
        return _no_site(variants.DATA)
    chosen = coverage.types() if families is None else families
    found: dict[str, variants.FamilyVariants] = {}
    for family, one in _with_bar(variants.sweep(chosen, jobs, fresh), len(chosen)):
        found[family] = one
    if write:
        path = variants.write(found, variants.DATA, merge=families is not None)
        print(f"Written: {path}", file=sys.stderr)
    data = variants.data(found)["families"]
    print(json.dumps(data, ensure_ascii=False, indent=1) if as_json else table(found))
    wrong = any("stopped" in one for one in found.values()) or any(
        variant["verdict"] == "failed" for one in found.values() for variant in one["variants"]
    )
    return 1 if wrong else 0


def _with_bar(results: Iterable[tuple[str, _T]], total: int) -> Iterable[tuple[str, _T]]:
    """Yield each family's result and show how many there are."""
    from tqdm import tqdm

    with tqdm(total=total, unit="family", file=sys.stderr) as bar:
        for family, result in results:
            bar.set_postfix_str(family)
            bar.update()
            yield family, result


def _no_site(path: Path) -> int:
    return usage_error(
        f"There is no folder {path.parent} here: run --write from the root of the repository."
    )


def _report(family: str) -> Report:
    from tqdm import tqdm

    from explorer import load
    from explorer.contract import check

    with one_thread(), tqdm(desc=family, unit="check", leave=False, file=sys.stderr) as bar:

        def progress(count: int, total: int) -> None:
            bar.total = total
            bar.update(count - bar.n)

        return check(load(f"specimen:{family}"), progress=progress)


def _json(reports: dict[str, Report], errors: dict[str, str]) -> str:
    found = {
        "families": {family: report.to_json() for family, report in reports.items()},
        "errors": errors,
        "passed": sum(report.passed for report in reports.values()),
        "failed": sum(report.failed for report in reports.values()),
        "not_applicable": sum(len(report.not_applicable) for report in reports.values()),
    }
    return json.dumps(found, ensure_ascii=False, indent=1)


def _tables(reports: dict[str, Report]) -> str:
    width = shutil.get_terminal_size((120, 24)).columns
    parts = [table(family, report, width) for family, report in reports.items()]
    return "\n\n".join([*parts, _counts(*reports.values())])


def _counts(*reports: Report) -> str:
    """Return how many checks passed, failed and did not apply."""
    passed, failed = (sum(getattr(one, name) for one in reports) for name in ("passed", "failed"))
    left_out = sum(len(report.not_applicable) for report in reports)
    return f"{passed} passed, {failed} failed, {left_out} not applicable"


def table(family: str, report: Report, width: int) -> str:
    """Return one family's checks, failures first, in lines of at most ``width`` characters where
    that leaves room.
    """
    head = f"{family}: {_counts(report)}"
    checks = sorted(report.checks, key=lambda check: check.passed)
    rows = [*checks, *report.not_applicable]
    if not rows:
        return head
    names = max(len(row.name) for row in rows)
    hosts = max(len(row.host) for row in rows)
    indent = len("FAILED") + names + hosts + 6
    details = max(_NARROWEST, width - indent)
    lines = [head]
    for check in checks:
        verdict = "passed" if check.passed else "FAILED"
        first, *rest = textwrap.wrap(check.detail, details) or [""]
        lines.append(f"{verdict}  {check.name:<{names}}  {check.host:<{hosts}}  {first}".rstrip())
        lines += [" " * indent + line for line in [*rest, *_statement(check, details)]]
    for row in report.not_applicable:
        first, *rest = textwrap.wrap(row.reason, details) or [""]
        lines.append(f"-       {row.name:<{names}}  {row.host:<{hosts}}  {first}".rstrip())
        lines += [" " * indent + line for line in rest]
    return "\n".join(lines)


def _statement(check: Check, width: int) -> list[str]:
    """Return what a failed check requires, nothing of one that passed."""
    return [] if check.passed else textwrap.wrap(f"Required: {check.about}", width)
