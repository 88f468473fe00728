"""``python -m builder bench``: measurements, printed beside their aims."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from builder.bench import app, build, facts, load, record, site
from builder.bench.figures import Figure, Section, Settings, amount, table
from builder.bench.timing import cores
from builder.commands.parsers import Parsers

SECTIONS: dict[str, Section] = {
    "facts": facts.measure,
    "build": build.measure,
    "record": record.measure,
    "load": load.measure,
    "site": site.measure,
    "app": app.measure,
}


def add(parsers: Parsers) -> None:
    parser = parsers.add_parser("bench", help="print the measurements")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument(
        "--only", metavar="SECTION", choices=list(SECTIONS), nargs="+", help=", ".join(SECTIONS)
    )
    parser.add_argument(
        "--family",
        nargs="+",
        default=None,
        help="families to measure (default: those with notes; the build: all that are proven)",
    )
    parser.add_argument("--site", type=Path, help="a built site (default: built for the occasion)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one repeat without a warm-up, few steps and no slow figures, to see that it runs",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 1 where a section failed."""
    from builder.records.collect import requested_families

    families = tuple(requested_families(args.family))
    settings = Settings(families, args.family is not None, args.site, args.quick)
    figures, failed = measure(args.only or SECTIONS, settings, _to_stderr)
    if args.json:
        rows = [
            {"section": section, **asdict(figure), "met": figure.met} for section, figure in figures
        ]
        found = {"setting": setting_text(args.quick), "figures": rows, "failed": failed}
        print(json.dumps(found, indent=1))
    else:
        shown = table([figure for _, figure in figures])
        print(f"\n{setting_text(args.quick)}\n\n{shown}")
    for name, reason in failed.items():
        print(f"The section {name} failed: {reason}", file=sys.stderr)
    return 1 if failed else 0


def measure(
    sections: Iterable[str], settings: Settings, progress: Callable[[str], None]
) -> tuple[list[tuple[str, Figure]], dict[str, str]]:
    """Return the figures of ``sections``, each with its section, and the error of each section
    that failed.
    """
    figures: list[tuple[str, Figure]] = []
    failed: dict[str, str] = {}
    for name in sections:
        progress(f"measuring {name} ...")
        try:
            for figure in SECTIONS[name](settings):
                figures.append((name, figure))
                progress(f"  {figure.name}: {amount(figure.value, figure.unit)}")
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            progress(f"  failed: {failed[name]}")
    return figures, failed


def setting_text(quick: bool) -> str:
    import torch

    threads = torch.get_num_threads()
    repeats = ", one repeat without a warm-up" if quick else ""
    return f"{cores()} cores, torch {torch.__version__} with {threads} threads{repeats}"


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
