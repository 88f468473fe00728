"""What the commands share: the type of the parsers they are added to, and printing for a pipe."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TypeAlias

Parsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def print_for_pipe(text: str) -> None:
    """Print a long text; a reader that stops early, as ``head`` does, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def usage_error(message: str) -> int:
    """Print what is wrong with the arguments and return the exit status for it."""
    print(message, file=sys.stderr)
    return 2
