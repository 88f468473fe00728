"""Parse notes and guides: Markdown with YAML front matter, cut into prose and fenced blocks.

A fence's info string decides what happens to its block:

    ```python                executed; what it prints (with ``print``) is shown under it
    ```python raises=NAME    executed; must raise NAME, whose message is shown under it
    ```python no-run         shown only
    ```text                  shown only (any other language too)

The front matter may have ``title``, ``summary``, and ``words``: names from elsewhere that the prose
may use (see `builder.notes.check_names`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.front_matter import front_matter_plugin

Kind = Literal["prose", "run", "shown"]

#: Info strings that also mean Python and would leave a block unrun.
_PYTHON_ALIASES = ("py", "py3", "python3", "pycon", "ipython")


class SnippetError(Exception):
    """Notes that cannot be parsed or whose code fails: ``file:line: what is wrong`` in one
    message.
    """

    def __init__(self, path: Path | str, line: int, message: str) -> None:
        super().__init__(f"{path}:{line}: {message}")
        self.path, self.line, self.message = str(path), line, message

    def __reduce__(self) -> tuple[type[SnippetError], tuple[str, int, str]]:
        return type(self), (self.path, self.line, self.message)  # to pass between processes


@dataclass(frozen=True)
class Block:
    """A stretch of prose or one fenced block; ``line`` is the line of the file on which its text
    begins.
    """

    kind: Kind
    text: str
    line: int
    language: str = ""
    raises: str = ""
    output: str = ""


@dataclass(frozen=True)
class Notes:
    """A parsed file: its path, its front matter and its blocks in order."""

    path: Path
    meta: dict[str, str] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()


@cache
def markdown() -> MarkdownIt:
    """Return the parser of notes: CommonMark with tables and front matter, raw HTML treated as
    text.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").use(front_matter_plugin)
    # `builder.notes.html` removes unsafe addresses; the parser would show such a link as its
    # source.
    parser.validateLink = lambda url: True
    return parser


def read_notes(path: Path | str) -> Notes:
    """Parse a notes file without running anything.

    Raises SnippetError for a file that cannot be read, for front matter that is not a YAML mapping,
    for a fence that is not closed or has an unknown option, and for a fence that would be shown but
    never run.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SnippetError(path, 1, f"these notes cannot be read: {error}") from error
    tokens = markdown().parse(text)
    lines = text.split("\n")
    meta, start = _front_matter(path, tokens, lines)
    return Notes(path, meta, tuple(_blocks(path, tokens, lines, start)))


def _front_matter(path: Path, tokens: list[Token], lines: list[str]) -> tuple[dict[str, str], int]:
    """Return the front matter and the index of the first line after it."""
    if not tokens or tokens[0].type != "front_matter":
        if lines[0].strip() == "---":
            message = "the front matter is not closed with a line of three dashes"
            raise SnippetError(path, 1, message)
        return {}, 0
    try:
        meta = yaml.safe_load(tokens[0].content) or {}
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 2 if error.problem_mark else 1
        raise SnippetError(path, line, f"the front matter is not YAML: {error.problem}") from error
    if not isinstance(meta, dict):
        raise SnippetError(path, 2, "the front matter is not a mapping of 'key: value' lines")
    return {str(key): str(value) for key, value in meta.items()}, _span(tokens[0])[1]


def _blocks(path: Path, tokens: list[Token], lines: list[str], start: int) -> Iterator[Block]:
    """Yield the fenced blocks and the prose between them, from line index ``start`` on."""
    for token in tokens:
        if token.type == "code_block" and token.content.lstrip().startswith(("```", "~~~")):
            raise _unrun(path, _span(token)[0])
        if token.type != "fence":
            continue
        first, end = _span(token)
        if token.level or not lines[first].startswith("```"):
            raise _unrun(path, first)
        closing = lines[end - 1].strip()
        if end - 1 == first or set(closing) != {"`"} or len(closing) < len(token.markup):
            raise SnippetError(path, first + 1, "this fenced block is never closed")
        yield from _prose(lines, start, first)
        yield _fenced(path, first, token.info, "\n".join(lines[first + 1 : end - 1]))
        start = end
    yield from _prose(lines, start, len(lines))


def _span(token: Token) -> tuple[int, int]:
    """Return the first line index of a block token and the index after its last line."""
    first, end = token.map or (0, 0)
    return first, end


def _prose(lines: list[str], start: int, end: int) -> Iterator[Block]:
    """Yield the lines ``[start, end)`` as prose, unless all of them are blank."""
    text = "\n".join(lines[start:end])
    if text.strip():
        yield Block("prose", text, start + 1)


def _unrun(path: Path, index: int) -> SnippetError:
    message = "a fence starts its line with backticks; this one would be shown and never run"
    return SnippetError(path, index + 1, message)


def _fenced(path: Path, index: int, info: str, text: str) -> Block:
    """Return the block of a fence whose first line, at ``index``, has the info string ``info``."""
    language, *options = info.split() or ["text"]
    line = index + 2
    if language != "python":
        if language.lower() in (*_PYTHON_ALIASES, "python"):
            message = (
                f"a block marked {language!r} would not be run; mark it python, or python no-run"
            )
            raise SnippetError(path, index + 1, message)
        return Block("shown", text, line, language)
    kind: Kind = "run"
    raises = ""
    for option in options:
        if option == "no-run":
            kind = "shown"
        elif option.startswith("raises="):
            raises = option.removeprefix("raises=")
        else:
            message = f"a python block has no option {option!r}; there are no-run and raises=NAME"
            raise SnippetError(path, index + 1, message)
    return Block(kind, text, line, language, raises)
