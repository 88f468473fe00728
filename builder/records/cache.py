"""Reuse results while nothing they depend on has changed: contract reports, records, executed
notes.

Each result is a JSON file in the user's cache folder, named after its kind, its family and a hash
of everything it depends on: the library's sources, the family's recipe, cards and notes, and the
versions of what runs the models.

Plain files, not a database such as diskcache: results are JSON already, which loads without running
code (diskcache unpickles), and replacing a file is atomic, so two processes may write at once.
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

import platformdirs

_LIBRARY = Path(__file__).resolve().parents[2] / "explorer"

#: The packages that run the models.
_VERSIONS = ("torch", "transformers", "nnsight")

#: Folders of the library that only draw.
_DRAWING = ("widgets", "app")

#: Folders that do not affect a contract report.
_NOT_CONTRACT = (*_DRAWING, "facts", "traits", "signature", "checkpoints/cards")

#: The builder's modules that affect what executed notes print.
_NOTES_MODULES = ("read.py", "run.py", "check_names.py")

#: Bytes that all results may take together; the least recently used are deleted beyond it. A build
#: of every family writes about 60 MB, so several checkouts share the folder.
MAX_BYTES = 512 << 20


def folder() -> Path:
    """Return the folder of the results: ``bestiary`` in the user's cache folder."""
    return platformdirs.user_cache_path("bestiary", appauthor=False)


@dataclass
class ResultCache:
    """Read and write results on disk.

    fresh: ignore the results of earlier builds. made: the kinds of results that had to be computed.
    """

    fresh: bool = False
    made: list[str] = field(default_factory=list)

    def get_or_make(self, kind: str, family: str, key: str, make: Callable[[], Any]) -> Any:
        """Return the cached result, or call ``make``, which returns JSON data, and cache that."""
        if (cached := self.get(kind, family, key)) is not None:
            return cached
        self.made.append(kind)
        return self.store(kind, family, key, make())

    def store(self, kind: str, family: str, key: str, result: Any) -> Any:
        """Cache a result, JSON data, and return it."""
        _write(_path(kind, family, key), result)
        return result

    def get(self, kind: str, family: str, key: str) -> Any:
        """Return the cached result; None where there is none or its file is damaged."""
        if self.fresh:
            return None
        path = _path(kind, family, key)
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            os.utime(path)
        except (OSError, ValueError):
            return None
        return result


def _path(kind: str, family: str, key: str) -> Path:
    return folder() / f"{kind}-{family}-{key}.json"


def _write(path: Path, result: Any) -> None:
    """Write a result and make room for it; a folder that cannot be written only means no reuse."""
    part = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        _prune()


def _prune() -> None:
    """Delete the least recently used results until the rest take at most `MAX_BYTES`."""
    files = []
    for path in folder().glob("*.json"):
        with suppress(FileNotFoundError):  # another process prunes at the same time
            files.append((path.stat().st_mtime, path.stat().st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > MAX_BYTES:
            path.unlink(missing_ok=True)


# -- what results depend on -------------------------------------------------------


def contract_key(family: str) -> str:
    """Return the key of the contract's report on a family's specimen."""
    return _hash(_sources(_NOT_CONTRACT), _recipe(family))


def variants_key(family: str) -> str:
    """Return the key of the contract's outcomes on the variants of a family's specimen."""
    builder = _digests([Path(__file__).with_name("variants.py")])
    return _hash(_sources(_NOT_CONTRACT), builder, _recipe(family))


def records_key(family: str) -> str:
    """Return the key of a family's records, which include the contract's report."""
    return _hash(_sources(_DRAWING), _recipe(family), _cards([family]) or _default_config(family))


def notes_key(path: Path, family: str) -> str:
    """Return the key of executed notes: their text, and every family and checkpoint it names
    besides its own.
    """
    text = path.read_text(encoding="utf-8")
    others = sorted(set(_mentioned(text)) - {family})
    builder = _digests(Path(__file__).parents[1] / "notes" / name for name in _NOTES_MODULES)
    return _hash(
        text,
        _sources(_DRAWING),
        builder,
        _recipe(family),
        [_recipe(other) for other in others],
        _cards([family, *others]),
    )


@cache
def _sources(without: tuple[str, ...]) -> str:
    """Hash the library's code, some folders left out, the specimens' tokenizer, and the versions
    of `_VERSIONS`.
    """
    code = (
        path
        for path in sorted(_LIBRARY.rglob("*.py"))
        if not path.relative_to(_LIBRARY).as_posix().startswith(without)
    )
    tokenizer = _LIBRARY / "specimens" / "tokenizer.json"
    return _hash(_digests([*code, tokenizer]), {name: version(name) for name in _VERSIONS})


@cache
def _recipe(family: str) -> str:
    """Hash how the family's specimen is made, with its weights and measurements."""
    from explorer import specimens
    from explorer.specimens.recipes import recipe

    made = recipe(family)
    files = [path for path in (made.weights, made.measured_path) if path and path.is_file()]
    config = specimens.config_of(family).to_dict()
    return _hash(asdict(made) | {"weights": None}, config, _digests(files))


def _default_config(family: str) -> dict[str, Any]:
    from explorer.specimens.small import default_config

    return default_config(family).to_dict()


def _cards(families: Iterable[str]) -> list[dict[str, Any]]:
    from explorer.checkpoints import cards

    return [
        asdict(card) for family in families for card in cards.all_cards() if card.family == family
    ]


def _mentioned(text: str) -> Iterable[str]:
    """Yield the families whose specimen or checkpoint a text names."""
    from explorer.checkpoints import cards
    from explorer.specimens.small import types

    yield from (
        name for name in re.findall(r"(?:specimen|default):([\w-]+)", text) if name in types()
    )
    yield from (card.family for card in cards.all_cards() if card.id in text)


def _digests(paths: Iterable[Path]) -> list[list[str]]:
    """Return the name of each file and a hash of its content."""
    return [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in paths]


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]
