"""Collecting a family: its facts at every checkpoint, what its specimen proved, its notes run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

Record = dict[str, Any]

NOTES = Path("site/families")
_LIBRARY = Path(__file__).resolve().parent.parent / "explorer"

#: Parts of the library that prove nothing: a change there leaves a proof standing.
_NOT_PROVING = ("widgets", "app")


class UnknownFamily(ValueError):
    """No family of that name."""


class MissingNotes(ValueError):
    """A family has no notes to put on its page."""


@dataclass(frozen=True)
class Collected:
    """What a family's page is made of: a record per checkpoint, the executed notes, their front matter."""

    family: str
    records: list[Record]
    notes_html: str
    meta: dict[str, str]


def families(asked: list[str] | None = None) -> list[str]:
    """The families to work on; raises UnknownFamily with the nearest names."""
    from explorer import specimens

    for family in asked or ():
        if family not in specimens.FAMILIES:
            try:
                specimens.config_of(family)
            except specimens.UnknownFamily as error:
                raise UnknownFamily(str(error)) from None
    return list(asked or specimens.FAMILIES)


def proof(family: str, say: Callable[[str], None] = lambda text: None) -> tuple[Record, Record]:
    """The contract's report on the family's specimen and what that specimen is.

    The report is kept under the user's cache folder and used again while neither the
    library, nor the specimen, nor a version has changed.
    """
    from explorer import specimens

    built = specimens.build(family)
    about = {"label": f"specimen:{family}", "weights": built.weights, "prompt": built.prompt, "measured": built.measured}
    kept = _cache() / f"contract-{family}-{_fingerprint()}.json"
    if kept.is_file():
        return json.loads(kept.read_text(encoding="utf-8")), about
    say(f"proving {family} on its specimen")
    from explorer import load
    from explorer.contract import check

    report = check(load(f"specimen:{family}"), built.prompt).to_json()
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(report), encoding="utf-8")
    part.replace(kept)
    return report, about


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bestiary"


def _fingerprint() -> str:
    """What a proof depends on, as one short hash."""
    digest = hashlib.sha256()
    for name in ("torch", "transformers", "nnsight"):
        digest.update(f"{name} {version(name)}\n".encode())
    for path in sorted(_LIBRARY.rglob("*")):
        part = path.relative_to(_LIBRARY).parts[0]
        if path.is_file() and path.suffix in (".py", ".json", ".safetensors") and not part.startswith(_NOT_PROVING):
            digest.update(path.relative_to(_LIBRARY).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def record(family: str, checkpoint: str | None, say: Callable[[str], None] = lambda text: None) -> Record:
    """One record, complete: facts and proof."""
    from explorer.facts import facts

    report, specimen = proof(family, say)
    say(f"collecting {checkpoint or family}")
    return facts(family, checkpoint, report, specimen)


def collect(family: str, say: Callable[[str], None] = lambda text: None) -> Collected:
    """Everything a family's page is made of."""
    import explorer.engine  # noqa: F401  before any modeling module
    from builder.render import value_link
    from builder.snippets import family_namespace, notes_html, read_notes, run_notes
    from explorer import cards

    notes = NOTES / family / "notes.md"
    if not notes.is_file():
        raise MissingNotes(f"{notes} is missing: every family's page has notes.")
    with one_thread():  # several families may be collected side by side
        records = [record(family, checkpoint, say) for checkpoint in cards.family_checkpoints(family)]
        say(f"running the notes of {family}")
        blocks = run_notes(notes, family_namespace(family))
    return Collected(family, records, notes_html(blocks, value_link(records[0])), read_notes(notes).meta)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread for the duration."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def guide(path: Path) -> tuple[str, dict[str, str]]:
    """A guide, executed: its HTML and front matter. ``family`` there names the specimen it runs on."""
    from builder.snippets import family_namespace, notes_html, read_notes, run_notes

    meta = read_notes(path).meta
    return notes_html(run_notes(path, family_namespace(meta.get("family", "qwen3_next")))), meta


def write_facts(family: str, records: list[Record], folder: Path = NOTES) -> Path:
    """Write the family's records beside its page; a record that says the same keeps its date."""
    path = folder / family / "facts.json"
    before: dict[str, Record] = {}
    if path.is_file():
        try:
            before = {old["checkpoint"]: old for old in json.loads(path.read_text(encoding="utf-8"))}
        except (ValueError, KeyError, TypeError):
            before = {}  # damaged: written anew
    kept = []
    for new in records:
        old = before.get(new["checkpoint"])
        kept.append(old if old is not None and _undated(old) == _undated(new) else new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return path


def _undated(record: Record) -> Record:
    """What a record says, without its date and without the last digits a machine's arithmetic decides."""
    plain = json.loads(json.dumps(record))
    plain["provenance"].pop("generated", None)
    for check in plain.get("contract", {}).get("checks", ()):
        for measured in ("detail", "worst"):
            check.pop(measured, None)
    return plain
