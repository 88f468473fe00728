"""Notes and guides: Markdown whose Python is executed, so that what they say is true.

A file is prose and fenced blocks, with optional ``key: value`` lines between two
``---`` lines at the top (``title``, ``summary``, and ``words``: names from elsewhere
that the prose may use, see below). A fence's first line says what happens to it:

    ```python                executed; what it prints (with ``print``) is shown under it
    ```python raises=NAME    executed; must raise NAME, whose message is shown under it
    ```python no-run         shown only
    ```text                  shown only (any other language too)

The executed blocks of one file run in order in one namespace. A family's notes find
there ``model`` (the family's specimen, loaded), ``prompt`` (the specimen's own English
sentence), ``torch`` and ``load``; everything else they define themselves. A block
that raises, and an assertion that fails, is a `SnippetError` naming file and line.

Names are checked as well as code. ``{value:mlp.router_logits}`` must be a standard
value, and a name in backticks with an underscore in it must be one that something
here has: a standard value, the model's own modules, configuration and source, this
library, torch, or the notes' own code; what comes from none of these (an option of a
chat template, say) is listed in ``words``. A value named on a host that does not have
it (``self_attn.betas``) is refused too.

Two lists of blocks come out: `read_notes` gives them as written, `run_notes` with
what each printed; `notes_html` turns either into HTML.
"""

from __future__ import annotations

import ast
import io
import linecache
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import CodeType
from typing import Any

from builder.notes.check_names import check_names
from builder.notes.html import notes_html

__all__ = [
    "Block",
    "Notes",
    "SnippetError",
    "family_namespace",
    "notes_html",
    "read_notes",
    "run_notes",
]

PROSE, RUN, SHOWN = "prose", "run", "shown"

_FENCE = re.compile(r"^(`{3,})\s*([^`]*)$")
#: What Markdown takes for a fence too: indented, in a list or a quotation, or of tildes.
_OTHER_FENCE = re.compile(r"^\s*(?:(?:>|[-*+]|\d+[.)])\s*)*(`{3,}|~{3,})")

#: Words that also mean Python, and would leave a block unrun.
_ALSO_PYTHON = ("py", "py3", "python3", "pycon", "ipython")
_SERIAL = count(1)


class SnippetError(Exception):
    """Notes that cannot be believed: ``file:line: what is wrong`` in one message."""

    def __init__(self, path: Path | str, line: int, message: str) -> None:
        super().__init__(f"{path}:{line}: {message}")
        self.path, self.line, self.message = str(path), line, message


@dataclass(frozen=True)
class Block:
    """A stretch of prose or one fenced block; ``line`` is the file's line of its first line of text."""

    kind: str
    text: str
    line: int
    language: str = ""
    raises: str = ""
    output: str = ""


@dataclass(frozen=True)
class Notes:
    """A parsed file: where it is, its front matter, its blocks in order."""

    path: Path
    meta: dict[str, str] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()


