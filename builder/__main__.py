"""``python -m builder``: facts, pages, checks and measurements from the command line."""

from __future__ import annotations

import argparse
import sys

from builder.commands import bench, build, check, facts, inspect, mutate


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m builder", description="Facts and pages about language-model families."
    )
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (facts, build, check, mutate, inspect, bench):
        command.add(parsers)
    args = parser.parse_args(argv)
    from builder.records.collect import UnknownFamily
    from explorer.checkpoints.cards import CardError, UnknownCheckpoint
    from explorer.errors import LoadError

    try:
        return args.run(args)
    except (UnknownFamily, UnknownCheckpoint, CardError, LoadError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
