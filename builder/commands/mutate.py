"""``python -m builder mutate``: what the contract notices when a value is read somewhere else."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import TYPE_CHECKING

from builder.commands.parsers import Parsers
from builder.records.threads import one_thread

if TYPE_CHECKING:
    from explorer.contract.mutation import MutationReport


def add(parsers: Parsers) -> None:
    parser = parsers.add_parser(
        "mutate", help="read values in wrong places and count what the contract notices"
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Mutate the specimens of the families (all with notes where none is named) and print what was
    caught; return 1 where a mutant survived.
    """
    from builder.records.collect import requested_families
    from explorer import load
    from explorer.contract.mutation import mutate

    reports: dict[str, MutationReport] = {}
    with one_thread():
        for family in requested_families(args.families):
            reports[family] = mutate(load(f"specimen:{family}"))
            if not args.json:
                print(family_text(family, reports[family]), flush=True)
            else:
                print(f"{family}: {reports[family].share:.1%}", file=sys.stderr, flush=True)
    if args.json:
        found = {family: report.to_json() for family, report in reports.items()}
        print(json.dumps(found, ensure_ascii=False, indent=1))
    else:
        print(totals(reports))
    return 1 if any(report.survivors for report in reports.values()) else 0


def family_text(family: str, report: MutationReport) -> str:
    """Return the counts of one family and its surviving mutants."""
    counted = report.to_json()
    lines = [
        f"{family}: {counted['made']} mutants, {counted['unreached']} not reached, "
        f"{counted['same']} the same, {counted['repeated']} repeated; of the other "
        f"{len(report.outcomes)} {report.caught} caught ({report.share:.1%})"
    ]
    for one in report.survivors:
        block = "" if one.mutant.layer is None else f" of block {one.mutant.layer}"
        lines.append(f"  survives: {one.mutant.key}{block} read at {one.mutant.description}")
    return "\n".join(lines)


def totals(reports: dict[str, MutationReport]) -> str:
    """Return the shares caught, by value and by invariant, over all families."""
    sections = []
    for title, of in (("value", "by_value"), ("invariant", "by_invariant")):
        made: Counter[str] = Counter()
        caught: Counter[str] = Counter()
        for report in reports.values():
            for name, (looked, noticed) in getattr(report, of)().items():
                made[name] += looked
                caught[name] += noticed
        width = max(map(len, made), default=0)
        rows = [
            f"{name:<{width}}  {caught[name]:>5} of {made[name]:>5}  {caught[name] / of_all:.1%}"
            for name, of_all in sorted(made.items())
        ]
        sections.append("\n".join([f"by {title}:", *rows]))
    made_in_all = sum(len(report.outcomes) for report in reports.values())
    caught_in_all = sum(report.caught for report in reports.values())
    return "\n\n".join([*sections, f"{caught_in_all} of {made_in_all} mutants caught"])