def read_notes(path: Path | str) -> Notes:
    """Parse a notes file without running anything.

    Raises SnippetError on a fence that is not closed, on an option a fence does not
    know, on a front matter line without a colon, and when the file cannot be read.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SnippetError(path, 1, f"these notes cannot be read: {error}") from error
    meta, start = _front_matter(path, lines)
    return Notes(path, meta, tuple(_blocks(path, lines, start)))


def run_notes(path: Path | str, namespace: Mapping[str, Any]) -> list[Block]:
    """Execute a notes file and return its blocks, each with what it printed.

    ``namespace`` is what the blocks find; it is copied, not changed. Randomness is
    seeded at the start of the file and the caller's generator is left as it was.
    Raises SnippetError on the first block that does not hold and on unknown names.
    """
    import torch

    notes = read_notes(path)
    filename = _register(notes)
    programs = [
        _compiled(notes, block, filename) if block.kind == RUN else None for block in notes.blocks
    ]
    for line, message in check_names(notes.blocks, namespace, notes.meta.get("words", "").split()):
        raise SnippetError(path, line, message)
    scope = {**namespace, "__name__": "__notes__", "__file__": filename}
    done = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for block, program in zip(notes.blocks, programs):
            done.append(block if program is None else _run(notes, block, program, scope, filename))
    return done


def family_namespace(family: str) -> dict[str, Any]:
    """What the notes of ``family`` find: its specimen loaded, its prompt, ``torch`` and ``load``.

    Raises UnknownFamily for a family without a specimen.
    """
    import torch

    from explorer import load
    from explorer.specimens.recipes import recipe

    prompt = recipe(family).prompt
    return {"model": load(f"specimen:{family}"), "prompt": prompt, "torch": torch, "load": load}


def _front_matter(path: Path, lines: list[str]) -> tuple[dict[str, str], int]:
    """The ``key: value`` lines between two ``---`` lines, and the index of the first line after them."""
    if not lines or lines[0].strip() != "---":
        return {}, 0
    meta: dict[str, str] = {}
    for index, line in enumerate(lines[1:], start=1):
        if line.strip() == "---":
            return meta, index + 1
        key, colon, value = line.partition(":")
        if not colon:
            raise SnippetError(
                path, index + 1, f"front matter is 'key: value' lines, this is not one: {line!r}"
            )
        meta[key.strip()] = value.strip()
    raise SnippetError(path, 1, "the front matter is not closed with a line of three dashes")


def _blocks(path: Path, lines: list[str], start: int) -> list[Block]:
    """Cut the lines from ``start`` on into prose and fenced blocks."""
    blocks: list[Block] = []
    prose: list[str] = []
    index = first = start

    def flush() -> None:
        if any(line.strip() for line in prose):
            blocks.append(Block(PROSE, "\n".join(prose), first + 1))
        prose.clear()

    while index < len(lines):
        fence = _FENCE.match(lines[index])
        if not fence:
            if _OTHER_FENCE.match(lines[index]):
                raise SnippetError(
                    path,
                    index + 1,
                    "a fence here starts its line with backticks; this one would be shown and never run",
                )
            prose.append(lines[index])
            index += 1
            continue
        flush()
        end = _fence_end(path, lines, index, len(fence[1]))
        blocks.append(_fenced(path, index, fence[2], "\n".join(lines[index + 1 : end])))
        index = first = end + 1
    flush()
    return blocks


def _fence_end(path: Path, lines: list[str], opened: int, ticks: int) -> int:
    for index in range(opened + 1, len(lines)):
        stripped = lines[index].strip()
        if len(stripped) >= ticks and set(stripped) == {"`"}:
            return index
    raise SnippetError(path, opened + 1, "this fenced block is never closed")


def _fenced(path: Path, index: int, info: str, text: str) -> Block:
    """The block a fence opens: ``info`` is its first line without the backticks."""
    language, *options = info.split() or ["text"]
    line = index + 2
    if language != "python" and (language.lower() in _ALSO_PYTHON or language.lower() == "python"):
        raise SnippetError(
            path,
            index + 1,
            f"a block marked {language!r} would not be run; mark it python, or python no-run",
        )
    if language != "python":
        return Block(SHOWN, text, line, language)
    raises = ""
    kind = RUN
    for option in options:
        if option == "no-run":
            kind = SHOWN
        elif option.startswith("raises="):
            raises = option.removeprefix("raises=")
        else:
            raise SnippetError(
                path,
                index + 1,
                f"a python block has no option {option!r}; there are no-run and raises=NAME",
            )
    return Block(kind, text, line, language, raises)


def _register(notes: Notes) -> str:
    """Put the file's executed lines, at their own line numbers, where Python and the engine look for source.

    The name is new for each run: both read a name once and keep what they read.
    """
    filename = f"<{notes.path.name} run {next(_SERIAL)}>"
    last = max((block.line + block.text.count("\n") for block in notes.blocks), default=0)
    lines = ["\n"] * last
    for block in notes.blocks:
        if block.kind == RUN:
            for offset, line in enumerate(block.text.split("\n")):
                lines[block.line - 1 + offset] = f"{line}\n"
    # No modification time: linecache never checks such an entry against the disk.
    linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    return filename


def _compiled(notes: Notes, block: Block, filename: str) -> CodeType:
    try:
        compile(block.text, filename, "exec")  # says all that is wrong, at the block's own lines
    except SyntaxError as error:
        line = block.line + (error.lineno or 1) - 1
        raise SnippetError(notes.path, line, f"this is not Python: {error.msg}") from error
    tree = ast.parse(block.text)
    ast.increment_lineno(tree, block.line - 1)
    return compile(tree, filename, "exec", optimize=0)  # assertions hold under -O as well


def _run(
    notes: Notes, block: Block, program: CodeType, scope: dict[str, Any], filename: str
) -> Block:
    """Execute one block in ``scope``; return it with its output, or raise SnippetError."""
    printed = io.StringIO()
    # The notes' own print, not the process's output: files can run in threads beside each other.
    scope["print"] = partial(print, file=printed)
    try:
        exec(program, scope)
    except (
        Exception,
        SystemExit,
    ) as error:  # notes that end the process would end the build, unbuilt
        if block.raises and block.raises in (kind.__name__ for kind in type(error).__mro__):
            said = f"{block.raises}: {_plain(error, filename, notes.path.name)}"
            return replace(
                block, output="\n".join(filter(None, [printed.getvalue().rstrip(), said]))
            )
        line = _line_of(error, filename) or block.line
        raise SnippetError(
            notes.path, line, _described(error, filename, notes.path.name, line)
        ) from error
    if block.raises:
        raise SnippetError(
            notes.path, block.line, f"this block should raise {block.raises} and does not"
        )
    return replace(block, output=printed.getvalue().rstrip())


def _line_of(error: BaseException, filename: str) -> int | None:
    """The deepest line of the notes in an error's traceback, or in that of the error behind it."""
    seen: set[int] = set()
    found = None
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        step = error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename == filename:
                found = step.tb_lineno
            step = step.tb_next
        if found is not None:
            return found
        error = error.__cause__ or error.__context__
    return None


def _described(error: BaseException, filename: str, name: str, line: int) -> str:
    said = _plain(error, filename, name)
    if isinstance(error, AssertionError):
        source = linecache.getline(filename, line).strip()
        return f"the assertion does not hold: {said or source}"
    return f"{type(error).__name__}: {said}"


def _plain(error: BaseException, filename: str, name: str) -> str:
    """An error's message with the notes under their own name, not that of this run."""
    return str(error).strip().replace(filename, name)
