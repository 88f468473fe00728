"""``python -m builder``: facts, pages, checks and measurements from the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["bench"]:  # has options of its own
        from builder.bench.bench import main as bench

        return bench(argv[1:])
    asked = _parser().parse_args(argv)
    from builder.records.collect import UnknownFamily
    from explorer.checkpoints.cards import CardError, UnknownCheckpoint
    from explorer.errors import LoadError

    try:
        return asked.run(asked)
    except (UnknownFamily, UnknownCheckpoint, CardError, LoadError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m builder", description="Facts and pages about language-model families."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("facts", help="print a family's record as JSON")
    one.add_argument("family", metavar="FAMILY")
    one.add_argument(
        "--checkpoint", metavar="ID", help="a checkpoint of the family; its first card by default"
    )
    one.set_defaults(run=_facts)

    pages = commands.add_parser("build", help="build the pages and the site")
    pages.add_argument("families", nargs="*", metavar="FAMILY")
    pages.add_argument("--out", type=Path, default=Path("public"), metavar="DIR")
    pages.add_argument(
        "--all",
        action="store_true",
        help="every family that is proven, with notes or without; else those with notes",
    )
    pages.add_argument(
        "--jobs",
        type=int,
        default=min(2, os.cpu_count() or 1),
        metavar="N",
        help="processes at a time",
    )
    pages.add_argument(
        "--fresh", action="store_true", help="use nothing that was kept from an earlier build"
    )
    pages.set_defaults(run=_build)

    checks = commands.add_parser("check", help="run the contract on the specimens")
    checks.add_argument("families", nargs="*", metavar="FAMILY")
    checks.add_argument("--json", action="store_true")
    checks.add_argument(
        "--all",
        action="store_true",
        help="every decoder of transformers, each in a process of its own",
    )
    checks.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="with --all: processes at a time, 1 or 2 (1 by default)",
    )
    checks.add_argument(
        "--write", action="store_true", help="with --all: keep the outcomes as the site's data"
    )
    checks.set_defaults(run=_check)

    inspect = commands.add_parser(
        "inspect", help="print a model's signature: the type of every tensor"
    )
    inspect.add_argument("model", metavar="MODEL", help="a checkpoint, a family or a folder")
    inspect.add_argument("--block", metavar="CLASS", help="one module class alone")
    shown = inspect.add_mutually_exclusive_group()
    shown.add_argument(
        "--symbols", action="store_true", help="axes over the family's sizes (the default)"
    )
    shown.add_argument("--numbers", action="store_true", help="axes with this model's numbers")
    inspect.set_defaults(run=_inspect)

    commands.add_parser("bench", help="print the measurements")
    return parser


def _facts(asked: argparse.Namespace) -> int:
    from builder.records import collect
    from explorer.checkpoints import cards

    (family,) = collect.families([asked.family])
    if asked.checkpoint is not None and cards.card(asked.checkpoint).family != family:
        of = ", ".join(cards.family_checkpoints(family))
        print(
            f"{asked.checkpoint} is not of the family {family}, whose checkpoints are {of}.",
            file=sys.stderr,
        )
        return 2
    found = collect.record(family, asked.checkpoint, lambda text: print(text, file=sys.stderr))
    try:
        print(json.dumps(found, ensure_ascii=False, indent=1), flush=True)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _inspect(asked: argparse.Namespace) -> int:
    from builder.commands.inspect import run

    return run(asked.model, asked.block, asked.numbers)


def _build(asked: argparse.Namespace) -> int:
    from builder.pages import build as pipeline
    from builder.pages.write import BuildError

    if asked.jobs < 1:
        print("--jobs takes a number from 1.", file=sys.stderr)
        return 2
    if asked.all and asked.families:
        print("--all is every family: name none beside it.", file=sys.stderr)
        return 2
    try:
        built = pipeline.build(
            asked.families, asked.out, asked.jobs, everything=asked.all, fresh=asked.fresh
        )
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    for line in built.left_out:
        print(f"left out: {line}", file=sys.stderr)
    for line in built.failed:
        print(f"failed: {line}", file=sys.stderr)
    count = len(built.families)
    print(
        f"The site is in {asked.out}: {count} {'family' if count == 1 else 'families'}, {len(built.anew)} collected anew."
    )
    return 1 if built.failed else 0


def _check(asked: argparse.Namespace) -> int:
    from builder.commands.check import run, run_all
    from builder.records import collect

    if not asked.all:
        if asked.jobs is not None or asked.write:
            print("--jobs and --write go with --all.", file=sys.stderr)
            return 2
        return run(collect.families(asked.families), asked.json)
    if asked.families:
        print("--all is every family: name none beside it.", file=sys.stderr)
        return 2
    if asked.jobs not in (None, 1, 2):
        print(
            "--jobs takes 1 or 2: each process holds a model and its bfloat16 twin.",
            file=sys.stderr,
        )
        return 2
    return run_all(asked.jobs or 1, asked.json, asked.write)


if __name__ == "__main__":
    sys.exit(main())
