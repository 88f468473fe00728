"""The training text: what the ``bible`` command prints, split by chapter.

The King James text is in the public domain. It is read from the command each time and is not part
of the repository.
"""

from __future__ import annotations

import shutil
import subprocess
from itertools import groupby

COMMAND = "bible"
ALL_VERSES = "Gen1:1-Rev22:21"
HELD_OUT_EVERY = 20  # chapters 10, 30, 50 …, counted from 0, are never trained on


class CorpusError(ValueError):
    """The training text is not available on this machine."""


def read_verses() -> list[str]:
    """Return the lines ``Book1:2 text``, one verse each.

    Raises CorpusError with one sentence where the command is missing or fails.
    """
    program = shutil.which(COMMAND)
    if program is None:
        raise CorpusError(
            f"The training text comes from the command {COMMAND!r}, which is not on PATH; "
            "on Debian it is in the package bible-kjv."
        )
    # -f prints one verse a line, its reference first; -l sets a line length that breaks none.
    finished = subprocess.run(
        [program, "-f", "-l", "100000", ALL_VERSES], capture_output=True, text=True, check=False
    )
    lines = [line for line in finished.stdout.splitlines() if line.strip()]
    if finished.returncode != 0 or not lines:
        raise CorpusError(
            f"The command {COMMAND!r} printed no text (exit status {finished.returncode})."
        )
    return lines


def chapters(lines: list[str]) -> list[str]:
    """Join the lines of verses into one paragraph per chapter, without references."""
    pairs = [line.split(" ", 1) for line in lines]
    by_chapter = groupby(pairs, key=lambda pair: pair[0].rsplit(":", 1)[0])
    return [" ".join(text.strip() for _, text in verses) for _, verses in by_chapter]


def split_held_out(all_chapters: list[str]) -> tuple[list[str], list[str]]:
    """Return the training chapters and the held-out ones, chosen by their position."""
    middle = HELD_OUT_EVERY // 2
    held_out = [text for i, text in enumerate(all_chapters) if i % HELD_OUT_EVERY == middle]
    train = [text for i, text in enumerate(all_chapters) if i % HELD_OUT_EVERY != middle]
    return train, held_out
