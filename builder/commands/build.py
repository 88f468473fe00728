"""``python -m builder build``: the pages and the site."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from builder.commands.parsers import Parsers, usage_error


def add(parsers: Parsers) -> None:
    parser = parsers.add_parser("build", help="build the pages and the site")
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--out", type=Path, default=Path("public"), metavar="DIR")
    parser.add_argument(
        "--all",
        action="store_true",
        help="every proven family, with notes or without; else those with notes",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(2, os.cpu_count() or 1),
        metavar="N",
        help="processes at a time",
    )
    parser.add_argument("--fresh", action="store_true", help="use no results of earlier builds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build and report; return 1 where a family or a guide failed, 2 where nothing could be
    built.
    """
    if args.jobs < 1:
        return usage_error("--jobs takes a number from 1.")
    if args.all and args.families:
        return usage_error("--all builds every family: do not name any.")
    from builder.pages.build import build
    from builder.pages.write import BuildError

    try:
        built = build(args.families, args.out, args.jobs, everything=args.all, fresh=args.fresh)
    except BuildError as error:
        return usage_error(str(error))
    for line in built.left_out:
        print(f"left out: {line}", file=sys.stderr)
    for line in built.failed:
        print(f"failed: {line}", file=sys.stderr)
    count = len(built.families)
    families = f"{count} {'family' if count == 1 else 'families'}"
    print(f"The site is in {args.out}: {families}, {len(built.made)} collected anew.")
    return 1 if built.failed else 0
