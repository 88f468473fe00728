"""Collect what a family's page is made of: records of its checkpoints, the contract's report,
executed notes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.records import coverage
from builder.records.cache import ResultCache, contract_key, notes_key, records_key
from builder.records.threads import one_thread

if TYPE_CHECKING:  # notes need the packages of the extra "site", the commands without pages do not
    from builder.notes.read import Block

Record = dict[str, Any]

#: Called with a few words on each step that begins.
Progress = Callable[[str], None]

NOTES = Path("site/families")


class UnknownFamily(ValueError):
    """There is no family of that name."""


@dataclass(frozen=True)
class Collected:
    """What a family's page is made of.

    records: one per checkpoint, the default first. blocks: the executed notes, None where there are
    none. meta: the front matter of the notes. made: the kinds of results that were not in the
    cache.
    """

    family: str
    records: list[Record]
    blocks: list[Block] | None
    meta: dict[str, str]
    made: tuple[str, ...] = ()


def _silent(text: str) -> None:
    """Report nothing."""


# -- which families ---------------------------------------------------------------


def requested_families(names: list[str] | None = None) -> list[str]:
    """Return the named families without repetitions, or those with notes where none is named.

    Raises UnknownFamily with the nearest names.
    """
    from explorer import specimens
    from explorer.specimens.recipes import recipe

    for family in names or ():
        try:
            recipe(family)
        except specimens.UnknownFamily as error:
            raise UnknownFamily(str(error)) from None
    return list(dict.fromkeys(names)) if names else families_with_notes()


def families_with_notes() -> list[str]:
    """Return the families that somebody wrote notes on, by name."""
    from explorer.specimens import small

    return [family for family in small.types() if has_notes(family)]


def has_notes(family: str) -> bool:
    return _notes_path(family).is_file()


def proven_families(site: Path) -> list[str] | None:
    """Return the families with the verdict "proven" or "in part"; None where the data is of
    other versions or missing.
    """
    data = coverage.read(site / coverage.DATA.name)
    if data is None or any(version(name) != tested for name, tested in data["versions"].items()):
        return None
    return [
        family
        for family, outcome in data["families"].items()
        if outcome["verdict"] in ("proven", "in part")
    ]


# -- collecting -------------------------------------------------------------------


def contract_report(
    family: str, progress: Progress = _silent, results: ResultCache | None = None
) -> tuple[Record, Record]:
    """Return the contract's report on the family's specimen and a description of that specimen,
    cached where possible.
    """

    def check() -> dict[str, Record]:
        progress(f"checking the contract on the specimen of {family}")
        from explorer import contract, load, specimens

        built = specimens.build(family)
        specimen = {
            "label": f"specimen:{family}",
            "weights": built.weights,
            "prompt": built.prompt,
            "measured": built.measured,
        }
        with one_thread():
            report = contract.check(load(f"specimen:{family}"), built.prompt).to_json()
        return {"report": report, "specimen": specimen}

    results = results or ResultCache()
    found = results.get_or_make("contract", family, contract_key(family), check)
    return found["report"], found["specimen"]


def record(family: str, checkpoint: str | None, progress: Progress = _silent) -> Record:
    """Return one record with the contract's report in it."""
    from explorer.facts.record import facts

    report, specimen = contract_report(family, progress)
    progress(f"collecting {checkpoint or family}")
    return dict(facts(family, checkpoint, report, specimen))


def collect(family: str, fresh: bool = False, progress: Progress = _silent) -> Collected:
    """Collect everything a family's page is made of; ``fresh``: without results of earlier
    builds.
    """
    import explorer.engine.nnsight_api  # noqa: F401  before any modeling module

    results = ResultCache(fresh)
    with one_thread():
        records = results.get_or_make(
            "records", family, records_key(family), lambda: _records(family, progress, results)
        )
        blocks = None
        if has_notes(family):
            progress(f"running the notes of {family}")
            path = _notes_path(family)
            key = notes_key(path, family)
            blocks = results.get_or_make("notes", family, key, lambda: _execute(path, family))
    return _collected(family, records, blocks, results)


def collect_cached(family: str) -> Collected | None:
    """Return what an earlier build collected; None where something has changed since."""
    results = ResultCache()
    try:
        records = results.get("records", family, records_key(family))
        blocks = None
        if has_notes(family):
            blocks = results.get("notes", family, notes_key(_notes_path(family), family))
            if blocks is None:
                return None
    except (
        Exception
    ):  # a family whose configuration cannot be made: collecting it reports the error
        return None
    return None if records is None else _collected(family, records, blocks, results)


def execute_guide(path: Path, fresh: bool = False) -> tuple[list[Block], dict[str, str]]:
    """Execute a guide and return its blocks and front matter, whose ``family`` names the
    specimen it runs on.
    """
    from builder.notes.read import Block, read_notes

    meta = read_notes(path).meta
    family = meta.get("family", "qwen3_next")
    blocks = ResultCache(fresh).get_or_make(
        "guide", path.parent.name, notes_key(path, family), lambda: _execute(path, family)
    )
    return [Block(**block) for block in blocks], meta


def _notes_path(family: str) -> Path:
    return NOTES / family / "notes.md"


def _collected(
    family: str, records: list[Record], blocks: list[dict[str, Any]] | None, results: ResultCache
) -> Collected:
    from builder.notes.read import Block, read_notes

    made = tuple(results.made)
    if blocks is None:
        return Collected(family, records, None, {}, made)
    meta = read_notes(_notes_path(family)).meta
    return Collected(family, records, [Block(**block) for block in blocks], meta, made)


def _records(family: str, progress: Progress, results: ResultCache) -> list[Record]:
    """Return a record of each checkpoint.

    A family without a card has the type's default sizes in its place, or the specimen's where those
    do not run.
    """
    from explorer.checkpoints import cards
    from explorer.checkpoints.load import SPECIMEN
    from explorer.facts.record import checkpoints, facts
    from explorer.signature import Known

    report, specimen = contract_report(family, progress, results)
    progress(f"collecting {family}")
    try:
        known: Known = []
        return [
            dict(facts(family, checkpoint, report, specimen, known))
            for checkpoint in checkpoints(family)
        ]
    except Exception:  # whatever a forward without weights fails on
        if cards.family_checkpoints(family):
            raise
        return [dict(facts(family, f"{SPECIMEN}{family}", report, specimen))]


def _execute(path: Path, family: str) -> list[dict[str, Any]]:
    """Execute notes and return their blocks as JSON data."""
    from builder.notes.run import family_namespace, run_notes

    return [asdict(block) for block in run_notes(path, family_namespace(family))]
