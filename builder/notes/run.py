"""Execute notes and guides, so that what they state is true.

The executed blocks of one file run in order in one namespace. A family's notes find there ``model``
(the family's specimen, loaded), ``prompt`` (the specimen's own English sentence), ``torch`` and
``load``; everything else they define themselves. A block that raises, and an assertion that fails,
is a `SnippetError` with file and line.

Names are checked as well as code, see `builder.notes.check_names`.
"""

from __future__ import annotations

import ast
import io
import linecache
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import CodeType
from typing import Any

from builder.notes.check_names import check_names
from builder.notes.read import Block, Notes, SnippetError, read_notes
from builder.time_limit import OutOfTime, processor_time_limit

#: Seconds of processor time that one block may take: code that does not end is ended.
SECONDS = 120.0

#: Numbers the runs, since each needs a file name of its own.
_RUNS = count(1)


def run_notes(path: Path | str, namespace: Mapping[str, Any]) -> list[Block]:
    """Execute a notes file and return its blocks, each with what it printed.

    ``namespace``: the names the blocks may use; it is copied, not changed. Torch is seeded at the
    start of the file and the caller's generator is left as it was. Raises SnippetError on the first
    block that fails and on unknown names.
    """
    import torch

    notes = read_notes(path)
    filename = _register(notes)
    programs = [
        _compiled(notes, block, filename) if block.kind == "run" else None for block in notes.blocks
    ]
    for line, message in check_names(notes.blocks, namespace, notes.meta.get("words", "").split()):
        raise SnippetError(path, line, message)
    scope = {**namespace, "__name__": "__notes__", "__file__": filename}
    done = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for block, program in zip(notes.blocks, programs, strict=True):
            done.append(block if program is None else _run(notes, block, program, scope, filename))
    return done


def family_namespace(family: str) -> dict[str, Any]:
    """Return the names that the notes of ``family`` may use: its specimen, its prompt, ``torch``
    and ``load``.

    Raises UnknownFamily for a family without a specimen.
    """
    import torch

    from explorer import load
    from explorer.specimens.recipes import recipe

    prompt = recipe(family).prompt
    return {"model": load(f"specimen:{family}"), "prompt": prompt, "torch": torch, "load": load}


def _register(notes: Notes) -> str:
    """Put the executed lines into `linecache` at their own line numbers, for tracebacks and the
    engine; return their file name.

    The name is new for each run, since Python and the engine cache source by file name.
    """
    filename = f"<{notes.path.name} run {next(_RUNS)}>"
    last = max((block.line + block.text.count("\n") for block in notes.blocks), default=0)
    lines = ["\n"] * last
    for block in notes.blocks:
        if block.kind == "run":
            for offset, line in enumerate(block.text.split("\n")):
                lines[block.line - 1 + offset] = f"{line}\n"
    # No modification time: linecache never checks such an entry against the disk.
    linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    return filename


def _compiled(notes: Notes, block: Block, filename: str) -> CodeType:
    try:
        compile(block.text, filename, "exec")  # reports syntax errors at the block's own lines
    except SyntaxError as error:
        line = block.line + (error.lineno or 1) - 1
        raise SnippetError(notes.path, line, f"this is not Python: {error.msg}") from error
    tree = ast.parse(block.text)
    ast.increment_lineno(tree, block.line - 1)
    return compile(tree, filename, "exec", optimize=0)  # keep assertions under -O


def _run(
    notes: Notes, block: Block, program: CodeType, scope: dict[str, Any], filename: str
) -> Block:
    """Execute one block in ``scope``; return it with its output, or raise SnippetError."""
    printed = io.StringIO()
    # A print of the notes' own instead of a redirected stdout, so that files can run in parallel
    # threads.
    scope["print"] = partial(print, file=printed)
    try:
        with processor_time_limit(SECONDS):
            exec(program, scope)
    except OutOfTime as error:
        line = _line_of(error, filename) or block.line
        raise SnippetError(notes.path, line, str(error)) from None
    except (Exception, SystemExit) as error:  # SystemExit: sys.exit in notes must not end the build
        if block.raises and block.raises in (kind.__name__ for kind in type(error).__mro__):
            message = f"{block.raises}: {_message(error, filename, notes.path.name)}"
            output = "\n".join(filter(None, [printed.getvalue().rstrip(), message]))
            return replace(block, output=output)
        line = _line_of(error, filename) or block.line
        message = _failure(error, filename, notes.path.name, line)
        raise SnippetError(notes.path, line, message) from error
    if block.raises:
        raise SnippetError(
            notes.path, block.line, f"this block should raise {block.raises} and does not"
        )
    return replace(block, output=printed.getvalue().rstrip())


def _line_of(error: BaseException, filename: str) -> int | None:
    """Return the deepest line of the notes in an error's traceback, or in that of its cause;
    None if in neither.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(current.__traceback__)
            if frame.filename == filename
        ]
        if lines:
            return lines[-1]
        current = current.__cause__ or current.__context__
    return None


def _failure(error: BaseException, filename: str, name: str, line: int) -> str:
    """Describe an error that a block raised at ``line``."""
    message = _message(error, filename, name)
    if isinstance(error, AssertionError):
        source = linecache.getline(filename, line).strip()
        return f"the assertion does not hold: {message or source}"
    return f"{type(error).__name__}: {message}"


def _message(error: BaseException, filename: str, name: str) -> str:
    """Return an error's message with the notes' own file name instead of that of this run."""
    return str(error).strip().replace(filename, name)
