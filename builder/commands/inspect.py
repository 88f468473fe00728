"""``python -m builder inspect``: a model's signature for a terminal."""

from __future__ import annotations

import os
import sys

from builder.records.collect import one_thread


def run(source: str, block: str | None, numbers: bool) -> int:
    """Print the signature of a checkpoint, a family or a folder; 2 with one sentence where there is none."""
    from explorer import load
    from explorer.checkpoints import cards
    from explorer.errors import LoadError
    from explorer.signature import NoSignature, signature
    from explorer.signature.text import UnknownBlock, text
    from explorer.specimens import UnknownFamily
    from explorer.specimens.small import types

    if source in types() and not os.path.exists(source):
        source = next(iter(cards.family_checkpoints(source)), f"default:{source}")
    try:
        with one_thread():
            written = text(signature(load(source, weights=False)), block, numbers)
    except (LoadError, NoSignature, UnknownBlock, UnknownFamily) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        print(written, flush=True)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
