"""What a name given to `load` means: a specimen, a path, or an id."""

from __future__ import annotations

import os
from typing import Any

from explorer import specimens
from explorer.checkpoints import cards, files
from explorer.errors import LoadError, abbreviated

#: The most characters of an id, and of a path quoted in a sentence.
_LONGEST = 500


def named_source(source: Any) -> str:
    """Return what to load as text; raise LoadError where it names nothing."""
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source).strip():
        raise LoadError(
            "Say what to load: 'specimen:<family>', the id of a checkpoint, a checkpoint folder or "
            "a .gguf file."
        )
    source = os.fspath(source)
    there = os.path.exists(expanded(source))
    if len(source) > _LONGEST and not there:
        raise LoadError(
            f"What to load has {len(source):,} characters, more than an id or a path that is "
            f"there: it begins {source[:40]!r}."
        )
    if source in specimens.FAMILIES and not there:
        ids = cards.family_checkpoints(source)
        other = f" or a checkpoint such as {ids[0]!r} with weights=False" if ids else ""
        raise LoadError(
            f"{source!r} is a family: load its small model as 'specimen:{source}'{other}."
        )
    return source


def is_path(source: str) -> bool:
    return (
        os.path.exists(expanded(source))
        or source.startswith(("/", "./", "../", "~"))
        or source.lower().endswith(files.KNOWN)
    )


def expanded(source: str) -> str:
    """A path with its ``~`` resolved; LoadError for the home of an unknown user."""
    path = os.path.expanduser(source)
    if path.startswith("~") and not os.path.exists(path):
        user = path[1:].split("/")[0]
        raise LoadError(
            f"There is no user {user!r} on this machine, whose folder {abbreviated(path)} names; "
            "write the path out."
        )
    return path


def check_options(weights: Any, trust: Any, attention: Any, experts: Any) -> None:
    """Raise LoadError for options of `load` that are of another type, such as "no" for False."""
    for name, given in (("weights", weights), ("trust_remote_code", trust)):
        if not isinstance(given, bool):
            raise LoadError(f"{name} is True or False, not {given!r}.")
    named = {"attn_implementation": attention, "experts_implementation": experts}
    for name, given in named.items():
        if given is not None and not isinstance(given, str):
            raise LoadError(f"{name} is the name of an implementation, not {given!r}.")
