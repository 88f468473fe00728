"""``python -m builder facts``: a family's record as JSON."""

from __future__ import annotations

import argparse
import json
import sys

from builder.commands.parsers import Parsers, print_for_pipe, usage_error


def add(parsers: Parsers) -> None:
    parser = parsers.add_parser("facts", help="print a family's record as JSON")
    parser.add_argument("family", metavar="FAMILY")
    parser.add_argument(
        "--checkpoint", metavar="ID", help="a checkpoint of the family; its first card by default"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from builder.records import collect
    from explorer.checkpoints import cards

    (family,) = collect.requested_families([args.family])
    if args.checkpoint is not None and cards.card(args.checkpoint).family != family:
        known = ", ".join(cards.family_checkpoints(family))
        return usage_error(
            f"{args.checkpoint} is not of the family {family}, whose checkpoints are {known}."
        )
    record = collect.record(family, args.checkpoint, lambda text: print(text, file=sys.stderr))
    print_for_pipe(json.dumps(record, ensure_ascii=False, indent=1))
    return 0
