"""``python -m builder inspect``: a model's signature for a terminal."""

from __future__ import annotations

import argparse
import os

from builder.commands.parsers import Parsers, print_for_pipe, usage_error


def add(parsers: Parsers) -> None:
    parser = parsers.add_parser(
        "inspect", help="print a model's signature: the type of every tensor"
    )
    parser.add_argument("model", metavar="MODEL", help="a checkpoint, a family or a folder")
    parser.add_argument("--block", metavar="CLASS", help="one module class alone")
    notation = parser.add_mutually_exclusive_group()
    notation.add_argument(
        "--symbols", action="store_true", help="axes over the family's sizes (the default)"
    )
    notation.add_argument("--numbers", action="store_true", help="axes with this model's numbers")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the signature of a checkpoint, a family or a folder; return 2 with one sentence
    where there is none.
    """
    from builder.records.threads import one_thread
    from explorer import load
    from explorer.checkpoints import cards
    from explorer.errors import LoadError
    from explorer.signature import NoSignature, signature
    from explorer.signature.text import UnknownBlock, text
    from explorer.specimens import UnknownFamily
    from explorer.specimens.small import types

    source = args.model
    if source in types() and not os.path.exists(source):
        source = next(iter(cards.family_checkpoints(source)), f"default:{source}")
    try:
        with one_thread():
            written = text(signature(load(source, weights=False)), args.block, args.numbers)
    except (LoadError, NoSignature, UnknownBlock, UnknownFamily) as error:
        return usage_error(str(error))
    print_for_pipe(written)
    return 0
