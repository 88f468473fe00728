"""Collecting a family: its facts at every checkpoint, what its specimen proved, its notes run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from builder.records import compact_json as compact
from builder.records.cache import ResultCache, notes_key, proof_key, records_key

Record = dict[str, Any]
Say = Callable[[str], None]

NOTES = Path("site/families")


class UnknownFamily(ValueError):
    """No family of that name."""


@dataclass(frozen=True)
class Collected:
    """What a family's page is made of: a record per checkpoint, the executed notes and their front matter, where there are any.

    ``made``: what had to be made for it; the rest was kept from before.
    """

    family: str
    records: list[Record]
    notes_html: str | None
    meta: dict[str, str]
    made: tuple[str, ...] = ()


def families(asked: list[str] | None = None) -> list[str]:
    """The families to work on, all that have notes where none is asked for; raises UnknownFamily with the nearest names."""
    from explorer import specimens
    from explorer.specimens.recipes import recipe

    for family in asked or ():
        try:
            recipe(family)
        except specimens.UnknownFamily as error:
            raise UnknownFamily(str(error)) from None
    return list(dict.fromkeys(asked)) if asked else noted()


def noted() -> list[str]:
    """The families that somebody wrote notes on, by name."""
    from explorer.specimens import small

    return [family for family in small.types() if has_notes(family)]


def has_notes(family: str) -> bool:
    return (NOTES / family / "notes.md").is_file()


def proven(site: Path) -> list[str] | None:
    """The families that the last full run of ``check`` proved, in whole or in part; None where there was none with these versions."""
    from builder.records import coverage

    kept = coverage.read(site / coverage.DATA.name)
    if kept is None or any(version(name) != of for name, of in kept["versions"].items()):
        return None
    return [
        family
        for family, found in kept["families"].items()
        if found["verdict"] in ("proven", "in part")
    ]


def proof(
    family: str, say: Say = lambda text: None, kept: ResultCache | None = None
) -> tuple[Record, Record]:
    """The contract's report on the family's specimen and what that specimen is; of earlier, while nothing it depends on has changed."""

    def prove() -> dict[str, Record]:
        say(f"proving {family} on its specimen")
        from explorer import load, specimens
        from explorer.contract import check

        built = specimens.build(family)
        about = {
            "label": f"specimen:{family}",
            "weights": built.weights,
            "prompt": built.prompt,
            "measured": built.measured,
        }
        return {
            "report": check(load(f"specimen:{family}"), built.prompt).to_json(),
            "specimen": about,
        }

    found = (kept or ResultCache()).get("contract", family, proof_key(family), prove)
    return found["report"], found["specimen"]


def record(family: str, checkpoint: str | None, say: Say = lambda text: None) -> Record:
    """One record, complete: facts and proof."""
    from explorer.facts.record import facts

    report, specimen = proof(family, say)
    say(f"collecting {checkpoint or family}")
    return facts(family, checkpoint, report, specimen)


def collect(family: str, fresh: bool = False, say: Say = lambda text: None) -> Collected:
    """Everything a family's page is made of; ``fresh``: nothing of it from before."""
    import explorer.engine.nnsight_api  # noqa: F401  before any modeling module

    kept = ResultCache(fresh)
    with one_thread():  # several families may be collected side by side
        records = kept.get(
            "records", family, records_key(family), lambda: _records(family, say, kept)
        )
        blocks = None
        if has_notes(family):
            say(f"running the notes of {family}")
            path = NOTES / family / "notes.md"
            blocks = kept.get("notes", family, notes_key(path, family), lambda: _run(path, family))
    return _collected(family, records, blocks, kept)


def cached_or_none(family: str) -> Collected | None:
    """What an earlier build collected, where nothing of it has changed; None where something has to be run."""
    kept = ResultCache()
    try:
        records = kept.there("records", family, records_key(family))
        path = NOTES / family / "notes.md"
        blocks = kept.there("notes", family, notes_key(path, family)) if has_notes(family) else None
    except Exception:
        return None
    return (
        None
        if records is None or (blocks is None and has_notes(family))
        else _collected(family, records, blocks, kept)
    )


def _collected(
    family: str, records: list[Record], blocks: list[dict[str, Any]] | None, kept: ResultCache
) -> Collected:
    from builder.notes.run import Block, notes_html, read_notes
    from builder.pages.render import value_link

    if blocks is None:
        return Collected(family, records, None, {}, tuple(kept.made))
    html = notes_html([Block(**block) for block in blocks], value_link(records[0]))
    return Collected(
        family, records, html, read_notes(NOTES / family / "notes.md").meta, tuple(kept.made)
    )


def _records(family: str, say: Say, kept: ResultCache) -> list[Record]:
    """A record of each checkpoint; of the specimen's sizes where the type's default, which stands in for a card, does not run."""
    from explorer.checkpoints import cards
    from explorer.checkpoints.load import SPECIMEN
    from explorer.facts.record import checkpoints, facts
    from explorer.signature import Known

    report, specimen = proof(family, say, kept)
    say(f"collecting {family}")
    try:
        known: Known = []
        return [facts(family, one, report, specimen, known) for one in checkpoints(family)]
    except Exception:  # whatever a forward on shapes alone trips over
        if cards.family_checkpoints(family):
            raise
        return [facts(family, f"{SPECIMEN}{family}", report, specimen)]


def _run(path: Path, family: str) -> list[dict[str, Any]]:
    """Executed notes as plain data."""
    from builder.notes.run import family_namespace, run_notes

    return [asdict(block) for block in run_notes(path, family_namespace(family))]


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


def guide(path: Path, fresh: bool = False) -> tuple[str, dict[str, str]]:
    """A guide, executed: its HTML and front matter. ``family`` there names the specimen it runs on."""
    from builder.notes.run import Block, notes_html, read_notes

    meta = read_notes(path).meta
    family = meta.get("family", "qwen3_next")
    blocks = ResultCache(fresh).get(
        "guide", path.parent.name, notes_key(path, family), lambda: _run(path, family)
    )
    return notes_html([Block(**block) for block in blocks]), meta


def write_facts(family: str, records: list[Record], folder: Path = NOTES) -> Path:
    """Write the family's records beside its page; a record that says the same keeps its date."""
    path = folder / family / "facts.json"
    before: dict[str, Record] = {}
    if path.is_file():
        try:
            before = {
                old["checkpoint"]: old for old in json.loads(path.read_text(encoding="utf-8"))
            }
        except (ValueError, KeyError, TypeError):
            before = {}  # damaged: written anew
    kept = []
    for new in records:
        old = before.get(new["checkpoint"])
        kept.append(old if old is not None and _undated(old) == _undated(new) else new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compact.text(kept) + "\n", encoding="utf-8")
    return path


def _undated(record: Record) -> Record:
    """What a record says, without its date and without the last digits a machine's arithmetic decides."""
    plain = json.loads(json.dumps(record))
    plain["provenance"].pop("generated", None)
    for check in plain.get("contract", {}).get("checks", ()):
        for measured in ("detail", "worst"):
            check.pop(measured, None)
    return plain
