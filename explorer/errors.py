"""The error of loading, which exceptions are bugs of this package, and quoting in one sentence."""

from __future__ import annotations

import re
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class LoadError(ValueError):
    """A model cannot be loaded; the message says what and what to do."""


def first_sentence(error: BaseException) -> str:
    """The first sentence of what a library says, without its further advice."""
    if isinstance(error, KeyError) and type(error) is KeyError:
        return f"there is nothing called {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    sentence = re.split(r"(?<=[a-z)`'\"])\. ", text, maxsplit=1)[0].rstrip(".")
    return sentence if len(sentence) <= 200 else sentence[:199] + "…"


#: What a mistake in a program raises, as opposed to one in what it is given.
_MISTAKES = (AssertionError, AttributeError, LookupError, NameError, TypeError)


_HERE = Path(__file__).parent


def is_internal_error(error: BaseException) -> bool:
    """Whether an error is a bug: raised in this package, of a type it never raises itself."""
    frames = traceback.extract_tb(error.__traceback__)
    return (
        isinstance(error, _MISTAKES)
        and bool(frames)
        and Path(frames[-1].filename).is_relative_to(_HERE)
    )


@contextmanager
def panics_as_errors() -> Generator[None]:
    """Raise a RuntimeError for a panic of a library written in Rust, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(first_sentence(error)) from error


def abbreviated(name: object, most: int = 120) -> str:
    """A path or an id in a sentence; of a very long one both ends."""
    text = str(name)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 + 1 :]}"
