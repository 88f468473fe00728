"""Results that are used again while nothing they depend on has changed: proofs, records, executed notes.

Each is a JSON file in the user's cache folder, named after its kind, its family and a
hash of all it depends on: the library's own sources, the family's recipe, cards and
notes, and the versions of what runs the models.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

_LIBRARY = Path(__file__).resolve().parents[2] / "explorer"

#: What runs the models.
_VERSIONS = ("torch", "transformers", "nnsight")

#: Parts of the library that show things and make none.
_SHOWING = ("widgets", "app")

#: Parts that a proof does not go through.
_NOT_PROVING = (*_SHOWING, "facts", "traits", "signature", "checkpoints/cards")

#: What the builder itself does to notes.
_OF_NOTES = ("run.py", "check_names.py")

#: Results of one kind and family that are kept side by side, for other checkouts of the same user.
_SIDE_BY_SIDE = 4


def folder() -> Path:
    """Where results are kept: ``bestiary`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bestiary"


@dataclass
class ResultCache:
    """Kept results, read and written; ``made`` lists by kind what had to be made. ``fresh`` uses none of those there are."""

    fresh: bool = False
    made: list[str] = field(default_factory=list)

    def get(self, kind: str, family: str, key: str, make: Callable[[], Any]) -> Any:
        """The result of ``make``, plain data, unless it is kept under the same key."""
        if (found := self.there(kind, family, key)) is not None:
            return found
        result = make()
        self.made.append(kind)
        _write(_path(kind, family, key), result)
        _prune(kind, family)
        return result

    def there(self, kind: str, family: str, key: str) -> Any:
        """What is kept under a key; None where there is nothing, or where it is damaged."""
        if self.fresh:
            return None
        path = _path(kind, family, key)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            os.utime(path)
            return found
        except (OSError, ValueError):
            return None


def _path(kind: str, family: str, key: str) -> Path:
    return folder() / f"{kind}-{family}-{key}.json"


def _write(path: Path, result: Any) -> None:
    """Keep a result; where the folder cannot be written there is nothing to use again, and that is all."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _prune(kind: str, family: str) -> None:
    """Drop all but the results of one kind and family that were used last."""
    named = re.compile(rf"{re.escape(kind)}-{re.escape(family)}-[0-9a-f]+\.json")
    try:
        found = sorted(
            (path for path in folder().iterdir() if named.fullmatch(path.name)),
            key=lambda path: path.stat().st_mtime,
        )
        for path in found[:-_SIDE_BY_SIDE]:
            path.unlink(missing_ok=True)
    except OSError:
        pass  # somebody else tidies up at the same time


# -- what results depend on -------------------------------------------------------


def proof_key(family: str) -> str:
    """Of the contract's report on a family's specimen."""
    return _hash(_sources(_NOT_PROVING), _recipe(family))


def records_key(family: str) -> str:
    """Of a family's records, the report in them included."""
    return _hash(_sources(_SHOWING), _recipe(family), _cards([family]) or _default(family))


def notes_key(path: Path, family: str) -> str:
    """Of executed notes: their text, and the families and checkpoints that it names beside its own."""
    text = path.read_text(encoding="utf-8")
    named = sorted(set(_mentioned(text)) - {family})
    builder = _files(Path(__file__).parents[1] / "notes" / name for name in _OF_NOTES)
    return _hash(
        text,
        _sources(_SHOWING),
        builder,
        _recipe(family),
        [_recipe(other) for other in named],
        _cards([family, *named]),
    )


@cache
def _sources(without: tuple[str, ...]) -> str:
    """The library's code and what every model of it shares, parts of it left out, and the versions of what runs it."""
    code = (
        path
        for path in sorted(_LIBRARY.rglob("*.py"))
        if not path.relative_to(_LIBRARY).as_posix().startswith(without)
    )
    shared = _LIBRARY / "specimens" / "tokenizer.json"
    return _hash(_files([*code, shared]), {name: version(name) for name in _VERSIONS})


@cache
def _recipe(family: str) -> Any:
    """How the family's specimen is made, its weights and what was measured of it included."""
    from explorer import specimens
    from explorer.specimens.recipes import recipe

    made = recipe(family)
    files = [
        path for path in (made.weights, made.measured_path) if path is not None and path.is_file()
    ]
    return _hash(
        asdict(made) | {"weights": None}, specimens.config_of(family).to_dict(), _files(files)
    )


def _default(family: str) -> Any:
    from explorer.specimens.small import default_config

    return default_config(family).to_dict()


def _cards(families: Iterable[str]) -> list[Any]:
    from explorer.checkpoints import cards

    return [
        asdict(card) for family in families for card in cards.all_cards() if card.family == family
    ]


def _mentioned(text: str) -> Iterable[str]:
    """The families whose specimen or checkpoint a text names."""
    from explorer.checkpoints import cards
    from explorer.specimens.small import types

    yield from (
        name for name in re.findall(r"(?:specimen|default):([\w-]+)", text) if name in types()
    )
    yield from (card.family for card in cards.all_cards() if card.id in text)


def _files(paths: Iterable[Path]) -> list[list[str]]:
    """Name and content of files, the content as a hash."""
    return [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in paths]


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]
